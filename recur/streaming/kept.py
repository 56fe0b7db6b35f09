"""`StreamPool`: a pool whose streams may go idle, expire, be kept in a store, and come back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from recur.errors import Conflict, Expired, Gap
from recur.streaming.arguments import check_key, seconds, whole
from recur.streaming.blocks import Places
from recur.streaming.pool import Pool
from recur.streaming.rest import Rest
from recur.streaming.slots import Id
from recur.streaming.snapshot import Moment, pack, unpack
from recur.streaming.store import StateStore, checked_key, steady

TICKS = 16  # an idle time is looked at in this many parts: a stream goes at most a part too late
REMEMBERED = 10_000  # streams that are gone, of which the last step is still known


@dataclass(frozen=True)
class Flush:
    """When streams are written to the store: after every `steps` steps, or every `seconds`.

    What was stepped since is lost when the process dies; clients that number their steps learn
    where each stream stands.  `Flush(steps=1)` loses nothing that was answered.
    """

    steps: int | None = 1
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None:
            whole("Flush", "steps", self.steps)
        seconds("Flush", "seconds", self.seconds)


class Departure(NamedTuple):
    """A stream that left memory because it was idle: what `on_idle` is called with.

    kept  whether it is in the store, from where its next step brings it back; else it has expired
    """

    id: Id
    step: int
    kept: bool


class StreamPool(Pool):
    """Many streams of one model: any of them step in one call, each as if it were alone.

        pool = StreamPool(model)
        pool.open("anna"), pool.open("ben")
        Y = pool.step(["anna", "ben"], X)              # X (n_in, 2), Y (n_out, 2)

    model     as for `Stream`
    capacity  for how many streams memory is laid out at first; it doubles when they are more, and
              what is there never moves.  A stream takes its state, its last answer, some 60 bytes
              of numbers, and its name
    limit     how many may be in memory; `open` of another raises `Busy`
    rest      where streams start, as for `Stream`

    store     where streams are kept (`MemoryStore`, `SQLiteStore`, `RedisStore`); ids are strings
              then.  A stream that is in the store and not in memory comes back by its next step
    flush     when they are written there
    key       signs snapshots in the store, and refuses others
    allow_weights_change  streams in the store go on although they were written with other weights
              of the same layers: for a new version of a model
    idle      seconds since its last finished step after which a stream leaves memory: into the
              store, or, if there is none, for good
    ttl       seconds since it was last written after which a stream in the store has expired
    on_idle   called with a `Departure` for each stream that left

    Each stream's numbers are bit-equal to those of a `Stream` on its own, whoever else steps, for
    kernel cells, Dense, Embedding, LayerNorm and Chains of them (other cells and functions as far
    as their own operations are).  Steps may be numbered, which makes it harmless to send them
    again.  All methods may be called by several threads.

    A stream has one owner: each pool that brings it back from the store raises its epoch there, and
    a pool that finds a higher epoch than its own drops its copy and raises `Conflict`.
    """

    def __init__(
        self,
        model: Any,
        *,
        capacity: int = 64,
        limit: int | None = None,
        rest: Rest = "learned",
        store: StateStore | None = None,
        flush: Flush = Flush(),
        key: bytes | None = None,
        allow_weights_change: bool = False,
        idle: float | None = None,
        ttl: float | None = None,
        on_idle: Callable[[Departure], object] | None = None,
        clock: Callable[[], float] = steady,
    ) -> None:
        super().__init__(model, capacity=capacity, limit=limit, rest=rest, clock=clock)
        if store is not None and not callable(getattr(store, "claim", None)):
            raise TypeError(
                f"{self.title}: store is {store!r}, expected a StateStore, as SQLiteStore(path)."
            )
        if not isinstance(flush, Flush):
            raise TypeError(f"{self.title}: flush is {flush!r}, expected Flush(steps=…).")
        if on_idle is not None and not callable(on_idle):
            raise TypeError(f"{self.title}: on_idle is {on_idle!r}, expected a function.")
        check_key(self.title, key)
        self.store = store
        self.policy = flush
        self.key = key
        self.allow_weights_change = allow_weights_change
        self.idle = seconds(self.title, "idle", idle)
        self.ttl = seconds(self.title, "ttl", ttl)
        self.on_idle = on_idle
        self._names: dict[int, Id] = {}  # by slot: only kept if streams may leave by themselves
        self._due: dict[int, list[int]] = {}  # slots by the tick at which they may be idle
        self._gone: dict[Id, tuple[float, int]] = {}  # when streams left, and at which step
        self._flushed = clock()

    @property
    def _tracked(self) -> bool:
        return self.idle is not None or self.store is not None

    # ------------------------------------------------------------ coming and going

    def __contains__(self, id: Id) -> bool:
        return super().__contains__(id) or self._stored(id) is not None

    def _stored(self, id: Id) -> Any:
        """The record of a stream in the store that has not expired."""
        if self.store is None or not isinstance(id, str):
            return None
        record = self.store.load(checked_key(self.title, id))
        if record is None or not record.snapshot:
            return None
        if self.ttl is not None and record.saved + self.ttl <= self._clock():
            return None
        return record

    def _new_epoch(self, id: Id) -> int:
        if self.store is None:
            return super()._new_epoch(id)
        return self.store.claim(checked_key(self.title, id)).epoch

    def _take_over(self, id: Id, tag: bytes) -> int:
        held = self.tag(id)
        epoch = super()._take_over(id, tag)
        try:
            self._write([id])
        except Exception:  # whoever had it is to have it still
            if id in self._slots:
                block, row = self._blocks.one(self._slots[id])
                block["tag"][row] = np.frombuffer(held, np.uint8)
            raise
        return epoch

    def _admit(self, id: Id, takeover: bool, tag: bytes) -> int:
        self._check_room()
        if self._stored(id) is not None:
            if not takeover:
                raise Conflict(
                    f"{self.title}: stream {id!r} is in the store. Step it to go on, close it to "
                    "begin anew, or pass takeover=True to be its only holder. Nothing was changed."
                )
            self._bring_back(id)
            return self._take_over(id, tag)
        epoch = super()._admit(id, takeover, tag)
        self._gone.pop(id, None)
        try:
            self._write([id])
        except Exception:  # what is not in the store is not open
            if id in self._slots:
                self._remove(id)
            raise
        return epoch

    def _missing(self, id: Id) -> int:
        if self._stored(id) is not None:
            return self._bring_back(id)
        self._refuse_expired(id)
        return super()._missing(id)

    def tag(self, id: Id) -> bytes:
        """The bytes that `open` was given; a stream in the store stays there."""
        with self._lock:
            record = None if id in self._slots else self._stored(id)
            if record is None:
                return super().tag(id)
            return self._unpacked(record.snapshot).tag

    def _refuse_expired(self, id: Id) -> None:
        gone = self._gone.get(id)
        record = None
        if self.store is not None and isinstance(id, str):
            record = self.store.load(id)
        if record is not None and record.snapshot:
            moment = unpack(
                self._advance.look(), record.snapshot, self.key, allow_weights_change=True
            )
            gone = record.saved + (self.ttl or 0), moment.step
        if gone is not None:
            at, step = gone
            raise Expired(
                f"{self.title}: stream {id!r} expired after step {step}, because nothing came for "
                "too long. Open it again to begin anew. Nothing was changed.",
                at=at,
                last_step=step,
            )

    def _bring_back(self, id: Id) -> int:
        assert self.store is not None and isinstance(id, str)
        self._check_room()
        held = self.store.load(id)
        if held is not None:  # looked at before it is claimed: a bad snapshot changes nothing
            self._unpacked(held.snapshot)
        record = self.store.claim(id)
        moment = self._unpacked(record.snapshot)
        self._place(id, moment, record.epoch)
        slot = self._slots[id]
        block, row = self._blocks.one(slot)
        block["saved"][row] = moment.step
        return slot

    def _unpacked(self, snapshot: bytes) -> Moment:
        plan, allowed = self._advance.look(), self.allow_weights_change
        return unpack(plan, snapshot, self.key, allow_weights_change=allowed)

    def refresh(self, id: Id) -> bool:
        """Drops the copy of a stream that has gone on in another pool; tells whether it had."""
        with self._lock:
            slot = self._slots.get(id)
            if slot is None or self.store is None or not isinstance(id, str):
                return False
            block, row = self._blocks.one(slot)
            record = self.store.load(id)
            if record is not None and record.epoch == block["epoch"][row]:
                return False
            self._remove(id)
            return True

    def replay(self, id: Id, x: Any, number: int | None) -> np.ndarray | None:
        with self._lock:
            try:
                answer = super().replay(id, x, number)
            except (Gap, Conflict):  # the number may fit where another pool has brought it
                if not self.refresh(id):
                    raise
                answer = super().replay(id, x, number)
            if answer is not None:  # the store may have failed when the step was taken
                names, places = self._places([id])
                self._finished(names, places)
            return answer

    def close(self, id: Id) -> None:
        """Ends a stream, here and in the store; its memory serves the next.

        Raises `UnknownStream`, `Expired`.
        """
        with self._lock:
            slot = self._slot(id)
            block, row = self._blocks.one(slot)
            epoch = int(block["epoch"][row])
            self._remove(id)
            if self.store is not None and isinstance(id, str):
                self.store.delete(id, epoch)

    def _placed(self, id: Id, slot: int, now: float) -> None:
        if self._tracked:
            self._names[slot] = id
        if self.idle is not None:
            self._watch(slot, now)

    def _remove(self, id: Id) -> None:
        self._names.pop(self._slots[id], None)
        super()._remove(id)

    def fork(self, id: Id, new: Id) -> int:
        with self._lock:
            epoch = super().fork(id, new)
            self._write([new])
            return epoch

    def restore(
        self,
        snapshots: dict[Any, bytes],
        *,
        key: bytes | None = None,
        allow_weights_change: bool = False,
    ) -> None:
        with self._lock:
            super().restore(snapshots, key=key, allow_weights_change=allow_weights_change)
            self._write(list(snapshots))

    # ------------------------------------------------------------ the store

    def _finished(self, names: Sequence[Id], places: Places) -> None:
        if self.store is None:
            self._reap_due()
            return
        policy = self.policy
        if policy.steps is not None:
            late = self._get("step", places) - self._get("saved", places) >= policy.steps
            late |= self._get("saved", places) < 0
            if late.any():
                self._write([names[i] for i in np.flatnonzero(late).tolist()])
        if policy.seconds is not None:
            self.flush_late()
        self._reap_due()

    def flush(self) -> None:
        """Writes every stream to the store that has moved since it was last written."""
        with self._lock:
            self._flushed = self._clock()
            if self.store is None:
                return
            moved = [id for id, slot in self._slots.items() if self._has_moved(slot)]
            self._write(moved)

    def flush_late(self) -> None:
        """Flushes if the policy's `seconds` have gone by; where no step may come, call it."""
        every = self.policy.seconds
        if every is not None and self._clock() - self._flushed >= every:
            self.flush()

    def _has_moved(self, slot: int) -> bool:
        block, row = self._blocks.one(slot)
        return bool(block["saved"][row] != block["step"][row])

    def _write(self, ids: Sequence[Id]) -> None:
        """Writes streams to the store; those that another pool owns now are dropped."""
        if self.store is None or not ids:
            return
        records: dict[str, tuple[int, bytes]] = {}
        for id in ids:
            block, row = self._blocks.one(self._slots[id])
            snapshot = pack(self._advance.look(), self._moment(self._slots[id]), self.key)
            records[str(id)] = int(block["epoch"][row]), snapshot
        refused = self.store.save(records)
        for id in ids:
            if id in refused:
                self._remove(id)
            else:
                block, row = self._blocks.one(self._slots[id])
                block["saved"][row] = block["step"][row]
        if refused:
            raise Conflict(
                f"{self.title}: stream {min(refused)!r} "
                + (f"and {len(refused) - 1} more " if len(refused) > 1 else "")
                + "went on in another pool, or was closed there; what it answered since is not "
                "true. The copy here was dropped.",
                lost=refused,
            )

    def evict(self, ids: Sequence[Id]) -> None:
        """Moves streams from memory to the store, from where their next step brings them back."""
        with self._lock:
            if self.store is None:
                raise ValueError(f"{self.title}: it has no store to move streams to.")
            here = [id for id in ids if id in self._slots]
            self._write([id for id in here if self._has_moved(self._slots[id])])
            for id in here:
                self._remove(id)

    # ------------------------------------------------------------ time

    def _tick(self, when: float) -> int:
        assert self.idle is not None
        return int(when / (self.idle / TICKS))

    def _watch(self, slot: int, last: float) -> None:
        """Notes when a stream that was last stepped at `last` is to be looked at."""
        assert self.idle is not None
        tick = self._tick(last + self.idle) + 1
        block, row = self._blocks.one(slot)
        block["due"][row] = tick
        self._due.setdefault(tick, []).append(slot)

    def _reap_due(self) -> None:
        if self.idle is not None and self._due and min(self._due) <= self._tick(self._clock()):
            self.reap()

    def reap(self) -> list[Departure]:
        """Lets streams go that were idle for too long; each is looked at once an idle time.

        Happens by itself with every step; call it where no step may come.
        """
        if self.idle is None:
            return []
        gone: list[Departure] = []
        with self._lock:
            now = self._clock()
            for tick in sorted(t for t in self._due if t <= self._tick(now)):
                slots = self._due.pop(tick)
                while slots:
                    slot = slots[-1]
                    block, row = self._blocks.one(slot)
                    if slot not in self._names or block["due"][row] != tick:
                        slots.pop()  # given to another stream since
                        continue
                    last = float(block["time"][row])
                    if last + self.idle > now:
                        self._watch(slot, last)
                    else:
                        try:
                            step = int(block["step"][row])
                            gone.append(self._depart(self._names[slot], step, now))
                        except Exception:  # the store fails: they are looked at again
                            self._due[tick] = slots
                            self._tell(gone)
                            raise
                    slots.pop()
            if self.store is not None and self.ttl is not None:
                if now - self._flushed >= self.ttl:
                    with contextlib.suppress(Conflict):  # another pool has them: nothing is lost
                        self.flush()  # else a stream that is stepped but seldom written seems old
                self.store.purge(now - 2 * self.ttl)
        self._tell(gone)
        return gone

    def _tell(self, gone: list[Departure]) -> None:
        for departure in gone:
            if self.on_idle is not None:
                self.on_idle(departure)

    def _depart(self, id: Id, step: int, now: float) -> Departure:
        if self.store is not None:
            try:
                self.evict([id])
            except Conflict:  # another pool has it: nothing is lost
                pass
            return Departure(id, step, True)
        self._remove(id)
        self._gone[id] = now, step
        while len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]
        return Departure(id, step, False)
