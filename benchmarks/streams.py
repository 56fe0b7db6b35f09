"""Many live streams of an LSTM: recur's pool beside the other ways to step them.

python benchmarks/streams.py                                 # a table, in five minutes
python benchmarks/streams.py --json results/streams.json     # and the figures
python benchmarks/streams.py --filter "64, 128" --streams 1,1000

Of so many streams all step, or one in a hundred (at least one); each call is given a batch
(streams, inputs) and has to give the answers and keep the states.  Steps a second, in one thread
unless --threads says otherwise.  The columns:

pool         `StreamPool.step` with slots that were looked up once
onnxruntime  the operator LSTM on the states of all streams in one array; where some step, NumPy
             takes their rows out and puts them back.  Where all step, buffers are bound once
torch        the faster of `LSTM` and `LSTMCell`, in inference mode, states likewise
stacked      onnxruntime as a server of today feeds it: every stream has its own states, which
             are stacked before the call and taken apart after it
one by one   recur's `Stream`, a call for each: what a pool is to be compared with, no peer

Each figure is the median of rounds in which all take their turn.  torch and onnxruntime are left
out where they are not installed.  Answers are compared first, to 1e-4.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import statistics
import time
import tracemalloc
from pathlib import Path

THREAD_VARIABLES = ("RECUR_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
SIZES = [(64, 128), (128, 256)]
COUNTS = [1, 10, 100, 1000, 10_000]
PEERS = ("onnxruntime", "torch", "stacked")


class Case:
    """An LSTM, its streams, and which of them step: all, or those at `some`."""

    def __init__(self, size, streams, everyone):
        import numpy as np

        from recur import LSTM

        rng = np.random.default_rng(0)
        self.size, self.streams, self.everyone = size, streams, everyone
        n_in, self.H = size
        self.model = LSTM(n_in, self.H, rng=rng)
        active = streams if everyone else max(streams // 100, 1)
        self.some = np.arange(streams) if everyone else rng.permutation(streams)[:active]
        self.X = rng.standard_normal((active, n_in)).astype(np.float32)

    @property
    def name(self):
        return f"LSTM {self.size}, {self.streams} streams, {len(self.some)} step"

    def gates(self, order):
        """Wi, Wh and b in another order of the gates; recur's is i, f, candidate, o."""
        import numpy as np

        cell = self.model.cell
        arrays = [np.asarray(p).reshape(4, self.H, -1)[order] for p in (cell.Wi, cell.Wh, cell.b)]
        return [np.ascontiguousarray(a.reshape(4 * self.H, -1)) for a in arrays]


def pool(case):
    import numpy as np

    from recur.streaming import StreamPool

    streams = StreamPool(case.model, capacity=case.streams)
    for name in range(case.streams):
        streams.open(name)
    slots, X = streams.slots(case.some.tolist()), case.X.T
    out = np.empty((len(case.some), case.H), np.float32)
    return lambda: streams.step(slots, X, out=out.T).T


def one_by_one(case):
    from recur.streaming import Stream

    streams = [Stream(case.model) for _ in case.some]
    return lambda: [s(x) for s, x in zip(streams, case.X, strict=True)]


