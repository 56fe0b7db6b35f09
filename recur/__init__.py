"""Recurrent networks on the CPU: Flux.jl's recurrent API on a small tape and compiled kernels."""

from typing import TYPE_CHECKING

try:
    from recur._kernels import get_num_threads, set_num_threads
except ModuleNotFoundError as error:
    if error.name != "recur._kernels":
        raise
    raise ImportError(
        f"recur: {__path__[0]} is the source, whose kernels are not compiled. Start Python in "
        "another folder, to import the recur that is installed, or compile this one: "
        "pip install -e ."
    ) from None

from recur import ops
from recur._version import __version__
from recur.cells import Cell, GRUCell, GRUv3Cell, LSTMCell, LSTMState, RNNCell
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
    UnknownParameter,
    UnknownStream,
)
from recur.gradients import Gradients, flatten_parameters, gradient, withgradient, zero_grad
from recur.layers import (
    BatchNorm,
    Chain,
    Dense,
    Dropout,
    Embedding,
    FinalStep,
    LayerNorm,
    Parallel,
    Scale,
    SkipConnection,
)
from recur.module import (
    Module,
    Params,
    buffers,
    destructure,
    f32,
    f64,
    glorot_normal,
    glorot_uniform,
    identity_init,
    kaiming_normal,
    kaiming_uniform,
    load_state_dict,
    loadmodel,
    named_params,
    normal,
    ones,
    orthogonal,
    outputsize,
    params,
    register,
    seed,
    state_dict,
    summary,
    testmode,
    trainmode,
    truncated_normal,
    walk,
    zeros,
)
from recur.ops import (
    celu,
    custom_grad,
    elu,
    gelu,
    hard_sigmoid,
    hardsigmoid,
    hardswish,
    hardtanh,
    hcat,
    identity,
    leakyrelu,
    logsigmoid,
    logsoftmax,
    mish,
    relu,
    relu6,
    selu,
    sigmoid,
    softmax,
    softplus,
    softsign,
    stop_gradient,
    swish,
    tanh,
    vcat,
)
from recur.recurrent import (
    GRU,
    LSTM,
    RNN,
    START,
    Bidirectional,
    GRUv3,
    Recur,
    Reversed,
    flip,
    reindex,
    reset,
    scan,
    set_states,
    states,
    tbptt,
    truncate,
)
from recur.tape import Param, Tape, Tensor, paused, value

# Rooms that few programs enter are opened when one of their names is first used (PEP 562), as all
# together they would double the time that `import recur` takes.  Type checkers read the imports,
# Python the table.
if TYPE_CHECKING:
    from recur import data, extra_cells, inspect, io, losses, optim, regularise, streaming
    from recur.compress import compress
    from recur.data import (
        DataLoader,
        batch,
        batchseq,
        chunk,
        onecold,
        onehot,
        onehotbatch,
        padded,
        unbatch,
        unsqueeze,
        unstack,
        windows,
    )
    from recur.inspect.gradcheck import gradcheck
    from recur.io.model import load, save
    from recur.optim import (
        ASGD,
        AdaBelief,
        AdaDelta,
        AdaGrad,
        Adam,
        AdaMax,
        AdamW,
        AMSGrad,
        ClipGrad,
        ClipNorm,
        Constant,
        Cosine,
        Descent,
        Exp,
        Momentum,
        NAdam,
        Nesterov,
        NonMonotonicTrigger,
        OAdam,
        OptimiserChain,
        RAdam,
        RMSProp,
        Rule,
        SignDecay,
        Step,
        Warmup,
        WeightDecay,
        adjust,
        averaged,
        freeze,
        setup,
        start_averaging,
        swap_in_average,
        swap_out_average,
        thaw,
        update,
    )
    from recur.regularise import (
        EmbeddingDropout,
        LockedDropout,
        TiedDense,
        WeightDrop,
        Zoneout,
        activity_penalty,
        resample,
        temporal_activity_penalty,
    )
    from recur.streaming import Stream, StreamPool, drift
    from recur.train import train
