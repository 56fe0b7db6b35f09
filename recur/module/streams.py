"""Single steps of one layer or several in one call of a `Stepper`, which holds their states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from recur import _kernels
from recur._kernels import Stepper, Version


class Stages(NamedTuple):
    """What does single steps of a layer outside a scope, bit for bit as its own call.

    kernels   for a `Stepper`: kernels of cells, affine kernels, names of activations
    counters  one moves when the kernels are no longer what the layer would do
    carriers  the layers whose states the kernels of cells have, in order
    named     dicts of layers, which may be changed in place, with what they held
    """

    kernels: tuple[Any, ...] = ()
    counters: tuple[Version, ...] = ()
    carriers: tuple[Carrier, ...] = ()
    named: tuple[tuple[dict[str, Any], list[Any]], ...] = ()

    @classmethod
    def joined(cls, parts: Iterable[Stages]) -> Stages:
        """The stages of layers one after the other."""
        return cls(*(sum(fields, ()) for fields in zip(cls(), *parts, strict=True)))

    def fit(self) -> bool:
        """Whether one Stepper can do them, and has a state to keep."""
        kernels = [kernel for kernel in self.kernels if not isinstance(kernel, str)]
        return (
            bool(self.carriers)
            and len(set(map(id, self.carriers))) == len(self.carriers)
            and not isinstance(self.kernels[0], str)
            and len({kernel.dtype for kernel in kernels}) == 1
        )


class Carrier(Protocol):
    """A layer whose state may lie in a stepper of several layers."""

    def batch(self) -> int | None:
        """The batch size of the state, None if it has none."""

    def hand_over(self, seat: Seat) -> bool:
        """Puts the state into a stepper; False, and nothing done, if it cannot now."""


class Live(_kernels.Live):
    """An object whose state may lie in a `Stepper`, its `_live`, which answers its calls then.

    A subclass marks its `__call__` by `layer_call` or `stream_call`.  It must be right by itself:
    what is called where the stepper gives no answer, or in a class that overrides it.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _kernels.answer_calls(cls)


class Seat:
    """Where one layer's state lies in a stepper of several layers, which alone steps it there."""

    __slots__ = ("_index", "_stepper")

    def __init__(self, stepper: Stepper, index: int) -> None:
        self._stepper = stepper
        self._index = index

    def take(self, state: Sequence[Any]) -> None:
        """Copies the parts (B, H) of the state in, which lies here from now on."""
        self._stepper.set_state(self._index, state)

    def take_states(self) -> tuple[tuple[Any, ...]]:
        """Gives the state back; waits for a step that is under way in another thread."""
        return (self._stepper.take_state(self._index),)

    @property
    def stepping(self) -> bool:
        """Whether a thread is in a step."""
        return self._stepper.stepping


def joint_stepper(stages: Stages, last: Stepper | None) -> Stepper | None:
    """A stepper that has taken over all states; None if a layer did not give its own.

    A layer takes its state back whenever that is read, written, or moved by a call of its own, and
    the stepper steps no more.  `last` is an earlier one, which is used again if it fits.
    """
    batch = stages.carriers[0].batch()
    if batch is None or any(carrier.batch() != batch for carrier in stages.carriers):
        return None
    stepper = last
    if (
        stepper is None
        or not (stepper.empty and stepper.fresh)
        or stepper.batch != batch
        or stepper.kernels != stages.kernels
    ):
        stepper = Stepper(stages.kernels, batch, watch=stages.counters, named=stages.named)
    for index, carrier in enumerate(stages.carriers):
        if not carrier.hand_over(Seat(stepper, index)):
            return None
    return stepper
