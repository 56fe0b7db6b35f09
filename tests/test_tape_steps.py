"""Loops over steps through the tape: recorded steps, slices and stacks, which are compiled."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from recur import GRU, LSTM, RNN, GRUv3, _kernels, ops, reset
from recur.errors import GraphUsedError
from recur.tape import Op, Param, Tape, Tensor, paused, record, value

CELLS = {"RNN": RNN, "LSTM": LSTM, "GRU": GRU, "GRUv3": GRUv3}
T = 7


@pytest.fixture(params=list(CELLS))
def layer(request, dtype, rng):
    return CELLS[request.param](3, 4, dtype=dtype, rng=rng)


def looped(m, x, step=lambda x, t: x[..., t]):
    return ops.stack([m(step(x, t)) for t in range(T)], -1)


def swept(m, X, dY, forward):
    """(output, gradient of X, gradients of the weights)."""
    reset(m)
    for p in (m.cell.Wi, m.cell.Wh, m.cell.b):
        p.grad = None
    with Tape() as tape:
        x = tape.watch(X)
        y = forward(m, x)
        tape.backward(y, dY)
    return [value(y), x.grad, m.cell.Wi.grad, m.cell.Wh.grad, m.cell.b.grad]


def close(found, expected, dtype):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 if dtype == np.float64 else 2e-5)


@pytest.mark.parametrize("batch", [1, 5])
def test_a_loop_has_the_values_and_gradients_of_the_sequence(layer, batch, dtype, rng):
    X, dY = (rng.standard_normal((n, batch, T)).astype(dtype) for n in (3, 4))
    close(swept(layer, X, dY, looped), swept(layer, X, dY, lambda m, x: m(x)), dtype)


def test_a_loop_over_vectors_has_the_gradients_of_the_sequence(layer, dtype, rng):
    X, dY = (rng.standard_normal((n, T)).astype(dtype) for n in (3, 4))
    of_loop = swept(layer, X, dY, looped)
    of_sequence = swept(layer, X[:, None], dY[:, None], lambda m, x: m(x))
    close(of_loop[2:], of_sequence[2:], dtype)
    close(of_loop[:2], [a[:, 0] for a in of_sequence[:2]], dtype)


def test_steps_may_lie_in_any_memory_order(layer, dtype, rng):
    X, dY = (rng.standard_normal((n, 2, T)).astype(dtype) for n in (3, 4))
    backwards = swept(layer, X, dY, lambda m, x: looped(m, x, lambda x, t: x[::-1, :, t][::-1]))
    close(backwards, swept(layer, X, dY, looped), dtype)


def test_numbers_in_the_other_byte_order_are_converted(layer, dtype, rng):
    X, dY = (rng.standard_normal((n, 2, T)).astype(dtype) for n in (3, 4))
    swapped = X.astype(X.dtype.newbyteorder())
    expected = swept(layer, X, dY, looped)
    close(swept(layer, swapped, dY, looped), expected, dtype)
    plain = swept(layer, X, dY, lambda m, x: looped(m, swapped))
    assert plain[1] is None
    close([plain[0], *plain[2:]], [expected[0], *expected[2:]], dtype)


def test_a_plain_step_may_be_written_after_its_call(layer, dtype, rng):
    X, dY = (rng.standard_normal((n, 2, T)).astype(dtype) for n in (3, 4))

    def run(overwrite):
        reset(layer)
        x = np.empty((3, 2), dtype, order="F")
        ys = []
        with Tape() as tape:
            for t in range(T):
                x[...] = X[..., t]
                ys.append(layer(x))
                if overwrite:
                    x.fill(np.nan)
            tape.backward(ops.stack(ys, -1), dY, accumulate=False)
        return layer.cell.Wi.grad.copy()

    np.testing.assert_array_equal(run(True), run(False))


def test_a_kept_graph_gives_the_same_gradient_each_time(layer, dtype, rng):
    X, dY = (rng.standard_normal((n, 2, T)).astype(dtype) for n in (3, 4))
    reset(layer)
    with Tape() as tape:
        x = tape.watch(X)
        y = looped(layer, x)
        found = []
        for keep in (True, True, False):
            tape.backward(y, dY, accumulate=False, keep_graph=keep)
            found.append([a.copy() for a in (x.grad, layer.cell.Wi.grad, layer.cell.Wh.grad)])
        with pytest.raises(GraphUsedError):
            tape.backward(y, dY)
    for again in found[1:]:
        for a, b in zip(again, found[0], strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_step_writes_into_no_gradient_that_others_hold(layer, dtype):
    given = []

    class Twice(Op):
        """Hands one array to both of its inputs, which it goes on holding."""

        def backward(self, sweep, node, grads):
            d = np.ones((4, 2), dtype, order="F")
            given.append(d)
            for x in node.inputs:
                sweep.add(x, d)

    reset(layer)
    with Tape() as tape:
        layer(np.ones((3, 2), dtype))
        before = layer.state
        layer(np.ones((3, 2), dtype))
        parts = [s[0] if isinstance(s, tuple) else s for s in (before, layer.state)]
        (loss,) = record(Twice("twice"), tuple(parts), [np.ones((), dtype)], None)
        of_state = tape.gradient(loss, parts)
    np.testing.assert_array_equal(given[0], 1)
    np.testing.assert_array_equal(of_state[1], 1)
    assert not np.array_equal(of_state[0], of_state[1])  # it got the later step's as well


def test_the_weights_of_a_cell_share_one_stack_of_gate_gradients(monkeypatch, rng):
    stacks = []

    class Watching:
        def __getattr__(self, name):
            return getattr(_kernels, name)

        def weight_gradient(self, dg, x, out, *, accumulate):
            stacks.append(dg)
            _kernels.weight_gradient(dg, x, out, accumulate=accumulate)

        def bias_gradient(self, dg, out, *, accumulate):
            stacks.append(dg)
            _kernels.bias_gradient(dg, out, accumulate=accumulate)

    monkeypatch.setattr("recur.tape.sweep._kernels", Watching())
    m = LSTM(3, 4)
    swept(m, np.ones((3, 2, T), np.float32), np.ones((4, 2, T), np.float32), looped)
    assert len(stacks) == 3
    assert all(dg is stacks[0] for dg in stacks)
    assert stacks[0].shape == (2 * T, 16)


def test_freeing_a_long_chain_of_steps_does_not_overflow_the_stack():
    m = RNN(1, 1)
    x = np.ones(1, np.float32)
    gc.disable()  # it would look at the growing chain again and again
    try:
        with Tape() as tape:
            m(x)
            first = weakref.ref(m.state)
            for _ in range(100_000):
                m(x)
            assert first() is not None
            assert m._state[0].node.tape is tape
            m.truncate()
            assert first() is None
    finally:
        gc.enable()


def test_a_step_while_paused_records_nothing_and_cuts_the_history(layer, dtype):
    x = np.ones((3, 2), dtype)
    reset(layer)
    with Tape():
        assert isinstance(layer(x), Tensor)
        with paused():
            assert isinstance(layer(x), np.ndarray)
        node = layer(x).node
        assert node.inputs[:2] == (None, None)


def test_a_stack_of_mixed_steps_is_that_of_numpy(dtype, rng):
    a, b = (rng.standard_normal((3, 2)).astype(dtype) for _ in "ab")
    with Tape() as tape:
        t, u = tape.watch(a), tape.watch(np.asfortranarray(b))
        for xs in ([t, u], [u, u], [u, b], [t, np.float64(1) * np.ones((3, 2))]):
            y = ops.stack(xs, -1)
            expected = np.stack([value(x) for x in xs], -1)
            np.testing.assert_array_equal(value(y), expected)
            assert y.dtype == expected.dtype
            np.testing.assert_array_equal(tape.gradient(y, [xs[0]], expected)[0].shape, (3, 2))
        np.testing.assert_array_equal(tape.gradient(ops.stack([u, u], -1).sum(), [u])[0], 2)


def test_the_gradient_of_an_index_of_any_kind_is_added_where_it_was_read(dtype):
    p = Param(np.arange(24.0).reshape(2, 3, 4).astype(dtype))
    keys = [(0, 1, 2), (0,), 1, (slice(None), 0), (..., 3), (None, 1), (slice(None, None, -2),)]
    keys += [np.array([0, 0, 1]), ([1, 1], [2, 2]), p.value > 5]
    for key in keys:
        with Tape() as tape:
            doubled = p * 2
            (found,) = tape.gradient((doubled[key] * 3).sum(), [p])
        expected = np.zeros_like(found)
        np.add.at(expected, key, 6)
        np.testing.assert_array_equal(found, expected)
