"""Handlers of groups H (accumulate, overwrite) and I (containers, saving, constructors)."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import recur
from casebook import CELLS, LAYERS, Case, gradient_of, handles, make_cell, run, sum_of_squares
from recur import _kernels

# ---------------------------------------------------------------------- H


@handles("H01")
def gradient_gives_equal_numbers_twice(case: Case) -> None:
    m = case.recur(learn_init=False)
    for _ in range(2):
        m.reset()
        grads = recur.gradient(lambda m: sum_of_squares(run(m, case.xs())), m)
        case.near_grads(grads, case.expect["grads"])
    assert all(p.grad is None for p in recur.params(m))


@handles("H02", "H03")
def backward_adds_up(case: Case) -> None:
    m = case.recur(learn_init=False)
    for _ in range(2):
        m.reset()
        if case.id == "H03":
            recur.zero_grad(m)
        with recur.Tape() as tape:
            tape.backward(sum_of_squares(run(m, case.xs())))
    for name, want in case.expect["grads"].items():
        case.near(getattr(m.cell, name).grad, want, f"d{name}")
    m.reset()
    with recur.Tape() as tape:
        tape.backward(sum_of_squares(run(m, case.xs())), accumulate=False)
    once = {"H02": 0.5, "H03": 1.0}[case.id]
    for name, want in case.expect["grads"].items():
        case.near(getattr(m.cell, name).grad, once * np.array(want), f"d{name} overwritten")


def operands_of_wi(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel's backward hands to the weight-gradient product of Wi."""
    X = np.ascontiguousarray(np.stack(case.xs()).transpose(0, 2, 1))
    weights = case.weights()
    kernel = _kernels.GRUKernel(weights["Wi"], weights["Wh"], weights["b"])
    h0 = np.ascontiguousarray(np.broadcast_to(case.array("h0"), (X.shape[1], kernel.n_out)))
    Y, _, saved = kernel.sequence_save(X, h0)
    _, _, operands = kernel.sequence_backward(saved, X, 2 * Y, (None,), need_dx=False, keep=False)
    return operands["Wi"]


@handles("H04")
def the_kernel_adds_or_overwrites_by_name(case: Case) -> None:
    dg, x = operands_of_wi(case)
    for accumulate, key in ((True, "dWi_accumulate"), (False, "dWi_overwrite")):
        out = case.array("dWi_before")
        _kernels.weight_gradient(dg, x, out, accumulate=accumulate)
        case.near(out, case.expect[key], key)
    with pytest.raises(TypeError):
        _kernels.weight_gradient(dg, x, out)


@handles("H05")
def overwriting_never_reads_the_buffer(case: Case) -> None:
    dg, x = operands_of_wi(case)
    out = np.full_like(case.array("Wi"), np.nan)
    _kernels.weight_gradient(dg, x, out, accumulate=False)
    case.near(out, case.expect["dWi_overwrite"], "dWi")


@handles("H06")
def a_second_backward_of_one_loss(case: Case) -> None:
    m = case.recur(learn_init=False)
    with recur.Tape() as tape:
        loss = sum_of_squares(run(m, case.xs()))
        tape.backward(loss)
        with pytest.raises(recur.GraphUsedError) as error:
            tape.backward(loss)
        for word in ("keep_graph", "truncate", "reset"):
            assert word in str(error.value)
    m.reset()
    recur.zero_grad(m)
    with recur.Tape() as tape:
        loss = sum_of_squares(run(m, case.xs()))
        tape.backward(loss, keep_graph=True)
        tape.backward(loss)
    for name, want in case.expect["keep_graph"].items():
        case.near(getattr(m.cell, name).grad, want, f"d{name}")


@handles("H07")
def nothing_leaks_into_a_second_backward(case: Case) -> None:
    with recur.Tape() as tape:
        x = tape.watch(case.array("x"))
        y = x + x
        loss = (y * y).sum()
        for key in ("first", "second"):
            tape.backward(loss, keep_graph=True)
            case.near(x.grad, case.expect[key], key)
            x.grad[...] = 0


