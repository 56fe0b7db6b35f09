"""The recurrent layers: `Recur` around each of the four cells."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from recur import ops
from recur.cells import Cell, GRUCell, GRUv3Cell, LSTMCell, RNNCell
from recur.module import new_param, zeros
from recur.recurrent.recur import Recur
from recur.tape import peek

_OF_RECUR = ("learn_init", "init_grad", "layout", "on_batch_change", "strict_dtype")


def RNN(
    n_in: int, n_out: int, act: Callable[[Any], Any] | str = ops.tanh, /, **options: Any
) -> Recur:
    """`Recur(RNNCell(n_in, n_out, act))`: h' = act(Wi x + Wh h + b).

    Options are those of `RNNCell` (init, recurrent_init, bias, bias_init, dtype, rng), those of
    `Recur` (learn_init, init_grad, layout, on_batch_change, strict_dtype), and

    init_state  the initial state: an array (n_out,) or (n_out, 1), or a function such as `zeros`
                that makes one

    `init` makes weights, as in Flux.  Raises `TypeError` for an unknown option.
    """
    return _layer(RNNCell, (n_in, n_out, act), options)


def LSTM(n_in: int, n_out: int, /, **options: Any) -> Recur:
    """`Recur(LSTMCell(n_in, n_out))`; its state is (h, c).

    Options as for `RNN`, and forget_bias=1.0, peepholes=False, gate_act="sigmoid" of `LSTMCell`;
    init_state is a tuple (h, c), or a function.
    """
    return _layer(LSTMCell, (n_in, n_out), options)


def GRU(n_in: int, n_out: int, /, **options: Any) -> Recur:
    """`Recur(GRUCell(n_in, n_out))`: the reset gate after the product, as Flux, PyTorch, cuDNN.

    Options as for `RNN`, and recurrent_bias=False, gate_act="sigmoid" of `GRUCell`.
    """
    return _layer(GRUCell, (n_in, n_out), options)


def GRUv3(n_in: int, n_out: int, /, **options: Any) -> Recur:
    """`Recur(GRUv3Cell(n_in, n_out))`: the reset gate before the product.

    Options as for `RNN`, and gate_act="sigmoid".
    """
    return _layer(GRUv3Cell, (n_in, n_out), options)


def _layer(kind: type[Cell], sizes: tuple, options: dict[str, Any]) -> Recur:
    name = kind.__name__.removesuffix("Cell")
    of_recur = {key: options.pop(key) for key in _OF_RECUR if key in options}
    init_state = options.pop("init_state", zeros)
    known = [
        p.name for p in inspect.signature(kind).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    for key in options:
        if key not in known:
            raise TypeError(
                f"{name}: there is no option {key!r}; the options are "
                f"{', '.join([*known, 'init_state', *_OF_RECUR])}."
            )
    if not callable(options.get("init", zeros)):
        raise TypeError(
            f"{name}: init= is a {type(options['init']).__name__}, expected a function that makes "
            "weights. The initial state is given as init_state=."
        )
    cell = kind(*sizes, **options)
    return Recur(cell, _initial(cell, init_state, options.get("rng")), **of_recur)


def _initial(cell: Any, init_state: Any, rng: np.random.Generator | None) -> Any:
    if not callable(init_state):
        return init_state
    return tuple(
        peek(new_param(f"{cell.title}.init", init_state, (n,), rng=rng, dtype=cell.dtype))
        for n in cell.state_sizes
    )
