"""The thread pool: the same bits with any number of threads, forks, and callers at once."""

import os
import signal
import threading
import time

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


def processor_time_while_idle(seconds):
    """What all threads of this process use while this one waits."""
    before = time.process_time()
    threading.Event().wait(seconds)
    return time.process_time() - before


@pytest.mark.parametrize("n", [2, 3])
def test_workers_that_find_no_next_job_go_to_sleep(n):
    _kernels.set_num_threads(n)
    work_through(build("lstm"), 16)
    assert processor_time_while_idle(0.5) < 0.05


@pytest.mark.parametrize("n", [2, 3])
def test_calls_far_apart_leave_the_workers_asleep_between_them(n):
    kernel = build("lstm")
    x = np.zeros((64, I), np.float32)
    state = (np.zeros((64, H), np.float32),) * 2
    _kernels.set_num_threads(n)
    idle = 0.0
    for _ in range(10):
        kernel.step(x, *state)
        idle += processor_time_while_idle(0.05)
    assert idle < 0.05  # of 0.5 s; a worker looks for 0.2 ms after each call


@all_kinds
def test_a_row_of_short_calls_has_the_bits_of_one_thread(kind):
    kernel = build(kind)
    rng = np.random.default_rng(4)
    start = tuple(rng.standard_normal((4, H)).astype(np.float32) for _ in range(kernel.n_states))
    x = rng.standard_normal((200, 4, I)).astype(np.float32)
    after = {}
    for n in (1, 2, 3):
        _kernels.set_num_threads(n)
        state = start
        for i in range(len(x)):
            if i % 50 == 49:
                time.sleep(0.002)  # the workers fall asleep, and are called again
            state = kernel.step(x[i], *state)
        after[n] = state
    same(after[2], after[1])
    same(after[3], after[1])


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="no list of threads here")
def test_a_stepper_follows_the_number_of_threads_set_later():
    x = np.zeros((I, 64), np.float32)
    _kernels.set_num_threads(1)
    stepper = _kernels.Stepper([build("lstm")], 64)
    _kernels.set_num_threads(9)  # more than any other test asks for
    stepper(x)
    assert len(os.listdir("/proc/self/task")) >= 9


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
def test_the_pool_leaves_every_thread_the_cores_it_had():
    _kernels.set_num_threads(3)
    kernel = build("lstm")
    cores = os.sched_getaffinity(0)
    for _ in range(5):
        work_through(kernel, 16)
        time.sleep(0.002)
    for thread in os.listdir("/proc/self/task"):
        assert os.sched_getaffinity(int(thread)) == cores


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_threads_share_one_core():
    _kernels.set_num_threads(3)
    kernel = build("gru")
    want = work_through(kernel, 16)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # the child's workers have this one, too
    try:
        assert status_of_child(kernel, want, 20) == 0
    finally:
        os.sched_setaffinity(0, cores)
