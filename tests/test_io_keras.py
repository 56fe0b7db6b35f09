"""Weights and models of Keras: layouts against its equations, files as its versions write them."""

from __future__ import annotations

import io
import json
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import recur
from recur import (
    GRU,
    LSTM,
    RNN,
    Bidirectional,
    Chain,
    Dense,
    Dropout,
    Embedding,
    FinalStep,
    GRUv3,
    Recur,
    Reversed,
)
from recur.errors import FormatError, ShapeError, StateError
from recur.io import keras as keras_io

B, T, F, H = 2, 4, 3, 5


def numbers(rng, *shape, dtype=np.float32):
    return (0.5 * rng.standard_normal(shape)).astype(dtype)


# ---------------------------------------------------------------------- Keras' equations
#
# Written as Keras documents them: x (batch, time, features), products from the right.


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def hard_sigmoid(x):
    return np.clip(0.2 * x + 0.5, 0, 1)


def simple_rnn(x, h, kernel, recurrent, bias=0.0, act=np.tanh):
    ys = []
    for t in range(x.shape[1]):
        h = act(x[:, t] @ kernel + bias + h @ recurrent)
        ys.append(h)
    return np.stack(ys, 1), (h,)


def lstm(x, h, c, kernel, recurrent, bias=0.0, gate=sigmoid):
    ys = []
    for t in range(x.shape[1]):
        i, f, n, o = np.split(x[:, t] @ kernel + h @ recurrent + bias, 4, 1)
        c = gate(f) * c + gate(i) * np.tanh(n)
        h = gate(o) * np.tanh(c)
        ys.append(h)
    return np.stack(ys, 1), (h, c)


def gru(x, h, kernel, recurrent, bias=None, reset_after=True, gate=sigmoid):
    n = recurrent.shape[0]
    outer, inner = (
        bias if reset_after and bias is not None else (0.0 if bias is None else bias, 0.0)
    )
    ys = []
    for t in range(x.shape[1]):
        xz, xr, xh = np.split(x[:, t] @ kernel + outer, 3, 1)
        hz, hr, hh = np.split(h @ recurrent + inner, 3, 1)
        z, r = gate(xz + hz), gate(xr + hr)
        inside = r * hh if reset_after else (r * h) @ recurrent[:, 2 * n :]
        h = z * h + (1 - z) * np.tanh(xh + inside)
        ys.append(h)
    return np.stack(ys, 1), (h,)


def arrays_of(rng, gates, bias=(1,), n_in=F, n_out=H, dtype=np.float32):
    """kernel, recurrent kernel, bias of `bias` times the gates' columns (None: none)."""
    found = [
        numbers(rng, n_in, gates * n_out, dtype=dtype),
        numbers(rng, n_out, gates * n_out, dtype=dtype),
    ]
    if bias is not None:
        shape = (*bias[:-1], bias[-1] * gates * n_out)
        found.append(numbers(rng, *shape, dtype=dtype))
    return found


# kind, options, arrays, Keras' equation
EQUATIONS = [
    ("SimpleRNN", {}, (1, (1,)), simple_rnn),
    (
        "SimpleRNN",
        {"activation": "relu"},
        (1, None),
        lambda *a: simple_rnn(*a, act=lambda x: x * (x > 0)),
    ),
    ("LSTM", {}, (4, (1,)), lstm),
    ("LSTM", {}, (4, None), lstm),
    (
        "LSTM",
        {"recurrent_activation": "hard_sigmoid", "keras_version": "2.3.1"},
        (4, (1,)),
        lambda *a: lstm(*a, gate=hard_sigmoid),
    ),
    ("LSTM", {"keras_version": "2.2.4"}, (4, (1,)), lambda *a: lstm(*a, gate=hard_sigmoid)),
    ("GRU", {}, (3, (2, 1)), gru),
    ("GRU", {"reset_after": True}, (3, None), gru),
    ("GRU", {"reset_after": False}, (3, (1,)), lambda *a: gru(*a, reset_after=False)),
    (
        "GRU",
        {"keras_version": "2.1.6"},
        (3, (1,)),
        lambda *a: gru(*a, reset_after=False, gate=hard_sigmoid),
    ),
    (
        "GRU",
        {"reset_after": True, "recurrent_activation": "hard_sigmoid", "keras_version": "2.2.5"},
        (3, (2, 1)),
        lambda *a: gru(*a, gate=hard_sigmoid),
    ),
]


@pytest.mark.parametrize(("kind", "options", "form", "equation"), EQUATIONS)
def test_a_cell_computes_what_keras_says_from_any_state(kind, options, form, equation, rng, dtype):
    arrays = arrays_of(rng, *form, dtype=dtype)
    cell = keras_io.cell_from_keras(kind, *arrays, **options)
    assert cell.dtype == dtype
    x = numbers(rng, B, T, F, dtype=dtype)
    state = [numbers(rng, B, H, dtype=dtype) for _ in cell.state_names]
    want, last = equation(x, *state, *arrays)
    m = Recur(cell)
    m.state = tuple(part.T for part in state) if len(state) > 1 else state[0].T
    tol = 2e-6 if dtype == np.float32 else 1e-13
    np.testing.assert_allclose(m(x.transpose(2, 0, 1)).transpose(1, 2, 0), want, rtol=0, atol=tol)
    held = m.state if isinstance(m.state, tuple) else (m.state,)
    for ours, theirs in zip(held, last, strict=True):
        np.testing.assert_allclose(ours.T, theirs, rtol=0, atol=tol)


