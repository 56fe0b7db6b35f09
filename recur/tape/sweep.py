"""`Sweep`: the walk from a loss back to the leaves, and the sinks that gather weight gradients."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from recur import _kernels
from recur._kernels import Slot, Walk
from recur.errors import GraphUsedError, TapeError
from recur.tape.nodes import LEAF, Node
from recur.tape.params import Param
from recur.tape.values import Tensor, peek

if TYPE_CHECKING:
    from recur.tape.scope import Tape

# A sink multiplies its posts out as soon as this many rows have come together: enough for one
# product to run at full speed, few enough for memory not to grow with the length of the window.
_ROWS_PER_FLUSH = 4096


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


class Sweep(Walk):
    """One walk from a loss back to the leaves.

    Operations reach it through three methods: `add` gives an input its gradient, `buffer` gives
    the array into which a gradient may be added in place, `post` leaves a product to be made later.
    """

    __slots__ = ("_stacked", "_start")

    def __init__(
        self,
        tape: Tape | None = None,
        *,
        keep_graph: bool = False,
        wanted: Iterable[Tensor] = (),
    ) -> None:
        nodes = {(t.node, t.index) for t in wanted if t.node.op is not LEAF}
        super().__init__(tape, LEAF, keep_graph, nodes, _ROWS_PER_FLUSH)
        self._start: Node | None = None
        self._stacked: list[tuple[list[np.ndarray], np.ndarray]] = []

    def run(self, start: Tensor | Param, cotangent: np.ndarray) -> None:
        """Walks back from `start`, whose own gradient is `cotangent`."""
        self._start = start.node
        self.add(start, cotangent)
        self.walk()
        self._stacked.clear()

    def refuse(self, node: Node) -> None:
        """Raises: an earlier sweep has used the node up."""
        raise GraphUsedError(_SWEPT if node is self._start else _REACHES_SWEPT)

    def check_thread(self, node: Node) -> None:
        """Raises `TapeError` if the node belongs to a scope that is open in another thread."""
        if node.tape.open_elsewhere:
            raise TapeError(
                "backward: this loss depends on the open scope of another thread. Pass "
                "recur.value(t) between threads, or close that scope first."
            )

    def multiply_out(self, slot: Slot, posts: list[tuple[np.ndarray, ...]]) -> None:
        """Adds to the gradient what all the posts of one weight stand for."""
        dg = self._stack([post[0] for post in posts])
        held, like = slot.grad, slot.like
        # Kernels write rows of one dtype, and nobody else may hold what they add to.
        in_place = held is not None and slot.owned and held.flags.c_contiguous
        in_place = in_place and dg.dtype == like.dtype
        out = held if in_place and held is not None else np.empty(like.shape, dg.dtype)
        if len(posts[0]) == 1:
            _kernels.bias_gradient(dg, out, accumulate=in_place)
        else:
            xs = [post[1] for post in posts]
            x = xs[0] if len(xs) == 1 else np.concatenate(xs)
            _kernels.weight_gradient(dg, x, out, accumulate=in_place)
        if not in_place:
            slot.add(out, own=True)

    def _stack(self, parts: list[np.ndarray]) -> np.ndarray:
        """The parts under each other: once, for all the weights of a cell to which they went."""
        if len(parts) == 1:
            return parts[0]
        for known, stacked in self._stacked:
            if len(known) == len(parts) and all(map(operator.is_, known, parts)):
                return stacked
        stacked = np.concatenate(parts)
        self._stacked = [*self._stacked[-1:], (parts, stacked)]  # a GRU has two kinds
        return stacked

    def leaf(self, x: Tensor | Param) -> np.ndarray | None:
        """The gradient of a leaf after `run`, or None if the loss does not reach it."""
        slot = self.leaves.get(x if isinstance(x, Param) else x.node)
        return None if slot is None else self.flush(slot)

    def take(self, x: Tensor | Param) -> np.ndarray:
        """The gradient of a leaf after `run`, as an array of the caller's own; zeros if the loss
        does not reach it."""
        slot = self.leaves.get(x if isinstance(x, Param) else x.node)
        if slot is None:
            return np.zeros_like(peek(x))
        grad = self.flush(slot)
        if not slot.owned:
            return _copy(grad, slot.like)
        slot.owned = False  # asked for again, it is copied
        return grad

    def deposit(self, accumulate: bool) -> None:
        """Writes every leaf's gradient to its `.grad`, adding to it or overwriting it."""
        for key, slot in self.leaves.items():
            grad = self.flush(slot)
            held = key.saved if isinstance(key, Node) else key.grad
            if held is None:
                held = grad if slot.owned else _copy(grad, slot.like)
            elif accumulate:
                held += grad
            else:
                held[...] = grad
            if isinstance(key, Node):
                key.saved = held
            else:
                key.grad = held


def _copy(grad: np.ndarray, like: np.ndarray) -> np.ndarray:
    """A copy in the memory order of the value: a gradient may be one number shown many times."""
    out = np.empty_like(like, dtype=grad.dtype)
    out[...] = grad
    return out
