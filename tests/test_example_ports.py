"""examples/port_*.py: they compute what the Flux scripts compute, and the how-to shows them.

Also the files section of docs/how-to/port-from-flux.md: it is run on a file as Flux writes it.
"""

from __future__ import annotations

import doctest
import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from flux_models import Layer, chain, dense
from julia_writer import Bson, bson_bytes, fn

import recur
from recur.losses import logitcrossentropy, mse

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "how-to" / "port-from-flux.md"
PORTS = ("char_rnn", "seq_to_one", "tracker_loop", "explicit_states")
FENCE = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def port(request):
    """The example module of this name."""
    name = f"port_{request.param}"
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    recur.seed(0)
    yield module
    del sys.modules[name]


def port_of(name):
    return pytest.mark.parametrize("port", [name], indirect=True)


def section(title: str) -> str:
    """The text of the how-to from this heading to the next of the same depth."""
    depth = title.split(" ")[0]
    return re.split(
        rf"^{depth} ", PAGE.read_text("utf-8").split(f"{title}\n")[1], flags=re.MULTILINE
    )[0]


def same(results, others):
    assert list(results) == list(others)
    for path in results:
        np.testing.assert_allclose(results[path], others[path], rtol=1e-9, atol=1e-13)


# ---- the character model


@port_of("char_rnn")
def test_the_characters_are_cut_as_flux_cuts_them(port):
    alphabet = ["a", "b", "c", port.STOP]
    data = port.batches("abcabca", alphabet, columns=2, steps=2)
    read = [["".join(recur.onecold(step, alphabet)) for step in xs] for xs, _ in data]
    asked = [["".join(recur.onecold(step, alphabet)) for step in ys] for _, ys in data]
    assert read == [["aa", "bb"], ["cc"]]  # columns "abc" and "abc", two steps a window
    assert asked == [["bb", "cc"], ["aa"]]
    odd, _ = zip(*port.batches("abcabc", alphabet, columns=2, steps=3), strict=True)
    assert "".join(recur.onecold(odd[0][-1], alphabet)) == "c" + port.STOP


@port_of("char_rnn")
def test_the_loss_of_the_character_model_is_that_of_one_call_on_the_window(port, rng):
    model = recur.f64(port.network(4, 5))
    xs, ys = port.batches("abcabcabcabc", [*"abc", port.STOP], 2, 4)[0]
    X, Y = np.stack(xs, -1), np.stack(ys, -1)

    def at_once(m):
        return logitcrossentropy(recur.reset(m)(X), Y) * len(xs)

    loss, grads = recur.withgradient(lambda m: port.loss(m, xs, ys), model)
    other, others = recur.withgradient(at_once, model)
    np.testing.assert_allclose(loss, other, rtol=1e-12)
    same(grads, others)


@port_of("char_rnn")
def test_the_character_model_learns_a_text_and_writes_it(port):
    text = "to be or not to be. " * 40
    model, alphabet, losses = port.run(text, hidden=24, columns=4, steps=20, epochs=30)
    assert losses[-1] < 0.2 * losses[0]
    written = port.sample(model, alphabet, 60, np.random.default_rng(0))
    assert len(written) == 60 and "not to be" in written


# ---- seq-to-one with warm-up


@port_of("seq_to_one")
def test_the_loss_after_the_warm_up_is_that_of_the_last_step(port, rng):
    model = recur.f64(port.network())
    xs, y = rng.standard_normal((4, 2, 3)), rng.standard_normal((1, 3))

    def at_once(m):
        return mse(recur.reset(m)(np.stack(xs, -1))[..., -1], y)

    loss, grads = recur.withgradient(lambda m: port.loss(m, list(xs), y), model)
    other, others = recur.withgradient(at_once, model)
    np.testing.assert_allclose(loss, other, rtol=1e-12)
    same(grads, others)
    assert grads["layers.0.init"].any()  # through the warm-up, as reset! stands in the loss


# ---- the Tracker loop