@pytest.mark.parametrize("bias", [True, False])
def test_a_cudnn_lstm_is_read_as_the_matrices_of_cudnn(bias, rng):
    """cuDNN: g = W x + R h + b_w + b_r, gates i f c o, W (n_out, n_in) row by row in memory."""
    kernel, recurrent, *both = arrays_of(rng, 4, (2,) if bias else None)
    cell = keras_io.cell_from_keras("CuDNNLSTM", kernel, recurrent, *both)
    x, h, c = numbers(rng, B, F), numbers(rng, B, H), numbers(rng, B, H)
    gates = []
    for k in range(4):
        memory = kernel[:, k * H : (k + 1) * H].ravel()
        W, R = memory.reshape(H, F), recurrent[:, k * H : (k + 1) * H].ravel().reshape(H, H)
        shift = (
            0.0 if not both else both[0][k * H : (k + 1) * H] + both[0][(4 + k) * H : (5 + k) * H]
        )
        gates.append(x @ W.T + h @ R.T + shift)
    i, f, n, o = gates
    want = sigmoid(o) * np.tanh(sigmoid(f) * c + sigmoid(i) * np.tanh(n))
    _, y = cell((h.T, c.T), x.T)
    np.testing.assert_allclose(y.T, want, rtol=0, atol=2e-6)


def test_a_cudnn_gru_is_read_with_its_bias_inside_the_reset_product(rng):
    kernel, recurrent, both = arrays_of(rng, 3, (2,))
    cell = keras_io.cell_from_keras("CuDNNGRU", kernel, recurrent, both)
    x, h = numbers(rng, B, F), numbers(rng, B, H)
    outer, inner = both.reshape(2, 3, H)
    Ws = [kernel[:, k * H : (k + 1) * H].ravel().reshape(H, F) for k in range(3)]
    Rs = [recurrent[:, k * H : (k + 1) * H].ravel().reshape(H, H) for k in range(3)]
    xz, xr, xn = (x @ W.T + b for W, b in zip(Ws, outer, strict=True))
    hz, hr, hn = (h @ R.T + b for R, b in zip(Rs, inner, strict=True))
    z = sigmoid(xz + hz)
    want = z * h + (1 - z) * np.tanh(xn + sigmoid(xr + hr) * hn)
    _, y = cell(h.T, x.T)
    np.testing.assert_allclose(y.T, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("make", "options", "version"),
    [
        (recur.RNNCell, {}, "3"),
        (recur.LSTMCell, {}, "3"),
        (recur.LSTMCell, {"gate_act": "hard_sigmoid"}, "2.2.4"),
        (recur.GRUCell, {}, "3"),
        (recur.GRUCell, {"recurrent_bias": True}, "3"),
        (recur.GRUv3Cell, {"gate_act": "hard_sigmoid"}, "2.15.0"),
    ],
)
def test_a_cell_goes_to_the_layout_of_keras_and_back_unchanged(
    make, options, version, bias, rng, dtype
):
    cell = make(F, H, bias=bias, dtype=dtype, rng=rng, **options)
    for param in recur.params(cell):
        param[...] = numbers(rng, *param.shape)
    kind = {"RNN": "SimpleRNN", "GRUv3": "GRU"}.get(make.__name__[:-4], make.__name__[:-4])
    arrays, config = keras_io.cell_to_keras(cell, version)
    back = keras_io.cell_from_keras(kind, **arrays, **config, keras_version=version)
    held = recur.state_dict(back)
    assert type(back) is make and back.dtype == dtype
    for name, array in recur.state_dict(cell).items():
        np.testing.assert_array_equal(held[name], array)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("LSTM", {"activation": "relu"}, "cells with gates have tanh"),
        ("LSTM", {"recurrent_activation": "tanh"}, "its gates are 'tanh'"),
        ("LSTM", {"recurrent_activation": "hard_sigmoid"}, "Since Keras 3"),
        ("LSTM", {"activation": "gelu"}, "'gelu' of Keras is not held here"),
        ("LSTM", {"units": 7}, "which its arrays contradict"),
        ("LSTM", {"use_bias": False}, "which its arrays contradict"),
        ("LSTM", {"keras_version": "two"}, "no version of Keras"),
        ("ConvLSTM1D", {}, "no recurrent layer"),
    ],
)
def test_what_cells_cannot_hold_is_refused_by_name(kind, options, reason, rng):
    with pytest.raises(FormatError, match=reason):
        keras_io.cell_from_keras(kind, *arrays_of(rng, 4), **options)


def test_an_inner_bias_is_refused_where_none_is_wanted(rng):
    with pytest.raises(FormatError, match="recurrent_bias=True"):
        keras_io.cell_from_keras("GRU", *arrays_of(rng, 3, (2, 1)), recurrent_bias=False)


