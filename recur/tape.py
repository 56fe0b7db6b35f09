"""What happened, and how gradients flow back through it.

A `Tensor` is a value that remembers the `Node` that made it; a `Param` is a leaf that may be
written.  A `Tape` is the scope in which operations are recorded; outside a scope nothing is.  A
`Sweep` walks the nodes from a loss back to the leaves.

Three rules hold everything together.

* Nodes take their `seq` from one counter, so the order of creation is a topological order and the
  sweep is a heap, never a recursion.
* A node refers to its inputs, never to its outputs.  Dropping the last reference to a state's node
  frees all of its past at once; `truncate` does nothing else.
* All that moves during a sweep (gradients, sinks) lives in a table of the sweep.  `.grad` is
  written once, when the sweep has succeeded.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from recur import _kernels
from recur.errors import GraphUsedError, ShapeError, TapeError

# A sink multiplies its posts out as soon as this many rows have come together: enough for one
# product to run at full speed, few enough for memory not to grow with the length of the window.
_ROWS_PER_FLUSH = 4096


class _Thread(threading.local):
    """What one thread is doing: each thread has its own open scope."""

    tape: Tape | None = None  # None as well while paused, and during a sweep


_thread = _Thread()
_seq = itertools.count()
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


class Op:
    """An operation as the sweep sees it: a name, and how gradients go through it.

    `backward(sweep, node, grads)` gets the gradients of the node's outputs, as arrays by output
    index (an output that the loss does not reach is missing), and hands on what the inputs get by
    `sweep.add`, `sweep.buffer` and `sweep.post`.  It may keep or overwrite nothing of `node.saved`
    when `sweep.keep_graph` is set, and it must never write into `grads`.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        raise TypeError(f"{self.name} has no gradient")

    def __repr__(self) -> str:
        return f"<op {self.name}>"


_LEAF = Op("leaf")


class Node:
    """One recorded operation.

    `inputs` holds a Tensor or Param where gradient may flow and None elsewhere; `saved` is what
    the operation's backward needs.  `op` is None once a sweep has used the node up.
    """

    __slots__ = ("inputs", "op", "saved", "seq", "tape")

    def __init__(self, op: Op, inputs: tuple, saved: Any, tape: Tape) -> None:
        self.seq = next(_seq)
        self.op: Op | None = op
        self.inputs: tuple | None = inputs
        self.saved = saved
        self.tape = tape


class Operand:
    """What `Tensor` and `Param` share: the operators, which `recur.ops` installs here."""

    __slots__ = ()

    node: Node | None
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        return peek(self).shape

    @property
    def ndim(self) -> int:
        return peek(self).ndim

    @property
    def size(self) -> int:
        return peek(self).size

    @property
    def dtype(self) -> np.dtype:
        return peek(self).dtype

    @property
    def nbytes(self) -> int:
        return peek(self).nbytes

    def __len__(self) -> int:
        return len(peek(self))

    def __format__(self, spec: str) -> str:
        return format(value(self), spec)

    if TYPE_CHECKING:  # what recur.ops installs, for type checkers
        T: Any
        mT: Any

        def __getattr__(self, name: str) -> Any: ...
        def __getitem__(self, key: Any) -> Any: ...
        def __iter__(self) -> Iterator[Any]: ...
        def __add__(self, other: Any) -> Any: ...
        def __radd__(self, other: Any) -> Any: ...
        def __sub__(self, other: Any) -> Any: ...
        def __rsub__(self, other: Any) -> Any: ...
        def __mul__(self, other: Any) -> Any: ...
        def __rmul__(self, other: Any) -> Any: ...
        def __truediv__(self, other: Any) -> Any: ...
        def __rtruediv__(self, other: Any) -> Any: ...
        def __pow__(self, other: Any) -> Any: ...
        def __rpow__(self, other: Any) -> Any: ...
        def __matmul__(self, other: Any) -> Any: ...
        def __rmatmul__(self, other: Any) -> Any: ...
        def __neg__(self) -> Any: ...
        def __abs__(self) -> Any: ...
        def __lt__(self, other: Any) -> Any: ...
        def __le__(self, other: Any) -> Any: ...
        def __gt__(self, other: Any) -> Any: ...
        def __ge__(self, other: Any) -> Any: ...
        def __float__(self) -> float: ...
        def __int__(self) -> int: ...
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray: ...