else:
    import sys
    import types

    _LATER = {
        "compress": ("compress",),
        "data": (
            "DataLoader",
            "batch",
            "batchseq",
            "chunk",
            "onecold",
            "onehot",
            "onehotbatch",
            "padded",
            "unbatch",
            "unsqueeze",
            "unstack",
            "windows",
        ),
        "extra_cells": (),
        "inspect": ("gradcheck",),
        "io": (),
        "io.model": ("load", "save"),
        "losses": (),
        "optim": (
            "ASGD",
            "AdaBelief",
            "AdaDelta",
            "AdaGrad",
            "Adam",
            "AdaMax",
            "AdamW",
            "AMSGrad",
            "ClipGrad",
            "ClipNorm",
            "Constant",
            "Cosine",
            "Descent",
            "Exp",
            "Momentum",
            "NAdam",
            "Nesterov",
            "NonMonotonicTrigger",
            "OAdam",
            "OptimiserChain",
            "RAdam",
            "RMSProp",
            "Rule",
            "SignDecay",
            "Step",
            "Warmup",
            "WeightDecay",
            "adjust",
            "averaged",
            "freeze",
            "setup",
            "start_averaging",
            "swap_in_average",
            "swap_out_average",
            "thaw",
            "update",
        ),
        "regularise": (
            "EmbeddingDropout",
            "LockedDropout",
            "TiedDense",
            "WeightDrop",
            "Zoneout",
            "activity_penalty",
            "resample",
            "temporal_activity_penalty",
        ),
        "streaming": ("Stream", "StreamPool", "drift"),
        "train": ("train",),
    }
    _ROOM_OF = {name: room for room, names in _LATER.items() for name in (room, *names)}
    del _ROOM_OF["io.model"]  # no name of ours

    def __getattr__(name):
        if name not in _ROOM_OF:
            raise AttributeError(f"module 'recur' has no attribute {name!r}")
        import importlib

        room = importlib.import_module(f"recur.{_ROOM_OF[name]}")
        found = getattr(room, name) if name in _LATER[_ROOM_OF[name]] else room
        globals()[name] = found  # asked only once
        return found

    def __dir__():
        return sorted({*globals(), *_ROOM_OF})

    class _Door(types.ModuleType):
        def __setattr__(self, name, new):
            """Python puts a room that was imported under its name, which may be a function's."""
            if isinstance(new, types.ModuleType) and name in _LATER.get(name, ()):
                new = getattr(new, name)
            super().__setattr__(name, new)

    sys.modules[__name__].__class__ = _Door


# fmt: off
__all__ = [
    "ASGD", "GRU", "LSTM", "RNN", "START", "AMSGrad", "AdaBelief", "AdaDelta", "AdaGrad",
    "AdaMax", "Adam", "AdamW", "BatchNorm", "BatchSizeError", "Bidirectional", "Busy", "Cell",
    "Chain", "ClipGrad", "ClipNorm", "Conflict", "Constant", "Cosine", "DataLoader", "Dense",
    "Descent", "Dropout", "Embedding", "EmbeddingDropout", "Exp", "Expired", "FinalStep",
    "FormatError", "GRUCell", "GRUv3", "GRUv3Cell", "Gap", "Gradients", "GraphUsedError",
    "LSTMCell", "LSTMState", "LayerNorm", "LockedDropout", "Module", "Momentum", "NAdam",
    "Nesterov", "NonMonotonicTrigger", "OAdam", "OptimiserChain", "Parallel", "Param", "Params",
    "RAdam", "RMSProp", "RNNCell", "Recur", "RecurError", "Reversed", "Rule", "Scale",
    "ShapeError", "SignDecay", "SkipConnection", "StateError", "Step", "Stream", "StreamError",
    "StreamPool", "Tape", "TapeError", "Tensor", "TiedDense", "UnknownParameter",
    "UnknownStream", "Warmup", "WeightDecay", "WeightDrop", "Zoneout", "__version__",
    "activity_penalty", "adjust", "averaged", "batch", "batchseq", "buffers", "celu", "chunk",
    "compress", "custom_grad", "data", "destructure", "drift", "elu", "extra_cells", "f32",
    "f64", "flatten_parameters", "flip", "freeze", "gelu", "get_num_threads", "glorot_normal",
    "glorot_uniform", "gradcheck", "gradient", "hard_sigmoid", "hardsigmoid", "hardswish",
    "hardtanh", "hcat", "identity", "identity_init", "inspect", "io", "kaiming_normal",
    "kaiming_uniform", "leakyrelu", "load", "load_state_dict", "loadmodel", "logsigmoid",
    "logsoftmax", "losses", "mish", "named_params", "normal", "onecold", "onehot",
    "onehotbatch", "ones", "ops", "optim", "orthogonal", "outputsize", "padded", "params",
    "paused", "register", "regularise", "reindex", "relu", "relu6", "resample", "reset", "save",
    "scan", "seed", "selu", "set_num_threads", "set_states", "setup", "sigmoid", "softmax",
    "softplus", "softsign", "start_averaging", "state_dict", "states", "stop_gradient",
    "streaming", "summary", "swap_in_average", "swap_out_average", "swish", "tanh", "tbptt",
    "temporal_activity_penalty", "testmode", "thaw", "train", "trainmode", "truncate",
    "truncated_normal", "unbatch", "unsqueeze", "unstack", "update", "value", "vcat", "walk",
    "windows", "withgradient", "zero_grad", "zeros",
]
# fmt: on
