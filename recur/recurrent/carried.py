"""`Carried`: a cell's initial state and the state that is carried from call to call."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

import numpy as np

from recur._kernels import Stepper
from recur.cells import Cell, as_parts, begin, own_state, plain
from recur.errors import BatchSizeError, ShapeError, StateError
from recur.module import Live, Module, Seat, in_transaction, journal, label
from recur.recurrent.calls import Callers
from recur.recurrent.initial import flat, own_init
from recur.recurrent.samples import checked_mask, mixed, picked
from recur.recurrent.state import (
    START,
    is_recorded,
    map_tree,
    named_leaves,
    owned,
    read_only,
    renamed,
    value_of,
)
from recur.tape import Param, Tensor, current, peek

Layer = TypeVar("Layer", bound="Carried")


class Carried(Live, Module):
    """What a recurrent layer holds besides its way of stepping: see `Recur`.

    Its `_live` is what holds the state while a stream runs: a `Stepper`, or a `Seat` in that of
    several layers.
    """

    transient: ClassVar[frozenset[str]] = frozenset(
        {"_lock", "_readers", "_stepper", "_entered", "_reset_in", "_callers"}
    )
    cell: Any
    init_grad: str
    on_batch_change: str
    _init: Any
    # Held during a call, or for a moment while the state is fetched or set.  A thread may hold it
    # again: a signal's handler, or a finalizer, that reads the state in the middle of a call.
    _lock: Any
    _readers: set[int]  # the threads that fetch or set the state, or wait to
    _stepper: Stepper | None = None  # the last that held it, for use again
    _entered: tuple[int, Any] = (0, None)  # the scope that was last watched, and from which state
    _reset_in: int | None = None  # the scope of the last reset
    _callers: Callers | None = None

    # ------------------------------------------------------------ what it is

    @property
    def title(self) -> str:
        """The layer in error messages: LSTM(3 => 5)."""
        return self.cell.title if isinstance(self.cell, Cell) else f"Recur({label(self.cell)})"

    @property
    def _checked(self) -> bool:
        """Whether the cell is a `Cell` that steps as `Cell` does, so that its batch is known."""
        return isinstance(self.cell, Cell) and type(self.cell).__call__ is Cell.__call__

    def fields(self) -> list[tuple[str, Any]]:
        return [("cell", self.cell), ("init", self.init)]

    def parts(self) -> list[tuple[str, Any]]:
        return [("", self.cell)]

    def describe_state(self) -> str:
        if self._state is START:
            return "state: start"
        if not self._checked:
            return "state: carried"
        batch = peek(self._state[0]).shape[1:]
        return f"state: batch {batch[0]}" if batch else "state: any batch"

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        (shape,) = shapes
        if not self._checked:
            raise TypeError(
                f"outputsize: {self!r} cannot be asked without running its cell, which may be any "
                "function."
            )
        if not 1 <= len(shape) <= 3 or shape[0] != self.cell.n_in:
            raise ShapeError(
                f"{self.title}: an input of shape {shape} does not have {self.cell.n_in} features "
                "on axis 0 of at most 3."
            )
        return (self.cell.n_out, *shape[1:])

    # ------------------------------------------------------------ the initial state

    @property
    def init(self) -> Any:
        """The initial state: a `Param` where it is learned, else an array, to be written at will.

        Assigning copies into it.  The next step at START starts from it as it then is.
        """
        return self._init

    @init.setter
    def init(self, new: Any) -> None:
        new = own_init(self.cell, self.title, new)
        leaves = list(named_leaves(self._init, "init"))
        if [path for path, _ in named_leaves(new, "init")] != [path for path, _ in leaves]:
            raise StateError(f"{self.title}: the new init has other parts. Nothing was changed.")

        def merged(new: Any, old: Any) -> Any:
            if type(old) is not Param or type(new) is Param:
                return new
            old[...] = peek(new).reshape(old.shape)
            return old

        self._init = map_tree(merged, new, self._init)

    # ------------------------------------------------------------ the state

    @property
    def _state(self) -> Any:
        """START, or the state in the layer's own form: parts (n, B) or (n,), or any tree."""
        if self._live is not None:
            with self._held():
                self._end_stream()
        return self.__dict__["_state"]

    @_state.setter
    def _state(self, new: Any) -> None:
        with self._held():  # else a call under way would store its own state over this one
            live = self._live
            if live is not None:
                live.take_states()  # who is about to step there meets a stepper without the state
            self.__dict__["_state"] = new
            object.__setattr__(self, "_live", None)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Nobody else moves the state inside; waits for a call under way in another thread."""
        if self._lock._is_owned():
            yield
            return
        reader = threading.get_ident()
        self._readers.add(reader)  # before the lock is held: a call must know whom it meets
        try:
            with self._lock:
                yield
        finally:
            self._readers.discard(reader)

    def _end_stream(self) -> None:
        """Fetches the state from where a stream runs; whoever calls holds the lock."""
        live = self._live
        if live is not None:
            (parts,) = live.take_states()
            self.__dict__["_state"] = tuple(part.T for part in parts)
            object.__setattr__(self, "_live", None)

    def batch(self) -> int | None:
        """The batch size of the state; None if it has none."""
        state = self._state
        if state is START or not self._checked:
            return None
        shape = peek(state[0]).shape
        return shape[1] if len(shape) == 2 else None

    def hand_over(self, seat: Seat) -> bool:
        """Puts the state into a stream of several layers.  False if a call is under way."""
        if self._lock._is_owned():
            return False
        try:
            if not self._lock.acquire(blocking=False):
                return False
            state = self.__dict__["_state"]
            if self._live is not None or state is START:
                return False
            seat.take([np.ascontiguousarray(peek(part).T) for part in state])
            object.__setattr__(self, "_live", seat)
            return True
        finally:
            try:
                self._lock.release()
            except RuntimeError:  # it was not given
                pass

    @property
    def at_start(self) -> bool:
        """Whether the next step starts from `init`."""
        return self._state is START

    @property
    def state(self) -> Any:
        """The state: recorded inside its scope, outside a read-only copy; at START that of `init`.

        Parts are (n_out, B), or (n_out,) as long as no batch is known.  Assigning a Tensor keeps
        its history, an array is copied as a constant, `START` resets; it waits for a call that is
        under way in another thread.  Raises `StateError` for shapes.
        """
        state = self._state
        if state is not START:
            state = map_tree(read_only, state)
            return self.cell.wrap(state) if self._checked else state
        linked = current() is not None and self._is_linked()
        return map_tree(lambda x: x if linked and type(x) is Param else read_only(x), self._init)

    @state.setter
    def state(self, new: Any) -> None:
        if new is START:
            self.reset()
        else:
            self.put(self.own(new))

    def own(self, state: Any) -> Any:
        """A state from outside in this layer's own form and memory, checked; nothing is stored."""
        if state is START:
            return START
        if self._checked:
            return own_state(self.cell, self.title, state)
        return map_tree(owned, state)

    def put(self, state: Any) -> None:
        """Goes on from `state`, which is in this layer's own form and memory."""
        if in_transaction():
            journal(self, functools.partial(self._restore, self._state, self._reset_in))
        object.__setattr__(self, "_state", state)
        tape = current()
        if tape is not None:
            tape.stepped(self)

    def _restore(self, state: Any, reset_in: int | None) -> None:
        object.__setattr__(self, "_state", state)
        object.__setattr__(self, "_reset_in", reset_in)

    def forget_history(self) -> None:
        """Keeps the state's values alone; the tape calls this when a scope ends."""
        object.__setattr__(self, "_callers", None)
        if self._state is not START:
            object.__setattr__(self, "_state", self._plain(self._state))

    def plain_state(self) -> Any:
        """The state as `put` takes it, without history: the object itself if it has none."""
        state = self._state
        leaves = () if state is START else (leaf for _, leaf in named_leaves(state, ""))
        return self._plain(state) if any(map(is_recorded, leaves)) else state

    def _plain(self, state: Any) -> Any:
        return plain(state) if self._checked else map_tree(value_of, state)

    def reset(self: Layer, mask: Any = None) -> Layer:
        """The next step starts from `init`; with a mask (B,) of bool, only for these samples.

        No weight and no gradient is touched.  Where it is called, inside or outside a scope, makes
        no difference.  Raises `StateError` if the mask does not fit the state's batch.
        """
        tape = current()
        if mask is not None:
            with self._held():
                self.put(self.masked_reset(mask))
        else:
            self.put(START)
            object.__setattr__(self, "_reset_in", None if tape is None else tape.serial)
        if tape is not None and tape.events is not None:
            tape.log("reset", layer=self)
        return self

    def masked_reset(self, mask: Any) -> Any:
        """The state in which the samples of `mask` (B,) are those of `init`; nothing is stored."""
        mask = checked_mask(self.title, mask)
        if self._state is START:
            return START
        if not self._checked:
            return mixed(self.title, mask, self._init, self._state)
        batch = len(mask)
        held = peek(self._state[0]).shape[1:]
        if held not in ((), (batch,)):
            raise BatchSizeError(
                f"{self.title}: reset's mask has {batch} entries, the state holds batch {held[0]}. "
                "Nothing was changed."
            )
        start = self._from_init(batch)
        state = tuple(begin(part, (part.shape[0], batch)) for part in self._state)
        return mixed(self.title, mask, start, state)

    def truncate(self: Layer) -> Layer:
        """The state keeps its value and forgets how it was computed.

        Weights go on collecting gradient from every later step; `init` does so again after `reset`.
        At START the state becomes a copy of `init`, with no batch yet.
        """
        with self._held():
            if self._state is START:
                init = map_tree(value_of, self._init)
                self.put(tuple(map(flat, as_parts(self.cell, init))) if self._checked else init)
            else:
                self.put(self._plain(self._state))
        tape = current()
        if tape is not None and tape.events is not None:
            tape.log("cut", layer=self)
        return self

    def reindexed(self, index: Any) -> Any:
        """The state with the samples of `index` along its batch; nothing is stored."""
        return START if self._state is START else picked(self.title, index, self._state)

    # ------------------------------------------------------------ entering a call

    def _enter(self, batch: int) -> tuple:
        """The parts of the state, (n_out, batch), from which a call on this batch starts."""
        state = self._state
        if state is START:
            return self._from_init(batch)
        part = state[0]
        held = peek(part).shape[1:]
        if held == (batch,):
            if type(part) is Tensor:
                self._check_scope(part)
            return state if self.init_grad == "step" else self._over(state, batch)
        if held == ():
            return self._over(state, batch)
        if self.on_batch_change == "reset":
            return self._from_init(batch)
        if self.on_batch_change == "broadcast" and held == (1,):
            return tuple(begin(part, (part.shape[0], batch), self) for part in state)
        hint = (
            'or build the layer with on_batch_change="reset"'
            if self.on_batch_change == "error"
            else 'which on_batch_change="broadcast" allows from batch 1 only'
        )
        raise BatchSizeError(
            f"{self.title}: the state holds batch {held[0]}, x has batch {batch}. Call "
            "reset(model) before another batch size (the last batch of an epoch is often smaller), "
            f"{hint}. Nothing was changed."
        )

    def _from_init(self, batch: int) -> tuple:
        parts = as_parts(self.cell, self._init)
        if not self._is_linked():
            return self._over(tuple(map(value_of, parts)), batch)
        return tuple(begin(part, (part.shape[0], batch), self) for part in parts)

    def _is_linked(self) -> bool:
        """Whether a step from START lets gradient into `init`."""
        tape = current()
        return self.init_grad == "step" or tape is None or self._reset_in == tape.serial

    def _watched(self, state: Any) -> Any:
        """`state`, through leaves that take its gradient if `init_grad="scope"` asks for it.

        Only the state with which a scope is entered is one.
        """
        tape = current()
        if tape is None or self.init_grad == "step":
            return state
        leaves = [leaf for _, leaf in named_leaves(state, "")]
        if any(map(is_recorded, leaves)):
            return state
        watchable = all(isinstance(x, np.ndarray) and x.dtype.kind == "f" for x in leaves)
        if id(self) not in tape.starts:
            inits = dict(named_leaves(self._init, "")).values()
            params = tuple(init for init in inits if type(init) is Param)
            tape.watch_state(self, state if watchable else (), params)
            object.__setattr__(self, "_entered", (tape.serial, self._state))
        serial, entering = self._entered
        still_entering = serial == tape.serial and entering is self._state
        return tape.starts[id(self)].leaves if watchable and still_entering else state

    def _over(self, parts: tuple, batch: int) -> tuple:
        """The parts of a state over the batch; a state of one part is watched without its tuple."""
        watched = self._watched(parts if len(parts) > 1 else parts[0])
        return tuple(
            part if part.shape[1:] == (batch,) else begin(part, (part.shape[0], batch), self)
            for part in (watched if len(parts) > 1 else (watched,))
        )

    def _check_scope(self, part: Tensor) -> None:
        if part.node.tape is not current() and part.node.tape.open_elsewhere:
            raise StateError(
                f"{self.title}: its state belongs to a scope that is open in another thread. Give "
                "each thread a copy: copy.deepcopy(model)."
            )

    def _enter_function(self) -> Any:
        """The state from which a call of a cell that is no `Cell` starts."""
        if self._state is not START:
            state = self._state if current() is not None else map_tree(value_of, self._state)
            return self._watched(state)
        if current() is None or not self._is_linked():
            return self._watched(map_tree(value_of, self._init))
        return map_tree(
            lambda x: begin(x, x.shape, self) if type(x) is Param else value_of(x), self._init
        )

    # ------------------------------------------------------------ saving and copying

    def buffers(self) -> dict[str, np.ndarray]:
        leaves = dict(named_leaves(self._init, "init"))
        return {path: x for path, x in leaves.items() if isinstance(x, np.ndarray)}

    def running_state(self) -> dict[str, np.ndarray]:
        if self._state is START:
            return {}
        tree = map_tree(value_of, self._state)
        tree = self.cell.wrap(tree) if self._checked else tree
        return {path: np.asarray(leaf) for path, leaf in named_leaves(tree, "state")}

    def load_running_state(self, new: dict[str, np.ndarray]) -> None:
        if not new:
            self.put(START)
            return
        try:
            state = renamed(self._init, "state", new)
        except StateError as error:
            raise StateError(f"{self.title}: {error}") from None
        self.state = state

    def __getstate__(self) -> dict[str, Any]:
        self._state  # noqa: B018  (fetches it from where a stream runs)
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._make_lock()
        super().__setstate__(state)

    def _make_lock(self) -> None:
        object.__setattr__(self, "_lock", threading.RLock())
        object.__setattr__(self, "_readers", set())
