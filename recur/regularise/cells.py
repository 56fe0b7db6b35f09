"""Cells that drop a part of each step: zoneout, and recurrent dropout without memory loss."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np

from recur import ops
from recur.cells import Cell, GRUCell, KernelCell, LSTMCell
from recur.errors import StateError
from recur.layers.dropout import probability
from recur.module import child_generator, is_active, journal, label, register
from recur.regularise.masks import WindowMasks, drawn, scaled

State = tuple[Any, ...]


@register("Zoneout")
class Zoneout(Cell):
    """h' = z * h + (1 - z) * cell(h, x), each entry of z is 1 with probability p, drawn anew at
    every step; for an LSTM likewise c (Krueger et al. 2017).

        Recur(Zoneout(LSTMCell(3, 5), h=0.05, c=0.5))

    cell   any `Cell` whose output is the first part of its state; all parts are computed by it from
           the old state, before any of them is held back
    rates  p for the parts of the state, by name; those not named are never held back

    Inactive, z is its expectation p.  Masks (n, B) come step by step from the cell's own
    `generator`, so a sequence gets the masks that its steps would get.  `active` is None (on inside
    a scope), True or False.  Raises `ValueError` for p outside [0, 1], `StateError` for a part that
    the state does not have.
    """

    def __init__(
        self,
        cell: Cell,
        *,
        active: bool | None = None,
        rng: np.random.Generator | None = None,
        **rates: float,
    ) -> None:
        if not isinstance(cell, Cell):
            raise TypeError(f"Zoneout: the cell is a {type(cell).__name__}, expected a Cell.")
        for name in rates:
            if name not in cell.state_names:
                raise StateError(
                    f"Zoneout: the state of {label(cell)} has no part {name!r}, its parts are "
                    f"{', '.join(cell.state_names)}."
                )
        self.cell = cell
        self.rates = {
            name: probability(f"Zoneout: {name}", rates.get(name, 0.0)) for name in cell.state_names
        }
        self.active = active
        self.generator = child_generator(rng)
        self.n_in, self.n_out = cell.n_in, cell.n_out

    @property
    def dtype(self) -> np.dtype:
        return self.cell.dtype

    @property
    def title(self) -> str:
        return self.cell.title

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.cell.state_names

    @property
    def state_sizes(self) -> tuple[int, ...]:
        return self.cell.state_sizes

    @property
    def state_type(self) -> type[tuple] | None:  # type: ignore[override]
        """That of the cell."""
        return self.cell.state_type

    def equations(self, x: Any, *state: Any) -> tuple[State, Any]:
        new, _ = self.cell.run_step(x, state)
        active = is_active(self)
        mixed = tuple(
            self._mixed(p, before, after, active)
            for p, before, after in zip(self.rates.values(), state, new, strict=True)
        )
        return mixed, mixed[0]

    def _mixed(self, p: float, before: Any, after: Any, active: bool) -> Any:
        if p == 0:
            return after
        if not active:
            return p * before + (1 - p) * after
        bits = self.generator.bit_generator
        journal(self, partial(setattr, bits, "state", bits.state))
        return ops.where(drawn(self.generator, p, after.shape[::-1]).T, after, before)

    def parts(self) -> list[tuple[str, Any]]:
        return [("", self.cell)]

    def describe(self) -> str:
        rates = "".join(f", {name}={p:g}" for name, p in self.rates.items() if p)
        return f"Zoneout({label(self.cell)}{rates})"

    def config(self) -> dict[str, Any]:
        return {"cell": self.cell, "rates": self.rates, "active": self.active}

    @classmethod
    def from_config(cls, config: dict[str, Any], version: int) -> Zoneout:
        return cls(config["cell"], active=config["active"], **config["rates"])


Per = Literal["step", "window"]


class _CandidateDropout(WindowMasks, KernelCell):
    """What the cells with recurrent dropout share: when the candidate is dropped, and by what."""

    p: float
    per: Per

    def _set_dropout(self, p: float, per: Per) -> None:
        self.p = probability(f"{type(self).__name__}", p)
        if per not in ("step", "window"):
            raise ValueError(f"{type(self).__name__}: per is {per!r}, expected 'step' or 'window'.")
        self.per = per

    @property
    def _drops(self) -> bool:
        return self.p > 0 and is_active(self)

    def run_step(self, x: Any, state: State, layer: object = None) -> tuple[State, Any]:
        if self._drops:
            return Cell.run_step(self, x, state, layer)
        return super().run_step(x, state, layer)  # the kernel of the plain cell

    def run_sequence(
        self,
        X: Any,
        state: State,
        lengths: np.ndarray | None = None,
        remat: int | None = None,
        layer: object = None,
    ) -> tuple[State, Any]:
        if self._drops:
            return Cell.run_sequence(self, X, state, lengths, remat, layer)
        return super().run_sequence(X, state, lengths, remat, layer)

    def candidate(self, x: Any) -> Any:
        """tanh(x), while the layer is active dropped by the scope's mask."""
        n = ops.tanh(x)
        if not self._drops:
            return n
        shape = n.shape[::-1]
        if self.per == "step":
            bits = self.draw(self.p, shape)
        else:
            bits = self.mask_of(shape, lambda: self.draw(self.p, shape))
        return ops.multiply(n, scaled(bits, self.p, n.dtype).T)

    def describe(self) -> str:
        return f"{type(self).__name__}({self.n_in} => {self.n_out}, {self.p:g})"

    def config(self) -> dict[str, Any]:
        return super().config() | {"p": self.p, "per": self.per, "active": self.active}


@register("RecurrentDropoutLSTMCell")
class RecurrentDropoutLSTMCell(_CandidateDropout, LSTMCell):
    """c' = s(f) c + s(i) tanh(n) * mask / (1 - p), otherwise an `LSTMCell`: what is written is
    dropped, not what is remembered (Semeniuta, Severyn and Barth 2016, Recurrent dropout without
    memory loss).

    p    probability that an entry of the mask (n_out, B) is 0
    per  "step": a mask at every step; "window": one for all steps of a scope, as `LockedDropout`

    Inactive, it is the plain cell, kernel and all; active, steps run as separate operations.
    Masks come from `generator`, spawned from `rng`.  `active` is None (on inside a scope), True or
    False.  Weights, state and the other options are those of `LSTMCell`.
    """

    positional = ("n_in", "n_out", "p")

    def __init__(
        self,
        n_in: int,
        n_out: int,
        p: float,
        /,
        *,
        per: Per = "step",
        active: bool | None = None,
        rng: np.random.Generator | None = None,
        **options: Any,
    ) -> None:
        WindowMasks.__init__(self, active, rng)
        LSTMCell.__init__(self, n_in, n_out, rng=rng, **options)
        self._set_dropout(p, per)


@register("RecurrentDropoutGRUCell")
class RecurrentDropoutGRUCell(_CandidateDropout, GRUCell):
    """h' = (1 - z) n * mask / (1 - p) + z h, otherwise a `GRUCell` (Semeniuta, Severyn and Barth
    2016).

    p, per, active and rng as for `RecurrentDropoutLSTMCell`, the other options as for `GRUCell`.
    """

    positional = ("n_in", "n_out", "p")

    def __init__(
        self,
        n_in: int,
        n_out: int,
        p: float,
        /,
        *,
        per: Per = "step",
        active: bool | None = None,
        rng: np.random.Generator | None = None,
        **options: Any,
    ) -> None:
        WindowMasks.__init__(self, active, rng)
        GRUCell.__init__(self, n_in, n_out, rng=rng, **options)
        self._set_dropout(p, per)
