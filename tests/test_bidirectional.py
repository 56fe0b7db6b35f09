"""`flip` and `Bidirectional`."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest

import recur
from recur import GRU, LSTM, RNN, Bidirectional, Chain, Dense, Recur, Tape, flip, ops


def test_flip_runs_a_list_from_its_end_and_returns_results_in_order():
    order = []
    assert flip(lambda x: [order.append(x), x.upper()][1], ["a", "b", "c"]) == ["A", "B", "C"]
    assert order == ["c", "b", "a"]
    assert flip(lambda x: x, ()) == []


def test_flip_runs_a_sequence_backwards(rng):
    m = GRU(2, 3, dtype=np.float64)
    X = rng.normal(size=(2, 4, 5))
    Y = flip(m, X)
    m.reset()
    ys = flip(m, [X[:, :, t] for t in range(5)])
    np.testing.assert_allclose(np.stack(ys, -1), Y, atol=1e-14)


@pytest.fixture
def pair():
    make = np.random.default_rng(3)
    return LSTM(2, 3, dtype=np.float64, rng=make, learn_init=True), RNN(
        2, 4, dtype=np.float64, rng=make
    )


def by_hand(ahead, behind, X):
    ys = [ahead(X[:, :, t]) for t in range(X.shape[2])]
    zs = [behind(X[:, :, t]) for t in reversed(range(X.shape[2]))][::-1]
    return np.stack([np.concatenate(both) for both in zip(ys, zs, strict=True)], -1)


def test_outputs_are_stacked_by_rows_with_the_forward_layer_first(pair, rng):
    X = rng.normal(size=(2, 4, 5))
    m = Bidirectional(*pair)
    want = by_hand(*copy.deepcopy(pair), X)
    np.testing.assert_allclose(m(X), want, atol=1e-14)
    recur.reset(m)
    listed = m([X[:, :, t] for t in range(5)])
    np.testing.assert_allclose(np.stack(listed, -1), want, atol=1e-14)
    recur.reset(m)
    vectors = m([X[:, 0, t] for t in range(5)])
    np.testing.assert_allclose(np.stack(vectors, -1), want[:, 0], atol=1e-14)


def test_gradients_reach_both_layers_and_the_input(pair, rng):
    X, w = rng.normal(size=(2, 4, 5)), rng.normal(size=(7, 4, 5))

    def hand(pair, X):
        ys = [pair[0](X[:, :, t]) for t in range(5)]
        zs = flip(pair[1], [X[:, :, t] for t in range(5)])
        return sum(
            (ops.vcat(y, z) * w[:, :, t]).sum() for t, (y, z) in enumerate(zip(ys, zs, strict=True))
        )

    want = recur.gradient(hand, list(pair), X)
    m = Bidirectional(*pair)
    recur.reset(m)
    got = recur.gradient(lambda m, X: (m(X) * w).sum(), m, X)
    np.testing.assert_allclose(got[1], want[1], atol=1e-13)
    for a, b in zip(recur.params(m), recur.params(list(pair)), strict=True):
        assert a is b
        np.testing.assert_allclose(got[0][a], want[0][a], atol=1e-13)


def test_truncate_every_counts_in_each_direction_s_own_order(pair, rng):
    X, w = rng.normal(size=(2, 3, 5)), rng.normal(size=(7, 3, 5))

    def hand(pair, X):
        ahead = pair[0](X, truncate_every=2)
        behind = pair[1](X[:, :, ::-1], truncate_every=2)[:, :, ::-1]
        return (ops.concatenate([ahead, behind]) * w).sum()

    want = recur.gradient(hand, list(pair), X)
    m = Bidirectional(*pair)
    recur.reset(m)
    got = recur.gradient(lambda m, X: (m(X, truncate_every=2) * w).sum(), m, X)
    np.testing.assert_allclose(got[1], want[1], atol=1e-13)


def test_reset_and_truncate_reach_both(pair):
    m = Bidirectional(*pair)
    with Tape():
        m(np.ones((2, 3, 4)))
        recur.truncate(m)
        assert not any(isinstance(p, recur.Tensor) for p in (*pair[0].state, pair[1].state))
    recur.reset(m)
    assert all(layer.at_start for layer in pair)


def test_a_single_step_is_refused(pair):
    m = Bidirectional(*pair)
    for x in (np.ones(2), np.ones((2, 3))):
        with pytest.raises(recur.ShapeError, match="a single step"):
            m(x)
    assert pair[0].at_start


def test_if_the_backward_layer_fails_the_forward_one_has_not_moved():
    m = Bidirectional(GRU(2, 3), GRU(5, 3))
    with pytest.raises(recur.ShapeError):
        m(np.ones((2, 3, 4)))
    assert m.forward.at_start and m.backward.at_start


def test_a_state_carried_backwards_is_warned_of_once(pair):
    m = Chain(Bidirectional(*pair), Dense(7, 1))
    X = np.ones((2, 3, 4))
    m(X)
    with pytest.warns(UserWarning, match=r"the layer that runs backwards.*reset\(model\)"):
        m(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m(X)
        recur.reset(m)
        m(X)
        recur.reset(m)
        Bidirectional(*pair)(X)


def test_layouts_and_sizes(rng):
    X = rng.normal(size=(2, 3, 4)).astype(np.float32)
    a, b = GRU(2, 3), RNN(2, 5)
    m = Bidirectional(a, b)
    assert recur.outputsize(m, (2, 3, 4)) == (8, 3, 4)
    ftb = Bidirectional(Recur(a.cell, layout="ftb"), Recur(b.cell, layout="ftb"))
    np.testing.assert_array_equal(ftb(X.swapaxes(1, 2)).swapaxes(1, 2), m(X))
    recur.reset([m, ftb])
    np.testing.assert_array_equal(ftb(X[:, 0]), m(X[:, :1])[:, 0])
    empty = m.forward, m.backward
    recur.reset(m)
    assert m(np.zeros((2, 3, 0))).shape == (8, 3, 0)
    assert all(layer.at_start for layer in empty)
    assert m([]) == []


def test_of_makes_two_layers_alike_with_weights_of_their_own():
    m = Bidirectional.of(LSTM, 2, 3, learn_init=True)
    assert repr(m) == "Bidirectional(Recur(LSTMCell(2 => 3)), Recur(LSTMCell(2 => 3)))"
    assert not np.array_equal(m.forward.cell.Wi.value, m.backward.cell.Wi.value)
    assert len(recur.params(m)) == 10


def test_what_cannot_be_two_directions_is_refused():
    m = GRU(2, 3)
    with pytest.raises(ValueError, match="one layer"):
        Bidirectional(m, m)
    with pytest.raises(TypeError, match=r"Bidirectional\.of\(LSTM, 3, 5\)"):
        Bidirectional(m, Dense(2, 3))
    with pytest.raises(ValueError, match="layouts differ"):
        Bidirectional(m, GRU(2, 3, layout="ftb"))


def test_four_axes_are_no_single_step():
    m = recur.Bidirectional(recur.GRU(2, 3), recur.GRU(2, 3))
    with pytest.raises(recur.ShapeError, match=r"shape \(2, 3, 4, 5\), no sequence"):
        m(np.ones((2, 3, 4, 5)))