class Tensor(Operand):
    """A recorded value: immutable, hashed by identity, known to the tape that recorded it.

    Arithmetic, indexing and the NumPy functions that `recur.ops` lists work on it and are
    recorded.  `recur.value(t)` is its array.  After its scope has ended it acts as that array.
    """

    __slots__ = ("__weakref__", "_value", "index", "node")

    def __init__(self, array: np.ndarray, node: Node, index: int = 0) -> None:
        self._value = array
        self.node: Node = node
        self.index = index

    @property
    def live(self) -> bool:
        """Whether gradient can still flow back from here."""
        return self.node.tape.alive

    @property
    def grad(self) -> np.ndarray | None:
        """The gradient that `backward` left at a watched leaf; None for any other tensor."""
        return self.node.saved if self.node.op is _LEAF else None

    def __repr__(self) -> str:
        return f"Tensor({np.array2string(self._value, separator=', ', prefix='Tensor(')})"

    def __setitem__(self, key: Any, new: Any) -> None:
        raise TypeError(
            "a Tensor cannot be written, its history would no longer be true. Build the new value "
            "with recur.ops.where or concatenate, or write into a copy of recur.value(t)."
        )

    def __reduce__(self) -> tuple:
        raise TapeError("a Tensor cannot be pickled: take recur.value(t) and pickle that.")

    def __copy__(self) -> Tensor:
        return self

    def __deepcopy__(self, memo: dict) -> Tensor:
        raise TapeError("a Tensor cannot be copied: it belongs to a tape. Copy recur.value(t).")


class Version:
    """A counter that an owner of weights raises at each write."""

    __slots__ = ("count",)

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def bump(self) -> None:
        self.count += 1


class FlatBuffer:
    """One array that holds many parameters, each of them a view of it.

    `count` counts the writes to the whole buffer; a write through a single Param counts there.
    """

    __slots__ = ("array", "count", "left")

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.count = Version()
        self.left = False  # whether a parameter has moved on into another buffer

    @contextmanager
    def writing(self) -> Iterator[np.ndarray]:
        """Yields the writable buffer; every parameter in it counts as changed.

        Raises `TapeError` if a parameter has moved on into another buffer: it would be missed.
        """
        if self.left:
            raise TapeError(
                "this flat buffer no longer holds all of its parameters: they were flattened "
                "again. Use the buffers that the last flatten_parameters returned."
            )
        self.count.bump()
        writes.bump()
        try:
            yield self.array
        finally:
            self.count.bump()
            writes.bump()


class _Writes:
    """A number that changes at every write to any Param, so that one look shows "nothing moved"."""

    __slots__ = ("_next", "stamp")

    def __init__(self) -> None:
        self._next = itertools.count(1).__next__
        self.stamp = 0

    def bump(self) -> None:
        # Drawn, not incremented: two threads that write at once must not leave the same stamp.
        self.stamp = self._next()


writes = _Writes()


