"""Single steps of a whole Chain in one call, against the general way, layer by layer.

The twin of a chain is called inside a transaction, where every layer makes its own call: the same
kernels, so the same bits.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import weakref
from contextlib import nullcontext

import numpy as np
import pytest

import recur
from recur import GRU, LSTM, RNN, Chain, Dense, Dropout, GRUv3, Param, Recur, Tape, ops
from recur.layers import containers
from recur.module import Module, transaction
from recur.regularise import WeightDrop


def chain(dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    options = {"dtype": dtype, "rng": rng}
    return Chain(
        LSTM(3, 5, **options),
        Dropout(0.5, rng=rng),
        GRU(5, 4, **options),
        ops.tanh,
        Dense(4, 4, ops.relu, **options),
        Dense(4, 2, **options),
    )


def twins(dtype=np.float64):
    return chain(dtype), chain(dtype)


def slow(m, x):
    with transaction():
        return m(x)


def is_live(m):
    """Whether the next step of the chain is one call."""
    return m._live is not None and m._live.complete


def same(a, b):
    a, b = (s if isinstance(s, tuple) else (s,) for s in (a, b))
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(recur.value(x), recur.value(y), strict=True)


def same_states(m, twin):
    want = recur.states(twin)
    for path, state in recur.states(m).items():
        same(state, want[path])


def follow(m, twin, rng, steps=4, batch=None):
    """Steps both alike; the chain is live then, and its states have not been looked at."""
    n_in = recur.params(m)[0].shape[1]
    for _ in range(steps):
        x = rng.normal(size=(n_in,) if batch is None else (n_in, batch))
        same(m(x), slow(twin, x))
    assert is_live(m)


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("batch", [None, 1, 4, 70])
def test_a_stream_of_a_chain_has_the_bits_of_its_layers(batch, dtype, rng):
    m, twin = twins(dtype)
    for step in range(6):
        x = rng.normal(size=(3,) if batch is None else (3, batch)).astype(dtype)
        y, want = m(x), slow(twin, x)
        same(y, want)
        assert y.dtype == dtype and y.T.flags.c_contiguous and y.flags.writeable
        assert is_live(m) == (step > 0)
    same_states(m, twin)


@pytest.mark.parametrize("layer", [RNN, LSTM, GRU, GRUv3])
def test_chains_of_any_cell_stream(layer, dtype, rng):
    m, twin = (
        Chain(*(layer(3, 3, dtype=dtype, rng=np.random.default_rng(i)) for i in range(3)))
        for _ in range(2)
    )
    follow(m, twin, rng, batch=2)
    same_states(m, twin)


def test_steps_that_use_threads_have_the_bits_of_one_thread(rng):
    m, twin = (
        Chain(LSTM(200, 300, rng=np.random.default_rng(0)), Dense(300, 300, rng=rng_of(1)))
        for _ in range(2)
    )
    follow(m, twin, rng, batch=8)
    same_states(m, twin)


def rng_of(seed):
    return np.random.default_rng(seed)


def test_any_strides_and_dtype_of_the_input_stream_alike(rng):
    m, twin = twins()
    follow(m, twin, rng, batch=4)
    wide = rng.normal(size=(6, 9))
    for x in (
        wide[:3, :4],
        wide[::2, ::-2][:, :4],
        np.asfortranarray(wide[:3, :4]),
        wide[:3, :4].astype(np.float32),
        rng.integers(0, 2, (3, 4)),
        rng.integers(0, 2, (3, 4)).astype(bool),
    ) * 2:
        same(m(x), slow(twin, x))


def test_an_output_shares_no_memory_with_the_stream(rng):
    m, twin = twins()
    for _ in range(5):
        x = rng.normal(size=3)
        y = m(x)
        same(y, slow(twin, x))
        y[...] = np.nan
        x[...] = np.nan


def test_chains_in_chains_and_chains_with_names_stream(rng):
    def build():
        a, b, c, d = chain(), chain(seed=1), chain(seed=2), chain(seed=3)
        return Chain(
            front=Chain(a[0], Chain(Dropout(0.2), a[2])), back=Chain(x=Dense(4, 3, rng=rng_of(4)),
            y=b[0]), end=ops.identity, head=Dense(5, 2, rng=rng_of(5), dtype=np.float64),
        ), (c, d)  # fmt: skip

    (m, _), (twin, _) = build(), build()
    for model in (m, twin):
        model["back"].layers["x"] = Dense(4, 3, rng=rng_of(4), dtype=np.float64)
    follow(m, twin, rng)
    for model in (m, twin):  # a name in a dict is given to another layer
        model["back"].layers["y"] = LSTM(3, 5, rng=rng_of(7), dtype=np.float64)
    follow(m, twin, rng)
    for model in (m, twin):
        model.layers["head"] = Dense(5, 2, rng=rng_of(8), dtype=np.float64)
    follow(m, twin, rng)
    same_states(m, twin)


# ---------------------------------------------------------------------- what happens between steps


def another_dense(m, place=5, act=ops.identity, out=2):
    layers = list(m.layers)
    layers[place] = Dense(4, out, act, rng=rng_of(9), dtype=np.float64)
    m.layers = tuple(layers)


def another_cell(m):
    m[0].cell = recur.LSTMCell(3, 5, dtype=np.float64, rng=rng_of(8))


def another_layer(m):
    m.layers = (LSTM(3, 5, dtype=np.float64, rng=rng_of(8)), *m.layers[1:])
    m[0].state = tuple(np.full((5, m[2].state.shape[1]), 0.5) for _ in range(2))


def flat_write(m):
    (flat,) = recur.flatten_parameters(m)
    with flat.writing() as a:
        a[...] *= 0.5


def refused(m, x=np.ones((9, 4))):  # noqa: B008
    with pytest.raises(recur.RecurError):
        m(x)


def failed(m):
    def fail(y):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        Chain(*m.layers, fail)(np.ones((3, 4)))


def saved_and_loaded(m):
    held = recur.state_dict(m, include_state=True)
    recur.reset(m)
    recur.load_state_dict(m, held)


EVENTS = {
    "a write": lambda m: m[0].cell.Wh.__setitem__(..., 0.25),
    "a write to the last layer": lambda m: m[5].weight.__imul__(2.0),
    "a bias": lambda m: m[4].bias.__iadd__(1.0),
    "an attribute": lambda m: setattr(m[5], "weight", np.full((2, 4), 0.125)),
    "another Param": lambda m: setattr(m[5], "weight", Param(np.full((2, 4), 0.125))),
    "no bias": lambda m: setattr(m[5], "bias", None),
    "another activation": lambda m: setattr(m[5], "act", ops.tanh),
    "a flat buffer": flat_write,
    "an optimiser": lambda m: recur.update(
        recur.setup(recur.Descent(0.1), m),
        m,
        recur.gradient(lambda m: m(np.ones((3, 4))).sum(), no_dropout(m)),
    ),
    "another head": another_dense,
    "another cell": another_cell,
    "another layer": another_layer,
    "reading all states": recur.states,
    "reading one state": lambda m: m[2].state,
    "setting all states": lambda m: recur.set_states(m, recur.states(m)),
    "setting one state": lambda m: setattr(m[0], "state", (np.ones((5, 4)), np.zeros((5, 4)))),
    "reset": recur.reset,
    "reset of one": lambda m: m[0].reset(),
    "reset of some": lambda m: recur.reset(m, mask=[True, False, False, True]),
    "truncate": recur.truncate,
    "truncate of one": lambda m: m[2].truncate(),
    "reindex": lambda m: recur.reindex(m, [3, 1, 0, 0]),
    "saving": lambda m: recur.state_dict(m, include_state=True),
    "loading": saved_and_loaded,
    "a copy": copy.deepcopy,
    "a pickle": pickle.dumps,
    "printing": recur.summary,
    "one layer alone": lambda m: [m[0](np.ones((3, 4))) for _ in range(3)],
    "the last layer alone": lambda m: [m[2](np.ones((5, 4))) for _ in range(3)],
    "a part of the chain": lambda m: [m[2:](np.ones((5, 4))) for _ in range(4)],
    "a chain around it": lambda m: [Chain(m)(np.ones((3, 4))) for _ in range(3)],
    "a running chain around it": lambda m: [c(np.ones((3, 4))) for c in [Chain(m)] * 4],
    "a parallel around it": lambda m: recur.Parallel("+", m)(np.ones((3, 4))),
    "a scope": lambda m: recur.gradient(lambda m: m(np.ones((3, 4))).sum(), no_dropout(m)),
    "a sequence": lambda m: m(np.ones((3, 4, 2))),
    "a list": lambda m: m([np.ones((3, 4))] * 2),
    "lengths": lambda m: m(np.ones((3, 4, 2)), lengths=np.array([1, 2, 2, 0])),
    "a refused call": refused,
    "a batch that is refused": lambda m: refused(m, np.ones((3, 7))),
    "a chain that fails": failed,
    "no weights for a moment": lambda m: dropped(m),
    "strictness": lambda m: setattr(m[0], "strict_dtype", False),
}


def no_dropout(m):
    m[1].p = 0.0
    return m


def dropped(m):
    wrapped = WeightDrop(m[0], "Wh", 0.5, active=True)
    wrapped.set_mask("Wh", np.arange(m[0].cell.Wh.size).reshape(m[0].cell.Wh.shape) % 2)
    m(np.ones((3, 4)))
    m(np.ones((3, 4)))
    wrapped.remove()


@pytest.mark.parametrize("event", EVENTS)
def test_whatever_happens_between_two_steps_of_a_stream_is_seen(event, rng):
    m, twin = twins()
    follow(m, twin, rng, batch=4)
    for _ in range(2):
        EVENTS[event](m)
        with nullcontext() if event == "a chain that fails" else transaction():
            EVENTS[event](twin)
        follow(m, twin, rng, batch=4)
    same_states(m, twin)


def test_states_are_read_exactly_at_every_step(rng):
    m, twin = twins()
    for step in range(6):
        x = rng.normal(size=3)
        same(m(x), slow(twin, x))
        assert is_live(m) == (step > 0)
        same_states(m, twin)
        assert not is_live(m)


def test_a_stream_uses_its_memory_again_once_all_states_were_taken_back(rng):
    m, twin = twins()
    follow(m, twin, rng)
    stepper = m._live
    recur.states(m)
    follow(m, twin, rng)
    assert m._live is stepper


def test_a_layer_that_left_the_chain_keeps_its_state(rng):
    m, twin = twins()
    follow(m, twin, rng)
    left, twin_left = m[0], twin[0]
    for model in (m, twin):  # the same cell, so the same kernel, and a state of its own
        model.layers = (Recur(model[0].cell), *model.layers[1:])
    follow(m, twin, rng)
    same(left.state, twin_left.state)
    x = rng.normal(size=3)
    same(left(x), slow(twin_left, x))


def test_modes_are_seen(rng):
    m = chain()
    m(np.ones(3))
    m(np.ones(3))
    assert is_live(m)
    recur.trainmode(m)
    ys = [m(np.ones(3)) for _ in range(8)]
    assert m._live is None and m[0]._live is None
    assert len({y.tobytes() for y in ys[4:]}) > 1
    twin = copy.deepcopy(m)
    for model in (m, twin):
        recur.testmode(model)
    follow(m, twin, rng)
    m[1].active = True
    twin[1].active = True
    m[1].p = twin[1].p = 1.0  # everything is dropped
    for _ in range(3):
        x = rng.normal(size=3)
        same(m(x), slow(twin, x))


def test_a_scope_in_the_middle_goes_on_from_the_stream_and_back(rng):
    m, twin = (no_dropout(model) for model in twins())
    follow(m, twin, rng, batch=2)
    xs = rng.normal(size=(3, 3, 2))
    with Tape() as tape:
        loss = sum((m(x) ** 2).sum() for x in xs) + sum((twin(x) ** 2).sum() for x in xs)
        tape.backward(loss)
        with recur.paused():
            follow(m, twin, rng, batch=2)
    for p, q in zip(recur.params(m), recur.params(twin), strict=True):
        same(p.grad, q.grad)
    follow(m, twin, rng, batch=2)
    same_states(m, twin)


# ---------------------------------------------------------------------- copies


@pytest.mark.parametrize(
    "way",
    [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), recur.f64],
    ids=["copy", "deepcopy", "pickle", "f64"],
)
def test_a_copy_in_the_middle_of_a_stream_goes_on_alone(way, rng):
    m, twin = twins()
    follow(m, twin, rng, batch=2)
    other = way(m)
    assert other._live is None and not is_live(m)
    for _ in range(3):
        m(np.ones((3, 2)))
    follow(other, twin, rng, batch=2)
    assert recur.f32(other)[0].state[0].dtype == np.float32


def test_a_chain_that_streams_has_the_parts_it_had():
    m = chain()
    paths, text = list(recur.named_params(m)), repr(m)
    for _ in range(3):
        m(np.ones(3))
    assert is_live(m)
    assert list(recur.named_params(m)) == paths and repr(m) == text
    assert [name for name, _ in m.fields()] == ["layers"]
    assert [name for name, _ in m[5].fields()] == ["weight", "bias", "act", "strict_dtype"]


def test_a_chain_that_streams_is_freed():
    m = chain()
    for _ in range(3):
        m(np.ones(3))
    gone = weakref.ref(m)
    del m
    gc.collect()
    assert gone() is None


# ---------------------------------------------------------------------- what does not stream


class Twice(Module):
    def __call__(self, x):
        return x * 2


class Doubled(Dense):
    def apply(self, x):
        return super().apply(x) * 2


class Longer(Chain):
    def run(self, xs, options):
        return super().run(xs, options) + 1


OTHERS = {
    "a layer twice": lambda m: Chain(m[2], Dense(4, 5, dtype=np.float64, rng=rng_of(1)), m[2]),
    "a function": lambda m: Chain(m[0], lambda x: x * 2),
    "NumPy's tanh": lambda m: Chain(m[0], np.tanh),
    "an activation with other bits": lambda m: Chain(m[0], ops.sigmoid),
    "a user's layer": lambda m: Chain(m[0], Twice()),
    "a subclass": lambda m: Chain(m[0], Doubled(5, 2, dtype=np.float64, rng=rng_of(1))),
    "a chain of the user's": lambda m: Longer(m[0]),
    "a function first": lambda m: Chain(ops.tanh, m[0]),
    "two dtypes": lambda m: Chain(m[0], Dense(5, 2, rng=rng_of(1))),
    "no state": lambda m: Chain(m[4], m[5]),
    "no layers": lambda m: Chain(),
    "dropped weights": lambda m: Chain(WeightDrop(m[0], "Wh", 0.5)),
    "a user's activation": lambda m: Chain(LSTM(3, 5), Dense(5, 2, lambda x: x * 2)),
    "a cell of the user's": lambda m: Chain(Recur(lambda h, x: (h + x, h + x), np.zeros(3))),
    "lists of layers": lambda m: listed(Chain(m[0], m[5])),
    "a strict head": lambda m: Chain(Dense(3, 3, strict_dtype=True), LSTM(3, 2)),
}


def listed(m):
    m.layers = [m[0], Dense(5, 2, rng=rng_of(1), dtype=np.float64)]
    return m


@pytest.mark.parametrize("kind", OTHERS)
def test_other_chains_take_the_general_way(kind, rng):
    m, twin = (OTHERS[kind](model) for model in twins())
    n_in = {"a layer twice": 5, "no state": 4}.get(kind, 3)
    for model in (m, twin):
        for i, p in enumerate(recur.params(model)):
            p[...] = rng_of(i).normal(size=p.shape)
    for _ in range(5):
        x = rng.normal(size=n_in).astype(np.float32)
        same(m(x), slow(twin, x))
        assert m._live is None


# ---------------------------------------------------------------------- errors and threads


def test_errors_are_those_of_the_layers_and_change_nothing(rng):
    m, twin = twins()
    follow(m, twin, rng, batch=2)
    for x, error, text in (
        (np.ones((4, 2)), recur.ShapeError, "4 features on axis 0, expected 3"),
        (np.ones(3), recur.BatchSizeError, "batch 2, x has batch 1"),
        (np.ones((3, 2, 2, 2)), recur.ShapeError, "4 axes"),
        (np.array(["a", "b", "c"]), recur.ShapeError, "numbers"),
    ):
        with pytest.raises(error, match=text):
            m(x)
        same_states(m, twin)
        follow(m, twin, rng, batch=2)
    with pytest.raises(TypeError, match="no layer takes"):
        m(np.ones((3, 2)), speed=1)
    follow(m, twin, rng, batch=2)


def test_a_failure_around_a_running_chain_gives_its_states_back(rng):
    m, twin = twins()
    follow(m, twin, rng)
    with pytest.raises(RuntimeError), transaction():
        m(np.ones(3))
        raise RuntimeError
    same_states(m, twin)
    follow(m, twin, rng)


def test_a_write_while_a_stream_begins_is_seen(rng, monkeypatch):
    m, twin = twins()
    begin, written = containers.joint_stepper, []

    def slow_to_begin(*args):
        if not written:
            written.append(1)
            m[0].cell.Wh[...] = 0.5
        return begin(*args)

    monkeypatch.setattr(containers, "joint_stepper", slow_to_begin)
    x = rng.normal(size=3)
    for _ in range(2):
        same(m(x), slow(twin, x))
    assert written and not m._live
    twin[0].cell.Wh[...] = 0.5
    follow(m, twin, rng)


def test_states_can_be_read_while_another_thread_steps(rng):
    m = Chain(LSTM(64, 160), LSTM(160, 160))
    twin = copy.deepcopy(m)
    xs = rng.normal(size=(200, 64)).astype(np.float32)
    seen, done = [], threading.Event()

    def read():
        while not done.is_set():
            seen.append(m[1].state)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        ys = [m(x) for x in xs]
    finally:
        done.set()
        reader.join()
    same(tuple(ys), tuple(slow(twin, x) for x in xs))
    same_states(m, twin)
    assert seen


def during_a_step(m, x, action):
    """What `action` gives or raises while another thread is in a step of m, and the step's y."""
    ys = []
    thread = threading.Thread(target=lambda: ys.append(m(x)))
    thread.start()
    while not m._live.stepping and thread.is_alive():
        time.sleep(0)
    try:
        outcome = action()
    except recur.StateError as error:
        outcome = error
    thread.join()
    return outcome, ys[0]


@pytest.mark.parametrize("kind", ["chain", "layer"])
def test_during_a_step_another_call_is_refused_and_a_look_at_the_state_waits(kind):
    m = Chain(LSTM(64, 512), LSTM(512, 512)) if kind == "chain" else LSTM(64, 512)
    twin = copy.deepcopy(m)
    x = np.ones((64, 256), np.float32)  # milliseconds
    same(tuple(m(x) for _ in range(3)), tuple(slow(twin, x) for _ in range(3)))
    inside = m[1] if kind == "chain" else m
    for call in (lambda: m(x), lambda: m(np.ones((64, 256, 2))), lambda: inside(x)):
        outcome, y = during_a_step(m, x, call)
        same(y, slow(twin, x))
        assert isinstance(outcome, recur.StateError) and "inside a call already" in str(outcome)
        assert m._live.complete
    state, y = during_a_step(m, x, lambda: inside.state)
    same(y, slow(twin, x))
    same(state, (twin[1] if kind == "chain" else twin).state)
    same_states(m, twin)