def test_arrays_that_do_not_fit_are_refused(rng):
    kernel, recurrent, bias = arrays_of(rng, 4)
    with pytest.raises(ShapeError, match="recurrent_kernel"):
        keras_io.cell_from_keras("GRU", kernel, recurrent, bias)
    with pytest.raises(ShapeError, match="kernel"):
        keras_io.cell_from_keras("LSTM", kernel[:, 1:], recurrent, bias)
    with pytest.raises(ShapeError, match="bias"):
        keras_io.cell_from_keras("LSTM", kernel, recurrent, bias[1:])


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (lambda: recur.LSTMCell(F, H, peepholes=True), "peepholes"),
        (lambda: recur.LSTMCell(F, H, gate_act="hard_sigmoid"), "another one of that name"),
        (lambda: recur.RNNCell(F, H, recur.ops.leakyrelu), "leakyrelu"),
        (lambda: recur.extra_cells.UGRNNCell(F, H), "no other library"),
    ],
)
def test_cells_that_keras_lacks_are_refused(cell, reason):
    with pytest.raises(StateError, match=reason):
        keras_io.cell_to_keras(cell())


# ---------------------------------------------------------------------- files by hand


@pytest.fixture
def h5py():
    return pytest.importorskip("h5py")


def layer(kind, name, **config):
    return {"class_name": kind, "config": {"name": name, **config}}


def sequential(*layers, kind="Sequential", **config):
    return {"class_name": kind, "config": {"name": "model", "layers": list(layers), **config}}


def write_new(h5py, path, config, arrays, version="3.5.0", root="layers", compression=0):
    """A `.keras` file: arrays by place below `layers`, without the last `vars`."""
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        file.create_group(root)
        for place, values in arrays.items():
            for k, array in enumerate(values):
                file[f"{root}/{place}/vars/{k}"] = array
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("metadata.json", json.dumps({"keras_version": version}))
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("model.weights.h5", content.getvalue())
    return path


def write_old(h5py, path, config, arrays, version="2.2.4", weights_alone=False, pieces=False):
    """An `.h5` file of Keras 2: arrays by layer, each with the names of its weights."""
    with h5py.File(path, "w") as file:
        group = file if weights_alone else file.create_group("model_weights")
        for place in {file, group}:
            place.attrs["keras_version"] = version.encode()
        if config is not None:
            file.attrs["model_config"] = json.dumps(config).encode()
        names = [name.encode() for name in arrays]
        if pieces:
            group.attrs["layer_names0"], group.attrs["layer_names1"] = names[:1], names[1:]
        else:
            group.attrs["layer_names"] = names
        for name, values in arrays.items():
            below = group.create_group(name)
            own = [f"{name}/cell/weight_{k}:0" for k in range(len(values))]
            below.attrs["weight_names"] = [text.encode() for text in own]
            for text, array in zip(own, values, strict=True):
                below[text] = array
    return path


STACK = sequential(
    layer("InputLayer", "input", batch_shape=[None, None]),
    layer("Embedding", "words", input_dim=7, output_dim=F),
    layer("LSTM", "first", units=H, return_sequences=True, dropout=0.2),
    layer("Dropout", "drop", rate=0.3),
    layer("GRU", "second", units=H, return_sequences=True),
    layer("GRU", "third", units=H, return_sequences=True, reset_after=False),
    layer(
        "Bidirectional",
        "both",
        layer=layer("LSTM", "forward_x", units=H),
        backward_layer=layer("LSTM", "backward_x", units=H, go_backwards=True),
    ),
    layer("Dense", "head", units=2, activation="softmax"),
    layer("Activation", "last", activation="tanh"),
)


def stack_arrays(rng):
    return {
        "words": [numbers(rng, 7, F)],
        "first": arrays_of(rng, 4),
        "drop": [],
        "second": arrays_of(rng, 3, (2, 1), n_in=H),
        "third": arrays_of(rng, 3, (1,), n_in=H),
        "both": [*arrays_of(rng, 4, n_in=H), *arrays_of(rng, 4, n_in=H)],
        "head": [numbers(rng, 2 * H, 2), numbers(rng, 2)],
        "last": [],
    }


def stack_places(arrays):
    """Where Keras 3 keeps them: by class, with counters."""
    return {
        "embedding": arrays["words"],
        "lstm/cell": arrays["first"],
        "gru/cell": arrays["second"],
        "gru_1/cell": arrays["third"],
        "bidirectional/forward_layer/cell": arrays["both"][:3],
        "bidirectional/backward_layer/cell": arrays["both"][3:],
        "dense": arrays["head"],
    }


def stack_output(arrays, x, gate=sigmoid):
    h = np.zeros((len(x), H), np.float32)
    y, _ = lstm(arrays["words"][0][x], h, h, *arrays["first"], gate=gate)
    y, _ = gru(y, h, *arrays["second"], gate=gate)
    y, _ = gru(y, h, *arrays["third"], reset_after=False, gate=gate)
    _, (ahead, _) = lstm(y, h, h, *arrays["both"][:3], gate=gate)
    _, (behind, _) = lstm(y[:, ::-1], h, h, *arrays["both"][3:], gate=gate)
    logits = np.concatenate([ahead, behind], 1) @ arrays["head"][0] + arrays["head"][1]
    odds = np.exp(logits)
    return np.tanh(odds / odds.sum(1, keepdims=True))


