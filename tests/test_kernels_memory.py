"""Large memory of the kernels: who owns it, and that it is used again."""

import os

import numpy as np
import pytest

from recur import _kernels

H = 64
T, B = 130, 33  # a megabyte of outputs, from where memory is kept


def kernel_of(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    w = lambda *shape: (rng.standard_normal(shape) / np.sqrt(H)).astype(dtype)  # noqa: E731
    return _kernels.LSTMKernel(w(4 * H, 3), w(4 * H, H), w(4 * H))


def window(seed, dtype=np.float32):
    X = np.random.default_rng(seed).standard_normal((T, B, 3)).astype(dtype)
    return X, np.zeros((B, H), dtype), np.zeros((B, H), dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_results_stay_as_they_are_while_later_calls_run(dtype):
    kernel = kernel_of(0, dtype)
    Y, last, saved = kernel.sequence_save(*window(1, dtype))
    assert Y.nbytes >= 1 << 20
    before = [a.copy() for a in (Y, *last, *saved)]
    for seed in range(2, 5):
        later = kernel.sequence_save(*window(seed, dtype))
        dX, _, _ = kernel.sequence_backward(
            later[2], window(seed, dtype)[0], later[0], (None, None), need_dx=True, keep=False
        )
        for array in (later[0], *later[2], dX):
            assert not any(np.may_share_memory(array, a) for a in (Y, *last, *saved))
    for a, b in zip((Y, *last, *saved), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_view_of_a_result_keeps_its_memory():
    kernel = kernel_of(0)
    part = kernel.sequence(*window(1))[0][5:9, 2]
    before = part.copy()
    for seed in range(2, 5):
        kernel.sequence(*window(seed))
    np.testing.assert_array_equal(part, before)


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="nothing is kept there")
def test_memory_that_a_result_gave_back_serves_the_next():
    kernel = kernel_of(0)
    Y = kernel.sequence(*window(1))[0]
    address = Y.ctypes.data
    del Y
    assert kernel.sequence(*window(2))[0].ctypes.data == address


def test_reused_memory_does_not_change_what_is_computed():
    kernel, want = kernel_of(0), []
    for _ in range(3):
        Y, _, saved = kernel.sequence_save(*window(1))
        dX, _, operands = kernel.sequence_backward(
            saved, window(1)[0], Y, (None, None), need_dx=True, keep=False
        )
        found = [Y.copy(), dX.copy(), operands["b"][1], *(a.copy() for a in operands["Wh"])]
        for a, b in zip(found, want or found, strict=True):
            np.testing.assert_array_equal(a, b)
        want = found


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_packed_weights_stand_for_every_number(dtype):
    for rows, columns in [(1, 1), (1, 40), (40, 1), (15, 17), (16, 16), (33, 31), (70, 129)]:
        W = np.random.default_rng(0).standard_normal((rows, columns)).astype(dtype)
        np.testing.assert_array_equal(_kernels.AffineKernel(W).matrices()["W"], W)
