"""Reading, assigning, reordering and saving states."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import recur
from recur import GRU, LSTM, RNN, START, Chain, Dense, GRUv3, LSTMState, Recur, Tape, ops

LAYERS = {"RNN": RNN, "LSTM": LSTM, "GRU": GRU, "GRUv3": GRUv3}
each_layer = pytest.mark.parametrize("name", LAYERS)


def parts(state):
    return tuple(state) if isinstance(state, tuple) else (state,)


def same(a, b):
    assert (a is START) == (b is START)
    if a is not START:
        for x, y in zip(parts(a), parts(b), strict=True):
            np.testing.assert_array_equal(recur.value(x), recur.value(y))


# ---------------------------------------------------------------------- hand-over


@each_layer
def test_an_encoder_hands_its_state_to_a_decoder_with_its_history(name, rng):
    encoder, decoder = (LAYERS[name](2, 3, dtype=np.float64, learn_init=True) for _ in range(2))
    X, y0 = rng.normal(size=(2, 4, 5)), rng.normal(size=(2, 4))

    def handed(encoder, decoder):
        encoder(X)
        decoder.state = encoder.state
        return (decoder(y0) ** 2).sum()

    def by_cells(encoder, decoder):
        _, state = recur.scan(encoder.cell, X, encoder.init, return_state=True)
        _, y = decoder.cell(state, y0)
        return (y**2).sum()

    want = recur.withgradient(by_cells, encoder, decoder)
    got = recur.withgradient(handed, encoder, decoder)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-12)
    for mine, theirs, m in zip(got[1], want[1], (encoder, decoder), strict=True):
        for path in recur.named_params(m):
            np.testing.assert_allclose(mine[path], theirs[path], atol=1e-12)
    assert not any(got[1][1][path].any() for path in recur.named_params(decoder) if "init" in path)
    assert all(isinstance(part, np.ndarray) for part in parts(decoder.state))


def test_a_state_read_at_the_start_inside_a_scope_is_init_linked_when_learned(rng):
    learned, fixed = (GRU(2, 3, dtype=np.float64, learn_init=flag) for flag in (True, False))
    decoder = GRU(2, 3, dtype=np.float64)

    def f(m):
        decoder.state = m.state
        return decoder(np.ones((2, 4))).sum()

    assert recur.gradient(f, learned)["init"].any()
    assert isinstance(fixed.state, np.ndarray)
    with Tape():
        assert fixed.state.flags.writeable is False
    # The decoder took a copy: writing init later does not move its state.
    decoder.state = learned.state
    learned.init[...] = 5.0
    assert not np.any(decoder.state == 5.0)


def test_the_copy_of_a_learned_init_inside_a_scope_does_not_follow_a_write():
    m, decoder = (GRU(2, 3, learn_init=True) for _ in range(2))
    with Tape():
        decoder.state = m.state
        m.init[...] = 5.0
        assert not np.any(recur.value(decoder.state) == 5.0)


@each_layer
def test_an_assigned_array_is_a_copied_constant(name, rng):
    m = LAYERS[name](2, 3, dtype=np.float64, learn_init=True)
    given = tuple(rng.normal(size=(3, 4)) for _ in m.cell.state_names)
    m.state = given if len(given) > 1 else given[0]
    kept = [part.copy() for part in given]
    for part in given:
        part[...] = np.nan
    same(m.state, tuple(kept))
    grads = recur.gradient(lambda m: m(np.ones((2, 4))).sum(), m)
    assert not any(grads[path].any() for path in recur.named_params(m) if "init" in path)


def test_assigning_start_resets():
    m = LSTM(2, 3)
    assert m.at_start
    m(np.ones(2))
    assert not m.at_start
    m.state = START
    assert m.at_start
    assert repr(START) == "START"


def test_an_assigned_tensor_keeps_its_history_inside_its_scope_only(rng):
    m = GRU(2, 3, dtype=np.float64)
    h = rng.normal(size=(3, 4))

    def f(m, h):
        m.state = h * 2.0
        return m(np.ones((2, 4))).sum()

    _, dh = recur.gradient(f, m, h)
    assert dh.all()
    with Tape() as tape:
        t = tape.watch(h)
    m.state = t  # its scope has ended: an array
    np.testing.assert_array_equal(m.state, h)
    with Tape() as tape:
        m.state = tape.watch(h) * 2.0  # and no step follows
    assert isinstance(m.state, np.ndarray)
    np.testing.assert_array_equal(m.state, 2 * h)


def test_an_lstm_state_takes_tuples_lists_and_mixed_parts(rng):
    m = LSTM(2, 3)
    h, c = rng.normal(size=(2, 3, 4))
    for given in ((h, c), [h, c], LSTMState(h, c)):
        m.state = given
        assert isinstance(m.state, LSTMState) and m.state.h.dtype == np.float32
        np.testing.assert_allclose(m.state.c, c, rtol=1e-6)
    with Tape() as tape:
        m.state = (tape.watch(h.astype(np.float32)), c)
        assert isinstance(m.state.h, recur.Tensor) and isinstance(m.state.c, np.ndarray)
        m(np.ones((2, 4)))
    assert isinstance(m.state.h, np.ndarray)


BAD = {
    "features": np.zeros((4, 2)),
    "axes": np.zeros((3, 2, 2)),
    "number": 1.0,
    "parts": (np.zeros(3), np.zeros(3)),
    "text": np.array(["a", "b", "c"]),
}


@pytest.mark.parametrize("bad", BAD)
def test_states_that_do_not_fit_are_refused_and_the_old_one_stays(bad):
    m = GRU(2, 3)
    m(np.ones((2, 4)))
    before = m.state
    with pytest.raises(ValueError, match=r"GRU\(2 => 3\): .*Nothing was changed"):
        m.state = BAD[bad]
    same(m.state, before)


# ---------------------------------------------------------------------- states and set_states


def model(rng):
    return Chain(LSTM(2, 3, rng=rng), Dense(3, 3, rng=rng), {"a": GRU(3, 3, rng=rng)}["a"])


def test_states_are_read_and_written_by_path(rng):
    m = model(np.random.default_rng(0))
    assert recur.states(m) == {"layers.0": START, "layers.2": START}
    m(np.ones((2, 4)))
    kept = recur.states(m)
    y = m(np.ones((2, 4)))
    assert recur.set_states(m, kept) is m
    np.testing.assert_array_equal(m(np.ones((2, 4))), y)
    other = model(np.random.default_rng(0))
    recur.set_states(other, kept)
    np.testing.assert_array_equal(other(np.ones((2, 4))), y)
    recur.set_states(m, {"layers.0": START, "layers.2": kept["layers.2"]})
    assert m[0].at_start and not m[2].at_start


def test_set_states_checks_all_before_it_writes_any(rng):
    m = model(rng)
    m(np.ones((2, 4)))
    before = recur.states(m)
    good = before["layers.0"]
    for new in (
        {"layers.0": START},
        {"layers.0": START, "layers.2": np.zeros((5, 4))},
        {"layers.0": START, "layers.1": good, "layers.2": START},
    ):
        with pytest.raises(recur.StateError, match="Nothing was changed"):
            recur.set_states(m, new)
        for path, state in recur.states(m).items():
            same(state, before[path])


def test_states_inside_a_scope_are_recorded(rng):
    m = model(rng)
    with Tape():
        m(np.ones((2, 4)))
        held = recur.states(m)
        assert isinstance(held["layers.2"], recur.Tensor)
        m(np.ones((2, 4)))
        recur.set_states(m, held)
        assert m[2].state is held["layers.2"]
    assert isinstance(recur.states(m)["layers.2"], np.ndarray)


# ---------------------------------------------------------------------- reindex


@pytest.mark.parametrize(
    "index",
    [[2, 0, 1], [1, 1, 3, 0, 0], [2], np.array([True, False, False, True]), slice(1, 3), -1],
)
@each_layer
def test_reindex_reorders_repeats_and_drops_samples(name, index, rng):
    m, by_hand = (LAYERS[name](2, 3, rng=np.random.default_rng(0)) for _ in range(2))
    x = rng.normal(size=(2, 4))
    chosen = np.atleast_1d(np.arange(4)[index])
    m(x)
    by_hand(x[:, chosen])
    assert recur.reindex(m, index) is m
    same(m.state, by_hand.state)
    z = rng.normal(size=(2, len(chosen)))
    np.testing.assert_array_equal(m(z), by_hand(z))


def test_gradient_flows_through_reindex(rng):
    m = LSTM(2, 3, dtype=np.float64, learn_init=True)
    x, z, w = rng.normal(size=(2, 4)), rng.normal(size=(2, 3)), rng.normal(size=(3, 3))
    index = [3, 0, 3]

    def reindexed(m, x):
        m(x)
        recur.reindex(m, index)
        return (m(z) * w).sum()

    def gathered(m, x):
        m(x[:, index])
        return (m(z) * w).sum()

    got, want = [], []
    for f, out in ((reindexed, got), (gathered, want)):
        m.reset()
        out.append(recur.gradient(f, m, x))
    np.testing.assert_allclose(got[0][1], want[0][1], atol=1e-14)
    for path in recur.named_params(m):
        np.testing.assert_allclose(got[0][0][path], want[0][0][path], atol=1e-14)


def test_reindex_leaves_what_has_no_batch_and_checks_all_first():
    a, b = GRU(2, 3), GRU(2, 3)
    a.truncate()
    recur.reindex([a, b], [0, 0])
    assert a.state.shape == (3,) and b.at_start
    a.reset()
    a(np.ones((2, 4)))
    b(np.ones((2, 2)))
    before = a.state
    with pytest.raises(recur.StateError, match=r"GRU\(2 => 3\): the state holds batch 2"):
        recur.reindex([a, b], [3, 0])
    same(a.state, before)


def test_a_state_of_ones_own_is_reindexed_along_its_last_axis(rng):
    m = Recur(lambda s, x: ((s[0] + x, s[1], s[2] + 1), x), (np.zeros((2, 3)), np.zeros(5), 0))
    m(np.arange(6.0).reshape(2, 3))
    recur.reindex(m, [2, 0])
    np.testing.assert_array_equal(m.state[0], [[2, 0], [5, 3]])
    assert m.state[1].shape == (5,) and m.state[2] == 1


def test_beam_search_by_reindex_equals_running_each_beam_alone(rng):
    m = Chain(GRU(3, 4, rng=np.random.default_rng(0)), Dense(4, 3, rng=np.random.default_rng(1)))
    one_hot = np.eye(3, dtype=np.float32)
    beams, scores = [[0]], np.zeros(1)
    for _ in range(4):
        recur_in = one_hot[:, [beam[-1] for beam in beams]]
        log_p = ops.logsoftmax(m(recur_in))
        total = scores + log_p
        best = np.argsort(total, axis=None)[::-1][:3]
        words, sources = np.unravel_index(best, total.shape)
        beams = [[*beams[s], int(w)] for w, s in zip(words, sources, strict=True)]
        scores = total[words, sources]
        recur.reindex(m, sources)
    for beam, score in zip(beams, scores, strict=True):
        recur.reset(m)
        alone = sum(ops.logsoftmax(m(one_hot[:, a]))[b] for a, b in itertools.pairwise(beam))
        np.testing.assert_allclose(score, alone, rtol=1e-5)


# ---------------------------------------------------------------------- saving


@each_layer
def test_saving_leaves_the_running_state_out_unless_asked(name):
    m, target = LAYERS[name](2, 3), LAYERS[name](2, 3)
    m(np.ones((2, 4)))
    target(np.ones((2, 7)))
    saved = recur.state_dict(m)
    assert not any(path.startswith("state") for path in saved)
    inits = [path for path in saved if path.startswith("init")]
    assert inits == (["init.h", "init.c"] if name == "LSTM" else ["init"])
    recur.load_state_dict(target, saved)
    assert target.at_start
    with_state = recur.state_dict(m, include_state=True)
    recur.load_state_dict(target, with_state)
    same(target.state, m.state)
    m.reset()
    at_start = recur.state_dict(m, include_state=True)
    assert set(at_start) == set(saved)
    recur.load_state_dict(target, at_start)
    assert target.at_start


def test_a_saved_state_that_does_not_fit_changes_nothing():
    m = Chain(GRU(2, 3), LSTM(3, 3))
    m(np.ones((2, 4)))
    saved = recur.state_dict(m, include_state=True)
    before = recur.states(m)
    for path, bad in (
        ("layers.0.state", np.zeros((5, 4))),
        ("layers.1.state.c", np.zeros((3, 2))),
        ("layers.1.state.x", np.zeros((3, 4))),
    ):
        with pytest.raises(ValueError):
            recur.load_state_dict(m, {**saved, path: bad})
        for name, state in recur.states(m).items():
            same(state, before[name])


def test_an_unlearned_init_is_saved_and_loaded():
    m, target = (GRU(2, 3, init_state=np.full(3, value)) for value in (0.5, 0.0))
    recur.load_state_dict(target, recur.state_dict(m))
    np.testing.assert_array_equal(target.init, np.full(3, 0.5, np.float32))
    assert not np.shares_memory(target.init, m.init)


def test_a_state_of_numbers_and_nested_tuples_is_saved_and_loaded():
    def build():
        return Recur(
            lambda s, x: ((s[0] + 1, (s[1][0] + x, s[1][1])), s[0]),
            (0, (np.zeros(2), {"k": 1.5})),
        )

    m, target = build(), build()
    m(np.ones(2))
    m(np.ones(2))
    saved = recur.state_dict(m, include_state=True)
    assert set(saved) == {"init.1.0", "state.0", "state.1.0", "state.1.1.k"}
    recur.load_state_dict(target, saved)
    assert target.state[0] == 2 and type(target.state[0]) is int
    np.testing.assert_array_equal(target.state[1][0], [2, 2])
    assert target.state[1][1] == {"k": 1.5}
    assert target(np.ones(2)) == 2


@each_layer
def test_a_layer_is_rebuilt_from_its_config(name):
    n = len(LAYERS[name](2, 3).cell.state_names)
    m = LAYERS[name](
        2,
        3,
        learn_init=["h"],
        init_state=(np.ones((3, 1)),) * n,
        init_grad="scope",
        layout="ftb",
        on_batch_change="reset",
        strict_dtype=True,
    )
    other = Recur.from_config(m.config(), 1)
    assert other.cell is m.cell
    assert list(recur.named_params(other)) == list(recur.named_params(m))
    assert {k: v.shape for k, v in recur.state_dict(other).items()} == {
        k: v.shape for k, v in recur.state_dict(m).items()
    }
    for option in ("init_grad", "layout", "on_batch_change", "strict_dtype"):
        assert getattr(other, option) == getattr(m, option)


@pytest.mark.parametrize("index", [[[0, 1]], None, np.zeros((2, 2), int)])
def test_an_index_of_samples_has_one_axis(index):
    m = recur.LSTM(2, 3)
    m(np.ones((2, 4)))
    with pytest.raises(recur.StateError, match=r"LSTM\(2 => 3\): the index has shape .* one axis"):
        recur.reindex(m, index)
    assert m.state.h.shape == (3, 4)
