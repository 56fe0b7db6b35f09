"""exp, tanh and sigmoid: their error in units in the last place, and their exact values."""

import mpmath
import numpy as np
import pytest

from recur import _kernels

DTYPES = [np.float32, np.float64]
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "f64"])
FUNCTIONS = ["exp", "tanh", "sigmoid"]
all_functions = pytest.mark.parametrize("name", FUNCTIONS)


def oracle(name, x):
    """The function in long double, by formulas that keep relative accuracy there."""
    x = x.astype(np.longdouble)
    if name == "exp":
        return np.exp(x)
    if name == "tanh":
        m = np.expm1(-2 * np.abs(x))
        return np.copysign(-m / (2 + m), x)
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1) / (1 + e)


def sweep(dtype, name):
    """Normal inputs over the whole range in which the result is normal and not constant."""
    info = np.finfo(dtype)
    top = {"exp": np.log(info.max), "tanh": 30.0, "sigmoid": -np.log(info.tiny)}[name]
    rng = np.random.default_rng(1)
    grid = np.linspace(-top, top, 200_001)
    near = rng.uniform(-4, 4, 200_000)
    scales = np.geomspace(float(info.tiny) * 4, top, 100_000) * rng.choice([-1, 1], 100_000)
    x = np.concatenate([grid, near, scales]).astype(dtype)
    # around each multiple of ln 2 / 2, where the reduction changes over
    edges = np.arange(-200, 201) * (np.log(2) / 2)
    steps = np.concatenate([np.nextafter(edges.astype(dtype), dtype(s)) for s in (-9e9, 0, 9e9)])
    x = np.concatenate([x, steps, steps / 2])
    return x[np.abs(x) <= top]


def ulps(found, exact, dtype):
    return np.abs(found - exact) / np.spacing(np.abs(exact).astype(dtype)).astype(np.longdouble)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 60, reason="long double is double here")
@both_dtypes
@all_functions
def test_the_error_is_at_most_4_ulp_wherever_the_result_is_normal(name, dtype):
    x = sweep(dtype, name)
    exact = oracle(name, x)
    normal = (np.abs(exact) >= np.finfo(dtype).tiny) & (np.abs(exact) <= np.finfo(dtype).max)
    found = getattr(_kernels, name)(x)
    assert normal.sum() > 300_000
    assert ulps(found[normal], exact[normal], dtype).max() <= 4


@both_dtypes
@all_functions
def test_the_error_is_at_most_4_ulp_against_mpmath(name, dtype):
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.uniform(-20, 20, 300), np.geomspace(1e-30, 20, 100)]).astype(dtype)
    found = getattr(_kernels, name)(x)
    function = {"exp": mpmath.exp, "tanh": mpmath.tanh}.get(
        name, lambda v: 1 / (1 + mpmath.exp(-v))
    )
    with mpmath.workdps(60):
        for v, f in zip(x, found, strict=True):
            exact = function(mpmath.mpf(float(v)))
            ulp = mpmath.mpf(float(np.spacing(dtype(abs(float(exact))))))
            assert abs(mpmath.mpf(float(f)) - exact) <= 4 * ulp, v


@both_dtypes
@all_functions
def test_zero_infinity_and_nan_are_exact(name, dtype):
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], dtype)
    found = getattr(_kernels, name)(x)
    want = {
        "exp": [1, 1, np.inf, 0, np.nan],
        "tanh": [0.0, -0.0, 1, -1, np.nan],
        "sigmoid": [0.5, 0.5, 1, 0, np.nan],
    }[name]
    np.testing.assert_array_equal(found, np.array(want, dtype))
    np.testing.assert_array_equal(np.signbit(found[:4]), np.signbit(np.array(want[:4], dtype)))


@both_dtypes
@all_functions
def test_huge_inputs_reach_the_limits(name, dtype):
    huge = np.finfo(dtype).max
    x = np.array([huge, -huge, 1e4, -1e4], dtype)
    high, low = {"exp": (np.inf, 0), "tanh": (1, -1), "sigmoid": (1, 0)}[name]
    np.testing.assert_array_equal(getattr(_kernels, name)(x), np.array([high, low] * 2, dtype))


@both_dtypes
def test_subnormals_are_not_flushed(dtype):
    info = np.finfo(dtype)
    small = np.array([info.smallest_subnormal, info.tiny / 8, -info.tiny / 2], dtype)
    np.testing.assert_array_equal(_kernels.tanh(small), small)
    x = np.array([np.log(float(info.tiny)) - 3], dtype)
    for name in ("exp", "sigmoid"):
        found = getattr(_kernels, name)(x)
        assert 0 < found[0] < info.tiny
        assert abs(found[0] - dtype(oracle(name, x)[0])) <= 4 * info.smallest_subnormal


@both_dtypes
@all_functions
def test_a_number_has_the_same_bits_at_any_place_and_length(name, dtype):
    function = getattr(_kernels, name)
    x = np.random.default_rng(3).standard_normal(70).astype(dtype) * 5
    whole = function(x)
    for n in range(1, 70):
        np.testing.assert_array_equal(function(x[:n]), whole[:n])
        np.testing.assert_array_equal(function(x[n:]), whole[n:])


@both_dtypes
@all_functions
def test_any_shape_passes_and_out_may_be_the_input(name, dtype):
    function = getattr(_kernels, name)
    x = np.random.default_rng(4).standard_normal((3, 4, 5)).astype(dtype)
    for shape in ((), (0,), (60,), (3, 4, 5)):
        part = np.resize(x, shape).copy()
        found = function(part)
        assert found.shape == shape
        assert found.dtype == dtype
        out = np.full(shape, np.nan, dtype)
        assert function(part, out=out) is out
        np.testing.assert_array_equal(out, found)
        assert function(part, out=part) is part
        np.testing.assert_array_equal(part, found)


def test_arrays_that_do_not_fit_are_refused():
    x = np.zeros((4, 3))
    with pytest.raises(TypeError, match="x is int64"):
        _kernels.exp(np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="C-contiguous"):
        _kernels.exp(x.T)
    with pytest.raises(TypeError, match="out is float32"):
        _kernels.exp(x, out=np.zeros((4, 3), np.float32))
    with pytest.raises(ValueError, match=r"out has shape \(3, 4\)"):
        _kernels.exp(x, out=np.zeros((3, 4)))
    base = np.zeros(10)
    with pytest.raises(ValueError, match="overlaps"):
        _kernels.exp(base[:9], out=base[1:])
    x.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        _kernels.exp(x, out=x)
