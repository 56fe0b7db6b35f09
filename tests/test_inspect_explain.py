"""`inspect.explain`: what recurrent layers will do next, in words."""

from __future__ import annotations

import numpy as np

import recur
from recur import GRU, LSTM, RNN, Adam, Chain, Dense, Recur, Tape, freeze, reset, setup, truncate
from recur.inspect import explain
from recur.regularise import WeightDrop

X = np.ones((3, 10), np.float32)


def test_every_recurrent_layer_is_explained_under_its_path():
    m = Chain(LSTM(3, 4), Dense(4, 4), GRU(4, 2))
    assert [(e.path, e.layer) for e in explain(m)] == [
        ("layers.0", "LSTM(3 => 4)"),
        ("layers.2", "GRU(4 => 2)"),
    ]
    assert explain(Dense(3, 4)) == []
    assert str(explain(Dense(3, 4))) == "The model has no recurrent layer."


def test_the_state_is_told_at_the_start_carried_and_truncated():
    m = GRU(3, 4)
    assert explain(m)[0].state == "at the start: the next step begins from init"
    m(X)
    assert explain(m)[0].state == "carried, batch 10, as a value"
    truncate(reset(m))
    assert explain(m)[0].state == "carried, any batch, as a value"
    reset(m)
    with Tape() as tape:
        y = m(X)
        assert explain(m)[0].state == "carried, batch 10, with a history of 1 recorded operation"
        m(X)
        assert explain(m)[0].state == "carried, batch 10, with a history of 2 recorded operations"
        truncate(m)
        assert "its history was cut in this scope" in explain(m)[0].state
        tape.backward(y.sum())


def test_init_is_a_parameter_or_not_or_in_part():
    assert explain(LSTM(3, 4))[0].init.startswith("a constant (zeros)")
    assert explain(GRU(3, 4, init_state=recur.ones))[0].init.startswith("a constant (fixed")
    assert explain(LSTM(3, 4, learn_init=True))[0].init == "a parameter"
    some = explain(LSTM(3, 4, learn_init=("c",)))[0].init
    assert some == "init.c is a parameter, the rest a constant"


def stops(m):
    return explain(m)[0].stop


def test_where_the_gradient_stops_follows_the_state():
    m, plain = LSTM(3, 4, learn_init=True), LSTM(3, 4)
    assert stops(m) == "at init, whose init.h and init.c gets it"
    assert stops(plain) == "at init, a constant"
    with Tape():
        m(X)
        plain(X)
        assert stops(m).startswith("at init, whose init.h and init.c gets it, 3 recorded")
        assert stops(plain) == "at a value, 1 recorded operation back"
        truncate(m)
        assert stops(m).startswith("at the state, which is a value")
        m(X)
        assert stops(m) == "at a value, 1 recorded operation back"
        reset(m)
        assert stops(m) == "at init, whose init.h and init.c gets it"
    m(X)
    assert stops(m).startswith("at the state, which is a value")


def test_what_is_said_of_init_is_what_the_gradient_does():
    """The words against the numbers, for every way into a gradient."""

    def nothing(m):
        pass

    def warm_up(m):
        m(X)

    def cut(m):
        truncate(m)

    for before in (nothing, warm_up, cut):
        m = GRU(3, 4, learn_init=True)
        before(m)
        said = "gets it" in stops(m)
        grads = recur.gradient(lambda m: m(X).sum(), m)
        assert said == bool(np.any(grads["init"])), before


def test_a_history_that_was_swept_is_warned_of():
    m = GRU(3, 4)
    with Tape() as tape:
        tape.backward(m(X).sum())
        assert explain(m)[0].state == "carried, batch 10, with a history that was swept already"
        assert stops(m).startswith("with an error: steps behind the state were swept already")
        truncate(m)
        assert stops(m).startswith("at the state, which is a value")


def test_flux_explicit_rule_is_told():
    m = GRU(3, 4, learn_init=True, init_grad="scope")
    assert "where the scope begins" in stops(m)
    with Tape():
        assert "where the scope begins" in stops(m)
        reset(m)
        assert stops(m) == "at init, whose init gets it"


def test_weights_are_listed_by_what_happens_to_them():
    m = Chain(
        WeightDrop(LSTM(3, 4), ["cell.Wh"], 0.25),
        GRU(4, 4, bias=False),
        Recur(recur.RNNCell.from_arrays(np.ones((2, 4)), np.eye(2))),
    )
    m.layers[2].cell.Wh = _Structured()
    opt = setup(Adam(), m)
    freeze(opt, m.layers[1])
    dropped, frozen, constant = explain(m, opt)
    assert dropped.weights == ("Wi", "Wh_raw", "b")
    assert dropped.dropped == ("Wh (p = 0.25, active inside a scope)",)
    assert dropped.frozen == ()
    assert frozen.weights == frozen.frozen == ("Wi", "Wh")
    assert constant.weights == ("Wi",)
    assert constant.constant == ("Wh",)
    recur.testmode(m)
    assert explain(m)[0].dropped == ("Wh (p = 0.25, inactive)",)
    recur.trainmode(m)
    assert explain(m)[0].dropped == ("Wh (p = 0.25, active)",)


class _Structured:
    """A recurrent matrix that is no array."""

    shape = (2, 2)

    @property
    def T(self):
        return self

    def __matmul__(self, x):
        return x


def test_a_cell_that_is_a_function_is_explained():
    m = Recur(lambda h, x: (h + x, h + x), np.zeros((3, 1)))
    (told,) = explain(m)
    assert told.layer == "Recur(<lambda>)"
    assert told.weights == () and "gradient goes to nothing" in str(told)
    m(X)
    assert explain(m)[0].state == "carried, as a value"


def test_explaining_changes_nothing():
    m = Chain(WeightDrop(LSTM(3, 4), ["cell.Wh"], 0.5), RNN(4, 2))
    m(X)
    states = recur.states(m)
    before = {path: generator.bit_generator.state for path, generator in _generators(m)}
    explain(m)
    with Tape():
        explain(m)
    for path, state in recur.states(m).items():
        for a, b in zip(state, states[path], strict=True):
            np.testing.assert_array_equal(a, b)
    assert before == {path: generator.bit_generator.state for path, generator in _generators(m)}


def _generators(m):
    return recur.module.generators(m).items()


def test_it_reads_as_lines_of_words():
    m = GRU(3, 4, learn_init=True)
    assert str(explain(m)) == (
        "GRU(3 => 4)\n"
        "  state     at the start: the next step begins from init\n"
        "  init      a parameter\n"
        "  gradient  stops at init, whose init gets it\n"
        "  weights   gradient goes to Wi, Wh and b"
    )
    assert repr(explain(m)) == str(explain(m))
