"""Reading JLD2 files: every kind of object that JLD2 writes, sharing, damage, hostile input."""

from __future__ import annotations

import io
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from julia_writer import BASE, NT, Char, Committed, Jld2, S, Sym, T, fn, jld2_file, lookup3

from recur.errors import FormatError
from recur.io import _hdf5, jld2
from recur.io.julia import Struct, Symbol

SCALAR = struct.pack("<4B", 2, 0, 0, 0)

REAL = Path(__file__).resolve().parents[2] / "shared" / "realfiles"

WRITERS = {
    "0.1.0": {"version": "0.1.0", "attribute": 2},
    "0.1.1": {"version": "0.1.1", "attribute": 1},
    "0.2.0": {"version": "0.2.0", "attribute": 3, "compact": 0},
    "0.1.1 compressed": {"version": "0.1.1", "compress": True},
    "0.2.0 compressed": {"version": "0.2.0", "compact": 0, "compress": True},
}


@pytest.fixture(params=sorted(WRITERS))
def write(request):
    """Write variables in the manner of one JLD2 version."""
    return lambda **variables: Jld2(**WRITERS[request.param]).file(variables)


def read(data: bytes, checksums: bool = True):
    return jld2.read(io.BytesIO(data), checksums)


@pytest.mark.parametrize("value", [1, -(2**40), 0.5, True, False, None, "café", "", ()])
def test_a_plain_value_arrives_as_the_python_value(write, value):
    got = read(write(value=value))["value"]
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.uint32, np.int8])
def test_other_numbers_arrive_as_numpy_scalars(write, kind):
    got = read(write(value=kind(3)))["value"]
    assert got == 3 and type(got) is kind


def test_symbols_and_characters_arrive_as_strings(write):
    got = read(write(s=Sym("σ"), c=Char("é")))
    assert got == {"s": "σ", "c": "é"} and isinstance(got["s"], Symbol)


@pytest.mark.parametrize("code", ["f4", "f8", "f2", "i4", "i8", "u1", "?", "c8", "c16"])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 4), (0,), (0, 3), (70, 40)])
def test_an_array_has_julias_shape_in_fortran_order_and_owns_its_memory(write, code, shape, rng):
    value = (10 * rng.standard_normal(shape)).astype(code)
    got = read(write(pad=True, value=value))["value"]
    if value.size == 0 and value.dtype.kind == "c":
        assert np.shape(got) in (shape, (0,))
        return
    assert got.dtype == value.dtype and got.shape == shape
    np.testing.assert_array_equal(got, value)
    assert got.flags.f_contiguous and got.flags.aligned and got.flags.writeable


def test_a_struct_has_its_names_and_its_type(write):
    cell = S(T("Flux.LSTMCell", (T("Core.Array"),)), {"Wi": np.ones((4, 2), "f4"), "n": 3})
    got = read(write(cell=cell))["cell"]
    assert isinstance(got, Struct) and str(got.type) == "Flux.LSTMCell"
    assert str(got.type.params[0]) == "Core.Array"
    assert got["Wi"].shape == (4, 2) and got["n"] == 3


def test_tuples_and_named_tuples_nest_in_line(write):
    value = NT(layers=(NT(weight=np.ones(2, "f4"), n=1, name="a"), (1.5, Sym("b"))), last=True)
    got = read(write(value=value))["value"]
    assert got.names == ("layers", "last") and got["last"] is True
    first, second = got["layers"]
    assert first["name"] == "a" and first["n"] == 1 and first["weight"].tolist() == [1, 1]
    assert second == (1.5, "b")


def test_fields_of_zero_size_are_put_back_into_tuples_and_named_tuples(write):
    value = NT(layers=(NT(σ=(), weight=np.ones(2)), fn("NNlib.relu"), None, NT(weight=1.0)))
    layers = read(write(value=value))["value"]["layers"]
    assert len(layers) == 4 and layers[2] is None and layers[3]["weight"] == 1.0
    assert layers[0].names == ("σ", "weight") and layers[0]["σ"] == ()
    assert layers[1].type.name == "#relu" and layers[1].type.package == "NNlib"


def test_a_known_layer_gets_its_activation_back_from_its_type(write):
    tanh = fn("Base.tanh")
    kind = T("Flux.Dense", (tanh.type, T("Core.Array"), T("Core.Array")))
    layer = S(kind, {"weight": np.ones((2, 3)), "bias": np.ones(2), "σ": tanh})
    got = read(write(layer=layer))["layer"]
    assert got["σ"].type.name == "#tanh" and got["weight"].shape == (2, 3)


