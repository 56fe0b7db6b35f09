"""Batch sizes: what a start serves, what a carried state refuses, and the switches."""

from __future__ import annotations

import numpy as np
import pytest

import recur
from recur import GRU, LSTM, RNN, GRUv3, Recur, Tape
from recur.cells import LSTMCell, RNNCell

LAYERS = {"RNN": RNN, "LSTM": LSTM, "GRU": GRU, "GRUv3": GRUv3}
each_layer = pytest.mark.parametrize("name", LAYERS)


def parts(m):
    return m.state if isinstance(m.state, tuple) else (m.state,)


@each_layer
@pytest.mark.parametrize("scope", [False, True])
def test_another_batch_size_is_refused_and_the_state_stays(name, scope):
    m = LAYERS[name](3, 5)
    with Tape() if scope else recur.paused():
        m(np.ones((3, 10)))
        before = [recur.value(part).copy() for part in parts(m)]
        for shape, batch in (((3,), 1), ((3, 4), 4), ((3, 4, 2), 4), ((3, 11, 2), 11)):
            with pytest.raises(recur.BatchSizeError) as error:
                m(np.ones(shape))
            assert str(error.value) == (
                f"{name}(3 => 5): the state holds batch 10, x has batch {batch}. Call reset(model) "
                "before another batch size (the last batch of an epoch is often smaller), or build "
                'the layer with on_batch_change="reset". Nothing was changed.'
            )
            for part, old in zip(parts(m), before, strict=True):
                np.testing.assert_array_equal(recur.value(part), old)
        assert m(np.ones((3, 10))).shape == (5, 10)


@each_layer
def test_reset_makes_any_batch_size_legal_again(name, rng):
    m = LAYERS[name](3, 5, rng=np.random.default_rng(0))
    fresh = LAYERS[name](3, 5, rng=np.random.default_rng(0))
    m(np.ones((3, 10)))
    m.reset()
    x = rng.normal(size=(3, 2))
    np.testing.assert_array_equal(m(x), fresh(x))


@each_layer
def test_on_batch_change_reset_starts_anew(name, rng):
    m = LAYERS[name](3, 5, on_batch_change="reset", rng=np.random.default_rng(0))
    fresh = LAYERS[name](3, 5, rng=np.random.default_rng(0))
    m(np.ones((3, 10)))
    x = rng.normal(size=(3, 2))
    for given in (x, x[:, 0], x[:, :1], x[:, None]):
        fresh.reset()
        m(np.ones((3, 10)))
        np.testing.assert_array_equal(m(given), fresh(given))


def test_on_batch_change_reset_learns_init_again(rng):
    m = GRU(2, 3, learn_init=True, on_batch_change="reset", dtype=np.float64)
    grads = recur.gradient(lambda m: [m(np.ones((2, 4))), m(np.ones((2, 2))).sum()][1], m)
    m.reset()
    want = recur.gradient(lambda m: m(np.ones((2, 2))).sum(), m)
    np.testing.assert_array_equal(grads["init"], want["init"])
    assert want["init"].any()


@each_layer
def test_on_batch_change_broadcast_repeats_one_sample(name, rng):
    m = LAYERS[name](3, 5, on_batch_change="broadcast", dtype=np.float64)
    by_hand = LAYERS[name](3, 5, dtype=np.float64)
    by_hand.cell = m.cell
    first, then = rng.normal(size=3), rng.normal(size=(3, 4))
    m(first)
    by_hand(first)
    by_hand.state = tuple(np.repeat(part, 4, axis=1) for part in parts(by_hand))
    np.testing.assert_array_equal(m(then), by_hand(then))
    with pytest.raises(recur.BatchSizeError, match="from batch 1 only"):
        m(first)
    with pytest.raises(recur.BatchSizeError, match="batch 4, x has batch 2"):
        m(np.ones((3, 2)))


def test_the_gradient_of_a_broadcast_state_is_summed(rng):
    m = RNN(2, 3, on_batch_change="broadcast", learn_init=True, dtype=np.float64)
    x, w = rng.normal(size=(2, 1)), rng.normal(size=(3, 4))

    def broadcast(m):
        m(x)
        return (m(np.ones((2, 4))) * w).sum()

    def repeated(m):
        m(np.repeat(x, 4, 1))
        return (m(np.ones((2, 4))) * w).sum()

    got = recur.gradient(broadcast, m)
    m.reset()
    want = recur.gradient(repeated, m)
    for path in recur.named_params(m):
        np.testing.assert_allclose(got[path], want[path], atol=1e-14)


def test_a_vector_counts_as_batch_one():
    m = GRU(3, 5)
    m(np.ones(3))
    assert m(np.ones((3, 1))).shape == (5, 1)
    assert m(np.ones((3, 1, 2))).shape == (5, 1, 2)
    with pytest.raises(recur.BatchSizeError, match="batch 1, x has batch 4"):
        m(np.ones((3, 4)))