def session(case, threads):
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    W, R, b = case.gates([0, 3, 1, 2])
    b = np.concatenate([b.ravel(), np.zeros(4 * case.H, np.float32)])
    held = [numpy_helper.from_array(a[None], n) for n, a in (("W", W), ("R", R), ("B", b))]
    shape = [1, None, case.H]
    given = [helper.make_tensor_value_info("X", TensorProto.FLOAT, [1, None, case.size[0]])]
    given += [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in "hc"]
    found = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("h_", "c_")]
    names = ["X", "W", "R", "B", "", "h", "c"]
    node = helper.make_node("LSTM", names, ["", "h_", "c_"], hidden_size=case.H)
    graph = helper.make_graph([node], "lstm", given, found, held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def with_onnxruntime(case, threads):
    import numpy as np

    run = session(case, threads)
    if case.everyone:
        return bound(case, run)
    h, c = (np.zeros((1, case.streams, case.H), np.float32) for _ in range(2))
    some, X = case.some, case.X[None]

    def step():
        new = run.run(None, {"X": X, "h": h[:, some], "c": c[:, some]})
        h[:, some], c[:, some] = new
        return new[0][0]

    return step


def bound(case, run):
    """Two sets of buffers that take turns, bound once."""
    import numpy as np
    import onnxruntime

    value = onnxruntime.OrtValue.ortvalue_from_numpy
    X = value(case.X[None])
    zeros = np.zeros((1, case.streams, case.H), np.float32)
    states = [[value(zeros.copy()) for _ in "hc"] for _ in range(2)]
    bindings = []
    for turn in range(2):
        binding = run.io_binding()
        binding.bind_ortvalue_input("X", X)
        for n, before, after in zip("hc", states[turn], states[1 - turn], strict=True):
            binding.bind_ortvalue_input(n, before)
            binding.bind_ortvalue_output(n + "_", after)
        bindings.append(binding)
    turn = 0

    def step():
        nonlocal turn
        run.run_with_iobinding(bindings[turn])
        turn = 1 - turn
        return states[turn][0].numpy()[0]

    return step


def stacked(case, threads):
    import numpy as np

    run = session(case, threads)
    zeros = np.zeros((1, 1, case.H), np.float32)
    states = {i: (zeros.copy(), zeros.copy()) for i in range(case.streams)}
    names, X = case.some.tolist(), case.X[None]

    def step():
        h = np.concatenate([states[i][0] for i in names], 1)
        c = np.concatenate([states[i][1] for i in names], 1)
        h, c = run.run(None, {"X": X, "h": h, "c": c})
        for at, i in enumerate(names):
            states[i] = h[:, at : at + 1].copy(), c[:, at : at + 1].copy()
        return h[0]

    return step


def with_torch(case, threads, layer):
    import torch

    torch.set_num_threads(threads)
    net = getattr(torch.nn, layer)(*case.size).eval()
    Wi, Wh, b = (torch.from_numpy(a) for a in case.gates([0, 1, 2, 3]))
    with torch.no_grad():
        weights = [Wi, Wh, b.ravel(), torch.zeros_like(b.ravel())]
        for mine, given in zip(net.parameters(), weights, strict=True):
            mine.copy_(given)
    X, some = torch.from_numpy(case.X), torch.from_numpy(case.some)
    h, c = (torch.zeros(case.streams, case.H) for _ in range(2))

    def call(h, c):
        if layer == "LSTMCell":
            return net(X, (h, c))
        _, (h, c) = net(X[None], (h[None], c[None]))
        return h[0], c[0]

    def step():
        nonlocal h, c
        with torch.inference_mode():
            if case.everyone:
                h, c = call(h, c)
                return h.numpy()
            new = call(h[some], c[some])
            h[some], c[some] = new
            return new[0].numpy()

    return step


def ways(case, threads):
    """{name: a call that steps once and returns the answers (streams, H)}."""
    found = {"pool": pool(case)}
    have = {n: importlib.util.find_spec(n) is not None for n in ("onnxruntime", "onnx", "torch")}
    if have["onnxruntime"] and have["onnx"]:
        found["onnxruntime"] = with_onnxruntime(case, threads)
        found["stacked"] = stacked(case, threads)
    if have["torch"]:
        for layer in ("LSTM", "LSTMCell"):
            found[f"torch {layer}"] = with_torch(case, threads, layer)
    found["one by one"] = one_by_one(case)
    return found


def measure(case, threads, seconds, rounds):
    """Steps a second of each way: medians of rounds that each gives every way its turn."""
    import numpy as np

    calls = ways(case, threads)
    for _ in range(3):
        answers = {name: np.asarray(call()) for name, call in calls.items()}
    for name, y in answers.items():
        worst = float(np.abs(y - answers["pool"]).max())
        assert worst < 1e-4, f"{case.name}: {name} differs by {worst}"
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()  # what the one before left in the caches is not its fault
            begun, n = time.perf_counter(), 0
            while (took := time.perf_counter() - begun) < seconds:
                call()
                n += 1
            times[name].append(took / n)
    steps = {name: len(case.some) / statistics.median(t) for name, t in times.items()}
    torch = [steps.pop(name) for name in list(steps) if name.startswith("torch ")]
    return steps | ({"torch": max(torch)} if torch else {})


def memory(case):
    """Bytes a stream of a pool, its last answer among them, beside the allowed."""
    from recur.streaming import StreamPool

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        streams = StreamPool(case.model, capacity=case.streams)
        names = [str(i) for i in range(case.streams)]
        for name in names:
            streams.open(name)
        streams.step(names[:1], case.X[:1].T)
        del names
        used = (tracemalloc.get_traced_memory()[0] - before) / case.streams
    finally:
        tracemalloc.stop()
    return {"bytes": round(used), "allowed": round(1.1 * 12 * case.H + 256)}


def table(rows):
    """The rows as Markdown."""
    columns = ["pool", *PEERS, "one by one"]
    lines = [
        "| LSTM | streams | step | " + " | ".join(columns) + " | pool ÷ best peer |",
        "|---|---:|---:|" + "---:|" * (len(columns) + 1),
    ]
    for row in rows:
        steps = row["steps_a_second"]
        best = max((steps[name] for name in PEERS if name in steps), default=math.nan)
        shown = [f"{steps[name]:,.0f}" if name in steps else "–" for name in columns]
        lines.append(
            f"| {row['size'][0]}, {row['size'][1]} | {row['streams']:,} | {row['active']:,} | "
            + " | ".join(shown)
            + f" | {steps['pool'] / best:.2f} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", default=",".join(map(str, COUNTS)), help="comma-separated")
    parser.add_argument("--filter", default="", help="only sizes whose text contains this")
    parser.add_argument("--threads", type=int, default=1, help="of all (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.1, help="a turn (%(default)g)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="also write the figures to this file")
    given = parser.parse_args()
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(given.threads)))  # before any import
    rows, memories = [], []
    for size in [s for s in SIZES if given.filter in str(s)]:
        for streams in map(int, given.streams.split(",")):
            for everyone in (True, False):
                case = Case(size, streams, everyone)
                steps = measure(case, given.threads, given.seconds, given.rounds)
                rows.append({
                    "size": size,
                    "streams": streams,
                    "active": len(case.some),
                    "steps_a_second": {name: round(s, 1) for name, s in steps.items()},
                })  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
        memories.append({"size": size, "streams": 1000} | memory(Case(size, 1000, True)))
        print(json.dumps(memories[-1]), flush=True)
    print("\n" + table(rows))
    if given.json:
        report = {"machine": machine(given.threads), "pool": rows, "memory": memories}
        Path(given.json).write_text(json.dumps(report, indent=1) + "\n")


def machine(threads):
    from importlib.metadata import PackageNotFoundError, version

    from recur import _kernels

    versions = {}
    for name in ("recur", "numpy", "onnxruntime", "torch"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "processor": platform.processor() or platform.machine(),
        "path": _kernels.cpu_path(),
        "threads": threads,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    } | versions


if __name__ == "__main__":
    main()
