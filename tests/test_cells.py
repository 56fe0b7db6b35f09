"""Cells: the equations, gradients, weights that stay fresh, and what is refused."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading

import numpy as np
import pytest

from recur import ops
from recur.cells import Cell, GRUCell, GRUv3Cell, LSTMCell, LSTMState, RNNCell, floats
from recur.errors import BatchSizeError, ShapeError, StateError, TapeError
from recur.gradients import flatten_parameters, gradient, withgradient
from recur.inspect import gradcheck
from recur.module import f64, named_params, params
from recur.tape import Param, Tape, Tensor, paused, value

N_IN, N_OUT, BATCH = 3, 4, 5

OPTIONS = {
    "rnn": (RNNCell, {}),
    "rnn relu": (RNNCell, {"act": ops.relu}),
    "rnn sigmoid": (RNNCell, {"act": ops.sigmoid}),
    "rnn identity": (RNNCell, {"act": ops.identity}),
    "rnn without bias": (RNNCell, {"bias": False}),
    "lstm": (LSTMCell, {}),
    "lstm peepholes": (LSTMCell, {"peepholes": True}),
    "lstm hard": (LSTMCell, {"gate_act": "hard_sigmoid", "peepholes": True}),
    "lstm without bias": (LSTMCell, {"bias": False}),
    "gru": (GRUCell, {}),
    "gru recurrent bias": (GRUCell, {"recurrent_bias": True}),
    "gru hard": (GRUCell, {"gate_act": "hard_sigmoid", "recurrent_bias": True}),
    "gru without bias": (GRUCell, {"bias": False}),
    "gruv3": (GRUv3Cell, {}),
    "gruv3 hard": (GRUv3Cell, {"gate_act": "hard_sigmoid"}),
    "gruv3 without bias": (GRUv3Cell, {"bias": False}),
}
each_cell = pytest.mark.parametrize("kind", OPTIONS)
four_cells = pytest.mark.parametrize("kind", ["rnn", "lstm", "gru", "gruv3"])


def make(kind: str, dtype, rng: np.random.Generator, n_in: int = N_IN, n_out: int = N_OUT) -> Cell:
    cls, options = OPTIONS[kind]
    options = dict(options)
    positional = [options.pop("act")] if "act" in options else []
    cell = cls(n_in, n_out, *positional, dtype=dtype, rng=rng, **options)
    for p in params(cell):  # biases too must be seen to act
        p[...] = rng.normal(0, 0.5, p.shape)
    return cell


def start(cell: Cell, batch: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return tuple(rng.normal(0, 0.5, (n, batch)).astype(cell.dtype) for n in cell.state_sizes)


def twin(cell: Cell, state: tuple, x: np.ndarray) -> tuple:
    """One step from the docstrings' equations, in plain NumPy."""

    def s(a):
        if getattr(cell, "gate_act", "sigmoid") == "hard_sigmoid":
            return np.clip(0.2 * a + 0.5, 0, 1)
        return 1 / (1 + np.exp(-a))

    w = {name: None if p is None else value(p) for name, p in vars(cell).items()}
    h = state[0]
    b = 0 if w["b"] is None else w["b"][:, None]
    if isinstance(cell, RNNCell):
        act = {
            "tanh": np.tanh,
            "relu": lambda a: np.maximum(a, 0),
            "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
            "identity": lambda a: a,
        }[ops.name_of(cell.act)]
        return (act(w["Wi"] @ x + w["Wh"] @ h + b),)
    if isinstance(cell, LSTMCell):
        i, f, n, u = np.split(w["Wi"] @ x + w["Wh"] @ h + b, 4)
        c = state[1]
        p = np.zeros((3, len(h), 1)) if w["peephole"] is None else w["peephole"][:, :, None]
        c2 = s(f + p[1] * c) * c + s(i + p[0] * c) * np.tanh(n)
        return s(u + p[2] * c2) * np.tanh(c2), c2
    r_x, z_x, n_x = np.split(w["Wi"] @ x + b, 3)
    if isinstance(cell, GRUCell):
        r_h, z_h, n_h = np.split(w["Wh"] @ h, 3)
        bh = 0 if w["bh"] is None else w["bh"][:, None]
        r, z = s(r_x + r_h), s(z_x + z_h)
        n = np.tanh(n_x + r * (n_h + bh))
    else:
        r_h, z_h = np.split(w["Wh"] @ h, 2)
        r, z = s(r_x + r_h), s(z_x + z_h)
        n = np.tanh(n_x + w["Whh"] @ (r * h))
    return ((1 - z) * n + z * h,)


