"""The four cells that have kernels: RNN, LSTM, GRU, GRUv3.

Weights are (rows out, columns in) and multiply from the left; stacked gates are blocks of n_out
rows.  `s` is the logistic function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from recur import _kernels, ops
from recur.cells.base import LSTMState, State
from recur.cells.kernel import KernelCell, product
from recur.module import glorot_uniform, register, zeros
from recur.tape import Operand

Initialiser = Callable[..., Any]

_KERNEL_ACTS = ("tanh", "relu", "sigmoid", "identity")
_GATES = ("sigmoid", "hard_sigmoid")


@register("RNNCell")
class RNNCell(KernelCell):
    """h' = act(Wi x + Wh h + b), output h' (Elman 1990, Cognitive Science 14).

    Wi  (n_out, n_in)
    Wh  (n_out, n_out)
    b   (n_out,), or None with bias=False

    act  tanh, relu, sigmoid, identity run as a kernel; any other function made of `recur.ops`, or
         by `custom_grad`, runs as separate operations

    `init`, `recurrent_init` (None: as `init`) and `bias_init` fill new weights, called as
    `init(n_out, n_in, rng=rng)`.  Raises `ShapeError` for sizes, `TypeError` for what is no
    function.
    """

    weight_names = ("Wi", "Wh", "b")
    positional = ("n_in", "n_out", "act")

    def __init__(
        self,
        n_in: int,
        n_out: int,
        act: Callable[[Any], Any] | str = ops.tanh,
        /,
        *,
        init: Initialiser = glorot_uniform,
        recurrent_init: Initialiser | None = None,
        bias: bool = True,
        bias_init: Initialiser = zeros,
        dtype: Any = np.float32,
        rng: np.random.Generator | None = None,
    ) -> None:
        super().__init__(
            n_in,
            n_out,
            () if bias else ("b",),
            init=init,
            recurrent_init=recurrent_init,
            bias_init=bias_init,
            dtype=dtype,
            rng=rng,
        )
        self.act = ops.activation(act) if isinstance(act, str) else act
        if not callable(self.act):
            raise TypeError(
                f"{self.title}: act is a {type(act).__name__}, expected a function such as "
                "recur.tanh."
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        n = self.n_out
        return {"Wi": (n, self.n_in), "Wh": (n, n), "b": (n,)}

    def build(self, **weights: Any) -> Any:
        name: Any = ops.name_of(self.act)
        return _kernels.RNNKernel(**weights, act=name) if name in _KERNEL_ACTS else None

    def form(self) -> tuple:
        return (self.act,)

    def equations(self, x: Any, *state: Any) -> tuple[State, Any]:
        (h,) = state
        h = self.act(_affine(self.Wi, x, self.b) + product(self.Wh, h))
        return (h,), h

    @classmethod
    def from_arrays(
        cls, Wi: Any, Wh: Any, b: Any = None, *, act: Any = ops.tanh, **more: Any
    ) -> Any:
        cell: Any = super().from_arrays(Wi, Wh, b, **more)
        cell.act = ops.activation(act) if isinstance(act, str) else act
        return cell

    def describe(self) -> str:
        name = ops.name_of(self.act) or getattr(self.act, "__name__", type(self.act).__name__)
        shown = "" if name == "identity" else f", {name}"
        return f"RNNCell({self.n_in} => {self.n_out}{shown})"

    def config(self) -> dict[str, Any]:
        return super().config() | {"act": self.act}


class _GatedCell(KernelCell):
    """What cells with gates share: the gates' activation, and printing."""

    gate_act: Any

    def _set_gate(self, gate_act: Any) -> None:
        name = gate_act if isinstance(gate_act, str) else ops.name_of(gate_act)
        if name not in _GATES:
            raise ValueError(
                f"{self.title}: gate_act is {gate_act!r}, expected 'sigmoid' or 'hard_sigmoid'."
            )
        self.gate_act = name

    def form(self) -> tuple:
        return (self.gate_act,)

    def candidate(self, x: Any) -> Any:
        """What may be written to the state, before its gate, when the step runs as operations."""
        return ops.tanh(x)

    def _gate(self, x: Any) -> Any:
        return ops.sigmoid(x) if self.gate_act == "sigmoid" else ops.hard_sigmoid(x)

    def config(self) -> dict[str, Any]:
        return super().config() | {"gate_act": self.gate_act}


