"""Layers without recurrence against their equations; containers pass on what they are given."""

from __future__ import annotations

import copy
import operator
from typing import Any

import numpy as np
import pytest

from recur import ops
from recur.errors import ShapeError
from recur.inspect import gradcheck
from recur.layers import (
    BatchNorm,
    Chain,
    Dense,
    Dropout,
    Embedding,
    LayerNorm,
    Parallel,
    Scale,
    SkipConnection,
)
from recur.module import Module, journal, named_params, outputsize, params, testmode, trainmode
from recur.tape import Param, Tape, Tensor, value

SHAPES = [(3,), (3, 1), (3, 4), (3, 4, 5), (3, 1, 2), (3, 0), (3, 2, 0)]


def randomised(layer: Any, rng: np.random.Generator) -> Any:
    for p in params(layer):
        p[...] = rng.normal(size=p.shape)
    return layer


def call(layer: Any, *xs: Any) -> Any:
    return layer(*xs)


def along_features(f: Any, x: np.ndarray) -> np.ndarray:
    """f of every vector of features."""
    columns = x.reshape(x.shape[0], -1)
    ys = [f(columns[:, i]) for i in range(columns.shape[1])]
    n = len(ys[0]) if ys else len(f(np.zeros(x.shape[0])))
    return np.array(ys).T.reshape(n, *x.shape[1:])


# ------------------------------------------------------------------ Dense


@pytest.mark.parametrize("shape", SHAPES)
def test_dense_is_its_equation_for_every_shape(shape, dtype, rng):
    m = randomised(Dense(3, 2, ops.tanh, dtype=dtype), rng)
    x = rng.normal(size=shape).astype(dtype)
    y = m(x)
    W, b = m.weight.value.astype(float), m.bias.value.astype(float)
    wanted = along_features(lambda v: np.tanh(W @ v + b), x.astype(float))
    assert type(y) is np.ndarray
    assert y.dtype == dtype
    assert y.T.flags.c_contiguous
    np.testing.assert_allclose(y, wanted, rtol=1e-5 if dtype == np.float32 else 1e-13, atol=1e-6)


def test_dense_gives_the_same_for_any_strides(dtype, rng):
    m = randomised(Dense(3, 2, dtype=dtype), rng)
    x = rng.normal(size=(3, 4, 5)).astype(dtype)
    wanted = m(x)
    wide = np.zeros((6, 8, 10), dtype)
    wide[::2, ::-2, 1::2] = x
    for same in (np.asfortranarray(x), wide[::2, ::-2, 1::2], x.T.copy().T):
        np.testing.assert_array_equal(m(same), wanted)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 4, 5)])
def test_dense_has_the_right_gradient(shape, rng):
    m = randomised(Dense(3, 2, ops.sigmoid, dtype=np.float64), rng)
    gradcheck(call, m, rng.normal(size=shape))


def test_a_list_of_steps_gives_a_list_equal_to_the_sequence(dtype, rng):
    m = randomised(Dense(3, 2, ops.tanh, dtype=dtype), rng)
    X = rng.normal(size=(3, 4, 5)).astype(dtype)
    steps = [X[:, :, t] for t in range(5)]
    for given in (steps, tuple(steps)):
        ys = m(given)
        assert type(ys) is list
        np.testing.assert_allclose(np.stack(ys, -1), m(X), rtol=1e-5)
    grads = []
    for whole in (True, False):
        with Tape() as tape:
            y = m(X) if whole else ops.stack(m(steps), -1)
            tape.backward((y**2).sum(), accumulate=False)
        grads.append([p.grad.copy() for p in params(m)])
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)


@pytest.mark.parametrize("kind", ["int64", "uint8", "bool", "float16", "float32", "float64"])
def test_inputs_are_converted_to_the_dtype_of_the_weight(kind, dtype, rng):
    m = randomised(Dense(3, 2, dtype=dtype), rng)
    x = (rng.normal(size=(3, 4)) > 0).astype(kind)
    y = m(x)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, m(x.astype(dtype)))
    strict = Dense(m.weight, m.bias, strict_dtype=True)
    if np.dtype(kind) == dtype:
        np.testing.assert_array_equal(strict(x), y)
    else:
        with pytest.raises(ShapeError, match=rf"x is {kind}, expected {dtype} \(strict_dtype"):
            strict(x)


