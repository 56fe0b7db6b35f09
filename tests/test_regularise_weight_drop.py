"""WeightDrop: one owner of the raw array, one mask a scope, and gradient that always arrives."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys

import numpy as np
import pytest

import recur
from recur import Chain, Param, Recur, Tape, WeightDrop, ops, resample
from recur.errors import StateError
from recur.inspect import gradcheck
from recur.module import Module, raw_weights
from recur.tape import current

LAYERS = {"rnn": recur.RNN, "lstm": recur.LSTM, "gru": recur.GRU, "gruv3": recur.GRUv3}
every_layer = pytest.mark.parametrize("kind", LAYERS)
N_IN, N_OUT, B, T = 3, 4, 2, 5


def dropped(kind, dtype, rng, names="Wh", p=0.5, **options):
    layer = LAYERS[kind](N_IN, N_OUT, dtype=dtype, rng=rng)
    return WeightDrop(layer, names, p, rng=rng, **options)


def sequence(rng, dtype=np.float64, steps=T):
    return rng.normal(size=(N_IN, B, steps)).astype(dtype)


def by_hand(wd, X, **masks):
    """What the plain layer gives with the weights raw * mask / (1 - p) and the gradient of raw."""
    plain = recur.load_state_dict(
        copy.deepcopy(wd).remove(),
        {
            path.replace("_raw", "").removeprefix("layer."): p.value
            for path, p in recur.named_params(wd).items()
        },
        strict=False,
    )
    factors = {name: mask / (1 - wd.p) for name, mask in masks.items()}
    for name, factor in factors.items():
        setattr(plain.cell, name, getattr(plain.cell, name).value * factor)
    loss, grads = recur.withgradient(lambda m: (m(X) ** 2).sum(), plain)
    found = {}
    for path in grads:
        name = path.rpartition(".")[2]
        factor = factors.get(name)
        found[f"{name}_raw" if factor is not None else name] = (
            grads[path] if factor is None else grads[path] * factor
        )
    return loss, found


# ---------------------------------------------------------------------- numbers


@every_layer
def test_a_scope_runs_with_the_masked_weights_and_raw_gets_their_gradient_masked(kind, dtype, rng):
    wd = dropped(kind, dtype, rng, ["Wh", "Wi"])
    X = sequence(rng, dtype)
    loss, grads = recur.withgradient(lambda m: (m(X) ** 2).sum(), wd)
    want, want_grads = by_hand(wd, X, Wh=wd.mask("Wh"), Wi=wd.mask("Wi"))
    tolerance = 1e-12 if dtype == np.float64 else 1e-5
    np.testing.assert_allclose(loss, want, rtol=tolerance)
    for path in grads:
        np.testing.assert_allclose(
            grads[path], want_grads[path.rpartition(".")[2]], rtol=1e-4, atol=tolerance
        )
    assert not grads["layer.cell.Wh_raw"][wd.mask("Wh") == 0].any()


@every_layer
def test_steps_equal_the_call_on_a_sequence(kind, dtype, rng):
    wd = dropped(kind, dtype, rng)
    other = copy.deepcopy(wd)
    X = sequence(rng, dtype)
    loss, grads = recur.withgradient(lambda m: (m(X) ** 2).sum(), wd)
    by_step, of_steps = recur.withgradient(
        lambda m: (ops.stack([m(X[:, :, t]) for t in range(T)], -1) ** 2).sum(), other
    )
    np.testing.assert_allclose(loss, by_step, rtol=1e-5)
    for path in grads:
        np.testing.assert_allclose(of_steps[path], grads[path], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(wd.mask("Wh"), other.mask("Wh"))


@every_layer
def test_gradients_agree_with_difference_quotients(kind, rng):
    wd = dropped(kind, np.float64, rng, ["Wh", "b"])
    gradcheck(lambda m, X: m(X), wd, sequence(rng))


def test_gradients_agree_when_a_reset_in_the_middle_draws_a_second_mask(rng):
    wd = dropped("lstm", np.float64, rng)

    def f(m, X):
        y = m(X)
        recur.reset(m)
        return y, m(X)

    gradcheck(f, wd, sequence(rng))


def test_inactive_the_weight_is_the_parameter_itself(rng):
    wd = dropped("lstm", np.float32, rng)
    assert wd.layer.cell.Wh is wd.raw("Wh") and type(wd.raw("Wh")) is Param
    plain = copy.deepcopy(wd).remove()
    X = sequence(rng, np.float32)
    np.testing.assert_array_equal(wd(X), plain(X))
    recur.testmode(wd)
    recur.reset([wd, plain])
    with Tape():
        np.testing.assert_array_equal(recur.value(wd(X)), recur.value(plain(X)))
        assert wd.mask("Wh") is None


def test_trainmode_drops_outside_a_scope_too_until_reset(rng):
    wd = recur.trainmode(dropped("gru", np.float32, rng, p=0.5))
    X = sequence(rng, np.float32)
    first = wd(X)
    mask = wd.mask("Wh")
    assert mask is not None
    with Tape():
        wd(X)
        assert not np.array_equal(wd.mask("Wh"), mask)
    wd.layer.reset()
    np.testing.assert_array_equal(wd(X), first)  # that of outside is still there
    recur.reset(wd)
    assert not np.array_equal(wd(X), first)


def test_p_of_one_drops_everything(rng):
    wd = dropped("rnn", np.float64, rng, p=1.0)
    X = sequence(rng)
    with Tape():
        y = recur.value(wd(X))
    cell = wd.layer.cell
    want = np.tanh(np.einsum("oi,ibt->obt", cell.Wi.value, X) + cell.b.value[:, None, None])
    np.testing.assert_allclose(y, want, atol=1e-12)


def test_variational_drops_whole_rows(rng):
    wd = dropped("lstm", np.float32, rng, variational=True)
    with Tape():
        wd(sequence(rng, np.float32))
        weight = recur.value(wd.layer.cell.Wh)
    assert wd.mask("Wh").shape == (4 * N_OUT, 1)
    rows = wd.mask("Wh")[:, 0].astype(bool)
    np.testing.assert_array_equal(weight[rows], 2 * wd.raw("Wh").value[rows])
    assert not weight[~rows].any()


def test_both_dtypes_draw_the_same_masks():
    masks = []
    for dtype in (np.float32, np.float64):
        wd = dropped("lstm", dtype, np.random.default_rng(3), ["Wi", "Wh"])
        with Tape():
            wd(np.ones(N_IN, dtype))
        masks.append((wd.mask("Wi"), wd.mask("Wh")))
    for a, b in zip(*masks, strict=True):
        np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------------- when masks change


def test_the_mask_lasts_for_a_scope_and_across_truncate(rng):
    wd = dropped("lstm", np.float32, rng)
    x = np.ones((N_IN, B), np.float32)
    with Tape():
        wd(x)
        first = wd.mask("Wh")
        recur.truncate(wd)
        wd(x)
        recur.reset(wd, mask=np.array([True, False]))
        wd(x)
        np.testing.assert_array_equal(wd.mask("Wh"), first)
        resample(wd)
        wd(x)
        assert not np.array_equal(wd.mask("Wh"), first)
    with Tape():
        last = wd.mask("Wh")
        wd(x)
        assert not np.array_equal(wd.mask("Wh"), last)


def test_a_step_that_fails_draws_nothing(rng):
    wd = dropped("lstm", np.float32, rng, "Wi")
    before = wd.generator.bit_generator.state
    with Tape():
        with pytest.raises(recur.ShapeError):
            wd(np.ones((N_IN + 1, B), np.float32))
        assert wd.generator.bit_generator.state == before
        assert list(wd.masks.held_masks()) == ["scope"]


def test_printing_and_asking_for_sizes_draw_nothing(rng, tmp_path):
    model = Chain(WeightDrop(recur.Dense(3, 4), "weight", 0.5), recur.Dense(4, 2))
    recur.trainmode(model)
    before = model[0].generator.bit_generator.state
    with Tape():
        assert "WeightDrop(Dense(3 => 4), weight, p=0.5)" in repr(model)
        recur.summary(model)
        assert recur.outputsize(model, (3, 8)) == (2, 8)
        recur.save(model, tmp_path / "m.safetensors")
        with raw_weights():
            assert model[0].layer.weight is model[0].raw("weight")
    assert model[0].generator.bit_generator.state == before


def test_a_fixed_mask_serves_through_scopes_and_resets_until_it_is_taken_back(rng):
    wd = dropped("lstm", np.float64, rng)
    mask = rng.integers(0, 2, (4 * N_OUT, N_OUT))
    wd.set_mask("Wh", mask)
    mask_then = mask.copy()
    mask[...] = 7  # copied: the caller may go on writing
    before = wd.generator.bit_generator.state
    for _ in range(2):
        with Tape():
            recur.reset(wd)
            wd(np.ones(N_IN))
            np.testing.assert_array_equal(wd.mask("Wh"), mask_then)
    assert wd.generator.bit_generator.state == before
    with pytest.raises(ValueError, match="read-only"):
        wd.mask("Wh")[...] = 0
    wd.set_mask("Wh", None)
    with Tape():
        wd(np.ones(N_IN))
        assert not np.array_equal(wd.mask("Wh"), mask_then)


def test_a_new_fixed_mask_serves_at_once_within_a_scope(rng):
    wd = dropped("rnn", np.float64, rng)
    with Tape():
        wd(np.ones(N_IN))
        wd.set_mask("Wh", np.zeros((N_OUT, N_OUT)))
        assert not recur.value(wd.layer.cell.Wh).any()


@pytest.mark.parametrize("shape", [(4 * N_OUT, N_OUT), (1, N_OUT)], ids=["whole", "by column"])
def test_a_fixed_mask_is_saved_and_loaded_with_the_model(dtype, shape, rng, tmp_path):
    wd = dropped("lstm", dtype, rng)
    model = Chain(wd, recur.Dense(N_OUT, 1, dtype=dtype))
    mask = rng.integers(0, 2, shape)
    wd.set_mask("Wh", mask)
    path = "layers.0.masks.cell.Wh"
    np.testing.assert_array_equal(recur.buffers(model)[path], mask)
    recur.save(model, tmp_path / "m.safetensors")
    other = recur.load(tmp_path / "m.safetensors")
    X = sequence(rng, dtype)
    want, grads = recur.withgradient(lambda m: m(X).sum(), recur.reset(model))
    found, same = recur.withgradient(lambda m: m(X).sum(), other)
    assert want == found and all(np.array_equal(grads[p], same[p]) for p in grads)
    assert recur.buffers(other)[path].dtype == mask.dtype
    other[0].set_mask("Wh", None)  # and drawing goes on
    assert path not in recur.state_dict(other)
    recur.withgradient(lambda m: m(X).sum(), recur.reset(other))
    assert other[0].mask("Wh").shape == (4 * N_OUT, N_OUT)


def test_loading_fixes_the_saved_mask_at_once_within_a_scope_and_names_one_that_fits_nowhere(rng):
    wd, other, drawing = (dropped("rnn", np.float64, rng) for _ in range(3))
    wd.set_mask("Wh", np.zeros((N_OUT, N_OUT)))
    other.set_mask("Wh", np.ones((N_OUT, N_OUT)))
    with Tape():
        other(np.ones(N_IN))
        recur.load_state_dict(other, recur.state_dict(wd))
        assert not recur.value(other.layer.cell.Wh).any()
    with pytest.raises(StateError, match=r"the model has no masks\.cell\.Wh"):
        recur.load_state_dict(drawing, recur.state_dict(wd))
    assert "masks.cell.Wh" not in recur.state_dict(drawing)


def test_a_file_whose_fixed_mask_does_not_fit_is_damaged(rng, tmp_path, monkeypatch):
    wd = dropped("rnn", np.float32, rng)
    wd.set_mask("Wh", np.ones((N_OUT, N_OUT)))
    honest = wd.config()
    monkeypatch.setattr(
        WeightDrop, "config", lambda _: {**honest, "fixed": {"cell.Wh": [10**7, 10**7]}}
    )
    recur.save(wd, tmp_path / "m.safetensors")
    with pytest.raises(recur.FormatError, match=r"the mask of cell\.Wh has shape"):
        recur.load(tmp_path / "m.safetensors")


# ---------------------------------------------------------------------- backward


def test_several_backwards_in_one_scope_add_up_like_those_of_the_plain_layer(rng):
    wd = dropped("lstm", np.float64, rng)
    mask = rng.integers(0, 2, (4 * N_OUT, N_OUT))
    wd.set_mask("Wh", mask)
    X = sequence(rng)
    with Tape() as tape:
        for t in range(T):
            tape.backward((wd(X[:, :, t]) ** 2).sum())
            recur.truncate(wd)
    plain = copy.deepcopy(wd).remove()
    plain.reset()
    plain.cell.Wh[...] = wd.raw("Wh").value * mask * 2
    with Tape() as tape:
        for t in range(T):
            tape.backward((plain(X[:, :, t]) ** 2).sum())
            recur.truncate(plain)
    np.testing.assert_allclose(wd.raw("Wh").grad, plain.cell.Wh.grad * mask * 2, atol=1e-12)
    np.testing.assert_allclose(wd.layer.cell.Wi.grad, plain.cell.Wi.grad, atol=1e-12)


def test_losses_recorded_before_any_backward_are_swept_one_after_the_other(rng):
    wd = dropped("gru", np.float64, rng)
    wd.set_mask("Wh", rng.integers(0, 2, (3 * N_OUT, N_OUT)))
    X, Z = sequence(rng), sequence(rng)

    def losses():
        wd.layer.reset()  # keeps the mask, and with it the one product that both losses use
        first = (wd(X) ** 2).sum()
        wd.layer.reset()
        return first, (wd(Z) ** 2).sum()

    with Tape() as tape:
        first, second = losses()
        tape.backward(first)
        tape.backward(second)
        with pytest.raises(recur.GraphUsedError):
            tape.backward(first)
    apart = wd.raw("Wh").grad.copy()
    recur.zero_grad(wd)
    with Tape() as tape:
        first, second = losses()
        tape.backward(first + second)
    np.testing.assert_allclose(apart, wd.raw("Wh").grad, atol=1e-12)


def test_backward_accumulates_overwrites_and_keeps_the_graph_as_for_any_parameter(rng):
    wd = dropped("lstm", np.float64, rng)
    X = sequence(rng)
    with Tape() as tape:
        loss = (wd(X) ** 2).sum()
        tape.backward(loss, keep_graph=True)
        once = wd.raw("Wh").grad.copy()
        tape.backward(loss, keep_graph=True)
        np.testing.assert_allclose(wd.raw("Wh").grad, 2 * once, atol=1e-12)
        wd.raw("Wh").grad[...] = np.nan
        tape.backward(loss, accumulate=False)
    np.testing.assert_allclose(wd.raw("Wh").grad, once, atol=1e-12)


def test_the_product_is_made_once_a_scope_and_again_when_raw_was_written(rng):
    wd = dropped("lstm", np.float64, rng)
    x = np.ones((N_IN, B))
    with Tape(log=True) as tape:
        for _ in range(3):
            wd(x)
        assert [e["kind"] for e in tape.events].count("weight_drop") == 1
        first = wd.layer.cell.Wh
        wd.raw("Wh")[...] = 2 * wd.raw("Wh").value
        wd(x)
        assert [e["kind"] for e in tape.events].count("weight_drop") == 2
        np.testing.assert_array_equal(recur.value(wd.layer.cell.Wh), 2 * recur.value(first))


def test_a_scope_that_ended_leaves_nothing_of_its_graph_behind(rng):
    wd = dropped("lstm", np.float64, rng)
    with Tape() as tape:
        tape.backward((wd(sequence(rng)) ** 2).sum())
    gc.collect()
    assert tape.live == 0


def test_a_thousand_truncated_steps_hold_one_product(rng):
    wd = dropped("rnn", np.float32, rng)
    x = np.ones((N_IN, 1), np.float32)
    with Tape() as tape:
        for _ in range(1000):
            wd(x)
            recur.truncate(wd)
        assert tape.live <= 2


# ---------------------------------------------------------------------- nothing goes stale


def by_param(wd, new):
    wd.raw("Wh")[...] = new


def by_old_name(wd, new):
    wd.layer.cell.Wh = new


def by_raw_name(wd, new):
    wd.layer.cell.Wh_raw = new


def by_new_param(wd, new):
    wd.layer.cell.Wh = Param(new.astype(wd.layer.cell.dtype))


def by_writing(wd, new):
    with wd.raw("Wh").writing() as a:
        a[...] = new


def by_optimiser(wd, new):
    opt = recur.setup(recur.Descent(1.0), wd)
    recur.update(opt, wd, {"layer.cell.Wh_raw": wd.raw("Wh").value - new})


def by_load(wd, new):
    recur.load_state_dict(wd, recur.state_dict(wd) | {"layer.cell.Wh_raw": new})


def by_flat_buffer(wd, new):
    (flat,) = recur.flatten_parameters(wd)
    at = wd.raw("Wh").value.__array_interface__["data"][0]
    start = (at - flat.array.__array_interface__["data"][0]) // flat.array.itemsize
    with flat.writing() as a:
        a[start : start + new.size] = new.ravel()


def by_copy(wd, new):
    other = copy.deepcopy(wd)
    by_param(other, new)
    return other


def by_pickle(wd, new):
    by_param(wd, new)
    return pickle.loads(pickle.dumps(wd))


def by_cast(wd, new):
    by_param(wd, new)
    return recur.f32(wd) if new.dtype == np.float32 else recur.f64(wd)


def by_vector(wd, new):
    flat, rebuild = recur.destructure(wd)
    start = wd.layer.cell.Wi.size
    flat[start : start + new.size] = new.ravel("F")
    return rebuild(flat)


WAYS = [
    by_copy,
    by_pickle,
    by_cast,
    by_vector,
    by_param,
    by_old_name,
    by_raw_name,
    by_new_param,
    by_writing,
    by_optimiser,
    by_load,
    by_flat_buffer,
]


@pytest.mark.parametrize("way", WAYS)
@every_layer
def test_the_next_forward_sees_a_raw_array_that_was_changed(kind, way, dtype, rng):
    wd = dropped(kind, dtype, rng)
    rows = wd.raw("Wh").shape[0]
    mask = rng.integers(0, 2, (rows, N_OUT))
    wd.set_mask("Wh", mask)
    X = sequence(rng, dtype)
    x = X[:, :, 0]

    def outputs():
        found = []
        for call in (lambda: wd(X), lambda: [wd(x), wd(x), wd(x)][-1]):
            recur.reset(wd)
            found.append(call())
            recur.reset(wd)
            with Tape():
                found.append(recur.value(call()))
        return found

    outputs()  # packs the old weights for every path
    new = rng.normal(size=wd.raw("Wh").shape).astype(dtype)
    wd = way(wd, new) or wd
    np.testing.assert_allclose(wd.raw("Wh").value, new, rtol=1e-5, atol=1e-6)
    fresh = copy.deepcopy(wd).remove()
    inside = copy.deepcopy(fresh)
    inside.cell.Wh = wd.raw("Wh").value * mask * 2
    for layer in (fresh, inside):
        layer.reset()
    want = []
    for call in (lambda m: m(X), lambda m: [m(x), m(x), m(x)][-1]):
        for layer in (fresh, inside):
            layer.reset()
            want.append(call(layer))
    for got, expected in zip(outputs(), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_change_within_a_scope_is_seen_by_the_next_step(rng):
    wd = dropped("rnn", np.float64, rng)
    wd.set_mask("Wh", np.ones((N_OUT, N_OUT)))
    x = np.zeros((N_IN, B))
    with Tape():
        wd.layer.state = np.ones((N_OUT, B))
        wd(x)
        wd.raw("Wh")[...] = np.eye(N_OUT)
        wd.layer.state = np.full((N_OUT, B), 0.25)
        np.testing.assert_allclose(recur.value(wd(x)), np.tanh(0.5), atol=1e-12)


def test_a_write_between_forward_and_backward_leaves_the_gradient_of_the_old_values(rng):
    wd = dropped("rnn", np.float64, rng)
    X = sequence(rng)
    want = recur.gradient(lambda m: (m(X) ** 2).sum(), copy.deepcopy(wd))
    with Tape() as tape:
        loss = (wd(X) ** 2).sum()
        wd.raw("Wh")[...] = 0
        tape.backward(loss)
    np.testing.assert_array_equal(wd.raw("Wh").grad, want["layer.cell.Wh_raw"])


# ---------------------------------------------------------------------- one owner


def copies(wd, tmp_path):
    path = tmp_path / "wd.safetensors"
    recur.save(wd, path)
    flat, rebuild = recur.destructure(wd)
    return {
        "deepcopy": copy.deepcopy(wd),
        "copy": copy.copy(wd),
        "pickle": pickle.loads(pickle.dumps(wd)),
        "file": recur.load(path),
        "rebuild": rebuild(flat),
        "cast": recur.f64(wd),
    }


@every_layer
def test_a_copy_owns_its_raw_array_and_its_masks(kind, dtype, rng, tmp_path):
    wd = dropped(kind, dtype, rng, ["Wh", "Wi"], p=0.25)
    with Tape():
        wd(sequence(rng, dtype))
    wd.layer.reset()
    names = list(recur.named_params(wd))
    assert [n.rpartition(".")[2] for n in names][:2] == ["Wi_raw", "Wh_raw"]
    X = sequence(rng, dtype)
    for how, other in copies(wd, tmp_path).items():
        assert list(recur.named_params(other)) == names, how
        assert repr(other) == repr(wd), how
        for p, q in zip(recur.params(wd), recur.params(other), strict=True):
            np.testing.assert_array_equal(p.value, q.value)
            assert not np.shares_memory(p.value, q.value)
        assert other.p == wd.p and other.names == wd.names
        other.raw("Wh")[...] = 0
        assert wd.raw("Wh").value.any()
        cell = other.layer.cell
        assert cell.computed_weights["Wh"].masks is other.masks is not wd.masks
        before = wd.generator.bit_generator.state
        grads = recur.gradient(lambda m, X=X: (m(X) ** 2).sum(), other)
        assert grads["layer.cell.Wi_raw"].any(), how
        assert wd.generator.bit_generator.state == before, how


def test_a_copy_taken_inside_a_scope_goes_on_with_the_mask(rng):
    wd = dropped("lstm", np.float64, rng)
    x = np.ones((N_IN, B))
    with Tape():
        wd(x)
        other = copy.deepcopy(wd)
        np.testing.assert_array_equal(other.mask("Wh"), wd.mask("Wh"))
        np.testing.assert_allclose(recur.value(other(x)), recur.value(wd(x)), atol=1e-12)


def test_a_mask_does_not_pass_for_that_of_a_scope_in_another_process(rng):
    wd = dropped("lstm", np.float64, rng)
    with Tape() as tape:
        wd(np.ones((N_IN, B)))
        data = pickle.dumps(wd)
        serial = tape.serial
    program = """
