"""Streams that outlive their pool and their process.  S numbers: see docs/how-to/streams.md."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from streaming_models import models

import recur
from recur import LSTM, Busy, Conflict, Expired, FormatError, StreamError, UnknownStream
from recur.streaming import Flush, MemoryStore, RedisStore, SQLiteStore, Stream, StreamPool


class Clock:
    """A time that the test sets."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    server = shutil.which("redis-server")
    if server is None or importlib.util.find_spec("redis") is None:
        pytest.skip("needs redis-server and the package redis")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(params=["memory", "sqlite", "redis"])
def store(request, tmp_path, clock):
    if request.param == "memory":
        made = MemoryStore(clock=clock)
    elif request.param == "sqlite":
        made = SQLiteStore(tmp_path / "streams.db", clock=clock)
    else:
        url = request.getfixturevalue("redis_url")
        made = RedisStore(url, prefix=f"{request.node.name}:", clock=clock)
    yield made
    made.close()


# ---------------------------------------------------------------- the store itself


def test_a_store_refuses_what_an_older_owner_saves(store, clock):
    first = store.claim("a")
    assert first.snapshot == b"" and store.keys() == ["a"]
    assert store.save({"a": (first.epoch, b"one")}) == set()
    clock.now += 5
    second = store.claim("a")
    assert second.epoch > first.epoch and second.snapshot == b"one"
    assert store.save({"a": (first.epoch, b"stale"), "never": (1, b"x")}) == {"a", "never"}
    assert store.load("a").snapshot == b"one" and store.load("never") is None
    assert store.save({"a": (second.epoch, b"two")}) == set()
    record = store.load("a")
    assert (record.epoch, record.snapshot, record.saved) == (second.epoch, b"two", 1005.0)
    assert not store.delete("a", first.epoch) and store.delete("a", second.epoch)
    assert store.load("a") is None and store.keys() == []


def test_a_store_forgets_what_is_old(store, clock):
    for name in ("old", "new"):
        store.save({name: (store.claim(name).epoch, b"x")})
        clock.now += 10
    assert store.purge(1005.0) == ["old"] and store.keys() == ["new"]
    assert store.purge(0.0) == []


def test_epochs_never_repeat_in_a_file_even_for_a_stream_that_was_deleted(tmp_path):
    with_file = SQLiteStore(tmp_path / "s.db")
    first = with_file.claim("a").epoch
    with_file.delete("a", first)
    assert with_file.claim("a").epoch > first
    with_file.close()


def test_threads_and_connections_share_a_file(tmp_path):
    stores = [SQLiteStore(tmp_path / "s.db") for _ in range(3)]
    epochs = []

    def work(store):
        for _ in range(30):
            epochs.append(store.claim("a").epoch)

    threads = [threading.Thread(target=work, args=(s,)) for s in stores * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(epochs)) == 180
    for one in stores:
        one.close()


def test_the_redis_store_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ImportError, match=r'pip install "recur\[redis\]"'):
        RedisStore("redis://127.0.0.1:1/0")


# ---------------------------------------------------------------- pools with a store


def stepped(model, X, split):
    """What one stream that steps through X answers after `split`."""
    stream = Stream(model)
    stream.run(X[:, :split])
    return stream.run(X[:, split:])


def test_s8_a_stream_goes_on_in_another_pool_where_it_was_flushed(store, rng):
    model = models()["head"]
    X = rng.standard_normal((5, 3, 10)).astype(np.float32)
    names = ["a", "b", "c"]
    first = StreamPool(model, store=store)
    for name in names:
        first.open(name)
    for t in range(5):
        first.step(names, X[..., t], numbers=[t + 1] * 3)
    second = StreamPool(model, store=store)
    assert "a" in second and len(second) == 0
    again = second.step(names, X[..., 4], numbers=[5] * 3)  # sent again: the stored answer
    assert list(second.steps(names)) == [5, 5, 5]
    y = second.step(names, X[..., 5], numbers=[6] * 3)
    for i in range(3):
        expected = stepped(model, X[:, i], 4)
        assert np.array_equal(again[:, i], expected[:, 0])
        assert np.array_equal(y[:, i], expected[:, 1])


def test_s8_no_answer_is_given_before_its_step_is_written(rng):
    """A store that fails once: the step sent again is written before its answer is given."""
    model, store = models()["head"], MemoryStore()
    pool = StreamPool(model, store=store)
    pool.open("a")
    x, save = np.ones((5, 1), np.float32), store.save

    def fail(records):
        raise OSError("no space left on device")

    for again in (lambda n: pool.step(["a"], x, numbers=[n]), lambda n: pool.replay("a", x, n)):
        number = int(pool.steps(["a"])[0]) + 1
        store.save = fail
        for _ in range(2):
            with pytest.raises(OSError, match="no space"):
                pool.step(["a"], x, numbers=[number])
        store.save = save
        assert again(number) is not None
        other = StreamPool(model, store=MemoryStore())
        other.restore({"a": store.load("a").snapshot})
        assert other.steps(["a"]) == [number] == pool.steps(["a"])


