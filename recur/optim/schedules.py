"""Schedules: functions of the number of updates done so far, 0 at the first.

Any hyperparameter of a rule may be one, and so may any function of that number:
`Adam(Warmup(100, Cosine(1e-3, 1e-5, 10_000)))`, `Descent(lambda step: 0.1 / (1 + step))`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """The same value at every step."""

    value: float

    def __call__(self, step: int) -> float:
        return self.value


@dataclass(frozen=True)
class Step:
    """start * decay^n after n stages.

    every  the length of each stage; or a sequence of lengths, after the last of which it stays
    """

    start: float
    decay: float
    every: int | Sequence[int]

    def __post_init__(self) -> None:
        stages = [self.every] if isinstance(self.every, int) else list(self.every)
        if not stages or min(stages) < 1:
            raise ValueError(f"Step: every is {self.every}, expected lengths of at least 1 step.")
        if not isinstance(self.every, int):
            object.__setattr__(self, "every", tuple(stages))

    def __call__(self, step: int) -> float:
        if isinstance(self.every, int):
            return self.start * self.decay ** (step // self.every)
        return self.start * self.decay ** bisect_right(list(accumulate(self.every)), step)


@dataclass(frozen=True)
class Exp:
    """start * decay^step."""

    start: float
    decay: float

    def __call__(self, step: int) -> float:
        return self.start * self.decay**step


@dataclass(frozen=True)
class Cosine:
    """end + (start - end) (1 + cos(pi step / steps)) / 2, then end, or again if `restart`.

    Source: Loshchilov and Hutter, SGDR, 2017.
    """

    start: float
    end: float
    steps: int
    restart: bool = False

    def __post_init__(self) -> None:
        _check_steps(self, self.steps)

    def __call__(self, step: int) -> float:
        step = step % self.steps if self.restart else min(step, self.steps)
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * step / self.steps)) / 2


@dataclass(frozen=True)
class Warmup:
    """peak (step + 1) / steps for the first `steps` updates, then `then`, which starts at its 0.

    then  a number or a schedule; the peak is its first value
    """

    steps: int
    then: float | Schedule

    def __post_init__(self) -> None:
        _check_steps(self, self.steps)

    def __call__(self, step: int) -> float:
        after = self.then(max(step - self.steps, 0)) if callable(self.then) else self.then
        return after * min(1.0, (step + 1) / self.steps)


def _check_steps(schedule: object, steps: int) -> None:
    if steps < 1:
        raise ValueError(f"{type(schedule).__name__}: steps is {steps}, expected at least 1.")