def tolerance(dtype) -> dict[str, float]:
    small = 1e-5 if np.dtype(dtype) == np.float32 else 1e-12
    return {"rtol": small, "atol": small}


# ---------------------------------------------------------------------- values


@each_cell
def test_a_step_computes_the_equation_of_the_docstring(kind, dtype, rng):
    cell = make(kind, dtype, rng)
    x, state = rng.normal(size=(N_IN, BATCH)).astype(dtype), start(cell, BATCH, rng)
    after, y = cell(cell.wrap(state), x)
    after = after if isinstance(after, tuple) else (after,)
    for got, want in zip(after, twin(cell, state, x), strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(got, want, **tolerance(dtype))
    np.testing.assert_array_equal(y, after[0])


@each_cell
def test_the_kernel_equals_the_same_equations_as_separate_operations(kind, dtype, rng):
    cell = make(kind, dtype, rng)
    x, state = rng.normal(size=(N_IN, BATCH)).astype(dtype), start(cell, BATCH, rng)
    fused, y = cell.run_step(x, state)
    split, y2 = Cell.run_step(cell, x, state)
    for a, b in zip(fused, split, strict=True):
        np.testing.assert_allclose(a, b, **tolerance(dtype))
    np.testing.assert_allclose(y, y2, **tolerance(dtype))


@four_cells
def test_shapes_of_output_and_state_follow_x_and_state(kind, rng):
    cell = make(kind, np.float32, rng)

    def shapes(x_shape, state_shape):
        state = cell.wrap(tuple(np.zeros(state_shape) for _ in cell.state_names))
        after, y = cell(state, np.ones(x_shape))
        part = after[0] if isinstance(after, tuple) else after
        return part.shape, y.shape

    assert shapes((N_IN,), (N_OUT,)) == ((N_OUT,), (N_OUT,))
    assert shapes((N_IN,), (N_OUT, 1)) == ((N_OUT, 1), (N_OUT,))
    assert shapes((N_IN, 1), (N_OUT,)) == ((N_OUT, 1), (N_OUT, 1))
    assert shapes((N_IN, 6), (N_OUT,)) == ((N_OUT, 6), (N_OUT, 6))
    assert shapes((N_IN, 6), (N_OUT, 6)) == ((N_OUT, 6), (N_OUT, 6))


@four_cells
def test_any_strides_dtype_and_number_type_give_the_same_step(kind, dtype, rng):
    cell = make(kind, dtype, rng)
    x = rng.integers(0, 2, (N_IN, BATCH))
    state = cell.wrap(start(cell, BATCH, rng))
    expected = cell(state, x.astype(dtype))[1]
    wide = np.zeros((2 * N_IN, 3 * BATCH), dtype)
    wide[::2, ::3] = x
    for other in (
        x,
        x.astype(bool),
        x.astype(np.float64),
        x.astype(np.float16),
        np.asfortranarray(x.astype(dtype)),
        wide[::2, ::3],
        x.tolist(),
    ):
        got = cell(state, other)[1]
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, expected)


@four_cells
def test_step_returns_the_output_first_and_starts_from_zeros(kind, dtype, rng):
    cell = make(kind, dtype, rng)
    x = rng.normal(size=(N_IN, 2)).astype(dtype)
    y, state = cell.step(x)
    zeros = cell.wrap(tuple(np.zeros((N_OUT, 2), dtype) for _ in cell.state_names))
    state0, y0 = cell(zeros, x)
    np.testing.assert_array_equal(y, y0)
    for a, b in zip(np.atleast_1d(state), np.atleast_1d(state0), strict=True):
        np.testing.assert_array_equal(a, b)
    y_again, _ = cell.step(x, zeros)
    np.testing.assert_array_equal(y, y_again)


def test_an_lstm_state_has_names(rng):
    state, y = make("lstm", np.float32, rng).step(np.ones(N_IN))[::-1]
    assert isinstance(state, LSTMState)
    np.testing.assert_array_equal(state.h, y)
    assert state.c.shape == (N_OUT,)


