"""`inspect.draw`: what a tape's log tells, and that pictures say it."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import recur
from recur import GRU, LSTM, Bidirectional, Chain, Dense, Param, Recur, Tape, reset, truncate
from recur.errors import TapeError
from recur.inspect import draw
from recur.inspect.bands import _bands
from recur.inspect.history import History
from recur.losses import mse

X = np.ones((3, 5), np.float32)
BLUE, RED, GREEN = "#1f6feb", "#d1242f", "#1a7f37"


def calls_of(tape, layer):
    return History(tape.events).calls[layer]


def elements(picture, tag):
    root = ET.fromstring(picture.svg)
    return [e for e in root.iter() if e.tag.rsplit("}")[-1] == tag]


def words(picture):
    return [e.text for e in elements(picture, "text")]


def red_lines(picture):
    return [e for e in elements(picture, "polyline") if e.get("stroke") == RED]


# What the log tells.


def test_steps_of_stacked_layers_stand_above_each_other():
    m = Chain(LSTM(3, 4), GRU(4, 4))
    with Tape(log=True) as tape:
        for _ in range(3):
            m(X)
    history = History(tape.events)
    assert list(history.calls) == list(m.layers)
    for layer in m.layers:
        assert [call.column for call in history.calls[layer]] == [0, 1, 2]
    assert history.columns == 3
    below, above = (history.calls[layer] for layer in m.layers)
    assert all(a.input_from == [b] for a, b in zip(above, below, strict=True))
    assert all(b.input_from == [] for b in below)
    assert [a.state_from for a in above] == [[], [above[0]], [above[1]]]


def test_only_steps_that_a_loss_depends_on_are_reached():
    m = GRU(3, 4)
    with Tape(log=True) as tape:
        m(X)
        truncate(m)
        y = m(X)
        m(X)
        tape.backward(y.sum())
    assert [call.reached for call in calls_of(tape, m)] == [[False], [True], [False]]


def test_a_cut_lies_between_the_steps_where_truncate_fell():
    m = GRU(3, 4)
    with Tape(log=True) as tape:
        m(X)
        m(X)
        truncate(m)
        m(X)
    calls = calls_of(tape, m)
    assert [call.marks for call in calls] == [[], [], ["cut"]]
    assert [call.state_from for call in calls] == [[], [calls[0]], []]


def test_a_cut_after_the_last_step_is_kept():
    m = GRU(3, 4)
    with Tape(log=True) as tape:
        loss = m(X).sum()
        truncate(m)
        tape.backward(loss)
    history = History(tape.events)
    assert history.after == {m: ["cut"]}
    assert history.calls[m][0].reached == [True]
    assert len(red_lines(draw(tape))) == 2  # in the row and in the legend


def test_cuts_inside_a_sequence_are_counted_from_its_start():
    m = LSTM(3, 4)
    with Tape(log=True) as tape:
        m(X)
        m(np.ones((3, 5, 7)), truncate_every=3)
    calls = calls_of(tape, m)
    assert [(call.column, call.steps, call.cuts) for call in calls] == [(0, 1, []), (1, 7, [3, 6])]


def test_a_learned_start_is_told_from_a_constant_one_and_from_a_carried_state():
    learned, constant, carried = GRU(3, 4, learn_init=True), GRU(3, 4), GRU(3, 4)
    carried(X)
    with Tape(log=True) as tape:
        for m in (learned, constant, carried):
            m(X)
    seen = [
        (calls_of(tape, m)[0].at_start, calls_of(tape, m)[0].learned)
        for m in (learned, constant, carried)
    ]
    assert seen == [(True, True), (True, False), (False, False)]


def test_a_state_handed_over_comes_after_all_steps_of_the_layer_that_gave_it():
    encoder, decoder = GRU(3, 4), GRU(3, 4)
    with Tape(log=True) as tape:
        for _ in range(3):
            encoder(X)
        decoder.state = encoder.state
        y = decoder(X)
        tape.backward(y.sum())
    history = History(tape.events)
    (first,) = history.calls[decoder]
    assert first.column == 3
    assert first.state_from == [history.calls[encoder][-1]]
    assert all(call.reached == [True] for call in history.all_calls())


def test_operations_between_two_steps_are_looked_through():
    m = GRU(3, 4)
    with Tape(log=True) as tape:
        m(X)
        recur.reindex(m, [0, 0, 1, 2, 3])
        loss = m(X).sum() * 2.0 + 1.0
        tape.backward(loss)
    history = History(tape.events)
    calls = history.calls[m]
    assert calls[1].state_from == [calls[0]]
    assert history.losses[0].calls == [calls[1]]


def test_a_cell_that_is_a_function_has_its_steps_told_as_well():
    W = Param(np.eye(3), "W")

    def cell(h, x):
        h = np.tanh(W @ h + x)
        return h, h

    m = Recur(cell, np.zeros((3, 1)))
    with Tape(log=True) as tape:
        m(np.ones((3, 2)))
        ys = m([np.ones((3, 2))] * 4, truncate_every=2)
        tape.backward(ys[-1].sum())
    first, second = calls_of(tape, m)
    assert (first.steps, second.steps, second.cuts) == (1, 4, [2])
    assert second.state_from == [first]
    assert (first.reached, second.reached) == ([False], [False, True])


def test_a_state_that_a_paused_step_has_moved_is_a_value():
    m = GRU(3, 4)
    with Tape(log=True) as tape:
        m(X)
        with recur.paused():
            m(X)
        m(X)
    calls = calls_of(tape, m)
    assert len(calls) == 2
    assert calls[1].state_from == [] and not calls[1].at_start


def test_history_of_an_earlier_scope_is_told_from_a_value():
    m = GRU(3, 4)
    with Tape(keep_history=True):
        m(X)
    with Tape(log=True) as tape:
        tape.backward(m(X).sum())
    assert calls_of(tape, m)[0].earlier
    assert "earlier scope" in words(draw(tape))


def test_a_call_that_raised_leaves_no_step():
    m = GRU(3, 4)
    with Tape(log=True) as tape:
        m(X)
        with pytest.raises(recur.ShapeError):
            m(np.ones((2, 5)))
        m(X)
    calls = calls_of(tape, m)
    assert [call.column for call in calls] == [0, 1]
    assert calls[1].state_from == [calls[0]]


def test_a_sequence_without_steps_is_no_call_and_loses_no_mark():
    m = GRU(3, 4)
    with Tape(log=True) as tape:
        m(X)
        truncate(m)
        m(np.ones((3, 5, 0)))
        m(X)
    assert [call.marks for call in calls_of(tape, m)] == [[], ["cut"]]


def test_the_layer_that_runs_backwards_is_turned_round():
    m = Bidirectional.of(LSTM, 3, 4)
    with Tape(log=True) as tape:
        tape.backward(m(np.ones((3, 5, 7)), truncate_every=3).sum())
    history = History(tape.events)
    (ahead,), (behind,) = history.calls[m.forward], history.calls[m.backward]
    assert not ahead.backwards and ahead.cut_columns == [3, 6]
    assert behind.backwards and behind.cut_columns == [4, 1]
    assert [tuple(band[:2]) for band in _bands([behind])] == [(0, 1), (1, 4), (4, 7)]
    assert [band.before for band in _bands([behind])] == ["cut", "cut", "init"]
    few = draw(tape)
    inits = [float(e.get("x")) for e in elements(few, "text") if e.text == "init"]
    boxes = [float(e.get("x")) for e in elements(few, "rect") if e.get("stroke") == BLUE]
    assert min(inits) < min(boxes) and max(inits) > max(boxes)
    with Tape(log=True) as tape:
        reset(m)(np.ones((3, 5, 40)), truncate_every=9)
    draw(tape)


@pytest.mark.parametrize("seed", range(40))
def test_a_picture_says_of_init_and_inputs_what_the_gradient_does(seed):
    """Random programs: a green arrow is a gradient of init, a blue box one of its step's input."""
    rng = np.random.default_rng(seed)
    m = recur.f64(GRU(3, 4, learn_init=True))
    if seed % 3 == 0:
        m(np.ones((3, 2)))
    inputs, total = [], 0.0
    with Tape(log=True) as tape:
        for _ in range(rng.integers(3, 30)):
            act = rng.choice(["step", "steps", "truncate", "reset", "paused", "reindex", "sweep"])
            if act in ("step", "steps"):
                x = tape.watch(rng.normal(size=(3, 2) if act == "step" else (3, 2, 4)))
                inputs.append(x)
                y = m(x) if act == "step" else m(x, truncate_every=int(rng.integers(1, 6)))
                if rng.random() < 0.6:
                    total = total + (y**2).sum()
            elif act == "paused":
                with recur.paused():
                    m(np.ones((3, 2)))
            elif act == "reindex":
                recur.reindex(m, [1, 0])
            elif act == "sweep" and not isinstance(total, float):
                tape.backward(total, keep_graph=True)
                total = 0.0
            elif act in ("truncate", "reset"):
                getattr(recur, act)(m)
    if not inputs:
        return
    calls = calls_of(tape, m)
    assert len(calls) == len(inputs)
    starts = any(call.learned and call.reached[0] for call in calls)
    assert starts == bool(m.init.grad is not None and m.init.grad.any())
    for call, x in zip(calls, inputs, strict=True):
        steps = [call.reached_at(column) for column in range(call.column, call.end)]
        gradient = np.zeros(x.shape) if x.grad is None else x.grad
        by_step = gradient.reshape(3, 2, -1).any(axis=(0, 1))
        assert steps == by_step.tolist()
    for picture in (draw(tape), draw(tape, {"m": m}, legend=False)):
        ET.fromstring(picture.svg)


