"""`Service`: what HTTP and sockets have in common: the engine, the model, limits, metrics."""

from __future__ import annotations

import contextlib
import hmac
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from recur.errors import Busy
from recur.serve.engine import Answer, Batch, Engine
from recur.serve.options import Options, Rate
from recur.serve.protocol import Unauthorised, check_name, describe_error
from recur.streaming import Departure, StreamPool


class Service:
    """A pool as it is served.

    pool        owned by the service from now on
    characters  what the indices of a character model stand for, "" for an unknown one; or None
    """

    def __init__(
        self, pool: StreamPool, options: Options, characters: list[str] | None = None
    ) -> None:
        if not isinstance(pool, StreamPool):
            raise TypeError(f"A server needs a StreamPool, got {pool!r}: StreamPool(model).")
        self.pool = pool
        self.options = options
        self.characters = characters
        pool.limit = options.streams
        self.engine = Engine(
            pool,
            max_wait=options.max_wait,
            depth=options.pending,
            on_batch=self._count_batch,
            on_idle=self._left,
            admit=None if options.rate is None else self._check_rate,
        )
        self.metrics = Metrics(pool)
        self._rates: dict[str, Rate] = {}
        self._most_rates = 1000
        self._sockets = 0
        self.failure: Exception | None = None  # why streams were not written at the end
        self._listeners: dict[str, set[Callable[[Departure], object]]] = {}

    # ------------------------------------------------------------ who may

    def check_bearer(self, header: str | None) -> None:
        """Raises `Unauthorised` unless the header carries the server's bearer token."""
        wanted = self.options.bearer
        if wanted is None:
            return
        kind, _, given = (header or "").partition(" ")
        fits = hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())
        if kind.lower() != "bearer" or not fits:
            raise Unauthorised("This server wants `Authorization: Bearer …`.")

    def _check_rate(self, id: str) -> None:
        """Raises `Busy` if this stream steps faster than it may; in the pool's thread."""
        rate = self.options.rate
        assert rate is not None
        now = time.monotonic()
        bucket = self._rates.get(id)
        if bucket is None:
            self._forget_rates(now)
            bucket = self._rates[id] = Rate(rate, self.options.burst, now)
        wait = bucket.take(now)
        if wait:
            raise Busy(
                f"Stream {id!r} steps more than {rate:g} times a second. Send the "
                f"step again in {wait:.3f} s. Nothing was changed."
            )

    def _forget_rates(self, now: float) -> None:
        if len(self._rates) >= self._most_rates:
            self._rates = {id: rate for id, rate in self._rates.items() if not rate.full(now)}
            self._most_rates = max(2 * len(self._rates), 1000)

    @contextlib.contextmanager
    def socket(self) -> Iterator[None]:
        """Counts a socket while it is open.  Raises `Busy` if they are too many."""
        if self._sockets >= self.options.connections:
            raise Busy(f"All {self.options.connections} connections are taken. Come back later.")
        self._sockets += 1
        self.metrics.sockets.inc()
        try:
            yield
        finally:
            self._sockets -= 1
            self.metrics.sockets.dec()

    def check_origin(self, origin: str | None, host: str | None) -> None:
        """Raises `Unauthorised` for a page of another host: it must not use whoever looks at it."""
        if origin is None or urlsplit(origin).netloc == host:
            return
        if origin not in self.options.origins:
            raise Unauthorised(f"Pages of {origin} may not use this server.")

    # ------------------------------------------------------------ inputs

    def name(self, id: Any) -> str:
        """The name of a stream to be opened: as given, checked, or a new one."""
        return uuid.uuid4().hex if id is None else check_name(id)

    def input(self, x: np.ndarray) -> np.ndarray:
        """An input as it came, as the pool takes it for one stream."""
        plan = self.pool.plan
        if plan.vocabulary is not None and x.size == 1:
            index = x.reshape(()).item()
            if float(index).is_integer() and 0 <= index < plan.vocabulary:
                return np.array(int(index))
        return x.reshape(-1)

    def submit(self, id: str, x: np.ndarray, number: int | None, tag: bytes, **more: Any) -> Any:
        """A future of the answer; see `Engine.submit`."""
        return self.engine.submit(id, self.input(x), number, tag, **more)

    async def step(self, id: str, x: np.ndarray, number: int | None, tag: bytes) -> Answer:
        """The answer to one step."""
        answer: Answer = await self.submit(id, x, number, tag)
        return answer

    # ------------------------------------------------------------ what happens

    def listen(self, id: str, tell: Callable[[Departure], object]) -> Callable[[], None]:
        """Calls `tell` when the stream leaves memory; returns what ends that."""
        self._listeners.setdefault(id, set()).add(tell)

        def end() -> None:
            tellers = self._listeners.get(id, set())
            tellers.discard(tell)
            if not tellers:
                self._listeners.pop(id, None)

        return end

    def _left(self, departure: Departure) -> None:
        self.metrics.left(departure)
        for tell in list(self._listeners.get(str(departure.id), ())):
            tell(departure)

    def _count_batch(self, batch: Batch) -> None:
        self.metrics.batch(batch)

    def error(self, error: BaseException) -> tuple[dict[str, Any], int, int]:
        """An error as JSON, its HTTP status and its closing code; counted."""
        described, status, close = describe_error(error)
        self.metrics.error(described["code"])
        return described, status, close

    # ------------------------------------------------------------ what it is

    def model(self) -> dict[str, Any]:
        """What a client must know of the model."""
        plan = self.pool.plan
        return {
            "model": plan.title,
            "n_in": plan.n_in,
            "vocabulary": plan.vocabulary,
            "characters": self.characters,
            "hidden": sum(part.size for part in plan.parts if part.name == "h"),
            "state_bytes": sum(part.nbytes for part in plan.parts),
        }

    def recent(self) -> dict[str, Any]:
        """The last batches: sizes, seconds, seconds that the oldest request waited in all."""
        batches = list(self.engine.recent)
        return {
            "streams": len(self.pool),
            "sizes": [b.size for b in batches],
            "seconds": [round(b.seconds, 7) for b in batches],
            "waited": [round(b.waited, 7) for b in batches],
        }


