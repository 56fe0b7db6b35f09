"""`Sweep`: the walk from a loss back to the leaves, and the sinks that gather weight gradients."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from recur import _kernels
from recur.errors import GraphUsedError, TapeError
from recur.tape.nodes import LEAF, Node
from recur.tape.params import Param
from recur.tape.values import Tensor

if TYPE_CHECKING:
    from recur.tape.scope import Tape

# A sink multiplies its posts out as soon as this many rows have come together: enough for one
# product to run at full speed, few enough for memory not to grow with the length of the window.
_ROWS_PER_FLUSH = 4096


class _Slot:
    """What a sweep knows of one output or leaf: its gradient so far, and posts not multiplied out.

    A first gradient is borrowed (`owned` False): the next one that comes is added into a new array.
    """

    __slots__ = ("grad", "like", "owned", "posts", "rows")

    def __init__(self, like: np.ndarray) -> None:
        self.like = like  # the value whose gradient this is: its shape and dtype
        self.grad: np.ndarray | None = None
        self.owned = False
        self.posts: list[tuple[np.ndarray, np.ndarray | None]] | None = None
        self.rows = 0

    def add(self, grad: np.ndarray, own: bool) -> None:
        held = self.grad
        if held is None:
            if type(grad) is not np.ndarray or grad.dtype != self.like.dtype:
                grad, own = np.array(grad, self.like.dtype), True
            self.grad, self.owned = grad, own
        elif self.owned:
            held += grad
        else:
            self.grad, self.owned = np.add(held, grad, out=np.empty_like(held)), True

    def flush(self) -> np.ndarray:
        """Multiplies the posts out, one product for all, and returns the gradient."""
        posts = self.posts
        if posts:
            self.posts, self.rows = None, 0
            self._multiply_out(posts)
        assert self.grad is not None  # a slot is made to be given something
        return self.grad

    def _multiply_out(self, posts: list[tuple[np.ndarray, np.ndarray | None]]) -> None:
        dg = _stacked([post[0] for post in posts])
        held = self.grad
        # Kernels write rows of one dtype, and nobody else may hold what they add to.
        in_place = held is not None and self.owned and held.flags.c_contiguous
        in_place = in_place and dg.dtype == self.like.dtype
        out = held if in_place and held is not None else np.empty(self.like.shape, dg.dtype)
        if posts[0][1] is None:
            _kernels.bias_gradient(dg, out, accumulate=in_place)
        else:
            x = _stacked([post[1] for post in posts])
            _kernels.weight_gradient(dg, x, out, accumulate=in_place)
        if not in_place:
            self.add(out, own=True)


def _stacked(parts: list) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0)


_SWEPT = (
    "backward: this loss was already swept. Keep the graph (keep_graph=True) to sweep it again, or "
    "cut it with truncate(model) or reset(model) before the next loss."
)
_REACHES_SWEPT = (
    "backward: an earlier backward has used up steps that this loss reaches. Between the two "
    "losses call truncate(model), if the steps go on with one sequence, or reset(model), if "
    "another begins. If both losses share a value that is no state, add them and sweep once, or "
    "keep the graph in the first backward (keep_graph=True)."
)


class Sweep:
    """One walk from a loss back to the leaves.

    Operations reach it through three methods: `add` gives an input its gradient, `buffer` gives
    the array into which a gradient may be added in place, `post` leaves a product to be made later.
    """

    __slots__ = (
        "_heap",
        "_leaves",
        "_pending",
        "_start",
        "_tape",
        "_wanted",
        "found",
        "keep_graph",
    )

    def __init__(
        self,
        tape: Tape | None = None,
        *,
        keep_graph: bool = False,
        wanted: Iterable[Tensor] = (),
    ) -> None:
        self.keep_graph = keep_graph
        self._tape = tape
        self._start: Node | None = None
        self._heap: list[tuple[int, Node]] = []
        self._pending: dict[Node, dict[int, _Slot]] = {}
        self._leaves: dict[Param | Node, _Slot] = {}
        self._wanted = {(t.node, t.index) for t in wanted if t.node.op is not LEAF}
        self.found: dict[tuple[Node, int], np.ndarray] = {}

    def run(self, start: Tensor | Param, cotangent: np.ndarray) -> None:
        """Walks back from `start`, whose own gradient is `cotangent`."""
        self._start = start.node
        self.add(start, cotangent)
        while self._heap:
            self._visit(heapq.heappop(self._heap)[1])
        for slot in self._leaves.values():
            slot.flush()

    def _visit(self, node: Node) -> None:
        op = node.op
        slots = self._pending.pop(node)
        if node.tape is not self._tape and node.tape.open_elsewhere:
            raise TapeError(
                "backward: this loss depends on the open scope of another thread. Pass "
                "recur.value(t) between threads, or close that scope first."
            )
        if op is None:
            raise GraphUsedError(_SWEPT if node is self._start else _REACHES_SWEPT)
        used_up = not (self.keep_graph or op.lasting)
        if used_up:
            node.op = None
        grads = {index: slot.flush() for index, slot in slots.items()}
        if self._wanted:
            for index, grad in grads.items():
                if (node, index) in self._wanted:
                    self.found[node, index] = grad.copy(order="K")
        op.backward(self, node, grads)
        if used_up:
            node.inputs = node.saved = None

    def _slot(self, x: Tensor | Param) -> _Slot:
        node = x.node
        if node is None or node.op is LEAF:
            key: Any = x if node is None else node
            slot = self._leaves.get(key)
            if slot is None:
                slot = self._leaves[key] = _Slot(x._value)
            return slot
        slots = self._pending.get(node)
        if slots is None:
            slots = self._pending[node] = {}
            heapq.heappush(self._heap, (-node.seq, node))
        slot = slots.get(x.index)
        if slot is None:
            slot = slots[x.index] = _Slot(x._value)
        return slot

    def add(self, x: Tensor | Param | None, grad: np.ndarray, *, own: bool = False) -> None:
        """Adds `grad` to what `x` gets.  `own` says that nobody else holds the array.

        A None (an input that takes no gradient) is passed over.
        """
        if x is not None:
            self._slot(x).add(grad, own)

    def buffer(self, x: Tensor | Param) -> np.ndarray:
        """The gradient of `x` so far, as an array of zeros at first, to be added to in place."""
        slot = self._slot(x)
        if slot.grad is None:
            slot.grad = np.zeros_like(x._value)
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
