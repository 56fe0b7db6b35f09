"""`compress` and `drift`: models whose weights lie in 16 or 8 bits."""

import copy
import pickle

import numpy as np
import pytest
from streaming_models import NAMES, inputs, models

import recur
from recur import (
    GRU,
    LSTM,
    Chain,
    Dense,
    LayerNorm,
    Recur,
    StateError,
    Tape,
    TapeError,
    compress,
    drift,
    paused,
    reset,
)
from recur.streaming import Stream

STORAGES = ("bfloat16", "float16", "int8")
UNCOMPRESSED = ("own activation", "own cell")  # no layer of theirs has a kernel
KINDS = tuple(name for name in NAMES if name not in UNCOMPRESSED)
each_storage = pytest.mark.parametrize("storage", STORAGES)
each_kind = pytest.mark.parametrize("name", KINDS)


def rng():
    return np.random.default_rng(3)


def rounded(model, storage):
    """The model in float32 with the numbers that its compressed copy stands for."""
    full = recur.f32(model)
    for _, layer in recur.walk(full):
        if isinstance(layer, (recur.Cell, Dense)):
            for name, w in list(vars(layer).items()):
                if isinstance(w, recur.Param) and w.ndim == 2 and name.split("_")[0] in MATRICES:
                    kernel = recur._kernels.AffineKernel(
                        np.ascontiguousarray(w.value), storage=storage
                    )
                    w[...] = kernel.matrices()["W"]
    return full


MATRICES = ("Wi", "Wh", "Whh", "weight")


@each_kind
@each_storage
def test_a_compressed_model_gives_what_the_rounded_weights_give(name, storage):
    model = models()[name]
    small, full = compress(model, storage), rounded(model, storage)
    for shape in [(), (4,), (4, 9)] if name != "characters" else [(4,), (4, 9)]:
        x = inputs(name, shape, rng())
        a, b = reset(small)(x), reset(full)(x)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


@each_kind
@each_storage
def test_steps_sequences_batches_and_streams_agree_bit_for_bit(name, storage):
    small = compress(models()[name], storage)
    X = inputs(name, (3, 12), rng())
    whole = np.stack([small(X[..., t]) for t in range(12)], -1)
    if name != "one layer twice":  # whose steps come in another order in a sequence
        np.testing.assert_array_equal(reset(small)(X), whole)
    for b in range(3):
        stream = Stream(small)
        one = np.stack([stream(X[..., b : b + 1, t])[:, 0] for t in range(12)], -1)
        np.testing.assert_array_equal(one, whole[:, b])
        np.testing.assert_array_equal(Stream(small).run(X[..., b, :]), one)


@each_storage
def test_single_steps_of_a_compressed_model_run_in_one_call(storage):
    model = compress(models()["two layers"], storage)
    x = inputs("two layers", (), rng())
    for _ in range(4):
        model(x)
    assert model._live is not None
    stream = Stream(model)
    for _ in range(3):
        stream(x)
    assert stream._live is not None


@each_storage
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_model_is_not_touched_and_states_are_float32(storage, dtype):
    model = models(dtype)["head"]
    before = {path: np.array(w) for path, w in recur.named_params(model).items()}
    small = compress(model, storage)
    y = small(inputs("head", (2,), rng()))
    assert y.dtype == np.float32
    assert all(part.dtype == np.float32 for part in small[0].state)
    for path, w in recur.named_params(model).items():
        np.testing.assert_array_equal(w, before[path])
        assert w.dtype == dtype


@each_storage
def test_a_compressed_model_goes_on_from_the_state_of_the_model(storage):
    model = LSTM(5, 6, rng=rng())
    model(inputs("LSTM", (2,), rng()))
    small = compress(model, storage)
    for a, b in zip(model.state, small.state, strict=True):
        np.testing.assert_array_equal(a, b)


@each_storage
def test_what_is_compressed_has_no_parameters_and_fewer_bytes(storage):
    model = Chain(GRU(40, 50), LayerNorm(50), Dense(50, 30))
    small = compress(model, storage)
    assert list(recur.named_params(small)) == [
        path for path in recur.named_params(model) if path.startswith("layers.1.")
    ]
    held = sum(a.nbytes for a in recur.buffers(small).values())
    full = sum(w.nbytes for w in recur.params(model))
    assert held < full * {"int8": 0.3, "float16": 0.53, "bfloat16": 0.53}[storage]