class Metrics:
    """Figures for Prometheus, in a registry of this server's own."""

    def __init__(self, pool: StreamPool) -> None:
        import prometheus_client as prometheus

        self._prometheus = prometheus
        self.registry = registry = prometheus.CollectorRegistry()
        self._steps = prometheus.Counter("recur_steps", "Steps taken.", registry=registry)
        self._errors = prometheus.Counter(
            "recur_errors", "Errors answered, by code.", ["code"], registry=registry
        )
        self._left = prometheus.Counter(
            "recur_streams_idle", "Streams that left memory.", ["kept"], registry=registry
        )
        self._sizes = prometheus.Histogram(
            "recur_batch_size",
            "Streams in a step of the pool.",
            buckets=[2.0**n for n in range(13)],
            registry=registry,
        )
        self._seconds = prometheus.Histogram(
            "recur_batch_seconds",
            "Time of a step of the pool.",
            buckets=[1e-5 * 2**n for n in range(18)],
            registry=registry,
        )
        self._waited = prometheus.Histogram(
            "recur_step_seconds",
            "Time from the arrival of a step to its answer, the longest of each batch.",
            buckets=[1e-5 * 2**n for n in range(18)],
            registry=registry,
        )
        streams = prometheus.Gauge("recur_streams", "Streams in memory.", registry=registry)
        streams.set_function(lambda: len(pool))
        self.sockets = prometheus.Gauge("recur_sockets", "Open sockets.", registry=registry)

    def batch(self, batch: Batch) -> None:
        self._steps.inc(batch.size)
        self._sizes.observe(batch.size)
        self._seconds.observe(batch.seconds)
        self._waited.observe(batch.waited)

    def error(self, code: str) -> None:
        self._errors.labels(code).inc()

    def left(self, departure: Departure) -> None:
        self._left.labels(str(departure.kept).lower()).inc()

    def text(self) -> bytes:
        """The figures as Prometheus reads them."""
        found: bytes = self._prometheus.generate_latest(self.registry)
        return found
