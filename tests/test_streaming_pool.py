"""Many streams in one pool.  S numbers: see docs/how-to/streams.md."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref

import numpy as np
import pytest
from streaming_models import NAMES, inputs, models

import recur
from recur import (
    GRU,
    LSTM,
    Busy,
    Chain,
    Conflict,
    Dense,
    FormatError,
    Gap,
    ShapeError,
    StateError,
    StreamError,
    UnknownStream,
)
from recur.streaming import Stream, StreamPool

# Their own operations are not batch invariant: products by BLAS, sums over strided axes.
ROUNDED = {"own activation", "own cell"}


def alone(model, X):
    """What each of the streams X (…, N, T) answers by itself: (n_out, N, T)."""
    return np.stack([Stream(model).run(X[..., n, :]) for n in range(X.shape[-2])], -2)


def opened(model, n, **options):
    pool = StreamPool(model, **options)
    names = [f"s{i}" for i in range(n)]
    for name in names:
        pool.open(name)
    return pool, names


def assert_same(name, found, expected):
    if name in ROUNDED:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert np.array_equal(found, expected)


# ---------------------------------------------------------------- S3: independence


@pytest.mark.parametrize("name", NAMES)
def test_s3_any_subset_in_any_order_gives_each_stream_its_own_bits(name, dtype, rng):
    model = models(dtype)[name]
    pool, names = opened(model, 13, capacity=4)  # blocks of 4, 4 and 8
    X = inputs(name, (13, 25), rng, dtype)
    expected = alone(model, X)
    at = np.zeros(13, int)
    for _ in range(60):
        some = rng.permutation(np.flatnonzero(at < 25))[: rng.integers(1, 14)]
        if len(some) == 0:
            break
        x = X[..., some, at[some]]
        y = pool.step([names[i] for i in some], x)
        assert_same(name, y, expected[..., some, at[some]])
        at[some] += 1
    assert list(pool.steps(names)) == list(at)


def test_s3_a_stream_full_of_nan_changes_no_other(rng):
    model = models()["two layers"]
    pool, names = opened(model, 9)
    X = rng.standard_normal((5, 9, 12)).astype(np.float32)
    expected = alone(model, X)
    X[:, 4] = np.nan
    for t in range(12):
        y = pool.step(names, X[:, :, t])
        assert np.isnan(y[:, 4]).all()
        others = np.arange(9) != 4
        assert np.array_equal(y[:, others], expected[:, others, t])


@pytest.mark.parametrize("capacity", [1200, 64])  # one stretch; scattered over blocks
def test_s3_large_batches_that_share_threads_keep_their_bits(rng, capacity):
    model = Chain(LSTM(24, 64), Dense(64, 3))
    pool, names = opened(model, 1200, capacity=capacity)
    X = rng.standard_normal((24, 1200, 3)).astype(np.float32)
    expected = alone(model, X)
    for t in range(3):  # more than are stepped at once
        assert np.array_equal(pool.step(names, X[..., t]), expected[..., t])
    assert list(pool.steps(names)) == [3] * 1200


def test_slots_give_the_answers_that_names_give(rng):
    model = models()["head"]
    pool, names = opened(model, 10, capacity=4)
    X = rng.standard_normal((5, 10, 9)).astype(np.float32)
    expected = alone(model, X)
    whole, some = pool.slots(names), pool.slots(names[7:2:-2])
    out = np.empty((2, 10), np.float32)
    for t in range(8):
        assert pool.step(whole, X[..., t], out=out) is out
        assert np.array_equal(out, expected[..., t])
    y = pool.step(some, X[:, 7:2:-2, 8])
    assert np.array_equal(y, expected[:, 7:2:-2, 8])
    assert len(some) == 3


# ---------------------------------------------------------------- S1: compressed models


@pytest.mark.parametrize("storage", ["int8", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["LSTM", "two layers", "head"])
def test_s1_a_compressed_model_in_a_pool_gives_the_bits_of_its_own_blocks(name, storage, rng):
    model = recur.compress(models()[name], storage)
    X = inputs(name, (9, 31), rng)
    expected = alone(model, X)
    for n in range(9):  # any split into blocks is one call, too
        stream, pieces = Stream(model), []
        for first, last in [(0, 1), (1, 8), (8, 30), (30, 31)]:
            pieces.append(stream.run(X[..., n, first:last]))
        assert np.array_equal(np.concatenate(pieces, -1), expected[:, n])
    pool, names = opened(model, 9, capacity=4)
    at = np.zeros(9, int)
    while (at < 31).any():
        some = rng.permutation(np.flatnonzero(at < 31))[: rng.integers(1, 10)]
        y = pool.step([names[i] for i in some], X[..., some, at[some]])
        assert np.array_equal(y, expected[..., some, at[some]])
        at[some] += 1
    other = StreamPool(model)
    other.restore(pool.snapshot(names))
    x = inputs(name, (9,), rng)
    assert np.array_equal(other.step(names, x), pool.step(names, x))


# ---------------------------------------------------------------- S2: no leftovers


@pytest.mark.parametrize("name", ["LSTM", "learned start", "two layers"])
def test_s2_a_slot_that_is_used_again_holds_nothing_of_its_last_stream(name, rng):
    model = models()[name]
    pool, names = opened(model, 6, capacity=2)
    X = inputs(name, (6, 3), rng)
    for t in range(3):
        pool.step(names, X[..., t])
    for gone in names[1:5]:
        pool.close(gone)
    live = {pool._slots[n] for n in pool.ids()}
    poisoned = 0
    for column in range(len(pool.plan.parts)):
        for start, array in pool._blocks.each(column):
            for row in range(len(array)):
                if start + row not in live:
                    array[row] = np.nan
                    poisoned += 1
    assert poisoned >= 4
    fresh = [f"n{i}" for i in range(9)]
    for new in fresh:
        pool.open(new)
    X = inputs(name, (9, 5), rng)
    expected = alone(model, X)
    for t in range(5):
        assert np.array_equal(pool.step(fresh, X[..., t]), expected[..., t])


def test_s2_reset_puts_some_streams_at_rest_and_no_other(rng):
    model = models()["learned start"]
    pool, names = opened(model, 6)
    X = rng.standard_normal((5, 6, 8)).astype(np.float32)
    expected = alone(model, X)
    for t in range(4):
        pool.step(names, X[..., t])
    pool.reset(names[1:4])
    pool.reset([names[5]])
    assert list(pool.steps(names)) == [4, 0, 0, 0, 4, 0]
    again = pool.step([names[i] for i in (1, 2, 3, 5)], X[:, [1, 2, 3, 5], 0])
    assert np.array_equal(again, expected[:, [1, 2, 3, 5], 0])
    on = pool.step([names[0], names[4]], X[:, [0, 4], 4])
    assert np.array_equal(on, expected[:, [0, 4], 4])


# ---------------------------------------------------------------- S4: memory


def test_s4_a_stream_takes_its_state_its_answer_and_little_more(rng):
    model = Chain(LSTM(32, 128), Dense(128, 16))
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        pool, names = opened(model, 1000, capacity=1000)
        pool.step(names[:1], np.zeros((32, 1), np.float32))
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    own = (128 + 128) * 4 + 16 * 4
    assert used / 1000 <= 1.1 * own + 256
    assert len(names) == 1000


def test_s4_no_answer_keeps_the_pool_alive_and_none_is_a_view_of_another(rng):
    pool, names = opened(LSTM(3, 4), 5)
    y = pool.step(names, np.ones((3, 5)))
    kept = y.copy()
    state = pool.state(names[:2])
    pool.step(names, np.ones((3, 5)))
    assert np.array_equal(y, kept)
    y[...] = 7
    assert not (pool.step(names, np.ones((3, 5))) == 7).any()
    blocks = [weakref.ref(array) for block in pool._blocks._blocks for array in block.values()]
    del pool
    gc.collect()
    assert all(block() is None for block in blocks)
    assert state[""].h.shape == (4, 2)


def test_s9_the_pool_grows_and_what_is_there_never_moves(rng):
    pool, _ = opened(LSTM(3, 4), 3, capacity=2)
    places = [array.ctypes.data for array in pool._blocks._blocks[0].values()]
    for i in range(40):
        pool.open(i)
    assert [a.ctypes.data for a in pool._blocks._blocks[0].values()][: len(places)] == places
    assert pool._blocks.capacity == 64
    assert len(pool) == 43


def test_s9_a_full_pool_says_so_at_once_and_its_streams_go_on(rng):
    pool, names = opened(LSTM(3, 4), 3, limit=3)
    with pytest.raises(Busy, match="all 3 places are taken"):
        pool.open("more")
    with pytest.raises(Busy, match="all 3 places are taken"):
        pool.fork("s0", "more")
    with pytest.raises(Busy, match="do not fit into the 0 places"):
        pool.restore({"more": pool.snapshot("s0")})
    pool.step(names, np.ones((3, 3)))
    pool.close("s1")
    pool.open("more")
    assert pool.ids() == ["s0", "s2", "more"]


# ---------------------------------------------------------------- S5, S7, S8: errors


def test_s5_each_cause_has_its_own_error(rng):
    pool, names = opened(LSTM(3, 4), 3)
    x1 = np.ones((3, 1))
    before = pool.snapshot(names)
    for call in (
        lambda: pool.step(["x"], x1),
        lambda: pool.close("x"),
        lambda: pool.slots(["s0", "x"]),
        lambda: pool.fork("x", "y"),
        lambda: pool.snapshot("x"),
        lambda: pool.reset(["s0", "x"]),
    ):
        with pytest.raises(UnknownStream, match="no stream 'x' is open"):
            call()
    with pytest.raises(Gap, match="stands at step 0, step 3 skips 2") as gap:
        pool.step(["s0"], x1, numbers=[3])
    assert (gap.value.expected, gap.value.got) == (1, 3)
    with pytest.raises(Conflict, match="'s0' is open already"):
        pool.open("s0")
    with pytest.raises(Conflict, match="'s1' is open already"):
        pool.fork("s0", "s1")
    with pytest.raises(Conflict, match="'s1' is open already"):
        pool.restore({"new": before["s0"], "s1": before["s1"]})
    with pytest.raises(StreamError, match="'s1' is named twice"):
        pool.step(["s0", "s1", "s1"], np.ones((3, 3)))
    with pytest.raises(TypeError, match="expected a list"):
        pool.step("s0", x1)
    for X, message in [(np.ones((2, 1)), "2 features"), (np.ones((3, 2)), r"expected \(3, 1\)")]:
        with pytest.raises(ShapeError, match=message):
            pool.step(["s0"], X)
    with pytest.raises(ShapeError, match="numbers is"):
        pool.step(["s0"], x1, numbers=[1.5])
    assert pool.snapshot(names) == before and pool.ids() == names


def test_s7_a_second_open_is_a_conflict_and_a_takeover_shuts_the_old_holder_out(rng):
    pool = StreamPool(LSTM(3, 4))
    old = pool.open("a")
    slots = pool.slots(["a"])
    pool.step(["a"], np.ones((3, 1)), epochs=[old])
    with pytest.raises(Conflict, match="takeover=True"):
        pool.open("a")
    new = pool.open("a", takeover=True, tag=b"x" * 16)
    assert new > old and pool.tag("a") == b"x" * 16
    with pytest.raises(Conflict, match="has been taken over"):
        pool.step(["a"], np.ones((3, 1)), epochs=[old])
    with pytest.raises(Conflict, match="closed or taken over"):
        pool.step(slots, np.ones((3, 1)))
    assert pool.steps(["a"]) == [1]
    pool.step(["a"], np.ones((3, 1)), epochs=[new])


def test_slots_of_a_closed_stream_are_refused_also_when_its_name_is_used_again(rng):
    pool, names = opened(LSTM(3, 4), 3)
    slots, others = pool.slots(names[:2]), pool.slots(names[2:])
    pool.close("s0")
    pool.close("s1")
    pool.open("s0")  # now in the slot that was s1's
    with pytest.raises(Conflict, match="'s0' was closed or taken over"):
        pool.step(slots, np.ones((3, 2)))
    pool.step(others, np.ones((3, 1)))


def test_s8_a_step_sent_again_gives_the_stored_answer_and_moves_nothing(rng):
    model = models()["two layers"]
    pool, names = opened(model, 4)
    X = rng.standard_normal((5, 4, 6)).astype(np.float32)
    expected = alone(model, X)
    for t in range(3):
        y = pool.step(names, X[..., t], numbers=[t + 1] * 4)
        assert np.array_equal(y, expected[..., t])
        again = pool.step(names[::-1], X[:, ::-1, t], numbers=[t + 1] * 4)
        assert np.array_equal(again, expected[:, ::-1, t])
    # Some again, some new, in one call.
    mixed = np.where([1, 0, 1, 0], X[..., 2], X[..., 3])
    y = pool.step(names, mixed, numbers=[3, 4, 3, 4])
    assert np.array_equal(y, np.where([1, 0, 1, 0], expected[..., 2], expected[..., 3]))
    assert list(pool.steps(names)) == [3, 4, 3, 4]
    with pytest.raises(Conflict, match="with another input"):
        pool.step(["s0"], X[:, :1, 5], numbers=[3])
    with pytest.raises(Conflict, match="only the last answer is kept"):
        pool.step(["s0"], X[:, :1, 0], numbers=[1])
    with pytest.raises(Gap):
        pool.step(names, X[..., 3], numbers=[4, 4, 4, 6])
    assert list(pool.steps(names)) == [3, 4, 3, 4]


def test_s8_the_stored_answer_survives_a_snapshot(rng):
    model = models()["two layers"]
    pool, _ = opened(model, 1)
    x = rng.standard_normal((5, 1)).astype(np.float32)
    y = pool.step(["s0"], x, numbers=[1])
    other = StreamPool(model)
    other.restore({"b": pool.snapshot("s0")})
    assert np.array_equal(other.step(["b"], x, numbers=[1]), y)
    with pytest.raises(Conflict, match="another input"):
        other.step(["b"], x + 1, numbers=[1])


# ---------------------------------------------------------------- S11, states, snapshots


def test_s11_a_whole_stretch_of_streams_is_stepped_where_it_lies(rng, monkeypatch):
    pool, names = opened(models()["two layers"], 64)
    monkeypatch.setattr(pool._advance, "_gather", lambda places: pytest.fail("states were copied"))
    pool.step(names, np.ones((5, 64), np.float32))
    pool.step(names[10:20], np.ones((5, 10), np.float32))
    pool.step(names[10:11], np.ones((5, 1), np.float32))


@pytest.mark.parametrize("model", [
    models()["two layers"], Chain(GRU(5, 6), Dense(6, 4, recur.tanh), LSTM(4, 3), Dense(3, 2)),
], ids=["layers", "head"])  # fmt: skip
def test_s11_after_the_first_step_every_other_is_one_call(model, rng, monkeypatch):
    pool, names = opened(model, 20, capacity=8)
    X = rng.standard_normal((5, 20, 6)).astype(np.float32)
    expected = alone(model, X)
    pool.step(names, X[..., 0])
    monkeypatch.setattr(pool.plan, "step", lambda *x: pytest.fail("the states were taken out"))
    order = rng.permutation(20)
    some = [names[i] for i in order]
    for t in range(1, 5):
        numbers = None if t < 3 else np.full(20, t + 1)
        assert np.array_equal(
            pool.step(some, X[:, order, t], numbers=numbers), expected[:, order, t]
        )
    for _ in range(2):  # the last one again
        y = pool.step(some, X[:, order, 4], numbers=np.full(20, 5))
        assert np.array_equal(y, expected[:, order, 4])
    names += ["new"]
    pool.open("new")  # in a block that the pool has or has not yet
    assert np.array_equal(pool.step(names[:20], X[..., 5]), expected[..., 5])


def test_new_weights_answer_from_the_next_step_on(rng):
    model = models()["two layers"]
    pool, names = opened(model, 4)
    X = rng.standard_normal((5, 4)).astype(np.float32)
    for _ in range(3):
        pool.step(names, X)
    state = pool.state(names)
    for p in recur.params(model):
        p[...] = np.asarray(p) / 2
    other, _ = opened(model, 4)
    other.set_state(names, state)
    assert np.array_equal(pool.step(names, X), other.step(names, X))


@pytest.mark.parametrize("value", [np.full((4, 6), 0.25, np.float32), None], ids=["W", "b"])
def test_a_weight_that_is_put_in_anothers_place_answers_from_the_next_step_on(value, rng):
    model = Chain(LSTM(5, 6), Dense(6, 4, recur.tanh))
    model[1].bias[...] = 1
    pool, names = opened(model, 4)
    X = rng.standard_normal((5, 4)).astype(np.float32)
    for _ in range(3):
        before = pool.step(names, X)
    state = pool.state(names)
    setattr(model[1], "bias" if value is None else "weight", value)
    other, _ = opened(model, 4)
    other.set_state(names, state)
    y = pool.step(names, X)
    assert np.array_equal(y, other.step(names, X)) and not np.array_equal(y, before)


@pytest.mark.parametrize("order", [1, -1])
def test_s13_a_step_allocates_its_answer_and_with_out_nothing(order, rng):
    pool, names = opened(LSTM(64, 256), 100)
    slots = pool.slots(names[::order])
    X, out = np.ones((64, 100), np.float32), np.empty((100, 256), np.float32).T

    def peak(action):
        for _ in range(5):
            action()
        gc.collect()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        action()
        return tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    try:
        assert peak(lambda: pool.step(slots, X)) < out.nbytes + 2048
        assert peak(lambda: pool.step(slots, X, out=out)) < 2048
        assert peak(lambda: pool.step(slots, X.T.copy().T, out=out)) < X.nbytes + 2048
    finally:
        tracemalloc.stop()
    assert np.array_equal(out, pool.state(slots)[""].h)


def test_out_may_be_the_input(rng):
    pool, names = opened(LSTM(4, 4), 600)
    other, _ = opened(pool.model, 600)
    X = rng.standard_normal((4, 600)).astype(np.float32)
    for _ in range(3):
        y = other.step(names, X)
        assert pool.step(names, X, out=X) is X
        assert np.array_equal(X, y)


def test_s11_any_subset_is_one_call_of_the_kernel(rng, monkeypatch):
    pool, names = opened(models()["two layers"], 64, capacity=8)
    sizes = []
    step = pool.plan.step
    monkeypatch.setattr(
        pool.plan, "step", lambda x, *rest: (sizes.append(len(x)), step(x, *rest))[1]
    )
    pool.step(names[::-3], np.ones((5, 22), np.float32))
    assert sizes == [22]


def test_s16_snapshots_pass_between_pools_and_streams(rng):
    model = models()["two layers"]
    pool, names = opened(model, 5)
    X = rng.standard_normal((5, 5, 9)).astype(np.float32)
    expected = alone(model, X)
    for t in range(4):
        pool.step(names, X[..., t])
    snapshots = pool.snapshot(names)
    assert list(snapshots) == names
    lone = Stream.restore(model, snapshots["s3"])
    assert lone.steps == 4 and np.array_equal(lone(X[:, 3, 4]), expected[:, 3, 4])
    other = StreamPool(model, capacity=2)
    other.restore(snapshots)
    other.restore({"from a stream": lone.snapshot()})
    for t in range(4, 9):
        assert np.array_equal(other.step(names, X[..., t]), expected[..., t])
    y = other.step(["from a stream"], X[:, 3:4, 5])
    assert np.array_equal(y, expected[:, 3:4, 5])
    bad = dict(snapshots, s2=snapshots["s2"][:-1])
    third = StreamPool(model)
    with pytest.raises(FormatError):
        third.restore(bad)
    assert len(third) == 0
    third.restore(pool.snapshot(names, key=b"k"), key=b"k")


def test_s16_states_are_read_and_written_by_path(rng):
    model = models()["two layers"]
    pool, names = opened(model, 5, capacity=2)
    X = rng.standard_normal((5, 5, 9)).astype(np.float32)
    expected = alone(model, X)
    for t in range(4):
        pool.step(names, X[..., t])
    state = pool.state(names[::-1])
    assert state["layers.0"].c.shape == (7, 5) and state["layers.1"].shape == (4, 5)
    other, _ = opened(model, 5)
    other.set_state(names[::-1], state)
    assert np.array_equal(other.step(names, X[..., 4]), expected[..., 4])
    with pytest.raises(StateError, match=r"expected \(7, 2\)"):
        other.set_state(names[:2], state)


def test_a_fork_goes_on_by_itself(rng):
    model = models()["head"]
    pool, names = opened(model, 2)
    X = rng.standard_normal((5, 2, 9)).astype(np.float32)
    expected = alone(model, X)
    for t in range(4):
        pool.step(names, X[..., t])
    pool.fork("s1", "twin")
    for t in range(4, 9):
        assert np.array_equal(pool.step(names, X[..., t]), expected[..., t])
    for t in range(4, 9):
        assert np.array_equal(pool.step(["twin"], X[:, 1:, t]), expected[:, 1:, t])


def test_a_layer_that_raises_leaves_every_stream_as_it_was(rng):
    fail = [False]

    def sometimes(y):
        if fail[0]:
            raise RuntimeError("no")
        return y

    pool, names = opened(Chain(GRU(5, 6), sometimes, GRU(6, 4)), 4)
    pool.step(names, np.ones((5, 4)))
    before = pool.snapshot(names)
    fail[0] = True
    with pytest.raises(RuntimeError, match="no"):
        pool.step(names, np.ones((5, 4)), numbers=[2] * 4)
    assert pool.snapshot(names) == before


@pytest.mark.parametrize("stepped", [0, 2], ids=["first step", "third step"])
@pytest.mark.parametrize("failure", [RuntimeError("no"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("name", NAMES)
def test_a_clock_that_raises_leaves_every_stream_as_it_was(name, failure, stepped, rng):
    fail = [False]

    def clock():
        if fail[0]:
            raise failure
        return 5.0

    pool, names = opened(models()[name], 4, clock=clock)
    X = inputs(name, (4, 3), rng)
    expected = alone(models()[name], X)
    for t in range(stepped):
        pool.step(names, X[..., t])
    before = pool.snapshot(names)
    fail[0] = True
    for some in (names, names[::-2]):
        with pytest.raises(type(failure)):
            pool.step(some, X[..., : len(some), stepped], numbers=[stepped + 1] * len(some))
    with pytest.raises(type(failure)):
        pool.open("new")
    assert pool.snapshot(names) == before and "new" not in pool
    fail[0] = False
    y = pool.step(names, X[..., stepped], numbers=[stepped + 1] * 4)
    assert_same(name, y, expected[..., stepped])
    pool.open("new")


def test_threads_may_share_a_pool(rng):
    model = models()["two layers"]
    pool, names = opened(model, 8, capacity=2)
    X = rng.standard_normal((5, 8, 80)).astype(np.float32)
    expected = alone(model, X)
    found = np.empty_like(expected)

    def work(i):
        for t in range(80):
            found[:, i : i + 1, t] = pool.step([names[i]], X[:, i : i + 1, t])
            if t % 20 == 0:
                pool.open((i, t))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(found, expected) and len(pool) == 8 + 32


def test_no_streams_are_no_step():
    assert StreamPool(LSTM(1, 1)), "an empty pool is true"
    pool, names = opened(models()["two layers"], 2)
    pool.step(names, np.ones((5, 2)))
    assert pool.step([], np.empty((5, 0))).shape == (3, 0)
    assert pool.step([], np.empty((5, 0)), numbers=np.empty(0, int)).shape == (3, 0)
    assert pool.snapshot([]) == {} and pool.steps([]).shape == (0,)


def test_characters_go_in_as_indices(rng):
    pool, names = opened(models()["characters"], 3)
    assert pool.step(names, [1, 5, 10]).shape == (11, 3)
    with pytest.raises(ShapeError, match="index lies outside"):
        pool.step(names, [1, 5, 11])
    assert recur.Busy is Busy and list(pool.steps(names)) == [1, 1, 1]
