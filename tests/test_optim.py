"""Optimisers: every rule against a twin written from its formula, and how updates are driven."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import sys

import numpy as np
import pytest

import recur
from recur import optim
from recur.errors import ShapeError, StateError
from recur.gradients import flatten_parameters, gradient
from recur.losses import mse
from recur.module import Module, params
from recur.optim import (
    AdaBelief,
    AdaDelta,
    AdaGrad,
    Adam,
    AdaMax,
    AdamW,
    AMSGrad,
    ClipGrad,
    ClipNorm,
    Constant,
    Cosine,
    Descent,
    Exp,
    Momentum,
    NAdam,
    Nesterov,
    OAdam,
    OptimiserChain,
    RAdam,
    RMSProp,
    Rule,
    SignDecay,
    Step,
    Warmup,
    WeightDecay,
    adjust,
    freeze,
    setup,
    thaw,
    update,
)
from recur.tape import FlatBuffer, Param

# Twins: `step(state, x, g, t)` from the published formulas, in float64.


def twin(step):
    """Turns `step(state, x, g, t)` into a function of a gradient history that updates x."""

    def run(x, grads):
        x, state = x.copy(), {}
        for t, g in enumerate(grads, 1):
            x -= step(state, x, g, t)
        return x

    return run


def momentum(s, x, g, t, eta=0.01, rho=0.9):
    s["v"] = rho * s.get("v", 0) + eta * g
    return s["v"]


def nesterov(s, x, g, t, eta=0.001, rho=0.9):
    # Sutskever's form: the parameters held are those looked ahead to, x = theta + rho v.
    v = s.get("v", np.zeros_like(x))
    theta = x - rho * v
    s["v"] = rho * v - eta * g
    theta = theta + s["v"]
    return x - (theta + rho * s["v"])


def rmsprop(s, x, g, t, eta=0.001, rho=0.9, eps=1e-8):
    s["v"] = rho * s.get("v", 0) + (1 - rho) * g**2
    return eta * g / (np.sqrt(s["v"]) + eps)


def rmsprop_centred(s, x, g, t, eta=0.001, rho=0.9, eps=1e-8):
    s["v"] = rho * s.get("v", 0) + (1 - rho) * g**2
    s["m"] = rho * s.get("m", 0) + (1 - rho) * g
    return eta * g / (np.sqrt(s["v"] - s["m"] ** 2) + eps)


def adagrad(s, x, g, t, eta=0.1, eps=1e-8):
    s["v"] = s.get("v", eps) + g**2
    return eta * g / (np.sqrt(s["v"]) + eps)


def adadelta(s, x, g, t, rho=0.9, eps=1e-8):
    s["v"] = rho * s.get("v", 0) + (1 - rho) * g**2
    d = np.sqrt(s.get("u", 0) + eps) / np.sqrt(s["v"] + eps) * g
    s["u"] = rho * s.get("u", 0) + (1 - rho) * d**2
    return d


def moments(s, g, beta, start=0.0):
    s["m"] = beta[0] * s.get("m", start) + (1 - beta[0]) * g
    s["v"] = beta[1] * s.get("v", start) + (1 - beta[1]) * g**2
    return s["m"], s["v"]


def adam(s, x, g, t, eta=0.001, beta=(0.9, 0.999), eps=1e-8):
    m, v = moments(s, g, beta)
    m_hat, v_hat = m / (1 - beta[0] ** t), v / (1 - beta[1] ** t)
    return eta * m_hat / (np.sqrt(v_hat) + eps)


def adamw(s, x, g, t, eta=0.001, decay=0.1):
    return adam(s, x, g, t, eta) + eta * decay * x


def adamw_uncoupled(s, x, g, t, eta=0.001, decay=0.1):
    return adam(s, x, g, t, eta) + decay * x


def amsgrad(s, x, g, t, eta=0.001, beta=(0.9, 0.999), eps=1e-8):
    m, v = moments(s, g, beta, start=eps)
    s["w"] = np.maximum(s.get("w", eps), v)
    return eta * m / (np.sqrt(s["w"]) + eps)


def nadam(s, x, g, t, eta=0.001, beta=(0.9, 0.999), eps=1e-8):
    # Dozat's algorithm with a constant mu: the momentum of the step to come, this step's gradient.
    m, v = moments(s, g, beta)
    m_bar = beta[0] * m / (1 - beta[0] ** (t + 1)) + (1 - beta[0]) * g / (1 - beta[0] ** t)
    return eta * m_bar / (np.sqrt(beta[1] * v / (1 - beta[1] ** t)) + eps)


def radam(s, x, g, t, eta=0.001, beta=(0.9, 0.999), eps=1e-8):
    m, v = moments(s, g, beta)
    limit = 2 / (1 - beta[1]) - 1
    length = limit - 2 * t * beta[1] ** t / (1 - beta[1] ** t)
    m_hat = m / (1 - beta[0] ** t)
    if length <= 4:
        return eta * m_hat
    rectified = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
    return eta * np.sqrt(rectified) * m_hat / (np.sqrt(v / (1 - beta[1] ** t)) + eps)


def adamax(s, x, g, t, eta=0.001, beta=(0.9, 0.999), eps=1e-8):
    s["m"] = beta[0] * s.get("m", 0) + (1 - beta[0]) * g
    s["u"] = np.maximum(beta[1] * s.get("u", 0), np.abs(g))
    return eta / (1 - beta[0] ** t) * s["m"] / (s["u"] + eps)


def oadam(s, x, g, t):
    step = adam(s, x, g, t, beta=(0.5, 0.9))
    before, s["step"] = s.get("step", 0), step
    return 2 * step - before


def adabelief(s, x, g, t, eta=0.001, beta=(0.9, 0.999), eps=1e-16):
    s["m"] = beta[0] * s.get("m", 0) + (1 - beta[0]) * g
    s["v"] = beta[1] * s.get("v", 0) + (1 - beta[1]) * (g - s["m"]) ** 2 + eps
    return eta * s["m"] / (1 - beta[0] ** t) / (np.sqrt(s["v"] / (1 - beta[1] ** t)) + eps)


TWINS = {
    "Descent": (Descent(), lambda s, x, g, t: 0.1 * g),
    "Momentum": (Momentum(), momentum),
    "Momentum 0.1, 0.5": (
        Momentum(0.1, 0.5),
        lambda s, x, g, t: momentum(s, x, g, t, 0.1, 0.5),
    ),
    "Nesterov": (Nesterov(), nesterov),
    "Nesterov 0.1, 0.5": (
        Nesterov(0.1, 0.5),
        lambda s, x, g, t: nesterov(s, x, g, t, 0.1, 0.5),
    ),
    "RMSProp": (RMSProp(), rmsprop),
    "RMSProp centred": (RMSProp(centred=True), rmsprop_centred),
    "AdaGrad": (AdaGrad(), adagrad),
    "AdaDelta": (AdaDelta(), adadelta),
    "Adam": (Adam(), adam),
    "Adam 0.01, 0.5, 0.9, 0.1": (
        Adam(0.01, (0.5, 0.9), 0.1),
        lambda s, x, g, t: adam(s, x, g, t, 0.01, (0.5, 0.9), 0.1),
    ),
    "AdamW": (AdamW(lambda_=0.1), adamw),
    "AdamW uncoupled": (AdamW(lambda_=0.1, couple=False), adamw_uncoupled),
    "AMSGrad": (AMSGrad(), amsgrad),
    "NAdam": (NAdam(), nadam),
    "RAdam": (RAdam(), radam),
    "AdaMax": (AdaMax(), adamax),
    "OAdam": (OAdam(), oadam),
    "AdaBelief": (AdaBelief(), adabelief),
    "WeightDecay": (WeightDecay(), lambda s, x, g, t: g + 5e-4 * x),
    "SignDecay": (SignDecay(), lambda s, x, g, t: g + 1e-3 * np.sign(x)),
    "ClipGrad": (ClipGrad(0.5), lambda s, x, g, t: np.clip(g, -0.5, 0.5)),
    "chain": (
        OptimiserChain(WeightDecay(0.1), ClipGrad(0.5), Adam()),
        lambda s, x, g, t: adam(s, x, np.clip(g + 0.1 * x, -0.5, 0.5), t),
    ),
    "empty chain": (OptimiserChain(), lambda s, x, g, t: g),
}


class Model(Module):
    """Parameters of several shapes, one of them laid out by columns."""

    def __init__(self, dtype=np.float64, seed=0, flat=False):
        rng = np.random.default_rng(seed)
        self.table = Param(rng.standard_normal((3, 5)).astype(dtype), order="F")
        self.inner = Inner(rng, dtype)
        self.scale = Param(np.array(1.5, dtype))
        if flat:
            flatten(self)


class Inner(Module):
    def __init__(self, rng, dtype):
        self.weight = Param(rng.standard_normal((4, 7)).astype(dtype))
        self.bias = Param(rng.standard_normal(4).astype(dtype))


def flatten(model):
    """All parameters in one buffer, each in its own memory order."""
    held = params(model)
    buffer = FlatBuffer(np.zeros(sum(p.size for p in held), held[0].dtype))
    for p, view in zip(held, views(buffer.array, held), strict=True):
        p.move_into(buffer, view)
    return buffer


def views(vector, held):
    start, found = 0, []
    for p in held:
        part = vector[start : start + p.size]
        by_rows = p.value.flags.c_contiguous
        found.append(part.reshape(p.shape) if by_rows else part.reshape(p.shape[::-1]).T)
        start += p.size
    return found


def some_gradients(model, rng, dtype=np.float64):
    return {
        "table": rng.standard_normal((3, 5)).astype(dtype),
        "inner.weight": rng.standard_normal((4, 7)).astype(dtype),
        "inner.bias": rng.standard_normal(4).astype(dtype),
        "scale": np.asarray(rng.standard_normal(), dtype),
    }


def values(model):
    return [p.value.copy() for p in params(model)]


def assert_same_bits(a, b):
    for one, two in zip(a, b, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("name", TWINS)
def test_a_rule_follows_its_formula_over_many_steps(name, dtype, rng):
    rule, step = TWINS[name]
    model = Model(dtype)
    before = [v.astype(np.float64) for v in values(model)]
    history = [some_gradients(model, rng, dtype) for _ in range(60)]
    opt = setup(rule, model)
    for grads in history:
        update(opt, model, grads)
    tol = {"rtol": 1e-11, "atol": 1e-12} if dtype == np.float64 else {"rtol": 3e-4, "atol": 3e-5}
    for path, x, p in zip(history[0], before, params(model), strict=True):
        run = twin(step)
        expected = run(x, [grads[path].astype(np.float64) for grads in history])
        assert p.dtype == dtype
        np.testing.assert_allclose(p.value, expected, **tol)


def test_defaults_are_those_of_optimisers_jl():
    assert vars(Descent()) == {"eta": 0.1}
    assert vars(Momentum()) == {"eta": 0.01, "rho": 0.9}
    assert vars(Nesterov()) == {"eta": 0.001, "rho": 0.9}
    assert vars(RMSProp()) == {"eta": 0.001, "rho": 0.9, "epsilon": 1e-8, "centred": False}
    assert vars(AdaGrad()) == {"eta": 0.1, "epsilon": 1e-8}
    assert vars(AdaDelta()) == {"rho": 0.9, "epsilon": 1e-8}
    for rule in Adam, AMSGrad, NAdam, RAdam, AdaMax:
        assert vars(rule()) == {"eta": 0.001, "beta": (0.9, 0.999), "epsilon": 1e-8}
    assert vars(OAdam())["beta"] == (0.5, 0.9)
    assert vars(AdaBelief())["epsilon"] == 1e-16
    assert AdamW() == AdamW(0.001, (0.9, 0.999), 0.0, 1e-8, couple=True)
    assert (WeightDecay().lambda_, SignDecay().lambda_) == (5e-4, 1e-3)
    assert (ClipGrad().delta, ClipNorm().omega, ClipNorm().p) == (10, 10, 2)


@pytest.mark.parametrize("name", TWINS)
def test_a_flat_buffer_gives_the_same_bits_as_single_parameters(name, dtype, rng):
    rule, _ = TWINS[name]
    chain = OptimiserChain(ClipNorm(2.0), rule)
    single, flat, flatter = Model(dtype), Model(dtype, flat=True), Model(dtype, flat=True)
    opts = [setup(chain, m) for m in (single, flat, flatter)]
    vector = np.zeros(sum(p.size for p in params(flatter)), dtype)
    kept = dict(zip(some_gradients(single, rng), views(vector, params(flatter)), strict=True))
    for _ in range(20):
        grads = some_gradients(single, rng, dtype)
        for path, g in grads.items():
            kept[path][...] = g
        for opt, m, g in zip(opts, (single, flat, flatter), (grads, grads, kept), strict=True):
            update(opt, m, g)
    assert_same_bits(values(single), values(flat))
    assert_same_bits(values(single), values(flatter))


def test_a_model_in_one_flat_buffer_is_updated_as_one_array(rng):
    model = Model(flat=True)
    seen = []

    class Watched(Descent):
        def apply(self, state, x, dx, t):
            seen.append(x.shape)
            return super().apply(state, x, dx, t)

    opt = setup(Watched(), model)
    update(opt, model, some_gradients(model, rng))
    assert seen == [(15 + 28 + 4 + 1,)]
    seen.clear()
    freeze(opt.inner)
    update(opt, model, some_gradients(model, rng))
    assert seen == [(15,), (1,)]


@pytest.mark.parametrize("flat", [False, True])
def test_a_large_parameter_is_updated_in_blocks_that_change_nothing(flat, dtype, rng):
    sizes = [(7, 11), (300, 401), (5,)]
    arrays = [rng.standard_normal(s).astype(dtype) for s in sizes]
    model = [Param(a) for a in arrays]
    if flat:
        flatten(model)
    opt = setup(Adam(0.01), model)
    history = [[rng.standard_normal(s).astype(dtype) for s in sizes] for _ in range(4)]
    for grads in history:
        update(opt, model, dict(zip(model, grads, strict=True)))
    for p, x, grads in zip(model, arrays, zip(*history, strict=True), strict=True):
        state = {"mean": np.zeros_like(x), "square": np.zeros_like(x)}
        for t, g in enumerate(grads, 1):
            x -= Adam(0.01).apply(state, x, g.copy(), t)
        np.testing.assert_array_equal(p.value, x)


def test_gradients_of_any_layout_and_dtype_are_taken_and_left_as_they_are(rng):
    expected, model = Model(), Model()
    grads = some_gradients(model, rng, np.float32)
    odd = {path: np.array(g, np.float64, order="F") for path, g in grads.items()}
    wide = np.zeros((8, 14), np.float32)
    wide[::2, ::2] = grads["inner.weight"]
    odd["inner.weight"] = wide[::2, ::2]
    odd["inner.bias"] = grads["inner.bias"].tolist()
    odd["table"].flags.writeable = False
    copies = copy.deepcopy(odd)
    for m, g in (expected, grads), (model, odd):
        opt = setup(OptimiserChain(ClipNorm(1.0), WeightDecay(), Momentum(0.1)), m)
        update(opt, m, g)
    for one, two in zip(values(expected), values(model), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6)
    assert_same_bits(map(np.asarray, odd.values()), map(np.asarray, copies.values()))


def test_update_writes_in_place_and_raises_every_version(rng):
    for model in Model(), Model(flat=True):
        held = params(model)
        memory, versions = [p.value for p in held], [p.version for p in held]
        opt = setup(Adam(), model)
        assert [p.version for p in held] == versions
        update(opt, model, some_gradients(model, rng))
        assert all(p.value is m for p, m in zip(held, memory, strict=True))
        assert all(p.version > v for p, v in zip(held, versions, strict=True))


def test_a_parameter_without_gradient_keeps_value_and_state(rng):
    model, other = Model(), Model()
    opt, other_opt = setup(Momentum(), model), setup(Momentum(), other)
    history = [some_gradients(model, rng) for _ in range(3)]
    for i, grads in enumerate(history):
        partial = dict(grads)
        if i == 1:
            partial["table"] = None
            del partial["scale"]
        update(opt, model, partial)
        if i != 1:
            update(other_opt, other, {k: grads[k] for k in ("table", "scale")})
    np.testing.assert_array_equal(model.table.value, other.table.value)
    np.testing.assert_array_equal(model.scale.value, other.scale.value)


def test_zeros_are_a_gradient_and_momentum_goes_on(rng):
    model = Model()
    opt = setup(Momentum(0.1, 0.5), model)
    grads = some_gradients(model, rng)
    update(opt, model, grads)
    before = values(model)
    update(opt, model, {path: np.zeros_like(g) for path, g in grads.items()})
    for x, p, g in zip(before, params(model), grads.values(), strict=True):
        np.testing.assert_allclose(p.value, x - 0.05 * g)


def test_without_gradients_the_grad_of_each_parameter_is_taken(rng):
    model, other = Model(), Model()
    grads = some_gradients(model, rng)
    for path, p in zip(grads, params(model), strict=True):
        if path != "scale":
            p.grad = grads[path]
    update(setup(Adam(), model), model)
    del grads["scale"]
    update(setup(Adam(), other), other, grads)
    assert_same_bits(values(model), values(other))


def test_gradients_by_parameter_equal_gradients_by_path(rng):
    model, other = Model(), Model()
    grads = some_gradients(model, rng)
    update(setup(Adam(), model), model, dict(zip(params(model), grads.values(), strict=True)))
    update(setup(Adam(), other), other, grads)
    assert_same_bits(values(model), values(other))


def test_a_shared_parameter_has_one_state_and_moves_once():
    shared = Param(np.zeros(2))
    model = {"a": shared, "b": [shared]}
    opt = setup(Descent(1.0), model)
    update(opt, model, {"a": np.ones(2)})
    np.testing.assert_array_equal(shared.value, [-1, -1])


def test_a_list_of_parameters_is_a_model_too(rng):
    model, other = Model(), Model()
    grads = some_gradients(model, rng)
    held = params(model)
    opt = setup(Adam(), held)
    update(opt, held, dict(zip(held, grads.values(), strict=True)))
    update(setup(Adam(), other), other, grads)
    assert_same_bits(values(model), values(other))


def test_a_part_of_the_model_may_be_updated_alone(rng):
    model, other = Model(), Model()
    grads = some_gradients(model, rng)
    opt, other_opt = setup(Adam(), model), setup(Adam(), other)
    update(opt, model.inner, {"weight": grads["inner.weight"], "bias": grads["inner.bias"]})
    update(other_opt, other, {k: g for k, g in grads.items() if k.startswith("inner")})
    assert_same_bits(values(model), values(other))


@pytest.mark.parametrize("flat", [False, True])
def test_the_result_of_gradient_goes_straight_into_update(flat, dtype, rng):
    model, other = Model(dtype), Model(dtype)
    if flat:
        flatten_parameters(model)
    opt = setup(OptimiserChain(ClipNorm(1.0), Adam(0.1)), model)
    other_opt = setup(OptimiserChain(ClipNorm(1.0), Adam(0.1)), other)
    x = rng.standard_normal((7, 3)).astype(dtype)

    def loss(m):
        return mse(m.inner.weight @ x, 1.0) + mse(m.table, m.scale.value)

    results = None
    for _ in range(5):
        results = gradient(loss, model, into=results)
        update(opt, model, results)
        update(other_opt, other, dict(gradient(loss, other).items()))
    assert_same_bits(values(model), values(other))
    assert not np.array_equal(model.inner.weight.value, Model(dtype).inner.weight.value)
    np.testing.assert_array_equal(model.inner.bias.value, Model(dtype).inner.bias.value)


def test_gradients_of_a_whole_model_may_update_a_part_of_it():
    model = Model()
    opt = setup(Descent(1.0), model)
    before = values(model)
    update(opt, model.inner, gradient(lambda m: (m.inner.bias * m.scale).sum(), model))
    np.testing.assert_allclose(model.inner.bias.value, before[2] - before[3])
    np.testing.assert_array_equal(model.scale.value, before[3])


def test_a_missing_gradient_in_a_result_leaves_the_parameter_alone():
    model = Model()
    opt = setup(Momentum(1.0), model)
    before = values(model)
    update(opt, model, gradient(lambda m: m.bias.sum(), model.inner))
    np.testing.assert_array_equal(model.table.value, before[0])
    np.testing.assert_array_equal(model.inner.bias.value, before[2] - 1)
    counts = {path: one["count"] for path, one in opt.state_dict()["params"].items()}
    assert counts == {"table": 0, "inner.weight": 1, "inner.bias": 1, "scale": 0}


# ClipNorm.


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3, math.inf])
def test_clip_norm_takes_all_parameters_as_one_vector(p, flat, dtype, rng):
    model = Model(dtype, flat=flat)
    before, grads = values(model), some_gradients(Model(), rng, dtype)
    whole = np.concatenate([g.ravel() for g in grads.values()])
    norm = np.linalg.norm(whole, p)
    update(setup(OptimiserChain(ClipNorm(norm / 2, p), Descent(1.0)), model), model, grads)
    for x, held, g in zip(before, params(model), grads.values(), strict=True):
        np.testing.assert_allclose(held.value, x - g / 2, rtol=1e-5, atol=1e-6)
    before = values(model)
    update(setup(OptimiserChain(ClipNorm(norm * 2, p), Descent(1.0)), model), model, grads)
    for x, held, g in zip(before, params(model), grads.values(), strict=True):
        np.testing.assert_array_equal(held.value, x - g)


def test_clip_norm_may_take_each_parameter_by_itself(rng):
    model = Model(flat=True)
    before, grads = values(model), some_gradients(model, rng)
    update(setup(ClipNorm(1.0, per_array=True), model), model, grads)
    for x, p, g in zip(before, params(model), grads.values(), strict=True):
        np.testing.assert_allclose(p.value, x - g * min(1, 1 / np.linalg.norm(g.ravel())))


def test_clip_norm_may_stand_anywhere_in_a_chain(rng):
    model = Model()
    before, grads = values(model), some_gradients(model, rng)
    steps = [np.clip(g + 0.5 * x, -1, 1) for g, x in zip(grads.values(), before, strict=True)]
    norm = np.linalg.norm(np.concatenate([s.ravel() for s in steps]))
    rule = OptimiserChain(WeightDecay(0.5), ClipGrad(1.0), ClipNorm(1.0), Descent(0.1))
    update(setup(rule, model), model, grads)
    for x, p, s in zip(before, params(model), steps, strict=True):
        np.testing.assert_allclose(p.value, x - 0.1 * s / norm)


def test_clip_norm_behind_another_rule_clips_the_step(rng):
    model = Model()
    before, grads = values(model), some_gradients(model, rng)
    opt = setup(OptimiserChain(Momentum(10.0), ClipNorm(0.5)), model)
    for _ in range(3):
        update(opt, model, grads)
    moved = np.concatenate(
        [(p.value - x).ravel() for p, x in zip(params(model), before, strict=True)]
    )
    np.testing.assert_allclose(np.linalg.norm(moved), 1.5)


def test_clip_norm_survives_a_gradient_whose_square_overflows_or_underflows(dtype):
    tiny = float(np.finfo(dtype).tiny)
    for scale in (1e25, 1e-30) if dtype == np.float32 else (1e200, 1e-200):
        for p in (1, 2, 3):
            x = Param(np.zeros(4, dtype))
            g = np.array([3, 4, 0, 0], dtype) * dtype.type(scale)
            norm = {1: 7.0, 2: 5.0, 3: 91 ** (1 / 3)}[p] * scale
            update(setup(ClipNorm(norm / 2, p), [x]), [x], {x: g})
            np.testing.assert_allclose(x.value, -g / 2, rtol=1e-5)
    zero = Param(np.full(3, tiny, dtype))
    update(setup(ClipNorm(1.0), [zero]), [zero], {zero: np.zeros(3, dtype)})
    assert_same_bits([zero.value], [np.full(3, tiny, dtype)])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_an_error_that_names_the_parameter(bad, rng):
    model = Model()
    before, grads = values(model), some_gradients(model, rng)
    grads["inner.bias"][2] = bad
    opt = setup(OptimiserChain(ClipNorm(1.0), Adam()), model)
    saved = opt.state_dict()
    with pytest.raises(FloatingPointError, match=r"inner\.bias"):
        update(opt, model, grads)
    assert_same_bits(values(model), before)
    assert_equal_trees(opt.state_dict(), saved)
    opt = setup(OptimiserChain(ClipNorm(throw=False), Descent()), model)
    with np.errstate(invalid="ignore"):
        update(opt, model, grads)
    assert not np.isfinite(model.inner.bias.value).all()


def test_frozen_parameters_do_not_count_in_the_norm(rng):
    model = Model()
    before, grads = values(model), some_gradients(model, rng)
    grads["table"][...] = np.nan
    opt = setup(ClipNorm(1.0), model)
    freeze(opt.table)
    update(opt, model, grads)
    moved = [(p.value - x).ravel() for p, x in zip(params(model), before, strict=True)]
    np.testing.assert_allclose(np.linalg.norm(np.concatenate(moved)), 1)


# adjust, freeze, thaw.


def test_freeze_keeps_value_and_state_and_thaw_goes_on(rng):
    for flat in False, True:
        model, other = Model(flat=flat), Model()
        opt, other_opt = setup(Adam(), model), setup(Adam(), other)
        history = [some_gradients(model, rng) for _ in range(6)]
        for i, grads in enumerate(history):
            if i == 2:
                freeze(opt.inner)
            if i == 4:
                thaw(opt.inner)
            update(opt, model, grads)
            skipped = {} if i not in (2, 3) else {"inner.weight": None, "inner.bias": None}
            update(other_opt, other, {**grads, **skipped})
        assert_same_bits(values(model), values(other))


def test_freeze_takes_a_part_of_the_model_or_a_parameter(rng):
    model = Model()
    opt = setup(Descent(), model)
    freeze(opt, model.inner)
    freeze(opt, model.scale)
    before = values(model)
    update(opt, model, some_gradients(model, rng))
    np.testing.assert_array_equal(model.inner.weight.value, before[1])
    np.testing.assert_array_equal(model.scale.value, before[3])
    assert not np.array_equal(model.table.value, before[0])
    thaw(opt, model)
    update(opt, model, some_gradients(model, rng))
    assert not np.array_equal(model.inner.weight.value, before[1])


def test_everything_frozen_leaves_everything_as_it_is(rng):
    model = Model()
    opt = setup(Descent(), model)
    freeze(opt)
    before = values(model)
    update(opt, model, some_gradients(model, rng))
    assert_same_bits(values(model), before)


def test_adjust_changes_the_rate_of_the_whole_or_of_a_part(rng):
    for flat in False, True:
        model = Model(flat=flat)
        opt = setup(OptimiserChain(WeightDecay(0.0), Descent(0.5)), model)
        adjust(opt, 0.25)
        adjust(opt.inner, 0.125)
        adjust(opt["inner.bias"], lambda_=1.0)
        before, grads = values(model), some_gradients(model, rng)
        update(opt, model, grads)
        expected = [
            before[0] - 0.25 * grads["table"],
            before[1] - 0.125 * grads["inner.weight"],
            before[2] - 0.125 * (grads["inner.bias"] + before[2]),
            before[3] - 0.25 * grads["scale"],
        ]
        for p, x in zip(params(model), expected, strict=True):
            np.testing.assert_allclose(p.value, x)


def test_adjust_keeps_the_state(rng):
    model = Model()
    opt = setup(Momentum(0.1, 0.5), model)
    grads = some_gradients(model, rng)
    before = values(model)
    update(opt, model, grads)
    adjust(opt, 0.2)
    update(opt, model, grads)
    for p, x, g in zip(params(model), before, grads.values(), strict=True):
        np.testing.assert_allclose(p.value, x - 0.1 * g - (0.05 + 0.2) * g)


def test_adjust_of_a_rule_gives_a_new_one():
    rule = Adam(0.1)
    assert adjust(rule, 0.2) == Adam(0.2)
    assert adjust(rule, beta=(0.5, 0.6)) == Adam(0.1, (0.5, 0.6))
    assert adjust(OptimiserChain(ClipNorm(), rule), 0.3) == OptimiserChain(ClipNorm(), Adam(0.3))
    assert rule == Adam(0.1)


def test_adjust_refuses_what_no_rule_has_and_what_decides_the_state():
    opt = setup(Adam(), Model())
    with pytest.raises(TypeError, match="has no rho"):
        adjust(opt, rho=0.5)
    with pytest.raises(TypeError, match="has no eta"):
        adjust(ClipGrad(), 0.1)
    with pytest.raises(TypeError, match="has no centred"):
        adjust(RMSProp(), centred=True)
    with pytest.raises(ValueError, match="cannot be negative"):
        adjust(opt, -1.0)


# Schedules.


def test_schedules_follow_their_formulas():
    assert [Constant(0.5)(t) for t in range(3)] == [0.5] * 3
    assert [Step(1.0, 0.5, 2)(t) for t in range(6)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert [Step(1.0, 0.5, [1, 3])(t) for t in range(6)] == [1, 0.5, 0.5, 0.5, 0.25, 0.25]
    np.testing.assert_allclose([Exp(2.0, 0.9)(t) for t in range(4)], 2 * 0.9 ** np.arange(4))
    cosine = Cosine(1.0, 0.2, 8)
    np.testing.assert_allclose([cosine(t) for t in (0, 4, 8, 100)], [1, 0.6, 0.2, 0.2])
    restarted = Cosine(1.0, 0.2, 8, restart=True)
    np.testing.assert_allclose([restarted(t) for t in (0, 4, 8, 12)], [1, 0.6, 1, 0.6])
    warm = Warmup(4, Exp(1.0, 0.5))
    np.testing.assert_allclose([warm(t) for t in range(7)], [0.25, 0.5, 0.75, 1, 1, 0.5, 0.25])
    assert [Warmup(2, 0.5)(t) for t in range(3)] == [0.25, 0.5, 0.5]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Step(1, 1, 0),
        lambda: Step(1, 1, []),
        lambda: Cosine(1, 0, 0),
        lambda: Warmup(0, 1.0),
    ],
)
def test_a_schedule_without_length_is_an_error(make):
    with pytest.raises(ValueError, match="at least 1"):
        make()


def test_any_hyperparameter_may_follow_a_schedule(dtype, rng):
    model = Model(dtype)
    rate = lambda step: np.float64(0.1) / (1 + step)  # noqa: E731
    opt = setup(OptimiserChain(WeightDecay(Step(0.5, 0.0, 2)), Descent(rate)), model)
    x = [v.astype(np.float64) for v in values(model)]
    for step in range(4):
        grads = some_gradients(model, rng, dtype)
        update(opt, model, grads)
        decay = 0.5 if step < 2 else 0.0
        x = [
            v - 0.1 / (1 + step) * (g.astype(np.float64) + decay * v)
            for v, g in zip(x, grads.values(), strict=True)
        ]
    for p, v in zip(params(model), x, strict=True):
        assert p.dtype == dtype
        np.testing.assert_allclose(p.value, v, rtol=1e-5, atol=1e-6)


def test_a_schedule_counts_the_updates_of_the_optimiser_not_of_the_parameter(rng):
    model = Model()
    rates = []

    def rate(step):
        rates.append(step)
        return 0.1

    opt = setup(Descent(rate), model)
    freeze(opt.table)
    for _ in range(2):
        update(opt, model, some_gradients(model, rng))
    thaw(opt)
    update(opt, model, some_gradients(model, rng))
    assert sorted(set(rates)) == [0, 1, 2]


def test_adjust_may_bring_a_schedule(rng):
    model = Model()
    opt = setup(Descent(1.0), model)
    update(opt, model, some_gradients(model, rng))
    adjust(opt, Exp(1.0, 0.5))
    before, grads = values(model), some_gradients(model, rng)
    update(opt, model, grads)
    np.testing.assert_allclose(model.table.value, before[0] - 0.5 * grads["table"])


# Saving.


def assert_equal_trees(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal_trees(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, two in zip(a, b, strict=True):
            assert_equal_trees(one, two)
    else:
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("flat", [False, True])
def test_training_goes_on_from_a_saved_state_bit_for_bit(name, flat, rng):
    rule, _ = TWINS[name]
    model = Model(flat=flat)
    opt = setup(rule, model)
    history = [some_gradients(model, rng) for _ in range(8)]
    for grads in history[:4]:
        update(opt, model, grads)
    adjust_if_it_learns(opt.inner, 0.02)
    freeze(opt.scale)
    saved, weights = opt.state_dict(), values(model)
    for grads in history[4:]:
        update(opt, model, grads)

    other = Model(seed=9, flat=not flat)
    other_opt = setup(rule, other)
    update(other_opt, other, history[0])
    for p, x in zip(params(other), weights, strict=True):
        p[...] = x
    other_opt.load_state_dict(saved)
    assert_equal_trees(other_opt.state_dict(), saved)
    for grads in history[4:]:
        update(other_opt, other, grads)
    assert_same_bits(values(model), values(other))
    assert_equal_trees(opt.state_dict(), other_opt.state_dict())


def adjust_if_it_learns(opt, eta):
    try:
        adjust(opt, eta)
    except TypeError:
        pass


def test_a_saved_state_is_plain_data_and_a_copy(rng):
    model = Model()
    opt = setup(OptimiserChain(ClipNorm(), Adam(Exp(0.1, 0.9))), model)
    update(opt, model, some_gradients(model, rng))
    saved = opt.state_dict()
    frozen_in_time = copy.deepcopy(saved)
    update(opt, model, some_gradients(model, rng))
    assert_equal_trees(saved, frozen_in_time)
    json.dumps(saved, default=lambda array: array.tolist())
    first = saved["params"]["table"]
    assert first["count"] == saved["step"] == 1
    assert "eta" not in first["hyperparameters"][1], "a schedule is code, not data"


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(rng):
    model = Model()
    opt = setup(Adam(), model)
    update(opt, model, some_gradients(model, rng))
    before = opt.state_dict()
    with pytest.raises(StateError, match="AdaMax"):
        opt.load_state_dict(setup(AdaMax(), model).state_dict())
    with pytest.raises(StateError, match=r"inner\.bias"):
        opt.load_state_dict(setup(Adam(), {"table": model.table}).state_dict())
    wrong = copy.deepcopy(before)
    wrong["params"]["scale"]["state"][0]["mean"] = np.zeros(3)
    wrong["params"]["table"]["count"] = 77
    with pytest.raises(ShapeError, match="mean of scale"):
        opt.load_state_dict(wrong)
    wrong = copy.deepcopy(before)
    del wrong["params"]["scale"]["state"][0]["mean"]
    with pytest.raises(StateError, match="scale has the states"):
        opt.load_state_dict(wrong)
    assert_equal_trees(opt.state_dict(), before)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("flat", [False, True])
def test_a_copy_of_model_and_optimiser_goes_its_own_way(copier, flat, rng):
    model = Model(flat=flat)
    opt = setup(Adam(), model)
    update(opt, model, some_gradients(model, rng))
    twin_model, twin_opt = copier((model, opt))
    grads = some_gradients(model, rng)
    update(opt, model, grads)
    before = values(model)
    update(twin_opt, twin_model, grads)
    assert_same_bits(values(twin_model), before)
    assert_same_bits(values(model), before)


def test_parameters_that_move_into_a_flat_buffer_are_followed(rng):
    model, other = Model(), Model()
    opt, other_opt = setup(Adam(), model), setup(Adam(), other)
    for i in range(4):
        if i == 2:
            flatten(model)
        grads = some_gradients(model, rng)
        update(opt, model, grads)
        update(other_opt, other, grads)
    assert_same_bits(values(model), values(other))


# Rules of one's own.


class SignOfMomentum(Rule):
    """A rule of a user's own with a number in its state, not elementwise."""

    def __init__(self, eta):
        self.eta = eta

    def init(self, x):
        return {"mean": np.zeros_like(x), "largest": 0.0}

    def apply(self, state, x, dx, t):
        assert x.shape == dx.shape == state["mean"].shape
        state["mean"] = np.asarray(0.5 * state["mean"] + dx)
        state["largest"] = max(state["largest"], float(np.abs(dx).max()))
        return self.eta * np.sign(state["mean"]) * state["largest"]


