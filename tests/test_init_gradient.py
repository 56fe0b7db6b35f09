"""Where the initial state gets gradient: every placement of reset, truncate and scope."""

from __future__ import annotations

import numpy as np
import pytest

import recur
from recur import GRU, LSTM, RNN, GRUv3, Recur, Tape, ops
from recur.cells import LSTMCell, RNNCell

X1, X2 = np.array([2.0]), np.array([3.0])


def scalar(**options) -> Recur:
    """y' = 5 x + 4 y, from 7."""
    cell = RNNCell(1, 1, ops.identity, dtype=np.float64)
    cell.Wi, cell.Wh, cell.b = [[5.0]], [[4.0]], [0.0]
    options.setdefault("learn_init", True)
    return Recur(cell, init=np.array([7.0]), **options)


def last(m):
    m(X1)
    return m(X2).sum()


def init_grad(f, m):
    return recur.gradient(f, m)["init"].item()


PLACEMENTS = {
    "new layer, no reset": (lambda m: None, last, 16),
    "reset outside": (lambda m: (m(X1), m.reset()), last, 16),
    "reset inside": (lambda m: m(X1), lambda m: last(m.reset()), 16),
    "reset between two steps": (
        lambda m: None,
        lambda m: (m(X1) + m.reset()(X2)).sum(),
        4 + 4,
    ),
    "second scope without reset": (lambda m: recur.gradient(last, m), last, 0),
    "warm-up before the scope": (lambda m: m(X1), last, 0),
    "warm-up inside the scope": (lambda m: None, lambda m: [m(X1), m(X2).sum()][1], 16),
    "truncate before the first step": (lambda m: None, lambda m: last(m.truncate()), 0),
    "truncate between, early output in the loss": (
        lambda m: None,
        lambda m: (m(X1) + m.truncate()(X2)).sum(),
        4,
    ),
    "reset after truncate": (
        lambda m: None,
        lambda m: [m.truncate()(X1), last(m.reset())][1],
        16,
    ),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_init_gets_the_true_derivative_wherever_reset_is_called(placement):
    before, f, expected = PLACEMENTS[placement]
    m = scalar()
    before(m)
    assert init_grad(f, m) == expected


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_with_init_grad_scope_only_a_reset_inside_links_init(placement):
    before, f, _ = PLACEMENTS[placement]
    m = scalar(init_grad="scope")
    before(m)
    linked = {"reset inside": 16, "reset between two steps": 4, "reset after truncate": 16}
    grads = recur.gradient(f, m)
    if placement in linked:
        assert grads["init"].item() == linked[placement]
    else:
        assert grads["init"] is None


def test_the_gradient_of_the_entering_state_can_be_read():
    m = scalar(init_grad="scope")
    m.reset()
    assert recur.gradient(last, m).state(m) == [16.0]  # at START, in the shape of init
    grads = recur.gradient(last, m)  # carried, in the shape of the state
    np.testing.assert_array_equal(grads.state(m), [[16.0]])
    assert grads["init"] is None
    m = LSTM(2, 3, dtype=np.float64, init_grad="scope")
    m(np.ones((2, 4)))
    state = recur.gradient(lambda m: m(np.ones((2, 4))).sum(), m).state(m)
    assert [part.shape for part in state] == [(3, 4), (3, 4)]
    assert state[0].any() and state[1].any()


def test_a_failed_first_call_does_not_lose_the_entering_state():
    m = scalar(init_grad="scope")

    def f(m):
        with pytest.raises(recur.ShapeError):
            m(np.ones(2), lengths=[1])
        with pytest.raises(recur.ShapeError):
            m(np.ones((1, 1, 2)), mask=np.ones((3, 3), bool))
        return last(m)

    assert recur.gradient(f, m).state(m) == [16.0]


@pytest.mark.parametrize("layer", [RNN, LSTM, GRU, GRUv3])
@pytest.mark.parametrize("column", [False, True])
def test_init_is_broadcast_and_its_gradient_is_the_sum_over_the_batch(layer, column, rng):
    n = 2 if layer is LSTM else 1
    shape = (4, 1) if column else (4,)
    given = tuple(rng.normal(size=shape) for _ in range(n))
    m = layer(3, 4, dtype=np.float64, learn_init=True, init_state=given)
    xs = rng.normal(size=(3, 3, 5))
    paths = ["init"] if n == 1 else ["init.h", "init.c"]

    def loss(m, columns):
        return sum((m(x[:, columns]) ** 2).sum() for x in xs)

    together = recur.gradient(lambda m: loss(m, slice(None)), m)
    alone = []
    for b in range(5):
        m.reset()
        alone.append(recur.gradient(lambda m, b=b: loss(m, slice(b, b + 1)), m))
    for path in paths:
        assert together[path].shape == shape
        np.testing.assert_allclose(together[path], sum(g[path] for g in alone), rtol=1e-12)
    m.reset()
    sequence = recur.gradient(lambda m: (m(np.stack(xs, -1)) ** 2).sum(), m)
    vectors = []
    for b in range(5):
        m.reset()
        vectors.append(recur.gradient(lambda m, b=b: loss(m, b), m))
    for path in paths:
        np.testing.assert_allclose(sequence[path], together[path], rtol=1e-10)
        np.testing.assert_allclose(sum(g[path] for g in vectors), together[path], rtol=1e-10)


def test_one_part_of_a_state_may_be_learned_alone(rng):
    h, c = rng.normal(size=(2, 4))
    cell = LSTMCell(3, 4, dtype=np.float64)
    both = Recur(cell, (h, c), learn_init=True)
    X = rng.normal(size=(3, 2, 5))

    def loss(m):
        return (m(X) ** 2).sum()

    want = recur.gradient(loss, both)
    for part in ("h", "c"):
        m = Recur(cell, (h, c), learn_init=(part,))
        assert [path for path in recur.named_params(m) if "init" in path] == [f"init.{part}"]
        assert list(recur.buffers(m)) == [f"init.{'c' if part == 'h' else 'h'}"]
        np.testing.assert_array_equal(recur.gradient(loss, m)[f"init.{part}"], want[f"init.{part}"])
    assert "init" in recur.named_params(RNN(3, 4, learn_init="h"))
    with pytest.raises(recur.StateError, match=r"LSTM\(3 => 4\): learn_init names 'x'.*h, c"):
        Recur(cell, learn_init=("x",))
    with pytest.raises(recur.StateError, match="parts of the state are h"):
        GRU(3, 4, learn_init=("c",))


def test_init_is_no_parameter_by_default_and_training_leaves_it():
    m = scalar(learn_init=False)
    assert list(recur.named_params(m)) == ["cell.Wi", "cell.Wh", "cell.b"]
    grads = recur.gradient(last, m)
    with pytest.raises(recur.RecurError, match=r"not a parameter.*learn_init=True"):
        grads["init"]
    with Tape() as tape:
        tape.backward(last(m.reset()))
    np.testing.assert_array_equal(m.init, [7.0])
    assert isinstance(m.init, np.ndarray)


def test_the_first_step_after_reset_sees_init_as_it_then_is():
    for learn_init in (True, False):
        m = scalar(learn_init=learn_init)
        m.reset()
        m.init[...] = [1.0]
        np.testing.assert_array_equal(m(X1), [5 * 2 + 4 * 1])
        m.init[...] = [100.0]
        np.testing.assert_array_equal(m(X1), [5 * 2 + 4 * 14])
        m.reset()
        np.testing.assert_array_equal(m.state, [100.0])


def test_assigning_init_copies_into_it_and_checks_its_shape():
    m = scalar()
    held, array = m.init, np.array([3.0])
    m.init = array
    array[...] = 8.0
    assert m.init is held and held.value == [3.0]
    lstm = LSTM(2, 3, learn_init="h")
    lstm.init = (np.ones(3), np.full(3, 2.0))
    assert isinstance(lstm.init.h, recur.Param) and lstm.init.h.value[0] == 1
    assert lstm.init.c[0] == 2
    for bad in (np.ones(2), np.ones((3, 4))):
        with pytest.raises(recur.ShapeError):
            lstm.init = (bad, bad)
    with pytest.raises(recur.StateError):
        lstm.init = np.ones(3)
    assert lstm.init.c[0] == 2


def test_two_layers_share_a_learned_start_and_their_gradients_add(rng):
    cell = RNNCell(2, 3, dtype=np.float64)
    a = Recur(cell, rng.normal(size=3), learn_init=True)
    b = Recur(cell, a.init)
    assert b.init is a.init
    assert Recur(cell, a.init, learn_init=True).init is a.init
    assert len(recur.params([a, b])) == 4
    x, z = rng.normal(size=(2, 2, 4))
    both = recur.gradient(lambda ms: (ms[0](x) + ms[1](z)).sum(), [a, b])
    alone = []
    for m, given in ((a, x), (b, z)):
        m.reset()
        alone.append(recur.gradient(lambda m, given=given: m(given).sum(), m))
    np.testing.assert_allclose(both["0.init"], alone[0]["init"] + alone[1]["init"], rtol=1e-12)


def test_a_given_state_is_a_constant_and_init_gets_zero():
    m = Recur(scalar().cell, init=[7.0], state=[1.0], learn_init=True)
    grads = recur.gradient(last, m)
    assert grads["init"] == [0.0]
    np.testing.assert_array_equal(grads["cell.Wh"], [[4 * 1 + 14]])


def test_a_scope_that_only_calls_the_layer_gives_zero_gradients():
    m = scalar()
    grads = recur.gradient(lambda m: [m(X1), 0.0][1], m)
    assert all(not grads[path].any() for path in recur.named_params(m))


def test_history_is_kept_beyond_a_scope_only_on_request():
    m = scalar()
    recur.gradient(lambda m: m(X1).sum(), m)
    assert init_grad(lambda m: m(X2).sum(), m) == 0
    m.reset()
    recur.gradient(lambda m: m(X1).sum(), m, keep_history=True)
    assert init_grad(lambda m: m(X2).sum(), m) == 16
    with Tape(keep_history=True):
        m.reset()
        m(X1)
    assert isinstance(m(X2), np.ndarray)  # outside a scope nothing is recorded


def test_after_an_exception_in_a_scope_the_completed_steps_keep_their_values():
    m = scalar()
    with pytest.raises(RuntimeError), Tape():
        m(X1)
        raise RuntimeError
    np.testing.assert_array_equal(m.state, [[38.0]])
    assert isinstance(m.state, np.ndarray)
    assert init_grad(lambda m: m(X2).sum(), m) == 0
