"""Reading BSON.jl files: what each document means, sharing, depth, damage, hostile input."""

from __future__ import annotations

import io
import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from julia_writer import I32, NT, Bson, Char, S, Sym, T, bson_bytes, bson_file, fn

from recur.errors import FormatError
from recur.io import bson
from recur.io.julia import Struct, Symbol, Type, undefined

REAL = Path(__file__).resolve().parents[2] / "shared" / "realfiles"


def read(data: bytes):
    return bson.read(io.BytesIO(data))


def read_one(value):
    return read(bson_file(value=value))["value"]


@pytest.mark.parametrize(
    "value", [1, -(2**40), 0.5, True, False, None, "café", "", (1, "a", (2.0,)), [], [1, None]]
)
def test_a_plain_value_arrives_as_the_python_value(value):
    got = read_one(value)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.uint32, np.uint8])
def test_a_number_that_bson_lacks_arrives_as_a_numpy_scalar(kind):
    got = read_one(kind(3))
    assert got == 3 and type(got) is kind


def test_symbols_and_characters_arrive_as_strings():
    assert read_one(Sym("layers")) == "layers" and isinstance(read_one(Sym("x")), Symbol)
    assert [read_one(Char(c)) for c in "aé∂😀"] == list("aé∂😀")


@pytest.mark.parametrize("code", ["f4", "f8", "f2", "i4", "i8", "u1", "u4", "?", "c8", "c16"])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 4), (0,), (0, 3)])
def test_an_array_has_julias_shape_in_fortran_order_and_owns_aligned_memory(code, shape, rng):
    value = (10 * rng.standard_normal(shape)).astype(code)
    got = read(bson_file(pad="x", value=value))["value"]
    assert got.dtype == value.dtype and got.shape == shape
    np.testing.assert_array_equal(got, value)
    assert got.flags.f_contiguous and got.flags.aligned and got.flags.writeable


def test_a_bool_array_with_other_bits_set_is_true_there():
    doc = {"tag": "array", "type": Bson().lower(T("Core.Bool")), "size": [3], "data": b"\0\2\1"}
    got = read(bson_bytes({"x": doc}))["x"]
    assert got.tolist() == [False, True, True] and got.view(np.uint8).tolist() == [0, 1, 1]


def test_an_array_of_other_things_is_an_object_array_or_a_list():
    value = np.empty((2, 2), object)
    value[:] = [[1, "a"], [None, 2.0]]
    assert read_one(value).tolist() == [[1, "a"], [None, 2.0]]
    assert read_one([fn("Base.tanh"), 1])[0].type.path == ("Base", "#tanh")


def test_elements_without_a_numpy_type_stay_raw():
    doc = Bson().lower(np.zeros((2, 1), "f8"))
    doc["type"] = Bson().lower(T("Base.Complex", (T("Core.Int64"),)))
    doc["data"] = bytes(range(32))
    got = read(bson_bytes({"x": doc}))["x"]
    assert got.dtype == "V16" and got.shape == (2, 1)
    assert got.tobytes() == bytes(range(32))


def test_an_array_of_a_zero_size_type_is_filled():
    doc = {"tag": "array", "type": Bson().lower(T("Core.Nothing")), "size": [2, 2], "data": b""}
    got = read(bson_bytes({"x": doc}))["x"]
    assert got.shape == (2, 2) and all(item is None for item in got.ravel())


def test_a_known_struct_has_names_and_an_unknown_one_positions():
    cell = S(T("Flux.LSTMCell"), {"Wi": 1, "Wh": 2, "b": 3, "h": 4, "c": 5})
    got = read_one(cell)
    assert list(got) == ["Wi", "Wh", "b", "h", "c"] and got["c"] == got[4] == 5
    mine = read_one(S(T("Main.LSTMCell"), {"Wi": 1, "Wh": 2, "b": 3, "h": 4, "c": 5}))
    assert mine.names is None and mine[4] == 5 and str(mine.type) == "LSTMCell"
    with pytest.raises(KeyError):
        mine["Wi"]


