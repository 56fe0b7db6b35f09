"""`inspect.gradient_lag`: how far back gradients reach."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

import recur
from recur import GRU, LSTM, RNN, Chain, Dense, Param, Recur, Tape, f64
from recur.inspect import GradientLag, gradient_lag
from recur.layers import Dropout
from recur.losses import mse


def made(*layers):
    return f64(Chain(*layers))


def test_in_a_linear_cell_the_norms_are_powers_of_its_weight(dtype):
    m = RNN(1, 1, recur.identity, dtype=dtype)
    m.cell.Wi[...], m.cell.Wh[...] = 1.0, -0.5
    lag = gradient_lag(m, np.ones((1, 1, 6), dtype), lambda y, t: 3.0 * y.sum())
    expected = np.where(np.tri(6) > 0, 3.0 * 0.5 ** np.arange(6.0), np.nan)
    np.testing.assert_allclose(lag.array, expected, rtol=1e-6)
    np.testing.assert_allclose(lag.mean, 3.0 * 0.5 ** np.arange(6.0), rtol=1e-6)
    np.testing.assert_allclose(lag.spread, 0, atol=1e-6)
    np.testing.assert_array_equal(lag.at, np.arange(1, 7))


@pytest.mark.parametrize("kind", [RNN, LSTM, GRU, recur.GRUv3])
def test_norms_agree_with_difference_quotients_of_the_state(kind, rng):
    """Moving h after step t - k moves the loss at t as the norm says: h is used as output too."""
    m = made(kind(3, 4), GRU(4, 2))
    xs = [rng.standard_normal((3, 2)) for _ in range(4)]
    target = rng.standard_normal((2, 2))

    def loss(y, t):
        return mse(y, target, agg=sum)

    lag = gradient_lag(m, xs, loss, at=[4])
    top = m.layers[1]
    slopes = np.zeros((4, 2, 2))
    for k in (1, 2, 3):
        for index in np.ndindex(2, 2):
            ends = []
            for step in (1e-6, -1e-6):
                recur.reset(m)
                for t, x in enumerate(xs, start=1):
                    y = m(x)
                    if t == 4 - k:
                        moved = np.array(top.state)
                        moved[index] += step
                        top.state = moved
                ends.append(float(loss(y, 4)))
            slopes[k][index] = (ends[0] - ends[1]) / 2e-6
    norms = np.linalg.norm(slopes.reshape(4, -1), axis=1)
    np.testing.assert_allclose(lag.parts["layers.1.state"][0, 1:], norms[1:], rtol=1e-6)


def test_all_parts_together_are_the_root_of_the_sum_of_squares(rng):
    m = made(LSTM(3, 4), GRU(4, 2))
    lag = gradient_lag(m, rng.standard_normal((3, 2, 5)), lambda y, t: (y * y).sum())
    assert list(lag.parts) == ["layers.0.state.h", "layers.0.state.c", "layers.1.state"]
    together = np.sqrt(sum(part**2 for part in lag.parts.values()))
    np.testing.assert_array_equal(lag.array, together)


def test_lists_sequences_and_single_samples_give_the_same_norms(rng):
    m = made(LSTM(3, 4), Dense(4, 2))
    X = rng.standard_normal((3, 1, 5))

    def loss(y, t):
        return (y**2).sum()

    whole = gradient_lag(m, X, loss)
    steps = gradient_lag(m, [X[:, :, t] for t in range(5)], loss)
    vectors = gradient_lag(m, [X[:, 0, t] for t in range(5)], loss)
    np.testing.assert_array_equal(whole.array, steps.array)
    np.testing.assert_allclose(whole.array, vectors.array, rtol=1e-12)
    assert not np.isnan(whole.array[4]).any() and whole.array[4, 0] > 0


def test_the_loss_sees_a_vector_for_a_vector():
    seen = []

    def loss(y, t):
        seen.append((y.shape, t))
        return y.sum()

    gradient_lag(GRU(3, 4), [np.ones(3)] * 2, loss)
    assert seen == [((4,), 1), ((4,), 2)]


def test_the_other_layout_gives_the_same_norms(rng):
    X = rng.standard_normal((3, 2, 5))
    here = f64(GRU(3, 4, rng=np.random.default_rng(0)))
    there = f64(GRU(3, 4, rng=np.random.default_rng(0), layout="ftb"))
    a = gradient_lag(here, X, lambda y, t: (y**2).sum())
    b = gradient_lag(there, X.swapaxes(1, 2), lambda y, t: (y**2).sum())
    np.testing.assert_allclose(a.array, b.array, rtol=1e-12)
    assert there.layout == "ftb"


def test_behind_a_cut_the_norms_are_exactly_zero(rng):
    m = made(GRU(3, 4))
    lag = gradient_lag(
        m, rng.standard_normal((3, 2, 8)), lambda y, t: (y**2).sum(), truncate_every=3
    )
    for t, row in zip(lag.at, lag.array, strict=True):
        reach = (t - 1) % 3 + 1
        assert (row[:reach] > 0).all()
        assert (row[reach:t] == 0).all()
        assert np.isnan(row[t:]).all()


def test_only_requested_losses_are_made():
    made_at = []

    def loss(y, t):
        made_at.append(t)
        return y.sum()

    lag = gradient_lag(GRU(3, 4), np.ones((3, 2, 9)), loss, at=[6, 2])
    assert made_at == [2, 6]
    assert lag.array.shape == (2, 6)


def test_a_cell_that_is_a_function_has_its_state_measured():
    W = Param(np.full((1, 1), 0.5), "W")

    def cell(h, x):
        h = W @ h + x
        return h, 2.0 * h

    m = Recur(cell, np.zeros((1, 1)))
    lag = gradient_lag(m, [np.ones((1, 1))] * 3, lambda y, t: y.sum(), at=[3])
    np.testing.assert_allclose(lag.parts["state"][0], [2.0, 1.0, 0.5])


def test_vectors_for_a_model_of_both_kinds_of_cells_are_refused():
    m = Chain(GRU(3, 3), Recur(lambda h, x: (h + x, h + x), np.zeros(3)))
    with pytest.raises(recur.ShapeError, match="batch axis"):
        gradient_lag(m, [np.ones(3)] * 2, lambda y, t: y.sum())


def test_nothing_is_left_changed():
    m = Chain(LSTM(3, 4), Dropout(0.5), Dense(4, 2))
    m(np.ones((3, 2)))
    state = [part.copy() for part in m.layers[0].state]
    twice = [gradient_lag(m, np.ones((3, 2, 6)), lambda y, t: (y**2).sum()) for _ in range(2)]
    np.testing.assert_array_equal(twice[0].array, twice[1].array)  # the same masks
    for before, now in zip(state, m.layers[0].state, strict=True):
        np.testing.assert_array_equal(before, now)
    assert all(p.grad is None for p in recur.params(m))


def test_states_are_put_back_if_the_loss_raises():
    m = GRU(3, 4)

    def loss(y, t):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        gradient_lag(m, np.ones((3, 2, 3)), loss)
    assert m.at_start
    with Tape():
        pass  # no scope was left open


def test_a_window_keeps_its_share_of_the_norms():
    lag = GradientLag([3], {"state": np.array([[4.0, 2.0, 2.0]])}, None)
    assert [lag.within(k) for k in (0, 1, 2, 3, 9)] == [0, 0.5, 0.75, 1, 1]
    assert GradientLag([1], {"state": np.zeros((1, 1))}, None).within(0) == 1


def test_errors_say_what_to_pass():
    m, loss = GRU(3, 4), lambda y, t: y.sum()
    with pytest.raises(ValueError, match="no recurrent layer"):
        gradient_lag(Dense(3, 4), np.ones((3, 2, 3)), loss)
    with pytest.raises(recur.ShapeError, match=r"expected a sequence \(features, batch, time\)"):
        gradient_lag(m, np.ones((3, 2)), loss)
    for at in ([], [0], [4]):
        with pytest.raises(ValueError, match=r"xs has the steps 1 to 3"):
            gradient_lag(m, np.ones((3, 2, 3)), loss, at=at)


def test_the_plot_shows_mean_spread_and_window():
    pytest.importorskip("matplotlib")
    m = made(GRU(3, 4))
    lag = gradient_lag(m, np.ones((3, 2, 12)), lambda y, t: (y**2).sum())
    axes = lag.plot(window=5)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["spread over losses", "mean", "a window of 5 steps ends"]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), lag.mean)
    assert set(axes.lines[1].get_xdata()) == {4.5}
    cut = gradient_lag(m, np.ones((3, 2, 12)), lambda y, t: (y**2).sum(), truncate_every=4)
    axes = cut.plot()
    assert "a window of 4 steps ends" in [t.get_text() for t in axes.get_legend().get_texts()]
    assert len(axes.lines[0].get_xdata()) == 4  # zeros are not drawn
    assert lag.plot(axes) is axes


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch):
    lag = GradientLag([1], {"state": np.ones((1, 1))}, None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=re.escape('pip install "recur[cli]"')):
        lag.plot()


def test_it_prints_as_one_line():
    lag = GradientLag([2], {"state": np.array([[2.0, 0.5]])}, None)
    assert repr(lag) == "GradientLag(1 loss, lags 0 to 1: mean 2 to 0.5)"
