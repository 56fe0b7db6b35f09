"""Every row of the table of operations: its values are NumPy's, its gradient is the derivative."""

from __future__ import annotations

import math
from functools import partial

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from recur import ops
from recur.errors import ShapeError, TapeError
from recur.inspect import gradcheck
from recur.tape import Param, Tape, Tensor, paused, value


def numbers(*shape, seed=0, low=-1.5, high=1.5):
    """Distinct numbers, none of them near 0, ±0.5, ±1 or another kink."""
    n = math.prod(shape)
    spread = np.linspace(low, high, n + 2)[1:-1] + 0.0131
    return np.random.default_rng(seed).permutation(spread).reshape(shape)


def positive(*shape, seed=0):
    return numbers(*shape, seed=seed, low=0.3, high=2.5)


def logistic(x):
    return 1 / (1 + np.exp(-x))


A, B = numbers(3, 4), numbers(3, 4, seed=1)
W = numbers(5, 3, seed=2)
SEQ = numbers(3, 4, 2, seed=3)
COLUMN, ROW = numbers(3, 1, seed=4), numbers(4, seed=5)

# Rows of one array: our arguments after x, and NumPy's way to the same numbers.
UNARY = {
    "negative": np.negative,
    "exp": np.exp,
    "expm1": np.expm1,
    "sin": np.sin,
    "cos": np.cos,
    "arctan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "square": np.square,
    "abs": np.abs,
    "identity": lambda x: x,
    "sigmoid": logistic,
    "relu": lambda x: np.where(x > 0, x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "hard_sigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
    "hardsigmoid": lambda x: np.clip(x / 6 + 0.5, 0, 1),
    "hardtanh": lambda x: np.clip(x, -1, 1),
    "hardswish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "softplus": lambda x: np.log(1 + np.exp(x)),
    "logsigmoid": lambda x: np.log(logistic(x)),
    "softsign": lambda x: x / (1 + np.abs(x)),
    "selu": lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543773 * np.expm1(x)),
    "gelu": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "swish": lambda x: x * logistic(x),
    "mish": lambda x: x * np.tanh(np.log(1 + np.exp(x))),
    "tanhshrink": lambda x: x - np.tanh(x),
    "logcosh": lambda x: np.log(np.cosh(x)),
    "lisht": lambda x: x * np.tanh(x),
    "leakyrelu": lambda x: np.where(x > 0, x, 0.01 * x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "celu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "softshrink": lambda x: np.sign(x) * np.maximum(np.abs(x) - 0.5, 0),
    "transpose": np.transpose,
    "sum": np.sum,
    "mean": np.mean,
    "var": np.var,
    "std": np.std,
    "max": np.max,
    "min": np.min,
    "prod": np.prod,
    "cumsum": np.cumsum,
    "softmax": lambda x: np.exp(x) / np.exp(x).sum(0, keepdims=True),
    "logsoftmax": lambda x: x - np.log(np.exp(x).sum(0, keepdims=True)),
    "logsumexp": lambda x: np.log(np.exp(x).sum()),
}
OF_POSITIVE = {
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "log10": np.log10,
    "sqrt": np.sqrt,
    "reciprocal": np.reciprocal,
}
BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
}


def examples():
    """(row, what is shown, f of the arguments, NumPy's twin, arguments that take gradient)."""
    for name, twin in UNARY.items():
        yield name, "matrix", getattr(ops, name), twin, (A,)
        yield name, "wide", getattr(ops, name), twin, (4 * A,)
        if name not in ("softmax", "logsoftmax", "transpose", "cumsum"):
            yield name, "number", getattr(ops, name), twin, (np.array(0.7),)
    for name, twin in OF_POSITIVE.items():
        yield name, "matrix", getattr(ops, name), twin, (positive(3, 4),)
    for name, twin in BINARY.items():
        op = getattr(ops, name)
        yield name, "equal shapes", op, twin, (A, B)
        yield name, "column and row", op, twin, (COLUMN, ROW)
        yield name, "number and matrix", op, twin, (np.array(0.4), A)
        yield name, "constant left", lambda x, op=op: op(0.6, x), lambda x, t=twin: t(0.6, x), (A,)
        yield name, "constant right", lambda x, op=op: op(x, B), lambda x, t=twin: t(x, B), (A,)
        yield name, "leading axis", op, twin, (SEQ, numbers(4, 2, seed=8))
        yield name, "both the same", lambda x, op=op: op(x, x), lambda x, t=twin: t(x, x), (A,)
    P = positive(3, 4, seed=6)
    yield "power", "both", ops.power, np.power, (P, B)
    yield "power", "broadcast", ops.power, np.power, (positive(3, 1), ROW)
    for p in (2, 3, 0, 1, -1, 0.5, -2.5):
        base = P if isinstance(p, float) or p < 0 else A
        yield "power", f"to the {p}", lambda x, p=p: x**p, lambda x, p=p: x**p, (base,)
    yield "power", "number to the x", lambda x: 2.5**x, lambda x: 2.5**x, (A,)
    exponents = np.array([0.0, 1.0, 2.0, 3.0])
    yield "power", "array of exponents", lambda x: x**exponents, lambda x: x**exponents, (A,)
    for key, args in {"both": (-0.6, 0.4), "low": (-0.6, None), "high": (None, 0.4)}.items():
        yield "clip", key, lambda x, a=args: ops.clip(x, *a), lambda x, a=args: np.clip(x, *a), (A,)
    lows = numbers(2, 3, 1, seed=11) - 1
    yield (
        "clip",
        "arrays that broadcast",
        lambda x: ops.clip(x, lows, max=0.4),
        lambda x: np.clip(x, lows, 0.4),
        (A,),
    )
    mask = A > B
    yield (
        "where",
        "both",
        lambda a, b: ops.where(mask, a, b),
        lambda a, b: np.where(mask, a, b),
        (A, B),
    )
    yield (
        "where",
        "broadcast",
        lambda a, b: ops.where(mask, a, b),
        lambda a, b: np.where(mask, a, b),
        (COLUMN, ROW),
    )
    yield "where", "constant", lambda a: ops.where(mask, a, 0), lambda a: np.where(mask, a, 0), (A,)
    yield (
        "where",
        "constant left",
        lambda a: ops.where(mask, 1, a),
        lambda a: np.where(mask, 1, a),
        (A,),
    )
    yield from reductions()
    yield from moves()
    yield from products()
    with_option = {
        "leakyrelu": lambda x: np.where(x > 0, x, 0.7 * x),
        "elu": lambda x: np.where(x > 0, x, 0.7 * np.expm1(x)),
        "celu": lambda x: np.where(x > 0, x, 0.7 * np.expm1(x / 0.7)),
        "softshrink": lambda x: np.sign(x) * np.maximum(np.abs(x) - 0.7, 0),
    }
    for name, twin in with_option.items():
        yield name, "option", partial(getattr(ops, name), a=0.7), twin, (A,)


