"""The cells of other papers against NumPy twins that are written from the papers' equations."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import recur
from recur import Recur, Tape, extra_cells, ops
from recur.extra_cells import (
    ATRCell,
    CFNCell,
    FastRNNCell,
    IndRNNCell,
    JANETCell,
    LiGRUCell,
    MGUCell,
    RANCell,
    UGRNNCell,
)
from recur.inspect import gradcheck
from twins import sigmoid

N_IN, N_OUT, B, T = 3, 4, 2, 5


def relu(x):
    return np.maximum(x, 0)


def normalised(x):
    centred = x - x.mean(0)
    return centred / np.sqrt((centred**2).mean(0) + 1e-10)


# One step of each paper, on x (N_IN, B) and the state, with weights in float64 by name.  Blocks
# come from `blocks`: the matrices of the paper, one for each gate.


def blocks(w, n):
    return np.split(w, n)


def indrnn(w, x, h):
    h = relu(w["Wi"] @ x + w["w"][:, None] * h + w["b"][:, None])
    return (h,), h


def ugrnn(w, x, h):
    (W_ch, W_g), (U_ch, U_g), (b_ch, b_g) = (blocks(w[k], 2) for k in ("Wi", "Wh", "b"))
    c = np.tanh(W_ch @ x + U_ch @ h + b_ch[:, None])
    g = sigmoid(W_g @ x + U_g @ h + b_g[:, None])
    h = g * h + (1 - g) * c
    return (h,), h


def ligru(w, x, h):
    (W_z, W_h), (U_z, U_h), (b_z, b_h) = (blocks(w[k], 2) for k in ("Wi", "Wh", "b"))
    z = sigmoid(W_z @ x + U_z @ h + b_z[:, None])
    candidate = relu(W_h @ x + U_h @ h + b_h[:, None])
    h = z * h + (1 - z) * candidate
    return (h,), h


def ligru_normalised(w, x, h):
    (W_z, W_h), (U_z, U_h), (b_z, b_h) = (blocks(w[k], 2) for k in ("Wi", "Wh", "b"))
    z = sigmoid(normalised(W_z @ x) + U_z @ h + b_z[:, None])
    candidate = relu(normalised(W_h @ x) + U_h @ h + b_h[:, None])
    h = z * h + (1 - z) * candidate
    return (h,), h


def mgu(w, x, h):
    (W_f, W_h), (U_f, U_h), (b_f, b_h) = (blocks(w[k], 2) for k in ("Wi", "Wh", "b"))
    f = sigmoid(W_f @ x + U_f @ h + b_f[:, None])
    candidate = np.tanh(W_h @ x + U_h @ (f * h) + b_h[:, None])
    h = (1 - f) * h + f * candidate
    return (h,), h


def cfn(w, x, h):
    V_theta, V_eta, W = blocks(w["Wi"], 3)
    (U_theta, U_eta), (b_theta, b_eta) = blocks(w["Wh"], 2), blocks(w["b"], 2)
    theta = sigmoid(U_theta @ h + V_theta @ x + b_theta[:, None])
    eta = sigmoid(U_eta @ h + V_eta @ x + b_eta[:, None])
    h = theta * np.tanh(h) + eta * np.tanh(W @ x)
    return (h,), h


def atr(w, x, h):
    p, q = w["Wi"] @ x + w["b"][:, None], w["Wh"] @ h
    i, f = sigmoid(p + q), sigmoid(p - q)
    h = i * p + f * h
    return (h,), h


def ran(w, x, h, c):
    W_ix, W_fx, W_cx = blocks(w["Wi"], 3)
    (W_ih, W_fh), (b_i, b_f) = blocks(w["Wh"], 2), blocks(w["b"], 2)
    i = sigmoid(W_ih @ h + W_ix @ x + b_i[:, None])
    f = sigmoid(W_fh @ h + W_fx @ x + b_f[:, None])
    c = i * (W_cx @ x) + f * c
    return (np.tanh(c), c), np.tanh(c)


def janet(w, x, h):
    (W_f, W_c), (U_f, U_c), (b_f, b_c) = (blocks(w[k], 2) for k in ("Wi", "Wh", "b"))
    s = U_f @ h + W_f @ x + b_f[:, None]
    candidate = np.tanh(U_c @ h + W_c @ x + b_c[:, None])
    h = sigmoid(s) * h + (1 - sigmoid(s - 1.0)) * candidate
    return (h,), h


def fastrnn(w, x, h):
    candidate = np.tanh(w["Wi"] @ x + w["Wh"] @ h + w["b"][:, None])
    h = sigmoid(w["alpha"]) * candidate + sigmoid(w["beta"]) * h
    return (h,), h


CELLS = {
    "IndRNN": (IndRNNCell, indrnn, {}),
    "UGRNN": (UGRNNCell, ugrnn, {}),
    "LiGRU": (LiGRUCell, ligru, {}),
    "LiGRU, normalised": (LiGRUCell, ligru_normalised, {"normalise": True}),
    "MGU": (MGUCell, mgu, {}),
    "CFN": (CFNCell, cfn, {}),
    "ATR": (ATRCell, atr, {}),
    "RAN": (RANCell, ran, {}),
    "JANET": (JANETCell, janet, {}),
    "FastRNN": (FastRNNCell, fastrnn, {}),
}
every_cell = pytest.mark.parametrize("kind", CELLS)


def make(kind, dtype, rng, **more):
    """A layer around the cell whose biases, too, are random."""
    cell, _, options = CELLS[kind]
    made = cell(N_IN, N_OUT, dtype=dtype, rng=rng, bias_init=recur.normal, **options, **more)
    return Recur(made)


def start(layer, rng):
    return tuple(rng.normal(size=(n, B)).astype(layer.cell.dtype) for n in layer.cell.state_sizes)


def test_every_cell_is_public_and_has_a_twin():
    assert {cell.__name__ for cell, _, _ in CELLS.values()} == set(extra_cells.__all__)


@every_cell
def test_a_step_is_the_papers_equation(kind, dtype, rng):
    layer = make(kind, dtype, rng)
    twin = CELLS[kind][1]
    weights = {p: w.value.astype(np.float64) for p, w in recur.named_params(layer.cell).items()}
    state, xs = start(layer, rng), rng.normal(size=(T, N_IN, B)).astype(dtype)
    layer.state = layer.cell.wrap(state)
    for x in xs:
        y = layer(x)
        state, want = twin(weights, x.astype(np.float64), *state)
        np.testing.assert_allclose(y, want, atol=1e-12 if dtype == np.float64 else 2e-6)
    got = layer.state if isinstance(layer.state, tuple) else (layer.state,)
    for part, want in zip(got, state, strict=True):
        np.testing.assert_allclose(part, want, atol=1e-12 if dtype == np.float64 else 2e-6)
        assert part.dtype == dtype


@every_cell
def test_gradients_agree_with_difference_quotients(kind, rng):
    layer = make(kind, np.float64, rng)
    layer.state = layer.cell.wrap(start(layer, rng))
    gradcheck(lambda m, X: (m(X), m.state), layer, rng.normal(size=(N_IN, B, T)))


@every_cell
def test_steps_equal_the_call_on_a_sequence(kind, dtype, rng):
    layer = make(kind, dtype, rng)
    other = copy.deepcopy(layer)
    X = rng.normal(size=(N_IN, B, T)).astype(dtype)

    def stepwise(m):
        return ops.stack([m(X[:, :, t]) for t in range(T)], -1)

    tolerance = 1e-12 if dtype == np.float64 else 1e-5
    np.testing.assert_allclose(layer(X), stepwise(other), atol=tolerance)
    recur.reset([layer, other])
    want, grads = recur.withgradient(lambda m: (m(X) ** 2).sum(), layer)
    got, of_steps = recur.withgradient(lambda m: (stepwise(m) ** 2).sum(), other)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for path in grads:
        np.testing.assert_allclose(of_steps[path], grads[path], rtol=1e-4, atol=tolerance)


@every_cell
def test_a_model_file_holds_the_cell(kind, dtype, rng, tmp_path):
    layer = make(kind, dtype, rng)
    recur.save(layer, tmp_path / "cell.safetensors")
    loaded = recur.load(tmp_path / "cell.safetensors")
    assert repr(loaded) == repr(layer)
    X = rng.normal(size=(N_IN, B, T)).astype(dtype)
    np.testing.assert_array_equal(loaded(X), layer(X))


@every_cell
def test_without_bias_there_is_none_and_the_numbers_are_those_of_zeros(kind, rng):
    without = make(kind, np.float64, rng, bias=False)
    assert without.cell.b is None and "cell.b" not in recur.named_params(without)
    zero = make(kind, np.float64, rng)
    for path, p in recur.named_params(without).items():
        recur.named_params(zero)[path][...] = p.value
    zero.cell.b[...] = 0
    X = rng.normal(size=(N_IN, B, T))
    np.testing.assert_allclose(without(X), zero(X), atol=1e-12)


@every_cell
def test_padded_steps_keep_the_state_and_get_no_gradient(kind, rng):
    layer = make(kind, np.float64, rng)
    X = rng.normal(size=(N_IN, B, T))
    X[:, 1, 3:] = np.nan
    alone = copy.deepcopy(layer)
    with Tape() as tape:
        Y = recur.value(layer(tape.watch(X), lengths=[T, 3]))
    assert not Y[:, 1, 3:].any()
    np.testing.assert_allclose(Y[:, 1:, :3], alone(X[:, 1:, :3]), atol=1e-12)
    grad = recur.gradient(lambda X: (layer(X, lengths=[T, 3]) ** 2).sum(), X)
    assert np.isfinite(grad).all() and not grad[:, 1, 3:].any()


@every_cell
def test_an_output_shares_no_memory_with_the_state(kind, rng):
    layer = make(kind, np.float32, rng)
    y = layer(rng.normal(size=(N_IN, B)).astype(np.float32))
    before = copy.deepcopy(layer.state)
    y[...] = 7
    for part, held in zip(np.atleast_1d(layer.state), np.atleast_1d(before), strict=True):
        np.testing.assert_array_equal(part, held)


def test_an_activation_must_be_a_function():
    for cell in (IndRNNCell, LiGRUCell, FastRNNCell):
        with pytest.raises(TypeError, match="act is a int, expected a function"):
            cell(3, 4, 1)


def test_a_cell_prints_its_activation():
    assert repr(Recur(IndRNNCell(3, 4))) == "Recur(IndRNNCell(3 => 4, relu))"
    assert repr(MGUCell(3, 4)) == "MGUCell(3 => 4)"


def test_a_wrong_shape_is_refused_on_assignment():
    cell = RANCell(3, 4)
    with pytest.raises(recur.ShapeError, match=r"RAN\(3 => 4\).b: .* \(12,\), expected \(8,\)"):
        cell.b = np.zeros(12)


def test_the_first_gate_of_janet_forgets_more_than_it_lets_in():
    cell = JANETCell(1, 1, beta=2.0)
    for p in recur.params(cell):
        p[...] = 0
    state, _ = cell(np.array([1.0], np.float32), np.zeros(1, np.float32))
    np.testing.assert_allclose(state, 0.5, rtol=1e-6)
    cell.b[1] = 100.0
    state, _ = cell(np.array([0.0], np.float32), np.zeros(1, np.float32))
    np.testing.assert_allclose(state, 1 - sigmoid(-2.0), rtol=1e-6)