def test_a_named_tuple_has_its_names():
    got = read_one(NT(layers=(NT(weight=1.0, σ=()),)))
    assert got["layers"][0]["weight"] == 1.0 and got["layers"][0]["σ"] == ()
    assert "bias" not in got["layers"][0] and got["layers"][0].get("bias", 7) == 7


def test_a_dict_is_a_dict_and_one_with_array_keys_two_lists():
    kind, key = T("Base.Dict"), np.ones(2)
    got = read_one(S(kind, {"keys": ["a", "b"], "values": [1, [2]]}))
    assert got == {"a": 1, "b": [2]}
    got = read_one(S(T("Base.IdDict"), {"keys": [key], "values": [1]}))
    assert got["keys"][0].tolist() == [1.0, 1.0] and got["values"] == [1]


def test_an_undefined_field_is_undefined():
    assert read_one([S(T("BSON.Undef"))]) == [undefined]


def test_a_type_keeps_its_path_and_parameters():
    got = read_one(T("Main.Core.Array", (T("Core.Float32"), 2)))
    assert isinstance(got, Type) and got.path == ("Core", "Array") and got.params[1] == 2
    assert read_one(S(T("NNlib.#relu"))).type.package == "NNlib"


@pytest.mark.parametrize("root", [(), ("Main",)])
@pytest.mark.parametrize("word", [int, I32])
@pytest.mark.parametrize("seed", range(5))
def test_every_key_order_word_size_and_path_root_reads_the_same(root, word, seed, rng):
    weight = rng.standard_normal((4, 3)).astype("f4")
    model = S(T("Flux.Dense"), {"W": weight, "b": weight[:, 0].copy(), "σ": fn("Base.tanh")})
    doc = Bson(word, root, random.Random(seed)).document({"m": (model, 5), "twice": [weight]})
    got = read(bson_bytes(doc))
    np.testing.assert_array_equal(got["m"][0]["weight"], weight)
    assert got["twice"][0] is got["m"][0]["weight"] and got["m"][1] == 5
    assert got["m"][0]["σ"].type.path == ("Base", "#tanh")


def test_what_julia_shared_is_one_object_also_through_types():
    h = np.zeros(3, "f4")
    cell = S(T("Flux.LSTMCell"), {"Wi": 1, "Wh": 2, "b": 3, "h": h, "c": np.ones(3, "f4")})
    got = read_one(S(T("Flux.Recur"), {"cell": cell, "init": (h, 1), "state": (2, 3)}, True))
    assert got["init"][0] is got["cell"]["h"]
    shared = {"tag": "backref", "ref": 1}
    struct_ = {"tag": "struct", "type": shared, "data": []}
    kind = {"tag": "datatype", "name": ["Flux", "Chain"], "params": []}
    got = read(bson_bytes({"a": struct_, "b": struct_, "_backrefs": [kind]}))
    assert got["a"].type is got["b"].type


def test_a_struct_may_refer_to_itself():
    node = S(T("Main.Node"), {}, True)
    node.fields.update(me=node, inside=([node], {"d": node}))
    got = read_one(node)
    assert got[0] is got and got[1][0][0] is got and got[1][1]["d"] is got


def test_a_type_may_refer_to_itself():
    kind = {"tag": "datatype", "name": ["A"], "params": [{"tag": "backref", "ref": 1}]}
    got = read(bson_bytes({"t": {"tag": "backref", "ref": 1}, "_backrefs": [kind]}))["t"]
    assert got.params[0] is got


@pytest.mark.parametrize(
    "entries",
    [
        [{"tag": "backref", "ref": 1}],
        [{"tag": "backref", "ref": 2}, [1]],
        [{"tag": "tuple", "data": [{"tag": "backref", "ref": 1}]}],
        [{"tag": "backref", "ref": 5}],
        [],
    ],
)
def test_a_reference_that_leads_nowhere_is_refused(entries):
    with pytest.raises(FormatError, match="shared value"):
        read(bson_bytes({"x": {"tag": "backref", "ref": 1}, "_backrefs": entries}))


def test_references_doubled_fifty_times_cost_nothing():
    entries: list = [[1, 2]]
    for n in range(1, 50):
        entries.append([{"tag": "backref", "ref": n}] * 2)
    got = read(bson_bytes({"x": {"tag": "backref", "ref": 50}, "_backrefs": entries}))["x"]
    for _ in range(49):
        assert got[0] is got[1]
        got = got[0]
    assert got == [1, 2]