import pickle, sys
import numpy as np
from recur import Tape
wd = pickle.loads(sys.stdin.buffer.read())
while (tape := Tape()).serial < int(sys.argv[1]):
    pass
assert tape.serial == int(sys.argv[1])
with tape:
    wd(np.ones((3, 2)))
sys.stdout.buffer.write(wd.mask("Wh").tobytes())
"""
    made = subprocess.run(
        [sys.executable, "-c", program, str(serial)], input=data, capture_output=True, check=True
    )
    assert made.stdout != wd.mask("Wh").tobytes()
    with Tape():
        wd(np.ones((N_IN, B)))
    assert made.stdout == wd.mask("Wh").tobytes()  # what comes next from this generator


def test_gradient_flows_through_a_rebuilt_model_into_the_flat_vector(rng):
    wd = dropped("gru", np.float64, rng)
    mask = rng.integers(0, 2, (3 * N_OUT, N_OUT))
    wd.set_mask("Wh", mask)
    X = sequence(rng)
    flat, rebuild = recur.destructure(wd)
    loss, grad = recur.withgradient(lambda flat: (rebuild(flat)(X) ** 2).sum(), flat)
    want, grads = recur.withgradient(lambda m: (m(X) ** 2).sum(), wd)
    np.testing.assert_allclose(loss, want, rtol=1e-12)
    joined = np.concatenate([grads[path].ravel("F") for path in grads])
    np.testing.assert_allclose(grad, joined, atol=1e-12)


def test_flat_gradients_and_flat_parameters_work_on_the_raw_array(rng):
    wd = dropped("lstm", np.float64, rng)
    twin = copy.deepcopy(wd)
    (flat,) = recur.flatten_parameters(wd)
    X = sequence(rng)
    grads = recur.gradient(lambda m: (m(X) ** 2).sum(), wd)
    with flat.writing() as w:
        w -= 0.1 * grads.flat
    of_twin = recur.gradient(lambda m: (m(X) ** 2).sum(), twin)
    for path, p in recur.named_params(twin).items():
        p -= 0.1 * of_twin[path]
        np.testing.assert_allclose(recur.named_params(wd)[path].value, p.value, atol=1e-12)
    recur.reset([wd, twin])
    with Tape():
        np.testing.assert_allclose(recur.value(wd(X)), recur.value(twin(X)), atol=1e-12)


def test_a_frozen_raw_array_stays_and_thaws(rng):
    wd = dropped("lstm", np.float32, rng)
    opt = recur.setup(recur.Adam(0.1), wd)
    recur.freeze(opt, wd.raw("Wh"))
    before = wd.raw("Wh").value.copy()
    X = sequence(rng, np.float32)
    for _ in range(2):
        recur.update(opt, wd, recur.gradient(lambda m: (m(X) ** 2).sum(), wd))
    np.testing.assert_array_equal(wd.raw("Wh").value, before)
    recur.thaw(opt)
    recur.update(opt, wd, recur.gradient(lambda m: (m(X) ** 2).sum(), wd))
    assert not np.array_equal(wd.raw("Wh").value, before)


def test_an_optimiser_set_up_before_wrapping_goes_on(rng):
    layer = recur.LSTM(N_IN, N_OUT, rng=rng)
    opt = recur.setup(recur.Adam(0.1), layer)
    wd = WeightDrop(layer, "Wh", 0.5)
    before = wd.raw("Wh").value.copy()
    X = sequence(rng, np.float32)
    recur.update(opt, wd, recur.gradient(lambda m: (m(X) ** 2).sum(), wd))
    assert not np.array_equal(wd.raw("Wh").value, before)


def test_training_resumed_from_a_checkpoint_gives_the_same_numbers(rng, tmp_path):
    X = sequence(rng, np.float32)

    def model():
        return Chain(dropped("lstm", np.float32, np.random.default_rng(7)), recur.Dense(4, 2))

    def run(m, epochs, **options):
        opt = recur.setup(recur.Adam(0.05), m)
        return recur.train(
            lambda m, X: (m(X) ** 2).sum(),
            m,
            [X] * 4,
            opt,
            epochs=epochs,
            progress=False,
            **options,
        )

    recur.seed(1)
    whole = recur.load_state_dict(model(), recur.state_dict(model()))
    halves = copy.deepcopy(whole)
    recur.seed(2)
    straight = run(whole, 4)
    recur.seed(2)
    path = tmp_path / "c.safetensors"
    run(halves, 2, checkpoint=path)
    fresh = model()
    resumed = run(fresh, 4, checkpoint=path, resume=True)
    assert resumed.losses == straight.losses
    for p, q in zip(recur.params(whole), recur.params(fresh), strict=True):
        np.testing.assert_array_equal(p.value, q.value)


@every_layer
def test_remove_gives_the_plain_layer_back(kind, dtype, rng):
    layer = LAYERS[kind](N_IN, N_OUT, dtype=dtype, rng=rng)
    twin = copy.deepcopy(layer)
    param, names, label = layer.cell.Wh, list(recur.named_params(layer)), layer.cell.Wh.name
    wd = WeightDrop(layer, "Wh", 0.5)
    assert wd.raw("Wh") is param and param.name == f"{label}_raw"
    with Tape():
        wd(np.ones(N_IN, dtype))
    assert wd.remove() is layer
    assert layer.cell.Wh is param and param.name == label
    assert list(recur.named_params(layer)) == names
    X = sequence(rng, dtype)
    layer.reset()
    with Tape():
        np.testing.assert_array_equal(recur.value(layer(X)), recur.value(twin(X)))
    assert wd.names == () and WeightDrop(layer, "Wh", 0.5).names == ("cell.Wh",)


# ---------------------------------------------------------------------- any layer


def test_a_dense_layer_drops_its_weight(dtype, rng):
    wd = WeightDrop(recur.Dense(N_IN, N_OUT, recur.tanh, dtype=dtype, rng=rng), "weight", 0.5)
    X = sequence(rng, dtype)
    with Tape():
        Y = recur.value(wd(X))
    W, b = wd.raw("weight").value * wd.mask("weight") * 2, wd.layer.bias.value
    want = np.tanh(np.einsum("oi,ibt->obt", W, X) + b[:, None, None])
    np.testing.assert_allclose(Y, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(wd(X), wd.remove()(X))


def test_an_embedding_drops_entries_of_its_table(dtype, rng):
    wd = WeightDrop(recur.Embedding(6, N_OUT, dtype=dtype, rng=rng), "weight", 0.5)
    x = np.array([[0, 5, 5], [2, 0, 1]])
    y, grads = recur.withgradient(lambda m: (m(x) ** 2).sum(), wd)
    W = wd.raw("weight").value * wd.mask("weight") * 2
    np.testing.assert_allclose(y, (W[:, x] ** 2).sum(), rtol=1e-5)
    counts = np.bincount(x.ravel(), minlength=6)
    np.testing.assert_allclose(
        grads["layer.weight_raw"], 4 * W * counts * wd.mask("weight"), rtol=1e-4
    )
    assert wd.raw("weight").order == "F"


class Own(Module):
    """A module of the user's, whose code knows nothing of dropped weights."""

    def __init__(self, rng):
        self.inner = Chain(recur.Dense(3, 3, dtype=np.float64, rng=rng))
        self.scale = Param(rng.normal(size=(3, 1)))

    def __call__(self, x):
        return self.scale * self.inner(x) + self.scale.sum()


