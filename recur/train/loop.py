"""The training loop."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from recur.errors import FormatError, RecurError, StateError
from recur.files import AnyPath
from recur.gradients import withgradient
from recur.io.model import own_metadata
from recur.module import load_state_dict, modules, state_dict
from recur.optim import update
from recur.recurrent import reset as reset_states
from recur.train import checkpoint as checkpoints
from recur.train.progress import Progress

Loss = Callable[..., Any]
Validation = Callable[[Any], float] | Iterable[Any]


@dataclass
class History:
    """What a training run has done: the loss of every update, the validations, and why it ended."""

    losses: list[float] = field(default_factory=list)
    validations: list[tuple[int, float]] = field(default_factory=list)  # (step, loss)
    best: float = math.inf  # the lowest validation loss
    seconds: float = 0.0
    stopped: Literal["", "finished", "patience", "callback"] = ""

    @property
    def steps(self) -> int:
        """How many updates there were."""
        return len(self.losses)


@dataclass(frozen=True)
class Event:
    """What a callback is told.

    `loss` is that of the update (kind "step"), of the validation ("validation"), or the mean over
    the epoch that has just ended ("epoch").  `step` counts updates from 1, `epoch` from 0.
    """

    kind: Literal["step", "validation", "epoch"]
    model: Any
    opt: Any
    epoch: int
    step: int
    loss: float
    history: History


Callback = Callable[[Event], Any]


def train(
    loss: Loss,
    model: Any,
    data: Iterable[Any],
    opt: Any,
    *,
    epochs: int = 1,
    updates: int | None = None,
    accumulate: int = 1,
    combine: Literal["mean", "sum"] = "mean",
    reset: Literal["epoch", "batch", "never"] = "epoch",
    validation: Validation | None = None,
    validate_every: int | None = None,
    patience: int | None = None,
    keep_best: bool = False,
    callbacks: Callback | Sequence[Callback] = (),
    checkpoint: AnyPath | None = None,
    checkpoint_every: int = 100,
    resume: bool = False,
    generators: Mapping[str, np.random.Generator] | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: bool | Callable[[Event], str] = True,
) -> History:
    """Update `model` by `opt` for every batch of `data`, `epochs` times over.

    Each batch costs `loss(model, *batch)` if it is a tuple, else `loss(model, batch)`.  Truncated
    backpropagation is what comes out: a recurrent state goes on from batch to batch as a value.
    The loss may also return `(loss, weight)`: how many samples or real steps it is the mean of.

    epochs, updates
        passes over the data; updates in all, if that is less
    accumulate, combine
        batches whose gradients make one update; the last of an epoch takes what is left.  "mean":
        the mean of their losses by weight (1 each, if the loss gives none), which is that of one
        large batch; "sum": the sum, for losses that are sums over samples and steps
    reset
        when recurrent layers go back to their start: at every epoch, for data that continue each
        other (`windows`); before every batch, for independent ones
    validation
        a function of the model, or batches whose mean loss counts; run after every epoch, or every
        `validate_every` updates, from the start state and outside any scope; the states of training
        then go on untouched
    patience, keep_best
        stop after so many validations without a lower loss; end with the weights of the lowest
    callbacks
        called with an `Event`; training stops if one returns True
    checkpoint
        a file that is written every `checkpoint_every` updates, after every epoch, and at the end.
        With `resume` a run goes on from it, if it is there, with the same numbers as if it had
        never stopped.  It holds weights, recurrent states, optimiser, history, the place in the
        data (`data.state_dict()` where there is one, else a count of batches to pass over),
        callbacks that have a `state_dict`, recur's generator, those of random layers, and
        `generators`, your own by name.  `recur.load` opens it; `metadata` goes in
    progress
        False for silence, or a function of the `Event` that gives the text shown

    Ctrl-C is held back until the update under way is complete and the checkpoint written, then
    raised; a second one is raised at once.

    Raises StateError if a checkpoint belongs to another model, FormatError if it is damaged,
    FloatingPointError when a loss is not finite, before it reaches the weights, and what `loss`
    and the callbacks raise.
    """
    counts = (updates, accumulate, validate_every, checkpoint_every)
    if any(count is not None and count < 1 for count in counts):
        raise ValueError(
            "train: updates, accumulate, validate_every and checkpoint_every count from 1."
        )
    if combine not in ("mean", "sum"):
        raise ValueError(f'train: combine={combine!r}, expected "mean" or "sum".')
    if reset not in ("epoch", "batch", "never"):
        raise ValueError(f'train: reset={reset!r}, expected "epoch", "batch" or "never".')
    if validation is None and (patience is not None or keep_best):
        raise ValueError("train: patience and keep_best need validation=.")
    if isinstance(epochs, bool) or not isinstance(epochs, (int, np.integer)) or epochs < 0:
        raise ValueError(f"train: epochs is {epochs!r}, expected a number of rounds, 0 or more.")
    run = _Run(
        loss=loss,
        model=model,
        data=data,
        opt=opt,
        updates=math.inf if updates is None else updates,
        accumulate=accumulate,
        combine=combine,
        reset=reset,
        validation=validation,
        validate_every=validate_every,
        patience=patience,
        keep_best=keep_best,
        callbacks=(callbacks,) if callable(callbacks) else tuple(callbacks),
        path=checkpoint,
        checkpoint_every=checkpoint_every,
        generators=dict(generators or {}),
        metadata=own_metadata(metadata),
    )
    if resume and checkpoint is not None and Path(checkpoint).exists():
        run.load(checkpoint)
    return run.go(epochs, progress)


@dataclass
class _Run:
    """One call of `train`: its options, and where it stands."""

    loss: Loss
    model: Any
    data: Iterable[Any]
    opt: Any
    updates: float
    accumulate: int
    combine: str
    reset: str
    validation: Validation | None
    validate_every: int | None
    patience: int | None
    keep_best: bool
    callbacks: tuple[Callback, ...]
    path: AnyPath | None
    checkpoint_every: int
    generators: dict[str, np.random.Generator]
    metadata: dict[str, str]

    history: History = field(default_factory=History)
    epoch: int = 0
    position: int = 0  # batches of this epoch that are done
    exhausted: bool = False  # whether the data has said that there are no more
    epoch_loss: float = 0.0  # summed over them
    since_best: int = 0  # validations
    best: dict[str, np.ndarray] | None = None  # weights
    gradients: Any = None  # used again for every batch

    def go(self, epochs: int, progress: bool | Callable[[Event], str]) -> History:
        self.text = progress if callable(progress) else _text
        self.progress = Progress(self._total(epochs), self.history.steps) if progress else None
        self.started = time.monotonic() - self.history.seconds
        self.history.stopped = "patience" if self._out_of_patience() else ""
        try:
            with _interrupts_held_back() as self.interrupted:
                while self.epoch < epochs and not self._ended():
                    self._run_epoch()
        finally:
            if self.progress:
                self.progress.close()
        self.history.stopped = self.history.stopped or "finished"
        if self.best is not None:
            load_state_dict(self.model, self.best)
        return self.history

    def _total(self, epochs: int) -> int | None:
        """How many updates there will be in all, if the data has a length."""
        try:
            batches = len(self.data)  # type: ignore[arg-type]
        except TypeError:
            return None
        return int(min(epochs * math.ceil(batches / self.accumulate), self.updates))

    def _ended(self) -> bool:
        return bool(self.history.stopped) or self.history.steps >= self.updates

    def _run_epoch(self) -> None:
        if self.position == 0 and self.reset == "epoch":
            reset_states(self.model)
        batches = self._batches()
        while group := list(islice(batches, self.accumulate)):
            self.exhausted = len(group) < self.accumulate
            loss = self._update(group)
            self.position += len(group)
            self.epoch_loss += loss * len(group)
            self.history.losses.append(loss)
            self._tell("step", loss)
            if self.validate_every and self.history.steps % self.validate_every == 0:
                self._validate()
            self._settle(due=self.history.steps % self.checkpoint_every == 0)
            if self._ended():
                return
        if self.position == 0:
            raise ValueError(
                f"train: the data gave no batch in epoch {self.epoch}. A generator runs only once: "
                "pass a list, a DataLoader, or windows(...)."
            )
        self._tell("epoch", self.epoch_loss / self.position)
        if self.validation is not None and self.validate_every is None:
            self._validate()
        self.epoch, self.position, self.epoch_loss = self.epoch + 1, 0, 0.0
        self.exhausted = False
        self._settle(due=True)

    def _batches(self) -> Iterator[Any]:
        """The batches of this epoch that are still to come."""
        if self.exhausted:  # data that knows its own place is already at the next epoch
            return iter(())
        if hasattr(self.data, "load_state_dict"):
            return iter(self.data)  # it goes on by itself
        return islice(iter(self.data), self.position, None)

    def _update(self, group: list[Any]) -> float:
        """One update by the gradient of a group of batches; returns their loss."""
        total = 0.0
        weights = []
        for i, batch in enumerate(group):
            if self.reset == "batch":
                reset_states(self.model)
            (loss, weight), self.gradients = withgradient(
                lambda model, batch=batch: self._cost(model, batch),
                self.model,
                into=self.gradients,
                accumulate=i > 0,
            )
            total += float(loss)
            weights.append(weight)
        if self.combine == "mean":
            whole = math.fsum(weights)
            total /= whole
            for flat in self.gradients.flats if whole != 1 else ():
                flat /= whole
        if not math.isfinite(total):
            raise FloatingPointError(
                f"train: the loss is {total} at update {self.history.steps + 1}, and the weights "
                "have not taken it in. Lower the learning rate or clip the gradient (ClipNorm)."
            )
        update(self.opt, self.model, self.gradients)
        return total

    def _cost(self, model: Any, batch: Any) -> tuple[Any, float]:
        """What a batch adds to the sum over its group, and the weight that it has there."""
        cost = self.loss(model, *batch) if isinstance(batch, tuple) else self.loss(model, batch)
        loss, weight = cost if isinstance(cost, tuple) else (cost, 1.0)
        if self.combine == "sum":
            return loss, 1.0
        if not weight > 0:
            raise ValueError(f"train: the loss came with weight {weight}, expected more than 0.")
        return (loss if weight == 1 else loss * float(weight)), float(weight)

    def _validate(self) -> None:
        layers = [layer for _, layer in modules(self.model)]
        states = [layer.running_state() for layer in layers]
        try:
            reset_states(self.model)
            loss = self._validation_loss()
        finally:
            for layer, state in zip(layers, states, strict=True):
                layer.load_running_state(state)
        self.history.validations.append((self.history.steps, loss))
        self.since_best += 1
        if loss < self.history.best:
            self.history.best, self.since_best = loss, 0
            self.best = state_dict(self.model) if self.keep_best else None
        self._tell("validation", loss)
        if self._out_of_patience():
            self.history.stopped = "patience"

    def _validation_loss(self) -> float:
        if callable(self.validation):
            return float(self.validation(self.model))
        assert self.validation is not None
        costs = []
        for batch in self.validation:
            if self.reset == "batch":
                reset_states(self.model)
            costs.append(tuple(map(float, self._cost(self.model, batch))))
        return math.fsum(loss for loss, _ in costs) / math.fsum(weight for _, weight in costs)

    def _out_of_patience(self) -> bool:
        return self.patience is not None and self.since_best >= self.patience

    def _tell(self, kind: Literal["step", "validation", "epoch"], loss: float) -> None:
        steps, history = self.history.steps, self.history
        event = Event(kind, self.model, self.opt, self.epoch, steps, loss, history)
        history.seconds = time.monotonic() - self.started
        for callback in self.callbacks:
            if callback(event) is True:
                history.stopped = "callback"
        if self.progress and kind == "step":
            self.progress.step(steps, self.text(event))
        elif self.progress:
            self.progress.line(self.text(event))

    def _settle(self, due: bool) -> None:
        """Write the checkpoint if it is due, or if this is the end."""
        stops = self.interrupted()
        if due or stops or self._ended():
            self.save()
        if stops:
            raise KeyboardInterrupt

    def save(self) -> None:
        if self.path is None:
            return
        run = {
            "losses": np.array(self.history.losses),
            "validations": np.array(self.history.validations).reshape(-1, 2),
            "best": self.history.best,
            "best_weights": self.best,
            "since_best": self.since_best,
            "seconds": self.history.seconds,
            "epoch": self.epoch,
            "position": self.position,
            "exhausted": self.exhausted,
            "epoch_loss": self.epoch_loss,
            "parts": [_state_of(part) for part in self._parts()],
        }
        checkpoints.write(self.path, self.model, run, self.generators, self.metadata)

    def load(self, path: AnyPath) -> None:
        arrays, run = checkpoints.read(path)
        undo: list[tuple[Any, Any]] = []
        try:
            history = History(
                losses=run["losses"].tolist(),
                validations=[(int(step), loss) for step, loss in run["validations"].tolist()],
                best=run["best"],
                seconds=run["seconds"],
            )
            for part, state in zip(self._parts(), run["parts"], strict=True):
                undo.append((part, _state_of(part)))
                _load_state(part, state)
            checkpoints.restore(self.model, self.generators, arrays, run["random"])
            self.best, self.since_best = run["best_weights"], run["since_best"]
            self.epoch, self.position = run["epoch"], run["position"]
            self.exhausted = run["exhausted"]
            self.epoch_loss = run["epoch_loss"]
        except Exception as error:
            for part, state in reversed(undo):
                _load_state(part, state)
            if isinstance(error, RecurError):
                raise type(error)(f"{path}: {error}") from error
            raise FormatError(f"{path}: the checkpoint does not fit this run: {error}") from error
        self.history = history

    def _parts(self) -> list[Any]:
        """What keeps a state of its own, beside the model."""
        return [self.opt, self.data, *self.callbacks]


def _state_of(part: Any) -> Any:
    return part.state_dict() if hasattr(part, "load_state_dict") else None


def _load_state(part: Any, state: Any) -> None:
    if hasattr(part, "load_state_dict") != (state is not None):
        raise StateError(
            f"the checkpoint was written with something else than this {type(part).__name__}. "
            "Call train with the same optimiser, data and callbacks."
        )
    if state is not None:
        part.load_state_dict(state)


def _text(event: Event) -> str:
    name = {"step": "loss", "validation": "validation loss", "epoch": "mean loss"}[event.kind]
    return f"epoch {event.epoch}, {name} {event.loss:.4g}"


@contextmanager
def _interrupts_held_back() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C only makes the yielded function return True."""
    pressed = False

    def note(*_: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    before = signal.signal(signal.SIGINT, note) if ours else None
    try:
        yield lambda: pressed
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)
