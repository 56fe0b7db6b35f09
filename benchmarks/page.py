"""Turns the JSON files of a comparison into the tables of `docs/benchmarks.md`.

    python benchmarks/page.py benchmarks/results                       # prints the tables
    python benchmarks/page.py benchmarks/results docs/benchmarks.md    # puts them into the page

The folder holds what `compare.sh` made, any part of it.  A row that falls short of its target is
followed by the sentence that `reasons.json` has for it; rows without one are named on stderr, as
are cases in which the natural way takes more than 1.3 times the fastest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from targets import NATURAL_WITHIN, ROWS, THREADS_GAIN, Aim, TableRow

REASONS = Path(__file__).resolve().parent / "reasons.json"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->"
PARTS = ("steps", "sequences", "training", "loops", "growth")
ANCHORS = {"onednn": "oneDNN", "cfloor": "C floor"}
NATURAL = ("m(x)", "m(X)", "withgradient", "m(x) loop, withgradient")
STORAGES = ("bfloat16", "float16", "int8")
APART = (*STORAGES, "m(X), tape")  # variants of recur that compute something else
GATES = {"rnn": 1, "lstm": 4, "gru": 3}
MET, SHORT = "yes", "**falls short**"
Row = dict[str, Any]
Cases = dict[str, list[Row]]


# ------------------------------------------------------------------------------ rows and numbers


def fastest(rows: Iterable[Row], *peers: str) -> Row | None:
    found = [r for r in rows if "us" in r and r["peer"] in peers and r["variant"] not in APART]
    return min(found, key=lambda row: row["us"]) if found else None


def best(rows: Sequence[Row]) -> Row | None:
    """The fastest of all other libraries that are no anchors."""
    return fastest(rows, *{r["peer"] for r in rows} - {"recur", *ANCHORS})


def variant(rows: Iterable[Row], *names: str) -> Row | None:
    """recur's row of one of these variants."""
    found = (r for r in rows if "us" in r and r["peer"] == "recur" and r["variant"] in names)
    return next(found, None)


def by_case(results: Iterable[Row], threads: int) -> Cases:
    cases: Cases = {}
    for row in results:
        if row["threads"] == threads:
            cases.setdefault(row["case"], []).append(row)
    return cases


def step_flops(row: Row) -> float:
    """Of one time step; of a training step forward and backward."""
    sizes = [(row["I"] if layer == 0 else row["H"]) + row["H"] for layer in range(row["layers"])]
    once = 2 * row["B"] * GATES[row["cell"]] * row["H"] * sum(sizes)
    return once * (3 if row["workload"] in ("train", "loop", "growth") else 1)


def micro(us: float) -> str:
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def of_limit(row: Row) -> str:
    return f"{row['us'] / row['limit_us']:.2f}" if row.get("limit_us") else "-"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


# ------------------------------------------------------------------------------- one table a row


class Page:
    """The lines written so far, and what has to be said about them.

    short   keys of rows that fall short of a target
    slow    cases whose natural way takes too long
    """

    def __init__(self, reasons: dict[str, str]) -> None:
        self.lines: list[str] = []
        self.reasons = reasons
        self.short: list[str] = []
        self.slow: list[str] = []

    def put(self, key: str, title: str, head: Sequence[str], body: list[list[str]]) -> None:
        """A table with its title and, where a row falls short, the sentence about it."""
        if not body:
            return
        self.lines += [f"### {title}", "", *table(head, body)]
        if any(SHORT in cell for row in body for cell in row):
            self.short.append(key)
            if key in self.reasons:
                self.lines += [self.reasons[key], ""]


def reached(aim: Aim, rows: Sequence[Row]) -> tuple[str, float] | None:
    """(the target in words, what was reached), or None where it cannot be said."""
    mine = fastest(rows, "recur")
    if mine is None:
        return None
    if aim.of == "limit":
        if not mine.get("limit_us"):
            return None
        return f"≤ {aim.bound:g} × limit", mine["us"] / mine["limit_us"]
    other = best(rows) if aim.of == "best" else fastest(rows, aim.of)
    if other is None:
        return None
    name = "the best peer" if aim.of == "best" else ANCHORS.get(aim.of, aim.of)
    return f"{name} ÷ {aim.bound:g}", other["us"] / mine["us"]


