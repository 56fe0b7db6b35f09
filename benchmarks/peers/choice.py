"""Which peers are worth their time in which case: those that can be the best one there.

From `results/2026-11-30.md`, where all were measured in every case: left out is what was more than
1.5 times as slow as the best peer.  Anchors stay where something is said about them.
`run.py --all` measures everything.
"""

STEPPING, LONG = ("step", "mstep"), 1000
SLOW = {("torch", "compile(cell)"), ("torch", "nn.Layer T=1")}  # never the fastest of torch's
TWO_THREADS = ("recur", "torch", "onnxruntime")


def worth(peer, variant, case, threads):
    """Whether to measure this variant of this peer."""
    if (peer, variant) in SLOW or (threads > 1 and peer not in TWO_THREADS):
        return False
    if peer == "recur":  # weights in fewer bits: one thread only
        return threads == 1 or variant not in ("bfloat16", "float16", "int8")
    wl, cell = case.workload, case.cell
    if peer == "numpy":
        return wl in ("step", "growth") or (cell == "rnn" and case.B == 64)
    if peer == "jax":
        return (
            wl == "loop"
            or (wl == "step" and cell != "rnn")
            or (wl in ("mstep", "train") and cell != "lstm")
            or (wl == "seq" and cell == "rnn")
        )
    if peer == "onednn":
        return wl == "train"
    return peer != "cfloor" or wl in ("step", "mstep", "seq")
