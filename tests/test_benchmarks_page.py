"""The benchmark page: its tables, its verdicts, and the page that is checked in."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"

if not BENCHMARKS.is_dir():
    pytest.skip("the benchmarks are not part of this tree", allow_module_level=True)

CASE = "step lstm T1 B1 (64,128)"


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("page")


def row(peer, us, variant="m(x)", case=CASE, threads=1, **more):
    workload, cell, T, B, size = case.split()[:5]
    n_in, n_out = map(int, size.strip("()").split(","))
    found = {"case": case, "workload": workload, "cell": cell, "T": int(T[1:]), "B": int(B[1:])}
    found |= {
        "I": n_in,
        "H": n_out,
        "layers": 1,
        "peer": peer,
        "threads": threads,
        "variant": variant,
    }
    return found | {"us": us, "limit_us": 5.0} | more


def written(tmp_path, *results, name="steps"):
    machine = {"cpu": "a processor", "cores": 2, "date": "today", "python": "3.11"}
    report = {"machine": machine, "versions": {"recur": {"recur": "1"}}, "results": results}
    (tmp_path / f"{name}.json").write_text(json.dumps(report | {"limits": None}))
    return tmp_path


def test_a_table_sets_both_ways_of_recur_beside_every_peer_and_judges_each_target(page, tmp_path):
    rows = [row("recur", 6.4), row("recur", 6.0, "stream(x)"), row("recur", 3.0, "int8")]
    rows += [row("torch", 30.0), row("torch", 31.0, "nn.Cell"), row("onnxruntime", 15.0)]
    found = page.render(written(tmp_path, *rows, row("cfloor", 5.5)))
    target, met = "the best peer ÷ 2.6", "**falls short** (2.50)"
    numbers = "6.40 | 6.00 | 30.0 | 15.0 | 5.50 | 2.50 | 1.20"
    assert f"| lstm T1 B1 (64,128) | {numbers} | {target} | {met} |" in found.lines
    assert found.short == ["lstm-step"]


def test_a_row_that_meets_its_target_says_so(page, tmp_path):
    found = page.render(written(tmp_path, row("recur", 5.0), row("torch", 15.0)))
    assert any(line.endswith("| 3.00 | 1.00 | the best peer ÷ 2.6 | yes |") for line in found.lines)
    assert found.short == []


def test_the_sentence_about_a_row_stands_below_its_table_only_while_it_falls_short(page, tmp_path):
    reasons = {"lstm-step": "A call alone takes that long."}
    slow = page.render(written(tmp_path, row("recur", 9.0), row("torch", 15.0)), reasons)
    assert reasons["lstm-step"] in slow.lines
    fast = page.render(written(tmp_path, row("recur", 5.0), row("torch", 15.0)), reasons)
    assert reasons["lstm-step"] not in fast.lines


def test_a_natural_way_that_is_much_slower_than_the_fastest_is_named(page, tmp_path):
    found = page.render(written(tmp_path, row("recur", 6.0), row("recur", 4.0, "stream(x)")))
    assert found.slow == [f"{CASE}, 1 thread: 1.50"]
    assert f"| {CASE} | 1 | 6.00 | 4.00 `stream(x)` | 1.50 | **falls short** |" in found.lines
    found = page.render(written(tmp_path, row("recur", 6.0), row("recur", 5.0, "stream(x)")))
    assert found.slow == []
    assert "| all | 1 | - | - | at most 1.20 | yes |" in found.lines


@pytest.mark.parametrize(("size", "bound"), [("(64,128)", "1"), ("(256,512)", "1.7")])
def test_a_second_thread_must_gain_where_a_step_is_large(page, tmp_path, size, bound):
    case = f"seq lstm T100 B16 {size}"
    rows = [row("recur", us, "m(X)", case, threads) for threads, us in ((1, 150.0), (2, 100.0))]
    found = page.render(written(tmp_path, *rows, name="sequences"))
    met = "yes" if bound == "1" else "**falls short**"
    assert f"| {case} | 150 | 100 | - | - | 20.00 | 1.50 | ≥ {bound} | {met} |" in found.lines


def test_a_loop_is_not_confused_with_the_sequence_it_is_set_beside(page, tmp_path):
    case = "loop lstm T100 B16 (128,256)"
    ways = [("m(x) loop, withgradient", 120.0), ("m(x) loop, tape", 110.0), ("m(X), tape", 100.0)]
    rows = [row("recur", us, name, case) for name, us in ways]
    lines = page.render(
        written(tmp_path, *rows, row("torch", 330.0, case=case), name="loops")
    ).lines
    assert "| lstm T100 B16 (128,256) | 110 | 100 | 1.10 |" in lines
    assert any("| 120 | 110 | 330 | 3.00 |" in line for line in lines)


def test_growth_is_told_for_each_way_of_each_library(page, tmp_path):
    rows = []
    for T in (50, 1600):
        case = f"growth lstm T{T} B16 (128,256)"
        plain = row("recur", 2.0 * T, "tape.backward", case, hwm_mib=100 + T * 128 / 1024)
        rematted = row("recur", 3.0 * T, "remat=32", case, hwm_mib=100 + T * 60 / 1024)
        rows += [plain, rematted, row("torch", 3.0 * T + T * T, "nn", case, hwm_mib=T)]
    lines = page.render(written(tmp_path, *rows, name="growth")).lines
    start = "50 to 1600 | 100 | 3,200 | 1.00 | 128"
    assert f"| recur | tape.backward | {start} | ≤ 1.05; ≤ 150 KiB | yes; yes |" in lines
    [remat] = [line for line in lines if "remat=32 (1.50 × the time)" in line]
    assert remat.endswith("| 60 | ≤ 65 KiB; ≤ 1.4 × the time | yes; **falls short** |")


def test_fewer_bits_are_judged_beside_float32_called_in_the_same_way(page, tmp_path):
    case = "step lstm T1 B1 (512,1024)"
    names = [("m(x)", 100.0), ("stream(x)", 90.0), ("bfloat16", 50.0), ("int8", 50.0)]
    rows = [row("recur", us, name, case) for name, us in names]
    lines = page.render(written(tmp_path, *rows)).lines
    [found] = [line for line in lines if "bfloat16 yes, int8 **falls short**" in line]
    assert "| 100 | 50.0 (2.00 ×) | - | 50.0 (2.00 ×) |" in found


def test_models_are_told_in_characters_a_second_and_what_a_part_adds(page, tmp_path):
    window, large = "LSTM(128 => 256), T 100, B 16", "LSTM(650 => 650), T 35, B 20"
    seconds = {
        "character model, one training window": 0.01,
        "character model, one character": 1e-5,
        "Adam, LSTM(128 => 256)": 1e-5,
        window: 0.05,
        "the same with Dense and cross entropy": 0.06,
        large: 0.1,
        "the same with dropped recurrent weights": 0.102,
    }
    torch = {task: 2 * s for task, s in seconds.items()} | {"Adam, LSTM(128 => 256), fused": 1.5e-5}
    (tmp_path / "tasks.json").write_text(json.dumps({"1": {"recur": seconds, "torch": torch}}))
    lines = page.render(tmp_path).lines
    rates = "102,400 a second | 51,200 a second | 2.00"
    assert f"| character model, one training window | 1 | {rates} | - | - |" in lines
    update = "| one update: Adam, LSTM(128 => 256)"
    met = "torch ÷ 3 | **falls short** (2.00) |"
    assert f"{update} | 1 | 10.0 µs | 20.0 µs | 2.00 | {met}" in lines
    assert f"{update}, fused in torch | 1 | 10.0 µs | 15.0 µs | 1.50 | - | - |" in lines
    [added] = [line for line in lines if "what a mask on the recurrent weights adds" in line]
    assert "| +2.0% of the window | +2.0% of the window |" in added


def test_the_tables_replace_those_of_the_page_and_nothing_else(page, tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"before\n{page.BEGIN}old\n{page.END}\nafter\n", encoding="utf-8")
    for _ in range(2):
        page.put_into(path, ["new", ""])
        text = path.read_text(encoding="utf-8")
        assert text == f"before\n{page.BEGIN}\nnew\n\n{page.END}\nafter\n"
    path.write_text("no marks", encoding="utf-8")
    with pytest.raises(SystemExit, match="has no <!-- results -->"):
        page.put_into(path, [])


def test_the_page_that_is_checked_in_is_made_of_the_results_that_are(page, tmp_path):
    source = ROOT / "docs" / "benchmarks.md"
    again = tmp_path / "benchmarks.md"
    again.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    reasons = json.loads(page.REASONS.read_text(encoding="utf-8"))
    page.put_into(again, page.render(BENCHMARKS / "results", reasons).lines)
    made_by = "python benchmarks/page.py benchmarks/results docs/benchmarks.md"
    assert again.read_text(encoding="utf-8") == source.read_text(encoding="utf-8"), made_by


def test_every_sentence_about_a_row_is_about_one_that_there_is(page):
    keys = {row.key for row in page.ROWS} | {"growth", "import", "natural", "threads", "compress"}
    keys |= {"drift", "models", "alone", "float64"}
    assert json.loads(page.REASONS.read_text(encoding="utf-8")).keys() <= keys
