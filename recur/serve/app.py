"""The Starlette application: streams over HTTP and sockets, health, metrics, the page."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np

from recur._version import __version__
from recur.errors import FormatError, RecurError
from recur.serve.engine import tag_of
from recur.serve.openapi import describe
from recur.serve.options import Options
from recur.serve.page import PAGE
from recur.serve.protocol import TooLarge, as_list, read_json, read_step, read_token
from recur.serve.service import Service
from recur.serve.socket import StreamSocket
from recur.streaming import StreamPool

log = logging.getLogger("recur.serve")
_BINARY = "application/octet-stream"


def application(
    pool: StreamPool, options: Options | None = None, *, characters: list[str] | None = None
) -> Any:
    """An ASGI application that serves the streams of a pool; `recur serve` runs it.

    The pool belongs to the application.  When it ends, every stream is written to the pool's store,
    and the store is closed.

    Raises `ImportError` without the extra: `pip install "recur[serve]"`.
    """
    try:
        from starlette.applications import Starlette
        from starlette.routing import Route, WebSocketRoute
    except ImportError:
        raise ImportError('A server needs starlette: pip install "recur[serve]".') from None
    service = Service(pool, options or Options(), characters)
    http = Http(service)

    @contextlib.asynccontextmanager
    async def life(app: Any) -> AsyncIterator[None]:
        service.engine.start()
        try:
            yield
        finally:
            try:
                await service.engine.stop()
            except Exception as error:
                service.failure = error
                raise
            finally:
                if pool.store is not None:
                    pool.store.close()

    async def connect(socket: Any) -> None:
        await StreamSocket(service, socket).run()

    routes = [Route(path, http.guarded(end, free), methods=[m]) for m, path, end, free in (
        ("GET", "/", http.page, True),
        ("GET", "/healthz", http.health, True),
        ("GET", "/openapi.json", http.openapi, True),
        ("GET", "/metrics", http.metrics, False),
        ("GET", "/v1/model", http.model, False),
        ("GET", "/v1/recent", http.recent, False),
        ("POST", "/v1/streams", http.open, False),
        ("POST", "/v1/step", http.step_many, False),
        ("GET", "/v1/streams/{id}", http.look, False),
        ("DELETE", "/v1/streams/{id}", http.close, False),
        ("POST", "/v1/streams/{id}/step", http.step, False),
        ("POST", "/v1/streams/{id}/reset", http.reset, False),
        ("GET", "/v1/streams/{id}/snapshot", http.snapshot, False),
    )]  # fmt: skip
    app = Starlette(routes=[*routes, WebSocketRoute("/v1/ws", connect)], lifespan=life)
    app.state.service = service
    return app


class Http:
    """The HTTP calls.  A stream's token comes in the header `Stream-Token`."""

    def __init__(self, service: Service) -> None:
        from starlette import requests, responses

        self._service = service
        self._responses = responses
        self._gone = requests.ClientDisconnect

    def guarded(
        self, call: Callable[[Any], Awaitable[Any]], free: bool
    ) -> Callable[[Any], Awaitable[Any]]:
        """A call whose errors become answers; `free` ones need no bearer token."""

        async def answer(request: Any) -> Any:
            try:
                if not free:
                    headers = request.headers
                    self._service.check_origin(headers.get("origin"), headers.get("host"))
                    self._service.check_bearer(headers.get("authorization"))
                return await call(request)
            except Exception as error:
                if not isinstance(error, (RecurError, OSError, self._gone)):
                    log.error("a call failed", exc_info=error)
                described, status, _ = self._service.error(error)
                return self._json({"error": described}, status)

        return answer

    def _json(self, content: Any, status: int = 200) -> Any:
        return self._responses.JSONResponse(content, status)

    async def _body(self, request: Any) -> bytes:
        """The request's body, read no further than it may go."""
        options = self._service.options
        pieces: list[bytes] = []
        size = 0
        stream = request.stream()
        while True:
            try:
                piece = await asyncio.wait_for(anext(stream, None), options.slow)
            except asyncio.TimeoutError:
                raise FormatError(f"nothing of the body came for {options.slow:g} s.") from None
            if piece is None:
                return b"".join(pieces)
            size += len(piece)
            if size > options.message:
                raise TooLarge(f"a body of more than {options.message} bytes. Send less at a time.")
            pieces.append(piece)

    def _who(self, request: Any) -> tuple[str, bytes]:
        token = read_token(request.headers.get("stream-token"))
        return self._service.name(request.path_params["id"]), tag_of(token)

    # ------------------------------------------------------------ about the server

    async def page(self, request: Any) -> Any:
        policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        policy += "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
        return self._responses.HTMLResponse(PAGE, headers={"Content-Security-Policy": policy})

    async def health(self, request: Any) -> Any:
        return self._json({"status": "ok", "streams": len(self._service.pool)})

    async def openapi(self, request: Any) -> Any:
        return self._json(describe(__version__))

    async def metrics(self, request: Any) -> Any:
        text = self._service.metrics.text()
        return self._responses.Response(text, media_type="text/plain; version=0.0.4")

    async def model(self, request: Any) -> Any:
        return self._json(self._service.model())

    async def recent(self, request: Any) -> Any:
        return self._json(self._service.recent())

    # ------------------------------------------------------------ streams

    async def open(self, request: Any) -> Any:
        body = await self._body(request)
        engine = self._service.engine
        if request.headers.get("content-type", "").startswith(_BINARY):
            id = self._service.name(request.query_params.get("id"))
            token = await engine.restore(id, body)
        else:
            message = read_json(body or b"{}")
            id = self._service.name(message.get("id"))
            held = read_token(request.headers.get("stream-token")) or None
            if message.get("takeover") is True:
                token = await engine.take_over(id, held or "")
            else:
                token = await engine.open(id, held)
        step = await engine.with_stream(id, tag_of(token), self._step_number, id)
        return self._json({"id": id, "token": token, "step": step}, 201)

    def _step_number(self, id: str) -> int:
        return int(self._service.pool.steps([id])[0])

    async def look(self, request: Any) -> Any:
        id, tag = self._who(request)
        step = await self._service.engine.with_stream(id, tag, self._step_number, id)
        return self._json({"id": id, "step": step})

    async def close(self, request: Any) -> Any:
        id, tag = self._who(request)
        await self._service.engine.with_stream(id, tag, self._service.pool.close, id)
        return self._responses.Response(status_code=204)

    async def reset(self, request: Any) -> Any:
        id, tag = self._who(request)
        await self._service.engine.with_stream(id, tag, self._service.pool.reset, [id])
        return self._json({"id": id, "step": 0})

    async def snapshot(self, request: Any) -> Any:
        id, tag = self._who(request)
        pool = self._service.pool
        data = await self._service.engine.with_stream(id, tag, pool.snapshot, id, pool.key)
        return self._responses.Response(data, media_type=_BINARY)

    async def step(self, request: Any) -> Any:
        id, tag = self._who(request)
        body = await self._body(request)
        if not request.headers.get("content-type", "").startswith(_BINARY):
            number, x = read_step(read_json(body))
            answer = await self._service.step(id, x, number, tag)
            return self._json({"id": id, "step": answer.number, "y": as_list(answer.y)})
        if len(body) % 4:
            raise FormatError(f"a body of {len(body)} bytes, expected 4 for each number.")
        number = _number(request.query_params.get("step"))
        answer = await self._service.step(id, np.frombuffer(body, "<f4"), number, tag)
        return self._responses.Response(
            np.ascontiguousarray(answer.y, "<f4").tobytes(),
            media_type=_BINARY,
            headers={"Stream-Step": str(answer.number)},
        )

    async def step_many(self, request: Any) -> Any:
        """Each step succeeds or fails by itself; all are asked for before any is waited for."""
        steps = read_json(await self._body(request)).get("steps")
        if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
            raise FormatError('the message has no list of "steps".')
        asked = [self._ask(step) for step in steps]
        answers = [await self._answered(step, future) for step, future in asked]
        return self._json({"answers": answers})

    def _ask(self, step: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        try:
            number, x = read_step(step)
            id, token = step.get("id"), read_token(step.get("token"))
            if id is None or not token:
                raise FormatError("a step names no stream, or has no token.")
            return step, self._service.submit(self._service.name(id), x, number, tag_of(token))
        except RecurError as error:
            return step, error

    async def _answered(self, step: dict[str, Any], future: Any) -> dict[str, Any]:
        try:
            if isinstance(future, RecurError):
                raise future
            answer = await future
        except Exception as error:
            id = step.get("id")
            named = id if isinstance(id, str) and id.isascii() else None
            return {"id": named, "error": self._service.error(error)[0]}
        return {"id": step["id"], "step": answer.number, "y": as_list(answer.y)}


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 19 and int(text)):
        raise FormatError(f"step is {text[:30]!r}, expected a positive integer.")
    return int(text)
