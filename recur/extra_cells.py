"""Cells of other papers, given by their equations: `Recur(MGUCell(3, 5))`.

Each is a `recur.cells.WeightedCell`, the class for cells of one's own: a table of shapes and the
equations of a step, in the operations of `recur.ops`.  That costs some twenty microseconds a step,
and some three hundred with its gradient, which a kernel cell does not pay: with 16 units and one
sample a step takes about twenty times as long as a GRU's, with 64 units and 16 samples three times,
with 256 units and 32 samples about as long.

`s` is the logistic function, `*` multiplies elementwise, p = Wi x + b and q = Wh h are projections
by row blocks p1, p2, ... in the order in which the equations name them.

Shapes follow from the blocks: Wi (blocks n_out, n_in), Wh (blocks n_out, n_out), b as Wi's rows.
Options of all: init, recurrent_init (None: as init), bias, bias_init, dtype, rng, as for `RNNCell`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from recur import ops
from recur.cells import WeightedCell
from recur.layers.normalise import normalise
from recur.module import label, ones, register

State = tuple[Any, ...]
Activation = Callable[[Any], Any]

__all__ = [
    "ATRCell",
    "CFNCell",
    "FastRNNCell",
    "IndRNNCell",
    "JANETCell",
    "LiGRUCell",
    "MGUCell",
    "RANCell",
    "UGRNNCell",
]


class _BlockCell(WeightedCell):
    """A cell whose weights are blocks of n_out rows: `blocks` of Wi and b, `recurrent` of Wh."""

    weight_names: ClassVar[tuple[str, ...]] = ("Wi", "Wh", "b")
    blocks: ClassVar[int] = 1
    recurrent: ClassVar[int] = 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        n = self.n_out
        rows = self.blocks * n
        return {"Wi": (rows, self.n_in), "Wh": (self.recurrent * n, n), "b": (rows,)}

    def p(self, x: Any) -> Any:
        """Wi x + b, by blocks if there are several."""
        p = ops.affine(self.Wi, x, self.b)
        return p if self.blocks == 1 else ops.split(p, self.blocks)

    def q(self, h: Any) -> Any:
        """Wh h, by blocks if there are several."""
        q = ops.affine(self.Wh, h)
        return q if self.recurrent == 1 else ops.split(q, self.recurrent)


class _WithActivation(_BlockCell):
    """A cell with an activation of choice."""

    positional: ClassVar[tuple[str, ...]] = ("n_in", "n_out", "act")

    def __init__(self, n_in: int, n_out: int, act: Activation, /, **options: Any) -> None:
        super().__init__(n_in, n_out, **options)
        if not callable(act):
            raise TypeError(
                f"{self.title}: act is a {type(act).__name__}, expected a function such as "
                "recur.tanh."
            )
        self.act = act

    def describe(self) -> str:
        return f"{type(self).__name__}({self.n_in} => {self.n_out}, {label(self.act)})"

    def config(self) -> dict[str, Any]:
        return super().config() | {"act": self.act}


@register("IndRNNCell")
class IndRNNCell(_WithActivation):
    """h' = act(p + w * h), output h': every unit remembers only itself (Li et al. 2018,
    Independently recurrent neural network).

    Wi (n_out, n_in), w (n_out,) filled with ones, b (n_out,).  act: relu, as in the paper.
    """

    weight_names = ("Wi", "w", "b")
    fill: ClassVar = {"w": ones}
    w: Any

    def __init__(
        self, n_in: int, n_out: int, act: Activation = ops.relu, /, **options: Any
    ) -> None:
        super().__init__(n_in, n_out, act, **options)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        n = self.n_out
        return {"Wi": (n, self.n_in), "w": (n,), "b": (n,)}

    def equations(self, x: Any, *state: Any) -> tuple[State, Any]:
        (h,) = state
        h = self.act(self.p(x) + self.w[:, None] * h)
        return (h,), h


@register("UGRNNCell")
class UGRNNCell(_BlockCell):
    """n = tanh(p1 + q1);  g = s(p2 + q2);  h' = g * h + (1 - g) * n, output h' (Collins,
    Sohl-Dickstein and Sussillo 2017, Capacity and trainability in recurrent neural networks).
    """

    blocks = recurrent = 2

    def equations(self, x: Any, *state: Any) -> tuple[State, Any]:
        (h,) = state
        (p1, p2), (q1, q2) = self.p(x), self.q(h)
        n, g = ops.tanh(p1 + q1), ops.sigmoid(p2 + q2)
        h = g * h + (1 - g) * n
        return (h,), h


@register("LiGRUCell")
class LiGRUCell(_WithActivation):
    """z = s(p1 + q1);  n = act(p2 + q2);  h' = z * h + (1 - z) * n, output h' (Ravanelli et al.
    2018, Light gated recurrent units for speech recognition).

    act        relu, as in the paper
    normalise  True: Wi x is normalised before b is added, over its rows in each sample, each block
               by itself.  The paper normalises over the samples and steps of a batch instead, which
               a single step cannot; without any normalisation relu may grow without bound
    """

    blocks = recurrent = 2

    def __init__(
        self,
        n_in: int,
        n_out: int,
        act: Activation = ops.relu,
        /,
        *,
        normalise: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(n_in, n_out, act, **options)
        self.normalise = normalise

    def equations(self, x: Any, *state: Any) -> tuple[State, Any]:
        (h,) = state
        p1, p2 = self._normalised(x) if self.normalise else self.p(x)
        q1, q2 = self.q(h)
        z, n = ops.sigmoid(p1 + q1), self.act(p2 + q2)
        h = z * h + (1 - z) * n
        return (h,), h

    def _normalised(self, x: Any) -> list[Any]:
        blocks = [normalise(block) for block in ops.split(ops.affine(self.Wi, x), 2)]
        if self.b is None:
            return blocks
        b1, b2 = ops.split(self.b[:, None], 2)
        return [blocks[0] + b1, blocks[1] + b2]

    def config(self) -> dict[str, Any]:
        return super().config() | {"normalise": self.normalise}


@register("MGUCell")
class MGUCell(_BlockCell):
    """f = s(p1 + Wh1 h);  n = tanh(p2 + Wh2 (f * h));  h' = (1 - f) * h + f * n, output h' (Zhou
    et al. 2016, Minimal gated unit for recurrent neural networks).

    Wh (2 n_out, n_out): Wh1, then Wh2.
    """

    blocks = recurrent = 2

    def equations(self, x: Any, *state: Any) -> tuple[State, Any]:
        (h,) = state
        p1, p2 = self.p(x)
        n = self.n_out
        f = ops.sigmoid(p1 + self.Wh[:n] @ h)
        candidate = ops.tanh(p2 + self.Wh[n:] @ (f * h))
        h = (1 - f) * h + f * candidate
        return (h,), h


class _ThirdWithoutBias(_BlockCell):
    """A cell with two gates and a third projection of the input, which has no bias."""

    blocks, recurrent = 3, 2

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return super().shapes() | {"b": (2 * self.n_out,)}

    def p(self, x: Any) -> Any:
        p1, p2, p3 = ops.split(ops.affine(self.Wi, x), 3)
        if self.b is None:
            return p1, p2, p3
        b1, b2 = ops.split(self.b[:, None], 2)
        return p1 + b1, p2 + b2, p3


@register("CFNCell")
class CFNCell(_ThirdWithoutBias):
    """h' = s(p1 + q1) * tanh(h) + s(p2 + q2) * tanh(p3), output h', p3 without bias (Laurent and
    von Brecht 2017, A recurrent neural network without chaos).

    b (2 n_out,).
    """

    def equations(self, x: Any, *state: Any) -> tuple[State, Any]:
        (h,) = state
        p1, p2, p3 = self.p(x)
        q1, q2 = self.q(h)
        h = ops.sigmoid(p1 + q1) * ops.tanh(h) + ops.sigmoid(p2 + q2) * ops.tanh(p3)
        return (h,), h


@register("ATRCell")
class ATRCell(_BlockCell):
    """h' = s(p + q) * p + s(p - q) * h, output h' (Zhang et al. 2018, Simplifying neural machine
    translation with addition-subtraction twin-gated recurrent networks).
    """

    def equations(self, x: Any, *state: Any) -> tuple[State, Any]:
        (h,) = state
        p, q = self.p(x), self.q(h)
        h = ops.sigmoid(p + q) * p + ops.sigmoid(p - q) * h
        return (h,), h


class RANState(NamedTuple):
    """The state of a RAN: h and c are (n_out, B)."""

    h: Any
    c: Any


@register("RANCell")
class RANCell(_ThirdWithoutBias):
    """c' = s(p1 + q1) * p3 + s(p2 + q2) * c;  h' = tanh(c'), output h', p3 without bias (Lee, Levy
    and Zettlemoyer 2017, Recurrent additive networks).

    b (2 n_out,).  The state is (h, c).
    """

    state_type = RANState

    def equations(self, x: Any, *state: Any) -> tuple[State, Any]:
        h, c = state
        p1, p2, p3 = self.p(x)
        q1, q2 = self.q(h)
        c = ops.sigmoid(p1 + q1) * p3 + ops.sigmoid(p2 + q2) * c
        h = ops.tanh(c)
        return (h, c), h


@register("JANETCell")
class JANETCell(_BlockCell):
    """g = p1 + q1;  h' = s(g) * h + (1 - s(g - beta)) * tanh(p2 + q2), output h' (van der
    Westhuizen and Lasenby 2018, The unreasonable effectiveness of the forget gate).

    beta 1, as in the paper, which draws the first n_out entries of b as log(uniform(1, T - 1)) for
    memories of up to T steps.
    """

    blocks = recurrent = 2

    def __init__(self, n_in: int, n_out: int, /, *, beta: float = 1.0, **options: Any) -> None:
        super().__init__(n_in, n_out, **options)
        self.beta = float(beta)

    def equations(self, x: Any, *state: Any) -> tuple[State, Any]:
        (h,) = state
        (p1, p2), (q1, q2) = self.p(x), self.q(h)
        g = p1 + q1
        h = ops.sigmoid(g) * h + (1 - ops.sigmoid(g - self.beta)) * ops.tanh(p2 + q2)
        return (h,), h

    def config(self) -> dict[str, Any]:
        return super().config() | {"beta": self.beta}


@register("FastRNNCell")
class FastRNNCell(_WithActivation):
    """h' = s(alpha) * act(p + q) + s(beta) * h, output h' (Kusupati et al. 2018, FastGRNN).

    alpha, beta (1,): learned, -3 and 3 at first, so that a step changes little.  act: tanh.
    """

    weight_names = ("Wi", "Wh", "b", "alpha", "beta")
    fill: ClassVar = {"alpha": lambda n: np.full(n, -3.0), "beta": lambda n: np.full(n, 3.0)}
    alpha: Any
    beta: Any

    def __init__(
        self, n_in: int, n_out: int, act: Activation = ops.tanh, /, **options: Any
    ) -> None:
        super().__init__(n_in, n_out, act, **options)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return super().shapes() | {"alpha": (1,), "beta": (1,)}

    def equations(self, x: Any, *state: Any) -> tuple[State, Any]:
        (h,) = state
        new = self.act(self.p(x) + self.q(h))
        h = ops.sigmoid(self.alpha)[:, None] * new + ops.sigmoid(self.beta)[:, None] * h
        return (h,), h
