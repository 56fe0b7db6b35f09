"""`tbptt` against brute force: a step loop that cuts the state's edge at the window's start."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest

import recur
from recur import GRU, LSTM, RNN, Chain, Dense, Dropout, GRUv3, Recur, Tape, ops, tbptt
from recur.module import Module
from recur.regularise import WeightDrop, resample

LAYERS = {"RNN": RNN, "LSTM": LSTM, "GRU": GRU, "GRUv3": GRUv3}
KS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 3), (3, 2), (4, 7), (5, 5), (9, 20)]


def make(name, **options):
    options = {"dtype": np.float64, "rng": np.random.default_rng(2), **options}
    if name == "stack":
        return Chain(
            LSTM(3, 4, learn_init=True, **options),
            Dense(4, 4, dtype=np.float64, rng=np.random.default_rng(3)),
            GRU(4, 4, learn_init=True, **options),
        )
    if name == "function":
        w = recur.Param(np.random.default_rng(4).normal(size=(4, 3)))

        class Cell(Module):
            def __init__(self):
                self.w = w

            def __call__(self, state, x):
                h, n = state
                h = ops.tanh(ops.affine(self.w, x) + 0.5 * h)
                return (h, n + 1), h * 2.0

        return Recur(Cell(), (np.zeros((4, 2)), 0))
    return LAYERS[name](3, 4, learn_init=True, **options)


def losses_of(T, k1):
    return sorted({*range(k1, T + 1, k1), T})


def loss_fn(ys, t):
    """Depends on t, on how many outputs came, and on their order."""
    steps = ys if isinstance(ys, list) else [ys[..., i] for i in range(ys.shape[-1])]
    return sum((y * y).sum() * (1 + 0.1 * i) for i, y in enumerate(steps)) * (1 + 0.01 * t)


def brute(model, xs, k1, k2, inject="window", loss=loss_fn, between=lambda t: None):
    """Each window as a loop of steps from a stored state, one scope each.

    `between(t)` is what the user does after the loss at t; a truthy result says that the state was
    reset there.
    """
    T = len(xs)
    entering = {0: recur.states(model)}
    values = {}
    floor = done = 0
    for t in losses_of(T, k1):
        first = max(floor, t - k2)
        start = min(first, done)

        def f(m, first=first, t=t, done=done, start=start):
            ys = {}
            for i in range(start, t):
                if i == first:
                    recur.truncate(m) if not all_start(m) else None
                ys[i] = m(xs[i])
                entering[i + 1] = plain(m)
            for i in range(start, first):
                ys[i] = recur.value(ys[i])
            chosen = {
                "window": range(done, t),
                "last": range(t - 1, t),
                "all": range(first, t),
            }[inject]
            return loss([ys[i] if i in ys else values[i] for i in chosen], t)

        recur.set_states(model, entering[start])
        yield recur.withgradient(f, model)
        done = t
        if between(t):
            floor = t
            entering[t] = recur.states(model)


def plain(m):
    return {
        path: state if state is recur.START else recur.value(state)
        for path, state in recur.states(m).items()
    }


def all_start(m):
    return all(state is recur.START for state in recur.states(m).values())


def agree(got, want, model, rtol=1e-10):
    got, want = list(got), list(want)
    assert len(got) == len(want)
    for (a, g), (b, h) in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol)
        for path in recur.named_params(model):
            np.testing.assert_allclose(g[path], h[path], rtol=rtol, atol=1e-12)


def kept(run):
    """Losses and gradients, copied at once: a later window may not touch an earlier result."""
    for loss, grads in run:
        yield loss, {path: np.array(g) for path, g in grads.items()}


@pytest.mark.parametrize("inject", ["window", "last", "all"])
@pytest.mark.parametrize("name", [*LAYERS, "stack", "function"])
def test_windows_equal_brute_force(name, inject, rng):
    xs = list(rng.normal(size=(9, 3, 2)))
    for k1, k2 in KS:
        a, b = make(name), make(name)
        want = kept(brute(b, xs, k1, k2, inject))
        agree(kept(tbptt(a, xs, loss_fn, k1=k1, k2=k2, inject=inject)), want, a)
        for x, y in zip(states_of(a), states_of(b), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-12)


def states_of(m):
    for state in recur.states(m).values():
        yield from state if isinstance(state, tuple) else (state,)


@pytest.mark.parametrize("seed", range(25))
def test_windows_equal_brute_force_for_random_sizes(seed):
    rng = np.random.default_rng(seed)
    T, k1, k2 = rng.integers(1, 12, 3)
    name = rng.choice([*LAYERS, "stack"])
    inject = rng.choice(["window", "last", "all"])
    xs = list(rng.normal(size=(T, 3, 2)))
    a, b = make(name), make(name)
    carried = rng.integers(0, 2)
    if carried:
        for m in (a, b):
            m(np.ones((3, 2)))
    resets = set(rng.integers(1, T + 1, 2).tolist())
    moves = rng.integers(0, 2)

    def act(m, t, grads):
        if moves:
            for path, p in recur.named_params(m).items():
                p -= 0.05 * grads[path]
        if t in resets:
            recur.reset(m)
        return t in resets

    got, want = [], []
    for loss, grads in tbptt(a, xs, loss_fn, k1=k1, k2=k2, inject=inject):
        got.append((loss, {path: np.array(g) for path, g in grads.items()}))
        act(a, len_done(got, T, k1), grads)
    last = []
    run = brute(b, xs, k1, k2, inject, between=lambda t: act(b, t, last[0]))
    for loss, grads in run:
        last[:] = [grads]
        want.append((loss, {path: np.array(g) for path, g in grads.items()}))
    agree(got, want, a, rtol=1e-8)


def len_done(results, T, k1):
    return losses_of(T, k1)[len(results) - 1]


def test_arrays_and_lists_of_any_form_agree(rng):
    X = rng.normal(size=(3, 2, 7))
    xs = [X[:, :, t] for t in range(7)]
    forms = {}

    def loss(ys, t):
        forms.setdefault(type(ys), []).append(len(ys) if isinstance(ys, list) else ys.shape)
        return loss_fn(ys, t)

    m = make("stack")
    as_list = list(kept(tbptt(m, xs, loss, k1=3, k2=4)))
    recur.reset(m)
    agree(kept(tbptt(m, X, loss, k1=3, k2=4)), as_list, m)
    assert forms[list] == [3, 3, 1]
    assert forms[recur.Tensor] == [(4, 2, 3), (4, 2, 3), (4, 2, 1)]
    ftb = Recur(GRU(3, 4, rng=np.random.default_rng(2), dtype=np.float64).cell, layout="ftb")
    fbt = Recur(ftb.cell)
    got = kept(
        tbptt(ftb, X.swapaxes(1, 2), lambda ys, t: loss_fn(ys.swapaxes(1, 2), t), k1=3, k2=4)
    )
    agree(got, kept(tbptt(fbt, X, loss_fn, k1=3, k2=4)), ftb)


def test_equal_ks_are_a_loop_with_truncate_bit_for_bit(rng):
    X = rng.normal(size=(3, 2, 12)).astype(np.float32)
    a, b = LSTM(3, 4, learn_init=True), None
    b = copy.deepcopy(a)
    got = list(kept(tbptt(a, X, lambda ys, t: (ys * ys).sum(), k1=4, k2=4)))
    with Tape() as tape:
        for i, (loss, grads) in enumerate(got):
            ys = b(X[:, :, 4 * i : 4 * i + 4])
            want = (ys * ys).sum()
            tape.backward(want, accumulate=False)
            recur.truncate(b)
            assert recur.value(want) == loss
            for path, p in recur.named_params(b).items():
                if path.startswith("init") and i:
                    assert not grads[path].any()  # no longer upstream
                else:
                    np.testing.assert_array_equal(p.grad, grads[path])


def test_weights_that_move_are_seen_by_the_rerun_of_the_window(rng):
    xs = list(rng.normal(size=(6, 3, 2)))
    a, b = make("GRU"), make("GRU")

    def move(m, grads):
        for path, p in recur.named_params(m).items():
            p -= 0.1 * grads[path]

    got = []
    for loss, grads in tbptt(a, xs, loss_fn, k1=1, k2=6):
        got.append(loss)
        move(a, grads)
    want = []
    for t in range(1, 7):  # k2 covers all: each loss runs from the start with the present weights
        b.reset()
        loss, grads = recur.withgradient(lambda m, t=t: loss_fn([m(x) for x in xs[:t]][-1:], t), b)
        want.append(loss)
        move(b, grads)
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_no_window_reaches_back_over_a_reset(rng):
    xs = list(rng.normal(size=(6, 3, 2)))
    m = make("RNN")
    run = tbptt(m, xs, lambda ys, t: ys[-1].sum(), k1=1, k2=4)
    for _ in range(3):
        next(run)
    m.reset()
    _, grads = next(run)
    want = recur.gradient(lambda m: m.reset()(xs[3]).sum(), copy.deepcopy(m))
    for path in recur.named_params(m):
        np.testing.assert_allclose(grads[path], want[path], atol=1e-14)
    assert grads["init"].any()
    m.state = np.ones((4, 2))  # an assigned state is a boundary too
    _, grads = next(run)
    assert not grads["init"].any()


def test_no_scope_is_open_between_losses_and_a_break_leaves_plain_states(rng):
    xs = list(rng.normal(size=(6, 3, 2)))
    m, other = make("LSTM"), make("LSTM")
    for i, _ in enumerate(tbptt(m, xs, loss_fn, k1=2, k2=3)):
        assert isinstance(m.state.h, np.ndarray)
        assert isinstance(m(np.ones((3, 2))), np.ndarray)
        recur.gradient(lambda m: m(np.ones((3, 2))).sum(), other)
        recur.reset([m, other])
        if i == 1:
            break
    m = make("LSTM")
    for i, _ in enumerate(tbptt(m, xs, loss_fn, k1=2, k2=3)):
        if i == 1:
            break
    stepped = make("LSTM")
    for x in xs[:4]:
        stepped(x)
    for a, b in zip(m.state, stepped.state, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-14)


def test_it_yields_and_never_updates(rng):
    m = make("GRU")
    before = [p.value.copy() for p in recur.params(m)]
    list(tbptt(m, list(rng.normal(size=(5, 3, 2))), loss_fn, k1=2, k2=3))
    for p, old in zip(recur.params(m), before, strict=True):
        np.testing.assert_array_equal(p.value, old)
        assert p.grad is None


def test_each_loss_costs_one_run_of_the_window(rng):
    m = make("GRU")
    steps = []

    def counted(x, **options):
        steps.append(len(x))
        return m(x, **options)

    class Counting(Module):
        def __init__(self):
            self.inner = m

        def __call__(self, x):
            return counted(x)

    xs = list(rng.normal(size=(40, 3, 2)))
    for k1, k2 in ((1, 5), (2, 5), (5, 5), (7, 3)):
        steps.clear()
        n = len(list(tbptt(Counting(), xs, loss_fn, k1=k1, k2=k2)))
        assert sum(steps) <= n * max(k1, k2)


def test_memory_is_that_of_a_window(rng):
    m = make("LSTM")
    alive = weakref.WeakSet()
    highest = []

    def loss(ys, t):
        alive.update(ys)
        highest.append(sum(isinstance(y, recur.Tensor) for y in alive))
        return loss_fn(ys, t)

    gc.disable()
    try:
        for _ in tbptt(m, list(rng.normal(size=(60, 3, 2))), loss, k1=1, k2=4):
            pass
    finally:
        gc.enable()
    assert max(highest) <= 4


def test_a_long_gap_between_losses_is_run_in_parts_whose_history_is_dropped(rng):
    X = rng.normal(size=(3, 2, 30))
    m = make("GRU")
    longest = []

    class Watching(Module):
        def __init__(self):
            self.inner = m

        def __call__(self, x):
            longest.append(x.shape[-1])
            return self.inner(x)

    watched = list(kept(tbptt(Watching(), X, loss_fn, k1=15, k2=4)))
    assert max(longest) == 4
    m.reset()
    plain = list(kept(tbptt(m, X, loss_fn, k1=15, k2=4)))
    for (a, g), (b, h) in zip(watched, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
        np.testing.assert_allclose(g["inner.cell.Wh"], h["cell.Wh"], atol=1e-12)


def test_each_step_keeps_its_mask_when_its_window_is_run_again(rng):
    xs = list(rng.normal(size=(7, 3, 2)))

    def build():
        return Chain(
            GRU(3, 4, dtype=np.float64, rng=np.random.default_rng(2)),
            Dropout(0.5, rng=np.random.default_rng(5)),
            GRU(4, 4, dtype=np.float64, rng=np.random.default_rng(3)),
        )

    model = build()
    got = list(kept(tbptt(model, xs, lambda ys, t: loss_fn(ys[-1:], t), k1=1, k2=7)))
    other = build()
    want = []
    for t in range(1, 8):  # every window runs from the start, so it sees the first t masks
        again = copy.deepcopy(other)
        want.append(
            recur.withgradient(lambda m, t=t: loss_fn([m(x) for x in xs[:t]][-1:], t), again)
        )
    agree(got, want, model)
    state = other[1].generator.bit_generator.state
    with Tape():
        for x in xs:
            other(x)
    assert model[1].generator.bit_generator.state == other[1].generator.bit_generator.state != state


def test_a_generator_that_is_set_between_losses_serves_the_new_steps_only(rng):
    xs = list(rng.normal(size=(4, 3, 2)))

    def build():
        return Chain(
            GRU(3, 4, dtype=np.float64, rng=np.random.default_rng(2)),
            Dropout(0.5, rng=np.random.default_rng(5)),
            GRU(4, 4, dtype=np.float64, rng=np.random.default_rng(3)),
        )

    fresh = np.random.default_rng(99).bit_generator.state
    model = build()
    got = []
    for i, (loss, _) in enumerate(tbptt(model, xs, lambda ys, t: ys[-1].sum(), k1=1, k2=4)):
        got.append(loss)
        if i == 1:
            model[1].generator.bit_generator.state = fresh
    want = []
    for t in range(1, 5):
        other = build()

        def f(m, t=t):
            for i in range(t):
                if i == 2:
                    m[1].generator.bit_generator.state = fresh
                y = m(xs[i])
            return y.sum()

        want.append(recur.withgradient(f, other)[0])
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_masked_steps_count_as_in_one_call(rng):
    X = rng.normal(size=(3, 2, 6))
    lengths = np.array([6, 3])
    alive = np.arange(6) < lengths[:, None]
    m = make("LSTM")
    for options in ({"lengths": lengths}, {"mask": alive}):
        m.reset()
        got = list(kept(tbptt(m, X, loss_fn, k1=2, k2=2, **options)))
        m.reset()
        want = []
        for start in range(0, 6, 2):
            part = slice(start, start + 2)
            want.append(
                recur.withgradient(
                    lambda m, part=part: loss_fn(m(X[:, :, part], mask=alive[:, part]), part.stop),
                    m,
                )
            )
        agree(got, want, m)


def test_without_steps_there_is_no_loss():
    m = make("GRU")
    assert list(tbptt(m, [], loss_fn, k1=2, k2=2)) == []
    assert list(tbptt(m, np.zeros((3, 2, 0)), loss_fn, k1=2, k2=2)) == []
    assert m.at_start


def test_a_loss_may_return_more_than_its_number(rng):
    m = make("GRU")
    run = tbptt(m, rng.normal(size=(3, 2, 4)), lambda ys, t: (ys.sum(), (t, ys)), k1=2, k2=2)
    (loss, (t, ys)), grads = next(run)
    assert t == 2 and isinstance(ys, np.ndarray) and loss == pytest.approx(ys.sum())
    assert grads["cell.Wi"].any()


def test_arguments_are_checked_before_the_first_step():
    m = make("GRU")
    for bad in ({"k1": 0, "k2": 1}, {"k1": 1, "k2": 2.5}, {"k1": True, "k2": 1}):
        with pytest.raises(ValueError, match="positive integer"):
            tbptt(m, [], loss_fn, **bad)
    with pytest.raises(ValueError, match="inject is 'some'"):
        tbptt(m, [], loss_fn, k1=1, k2=1, inject="some")
    with pytest.raises(recur.ShapeError, match="expected a sequence"):
        tbptt(m, np.ones((3, 2)), loss_fn, k1=1, k2=1)
    with pytest.raises(recur.ShapeError, match="lengths"):
        tbptt(m, np.ones((3, 2, 4)), loss_fn, k1=1, k2=1, lengths=[1])
    with pytest.raises(ValueError, match="layouts"):
        tbptt([m, GRU(3, 4, layout="ftb")], np.ones((3, 2, 4)), loss_fn, k1=1, k2=1)


def test_inside_an_open_scope_it_says_so(rng):
    with Tape(), pytest.raises(recur.TapeError, match="scope is already open"):
        next(tbptt(make("GRU"), rng.normal(size=(3, 2, 4)), loss_fn, k1=2, k2=2))


def dropped():
    return WeightDrop(make("GRU"), "Wh", 0.5, rng=np.random.default_rng(7))


@pytest.mark.parametrize("resampled", [False, True])
@pytest.mark.parametrize(("k1", "k2"), [(1, 3), (2, 3), (3, 2), (2, 5)])
def test_dropped_weights_keep_their_mask_for_the_run_and_each_step_its_own(k1, k2, resampled, rng):
    xs = list(rng.normal(size=(8, 3, 2)))
    model, seen, got, new_from = dropped(), [], [], 8

    def loss(ys, t):
        seen.append(model.mask("Wh").copy())
        return loss_fn(ys, t)

    for i, result in enumerate(kept(tbptt(model, xs, loss, k1=k1, k2=k2))):
        got.append(result)
        if resampled and i == 1:
            resample(model)
            new_from = losses_of(8, k1)[i]
    first, last = seen[0], seen[-1]
    assert np.array_equal(first, last) is not resampled

    class Stepping(Module):
        """The same layer, told its mask at each step."""

        def __init__(self):
            self.inner = dropped()

        def __call__(self, x):
            t = next(t for t, known in enumerate(xs) if known is x)
            self.inner.set_mask("Wh", first if t < new_from else last)
            return self.inner(x)

    twin = Stepping()
    want = list(kept(brute(twin, xs, k1, k2)))
    for (a, g), (b, h) in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
        for path in recur.named_params(model):
            np.testing.assert_allclose(g[path], h[f"inner.{path}"], atol=1e-12)
