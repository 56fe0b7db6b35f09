"""Training loops and checkpoints."""

from recur.train.loop import Event, History, train

__all__ = ["Event", "History", "train"]
