"""Recurrent layers: a cell with a state, and what is done to states."""

from recur.recurrent.bidirectional import Bidirectional, Reversed, flip
from recur.recurrent.control import layers_of, reindex, reset, set_states, states, truncate
from recur.recurrent.layers import GRU, LSTM, RNN, GRUv3
from recur.recurrent.recur import Recur
from recur.recurrent.scan import scan
from recur.recurrent.state import START
from recur.recurrent.tbptt import tbptt

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "START",
    "Bidirectional",
    "GRUv3",
    "Recur",
    "Reversed",
    "flip",
    "layers_of",
    "reindex",
    "reset",
    "scan",
    "set_states",
    "states",
    "tbptt",
    "truncate",
]