@pytest.mark.parametrize("flat", [False, True])
def test_a_rule_of_ones_own_gets_whole_parameters_and_may_keep_numbers(flat, rng):
    model = Model(flat=flat)
    before = values(model)
    opt = setup(OptimiserChain(ClipNorm(1e9), SignOfMomentum(0.5), ClipNorm(1e9)), model)
    history = [some_gradients(model, rng) for _ in range(3)]
    for grads in history:
        update(opt, model, grads)
    for path, x, p in zip(history[0], before, params(model), strict=True):
        mean, largest = 0, 0
        for grads in history:
            mean = 0.5 * mean + grads[path]
            largest = max(largest, np.abs(grads[path]).max())
            x -= 0.5 * np.sign(mean) * largest
        np.testing.assert_allclose(p.value, x)
    saved = opt.state_dict()
    assert isinstance(saved["params"]["table"]["state"][1]["largest"], float)
    other = Model(seed=3)
    other_opt = setup(OptimiserChain(ClipNorm(1e9), SignOfMomentum(0.1), ClipNorm(1e9)), other)
    other_opt.load_state_dict(saved)
    assert_equal_trees(other_opt.state_dict(), saved)
    for p, q in zip(params(model), params(other), strict=True):
        q[...] = p.value
    update(opt, model, history[0])
    update(other_opt, other, history[0])
    assert_same_bits(values(model), values(other))