def test_a_recorded_input_of_another_dtype_keeps_its_gradient(rng):
    m = randomised(Dense(3, 2), rng)
    with Tape() as tape:
        x = tape.watch(rng.normal(size=3))
        y = m(x)
        assert y.dtype == np.float32
        tape.backward(y.sum())
    assert x.grad.dtype == np.float64
    np.testing.assert_allclose(x.grad, m.weight.value.sum(0), rtol=1e-6)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (np.zeros(4), "x has 4 features on axis 0, expected 3. Nothing was changed."),
        (np.zeros((2, 3)), "x has 2 features on axis 0, expected 3. Nothing was changed."),
        (np.zeros((3, 1, 1, 1)), r"x has shape \(3, 1, 1, 1\), expected \(3,\), \(3, batch\) or"),
        (np.float32(1), r"x has shape \(\), expected"),
        (np.zeros(3, complex), "x holds complex128, expected numbers"),
        (np.array(["a", "b", "c"]), "x holds <U1, expected numbers"),
    ],
)
def test_a_wrong_input_is_refused_by_the_name_of_the_layer(x, text):
    with pytest.raises(ShapeError, match=rf"Dense\(3 => 5, tanh\): {text}"):
        Dense(3, 5, ops.tanh)(x)


def test_arrays_given_for_weights_are_copied_and_parameters_shared():
    W, b = np.arange(6, dtype=np.float64).reshape(2, 3), np.array([1, 2])
    m = Dense(W, b, ops.relu)
    assert m.weight.dtype == m.bias.dtype == np.float64
    assert repr(m) == "Dense(3 => 2, relu)"
    W[:] = 0
    assert m.weight.value[1, 2] == 5
    assert Dense(np.ones((2, 3), int)).weight.dtype == np.float32
    other = Dense(m.weight, m.bias)
    assert other.weight is m.weight
    assert other.bias is m.bias
    assert Dense(W, False).bias is None
    assert Dense(3, 2, bias=[1, 2]).bias.dtype == np.float32


def test_a_constructor_refuses_what_it_cannot_use():
    for bad in (0, -1, 2.0, "3", True, None):
        with pytest.raises(ShapeError, match="expected a positive integer"):
            Dense(bad, 2)
        with pytest.raises(ShapeError, match="expected a positive integer"):
            Dense(2, bad)
    with pytest.raises(ShapeError, match=r"Dense\.bias has shape \(3,\), expected \(2\)"):
        Dense(3, 2, bias=np.zeros(3))
    with pytest.raises(TypeError, match="the activation is 'tanh', expected a function"):
        Dense(3, 2, "tanh")
    with pytest.raises(TypeError, match="float16 is not supported"):
        Dense(3, 2, dtype=np.float16)


def test_without_a_bias_there_is_no_array():
    m = Dense(3, 2, bias=False)
    assert list(named_params(m)) == ["weight"]
    np.testing.assert_array_equal(m(np.zeros(3)), [0, 0])


def test_scale_is_its_equation_and_has_the_right_gradient(dtype, rng):
    m = randomised(Scale(3, ops.tanh, dtype=dtype), rng)
    x = rng.normal(size=(3, 4, 5)).astype(dtype)
    a, b = m.scale.value[:, None, None], m.bias.value[:, None, None]
    np.testing.assert_allclose(m(x), np.tanh(a * x + b), rtol=1e-5)
    assert repr(Scale(3, bias=False)) == "Scale(3, bias=False)"
    wide = randomised(Scale(3, dtype=np.float64), rng)
    gradcheck(call, wide, rng.normal(size=(3, 4)))
    with pytest.raises(ShapeError, match=r"Scale\(3, tanh\): x has 2 features"):
        m(np.zeros(2))


# ------------------------------------------------------------------ batch invariance


@pytest.mark.parametrize(
    "layer",
    [
        lambda d, n: Dense(n, 7, ops.tanh, dtype=d),
        lambda d, n: LayerNorm(n, dtype=d),
        lambda d, n: LayerNorm(n, affine=False),
        lambda d, n: BatchNorm(n, dtype=d),
        lambda d, n: Chain(Dense(n, 5, ops.sigmoid, dtype=d), LayerNorm(5, dtype=d), ops.softmax),
    ],
)
@pytest.mark.parametrize("n", [1, 3, 17, 65, 129, 1000])
def test_a_samples_numbers_do_not_depend_on_its_batch_bit_for_bit(layer, n, dtype, rng):
    m = randomised(layer(dtype, n), rng)
    X = (10 * rng.normal(size=(n, 33))).astype(dtype)
    alone = np.stack([m(X[:, i]) for i in range(33)], -1)
    for part in (slice(0, 33), slice(5, 6), slice(2, 4), slice(1, 17), slice(32, None, -1)):
        np.testing.assert_array_equal(m(X[:, part]), alone[:, part])
        np.testing.assert_array_equal(m(np.ascontiguousarray(X[:, part])), alone[:, part])