def verdicts(aims: Sequence[Aim], case: str, rows: Sequence[Row]) -> tuple[str, str]:
    """The targets of a case, and which of them it meets."""
    words, marks = [], []
    for aim in aims:
        found = reached(aim, rows) if any(part in case for part in aim.cases) else None
        if found is not None:
            holds = found[1] <= aim.bound if aim.of == "limit" else found[1] >= aim.bound
            words.append(found[0])
            marks.append(MET if holds else f"{SHORT} ({found[1]:.2f})")
    return "; ".join(words) or "-", "; ".join(marks) or "-"


def compared(page: Page, row: TableRow, cases: Cases) -> None:
    """recur beside each peer in the cases of one row."""
    chosen = {c: rows for c, rows in cases.items() if any(part in c for part in row.cases)}
    chosen = {c: rows for c, rows in chosen.items() if fastest(rows, "recur")}
    peers = [p for p in _peers(chosen) if p != "recur"]
    body = []
    for case, rows in chosen.items():
        mine, natural, other = fastest(rows, "recur"), variant(rows, *NATURAL), best(rows)
        assert mine is not None
        target, met = verdicts(row.aims, case, rows)
        body.append(
            [
                case.partition(" ")[2],
                micro(natural["us"]) if natural else "-",
                micro(mine["us"]),
                *(micro(r["us"]) if (r := fastest(rows, p)) else "-" for p in peers),
                f"{other['us'] / mine['us']:.2f}" if other else "-",
                of_limit(mine),
                target,
                met,
            ]
        )
    names = [ANCHORS.get(p, p) for p in peers]
    head = ["case", "recur, natural", "recur, fastest", *names, "best peer ÷ recur", "× limit"]
    page.put(row.key, row.title, [*head, "target", "met"], body)


def _peers(cases: Cases) -> list[str]:
    """Those with a time in these cases, anchors last."""
    timed = dict.fromkeys(r["peer"] for rows in cases.values() for r in rows if "us" in r)
    return sorted(timed, key=lambda peer: peer in ANCHORS)


def loops(page: Page, one: Cases) -> None:
    """A loop over steps beside the same steps as one sequence."""
    body = []
    for case, rows in one.items():
        looped, whole = fastest(rows, "recur"), variant(rows, "m(X), tape")
        if looped and whole:
            pair = [micro(r["us"]) for r in (looped, whole)]
            body.append([case.partition(" ")[2], *pair, f"{looped['us'] / whole['us']:.2f}"])
    head = ["case", "loop", "one call", "loop ÷ one call"]
    page.put("loops", "The loop beside one call with the whole sequence", head, body)


def naturals(page: Page, cases: Cases, threads: int) -> None:
    """Whether the natural way is near the fastest in every case; those where it is not."""
    body, worst = [], 0.0
    for case, rows in cases.items():
        natural, mine = variant(rows, *NATURAL), fastest(rows, "recur")
        if natural is None or mine is None:
            continue
        ratio = natural["us"] / mine["us"]
        worst = max(worst, ratio)
        if ratio > NATURAL_WITHIN:
            page.slow.append(f"{case}, {threads} thread{'s' * (threads > 1)}: {ratio:.2f}")
            both = [micro(natural["us"]), f"{micro(mine['us'])} `{mine['variant']}`"]
            body.append([case, str(threads), *both, f"{ratio:.2f}", SHORT])
    if worst and not body:
        body = [["all", str(threads), "-", "-", f"at most {worst:.2f}", MET]]
    head = ["case", "threads", "natural", "fastest", "ratio", f"≤ {NATURAL_WITHIN:g}"]
    title = f"The natural way beside the fastest, {threads} thread{'s' * (threads > 1)}"
    page.put("natural", title, head, body)


def second_thread(page: Page, one: Cases, two: Cases) -> None:
    body = []
    for case, rows in one.items():
        a, b = fastest(rows, "recur"), fastest(two.get(case, []), "recur")
        if a is None or b is None:
            continue
        bound = THREADS_GAIN if step_flops(a) > 20e6 else 1.0
        # two samples of one time differ by some per cent
        gain, slack = a["us"] / b["us"], 0.0 if bound > 1 else 0.03
        other = best(two[case])
        body.append(
            [
                case,
                micro(a["us"]),
                micro(b["us"]),
                f"{other['peer']} {micro(other['us'])}" if other else "-",
                f"{other['us'] / b['us']:.2f}" if other else "-",
                of_limit(b),
                f"{gain:.2f}",
                f"≥ {bound:g}",
                MET if gain >= bound - slack else SHORT,
            ]
        )
    head = ["case", "1 thread", "2 threads", "best peer, 2 threads", "best peer ÷ recur"]
    head += ["× limit", "gain", "target", "met"]
    page.put("threads", "A second thread", head, body)


