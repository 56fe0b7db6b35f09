"""`truncate`: what it cuts, what it leaves alone, and that the past is freed."""

from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import pytest

import recur
from recur import GRU, LSTM, RNN, Chain, Dense, GRUv3, Parallel, Recur, Tape, ops
from recur.cells import RNNCell

LAYERS = {"RNN": RNN, "LSTM": LSTM, "GRU": GRU, "GRUv3": GRUv3}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


def scalar(init=0.0, **options) -> Recur:
    """y' = 5 x + 4 y, from 7: small whole numbers."""
    cell = RNNCell(1, 1, ops.identity, dtype=np.float64)
    cell.Wi, cell.Wh, cell.b = [[5.0]], [[4.0]], [0.0]
    return Recur(cell, init=np.array([7.0]), learn_init=True, **options)


X1, X2 = np.array([2.0]), np.array([3.0])


def grads_of(f, m):
    g = recur.gradient(f, m)
    return [g[path].item() for path in ("cell.Wi", "cell.Wh", "cell.b", "init")]


def test_a_cut_stops_gradient_of_later_losses_and_the_weights_go_on_at_once():
    def f(m):
        m(X1)
        recur.truncate(m)
        return m(X2).sum()

    # y1 = 5*2 + 4*7 = 38 is a constant: dy2 = x2 dWi + y1 dWh + db
    assert grads_of(f, scalar()) == [3, 38, 1, 0]


def test_a_loss_of_outputs_made_before_the_cut_is_not_affected():
    def f(m):
        y1 = m(X1)
        recur.truncate(m)
        return (y1 + m(X2)).sum()

    assert grads_of(f, scalar()) == [3 + 2, 38 + 7, 2, 4]


def test_a_cut_between_loss_and_backward_changes_nothing():
    m = scalar()
    with Tape() as tape:
        loss = m(X1).sum() + m(X2).sum()
        recur.truncate(m)
        tape.backward(loss)
    cut = [p.grad.item() for p in recur.params(m)]
    m.reset()
    assert cut == grads_of(lambda m: m(X1).sum() + m(X2).sum(), m)


def test_init_gets_gradient_again_only_after_reset():
    def f(m):
        m(X1)
        m.truncate()
        y2 = m(X2)
        m.reset()
        return (y2 + m(X1)).sum()

    assert grads_of(f, scalar())[3] == 4
    assert grads_of(lambda m: m.reset().truncate()(X1).sum(), scalar()) == [2, 7, 1, 0]


def test_a_cut_at_the_start_is_a_copy_of_init_with_no_batch_yet():
    m = scalar()
    m.truncate()
    assert not m.at_start
    m.init[...] = 9.0
    np.testing.assert_array_equal(m.state, [7.0])
    assert m(np.ones((1, 3))).shape == (1, 3)  # it serves any batch
    m.reset()
    np.testing.assert_array_equal(m.state, [9.0])


@each_layer
def test_a_cut_changes_no_value_and_no_gradient_buffer(layer, rng):
    xs = rng.normal(size=(4, 3, 2)).astype(np.float32)
    outputs = []
    for cuts in range(3):
        m = layer(3, 4, rng=np.random.default_rng(1))
        with Tape() as tape:
            ys = []
            for x in xs:
                ys.append(m(x))
                for _ in range(cuts):
                    assert recur.truncate(m) is m
            tape.backward(ops.stack(ys).sum())
            before = [p.grad.copy() for p in recur.params(m)]
            recur.truncate(m)
            for p, g in zip(recur.params(m), before, strict=True):
                np.testing.assert_array_equal(p.grad, g)
        outputs.append(np.stack([recur.value(y) for y in ys]))
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])


def test_both_parts_of_an_lstm_state_are_cut(rng):
    m = LSTM(2, 3, dtype=np.float64)
    with Tape() as tape:
        x = tape.watch(rng.normal(size=(2, 4)))
        m(x)
        recur.truncate(m)
        assert all(isinstance(part, np.ndarray) for part in m.state)
        y = m(np.ones((2, 4)))
        (dx,) = tape.gradient(y.sum(), [x])
    assert not dx.any()


def test_every_layer_of_a_nested_model_is_cut():
    class Own:
        __slots__ = ("inner",)

        def __init__(self, inner):
            self.inner = inner

        def __call__(self, x):
            return self.inner[1]["k"](self.inner[0](x))

    layers = [GRU(2, 2) for _ in range(5)]
    shared = layers[4]
    model = Chain(
        layers[0],
        Parallel(np.add, layers[1], Own([layers[2], {"k": layers[3]}])),
        shared,
        shared,
        Dense(2, 1),
    )
    with Tape():
        for _ in range(2):
            model(np.ones((2, 3)))
        assert all(isinstance(m.state, recur.Tensor) for m in layers)
        recur.truncate(model)
        assert all(isinstance(m.state, np.ndarray) for m in layers)
    assert list(recur.states(model)) == [
        "layers.0",
        "layers.1.layers.0",
        "layers.1.layers.1.inner.0",
        "layers.1.layers.1.inner.1.k",
        "layers.2",
    ]