def test_s7_the_older_owner_drops_its_copy_and_says_so(store, rng):
    model = models()["head"]
    x = np.ones((5, 1), np.float32)
    first = StreamPool(model, store=store)
    first.open("a")
    first.step(["a"], x)
    second = StreamPool(model, store=store)
    second.step(["a"], x)
    with pytest.raises(Conflict, match="'a' went on in another pool"):
        first.step(["a"], x)
    assert len(first) == 0
    # The ring turns back: the first pool reads what the second has written.
    y = first.step(["a"], x, numbers=[3])
    assert np.array_equal(y, stepped(model, np.ones((5, 3)), 2))
    with pytest.raises(Conflict):
        second.step(["a"], x)


def test_s7_opening_a_stored_stream_is_a_conflict_unless_it_is_taken_over(store, rng):
    model = models()["head"]
    first, second = StreamPool(model, store=store), StreamPool(model, store=store)
    first.open("a", tag=b"1" * 16)
    first.step(["a"], np.ones((5, 1)))
    with pytest.raises(Conflict, match="is in the store"):
        second.open("a")
    with pytest.raises(Conflict, match="'a' is open already"):
        first.fork("a", "a")
    epoch = second.open("a", takeover=True, tag=b"2" * 16)
    assert second.steps(["a"]) == [1] and second.tag("a") == b"2" * 16
    assert store.load("a").epoch == epoch
    with pytest.raises(Conflict, match="another pool"):
        first.step(["a"], np.ones((5, 1)))


def test_a_closed_stream_is_gone_from_the_store(store):
    first, second = [StreamPool(models()["head"], store=store) for _ in range(2)]
    first.open("a")
    first.close("a")
    with pytest.raises(UnknownStream):
        second.step(["a"], np.ones((5, 1)))
    second.open("a")
    second.evict(["a"])
    first.close("a")
    assert store.keys() == []
    with pytest.raises(StreamError, match="stream 3 is a int"):
        first.open(3)


def test_flush_every_n_steps_and_every_t_seconds(store, clock, rng):
    model = models()["head"]
    x = np.ones((5, 1), np.float32)

    def stored(name):
        probe = StreamPool(model, store=MemoryStore())
        probe.restore({name: store.load(name).snapshot})
        return int(probe.steps([name])[0])

    pool = StreamPool(model, store=store, flush=Flush(steps=3), clock=clock)
    pool.open("a")
    seen = []
    for _ in range(7):
        pool.step(["a"], x)
        seen.append(stored("a"))
    assert seen == [0, 0, 3, 3, 3, 6, 6]
    pool.flush()
    assert stored("a") == 7
    slow = StreamPool(model, store=store, flush=Flush(steps=None, seconds=10), clock=clock)
    slow.open("b")
    seen = []
    for _ in range(5):
        slow.step(["b"], x)
        seen.append(stored("b"))
        clock.now += 4
    assert seen == [0, 0, 0, 4, 4]


def test_s6_idle_streams_move_to_the_store_and_come_back_by_themselves(store, clock, rng):
    model = models()["head"]
    X = rng.standard_normal((5, 2, 10)).astype(np.float32)
    events = []
    pool = StreamPool(
        model, store=store, flush=Flush(steps=None), idle=60, clock=clock, on_idle=events.append
    )
    pool.open("a")
    pool.open("b")
    for t in range(4):
        pool.step(["a", "b"], X[..., t])
    for t in range(4, 8):
        clock.now += 40
        pool.step(["b"], X[:, 1:, t])
    assert [(e.id, e.step, e.kept) for e in events] == [("a", 4, True)]
    assert pool.ids() == ["b"] and "a" in pool
    y = pool.step(["a"], X[:, :1, 4], numbers=[5])
    assert np.array_equal(y, stepped(model, X[:, 0], 4)[:, :1])
    assert set(pool.ids()) == {"a", "b"}


def test_s6_without_a_store_expiry_is_an_event_with_the_last_step(clock):
    events = []
    pool = StreamPool(LSTM(3, 4), idle=60, clock=clock, on_idle=events.append)
    for name in ("a", "b"):
        pool.open(name)
        pool.step([name], np.ones((3, 1)))
    clock.now += 59
    pool.step(["b"], np.ones((3, 1)))  # the clock starts at the last finished step
    clock.now += 10
    assert [e.id for e in pool.reap()] == ["a"] and pool.reap() == []
    assert [(e.id, e.step, e.kept) for e in events] == [("a", 1, False)]
    with pytest.raises(Expired, match="'a' expired after step 1") as error:
        pool.step(["a"], np.ones((3, 1)))
    assert error.value.last_step == 1 and error.value.at == clock.now
    with pytest.raises(UnknownStream):
        pool.step(["never"], np.ones((3, 1)))
    pool.open("a")
    assert pool.steps(["a", "b"]).tolist() == [0, 2]