def test_a_rule_of_ones_own_may_see_the_only_parameter_of_a_flat_buffer():
    p = Param(np.arange(6.0).reshape(2, 3))
    flatten([p])
    opt = setup(SignOfMomentum(0.5), [p])
    update(opt, [p], {p: np.ones((2, 3))})
    np.testing.assert_array_equal(p.value, np.arange(6.0).reshape(2, 3) - 0.5)


def test_an_elementwise_rule_keeps_nothing_but_arrays_of_the_parameters_shape():
    class Counting(Descent):
        def init(self, x):
            return {"count": 0}

    with pytest.raises(ShapeError, match=r"Counting: the state of 0 must be arrays"):
        setup(Counting(), [Param(np.zeros(2))])


def test_an_update_does_not_keep_the_gradient_alive():
    p = Param(np.zeros(3))
    opt = setup(Adam(), [p])
    gradient_of_p = np.ones(3)
    before = sys.getrefcount(gradient_of_p)
    update(opt, [p], {p: gradient_of_p})
    assert sys.getrefcount(gradient_of_p) == before


def test_a_rule_may_be_a_dataclass_that_can_change():
    @dataclasses.dataclass
    class Plain(Rule):
        eta: float = 0.5

        def apply(self, state, x, dx, t):
            return self.eta * dx

    p = Param(np.zeros(2))
    opt = setup(Plain(), [p])
    adjust(opt, 0.25)
    update(opt, [p], {p: np.ones(2)})
    np.testing.assert_array_equal(p.value, [-0.25, -0.25])