def reductions():
    for name in ("sum", "mean", "var", "std", "max", "min", "prod"):
        for axis in (0, 1, -1, (0, 2), (-1, 0), (0, 1, 2)):
            for keepdims in (False, True):
                options = {"axis": axis, "keepdims": keepdims}
                ours, twin = (partial(getattr(m, name), **options) for m in (ops, np))
                yield name, f"axis {axis} keepdims {keepdims}", ours, twin, (SEQ,)
    for name in ("var", "std"):
        ours, twin = (partial(getattr(m, name), axis=1, ddof=1) for m in (ops, np))
        yield name, "ddof 1", ours, twin, (SEQ,)
    yield "prod", "with zeros", ops.prod, np.prod, (np.array([2.0, 0.0, 3.0]),)
    yield (
        "prod",
        "with two zeros",
        lambda x: ops.prod(x, axis=1),
        lambda x: np.prod(x, axis=1),
        (np.array([[2.0, 0.0, 3.0], [0.0, 0.0, 1.0]]),),
    )
    for axis in (0, 1, -1):
        yield (
            "cumsum",
            f"axis {axis}",
            lambda x, a=axis: ops.cumsum(x, a),
            lambda x, a=axis: np.cumsum(x, a),
            (SEQ,),
        )
    for dims in (0, 1, -1, (0, 1)):
        soft = lambda x, d=dims: np.exp(x) / np.exp(x).sum(d, keepdims=True)  # noqa: E731
        yield "softmax", f"dims {dims}", lambda x, d=dims: ops.softmax(x, d), soft, (SEQ,)
        yield (
            "logsoftmax",
            f"dims {dims}",
            lambda x, d=dims: ops.logsoftmax(x, d),
            lambda x, s=soft: np.log(s(x)),
            (SEQ,),
        )
        yield (
            "logsumexp",
            f"dims {dims}",
            lambda x, d=dims: ops.logsumexp(x, d),
            lambda x, d=dims: np.log(np.exp(x).sum(d)),
            (SEQ,),
        )
        yield (
            "logsumexp",
            f"dims {dims} kept",
            lambda x, d=dims: ops.logsumexp(x, d, keepdims=True),
            None,
            (SEQ,),
        )


KEYS = {
    "int": 1,
    "negative": -1,
    "slice": slice(0, 2),
    "step": slice(None, None, -2),
    "ellipsis": (..., 1),
    "newaxis": (slice(None), None, 1),
    "mixed": (slice(1, 3), 0, slice(None)),
    "one entry": (1, 2, 0),
    "integers": np.array([2, 0, 2]),
    "list": [2, 0, 2, 2],
    "pairs": (np.array([0, 0, 2]), np.array([1, 1, 3])),
    "integers and slice": (slice(None), np.array([3, 3, 0])),
    "mask": SEQ > 0,
    "mask of an axis": np.array([True, False, True]),
    "mask and integers": (np.array([True, False, True]), np.array([1, 1])),
    "numpy int": np.int64(2),
    "empty": slice(0, 0),
}