# ------------------------------------------------------------------ Embedding


@pytest.mark.parametrize("shape", [(), (4,), (4, 5), (2, 3, 2), (0,)])
@pytest.mark.parametrize("kind", ["int64", "int32", "uint8"])
def test_embedding_looks_up_one_column_for_every_index(shape, kind, dtype, rng):
    m = Embedding(6, 3, dtype=dtype, rng=rng)
    x = rng.integers(6, size=shape).astype(kind)
    y = m(x)
    assert y.shape == (3, *shape)
    assert y.dtype == dtype
    assert y.T.flags.c_contiguous
    np.testing.assert_array_equal(y, m.weight.value[:, x])


def test_an_embedding_takes_integers_and_lists_of_steps(rng):
    m = Embedding(6, 3, rng=rng)
    np.testing.assert_array_equal(m(4), m.weight.value[:, 4])
    for ys in (m([4, 2]), m((4, 2))):
        assert type(ys) is list
        np.testing.assert_array_equal(np.stack(ys, -1), m.weight.value[:, [4, 2]])


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_has_the_right_gradient_for_its_mask(p, rng):
    gradcheck(call, Dropout(p, rng=rng), rng.normal(size=(5, 2, 3)))
    gradcheck(call, Dropout(p, dims=(0, 1), rng=rng), rng.normal(size=(5, 2, 3)))


@pytest.mark.parametrize("kind", ["bool", "float32", "float64"])
def test_one_hot_columns_give_what_their_indices_give(kind, dtype, rng):
    m = Embedding(6, 3, dtype=dtype, rng=rng)
    x = rng.integers(6, size=(4, 5))
    np.testing.assert_array_equal(m(np.eye(6, dtype=kind)[:, x]), m(x))
    with pytest.raises(ShapeError, match=r"Embedding\(6 => 3\): x has 5 features on axis 0"):
        m(np.zeros((5, 2), kind))


def test_the_gradient_of_an_embedding_adds_up_in_the_columns_used(dtype, rng):
    m = Embedding(6, 3, dtype=dtype, rng=rng)
    x = np.array([[1, 1, 5], [0, 1, 5]])
    g = rng.normal(size=(3, 2, 3)).astype(dtype)
    with Tape() as tape:
        tape.backward(m(x), g)
    wanted = np.zeros((3, 6))
    for i in np.ndindex(x.shape):
        wanted[:, x[i]] += g[(slice(None), *i)]
    np.testing.assert_allclose(m.weight.grad, wanted, rtol=1e-5)
    assert (m.weight.grad[:, [2, 3, 4]] == 0).all()


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_used_twice_has_the_right_gradient(tied, rng):
    m = Embedding(6, 3, dtype=np.float64, rng=rng)
    weight = m.weight

    def f(m):
        if tied:  # the weight is a computed tensor, as under weight dropping
            object.__setattr__(m, "weight", weight * 2.0)
        y = m(np.array([1, 4])) * m(np.array([1, 0])) + m(np.eye(6)[:, [2, 1]])
        object.__setattr__(m, "weight", weight)
        return ops.tanh(y)

    gradcheck(f, m)


def test_an_index_that_is_written_after_the_call_does_not_move_the_gradient():
    m = Embedding(6, 2)
    x = np.array([3])
    with Tape() as tape:
        y = m(x)
        x[0] = 0
        tape.backward(y.sum())
    assert m.weight.grad[:, 3].all()
    assert not m.weight.grad[:, 0].any()


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (6, r"index 6 is out of range, expected 0 to 5"),
        (-1, r"index -1 is out of range"),
        (np.array([0, 9]), r"index 9 at position \(1,\) is out of range"),
        (np.array([[0, 1], [-2, 7]]), r"index -2 at position \(1, 0\) is out of range"),
        (np.array([2**63], np.uint64), r"index 9223372036854775808 at position \(0,\)"),
    ],
)
def test_an_index_out_of_range_is_named(x, text):
    with pytest.raises(IndexError, match=rf"Embedding\(6 => 3\): {text}"):
        Embedding(6, 3)(x)


