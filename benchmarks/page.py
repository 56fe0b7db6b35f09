"""Turns the JSON files of a run into the tables of `docs/benchmarks.md`: python page.py FOLDER

FOLDER holds `peers.json` and, as far as they were made, `train-fresh.json` (which replaces the
training rows), `tasks.json`, `float64.json` and `suite.json`.  Writes `FOLDER/tables.md`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ANCHORS = ("onednn", "cfloor")
NATURAL = ("m(x)", "m(X)", "withgradient", "m(x) loop, withgradient")
Row = dict[str, Any]


class Target(NamedTuple):
    """What recur is meant to reach in the cases whose id contains one of `cases`."""

    title: str
    cases: Sequence[str]
    bound: float
    of: str  # "limit": recur / limit <= bound; else a peer, or "best": peer / recur >= bound


SIZES = {"(16,32)": 6.0, "(64,128)": 2.6, "(128,256)": 1.7, "(256,512)": 1.35, "(512,1024)": 1.2}
TRAIN = "train {} T100 B{} ({})"
SMALL_BATCH = [TRAIN.format("lstm", 16, s) for s in ("64,128", "128,256", "256,512")]
LARGE_BATCH = [TRAIN.format("lstm", 64, s) for s in ("64,128", "128,256", "256,512")]

TARGETS = (
    *(Target("LSTM step", [f"step lstm T1 B1 {s}"], x, "best") for s, x in SIZES.items()),
    Target("LSTM step", ["step lstm T1 B1 (128,256)"], 1.2, "limit"),
    Target("GRU and RNN step", [f"step {c} T1 B1 (16,32)" for c in ("gru", "rnn")], 4.0, "best"),
    *(
        Target("64 streams", [f"mstep {cell} T1 B64 {size}"], bound, "limit")
        for size, bounds in (("(64,128)", (1.35, 1.5, 1.6)), ("(128,256)", (1.2, 1.25, 1.3)))
        for cell, bound in zip(("lstm", "gru", "rnn"), bounds, strict=True)
    ),
    Target("sequence, B 1", [f"seq {c} T100 B1 " for c in ("lstm", "gru", "rnn")], 1.35, "limit"),
    Target("sequence, batches", ["seq "], 1.0, "best"),
    Target("sequence, batches", [f"seq lstm T100 B{b} (64,128)" for b in (16, 64)], 1.35, "limit"),
    Target(
        "sequence, batches",
        [f"seq lstm T100 B{b} ({s})" for b in (16, 64) for s in ("128,256", "256,512")]
        + [f"seq {c} T100 B{b} " for c in ("gru", "rnn") for b in (16, 64)],
        1.25,
        "limit",
    ),
    Target("training, B 1", ["train lstm T100 B1 "], 1.15, "torch"),
    Target("training, B 1", ["train gru T100 B1 ", "train rnn T100 B1 "], 1.8, "best"),
    Target("training, batches", ["train lstm"], 1.0, "onednn"),
    Target("training, B 16", [*SMALL_BATCH, "(650,650)"], 1.12, "torch"),
    Target("training, B 64", LARGE_BATCH, 1.3, "torch"),
    Target(
        "training, batches",
        [f"train {c} T100 B{b} " for c in ("gru", "rnn") for b in (16, 64)],
        1.35,
        "best",
    ),
    Target("loop", [f"loop {c} T100 B16 " for c in ("lstm", "gru", "rnn")], 1.6, "torch"),
    Target("loop", [f"loop {c} T100 B16 " for c in ("lstm", "gru", "rnn")], 1.3, "jax"),
    Target("loop", ["loop lstm T100 B1 (16,32)"], 10.0, "torch"),
)


def fastest(rows: Iterable[Row], wanted: Callable[[Row], bool]) -> Row | None:
    found = [row for row in rows if "us" in row and wanted(row)]
    return min(found, key=lambda row: row["us"]) if found else None


def peer_of(rows: Sequence[Row], of: str) -> Row | None:
    """The fastest row of one peer, or of all that are no anchors."""
    if of == "best":
        return fastest(rows, lambda row: row["peer"] not in (*ANCHORS, "recur"))
    return fastest(rows, lambda row: row["peer"] == of)


def by_case(results: Iterable[Row], threads: int) -> dict[str, list[Row]]:
    cases: dict[str, list[Row]] = {}
    for row in results:
        if row["threads"] == threads:
            cases.setdefault(row["case"], []).append(row)
    return cases


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


def micro(us: float) -> str:
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def over(row: Row | None) -> str:
    """Microseconds, and how often the machine's limit."""
    if row is None:
        return "-"
    limit = row.get("limit_us")
    return micro(row["us"]) + (f" ({row['us'] / limit:.2f} ×)" if limit else "")


def overview(cases: dict[str, list[Row]]) -> list[str]:
    """Every case: recur beside the best peer and the anchors."""
    body = []
    for case, rows in cases.items():
        mine, best = peer_of(rows, "recur"), peer_of(rows, "best")
        if mine is None:
            continue
        natural = fastest(rows, lambda row: row["peer"] == "recur" and row["variant"] in NATURAL)
        body.append(
            [
                case,
                over(mine),
                f"{natural['us'] / mine['us']:.2f}" if natural else "-",
                f"{best['peer']} {over(best)}" if best else "-",
                f"{best['us'] / mine['us']:.2f}" if best else "-",
                over(peer_of(rows, "onednn")),
                over(peer_of(rows, "cfloor")),
            ]
        )
    head = ["case", "recur", "natural ÷ fastest", "best peer", "times faster", "oneDNN", "C floor"]
    return table(head, body)