@four_cells
def test_outputs_share_no_memory_with_the_state_or_the_input(kind, rng):
    cell = make(kind, np.float32, rng)
    x = np.ones((N_IN, 2), np.float32)
    for _ in range(2):
        state, y = cell(cell.initial_state(), x)
        h = state[0] if isinstance(state, tuple) else state
        assert not np.shares_memory(y, h)
        assert not np.shares_memory(y, x)
        assert y.T.flags.c_contiguous and y.flags.writeable


# ---------------------------------------------------------------------- gradients


def total(parts, weights):
    loss = 0.0
    for part, weight in zip(parts, weights, strict=True):
        if weight is not None:
            loss = loss + (part * weight).sum()
    return loss


@each_cell
@pytest.mark.parametrize("batch", [1, 3])
def test_gradients_of_a_step_match_finite_differences(kind, batch, rng):
    cell = make(kind, np.float64, rng)
    x, state = rng.normal(size=(N_IN, batch)), start(cell, batch, rng)

    def f(cell, x, *state):
        after, _ = cell(cell.wrap(state), x)
        return after

    gradcheck(f, cell, x, *state)


@each_cell
def test_gradients_of_a_sequence_match_finite_differences(kind, rng):
    cell = make(kind, np.float64, rng)
    X, state = rng.normal(size=(N_IN, 2, 6)), start(cell, 2, rng)
    lengths = np.array([6, 3])

    def f(cell, X, *state, lengths=None):
        after, Y = cell.run_sequence(X, state, lengths)
        return [*after, Y]

    gradcheck(f, cell, X, *state)
    gradcheck(lambda *args: f(*args, lengths=lengths), cell, X, *state)


@four_cells
def test_every_combination_of_used_outputs_and_wanted_inputs(kind, rng):
    """The fused backward against the separate operations, for each subset that a loss may use."""
    cell = make(kind, np.float64, rng)
    n = len(cell.state_names)
    x, state = rng.normal(size=(N_IN, 2)), start(cell, 2, rng)
    weights = [rng.normal(size=(N_OUT, 2)) for _ in range(n + 1)]
    for used in itertools.product([True, False], repeat=n + 1):
        chosen = [w if use else None for w, use in zip(weights, used, strict=True)]
        for wanted in itertools.product([True, False], repeat=n + 1):
            grads = []
            for run in (cell.run_step, lambda *a: Cell.run_step(cell, *a)):

                def f(cell, *watched, run=run, chosen=chosen, wanted=wanted):
                    given = iter(watched)
                    parts = [
                        next(given) if w else p for p, w in zip((x, *state), wanted, strict=True)
                    ]
                    after, y = run(parts[0], tuple(parts[1:]))
                    return total((y, *after), chosen)

                args = [p for p, w in zip((x, *state), wanted, strict=True) if w]
                result = gradient(f, cell, *args)
                grads.append(result if isinstance(result, tuple) else (result,))
            fused, split = grads
            for path in named_params(cell):
                np.testing.assert_allclose(fused[0][path], split[0][path], atol=1e-12)
            for a, b in zip(fused[1:], split[1:], strict=True):
                np.testing.assert_allclose(a, b, atol=1e-12)


@four_cells
def test_every_combination_of_used_outputs_of_a_sequence(kind, rng):
    cell = make(kind, np.float64, rng)
    n = len(cell.state_names)
    X, state = rng.normal(size=(N_IN, 2, 3)), start(cell, 2, rng)
    weights = [rng.normal(size=(N_OUT, 2, 3))] + [rng.normal(size=(N_OUT, 2)) for _ in range(n)]
    for used in itertools.product([True, False], repeat=n + 1):
        chosen = [w if use else None for w, use in zip(weights, used, strict=True)]
        for remat in (None, 1, 2, 5):

            def f(cell, X, *state, run=cell.run_sequence, remat=remat, chosen=chosen):
                after, Y = run(X, state, remat=remat)
                return total((Y, *after), chosen)

            def g(cell, X, *state, chosen=chosen):
                after, Y = Cell.run_sequence(cell, X, state)
                return total((Y, *after), chosen)

            fused, split = gradient(f, cell, X, *state), gradient(g, cell, X, *state)
            for path in named_params(cell):
                np.testing.assert_allclose(fused[0][path], split[0][path], atol=1e-12)
            for a, b in zip(fused[1:], split[1:], strict=True):
                np.testing.assert_allclose(a, b, atol=1e-12)


