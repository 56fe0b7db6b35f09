"""The engine of the server: how steps of many clients become steps of one pool."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from serving import model

from recur import LSTM, Busy, Chain, Conflict, FormatError, ShapeError, Stream
from recur.serve.client import History
from recur.serve.engine import Engine, tag_of
from recur.serve.options import Rate
from recur.serve.protocol import (
    Stopping,
    WrongToken,
    as_list,
    describe_error,
    pack_frame,
    raise_error,
    unpack_frame,
)
from recur.streaming import Flush, MemoryStore, SQLiteStore, StreamPool

X = np.sin(np.arange(5 * 40).reshape(5, 40)).astype(np.float32)


class Gate:
    """A layer at which the pool's thread waits while it is shut."""

    def __init__(self):
        self.open = threading.Event()
        self.open.set()

    def __call__(self, y):
        assert self.open.wait(20)
        return y


def run(work, pool=None, **options):
    """Runs `work(engine)` with an engine that is started and stopped."""

    async def whole():
        engine = Engine(StreamPool(model()) if pool is None else pool, **options)
        engine.start()
        try:
            await work(engine)
        finally:
            await engine.stop()

    asyncio.run(whole())


async def opened(engine, n):
    names = [f"s{i}" for i in range(n)]
    return names, {name: tag_of(await engine.open(name)) for name in names}


def test_s10_what_arrives_while_a_step_runs_goes_into_the_next():
    gate = Gate()

    async def work(engine):
        names, tags = await opened(engine, 50)
        gate.open.clear()
        futures = [engine.submit(names[0], X[:, 0], 1, tags[names[0]])]
        await asyncio.sleep(0.05)  # it is under way
        futures += [engine.submit(n, X[:, 0], 1, tags[n]) for n in names[1:]]
        await asyncio.sleep(0.05)
        assert not any(f.done() for f in futures)
        gate.open.set()
        answers = await asyncio.gather(*futures)
        assert [batch.size for batch in engine.recent] == [1, 49]
        assert all(a.number == 1 and np.array_equal(a.y, answers[0].y) for a in answers)

    run(work, StreamPool(Chain(LSTM(5, 4), gate)))


def test_s10_a_step_waits_for_others_no_longer_than_it_is_told():
    async def work(engine):
        names, tags = await opened(engine, 3)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        first = engine.submit(names[0], X[:, 0], None, tags[names[0]])
        await asyncio.sleep(0.05)
        others = [engine.submit(n, X[:, 0], None, tags[n]) for n in names[1:]]
        await asyncio.gather(first, *others)
        assert loop.time() - begun >= 0.2
        assert [batch.size for batch in engine.recent] == [3]

    run(work, max_wait=0.2)


def threads_of_steps(pool):
    """Where each step of the pool is taken from now on: a list that grows."""
    found, step = [], pool.step

    def noted(*args, **more):
        found.append(threading.current_thread())
        return step(*args, **more)

    pool.step = noted
    return found


@pytest.mark.parametrize(
    ("kind", "short"),
    [("no store", True), ("memory", True), ("file", False), ("function", False), ("large", False)],
)
def test_a_step_is_taken_in_the_loop_if_it_is_short_and_waits_for_nothing(kind, short, tmp_path):
    store = {"memory": MemoryStore(), "file": SQLiteStore(tmp_path / "streams.db")}.get(kind)
    own = Chain(LSTM(5, 4), lambda y: y) if kind == "function" else model()
    pool = StreamPool(own, store=store)
    threads = threads_of_steps(pool)

    async def work(engine):
        names, tags = await opened(engine, 1)
        for t in range(4):
            if t and kind == "large":
                engine._seconds = 1.0
            await engine.submit(names[0], X[:, t], t + 1, tags[names[0]])

    run(work, pool)
    main = threading.main_thread()
    # How long one takes is known from the first on.
    assert [thread is main for thread in threads] == [False, *[short] * 3]


def test_many_streams_step_in_the_loop_some_at_a_time_and_few_slow_ones_in_the_thread():
    pool = StreamPool(model())
    threads = threads_of_steps(pool)

    async def work(engine):
        names, tags = await opened(engine, 150)
        for t, seconds in enumerate((None, 5e-3 / 100, 5e-3 / 10)):
            engine._seconds = seconds
            asked = [engine.submit(n, X[:, t], t + 1, tags[n]) for n in names]
            answers = await asyncio.gather(*asked)
            expected = Stream(model()).run(X[:, : t + 1])[:, t]
            assert all(np.array_equal(a.y, expected) for a in answers)
        sizes = [batch.size for batch in engine.recent]
        assert sizes[0] == sizes[-1] == 150  # in the thread
        assert len(sizes) > 3 and 64 <= sizes[1] <= 100 and sum(sizes) == 450

    run(work, pool)
    main = threading.main_thread()
    assert [thread is main for thread in threads] == [False, *[True] * (len(threads) - 2), False]