def test_a_module_of_ones_own_needs_no_change(rng):
    wd = WeightDrop(Own(rng), ["scale", "inner.layers.0.weight"], 0.5, rng=rng)
    assert list(recur.named_params(wd)) == [
        "layer.inner.layers.0.weight_raw",
        "layer.inner.layers.0.bias",
        "layer.scale_raw",
    ]
    gradcheck(lambda m, x: m(x), wd, rng.normal(size=(3, 2)))
    assert repr(wd.layer) == "Own(inner=Chain(Dense(3 => 3)))"


def test_both_directions_of_a_bidirectional_layer_drop(rng):
    layer = recur.Bidirectional.of(recur.LSTM, N_IN, N_OUT, dtype=np.float64, rng=rng)
    wd = WeightDrop(layer, ["forward.cell.Wh", "backward.cell.Wh"], 0.5, rng=rng)
    gradcheck(lambda m, X: m(X), wd, sequence(rng))
    assert not np.array_equal(wd.mask("forward.cell.Wh"), wd.mask("backward.cell.Wh"))


def test_a_bare_cell_drops_inside_a_recurrent_layer(rng):
    m = Recur(WeightDrop(recur.LSTMCell(N_IN, N_OUT, dtype=np.float64, rng=rng), "Wh", 0.5))
    gradcheck(lambda m, X: m(X), m, sequence(rng))


