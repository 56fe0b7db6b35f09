"""Kernels that hold their weights in 16 or 8 bits."""

import numpy as np
import pytest

from recur._kernels import (
    AffineKernel,
    GRUKernel,
    GRUv3Kernel,
    LSTMKernel,
    RNNKernel,
    Stepper,
    tanh,
)

STORAGES = ("bfloat16", "float16", "int8")
SIZES = [(1, 1), (3, 5), (7, 17), (19, 40), (300, 33)]
each_storage = pytest.mark.parametrize("storage", STORAGES)
each_size = pytest.mark.parametrize("size", SIZES, ids=str)


def draw(rng, *shape):
    return (rng.standard_normal(shape) / 3).astype(np.float32)


def cells(n_in, n, seed=0):
    """(class, weights, options) of every cell, with everything that it may have."""
    rng = np.random.default_rng(seed)
    new = lambda gates: {  # noqa: E731
        "Wi": draw(rng, gates * n, n_in), "Wh": draw(rng, gates * n, n), "b": draw(rng, gates * n)
    }  # fmt: skip
    return {
        "RNN": (RNNKernel, new(1), {"act": "tanh"}),
        "LSTM": (LSTMKernel, new(4), {}),
        "peepholes": (LSTMKernel, new(4) | {"peephole": draw(rng, 3, n)}, {"gate": "hard_sigmoid"}),
        "GRU": (GRUKernel, new(3) | {"bh": draw(rng, n)}, {}),
        "GRUv3": (GRUv3Kernel, new(3) | {"Wh": draw(rng, 2 * n, n), "Whh": draw(rng, n, n)}, {}),
        "no bias": (GRUKernel, new(3) | {"b": None}, {"gate": "hard_sigmoid"}),
    }


NAMES = tuple(cells(1, 1))
each_cell = pytest.mark.parametrize("name", NAMES)


def rounded(w, storage):
    """What NumPy makes of weights that are rounded to a format."""
    if storage == "float16":
        return w.astype(np.float16).astype(np.float32)
    if storage == "bfloat16":
        low, bits = w.view(np.uint32) & 0xFFFF, w.view(np.uint32) >> 16
        up = (low > 0x8000) | ((low == 0x8000) & (bits & 1 == 1))
        return ((bits + up) << 16).view(np.float32)
    scale = np.abs(w).max(1, initial=0, keepdims=True) / np.float32(127)
    scale = ((scale.view(np.uint32) + 0x7F) & np.uint32(0xFFFFFF80)).view(np.float32)
    return np.rint(w / np.where(scale > 0, scale, 1)) * scale


def twins(name, size, storage):
    """The kernel, and the float32 one with the rounded weights."""
    make, weights, options = cells(*size)[name]
    near = {n: rounded(w, storage) if n in ("Wi", "Wh", "Whh") else w for n, w in weights.items()}
    return make(**weights, **options, storage=storage), make(**near, **options)


def state_of(kernel, batch, rng):
    return tuple(draw(rng, batch, kernel.n_out) for _ in range(kernel.n_states))


@each_cell
@each_storage
@each_size
def test_the_matrices_are_those_that_numpy_rounds(name, storage, size):
    make, weights, options = cells(*size)[name]
    held = make(**weights, **options, storage=storage).matrices()
    assert set(held) == {"Wi", "Wh", "Whh"} & set(weights)
    for n, matrix in held.items():
        np.testing.assert_array_equal(matrix, rounded(weights[n], storage))


@each_cell
@each_storage
@each_size
def test_weights_of_a_format_are_held_as_they_are(name, storage, size):
    make, weights, options = cells(*size)[name]
    once = make(**weights, **options, storage=storage).matrices()
    twice = make(**(weights | once), **options, storage=storage).matrices()
    for n, matrix in once.items():
        np.testing.assert_array_equal(matrix, twice[n])


@each_cell
@pytest.mark.parametrize("storage", STORAGES[:2])
@each_size
@pytest.mark.parametrize("batch", [1, 2, 3, 9, 70])
def test_a_16_bit_step_has_the_bits_of_one_with_the_rounded_weights(name, storage, size, batch):
    mine, full = twins(name, size, storage)
    rng = np.random.default_rng(1)
    x, state = draw(rng, batch, size[0]), state_of(full, batch, rng)
    for a, b in zip(mine.step(x, *state), full.step(x, *state), strict=True):
        np.testing.assert_array_equal(a, b)


@each_cell
@each_size
@pytest.mark.parametrize("batch", [1, 2, 3, 9, 70])
def test_an_int8_step_differs_from_one_with_the_rounded_weights_by_its_rounding(name, size, batch):
    mine, full = twins(name, size, "int8")
    rng = np.random.default_rng(1)
    x, state = draw(rng, batch, size[0]), state_of(full, batch, rng)
    for a, b in zip(mine.step(x, *state), full.step(x, *state), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=4e-6)


