"""Products, column sums, softmax cross entropy, embeddings, and the choice of path and threads."""

import os
import subprocess
import sys

import numpy as np
import pytest

from recur import _kernels

DTYPES = [np.float32, np.float64]
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "f64"])
SHAPES = [(1, 1, 1), (3, 17, 5), (16, 65, 33), (200, 4, 300), (65, 1, 7), (129, 40, 3)]


def draw(rng, *shape, dtype):
    return rng.standard_normal(shape).astype(dtype)


def close(found, expected, dtype):
    assert found.dtype == dtype
    scale = max(1.0, np.abs(expected).max(initial=0))
    tolerance = (2e-5 if dtype == np.float32 else 1e-12) * scale
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@both_dtypes
@pytest.mark.parametrize(("N", "R", "C"), SHAPES)
def test_a_weight_gradient_overwrites_or_accumulates_as_told(N, R, C, dtype):
    rng = np.random.default_rng([N, R, C])
    dg, x, before = (draw(rng, *s, dtype=dtype) for s in ((N, R), (N, C), (R, C)))
    product = dg.astype(np.float64).T @ x.astype(np.float64)
    out = np.full((R, C), np.nan, dtype)
    assert _kernels.weight_gradient(dg, x, out, accumulate=False) is None
    close(out, product, dtype)
    out = before.copy()
    _kernels.weight_gradient(dg, x, out, accumulate=True)
    close(out, before + product, dtype)


@both_dtypes
@pytest.mark.parametrize(("N", "R"), [(1, 1), (3, 17), (200, 65), (16, 400)])
def test_a_bias_gradient_overwrites_or_accumulates_as_told(N, R, dtype):
    rng = np.random.default_rng([N, R])
    dg, before = draw(rng, N, R, dtype=dtype), draw(rng, R, dtype=dtype)
    total = dg.sum(0, dtype=np.float64)
    out = np.full(R, np.nan, dtype)
    _kernels.bias_gradient(dg, out, accumulate=False)
    close(out, total, dtype)
    out = before.copy()
    _kernels.bias_gradient(dg, out, accumulate=True)
    close(out, before + total, dtype)


@both_dtypes
def test_gradients_take_column_slices(dtype):
    rng = np.random.default_rng(1)
    wide, x = draw(rng, 20, 30, dtype=dtype), draw(rng, 20, 9, dtype=dtype)
    for columns in (slice(0, 20), slice(20, 30), slice(3, 4)):
        dg = wide[:, columns]
        out = np.full((dg.shape[1], 5), np.nan, dtype)
        _kernels.weight_gradient(dg, x[:, 2:7], out, accumulate=False)
        close(out, dg.astype(np.float64).T @ x[:, 2:7].astype(np.float64), dtype)
        out = np.full(dg.shape[1], np.nan, dtype)
        _kernels.bias_gradient(dg, out, accumulate=False)
        close(out, dg.sum(0, dtype=np.float64), dtype)


@both_dtypes
def test_no_rows_give_zeros(dtype):
    out = np.full((3, 4), np.nan, dtype)
    empty = np.empty((0, 3), dtype)
    _kernels.weight_gradient(empty, np.empty((0, 4), dtype), out, accumulate=False)
    np.testing.assert_array_equal(out, 0)
    out = np.ones((3, 4), dtype)
    _kernels.weight_gradient(empty, np.empty((0, 4), dtype), out, accumulate=True)
    np.testing.assert_array_equal(out, 1)
    out = np.full(3, np.nan, dtype)
    _kernels.bias_gradient(empty, out, accumulate=False)
    np.testing.assert_array_equal(out, 0)


def test_the_flag_has_no_default_and_no_place():
    dg, x, out = np.ones((2, 3)), np.ones((2, 4)), np.ones((3, 4))
    with pytest.raises(TypeError):
        _kernels.weight_gradient(dg, x, out)
    with pytest.raises(TypeError):
        _kernels.weight_gradient(dg, x, out, True)
    with pytest.raises(TypeError):
        _kernels.bias_gradient(dg, out[:, 0].copy())
    with pytest.raises(TypeError):
        _kernels.embedding_scatter_add(dg, np.zeros(2, np.int64), out[:, :3].copy())