def test_the_code_of_an_anonymous_function_is_never_looked_at():
    poison = {"tag": "backref", "ref": 99}
    kind = {"tag": "jl_anonymous", "typename": poison, "params": [poison]}
    got = read(bson_bytes({"f": {"tag": "struct", "type": kind, "data": [7]}}))["f"]
    assert got.type.anonymous and got[0] == 7


def test_a_top_level_that_is_a_dict_by_string_reads_like_one_by_symbol():
    top = Bson().lower(S(T("Base.Dict"), {"keys": ["m"], "values": [3]}))
    assert read(bson_bytes(top)) == {"m": 3}


# One level of nesting as (start of an element, elements after it): the first is the variable's own.
_TYPE = bson_bytes({"type": {"tag": "datatype", "name": ["A"], "params": []}})[4:-1]
_LEVELS = {
    "list": [(b"\x04a\0", b""), (b"\x040\0", b"")],
    "dict": [(b"\x03a\0", b""), (b"\x03a\0", b"")],
    "tuple": [
        (b"\x03a\0", b""),
        (b"\x04data\0", bson_bytes({"tag": "tuple"})[4:-1]),
        (b"\x030\0", b""),
    ],
    "struct": [
        (b"\x03a\0", b""),
        (b"\x04data\0", bson_bytes({"tag": "struct"})[4:-1] + _TYPE),
        (b"\x030\0", b""),
    ],
}


@pytest.mark.parametrize("kind", sorted(_LEVELS))
def test_nesting_may_be_deeper_than_pythons_stack(kind):
    first, *repeated = _LEVELS[kind]
    levels = [first, *repeated * 20_000]
    heads, body, tails = [], struct.pack("<i", 5) + b"\0", []
    size = len(body)
    for head, tail in reversed(levels):
        size += 4 + len(head) + len(tail) + 1
        heads.append(struct.pack("<i", size) + head)
        tails.append(tail + b"\0")
    got = read(b"".join(reversed(heads)) + body + b"".join(tails))
    depth = 0
    while isinstance(got, (dict, list, tuple, Struct)) and len(got):
        got = got["a"] if isinstance(got, dict) else got[0]
        depth += 1
    assert depth >= 20_000


def sample(rng=None) -> bytes:
    """A file with one of everything."""
    weight = np.arange(6, dtype="f4").reshape(2, 3)
    cell = S(T("Flux.GRUCell"), {"Wi": weight, "Wh": weight, "b": weight[:, 0].copy(), "h": 1})
    node = S(T("Main.Node"), {"x": np.float32(2)}, True)
    node.fields["me"] = node
    return bson_bytes(
        Bson(rng=rng).document(
            {
                "model": S(T("Flux.Chain"), {"layers": (cell, fn("NNlib.softmax"))}),
                "state": NT(a=weight, b=(), c=Char("é")),
                "more": [1, 2.5, None, True, "text", Sym("s"), node],
                "raw": np.arange(5, dtype="u1"),
                "dict": S(T("Base.Dict"), {"k": ["a"], "v": [np.ones((2, 2), "f8")]}),
            }
        )
    )


def test_every_truncation_is_refused():
    data = sample()
    for end in range(len(data)):
        with pytest.raises(FormatError):
            read(data[:end])
        patched = struct.pack("<i", end) + data[4:end]  # with the outer length put right
        if end > 4:
            with pytest.raises(FormatError):
                read(patched)


def test_bytes_after_the_document_are_refused():
    with pytest.raises(FormatError, match="complete"):
        read(sample() + b"\0")


def try_to_read(data: bytes) -> None:
    try:
        read(data)
    except FormatError:
        pass


