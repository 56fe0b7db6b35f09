"""ASGD, its averaged weights, and the trigger of NT-ASGD."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import recur
from recur import ASGD, ClipNorm, Descent, OptimiserChain, Param, WeightDecay, setup, update
from recur.optim import (
    NonMonotonicTrigger,
    averaged,
    is_averaging,
    start_averaging,
    swap_in_average,
    swap_out_average,
)


def model(dtype=np.float64):
    return {
        "a": Param(np.arange(6, dtype=dtype).reshape(2, 3)),
        "b": Param(np.ones(3, dtype), order="F"),
    }


def gradients(rng, steps, dtype=np.float64):
    return [
        {"a": rng.normal(size=(2, 3)).astype(dtype), "b": rng.normal(size=3).astype(dtype)}
        for _ in range(steps)
    ]


def values(m):
    return {name: p.value.copy() for name, p in m.items()}


def average_of(opt, m):
    with averaged(opt):
        return values(m)


def near(got, want, dtype=np.float64):
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-12 if dtype == "f8" else 2e-6)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("start", [0, 3])
def test_the_average_is_the_mean_of_the_weights_since_the_start(start, flat, dtype, rng):
    m = model(dtype)
    if flat:
        recur.flatten_parameters(m)
    opt = setup(OptimiserChain(WeightDecay(0.1), ASGD(0.05, start)), m)
    plain = copy.deepcopy(m)
    descent = setup(OptimiserChain(WeightDecay(0.1), Descent(0.05)), plain)
    history = []
    for t, grads in enumerate(gradients(rng, 8, dtype), 1):
        update(opt, m, grads)
        update(descent, plain, grads)
        history.append(values(m))
        near(history[-1], values(plain), dtype)
        kept = history[start:] or history[-1:]
        want = {name: np.mean([h[name] for h in kept], axis=0) for name in m}
        near(average_of(opt, m), want, dtype)
        near(values(m), history[-1], dtype)
        assert t == len(history)


def test_averaging_starts_when_it_is_told_to(rng):
    m = model()
    opt = setup(ASGD(0.1), m)
    history = []
    for t, grads in enumerate(gradients(rng, 6)):
        if t == 4:
            start_averaging(opt)
            assert is_averaging(opt)
            start_averaging(opt)  # again: changes nothing
        assert is_averaging(opt) == (t >= 4)
        update(opt, m, grads)
        history.append(values(m))
    near(average_of(opt, m), {n: np.mean([h[n] for h in history[4:]], axis=0) for n in m})


def test_a_parameter_updated_less_often_averages_its_own_updates(rng):
    m = model()
    opt = setup(ASGD(0.1), m)
    many = gradients(rng, 6)
    for grads in many[:3]:
        update(opt, m, {"a": grads["a"]})
    start_averaging(opt)
    history = []
    for grads in many[3:]:
        update(opt, m, grads)
        history.append(values(m))
    near(average_of(opt, m), {n: np.mean([h[n] for h in history], axis=0) for n in m})


def test_updates_are_refused_while_the_model_holds_its_averages(rng):
    m = model()
    opt = setup(OptimiserChain(ClipNorm(1.0), ASGD(0.1, 0)), m)
    many = gradients(rng, 4)
    for grads in many[:3]:
        update(opt, m, grads)
    current = values(m)
    swap_in_average(opt)
    average = values(m)
    swap_in_average(opt)  # again: changes nothing
    near(values(m), average)
    saved = copy.deepcopy(opt.state_dict())
    with pytest.raises(recur.StateError, match=r"averaged weights. .* swap_out_average"):
        update(opt, m, many[3])
    near(values(m), average)
    assert repr(opt.state_dict()) == repr(saved)
    with averaged(opt):
        near(values(m), average)
    near(values(m), average)  # an inner `averaged` leaves them in
    swap_out_average(opt)
    near(values(m), current)
    swap_out_average(opt)
    near(values(m), current)
    update(opt, m, many[3])


def test_averages_go_out_again_when_evaluation_fails(rng):
    m = model()
    opt = setup(ASGD(0.1, 0), m)
    for grads in gradients(rng, 3):
        update(opt, m, grads)
    before = values(m)
    with pytest.raises(RuntimeError), averaged(opt):
        assert not np.array_equal(m["a"].value, before["a"])
        raise RuntimeError
    near(values(m), before)


def test_before_averaging_the_average_is_the_weights_as_they_are(rng):
    m = model()
    opt = setup(ASGD(0.1), m)
    near(average_of(opt, m), values(m))
    update(opt, m, gradients(rng, 1)[0])
    m["a"][...] = 7  # loaded or written since
    near(average_of(opt, m), values(m))
    near(values(m), {"a": np.full((2, 3), 7.0)})


@pytest.mark.parametrize("swapped", [False, True])
def test_a_run_goes_on_from_its_state_also_if_averages_are_swapped_in(swapped, rng):
    many = gradients(rng, 9)

    def some(m, opt, part):
        for grads in part:
            update(opt, m, grads)

    straight = model()
    opt = setup(ASGD(0.1), straight)
    some(straight, opt, many[:3])
    start_averaging(opt)
    some(straight, opt, many[3:6])
    if swapped:
        swap_in_average(opt)
    weights, state = recur.state_dict(straight), copy.deepcopy(opt.state_dict())
    swap_out_average(opt)
    some(straight, opt, many[6:])

    resumed = model()
    other = setup(ASGD(0.1), resumed)
    recur.load_state_dict(resumed, weights)
    other.load_state_dict(state)
    swap_out_average(other)
    some(resumed, other, many[6:])
    for name in resumed:
        np.testing.assert_array_equal(resumed[name].value, straight[name].value)
    for name, want in average_of(opt, straight).items():
        np.testing.assert_array_equal(average_of(other, resumed)[name], want)


def test_packed_weights_follow_a_swap(rng):
    m = recur.LSTM(3, 4, rng=rng)
    opt = setup(ASGD(0.5, 0), m)
    X = rng.normal(size=(3, 2, 5)).astype(np.float32)
    for _ in range(3):
        recur.reset(m)
        update(opt, m, recur.gradient(lambda m: (m(X) ** 2).sum(), m))
    recur.reset(m)
    current = m(X)
    with averaged(opt):
        recur.reset(m)
        inside = m(X)
        np.testing.assert_array_equal(inside, recur.reset(copy.deepcopy(m))(X))
        assert not np.array_equal(inside, current)
    recur.reset(m)
    np.testing.assert_array_equal(m(X), current)


def test_asgd_must_be_the_last_rule():
    m = model()
    opt = setup(OptimiserChain(ASGD(0.1), WeightDecay(0.1)), m)
    for call in (start_averaging, swap_in_average, is_averaging):
        with pytest.raises(recur.StateError, match=r"a: its last rule is WeightDecay.*ASGD"):
            call(opt)
    with pytest.raises(TypeError, match="no swapped that may change"):
        recur.adjust(ASGD(0.1), swapped=True)
    with pytest.raises(ValueError, match="start is -1"):
        ASGD(0.1, -1)
    assert repr(ASGD(0.1)) == "ASGD(eta=0.1, start=None)"


# ---------------------------------------------------------------------- the trigger


def test_the_trigger_is_due_when_the_last_n_losses_brought_nothing():
    trigger = NonMonotonicTrigger(n=2)
    losses = [5.0, 4.0, 3.0, 3.5, 3.2, 3.1]
    # The lowest of those before, the last two not counted: none, none, none, 5, 4, 3.
    assert [trigger.due(loss) for loss in losses] == [False] * 5 + [True]
    assert trigger.losses == losses
    falling = NonMonotonicTrigger(n=5)
    assert not any(falling.due(loss) for loss in np.linspace(9, 1, 20))
    at_once = NonMonotonicTrigger(n=0)
    assert [at_once.due(loss) for loss in (1.0, 0.9, 0.95)] == [False, False, True]


def test_train_triggers_averaging_and_resumes_with_the_same_numbers(tmp_path):
    x = np.random.default_rng(1).normal(size=(3, 40)).astype(np.float32)
    data = [x[:, 4 * i : 4 * i + 4] for i in range(10)]

    def run(epochs, checkpoint=None, resume=False):
        m = recur.Dense(3, 2, rng=np.random.default_rng(2))
        opt = setup(ASGD(0.9), m)
        trigger = NonMonotonicTrigger(n=2)

        def validation(m):
            with averaged(opt):
                return float(((m(x) - x[:2]) ** 2).mean())

        history = recur.train(
            lambda m, x: ((m(x) - x[:2] - np.sin(9 * x[2:])) ** 2).mean(),
            m,
            data,
            opt,
            epochs=epochs,
            validation=validation,
            callbacks=trigger,
            progress=False,
            checkpoint=checkpoint,
            resume=resume,
        )
        return m, opt, trigger, history

    m, opt, trigger, history = run(8)
    assert is_averaging(opt) and 2 < len(trigger.losses) < 8  # it looks no further once it is due
    path = tmp_path / "c.safetensors"
    run(len(trigger.losses) + 1, checkpoint=path)  # stops while it averages
    again, other, _, resumed = run(8, checkpoint=path, resume=True)
    assert resumed.losses == history.losses and resumed.validations == history.validations
    np.testing.assert_array_equal(again.weight.value, m.weight.value)
    with averaged(opt), averaged(other):
        np.testing.assert_array_equal(again.weight.value, m.weight.value)


@pytest.mark.oracle
def test_asgd_agrees_with_torch(rng):
    torch = pytest.importorskip("torch")
    m = model()
    opt = setup(ASGD(0.1, 1), m)  # torch's average takes its second weights twice, not the first
    theirs = {name: torch.tensor(p.value.copy(), requires_grad=True) for name, p in m.items()}
    asgd = torch.optim.ASGD(list(theirs.values()), lr=0.1, t0=0, lambd=0.0)
    for grads in gradients(rng, 7):
        update(opt, m, grads)
        for name, p in theirs.items():
            p.grad = torch.tensor(grads[name])
        asgd.step()
    with averaged(opt):
        for name, p in theirs.items():
            # Torch keeps the factor 1 / (t - t0) in float32.
            np.testing.assert_allclose(m[name].value, asgd.state[p]["ax"].numpy(), rtol=1e-6)
    for name, p in theirs.items():
        np.testing.assert_allclose(m[name].value, p.detach().numpy(), rtol=1e-6)