@each_layer
def test_truncate_every_k_is_a_loop_of_parts_with_cuts(layer, rng):
    m = layer(3, 4, dtype=np.float64, learn_init=True)
    X = rng.normal(size=(3, 2, 7))
    w = rng.normal(size=(4, 2, 7))
    for k in (1, 2, 3, 7, 9):

        def loop(m, X, k=k):
            loss = 0.0
            for start in range(0, 7, k):
                if start:
                    recur.truncate(m)
                for t in range(start, min(start + k, 7)):
                    loss = loss + (m(X[:, :, t]) * w[:, :, t]).sum()
            return loss

        m.reset()
        want, (of_m, of_x) = recur.withgradient(loop, m, X)
        for remat in (None, 2):
            m.reset()
            got, (dm, dx) = recur.withgradient(
                lambda m, X, k=k, remat=remat: (m(X, truncate_every=k, remat=remat) * w).sum(),
                m,
                X,
            )
            np.testing.assert_allclose(got, want, rtol=1e-12)
            for path in recur.named_params(m):
                np.testing.assert_allclose(dm[path], of_m[path], atol=1e-12)
            np.testing.assert_allclose(dx, of_x, atol=1e-12)


def test_chunked_backwards_add_up_to_the_loss_cut_at_the_same_places(rng):
    xs = rng.normal(size=(6, 3, 2))

    def total(m, cut):
        loss = 0.0
        for t, x in enumerate(xs):
            if t in cut:
                recur.truncate(m)
            loss = loss + (m(x) ** 2).sum()
        return loss

    m = LSTM(3, 4, dtype=np.float64, learn_init=True)
    whole = recur.gradient(lambda m: total(m, {2, 4}), m)
    m.reset()
    with Tape() as tape:
        for start in (0, 2, 4):
            tape.backward(sum((m(x) ** 2).sum() for x in xs[start : start + 2]))
            recur.truncate(m)
    for path, p in recur.named_params(m).items():
        np.testing.assert_allclose(p.grad, whole[path], rtol=1e-12)


@each_layer
def test_the_tape_does_not_grow_when_each_step_is_cut(layer):
    m = layer(2, 3, learn_init=True)
    x = np.ones((2, 1))
    with Tape() as tape:
        for t in range(1, 2001):
            m(x)
            recur.truncate(m)
            if t == 10:
                early = tape.live
        assert tape.live == early == 0


def test_the_past_is_freed_at_the_cut_without_a_cycle_collection():
    m = Chain(LSTM(2, 3), GRU(3, 3))
    gc.disable()
    try:
        with Tape():
            y = m(np.ones((2, 1)))
            for _ in range(5):
                y = m(np.ones((2, 1)))
            past = weakref.ref(m[0].state.h)
            del y
            assert past() is not None
            recur.truncate(m)
            assert past() is None
    finally:
        gc.enable()


def test_a_cut_is_noted_in_the_event_log_with_its_layer():
    m = LSTM(2, 3)
    with Tape(log=True) as tape:
        m(np.ones(2))
        recur.truncate(m)
        m(np.ones((2, 1, 4)), truncate_every=2)
        recur.reset(m)
    kinds = [(event["kind"], event["layer"]) for event in tape.events]
    steps = [kind for kind, layer in kinds if layer is m and kind not in ("enter", "leave")]
    assert steps == ["step", "cut", "sequence", "cut", "sequence", "reset"]


def test_truncate_outside_a_scope_leaves_a_running_state_as_it_is():
    m = GRU(2, 3)
    m(np.ones((2, 4)))
    before = m.state
    recur.truncate(m)
    np.testing.assert_array_equal(m.state, before)


def test_a_model_without_recurrent_layers_may_be_truncated_and_reset():
    m = Chain(Dense(2, 3))
    assert recur.truncate(m) is m and recur.reset(m) is m


STATES = {
    "tensor": lambda h: h,
    "pair": lambda h: (h, h),
    "list with a number": lambda h: [1.0, h],
    "dict": lambda h: {"h": h},
    "array": recur.value,
    "tuple of arrays": lambda h: (recur.value(h), recur.value(h)),
}


@pytest.mark.parametrize("form", STATES.values(), ids=STATES)
@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (recur.truncate, r"recur\.value\(state\)"),
        (recur.reset, r"cell\.initial_state\(\)"),
        (lambda state: recur.reindex(state, [0]), r"state\[:, index\]"),
    ],
    ids=["truncate", "reset", "reindex"],
)
def test_a_state_carried_by_hand_is_refused_as_it_is_no_model(form, call, remedy):
    with Tape() as tape:
        h = tape.watch(np.ones((3, 4)))
        with pytest.raises(recur.StateError, match=f"expected a model, got an? .*{remedy}"):
            call(form(h))


def test_a_model_without_recurrent_layers_is_no_state():
    own = [Dense(2, 3)]
    own.append(own)
    for model in (Dense(2, 3), [], own, (ops.tanh,), {"W": recur.Param(np.ones(2))}):
        assert recur.truncate(recur.reset(model)) is model


def test_memory_stays_flat_over_a_hundred_thousand_truncated_steps(rng):
    m, x = LSTM(2, 3), rng.standard_normal((2, 1)).astype(np.float32)
    held = []
    with Tape() as tape:
        for _ in range(5):
            for _ in range(20_000):
                m(x)
                recur.truncate(m)
            held.append((tape.live, sys.getallocatedblocks()))
    assert {live for live, _ in held} == {held[0][0]}
    assert held[-1][1] - held[0][1] < 1000  # 80,000 steps may not leave even one block each
