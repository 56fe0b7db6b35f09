"""examples/seq2seq_beam.py: state hand-over, beam search by `reindex`, forward only and trained."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

import recur
from recur.losses import logitcrossentropy

PATH = Path(__file__).resolve().parents[1] / "examples" / "seq2seq_beam.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("seq2seq_beam", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def small(example, seed=0):
    """A model of three letters and an end, with weights large enough to have opinions."""
    model = recur.f64(example.Seq2Seq(8, np.random.default_rng(seed), symbols=4))
    for p in recur.params(model):
        p *= 3.0
    return model


SOURCE = np.array([2, 0, 1])
END = 3


def log_probability(model, target):
    """Of one target, with its end, by teacher forcing in one call; recorded inside a scope."""
    target = np.array([*target, END])
    model.read(SOURCE[None])
    logits = model.decoder(np.array([[END, *target[:-1]]]))
    return -logitcrossentropy(logits, target[None], agg=sum)


def test_a_beam_as_wide_as_the_tree_finds_what_trying_everything_finds(example):
    model = small(example)
    everything = [target for n in range(4) for target in itertools.product(range(3), repeat=n)]
    scores = {target: float(log_probability(model, target)) for target in everything}
    best = sorted(scores, key=scores.get, reverse=True)
    found = example.beam_search(model, SOURCE, width=200, longest=3, end=END)
    assert [tuple(h.symbols) for h in found] == best
    np.testing.assert_allclose([h.score for h in found], [scores[t] for t in best], rtol=1e-12)


def test_every_score_of_a_narrow_beam_is_that_of_teacher_forcing(example):
    model = small(example, seed=1)
    found = example.beam_search(model, SOURCE, width=3, longest=6, end=END)
    assert len(found) == 3
    for hypothesis in found:
        expected = log_probability(model, hypothesis.symbols)
        np.testing.assert_allclose(hypothesis.score, expected, rtol=1e-12)


def test_a_beam_of_one_is_the_greedy_choice(example):
    model = small(example, seed=4)
    (found,) = example.beam_search(model, SOURCE, width=1, longest=6, end=END)
    model.read(SOURCE[None])
    symbols, last = [], END
    for _ in range(6):
        last = int(model.decoder(np.array([last]))[:, 0].argmax())
        if last == END:
            break
        symbols.append(last)
    assert found.symbols == symbols


def test_gradient_flows_through_the_beam_into_the_encoder(example):
    """A score has the gradient that teacher forcing gives, though its state
    was repeated, reordered and dropped on the way."""
    model = small(example, seed=2)
    found = example.beam_search(model, SOURCE, width=3, longest=6, end=END)
    rank = max(range(3), key=lambda i: len(found[i].symbols))
    assert len(found[rank].symbols) >= 3

    def searched(m):
        return example.beam_search(m, SOURCE, width=3, longest=6, end=END)[rank].score

    through_beam = recur.gradient(searched, model)
    forced = recur.gradient(lambda m: log_probability(m, found[rank].symbols), model)
    assert np.abs(forced["encoder.layers.1.cell.Wh"]).max() > 0
    for path in forced:
        np.testing.assert_allclose(through_beam[path], forced[path], rtol=1e-9, atol=1e-12)


def test_padding_of_other_words_changes_nothing(example):
    rng = np.random.default_rng(0)
    model = recur.f64(example.Seq2Seq(8, rng))
    words = example.some_words(5, rng)
    together = example.batch_of(words)
    losses = [float(example.loss(model, example.batch_of([word]))) for word in words]
    sizes = [len(word) + 1 for word in words]
    mean = np.average(losses, weights=sizes)
    np.testing.assert_allclose(example.loss(model, together), mean, rtol=1e-12)


def test_training_teaches_the_task(example):
    rng = np.random.default_rng(0)
    model = example.Seq2Seq(48, rng)
    losses = example.train(model, 250, rng)
    assert losses[0] > 1.5 and np.mean(losses[-10:]) < 0.25
    words = example.some_words(20, rng, longest=3)
    found = [example.beam_search(model, word, width=4, longest=8)[0].symbols for word in words]
    right = sum(symbols == list(word[::-1]) for symbols, word in zip(found, words, strict=True))
    assert right >= 18


def test_it_runs_as_a_program(example, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["seq2seq_beam.py", "--updates", "3", "--hidden", "8"])
    example.main()
    out = capsys.readouterr().out
    assert "after 3 updates" in out and "of 200 new words" in out
