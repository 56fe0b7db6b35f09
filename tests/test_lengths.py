"""Sequences of different lengths in one batch: lengths=, mask=."""

from __future__ import annotations

import numpy as np
import pytest

import recur
from recur import GRU, LSTM, RNN, Bidirectional, Chain, Dense, GRUv3, Recur, ops, scan
from recur.cells import RNNCell

LAYERS = {"RNN": RNN, "LSTM": LSTM, "GRU": GRU, "GRUv3": GRUv3}
each_layer = pytest.mark.parametrize("name", LAYERS)
B, T = 5, 6
LENGTHS = np.array([6, 3, 0, 1, 5])
HOLES = np.array(
    [
        [1, 1, 1, 1, 1, 1],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [0, 1, 1, 0, 0, 1],
    ],
    bool,
)
MASKS = {"lengths": np.arange(T) < LENGTHS[:, None], "holes": HOLES, "left": HOLES[:, ::-1]}


def parts(state):
    return state if isinstance(state, tuple) else (state,)


def make(name, rng):
    if name == "own act":
        m = Recur(RNNCell(3, 4, lambda x: ops.tanh(x), dtype=np.float64), learn_init=True)
    elif name == "function":
        w = recur.Param(rng.normal(size=(4, 3)))

        def cell(h, x):
            h = ops.tanh(ops.affine(w, x) + 0.5 * h)
            return h, 2.0 * h

        return Recur(cell, np.zeros((4, B)))
    else:
        m = LAYERS[name](3, 4, dtype=np.float64, learn_init=True)
    for p in recur.params(m):
        p[...] = rng.normal(0, 0.5, p.shape)
    return m


