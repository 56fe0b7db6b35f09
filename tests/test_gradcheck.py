"""gradcheck: finds wrong gradients, and leaves everything as it was."""

from __future__ import annotations

import numpy as np
import pytest

from recur import ops
from recur.inspect import gradcheck
from recur.module import Module
from recur.tape import Param, current, value

X = np.array([[0.5, -1.25, 2.0], [1.5, 0.75, -0.5]])


class Affine(Module):
    def __init__(self, dtype=np.float64):
        self.W = Param(np.array([[0.5, -0.3], [0.2, 0.8]], dtype))
        self.b = Param(np.array([0.1, -0.2], dtype))

    def __call__(self, x):
        return np.tanh(ops.affine(self.W, x, self.b))


def test_right_gradients_pass_and_are_reported_by_path():
    model = Affine()
    slopes = gradcheck(lambda m, x: m(x), model, X)
    assert [slope.path for slope in slopes] == ["W", "W", "b", "b", "argument 1", "argument 1"]
    for slope in slopes:
        np.testing.assert_allclose(slope.analytic, slope.numeric, rtol=1e-8)
        assert slope.error <= 1e-8


@pytest.mark.parametrize("factor", [0.0, -1.0, 1 + 1e-5, 1e6, np.nan])
def test_a_wrong_gradient_is_found_and_named(factor):
    wrong = ops.custom_grad(lambda w: (w**2, w), lambda w, dy: 2 * w * dy * factor)

    def f(model):
        return wrong(model.W).sum() + model.b.sum()

    with pytest.raises(AssertionError, match="along a random direction of W the gradient gives"):
        gradcheck(f, Affine())


def test_a_gradient_that_goes_missing_is_found():
    with pytest.raises(AssertionError, match="argument 0"):
        gradcheck(lambda x: x * ops.stop_gradient(x), X)


def test_a_gradient_that_is_zero_passes():
    gradcheck(lambda x: ops.where(X > 0, 0.0, 0 * x), X)
    gradcheck(lambda m: np.ones(3), Affine())


def test_several_results_are_weighted():
    gradcheck(lambda x: (x.sum(), [x * x, x[0]]), X)


def test_parameters_are_put_back_bit_for_bit():
    model = Affine()
    before = model.W.value.copy(), model.b.value.copy()
    gradcheck(lambda m, x: m(x), model, X)
    np.testing.assert_array_equal(model.W.value, before[0])
    np.testing.assert_array_equal(model.b.value, before[1])
    assert model.W.grad is None
    assert current() is None


class Noisy(Module):
    """Carries a state, draws at random and counts: everything that a call may change."""

    def __init__(self):
        self.w = Param(np.array([0.7, -0.4]))
        self.generator = np.random.default_rng(3)
        self.seen = np.zeros(1)
        self.state = np.zeros(2)

    def buffers(self):
        return {"seen": self.seen}

    def running_state(self):
        return {"state": np.array(value(self.state))}

    def load_running_state(self, new):
        self.state = new.get("state", np.zeros(2))

    def __call__(self):
        self.seen += 1
        self.state = np.tanh(self.w * self.generator.random(2) + self.state)
        return self.state * self.seen[0]


def test_each_evaluation_sees_the_same_state_random_numbers_and_statistics():
    layer = Noisy()
    layer.state = np.array([0.3, 0.1])
    gradcheck(lambda m: m() + m(), layer)
    np.testing.assert_array_equal(layer.state, [0.3, 0.1])
    np.testing.assert_array_equal(layer.seen, [0])
    assert layer.generator.random() == np.random.default_rng(3).random()


def test_a_layer_that_only_the_function_holds_is_put_back_too():
    layer = Noisy()
    gradcheck(lambda x: x * layer(), np.array([1.0, 2.0]))
    np.testing.assert_array_equal(layer.state, np.zeros(2))


def test_all_evaluations_are_in_one_scope():
    serials = set()

    def f(x):
        serials.add(current().serial)
        return x * 2

    gradcheck(f, X)
    assert len(serials) == 1


def test_an_error_in_the_function_puts_everything_back():
    layer = Noisy()
    calls = []

    def f(m):
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError
        return m()

    with pytest.raises(ZeroDivisionError):
        gradcheck(f, layer)
    np.testing.assert_array_equal(layer.w.value, [0.7, -0.4])
    np.testing.assert_array_equal(layer.state, np.zeros(2))
    np.testing.assert_array_equal(layer.seen, [0])
    assert current() is None


def test_float32_and_nothing_to_check_are_refused():
    with pytest.raises(TypeError, match=r"W is an array of float32, expected float64.*f64"):
        gradcheck(lambda m: m(X), Affine(np.float32))
    with pytest.raises(TypeError, match="argument 0 is an array of float32"):
        gradcheck(lambda x: x, X.astype(np.float32))
    with pytest.raises(TypeError, match="no argument is a float64 array"):
        gradcheck(lambda n: n, 3)
