"""A Stepper: a chain of kernels stepped by one call, with the state inside."""

import sys
from pathlib import Path

import numpy as np
import pytest

from recur import _kernels
from recur._kernels import AffineKernel, GRUKernel, GRUv3Kernel, LSTMKernel, RNNKernel, Stepper

both_dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["f32", "f64"])


def draw(rng, *shape, dtype):
    return (rng.standard_normal(shape) / 3).astype(dtype)


def chain(dtype, seed=0):
    """Every kind of stage, sizes 3 -> 7 -> 5 -> 6 -> 6 -> 17 -> 4 -> 4."""
    rng = np.random.default_rng(seed)
    w = lambda *shape: draw(rng, *shape, dtype=dtype)  # noqa: E731
    return [
        LSTMKernel(w(28, 3), w(28, 7), w(28), peephole=w(3, 7)),
        GRUKernel(w(15, 7), w(15, 5), w(15), bh=w(5)),
        GRUv3Kernel(w(18, 5), w(12, 6), w(18), Whh=w(6, 6)),
        "relu",
        RNNKernel(w(17, 6), w(17, 17), w(17)),
        AffineKernel(w(4, 17), w(4)),
        "tanh",
    ]


def walk(stages, x, states):
    """The same step by single calls: x (B, I); gives y (B, R) and the next states."""
    states, after = iter(states), []
    for stage in stages:
        if isinstance(stage, str):
            x = np.maximum(x, 0) if stage == "relu" else _kernels.tanh(x)
        elif isinstance(stage, AffineKernel):
            x = stage.apply(x)
        else:
            after.append(stage.step(x, *next(states)))
            x = after[-1][0]
    return x, after


@both_dtypes
@pytest.mark.parametrize("B", [1, 3, 16])
def test_a_chain_has_the_bits_of_its_stages(B, dtype):
    stages, rng = chain(dtype), np.random.default_rng(B)
    stepper = Stepper(stages, B)
    assert (stepper.batch, stepper.n_in, stepper.n_out, stepper.dtype) == (B, 3, 4, dtype)
    states = stepper.states()
    assert [len(s) for s in states] == [2, 1, 1, 1]
    assert not any(np.any(a) for s in states for a in s)
    for _ in range(7):
        x = draw(rng, B, 3, dtype=dtype)
        want, states = walk(stages, x, states)
        found = stepper(x.T)
        assert found.dtype == dtype
        assert found.T.flags.c_contiguous
        np.testing.assert_array_equal(found, want.T)
        for a, b in zip(stepper.states(), states, strict=True):
            for c, d in zip(a, b, strict=True):
                np.testing.assert_array_equal(c, d)


@both_dtypes
def test_a_vector_gives_a_vector_and_any_strides_and_floats_pass(dtype):
    stages, rng = chain(dtype), np.random.default_rng(1)
    x = draw(rng, 12, 10, dtype=dtype)
    other = np.float64 if dtype == np.float32 else np.float32
    x = x.astype(np.float32).astype(dtype)
    want = Stepper(stages, 1)(x[:3, 0].copy())
    assert want.shape == (4,)
    for same in (x[:3, 0], x[:3, 0].copy()[::-1][::-1], x[:3, 0].astype(other)):
        np.testing.assert_array_equal(Stepper(stages, 1)(same), want)
    np.testing.assert_array_equal(Stepper(stages, 1)(x[:3, :1]), want[:, None])
    want = Stepper(stages, 5)(np.asfortranarray(x[3:6, 5:]))
    for same in (x[3:6, 5:], np.ascontiguousarray(x[3:6, 5:]), x[3:6, 5:].astype(other)):
        np.testing.assert_array_equal(Stepper(stages, 5)(same), want)


def test_an_output_shares_no_memory_with_the_state_or_the_next_output():
    stepper = Stepper(chain(np.float32)[:1], 2)
    x = np.ones((3, 2), np.float32)
    first = stepper(x)
    copy = first.copy()
    state = stepper.states()
    second = stepper(x)
    np.testing.assert_array_equal(first, copy)
    assert not np.shares_memory(first, second)
    first[...] = np.nan
    second[...] = np.nan
    stepper.set_states(state)
    assert not np.isnan(stepper(x)).any()