@port_of("tracker_loop")
def test_the_tracker_loop_learns_as_windows_that_hand_over_their_state(port):
    signal = port.wave(80)
    looped = recur.f64(port.network())
    windowed = recur.loadmodel(recur.f64(port.network()), looped)
    losses = port.follow(looped, signal)
    opt = recur.setup(recur.Adam(0.01), windowed)

    def total(m, window):
        return sum(mse(m(x), y) for x, y in window)

    for i, loss in enumerate(losses):
        window = signal[20 * i : 20 * i + 20]
        wanted, grads = recur.withgradient(lambda m, window=window: total(m, window), windowed)
        by_path = recur.named_params(windowed)
        zeros = {path: np.zeros(by_path[path].shape) for path in grads}
        found = {path: zeros[path] if g is None else g for path, g in grads.items()}
        recur.update(opt, windowed, found)
        np.testing.assert_allclose(loss, wanted, rtol=1e-9)
    assert len(losses) == 4
    for a, b in zip(recur.params(looped), recur.params(windowed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-12)


# ---- explicit states


@port_of("explicit_states")
def test_steps_with_a_state_in_hand_equal_one_scan(port, rng):
    model = recur.f64(port.Model())
    xs = rng.standard_normal((1, 5, 3))
    state = tuple(rng.standard_normal((2, 12, 3)))
    ys, after = model(xs, state)
    Ys, last = model.at_once(xs, state)
    np.testing.assert_allclose(ys, Ys, rtol=1e-12)
    np.testing.assert_allclose(np.stack(after), np.stack(last), rtol=1e-12)
    same(
        recur.gradient(lambda m: (m(xs, state)[0] ** 2).sum(), model),
        recur.gradient(lambda m: (m.at_once(xs, state)[0] ** 2).sum(), model),
    )


@port_of("explicit_states")
def test_the_layout_of_flux_0_16_gives_the_same_numbers_without_swapping(port, rng):
    cell = recur.f64(recur.LSTMCell(1, 4))
    xs = rng.standard_normal((1, 5, 3))
    ftb = recur.Recur(cell, layout="ftb")
    np.testing.assert_allclose(
        ftb(xs), recur.scan(cell, xs.swapaxes(1, 2)).swapaxes(1, 2), rtol=1e-12
    )


# ---- as programs, and on the page


@pytest.mark.parametrize("port", PORTS[1:], indirect=True)
def test_a_port_run_as_a_program_shows_that_it_learns(port, capsys):
    port.main()
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < 0.05 * losses[0]


@port_of("char_rnn")
def test_the_character_model_run_as_a_program_writes(port, capsys, monkeypatch, in_tmp_path):
    Path("text").write_text("to be or not to be. " * 40)
    options = ["--epochs", "1", "--hidden", "8", "--columns", "4"]
    monkeypatch.setattr("sys.argv", ["port_char_rnn.py", "text", *options])
    port.main()
    written = capsys.readouterr().out.removesuffix("\n")
    assert len(written) == 300 and set(written) <= {*"to be or not.", port.STOP}


@pytest.mark.parametrize("name", PORTS)
def test_the_how_to_shows_what_the_example_runs(name):
    shown = FENCE.findall(section(f"### `examples/port_{name}.py`"))
    source = (ROOT / "examples" / f"port_{name}.py").read_text("utf-8")
    assert shown
    for block in shown:
        for part in block.strip("\n").split("\n\n\n"):
            assert part in source


def test_the_files_section_of_the_how_to_runs_on_a_file_of_flux(in_tmp_path):
    rng = np.random.default_rng(0)
    layer = Layer("LSTM", 2, 3, rng)
    W, b = rng.standard_normal((1, 3)).astype("f4"), np.zeros(1, "f4")
    model = chain(layer.layer("0.14"), dense(W, b, fn("Base.identity"), "0.14"))
    (in_tmp_path / "model.bson").write_bytes(bson_bytes(Bson().document({"model": model})))
    blocks = FENCE.findall(section("## The model file"))
    assert len(blocks) >= 4
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "files", str(PAGE), 0)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=report.append)
    assert test.examples and not runner.failures, "".join(report)
