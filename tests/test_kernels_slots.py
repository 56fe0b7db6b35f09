"""Rows scattered over blocks of memory: gathered, scattered, marked, hashed."""

from __future__ import annotations

import numpy as np
import pytest

from recur import _kernels
from recur._kernels import NOTE, gather_rows, hash_rows, mark_rows, scatter_rows

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
