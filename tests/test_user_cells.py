"""Cells written by users: any callable, any state, several inputs; and where layers are found."""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref

import numpy as np
import pytest

import recur
from recur import GRU, LSTM, RNN, Cell, Chain, Dense, Module, Param, Recur, Tape, ops


def test_numbers_are_a_state_and_the_output_may_be_anything():
    m = Recur(lambda h, x: (h + x, x), 0)
    assert [m(2), m(3)] == [2, 3]
    assert m.state == 5 and type(m.state) is int
    assert [m(x) for x in range(1, 11)] == list(range(1, 11))
    assert m.state == 60
    m.reset()
    assert m.state == 0 and m.at_start


def test_an_accumulator_runs_over_a_sequence():
    m = Recur(lambda h, x: (h + x, x), np.zeros((1, 1)))
    m(np.array([2.0]))
    m(np.array([3.0]))
    Y = m(np.arange(1.0, 11).reshape(1, 1, 10))
    assert Y.shape == (1, 1, 10)
    np.testing.assert_array_equal(Y[0, 0], np.arange(1, 11))
    np.testing.assert_array_equal(m.state, [[60.0]])


def test_a_cell_may_take_several_inputs():
    m = Recur(lambda h, a, b: (h + a * b, h - a), 1.0)
    assert [m(2, 3), m(4, 5)] == [1 - 2, 7 - 4]
    assert m.state == 27
    m.reset()
    assert m([2, 4], [3, 5]) == [-1, 3]
    a, b = np.ones((1, 2, 4)), np.full((1, 2, 4), 2.0)
    assert m(a, b).shape == (1, 2, 4)
    m.reset()
    for mixed in ((a, b[:, :, 0]), (a, [b[:, :, 0]] * 4), (a, 3.0)):
        with pytest.raises(recur.ShapeError, match="some inputs are sequences"):
            m(*mixed)
    with pytest.raises(recur.ShapeError, match="4 and 3 steps"):
        m(a, b[:, :, :3])
    assert m.at_start


def test_a_cell_may_take_no_input():
    m = Recur(lambda n: (n + 1, n), 0)
    assert [m(), m(), m()] == [0, 1, 2]


class Counting(Module):
    """A cell with a nested state: (h, {"steps": n, "sum": (s,)})."""

    def __init__(self, rng):
        self.W = Param(rng.normal(size=(3, 3)) * 0.5)
        self.V = Param(rng.normal(size=(3, 2)) * 0.5)

    def __call__(self, state, x):
        h, more = state
        h = ops.tanh(self.W @ h + self.V @ x)
        return (h, {"steps": more["steps"] + 1, "sum": (more["sum"][0] + h,)}), h + more["sum"][0]


def nested_init():
    return (np.zeros((3, 2)), {"steps": 0, "sum": (np.zeros((3, 2)),)})


def test_nested_states_learn_cut_and_reset(rng):
    m = Recur(Counting(rng), nested_init())
    xs = rng.normal(size=(4, 2, 2))
    W, V = m.cell.W.value, m.cell.V.value
    h, s = np.zeros((3, 2)), np.zeros((3, 2))
    for x in xs:
        h = np.tanh(W @ h + V @ x)
        np.testing.assert_allclose(m(x), h + s, atol=1e-14)
        s = s + h
    assert m.state[1]["steps"] == 4
    np.testing.assert_allclose(m.state[1]["sum"][0], s, atol=1e-14)
    m.reset()
    recur.inspect.gradcheck(lambda m: [m(x) for x in xs], m)
    m.reset()
    with Tape():
        m(xs[0])
        assert isinstance(m.state[1]["sum"][0], recur.Tensor)
        recur.truncate(m)
        assert isinstance(m.state[1]["sum"][0], np.ndarray) and m.state[1]["steps"] == 1
    m.reset()
    assert m.state[1]["steps"] == 0


