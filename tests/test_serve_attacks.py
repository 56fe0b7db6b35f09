"""A server among clients that mean it no good, with stores that fail, and with other servers."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import shutil
import socket
import sqlite3
import subprocess
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from serving import model, needs_server, serving
from test_serve_http import call, opened
from test_serve_sockets import connect, expected, greeted, inputs

from recur import Busy, Stream
from recur.errors import RecurError
from recur.serve import Options
from recur.serve.client import AsyncStream, Client
from recur.serve.engine import Engine, tag_of
from recur.serve.protocol import StoreFailed, Unavailable, WrongToken, pack_frame, unpack_frame
from recur.serve.service import Service
from recur.streaming import Flush, MemoryStore, SQLiteStore, StreamPool

pytestmark = needs_server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("serve"), "--streams", "400") as one:
        yield one


def raw(server, *lines):
    """A connection on which these bytes have been sent."""
    parts = urlsplit(server.address)
    found = socket.create_connection((parts.hostname, parts.port), timeout=30)
    found.sendall(b"".join(lines))
    return found


def still_fine(server):
    """A stream that is opened, stepped and ended gets the answers of a single process."""
    with Client(server.address) as client:
        stream = client.open()
        for n in (1, 2):
            assert np.array_equal(stream.step(inputs(7, n)), expected(7, 2)[:, n - 1])
        stream.close()


# ---------------------------------------------------------------- what is no text, no number


def test_text_that_utf_8_cannot_hold_is_refused_as_such(server):
    id, token = opened(server)
    alone = "\ud800"  # half of a pair: JSON may say it
    steps = [
        {"id": alone, "token": token, "x": [0] * 5},
        {"id": id, "token": alone, "x": [0] * 5},
        {"id": [], "token": token, "x": [0] * 5},
        {"id": id, "token": token, "x": [0] * 5},
    ]
    status, _, found = call(server, "POST", "/v1/step", {"steps": steps})
    assert status == 200
    answers = found["answers"]
    assert [a["error"]["code"] for a in answers[:3]] == ["format"] * 3
    assert answers[3]["step"] == 1
    path = f"/v1/streams/{id}/step"
    assert call(server, "POST", path, {"x": [0] * 5}, Stream_Token="\xe9" * 40)[0] == 400

    async def work():
        for first in ({"open": None, "token": alone * 40}, {"resume": id, "token": alone},
                      {"open": alone}):  # fmt: skip
            async with connect(server) as socket:
                assert (await greeted(socket, **first))["error"]["code"] == "format"
        async with connect(server) as socket:
            assert "token" in await greeted(socket, open=None, bearer=alone)

    asyncio.run(work())
    still_fine(server)


def test_numbers_that_no_index_can_be_are_refused(tmp_path):
    from recur import LSTM, Chain, Embedding

    service = Service(StreamPool(Chain(Embedding(5, 3), LSTM(3, 4))), Options())
    assert service.input(np.array(3.0)).item() == 3
    for x in (1e300, -1.0, 5.0, np.inf, np.nan, 0.5, 2**63 - 1):
        with pytest.raises(RecurError):
            service.pool.plan.rows(service.input(np.array(x)), 1)


def test_a_packed_bomb_is_not_unpacked(server):
    async def work():
        async with connect(server, compression="deflate") as socket:
            await greeted(socket)
            await socket.send(b"\0" * (64 << 20))
            with pytest.raises(Exception) as error:
                while True:
                    await socket.recv()
            assert "1009" in str(error.value)

    asyncio.run(work())
    still_fine(server)


# ---------------------------------------------------------------- who has not the token


def test_wrong_tokens_by_the_thousand_keep_nobody_waiting(server):
    id, token = opened(server)
    wrong = [{"id": id, "token": f"{i:040}", "x": [0] * 5} for i in range(300)]
    same = [{"id": id, "token": "x" * 40, "x": [0] * 5} for i in range(300)]
    right = {"id": id, "token": token, "step": 1, "x": inputs(0, 1).tolist()}
    status, _, found = call(server, "POST", "/v1/step", {"steps": [*same, *wrong, right]})
    assert status == 200
    *others, last = found["answers"]
    assert {a["error"]["code"] for a in others} <= {"token", "busy"}
    assert np.array_equal(np.float32(last["y"]), expected(0, 1)[:, 0])


def test_a_stranger_uses_up_nothing_of_a_streams_rate():
    async def work():
        service = Service(StreamPool(model()), Options(rate=0.001, burst=3))
        service.engine.start()
        token = await service.engine.open("a")
        x = inputs(0, 1)
        for i in range(2000):
            with pytest.raises(WrongToken):
                await service.step(f"{'a' if i % 2 else i}", x, None, b"?" * 16)
            if i == 20:
                await service.engine.open("0")
        for n in (1, 1, 2, 3):  # the same again is no step
            await service.step("a", inputs(0, n), n, tag_of(token))
        with pytest.raises(Busy, match=r"0\.001 times a second"):
            await service.step("a", x, 4, tag_of(token))
        assert len(service._rates) <= 2
        await service.engine.stop()

    class Known(StreamPool):
        """All names are streams, with a tag that nobody has."""

        def tag(self, id):
            return super().tag(id) if id in self._slots else b"!" * 16

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_serve_attacks.StreamPool", Known)
        asyncio.run(work())


def test_a_wrong_token_does_not_bring_a_stream_back_into_memory():
    store = MemoryStore()

    async def work():
        pool = StreamPool(model(), store=store)
        engine = Engine(pool)
        engine.start()
        token = await engine.open("a")
        await engine.submit("a", inputs(0, 1), 1, tag_of(token))
        await engine.call(pool.evict, ["a"])
        before = store.load("a").epoch
        for asked in (engine.submit("a", inputs(0, 2), 2, b"?" * 16), engine.take_over("a", "no")):
            with pytest.raises(WrongToken):
                await asked
        assert pool.ids() == [] and store.load("a").epoch == before
        answer = await engine.submit("a", inputs(0, 2), 2, tag_of(token))
        assert np.array_equal(answer.y, expected(0, 2)[:, 1])
        await engine.stop()

    asyncio.run(work())


def test_a_page_of_another_host_may_not_call_either(server):
    for origin, status in (("http://evil.example", 401), ("null", 401), (server.address, 201)):
        assert call(server, "POST", "/v1/streams", {}, Origin=origin)[0] == status


# ---------------------------------------------------------------- floods and silence


def test_a_flood_of_opens_is_refused_and_open_streams_stay_fast(tmp_path):
    with serving(tmp_path, "--streams", "50") as server, Client(server.address) as client:
        mine = client.open()
        codes, times = [], []

        def flood():
            for _ in range(100):
                codes.append(call(server, "POST", "/v1/streams", {})[0])

        threads = [threading.Thread(target=flood) for _ in range(4)]
        for thread in threads:
            thread.start()
        n = 0
        while any(thread.is_alive() for thread in threads):
            n += 1
            begun = time.perf_counter()
            assert np.array_equal(mine.step(inputs(0, n)), expected(0, n)[:, -1])
            times.append(time.perf_counter() - begun)
        for thread in threads:
            thread.join()
        assert codes.count(201) == 49 and codes.count(429) == 351

        async def sockets():
            async with connect(server) as socket:
                assert (await greeted(socket))["error"]["code"] == "busy"
                with contextlib.suppress(Exception):
                    await socket.recv()
                assert socket.close_code == 1013

        asyncio.run(sockets())
        assert n > 5 and float(np.median(times)) < 1.0


def serve_here(options, pool=None):
    """An address, in this process: what the command has no flag for."""
    from recur.serve import serve

    ready, ended = threading.Event(), []

    class Here:
        address = ""

        def __enter__(self):
            self.thread.start()
            assert ready.wait(20)
            return self

        def __exit__(self, *_):
            self.loop.call_soon_threadsafe(self.end)
            self.thread.join(20)
            assert not self.thread.is_alive()

    here = Here()

    def begin(address):
        here.address = address
        here.loop = asyncio.get_running_loop()
        server = next(
            task.get_coro().cr_frame.f_locals["server"]
            for task in asyncio.all_tasks()
            if "server" in getattr(task.get_coro().cr_frame, "f_locals", {})
        )
        here.end = lambda: setattr(server, "should_exit", True)
        ready.set()

    def work():
        serve(pool or StreamPool(model()), port=0, options=options, on_start=begin)
        ended.append(True)

    here.thread = threading.Thread(target=work)
    return here


class Wire:
    """Stands between clients and a server.  Cut, it passes nothing on of the connections that there
    are, and neither side is told: new ones work."""

    def __init__(self, address):
        self.to = urlsplit(address)
        self.cuts, self.held = [], []  # an end that is forgotten would be closed

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.join, "127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self.server.close()
        self.cut()
        for end in self.held:
            end.transport.abort()

    def cut(self):
        for task in self.cuts:
            task.cancel()

    async def join(self, reader, writer):
        other_reader, other_writer = await asyncio.open_connection(self.to.hostname, self.to.port)
        self.held += [writer, other_writer]

        async def pass_on(source, sink):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
            sink.close()

        self.cuts += [
            asyncio.create_task(pass_on(reader, other_writer)),
            asyncio.create_task(pass_on(other_reader, writer)),
        ]


def test_s20_a_socket_of_which_one_end_is_gone_is_found_by_both_and_the_stream_goes_on(monkeypatch):
    import recur.serve.client

    assert 3 * recur.serve.client.PING <= 20 and 2 * Options().ping <= 20
    monkeypatch.setattr(recur.serve.client, "PING", 0.3)

    def sockets(server):
        text = call(server, "GET", "/metrics")[2].decode()
        return float(text.split("\nrecur_sockets ")[1].split()[0])

    with serve_here(Options(ping=0.3)) as server:

        async def work():
            async with Wire(server.address) as wire, AsyncStream(wire.address) as stream:
                for n in range(1, 6):
                    assert np.array_equal(await stream.step(inputs(0, n)), expected(0, n)[:, -1])
                wire.cut()
                y = await asyncio.wait_for(stream.step(inputs(0, 6)), 15)
                assert np.array_equal(y, expected(0, 6)[:, -1])
                for _ in range(100):  # the server lets go of the socket that nobody answers on
                    if await asyncio.to_thread(sockets, server) == 1:
                        return
                    await asyncio.sleep(0.1)
                raise AssertionError("the server keeps a dead socket")

        asyncio.run(work())


def test_connections_on_which_nothing_comes_are_ended():
    head = b"POST /v1/streams HTTP/1.1\r\nHost: x\r\n"
    with serve_here(Options(slow=0.5)) as server:
        silent = raw(server)
        half = raw(server, head)
        begun = raw(server, head, b"Content-Length: 10\r\n\r\n{")
        again = raw(server, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert again.recv(10_000).startswith(b"HTTP/1.1 200")
        again.sendall(head)
        for one in (silent, half, begun, again):
            one.settimeout(10)
            data = b""
            with contextlib.suppress(ConnectionError):
                while piece := one.recv(10_000):
                    data += piece
            if one is begun:
                assert b"nothing of the body came" in data
            one.close()

        async def sockets():
            async with connect(server) as mute, connect(server) as good:
                await greeted(good)
                error = json.loads(await asyncio.wait_for(mute.recv(), 10))["error"]
                assert "no first message" in error["message"]
                await asyncio.sleep(1.5)  # a socket that has been opened may be silent
                await good.send(pack_frame(1, inputs(0, 1)))
                assert unpack_frame(await good.recv())[0] == 1

        asyncio.run(sockets())
        still_fine(server)


def test_a_server_may_open_as_many_connections_as_the_system_lets_it(tmp_path):
    resource = pytest.importorskip("resource")
    proc = Path("/proc")
    if not proc.exists():
        pytest.skip("needs /proc")
    low, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(low, 512), most))
    try:
        with serving(tmp_path) as server:
            found = (proc / str(server.process.pid) / "limits").read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, most))
    (line,) = [x for x in found.splitlines() if x.startswith("Max open files")]
    assert line.split()[3:5] == [str(most)] * 2


def test_too_many_connections_are_refused_and_those_that_are_open_go_on():
    async def work(server):
        async with connect(server) as first, connect(server) as second:
            await greeted(first)
            await greeted(second)
            async with connect(server) as third:
                assert json.loads(await third.recv())["error"]["code"] == "busy"
            await first.send(pack_frame(1, inputs(0, 1)))
            assert unpack_frame(await first.recv())[0] == 1
        await asyncio.sleep(0.2)
        async with connect(server) as third:
            assert "token" in await greeted(third)

    with serve_here(Options(connections=2)) as server:
        asyncio.run(work(server))


def test_a_socket_that_is_not_read_is_dropped_and_its_stream_goes_on():
    async def work(server):
        async with (
            connect(server, max_queue=1, ping_interval=None) as deaf,
            connect(server) as good,
        ):
            hello = await greeted(deaf)
            await greeted(good)
            deaf.transport.pause_reading()
            sent = 0
            with contextlib.suppress(Exception):
                async with asyncio.timeout(60) if hasattr(asyncio, "timeout") else good:
                    while True:
                        sent += 1
                        await deaf.send(pack_frame(0, np.ones(5)))
                        if sent % 1000 == 0:
                            await asyncio.sleep(0)
            for n in (1, 2):
                await good.send(pack_frame(n, inputs(0, n)))
                assert unpack_frame(await good.recv())[0] == n
        async with connect(server) as again:
            back = await greeted(again, resume=hello["id"], token=hello["token"])
            assert 0 < back["step"] <= sent

    with serve_here(Options(slow=0.5)) as server:
        asyncio.run(work(server))


# ---------------------------------------------------------------- stores that fail


class Failing(SQLiteStore):
    """A store whose disk is full while `full` is set."""

    full = False

    def save(self, records):
        if self.full:
            raise sqlite3.OperationalError("database or disk is full")
        return super().save(records)


def test_a_full_disk_is_said_and_no_step_is_lost_or_taken_twice(tmp_path):
    store = Failing(tmp_path / "streams.db")
    with serve_here(Options(), StreamPool(model(), store=store)) as server:
        id, token = opened(server)
        path = f"/v1/streams/{id}/step"
        store.full = True
        for _ in range(2):
            body = {"step": 1, "x": inputs(0, 1).tolist()}
            status, _, found = call(server, "POST", path, body, Stream_Token=token)
            assert status == 503 and found["error"]["code"] == "store"
            assert "disk" not in found["error"]["message"]
        assert call(server, "POST", "/v1/streams", {})[0] == 503

        async def sockets():
            async with connect(server) as socket:
                await greeted(socket, resume=id, token=token)
                await socket.send(pack_frame(1, inputs(0, 1)))
                assert json.loads(await socket.recv())["error"]["code"] == "store"
            threading.Timer(0.5, setattr, (store, "full", False)).start()
            async with AsyncStream(server.address, id=id, token=token) as stream:
                Y = await asyncio.gather(*[stream.step(inputs(0, n)) for n in range(2, 9)])
                assert np.array_equal(np.stack(Y, -1), expected(0, 8)[:, 1:])

        asyncio.run(sockets())
        with Client(server.address) as client:
            stream = client.resume(id, token)
            store.full = True
            threading.Timer(0.3, setattr, (store, "full", False)).start()
            assert np.array_equal(stream.step(inputs(0, 9)), expected(0, 9)[:, 8])
        store.full = True
        with Client(server.address, patience=0.2) as impatient:
            with pytest.raises(Unavailable):  # nor is a stream open that was not written
                impatient.open()
            with pytest.raises(Unavailable):
                impatient.takeover(id, token)
            store.full = False
            assert impatient.resume(id, token).steps == 9


def test_an_async_client_gives_up_after_its_patience_and_does_not_hammer(tmp_path):
    store = Failing(tmp_path / "streams.db")
    pool = StreamPool(model(), store=store)
    saves = []
    with serve_here(Options(), pool) as server:

        async def work():
            async with AsyncStream(server.address, patience=1.0) as stream:
                await stream.step(inputs(0, 1))
                store.full = True
                begun = time.monotonic()
                saves.append(await asyncio.to_thread(lambda: pool.steps([stream.id])[0]))
                with pytest.raises(StoreFailed):
                    await stream.step(inputs(0, 2))
                assert 0.9 < time.monotonic() - begun < 10
                store.full = False
                y = await stream.step(inputs(0, 2))
                assert np.array_equal(y, expected(0, 2)[:, 1])

        asyncio.run(work())
        errors = call(server, "GET", "/metrics")[2].decode()
        found = [x for x in errors.splitlines() if x.startswith('recur_errors_total{code="store"}')]
        assert float(found[0].split()[-1]) < 12


def test_idle_streams_still_leave_after_the_store_has_failed():
    class Store(MemoryStore):
        full = False

        def save(self, records):
            if self.full:
                raise OSError(28, "No space left on device")
            return super().save(records)

    async def work():
        store = Store()
        pool = StreamPool(model(), store=store, idle=0.1, flush=Flush(steps=None))
        engine = Engine(pool)
        engine.start()
        tokens = {id: await engine.open(id) for id in "abc"}
        store.full = True
        for id, token in tokens.items():
            await engine.submit(id, inputs(0, 1), 1, tag_of(token))
        await asyncio.sleep(0.4)
        assert sorted(pool.ids()) == ["a", "b", "c"]
        store.full = False
        for _ in range(100):
            await asyncio.sleep(0.05)
            if not pool.ids():
                break
        assert pool.ids() == []
        for id, token in tokens.items():
            answer = await engine.submit(id, inputs(0, 2), 2, tag_of(token))
            assert np.array_equal(answer.y, expected(0, 2)[:, 1])
        await engine.stop()

    asyncio.run(work())


def test_a_server_that_cannot_write_at_its_end_says_so():
    class Full(MemoryStore):
        full = False

        def save(self, records):
            if self.full:
                raise OSError(28, "No space left on device")
            return super().save(records)

    store = Full()
    from recur.serve import serve

    def begin(address):
        def work():
            with Client(address) as client:
                client.open().step(inputs(0, 1))
            store.full = True
            loop.call_soon_threadsafe(server.__setattr__, "should_exit", True)

        loop = asyncio.get_running_loop()
        server = next(
            task.get_coro().cr_frame.f_locals["server"]
            for task in asyncio.all_tasks()
            if "server" in getattr(task.get_coro().cr_frame, "f_locals", {})
        )
        threading.Thread(target=work).start()

    pool = StreamPool(model(), store=store, flush=Flush(steps=None))
    with pytest.raises(RecurError, match="were not written at the end"):
        serve(pool, port=0, on_start=begin)


def test_a_clock_that_is_set_makes_no_stream_old(monkeypatch):
    store = MemoryStore()
    pool = StreamPool(model(), store=store, idle=60, ttl=3600)
    pool.open("here")
    pool.open("away")
    pool.evict(["away"])
    for jump in (1e6, -1e6):
        now = time.time() + jump
        monkeypatch.setattr(time, "time", lambda now=now: now)
        assert pool.reap() == []
        assert pool.ids()[0] == "here" and "away" in pool
    assert sorted(store.keys()) == ["away", "here"]


# ---------------------------------------------------------------- more than one server


def test_two_servers_on_one_file_never_fork_a_stream(tmp_path):
    store = tmp_path / "streams.db"
    with serving(tmp_path, store=store) as one, serving(tmp_path, store=store) as two:
        servers = [one, two]

        def work(i, faults):
            with Client(one.address) as a, Client(two.address) as b:
                stream = a.open(f"s{i}")
                there = b.resume(stream.id, stream.token)
                for n in range(1, 13):
                    both = [stream, there] if n % 3 else [there, stream]
                    for other in both:  # the second time it is the stored answer
                        other._history.step = n - 1
                        if not np.array_equal(other.step(inputs(i, n)), expected(i, n)[:, -1]):
                            faults.append((i, n))

        faults = []
        threads = [threading.Thread(target=work, args=(i, faults)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert faults == []
        # Another model on the same file gets none of its streams, and harms none.
        import recur
        from recur import GRU

        file = tmp_path / "other.safetensors"
        recur.save(GRU(5, 4), file)
        with serving(tmp_path, store=store, file=file) as third:
            with Client(third.address) as client, pytest.raises(RecurError):
                client.open("s0")
            still = [call(s, "GET", "/healthz")[0] for s in servers]
            assert still == [200, 200]
        work(9, faults)
        assert faults == []


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    server = shutil.which("redis-server")
    if server is None or importlib.util.find_spec("redis") is None:
        pytest.skip("needs redis-server and the package redis")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--appendonly", "yes",
               "--dir", str(folder)]  # fmt: skip

    class Redis:
        url = f"redis://127.0.0.1:{port}/0"

        def start(self):
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            for _ in range(200):
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    return
                time.sleep(0.05)

        def stop(self):
            self.process.terminate()
            self.process.wait(20)

    redis = Redis()
    redis.start()
    yield redis
    redis.stop()


def test_s8_streams_in_redis_go_on_after_kill_9(tmp_path, redis_url, rng):
    with serving(tmp_path, store=redis_url.url) as server:

        async def one(i):
            async with AsyncStream(server.address, patience=60) as stream:
                for n in range(1, 9):
                    y = await stream.step(inputs(i, n))
                    assert np.array_equal(y, expected(i, n)[:, -1]), (i, n)
                    await asyncio.sleep(rng.uniform(0, 0.1))

        async def work():
            async def trouble():
                for _ in range(2):
                    await asyncio.sleep(rng.uniform(0.2, 0.5))
                    server.kill()
                    await asyncio.to_thread(server.start)

            await asyncio.gather(trouble(), *[one(i) for i in range(100)])

        asyncio.run(work())


def test_streams_wait_for_a_redis_that_is_started_again(tmp_path, redis_url):
    with serving(tmp_path, store=redis_url.url) as server, Client(server.address) as client:
        stream = client.open()
        stream.step(inputs(0, 1))
        redis_url.stop()
        body = {"step": 2, "x": inputs(0, 2).tolist()}
        status, _, found = call(
            server, "POST", f"/v1/streams/{stream.id}/step", body, Stream_Token=stream.token
        )
        assert status == 503 and found["error"]["code"] == "store"
        timer = threading.Timer(0.5, redis_url.start)
        timer.start()
        assert np.array_equal(stream.step(inputs(0, 2)), expected(0, 2)[:, 1])
        timer.join()
        again = Stream(model())
        again(inputs(0, 1)), again(inputs(0, 2))
        assert np.array_equal(stream.step(inputs(0, 3)), again(inputs(0, 3)))