def test_a_rule_without_apply_says_so():
    p = Param(np.zeros(2))
    with pytest.raises(NotImplementedError, match="Rule defines no apply"):
        update(setup(Rule(), [p]), [p], {p: np.ones(2)})


# Errors and printing.


@pytest.mark.parametrize(
    "make",
    [
        lambda: Adam(-1.0),
        lambda: Adam(0.1, (0.9, 1.0)),
        lambda: Momentum(0.1, 1.5),
        lambda: ClipNorm(0.0),
        lambda: ClipNorm(1.0, p=0),
        lambda: ClipGrad(-1.0),
        lambda: WeightDecay(-1e-3),
        lambda: RMSProp(epsilon=-1.0),
        lambda: Descent(lambda step: -1.0).at(0),
    ],
)
def test_hyperparameters_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError, match=r"is .*(expected|cannot)"):
        make()


def test_setup_wants_a_rule_and_parameters():
    with pytest.raises(TypeError, match="The rule comes first"):
        setup(Model(), Adam())
    with pytest.raises(StateError, match="no parameters"):
        setup(Adam(), [1, 2])
    with pytest.raises(TypeError, match="is no rule"):
        OptimiserChain(Adam(), 0.1)


def test_update_names_what_does_not_fit_and_changes_nothing(rng):
    model = Model()
    opt = setup(Adam(), model)
    before, saved = values(model), opt.state_dict()
    grads = some_gradients(model, rng)
    with pytest.raises(ShapeError, match=r"inner\.bias has shape \(5,\), expected \(4,\)"):
        update(opt, model, {**grads, "inner.bias": np.zeros(5)})
    with pytest.raises(StateError, match=r"'inner\.bas', which is no parameter"):
        update(opt, model, {"inner.bas": np.zeros(4)})
    with pytest.raises(StateError, match="no parameter of the model"):
        update(opt, model, {Param(np.zeros(4)): np.zeros(4)})
    with pytest.raises(StateError, match=r"set up with the parameter table.*setup\(rule, model\)"):
        update(opt, copy.deepcopy(model), grads)
    with pytest.raises(TypeError, match=r"grads\[0\]"):
        update(opt, model, (grads, None))
    with pytest.raises(TypeError, match=r"opt = setup\(rule, model\)"):
        update(Adam(), model, grads)
    with pytest.raises(TypeError, match="real numbers"):
        update(opt, model, {**grads, "table": "text"})
    assert_same_bits(values(model), before)
    assert_equal_trees(opt.state_dict(), saved)