# Pictures.


def trained(T, cut_every):
    m = Chain(LSTM(3, 4, learn_init=True), GRU(4, 4), Dense(4, 2))
    with Tape(log=True) as tape:
        total = 0.0
        for t in range(1, T + 1):
            total = total + mse(m(X), np.zeros((2, 5)))
            if t % cut_every == 0 or t == T:
                tape.backward(total)
                truncate(m)
                total = 0.0
    return m, tape


def test_few_steps_have_a_box_each_and_losses_their_names():
    m, tape = trained(3, 2)
    picture = draw(tape, m)
    boxes = [e for e in elements(picture, "rect") if e.get("stroke") == BLUE]
    assert len(boxes) == 6
    assert {"L1", "L2", "layers.0: LSTM(3 => 4)", "layers.1: GRU(4 => 4)"} <= set(words(picture))
    assert words(picture).count("cut") == 4  # after steps 2 and 3, in both rows
    assert len(red_lines(picture)) == 5  # and in the legend


def test_a_missing_arrow_is_a_missing_gradient():
    def arrows(tape):
        heads = [e for e in elements(draw(tape), "polygon") if e.get("fill") == BLUE]
        return len(heads)

    def two_steps(cut):
        m = GRU(3, 4)
        with Tape(log=True) as tape:
            m(X)
            if cut:
                truncate(m)
            tape.backward(m(X).sum())
        return tape

    assert arrows(two_steps(cut=False)) == 3  # the legend, loss to step 2, step 2 to step 1
    assert arrows(two_steps(cut=True)) == 2


