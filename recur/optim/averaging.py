"""`ASGD`: gradient descent that averages its weights, and when to begin with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recur.errors import StateError
from recur.optim.plan import Leaf
from recur.optim.rules import Elementwise, Number, Rule, State
from recur.optim.state import OptimiserState, whole


@dataclass(frozen=True)
class ASGD(Elementwise):
    """Averaged gradient descent: d = eta g, and beside it the mean of the weights since `start`:

    average = average + (x - d - average) / (t - start) for t > start, before that x - d.

    start  the number of updates after which averaging begins; None: not yet, see `start_averaging`

    The weights go on as those of `Descent`; `averaged(opt)` lends the model their average.  Must
    be the last rule of a chain.

    Source: Polyak and Juditsky, Acceleration of stochastic approximation by averaging, 1992.
    """

    eta: Number = 0.1
    start: int | None = None
    swapped: bool = field(default=False, kw_only=True, repr=False)

    def init(self, x: np.ndarray) -> State:
        return {"average": np.array(x, order="K")}

    def at(self, step: int) -> Rule:
        if self.swapped:
            raise StateError(
                "update: the model holds its averaged weights. Nothing was changed. Call "
                "swap_out_average(opt) first."
            )
        return super().at(step)

    def apply(self, state: State, x: np.ndarray, dx: np.ndarray, t: int) -> np.ndarray:
        dx *= self.eta
        average = state["average"]
        if self.averages(t):
            average += (x - dx - average) / (t - (self.start or 0))
        else:
            np.subtract(x, dx, out=average)
        return dx

    def averages(self, t: int) -> bool:
        """Whether the average after t updates is one of several weights."""
        return self.start is not None and t > self.start


def start_averaging(opt: OptimiserState) -> None:
    """Lets the average of `ASGD` begin with the next update, if it has not begun yet.

    Raises `StateError` if ASGD is not the last rule of `opt`.
    """
    leaves = _leaves(opt)
    if not is_averaging(opt):
        _replace(opt, leaves, lambda leaf: {"start": leaf.count})


def is_averaging(opt: OptimiserState) -> bool:
    """Whether `start_averaging` was called, or a start was given to `ASGD`."""
    return any(_rule(leaf).start is not None for leaf in _leaves(opt))


def swap_in_average(opt: OptimiserState) -> None:
    """Gives the model its averaged weights; does nothing if it has them.

    The others wait in `opt`, also in its `state_dict`: a checkpoint written now, of model and
    optimiser, goes on as this one would.  `update` refuses to run until `swap_out_average`.
    """
    _swap(opt, True)


def swap_out_average(opt: OptimiserState) -> None:
    """Gives the model the weights of the last update back; does nothing if it has them."""
    _swap(opt, False)


@contextmanager
def averaged(opt: OptimiserState) -> Iterator[None]:
    """Inside, the model of `opt` has its averaged weights: `with averaged(opt): evaluate(model)`.

    Before averaging has begun they are the weights as they are.  Inside another `averaged`, or
    after `swap_in_average`, it changes nothing.
    """
    had_them = any(_rule(leaf).swapped for leaf in _leaves(opt))
    swap_in_average(opt)
    try:
        yield
    finally:
        if not had_them:
            swap_out_average(opt)


@dataclass
class NonMonotonicTrigger:
    """Starts averaging when validation has stopped to get better: NT-ASGD (Merity, Keskar and
    Socher 2018, Regularizing and optimizing LSTM language models).

        train(..., validation=..., callbacks=NonMonotonicTrigger(n=5))

    It is due when a loss exceeds the lowest of those before it, the last n not counted; that is the
    rule of the authors' program.  As a callback of `train` it looks at the validation losses and
    calls `start_averaging`; `losses` are those it has seen, and go into checkpoints.
    """

    n: int = 5
    losses: list[float] = field(default_factory=list)

    def due(self, loss: float) -> bool:
        """Whether averaging should start after this validation loss; remembers it."""
        older = self.losses[: -self.n] if self.n else self.losses
        self.losses.append(float(loss))
        return bool(older) and loss > min(older)

    def __call__(self, event: Any) -> None:
        if event.kind == "validation" and not is_averaging(event.opt) and self.due(event.loss):
            start_averaging(event.opt)

    def state_dict(self) -> dict[str, Any]:
        """The validation losses so far, for checkpoints."""
        return {"losses": np.array(self.losses)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes on from the losses that `state_dict` gave."""
        self.losses = np.asarray(saved["losses"]).tolist()


def _leaves(opt: OptimiserState) -> list[Leaf]:
    leaves = list(whole(opt)._by_path.values())
    for leaf in leaves:
        if not leaf.rules or not isinstance(leaf.rules[-1], ASGD):
            raise StateError(
                f"{leaf.path}: its last rule is {leaf.rules[-1]}, expected ASGD. Nothing was "
                "changed. Set the optimiser up with setup(ASGD(eta), model)."
            )
    return leaves


def _rule(leaf: Leaf) -> ASGD:
    rule = leaf.rules[-1]
    assert isinstance(rule, ASGD)
    return rule


def _swap(opt: OptimiserState, swapped: bool) -> None:
    leaves = [leaf for leaf in _leaves(opt) if _rule(leaf).swapped != swapped]
    for leaf in leaves:
        average = leaf.states[-1]["average"]
        if swapped and not _rule(leaf).averages(leaf.count):
            average[...] = leaf.param.value  # it may have been loaded since the last update
        with leaf.param.writing() as weights:
            weights[...], average[...] = average.copy(), weights.copy()
    _replace(opt, leaves, lambda leaf: {"swapped": swapped})


def _replace(opt: OptimiserState, leaves: Iterable[Leaf], new: Any) -> None:
    """Changes hyperparameters of the last rule; leaves that were alike stay so."""
    made: dict[Any, tuple[Rule, ...]] = {}
    for leaf in leaves:
        changed = new(leaf)
        key = id(leaf.rules), tuple(changed.items())
        if key not in made:
            made[key] = (*leaf.rules[:-1], leaf.rules[-1].with_(**changed))
        leaf.rules = made[key]
    whole(opt)._plan = None
