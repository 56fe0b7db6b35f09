"""Recurrent networks on the CPU: Flux.jl's recurrent API on a small tape and BLAS kernels."""

from recur import ops
from recur._version import __version__
from recur.errors import (
    BatchSizeError,
    Busy,
    Conflict,
    Expired,
    FormatError,
    Gap,
    GraphUsedError,
    RecurError,
    ShapeError,
    StateError,
    StreamError,
    TapeError,
    UnknownStream,
)
from recur.gradients import Gradients, flatten_parameters, gradient, withgradient, zero_grad
from recur.ops import custom_grad, stop_gradient
from recur.tape import Param, Tape, Tensor, paused, value

__all__ = [
    "BatchSizeError",
    "Busy",
    "Conflict",
    "Expired",
    "FormatError",
    "Gap",
    "Gradients",
    "GraphUsedError",
    "Param",
    "RecurError",
    "ShapeError",
    "StateError",
    "StreamError",
    "Tape",
    "TapeError",
    "Tensor",
    "UnknownStream",
    "__version__",
    "custom_grad",
    "flatten_parameters",
    "gradient",
    "ops",
    "paused",
    "stop_gradient",
    "value",
    "withgradient",
    "zero_grad",
]
