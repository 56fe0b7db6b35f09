"""What streams and pools are handed: each error says what is wrong, and nothing moves."""

from __future__ import annotations

import copy
import hashlib
import pickle
import struct

import numpy as np
import pytest

import recur
from recur import LSTM, Chain, Conflict, Dense, FormatError, ShapeError, StateError, StreamError
from recur.streaming import Flush, MemoryStore, Settled, SQLiteStore, Stream, StreamPool, drift

X = np.random.default_rng(2).standard_normal((5, 9)).astype(np.float32)
NAN = float("nan")


def model():
    rng = np.random.default_rng(0)
    return Chain(LSTM(5, 8, rng=rng), Dense(8, 3, rng=rng))


def opened(n=3, **options):
    pool = StreamPool(model(), **options)
    names = [f"s{i}" for i in range(n)]
    for name in names:
        pool.open(name)
    return pool, names


@pytest.mark.parametrize("thing", [None, "model.safetensors", 3, {}, object()])
def test_what_is_no_model_is_refused_when_a_stream_is_made(thing):
    for make in (Stream, StreamPool):
        with pytest.raises(TypeError, match="is no layer, expected a recurrent layer"):
            make(thing)


def test_a_cell_without_a_state_of_its_own_is_refused_with_the_remedy():
    with pytest.raises(StateError, match=r"is a cell\. Put a recur\.Recur around it"):
        Stream(LSTM(5, 8).cell)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity is 0, expected a whole number of at least 1"),
        ({"capacity": 1.5}, "capacity is 1.5"),
        ({"capacity": "many"}, "capacity is 'many'"),
        ({"capacity": True}, "capacity is True"),
        ({"limit": -1}, "limit is -1, expected a whole number of at least 0"),
        ({"limit": "few"}, "limit is 'few'"),
        ({"idle": 0}, "idle is 0, expected seconds"),
        ({"idle": -1}, "idle is -1"),
        ({"idle": NAN}, "idle is nan"),
        ({"idle": float("inf")}, "idle is inf"),
        ({"idle": 1e-9}, "idle is 1e-09, expected seconds, or None for never, at least 1e-06"),
        ({"idle": "long"}, "idle is 'long'"),
        ({"ttl": 0}, "ttl is 0"),
        ({"store": "streams.db"}, r"store is 'streams\.db', expected a StateStore"),
        ({"flush": 5}, "flush is 5, expected Flush"),
        ({"key": "secret"}, "key is a str, expected secret bytes"),
        ({"key": b""}, "key is empty"),
        ({"on_idle": 5}, "on_idle is 5, expected a function"),
        ({"rest": None}, "rest is None, expected 'learned'"),
        ({"rest": np.ones(3)}, "rest is array"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused_when_the_pool_is_made(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        StreamPool(model(), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Flush(steps=0), "Flush: steps is 0"),
        (lambda: Flush(steps=1.5), r"Flush: steps is 1\.5"),
        (lambda: Flush(steps="all"), "Flush: steps is 'all'"),
        (lambda: Flush(seconds=-1), "Flush: seconds is -1"),
        (lambda: Flush(seconds=NAN), "Flush: seconds is nan"),
        (lambda: Settled(X[:, 0], tol=-1), "Settled: tol is -1"),
        (lambda: Settled(X[:, 0], tol="tiny"), "Settled: tol is 'tiny'"),
        (lambda: Settled(X[:, 0], tol=NAN), "Settled: tol is nan"),
        (lambda: Settled(X[:, 0], max_steps=0), "Settled: max_steps is 0"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused_where_it_is_written(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("ids", ["s0", b"s0", None, 5])
def test_one_name_or_none_is_no_list_of_streams(ids):
    pool, names = opened()
    before = pool.snapshot(names)
    for call in (
        lambda: pool.step(ids, X[:, :1]),
        lambda: pool.slots(ids),
        lambda: pool.steps(ids),
        lambda: pool.state(ids),
        lambda: pool.reset(ids),
    ):
        with pytest.raises(TypeError, match=r"StreamPool\(.*ids is .*expected a list of streams"):
            call()
    assert pool.snapshot(names) == before


def test_what_cannot_name_a_stream_is_refused():
    pool, names = opened()
    for call in (
        lambda: pool.open(["s9"]),
        lambda: pool.close(["s0"]),
        lambda: pool.fork("s0", ["s9"]),
        lambda: pool.step([["s0"]], X[:, :1]),
        lambda: pool.snapshot({"a": 1}),
    ):
        with pytest.raises(
            StreamError, match="cannot name a stream, expected a string or a number"
        ):
            call()
    assert pool.ids() == names


@pytest.mark.parametrize("store", ["memory", "file"])
def test_a_name_that_no_store_can_hold_is_refused(store, tmp_path):
    kept = MemoryStore() if store == "memory" else SQLiteStore(tmp_path / "s.db")
    pool = StreamPool(model(), store=kept)
    with pytest.raises(StreamError, match="is no text, expected what UTF-8 can hold"):
        pool.open("\ud800")
    with pytest.raises(StreamError, match="is a int, and a store keeps streams by strings"):
        pool.open(5)
    assert pool.ids() == [] and kept.keys() == []
    kept.close()


def test_slots_of_another_pool_are_refused_and_its_streams_do_not_move():
    """They would step whatever stream lies at the same place."""
    pool, _ = opened()
    other, names = opened()
    before = other.snapshot(names)
    for call in (lambda s: other.step(s, X[:, :1]), other.steps, other.reset, other.state):
        with pytest.raises(StreamError, match="those of another pool"):
            call(pool.slots(["s1"]))
    assert other.snapshot(names) == before


@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize(
    ("out", "message"),
    [
        ([1, 2], "is a list"),
        (5, "is a int"),
        (np.empty((2, 3), np.float32), r"has shape \(2, 3\).*answers have \(3, 3\)"),
        (np.empty((3, 3)), "holds float64, the answers have .* float32"),
        (np.empty((3, 3), np.int8), "holds int8"),
        (np.broadcast_to(np.float32(0), (3, 3)), "read-only"),
    ],
)
@pytest.mark.parametrize("numbered", [False, True])
def test_an_out_that_cannot_take_the_answers_is_refused_and_nothing_moves(
    out, message, numbered, warm
):
    pool, names = opened()
    for t in range(warm):
        pool.step(names, X[:, [t, t, t]])
    before = pool.snapshot(names)
    numbers = [warm + 1] * 3 if numbered else None
    with pytest.raises(ShapeError, match=rf"StreamPool\(.*out .*{message}.*Nothing was changed"):
        pool.step(names, X[:, 3:6], numbers=numbers, out=out)
    assert pool.snapshot(names) == before
    good = np.empty((3, 3), np.float32)
    assert pool.step(names, X[:, 3:6], numbers=numbers, out=good) is good


@pytest.mark.parametrize(
    "given", [1, [], [1], [1, 1, 1, 1], [[1], [1], [1]], ["1"] * 3, [None] * 3, [1.0] * 3,
              [[1], [1, 2], 3], [True] * 3],
)  # fmt: skip
def test_numbers_and_epochs_that_are_not_one_whole_number_a_stream_are_refused(given):
    pool, names = opened()
    before = pool.snapshot(names)
    for name in ("numbers", "epochs"):
        with pytest.raises(ShapeError, match=rf"{name} is .*expected integers \(3,\)"):
            pool.step(names, X[:, :3], **{name: given})
    assert pool.snapshot(names) == before


@pytest.mark.parametrize("number", [-(2**63), -1, 0, 2**63 - 1, 2**63, 2**64 - 1, 2**70])
def test_a_number_at_the_end_of_its_range_is_a_gap_or_a_conflict_and_moves_nothing(number):
    pool, names = opened(1)
    pool.step(names, X[:, :1])
    before = pool.snapshot(names)
    with pytest.raises((recur.Gap, Conflict, ShapeError)):
        pool.step(names, X[:, 1:2], numbers=[number])
    assert pool.snapshot(names) == before


def test_snapshots_that_are_no_dict_and_keys_that_are_no_bytes_are_refused():
    pool, _ = opened()
    data = pool.snapshot("s0")
    for thing in (None, [data], data):
        with pytest.raises(TypeError, match="expected a dict of bytes by stream"):
            pool.restore(thing)
    stream = Stream(model())
    for call in (
        lambda: pool.snapshot("s0", key="secret"),
        lambda: pool.restore({"x": data}, key="secret"),
        lambda: stream.snapshot(key=5),
        lambda: Stream.restore(model(), data, key=""),
    ):
        with pytest.raises(TypeError, match="expected secret bytes"):
            call()
    with pytest.raises(ValueError, match="tag is a str, expected 16 bytes"):
        pool.open("x", tag="t" * 16)


def test_a_forged_answer_of_another_shape_is_refused_and_spoils_no_pool():
    """Whoever may restore a snapshot must not be able to say what the answers of all are like."""
    data = Stream(model()).snapshot()
    body = bytearray(data[:-32])
    struct.pack_into("<H", body, 10, 2)  # it says that it holds an answer
    for answer in (np.ones(1, np.float32), np.ones(3), np.ones((3, 1), np.float32)):
        forged = bytes(body) + answer.dtype.str.encode()
        forged += struct.pack(f"<B{answer.ndim}I", answer.ndim, *answer.shape) + answer.tobytes()
        forged += hashlib.sha256(forged).digest()
        pool = StreamPool(model())
        with pytest.raises(
            FormatError, match=r"holds an answer .*expected float32 of shape \(3,\)"
        ):
            pool.restore({"evil": forged})
        pool.open("good")
        assert pool.step(["good"], X[:, :1]).shape == (3, 1)


def test_neither_streams_nor_pools_are_copied_or_pickled_by_halves():
    stream, (pool, _) = Stream(model()), opened()
    for thing, remedy in ((stream, r"fork\(\) gives a second"), (pool, r"snapshot\(ids\)")):
        for copying in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=f"cannot be copied or pickled.*{remedy}"):
                copying(thing)


def test_drift_between_answers_of_different_sizes_is_refused():
    with pytest.raises(ShapeError, match=r"answers \(3, 9\), .* \(8, 9\)"):
        drift(model(), LSTM(5, 8), X)