def test_a_learned_nested_init_gets_the_gradient_of_what_starts_from_it(rng):
    m = Recur(Counting(rng), (np.zeros((3, 2)), {"steps": 0.0, "sum": (np.ones((3, 2)),)}))
    learned = Recur(
        m.cell,
        (np.zeros((3, 2)), {"steps": 0.0, "sum": (np.ones((3, 2)),)}),
        learn_init=["0", "1.sum.0"],
    )
    assert list(recur.named_params(learned))[2:] == ["init.0", "init.1.sum.0"]
    x = rng.normal(size=(2, 2))
    grads = recur.gradient(lambda m: m(x).sum(), learned)
    np.testing.assert_array_equal(grads["init.1.sum.0"], np.ones((3, 2)))
    assert grads["init.0"].any()
    learned.reset()
    recur.inspect.gradcheck(lambda m: [m(x), m(x)], learned)
    scoped = Recur(m.cell, nested_init(), learn_init=["0"], init_grad="scope")
    grads = recur.gradient(lambda m: m(x).sum(), scoped)
    assert grads["init.0"] is None
    pair = Recur(lambda s, x: ((s[1], s[0] + x), s[0]), (np.ones(2), np.ones(2)), init_grad="scope")
    grads = recur.gradient(lambda ms: ms[0](x).sum() + 3.0 * ms[0](x).sum(), [pair, m])
    np.testing.assert_array_equal(grads.state(pair), [[1.0, 1.0], [3.0, 3.0]])
    assert recur.gradient(lambda m: m.reset()(x).sum(), scoped)["init.0"].any()


def test_states_and_outputs_of_ones_own_cell_share_no_memory():
    m = Recur(lambda h, x: (h, h), np.zeros(2))  # the state, the output and init are one array
    y = m(np.ones(2))
    y[...] = 7.0
    np.testing.assert_array_equal(m.state, [0, 0])
    np.testing.assert_array_equal(m.init, [0, 0])
    m.init[...] = 3.0
    np.testing.assert_array_equal(m.state, [0, 0])
    with Tape():
        y = m(np.ones(2))
        y[...] = 7.0
        np.testing.assert_array_equal(m.state, [0, 0])


def test_a_state_never_stays_an_alias_of_a_parameter():
    w = Param(np.ones(2))
    for learned in (True, False):
        m = Recur(lambda h, x: (w, h), np.zeros(2), learn_init=learned)
        m(1.0)
        w[...] = 5.0
        np.testing.assert_array_equal(m.state, [1.0, 1.0])
        w[...] = 1.0

    with Tape():
        m = Recur(lambda h, x: (w, h), np.zeros(2))
        m(1.0)
        w[...] = 5.0
        np.testing.assert_array_equal(recur.value(m.state), [1.0, 1.0])
        w[...] = 1.0

    def f(w):
        m = Recur(lambda h, x: (w, h), np.zeros(2))
        m(1.0)
        return (m(1.0) * 3.0).sum()

    np.testing.assert_array_equal(recur.gradient(f, w), [3.0, 3.0])


def test_a_cell_that_returns_something_else_is_refused_and_the_state_stays():
    for bad in (lambda h, x: h, lambda h, x: (h, x, x), lambda h, x: [h, x]):
        m = Recur(bad, 1.0)
        with pytest.raises(recur.StateError, match=r"expected the tuple \(state, y\)"):
            m(2.0)
        assert m.at_start


def test_an_exception_in_a_cell_leaves_every_state_as_it_was():
    inner = GRU(2, 2)
    fail = []

    def cell(n, x):
        y = inner(x)
        if fail:
            raise RuntimeError
        return n + 1, y

    m = Recur(cell, 0)
    m(np.ones((2, 3)))
    before = inner.state
    fail.append(1)
    for call in (lambda: m(np.ones((2, 3))), lambda: m(np.ones((2, 3, 4)))):
        with pytest.raises(RuntimeError):
            call()
        assert m.state == 1
        np.testing.assert_array_equal(inner.state, before)