# ----------------------------------------------------------------------------------- other tables


def growth(page: Page, results: Iterable[Row]) -> None:
    """Time against linear, and memory a step, between the shortest and the longest sequence."""
    own: dict[tuple[str, str], list[Row]] = {}
    for row in results:
        if row["workload"] == "growth" and "hwm_mib" in row:
            own.setdefault((row["peer"], row["variant"]), []).append(row)
    plain = {r["T"]: r["us"] for r in own.get(("recur", "tape.backward"), [])}
    body = []
    for (peer, name), rows in own.items():
        rows = sorted(rows, key=lambda row: row["T"])
        short, long = rows[0], rows[-1]
        if short["T"] == long["T"]:
            continue
        linear = long["us"] / short["us"] / (long["T"] / short["T"])
        kib = (long["hwm_mib"] - short["hwm_mib"]) * 1024 / (long["T"] - short["T"])
        target, met = "-", "-"
        if peer == "recur" and "remat" not in name:
            target = "≤ 1.05; ≤ 150 KiB"
            met = "; ".join(MET if holds else SHORT for holds in (linear <= 1.05, kib <= 150))
        elif peer == "recur" and long["T"] in plain:
            dearer = long["us"] / plain[long["T"]]
            target = "≤ 65 KiB; ≤ 1.4 × the time"
            met = "; ".join(MET if holds else SHORT for holds in (kib <= 65, dearer <= 1.4))
            name += f" ({dearer:.2f} × the time)"
        sizes = [f"{short['T']} to {long['T']}", micro(short["us"]), micro(long["us"])]
        body.append([peer, name, *sizes, f"{linear:.2f}", f"{kib:.0f}", target, met])
    head = ["peer", "way", "T", "shortest, µs", "longest, µs", "time ÷ linear", "KiB a step"]
    title = "Growth with T: LSTM (128,256), batch 16, forward and backward"
    page.put("growth", title, [*head, "target", "met"], body)


def imports(page: Page, found: dict[str, Row]) -> None:
    body = []
    for peer, row in found.items():
        base, own = row.get("over_base_s"), row.get("own_bytes", 0) / 1e6
        target, met = "-", "-"
        if peer == "recur" and base is not None:
            target = "≤ 0.10 s over NumPy and scipy.linalg; ≤ 5 MB of its own"
            met = "; ".join(MET if holds else SHORT for holds in (base <= 0.10, own <= 5))
        body.append(
            [
                peer,
                f"{row['process_s'] - row['bare_python_s']:.2f}",
                f"{base:.3f}" if base is not None else "-",
                f"{own:.1f}" if peer == "recur" else "-",
                f"{row['bytes'] / 1e6:.0f}",
                target,
                met,
            ]
        )
    head = ["peer", "import, s", "over NumPy and scipy.linalg, s", "MB of its own", "MB with all"]
    page.put("import", "Import and size", [*head, "target", "met"], body)