def moves():
    yield "reshape", "flat", lambda x: ops.reshape(x, -1), lambda x: x.reshape(-1), (SEQ,)
    yield (
        "reshape",
        "F",
        lambda x: ops.reshape(x, (4, 6), "F"),
        lambda x: x.reshape((4, 6), order="F"),
        (SEQ,),
    )
    yield (
        "transpose",
        "axes",
        lambda x: ops.transpose(x, (2, 0, 1)),
        lambda x: x.transpose(2, 0, 1),
        (SEQ,),
    )
    yield (
        "transpose",
        "negative axes",
        lambda x: ops.transpose(x, (-1, 0, 1)),
        lambda x: x.transpose(2, 0, 1),
        (SEQ,),
    )
    yield (
        "broadcast_to",
        "new axis",
        lambda x: ops.broadcast_to(x, (2, 3, 4)),
        lambda x: np.broadcast_to(x, (2, 3, 4)),
        (A,),
    )
    yield (
        "broadcast_to",
        "column",
        lambda x: ops.broadcast_to(x, (3, 5)),
        lambda x: np.broadcast_to(x, (3, 5)),
        (COLUMN,),
    )
    yield "astype", "float64", lambda x: ops.astype(x, float), lambda x: x, (A,)
    yield "repeat", "flat", lambda x: ops.repeat(x, 2), lambda x: np.repeat(x, 2), (A,)
    yield (
        "repeat",
        "axis",
        lambda x: ops.repeat(x, 3, axis=1),
        lambda x: np.repeat(x, 3, axis=1),
        (SEQ,),
    )
    yield (
        "repeat",
        "counts",
        lambda x: ops.repeat(x, [2, 0, 3], axis=0),
        lambda x: np.repeat(x, [2, 0, 3], axis=0),
        (SEQ,),
    )
    for label, key in KEYS.items():
        yield "getitem", label, lambda x, k=key: x[k], lambda x, k=key: x[k], (SEQ,)
    yield (
        "concatenate",
        "rows",
        lambda a, b: ops.concatenate([a, b]),
        lambda a, b: np.concatenate([a, b]),
        (A, B[:2]),
    )
    yield (
        "concatenate",
        "columns",
        lambda a, b: ops.concatenate([a, b, a], axis=-1),
        lambda a, b: np.concatenate([a, b, a], axis=-1),
        (A, B),
    )
    yield (
        "concatenate",
        "constant",
        lambda a: ops.concatenate([B, a], 1),
        lambda a: np.concatenate([B, a], 1),
        (A,),
    )
    for axis in (0, 1, -1):
        yield (
            "stack",
            f"axis {axis}",
            lambda a, b, x=axis: ops.stack([a, b], x),
            lambda a, b, x=axis: np.stack([a, b], x),
            (A, B),
        )
    yield (
        "stack",
        "numbers",
        lambda a: ops.stack([a, 2.0, a]),
        lambda a: np.stack([a, 2.0, a]),
        (np.array(0.3),),
    )


def products():
    shapes = [
        *((5, 3), (3,)),
        *((5, 3), (3, 4)),
        *((3,), (3, 4)),
        *((3,), (3,)),
        *((2, 5, 3), (3,)),
        *((3,), (2, 3, 4)),
        *((2, 5, 3), (3, 4)),
        *((5, 3), (2, 3, 4)),
        *((2, 5, 3), (2, 3, 4)),
        *((6, 1, 5, 3), (2, 3, 4)),
    ]
    for left, right in zip(shapes[::2], shapes[1::2], strict=True):
        a, b = numbers(*left), numbers(*right, seed=1)
        yield "matmul", f"{left} {right}", ops.matmul, np.matmul, (a, b)
        yield "matmul", f"{left} {right} left", lambda x, b=b: x @ b, lambda x, b=b: x @ b, (a,)
        yield "matmul", f"{left} {right} right", lambda x, a=a: a @ x, lambda x, a=a: a @ x, (b,)
    bias = numbers(5, seed=9)
    for x in (SEQ[:, 0, 0], SEQ[:, :, 0], SEQ):
        twin = lambda W, x, b: (np.tensordot(W, x, 1).T + b).T  # noqa: E731
        yield "affine", f"x {x.shape}", ops.affine, twin, (W, x, bias)
        yield (
            "affine",
            f"x {x.shape} no bias",
            ops.affine,
            lambda W, x: np.tensordot(W, x, 1),
            (W, x),
        )
        yield (
            "affine",
            f"x {x.shape} constant",
            lambda W, x=x: ops.affine(W, x),
            lambda W, x=x: np.tensordot(W, x, 1),
            (W,),
        )
        yield (
            "affine",
            f"x {x.shape} only",
            lambda x: ops.affine(W, x, bias),
            lambda x, t=twin: t(W, x, bias),
            (x,),
        )


EXAMPLES = [pytest.param(*e[1:], id=f"{e[0]}-{e[1]}") for e in examples()]
COVERED = {e[0] for e in examples()}


def close(result, expected):
    np.testing.assert_allclose(value(result), expected, rtol=1e-12, atol=1e-12)


def test_every_row_of_the_table_has_examples():
    assert set(ops.TABLE) == COVERED


@pytest.mark.parametrize(("label", "f", "twin", "args"), EXAMPLES)
def test_a_gradient_is_the_derivative(label, f, twin, args):
    gradcheck(f, *args)


@pytest.mark.parametrize(("label", "f", "twin", "args"), EXAMPLES)
def test_values_are_those_of_numpy_inside_a_scope_and_outside(label, f, twin, args, dtype):
    args = [np.asarray(arg, dtype) for arg in args]
    plain = f(*args)
    assert isinstance(plain, np.ndarray | np.generic)
    with Tape() as tape:
        recorded = f(*map(tape.watch, args))
        assert isinstance(recorded, Tensor)
        assert recorded.dtype == plain.dtype
        np.testing.assert_allclose(value(recorded), plain, rtol=1e-5, atol=1e-6)
        if twin is not None:
            tolerance = 1e-12 if dtype == np.float64 else 2e-5
            np.testing.assert_allclose(plain, twin(*args), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("label", "f", "twin", "args"), EXAMPLES)
def test_a_parameter_works_as_an_operand_and_as_a_plain_array(label, f, twin, args):
    weights = [Param(arg) for arg in args]
    outside = f(*weights)
    assert isinstance(outside, np.ndarray | np.generic)
    with Tape() as tape:
        y = f(*weights)
        assert isinstance(y, Tensor)
        tape.backward(y, np.ones(y.shape))
        watched = [tape.watch(arg) for arg in args]
        y = f(*watched)
        expected = tape.gradient(y, watched, np.ones(y.shape))
    for p, grad in zip(weights, expected, strict=True):
        np.testing.assert_allclose(p.grad, grad, rtol=1e-12, atol=1e-14)
        assert p.grad.shape == p.shape


