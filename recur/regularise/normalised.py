"""Cells with normalised or projected parts: layer-normalised LSTM and GRU, projected LSTM."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from recur import ops
from recur.cells import LSTMState, WeightedCell
from recur.errors import ShapeError
from recur.layers.normalise import normalise
from recur.module import ones, register, zeros

State = tuple[Any, ...]


def _scaled(gain: Any, x: Any, eps: float) -> Any:
    """LN(x; gain) of a batch (n, B): each sample has mean 0 and variance 1 along its features."""
    return gain[:, None] * normalise(x, eps)


class _LayerNormCell(WeightedCell):
    """What both cells share: the option eps."""

    eps: float
    gain_x: Any
    gain_h: Any

    def __init__(self, n_in: int, n_out: int, /, *, eps: float = 1e-3, **options: Any) -> None:
        super().__init__(n_in, n_out, **options)
        self.eps = float(eps)

    def config(self) -> dict[str, Any]:
        return super().config() | {"eps": self.eps}


@register("LayerNormLSTMCell")
class LayerNormLSTMCell(_LayerNormCell):
    """g = LN(Wi x; gain_x) + LN(Wh h; gain_h) + b in row blocks i, f, n, u;
    c' = s(f) c + s(i) tanh(n);  h' = s(u) tanh(LN(c'; gain_c) + bias_c), output h' (Ba, Kiros and
    Hinton 2016, Layer normalization, eqs. 20 to 22).

    LN(a; gain) = gain (a - mean) / sqrt(var + eps²), over all rows of a sample: the four blocks of
    Wi x together, as in the paper.  Its three biases inside the gates are one sum, b.

    Wi, Wh, b       as for `LSTMCell`, with its forget_bias
    gain_x, gain_h  (4 n_out,), ones at first
    gain_c, bias_c  (n_out,), ones and zeros

    The state is (h, c).  Steps run as separate operations.  Options as for `LSTMCell`, without
    peepholes and gate_act.
    """

    state_type = LSTMState
    weight_names = ("Wi", "Wh", "b", "gain_x", "gain_h", "gain_c", "bias_c")
    fill: ClassVar = {"gain_x": ones, "gain_h": ones, "gain_c": ones, "bias_c": zeros}
    gain_c: Any
    bias_c: Any

    def __init__(
        self, n_in: int, n_out: int, /, *, forget_bias: float = 1.0, **options: Any
    ) -> None:
        super().__init__(n_in, n_out, **options)
        if self.b is not None:
            self.b[self.n_out : 2 * self.n_out] = forget_bias

    def shapes(self) -> dict[str, tuple[int, ...]]:
        n = self.n_out
        rows = 4 * n
        return {
            "Wi": (rows, self.n_in),
            "Wh": (rows, n),
            "b": (rows,),
            "gain_x": (rows,),
            "gain_h": (rows,),
            "gain_c": (n,),
            "bias_c": (n,),
        }

    def equations(self, x: Any, *state: Any) -> tuple[State, Any]:
        h, c = state
        g = _scaled(self.gain_x, ops.affine(self.Wi, x), self.eps)
        g = g + _scaled(self.gain_h, ops.affine(self.Wh, h), self.eps)
        i, f, n, u = ops.split(g if self.b is None else g + self.b[:, None], 4)
        c = ops.sigmoid(f) * c + ops.sigmoid(i) * ops.tanh(n)
        seen = _scaled(self.gain_c, c, self.eps) + self.bias_c[:, None]
        h = ops.sigmoid(u) * ops.tanh(seen)
        return (h, c), h


@register("LayerNormGRUCell")
class LayerNormGRUCell(_LayerNormCell):
    """(r; z) = LN(Wi_rz x; gain_x_rz) + LN(Wh_rz h; gain_h_rz) + b_rz;
    n = tanh(LN(Wi_n x; gain_x_n) + b_n + s(r) (LN(Wh_n h; gain_h_n) + bh));
    h' = (1 - s(z)) n + s(z) h, output h' (Ba, Kiros and Hinton 2016, eqs. 23 to 25, where z stands
    for 1 - z here).

    LN as for `LayerNormLSTMCell`; the blocks r and z are normalised together, n by itself.

    Wi, Wh, b       as for `GRUCell`, row blocks r, z, n
    bh              (n_out,), the bias of the normalised Wh_n h
    gain_x, gain_h  (3 n_out,), ones at first

    Steps run as separate operations.  Options as for `GRUCell`, without recurrent_bias and
    gate_act.
    """

    weight_names = ("Wi", "Wh", "b", "bh", "gain_x", "gain_h")
    fill: ClassVar = {"gain_x": ones, "gain_h": ones}
    bh: Any

    def shapes(self) -> dict[str, tuple[int, ...]]:
        n = self.n_out
        rows = 3 * n
        return {
            "Wi": (rows, self.n_in),
            "Wh": (rows, n),
            "b": (rows,),
            "bh": (n,),
            "gain_x": (rows,),
            "gain_h": (rows,),
        }

    def equations(self, x: Any, *state: Any) -> tuple[State, Any]:
        (h,) = state
        xg, xn = self._normalised(self.gain_x, ops.affine(self.Wi, x))
        hg, hn = self._normalised(self.gain_h, ops.affine(self.Wh, h))
        if self.b is not None:
            xg, xn = xg + self.b[: 2 * self.n_out, None], xn + self.b[2 * self.n_out :, None]
        r, z = ops.split(ops.sigmoid(xg + hg), 2)
        n = ops.tanh(xn + r * (hn + self.bh[:, None]))
        h = (1 - z) * n + z * h
        return (h,), h

    def _normalised(self, gain: Any, a: Any) -> tuple[Any, Any]:
        cut = 2 * self.n_out
        gates = _scaled(gain[:cut], a[:cut], self.eps)
        return gates, _scaled(gain[cut:], a[cut:], self.eps)


class ProjectedState(NamedTuple):
    """The state of a projected LSTM: h (n_out, B), c (n_cell, B)."""

    h: Any
    c: Any


@register("ProjectedLSTMCell")
class ProjectedLSTMCell(WeightedCell):
    """g = Wi x + Wh h + b in row blocks i, f, n, u;  c' = s(f) c + s(i) tanh(n);
    h' = Wr (s(u) tanh(c')), output h' (Sak, Senior and Beaufays 2014, without their peepholes; the
    form of PyTorch's proj_size).

        ProjectedLSTMCell(n_in, n_cell, n_out)

    Wi  (4 n_cell, n_in)
    Wh  (4 n_cell, n_out)
    b   (4 n_cell,), the rows of f are `forget_bias`; or None with bias=False
    Wr  (n_out, n_cell), n_out < n_cell

    The state is h (n_out, B), c (n_cell, B).  Steps run as separate operations.  Options as for
    `LSTMCell`, without peepholes and gate_act.  Raises `ShapeError` for sizes.
    """

    state_type = ProjectedState
    positional = ("n_in", "n_cell", "n_out")
    weight_names = ("Wi", "Wh", "b", "Wr")
    Wr: Any

    def __init__(
        self,
        n_in: int,
        n_cell: int,
        n_out: int,
        /,
        *,
        forget_bias: float = 1.0,
        **options: Any,
    ) -> None:
        if not n_out < n_cell:
            raise ShapeError(
                f"ProjectedLSTMCell: n_out is {n_out}, expected less than the {n_cell} cells."
            )
        self.n_cell = int(n_cell)
        super().__init__(n_in, n_out, **options)
        if self.b is not None:
            self.b[self.n_cell : 2 * self.n_cell] = forget_bias

    @property
    def state_sizes(self) -> tuple[int, ...]:
        return (self.n_out, self.n_cell)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        rows = 4 * self.n_cell
        return {
            "Wi": (rows, self.n_in),
            "Wh": (rows, self.n_out),
            "b": (rows,),
            "Wr": (self.n_out, self.n_cell),
        }

    def equations(self, x: Any, *state: Any) -> tuple[State, Any]:
        h, c = state
        i, f, n, u = ops.split(ops.affine(self.Wi, x, self.b) + ops.affine(self.Wh, h), 4)
        c = ops.sigmoid(f) * c + ops.sigmoid(i) * ops.tanh(n)
        h = ops.affine(self.Wr, ops.sigmoid(u) * ops.tanh(c))
        return (h, c), h

    def describe(self) -> str:
        return f"ProjectedLSTMCell({self.n_in} => {self.n_cell} => {self.n_out})"

    def config(self) -> dict[str, Any]:
        return super().config() | {"n_cell": self.n_cell}
