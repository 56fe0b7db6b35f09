"""How an acceptance case becomes a model, and how its numbers are compared.

A case is one entry of `data/cases.json` (or of another file of that form): `given` holds weights
and inputs, `expect` the results.  A handler is a function that plays one or more cases; the modules
`cases_*.py` hold them, and `test_cases.py` runs them.  Handlers take every number and size from the
case, so that a file with other numbers exercises the same behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

import recur

HANDLERS: dict[str, Callable[[Case], None]] = {}

CELLS = {
    "rnn": recur.RNNCell,
    "lstm": recur.LSTMCell,
    "gru": recur.GRUCell,
    "gruv3": recur.GRUv3Cell,
}
LAYERS = {"RNN": recur.RNN, "LSTM": recur.LSTM, "GRU": recur.GRU, "GRUv3": recur.GRUv3}
WEIGHTS = ("Wi", "Wh", "b", "Whh")


def handles(*ids: str) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Registers a function as the handler of the cases with these ids."""

    def register(function: Callable[[Case], None]) -> Callable[[Case], None]:
        for case_id in ids:
            assert case_id not in HANDLERS, case_id
            HANDLERS[case_id] = function
        return function

    return register


@dataclass
class Case:
    """One case, to be played in one dtype."""

    entry: dict[str, Any]
    dtype: np.dtype

    @property
    def id(self) -> str:
        return self.entry["id"]

    @property
    def given(self) -> dict[str, Any]:
        return self.entry["given"]

    @property
    def expect(self) -> dict[str, Any]:
        return self.entry["expect"]

    def array(self, name: str) -> np.ndarray:
        return self.cast(self.given[name])

    def cast(self, values: Any) -> np.ndarray:
        return np.array(values, self.dtype)

    def xs(self, name: str = "xs") -> list[np.ndarray]:
        return [self.cast(x) for x in self.given[name]]

    def near(self, actual: Any, expected: Any, what: str = "") -> None:
        """Fails unless `actual` has the shape and the numbers of `expected`.

        The tolerance is the case's own, absolute against float64; float32 gets 2e-5 of the value.
        """
        actual = np.asarray(recur.value(actual))
        expected = np.asarray(expected, np.float64)
        assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
        tol = float(self.entry["tol"])
        bound = np.full(expected.shape, tol)
        if self.dtype == np.float32:
            bound = np.maximum(tol, 2e-5 * np.maximum(1.0, np.abs(expected)))
        error = np.abs(actual.astype(np.float64) - expected)
        assert np.all(error <= bound), f"{what}: off by {error.max()}\n{actual}\n{expected}"

    def far(self, actual: Any, wrong: Any) -> None:
        """Fails if `actual` are the numbers of a known wrong answer."""
        actual = np.asarray(recur.value(actual), np.float64)
        assert not np.allclose(actual, np.asarray(wrong, np.float64), rtol=0, atol=1e-6)

    # ---------------------------------------------------------------- models

    def weights(self, prefix: str = "") -> dict[str, np.ndarray]:
        return {name: self.array(prefix + name) for name in WEIGHTS if prefix + name in self.given}

    def init(self, prefix: str = "") -> Any:
        h0 = self.given.get(prefix + "h0")
        if h0 is None:
            return None
        if prefix + "c0" in self.given:
            return self.cast(h0), self.array(prefix + "c0")
        return self.cast(h0)

    def cell(self, act: Callable | None = None, prefix: str = "") -> Any:
        return make_cell(self.weights(prefix), act)

    def recur(
        self, act: Callable | None = None, prefix: str = "", learn_init: bool = True, **options: Any
    ) -> recur.Recur:
        """The layer of the case; its initial state is learned, so that h0 and c0 get gradients."""
        init = self.init(prefix)
        learn = learn_init and init is not None
        return recur.Recur(self.cell(act, prefix), init=init, learn_init=learn, **options)

    # ---------------------------------------------------------------- comparisons

    def near_state(self, layer: recur.Recur, expected: Any) -> None:
        """Compares a state with {"h": …, "c": …}, with a bare array, one column per sample."""
        parts = layer.state if isinstance(layer.state, tuple) else (layer.state,)
        if not isinstance(expected, dict):
            expected = {"h": expected}
        assert len(parts) == len(expected)
        for part, (name, want) in zip(parts, expected.items(), strict=True):
            part = np.asarray(recur.value(part))
            if part.ndim == 1:
                part = part[:, None]
            self.near(part, want, f"state {name}")

    def near_grads(self, grads: Any, expected: dict[str, Any], prefix: str = "") -> None:
        """Compares gradients read by path; h0 and c0 are the parts of `init`."""
        for name, want in expected.items():
            self.near(gradient_of(grads, name, prefix, "c0" in expected), want, f"d{name}")


def make_cell(weights: dict[str, np.ndarray], act: Callable | None = None) -> Any:
    """A cell with these weights; which one follows from their shapes."""
    n_out = weights["Wh"].shape[1]
    kind = (
        "gruv3"
        if "Whh" in weights
        else {1: "rnn", 3: "gru", 4: "lstm"}[weights["Wh"].shape[0] // n_out]
    )
    n_in = weights["Wi"].shape[1]
    extra = () if act is None else (act,)
    cell = CELLS[kind](n_in, n_out, *extra, dtype=weights["Wi"].dtype)
    for name, array in weights.items():
        setattr(cell, name, array)
    return cell


def gradient_of(grads: Any, name: str, prefix: str, two_parts: bool) -> np.ndarray:
    """The gradient of one of the case's names, by its path in the model."""
    if name in ("h0", "c0"):
        path = f"init.{name[0]}" if two_parts else "init"
    else:
        path = f"cell.{name}"
    return grads[prefix + path]


def sum_of_squares(ys: Iterable[Any]) -> Any:
    """The loss of most cases: the sum over the steps of the sum of squares of the output."""
    loss = 0.0
    for y in ys:
        loss = loss + (y * y).sum()
    return loss


def run(layer: Any, xs: Iterable[np.ndarray], cuts: Iterable[int] = ()) -> list[Any]:
    """Steps `layer` over `xs`; truncates after the steps in `cuts`, 0 meaning before the first."""
    cuts = set(cuts)
    if 0 in cuts:
        recur.truncate(layer)
    ys = []
    for t, x in enumerate(xs, 1):
        ys.append(layer(x))
        if t in cuts:
            recur.truncate(layer)
    return ys
