"""What a tape's log tells: the calls of recurrent layers, what hangs on what, and the losses."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Call:
    """One call of a recurrent layer: a step, or several steps of a sequence.

    column      where its first step stands in time, counted from 0
    steps       how many it took
    at_start    whether it began from `init`
    marks       what was called on the layer since its call before: "cut" and "reset", in order
    cuts        steps inside the call, counted from 0, before which history was cut
    learned     whether it began from a parameter, which may get gradient
    state_from  the recorded calls from which its state comes
    input_from  the recorded calls from which its input comes
    earlier     whether its state comes from a scope that has ended
    parts       the numbers of the operations inside it, a list for each part between two cuts
    reached     for each of these parts, whether the sweep of some loss passed through it
    backwards   whether its first step is the last in time, as in one half of a `Bidirectional`
    """

    layer: Any
    at_start: bool
    marks: list[str]
    state_seqs: list[int]
    steps: int = 0
    column: int = 0
    cuts: list[int] = field(default_factory=list)
    learned: bool = False
    state_from: list[Call] = field(default_factory=list)
    input_from: list[Call] = field(default_factory=list)
    earlier: bool = False
    backwards: bool = False
    parts: list[list[int]] = field(default_factory=lambda: [[]])
    reached: list[bool] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The column after all of its steps."""
        return self.column + self.steps

    def reached_at(self, column: int) -> bool:
        """Whether some loss reached the step in this column."""
        step = self.end - 1 - column if self.backwards else column - self.column
        return self.reached[bisect.bisect_right(self.cuts, step)]

    @property
    def cut_columns(self) -> list[int]:
        """Columns whose left edge is a cut."""
        return [self.end - cut if self.backwards else self.column + cut for cut in self.cuts]


@dataclass(eq=False)
class Loss:
    """One sweep: the calls whose outputs the loss is made of."""

    calls: list[Call]
    column: int


class History:
    """The log of one tape in the order of time.

    calls   by layer, in the order in which the layers were first called
    after   by layer, what was called on it after its last call: "cut" and "reset"
    losses  every loss that was swept
    columns how many steps there are side by side
    """

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        self.calls: dict[Any, list[Call]] = {}
        self.after: dict[Any, list[str]] = {}
        self.losses: list[Loss] = []
        self.columns = 0
        self._inputs: dict[int, list[int]] = {}  # of every recorded operation
        self._owners: dict[int, Call] = {}  # inside which call an operation ran
        self._open: list[Call] = []
        self._turned: Any = None  # the layer whose next call runs backwards
        swept: list[int] = []
        for event in events:
            if event["kind"] == "loss":
                self._add_loss(event["inputs"])
                swept += event["inputs"]
            else:
                self._add(event)
        reached = self._upstream(swept)
        for call in self.all_calls():
            call.reached = [not reached.isdisjoint(part) for part in call.parts]

    def all_calls(self) -> Iterator[Call]:
        """Every call, layer by layer."""
        for calls in self.calls.values():
            yield from calls

    def _add(self, event: dict[str, Any]) -> None:
        kind, layer = event["kind"], event["layer"]
        if kind == "enter":
            marks = self.after.pop(layer, [])
            call = Call(layer, event["at_start"], marks, event["inputs"])
            call.backwards = self._turned is layer
            self._turned = None
            self._open.append(call)
        elif kind == "backwards":
            self._turned = layer
        elif kind == "leave":
            self._leave(layer, event["steps"])
        elif kind == "cut" and "step" in event:
            self._open[-1].cuts.append(event["step"])
            self._open[-1].parts.append([])
        elif kind in ("cut", "reset"):
            self.after.setdefault(layer, []).append(kind)
        else:
            self._inputs[event["seq"]] = event["inputs"]
            if self._open:
                call = self._open[-1]
                call.parts[-1].append(event["seq"])
                call.learned |= kind == "start" and bool(event["params"])
                self._owners[event["seq"]] = call

    def _leave(self, layer: Any, steps: int) -> None:
        call = self._open.pop()
        while call.layer is not layer:  # a call that raised was never left
            call = self._open.pop()
        if not steps:
            self.after[layer] = call.marks + self.after.get(layer, [])
            return
        call.steps = steps
        call.state_from = self._calls_above(call.state_seqs, call)
        inside = itertools.chain.from_iterable(call.parts)
        above = self._calls_above((i for seq in inside for i in self._inputs[seq]), call)
        call.input_from = [other for other in above if other not in call.state_from]
        call.earlier = any(seq not in self._inputs and not call.at_start for seq in call.state_seqs)
        calls = self.calls.setdefault(layer, [])
        call.column = max(
            [calls[-1].end if calls else 0]
            + [other.column for other in call.input_from]
            + [other.end for other in call.state_from]
        )
        calls.append(call)
        self.columns = max(self.columns, call.end)

    def _add_loss(self, seqs: list[int]) -> None:
        calls = self._calls_above(seqs, None)
        columns = [call.end - 1 for call in calls] or [max(self.columns - 1, 0)]
        self.losses.append(Loss(calls, max(columns)))

    def _calls_above(self, seqs: Iterable[int], inside: Call | None) -> list[Call]:
        """The nearest calls upstream, each once; operations of no layer are looked through."""
        found: dict[int, Call] = {}
        seen: set[int] = set()
        pending = list(seqs)
        while pending:
            seq = pending.pop()
            if seq in seen or seq not in self._inputs:
                continue
            seen.add(seq)
            owner = self._owners.get(seq)
            if owner is None:
                pending += self._inputs[seq]
            elif owner is not inside:
                found[id(owner)] = owner
        return list(found.values())

    def _upstream(self, seqs: list[int]) -> set[int]:
        """All operations from which these were computed, themselves included."""
        seen: set[int] = set()
        pending = list(seqs)
        while pending:
            seq = pending.pop()
            if seq not in seen:
                seen.add(seq)
                pending += self._inputs.get(seq, ())
        return seen
