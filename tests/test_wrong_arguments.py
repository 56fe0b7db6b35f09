"""What is given in the wrong place, of the wrong kind, or the wrong way round, is named."""

from __future__ import annotations

import numpy as np
import pytest

import recur
from recur import LSTM, Chain, Dense, Dropout, LSTMCell, Param, Recur, losses, state_dict
from recur.errors import ShapeError
from recur.inspect import draw


@pytest.mark.parametrize(
    ("cell", "named"),
    [
        (LSTMCell, "the class LSTMCell"),
        (LSTM(2, 3), r"Recur\(LSTMCell\(2 => 3\)\).*m\.cell"),
        (3, "3"),
    ],
)
def test_what_is_no_cell_is_named(cell, named):
    with pytest.raises(TypeError, match=rf"Recur: the cell is {named}"):
        Recur(cell, init=0.0)


@pytest.mark.parametrize("learn_init", [1, None, 0.5])
def test_learn_init_is_a_switch_or_names(learn_init):
    with pytest.raises(TypeError, match=r"LSTM\(2 => 3\): learn_init is .*, expected True, False"):
        LSTM(2, 3, learn_init=learn_init)


@pytest.mark.parametrize("p", ["a", None, [0.5], float("nan"), -0.1])
def test_a_probability_is_a_number_from_0_to_1(p):
    with pytest.raises(ValueError, match=r"Dropout: p is .*, expected a probability"):
        Dropout(p)


@pytest.mark.parametrize("array", [None, "abc", [None, 1.0], np.ones(2, complex)])
def test_a_parameter_holds_real_numbers(array):
    with pytest.raises(TypeError, match=r"w: an array of .* was given, expected real numbers"):
        Param(array, "w")


def test_a_ragged_list_is_no_parameter():
    with pytest.raises(ShapeError, match="Param: not an array"):
        Param([[1.0], [1.0, 2.0]])


@pytest.mark.parametrize("loss", ["mse", "huber", "binarycrossentropy", "crossentropy"])
def test_losses_refuse_what_is_no_number_instead_of_giving_nan(loss):
    yhat = np.full((2, 3), 0.5)
    for y in (np.full((2, 3), None), np.full((2, 3), "a")):
        with pytest.raises(TypeError, match=f"{loss}: y holds .*, expected real numbers"):
            getattr(losses, loss)(yhat, y)
    with pytest.raises(TypeError, match=rf"{loss}: agg is 'sum', expected a function"):
        getattr(losses, loss)(yhat, yhat, agg="sum")


def test_a_missing_target_is_no_target_of_nan():
    with pytest.raises(TypeError, match="mse: y holds object"):
        losses.mse(np.ones((2, 3)), None)


@pytest.mark.parametrize("epochs", [-1, 1.5, True, "2"])
def test_epochs_are_counted(epochs):
    m = Dense(2, 2)
    opt = recur.setup(recur.Descent(0.1), m)
    with pytest.raises(ValueError, match=r"train: epochs is .*, expected a number of rounds"):
        recur.train(lambda m, x: m(x).sum(), m, [np.ones(2)], opt, epochs=epochs)


def test_loading_arrays_takes_a_dict_by_path():
    m = Chain(LSTM(2, 3), Dense(3, 1))
    for saved in (m, None, [1.0], {1: np.ones(2)}):
        with pytest.raises(TypeError, match=r"load_state_dict: the saved arrays are a .*by path"):
            recur.load_state_dict(m, saved)
    with pytest.raises(TypeError, match="The model comes first"):
        recur.load_state_dict(state_dict(m), m)


@pytest.mark.parametrize("model", [3, None, lambda x: x, [Dense(2, 2)]])
def test_only_models_are_saved(model, tmp_path):
    with pytest.raises(TypeError, match=r"save: .* is no model that a file can hold"):
        recur.save(model, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("source", [3, None, b"bytes", Dense(2, 2)])
def test_only_files_are_loaded(source):
    with pytest.raises(TypeError, match="expected the path of a file"):
        recur.load(source)


def test_only_tapes_are_drawn():
    with pytest.raises(TypeError, match=r"draw: expected a Tape\(log=True\), got a NoneType"):
        draw(None)
