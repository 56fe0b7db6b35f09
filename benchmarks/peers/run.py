#!/usr/bin/env python3
"""Benchmark runner: every peer in its own process, peers interleaved case by case.

    python benchmarks/peers/run.py --peers numpy,torch,recur --workloads step,seq,train --json out.json

A peer whose library is not importable is skipped with a note. --envs DIR takes the interpreter
DIR/<peer>/bin/python for each peer that has one there; otherwise this interpreter is used.
"""
import argparse
import json
import os
import platform
import select
import statistics as st
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import choice                                              # noqa: E402
import limits                                              # noqa: E402
import report                                              # noqa: E402
import sizes                                               # noqa: E402
from adapters import PEERS, THREAD_VARS                    # noqa: E402
from cases import GRID, WORKLOADS                          # noqa: E402


def log(*a):
    print(*a, file=sys.stderr, flush=True)


def base_env(peer, threads, extra):
    env = dict(os.environ)
    for k in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "PYTHONPATH"):
        env.pop(k, None)
    env.update({v: str(threads) for v in THREAD_VARS})
    env.update(extra)
    return env


# what a worker needs in its environment before the library is imported; mirrors Adapter.env,
# which cannot be asked without importing the library
ENV = {
    "keras": lambda t: {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
    "jax": lambda t: {"JAX_PLATFORMS": "cpu", **({"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"} if t == 1 else {})},
    "tinygrad": lambda t: {"DEV": "CPU", "CPU": "1", "CPU_COUNT": str(t), "THREADS": "1" if t > 1 else "0"},
}
PINNED_TO_ONE = {"jax", "tinygrad"}        # no dependable thread setting: give them one core instead


ONE_THREAD_ONLY = {"thinc"}                # has no threading of its own


class Worker:
    def __init__(self, peer, python, threads, logdir, only=None):
        self.peer, self.python, self.threads, self.logdir, self.only = peer, python, threads, logdir, only
        self.spawn()

    def spawn(self):
        """Starts the process, and does not wait for it."""
        env = base_env(self.peer, self.threads, ENV.get(self.peer, lambda t: {})(self.threads))
        cmd = [self.python, os.path.join(HERE, "worker.py"), self.peer, str(self.threads)]
        if self.peer in PINNED_TO_ONE and self.threads == 1:
            cmd = ["taskset", "-c", str(os.cpu_count() - 1)] + cmd
        self.err = open(os.path.join(self.logdir, f"{self.peer}-t{self.threads}.log"), "ab")
        self.p = subprocess.Popen(cmd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.err, env=env)
        self.buf = b""

    def ready(self):
        """Waits until the library is imported; returns self."""
        r = self.read(180)
        if not r.get("ok"):
            raise RuntimeError(r.get("error", "did not start"))
        self.versions, self.rss0 = r["versions"], r["rss_kib"]
        return self

    def read(self, timeout):
        end = time.time() + timeout
        while b"\n" not in self.buf:
            left = end - time.time()
            if left <= 0 or not select.select([self.p.stdout], [], [], left)[0]:
                self.stop()
                return {"ok": False, "error": f"no answer in {timeout:.0f} s"}
            b = os.read(self.p.stdout.fileno(), 1 << 20)
            if not b:
                self.stop()
                return {"ok": False, "error": f"worker died (exit {self.p.returncode})"}
            self.buf += b
        line, self.buf = self.buf.split(b"\n", 1)
        return json.loads(line)

    def ask(self, timeout=90, **m):
        if self.p.poll() is not None:
            try:
                self.spawn()
                self.ready()
            except RuntimeError as e:
                return {"ok": False, "error": str(e)}
            if m["cmd"] == "measure":
                return {"ok": False, "error": "worker was restarted"}
        self.p.stdin.write(json.dumps(m).encode() + b"\n")
        self.p.stdin.flush()
        return self.read(timeout)

    def stop(self):
        self.p.kill()
        self.p.wait()
        self.err.close()


def pct(v, q):
    v = sorted(v)
    return v[min(len(v) - 1, int(q * len(v)))]


def run_case(case, workers, a, results):
    live = []
    if os.path.exists(a.reference):      # of a run that was stopped
        os.remove(a.reference)
    for w in workers:
        r = w.ask(cmd="variants", case=case.dict())
        for v in r.get("variants", []):
            if w.only not in (None, v) or not (a.all or choice.worth(w.peer, v, case, w.threads)):
                continue
            key = f"{w.peer}/{w.threads}/{v}"
            # results are checked once, at the peer's highest thread count; never where memory is read
            check = case.workload != "growth" and (
                a.check_all or w.threads == max(x.threads for x in workers if x.peer == w.peer))
            b = w.ask(cmd="build", case=case.dict(), variant=v, id=key, check=check,
                      reference=a.reference, timeout=a.build_timeout)
            row = {"case": case.id, **case.dict(), "peer": w.peer, "threads": w.threads, "variant": v}
            if not b.get("ok"):
                row["error"] = b.get("error")
                log(f"    {key}: {row['error']}")
                results.append(row)
                continue
            row["diff"], row["first_call_s"], row["_ns"] = b["diff"], b["first_call_s"], []
            live.append((w, key, row))
        if not r.get("ok"):
            log(f"    {w.peer}/{w.threads}: {r.get('error')}")
    for rnd in range(a.rounds):                      # interleaved: every peer once per round
        for w, key, row in live if rnd % 2 == 0 else live[::-1]:
            if "error" in row:
                continue
            m = w.ask(cmd="measure", id=key, budget=a.budget, warm=a.warm if rnd else 2 * a.warm, timeout=90,
                      rss=case.workload == "growth")
            if not m.get("ok"):
                row["error"] = m.get("error")
                continue
            row["_ns"].append(m["ns"])
            if "hwm_kib" in m:
                row["hwm_mib"], row["rss0_mib"] = m["hwm_kib"] / 1024, w.rss0 / 1024
    for w, key, row in live:
        rounds = row.pop("_ns")
        if rounds:
            allns = [x for r in rounds for x in r]
            row["us"] = st.median(allns) / 1e3
            row["p99_us"] = pct(allns, 0.99) / 1e3
            row["round_us"] = [st.median(r) / 1e3 for r in rounds]
            row["n"] = len(allns)
        results.append(row)
    for w in workers:
        w.ask(cmd="drop")
    if os.path.exists(a.reference):
        os.remove(a.reference)
    ok = sorted((r for _, _, r in live if "us" in r), key=lambda r: r["us"])
    log(f"  {case.id}: " + "  ".join(f"{r['peer']}/{r['threads']} {r['us']:.0f}" for r in ok[:6]))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--peers", default=",".join(PEERS))
    ap.add_argument("--workloads", default=",".join(WORKLOADS + ("import", "limits")),
                    help="of: " + ",".join(WORKLOADS + ("import", "limits")))
    ap.add_argument("--threads", default="1,2")
    ap.add_argument("--envs", help="folder of one virtual environment per peer")
    ap.add_argument("--json", default="out.json")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--budget", type=float, default=0.12, help="timed seconds per peer, case and round")
    ap.add_argument("--warm", type=float, default=0.03, help="warm-up seconds before each timed stretch")
    ap.add_argument("--build-timeout", type=float, default=90)
    ap.add_argument("--check-all", action="store_true", help="check results at every thread count")
    ap.add_argument("--fresh", action="store_true",
                    help="new processes for each case: no heap left by earlier cases (slower)")
    ap.add_argument("--all", action="store_true", help="also peers that cannot be the best one (choice.py)")
    ap.add_argument("--filter", default="", help="only cases whose id contains this")
    ap.add_argument("--limits-from", help="take the machine's limits from an earlier JSON instead of measuring them")
    a = ap.parse_args()
    peers, wl = a.peers.split(","), a.workloads.split(",")
    threads = [int(t) for t in a.threads.split(",")]
    py = {}
    for p in peers:
        cand = os.path.join(a.envs, p, "bin", "python") if a.envs else ""
        py[p] = cand if cand and os.path.exists(cand) else sys.executable
    out = {"machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "python": platform.python_version(),
                       "vectors": vectors(), "date": time.strftime("%Y-%m-%d")},
           "settings": {k: getattr(a, k) for k in ("rounds", "budget", "warm")}, "versions": {}, "notes": [],
           "limits": None, "import": {}, "results": []}

    def save():
        with open(a.json, "w") as f:
            f.write(report.dumped(out))

    if a.limits_from:
        with open(a.limits_from) as f:
            out["limits"] = json.load(f)["limits"]
    elif "limits" in wl:
        log("limits")
        out["limits"] = limits.measure({p: py[p] for p in ("numpy", "torch") if p in py})
    if "import" in wl:
        log("import")
        out["import"] = sizes.measure({p: py[p] for p in peers}, base_env)
    logdir = os.path.splitext(a.json)[0] + ".logs"
    a.reference = os.path.join(logdir, "reference.npz")
    cases = [c for c in GRID if c.workload in wl and a.filter in c.id]
    workers = []
    if cases:
        os.makedirs(logdir, exist_ok=True)
    for p in peers if cases else ():
        one = p in ONE_THREAD_ONLY or not (a.all or p in choice.TWO_THREADS)
        for t in (min(threads),) if one else threads:
            if not (a.all or any(choice.worth(p, "", c, t) for c in cases)):
                continue
            workers.append(Worker(p, py[p], t, logdir))
    for w in list(workers):
        try:
            out["versions"][w.peer] = w.ready().versions
        except RuntimeError as e:
            workers.remove(w)
            out["notes"].append(f"{w.peer}, {w.threads} threads, skipped: {e}")
            log(out["notes"][-1])
    t0 = time.time()
    grown = None
    for c in cases:
        ws = [w for w in workers if a.all or choice.worth(w.peer, "", c, w.threads)]
        if a.fresh and c is not cases[0]:
            for w in workers:
                w.stop()
            for w in ws:
                w.spawn()
            for w in ws:
                w.ready()
        if c.workload == "growth":      # memory is read per process: one for each variant, the fewest threads only
            if grown is None:
                grown = [Worker(w.peer, w.python, w.threads, logdir, only=v) for w in workers
                         if w in ws and w.threads == min(threads) for v in w.ask(cmd="variants", case=c.dict()).get("variants", [])]
                for w in grown:
                    w.ready()
            ws = grown
        run_case(c, ws, a, out["results"])
        save()
    for w in workers + (grown or []):
        w.stop()
    out["grid_seconds"] = round(time.time() - t0)
    if out["limits"]:
        by = {c.id: c for c in GRID}
        for r in out["results"]:
            r["limit_us"], r["bound"] = limits.limit_us(out["limits"], by[r["case"]], r["threads"])
    save()
    md = os.path.splitext(a.json)[0] + ".md"
    with open(md, "w") as f:
        f.write(report.render(out))
    log(f"{a.json}, {md}: {len(out['results'])} rows in {out['grid_seconds']} s")


def cpu_entry(name):
    """The first of the processor's entries with this name, or ""."""
    try:
        with open("/proc/cpuinfo") as f:
            return next((line.split(":", 1)[1].strip() for line in f if line.startswith(name)), "")
    except OSError:
        return ""


def cpu_name():
    return cpu_entry("model name") or platform.processor()


def vectors():
    """The widest vector extension of the processor."""
    flags = cpu_entry("flags").split()
    return "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "no AVX2"


if __name__ == "__main__":
    main()
