"""`Engine`: steps of many clients, gathered into steps of one pool.

What arrives while a step runs goes into the next one, which begins as soon as the pool is free (or
`max_wait` later, if more streams are to be gathered).  A stream's own steps follow one another.

Steps run in a thread of the pool's own, so that the event loop goes on reading.  But to hand a
short one over and back costs more than it takes, and each time that the thread wants to go on it
waits for the loop to leave Python's lock, up to 5 ms: a step that is shorter than that, and for
which nothing but kernels runs, is taken in the loop itself, as many streams at once as that allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from recur.errors import Busy, Conflict, FormatError, RecurError
from recur.serve.protocol import Stopping, StoreFailed, WrongToken, own_error
from recur.streaming import Departure, MemoryStore, StreamPool

Result = TypeVar("Result")
log = logging.getLogger("recur.serve")
RECENT = 240  # batches of which sizes and times are kept
LEAST_TOKEN, MOST_TOKEN = 32, 256  # characters
# Seconds that a step may take in the event loop: no more than another thread takes from it anyway.
SHORT = 5e-3
ENOUGH = 64  # streams in a step: more of them together are hardly faster

_NO_LONGER = (
    "The token is not that of stream {!r}, or was replaced by a takeover. Nothing was changed."
)


@dataclass
class Request:
    """One step that a client asked for.

    x       the input as the pool's rows, (1, n_in) or (1,) for an index
    number  which step it is; None for the next
    tag     of whoever asks, to be the stream's
    shows   whether the state is wanted with the answer
    """

    id: str
    x: np.ndarray
    number: int | None
    tag: bytes
    answer: asyncio.Future[Answer]
    shows: bool = False
    arrived: float = field(default_factory=time.perf_counter)


@dataclass
class Answer:
    """What a step gave: its number, y (n_out,), and the hidden state if it was asked for."""

    number: int
    y: np.ndarray
    state: np.ndarray | None = None


@dataclass
class Batch:
    """One step of the pool: how many streams, how long it took, how long the oldest waited."""

    size: int
    seconds: float
    waited: float


class Engine:
    """Owns a pool: its calls follow one another, in a thread or, if they are short, in the loop.

    max_wait   seconds that a step waits for others to join it when the pool is free
    max_batch  how many streams step together at most
    depth      how many steps of one stream may wait; another one is `Busy`
    admit      called with a stream before it takes a new step; it raises to refuse it
    """

    def __init__(
        self,
        pool: StreamPool,
        *,
        max_wait: float = 0.0,
        max_batch: int = 4096,
        depth: int = 64,
        on_batch: Callable[[Batch], object] | None = None,
        on_idle: Callable[[Departure], object] | None = None,
        admit: Callable[[str], object] | None = None,
    ) -> None:
        self.pool = pool
        self.max_wait = max_wait
        self.max_batch = max_batch
        self.depth = depth
        self.recent: deque[Batch] = deque(maxlen=RECENT)
        self._on_batch = on_batch
        self._on_idle = on_idle
        self._admit = admit
        # By stream and tag: what somebody asks who has not the token keeps nobody else waiting.
        self._waiting: dict[tuple[str, bytes], deque[Request]] = {}
        # Steps that were taken but not written, and so not answered.  What was sent behind one,
        # before its sender could know, must not be taken: its answer would replace the one owed.
        self._owed: dict[str, int] = {}
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "recur-pool")
        # Calls that the thread has not finished: while there are any, the pool is not the loop's.
        self._under_way: set[Future[Any]] = set()
        self._store_waits = not (pool.store is None or isinstance(pool.store, MemoryStore))
        self._seconds: float | None = None  # of processor time that a step of one stream takes
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Begins to step.  Call it inside the running event loop."""
        loop = asyncio.get_running_loop()
        tell = self._on_idle
        if tell is not None:
            self.pool.on_idle = lambda left: loop.call_soon_threadsafe(tell, left)
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._keep())]

    async def stop(self) -> None:
        """Finishes the running step, writes every stream to the store, and ends."""
        self._stopping = True
        self._arrived.set()
        step, keep = self._tasks
        keep.cancel()
        await asyncio.gather(step, keep, return_exceptions=True)
        for request in [r for queue in self._waiting.values() for r in queue]:
            _fail(request, Stopping("The server is going down. Send the step again later."))
        self._waiting.clear()
        await self.call(self.pool.flush)
        self._thread.shutdown()

    async def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """`function(*args)` in the pool's thread, between two steps.  Raises `StoreFailed` too."""
        future = self._thread.submit(function, *args)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        with _reporting():
            return await asyncio.wrap_future(future)

    async def _keep(self) -> None:
        """Lets idle streams go, and flushes by time, also when nobody steps."""
        pool = self.pool
        while True:
            await asyncio.sleep(min((pool.idle or 16.0) / 16, 1.0))
            try:
                await self.call(pool.reap)
                if pool.policy.seconds is not None:
                    await self.call(pool.flush_late)
            except RecurError:  # a store that fails now, or streams that went on elsewhere
                continue

    # ------------------------------------------------------------ streams

    async def open(self, id: str, proposal: str | None = None) -> str:
        """Opens a stream; returns its token.

        proposal  the token that the client wants, of its own randomness.  It makes it harmless to
                  ask again when an answer was lost: the stream that has it is there already

        Raises `FormatError` for a proposal that could be guessed by its length.
        """
        if proposal is not None and not LEAST_TOKEN <= len(proposal) <= MOST_TOKEN:
            raise FormatError(
                f"a token of {len(proposal)} characters, expected {LEAST_TOKEN} to {MOST_TOKEN}."
            )
        return await self.call(self._open, id, proposal or secrets.token_urlsafe(24))

    def _open(self, id: str, token: str) -> str:
        try:
            self.pool.open(id, tag=tag_of(token))
        except Conflict:
            if not hmac.compare_digest(self.pool.tag(id), tag_of(token)):
                raise
        return token

    async def take_over(self, id: str, token: str) -> str:
        """Goes on with a stream under a new token; the present one is no good from then on."""

        def take_over() -> str:
            new = secrets.token_urlsafe(24)
            self.pool.open(id, takeover=True, tag=tag_of(new))
            return new

        return await self.with_stream(id, tag_of(token), take_over)

    async def restore(self, id: str, snapshot: bytes) -> str:
        """Opens a stream that goes on from a snapshot of this model; returns its token."""
        return await self.call(self._restore, id, snapshot)

    def _restore(self, id: str, snapshot: bytes) -> str:
        token = secrets.token_urlsafe(24)
        self.pool.restore({id: snapshot}, key=self.pool.key)
        self.pool.open(id, takeover=True, tag=tag_of(token))
        return token

    def check(self, id: str, tag: bytes) -> None:
        """Raises `WrongToken` unless the stream has this tag; in the pool's thread."""
        fits = hmac.compare_digest(self.pool.tag(id), tag)
        if not fits and self.pool.refresh(id):  # taken over elsewhere
            fits = hmac.compare_digest(self.pool.tag(id), tag)
        if not fits:
            raise WrongToken(_NO_LONGER.format(id))

    async def with_stream(
        self, id: str, tag: bytes, function: Callable[..., Result], *args: Any
    ) -> Result:
        """`function(*args)` in the pool's thread, once the tag is found to be the stream's."""

        def checked() -> Result:
            self.check(id, tag)
            self._owed.pop(id, None)  # whoever asks where the stream stands begins from there
            return function(*args)

        return await self.call(checked)

    # ------------------------------------------------------------ steps

    def submit(
        self, id: str, x: Any, number: int | None, tag: bytes, *, shows: bool = False
    ) -> asyncio.Future[Answer]:
        """Asks for a step; the future gives its answer, or the error.

        Raises `ShapeError` for an input that does not fit, `Busy` if too many steps of this stream
        wait already.
        """
        if self._stopping:
            raise Stopping("The server is going down. Send the step again later.")
        rows = self.pool.plan.rows(x, 1)
        queue = self._waiting.setdefault((id, tag), deque())
        if len(queue) >= self.depth:
            raise Busy(
                f"Stream {id!r} has {len(queue)} steps waiting. Wait for their answers first. "
                "Nothing was changed."
            )
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        queue.append(Request(id, rows, number, tag, future, shows))
        self._arrived.set()
        return future

    async def _run(self) -> None:
        while not self._stopping:
            if not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            if self.max_wait and len(self._waiting) < self.max_batch:
                await self._gather()
            here = self._most_here()
            batch = self._next(here or self.max_batch)
            try:
                if here:
                    with _reporting():
                        results = self._step(batch)
                else:
                    results = await self.call(self._step, batch)
            except Exception as error:
                results = [error] * len(batch)
            for request, result in zip(batch, results, strict=True):
                if isinstance(result, BaseException):
                    _fail(request, result)
                elif not request.answer.done():
                    request.answer.set_result(result)
            await asyncio.sleep(0)  # the turn of the others, also if more steps wait already

    def _most_here(self) -> int:
        """How many streams may step in the event loop now; 0: the pool's thread takes the step."""
        if self._under_way or self._seconds is None:
            return 0
        if self._store_waits or not self.pool.plan.sealed:  # for a disk, or a user's function
            return 0
        most = min(int(SHORT / max(self._seconds, 1e-9)), self.max_batch)
        # Those that are left step after the loop's next turn, which costs little if they are many.
        return most if most >= min(len(self._waiting), ENOUGH) else 0

    async def _gather(self) -> None:
        """Waits for others, until the oldest request has waited long enough."""
        oldest = min(queue[0].arrived for queue in self._waiting.values())
        left = oldest + self.max_wait - time.perf_counter()
        if left > 0:
            await asyncio.sleep(left)

    def _next(self, most: int) -> list[Request]:
        """The first request of at most so many streams, those that waited longest first."""
        batch = []
        for key in list(itertools.islice(self._waiting, most)):
            queue = self._waiting.pop(key)
            batch.append(queue.popleft())
            if queue:
                self._waiting[key] = queue  # at the end: the others have their turn first
        return batch

    # In the pool's thread, or in the loop while that has nothing to do.

    def _step(self, batch: list[Request]) -> list[Any]:
        """The answer, or the error, of each request."""
        begun, used = time.perf_counter(), time.thread_time()
        results: list[Any] = [None] * len(batch)
        self._attempt(batch, list(range(len(batch))), results)
        lost = [i for i, request in enumerate(batch) if _was_elsewhere(request, results[i])]
        if lost:  # their copies here are dropped: the number fits where the other owner has them
            self._attempt(batch, lost, results)
        self._note(batch, begun)
        # Not the time on the clock, which also has what the thread waited for Python's lock.
        used = (time.thread_time() - used) / len(batch)
        before = used if self._seconds is None else self._seconds
        self._seconds = before + (used - before) / 8
        return results

    def _attempt(self, batch: list[Request], some: list[int], results: list[Any]) -> None:
        groups: dict[int, list[int]] = {}
        holder: dict[str, int] = {}
        for i in some:
            request = batch[i]
            results[i] = None
            try:
                self.check(request.id, request.tag)
                self._check_owed(request)
                y = self.pool.replay(request.id, request.x.T, request.number)
                if y is None and self._admit is not None:
                    self._admit(request.id)
            except Exception as error:
                results[i] = _reported(error)
                if isinstance(results[i], StoreFailed) and request.number is not None:
                    self._owed.setdefault(request.id, request.number)
                continue
            if request.id in holder:  # its token was good until a takeover came to light
                before = holder[request.id]
                results[before] = WrongToken(_NO_LONGER.format(request.id))
                for group in groups.values():
                    if before in group:
                        group.remove(before)
            holder[request.id] = i
            self._owed.pop(request.id, None)
            if y is not None:
                assert request.number is not None
                results[i] = Answer(request.number, y)
            else:
                # Indices and one-hot columns of one model are different calls.
                groups.setdefault(request.x.ndim, []).append(i)
        for group in filter(None, groups.values()):
            self._step_group(batch, group, results)

    def _step_group(self, batch: list[Request], group: list[int], results: list[Any]) -> None:
        ids = [batch[i].id for i in group]
        x = np.concatenate([batch[i].x for i in group])
        numbers = None
        try:
            numbers = self.pool.steps(ids) + 1
            answers = self._answers(ids, x, numbers, group, results)
        except Exception as error:
            for i in group:
                results[i] = _reported(error)
            if isinstance(results[group[0]], StoreFailed):
                self._note_owed(ids, numbers)
            return
        for i, number, y in zip(group, numbers.tolist(), answers, strict=True):
            if results[i] is None:
                state = self._shown(batch[i].id) if batch[i].shows else None
                results[i] = Answer(number, y, state)

    def _check_owed(self, request: Request) -> None:
        owed = self._owed.get(request.id)
        if owed is not None and request.number is not None and request.number > owed:
            raise StoreFailed(
                f"Step {owed} of stream {request.id!r} could not be written, and was not answered. "
                "Send it again first. Nothing was changed."
            )

    def _note_owed(self, ids: list[str], numbers: Any) -> None:
        with contextlib.suppress(Exception):  # not even here: nothing was taken
            taken = self.pool.steps(ids) == numbers
            self._owed |= {id: int(n) for id, n, t in zip(ids, numbers, taken, strict=True) if t}

    def _answers(
        self, ids: list[str], x: np.ndarray, numbers: Any, group: list[int], results: list[Any]
    ) -> list[np.ndarray]:
        """The answers (n_out,) of these streams; those that another pool has get the error."""
        try:
            return list(self.pool.step(ids, x.T, numbers=numbers).T)
        except Conflict as error:
            if not error.lost:
                raise
            kept = [n for n, id in enumerate(ids) if id not in error.lost]
            for n, id in enumerate(ids):
                if id in error.lost:
                    results[group[n]] = error
            # They have been stepped and written: the same numbers give their answers.
            again = self.pool.step([ids[n] for n in kept], x[kept].T, numbers=numbers[kept])
            found = dict(zip(kept, again.T, strict=True))
            return [found.get(n, x[n]) for n in range(len(ids))]

    def _shown(self, id: str) -> np.ndarray:
        """The hidden state h of every layer, one after the other."""
        plan = self.pool.plan
        state = self.pool.parts([id])
        hidden = [a[0] for a, p in zip(state, plan.parts, strict=True) if p.name == "h"]
        return np.concatenate(hidden) if hidden else np.empty(0, np.float32)

    def _note(self, batch: list[Request], begun: float) -> None:
        now = time.perf_counter()
        done = Batch(len(batch), now - begun, now - min(r.arrived for r in batch))
        self.recent.append(done)
        if self._on_batch is not None:
            self._on_batch(done)


def tag_of(token: str) -> bytes:
    """What is kept of a token: enough to know it again, not to guess it."""
    return hashlib.sha256(token.encode()).digest()[:16]


@contextlib.contextmanager
def _reporting() -> Iterator[None]:
    """Raises a client's error, as `_reported` gives it, in place of what was raised."""
    try:
        yield
    except Exception as error:
        own = _reported(error)
        if own is error:
            raise
        raise own from error


def _reported(error: Exception) -> Exception:
    """The error as a client may have it; what is not the client's doing goes to the log."""
    own = own_error(error)
    if own is not error:
        log.error("the store failed: %r", error)
    elif not isinstance(error, RecurError):
        log.error("a step failed", exc_info=error)
    return own


def _was_elsewhere(request: Request, result: Any) -> bool:
    """Whether a numbered step met a copy that another pool has left behind."""
    lost = isinstance(result, Conflict) and request.id in result.lost
    return lost and request.number is not None


def _fail(request: Request, error: BaseException) -> None:
    if not request.answer.done():
        request.answer.set_exception(error)
        request.answer.exception()  # a client that has gone does not ask for it