def test_an_embedding_is_made_from_an_array_or_shares_a_parameter(rng):
    W = rng.normal(size=(3, 6))
    m = Embedding(W)
    assert m.weight.dtype == np.float64
    assert m.weight.value.T.flags.c_contiguous
    assert repr(m) == "Embedding(6 => 3)"
    W[:] = 0
    assert m.weight.value.any()
    rows = Param(rng.normal(size=(3, 6)))  # laid out by rows, as Dense holds it
    shared = Embedding(rows)
    assert shared.weight is rows
    with Tape() as tape:
        tape.backward(shared(np.array([1, 1])).sum())
    np.testing.assert_array_equal(rows.grad, np.eye(6)[1] * np.full((3, 1), 2))


# ------------------------------------------------------------------ Dropout


def test_dropout_drops_with_its_probability_and_scales_what_stays(dtype, rng):
    m = trainmode(Dropout(0.25, rng=rng))
    y = m(np.ones((100, 200), dtype))
    assert y.dtype == dtype
    assert set(np.unique(y)) == {0, dtype.type(1 / 0.75)}
    assert abs((y == 0).mean() - 0.25) < 0.02


def test_a_sequence_gets_the_masks_of_its_steps():
    one, two, three = (Dropout(0.5, active=True, rng=np.random.default_rng(1)) for _ in range(3))
    X = np.ones((5, 3, 7), np.float32)
    whole = one(X)
    np.testing.assert_array_equal(whole, np.stack([two(X[:, :, t]) for t in range(7)], -1))
    np.testing.assert_array_equal(whole, np.stack(three([X[:, :, t] for t in range(7)]), -1))
    np.testing.assert_array_equal(one(X), np.stack([two(X[:, :, t]) for t in range(7)], -1))


def test_masks_in_two_layers_match_between_a_sequence_and_its_steps():
    X = np.ones((5, 3, 7), np.float32)
    ys = []
    for whole in (True, False):
        rng = np.random.default_rng(3)
        layers = Dropout(0.5, rng=rng), Scale(5), Dropout(0.5, rng=rng)
        m = trainmode(Chain(*layers))
        ys.append(m(X) if whole else np.stack([m(X[:, :, t]) for t in range(7)], -1))
    np.testing.assert_array_equal(*ys)


@pytest.mark.parametrize(
    ("dims", "mask"), [(0, (6, 1, 1)), (1, (1, 7, 1)), ((0, 1), (6, 7, 1)), ([2], (1, 1, 8))]
)
def test_dims_names_the_axes_along_which_the_mask_is_drawn(dims, mask, rng):
    m = Dropout(0.5, dims=dims, active=True, rng=rng)
    y = m(np.ones((6, 7, 8)))
    small = y[tuple(slice(n) for n in mask)]
    np.testing.assert_array_equal(y, np.broadcast_to(small, y.shape))
    assert 0 < (small == 0).mean() < 1
    with pytest.raises(ShapeError, match=r"x has shape \(\), expected an axis for each of dims"):
        m(np.float32(1))


def test_dropout_is_inactive_outside_a_scope_and_draws_nothing_then(rng):
    m = Dropout(0.5, rng=rng)
    before = m.generator.bit_generator.state
    x = rng.normal(size=(3, 4))
    np.testing.assert_array_equal(m(x), x)
    np.testing.assert_array_equal(testmode(copy.deepcopy(m))(x), x)
    assert m.generator.bit_generator.state == before
    with Tape():
        assert (m(np.ones(1000)) == 0).any()


def test_p_zero_is_the_identity_and_draws_nothing_and_p_one_drops_all(rng):
    none, all_ = Dropout(0, active=True, rng=rng), Dropout(1, active=True, rng=rng)
    before = none.generator.bit_generator.state
    x = rng.normal(size=(3, 4))
    np.testing.assert_array_equal(none(x), x)
    assert none.generator.bit_generator.state == before
    np.testing.assert_array_equal(all_(x), np.zeros((3, 4)))


