"""A model that is changed while it has streams: its weights, its layers, how they are set."""

from __future__ import annotations

import operator

import numpy as np
import pytest

import recur
from recur import (
    GRU,
    LSTM,
    RNN,
    Chain,
    Dense,
    Dropout,
    FormatError,
    LayerNorm,
    Parallel,
    ShapeError,
    StateError,
    WeightDrop,
)
from recur.streaming import Settled, Stream, StreamPool

RNG = np.random.default_rng(5)
X = RNG.standard_normal((5, 40)).astype(np.float32)


def chain(*more):
    rng = np.random.default_rng(1)
    return Chain(LSTM(5, 6, rng=rng), Dense(6, 4, recur.tanh, rng=rng), *more)


def another_head(model):
    model.layers = (model[0], Dense(6, 4, recur.sigmoid, rng=np.random.default_rng(9)))


def another_named_head(model):
    model.layers["head"] = Dense(6, 4, rng=np.random.default_rng(9))


def another_cell(model):
    model[0].cell = LSTM(5, 6, rng=np.random.default_rng(9)).cell


def another_weight(model):
    model[1].weight = recur.Param(np.full((4, 6), 0.1, np.float32))


def of_its_own(y):
    return y - 1


CHANGES = {
    "activation that a step knows": (chain, lambda m: setattr(m[1], "act", recur.relu)),
    "activation that no step knows": (chain, lambda m: setattr(m[1], "act", of_its_own)),
    "activation of a cell": (
        lambda: Chain(RNN(5, 6, rng=np.random.default_rng(1))),
        lambda m: setattr(m[0].cell, "act", recur.relu),
    ),
    "activation of a cell that no kernel knows": (
        lambda: Chain(RNN(5, 6, rng=np.random.default_rng(1))),
        lambda m: setattr(m[0].cell, "act", recur.softsign),
    ),
    "eps": (
        lambda: chain(LayerNorm(4)),
        lambda m: setattr(m[2], "eps", 0.5),
    ),
    "activation of a norm": (
        lambda: chain(LayerNorm(4)),
        lambda m: setattr(m[2], "act", of_its_own),
    ),
    "head": (chain, another_head),
    "named head": (
        lambda: Chain(body=chain()[0], head=Dense(6, 4, rng=np.random.default_rng(1))),
        another_named_head,
    ),
    "one layer more": (chain, lambda m: setattr(m, "layers", (*m, recur.softsign))),
    "cell": (chain, another_cell),
    "weight": (chain, another_weight),
    "connection": (
        lambda: Parallel("+", chain()[0], GRU(5, 6, rng=np.random.default_rng(2))),
        lambda m: setattr(m, "connection", operator.sub),
    ),
    "weight drop": (chain, lambda m: WeightDrop(m[0], "Wh", 0.5)),
    "mode": (lambda: chain(Dropout(0.5)), recur.trainmode),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_set_otherwise_counts_from_the_next_step_of_every_stream(name):
    make, change = CHANGES[name]
    model = make()
    stepped, fresh, block = Stream(model), Stream(model), Stream(model)
    pool, forked = StreamPool(model), Stream(model)
    for id in ("a", "b", "c"):
        pool.open(id)
    slots = pool.slots(["c", "a"])
    for t in range(10):
        stepped(X[:, t]), pool.step(slots, X[:, [t, t]])
    block.run(X[:, :10])
    forked.run(X[:, :10])
    forked = forked.fork()
    state = stepped.state
    change(model)
    twin = Stream(model)  # takes the model as it is now
    twin.state = state
    expected = np.stack([twin(X[:, t]) for t in range(10, 20)], -1)
    assert np.array_equal(block.run(X[:, 10:20]), expected)
    for t in range(10, 20):
        assert np.array_equal(stepped(X[:, t]), expected[:, t - 10])
        assert np.array_equal(forked(X[:, t]), expected[:, t - 10])
        y = pool.step(slots, X[:, [t, t]])
        assert np.array_equal(y, expected[:, [t - 10, t - 10]])
    assert fresh(X[:, 0]).shape == Stream(model)(X[:, 0]).shape
    assert stepped.steps == 20 and list(pool.steps(["a", "b", "c"])) == [20, 0, 20]
    # A snapshot is one of the model as it is now.
    assert np.array_equal(Stream.restore(model, stepped.snapshot())(X[:, 20]), stepped(X[:, 20]))
    assert np.array_equal(
        Stream.restore(model, pool.snapshot("a"))(X[:, 20]), pool.step(["a"], X[:, 20:21])[:, 0]
    )


@pytest.mark.parametrize("name", sorted(set(CHANGES) - {"mode", "eps", "weight drop"}))
def test_the_change_shows_in_the_answers_and_in_the_fingerprint(name):
    make, change = CHANGES[name]
    model = make()
    stream = Stream(model)
    before, data = stream.run(X[:, :10]), stream.snapshot()
    change(model)
    again = Stream(model)
    assert not np.array_equal(again.run(X[:, :10]), before), "the test above could not fail"
    with pytest.raises(FormatError):
        Stream.restore(model, data)
    assert stream.snapshot() != data


def test_a_model_whose_state_has_become_another_is_refused_and_nothing_moves():
    model = chain()
    stream, pool = Stream(model), StreamPool(model)
    pool.open("a")
    for t in range(4):
        stream(X[:, t]), pool.step(["a"], X[:, t : t + 1])
    kept, data = model.layers, stream.snapshot()
    model.layers = (LSTM(5, 7), Dense(7, 4))
    for call in (
        lambda: stream(X[:, 4]),
        lambda: stream.run(X),
        lambda: stream.snapshot(),
        lambda: stream.state,
        lambda: stream.reset(),
        lambda: pool.step(["a"], X[:, 4:5]),
        lambda: pool.step(["a"], X[:, 4:5], numbers=[5]),
        lambda: pool.snapshot("a"),
        lambda: pool.reset(["a"]),
        lambda: pool.open("b"),
    ):
        with pytest.raises(StateError, match=r"h \(7,\).*expected .*h \(6,\).*Nothing was changed"):
            call()
    model.layers = kept
    assert stream.snapshot() == data and stream.steps == 4 and list(pool.steps(["a"])) == [4]
    again = Stream.restore(model, data)
    expected = again(X[:, 4])
    assert np.array_equal(stream(X[:, 4]), expected)
    assert np.array_equal(pool.step(["a"], X[:, 4:5])[:, 0], expected)


def test_a_layer_that_cannot_step_put_in_anothers_place_is_refused_by_name():
    model = chain()
    stream, pool = Stream(model), StreamPool(model)
    pool.open("a")
    stream(X[:, 0]), pool.step(["a"], X[:, :1])
    model.layers = (recur.Bidirectional(LSTM(5, 3), LSTM(5, 3)), model[1])
    with pytest.raises(StateError, match="reads a sequence from its end"):
        stream(X[:, 1])
    with pytest.raises(StateError, match="reads a sequence from its end"):
        pool.step(["a"], X[:, :1])


def test_answers_of_another_size_are_refused_in_a_pool_and_no_stream_moves():
    model = chain()
    pool = StreamPool(model)
    pool.open("a"), pool.open("b")
    for t in range(3):
        pool.step(["a", "b"], X[:, [t, t]])
    before = pool.parts(["a", "b"])
    model.layers = (model[0], Dense(6, 3))
    for numbers in (None, [4, 4]):
        with pytest.raises(ShapeError, match=r"of shape \(3,\).*Nothing was changed"):
            pool.step(["a", "b"], X[:, [3, 3]], numbers=numbers)
    assert all(map(np.array_equal, pool.parts(["a", "b"]), before))
    assert list(pool.steps(["a", "b"])) == [3, 3]
    stream = Stream(model)
    assert stream(X[:, 0]).shape == (3,), "a stream keeps no answers, and may change its size"


def test_the_settled_state_is_that_of_the_layers_there_are():
    model = Chain(GRU(5, 6, rng=np.random.default_rng(3)))
    silence = Settled(np.zeros(5, np.float32))
    stream, pool = Stream(model, rest=silence), StreamPool(model, rest=silence)
    model.layers = (GRU(5, 6, rng=np.random.default_rng(4)),)
    model[0].cell.b[...] = 0.3
    rest = Stream(model, rest=silence).state["layers.0"]
    stream.reset()
    pool.open("a")
    assert rest.any() and np.array_equal(stream.state["layers.0"], rest)
    assert np.array_equal(pool.state(["a"])["layers.0"], rest)


def test_a_changed_layer_makes_no_step_slow_for_good(monkeypatch):
    """One call of compiled code again, two steps after the change."""
    model = chain()
    stream, pool = Stream(model), StreamPool(model)
    pool.open("a")
    for t in range(4):
        stream(X[:, t]), pool.step(["a"], X[:, t : t + 1])
    model[1].act = recur.relu
    for t in range(4, 7):
        stream(X[:, t]), pool.step(["a"], X[:, t : t + 1])
    assert stream._live is not None and stream._live.fresh
    monkeypatch.setattr(pool.plan, "step", lambda *x: pytest.fail("the states were taken out"))
    pool.step(["a"], X[:, 7:8])
