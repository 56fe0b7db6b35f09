"""Models that mix recurrent and other layers: sequences, steps, saving, copies, files, printing."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest

from recur import ops
from recur.errors import ShapeError
from recur.inspect import gradcheck
from recur.layers import Chain, Dense, Dropout, Embedding, LayerNorm, Parallel, SkipConnection
from recur.module import (
    build_model,
    describe_model,
    destructure,
    f64,
    generators,
    load_state_dict,
    named_params,
    outputsize,
    params,
    state_dict,
    summary,
    trainmode,
)
from recur.recurrent import GRU, LSTM, RNN, Bidirectional, GRUv3, reset
from recur.tape import Tape, value

B, T = 2, 5


def deep(dtype: Any = np.float32) -> Chain:
    rng = np.random.default_rng(4)
    return Chain(
        LSTM(3, 4, dtype=dtype, rng=rng, learn_init=True),
        Dropout(0.4, rng=rng),
        LayerNorm(4, dtype=dtype),
        SkipConnection(GRU(4, 4, dtype=dtype, rng=rng), "+"),
        Parallel(ops.vcat, RNN(4, 2, dtype=dtype, rng=rng), Dense(4, 1, dtype=dtype, rng=rng)),
        Dropout(0.4, rng=rng),
        Dense(3, 2, ops.tanh, dtype=dtype, rng=rng),
    )


def sequence(rng: np.random.Generator, dtype: Any) -> np.ndarray:
    return rng.normal(size=(3, B, T)).astype(dtype)


def test_a_sequence_a_list_and_single_steps_give_one_answer_with_the_same_masks(dtype, rng):
    X = sequence(rng, dtype)
    steps = [X[:, :, t] for t in range(T)]
    ways = [
        lambda m: m(X),
        lambda m: ops.stack(m(steps), -1),
        lambda m: ops.stack([m(x) for x in steps], -1),
        lambda m: ops.stack(list(map(m, steps)), -1),
    ]
    found = []
    for way in ways:
        m = deep(dtype)
        with Tape() as tape:
            y = way(m)
            tape.backward((y**2).sum())
        found.append((value(y), [p.grad for p in params(m)]))
    tolerance = {"rtol": 2e-4, "atol": 1e-5} if dtype == np.float32 else {"rtol": 1e-10}
    for y, grads in found[1:]:
        np.testing.assert_allclose(y, found[0][0], **tolerance)
        for grad, wanted in zip(grads, found[0][1], strict=True):
            np.testing.assert_allclose(grad, wanted, **tolerance)


def test_a_deep_model_has_the_right_gradient(rng):
    gradcheck(lambda m, X: m(X), deep(np.float64), sequence(rng, np.float64))


def test_parameters_are_listed_in_the_order_of_the_layers_starts_after_weights():
    assert list(named_params(Chain(LSTM(1, 2, learn_init=True), Dense(2, 1)))) == [
        *("layers.0.cell.Wi", "layers.0.cell.Wh", "layers.0.cell.b"),
        *("layers.0.init.h", "layers.0.init.c", "layers.1.weight", "layers.1.bias"),
    ]


def test_a_single_step_does_not_depend_on_its_batch_bit_for_bit(dtype, rng):
    m = Chain(LSTM(3, 17, dtype=dtype), LayerNorm(17, dtype=dtype), Dense(17, 5, dtype=dtype))
    X = sequence(rng, dtype)
    alone = []
    for b in range(B):
        reset(m)
        alone.append(np.stack([m(X[:, b, t]) for t in range(T)], -1))
    reset(m)
    together = np.stack([m(X[:, :, t]) for t in range(T)], -1)
    np.testing.assert_array_equal(together, np.stack(alone, 1))


def test_lengths_reach_the_recurrent_layers(dtype, rng):
    X = sequence(rng, dtype)
    lengths = np.array([2, 5])
    body = Chain(GRU(3, 4, dtype=dtype), Chain(LSTM(4, 3, dtype=dtype)))
    Y = Chain(body, ops.tanh)(X, lengths=lengths)
    assert (Y[:, 0, 2:] == 0).all()
    for b, n in enumerate(lengths):
        reset(body)
        one = np.tanh(body(X[:, b : b + 1, :n]))
        np.testing.assert_allclose(Y[:, b : b + 1, :n], one, rtol=1e-5, atol=1e-7)
    reset(body)
    mask = np.arange(T) < lengths[:, None]
    np.testing.assert_allclose(Chain(body, ops.tanh)(X, mask=mask), Y, rtol=1e-5, atol=1e-7)


def test_truncate_every_reaches_the_recurrent_layers(rng):
    X = sequence(rng, np.float64)
    grads = []
    for options in ({"truncate_every": 2}, {}):
        m = Chain(f64(LSTM(3, 4, rng=np.random.default_rng(0))), ops.tanh)
        with Tape() as tape:
            Y = m(X, **options)
            tape.backward((Y[:, :, -1] ** 2).sum())
        grads.append(m[0].cell.Wh.grad)
    assert np.abs(grads[0] - grads[1]).max() > 1e-6


def test_a_call_that_raises_leaves_every_state_and_mask_as_it_was(dtype, rng):
    m = trainmode(Chain(deep(dtype), Dense(9, 1, dtype=dtype)))
    X = sequence(rng, dtype)
    m[0](X)
    before = state_dict(m, include_state=True)
    drawn = [g.bit_generator.state for g in generators(m).values()]
    for x in (X, X[:, :, 0], [X[:, :, 0], X[:, :, 1]]):
        with pytest.raises(ShapeError, match=r"Dense\(9 => 1\): x has 2 features on axis 0"):
            m(x)
    after = state_dict(m, include_state=True)
    assert before.keys() == after.keys()
    for path in before:
        np.testing.assert_array_equal(before[path], after[path])
    assert [g.bit_generator.state for g in generators(m).values()] == drawn


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: load_state_dict(
            build_model(json.loads(json.dumps(describe_model(m)))), state_dict(m, True)
        ),
    ],
)
def test_copies_go_on_from_the_same_state_and_never_touch_the_original(duplicate, dtype, rng):
    X = sequence(rng, dtype)
    m = deep(dtype)
    with Tape():
        m(X)
        inside = duplicate(m)
    other = duplicate(m)
    before = state_dict(m, include_state=True)
    ys = [copied(X) for copied in (inside, other)]
    for path, array in state_dict(m, include_state=True).items():
        np.testing.assert_array_equal(array, before[path])
    wanted = m(X)
    for y in ys:
        np.testing.assert_array_equal(y, wanted)


def test_a_model_of_every_recurrent_layer_is_rebuilt_from_its_description(dtype, rng):
    m = Chain(
        RNN(3, 4, ops.relu, dtype=dtype),
        LSTM(4, 3, dtype=dtype, peepholes=True, learn_init=("h",)),
        GRU(3, 4, dtype=dtype, recurrent_bias=True, bias=False),
        Bidirectional(GRUv3(4, 2, dtype=dtype), LSTM(4, 3, dtype=dtype, gate_act="hard_sigmoid")),
    )
    other = build_model(json.loads(json.dumps(describe_model(m))), 100_000)
    assert repr(other) == repr(m)
    load_state_dict(other, state_dict(m))
    X = sequence(rng, dtype)
    np.testing.assert_array_equal(other(X), m(X))


def test_destructure_follows_the_layers_and_rebuilds_at_the_start(dtype, rng):
    m = deep(dtype)
    X = sequence(rng, dtype)
    first = m(X)
    flat, rebuild = destructure(m)
    np.testing.assert_array_equal(flat[:48], m[0].cell.Wi.value.ravel("F"))
    other = rebuild(flat)
    assert other[0].at_start
    np.testing.assert_array_equal(other(X), first)
    _, kept = destructure(m, keep_state=True)
    np.testing.assert_array_equal(kept(flat)(X), m(X))


def test_gradient_flows_through_a_rebuilt_recurrent_model(rng):
    m = Chain(f64(LSTM(3, 4, learn_init=True)), f64(Dense(4, 2)))
    X = sequence(rng, np.float64)
    flat, rebuild = destructure(m)
    with Tape() as tape:
        v = tape.watch(flat)
        tape.backward((rebuild(v)(X) ** 2).sum())
    with Tape() as tape:
        tape.backward((m(X) ** 2).sum())
    wanted = np.concatenate([p.grad.ravel("F") for p in params(m)])
    np.testing.assert_allclose(v.grad, wanted, rtol=1e-10, atol=1e-12)


def test_f64_converts_the_running_state(rng):
    m = deep()
    X = sequence(rng, np.float32)
    m(X)
    wide = f64(m)
    for path, array in state_dict(wide, include_state=True).items():
        assert array.dtype == np.float64
        np.testing.assert_array_equal(array, state_dict(m, include_state=True)[path])
    np.testing.assert_allclose(wide(X), m(X), rtol=1e-4, atol=1e-5)


def test_outputsize_asks_and_never_steps(rng):
    m = Chain(Embedding(10, 3), deep(), lambda y: y[:, :, -1])
    m(rng.integers(10, size=(B, T)))
    before = state_dict(m, include_state=True)
    assert outputsize(m, (7, 9)) == (2, 7)
    assert outputsize(m[1], (3, 7)) == (2, 7)
    after = state_dict(m, include_state=True)
    assert before.keys() == after.keys()
    for path in before:
        np.testing.assert_array_equal(before[path], after[path])
    with pytest.raises(ShapeError):
        outputsize(m[1], (4, 7))


def test_the_summary_shows_every_state_and_a_reset_shows_the_start(rng):
    m = Chain(LSTM(3, 4), Dense(4, 2))
    assert repr(m) == "Chain(Recur(LSTMCell(3 => 4)), Dense(4 => 2))"
    assert "Recur(LSTMCell(3 => 4)),  128 parameters, 512 bytes" in summary(m)
    assert "state: start" in summary(m)
    m(sequence(rng, np.float32))
    assert "state: batch 2" in summary(m)
    assert "state: start" in summary(reset(m))
