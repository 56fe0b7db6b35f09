"""The short ways of single steps, outside and inside a scope, against the general one.

The twin of a layer is called on sequences of one step, which never take a short way.
"""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import recur
from recur import GRU, LSTM, RNN, Chain, Dense, GRUv3, Param, Recur, Tape, ops
from recur.recurrent import recur as recur_module
from recur.regularise import WeightDrop

LAYERS = {"RNN": RNN, "LSTM": LSTM, "GRU": GRU, "GRUv3": GRUv3}
each_layer = pytest.mark.parametrize("name", LAYERS)


def pair(name, dtype=np.float64, **options):
    return [
        LAYERS[name](3, 5, dtype=dtype, rng=np.random.default_rng(0), **options) for _ in range(2)
    ]


def slow(m, x):
    """The step as a sequence."""
    return m(x[:, None, None])[:, 0, 0] if x.ndim == 1 else m(x[:, :, None])[:, :, 0]


def near(a, b):
    a, b = (s if isinstance(s, tuple) else (s,) for s in (a, b))
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(recur.value(x), recur.value(y), atol=1e-12)


def follow(m, twin, rng, steps=4, batch=None):
    shape = (3,) if batch is None else (3, batch)
    for _ in range(steps):
        x = rng.normal(size=shape)
        near(m(x), slow(twin, x))


@each_layer
@pytest.mark.parametrize("batch", [None, 1, 4])
def test_a_stream_equals_the_general_way(name, batch, dtype, rng):
    m, twin = pair(name, dtype)
    small = 1e-5 if dtype == np.float32 else 1e-12
    for _ in range(6):
        x = rng.normal(size=(3,) if batch is None else (3, batch)).astype(dtype)
        y, want = m(x), slow(twin, x)
        assert y.dtype == dtype and y.shape == want.shape
        assert y.T.flags.c_contiguous and y.flags.writeable
        np.testing.assert_allclose(y, want, rtol=small, atol=small)
    assert m._live is not None  # else this file tests nothing


EVENTS = {
    "a write": lambda m: m.cell.Wh.__setitem__(..., 0.25),
    "in place": lambda m: m.cell.Wi.__imul__(2.0),
    "the bias": lambda m: m.cell.b.__iadd__(1.0),
    "an attribute": lambda m: setattr(m.cell, "Wh", np.full(m.cell.Wh.shape, 0.125)),
    "another Param": lambda m: setattr(m.cell, "Wh", Param(np.full(m.cell.Wh.shape, 0.125))),
    "no bias": lambda m: setattr(m.cell, "b", None),
    "a flat buffer": lambda m: flat_write(m),
    "loading": lambda m: recur.load_state_dict(
        m,
        {**{k: v + 0.5 for k, v in recur.state_dict(m).items()}, **state_of(m)},
    ),
    "an optimiser": lambda m: recur.update(
        recur.setup(recur.Descent(0.1), m),
        m,
        recur.gradient(lambda m: m(np.ones((3, 4))).sum(), m),
    ),
    "the cell": lambda m: setattr(
        m, "cell", type(m.cell)(3, 5, dtype=np.float64, rng=np.random.default_rng(8))
    ),
    "reading the state": lambda m: m.state,
    "writing the state": lambda m: setattr(m, "state", m.state),
    "reset": recur.reset,
    "reset of some": lambda m: recur.reset(m, mask=[True, False, False, True]),
    "truncate": recur.truncate,
    "reindex": lambda m: recur.reindex(m, [3, 1, 0, 0]),
    "a scope": lambda m: recur.gradient(lambda m: m(np.ones((3, 4))).sum(), m),
    "a sequence": lambda m: m(np.ones((3, 4, 2))),
    "a list": lambda m: m([np.ones((3, 4))] * 2),
    "a refused call": lambda m: refused(m),
    "a batch that is refused": lambda m: refused(m, np.ones((3, 7))),
}


def flat_write(m):
    (flat,) = recur.flatten_parameters(m)
    with flat.writing() as a:
        a[...] *= 0.5


def state_of(m):
    return {k: v for k, v in recur.state_dict(m, include_state=True).items() if "state" in k}


def refused(m, x=np.ones((9, 4))):  # noqa: B008
    with pytest.raises(recur.RecurError):
        m(x)


@pytest.mark.parametrize("event", EVENTS)
@each_layer
def test_whatever_happens_between_two_steps_of_a_stream_is_seen(name, event, rng):
    m, twin = pair(name)
    follow(m, twin, rng, batch=4)
    assert m._live is not None
    for _ in range(2):
        for layer in (m, twin):
            EVENTS[event](layer)
        near(m.state, twin.state)
        follow(m, twin, rng, batch=4)
    assert m._live is not None


