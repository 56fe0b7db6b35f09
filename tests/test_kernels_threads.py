"""The thread pool: the same bits with any number of threads, forks, and callers at once."""

import os
import signal
import threading

import numpy as np
import pytest

from recur import _kernels

KERNELS = {
    "rnn": (_kernels.RNNKernel, 1, 1),
    "lstm": (_kernels.LSTMKernel, 4, 4),
    "gru": (_kernels.GRUKernel, 3, 3),
    "gruv3": (_kernels.GRUv3Kernel, 3, 2),
}
all_kinds = pytest.mark.parametrize("kind", list(KERNELS))
T, I, H = 12, 70, 400  # noqa: E741  (large enough for every call to use the pool, at batch 1 and 16)


@pytest.fixture(autouse=True)
def restored_threads():
    before = _kernels.get_num_threads()
    yield
    _kernels.set_num_threads(before)


def build(kind, dtype=np.float32):
    make, gates, gates_h = KERNELS[kind]
    rng = np.random.default_rng(1)
    w = lambda *shape: (rng.standard_normal(shape) / np.sqrt(H)).astype(dtype)  # noqa: E731
    options = {"Whh": w(H, H)} if kind == "gruv3" else {}
    return make(w(gates * H, I), w(gates_h * H, H), w(gates * H), **options)


def work_through(kernel, B):
    """All that a window computes, as a flat list of arrays."""
    rng = np.random.default_rng(B)
    X = rng.standard_normal((T, B, I)).astype(kernel.dtype)
    state = tuple(rng.standard_normal((B, H)).astype(kernel.dtype) for _ in range(kernel.n_states))
    dY = rng.standard_normal((T, B, H)).astype(kernel.dtype)
    lengths = rng.integers(0, T + 1, B)
    found = [*kernel.step(X[0], *state), kernel.sequence(X, *state, lengths=lengths)[0]]
    Y, last, saved = kernel.sequence_save(X, *state)
    found += [Y, *last]
    dX, dstate, operands = kernel.sequence_backward(saved, X, dY, state, need_dx=True, keep=False)
    found += [dX, *dstate]
    for operand in operands.values():
        if isinstance(operand[0], str):
            found.append(operand[1])
        elif len(operand) == 2:
            dg, x = operand
            out = np.empty((dg.shape[1], x.shape[1]), kernel.dtype)
            _kernels.weight_gradient(dg, x, out, accumulate=False)
            found.append(out)
    return found


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@all_kinds
@pytest.mark.parametrize("B", [1, 16])
def test_the_number_of_threads_changes_no_bit(kind, B):
    kernel = build(kind)
    _kernels.set_num_threads(1)
    alone = work_through(kernel, B)
    for n in (2, 3, 5):
        _kernels.set_num_threads(n)
        same(work_through(kernel, B), alone)


@all_kinds
def test_a_stepper_may_use_the_pool(kind):
    kernel = build(kind)
    x = np.random.default_rng(3).standard_normal((I, 64)).astype(np.float32)
    steps = {}
    for n in (1, 3):
        _kernels.set_num_threads(n)
        stepper = _kernels.Stepper([kernel, "tanh"], 64)
        steps[n] = [stepper(x) for _ in range(3)]
    same(steps[3], steps[1])


def test_threads_may_share_a_kernel():
    kernel = build("lstm")
    _kernels.set_num_threads(2)
    want = {B: work_through(kernel, B) for B in (1, 3, 16)}
    errors = []

    def run(B):
        try:
            for _ in range(5):
                same(work_through(kernel, B), want[B])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(B,)) for B in (1, 3, 16, 16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_the_first_backwards_of_a_kernel_may_come_at_once():
    for _ in range(5):
        kernel, found = build("gru"), []
        threads = [
            threading.Thread(target=lambda k=kernel, f=found: f.append(work_through(k, 2)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for other in found[1:]:
            same(other, found[0])
        assert len(found) == 4


def status_of_child(kernel, want, seconds):
    """0 if a forked child works through the kernel with the same numbers, within `seconds`."""
    child = os.fork()
    if child == 0:  # no assertion may leave this branch: the child must not go on testing
        signal.alarm(seconds)
        status = 1
        try:
            same(work_through(kernel, 16), want)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_starts_its_own_workers():
    _kernels.set_num_threads(3)
    kernel = build("lstm")
    want = work_through(kernel, 16)
    assert status_of_child(kernel, want, 20) == 0
    same(work_through(kernel, 16), want)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_forked_in_the_middle_of_another_thread_s_call_works():
    _kernels.set_num_threads(2)
    kernel = build("lstm")
    want = work_through(kernel, 16)
    ended, failed = threading.Event(), []

    def call():
        while not ended.is_set():
            work_through(kernel, 16)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        for i in range(12):
            ended.wait(0.003 * (i % 5))
            failed.append(status_of_child(kernel, want, 30))
    finally:
        ended.set()
        thread.join()
    assert not any(failed), failed


def test_idle_workers_use_no_time():
    _kernels.set_num_threads(3)
    work_through(build("lstm"), 16)
    waited = threading.Event()
    before = os.times()
    waited.wait(0.3)
    after = os.times()
    assert (after.user + after.system) - (before.user + before.system) <= 0.1