def test_the_layer_reached_without_the_wrapper_is_switched_and_reset_all_the_same(rng):
    wd = dropped("lstm", np.float32, rng)
    model = Chain(wd.layer, recur.Dense(N_OUT, 1))
    recur.testmode(model)
    with Tape():
        assert wd.layer.cell.Wh is wd.raw("Wh")
    recur.trainmode(model, "auto")
    x = np.ones(N_IN, np.float32)
    with Tape():
        model(x)
        first = wd.mask("Wh")
        recur.reset(model)
        model(x)
        assert not np.array_equal(wd.mask("Wh"), first)
    assert list(recur.named_params(model))[1] == "layers.0.cell.Wh_raw"


def test_a_parameter_shared_with_another_layer_is_dropped_in_one_and_gets_both_gradients(rng):
    a, b = (recur.Dense(3, 3, bias=False, dtype=np.float64, rng=rng) for _ in range(2))
    b.weight = a.weight
    wd = WeightDrop(a, "weight", 0.5)
    model = Chain(wd, b)
    assert list(recur.named_params(model)) == ["layers.0.layer.weight_raw"]
    assert b.weight is wd.raw("weight")
    gradcheck(lambda m, x: m(x), model, rng.normal(size=(3, 2)))


def test_step_options_reach_the_layer_through_a_chain(rng):
    wd = dropped("gru", np.float64, rng)
    model = Chain(wd, recur.Dense(N_OUT, 2, dtype=np.float64))
    X = sequence(rng)
    Y = model(X, lengths=[T, 2])
    np.testing.assert_array_equal(Y[:, 1, 2:], np.zeros((2, T - 2)))  # bias 0 on outputs of 0
    ys = model([X[:, :, t] for t in range(T)])
    assert isinstance(ys, list) and len(ys) == T