class Param(Operand):
    """A parameter: a leaf of every graph, and the one kind of value that may be written.

    The array given is copied.  `p.value` is a read-only view; `p[...] = v`, `p += v` (`-=`, `*=`,
    `/=`) and `with p.writing() as a:` write in place and raise `p.version`, which is how a backward
    learns that a value it needs has gone, and a cell that its packed weights are stale.  `p.grad`
    is what `backward` has added up, or None.
    """

    __slots__ = ("__weakref__", "_array", "_count", "_flat", "_view", "grad", "name", "packed")

    node = None
    index = 0

    def __init__(self, array: Any, name: str = "", *, order: Literal["C", "F"] = "C") -> None:
        if isinstance(array, Tensor) and array.live:
            raise TapeError("Param: a recorded Tensor cannot become a parameter. Pass its value.")
        if isinstance(array, Operand):
            array = peek(array)
        array = np.array(array, order=order)  # kernels read weights row by row, tables by column
        if array.dtype.kind != "f":
            array = array.astype(np.float32)
        self.name = name
        self.grad: np.ndarray | None = None
        self.packed: Any = None  # what an operation keeps of the present version, for its own use
        self._count = Version()
        self._flat: FlatBuffer | None = None
        self._hold(array)

    def _hold(self, array: np.ndarray) -> None:
        self._array = array
        self._view = array.view()
        self._view.flags.writeable = False

    @property
    def value(self) -> np.ndarray:
        """The current values, read-only; the view follows later writes."""
        return self._view

    @property
    def version(self) -> int:
        """Rises at every write: the parameter's own count plus that of its flat buffer."""
        flat = self._flat
        return self._count.count if flat is None else self._count.count + flat.count.count

    @property
    def counters(self) -> tuple[Version, ...]:
        """The counters whose sum is `version`, for kernels that watch them."""
        return (self._count,) if self._flat is None else (self._count, self._flat.count)

    @property
    def flat_buffer(self) -> FlatBuffer | None:
        """The buffer that this parameter is a view of, if it was moved into one."""
        return self._flat

    @contextmanager
    def writing(self) -> Iterator[np.ndarray]:
        """Yields the writable array; the parameter counts as changed, also when the body raises."""
        self._changed()
        try:
            yield self._array
        finally:
            self._changed()

    def _changed(self) -> None:
        self._count.bump()
        writes.bump()

    def move_into(self, flat: FlatBuffer, view: np.ndarray) -> None:
        """Goes on living in `view`, a part of `flat`, which takes over the present values."""
        view[...] = self._array
        if self._flat is not None:
            self._flat.left = True
        version = self.version
        self._changed()  # whoever watches the counter that is now given up looks again
        self._count = Version(version + 1)
        self._flat = flat
        self._hold(view)

    def __setitem__(self, key: Any, new: Any) -> None:
        array = self._plain(new)
        try:
            self._array[key] = array
        except ValueError as error:
            raise ShapeError(
                f"{self.name or 'Param'}: cannot write an array of shape {np.shape(array)} into a "
                f"parameter of shape {self.shape}: {error}. Nothing was changed."
            ) from error
        self._changed()

    def _in_place(self, ufunc: np.ufunc, other: Any) -> Param:
        array = self._plain(other)
        try:
            ufunc(self._array, array, out=self._array, casting="same_kind")
        except ValueError as error:
            raise ShapeError(
                f"{self.name or 'Param'}: cannot {ufunc.__name__} an array of shape "
                f"{np.shape(array)} in place, the parameter has shape {self.shape}. "
                "Nothing was changed."
            ) from error
        self._changed()
        return self

    def _plain(self, new: Any) -> Any:
        if isinstance(new, Tensor) and new.live:
            raise TapeError(
                f"{self.name or 'Param'}: a recorded Tensor cannot be written into a parameter, "
                "its history would be lost. Write recur.value(t), after the scope."
            )
        return peek(new) if isinstance(new, Operand) else new

    def __iadd__(self, other: Any) -> Param:
        return self._in_place(np.add, other)

    def __isub__(self, other: Any) -> Param:
        return self._in_place(np.subtract, other)

    def __imul__(self, other: Any) -> Param:
        return self._in_place(np.multiply, other)

    def __itruediv__(self, other: Any) -> Param:
        return self._in_place(np.true_divide, other)

    def zero_grad(self) -> None:
        """Sets `.grad` to zeros, in its own memory; leaves None as it is."""
        if self.grad is not None:
            self.grad.fill(0)

    def __repr__(self) -> str:
        return f"Param({np.array2string(self._array, separator=', ', prefix='Param(')})"

    def __copy__(self) -> Param:
        return self.like(self._array)

    def __deepcopy__(self, memo: dict) -> Param:
        memo[id(self)] = copy = self.like(self._array)
        return copy

    def __reduce__(self) -> tuple:
        return _param, (np.array(self._array, order="K"), self.name, self.order)

    def like(self, array: Any) -> Param:
        """A new parameter with these values, and with this one's name and memory layout."""
        return Param(array, self.name, order=self.order)

    @property
    def order(self) -> Literal["C", "F"]:
        """How the values lie in memory: row by row, or column by column."""
        return "C" if self._array.flags.c_contiguous else "F"

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._array.copy(order="K").__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple:
        return self._array.__dlpack_device__()


