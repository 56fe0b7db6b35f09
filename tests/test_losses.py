"""Losses: values against their formulas, gradients against differences, masks, lists, errors."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from recur import losses, ops
from recur.errors import ShapeError
from recur.losses import (
    binarycrossentropy,
    crossentropy,
    ctc_loss,
    hinge_loss,
    huber,
    kldivergence,
    label_smoothing,
    logitbinarycrossentropy,
    logitcrossentropy,
    mae,
    mse,
    msle,
    poisson_loss,
    squared_hinge_loss,
)
from recur.tape import Param, Tape, Tensor, value


def logistic(x):
    return 1 / (1 + np.exp(-x))


def softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


# name: (loss, the formula of one element, what draws yhat, what draws y)
BY_ELEMENT = {
    "mse": (mse, lambda p, y: (p - y) ** 2, "normal", "normal"),
    "mae": (mae, lambda p, y: abs(p - y), "normal", "normal"),
    "huber": (
        huber,
        lambda p, y: (p - y) ** 2 / 2 if abs(p - y) <= 1 else abs(p - y) - 0.5,
        "normal",
        "normal",
    ),
    "msle": (msle, lambda p, y: math.log(p / y) ** 2, "positive", "positive"),
    "binarycrossentropy": (
        binarycrossentropy,
        lambda p, y: -y * math.log(p) - (1 - y) * math.log(1 - p),
        "unit",
        "unit",
    ),
    "logitbinarycrossentropy": (
        logitbinarycrossentropy,
        lambda p, y: -y * math.log(logistic(p)) - (1 - y) * math.log(1 - logistic(p)),
        "normal",
        "unit",
    ),
    "poisson_loss": (poisson_loss, lambda p, y: p - y * math.log(p), "positive", "positive"),
    "hinge_loss": (hinge_loss, lambda p, y: max(0, 1 - p * y), "normal", "normal"),
    "squared_hinge_loss": (
        squared_hinge_loss,
        lambda p, y: max(0, 1 - p * y) ** 2,
        "normal",
        "normal",
    ),
}

# name: (loss, the formula of one column)
BY_CLASS = {
    "crossentropy": (crossentropy, lambda p, y: -np.sum(y * np.log(p))),
    "logitcrossentropy": (logitcrossentropy, lambda p, y: -np.sum(y * np.log(softmax(p, 0)))),
    "kldivergence": (kldivergence, lambda p, y: np.sum(y * (np.log(y) - np.log(p)))),
}

SHAPES = [(3,), (3, 1), (3, 4), (3, 4, 2), (1, 5, 3)]


def draw(rng, kind, shape, dtype=np.float64):
    if kind == "normal":
        return (2 * rng.standard_normal(shape)).astype(dtype)
    if kind == "positive":
        return rng.uniform(0.2, 3, shape).astype(dtype)
    if kind == "unit":
        return rng.uniform(0.1, 0.9, shape).astype(dtype)
    return softmax(rng.standard_normal(shape), 0).astype(dtype)


def inputs(rng, name, shape, dtype=np.float64):
    if name in BY_CLASS:
        kind = "normal" if name.startswith("logit") else "probabilities"
        return draw(rng, kind, shape, dtype), draw(rng, "probabilities", shape, dtype)
    _, _, yhat, y = BY_ELEMENT[name]
    return draw(rng, yhat, shape, dtype), draw(rng, y, shape, dtype)


def loss_of(name):
    return (BY_ELEMENT.get(name) or BY_CLASS[name])[0]


def entries(name, p, y):
    """The loss entry by entry, from the formulas above, in float64."""
    p, y = p.astype(np.float64), y.astype(np.float64)
    if name in BY_ELEMENT:
        return np.vectorize(BY_ELEMENT[name][1], otypes=[float])(p, y)
    columns = [
        BY_CLASS[name][1](p[(slice(None), *i)], y[(slice(None), *i)])
        for i in np.ndindex(p.shape[1:])
    ]
    return np.array(columns).reshape(p.shape[1:])


def differences(f, x, eps=1e-6):
    """The gradient of f at x, one central difference for each element."""
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += eps
        down[i] -= eps
        gradient[i] = (f(up) - f(down)) / (2 * eps)
    return gradient


def gradients(f, *arrays):
    """The value of f and its gradients by the tape."""
    with Tape() as tape:
        leaves = [tape.watch(a) for a in arrays]
        loss = f(*leaves)
        assert isinstance(loss, Tensor)
        return value(loss), tape.gradient(loss, leaves)


ALL = [*BY_ELEMENT, *BY_CLASS]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ALL)
def test_every_loss_is_the_mean_the_sum_or_the_entries_of_its_formula(name, shape, dtype, rng):
    p, y = inputs(rng, name, shape, dtype)
    loss, expected = loss_of(name), entries(name, p, y)
    tol = {"rtol": 1e-12, "atol": 1e-14} if dtype == np.float64 else {"rtol": 2e-5, "atol": 2e-6}
    np.testing.assert_allclose(loss(p, y), expected.mean(), **tol)
    np.testing.assert_allclose(loss(p, y, agg=sum), expected.sum(), **tol)
    np.testing.assert_allclose(loss(p, y, agg=ops.sum), expected.sum(), **tol)
    np.testing.assert_allclose(loss(p, y, agg=np.mean), expected.mean(), **tol)
    single = loss(p, y, agg=ops.identity)
    assert np.shape(single) == expected.shape
    np.testing.assert_allclose(single, expected, **tol)
    np.testing.assert_allclose(loss(p, y, agg=lambda e: e.max()), expected.max(), **tol)
    assert loss(p, y).dtype == single.dtype == dtype


@pytest.mark.parametrize("agg", [ops.mean, ops.sum, ops.identity], ids=lambda f: f.__name__)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("name", ALL)
def test_gradients_flow_into_prediction_and_target_as_differences_say(name, masked, agg, rng):
    p, y = inputs(rng, name, (3, 4, 2))
    mask = rng.random((4, 2)) < 0.6 if masked else None
    weights = rng.standard_normal(entries(name, p, y).shape)

    def f(p, y):
        loss = loss_of(name)(p, y, agg=agg, mask=mask)
        return ops.sum(loss * weights) if agg is ops.identity else loss * 0.7

    loss, (dp, dy) = gradients(f, p, y)
    np.testing.assert_allclose(loss, f(p, y), rtol=1e-13)
    np.testing.assert_allclose(dp, differences(lambda p: f(p, y), p), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(dy, differences(lambda y: f(p, y), y), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dims", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("name", BY_CLASS)
def test_classes_may_lie_on_any_axis(name, masked, dims, rng):
    p, y = inputs(rng, name, (4, 3, 2))
    mask = rng.random((3, 2)) < 0.6 if masked else None
    expected, (dp, dy) = gradients(lambda p, y: loss_of(name)(p, y, mask=mask), p, y)
    turned, (tp, ty) = gradients(
        lambda p, y: loss_of(name)(p, y, dims=dims, mask=mask),
        np.moveaxis(p, 0, dims),
        np.moveaxis(y, 0, dims),
    )
    np.testing.assert_allclose(turned, expected, rtol=1e-14)
    np.testing.assert_array_equal(np.moveaxis(tp, dims, 0), dp)
    np.testing.assert_array_equal(np.moveaxis(ty, dims, 0), dy)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BY_CLASS)
def test_integer_classes_equal_their_one_hot_columns(name, shape, kind, dtype, rng):
    p, _ = inputs(rng, name, shape, dtype)
    classes = rng.integers(0, shape[0], shape[1:])
    onehot = np.moveaxis(np.eye(shape[0], dtype=bool)[classes], -1, 0)
    loss = loss_of(name)
    for agg in ops.mean, ops.sum:
        one, (d_one,) = gradients(lambda p, agg=agg: loss(p, classes.astype(kind), agg=agg), p)
        two, (d_two,) = gradients(lambda p, agg=agg: loss(p, onehot, agg=agg), p)
        np.testing.assert_allclose(one, two, rtol=1e-6)
        np.testing.assert_allclose(d_one, d_two, rtol=1e-5, atol=1e-7)
        assert d_one.dtype == dtype


@pytest.mark.parametrize("name", ALL)
def test_padded_steps_change_neither_value_nor_gradient_whatever_they_hold(name, dtype, rng):
    p, y = inputs(rng, name, (3, 4, 5), dtype)
    lengths = np.array([5, 3, 1, 0])
    mask = np.arange(5) < lengths[:, None]
    loss = loss_of(name)
    real = [(p[:, b, :n], y[:, b, :n]) for b, n in enumerate(lengths)]
    flat_p, flat_y = (np.concatenate(parts, axis=1) for parts in zip(*real, strict=True))
    p[:, ~mask] = np.nan
    y[:, ~mask] = np.inf
    for agg in ops.mean, ops.sum:
        np.testing.assert_allclose(
            loss(p, y, mask=mask, agg=agg), loss(flat_p, flat_y, agg=agg), rtol=2e-6
        )
        _, (dp, dy) = gradients(lambda p, y, agg=agg: loss(p, y, mask=mask, agg=agg), p, y)
        np.testing.assert_array_equal(dp[:, ~mask], 0)
        np.testing.assert_array_equal(dy[:, ~mask], 0)
        assert np.isfinite(dp).all()
    single = loss(p, y, mask=mask, agg=ops.identity)
    np.testing.assert_array_equal(single[..., ~mask], 0)
    assert np.isfinite(single).all()


def test_padding_of_integer_classes_may_be_any_number(rng):
    p = rng.standard_normal((3, 2, 4))
    classes = np.array([[0, 1, 2, -1], [2, 99, -1, -1]])
    mask = np.array([[True, True, True, False], [True, False, False, False]])
    expected = [-np.log(softmax(p[:, b, t], 0)[classes[b, t]]) for b, t in np.argwhere(mask)]
    np.testing.assert_allclose(logitcrossentropy(p, classes, mask=mask), np.mean(expected))
    np.testing.assert_allclose(
        crossentropy(softmax(p, 0), classes, mask=mask, eps=0), np.mean(expected)
    )


def test_a_mask_that_lets_nothing_through_gives_a_loss_and_a_gradient_of_zero():
    for loss in mse, logitcrossentropy:
        total, (dp,) = gradients(
            lambda p, loss=loss: loss(p, np.ones((3, 2)), mask=np.zeros(2, bool)), np.ones((3, 2))
        )
        assert total == 0
        np.testing.assert_array_equal(dp, np.zeros((3, 2)))


def test_a_sequence_of_no_steps_has_loss_zero():
    assert mse(np.zeros((3, 2, 0)), np.zeros((3, 2, 0))) == 0
    assert logitcrossentropy(np.zeros((3, 2, 0)), np.zeros((2, 0), np.int64)) == 0
    assert ctc_loss(np.zeros((3, 0)), []) == 0


def test_elements_may_be_masked_one_by_one(rng):
    p, y = rng.standard_normal((2, 3, 4))
    mask = rng.random((3, 4)) < 0.5
    expected = ((p - y) ** 2)[mask].mean()
    total, (dp,) = gradients(lambda p: mse(p, y, mask=mask), p)
    np.testing.assert_allclose(total, expected)
    np.testing.assert_allclose(dp, 2 * (p - y) * mask / mask.sum())


@pytest.mark.parametrize("name", ALL)
def test_lists_of_steps_equal_the_array_with_time_last(name, rng):
    p, y = inputs(rng, name, (3, 4, 5))
    mask = rng.random((4, 5)) < 0.7
    loss = loss_of(name)

    def steps(a):
        return [a[..., t] for t in range(a.shape[-1])]

    for m in None, mask:
        whole, (dp, dy) = gradients(lambda p, y, m=m: loss(p, y, mask=m), p, y)
        listed_mask = None if m is None else steps(m)
        listed, grads = gradients(
            lambda *leaves, m=listed_mask: loss(list(leaves[:5]), leaves[5:], mask=m),
            *steps(p),
            *steps(y),
        )
        np.testing.assert_allclose(listed, whole, rtol=1e-14)
        np.testing.assert_allclose(np.stack(grads[:5], -1), dp, rtol=1e-14)
        np.testing.assert_allclose(np.stack(grads[5:], -1), dy, rtol=1e-14)
        np.testing.assert_allclose(loss(steps(p), y, mask=m), whole, rtol=1e-14)
        np.testing.assert_allclose(loss(p, steps(y), mask=m), whole, rtol=1e-14)


def test_lists_of_unbatched_steps_and_of_numbers_are_sequences_too():
    steps = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    assert mse(steps, [np.zeros(2), np.zeros(2)]) == 7.5
    assert mse(steps, np.zeros((2, 2)), mask=np.array([True, False])) == 2.5
    assert mse([1.0, 2.0], [1, 4]) == 2.0
    assert logitcrossentropy(steps, [0, 1], agg=sum) == logitcrossentropy(
        np.stack(steps, -1), np.array([0, 1]), agg=sum
    )


def test_a_plain_number_is_a_target_for_every_element():
    assert mse(np.array([1.0, 3.0]), 2) == 1
    assert mse(3.0, 1.0) == 4
    assert np.shape(mse(3.0, 1.0, agg=ops.identity)) == ()
    total, (dp,) = gradients(lambda p: mse(p, 1.0), np.array(3.0))
    assert (total, dp) == (4, 4)


def test_a_target_is_converted_to_the_predictions_dtype(rng):
    p = rng.standard_normal((3, 2)).astype(np.float32)
    y = rng.standard_normal((3, 2))
    assert mse(p, y).dtype == np.float32
    assert mse(p.astype(np.float64), y.astype(np.float32)).dtype == np.float64
    assert mse(np.array([1, 2]), np.array([1, 4])) == 2.0
    assert mae(np.array([True]), np.array([0.25], np.float32)).dtype == np.float32


@pytest.mark.parametrize("name", ALL)
def test_results_do_not_depend_on_memory_layout(name, rng):
    p, y = inputs(rng, name, (3, 4, 5))
    mask = rng.random((4, 5)) < 0.7
    wide = np.zeros((6, 8, 10))
    wide[::2, ::2, ::2] = p
    loss = loss_of(name)
    for m in None, mask:
        expected, (d,) = gradients(lambda p, m=m: loss(p, y, mask=m), p)
        for other in np.asfortranarray(p), wide[::2, ::2, ::2]:
            total, (dp,) = gradients(lambda p, m=m: loss(p, y, mask=m), other)
            np.testing.assert_allclose(total, expected, rtol=1e-14)
            np.testing.assert_array_equal(dp, d)


def test_a_gradient_has_features_next_to_each_other_where_the_prediction_has(rng):
    p = rng.standard_normal((5, 4, 3)).T
    for loss, y in (mse, np.zeros((3, 4, 5))), (logitcrossentropy, np.zeros((4, 5), np.int64)):
        for mask in None, np.ones((4, 5), bool):
            with Tape() as tape:
                x = tape.watch(p)
                (dp,) = tape.gradient(loss(x, y, mask=mask), [x])
            assert dp.T.flags.c_contiguous


def test_writing_into_the_target_before_backward_changes_nothing(rng):
    p, y = rng.standard_normal((2, 3, 4))
    with Tape() as tape:
        x = tape.watch(p)
        loss = mse(x, y)
        expected = 2 * (p - y) / p.size
        y[...] = 100
        (dp,) = tape.gradient(loss, [x])
    np.testing.assert_allclose(dp, expected)


def test_a_kept_graph_may_be_swept_twice(rng):
    p, y = rng.standard_normal((2, 3, 4))
    with Tape() as tape:
        x = tape.watch(p)
        loss = huber(x, y, agg=sum)
        (first,) = tape.gradient(loss, [x], keep_graph=True)
        (second,) = tape.gradient(loss, [x])
    np.testing.assert_array_equal(first, second)


def test_one_loss_is_one_node_and_outside_a_scope_none(rng):
    p = Param(rng.standard_normal((3, 4)))
    assert isinstance(mse(p, np.zeros((3, 4))), np.floating)
    with Tape() as tape:
        losses_held = [logitcrossentropy(p, np.zeros(4, int)), mse(p, np.zeros((3, 4)))]
        assert tape.live == 2
        assert isinstance(mse(p.value, p.value), np.floating)
        tape.backward(losses_held[0] + losses_held[1])
    assert p.grad.shape == (3, 4)


def test_a_parameter_may_be_the_target(rng):
    p = Param(rng.standard_normal(3))
    with Tape() as tape:
        tape.backward(mse(np.zeros(3), p))
    np.testing.assert_allclose(p.grad, 2 * p.value / 3)


def test_logit_losses_stay_finite_where_the_others_overflow():
    far = np.array([[1000.0], [-1000.0]])
    assert logitcrossentropy(far, np.array([1])) == 2000
    assert logitcrossentropy(far, np.array([0])) == 0
    np.testing.assert_array_equal(
        logitbinarycrossentropy(far, np.array([[0.0], [1.0]]), agg=ops.identity), [[1000], [1000]]
    )


def test_a_zero_target_makes_its_term_zero_even_at_a_prediction_of_zero():
    p = np.array([[0.0], [1.0]])
    assert crossentropy(p, np.array([[0.0], [1.0]]), eps=0) == 0
    assert binarycrossentropy(p, p, eps=0) == 0
    assert kldivergence(p, p, eps=0) == 0
    _, (dp,) = gradients(lambda p: crossentropy(p, np.array([[0.0], [1.0]]), eps=0), p)
    np.testing.assert_array_equal(dp, [[0], [-1]])


def test_eps_is_the_rounding_unit_of_the_dtype_unless_given(dtype):
    p, y = np.zeros((2, 1), dtype), np.array([[1.0], [0.0]], dtype)
    np.testing.assert_allclose(crossentropy(p, y), -np.log(np.finfo(dtype).eps), rtol=1e-6)
    np.testing.assert_allclose(crossentropy(p, y, eps=0.5), np.log(2), rtol=1e-6)
    np.testing.assert_allclose(msle(p, y, eps=1, agg=sum), np.log(2) ** 2, rtol=1e-6)


def test_huber_turns_from_square_to_line_at_delta():
    d = np.array([0.5, 2.0, 3.0, -3.0])
    expected = [0.125, 2.0, 4.0, 4.0]
    np.testing.assert_allclose(huber(d, 0, delta=2, agg=ops.identity), expected)
    assert losses.huber_loss is huber


def test_label_smoothing_moves_confidence_to_the_other_classes():
    y = np.array([[True, False], [False, False], [False, True], [False, False]])
    np.testing.assert_allclose(label_smoothing(y, 0.2)[:, 0], [0.85, 0.05, 0.05, 0.05], rtol=1e-6)
    np.testing.assert_allclose(label_smoothing(np.array([1.0, 0.0]), 0.2, dims=None), [0.9, 0.1])
    listed = label_smoothing([y[:, 0], y[:, 1]], 0.2)
    np.testing.assert_array_equal(listed, label_smoothing(y, 0.2))
    for alpha in (0, 1, -0.1):
        with pytest.raises(ValueError, match="alpha"):
            label_smoothing(y, alpha)


# Numbers of Flux's documentation of its losses.


def test_values_that_flux_prints():
    np.testing.assert_allclose(mae(np.array([1.1, 1.9, 3.1]), np.array([1, 2, 3])), 0.1)
    np.testing.assert_allclose(mse(np.array([1.1, 1.9, 3.1]), np.array([1, 2, 3])), 0.01)
    np.testing.assert_allclose(
        msle(np.array([1.1, 2.2, 3.3], np.float32), np.array([1, 2, 3])), 0.009084041, rtol=1e-5
    )
    logits = np.concatenate([np.arange(-9, 1), np.arange(10), [7.5]]).reshape(7, 3).T
    labels = np.array([0, 1, 2, 0, 1, 0, 0])
    np.testing.assert_allclose(logitcrossentropy(logits, labels), 1.5791205, rtol=1e-6)
    np.testing.assert_allclose(
        logitbinarycrossentropy(np.array([2, -1, np.pi]), np.array([True, False, True])),
        0.160832,
        rtol=1e-5,
    )
    half, sure = np.full((2, 2), 0.5), np.eye(2)
    np.testing.assert_allclose(kldivergence(half, sure), np.log(2))


# Errors.


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(4,), (1, 4), (3, 1), (3, 4, 1), (4, 3)])
def test_a_target_of_another_shape_is_never_broadcast(name, shape):
    with pytest.raises(ShapeError, match=rf"{name}: y has shape .*expected \(3, 4\)"):
        loss_of(name)(np.ones((3, 4)), np.ones(shape))


def test_a_target_without_its_feature_axis_is_told_how_to_get_one():
    with pytest.raises(ShapeError, match=r"y\[None\]"):
        mse(np.ones((1, 4)), np.ones(4))


def test_integer_classes_of_another_shape_are_told_theirs():
    with pytest.raises(ShapeError, match=r"Integer classes have shape \(4,\)"):
        logitcrossentropy(np.ones((3, 4)), np.zeros(5, int))


@pytest.mark.parametrize("wrong", [-1, 3])
def test_a_class_that_does_not_exist_is_named_with_its_place(wrong):
    y = np.array([[0, 1, 2, 0], [0, 0, wrong, 0]])
    with pytest.raises(IndexError, match=rf"class {wrong} at \(1, 2\), expected 0 to 2"):
        logitcrossentropy(np.ones((3, 2, 4)), y)
    with pytest.raises(IndexError, match="mask="):
        crossentropy(np.ones((3, 2, 4)), y)


def test_an_axis_that_does_not_exist_is_an_error():
    with pytest.raises(ShapeError, match="no axis 2"):
        logitcrossentropy(np.ones((3, 4)), np.zeros(4, int), dims=2)


@pytest.mark.parametrize("loss", [mse, logitcrossentropy])
def test_a_mask_of_another_shape_or_kind_is_an_error(loss):
    p = np.ones((3, 4, 5))
    with pytest.raises(ShapeError, match=r"mask has shape \(5, 4\), expected \(4, 5\)"):
        loss(p, p, mask=np.ones((5, 4), bool))
    with pytest.raises(TypeError, match="expected bool"):
        loss(p, p, mask=np.ones((4, 5)))


def test_steps_of_different_shapes_are_an_error_that_names_the_step():
    with pytest.raises(ShapeError, match=r"step 1 of the list has shape \(3, 2\)"):
        mse([np.ones((3, 4)), np.ones((3, 2))], np.ones((3, 4, 2)))
    with pytest.raises(ShapeError, match="empty list"):
        mse([], [])


# Connectionist temporal classification.


def spelt(path, blank):
    """What an alignment spells: runs count once, blanks not at all."""
    runs = [c for i, c in enumerate(path) if i == 0 or c != path[i - 1]]
    return [c for c in runs if c != blank]


def ctc_by_enumeration(logits, labels, blank):
    """-log of the summed probability of every alignment (C^T of them)."""
    p = softmax(logits, 0)
    total = 0.0
    for path in itertools.product(range(len(p)), repeat=p.shape[1]):
        if spelt(path, blank) == list(labels):
            total += np.prod([p[c, t] for t, c in enumerate(path)])
    return -np.log(total)


@pytest.mark.parametrize("labels", [[], [0], [1, 0], [0, 0], [1, 1, 0], [0, 1, 0]])
@pytest.mark.parametrize("blank", [None, 0, 1])
def test_ctc_sums_over_every_alignment(labels, blank, dtype, rng):
    logits = rng.standard_normal((3, 5)).astype(dtype)
    b = 2 if blank is None else blank
    labels = [label + (b <= label) for label in labels]
    rtol = 1e-12 if dtype == np.float64 else 1e-5
    expected = ctc_by_enumeration(logits.astype(np.float64), labels, b)
    loss = ctc_loss(logits, labels, blank=blank)
    np.testing.assert_allclose(loss, expected, rtol=rtol)
    assert loss.dtype == dtype
    np.testing.assert_allclose(ctc_loss(logits, labels, blank=b - 3), expected, rtol=rtol)


def test_the_gradient_of_ctc_is_what_differences_say(rng):
    logits = rng.standard_normal((4, 3, 6))
    labels = [[0, 0, 2], [], [1, 2]]
    mask = np.arange(6) < np.array([[6], [2], [3]])
    logits[:, ~mask] = 7.0
    for agg in (ops.mean, sum, lambda e: e[0] - 3 * e[2]):

        def f(x, agg=agg):
            return ctc_loss(x, labels, mask=mask, agg=agg)

        loss, (d,) = gradients(f, logits)
        np.testing.assert_allclose(loss, f(logits))
        np.testing.assert_allclose(d, differences(f, logits), rtol=1e-6, atol=1e-8)
        np.testing.assert_array_equal(d[:, ~mask], 0)
        logits[:, ~mask] = np.nan
        np.testing.assert_array_equal(gradients(f, logits)[1][0], d)
        logits[:, ~mask] = 7.0


def test_each_sample_of_a_ctc_batch_is_its_own_sequence(rng):
    logits = rng.standard_normal((5, 2, 7))
    labels = [[0, 3], [1, 1, 2]]
    mask = np.arange(7) < np.array([[4], [7]])
    entries_of_batch = ctc_loss(logits, labels, mask=mask, agg=ops.identity)
    one, (d,) = gradients(lambda x: ctc_loss(x, labels[0]), logits[:, 0, :4])
    np.testing.assert_allclose(entries_of_batch, [one, ctc_loss(logits[:, 1], labels[1])])
    _, (whole,) = gradients(lambda x: ctc_loss(x, labels, mask=mask, agg=sum), logits)
    np.testing.assert_allclose(whole[:, 0, :4], d)
    steps = [logits[:, :, t] for t in range(7)]
    np.testing.assert_allclose(ctc_loss(steps, labels, mask=mask), entries_of_batch.mean())


def test_ctc_stays_finite_over_long_sequences(dtype, rng):
    logits = (5 * rng.standard_normal((3, 1000))).astype(dtype)
    loss, (d,) = gradients(lambda x: ctc_loss(x, [0, 1] * 100), logits)
    assert np.isfinite(loss) and np.isfinite(d).all()
    np.testing.assert_allclose(d.sum(0), 0, atol=1e-2 if dtype == np.float32 else 1e-9)


@pytest.mark.parametrize(
    ("shape", "labels", "options", "error", "words"),
    [
        ((3,), [0], {}, ShapeError, r"expected \(C, T\)"),
        ((3, 2), [0, 0], {}, ShapeError, "has 2 steps, its 2 labels need at least 3"),
        ((3, 2), [2], {}, IndexError, "label 2, expected 0 to 2 and not the blank 2"),
        ((3, 2), [-1], {}, IndexError, "label -1"),
        ((3, 2), [0], {"blank": 3}, IndexError, "blank is 3"),
        ((3, 2, 4), [[0]], {}, ShapeError, "labels of 1 samples, expected 2"),
        ((3, 1, 4), [[[0]]], {}, ShapeError, "y of sample 0"),
        ((3, 4), [0], {"mask": np.ones(3, bool)}, ShapeError, "mask has shape"),
        ((3, 4), [0], {"mask": np.ones(4)}, TypeError, "expected bool"),
        ((3, 3), [0], {"mask": np.array([True, False, True])}, ShapeError, "gaps"),
    ],
)
def test_ctc_names_what_cannot_be_aligned(shape, labels, options, error, words):
    with pytest.raises(error, match=words):
        ctc_loss(np.zeros(shape), labels, **options)
