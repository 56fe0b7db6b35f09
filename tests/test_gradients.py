"""gradient and withgradient: arguments, results by path, buffers used again, flat vectors."""

from __future__ import annotations

import copy
import pickle
from typing import NamedTuple

import numpy as np
import pytest

import recur
from recur import ops
from recur.errors import GraphUsedError, ShapeError, StateError, TapeError
from recur.gradients import Gradients, flatten_parameters, gradient, withgradient, zero_grad
from recur.module import Module, f64, load_state_dict, params, state_dict
from recur.tape import Param, Tape, current, value


class Layer(Module):
    def __init__(self, n_in, n_out, rng, dtype=np.float64):
        self.W = Param(rng.standard_normal((n_out, n_in)).astype(dtype))
        self.b = Param(np.zeros(n_out, dtype))

    def __call__(self, x):
        return np.tanh(ops.affine(self.W, x, self.b))


class Model(Module):
    def __init__(self, rng, dtype=np.float64):
        self.layers = [Layer(3, 4, rng, dtype), Layer(4, 2, rng, dtype)]
        self.unused = Layer(2, 2, rng, dtype)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def model(rng):
    return Model(rng)


@pytest.fixture
def x(rng):
    return rng.standard_normal((3, 5))


def loss(model, x):
    return (model(x) ** 2).sum()


def by_hand(model, x):
    for p in params(model):
        p.grad = None
    with Tape() as tape:
        tape.backward(loss(model, x))
    return {id(p): p.grad for p in params(model)}


# Results.


def test_results_are_read_by_path_by_attribute_and_by_parameter(model, x):
    expected = by_hand(model, x)
    g = gradient(lambda m: loss(m, x), model)
    W = model.layers[1].W
    np.testing.assert_array_equal(g["layers.1.W"], expected[id(W)])
    assert g.layers[1].W is g["layers.1.W"]
    assert g["layers"][1]["W"] is g["layers.1.W"]
    assert g[W] is g["layers.1.W"]
    paths = ["layers.0.W", "layers.0.b", "layers.1.W", "layers.1.b", "unused.W", "unused.b"]
    assert list(g) == g.keys() == paths
    assert len(g) == 6
    assert [array.shape for array in g.values()] == [p.shape for p in params(model)]
    assert dict(g.items())["layers.1.W"] is g[W]
    assert "layers.0.W" in g
    assert W in g
    assert "nothing" not in g
    assert Param(np.ones(1)) not in g


def test_what_the_loss_does_not_reach_gets_exact_zeros(model, x):
    g = gradient(lambda m: loss(m, x), model)
    np.testing.assert_array_equal(g.unused.W, np.zeros((2, 2)))
    assert g.unused.W.dtype == np.float64


def test_two_calls_give_the_same_numbers_and_touch_no_grad(model, x):
    first = gradient(lambda m: loss(m, x), model)
    second = gradient(lambda m: loss(m, x), model)
    for path in first:
        np.testing.assert_array_equal(first[path], second[path])
        assert first[path] is not second[path]
    assert all(p.grad is None for p in params(model))


def test_an_unknown_path_is_named_with_those_there_are(model, x):
    g = gradient(lambda m: loss(m, x), model)
    with pytest.raises(KeyError, match=r"'layers\.7\.W' is not a parameter.*layers\.0\.W"):
        g["layers.7.W"]
    with pytest.raises(AttributeError, match=r"layers\.0\.Q"):
        g.layers[0].Q  # noqa: B018
    with pytest.raises(KeyError, match="no parameter of the model"):
        g[Param(np.ones(1), "stranger")]
    assert not hasattr(g, "nothing")
    with pytest.raises(KeyError, match="learn_init=True"):
        g["layers.0.init"]


def test_a_shared_parameter_has_one_gradient_under_all_of_its_paths(model, x):
    model.layers[1].W = shared = Param(np.ones((2, 4)))
    model.again = shared
    g = gradient(lambda m: loss(m, x) + m.again.sum(), model)
    assert g.again is g.layers[1].W
    assert len(g) == 6
    alone = gradient(lambda m: loss(m, x), model)
    np.testing.assert_allclose(g.again, alone.again + 1)