def models(page: Page, tasks: dict[str, dict[str, dict[str, float]]]) -> None:
    """The tasks of `versus_torch`, and what can be said of two of them together."""
    adam, window = "Adam, LSTM(128 => 256)", "LSTM(128 => 256), T 100, B 16"
    large = "LSTM(650 => 650), T 35, B 20"
    head, dropped = (
        "the same with Dense and cross entropy",
        "the same with dropped recurrent weights",
    )
    body = []

    def line(what: str, threads: str, mine: str, theirs: str, ratio: float, target: float = 0.0):
        met = "-" if not target else MET if ratio >= target else f"{SHORT} ({ratio:.2f})"
        wanted = f"torch ÷ {target:g}" if target else "-"
        body.append([what, threads, mine, theirs, f"{ratio:.2f}", wanted, met])

    for threads, libraries in tasks.items():
        mine, torch = libraries["recur"], libraries["torch"]

        def rate(what: str, characters: int, threads=threads, mine=mine, torch=torch) -> None:
            for name, own in mine.items():
                if name.startswith(what):
                    theirs = torch[what]
                    pair = [f"{characters / s:,.0f} a second" for s in (own, theirs)]
                    line(name, threads, *pair, theirs / own)

        rate("character model, one training window", 32 * 32)
        rate("character model, one character", 1)
        # The target is torch's Adam as it is called by default; its fused rule has to be asked for.
        for name, target in ((adam, 3.0), (f"{adam}, fused", 0.0)):
            if name in torch:
                pair = [f"{micro(s * 1e6)} µs" for s in (mine[adam], torch[name])]
                what = f"one update: {name}" + " in torch" * (name != adam)
                line(what, threads, *pair, torch[name] / mine[adam], target)
        for plain, more, what in (
            (window, head, "Dense and softmax cross entropy"),
            (large, dropped, "a mask on the recurrent weights"),
        ):
            pair = [f"{micro(s[plain] * 1e6)} µs" for s in (mine, torch)]
            line(plain, threads, *pair, torch[plain] / mine[plain])
            pair = [f"{micro(s[more] * 1e6)} µs" for s in (mine, torch)]
            line(f"{plain}, with {what}", threads, *pair, torch[more] / mine[more])
            added = [(s[more] - s[plain]) / s[plain] for s in (mine, torch)]
            pair = [f"{share:+.1%} of the window" for share in added]
            body.append([f"what {what} adds", threads, *pair, "-", "-", "-"])
    titles = ["what", "threads", "recur", "torch", "torch ÷ recur", "target", "met"]
    page.put("models", "Whole models, heads, an optimiser, dropped weights", titles, body)


def compressed(page: Page, one: Cases) -> None:
    """How much faster a step is with weights in fewer bits, called in the same way."""
    wanted = {
        "(256,512)": dict.fromkeys(STORAGES, 1.6),
        "(512,1024)": {"bfloat16": 1.8, "float16": 1.8, "int8": 2.5},
    }
    body = []
    for case, rows in one.items():
        plain = variant(rows, "m(x)")
        found = {s: r["us"] for s in STORAGES if (r := variant(rows, s))}
        if plain is None or not found:
            continue
        gains = {s: plain["us"] / us for s, us in found.items()}
        size = case.rpartition(" ")[2]
        bounds = wanted.get(size, {}) if case.startswith("step lstm") else {}
        marks = [
            f"{s} {MET if gain >= bounds[s] else SHORT}" for s, gain in gains.items() if bounds
        ]
        shown = [f"{micro(found[s])} ({gains[s]:.2f} ×)" if s in found else "-" for s in STORAGES]
        target = ", ".join(f"{s} ≥ {bound:g} ×" for s, bound in bounds.items()) or "-"
        name = case.partition(" ")[2]
        body.append([name, micro(plain["us"]), *shown, target, ", ".join(marks) or "-"])
    head = ["case", "float32", *STORAGES, "target", "met"]
    page.put("compress", "Steps with weights in fewer bits", head, body)


def drifts(page: Page, rows: Sequence[Row]) -> None:
    body = []
    for row in rows:
        for span in row["spans"]:
            numbers = [f"{span['largest']:.1e}", f"{span['mean']:.1e}", f"{row['size']:.1e}"]
            body.append([row["model"], row["storage"], span["steps"], *numbers])
    head = ["model", "weights", "steps", "largest difference", "mean difference", "mean output"]
    page.put("drift", "What fewer bits change in a stream of 10,000 steps", head, body)


def doubles(page: Page, rows: Sequence[Row]) -> None:
    """float64 beside float32, each beside its own limit; the targets are those of float32."""
    aims = [aim for row in ROWS for aim in row.aims if aim.of == "limit"]

    def cell(found: Row) -> str:
        return f"{micro(found['us'])} ({found['us'] / found['limit_us']:.2f})"

    body = []
    for row in rows:
        found = row["float64"]
        bounds = [aim.bound for aim in aims if any(part in row["case"] for part in aim.cases)]
        target, met = "-", "-"
        if bounds:
            target = f"≤ {min(bounds):g} × limit"
            met = MET if found["us"] / found["limit_us"] <= min(bounds) else SHORT
        body.append([row["case"], cell(row["float32"]), cell(found), target, met])
    head = ["case", "float32, µs (× limit)", "float64, µs (× limit)", "target", "met"]
    page.put("float64", "float64, one thread", head, body)


