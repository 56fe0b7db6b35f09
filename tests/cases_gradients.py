"""Handlers of groups B (full back-propagation), C (truncate) and D (gradient of the start)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import recur
from casebook import LAYERS, Case, gradient_of, handles, run, sum_of_squares
from recur import ops


def check(case: Case, m: Any, loss: Callable[[Any], Any], expected: dict | None = None) -> Any:
    """Compares the loss and all gradients of one scope with the case; returns the gradients."""
    expected = case.expect if expected is None else expected
    value, grads = recur.withgradient(loss, m)
    case.near(value, expected["loss"], "loss")
    case.near_grads(grads, expected["grads"])
    return grads


def act_of(case: Case) -> Callable | None:
    """The scalar cases with whole numbers are identity RNNs; the others use tanh."""
    return ops.identity if np.size(case.given["Wh"]) == 1 else None


# ---------------------------------------------------------------------- B


@handles("B01", "B02")
def the_last_output_of_a_scalar_rnn(case: Case) -> None:
    xs = case.xs()
    m = case.recur(ops.identity)
    grads = check(case, m, lambda m: run(m, xs)[-1].sum())
    for name, wrong in case.expect.get("must_not_be", {}).items():
        case.far(gradient_of(grads, name, "", False), wrong)
    # The implicit way, with the parameters as argument, gives the same numbers.
    m.reset()
    implicit = recur.gradient(lambda: run(m, xs)[-1].sum(), recur.params(m))
    for p in recur.params(m):
        np.testing.assert_array_equal(implicit[p], grads[p])


@handles("B03", "B04")
def the_third_output(case: Case) -> None:
    check(case, case.recur(), lambda m: run(m, case.xs())[2].sum())


@handles("B05")
def the_third_output_of_a_sequence(case: Case) -> None:
    check(case, case.recur(), lambda m: m(case.array("X"))[:, :, 2].sum())


@handles("B06", "B07", "B08", "B09")
def all_parameter_gradients(case: Case) -> None:
    xs = case.xs()
    m = case.recur()
    check(case, m, lambda m: sum_of_squares(run(m, xs)))
    m.reset()
    check(case, m, lambda m: sum_of_squares([m(np.stack(xs, -1))]))


@handles("B10", "B11", "B12", "B13")
def input_gradients(case: Case) -> None:
    xs = case.xs()
    m = case.recur()
    value, grads = recur.withgradient(lambda *xs: sum_of_squares(run(m, xs)), *xs)
    case.near(value, case.expect["loss"], "loss")
    for t, grad in enumerate(grads, 1):
        case.near(grad, case.expect["grads"][f"x{t}"], f"dx{t}")
    m.reset()
    dX = recur.gradient(lambda X: sum_of_squares([m(X)]), np.stack(xs, -1))
    for t in range(len(xs)):
        case.near(dX[:, :, t], case.expect["grads"][f"x{t + 1}"], f"dX[{t}]")


@handles("B14")
def four_ways_to_loop(case: Case) -> None:
    xs, target = case.xs(), case.array("target")
    dense = recur.Dense(case.array("D").shape[1], 1, dtype=case.dtype)
    dense.weight, dense.bias = case.array("D"), case.array("d")
    m = recur.Chain(case.recur(), dense)

    def for_loop(m):
        ys = []
        for x in xs:
            ys.append(m(x))
        return ys

    def sequence(m):
        Y = m(np.stack(xs, -1)[:, None, :])
        return [Y[:, 0, t] for t in range(len(xs))]

    ways = {
        "for": for_loop,
        "comprehension": lambda m: [m(x) for x in xs],
        "map": lambda m: list(map(m, xs)),
        "generator": lambda m: list(m(x) for x in xs),
        "sequence": sequence,
    }
    for name, outputs in ways.items():
        recur.reset(m)
        value, grads = recur.withgradient(
            lambda m, outputs=outputs: sum(
                ((y - t) ** 2).sum() for y, t in zip(outputs(m), target, strict=True)
            ),
            m,
        )
        case.near(value, case.expect["loss"], f"{name}: loss")
        expected = dict(case.expect["grads"])
        case.near(grads["layers.1.weight"], expected.pop("D"), f"{name}: dD")
        case.near(grads["layers.1.bias"], expected.pop("d"), f"{name}: dd")
        case.near_grads(grads, expected, "layers.0.")


@handles("B15")
def a_derivative_checked_by_hand(case: Case) -> None:
    grads = check(case, case.recur(ops.identity), lambda m: sum(y.sum() for y in run(m, case.xs())))
    case.far(grads["cell.Wi"], case.expect["must_not_be"]["Wi"])


@handles("B16")
def splitting_into_gates(case: Case) -> None:
    rows, columns = case.given["shape"]

    def loss(x):
        first, _, third = ops.split(x, 3)
        return first.sum() + 2 * third.sum()

    grad = recur.gradient(loss, np.ones((rows, columns), case.dtype))
    case.near(grad, np.repeat(np.array(case.expect["dx_rows"])[:, None], columns, 1), "dx")


@handles("B17")
def slicing_the_last_axis(case: Case) -> None:
    shape = case.given["shape"]
    grad = recur.gradient(
        lambda x: x[..., 0].sum() + 3 * x[..., 2].sum(), np.ones(shape, case.dtype)
    )
    case.near(grad, np.broadcast_to(case.expect["dx_by_slice"], shape), "dx")


@handles("B18")
def four_losses_on_a_cell_stepped_by_hand(case: Case) -> None:
    xs, h0 = case.xs(), case.array("h0")
    cell = case.cell()

    def carried(cell, h):
        ys = []
        for x in xs:
            h, y = cell(h, x)
            ys.append(y)
        return ys

    losses = {
        "final_state_mean": lambda cell, h: carried(cell, h)[-1].mean(),
        "no_carry_sum_of_means": lambda cell, h: sum(cell(h, x)[1].mean() for x in xs),
        "carry_sum_of_means": lambda cell, h: sum(y.mean() for y in carried(cell, h)),
        "stacked_mean_square": lambda cell, h: (np.stack(carried(cell, h), -1) ** 2).mean(),
    }
    for name, loss in losses.items():
        expected = case.expect[name]
        value, (of_cell, of_h) = recur.withgradient(loss, cell, h0[:, None])
        case.near(value, expected["loss"], f"{name}: loss")
        for weight in ("Wi", "Wh", "b"):
            case.near(of_cell[weight], expected["grads"][weight], f"{name}: d{weight}")
        case.near(of_h[:, 0], expected["grads"]["h0"], f"{name}: dh0")


@handles("B20", "B21", "B22")
def the_same_input_twice_with_a_cotangent(case: Case) -> None:
    x, cotangent = case.array("x"), case.array("D")
    m = case.recur()
    value, (of_m, of_x) = recur.withgradient(
        lambda m, x: (run(m, [x, x])[1] * cotangent).sum(), m, x
    )
    case.near(value, case.expect["loss"], "loss")
    expected = dict(case.expect["grads"])
    case.near(of_x, expected.pop("x"), "dx")
    case.near_grads(of_m, expected)
    # The tape takes the cotangent as it is.
    m.reset()
    with recur.Tape() as tape:
        y = run(m, [x, x])[1]
        tape.backward(y, case.array("D"))
    case.near(m.cell.Wh.grad, expected["Wh"], "dWh by the tape")


@handles("B23")
def a_given_state_gets_a_gradient(case: Case) -> None:
    X = np.stack(case.xs(), -1)

    def by_scan(cell, state):
        return (recur.scan(cell, X, state) ** 2).mean()

    def by_hand(cell, state):
        ys = []
        for t in range(X.shape[2]):
            state, y = cell(state, X[:, :, t])
            ys.append(y)
        return (np.stack(ys, -1) ** 2).mean()

    for loss in (by_scan, by_hand):
        value, (of_cell, of_state) = recur.withgradient(loss, case.cell(), case.array("state"))
        case.near(value, case.expect["loss"], "loss")
        expected = dict(case.expect["grads"])
        case.near(of_state, expected.pop("state"), "dstate")
        for name, want in expected.items():
            case.near(of_cell[name], want, f"d{name}")


@handles("B24")
def no_batch_axis(case: Case) -> None:
    check(case, case.recur(), lambda m: (np.stack(run(m, case.xs()), -1) ** 2).mean())


@handles("B19")
def twenty_thousand_steps(case: Case) -> None:
    def loss(m):
        x = np.ones(1, case.dtype)
        for _ in range(case.given["T"]):
            y = m(x)
        return y.sum()

    value, grads = recur.withgradient(loss, case.recur(ops.identity))
    tol = 2e-4 if case.dtype == np.float32 else case.entry["tol"]
    np.testing.assert_allclose(value, case.expect["y"], rtol=tol)
    for name, want in case.expect["grads"].items():
        got = gradient_of(grads, name, "", False)
        np.testing.assert_allclose(got, want, rtol=tol, atol=1e-12)


# ---------------------------------------------------------------------- C


@handles("C01", "C02")
def a_cut_after_the_first_step(case: Case) -> None:
    def loss(m):
        ys = run(m, case.xs(), cuts=[1])
        return (ys[1] if case.id == "C01" else ys[0] + ys[1]).sum()

    check(case, case.recur(ops.identity), loss)


@handles(*(f"C{i:02d}" for i in range(3, 19)))
def cuts_between_steps(case: Case) -> None:
    check(case, case.recur(), lambda m: sum_of_squares(run(m, case.xs(), case.given["cuts"])))


@handles("C19")
def both_parts_of_an_lstm_state_are_cut(case: Case) -> None:
    grads = check(case, case.recur(), lambda m: sum_of_squares(run(m, case.xs(), [1])))
    case.far(grads["cell.Wi"], case.expect["must_not_be"]["Wi"])


@handles("C20")
def a_cut_after_the_loss_does_not_touch_it(case: Case) -> None:
    def loss(m):
        total = sum_of_squares(run(m, case.xs()))
        recur.truncate(m)
        return total

    check(case, case.recur(), loss)


@handles("C21")
def gradient_resumes_at_once(case: Case) -> None:
    xs = case.xs()
    m = case.recur()

    def loss(m):
        run(m, xs[:2], cuts=[2])
        case.near_state(m, case.given["state_after_2"])
        return sum_of_squares(run(m, xs[2:]))

    check(case, m, loss)
    fresh = case.recur()
    parts = tuple(case.cast(part) for part in case.given["state_after_2"].values())
    fresh.state = parts if len(parts) > 1 else parts[0]
    check(case, fresh, lambda m: sum_of_squares(run(m, xs[2:])))


@handles("C22")
def chunks_add_up(case: Case) -> None:
    xs = case.xs()
    chunks, m = case.expect["chunks"], case.recur()

    def grads() -> dict[str, np.ndarray]:
        return {path: p.grad for path, p in recur.named_params(m).items()}

    with recur.Tape() as tape:
        tape.backward(sum_of_squares(run(m, xs[:2])))
        case.near_grads(grads(), chunks["steps_1_2"]["grads"])
        recur.truncate(m)
        tape.backward(sum_of_squares(run(m, xs[2:])))
    case.near_grads(grads(), case.expect["sum"])
    m.reset()
    check(
        case,
        m,
        lambda m: sum_of_squares(run(m, xs, [2])),
        {
            "loss": sum(chunk["loss"] for chunk in chunks.values()),
            "grads": case.expect["sum"],
        },
    )


@handles("C23")
def reset_or_truncate_or_neither_between_passes(case: Case) -> None:
    xs = case.xs()

    def of_pass(m):
        return ((run(m, xs)[-1] - 1) ** 2).sum()

    def second(between):
        def loss(m):
            run(m, xs)
            between(m)
            return of_pass(m)

        return loss

    for key, between in (
        ("a_reset", recur.reset),
        ("b_truncate", recur.truncate),
        ("c_neither_same_tape", lambda m: None),
    ):
        check(case, case.recur(ops.identity), second(between), case.expect[key])


@handles("C24")
def truncate_at_the_start_takes_a_snapshot(case: Case) -> None:
    m = recur.Recur(recur.RNNCell(1, 1, dtype=case.dtype), init=case.array("init"), learn_init=True)
    m.reset()
    m.truncate()
    m.init[...] = case.array("new_init")
    case.near(m.state, case.expect["state_after_truncate_and_update"], "state")
    m.reset()
    case.near(m.state, case.expect["state_after_reset"], "state after reset")


@handles("C25")
def truncate_reaches_nested_layers(case: Case) -> None:
    def layer():
        return recur.GRU(2, 2, dtype=case.dtype)

    shared, deep, beside, first = layer(), layer(), layer(), layer()

    class Nested(recur.Module):
        def __init__(self):
            self.held = [deep, {"k": beside}]

        def __call__(self, x):
            return self.held[1]["k"](self.held[0](x))

    m = recur.Chain(first, recur.Parallel(np.add, layer(), Nested()), shared, shared)
    x = np.ones((2, 3), case.dtype)
    with recur.Tape() as tape:
        for _ in range(2):
            m(x)
        recur.truncate(m)
        held = recur.states(m)
        assert len(held) == 5
        for state in held.values():
            assert not isinstance(state, recur.Tensor)
        for grad in tape.gradient(m(x).sum(), [p for p in recur.params(m)]):
            assert np.isfinite(grad).all()
        assert tape.live == 0 or all(not isinstance(s, recur.Tensor) for s in held.values())


@handles("C26")
def truncate_changes_no_value(case: Case) -> None:
    for layer in LAYERS.values():
        outputs = []
        for cuts in range(3):
            m = layer(2, 3, dtype=case.dtype, rng=np.random.default_rng(6))
            x = np.linspace(-1, 1, 8).reshape(2, 4).astype(case.dtype)
            with recur.Tape():
                ys = []
                for _ in range(3):
                    ys.append(recur.value(m(x)))
                    for _ in range(cuts):
                        recur.truncate(m)
            outputs.append(np.stack(ys))
        assert np.array_equal(outputs[0], outputs[1])
        assert np.array_equal(outputs[0], outputs[2])


@handles("C27")
def the_tape_stays_bounded(case: Case) -> None:
    m = recur.LSTM(2, 3, dtype=case.dtype)
    x = np.ones((2, 1), case.dtype)
    with recur.Tape() as tape:
        for t in range(1, 10_001):
            m(x)
            recur.truncate(m)
            if t == 10:
                early = tape.live
        assert tape.live == early


@handles("C28", "C29", "C30", "C31")
def sliding_windows(case: Case) -> None:
    k1, k2 = case.given.get("k1", 1), case.given.get("k2", 2)
    m, total, loss_total = case.recur(), {}, 0.0
    for loss, grads in recur.tbptt(m, case.xs(), lambda ys, t: sum_of_squares(ys), k1=k1, k2=k2):
        loss_total += loss
        for name in case.expect["grads"]:
            total[name] = total.get(name, 0) + gradient_of(grads, name, "", False)
    case.near(loss_total, case.expect["loss"], "loss")
    for name, want in case.expect["grads"].items():
        case.near(total[name], want, f"d{name}")


# ---------------------------------------------------------------------- D


def last_of(xs: list) -> Callable[[Any], Any]:
    return lambda m: run(m, xs)[-1].sum()


@handles("D01")
def a_new_layer_learns_its_start(case: Case) -> None:
    check(case, case.recur(ops.identity), last_of(case.xs()))


@handles("D02")
def reset_outside_the_scope(case: Case) -> None:
    xs = case.xs()
    m = case.recur(ops.identity)
    m(xs[0])
    m.reset()
    check(case, m, last_of(xs))
    old = case.recur(ops.identity, init_grad="scope")
    old.reset()
    grads = recur.gradient(last_of(xs), old)
    assert grads["init"] is None
    case.near(grads.state(old), case.expect["compat_explicit"]["state"], "gradient of the state")


@handles("D03")
def reset_inside_the_scope(case: Case) -> None:
    xs = case.xs()

    def loss(m):
        m.reset()
        return last_of(xs)(m)

    for option in ("step", "scope"):
        m = case.recur(ops.identity, init_grad=option)
        m(xs[0])
        check(case, m, loss)


@handles("D04")
def reset_in_the_middle(case: Case) -> None:
    x1, x2 = case.xs()

    def loss(m):
        y1 = m(x1)
        m.reset()
        return (y1 + m(x2)).sum()

    check(case, case.recur(ops.identity), loss)


@handles("D05")
def a_second_scope_without_reset(case: Case) -> None:
    x1, x2 = case.xs()
    m = case.recur(ops.identity)
    recur.gradient(lambda m: m(x1).sum(), m)
    check(case, m, lambda m: m(x2).sum())
    warm = case.recur(ops.identity)
    warm(x1)
    check(case, warm, lambda m: m(x2).sum())


@handles("D06")
def truncate_before_the_first_step(case: Case) -> None:
    def loss(m):
        m.reset()
        m.truncate()
        return last_of(case.xs())(m)

    check(case, case.recur(ops.identity), loss)


@handles("D07")
def truncate_between_with_the_early_output_in_the_loss(case: Case) -> None:
    check(
        case, case.recur(ops.identity), lambda m: sum(y.sum() for y in run(m, case.xs(), cuts=[1]))
    )


@handles("D08")
def reset_after_truncate_learns_the_start_again(case: Case) -> None:
    xs = case.xs()

    def loss(m):
        m.truncate()
        m(xs[0])
        m.reset()
        return last_of(xs)(m)

    check(case, case.recur(ops.identity), loss)


@handles("D09")
def warm_up_inside_the_scope(case: Case) -> None:
    x1, x2 = case.xs()

    def loss(m):
        m(x1)
        return m(x2).sum()

    check(case, case.recur(ops.identity), loss)


@handles("D10")
def the_start_is_broadcast_and_its_gradient_summed(case: Case) -> None:
    xs = case.xs()
    check(case, case.recur(), lambda m: sum_of_squares(run(m, xs)))
    h0 = case.array("h0")
    column = recur.Recur(case.cell(), init=h0[:, None], learn_init=True)
    grads = recur.gradient(lambda m: sum_of_squares(run(m, xs)), column)
    case.near(grads["init"], np.array(case.expect["grads"]["h0"])[:, None], "column")
    single = sum(
        recur.gradient(lambda m, b=b: sum_of_squares(run(m, [x[:, b] for x in xs])), case.recur())[
            "init"
        ]
        for b in range(xs[0].shape[1])
    )
    case.near(single, case.expect["grads"]["h0"], "sample by sample")


@handles("D11")
def both_parts_of_an_lstm_start_learn(case: Case) -> None:
    check(case, case.recur(), lambda m: sum_of_squares(run(m, case.xs())))
    m = recur.Recur(case.cell(), init=case.init(), learn_init=("h",))
    grads = recur.gradient(lambda m: sum_of_squares(run(m, case.xs())), m)
    case.near(grads["init.h"], case.expect["grads"]["h0"], "dh0 alone")
    assert "init.c" not in recur.named_params(m)


@handles("D12")
def the_start_is_no_parameter_by_default(case: Case) -> None:
    m = recur.RNN(2, 3, dtype=case.dtype)
    assert [path.split(".")[-1] for path in recur.named_params(m)] == case.expect["param_names"]
    assert not np.any(m.init)
    before = np.array(m.init)
    opt = recur.setup(recur.Descent(0.1), m)
    grads = recur.gradient(lambda m: m(np.ones((2, 4), case.dtype)).sum(), m)
    recur.update(opt, m, grads)
    assert np.array_equal(m.init, before)
    with pytest.raises(recur.RecurError, match=r"not a parameter.*learn_init=True"):
        grads["init"]


@handles("D13")
def a_learned_start_is_listed_once(case: Case) -> None:
    m = recur.RNN(10, 5, learn_init=True, dtype=case.dtype)
    expected = case.expect["shapes"]
    assert [list(p.shape) for p in recur.params(m)] == expected
    assert len(recur.params(recur.Chain(m, m))) == len(expected)
    column = recur.RNN(10, 5, learn_init=True, init_state=np.zeros((5, 1)), dtype=case.dtype)
    assert list(recur.params(column)[-1].shape) == case.expect["flux_0_12_init_shape"]


@handles("D14")
def a_plain_loop_learns_the_start_in_the_first_scope(case: Case) -> None:
    xs = case.xs()
    m = case.recur()
    check(case, m, lambda m: sum(y.sum() for y in run(m, xs)))
    grads = recur.gradient(lambda m: sum(y.sum() for y in run(m, xs)), m)
    case.near(grads["init"], case.expect["second_scope_init_grad"], "second scope")


@handles("D15")
def the_next_step_starts_from_init_as_it_then_is(case: Case) -> None:
    cell = recur.RNNCell(1, 1, ops.identity, dtype=case.dtype)
    cell.Wi, cell.Wh, cell.b = np.zeros((1, 1)), np.ones((1, 1)), np.zeros(1)
    m = recur.Recur(cell, init=case.array("init"), learn_init=True)
    m.reset()
    m.init[:] = case.array("changed")
    x = np.zeros(1, case.dtype)
    case.near(m(x), case.expect["first_step_starts_from"], "first step")
    m.init[:] = case.array("init")
    case.near(m(x), case.expect["first_step_starts_from"], "the running state")
    m.reset()
    case.near(m(x), case.given["init"], "after reset")


@handles("D16")
def a_given_state_is_not_init(case: Case) -> None:
    cell = recur.GRUCell(2, 3, dtype=case.dtype)
    rng = np.random.default_rng(7)
    init, state = rng.normal(size=(2, 3)).astype(case.dtype)
    m = recur.Recur(cell, init=init, state=state, learn_init=True)
    x = rng.normal(size=2).astype(case.dtype)
    y = []
    grads = recur.gradient(lambda m: [y.append(m(x)), y[0].sum()][1], m)
    assert np.all(grads["init"] == case.expect["init_grad"])
    expected = recur.Recur(cell, init=state)(x)
    np.testing.assert_allclose(recur.value(y[0]), expected, rtol=1e-6)
    m.reset()
    np.testing.assert_array_equal(m.state, init)


@handles("D17")
def the_start_learns_through_a_sequence(case: Case) -> None:
    check(case, case.recur(), lambda m: sum_of_squares([m(case.array("X"))]))


@handles("D18")
def two_layers_share_a_cell_and_a_start(case: Case) -> None:
    x1, x2 = case.xs()
    cell = case.cell()
    a = recur.Recur(cell, init=case.array("h0"), learn_init=True)
    b = recur.Recur(cell, init=a.init, learn_init=True)

    class Pair(recur.Module):
        def __init__(self):
            self.a, self.b = a, b

    grads = check(
        case,
        Pair(),
        lambda m: sum_of_squares(run(m.a, [x1, x2])) + sum_of_squares(run(m.b, [x2, x1])),
        {"loss": case.expect["loss"], "grads": {}},
    )
    case.near_grads(grads, case.expect["grads"], "a.")


@handles("D19")
def reset_of_some_samples(case: Case) -> None:
    xs = case.xs()

    def loss(m):
        y1 = m(xs[0])
        recur.reset(m, mask=np.array(case.given["mask"], bool))
        return sum_of_squares([y1, *run(m, xs[1:])])

    check(case, case.recur(), loss)