def test_truncation_inside_a_call_keeps_the_mask(rng):
    wd = dropped("lstm", np.float64, rng)
    other = copy.deepcopy(wd)
    X = sequence(rng)
    grads = recur.gradient(lambda m: (m(X, truncate_every=2) ** 2).sum(), wd)

    def by_steps(m):
        loss = 0.0
        for t in range(T):
            loss = loss + (m(X[:, :, t]) ** 2).sum()
            if t % 2:
                recur.truncate(m)
        return loss

    want = recur.gradient(by_steps, other)
    for path in grads:
        np.testing.assert_allclose(grads[path], want[path], atol=1e-12)


# ---------------------------------------------------------------------- sliding windows


@pytest.mark.parametrize("inject", ["window", "last", "all"])
@pytest.mark.parametrize(("k1", "k2"), [(1, 3), (2, 1), (2, 2), (2, 3), (3, 2)])
def test_sliding_windows_agree_with_brute_force(k1, k2, inject, rng):
    """Every loss is recomputed with fixed copies of the run's mask, cut k2 steps back."""
    wd = dropped("lstm", np.float64, rng)
    plain = copy.deepcopy(wd)
    X = sequence(rng, steps=7)

    def loss(ys, t):
        return (ys * ys).sum()

    got, masks = [], []
    for L, grads in recur.tbptt(wd, X, loss, k1=k1, k2=k2, inject=inject):
        got.append((L, grads))
        masks.append(wd.mask("Wh"))
    assert all(np.array_equal(mask, masks[0]) for mask in masks)
    plain.set_mask("Wh", masks[0])
    stops = [min(t, 7) for t in range(k1, 7 + k1, k1)]
    assert len(got) == len(stops)
    for (L, grads), t, last in zip(got, stops, [0, *stops], strict=False):
        first = max(0, t - k2)

        def brute(m, t=t, first=first, last=last):
            recur.reset(m)
            ys = []
            for step in range(t):
                if step == first:
                    recur.truncate(m)
                y = m(X[:, :, step])
                ys.append(y if step >= first else ops.stop_gradient(y))
            start = {"window": last, "last": t - 1, "all": first}[inject]
            return loss(ops.stack(ys[start:], -1), t)

        want, want_grads = recur.withgradient(brute, plain)
        np.testing.assert_allclose(L, want, rtol=1e-12)
        for path in grads:
            np.testing.assert_allclose(grads[path], want_grads[path], atol=1e-11)


