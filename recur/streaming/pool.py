"""`Pool`: many streams whose states lie packed, so that any of them step in one call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from recur._kernels import hash_rows
from recur.errors import Busy, Conflict, Gap, StreamError, UnknownStream
from recur.streaming.advance import Advance
from recur.streaming.arguments import (
    check_id,
    check_out,
    check_snapshots,
    check_tag,
    integers,
    listed,
    whole,
)
from recur.streaming.blocks import Blocks, Name, Places, rows_of, slot_columns
from recur.streaming.plan import Plan
from recur.streaming.rest import Rest, RestState
from recur.streaming.slots import Id, Slots
from recur.streaming.snapshot import NO_TAG, Moment, pack, unpack


class Pool:
    """What `StreamPool` does in memory: see there."""

    def __init__(
        self,
        model: Any,
        *,
        capacity: int = 64,
        limit: int | None = None,
        rest: Rest = "learned",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        capacity = whole("StreamPool", "capacity", capacity)
        plan = Plan(model)
        self.limit = None if limit is None else whole("StreamPool", "limit", limit, 0)
        self._clock = clock
        self._rest = RestState(plan, rest)
        self._blocks = Blocks(slot_columns(plan.parts), capacity)
        self._slots: dict[Id, int] = {}
        self._lock = threading.RLock()
        self._advance = Advance(plan, self._blocks)
        self._departures = 0
        self._last_epoch = 0
        self._mark = object()  # of this pool's `Slots`

    @property
    def model(self) -> Any:
        """The model that the streams run."""
        return self.plan.model

    @property
    def plan(self) -> Plan:
        """How the model steps, as it was when this was last looked at."""
        return self._advance.plan

    @property
    def title(self) -> str:
        """The pool in error messages: StreamPool(LSTM(3 => 5))."""
        return f"StreamPool({self.plan.title})"

    def __repr__(self) -> str:
        return f"{self.title} of {len(self)} streams"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self!r} cannot be copied or pickled. snapshot(ids) gives its streams as bytes."
        )

    def __len__(self) -> int:
        return len(self._slots)

    def __bool__(self) -> bool:
        return True  # a pool without streams is still a pool

    def __contains__(self, id: Id) -> bool:
        return id in self._slots

    def ids(self) -> list[Any]:
        """The streams that are in memory, oldest first."""
        with self._lock:
            return list(self._slots)

    # ------------------------------------------------------------ coming and going

    def open(self, id: Id, *, takeover: bool = False, tag: bytes = NO_TAG) -> int:
        """Opens a stream at rest, and returns its epoch: a number that rises with each owner.

        takeover  a stream that is there already goes on, under a new epoch: whoever held the old
                  one (`epochs=` of a step, or `slots`) gets `Conflict` from then on
        tag       16 bytes that stay with the stream, also in snapshots: see `tag`

        Raises `Conflict` if the stream is there and `takeover` is not set, `Busy` if the pool is
        full.  Nothing was changed then.
        """
        with self._lock:
            check_id(self.title, id)
            check_tag(self.title, tag)
            if id in self._slots:
                if not takeover:
                    raise Conflict(
                        f"{self.title}: stream {id!r} is open already. Close it, or pass "
                        "takeover=True to go on with it as its only holder. Nothing was changed."
                    )
                return self._take_over(id, tag)
            return self._admit(id, takeover, tag)

    def _take_over(self, id: Id, tag: bytes) -> int:
        block, row = self._blocks.one(self._slots[id])
        block["epoch"][row] = self._new_epoch(id)
        block["tag"][row] = np.frombuffer(tag, np.uint8)
        self._departures += 1
        return int(block["epoch"][row])

    def _admit(self, id: Id, takeover: bool, tag: bytes) -> int:
        epoch = self._new_epoch(id)
        self._place(id, self._at_rest(tag), epoch)
        return epoch

    def _at_rest(self, tag: bytes) -> Moment:
        return Moment(self._rest.rows(), tag=tag)

    def _new_epoch(self, id: Id) -> int:
        self._last_epoch += 1
        return self._last_epoch

    def _check_room(self) -> None:
        if self.limit is not None and len(self._slots) >= self.limit:
            raise Busy(
                f"{self.title}: all {self.limit} places are taken. Close a stream, or raise "
                "limit=. Nothing was changed."
            )

    def _place(self, id: Id, moment: Moment, epoch: int) -> None:
        """Gives a stream a slot and fills every column of it."""
        self._check_room()
        if moment.answer is not None:
            self._know_answer(moment.answer.shape, moment.answer.dtype)
        now = float(self._clock())  # the caller's own function, which may raise: no slot is taken
        slot = self._blocks.take()
        block, row = self._blocks.one(slot)
        for i, part in enumerate(moment.state):
            block[i][row] = part[0]
        block["step"][row] = moment.step
        block["digest"][row] = moment.digest
        block["answered"][row] = moment.answer is not None
        block["epoch"][row] = epoch
        block["time"][row] = now
        block["due"][row] = 0
        block["saved"][row] = -1
        block["tag"][row] = np.frombuffer(moment.tag, np.uint8)
        if moment.answer is not None:
            block["answer"][row] = moment.answer
        self._slots[id] = slot
        self._placed(id, slot, now)

    def _placed(self, id: Id, slot: int, now: float) -> None:
        """Called when a stream has got its slot, at the time `now`."""

    def close(self, id: Id) -> None:
        """Ends a stream; its memory serves the next.  Raises `UnknownStream`."""
        with self._lock:
            self._slot(id)
            self._remove(id)

    def _remove(self, id: Id) -> None:
        slot = self._slots.pop(id)
        block, row = self._blocks.one(slot)
        block["epoch"][row] = -1  # no `Slots` may take it for the stream that it was
        self._blocks.give_back(slot)
        self._departures += 1

    def fork(self, id: Id, new: Id) -> int:
        """Opens stream `new` in the state, and at the step number, of stream `id`.

        Returns the epoch.  Raises as `open`, and `UnknownStream`.
        """
        with self._lock:
            moment = self._moment(self._slot(id))
            check_id(self.title, new)
            if new in self:
                raise Conflict(
                    f"{self.title}: stream {new!r} is open already. Nothing was changed."
                )
            self._check_room()
            moment.tag = NO_TAG
            epoch = self._new_epoch(new)
            self._place(new, moment, epoch)
            return epoch

    # ------------------------------------------------------------ looking up

    def _slot(self, id: Id) -> int:
        check_id(self.title, id)
        slot = self._slots.get(id)
        return self._missing(id) if slot is None else slot

    def _missing(self, id: Id) -> int:
        """The slot of a stream that is not in memory, brought back; raises if there is none."""
        raise UnknownStream(
            f"{self.title}: no stream {id!r} is open. Open it first. Nothing was changed."
        )

    def _places(self, ids: Iterable[Id]) -> tuple[tuple, Places]:
        names = listed(self.title, ids)
        try:
            found = list(map(self._slots.__getitem__, names))
        except (KeyError, TypeError):
            # Bringing one stream back may send another away; the second look finds out.
            for id in names:
                self._slot(id)
            found = [self._slot(id) for id in names]
        if len(set(found)) < len(found):
            twice = next(id for id in names if names.count(id) > 1)
            raise StreamError(
                f"{self.title}: stream {twice!r} is named twice in one call; its steps follow one "
                "another. Nothing was changed."
            )
        index = np.array(found, np.int64)
        return names, self._blocks.places(index)

    def slots(self, ids: Iterable[Id]) -> Slots:
        """Looks streams up once, for many steps of the same ones.  Raises `UnknownStream`."""
        with self._lock:
            names, places = self._places(ids)
            epochs = np.array(self._get("epoch", places))
            return Slots(self._mark, names, places, epochs, self._departures)

    def _get(self, name: Name, places: Places) -> np.ndarray:
        if places.count == 0:
            shape, dtype = self._blocks.columns[name]
            return np.empty((0, *shape), dtype)
        return self._blocks.get(name, places)

    def _resolve(self, ids: Any) -> tuple[Sequence[Id], Places]:
        if not isinstance(ids, Slots):
            return self._places(ids)
        ids.check_owner(self.title, self._mark)
        if ids.seen != self._departures:
            gone = self._blocks.get("epoch", ids.places) != ids.epochs if len(ids) else np.zeros(0)
            lost = [id for id, away in zip(ids.ids, gone, strict=True) if away]
            if lost:
                raise Conflict(
                    f"{self.title}: stream {lost[0]!r} was closed or taken over since its slot was "
                    "looked up. Call slots(ids) again. Nothing was changed."
                )
            ids.seen = self._departures
        return ids.ids, ids.places

    def steps(self, ids: Iterable[Id] | Slots) -> np.ndarray:
        """How many steps each stream has taken: (N,) int64."""
        with self._lock:
            return np.array(self._get("step", self._resolve(ids)[1]))

    def tag(self, id: Id) -> bytes:
        """The bytes that `open` was given."""
        with self._lock:
            block, row = self._blocks.one(self._slot(id))
            return block["tag"][row].tobytes()

    # ------------------------------------------------------------ stepping

    def step(
        self,
        ids: Iterable[Id] | Slots,
        X: Any,
        *,
        numbers: Any = None,
        epochs: Any = None,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """One step of each of these streams, in any order: answers (n_out, N).

        ids      streams, each once, or what `slots` gave
        X        (n_in, N), or indices (N,) for a model that begins with an `Embedding`
        numbers  (N,) which step of its stream each is, counted from 1.  The number of the last step
                 again gives the stored answer and steps nothing
        epochs   (N,) what `open` returned; a stream that was taken over since raises `Conflict`
        out      where the answers go; else a new array

        Raises `UnknownStream`, `Expired`, `ShapeError`; `Gap` for a number that skips steps,
        `Conflict` for one whose answer is no longer kept or that comes with another input.  No
        stream has moved then.
        """
        with self._lock:
            names, places = self._resolve(ids)
            if numbers is None and epochs is None:
                answered = self._at_once(names, places, X, None, out)
                if answered is not None:
                    return answered
            rows = self._advance.look().rows(X, places.count)
            if epochs is not None:
                self._check_epochs(names, places, epochs)
            digest = None if numbers is None else hash_rows(rows)
            again = None
            if numbers is not None:
                again = self._check_numbers(names, places, numbers, digest)
            if out is not None and places.count:
                shape, dtype = self._blocks.columns.get("answer") or self.plan.form_of(rows)
                check_out(self.title, out, ((*shape[::-1], places.count), dtype))
            if again is None:
                answers = self._stepped(names, places, rows, digest, out)
            else:
                answers = self._advance_some(names, places, rows, digest, ~again)
            if out is None or answers is out or not places.count:
                return answers
            out[...] = answers
            return out

    def _at_once(
        self, names: Sequence[Id], places: Places, X: Any, digest: Any, out: np.ndarray | None
    ) -> np.ndarray | None:
        """The whole step in one call: answers (n_out, N), new or `out`; None, if it takes more."""
        answers = self._advance.at_once(places, X, self._clock, digest, out)
        if answers is not None:
            self._finished(names, places)
        return answers

    def _check_epochs(self, names: Sequence[Id], places: Places, epochs: Any) -> None:
        held = self._get("epoch", places).tolist()
        told = integers(self.title, "epochs", epochs, places.count).tolist()
        for id, mine, given in zip(names, held, told, strict=True):
            if mine != given:
                raise Conflict(
                    f"{self.title}: stream {id!r} has been taken over: it is in epoch {mine}, the "
                    f"step comes from epoch {given}. Nothing was changed."
                )

    def _check_numbers(
        self, names: Sequence[Id], places: Places, numbers: Any, digest: Any
    ) -> np.ndarray | None:
        """Which steps were taken already and have their answer stored: (N,) bool, None if none."""
        numbers = integers(self.title, "numbers", numbers, places.count)
        taken = self._get("step", places)
        if bool((numbers == taken + 1).all()):
            return None
        stored = self._get("answered", places) & (numbers == taken)
        held = self._get("digest", places)
        for i in np.flatnonzero(numbers != taken + 1).tolist():
            self._check_number(names[i], int(numbers[i]), int(taken[i]), bool(stored[i]))
            if held[i] and held[i] != digest[i]:
                raise self._other_input(names[i], int(numbers[i]))
        return stored

    def _check_number(self, id: Id, number: int, taken: int, stored: bool) -> None:
        if number > taken + 1:
            raise Gap(
                f"{self.title}: stream {id!r} stands at step {taken}, step {number} skips "
                f"{number - taken - 1}. Send step {taken + 1} first. Nothing was changed.",
                expected=taken + 1,
                got=number,
            )
        if not stored:
            raise Conflict(
                f"{self.title}: step {number} of stream {id!r} was taken already; the stream "
                f"stands at step {taken}, and only the last answer is kept. Nothing was changed."
            )

    def replay(self, id: Id, x: Any, number: int | None) -> np.ndarray | None:
        """The stored answer, if this step of a stream was taken already; None if it is its next.

        Arguments and errors as for `step`, for one stream; number None is the next.
        """
        with self._lock:
            block, row = self._blocks.one(self._slot(id))
            taken = int(block["step"][row])
            if number is None or number == taken + 1:
                return None
            stored = bool(block["answered"][row]) and number == taken
            self._check_number(id, number, taken, stored)
            held = block["digest"][row]
            if held and held != hash_rows(self._advance.look().rows(x, 1))[0]:
                raise self._other_input(id, number)
            return block["answer"][row].copy()

    def _other_input(self, id: Id, number: int) -> Conflict:
        return Conflict(
            f"{self.title}: step {number} of stream {id!r} was taken already, with another input. "
            "Nothing was changed."
        )

    def _advance_some(
        self, names: Sequence[Id], places: Places, rows: np.ndarray, digest: Any, fresh: np.ndarray
    ) -> np.ndarray:
        at = np.flatnonzero(fresh)
        if len(at):
            some = self._blocks.places(places.index[at])
            self._stepped([names[i] for i in at.tolist()], some, rows[at], digest[at], None)
        self._finished(names, places)
        return np.array(self._get("answer", places)).T

    def _stepped(
        self,
        names: Sequence[Id],
        places: Places,
        rows: np.ndarray,
        digest: Any,
        out: np.ndarray | None,
    ) -> np.ndarray:
        """Steps these streams and notes everything about it; answers (n_out, N), new or `out`."""
        if places.count == 0:
            return self._nothing().T
        answered = self._at_once(names, places, rows.T, digest, out)
        if answered is not None:
            return answered
        now = float(self._clock())  # the caller's own function, which may raise: nothing has moved
        answers = self._advance.answers(places, rows)
        self._know_answer(answers.shape[1:], answers.dtype)
        self._blocks.put("answer", places, answers)
        self._blocks.mark(places, now, digest)
        self._finished(names, places)
        return answers.T

    def _finished(self, names: Sequence[Id], places: Places) -> None:
        """Called after every step."""

    def _nothing(self) -> np.ndarray:
        shape, dtype = self._blocks.columns.get("answer", ((0,), self.plan.dtype))
        return np.empty((0, *shape), dtype)

    def _know_answer(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._advance.check_answer(shape, dtype)
        if "answer" not in self._blocks.columns:
            self._blocks.add_column("answer", shape, dtype)

    # ------------------------------------------------------------ states

    def reset(self, ids: Iterable[Id] | Slots) -> None:
        """Puts these streams back at rest; their next step is step 1."""
        with self._lock:
            names, places = self._resolve(ids)
            for i, row in enumerate(self._rest.rows()):
                self._blocks.put(i, places, np.broadcast_to(row, (places.count, row.shape[1])))
            self._blocks.put("step", places, 0)
            self._blocks.put("answered", places, False)
            self._blocks.put("digest", places, 0)
            self._blocks.put("saved", places, -1)
            self._finished(names, places)

    def state(self, ids: Iterable[Id] | Slots) -> dict[str, Any]:
        """The states by the paths of the layers, as `recur.states` gives them: copies (size, N)."""
        with self._lock:
            return self._advance.look().columns(self.parts(ids))

    def parts(self, ids: Iterable[Id] | Slots) -> list[np.ndarray]:
        """The states part by part, in the order of `plan.parts`: copies (N, size)."""
        with self._lock:
            _, places = self._resolve(ids)
            return [np.array(self._get(i, places)) for i in range(len(self.plan.parts))]

    def set_state(self, ids: Iterable[Id] | Slots, states: dict[str, Any]) -> None:
        """Copies in what `state` gave.  Raises `StateError` before any stream has changed."""
        with self._lock:
            names, places = self._resolve(ids)
            parts = self._advance.look().from_columns(states, places.count)
            for i, part in enumerate(parts):
                self._blocks.put(i, places, part)
            self._blocks.put("saved", places, -1)
            self._finished(names, places)

    def _moment(self, slot: int) -> Moment:
        block, row = self._blocks.one(slot)
        answer = block["answer"][row].copy() if block["answered"][row] else None
        return Moment(
            rows_of([block[i] for i in range(len(self.plan.parts))], row),
            int(block["step"][row]),
            answer,
            int(block["digest"][row]),
            block["tag"][row].tobytes(),
        )

    def snapshot(self, ids: Any, key: bytes | None = None) -> Any:
        """A stream as bytes, or for a list of ids {id: bytes}; with `key` they are signed."""
        with self._lock:
            plan = self._advance.look()
            if isinstance(ids, (list, tuple, set, Slots)):
                names = ids.ids if isinstance(ids, Slots) else ids
                return {id: pack(plan, self._moment(self._slot(id)), key) for id in names}
            return pack(plan, self._moment(self._slot(ids)), key)

    def restore(
        self,
        snapshots: dict[Any, bytes],
        *,
        key: bytes | None = None,
        allow_weights_change: bool = False,
    ) -> None:
        """Opens streams that go on where the snapshots were taken, of a pool or of a `Stream`.

        Raises `FormatError` as `Stream.restore`, `Conflict` if one of them is open already, `Busy`;
        no stream was opened then.
        """
        check_snapshots(self.title, snapshots)
        with self._lock:
            plan = self._advance.look()
            moments = {
                id: unpack(plan, data, key, allow_weights_change=allow_weights_change)
                for id, data in snapshots.items()
            }
            for id in moments:
                if id in self:
                    raise Conflict(
                        f"{self.title}: stream {id!r} is open already. Nothing was changed."
                    )
            if self.limit is not None and len(self) + len(moments) > self.limit:
                raise Busy(
                    f"{self.title}: {len(moments)} streams do not fit into the "
                    f"{self.limit - len(self)} places that are left. Nothing was changed."
                )
            for id, moment in moments.items():
                self._place(id, moment, self._new_epoch(id))
