"""Truncated back-propagation through time in sliding windows."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from recur import ops
from recur.errors import ShapeError
from recur.gradients import withgradient
from recur.module import generators, modules
from recur.recurrent.control import layers_of
from recur.recurrent.recur import Recur
from recur.recurrent.walk import Options
from recur.tape import current, peek, value

Inject = Literal["window", "last", "all"]


def tbptt(
    model: Callable[..., Any],
    xs: Any,
    loss: Callable[[Any, int], Any],
    *,
    k1: int,
    k2: int,
    inject: Inject = "window",
    lengths: Any = None,
    mask: Any = None,
) -> Iterator[tuple[Any, Any]]:
    """`for L, grads in tbptt(model, xs, loss, k1=, k2=)`: after every k1 steps, and at the end, the
    gradient of a loss over the last k2 steps (Williams and Peng 1990, Neural Computation 2).

    model  called on parts of xs, as they are cut by time
    xs     a sequence (n_in, B, T), or a list of T steps
    loss   `loss(ys, t)`: ys are outputs in the form of xs, t the number of steps done, from 1
    k1     steps from one loss to the next
    k2     steps that gradient goes back: the states entering step t - k2 + 1 are constants, and
           outputs from before it are values
    inject which outputs a loss gets: "window", those since the last loss (each output counts once;
           k1 = k2 is a loop with truncate every k steps); "last", the one of step t; "all", those
           of all k2 steps (each counts k2 / k1 times, as in a loop of backward on a kept graph)
    lengths, mask  as for `Recur`, over the whole of xs

    L and grads are those of `withgradient(loss, model)`.  Nothing is updated and no scope is open
    between them: update weights there, at will.  Each window is run once, with the weights as they
    then are, from the state stored by the last run over that place; so the memory is that of k2
    steps, and the work that of one run over k2 steps (or over k1, if that is more) for each loss.
    Masks and other random numbers last for the whole run, step by step; after `resample(model)` new
    steps get new ones.  No window reaches back over a `reset`, or over a state that was assigned.
    After a loss the states are those after step t, as values, also if the loop is left.

    Raises `ValueError`, `ShapeError` for arguments, before the first step.
    """
    for name, k in (("k1", k1), ("k2", k2)):
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
            raise ValueError(f"tbptt: {name} is {k!r}, expected a positive integer.")
    if inject not in ("window", "last", "all"):
        raise ValueError(f"tbptt: inject is {inject!r}, expected 'window', 'last' or 'all'.")
    steps = _Steps(model, xs, lengths, mask)
    return _Run(model, steps, loss, int(k1), int(k2), inject).losses()


class _Steps:
    """xs as something that can be cut by time, and the model's outputs for parts of it."""

    def __init__(self, model: Callable[..., Any], xs: Any, lengths: Any, mask: Any) -> None:
        self.model = model
        self.as_list = isinstance(xs, (list, tuple))
        layouts = {layer.layout for layer in layers_of(model).values()}
        if len(layouts) > 1:
            raise ValueError("tbptt: the model's layers have several layouts, expected one.")
        self.time = 1 if layouts == {"ftb"} else -1
        self.xs = xs
        if self.as_list:
            self.T = len(xs)
            batch = self.T and (*np.shape(peek(xs[0])), 1, 1)[1]
        else:
            shape = np.shape(peek(xs))
            if len(shape) != 3:
                raise ShapeError(
                    f"tbptt: xs has shape {shape}, expected a sequence (features, batch, time) or "
                    "a list of steps."
                )
            self.T = shape[self.time]
            batch = shape[1 if self.time == -1 else 2]
        options = Options(lengths, mask)
        options.check("tbptt")
        self.alive = options.alive("tbptt", batch, self.T)

    def outputs(self, model: Callable[..., Any], start: int, stop: int) -> Any:
        """The model's outputs for the steps [start, stop)."""
        options = {} if self.alive is None else {"mask": self.alive[:, start:stop]}
        return model(self.cut(self.xs, start, stop), **options)

    def cut(self, ys: Any, start: int, stop: int | None = None) -> Any:
        """Steps [start, stop) of a list or an array in the form of xs."""
        span = slice(start, stop)
        if self.as_list:
            return ys[span]
        return ys[:, span] if self.time == 1 else ys[..., span]

    def joined(self, parts: Sequence[Any]) -> Any:
        """Consecutive parts as one."""
        if self.as_list:
            return [y for part in parts for y in part]
        return parts[0] if len(parts) == 1 else ops.concatenate(parts, axis=self.time)


