"""Regularisers of recurrent networks: dropped weights, masks that last for a window, penalties."""

from recur.regularise.cells import (
    RecurrentDropoutGRUCell,
    RecurrentDropoutLSTMCell,
    Zoneout,
)
from recur.regularise.dropout import EmbeddingDropout, LockedDropout
from recur.regularise.masks import WindowMasks, resample
from recur.regularise.normalised import (
    LayerNormGRUCell,
    LayerNormLSTMCell,
    ProjectedLSTMCell,
    ProjectedState,
)
from recur.regularise.penalties import activity_penalty, temporal_activity_penalty
from recur.regularise.tied import TiedDense
from recur.regularise.weight_drop import WeightDrop

__all__ = [
    "EmbeddingDropout",
    "LayerNormGRUCell",
    "LayerNormLSTMCell",
    "LockedDropout",
    "ProjectedLSTMCell",
    "ProjectedState",
    "RecurrentDropoutGRUCell",
    "RecurrentDropoutLSTMCell",
    "TiedDense",
    "WeightDrop",
    "WindowMasks",
    "Zoneout",
    "activity_penalty",
    "resample",
    "temporal_activity_penalty",
]