@each_storage
def test_printing_tells(storage):
    small = compress(Chain(LSTM(3, 5), Dense(5, 2, recur.tanh)), storage)
    assert f"LSTMCell(3 => 5, {storage})" in repr(small)
    assert f"Dense(5 => 2, tanh, {storage})" in repr(small)
    assert storage in recur.summary(small)
    with pytest.raises(recur.ShapeError, match=rf"LSTM\(3 => 5, {storage}\): x has 4 features"):
        small(np.zeros(4))


@each_storage
@pytest.mark.parametrize("shape", [(), (4,), (4, 9)])
def test_a_recorded_call_is_refused_and_changes_nothing(storage, shape):
    for model in (LSTM(5, 6), Chain(Dense(5, 5)), Chain(GRU(5, 5), Dense(5, 2))):
        small = compress(model, storage)
        x = inputs("LSTM", shape, rng())
        with Tape(), pytest.raises(TapeError, match=f"as {storage}, for inference only"):
            small(x)
        with Tape(), paused():
            y = small(x)
        np.testing.assert_array_equal(y, reset(small)(x))


@each_kind
@each_storage
def test_copies_and_pickles_give_the_same_bits(name, storage):
    small = compress(models()[name], storage)
    x = inputs(name, (3, 8), rng())
    y = small(x)
    assert np.array_equal(reset(copy.deepcopy(small))(x), y)
    if name in ("function", "gelu head"):
        return  # lambdas and the like do not pickle
    again = pickle.loads(pickle.dumps(reset(small)))
    np.testing.assert_array_equal(again(x), y)


@each_storage
def test_layers_that_the_model_shares_stay_shared(storage):
    small = compress(models()["one layer twice"], storage)
    assert small[0] is small[1]


@each_storage
def test_weights_may_be_looked_at_and_not_written(storage, tmp_path):
    small = compress(LSTM(3, 5), storage)
    held = recur.state_dict(small)
    assert {"int8": np.int8, "float16": np.float16, "bfloat16": np.uint16}[storage] == held[
        "cell.Wh"
    ].dtype
    with pytest.raises(StateError, match="cannot be written"):
        recur.load_state_dict(small, held)
    with pytest.raises(StateError, match="is not saved"):
        recur.save(small, tmp_path / "m.safetensors")


def test_streams_tell_compressed_weights_apart():
    a, b = (compress(LSTM(3, 5, rng=np.random.default_rng(n)), "int8") for n in (1, 2))
    assert Stream(a)._plan.weights != Stream(b)._plan.weights


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="storage is 'int4', expected 'bfloat16', 'float16'"):
        compress(LSTM(3, 5), "int4")
    with pytest.raises(StateError, match="no RNN, LSTM, GRU, GRUv3 or Dense layer"):
        compress(Recur(recur.extra_cells.MGUCell(3, 5)), "int8")
    model = LSTM(3, 5)
    model.cell.Wh[0, 0] = 1e5
    with pytest.raises(ValueError, match=r"LSTM\(3 => 5\): Wh holds numbers .* largest of float16"):
        compress(model, "float16")
    compress(model, "int8")
    model.cell.Wh[0, 0] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        compress(model, "int8")


@each_kind
def test_drift_is_that_of_the_outputs_and_moves_no_state(name):
    model = models()[name]
    small = compress(model, "int8")
    X = inputs(name, (600,), rng())
    found = drift(model, small, X)
    steps = [(model(x), small(x)) for x in np.moveaxis(X[..., None, :], -1, 0)]
    apart = np.array([np.abs(a.astype(float) - b) for a, b in steps])
    np.testing.assert_array_equal(found.worst, apart.max((1, 2)))
    np.testing.assert_allclose(found.mean, apart.mean((1, 2)), rtol=1e-12)
    assert found.size == pytest.approx(np.mean([np.abs(a).astype(float).mean() for a, _ in steps]))
    lines = [line.split()[:3] for line in str(found).splitlines()]
    assert lines[1] == ["1", "to", "10"] and lines[3] == ["101", "to", "600"]


def test_drift_is_small_and_needs_a_step():
    model = GRU(5, 6)
    X = inputs("GRU", (20,), rng())
    found = drift(model, compress(model, "float16"), X)
    assert 0 < found.mean.max() <= found.worst.max() < 1e-2 < found.size
    assert drift(model, model, X).worst.max() == 0
    with pytest.raises(recur.ShapeError, match="at least one step"):
        drift(model, model, X[..., :0])
