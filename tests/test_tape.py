"""The tape: scopes, the sweep and its sinks, memory, versions, threads."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import tracemalloc
import warnings
import weakref

import numpy as np
import pytest

from recur import _kernels, ops
from recur.errors import GraphUsedError, ShapeError, TapeError
from recur.tape import (
    FlatBuffer,
    Node,
    Op,
    Param,
    Tape,
    Tensor,
    current,
    paused,
    peek,
    record,
    record_one,
    restore,
    save,
    traced,
    value,
    writes,
)


def difference_quotient(f, param, h=1e-5):
    """df/dparam by central differences of fourth order, entry by entry."""
    found = np.zeros(param.shape)
    for i in np.ndindex(param.shape):
        at = {}
        before = param.value.copy()
        for k in (-2, -1, 1, 2):
            moved = before.copy()
            moved[i] += k * h
            param[...] = moved
            at[k] = float(value(f()))
        param[...] = before
        found[i] = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * h)
    return found


def agree(f, *params, tolerance=1e-8):
    """The gradients that one backward leaves are those of finite differences."""
    for p in params:
        p.grad = None
    with Tape() as tape:
        tape.backward(f())
    for p in params:
        expected = difference_quotient(f, p)
        scale = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(p.grad, expected, rtol=0, atol=tolerance * scale)


# Scopes.


def test_outside_a_scope_nothing_is_recorded():
    p = Param(np.ones(3))
    assert current() is None
    assert isinstance(p * 2, np.ndarray)


def test_a_scope_ends_also_after_an_exception():
    with pytest.raises(ZeroDivisionError), Tape():
        raise ZeroDivisionError
    assert current() is None


def test_a_scope_inside_a_scope_raises():
    with Tape(), pytest.raises(TapeError, match="gradients of gradients"), Tape():
        pass
    assert current() is None


def test_a_tape_serves_one_scope():
    tape = Tape()
    with tape:
        pass
    with pytest.raises(TapeError, match="used before"), tape:
        pass


def test_tensors_of_an_ended_scope_act_as_arrays():
    with Tape() as tape:
        t = tape.watch(np.arange(3.0))
        loss = (t * t).sum()
    assert not t.live
    assert isinstance(t + 1, np.ndarray)
    assert float(loss) == 5.0
    np.testing.assert_array_equal(np.asarray(t), [0, 1, 2])
    np.testing.assert_array_equal(np.linalg.norm(t), np.sqrt(5))
    assert t.tolist() == [0, 1, 2]
    with Tape() as other:
        assert isinstance(t * 2, np.ndarray)
        with pytest.raises(TapeError, match="scope that recorded this loss has ended"):
            other.backward(loss)


def test_backward_after_the_scope_raises():
    with Tape() as tape:
        loss = (Param(np.ones(2)) * 2).sum()
    with pytest.raises(TapeError, match="its scope has ended"):
        tape.backward(loss)


def test_kept_history_reaches_back_from_a_later_scope():
    p = Param(np.array(3.0))
    with Tape(keep_history=True):
        h = p * p
    assert not isinstance(h * 1, Tensor)  # no scope is open: plain
    with Tape() as tape:
        tape.backward(h * 2)
    assert p.grad == 12


def test_paused_is_like_outside_and_resumes_also_after_an_exception():
    p = Param(np.ones(2))
    with Tape() as tape:
        with pytest.raises(ZeroDivisionError), paused():
            assert current() is None
            assert isinstance(p * 2, np.ndarray)
            with pytest.raises(TapeError, match="ended or is paused"):
                tape.watch(np.ones(1))
            raise ZeroDivisionError
        assert isinstance(p * 2, Tensor)
        with paused(), Tape() as inner:  # a scope of its own
            inner.backward((p * 3).sum())
        assert current() is tape
    np.testing.assert_array_equal(p.grad, [3, 3])


def test_a_scope_makes_the_layers_that_it_stepped_plain():
    class Layer:
        ended = 0

        def forget_history(self):
            self.ended += 1

    layer = Layer()
    with pytest.raises(ZeroDivisionError), Tape() as tape:
        tape.stepped(layer)
        tape.stepped(layer)
        raise ZeroDivisionError
    assert layer.ended == 1
    with Tape(keep_history=True) as tape:
        tape.stepped(layer)
    assert layer.ended == 1


# What is not a loss.


def test_only_one_number_is_a_loss():
    p = Param(np.ones((2, 2)))
    with Tape() as tape:
        y = p * 2
        with pytest.raises(TapeError, match=r"shape \(2, 2\), expected one number"):
            tape.backward(y)
        with pytest.raises(TapeError, match="plain float"):
            tape.backward(1.0)
        with pytest.raises(ShapeError, match=r"shape \(2,\), expected \(2, 2\)"):
            tape.backward(y, np.ones(2))
        tape.backward(y, np.array([[1.0, 2], [3, 4]]))
    np.testing.assert_array_equal(p.grad, [[2, 4], [6, 8]])


def test_watching_integers_raises():
    with Tape() as tape, pytest.raises(TapeError, match="not for int64"):
        tape.watch(np.arange(3))


# Accumulate and overwrite.


def test_backward_adds_and_zero_grad_starts_again():
    p = Param(np.array([1.0, 2.0]))
    for expected in ([2, 4], [4, 8]):
        with Tape() as tape:
            tape.backward((p * p).sum())
        np.testing.assert_array_equal(p.grad, expected)
    held = p.grad
    p.zero_grad()
    assert p.grad is held
    with Tape() as tape:
        tape.backward((p * p).sum())
    np.testing.assert_array_equal(p.grad, [2, 4])


def test_overwriting_never_reads_the_buffer():
    p = Param(np.array([1.0, 2.0]))
    p.grad = held = np.full(2, np.nan)
    with Tape() as tape:
        tape.backward((p * p).sum(), accumulate=False)
    assert p.grad is held
    np.testing.assert_array_equal(p.grad, [2, 4])


def test_overwriting_leaves_what_the_loss_does_not_reach():
    p, q = Param(np.ones(2)), Param(np.ones(2))
    q.grad = np.full(2, 7.0)
    with Tape() as tape:
        tape.backward((p * 2).sum(), accumulate=False)
    np.testing.assert_array_equal(q.grad, [7, 7])


def test_the_gradient_of_a_parameter_without_axes_is_an_array_that_adds_up():
    p = Param(np.array(2.0))
    for _ in range(3):
        with Tape() as tape:
            tape.backward(p * p + p * 1)
    assert isinstance(p.grad, np.ndarray)
    assert p.grad == 15
    p.zero_grad()
    assert p.grad == 0


def test_gradients_belong_to_their_parameter_alone():
    p, q = Param(np.ones(2)), Param(np.ones(2))
    with Tape() as tape:
        tape.backward((p + q).sum())
    assert not np.shares_memory(p.grad, q.grad)
    p.grad[...] = 5
    np.testing.assert_array_equal(q.grad, [1, 1])


def test_watched_leaves_have_a_grad():
    with Tape() as tape:
        t = tape.watch(np.array([1.0, 2.0]))
        y = t * 3
        tape.backward(y.sum(), keep_graph=True)
        tape.backward(y.sum())
        np.testing.assert_array_equal(t.grad, [6, 6])
        assert y.grad is None


def test_tape_gradient_returns_new_arrays_and_touches_no_grad():
    p, unused = Param(np.ones(2)), Param(np.ones((2, 3)))
    with Tape() as tape:
        x = tape.watch(np.array([1.0, 2.0]))
        middle = p * x
        loss = (middle * middle).sum()
        found = tape.gradient(loss, [p, x, middle, unused, loss])
    for array, expected in zip(found, ([2, 8], [2, 4], [2, 4], np.zeros((2, 3)), 1.0), strict=True):
        np.testing.assert_array_equal(array, expected)
        assert isinstance(array, np.ndarray)
    assert p.grad is None
    assert x.grad is None


# Used graphs.


def test_a_second_backward_of_one_loss_names_the_ways_out():
    p = Param(np.ones(2))
    with Tape() as tape:
        loss = (p * p).sum()
        tape.backward(loss)
        with pytest.raises(GraphUsedError, match=r"keep_graph=True.*truncate.*reset"):
            tape.backward(loss)
    np.testing.assert_array_equal(p.grad, [2, 2])


def test_another_loss_that_reaches_used_steps_raises_and_changes_no_grad():
    p, q = Param(np.ones(2)), Param(np.ones(2))
    with Tape() as tape:
        h = p * p
        tape.backward(h.sum())
        with pytest.raises(GraphUsedError):
            tape.backward((h * q).sum())
    np.testing.assert_array_equal(p.grad, [2, 2])
    assert q.grad is None


def test_a_kept_graph_can_be_swept_again():
    p = Param(np.array([1.0, 2.0]))
    with Tape() as tape:
        loss = (p * p * p).sum()
        tape.backward(loss, keep_graph=True)
        tape.backward(loss, keep_graph=True)
        tape.backward(loss)
        with pytest.raises(GraphUsedError):
            tape.backward(loss)
    np.testing.assert_array_equal(p.grad, [9, 36])


def test_intermediate_gradients_do_not_leak_into_a_second_backward():
    with Tape() as tape:
        x = tape.watch(np.array([1.0]))
        y = x + x
        loss = (y**2).sum()
        for _ in range(2):
            (dx,) = tape.gradient(loss, [x], keep_graph=True)
            np.testing.assert_array_equal(dx, [8])


class _Failing(Op):
    def backward(self, sweep, node, grads):
        raise ZeroDivisionError


def test_a_sweep_that_fails_changes_no_grad_and_uses_up_what_it_passed():
    p, q = Param(np.ones(2)), Param(np.ones(2))
    p.grad = np.full(2, 5.0)
    with Tape() as tape:
        (bad,) = record(_Failing("failing"), (q,), [np.ones(2)], None)
        passed = p * 3
        loss = (passed + bad).sum()
        with pytest.raises(ZeroDivisionError):
            tape.backward(loss)
        np.testing.assert_array_equal(p.grad, [5, 5])
        assert q.grad is None
        with pytest.raises(GraphUsedError):
            tape.backward(loss)
        tape.backward((p * 3).sum())  # the scope goes on
    np.testing.assert_array_equal(p.grad, [8, 8])


def test_nothing_is_recorded_during_a_sweep():
    class Looking(Op):
        def backward(self, sweep, node, grads):
            assert current() is None
            assert isinstance(p * 2, np.ndarray)
            sweep.add(p, grads[0])

    p = Param(np.ones(2))
    with Tape() as tape:
        (y,) = record(Looking("looking"), (p,), [np.ones(2)], None)
        tape.backward(y.sum())
        assert current() is tape
    np.testing.assert_array_equal(p.grad, [1, 1])


# Length.


def test_a_hundred_thousand_steps_go_forward_and_backward_without_recursion():
    w = Param(np.array(0.99999))
    with Tape() as tape:
        h = w * 1.0
        for _ in range(100_000):
            h = h * w
        tape.backward(h)
    np.testing.assert_allclose(w.grad, 100_001 * 0.99999**100_000, rtol=1e-9)


def test_freeing_a_million_chained_nodes_does_not_overflow_the_stack():
    p, op, one = Param(np.array(1.0)), Op("step"), np.ones(())
    gc.disable()  # it would look at the growing chain again and again
    try:
        with Tape():
            h = record_one(op, (p,), one, None)
            first = weakref.ref(h)
            for _ in range(1_000_000):
                h = record_one(op, (h,), one, None)
            assert first() is not None
            del h
            assert first() is None
    finally:
        gc.enable()


def test_backward_frees_the_graph_as_it_goes():
    p = Param(np.ones(1000))
    with Tape() as tape:
        h = p * 1.0
        middle = weakref.ref(h)
        for _ in range(10):
            h = ops.tanh(h)
        loss = h.sum()
        del h
        assert tape.live == 12
        tape.backward(loss)
        assert middle() is None
        assert tape.live == 1
        del loss
        assert tape.live == 0


def test_dropping_a_state_frees_its_past_at_once():
    p = Param(np.ones(10))
    with Tape() as tape:
        gc.disable()
        try:
            h = p * 1.0
            for _ in range(100):
                h = np.tanh(h)
            assert tape.live == 101
            h = value(h)
            assert tape.live == 0
        finally:
            gc.enable()


def test_slices_of_a_sequence_cost_no_array_each():
    steps = 200
    x = np.zeros((10, 50, steps))

    def peak(f):
        with Tape() as tape:
            t = tape.watch(x)
            loss = f(t)
            gc.collect()
            tracemalloc.start()
            tape.gradient(loss, [t])
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        return most

    def sliced(t):
        total = 0.0
        for i in range(steps):
            total = total + t[..., i].sum()
        return total

    # One buffer and the copy that is returned, and small change; not one array a slice.
    assert peak(sliced) < 3 * x.nbytes


def test_a_cotangent_is_neither_copied_nor_written():
    x, cotangent = np.ones((64, 500)), np.full((64, 500), 3.0)
    with Tape() as tape:
        t = tape.watch(x)
        y = t * 2
        tracemalloc.start()
        tape.backward(y, cotangent)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        tape.backward(t, cotangent)  # a leaf's own gradient is not the caller's array
        tape.backward(t + t, cotangent)
    assert most < 1.5 * x.nbytes  # the gradient of x
    np.testing.assert_array_equal(cotangent, np.full((64, 500), 3.0))
    np.testing.assert_array_equal(t.grad, np.full((64, 500), 15.0))
    assert not np.shares_memory(t.grad, cotangent)


def test_an_operation_cannot_write_into_the_cotangent():
    class Wrong(Op):
        def backward(self, sweep, node, grads):
            grads[0] *= 2

    cotangent = np.ones(3)
    with Tape() as tape:
        t = tape.watch(np.ones(3))
        (y,) = record(Wrong("wrong"), (t,), [np.ones(3)], ())
        with pytest.raises(ValueError, match="read-only"):
            tape.backward(y, cotangent)
    np.testing.assert_array_equal(cotangent, np.ones(3))


def test_a_slice_adds_in_place_into_one_buffer():
    made = []

    class Spy(Op):
        def backward(self, sweep, node, grads):
            made.append(grads[0])
            sweep.add(p, grads[0])

    p = Param(np.ones((3, 4)))
    with Tape() as tape:
        (t,) = record(Spy("spy"), (p,), [np.ones((3, 4))], None)
        loss = sum(t[:, i].sum() * (i + 1) for i in range(4)) + t[0].sum() + t.sum()
        tape.backward(loss)
    assert len(made) == 1
    np.testing.assert_array_equal(p.grad, [[3, 4, 5, 6], [2, 3, 4, 5], [2, 3, 4, 5]])


# Sinks.


def recurrent_loss(W, U, b, xs, dropped=None):
    """A looped tanh cell; `dropped` makes the recurrent weight a computed one."""
    h = np.zeros((U.shape[0], xs[0].shape[1]))
    total = 0.0
    for x in xs:
        V = U if dropped is None else dropped(U)
        h = np.tanh(ops.affine(W, x, b) + V @ h)
        total = total + (h * h).sum()
    return total


@pytest.fixture
def cell(rng):
    W, U, b = (Param(rng.standard_normal(s) * 0.5) for s in ((4, 3), (4, 4), (4,)))
    return W, U, b, [rng.standard_normal((3, 2)) for _ in range(6)]


def test_a_looped_cell_makes_one_product_a_weight(cell, monkeypatch):
    W, U, b, xs = cell
    calls = []

    class Counting:
        def __getattr__(self, name):
            return getattr(_kernels, name)

        def weight_gradient(self, dg, x, out, *, accumulate):
            calls.append((dg.shape, accumulate))
            _kernels.weight_gradient(dg, x, out, accumulate=accumulate)

    monkeypatch.setattr("recur.tape.sweep._kernels", Counting())
    with Tape() as t:
        t.backward(recurrent_loss(W, U, b, xs))
    assert sorted(calls) == [((12, 4), False), ((12, 4), False)]


def test_a_long_window_is_multiplied_out_in_parts(cell, monkeypatch):
    W, U, b, xs = cell
    with Tape() as t:
        t.backward(recurrent_loss(W, U, b, xs))
    expected = [p.grad for p in (W, U, b)]
    monkeypatch.setattr("recur.tape.sweep._ROWS_PER_FLUSH", 4)
    for p in (W, U, b):
        p.grad = None
    with Tape() as t:
        t.backward(recurrent_loss(W, U, b, xs))
    for p, grad in zip((W, U, b), expected, strict=True):
        np.testing.assert_allclose(p.grad, grad, rtol=1e-12)


def test_a_looped_cell_agrees_with_finite_differences(cell):
    W, U, b, xs = cell
    agree(lambda: recurrent_loss(W, U, b, xs), W, U, b)


def test_a_dropped_weight_computed_once_agrees_with_finite_differences(cell, rng):
    W, U, b, xs = cell
    mask = (rng.random(U.shape) < 0.6) / 0.6

    def loss():
        once = {}
        return recurrent_loss(W, U, b, xs, lambda u: once.setdefault("v", u * mask))

    agree(loss, W, U, b)
    assert (U.grad[mask == 0] == 0).all()


def test_a_dropped_weight_computed_at_each_step_agrees_with_finite_differences(cell, rng):
    W, U, b, xs = cell
    masks = iter([])

    def loss():
        nonlocal masks
        masks = iter(np.random.default_rng(5).random((len(xs), *U.shape)) < 0.6)
        return recurrent_loss(W, U, b, xs, lambda u: u * next(masks))

    agree(loss, W, U, b)


def test_tied_weights_agree_with_finite_differences(cell):
    W, U, b, xs = cell

    def loss():
        h = np.zeros((4, 2))
        total = 0.0
        for x in xs:
            h = np.tanh(ops.affine(W, x, b) + U @ h)
            total = total + ((W.T @ h - x) ** 2).sum() + (b @ h).sum()
        return total

    agree(loss, W, U, b)


def test_a_tied_embedding_agrees_with_finite_differences(rng):
    table = Param(rng.standard_normal((3, 5)))
    tokens = [[0, 2], [2, 2], [4, 1]]

    def loss():
        h = np.zeros((3, 2))
        total = 0.0
        for step in tokens:
            h = np.tanh(table[:, step] + h)
            total = total + ops.logsumexp(table.T @ h)
        return total

    agree(loss, table)


def test_a_weight_that_depends_on_the_state_agrees_with_finite_differences(cell):
    """A recurrent weight computed from earlier outputs: its producer pops in the right place."""
    W, U, b, xs = cell

    def loss():
        h = np.zeros((4, 2))
        V = U
        total = 0.0
        for x in xs:
            h = np.tanh(ops.affine(W, x, b) + V @ h)
            V = V * 0.9 + (h @ h.T) * 0.1
            total = total + (h**2).sum()
        return total

    agree(loss, W, U, b)


def test_a_weight_used_in_the_products_and_elsewhere_agrees_with_finite_differences(cell):
    _, U, b, xs = cell

    def loss():
        V = np.tanh(U)
        total = (V * V).sum() + V[0].sum() + V[:, 1:].sum()
        return total + recurrent_loss(V[:, :3], V, b, xs) + (V @ V @ b).sum()

    agree(loss, U, b)


def test_several_backwards_of_one_graph_agree_with_finite_differences(cell):
    W, U, b, xs = cell
    mask = np.random.default_rng(2).random(U.shape) < 0.5

    def losses():
        V = U * mask
        h = np.zeros((4, 2))
        for x in xs:
            h = np.tanh(ops.affine(W, x, b) + V @ h)
            yield (h * h).sum()

    for p in (W, U, b):
        p.grad = None
    with Tape() as tape:
        for loss in losses():
            tape.backward(loss, keep_graph=True)

    def total():
        return sum(losses())

    for p in (W, U, b):
        np.testing.assert_allclose(p.grad, difference_quotient(total, p), rtol=0, atol=1e-7)


def test_overlapping_windows_agree_with_finite_differences(cell):
    """Losses that share steps and weights, swept one by one with the graph kept."""
    W, U, b, xs = cell
    starts = (0, 1, 3)

    def windows():
        h = np.zeros((4, 2))
        outputs = []
        for x in xs:
            h = np.tanh(ops.affine(W, x, b) + (U * 0.5) @ h)
            outputs.append(h)
        return [sum((outputs[s + i] ** 2).sum() for i in range(3)) for s in starts]

    for p in (W, U, b):
        p.grad = None
    with Tape() as tape:
        for window in windows():
            tape.backward(window, keep_graph=True)
    for p in (W, U, b):
        expected = difference_quotient(lambda: sum(windows()), p)
        np.testing.assert_allclose(p.grad, expected, rtol=0, atol=1e-7)


def test_a_sink_gives_a_weight_its_own_dtype_and_adds_to_what_came_another_way(rng):
    weight = Param(rng.standard_normal((4, 3)).astype(np.float32))
    x = rng.standard_normal((3, 5))

    class Product(Op):
        """A product in float64, whatever the weight is."""

        def backward(self, sweep, node, grads):
            sweep.post(weight, np.ascontiguousarray(grads[0].T), np.ascontiguousarray(x.T))
            sweep.add(weight, np.ones((3, 4)).T)  # laid out by columns, and borrowed
            sweep.post(weight, np.ascontiguousarray(grads[0].T), np.ascontiguousarray(x.T))

    with Tape() as tape:
        (y,) = record(Product("product"), (weight,), [weight.value.astype(float) @ x], None)
        tape.backward(y.sum())
    assert weight.grad.dtype == np.float32
    expected = 2 * np.tile(x.sum(1), (4, 1)) + 1
    np.testing.assert_allclose(weight.grad, expected, rtol=1e-6)


def test_cut_steps_post_nothing(cell):
    W, U, b, xs = cell
    with Tape() as tape:
        h = np.zeros((4, 2))
        for i, x in enumerate(xs):
            h = np.tanh(ops.affine(W, x, b) + U @ h)
            if i == 3:
                h = ops.stop_gradient(h)
                start = h
        tape.backward((h * h).sum())
    found = U.grad.copy()
    U.grad = None
    with Tape() as tape:
        h = start
        for x in xs[4:]:
            h = np.tanh(ops.affine(W, x, b) + U @ h)
        tape.backward((h * h).sum())
    np.testing.assert_array_equal(U.grad, found)


def test_accumulating_is_reproducible_bit_for_bit(cell):
    W, U, b, xs = cell
    results = []
    for _ in range(2):
        for p in (W, U, b):
            p.grad = None
        for _ in range(3):
            with Tape() as tape:
                tape.backward(recurrent_loss(W, U, b, xs))
        results.append([p.grad.copy() for p in (W, U, b)])
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)


# Versions.


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.__setitem__(..., 0.5),
        lambda p: p.__setitem__((0, 0), 0.5),
        lambda p: p.__iadd__(1),
        lambda p: p.__isub__(1),
        lambda p: p.__imul__(2),
        lambda p: p.__itruediv__(2),
        lambda p: p.writing().__enter__(),
    ],
)
def test_a_write_between_forward_and_backward_is_noticed(write):
    p = Param(np.ones((2, 2)), "W")
    with Tape() as tape:
        loss = (p * p).sum()
        write(p)
        with pytest.raises(TapeError, match="the value that W had when it was used"):
            tape.backward(loss)
    assert p.grad is None


def test_a_write_after_the_first_of_several_uses_is_noticed():
    p = Param(np.ones(2))
    with Tape() as tape:
        first = (p * p).sum()
        other = Param(np.zeros(1))
        other += 1  # a write elsewhere does no harm
        second = (p * p).sum()
        p += 1
        third = (p * p).sum()
        tape.backward(third)
        for loss in (first, second):
            with pytest.raises(TapeError, match="written since"):
                tape.backward(loss)
    np.testing.assert_array_equal(p.grad, [4, 4])


def test_moving_into_a_flat_buffer_between_forward_and_backward_is_noticed():
    p = Param(np.ones(2))
    with Tape() as tape:
        loss = (p * p).sum()
        flat = FlatBuffer(np.empty(2))
        p.move_into(flat, flat.array[:])
        with pytest.raises(TapeError, match="written since"):
            tape.backward(loss)


def test_a_used_parameter_is_freed_at_once():
    p = Param(np.ones(2))
    gone = weakref.ref(p)
    with Tape() as tape:
        tape.backward((p * p).sum())
    gc.disable()
    try:
        del p
        assert gone() is None
    finally:
        gc.enable()


def test_a_write_does_no_harm_where_the_old_value_is_not_needed():
    p = Param(np.ones(2))
    with Tape() as tape:
        loss = (p + 1).sum()
        p += 1
        tape.backward(loss)
    np.testing.assert_array_equal(p.grad, [1, 1])


def test_every_write_raises_the_version_and_the_common_stamp():
    p = Param(np.ones(3))
    seen, stamps = {p.version}, {writes.stamp}

    def moved():
        assert p.version > max(seen)
        assert writes.stamp not in stamps
        seen.add(p.version)
        stamps.add(writes.stamp)

    p[...] = 2
    moved()
    p -= 1
    moved()
    with p.writing() as array:
        moved()
        array += 1
    moved()
    with pytest.raises(ZeroDivisionError), p.writing():
        raise ZeroDivisionError
    moved()


def test_a_write_of_the_wrong_shape_changes_nothing():
    p = Param(np.ones(3), "Dense(2 => 3).bias")
    before = p.version
    with pytest.raises(ShapeError, match=r"Dense\(2 => 3\)\.bias: cannot write .* shape \(4,\)"):
        p[...] = np.ones(4)
    with pytest.raises(ShapeError, match="cannot add an array of shape"):
        p += np.ones(4)
    with pytest.raises(ShapeError, match="cannot subtract"):
        p -= np.ones((2, 3))
    assert p.version == before
    np.testing.assert_array_equal(p.value, np.ones(3))


@pytest.mark.parametrize("kind", [object, str])
def test_a_write_of_what_is_no_number_changes_nothing(kind):
    p = Param(np.ones(3))
    with pytest.raises(ShapeError, match="could not convert string to float"):
        p[...] = np.array(["2", "3", "x"], kind)
    np.testing.assert_array_equal(p.value, np.ones(3))
    p[1:] = np.array(["2", "3"], kind)
    np.testing.assert_array_equal(p.value, [1, 2, 3])


def multiply(p):
    p *= 1e30


def assign(p):
    p[...] = np.full(3, 1e60)


@pytest.mark.parametrize("write", [multiply, assign])
def test_a_write_that_raises_once_it_is_done_counts_as_one(write):
    for way in (np.errstate(over="raise"), warnings.catch_warnings()):
        p = Param(np.full(3, 1e30, np.float32))
        before = p.version
        with pytest.raises((FloatingPointError, RuntimeWarning), match="overflow"), way:
            warnings.simplefilter("error")
            write(p)
        assert np.isinf(p.value).all() and p.version > before


def test_a_recorded_tensor_cannot_become_part_of_a_parameter():
    p = Param(np.ones(2))
    with Tape():
        t = p * 2
        for write in (lambda: p.__setitem__(..., t), lambda: p.__iadd__(t)):
            with pytest.raises(TapeError, match="cannot be written into a parameter"):
                write()
        with pytest.raises(TapeError, match="cannot become a parameter"):
            Param(t)
        p[...] = value(t)
    p += t  # its scope has ended: it acts as an array
    np.testing.assert_array_equal(p.value, [4, 4])


# Parameters.


def test_a_parameter_copies_what_it_is_made_from_and_shows_it_read_only():
    array = np.ones((2, 3), order="F")
    p = Param(array)
    array[...] = 0
    np.testing.assert_array_equal(p.value, np.ones((2, 3)))
    with pytest.raises(ValueError, match="read-only"):
        p.value[0] = 1
    assert Param([1, 2]).dtype == np.float32
    assert Param(np.ones(2)).dtype == np.float64


def test_copies_of_a_parameter_share_nothing_with_it():
    p = Param(np.ones(3), "w")
    p.grad = np.ones(3)
    for q in (copy.copy(p), copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        assert q.name == "w"
        assert q.grad is None
        p[0] = 5
        assert q.value[0] == 1
        p[0] = 1
    model = {"a": p, "b": [p]}
    twin = copy.deepcopy(model)
    assert twin["a"] is twin["b"][0]


def test_dlpack_exports_a_copy():
    p = Param(np.ones(3))
    exported = np.from_dlpack(p)
    p[...] = 2
    np.testing.assert_array_equal(exported, np.ones(3))


def test_parameters_of_a_flat_buffer_count_its_writes():
    p, q = Param(np.ones(2)), Param(np.zeros(3))
    p += 1
    before = p.version, q.version
    flat = FlatBuffer(np.empty(5))
    old_counters = q.counters
    p.move_into(flat, flat.array[:2])
    q.move_into(flat, flat.array[2:])
    assert p.version > before[0]
    assert q.version > before[1]
    assert old_counters[0].count > before[1]
    np.testing.assert_array_equal(flat.array, [2, 2, 0, 0, 0])
    before = p.version, q.version
    with flat.writing() as array:
        array += 1
    assert p.version > before[0]
    assert q.version > before[1]
    np.testing.assert_array_equal(q.value, np.ones(3))
    before = p.version, q.version
    p[0] = 7
    assert p.version > before[0]
    assert q.version == before[1]
    assert flat.array[0] == 7
    assert sum(counter.count for counter in p.counters) == p.version


def test_a_flat_buffer_that_a_parameter_has_left_cannot_be_written():
    p = Param(np.ones(2))
    old, new = FlatBuffer(np.empty(2)), FlatBuffer(np.empty(2))
    p.move_into(old, old.array[:])
    version = p.version
    p.move_into(new, new.array[:])
    assert p.version > version
    with pytest.raises(TapeError, match="flattened again"), old.writing():
        pass


# Tensors.


def test_tensors_hash_by_identity_and_are_immutable():
    with Tape() as tape:
        t = tape.watch(np.arange(3.0))
        u = tape.watch(np.arange(3.0))
        assert len({t, u, t}) == 2
        assert {t: 1, u: 2}[u] == 2
        kept = t
        t += 1
        assert t is not kept
        np.testing.assert_array_equal(value(kept), [0, 1, 2])
        with pytest.raises(TypeError, match=r"recur\.value\(t\)"):
            t[0] = 5
        with pytest.raises(ValueError, match="read-only"):
            value(t)[0] = 1


def test_a_tensor_can_be_printed_but_neither_copied_nor_pickled():
    with Tape() as tape:
        t = tape.watch(np.array([1.5]))
        assert repr(t) == "Tensor([1.5])"
        assert f"{t.sum():.2f}" == "1.50"
        assert copy.copy(t) is t
        with pytest.raises(TapeError, match=r"recur\.value"):
            copy.deepcopy(t)
        with pytest.raises(TapeError, match=r"recur\.value"):
            pickle.dumps(t)


def test_value_goes_through_structures():
    p = Param(np.ones(2))
    with Tape():
        t = p.sum()
        found = value({"a": [t, (p, 3)], "b": None})
    assert found["a"][0] == 2
    assert isinstance(found["a"][0], np.float64)
    assert isinstance(found["a"][1][0], np.ndarray)
    assert found["a"][1][1] == 3
    assert found["b"] is None


def test_save_keeps_what_may_change_and_restore_gives_it_back():
    array = np.ones(2)
    kept = save(array)
    array[...] = 0
    np.testing.assert_array_equal(restore(kept), [1, 1])
    p = Param(np.ones(2))
    assert restore(save(p)) is p.value
    assert save(2.5) == 2.5
    with Tape() as tape:
        t = tape.watch(np.ones(2))
        assert restore(save(t)) is peek(t)
        assert traced(t) is t
    assert traced(t) is None
    assert traced(array) is None
    assert traced(p) is p


# The event log.


def test_a_log_lists_operations_and_losses_without_arrays():
    p = Param(np.ones(2), "w")
    with Tape(log=True) as tape:
        y = np.tanh(p)
        loss = y.sum()
        tape.backward(loss)
    kinds = [event["kind"] for event in tape.events]
    assert kinds == ["tanh", "sum", "loss"]
    assert tape.events[0]["params"] == [p]
    assert tape.events[1]["inputs"] == [tape.events[0]["seq"]]
    assert tape.events[2]["inputs"] == [tape.events[1]["seq"]]
    assert not any(isinstance(x, np.ndarray) for e in tape.events for x in e.values())
    assert Tape().events is None


# Threads.


def in_thread(f):
    caught = []

    def run():
        try:
            caught.append(f())
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught[0]


def test_another_thread_has_no_scope_of_its_own_and_cannot_use_this_one():
    p = Param(np.ones(2))
    with Tape() as tape:
        loss = (p * p).sum()
        assert in_thread(current) is None
        assert isinstance(in_thread(lambda: p * 2), np.ndarray)
        for use in (
            lambda: tape.backward(loss),
            lambda: tape.watch(np.ones(1)),
            lambda: tape.gradient(loss, [p]),
        ):
            error = in_thread(use)
            assert isinstance(error, TapeError)
            assert "belongs to another thread" in str(error)


def test_a_sweep_does_not_cross_into_the_open_scope_of_another_thread():
    p = Param(np.ones(2))

    def theirs():
        with Tape() as tape:
            tape.backward((h * 2).sum())

    with Tape() as tape:
        h = p * p
        error = in_thread(theirs)
        assert isinstance(error, TapeError)
        assert "another thread" in str(error)
        tape.backward(h.sum())  # it was not used up
    np.testing.assert_array_equal(p.grad, [2, 2])


def test_threads_with_tapes_of_their_own_agree_with_one_alone(cell):
    W, U, b, xs = cell

    def once():
        with Tape() as tape:
            return tape.gradient(recurrent_loss(W, U, b, xs), [W, U, b])

    expected = once()
    results = [None] * 4

    def work(i):
        for _ in range(20):
            results[i] = once()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        for found, grad in zip(result, expected, strict=True):
            np.testing.assert_array_equal(found, grad)


def test_operations_that_have_no_gradient_say_so():
    p = Param(np.ones(2))
    with Tape() as tape:
        (y,) = record(Op("mystery"), (p,), [np.ones(2)], None)
        assert isinstance(y.node, Node)
        with pytest.raises(TypeError, match="mystery has no gradient"):
            tape.backward(y.sum())


def test_a_loss_swept_before_and_one_that_reaches_used_steps_are_told_apart():
    p = Param(np.ones(3))
    with Tape() as tape:
        shared = p * 2
        first, second = shared.sum(), (shared * shared).sum()
        tape.backward(first)
        with pytest.raises(GraphUsedError, match=r"this loss was already swept\. Keep the graph"):
            tape.backward(first)
        with pytest.raises(
            GraphUsedError,
            match=r"earlier backward has used up steps that this loss reaches\..*truncate\(model\)"
            r".*reset\(model\).*add them and sweep once.*first backward \(keep_graph=True\)",
        ):
            tape.backward(second)
    np.testing.assert_array_equal(p.grad, np.full(3, 2.0))


def test_live_counts_the_nodes_of_earlier_scopes_that_kept_their_history():
    p = Param(np.ones(3))
    h = np.ones(3)
    for scopes in range(1, 5):
        with Tape(keep_history=True) as tape:
            h = h * p
            assert tape.live == scopes
    with Tape() as tape:
        assert tape.live == 0
        g = h * p
        assert tape.live == 5
        h = value(g)
        del g
        assert tape.live == 0


def test_a_tape_is_neither_copied_nor_pickled():
    with Tape() as tape:
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TapeError, match="neither copied nor pickled"):
                attempt(tape)