@four_cells
def test_a_vector_step_has_the_gradient_of_a_column(kind, rng):
    cell = make(kind, np.float64, rng)
    x, state = rng.normal(size=N_IN), tuple(part[:, 0] for part in start(cell, 1, rng))

    def f(cell, x, *state):
        new, y = cell(cell.wrap(state), x)
        new, y2 = cell(new, 2 * x)
        return (y * y2).sum() + (new[0] if isinstance(new, tuple) else new).sum()

    vector = gradient(f, cell, x, *state)
    column = gradient(f, cell, x[:, None], *(part[:, None] for part in state))
    for path in named_params(cell):
        np.testing.assert_allclose(vector[0][path], column[0][path], atol=1e-13)
    for a, b in zip(vector[1:], column[1:], strict=True):
        np.testing.assert_allclose(a, b[:, 0], atol=1e-13)


def test_one_product_per_weight_serves_a_loop(rng, monkeypatch):
    from recur import _kernels

    cell = make("lstm", np.float64, rng)
    calls = []
    product = _kernels.weight_gradient
    monkeypatch.setattr(
        _kernels, "weight_gradient", lambda *a, **k: [calls.append(1), product(*a, **k)][1]
    )

    def f(cell):
        state, loss = cell.initial_state(), 0.0
        for t in range(20):
            state, y = cell(state, np.full((N_IN, 2), 0.1 * t))
            loss = loss + y.sum()
        return loss

    gradient(f, cell)
    assert len(calls) == 2  # Wi and Wh


# ---------------------------------------------------------------------- weights


def test_the_start_of_the_weights():
    cell = LSTMCell(3, 5, rng=np.random.default_rng(0))
    assert list(named_params(cell)) == ["Wi", "Wh", "b"]
    assert [p.shape for p in params(cell)] == [(20, 3), (20, 5), (20,)]
    np.testing.assert_array_equal(cell.b.value, [0] * 5 + [1] * 5 + [0] * 10)
    assert not LSTMCell(3, 5, forget_bias=0.0).b.value.any()
    again = LSTMCell(3, 5, rng=np.random.default_rng(0))
    np.testing.assert_array_equal(cell.Wh.value, again.Wh.value)
    draws = np.random.default_rng(0)
    for p in (cell.Wi, cell.Wh):  # one draw a matrix, in this order
        bound = np.sqrt(6 / sum(p.shape))
        drawn = draws.uniform(-bound, bound, p.shape).astype(np.float32)
        np.testing.assert_array_equal(p.value, drawn)
    assert list(named_params(GRUv3Cell(2, 3))) == ["Wi", "Wh", "b", "Whh"]
    assert GRUv3Cell(2, 3).Wh.shape == (6, 3)
    assert list(named_params(GRUCell(2, 3, recurrent_bias=True))) == ["Wi", "Wh", "b", "bh"]
    assert list(named_params(GRUCell(2, 3, bias=False))) == ["Wi", "Wh"]


def test_recurrent_weights_may_start_another_way():
    ones = lambda *dims: np.ones(dims)  # noqa: E731
    cell = GRUv3Cell(2, 3, recurrent_init=ones, bias_init=ones, dtype=np.float64)
    assert np.all(cell.Wh.value == 1) and np.all(cell.Whh.value == 1) and np.all(cell.b.value == 1)
    assert not np.all(cell.Wi.value == 1)
    assert cell.dtype == np.float64


WRITES = {
    "item assignment": lambda cell: cell.Wh.__setitem__(..., 0.25),
    "in place": lambda cell: cell.Wh.__iadd__(0.5),
    "with writing": lambda cell: _write(cell.Wi),
    "attribute": lambda cell: setattr(cell, "Wh", np.full(cell.Wh.shape, 0.5)),
    "another Param": lambda cell: setattr(cell, "b", Param(np.ones(cell.b.shape))),
    "flat buffer": lambda cell: _write_flat(cell),
    "bias removed": lambda cell: setattr(cell, "b", None),
}


def _write(p):
    with p.writing() as a:
        a[...] *= 2


def _write_flat(cell):
    (flat,) = flatten_parameters(cell)
    with flat.writing() as a:
        a[...] += 0.25


@pytest.mark.parametrize("how", WRITES)
@four_cells
def test_packed_weights_never_go_stale(kind, how, rng):
    cell = make(kind, np.float64, rng)
    x, state = rng.normal(size=(N_IN, 2)), start(cell, 2, rng)
    before = cell(cell.wrap(state), x)[1]
    WRITES[how](cell)
    after = cell(cell.wrap(state), x)[1]
    assert not np.allclose(before, after)
    np.testing.assert_allclose(after, twin(cell, state, x)[0], atol=1e-12)


