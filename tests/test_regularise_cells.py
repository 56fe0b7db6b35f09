"""Zoneout, recurrent dropout, layer-normalised and projected cells against NumPy twins."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import recur
from recur import LSTMCell, Recur, Tape, Zoneout, ops
from recur.inspect import gradcheck
from recur.regularise import (
    LayerNormGRUCell,
    LayerNormLSTMCell,
    ProjectedLSTMCell,
    RecurrentDropoutGRUCell,
    RecurrentDropoutLSTMCell,
)
from twins import sigmoid

N_IN, N_OUT, B, T = 3, 4, 2, 5


def zoneout(dtype, rng):
    cell = LSTMCell(N_IN, N_OUT, dtype=dtype, rng=rng)
    return Zoneout(cell, h=0.3, c=0.6, rng=rng)


def zoneout_gru(dtype, rng):
    return Zoneout(recur.GRUCell(N_IN, N_OUT, dtype=dtype, rng=rng), h=0.5, rng=rng)


def recurrent_dropout(dtype, rng):
    return RecurrentDropoutLSTMCell(N_IN, N_OUT, 0.4, dtype=dtype, rng=rng, peepholes=True)


def recurrent_dropout_by_window(dtype, rng):
    return RecurrentDropoutLSTMCell(N_IN, N_OUT, 0.4, per="window", dtype=dtype, rng=rng)


def recurrent_dropout_gru(dtype, rng):
    return RecurrentDropoutGRUCell(N_IN, N_OUT, 0.4, recurrent_bias=True, dtype=dtype, rng=rng)


def layer_norm_lstm(dtype, rng):
    return LayerNormLSTMCell(N_IN, N_OUT, dtype=dtype, rng=rng)


def layer_norm_gru(dtype, rng):
    return LayerNormGRUCell(N_IN, N_OUT, dtype=dtype, rng=rng, bias_init=recur.normal)


def projected(dtype, rng):
    return ProjectedLSTMCell(N_IN, 6, N_OUT, dtype=dtype, rng=rng)


RANDOM = [
    zoneout,
    zoneout_gru,
    recurrent_dropout,
    recurrent_dropout_by_window,
    recurrent_dropout_gru,
]
CELLS = [*RANDOM, layer_norm_lstm, layer_norm_gru, projected]
every_cell = pytest.mark.parametrize("make", CELLS, ids=lambda f: f.__name__)
random_cells = pytest.mark.parametrize("make", RANDOM, ids=lambda f: f.__name__)


def start(cell, rng):
    return tuple(rng.normal(size=(n, B)).astype(cell.dtype) for n in cell.state_sizes)


def layer_of(make, dtype, rng):
    """A layer with a random state, since layer normalisation is steep at zeros."""
    layer = Recur(make(dtype, rng))
    layer.state = layer.cell.wrap(start(layer.cell, rng))
    return layer


def sequence(rng, dtype=np.float64):
    return rng.normal(size=(T, B, N_IN)).astype(dtype).T


def stepwise(m, X):
    return ops.stack([m(X[:, :, t]) for t in range(X.shape[2])], -1)


# ---------------------------------------------------------------------- all of them


@every_cell
def test_gradients_agree_with_difference_quotients(make, rng):
    layer = layer_of(make, np.float64, rng)
    gradcheck(lambda m, X: (m(X), m.state), layer, sequence(rng))


@every_cell
@pytest.mark.parametrize("active", [True, False])
def test_steps_equal_the_call_on_a_sequence(make, active, dtype, rng):
    layer = recur.trainmode(layer_of(make, dtype, rng), active)
    twins = [copy.deepcopy(layer) for _ in range(3)]
    X = sequence(rng, dtype)
    tolerance = {"rtol": 1e-4, "atol": 1e-5 if dtype == np.float32 else 1e-12}
    np.testing.assert_allclose(stepwise(twins[0], X), twins[1](X), **tolerance)
    want, grads = recur.withgradient(lambda m: (m(X) ** 2).sum(), layer)
    got, of_steps = recur.withgradient(lambda m: (stepwise(m, X) ** 2).sum(), twins[2])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for path in grads:
        np.testing.assert_allclose(of_steps[path], grads[path], **tolerance)


@every_cell
def test_copies_and_files_hold_all_of_the_cell(make, dtype, rng, tmp_path):
    layer = layer_of(make, dtype, rng)
    path = tmp_path / "m.safetensors"
    recur.save(layer, path, include_state=True)
    X = sequence(rng, dtype)
    others = [recur.load(path), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    want = copy.deepcopy(layer)(X)
    for other in others:
        assert repr(other) == repr(layer)
        assert list(recur.named_params(other)) == list(recur.named_params(layer))
        np.testing.assert_array_equal(other(X), want)
    recur.summary(layer)


@every_cell
def test_padded_steps_keep_the_state_and_get_no_gradient(make, rng):
    layer = layer_of(make, np.float64, rng)
    X = sequence(rng)
    X[:, 1, 3:] = np.nan
    twin = copy.deepcopy(layer)
    with Tape():
        Y = recur.value(layer(X, lengths=[T, 3]))
        states = layer.cell.wrap(tuple(map(recur.value, layer._state)))
    assert not Y[:, 1, 3:].any() and np.isfinite(Y).all()
    with Tape():
        twin(X[:, :, :3])
        parts = map(recur.value, twin._state)
    for part, want in zip(states if isinstance(states, tuple) else [states], parts, strict=True):
        np.testing.assert_allclose(part[:, 1], want[:, 1], atol=1e-12)
    grad = recur.gradient(lambda X: (layer(X, lengths=[T, 3]) ** 2).sum(), X)
    assert np.isfinite(grad).all() and not grad[:, 1, 3:].any()


@random_cells
def test_masks_are_drawn_alike_in_both_dtypes_and_anew_in_each_scope(make):
    found = []
    for dtype in (np.float32, np.float64):
        layer = layer_of(make, dtype, np.random.default_rng(5))
        x = np.ones((N_IN, B), dtype)
        with Tape():
            first = recur.value(layer(x))
        layer.reset()
        with Tape():
            assert not np.allclose(recur.value(layer(x)), first)
        found.append(first)
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)


@random_cells
def test_a_call_that_fails_later_draws_nothing(make, rng):
    layer = layer_of(make, np.float32, rng)
    model = recur.Chain(layer, recur.Dense(N_OUT + 1, 2))
    (generator,) = recur.module.generators(model).values()
    before = generator.bit_generator.state
    with Tape():
        with pytest.raises(recur.ShapeError):
            model(np.ones((N_IN, B)))
        assert generator.bit_generator.state == before


@random_cells
def test_sliding_windows_run_each_step_with_its_own_mask(make, rng):
    layer = Recur(make(np.float64, rng))
    twin = copy.deepcopy(layer)
    X = sequence(rng)
    loss = lambda ys, t: (ys**2).sum()  # noqa: E731
    found = [L for L, _ in recur.tbptt(layer, X, loss, k1=1, k2=3)]
    with Tape():
        ys = [recur.value(twin(X[:, :, t])) for t in range(T)]
    np.testing.assert_allclose(found, [(y**2).sum() for y in ys], rtol=1e-12)


@every_cell
def test_weights_of_every_cell_may_be_dropped_besides(make, rng):
    layer = layer_of(make, np.float64, rng)
    inner = "cell.cell" if isinstance(layer.cell, Zoneout) else "cell"
    model = recur.Chain(
        recur.WeightDrop(layer, [f"{inner}.Wh", f"{inner}.b"], 0.4, rng=rng),
        recur.LockedDropout(0.3, rng=rng),
    )
    gradcheck(lambda m, X: m(X), model, sequence(rng))
    twin = copy.deepcopy(model)
    X = sequence(rng)
    with Tape():
        want = recur.value(model(X))
    with Tape():
        np.testing.assert_allclose(recur.value(stepwise(twin, X)), want, atol=1e-12)


# ---------------------------------------------------------------------- zoneout


def test_zoneout_keeps_an_entry_or_takes_the_new_one(dtype, rng):
    cell = zoneout(dtype, rng)
    state, x = start(cell, rng), rng.normal(size=(N_IN, B)).astype(dtype)
    after, _ = cell.cell(cell.wrap(state), x)
    seen = [np.zeros((2, N_OUT, B)), np.zeros((2, N_OUT, B))]
    draws = 400
    with Tape():
        for _ in range(draws):
            new, y = cell(cell.wrap(state), x)
            assert np.array_equal(recur.value(y), recur.value(new.h))
            for part, old, fresh, counts in zip(new, state, after, seen, strict=True):
                part = recur.value(part)
                kept = part == old
                assert np.all(kept | np.isclose(part, fresh, rtol=1e-6))
                counts[0] += kept
    for counts, p in zip(seen, (0.3, 0.6), strict=True):
        assert abs(counts[0].mean() / draws - p) < 0.03


def test_zoneout_in_test_mode_is_the_expectation(dtype, rng):
    cell = zoneout(dtype, rng)
    state, x = start(cell, rng), rng.normal(size=(N_IN, B)).astype(dtype)
    after, _ = cell.cell(cell.wrap(state), x)
    new, y = cell(cell.wrap(state), x)
    for part, old, fresh, p in zip(new, state, after, (0.3, 0.6), strict=True):
        np.testing.assert_allclose(part, p * old + (1 - p) * fresh, rtol=1e-5, atol=1e-6)
        assert part.dtype == dtype
    np.testing.assert_array_equal(y, new.h)


def test_zoneout_of_nothing_is_the_cell_and_draws_nothing(rng):
    inner = LSTMCell(N_IN, N_OUT, rng=rng)
    cell = Zoneout(inner, rng=rng)
    before = cell.generator.bit_generator.state
    state, x = start(cell, rng), np.ones((N_IN, B), np.float32)
    with Tape():
        new, _ = cell(cell.wrap(state), x)
        want, _ = inner(cell.wrap(state), x)
        for a, b in zip(new, want, strict=True):
            np.testing.assert_array_equal(recur.value(a), recur.value(b))
    assert cell.generator.bit_generator.state == before


def test_zoneout_refuses_what_makes_no_sense(rng):
    with pytest.raises(recur.StateError, match="no part 'c', its parts are h"):
        Zoneout(recur.GRUCell(3, 4), c=0.5)
    with pytest.raises(ValueError, match=r"Zoneout: h: p is 1\.5"):
        Zoneout(recur.GRUCell(3, 4), h=1.5)
    with pytest.raises(TypeError, match="the cell is a Recur, expected a Cell"):
        Zoneout(recur.GRU(3, 4), h=0.5)
    assert repr(zoneout(np.float32, rng)) == "Zoneout(LSTMCell(3 => 4), h=0.3, c=0.6)"
    with pytest.raises(recur.ShapeError, match=r"LSTM\(3 => 4\): x has 2 features"):
        Recur(zoneout(np.float32, rng))(np.ones(2))


# ---------------------------------------------------------------------- recurrent dropout


def lstm_twin(w, x, h, c, mask):
    i, f, n, u = np.split(w["Wi"] @ x + w["Wh"] @ h + w["b"][:, None], 4)
    p = w["peephole"][:, :, None]
    c_new = sigmoid(f + p[1] * c) * c + sigmoid(i + p[0] * c) * np.tanh(n) * mask
    return sigmoid(u + p[2] * c_new) * np.tanh(c_new), c_new


def test_recurrent_dropout_drops_what_is_written_not_what_is_remembered(dtype, rng):
    cell = recurrent_dropout(dtype, rng)
    twin = copy.deepcopy(cell)
    weights = {path: p.value.astype(np.float64) for path, p in recur.named_params(cell).items()}
    state = start(cell, rng)
    want = tuple(part.astype(np.float64) for part in state)
    now = cell.wrap(state)
    with Tape():
        for _ in range(T):
            x = rng.normal(size=(N_IN, B)).astype(dtype)
            mask = (twin.generator.random((B, N_OUT), np.float32) >= 0.4).T / 0.6
            now, y = cell(now, x)
            want = lstm_twin(weights, x.astype(np.float64), *want, mask)
            tolerance = 1e-12 if dtype == np.float64 else 1e-5
            np.testing.assert_allclose(recur.value(y), want[0], atol=tolerance)
            np.testing.assert_allclose(recur.value(now.c), want[1], atol=tolerance)


def test_recurrent_dropout_of_a_gru_keeps_what_the_gate_keeps(rng):
    cell = recurrent_dropout_gru(np.float64, rng)
    cell.bh[...] = rng.normal(size=N_OUT)
    twin = copy.deepcopy(cell)
    w = {path: p.value for path, p in recur.named_params(cell).items()}
    (h,), x = start(cell, rng), rng.normal(size=(N_IN, B))
    mask = (twin.generator.random((B, N_OUT), np.float32) >= 0.4).T / 0.6
    with Tape():
        _, y = cell(h, x)
        y = recur.value(y)
    xr, xz, xn = np.split(w["Wi"] @ x + w["b"][:, None], 3)
    hr, hz, hn = np.split(w["Wh"] @ h, 3)
    r, z = sigmoid(xr + hr), sigmoid(xz + hz)
    n = np.tanh(xn + r * (hn + w["bh"][:, None]))
    np.testing.assert_allclose(y, (1 - z) * n * mask + z * h, atol=1e-12)


def test_one_mask_a_window_is_kept_for_all_of_its_steps(rng):
    layer = layer_of(recurrent_dropout_by_window, np.float64, rng)
    twin = copy.deepcopy(layer)
    w = {path: p.value for path, p in recur.named_params(layer.cell).items()}
    w["peephole"] = np.zeros((3, N_OUT))
    mask = (twin.cell.generator.random((B, N_OUT), np.float32) >= 0.4).T / 0.6
    X, state = sequence(rng), layer.state
    with Tape():
        Y = recur.value(layer(X))
        recur.truncate(layer)
        again = [recur.value(layer(X[:, :, t])) for t in range(T)]
    for t in range(2 * T):
        state = lstm_twin(w, X[:, :, t % T], *state, mask)
        got = Y[:, :, t] if t < T else again[t - T]
        np.testing.assert_allclose(got, state[0], atol=1e-12)


def test_without_dropout_the_kernel_of_the_plain_cell_serves(dtype, rng):
    cell = RecurrentDropoutLSTMCell(N_IN, N_OUT, 0.4, dtype=dtype, rng=rng)
    plain = LSTMCell(N_IN, N_OUT, dtype=dtype)
    for path, p in recur.named_params(plain).items():
        p[...] = getattr(cell, path)
    X = sequence(rng, dtype)
    np.testing.assert_array_equal(Recur(cell)(X), Recur(plain)(X))
    with Tape(log=True) as tape:
        recur.testmode(cell)
        Recur(cell)(X)
    assert [e["kind"] for e in tape.events if e["kind"] == "sequence"] == ["sequence"]


def test_recurrent_dropout_refuses_what_makes_no_sense():
    with pytest.raises(ValueError, match="per is 'batch', expected 'step' or 'window'"):
        RecurrentDropoutGRUCell(3, 4, 0.5, per="batch")
    with pytest.raises(ValueError, match="p is -1"):
        RecurrentDropoutLSTMCell(3, 4, -1)
    assert repr(RecurrentDropoutGRUCell(3, 4, 0.25)) == "RecurrentDropoutGRUCell(3 => 4, 0.25)"


# ---------------------------------------------------------------------- layer normalisation


def normalised(a, gain, eps=1e-3):
    centred = a - a.mean(0)
    return gain[:, None] * centred / np.sqrt((centred**2).mean(0) + eps**2)


def randomised(cell, rng):
    for p in recur.params(cell):
        p[...] = rng.normal(size=p.shape)
    return {path: p.value.astype(np.float64) for path, p in recur.named_params(cell).items()}


def test_layer_normalised_lstm_is_the_papers(dtype, rng):
    cell = layer_norm_lstm(dtype, rng)
    np.testing.assert_array_equal(cell.b.value[N_OUT : 2 * N_OUT], 1)
    w = randomised(cell, rng)
    state, x = start(cell, rng), rng.normal(size=(N_IN, B)).astype(dtype)
    h, c = (part.astype(np.float64) for part in state)
    g = normalised(w["Wi"] @ x, w["gain_x"]) + normalised(w["Wh"] @ h, w["gain_h"])
    i, f, n, u = np.split(g + w["b"][:, None], 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(n)
    h = sigmoid(u) * np.tanh(normalised(c, w["gain_c"]) + w["bias_c"][:, None])
    new, y = cell(cell.wrap(state), x)
    tolerance = 1e-12 if dtype == np.float64 else 2e-5
    np.testing.assert_allclose(new.c, c, atol=tolerance)
    np.testing.assert_allclose(y, h, atol=tolerance)


def test_layer_normalised_gru_is_the_papers(dtype, rng):
    cell = layer_norm_gru(dtype, rng)
    w = randomised(cell, rng)
    (state,), x = start(cell, rng), rng.normal(size=(N_IN, B)).astype(dtype)
    h = state.astype(np.float64)
    cut = 2 * N_OUT
    gates = normalised((w["Wi"] @ x)[:cut], w["gain_x"][:cut])
    gates = gates + normalised((w["Wh"] @ h)[:cut], w["gain_h"][:cut]) + w["b"][:cut, None]
    r, z = np.split(sigmoid(gates), 2)
    n = normalised((w["Wi"] @ x)[cut:], w["gain_x"][cut:]) + w["b"][cut:, None]
    n = n + r * (normalised((w["Wh"] @ h)[cut:], w["gain_h"][cut:]) + w["bh"][:, None])
    want = (1 - z) * np.tanh(n) + z * h
    _, y = cell(state, x)
    np.testing.assert_allclose(y, want, atol=1e-12 if dtype == np.float64 else 2e-5)


def test_layer_normalisation_does_not_see_the_scale_of_the_input_weights(rng):
    cell = LayerNormLSTMCell(N_IN, N_OUT, eps=1e-6, dtype=np.float64, rng=rng)
    state, x = start(cell, rng), rng.normal(size=(N_IN, B))
    before = cell(cell.wrap(state), x)[1]
    cell.Wi *= 100
    np.testing.assert_allclose(cell(cell.wrap(state), x)[1], before, atol=1e-6)


@pytest.mark.parametrize("make", [LayerNormLSTMCell, LayerNormGRUCell])
def test_layer_normalised_cells_run_without_bias(make, rng):
    layer = Recur(make(N_IN, N_OUT, bias=False, dtype=np.float64, rng=rng))
    assert "cell.b" not in recur.named_params(layer)
    layer.state = layer.cell.wrap(start(layer.cell, rng))
    gradcheck(lambda m, X: m(X), layer, sequence(rng))


# ---------------------------------------------------------------------- projection


def test_projected_lstm_feeds_back_and_gives_out_the_projection(dtype, rng):
    cell = projected(dtype, rng)
    w = {path: p.value.astype(np.float64) for path, p in recur.named_params(cell).items()}
    assert {path: p.shape for path, p in recur.named_params(cell).items()} == {
        "Wi": (24, N_IN),
        "Wh": (24, N_OUT),
        "b": (24,),
        "Wr": (N_OUT, 6),
    }
    state, x = start(cell, rng), rng.normal(size=(N_IN, B)).astype(dtype)
    h, c = (part.astype(np.float64) for part in state)
    i, f, n, u = np.split(w["Wi"] @ x + w["Wh"] @ h + w["b"][:, None], 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(n)
    h = w["Wr"] @ (sigmoid(u) * np.tanh(c))
    new, y = cell(cell.wrap(state), x)
    tolerance = 1e-12 if dtype == np.float64 else 2e-6
    np.testing.assert_allclose(new.c, c, atol=tolerance)
    np.testing.assert_allclose(y, h, atol=tolerance)
    np.testing.assert_array_equal(new.h, y)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_projected_lstm_agrees_with_torch(rng):
    torch = pytest.importorskip("torch")
    layer = Recur(projected(np.float32, rng))
    cell = layer.cell
    cell.b[...] = rng.normal(size=24)
    theirs = torch.nn.LSTM(N_IN, 6, proj_size=N_OUT)
    with torch.no_grad():
        for name, array in {
            "weight_ih_l0": cell.Wi,
            "weight_hh_l0": cell.Wh,
            "bias_ih_l0": cell.b,
            "weight_hr_l0": cell.Wr,
        }.items():
            getattr(theirs, name)[...] = torch.tensor(array.value.copy())
        theirs.bias_hh_l0[...] = 0
    X = sequence(rng, np.float32)
    want, _ = theirs(torch.tensor(np.ascontiguousarray(X.T)))
    np.testing.assert_allclose(layer(X).T, want.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_a_projection_must_be_smaller_than_the_cell():
    with pytest.raises(recur.ShapeError, match="n_out is 6, expected less than the 6 cells"):
        ProjectedLSTMCell(3, 6, 6)
    assert repr(ProjectedLSTMCell(3, 6, 4)) == "ProjectedLSTMCell(3 => 6 => 4)"
