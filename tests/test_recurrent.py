"""`Recur`: what a call does, sequences and lists, layouts, options, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from recur import ops
from recur.cells import LSTMCell, LSTMState, RNNCell
from recur.errors import BatchSizeError, ShapeError, StateError
from recur.gradients import gradient, withgradient
from recur.layers import Chain, Dense
from recur.module import buffers, f32, f64, named_params, outputsize, params, summary
from recur.recurrent import GRU, LSTM, RNN, START, GRUv3, Recur, reset, scan, states, truncate
from recur.tape import Param, Tape, Tensor, paused, value

LAYERS = {"RNN": RNN, "LSTM": LSTM, "GRU": GRU, "GRUv3": GRUv3}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


def parts(state) -> tuple:
    return tuple(state) if isinstance(state, tuple) else (state,)


def same(a, b) -> None:
    for x, y in zip(parts(a), parts(b), strict=True):
        np.testing.assert_array_equal(value(x), value(y))


def near(a, b, dtype=np.float64) -> None:
    small = 1e-5 if np.dtype(dtype) == np.float32 else 1e-12
    for x, y in zip(parts(a), parts(b), strict=True):
        np.testing.assert_allclose(value(x), value(y), rtol=small, atol=small)


# ---------------------------------------------------------------------- one step


@each_layer
def test_a_call_is_a_step_of_the_cell_and_keeps_its_state(layer, dtype, rng):
    m = layer(3, 5, dtype=dtype, rng=rng)
    xs = rng.normal(size=(4, 3, 2)).astype(dtype)
    state = m.cell.initial_state()
    for x in xs:
        state, y = m.cell(state, x)
        np.testing.assert_array_equal(m(x), y)
        same(m.state, state)


@each_layer
def test_the_output_has_the_axes_of_the_input(layer):
    m = layer(3, 5)
    for shape in ((3,), (3, 1), (3, 1, 2)):
        for _ in range(2):
            y = m(np.ones(shape))
            assert y.shape == (5, *shape[1:])
            assert y.dtype == np.float32
            assert all(part.shape == (5, 1) for part in parts(m.state))


@each_layer
def test_vector_column_and_sequence_of_one_step_agree(layer, dtype, rng):
    m = layer(3, 5, dtype=dtype)
    x = rng.normal(size=3).astype(dtype)
    results = []
    for shape in ((3,), (3, 1), (3, 1, 1)):
        m.reset()
        results.append((m(x.reshape(shape)).ravel(), *(p.ravel() for p in parts(m.state))))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


@each_layer
def test_outputs_and_states_never_share_memory(layer):
    m = layer(3, 5)
    for x in (np.ones(3), np.ones((3, 1)), np.ones((3, 1, 4)), [np.ones(3)] * 2):
        y = m(x)
        for out in y if isinstance(y, list) else [y]:
            before = [part.copy() for part in parts(m.state)]
            out[...] = 99
            for part, old in zip(parts(m.state), before, strict=True):
                np.testing.assert_array_equal(part, old)


@each_layer
def test_the_state_that_is_read_is_a_copy_that_cannot_be_written(layer):
    m = layer(3, 5)
    m(np.ones((3, 2)))
    held = parts(m.state)[0]
    with pytest.raises(ValueError, match="read-only"):
        held[...] = 0
    old = held.copy()
    m(np.ones((3, 2)))
    np.testing.assert_array_equal(held, old)


@each_layer
def test_a_batch_input_and_output_are_laid_out_features_first(layer, rng):
    m = layer(3, 5)
    assert m(rng.normal(size=(3, 4))).T.flags.c_contiguous
    assert m(rng.normal(size=(3, 4, 2))).T.flags.c_contiguous
    with Tape():
        assert value(m(rng.normal(size=(3, 4)))).T.flags.c_contiguous
        assert value(m(rng.normal(size=(3, 4, 2)))).T.flags.c_contiguous


# ---------------------------------------------------------------------- sequences


@each_layer
@pytest.mark.parametrize("T", [1, 2, 7])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_sequence_equals_its_steps_in_values_and_gradients(layer, T, batch, rng):
    m = layer(3, 4, dtype=np.float64, learn_init=True, rng=rng)
    X = rng.normal(size=(3, batch, T))
    w = rng.normal(size=(4, batch, T))

    def by_steps(m, X):
        ys = [m(X[:, :, t]) for t in range(T)]
        return sum((y * w[:, :, t]).sum() for t, y in enumerate(ys))

    ways = {
        "sequence": lambda m, X: (m(X) * w).sum(),
        "list": lambda m, X: sum(
            (y * w[:, :, t]).sum() for t, y in enumerate(m([X[:, :, t] for t in range(T)]))
        ),
        "map": lambda m, X: sum(
            (y * w[:, :, t]).sum() for t, y in enumerate(map(m, (X[:, :, t] for t in range(T))))
        ),
        "remat": lambda m, X: (m(X, remat=3) * w).sum(),
        "two halves": lambda m, X: (
            ops.concatenate([m(X[:, :, : T // 2]), m(X[:, :, T // 2 :])], -1) * w
        ).sum(),
    }
    want, (of_m, of_x) = withgradient(by_steps, m, X)
    state = m.state
    for name, way in ways.items():
        m.reset()
        got, (dm, dx) = withgradient(way, m, X)
        near(got, want)
        near(m.state, state)
        for path in named_params(m):
            np.testing.assert_allclose(dm[path], of_m[path], atol=1e-11, err_msg=name)
        np.testing.assert_allclose(dx, of_x, atol=1e-11, err_msg=name)


@each_layer
def test_any_strides_give_the_same_sequence(layer, dtype, rng):
    m = layer(3, 4, dtype=dtype)
    X = rng.normal(size=(3, 2, 6)).astype(dtype)
    want = m(X)
    wide = np.zeros((6, 4, 12), dtype)
    wide[::2, ::2, ::2] = X
    for other in (X.T.copy().T, np.asfortranarray(X), wide[::2, ::2, ::2], X[::-1][::-1]):
        m.reset()
        np.testing.assert_array_equal(m(other), want)


@each_layer
def test_a_sequence_without_steps_changes_nothing(layer):
    m = layer(3, 4)
    empty = np.zeros((3, 2, 0))
    assert m(empty).shape == (4, 2, 0)
    assert m([]) == []
    assert m.at_start
    m(np.ones((3, 2)))
    before = m.state
    assert m(empty).shape == (4, 2, 0)
    same(m.state, before)
    with pytest.raises(ShapeError):
        m(np.zeros((2, 2, 0)))
    with pytest.raises(BatchSizeError):
        m(np.zeros((3, 5, 0)))


def test_a_list_of_steps_gives_a_list(rng):
    m = LSTM(3, 4, dtype=np.float64)
    xs = [rng.normal(size=3) for _ in range(5)]
    ys = m(xs)
    assert type(ys) is list and all(y.shape == (4,) for y in ys)
    m.reset()
    for y, x in zip(ys, xs, strict=True):
        near(y, m(x))
    m.reset()
    for a, b in zip(ys, m(tuple(xs)), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ShapeError, match=r"step 1 .* shape \(3, 2\), step 0"):
        m([np.ones(3), np.ones((3, 2))])


def test_a_list_may_hold_tensors_and_their_gradient_is_theirs(rng):
    m = GRU(3, 4, dtype=np.float64)
    xs = [rng.normal(size=(3, 2)) for _ in range(3)]
    listed = gradient(lambda *xs: sum((y * y).sum() for y in m(list(xs))), *xs)
    m.reset()
    stepped = gradient(lambda *xs: sum((m(x) ** 2).sum() for x in xs), *xs)
    for a, b in zip(listed, stepped, strict=True):
        near(a, b)


def test_a_hundred_steps_feed_one_node_and_twenty_thousand_do_not_recurse():
    m = RNN(1, 1, ops.identity, dtype=np.float64)
    m.cell.Wi, m.cell.Wh = [[0.001]], [[0.999]]
    with Tape() as tape:
        y = m(np.ones((1, 1, 100)))
        assert tape.live == 1
        del y
    m.reset()

    def loop(m):
        for _ in range(20_000):
            y = m(np.ones(1))
        return y.sum()

    looped = gradient(loop, m)
    m.reset()
    whole = gradient(lambda m: m(np.ones((1, 1, 20_000)))[..., -1].sum(), m)
    for path in named_params(m):
        np.testing.assert_allclose(looped[path], whole[path], rtol=1e-9)


# ---------------------------------------------------------------------- layout and dtype


def test_layout_ftb_reads_features_time_batch(rng):
    a, b = (GRU(2, 3, layout=name, rng=np.random.default_rng(1)) for name in ("fbt", "ftb"))
    X = rng.normal(size=(2, 4, 5)).astype(np.float32)
    np.testing.assert_array_equal(a(X), b(X.swapaxes(1, 2)).swapaxes(1, 2))
    reset([a, b])
    one = X[:, 0]  # (features, time): one sample
    np.testing.assert_array_equal(b(one), a(one[:, None])[:, 0])
    reset([a, b])
    np.testing.assert_array_equal(b(one[:, 0]), a(one[:, 0]))
    reset([a, b])
    grads = [
        gradient(lambda m, X: (m(X) ** 2).sum(), m, x)[1]
        for m, x in ((a, X), (b, X.swapaxes(1, 2)))
    ]
    near(grads[0], grads[1].swapaxes(1, 2), np.float32)


@each_layer
def test_inputs_of_other_dtypes_are_converted_unless_strict(layer):
    m, strict = layer(2, 3), layer(2, 3, strict_dtype=True)
    for x in (np.ones((2, 4)), np.ones((2, 4), int), np.ones((2, 4), bool), [np.ones(2)]):
        reset(m)
        y = m(x)
        assert (y[0] if isinstance(y, list) else y).dtype == np.float32
        assert all(part.dtype == np.float32 for part in parts(m.state))
        with pytest.raises(ShapeError, match=r"strict_dtype=True.*astype"):
            strict(x)
    assert strict(np.ones((2, 4), np.float32)).dtype == np.float32
    with pytest.raises(ShapeError, match="complex"):
        m(np.ones(2, complex))


@each_layer
def test_casting_a_model_casts_its_state(layer, rng):
    m = layer(2, 3, rng=rng)
    x = rng.normal(size=(2, 4))
    m(x)
    wide = f64(m)
    assert wide.state is not START and not wide.at_start
    assert all(part.dtype == np.float64 for part in parts(wide.state))
    assert wide.init is not m.init
    near(wide(x), m(x), np.float32)
    assert f32(wide)(x).dtype == np.float32


# ---------------------------------------------------------------------- constructors


def test_the_layers_are_recur_around_their_cells():
    m = RNN(3, 5, ops.relu, bias=False)
    assert isinstance(m, Recur) and isinstance(m.cell, RNNCell)
    assert m.cell.act is ops.relu and m.cell.b is None
    assert LSTM(3, 5, forget_bias=0.0, peepholes=True).cell.peephole.shape == (3, 5)
    assert GRU(3, 5, recurrent_bias=True).cell.bh.shape == (5,)
    assert list(named_params(GRUv3(3, 5))) == ["cell.Wi", "cell.Wh", "cell.b", "cell.Whh"]


@each_layer
def test_options_are_checked_by_name(layer):
    name = next(n for n, made in LAYERS.items() if made is layer)
    with pytest.raises(TypeError, match=rf"{name}: there is no option 'hidden'.*init_state"):
        layer(3, 5, hidden=4)
    with pytest.raises(TypeError, match="init_state="):
        layer(3, 5, init=np.zeros(5))
    for option in ("init_grad", "layout", "on_batch_change"):
        with pytest.raises(ValueError, match=rf"{name}\(3 => 5\): {option} is 'other'"):
            layer(3, 5, **{option: "other"})


@each_layer
def test_an_initial_state_is_given_as_array_or_function(layer, rng):
    n = len(layer(3, 5).cell.state_names)
    given = [rng.normal(size=5).astype(np.float32) for _ in range(n)]
    m = layer(3, 5, init_state=given[0] if n == 1 else tuple(given))
    same(m.init, tuple(given))
    assert not np.shares_memory(parts(m.init)[0], given[0])
    column = layer(3, 5, init_state=tuple(part[:, None] for part in given))
    assert all(part.shape == (5, 1) for part in parts(column.init))
    np.testing.assert_array_equal(column(np.ones((3, 2))).shape, (5, 2))
    ones = layer(3, 5, init_state=lambda *dims: np.ones(dims))
    assert all((part == 1).all() for part in parts(ones.init))
    for bad in (np.zeros(4), np.zeros((5, 2)), 0.0):
        with pytest.raises(ShapeError, match=r"init h has shape"):
            layer(3, 5, init_state=bad if n == 1 else (bad, bad))
    with pytest.raises(StateError, match="parts"):
        layer(3, 5, init_state=(np.zeros(5),) * 3)


def test_recur_needs_a_callable_cell_and_an_initial_state():
    with pytest.raises(TypeError, match="expected something callable"):
        Recur(3)
    with pytest.raises(StateError, match="init= is missing"):
        Recur(lambda h, x: (h, x))


def test_a_given_state_is_where_the_first_call_starts_and_reset_does_not_go_there():
    cell = RNNCell(1, 1, ops.relu)
    cell.Wi, cell.Wh, cell.b = [[1.0]], [[0.0]], [1.0]
    m = Recur(cell, init=[[0.0]], state=[[1.0]])
    np.testing.assert_array_equal(m.state, [[1.0]])
    np.testing.assert_array_equal(m(np.array([[1.0]])), [[2.0]])
    np.testing.assert_array_equal(m.state, [[2.0]])
    m.reset()
    np.testing.assert_array_equal(m.state, [[0.0]])


# ---------------------------------------------------------------------- printing


def test_printing_and_output_sizes_leave_the_state_alone():
    m = LSTM(3, 5)
    assert repr(m) == "Recur(LSTMCell(3 => 5))"
    assert m.describe_state() == "state: start"
    assert outputsize(m, (3, 4)) == (5, 4) and outputsize(m, (3, 4, 7)) == (5, 4, 7)
    assert m.at_start
    m(np.ones((3, 10)))
    assert m.describe_state() == "state: batch 10"
    before = m.state
    assert outputsize(m, (3, 4)) == (5, 4)
    text = summary(m)
    assert "state: batch 10" in text
    same(m.state, before)
    reset(m)
    truncate(m)
    assert m.describe_state() == "state: any batch"
    with pytest.raises(ShapeError):
        outputsize(m, (4, 4))


def test_errors_name_the_layer_with_its_sizes():
    for name, layer in LAYERS.items():
        m = layer(3, 5)
        with pytest.raises(
            ShapeError, match=rf"^{name}\(3 => 5\): x has 4 features on axis 0, exp"
        ):
            m(np.ones((4, 2)))
        with pytest.raises(ShapeError, match=rf"^{name}\(3 => 5\): x has 4 axes"):
            m(np.ones((3, 2, 2, 2)))
        with pytest.raises(TypeError, match="2 inputs"):
            m(np.ones(3), np.ones(3))


@each_layer
def test_a_call_that_raises_leaves_state_weights_and_tape(layer):
    m = layer(3, 5)
    m(np.ones((3, 2)))
    before = m.state
    bad = [
        lambda: m(np.ones((4, 2))),
        lambda: m(np.ones((3, 3))),
        lambda: m([np.ones((3, 2)), np.ones((4, 2))]),
        lambda: m([np.ones((3, 2)), "x"]),
        lambda: m(np.ones((3, 2, 4)), lengths=[1, 9]),
        lambda: m(np.ones((3, 2, 4)), truncate_every=0),
    ]
    for call in bad:
        for scope in (paused(), Tape()):
            with scope as tape:
                with pytest.raises(ValueError):
                    call()
                assert tape is None or tape.live == 0
        same(m.state, before)


def test_a_chain_that_fails_in_its_last_layer_moves_no_state():
    m = Chain(LSTM(3, 4), GRU(4, 4), Dense(5, 2))
    for scope in (paused(), Tape()):
        with scope, pytest.raises(ShapeError):
            m(np.ones((3, 2)))
        assert all(state is START for state in states(m).values())


# ---------------------------------------------------------------------- scan


@each_layer
def test_scan_equals_the_layer_and_keeps_nothing(layer, dtype, rng):
    m = layer(3, 4, dtype=dtype)
    X = rng.normal(size=(3, 2, 5)).astype(dtype)
    np.testing.assert_array_equal(scan(m.cell, X), m(X))
    Y, state = scan(m.cell, X, return_state=True)
    same(state, m.state)
    Y2, state2 = scan(m.cell, X[:, :, :2], None, True)
    rest, state2 = scan(m.cell, X[:, :, 2:], state2, True)
    np.testing.assert_allclose(np.concatenate([Y2, rest], -1), Y, rtol=1e-6, atol=1e-7)
    near(state2, state, dtype)
    listed = scan(m.cell, [X[:, :, t] for t in range(5)])
    np.testing.assert_allclose(np.stack(listed, -1), Y, rtol=1e-6, atol=1e-7)


def test_the_state_given_to_scan_gets_a_gradient(rng):
    cell = LSTMCell(3, 4, dtype=np.float64)
    X = rng.normal(size=(3, 2, 5))
    h, c = rng.normal(size=(2, 4))
    batch = [np.repeat(part[:, None], 2, 1) for part in (h, c)]

    def f(cell, h, c):
        return (scan(cell, X, (h, c)) ** 2).sum()

    one, many = gradient(f, cell, h, c), gradient(f, cell, *batch)
    for path in named_params(cell):
        near(one[0][path], many[0][path])
    for a, b in zip(one[1:], many[1:], strict=True):
        near(a, b.sum(1))
    with pytest.raises(BatchSizeError, match="batch 3, x has batch 2"):
        scan(cell, X, LSTMState(np.zeros((4, 3)), np.zeros((4, 3))))


def test_scan_runs_functions_and_empty_sequences():
    add = lambda h, x: (h + x, h)  # noqa: E731
    ys, last = scan(add, [1, 2, 3], 0, return_state=True)
    assert ys == [0, 1, 3] and last == 6
    assert scan(add, [], 5, return_state=True) == ([], 5)
    with pytest.raises(StateError, match=r"no initial_state.*state= is needed"):
        scan(add, [1])
    Y, state = scan(RNNCell(2, 3), np.zeros((2, 4, 0)), return_state=True)
    assert Y.shape == (3, 4, 0) and not state.any()


# ---------------------------------------------------------------------- parameters


@each_layer
def test_parameters_are_listed_once_and_init_only_when_learned(layer):
    m = layer(3, 5)
    n = len(params(m))
    learned = layer(3, 5, learn_init=True)
    assert len(params(learned)) == n + len(m.cell.state_names)
    assert len(params([Chain(learned, learned.cell), {"a": learned}])) == len(params(learned))
    last = list(named_params(learned))[n:]
    assert last == (["init"] if len(last) == 1 else ["init.h", "init.c"])
    assert list(buffers(m)) == last and list(buffers(learned)) == []


def test_a_shared_cell_is_one_set_of_parameters_and_two_states(rng):
    cell = RNNCell(2, 3, dtype=np.float64)
    a, b = Recur(cell), Recur(cell)
    x = rng.normal(size=(2, 4))
    a(x)
    assert b.at_start and not a.at_start
    assert len(params([a, b])) == 3
    reset([a, b])
    both = gradient(lambda pair: (pair[0](x) + pair[1](x)).sum(), [a, b])
    reset([a, b])
    one = gradient(lambda m: m(x).sum(), a)
    near(both["0.cell.Wi"], 2 * one["cell.Wi"])


def test_a_layer_used_twice_in_a_model_advances_twice(rng):
    m = RNN(3, 3)
    chain = Chain(m, m)
    x = rng.normal(size=(3, 2))
    y = chain(x)
    m.reset()
    np.testing.assert_array_equal(y, m(m(x)))


def test_in_a_scope_outputs_are_tensors_and_after_it_the_state_is_plain(rng):
    m = LSTM(2, 3, learn_init=True)
    with Tape():
        y = m(rng.normal(size=(2, 4)))
        assert type(y) is Tensor and type(m.state.h) is Tensor
        with paused():
            assert type(m(np.ones((2, 4)))) is np.ndarray
            assert type(m.state.h) is np.ndarray
    assert type(m.state.c) is np.ndarray
    assert isinstance(m.init.h, Param)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("learn_init", r"built\. .*Recur\(m\.cell, learn_init=True\)"),
        ("Wh", r"belongs to the cell: m\.cell\.Wh"),
        ("forget_bias", r"is no attribute of a recurrent layer; it has cell, init, state, "),
    ],
)
def test_assigning_what_a_layer_would_never_read_raises(name, why):
    m = LSTM(3, 5)
    before = dict(vars(m))
    with pytest.raises(AttributeError, match=rf"LSTM\(3 => 5\): {name} .*{why}"):
        setattr(m, name, True)
    assert vars(m) == before


def test_a_switch_of_a_built_layer_takes_only_what_the_constructor_takes():
    m = LSTM(3, 5)
    with pytest.raises(ValueError, match=r"LSTM\(3 => 5\): layout is 'tbf', expected one of 'fbt'"):
        m.layout = "tbf"
    assert m.layout == "fbt"
    m.on_batch_change = "reset"
    m(np.ones((3, 2)))
    assert m(np.ones((3, 4))).shape == (5, 4)


def test_a_subclass_of_recur_has_attributes_of_its_own():
    class Counting(Recur):
        def __init__(self, cell):
            super().__init__(cell)
            self.calls = 0

    assert Counting(GRU(2, 3).cell).calls == 0


@pytest.mark.parametrize("init", [([[0.0], [0.0, 1.0]], [0.0] * 3), ("a", "b"), (None, None)])
def test_an_init_that_is_no_array_of_numbers_is_refused_by_the_layer(init):
    m = LSTM(2, 3)
    with pytest.raises(ShapeError, match=r"LSTM\(2 => 3\): init .*Nothing was changed"):
        m.init = init