def test_s6_reaping_looks_only_at_streams_whose_time_may_have_come(clock):
    pool = StreamPool(LSTM(1, 1), idle=160, clock=clock)
    for i in range(160):
        pool.open(i)
        clock.now += 1
    looked = []
    pool._depart = lambda id, step, now: looked.append(id)
    watch = pool._watch
    pool._watch = lambda slot, last: (looked.append(slot), watch(slot, last))
    clock.now += 21
    pool.reap()
    assert 10 <= len(looked) <= 32, "one or two ticks of the sixteen"
    clock.now += 1
    del looked[:]
    pool.reap()
    assert len(looked) <= 16


def test_s6_a_slot_given_to_another_stream_does_not_let_that_one_expire(clock):
    pool = StreamPool(LSTM(1, 1), capacity=1, idle=100, clock=clock)
    pool.open("a")
    clock.now += 90
    pool.close("a")
    pool.open("b")
    clock.now += 50
    assert pool.reap() == [] and pool.ids() == ["b"]
    clock.now += 70
    assert [e.id for e in pool.reap()] == ["b"]


def test_s6_time_to_live_in_the_store(store, clock):
    model = models()["head"]
    pool = StreamPool(model, store=store, idle=60, ttl=600, clock=clock)
    pool.open("a")
    pool.step(["a"], np.ones((5, 1)))
    clock.now += 100
    assert pool.reap()[0].kept
    pool.step(["a"], np.ones((5, 1)))
    clock.now += 100
    pool.reap()
    clock.now += 590
    with pytest.raises(Expired, match="after step 2") as error:
        pool.step(["a"], np.ones((5, 1)))
    assert error.value.last_step == 2
    pool.open("a")
    assert pool.steps(["a"]) == [0]


def test_s6_a_stream_that_is_stepped_but_seldom_written_does_not_expire(store, clock, rng):
    model, x = LSTM(3, 4, rng=rng), np.ones((3, 1), np.float32)
    lazy = Flush(steps=None)
    pool = StreamPool(model, store=store, flush=lazy, idle=60, ttl=600, clock=clock)
    pool.open("a"), pool.open("old")
    for _ in range(100):  # 50 minutes
        clock.now += 30
        y = pool.step(["a"], x)
    clock.now += 100
    assert [departure.id for departure in pool.reap()] == ["a"]
    assert pool.steps(["a"]).tolist() == [100], "it comes back where it was"
    expected = Stream(model).run(np.ones((3, 100), np.float32))
    assert np.array_equal(y[:, 0], expected[:, -1])
    assert store.keys() == ["a"], "what is old goes"


def test_s6_a_stream_that_cannot_come_back_into_a_full_pool_is_busy(store, clock):
    pool = StreamPool(models()["head"], store=store, limit=1)
    pool.open("a")
    pool.evict(["a"])
    pool.open("b")
    epoch = store.load("a").epoch
    with pytest.raises(Busy):
        pool.step(["a"], np.ones((5, 1)))
    assert store.load("a").epoch == epoch
    pool.evict(["b"])
    pool.step(["a"], np.ones((5, 1)))
    with pytest.raises(ValueError, match="no store"):
        StreamPool(LSTM(1, 1)).evict([])


def test_s16_a_stored_snapshot_of_other_weights_or_another_key_is_refused(store):
    model = models()["head"]
    pool = StreamPool(model, store=store, key=b"k")
    pool.open("a")
    epoch = store.load("a").epoch
    for other in (
        StreamPool(model, store=store),
        StreamPool(models()["GRU"], store=store, key=b"k"),
    ):
        with pytest.raises(FormatError):
            other.step(["a"], np.ones((5, 1)))
    assert store.load("a").epoch == epoch, "a refused snapshot is not claimed"
    StreamPool(model, store=store, key=b"k").step(["a"], np.ones((5, 1)))


def test_s16_stored_streams_go_on_with_new_weights_where_that_is_asked_for(store, rng):
    """A rolling update: replicas with the old weights hand over to those with the new ones."""
    X = rng.standard_normal((5, 1, 6)).astype(np.float32)
    model, new = models()["head"], models()["head"]
    for p in recur.params(new):
        p[...] = np.asarray(p) * 0.9
    old = StreamPool(model, store=store)
    old.open("a")
    for t in range(3):
        old.step(["a"], X[..., t])
    state = old.state(["a"])
    with pytest.raises(FormatError, match="allow_weights_change=True"):
        StreamPool(new, store=store).step(["a"], X[..., 3])
    pool = StreamPool(new, store=store, allow_weights_change=True)
    twin = Stream(new)
    twin.state = state
    assert np.array_equal(pool.step(["a"], X[..., 3], numbers=[4])[:, 0], twin(X[:, 0, 3]))
    with pytest.raises(Conflict):
        old.step(["a"], X[..., 3])  # the old replica has lost it
    with pytest.raises(FormatError, match="of another model"):  # other layers are never accepted
        StreamPool(models()["two layers"], store=store, allow_weights_change=True).tag("a")


def test_the_sqlite_file_says_what_is_wrong_with_it(tmp_path):
    (tmp_path / "s.db").write_bytes(b"no database" * 100)
    with pytest.raises(sqlite3.DatabaseError):
        SQLiteStore(tmp_path / "s.db")