def _param(array: np.ndarray, name: str, order: Literal["C", "F"]) -> Param:
    return Param(array, name, order=order)


def peek(x: Any) -> Any:
    """The array behind a Tensor or a Param, not copied and not protected; anything else as it is.

    For use inside the library: the result must not be written or handed out.
    """
    if type(x) is Tensor:
        return x._value
    if type(x) is Param:
        return x._view
    return x


def value(x: Any) -> Any:
    """The plain value of a Tensor or Param: a read-only view, or a scalar if it has no axes.

    Tuples, lists and dicts are gone through; anything else comes back as it is.
    """
    if isinstance(x, Tensor):
        if x._value.ndim == 0:
            return x._value[()]
        view = x._value.view()
        view.flags.writeable = False
        return view
    if isinstance(x, Param):
        return x._view
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(value, x))
    if isinstance(x, (tuple, list)):
        return type(x)(map(value, x))
    if isinstance(x, dict):
        return {k: value(v) for k, v in x.items()}
    return x


def traced(x: Any) -> Tensor | Param | None:
    """`x` if gradient may flow into it, else None: what belongs into `Node.inputs`."""
    if type(x) is Tensor:
        return x if x.node.tape.alive else None
    return x if type(x) is Param else None


class _SavedParam:
    """A parameter's value as a node needs it: by reference, with the version it then had."""

    __slots__ = ("param", "version")

    def __init__(self, param: Param) -> None:
        self.param = param
        self.version = param.version


def save(x: Any) -> Any:
    """What a node keeps of an input whose value its backward needs; `restore` gives it back.

    Tensors never change, so their array is kept.  A parameter is kept by reference with its
    version.  A plain array belongs to the caller, who may write into it: it is copied.
    """
    if type(x) is Tensor:
        return x._value
    if type(x) is Param:
        return _SavedParam(x)
    if type(x) is float or type(x) is int:
        return x  # a Python number adapts to the other operand's dtype, an array would not
    return np.array(x, order="K")


def restore(saved: Any) -> np.ndarray:
    """The value that `save` kept; raises `TapeError` if the parameter was written meanwhile."""
    if type(saved) is not _SavedParam:
        return saved
    check_version(saved.param, saved.version)
    return saved.param._view


def check_version(param: Param, version: int) -> None:
    """Raises `TapeError` if `param` was written since it had `version`."""
    if param.version != version:
        raise TapeError(
            f"backward needs the value that {param.name or 'a parameter'} had when it was used, "
            "and it has been written since. Call backward before the write, or cut the history "
            "with truncate(model) or reset(model) after it."
        )


def record(
    op: Op, inputs: tuple, outputs: Sequence[np.ndarray], saved: Any, layer: object = None
) -> list[Tensor]:
    """Puts one operation on the open tape and returns its outputs as Tensors.

    `inputs` is a tuple of `traced(...)` values.  `layer` is who called, for the event log.
    """
    tape = _thread.tape
    assert tape is not None
    node = Node(op, inputs, saved, tape)
    if tape.events is not None:
        tape.log(op.name, node=node, layer=layer)
    return [Tensor(array, node, i) for i, array in enumerate(outputs)]


def record_one(op: Op, inputs: tuple, output: Any, saved: Any) -> Tensor:
    """`record` for an operation with one output, which may be a NumPy scalar."""
    tape = _thread.tape
    assert tape is not None
    node = Node(op, inputs, saved, tape)
    if tape.events is not None:
        tape.log(op.name, node=node)
    if type(output) is not np.ndarray:
        output = np.asarray(output)
    return Tensor(output, node)


