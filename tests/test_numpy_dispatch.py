"""What operators, methods and NumPy's own functions do with Tensors and Params (NEP 13 and 18)."""

from __future__ import annotations

import copy
import math
import operator

import numpy as np
import pytest

from recur import ops
from recur.ops.dispatch import _VALUE_ONLY
from recur.ops.table import NUMPY
from recur.tape import Param, Tape, Tensor, paused, value

X = np.array([[0.5, -1.25, 2.0], [1.5, 0.75, -0.5]])
Y = np.array([[1.5, 0.25, -2.0], [0.5, 1.75, 1.5]])


@pytest.fixture
def tape():
    with Tape() as tape:
        yield tape


def recorded(result, expected):
    assert isinstance(result, Tensor)
    np.testing.assert_allclose(value(result), expected, rtol=1e-12)


def plain(result, expected):
    assert not isinstance(result, Tensor | Param)
    np.testing.assert_array_equal(result, expected)


OPERATORS = ["add", "sub", "mul", "truediv", "pow", "matmul"]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_recorded_whichever_side_the_tensor_is_on(name, tape):
    op = getattr(operator, name)
    a, b = (np.abs(X), Y) if name != "matmul" else (X, Y.T)
    t, u, p = tape.watch(a), tape.watch(b), Param(b)
    for left, right in [(t, u), (t, p), (t, b), (a, u), (a, p), (Param(a), p)]:
        recorded(op(left, right), op(a, b))
    if name != "matmul":
        recorded(op(t, 2.0), op(a, 2.0))
        recorded(op(2.0, u), op(2.0, b))
        recorded(op(np.float64(2), u), op(2.0, b))
        recorded(op(t, [1.0, 2.0, 3.0]), op(a, [1.0, 2.0, 3.0]))


def test_unary_operators_are_recorded(tape):
    t = tape.watch(X)
    recorded(-t, -X)
    recorded(+t, X)
    recorded(abs(t), np.abs(X))


def test_in_place_operators_rebind_the_name(tape):
    t = kept = tape.watch(X)
    t *= 2
    recorded(t, 2 * X)
    recorded(kept, X)


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_give_plain_arrays(name, tape):
    op = getattr(operator, name)
    t = tape.watch(X)
    for left, right in [(t, Param(Y)), (t, Y), (X, Param(Y)), (t, tape.watch(Y))]:
        plain(op(left, right), op(X, Y))
    plain(op(t, 0.5), op(X, 0.5))


# NumPy's functions, called as users call them.
CALLS = [
    *((f, (X,)) for f in (np.exp, np.expm1, np.sin, np.cos, np.tanh, np.sinh, np.cosh, np.arctan)),
    *((f, (X,)) for f in (np.negative, np.positive, np.square, np.abs, np.absolute, np.fabs)),
    *((f, (np.abs(X),)) for f in (np.log, np.log1p, np.log2, np.log10, np.sqrt, np.reciprocal)),
    *((f, (X, Y)) for f in (np.add, np.subtract, np.multiply, np.divide, np.true_divide)),
    *((f, (X, Y)) for f in (np.maximum, np.minimum)),
    *((f, (np.abs(X), Y)) for f in (np.power, np.float_power)),
    (np.matmul, (X, Y.T)),
    (np.dot, (X, Y.T)),
    (np.outer, (X[0], Y[1])),
    *((f, (X,)) for f in (np.sum, np.mean, np.var, np.std, np.max, np.min, np.amax, np.amin)),
    *((f, (X, 1)) for f in (np.sum, np.mean, np.var, np.max, np.cumsum)),
    (np.prod, (X,)),
    (np.cumsum, (X,)),
    (np.clip, (X, -1, 1)),
    (np.reshape, (X, (3, 2))),
    (np.transpose, (X,)),
    (np.broadcast_to, (X, (4, 2, 3))),
    (np.repeat, (X, 2)),
    (np.ravel, (X,)),
    (np.expand_dims, (X, 1)),
    (np.squeeze, (X[None],)),
    (np.swapaxes, (X, 0, 1)),
    (np.moveaxis, (X, 0, 1)),
    (np.flip, (X,)),
    (np.take, (X, [2, 0])),
]


