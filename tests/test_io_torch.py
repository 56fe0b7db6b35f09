"""Weights of PyTorch: layouts, state_dicts, and its files read without it."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recur
from recur.errors import FormatError, ShapeError, StateError
from recur.io import safetensors
from recur.io import torch as torch_io

# ---------------------------------------------------------------------- without PyTorch


def numbers(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def state_dict_of(rng, kind, n_in, n_out, layers=1, both=False, bias=True, prefix="rnn."):
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[kind]
    found = {}
    for k in range(layers):
        for suffix in ("", "_reverse") if both else ("",):
            width = n_in if k == 0 else n_out * (1 + both)
            end = f"_l{k}{suffix}"
            found[f"{prefix}weight_ih{end}"] = numbers(rng, gates * n_out, width)
            found[f"{prefix}weight_hh{end}"] = numbers(rng, gates * n_out, n_out)
            if bias:
                found[f"{prefix}bias_ih{end}"] = numbers(rng, gates * n_out)
                found[f"{prefix}bias_hh{end}"] = numbers(rng, gates * n_out)
    return found


@pytest.mark.parametrize("make", [recur.RNNCell, recur.LSTMCell, recur.GRUCell])
@pytest.mark.parametrize("bias", [True, False])
def test_a_cell_goes_to_the_layout_of_torch_and_back_unchanged(make, bias, rng, dtype):
    cell = make(3, 5, bias=bias, bias_init=recur.glorot_uniform, dtype=dtype, rng=rng)
    kind = make.__name__.removesuffix("Cell")
    back = torch_io.cell_from_torch(kind, **torch_io.cell_to_torch(cell))
    assert back.dtype == dtype
    for name, array in recur.state_dict(cell).items():
        np.testing.assert_array_equal(recur.state_dict(back)[name], array)


def test_the_inner_bias_of_a_gru_is_kept_where_it_is(rng):
    cell = recur.GRUCell(3, 5, recurrent_bias=True, bias_init=recur.glorot_uniform, rng=rng)
    cell.bh = numbers(rng, 5)
    arrays = torch_io.cell_to_torch(cell)
    np.testing.assert_array_equal(arrays["b_hh"][10:], cell.bh)
    assert not arrays["b_hh"][:10].any()
    np.testing.assert_array_equal(torch_io.cell_from_torch("GRU", **arrays).bh, cell.bh)
    with pytest.raises(FormatError, match="recurrent_bias=True"):
        torch_io.cell_from_torch("GRU", **arrays, recurrent_bias=False)


def test_a_gru_keeps_an_inner_bias_of_zeros_only_where_asked_to(rng):
    arrays = torch_io.cell_to_torch(recur.GRUCell(3, 5, rng=rng))
    assert torch_io.cell_from_torch("GRU", **arrays).bh is None
    assert torch_io.cell_from_torch("GRU", **arrays, recurrent_bias=True).bh.shape == (5,)
    del arrays["b_ih"], arrays["b_hh"]
    assert torch_io.cell_from_torch("GRU", **arrays, recurrent_bias=True).bh.shape == (5,)


def test_a_cell_from_torch_shares_no_memory_with_the_arrays(rng):
    arrays = torch_io.cell_to_torch(recur.LSTMCell(3, 5, rng=rng))
    cell = torch_io.cell_from_torch("LSTM", **arrays)
    before = np.array(cell.Wi)
    arrays["w_ih"][...] = 0
    np.testing.assert_array_equal(cell.Wi, before)


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (lambda: recur.GRUv3Cell(3, 5), "after the product"),
        (lambda: recur.LSTMCell(3, 5, peepholes=True), "peepholes"),
        (lambda: recur.LSTMCell(3, 5, gate_act="hard_sigmoid"), "sigmoid"),
        (lambda: recur.RNNCell(3, 5, recur.sigmoid), "tanh and relu"),
        (lambda: recur.extra_cells.UGRNNCell(3, 5), "no other library"),
    ],
)
def test_what_torch_cannot_hold_is_refused_by_name(cell, reason):
    with pytest.raises(StateError, match=reason):
        torch_io.cell_to_torch(cell())


def test_arrays_that_fit_no_cell_are_refused(rng):
    good = torch_io.cell_to_torch(recur.LSTMCell(3, 5, rng=rng))
    with pytest.raises(ShapeError, match="proj_size"):
        torch_io.cell_from_torch("LSTM", **{**good, "w_hh": good["w_hh"][:, :2]})
    with pytest.raises(ShapeError, match="w_ih"):
        torch_io.cell_from_torch("LSTM", **{**good, "w_ih": good["w_ih"][1:]})
    with pytest.raises(ShapeError, match="b_hh"):
        torch_io.cell_from_torch("LSTM", **{**good, "b_hh": good["b_hh"][1:]})
    with pytest.raises(FormatError, match="only one of"):
        torch_io.cell_from_torch("LSTM", **{**good, "b_hh": None})
    with pytest.raises(FormatError, match="no recurrent layer"):
        torch_io.cell_from_torch("Transformer", **good)


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_go_to_a_state_dict_and_back(kind, layers, both, bias, rng):
    names = state_dict_of(rng, kind, 3, 5, layers, both, bias)
    found = torch_io.layers_from_torch(names)
    assert list(found) == ["rnn"]
    back = torch_io.layers_to_torch(found)
    assert set(back) == set(names)
    again = torch_io.layers_from_torch(back)
    X = numbers(rng, 3, 2, 4)
    np.testing.assert_array_equal(again["rnn"](X), found["rnn"](X))


def test_a_linear_and_an_embedding_go_there_and_back(rng):
    names = {
        "emb.weight": numbers(rng, 7, 3),
        "a.b.head.weight": numbers(rng, 2, 5),
        "a.b.head.bias": numbers(rng, 2),
        "free.weight": numbers(rng, 2, 5),
    }
    kinds = {"emb": "Embedding", "free": "Linear"}
    found = torch_io.layers_from_torch(names, kinds=kinds, acts={"a.b.head": "relu"})
    np.testing.assert_array_equal(found["emb"](np.array([6])), names["emb.weight"][6:].T)
    assert repr(found["a.b.head"]) == "Dense(5 => 2, relu)"
    assert found["free"].bias is None
    back = torch_io.layers_to_torch(found)
    assert set(back) == set(names)
    for name, array in names.items():
        np.testing.assert_array_equal(back[name], array)


def test_a_cell_and_a_layer_differ_by_the_names_of_their_arrays(rng):
    cell = recur.LSTMCell(3, 5, rng=rng)
    names = torch_io.layers_to_torch({"": cell})
    assert set(names) == {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}
    assert type(torch_io.layers_from_torch(names)[""]) is recur.LSTMCell
    assert set(torch_io.layers_to_torch({"": recur.Recur(cell)})) == {f"{n}_l0" for n in names}


def test_dropout_between_stacked_layers_takes_no_place_in_a_state_dict(rng):
    stack = recur.Chain(recur.GRU(3, 5), recur.Dropout(0.5), recur.GRU(5, 5))
    assert "rnn.weight_ih_l1" in torch_io.layers_to_torch({"rnn": stack})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rnn.weight_hr_l0": (2, 5)}, "proj_size=2"),
        ({"norm.weight": (5,), "norm.bias": (5,)}, "norm: .*neither a Linear nor an Embedding"),
        ({"x.weight": (5, 3)}, "say which"),
        ({"conv.filters": (5, 3)}, "conv.filters: not a weight"),
        ({"rnn.weight_ih_l2": (20, 5), "rnn.weight_hh_l2": (20, 5)}, "make no whole stack"),
        ({"rnn.weight_ih": (20, 3), "rnn.weight_hh": (20, 5)}, "of a cell and of layers"),
        ({"rnn.weight_ih_l1": (20, 5)}, "lacks a matrix"),
        ({"o.weight_ih_l0": (10, 5), "o.weight_hh_l0": (10, 5)}, "no RNN, LSTM or GRU"),
    ],
)
def test_a_state_dict_with_anything_else_is_refused_by_name(change, reason, rng):
    names = state_dict_of(rng, "LSTM", 3, 5)
    with pytest.raises(FormatError, match=reason):
        torch_io.layers_from_torch({**names, **{k: numbers(rng, *s) for k, s in change.items()}})


def test_options_that_fit_no_module_are_refused(rng):
    names = state_dict_of(rng, "LSTM", 3, 5)
    with pytest.raises(FormatError, match="no module 'head'"):
        torch_io.layers_from_torch(names, acts={"head": "relu"})
    with pytest.raises(FormatError, match="it is a LSTM"):
        torch_io.layers_from_torch(names, acts={"rnn": "relu"})
    with pytest.raises(FormatError, match="expected one of"):
        torch_io.layers_from_torch({"x.weight": names["rnn.bias_ih_l0"][None]}, kinds={"x": "Conv"})
    with pytest.raises(FormatError, match="it has a bias"):
        names = {"x.weight": numbers(rng, 2, 3), "x.bias": numbers(rng, 2)}
        torch_io.layers_from_torch(names, kinds={"x": "Embedding"})


def test_layers_that_no_module_holds_are_refused():
    for layer, reason in (
        (recur.Chain(recur.GRU(3, 5), recur.Dense(5, 2)), "no layer that PyTorch"),
        (recur.Chain(recur.GRU(3, 5), recur.LSTM(5, 5)), "differ in kind"),
        (recur.Chain(recur.GRU(3, 5), recur.GRU(5, 4)), "differ in kind"),
        (recur.Chain(), "there are none"),
        (recur.GRU(3, 5, init_state=np.ones(5)), "initial state that is not zero"),
    ):
        with pytest.raises(StateError, match=reason):
            torch_io.layers_to_torch({"rnn": layer})


def test_saved_layers_are_read_back_from_safetensors(tmp_path, rng):
    model = {"rnn": recur.LSTM(3, 5, rng=rng), "head": recur.Dense(5, 2, rng=rng)}
    torch_io.save(model, tmp_path / "model.safetensors")
    found = torch_io.layers_from_torch(torch_io.read(tmp_path / "model.safetensors"))
    assert safetensors.read_header(tmp_path / "model.safetensors").metadata == {"format": "pt"}
    X = numbers(rng, 3, 2, 4)
    want = recur.Chain(model["rnn"], model["head"])(X)
    np.testing.assert_array_equal(recur.Chain(found["rnn"], found["head"])(X), want)


# ---------------------------------------------------------------------- files without PyTorch


class Global:
    """Pickles as a name, whatever it names."""

    def __init__(self, name):
        self.name = name


class Storage:
    def __init__(self, kind, key, count):
        self.id = ("storage", Global(f"torch {kind}"), key, "cpu", count)


class Call:
    def __init__(self, function, *arguments):
        self.function, self.arguments = Global(function), arguments


def pickled(value):
    """A pickle of protocol 2, written by hand so that it may name and call anything."""
    out = bytearray(b"\x80\x02")

    def write(x):
        if isinstance(x, Global):
            module, name = x.name.split(" ")
            out.extend(b"c" + module.encode() + b"\n" + name.encode() + b"\n")
        elif isinstance(x, Storage):
            write(x.id)
            out.extend(b"Q")
        elif isinstance(x, Call):
            write(x.function)
            write(x.arguments)
            out.extend(b"R")
        elif isinstance(x, tuple):
            out.extend(b"(")
            for part in x:
                write(part)
            out.extend(b"t")
        elif isinstance(x, dict):
            out.extend(b"}(")
            for key, part in x.items():
                write(key)
                write(part)
            out.extend(b"u")
        elif isinstance(x, list):
            out.extend(b"](")
            for part in x:
                write(part)
            out.extend(b"e")
        else:
            out.extend(pickle.dumps(x, 2)[2:-1])

    write(value)
    return bytes(out + b".")


def tensor(storage, shape, strides=None, offset=0, call="torch._utils _rebuild_tensor_v2"):
    if strides is None:
        strides = tuple(int(np.prod(shape[k + 1 :])) for k in range(len(shape)))
    hooks = Call("collections OrderedDict")
    return Call(call, storage, offset, shape, strides, False, hooks)


def zipped(program, storages=(), byteorder=None, compression=zipfile.ZIP_STORED, extra=()):
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", compression) as archive:
        archive.writestr("x/data.pkl", program)
        if byteorder:
            archive.writestr("x/byteorder", byteorder)
        for key, content in dict(storages).items():
            archive.writestr(f"x/data/{key}", content)
        for name in extra:
            archive.writestr(name, b"")
    return memory.getvalue()


def stream(program, keys, contents):
    head = b"".join(
        pickle.dumps(x, 2) for x in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    )
    body = b"".join(struct.pack("<q", count) + content for count, content in contents)
    return head + program + pickle.dumps(keys, 2) + body


@pytest.fixture
def written(tmp_path):
    def write(content):
        path = tmp_path / "model.pt"
        path.write_bytes(content)
        return path

    return write


VALUES = np.arange(12, dtype=np.float32)
PROGRAM = pickled(
    {
        "state": {"w": tensor(Storage("FloatStorage", "0", 12), (3, 4))},
        "epoch": 7,
        "opt": {"betas": (0.9, 0.999), "lr": None, "amsgrad": False, 0: [1, 2]},
        "hidden": (tensor(Storage("FloatStorage", "0", 12), (4, 3), (1, 4)),),
    }
)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_is_read_without_torch(legacy, written):
    content = VALUES.tobytes()
    file = stream(PROGRAM, ["0"], [(12, content)]) if legacy else zipped(PROGRAM, {"0": content})
    found = torch_io.read(written(file))
    assert list(found) == ["state.w", "hidden.0"]
    np.testing.assert_array_equal(found["state.w"], VALUES.reshape(3, 4))
    np.testing.assert_array_equal(found["hidden.0"], VALUES.reshape(3, 4).T)
    found["state.w"][0, 1] = 99  # tensors of one storage share it, and may be written
    assert found["hidden.0"][1, 0] == 99


def test_a_big_endian_file_and_narrow_floats_are_read(written):
    program = pickled({"w": tensor(Storage("LongStorage", "0", 2), (2,))})
    big = zipped(program, {"0": np.array([1, -2], ">i8").tobytes()}, b"big")
    np.testing.assert_array_equal(torch_io.read(written(big))["w"], [1, -2])
    program = pickled({"w": tensor(Storage("BFloat16Storage", "0", 2), (2,))})
    half = zipped(program, {"0": struct.pack("<HH", 0x3FC0, 0xC000)})
    found = torch_io.read(written(half))["w"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, [1.5, -2])
    program = pickled({"w": tensor(Storage("BFloat16Storage", "0", 0), (0, 3))})
    assert torch_io.read(written(zipped(program)))["w"].shape == (0, 3)


def one(**options):
    return pickled({"w": tensor(Storage("FloatStorage", "0", 12), **options)})


def nested(depth):
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


FOURFOLD = b"}(" + b"".join(b"X\x01\x00\x00\x00" + k + b"h\x00" for k in (b"a", b"b", b"c")) + b"u"
HOSTILE = {
    "a call of the system": pickled(Call("os system", "touch owned")),
    "a call by an old name": b"\x80\x02cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
    "an object of a class": pickled(Call("torch.nn.modules.rnn LSTM")),
    "an instance": b"(ios\nsystem\n.",
    "a name from the stack": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "an extension": b"\x80\x02\x82\x01.",
    "a call of what is no name": pickled(Call("collections OrderedDict"))[:-1] + b")R.",
    "a state for a tensor": pickled(tensor(Storage("FloatStorage", "0", 12), (1,)))[:-1] + b"Nb.",
    "a stack that is too short": b"\x80\x02a.",
    "a mark that is not there": b"\x80\x02t.",
    "a memo that is not there": b"\x80\x02h\x07.",
    "two objects": b"\x80\x02NN0N.",
    "no end": b"\x80\x02N",
    "nothing": b"",
    "a string longer than the file": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x00abc.",
    "deep lists": nested(100_000),
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "a dictionary of dictionaries": b"\x80\x02]q\x00" + (FOURFOLD + b"q\x00") * 60 + b".",
    "a long name": b"\x80\x02}(X\xe8\x0f\x00\x00" + b"a" * 4072 + one(shape=(1,))[2:-1] + b"u.",
    "a list for a key": b"\x80\x02}]Ns.",
    "an ordered dictionary with items": pickled(Call("collections OrderedDict", [["a", 1]])),
    "an item of no dictionary": b"\x80\x02NNNs.",
    "a tensor larger than its storage": one(shape=(4, 4)),
    "a tensor past its storage": one(shape=(3, 4), offset=1),
    "a negative offset": one(shape=(3, 4), offset=-1),
    "a negative stride": one(shape=(3,), strides=(-1,), offset=5),
    "a stride that leaves": one(shape=(2,), strides=(2**40,)),
    "a large tensor of one element": one(shape=(2**30, 2**10), strides=(0, 0)),
    "more strides than sizes": one(shape=(3,), strides=(1, 1)),
    "sizes that are no numbers": one(shape=("a",), strides=(1,)),
    "a tensor of no storage": pickled({"w": Call("torch._utils _rebuild_tensor_v2", 1, 0, (), ())}),
    "a tensor without arguments": pickled({"w": Call("torch._utils _rebuild_tensor_v2")}),
    "a quantized tensor": pickled({"w": Call("torch._utils _rebuild_qtensor")}),
    "a storage of another kind": pickled(tensor(Storage("QInt8Storage", "0", 1), (1,))),
    "a storage twice": pickled([tensor(Storage("FloatStorage", "0", n), (1,)) for n in (12, 13)]),
    "a storage without a name": pickled(tensor(Storage("FloatStorage", None, 12), (1,))),
    "a storage that is not there": pickled(tensor(Storage("FloatStorage", "1", 12), (1,))),
    "a persistent id of its own": b"\x80\x02NQ.",
    "two tensors of one name": pickled(
        {
            "a": {"b": tensor(Storage("FloatStorage", "0", 12), (1,))},
            "a.b": tensor(Storage("FloatStorage", "0", 12), (1,)),
        }
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("legacy", [False, True])
def test_a_hostile_pickle_is_refused_and_runs_nothing(name, legacy, written):
    content = VALUES.tobytes()
    program = HOSTILE[name]
    file = stream(program, ["0"], [(12, content)]) if legacy else zipped(program, {"0": content})
    with pytest.raises(FormatError, match=r"model\.pt: "):
        torch_io.read(written(file))
    assert not os.path.exists("owned")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "neither"),
        (b"what is this?", "neither"),
        (pickle.dumps({"w": [1]}, 2), "plain pickle"),
        (zipped(PROGRAM, {"0": VALUES.tobytes()}, compression=zipfile.ZIP_DEFLATED), "compressed"),
        (zipped(PROGRAM, {"0": VALUES.tobytes()}, extra=["x/constants.pkl"]), "TorchScript"),
        (zipped(PROGRAM, {"0": VALUES.tobytes()}, extra=["y/data.pkl"]), "without one data.pkl"),
        (zipped(PROGRAM, {"0": VALUES.tobytes()[1:]}), "has 47 bytes, expected 12 elements"),
        (zipped(PROGRAM, {"0": VALUES.tobytes()})[:-30], "damaged"),
        (stream(PROGRAM, ["0"], [(13, VALUES.tobytes())]), "does not fit"),
        (stream(PROGRAM, ["0"], [(12, VALUES.tobytes()[1:])]), "has 47 bytes"),
        (stream(PROGRAM, [], []), "lacks the bytes"),
        (stream(PROGRAM, "0", []), "lacks its list"),
        (stream(PROGRAM, ["7"], [(12, VALUES.tobytes())]), "does not fit"),
    ],
)
def test_a_damaged_file_is_refused(content, reason, written):
    with pytest.raises(FormatError, match=reason):
        torch_io.read(written(content))


def test_bytes_that_are_no_truth_values_are_refused(written):
    program = pickled(tensor(Storage("BoolStorage", "0", 2), (2,)))
    with pytest.raises(FormatError, match="neither true nor false"):
        torch_io.read(written(zipped(program, {"0": b"\x01\x02"})))


@given(data=st.data())
def test_any_changed_byte_gives_arrays_or_a_format_error(data, tmp_path_factory):
    content = VALUES.tobytes()
    whole = data.draw(
        st.sampled_from([zipped(PROGRAM, {"0": content}), stream(PROGRAM, ["0"], [(12, content)])])
    )
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "fuzzed.pt"
    path.write_bytes(damaged[: data.draw(st.integers(0, 2 * len(whole)))])
    try:
        found = torch_io.read(path)
    except FormatError:
        return
    assert all(isinstance(array, np.ndarray) for array in found.values())


# ---------------------------------------------------------------------- PyTorch itself


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("both", [False, True])
def test_torch_and_recur_give_the_same_numbers(kind, layers, both, rng, dtype, tmp_path):
    torch = pytest.importorskip("torch")
    torch.manual_seed(int(rng.integers(2**31)))
    kept = {np.dtype("float32"): torch.float32, np.dtype("float64"): torch.float64}[dtype]
    theirs = torch.nn.ModuleDict(
        {
            "rnn": getattr(torch.nn, kind)(3, 5, layers, bidirectional=both, dtype=kept),
            "head": torch.nn.Linear(5 * (1 + both), 2, dtype=kept),
        }
    )
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    ours = torch_io.layers_from_torch(torch_io.read(tmp_path / "model.pt"))
    X = numbers(rng, 3, 4, 6, dtype=dtype)
    h, c = (numbers(rng, layers * (1 + both), 4, 5, dtype=dtype) for _ in "hc")
    start = (torch.tensor(h), torch.tensor(c)) if kind == "LSTM" else torch.tensor(h)
    with torch.no_grad():
        want, _ = theirs["rnn"](torch.tensor(X.T.copy()), start)
        want = theirs["head"](want).numpy()
    single = recur.Chain(*(ours["rnn"] if layers > 1 else [ours["rnn"]]))
    directions = [
        part
        for layer in single.layers
        for part in ((layer.forward, layer.backward) if both else (layer,))
    ]
    for layer, h0, c0 in zip(directions, h, c, strict=True):
        layer.state = (h0.T, c0.T) if kind == "LSTM" else h0.T
    with pytest.warns(UserWarning, match="backwards") if both else nullcontext():
        got = recur.Chain(single, ours["head"])(X)
    np.testing.assert_allclose(got.T, want, rtol=0, atol=2e-6 if dtype == np.float32 else 1e-14)

    back = torch_io.layers_to_torch(ours)
    theirs.load_state_dict({name: torch.tensor(array) for name, array in back.items()})
    with torch.no_grad():
        again = theirs["head"](theirs["rnn"](torch.tensor(X.T.copy()), start)[0]).numpy()
    np.testing.assert_allclose(again, want, rtol=0, atol=2e-6 if dtype == np.float32 else 1e-14)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("bias", [True, False])
def test_cells_of_torch_give_the_same_numbers(kind, bias, rng):
    torch = pytest.importorskip("torch")
    torch.manual_seed(5)
    theirs = getattr(torch.nn, f"{kind}Cell")(3, 5, bias=bias)
    cell = torch_io.layers_from_torch(theirs.state_dict())[""]
    x, h, c = (numbers(rng, n, 4) for n in (3, 5, 5))
    start = (torch.tensor(h.T), torch.tensor(c.T)) if kind == "LSTM" else torch.tensor(h.T)
    with torch.no_grad():
        want = theirs(torch.tensor(x.T), start)
    _, y = cell((h, c) if kind == "LSTM" else h, x)
    want = (want[0] if kind == "LSTM" else want).numpy()
    np.testing.assert_allclose(y.T, want, rtol=0, atol=2e-6)


@pytest.mark.oracle
@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_torch_hold_what_they_were_given(zipped, tmp_path):
    torch = pytest.importorskip("torch")
    base = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    kept = {
        "model": {
            "a": base[1:, ::2],
            "t": base.T,
            "half": torch.randn(3).half(),
            "brain": torch.randn(3).bfloat16(),
            "ints": torch.tensor([[1, -2]]),
            "truth": torch.tensor([True, False]),
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
            "learned": torch.nn.Parameter(torch.randn(2, 2)),
        },
        "size": torch.Size([3, 4]),
        "dtype": torch.float32,
        "epoch": 3,
    }
    torch.save(kept, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    found = torch_io.read(tmp_path / "x.pt")
    assert set(found) == {f"model.{name}" for name in kept["model"]}
    for name, value in kept["model"].items():
        value = value.detach()
        want = (value.float() if name == "brain" else value).numpy()
        np.testing.assert_array_equal(found[f"model.{name}"], want)
        assert found[f"model.{name}"].dtype == want.dtype


@pytest.mark.oracle
def test_a_whole_model_of_torch_is_refused_with_the_way_out(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(torch.nn.LSTM(3, 5), tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"torch\.nn.*state_dict"):
        torch_io.read(tmp_path / "x.pt")


@pytest.mark.oracle
def test_tensors_are_taken_as_arrays():
    torch = pytest.importorskip("torch")
    theirs = torch.nn.Linear(3, 2).bfloat16()
    dense = torch_io.layers_from_torch(theirs.state_dict())[""]
    np.testing.assert_array_equal(dense.weight, theirs.weight.detach().float().numpy())


@pytest.mark.oracle
def test_a_projection_is_refused_by_name():
    torch = pytest.importorskip("torch")
    with pytest.raises(FormatError, match="proj_size=2"):
        torch_io.layers_from_torch(torch.nn.LSTM(3, 5, proj_size=2).state_dict())