def sample_by_sample(m, X, alive, w):
    """The loss of each sample run alone over its real steps, in one scope."""
    loss = 0.0
    finals = []
    for b in range(X.shape[1]):
        recur.reset(m)
        for t in np.flatnonzero(alive[b]):
            loss = loss + (m(X[:, b, t]) * w[:, b, t]).sum()
        finals.append(parts(m.state))
    return loss, finals


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", [*LAYERS, "own act"])
def test_a_padded_batch_equals_each_sample_alone(name, mask, rng):
    m, alive = make(name, rng), MASKS[mask]
    X, w = rng.normal(size=(3, B, T)), rng.normal(size=(4, B, T))
    finals = []

    def alone(m, X):
        loss, ends = sample_by_sample(m, X, alive, w)
        # The final states count too: their gradient must go to each sample's last real step.
        finals[:] = [[recur.value(part) for part in end] for end in ends]
        return loss + sum(part.sum() for end in ends for part in end)

    want, (of_m, of_x) = recur.withgradient(alone, m, X)
    calls = {"mask": {"mask": alive}}
    if mask == "lengths":
        calls["lengths"] = {"lengths": LENGTHS}
    if name != "own act":
        calls["remat"] = {"mask": alive, "remat": 2}
    for options in calls.values():
        padded = np.where(alive[None], X, np.nan)  # padding may hold anything
        Y = []

        def together(m, X, options=options, Y=Y):
            Y.append(m(X, **options))
            return (Y[0] * w).sum() + sum(part.sum() for part in parts(m.state))

        m.reset()
        got, (dm, dx) = recur.withgradient(together, m, padded)
        np.testing.assert_allclose(got, want, rtol=1e-12)
        assert np.all(recur.value(Y[0])[:, ~alive] == 0)
        assert np.all(dx[:, ~alive] == 0)
        np.testing.assert_allclose(dx, np.where(alive[None], of_x, 0), atol=1e-12)
        for path in recur.named_params(m):
            np.testing.assert_allclose(dm[path], of_m[path], atol=1e-12)
        for part, ends in zip(parts(m.state), zip(*finals, strict=True), strict=True):
            ends = [end.reshape(-1) for end in ends]
            np.testing.assert_allclose(part, np.stack(ends, -1), atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
def test_a_function_cell_rests_at_masked_steps(mask, rng):
    m, alive = make("function", rng), MASKS[mask]
    X = rng.normal(size=(3, B, T))
    want = np.zeros((4, B, T))
    state = np.zeros((4, B))
    w = recur.params(m)[0].value
    for t in range(T):
        new = np.tanh(w @ X[:, :, t] + 0.5 * state)
        state = np.where(alive[:, t], new, state)
        want[:, :, t] = np.where(alive[:, t], 2 * new, 0)
    padded = np.where(alive[None], X, np.nan)
    np.testing.assert_allclose(m(padded, mask=alive), want, atol=1e-14)
    np.testing.assert_allclose(m.state, state, atol=1e-14)
    m.reset()
    dX = recur.gradient(lambda X: (m(X, mask=alive) ** 2).sum(), padded)
    assert np.isfinite(dX).all() and np.all(dX[:, ~alive] == 0) and dX[:, alive].all()


@each_layer
def test_lists_of_steps_take_lengths_and_masks(name, rng):
    m = make(name, rng)
    X = rng.normal(size=(3, B, T))
    want = m(X, lengths=LENGTHS)
    end = m.state
    for options in ({"lengths": LENGTHS}, {"mask": MASKS["lengths"]}):
        m.reset()
        ys = m([X[:, :, t] for t in range(T)], **options)
        np.testing.assert_allclose(np.stack(ys, -1), want, atol=1e-14)
        for a, b in zip(parts(m.state), parts(end), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-14)
    Y, state = scan(m.cell, X, m.init, True, mask=MASKS["lengths"])
    np.testing.assert_array_equal(Y, want)
    for a, b in zip(parts(state), parts(end), strict=True):
        np.testing.assert_array_equal(a, b)


@each_layer
def test_padding_carries_on_in_the_next_call(name, rng):
    m = make(name, rng)
    X = rng.normal(size=(3, 2, 8))
    alive = np.ones((2, 8), bool)
    alive[1, 3:] = False
    whole = m(X, mask=alive)
    m.reset()
    halves = [m(X[:, :, :4], mask=alive[:, :4]), m(X[:, :, 4:], mask=alive[:, 4:])]
    np.testing.assert_allclose(np.concatenate(halves, -1), whole, atol=1e-14)


def test_truncate_every_counts_padded_steps_from_the_start_of_the_call(rng):
    m = make("LSTM", rng)
    X, w = rng.normal(size=(3, B, T)), rng.normal(size=(4, B, T))
    for alive in MASKS.values():

        def loop(m, X, alive=alive):
            loss = 0.0
            for start in range(0, T, 2):
                if start:
                    recur.truncate(m)
                part = slice(start, start + 2)
                loss = loss + (m(X[:, :, part], mask=alive[:, part]) * w[:, :, part]).sum()
            return loss

        m.reset()
        want, (of_m, of_x) = recur.withgradient(loop, m, X)
        m.reset()
        got, (dm, dx) = recur.withgradient(
            lambda m, X, alive=alive: (m(X, mask=alive, truncate_every=2) * w).sum(), m, X
        )
        np.testing.assert_allclose(got, want, rtol=1e-12)
        np.testing.assert_allclose(dx, of_x, atol=1e-12)
        for path in recur.named_params(m):
            np.testing.assert_allclose(dm[path], of_m[path], atol=1e-12)


def test_a_chain_hands_lengths_to_its_recurrent_layers(rng):
    m = Chain(make("LSTM", rng), Dense(4, 3, dtype=np.float64), GRU(3, 2, dtype=np.float64))
    X = rng.normal(size=(3, B, T))
    Y = m(X, lengths=LENGTHS)
    for b, length in enumerate(LENGTHS):
        recur.reset(m)
        if length:
            np.testing.assert_allclose(
                Y[:, b, :length], m(X[:, b : b + 1, :length])[:, 0], atol=1e-13
            )
    assert np.all(Y[:, ~MASKS["lengths"]] == 0)


@pytest.mark.parametrize("mask", MASKS)
def test_bidirectional_with_padding_equals_each_sample_alone(mask, rng):
    alive = MASKS[mask]
    m = Bidirectional(make("GRU", rng), make("LSTM", rng))
    X = rng.normal(size=(3, B, T))
    Y = m(np.where(alive[None], X, np.nan), mask=alive)
    for b in range(B):
        recur.reset(m)
        real = np.flatnonzero(alive[b])
        if len(real):
            want = m(X[:, b : b + 1, real])[:, 0]
            np.testing.assert_allclose(Y[:, b, real], want, atol=1e-13)
    assert np.all(Y[:, ~alive] == 0)
    if mask == "lengths":
        recur.reset(m)
        np.testing.assert_array_equal(m(X, lengths=LENGTHS), Y)


def test_masked_means_and_padded_losses_fit_the_layer_s_mask(rng):
    m, alive = make("GRU", rng), MASKS["lengths"]
    X, target = rng.normal(size=(3, B, T)), rng.normal(size=(4, B, T))
    target[:, ~alive] = np.nan
    loss = recur.gradient(lambda m: recur.losses.mse(m(X, mask=alive), target, mask=alive), m)
    assert all(np.isfinite(loss[path]).all() for path in recur.named_params(m))


@each_layer
def test_ftb_layout_takes_the_same_lengths(name, rng):
    m = make(name, rng)
    other = Recur(m.cell, m.init, layout="ftb")
    X = rng.normal(size=(3, B, T))
    np.testing.assert_array_equal(
        other(X.swapaxes(1, 2), lengths=LENGTHS), m(X, lengths=LENGTHS).swapaxes(1, 2)
    )


BAD = {
    "too few": ({"lengths": [1, 2]}, r"lengths is int64 of shape \(2,\), expected integers \(5,\)"),
    "floats": ({"lengths": np.ones(5)}, "lengths is float64"),
    "too long": ({"lengths": [7, 0, 0, 0, 0]}, r"lengths run from 0 to 7, expected 0 to 6"),
    "negative": ({"lengths": [-1, 0, 0, 0, 0]}, "lengths run from -1"),
    "mask transposed": ({"mask": np.ones((T, B), bool)}, r"mask is bool of shape \(6, 5\)"),
    "mask of numbers": ({"mask": np.ones((B, T))}, "mask is float64"),
    "both": ({"lengths": LENGTHS, "mask": HOLES}, "pass one of them"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("name", ["LSTM", "function"])
def test_lengths_and_masks_that_do_not_fit_are_refused(name, case, rng):
    m = make(name, rng)
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        m(np.ones((3, B, T)), **options)
    assert m.at_start


@pytest.mark.parametrize("option", ["lengths", "mask", "truncate_every", "remat"])
def test_options_of_sequences_are_refused_for_a_single_step(option):
    value = {"lengths": [1], "mask": np.ones((1, 1), bool), "truncate_every": 2, "remat": 2}[option]
    with pytest.raises(recur.ShapeError, match=rf"LSTM\(3 => 4\): {option}= needs a sequence"):
        LSTM(3, 4)(np.ones((3, 1)), **{option: value})


def test_remat_is_refused_where_no_kernel_runs(rng):
    for m in (make("own act", rng), make("function", rng)):
        with pytest.raises(recur.StateError, match="remat= needs a cell that runs as one kernel"):
            m(np.ones((3, B, T)), remat=2)
        assert m.at_start
