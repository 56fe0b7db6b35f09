"""Every cell kernel against its NumPy twin: values, states and all gradients."""

import itertools

import numpy as np
import pytest

import twins
from recur import _kernels

# kind: (kernel, twin, gates, options that each name a cell of its own)
CELLS = {
    "rnn": (_kernels.RNNKernel, twins.RNN, 1,
            [{"act": a} for a in ("tanh", "relu", "sigmoid", "identity")]),
    "lstm": (_kernels.LSTMKernel, twins.LSTM, 4,
             [{}, {"gate": "hard_sigmoid"}, {"peephole": True}]),
    "gru": (_kernels.GRUKernel, twins.GRU, 3, [{}, {"gate": "hard_sigmoid"}, {"bh": True}]),
    "gruv3": (_kernels.GRUv3Kernel, twins.GRUv3, 3, [{}, {"gate": "hard_sigmoid"}]),
}  # fmt: skip
KINDS = list(CELLS)
VARIANTS = [(kind, i) for kind in CELLS for i in range(len(CELLS[kind][3]))]
DTYPES = [np.float32, np.float64]
TOLERANCE = {np.float32: 2e-5, np.float64: 1e-12}
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "f64"])
all_kinds = pytest.mark.parametrize("kind", KINDS)


def make(kind, I, H, dtype, *, variant=0, bias=True, seed=0):  # noqa: E741
    """The kernel and the twin on the same random weights."""
    kernel, twin, gates, variants = CELLS[kind]
    rng = np.random.default_rng([seed, I, H])
    options = dict(variants[variant])
    shapes = {"peephole": (3, H), "bh": (H,), "Whh": (H, H)}
    if kind == "gruv3":
        options["Whh"] = True
    draw = lambda *shape: (rng.standard_normal(shape) / np.sqrt(shape[-1] + 1)).astype(dtype)  # noqa: E731
    for name in options.keys() & shapes.keys():
        options[name] = draw(*shapes[name])
    rows_h = 2 * H if kind == "gruv3" else gates * H
    weights = [draw(gates * H, I), draw(rows_h, H), draw(gates * H) if bias else None]
    return kernel(*weights, **options), twin(*weights, **options)


def draw_state(rng, twin, B, H, dtype):
    return tuple(rng.standard_normal((B, H)).astype(dtype) for _ in range(twin.n_states))


def close(found, expected, dtype):
    assert found.dtype == dtype
    assert found.shape == expected.shape
    scale = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[dtype] * scale)


def multiply_out(operands, kernel):
    """The dense weight gradients that the operands stand for, by NumPy in float64."""
    assert set(operands) == set(kernel.gradient_names)
    dense = {}
    for name, operand in operands.items():
        if isinstance(operand[0], str):
            dense[name] = operand[1]
        elif len(operand) == 1:
            dense[name] = operand[0].sum(0, dtype=np.float64)
        else:
            dg, x = (a.astype(np.float64) for a in operand)
            dense[name] = dg.T @ x
    return dense


def check_gradients(kernel, found, expected, dtype, *, need_dx=True):
    dx, dstate, operands = found
    want_dx, want_dstate, want = expected
    if need_dx:
        close(dx, want_dx, dtype)
    else:
        assert dx is None
    for d, w in zip(dstate, want_dstate, strict=True):
        close(d, w, dtype)
    for name, dense in multiply_out(operands, kernel).items():
        assert dense.shape == want[name].shape, name
        scale = max(1.0, np.abs(want[name]).max(initial=0))
        np.testing.assert_allclose(
            dense, want[name], rtol=0, atol=TOLERANCE[dtype] * scale, err_msg=name
        )