def test_gradients_that_do_not_fit_are_refused():
    dg, x, out = np.ones((2, 3)), np.ones((2, 4)), np.ones((3, 4))
    with pytest.raises(ValueError, match="x has 3 rows, dg has 2"):
        _kernels.weight_gradient(dg, np.ones((3, 4)), out, accumulate=True)
    with pytest.raises(ValueError, match=r"out has shape \(4, 3\), expected \(3, 4\)"):
        _kernels.weight_gradient(dg, x, np.ones((4, 3)), accumulate=True)
    with pytest.raises(TypeError, match="dg is float32"):
        _kernels.weight_gradient(dg.astype(np.float32), x, out, accumulate=True)
    with pytest.raises(ValueError, match="C-contiguous"):
        _kernels.weight_gradient(np.ones((3, 2)).T, x, out, accumulate=True)
    with pytest.raises(ValueError, match="x of shape"):
        _kernels.weight_gradient(dg, x[:, ::2], np.ones((3, 2)), accumulate=True)
    with pytest.raises(ValueError, match="x of shape"):
        _kernels.weight_gradient(dg, x[::-1], out, accumulate=True)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        _kernels.weight_gradient(dg, x, out, accumulate=False)


@both_dtypes
@pytest.mark.parametrize(("N", "R", "C"), SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_affine_products_equal_numpy(N, R, C, bias, dtype):
    rng = np.random.default_rng([N, R, C])
    W, x, dy = (draw(rng, *s, dtype=dtype) for s in ((R, C), (N, C), (N, R)))
    b = draw(rng, R, dtype=dtype) if bias else None
    want = x.astype(np.float64) @ W.astype(np.float64).T + (b if bias else 0)
    close(_kernels.affine_forward(W, x, b), want, dtype)
    close(_kernels.affine_backward_x(W, dy), dy.astype(np.float64) @ W.astype(np.float64), dtype)
    kernel = _kernels.AffineKernel(W, b)
    assert (kernel.n_in, kernel.n_out, kernel.dtype) == (C, R, dtype)
    found = kernel.apply(x)
    close(found, want, dtype)
    out = np.full((N, R), np.nan, dtype)
    assert kernel.apply(x, out=out) is out
    np.testing.assert_array_equal(out, found)


@both_dtypes
def test_an_affine_kernels_rows_do_not_depend_on_each_other(dtype):
    rng = np.random.default_rng(2)
    W, b, x = (draw(rng, *s, dtype=dtype) for s in ((33, 300), (33,), (130, 300)))
    kernel = _kernels.AffineKernel(W, b)
    alone = np.concatenate([kernel.apply(x[i : i + 1]) for i in range(130)])
    for n in (2, 3, 5, 8, 16, 64, 65, 130):
        np.testing.assert_array_equal(kernel.apply(x[:n]), alone[:n])
        np.testing.assert_array_equal(kernel.apply(x[-n:]), alone[-n:])
    W[...] = 0
    np.testing.assert_array_equal(kernel.apply(x), alone)


# Shapes (N, R, I) with several blocks of depth, several groups of panels, and few or many rows.
LARGE = [
    (1, 1100, 40),
    (7, 40, 1100),
    (70, 530, 1030),
    (300, 70, 90),
    (131, 1, 1500),
    (2, 1200, 1100),
]


@both_dtypes
@pytest.mark.parametrize(("N", "R", "C"), [*SHAPES, *LARGE])
def test_a_matrix_as_it_lies_gives_the_bits_of_the_packed_one(N, R, C, dtype):
    rng = np.random.default_rng([N, R, C])
    W, x, dy, b = (draw(rng, *s, dtype=dtype) for s in ((R, C), (N, C), (N, R), (R,)))
    kernel, before = _kernels.AffineKernel(W, b), _kernels.get_num_threads()
    y, dx = kernel.apply(x), kernel.backward_x(dy)
    close(dx, dy.astype(np.float64) @ W.astype(np.float64), dtype)
    try:
        for threads in (1, 2, 3, 5):
            _kernels.set_num_threads(threads)
            np.testing.assert_array_equal(kernel.apply(x), y)
            np.testing.assert_array_equal(kernel.backward_x(dy), dx)
            np.testing.assert_array_equal(_kernels.affine_forward(W, x, b), y)
            np.testing.assert_array_equal(_kernels.affine_backward_x(W, dy), dx)
    finally:
        _kernels.set_num_threads(before)
    for n in (1, N // 2):
        np.testing.assert_array_equal(_kernels.affine_forward(W, x[-n:], b), y[-n:])
        np.testing.assert_array_equal(_kernels.affine_backward_x(W, dy[-n:]), dx[-n:])


@both_dtypes
def test_a_product_passes_on_what_is_not_finite_and_only_to_its_row(dtype):
    rng = np.random.default_rng(5)
    W, x = draw(rng, 40, 600, dtype=dtype), draw(rng, 66, 600, dtype=dtype)
    want = _kernels.affine_forward(W, x)
    x[3, 599], x[65, 0] = np.nan, np.inf
    found = _kernels.affine_forward(W, x)
    assert np.isnan(found[3]).all()
    np.testing.assert_array_equal(np.abs(found[65]), np.inf)
    untouched = np.delete(np.arange(66), [3, 65])
    np.testing.assert_array_equal(found[untouched], want[untouched])


@both_dtypes
def test_products_without_inputs_give_the_bias(dtype):
    W, x, b = np.empty((3, 0), dtype), np.empty((2, 0), dtype), np.arange(3, dtype=dtype)
    np.testing.assert_array_equal(_kernels.affine_forward(W, x, b), np.stack([b, b]))
    np.testing.assert_array_equal(_kernels.affine_forward(W, x), 0)
    np.testing.assert_array_equal(_kernels.AffineKernel(W, b).apply(x), np.stack([b, b]))
    no_rows = np.empty((0, 3), dtype)
    np.testing.assert_array_equal(_kernels.affine_backward_x(no_rows, np.empty((2, 0), dtype)), 0)
    kernel = _kernels.AffineKernel(no_rows)
    np.testing.assert_array_equal(kernel.backward_x(np.empty((2, 0), dtype)), np.zeros((2, 3)))
    W = np.ones((3, 4), dtype)
    assert _kernels.affine_forward(W, np.empty((0, 4), dtype), b).shape == (0, 3)
    assert _kernels.affine_backward_x(W, np.empty((0, 3), dtype)).shape == (0, 4)


def test_affine_arrays_that_do_not_fit_are_refused():
    W, x = np.ones((3, 4)), np.ones((2, 4))
    kernel = _kernels.AffineKernel(W)
    with pytest.raises(ValueError, match=r"x has shape \(2, 3\), expected \(any, 4\)"):
        kernel.apply(np.ones((2, 3)))
    with pytest.raises(ValueError, match="out overlaps x"):
        _kernels.AffineKernel(np.ones((4, 4))).apply(x, out=x)
    with pytest.raises(ValueError, match=r"b has shape \(2,\), expected \(3,\)"):
        _kernels.AffineKernel(W, np.ones(2))
    with pytest.raises(ValueError, match=r"dy has shape"):
        _kernels.affine_backward_x(W, np.ones((2, 4)))
    with pytest.raises(TypeError, match="b is float32"):
        _kernels.affine_forward(W, x, np.ones(3, np.float32))
    with pytest.raises(ValueError, match=r"dy has shape \(2, 4\), expected \(any, 3\)"):
        kernel.backward_x(np.ones((2, 4)))
    half = _kernels.AffineKernel(np.ones((3, 4), np.float32), storage="float16")
    with pytest.raises(ValueError, match="float16 have no backward"):
        half.backward_x(np.ones((2, 3), np.float32))


def dense_cross_entropy(logits, target, weights):
    shifted = logits - logits.max(1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    loss = -(np.where(target == 0, 0, target * log_p)).sum(1)
    return weights * loss, weights[:, None] * (
        np.exp(log_p) * target.sum(1, keepdims=True) - target
    )


@both_dtypes
@pytest.mark.parametrize(("N", "C"), [(1, 1), (4, 3), (7, 17), (3, 130)])
@pytest.mark.parametrize("weighted", [True, False])
def test_softmax_cross_entropy_equals_its_formula(N, C, weighted, dtype):
    rng = np.random.default_rng([N, C])
    logits = draw(rng, N, C, dtype=dtype) * 5
    labels, target = rng.integers(0, C, N), rng.random((N, C)).astype(dtype)
    weights = rng.random(N).astype(dtype) if weighted else None
    w = np.ones(N) if weights is None else weights.astype(np.float64)
    for given, dense in ((labels, np.eye(C)[labels]), (target, target.astype(np.float64))):
        loss, d = _kernels.softmax_cross_entropy(logits, given, weights=weights)
        want_loss, want_d = dense_cross_entropy(logits.astype(np.float64), dense, w)
        close(loss, want_loss, dtype)
        close(d, want_d, dtype)


@both_dtypes
def test_softmax_cross_entropy_survives_huge_and_infinite_logits(dtype):
    logits = np.array([[1e4, -1e4, 0], [-np.inf, 0, 0], [0, np.nan, 0]], dtype)
    loss, d = _kernels.softmax_cross_entropy(logits, np.array([1, 2, 0]))
    np.testing.assert_allclose(loss[:2], [2e4, np.log(2)], rtol=1e-6)
    np.testing.assert_allclose(d[:2], [[1, -1, 0], [0, 0.5, -0.5]], atol=1e-6)
    assert np.isnan(loss[2])
    assert np.isnan(d[2]).all()
    target = np.array([[0.5, 0.5, 0], [0, 1, 0]], dtype)
    loss, _ = _kernels.softmax_cross_entropy(logits[:2], target)
    np.testing.assert_allclose(loss, [1e4, np.log(2)], rtol=1e-6)


@both_dtypes
def test_rows_of_weight_zero_are_exactly_zero_whatever_they_hold(dtype):
    logits = np.full((2, 4), np.nan, dtype)
    logits[1] = 1
    weights = np.array([0, 1], dtype)
    loss, d = _kernels.softmax_cross_entropy(logits, np.array([-1, 2]), weights=weights)
    np.testing.assert_array_equal(loss[0], 0)
    np.testing.assert_array_equal(d[0], 0)
    np.testing.assert_allclose(loss[1], np.log(4), rtol=1e-6)


def test_targets_that_do_not_fit_are_refused():
    logits = np.zeros((2, 3))
    for label in (3, -1):
        with pytest.raises(ValueError, match=rf"target\[1\] is {label}, expected 0 to 2"):
            _kernels.softmax_cross_entropy(logits, np.array([0, label]))
    with pytest.raises(TypeError, match="target is int32"):
        _kernels.softmax_cross_entropy(logits, np.array([0, 1], np.int32))
    with pytest.raises(ValueError, match=r"target has shape \(3, 3\)"):
        _kernels.softmax_cross_entropy(logits, np.zeros((3, 3)))
    with pytest.raises(ValueError, match="no classes"):
        _kernels.softmax_cross_entropy(np.zeros((2, 0)), np.array([0, 1]))


@both_dtypes
def test_an_embedding_gathers_and_scatters(dtype):
    rng = np.random.default_rng(3)
    table, index = draw(rng, 7, 5, dtype=dtype), np.array([3, 0, 3, 6, 3])
    found = _kernels.embedding_gather(table, index)
    np.testing.assert_array_equal(found, table[index])
    assert not np.shares_memory(found, table)
    out = np.empty((5, 5), dtype)
    assert _kernels.embedding_gather(table, index, out=out) is out
    np.testing.assert_array_equal(out, table[index])
    dY = draw(rng, 5, 5, dtype=dtype)
    want = np.zeros((7, 5), dtype)
    np.add.at(want, index, dY)
    out = np.full((7, 5), np.nan, dtype)
    _kernels.embedding_scatter_add(dY, index, out, accumulate=False)
    np.testing.assert_array_equal(out, want)
    _kernels.embedding_scatter_add(dY, index, out, accumulate=True)
    close(out, 2 * want.astype(np.float64), dtype)


def test_embedding_indices_out_of_range_change_nothing():
    table, out = np.ones((4, 2)), np.full((4, 2), 5.0)
    for bad in (4, -1):
        index = np.array([0, bad])
        with pytest.raises(ValueError, match=rf"index\[1\] is {bad}, expected 0 to 3"):
            _kernels.embedding_gather(table, index)
        with pytest.raises(ValueError, match=rf"index\[1\] is {bad}, expected 0 to 3"):
            _kernels.embedding_scatter_add(np.ones((2, 2)), index, out, accumulate=False)
    np.testing.assert_array_equal(out, 5)
    with pytest.raises(ValueError, match="overlaps"):
        _kernels.embedding_gather(table, np.array([1, 0, 2, 3]), out=table)


def test_the_path_and_the_threads_can_be_named():
    assert _kernels.cpu_path() in _kernels.cpu_paths()
    assert "plain" in _kernels.cpu_paths()
    before = _kernels.get_num_threads()
    try:
        _kernels.set_num_threads(3)
        assert _kernels.get_num_threads() == 3
        for bad in (0, -1, 1.5, "2"):
            with pytest.raises(ValueError, match="expected a whole number of at least 1"):
                _kernels.set_num_threads(bad)
        assert _kernels.get_num_threads() == 3
    finally:
        _kernels.set_num_threads(before)


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_environment_names_the_path_and_the_threads():
    show = "from recur import _kernels as k; print(k.cpu_path(), k.get_num_threads())"
    for path in _kernels.cpu_paths():
        found = run_python(show, RECUR_ARCH=path, RECUR_NUM_THREADS="3")
        assert found.stdout.split() == [path, "3"], found.stderr
    found = run_python(show, RECUR_ARCH="abacus")
    assert "RECUR_ARCH is 'abacus', expected one that this machine can run" in found.stderr
    found = run_python(show, RECUR_NUM_THREADS="many")
    assert "RECUR_NUM_THREADS is 'many', expected a whole number" in found.stderr
