"""`Tape`: the scope in which operations are recorded."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from recur._kernels import arrays_from, arrays_from_here, closed, next_seq, opened
from recur.errors import ShapeError, TapeError
from recur.tape.nodes import LEAF, Node, Operation
from recur.tape.params import Param
from recur.tape.sweep import Sweep
from recur.tape.values import Operand, Tensor, peek


class _Thread(threading.local):
    """What one thread is doing: each thread has its own open scope."""

    tape: Tape | None = None  # None as well while paused, and during a sweep


_thread = _Thread()
_serial = itertools.count(1)


def current() -> Tape | None:
    """The scope that is recording in this thread, or None."""
    return _thread.tape


@contextmanager
def paused() -> Iterator[None]:
    """Inside, everything is as outside a scope: plain results, nothing recorded.

    Random layers are inactive, and a recurrent layer that is stepped goes on from its state's
    value: its history is cut.
    """
    tape, _thread.tape = _thread.tape, None
    try:
        yield
    finally:
        _thread.tape = tape


def record(
    op: Operation, inputs: tuple, outputs: Sequence[np.ndarray], saved: Any, layer: object = None
) -> list[Tensor]:
    """Puts one operation on the open tape and returns its outputs as Tensors.

    `inputs` is a tuple of `traced(...)` values.  `layer` is who called, for the event log.
    """
    tape = _thread.tape
    assert tape is not None
    node = Node(op, inputs, saved, tape)
    if tape.events is not None:
        tape.log(op.name, node=node, layer=layer)
    if len(outputs) == 1:
        return [Tensor(outputs[0], node)]
    return [Tensor(array, node, i) for i, array in enumerate(outputs)]


def record_one(op: Operation, inputs: tuple, output: Any, saved: Any) -> Tensor:
    """`record` for an operation with one output, which may be a NumPy scalar."""
    tape = _thread.tape
    assert tape is not None
    node = Node(op, inputs, saved, tape)
    if tape.events is not None:
        tape.log(op.name, node=node)
    if type(output) is not np.ndarray:
        output = np.asarray(output)
    return Tensor(output, node)


class Start:
    """The state with which a layer entered a scope, as leaves that take its gradient."""

    __slots__ = ("instead_of", "layer", "leaves")

    def __init__(self, layer: Any, leaves: Any, instead_of: tuple[Param, ...]) -> None:
        self.layer = layer
        self.leaves = leaves
        self.instead_of = instead_of

    def gradient(self, sweep: Sweep) -> Any:
        """The gradient of the state, in the state's own structure."""

        def of(part: Any) -> Any:
            if isinstance(part, tuple):
                return tuple(map(of, part))
            grad = sweep.leaf(part)
            return np.zeros_like(peek(part)) if grad is None else grad.copy(order="K")

        return of(self.leaves)