def test_a_step_does_not_overtake_what_the_pools_thread_does_also_if_nobody_waits_for_it():
    pool = StreamPool(model())
    threads = threads_of_steps(pool)
    entered, go_on = threading.Event(), threading.Event()

    def slow():
        entered.set()
        assert go_on.wait(20)
        pool.reset(["s0"])

    async def work(engine):
        names, tags = await opened(engine, 1)
        for t in range(2):
            await engine.submit(names[0], X[:, t], t + 1, tags[names[0]])
        call = asyncio.create_task(engine.call(slow))
        while not entered.is_set():
            await asyncio.sleep(0.001)
        call.cancel()
        answer = engine.submit(names[0], X[:, 0], None, tags[names[0]])
        await asyncio.sleep(0.05)
        assert call.cancelled() and not answer.done()
        go_on.set()
        assert (await answer).number == 1, "the stream was not reset before"
        await engine.submit(names[0], X[:, 1], 2, tags[names[0]])

    run(work, pool)
    main = threading.main_thread()
    assert [thread is main for thread in threads] == [False, True, False, True]


def test_the_steps_of_one_stream_follow_one_another_and_others_have_their_turn():
    async def work(engine):
        names, tags = await opened(engine, 2)
        a, b = names
        futures = [engine.submit(a, X[:, t], t + 1, tags[a]) for t in range(20)]
        other = engine.submit(b, X[:, 0], 1, tags[b])
        answers = await asyncio.gather(*futures)
        assert other.done(), "the other stream waited for all twenty"
        expected = Stream(model()).run(X[:, :20])
        assert np.array_equal(np.stack([y.y for y in answers], -1), expected)

    run(work, max_batch=1)


def test_too_many_waiting_steps_are_busy_and_what_does_not_fit_is_refused_at_once():
    gate = Gate()

    async def work(engine):
        names, tags = await opened(engine, 1)
        (a,) = names
        gate.open.clear()
        futures = [engine.submit(a, X[:, 0], 1, tags[a])]
        await asyncio.sleep(0.05)
        futures += [engine.submit(a, X[:, t], t + 1, tags[a]) for t in (1, 2)]
        with pytest.raises(Busy, match="2 steps waiting"):
            engine.submit(a, X[:, 3], 4, tags[a])
        with pytest.raises(ShapeError, match="3 features"):
            engine.submit("b", X[:3, 0], 1, tags[a])
        gate.open.set()
        await asyncio.gather(*futures)
        await engine.submit(a, X[:, 3], 4, tags[a])

    run(work, StreamPool(Chain(LSTM(5, 4), gate)), depth=2)


def test_one_bad_step_in_a_batch_harms_no_other():
    async def work(engine):
        names, tags = await opened(engine, 4)
        right = [engine.submit(n, X[:, 0], 1, tags[n]) for n in names[:3]]
        wrong = [
            engine.submit(names[3], X[:, 0], 1, b"?" * 16),
            engine.submit("nobody", X[:, 0], 1, b"?" * 16),
        ]
        answers = await asyncio.gather(*right, *wrong, return_exceptions=True)
        expected = Stream(model())(X[:, 0])
        assert all(np.array_equal(a.y, expected) for a in answers[:3])
        assert [type(e).__name__ for e in answers[3:]] == ["WrongToken", "UnknownStream"]

    run(work)


def test_a_client_that_gave_up_harms_no_other():
    gate = Gate()

    async def work(engine):
        names, tags = await opened(engine, 3)
        gate.open.clear()
        futures = [engine.submit(n, X[:, 0], 1, tags[n]) for n in names]
        futures[1].cancel()
        gate.open.set()
        await asyncio.gather(futures[0], futures[2])
        again = await engine.submit(names[1], X[:, 0], 1, tags[names[1]])
        assert again.number == 1  # it was taken, and its answer is stored

    run(work, StreamPool(Chain(LSTM(5, 4), gate)))