def test_the_gradient_of_dropout_is_its_mask(dtype, rng):
    m = Dropout(0.5, rng=rng)
    with Tape() as tape:
        x = tape.watch(rng.normal(size=(30, 4)).astype(dtype))
        y = m(x)
        assert type(y) is Tensor
        tape.backward(y.sum())
    np.testing.assert_allclose(x.grad * x._value, value(y), rtol=1e-6)
    assert set(np.unique(x.grad)) == {0, 2}


def test_the_saved_generator_brings_the_same_masks_again(rng):
    m = Dropout(0.5, active=True, rng=rng)
    state = m.generator.bit_generator.state
    first = m(np.ones(50))
    other = Dropout(0.5, active=True)
    other.generator.bit_generator.state = state
    np.testing.assert_array_equal(other(np.ones(50)), first)
    assert np.any(other(np.ones(50)) != first)


def test_a_call_that_raises_later_gives_the_drawn_numbers_back(rng):
    m = Chain(Dropout(0.5, active=True, rng=rng), Dense(3, 2))
    before = m[0].generator.bit_generator.state
    with pytest.raises(ShapeError):
        m(np.ones(4))
    assert m[0].generator.bit_generator.state == before


def test_dropout_takes_integers_and_refuses_what_is_no_probability():
    y = Dropout(0.5, active=True)(np.ones(20, int))
    assert y.dtype == np.float32
    for bad in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="expected a probability from 0 to 1"):
            Dropout(bad)


# ------------------------------------------------------------------ norms


@pytest.mark.parametrize("shape", [s for s in SHAPES if 0 not in s])
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_is_its_equation(shape, affine, dtype, rng):
    m = randomised(LayerNorm(3, ops.tanh, affine=affine, eps=0.1, dtype=dtype), rng)
    x = (5 + rng.normal(size=shape)).astype(dtype)
    a, b = (m.scale.value, m.bias.value) if affine else (1, 0)

    def twin(v):
        return np.tanh(a * (v - v.mean()) / np.sqrt(v.var() + 0.01) + b)

    y = m(x)
    assert y.dtype == dtype
    assert y.T.flags.c_contiguous
    wanted = along_features(twin, x.astype(float))
    np.testing.assert_allclose(y, wanted, rtol=2e-5 if dtype == np.float32 else 1e-12, atol=1e-6)


def test_layer_norm_without_weights_computes_in_the_dtype_of_its_input():
    m = LayerNorm(3, affine=False)
    assert params(m) == []
    assert m(np.arange(3)).dtype == np.float32
    assert m(np.arange(3.0)).dtype == np.float64


@pytest.mark.parametrize("shape", [(5,), (5, 4), (5, 2, 3)])
def test_layer_norm_has_the_right_gradient(shape, rng):
    m = randomised(LayerNorm(5, ops.sigmoid, dtype=np.float64), rng)
    gradcheck(call, m, rng.normal(size=shape))


def test_layer_norm_of_equal_features_has_a_finite_gradient(dtype):
    m = LayerNorm(4, dtype=dtype)
    with Tape() as tape:
        x = tape.watch(np.ones((4, 2), dtype))
        tape.backward((m(x) ** 2).sum())
    assert np.isfinite(x.grad).all()


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5), (3, 2)])
def test_an_active_batch_norm_is_its_equation_and_moves_its_statistics(shape, dtype, rng):
    m = randomised(BatchNorm(3, ops.tanh, eps=0.1, momentum=0.3, active=True, dtype=dtype), rng)
    m.mean[:], m.var[:] = rng.normal(size=3), rng.uniform(size=3)
    old_mean, old_var = m.mean.astype(float), m.var.astype(float)
    x = (5 + rng.normal(size=shape)).astype(dtype)
    flat = x.astype(float).reshape(3, -1)
    mean, var = flat.mean(1), flat.var(1)
    column = (3, *(1,) * (len(shape) - 1))
    a, b = m.scale.value.reshape(column), m.bias.value.reshape(column)
    wanted = a * (x - mean.reshape(column)) / np.sqrt(var.reshape(column) + 0.1) + b
    y = m(x)
    assert y.dtype == dtype
    assert y.T.flags.c_contiguous
    np.testing.assert_allclose(y, np.tanh(wanted), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(m.mean, 0.7 * old_mean + 0.3 * mean, rtol=1e-5)
    np.testing.assert_allclose(m.var, 0.7 * old_var + 0.3 * flat.var(1, ddof=1), rtol=1e-5)
    assert m.mean.dtype == m.var.dtype == dtype
    before = m.mean
    testmode(m)
    wanted = a * (x - m.mean.reshape(column)) / np.sqrt(m.var.reshape(column) + 0.1) + b
    np.testing.assert_allclose(m(x), np.tanh(wanted), rtol=1e-4, atol=1e-6)
    assert m.mean is before


@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 3)])
def test_batch_norm_has_the_right_gradient(active, shape, rng):
    m = randomised(BatchNorm(3, ops.sigmoid, active=active, dtype=np.float64), rng)
    m.mean[:] = rng.normal(size=3)
    gradcheck(call, m, rng.normal(size=shape))