LAYOUTS = {
    "columns first": lambda x: np.array(x, order="F"),
    "every second": lambda x: np.repeat(x, 2, axis=-1)[..., ::2] if x.ndim else x,
    "backwards": lambda x: np.flip(np.flip(x).copy()),
    "axes moved": lambda x: np.moveaxis(np.moveaxis(x, -1, 0).copy(), 0, -1) if x.ndim else x,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("label", "f", "twin", "args"), EXAMPLES)
def test_results_do_not_depend_on_the_memory_layout(label, f, twin, args, layout):
    moved = [LAYOUTS[layout](arg) for arg in args]

    def run(arrays):
        with Tape() as tape:
            watched = [Tensor(a, tape.watch(a).node) for a in arrays]  # with these very strides
            y = f(*watched)
            cotangent = LAYOUTS[layout](numbers(*y.shape, seed=7))
            return [value(y), *tape.gradient(y, watched, cotangent)]

    for found, expected in zip(run(moved), run(args), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(f(*moved), f(*args), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("label", "f", "twin", "args"), EXAMPLES)
def test_no_gradient_writes_into_the_one_that_it_gets(label, f, twin, args):
    with Tape() as tape:
        watched = [tape.watch(arg) for arg in args]
        y = f(*watched)
        # Passing through the identity, y's own gradient is kept and must come back unchanged.
        middle = ops.identity(y)
        cotangent = numbers(*y.shape, seed=7)
        (found,) = tape.gradient(middle, [y], cotangent, keep_graph=True)
        np.testing.assert_array_equal(found, cotangent)
        first = tape.gradient(middle, watched, cotangent, keep_graph=True)
        second = tape.gradient(middle, watched, cotangent)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


# Composed helpers.


@pytest.mark.parametrize(
    ("f", "twin"),
    [
        (lambda x: ops.split(x, 3)[1], lambda x: np.split(x, 3)[1]),
        (lambda x: ops.split(x, [1, 3], axis=1)[1], lambda x: np.split(x, [1, 3], axis=1)[1]),
        (lambda x: ops.split(x, 2, axis=-1)[0], lambda x: np.split(x, 2, axis=-1)[0]),
        (lambda x: ops.take(x, [2, 0, 2], axis=1), lambda x: np.take(x, [2, 0, 2], axis=1)),
        (lambda x: ops.take(x, 5), lambda x: np.take(x, 5)),
        (lambda x: ops.flip(x), np.flip),
        (lambda x: ops.flip(x, axis=-1), lambda x: np.flip(x, axis=-1)),
        (lambda x: ops.flip(x, axis=(0, 1)), lambda x: np.flip(x, axis=(0, 1))),
        (lambda x: ops.ravel(x, "F"), lambda x: np.ravel(x, "F")),
        (lambda x: ops.expand_dims(x, -1), lambda x: np.expand_dims(x, -1)),
        (lambda x: ops.squeeze(x[:, :1], 1), lambda x: x[:, 0]),
        (lambda x: ops.squeeze(x[:1]), lambda x: x[0]),
        (lambda x: ops.swapaxes(x, 0, -1), lambda x: np.swapaxes(x, 0, -1)),
        (lambda x: ops.moveaxis(x, 0, -1), lambda x: np.moveaxis(x, 0, -1)),
        (lambda x: ops.moveaxis(x, -1, 0), lambda x: np.moveaxis(x, -1, 0)),
        (lambda x: ops.vcat(x, x[:1]), lambda x: np.concatenate([x, x[:1]])),
        (lambda x: ops.hcat(x[:, :, 0], x[:, 0, 1]), lambda x: np.c_[x[:, :, 0], x[:, 0, 1]]),
        (lambda x: ops.outer(x[0, :, 0], x[:, 0, 0]), lambda x: np.outer(x[0, :, 0], x[:, 0, 0])),
        (lambda x: ops.dot(x[:, :, 0], x[0, :, 1]), lambda x: x[:, :, 0] @ x[0, :, 1]),
        (lambda x: ops.dot(2.0, x), lambda x: 2 * x),
    ],
)  # fmt: skip
def test_a_composed_helper_has_numpys_values_and_the_right_gradient(f, twin):
    close(f(SEQ), twin(SEQ))
    gradcheck(f, SEQ)


@st.composite
def broadcasting(draw):
    """Two arrays whose shapes broadcast, and their common shape."""
    shapes = draw(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, max_side=3))
    return [numbers(*shape, seed=i) for i, shape in enumerate(shapes.input_shapes)]


@given(broadcasting())
def test_broadcasting_of_any_shapes_has_the_right_gradient(arrays):
    gradcheck(lambda a, b: a * b - b / 3 + ops.where(np.array(True), a, b), *arrays, directions=1)


@given(st.data())
def test_any_basic_index_has_the_right_gradient(data):
    key = data.draw(hnp.basic_indices(SEQ.shape, allow_newaxis=True, allow_ellipsis=True))
    close(ops.getitem(SEQ, key), SEQ[key])
    gradcheck(lambda x: x[key] * 2, SEQ, directions=1)


@given(st.data())
def test_any_array_index_has_the_right_gradient(data):
    key = data.draw(
        hnp.integer_array_indices(SEQ.shape, result_shape=hnp.array_shapes(max_dims=2, max_side=4))
    )
    gradcheck(lambda x: x[key] * numbers(*SEQ[key].shape, seed=2), SEQ, directions=1)


@given(hnp.arrays(bool, SEQ.shape))
def test_any_mask_has_the_right_gradient(mask):
    gradcheck(lambda x: x[mask] * 2, SEQ, directions=1)


def test_split_refuses_what_does_not_divide():
    with pytest.raises(ShapeError, match="axis 0 has size 3, which 2 does not divide"):
        ops.split(SEQ, 2)


