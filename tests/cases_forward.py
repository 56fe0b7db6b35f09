"""Handlers of groups A (forward numbers), E (carried state, 3-D calls) and F (batch size, sums)."""

from __future__ import annotations

import numpy as np
import pytest

import recur
from casebook import CELLS, LAYERS, Case, handles, make_cell, run, sum_of_squares
from recur import ops


def stacked(xs: list) -> np.ndarray:
    """A list of steps as one (features, batch, time) array."""
    return np.stack(xs, axis=-1)


def same(a: object, b: object) -> bool:
    """Bit for bit, through nested states."""
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return np.array_equal(recur.value(a), recur.value(b))


# ---------------------------------------------------------------------- A


@handles("A01", "A05", "A07", "A09")
def one_step_on_a_vector(case: Case) -> None:
    m = case.recur()
    case.near(m(case.array("x")), case.expect["y"], "y")
    if "state" in case.expect:
        case.near_state(m, case.expect["state"])


@handles("A02", "A06", "A08", "A10")
def steps_on_a_batch(case: Case) -> None:
    m = case.recur()
    case.near(run(m, case.xs()), case.expect["ys"], "ys")
    case.near_state(m, case.expect["state"])


@handles("A03", "A04")
def other_activations(case: Case) -> None:
    act = {"A03": ops.relu, "A04": ops.identity}[case.id]
    case.near(run(case.recur(act), case.xs()), case.expect["ys"], "ys")


@handles("A11", "A12")
def gate_order(case: Case) -> None:
    m = case.recur()
    case.near(m(case.cast([1.0])), case.expect["y"], "y")
    if "state" in case.expect:
        case.near_state(m, case.expect["state"])


@handles("A13")
def a_full_update_gate_keeps_the_state(case: Case) -> None:
    y = case.recur()(case.cast([1.0]))
    case.near(y, case.expect["y"], "y")
    case.far(y, case.expect["must_not_be"])


@handles("A14")
def gru_of_flux_0_4(case: Case) -> None:
    from recur.io.flux import gru_from_dense

    gates = [(case.array(f"W{gate}"), case.array(f"b{gate}")) for gate in "zrn"]
    m = recur.Recur(gru_from_dense(*gates), init=case.array("h0"))
    case.near(run(m, case.xs()), case.expect["ys"], "ys")


@handles("A15")
def accumulator(case: Case) -> None:
    m = recur.Recur(lambda h, x: (h + x, x), 0)
    inputs = case.given["inputs"]
    outputs = [m(x) for x in inputs[:2]]
    assert m.state == case.expect["state_after_two"]
    outputs += [m(x) for x in inputs[2:]]
    assert outputs == case.expect["outputs"]
    assert m.state == case.expect["state_final"]


@handles("A16")
def accumulator_over_a_sequence(case: Case) -> None:
    m = recur.Recur(lambda h, x: (h + x, x), np.zeros((1, 1), case.dtype))
    m(case.cast([2.0]))
    m(case.cast([3.0]))
    y = m(case.cast([[case.given["x3_last_axis"]]]))
    assert list(y.shape) == case.expect["out_shape"]
    case.near(y[0, 0], case.expect["out"], "y")
    assert list(np.shape(m.state)) == case.expect["state_shape"]
    assert np.asarray(m.state).item() == case.expect["state_final"]


@handles("A17")
def a_given_state_and_reset(case: Case) -> None:
    cell = make_cell(case.weights(), ops.relu)
    m = recur.Recur(cell, init=case.array("init"), state=case.array("state"))
    case.near(m.state, case.expect["state_before"], "state before")
    case.near(m(case.array("x")), case.expect["y"], "y")
    case.near(m.state, case.expect["state_after_call"], "state after the call")
    m.reset()
    case.near(m.state, case.expect["state_after_reset"], "state after reset")