@pytest.mark.oracle
@pytest.mark.parametrize("root", ["layers", "_layer_checkpoint_dependencies"])
def test_a_model_of_keras_3_is_read(h5py, root, tmp_path, rng):
    arrays = stack_arrays(rng)
    path = write_new(h5py, tmp_path / "m.keras", STACK, stack_places(arrays), root=root)
    model = keras_io.load(path)
    x = rng.integers(0, 7, (B, T))
    np.testing.assert_allclose(model(x).T, stack_output(arrays, x), rtol=0, atol=2e-6)
    assert repr(model[2]) == "Dropout(0.3)"


@pytest.mark.oracle
@pytest.mark.parametrize(("version", "pieces"), [("2.3.1", False), ("2.15.0", True)])
def test_a_model_of_keras_2_is_read(h5py, version, pieces, tmp_path, rng):
    arrays = stack_arrays(rng)
    path = write_old(h5py, tmp_path / "m.h5", STACK, arrays, version, pieces=pieces)
    x = rng.integers(0, 7, (B, T))
    got = keras_io.load(path)(x)
    np.testing.assert_allclose(got.T, stack_output(arrays, x), rtol=0, atol=2e-6)


@pytest.mark.oracle
@pytest.mark.parametrize("told", [True, False])
def test_gates_of_a_model_before_2_3_are_hard_sigmoids(h5py, told, tmp_path, rng):
    config = json.loads(json.dumps(STACK))
    for entry in config["config"]["layers"]:
        inner = [
            entry["config"],
            *(v["config"] for v in entry["config"].values() if isinstance(v, dict)),
        ]
        for options in inner:
            if told and "units" in options and entry["class_name"] != "Dense":
                options["recurrent_activation"] = "hard_sigmoid"
        if entry["config"]["name"] == "second":
            entry["config"]["reset_after"] = True
    arrays = stack_arrays(rng)
    path = write_old(h5py, tmp_path / "m.h5", config, arrays, "2.2.4")
    x = rng.integers(0, 7, (B, T))
    got = keras_io.load(path)(x)
    want = stack_output(arrays, x, gate=hard_sigmoid)
    np.testing.assert_allclose(got.T, want, rtol=0, atol=2e-6)


@pytest.mark.oracle
def test_cudnn_layers_are_read(h5py, tmp_path, rng):
    config = sequential(
        layer("CuDNNLSTM", "a", units=H, return_sequences=True),
        layer(
            "Bidirectional",
            "b",
            merge_mode="concat",
            layer=layer("CuDNNGRU", "g", units=H, return_sequences=True),
        ),
    )
    arrays = {
        "a": arrays_of(rng, 4, (2,)),
        "b": [*arrays_of(rng, 3, (2,), n_in=H), *arrays_of(rng, 3, (2,), n_in=H)],
    }
    model = keras_io.load(write_old(h5py, tmp_path / "m.h5", config, arrays))
    want = Chain(
        Recur(keras_io.cell_from_keras("CuDNNLSTM", *arrays["a"])),
        Bidirectional(
            *(Recur(keras_io.cell_from_keras("CuDNNGRU", *arrays["b"][k : k + 3])) for k in (0, 3))
        ),
    )
    X = numbers(rng, F, B, T)
    np.testing.assert_array_equal(model(X), want(X))


@pytest.mark.oracle
def test_a_layer_that_goes_backwards_ends_at_the_first_step(h5py, tmp_path, rng):
    config = sequential(layer("SimpleRNN", "r", units=H, go_backwards=True))
    arrays = arrays_of(rng, 1)
    path = write_new(h5py, tmp_path / "m.keras", config, {"simple_rnn/cell": arrays})
    x = numbers(rng, B, T, F)
    _, (want,) = simple_rnn(x[:, ::-1], np.zeros((B, H)), *arrays)
    np.testing.assert_allclose(keras_io.load(path)(x.transpose(2, 0, 1)).T, want, rtol=0, atol=2e-6)


@pytest.mark.oracle
def test_models_inside_models_and_wrapped_layers_are_read(h5py, tmp_path, rng):
    config = sequential(
        layer("TimeDistributed", "t", layer=layer("Dense", "d", units=4, use_bias=False)),
        sequential(
            layer("InputLayer", "i"), layer("LSTM", "l", units=H, return_sequences=True), name="in"
        ),
        layer("SpatialDropout1D", "s", rate=0.5),
    )
    config["config"]["layers"][1]["config"]["name"] = "inner"
    kernel, arrays = numbers(rng, F, 4), arrays_of(rng, 4, n_in=4)
    places = {"time_distributed/layer": [kernel], "sequential/layers/lstm/cell": arrays}
    new = write_new(h5py, tmp_path / "m.keras", config, places)
    rows = {"t": [kernel], "inner": arrays, "s": []}
    old = write_old(h5py, tmp_path / "m.h5", config, rows, "2.9.0")
    x = numbers(rng, B, T, F)
    zeros = np.zeros((B, H))
    want, _ = lstm(x @ kernel, zeros, zeros, *arrays)
    for path in (new, old):
        model = keras_io.load(path)
        got = model(x.transpose(2, 0, 1)).transpose(1, 2, 0)
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
        assert model[2].dims == (0, 1)


