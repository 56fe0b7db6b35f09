"""`Advance`: the steps of a pool's streams, in as few calls of the kernels as they allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from recur._kernels import SlotStepper
from recur.errors import ShapeError
from recur.streaming.blocks import CHUNK, Blocks, Places
from recur.streaming.plan import Plan
from recur.streaming.stages import Scratch


class Advance:
    """Steps the states of a plan that lie in blocks."""

    def __init__(self, plan: Plan, blocks: Blocks) -> None:
        self.blocks = blocks
        self._gathered: list[np.ndarray] = []
        self._follow(plan)
        self._tried = True

    def _follow(self, plan: Plan) -> None:
        self.plan = plan
        self._scratch: Scratch = {}
        # Whether a step may be one call.  Once it is not, nobody looks again: that costs a step.
        self._is_chain = plan.sealed and not plan.computed
        self._tried = False  # whether answers of the plan have been found to fit in

    def look(self) -> Plan:
        """The plan of the model as it is now.  Raises `StateError` as `Plan.current`."""
        plan = self.plan.current()
        if plan is not self.plan:
            self._follow(plan)
        return plan

    def at_once(
        self,
        places: Places,
        X: Any,
        clock: Callable[[], float],
        digest: Any,
        out: np.ndarray | None,
    ) -> np.ndarray | None:
        """The step and its notes in one call: answers (n_out, N), new or `out`.

        None, and nothing has changed, if it takes more.
        """
        stepper = self.blocks.stepper
        if stepper is None and not self._is_chain:
            return None
        if stepper is None or not stepper.fresh:
            self.look()
            stepper = self.blocks.stepper = self._new_stepper()
            if stepper is None:
                return None
        return stepper.step(places.index, X, clock, digest, out)

    def _new_stepper(self) -> SlotStepper | None:
        """Steps states where they are, if the model is a chain of kernels and has answered yet."""
        plan = self.plan
        known = self.blocks.columns.get("answer")
        if not self._is_chain or known is None:
            return None
        kernels, watch = plan.root.kernels(), plan.counters()
        layers = [k for k in kernels or () if not isinstance(k, str)]
        self._is_chain = bool(layers) and all(k.dtype == plan.dtype for k in layers)
        if not kernels or not self._is_chain or known != ((layers[-1].n_out,), plan.dtype):
            return None
        stepper = self.blocks.stepper_of(kernels, len(plan.parts), watch=watch, named=plan.named)
        self._gathered = []
        return stepper if plan.still(kernels) else None

    def answers(self, places: Places, rows: np.ndarray) -> np.ndarray:
        """One step of any streams: answers (N, n_out), new.

        States that lie one after the other are stepped where they are, others are gathered and
        scattered by the kernels.
        """
        n = places.count
        if n <= CHUNK or not self.plan.sealed:
            return self._chunk(places, rows).copy()
        answers = None
        for start in range(0, n, CHUNK):
            some = slice(start, start + CHUNK)
            y = self._chunk(self.blocks.part(places, some), rows[some])
            if answers is None:
                answers = np.empty((n, *y.shape[1:]), y.dtype)
            answers[some] = y
        assert answers is not None
        return answers

    def _chunk(self, places: Places, rows: np.ndarray) -> np.ndarray:
        """Answers to one call of the kernels; they may be a part of the state or of the scratch."""
        block, span = places.block, places.rows
        if block is not None and self.plan.sealed and self._tried:
            state = [block[i][span] for i in range(len(self.plan.parts))]
            return self.plan.step(rows, state, self._scratch)
        state = self._gather(places)
        answers = self.plan.step(rows, state, self._scratch)
        self.check_answer(answers.shape[1:], answers.dtype)
        for i, part in enumerate(state):
            self.blocks.put(i, places, part)
        self._tried = True
        return answers

    def check_answer(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Raises `ShapeError` unless an answer is like those that there is memory for."""
        known = self.blocks.columns.get("answer")
        if known is not None and known != (shape, dtype):
            raise ShapeError(
                f"StreamPool({self.plan.title}): the model's answer is {dtype} of shape {shape}, "
                f"expected {known[1]} of shape {known[0]}: answers of one pool have one shape. "
                "Open another pool for it. Nothing was changed."
            )

    def _gather(self, places: Places) -> list[np.ndarray]:
        n = places.count
        if not self._gathered or len(self._gathered[0]) < n:
            self._gathered = self.plan.empty(n)
        state = [part[:n] for part in self._gathered]
        for i, part in enumerate(state):
            self.blocks.get(i, places, part)
        return state
