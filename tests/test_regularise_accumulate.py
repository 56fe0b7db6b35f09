"""Parts of a batch, accumulated, are one large batch: sums, means, uneven parts, masked steps."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import recur
from recur import Adam, Chain, ClipNorm, Dense, OptimiserChain, Tape, setup, train, update
from recur.losses import mse

B, T = 10, 6
PARTS = [slice(0, 4), slice(4, 8), slice(8, 10)]  # the last one is smaller


def model(dtype, rng):
    return Chain(recur.LSTM(3, 5, dtype=dtype, rng=rng), Dense(5, 2, dtype=dtype, rng=rng))


def batch(dtype, rng):
    X = rng.normal(size=(3, B, T)).astype(dtype)
    Y = rng.normal(size=(2, B, T)).astype(dtype)
    lengths = rng.integers(1, T + 1, B)
    return X, Y, np.arange(T) < lengths[:, None]


def cut(data, part):
    X, Y, mask = data
    return X[:, part], Y[:, part], mask[part]


def summed(m, X, Y, mask):
    return mse(m(X), Y, agg=recur.ops.sum)


def mean(m, X, Y, mask):
    return mse(m(X), Y), X.shape[1]


def masked(m, X, Y, mask):
    return mse(m(X, mask=mask), Y, mask=mask), int(mask.sum())


LOSSES = {"sums": (summed, "sum"), "means": (mean, "mean"), "masked means": (masked, "mean")}
every_loss = pytest.mark.parametrize("kind", LOSSES)


@every_loss
@pytest.mark.parametrize("flat", [False, True])
def test_train_accumulates_parts_into_the_update_of_one_large_batch(kind, flat, dtype, rng):
    loss, combine = LOSSES[kind]
    data = batch(dtype, rng)
    large = model(dtype, rng)
    small = copy.deepcopy(large)
    if flat:
        recur.flatten_parameters(small)
    found = []
    for m, batches, k in ((large, [data], 1), (small, [cut(data, p) for p in PARTS], 3)):
        opt = setup(OptimiserChain(ClipNorm(0.5), Adam(0.05)), m)
        found.append(
            train(
                loss,
                m,
                batches,
                opt,
                epochs=3,
                accumulate=k,
                combine=combine,
                reset="batch",
                progress=False,
            ).losses
        )
    tolerance = {"rtol": 1e-10} if dtype == np.float64 else {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(*found, **tolerance)
    for p, q in zip(recur.params(large), recur.params(small), strict=True):
        np.testing.assert_allclose(p.value, q.value, **tolerance)


@every_loss
def test_the_last_update_of_an_epoch_weighs_what_is_left(kind, rng):
    loss, combine = LOSSES[kind]
    data = batch(np.float64, rng)
    m = model(np.float64, rng)
    by_hand = copy.deepcopy(m)
    options = {"progress": False, "reset": "batch", "combine": combine}
    parts = [cut(data, p) for p in PARTS]
    train(loss, m, parts, setup(Adam(0.05), m), accumulate=2, **options)
    opt = setup(Adam(0.05), by_hand)
    train(loss, by_hand, [cut(data, slice(0, 8))], opt, **options)
    train(loss, by_hand, parts[2:], opt, **options)
    for p, q in zip(recur.params(m), recur.params(by_hand), strict=True):
        np.testing.assert_allclose(p.value, q.value, rtol=1e-9)


def test_equal_weights_are_the_plain_mean_of_the_losses(rng):
    data = [cut(batch(np.float64, rng), p) for p in PARTS]
    m = model(np.float64, rng)
    twin = copy.deepcopy(m)
    options = {"accumulate": 3, "reset": "batch", "progress": False}
    a = train(lambda m, X, Y, mask: mse(m(X), Y), m, data, setup(Adam(), m), **options)
    b = train(lambda m, X, Y, mask: (mse(m(X), Y), 7), twin, data, setup(Adam(), twin), **options)
    np.testing.assert_allclose(a.losses, b.losses, rtol=1e-12)
    want = np.mean([float(mse(recur.reset(copy.deepcopy(m))(X), Y)) for X, Y, _ in data])
    assert a.losses[0] != want  # m has moved
    for p, q in zip(recur.params(m), recur.params(twin), strict=True):
        np.testing.assert_allclose(p.value, q.value, rtol=1e-9)


def test_validation_batches_weigh_what_their_loss_says(rng):
    data = batch(np.float64, rng)
    m = model(np.float64, rng)
    history = train(
        masked,
        m,
        [data],
        setup(Adam(0.0), m),
        validation=[cut(data, p) for p in PARTS],
        reset="batch",
        progress=False,
    )
    recur.reset(m)
    want = mse(m(data[0], mask=data[2]), data[1], mask=data[2])
    np.testing.assert_allclose(history.validations[0][1], float(want), rtol=1e-12)


def test_train_refuses_weights_and_combinations_that_make_no_sense(rng):
    data, m = [batch(np.float64, rng)], model(np.float64, rng)
    with pytest.raises(ValueError, match=r"combine='max', expected \"mean\" or \"sum\""):
        train(summed, m, data, setup(Adam(), m), combine="max", progress=False)
    before = recur.state_dict(m)
    with pytest.raises(ValueError, match="came with weight 0"):
        train(lambda m, *b: (summed(m, *b), 0), m, data, setup(Adam(), m), progress=False)
    for path, p in recur.named_params(m).items():
        np.testing.assert_array_equal(p.value, before[path])


# ---------------------------------------------------------------------- by hand, at every level


@every_loss
def test_gradient_into_accumulates_parts(kind, dtype, rng):
    loss, combine = LOSSES[kind]
    data = batch(dtype, rng)
    m = model(dtype, rng)

    def cost(m, part):
        found = loss(recur.reset(m), *cut(data, part))
        return found if combine == "sum" else found[0] * found[1]

    grads = recur.gradient(lambda m: cost(m, slice(None)), m)
    parts = recur.gradient(lambda m: cost(m, PARTS[0]), m)
    for part in PARTS[1:]:
        assert (
            recur.gradient(lambda m, part=part: cost(m, part), m, into=parts, accumulate=True)
            is parts
        )
    np.testing.assert_allclose(parts.flat, grads.flat, rtol=1e-3, atol=1e-4)
    parts.flat[...] = np.nan  # overwriting never reads
    recur.gradient(lambda m: cost(m, slice(None)), m, into=parts)
    np.testing.assert_array_equal(parts.flat, grads.flat)


def test_backward_accumulates_parts_the_same_in_every_run(dtype, rng):
    data, m = batch(dtype, rng), model(dtype, rng)
    runs = []
    for _ in range(2):
        with Tape() as tape:
            for i, part in enumerate(PARTS):
                tape.backward(summed(recur.reset(m), *cut(data, part)), accumulate=i > 0)
        runs.append([p.grad.copy() for p in recur.params(m)])
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)
    with Tape() as tape:
        tape.backward(summed(recur.reset(m), *data), accumulate=False)
    for a, p in zip(runs[0], recur.params(m), strict=True):
        np.testing.assert_allclose(a, p.grad, rtol=1e-3, atol=1e-4)


def test_flat_views_stay_valid_over_save_load_freeze_and_weight_dropping(rng, tmp_path):
    m = Chain(
        recur.WeightDrop(recur.LSTM(3, 5, dtype=np.float64, rng=rng), "Wh", 0.5),
        Dense(5, 2, dtype=np.float64, rng=rng),
    )
    (flat,) = recur.flatten_parameters(m)
    saved = recur.state_dict(m)
    recur.load_state_dict(m, saved)
    opt = setup(Adam(0.1), m)
    recur.freeze(opt, m[1])
    data = batch(np.float64, rng)
    frozen = m[1].weight.value.copy()
    for _ in range(2):
        update(opt, m, recur.gradient(lambda m: summed(recur.reset(m), *data), m))
    m[0].remove()
    recur.save(m[0].layer, tmp_path / "m.safetensors")
    np.testing.assert_array_equal(m[1].weight.value, frozen)
    joined = np.concatenate([p.value.ravel(p.order) for p in recur.params(m)])
    np.testing.assert_array_equal(flat.array, joined)
    with flat.writing() as w:
        w[...] = 0
    assert not any(p.value.any() for p in recur.params(m))
    assert recur.flatten_parameters(m) == [flat]
