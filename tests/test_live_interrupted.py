"""A state that is read, or a model that is called, in the middle of a call: by a signal's handler,
a finalizer, or a callback of the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time

import numpy as np
import pytest

from recur import GRU, LSTM, Chain, Dense, StateError
from recur.errors import Busy
from recur.streaming import Stream

WORKER = "worker"
X = np.random.default_rng(1).normal(size=(12, 3)).astype(np.float32)


def layer():
    return LSTM(3, 5, rng=np.random.default_rng(0))


def chain():
    rng = np.random.default_rng(0)
    return Chain(LSTM(3, 5, rng=rng), GRU(5, 4, rng=rng), Dense(4, 2, rng=rng))


def named():
    return Chain(**{f"part{i}": part for i, part in enumerate(chain())})


def stream():
    return Stream(chain())


def first(model):
    return model[0] if isinstance(model, Chain) else model


def ends(work, seconds=60):
    """What `work()` returns; fails if it hangs."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()), name=WORKER, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    assert found, "it raised"
    return found[0]


@contextlib.contextmanager
def collections_at_every_chance(finalizer):
    """Inside, garbage is collected at every allocation that counts, and each calls `finalizer`."""
    before = gc.get_threshold()
    gc.callbacks.append(finalizer)
    gc.set_threshold(1, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(finalizer)


def interrupted(call, at, handler):
    """`call()`, with a call of `handler` before its line of number `at`; whether it has so many."""
    left = [at]

    def trace(frame, event, arg):
        if event == "line" and "recur" in frame.f_code.co_filename:
            left[0] -= 1
            if left[0] == 0:
                handler()
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return left[0] <= 0


INTEGERS = np.ones(3, np.int64)  # for Python: the stepper gives the state back


@pytest.mark.parametrize("build", [layer, named])
def test_a_state_read_before_any_line_of_a_call_or_of_another_reader_changes_nothing(build):
    def work():
        for call in (lambda m: m(INTEGERS), lambda m: first(m).state, lambda m: m(X[1])):
            at, more = 0, True
            while more:
                at += 1
                m, twin = build(), build()
                for x in X[:4]:
                    m(x), twin(x)
                more = interrupted(lambda m=m, call=call: call(m), at, lambda m=m: first(m).state)
                call(twin)
                for x in X[:2]:
                    if not np.array_equal(m(x), twin(x)):
                        return f"other numbers after line {at}"
        return at

    assert isinstance(ends(work), int)


def test_a_model_called_while_its_own_thread_reads_its_state_is_refused_at_once():
    def work():
        took, at, more = [], 0, True
        while more:
            at += 1
            m = layer()
            for x in X[:4]:
                m(x)

            def handler(m=m):
                started = time.perf_counter()
                try:
                    m(INTEGERS)
                except StateError:
                    took.append(time.perf_counter() - started)

            more = interrupted(lambda m=m: m.state, at, handler)
        return took

    took = ends(work)
    assert took and max(took) < 0.5


class Interrupted:
    """A lock at whose `acquire` Ctrl-C comes, once it has the lock."""

    def __init__(self, lock):
        self.lock = lock

    def acquire(self, *args, **named):
        self.lock.acquire(*args, **named)
        raise KeyboardInterrupt

    def __getattr__(self, name):
        return getattr(self.lock, name)


@pytest.mark.parametrize("build", [layer, chain])
def test_a_call_that_is_interrupted_as_it_begins_does_not_block_the_next_ones(build):
    m, twin = build(), build()
    for x in X[:2]:
        m(x), twin(x)
    part = first(m)
    lock = part._lock
    object.__setattr__(part, "_lock", Interrupted(lock))
    with pytest.raises(KeyboardInterrupt):
        m(INTEGERS)
    with pytest.raises(KeyboardInterrupt):
        part.hand_over(None)
    assert not lock._is_owned()
    object.__setattr__(part, "_lock", lock)
    for x in X[2:]:
        assert np.array_equal(m(x), twin(x))


@pytest.mark.parametrize("build", [layer, chain, named, stream])
@pytest.mark.parametrize("act", ["call", "state", "set", "reset"])
def test_a_model_that_a_collection_of_garbage_calls_does_not_hang(build, act):
    m = build()
    for x in X[:4]:
        m(x)
    calls, inside = [], []

    def finalizer(phase, info):
        if threading.current_thread().name == WORKER and not inside:
            inside.append(True)
            calls.append(1)
            with contextlib.suppress(StateError, Busy):  # it comes in the middle of another call
                m(X[0])
            inside.clear()

    def work():
        keep, part = [], first(m)
        for i in range(100):
            keep.append([])
            if act == "call" or i % 5:
                m(X[i % len(X)])
            elif act == "state":
                part.state  # noqa: B018
            elif act == "set":
                part.state = part.state
            else:
                part.reset()
        return len(calls)

    with collections_at_every_chance(finalizer):
        assert ends(work)
    assert m(X[0]).shape == (5 if build is layer else 2,)


@pytest.mark.parametrize("build", [layer, stream])
def test_a_model_that_a_collection_calls_while_a_sequence_is_run_does_not_hang(build):
    S = X.T[:, None, :]
    calls, inside, models = [], [], []

    def finalizer(phase, info):
        if threading.current_thread().name == WORKER and not inside:
            inside.append(True)
            calls.append(1)
            with contextlib.suppress(StateError, Busy):  # it comes in the middle of another call
                for m in models[-1:]:
                    run(m, S)
            inside.clear()

    def run(m, S):
        return m.run(S) if isinstance(m, Stream) else m(S)

    def work():
        keep = []
        for _ in range(30):
            models.append(build())
            for x in X[:4]:  # the next run is its stepper's first
                models[-1](x)
            for _ in range(3):
                keep.append([])
                run(models[-1], S)
        return len(calls)

    with collections_at_every_chance(finalizer):
        assert ends(work)
    assert run(models[-1], S).shape == (5 if build is layer else 2, 1, len(X))