def test_arrays_that_do_not_fit_together_are_named():
    a, b = np.ones((2, 3)), np.ones((2, 4))
    with pytest.raises(ShapeError, match=r"\(2, 3\), \(2, 4\) were given.*except on axis 0"):
        ops.concatenate([a, b])
    assert ops.concatenate([a, b], axis=1).shape == (2, 7)
    for join, arrays in [
        (ops.stack, [a, b]),
        (ops.stack, []),
        (ops.concatenate, []),
        (ops.concatenate, [np.array(1.0), np.array(2.0)]),
        (ops.concatenate, [a, np.ones(3)]),
    ]:
        with pytest.raises(ShapeError, match=f"{join.__name__}: .*expected one common shape"):
            join(arrays)


def test_an_unused_gate_gets_exact_zeros():
    x = numbers(6, 5)
    with Tape() as tape:
        t = tape.watch(x)
        first, _, third = ops.split(t, 3)
        (dx,) = tape.gradient(first.sum() + 2 * third.sum(), [t])
    np.testing.assert_array_equal(dx, np.repeat([1.0, 1, 0, 0, 2, 2], 5).reshape(6, 5))


def test_slices_of_the_last_axis_that_are_not_used_get_exact_zeros():
    x = numbers(3, 3, 1, 2, 4)
    with Tape() as tape:
        t = tape.watch(x)
        slices = [t[..., i] for i in range(4)]
        (dx,) = tape.gradient(slices[0].sum() + 3 * slices[2].sum(), [t])
    np.testing.assert_array_equal(dx, np.broadcast_to([1.0, 0, 3, 0], x.shape))


# Rules at the edges.


def grad(f, x):
    with Tape() as tape:
        t = tape.watch(np.asarray(x, float))
        y = f(t)
        return tape.gradient(y, [t], np.ones(y.shape))[0]


@pytest.mark.parametrize(
    ("f", "x", "expected"),
    [
        (lambda x: ops.maximum(x, 1.0), [0, 1, 2], [0, 0.5, 1]),
        (lambda x: ops.minimum(x, 1.0), [0, 1, 2], [1, 0.5, 0]),
        (ops.max, [1, 3, 3, 2], [0, 0.5, 0.5, 0]),
        (ops.min, [1, 3, 1, 1], [1 / 3, 0, 1 / 3, 1 / 3]),
        (ops.relu, [-1, 0, 1], [0, 0, 1]),
        (ops.abs, [-2, 0, 2], [-1, 0, 1]),
        (lambda x: ops.clip(x, 0, 1), [-1, 0, 0.5, 1, 2], [0, 1, 1, 1, 0]),
        (lambda x: x**2, [-3, 0], [-6, 0]),
        (lambda x: x**0, [0, 2], [0, 0]),
        (lambda x: x**3, [-2, 0], [12, 0]),
        (lambda x: x ** np.array([0.0, 2.0]), [0, 0], [0, 0]),
        (lambda x: 0.0**x, [1, 2], [0, 0]),
        (ops.std, [3, 3], [0, 0]),
        (lambda x: ops.where([True, False], x, 1 / 0.5), [1, 2], [1, 0]),
        (lambda x: ops.softmax(x) * 0, [1000, -1000], [0, 0]),
        (ops.logsumexp, [1000, -1000], [1, 0]),
        (lambda x: ops.softmax(x, 0)[0], [-np.inf, 0.0], [0, 0]),
        (ops.sigmoid, [-1000, 1000], [0, 0]),
        (ops.softplus, [-1000, 1000], [0, 1]),
        (ops.elu, [-1000, 1000], [0, 1]),
        (ops.selu, [1000], [1.0507009873554805]),
    ],
)
def test_a_gradient_follows_the_stated_rule_at_the_edge(f, x, expected):
    np.testing.assert_allclose(grad(f, x), expected, rtol=1e-12)


def test_the_gradient_of_an_exponent_is_nan_for_a_negative_base():
    assert np.isnan(grad(lambda p: np.array([-2.0]) ** p, [2.0])).all()


def test_where_keeps_a_nan_out_of_the_branch_that_was_not_taken():
    with Tape() as tape:
        t = tape.watch(np.array([1.0, 2.0]))
        (dx,) = tape.gradient(ops.where([True, False], t, 0.0), [t], np.array([1.0, np.nan]))
    np.testing.assert_array_equal(dx, [1, 0])


def test_softmax_of_large_numbers_does_not_overflow():
    np.testing.assert_array_equal(ops.softmax(np.array([1e4, 0.0])), [1, 0])
    np.testing.assert_array_equal(ops.logsoftmax(np.array([1e4, 0.0])), [0, -1e4])
    assert ops.logsumexp(np.array([1e4, 1e4])) == 1e4 + math.log(2)
    assert ops.logsumexp(np.array([-np.inf, -np.inf])) == -np.inf


# Types and memory.


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x + 1,
        lambda x: 0.5 * x,
        lambda x: x / 3.0,
        lambda x: 1 - x,
        lambda x: x**2,
        lambda x: abs(x) ** 0.5,
        lambda x: 2.0**x,
        lambda x: ops.maximum(x, 0.0),
        lambda x: ops.where(np.array([True, False]), x, 0.0),
        lambda x: x.mean(),
        lambda x: x.var(ddof=1),
        lambda x: ops.leakyrelu(x),
        lambda x: ops.gelu(x) + ops.selu(x) + ops.mish(x) + ops.logcosh(x),
        lambda x: ops.logsumexp(x) + ops.softmax(x),
        lambda x: x * np.float32(2),
        lambda x: x @ x,
        lambda x: ops.stack([x, x], -1),
    ],
)
def test_float32_stays_float32_with_python_numbers(f):
    with Tape() as tape:
        x = tape.watch(np.array([0.5, 1.5], np.float32))
        y = f(x)
        assert y.dtype == np.float32
        (dx,) = tape.gradient(y, [x], np.ones(y.shape))
        assert dx.dtype == np.float32