@pytest.mark.parametrize(("function", "args"), CALLS)
def test_a_numpy_function_is_recorded_in_a_scope_and_plain_outside(function, args):
    expected = function(*args)
    with Tape() as tape:
        t = tape.watch(args[0])
        recorded(function(t, *args[1:]), expected)
        recorded(function(Param(args[0]), *args[1:]), expected)
        with paused():
            plain(function(t, *args[1:]), expected)
    plain(function(t, *args[1:]), expected)
    plain(function(Param(args[0]), *args[1:]), expected)


def test_every_numpy_name_of_the_table_is_called_by_a_test():
    called = {function for function, _ in CALLS}
    assert set(NUMPY) - called == {np.where, np.concatenate, np.stack, np.split} | (
        {np.astype} if hasattr(np, "astype") else set()
    )


def test_functions_of_lists_are_recorded(tape):
    t = tape.watch(X)
    recorded(np.concatenate([t, Y]), np.concatenate([X, Y]))
    recorded(np.concatenate((Y, t), axis=1), np.concatenate((Y, X), axis=1))
    recorded(np.stack([Y, t], axis=-1), np.stack([Y, X], axis=-1))
    recorded(np.stack([Y, Param(X)]), np.stack([Y, X]))
    for part, expected in zip(np.split(t, 3, axis=1), np.split(X, 3, axis=1), strict=True):
        recorded(part, expected)
    recorded(np.where(X > 0, t, 0), np.where(X > 0, X, 0))
    recorded(np.where(t > 0, Y, t), np.where(X > 0, Y, X))


def test_functions_of_lists_are_plain_outside_a_scope():
    p = Param(X)
    plain(np.concatenate([p, Y]), np.concatenate([X, Y]))
    plain(np.stack([p, p]), np.stack([X, X]))
    plain(np.array([p, p]), np.stack([X, X]))
    plain(np.mean([p, p]), X.mean())


def test_keywords_that_an_operation_has_are_passed_on(tape):
    t = tape.watch(X)
    recorded(np.sum(t, axis=0, keepdims=True), X.sum(0, keepdims=True))
    recorded(np.var(t, axis=1, ddof=1), X.var(1, ddof=1))
    recorded(np.clip(t, a_min=0, a_max=None), X.clip(0))
    recorded(ops.clip(t, min=-1, max=1), X.clip(-1, 1))
    recorded(t.clip(max=0.5), X.clip(max=0.5))


@pytest.mark.parametrize("keywords", [{"dtype": np.float32}, {"where": X > 0}, {"initial": 1.0}])
def test_keywords_that_an_operation_lacks_are_refused_by_name(keywords, tape):
    (name,) = keywords
    with pytest.raises(TypeError, match=rf"sum: .* with {name}=.*recur\.value\(t\)"):
        np.sum(tape.watch(X), **keywords)


def test_more_positional_arguments_than_an_operation_has_are_refused(tape):
    with pytest.raises(TypeError, match=r"sum: .* 4 positional arguments.*recur\.value\(t\)"):
        np.sum(tape.watch(X), 0, None, np.empty(3))


@pytest.mark.parametrize("keywords", [{"dtype": np.float32}, {"where": X > 0}])
def test_keywords_of_a_ufunc_are_refused(keywords, tape):
    with pytest.raises(TypeError, match=r"tanh: .*recur\.value\(t\)"):
        np.tanh(tape.watch(X), **keywords)