def test_a_parameter_that_was_replaced_is_noticed(rng):
    model = Model()
    opt = setup(Adam(), model)
    model.inner.bias = Param(np.zeros(4))
    with pytest.raises(StateError, match=r"inner\.bias"):
        update(opt, model, some_gradients(model, rng))


def test_parts_of_an_optimiser_that_do_not_exist_are_errors():
    opt = setup(Adam(), {"layers": [Model(), Model()]})
    freeze(opt.layers[1].inner)
    freeze(opt["layers"][0]["table"])
    with pytest.raises(AttributeError, match=r"layers\.1\.weight"):
        opt.layers[1].weight  # noqa: B018
    with pytest.raises(KeyError, match=r"layers\.2"):
        opt.layers[2]
    with pytest.raises(AttributeError):
        opt.lay  # noqa: B018
    with pytest.raises(StateError, match="Model holds"):
        freeze(opt, Model())
    with pytest.raises(TypeError, match=r"setup\(rule, model\)"):
        freeze(Model())


def test_printing_shows_rules_counts_and_what_is_frozen(rng):
    model = Model()
    opt = setup(OptimiserChain(ClipNorm(1.0), Adam(0.01)), model)
    freeze(opt.table)
    update(opt, model, some_gradients(model, rng))
    text = repr(opt)
    assert "Adam(eta=0.01" in text and "1 updates" in text
    assert "table: OptimiserChain(" in text and ", frozen" in text.splitlines()[1]
    assert "inner.weight" in repr(opt.inner) and "table" not in repr(opt.inner)


