"""Nodes of the graph, and the operations that a sweep sees in them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from recur.tape.scope import Tape
    from recur.tape.sweep import Sweep

next_seq = itertools.count().__next__


class Op:
    """An operation as the sweep sees it: a name, and how gradients go through it.

    `backward(sweep, node, grads)` gets the gradients of the node's outputs, as arrays by output
    index (an output that the loss does not reach is missing), and hands on what the inputs get by
    `sweep.add`, `sweep.buffer` and `sweep.post`.  It may keep or overwrite nothing of `node.saved`
    when `sweep.keep_graph` is set, and it must never write into `grads`.

    A node of a `lasting` operation is never used up: any number of sweeps may pass it, as they may
    reach a parameter again.  It must leave `node.saved` as it is.
    """

    __slots__ = ("name",)

    lasting: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.name = name

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        """Adds to the sweep what each input of `node` gets.

        grads  the gradient of each output that has one, by its place, in the output's shape
        """
        raise TypeError(f"{self.name} has no gradient")

    def __repr__(self) -> str:
        return f"<op {self.name}>"


LEAF = Op("leaf")


class Node:
    """One recorded operation.

    `inputs` holds a Tensor or Param where gradient may flow and None elsewhere; `saved` is what
    the operation's backward needs.  `op` is None once a sweep has used the node up.
    """

    __slots__ = ("inputs", "op", "saved", "seq", "tape")

    def __init__(self, op: Op, inputs: tuple, saved: Any, tape: Tape) -> None:
        self.seq = next_seq()
        self.op: Op | None = op
        self.inputs: tuple | None = inputs
        self.saved = saved
        self.tape = tape