@both_dtypes
@pytest.mark.parametrize(("kind", "variant"), VARIANTS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_step_and_its_gradients_equal_the_twin(kind, variant, bias, dtype):
    for (I, H), B in itertools.product([(1, 1), (3, 17), (17, 3), (65, 17), (3, 65)], [1, 3, 16]):  # noqa: E741
        kernel, twin = make(kind, I, H, dtype, variant=variant, bias=bias)
        rng = np.random.default_rng([I, H, B])
        x, state = rng.standard_normal((B, I)).astype(dtype), draw_state(rng, twin, B, H, dtype)
        want, tape = twin.step(x, *state)
        found = kernel.step(x, *state)
        for f, w in zip(found, want, strict=True):
            close(f, w, dtype)
        again, saved = kernel.step_save(x, *state)
        for f, a in zip(found, again, strict=True):
            np.testing.assert_array_equal(f, a)
        dstate = draw_state(rng, twin, B, H, dtype)
        got = kernel.step_backward(saved, x, state, dstate, need_dx=True, keep=True)
        check_gradients(kernel, got, twin.step_backward(tape, dstate), dtype)


@both_dtypes
@pytest.mark.parametrize(("kind", "variant"), VARIANTS)
def test_a_sequence_and_its_gradients_equal_the_twin(kind, variant, dtype):
    sizes = [(1, 1), (3, 17), (17, 3), (65, 65)]
    for (I, H), (T, B) in itertools.product(sizes, [(1, 3), (2, 1), (7, 16), (50, 3), (7, 1)]):  # noqa: E741
        kernel, twin = make(kind, I, H, dtype, variant=variant)
        rng = np.random.default_rng([I, H, B, T])
        X = rng.standard_normal((T, B, I)).astype(dtype)
        state = draw_state(rng, twin, B, H, dtype)
        want_Y, want_last, tapes = twin.sequence(X, *state)
        Y, last, saved = kernel.sequence_save(X, *state)
        close(Y, want_Y, dtype)
        for f, w in zip(last, want_last, strict=True):
            close(f, w, dtype)
        dY = rng.standard_normal(Y.shape).astype(dtype)
        dstate = draw_state(rng, twin, B, H, dtype)
        got = kernel.sequence_backward(saved, X, dY, dstate, need_dx=True, keep=False)
        check_gradients(kernel, got, twin.sequence_backward(tapes, dY, dstate), dtype)


@both_dtypes
@all_kinds
def test_absent_gradients_count_as_zeros_in_every_combination(kind, dtype):
    kernel, twin = make(kind, 3, 17, dtype)
    rng = np.random.default_rng(1)
    X, state = rng.standard_normal((7, 3, 3)).astype(dtype), draw_state(rng, twin, 3, 17, dtype)
    dY, dstate = rng.standard_normal((7, 3, 17)).astype(dtype), draw_state(rng, twin, 3, 17, dtype)
    _, _, tapes = twin.sequence(X, *state)
    _, _, saved = kernel.sequence_save(X, *state)
    _, tape = twin.step(X[0], *state)
    _, step_saved = kernel.step_save(X[0], *state)
    for present in itertools.product([True, False], repeat=kernel.n_states):
        some = tuple(d if p else None for d, p in zip(dstate, present, strict=True))
        got = kernel.step_backward(step_saved, X[0], state, some, need_dx=False, keep=True)
        check_gradients(kernel, got, twin.step_backward(tape, some), dtype, need_dx=False)
        for given in (dY, None):
            for need_dx in (True, False):
                got = kernel.sequence_backward(saved, X, given, some, need_dx=need_dx, keep=True)
                want = twin.sequence_backward(tapes, given, some)
                check_gradients(kernel, got, want, dtype, need_dx=need_dx)


@both_dtypes
@pytest.mark.parametrize(("kind", "variant"), VARIANTS)
@pytest.mark.parametrize("B", [1, 5, 16])
def test_samples_stop_at_their_lengths(kind, variant, B, dtype):
    T, I, H = 7, 3, 17  # noqa: E741
    kernel, twin = make(kind, I, H, dtype, variant=variant)
    rng = np.random.default_rng(B)
    X, state = rng.standard_normal((T, B, I)).astype(dtype), draw_state(rng, twin, B, H, dtype)
    dY, dstate = rng.standard_normal((T, B, H)).astype(dtype), draw_state(rng, twin, B, H, dtype)
    lengths = rng.integers(0, T + 1, B)
    lengths[0] = 3
    padding = np.arange(T)[:, None] >= lengths
    X[padding] = np.nan
    dY[padding] = np.nan
    want_Y, want_last, tapes = twin.sequence(X, *state, lengths=lengths)
    plain_Y, plain_last = kernel.sequence(X, *state, lengths=lengths)
    Y, last, saved = kernel.sequence_save(X, *state, lengths=lengths)
    close(Y, want_Y, dtype)
    np.testing.assert_array_equal(Y[padding], 0)
    np.testing.assert_array_equal(Y, plain_Y)
    for f, p, w in zip(last, plain_last, want_last, strict=True):
        close(f, w, dtype)
        np.testing.assert_array_equal(f, p)
    got = kernel.sequence_backward(saved, X, dY, dstate, need_dx=True, keep=False, lengths=lengths)
    np.testing.assert_array_equal(got[0][padding], 0)
    check_gradients(kernel, got, twin.sequence_backward(tapes, dY, dstate), dtype)


@both_dtypes
@pytest.mark.parametrize(("kind", "variant"), VARIANTS)
@pytest.mark.parametrize("H", [1, 3, 17, 65])
def test_a_samples_bits_do_not_depend_on_its_batch(kind, variant, H, dtype):
    kernel, twin = make(kind, 5, H, dtype, variant=variant)
    rng = np.random.default_rng(H)
    x, state = rng.standard_normal((131, 5)).astype(dtype), draw_state(rng, twin, 131, H, dtype)
    alone = [kernel.step(x[i : i + 1], *(s[i : i + 1] for s in state)) for i in range(131)]
    for B in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 63, 64, 65, 131):
        for first in (0, 131 - B):
            rows = slice(first, first + B)
            together = kernel.step(x[rows], *(s[rows] for s in state))
            for k, whole in enumerate(together):
                parts = np.concatenate([a[k] for a in alone[rows]])
                np.testing.assert_array_equal(whole, parts)


