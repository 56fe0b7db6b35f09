"""Nodes of the graph, and the operations that a sweep sees in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recur._kernels import Node, Operation

if TYPE_CHECKING:
    from recur.tape.sweep import Sweep

__all__ = ["LEAF", "Node", "Op", "Operation"]


class Op(Operation):
    """An operation as the sweep sees it: a name, and how gradients go through it.

    `backward(sweep, node, grads)` gets the gradients of the node's outputs, as arrays by output
    index (an output that the loss does not reach is missing), and hands on what the inputs get by
    `sweep.add`, `sweep.buffer` and `sweep.post`.  It may keep or overwrite nothing of `node.saved`
    when `sweep.keep_graph` is set, and it must never write into `grads`.

    A node of a `lasting` operation is never used up: any number of sweeps may pass it, as they may
    reach a parameter again.  It must leave `node.saved` as it is.
    """

    __slots__ = ()

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        """Adds to the sweep what each input of `node` gets.

        grads  the gradient of each output that has one, by its place, in the output's shape
        """
        raise TypeError(f"{self.name} has no gradient")


LEAF = Op("leaf")