def test_results_print_their_shapes(model, x):
    g = gradient(lambda m: loss(m, x), model)
    assert repr(g).startswith("Gradients(layers.0.W: (4, 3), ")
    assert repr(g.layers) == ("Gradients of layers: layers.0.W, layers.0.b, layers.1.W, layers.1.b")


# Arguments.


def test_arrays_and_numbers_get_arrays_and_numbers(x):
    g = gradient(lambda x: (x * x).sum(), x)
    np.testing.assert_array_equal(g, 2 * x)
    assert isinstance(g, np.ndarray)
    for number in (3, 3.0, np.float64(3)):
        g = gradient(lambda a: a**2, number)
        assert g == 6
        assert isinstance(g, np.floating)
    assert isinstance(gradient(lambda a: a * 2.0, np.array(3.0)), np.ndarray)
    assert gradient(lambda a: a * 2.0, np.float32(3)).dtype == np.float32


def test_several_arguments_give_a_tuple(model, x):
    gm, gx, gp, nothing = gradient(
        lambda m, x, p, n: (m(x) * p * n).sum(), model, x, Param(np.array(2.0)), 1
    )
    assert isinstance(gm, Gradients)
    assert gx.shape == x.shape
    assert gp.shape == ()
    assert nothing.shape == ()


def test_what_takes_no_gradient_is_passed_on(x):
    tokens = np.array([0, 2])
    got = gradient(lambda a, i, s: a[i].sum() if s == "rows" else None, x, tokens, "rows")
    np.testing.assert_array_equal(got[0], np.repeat([[1.0], [0.0], [1.0]], 5, axis=1))
    assert got[1:] == (None, None)


def test_lists_tuples_and_dicts_of_arrays_are_gone_through(x):
    class Pair(NamedTuple):
        a: object
        b: object

    def f(data):
        return (data["xs"][0] * data["pair"].a).sum() + (data["xs"][1] * 3.0).sum()

    data = {"xs": [x, 2 * x], "pair": Pair(x + 1, None), "k": np.arange(2)}
    g = gradient(f, data)
    np.testing.assert_array_equal(g["xs"][0], x + 1)
    np.testing.assert_array_equal(g["xs"][1], np.full(x.shape, 3.0))
    np.testing.assert_array_equal(g["pair"].a, x)
    assert g["pair"].b is None
    assert g["k"] is None


def test_the_implicit_style_takes_params_and_a_function_without_arguments(model, x):
    expected = gradient(lambda m: loss(m, x), model)
    g = gradient(lambda: loss(model, x), params(model))
    for p in params(model):
        np.testing.assert_array_equal(g[p], expected[p])


def test_anything_that_holds_parameters_is_a_model(model, x):
    g = gradient(lambda parts: loss(parts["net"], x), {"net": model, "rate": 0.5})
    assert g.net.layers[0].W.shape == (4, 3)

    def closure(x):
        return model(x)

    g = gradient(lambda f: (f(x) ** 2).sum(), closure)
    assert g[model.layers[0].W].any()


def test_a_call_without_arguments_says_what_to_pass():
    with pytest.raises(TypeError, match="pass what to differentiate by"):
        gradient(lambda: 1.0)


# What f returns.


def test_withgradient_returns_the_loss_as_a_number_and_aux_as_arrays(model, x):
    value_, g = withgradient(lambda m: loss(m, x), model)
    assert isinstance(value_, np.float64)
    np.testing.assert_allclose(value_, value(loss(model, x)), rtol=1e-12)

    def with_aux(m):
        y = m(x)
        return (y**2).sum(), {"y": y, "parts": [y[0], 3]}

    (same, aux), g2 = withgradient(with_aux, model)
    assert same == value_
    assert isinstance(aux["y"], np.ndarray)
    assert isinstance(aux["parts"][0], np.ndarray)
    np.testing.assert_array_equal(g.flat, g2.flat)


