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

from recur.tape.nodes import Node, Op, Operation
from recur.tape.params import (
    FlatBuffer,
    Param,
    check_version,
    restore,
    save,
    traced,
    writes,
)
from recur.tape.scope import Start, Tape, current, paused, record, record_one
from recur.tape.sweep import Sweep
from recur.tape.values import Operand, Tensor, peek, protected, value

__all__ = [
    "FlatBuffer",
    "Node",
    "Op",
    "Operand",
    "Operation",
    "Param",
    "Start",
    "Sweep",
    "Tape",
    "Tensor",
    "check_version",
    "current",
    "paused",
    "peek",
    "protected",
    "record",
    "record_one",
    "restore",
    "save",
    "traced",
    "value",
    "writes",
]
