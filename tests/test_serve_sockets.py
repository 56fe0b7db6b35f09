"""`recur serve` over WebSockets, and what holds when it is killed.  S numbers: see
docs/how-to/streams.md."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time

import numpy as np
import pytest
from serving import model, needs_server, serving

from recur import Gap, Stream
from recur.errors import RecurError
from recur.serve.client import AsyncStream, Client
from recur.serve.protocol import WrongToken, pack_frame, unpack_frame

pytestmark = needs_server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("serve")) as one:
        yield one


def connect(server, **more):
    import websockets

    return websockets.connect(server.address.replace("http", "ws") + "/v1/ws", **more)


async def greeted(socket, **first):
    await socket.send(json.dumps(first or {"open": None}))
    return json.loads(await socket.recv())


def inputs(i, n):
    """The input of step n of stream i, of these two alone."""
    return np.sin(np.arange(1, 6) * n + i).astype(np.float32)


def expected(i, T):
    return Stream(model()).run(np.stack([inputs(i, n) for n in range(1, T + 1)], -1))


# ---------------------------------------------------------------- frames


def test_json_and_binary_frames_may_alternate(server):
    async def work():
        async with connect(server) as socket:
            hello = await greeted(socket)
            assert hello["step"] == 0 and len(hello["token"]) >= 32
            Y = expected(0, 20)
            for n in range(1, 21):
                x = inputs(0, n)
                if n % 2:
                    await socket.send(pack_frame(n if n % 3 else 0, x))
                    number, y = unpack_frame(await socket.recv())
                else:
                    await socket.send(json.dumps({"step": n, "x": x.tolist()}))
                    answer = json.loads(await socket.recv())
                    number, y = answer["step"], np.float32(answer["y"])
                assert number == n and np.array_equal(y, Y[:, n - 1])
            await socket.send('{"reset": true}')
            assert json.loads(await socket.recv())["step"] == 0
            await socket.send(pack_frame(1, inputs(0, 1)))
            assert np.array_equal(unpack_frame(await socket.recv())[1], Y[:, 0])

    asyncio.run(work())


def test_the_hidden_state_comes_along_if_it_is_asked_for(server):
    async def work():
        async with connect(server) as socket:
            await greeted(socket, open=None, show=True)
            await socket.send(json.dumps({"x": [0.1] * 5}))
            answer = json.loads(await socket.recv())
            stream = Stream(model())
            stream(np.float32([0.1] * 5))
            h = stream.state["layers.0"].h[:, 0]
            assert np.allclose(answer["state"], h, atol=1e-4)

    asyncio.run(work())


BAD = [
    ("{", "format", 1007),
    ("[]", "format", 1007),
    ('{"x": "a"}', "format", 1007),
    ('{"step": 0, "x": [1, 2, 3, 4, 5]}', "format", 1007),
    (b"123", "format", 1007),
    (b"\xff" * 28, "format", 1007),
    (pack_frame(1, np.ones(4)), "shape", 1007),
    (pack_frame(7, np.ones(5)), "gap", 4409),
]


@pytest.mark.parametrize(("frame", "code", "close"), BAD, ids=range(len(BAD)))
def test_a_bad_frame_closes_that_stream_alone_and_says_why(server, frame, code, close):
    import websockets

    async def work():
        async with connect(server) as bad, connect(server) as good:
            await greeted(good)
            hello = await greeted(bad)
            await bad.send(pack_frame(1, inputs(0, 1)))
            await bad.send(frame)
            assert unpack_frame(await bad.recv())[0] == 1  # what came before is answered
            error = json.loads(await bad.recv())["error"]
            assert error["code"] == code
            with pytest.raises(websockets.ConnectionClosed):
                await bad.recv()
            assert bad.close_code == close
            await good.send(pack_frame(1, inputs(0, 1)))
            assert unpack_frame(await good.recv())[0] == 1
        async with connect(server) as again:
            assert (await greeted(again, resume=hello["id"], token=hello["token"]))["step"] == 1

    asyncio.run(work())


@pytest.mark.parametrize(
    ("first", "code"),
    [
        ({"resume": "nobody", "token": "x"}, "unknown"),
        ({"open": "a b"}, "format"),
        ({"token": "x"}, "format"),
        ({"open": 3}, "format"),
    ],
)
def test_a_bad_first_message_is_refused(server, first, code):
    async def work():
        async with connect(server) as socket:
            assert (await greeted(socket, **first))["error"]["code"] == code

    asyncio.run(work())


def test_no_socket_reaches_the_stream_of_another_and_a_takeover_ends_it(server):
    async def work():
        async with connect(server) as mine, connect(server) as other, connect(server) as third:
            hello = await greeted(mine, open="precious")
            for token in ("", "guess", hello["token"][:-1]):
                async with connect(server) as thief:
                    found = await greeted(thief, resume="precious", token=token)
                    assert found["error"]["code"] == "token"
            assert (await greeted(other, open="precious"))["error"]["code"] == "conflict"
            new = await greeted(third, takeover="precious", token=hello["token"])
            await mine.send(pack_frame(1, inputs(0, 1)))
            assert json.loads(await mine.recv())["error"]["code"] == "token"
            await third.send(pack_frame(1, inputs(0, 1)))
            assert unpack_frame(await third.recv())[0] == 1
            assert new["token"] != hello["token"]

    asyncio.run(work())


def test_a_page_of_another_host_may_not_open_sockets(server):
    async def work():
        async with connect(server, origin="http://evil.example") as socket:
            assert (await greeted(socket))["error"]["code"] == "unauthorised"
        async with connect(server, origin=server.address) as socket:
            assert "token" in await greeted(socket)

    asyncio.run(work())


def test_s6_a_connected_client_hears_that_its_stream_expired(tmp_path):
    from recur.serve import Options, application
    from recur.streaming import StreamPool

    async def work():
        import uvicorn

        pool = StreamPool(model(), idle=0.3)
        config = uvicorn.Config(
            application(pool, Options()), port=0, log_level="error", ws="websockets-sansio"
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        import websockets

        async with websockets.connect(f"ws://127.0.0.1:{port}/v1/ws") as socket:
            hello = await greeted(socket)
            await socket.send(pack_frame(1, inputs(0, 1)))
            await socket.recv()
            error = json.loads(await asyncio.wait_for(socket.recv(), 10))["error"]
            assert error["code"] == "expired" and error["last_step"] == 1
        async with websockets.connect(f"ws://127.0.0.1:{port}/v1/ws") as socket:
            found = await greeted(socket, resume=hello["id"], token=hello["token"])
            assert found["error"]["code"] == "expired"
        server.should_exit = True
        await task

    asyncio.run(work())


class Lazy:
    """A socket without a network whose sends take `pause` seconds, except the first."""

    def __init__(self, pause, steps):
        self.headers, self.pause, self.steps = {}, pause, steps
        self.sent, self.received, self.closed = 0, 0, False
        self.read = asyncio.Event()

    async def accept(self):
        pass

    async def receive(self):
        self.received += 1
        if self.received == 1:
            return {"type": "websocket.receive", "text": '{"open": "lazy"}'}
        if self.received <= 1 + self.steps:
            return {"type": "websocket.receive", "bytes": pack_frame(0, np.ones(5))}
        await self.read.wait()
        return {"type": "websocket.disconnect"}

    async def send_text(self, text):
        self.sent += 1

    async def send_bytes(self, data):
        await asyncio.sleep(self.pause)
        self.sent += 1
        if self.sent == 1 + self.steps:
            self.read.set()

    async def close(self, code, reason):
        self.closed = True


@pytest.mark.parametrize(("pause", "steps"), [(3600, 1000), (0.1, 12)])
def test_a_client_is_dropped_that_does_not_read_and_kept_if_it_reads_slowly(pause, steps):
    # Reading is the network's affair up to some megabytes; what lies behind is the server's.
    from recur.serve.options import Options
    from recur.serve.service import Service
    from recur.serve.socket import StreamSocket
    from recur.streaming import StreamPool

    async def work():
        service = Service(StreamPool(model()), Options(slow=0.6, pending=8))
        service.engine.start()
        socket = Lazy(pause, steps)
        await asyncio.wait_for(StreamSocket(service, socket).run(), 10)
        if pause > 1:
            assert socket.sent == 1
            assert socket.received < 20, "inputs pile up while answers are not read"
        else:
            assert socket.sent == 1 + steps, "each send was in time, though not all together"
        await service.engine.stop()

    asyncio.run(work())


# ---------------------------------------------------------------- S22: everything at once


def test_s22_clients_of_every_bad_manner_at_once_get_the_answers_of_a_single_process(server, rng):
    T = 30
    seeds = iter(rng.integers(1 << 30, size=1000).tolist())

    async def valid(i):
        async with AsyncStream(server.address) as stream:
            for n in range(1, T + 1):
                y = await stream.step(inputs(i, n))
                assert np.array_equal(y, expected(i, T)[:, n - 1])

    async def hasty(i):
        """All steps at once."""
        async with AsyncStream(server.address) as stream:
            Y = await asyncio.gather(*[stream.step(inputs(i, n)) for n in range(1, T + 1)])
            assert np.array_equal(np.stack(Y, -1), expected(i, T))

    async def delayed(i):
        pause = np.random.default_rng(next(seeds))
        async with AsyncStream(server.address) as stream:
            for n in range(1, 9):
                await asyncio.sleep(pause.uniform(0, 0.05))
                assert np.array_equal(await stream.step(inputs(i, n)), expected(i, n)[:, -1])

    async def doubled(i):
        """Every step twice; the second time it gives the stored answer."""
        async with connect(server) as socket:
            await greeted(socket)
            for n in range(1, T + 1):
                for _ in range(2):
                    await socket.send(pack_frame(n, inputs(i, n)))
                for _ in range(2):
                    number, y = unpack_frame(await socket.recv())
                    assert number == n and np.array_equal(y, expected(i, T)[:, n - 1])

    async def startless(i):
        async with connect(server) as socket:
            await socket.send(pack_frame(1, inputs(i, 1)))
            assert json.loads(await socket.recv())["error"]["code"] == "format"

    async def endless(i):
        """Leaves without a word in the middle, and comes back."""
        hello = None
        for part in range(3):
            socket = await connect(server)
            first = {"open": None}
            if hello:
                first = {"resume": hello["id"], "token": hello["token"]}
            hello = await greeted(socket, **first)
            assert hello["step"] >= part * 5
            for n in range(hello["step"] + 1, part * 5 + 6):
                await socket.send(pack_frame(n, inputs(i, n)))
                assert np.array_equal(unpack_frame(await socket.recv())[1], expected(i, n)[:, -1])
            socket.transport.abort()

    async def cancelled(i):
        """Gives steps up before they are answered."""
        async with AsyncStream(server.address) as stream:
            tasks = [asyncio.create_task(stream.step(inputs(i, n))) for n in range(1, 11)]
            await asyncio.sleep(0)
            await asyncio.sleep(0.005)
            tasks[9].cancel()
            Y = await asyncio.gather(*tasks[:9])
            assert np.array_equal(np.stack(Y, -1), expected(i, 9))

    async def slow(i):
        async with connect(server, max_queue=1) as socket:
            await greeted(socket)
            for n in range(1, T + 1):
                await socket.send(pack_frame(n, inputs(i, n)))
            await asyncio.sleep(0.3)
            for n in range(1, T + 1):
                number, y = unpack_frame(await socket.recv())
                assert number == n and np.array_equal(y, expected(i, T)[:, n - 1])

    async def all_of_them():
        kinds = [valid, hasty, delayed, doubled, startless, endless, cancelled, slow]
        order = rng.permutation(len(kinds) * 4) % len(kinds)
        await asyncio.gather(*[kinds[k](i) for i, k in enumerate(order)])

    asyncio.run(all_of_them())


# ---------------------------------------------------------------- the process dies


def test_sigterm_keeps_every_stream_and_exits_with_0(tmp_path):
    with serving(tmp_path, "--flush-seconds", "3600") as server:
        with Client(server.address) as client:
            streams = [client.open() for _ in range(20)]
            for i, stream in enumerate(streams):
                for n in range(1, 4):
                    stream.step(inputs(i, n))
        begun = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - begun < 15
        server.start()
        with Client(server.address) as client:
            for i, stream in enumerate(streams):
                again = client.resume(stream.id, stream.token)
                assert again.steps == 3
                assert np.array_equal(again.step(inputs(i, 4)), expected(i, 4)[:, -1])


def test_s20_clients_go_on_by_themselves_when_the_server_starts_again(tmp_path):
    with serving(tmp_path) as server:

        async def one(i):
            async with AsyncStream(server.address, patience=60) as stream:
                for n in range(1, 41):
                    y = await stream.step(inputs(i, n))
                    assert np.array_equal(y, expected(i, n)[:, -1]), (i, n)
                    await asyncio.sleep(0.02)

        async def work():
            async def trouble():
                await asyncio.sleep(0.4)
                server.kill()
                await asyncio.to_thread(server.start)

            await asyncio.gather(trouble(), *[one(i) for i in range(10)])

        asyncio.run(work())


def test_s20_a_client_sends_again_what_a_lazy_server_forgot(tmp_path):
    with serving(tmp_path, "--flush-seconds", "3600") as server:
        with Client(server.address, patience=60) as client:
            stream = client.open()
            for n in range(1, 11):
                stream.step(inputs(0, n))
            server.kill()
            server.start()
            assert np.array_equal(stream.step(inputs(0, 11)), expected(0, 11)[:, -1])

            async def sockets():
                async with AsyncStream(server.address, patience=60) as stream:
                    for n in range(1, 11):
                        await stream.step(inputs(1, n))
                    server.kill()
                    await asyncio.to_thread(server.start)
                    y = await stream.step(inputs(1, 11))
                    assert np.array_equal(y, expected(1, 11)[:, -1])

            asyncio.run(sockets())
            stream._history._inputs.popitem(last=False)
            server.kill()
            server.start()
            with pytest.raises(Gap, match="no longer has the input of step 1"):
                stream.step(inputs(0, 12))


def test_s8_hundreds_of_streams_go_on_after_kill_9_and_nothing_is_stepped_twice(tmp_path, rng):
    streams, T = 200, 6
    with serving(tmp_path) as server:
        answers = {}

        async def one(i, stop):
            async with AsyncStream(server.address, patience=60) as stream:
                for n in range(1, T + 1):
                    answers[i, n] = await stream.step(inputs(i, n))
                    await asyncio.sleep(rng.uniform(0, 0.1))
                stop[i] = stream.id, stream.token

        async def work():
            ends, kills = {}, []

            async def trouble():
                for _ in range(2):
                    await asyncio.sleep(rng.uniform(0.3, 0.6))
                    server.kill()
                    kills.append(len(answers))
                    await asyncio.to_thread(server.start)

            await asyncio.gather(trouble(), *[one(i, ends) for i in range(streams)])
            assert kills[0] < streams * T, "it was killed when all was done"
            return ends

        ends = asyncio.run(work())
        assert len(answers) == streams * T
        for i in range(streams):
            Y = expected(i, T)
            for n in range(1, T + 1):
                assert np.array_equal(answers[i, n], Y[:, n - 1]), (i, n)
        with Client(server.address) as client:
            for id, token in list(ends.values())[::20]:
                assert client.resume(id, token).steps == T
        database = sqlite3.connect(server.store)
        assert database.execute("SELECT COUNT(*) FROM streams").fetchone() == (streams,)
        database.close()


def test_a_client_with_a_wrong_token_learns_it_at_once(server):
    async def work():
        async with AsyncStream(server.address) as stream:
            await stream.step(np.ones(5))
        with pytest.raises(WrongToken):
            async with AsyncStream(server.address, id=stream.id, token="no"):
                pass
        async with AsyncStream(server.address, id=stream.id, token=stream.token) as again:
            assert again.steps == 1
            with pytest.raises(RecurError, match="2 features"):
                await again.step(np.ones(2))
            await again.step(np.ones(5))
            assert again.steps == 2

    asyncio.run(work())