def test_sliding_windows_run_each_step_with_its_own_mask(rng):
    wd = dropped("rnn", np.float64, rng)
    X = sequence(rng, steps=6)
    seen, got = [], []
    for _, grads in recur.tbptt(wd, X, lambda ys, t: (ys * ys).sum(), k1=2, k2=4):
        seen.append(wd.mask("Wh"))
        got.append(grads["layer.cell.Wh_raw"])
        if len(got) == 2:
            resample(wd)
    np.testing.assert_array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[1], seen[2])
    plain = copy.deepcopy(wd).remove()
    factors = [seen[0] * 2.0] * 4 + [seen[2] * 2.0] * 2
    now = []

    class ByStep:
        def weight(self, raw):
            return raw * factors[now[-1]]

    plain.cell.compute_weight("Wh", ByStep())

    def brute(m):
        m.reset()
        ys = []
        for step in range(6):
            if step == 2:
                m.truncate()
            now.append(step)
            ys.append(m(X[:, :, step]))
        return (ops.stack(ys[4:], -1) ** 2).sum()

    want = recur.gradient(brute, plain)
    np.testing.assert_allclose(got[2], want["cell.Wh_raw"], atol=1e-11)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_p_must_be_a_probability(p):
    layer = recur.LSTM(3, 4)
    with pytest.raises(ValueError, match=r"WeightDrop: p is .*, expected a probability"):
        WeightDrop(layer, "Wh", p)
    assert list(recur.named_params(layer)) == ["cell.Wi", "cell.Wh", "cell.b"]