@handles("H08")
def an_unused_parameter_gets_zeros(case: Case) -> None:
    used, unused = recur.Dense(2, 3, dtype=case.dtype), recur.LSTM(2, 3, dtype=case.dtype)
    grads = recur.gradient(lambda m: m[0](np.ones(2, case.dtype)).sum(), [used, unused])
    for p in recur.params(unused):
        assert grads[p].shape == p.shape
        assert not np.any(grads[p])
    opt = recur.setup(recur.Adam(), [used, unused])
    before = unused.cell.Wi.value.copy()
    recur.update(opt, [used, unused], grads)
    assert np.array_equal(unused.cell.Wi.value, before)


# ---------------------------------------------------------------------- I


@handles("I01")
def bidirectional_is_two_layers_and_a_flip(case: Case) -> None:
    xs = case.xs()
    forward, backward = case.recur(prefix="F."), case.recur(prefix="B.")

    def by_hand(m):
        ahead = run(m[0], xs)
        behind = recur.flip(m[1], xs)
        return [np.concatenate(pair) for pair in zip(ahead, behind, strict=True)]

    def of_layer(m):
        Y = recur.Bidirectional(*m)(np.stack(xs, -1))
        return [Y[:, :, t] for t in range(len(xs))]

    for outputs in (by_hand, of_layer):
        recur.reset([forward, backward])
        ys = []
        value, grads = recur.withgradient(
            lambda m, ys=ys, outputs=outputs: [
                ys.extend(outputs(m)),
                sum_of_squares(ys),
            ][1],
            [forward, backward],
        )
        case.near([recur.value(y) for y in ys], case.expect["ys"], "ys")
        case.near(value, case.expect["loss"], "loss")
        for prefix, index in (("F.", 0), ("B.", 1)):
            for name, want in case.expect["grads"].items():
                if name.startswith(prefix):
                    got = gradient_of(grads, name[2:], f"{index}.", False)
                    case.near(got, want, f"d{name}")


@handles("I02")
def flip_runs_from_the_end(case: Case) -> None:
    order = []
    result = recur.flip(lambda x: [order.append(x), x][1], case.given["xs"])
    assert order == case.expect["call_order"]
    assert result == case.expect["result_order"]


@handles("I03")
def reset_reaches_every_layer(case: Case) -> None:
    def layer():
        return recur.GRU(2, 2, dtype=case.dtype)

    class Own:
        def __init__(self):
            self.inner = layer()

    held = [layer() for _ in range(4)]
    own = Own()
    ring: list = [held[3]]
    ring.append(ring)
    model = [
        recur.Chain(held[0]),
        recur.Parallel(np.add, held[1], recur.Dense(2, 2, dtype=case.dtype)),
        {"k": held[2]},
        own,
        ring,
    ]
    layers = [*held, own.inner]
    x = np.ones((2, 3), case.dtype)

    def step_and_reset():
        for m in layers:
            m(x)
        assert not any(m.at_start for m in layers)
        assert recur.reset(model) is model
        assert all(m.at_start for m in layers)
        assert all(np.array_equal(m.state, m.init) for m in layers)

    step_and_reset()
    with recur.Tape():
        step_and_reset()