def test_the_gradient_has_the_dtype_of_its_operand_whatever_the_others_have():
    p = Param(np.ones(3, np.float32))
    with Tape() as tape:
        y = (p * np.array([1.0, 2.0, 3.0])).sum()
        assert y.dtype == np.float64
        tape.backward(y)
    assert p.grad.dtype == np.float32
    np.testing.assert_array_equal(p.grad, [1, 2, 3])


def test_affine_computes_in_the_dtype_of_its_weights():
    with Tape() as tape:
        weight, x = Param(W.astype(np.float32)), tape.watch(A)
        y = ops.affine(weight, x)
        assert y.dtype == np.float32
        (dx,) = tape.gradient(y.sum(), [x], keep_graph=True)
        tape.backward(y.sum())
    assert dx.dtype == np.float64
    assert weight.grad.dtype == np.float32
    assert ops.affine(W.astype(np.float32), np.arange(3)).dtype == np.float32


@pytest.mark.parametrize(
    "f",
    [
        lambda x: ops.affine(W, x),
        lambda x: np.tanh(ops.affine(W, x)) * 2 + 1,
        lambda x: W @ x,
        lambda x: ops.stack([x, x], axis=-1),
        lambda x: ops.concatenate([x, x]),
        lambda x: ops.concatenate([x, x], axis=1),
        lambda x: ops.vcat(x, x[:1]),
    ],
)
def test_results_are_laid_out_features_first(f):
    for x in (A, np.asfortranarray(A)):
        with Tape() as tape:
            y = value(f(tape.watch(x)))
        assert y.T.flags.c_contiguous
    assert ops.affine(W, A).T.flags.c_contiguous
    assert ops.affine(W, SEQ).T.flags.c_contiguous
    assert ops.stack([A, A], axis=-1).T.flags.c_contiguous


@pytest.mark.parametrize(
    "f",
    [
        lambda p: p.T,
        lambda p: p.reshape(-1),
        lambda p: p[1],
        lambda p: ops.broadcast_to(p, (2, 3, 4)),
        lambda p: ops.stop_gradient(p),
        lambda p: p + 0,
        lambda p: ops.identity(p),
        lambda p: ops.astype(p, float),
    ],
)
def test_a_tensor_made_from_a_parameter_does_not_follow_its_later_writes(f):
    p = Param(A)
    with Tape():
        y = f(p)
        before = np.array(value(y))
        p[...] = 0
        np.testing.assert_array_equal(value(y), before)


@pytest.mark.parametrize("f", [lambda t: t.T, lambda t: t.reshape(-1), lambda t: t[1]])
def test_outside_a_scope_a_view_of_a_tensor_or_parameter_is_read_only(f):
    with Tape() as tape:
        t = tape.watch(A)
    for x in (t, Param(A)):
        y = f(x)
        assert isinstance(y, np.ndarray)
        with pytest.raises(ValueError, match="read-only"):
            y[0] = 1


@pytest.mark.parametrize(
    "f",
    [
        lambda t, c: t * c,
        lambda t, c: t / c,
        lambda t, c: ops.maximum(t, c),
        lambda t, c: ops.affine(Param(W), c).sum() + t.sum(),
        lambda t, c: (c.T @ t).sum(),
        lambda t, c: ops.where(c > 0, t, 0.0),
        lambda t, c: c**t if False else t * c**2,
    ],
)
def test_a_plain_array_may_be_overwritten_after_it_was_used(f):
    c = positive(3, 4)
    with Tape() as tape:
        t = tape.watch(A)
        y = f(t, c)
        (expected,) = tape.gradient(y, [t], np.ones(y.shape), keep_graph=True)
        c[...] = np.nan
        (found,) = tape.gradient(y, [t], np.ones(y.shape))
    np.testing.assert_array_equal(found, expected)


def test_an_index_array_may_be_overwritten_after_it_was_used():
    index = np.array([0, 2])
    with Tape() as tape:
        t = tape.watch(A)
        y = t[index]
        index[:] = 1
        (dx,) = tape.gradient(y.sum(), [t])
    np.testing.assert_array_equal(dx[:, 0], [1, 0, 1])


@pytest.mark.parametrize(
    ("f", "option"),
    [(lambda t, o: ops.clip(t, o, None), np.zeros((3, 4))), (ops.repeat, np.full(12, 2))],
)
def test_an_array_option_may_be_overwritten_after_it_was_used(f, option):
    with Tape() as tape:
        t = tape.watch(A)
        y = f(t, option)
        (expected,) = tape.gradient(y.sum(), [t], keep_graph=True)
        option[...] = 1
        (found,) = tape.gradient(y.sum(), [t])
    np.testing.assert_array_equal(found, expected)


def test_an_option_that_would_need_a_gradient_is_refused():
    p = Param(np.array(0.5))
    for x in (A, Param(A)):
        with Tape():
            with pytest.raises(TypeError, match=r"clip: only its array.*maximum and minimum"):
                ops.clip(x, p, None)
            with pytest.raises(TypeError, match=r"leakyrelu: only its array.*recur\.value\(t\)"):
                ops.leakyrelu(x, a=p)
    np.testing.assert_array_equal(ops.clip(A, p, None), np.clip(A, 0.5, None))
    np.testing.assert_array_equal(np.clip(A, p, None), np.clip(A, 0.5, None))