@each_size
@pytest.mark.parametrize("batch", [1, 2, 3, 9, 70])
def test_whole_numbers_give_exact_int8_sums(size, batch):
    """Scales are powers of two and sums are small: every order of them has the same bits."""
    n_in, n = size
    rng = np.random.default_rng(2)
    Wi, Wh = (rng.integers(-127, 128, (n, m)).astype(np.float32) for m in (n_in, n))
    Wi[:, 0], Wh[:, -1] = 127, -127
    Wh /= 8
    x, h = (rng.integers(-9, 10, (batch, m)).astype(np.float32) for m in (n_in, n))
    b = rng.integers(-9, 10, n).astype(np.float32)
    (y,) = RNNKernel(Wi, Wh, b, act="identity", storage="int8").step(x, h)
    np.testing.assert_array_equal(y, x @ Wi.T + h @ Wh.T + b)
    y = AffineKernel(Wi, b, storage="int8").apply(x)
    np.testing.assert_array_equal(y, x @ Wi.T + b)


@each_cell
@each_storage
@each_size
def test_a_sample_does_not_depend_on_its_batch(name, storage, size):
    mine, _ = twins(name, size, storage)
    rng = np.random.default_rng(3)
    x, state = draw(rng, 70, size[0]), state_of(mine, 70, rng)
    together = mine.step(x, *state)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 5), slice(10, 33)):
        alone = mine.step(x[rows].copy(), *(part[rows].copy() for part in state))
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_array_equal(a[rows], b)


@each_cell
@each_storage
@each_size
@pytest.mark.parametrize("batch", [1, 3, 9])
def test_a_sequence_gives_the_bits_of_its_steps(name, storage, size, batch):
    mine, _ = twins(name, size, storage)
    rng = np.random.default_rng(4)
    X, state = draw(rng, 11, batch, size[0]), state_of(mine, batch, rng)
    Y, last = mine.sequence(X, *state)
    for x, y in zip(X, Y, strict=True):
        state = mine.step(x, *state)
        np.testing.assert_array_equal(y, state[0])
    for a, b in zip(last, state, strict=True):
        np.testing.assert_array_equal(a, b)


@each_storage
@pytest.mark.parametrize("batch", [1, 3])
def test_a_stepper_mixes_formats_and_gives_the_bits_of_single_steps(storage, batch):
    rng = np.random.default_rng(5)
    W, b = draw(rng, 4, 17), draw(rng, 4)
    lstm, _ = twins("LSTM", (7, 17), storage)
    head, full = AffineKernel(W, b, storage=storage), RNNKernel(draw(rng, 5, 4), draw(rng, 5, 5))
    stepper = Stepper([lstm, head, "tanh", full], batch)
    assert stepper.kernels[0].storage == storage and full.storage is None
    h = c = np.zeros((batch, 17), np.float32)
    g = np.zeros((batch, 5), np.float32)
    for _ in range(5):
        x = draw(rng, batch, 7)
        y = stepper(x.T)
        h, c = lstm.step(x, h, c)
        (g,) = full.step(tanh(head.apply(h)), g)
        np.testing.assert_array_equal(y.T, g)


@each_storage
def test_small_and_large_weights_are_rounded_as_numpy_rounds_them(storage):
    rng = np.random.default_rng(6)
    W = (rng.standard_normal((64, 40)) * 10.0 ** rng.uniform(-9, 4, (64, 40))).astype(np.float32)
    W[0] = 0
    W[1, :2] = 2.0**-24, 2.0**-25  # the least of float16, and half of it
    W[2, 0] = -65504
    held = AffineKernel(W, storage=storage).matrices()["W"]
    np.testing.assert_array_equal(held, rounded(W, storage))
    x = np.eye(40, dtype=np.float32)
    np.testing.assert_array_equal(AffineKernel(W, storage=storage).apply(x).T, held)


@each_storage
def test_a_weight_that_the_format_cannot_hold_is_refused(storage):
    W = np.ones((3, 2), np.float32)
    for bad in (np.nan, np.inf, *([70000] if storage == "float16" else [])):
        W[1, 1] = bad
        with pytest.raises(ValueError, match=f"W holds .* the largest of {storage}"):
            AffineKernel(W, storage=storage)


def test_other_storages_and_float64_are_refused():
    W = np.ones((3, 2), np.float32)
    with pytest.raises(ValueError, match="storage is 'int4', expected None, 'bfloat16'"):
        AffineKernel(W, storage="int4")
    with pytest.raises(TypeError, match="held as int8 are given as float32, not float64"):
        RNNKernel(np.ones((3, 2)), np.ones((3, 3)), storage="int8")


@each_cell
@each_storage
def test_there_is_no_backward(name, storage):
    mine, _ = twins(name, (3, 5), storage)
    rng = np.random.default_rng(7)
    x, state = draw(rng, 2, 3), state_of(mine, 2, rng)
    after, saved = mine.step_save(x, *state)
    with pytest.raises(ValueError, match=f"held as {storage} have no backward"):
        mine.step_backward(saved, x, state, after, need_dx=True, keep=True)