@both_dtypes
def test_states_go_out_and_in(dtype):
    stages = chain(dtype)
    a, b = Stepper(stages, 3), Stepper(stages, 3)
    rng = np.random.default_rng(2)
    for _ in range(3):
        a(draw(rng, 3, 3, dtype=dtype))
    b.set_states(a.states())
    x = draw(rng, 3, 3, dtype=dtype)
    np.testing.assert_array_equal(a(x), b(x))
    before = a.states()
    bad = [*before[:-1], (np.zeros((4, 17), dtype),)]
    with pytest.raises(ValueError, match=r"state\[0\] has shape \(4, 17\), expected \(3, 17\)"):
        a.set_states(bad)
    with pytest.raises(ValueError, match="states has 1 tuples, expected 4"):
        a.set_states(before[:1])
    for s, t in zip(a.states(), before, strict=True):
        for c, d in zip(s, t, strict=True):
            np.testing.assert_array_equal(c, d)


def test_what_it_does_not_take_gives_none_and_changes_nothing():
    stepper = Stepper(chain(np.float32), 2)
    stepper(np.ones((3, 2), np.float32))
    before = stepper.states()
    swapped = np.ones((3, 2), np.dtype(np.float32).newbyteorder())
    wrong_types = [[1.0, 2, 3], None, np.float64(1), np.ones((3, 2), np.int64), swapped]
    wrong_shapes = [np.ones(3), np.ones((2, 3)), np.ones((3, 1)), np.ones((3, 2, 1))]
    for x in (*wrong_types, *wrong_shapes, np.ones((3, 2), np.float16)):
        assert stepper(x) is None
    for s, t in zip(stepper.states(), before, strict=True):
        for c, d in zip(s, t, strict=True):
            np.testing.assert_array_equal(c, d)


def test_a_raised_version_makes_it_stale():
    versions = _kernels.Version(), _kernels.Version(5)
    stepper = Stepper(chain(np.float32), 1, watch=versions)
    x = np.ones(3, np.float32)
    assert stepper.fresh
    assert stepper(x) is not None
    versions[1].bump()
    assert versions[1].count == 6
    assert not stepper.fresh
    before = stepper.states()
    assert stepper(x) is None
    np.testing.assert_array_equal(stepper.states()[0][0], before[0][0])
    versions[1].count = 5
    assert stepper(x) is not None


@pytest.mark.parametrize("B", [1, 3, 40])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_run_has_the_bits_of_its_steps_for_every_layout_of_x_and_out(B, dtype, rng):
    layers = {
        "cell": [RNNKernel(np.ones((1, 2), dtype), np.ones((1, 1), dtype), None)],
        "chain": [
            LSTMKernel(*(rng.standard_normal((20, n)).astype(dtype) for n in (2, 5)), None),
            AffineKernel(rng.standard_normal((3, 5)).astype(dtype), None),
            "tanh",
            GRUKernel(*(rng.standard_normal((18, n)).astype(dtype) for n in (3, 6)), None),
        ],
    }
    T = 1030  # several blocks of a model that keeps the GIL for all of them
    for stages in layers.values():
        one, many = Stepper(stages, B), Stepper(stages, B)
        for given in (dtype, np.float32, np.float64):
            X = rng.standard_normal((T, B, 2)).astype(given)
            want = np.stack([one(np.ascontiguousarray(x.T)) for x in X], -1)
            got = many.run(X.T)
            assert got.flags.f_contiguous and np.array_equal(got, want)
            want = np.stack([one(np.ascontiguousarray(x.T)) for x in X], -1)
            out = np.empty(want.shape, dtype)
            assert many.run(np.ascontiguousarray(X.T), out) is out and np.array_equal(out, want)
            want = np.stack([one(np.ascontiguousarray(x.T)) for x in X[::-2]], -1)
            out = np.empty((3, *want.shape), dtype).T[..., 1].T
            assert many.run(X[::-2].T, out) is out and np.array_equal(out, want)
        for a, b in zip(one.states(), many.states(), strict=True):
            assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        assert one.steps == many.steps
        assert many.run(X[:0].T).shape == (want.shape[0], B, 0)


