"""Running the server: uvicorn, and signals that end it in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

from recur.errors import RecurError
from recur.serve.app import application
from recur.serve.options import Options
from recur.streaming import StreamPool


def serve(
    pool: StreamPool,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    options: Options | None = None,
    characters: list[str] | None = None,
    on_start: Callable[[str], object] | None = None,
) -> None:
    """Serves a pool until SIGTERM or SIGINT: then the running step is finished, every stream is
    written to the store, and the call returns.

    port      0 takes a free one
    on_start  called with the server's address once it takes connections

    Raises `ImportError` without the extra, `OSError` if the address cannot be had, `RecurError` if
    streams could not be written at the end.
    """
    options = options or Options()
    app = application(pool, options, characters=characters)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(app, host, port, options, on_start))
    failure = app.state.service.failure
    if failure is not None:
        raise RecurError(
            f"The streams were not written at the end: {failure} Each stands at its last step that "
            "was."
        ) from failure


async def _serve(
    app: Any, host: str, port: int, options: Options, on_start: Callable[[str], object] | None
) -> None:
    try:
        import uvicorn
    except ImportError:
        raise ImportError('A server needs uvicorn: pip install "recur[serve]".') from None

    class Server(uvicorn.Server):
        """Leaves signals alone: uvicorn would raise them again at the end, and so not exit 0."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets=sockets)
            if on_start is not None and self.started:
                bound = self.servers[0].sockets[0].getsockname()
                name = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
                on_start(f"http://{name}:{bound[1]}")

    server = Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="warning",
            lifespan="on",
            ws="websockets-sansio",
            ws_max_size=options.message,
            ws_ping_interval=options.ping,
            ws_ping_timeout=options.ping,
            http=impatient(options.slow),
            limit_concurrency=options.connections,
            timeout_graceful_shutdown=max(int(options.stop), 1),
            server_header=False,
        )
    )

    def end() -> None:
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError, RuntimeError):  # Windows; not the main thread
            loop.add_signal_handler(number, end)
    await server.serve()


def impatient(slow: float) -> type:
    """uvicorn's HTTP protocol, which ends connections on which no whole request comes for `slow` s.

    uvicorn itself waits for ever for the head of a request.
    """
    from uvicorn.protocols.http import auto

    protocol: Any = auto.AutoHTTPProtocol  # which of its two, uvicorn chooses as it is imported

    class Impatient(protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(slow, self._look, None)

        def _look(self, seen: Any) -> None:
            transport = self.transport
            if transport.is_closing() or transport.get_protocol() is not self:  # now a socket's
                return
            cycle = self.cycle
            if cycle is seen and (cycle is None or cycle.response_complete):
                transport.close()
            else:
                self.loop.call_later(slow, self._look, cycle)

    return Impatient