def test_batch_norm_without_running_statistics_always_uses_those_of_its_input(rng):
    m = BatchNorm(3, affine=False, track_stats=False)
    y = m(rng.normal(size=(3, 50)))
    np.testing.assert_allclose(y.mean(1), 0, atol=1e-6)
    np.testing.assert_allclose(y.std(1), 1, rtol=1e-3)
    assert m.buffers() == {}
    assert repr(m) == "BatchNorm(3, affine=False, track_stats=False)"


def test_an_active_batch_norm_refuses_a_single_sample_and_changes_nothing():
    m = BatchNorm(3, active=True)
    for x in (np.ones(3), np.ones((3, 1)), np.ones((3, 1, 1)), np.ones((3, 0))):
        with pytest.raises(ShapeError, match=r"BatchNorm\(3\): x holds . samples.*testmode"):
            m(x)
    assert not m.mean.any()
    assert m(np.ones((3, 1, 2))).shape == (3, 1, 2)


def test_a_call_that_raises_later_leaves_the_running_statistics(rng):
    m = Chain(BatchNorm(3, active=True), Dense(4, 2))
    with pytest.raises(ShapeError):
        m(rng.normal(size=(3, 5)))
    np.testing.assert_array_equal(m[0].mean, np.zeros(3))
    np.testing.assert_array_equal(m[0].var, np.ones(3))


# ------------------------------------------------------------------ containers


class Running(Module):
    """y = x + (sum of what came before); written for single steps."""

    def __init__(self) -> None:
        self.total: Any = 0

    def __call__(self, x):
        journal(self, lambda old=self.total: setattr(self, "total", old))
        self.total = self.total + x
        return self.total


class Noting(Module):
    """Notes the options that it is given."""

    takes_lists = True

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, x, lengths=None, truncate_every=None):
        self.seen.append((lengths, truncate_every))
        return x


def test_chain_applies_its_layers_in_order():
    m = Chain(lambda x: x + 1, lambda x: x * 10)
    assert m(2) == 30
    assert Chain([lambda x: x + 1])(2) == 3
    assert Chain()(2) == 2


def test_chain_is_indexed_by_position_name_and_slice():
    a, b, c = Dense(3, 4), Dropout(0.1), Dense(4, 2)
    m = Chain(a, b, c)
    assert m[0] is a
    assert m[-1] is c
    assert len(m) == 3
    assert list(m) == [a, b, c]
    tail = m[1:]
    assert isinstance(tail, Chain)
    assert tail[1] is c
    named = Chain(first=a, last=c)
    assert named["last"] is named[1] is c
    assert list(named[:1].layers) == ["first"]
    assert list(named_params(named)) == [
        *("layers.first.weight", "layers.first.bias", "layers.last.weight", "layers.last.bias")
    ]
    assert list(named_params(m))[:2] == ["layers.0.weight", "layers.0.bias"]
    for wrong in (named, m):
        with pytest.raises(KeyError, match="no layer is named 'middle'"):
            wrong["middle"]
    with pytest.raises(IndexError):
        m[3]


def test_a_list_runs_layer_by_layer_and_equals_step_by_step(dtype, rng):
    X = rng.normal(size=(3, 2, 5)).astype(dtype)
    steps = [X[:, :, t] for t in range(5)]

    def make():
        dense = Dense(3, 4, ops.tanh, dtype=dtype, rng=np.random.default_rng(1))
        drop = Dropout(0.5, active=True, rng=np.random.default_rng(2))
        return Chain(dense, Running(), drop, lambda x: x * 2, Parallel("+", Running(), ops.relu))

    by_step, listed = make(), make()
    wanted = [by_step(x) for x in steps]
    ys = listed(steps)
    assert type(ys) is list
    for y, want in zip(ys, wanted, strict=True):
        np.testing.assert_array_equal(y, want)


