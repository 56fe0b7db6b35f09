"""Modules own parameters: assignment, saving and loading, copies, modes, randomness, files."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import recur.module as module
from recur import ops
from recur.errors import FormatError, ShapeError, StateError, TapeError
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
from recur.module import (
    Module,
    build_model,
    child_generator,
    describe_model,
    destructure,
    f32,
    f64,
    is_active,
    journal,
    load_state_dict,
    loadmodel,
    named_params,
    new_param,
    params,
    register,
    state_dict,
    testmode,
    ties,
    trainmode,
    transaction,
)
from recur.tape import Param, Tape, paused


class Counter(Module):
    """A layer with a state, as a recurrent one has: y = x + (sum of what came before)."""

    def __init__(self, n: int = 2, dtype: Any = np.float32) -> None:
        self.w = Param(np.ones(n, dtype))
        self.state: Any = None

    def __call__(self, x):
        journal(self, lambda old=self.state: setattr(self, "state", old))
        self.state = x if self.state is None else self.state + x
        return self.state

    def running_state(self):
        return {} if self.state is None else {"state": self.state}

    def load_running_state(self, new):
        state = new.get("state")
        if state is not None and np.ndim(state) != 1:
            raise StateError("Counter: bad state")
        self.state = None if state is None else np.array(state, self.w.dtype)


class Explode(Module):
    def __call__(self, x):
        raise RuntimeError("no")


# ------------------------------------------------------------------ assignment


def test_a_plain_array_is_copied_into_the_parameter(dtype):
    layer = Dense(3, 2, dtype=dtype)
    before, version = layer.weight, layer.weight.version
    array = np.arange(6.0).reshape(2, 3)
    layer.weight = array
    assert layer.weight is before
    assert layer.weight.version > version
    assert layer.weight.dtype == dtype
    array[:] = 9
    np.testing.assert_array_equal(layer.weight.value, np.arange(6).reshape(2, 3))


@pytest.mark.parametrize("new", [[1, 2], (1, 2), np.array([1, 2]), np.array([1.0, 2.0])])
def test_lists_and_integers_are_copied_too(new):
    layer = Dense(3, 2)
    layer.bias = new
    np.testing.assert_array_equal(layer.bias.value, [1, 2])
    assert layer.bias.dtype == np.float32


def test_a_parameter_takes_the_place_and_is_shared():
    one, two = Dense(3, 2), Dense(3, 2)
    two.weight = one.weight
    assert two.weight is one.weight
    one.weight[...] = 5
    assert (two.weight.value == 5).all()
    assert params([one, two]).index(one.weight) == 0
    assert len(params([one, two])) == 3


def test_an_in_place_operator_writes_into_the_parameter():
    layer = Dense(3, 2)
    before = layer.bias
    layer.bias += 1
    assert layer.bias is before
    assert (before.value == 1).all()


def test_an_array_of_another_shape_is_refused_and_nothing_changes():
    layer = Dense(3, 2)
    before, version = layer.weight.value.copy(), layer.weight.version
    for bad in (np.zeros((3, 2)), np.zeros(3), 0.0, np.zeros((1, 3))):
        with pytest.raises(ShapeError, match=r"Dense\(3 => 2\)\.weight: .*expected \(2, 3\)"):
            layer.weight = bad
    with pytest.raises(ShapeError, match=r"Dense\(3 => 2\)\.weight: not an array"):
        layer.weight = [[1, 2], [3]]
    for bad in (np.zeros((2, 3), complex), [["a"] * 3] * 2):
        with pytest.raises(TypeError, match="expected real numbers"):
            layer.weight = bad
    np.testing.assert_array_equal(layer.weight.value, before)
    assert layer.weight.version == version


def test_a_recorded_tensor_cannot_be_assigned_to_a_parameter_but_its_value_can():
    layer = Dense(2, 2)
    with Tape():
        t = layer.bias + 1
        with pytest.raises(TapeError, match="recorded Tensor"):
            layer.bias = t
        assert (layer.bias.value == 0).all()
    layer.bias = t
    assert (layer.bias.value == 1).all()


def test_none_or_a_layer_takes_a_parameters_place():
    layer = Dense(2, 2)
    layer.bias = None
    assert list(named_params(layer)) == ["weight"]
    assert repr(layer) == "Dense(2 => 2, bias=False)"


def test_a_parameter_is_named_after_its_layer_and_a_shared_one_keeps_its_first_name():
    one, two = Dense(3, 2, ops.tanh), Dense(3, 2)
    assert one.weight.name == "Dense(3 => 2, tanh).weight"
    two.weight = one.weight
    assert two.weight.name == "Dense(3 => 2, tanh).weight"


# ------------------------------------------------------------------ saving and loading


def model(dtype: Any = np.float32) -> Chain:
    return Chain(Dense(3, 4, ops.tanh, dtype=dtype), BatchNorm(4, dtype=dtype), Counter(4, dtype))


def test_state_dict_holds_copies_of_parameters_then_buffers():
    m = model()
    saved = state_dict(m)
    assert list(saved) == [
        *("layers.0.weight", "layers.0.bias", "layers.1.bias", "layers.1.scale", "layers.2.w"),
        *("layers.1.mean", "layers.1.var"),
    ]
    saved["layers.0.bias"][:] = 7
    saved["layers.1.mean"][:] = 7
    assert not np.any(m[0].bias.value == 7)
    assert not np.any(m[1].mean == 7)


def test_a_shared_parameter_is_saved_once():
    m = Chain(Dense(3, 3), Dense(3, 3))
    m[1].weight = m[0].weight
    assert list(state_dict(m)) == ["layers.0.weight", "layers.0.bias", "layers.1.bias"]


def test_loading_copies_every_array_and_starts_the_state_anew(dtype, rng):
    source, target = model(dtype), model(dtype)
    for p in params(source):
        p[...] = rng.normal(size=p.shape)
    source[1].mean[:] = 3
    target[2](np.ones(4))
    weight = target[0].weight
    assert load_state_dict(target, state_dict(source)) is target
    assert target[0].weight is weight
    for path, array in state_dict(source).items():
        np.testing.assert_array_equal(state_dict(target)[path], array)
    assert target[2].state is None


def test_saved_arrays_are_converted_to_the_dtype_of_the_model():
    target = model(np.float32)
    load_state_dict(target, state_dict(model(np.float64)))
    assert {p.dtype for p in params(target)} == {np.dtype(np.float32)}
    assert target[1].mean.dtype == np.float32


def test_the_running_state_is_saved_and_loaded_on_request_only():
    source = model()
    assert "layers.2.state" not in state_dict(source, include_state=True)
    source[2](np.ones(4))
    assert "layers.2.state" not in state_dict(source)
    saved = state_dict(source, include_state=True)
    assert list(saved)[-1] == "layers.2.state"
    target = load_state_dict(model(), saved)
    np.testing.assert_array_equal(target[2].state, np.ones(4))
    target[2].state += 1
    np.testing.assert_array_equal(saved["layers.2.state"], np.ones(4))


def test_a_state_that_does_not_fit_changes_nothing():
    target = model()
    target[2](np.ones(4))
    saved = {**state_dict(model()), "layers.2.state": np.zeros((2, 2))}
    saved["layers.0.bias"] = np.full(4, 9)
    with pytest.raises(StateError, match="bad state"):
        load_state_dict(target, saved)
    np.testing.assert_array_equal(target[2].state, np.ones(4))
    assert not target[0].bias.value.any()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda d: d.pop("layers.0.bias"), StateError, r"lack layers\.0\.bias"),
        (lambda d: d.update(extra=np.zeros(1)), StateError, "the model has no extra"),
        (lambda d: d.update({"layers.0.state": 1}), StateError, r"has no layers\.0\.state"),
        (lambda d: d.pop("layers.1.mean"), StateError, r"lack layers\.1\.mean"),
        (
            lambda d: d.update({"layers.2.w": np.zeros(5)}),
            ShapeError,
            r"layers\.2\.w: the saved array has shape \(5,\), expected \(4,\)",
        ),
        (
            lambda d: d.update({"layers.1.var": np.zeros(5)}),
            ShapeError,
            r"layers\.1\.var: .*\(5,\), expected \(4,\)",
        ),
        (lambda d: d.update({"layers.2.w": np.zeros(4, complex)}), TypeError, "real numbers"),
    ],
)
def test_names_and_shapes_are_checked_before_anything_is_loaded(change, error, text):
    saved = {path: array + 1 for path, array in state_dict(model()).items()}
    change(saved)
    target = model()
    before = state_dict(target)
    with pytest.raises(error, match=text):
        load_state_dict(target, saved)
    for path, array in state_dict(target).items():
        np.testing.assert_array_equal(array, before[path])


def test_without_strict_what_both_have_is_loaded_and_shapes_are_still_checked():
    target = model()
    load_state_dict(target, {"layers.0.bias": np.ones(4), "other": np.zeros(1)}, strict=False)
    assert (target[0].bias.value == 1).all()
    with pytest.raises(ShapeError, match=r"layers\.0\.bias"):
        load_state_dict(target, {"layers.0.bias": np.ones(5)}, strict=False)


def test_a_long_list_of_missing_names_is_cut_short():
    with pytest.raises(StateError, match=r"layers\.2\.w and 2 more\. Nothing"):
        load_state_dict(model(), {})


def test_loadmodel_takes_a_model_or_a_nested_dict():
    source, target = model(), model()
    source[0].bias[...] = 2
    assert loadmodel(target, source) is target
    assert (target[0].bias.value == 2).all()
    d = Dense(1, 2)
    loadmodel(d, {"weight": [[1], [2]], "bias": [3, 4]})
    np.testing.assert_array_equal(d.bias.value, [3, 4])
    loadmodel(Chain(d), {"layers": {"0": {"weight": [[5], [6]], "bias": [0, 0]}}})
    np.testing.assert_array_equal(d.weight.value, [[5], [6]])


def test_loadmodel_treats_a_missing_bias_and_a_bias_of_zeros_alike():
    with_bias, without = Dense(2, 2), Dense(2, 2, bias=False)
    loadmodel(without, with_bias)
    np.testing.assert_array_equal(without.weight.value, with_bias.weight.value)
    with_bias.bias[...] = 1
    with pytest.raises(StateError, match="the model has no bias"):
        loadmodel(without, with_bias)
    loadmodel(with_bias, without)
    assert not with_bias.bias.value.any()
    with_bias.bias[...] = 1
    loadmodel(with_bias, {"weight": np.zeros((2, 2)), "bias": False})
    assert not with_bias.bias.value.any()
    with pytest.raises(StateError, match="lack bias"):
        loadmodel(with_bias, {"weight": np.zeros((2, 2))})


# ------------------------------------------------------------------ copies


def memory(m: Any) -> list[np.ndarray]:
    return [p.value for p in params(m)] + list(module.buffers(m).values())


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_carry_parameters_buffers_and_state_and_share_no_memory(duplicate, dtype):
    m = model(dtype)
    m[2].w = m[1].scale
    m[2](np.ones(4, dtype))
    other = duplicate(m)
    assert ties(other) == ties(m) == {"layers.2.w": "layers.1.scale"}
    for a, b in zip(memory(m), memory(other), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
        assert not np.shares_memory(a, b)
    np.testing.assert_array_equal(other[2].state, m[2].state)
    assert not np.shares_memory(other[2].state, m[2].state)
    assert other[0].weight.name == m[0].weight.name


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_made_inside_a_scope_has_plain_states(duplicate):
    m = Counter()
    with Tape():
        m.state = {"h": (m.w * 2, [m.w + 1]), "n": 1}
        other = duplicate(m)
    h, (c,) = other.state["h"]
    assert type(h) is type(c) is np.ndarray
    np.testing.assert_array_equal(h, [2, 2])
    assert other.state["n"] == 1


def test_a_copy_of_a_module_that_holds_itself_holds_itself():
    m = Counter()
    m.loop = [m]
    m.loop.append(m.loop)
    other = copy.deepcopy(m)
    assert other.loop[0] is other
    assert other.loop[1] is other.loop


def test_transient_attributes_are_left_out_of_copies():
    class Cached(Module):
        transient = frozenset({"cache"})
        cache = None

    m = Cached()
    m.cache = threading.Lock()  # which cannot be copied
    assert copy.deepcopy(m).cache is None


def test_f32_and_f64_convert_parameters_buffers_and_states():
    m = model()
    m[2].w = m[1].scale
    m[2](np.ones(4, np.float32))
    wide = f64(m)
    assert {a.dtype for a in [*memory(wide), wide[2].state]} == {np.dtype(np.float64)}
    assert {a.dtype for a in [*memory(m), m[2].state]} == {np.dtype(np.float32)}
    assert ties(wide) == ties(m)
    np.testing.assert_array_equal(wide[2].state, m[2].state)
    back = f32(wide)
    for a, b in zip(memory(m), memory(back), strict=True):
        np.testing.assert_array_equal(a, b)
        assert b.dtype == np.float32
    assert f32(np.zeros(2)).dtype == np.float32


def test_f64_converts_a_state_recorded_in_an_open_scope():
    m = Counter()
    with Tape():
        m.state = (m.w + 1, None)
        wide = f64(m)
    assert wide.state[0].dtype == np.float64


def test_a_converted_embedding_keeps_its_columns_contiguous():
    m = Embedding(5, 3)
    assert f64(m).weight.value.T.flags.c_contiguous
    assert copy.deepcopy(m).weight.value.T.flags.c_contiguous
    assert pickle.loads(pickle.dumps(m)).weight.value.T.flags.c_contiguous


def test_a_parameter_that_only_a_function_holds_is_not_converted_in_silence():
    layer = Dense(2, 2)
    m = Chain(lambda x: layer(x))
    for convert in (f32, f64, destructure):
        with pytest.raises(StateError, match=r"layers\.0\.layer\.weight: only a function holds"):
            convert(m)


# ------------------------------------------------------------------ destructure


def test_destructure_lists_parameters_in_order_column_by_column(dtype):
    m = Chain(Dense(np.array([[1, 2], [3, 4.0]], dtype), np.array([5, 6.0])), Counter(1, dtype))
    m[1].w[...] = 7
    flat, rebuild = destructure(m)
    np.testing.assert_array_equal(flat, [1, 3, 2, 4, 5, 6, 7])
    assert flat.dtype == dtype
    rows, rebuild_rows = destructure(m, order="C")
    np.testing.assert_array_equal(rows, [1, 2, 3, 4, 5, 6, 7])
    for other in (rebuild(flat), rebuild_rows(rows)):
        for a, b in zip(params(m), params(other), strict=True):
            np.testing.assert_array_equal(a.value, b.value)
            assert not np.shares_memory(a.value, b.value)
            assert b.value.flags.c_contiguous


def test_a_rebuilt_model_starts_anew_unless_the_state_is_kept():
    m = Counter()
    m(np.ones(2))
    flat, rebuild = destructure(m)
    assert rebuild(flat).state is None
    _, rebuild = destructure(m, keep_state=True)
    m(np.ones(2))
    other = rebuild(flat)
    np.testing.assert_array_equal(other.state, [1, 1])
    other.state += 1
    np.testing.assert_array_equal(rebuild(flat).state, [1, 1])


def test_shared_parameters_stay_shared_in_a_rebuilt_model():
    m = Chain(Dense(2, 2), Dense(2, 2))
    m[1].weight = m[0].weight
    flat, rebuild = destructure(m)
    assert flat.shape == (8,)
    assert ties(rebuild(flat)) == ties(m)


def test_gradient_flows_through_rebuild_into_the_vector(rng):
    m = f64(Chain(Dense(3, 4, ops.tanh), Embedding(4, 2), Dense(2, 2)))
    flat, rebuild = destructure(m)
    x = rng.normal(size=(3, 5))
    with Tape() as tape:
        tape.backward((m(x) ** 2).sum())
    wanted, _ = destructure(m)
    wanted = np.concatenate([p.grad.ravel("F") for p in params(m)])
    for order in ("F", "C"):
        flat, rebuild = destructure(m, order=order)
        with Tape() as tape:
            v = tape.watch(flat)
            tape.backward((rebuild(v)(x) ** 2).sum())
        wanted = np.concatenate([p.grad.ravel(order) for p in params(m)])
        np.testing.assert_allclose(v.grad, wanted, rtol=1e-12)


def test_rebuild_refuses_a_vector_of_another_length():
    flat, rebuild = destructure(Dense(2, 2))
    with pytest.raises(ShapeError, match=r"shape \(5,\), expected \(6,\)"):
        rebuild(flat[:-1])
    with pytest.raises(ValueError, match='expected "F" or "C"'):
        destructure(Dense(2, 2), order="A")


def test_a_model_without_parameters_has_an_empty_vector():
    flat, rebuild = destructure(Chain(ops.tanh))
    assert flat.shape == (0,)
    assert rebuild(flat)(np.zeros(2)).shape == (2,)


# ------------------------------------------------------------------ modes and transactions


def test_modes_switch_random_and_statistics_layers_and_nothing_else():
    m = Chain(Counter(), Dropout(0.5), [lambda x: x][0], Parallel("+", BatchNorm(2)))
    m[0](np.ones(2))
    before = state_dict(m, include_state=True)
    assert trainmode(m) is m
    assert m[1].active is m[3][0].active is True
    assert testmode(m)[1].active is False
    assert trainmode(m, False)[1].active is False
    assert testmode(m, False)[1].active is True
    assert trainmode(m, "auto")[1].active is None
    trainmode(m)
    assert testmode(m, "auto")[3][0].active is None
    assert not hasattr(m[0], "active")
    after = state_dict(m, include_state=True)
    assert before.keys() == after.keys()
    for path in before:
        np.testing.assert_array_equal(before[path], after[path])


def test_left_to_itself_a_random_layer_is_active_inside_a_scope_only():
    layer = Dropout(0.5)
    assert not is_active(layer)
    with Tape():
        assert is_active(layer)
        with paused():
            assert not is_active(layer)
    layer.active = True
    assert is_active(layer)


def test_a_failing_transaction_restores_in_reverse_and_only_once_for_a_layer():
    log = []
    one, two = Counter(), Counter()
    with pytest.raises(RuntimeError), transaction():
        journal(one, lambda: log.append("one"))
        journal(two, lambda: log.append("two"))
        journal(one, lambda: log.append("one again"))
        raise RuntimeError
    assert log == ["two", "one"]


def test_the_outermost_transaction_undoes_what_inner_ones_completed():
    m = Counter()
    with pytest.raises(RuntimeError), transaction():
        with transaction():
            m(np.ones(2))
        assert m.state is not None
        raise RuntimeError
    assert m.state is None


def test_a_caught_error_inside_a_transaction_undoes_nothing_by_itself():
    m = Counter()
    with transaction():
        m(np.ones(2))
        with pytest.raises(RuntimeError), transaction():
            raise RuntimeError
    np.testing.assert_array_equal(m.state, np.ones(2))


def test_a_transaction_belongs_to_its_thread():
    m = Counter()
    with pytest.raises(RuntimeError), transaction():
        thread = threading.Thread(target=m, args=(np.ones(2),))
        thread.start()
        thread.join()
        raise RuntimeError
    np.testing.assert_array_equal(m.state, np.ones(2))


def test_journal_outside_a_transaction_does_nothing():
    journal(Counter(), lambda: pytest.fail("restored"))


@pytest.mark.parametrize(
    "container",
    [
        lambda m, bad: Chain(m, bad),
        lambda m, bad: Parallel("+", m, bad),
        lambda m, bad: Chain(Chain(m), Parallel(tuple, ops.tanh, bad)),
    ],
)
@pytest.mark.parametrize("x", [np.ones(2), [np.ones(2), np.ones(2)]])
def test_a_container_call_that_raises_leaves_all_states_as_they_were(container, x):
    m = Counter()
    m(np.full(2, 5.0))
    with pytest.raises(RuntimeError):
        container(m, Explode())(x)
    np.testing.assert_array_equal(m.state, [5, 5])


# ------------------------------------------------------------------ initialisers and generators


def test_glorot_uniform_fills_its_bounds_and_stays_inside(rng):
    w = module.glorot_uniform(20, 3, rng=rng)
    assert w.shape == (20, 3)
    bound = np.sqrt(6 / 23)
    assert 0.9 * bound < np.abs(w).max() <= bound
    wide = module.glorot_uniform(gain=2)(20, 3, rng=np.random.default_rng(1))
    np.testing.assert_allclose(wide, 2 * module.glorot_uniform(20, 3, rng=np.random.default_rng(1)))


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("glorot_uniform", np.sqrt(2 / 700)),
        ("glorot_normal", np.sqrt(2 / 700)),
        ("kaiming_uniform", np.sqrt(2 / 300)),
        ("kaiming_normal", np.sqrt(2 / 300)),
        ("normal", 1.0),
    ],
)
def test_an_initialiser_has_the_deviation_of_its_formula(name, std, rng):
    w = getattr(module, name)(400, 300, rng=rng)
    assert abs(w.mean()) < 0.02 * std
    assert abs(w.std() / std - 1) < 0.01


def test_a_vector_counts_as_one_input():
    assert np.abs(module.glorot_uniform(50, rng=np.random.default_rng(0))).max() <= np.sqrt(6 / 51)


def test_truncated_normal_lies_between_its_bounds(rng):
    w = module.truncated_normal(1000, rng=rng, mean=1, std=2, lo=0, hi=2)
    assert w.min() >= 0
    assert w.max() <= 2
    assert abs(w.mean() - 1) < 0.1


@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (3, 6)])
def test_orthogonal_rows_or_columns_are_orthonormal(shape, rng):
    w = module.orthogonal(*shape, rng=rng)
    small = w.T @ w if shape[0] >= shape[1] else w @ w.T
    np.testing.assert_allclose(small, np.eye(min(shape)), atol=1e-12)
    np.testing.assert_allclose(
        module.orthogonal(*shape, rng=np.random.default_rng(3), gain=2),
        2 * module.orthogonal(*shape, rng=np.random.default_rng(3)),
    )


def test_constant_initialisers():
    np.testing.assert_array_equal(module.identity_init(2, 3, gain=2), [[2, 0, 0], [0, 2, 0]])
    np.testing.assert_array_equal(module.identity_init(2), [0, 0])
    assert (module.ones(2, 3) == 1).all()
    assert (module.zeros(3) == 0).all()


def test_a_seed_fixes_the_layers_and_both_dtypes_draw_alike():
    module.seed(7)
    one, drop = Dense(3, 2), Dropout(0.5, active=True)
    module.seed(7)
    two, drop_too = Dense(3, 2, dtype=np.float64), Dropout(0.5, active=True)
    np.testing.assert_array_equal(one.weight.value, two.weight.value.astype(np.float32))
    np.testing.assert_array_equal(drop(np.ones(20)), drop_too(np.ones(20)))
    assert np.any(Dense(3, 2).weight.value != one.weight.value)


def test_numpys_global_state_is_neither_used_nor_moved():
    np.random.seed(0)  # noqa: NPY002  (the state that must not matter)
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    trainmode(Chain(Dense(3, 2), Dropout(0.5)))(np.ones(3))
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_given_generators_are_used_and_children_differ_from_each_other():
    one = Dense(3, 2, rng=np.random.default_rng(1))
    two = Dense(3, 2, rng=np.random.default_rng(1))
    np.testing.assert_array_equal(one.weight.value, two.weight.value)
    parent = np.random.default_rng(1)
    a, b = child_generator(parent), child_generator(parent)
    assert a.random() != b.random()
    unseeded = np.random.Generator(np.random.MT19937())
    unseeded.bit_generator.state = np.random.MT19937(5).state
    assert isinstance(child_generator(unseeded), np.random.Generator)
    with pytest.raises(TypeError, match=r"rng is a int, expected a numpy\.random\.Generator"):
        Dense(3, 2, rng=3)


def test_a_users_initialiser_may_leave_rng_out():
    assert (Dense(3, 2, init=lambda *dims: np.full(dims, 4)).weight.value == 4).all()
    with pytest.raises(ShapeError, match=r"gave shape \(3, 2\), expected \(2, 3\)"):
        Dense(3, 2, init=lambda rows, columns: np.zeros((columns, rows)))
    with pytest.raises(TypeError, match="the initialiser is a ndarray, expected a function"):
        Dense(3, 2, init=np.zeros((2, 3)))
    with pytest.raises(TypeError, match="float16 is not supported, expected float32 or float64"):
        new_param("w", module.zeros, (2,), dtype=np.float16)


# ------------------------------------------------------------------ descriptions


@register("test_module.Mine", version=2)
class Mine(Module):
    def __init__(self, inner: Any, act: Any = ops.relu, sizes: Any = ()) -> None:
        self.inner, self.act, self.sizes = inner, act, tuple(sizes)

    def __call__(self, x):
        return self.act(self.inner(x))

    def config(self):
        return {"inner": self.inner, "act": self.act, "sizes": self.sizes}


class Unregistered(Module):
    def __call__(self, x):
        return x


def rebuilt(m: Module, max_bytes: int | None = None) -> Module:
    return build_model(json.loads(json.dumps(describe_model(m))), max_bytes)


def test_every_layer_is_rebuilt_from_its_description(dtype, rng):
    m = Chain(
        Embedding(6, 3, dtype=dtype),
        Dense(3, 4, ops.leakyrelu, dtype=dtype),
        Dropout(0.25, dims=0),
        LayerNorm(4, ops.tanh, dtype=dtype, eps=1e-3),
        LayerNorm(4, affine=False),
        BatchNorm(4, dtype=dtype, momentum=0.5),
        Parallel("*", a=Dense(4, 2, bias=False, dtype=dtype), b=Dense(4, 2, dtype=dtype)),
        Parallel(ops.vcat, Mine(Dense(2, 3, dtype=dtype), ops.relu, (1, 2)), ops.softmax),
    )
    for p in params(m):
        p[...] = rng.normal(size=p.shape)
    other = rebuilt(m)
    assert repr(other) == repr(m)
    load_state_dict(other, state_dict(m))
    assert {p.dtype for p in params(other)} == {dtype}
    x = np.array([[0, 5], [1, 2]])
    np.testing.assert_array_equal(other(x), m(x))
    assert other[7][0].sizes == (1, 2)
    assert describe_model(other) == describe_model(m)


def test_shared_layers_and_parameters_are_shared_again():
    layer = Dense(2, 2)
    m = Chain(layer, Dense(2, 2), layer)
    m[1].weight = m[0].weight
    other = rebuilt(m)
    assert other[2] is other[0]
    assert other[1].weight is other[0].weight
    assert other[1].bias is not other[0].bias


def test_rebuilding_draws_nothing_from_the_librarys_generator():
    m = Chain(Dense(3, 3), Dropout(0.5))
    module.seed(1)
    wanted = Dense(3, 2).weight.value
    module.seed(1)
    rebuilt(m)
    np.testing.assert_array_equal(Dense(3, 2).weight.value, wanted)


def test_what_cannot_be_described_is_refused_by_name_and_with_the_remedy():
    with pytest.raises(StateError, match=r"layers\[0\]: Unregistered .*@recur\.register"):
        describe_model(Chain(Unregistered()))
    with pytest.raises(StateError, match=r"layers\[0\]\.act: <function .*lambda"):
        describe_model(Chain(Dense(2, 2, lambda x: x)))
    with pytest.raises(StateError, match=r"layers\['f'\]: <function"):
        describe_model(Chain(f=lambda x: x))

    class Sub(Dense):
        pass

    with pytest.raises(StateError, match=r"model: .*Sub is a layer of your own"):
        describe_model(Sub(2, 2))


def test_a_name_can_be_registered_once():
    with pytest.raises(ValueError, match=r"'Dense' is taken by recur\.layers\.dense\.Dense"):

        @register("Dense")
        class Other(Module):
            pass


def layer_of(**changes: Any) -> dict[str, Any]:
    described = describe_model(Chain(Dense(2, 2)))
    dense = described["layers"]["config"]["layers"][0]
    top = changes.pop("top", {})
    dense["config"].update(changes)
    dense.update(top)
    return described


@pytest.mark.parametrize(
    ("described", "text"),
    [
        (layer_of(top={"$layer": "Nope"}), "'Nope' that is not registered"),
        (layer_of(top={"version": 2}), "Dense: version 2 was written by a newer recur"),
        (layer_of(top={"version": "1"}), "version 1 was written"),
        (layer_of(top={"$layer": ["Dense"]}), "damaged"),
        (layer_of(top={"config": 3}), "damaged"),
        (layer_of(top={"config": {}}), "damaged: 'n_in'"),
        (layer_of(n_in="2"), "damaged: Dense: n_in is '2', expected a positive integer"),
        (layer_of(n_in=-1), "expected a positive integer"),
        (layer_of(act="tanh"), "the activation is 'tanh'"),
        (layer_of(act={"$function": "exit"}), "no activation is named 'exit'"),
        (layer_of(act={"$function": []}), "damaged"),
        (layer_of(act={"$again": 9}), "damaged"),
        (layer_of(act={"$again": 0}), "holds itself"),
        (layer_of(act={"$dict": 5}), "damaged"),
        (layer_of(surprise=1), "damaged: .*surprise"),
        (layer_of(dtype="int8"), "dtype int8 is not supported"),
        ({"layers": 3, "ties": {}}, "holds no model"),
        ({"layers": None}, "holds no model"),
        ({}, "damaged"),
        ({**layer_of(), "ties": 3}, "damaged"),
        ({**layer_of(), "ties": {"layers.0.bias": "nowhere"}}, "damaged: 'nowhere'"),
        ({**layer_of(), "ties": {"layers.0.bias": "layers.0"}}, "which are no parameters"),
        ({**layer_of(), "ties": {"layers.0.act": "layers.0.bias"}}, "which are no parameters"),
        ({**layer_of(), "ties": {"layers.0.bias": "layers.0.weight"}}, "another shape"),
    ],
)
def test_a_damaged_or_hostile_description_is_a_format_error(described, text):
    with pytest.raises(FormatError, match=text):
        build_model(described)


def test_a_description_may_not_claim_more_memory_than_its_file_holds():
    rebuilt(Chain(Dense(2, 2)), max_bytes=24)
    with pytest.raises(FormatError, match="more memory than its file holds"):
        rebuilt(Chain(Dense(2, 2)), max_bytes=23)
    for hostile in (layer_of(n_in=1 << 40), layer_of(n_in=1 << 70)):
        with pytest.raises(FormatError, match="more memory than its file holds"):
            build_model(hostile, max_bytes=10_000)


def test_a_description_nested_too_deep_is_a_format_error():
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(FormatError, match="too deep"):
        build_model({"layers": deep, "ties": {}})


def test_a_newer_class_gets_the_version_that_was_written():
    seen = []

    @register("test_module.Versioned", version=3)
    class Versioned(Module):
        def config(self):
            return {}

        @classmethod
        def from_config(cls, config, version):
            seen.append(version)
            return cls()

    described = describe_model(Versioned())
    assert described["layers"]["version"] == 3
    described["layers"]["version"] = 1
    build_model(described)
    assert seen == [1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["$layer", "$again", "$dict", "$function", "version", "config", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=5,
)


@hypothesis.settings(max_examples=150)
@hypothesis.given(data=st.data())
def test_any_other_description_builds_a_model_or_is_a_format_error(data):
    described = describe_model(
        Chain(
            Embedding(3, 2),
            Parallel("+", a=Dense(2, 2, ops.tanh), b=Dropout(0.5, dims=0)),
            SkipConnection(BatchNorm(2), ops.vcat),
            LayerNorm(4),
            Scale(4),
        )
    )
    described["ties"] = {"layers.2.layers.0.scale": "layers.2.layers.0.bias"}
    assert isinstance(build_model(described, 10_000), Module)
    place: Any = described
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        below = place[key]
        if not isinstance(below, dict | list) or not below or data.draw(st.booleans()):
            break
        place = below
    place[key] = data.draw(JSON)
    try:
        assert isinstance(build_model(described, 10_000), Module)
    except FormatError:
        pass