@settings(max_examples=120)
@given(st.data())
def test_mutated_files_raise_nothing_but_format_errors(data):
    file = bytearray(sample())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(4, len(file) - 1))
        file[at] = data.draw(
            st.sampled_from([0, 1, 2, 3, 4, 5, 0x7F, 0x80, 0xFF]) | st.integers(0, 255)
        )
    try_to_read(bytes(file))


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=4)
    | st.binary(max_size=9)
    | st.integers(0, 9).map(lambda n: {"tag": "backref", "ref": n}),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["tag", "type", "data", "size", "name", "params", "path", "body", "ref"]
            ),
            inner
            | st.sampled_from(
                [
                    "array",
                    "struct",
                    "tuple",
                    "symbol",
                    "datatype",
                    "unionall",
                    "ref",
                    "backref",
                    "svec",
                ]
            ),
            max_size=5,
        )
    ),
    max_leaves=25,
)


@settings(max_examples=120)
@given(json_like, st.lists(json_like, max_size=4))
def test_documents_of_any_shape_raise_nothing_but_format_errors(doc, backrefs):
    try_to_read(bson_bytes({"x": doc, "_backrefs": backrefs}))


def test_hostile_sizes_cost_no_memory():
    kind = Bson().lower(T("Core.Nothing"))
    float_ = Bson().lower(T("Core.Float32"))
    huge = {"tag": "array", "type": kind, "size": [2**40, 2**20], "data": b""}
    many = [{"tag": "array", "type": kind, "size": [20000], "data": []} for _ in range(300)]
    wide = {"tag": "array", "type": float_, "size": [0, 2**62], "data": b""}
    negative = {"tag": "array", "type": float_, "size": [-1, -4], "data": b"\0" * 16}
    tracemalloc.start()
    for doc in (huge, many, wide, negative):
        with pytest.raises(FormatError, match="size"):
            read(bson_bytes({"x": doc}))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000_000


def test_reading_a_large_array_takes_little_more_memory_than_the_array(tmp_path):
    path = tmp_path / "large.bson"
    path.write_bytes(bson_file(w=np.zeros((1000, 5000), "f4"), v=np.ones(2_000_000, "f4")))
    size = path.stat().st_size
    tracemalloc.start()
    with open(path, "rb", buffering=0) as file:
        tree = bson.read(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tree["w"].shape == (1000, 5000) and tree["v"].sum() == 2_000_000
    assert peak < 1.1 * size


@pytest.mark.oracle
@pytest.mark.parametrize("source", ["written", *(["real"] if REAL.exists() else [])])
def test_the_documents_equal_those_of_pymongo(source):
    oracle = pytest.importorskip("bson")
    files = [sample(), sample(random.Random(1))]
    if source == "real":
        files = [path.read_bytes() for path in sorted(REAL.glob("*.bson"))]
    for data in files:
        from recur.io._source import Source

        assert _plain(bson.parse(Source(io.BytesIO(data)))) == oracle.decode(data)


def _plain(doc):
    if isinstance(doc, dict):
        return {name: _plain(value) for name, value in doc.items()}
    if isinstance(doc, list):
        return [_plain(value) for value in doc]
    return doc.tobytes() if isinstance(doc, np.ndarray) else doc


@pytest.mark.skipif(not REAL.exists(), reason="the real files are not here")
def test_real_files_have_the_values_that_were_saved():
    def load(name):
        with open(REAL / name, "rb") as file:
            return bson.read(file)

    recur = load("dnc_lstm_flux010.bson")["model"]
    inner = recur["cell"][0]
    cell = inner["cell"]
    assert [cell[n].shape for n in cell] == [(108, 8), (108, 27), (108,), (27,), (27,)]
    assert inner["init"] == (cell["h"], cell["c"]) or inner["init"][0] is cell["h"]
    assert inner["state"][0].dtype == np.float64
    chain = load("flux_docs_mymodel.bson")["model"]
    assert [str(layer.type) for layer in chain["layers"]] == [
        "Flux.Dense",
        "Flux.Dense",
        "NNlib.#softmax",
    ]
    state = load("flux_docs_checkpoint_state.bson")["model_state"]
    assert state["layers"][0]["weight"].tolist() == [[1.0], [1.0]]
    for bits in ("32", "64"):
        got = load(f"bsonjl_test_41_from_{bits}bit.bson")["obj"]
        assert list(got) == ["name"] and got["name"].tolist() == [1, 2]
    assert isinstance(load("mcreel_tracker_dense.bson")["model"], Struct)
