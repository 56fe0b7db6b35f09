"""Windows of streams, batches, padded sequences, one-hot columns."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest

from recur import data
from recur.data import (
    DataLoader,
    batch,
    batchseq,
    chunk,
    mask_of,
    onecold,
    onehot,
    onehotbatch,
    padded,
    rpad_constant,
    unbatch,
    unsqueeze,
    unstack,
    windows,
)
from recur.errors import ShapeError, StateError
from recur.module import seed
from recur.tape import Param


def collected(parts):
    return np.concatenate(list(parts), axis=-1)


# Windows.


def test_each_row_of_the_windows_is_one_stretch_of_the_stream():
    ws = windows(np.arange(23), batch=3, steps=4)
    assert len(ws) == 2
    assert [w.shape for w in ws] == [(3, 4), (3, 3)]
    np.testing.assert_array_equal(collected(ws), np.arange(21).reshape(3, 7))


def test_the_next_step_is_the_target_also_where_a_stretch_ends():
    ws = windows(np.arange(22), batch=3, steps=4, next_step=True)
    pairs = list(ws)
    np.testing.assert_array_equal(collected(x for x, _ in pairs), np.arange(21).reshape(3, 7))
    for x, y in pairs:
        np.testing.assert_array_equal(y, x + 1)


@pytest.mark.parametrize("n", range(4, 40))
def test_no_element_is_read_twice_or_skipped(n):
    for B in (1, 2, 3):
        for T in (1, 2, 5):
            for shifted in (False, True):
                x = [
                    w[0] if shifted else w
                    for w in windows(list(range(n)), batch=B, steps=T, next_step=shifted)
                ]
                length = (n - shifted) // B
                np.testing.assert_array_equal(
                    collected(x), np.arange(B * length).reshape(B, length)
                )


def test_features_come_first_and_lie_together_in_memory(rng, dtype):
    stream = rng.standard_normal((5, 40)).astype(dtype)
    for array in stream, np.asfortranarray(stream), np.repeat(stream, 2, axis=1)[:, ::2]:
        ws = windows(array, batch=4, steps=3)
        assert len(ws) == 4
        parts = list(ws)
        assert all(w.T.flags.c_contiguous and w.dtype == dtype for w in parts)
        np.testing.assert_array_equal(collected(parts), stream.reshape(5, 4, 10))


def test_a_tuple_of_streams_is_cut_alike(rng):
    x, y = rng.standard_normal((5, 20)), np.arange(20)
    parts = list(windows((x, y), batch=2, steps=4))
    assert [(a.shape, b.shape) for a, b in parts][-1] == ((5, 2, 2), (2, 2))
    np.testing.assert_array_equal(collected(a for a, _ in parts), x.reshape(5, 2, 10))
    np.testing.assert_array_equal(collected(b for _, b in parts), y.reshape(2, 10))


def test_the_short_last_window_may_be_dropped():
    ws = windows(np.arange(23), batch=3, steps=4, partial=False)
    assert len(ws) == 1 and [w.shape for w in ws] == [(3, 4)]


def test_writing_into_a_window_leaves_the_stream_alone():
    stream = np.arange(12)
    for w in windows(stream, batch=1, steps=5):
        w[...] = -1
    np.testing.assert_array_equal(stream, np.arange(12))


def test_a_loop_that_was_left_early_is_continued_by_the_next():
    ws = windows(np.arange(20), batch=2, steps=3)
    for w in ws:
        if w[0, 0] == 3:
            break
    assert (ws.position, ws.epoch) == (2, 0)
    np.testing.assert_array_equal(collected(ws), [[6, 7, 8, 9], [16, 17, 18, 19]])
    assert (ws.position, ws.epoch) == (0, 1)
    assert len(list(ws)) == 4 and ws.epoch == 2
    next(iter(ws))
    ws.restart()
    assert len(list(ws)) == 4


def test_windows_go_on_from_a_saved_place():
    first = windows(np.arange(50), batch=2, steps=3, next_step=True)
    list(first)
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    saved = first.state_dict()
    other = windows(np.arange(50), batch=2, steps=3, next_step=True)
    other.load_state_dict(saved)
    for (a, b), (c, d) in zip(iterator, other, strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, d)
    assert other.state_dict() == first.state_dict()
    assert other.epoch == 2


def test_a_place_in_other_windows_is_refused():
    ws = windows(np.arange(50), batch=2, steps=3)
    next(iter(ws))
    for other in (
        windows(np.arange(50), batch=5, steps=3),
        windows(np.arange(50), batch=2, steps=4),
        windows(np.arange(60), batch=2, steps=3),
    ):
        with pytest.raises(StateError, match="the saved place has"):
            other.load_state_dict(ws.state_dict())
        assert other.position == 0


def test_a_window_may_be_asked_for_by_number():
    ws = windows(np.arange(20), batch=2, steps=3)
    np.testing.assert_array_equal(ws[-1], [[9], [19]])
    np.testing.assert_array_equal(ws[1], [[3, 4, 5], [13, 14, 15]])
    assert ws.position == 0
    with pytest.raises(IndexError, match="no window 4"):
        ws[4]
    assert "4 of 3 steps, batch 2" in repr(ws)


@pytest.mark.parametrize(
    ("stream", "options", "error", "words"),
    [
        ("text", {}, TypeError, "numbers"),
        (np.zeros((2, 3, 4)), {}, ShapeError, "one stream"),
        (np.zeros(3), {"batch": 4}, ShapeError, "too few"),
        (np.zeros(4), {"batch": 4, "next_step": True}, ShapeError, "too few"),
        (np.zeros(7), {"batch": 2, "steps": 4, "partial": False}, ShapeError, "too few"),
        ((np.zeros(8), np.zeros(9)), {}, ShapeError, "one length"),
        ((np.zeros(8), np.zeros(8)), {"next_step": True}, TypeError, "its targets"),
        (np.zeros(8), {"batch": 0}, ValueError, "batch is 0"),
        (np.zeros(8), {"steps": 2.5}, ValueError, r"steps is 2\.5"),
    ],
)
def test_streams_that_cannot_be_cut_are_errors(stream, options, error, words):
    with pytest.raises(error, match=words):
        windows(stream, **{"batch": 2, "steps": 2, **options})


# DataLoader.


def test_batches_are_cut_from_the_last_axis_in_order(rng):
    x = rng.standard_normal((3, 10))
    loader = DataLoader(x, batchsize=4)
    assert len(loader) == 3
    assert [b.shape for b in loader] == [(3, 4), (3, 4), (3, 2)]
    np.testing.assert_array_equal(collected(loader), x)
    assert all(b.T.flags.c_contiguous for b in loader)
    assert len(DataLoader(x, batchsize=4, partial=False)) == 2
    assert [b.shape for b in DataLoader(x, batchsize=4, partial=False)] == [(3, 4), (3, 4)]


def test_one_sample_is_a_batch_by_default_and_no_batchsize_gives_bare_samples(rng):
    x = rng.standard_normal((3, 4))
    assert [b.shape for b in DataLoader(x)] == [(3, 1)] * 4
    for none in None, -1:
        samples = list(DataLoader(x, batchsize=none))
        assert [s.shape for s in samples] == [(3,)] * 4
        samples[0][...] = 0
    assert list(DataLoader(np.array([1, 2]), batchsize=None)) == [1, 2]
    assert x.all()


def test_tuples_named_tuples_and_dicts_are_cut_together(rng):
    Pair = namedtuple("Pair", "x label")
    x, y = rng.standard_normal((3, 5)), list("abcde")
    for a, b in DataLoader((x, y), batchsize=5):
        np.testing.assert_array_equal(a, x)
        assert b == y
    named = next(iter(DataLoader(Pair(x, y), batchsize=2)))
    assert isinstance(named, Pair) and named.label == ["a", "b"]
    both = list(DataLoader({"x": x, "y": y}, batchsize=3))
    assert both[1]["y"] == ["d", "e"] and both[1]["x"].shape == (3, 2)


def test_shuffling_keeps_pairs_together_and_takes_each_sample_once_an_epoch():
    x = np.arange(20)
    loader = DataLoader((x, -x), batchsize=6, shuffle=True, rng=np.random.default_rng(0))
    epochs = []
    for _ in range(2):
        pairs = list(loader)
        assert all((a == -b).all() for a, b in pairs)
        epochs.append(collected(a for a, _ in pairs))
        np.testing.assert_array_equal(np.sort(epochs[-1]), x)
    assert not np.array_equal(*epochs)
    again = DataLoader((x, -x), batchsize=6, shuffle=True, rng=np.random.default_rng(0))
    np.testing.assert_array_equal(collected(a for a, _ in again), epochs[0])


def test_the_librarys_seed_fixes_the_order():
    orders = []
    for _ in range(2):
        seed(5)
        orders.append([collected(DataLoader(np.arange(9), shuffle=True)) for _ in range(2)])
    np.testing.assert_array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0][0], orders[0][1]), "each loader has its own generator"


def test_collate_decides_what_a_batch_is():
    words = ["a", "b", "c"]
    assert list(DataLoader(words, batchsize=2, collate="".join)) == ["ab", "c"]
    assert list(DataLoader(words, batchsize=2, collate=False)) == [["a", "b"], ["c"]]
    x = np.arange(6).reshape(2, 3)
    listed = next(iter(DataLoader(x, batchsize=2, collate=False)))
    np.testing.assert_array_equal(listed, [[0, 3], [1, 4]])
    np.testing.assert_array_equal(next(iter(DataLoader(x, batchsize=2, collate=True))), x[:, :2])
    seqs = [np.arange(3), np.arange(2)]
    steps = next(iter(DataLoader(seqs, batchsize=2, collate=batchseq)))
    np.testing.assert_array_equal(steps, [[0, 0], [1, 1], [2, 0]])


@pytest.mark.parametrize("done", [0, 1, 4, 5])
def test_a_loader_goes_on_from_a_saved_place_bit_for_bit(done):
    def make():
        return DataLoader(np.arange(17), batchsize=4, shuffle=True, rng=np.random.default_rng(1))

    first = make()
    list(first)
    iterator = iter(first)
    for _ in range(done):
        next(iterator)
    saved = first.state_dict()
    rest = [*iterator, *first]
    other = make()
    other.load_state_dict(saved)
    assert other.epoch == 1
    resumed = [*other, *other]
    np.testing.assert_array_equal(collected(rest), collected(resumed))
    assert first.state_dict() == other.state_dict()


def test_a_place_in_another_loader_is_refused():
    loader = DataLoader(np.arange(5), shuffle=True)
    with pytest.raises(StateError, match=r"5 samples.*6 and"):
        DataLoader(np.arange(6)).load_state_dict(loader.state_dict())
    other = DataLoader(np.arange(5), rng=np.random.Generator(np.random.MT19937(0)))
    with pytest.raises(StateError, match="MT19937"):
        other.load_state_dict(loader.state_dict())


def test_loaders_of_what_does_not_fit_are_errors():
    with pytest.raises(ShapeError, match=r"\[5, 4\] samples"):
        DataLoader((np.zeros((3, 5)), np.zeros(4)))
    with pytest.raises(ShapeError, match="no axes"):
        DataLoader(np.array(1.0))
    with pytest.raises(ShapeError, match="hold"):
        DataLoader(())
    with pytest.raises(ValueError, match="batchsize is 0"):
        DataLoader(np.zeros(3), batchsize=0)
    assert "batches of 2, shuffled" in repr(DataLoader(np.zeros(3), batchsize=2, shuffle=True))


# Batches and sequences.


def test_batch_stacks_on_a_new_last_axis_and_unbatch_undoes_it(rng):
    samples = list(rng.standard_normal((4, 2, 3)))
    stacked = batch(samples)
    assert stacked.shape == (2, 3, 4) and stacked.T.flags.c_contiguous
    for one, two in zip(samples, unbatch(stacked), strict=True):
        np.testing.assert_array_equal(one, two)
        assert not np.shares_memory(two, stacked)
    np.testing.assert_array_equal(batch([1, 2, 3]), [1, 2, 3])


def test_batch_goes_through_tuples_and_dicts():
    x, y = batch([(np.zeros(2), 1), (np.ones(2), 2)])
    np.testing.assert_array_equal(x, [[0, 1], [0, 1]])
    np.testing.assert_array_equal(y, [1, 2])
    Pair = namedtuple("Pair", "a b")
    assert isinstance(batch([Pair(1, 2), Pair(3, 4)]), Pair)
    np.testing.assert_array_equal(batch([{"a": 1}, {"a": 2}])["a"], [1, 2])


@pytest.mark.parametrize(
    "samples",
    [[np.zeros(2), np.zeros(3)], [(1, 2), (1,)], [(1, 2), 3], [{"a": 1}, {"b": 1}]],
)
def test_samples_that_differ_make_no_batch(samples):
    with pytest.raises(ShapeError, match="sample 1 differs"):
        batch(samples)
    with pytest.raises(ShapeError, match="no samples"):
        batch([])


def test_unstack_and_unsqueeze(rng):
    x = rng.standard_normal((2, 3, 4))
    for dims in (0, 1, 2, -1):
        parts = unstack(x, dims=dims)
        np.testing.assert_array_equal(np.stack(parts, dims), x)
    assert unsqueeze(x, dims=1).shape == (2, 1, 3, 4)
    assert unsqueeze(Param(np.zeros(2)), dims=-1).shape == (2, 1)


def test_chunk_cuts_into_parts_or_into_sizes():
    assert chunk(range(1, 11), 3) == [range(1, 5), range(5, 9), range(9, 11)]
    assert chunk(range(1, 11), size=2)[-1] == range(9, 11)
    assert chunk("abcdef", size=[2, 4]) == ["ab", "cdef"]
    assert chunk([1, 2], 5) == [[1], [2]]
    x = np.arange(20).reshape(5, 4)
    np.testing.assert_array_equal(np.hstack(chunk(x, 2)), x)
    np.testing.assert_array_equal(chunk(x, 2, dims=0)[1], x[3:])
    np.testing.assert_array_equal(chunk(x, size=3, dims=-2)[0], x[:3])
    assert np.shares_memory(chunk(x, 2)[0], x)
    assert chunk(np.zeros((2, 0)), 3) == []
    for wrong in ({"n": 2, "size": 2}, {}, {"size": [1, 2]}, {"n": 0}, {"size": 0}):
        with pytest.raises(ValueError, match="chunk"):
            chunk(x, **wrong)


def test_rpad_constant_pads_at_the_end_and_never_cuts():
    np.testing.assert_array_equal(rpad_constant([1, 2], 4, -1), [1, 2, -1, -1])
    np.testing.assert_array_equal(rpad_constant([1, 2, 3], 2), [1, 2, 3])
    x = np.array([[1, 2], [3, 4]])
    np.testing.assert_array_equal(rpad_constant(x, 3, dims=0), [[1, 2], [3, 4], [0, 0]])
    assert rpad_constant(x, 3).shape == (3, 3)
    assert rpad_constant(x, (3, 5)).shape == (3, 5)


def test_batchseq_gives_steps_of_the_whole_batch():
    steps = batchseq([[1, 2, 3], [4, 5]], 0)
    np.testing.assert_array_equal(steps, [[1, 4], [2, 5], [3, 0]])
    np.testing.assert_array_equal(batchseq([[1], [4, 5]], -1, 3)[2], [-1, -1])
    arrays = [np.arange(6).reshape(2, 3), 10 * np.ones((2, 1), int)]
    steps = batchseq(arrays, -1)
    assert [s.shape for s in steps] == [(2, 2)] * 3
    np.testing.assert_array_equal(steps[0], [[0, 10], [3, 10]])
    np.testing.assert_array_equal(steps[1], [[1, -1], [4, -1]])
    listed = batchseq([list(arrays[0].T), list(arrays[1].T)], -1)
    np.testing.assert_array_equal(listed, steps)


def test_padded_gives_one_array_its_lengths_and_the_mask_of_them(rng, dtype):
    seqs = [rng.standard_normal((3, n)).astype(dtype) for n in (4, 1, 0, 2)]
    X, lengths = padded(seqs, val=np.nan)
    assert X.shape == (3, 4, 4) and X.dtype == dtype and X.T.flags.c_contiguous
    np.testing.assert_array_equal(lengths, [4, 1, 0, 2])
    mask = mask_of(lengths)
    np.testing.assert_array_equal(np.isnan(X), np.broadcast_to(~mask, X.shape))
    for b, seq in enumerate(seqs):
        np.testing.assert_array_equal(X[:, b, : lengths[b]], seq)
    np.testing.assert_array_equal(mask_of([1, 2], 3), [[True, False, False], [True, True, False]])


def test_sequences_that_make_no_batch_are_errors():
    with pytest.raises(ShapeError, match="one \\(F, any\\)"):
        padded([np.zeros((3, 2)), np.zeros((2, 2))])
    with pytest.raises(ShapeError, match="3 steps, more than n = 2"):
        batchseq([[1, 2, 3]], 0, 2)
    with pytest.raises(ShapeError, match="no sequences"):
        padded([])
    with pytest.raises(ShapeError, match=r"\(T,\) or \(F, T\)"):
        padded([np.zeros((1, 2, 3))])


# One-hot columns.


def test_onehot_has_a_one_at_the_labels_place():
    np.testing.assert_array_equal(onehot("b", "abc"), [False, True, False])
    np.testing.assert_array_equal(onehot(7, [5, 6, 7], dtype=np.float32), [0, 0, 1])
    assert onehot(0, range(4)).dtype == bool
    np.testing.assert_array_equal(onehot("?", "abc_", "_"), onehot("_", "abc_"))
    assert onehot(np.int64(1), range(3))[1]


def test_onehotbatch_puts_classes_on_a_new_first_axis():
    np.testing.assert_array_equal(
        onehotbatch("abca", "abc"), np.eye(3, dtype=bool)[:, [0, 1, 2, 0]]
    )
    index = np.array([[0, 2, 1], [1, 1, 0]])
    hot = onehotbatch(index, range(3), dtype=np.float32)
    assert hot.shape == (3, 2, 3) and hot.dtype == np.float32 and hot.T.flags.c_contiguous
    np.testing.assert_array_equal(hot, np.moveaxis(np.eye(3)[index], -1, 0))
    np.testing.assert_array_equal(hot, onehotbatch(index, [0, 1, 2]))
    np.testing.assert_array_equal(onehotbatch(["x", "y"], ["y", "x"]), [[0, 1], [1, 0]])
    np.testing.assert_array_equal(onehotbatch("az", "abc", "c"), onehotbatch("ac", "abc"))
    np.testing.assert_array_equal(onehotbatch([9, 0], range(3), 2), onehotbatch([2, 0], range(3)))
    assert onehotbatch([], range(3)).shape == (3, 0)


def test_labels_that_are_not_there_or_twice_are_errors():
    for make in (
        lambda: onehot("z", "abc"),
        lambda: onehotbatch("az", "abc"),
        lambda: onehotbatch([3], range(3)),
        lambda: onehotbatch([-1], range(3)),
        lambda: onehot("z", "abc", "y"),
    ):
        with pytest.raises(ValueError, match="not among the 3 labels"):
            make()
    with pytest.raises(ValueError, match="twice"):
        onehot("a", "aba")


def test_onecold_undoes_onehot_and_takes_the_first_of_equals(rng):
    index = rng.integers(0, 4, (3, 5))
    np.testing.assert_array_equal(onecold(onehotbatch(index, range(4))), index)
    text = "dbca"
    assert "".join(onecold(onehotbatch(text, "abcd"), "abcd")) == text
    assert onecold(np.array([0.1, 0.7, 0.2])) == 1
    assert onecold(np.array([0.1, 0.7, 0.2]), ["x", "y", "z"]) == "y"
    assert onecold(np.array([1, 1])) == 0
    np.testing.assert_array_equal(onecold(np.eye(2), [10, 20]), [10, 20])
    with pytest.raises(ShapeError, match="2 classes, there are 3"):
        onecold(np.eye(2), "abc")
    with pytest.raises(ShapeError, match="axis 0"):
        onecold(np.array(1.0))


def test_every_public_name_exists():
    assert all(hasattr(data, name) for name in data.__all__)
