"""Rows scattered over blocks of memory: gathered, scattered, marked, hashed."""

from __future__ import annotations

import numpy as np
import pytest
from test_kernels_stepper import chain, walk

from recur import _kernels
from recur._kernels import (
    NOTE,
    AffineKernel,
    LSTMKernel,
    SlotStepper,
    Version,
    gather_rows,
    hash_rows,
    mark_rows,
    scatter_rows,
)

SIZES = (4, 4, 8, 16)
STARTS = np.array([0, 4, 8, 16])
DTYPES = [np.bool_, np.uint8, np.int64, np.float32, np.float64]


def blocks_of(shape, dtype, rng):
    return tuple(rng.integers(0, 100, (n, *shape)).astype(dtype) for n in SIZES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (0,)])
def test_gathered_rows_are_those_that_numpy_takes(shape, dtype, rng):
    blocks = blocks_of(shape, dtype, rng)
    index = rng.permutation(32)[:11]
    out = np.empty((11, *shape), dtype)
    assert gather_rows(blocks, STARTS, index, out) is out
    assert np.array_equal(out, np.concatenate(blocks)[index])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5)])
def test_scattered_rows_are_those_that_numpy_puts_and_no_other_moves(shape, dtype, rng):
    blocks = blocks_of(shape, dtype, rng)
    expected = np.concatenate(blocks)
    index = rng.permutation(32)[:11]
    rows = rng.integers(0, 100, (11, *shape)).astype(dtype)
    expected[index] = rows
    scatter_rows(blocks, STARTS, index, rows)
    assert np.array_equal(np.concatenate(blocks), expected)


def test_rows_may_lie_any_distance_apart(rng):
    wide = rng.standard_normal((8, 7))
    columns = (wide[:, 1:4],)
    index, starts = np.array([5, 0, 7]), np.array([0])
    out = np.empty((3, 3))
    assert np.array_equal(gather_rows(columns, starts, index, out), wide[index, 1:4])
    before = wide.copy()
    scatter_rows(columns, starts, index, out + 1)
    before[index, 1:4] += 1
    assert np.array_equal(wide, before)


def test_marked_slots_are_one_step_on_and_no_other_is(rng):
    blocks = tuple(np.zeros(n, NOTE) for n in SIZES)
    for block in blocks:
        block["step"] = 7
        block["digest"] = 9
    index, digests = np.array([30, 2, 9]), np.array([1, 2, 3], np.uint64)
    mark_rows(blocks, STARTS, index, 1.5, digests)
    notes = np.concatenate(blocks)
    assert list(notes["step"][index]) == [8, 8, 8] and notes["step"].sum() == 32 * 7 + 3
    assert list(notes["digest"][index]) == [1, 2, 3]
    assert notes["answered"].sum() == 3 and (notes["time"][index] == 1.5).all()
    mark_rows(blocks, STARTS, index[:1], 2.5)
    assert blocks[3][14].item() == (9, 0, 2.5, True)