def test_names_must_fit_one_parameter_each():
    layer = recur.Bidirectional.of(recur.LSTM, 3, 4)
    with pytest.raises(recur.StateError, match=r"no parameter 'Wx', it has forward\.cell\.Wi"):
        WeightDrop(layer, "Wx", 0.5)
    with pytest.raises(recur.StateError, match=r"fits several .* forward\.cell\.Wh, backward"):
        WeightDrop(layer, "Wh", 0.5)
    assert not any(path.endswith("_raw") for path in recur.named_params(layer))


def test_a_weight_is_dropped_once():
    wd = WeightDrop(recur.LSTM(3, 4), "Wh", 0.5)
    with pytest.raises(recur.StateError, match="dropped already"):
        WeightDrop(wd, "Wh", 0.5)
    outer = WeightDrop(wd, "Wi", 0.5)
    assert [p.rpartition(".")[2] for p in recur.named_params(outer)] == ["Wi_raw", "Wh_raw", "b"]


def test_a_parameter_in_a_list_cannot_be_dropped():
    class Listed(Module):
        def __init__(self):
            self.ws = [Param(np.ones(3))]

    with pytest.raises(recur.StateError, match=r"ws\.0 .* is no attribute of a Module"):
        WeightDrop(Listed(), "ws.0", 0.5)