@pytest.mark.parametrize("result", [None, "loss", [1.0], np.ones(2), (1.0, 2.0, 3.0)])
def test_f_must_return_one_number(result, model):
    for function in (gradient, withgradient):
        with pytest.raises(TapeError, match="expected one number"):
            function(lambda m: result, model)
    assert current() is None


def test_gradient_takes_no_aux_and_withgradient_no_recorded_array(model, x):
    with pytest.raises(TapeError, match="withgradient also takes"):
        gradient(lambda m: (loss(m, x), 1), model)
    with pytest.raises(TapeError, match=r"\(2, 5\), expected one number\..* sum; withgradient"):
        withgradient(lambda m: m(x), model)


def test_a_loss_that_depends_on_nothing_gives_zeros(model, x):
    value_, g = withgradient(lambda m: 1.5, model)
    assert value_ == 1.5
    assert not g.flat.any()
    g = gradient(lambda m: value(loss(m, x)), model)
    assert not g.flat.any()


def test_a_parameter_itself_may_be_the_loss():
    p = Param(np.array([2.0]))
    assert gradient(lambda p: p, p) == 1


def test_an_error_in_f_leaves_no_scope_open_and_writes_nothing(model, x):
    g = gradient(lambda m: loss(m, x), model)
    before = g.flat.copy()

    def failing(m):
        loss(m, x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        gradient(failing, model, into=g)
    assert current() is None
    np.testing.assert_array_equal(g.flat, before)


def test_a_gradient_of_a_gradient_raises(model, x):
    with pytest.raises(TapeError, match="gradients of gradients"):
        gradient(lambda m: gradient(lambda n: loss(n, x), m).flat.sum(), model)


def test_history_is_kept_beyond_the_scope_on_request(model, x):
    held = []

    def first(m):
        held.append(m.layers[0](x))
        return held[0].sum()

    gradient(first, model, keep_history=True)
    g = gradient(lambda m: (held[0] * 2).sum(), model)
    alone = gradient(lambda m: m.layers[0](x).sum(), model)
    np.testing.assert_allclose(g.layers[0].W, 2 * alone.layers[0].W)
    with pytest.raises(GraphUsedError):  # the second scope kept nothing
        gradient(lambda m: held[0].sum(), model)


# Buffers used again.


def test_into_overwrites_every_array_without_reading_it(model, x):
    expected = gradient(lambda m: loss(m, x), model)
    g = gradient(lambda m: loss(m, x), model)
    arrays = g.values()
    g.flat[...] = np.nan
    again = gradient(lambda m: loss(m, x), model, into=g)
    assert again is g
    assert all(a is b for a, b in zip(arrays, g.values(), strict=True))
    np.testing.assert_array_equal(g.flat, expected.flat)


def test_into_with_accumulate_adds(model, x):
    g = gradient(lambda m: loss(m, x[:, :2]), model)
    gradient(lambda m: loss(m, x[:, 2:]), model, into=g, accumulate=True)
    whole = gradient(lambda m: loss(m, x), model)
    np.testing.assert_allclose(g.flat, whole.flat, rtol=1e-12)
    assert not g.unused.W.any()


def test_accumulating_is_reproducible_bit_for_bit(model, x):
    def run():
        g = None
        for i in range(5):
            g = gradient(lambda m, i=i: loss(m, x[:, i]), model, into=g, accumulate=i > 0)
        return g.flat

    np.testing.assert_array_equal(run(), run())


def test_into_serves_every_kind_of_argument(model, x):
    def f(m, x, parts, p, number):
        return loss(m, x) * number + (parts[0] * p).sum()

    args = (model, x, [np.ones(2)], Param(np.ones(2)), 2.0)
    first = gradient(f, *args)
    again = gradient(f, *args, into=first, accumulate=True)
    assert again[0] is first[0]
    assert again[1] is first[1]
    assert again[2][0] is first[2][0]
    assert again[3] is first[3]
    np.testing.assert_allclose(again[2][0], [2, 2])
    np.testing.assert_allclose(again[4], 2 * first[4])


def test_into_that_does_not_fit_is_named_before_f_runs(model, x, rng):
    def never(*_):
        raise AssertionError("f must not run")

    g = gradient(lambda m: loss(m, x), model)
    other = Model(rng)
    other.layers[0].W = Param(np.ones((5, 3)))
    with pytest.raises(ShapeError, match=r"does not fit the model at layers\.0\.W"):
        gradient(never, other, into=g)
    with pytest.raises(ShapeError, match=r"does not fit the model at layers\.0"):
        gradient(never, Model(rng, np.float32), into=g)
    with pytest.raises(ShapeError, match="into is a ndarray"):
        gradient(never, model, into=np.ones(2))
    with pytest.raises(ShapeError, match=r"shape \(2,\), expected \(3, 5\)"):
        gradient(never, x, into=np.ones(2))
    with pytest.raises(ShapeError, match="no result of 2 arguments"):
        gradient(never, x, x, into=x)
    with pytest.raises(ShapeError, match="into holds 1 parts, expected 2"):
        gradient(never, [x, x], into=[x])
    with pytest.raises(TypeError, match="pass it as into="):
        gradient(never, model, accumulate=True)


def test_into_serves_a_copy_of_the_model(model, x):
    g = gradient(lambda m: loss(m, x), model)
    twin = copy.deepcopy(model)
    gradient(lambda m: loss(m, x), twin, into=g)
    assert g[twin.layers[0].W] is g["layers.0.W"]
    with pytest.raises(KeyError):
        g[model.layers[0].W]


# One vector.


def test_all_gradients_lie_in_one_vector(model, x):
    g = gradient(lambda m: loss(m, x), model)
    assert g.flat.shape == (sum(p.size for p in params(model)),)
    np.testing.assert_array_equal(g.flat, np.concatenate([g[path].ravel() for path in g]))
    g.flat *= 2
    twice = gradient(lambda m: 2 * loss(m, x), model)
    np.testing.assert_allclose(g.layers[0].W, twice.layers[0].W, rtol=1e-12)


def test_in_a_copy_too_the_gradients_are_views_of_their_vector(model, x):
    g = gradient(lambda m: loss(m, x), model)
    for twin in (copy.deepcopy(g), pickle.loads(pickle.dumps(g))):
        np.testing.assert_array_equal(twin.flat, g.flat)
        twin.flat[...] = 7
        assert (twin.layers[1].b == 7).all()
        assert not (g.layers[1].b == 7).any()


def test_each_dtype_has_a_vector_of_its_own(model, x, rng):
    model.unused = Layer(2, 2, rng, np.float32)
    g = gradient(lambda m: loss(m, x), model)
    assert [flat.dtype for flat in g.flats] == [np.float64, np.float32]
    assert g.unused.W.dtype == np.float32
    with pytest.raises(StateError, match="2 dtypes"):
        g.flat  # noqa: B018


def test_flat_parameters_move_with_their_vector_and_stay_the_same_objects(model, x):
    weights = params(model)
    before = [p.value.copy() for p in weights]
    versions = [p.version for p in weights]
    (flat,) = flatten_parameters(model)
    assert all(a is b for a, b in zip(params(model), weights, strict=True))
    for p, old, version in zip(weights, before, versions, strict=True):
        np.testing.assert_array_equal(p.value, old)
        assert p.version > version
    g = gradient(lambda m: loss(m, x), model)
    first = value(loss(model, x))
    with flat.writing() as w:
        w -= 0.01 * g.flat
    for p, old in zip(weights, before, strict=True):
        np.testing.assert_allclose(p.value, old - 0.01 * g[p], rtol=1e-12)
    assert value(loss(model, x)) < first  # packed weights are fresh


def test_flattening_again_gives_the_same_vectors(model):
    (flat,) = flatten_parameters(model)
    assert flatten_parameters(model) == [flat]
    (part,) = flatten_parameters(model.layers[0])
    assert part is not flat
    (whole,) = flatten_parameters(model)
    assert whole is not flat
    with pytest.raises(TapeError, match="flattened again"), flat.writing():
        pass


def test_views_of_the_vector_stay_valid_over_save_load_and_writes(model):
    (flat,) = flatten_parameters(model)
    saved = state_dict(model)
    with flat.writing() as w:
        w[...] = 0
    load_state_dict(model, saved)
    np.testing.assert_array_equal(
        flat.array, np.concatenate([p.value.ravel() for p in params(model)])
    )
    model.layers[0].W -= 1
    model.layers[0].b = np.arange(4.0)
    np.testing.assert_array_equal(flat.array[:12], saved["layers.0.W"].ravel() - 1)
    np.testing.assert_array_equal(flat.array[12:16], np.arange(4))


def test_copies_and_casts_of_a_flat_model_stand_on_their_own(model):
    (flat,) = flatten_parameters(model)
    for twin in (copy.deepcopy(model), f64(model)):
        with flat.writing() as w:
            w += 1
        assert (twin.layers[0].W.value != model.layers[0].W.value).all()
        assert twin.layers[0].W.flat_buffer is None


def test_a_write_to_the_vector_between_forward_and_backward_is_noticed(model, x):
    (flat,) = flatten_parameters(model)
    with Tape() as tape:
        y = loss(model, x)
        with flat.writing() as w:
            w += 1
        with pytest.raises(TapeError, match="written since"):
            tape.backward(y)


def test_a_table_laid_out_by_columns_keeps_its_layout_in_the_vector(rng):
    table = Param(rng.standard_normal((3, 4)), order="F")
    before = table.value.copy()
    (flat,) = flatten_parameters([table])
    np.testing.assert_array_equal(table.value, before)
    assert table.value.flags.f_contiguous
    g = gradient(lambda ps: (ps[0] * ps[0]).sum(), [table])
    np.testing.assert_array_equal(g[table], 2 * before)
    np.testing.assert_array_equal(g.flat, 2 * flat.array)


# Buffers on the parameters.


def test_zero_grad_empties_every_buffer_in_place(model, x):
    by_hand(model, x)
    held = model.layers[0].W.grad
    zero_grad(model)
    assert model.layers[0].W.grad is held
    assert not held.any()
    assert model.unused.W.grad is None


# Starting states that take gradient.


class Carrying(Module):
    """h' = W h, started from `init`; h0 is what gets gradient in its place."""

    def __init__(self):
        self.W = Param(np.array([[2.0]]))
        self.init = Param(np.array([3.0]))
        self.reset_inside = False

    def __call__(self):
        from recur.tape import current

        if self.reset_inside:
            return self.W @ self.init
        (h0,) = current().watch_state(self, (self.init.value,), instead_of=(self.init,))
        return self.W @ h0


def test_the_state_that_entered_the_scope_can_get_the_gradient_instead_of_init():
    layer = Carrying()
    g = gradient(lambda m: m().sum(), layer)
    assert g.init is None
    assert dict(g.items())["init"] is None
    np.testing.assert_array_equal(g.state(layer)[0], [2.0])
    np.testing.assert_array_equal(g.W, [[3.0]])
    layer.reset_inside = True
    gradient(lambda m: m().sum(), layer, into=g)
    np.testing.assert_array_equal(g.init, [2.0])
    with pytest.raises(StateError, match='init_grad="scope"'):
        g.state(layer)


@pytest.mark.parametrize(
    "call", [lambda m: gradient(m, lambda m: m(np.ones(2)).sum()), lambda m: gradient(3, m)]
)
def test_gradient_without_a_function_in_front_says_which_comes_first(call):
    with pytest.raises(TypeError, match=r"function comes first: gradient\(f, model\)"):
        call(recur.Dense(2, 3))