@register("LSTMCell")
class LSTMCell(_GatedCell):
    """g = Wi x + Wh h + b in row blocks i, f, n, u;  c' = s(f) c + s(i) tanh(n);
    h' = s(u) tanh(c'), output h' (Hochreiter and Schmidhuber 1997; forget gate: Gers, Schmidhuber
    and Cummins 2000).

    Wi        (4 n_out, n_in)
    Wh        (4 n_out, n_out)
    b         (4 n_out,), the rows of f are `forget_bias`; or None with bias=False
    peephole  (3, n_out) with peepholes=True: i += p0 c, f += p1 c, u += p2 c' (Gers, Schraudolph
              and Schmidhuber 2002); else None

    gate_act  "sigmoid", or "hard_sigmoid" = clip(0.2 x + 0.5, 0, 1) for models of old Keras

    The state is (h, c).  Initialisers and errors as for `RNNCell`.
    """

    state_type = LSTMState
    weight_names = ("Wi", "Wh", "b", "peephole")
    optional: ClassVar[frozenset[str]] = frozenset({"b", "peephole"})
    peephole: Any

    def __init__(
        self,
        n_in: int,
        n_out: int,
        /,
        *,
        init: Initialiser = glorot_uniform,
        recurrent_init: Initialiser | None = None,
        bias: bool = True,
        bias_init: Initialiser = zeros,
        forget_bias: float = 1.0,
        peepholes: bool = False,
        gate_act: str = "sigmoid",
        dtype: Any = np.float32,
        rng: np.random.Generator | None = None,
    ) -> None:
        absent = [name for name, kept in (("b", bias), ("peephole", peepholes)) if not kept]
        super().__init__(
            n_in,
            n_out,
            absent,
            init=init,
            recurrent_init=recurrent_init,
            bias_init=bias_init,
            dtype=dtype,
            rng=rng,
        )
        self._set_gate(gate_act)
        if bias:
            self.b[self.n_out : 2 * self.n_out] = forget_bias

    def shapes(self) -> dict[str, tuple[int, ...]]:
        n = self.n_out
        return {"Wi": (4 * n, self.n_in), "Wh": (4 * n, n), "b": (4 * n,), "peephole": (3, n)}

    def build(self, **weights: Any) -> Any:
        return _kernels.LSTMKernel(**weights, gate=self.gate_act)

    def equations(self, x: Any, *state: Any) -> tuple[State, Any]:
        h, c = state
        g = _affine(self.Wi, x, self.b) + product(self.Wh, h)
        i, f, n, u = ops.split(g, 4)
        if self.peephole is not None:
            p = self.peephole
            i, f = i + p[0][:, None] * c, f + p[1][:, None] * c
        c = self._gate(f) * c + self._gate(i) * self.candidate(n)
        if self.peephole is not None:
            u = u + p[2][:, None] * c
        h = self._gate(u) * ops.tanh(c)
        return (h, c), h

    def config(self) -> dict[str, Any]:
        return super().config() | {"peepholes": self.peephole is not None}


