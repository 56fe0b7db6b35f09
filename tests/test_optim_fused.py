"""Updates in one pass against the rules' own `apply`, bit for bit."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import recur
from recur.gradients import flatten_parameters
from recur.optim import (
    Adam,
    AdamW,
    AMSGrad,
    ClipGrad,
    ClipNorm,
    Cosine,
    Descent,
    Momentum,
    OptimiserChain,
    WeightDecay,
    adjust,
    plan,
    setup,
    update,
)
from recur.tape import Param

RULES = {
    "Descent": Descent(0.1),
    "Momentum": Momentum(0.01, 0.8),
    "Adam": Adam(0.01),
    "AdamW": AdamW(0.01, lambda_=0.1),
    "AdamW without eta": AdamW(0.01, lambda_=0.1, couple=False),
    "a schedule": Adam(Cosine(0.01, 0.001, 7)),
    "a clipped norm": OptimiserChain(ClipNorm(0.5), Adam(0.01)),
    "a norm that is not clipped": OptimiserChain(ClipNorm(1e9), Momentum(0.01)),
    "clipped twice": OptimiserChain(ClipNorm(2.0), ClipGrad(0.1), ClipNorm(0.5), AdamW(0.01)),
}


def model(dtype):
    rng = np.random.default_rng(0)
    # larger than a block, and with sizes that are no multiple of a register's
    return [Param(rng.normal(size=shape).astype(dtype)) for shape in ((3, 5), (7,), (300, 151))]


def trained(m, rule, rng, steps=6):
    opt = setup(rule, m)
    for step in range(steps):
        if step == 4:
            adjust(opt, eta=0.02)
        update(opt, m, {str(i): rng.normal(size=p.shape).astype(p.dtype) for i, p in enumerate(m)})
    return [p.value for p in m], opt


@pytest.fixture
def fused_rules(monkeypatch):
    """The rules that kernels ran."""
    ran, fused = [], plan.fused

    def noting(rule, dtype):
        found = fused(rule, dtype)
        ran.extend([rule] if found else [])
        return found

    monkeypatch.setattr(plan, "fused", noting)
    return ran


@pytest.mark.parametrize("flat", [False, True], ids=["apart", "flat"])
@pytest.mark.parametrize("rule", RULES)
def test_one_pass_has_the_bits_of_the_rule(rule, flat, dtype, monkeypatch, fused_rules):
    models = model(dtype), model(dtype)
    if flat:
        for m in models:
            flatten_parameters(m)
    got, opt = trained(models[0], RULES[rule], np.random.default_rng(1))
    assert fused_rules
    monkeypatch.setattr(plan, "fused", lambda rule, dtype: None)
    want, other = trained(models[1], RULES[rule], np.random.default_rng(1))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)
    for a, b in zip(opt._by_path.values(), other._by_path.values(), strict=True):
        for mine, theirs in zip(a.states, b.states, strict=True):
            for name in mine:
                np.testing.assert_array_equal(mine[name], theirs[name], strict=True)


class Halved(Adam):
    def apply(self, state, x, dx, t):
        return super().apply(state, x, dx, t) * 0.5


@pytest.mark.parametrize(
    "rule",
    [Halved(0.01), AMSGrad(0.01), OptimiserChain(WeightDecay(0.1), Descent(0.1))],
    ids=["a subclass", "a relative", "two rules"],
)
def test_other_rules_run_as_they_are(rule, dtype, fused_rules):
    m, twin = model(dtype), model(dtype)
    trained(m, rule, np.random.default_rng(1))
    assert not fused_rules
    if isinstance(rule, Halved):
        trained(twin, Adam(0.005), np.random.default_rng(1), steps=4)
        m = model(dtype)
        trained(m, rule, np.random.default_rng(1), steps=4)
        for a, b in zip(m, twin, strict=True):
            np.testing.assert_allclose(a.value, b.value, rtol=1e-4, atol=1e-6)


def test_gradients_of_another_dtype_are_converted(fused_rules):
    m, twin = model(np.float32), model(np.float32)
    grads = [np.random.default_rng(2).normal(size=p.shape) for p in m]
    update(setup(Adam(0.01), m), m, {str(i): g for i, g in enumerate(grads)})
    update(
        setup(Adam(0.01), twin), twin, {str(i): g.astype(np.float32) for i, g in enumerate(grads)}
    )
    for a, b in zip(m, twin, strict=True):
        np.testing.assert_array_equal(a.value, b.value)


def test_gradients_are_left_and_writes_are_seen(dtype):
    m = recur.Chain(recur.LSTM(3, 4, dtype=dtype), recur.Dense(4, 2, dtype=dtype))
    x = np.ones((3, 2), dtype)
    m(x)
    grads = recur.gradient(lambda m: (m(x) ** 2).sum(), m)
    held = {path: grads[path].copy() for path in recur.named_params(m)}
    fresh = copy.deepcopy(m)
    update(setup(Adam(0.1), m), m, grads)
    for path, grad in held.items():
        np.testing.assert_array_equal(grads[path], grad)
    assert np.abs(m(x) - fresh(x)).max() > 1e-3
