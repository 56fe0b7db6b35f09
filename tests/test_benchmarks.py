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


@pytest.fixture
def tiny(monkeypatch):
    """Short sequences, and processes started once: no time is judged here."""
    package, training = (sys.modules[f"suite.{name}"] for name in ("package", "training"))
    monkeypatch.setattr(package.Import, "repeats", 1)
    monkeypatch.setattr(training.Memory, "steps", (40, 160))
    monkeypatch.setattr(training, "T", 5)


@pytest.mark.parametrize("benchmark", smallest_and_largest_choice(), ids=lambda b: b.name)
def test_a_benchmark_of_the_suite_runs(benchmark, tiny):
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
    double = dtype == np.float64
    exact = cases.make_data(case, np.float64) if double else as_float64(data)
    if case.training:
        y, dx, grads = reference.run(cell, exact["layers"], exact["x"], exact["dy"])
    else:
        y = reference.run(cell, exact["layers"], exact["x"])
    variants = adapter.Adapter(1).variants(case)
    assert variants
    for name, build in variants.items():
        rounded = name in adapter.STORAGES  # weights in fewer bits, and everything in float32
        if rounded and double:
            continue
        tol = 0.02 if rounded else 1e-12 if double else 1e-5
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


def test_a_comparison_runs_in_processes_of_their_own_and_is_checked(tmp_path):
    limits = {"fma_gflops": {"1": 100.0}, "read_gbs": {"1": {"24": 100.0, "64": 90.0}}}
    limits |= {"ghz": 3.0, "fma_theory_gflops_per_core": 96.0, "blas": {}}
    limits["fma_gflops"]["2"], limits["read_gbs"]["2"] = 200.0, {"24": 200.0, "64": 180.0}
    (tmp_path / "limits.json").write_text(json.dumps({"limits": limits}))
    (tmp_path / "loops.logs").mkdir()
    (tmp_path / "loops.logs" / "reference.npz").write_bytes(b"of a run that was stopped")
    command = [sys.executable, str(PEERS / "run.py"), "--peers", "recur", "--workloads", "loop"]
    command += ["--filter", "(16,32)", "--threads", "1", "--rounds", "2", "--budget", "0.001"]
    command += ["--warm", "0", "--limits-from", str(tmp_path / "limits.json")]
    subprocess.run([*command, "--json", str(tmp_path / "loops.json")], check=True)
    results = json.loads((tmp_path / "loops.json").read_text())["results"]
    assert len(results) == 3
    for row in results:
        assert "error" not in row
        assert row["us"] > 0
        assert row["limit_us"] > 0
        assert len(row["round_us"]) == 2
        assert max(row["diff"].values()) < 1e-4
    assert not (tmp_path / "loops.logs" / "reference.npz").exists()


def test_the_comparison_refuses_a_part_that_there_is_none_of(tmp_path):
    script = BENCHMARKS / "compare.sh"
    command = ["sh", str(script), sys.executable, str(tmp_path / "e"), str(tmp_path / "r"), "step"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no part is called step; there are: environments limits steps" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_variant_is_left_out_only_where_it_is_never_the_fastest(peers, monkeypatch):
    cases, _, _ = peers
    monkeypatch.syspath_prepend(str(PEERS))
    choice = importlib.import_module("choice")
    one, many = (cases.Case(w, "lstm", 1, b, 64, 128) for w, b in (("step", 1), ("mstep", 64)))
    assert not choice.worth("torch", "nn.Layer T=1", one, 1)
    assert choice.worth("torch", "nn.Layer T=1", many, 2)
    assert not choice.worth("torch", "compile(cell)", many, 1)
    assert choice.worth("recur", "int8", one, 1)
    assert not choice.worth("recur", "int8", one, 2)
    assert not choice.worth("numpy", "naive", one, 2)


def test_what_a_kind_of_time_is_judged_by_is_measured(peers, monkeypatch):
    cases, _, _ = peers
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    choice = importlib.import_module("choice")
    targets = importlib.import_module("targets")
    for row in targets.ROWS:
        for aim in row.aims:
            for part in aim.cases:
                found = [case for case in cases.GRID if part in case.id]
                assert found, part
                for case in found:
                    if aim.of not in ("limit", "best") and any(c in case.id for c in row.cases):
                        assert choice.worth(aim.of, "", case, 1)


def test_the_stores_are_measured():
    command = [sys.executable, str(BENCHMARKS / "store.py"), "--streams", "1100"]
    done = subprocess.run(
        [*command, "--seconds", "0.01"], check=True, capture_output=True, text=True
    )
    about, *rows = map(json.loads, done.stdout.splitlines())
    assert about["sqlite"] and {"memory", "sqlite", "sqlite, durable"} <= {r["store"] for r in rows}
    assert all(value > 0 for row in rows for name, value in row.items() if "second" in name)
    sizes = [row["bytes_a_stream"] for row in rows if row.get("together") and "sql" in row["store"]]
    assert min(sizes) > 1024 + 64  # the state and the answer


@pytest.fixture(scope="module")
def soak():
    return module_at(BENCHMARKS / "soak.py", "soak_runner")


def windows_of(seed, *, decay=0.0, work=0.0, slower=0.0, leak=0.0, noise=0.035):
    """Windows of a soak.  The noise is what is measured, or more: for batches, and what else the
    machine does, which halves its speed at times; in latency as much again of its own.
    """
    rng, n = np.random.default_rng(seed), 50
    speed = np.exp(0.15 * rng.standard_normal(n))
    along = np.linspace(0, 1, n)

    def series(value, noise, change):
        return value * np.exp(noise * rng.standard_normal(n) + np.log1p(change) * along)

    memory = 96 + 2.4 * np.minimum(5 * along, 1) + leak * along
    columns = {
        "most_a_second": series(9000, noise, -decay) * speed,
        "batch": series(130, noise, -decay),
        "server_us": series(130, noise, work) / speed,
        "client_us": series(50, 0.01, 0) / speed,
        "p50_ms": series(1.5, 0.2, slower) / speed,
        "p99_ms": series(10, 0.8, slower) / speed,
        "server_MiB": memory,
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def test_s10_a_soak_holds_that_is_as_noisy_as_the_machine_and_no_more(soak):
    held = [soak.judge(windows_of(seed))["held"] for seed in range(40)]
    assert sum(held) >= 39


@pytest.mark.parametrize(
    "change",
    [{"decay": 0.1}, {"work": 0.1}, {"slower": 1.5}, {"leak": 3.0}],
    ids=lambda change: next(iter(change)),
)
def test_s10_a_soak_fails_whose_server_decays(soak, change):
    held = [soak.judge(windows_of(seed, **change))["held"] for seed in range(40)]
    assert sum(held) <= 1


def test_s10_a_decay_of_batches_alone_fails_and_a_few_bad_windows_do_not(soak):
    windows = windows_of(0)
    for window in windows[3::9]:  # the machine was busy with something else
        window["most_a_second"] /= 2
        window["p99_ms"] *= 10
    assert soak.judge(windows)["held"]
    for at, window in enumerate(windows):
        window["batch"] *= 1 - 0.1 * at / 49
    assert not soak.judge(windows)["held"]


def test_a_trend_is_the_line_that_half_of_all_pairs_lie_above(soak):
    change, z = soak.trend([1.0, 2.0, 3.0, 40.0, 5.0])
    assert change == 4.0
    assert z == pytest.approx(8 / np.sqrt(5 * 4 * 15 / 18))