@pytest.mark.parametrize("change, error, message", [
    ({"index": np.array([32])}, ValueError, r"index\[0\] is 32, expected 0 to 31"),
    ({"index": np.array([-1])}, ValueError, r"index\[0\] is -1"),
    ({"index": np.array([1.0])}, TypeError, "index is float64"),
    ({"starts": np.array([0, 4, 9, 16])}, ValueError, "block 2 starts at slot 9, expected 8"),
    ({"starts": np.array([0, 4])}, ValueError, "starts has shape"),
    ({"rows": np.zeros((2, 3))}, ValueError, "has 2 rows, expected 1"),
    ({"rows": np.zeros((1, 4))}, ValueError, "a block is float64"),
    ({"rows": np.zeros((1, 3), np.float32)}, ValueError, "the rows are float32"),
    ({"rows": np.zeros((3, 1)).T[:, ::-1]}, ValueError, "must be aligned and C-contiguous"),
    ({"blocks": ()}, ValueError, "there are 0 blocks"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_and_nothing_moves(change, error, message):
    blocks = tuple(np.zeros((n, 3)) for n in SIZES)
    given = {"blocks": blocks, "starts": STARTS, "index": np.array([3]), "rows": np.ones((1, 3))}
    given |= change
    for move in (gather_rows, scatter_rows):
        with pytest.raises(error, match=message):
            move(*given.values())
    assert not any(block.any() for block in blocks)


def test_a_block_that_is_none_is_refused():
    block, start, one = np.zeros((4, 3)), np.array([0, 4]), np.zeros((1, 3))
    for call in (gather_rows, scatter_rows):
        with pytest.raises(TypeError, match=r"blocks\[1\] is None"):
            call((block, None), start, np.array([0]), one)


def test_read_only_memory_and_objects_are_refused():
    fixed = np.zeros((4, 3))
    fixed.flags.writeable = False
    starts, index = np.array([0]), np.array([1])
    with pytest.raises(ValueError, match=r"blocks\[0\] is read-only"):
        scatter_rows((fixed,), starts, index, np.ones((1, 3)))
    with pytest.raises(ValueError, match="out is read-only"):
        gather_rows((np.zeros((4, 3)),), starts, index, fixed[:1])
    with pytest.raises(TypeError, match="Python objects"):
        gather_rows((np.empty(4, object),), starts, index, np.empty(1, object))


def twin(rows):
    """hash_rows as its docstring has it, in Python's whole numbers."""
    found = []
    for row in rows:
        data = row.tobytes()
        data += bytes(-len(data) % 4) if data else bytes(4)
        total = 0
        for j, word in enumerate(np.frombuffer(data, np.uint32).tolist(), 1):
            m = (word + 1) * (j * 0x9E3779B97F4A7C15 % 2**64 | 1) % 2**64
            total += (m ^ m >> 29) * 0xBF58476D1CE4E5B9
        total %= 2**64
        found.append((total ^ total >> 32) | 1)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (0,)])
def test_hashes_follow_their_formula(shape, dtype, rng):
    rows = rng.integers(0, 100, (6, *shape)).astype(dtype)
    assert hash_rows(rows).tolist() == twin(rows)
    assert hash_rows(rows[:0]).shape == (0,)


def test_hashes_of_other_rows_differ(rng):
    rows = rng.standard_normal((10_000, 3)).astype(np.float32)
    assert len(set(hash_rows(rows).tolist())) == 10_000
    with pytest.raises(ValueError, match="C-contiguous"):
        _kernels.hash_rows(rows[:, ::2])


# ---------------------------------------------------------------- SlotStepper

WIDTHS = (7, 7, 5, 6, 17)  # of h and c of the LSTM, and of the other cells of `chain`


class Memory:
    """32 slots of the states of `chain`, their answers and notes, in four blocks."""

    def __init__(self, dtype, rng, most=512, watch=()):
        self.stages = chain(dtype)
        draw = lambda w: tuple(rng.standard_normal((n, w)).astype(dtype) for n in SIZES)  # noqa: E731
        self.states = tuple(draw(w) for w in WIDTHS)
        self.answers, self.notes = draw(4), tuple(np.zeros(n, NOTE) for n in SIZES)
        self.stepper = SlotStepper(
            self.stages, STARTS, self.states, self.answers, self.notes, most, watch=watch
        )

    def all(self):
        return [np.concatenate(blocks) for blocks in (*self.states, self.answers, self.notes)]

    def same(self, before):
        *now, notes = self.all()
        *then, held = before
        same = all(a.tobytes() == b.tobytes() for a, b in zip(now, then, strict=True))
        return same and np.array_equal(notes, held)  # copies of records have other padding


def after(memory, index, x, digests, now):
    """What `all` is to be after a step by single calls, and the answers."""
    *states, answers, notes = memory.all()
    h, c, *rest = [a[index] for a in states]
    y, new = walk(memory.stages, x, [(h, c), *((a,) for a in rest)])
    for a, part in zip(states, [part for cell in new for part in cell], strict=True):
        a[index] = part
    answers[index] = y
    for i, slot in enumerate(index):
        notes[slot] = (notes[slot]["step"] + 1, digests[i], now, True)
    return [*states, answers, notes], y


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("index", [
    [9], [8, 9, 10, 11], [2, 3, 4, 5], [16, 17], [31, 2, 9, 8, 20, 0, 1], list(range(32)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("most", [3, 512])
def test_slots_step_with_the_bits_of_the_single_calls_and_no_other_moves(dtype, index, most, rng):
    memory, index = Memory(dtype, rng, most), np.array(index)
    n = len(index)
    for t in range(3):
        x = rng.standard_normal((n, 3)).astype(dtype)
        digests = rng.integers(1, 99, n).astype(np.uint64)
        expected, y = after(memory, index, x, digests, 1.5 + t)
        found = memory.stepper.step(index, x.T, lambda t=t: 1.5 + t, digests)
        assert found.T.flags.c_contiguous and found.T.tobytes() == y.tobytes()
        assert memory.same(expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_inputs_and_answers_of_slots_may_have_any_strides(dtype, rng):
    memory, index = Memory(dtype, rng, 3), np.array([31, 2, 9, 8, 20])
    wide = rng.standard_normal((6, 10)).astype(dtype)
    other = np.float64 if dtype == np.float32 else np.float32
    for x in (wide[::2, ::-2], np.ascontiguousarray(wide[:3, :5]), wide[:3, :5].astype(other)):
        for room in (np.empty((4, 5), dtype), np.empty((8, 10), dtype), np.empty((5, 4), dtype)):
            out = room.T if room.shape == (5, 4) else room[: 4 if len(room) == 4 else 8]
            out = out[::2, ::2] if out.shape == (8, 10) else out
            zeros = np.zeros(5, np.uint64)
            expected, y = after(memory, index, np.ascontiguousarray(x.T, dtype), zeros, 0)
            assert memory.stepper.step(index, x, lambda: 0.0, None, out) is out
            assert np.array_equal(out, y.T) and memory.same(expected)
    one = memory.stepper.step(index[:1], wide[:3, 0], lambda: 0.0)
    assert one.shape == (4, 1)


def test_what_a_slot_stepper_cannot_do_it_leaves_and_nothing_moves(rng):
    version = Version()
    memory, index = Memory(np.float32, rng, watch=(version,)), np.array([3, 1, 2, 0])
    before, x, step = memory.all(), np.ones((3, 4), np.float32), memory.stepper.step
    clock = lambda: 0.0  # noqa: E731
    fixed = np.empty((4, 4), np.float32)
    fixed.flags.writeable = False
    shared = np.ones((7, 4), np.float32)
    for wrong in (x.tolist(), x.astype(int), x[:, :3], x[:2], x[0], x[None]):
        assert step(index, wrong, clock) is None
    for out in (np.empty((4, 4)), np.empty((4, 3), np.float32), fixed, "out"):
        assert step(index, x, clock, None, out) is None
    assert step(index, shared[:3], clock, None, shared[2:6]) is None
    assert step(index[:0], x[:, :0], clock) is None
    with pytest.raises(ValueError, match=r"index\[1\] is 32, expected 0 to 31"):
        step(np.array([0, 32]), x[:, :2], clock)
    with pytest.raises(ValueError, match="digests has shape"):
        step(index, x, clock, np.ones(3, np.uint64))
    version.bump()
    assert not memory.stepper.fresh and step(index, x, clock) is None
    assert memory.same(before)


def test_a_slot_stepper_sees_each_of_its_counters_move(rng):
    versions = Version(5), Version(5)
    memory = Memory(np.float32, rng, watch=versions)
    before = memory.all()
    versions[0].count, versions[1].count = 6, 4  # their sum is what it was
    assert not memory.stepper.fresh
    assert memory.stepper.step(np.array([1]), np.ones(3, np.float32), lambda: 0.0) is None
    assert memory.same(before)


def test_a_step_that_the_clock_takes_is_done_before_the_step_that_asked(rng):
    memory, twin = (Memory(np.float32, np.random.default_rng(3)) for _ in range(2))
    index, x = np.array([3, 1, 9]), rng.standard_normal((2, 3, 3)).astype(np.float32)
    step, inner = memory.stepper.step, []

    def clock():
        inner.append(step(index, x[0], lambda: 1.0, np.full(3, 7, np.uint64)))
        return 2.0

    outer = step(index, x[1], clock, np.full(3, 8, np.uint64))
    expected = [
        twin.stepper.step(index, x[t], lambda t=t: 1.0 + t, np.full(3, 7 + t, np.uint64))
        for t in range(2)
    ]
    assert np.array_equal(inner[0], expected[0]) and np.array_equal(outer, expected[1])
    assert memory.same(twin.all())


def test_a_clock_that_raises_or_writes_a_weight_leaves_everything_as_it_was(rng):
    version = Version()
    memory, index = Memory(np.float32, rng, watch=(version,)), np.array([3, 1, 9])
    before, x = memory.all(), np.ones((3, 3), np.float32)
    with pytest.raises(ZeroDivisionError):
        memory.stepper.step(index, x, lambda: 1 / 0)
    assert memory.stepper.step(index, x, lambda: version.bump() or 1.0) is None
    assert memory.same(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_many_slots_step_with_the_bits_of_the_single_calls_on_any_threads(threads, rng):
    draw = lambda w, n=700: (rng.standard_normal((n, w)).astype(np.float32),)  # noqa: E731
    (wi,), (wh,), (wy,) = draw(24, 1024), draw(256, 1024), draw(256, 3)
    kernels = [LSTMKernel(wi, wh, None), AffineKernel(wy)]
    states, answers, notes = (draw(256), draw(256)), draw(3), (np.zeros(700, NOTE),)
    stepper = SlotStepper(kernels, np.array([0]), states, answers, notes, 512)
    index, x = rng.permutation(700), rng.standard_normal((700, 24)).astype(np.float32)
    h, c = (part[0][index] for part in states)
    h, c = kernels[0].step(x, h, c)
    y = kernels[1].apply(h)
    before = _kernels.get_num_threads()
    _kernels.set_num_threads(threads)
    try:
        found = stepper.step(index, x.T, lambda: 0.0)
    finally:
        _kernels.set_num_threads(before)
    assert found.T.tobytes() == y.tobytes() == answers[0][index].tobytes()
    assert states[0][0][index].tobytes() == h.tobytes()
    assert states[1][0][index].tobytes() == c.tobytes()
    assert (notes[0]["step"] == 1).all()


def test_a_slot_stepper_refuses_blocks_that_its_cells_do_not_fill(rng):
    m = Memory(np.float32, rng)
    build = lambda *states: SlotStepper(m.stages, STARTS, states, m.answers, m.notes, 9)  # noqa: E731
    for states in (m.states[:4], (*m.states, m.states[0])):
        with pytest.raises(ValueError, match=f"there are {len(states)} states, the cells have"):
            build(*states)
    with pytest.raises(ValueError, match="a block is float32"):
        build(*m.states[::-1])
    with pytest.raises(ValueError, match="a block is float32"):
        SlotStepper([AffineKernel(np.ones((5, 3), np.float32))], STARTS, (), m.answers, m.notes, 9)
