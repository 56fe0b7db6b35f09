"""The rows of the benchmark page, and what recur is meant to reach in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

NATURAL_WITHIN = 1.3  # times the fastest public way
THREADS_GAIN = 1.7  # by a second thread where one step has more than 20 MFLOP


class Aim(NamedTuple):
    """A target for the cases whose id contains one of `cases`.

    of     "limit": recur / limit <= bound; else a peer, or "best": peer / recur >= bound
    """

    cases: Sequence[str]
    bound: float
    of: str


class TableRow(NamedTuple):
    """A table of the page: the cases whose id contains one of `cases`, and their targets."""

    key: str
    title: str
    cases: Sequence[str]
    aims: Sequence[Aim]


CELLS = ("lstm", "gru", "rnn")
STEP = {"(16,32)": 6.0, "(64,128)": 2.6, "(128,256)": 1.7, "(256,512)": 1.35, "(512,1024)": 1.2}
STREAMS = {"(64,128)": (1.35, 1.5, 1.6), "(128,256)": (1.2, 1.25, 1.3)}
OTHERS = ("gru", "rnn")
SIZES = ("(64,128)", "(128,256)", "(256,512)")

# The time of RTNeural, C++ with sizes known when it is compiled, over the limit of the machine it
# was measured on: 103 GFLOP/s, and 103 GB/s for weights of 64 to 256 KiB.
FLOPS, BYTES = 103e3, 103e3  # a microsecond
LONG = {
    "lstm T1000 B1 (16,32)": 0.35 / (2 * 4 * 32 * 48 / FLOPS),
    "lstm T1000 B1 (64,128)": 5.0 / (4 * 4 * 128 * 128 / BYTES),
    "gru T1000 B1 (16,32)": 0.28 / (2 * 3 * 32 * 48 / FLOPS),
    "gru T1000 B1 (64,128)": 3.9 / (4 * 3 * 128 * 128 / BYTES),
}

ROWS = (
    TableRow(
        "lstm-step",
        "LSTM, one step of one stream",
        ["step lstm T1 B1 "],
        [
            *(Aim([f"step lstm T1 B1 {size}"], x, "best") for size, x in STEP.items()),
            Aim(["step lstm T1 B1 (128,256)"], 1.2, "limit"),
        ],
    ),
    TableRow(
        "gru-rnn-step",
        "GRU and RNN, one step of one stream",
        ["step gru T1 B1 ", "step rnn T1 B1 "],
        [
            Aim([f"step {c} T1 B1 (16,32)" for c in OTHERS], 4.0, "best"),
            Aim([f"step {c} T1 B1 (128,256)" for c in OTHERS], 1.2, "limit"),
        ],
    ),
    TableRow(
        "streams",
        "One step of 64 streams",
        ["mstep "],
        [
            Aim([f"mstep {cell} T1 B64 {size}"], bound, "limit")
            for size, bounds in STREAMS.items()
            for cell, bound in zip(CELLS, bounds, strict=True)
        ],
    ),
    TableRow(
        "sequence-one",
        "A sequence of 100 steps, batch 1",
        [f"seq {c} T100 B1 " for c in CELLS],
        [Aim([f"seq {c} T100 B1 " for c in CELLS], 1.35, "limit")],
    ),
    TableRow(
        "sequence-long",
        "A sequence of 1000 steps, batch 1",
        ["seq lstm T1000 ", "seq gru T1000 "],
        [Aim([f"seq {case}"], round(bound, 2), "limit") for case, bound in LONG.items()],
    ),
    TableRow(
        "sequence-batch",
        "A sequence of 100 steps, batch 16 and 64",
        [f"seq {c} T100 B{b} " for c in CELLS for b in (16, 64)],
        [
            Aim([f"seq {c} T100 B{b} " for c in CELLS for b in (16, 64)], 1.0, "best"),
            Aim([f"seq lstm T100 B{b} {SIZES[0]}" for b in (16, 64)], 1.35, "limit"),
            Aim(
                [f"seq lstm T100 B{b} {s}" for b in (16, 64) for s in SIZES[1:]]
                + [f"seq {c} T100 B{b} {SIZES[1]}" for c in OTHERS for b in (16, 64)],
                1.25,
                "limit",
            ),
        ],
    ),
    TableRow(
        "training-one",
        "Training: forward, backward and all gradients, batch 1",
        [f"train {c} T100 B1 " for c in CELLS],
        [
            Aim(["train lstm T100 B1 "], 1.15, "torch"),
            Aim([f"train {c} T100 B1 " for c in OTHERS], 1.8, "best"),
        ],
    ),
    TableRow(
        "training-batch",
        "Training, batches, (650,650) and two layers",
        [f"train {c} T100 B{b} " for c in CELLS for b in (16, 64)] + ["train lstm T35 "],
        [
            Aim(["train "], 1.0, "onednn"),
            Aim(["train lstm T100 B16 ", "train lstm T35 "], 1.12, "torch"),
            Aim(["train lstm T100 B64 "], 1.3, "torch"),
            Aim([f"train {c} T100 B{b} " for c in OTHERS for b in (16, 64)], 1.35, "best"),
        ],
    ),
    TableRow(
        "loop-batch",
        "A loop over steps through the tape, batch 16",
        [f"loop {c} T100 B16 " for c in CELLS],
        [
            Aim([f"loop {c} T100 B16 " for c in CELLS], 1.6, "torch"),
            Aim([f"loop {c} T100 B16 " for c in CELLS], 1.3, "jax"),
        ],
    ),
    TableRow(
        "loop-one",
        "A loop over steps through the tape, batch 1",
        ["loop lstm T100 B1 "],
        [Aim(["loop lstm T100 B1 "], 10.0, "torch")],
    ),
)
