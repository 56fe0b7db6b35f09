"""Regularisers of recurrent networks: dropped weights, masks that last for a window, penalties."""

from recur.regularise.masks import WindowMasks, resample
from recur.regularise.weight_drop import WeightDrop

__all__ = [
    "WeightDrop",
    "WindowMasks",
    "resample",
]
