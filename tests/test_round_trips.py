"""A model trained here, written to each kind of file and read back, gives the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from julia_writer import NT, Jld2

import recur
from recur import GRU, LSTM, RNN, Adam, Chain, Dense, GRUv3
from recur.io import flux
from recur.io import onnx as onnx_io
from recur.losses import mse

LAYERS = {
    "rnn": lambda **o: [RNN(3, 5, recur.relu, **o), Dense(5, 2)],
    "lstm": lambda **o: [LSTM(3, 5, **o), Dense(5, 2, recur.sigmoid)],
    "gru": lambda **o: [GRU(3, 5, **o), Dense(5, 2, recur.tanh)],
    "gruv3": lambda **o: [GRUv3(3, 5, **o), Dense(5, 2)],
    "stacked": lambda **o: [LSTM(3, 5, **o), GRU(5, 4, **o), Dense(4, 2, bias=False)],
}


def fresh(name: str, seed: int, dtype: Any, **options: Any) -> Chain:
    recur.seed(seed)
    model = Chain(*LAYERS[name](**options))
    return model if dtype == np.float32 else recur.f64(model)


@pytest.fixture(params=LAYERS)
def name(request):
    return request.param


@pytest.fixture
def trained(name, dtype, rng):
    """A model after thirty updates that learn its initial states as well, and what it was read."""
    model = fresh(name, 0, dtype, learn_init=True)
    X, Y = rng.standard_normal((3, 4, 6)), rng.uniform(0, 1, (2, 4, 6))
    opt = recur.setup(Adam(0.02), model)
    losses = []
    for _ in range(30):
        loss, grads = recur.withgradient(lambda m: mse(recur.reset(m)(X), Y), model)
        recur.update(opt, model, grads)
        losses.append(loss)
    assert losses[-1] < losses[0]
    assert all(np.any(p) for p in recur.params(model))
    return recur.reset(model)


@pytest.fixture
def X(dtype, rng):
    return rng.standard_normal((3, 2, 7)).astype(dtype)


def stepped(model, X):
    """Step by step, as live models run: any difference of weights would add up."""
    recur.reset(model)
    return np.stack([model(X[..., t]) for t in range(X.shape[2])], -1)


def test_a_safetensors_file_gives_the_same_numbers(trained, X, tmp_path):
    recur.save(trained, tmp_path / "m.safetensors")
    again = recur.load(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(stepped(again, X), stepped(trained, X))
    np.testing.assert_array_equal(again(X), trained(X))
    assert repr(again) == repr(trained)


@pytest.mark.parametrize("version", ["0.14", "0.16"])
def test_an_npz_file_gives_the_same_numbers(name, trained, X, tmp_path, version):
    """Through the tree of `Flux.state` that its names describe, as Julia has it."""
    if version == "0.16":  # whose layers hold no initial state
        for layer in recurrent(trained):
            layer.init = layer.cell.initial_state()
    path = tmp_path / "m.npz"
    flux.save_npz(trained, path, flux=version)
    tree = tree_of(dict(np.load(path)))
    (tmp_path / "m.jld2").write_bytes(Jld2("0.2.0", compact=0).file({"state": tree}))
    other = fresh(name, 1, X.dtype)
    assert not np.allclose(stepped(other, X), stepped(trained, X))
    again = flux.load_into(other, tmp_path / "m.jld2")
    np.testing.assert_array_equal(stepped(again, X), stepped(trained, X))


def tree_of(arrays: dict[str, np.ndarray]) -> Any:
    """Arrays by dotted names as nested named tuples; numbered parts as a tuple."""
    below: dict[str, dict[str, np.ndarray]] = {}
    for path, array in arrays.items():
        first, _, rest = path.partition(".")
        below.setdefault(first, {})[rest] = array
    tree = {k: v[""] if "" in v else tree_of(v) for k, v in below.items()}
    if all(key.isdigit() for key in tree):
        return tuple(tree[str(i + 1)] for i in range(len(tree)))
    return NT(tree)


@pytest.mark.oracle
def test_an_onnx_file_gives_the_same_numbers(trained, X, tmp_path):
    pytest.importorskip("onnx")
    onnx_io.save(trained, tmp_path / "m.onnx")
    again = onnx_io.load(tmp_path / "m.onnx")
    wanted = recur.reset(trained)(X)
    # In the graph initial states are inputs, so a model read back starts from zeros.
    for ours, theirs in zip(recurrent(trained), recurrent(again), strict=True):
        theirs.init = ours.init
    np.testing.assert_array_equal(recur.reset(again)(X), wanted)


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", [np.float32])  # onnxruntime computes no recurrent layer in double
def test_onnxruntime_gives_the_same_numbers(trained, X, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    onnx_io.save(trained, tmp_path / "m.onnx")
    session = runtime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    feeds = {"x": X.T, **onnx_io.initial_states(trained, batch=2)}
    y = session.run(["y"], feeds)[0]
    np.testing.assert_allclose(y.T, recur.reset(trained)(X), rtol=2e-5, atol=2e-6)


def recurrent(model):
    return [layer for layer in model.layers if isinstance(layer, recur.Recur)]
