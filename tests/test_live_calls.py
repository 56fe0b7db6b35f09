"""Calls of a layer, a chain, or a stream that a Stepper answers before Python does."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import threading

import numpy as np
import pytest

import recur
from recur import GRU, LSTM, Chain, Dense, Dropout, Recur, Tape
from recur.module import transaction
from recur.streaming import Stream, StreamPool


def layer():
    return LSTM(3, 5, rng=np.random.default_rng(0))


def chain():
    rng = np.random.default_rng(0)
    return Chain(LSTM(3, 5, rng=rng), Dropout(0.5), GRU(5, 4, rng=rng), Dense(4, 2, rng=rng))


def named():
    return Chain(**{f"part{i}": part for i, part in enumerate(chain())})


MODELS = {"layer": layer, "chain": chain, "named": named}
each_model = pytest.mark.parametrize("kind", MODELS)
X = np.random.default_rng(1).normal(size=(20, 3)).astype(np.float32)


def python_calls(call, *args, **named):
    """The names of the Python functions that are entered in a call."""
    names = []

    def note(frame, event, arg):
        if event == "call":
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call(*args, **named)
    finally:
        sys.setprofile(None)
    return names


def running(model, steps=3):
    for x in X[:steps]:
        model(x)
    return model


@each_model
def test_a_running_model_is_stepped_without_a_call_of_python(kind):
    m = running(MODELS[kind]())
    assert python_calls(m, X[0]) == []
    assert python_calls(m, X[0][:, None]) == []
    assert python_calls(m, X[0], **{}) == []
    state = m.state if kind == "layer" else m[0].state  # taken out: the next steps are Python's
    assert state is not None and "__call__" in python_calls(m, X[0])


@pytest.mark.parametrize("B", [1, 4, 8, 30])
@pytest.mark.parametrize("make", [recur.RNN, GRU, LSTM, recur.GRUv3])
def test_a_running_layer_answers_a_sequence_without_python_and_with_the_same_bits(make, B):
    T = 300
    model, twin = (make(3, 5, rng=np.random.default_rng(0)) for _ in range(2))
    for seed in range(4):
        rows = np.random.default_rng(seed).normal(size=(T, B, 3))
        for S in (rows.T, np.ascontiguousarray(rows.T, np.float32), rows.astype(np.float32).T):
            twin.state = twin.state  # ends its stream
            want, got = twin(S), model(S)
            assert np.array_equal(got, want) and got.strides == want.strides
            assert got.dtype == want.dtype and not np.shares_memory(got, model.state[0])
            for either in (model, twin):
                either(S[:, :, 0]), either(S[:, :, 0])
    assert python_calls(model, S) == []
    assert python_calls(model, S[:, :, :0]) == []
    twin(S)
    assert np.array_equal(model.state[0], twin.state[0])
    assert np.array_equal(model.state[-1], twin.state[-1])


def test_a_running_stream_is_stepped_without_a_call_of_python():
    s = running(Stream(chain()))
    out = np.empty(2, np.float32)
    with Tape():
        assert python_calls(s, X[0]) == []
        assert python_calls(s, X[0], out) == []
        assert python_calls(s, X[0], out=out) == []
    assert s.steps == 6
    s.reset()
    assert s.steps == 0


def warns_of_an_infinity(call, x):
    """What a call gives on a number that only float64 holds, if it tells as NumPy was told to."""
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        call(x)
    with pytest.warns(RuntimeWarning, match="overflow encountered in cast"):
        return call(x)


WIDE = X.T.astype(np.float64)
WIDE[1, 5] = -1e39


@each_model
def test_a_running_model_warns_of_a_number_that_becomes_infinite(kind):
    m, twin = MODELS[kind](), MODELS[kind]()
    for x in (WIDE[:, 5], WIDE[:, 5:6], WIDE[:, None], WIDE.copy("F")[:, None]):
        running(m)
        with transaction():  # Python's own
            running(twin)
        assert np.array_equal(warns_of_an_infinity(m, x), warns_of_an_infinity(twin, x))
    running(m)
    for x in (np.full(3, np.inf), np.full(3, float(np.finfo(np.float32).max))):
        assert python_calls(m, x) == []


@each_model
def test_a_running_stream_warns_of_a_number_that_becomes_infinite_before_it_moves(kind):
    s = running(Stream(MODELS[kind]()))
    for wide in (WIDE, WIDE.copy("F"), WIDE[::-1, ::-1], WIDE[:, None]):
        steps = s.steps
        warns_of_an_infinity(s.run, wide)
        assert s.steps == steps + 20
        running(s)
    warns_of_an_infinity(s, WIDE[:, 5])


def test_a_running_pool_warns_of_a_number_that_becomes_infinite_before_it_moves():
    pool = StreamPool(chain())
    for name in "abc":
        pool.open(name)
    slots = pool.slots("a b c".split())
    for _ in range(4):
        pool.step(slots, X[:3].T)
    warns_of_an_infinity(lambda x: pool.step(slots, x), WIDE[:, 4:7])
    assert pool.steps(slots).tolist() == [5, 5, 5]


@each_model
def test_what_python_answers_and_what_it_does_not_are_one_stream(kind):
    m, twin = MODELS[kind](), MODELS[kind]()
    for i, x in enumerate(X):
        if i % 5 == 4:
            assert np.array_equal(m.__call__(x), twin(x))
        elif i % 5 == 3:
            with recur.paused():
                assert np.array_equal(m(x), twin(x))
        else:
            assert np.array_equal(m(x), twin(x))


@each_model
def test_in_a_scope_or_transaction_python_answers_and_after_it_no_more(kind):
    m = running(MODELS[kind]())
    for scope in (Tape, transaction):
        with scope():
            assert "__call__" in python_calls(m, X[0])
        running(m)
        assert python_calls(m, X[0]) == []
        with pytest.raises(RuntimeError, match="on purpose"), scope():
            raise RuntimeError("on purpose")
        assert python_calls(m, X[0]) == []
    with pytest.raises(RuntimeError, match="on purpose"), transaction(), transaction():
        raise RuntimeError("on purpose")
    assert python_calls(m, X[0]) == []


def test_a_scope_left_twice_counts_once():
    m = running(layer())
    tape, other = Tape(), Tape()
    with tape:
        pass
    tape.__exit__(None, None, None)
    with other:
        assert type(m(X[0])) is recur.Tensor


def test_an_open_scope_of_another_thread_changes_no_number():
    m, twin = running(layer()), running(layer())
    opened, done = threading.Event(), threading.Event()

    def other():
        with Tape():
            opened.set()
            done.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    opened.wait(10)
    y = m(X[0])
    done.set()
    thread.join()
    assert type(y) is np.ndarray and np.array_equal(y, twin(X[0]))


def test_a_call_that_a_subclass_overrides_is_made_at_every_step():
    class Doubled(Recur):
        @functools.wraps(Recur.__call__)
        def __call__(self, *xs, **options):
            return 2 * super().__call__(*xs, **options)

    class Plain(Recur):
        pass

    cell = layer().cell
    doubled, plain, m = Doubled(cell), Plain(cell), Recur(cell)
    for x in X:
        y = m(x)
        assert np.array_equal(doubled(x), 2 * y) and np.array_equal(plain(x), y)
    assert python_calls(plain, X[0]) == []


def test_a_call_that_is_put_in_the_place_of_a_class_s_own_is_made(monkeypatch):
    m = running(layer())

    class Sub(Recur):
        pass

    s = running(Sub(m.cell))
    monkeypatch.setattr(Recur, "__call__", lambda self, x: "mine")
    assert m(X[0]) == s(X[0]) == "mine"
    monkeypatch.undo()
    assert m(X[0]).shape == s(X[0]).shape == (5,)


def test_calls_show_their_arguments():
    names = ["lengths", "mask", "truncate_every", "remat"]
    assert list(inspect.signature(layer()).parameters) == ["xs", *names]
    assert list(inspect.signature(Recur.__call__).parameters) == ["self", "xs", *names]
    assert list(inspect.signature(Stream.__call__).parameters) == ["self", "x", "out"]
    assert "One step" in Stream.__call__.__doc__


@each_model
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_running_model_is_pickled_by_every_protocol_and_goes_on(kind, protocol):
    m, twin = running(MODELS[kind]()), running(MODELS[kind]())
    other = pickle.loads(pickle.dumps(m, protocol))
    for x in X:
        y = twin(x)
        assert np.array_equal(other(x), y) and np.array_equal(m(x), y)


@each_model
def test_a_copy_of_a_running_model_goes_on_by_itself(kind):
    m, twin = running(MODELS[kind]()), running(MODELS[kind]())
    other = copy.copy(m)
    running(m)
    for x in X:
        assert np.array_equal(other(x), twin(x))


def test_a_renamed_layer_is_seen():
    m = running(named())
    head = Dense(4, 6)
    m.layers["part3"] = head
    assert m(X[0]).shape == (6,)
    running(m)
    m.layers["more"] = Dense(6, 7)
    assert m(X[0]).shape == (7,)


def test_many_threads_step_one_stream_each_or_are_refused():
    m = running(layer())
    done, refused, wrong = [], [], []

    def work():
        for _ in range(2000):
            try:
                y = m(X[0])
                (done if y.shape == (5,) else wrong).append(1)
            except recur.StateError:
                refused.append(1)

    def look():
        for _ in range(300):
            m.state  # noqa: B018

    threads = [threading.Thread(target=f) for f in (work, work, look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    twin = running(layer())
    for _ in done:
        twin(X[0])
    assert not wrong and len(done) + len(refused) == 4000
    assert all(np.array_equal(a, b) for a, b in zip(m.state, twin.state, strict=True))