REFUSED = {
    "linalg.norm": np.linalg.norm,
    "linalg.inv": lambda t: np.linalg.inv(t @ t.T),
    "einsum": lambda t: np.einsum("ij->i", t),
    "median": np.median,
    "sort": np.sort,
    "diff": np.diff,
    "tan": np.tan,
    "arctan2": lambda t: np.arctan2(t, 1.0),
    "arctan2 right": lambda t: np.arctan2(X, t),
    "add.reduce": np.add.reduce,
    "multiply.outer": lambda t: np.multiply.outer(t, X),
    "add.at": lambda t: np.add.at(X.copy(), slice(None), t),
    "vstack": lambda t: np.vstack([X, t]),
    "mod": lambda t: t % 2,
    "mod right": lambda t: 2 % t,
    "floordiv": lambda t: t // 2,
    "full_like": lambda t: np.full_like(X, t[0, 0]),
    "copyto": lambda t: np.copyto(X.copy(), t),
    "out": lambda t: np.add(X, t, out=np.empty_like(X)),
    "array": np.array,
    "asarray": np.asarray,
    "list": lambda t: np.array([t[0, 0], t[0, 1]]),
    "nested list": lambda t: np.mean([t[0], t[1]]),
    "save": lambda t: np.frombuffer(memoryview(np.asarray(t))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_any_other_function_raises_and_names_value(name):
    with Tape() as tape:
        for t in (tape.watch(X), tape.watch(X) * 2, Param(X)):
            with pytest.raises(TypeError, match=r"recur\.value\(t\)"):
                REFUSED[name](t)


@pytest.mark.parametrize("name", sorted(set(REFUSED) - {"linalg.inv", "save"}))
def test_outside_a_scope_any_function_sees_the_value(name):
    with Tape() as tape:
        t = tape.watch(X)
    REFUSED[name](Param(X))
    REFUSED[name](t)


def test_an_in_place_operator_of_an_array_is_refused(tape):
    a = X.copy()
    with pytest.raises(TypeError, match=r"a \+= t.*recur\.value\(t\)"):
        a += tape.watch(X)
    np.testing.assert_array_equal(a, X)


def test_item_assignment_into_an_array_is_refused(tape):
    a = np.zeros(3)
    t = tape.watch(np.array([1.0, 2.0, 3.0]))
    for assign in (
        lambda: a.__setitem__(0, t[0]),
        lambda: a.__setitem__(0, t.sum()),
        lambda: a.__setitem__(slice(None), t),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            assign()
        causes = f"{caught.value} {caught.value.__cause__}"
        assert "recur.value(t)" in causes
    np.testing.assert_array_equal(a, np.zeros(3))


def test_a_recorded_number_does_not_become_a_plain_one_by_itself(tape):
    t = tape.watch(X).sum()
    for convert in (float, int, math.sqrt, math.floor):
        with pytest.raises(TypeError, match=r"recur\.value\(t\)"):
            convert(t)
    with pytest.raises(TypeError):
        operator.index(t)
    assert float(value(t)) == X.sum()
    with paused():
        assert float(t) == X.sum()
        assert int(t) == int(X.sum())
    with pytest.raises(TypeError, match=r"recur\.value\(t\)"):
        float(Param(np.array(1.0)))


def test_the_truth_of_one_number_is_a_function_of_its_value(tape):
    t = tape.watch(X)
    assert t[0, 0]
    assert not t[0, 0] * 0
    assert t.sum() > 0
    with pytest.raises(TypeError, match=r"ambiguous.*recur\.value\(t\)"):
        bool(t)
    with paused(), pytest.raises(ValueError, match="ambiguous"):  # as of any array
        bool(t)


VALUE_CALLS = [
    *((f, ()) for f in (np.isnan, np.isfinite, np.isinf, np.sign, np.floor, np.ceil, np.rint)),
    *((f, ()) for f in (np.shape, np.ndim, np.size, np.argmax, np.argmin, np.argsort)),
    *((f, ()) for f in (np.any, np.all, np.nonzero, np.count_nonzero, np.zeros_like)),
    *((f, ()) for f in (np.logical_not, np.signbit, np.ones_like, np.flatnonzero, np.argwhere)),
    *((f, (Y,)) for f in (np.allclose, np.isclose, np.array_equal, np.equal, np.less)),
    (np.where, ()),
]


@pytest.mark.parametrize(("function", "more"), VALUE_CALLS)
def test_functions_of_the_value_only_give_plain_results(function, more, tape):
    expected = function(X, *more)
    for t in (tape.watch(X), Param(X)):
        result = function(t, *more)
        assert not isinstance(result, Tensor | Param)
        np.testing.assert_array_equal(result, expected)


def test_no_function_is_both_recorded_and_of_the_value_only():
    assert not set(NUMPY) & _VALUE_ONLY


def test_methods_are_those_of_arrays(tape):
    t = tape.watch(X)
    for name in ("sum", "mean", "var", "std", "max", "min", "prod", "cumsum", "ravel", "squeeze"):
        recorded(getattr(t, name)(), getattr(X, name)())
    recorded(t.sum(axis=0), X.sum(0))
    recorded(t.mean(1, keepdims=True), X.mean(1, keepdims=True))
    recorded(t.T, X.T)
    recorded(t.mT, X.T)
    recorded(t.reshape(3, 2), X.reshape(3, 2))
    recorded(t.reshape((3, -1)), X.reshape(3, 2))
    recorded(t.reshape(-1), X.reshape(-1))
    recorded(t.reshape(3, 2, order="F"), X.reshape(3, 2, order="F"))
    recorded(t.transpose(), X.T)
    recorded(t.transpose(1, 0), X.T)
    recorded(t.transpose((1, 0)), X.T)
    recorded(t.swapaxes(0, 1), X.T)
    recorded(t.repeat(2, axis=0), X.repeat(2, axis=0))
    recorded(t.clip(-1, 1), X.clip(-1, 1))
    recorded(t.astype(np.float32), X.astype(np.float32))
    recorded(t.take([0, 1]), X.take([0, 1]))
    recorded(t.dot(Y.T), X.dot(Y.T))
    for name in ("argmax", "argmin", "any", "all"):
        plain(getattr(t, name)(), getattr(X, name)())
    plain(t.argsort(axis=0), X.argsort(axis=0))


def test_a_method_without_gradient_names_value(tape):
    t = tape.watch(X)
    for name in ("tolist", "item", "copy", "round", "sort", "fill"):
        with pytest.raises(AttributeError, match=rf"recur\.value\(t\)\.{name}"):
            getattr(t, name)
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'nonsense'"):
        t.nonsense  # noqa: B018
    with paused():
        assert t.tolist() == X.tolist()


def test_shape_and_size_are_plain(tape):
    for t in (tape.watch(X), Param(X)):
        assert (t.shape, t.ndim, t.size, len(t), t.dtype) == ((2, 3), 2, 6, 2, np.float64)
        assert t.nbytes == 48


def test_a_tensor_is_iterated_along_its_first_axis(tape):
    t = tape.watch(X)
    first, second = t
    recorded(first, X[0])
    recorded(second, X[1])
    assert len(list(zip(t, Y, strict=True))) == 2
    with pytest.raises(TypeError, match="without axes"):
        iter(t.sum())
    with pytest.raises(IndexError):
        t[2]


def test_astype_to_integers_would_drop_the_gradient(tape):
    t = tape.watch(X)
    with pytest.raises(TypeError, match=r"int64 carries no gradient.*recur\.value\(t\)"):
        t.astype(np.int64)
    with paused():
        plain(t.astype(np.int64), X.astype(np.int64))
    plain(ops.astype(X, np.int64), X.astype(np.int64))


def test_what_is_no_number_cannot_be_combined(tape):
    t = tape.watch(X)
    for other in ("text", None, 1j, np.array([1j]), object()):
        with pytest.raises(TypeError):
            t + other
        with pytest.raises(TypeError):
            other * t


def test_a_parameter_is_updated_in_place_by_plain_arrays_also_inside_a_scope(tape):
    p = same = Param(X)
    p -= 0.5 * Y
    assert p is same
    np.testing.assert_array_equal(p.value, X - 0.5 * Y)
    p[0, 0] = 9
    p *= Param(Y)
    np.testing.assert_array_equal(p.value[1], (X - 0.5 * Y)[1] * Y[1])


def test_printing_and_formatting_show_the_value(tape):
    t = tape.watch(X)
    assert "0.5" in repr(t)
    assert f"{t[0, 0]:.3f}" == "0.500"
    assert f"{t[0, 0]}" == "0.5"
    assert copy.copy(t) is t
    assert "1.25" in str(Param(X))