def test_options_and_activations_that_are_changed_are_seen(rng):
    m, twin = pair("RNN")
    follow(m, twin, rng)
    m.cell.act = twin.cell.act = ops.relu
    follow(m, twin, rng)
    m.cell.act = twin.cell.act = lambda x: ops.tanh(x) * 0.5
    follow(m, twin, rng)
    m.strict_dtype = True
    for _ in range(2):
        with pytest.raises(recur.ShapeError, match="strict_dtype"):
            m(np.ones(3, np.float32))
        with Tape():
            m(np.ones(3))
            with pytest.raises(recur.ShapeError, match="strict_dtype"):
                m(np.ones(3, np.float32))
        for _ in range(3):
            m(np.ones(3))
    m, _ = pair("GRU")
    m(np.ones((3, 3)))
    m(np.ones((3, 3)))
    m.reset()
    m.layout = "ftb"  # (features, time) now
    assert m(np.ones((3, 3))).shape == (5, 3)
    assert m.state.shape == (5, 1)
    m, twin = pair("LSTM")
    follow(m, twin, rng)
    m.cell.gate_act = twin.cell.gate_act = "hard_sigmoid"
    follow(m, twin, rng)


@pytest.mark.parametrize("scope", [False, True])
def test_two_axes_are_one_sample_with_layout_ftb_whatever_came_before(scope):
    m = GRU(3, 5, layout="ftb")
    with Tape() if scope else recur.paused():
        for _ in range(3):
            m(np.ones((3, 2, 4)))
        with pytest.raises(recur.BatchSizeError, match="batch 4, x has batch 1"):
            m(np.ones((3, 4)))


def test_a_weight_assigned_to_itself_lets_the_stream_go_on(rng):
    m, twin = pair("GRU")
    follow(m, twin, rng)
    m.cell.Wh = m.cell.Wh
    follow(m, twin, rng)
    assert m._live is not None and m._live.fresh


def test_a_write_while_a_stream_begins_is_seen(rng, monkeypatch):
    m, twin = pair("GRU")
    stepper, written = recur_module.Stepper, []

    def slow_to_begin(*args, **options):
        if not written:
            written.append(1)
            m.cell.Wh[...] = twin.cell.Wh[...] = 0.5
        return stepper(*args, **options)

    xs = rng.normal(size=(2, 3))
    want = [slow(twin, x) for x in xs]
    monkeypatch.setattr(recur_module, "Stepper", slow_to_begin)
    near(tuple(map(m, xs)), tuple(want))
    assert written
    follow(m, twin, rng)


def test_a_recorded_input_of_another_dtype_is_converted_and_gets_its_gradient(rng):
    m = LSTM(3, 5)
    x = rng.normal(size=(3, 2))
    dx = recur.gradient(lambda x: [m(x), m(x), m(x).sum()][2], x)
    assert dx.dtype == np.float64 and dx.all()


def test_dropped_weights_are_seen_by_a_running_stream(rng):
    m, twin = pair("LSTM")
    follow(m, twin, rng)
    wd, wt = (WeightDrop(layer, "Wh", 0.5, active=True) for layer in (m, twin))
    mask = rng.integers(0, 2, m.cell.Wh.shape)
    for wrapped in (wd, wt):
        wrapped.set_mask("Wh", mask)
    follow(m, twin, rng)
    for wrapped in (wd, wt):
        wrapped.remove()
    follow(m, twin, rng)


@each_layer
@pytest.mark.parametrize(
    "way",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), recur.f64],
    ids=["deepcopy", "pickle", "f64"],
)
def test_a_copy_in_the_middle_of_a_stream_goes_on_alone(name, way, rng):
    m, twin = pair(name)
    follow(m, twin, rng, batch=2)
    other = way(m)
    m(np.ones((3, 2)))
    follow(other, twin, rng, batch=2)
    narrow = recur.f32(other)
    assert all(
        part.dtype == np.float32
        for part in (narrow.state if isinstance(narrow.state, tuple) else (narrow.state,))
    )


@each_layer
def test_any_strides_and_dtype_of_the_input_stream_alike(name, rng):
    m, twin = pair(name)
    wide = rng.normal(size=(6, 9))
    for x in (
        wide[:3, :4],
        wide[::2, ::-2][:, :4],
        np.asfortranarray(wide[:3, :4]),
        wide[:3, :4].astype(np.float32),
        rng.integers(0, 2, (3, 4)),
        rng.integers(0, 2, (3, 4)).astype(bool),
        wide[:3, :4].tolist(),
    ) * 2:
        if isinstance(x, list):
            near(m(np.array(x)), slow(twin, np.array(x)))
        else:
            near(m(x), slow(twin, x))