@both_dtypes
@pytest.mark.parametrize(("kind", "variant"), VARIANTS)
@pytest.mark.parametrize("B", [1, 3, 16])
def test_a_sequence_has_the_bits_of_its_steps(kind, variant, B, dtype):
    kernel, twin = make(kind, 5, 33, dtype, variant=variant)
    rng = np.random.default_rng(B)
    X, state = rng.standard_normal((40, B, 5)).astype(dtype), draw_state(rng, twin, B, 33, dtype)
    Y, last = kernel.sequence(X, *state)
    saved_Y, saved_last, _ = kernel.sequence_save(X, *state)
    for t in range(40):
        state = kernel.step(X[t], *state)
        np.testing.assert_array_equal(Y[t], state[0])
        np.testing.assert_array_equal(saved_Y[t], state[0])
    for a, b, c in zip(last, saved_last, state, strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, c)


@both_dtypes
@all_kinds
def test_looped_step_gradients_equal_those_of_the_sequence(kind, dtype):
    kernel, twin = make(kind, 5, 17, dtype)
    rng = np.random.default_rng(5)
    X, first = rng.standard_normal((7, 3, 5)).astype(dtype), draw_state(rng, twin, 3, 17, dtype)
    dY, dlast = rng.standard_normal((7, 3, 17)).astype(dtype), draw_state(rng, twin, 3, 17, dtype)
    states, saves = [first], []
    for x in X:
        state, saved = kernel.step_save(x, *states[-1])
        states.append(state)
        saves.append(saved)
    _, _, saved = kernel.sequence_save(X, *first)
    want_dX, want_dfirst, operands = kernel.sequence_backward(
        saved, X, dY, dlast, need_dx=True, keep=False
    )
    want = multiply_out(operands, kernel)
    total = {k: np.zeros_like(w) for k, w in want.items()}
    dstate = dlast
    for t in reversed(range(7)):
        given = (dstate[0] + dY[t], *dstate[1:])
        dx, dstate, operands = kernel.step_backward(
            saves[t], X[t], states[t], given, need_dx=True, keep=t % 2 == 0
        )
        close(dx, want_dX[t].astype(np.float64), dtype)
        for k, g in multiply_out(operands, kernel).items():
            total[k] = total[k] + g
    for d, w in zip(dstate, want_dfirst, strict=True):
        close(d, w.astype(np.float64), dtype)
    for k, w in want.items():
        np.testing.assert_allclose(total[k], w, rtol=0, atol=30 * TOLERANCE[dtype], err_msg=k)