def test_writing_another_parameter_does_not_pack_again(rng):
    cell, other = make("gru", np.float32, rng), make("gru", np.float32, rng)
    kernel = cell.packed().kernel
    other.Wi += 1
    assert cell.packed().kernel is kernel
    cell.Wi += 1
    assert cell.packed().kernel is not kernel


def test_two_cells_share_a_param_and_copy_an_array(rng):
    a, b = make("rnn", np.float32, rng), make("rnn", np.float32, rng)
    b.Wh = a.Wh
    assert len(params([a, b])) == 5
    a.Wh[...] = 0
    x = rng.normal(size=(N_IN, 2)).astype(np.float32)
    state = start(b, 2, rng)
    np.testing.assert_allclose(b(state, x)[1], twin(b, state, x)[0], rtol=1e-5)
    array = np.ones((N_OUT, N_OUT))
    held = b.Wh
    b.Wh = array
    array[...] = 7
    assert b.Wh is held and np.all(b.Wh.value == 1)


def test_an_absent_weight_may_be_given_later(rng):
    cell = LSTMCell(N_IN, N_OUT, bias=False, dtype=np.float64)
    cell.b = np.ones(4 * N_OUT)
    cell.peephole = np.full((3, N_OUT), 0.5)
    assert list(named_params(cell)) == ["Wi", "Wh", "b", "peephole"]
    x, state = rng.normal(size=(N_IN, 2)), start(cell, 2, rng)
    np.testing.assert_allclose(cell(state, x)[1], twin(cell, state, x)[0], atol=1e-12)


def test_weights_of_a_wrong_shape_are_refused(rng):
    cell = make("lstm", np.float32, rng)
    before = cell.Wh.value.copy()
    for bad in (np.ones((3, 3)), Param(np.ones((16, 5))), 1.0):
        with pytest.raises(ShapeError, match=r"LSTM\(3 => 4\)\.Wh.*expected \(16, 4\)"):
            cell.Wh = bad
    with pytest.raises(ShapeError, match="None"):
        cell.Wh = None
    np.testing.assert_array_equal(cell.Wh.value, before)


@four_cells
def test_cells_are_made_from_arrays(kind, dtype, rng):
    cell = make(kind, dtype, rng)
    arrays = {name: p.value for name, p in named_params(cell).items()}
    built = type(cell).from_arrays(**arrays)
    assert built.dtype == dtype
    for name, array in arrays.items():
        np.testing.assert_array_equal(getattr(built, name).value, array)
        assert not np.shares_memory(getattr(built, name).value, array)
    shared = type(cell).from_arrays(**{**arrays, "Wh": cell.Wh})
    assert shared.Wh is cell.Wh
    with pytest.raises(ShapeError):
        type(cell).from_arrays(np.ones((3, 2)), np.ones((4, 4)))


def test_from_arrays_takes_options_and_optional_weights():
    cell = LSTMCell.from_arrays(
        np.ones((4, 2)), np.ones((4, 1)), peephole=np.ones((3, 1)), gate_act="hard_sigmoid"
    )
    assert cell.b is None and cell.peephole.shape == (3, 1) and cell.gate_act == "hard_sigmoid"
    rnn = RNNCell.from_arrays([[1, 2]], [[3]], [0.5], act=ops.relu)
    assert rnn.dtype == np.float32
    np.testing.assert_array_equal(rnn(np.ones(1), np.ones(2))[1], [6.5])


class Diagonal:
    """A constant matrix that is no array."""

    def __init__(self, entries):
        self.entries = np.asarray(entries)
        self.shape = (len(entries), len(entries))

    T = property(lambda self: self)

    def __matmul__(self, other):
        return self.entries[:, None] * other if other.ndim == 2 else self.entries * other


def test_a_structured_recurrent_matrix_is_a_constant(dtype, rng):
    cell = make("rnn", dtype, rng)
    entries = rng.normal(size=N_OUT)
    dense = copy.deepcopy(cell)
    dense.Wh = np.diag(entries)
    cell.Wh = Diagonal(entries)
    assert list(named_params(cell)) == ["Wi", "b"]
    x, h = rng.normal(size=(N_IN, 3)).astype(dtype), start(cell, 3, rng)[0]

    def f(cell, x, h):
        for _ in range(3):
            h, y = cell(h, x)
        return (y * y).sum()

    got, want = withgradient(f, cell, x, h), withgradient(f, dense, x, h)
    np.testing.assert_allclose(got[0], want[0], **tolerance(dtype))
    assert cell(h, x)[1].dtype == dtype
    for name in ("Wi", "b"):
        np.testing.assert_allclose(got[1][0][name], want[1][0][name], **tolerance(dtype))
    for a, b in zip(got[1][1:], want[1][1:], strict=True):
        np.testing.assert_allclose(a, b, **tolerance(dtype))


