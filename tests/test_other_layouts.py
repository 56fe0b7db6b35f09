"""The recipes of docs/how-to/other-libraries.md for weights of oneDNN, haste and Chainer.

Each is compared with a twin of that library's step, written from its equations in its layout.
"""

from __future__ import annotations

import numpy as np
import pytest
from test_examples import ROOT, run

import recur
from twins import sigmoid

N_IN, N_OUT, B, T = 3, 5, 4, 6
LSTM, RESET_AFTER = recur.LSTMCell, recur.GRUCell


@pytest.fixture(scope="module")
def recipes():
    page = ROOT / "docs" / "how-to" / "other-libraries.md"
    names: dict = {}
    run(str(page), page.read_text(encoding="utf-8"), names)
    return names


# Arrays have the batch first, as these libraries': x (B, n_in), h (B, n_out).


def onednn_lstm(arrays, x, h, c):
    wi, wh, b = arrays
    i, f, g, o = np.moveaxis(
        np.einsum("bi,igo->bgo", x, wi) + np.einsum("bi,igo->bgo", h, wh) + b, 1, 0
    )
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return np.tanh(c) * sigmoid(o), c


def onednn_gru(arrays, x, h):
    wi, wh, b = arrays
    u = sigmoid(x @ wi[:, 0] + h @ wh[:, 0] + b[0])
    r = sigmoid(x @ wi[:, 1] + h @ wh[:, 1] + b[1])
    o = np.tanh(x @ wi[:, 2] + (r * h) @ wh[:, 2] + b[2])
    return (u * h + (1 - u) * o,)


def onednn_lbr_gru(arrays, x, h):
    wi, wh, b = arrays
    u = sigmoid(x @ wi[:, 0] + h @ wh[:, 0] + b[0])
    r = sigmoid(x @ wi[:, 1] + h @ wh[:, 1] + b[1])
    o = np.tanh(x @ wi[:, 2] + r * (h @ wh[:, 2] + b[3]) + b[2])
    return (u * h + (1 - u) * o,)


def haste_lstm(arrays, x, h, c):
    kernel, recurrent, bias = arrays
    i, g, f, o = np.split(x @ kernel + h @ recurrent + bias, 4, axis=1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def haste_gru(arrays, x, h):
    kernel, recurrent, bias, recurrent_bias = arrays
    xz, xr, xn = np.split(x @ kernel + bias, 3, axis=1)
    hz, hr, hn = np.split(h @ recurrent + recurrent_bias, 3, axis=1)
    z, r = sigmoid(xz + hz), sigmoid(xr + hr)
    return (z * h + (1 - z) * np.tanh(xn + r * hn),)


def chainer_lstm(arrays, x, h, c):
    upward, lateral, bias = arrays
    gates = (x @ upward.T + bias + h @ lateral.T).reshape(len(x), N_OUT, 4)
    a, i, f, o = np.moveaxis(gates, 2, 0)
    c = np.tanh(a) * sigmoid(i) + sigmoid(f) * c
    return sigmoid(o) * np.tanh(c), c


RECIPES = {
    "lstm_from_onednn": (onednn_lstm, LSTM, [(N_IN, 4, N_OUT), (N_OUT, 4, N_OUT), (4, N_OUT)]),
    "gru_from_onednn": (
        onednn_gru,
        recur.GRUv3Cell,
        [(N_IN, 3, N_OUT), (N_OUT, 3, N_OUT), (3, N_OUT)],
    ),
    "lbr_gru_from_onednn": (
        onednn_lbr_gru,
        RESET_AFTER,
        [(N_IN, 3, N_OUT), (N_OUT, 3, N_OUT), (4, N_OUT)],
    ),
    "lstm_from_haste": (haste_lstm, LSTM, [(N_IN, 4 * N_OUT), (N_OUT, 4 * N_OUT), (4 * N_OUT,)]),
    "gru_from_haste": (
        haste_gru,
        RESET_AFTER,
        [(N_IN, 3 * N_OUT), (N_OUT, 3 * N_OUT), (3 * N_OUT,), (3 * N_OUT,)],
    ),
    "lstm_from_chainer": (
        chainer_lstm,
        LSTM,
        [(4 * N_OUT, N_IN), (4 * N_OUT, N_OUT), (4 * N_OUT,)],
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_makes_a_cell_that_steps_as_the_library_does(name, recipes, dtype, rng):
    step, kind, shapes = RECIPES[name]
    arrays = [rng.normal(size=shape).astype(dtype) for shape in shapes]
    cell = recipes[name](*arrays)
    assert type(cell) is kind and cell.dtype == dtype and (cell.n_in, cell.n_out) == (N_IN, N_OUT)
    start = [rng.normal(size=(B, N_OUT)).astype(dtype) for _ in cell.state_names]
    layer = recur.Recur(cell)
    layer.state = start[0].T if len(start) == 1 else tuple(part.T for part in start)
    state = tuple(part.astype(np.float64) for part in start)
    tolerance = 1e-12 if dtype == np.float64 else 2e-5
    for x in rng.normal(size=(T, B, N_IN)).astype(dtype):
        state = step([a.astype(np.float64) for a in arrays], x.astype(np.float64), *state)
        np.testing.assert_allclose(layer(x.T), state[0].T, atol=tolerance)


def test_every_recipe_of_the_page_is_tested(recipes):
    assert {name for name in recipes if "_from_" in name and "cell_" not in name} - set(
        RECIPES
    ) == {"layers_from_torch"}