def test_a_learned_init_is_green_only_if_gradient_reaches_it():
    def colours(cut):
        m = GRU(3, 4, learn_init=True)
        with Tape(log=True) as tape:
            m(X)
            if cut:
                truncate(m)
            tape.backward(m(X).sum())
        return [e.get("fill") for e in elements(draw(tape), "polygon")]

    assert GREEN in colours(cut=False)
    assert GREEN not in colours(cut=True)


def test_many_steps_are_bands_between_cuts():
    m, tape = trained(300, 50)
    picture = draw(tape)
    bands = _bands(History(tape.events).calls[m.layers[0]])
    assert [(band.start, band.stop) for band in bands] == [(t, t + 50) for t in range(0, 300, 50)]
    assert [band.before for band in bands] == ["learned"] + ["cut"] * 5
    assert words(picture).count("50 steps") == 12
    assert picture.width < 1500
    assert len(picture.svg) < 60_000


def test_a_loss_at_each_of_many_steps_is_a_dot_without_a_name():
    m = GRU(3, 4)
    with Tape(log=True) as tape:
        for _ in range(300):
            tape.backward(m(X).sum(), keep_graph=True)
    said = words(draw(tape))
    assert "300 losses" in said and "L1" not in said


def test_a_reset_ends_a_band_and_says_where_it_starts_again():
    m = GRU(3, 4)
    with Tape(log=True) as tape:
        m(np.ones((3, 5, 30)))
        reset(m)
        y = m(np.ones((3, 5, 20)))
        tape.backward(y.sum())
    bands = _bands(calls_of(tape, m))
    assert [tuple(band[:4]) for band in bands] == [(0, 30, False, "init"), (30, 50, True, "init")]
    draw(tape)