@register("GRUCell")
class GRUCell(_GatedCell):
    """r = s(Wi_r x + Wh_r h + b_r);  z = s(Wi_z x + Wh_z h + b_z);
    n = tanh(Wi_n x + b_n + r (Wh_n h + bh));  h' = (1 - z) n + z h, output h' (Cho et al. 2014, in
    the form of Flux, cuDNN and PyTorch: the reset gate after the product).

    Wi  (3 n_out, n_in), row blocks r, z, n
    Wh  (3 n_out, n_out)
    b   (3 n_out,), or None with bias=False
    bh  (n_out,) with recurrent_bias=True, as PyTorch and Keras have it; else None

    gate_act  as for `LSTMCell`.  Initialisers and errors as for `RNNCell`.
    """

    weight_names = ("Wi", "Wh", "b", "bh")
    optional: ClassVar[frozenset[str]] = frozenset({"b", "bh"})
    bh: Any

    def __init__(
        self,
        n_in: int,
        n_out: int,
        /,
        *,
        init: Initialiser = glorot_uniform,
        recurrent_init: Initialiser | None = None,
        bias: bool = True,
        bias_init: Initialiser = zeros,
        recurrent_bias: bool = False,
        gate_act: str = "sigmoid",
        dtype: Any = np.float32,
        rng: np.random.Generator | None = None,
    ) -> None:
        super().__init__(
            n_in,
            n_out,
            [name for name, kept in (("b", bias), ("bh", recurrent_bias)) if not kept],
            init=init,
            recurrent_init=recurrent_init,
            bias_init=bias_init,
            dtype=dtype,
            rng=rng,
        )
        self._set_gate(gate_act)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        n = self.n_out
        return {"Wi": (3 * n, self.n_in), "Wh": (3 * n, n), "b": (3 * n,), "bh": (n,)}

    def build(self, **weights: Any) -> Any:
        return _kernels.GRUKernel(**weights, gate=self.gate_act)

    def equations(self, x: Any, *state: Any) -> tuple[State, Any]:
        (h,) = state
        xr, xz, xn = ops.split(_affine(self.Wi, x, self.b), 3)
        hr, hz, hn = ops.split(product(self.Wh, h), 3)
        if self.bh is not None:
            hn = hn + self.bh[:, None]
        r, z = self._gate(xr + hr), self._gate(xz + hz)
        n = self.candidate(xn + r * hn)
        h = (1 - z) * n + z * h
        return (h,), h

    def config(self) -> dict[str, Any]:
        return super().config() | {"recurrent_bias": self.bh is not None}


@register("GRUv3Cell")
class GRUv3Cell(_GatedCell):
    """r = s(Wi_r x + Wh_r h + b_r);  z = s(Wi_z x + Wh_z h + b_z);
    n = tanh(Wi_n x + b_n + Whh (r h));  h' = (1 - z) n + z h, output h' (Cho et al. 2014, third
    version of the preprint: the reset gate before the product).

    Wi   (3 n_out, n_in), row blocks r, z, n
    Wh   (2 n_out, n_out), row blocks r, z
    b    (3 n_out,), or None with bias=False
    Whh  (n_out, n_out)

    gate_act  as for `LSTMCell`.  Initialisers and errors as for `RNNCell`.
    """

    weight_names = ("Wi", "Wh", "b", "Whh")
    Whh: Any

    def __init__(
        self,
        n_in: int,
        n_out: int,
        /,
        *,
        init: Initialiser = glorot_uniform,
        recurrent_init: Initialiser | None = None,
        bias: bool = True,
        bias_init: Initialiser = zeros,
        gate_act: str = "sigmoid",
        dtype: Any = np.float32,
        rng: np.random.Generator | None = None,
    ) -> None:
        super().__init__(
            n_in,
            n_out,
            () if bias else ("b",),
            init=init,
            recurrent_init=recurrent_init,
            bias_init=bias_init,
            dtype=dtype,
            rng=rng,
        )
        self._set_gate(gate_act)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        n = self.n_out
        return {"Wi": (3 * n, self.n_in), "Wh": (2 * n, n), "b": (3 * n,), "Whh": (n, n)}

    def build(self, **weights: Any) -> Any:
        return _kernels.GRUv3Kernel(**weights, gate=self.gate_act)

    def equations(self, x: Any, *state: Any) -> tuple[State, Any]:
        (h,) = state
        xr, xz, xn = ops.split(_affine(self.Wi, x, self.b), 3)
        hr, hz = ops.split(product(self.Wh, h), 2)
        r, z = self._gate(xr + hr), self._gate(xz + hz)
        n = self.candidate(xn + product(self.Whh, r * h))
        h = (1 - z) * n + z * h
        return (h,), h


def _affine(W: Any, x: Any, b: Any) -> Any:
    """W x + b on a batch, where W may be a constant object with `@`."""
    if isinstance(W, (Operand, np.ndarray)):
        return ops.affine(W, x, b)
    return product(W, x) if b is None else product(W, x) + b[:, None]