def test_an_activation_of_ones_own_runs_as_operations(rng):
    cell = RNNCell(N_IN, N_OUT, lambda x: ops.tanh(x) * 0.5, dtype=np.float64, rng=rng)
    gradcheck(
        lambda cell, x, h: cell(h, x)[0], cell, rng.normal(size=(N_IN, 2)), np.ones((N_OUT, 2))
    )
    by_name = RNNCell(N_IN, N_OUT, "relu")
    assert by_name.act is ops.relu
    assert RNNCell(N_IN, N_OUT, ops.elu)(np.zeros(N_OUT), np.ones(N_IN))[1].shape == (N_OUT,)


@four_cells
def test_an_activation_or_gate_that_is_replaced_is_seen(kind, rng):
    cell = make(kind, np.float64, rng)
    x, state = rng.normal(size=(N_IN, 2)), start(cell, 2, rng)
    before = cell(cell.wrap(state), x)[1]
    if kind == "rnn":
        cell.act = ops.relu
    else:
        cell.gate_act = "hard_sigmoid"
    after = cell(cell.wrap(state), x)[1]
    assert not np.allclose(before, after)
    np.testing.assert_allclose(after, twin(cell, state, x)[0], atol=1e-12)


@four_cells
def test_a_weight_computed_from_parameters_passes_its_gradient_on(kind, rng):
    cell = make(kind, np.float64, rng)
    raw = cell.Wh.value
    mask = rng.integers(0, 2, raw.shape).astype(float)
    x, state = rng.normal(size=(N_IN, 2)), start(cell, 2, rng)

    def loop(cell):
        now, loss = cell.wrap(state), 0.0
        for _ in range(3):
            now, y = cell(now, x)
            loss = loss + (y * y).sum()
        return loss

    class Masked:
        def weight(self, raw):
            return raw * mask

    other = copy.deepcopy(cell)
    other.compute_weight("Wh", Masked())
    assert list(named_params(other))[:2] == ["Wi", "Wh_raw"]
    plain = copy.deepcopy(cell)
    plain.Wh = raw * mask
    want, grads = withgradient(loop, plain)
    got, of_other = withgradient(loop, other)
    np.testing.assert_allclose(got, want, atol=1e-12)
    np.testing.assert_allclose(of_other["Wh_raw"], grads["Wh"] * mask, atol=1e-12)


def test_the_cache_of_a_computed_weight_keeps_no_history(rng):
    cell = make("rnn", np.float64, rng)
    raw = cell.Wh

    class Doubled:
        def weight(self, raw):
            return raw * 2.0

    cell.compute_weight("Wh", Doubled())
    with Tape() as tape:
        cell(cell.initial_state(), np.ones(N_IN))
        assert tape.live == 0
    x, h = rng.normal(size=(N_IN, 2)), start(cell, 2, rng)[0]
    for factor in (1.0, 3.0):
        raw *= factor
        want = np.tanh(cell.Wi.value @ x + 2 * raw.value @ h + cell.b.value[:, None])
        np.testing.assert_allclose(cell(h, x)[1], want, atol=1e-12)


# ---------------------------------------------------------------------- scopes


def test_outside_a_scope_results_are_arrays_and_inside_tensors(rng):
    cell = make("gru", np.float32, rng)
    x, h = np.ones(N_IN), cell.initial_state()
    assert type(cell(h, x)[1]) is np.ndarray
    with Tape():
        state, y = cell(h, x)
        assert type(y) is Tensor and type(state) is Tensor
        with paused():
            assert type(cell(state, x)[1]) is np.ndarray
    assert type(cell(state, x)[1]) is np.ndarray


