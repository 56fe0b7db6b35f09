"""The optimisers' kernels: one pass, with the bits of the same operations in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from recur import _kernels as k

SIZES = [0, 1, 7, 64, 1003]


def arrays(rng, dtype, n, count):
    return [rng.normal(size=n).astype(dtype) for _ in range(count)]


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("n", SIZES)
def test_a_descent_has_the_bits_of_numpy(n, scale, dtype, rng):
    x, g = arrays(rng, dtype, n, 2)
    want = x - g * dtype.type(scale) * dtype.type(0.1)
    k.descent_update(x, g, rate=0.1, scale=scale)
    np.testing.assert_array_equal(x, want, strict=True)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("n", SIZES)
def test_momentum_has_the_bits_of_numpy(n, scale, dtype, rng):
    x, g, v = arrays(rng, dtype, n, 3)
    want_v = v * dtype.type(0.9) + g * dtype.type(scale) * dtype.type(0.01)
    want = x - want_v
    k.momentum_update(x, g, v, rate=0.01, rho=0.9, scale=scale)
    np.testing.assert_array_equal(v, want_v, strict=True)
    np.testing.assert_array_equal(x, want, strict=True)


@pytest.mark.parametrize("decay", [0.0, 0.02])
@pytest.mark.parametrize("n", SIZES)
def test_adam_has_the_bits_of_numpy(n, decay, dtype, rng):
    x, g, m, v = arrays(rng, dtype, n, 4)
    v *= v
    real = dtype.type
    d = g * real(0.7)
    want_m = m * real(0.9) + d * real(1 - 0.9)
    want_v = v * real(0.999) + d * d * real(1 - 0.999)
    step = want_m * real(0.01) / (np.sqrt(want_v * real(3.3)) + real(1e-8)) + real(decay) * x
    want = x - step
    k.adam_update(
        *(x, g, m, v), rate=0.01, beta=(0.9, 0.999), correction=3.3, epsilon=1e-8, decay=decay,
        scale=0.7,
    )  # fmt: skip
    np.testing.assert_array_equal(m, want_m, strict=True)
    np.testing.assert_array_equal(v, want_v, strict=True)
    np.testing.assert_array_equal(x, want, strict=True)


def test_updates_keep_subnormal_squares(dtype):
    g = np.full(9, np.finfo(dtype).tiny / 64, dtype)
    x, v = np.zeros(9, dtype), np.zeros(9, dtype)
    k.momentum_update(x, g, v, rate=1.0, rho=0.5)
    np.testing.assert_array_equal(v, g)
    np.testing.assert_array_equal(x, -g)


def test_infinities_and_nan_go_through(dtype):
    g = np.array([np.inf, -np.inf, np.nan, 0], dtype)
    x, m, v = (np.zeros(4, dtype) for _ in range(3))
    k.adam_update(x, g, m, v, rate=0.1, beta=(0.9, 0.9), correction=0.1, epsilon=0.0)
    assert np.isnan(x).all()  # inf / inf, nan, 0 / 0
    assert np.isinf(m[:2]).all() and np.isinf(v[:2]).all() and np.isnan(m[2]) and m[3] == 0


def adam(x, g, m, v):
    k.adam_update(x, g, m, v, rate=0.1, beta=(0.9, 0.9), correction=0.1, epsilon=0.1)


UPDATES = {  # by the number of arrays besides x
    1: lambda x, g: k.descent_update(x, g, rate=1.0),
    2: lambda x, g, v: k.momentum_update(x, g, v, rate=1.0, rho=0.5),
    3: adam,
}


@pytest.mark.parametrize("states", UPDATES)
def test_arrays_that_do_not_fit_are_refused_and_left(states, dtype, rng):
    good = arrays(rng, dtype, 6, states + 1)
    other = np.float64 if dtype == np.float32 else np.float32
    for place in range(states + 1):
        read_only = good[place].copy()
        read_only.flags.writeable = False
        bad = [
            (good[place].astype(other), TypeError, "expected an array of"),
            (good[place][:5].copy(), ValueError, "has shape"),
            (np.zeros((6, 1), dtype), ValueError, "has shape|expected"),
            (np.zeros(12, dtype)[::2], ValueError, "C-contiguous"),
            (good[place - 1], ValueError, "overlaps"),
        ] + ([] if place == 1 else [(read_only, ValueError, "read-only")])
        for array, error, text in bad:
            given = [array if i == place else a for i, a in enumerate(good)]
            before = [a.copy() for a in given]
            with pytest.raises(error, match=text):
                UPDATES[states](*given)
            for a, b in zip(given, before, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("n", [*SIZES, 4096, 4097, 20011])
def test_a_sum_of_squares_equals_that_of_exact_products(n, dtype, rng):
    (a,) = arrays(rng, dtype, n, 1)
    want = float(np.square(a.astype(np.longdouble)).sum())
    found = k.sum_of_squares(a)
    assert type(found) is float
    assert abs(found - want) <= 64 * np.finfo(dtype).eps * want


def test_a_sum_of_squares_overflows_as_its_dtype_does():
    assert k.sum_of_squares(np.array([1, 1e30, 2], np.float32)) == np.inf
    assert k.sum_of_squares(np.array([1, 2.0**100, 2])) == 2.0**200
    assert np.isnan(k.sum_of_squares(np.array([1, np.nan])))


def test_a_sum_of_squares_takes_one_contiguous_array_of_floats():
    with pytest.raises(TypeError, match="a is int64, expected an array of float32 or float64"):
        k.sum_of_squares(np.ones(3, np.int64))
    with pytest.raises(ValueError, match="a has shape"):
        k.sum_of_squares(np.ones((2, 2)))
    with pytest.raises(ValueError, match="C-contiguous"):
        k.sum_of_squares(np.ones(8)[::2])