@handles("I04")
def a_layer_used_twice_advances_twice(case: Case) -> None:
    m = recur.RNN(3, 3, dtype=case.dtype, rng=np.random.default_rng(16))
    chain = recur.Chain(m, m)
    x = np.random.default_rng(17).normal(size=(3, 2)).astype(case.dtype)
    y = chain(x)
    by_hand = copy.deepcopy(m)
    by_hand.reset()
    np.testing.assert_array_equal(y, by_hand(by_hand(x)))
    recur.reset(chain)
    assert m.at_start

    def loss(chain):
        recur.reset(chain)
        h = x
        for _ in range(3):
            h = chain(h)
        return h.sum()

    wide = recur.f64(chain)
    x = x.astype(np.float64)
    grads = recur.gradient(loss, wide)
    W = wide[0].cell.Wh
    eps = 1e-6
    for index in np.ndindex(W.shape):
        ends = []
        for sign in (1, -1):
            moved = W.value.copy()
            moved[index] += sign * eps
            keep = W.value.copy()
            W[...] = moved
            ends.append(loss(wide))
            W[...] = keep
        assert abs((ends[0] - ends[1]) / (2 * eps) - grads[W][index]) < 1e-6


@handles("I05")
def output_fed_back_as_input(case: Case) -> None:
    def loss(m):
        x = case.array("x")
        for _ in range(3):
            x = m(x)
        return x.sum()

    value, grads = recur.withgradient(loss, case.recur())
    case.near(value, case.expect["loss"], "loss")
    case.near_grads(grads, case.expect["grads"])


@handles("I06")
def destructure_orders_column_by_column(case: Case) -> None:
    m = case.recur()
    m(np.ones(m.cell.n_in, case.dtype))
    flat, rebuild = recur.destructure(m)
    case.near(flat, case.expect["flat"], "flat")
    new = rebuild(flat)
    assert new.at_start
    for p, q in zip(recur.params(m), recur.params(new), strict=True):
        assert np.array_equal(p.value, q.value)
        assert not np.shares_memory(p.value, q.value)
        assert not np.shares_memory(q.value, flat)


@handles("I07")
def rebuilding_does_not_bring_a_state_back(case: Case) -> None:
    m = recur.GRU(2, 3, dtype=case.dtype)
    for _ in range(3):
        m(np.ones((2, 4), case.dtype))
    flat, rebuild = recur.destructure(m)
    assert rebuild(flat).at_start
    flat, rebuild = recur.destructure(m, keep_state=True)
    kept = rebuild(flat)
    assert np.array_equal(kept.state, m.state)
    assert not np.shares_memory(kept.state, m.state)


@handles("I08")
def the_running_state_is_saved_on_request(case: Case) -> None:
    m, target = recur.RNN(2, 3, dtype=case.dtype), recur.RNN(2, 3, dtype=case.dtype)
    m(np.ones((2, 4), case.dtype))
    target(np.ones((2, 7), case.dtype))
    saved = recur.state_dict(m)
    assert list(saved) == ["cell.Wi", "cell.Wh", "cell.b", "init"]
    recur.load_state_dict(target, saved)
    assert target.at_start
    assert np.array_equal(target.cell.Wi.value, m.cell.Wi.value)
    with_state = recur.state_dict(m, include_state=True)
    added = set(with_state) - set(saved)
    assert added and all(name.startswith("state") for name in added)
    recur.load_state_dict(target, with_state)
    assert np.array_equal(target.state, m.state)


@handles("I09")
def loading_after_steps(case: Case) -> None:
    for layer in LAYERS.values():
        source, target = layer(2, 3, dtype=case.dtype), layer(2, 3, dtype=case.dtype)
        for _ in range(2):
            source(np.ones((2, 4), case.dtype))
        recur.load_state_dict(target, recur.state_dict(source))
        source.reset()
        x = np.ones((2, 5), case.dtype)
        np.testing.assert_array_equal(source(x), target(x))


@handles("I10")
def outputsize_leaves_the_state(case: Case) -> None:
    for layer in LAYERS.values():
        m = layer(2, 3, dtype=case.dtype)
        assert list(recur.outputsize(m, (2, 4))) == case.expect["shape"]
        assert m.at_start
        m(np.ones((2, 4), case.dtype))
        before = recur.states(m)
        assert list(recur.outputsize(m, (2, 4))) == case.expect["shape"]
        after = recur.states(m)
        assert all(np.array_equal(before[path], after[path]) for path in before)


