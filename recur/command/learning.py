"""Training a character model with a report in bits per character and characters per second."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from recur.command.characters import CharacterModel, loss, shifted
from recur.data import windows
from recur.optim import Adam, ClipNorm, OptimiserChain, setup
from recur.train import Event, History, train

NATS = math.log(2)  # in a bit


def learn(
    model: CharacterModel,
    text: np.ndarray,
    held_out: np.ndarray,
    *,
    batch: int,
    steps: int,
    epochs: int = sys.maxsize,
    updates: int | None = None,
    learning_rate: float | Callable[[int], float],
    clip: float = 1.0,
    validate_every: int | None = None,
    callbacks: tuple[Callable[[Event], Any], ...] = (),
    **checkpoints: Any,
) -> History:
    """Train on `text` in windows whose states go on from one to the next; see `recur.train`."""
    opt = setup(OptimiserChain(ClipNorm(clip), Adam(learning_rate)), model.chain)
    data = windows((shifted(text, model.start), text), batch=batch, steps=steps)
    return train(
        loss,
        model.chain,
        data,
        opt,
        epochs=epochs,
        updates=updates,
        validation=lambda _: NATS * model.bits(held_out),
        validate_every=validate_every,
        callbacks=callbacks,
        progress=Report(batch * steps),
        metadata=model.metadata,
        **checkpoints,
    )


class Report:
    """The text beside the progress bar: bits per character, lately and held out, and speed."""

    def __init__(self, characters: int) -> None:
        self.characters = characters  # an update
        self.updates = 0
        self.lately = 0.0  # mean bits over the last hundred updates or so

    def __call__(self, event: Event) -> str:
        bits = event.loss / NATS
        if event.kind != "step":
            name = "held-out" if event.kind == "validation" else "mean training"
            return f"after {event.step * self.characters:,} characters: {name} {bits:.3f} bits/char"
        self.updates += 1
        self.lately += (bits - self.lately) / min(self.updates, 100)
        speed = event.step * self.characters / max(event.history.seconds, 1e-9)
        return f"{self.lately:.3f} bits/char, {speed:,.0f} characters/s"
