"""Weights and models of ONNX, against onnxruntime, ONNX's own tests and PyTorch's exporter."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import recur
from recur import (
    GRU,
    LSTM,
    RNN,
    BatchNorm,
    Bidirectional,
    Chain,
    Dense,
    Dropout,
    Embedding,
    FinalStep,
    GRUv3,
    LayerNorm,
    Parallel,
    Recur,
    Reversed,
    Scale,
    SkipConnection,
)
from recur.errors import FormatError, ShapeError, StateError
from recur.io import onnx as onnx_io

# Bidirectional layers are put in states here, which is only odd outside of tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*layer that runs backwards.*:UserWarning")


def numbers(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def random_cell(make, rng, dtype=np.float32, **options):
    cell = make(3, 5, dtype=dtype, rng=rng, **options)
    for param in recur.params(cell):
        param[...] = 0.5 * rng.standard_normal(param.shape)
    return cell


# ---------------------------------------------------------------------- one cell

CELLS = [
    (recur.RNNCell, {}),
    (recur.RNNCell, {"bias": False}),
    (recur.LSTMCell, {}),
    (recur.LSTMCell, {"peepholes": True, "gate_act": "hard_sigmoid"}),
    (recur.LSTMCell, {"bias": False}),
    (recur.GRUCell, {}),
    (recur.GRUCell, {"recurrent_bias": True, "gate_act": "hard_sigmoid"}),
    (recur.GRUCell, {"recurrent_bias": True, "bias": False}),
    (recur.GRUv3Cell, {}),
    (recur.GRUv3Cell, {"bias": False, "gate_act": "hard_sigmoid"}),
]


@pytest.mark.parametrize(("make", "options"), CELLS)
def test_a_cell_goes_to_the_layout_of_onnx_and_back_unchanged(make, options, rng, dtype):
    cell = random_cell(make, rng, dtype, **options)
    kind = {"GRUv3Cell": "GRU"}.get(make.__name__, make.__name__.removesuffix("Cell"))
    arrays, attributes = onnx_io.cell_to_onnx(cell)
    back = onnx_io.cell_from_onnx(kind, **arrays, **attributes)
    assert type(back) is make and back.dtype == dtype
    assert getattr(back, "gate_act", None) == getattr(cell, "gate_act", None)
    held = recur.state_dict(back)
    for name, array in recur.state_dict(cell).items():
        np.testing.assert_array_equal(held[name], array)
    rest = held.keys() - recur.state_dict(cell).keys()
    assert not any(held[name].any() for name in rest)


@pytest.mark.parametrize(
    "act", ["tanh", "relu", "sigmoid", "hard_sigmoid", "identity", "leakyrelu", "elu", "softsign"]
)
def test_an_activation_of_an_rnn_goes_there_and_back(act):
    arrays, attributes = onnx_io.cell_to_onnx(recur.RNNCell(3, 5, act))
    assert recur.ops.name_of(onnx_io.cell_from_onnx("RNN", **arrays, **attributes).act) == act


def test_input_forget_is_held_by_rows_of_the_other_sign(rng):
    arrays, attributes = onnx_io.cell_to_onnx(random_cell(recur.LSTMCell, rng, peepholes=True))
    cell = onnx_io.cell_from_onnx("LSTM", **arrays, **attributes, input_forget=1)
    for weight in (cell.Wi, cell.Wh, cell.b):
        np.testing.assert_array_equal(weight[5:10], -np.asarray(weight[:5]))
    np.testing.assert_array_equal(cell.peephole[1], -np.asarray(cell.peephole[0]))


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("LSTM", {"clip": 3.0}, "clip=3.0"),
        ("LSTM", {"activations": ["Sigmoid", "Relu", "Tanh"]}, "Sigmoid, Relu, Tanh"),
        ("LSTM", {"activations": ["Sigmoid", "Tanh", "Softsign"]}, "Softsign"),
        ("LSTM", {"activations": ["Relu", "Tanh", "Tanh"]}, "Relu, Tanh, Tanh"),
        ("LSTM", {"activations": ["Sigmoid"]}, "expected 3"),
        (
            "GRU",
            {"activations": ["HardSigmoid", "Tanh"], "activation_alpha": [0.3]},
            "other parameters",
        ),
        (
            "GRU",
            {"activations": ["HardSigmoid", "Tanh"], "activation_beta": [0.4]},
            "other parameters",
        ),
        ("RNN", {"activations": ["ScaledTanh"]}, "ScaledTanh"),
        ("RNN", {"activations": ["Affine"], "activation_alpha": [2.0]}, "other parameters"),
        ("GRU", {"P": np.zeros((1, 15), np.float32)}, "only an LSTM has peepholes"),
        ("GRU", {"hidden_size": 4}, "hidden_size is 4"),
        ("GRU", {"recurrent_bias": False}, "recurrent_bias=True"),
    ],
)
def test_what_cells_cannot_hold_is_refused_by_name(kind, change, reason, rng):
    options = {"recurrent_bias": True} if kind == "GRU" else {}
    cell = random_cell(getattr(recur, f"{kind}Cell"), rng, **options)
    arrays, attributes = onnx_io.cell_to_onnx(cell)
    with pytest.raises(FormatError, match=reason):
        onnx_io.cell_from_onnx(kind, **{**arrays, **attributes, **change})


def test_arrays_that_do_not_fit_are_refused(rng):
    arrays, _ = onnx_io.cell_to_onnx(random_cell(recur.LSTMCell, rng))
    for name in arrays:
        with pytest.raises(ShapeError, match=name):
            onnx_io.cell_from_onnx("LSTM", **{**arrays, name: arrays[name][:, 1:]})
    with pytest.raises(FormatError, match="no recurrent operator"):
        onnx_io.cell_from_onnx("Conv", **arrays)


def test_cells_that_onnx_lacks_are_refused():
    with pytest.raises(StateError, match="lacks this activation"):
        onnx_io.cell_to_onnx(recur.RNNCell(3, 5, recur.ops.mish))
    with pytest.raises(StateError, match="no other library"):
        onnx_io.cell_to_onnx(recur.extra_cells.UGRNNCell(3, 5))


def test_a_model_without_onnx_names_the_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"recur\[onnx\]"):
        onnx_io.to_onnx(LSTM(3, 5))


# ---------------------------------------------------------------------- models in onnxruntime


def randomised(model, rng):
    for param in recur.params(model):
        param[...] = 0.5 * rng.standard_normal(param.shape)
    return model


def with_statistics(model, rng):
    recur.trainmode(model)
    model(numbers(rng, 3, 4, 6))
    recur.reset(model)
    return recur.testmode(model)


# Every layer; the name, a builder, and whether the graph is a row that `from_onnx` reads.
MODELS = {
    "rnn": (lambda: RNN(3, 5), True),
    "relu rnn": (lambda: RNN(3, 5, recur.relu), True),
    "lstm": (lambda: LSTM(3, 5), True),
    "lstm without bias": (lambda: LSTM(3, 5, bias=False), True),
    "peepholes": (lambda: LSTM(3, 5, peepholes=True), True),
    "hard gates": (lambda: LSTM(3, 5, gate_act="hard_sigmoid"), True),
    "gru": (lambda: GRU(3, 5), True),
    "gru with inner bias": (lambda: GRU(3, 5, recurrent_bias=True), True),
    "gruv3": (lambda: GRUv3(3, 5, gate_act="hard_sigmoid"), True),
    "reversed": (lambda: Reversed(GRU(3, 5)), True),
    "bidirectional": (lambda: Bidirectional.of(LSTM, 3, 5), True),
    "hard bidirectional": (lambda: Bidirectional.of(GRU, 3, 5, gate_act="hard_sigmoid"), True),
    "unlike directions": (lambda: Bidirectional(LSTM(3, 5), GRU(3, 2)), False),
    "learned start": (
        lambda: Chain(LSTM(3, 5, init_state=(np.ones(5), np.arange(5.0)), learn_init=True)),
        True,
    ),
    "stack": (lambda: Chain(LSTM(3, 5), GRU(5, 4), Dropout(0.5), RNN(4, 3), Dense(3, 2)), True),
    "nested, named": (
        lambda: Chain(body=Chain(GRU(3, 5), GRU(5, 4)), head=Dense(4, 2, recur.relu)),
        True,
    ),
    "final": (lambda: Chain(LSTM(3, 5), FinalStep(), Dense(5, 2, recur.softmax)), True),
    "final, both": (lambda: Chain(Bidirectional.of(GRU, 3, 5), FinalStep(5), Dense(10, 2)), True),
    "final, reversed": (lambda: Chain(Reversed(RNN(3, 5)), FinalStep(0)), True),
    "final after dense": (lambda: Chain(LSTM(3, 5), Dense(5, 4), FinalStep(2)), False),
    "norms": (lambda: Chain(LSTM(3, 5), LayerNorm(5, recur.tanh), BatchNorm(5), Scale(5)), False),
    "norm": (lambda: Chain(LSTM(3, 5), LayerNorm(5, eps=1e-2), Scale(5, recur.tanh)), True),
    "bare norms": (
        lambda: Chain(
            GRU(3, 5), LayerNorm(5, affine=False), BatchNorm(5, affine=False), Scale(5, bias=False)
        ),
        False,
    ),
    "parallel": (lambda: Chain(Parallel(recur.vcat, GRU(3, 5), LSTM(3, 2)), Dense(7, 2)), False),
    "sum": (lambda: Chain(Parallel("+", GRU(3, 5), LSTM(3, 5), RNN(3, 5)), recur.tanh), False),
    "skip": (lambda: Chain(GRU(3, 5), SkipConnection(Dense(5, 5, recur.relu), "*")), False),
    "no recurrence": (lambda: Chain(Dense(3, 4, recur.tanh), Dense(4, 2, bias=False)), True),
}
ACTIVATIONS = (
    *("identity", "tanh", "sigmoid", "relu", "softplus", "softsign", "elu", "celu", "selu"),
    *("leakyrelu", "hard_sigmoid", "hardsigmoid", "hardswish", "softshrink", "relu6", "hardtanh"),
    *("swish", "mish", "lisht", "tanhshrink", "logsigmoid"),
)


def start_anywhere(model, batch, rng):
    """Puts every layer in a random state; the same numbers as inputs of the graph."""
    feed = onnx_io.initial_states(model, batch)
    for name, array in feed.items():
        feed[name] = numbers(rng, *array.shape)
    for path, layer in recur.module.walk(model):
        if isinstance(layer, Recur):
            names = [f"{path}.{n}_in" if path else f"{n}_in" for n in layer.cell.state_names]
            parts = tuple(feed[name].T for name in names)
            layer.state = parts if len(parts) > 1 else parts[0]
    return feed


def run(proto, feed):
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


def near(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=3e-6)


def near_states(model, found):
    for path, layer in recur.module.walk(model):
        if isinstance(layer, Recur):
            parts = layer.state if isinstance(layer.state, tuple) else (layer.state,)
            for name, part in zip(layer.cell.state_names, parts, strict=True):
                near(found[f"{path}.{name}_out" if path else f"{name}_out"], part.T)


@pytest.mark.oracle
@pytest.mark.parametrize("lengths", [None, np.array([6, 2, 1, 4])])
@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_gives_the_numbers_of_the_model(name, lengths, rng):
    pytest.importorskip("onnx")
    build, readable = MODELS[name]
    if lengths is not None and name == "no recurrence":
        lengths = None
    model = with_statistics(randomised(build(), rng), rng)
    options = {} if lengths is None else {"lengths": lengths}
    proto = onnx_io.to_onnx(model, lengths=lengths is not None)
    X = numbers(rng, 3, 4, 6)
    feed = {"x": X.T.copy(), **start_anywhere(model, 4, rng)}
    if lengths is not None:
        feed["lengths"] = lengths.astype(np.int32)
    before = recur.states(model)
    want = model(X, **options)
    found = run(proto, feed)
    near(found["y"], want.T)
    near_states(model, found)
    if not readable:
        with pytest.raises(FormatError, match=r"only a row of layers|no counterpart"):
            onnx_io.from_onnx(proto)
        return
    again = onnx_io.from_onnx(proto)
    recur.reset(model)
    np.testing.assert_array_equal(again(X, **options), model(X, **options))
    assert before.keys() == recur.states(model).keys()


@pytest.mark.oracle
def test_a_graph_goes_on_from_the_states_that_it_gave(rng):
    pytest.importorskip("onnx")
    model = randomised(Chain(LSTM(3, 5), GRU(5, 2)), rng)
    proto = onnx_io.to_onnx(model)
    states = onnx_io.initial_states(model, 2)
    for t in range(3):  # one graph for any batch and any number of steps
        x = numbers(rng, 3, 2, t + 1)
        found = run(proto, {"x": x.T.copy(), **states})
        near(found.pop("y"), model(x).T)
        states = {name.replace("_out", "_in"): state for name, state in found.items()}


@pytest.mark.oracle
@pytest.mark.parametrize("lengths", [None, np.array([5, 2])])
def test_an_embedding_takes_whole_numbers(lengths, rng):
    pytest.importorskip("onnx")
    model = randomised(Chain(Embedding(7, 3), LSTM(3, 5), Dense(5, 7), recur.logsoftmax), rng)
    proto = onnx_io.to_onnx(model, lengths=lengths is not None)
    X = rng.integers(0, 7, (2, 5))
    feed = {"x": X.T.copy(), **onnx_io.initial_states(model, 2)}
    options = {} if lengths is None else {"lengths": lengths}
    feed |= {name: lengths.astype(np.int32) for name in options}
    want = model(X, **options)
    near(run(proto, feed)["y"], want.T)
    np.testing.assert_array_equal(onnx_io.from_onnx(proto)(X, **options), want)


@pytest.mark.oracle
def test_two_embeddings_may_look_up_one_index(rng):
    pytest.importorskip("onnx")
    model = randomised(Chain(Parallel("+", Embedding(7, 3), Embedding(7, 3)), GRU(3, 2)), rng)
    X = rng.integers(0, 7, (2, 5))
    feed = {"x": X.T.copy(), **onnx_io.initial_states(model, 2)}
    near(run(onnx_io.to_onnx(model), feed)["y"], model(X).T)


@pytest.mark.oracle
def test_an_embedding_inside_a_model_takes_one_hot_columns(rng):
    pytest.importorskip("onnx")
    X = numbers(rng, 3, 2, 4)
    for model in (
        Chain(Dense(3, 7, recur.softmax), Embedding(7, 2)),
        Parallel("+", Dense(3, 2), Embedding(3, 2)),
    ):
        randomised(model, rng)
        near(run(onnx_io.to_onnx(model), {"x": X.T.copy()})["y"], model(X).T)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_that_of_onnx(name, rng):
    pytest.importorskip("onnx")
    model = Chain(Dense(3, 3), recur.ops.activation(name))
    model[0].weight = np.eye(3)
    X = 4 * numbers(rng, 3, 50, 4)
    near(run(onnx_io.to_onnx(model), {"x": X.T.copy()})["y"], model(X).T)


@pytest.mark.oracle
def test_a_saved_model_is_read_back_with_the_same_numbers(tmp_path, rng, dtype):
    pytest.importorskip("onnx")
    model = Chain(LSTM(3, 5, init_state=(np.ones(5), np.zeros(5)), dtype=dtype, rng=rng))
    onnx_io.save(model, tmp_path / "model.onnx")
    X = numbers(rng, 3, 2, 4, dtype=dtype)
    again = onnx_io.load(tmp_path / "model.onnx")
    y = again(X)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, model(X))


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: Chain(GRU(3, 5), np.sqrt), r"layers\.1: ONNX has no operator"),
        (lambda: Chain(GRU(3, 5), Dense(5, 2, recur.gelu)), r"layers\.1: ONNX has no operator"),
        (lambda: Chain(GRU(3, 5), FinalStep(), GRU(5, 5)), r"layers\.2: .*gets no sequence"),
        (lambda: Parallel(tuple, GRU(3, 5), GRU(3, 5)), "the connection"),
        (lambda: Parallel("+", GRU(3, 5), Chain(GRU(3, 5), FinalStep())), "joins a step"),
        (lambda: Recur(recur.extra_cells.UGRNNCell(3, 5)), "ONNX cannot compute"),
        (lambda: Chain(*[GRU(3, 3)] * 2), "stands in the model twice"),
        (lambda: Chain(GRU(3, 5), BatchNorm(5, track_stats=False)), r"layers\.1"),
        (lambda: Chain(GRU(3, 5), GRU(5, 2, dtype=np.float64)), "float32 and of float64"),
    ],
)
def test_a_model_that_onnx_cannot_compute_is_refused_by_its_path(build, reason):
    pytest.importorskip("onnx")
    with pytest.raises(StateError, match=reason):
        onnx_io.to_onnx(build())


# ---------------------------------------------------------------------- models of others


def model_of(nodes, inputs, outputs, arrays):
    """A graph by hand: inputs and outputs by name with their shapes."""
    onnx = pytest.importorskip("onnx")
    kinds = {"lengths": onnx.TensorProto.INT32, "i": onnx.TensorProto.INT64}
    floats = onnx.TensorProto.FLOAT

    def values(named):
        return [
            onnx.helper.make_tensor_value_info(name, kinds.get(name, floats), shape)
            for name, shape in named.items()
        ]

    constants = [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items()]
    made = [
        onnx.helper.make_node(kind, ins, outs, name=f"the {kind} {k}", **attributes)
        for k, (kind, ins, outs, attributes) in enumerate(nodes)
    ]
    graph = onnx.helper.make_graph(made, "g", values(inputs), values(outputs), constants)
    return onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    )


SEQUENCE = {"x": [None, None, 3]}
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def weights(rng, kind, ways=1, bias=True, peepholes=False):
    found = {
        "W": numbers(rng, ways, GATES[kind] * 5, 3),
        "R": numbers(rng, ways, GATES[kind] * 5, 5),
    }
    if bias:
        found["B"] = numbers(rng, ways, GATES[kind] * 10)
    if peepholes:
        found["P"] = numbers(rng, ways, 15)
    return {name: 0.5 * array for name, array in found.items()}


@pytest.mark.oracle
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("RNN", {}),
        ("RNN", {"activations": ["Relu"]}),
        ("RNN", {"activations": ["Affine"], "activation_alpha": [1.0], "activation_beta": [0.0]}),
        ("LSTM", {}),
        ("LSTM", {"input_forget": 1}),
        ("LSTM", {"peepholes": True, "input_forget": 1}),
        ("LSTM", {"peepholes": True}),
        ("LSTM", {"bias": False, "activations": ["HardSigmoid", "Tanh", "Tanh"]}),
        ("GRU", {}),
        ("GRU", {"linear_before_reset": 1}),
        (
            "GRU",
            {
                "activations": ["HardSigmoid", "tanh"],
                "activation_alpha": [0.2],
                "activation_beta": [0.5],
            },
        ),
    ],
)
def test_an_operator_of_others_becomes_layers_with_its_numbers(kind, options, direction, rng):
    options = dict(options)
    ways = 2 if direction == "bidirectional" else 1
    arrays = weights(rng, kind, ways, options.pop("bias", True), options.pop("peepholes", False))
    attributes = {
        name: value * ways if isinstance(value, list) else value for name, value in options.items()
    }
    states = ["h", "c"][: 2 if kind == "LSTM" else 1]
    row = ["x", "W", "R", "B" if "B" in arrays else "", "lengths", *states]
    row += ["P"] if "P" in arrays else []
    outputs = ["y", *(f"y_{name}" for name in states)]
    nodes = [(kind, row, outputs, {"hidden_size": 5, "direction": direction, **attributes})]
    inputs = SEQUENCE | {"lengths": [None]} | {name: [ways, None, 5] for name in states}
    proto = model_of(nodes, inputs, dict.fromkeys(outputs, None), arrays)

    model = onnx_io.from_onnx(proto)
    X, lengths = numbers(rng, 3, 4, 6), np.array([6, 1, 3, 2])
    begin = {name: numbers(rng, ways, 4, 5) for name in states}
    layer = model[0]
    halves = {"forward": [layer], "reverse": [getattr(layer, "layer", None)]}.get(direction) or [
        layer.forward,
        layer.backward,
    ]
    for way, half in enumerate(halves):
        parts = tuple(begin[name][way].T for name in states)
        half.state = parts if len(parts) > 1 else parts[0]
    want = run(proto, {"x": X.T.copy(), "lengths": lengths.astype(np.int32), **begin})
    y = model(X, lengths=lengths)
    near(y.T.reshape(6, 4, ways, 5).transpose(0, 2, 1, 3), want["y"])
    for way, half in enumerate(halves):
        parts = half.state if isinstance(half.state, tuple) else (half.state,)
        for name, part in zip(states, parts, strict=True):
            near(part.T, want[f"y_{name}"][way])


@pytest.mark.oracle
@pytest.mark.parametrize("final", [False, True])
def test_a_model_that_is_batch_first_is_read(final, rng):
    onnx = pytest.importorskip("onnx")
    arrays = weights(rng, "LSTM") | {"axes": np.array([1 if final else 2])}
    outs = ["", "y"] if final else ["y"]
    nodes = [
        ("LSTM", ["x", "W", "R", "B"], outs, {"hidden_size": 5, "layout": 1}),
        ("Squeeze", ["y", "axes"], ["z"], {}),
    ]
    proto = model_of(nodes, SEQUENCE, {"z": None}, arrays)
    X = numbers(rng, 3, 4, 6)
    model = onnx_io.from_onnx(proto)
    (want,) = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": X.transpose(1, 2, 0)})
    near(model(X), want.T if final else want.transpose(2, 0, 1))


@pytest.mark.oracle
def test_axes_are_followed_through_transposes(rng):
    arrays = weights(rng, "GRU", 2) | {
        "shape": np.array([0, 0, -1]),
        "M": numbers(rng, 10, 4),
        "b": numbers(rng, 4),
        "K": numbers(rng, 2, 4),
        "last": np.array(-1),
    }
    nodes = [
        ("Transpose", ["x"], ["t"], {"perm": [1, 0, 2]}),
        ("GRU", ["t", "W", "R", "B"], ["u"], {"hidden_size": 5, "direction": "bidirectional"}),
        ("Transpose", ["u"], ["v"], {"perm": [0, 2, 1, 3]}),
        ("Reshape", ["v", "shape"], ["w"], {}),
        ("MatMul", ["w", "M"], ["m"], {}),
        ("Add", ["b", "m"], ["a"], {}),
        ("Tanh", ["a"], ["r"], {}),
        ("Transpose", ["r"], ["s"], {"perm": [1, 0, 2]}),
        ("Gather", ["s", "last"], ["l"], {"axis": 1}),
        ("Gemm", ["l", "K"], ["y"], {"transB": 1}),
    ]
    proto = model_of(nodes, SEQUENCE, {"y": None}, arrays)
    X = numbers(rng, 3, 4, 6)
    model = onnx_io.from_onnx(proto)
    assert repr(model[1]) == "Dense(10 => 4, tanh)"
    near(model(X).T, run(proto, {"x": X.transpose(1, 2, 0).copy()})["y"])


@pytest.mark.oracle
def test_constant_starts_and_constants_that_are_computed_are_read(rng):
    arrays = weights(rng, "LSTM") | {
        "H": np.tile(numbers(rng, 1, 1, 5), (1, 4, 1)),
        "flat": np.zeros(1, np.float32),
        "size": np.array([1, 4, 5]),
    }
    nodes = [
        ("Transpose", ["W"], ["Wt"], {"perm": [0, 2, 1]}),
        ("Transpose", ["Wt"], ["Ww"], {"perm": [0, 2, 1]}),
        ("Expand", ["flat", "size"], ["C"], {}),
        ("LSTM", ["x", "Ww", "R", "B", "", "H", "C"], ["y"], {"hidden_size": 5}),
    ]
    proto = model_of(nodes, SEQUENCE, {"y": None}, arrays)
    X = numbers(rng, 3, 4, 6)
    model = onnx_io.from_onnx(proto)
    np.testing.assert_array_equal(model[0].init.h, arrays["H"][0, 0])
    near(model(X).T, run(proto, {"x": X.T.copy()})["y"][:, 0])


def lstm(**attributes):
    return ("LSTM", ["x", "W", "R", "B"], ["y"], {"hidden_size": 5, **attributes})


REFUSED = {
    "clip": ([lstm(clip=2.0)], "the LSTM.*clip"),
    "activations": ([lstm(activations=["Sigmoid", "Relu", "Tanh"])], "Relu"),
    "too few activations": ([lstm(activations=["Sigmoid"])], "expected 3"),
    "an unknown attribute": ([lstm(colour=1)], "colour"),
    "an unknown direction": ([lstm(direction="sideways")], "sideways"),
    "an unknown operator": ([("Conv", ["x", "W"], ["y"], {})], "the Conv.*no counterpart"),
    "a value twice": ([("Add", ["x", "x"], ["y"], {})], "joins 2 computed values"),
    "a constant output": ([("Identity", ["W"], ["y"], {})], "joins 0"),
    "a cell state": ([("LSTM", ["x", "W", "R"], ["", "", "y"], {"hidden_size": 5})], "Y_c"),
    "fixed lengths": (
        [("LSTM", ["x", "W", "R", "B", "sizes"], ["y"], {"hidden_size": 5})],
        "sequence_lens.*constant",
    ),
    "starts that differ": (
        [("LSTM", ["x", "W", "R", "B", "", "starts"], ["y"], {"hidden_size": 5})],
        "differs between the samples",
    ),
    "a computed start": (
        [("Exp", ["x"], ["e"], {}), ("LSTM", ["x", "W", "R", "B", "", "e"], ["y"], {})],
        "initial_h.*computed",
    ),
    "a product from the left": ([("MatMul", ["M", "x"], ["y"], {})], "from the left"),
    "a scaled product": ([("Gemm", ["x", "M"], ["y"], {"alpha": 2.0})], "alpha or beta"),
    "a softmax over time": ([("Softmax", ["x"], ["y"], {"axis": 0})], "along axis 0"),
    "a slope": ([("LeakyRelu", ["x"], ["y"], {"alpha": 0.3})], "alpha=0.3"),
    "a matrix that is added": ([("Add", ["x", "M"], ["y"], {})], "one number for each feature"),
    "a step in the middle": ([lstm(), ("Gather", ["y", "two"], ["z"], {"axis": 0})], "number 2"),
    "both directions": (
        [
            lstm(),
            ("Squeeze", ["y", "one"], ["s"], {}),
            ("Transpose", ["s"], ["t"], {"perm": [1, 0, 2]}),
            ("LSTM", ["t", "W5", "R", "B"], ["z"], {"hidden_size": 5}),
        ],
        "the axes BTF",
    ),
    "a removed axis": ([lstm(), ("Squeeze", ["y", "two_"], ["z"], {})], "no single direction"),
    "a reshape": ([lstm(), ("Reshape", ["y", "shape"], ["z"], {})], "may join D and F"),
    "a changed type": ([("Cast", ["x"], ["y"], {"to": 11})], "type of numbers"),
    "nothing": ([], "nothing computes"),
}


@pytest.mark.oracle
@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_without_counterpart_is_refused_by_name(name, rng):
    nodes, reason = REFUSED[name]
    arrays = weights(rng, "LSTM") | {
        "W5": numbers(rng, 1, 20, 5),
        "M": numbers(rng, 3, 3),
        "sizes": np.array([6, 2], np.int32),
        "starts": numbers(rng, 1, 2, 5),
        "one": np.array([1]),
        "two_": np.array([2]),
        "two": np.array(2),
        "shape": np.array([-1, 5]),
    }
    output = nodes[-1][2][-1] if nodes else "y"
    with pytest.raises(FormatError, match=reason):
        onnx_io.from_onnx(model_of(nodes, SEQUENCE, {output: None}, arrays))


@pytest.mark.oracle
def test_a_second_output_that_is_no_state_is_refused(rng):
    nodes = [lstm(), ("Tanh", ["x"], ["t"], {})]
    proto = model_of(nodes, SEQUENCE, {"y": None, "t": None}, weights(rng, "LSTM"))
    with pytest.raises(FormatError, match="'t' is no state"):
        onnx_io.from_onnx(proto)


@pytest.mark.oracle
def test_layers_that_disagree_about_padding_are_refused(rng):
    nodes = [
        ("LSTM", ["x", "W", "R", "B", "lengths"], ["y"], {"hidden_size": 5}),
        ("Squeeze", ["y", "one"], ["s"], {}),
        ("LSTM", ["s", "W5", "R", "B"], ["z"], {"hidden_size": 5}),
    ]
    arrays = weights(rng, "LSTM") | {"W5": numbers(rng, 1, 20, 5), "one": np.array([1])}
    proto = model_of(nodes, SEQUENCE | {"lengths": [None]}, {"z": None}, arrays)
    with pytest.raises(FormatError, match="sequence_lens and others"):
        onnx_io.from_onnx(proto)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("lengths", "direction", "reason"),
    [
        ("lengths", "forward", "in padded sequences is padding"),
        ("", "bidirectional", "ends at both ends"),
        ("", "reverse", "takes number -1 along the axis T"),
    ],
)
def test_a_last_step_that_is_no_end_is_refused(lengths, direction, reason, rng):
    ways = 1 + (direction == "bidirectional")
    row = ["x", "W", "R", "B", lengths]
    nodes = [
        ("LSTM", row, ["y"], {"hidden_size": 5, "direction": direction}),
        ("Gather", ["y", "last"], ["z"], {"axis": 0}),
    ]
    arrays = weights(rng, "LSTM", ways) | {"last": np.array(-1)}
    proto = model_of(nodes, SEQUENCE | {"lengths": [None]}, {"z": None}, arrays)
    with pytest.raises(FormatError, match=reason):
        onnx_io.from_onnx(proto)


@pytest.mark.oracle
def test_a_weight_that_is_an_input_is_asked_for(rng):
    arrays = weights(rng, "LSTM")
    W = arrays.pop("W")
    proto = model_of([lstm()], SEQUENCE | {"W": W.shape}, {"y": None}, arrays)
    with pytest.raises(FormatError, match="constants="):
        onnx_io.from_onnx(proto)
    model = onnx_io.from_onnx(proto, constants={"W": W})
    assert model[0].cell.n_in == 3


@pytest.mark.oracle
@pytest.mark.parametrize("content", [b"", b"no model", b"\x08\x08\x12\xff\xff\xff\xff"])
def test_a_damaged_file_is_refused(content, tmp_path):
    pytest.importorskip("onnx")
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(FormatError, match=r"m\.onnx: "):
        onnx_io.load(tmp_path / "m.onnx")


@pytest.mark.oracle
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_gives_a_model_or_a_format_error(data, tmp_path):
    pytest.importorskip("onnx")
    rng = np.random.default_rng(0)
    model = Chain(LSTM(2, 2, rng=rng), Dense(2, 2, recur.relu, rng=rng))
    whole = bytearray(onnx_io.to_onnx(model).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "m.onnx").write_bytes(whole[: data.draw(st.integers(0, 2 * len(whole)))])
    try:
        found = onnx_io.load(tmp_path / "m.onnx")
    except FormatError:
        return
    assert isinstance(found, Chain)


# ---------------------------------------------------------------------- ONNX's own tests


def node_cases():
    """The ONNX project's tests of its recurrent operators."""
    try:
        from onnx.backend.test.case.node import collect_testcases
    except ImportError:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            case
            for case in collect_testcases(None)
            if case.model is not None and case.model.graph.node[0].op_type in GATES
        ]