def judged(cases: dict[str, list[Row]]) -> list[str]:
    """Every target in every case that it covers, and whether it holds."""
    body = []
    for target in TARGETS:
        for case, rows in cases.items():
            if not any(part in case for part in target.cases):
                continue
            mine = peer_of(rows, "recur")
            if mine is None:
                continue
            if target.of == "limit":
                if not mine.get("limit_us"):
                    continue
                reached = mine["us"] / mine["limit_us"]
                holds, wanted = reached <= target.bound, f"≤ {target.bound:g} × limit"
            else:
                other = peer_of(rows, target.of)
                if other is None:
                    continue
                reached = other["us"] / mine["us"]
                holds = reached >= target.bound
                name = f"the best peer ({other['peer']})" if target.of == "best" else target.of
                wanted = f"≥ {target.bound:g} × as fast as {name}"
            mark = "yes" if holds else "**no**"
            body.append([target.title, case, wanted, f"{reached:.2f}", mark])
    return table(["what", "case", "wanted", "reached", "holds"], body)


def threads_table(one: dict[str, list[Row]], two: dict[str, list[Row]]) -> list[str]:
    """What a second thread gains."""
    body = []
    for case, rows in one.items():
        a, b = peer_of(rows, "recur"), peer_of(two.get(case, []), "recur")
        if a and b:
            body.append([case, micro(a["us"]), micro(b["us"]), f"{a['us'] / b['us']:.2f}"])
    return table(["case", "1 thread", "2 threads", "times faster"], body)


def growth(results: Iterable[Row]) -> list[str]:
    """Time against linear, and memory a step, between the shortest and the longest sequence."""
    rows = [row for row in results if row["workload"] == "growth" and "hwm_mib" in row]
    body = []
    for peer in dict.fromkeys(row["peer"] for row in rows):
        own = sorted((row for row in rows if row["peer"] == peer), key=lambda row: row["T"])
        short, long = own[0], own[-1]
        if short["T"] == long["T"]:
            continue
        linear = long["us"] / short["us"] / (long["T"] / short["T"])
        kib = (long["hwm_mib"] - short["hwm_mib"]) * 1024 / (long["T"] - short["T"])
        body.append([peer, f"{short['T']} to {long['T']}", f"{linear:.2f}", f"{kib:.0f}"])
    return table(["peer", "T", "time against linear", "KiB a step"], body)


def tasks_table(tasks: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    body = []
    for threads, libraries in tasks.items():
        mine, torch = libraries["recur"], libraries["torch"]
        for task, seconds in torch.items():
            own = mine.get(task) or mine[task.removesuffix(", fused")]
            both = [micro(own * 1e6), micro(seconds * 1e6), f"{seconds / own:.2f}"]
            body.append([task, threads, *both])
    return table(["task", "threads", "recur", "torch", "times faster"], body)


def float64_table(rows: Sequence[Row]) -> list[str]:
    def cell(found: Row) -> str:
        return f"{micro(found['us'])} ({found['us'] / found['limit_us']:.2f} ×)"

    body = [[row["case"], cell(row["float32"]), cell(row["float64"])] for row in rows]
    return table(["case", "float32", "float64"], body)


def suite_table(report: dict[str, Any]) -> list[str]:
    scale = {"s": ("µs", 1e6)}
    body = []
    for name, found in report["results"].items():
        unit, factor = scale.get(found["unit"], (found["unit"], 1.0))
        body.append([f"`{name}`", f"{micro(found['value'] * factor)} {unit}"])
    return table(["benchmark", "median"], body)


def imports(found: dict[str, Any]) -> list[str]:
    body = [
        [peer, f"{row['process_s'] - row['bare_python_s']:.2f}", f"{row['bytes'] / 1e6:.0f}"]
        for peer, row in found.items()
    ]
    return table(
        ["peer", "import, seconds over Python's start", "MB installed, all it needs"], body
    )


def render(folder: Path) -> str:
    def read(name: str) -> Any:
        path = folder / name
        return json.loads(path.read_text()) if path.exists() else None

    peers, fresh = read("peers.json"), read("train-fresh.json")
    results = peers["results"]
    if fresh is not None:
        again = {row["case"] for row in fresh["results"]}
        results = [row for row in results if row["case"] not in again] + fresh["results"]
    one, two = by_case(results, 1), by_case(results, 2)
    machine = peers["machine"]
    versions = ", ".join(f"{k} {v}" for d in peers["versions"].values() for k, v in d.items())
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}, Python "
        f"{machine['python']}; {versions}. Medians in microseconds; in brackets, how often the "
        "limit of the machine.",
        "",
    ]
    parts: list[tuple[str, list[str]]] = [
        ("Against the best peer, one thread", overview(one)),
        ("Against the best peer, two threads", overview(two)),
        ("What was aimed at, one thread", judged(one)),
        ("A second thread", threads_table(one, two)),
        ("Growth", growth(results)),
        ("Import and size", imports(peers.get("import") or {})),
    ]
    for name, title, shown in (
        ("tasks.json", "Whole models, optimiser, dropped weights", tasks_table),
        ("float64.json", "float64", float64_table),
        ("suite.json", "recur alone", suite_table),
    ):
        found = read(name)
        if found is not None:
            parts.append((title, shown(found)))
    for title, rows in parts:
        if len(rows) > 3:
            lines += [f"### {title}", "", *rows]
    return "\n".join(lines)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "tables.md").write_text(render(folder), encoding="utf-8")