def test_format_2_tells_of_zero_size_fields_in_any_struct():
    value = S(T("Main.Mine"), {"f": fn("Base.sin"), "x": 1.0, "g": ()})
    got = read(Jld2("0.2.0").file({"value": value}))["value"]
    assert got.names == ("f", "x", "g") and got["f"].type.name == "#sin" and got["g"] == ()
    got = read(Jld2("0.1.1").file({"value": value}))["value"]
    assert got.names == ("x",)


def test_what_julia_shared_is_one_object(write):
    h = np.ones(3, "f4")
    state = S(T("Main.State"), {"h": h}, True)
    got = read(write(a=(h, h), b=[h, state, state]))
    assert got["a"][0] is got["a"][1] is got["b"][0]
    assert got["b"][1] is got["b"][2] and got["b"][1]["h"] is got["b"][0]


def test_a_struct_may_refer_to_itself(write):
    node = S(T("Main.Node"), {"n": 1}, True)
    node.fields.update(me=node, inside=(2, node))
    got = read(write(node=node))["node"]
    assert got["me"] is got and got["inside"][1] is got and got["n"] == 1


def test_a_vector_of_anything_is_a_list_and_a_matrix_an_object_array(write):
    value = np.empty((2, 2), object)
    value[:] = [[1, "a"], [None, 2.0]]
    got = read(write(m=value, v=[1, "a", fn("Base.tanh"), T("Core.Int64")]))
    assert got["m"].tolist() == [[1, "a"], [None, 2.0]]
    assert got["v"][:2] == [1, "a"] and got["v"][2].type.name == "#tanh"
    assert str(got["v"][3]) == "Core.Int64"


def test_an_array_of_a_zero_size_type_is_filled(write):
    assert read(write(v=[None, None, None]))["v"] == [None, None, None]


def test_groups_are_dicts_and_types_are_left_out(write):
    got = read(write(epoch={"a": 1, "b": np.ones(2)}, x=NT(a=1.0)))
    assert set(got) == {"epoch", "x"} and got["epoch"]["a"] == 1


def test_a_dict_written_as_pairs_is_a_dict():
    writer = Jld2()
    pair = T("Base.Pair")
    pairs = writer.write(
        [S(pair, {"first": "a", "second": 1}), S(pair, {"first": "b", "second": 2})]
    )
    described = writer._datatype_type()
    vector = writer.describe(T("Core.Array", (pair, 1)))
    written = writer.attribute("written_type", described, SCALAR, vector)
    reference = struct.pack("<B3BI", 0x37, 0, 0, 0, 8)
    kind = writer.commit(reference, T("Base.Dict"), [written])
    root = writer.group({"d": writer.dataset(kind, SCALAR, struct.pack("<Q", pairs))})
    assert read(writer.finish(root)) == {"d": {"a": 1, "b": 2}}


def test_a_continued_header_is_read_on():
    writer = Jld2()
    one, two = writer.write(1), writer.write(2)
    link = struct.pack("<BBBB", 1, 16, 1, 1) + b"b" + struct.pack("<Q", two)
    block = b"OCHK" + struct.pack("<BHB", 6, len(link), 0) + link
    at = writer.place(block + struct.pack("<I", lookup3(block)))
    more = (0x10, 0, struct.pack("<QQ", at, len(block) + 4))
    first = (0x06, 0, struct.pack("<BBBB", 1, 16, 1, 1) + b"a" + struct.pack("<Q", one))
    assert read(writer.finish(writer.header([first, more]))) == {"a": 1, "b": 2}


def test_shuffled_and_deflated_arrays_are_read():
    value = np.arange(1000, dtype="f8")
    writer = Jld2(compress=True)
    original = writer.header

    def shuffled(messages):
        changed = []
        for kind, flags, body in messages:
            if kind == 0x0B:
                body = struct.pack("<BB", 2, 2) + struct.pack("<3HI", 2, 0, 1, 8) + body[2:]
            changed.append((kind, flags, body))
        return original(changed)

    writer.header = shuffled
    planes = np.ascontiguousarray(value.view("u1").reshape(-1, 8).T).reshape(-1).view("f8")
    got = read(writer.file({"x": planes}))["x"]
    np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize(("number", "name"), [(307, "bzip2"), (32004, "LZ4"), (32015, "Zstandard")])
def test_other_compression_is_refused_by_name(number, name):
    writer = Jld2(compress=True)
    original = writer.header

    def renamed(messages):
        body = struct.pack("<BBHHHHI", 2, 1, number, 0, 0, 1, 5)
        return original([(k, f, body if k == 0x0B else b) for k, f, b in messages])

    writer.header = renamed
    with pytest.raises(FormatError, match=name):
        read(writer.file({"x": np.ones(5)}))


# ---- damage ----------------------------------------------------------------------------------