CASES = node_cases()


@pytest.mark.oracle
def test_the_onnx_project_has_tests_of_all_three_operators():
    pytest.importorskip("onnx")
    assert len(CASES) >= 18
    assert {case.model.graph.node[0].op_type for case in CASES} == set(GATES)


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_node_test_of_the_onnx_project_passes(case):
    node = case.model.graph.node[0]
    layout = next((a.i for a in node.attribute if a.name == "layout"), 0)
    for inputs, outputs in case.data_sets:
        named = dict(zip([value.name for value in case.model.graph.input], inputs, strict=True))
        X = named.pop("X")
        lengths = named.pop("sequence_lens", None)
        begin = {name: named.pop(name) for name in ("initial_h", "initial_c") if name in named}
        if lengths is not None:
            node.input[4] = ""
            np.testing.assert_array_equal(lengths, X.shape[0])
        case.model.graph.output[0].name = node.output[0] or node.output[1]
        del case.model.graph.output[1:]
        model = onnx_io.from_onnx(case.model, constants=named)
        layer = model[0]
        halves = [
            half
            for half in (getattr(layer, name, None) for name in ("layer", "forward", "backward"))
            if half is not None
        ] or [layer]
        if begin:
            halves[0].state = tuple(part[0].T for part in begin.values())
        x = X.transpose(2, 0, 1) if layout else X.transpose(2, 1, 0)
        sequence = layer(x)
        ours = {"Y": np.stack(np.split(sequence, len(halves))).transpose(3, 0, 2, 1)}
        for k, name in enumerate(("Y_h", "Y_c")):
            parts = [h.state if isinstance(h.state, tuple) else (h.state,) for h in halves]
            if k < len(parts[0]):
                ours[name] = np.stack([part[k].T for part in parts])
        names = [name for name in node.output if name]
        for name, want in zip(names, outputs, strict=True):
            got = ours[name]
            if layout:
                got = got.transpose(2, 0, 1, 3) if name == "Y" else got.transpose(1, 0, 2)
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-6)
        if not node.output[0]:  # the model ends with Y_h
            recur.reset(model)
            if begin:
                halves[0].state = tuple(part[0].T for part in begin.values())
            got = model(x).T.reshape(x.shape[1], len(halves), -1).transpose(1, 0, 2)
            np.testing.assert_allclose(got, outputs[0], rtol=1e-3, atol=1e-6)