def test_without_steps_the_output_needs_a_known_size(rng):
    m = Recur(lambda h, x: (h, x), 0.0)
    assert m([]) == []
    with pytest.raises(recur.ShapeError, match="n_out"):
        m(np.zeros((2, 3, 0)))

    class Sized:
        n_out = 5

        def __call__(self, h, x):
            return h, x

    assert Recur(Sized(), 0.0)(np.zeros((2, 3, 0))).shape == (5, 3, 0)


def test_outputs_fed_back_as_inputs_have_the_gradient_of_the_loop(rng):
    m = RNN(3, 3, dtype=np.float64, rng=rng)

    def loss(m, x):
        for _ in range(3):
            x = m(x)
        return x.sum()

    def clean(m, x):
        m.reset()
        return loss(m, x)

    recur.inspect.gradcheck(clean, m, rng.normal(size=(3, 2)))


# ---------------------------------------------------------------------- subclasses of Cell


class Leaky(Cell):
    """h' = a h + (1 - a) tanh(Wi x), output 2 h'."""

    def __init__(self, n_in, n_out, rng):
        self.n_in, self.n_out = n_in, n_out
        self.Wi = Param(rng.normal(size=(n_out, n_in)))
        self.a = Param(np.full(n_out, 0.9))

    def equations(self, x, h):
        a = self.a[:, None]
        h = a * h + (1.0 - a) * ops.tanh(ops.affine(self.Wi, x))
        return (h,), h * 2.0


def test_a_cell_of_equations_gets_everything_from_recur(rng):
    m = Recur(Leaky(2, 3, rng), learn_init=True)
    X = rng.normal(size=(2, 4, 5))
    Y = m(X)
    assert Y.shape == (3, 4, 5)
    m.reset()
    np.testing.assert_allclose(np.stack([m(X[:, :, t]) for t in range(5)], -1), Y, atol=1e-14)
    with pytest.raises(recur.BatchSizeError, match=r"Leaky\(2 => 3\)"):
        m(np.ones((2, 2)))
    with pytest.raises(recur.ShapeError, match="3 features"):
        m(np.ones((3, 4)))
    m.reset()
    assert m(np.ones(2)).shape == (3,)
    m.reset()
    recur.inspect.gradcheck(lambda m, X: m(X, lengths=[5, 2, 0, 1]), m, X)
    with pytest.raises(NotImplementedError):
        Recur(type("Empty", (Cell,), {"n_in": 2, "n_out": 3, "Wi": np.zeros((3, 2))})())(np.ones(2))


def test_a_cell_whose_call_is_overridden_is_called_as_it_is():
    class Twice(recur.RNNCell):
        def __call__(self, state, x):
            state, _ = super().__call__(state, x)
            return super().__call__(state, x)

    m = Recur(Twice(2, 3, dtype=np.float64))
    x = np.ones((2, 4))
    y = m(x)
    plain = Recur(recur.RNNCell.from_arrays(m.cell.Wi, m.cell.Wh, m.cell.b))
    plain(x)
    np.testing.assert_allclose(y, plain(x), atol=1e-14)


# ---------------------------------------------------------------------- where layers are found


@dataclasses.dataclass
class Pair:
    first: object
    second: object


class Slotted:
    __slots__ = ("layer",)

    def __init__(self, layer):
        self.layer = layer


def closure(layer):
    def cell(h, x):
        return h + 1, layer(x)

    return cell


def cyclic(layer):
    ring = [layer]
    ring.append(ring)
    return ring