@handles("A18")
def output_shapes(case: Case) -> None:
    for layer in LAYERS.values():
        for given, expected in case.expect["shapes"]:
            m = layer(3, 5, dtype=case.dtype)
            for _ in range(2):
                assert list(m(np.ones(given, case.dtype)).shape) == expected


@handles("A19")
def the_weights_decide_the_dtype(case: Case) -> None:
    for layer in LAYERS.values():
        m = layer(2, 3)
        y = m(np.random.default_rng(0).normal(size=(2, 4)))
        assert y.dtype == case.expect["dtype"]
        assert list(y.shape) == case.expect["shape"]
        parts = m.state if isinstance(m.state, tuple) else (m.state,)
        assert all(part.dtype == case.expect["dtype"] for part in parts)


@handles("A20")
def a_step_without_state_starts_from_zeros(case: Case) -> None:
    for cell_type in CELLS.values():
        cell = cell_type(3, 4, dtype=case.dtype)
        x = np.random.default_rng(1).normal(size=(3, 2)).astype(case.dtype)
        zero = np.zeros((4, 2), case.dtype)
        state = (zero, zero) if cell_type is recur.LSTMCell else zero
        y, after = cell.step(x)
        y0, after0 = cell.step(x, state)
        assert same(y, y0) and same(after, after0)
        with pytest.raises(TypeError, match="step"):
            cell(x)


@handles("A21")
def the_output_is_the_state(case: Case) -> None:
    for cell_type in CELLS.values():
        cell = cell_type(3, 4, dtype=case.dtype)
        y, state = cell.step(np.ones((3, 2), case.dtype))
        h = state[0] if cell_type is recur.LSTMCell else state
        assert same(y, h)


@handles("A22")
def two_layouts(case: Case) -> None:
    X = case.array("X")
    case.near(case.recur()(X), case.expect["y_layout_fbt"], "fbt")
    case.near(case.recur(layout="ftb")(X), case.expect["y_layout_ftb"], "ftb")


@handles("A23")
def several_inputs(case: Case) -> None:
    m = recur.Recur(lambda h, a, b: (h + a * b, h - a), case.given["init"])
    assert [m(a, b) for a, b in case.given["calls"]] == case.expect["outputs"]
    assert m.state == case.expect["state"]


# ---------------------------------------------------------------------- E


@handles("E01", "E02", "E03", "E04")
def state_is_carried_across_calls(case: Case) -> None:
    xs = case.xs()
    whole, parts, steps = case.recur(), case.recur(), case.recur()
    X = stacked(xs)
    Y = whole(X)
    halves = np.concatenate([parts(X[:, :, :2]), parts(X[:, :, 2:])], axis=-1)
    ys = run(steps, xs)
    for got in (np.moveaxis(Y, -1, 0), np.moveaxis(halves, -1, 0), ys):
        case.near(got, case.expect["ys"], "ys")
    for m in (whole, parts, steps):
        case.near_state(m, case.expect["state"])


@handles("E05")
def a_state_that_crosses_a_scope_is_a_constant(case: Case) -> None:
    xs = case.xs()
    m = case.recur()

    def loss(m, xs):
        return sum_of_squares(run(m, xs))

    recur.gradient(lambda m: loss(m, xs[:2]), m)
    value, grads = recur.withgradient(lambda m: loss(m, xs[2:]), m)
    case.near(value, case.expect["scope2"]["loss"], "loss of the second scope")
    case.near_grads(grads, case.expect["scope2"]["grads"])
    m.reset()
    value, grads = recur.withgradient(lambda m: loss(m, xs), m)
    case.near(value, case.expect["one_scope"]["loss"], "loss of one scope")
    case.near_grads(grads, case.expect["one_scope"]["grads"])


def near_chain(case: Case, grads: object) -> None:
    for prefix, index in (("A.", 0), ("B.", 1)):
        want = {
            name[2:]: numbers
            for name, numbers in case.expect["grads"].items()
            if name.startswith(prefix)
        }
        case.near_grads(grads, want, f"layers.{index}.")