def functional(*rows):
    """A functional model: (entry, the names of its inputs)."""
    layers = []
    for entry, sources in rows:
        nodes = [
            {"args": [{"class_name": "__keras_tensor__", "config": {"keras_history": [s, 0, 0]}}]}
            for s in sources
        ]
        layers.append({**entry, "name": entry["config"]["name"], "inbound_nodes": nodes})
    last = layers[-1]["name"]
    return sequential(*layers, kind="Functional", output_layers=[[last, 0, 0]])


@pytest.mark.oracle
def test_a_functional_model_that_is_a_row_is_read(h5py, tmp_path, rng):
    start, rnn = layer("InputLayer", "i"), layer("GRU", "g", units=H, return_sequences=True)
    head = layer("Dense", "d", units=2)
    arrays, dense = arrays_of(rng, 3, (2, 1)), [numbers(rng, H, 2), numbers(rng, 2)]
    new = functional((start, []), (rnn, ["i"]), (head, ["g"]))
    path = write_new(h5py, tmp_path / "m.keras", new, {"gru/cell": arrays, "dense": dense})
    old = json.loads(json.dumps(new))
    for entry, source in zip(old["config"]["layers"], (None, "i", "g"), strict=True):
        entry["inbound_nodes"] = [] if source is None else [[[source, 0, 0, {}]]]
    old["class_name"] = "Model"
    rows = {"i": [], "g": arrays, "d": dense}
    x = numbers(rng, B, T, F)
    want = gru(x, np.zeros((B, H)), *arrays)[0] @ dense[0] + dense[1]
    for file in (path, write_old(h5py, tmp_path / "m.h5", old, rows, "2.4.0")):
        got = keras_io.load(file)(x.transpose(2, 0, 1)).transpose(1, 2, 0)
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


@pytest.mark.oracle
def test_a_functional_model_with_branches_is_refused(h5py, tmp_path):
    start, add = layer("InputLayer", "i"), layer("Add", "a")
    model = functional((start, []), (layer("LSTM", "l"), ["i"]), (add, ["i", "l"]))
    path = write_new(h5py, tmp_path / "m.keras", model, {})
    with pytest.raises(FormatError, match="follows the one before"):
        keras_io.load(path)
    model = functional((start, []), (layer("LSTM", "l"), ["i"]))
    model["config"]["output_layers"] = [["i", 0, 0], ["l", 0, 0]]
    with pytest.raises(FormatError, match="the last layer alone"):
        keras_io.load(write_new(h5py, tmp_path / "m.keras", model, {}))


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (layer("Conv1D", "c"), "Conv1D 'c': this kind of layer"),
        (layer("LSTM", "l", return_state=True), "return_state=True"),
        (layer("LSTM", "l", time_major=True), "time_major=True"),
        (layer("LSTM", "l", units=H, return_sequences=True, go_backwards=True), "in reverse"),
        (layer("Masking", "m"), "masks=True"),
        (layer("Embedding", "e", mask_zero=True), "masks=True"),
        (layer("Dropout", "d", noise_shape=[None, 1, None]), "noise_shape"),
        (layer("Bidirectional", "b", merge_mode="sum"), "merge_mode='sum'"),
        (layer("Bidirectional", "b", layer=layer("RNN", "r")), "RNN 'r'"),
        (
            layer("Bidirectional", "b", layer=layer("LSTM", "r", go_backwards=True)),
            "first layer goes backwards",
        ),
        (layer("TimeDistributed", "t", layer=layer("LSTM", "l")), "a Dense is read"),
        (layer("Dense", "d", activation="gelu"), "holds 0 arrays"),
        (layer("Activation", "a", activation={"class_name": "X"}), "is not held here"),
        ({"class_name": 3}, "no class_name"),
        ({"class_name": "Dense", "config": 3}, "no config"),
    ],
)
def test_a_layer_without_counterpart_is_refused_by_name(h5py, entry, reason, tmp_path, rng):
    path = write_new(
        h5py, tmp_path / "m.keras", sequential(entry), {"lstm/cell": arrays_of(rng, 4)}
    )
    with pytest.raises(FormatError, match=reason):
        keras_io.load(path)


@pytest.mark.oracle
def test_masks_are_dropped_where_the_caller_says_so(h5py, tmp_path, rng):
    config = sequential(
        layer("Embedding", "e", input_dim=7, output_dim=F, mask_zero=True),
        layer("Masking", "m"),
        layer("LSTM", "l", units=H),
    )
    table, arrays = numbers(rng, 7, F), arrays_of(rng, 4)
    path = write_new(
        h5py, tmp_path / "m.keras", config, {"embedding": [table], "lstm/cell": arrays}
    )
    x = np.array([[1, 2, 3, 4], [5, 6, 0, 0]])
    got = keras_io.load(path, masks=True)(x, lengths=np.array([4, 2]))
    for sample, steps, y in zip(x, (4, 2), got.T, strict=True):
        zeros = np.zeros((1, H))
        _, (want, _) = lstm(table[sample[None, :steps]], zeros, zeros, *arrays)
        np.testing.assert_allclose(y, want[0], rtol=0, atol=2e-6)