def test_the_input_of_affine_may_be_overwritten_after_it_was_used():
    weight, x = Param(W), np.asfortranarray(A)  # in the very layout that needs no copy
    with Tape() as tape:
        y = ops.affine(weight, x)
        x[...] = 0
        tape.backward(y.sum())
    np.testing.assert_allclose(weight.grad, np.tile(A.sum(1), (5, 1)))


# affine and matmul.


def test_affine_names_what_does_not_fit():
    for args, message in [
        ((W, numbers(4, 2)), "x has 4 features on axis 0, expected 3"),
        ((W, np.array(1.0)), "x has shape \\(\\)"),
        ((W[0], A), "W is an array of float64 of shape \\(3,\\)"),
        ((W, A, np.ones(4)), "b has shape \\(4,\\), expected \\(5,\\)"),
        ((W.astype(int), A), "floating-point"),
    ]:
        with pytest.raises(ShapeError, match=message):
            ops.affine(*args)


def test_matmul_of_a_sequence_points_to_affine():
    with Tape(), pytest.raises(ShapeError, match=r"use recur\.ops\.affine\(W, x\)"):
        ops.matmul(Param(W), SEQ)


def test_a_sample_of_affine_does_not_depend_on_its_batch(dtype):
    rng = np.random.default_rng(3)
    weight = Param(rng.standard_normal((33, 17)).astype(dtype))
    bias = Param(rng.standard_normal(33).astype(dtype))
    x = rng.standard_normal((17, 40)).astype(dtype)
    whole = ops.affine(weight, x, bias)
    for start, stop in [(0, 1), (1, 2), (7, 23), (39, 40)]:
        np.testing.assert_array_equal(
            ops.affine(weight, x[:, start:stop], bias), whole[:, start:stop]
        )
    np.testing.assert_array_equal(ops.affine(weight, x[:, 5], bias), whole[:, 5])
    np.testing.assert_array_equal(ops.affine(weight.value, x, bias.value), whole)


def test_affine_sees_every_write_to_its_parameters():
    weight, bias = Param(W), Param(np.zeros(5))
    np.testing.assert_allclose(ops.affine(weight, A, bias), W @ A)
    weight += 1
    np.testing.assert_allclose(ops.affine(weight, A, bias), (W + 1) @ A)
    bias[...] = 2
    np.testing.assert_allclose(ops.affine(weight, A, bias), (W + 1) @ A + 2)
    with weight.writing() as array:
        array[...] = W
    np.testing.assert_allclose(ops.affine(weight, A, bias), W @ A + 2)
    np.testing.assert_allclose(ops.affine(weight, A), W @ A)
    np.testing.assert_allclose(ops.affine(weight, A, Param(np.ones(5))), W @ A + 1)


@pytest.mark.parametrize("batch", [1, 5, 63, 64, 130])
@pytest.mark.parametrize("computed", [False, True], ids=["parameter", "computed"])
def test_a_recorded_affine_has_the_bits_of_a_plain_one_step_by_step(batch, computed, dtype, rng):
    W = rng.standard_normal((33, 17)).astype(dtype)
    weight, bias = Param(W), Param(rng.standard_normal(33).astype(dtype))
    x = rng.standard_normal((17, batch, 3)).astype(dtype)
    plain = ops.affine(weight, x, bias)
    with Tape():
        used = weight * 1 if computed else weight
        whole = value(ops.affine(used, x, bias))
        steps = [value(ops.affine(used, x[..., t], bias)) for t in range(3)]
        alone = value(ops.affine(used, x[:, 0, 0], bias))
    np.testing.assert_array_equal(whole, plain, strict=True)
    np.testing.assert_array_equal(np.stack(steps, -1), plain, strict=True)
    np.testing.assert_array_equal(alone, plain[:, 0, 0], strict=True)


@pytest.mark.parametrize("shape", [(17,), (17, 0), (17, 1), (17, 5), (17, 70)], ids=str)
@pytest.mark.parametrize("kind", ["parameter", "computed", "plain"])
@pytest.mark.parametrize("product", [ops.matmul, ops.affine])
def test_recorded_products_and_their_gradients_equal_numpys(product, kind, shape, dtype, rng):
    W, x = (rng.standard_normal(s).astype(dtype) for s in ((33, 17), shape))
    g = rng.standard_normal((33, *shape[1:])).astype(dtype)
    weight, data = Param(W), Param(x)
    with Tape() as tape:
        left = {"parameter": weight, "computed": weight * 1, "plain": W}[kind]
        y = product(left, data)
        tape.backward((y * g).sum())
    close = partial(np.testing.assert_allclose, rtol=0, atol=1e-4 if dtype.itemsize == 4 else 1e-12)
    close(value(y), W @ x)
    close(data.grad, W.T @ g)
    if kind != "plain":
        close(weight.grad, np.outer(g, x) if x.ndim == 1 else g @ x.T)
    assert value(y).dtype == data.grad.dtype == dtype


@pytest.mark.parametrize("product", [ops.matmul, ops.affine])
def test_a_product_s_weight_written_before_its_backward_is_noticed(product):
    weight, x = Param(W), Param(A)
    with Tape() as tape:
        loss = product(weight, x).sum()
        weight += 1
        with pytest.raises(TapeError, match="written since"):
            tape.backward(loss)


def test_affine_of_no_samples_is_empty():
    assert ops.affine(Param(W), np.empty((3, 0))).shape == (5, 0)
    with Tape() as tape:
        weight = Param(W)
        y = ops.affine(weight, np.empty((3, 0)))
        assert y.shape == (5, 0)
        tape.backward(y.sum())
    np.testing.assert_array_equal(weight.grad, np.zeros((5, 3)))