def test_every_public_name_exists():
    assert all(hasattr(optim, name) for name in optim.__all__)


def test_gradients_of_another_model_are_refused():
    ours, other = recur.Dense(2, 3), recur.Dense(2, 3)
    opt = recur.setup(recur.Descent(0.1), ours)
    before = ours.weight.value.copy()
    grads = recur.gradient(lambda m: m(np.ones(2)).sum(), other)
    with pytest.raises(recur.StateError, match="those of another model"):
        recur.update(opt, ours, grads)
    np.testing.assert_array_equal(ours.weight.value, before)


@pytest.mark.parametrize("number", ["0.1", [0.1], {}])
def test_a_hyperparameter_that_is_no_number_is_refused_by_name(number):
    with pytest.raises(TypeError, match=r"Descent: eta is .*, expected a number or a schedule"):
        recur.Descent(number)


@pytest.mark.parametrize("beta", [0.9, (0.9,), (0.9, 0.99, 0.999), "ab", (0.9, 1.0)])
def test_the_two_numbers_of_beta_are_two(beta):
    with pytest.raises(ValueError, match=r"Adam: beta is .*, expected two numbers from 0"):
        recur.Adam(1e-3, beta)


@pytest.mark.parametrize("number", [None, "a", 1j])
def test_a_gradient_that_holds_no_real_numbers_is_refused_by_path(number):
    m = {"w": Param(np.ones((2, 3)))}
    opt = recur.setup(recur.Adam(), m)
    with pytest.raises(TypeError, match=r"update: the gradient of w: .*expected real numbers"):
        recur.update(opt, m, {"w": np.full((2, 3), number)})
    np.testing.assert_array_equal(m["w"].value, np.ones((2, 3)))