@handles("E06")
def a_chain_by_layers_and_by_steps(case: Case) -> None:
    xs = case.xs()
    m = recur.Chain(case.recur(prefix="A."), case.recur(prefix="B."))
    case.near(run(m, xs), case.expect["ys"], "ys")
    for loss in (
        lambda m: sum_of_squares(run(m, xs)),
        lambda m: sum_of_squares([m(stacked(xs))]),
        lambda m: sum_of_squares(m(xs)),
    ):
        recur.reset(m)
        value, grads = recur.withgradient(loss, m)
        case.near(value, case.expect["loss"], "loss")
        near_chain(case, grads)


@handles("E07")
def truncate_cuts_every_layer_of_a_chain(case: Case) -> None:
    m = recur.Chain(case.recur(prefix="A."), case.recur(prefix="B."))
    value, grads = recur.withgradient(lambda m: sum_of_squares(run(m, case.xs(), cuts=[1])), m)
    case.near(value, case.expect["loss"], "loss")
    near_chain(case, grads)


@handles("E08")
def a_sequence_of_one_step_is_that_step(case: Case) -> None:
    for layer in LAYERS.values():
        m = layer(2, 4, dtype=case.dtype, rng=np.random.default_rng(5))
        X = np.random.default_rng(2).normal(size=(2, 3, 1)).astype(case.dtype)
        Y = m(X)
        m.reset()
        assert Y.shape == (4, 3, 1)
        np.testing.assert_allclose(Y[:, :, 0], m(X[:, :, 0]), rtol=1e-6, atol=1e-6)


@handles("E09")
def a_sequence_of_no_steps_leaves_the_state(case: Case) -> None:
    for layer in LAYERS.values():
        m = layer(2, 4, dtype=case.dtype)
        empty = np.zeros((2, 3, 0), case.dtype)
        assert m(empty).shape == (4, 3, 0)
        assert m.at_start
        m(np.ones((2, 3), case.dtype))
        before = recur.states(m)
        assert m(empty).shape == (4, 3, 0)
        assert all(same(before[path], state) for path, state in recur.states(m).items())


