"""One WebSocket, one stream: steps come in as frames, answers go out in the same order.

The first message is JSON and says which stream: {"open": name or null} (and a "token" that the
client proposes), {"resume": name, "token": …}, or {"takeover": name, "token": …}, with
"bearer": … if the server wants one (a browser cannot send headers) and "show": true if the hidden
state is wanted with JSON answers.  The answer is {"id": …, "token": …, "step": …}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import numpy as np

from recur.errors import Expired, FormatError, RecurError
from recur.serve.engine import Answer, tag_of
from recur.serve.protocol import (
    TooLarge,
    as_list,
    pack_frame,
    read_json,
    read_step,
    read_token,
    unpack_frame,
)
from recur.serve.service import Service
from recur.streaming import Departure


class StreamSocket:
    """A connection, from its first message to its end."""

    def __init__(self, service: Service, socket: Any) -> None:
        self.service = service
        self.socket = socket
        self.id = ""
        self.tag = b""
        self.shows = False
        # Answers that are still to come, in order, with the kind of frame that asked.
        self._pending: asyncio.Queue[tuple[Any, bool] | None] = asyncio.Queue(
            # With the one that is being answered: no more than the engine lets wait.
            max(service.options.pending - 2, 1)
        )
        self._expired: Expired | None = None
        self._sending: tuple[float, asyncio.Task[Any] | None] | None = None  # since when, and whose
        self._look: asyncio.TimerHandle | None = None
        self._late: asyncio.Task[Any] | None = None  # was cancelled because its send took too long

    async def run(self) -> None:
        """Serves the connection until either side ends it."""
        await self.socket.accept()
        try:
            with self.service.socket():
                await self._greet()
                await self._serve()
        except _Gone:
            pass
        except Exception as error:
            await self._close(error)
            if not isinstance(error, RecurError):
                raise  # to the log
        finally:
            if self._look is not None:
                self._look.cancel()

    async def _greet(self) -> None:
        message = read_json(await self._first())
        headers = self.socket.headers
        bearer = message.get("bearer")
        self.service.check_origin(headers.get("origin"), headers.get("host"))
        self.service.check_bearer(
            headers.get("authorization") if bearer is None else f"Bearer {bearer}"
        )
        self.shows = bool(message.get("show"))
        token = read_token(message.get("token"))
        engine = self.service.engine
        if "resume" in message:
            self.id = self.service.name(message["resume"])
        elif "takeover" in message:
            self.id = self.service.name(message["takeover"])
            token = await engine.take_over(self.id, token)
        elif "open" in message:
            self.id = self.service.name(message["open"])
            token = await engine.open(self.id, token or None)
        else:
            raise FormatError('the first message has none of "open", "resume" and "takeover".')
        self.tag = tag_of(token)
        step = await engine.with_stream(self.id, self.tag, self._step_number)
        await self._send({"id": self.id, "token": token, "step": step})

    async def _first(self) -> str:
        slow = self.service.options.slow
        try:
            return await asyncio.wait_for(self._receive_text(), slow)
        except asyncio.TimeoutError:
            raise FormatError(f"no first message came within {slow:g} s.") from None

    def _step_number(self) -> int:
        return int(self.service.pool.steps([self.id])[0])

    async def _serve(self) -> None:
        answers = asyncio.create_task(self._answer())
        read = asyncio.create_task(self._read())
        end = self.service.listen(self.id, lambda left: self._departed(left, read))
        try:
            done, _ = await asyncio.wait({answers, read}, return_when=asyncio.FIRST_COMPLETED)
            if read in done and not read.cancelled() and type(read.exception()) is not _Gone:
                await self._drain(answers)  # a bad frame; what was asked before it is answered
        finally:
            end()
            for task in (answers, read):
                task.cancel()
            results = await asyncio.gather(answers, read, return_exceptions=True)
        if self._expired is not None:
            raise self._expired
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _drain(self, answers: asyncio.Task[None]) -> None:
        end = asyncio.create_task(self._pending.put(None))
        await asyncio.wait({answers}, timeout=self.service.options.slow)
        end.cancel()

    def _departed(self, left: Departure, read: asyncio.Task[None]) -> None:
        if left.kept:
            return  # its next step brings it back
        self._expired = Expired(
            f"Stream {self.id!r} expired after step {left.step}, because nothing came for too "
            "long.",
            last_step=left.step,
        )
        read.cancel()

    async def _read(self) -> None:
        service = self.service
        while True:
            message = await self._receive()
            shows = False
            if message.get("bytes") is not None:
                frame = self._measured(message["bytes"])
                number, x = unpack_frame(frame)
                asked = service.submit(self.id, x, number or None, self.tag)
            else:
                read = read_json(self._measured(message["text"]))
                if read.get("reset") is True:
                    await self._reset()
                    continue
                step, x = read_step(read)
                shows = True
                asked = service.submit(self.id, x, step, self.tag, shows=self.shows)
            await self._pending.put((asked, shows))  # waits while too many are unanswered

    async def _reset(self) -> None:
        async def reset() -> Answer:
            await self.service.engine.with_stream(
                self.id, self.tag, self.service.pool.reset, [self.id]
            )
            return Answer(0, np.empty(0, np.float32))

        await self._pending.join()  # steps that came before it are taken before it
        await self._pending.put((asyncio.ensure_future(reset()), True))

    async def _answer(self) -> None:
        while (asked := await self._pending.get()) is not None:
            future, as_json = asked
            answer = await future
            if as_json:
                shown: dict[str, Any] = {"step": answer.number, "y": as_list(answer.y)}
                if answer.state is not None:
                    shown["state"] = np.round(answer.state, 4).tolist()
                await self._send(shown)
            else:
                await self._send(pack_frame(answer.number, answer.y))
            self._pending.task_done()

    # ------------------------------------------------------------ messages

    async def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = await self.socket.receive()
        if message["type"] == "websocket.disconnect":
            raise _Gone
        return message

    async def _receive_text(self) -> str:
        message = await self._receive()
        if message.get("text") is None:
            raise FormatError("the first message is binary, expected JSON.")
        return str(self._measured(message["text"]))

    def _measured(self, data: Any) -> Any:
        if len(data) > self.service.options.message:
            raise TooLarge(
                f"a message of {len(data)} bytes, expected at most {self.service.options.message}."
            )
        return data

    async def _send(self, message: dict[str, Any] | bytes) -> None:
        """Sends; a client that does not read for too long is dropped."""
        sending = (
            self.socket.send_bytes(message)
            if isinstance(message, bytes)
            else self.socket.send_text(json.dumps(message, separators=(",", ":")))
        )
        # One timer a connection looks every now and then whether the send of that moment is late:
        # `asyncio.wait_for` would make a task and a timer for each.
        loop = asyncio.get_running_loop()
        sender = asyncio.current_task()
        self._sending = loop.time(), sender
        if self._look is None:
            self._look = loop.call_later(self.service.options.slow, self._look_at_sending, loop)
        try:
            await sending
        except asyncio.CancelledError:
            if self._late is not sender:
                raise
            raise _Gone from None
        except Exception:  # it has gone: each web server says that in its own way
            raise _Gone from None
        finally:
            self._sending = None

    def _look_at_sending(self, loop: asyncio.AbstractEventLoop) -> None:
        self._look = None
        if self._sending is None:
            return  # the next send begins anew
        since, sender = self._sending
        left = since + self.service.options.slow - loop.time()
        if left > 0:
            self._look = loop.call_later(left, self._look_at_sending, loop)
        elif sender is not None:
            self._late = sender
            sender.cancel()

    async def _close(self, error: BaseException) -> None:
        described, _, code = self.service.error(error)
        with contextlib.suppress(Exception):
            await self._send({"error": described})
            await self.socket.close(code, described["code"])


class _Gone(Exception):
    """The client has gone."""
