"""The benchmarks run, each once and on few of its parameters: no time is judged here."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PEERS = BENCHMARKS / "peers"

if not BENCHMARKS.is_dir():
    pytest.skip("the benchmarks are not part of this tree", allow_module_level=True)


def module_at(path: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


runner = module_at(BENCHMARKS / "run.py", "benchmark_runner")


def smallest_and_largest_choice():
    """Each method with the first and the last combination of its parameters that is not large."""
    chosen = {}
    for benchmark in runner.benchmarks():
        large = any(np.max(value) > 256 for value in benchmark.values if isinstance(value, tuple))
        if not large:
            first, _ = chosen.get((benchmark.owner, benchmark.method), (benchmark, None))
            chosen[benchmark.owner, benchmark.method] = first, benchmark
    return list(dict.fromkeys(b for pair in chosen.values() for b in pair))


@pytest.mark.parametrize("benchmark", smallest_and_largest_choice(), ids=lambda b: b.name)
def test_a_benchmark_of_the_suite_runs(benchmark):
    result = runner.measure(benchmark, 0.0, once=True)
    assert np.isfinite(result["value"])
    assert result["value"] >= 0
    assert result["unit"]


def test_every_benchmark_of_the_suite_has_a_small_choice():
    tested = {(b.owner, b.method) for b in smallest_and_largest_choice()}
    assert tested == {(b.owner, b.method) for b in runner.benchmarks()}


def test_the_runner_writes_medians_and_the_machine(tmp_path):
    path = tmp_path / "numbers.json"
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--filter", "Step.time_step(RNN, (16,"]
    subprocess.run([*command, "--seconds", "0.01", "--json", str(path)], check=True)
    report = json.loads(path.read_text())
    assert report["machine"]["threads"] == 1
    assert len(report["results"]) == 2  # two dtypes
    for result in report["results"].values():
        assert result["quartiles"][0] <= result["value"] <= result["quartiles"][1]
        assert result["calls"] >= 3


def test_the_runner_refuses_a_filter_that_nothing_fits():
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--filter", "no such benchmark"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no benchmark's name contains 'no such benchmark'" in done.stderr


@pytest.fixture
def peers(monkeypatch):
    """The modules cases, reference and adapters.recur_ of the comparison with other libraries."""
    monkeypatch.syspath_prepend(str(PEERS))
    names = ("cases", "reference", "adapters.recur_")
    yield [importlib.import_module(name) for name in names]
    for name in (*names, "adapters"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("cell", ["rnn", "lstm", "gru"])
@pytest.mark.parametrize("workload", ["step", "mstep", "seq", "train", "loop", "growth"])
def test_what_is_compared_with_other_libraries_agrees_with_their_reference(
    peers, dtype, cell, workload
):
    cases, reference, adapter = peers
    steps = 1 if workload in ("step", "mstep") else 7
    layers = 2 if workload == "train" else 1
    case = cases.Case(workload, cell, steps, 1 if workload == "step" else 3, 5, 6, layers)
    data = cases.make_data(case, dtype)
    tol = 1e-12 if dtype == np.float64 else 1e-5
    exact = cases.make_data(case, np.float64) if dtype == np.float64 else as_float64(data)
    if case.training:
        y, dx, grads = reference.run(cell, exact["layers"], exact["x"], exact["dy"])
    else:
        y = reference.run(cell, exact["layers"], exact["x"])
    variants = adapter.Adapter(1).variants(case)
    assert variants
    for build in variants.values():
        run, outputs = build(case, data)
        run()
        got = outputs()
        np.testing.assert_allclose(got["y"], y, atol=tol)
        if case.training:
            np.testing.assert_allclose(got["dx"], dx, atol=10 * tol)
            for mine, theirs in zip(got["grads"], grads, strict=True):
                for name, gradient in mine.items():
                    np.testing.assert_allclose(gradient, theirs[name], atol=100 * tol)


def as_float64(data):
    layers = [{k: v.astype(np.float64) for k, v in p.items()} for p in data["layers"]]
    return {"layers": layers} | {k: data[k].astype(np.float64) for k in ("x", "dy")}


def peer_row(peer, us, threads=1, variant="m(x)", **more):
    case = "step lstm T1 B1 (64,128)"
    row = {"case": case, "workload": "step", "peer": peer, "threads": threads, "variant": variant}
    return row | {"us": us, "limit_us": 5.0} | more


def test_the_page_sets_recur_beside_the_best_peer_and_judges_what_was_aimed_at(tmp_path):
    page = module_at(BENCHMARKS / "page.py", "benchmark_page")
    results = [
        peer_row("recur", 6.0),
        peer_row("recur", 12.0, variant="cell(state, x)"),
        peer_row("torch", 30.0),
        peer_row("onnxruntime", 15.0),
        peer_row("cfloor", 5.5),
    ]
    peers = {
        "machine": {"cpu": "a processor", "cores": 2, "date": "today", "python": "3.11"},
        "versions": {"recur": {"recur": "1"}},
        "results": results,
        "import": {"recur": {"process_s": 0.4, "bare_python_s": 0.1, "bytes": 2e6}},
    }
    (tmp_path / "peers.json").write_text(json.dumps(peers))
    lines = page.render(tmp_path).splitlines()
    case = "step lstm T1 B1 (64,128)"
    best = (
        f"| {case} | 6.00 (1.20 ×) | 1.00 | onnxruntime 15.0 (3.00 ×) | 2.50 | - | 5.50 (1.10 ×) |"
    )
    assert best in lines
    wanted = "≥ 2.6 × as fast as the best peer (onnxruntime)"
    assert f"| LSTM step | {case} | {wanted} | 2.50 | **no** |" in lines
    assert "| recur | 0.30 | 2 |" in lines


def test_every_aim_of_the_page_is_about_a_case_that_is_measured(peers):
    cases, _, _ = peers
    page = module_at(BENCHMARKS / "page.py", "benchmark_page")
    for target in page.TARGETS:
        for part in target.cases:
            assert any(part in case.id for case in cases.GRID), part