def test_ten_thousand_steps_make_a_picture_of_the_same_width():
    m = GRU(3, 4)
    with Tape(log=True) as tape:
        m(np.ones((3, 1, 10_000)), truncate_every=1000)
    assert draw(tape).width < 1500


def test_every_word_of_a_picture_lies_inside_it():
    for T, cut in ((1, 1), (3, 2), (24, 5), (25, 5), (300, 20), (2000, 100)):
        _, tape = trained(T, cut)
        picture = draw(tape)
        for text in elements(picture, "text"):
            x, y = float(text.get("x")), float(text.get("y"))
            length = 0.5 * float(text.get("font-size")) * len(text.text)
            share = {"start": (0, 1), "middle": (0.5, 0.5), "end": (1, 0)}[text.get("text-anchor")]
            assert 0 <= y <= picture.height
            assert x - share[0] * length >= 0 and x + share[1] * length <= picture.width


def test_a_picture_is_shown_by_notebooks_and_named_for_screen_readers(tmp_path):
    _, tape = trained(3, 2)
    picture = draw(tape)
    assert picture._repr_svg_() == picture.svg
    root = ET.fromstring(picture.svg)
    assert root.get("role") == "img"
    assert root.get("aria-label") == "2 recurrent layers, 3 steps, 2 losses"
    assert "2 recurrent layers" in repr(picture)
    picture.save(tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text(encoding="utf-8") == picture.svg


def test_names_with_markup_are_escaped():
    class Model:
        def __init__(self):
            self.parts = {"<a> & b": GRU(3, 4)}

    model = Model()
    with Tape(log=True) as tape:
        model.parts["<a> & b"](X)
    picture = draw(tape, model)
    assert any("<a> & b" in (text or "") for text in words(picture))


def test_a_png_has_the_picture_scaled(tmp_path):
    pytest.importorskip("matplotlib")
    _, tape = trained(3, 2)
    picture = draw(tape)
    picture.save(tmp_path / "x.PNG", scale=1)
    data = (tmp_path / "x.PNG").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert abs(width - picture.width) <= 1 and abs(height - picture.height) <= 1
    trained(40, 7)
    draw(trained(40, 7)[1]).save(tmp_path / "bands.png", scale=1)


def test_a_png_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _, tape = trained(3, 2)
    with pytest.raises(ImportError, match=re.escape('pip install "recur[cli]"')):
        draw(tape).save(tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_another_ending_is_refused(tmp_path):
    _, tape = trained(3, 2)
    with pytest.raises(ValueError, match=r"neither \.svg nor \.png"):
        draw(tape).save(tmp_path / "x.pdf")


def test_a_tape_without_a_log_has_no_picture():
    with Tape() as tape:
        GRU(3, 4)(X)
    with pytest.raises(TapeError, match=r"log=True"):
        draw(tape)


def test_a_tape_without_recurrent_steps_has_no_picture():
    with Tape(log=True) as tape:
        Dense(3, 4)(X)
    with pytest.raises(TapeError, match="no recurrent layer was stepped"):
        draw(tape)


def test_a_log_changes_no_number():
    def gradient(log):
        m = Chain(LSTM(3, 4, rng=np.random.default_rng(0)), GRU(4, 4, rng=np.random.default_rng(1)))
        with Tape(log=log) as tape:
            tape.backward((m(X) + m(np.ones((3, 5, 4)))[:, :, -1]).sum())
        return [p.grad for p in recur.params(m)]

    for a, b in zip(gradient(True), gradient(False), strict=True):
        np.testing.assert_array_equal(a, b)
