"""What servers and clients are handed, and what answers that is no server of recur."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import re
import socket
import threading
from urllib.parse import urlsplit

import numpy as np
import pytest
from serving import model, needs_server, serving

from recur import FormatError, RecurError, ShapeError, Stream
from recur.serve.client import AsyncStream, Client
from recur.serve.protocol import _CODES, Busy, Unavailable
from recur.serve.script import SCRIPT

pytestmark = needs_server
NAN = float("nan")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("serve")) as one:
        yield one


@pytest.mark.parametrize(
    "servers", [None, [], "", "somewhere", "ftp://host", "http://", "http://host:99999", [None], 5]
)
def test_what_is_no_address_is_refused_when_a_client_is_made(servers):
    for kind in (Client, AsyncStream):
        with pytest.raises((ValueError, TypeError), match=r"expected http://host:port|iterable"):
            kind(servers)


@pytest.mark.parametrize("patience", [0, -1, NAN, float("inf"), "long", None, True])
def test_a_patience_that_is_no_time_is_refused(patience):
    for kind in (Client, AsyncStream):
        with pytest.raises(ValueError, match=r"patience is .*expected seconds"):
            kind("http://127.0.0.1:1", patience=patience)


@pytest.mark.parametrize("secret", ["line\nbreak", "grün", b"bytes", 5])
def test_secrets_that_no_header_can_hold_are_refused_and_not_shown(secret, server):
    for kind in (Client, AsyncStream):
        with pytest.raises(ValueError, match=r"bearer token .*expected printable ASCII") as error:
            kind(server.address, bearer=secret)
        assert str(secret) not in str(error.value)
    with pytest.raises(ValueError, match=r"token .*expected printable ASCII"):
        Client(server.address).resume("a", secret)
    with pytest.raises(ValueError, match=r"token .*expected printable ASCII"):
        AsyncStream(server.address, id="a", token=secret)


@pytest.mark.parametrize("id", ["", "a/b", "a b", "ü", "x" * 129, "../metrics", 5, b"a"])
def test_a_name_that_no_stream_can_have_is_refused_before_anything_is_sent(id):
    client = Client("http://127.0.0.1:1")
    for call in (
        lambda: client.open(id),
        lambda: client.resume(id, "t"),
        lambda: client.takeover(id, "t"),
        lambda: AsyncStream("http://127.0.0.1:1", id=id),
    ):
        with pytest.raises(FormatError, match="expected 1 to 128 letters, digits"):
            call()


@pytest.mark.parametrize(
    "x", [None, "abc", np.ones(5) * 1j, [[1], [1, 2]], {}, object(), np.ones((5, 1))]
)
def test_an_input_that_is_no_numbers_is_refused_and_the_stream_goes_on(x, server):
    good = np.linspace(0, 1, 5).astype(np.float32)
    expected = Stream(model()).run(np.stack([good] * 2, 1))
    with Client(server.address) as client:
        stream = client.open()
        assert np.array_equal(stream.step(good), expected[:, 0])
        with pytest.raises(ShapeError, match="Nothing was sent"):
            stream.step(x)
        assert np.array_equal(stream.step(good), expected[:, 1])
        stream.close()

    async def work():
        async with AsyncStream(server.address) as stream:
            assert np.array_equal(await stream.step(good), expected[:, 0])
            with pytest.raises(ShapeError, match="Nothing was sent"):
                await stream.step(x)
            assert np.array_equal(await asyncio.wait_for(stream.step(good), 10), expected[:, 1])

    asyncio.run(work())


def test_nan_and_infinity_stay_in_their_stream_over_http_and_sockets(server):
    bad = np.array([np.nan, np.inf, -np.inf, 0, 1], np.float32)
    with Client(server.address) as client:
        one, other = client.open(), client.open()
        assert np.isnan(one.step(bad)).all()
        good = np.ones(5, np.float32)
        assert np.array_equal(other.step(good), Stream(model())(good))

    async def work():
        async with AsyncStream(server.address) as stream:
            assert np.isnan(await stream.step(bad)).all()

    asyncio.run(work())


@contextlib.contextmanager
def stranger(status, body, kind="text/html"):
    """Some other HTTP server."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, *_):
            pass

    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{found.server_address[1]}"
    finally:
        found.shutdown()
        thread.join()
        found.server_close()


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b"<html>"), (404, b"Not Found"), (301, b""), (200, b"{}"), (200, b"[1]"),
     (400, b"{}"), (400, b'{"error": "no"}'), (200, b"")],
)  # fmt: skip
def test_another_server_is_told_from_one_of_recur(status, body):
    with stranger(status, body) as address, Client(address, patience=0.2) as client:
        for call in (client.open, lambda: client.resume("a", "t")):
            with pytest.raises(RecurError, match=r"as recur serve does|answered without"):
                call()


@pytest.mark.parametrize(
    ("greeting", "then", "message"),
    [
        ("{}", None, "not as recur serve does"),
        ("[]", None, "is JSON, but no object"),
        ('{"step": "x"}', None, "not as recur serve does"),
        ('{"error": 5}', None, "answered 5"),
        ('{"step": 0}', b"abc", "binary frame of 3 bytes"),
        ('{"step": 0}', "what?", "is no JSON"),
        ('{"step": 0}', "{}", "answered None"),
        (None, None, "says nothing"),
    ],
)
def test_no_frame_of_another_server_lets_a_step_wait_for_ever(greeting, then, message):
    import websockets

    async def answer(socket):
        await socket.recv()
        if greeting is not None:
            await socket.send(greeting)
            await socket.recv()
            await socket.send(then)
        await socket.wait_closed()

    async def work():
        async with websockets.serve(answer, "127.0.0.1", 0) as other:
            port = other.sockets[0].getsockname()[1]
            stream = AsyncStream(f"http://127.0.0.1:{port}", patience=0.4)
            with pytest.raises((RecurError, ConnectionError), match=message):
                await asyncio.wait_for(stream.step(np.ones(5)), 10)
            await stream.disconnect()
            other.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    "options",
    [
        {"streams": -1}, {"streams": "many"}, {"message": 0}, {"burst": 0}, {"pending": 0},
        {"connections": -1}, {"slow": 0}, {"slow": NAN}, {"ping": None}, {"stop": -1},
        {"rate": 0}, {"rate": "fast"}, {"max_wait": -1}, {"max_wait": NAN}, {"bearer": ""},
        {"bearer": b"secret"},
    ],
)  # fmt: skip
def test_limits_that_cannot_be_meant_are_refused_where_they_are_written(options):
    from recur.serve import Options

    with pytest.raises(ValueError, match=f"Options: {next(iter(options))} is"):
        Options(**options)


def test_only_this_machine_reaches_a_server_that_was_told_nothing_else(server):
    parts = urlsplit(server.address)
    assert parts.hostname == "127.0.0.1"
    with contextlib.suppress(OSError):  # of a machine without a name
        outside = socket.gethostbyname(socket.gethostname())
        if not outside.startswith("127."):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((outside, parts.port), 5)


def test_a_server_of_what_is_no_pool_is_refused():
    from recur.serve import application

    with pytest.raises(TypeError, match=r"needs a StreamPool, .*StreamPool\(model\)"):
        application(model())


def test_the_page_tries_again_after_every_error_that_may_pass():
    passing = set(json.loads(re.search(r"PASSING = (\[.*?\])", SCRIPT).group(1)))
    codes = {name for kind, name, _, _ in _CODES if issubclass(kind, (Busy, Unavailable))}
    assert passing == codes | {"internal"}
