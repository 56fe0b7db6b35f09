"""`Stream`: one live stream through a model."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from recur._kernels import CellKernel, stream_call
from recur.errors import Busy, ShapeError
from recur.module import Live
from recur.streaming.arguments import Form
from recur.streaming.plan import Plan
from recur.streaming.rest import Rest, RestState
from recur.streaming.snapshot import Moment, pack, unpack
from recur.streaming.stages import Scratch
from recur.tape import peek


class Stream(Live):
    """A state of its own that goes through a model's steps: `y = s(x)`.

    model  a recurrent layer, or a Chain, Parallel or SkipConnection of layers and functions.  It is
           shared by any number of streams; weights that are written, and layers that are set
           otherwise or replaced, count from the next step.  Its own state is neither read nor
           moved.  Random layers do nothing, and nothing is ever recorded
    rest   where the stream starts and `reset` goes: "learned", the layers' initial states;
           "zeros"; or `Settled(x)`, where a constant input leads to (zeros are not every model's
           rest, and going there can be heard as a click)

    Answers are bit-equal however the steps are cut into calls, and to those of the same stream in
    a `StreamPool`.  A stream belongs to one thread at a time; streams of one model may run in many.

    Raises `StateError` by name for a layer that cannot step, as `Bidirectional`, and from a step
    once the model's layers remember something else than the stream does.
    """

    __slots__ = ("__weakref__", "_answer", "_lock", "_met", "_plan", "_rest", "_scratch", "_state",
                 "_steps")  # fmt: skip

    def __init__(self, model: Any, *, rest: Rest = "learned") -> None:
        plan = Plan(model)
        self._begin(plan, RestState(plan, rest))

    def _begin(self, plan: Plan, rest: RestState) -> None:
        self._plan = plan
        self._rest = rest
        self._scratch: Scratch = {}
        self._lock = threading.Lock()
        self._met = False  # whether a step has been taken the general way since the last write
        self._state = [part.copy() for part in rest.rows()]
        self._answer: Form | None = None  # the last one's
        self._steps = 0  # without those of `_live`

    @property
    def model(self) -> Any:
        """The model that the stream runs."""
        return self._plan.model

    @property
    def steps(self) -> int:
        """How many steps the stream has taken since it began or was reset."""
        live = self._live
        return self._steps if live is None else self._steps + live.steps

    def __repr__(self) -> str:
        return f"Stream({self._plan.title}, step {self.steps})"

    def _look(self) -> Plan:
        """The plan of the model as it is now.  Raises `StateError` as `Plan.current`."""
        plan = self._plan.current()
        if plan is not self._plan:
            self._plan, self._scratch, self._answer = plan, {}, None
        return plan

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self!r} cannot be copied or pickled. fork() gives a second stream, snapshot() bytes."
        )

    # ------------------------------------------------------------ stepping

    @stream_call
    def __call__(self, x: Any, out: np.ndarray | None = None) -> np.ndarray:
        """One step.

        x    (n_in,) or (n_in, 1), or an index for a model that begins with an `Embedding`; read
             only while the call runs
        out  where the answer goes: an array of its shape and dtype, any strides, that shares no
             memory with x.  Else a new array.  A model that runs in one call of compiled code
             then allocates nothing

        Raises `ShapeError` for another x or out, `Busy` if the stream is inside a step already (of
        another thread); nothing was changed then.
        """
        self._enter()
        try:
            if out is not None:
                self._check_out(out, x)
            live = self._live
            y = None if live is None else live(x, out)
            return self._general(x, out) if y is None else y
        finally:
            self._lock.release()

    def _general(self, x: Any, out: np.ndarray | None) -> np.ndarray:
        plan = self._look()
        rows = plan.rows(x, 1)
        vector = np.ndim(peek(x)) < rows.ndim
        state = self._taken()
        # In place only where nothing can fail any more.
        safe = plan.sealed and (out is None or _form(out) == self._answer)
        moved = state if safe else [part.copy() for part in state]
        y = plan.step(rows, moved, self._scratch)
        answer = (y[0] if vector else y).T
        if out is None:
            answer = np.array(answer, order="K")
        else:
            answer = self._into(out, answer)
        self._answer = _form(answer)
        self._state = moved
        self._steps += 1
        self._go_live()
        return answer

    def run(self, X: Any, out: np.ndarray | None = None) -> np.ndarray:
        """T steps in one call, with the same bits as one by one.

        X    (n_in, T) or (n_in, 1, T), or indices (T,) or (1, T)
        out  where the answers go, as in `__call__`, (n_out, T) or (n_out, 1, T) as X; else a new
             array

        Besides the returned array only the results of the layers in between are held, of at most
        256 steps.  Raises as `__call__`.
        """
        self._enter()
        try:
            live = self._live
            Y = None if live is None else live.run(X, out)
            if Y is None:
                if out is not None:
                    self._check_out(out, X)
                Y = self._general_run(X, out)
            return Y
        finally:
            self._lock.release()

    def _general_run(self, X: Any, out: np.ndarray | None) -> np.ndarray:
        plan = self._look()
        rows, batched = plan.blocks(X)
        state = self._taken()
        moved = [part.copy() for part in state]
        into = None if out is None else self._rows_of(out, len(rows), batched)
        Y = plan.run(rows, moved, self._scratch, into)
        self._state = moved
        self._steps += len(rows)
        self._go_live()
        if out is not None:
            return out
        return Y.T if batched else Y[:, 0].T

    def _rows_of(self, out: np.ndarray, T: int, batched: bool) -> np.ndarray:
        rows = out.T if batched else out.T[:, None]
        if rows.ndim < 2 or rows.shape[:2] != (T, 1):
            raise ShapeError(
                f"{self._plan.title}: out has shape {out.shape}, expected {T} steps on its last "
                "axis. Nothing was changed."
            )
        return rows

    def _into(self, out: np.ndarray, answer: np.ndarray) -> np.ndarray:
        if _form(out) != _form(answer):
            raise ShapeError(
                f"{self._plan.title}: out has shape {out.shape} and holds {out.dtype}, the answer "
                f"has {answer.shape} and {answer.dtype}. Nothing was changed."
            )
        out[...] = answer
        return out

    def _check_out(self, out: Any, x: Any) -> None:
        """Raises for what can take no answer to x, whatever its shape."""
        what = None
        if type(out) is not np.ndarray:
            what = f"is {type(out).__name__}, expected an array"
        elif not out.flags.behaved:
            what = "is read-only or not aligned, expected an array to write into"
        elif isinstance(peek(x), np.ndarray) and np.shares_memory(out, peek(x)):
            what = "shares memory with x, expected memory of its own"
        if what is not None:
            raise ShapeError(f"{self._plan.title}: out {what}. Nothing was changed.")

    def _enter(self) -> None:
        """Takes the lock; short steps of the stepper do without it, long ones say so."""
        live = self._live
        stepping = live is not None and live.stepping
        if stepping or not self._lock.acquire(blocking=False):
            raise Busy(
                f"Stream({self._plan.title}): it is inside a step already. A stream belongs to one "
                "thread at a time; open one for each."
            )

    def _taken(self) -> list[np.ndarray]:
        """The state as arrays, fetched from the stepper if it holds it."""
        live = self._live
        if live is not None:
            parts = [part for cell in live.take_states() for part in cell]
            self._state = [np.ascontiguousarray(part) for part in parts]
            self._steps += live.steps
            self._live = None
            self._met = False
        return self._state

    def _go_live(self) -> None:
        """Hands the state to a stepper once two steps in a row were taken the general way."""
        if not self._met:
            self._met = True
            return
        stepper = self._plan.stepper()
        if stepper is None:
            return
        parts, states = iter(self._state), []
        for kernel in stepper.kernels:
            if isinstance(kernel, CellKernel):
                states.append(tuple(next(parts) for _ in range(kernel.n_states)))
        stepper.set_states(states)
        self._live = stepper

    # ------------------------------------------------------------ the state

    def reset(self) -> None:
        """Goes back to rest; the next step is step 1."""
        self._enter()
        try:
            self._put([part.copy() for part in self._rest.rows()], 0)
        finally:
            self._lock.release()

    def _put(self, state: list[np.ndarray], steps: int) -> None:
        self._taken()  # a step that is about to begin meets a stepper without the state
        self._state = state
        self._steps = steps

    @property
    def state(self) -> dict[str, Any]:
        """The state by the paths of the layers, as `recur.states` gives it: copies, (size, 1)."""
        self._enter()
        try:
            return self._look().columns(self._taken())
        finally:
            self._lock.release()

    @state.setter
    def state(self, new: dict[str, Any]) -> None:
        self._enter()
        try:
            self._put(self._look().from_columns(new, 1), self.steps)
        finally:
            self._lock.release()

    def fork(self) -> Stream:
        """A second stream that goes on from the same state."""
        self._enter()
        try:
            twin = Stream.__new__(Stream)
            twin._begin(self._plan, self._rest)
            twin._put([part.copy() for part in self._taken()], self._steps)
            return twin
        finally:
            self._lock.release()

    def snapshot(self, key: bytes | None = None) -> bytes:
        """The stream as bytes that `restore` and `StreamPool.restore` go on from.

        key  signs them (HMAC-SHA-256), so that whoever has the key can tell a forged snapshot
        """
        self._enter()
        try:
            return pack(self._look(), Moment(self._taken(), self._steps), key)
        finally:
            self._lock.release()

    @classmethod
    def restore(
        cls,
        model: Any,
        snapshot: bytes,
        *,
        key: bytes | None = None,
        allow_weights_change: bool = False,
        rest: Rest = "learned",
    ) -> Stream:
        """A stream that goes on where `snapshot` was taken.

        Raises `FormatError` if the snapshot is damaged, cut short, forged, or of another model;
        `allow_weights_change=True` accepts the same layers with other weights.
        """
        stream = cls(model, rest=rest)
        moment = unpack(stream._plan, snapshot, key, allow_weights_change=allow_weights_change)
        stream._put(moment.state, moment.step)
        return stream


def _form(array: np.ndarray) -> Form:
    return array.shape, array.dtype
