"""`Stream`: single steps of several layers in one call, which holds their states meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from recur._kernels import Stepper, Version
from recur.errors import StateError


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
    """A layer whose state may lie in a stream."""

    def batch(self) -> int | None:
        """The batch size of the state, None if it has none."""

    def hand_over(self, seat: Seat) -> bool:
        """Puts the state into a stream; False, and nothing done, if it cannot now."""


class Stream:
    """A `Stepper` that steps layers one after the other, as long as it has all of their states.

    A layer takes its state back whenever that is read, written, or moved by a call of its own.
    `step` then leaves the call to the layers.
    """

    __slots__ = ("_lock", "_named", "_seats", "_stepper", "_stepping", "_taken")

    def __init__(self, stepper: Stepper, stages: Stages) -> None:
        self._stepper = stepper
        self._named = stages.named
        self._lock = threading.Lock()
        self._stepping = False
        self._seats = len(stages.carriers)
        self._taken = 0  # how many of them hold a state

    @classmethod
    def begin(cls, stages: Stages, last: Stream | None) -> Stream | None:
        """A stream that has taken over all states; None if a layer did not give its own.

        `last` is an earlier stream, whose memory is used again if it fits.
        """
        batch = stages.carriers[0].batch()
        if batch is None or any(carrier.batch() != batch for carrier in stages.carriers):
            return None
        stepper = None if last is None else last._unused(stages.kernels, batch)
        stream = cls(stepper or Stepper(stages.kernels, batch, watch=stages.counters), stages)
        for index, carrier in enumerate(stages.carriers):
            if not carrier.hand_over(Seat(stream, index)):
                return None
        return stream

    def _unused(self, kernels: tuple[Any, ...], batch: int) -> Stepper | None:
        """The stepper, if it fits and nobody's state lies in it."""
        stepper = self._stepper
        if self._taken or stepper.batch != batch or stepper.kernels != kernels:
            return None
        return stepper if stepper.fresh else None

    def step(self, x: Any) -> Any:
        """One step, or None: nothing has changed then, and the layers' own calls do it.

        Raises `StateError` while another thread's step is under way.
        """
        if not self._lock.acquire(False):
            if self._stepping:
                raise StateError(
                    "Chain: this model is inside a call already, of another thread; two calls at "
                    "once would mix up its states. Give each thread a copy: copy.deepcopy(model)."
                )
            return None
        self._stepping = True
        try:
            if self._taken != self._seats or (self._named and self._is_renamed()):
                return None
            return self._stepper(x)
        finally:
            self._stepping = False
            self._lock.release()

    def _is_renamed(self) -> bool:
        """Whether another layer stands under a name."""
        return any(list(now.values()) != held for now, held in self._named)


class Seat:
    """Where one layer's state lies in a stream; to the layer it looks like its own `Stepper`."""

    __slots__ = ("_index", "_stream", "_taken")

    def __init__(self, stream: Stream, index: int) -> None:
        self._stream = stream
        self._index = index
        self._taken = False

    def __call__(self, x: Any) -> None:
        """None: a step of the layer alone is no step of the stream."""

    def take(self, state: Sequence[Any]) -> None:
        """Copies the parts (B, H) of the state in, which lies here from now on."""
        with self._stream._lock:
            self._stream._stepper.set_state(self._index, state)
            self._stream._taken += 1
            self._taken = True

    def leave(self) -> tuple[tuple[Any, ...]]:
        """Gives the state back; waits for a step that is under way in another thread."""
        with self._stream._lock:
            if self._taken:
                self._stream._taken -= 1
                self._taken = False
            return (self._stream._stepper.state(self._index),)

    states = leave