def sample(**options) -> bytes:
    """A file with one of everything."""
    weight = np.arange(6, dtype="f4").reshape(2, 3)
    node = S(T("Main.Node"), {"x": 1.0}, True)
    node.fields["me"] = node
    dense = S(T("Flux.Dense", (fn("Base.tanh").type,)), {"weight": weight, "bias": False})
    return Jld2(**options).file(
        {
            "state": NT(layers=(NT(Wi=weight, σ=(), name="a"), fn("NNlib.relu"), Sym("s"))),
            "list": [1, 2.5, None, True, "text", node, dense, weight],
            "chars": Char("é"),
            "z": np.ones((2, 2), "c8"),
            "empty": np.ones((0, 2)),
            "none": [None, None],
            "group": {"a": 1},
        }
    )


def test_every_truncation_is_refused():
    data = sample()
    for end in range(len(data)):
        with pytest.raises(FormatError):
            read(data[:end])


def test_a_flipped_bit_in_a_header_is_noticed_by_its_checksum():
    data = bytearray(jld2_file(x=1.0))
    at = data.index(b"OHDR") + 12
    data[at] ^= 1
    with pytest.raises(FormatError, match="checksum"):
        read(bytes(data))


def test_lookup3_gives_jenkins_own_numbers():
    assert _hdf5.lookup3(b"") == 0xDEADBEEF
    assert _hdf5.lookup3(b"Four score and seven years ago") == 0x17770551


@given(st.binary(max_size=60))
def test_lookup3_agrees_with_its_twin(data):
    assert _hdf5.lookup3(data) == lookup3(data)


def try_to_read(data: bytes) -> None:
    try:
        read(data, checksums=False)
    except FormatError:
        pass


@settings(max_examples=120)
@given(st.sampled_from([{}, {"version": "0.2.0", "compact": 0}, {"compress": True}]), st.data())
def test_mutated_files_raise_nothing_but_format_errors(options, data):
    file = bytearray(sample(**options))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(BASE, len(file) - 1))
        file[at] = data.draw(
            st.sampled_from([0, 1, 2, 3, 8, 0x10, 0x80, 0xFF]) | st.integers(0, 255)
        )
    try_to_read(bytes(file))


def test_field_names_that_are_no_strings_are_passed_over():
    """Found by mutation: the attribute held lists, which do not hash."""
    value = S(T("Main.Mine"), {"f": fn("Base.sin"), "x": 1.0})
    writer = Jld2("0.2.0")
    plain = writer.attribute

    def damaged(name, datatype, space, data):
        if name == "field_names":
            datatype = datatype[:9] + b"\0" + datatype[10:]  # no longer a string
            datatype = datatype[:1] + b"\0" + datatype[2:]
        return plain(name, datatype, space, data)

    writer.attribute = damaged
    got = read(writer.file({"value": value}))["value"]
    assert got.names == ("x",)


@settings(max_examples=60)
@given(st.data())
def test_mutated_addresses_raise_nothing_but_format_errors(data):
    """Every u64 that is an address is pointed at the start of another structure."""
    file = bytearray(sample())
    starts = [i for i in range(BASE, len(file)) if file[i : i + 4] in (b"OHDR", b"GCOL")]
    places = [
        i
        for i in range(BASE, len(file) - 8)
        if int.from_bytes(file[i : i + 8], "little") + BASE in starts
    ]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.sampled_from(places))
        target = data.draw(st.sampled_from(starts)) - BASE
        file[at : at + 8] = target.to_bytes(8, "little")
    try_to_read(bytes(file))


