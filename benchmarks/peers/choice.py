"""Which peers are worth their time in which case: those that can be the best one there.

From `results/2026-11-30.md`, where all were measured in every case: left out is what was more than
1.1 times as slow as the best of these on one thread.  Anchors stay where something is said of them.
`run.py --all` measures everything.
"""

# never the fastest of torch's; None: in no workload
SLOW = {"compile(cell)": None, "nn.Layer no-onednn": None, "nn.Layer T=1": "step"}
TWO_THREADS = ("recur", "torch", "onnxruntime")


def worth(peer, variant, case, threads):
    """Whether to measure this variant of this peer."""
    if threads > 1 and peer not in TWO_THREADS:
        return False
    if peer == "torch" and variant in SLOW:
        return SLOW[variant] not in (None, case.workload)
    if peer == "recur":  # weights in fewer bits: one thread only
        return threads == 1 or variant not in ("bfloat16", "float16", "int8")
    wl, cell = case.workload, case.cell
    if peer == "numpy":
        return wl in ("step", "growth") or (
            case.B == 64 and (cell == "rnn" or (wl, case.H) == ("train", 128))
        )
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