class _Slot:
    """What a sweep knows of one output or leaf: its gradient so far, and posts not multiplied out.

    A first gradient is borrowed (`owned` False): the next one that comes is added into a new array.
    """

    __slots__ = ("grad", "owned", "posts", "rows")

    def __init__(self) -> None:
        self.grad: np.ndarray | None = None
        self.owned = False
        self.posts: list[tuple[np.ndarray, np.ndarray | None]] | None = None
        self.rows = 0

    def flush(self) -> np.ndarray:
        """Multiplies the posts out, one product for all, and returns the gradient."""
        posts = self.posts
        if not posts:
            assert self.grad is not None  # a slot is made to be given something
            return self.grad
        self.posts, self.rows = None, 0
        dg = _stacked([post[0] for post in posts])
        first = posts[0][1]
        if self.grad is not None and not self.owned:
            self.grad = np.array(self.grad, order="C")
        out = self.grad
        if out is None:
            shape = (dg.shape[1],) if first is None else (dg.shape[1], first.shape[1])
            out = np.empty(shape, dg.dtype)
        # A gradient that came another way may be laid out by columns; kernels write rows.
        target = out if out.flags.c_contiguous else np.ascontiguousarray(out)
        accumulate = self.grad is not None
        if first is None:
            _kernels.bias_gradient(dg, target, accumulate=accumulate)
        else:
            x = _stacked([post[1] for post in posts])
            _kernels.weight_gradient(dg, x, target, accumulate=accumulate)
        self.grad, self.owned = target, True
        return target


def _stacked(parts: list) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0)


