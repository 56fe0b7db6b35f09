"""The ends of sequences: `FinalStep`, and `Reversed`, which runs to the other one."""

from __future__ import annotations

import numpy as np
import pytest

import recur
from recur import LSTM, Bidirectional, Chain, Dense, FinalStep, Recur, Reversed, withgradient


def numbers(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def test_the_final_step_is_the_last_output_of_each_sample(rng):
    x = numbers(rng, 3, 2, 4)
    np.testing.assert_array_equal(FinalStep()(x), x[:, :, 3])
    np.testing.assert_array_equal(FinalStep()([x[:, :, t] for t in range(4)]), x[:, :, 3])
    got = FinalStep()(x, lengths=np.array([4, 2]))
    np.testing.assert_array_equal(got, np.stack([x[:, 0, 3], x[:, 1, 1]], -1))
    steps = [x[:, :, t] for t in range(4)]
    np.testing.assert_array_equal(FinalStep()(steps, lengths=np.array([4, 2])), got)


def test_rows_of_the_backward_layer_end_at_the_first_real_step(rng):
    x = numbers(rng, 5, 2, 4)
    want = np.concatenate([x[:3, :, 3], x[3:, :, 0]])
    np.testing.assert_array_equal(FinalStep(3)(x), want)
    np.testing.assert_array_equal(FinalStep(3)([x[:, :, t] for t in range(4)]), want)
    mask = np.array([[0, 1, 1, 0], [1, 1, 1, 1]], bool)
    want = np.stack([[*x[:3, 0, 2], *x[3:, 0, 1]], [*x[:3, 1, 3], *x[3:, 1, 0]]], -1)
    np.testing.assert_array_equal(FinalStep(3)(x, mask=mask), want)


def test_a_single_step_is_its_own_final_one(rng):
    for x in (numbers(rng, 3), numbers(rng, 3, 2)):
        assert FinalStep()(x) is x


def test_a_model_with_a_final_step_streams(rng):
    m = Chain(LSTM(3, 4, rng=rng), FinalStep(), Dense(4, 2, rng=rng))
    X = numbers(rng, 3, 2, 5)
    want = m(X)
    recur.reset(m)
    got = [m(X[:, :, t]) for t in range(5)][-1]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"lengths": np.array([4, 2])}])
def test_gradients_of_a_final_step_agree_with_finite_differences(options, rng):
    m = recur.f64(Chain(Bidirectional.of(LSTM, 3, 4, rng=rng), FinalStep(4), Dense(8, 2, rng=rng)))
    X = numbers(rng, 3, 2, 4, dtype=np.float64)

    def loss(m):
        recur.reset(m)
        return (m(X, **options) ** 2).sum()

    recur.gradcheck(loss, m)


def test_a_sequence_without_an_end_is_refused():
    with pytest.raises(recur.ShapeError, match="at least one step"):
        FinalStep()(np.zeros((3, 2, 0)))
    with pytest.raises(recur.ShapeError, match="at least one step"):
        FinalStep()([])
    with pytest.raises(recur.ShapeError, match="a real step in every row"):
        FinalStep()(np.zeros((3, 2, 4)), lengths=np.array([4, 0]))
    with pytest.raises(recur.ShapeError, match="positive integer"):
        FinalStep(-1)


@pytest.mark.parametrize("options", [{}, {"lengths": np.array([4, 2])}])
def test_a_reversed_layer_is_the_second_half_of_a_bidirectional(options, rng):
    both = Bidirectional.of(LSTM, 3, 4, rng=rng)
    half = Reversed(Recur(both.backward.cell))
    X = numbers(rng, 3, 2, 4)
    np.testing.assert_array_equal(half(X, **options), both(X, **options)[4:])
    recur.reset((both, half))
    steps = [X[:, :, t] for t in range(4)]
    for ours, theirs in zip(half(steps, **options), both(steps, **options), strict=False):
        recur.reset((both, half))
        np.testing.assert_array_equal(ours, theirs[4:])


def test_gradients_of_a_reversed_layer_reach_its_weights(rng):
    half = Reversed(LSTM(3, 4, rng=rng))
    loss, grads = withgradient(lambda m: m(numbers(rng, 3, 2, 4)).sum(), half)
    assert np.isfinite(loss) and np.any(grads["layer.cell.Wi"])


def test_a_reversed_layer_refuses_what_has_no_end_to_begin_at():
    half = Reversed(LSTM(3, 4))
    with pytest.raises(recur.ShapeError, match="a single step"):
        half(np.zeros((3, 2)))
    with pytest.raises(recur.ShapeError, match="lengths run from"):
        half(np.zeros((3, 2, 4)), lengths=np.array([4, 5]))
    assert half.layer.at_start
    with pytest.raises(TypeError, match="expected a recurrent layer"):
        Reversed(Dense(3, 4))


def test_both_layers_are_saved_printed_and_sized(tmp_path, rng):
    m = Chain(Reversed(LSTM(3, 4, rng=rng)), FinalStep(0))
    recur.save(m, tmp_path / "m.safetensors")
    X = numbers(rng, 3, 2, 4)
    np.testing.assert_array_equal(recur.load(tmp_path / "m.safetensors")(X), m(X))
    assert repr(m) == "Chain(Reversed(Recur(LSTMCell(3 => 4))), FinalStep(n_forward=0))"
    assert recur.outputsize(m, (3, 2, 4)) == (4, 2)
