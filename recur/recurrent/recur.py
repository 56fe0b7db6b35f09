"""`Recur`: a cell and its state, carried from call to call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import numpy as np

from recur._kernels import Stepper, layer_call, quick_step
from recur.cells import STEP, KernelCell
from recur.errors import StateError
from recur.module import Stages, in_transaction, label, register, transaction
from recur.recurrent import calls
from recur.recurrent.carried import Carried
from recur.recurrent.initial import from_pattern, learned, learned_names, own_init, pattern
from recur.recurrent.state import START, is_recorded, named_leaves
from recur.recurrent.walk import Options, walk_cell, walk_function
from recur.tape import Operand, Tape, Tensor, current, peek

_CHOICES = {
    "init_grad": ("step", "scope"),
    "layout": ("fbt", "ftb"),
    "on_batch_change": ("error", "reset", "broadcast"),
}

_SETTABLE = ("cell", "init", "state", *_CHOICES, "strict_dtype")

_DIRECT_IF = frozenset({"cell", "layout", "init_grad", "strict_dtype"})


@register("Recur")
class Recur(Carried):
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
    transient: ClassVar[frozenset[str]] = Carried.transient | {"_direct", "_met"}
    _direct: bool | None = None  # see `_is_direct`
    _met: Any = None  # the kernel of the last call

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
        if not callable(cell) or isinstance(cell, (type, Recur)):
            hint = "; put another Recur around its cell, m.cell" if isinstance(cell, Recur) else ""
            what = f"the class {cell.__name__}" if isinstance(cell, type) else label(cell)
            raise TypeError(
                f"Recur: the cell is {what}, expected something callable as "
                f"state, y = cell(state, x){hint}."
            )
        self.cell: Any = cell
        self.init_grad = init_grad
        self.layout = layout
        self.on_batch_change = on_batch_change
        self.strict_dtype = strict_dtype
        self._init = learned(own_init(cell, self.title, init), self.title, learn_init)
        self._make_lock()
        self._state: Any = START
        if state is not None:
            self.state = state

    # ------------------------------------------------------------ stepping

    def __setattr__(self, name: str, new: Any) -> None:
        if name in _CHOICES and new not in _CHOICES[name]:
            raise ValueError(
                f"{self.title}: {name} is {new!r}, expected one of "
                f"{', '.join(map(repr, _CHOICES[name]))}."
            )
        if type(self) is Recur and not name.startswith("_") and name not in _SETTABLE:
            raise AttributeError(self._cannot_set(name))
        super().__setattr__(name, new)
        if name in _DIRECT_IF:
            object.__setattr__(self, "_direct", None)
            if "_state" in self.__dict__:
                object.__setattr__(self, "_state", self._state)  # ends a stream

    def _cannot_set(self, name: str) -> str:
        """Why there is no attribute of this name, which would be set and never read."""
        if name == "learn_init":
            how = (
                "is chosen when a layer is built. Build another around its cell: "
                "Recur(m.cell, learn_init=True)."
            )
        elif hasattr(self.cell, name):
            how = f"belongs to the cell: m.cell.{name}."
        else:
            how = f"is no attribute of a recurrent layer; it has {', '.join(_SETTABLE)}."
        return f"{self.title}: {name} {how} Nothing was changed."

    @layer_call
    def __call__(
        self,
        *xs: Any,
        lengths: Any = None,
        mask: Any = None,
        truncate_every: int | None = None,
        remat: int | None = None,
    ) -> Any:
        lock = self._lock
        if lock._is_owned():
            raise self._inside_a_call()
        try:
            if not lock.acquire(False):  # inside the try: Ctrl-C may come as it returns
                self._wait_for_reader()
            tape = current()
            y = None
            single = len(xs) == 1 and lengths is mask is truncate_every is remat is None
            live = self._live  # read once: a signal's handler may fetch the state from it
            if live is not None:
                if live.stepping:
                    raise self._inside_a_call()
                y = self._streamed(xs[0]) if single and tape is None else None
                if y is None:
                    self._end_stream()
            elif single and tape is not None:
                y = self._recorded(xs[0], tape)
            if y is None:
                y = self._general(xs, Options(lengths, mask, truncate_every, remat), tape)
            if tape is not None:
                calls.note(self, tape)
            return y
        finally:
            try:
                lock.release()
            except RuntimeError:  # it was not given
                pass

    def _wait_for_reader(self) -> None:
        """Gets the lock once readers of the state are done; raises if a call holds it."""
        for _ in range(3):  # readers may come and go between two looks
            if self._lock.acquire(timeout=1 if self._readers else 0):
                return
        raise self._inside_a_call()

    def _inside_a_call(self) -> StateError:
        return StateError(
            f"{self.title}: this layer is inside a call already, of another thread or of its own "
            "cell; two calls at once would mix up its state. Give each thread a copy: "
            "copy.deepcopy(model)."
        )

    # A single step takes one of two short ways.  Each gives None for whatever it does not know, has
    # changed nothing then, and leaves it to the general one, which knows all cases and all errors.

    def _streamed(self, x: Any) -> Any:
        """One step outside a scope, in one call: the state lies in the kernel's own memory."""
        live = self._live
        return live(x) if type(live) is Stepper and not in_transaction() else None

    def _recorded(self, x: Any, tape: Tape) -> Any:
        """One step inside a scope, from a state that has the batch of x."""
        state = self.__dict__["_state"]  # no stream holds it
        if state is START or tape.events is not None or not (self._direct or self._is_direct()):
            return None
        packed = self.cell.packed()
        if packed.kernel is None:
            return None
        made = quick_step(STEP, packed, x, state, tape, Tensor)
        if made is None:
            return None
        state, y = made
        if in_transaction():
            self.put(state)
        else:
            self.__dict__["_state"] = state
            tape.stepped(self)
        return y

    def _general(self, xs: tuple, options: Options, tape: Tape | None) -> Any:
        """Any call."""
        logged = tape is not None and tape.events is not None
        if tape is not None and logged:
            self._log_enter(tape)
        if self._checked:
            y, state = self._walk(xs, options)
        else:
            with transaction():
                y, state = self._walk_function(xs, options)
        if state is not None:
            self.put(state)
            if tape is None:
                self._go_live()
        if tape is not None and logged:
            tape.log("leave", layer=self, steps=self._steps_of(xs))
        return y

    def _is_direct(self) -> bool:
        """Whether one step is one call of a kernel, whatever the input's dtype."""
        if self._direct is None:
            direct = (
                self._checked
                and type(self.cell).run_step is KernelCell.run_step
                and self.layout == "fbt"
                and self.init_grad == "step"
                and not self.strict_dtype
            )
            object.__setattr__(self, "_direct", direct)
        return bool(self._direct)

    def stages(self) -> Stages | None:
        if type(self).__call__ is not Recur.__call__ or not self._is_direct():
            return None
        kernel, counters = self.cell.packed().kernel, self.cell.counters()
        if kernel is None or counters is None:
            return None
        return Stages((kernel,), counters, (self,))

    def _go_live(self) -> None:
        """Hands the state to a `Stepper` once two calls in a row have met the same kernel."""
        if not self._is_direct() or in_transaction():
            return
        cell, state = self.cell, self._state
        kernel, counters = cell.packed().kernel, cell.counters()
        if kernel is None or counters is None or kernel is not self._met:
            object.__setattr__(self, "_met", kernel)
            return
        stepper, batch = self._stepper, state[0].shape[1]
        if (
            stepper is None
            or stepper.batch != batch
            or stepper.kernels[0] is not kernel
            or not stepper.fresh
        ):
            stepper = Stepper([kernel], batch, watch=counters)
            if cell.packed().kernel is not kernel:  # written meanwhile, before it began to watch
                return
        stepper.set_states([tuple(part.T for part in state)])
        object.__setattr__(self, "_stepper", stepper)
        object.__setattr__(self, "_live", stepper)

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

    # ------------------------------------------------------------ files

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