def test_many_arrays_on_the_same_bytes_are_refused():
    writer = Jld2(compact=0)
    value = np.zeros(50_000)
    at = writer.place(value.tobytes())
    layout = struct.pack("<BBQQ", 4, 1, at, value.nbytes)
    space = struct.pack("<4BQ", 2, 1, 0, 1, len(value))
    number = struct.pack("<B3BIHHBBBBI", 0x31, 0x20, 0x3F, 0, 8, 0, 64, 52, 11, 0, 52, 0x3FF)
    links = {
        f"x{i}": writer.header([(0x01, 0, space), (0x03, 0, number), (0x08, 0, layout)])
        for i in range(200)
    }
    tracemalloc.start()
    with pytest.raises(FormatError, match="overlap"):
        read(writer.finish(writer.group(links)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * value.nbytes


def test_a_deflated_array_that_claims_too_much_is_refused():
    data = bytearray(Jld2(compress=True).file({"x": np.zeros(100)}))
    for old in (struct.pack("<QQ", 100, 8),):
        at = data.index(old)
        data[at : at + 8] = struct.pack("<Q", 1 << 50)
    at = data.index(struct.pack("<4BQ", 2, 1, 0, 1, 100)) + 4
    data[at : at + 8] = struct.pack("<Q", 1 << 50)
    with pytest.raises(FormatError, match="claims more"):
        read(bytes(data), checksums=False)


def test_types_doubled_fifty_times_cost_nothing():
    """A tuple type of two equal types, fifty times over: 2^50 ghosts if each were made."""
    writer = Jld2()
    types = writer._datatype_type()
    address = writer.write(T("Core.Nothing"))
    for _ in range(50):
        described = writer.text("Core.Tuple") + writer.references([address, address])
        address = writer.dataset(types, SCALAR, described)
    described = writer.text("Core.Tuple") + writer.references([address, address])
    opaque = struct.pack("<B3BI", 0x35, 0, 0, 0, 1)
    head = writer.attribute("julia_type", types, SCALAR, described)
    empty = writer.attribute("empty", opaque, SCALAR, b"\1")
    kind = Committed(writer.header([(0x03, 0x40, opaque), head, empty]), opaque)
    root = writer.group({"x": writer.dataset(kind, struct.pack("<4B", 2, 0, 0, 2), b"")})
    got = read(writer.finish(root))["x"]
    depth = 0
    while got is not None:
        assert got[0] is got[1]
        got, depth = got[0], depth + 1
    assert depth == 51


def test_references_may_nest_deeper_than_pythons_stack():
    writer = Jld2()
    inner = writer.write(1.0)
    anything = struct.pack("<Q", writer.write(T("Core.Any")))
    reference = struct.pack("<B3BI", 0x37, 0, 0, 0, 8)
    extra = [writer.attribute("julia_type", reference, SCALAR, anything)]
    space = struct.pack("<4BQ", 2, 1, 0, 1, 1)
    for _ in range(5000):
        inner = writer.dataset(reference, space, struct.pack("<Q", inner), extra)
    got = read(writer.finish(writer.group({"x": inner})))["x"]
    for _ in range(5000):
        (got,) = got
    assert got == 1.0


def test_reading_a_large_array_takes_little_more_memory_than_the_array(tmp_path):
    path = tmp_path / "large.jld2"
    path.write_bytes(
        jld2_file(state=NT(w=np.zeros((1000, 5000), "f4"), v=np.ones(2_000_000, "f4")))
    )
    size = path.stat().st_size
    tracemalloc.start()
    with open(path, "rb", buffering=0) as file:
        tree = jld2.read(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tree["state"]["w"].shape == (1000, 5000)
    assert peak < 1.1 * size


@pytest.mark.oracle
@pytest.mark.parametrize("source", ["written", *(["real"] if REAL.exists() else [])])
def test_arrays_equal_those_of_h5py(source, tmp_path):
    h5py = pytest.importorskip("h5py")
    paths = sorted(REAL.glob("*.jld2"))
    if source == "written":
        for i, options in enumerate(WRITERS.values()):
            (tmp_path / f"{i}.jld2").write_bytes(sample(**options, width=1))
        paths = sorted(tmp_path.glob("*.jld2"))
    for path in paths:
        with open(path, "rb") as file:
            mine = jld2.read(file)
        with h5py.File(path, "r") as file:
            for name in mine:
                if isinstance(file[name], h5py.Dataset) and file[name].shape is not None:
                    compare(mine[name], file[name][()], file)


def compare(mine, theirs, file) -> None:
    """Compare a value with what h5py reads, following its references."""
    h5py = pytest.importorskip("h5py")
    if isinstance(theirs, h5py.Reference):
        target = file[theirs]
        if target.shape is not None:
            compare(mine, target[()], file)
    elif isinstance(mine, (Struct, tuple)):
        names = list(mine) if isinstance(mine, Struct) else [str(i + 1) for i in range(len(mine))]
        for name in theirs.dtype.names:
            if name != "me":  # which is a cycle
                compare(mine[names.index(name)], theirs[name], file)
    elif isinstance(mine, np.ndarray) and mine.dtype.kind == "c":
        np.testing.assert_array_equal(mine, (theirs["re"] + 1j * theirs["im"]).T)
    elif isinstance(mine, np.ndarray):
        np.testing.assert_array_equal(mine, np.asarray(theirs).T)
    elif isinstance(mine, list):
        for one, other in zip(mine, theirs, strict=True):
            compare(one, other, file)
    elif isinstance(mine, str) and not isinstance(theirs, np.void):
        assert mine.encode() == (theirs if isinstance(theirs, bytes) else theirs.tobytes())
    elif isinstance(mine, (bool, int, float)):
        assert mine == theirs


@pytest.mark.skipif(not REAL.exists(), reason="the real files are not here")
def test_real_files_have_the_values_that_were_saved():
    def load(name):
        with open(REAL / name, "rb") as file:
            return jld2.read(file)

    assert load("flux_xy_arrays.jld2")["x"].shape == (1, 61)
    model = load("seq2seq_letter_model.jld2")["single_stored_object"]
    assert str(model.type) == "seq2seq" and model["Wyb"].shape == (28, 5) and model["m"] == 5