def test_stopping_finishes_the_running_step_refuses_the_rest_and_writes_all():
    gate, store = Gate(), MemoryStore()
    net = Chain(LSTM(5, 4), gate)

    async def work():
        engine = Engine(StreamPool(net, store=store, flush=Flush(steps=None)))
        engine.start()
        names, tags = await opened(engine, 2)
        gate.open.clear()
        running = engine.submit(names[0], X[:, 0], 1, tags[names[0]])
        await asyncio.sleep(0.05)
        waiting = engine.submit(names[1], X[:, 0], 1, tags[names[1]])
        stop = asyncio.create_task(engine.stop())
        await asyncio.sleep(0.05)
        with pytest.raises(Stopping):
            engine.submit(names[0], X[:, 1], 2, tags[names[0]])
        gate.open.set()
        await stop
        assert (await running).number == 1
        with pytest.raises(Stopping):
            await waiting

    asyncio.run(work())
    assert list(StreamPool(net, store=store).steps(["s0", "s1"])) == [1, 0]


def test_s19_a_stream_that_wanders_between_owners_is_never_forked():
    """Every step goes to another of two replicas, which write every third step only."""
    store = MemoryStore()

    async def work():
        engines = [Engine(StreamPool(model(), store=store, flush=Flush(steps=1))) for _ in range(2)]
        for engine in engines:
            engine.start()
        tag = tag_of(await engines[0].open("a"))
        expected = Stream(model()).run(X)
        turns = [0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1, 1, 0, 0, 1, 0]
        for t, turn in enumerate(turns):
            answer = await engines[turn].submit("a", X[:, t], t + 1, tag)
            assert answer.number == t + 1 and np.array_equal(answer.y, expected[:, t])
            if t % 3 == 2:  # sent again to the other: the stored answer
                again = await engines[1 - turn].submit("a", X[:, t], t + 1, tag)
                assert np.array_equal(again.y, expected[:, t])
        # Without a number nothing proves that the step is the next: the older owner must refuse.
        await engines[0].submit("a", X[:, 20], None, tag)
        await engines[1].submit("a", X[:, 17], len(turns) + 2, tag)
        with pytest.raises(Conflict):
            await engines[0].submit("a", X[:, 20], None, tag)
        # A takeover at one is known at the other.
        new = tag_of(await engines[0].take_over("a", _token(engines, tag)))
        with pytest.raises(WrongToken):
            await engines[1].submit("a", X[:, 0], len(turns) + 3, tag)
        await engines[1].submit("a", X[:, 0], len(turns) + 3, new)
        for engine in engines:
            await engine.stop()

    tokens = {}

    def _token(engines, tag):
        return tokens["a"]

    opening = Engine.open

    async def remember(self, id, proposal=None):
        tokens[id] = await opening(self, id, proposal)
        return tokens[id]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "open", remember)
        asyncio.run(work())


def test_tokens_that_could_be_guessed_are_refused():
    async def work(engine):
        for token in ("", "x" * 31, "x" * 257):
            with pytest.raises(FormatError, match="characters, expected 32 to 256"):
                await engine.open("a", token)
        assert await engine.open("a", "x" * 32) == "x" * 32

    run(work)


def test_a_bucket_gives_its_burst_at_once_and_then_its_rate():
    bucket = Rate(10.0, 3, now=0.0)
    assert [bucket.take(0.0) for _ in range(3)] == [0.0] * 3
    assert bucket.take(0.0) == pytest.approx(0.1)
    assert bucket.take(0.1) == 0.0 and bucket.take(0.1) > 0
    assert not bucket.full(0.1) and not bucket.full(0.3) and bucket.full(100.0)
    bucket.take(100.0)
    assert [bucket.take(100.0) for _ in range(2)] == [0.0] * 2 and bucket.take(100.0) > 0


def test_frames_and_errors_come_through_unchanged():
    number, y = unpack_frame(pack_frame(2**40, np.float32([1.5, np.nan])))
    assert number == 2**40 and y[0] == 1.5 and np.isnan(y[1])
    for bad in (b"", b"1234567", bytes(10), b"\xff" * 8):
        with pytest.raises(FormatError):
            unpack_frame(bad)
    assert as_list(np.float32([1, np.inf, np.nan])) == [1.0, None, None]
    error = Conflict("taken")
    with pytest.raises(Conflict, match="taken"):
        raise_error(describe_error(error)[0])
    described, status, _ = describe_error(ZeroDivisionError("secret"))
    assert status == 500 and "secret" not in str(described)


def test_a_history_keeps_copies_and_says_what_it_lost():
    history, x = History(0), np.ones(3)
    history.add(1, x)
    x[:] = 7
    ((number, kept),) = history.since(1, 1)
    assert number == 1 and (kept == 1).all()
    with pytest.raises(Exception, match="no longer has the input of step 2"):
        history.since(1, 2)