@handles("I11")
def a_wrong_feature_count(case: Case) -> None:
    for name, layer in LAYERS.items():
        with pytest.raises(recur.ShapeError) as error:
            layer(3, 5, dtype=case.dtype)(np.ones((2, 4), case.dtype))
        message = str(error.value)
        assert message.startswith(f"{name}(3 => 5")
        assert "2 features" in message and "expected 3" in message


@handles("I12")
def parameter_counts(case: Case) -> None:
    for key, learned in (("with_init", True), ("without_init", False)):
        for name, layer in LAYERS.items():
            m = layer(3, 5, learn_init=learned, dtype=case.dtype)
            assert sum(p.size for p in recur.params(m)) == case.expect[key][name]


@handles("I13")
def forget_rows_start_at_one(case: Case) -> None:
    n_out = len(case.expect["b"]) // 4
    case.near(recur.LSTM(3, n_out, dtype=case.dtype).cell.b, case.expect["b"], "b")
    zero = recur.LSTM(3, n_out, forget_bias=0.0, dtype=case.dtype).cell.b.value
    assert not zero.any()


@handles("I14")
def glorot_bounds_follow_the_stacked_shape(case: Case) -> None:
    m = recur.LSTM(3, 5, dtype=case.dtype, rng=np.random.default_rng(18))
    for name in ("Wi", "Wh"):
        weights = np.abs(getattr(m.cell, name).value)
        bound = case.expect[f"bound_{name}"]
        assert 0.8 * bound < weights.max() <= bound * (1 + 1e-6)


@handles("I15")
def without_bias(case: Case) -> None:
    for name, layer in LAYERS.items():
        m = layer(3, 4, bias=False, dtype=case.dtype)
        assert len(recur.params(m)) == case.expect["n_params"][name]
        grads = recur.gradient(lambda m: m(np.ones((3, 2), case.dtype)).sum(), m)
        assert np.any(grads["cell.Wi"])


class Diagonal:
    """A constant diagonal matrix, of which a cell needs shape, @ and .T."""

    def __init__(self, entries: np.ndarray) -> None:
        self.entries = entries
        self.shape = (len(entries), len(entries))

    @property
    def T(self) -> Diagonal:
        return self

    def __matmul__(self, other: Any) -> Any:
        entries = self.entries if other.ndim == 1 else self.entries[:, None]
        return other * entries


@handles("I16")
def structured_and_integer_recurrent_matrices(case: Case) -> None:
    Wi = np.random.default_rng(19).normal(size=(5, 3)).astype(case.dtype)
    entries = np.linspace(-1, 1, 5).astype(case.dtype)
    dense = recur.Recur(make_cell({"Wi": Wi, "Wh": np.diag(entries)}))
    cell = recur.RNNCell(3, 5, dtype=case.dtype)
    cell.Wi, cell.Wh = Wi, Diagonal(entries)
    structured = recur.Recur(cell)
    cell = recur.RNNCell(3, 5, dtype=case.dtype)
    cell.Wi, cell.Wh = Wi, np.eye(5, dtype=np.int64)
    integer = recur.Recur(cell)
    for m in (structured, integer):
        for shape in ((3,), (3, 1), (3, 1, 2)):
            m.reset()
            assert m(np.ones(shape, case.dtype)).shape == (5, *shape[1:])
    assert "cell.Wh" not in recur.named_params(structured)
    structured.reset()
    X = np.random.default_rng(20).normal(size=(3, 2, 4)).astype(case.dtype)
    loss = lambda m: (m(X) ** 2).sum()  # noqa: E731
    a, of_dense = recur.withgradient(loss, dense)
    b, of_structured = recur.withgradient(loss, structured)
    np.testing.assert_allclose(a, b, rtol=1e-5)
    np.testing.assert_allclose(of_dense["cell.Wi"], of_structured["cell.Wi"], rtol=1e-4, atol=1e-5)


