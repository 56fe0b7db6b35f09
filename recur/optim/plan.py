"""How an update runs: which parameters go together, in blocks that fit the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from types import EllipsisType
from typing import Any

import numpy as np

from recur._kernels import new_vector
from recur.errors import ShapeError, StateError
from recur.optim.fused import fused
from recur.optim.rules import ClipNorm, Rule, State
from recur.tape import Param

# A rule passes over its arrays several times: blocks of this size stay in a core's own cache
# between the passes, and their temporaries are recycled by the allocator.
_BLOCK_BYTES = 1 << 17


class Leaf:
    """One parameter with its rules and their state.

    rules   the flattened chain; leaves that are alike share one tuple
    states  the state of each rule
    count   updates of this parameter so far
    """

    __slots__ = ("count", "frozen", "param", "path", "rules", "states")

    def __init__(self, path: str, param: Param, rules: tuple[Rule, ...]) -> None:
        self.path = path
        self.param = param
        self.rules = rules
        self.states = [_started(rule, path, param) for rule in rules]
        self.count = 0
        self.frozen = False

    def saved(self) -> dict[str, Any]:
        hyperparameters = [
            {name: number for name, number in rule.hyperparameters().items() if _is_data(number)}
            for rule in self.rules
        ]
        states = [
            {k: np.array(v, order="K") if isinstance(v, np.ndarray) else v for k, v in s.items()}
            for s in self.states
        ]
        return {
            "count": self.count,
            "frozen": self.frozen,
            "hyperparameters": hyperparameters,
            "state": states,
        }

    def check(self, saved: Mapping[str, Any]) -> None:
        for mine, theirs in zip(self.states, saved["state"], strict=True):
            if mine.keys() != theirs.keys():
                raise StateError(
                    f"load_state_dict: {self.path} has the states {', '.join(mine)}, the saved one "
                    f"{', '.join(theirs)}. Nothing was changed."
                )
            for name, array in mine.items():
                if np.shape(array) != np.shape(theirs[name]):
                    raise ShapeError(
                        f"load_state_dict: {name} of {self.path} has shape {np.shape(array)}, the "
                        f"saved one {np.shape(theirs[name])}. Nothing was changed. Build the "
                        "model as it was when it was saved."
                    )

    def load(self, saved: Mapping[str, Any]) -> None:
        self.count, self.frozen = int(saved["count"]), bool(saved["frozen"])
        self.rules = tuple(
            rule.with_(**{name: v for name, v in new.items() if name in rule.hyperparameters()})
            for rule, new in zip(self.rules, saved["hyperparameters"], strict=True)
        )
        for mine, theirs in zip(self.states, saved["state"], strict=True):
            for name, array in mine.items():
                if isinstance(array, np.ndarray):
                    mine[name] = np.array(theirs[name], array.dtype, order="K")
                else:
                    mine[name] = type(array)(theirs[name])


def _started(rule: Rule, path: str, param: Param) -> State:
    state = rule.init(param.value)
    if rule.elementwise and any(np.shape(array) != param.shape for array in state.values()):
        raise ShapeError(
            f"{type(rule).__name__}: the state of {path} must be arrays of its shape {param.shape} "
            "and nothing else, as the rule is elementwise. Numbers belong to rules that are not."
        )
    return state


def _is_data(number: Any) -> bool:
    """Whether a hyperparameter is plain data, not a schedule."""
    if isinstance(number, tuple):
        return all(map(_is_data, number))
    return isinstance(number, (bool, int, float, str)) or number is None


class Plan:
    """The segments in which a list of leaves is updated."""

    def __init__(self, leaves: list[Leaf]) -> None:
        self.leaves = leaves
        self.segments = [Segment(run) for run in _runs(leaves)]
        self.stages = _stages(leaves[0].rules)

    def serves(self, leaves: list[Leaf]) -> bool:
        """Whether the plan was made for these leaves, and their memory is where it was."""
        return self.leaves == leaves and all(segment.in_place() for segment in self.segments)

    def run(self, grads: Sequence[np.ndarray], step: int) -> None:
        """One update of every leaf, `step` being the number of those before."""
        at_step: dict[int, tuple[Rule, ...]] = {}
        given = iter(grads)
        for segment in self.segments:
            rules = at_step.get(id(segment.rules))
            if rules is None:
                rules = tuple(rule.at(step) for rule in segment.rules)
                at_step[id(segment.rules)] = rules
            segment.begin([next(given) for _ in segment.leaves], rules)
        for stage in self.stages[:-1]:
            self._clip(stage)
            for segment in self.segments:
                segment.transform(stage)
        self._clip(self.stages[-1])
        for segment in self.segments:
            segment.finish(self.stages[-1])

    def _clip(self, stage: range) -> None:
        """Brings in the ClipNorm that opens a stage: its norm is over all parameters."""
        if not _opens(self.segments[0].rules, stage):
            return
        clip = self.segments[0].at_step[stage.start]
        assert isinstance(clip, ClipNorm)
        parts = [part for segment in self.segments for part in segment.parts()]
        norm = clip.norm(parts)
        try:
            for segment in self.segments:
                segment.factor = segment.at_step[stage.start].factor(norm)  # type: ignore[attr-defined]
        except FloatingPointError as error:
            odd = [
                leaf.path
                for leaf, part in zip(self.leaves, parts, strict=True)
                if not np.isfinite(part).all()
            ]
            raise FloatingPointError(f"{error} Not finite: {', '.join(odd[:5])}.") from None


def _runs(leaves: list[Leaf]) -> Iterator[list[Leaf]]:
    """Neighbours in one flat buffer that may be updated as one array."""
    run = leaves[:1]
    for before, leaf in pairwise(leaves):
        if _adjoin(before, leaf):
            run.append(leaf)
        else:
            yield run
            run = [leaf]
    yield run


def _adjoin(before: Leaf, leaf: Leaf) -> bool:
    flat = before.param.flat_buffer
    return (
        flat is not None
        and flat is leaf.param.flat_buffer
        and before.rules is leaf.rules
        and before.count == leaf.count
        and all(rule.elementwise for rule in leaf.rules)
        and _address(leaf.param.value) == _address(before.param.value) + before.param.nbytes
    )


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _stages(rules: tuple[Rule, ...]) -> list[range]:
    """The chain cut before every rule that needs to see all parameters at once."""
    cuts = [i for i, rule in enumerate(rules) if _is_global(rule) and i > 0]
    return [range(a, b) for a, b in pairwise([0, *cuts, len(rules)])]


def _is_global(rule: Rule) -> bool:
    return isinstance(rule, ClipNorm) and not rule.per_array


def _opens(rules: tuple[Rule, ...], stage: range) -> bool:
    return bool(stage) and _is_global(rules[stage.start])


class Segment:
    """One or more leaves whose memory is updated as one array.

    Elementwise rules see that memory as a vector and take it block by block; other rules see the
    one parameter as it is.
    """

    def __init__(self, leaves: list[Leaf]) -> None:
        self.leaves = leaves
        self.rules = leaves[0].rules
        self.at_step = self.rules
        self.factor = 1.0
        self.views = [leaf.param.value for leaf in leaves]
        ends = np.cumsum([0, *(leaf.param.size for leaf in leaves)]).tolist()
        self.spans = [slice(a, b) for a, b in pairwise(ends)]
        self.size = ends[-1]
        self.flat = leaves[0].param.flat_buffer
        self.as_vector = all(rule.elementwise for rule in self.rules)
        self.states: list[State] = []  # vectors, if `as_vector`
        self.blocks = list(self._blocks())
        self.g: np.ndarray = self.views[0]
        self.gathered: np.ndarray | None = None
        self.made: np.ndarray | None = None

    def _blocks(self) -> Iterator[tuple[slice | EllipsisType, np.ndarray, list[State]]]:
        """(place in the segment, parameters, states) of each block."""
        if not self.as_vector:
            yield ..., self.views[0], self.leaves[0].states
            return
        x = self._vector(self.views)
        x.flags.writeable = False
        states = self.states = self._vector_states()
        length = _BLOCK_BYTES // x.itemsize
        for start in range(0, self.size, length):
            place = slice(start, min(start + length, self.size))
            yield place, x[place], [{k: v[place] for k, v in s.items()} for s in states]

    def _vector_states(self) -> list[State]:
        """The states of all leaves as vectors; the leaves' own become views of them."""
        vectors: list[State] = []
        for i, state in enumerate(self.leaves[0].states):
            vectors.append({name: new_vector(self.size, self.views[0].dtype) for name in state})
            for name, vector in vectors[-1].items():
                for leaf, span in zip(self.leaves, self.spans, strict=True):
                    view = _shaped(vector[span], leaf.param.value)
                    view[...] = leaf.states[i][name]
                    leaf.states[i][name] = view
        return vectors

    def in_place(self) -> bool:
        return all(
            leaf.param.value is view for leaf, view in zip(self.leaves, self.views, strict=True)
        )

    @contextmanager
    def writing(self) -> Iterator[np.ndarray]:
        """Yields the memory of all leaves as one array; each counts as changed."""
        with ExitStack() as stack:
            if self.as_vector and self.flat is not None and self.flat.array.size == self.size:
                stack.enter_context(self.flat.writing())
                yield self._vector(self.views)
                return
            arrays = [stack.enter_context(leaf.param.writing()) for leaf in self.leaves]
            yield self._vector(arrays) if self.as_vector else arrays[0]

    def _vector(self, arrays: list[np.ndarray]) -> np.ndarray:
        """The memory of all leaves as one vector, `arrays` being their own."""
        if self.flat is None:
            return _vector(arrays[0])
        whole = self.flat.array.reshape(-1)
        start = (_address(arrays[0]) - _address(whole)) // whole.itemsize
        return whole[start : start + self.size]

    def begin(self, grads: list[np.ndarray], at_step: tuple[Rule, ...]) -> None:
        self.at_step, self.factor = at_step, 1.0
        if not self.as_vector:
            self.g = grads[0]
        elif len(grads) == 1 and _same_layout(grads[0], self.views[0]):
            self.g = _vector(grads[0])
        else:
            flat = self._as_flat(grads)
            self.g = self._gather(grads) if flat is None else flat

    def _as_flat(self, grads: list[np.ndarray]) -> np.ndarray | None:
        """The gradients as one vector, if they already lie in memory as the parameters do."""
        base = grads[0].base
        if (
            base is None
            or base.ndim != 1
            or base.dtype != self.views[0].dtype
            or any(g.base is not base for g in grads)
            or not all(map(_same_layout, grads, self.views))
        ):
            return None
        start = _address(grads[0])
        if any(
            _address(g) != start + span.start * base.itemsize
            for g, span in zip(grads, self.spans, strict=True)
        ):
            return None
        first = (start - _address(base)) // base.itemsize
        return base[first : first + self.size]

    def _gather(self, grads: list[np.ndarray]) -> np.ndarray:
        if self.gathered is None:
            self.gathered = new_vector(self.size, self.views[0].dtype)
        for grad, span, view in zip(grads, self.spans, self.views, strict=True):
            _shaped(self.gathered[span], view)[...] = grad
        return self.gathered

    def parts(self) -> Iterator[np.ndarray]:
        """The gradient of each leaf, in the order of the leaf's memory."""
        if not self.as_vector:
            yield self.g.astype(self.views[0].dtype).reshape(-1)
        else:
            yield from (self.g[span] for span in self.spans)

    def transform(self, stage: range) -> None:
        """Replaces the gradient by what the rules of a stage make of it."""
        if self.made is None:
            self.made = np.empty_like(self.g, dtype=self.views[0].dtype)
        for place, dx in self._steps(stage):
            self.made[place] = dx
        self.g, self.factor = self.made, 1.0

    def finish(self, stage: range) -> None:
        """Runs the last stage and subtracts its step from the parameters."""
        with self.writing() as x:
            if not self._in_one_pass(stage, x):
                for place, dx in self._steps(stage):
                    block = x[place]
                    block -= dx
        for leaf in self.leaves:
            leaf.count += 1
        self.g = self.views[0]  # lets go of the gradient

    def _in_one_pass(self, stage: range, x: np.ndarray) -> bool:
        """Runs the last stage on x, if it is one rule that a kernel knows."""
        rules = self._own_rules(stage)
        update = None
        if len(rules) == 1 and self.as_vector and self.g.dtype == x.dtype and self.g.flags.aligned:
            update = fused(self.at_step[rules[0]], x.dtype)
        if update is None:
            return False
        update(self.states[rules[0]], x, self.g, self.leaves[0].count + 1, self.factor)
        return True

    def _own_rules(self, stage: range) -> range:
        """The rules of a stage without the ClipNorm that opens it, which is in `factor`."""
        return stage[1:] if _opens(self.rules, stage) else stage

    def _steps(self, stage: range) -> Iterator[tuple[slice | EllipsisType, np.ndarray]]:
        t = self.leaves[0].count + 1
        dtype = self.views[0].dtype
        for place, x, states in self.blocks:
            dx = self.g[place].astype(dtype)
            if self.factor != 1.0:
                dx *= self.factor
            for i in self._own_rules(stage):
                dx = self.at_step[i].apply(states[i], x, dx, t)
            yield place, dx


def _vector(array: np.ndarray) -> np.ndarray:
    """A contiguous array as a vector, in the order of its memory."""
    return array.reshape(-1) if array.flags.c_contiguous else array.T.reshape(-1)


def _shaped(vector: np.ndarray, like: np.ndarray) -> np.ndarray:
    """A vector as an array with the shape and memory order of `like`."""
    if like.flags.c_contiguous:
        return vector.reshape(like.shape)
    return vector.reshape(like.shape[::-1]).T


def _same_layout(a: np.ndarray, b: np.ndarray) -> bool:
    return a.strides == b.strides and a.dtype == b.dtype