@four_cells
def test_inputs_may_be_overwritten_after_a_recorded_call(kind, rng):
    cell = make(kind, np.float64, rng)
    x, state = rng.normal(size=(N_IN, 2)), start(cell, 2, rng)
    X = rng.normal(size=(N_IN, 2, 3))

    def f(cell, overwrite):
        xs, parts, Xs = x.copy(), tuple(p.copy() for p in state), X.copy()
        after, y = cell(cell.wrap(parts), xs)
        Y = cell(after, Xs[:, :, 0])[1]
        if overwrite:
            for array in (xs, Xs, *parts):
                array[...] = np.nan
        return (y * Y).sum()

    kept, written = gradient(lambda c: f(c, False), cell), gradient(lambda c: f(c, True), cell)
    for path in named_params(cell):
        np.testing.assert_array_equal(kept[path], written[path])


@four_cells
@pytest.mark.parametrize("form", ["vector", "columns", "time-major"])
def test_arrays_in_the_kernel_s_own_layout_are_copied_too(kind, form, rng):
    cell = make(kind, np.float64, rng)
    x = {
        "vector": rng.normal(size=N_IN),
        "columns": np.asfortranarray(rng.normal(size=(N_IN, 2))),
        "time-major": rng.normal(size=(3, 2, N_IN)).T,
    }[form]
    state = cell.initial_state()

    def f(cell, overwrite):
        given = x.copy(order="K")
        if given.ndim == 3:
            y = cell.run_sequence(floats("x", "x", given, cell.dtype), start_of(cell, 2))[1]
        else:
            y = cell(state, given)[1]
        if overwrite:
            given[...] = np.nan
        return (y * y).sum()

    kept, written = gradient(lambda c: f(c, False), cell), gradient(lambda c: f(c, True), cell)
    for path in named_params(cell):
        np.testing.assert_array_equal(kept[path], written[path])


def start_of(cell, batch):
    return tuple(np.zeros((n, batch), cell.dtype) for n in cell.state_sizes)