class Diagonal:
    """A structured matrix: shape, @ and .T."""

    def __init__(self, d):
        self.d, self.shape, self.T = d, (len(d), len(d)), self

    def __matmul__(self, x):
        return (self.d * x.T).T


def test_a_structured_matrix_is_a_constant_factor():
    D = Diagonal(np.array([1.0, 2.0, 3.0]))
    close(ops.matmul(D, A), np.diag(D.d) @ A)
    gradcheck(lambda x: ops.matmul(D, x), A)


# Custom operations and constants.


def test_a_custom_gradient_is_used():
    cube = ops.custom_grad(lambda x: (x**3, x), lambda x, dy: 3 * x**2 * dy)
    np.testing.assert_array_equal(cube(A), A**3)
    gradcheck(cube, A)
    wrong = ops.custom_grad(lambda x: (x**3, x), lambda x, dy: 2 * x**2 * dy)
    with pytest.raises(AssertionError, match="argument 0"):
        gradcheck(wrong, A)


def test_a_custom_operation_may_have_several_inputs_and_outputs():
    def backward(saved, dys):
        a, b = saved
        d_sum, d_product = dys
        return d_sum + d_product * b, d_sum + d_product * a

    both = ops.custom_grad(lambda a, b: ((a + b, a * b), (a, b)), backward)
    gradcheck(both, A, B)
    gradcheck(lambda a, b: both(a, b)[1], A, B)  # one output unused: its gradient is zeros
    gradcheck(lambda a: both(a, B), A)


def test_a_custom_operation_may_leave_arguments_without_gradient_and_take_options():
    scaled = ops.custom_grad(lambda x, k, *, by=1.0: (x * by, by), lambda by, dy: (dy * by, None))
    gradcheck(lambda x: scaled(x, 3, by=2.0), A)


@pytest.mark.parametrize(
    ("backward", "error", "message"),
    [
        (lambda _, dy: (dy, dy), TypeError, "returned 2 gradients, expected 1"),
        (lambda _, dy: dy[:1], ShapeError, r"shape \(1, 4\) for argument 0, expected \(3, 4\)"),
    ],
)
def test_a_custom_backward_that_does_not_fit_is_named(backward, error, message):
    def half(x):
        return x / 2, None

    op = ops.custom_grad(half, backward)
    with Tape() as tape, pytest.raises(error, match=f"half: backward .*{message}"):
        tape.backward(op(Param(A)).sum())


def test_a_custom_forward_must_return_a_pair():
    op = ops.custom_grad(lambda x: x, lambda saved, dy: dy)
    with pytest.raises(TypeError, match="expected the pair"):
        op(A)


def test_a_custom_operation_cannot_reach_into_its_inputs_or_keep_hold_of_its_outputs():
    kept = []

    def forward(x):
        with pytest.raises(ValueError, match="read-only"):
            x[...] = 0
        kept.append(x * 2)
        return kept[0], None

    with Tape() as tape:
        y = ops.custom_grad(forward, lambda _, dy: 2 * dy)(tape.watch(A))
        kept[0][...] = 0
        np.testing.assert_array_equal(value(y), 2 * A)


def test_a_parameter_written_after_a_custom_operation_is_noticed():
    p = Param(A)
    with Tape() as tape:
        y = ops.custom_grad(lambda x: (x * x, x), lambda x, dy: 2 * x * dy)(p)
        p += 1
        with pytest.raises(TapeError, match="written since"):
            tape.backward(y.sum())


def test_stop_gradient_makes_constants_of_whole_structures():
    with Tape() as tape:
        t = tape.watch(A)
        fixed = ops.stop_gradient({"a": [t, t * 2], "b": (t,)})
        assert isinstance(fixed["a"][1], np.ndarray)
        (dx,) = tape.gradient((t * fixed["b"][0]).sum(), [t])
    np.testing.assert_array_equal(dx, A)


# Names of activations.


def test_every_activation_is_found_by_its_name():
    for name in ("tanh", "sigmoid", "relu", "identity", "hard_sigmoid", "leakyrelu", "gelu"):
        assert ops.activation(name) is getattr(ops, name)
        assert ops.name_of(getattr(ops, name)) == name
    assert ops.activation("σ") is ops.sigmoid
    assert ops.name_of(np.tanh) == "tanh"
    assert ops.name_of(lambda x: x) is None
    assert ops.name_of(ops.exp) is None
    with pytest.raises(ValueError, match="no activation is named 'nope'"):
        ops.activation("nope")


@pytest.mark.parametrize("f", [ops.tanh, ops.gelu, ops.relu, ops.swish, ops.sum, ops.softmax])
def test_lists_of_numbers_are_read_as_arrays(f):
    np.testing.assert_allclose(f([0.5, -1.0]), f(np.array([0.5, -1.0])), rtol=1e-12)


def test_inside_paused_operations_are_plain():
    with Tape() as tape:
        t = tape.watch(A)
        with paused():
            assert isinstance(np.tanh(t) + t[0], np.ndarray)
        assert isinstance(np.tanh(t), Tensor)


def test_shapes_that_do_not_broadcast_are_named_and_a_bias_is_explained():
    with Tape() as tape:
        for wrap in (tape.watch, Param):
            x = wrap(np.ones((5, 4)))
            with pytest.raises(
                ShapeError,
                match=r"add: shapes \(5, 4\) and \(5,\) do not broadcast.*affine\(W, x, b\)",
            ):
                x + np.ones(5)
            with pytest.raises(ShapeError, match=r"multiply: .* do not broadcast\.$"):
                np.ones((2, 7)) * x