def test_a_state_without_a_batch_serves_any_batch_once(rng):
    cell = LSTMCell(3, 5)
    h, c = rng.normal(size=(2, 5)).astype(np.float32)
    for batch in (1, 4):
        m = Recur(cell, state=(h, c))
        assert [part.shape for part in m.state] == [(5,), (5,)]
        y = m(np.ones((3, batch)))
        want = cell(
            (np.repeat(h[:, None], batch, 1), np.repeat(c[:, None], batch, 1)), np.ones((3, batch))
        )
        np.testing.assert_array_equal(y, want[1])
        with pytest.raises(recur.BatchSizeError):
            m(np.ones((3, batch + 1)))
    column = Recur(cell, state=(h[:, None], c[:, None]))
    with pytest.raises(recur.BatchSizeError, match="batch 1, x has batch 4"):
        column(np.ones((3, 4)))


@each_layer
def test_an_init_with_a_column_serves_any_batch_too(name):
    n = len(LAYERS[name](3, 5).cell.state_names)
    m = LAYERS[name](3, 5, init_state=(np.ones((5, 1)),) * n)
    assert m(np.ones((3, 4))).shape == (5, 4)
    m.reset()
    assert m(np.ones(3)).shape == (5,)


# ---------------------------------------------------------------------- some samples


@each_layer
def test_reset_with_a_mask_restarts_these_samples_only(name, rng):
    m = LAYERS[name](3, 5, learn_init=True, dtype=np.float64)
    for p in recur.params(m):
        p[...] = rng.normal(size=p.shape)
    xs = rng.normal(size=(3, 3, 4))
    mask = np.array([True, False, False, True])

    def loss(m, columns, restart):
        total = 0.0
        for t, x in enumerate(xs):
            if t == 1 and restart is not None:
                recur.reset(m, mask=restart)
            total = total + (m(x[:, columns]) ** 2).sum()
        return total

    together = recur.gradient(lambda m: loss(m, slice(None), mask), m)
    alone = []
    for b, restart in enumerate(mask):
        m.reset()
        alone.append(
            recur.gradient(lambda m, b=b, r=restart: loss(m, slice(b, b + 1), np.array([r])), m)
        )
    for path in recur.named_params(m):
        np.testing.assert_allclose(together[path], sum(g[path] for g in alone), rtol=1e-10)


def test_a_masked_reset_outside_a_scope_gives_plain_values(rng):
    m = LSTM(2, 3, init_state=(np.full(3, 0.25), np.full(3, 0.5)))
    m(rng.normal(size=(2, 3)))
    before = m.state
    recur.reset(m, mask=[False, True, False])
    for part, old, start in zip(m.state, before, m.init, strict=True):
        np.testing.assert_array_equal(part[:, 1], start)
        np.testing.assert_array_equal(part[:, [0, 2]], old[:, [0, 2]])
    m.reset()
    recur.reset(m, mask=[True, False])
    assert m.at_start


def test_a_masked_reset_that_does_not_fit_one_layer_changes_none():
    a, b = GRU(2, 3), GRU(2, 3)
    a(np.ones((2, 4)))
    b(np.ones((2, 5)))
    before = a.state
    with pytest.raises(recur.BatchSizeError, match="mask has 4 entries, the state holds batch 5"):
        recur.reset([a, b], mask=np.ones(4, bool))
    np.testing.assert_array_equal(a.state, before)
    for bad in (np.ones(4), np.ones((4, 1), bool), 3):
        with pytest.raises(recur.StateError, match="bool"):
            recur.reset(a, mask=bad)


def test_gradients_are_sums_over_the_batch(rng):
    m = RNN(2, 3, dtype=np.float64)
    x = rng.normal(size=(2, 1, 5))
    one = recur.gradient(lambda m: (m(x) ** 2).sum(), m)
    m.reset()
    four = recur.gradient(lambda m: (m(np.repeat(x, 4, axis=1)) ** 2).sum(), m)
    for path in recur.named_params(m):
        np.testing.assert_allclose(four[path], 4 * one[path], rtol=1e-12)


@each_layer
def test_a_stream_s_numbers_do_not_depend_on_its_batch_or_place(name, dtype, rng):
    X = rng.normal(size=(4, 9, 6)).astype(dtype)
    m = LAYERS[name](4, 17, dtype=dtype)
    together = np.stack([m(X[:, :, t]) for t in range(6)], -1)
    for columns in ([3], [8, 3, 0], list(range(9))[::-1]):
        m.reset()
        some = np.stack([m(X[:, columns, t]) for t in range(6)], -1)
        np.testing.assert_array_equal(some, together[:, columns])


def test_an_rnn_cell_of_ones_own_dtype_decides_the_batch_rules_too():
    m = Recur(RNNCell(2, 3, lambda x: recur.ops.tanh(x) * 2.0))
    m(np.ones((2, 4)))
    with pytest.raises(recur.BatchSizeError):
        m(np.ones((2, 3)))
