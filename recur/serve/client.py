"""Clients of `recur serve` that find their way back by themselves.

    client = Client("http://127.0.0.1:8000")
    stream = client.open()
    y = stream.step(x)

Every step has a number.  When a connection breaks, or the server starts again, the client sends the
steps again that were not answered; a number that the server knows gives the stored answer, so
nothing is stepped twice.  If the server has gone back to an earlier step (it writes streams less
often than at every step), the client sends what came since from its own memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from recur.errors import Busy, FormatError, Gap, RecurError, ShapeError
from recur.serve.protocol import (
    Stopping,
    Unavailable,
    check_name,
    pack_frame,
    raise_error,
    read_json,
    unpack_frame,
)

HISTORY = 1024  # inputs that a client keeps, to send them again
SESSION = "X-Session-Id"  # by which a cluster finds the replica that has the stream
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
PING = 6.0  # seconds of silence until a sign of life is asked for, then until none has come, then
# until the socket is given up for lost


def choose(servers: Sequence[str], id: str) -> str:
    """The server of a stream: the same for every client, evenly spread.

    When servers come or go only the streams of these move (rendezvous hashing, Thaler and
    Ravishankar 1998).
    """
    if not servers:
        raise ValueError("no server was given.")
    return max(servers, key=lambda s: hashlib.blake2b(f"{s}\0{id}".encode()).digest())


def addresses(servers: str | Sequence[str]) -> list[str]:
    """A list of addresses; raises `ValueError` for what is none."""
    found = [servers] if isinstance(servers, str) else list(servers or ())
    if not found:
        raise ValueError("no server was given, expected http://host:port, or a list of those.")
    for server in found:
        try:
            parts = urlsplit(server)
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except (ValueError, AttributeError, TypeError):
            good = False
        if not good:
            raise ValueError(f"{server!r} is no address, expected http://host:port.")
    return found


def checked_secret(name: str, secret: Any) -> str:
    """A token that can travel in a header; raises `ValueError` for another."""
    if not isinstance(secret, str) or not (secret.isascii() and secret.isprintable()):
        raise ValueError(f"the {name} is a {type(secret).__name__} that no header can hold, "
                         "expected printable ASCII text.")  # fmt: skip
    return secret


def numbers(id: str, x: Any) -> np.ndarray:
    """A copy of an input; raises `ShapeError` for what is no array of numbers."""
    try:
        array = np.array(x)
    except ValueError:
        array = np.empty(0, object)
    if array.dtype.kind not in "fiub" or array.ndim > 1:
        raise ShapeError(
            f"Stream {id!r}: x is {array.dtype} of shape {array.shape}, expected numbers (n_in,) "
            "or an index. Nothing was sent."
        )
    return array


class History:
    """The inputs of the last steps, by number."""

    def __init__(self, step: int) -> None:
        self.step = step  # of the last answer
        self._inputs: OrderedDict[int, np.ndarray] = OrderedDict()

    def add(self, number: int, x: np.ndarray) -> None:
        """Keeps a copy of the input of a step, and forgets the oldest."""
        self._inputs[number] = np.array(x)
        while len(self._inputs) > HISTORY:
            self._inputs.popitem(last=False)

    def since(self, number: int, last: int) -> list[tuple[int, np.ndarray]]:
        """The inputs of the steps from `number` to `last`; raises `Gap` if one is not kept."""
        missing = [n for n in range(number, last + 1) if n not in self._inputs]
        if missing:
            raise Gap(
                f"The server stands at step {number - 1}, and this client no longer has the input "
                f"of step {missing[0]}. Reset the stream, or open another.",
                expected=number,
                got=last,
            )
        return [(n, self._inputs[n]) for n in range(number, last + 1)]

    def clear(self) -> None:
        """Begins anew."""
        self.step = 0
        self._inputs.clear()


class Client:
    """Streams over HTTP, from one thread or several; needs no package besides recur.

    servers   one address, or several: a stream lives on the one that `choose` names
    bearer    the server's bearer token
    patience  seconds for which an unreachable server is asked again
    """

    def __init__(
        self, servers: str | Sequence[str], *, bearer: str | None = None, patience: float = 30.0
    ) -> None:
        self.servers = addresses(servers)
        self.bearer = None if bearer is None else checked_secret("bearer token", bearer)
        self.patience = _patience(patience)
        self._local = threading.local()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, id: str | None = None) -> RemoteStream:
        """Opens a stream.  Raises `Conflict` if there is one of that name, `Busy`."""
        id = secrets.token_hex(16) if id is None else check_name(id)
        # The token is the client's: asked again, because an answer was lost, it is the same stream.
        token = secrets.token_urlsafe(24)
        found = self.call(id, "POST", "/v1/streams", {"id": id}, token=token)
        return RemoteStream(self, id, _of(found, "token"), _of(found, "step"))

    def resume(self, id: str, token: str) -> RemoteStream:
        """Goes on with a stream that was opened before.  Raises `UnknownStream`, `WrongToken`."""
        found = self.call(check_name(id), "GET", f"/v1/streams/{id}", token=token)
        return RemoteStream(self, id, token, _of(found, "step"))

    def takeover(self, id: str, token: str) -> RemoteStream:
        """As `resume`, under a new token: whoever has the old one is shut out."""
        content = {"id": check_name(id), "takeover": True}
        found = self.call(id, "POST", "/v1/streams", content, token=token)
        return RemoteStream(self, id, _of(found, "token"), _of(found, "step"))

    def call(
        self, id: str, method: str, path: str, content: Any = None, *, token: str = ""
    ) -> dict[str, Any]:
        """One call to the server of stream `id`, until it is answered or patience ends."""
        checked_secret("token", token)
        headers = {"Content-Type": "application/json", "Stream-Token": token, SESSION: id}
        if self.bearer is not None:
            headers["Authorization"] = f"Bearer {self.bearer}"
        body = None if content is None else json.dumps(content)
        end, pause = time.monotonic() + self.patience, FIRST_PAUSE
        while True:
            try:
                return self._once(choose(self.servers, id), method, path, body, headers)
            except (OSError, http.client.HTTPException, Unavailable):
                if time.monotonic() + pause > end:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _once(
        self, server: str, method: str, path: str, body: str | None, headers: dict[str, str]
    ) -> dict[str, Any]:
        connections = self._local.__dict__.setdefault("connections", {})
        connection = connections.get(server)
        if connection is None:
            connection = connections[server] = _connection(server, self.patience)
        try:
            connection.request(method, urlsplit(server).path.rstrip("/") + path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        except BaseException:
            connection.close()
            connections.pop(server, None)
            raise
        if answer.status >= 500 and not data.startswith(b'{"error"'):
            # Not from recur but from what stands before it, whose server has just gone.
            raise Stopping(f"{server} answered {answer.status}.")
        try:
            found = read_json(data) if data else {}
        except FormatError:
            found = {"error": None}
        if answer.status >= 300 or "error" in found:
            if not isinstance(found.get("error"), dict):
                raise RecurError(
                    f"{server} answered {answer.status} to {method} {path}, and not as recur serve "
                    "does, expected JSON. Is it the address of a server of recur?"
                )
            raise_error(found["error"])
        return found

    def close(self) -> None:
        """Ends this thread's connections; streams stay open on the server."""
        for connection in self._local.__dict__.pop("connections", {}).values():
            connection.close()


