"""Losses and their gradients against torch's, where torch has the same loss."""

from __future__ import annotations

import numpy as np
import pytest

from recur import losses
from recur.tape import Tape, value

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle
F = torch.nn.functional


def softmax(x):
    e = np.exp(x - x.max(0))
    return e / e.sum(0)


# name: (ours, torch's, how yhat is made of normal numbers, how y is)
PAIRS = {
    "mse": (losses.mse, F.mse_loss, None, None),
    "mae": (losses.mae, F.l1_loss, None, None),
    "huber": (
        lambda p, y: losses.huber(p, y, delta=0.7),
        lambda p, y: F.huber_loss(p, y, delta=0.7),
        None,
        None,
    ),
    "binarycrossentropy": (
        lambda p, y: losses.binarycrossentropy(p, y, eps=0),
        F.binary_cross_entropy,
        lambda a: 1 / (1 + np.exp(-a)),
        lambda a: a > 0,
    ),
    "logitbinarycrossentropy": (
        losses.logitbinarycrossentropy,
        F.binary_cross_entropy_with_logits,
        lambda a: 10 * a,
        lambda a: a > 0,
    ),
    "poisson_loss": (
        losses.poisson_loss,
        lambda p, y: F.poisson_nll_loss(p, y, log_input=False, eps=0),
        np.exp,
        lambda a: np.round(np.exp(a)),
    ),
    "kldivergence": (
        lambda p, y: losses.kldivergence(p, y, eps=0),
        lambda p, y: (
            F.kl_div(p.log().movedim(0, -1), y.movedim(0, -1), reduction="sum")
            / (p.numel() / len(p))
        ),
        softmax,
        softmax,
    ),
    "logitcrossentropy": (
        losses.logitcrossentropy,
        lambda p, y: F.cross_entropy(p.movedim(0, 1), y.movedim(0, 1)),
        lambda a: 10 * a,
        softmax,
    ),
}


def both(ours, theirs, p, y):
    """Our loss and gradient, and torch's."""
    with Tape() as tape:
        x = tape.watch(p)
        loss = ours(x, y)
        (gradient,) = tape.gradient(loss, [x])
        ours_too = value(loss), gradient
    leaf = torch.tensor(p, requires_grad=True)
    result = theirs(leaf, torch.tensor(np.asarray(y)))
    result.backward()
    return ours_too, (result.item(), leaf.grad.numpy())


def assert_close(ours, theirs, dtype):
    tol = {"rtol": 1e-9, "atol": 1e-12} if dtype == np.float64 else {"rtol": 2e-4, "atol": 2e-6}
    for one, two in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, two, **tol)


@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients_are_torchs(name, dtype, rng):
    ours, theirs, make_p, make_y = PAIRS[name]
    p, y = rng.standard_normal((2, 4, 3, 5))
    p = p if make_p is None else make_p(p)
    y = y if make_y is None else make_y(y)
    assert_close(*both(ours, theirs, p.astype(dtype), np.asarray(y, dtype)), dtype)


def test_masked_classes_are_torchs_ignored_index(dtype, rng):
    p = rng.standard_normal((4, 3, 5)).astype(dtype)
    y = rng.integers(0, 4, (3, 5))
    mask = rng.random((3, 5)) < 0.6
    y[~mask] = -100
    assert_close(
        *both(
            lambda p, y: losses.logitcrossentropy(p, y, mask=mask),
            lambda p, y: F.cross_entropy(p.movedim(0, 1), y, ignore_index=-100),
            p,
            y,
        ),
        dtype,
    )


def test_ctc_is_torchs(dtype, rng):
    C, B, T = 6, 4, 20
    p = (3 * rng.standard_normal((C, B, T))).astype(dtype)
    sizes, steps = [5, 1, 0, 7], [20, 9, 4, 16]
    labels = [rng.integers(0, C - 1, n) for n in sizes]
    mask = np.arange(T) < np.array(steps)[:, None]

    def theirs(p, y):
        return F.ctc_loss(
            p.movedim(2, 0).movedim(1, 2).log_softmax(2), y, steps, sizes, C - 1, reduction="sum"
        )

    targets = np.concatenate(labels)
    assert_close(
        *both(lambda p, _: losses.ctc_loss(p, labels, mask=mask, agg=sum), theirs, p, targets),
        dtype,
    )
