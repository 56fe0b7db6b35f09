"""Random operations on random models: what a Stepper answers is what Python answers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recur
from recur import GRU, LSTM, RNN, Chain, Dense, GRUv3, Recur, Tape
from recur.module import walk

KINDS = [LSTM, GRU, GRUv3, RNN, Dense]
ACTS = ["call", "call", "call", "other", "reset", "truncate", "write", "scope", "state", "replace"]


def build(kinds, sizes, named, double):
    rng = np.random.default_rng(len(kinds))
    widths = [3, *sizes]
    parts = [
        KINDS[kind](n_in, n_out, rng=rng)
        for kind, n_in, n_out in zip(kinds, widths, widths[1:], strict=False)
    ]
    m = Chain(**{f"part{i}": part for i, part in enumerate(parts)}) if named else Chain(*parts)
    return recur.f64(m) if double else m


def carriers(model):
    return [layer for _, layer in walk(model) if isinstance(layer, Recur)]


def act(model, name, x, number):
    """What an operation gives: an output, or None."""
    if name == "call":
        return model(x)
    if name == "other":  # Python's own: another dtype, another layout, one layer alone
        model(x.astype(np.float16))
        return model(np.repeat(x, 2, 0)[::2])
    if name == "reset":
        recur.reset(model)
    elif name == "truncate":
        recur.truncate(model)
    elif name == "write":
        weights = list(recur.named_params(model).values())
        weights[number % len(weights)] *= 0.5
    elif name == "scope":
        with Tape():
            return recur.value(model(x))
    elif name == "state":
        for layer in carriers(model):
            parts = layer.state
            layer.state = tuple(0.5 * p for p in parts) if isinstance(parts, tuple) else 0.5 * parts
    elif name == "replace":
        for layer in carriers(model):
            layer.cell.Wh = np.asarray(layer.cell.Wh) * 0.9
    return None


@pytest.mark.parametrize("double", [False, True])
@given(
    kinds=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    sizes=st.lists(st.sampled_from([1, 3, 8, 17]), min_size=4, max_size=4),
    named=st.booleans(),
    batch=st.sampled_from([None, 0, 1, 3]),
    acts=st.lists(st.sampled_from(ACTS), min_size=5, max_size=30),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_every_sequence_of_operations_gives_the_bits_of_the_general_way(
    double, kinds, sizes, named, batch, acts, seed
):
    m = build(kinds, sizes, named, double)
    twin, rng = copy.deepcopy(m), np.random.default_rng(seed)
    for name in acts:
        x = rng.normal(size=3 if batch is None else (3, batch)).astype(np.float32)
        number = int(rng.integers(100))
        for layer in carriers(twin):  # whoever reads a state takes it out of the stepper
            layer.state  # noqa: B018
        y, expected = act(m, name, x, number), act(twin, name, x, number)
        assert (y is None) == (expected is None)
        if y is not None and expected is not None:
            assert y.dtype == expected.dtype and np.array_equal(y, expected)
    for mine, other in zip(carriers(m), carriers(twin), strict=True):
        assert np.array_equal(np.asarray(mine.state), np.asarray(other.state))