@four_cells
def test_a_kept_graph_may_be_swept_again_with_the_same_result(kind, rng):
    cell = make(kind, np.float64, rng)
    x, X = rng.normal(size=(N_IN, 2)), rng.normal(size=(N_IN, 2, 3))
    with Tape() as tape:
        state, y = cell(cell.wrap(start(cell, 2, rng)), x)
        after, Y = cell.run_sequence(X, state if isinstance(state, tuple) else (state,))
        loss = (y * y).sum() + (Y * Y).sum() + after[-1].sum()
        sweeps = [
            tape.gradient(loss, params(cell), keep_graph=keep) for keep in (True, True, False)
        ]
    for other in sweeps[1:]:
        for a, b in zip(sweeps[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


@four_cells
def test_a_backward_that_needs_an_overwritten_weight_says_so(kind, rng):
    cell = make(kind, np.float64, rng)
    with Tape() as tape:
        x = tape.watch(np.ones((N_IN, 2)))
        y = cell(cell.initial_state(), x)[1]
        cell.Wi += 1.0
        with pytest.raises(TapeError, match=r"Wi.*written since"):
            tape.backward(y.sum())
    with Tape() as tape:
        state, y = cell(cell.initial_state(), np.ones((N_IN, 2)))
        y = cell(state, np.ones((N_IN, 2)))[1]
        cell.Wh += 1.0
        with pytest.raises(TapeError, match=r"Wh.*written since"):
            tape.backward(y.sum())


def test_a_backward_that_needs_no_weight_lets_them_be_written(rng):
    cell = make("lstm", np.float64, rng)
    want = gradient(lambda c: c(c.initial_state(), np.ones(N_IN))[1].sum(), cell)
    with Tape() as tape:
        y = cell(cell.initial_state(), np.ones(N_IN))[1]
        for p in params(cell):
            p += 1.0
        tape.backward(y.sum())
    for name, p in named_params(cell).items():
        np.testing.assert_array_equal(p.grad, want[name])


def test_weights_are_packed_once_by_threads_that_race(rng):
    cell = make("lstm", np.float64, rng)
    x, state = rng.normal(size=(N_IN, 2)), start(cell, 2, rng)
    want = twin(cell, state, x)[0]
    failures = []

    def work():
        for _ in range(200):
            if not np.allclose(cell(cell.wrap(state), x)[1], want, atol=1e-12):
                failures.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ---------------------------------------------------------------------- copies and errors


@each_cell
def test_copies_pickles_and_casts_give_the_same_step(kind, rng):
    cell = make(kind, np.float32, rng)
    x, state = rng.normal(size=(N_IN, 2)).astype(np.float32), start(cell, 2, rng)
    want = cell(cell.wrap(state), x)[1]
    for other in (copy.deepcopy(cell), copy.copy(cell), pickle.loads(pickle.dumps(cell))):
        np.testing.assert_array_equal(other(other.wrap(state), x)[1], want)
        for p, q in zip(params(cell), params(other), strict=True):
            assert not np.shares_memory(p.value, q.value)
    wide = f64(cell)
    assert wide.dtype == np.float64
    np.testing.assert_allclose(wide(wide.wrap(state), x)[1], want, rtol=1e-5, atol=1e-6)


@each_cell
def test_a_cell_is_rebuilt_from_its_config(kind, rng):
    cell = make(kind, np.float64, rng)
    other = type(cell).from_config(cell.config(), 1)
    assert repr(other) == repr(cell)
    assert [p.shape for p in params(other)] == [p.shape for p in params(cell)]
    assert other.dtype == cell.dtype
    assert getattr(other, "gate_act", None) == getattr(cell, "gate_act", None)


def test_printing():
    assert repr(LSTMCell(3, 5)) == "LSTMCell(3 => 5)"
    assert repr(RNNCell(3, 5)) == "RNNCell(3 => 5, tanh)"
    assert repr(RNNCell(3, 5, ops.identity)) == "RNNCell(3 => 5)"


@four_cells
def test_a_cell_called_without_a_state_names_step(kind, rng):
    with pytest.raises(TypeError, match=r"cell\.step\(x\)"):
        make(kind, np.float32, rng)(np.ones(N_IN))


@four_cells
def test_wrong_inputs_and_states_are_refused_by_name(kind, rng):
    cell = make(kind, np.float32, rng)
    title = cell.title.replace("(", r"\(").replace(")", r"\)")
    good = cell.initial_state()
    for x in (np.ones(N_IN + 1), np.ones((N_IN + 1, 2))):
        with pytest.raises(ShapeError, match=rf"{title}: x has 4 features on axis 0, expected 3"):
            cell(good, x)
    for x in (np.ones((N_IN, 2, 2)), 1.0):
        with pytest.raises(ShapeError, match=r"axes"):
            cell(good, x)
    with pytest.raises(ShapeError, match="numbers"):
        cell(good, np.array(["a"] * N_IN))
    with pytest.raises(ShapeError, match="not an array"):
        cell(good, [[1.0], [2.0, 3.0], [4.0]])
    n = len(cell.state_names)
    with pytest.raises(StateError, match=rf"{title}: state.* has shape \(5,\), expected \(4,\)"):
        cell(cell.wrap((np.zeros(N_OUT + 1),) * n), np.ones(N_IN))
    with pytest.raises(BatchSizeError, match="batch 7, x has batch 2"):
        cell(cell.wrap((np.zeros((N_OUT, 7)),) * n), np.ones((N_IN, 2)))
    with pytest.raises(StateError, match="parts"):
        cell((np.zeros(N_OUT),) * 3, np.ones(N_IN))


def test_the_two_parts_of_an_lstm_state_have_one_batch(rng):
    cell = make("lstm", np.float32, rng)
    with pytest.raises(StateError, match="one batch size"):
        cell((np.zeros((N_OUT, 2)), np.zeros((N_OUT, 3))), np.ones((N_IN, 2)))


def test_constructors_refuse_what_is_no_size_or_function():
    for bad in (0, -1, 2.5, True, "3"):
        with pytest.raises(ShapeError, match="positive integer"):
            LSTMCell(bad, 3)
    with pytest.raises(TypeError, match="init_state"):
        RNNCell(3, 5, init=np.zeros(5))
    with pytest.raises(TypeError, match="act"):
        RNNCell(3, 5, 3)
    with pytest.raises(ValueError, match="hard_sigmoid"):
        GRUCell(3, 5, gate_act="relu")
    with pytest.raises(TypeError, match="dtype"):
        GRUCell(3, 5, dtype=np.float16)


@four_cells
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 17])
def test_a_sample_s_numbers_do_not_depend_on_its_batch(kind, batch, dtype, rng):
    cell = make(kind, dtype, rng, 5, 17)
    x, state = rng.normal(size=(5, batch)).astype(dtype), start(cell, batch, rng)
    together = cell(cell.wrap(state), x)[1]
    for b in range(batch):
        alone = cell(cell.wrap(tuple(p[:, b] for p in state)), x[:, b])[1]
        np.testing.assert_array_equal(together[:, b], alone)