def alone(page: Page, report: Row) -> None:
    """Ratios of two benchmarks of the suite."""
    pairs = (
        ("a Chain of 3 LSTM(25) and Dense, a step ÷ its kernels", "steps.ChainStep.time_chain",
         "steps.ChainStep.time_kernels", 1.4),
        ("steps on zeros from subnormal states ÷ from normal ones",
         "steps.Decay.time_quiet_steps(1e-39)", "steps.Decay.time_quiet_steps(1.0)", 1.05),
    )  # fmt: skip
    found, body = report["results"], []
    for what, above, below, bound in pairs:
        if above in found and below in found:
            ratio = found[above]["value"] / found[below]["value"]
            times = [f"{micro(found[name]['value'] * 1e6)} µs" for name in (above, below)]
            met = MET if ratio <= bound else SHORT
            body.append([what, *times, f"{ratio:.2f}", f"≤ {bound:g}", met])
    page.put("alone", "recur alone", ["what", "time", "beside", "ratio", "target", "met"], body)


# -------------------------------------------------------------------------------------- the page


def measured_on(reports: Sequence[Row]) -> list[str]:
    """The machine, the versions and the days of these runs."""
    machine = reports[0]["machine"]
    versions = {k: v for r in reports for d in r.get("versions", {}).values() for k, v in d.items()}
    days = " and ".join(dict.fromkeys(r["machine"]["date"] for r in reports))
    vectors = f" ({machine['vectors']})" if "vectors" in machine else ""
    peaks = [r["limits"]["fma_gflops"]["1"] for r in reports if r.get("limits")]
    peak = f" {peaks[0]:.0f} GFLOP/s measured on one thread." if peaks else ""
    return [
        f"{machine['cpu']}{vectors}, {machine['cores']} cores, {days}, Python {machine['python']}; "
        f"{', '.join(f'{k} {v}' for k, v in versions.items())}.{peak} Medians in microseconds, one "
        "thread and float32 unless said. “The best peer ÷ 2” is a target of half its time.",
        "",
    ]


def render(folder: Path, reasons: dict[str, str] | None = None) -> Page:
    def read(name: str) -> Any:
        path = folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    page = Page(reasons or {})
    reports = [report for name in PARTS if (report := read(name)) is not None]
    if reports:
        page.lines += measured_on(reports)
    results = [row for report in reports for row in report["results"]]
    one, two = by_case(results, 1), by_case(results, 2)
    for row in ROWS:
        compared(page, row, one)
    loops(page, one)
    growth(page, results)
    if (found := read("import")) is not None:
        imports(page, found["import"])
    naturals(page, one, 1)
    naturals(page, two, 2)
    second_thread(page, one, two)
    compressed(page, one)
    for name, show in (
        ("drift", drifts),
        ("tasks", models),
        ("alone", alone),
        ("float64", doubles),
    ):
        if (found := read(name)) is not None:
            show(page, found)
    return page


def put_into(path: Path, lines: Sequence[str]) -> None:
    """Replaces what stands between the page's two marks."""
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path} has no {BEGIN.strip()} … {END}")
    body = "\n".join(lines).rstrip("\n")
    path.write_text(f"{before}{begin}\n{body}\n\n{end}{after}", encoding="utf-8")


def main(folder: str, page_path: str | None = None) -> None:
    page = render(Path(folder), json.loads(REASONS.read_text(encoding="utf-8")))
    if page_path is None:
        print("\n".join(page.lines))
    else:
        put_into(Path(page_path), page.lines)
    for key in dict.fromkeys(page.short):
        said = "reasons.json says why" if key in page.reasons else "reasons.json does not say why"
        print(f"falls short: {key}; {said}", file=sys.stderr)
    for key in page.reasons.keys() - set(page.short):
        print(f"reasons.json has {key}, which falls short of nothing", file=sys.stderr)
    for case in page.slow:
        print(f"natural over {NATURAL_WITHIN:g} × fastest: {case}", file=sys.stderr)
    if not page.slow:
        print(f"natural within {NATURAL_WITHIN:g} × fastest in every case", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
