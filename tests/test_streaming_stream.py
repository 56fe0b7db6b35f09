"""One live stream.  The numbers S1 to S17 are those of the properties in docs/how-to/streams.md."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc

import numpy as np
import pytest
from streaming_models import NAMES, inputs, models

import recur
from recur import (
    LSTM,
    RNN,
    Bidirectional,
    Busy,
    Chain,
    Dense,
    Dropout,
    FormatError,
    Recur,
    ShapeError,
    StateError,
)
from recur.io import safetensors
from recur.streaming import Settled, Stream, StreamPool, settle

CUTS = {
    "ones": [1] * 530,
    "sevens": [7] * 75 + [5],
    "480": [480, 50],
    "uneven": [1, 255, 2, 0, 256, 16],
}


def steps_of(stream, X):
    return np.stack([stream(X[..., t]) for t in range(X.shape[-1])], -1)


# ---------------------------------------------------------------- S1: streamed = batch


@pytest.mark.parametrize("name", NAMES)
def test_s1_any_split_into_blocks_gives_the_bits_of_one_call(name, dtype, rng):
    model = models(dtype)[name]
    X = inputs(name, (530,), rng, dtype)
    whole = Stream(model).run(X)
    assert whole.dtype == dtype and whole.shape[-1] == 530
    for cut in CUTS.values():
        stream, at, pieces = Stream(model), 0, []
        for length in cut:
            pieces.append(stream.run(X[..., at : at + length]))
            at += length
        assert np.array_equal(np.concatenate(pieces, -1), whole)
    np.testing.assert_array_equal(steps_of(Stream(model), X), whole)


@pytest.mark.parametrize("name", NAMES)
def test_s1_a_stream_gives_the_bits_of_the_model_stepped_outside_a_scope(name, dtype, rng):
    model = models(dtype)[name]
    X = inputs(name, (40,), rng, dtype)
    alone = np.stack([model(X[..., t]) for t in range(40)], -1)
    assert np.array_equal(steps_of(Stream(model), X), alone)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_leaves_the_models_own_state_alone(name, rng):
    model = models()[name]
    X = inputs(name, (6,), rng)
    model(X[..., 0])
    before = recur.states(model)
    Stream(model).run(X)
    for path, state in recur.states(model).items():
        assert np.array_equal(np.asarray(state), np.asarray(before[path]))


def test_steps_and_blocks_may_be_mixed_in_any_order(rng):
    model = models()["two layers"]
    X = inputs("two layers", (60,), rng)
    whole = Stream(model).run(X)
    stream, t, out = Stream(model), 0, np.empty(3, np.float32)
    while t < 60:
        if rng.random() < 0.2:
            assert np.array_equal(stream.run(X[:, t : t + 4]), whole[:, t : t + 4])
            t += 4
            continue
        y = stream(X[:, t], out) if rng.random() < 0.3 else stream(X[:, t])
        assert np.array_equal(y, whole[:, t])
        t += 1
    assert stream.steps >= 60


def test_shapes_follow_those_of_the_input(rng):
    model = models()["two layers"]
    x = rng.standard_normal(5).astype(np.float32)
    assert Stream(model)(x).shape == (3,)
    assert Stream(model)(x[:, None]).shape == (3, 1)
    assert Stream(model).run(np.zeros((5, 9))).shape == (3, 9)
    assert Stream(model).run(np.zeros((5, 1, 9))).shape == (3, 1, 9)
    assert Stream(model).run(np.zeros((5, 0))).shape == (3, 0)
    characters = Stream(models()["characters"])
    assert characters(3).shape == (11,)
    assert characters(np.array([3])).shape == (11, 1)
    assert characters.run(np.array([1, 2, 3])).shape == (11, 3)


def test_written_weights_count_from_the_next_step(rng):
    model = models()["two layers"]
    X = inputs("two layers", (20,), rng)
    stream, twin = Stream(model), models()["two layers"]
    for t in range(20):
        if t == 10:
            for m in (model, twin):
                m[0].cell.Wh *= 0.5
                m[2].weight += 0.1
        assert np.array_equal(stream(X[:, t]), twin(X[:, t]))


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros(4), "x has 4 features on axis 0, expected 5"),
        (np.zeros((5, 2)), r"expected \(5, 1\)"),
        (np.zeros((1, 5, 1)), r"x has shape \(1, 5, 1\)"),
        (["a"] * 5, "x holds <U1, expected numbers"),
        ([[1], [1, 2]], "x is not an array"),
    ],
)
def test_an_input_that_does_not_fit_is_refused_and_nothing_moves(x, message):
    stream = Stream(LSTM(5, 6))
    stream(np.ones(5))
    before = stream.snapshot()
    with pytest.raises(ShapeError, match=message):
        stream(x)
    assert stream.snapshot() == before


def test_an_index_out_of_range_is_refused():
    stream = Stream(models()["characters"])
    with pytest.raises(ShapeError, match="index lies outside 0 to 10"):
        stream(11)
    with pytest.raises(ShapeError, match="index lies outside 0 to 10"):
        stream.run(np.array([1, -1]))
    assert stream.steps == 0


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (np.zeros((4, 3)), "4 features on axis 0"),
        (np.zeros(5), r"expected \(5, T\) or \(5, 1, T\)"),
        (np.zeros((5, 2, 3)), r"expected \(5, T\) or \(5, 1, T\)"),
    ],
)
def test_a_block_that_does_not_fit_is_refused(X, message):
    with pytest.raises(ShapeError, match=message):
        Stream(LSTM(5, 6)).run(X)


def test_an_out_that_does_not_fit_is_refused_and_nothing_moves(rng):
    model = models()["head"]
    for warm in (0, 3):
        stream = Stream(model)
        for _ in range(warm):
            stream(np.ones(5), np.empty(2, np.float32))
        before = stream.snapshot()
        memory = np.ones((5, 5), np.float32)
        for out in (np.empty(3, np.float32), "no array", np.broadcast_to(np.float32(0), 2)):
            with pytest.raises(ShapeError, match="out"):
                stream(np.ones(5), out)
        for out in (np.empty(2), memory[0, 1:3]):
            with pytest.raises(ShapeError, match="out"):
                stream(memory[0], out)
        for out in (np.empty((2, 4), np.float32), np.empty((3, 5), np.float32), np.empty((2, 5))):
            with pytest.raises(ShapeError, match="out has"):
                stream.run(np.ones((5, 5)), out)
        with pytest.raises(ShapeError, match="out shares memory with x"):
            stream.run(memory, memory[:2])
        assert stream.snapshot() == before


def test_a_layer_that_raises_leaves_the_stream_as_it_was(rng):
    fail = [False]

    def sometimes(y):
        if fail[0]:
            raise RuntimeError("no")
        return y

    stream = Stream(Chain(LSTM(5, 6), sometimes))
    X = rng.standard_normal((5, 4)).astype(np.float32)
    stream(X[:, 0])
    before = stream.snapshot()
    fail[0] = True
    for call in (lambda: stream(X[:, 1]), lambda: stream.run(X)):
        with pytest.raises(RuntimeError, match="no"):
            call()
        assert stream.snapshot() == before


def test_what_cannot_step_is_refused_by_name():
    with pytest.raises(StateError, match=r"Bidirectional\(.*reads a sequence from its end"):
        Stream(Chain(Bidirectional(LSTM(3, 4), LSTM(3, 4)), Dense(8, 2)))
    with pytest.raises(StateError, match=r"Recur\(.*steps a function"):
        Stream(Chain(Recur(lambda h, x: (h + x, h), init=0.0)))

    class Hides(recur.Module):
        def __init__(self):
            self.inner = LSTM(3, 4)

        def __call__(self, x):
            return self.inner(x)

    with pytest.raises(StateError, match=r"Hides.*holds Recur"):
        Stream(Chain(Hides()))
    with pytest.raises(StateError, match="in a stream it returned list"):
        Stream(Chain(LSTM(3, 4), lambda y: [1]))(np.zeros(3))


def test_an_active_layer_is_refused_and_an_inactive_one_draws_nothing():
    model = Chain(LSTM(5, 6), Dropout(0.5), recur.BatchNorm(6))
    stream = Stream(model)
    state = model[1].generator.bit_generator.state
    stream(np.ones(5))
    with recur.Tape():
        stream(np.ones(5))
    assert model[1].generator.bit_generator.state == state
    recur.trainmode(model)
    with pytest.raises(StateError, match=r"BatchNorm\(6\): it was set active"):
        stream(np.ones(5))


def test_a_step_inside_a_step_is_busy():
    stream = None
    model = Chain(LSTM(2, 2), lambda y: (stream(np.zeros(2)), y)[1])
    stream = Stream(model)
    with pytest.raises(Busy, match="inside a step already"):
        stream(np.zeros(2))


# ---------------------------------------------------------------- S2: a start is a start


@pytest.mark.parametrize("name", NAMES)
def test_s2_reset_goes_to_the_start_whatever_came_before(name, rng):
    model = models()[name]
    X = inputs(name, (12,), rng)
    stream = Stream(model)
    first = steps_of(stream, X)
    stream.reset()
    assert stream.steps == 0
    assert np.array_equal(stream.run(X), first)


def test_s2_a_learned_start_is_that_of_the_moment():
    model = models()["learned start"]
    assert np.allclose(Stream(model).state[""].h, 0.3)
    stream = Stream(model)
    model.init.h[...] = 0.9
    assert np.allclose(stream.state[""].h, 0.3)
    stream.reset()
    assert np.allclose(stream.state[""].h, 0.9)


# ---------------------------------------------------------------- S12, S13: no growth


def _grown(action, times):
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(times):
        action()
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before


@pytest.mark.parametrize("in_scope", [False, True])
def test_s12_a_stream_never_records_and_never_grows(in_scope):
    model = models()["two layers"]
    stream, x = Stream(model), np.ones(5, np.float32)
    tape = recur.Tape()
    with tape if in_scope else recur.paused():
        y = stream(x)
        assert type(y) is np.ndarray
        tracemalloc.start()
        try:
            for _ in range(100):
                stream(x)
            assert _grown(lambda: stream(x), 3000) < 4096
            assert _grown(lambda: stream.run(np.ones((5, 10), np.float32)), 300) < 4096
        finally:
            tracemalloc.stop()
        if in_scope:
            assert tape.live == 0


def _peak(action):
    """The most bytes that Python and NumPy held at once in a call, beyond those before it."""
    for _ in range(5):
        action()
    gc.collect()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    action()
    return tracemalloc.get_traced_memory()[1] - before


@pytest.mark.parametrize("name", ["layer", "chain"])
def test_s13_a_step_allocates_its_answer_alone_and_with_out_nothing(name):
    models = {"layer": LSTM(64, 1024), "chain": Chain(LSTM(64, 32), recur.Dense(32, 1024))}
    stream = Stream(models[name])
    x, X = np.ones(64, np.float32), np.ones((64, 300), np.float32)
    out, Out = np.empty(1024, np.float32), np.empty((1024, 300), np.float32)
    tracemalloc.start()
    try:
        nothing = _peak(lambda: None)
        assert out.nbytes <= _peak(lambda: stream(x)) - nothing < out.nbytes + 400
        assert _peak(lambda: stream(x, out)) - nothing < 100  # the tuple of the arguments
        assert Out.nbytes <= _peak(lambda: stream.run(X)) - nothing < Out.nbytes + 600
        assert _peak(lambda: stream.run(X, Out)) - nothing < 300  # the frames of Python's call
        assert _grown(lambda: stream(x, out), 100) < 512
    finally:
        tracemalloc.stop()


def test_s13_an_out_that_cannot_take_the_answer_is_refused_and_nothing_moves(rng):
    model = LSTM(5, 5)
    x, X = rng.standard_normal(5).astype(np.float32), np.ones((5, 8), np.float32)
    locked = np.empty(5, np.float32)
    locked.flags.writeable = False
    for warm in (0, 3):
        stream = Stream(model)
        for _ in range(warm):
            stream(x)
        before = Stream.restore(model, stream.fork().snapshot())
        for _ in range(warm):
            stream(x), before(x)
        for out in (np.empty(5), np.empty((5, 1), np.float32), np.empty(6, np.float32), locked, x):
            with pytest.raises(ShapeError, match="out"):
                stream(x, out)
        for out in (np.empty((5, 8)), np.empty((5, 7), np.float32), X, X[:, ::-1]):
            with pytest.raises(ShapeError, match="out"):
                stream.run(X, out)
        assert stream.snapshot() == before.snapshot()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_s13_answers_go_into_any_strides_and_are_those_without_out(dtype, rng):
    model = Chain(LSTM(5, 6, dtype=dtype), recur.Dense(6, 4, dtype=dtype))
    one, other = Stream(model), Stream(model)
    memory = np.zeros((700, 11, 2), dtype)
    X = rng.standard_normal((5, 700))
    for form in (X, np.asfortranarray(X), X[:, None], X.astype(np.float32)):
        for _ in range(3):
            want = one.run(form)
            out = memory[:, 1:9:2, 1].T
            out = out if form.ndim == 2 else out[:, None]
            assert other.run(form, out) is out and np.array_equal(out, want)
            column = memory[::7, 3, 0][:4]
            assert other(X[:, 3], column) is column
            assert np.array_equal(column, one(X[:, 3]))
    assert one.steps == other.steps == 4 * 3 * 701
    with pytest.raises(ShapeError, match="out has"):
        other(X[:, :1], np.empty((4, 5), dtype))
    with pytest.raises(ShapeError, match="out has"):
        other.run(X[:, None], np.empty((4, 7, 700), dtype))
    assert np.array_equal(one(X[:, 0]), other(X[:, 0]))


def test_s13_streams_of_one_model_run_in_many_threads(rng):
    model = models()["head"]
    X = rng.standard_normal((8, 5, 300)).astype(np.float32)
    expected = [Stream(model).run(x) for x in X]
    found = [None] * 8

    def work(i):
        stream = Stream(model)
        found[i] = np.concatenate([stream.run(X[i][:, :100]), steps_of(stream, X[i][:, 100:])], 1)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def _others_meanwhile(action):
    """How often another thread came by while `action` ran once; of Python's own accord it never
    does in a call of C that holds the lock."""
    begun, over = threading.Event(), threading.Event()

    def work():
        begun.set()
        action()
        over.set()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread, count = threading.Thread(target=work), 0
    try:
        thread.start()
        begun.wait()
        while not over.is_set():
            count += 1
    finally:
        thread.join()
        sys.setswitchinterval(before)
    return count


def test_s13_a_long_block_and_a_step_of_many_streams_let_other_threads_run(rng):
    model = LSTM(64, 256, rng=rng)
    stream, X = Stream(model), rng.standard_normal((64, 3000)).astype(np.float32)
    out = np.empty((256, 3000), np.float32)
    for _ in range(3):
        stream.run(X[:, :10], out[:, :10])
    pool = StreamPool(model, capacity=4000)
    for i in range(4000):
        pool.open(i)
    slots = pool.slots(range(4000))
    x, y = np.ones((64, 4000), np.float32), np.empty((256, 4000), np.float32)
    for _ in range(2):
        pool.step(slots, x, out=y)
    assert _others_meanwhile(lambda: stream.run(X, out)) > 20_000
    assert _others_meanwhile(lambda: pool.step(slots, x, out=y)) > 20_000


# ---------------------------------------------------------------- S14: subnormals


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_s14_subnormals_count_as_zero_in_streams_and_pools_and_only_there(dtype):
    model = Chain(LSTM(3, 5, dtype=dtype), Dense(5, 2, dtype=dtype))
    tiny = dtype(np.finfo(dtype).tiny)
    state = {"layers.0": (np.full((5, 1), tiny / 4), np.full((5, 1), tiny / 4))}
    silence = np.zeros(3, dtype)
    fresh = Stream(model, rest="zeros")
    at_zero = [fresh(silence) for _ in range(4)]
    stream, block, pool = Stream(model), Stream(model), StreamPool(model)
    pool.open("a")
    stream.state = block.state = state
    pool.set_state(["a"], state)
    for expected in at_zero:
        assert np.array_equal(stream(silence), expected)
        assert np.array_equal(pool.step(["a"], silence[:, None])[:, 0], expected)
        assert tiny / dtype(2) > 0, "the processor was left flushing"
    block.run(silence[:, None])
    assert np.array_equal(block.run(np.zeros((3, 3), dtype)), np.stack(at_zero[1:], 1))
    assert tiny / dtype(2) > 0, "the processor was left flushing"


# ---------------------------------------------------------------- S15: rest


def test_s15_streams_start_where_they_are_told_to():
    model = models()["learned start"]
    assert np.allclose(Stream(model).state[""].c, -0.2)
    assert not Stream(model, rest="zeros").state[""].c.any()
    with pytest.raises(ValueError, match="rest is 'cold'"):
        Stream(model, rest="cold")


def test_s15_a_reset_to_the_settled_state_does_not_click(rng):
    model = Chain(LSTM(1, 12, rng=rng), Dense(12, 1, rng=rng))
    silence = np.full(1, 0.25, np.float32)
    stream = Stream(model, rest=Settled(silence, tol=1e-7))
    at_rest = stream(silence)
    stream.run(rng.standard_normal((1, 50)))
    stream.reset()
    assert abs(stream(silence) - at_rest).max() < 1e-6
    cold = Stream(model, rest="zeros")
    assert abs(cold(silence) - at_rest).max() > 1e-3, "the test would pass without settling"


def test_s15_the_settled_state_is_stored_with_the_model(tmp_path, rng):
    model = Chain(LSTM(1, 12, rng=rng), Dense(12, 1, rng=rng))
    silence = np.full(1, 0.25, np.float32)
    settle(model, silence, tol=1e-7)
    recur.save(model, tmp_path / "m.safetensors")
    loaded = recur.load(tmp_path / "m.safetensors")
    for stream in (Stream(model), Stream(loaded)):
        h = stream.state["layers.0"].h
        stream(silence)
        assert abs(stream.state["layers.0"].h - h).max() < 1e-6


def test_s15_a_state_that_does_not_settle_is_refused():
    model = RNN(1, 1, recur.identity)
    model.cell.Wi[...] = 1
    model.cell.Wh[...] = 1
    with pytest.raises(StateError, match="has not settled: after 50 steps"):
        Stream(model, rest=Settled(np.ones(1), max_steps=50))


# ---------------------------------------------------------------- S16: snapshots


@pytest.mark.parametrize("name", NAMES)
def test_s16_a_restored_stream_goes_on_bit_for_bit(name, dtype, rng):
    model = models(dtype)[name]
    X = inputs(name, (30,), rng, dtype)
    stream = Stream(model)
    stream.run(X[..., :10])
    data = stream.snapshot()
    assert len(data) < sum(p.nbytes for p in stream._plan.parts) + 400
    expected = stream.run(X[..., 10:])
    again = Stream.restore(model, data)
    assert again.steps == 10
    assert np.array_equal(again.run(X[..., 10:]), expected)
    assert stream.steps == 30


def test_s16_a_fork_goes_on_by_itself(rng):
    model = models()["two layers"]
    X = inputs("two layers", (20,), rng)
    stream = Stream(model)
    stream.run(X[:, :10])
    twin = stream.fork()
    expected = stream.run(X[:, 10:])
    assert np.array_equal(steps_of(twin, X[:, 10:]), expected)


def test_s16_a_state_can_be_read_and_written(rng):
    model = models()["two layers"]
    stream, other = Stream(model), Stream(model)
    X = inputs("two layers", (20,), rng)
    for t in range(5):
        stream(X[:, t])
    state = stream.state
    assert list(state) == ["layers.0", "layers.1"] and state["layers.0"].h.shape == (7, 1)
    other.state = state
    state["layers.0"].h[...] = 99  # a copy: neither stream sees it
    assert np.array_equal(other.run(X[:, 5:]), stream.run(X[:, 5:]))
    for bad, message in [
        ({}, "no path"),
        ([], "the state has list"),
        ({**state, "layers.1": (1, 2)}, "has 2 parts, expected 1"),
        ({**state, "layers.1": np.zeros((4, 2))}, r"shape \(4, 2\), expected \(4, 1\)"),
    ]:
        with pytest.raises(StateError, match=message):
            other.state = bad


def test_s16_every_damaged_or_shortened_snapshot_is_refused(rng):
    model = LSTM(2, 3)
    stream = Stream(model)
    stream(np.ones(2))
    data = stream.snapshot()
    for n in range(len(data)):
        with pytest.raises(FormatError):
            Stream.restore(model, data[:n])
        bad = bytearray(data)
        bad[n] ^= 1 << int(rng.integers(8))
        with pytest.raises(FormatError):
            Stream.restore(model, bytes(bad))
    with pytest.raises(FormatError):
        Stream.restore(model, data + b"\0")
    with pytest.raises(FormatError, match="is a str"):
        Stream.restore(model, "text")


def test_s16_a_snapshot_of_another_model_is_refused_and_new_weights_only_on_request(rng):
    data = Stream(LSTM(2, 3)).snapshot()
    with pytest.raises(FormatError, match=r"its state is h \(3,\).* expected h \(4,\)"):
        Stream.restore(LSTM(2, 4), data)
    with pytest.raises(FormatError, match="other layers or options"):
        Stream.restore(LSTM(5, 3), data)
    with pytest.raises(FormatError, match=r"expected .*float64"):
        Stream.restore(LSTM(2, 3, dtype=np.float64), data)
    other = LSTM(2, 3)
    with pytest.raises(FormatError, match="allow_weights_change=True"):
        Stream.restore(other, data)
    Stream.restore(other, data, allow_weights_change=True)


def test_s16_the_mode_of_random_layers_does_not_matter():
    model = models()["dropout"]
    data = Stream(model).snapshot()
    Stream.restore(recur.testmode(model), data)


def test_s16_a_key_shows_tampering(rng):
    model = LSTM(2, 3)
    stream = Stream(model)
    signed, plain = stream.snapshot(key=b"secret"), stream.snapshot()
    Stream.restore(model, signed, key=b"secret")
    with pytest.raises(FormatError, match="signed with another key"):
        Stream.restore(model, signed, key=b"guess")
    with pytest.raises(FormatError, match=r"is signed\. Pass key="):
        Stream.restore(model, signed)
    with pytest.raises(FormatError, match="not signed, and key= asks"):
        Stream.restore(model, plain, key=b"secret")


# ---------------------------------------------------------------- S17: partial weights


def test_s17_weights_that_are_missing_or_unused_are_refused_by_name():
    model = models()["two layers"]
    weights = recur.state_dict(model)
    missing = {k: v for k, v in weights.items() if k != "layers.1.cell.Wh"}
    with pytest.raises(recur.RecurError, match=r"layers\.1\.cell\.Wh"):
        recur.load_state_dict(model, missing)
    with pytest.raises(recur.RecurError, match=r"layers\.9\.cell\.Wh"):
        recur.load_state_dict(model, {**weights, "layers.9.cell.Wh": np.zeros(3)})


@pytest.mark.parametrize("change", ["missing", "unused", "of another size"])
def test_s17_a_file_whose_weights_do_not_fit_is_refused_by_name(change, tmp_path):
    path = tmp_path / "m.safetensors"
    recur.save(models()["two layers"], path)
    arrays, metadata = safetensors.read(path)
    if change == "missing":
        del arrays["layers.1.cell.Wh"]
    elif change == "unused":
        arrays["layers.9.cell.Wh"] = arrays["layers.1.cell.Wh"]
    else:
        arrays["layers.1.cell.Wh"] = arrays["layers.1.cell.Wh"][:-1]
    safetensors.write(path, arrays, metadata)
    place = "layers.9" if change == "unused" else "layers.1"
    with pytest.raises(FormatError, match=rf"{place}.cell.Wh"):
        recur.load(path)
