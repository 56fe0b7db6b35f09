"""Layers without recurrence, and the containers that models are built from."""

from recur.layers.containers import Chain, Parallel, SkipConnection
from recur.layers.dense import Dense, Embedding, Scale
from recur.layers.dropout import Dropout
from recur.layers.normalise import BatchNorm, LayerNorm
from recur.layers.steps import FinalStep

__all__ = [
    "BatchNorm",
    "Chain",
    "Dense",
    "Dropout",
    "Embedding",
    "FinalStep",
    "LayerNorm",
    "Parallel",
    "Scale",
    "SkipConnection",
]