# ---------------------------------------------------------------------- weights alone


def hand_built(**options):
    gates = {name: v for name, v in options.items() if name == "gate_act"}
    return Chain(
        Embedding(7, F),
        LSTM(F, H, **gates),
        Dropout(0.3),
        GRU(H, H, recurrent_bias=options.get("recurrent_bias", True), **gates),
        Chain(GRUv3(H, H, **gates), Bidirectional.of(LSTM, H, H, **gates), FinalStep(H)),
        Dense(2 * H, 2, recur.softmax),
        recur.tanh,
    )


@pytest.mark.oracle
@pytest.mark.parametrize("new", [True, False])
def test_a_model_built_by_hand_is_filled(h5py, new, tmp_path, rng):
    arrays = stack_arrays(rng)
    if new:
        path = tmp_path / "m.weights.h5"
        with h5py.File(path, "w") as file:
            for place, values in stack_places(arrays).items():
                for k, array in enumerate(values):
                    file[f"layers/{place}/vars/{k}"] = array
    else:
        path = write_old(h5py, tmp_path / "m.h5", None, arrays, "2.4.0", weights_alone=True)
    model = hand_built()
    assert keras_io.load_into(model, path) is model
    x = rng.integers(0, 7, (B, T))
    np.testing.assert_allclose(model(x).T, stack_output(arrays, x), rtol=0, atol=2e-6)


@pytest.mark.oracle
def test_weights_before_2_3_ask_for_hard_gates(h5py, tmp_path, rng):
    arrays = stack_arrays(rng)
    path = write_old(h5py, tmp_path / "m.h5", None, arrays, "2.1.0", weights_alone=True)
    model = hand_built()
    before = recur.state_dict(model)
    with pytest.raises(FormatError, match=r"layers\.1: .*gate_act='hard_sigmoid'.*Nothing was"):
        keras_io.load_into(model, path)
    for name, array in recur.state_dict(model).items():
        np.testing.assert_array_equal(array, before[name])
    x = rng.integers(0, 7, (B, T))
    hard = keras_io.load_into(hand_built(gate_act="hard_sigmoid"), path)
    want = stack_output(arrays, x, gate=hard_sigmoid)
    np.testing.assert_allclose(hard(x).T, want, rtol=0, atol=2e-6)
    keras_io.load_into(model, path, gate_act="sigmoid")
    np.testing.assert_allclose(model(x).T, stack_output(arrays, x), rtol=0, atol=2e-6)


@pytest.mark.oracle
def test_weights_of_cudnn_layers_fill_ordinary_ones(h5py, tmp_path, rng):
    arrays = {"l": arrays_of(rng, 4, (2,)), "g": arrays_of(rng, 3, (2,), n_in=H)}
    path = write_old(h5py, tmp_path / "m.h5", None, arrays, "2.2.4", weights_alone=True)
    model = keras_io.load_into(Chain(LSTM(F, H), GRU(H, H, recurrent_bias=True)), path)
    want = Chain(
        Recur(keras_io.cell_from_keras("CuDNNLSTM", *arrays["l"])),
        Recur(keras_io.cell_from_keras("CuDNNGRU", *arrays["g"])),
    )
    X = numbers(rng, F, B, T)
    np.testing.assert_array_equal(model(X), want(X))


@pytest.mark.oracle
def test_weights_that_do_not_fit_change_nothing(h5py, tmp_path, rng):
    arrays = stack_arrays(rng)
    path = write_old(h5py, tmp_path / "m.h5", None, arrays, "2.4.0", weights_alone=True)
    for model, reason in (
        (hand_built(recurrent_bias=False), "with recurrent_bias=True"),
        (Chain(Embedding(7, F)), "its layers hold"),
        (Chain(*hand_built().layers[:-2], Dense(9, 2)), "kernel is float32 of shape"),
    ):
        before = recur.state_dict(model)
        with pytest.raises(FormatError, match=reason):
            keras_io.load_into(model, path)
        for name, array in recur.state_dict(model).items():
            np.testing.assert_array_equal(array, before[name])
    keras_io.save(Chain(LSTM(F, H), LSTM(H, H)), tmp_path / "two.weights.h5")
    with pytest.raises(FormatError, match="more layers of the kind lstm"):
        keras_io.load_into(LSTM(F, H), tmp_path / "two.weights.h5")
    with pytest.raises(FormatError, match="holds weights alone"):
        keras_io.load(path)


# ---------------------------------------------------------------------- writing