class _Chance:
    """What random and statistics layers hold, so that a step can be run again as it was."""

    def __init__(self, model: Any) -> None:
        self.generators = [
            (generator, copy.deepcopy(generator.bit_generator.state))
            for generator in generators(model).values()
        ]
        layers: list[Any] = [x for _, x in modules(model) if not isinstance(x, Recur)]
        # Layers that keep a mask for a window give and take it by these two methods.
        self.masks = [
            (layer, dict(layer.held_masks())) for layer in layers if hasattr(layer, "held_masks")
        ]
        self.buffers = [
            (array, array.copy()) for layer in layers for array in layer.buffers().values()
        ]

    def put_back(self) -> None:
        for generator, state in self.generators:
            generator.bit_generator.state = state
        for layer, masks in self.masks:
            layer.hold_masks(masks)
        for array, old in self.buffers:
            array[...] = old

    def same_draws(self, other: _Chance) -> bool:
        """Whether the next random numbers are the same, and so are the masks kept."""
        return all(
            _equal(a, b) for (_, a), (_, b) in zip(self.generators, other.generators, strict=True)
        ) and all(
            a.keys() == b.keys() and all(a[name] is b[name] for name in a)
            for (_, a), (_, b) in zip(self.masks, other.masks, strict=True)
        )


def _equal(a: Any, b: Any) -> bool:
    """Whether two states of a bit generator are the same."""
    if isinstance(a, dict):
        return all(_equal(a[key], b[key]) for key in a)
    return bool(np.all(a == b))


class _Place:
    """Everything from which the model can be run again at one step."""

    def __init__(self, model: Any, layers: Sequence[Recur]) -> None:
        self.states = [(layer, layer.plain_state()) for layer in layers]
        self.chance = _Chance(model)

    def put_back(self) -> None:
        for layer, state in self.states:
            layer.put(state)
        self.chance.put_back()


class _Run:
    """One walk over xs."""

    def __init__(
        self,
        model: Any,
        steps: _Steps,
        loss: Callable[[Any, int], Any],
        k1: int,
        k2: int,
        inject: Inject,
    ) -> None:
        self.model = model
        self.steps = steps
        self.loss = loss
        self.k1, self.k2 = k1, k2
        self.inject = inject
        self.floor = 0  # no window reaches back beyond this many steps
        self.place: tuple[int, _Place] | None = None  # where the next window begins
        self.redrawn: dict[int, _Chance] = {}  # where random layers were told to draw anew
        self.serial: int | None = None

    def losses(self) -> Iterator[tuple[Any, Any]]:
        done = 0
        while done < self.steps.T:
            t = min(done + self.k1, self.steps.T)
            layers = list(layers_of(self.model).values())
            first = max(self.floor, t - self.k2)
            if first < done:
                assert self.place is not None and self.place[0] == first
                self.place[1].put_back()
            result = withgradient(
                lambda model, done=done, first=first, t=t, layers=layers: self._window(
                    model, layers, done, first, t
                ),
                self.model,
            )
            left, chance = [layer.plain_state() for layer in layers], _Chance(self.model)
            yield result
            self._notice_changes(t, layers, left, chance)
            done = t

    def _window(self, model: Any, layers: list[Recur], done: int, first: int, t: int) -> Any:
        """The loss at t, of a window that begins after `first` steps; `done` have been run."""
        tape: Any = current()
        if self.serial is None:
            self.serial = tape.serial
        tape.serial = self.serial  # the whole run is one scope for layers that keep a mask
        older = []
        for start in range(done, first, self.k2):
            ys = self.steps.outputs(model, start, min(start + self.k2, first))
            if self.inject == "window":
                older.append(value(ys))
            for layer in layers:
                layer.truncate()
        parts = self._recorded(model, layers, first, t)
        if self.inject == "window":
            ys = self.steps.joined([*older, *parts])
            ys = self.steps.cut(ys, max(0, done - first))
        else:
            ys = self.steps.joined(parts)
            ys = ys if self.inject == "all" else self.steps.cut(ys, t - first - 1)
        return self.loss(ys, t)

    def _recorded(self, model: Any, layers: list[Recur], first: int, t: int) -> list[Any]:
        """Outputs of the steps [first, t), in parts; on the way the next window's start is kept."""
        following = max(self.floor, min(t + self.k1, self.steps.T) - self.k2)
        stops = {step for step in (following, *self.redrawn) if first < step < t}
        bounds = [first, *sorted(stops), t]
        place = None
        parts = []
        for start, stop in itertools.pairwise(bounds):
            if start in self.redrawn:
                self.redrawn[start].put_back()
            if start == following:
                place = (start, _Place(model, layers))
            parts.append(self.steps.outputs(model, start, stop))
        self.place = place
        self.redrawn = {step: chance for step, chance in self.redrawn.items() if step > following}
        return parts

    def _notice_changes(
        self, t: int, layers: list[Recur], left: list[Any], chance: _Chance
    ) -> None:
        """What the caller did between two losses: a new state, or new random numbers."""
        if any(layer.plain_state() is not state for layer, state in zip(layers, left, strict=True)):
            self.floor = t
        now = _Chance(self.model)
        if not now.same_draws(chance):
            self.redrawn[t] = now