def test_streams_of_layers_that_share_a_cell_have_states_of_their_own(rng):
    cell = recur.LSTMCell(3, 5, dtype=np.float64)
    a, b, c, d = (Recur(cell) for _ in range(4))
    follow(a, b, rng)
    follow(c, d, rng, steps=2)
    follow(a, b, rng)
    cell.Wh *= 0.5
    follow(a, b, rng)
    follow(c, d, rng)


def test_a_failed_chain_gives_back_the_state_of_a_running_stream(rng):
    m, twin = pair("GRU")
    broken = []

    def last(y):
        if broken:
            raise RuntimeError
        return y

    chain = Chain(m, last)
    follow(m, twin, rng)
    assert m._live is not None
    broken.append(1)
    with pytest.raises(RuntimeError):
        chain(np.ones(3))
    near(m.state, twin.state)
    broken.clear()
    for _ in range(3):
        x = rng.normal(size=3)
        near(chain(x), slow(twin, x))
    follow(m, twin, rng)


@each_layer
@pytest.mark.parametrize("batch", [None, 1, 4])
def test_recorded_steps_equal_the_general_way_in_values_and_gradients(name, batch, rng):
    m, twin = pair(name, learn_init=True)
    xs = rng.normal(size=(5, 3) if batch is None else (5, 3, batch))

    def loss(step):
        def f(m, *xs):
            total = 0.0
            for t, x in enumerate(xs):
                if t == 3:
                    recur.truncate(m)  # the next step starts from plain arrays
                y = step(m, x)
                total = total + (y * y).sum()
            return total

        return f

    want = recur.withgradient(loss(slow), twin, *xs)
    got = recur.withgradient(loss(lambda m, x: m(x)), m, *xs)
    near(got[0], want[0])
    near(m.state, twin.state)
    for path in recur.named_params(m):
        np.testing.assert_allclose(got[1][0][path], want[1][0][path], atol=1e-12)
    for a, b in zip(got[1][1:], want[1][1:], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_a_recorded_step_copies_what_it_will_need(rng):
    m, twin = pair("LSTM")
    x = np.ones((3, 2))

    def f(m, overwrite):
        total = 0.0
        for t in range(4):
            given = x * (t + 1)
            y = m(given)
            if overwrite:
                given[...] = np.nan
            total = total + (y * y).sum()
        return total

    got = recur.gradient(lambda m: f(m, True), m)
    want = recur.gradient(lambda m: f(m, False), twin)
    for path in recur.named_params(m):
        np.testing.assert_array_equal(got[path], want[path])


def test_a_scope_in_the_middle_of_a_stream_goes_on_from_it_and_back(rng):
    m, twin = pair("GRU")
    follow(m, twin, rng, batch=2)
    with Tape() as tape:
        follow(m, twin, rng, batch=2)
        loss = m(np.ones((3, 2))).sum() + twin(np.ones((3, 2))).sum()
        tape.backward(loss)
    near(m.cell.Wh.grad, twin.cell.Wh.grad)
    follow(m, twin, rng, batch=2)


def test_errors_of_short_ways_are_those_of_the_general_one(rng):
    m = LSTM(3, 5)
    for scope in (recur.paused(), Tape()):
        m.reset()
        with scope:
            for _ in range(3):
                m(np.ones((3, 2)))
            with pytest.raises(recur.ShapeError, match="4 features on axis 0, expected 3"):
                m(np.ones((4, 2)))
            with pytest.raises(recur.BatchSizeError, match="batch 2, x has batch 1"):
                m(np.ones(3))
            with pytest.raises(recur.ShapeError, match="4 axes"):
                m(np.ones((3, 2, 2, 2)))
            with pytest.raises(recur.ShapeError, match="numbers"):
                m(np.array(["a", "b", "c"]))
            assert m(np.ones((3, 2))).shape == (5, 2)


def test_a_chain_steps_on_as_its_layers_do(rng):
    a, b = (
        Chain(
            LSTM(3, 5, rng=np.random.default_rng(0), dtype=np.float64),
            GRU(5, 4, rng=np.random.default_rng(1), dtype=np.float64),
            Dense(4, 2, rng=np.random.default_rng(2), dtype=np.float64),
        )
        for _ in range(2)
    )
    follow(a, b, rng, steps=5)
    near(recur.states(a)["layers.1"], recur.states(b)["layers.1"])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sample_does_not_depend_on_the_others_in_a_cell_with_its_own_activation(dtype):
    m = recur.RNN(17, 9, lambda x: recur.ops.tanh(x) + x, dtype=dtype)
    x = np.random.default_rng(0).standard_normal((3, 17, 7)).astype(dtype)
    together = [m(step) for step in x]
    for sample in range(7):
        recur.reset(m)
        alone = [m(step[:, sample]) for step in x]
        assert all(np.array_equal(a, t[:, sample]) for a, t in zip(alone, together, strict=True))