SAVED = {
    "stack": lambda: Chain(
        LSTM(F, H), Dropout(0.3), GRU(H, H), GRUv3(H, H), Dense(H, 2, recur.relu)
    ),
    "rnn": lambda: RNN(F, H, recur.relu),
    "gru with inner bias": lambda: Chain(GRU(F, H, recurrent_bias=True)),
    "no bias": lambda: Chain(LSTM(F, H, bias=False), Dense(H, 2, bias=False)),
    "final": lambda: Chain(Chain(LSTM(F, H), FinalStep()), Dense(H, 2), recur.softmax),
    "both ends": lambda: Chain(Bidirectional.of(GRU, F, H), FinalStep(H), Dense(2 * H, 2)),
    "both": lambda: Chain(Bidirectional(LSTM(F, H), GRU(F, H)), Bidirectional.of(RNN, 2 * H, 2)),
    "backwards": lambda: Chain(Reversed(GRUv3(F, H)), FinalStep(0)),
    "double": lambda: Chain(LSTM(F, H, dtype=np.float64)),
}


@pytest.mark.oracle
@pytest.mark.parametrize("name", SAVED)
def test_a_saved_model_is_read_back_unchanged(h5py, name, tmp_path, rng):
    model = SAVED[name]()
    for param in recur.params(model):
        param[...] = numbers(rng, *param.shape)
    keras_io.save(model, tmp_path / "m.keras")
    keras_io.save(model, tmp_path / "m.weights.h5")
    X = numbers(rng, F, B, T)
    want = model(X)
    found = keras_io.load(tmp_path / "m.keras")(X)
    assert found.dtype == want.dtype
    np.testing.assert_array_equal(found, want)
    fresh = keras_io.load_into(SAVED[name](), tmp_path / "m.weights.h5")
    np.testing.assert_array_equal(fresh(X), want)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: Chain(LSTM(F, H, peepholes=True)), "peepholes"),
        (lambda: Chain(LSTM(F, H, gate_act="hard_sigmoid")), "another one of that name"),
        (lambda: Chain(GRU(F, H, init_state=np.ones(H))), r"layers\.0: .*not zero"),
        (lambda: Chain(GRU(F, H), recur.Parallel("+", Dense(H, 2), Dense(H, 2))), r"layers\.1"),
        (lambda: Chain(GRU(F, H), np.sqrt), r"layers\.1: Keras has no layer"),
        (lambda: Chain(GRU(F, H), FinalStep(2)), "does not follow"),
        (lambda: Chain(GRU(F, H), Dense(H, H), FinalStep()), "does not follow"),
        (lambda: Chain(Reversed(GRU(F, H))), "without a FinalStep"),
        (lambda: Chain(GRU(F, H), Dense(H, 2, recur.gelu)), "gelu"),
        (lambda: Chain(GRU(F, H), Dropout(0.5, dims=0)), r"layers\.1"),
        (lambda: Chain(Dropout(0.5)), "no number of features"),
    ],
)
def test_a_model_that_keras_cannot_hold_is_refused_by_its_path(h5py, build, reason, tmp_path):
    (tmp_path / "m.keras").write_bytes(b"old")
    with pytest.raises(StateError, match=reason):
        keras_io.save(build(), tmp_path / "m.keras")
    assert (tmp_path / "m.keras").read_bytes() == b"old"


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\.keras or \.weights\.h5"):
        keras_io.save(LSTM(F, H), tmp_path / "m.h5")


def test_a_file_without_h5py_names_the_extra(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "h5py", None)
    (tmp_path / "m.h5").write_bytes(b"")
    with pytest.raises(ImportError, match=r"recur\[keras\]"):
        keras_io.load(tmp_path / "m.h5")


# ---------------------------------------------------------------------- damaged and hostile files


@pytest.mark.oracle
@pytest.mark.parametrize(
    "content", [b"", b"no file", b"PK\x03\x04", b"\x89HDF\r\n\x1a\n" + b"\0" * 90]
)
def test_a_damaged_file_is_refused(h5py, content, tmp_path):
    (tmp_path / "m.keras").write_bytes(content)
    with pytest.raises(FormatError, match=r"m\.keras: "):
        keras_io.load(tmp_path / "m.keras")


