"""examples/awd_lstm.py: its text, its windows, training that is killed, and torch's numbers."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import recur
from recur import Tape, averaged

PATH = Path(__file__).resolve().parents[1] / "examples" / "awd_lstm.py"


def load_example():
    spec = importlib.util.spec_from_file_location("awd_lstm", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["awd_lstm"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


awd = load_example()

SMALL = awd.Settings(vocabulary=40, embedding=8, hidden=12, batch=4, steps=10, eta=2.0, patience=2)


def text(n, seed=0):
    """Words of which each is likely to be followed by the next but one."""
    rng = np.random.default_rng(seed)
    steps = np.where(rng.random(n) < 0.9, 2, rng.integers(0, 40, n))
    return np.cumsum(steps) % 40


# ---------------------------------------------------------------------- text

SOURCE = '''
"""The module's own words."""
# A comment, which goes on
# in the next line.
x = 1  # beside code

def f():
    """It's f's; 2 signs!"""
    return "no docstring"
'''


def test_prose_is_docstrings_and_comments():
    pieces = [piece for piece in awd.prose(SOURCE) if piece]
    assert pieces == [
        "The module's own words.",
        "It's f's; 2 signs!",
        "A comment, which goes on in the next line. beside code",
    ]
    assert awd.words(pieces[1:2]) == ["it's", "f's", ";", "2", "signs", "!", "<end>"]
    assert awd.words([""]) == []


def test_the_standard_library_gives_words_from_different_files():
    trained, kept = awd.standard_library(3000, 1000)
    assert len(trained) == 3000 and len(kept) == 1000
    assert awd.standard_library(3000, 1000) == (trained, kept)
    assert "the" in trained and "the" in kept and trained[:1000] != kept


def test_a_vocabulary_holds_the_most_frequent_words():
    vocabulary = awd.Vocabulary(["b", "a", "b", "c", "c", "d"], 4)
    assert vocabulary.words == ["<unk>", "b", "c", "a"]
    np.testing.assert_array_equal(vocabulary.encode(["a", "d", "b"]), [3, 0, 1])


def test_windows_cover_a_text_once_and_their_rate_follows_their_length():
    windows = awd.Windows(awd.streams(np.arange(2003), 4), base=20, eta=3.0, varies=True, seed=1)
    parts = []
    for x, y in windows:
        parts.append(x)
        np.testing.assert_array_equal(y, x + 1)
        assert windows.rate(0) == 3.0 * x.shape[1] / 20
    np.testing.assert_array_equal(np.concatenate(parts, 1), np.arange(2000).reshape(4, -1)[:, :-1])
    lengths = {part.shape[1] for part in parts[:-1]}
    assert len(lengths) > 5 and min(lengths) >= 5
    fixed = awd.Windows(awd.streams(np.arange(2003), 4), base=20, eta=3.0, varies=False, seed=1)
    assert {x.shape[1] for x, _ in list(fixed)[:-1]} == {20}


# ---------------------------------------------------------------------- model


def test_the_model_has_every_part_and_each_parameter_once():
    model = awd.AWDLSTM(SMALL, np.random.default_rng(0))
    assert list(recur.named_params(model)) == [
        "words.embedding.weight",
        *(f"layers.{i}.layer.cell.{name}" for i in range(3) for name in ("Wi", "Wh_raw", "b")),
        "decoder.bias",
    ]
    assert model.decoder.weight is model.words.embedding.weight
    assert [model.layers[i].raw("Wh").shape for i in range(3)] == [(48, 12), (48, 12), (32, 8)]


def test_evaluation_carries_the_state_and_does_not_depend_on_the_windows():
    model = recur.f64(awd.AWDLSTM(SMALL, np.random.default_rng(0)))
    test = awd.streams(text(300), 3)
    want = awd.evaluate(model, test, 99)
    np.testing.assert_allclose(awd.evaluate(model, test, 7), want, rtol=1e-12)
    assert abs(want - math.log(40)) < 0.2


def test_without_takes_parts_away():
    bare = awd.without(SMALL, awd.PARTS)
    assert not bare.averaging and not bare.varying
    model = awd.AWDLSTM(bare, np.random.default_rng(0))
    x, y = np.zeros((4, 5), int), np.ones((4, 5), int)
    with Tape():
        total, entropy = awd.cost(model, x, y, bare)
        assert total is entropy
        total, entropy = awd.cost(model, x, y, SMALL)
        assert float(recur.value(total)) > float(recur.value(entropy))


def test_it_learns_and_the_averaged_weights_are_those_evaluated():
    gentle = dict.fromkeys(("drop_input", "drop_between", "drop_output", "drop_weights"), 0.05)
    settings = replace(SMALL, embedding=24, hidden=32, layers=2, eta=20.0, patience=1, **gentle)
    run = awd.learn(text(6000), text(800, 1), settings, updates=400, progress=False)
    assert run.held_out < 12  # of 40 words
    assert recur.optim.is_averaging(run.opt)
    test = awd.streams(text(800, 1), 10)
    plain = math.exp(awd.evaluate(run.model, test))
    with averaged(run.opt):
        assert math.exp(awd.evaluate(run.model, test)) == run.held_out != plain


def test_the_ablation_names_every_part():
    found = dict(awd.ablation(text(400), text(200, 1), SMALL, updates=2, seeds=2))
    assert list(found) == [
        "all of it",
        *(f"without {part}" for part in awd.PARTS),
        "without any",
    ]
    assert all(len(values) == 2 and values[0] != values[1] for values in found.values())


# ---------------------------------------------------------------------- killed and resumed

RUN = """
import hashlib, json, sys
sys.path[:0] = sys.argv[1:3]
import awd_lstm as awd
import recur
from test_awd_lstm import SMALL, text

run = awd.learn(
    text(2000), text(400), SMALL, updates=60, seed=3, checkpoint=sys.argv[3], progress=False,
    callbacks=[lambda event: print(event.step, flush=True)],
)
digest = hashlib.sha256(b"".join(p.value.tobytes("A") for p in recur.params(run.model)))
print(json.dumps([run.history.losses, run.history.validations, run.held_out, digest.hexdigest()]))
"""


def start(checkpoint):
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(PATH.parent), str(Path(__file__).parent), str(checkpoint)],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def kill_after(step, process):
    """Waits for the process to report an update, then kills it in the middle of the next ones."""
    for line in process.stdout:
        if int(line) >= step:
            break
    process.kill()
    process.communicate()


@pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL")
def test_a_run_that_is_killed_ends_with_the_numbers_of_one_that_is_not(tmp_path):
    want = finish(start(tmp_path / "whole"))
    for step in (25, 45):
        kill_after(step, start(tmp_path / "killed"))
    resumed = finish(start(tmp_path / "killed"))
    assert resumed == want


# ---------------------------------------------------------------------- torch


def masks_of(model, dtype):
    """The factors that dropped something in the last scope, by layer."""

    def of(layer):
        held = layer.held_masks()
        held.pop("scope")
        (mask,) = held.values()
        return mask.astype(dtype) / (1 - layer.p)

    return {
        "words": of(model.words),
        "input": of(model.input),
        "between": [of(layer) for layer in model.between],
        "output": of(model.output),
        "weights": [wd.mask("Wh").astype(dtype) / (1 - wd.p) for wd in model.layers],
    }


def in_torch(torch, weights, masks, x, y, states, settings):
    """The same window in torch's operations: loss and gradients by the names of ours."""
    leaf = {
        path: torch.tensor(np.ascontiguousarray(w), requires_grad=True)
        for path, w in weights.items()
    }
    E = leaf["words.embedding.weight"]
    as_tensor = lambda a: torch.tensor(np.ascontiguousarray(a))  # noqa: E731
    table = (E * as_tensor(masks["words"])[None, :]).T
    steps = torch.nn.functional.embedding(as_tensor(x.T), table)  # (T, B, F)
    steps = steps * as_tensor(masks["input"].T)
    drops = [*masks["between"], None]
    for i, (h, c) in enumerate(states):
        Wi, Wh, b = (leaf[f"layers.{i}.layer.cell.{name}"] for name in ("Wi", "Wh_raw", "b"))
        Wh = Wh * as_tensor(masks["weights"][i])
        h, c = as_tensor(h.T), as_tensor(c.T)
        out = []
        for step in steps:
            gates = step @ Wi.T + h @ Wh.T + b
            write, keep, new, show = gates.chunk(4, dim=1)
            c = torch.sigmoid(keep) * c + torch.sigmoid(write) * torch.tanh(new)
            h = torch.sigmoid(show) * torch.tanh(c)
            out.append(h)
        steps = torch.stack(out)
        if drops[i] is not None:
            steps = steps * as_tensor(drops[i].T)
    dropped = steps * as_tensor(masks["output"].T)
    logits = dropped @ E + leaf["decoder.bias"]
    entropy = torch.nn.functional.cross_entropy(
        logits.reshape(-1, settings.vocabulary), as_tensor(y.T).reshape(-1)
    )
    total = entropy + settings.alpha * (dropped**2).mean()
    total = total + settings.beta * ((steps[1:] - steps[:-1]) ** 2).mean()
    total.backward()
    return total.item(), {path: p.grad.numpy() for path, p in leaf.items()}


@pytest.mark.oracle
@pytest.mark.parametrize("window", ["first", "carried"])
def test_loss_and_gradients_of_a_window_are_torchs(window, dtype):
    torch = pytest.importorskip("torch")
    settings = replace(SMALL, vocabulary=200, embedding=24, hidden=32, batch=8)
    model = awd.AWDLSTM(settings, np.random.default_rng(4))
    model = recur.f64(model) if dtype == np.float64 else model
    rng = np.random.default_rng(5)
    model.decoder.bias[...] = rng.normal(size=200)
    X = rng.integers(0, 200, (2, 8, 36))
    if window == "carried":
        recur.gradient(lambda m: awd.cost(m, X[0, :, :-1], X[0, :, 1:], settings)[0], model)
    states = [copy.deepcopy(recur.value(tuple(wd.layer.state))) for wd in model.layers]
    if window == "first":
        states = [tuple(np.zeros((len(h), 8), dtype) for h in state) for state in states]
    x, y = X[1, :, :-1], X[1, :, 1:]
    loss, grads = recur.withgradient(lambda m: awd.cost(m, x, y, settings)[0], model)
    weights = {path: p.value for path, p in recur.named_params(model).items()}
    want, want_grads = in_torch(torch, weights, masks_of(model, dtype), x, y, states, settings)
    tolerance = 1e-5 if dtype == np.float32 else 1e-12
    assert abs(float(loss) - want) <= tolerance * abs(want)
    assert set(grads) == set(want_grads)
    for path, expected in want_grads.items():
        error = np.linalg.norm(grads[path] - expected) / np.linalg.norm(expected)
        assert error <= tolerance, f"{path}: {error:.2g}"
        largest = np.abs(grads[path] - expected).max() / np.abs(expected).max()
        assert largest <= tolerance, f"{path}: {largest:.2g}"
