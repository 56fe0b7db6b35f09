"""Weights and models of Keras 2 and 3.

`load` builds the model of a `.keras` or `.h5` file, `load_into` fills one from a file of weights,
`save` writes files of Keras 3.  They need the extra `keras` (h5py), and no Keras.
`cell_to_keras` and `cell_from_keras` convert one cell's arrays and need NumPy alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from recur.errors import FormatError
from recur.files import AnyPath, write_atomically
from recur.io.keras.cells import cell_from_keras, cell_to_keras
from recur.io.keras.read import read_model
from recur.io.keras.write import fill, keras_bytes, leaves, weights_bytes
from recur.layers import Chain

__all__ = ["cell_from_keras", "cell_to_keras", "load", "load_into", "save"]


def load(path: AnyPath, *, masks: bool = False, recurrent_bias: bool | None = None) -> Chain:
    """The model in a `.keras` file of Keras 3 (or 2.12 on), or in an `.h5` file of Keras 2.

    A Sequential, or a functional model in which each layer follows the one before it, of
    SimpleRNN, LSTM, GRU, CuDNNLSTM, CuDNNGRU, Bidirectional (concat), Dense, TimeDistributed of
    it, Embedding, Dropout, SpatialDropout1D, Activation.  The model takes (features, batch, time),
    the transpose of Keras' (batch, time, features) by `x.transpose(2, 0, 1)`.  A layer that returns
    its last output alone is followed by a `FinalStep`.  Rates of dropout inside recurrent layers
    only matter in training and are left out.

    The version that wrote the file decides what it leaves out, and what its names mean: gates of
    Keras 2 called hard_sigmoid, the default before 2.3, are clip(0.2 x + 0.5, 0, 1).

    masks           drop the masks of Masking and Embedding(mask_zero=True): each call says which
                    steps are padding, by lengths= or mask=
    recurrent_bias  as in `cell_from_torch`

    Raises `FormatError` if the file is damaged, or holds what has no counterpart here: the message
    names the layer; `ImportError` without h5py; `OSError` if it cannot be opened.
    """
    with open(path, "rb") as file, _naming(path):
        return read_model(file, masks, recurrent_bias)


def load_into(model: Any, path: AnyPath, *, gate_act: str | None = None) -> Any:
    """Fill a model built by hand from a weights file, `.weights.h5` or `.h5`; returns it.

    The model's layers with weights are those of the Keras model, in its order; models inside that
    one, and TimeDistributed, are not looked into.  Such a file does not say what the functions of
    the layers are: they are the model's.  If it comes from Keras before 2.3, whose gates were
    hard_sigmoid by default, cells must have those; `gate_act` says what else the model was trained
    with.

    Raises `FormatError` if the two do not fit, and changes nothing; else as `load`.
    """
    with open(path, "rb") as file, _naming(path):
        fill(model, file, gate_act)
    return model


def save(model: Any, path: AnyPath) -> None:
    """Write a model for Keras 3: a `.keras` file, or the weights alone to a `.weights.h5` file.

    Raises `StateError`, with the path, for what Keras cannot hold: peepholes, hard_sigmoid gates
    (Keras 3 computes another function of that name), initial states that are not zero, containers
    other than Chain; `ValueError` for another ending; an old file stays whole until the new one is.
    """
    name = os.fspath(path)
    if name.endswith(".weights.h5"):
        write_atomically(path, weights_bytes(leaves(model)))
    elif name.endswith(".keras"):
        write_atomically(path, keras_bytes(model))
    else:
        raise ValueError(f"{name}: expected a name that ends in .keras or .weights.h5.")


@contextmanager
def _naming(path: AnyPath) -> Iterator[None]:
    """Put the file's name before the message of a `FormatError`."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{os.fspath(path)}: {error}") from None