@pytest.mark.oracle
def test_archives_that_keras_does_not_write_are_refused(h5py, tmp_path, rng):
    config, arrays = sequential(layer("LSTM", "l", units=H)), {"lstm/cell": arrays_of(rng, 4)}
    path = tmp_path / "m.keras"
    write_new(h5py, path, config, arrays, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(FormatError, match="compressed"):
        keras_io.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
    with pytest.raises(FormatError, match=r"lacks metadata\.json"):
        keras_io.load(path)
    with pytest.raises(FormatError, match="configuration is damaged"):
        keras_io.load(write_new(h5py, path, [], arrays))
    with pytest.raises(FormatError, match="Keras 1"):
        keras_io.load(write_new(h5py, path, config, arrays, version="1.2.0"))
    with pytest.raises(FormatError, match="functional ones are read"):
        keras_io.load(write_new(h5py, path, layer("MyModel", "m"), arrays))
    deep = sequential()
    for _ in range(50):
        deep = sequential(deep)
    with pytest.raises(FormatError, match="functional ones are read"):
        keras_io.load(write_new(h5py, path, deep, arrays))


@pytest.mark.oracle
def test_arrays_outside_of_the_file_are_not_fetched(h5py, tmp_path, rng):
    arrays = arrays_of(rng, 4)
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["secret"] = arrays[0]
    (tmp_path / "raw").write_bytes(arrays[0].tobytes())
    shape, external = arrays[0].shape, [(str(tmp_path / "raw"), 0, arrays[0].nbytes)]
    layout = h5py.VirtualLayout(shape=shape, dtype="f4")
    layout[...] = h5py.VirtualSource(str(tmp_path / "other.h5"), "secret", shape=shape)
    hostile = {
        "a link": lambda g: g.__setitem__(
            "0", h5py.ExternalLink(str(tmp_path / "other.h5"), "secret")
        ),
        "outside": lambda g: g.create_dataset("0", shape, "f4", external=external),
        "virtual": lambda g: g.create_virtual_dataset("0", layout),
        "huge": lambda g: g.create_dataset("0", (2**20, 2**20), "f4", chunks=(64, 64)),
        "text": lambda g: g.create_dataset("0", data=np.array([b"abc"])),
    }
    for name, make in hostile.items():
        path = tmp_path / "m.weights.h5"
        with h5py.File(path, "w") as file:
            group = file.create_group("layers/lstm/cell/vars")
            make(group)
            group["1"], group["2"] = arrays[1:]
        with pytest.raises(FormatError, match=r"link|another file|no array of floats"):
            keras_io.load_into(LSTM(F, H), path)
        assert name


@pytest.mark.oracle
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_any_changed_byte_gives_a_model_or_a_format_error(h5py, data, tmp_path):
    rng = np.random.default_rng(0)
    model = Chain(LSTM(F, H, rng=rng), Dense(H, 2, rng=rng))
    name = data.draw(st.sampled_from(["m.keras", "m.weights.h5"]))
    keras_io.save(model, tmp_path / name)
    whole = bytearray((tmp_path / name).read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / name).write_bytes(whole[: data.draw(st.integers(0, 2 * len(whole)))])
    try:
        if name == "m.keras":
            assert isinstance(keras_io.load(tmp_path / name), Chain)
        else:
            keras_io.load_into(model, tmp_path / name)
    except FormatError:
        pass


# ---------------------------------------------------------------------- Keras itself


@pytest.fixture
def keras(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    return pytest.importorskip("keras")


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in SAVED if name != "double"])
def test_keras_reads_a_saved_model_and_gives_its_numbers(keras, name, tmp_path, rng):
    model = SAVED[name]()
    for param in recur.params(model):
        param[...] = numbers(rng, *param.shape)
    keras_io.save(model, tmp_path / "m.keras")
    theirs = keras.models.load_model(tmp_path / "m.keras")
    x = numbers(rng, B, T, F)
    y = model(x.transpose(2, 0, 1))
    want = y.transpose(1, 2, 0) if y.ndim == 3 else y.T
    np.testing.assert_allclose(theirs.predict(x, verbose=0), want, rtol=0, atol=3e-6)
    keras_io.save(model, tmp_path / "m.weights.h5")
    theirs.set_weights([np.zeros_like(w) for w in theirs.get_weights()])
    theirs.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_allclose(theirs.predict(x, verbose=0), want, rtol=0, atol=3e-6)
    for path in ("again.keras", "again.h5"):
        theirs.save(tmp_path / path)
        again = keras_io.load(tmp_path / path)
        recur.reset(model)
        np.testing.assert_array_equal(again(x.transpose(2, 0, 1)), model(x.transpose(2, 0, 1)))


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SimpleRNN", {"activation": "relu"}),
        ("LSTM", {}),
        ("LSTM", {"use_bias": False}),
        ("GRU", {}),
        ("GRU", {"reset_after": False}),
    ],
)
def test_a_layer_of_keras_gives_the_numbers_of_the_cell_from_any_state(keras, kind, options, rng):
    theirs = getattr(keras.layers, kind)(H, return_sequences=True, **options)
    theirs.build((None, None, F))
    theirs.set_weights([numbers(rng, *w.shape) for w in theirs.get_weights()])
    config = theirs.get_config()
    names = ("units", "activation", "recurrent_activation", "use_bias", "reset_after")
    kept = {name: config[name] for name in names if name in config}
    m = Recur(keras_io.cell_from_keras(kind, *theirs.get_weights(), **kept))
    x, state = numbers(rng, B, T, F), [numbers(rng, B, H) for _ in m.cell.state_names]
    m.state = tuple(part.T for part in state) if len(state) > 1 else state[0].T
    start = [keras.ops.convert_to_tensor(part) for part in state]
    want = keras.ops.convert_to_numpy(theirs(x, initial_state=start))
    np.testing.assert_allclose(m(x.transpose(2, 0, 1)).transpose(1, 2, 0), want, rtol=0, atol=3e-6)
    arrays, again = keras_io.cell_to_keras(m.cell)
    assert {name: config[name] for name in again} == again
    theirs.set_weights(list(arrays.values()))
    back = keras.ops.convert_to_numpy(theirs(x, initial_state=start))
    np.testing.assert_allclose(back, want, rtol=0, atol=3e-6)
