"""examples/truncation_study.py: its gradients are what it says, and so is what it finds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

import recur
from recur.losses import logitbinarycrossentropy

PATH = Path(__file__).resolve().parents[1] / "examples" / "truncation_study.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("truncation_study", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("window", [1, 3, 7, 8, 20])
def test_a_window_is_a_cut_by_truncate_so_many_steps_before_the_loss(example, window):
    model = recur.f64(example.network(0))
    X, bits = example.sequences(8, 4, np.random.default_rng(0))

    def by_truncate(m):
        recur.reset(m)
        for t in range(8):
            if t == 8 - window:
                recur.truncate(m)
            y = m(X[..., t])
        return logitbinarycrossentropy(y, bits)

    theirs = recur.gradient(lambda m: example.loss(m, X, bits, window), model)
    ours = recur.gradient(by_truncate, model)
    for path in ours:
        np.testing.assert_allclose(theirs[path], ours[path], rtol=1e-10, atol=1e-14)


def test_a_whole_window_learns_sooner_than_a_short_one(example):
    whole = example.trial(12, 12, 200, seed=0)
    short = example.trial(2, 12, 200, seed=0)
    assert whole.updates is not None and whole.updates <= 100 and whole.right >= 0.99
    assert short.updates is None and short.right < 0.99


def test_gradients_fade_with_every_step(example):
    lag = example.fading(12, 0)
    assert (np.diff(np.log(lag.array[0])) < 0).all()


def test_it_runs_as_a_program(example, capsys, monkeypatch, in_tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ["--updates", "3", "--windows", "2", "5", "--delay", "5", "--plot", "lags.png"]
    monkeypatch.setattr(sys, "argv", ["truncation_study.py", *arguments])
    example.main()
    out = capsys.readouterr().out
    assert "not after 3" in out and "100.000%" in out
    assert (in_tmp_path / "lags.png").stat().st_size > 1000