@handles("E10")
def vector_column_and_sequence_agree(case: Case) -> None:
    for layer in LAYERS.values():
        x = np.random.default_rng(3).normal(size=2).astype(case.dtype)
        m = layer(2, 4, dtype=case.dtype)
        ys = []
        for shape in ((2,), (2, 1), (2, 1, 1)):
            m.reset()
            y = m(x.reshape(shape))
            assert y.shape == (4, *shape[1:])
            ys.append(y.ravel())
        np.testing.assert_allclose(ys[0], ys[1], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(ys[0], ys[2], rtol=1e-6, atol=1e-7)


@handles("E11")
def a_one_hot_input_picks_a_column(case: Case) -> None:
    classes = range(case.array("Wi").shape[1])
    dense, hot = case.recur(), case.recur()
    hots = [recur.onehot(k, classes) for k in case.given["hot"]]
    case.near(run(hot, hots), case.expect["ys"], "one-hot")
    case.near(run(dense, [np.asarray(h, case.dtype) for h in hots]), case.expect["ys"], "dense")
    integers = [np.asarray(h).astype(np.int64) for h in hots]
    case.near(run(case.recur(), integers), case.expect["ys"], "integer one-hot")


@handles("E12")
def a_call_that_raises_leaves_the_state(case: Case) -> None:
    for layer in LAYERS.values():
        m = layer(2, 4, dtype=case.dtype)
        m(np.ones((2, 3), case.dtype))
        before = m.state
        with pytest.raises(recur.ShapeError):
            m(np.ones((5, 3), case.dtype))
        assert same(m.state, before)


# ---------------------------------------------------------------------- F


@handles("F01", "F02", "F03", "F04")
def another_batch_size_needs_a_reset(case: Case) -> None:
    name = {"F01": "RNN", "F02": "LSTM", "F03": "GRU", "F04": "GRUv3"}[case.id]
    m = LAYERS[name](3, 5, dtype=case.dtype)
    m(np.ones((3, 10), case.dtype))
    for shape, batch in (((3,), 1), ((3, 4), 4)):
        with pytest.raises(recur.BatchSizeError) as error:
            m(np.ones(shape, case.dtype))
        message = str(error.value)
        assert message.startswith(f"{name}(3 => 5")
        assert "10" in message and f"batch {batch}" in message and "reset(" in message
        parts = m.state if isinstance(m.state, tuple) else (m.state,)
        assert all(list(part.shape) == case.expect["state_shape"] for part in parts)


@handles("F05")
def reset_allows_any_batch_size(case: Case) -> None:
    xs = case.xs()
    m = case.recur()
    m(np.ones((xs[0].shape[0], 5), case.dtype))
    m.reset()
    case.near(run(m, xs), case.expect["ys"], "ys")


@handles("F06")
def one_sample_to_many_only_on_request(case: Case) -> None:
    first, then = case.array("x_first"), case.array("x_then")
    m = case.recur()
    m(first)
    case.near(m.state, case.expect["state_after_first"], "state")
    with pytest.raises(recur.BatchSizeError):
        m(then)
    case.near(m.state, case.expect["state_after_first"], "state after the error")
    for option in ("broadcast", "reset"):
        m = case.recur(on_batch_change=option)
        m(first)
        case.near(m(then), case.expect[f"y_{option}"], option)


@handles("F07")
def gradients_are_summed_over_the_batch(case: Case) -> None:
    xs = case.xs()
    factor = case.expect["factor"]
    single = case.expect["single"]

    def loss(m, copies):
        return sum_of_squares(run(m, [np.repeat(x, copies, axis=1) for x in xs]))

    value, grads = recur.withgradient(lambda m: loss(m, 1), case.recur())
    case.near(value, single["loss"], "loss")
    case.near_grads(grads, single["grads"])
    value, grads = recur.withgradient(lambda m: loss(m, factor), case.recur())
    case.near(value, factor * single["loss"], "loss")
    case.near_grads(grads, {name: factor * np.array(g) for name, g in single["grads"].items()})


@handles("F08")
def sums_and_means_are_the_caller_s(case: Case) -> None:
    xs = case.xs()
    batch = xs[0].shape[1]
    grads = recur.gradient(lambda m: sum(y.sum() for y in run(m, xs)), case.recur(ops.identity))
    case.near(grads["cell.b"], case.expect["db_sum"], "db of the sum")
    case.near(grads["cell.Wi"], case.expect["dWi_sum"], "dWi of the sum")
    grads = recur.gradient(
        lambda m: sum(y.sum() for y in run(m, xs)) / (len(xs) * batch), case.recur(ops.identity)
    )
    case.near(grads["cell.b"], case.expect["db_mean"], "db of the mean")


@handles("F09")
def a_descent_step_on_sum_and_mean(case: Case) -> None:
    rng = np.random.default_rng(4)
    xs = [rng.normal(size=(2, 3)).astype(case.dtype) for _ in range(5)]

    def after_step(loss):
        m = recur.RNN(2, 2, ops.identity, dtype=case.dtype)
        m.cell.Wh = np.zeros((2, 2))
        opt = recur.setup(recur.Descent(0.1), m)
        recur.update(opt, m, recur.gradient(loss, m))
        return m.cell.b.value

    total = lambda m: sum(y.sum() for y in run(m, xs))  # noqa: E731
    case.near(after_step(lambda m: total(m) / 15), case.expect["b_after_mean_step"], "mean")
    case.near(after_step(total), case.expect["b_after_sum_step_lr_0p1"], "sum")
