"""Reading a sequence from both ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from recur import ops
from recur.errors import ShapeError
from recur.module import Module, register, transaction
from recur.recurrent.recur import Recur
from recur.recurrent.walk import Options
from recur.tape import Operand, current, peek


def flip(f: Callable[[Any], Any], xs: Any) -> Any:
    """Applies `f` from the last step to the first and gives the results in the order of `xs`.

    A list or tuple: f is called on each element, the last one first; gives a list.
    An array (features, batch, time): f is called once, on the reversed sequence.
    """
    if isinstance(xs, (list, tuple)):
        return [f(x) for x in reversed(xs)][::-1]
    return reversed_time(f(reversed_time(xs)))


def reversed_time(x: Any, axis: int = -1) -> Any:
    """`x` with its steps in reverse: an array along `axis`, a list by its order."""
    if isinstance(x, (list, tuple)):
        return list(x)[::-1]
    x = x if isinstance(x, Operand) else np.asarray(x)
    return ops.flip(x, axis)


def backwards(
    layer: Recur, x: Any, time: int, mask: np.ndarray | None, options: dict[str, Any]
) -> Any:
    """What `layer` gives for the steps of x from the last to the first, in the order of x.

    Time and mask are flipped together, so padding never counts.
    """
    flipped = None if mask is None else mask[:, ::-1]
    tape = current()
    if tape is not None and tape.events is not None:
        tape.log("backwards", layer=layer)  # pictures turn its next call round
    y = layer(reversed_time(x, time), mask=flipped, **options)
    return reversed_time(y, time)


def check_sequence(layer: Module, x: Any, layout: str) -> int:
    """How many steps x has; raises `ShapeError` for a single step, which has no end to begin at."""
    if isinstance(x, (list, tuple)):
        return len(x)
    shape = np.shape(peek(x))
    if len(shape) != 3 and not (layout == "ftb" and len(shape) == 2):
        what = "a single step" if len(shape) < 3 else "no sequence"
        raise ShapeError(
            f"{layer!r}: x has shape {shape}, {what}; the layer that runs backwards needs "
            "the whole sequence, (features, batch, time) or a list of steps. Nothing was changed."
        )
    return shape[time_axis(layout)]


def real_steps(layer: Module, x: Any, steps: int, time: int, options: Options) -> np.ndarray | None:
    """The checked mask (B, T) of the steps that are no padding, None where all are real."""
    shape: tuple[int, ...]
    if isinstance(x, (list, tuple)):
        shape = np.shape(peek(x[0])) if x else ()
        batch = shape[1] if len(shape) == 2 else 1
    else:
        shape = np.shape(peek(x))
        batch = shape[1 if time == -1 else 2] if len(shape) == 3 else 1
    return options.alive(repr(layer), batch, steps)


def time_axis(layout: str) -> int:
    return 1 if layout == "ftb" else -1


@register("Reversed")
class Reversed(Module):
    """y = flip(layer, x): a recurrent layer that runs from the last step to the first.

    x, y, lengths=, mask=, truncate_every=, remat= and errors as for `Bidirectional`, of which it is
    the second half.
    """

    takes_lists = True

    def __init__(self, layer: Recur) -> None:
        if not isinstance(layer, Recur):
            raise TypeError(
                f"Reversed: the layer is a {type(layer).__name__}, expected a recurrent layer."
            )
        self.layer = layer

    def __call__(
        self,
        x: Any,
        *,
        lengths: Any = None,
        mask: Any = None,
        truncate_every: int | None = None,
        remat: int | None = None,
    ) -> Any:
        steps = check_sequence(self, x, self.layer.layout)
        time = time_axis(self.layer.layout)
        alive = real_steps(self, x, steps, time, Options(lengths, mask))
        options = {"truncate_every": truncate_every, "remat": remat}
        return backwards(self.layer, x, time, alive, options)

    def parts(self) -> list[tuple[str, Any]]:
        return [("", self.layer)]

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        return self.layer.output_shape(*shapes)

    def config(self) -> dict[str, Any]:
        return {"layer": self.layer}


@register("Bidirectional")
class Bidirectional(Module):
    """y_t = vcat(forward(x)_t, flip(backward, x)_t) (Schuster and Paliwal 1997).

    forward, backward  two recurrent layers with weights and states of their own
    x                  (n_in, B, T), or a list of steps; lengths=, mask=, truncate_every= and remat=
                       as for `Recur`: time and mask are flipped together, so padding never counts
    y                  (2 n_out, B, T), or a list; the rows of `forward` first

    Both states are carried from call to call, as two Recurs would; that means nothing for the layer
    that runs backwards, and is warned of once.  Raises `ShapeError` for a single step, and what its
    layers raise; both states then are what they were.
    """

    takes_lists = True

    def __init__(self, forward: Recur, backward: Recur) -> None:
        for name, layer in (("forward", forward), ("backward", backward)):
            if not isinstance(layer, Recur):
                raise TypeError(
                    f"Bidirectional: {name} is a {type(layer).__name__}, expected a recurrent "
                    "layer. Bidirectional.of(LSTM, 3, 5) makes both."
                )
        if forward is backward:
            raise ValueError(
                "Bidirectional: both directions are one layer, whose state would run into itself. "
                "Pass two layers; they may share a cell."
            )
        if forward.layout != backward.layout:
            raise ValueError(
                f"Bidirectional: the layouts differ, {forward.layout!r} and {backward.layout!r}."
            )
        self.forward = forward
        self.backward = backward
        self.warned = False

    @classmethod
    def of(cls, make: Callable[..., Recur], *args: Any, **options: Any) -> Bidirectional:
        """Two layers made alike: `Bidirectional.of(LSTM, 3, 5)`."""
        return cls(make(*args, **options), make(*args, **options))

    def __call__(
        self,
        x: Any,
        *,
        lengths: Any = None,
        mask: Any = None,
        truncate_every: int | None = None,
        remat: int | None = None,
    ) -> Any:
        layout = self.forward.layout
        steps, time = check_sequence(self, x, layout), time_axis(layout)
        self._warn_of_carried_state()
        options = {"truncate_every": truncate_every, "remat": remat}
        with transaction():
            ahead = self.forward(x, lengths=lengths, mask=mask, **options)
            alive = real_steps(self, x, steps, time, Options(lengths, mask))
            behind = backwards(self.backward, x, time, alive, options)
            if isinstance(x, (list, tuple)):
                return [ops.concatenate(pair) for pair in zip(ahead, behind, strict=True)]
            return ops.concatenate([ahead, behind])

    def _warn_of_carried_state(self) -> None:
        if self.warned or self.backward.at_start:
            return
        self.warned = True
        warnings.warn(
            f"{self!r}: the layer that runs backwards goes on from the state of the last call, "
            "which lies in the past and not in the future of this one. Call reset(model) before "
            "each sequence.",
            stacklevel=3,
        )

    def parts(self) -> list[tuple[str, Any]]:
        return [("", self.forward), ("", self.backward)]

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        ahead, behind = self.forward.output_shape(*shapes), self.backward.output_shape(*shapes)
        return (ahead[0] + behind[0], *ahead[1:])

    def config(self) -> dict[str, Any]:
        return {"forward": self.forward, "backward": self.backward}