def test_chain_records_inside_a_scope_only(rng):
    m = Chain(Dense(3, 2), ops.tanh)
    assert type(m(np.ones(3))) is np.ndarray
    with Tape():
        assert type(m(np.ones(3))) is Tensor


def test_options_reach_the_layers_that_take_them_at_any_depth():
    a, b = Noting(), Noting()
    m = Chain(ops.tanh, a, Parallel("+", Chain(b), Scale(2)), SkipConnection(Noting(), "+"))
    m(np.ones(2), lengths=3)
    m(np.ones(2), truncate_every=4, lengths=5)
    m(np.ones(2))
    assert a.seen == b.seen == m[3][0].seen == [(3, None), (5, 4), (None, None)]
    with pytest.raises(TypeError, match=r"no layer takes mask=\. Nothing was changed"):
        m(np.ones(2), mask=1)
    with pytest.raises(TypeError, match="no layer takes lengths="):
        Chain(Dense(2, 2))(np.ones(2), lengths=1)
    assert len(a.seen) == 3


def test_several_inputs_go_to_the_first_layer():
    assert Chain(lambda a, b: a - b, abs)(2, 5) == 3
    np.testing.assert_array_equal(
        Chain(Parallel("*", ops.identity, ops.identity), ops.negative)(np.ones(2), np.full(2, 3.0)),
        [-3, -3],
    )


def test_a_container_refuses_what_cannot_be_called():
    with pytest.raises(TypeError, match="Chain: layer 1 is 3, expected a layer or function"):
        Chain(ops.tanh, 3)
    with pytest.raises(TypeError, match="either by position or by name"):
        Chain(ops.tanh, head=ops.tanh)
    with pytest.raises(TypeError, match=r"Parallel: the connection is '-', expected"):
        Parallel("-", ops.tanh)


@pytest.mark.parametrize(
    ("connection", "wanted"),
    [
        ("+", [3.0, 7.0]),
        (operator.add, [3.0, 7.0]),
        (np.add, [3.0, 7.0]),
        ("*", [2.0, 12.0]),
        (ops.vcat, [1.0, 3.0, 2.0, 4.0]),
        (lambda a, b: a - b, [-1.0, -1.0]),
    ],
)
def test_parallel_joins_the_results_by_its_connection(connection, wanted):
    m = Parallel(connection, ops.identity, ops.identity)
    a, b = np.array([1.0, 3.0]), np.array([2.0, 4.0])
    np.testing.assert_array_equal(m(a, b), wanted)
    np.testing.assert_array_equal(m((a, b)), wanted)
    (listed,) = m([a], [b])
    np.testing.assert_array_equal(listed, wanted)
    with Tape() as tape:
        y = m(tape.watch(a), tape.watch(b))
        assert type(y) is Tensor
        np.testing.assert_array_equal(value(y), wanted)


def test_parallel_gives_one_input_to_every_layer_and_joins_any_number():
    m = Parallel("+", a=lambda x: x, b=lambda x: x * 10, c=lambda x: x * 100)
    assert m(1) == 111
    assert m([1, 2]) == [111, 222]
    assert Parallel(tuple, ops.identity, ops.negative)(1.0) == (1.0, -1.0)
    assert Parallel(tuple, ops.identity, ops.negative)([1.0, 2.0]) == [(1.0, -1.0), (2.0, -2.0)]
    assert m[1:](1) == 110
    assert m["c"](1) == 100


def test_parallel_refuses_another_number_of_inputs():
    m = Parallel("+", ops.tanh, ops.relu)
    for given in ((1.0, 2.0, 3.0), ((1.0, 2.0, 3.0),)):
        with pytest.raises(ShapeError, match=r"Parallel\(\+, tanh, relu\): 3 inputs for 2 layers"):
            m(*given)


def test_a_skip_connection_joins_the_result_with_the_input(rng):
    m = SkipConnection(Dense(2, 2, dtype=np.float64), "+")
    x = rng.normal(size=(2, 3))
    np.testing.assert_array_equal(m(x), m[0](x) + x)
    (y,) = m([x])
    np.testing.assert_array_equal(y, m(x))
    gradcheck(call, randomised(m, rng), x)
    stacked = SkipConnection(lambda x: x * 2, ops.vcat)
    np.testing.assert_array_equal(stacked(np.ones(2)), [2, 2, 1, 1])


