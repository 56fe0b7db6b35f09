"""Copies, pickles, casts; two threads with a copy each; one layer from two threads at once."""

from __future__ import annotations

import copy
import pickle
import threading
import time

import numpy as np
import pytest

import recur
from recur import GRU, LSTM, RNN, START, Chain, Dense, GRUv3, Recur, Tape

LAYERS = {"RNN": RNN, "LSTM": LSTM, "GRU": GRU, "GRUv3": GRUv3}
each_layer = pytest.mark.parametrize("name", LAYERS)
COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "f64": recur.f64,
}
each_way = pytest.mark.parametrize("way", COPIES)


def parts(m):
    return tuple(m.state) if isinstance(m.state, tuple) else (m.state,)


def memory(m):
    """The arrays that a layer owns."""
    inits = m.init if isinstance(m.init, tuple) else (m.init,)
    held = m.__dict__["_state"]
    return [recur.value(x) for x in (*recur.params(m), *inits)] + (
        [] if held is START else [recur.value(x) for x in held]
    )


@each_way
@each_layer
@pytest.mark.parametrize("scope", [False, True])
def test_a_copy_has_the_parameters_and_the_state_and_shares_no_memory(name, way, scope, rng):
    m = LAYERS[name](2, 3, dtype=np.float64, learn_init=True)
    x = rng.normal(size=(2, 4))
    with Tape() if scope else recur.paused():
        m(x)
        other = COPIES[way](m)
        assert all(isinstance(part, np.ndarray) for part in other.__dict__["_state"])
    for a in memory(m):
        for b in memory(other):
            assert not np.shares_memory(a, b)
    for p, q in zip(recur.params(m), recur.params(other), strict=True):
        np.testing.assert_array_equal(p.value, q.value)
    for a, b in zip(parts(m), parts(other), strict=True):
        np.testing.assert_array_equal(a, b)
    before = parts(m)
    y = other(x)
    for a, b in zip(parts(m), before, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(m(x), y)


@each_way
def test_a_copy_at_the_start_is_at_the_start(way):
    m = LSTM(2, 3)
    other = COPIES[way](m)
    assert other.at_start
    m.truncate()
    assert not COPIES[way](m).at_start


def test_shared_parts_stay_shared_within_a_copy():
    cell = recur.RNNCell(2, 3)
    a = Recur(cell, learn_init=True)
    b = Recur(cell, a.init)
    model = [a, b, Chain(a)]
    other = copy.deepcopy(model)
    assert other[0].cell is other[1].cell and other[0].init is other[1].init
    assert other[2][0] is other[0]
    assert other[0].cell is not cell
    assert len(recur.params(other)) == 4


def test_start_is_one_object():
    assert copy.deepcopy(START) is START and copy.copy(START) is START
    assert pickle.loads(pickle.dumps(START)) is START


def test_a_layer_that_was_copied_steps_on_in_a_scope(rng):
    m = Chain(LSTM(2, 3, learn_init=True), Dense(3, 1))
    with Tape() as tape:
        m(np.ones((2, 4)))
        other = copy.deepcopy(m)
        loss = other(np.ones((2, 4))).sum()
        tape.backward(loss)
    assert all(p.grad is None for p in recur.params(m))
    assert not other[0].init.h.grad  # the copied state is a constant: no gradient reached init
    assert other[0].cell.Wh.grad.any()


def test_flat_vectors_rebuild_at_the_start_or_with_the_state(rng):
    m = GRU(2, 3, learn_init=True)
    m(np.ones((2, 4)))
    flat, rebuild = recur.destructure(m)
    fresh = rebuild(flat)
    assert fresh.at_start
    for p, q in zip(recur.params(m), recur.params(fresh), strict=True):
        np.testing.assert_array_equal(p.value, q.value)
    flat, rebuild = recur.destructure(m, keep_state=True)
    kept = rebuild(flat)
    np.testing.assert_array_equal(kept.state, m.state)
    assert not np.shares_memory(kept.__dict__["_state"][0], m.__dict__["_state"][0])


def test_gradient_flows_through_a_flat_vector_into_a_layer(rng):
    m = LSTM(2, 3, learn_init=True, dtype=np.float64)
    for p in recur.params(m):
        p[...] = rng.normal(size=p.shape)
    X = rng.normal(size=(2, 4, 5))
    flat, rebuild = recur.destructure(m)

    def loss(m):
        return (m(X) ** 2).sum() + (m(X[:, :, 0]) ** 2).sum()

    want = recur.gradient(loss, m)
    got = recur.gradient(lambda flat: loss(rebuild(flat)), flat)
    m.reset()
    order = [want[path].ravel("F") for path in recur.named_params(m)]
    np.testing.assert_allclose(got, np.concatenate(order), rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------------- threads


def work(m, xs, results, key):
    try:
        out = []
        for x in xs:
            grads = recur.gradient(lambda m, x=x: (m(x) ** 2).sum(), m)
            out.append([grads[path].copy() for path in recur.named_params(m)])
            out.append([m(x[:, :, 0])])
            for path, p in recur.named_params(m).items():
                p -= 0.01 * grads[path]
        results[key] = out
    except BaseException as error:
        results[key] = error


def test_two_threads_with_a_copy_each_get_the_numbers_of_one_alone(rng):
    model = Chain(LSTM(3, 8, learn_init=True), GRU(8, 8), Dense(8, 2))
    data = [rng.normal(size=(40, 3, 4, 6)).astype(np.float32) for _ in range(2)]
    alone, together = {}, {}
    for i in range(2):
        work(copy.deepcopy(model), data[i], alone, i)
    threads = [
        threading.Thread(target=work, args=(copy.deepcopy(model), data[i], together, i))
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert not isinstance(together[i], BaseException), together[i]
        for a, b in zip(alone[i], together[i], strict=True):
            for x, y in zip(a, b, strict=True):
                np.testing.assert_array_equal(x, y)


def test_one_layer_inside_two_calls_at_once_is_refused():
    inside, go_on = threading.Event(), threading.Event()

    def cell(h, x):
        inside.set()
        assert go_on.wait(10)
        return h + x, h

    m = Recur(cell, 0)
    thread = threading.Thread(target=m, args=(1,))
    thread.start()
    assert inside.wait(10)
    with pytest.raises(recur.StateError, match=r"inside a call already.*copy\.deepcopy\(model\)"):
        m(2)
    go_on.set()
    thread.join()
    assert m.state == 1
    assert m(5) == 1  # usable again


@pytest.mark.parametrize("change", ["assign", "reset", "truncate", "reset_some"])
def test_a_state_changed_during_a_call_of_another_thread_changes_after_it(change):
    inside, go_on, changing = threading.Event(), threading.Event(), threading.Event()

    class Slow(recur.Cell):
        n_in = n_out = 1
        dtype = np.dtype(np.float32)

        def equations(self, x, h):
            inside.set()
            assert go_on.wait(10)
            return (h + x,), h + x

    m = Recur(Slow())

    def act():
        changing.set()
        if change == "assign":
            m.state = np.full((1, 2), 7.0)
        elif change == "reset":
            m.reset()
        elif change == "reset_some":
            m.reset(mask=np.array([True, False]))
        else:
            m.truncate()

    m.state = np.full((1, 2), 3.0)
    call = threading.Thread(target=m, args=(np.ones((1, 2), np.float32),))
    call.start()
    assert inside.wait(10)
    other = threading.Thread(target=act)
    other.start()
    assert changing.wait(10)
    time.sleep(0.05)  # it waits now, or is done
    go_on.set()
    call.join()
    other.join()
    expected = {"assign": [7, 7], "reset": [0], "truncate": [4, 4], "reset_some": [0, 4]}
    np.testing.assert_array_equal(np.ravel(m.state), expected[change])


def test_two_threads_that_step_one_layer_never_mix_up_its_state():
    m = LSTM(16, 64)
    x = np.ones((16, 8), np.float32)
    refused, done = [], []

    def run():
        for _ in range(300):
            try:
                m(x)
                done.append(1)
            except recur.StateError:
                refused.append(1)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) + len(refused) == 1200
    by_one = LSTM(16, 64)
    by_one.cell = m.cell
    for _ in done:
        by_one(x)
    for a, b in zip(m.state, by_one.state, strict=True):
        np.testing.assert_array_equal(a, b)


def test_reading_the_state_from_another_thread_disturbs_no_stream():
    m, twin = (LSTM(16, 64, rng=np.random.default_rng(0)) for _ in range(2))
    x = np.ones((16, 8), np.float32)
    stop = threading.Event()

    def watch():
        while not stop.is_set():
            assert m.state is not None

    threads = [threading.Thread(target=watch) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            np.testing.assert_array_equal(m(x), twin(x))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("scope", [False, True])
def test_a_state_recorded_in_another_thread_s_open_scope_is_refused(scope):
    m = GRU(2, 3)
    outcome = []

    def other():
        with Tape() if scope else recur.paused():
            try:
                m(np.ones((2, 4)))
            except recur.StateError as error:
                outcome.append(str(error))

    with Tape():
        m(np.ones((2, 4)))
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert isinstance(m.state, recur.Tensor)
    assert "open in another thread" in outcome[0]


def test_a_failed_call_frees_the_layer_for_the_next():
    m = GRU(2, 3)
    for _ in range(3):
        with pytest.raises(recur.ShapeError):
            m(np.ones((5, 4)))
    assert m(np.ones((2, 4))).shape == (3, 4)


def test_a_cell_that_steps_its_own_layer_is_refused():
    m = Recur(lambda h, x: (h, m(x)), 0)
    with pytest.raises(recur.StateError, match="or of its own cell"):
        m(1)
