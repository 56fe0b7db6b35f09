"""Optimisers against torch's, where torch has the same rule."""

from __future__ import annotations

import numpy as np
import pytest

from recur.optim import (
    AdaDelta,
    AdaGrad,
    Adam,
    AdaMax,
    AdamW,
    ClipGrad,
    ClipNorm,
    Cosine,
    Descent,
    Momentum,
    Nesterov,
    OptimiserChain,
    RAdam,
    RMSProp,
    Step,
    WeightDecay,
    setup,
    update,
)
from recur.tape import Param

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

SHAPES = [(4, 3), (5,), ()]

# name: (our rule, torch's optimiser of the same parameters)
PAIRS = {
    "Descent": (Descent(0.05), lambda ps: torch.optim.SGD(ps, lr=0.05)),
    "Momentum": (Momentum(0.05, 0.8), lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.8)),
    "Nesterov": (
        Nesterov(0.05, 0.8),
        lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.8, nesterov=True),
    ),
    "WeightDecay": (
        OptimiserChain(WeightDecay(0.1), Momentum(0.05, 0.8)),
        lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.8, weight_decay=0.1),
    ),
    "RMSProp": (RMSProp(0.01), lambda ps: torch.optim.RMSprop(ps, lr=0.01, alpha=0.9)),
    "RMSProp centred": (
        RMSProp(0.01, centred=True),
        lambda ps: torch.optim.RMSprop(ps, lr=0.01, alpha=0.9, centered=True),
    ),
    "AdaGrad": (
        AdaGrad(0.1),
        lambda ps: torch.optim.Adagrad(ps, lr=0.1, eps=1e-8, initial_accumulator_value=1e-8),
    ),
    "AdaDelta": (AdaDelta(), lambda ps: torch.optim.Adadelta(ps, lr=1.0, rho=0.9, eps=1e-8)),
    "Adam": (Adam(0.01), lambda ps: torch.optim.Adam(ps, lr=0.01)),
    "Adam with weight decay": (
        OptimiserChain(WeightDecay(0.1), Adam(0.01)),
        lambda ps: torch.optim.Adam(ps, lr=0.01, weight_decay=0.1),
    ),
    "AdamW": (
        AdamW(0.01, lambda_=0.1),
        lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
    ),
    "AdaMax": (AdaMax(0.01), lambda ps: torch.optim.Adamax(ps, lr=0.01, eps=1e-8)),
}


def make(rng, dtype):
    ours = [Param(np.asarray(rng.standard_normal(shape), dtype)) for shape in SHAPES]
    theirs = [torch.nn.Parameter(torch.tensor(p.value)) for p in ours]
    return ours, theirs


def step(opt, ours, optimiser, theirs, rng, scale=1.0):
    grads = [np.asarray(scale * rng.standard_normal(p.shape), p.dtype) for p in ours]
    update(opt, ours, dict(zip(ours, grads, strict=True)))
    for p, g in zip(theirs, grads, strict=True):
        p.grad = torch.tensor(g)
    optimiser.step()


def assert_equal(ours, theirs, dtype):
    tol = {"rtol": 1e-7, "atol": 1e-8} if dtype == np.float64 else {"rtol": 1e-4, "atol": 1e-5}
    for p, q in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(p.value, q.detach().numpy(), **tol)


@pytest.mark.parametrize("name", PAIRS)
def test_a_rule_moves_weights_as_torch_does_over_many_steps(name, dtype, rng):
    rule, make_optimiser = PAIRS[name]
    ours, theirs = make(rng, dtype)
    opt, optimiser = setup(rule, ours), make_optimiser(theirs)
    for _ in range(50):
        step(opt, ours, optimiser, theirs, rng)
    assert_equal(ours, theirs, dtype)


def test_radam_steps_as_torchs_does_once_both_rectify(dtype, rng):
    # Below a length of 5 torch leaves out the rectification, the paper below 4: start after that.
    ours, theirs = make(rng, dtype)
    opt = setup(RAdam(0.01), ours)
    history = [[np.asarray(rng.standard_normal(p.shape), dtype) for p in ours] for _ in range(10)]
    for grads in history:
        update(opt, ours, dict(zip(ours, grads, strict=True)))
    optimiser = torch.optim.RAdam(theirs, lr=0.01)
    saved = opt.state_dict()["params"].values()
    for p, q, one in zip(ours, theirs, saved, strict=True):
        q.data.copy_(torch.tensor(p.value))
        (state,) = one["state"]
        optimiser.state[q] = {
            "step": torch.tensor(float(one["count"])),
            "exp_avg": torch.tensor(state["mean"]),
            "exp_avg_sq": torch.tensor(state["square"]),
        }
    for _ in range(20):
        step(opt, ours, optimiser, theirs, rng)
    assert_equal(ours, theirs, dtype)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
def test_clip_norm_clips_as_clip_grad_norm_does(p, dtype, rng):
    ours, theirs = make(rng, dtype)
    opt = setup(OptimiserChain(ClipNorm(1.5, p), Descent(0.1)), ours)
    for _ in range(5):
        grads = [np.asarray(rng.standard_normal(q.shape), dtype) for q in ours]
        update(opt, ours, dict(zip(ours, grads, strict=True)))
        for q, g in zip(theirs, grads, strict=True):
            q.grad = torch.tensor(g)
        torch.nn.utils.clip_grad_norm_(theirs, 1.5, p)
        torch.optim.SGD(theirs, lr=0.1).step()
    for one, two in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.value, two.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_clip_grad_clips_as_clip_grad_value_does(dtype, rng):
    ours, theirs = make(rng, dtype)
    grads = [np.asarray(rng.standard_normal(q.shape), dtype) for q in ours]
    update(
        setup(OptimiserChain(ClipGrad(0.3), Descent(0.1)), ours),
        ours,
        dict(zip(ours, grads, strict=True)),
    )
    for q, g in zip(theirs, grads, strict=True):
        q.grad = torch.tensor(g)
    torch.nn.utils.clip_grad_value_(theirs, 0.3)
    torch.optim.SGD(theirs, lr=0.1).step()
    assert_equal(ours, theirs, dtype)


def test_schedules_give_torchs_learning_rates(rng):
    parameter = torch.nn.Parameter(torch.zeros(1))
    schedulers = torch.optim.lr_scheduler
    cases = [
        (Step(0.1, 0.5, 3), lambda o: schedulers.StepLR(o, 3, 0.5)),
        (Step(0.1, 0.5, [2, 5]), lambda o: schedulers.MultiStepLR(o, [2, 7], 0.5)),
        (
            Cosine(0.1, 0.01, 10, restart=True),
            lambda o: schedulers.CosineAnnealingWarmRestarts(o, 10, eta_min=0.01),
        ),
    ]
    for schedule, make_scheduler in cases:
        optimiser = torch.optim.SGD([parameter], lr=0.1)
        scheduler = make_scheduler(optimiser)
        for t in range(25):
            np.testing.assert_allclose(schedule(t), scheduler.get_last_lr()[0], rtol=1e-9)
            optimiser.step()
            scheduler.step()