# ---------------------------------------------------------------------- PyTorch's exporter


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_model_exported_by_torch_is_read(kind, both, batch_first, rng, tmp_path):
    pytest.importorskip("onnx")
    torch = pytest.importorskip("torch")
    torch.manual_seed(3)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            options = {"bidirectional": both, "batch_first": batch_first}
            self.rnn = getattr(torch.nn, kind)(3, 5, 2, **options)
            self.head = torch.nn.Linear(5 * (1 + both), 2)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    theirs, path = Model().eval(), tmp_path / "m.onnx"
    X = numbers(rng, 3, 4, 6)
    x = torch.tensor(X.transpose(1, 2, 0) if batch_first else X.T).contiguous()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(theirs, (x,), path, dynamo=False, opset_version=17)
    with torch.no_grad():
        want = theirs(x).numpy()
    got = onnx_io.load(path)(X)
    near(got, want.transpose(2, 0, 1) if batch_first else want.T)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_last_layers_final_state_is_read(kind, layers, rng, tmp_path):
    pytest.importorskip("onnx")
    torch = pytest.importorskip("torch")
    torch.manual_seed(4)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = getattr(torch.nn, kind)(3, 5, layers)
            self.head = torch.nn.Linear(5, 2)

        def forward(self, x):
            h = self.rnn(x)[1]
            return self.head((h[0] if kind == "LSTM" else h)[-1])

    theirs, X = Model().eval(), numbers(rng, 3, 4, 6)
    x = torch.tensor(X.T.copy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(theirs, (x,), tmp_path / "m.onnx", dynamo=False, opset_version=17)
    with torch.no_grad():
        want = theirs(x).numpy()
    model = onnx_io.load(tmp_path / "m.onnx")
    assert isinstance(model[layers], FinalStep)
    near(model(X), want.T)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("both", [False, True])
def test_states_that_go_in_and_out_of_an_exported_model_are_its_layers(kind, both, rng, tmp_path):
    pytest.importorskip("onnx")
    torch = pytest.importorskip("torch")
    torch.manual_seed(5)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = getattr(torch.nn, kind)(3, 5, 2, bidirectional=both)

        def forward(self, x, *state):
            y, new = self.rnn(x, state if kind == "LSTM" else state[0])
            return (y, *new) if kind == "LSTM" else (y, new)

    theirs, X, ways = Model().eval(), numbers(rng, 3, 4, 6), 1 + both
    states = [numbers(rng, 2 * ways, 4, 5) for _ in range(2 if kind == "LSTM" else 1)]
    given_ = (torch.tensor(X.T.copy()), *map(torch.tensor, states))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(theirs, given_, tmp_path / "m.onnx", dynamo=False, opset_version=17)
    with torch.no_grad():
        want, *last = (part.numpy() for part in theirs(*given_))
    model = onnx_io.load(tmp_path / "m.onnx")
    layers = [half for _, half in recur.module.walk(model) if isinstance(half, Recur)]
    assert len(layers) == 2 * ways
    for k, layer in enumerate(layers):
        parts = tuple(state[k].T for state in states)
        layer.state = parts if len(parts) > 1 else parts[0]
    near(model(X), want.T)
    for k, layer in enumerate(layers):
        parts = layer.state if isinstance(layer.state, tuple) else (layer.state,)
        for part, their in zip(parts, last, strict=True):
            near(part.T, their[k])