def _of(found: dict[str, Any], name: str) -> Any:
    if name not in found:
        raise RecurError(
            f"The server answered without {name!r}. Is it the address of a server of recur?"
        )
    return found[name]


def _patience(seconds: Any) -> float:
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not 0 < seconds < 1e9:
        raise ValueError(f"patience is {seconds!r}, expected seconds, more than 0.")
    return float(seconds)


def _connection(server: str, timeout: float) -> http.client.HTTPConnection:
    parts = urlsplit(server)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    assert parts.hostname is not None
    return kind(parts.hostname, parts.port, timeout=timeout)


class RemoteStream:
    """A stream on a server, as `Stream`; of one thread at a time.

    id, token  what `Client.resume` needs to go on with it
    """

    def __init__(self, client: Client, id: str, token: str, step: int) -> None:
        self.client = client
        self.id = id
        self.token = token
        self._history = History(step)

    @property
    def steps(self) -> int:
        """The number of the last step that was answered."""
        return self._history.step

    def step(self, x: Any) -> np.ndarray:
        """One step: x (n_in,), or an index, gives y (n_out,) float32.

        Raises `Expired`, `UnknownStream`, `Conflict`, `ShapeError`; `OSError` if the server cannot
        be reached for longer than the client's patience.
        """
        number = self._history.step + 1
        self._history.add(number, numbers(self.id, x))
        y = self._sent_again(number, number)
        self._history.step = number
        return y

    def _sent_again(self, first: int, last: int) -> np.ndarray:
        """The answer to step `last`, after all steps from `first` on were sent."""
        for number, x in self._history.since(first, last):
            content = {"step": number, "x": x.tolist()}
            try:
                found = self._patiently(content)
            except Gap as gap:
                if gap.expected is None or gap.expected >= number:
                    raise
                return self._sent_again(gap.expected, last)
        return np.array(_of(found, "y"), np.float32)

    def _patiently(self, content: dict[str, Any]) -> dict[str, Any]:
        """One step; a server that is busy is asked again."""
        end, pause = time.monotonic() + self.client.patience, FIRST_PAUSE
        while True:
            try:
                return self._call("POST", "/step", content)
            except Busy:
                if time.monotonic() + pause > end:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _call(self, method: str, path: str, content: Any = None) -> dict[str, Any]:
        whole = f"/v1/streams/{self.id}{path}"
        return self.client.call(self.id, method, whole, content, token=self.token)

    def reset(self) -> None:
        """Goes back to rest; the next step is step 1."""
        self._call("POST", "/reset", {})
        self._history.clear()

    def close(self) -> None:
        """Ends the stream on the server."""
        self._call("DELETE", "")