@both_dtypes
@all_kinds
def test_only_what_keep_allows_is_overwritten(kind, dtype):
    kernel, twin = make(kind, 5, 17, dtype, variant=0)
    rng = np.random.default_rng(6)
    X, state = rng.standard_normal((4, 3, 5)).astype(dtype), draw_state(rng, twin, 3, 17, dtype)
    dY, dstate = rng.standard_normal((4, 3, 17)).astype(dtype), draw_state(rng, twin, 3, 17, dtype)
    inputs = [X, *state, dY, *dstate]
    copies = [a.copy() for a in inputs]
    Y, last, saved = kernel.sequence_save(X, *state)
    Y_copy, kept = Y.copy(), [a.copy() for a in saved]
    first = kernel.sequence_backward(saved, X, dY, dstate, need_dx=True, keep=True)
    first = first[0], first[1], multiply_out(first[2], kernel)
    for a, b in zip(saved, kept, strict=True):
        np.testing.assert_array_equal(a, b)
    second = kernel.sequence_backward(saved, X, dY, dstate, need_dx=True, keep=False)
    np.testing.assert_array_equal(first[0], second[0])
    for k, w in multiply_out(second[2], kernel).items():
        np.testing.assert_array_equal(first[2][k], w)
    np.testing.assert_array_equal(Y, Y_copy)
    for a, b in zip(inputs, copies, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not any(np.shares_memory(a, b) for a in last for b in (*saved, Y, *state))


@both_dtypes
@all_kinds
def test_a_step_may_write_over_its_own_state(kind, dtype):
    kernel, twin = make(kind, 5, 33, dtype)
    rng = np.random.default_rng(7)
    x, state = rng.standard_normal((3, 5)).astype(dtype), draw_state(rng, twin, 3, 33, dtype)
    want = kernel.step(x, *state)
    out = kernel.step(x, *state, out=state)
    assert all(a is b for a, b in zip(out, state, strict=True))
    for a, b in zip(state, want, strict=True):
        np.testing.assert_array_equal(a, b)


@both_dtypes
@all_kinds
def test_a_kernel_keeps_the_weights_it_was_built_from(kind, dtype):
    gates, rows_h = CELLS[kind][2], 2 if kind == "gruv3" else CELLS[kind][2]
    weights = [np.ones((gates * 3, 2), dtype), np.ones((rows_h * 3, 3), dtype)]
    options = {"Whh": np.ones((3, 3), dtype)} if kind == "gruv3" else {}
    kernel = CELLS[kind][0](*weights, **options)
    state = tuple(np.full((2, 3), 0.1, dtype) for _ in range(kernel.n_states))
    before = kernel.step(np.ones((2, 2), dtype), *state)
    for w in (*weights, *options.values()):
        w[...] = 7
    for a, b in zip(before, kernel.step(np.ones((2, 2), dtype), *state), strict=True):
        np.testing.assert_array_equal(a, b)


@both_dtypes
@all_kinds
def test_nan_and_infinity_stay_in_their_own_sample(kind, dtype):
    kernel, twin = make(kind, 3, 17, dtype)
    rng = np.random.default_rng(8)
    x, state = rng.standard_normal((4, 3)).astype(dtype), draw_state(rng, twin, 4, 17, dtype)
    want = kernel.step(x, *state)
    x[1], x[2] = np.nan, np.inf
    found = kernel.step(x, *state)
    for f, w in zip(found, want, strict=True):
        np.testing.assert_array_equal(f[[0, 3]], w[[0, 3]])
        assert np.isnan(f[1]).all()


@both_dtypes
@all_kinds
def test_s14_subnormal_states_count_as_zero_and_the_control_word_is_restored(kind, dtype):
    kernel, twin = make(kind, 3, 17, dtype, bias=False)
    tiny = dtype(np.finfo(dtype).tiny)
    x = np.zeros((2, 3), dtype)
    state = tuple(np.full((2, 17), tiny / 4) for _ in range(twin.n_states))
    zeros = tuple(np.zeros((2, 17), dtype) for _ in range(twin.n_states))
    for f, w in zip(kernel.step(x, *state), kernel.step(x, *zeros), strict=True):
        np.testing.assert_array_equal(f, w)
    assert tiny / dtype(2) > 0


@both_dtypes
@all_kinds
def test_empty_batches_and_empty_sequences_pass(kind, dtype):
    kernel, _ = make(kind, 3, 5, dtype)
    state = tuple(np.zeros((0, 5), dtype) for _ in range(kernel.n_states))
    assert kernel.step(np.zeros((0, 3), dtype), *state)[0].shape == (0, 5)
    ones = tuple(np.ones((2, 5), dtype) for _ in range(kernel.n_states))
    X = np.zeros((0, 2, 3), dtype)
    Y, last, saved = kernel.sequence_save(X, *ones)
    assert Y.shape == (0, 2, 5)
    np.testing.assert_array_equal(last[0], ones[0])
    dX, dstate, operands = kernel.sequence_backward(saved, X, None, ones, need_dx=True, keep=True)
    assert dX.shape == X.shape
    np.testing.assert_array_equal(dstate[0], ones[0])
    assert not any(np.any(g) for g in multiply_out(operands, kernel).values())


@all_kinds
def test_misfits_are_refused_with_the_array_and_the_sizes(kind):
    kernel, _ = make(kind, 3, 5, np.float32)
    state = tuple(np.zeros((2, 5), np.float32) for _ in range(kernel.n_states))
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"x has shape \(2, 4\), expected \(any, 3\)"):
        kernel.step(np.zeros((2, 4), np.float32), *state)
    with pytest.raises(TypeError, match="x is float64, expected an array of float32"):
        kernel.step(x.astype(np.float64), *state)
    with pytest.raises(TypeError, match="x is list"):
        kernel.step([[1.0]], *state)
    with pytest.raises(ValueError, match=r"h has shape \(3, 5\), expected \(2, 5\)"):
        kernel.step(x, np.zeros((3, 5), np.float32), *state[1:])
    with pytest.raises(ValueError, match="C-contiguous"):
        kernel.step(np.zeros((3, 2), np.float32).T, *state)
    with pytest.raises(ValueError, match="h has 0 arrays"):
        kernel.step(x)
    read_only = np.zeros((2, 5), np.float32)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match=r"out\[0\] is read-only"):
        kernel.step(x, *state, out=(read_only, *state[1:]))
    X = np.zeros((4, 2, 3), np.float32)
    with pytest.raises(ValueError, match="lengths go from 1 to 5, expected 0 to T = 4"):
        kernel.sequence(X, *state, lengths=np.array([1, 5]))
    with pytest.raises(TypeError, match="lengths is int32"):
        kernel.sequence(X, *state, lengths=np.array([1, 2], np.int32))
    _, _, saved = kernel.sequence_save(X, *state)
    with pytest.raises(ValueError, match="saved"):
        kernel.sequence_backward(saved[:-1], X, None, state, need_dx=True, keep=True)
    with pytest.raises(ValueError, match=r"dY has shape \(3, 2, 5\)"):
        kernel.sequence_backward(
            saved, X, np.zeros((3, 2, 5), np.float32), state, need_dx=True, keep=True
        )
    with pytest.raises(ValueError, match=r"dstate\[0\]"):
        kernel.sequence_backward(saved, X, None, (X, *state[1:]), need_dx=True, keep=True)


def test_weights_that_do_not_fit_build_no_kernel():
    w = np.zeros((8, 3), np.float32)
    with pytest.raises(ValueError, match=r"Wh has shape \(8, 3\), expected \(8, 2\)"):
        _kernels.LSTMKernel(w, w)
    with pytest.raises(ValueError, match="Wi has 8 rows, expected a positive multiple of 3"):
        _kernels.GRUKernel(w, w)
    with pytest.raises(TypeError, match="Wh is float64"):
        _kernels.LSTMKernel(w, np.zeros((8, 2)))
    with pytest.raises(ValueError, match=r"b has shape \(2,\)"):
        _kernels.LSTMKernel(w, np.zeros((8, 2), np.float32), np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="gate is 'relu'"):
        _kernels.LSTMKernel(w, np.zeros((8, 2), np.float32), gate="relu")
    with pytest.raises(ValueError, match="activation is 'elu'"):
        _kernels.RNNKernel(w, np.zeros((8, 8), np.float32), act="elu")
    with pytest.raises(TypeError, match="float16"):
        _kernels.RNNKernel(w.astype(np.float16), w)
    with pytest.raises(TypeError, match="base class"):
        _kernels.CellKernel()
