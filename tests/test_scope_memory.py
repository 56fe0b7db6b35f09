"""Large arrays that are made inside a scope: their memory, and who owns it."""

import os
import signal
import threading

import numpy as np
import pytest
from numpy._core.multiarray import get_handler_name

import recur
from recur import _kernels

LARGE = 1 << 17  # numbers of float32: half a megabyte
KEEPS = pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="nothing is kept")
X = np.random.default_rng(0).standard_normal((60, 16, 32)).astype(np.float32).T
DY = np.random.default_rng(1).standard_normal((60, 16, 64)).astype(np.float32).T


def window(model):
    def loss(m, x):
        recur.reset(m)
        y = m(x)
        return (y * DY).sum(), y

    return recur.withgradient(loss, model, X)


def arrays_of(result):
    (_, y), (grads, dX) = result
    return [y, dX, grads.flat]


@KEEPS
def test_an_array_of_a_scope_lies_where_one_of_an_earlier_scope_lay():
    with recur.Tape():
        address = np.ones(LARGE, np.float32).ctypes.data
    with recur.Tape():
        assert np.ones(LARGE, np.float32).ctypes.data == address


def test_numpy_has_its_own_memory_again_after_a_scope_also_one_that_failed():
    assert get_handler_name(np.ones(2)) == "default_allocator"
    with pytest.raises(KeyError), recur.Tape():
        assert get_handler_name(np.ones(2)) == "recur"
        raise KeyError
    assert get_handler_name(np.ones(2)) == "default_allocator"


def test_only_the_outermost_change_of_the_memory_is_undone():
    outer = _kernels.arrays_from_here()
    assert _kernels.arrays_from_here() is None  # no longer NumPy's own: it stays
    _kernels.arrays_from(None)
    assert get_handler_name(np.ones(2)) == "recur"
    _kernels.arrays_from(outer)
    assert get_handler_name(np.ones(2)) == "default_allocator"


def test_what_a_scope_returned_stays_as_it_is_while_later_ones_run():
    model = recur.LSTM(32, 64)
    first = arrays_of(window(model))
    before = [a.copy() for a in first]
    for _ in range(4):
        for later in arrays_of(window(model)):
            assert not any(np.may_share_memory(later, a) for a in first)
    for a, b in zip(first, before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_zeros_are_zeros_on_memory_that_held_other_numbers():
    with recur.Tape():
        for n in (5, LARGE, 8 * LARGE):
            np.full(n, 7, np.float32)
            assert not np.zeros(n, np.float32).any()


@pytest.mark.parametrize("sizes", [(3, 9), (9, 3), (9, LARGE), (LARGE, 9), (LARGE, 5 * LARGE)])
def test_an_array_that_is_resized_keeps_its_numbers(sizes):
    small, new = min(sizes), sizes[1]
    with recur.Tape():
        array = np.arange(sizes[0], dtype=np.float32)
        array.resize(new, refcheck=False)
    assert array.shape == (new,)
    np.testing.assert_array_equal(array[:small], np.arange(small, dtype=np.float32))
    assert not array[small:].any()


def test_an_array_of_a_scope_may_be_resized_and_dropped_after_it():
    with recur.Tape():
        array = np.arange(LARGE, dtype=np.float32)
    plain = np.arange(LARGE, dtype=np.float32)
    for a in (array, plain):
        a.resize(3 * LARGE, refcheck=False)
    np.testing.assert_array_equal(array, plain)


def test_threads_that_make_and_drop_large_arrays_at_once_do_not_meet():
    model = recur.LSTM(32, 64)
    want = [a.copy() for a in arrays_of(window(model))]
    wrong = []

    def work():
        own = recur.LSTM(32, 64)
        for name in ("Wi", "Wh", "b"):
            setattr(own.cell, name, recur.value(getattr(model.cell, name)).copy())
        for _ in range(20):
            found = arrays_of(window(own))
            wrong.extend(i for i in range(3) if not np.array_equal(found[i], want[i]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_forked_inside_a_scope_goes_on_with_memory_of_its_own():
    model = recur.LSTM(32, 64)
    want = [a.copy() for a in arrays_of(window(model))]
    with recur.Tape():
        array = np.full(LARGE, 3, np.float32)
        child = os.fork()
        if child == 0:  # no assertion may leave this branch: the child must not go on testing
            signal.alarm(20)
            status = 1
            try:
                array[:] = 4
                del array
                with recur.paused():
                    found = arrays_of(window(model))
                status = 0 if all(map(np.array_equal, found, want)) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (array == 3).all()
    for a, b in zip(arrays_of(window(model)), want, strict=True):
        np.testing.assert_array_equal(a, b)


@KEEPS
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
def test_what_is_kept_is_bounded():
    def resident():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    before = resident()
    with recur.Tape():
        arrays = [np.ones(2**21, np.float32) for _ in range(90)]  # 8 MiB each
        assert resident() - before > 600
        del arrays
    assert resident() - before < 560


def test_a_new_vector_has_the_length_and_dtype_asked_for():
    for n in (0, 7, LARGE):
        vector = _kernels.new_vector(n, np.float64)
        assert vector.shape == (n,) and vector.dtype == np.float64 and vector.flags.owndata
    assert get_handler_name(np.ones(2)) == "default_allocator"
    with pytest.raises(ValueError):
        _kernels.new_vector(-1, np.float64)
    assert get_handler_name(np.ones(2)) == "default_allocator"


# ------------------------------------------------------------------ gradients that are handed over


def test_the_gradient_of_an_input_lies_in_memory_as_the_input_does():
    _, dX = window(recur.LSTM(32, 64))[1]
    assert dX.strides == X.strides and dX.flags.writeable


@pytest.mark.parametrize("make", [np.array, recur.Param], ids=["array", "param"])
def test_gradients_by_one_argument_given_twice_share_no_memory(make):
    x = make(np.arange(4.0))
    a, b = recur.gradient(lambda a, b: (a * b).sum() + a.sum(), x, x)
    assert not np.may_share_memory(a, b)
    a[...] = 9
    assert not (b == 9).any()


def test_the_gradient_of_a_sum_of_many_numbers_is_an_array_of_the_callers():
    x = np.ones((8, 64, 128), np.float32).T
    for f, want in (
        (lambda x: x.sum(), 1),
        (lambda x: -x.sum(axis=2).sum(), -1),
        (lambda x: (-x).sum(), -1),
        (lambda x: (2 - x).sum(), -1),
        (lambda x: (2 - x).mean() * x.size, -1),
        (lambda x: x.sum() + (3 * x).sum() + x.sum(), 5),
    ):
        g = recur.gradient(f, x)
        np.testing.assert_allclose(g, np.full(x.shape, want, np.float32), rtol=1e-6)
        assert g.strides == x.strides and g.flags.writeable and 0 not in g.strides


def test_a_part_added_to_the_gradient_of_a_large_sum_changes_its_own_place_only():
    x = np.ones((8, 64, 128), np.float32).T
    g = recur.gradient(lambda x: x[:, 1].sum() + x.sum() + 2 * x[0].sum(), x)
    want = np.ones(x.shape)
    want[:, 1] += 1
    want[0] += 2
    np.testing.assert_array_equal(g, want)
    with recur.Tape() as tape:
        t = tape.watch(x)
        tape.backward(t.sum())
    t.grad[0, 0, 0] = 7
    assert t.grad[0, 0, 1] == 1 and t.grad.strides == x.strides
