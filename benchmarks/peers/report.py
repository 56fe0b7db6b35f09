"""JSON of a run -> markdown. `python benchmarks/peers/report.py out.json > out.md` renders it again."""
import json
import sys

ANCHORS = ("onednn", "cfloor")
APART = ("bfloat16", "float16", "int8", "m(X), tape")      # recur's, which compute something else
TITLES = {"step": "1. Streaming: one step, batch 1", "mstep": "2. One step of 64 streams",
          "seq": "3. Sequence inference, T=100", "train": "4. Training step: forward + backward, all gradients",
          "loop": "5. Step by step through autograd (`for x in xs: h = cell(x, h)`), T=100",
          "growth": "6. Cost growth: LSTM forward + backward, B=16, (128,256)"}


def fmt(us):
    return f"{us:.1f}" if us < 100 else f"{us:,.0f}" if us < 1e5 else f"{us / 1e3:,.0f}k"


def table(head, rows):
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] +
                     ["| " + " | ".join(map(str, r)) + " |" for r in rows]) + "\n"


def best(rows, **kw):
    m = [r for r in rows if "us" in r and r["variant"] not in APART and all(r[k] == v for k, v in kw.items())]
    return min(m, key=lambda r: r["us"]) if m else None


def dumped(out):
    """The JSON of a run, one result a line."""
    head = json.dumps({k: v for k, v in out.items() if k != "results"}, indent=1, default=str)
    rows = ",\n".join(json.dumps(r, default=str) for r in out["results"])
    return head[:-2] + ',\n "results": [\n' + rows + "\n ]\n}\n"