def test_a_mask_must_fit():
    wd = WeightDrop(recur.LSTM(3, 4), "Wh", 0.5)
    with pytest.raises(recur.ShapeError, match=r"of Wh has shape \(4, 4\), expected \(16, 4\)"):
        wd.set_mask("Wh", np.ones((4, 4)))
    with pytest.raises(recur.StateError, match=r"'Wi' is not one of its weights, cell\.Wh"):
        wd.set_mask("Wi", np.ones((16, 3)))
    assert wd.mask("Wh") is None


def test_the_parameter_of_a_dropped_weight_cannot_be_taken_away():
    cell = recur.LSTMCell(3, 4)
    WeightDrop(cell, "b", 0.5)
    with pytest.raises(TypeError, match=r"cannot be None"):
        cell.b = None
    assert type(cell.b_raw) is Param


def test_a_file_needs_the_wrapper_or_the_plain_layer(tmp_path):
    wd = WeightDrop(recur.LSTM(3, 4), "Wh", 0.5)
    with pytest.raises(recur.StateError, match=r"cell: the weight Wh of .* is computed by a wra"):
        recur.save(wd.layer, tmp_path / "m.safetensors")
    recur.save(Chain(wd, wd.layer), tmp_path / "m.safetensors")
    both = recur.load(tmp_path / "m.safetensors")
    assert both[1] is both[0].layer and both[0].names == ("cell.Wh",)
    recur.save(wd.remove(), tmp_path / "m.safetensors")
    assert list(recur.named_params(recur.load(tmp_path / "m.safetensors")))[1] == "cell.Wh"


def test_an_array_of_another_shape_is_refused_under_either_name():
    cell = recur.LSTMCell(3, 4)
    WeightDrop(cell, "Wh", 0.5)
    for name in ("Wh", "Wh_raw"):
        with pytest.raises(recur.ShapeError, match=r"shape \(2, 2\), expected"):
            setattr(cell, name, np.ones((2, 2)))


def test_no_scope_is_left_open():
    assert current() is None
