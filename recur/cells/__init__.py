"""Cells: one step of a recurrent layer as a pure function, `state, y = cell(state, x)`."""

from recur.cells.base import (
    Cell,
    LSTMState,
    as_parts,
    begin,
    check_input,
    fit_batch,
    floats,
    own_state,
    plain,
)
from recur.cells.kernel import STEP, KernelCell
from recur.cells.standard import GRUCell, GRUv3Cell, LSTMCell, RNNCell
from recur.cells.weighted import WeightedCell

__all__ = [
    "STEP",
    "Cell",
    "GRUCell",
    "GRUv3Cell",
    "KernelCell",
    "LSTMCell",
    "LSTMState",
    "RNNCell",
    "WeightedCell",
    "as_parts",
    "begin",
    "check_input",
    "fit_batch",
    "floats",
    "own_state",
    "plain",
]