def render(out):
    res = out["results"]
    L = out.get("limits")
    md = [f"# Benchmark of {out['machine']['date']}", "",
          f"{out['machine']['cpu']}, {out['machine']['cores']} cores; Python {out['machine']['python']}. Medians in "
          "microseconds over interleaved rounds; each cell is the peer's fastest variant and, in brackets, its "
          "ratio to the roofline limit. `cfloor` and `onednn` are anchors, not Python libraries; "
          "*fastest* ignores them.", ""]
    v = {k: n for d in out["versions"].values() for k, n in d.items()}
    md += ["Versions: " + ", ".join(f"{k} {n}" for k, n in v.items()) + ".", ""]
    md += [f"- {n}" for n in out["notes"]] + [""]
    if L:
        md += ["## Limits of the machine", "",
               f"Clock {L['ghz']:.2f} GHz (measured); 2 FMA pipes x 8 floats: {L['fma_theory_gflops_per_core']:.0f} "
               f"GFLOP/s a core in theory, {L['fma_gflops']['1']:.0f} / {L['fma_gflops']['2']:.0f} measured on 1 / 2 threads.", ""]
        ks = sorted(L["read_gbs"]["1"], key=int)
        md += [table(["read by FMA, GB/s"] + [f"{int(k) / 1024:g} MiB" if int(k) > 1024 else f"{k} KiB" for k in ks],
                     [[f"{t} thread" + "s" * (t == "2")] + [f"{L['read_gbs'][t][k]:.0f}" for k in ks] for t in ("1", "2")])]
        names = list(L["blas"])
        if names:
            keys = [k for k in L["blas"][names[0]] if not k.endswith(" us")]
            md += [table(["BLAS GFLOP/s"] + names, [[k.replace(" GFLOP/s", "")] + [f"{L['blas'][n][k]:.0f}" for n in names]
                                                     for k in keys])]
    for wl, title in TITLES.items():
        rows = [r for r in res if r["workload"] == wl]
        if not rows:
            continue
        md += ["## " + title, ""]
        for t in sorted({r["threads"] for r in rows}):
            rt = [r for r in rows if r["threads"] == t]
            peers = [p for p in out["versions"] if best(rt, peer=p)]
            peers.sort(key=lambda p: (p in ANCHORS, list(out["versions"]).index(p)))
            if not peers:
                continue
            body = []
            for c in dict.fromkeys(r["case"] for r in rt):
                rc = [r for r in rt if r["case"] == c]
                lim = rc[0].get("limit_us")
                line = [c.split(" ", 1)[1], f"{fmt(lim)} ({rc[0]['bound']})" if lim else "-"]
                for p in peers:
                    b = best(rc, peer=p)
                    line.append("-" if not b else fmt(b["us"]) + (f" ({b['us'] / lim:.1f})" if lim else ""))
                f = min((b for p in peers if p not in ANCHORS and (b := best(rc, peer=p))), key=lambda r: r["us"], default=None)
                line.append(f"{f['peer']}: {f['variant']}" if f else "-")
                body.append(line)
            md += [f"{t} thread" + "s" * (t > 1), "", table(["case", "limit"] + peers + ["fastest"], body)]
        if wl in ("step", "mstep"):
            body = []
            for c in dict.fromkeys(r["case"] for r in rows):
                for r in sorted((r for r in rows if r["case"] == c and "us" in r), key=lambda r: r["us"]):
                    body.append([c.split(" ", 1)[1], r["peer"], r["variant"], r["threads"], fmt(r["us"]), fmt(r["p99_us"])])
            md += ["<details><summary>every variant, with p99</summary>", "",
                   table(["case", "peer", "variant", "threads", "median", "p99"], body), "</details>", ""]
        elif any(len({r["variant"] for r in rows if r["peer"] == p}) > 1 for p in out["versions"]):
            body = []
            for c in dict.fromkeys(r["case"] for r in rows):
                for r in rows:
                    if r["case"] == c and "us" in r and len({q["variant"] for q in rows if q["peer"] == r["peer"] and q["case"] == c}) > 1:
                        body.append([c.split(" ", 1)[1], r["peer"], r["variant"], r["threads"], fmt(r["us"])])
            md += ["<details><summary>peers with several variants</summary>", "",
                   table(["case", "peer", "variant", "threads", "median"], body), "</details>", ""]
        if wl == "growth":
            ps = list(dict.fromkeys((r["peer"], r["variant"]) for r in rows if "hwm_mib" in r))
            ts = sorted({r["T"] for r in rows})
            body = []
            for p in ps:
                m = {r["T"]: r for r in rows if (r["peer"], r["variant"]) == p and "hwm_mib" in r}
                hi, lo = max(m), min(m)
                per = (m[hi]["hwm_mib"] - m[lo]["hwm_mib"]) * 1024 / (hi - lo) if hi > lo else 0
                body.append([": ".join(p)] + [f"{m[t]['hwm_mib']:.0f}" if t in m else "-" for t in ts] +
                            [f"{m[lo]['rss0_mib']:.0f}", f"{per:.0f}", f"{m[hi]['us'] / m[lo]['us'] / (hi / lo):.2f}"])
            md += ["Peak resident MiB, whole process", "", table(["peer"] + [f"T={t}" for t in ts] +
                   ["after import", "KiB per step", "time vs linear"], body)]
    if out.get("import"):
        md += ["## 7. Import and size", "",
               table(["peer", "import statement", "process s", "less bare Python s", "MB installed", "largest parts"],
                     [[p, f"`{d['line']}`", f"{d['process_s']:.2f}", f"{d['process_s'] - d['bare_python_s']:.2f}",
                       f"{d['bytes'] / 1e6:.0f}", ", ".join(f"{k} {b / 1e6:.0f}" for k, b in d["largest"].items())]
                      for p, d in out["import"].items()])]
    md += ["## Agreement with the float64 reference", "",
           "Largest absolute difference of outputs, and largest difference of gradients relative to the gradient's "
           "own largest element, over all cases.", ""]
    body = []
    for p in out["versions"]:
        d = [r["diff"] for r in res if r["peer"] == p and r.get("diff")]
        g = lambda k: f"{max(x[k] for x in d if k in x):.1e}" if any(k in x for x in d) else "-"
        if d:
            body.append([p, g("y"), g("dx"), g("dw"), g("db")])
    md += [table(["peer", "outputs", "d input", "d weights", "d bias"], body)]
    bad = [r for r in res if "error" in r]
    if bad:
        md += ["## Failures", ""] + [f"- {r['case']} {r['peer']}/{r['threads']} {r['variant']}: {r['error']}" for r in bad] + [""]
    return "\n".join(md)


if __name__ == "__main__":
    with open(sys.argv[1]) as f:
        print(render(json.load(f)))
