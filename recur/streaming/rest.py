"""Where a stream starts: zeros, the layers' initial states, or where an input leads to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from recur.errors import StateError
from recur.recurrent.state import map_tree
from recur.streaming.arguments import whole
from recur.streaming.plan import Plan
from recur.tape import peek, writes

Model = TypeVar("Model")


@dataclass(frozen=True)
class Settled:
    """The state to which a constant input leads: steps are taken until ‖Δs‖ < tol.

    x          (n_in,), or an index
    tol        on the largest change of any number of the state in one step
    max_steps  raises `StateError` if the state has not settled by then
    """

    x: Any
    tol: float = 1e-6
    max_steps: int = 100_000

    def __post_init__(self) -> None:
        tol = self.tol
        if not isinstance(tol, (int, float, np.integer, np.floating)) or not tol > 0:
            raise ValueError(f"Settled: tol is {tol!r}, expected a positive number.")
        whole("Settled", "max_steps", self.max_steps)


Rest: TypeAlias = Literal["learned", "zeros"] | Settled


class RestState:
    """The state at rest of a plan's streams, found anew when the model was changed."""

    def __init__(self, plan: Plan, rest: Rest) -> None:
        named = isinstance(rest, str) and rest in ("learned", "zeros")
        if not named and not isinstance(rest, Settled):
            raise ValueError(
                f"{plan.title}: rest is {rest!r}, expected 'learned', 'zeros' or Settled(x)."
            )
        self.plan = plan
        self.rest = rest
        self._settled: tuple[int, list[np.ndarray]] | None = None
        self.rows()

    def rows(self) -> list[np.ndarray]:
        """The parts of the state at rest, (1, size) each; not to be written."""
        plan = self.plan.current()
        if plan is not self.plan:
            self.plan, self._settled = plan, None
        if not isinstance(self.rest, Settled):
            return plan.rest(self.rest)
        if self._settled is None or self._settled[0] != writes.stamp:
            stamp = writes.stamp
            self._settled = stamp, settled(plan, self.rest)
        return self._settled[1]


def settled(plan: Plan, rest: Settled) -> list[np.ndarray]:
    """The state that `Settled` describes, (1, size) for each part."""
    x = plan.rows(rest.x, 1)
    state = plan.rest()
    change = np.inf
    for _ in range(rest.max_steps):
        before = [part.copy() for part in state]
        plan.step(x, state, {})
        changes = [np.abs(a - b).max() for a, b in zip(state, before, strict=True)]
        change = float(max(changes, default=0.0))
        if change < rest.tol:
            return state
    raise StateError(
        f"{plan.title}: the state has not settled: after {rest.max_steps} steps it still moves by "
        f"{change:.3g}, expected less than tol={rest.tol:g}. Nothing was changed."
    )


def settle(model: Model, x: Any, *, tol: float = 1e-6, max_steps: int = 100_000) -> Model:
    """Makes the state to which a constant input leads every layer's initial state; returns model.

    `recur.save` keeps it with the model, `reset` goes there, and streams start there.  Arguments
    and errors as for `Settled`; a learned initial state is written.
    """
    plan = Plan(model)
    columns = plan.columns(settled(plan, Settled(x, tol, max_steps)))
    for path, layer in plan.layers.items():
        layer.init = map_tree(
            lambda new, old: np.reshape(new, np.shape(peek(old))), columns[path], layer.init
        )
    return model