def test_a_layer_used_twice_gets_the_sum_of_its_gradients(rng):
    layer = randomised(Dense(3, 3, ops.tanh, dtype=np.float64), rng)
    m = Chain(layer, Parallel("+", layer, ops.identity), layer)
    assert len(params(m)) == 2
    gradcheck(call, m, rng.normal(size=(3, 2)))


# ------------------------------------------------------------------ outputsize


@pytest.mark.parametrize(
    ("layer", "size", "wanted"),
    [
        (Dense(3, 5), (3,), (5,)),
        (Dense(3, 5), (3, 4), (5, 4)),
        (Dense(3, 5), (3, 4, 7), (5, 4, 7)),
        (Scale(3), (3, 4), (3, 4)),
        (Embedding(9, 5), (), (5,)),
        (Embedding(9, 5), (4, 7), (5, 4, 7)),
        (Dropout(0.5, active=True), (3, 4), (3, 4)),
        (LayerNorm(3), (3, 4), (3, 4)),
        (BatchNorm(3, active=True), (3, 4), (3, 4)),
        (ops.softmax, (3, 4), (3, 4)),
        (lambda x: x[:, :, -1], (3, 4, 7), (3, 4)),
        (Chain(Dense(3, 5), lambda x: x[1:], Dense(4, 2)), (3, 8), (2, 8)),
        (Chain(), (3, 8), (3, 8)),
        (Parallel(ops.vcat, Dense(3, 5), Dense(3, 2)), (3, 4), (7, 4)),
        (Parallel("+", a=Dense(3, 5), b=Dense(3, 5)), (3, 4), (5, 4)),
        (Chain(Parallel(tuple, Dense(3, 5), Dense(3, 2)), Parallel("+", abs, abs)), (3,), None),
        (SkipConnection(Dense(3, 5), ops.vcat), (3, 4), (8, 4)),
    ],
)
def test_outputsize_gives_the_shape_of_a_call(layer, size, wanted):
    if wanted is None:
        with pytest.raises(ValueError, match="broadcast"):
            outputsize(layer, size)
        return
    assert outputsize(layer, size) == outputsize(layer, list(size)) == wanted


def test_outputsize_of_several_inputs():
    m = Parallel("+", Dense(3, 5), Dense(2, 5))
    assert outputsize(m, (3, 4), (2, 4)) == (5, 4)
    assert outputsize(Chain(m, Dense(5, 1)), (3, 4), (2, 4)) == (1, 4)


def test_outputsize_runs_nothing_that_has_a_state_or_draws(rng):
    m = Chain(Dropout(0.5, active=True, rng=rng), BatchNorm(3, active=True), Dense(3, 2))
    before = m[0].generator.bit_generator.state
    assert outputsize(m, (3, 4)) == (2, 4)
    assert m[0].generator.bit_generator.state == before
    assert not m[1].mean.any()

    class Net(Module):
        def __init__(self):
            self.drop = Dropout(0.5, active=True)

        def __call__(self, x):
            return self.drop(x)

    with pytest.raises(TypeError, match=r"without running drop \(Dropout\(0\.5\)\).*output_shape"):
        outputsize(Chain(Net()), (3,))
    net = Net()
    with pytest.raises(TypeError, match="without running"):
        outputsize(lambda x: net(x), (3,))


def test_outputsize_tries_a_stateless_layer_of_ones_own_on_zeros():
    class Net(Module):
        def __init__(self):
            self.a = Dense(3, 2)

        def __call__(self, x):
            return self.a(x)

    assert outputsize(Net(), (3, 4)) == (2, 4)


@pytest.mark.parametrize(
    ("layer", "size", "error", "text"),
    [
        (Dense(3, 5), (4, 2), ShapeError, r"Dense\(3 => 5\): an input of shape \(4, 2\)"),
        (Dense(3, 5), (), ShapeError, "has no 3 features"),
        (LayerNorm(3), (3, 1, 1, 1), ShapeError, "at most 3"),
        (Dense(3, 5), (3, -1), ShapeError, "a size is negative"),
        (Dense(3, 5), 3, TypeError, "expected the shape of each input"),
    ],
)
def test_outputsize_refuses_a_shape_that_does_not_fit(layer, size, error, text):
    with pytest.raises(error, match=text):
        outputsize(layer, size)