@handles("I17")
def scan_returns_the_last_state_on_request(case: Case) -> None:
    X = np.random.default_rng(21).normal(size=(2, 1, 3)).astype(case.dtype)
    for name, cell_type in CELLS.items():
        cell = cell_type(2, 4, dtype=case.dtype)
        Y, state = recur.scan(cell, X, return_state=True)
        assert Y.shape == (4, 1, 3)
        parts = state if isinstance(state, tuple) else (state,)
        assert len(parts) == (2 if name == "lstm" else 1)
        assert all(part.shape == (4, 1) for part in parts)
        np.testing.assert_array_equal(parts[0], Y[:, :, -1])


@handles("I18")
def scan_equals_the_layer(case: Case) -> None:
    X = np.random.default_rng(22).normal(size=(2, 3, 4)).astype(case.dtype)
    for cell_type in CELLS.values():
        cell = cell_type(2, 4, dtype=case.dtype)
        np.testing.assert_array_equal(recur.scan(cell, X), recur.Recur(cell)(X))


@handles("I20")
def copies_hold_values_and_no_tape(case: Case) -> None:
    m = recur.LSTM(2, 3, dtype=case.dtype)
    with recur.Tape():
        m(np.ones((2, 4), case.dtype))
        copies = [copy.deepcopy(m), pickle.loads(pickle.dumps(m))]
        for other in copies:
            assert all(isinstance(part, np.ndarray) for part in other.__dict__["_state"])
    for other in copies:
        for a, b in zip(m.state, other.state, strict=True):
            assert np.array_equal(a, b) and not np.shares_memory(a, b)
        for p, q in zip(recur.params(m), recur.params(other), strict=True):
            assert np.array_equal(p.value, q.value)
            assert not np.shares_memory(p.value, q.value)


@handles("I21")
def gruv3_holds_no_dead_weights(case: Case) -> None:
    m = recur.GRUv3(2, 3, dtype=case.dtype, rng=np.random.default_rng(23))
    assert list(m.cell.Wh.shape) == case.expect["Wh_shape"]
    xs = np.random.default_rng(24).normal(size=(4, 2, 2)).astype(case.dtype)
    grads = recur.gradient(lambda m: sum_of_squares(run(m, xs)), m)
    assert all(np.all(grads[p] != 0) for p in recur.params(m))


@handles("I22")
def reset_inside_the_gradient_function(case: Case) -> None:
    chain = recur.Chain(
        recur.Dense(2, 3, dtype=case.dtype),
        recur.RNN(3, 3, dtype=case.dtype),
        recur.Dense(3, 1, dtype=case.dtype),
    )
    x = np.ones((2, 4), case.dtype)

    def loss(m):
        recur.reset(m)
        return m(x).sum()

    first, of_first = recur.withgradient(loss, chain)
    second, of_second = recur.withgradient(loss, chain)
    assert first == second
    assert all(np.array_equal(of_first[p], of_second[p]) for p in recur.params(chain))
    assert all(np.any(of_first[p]) for p in recur.params(chain) if p.name.endswith(("Wi", "b")))


@handles("I23")
def sequences_of_different_lengths_in_one_loop(case: Case) -> None:
    m = recur.Chain(recur.GRU(2, 3, dtype=case.dtype), recur.Dense(3, 1, dtype=case.dtype))
    rng = np.random.default_rng(25)

    def loss(m, X):
        recur.reset(m)
        return (m(X) ** 2).sum()

    Xs = [rng.normal(size=(2, 3, T)).astype(case.dtype) for T in (3, 7, 1, 7)]
    together = [recur.gradient(lambda m, X=X: loss(m, X), m) for X in Xs]
    for X, grads in zip(Xs, together, strict=True):
        alone = recur.gradient(lambda m, X=X: loss(m, X), copy.deepcopy(m))
        for path in recur.named_params(m):
            assert np.array_equal(grads[path], alone[path])
