"""Locked and embedding dropout, tied weights, activity penalties."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import recur
from recur import (
    Chain,
    EmbeddingDropout,
    LockedDropout,
    Tape,
    TiedDense,
    activity_penalty,
    ops,
    resample,
    temporal_activity_penalty,
)
from recur.inspect import gradcheck

F, B, T, V = 6, 3, 4, 9


def sequence(rng, dtype=np.float64):
    """(F, B, T), features first in memory."""
    return rng.normal(size=(T, B, F)).astype(dtype).T


# ---------------------------------------------------------------------- locked dropout


def test_one_mask_serves_all_steps_of_a_window(dtype, rng):
    layer = LockedDropout(0.5, rng=rng)
    X = sequence(rng, dtype)
    with Tape():
        Y = recur.value(layer(X))
        mask = Y[:, :, 0] / X[:, :, 0]
        np.testing.assert_allclose(Y, X * mask[:, :, None], rtol=1e-6)
        assert set(np.round(np.unique(mask), 6)) == {0.0, 2.0}
        assert Y.dtype == dtype and Y.T.flags.c_contiguous
        steps = [recur.value(layer(X[:, :, t])) for t in range(T)]
        np.testing.assert_array_equal(np.stack(steps, -1), Y)
        np.testing.assert_array_equal(
            np.stack(recur.value(layer(list(np.moveaxis(X, 2, 0)))), -1), Y
        )
    with Tape():
        assert not np.array_equal(recur.value(layer(X)), Y)


def test_stepping_equals_the_sequence_from_the_same_generator(dtype, rng):
    layer = LockedDropout(0.4, rng=rng)
    other = copy.deepcopy(layer)
    X = sequence(rng, dtype)
    with Tape():
        Y = recur.value(layer(X))
    with Tape():
        steps = [recur.value(other(X[:, :, t])) for t in range(T)]
    np.testing.assert_array_equal(np.stack(steps, -1), Y)


def test_locked_masks_survive_truncate_and_end_with_reset_and_resample(rng):
    layer = LockedDropout(0.5, rng=rng)
    model = Chain(layer, recur.GRU(F, 2))
    x = np.ones((F, B), np.float32)
    model(x)
    with Tape():
        first = layer(x)
        recur.truncate(model)
        np.testing.assert_array_equal(layer(x), first)
        recur.reset(model, mask=np.array([True, False, False]))
        np.testing.assert_array_equal(layer(x), first)
        recur.reset(model)
        second = layer(x)
        assert not np.array_equal(second, first)
        resample(model)
        assert not np.array_equal(layer(x), second)


def test_inputs_of_two_sizes_have_two_masks(rng):
    layer = LockedDropout(0.5, rng=rng)
    with Tape():
        a, b = layer(np.ones((F, B))), layer(np.ones((F, 2)))
        np.testing.assert_array_equal(layer(np.ones((F, B))), a)
        np.testing.assert_array_equal(layer(np.ones((F, 2))), b)
        assert layer(np.ones(F)).shape == (F,)


def test_locked_dropout_keeps_the_mean(rng):
    layer = LockedDropout(0.3, rng=rng)
    with Tape():
        y = layer(np.ones((400, 400)))
    assert abs(np.mean(recur.value(y)) - 1) < 0.01


def test_gradients_of_locked_dropout_agree_with_difference_quotients(rng):
    model = Chain(
        LockedDropout(0.5, rng=rng),
        recur.LSTM(F, 2, dtype=np.float64, rng=rng),
        LockedDropout(0.2, rng=rng),
    )
    gradcheck(lambda m, X: m(X), model, sequence(rng))


def test_inactive_or_with_p_of_zero_it_is_the_identity(rng):
    x = np.ones((F, B))
    layer = LockedDropout(0.5, rng=rng)
    assert layer(x) is x
    recur.testmode(layer)
    with Tape():
        assert layer(x) is x
    never = LockedDropout(0.0, rng=rng)
    before = never.generator.bit_generator.state
    with Tape():
        assert never(x) is x
    assert never.generator.bit_generator.state == before
    assert not recur.trainmode(LockedDropout(1.0))(x).any()


def test_a_call_that_fails_later_in_a_chain_draws_nothing(rng):
    layer = LockedDropout(0.5, rng=rng)
    model = Chain(layer, recur.Dense(F + 1, 2))
    before = layer.generator.bit_generator.state
    with Tape():
        with pytest.raises(recur.ShapeError):
            model(np.ones((F, B)))
        assert layer.generator.bit_generator.state == before
        assert list(layer.held_masks()) == ["scope"]


def test_sliding_windows_keep_one_locked_mask(rng):
    model = Chain(LockedDropout(0.5, rng=rng), recur.RNN(F, 2, dtype=np.float64, rng=rng))
    X = sequence(rng)
    twin = copy.deepcopy(model)
    losses = [L for L, _ in recur.tbptt(model, X, lambda ys, t: (ys**2).sum(), k1=1, k2=3)]
    with Tape():
        ys = [recur.value(twin(X[:, :, t])) for t in range(T)]
    np.testing.assert_allclose(losses, [(y**2).sum() for y in ys], rtol=1e-12)


def test_locked_dropout_refuses_what_makes_no_sense(rng):
    with pytest.raises(ValueError, match="LockedDropout: p is 2, expected a probability"):
        LockedDropout(2)
    with Tape(), pytest.raises(recur.ShapeError, match=r"LockedDropout\(0\.5\): x has shape"):
        LockedDropout(0.5)(np.ones((2, 2, 2, 2)))


# ---------------------------------------------------------------------- embedding dropout


def test_whole_words_are_dropped_wherever_they_stand(dtype, rng):
    embedding = recur.Embedding(V, F, dtype=dtype, rng=rng)
    layer = EmbeddingDropout(embedding, 0.5, rng=rng)
    x = rng.integers(0, V, (B, T))
    with Tape():
        Y = recur.value(layer(x))
        kept = np.array([np.any(recur.value(layer(np.array(word)))) for word in range(V)])
    assert kept.any() and not kept.all()
    table = embedding.weight.value * kept * 2
    np.testing.assert_allclose(Y, table[:, x], rtol=1e-6)
    assert Y.dtype == dtype
    np.testing.assert_array_equal(layer(x), embedding(x))


def test_one_hot_columns_are_dropped_like_their_indices(dtype, rng):
    layer = EmbeddingDropout(recur.Embedding(V, F, dtype=dtype, rng=rng), 0.5, rng=rng)
    x = rng.integers(0, V, (B, T))
    with Tape():
        Y, Z = layer(x), layer(recur.onehotbatch(x, range(V)))
        np.testing.assert_allclose(recur.value(Z), recur.value(Y), rtol=1e-6)


def test_steps_of_words_equal_the_sequence_and_gradients_agree(rng):
    layer = EmbeddingDropout(recur.Embedding(V, F, dtype=np.float64, rng=rng), 0.5, rng=rng)
    x = rng.integers(0, V, (B, T))
    with Tape():
        Y = recur.value(layer(x))
        steps = recur.value(layer([x[:, t] for t in range(T)]))
    np.testing.assert_array_equal(np.stack(steps, -1), Y)
    gradcheck(lambda m: m(x), layer)
    grads = recur.gradient(lambda m: m(x).sum(), layer)
    assert not grads["embedding.weight"][:, np.setdiff1d(np.arange(V), x)].any()


def test_embedding_dropout_wraps_an_embedding_only(rng):
    with pytest.raises(TypeError, match="is a Dense, expected an Embedding"):
        EmbeddingDropout(recur.Dense(3, 4), 0.5)
    with Tape(), pytest.raises(IndexError, match=f"index {V}"):
        EmbeddingDropout(recur.Embedding(V, F), 0.5)(np.array([V]))


# ---------------------------------------------------------------------- tied weights


def tied(dtype, rng, drop=0.0, **options):
    embedding = recur.Embedding(V, F, dtype=dtype, rng=rng)
    first = EmbeddingDropout(embedding, drop, rng=rng) if drop else embedding
    return Chain(first, recur.GRU(F, F, dtype=dtype, rng=rng), TiedDense(first, **options))


def test_the_decoder_multiplies_with_the_table_read_backwards(dtype, rng):
    model = tied(dtype, rng)
    E, decoder = model[0].weight, model[2]
    decoder.bias[...] = rng.normal(size=V)
    h = rng.normal(size=(F, B, T)).astype(dtype)
    want = np.einsum("fv,fbt->vbt", E.value, h) + decoder.bias.value[:, None, None]
    tolerance = {"rtol": 1e-5, "atol": 1e-5 if dtype == np.float32 else 1e-12}
    np.testing.assert_allclose(decoder(h), want, **tolerance)
    for t in range(T):
        np.testing.assert_allclose(decoder(h[:, :, t]), want[:, :, t], **tolerance)
        for b in range(B):  # whoever shares its batch, a sample has these numbers
            np.testing.assert_array_equal(decoder(h[:, b, t]), decoder(h[:, :, t])[:, b])
    with Tape():
        Y = recur.value(decoder(h))
        np.testing.assert_allclose(Y, want, **tolerance)
        assert Y.T.flags.c_contiguous
    assert TiedDense(E, recur.tanh, bias=False)(h[:, 0, 0]).dtype == dtype


def test_gradients_of_both_ends_add_up_in_one_array(rng):
    model = tied(np.float64, rng, drop=0.4)
    assert list(recur.named_params(model)) == [
        "layers.0.embedding.weight",
        "layers.1.cell.Wi",
        "layers.1.cell.Wh",
        "layers.1.cell.b",
        "layers.2.bias",
    ]
    x = rng.integers(0, V, (B, T))
    gradcheck(lambda m: m(x), model)
    gradcheck(lambda m: ops.stack([m(x[:, t]) for t in range(T)], -1), recur.reset(model))
    E = model[0].weight
    loose = copy.deepcopy(recur.reset(model))
    loose[2].weight = recur.Param(E.value, order="F")
    W = recur.gradient(lambda m: (m(x) ** 2).sum(), model)[E]
    apart = recur.gradient(lambda m: (m(x) ** 2).sum(), loose)
    np.testing.assert_allclose(W, apart[loose[0].weight] + apart[loose[2].weight], atol=1e-10)


def test_gradient_reaches_a_decoder_alone(rng):
    embedding = recur.Embedding(V, F, dtype=np.float64, rng=rng)
    decoder = TiedDense(embedding, recur.tanh)
    gradcheck(lambda m, h: m(h), decoder, rng.normal(size=(F, B, T)))
    gradcheck(lambda m, h: m(h), decoder, rng.normal(size=F))


def test_the_decoder_sees_every_change_of_the_table(dtype, rng):
    model = tied(dtype, rng)
    E, decoder = model[0].weight, model[2]
    h = rng.normal(size=(F, B)).astype(dtype)
    decoder(h)
    E[...] = 2 * E.value
    np.testing.assert_allclose(decoder(h), E.value.T @ h, rtol=1e-4, atol=1e-5)
    decoder.bias[...] = 1
    np.testing.assert_allclose(decoder(h), E.value.T @ h + 1, rtol=1e-4, atol=1e-5)
    (flat,) = recur.flatten_parameters(model)
    with flat.writing() as a:
        a *= 0.5
    np.testing.assert_allclose(decoder(h), E.value.T @ h + 0.5, rtol=1e-4, atol=1e-5)
    decoder.weight = recur.Param(np.zeros((F, V), dtype), order="F")
    np.testing.assert_array_equal(decoder(h), np.full((V, B), 0.5, dtype))


def test_a_write_between_forward_and_backward_is_noticed(rng):
    embedding = recur.Embedding(V, F, dtype=np.float64, rng=rng)
    decoder = TiedDense(embedding)
    with Tape() as tape:
        h = tape.watch(rng.normal(size=(F, B)))
        loss = (decoder(h) ** 2).sum()
        embedding.weight *= 2
        with pytest.raises(recur.TapeError, match="written since"):
            tape.backward(loss)


def test_the_callers_array_may_be_written_before_backward(rng):
    embedding = recur.Embedding(V, F, dtype=np.float64, rng=rng)
    decoder = TiedDense(embedding)
    h = np.asfortranarray(rng.normal(size=(F, B)))
    with Tape() as tape:
        loss = decoder(h).sum()
        want = np.repeat(h.sum(1)[:, None], V, 1)
        h[...] = 0
        tape.backward(loss)
    np.testing.assert_allclose(embedding.weight.grad, want, atol=1e-12)


def test_tied_weights_are_saved_once_and_tied_again(dtype, rng, tmp_path):
    model = tied(dtype, rng, drop=0.1)
    x = rng.integers(0, V, (B, T))
    recur.save(model, tmp_path / "tied.safetensors")
    assert len(recur.state_dict(model)) == 5 + 1  # and the GRU's init
    others = [
        recur.load(tmp_path / "tied.safetensors"),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        recur.destructure(model)[1](recur.destructure(model)[0]),
    ]
    want = model(x)
    for other in others:
        assert other[2].weight is other[0].weight is not model[0].weight
        np.testing.assert_array_equal(other(x), want)
        assert other[2].weight.order == "F"


def test_a_tied_layer_prints_and_knows_its_output_size(rng):
    decoder = TiedDense(recur.Embedding(V, F), recur.tanh, bias=False)
    assert repr(decoder) == "TiedDense(6 => 9, tanh, bias=False)"
    assert recur.outputsize(decoder, (F, B)) == (V, B)
    with pytest.raises(recur.ShapeError, match=r"TiedDense\(6 => 9, tanh, bias=False\): x has 5"):
        decoder(np.ones(5))
    with pytest.raises(TypeError, match="ndarray has no parameter `weight` to share"):
        TiedDense(np.ones((3, 4)))


# ---------------------------------------------------------------------- penalties


def test_penalties_are_means_over_the_steps_that_count(dtype, rng):
    Y = sequence(rng, dtype)
    np.testing.assert_allclose(activity_penalty(Y, 2.0), 2 * np.mean(Y**2), rtol=1e-5)
    want = 0.5 * np.mean((Y[:, :, 1:] - Y[:, :, :-1]) ** 2)
    np.testing.assert_allclose(temporal_activity_penalty(Y, 0.5), want, rtol=1e-5)
    steps = list(np.moveaxis(Y, 2, 0))
    np.testing.assert_allclose(activity_penalty(steps), activity_penalty(Y), rtol=1e-6)
    np.testing.assert_allclose(temporal_activity_penalty(steps), 2 * want, rtol=1e-5)


def test_padded_steps_do_not_count_not_even_as_nan(rng):
    Y = sequence(rng)
    mask = np.ones((B, T), bool)
    mask[1, 2:] = mask[2, 1:] = False
    padded = np.where(mask, Y, np.nan)
    real = np.concatenate([Y[:, 0], Y[:, 1, :2], Y[:, 2, :1]], axis=1)
    np.testing.assert_allclose(activity_penalty(padded, 1.0, mask=mask), np.mean(real**2))
    pairs = np.concatenate([np.diff(Y[:, 0]), np.diff(Y[:, 1, :2])], axis=1)
    found = temporal_activity_penalty(padded, 1.0, mask=mask)
    np.testing.assert_allclose(found, np.mean(pairs**2))
    grad = recur.gradient(lambda y: temporal_activity_penalty(y, mask=mask), padded)
    assert np.isfinite(grad).all() and not grad[:, 2].any()


def test_gradients_of_penalties_agree_with_difference_quotients(rng):
    mask = rng.integers(0, 2, (B, T)).astype(bool)
    gradcheck(lambda y: activity_penalty(y) + temporal_activity_penalty(y), sequence(rng))
    gradcheck(
        lambda y: activity_penalty(y, mask=mask) + temporal_activity_penalty(y, mask=mask),
        sequence(rng),
    )


def test_penalties_refuse_what_they_cannot_read(rng):
    with pytest.raises(recur.ShapeError, match="at least 2 steps"):
        temporal_activity_penalty(np.ones((F, B, 1)))
    with pytest.raises(recur.ShapeError, match=r"mask is float64 .* expected bool \(3, 4\)"):
        activity_penalty(sequence(rng), mask=np.ones((B, T)))