HOLDERS = {
    "list": lambda m: [m],
    "tuple": lambda m: (1, (m,)),
    "dict": lambda m: {"k": {"l": m}},
    "dataclass": lambda m: Pair(None, m),
    "slots": Slotted,
    "partial": lambda m: functools.partial(map, m),
    "closure": closure,
    "closure cell in a Recur": lambda m: Recur(closure(m), 0),
    "bound method": lambda m: m.reset,
    "attribute": lambda m: types.SimpleNamespace(inner=[m]),
    "cycle": cyclic,
    "container": lambda m: Chain(m, recur.Parallel(np.add, m, Dense(2, 2))),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("scope", [False, True])
def test_reset_truncate_and_states_reach_a_layer_wherever_it_is_held(holder, scope):
    m = GRU(2, 2, learn_init=True)
    model = HOLDERS[holder](m)
    with Tape() if scope else recur.paused():
        m(np.ones((2, 3)))
        recur.truncate(model)
        assert isinstance(m.state, np.ndarray)
        assert len(recur.states(model)) == 1 + ("Recur" in holder)
        assert recur.reset(model) is model
        assert m.at_start
    assert any(p is m.cell.Wi for p in recur.params(model))


HIDDEN = {}


class Hiding:
    """Keeps its layer where no walk finds it."""

    def __call__(self, x):
        return HIDDEN["layer"](x)


def hiding(x):
    return HIDDEN["layer"](x)


@pytest.mark.parametrize("name", ["object", "function", "chain", "weak", "generator", "partial"])
def test_reset_refuses_a_model_with_a_stepped_layer_that_it_cannot_find(name):
    HIDDEN["layer"] = layer = GRU(2, 2)
    weak = weakref.ref(layer)

    class Weak(Module):
        def __call__(self, x):
            return weak()(x)

    class Generating(Module):
        def __init__(self):
            self.outputs = (layer(np.ones((2, 3))) for _ in range(9))

        def __call__(self, x):
            return next(self.outputs)

    beside = LSTM(2, 2)
    model = {
        "object": Hiding(),
        "function": hiding,
        "chain": Chain(beside, Hiding()),
        "weak": Weak(),
        "generator": Generating(),
        "partial": functools.partial(hiding),
    }[name]
    other = Chain(GRU(2, 2), Dense(2, 2))
    with Tape():
        model(np.ones((2, 3)))
        other(np.ones((2, 3)))
        held, held_beside = layer.state, beside.at_start
        for act in (recur.reset, recur.truncate):
            with pytest.raises(recur.StateError, match=r"GRU\(2 => 2\) was stepped inside"):
                act(model)
            assert layer.state is held and beside.at_start == held_beside
        recur.reset(other)  # layers of other models are left alone
        recur.reset(beside)
        recur.reset([model, layer]) if name != "chain" else recur.reset(layer)
        assert layer.at_start
    recur.reset(model)  # outside the scope nothing is known of it


def test_reset_looks_only_at_calls_of_that_model_in_the_open_scope():
    HIDDEN["layer"] = layer = GRU(2, 2)
    model = Hiding()
    with Tape():
        model(np.ones((2, 3)))
    with Tape():
        layer(np.ones((2, 3)))  # stepped, but not inside a call of the model
        recur.reset(model)
        assert not layer.at_start

    def make(hidden):
        def call(x):
            return HIDDEN["layer"](x) if hidden else x

        return call

    a, b = make(True), make(False)
    with Tape():
        a(np.ones((2, 3)))
        recur.reset(b)  # the same code, another function
        with pytest.raises(recur.StateError):
            recur.reset(a)


def test_noting_calls_keeps_no_model_alive_beyond_the_scope():
    HIDDEN["layer"] = layer = GRU(2, 2)
    model = Hiding()
    with Tape():
        model(np.ones((2, 3)))
    gone = weakref.ref(model)
    del model
    assert gone() is None and layer is HIDDEN["layer"]


def test_noting_calls_keeps_no_history_alive():
    layer = GRU(2, 2)

    def run():
        kept = [layer(np.ones((2, 1)))]

        def step():
            kept[0] = layer(np.ones((2, 1)))
            return kept

        step()
        past = weakref.ref(kept[0])
        del kept[:]
        return past

    with Tape() as tape:
        past = run()
        recur.truncate(layer)
        assert past() is None and tape.live == 0
