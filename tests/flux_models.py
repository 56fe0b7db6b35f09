"""Recurrent layers as each era of Flux stores them, described for `julia_writer`."""

from __future__ import annotations

from typing import Any

import numpy as np
from julia_writer import NT, S, T, fn, type_of

import twins

ERAS = ("0.8", "0.11", "0.12", "0.14", "0.16")
KINDS = ("RNN", "LSTM", "GRU", "GRUv3")
_BLOCKS = {"RNN": 1, "LSTM": 4, "GRU": 3, "GRUv3": 3}


def has(kind: str, era: str) -> bool:
    """GRUv3 came with Flux 0.12.7."""
    return kind != "GRUv3" or era in ("0.14", "0.16")


class Layer:
    """Random weights of one recurrent layer, how Flux stores them, and what they compute."""

    def __init__(self, kind: str, n_in: int, n_out: int, rng, dtype="f4", start=True) -> None:
        def draw(*shape):
            return np.asfortranarray(rng.standard_normal(shape).astype(dtype))

        self.kind, self.n = kind, n_out
        rows = _BLOCKS[kind] * n_out
        self.Wi, self.b = draw(rows, n_in), draw(rows)
        self.Wh = draw(2 * n_out if kind == "GRUv3" else rows, n_out)
        self.Whh = draw(n_out, n_out) if kind == "GRUv3" else None
        self.start = [draw(n_out) * start for _ in range(2 if kind == "LSTM" else 1)]
        self.running = [draw(n_out, 2) for _ in self.start]

    def twin(self) -> Any:
        more = {"Whh": self.Whh} if self.kind == "GRUv3" else {}
        return getattr(twins, self.kind)(self.Wi, self.Wh, self.b, **more)

    def outputs(self, xs: list[np.ndarray], state: list[np.ndarray]) -> list[np.ndarray]:
        """What the layer gives for steps (n_in, B) from a state of parts (n_out, B)."""
        twin, now, ys = self.twin(), [part.T for part in state], []
        for x in xs:
            now, _ = twin.step(x.T, *now)
            ys.append(now[0].T)
        return ys

    def columns(self, batch: int) -> list[np.ndarray]:
        """The initial state for a batch."""
        return [np.repeat(part.reshape(-1, 1), batch, 1) for part in self.start]

    # ---- as Flux stores it -------------------------------------------------------------------

    def weights(self, era: str) -> dict[str, Any]:
        bias = "bias" if era == "0.16" and self.kind in ("RNN", "LSTM") else "b"
        Wh = self.Wh
        if self.kind == "GRUv3" and era == "0.16":  # a third block, never used
            Wh = np.concatenate([Wh, np.full((self.n, self.n), np.nan, Wh.dtype)])
        fields: dict[str, Any] = {"Wi": self.Wi, "Wh": Wh, bias: self.b}
        if self.kind == "RNN":
            fields = {"σ": fn("Base.tanh"), **fields}
        if self.kind == "GRUv3":
            fields["Wh_h̃"] = self.Whh
        return fields

    def state0(self, era: str) -> Any:
        """The initial state, which from 0.12 on is a column."""
        parts = [part.reshape(-1, 1) if era in ("0.12", "0.14") else part for part in self.start]
        return tuple(parts) if self.kind == "LSTM" else parts[0]

    def state(self) -> Any:
        return tuple(self.running) if self.kind == "LSTM" else self.running[0]

    def cell(self, era: str) -> S:
        fields = self.weights(era)
        start = self.state0(era)
        if era in ("0.8", "0.11"):
            parts = start if self.kind == "LSTM" else (start,)
            fields |= dict(zip("hc", parts, strict=False))
        elif era != "0.16":
            fields["state0"] = start
        if era == "0.8":
            fields = {name: tracked(value) for name, value in fields.items()}
        return S(T(f"Flux.{self.kind}Cell", self._params(fields, era)), fields)

    def _params(self, fields: dict[str, Any], era: str) -> tuple[T, ...]:
        """Type parameters: until 0.13.6 the matrices share one."""
        types = [type_of(value) for name, value in fields.items()]
        if era in ("0.14", "0.16"):
            return tuple(types)
        names = [name for name in fields if name not in ("Wh", "h", "c")]
        return tuple(type_of(fields[name]) for name in names)

    def layer(self, era: str) -> S:
        """The layer that wraps the cell."""
        cell = self.cell(era)
        if era == "0.16":
            return S(T(f"Flux.{self.kind}", (False, cell.type)), {"cell": cell})
        state = self.state()
        if era in ("0.8", "0.11"):
            held = cell.fields
            init = (held["h"], held["c"]) if self.kind == "LSTM" else held["h"]
            return S(T("Flux.Recur", (cell.type,)), dict(cell=cell, init=init, state=state), True)
        kind = T("Flux.Recur", (cell.type, type_of(state)))
        return S(kind, {"cell": cell, "state": state}, True)

    def tree(self, era: str) -> NT:
        """The layer in a tree of `Flux.state`."""
        fields = {name: () if name == "σ" else x for name, x in self.weights(era).items()}
        if era == "0.16":
            return NT(cell=NT(fields))
        return NT(cell=NT(fields, state0=self.state0(era)), state=self.state())

    def parameters(self, era: str) -> list[Any]:
        """What `params(m)` lists."""
        arrays = [value for name, value in self.weights(era).items() if name != "σ"]
        if era == "0.16":
            return arrays
        start = self.state0(era)
        arrays += list(start) if isinstance(start, tuple) else [start]
        return [tracked(a) for a in arrays] if era == "0.8" else arrays


def tracked(value: Any) -> Any:
    """An array as Tracker keeps it: with its node and its gradient, which are of no interest."""
    if not isinstance(value, np.ndarray):
        return value
    grad = np.full_like(value, np.nan)
    call = S(T("Tracker.Call", (T("Core.Nothing"), T("Core.Tuple"))), {"func": None, "args": ()})
    kind = type_of(value)
    node = S(
        T("Tracker.Tracked", (kind,)),
        {"ref": np.uint32(0), "f": call, "isleaf": True, "grad": grad},
        True,
    )
    element, ndim = kind.params
    fields = {"tracker": node, "data": value, "grad": grad}
    return S(T("Tracker.TrackedArray", (element, ndim, kind)), fields)


def dense(W: np.ndarray, b: Any, act: S, era: str = "0.14") -> S:
    names = ("W", "b", "σ") if era in ("0.8", "0.11") else ("weight", "bias", "σ")
    values = [W, b, act]
    if era == "0.8":
        values = [tracked(W), tracked(b), act]
    kinds = tuple(map(type_of, [act, *values[:2]]))
    return S(T("Flux.Dense", kinds), dict(zip(names, values, strict=True)))


def chain(*layers: Any) -> S:
    return S(T("Flux.Chain", (type_of(layers),)), {"layers": layers})
