"""`Recur`: a cell and its state, carried from call to call."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import numpy as np

from recur.cells import Cell, as_parts, begin, own_state, plain
from recur.errors import BatchSizeError, ShapeError, StateError
from recur.module import Module, journal, label, register, transaction
from recur.recurrent import calls
from recur.recurrent.initial import flat, from_pattern, learned, learned_names, own_init, pattern
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
from recur.recurrent.walk import Options, walk_cell, walk_function
from recur.tape import Operand, Param, Tape, Tensor, current, peek

_CHOICES = {
    "init_grad": ("step", "scope"),
    "layout": ("fbt", "ftb"),
    "on_batch_change": ("error", "reset", "broadcast"),
}


@register("Recur")
class Recur(Module):
    """A cell that remembers its state: `y = m(x)` is `state, y = cell(state, x)`, state kept.

    cell  a `Cell`, or anything callable as `state, y = cell(state, *xs)` with any state (numbers,
          arrays, nested tuples, lists, dicts), which is passed as it is
    init  the initial state, (n_out,) or (n_out, 1) for each part, copied; a `Param` is shared and
          learned.  None: the cell's zeros
    state  where the first call starts, as a constant; `reset` goes to init, not there

    learn_init       True, or the names of parts (("h",)): init is a parameter, and gets gradient
                     whenever a step that starts from it runs inside a scope
    init_grad        "scope": init gets gradient only after a reset made inside the scope, as with
                     Flux's explicit gradient; else `grads.state(m)` has that of the starting state
    layout           "ftb": a sequence is (features, time, batch), and two axes are one sample,
                     (features, time), as in Flux 0.15
    on_batch_change  what a batch of another size does without reset: "error", "reset", or
                     "broadcast" (one sample to many only)
    strict_dtype     refuse an input of another dtype, instead of converting it

    x     (n_in,) or (n_in, B) is one step; (n_in, B, T) a sequence; a list holds steps.  Any
          strides, numbers and booleans of any dtype
    y     n_out features and the other axes of x; a list for a list.  It shares no memory with the
          state.  Outside a scope an ndarray, inside a Tensor

    A call may say lengths= (B,) or mask= (B, T) for padded sequences (a padded step keeps the
    state, its output is 0 and its gradient exactly 0), truncate_every=k and remat=k.

    Raises `ShapeError`, `BatchSizeError`, `StateError`; the state then is what it was.
    """

    takes_lists: ClassVar[bool] = True
    transient: ClassVar[frozenset[str]] = frozenset({"_lock", "_entered", "_reset_in", "_callers"})
    _entered: tuple[int, Any] = (0, None)  # the scope that was last watched, and from which state
    _reset_in: int | None = None  # the scope of the last reset
    _callers: calls.Callers | None = None

    def __init__(
        self,
        cell: Callable[..., Any],
        init: Any = None,
        state: Any = None,
        *,
        learn_init: bool | str | Iterable[str] = False,
        init_grad: Literal["step", "scope"] = "step",
        layout: Literal["fbt", "ftb"] = "fbt",
        on_batch_change: Literal["error", "reset", "broadcast"] = "error",
        strict_dtype: bool = False,
    ) -> None:
        if not callable(cell):
            raise TypeError(
                f"Recur: the cell is a {type(cell).__name__}, expected something callable as "
                "state, y = cell(state, x)."
            )
        self.cell: Any = cell
        for name, given in (
            ("init_grad", init_grad),
            ("layout", layout),
            ("on_batch_change", on_batch_change),
        ):
            if given not in _CHOICES[name]:
                raise ValueError(
                    f"{self.title}: {name} is {given!r}, expected one of "
                    f"{', '.join(map(repr, _CHOICES[name]))}."
                )
        self.init_grad = init_grad
        self.layout = layout
        self.on_batch_change = on_batch_change
        self.strict_dtype = strict_dtype
        self._init = learned(own_init(cell, self.title, init), self.title, learn_init)
        self._state: Any = START
        self._lock = threading.Lock()
        if state is not None:
            self.state = state

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
    def at_start(self) -> bool:
        """Whether the next step starts from `init`."""
        return self._state is START

    @property
    def state(self) -> Any:
        """The state: recorded inside its scope, outside a read-only copy; at START that of `init`.

        Parts are (n_out, B), or (n_out,) as long as no batch is known.  Assigning a Tensor keeps
        its history, an array is copied as a constant, `START` resets.  Raises `StateError` for
        shapes.
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

    def reset(self, mask: Any = None) -> Recur:
        """The next step starts from `init`; with a mask (B,) of bool, only for these samples.

        No weight and no gradient is touched.  Where it is called, inside or outside a scope, makes
        no difference.  Raises `StateError` if the mask does not fit the state's batch.
        """
        tape = current()
        if mask is not None:
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

    def truncate(self) -> Recur:
        """The state keeps its value and forgets how it was computed.

        Weights go on collecting gradient from every later step; `init` does so again after `reset`.
        At START the state becomes a copy of `init`, with no batch yet.
        """
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

    # ------------------------------------------------------------ stepping

    def __call__(
        self,
        *xs: Any,
        lengths: Any = None,
        mask: Any = None,
        truncate_every: int | None = None,
        remat: int | None = None,
    ) -> Any:
        if not self._lock.acquire(blocking=False):
            raise StateError(
                f"{self.title}: this layer is inside a call already, of another thread or of its "
                "own cell; two calls at once would mix up its state. Give each thread a copy: "
                "copy.deepcopy(model)."
            )
        try:
            options = Options(lengths, mask, truncate_every, remat)
            tape = current()
            if tape is not None and tape.events is not None:
                self._log_enter(tape)
            if self._checked:
                y, state = self._walk(xs, options)
            else:
                with transaction():
                    y, state = self._walk_function(xs, options)
            if state is not None:
                self.put(state)
            if tape is not None:
                calls.note(self, tape)
                if tape.events is not None:
                    tape.log("leave", layer=self, steps=self._steps_of(xs))
        finally:
            self._lock.release()
        return y

    def _walk(self, xs: tuple, options: Options) -> tuple[Any, Any]:
        title = self.cell.title
        if len(xs) != 1:
            raise TypeError(f"{title}: {len(xs)} inputs were given, expected one.")
        x = xs[0]
        if self.layout == "fbt" or isinstance(x, (list, tuple)) or np.ndim(peek(x)) < 2:
            return walk_cell(
                self.cell, title, x, self._enter, options, strict=self.strict_dtype, layer=self
            )
        x = x if isinstance(x, Operand) else np.asarray(x)
        one_sample = x.ndim == 2
        x = x[:, None, :] if one_sample else x.swapaxes(1, 2)
        y, state = walk_cell(
            self.cell, title, x, self._enter, options, strict=self.strict_dtype, layer=self
        )
        return y[:, 0, :] if one_sample else y.swapaxes(1, 2), state

    def _walk_function(self, xs: tuple, options: Options) -> tuple[Any, Any]:
        state = self._enter_function()
        ftb = self.layout == "ftb"
        if ftb:
            xs = tuple(
                x.swapaxes(1, 2) if np.ndim(peek(x)) == 3 and hasattr(x, "swapaxes") else x
                for x in xs
            )
        y, state = walk_function(self.cell, self.title, xs, state, options, layer=self)
        return y.swapaxes(1, 2) if ftb and np.ndim(peek(y)) == 3 else y, state

    def _steps_of(self, xs: tuple) -> int:
        """How many steps a call on these inputs takes."""
        x = xs[0]
        if isinstance(x, (list, tuple)):
            return len(x)
        shape, ftb = np.shape(peek(x)), self.layout == "ftb"
        if len(shape) == 3:
            return shape[1 if ftb else 2]
        return shape[1] if ftb and len(shape) == 2 and self._checked else 1

    def _log_enter(self, tape: Tape) -> None:
        """Notes from which state a call starts."""
        leaves = () if self.at_start else (leaf for _, leaf in named_leaves(self._state, ""))
        recorded = [leaf for leaf in leaves if is_recorded(leaf)]
        tape.log("enter", layer=self, inputs=recorded, at_start=self.at_start)

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

    def config(self) -> dict[str, Any]:
        return {
            "cell": self.cell,
            "init": pattern(self._init),
            "learn_init": learned_names(self._init),
            "init_grad": self.init_grad,
            "layout": self.layout,
            "on_batch_change": self.on_batch_change,
            "strict_dtype": self.strict_dtype,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], version: int) -> Recur:
        return cls(**{**config, "init": from_pattern(config["init"])})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        object.__setattr__(self, "_lock", threading.Lock())