def test_a_run_gives_none_and_changes_nothing_for_what_it_does_not_take(rng):
    stepper = Stepper([LSTMKernel(*(rng.standard_normal((20, 5)),) * 2, None)], 2)
    X = rng.standard_normal((5, 2, 7))
    stepper.run(X)
    before = stepper.states()
    locked = np.empty((5, 2, 7))
    locked.flags.writeable = False
    raw = np.empty(5 * 2 * 7 * 8 + 1, np.uint8)[1:].view(np.float64).reshape(5, 2, 7)
    outs = [np.empty(s) for s in [(5, 2, 6), (5, 3, 7), (4, 2, 7), (5, 14), (5, 2, 7, 1)]]
    outs += [np.empty((5, 2, 7), np.float32), np.empty((5, 2, 7), ">f8"), locked, raw, X, X[::-1]]
    outs += [[1.0], np.ma.masked_array(np.empty((5, 2, 7)))]
    for out in outs:
        assert stepper.run(X, out) is None
    for x in (X[:4], X[:, :1], X[:, 0], X[..., None], X.astype(int), X.tolist(), None):
        assert stepper.run(x) is None
    assert stepper.steps == 7
    for a, b in zip(before[0], stepper.states()[0], strict=True):
        assert np.array_equal(a, b)


@pytest.mark.skipif(sys.platform != "linux", reason="limits its address space as Linux does")
def test_a_run_without_memory_for_its_blocks_raises_and_leaves_the_state_and_the_stepper_usable():
    import resource

    wide = AffineKernel(np.ones((500_000, 1), np.float32), None)  # 256 steps of it: 512 MB
    stepper = Stepper([RNNKernel(*(np.ones((1, 1), np.float32),) * 2, None), wide], 1)
    X = np.ones((1, 3), np.float32)
    stepper(X[:, 0])
    before = stepper.states()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + (200 << 20), limits[1])
    )
    try:
        for _ in range(2):
            with pytest.raises(MemoryError):
                stepper.run(X)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert stepper.steps == 1 and np.array_equal(stepper.states()[0][0], before[0][0])
    assert stepper.run(X) is not None and stepper.steps == 4


def test_stages_that_do_not_fit_are_refused():
    f32, f64 = chain(np.float32), chain(np.float64)
    with pytest.raises(ValueError, match="stage 1 takes 5 features, the one before gives 7"):
        Stepper([f32[0], f32[2]], 1)
    with pytest.raises(TypeError, match="stage 1 is float64, the first is float32"):
        Stepper([f32[0], f64[1]], 1)
    with pytest.raises(TypeError, match="stage 1 is object"):
        Stepper([f32[0], object()], 1)
    with pytest.raises(ValueError, match="activation is 'elu'"):
        Stepper([f32[0], "elu"], 1)
    for stages in ([], ["tanh"]):
        with pytest.raises(ValueError, match="needs stages"):
            Stepper(stages, 1)
    with pytest.raises(TypeError, match="named holds list and tuple, expected dict and list"):
        Stepper(f32, 1, named=[([], ())])
    with pytest.raises(TypeError, match="watch holds int"):
        Stepper(f32, 1, watch=[3])


@both_dtypes
def test_a_state_that_decays_below_normal_numbers_becomes_zero(dtype):
    kernel = RNNKernel(np.zeros((2, 1), dtype), 0.5 * np.eye(2, dtype=dtype), act="identity")
    stepper = Stepper([kernel], 1)
    stepper.set_states([(np.ones((1, 2), dtype),)])
    x, smallest = np.zeros(1, dtype), np.finfo(dtype).tiny
    for _ in range(1100):
        y = stepper(x)
        assert (y == 0).all() or (y >= smallest).all()
    np.testing.assert_array_equal(y, 0)