class Tape:
    """A scope: inside `with Tape() as tape:` operations on parameters and tensors are recorded.

    The scope belongs to the thread that opened it.  At its end, also after an exception, the state
    of every recurrent layer that was stepped in it becomes a plain value, and its Tensors act as
    arrays.  `keep_history=True` lets states keep their past beyond the end, so that a later scope's
    loss reaches back into this one; it implies `keep_graph`.  `log=True` keeps a list of `events`
    for pictures.  Arrays of 128 KiB and more that NumPy makes inside lie on memory that is kept
    for those of later scopes once they are dropped (512 MiB at most), unless NumPy was given
    another allocator.

    Raises `TapeError` if a scope is already open in this thread.
    """

    def __init__(self, *, keep_history: bool = False, log: bool = False) -> None:
        self.keep_history = keep_history
        self.alive = False  # whether gradient may flow through this tape's tensors
        self.is_open = False
        self.serial = next(_serial)  # tells one scope from the next
        self.events: list[dict[str, Any]] | None = [] if log else None
        self.starts: dict[int, Start] = {}
        self._owner: int | None = None
        self._memory_before: object | None = None
        self._stepped: dict[int, Any] = {}

    def __enter__(self) -> Tape:
        if _thread.tape is not None:
            raise TapeError(
                "Tape: a scope is already open in this thread, and gradients of gradients are not "
                "supported. Close it first, or step out of it with `with recur.paused():`."
            )
        if self._owner is not None:
            raise TapeError("Tape: this tape was used before. Make a new one for each scope.")
        self._owner = threading.get_ident()
        self.alive = self.is_open = True
        _thread.tape = self
        opened()
        # Each window makes the same large arrays: products, gradients, copies of what is saved.
        self._memory_before = arrays_from_here()
        return self

    def __exit__(self, *exc: object) -> None:
        _thread.tape = None
        if self.is_open:
            closed()
            arrays_from(self._memory_before)
        self.alive, self.is_open = self.keep_history, False
        stepped, self._stepped = self._stepped, {}
        if not self.keep_history:
            for layer in stepped.values():
                layer.forget_history()

    def __reduce__(self) -> tuple:
        raise TapeError("a Tape can be neither copied nor pickled: it belongs to one scope.")

    def stepped(self, layer: Any) -> None:
        """Notes a layer whose state must become plain when the scope ends.

        The layer has a method `forget_history()`.
        """
        self._stepped[id(layer)] = layer

    def layers(self) -> list[Any]:
        """The layers that were stepped in this scope."""
        return list(self._stepped.values())

    @property
    def open_elsewhere(self) -> bool:
        """Whether this scope is open in another thread."""
        return self.is_open and self._owner != threading.get_ident()

    def watch_state(self, layer: Any, state: Any, instead_of: tuple[Param, ...] = ()) -> Any:
        """Leaves with the values of `state`, an array or a tuple of them, for `grads.state(layer)`.

        `instead_of` names the parameters whose gradient is None, not zero, if nothing else reaches
        them: a learned start that the state stands for.
        """

        def leaf(part: Any) -> Any:
            return tuple(map(leaf, part)) if isinstance(part, tuple) else self.watch(part)

        start = Start(layer, leaf(state), instead_of)
        self.starts[id(layer)] = start
        return start.leaves

    def watch(self, array: Any) -> Tensor:
        """A leaf Tensor with the values of `array`, for gradients with respect to an input."""
        self._check_open("watch")
        array = np.array(peek(array), order="K")
        if array.dtype.kind != "f":
            raise TapeError(
                f"watch: gradients exist for floating-point arrays, not for {array.dtype}. "
                "Convert it, for example with x.astype(np.float32)."
            )
        return Tensor(array, Node(LEAF, (), None, self))

    def backward(
        self,
        loss: Tensor,
        cotangent: Any = None,
        *,
        accumulate: bool = True,
        keep_graph: bool = False,
    ) -> None:
        """Sweeps back from `loss` and adds to the `.grad` of every leaf that it reaches.

        `loss` is one number, or any tensor with a `cotangent` of its shape.  `accumulate=False`
        overwrites the `.grad` of the leaves that this loss reaches and leaves others alone.  A
        sweep uses up the steps that it passes, unless `keep_graph`.

        Raises `GraphUsedError` if it meets steps that an earlier sweep used up, `TapeError` if the
        loss is not recorded on an open tape of this thread.  A sweep that fails changes no
        `.grad`, but has used up what it passed.
        """
        sweep = self.sweep(loss, cotangent, keep_graph=keep_graph)
        sweep.deposit(accumulate)

    def gradient(
        self,
        loss: Tensor,
        tensors: Sequence[Tensor | Param],
        cotangent: Any = None,
        *,
        keep_graph: bool = False,
    ) -> list[np.ndarray]:
        """The gradients of `loss` with respect to any tensors of the tape, as new arrays.

        Zeros where the loss does not reach.  No `.grad` is touched.  Errors as for `backward`.
        """
        wanted = [t for t in tensors if isinstance(t, Tensor)]
        sweep = self.sweep(loss, cotangent, keep_graph=keep_graph, wanted=wanted, caller="gradient")
        results = []
        for t in tensors:
            grad = sweep.leaf(t) if t.node is None or t.node.op is LEAF else None
            if grad is None and t.node is not None:
                grad = sweep.found.get((t.node, t.index))
            results.append(np.zeros_like(peek(t)) if grad is None else grad.copy(order="K"))
        return results

    def sweep(
        self,
        loss: Tensor | Param,
        cotangent: Any = None,
        *,
        keep_graph: bool = False,
        wanted: Iterable[Tensor] = (),
        caller: str = "backward",
    ) -> Sweep:
        """The finished sweep from `loss`, which holds all gradients.  Errors as for `backward`."""
        self._check_open(caller)
        if not isinstance(loss, Operand):
            raise TapeError(
                f"{caller}: the loss is a plain {type(loss).__name__}, not a recorded Tensor: it "
                "does not depend on any parameter used inside the scope."
            )
        if isinstance(loss, Tensor) and not loss.live:
            raise TapeError(
                f"{caller}: the scope that recorded this loss has ended. Call {caller} inside it, "
                "or open it with keep_history=True."
            )
        if cotangent is None:
            if loss.size != 1:
                raise TapeError(
                    f"{caller}: the loss has shape {loss.shape}, expected one number. Reduce it, "
                    "for example with sum, or pass a cotangent of its shape."
                )
            seed = np.ones(loss.shape, loss.dtype)
        else:
            # The caller's own memory where it fits: a sweep writes into no gradient it was given.
            seed = np.require(peek(cotangent), loss.dtype, ("A", "E")).view()
            seed.flags.writeable = False
            if seed.shape != loss.shape:
                raise ShapeError(
                    f"{caller}: the cotangent has shape {seed.shape}, expected {loss.shape}, the "
                    "shape of the loss. Nothing was changed."
                )
        if self.events is not None:
            self.log("loss", inputs=(loss,))
        sweep = Sweep(self, keep_graph=keep_graph or self.keep_history, wanted=wanted)
        with paused():  # nothing that a backward does is recorded
            sweep.run(loss, seed)
        return sweep

    def _check_open(self, caller: str) -> None:
        if self._owner != threading.get_ident():
            where = "was never entered" if self._owner is None else "belongs to another thread"
            raise TapeError(f"{caller}: this tape {where}. Use it inside its own `with Tape()`.")
        if _thread.tape is not self:
            raise TapeError(
                f"{caller}: this tape is not recording: its scope has ended or is paused."
            )

    @property
    def live(self) -> int:
        """How many of this tape's nodes are still held by anything.

        With them count the nodes of earlier scopes with `keep_history` that they lead back to.
        Counted on demand among the objects that the garbage collector knows, so that recording
        pays nothing for it.
        """
        left = [o for o in gc.get_objects() if type(o) is Node and o.tape is self]
        held = {id(node) for node in left}
        while left:
            for x in left.pop().inputs or ():
                node = None if x is None else x.node
                if node is not None and node.tape is not self and id(node) not in held:
                    held.add(id(node))
                    left.append(node)
        return len(held)

    def log(
        self, kind: str, *, node: Node | None = None, layer: object = None, **more: Any
    ) -> None:
        """Adds one event, without arrays: sequence number, kind, layer, the inputs' numbers."""
        if self.events is None:
            return
        inputs = more.pop("inputs", node.inputs if node is not None else ()) or ()
        seqs = [x.node.seq for x in inputs if x is not None and x.node is not None]
        params = [x for x in inputs if type(x) is Param]
        seq = node.seq if node is not None else next_seq()
        self.events.append(
            {"seq": seq, "kind": kind, "layer": layer, "inputs": seqs, "params": params, **more}
        )