class AsyncStream:
    """A stream over a WebSocket; steps may be under way together.

        async with AsyncStream("http://127.0.0.1:8000") as stream:
            y = await stream.step(x)

    servers, bearer, patience  as for `Client`
    id, token                  of a stream that is open already; without a token one is opened

    Answers come in the order of the steps.  A connection that is silent is asked for a sign of life
    every 6 seconds and given up after at most 12 more.  Raises `ImportError` without the extra.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        id: str | None = None,
        token: str | None = None,
        bearer: str | None = None,
        patience: float = 30.0,
    ) -> None:
        try:
            import websockets
        except ImportError:
            raise ImportError(
                'AsyncStream needs the package websockets: pip install "recur[serve]".'
            ) from None
        self._websockets = websockets
        self.servers = addresses(servers)
        self.id = secrets.token_hex(16) if id is None else check_name(id)
        self.token = secrets.token_urlsafe(24) if token is None else checked_secret("token", token)
        self._opened = token is not None
        self.bearer = None if bearer is None else checked_secret("bearer token", bearer)
        self.patience = _patience(patience)
        self._history = History(0)
        self._asked = 0  # the number of the last step that was asked for
        self._futures: OrderedDict[int, asyncio.Future[np.ndarray]] = OrderedDict()
        self._socket: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._lost: float | None = None  # since when nothing was answered
        self._pause = FIRST_PAUSE

    @property
    def steps(self) -> int:
        """The number of the last step that was answered."""
        return self._history.step

    async def __aenter__(self) -> AsyncStream:
        await self._connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.disconnect()

    async def disconnect(self) -> None:
        """Ends the connection; the stream stays open on the server."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._socket is not None:
            await self._socket.close()
        self._fail(RecurError("The client was disconnected."))

    async def step(self, x: Any) -> np.ndarray:
        """One step: x (n_in,), or an index, gives y (n_out,) float32.  Raises as `RemoteStream`."""
        given = numbers(self.id, x).astype(np.float32).reshape(-1)
        async with self._lock:
            if self._reader is None or self._reader.done():
                await self._connect()
            self._asked += 1
            number = self._asked
            self._history.add(number, given)
            future = asyncio.get_running_loop().create_future()
            self._futures[number] = future
            with contextlib.suppress(self._websockets.ConnectionClosed):  # the reader sees to it
                ((_, kept),) = self._history.since(number, number)
                await self._socket.send(pack_frame(number, kept))
        return await asyncio.shield(future)

    # ------------------------------------------------------------ the connection

    async def _connect(self) -> None:
        """Connects, and sends every step again that was not answered."""
        end, pause = time.monotonic() + self.patience, FIRST_PAUSE
        while True:
            try:
                step = await self._greet()
                break
            except (OSError, self._websockets.WebSocketException, Busy, Unavailable, EOFError):
                if time.monotonic() + pause > end:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        if not self._futures and self._history.step == 0:
            self._history.step = self._asked = step
        # The server may stand at the last step that was answered, one further, or further back.
        first = min(step + 1, next(iter(self._futures), self._asked + 1))
        steps = self._history.since(first, self._asked)
        # It reads already while steps are sent again: a server whose answers are not read stops.
        self._reader = asyncio.create_task(self._read())
        with contextlib.suppress(self._websockets.ConnectionClosed):  # the reader sees to it
            for number, x in steps:
                await self._socket.send(pack_frame(number, x))

    async def _greet(self) -> int:
        """Connects; the step at which the stream stands.  No socket is left where it fails."""
        try:
            return await self._greeted(choose(self.servers, self.id))
        except BaseException:
            if self._socket is not None:
                self._socket.transport.abort()
            raise

    async def _greeted(self, server: str) -> int:
        address = server.replace("http", "ws", 1).rstrip("/") + "/v1/ws"
        self._socket = await self._websockets.connect(
            address,
            additional_headers={SESSION: self.id},
            ping_interval=PING,
            ping_timeout=PING,
            close_timeout=PING,
            max_size=None,
        )
        first = {"resume": self.id} if self._opened else {"open": self.id}
        await self._socket.send(
            json.dumps({**first, "token": self.token, **_with(bearer=self.bearer)})
        )
        try:
            found = read_json(await asyncio.wait_for(self._socket.recv(), self.patience))
        except asyncio.TimeoutError:
            raise ConnectionError(f"{server} says nothing.") from None
        if "error" in found:
            raise_error(found["error"])
        if type(found.get("step")) is not int:
            raise RecurError(
                f"{server} answered {str(found)[:80]}, and not as recur serve does, expected the "
                "stream's step. Is it the address of a server of recur?"
            )
        self._opened = True
        return int(found["step"])

    async def _read(self) -> None:
        error: Exception | None = None
        try:
            async for message in self._socket:
                if isinstance(message, str):
                    error = _told(message)
                    break
                number, y = unpack_frame(message)
                self._lost, self._pause = None, FIRST_PAUSE
                self._history.step = max(self._history.step, number)
                future = self._futures.pop(number, None)
                if future is not None and not future.done():
                    future.set_result(y)
        except self._websockets.ConnectionClosed:
            pass
        except RecurError as broken:  # a frame that is none
            error = broken
        if error is not None and not isinstance(error, (Busy, Unavailable)):
            self._fail(error)
        elif self._futures:
            await self._again(error)

    async def _again(self, told: Exception | None) -> None:
        """Connects again, at once if there were answers; else after a pause, while patience lasts.

        told  what the server said at the end, if it did
        """
        now = time.monotonic()
        if self._lost is None:
            self._lost = now
        elif now - self._lost > self.patience:
            return self._fail(told or ConnectionError("The server ends every connection at once."))
        if told is not None or now > self._lost:
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        async with self._lock:
            try:
                await self._connect()
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Every step that waits gets the error, and may be asked for again."""
        self._asked = self._history.step
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)
                future.exception()
        self._futures.clear()


def _told(message: str) -> RecurError:
    """The error that a server's message tells of."""
    try:
        raise_error(read_json(message).get("error"))
    except RecurError as error:
        return error


def _with(**found: Any) -> dict[str, Any]:
    return {name: value for name, value in found.items() if value is not None}


def spread(servers: Sequence[str], ids: Iterable[str]) -> dict[str, int]:
    """How many of these streams each server has."""
    count = dict.fromkeys(servers, 0)
    for id in ids:
        count[choose(servers, id)] += 1
    return count