class Sweep:
    """One walk from a loss back to the leaves.

    Operations reach it through three methods: `add` gives an input its gradient, `buffer` gives
    the array into which a gradient may be added in place, `post` leaves a product to be made later.
    """

    __slots__ = ("_heap", "_leaves", "_pending", "_tape", "_wanted", "found", "keep_graph")

    def __init__(
        self,
        tape: Tape | None = None,
        *,
        keep_graph: bool = False,
        wanted: Iterable[Tensor] = (),
    ) -> None:
        self.keep_graph = keep_graph
        self._tape = tape
        self._heap: list[tuple[int, Node]] = []
        self._pending: dict[Node, dict[int, _Slot]] = {}
        self._leaves: dict[Param | Node, _Slot] = {}
        self._wanted = {(t.node, t.index) for t in wanted if t.node.op is not _LEAF}
        self.found: dict[tuple[Node, int], np.ndarray] = {}

    def run(self, start: Tensor | Param, cotangent: np.ndarray) -> None:
        """Walks back from `start`, whose own gradient is `cotangent`."""
        tape, _thread.tape = _thread.tape, None  # nothing that a backward does is recorded
        try:
            self.add(start, cotangent)
            while self._heap:
                self._visit(heapq.heappop(self._heap)[1])
            for slot in self._leaves.values():
                slot.flush()
        finally:
            _thread.tape = tape

    def _visit(self, node: Node) -> None:
        op = node.op
        slots = self._pending.pop(node)
        if node.tape is not self._tape and node.tape.is_open:
            raise TapeError(
                "backward: this loss depends on the open scope of another thread. Pass "
                "recur.value(t) between threads, or close that scope first."
            )
        if op is None:
            raise GraphUsedError(
                "backward: this loss was already swept. Keep the graph (keep_graph=True) to sweep "
                "it again, or cut it with truncate(model) or reset(model) before the next loss."
            )
        if not self.keep_graph:
            node.op = None
        grads = {index: slot.flush() for index, slot in slots.items()}
        if self._wanted:
            for index, grad in grads.items():
                if (node, index) in self._wanted:
                    self.found[node, index] = grad.copy(order="K")
        op.backward(self, node, grads)
        if not self.keep_graph:
            node.inputs = node.saved = None

    def _slot(self, x: Tensor | Param) -> _Slot:
        node = x.node
        if node is None or node.op is _LEAF:
            key = x if isinstance(x, Param) else x.node
            slot = self._leaves.get(key)
            if slot is None:
                slot = self._leaves[key] = _Slot()
            return slot
        slots = self._pending.get(node)
        if slots is None:
            slots = self._pending[node] = {}
            heapq.heappush(self._heap, (-node.seq, node))
        slot = slots.get(x.index)
        if slot is None:
            slot = slots[x.index] = _Slot()
        return slot

    def add(self, x: Tensor | Param | None, grad: np.ndarray, *, own: bool = False) -> None:
        """Adds `grad` to what `x` gets.  `own` says that nobody else holds the array.

        A None (an input that takes no gradient) is passed over.
        """
        if x is None:
            return
        slot = self._slot(x)
        if slot.grad is None:
            dtype = peek(x).dtype
            if type(grad) is not np.ndarray or grad.dtype != dtype:
                grad, own = np.array(grad, dtype), True
            slot.grad, slot.owned = grad, own
        elif slot.owned:
            slot.grad += grad
        else:
            slot.grad, slot.owned = np.asarray(slot.grad + grad), True

    def buffer(self, x: Tensor | Param) -> np.ndarray:
        """The gradient of `x` so far, as an array of zeros at first, to be added to in place."""
        slot = self._slot(x)
        if slot.grad is None:
            slot.grad = np.zeros_like(peek(x))
        elif not slot.owned:
            slot.grad = slot.grad.copy(order="K")
        slot.owned = True
        return slot.grad

    def post(self, x: Tensor | Param | None, dg: np.ndarray, by: np.ndarray | None = None) -> None:
        """Leaves `dg.T @ by` (without `by`: `dg.sum(0)`) to be added to what `x` gets.

        `dg` is (N, rows), `by` (N, columns), both C-contiguous, both unchanged until the sweep
        ends.  All posts to one weight become one product, when its producer is visited or, for a
        leaf, at the end.
        """
        if x is None:
            return
        slot = self._slot(x)
        if slot.posts is None:
            slot.posts = []
        slot.posts.append((dg, by))
        slot.rows += len(dg)
        if slot.rows >= _ROWS_PER_FLUSH:
            slot.flush()

    def leaf(self, x: Tensor | Param) -> np.ndarray | None:
        """The gradient of a leaf after `run`, or None if the loss does not reach it."""
        slot = self._leaves.get(x if isinstance(x, Param) else x.node)
        return None if slot is None else slot.flush()

    def deposit(self, accumulate: bool) -> None:
        """Writes every leaf's gradient to its `.grad`, adding to it or overwriting it."""
        for key, slot in self._leaves.items():
            grad = slot.flush()
            held = key.saved if isinstance(key, Node) else key.grad
            if held is None:
                held = grad if slot.owned else grad.copy(order="K")
            elif accumulate:
                held += grad
            else:
                held[...] = grad
            if isinstance(key, Node):
                key.saved = held
            else:
                key.grad = held


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
    for pictures.

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
        return self

    def __exit__(self, *exc: object) -> None:
        _thread.tape = None
        self.alive, self.is_open = self.keep_history, False
        stepped, self._stepped = self._stepped, {}
        if not self.keep_history:
            for layer in stepped.values():
                layer.forget_history()

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
        owned = self._owner == threading.get_ident()
        return self.alive and not self.keep_history and not owned

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
        return Tensor(array, Node(_LEAF, (), None, self))

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
            grad = sweep.leaf(t) if t.node is None or t.node.op is _LEAF else None
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
            seed = np.array(peek(cotangent), loss.dtype)
            if seed.shape != loss.shape:
                raise ShapeError(
                    f"{caller}: the cotangent has shape {seed.shape}, expected {loss.shape}, the "
                    "shape of the loss. Nothing was changed."
                )
        if self.events is not None:
            self.log("loss", inputs=(loss,))
        sweep = Sweep(self, keep_graph=keep_graph or self.keep_history, wanted=wanted)
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

        Counted on demand among the objects that the garbage collector knows, so that recording
        pays nothing for it.
        """
        return sum(type(o) is Node and o.tape is self for o in gc.get_objects())

    def log(
        self, kind: str, *, node: Node | None = None, layer: object = None, **more: Any
    ) -> None:
        """Adds one event, without arrays: sequence number, kind, layer, the inputs' numbers."""
        if self.events is None:
            return
        inputs = more.pop("inputs", node.inputs if node is not None else ()) or ()
        seqs = [x.node.seq for x in inputs if x is not None and x.node is not None]
        params = [x for x in inputs if type(x) is Param]
        seq = node.seq if node is not None else next(_seq)
        self.events.append(
            {"seq": seq, "kind": kind, "layer": layer, "inputs": seqs, "params": params, **more}
        )
