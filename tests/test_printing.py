"""Models on one line and as a tree."""

from __future__ import annotations

import operator
from collections import deque
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from recur import ops
from recur.layers import (
    BatchNorm,
    Chain,
    Dense,
    Dropout,
    Embedding,
    LayerNorm,
    Parallel,
    Scale,
    SkipConnection,
)
from recur.module import Module, state_dict, summary
from recur.tape import Param


class Stepper(Module):
    """Carries a state and holds one layer, as a recurrent layer does."""

    def __init__(self, n: int) -> None:
        self.inner = Dense(n, n)
        self.batch: int | None = None

    def __call__(self, x):
        self.batch = x.shape[1]
        return x

    def buffers(self):
        return {"init": np.zeros(3, np.float32)}

    def describe(self):
        return f"Stepper({self.inner!r})"

    def describe_state(self):
        return "state: start" if self.batch is None else f"state: batch {self.batch}"


class Net(Module):
    def __init__(self) -> None:
        self.body = Stepper(2)
        self.heads = [Dense(2, 1), {"x": Dense(2, 3)}]
        self.by_name = {"out": Dense(2, 3, bias=False)}
        self.extra = Param(np.zeros(5, np.float64))
        self.rate = 0.5


def named_function(x):
    return x


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        (Dense(3, 5), "Dense(3 => 5)"),
        (Dense(3, 5, ops.tanh), "Dense(3 => 5, tanh)"),
        (Dense(3, 5, np.tanh), "Dense(3 => 5, tanh)"),
        (Dense(3, 5, ops.relu, bias=False), "Dense(3 => 5, relu, bias=False)"),
        (Scale(3, ops.sigmoid), "Scale(3, sigmoid)"),
        (Embedding(10, 4), "Embedding(10 => 4)"),
        (Dropout(0.25), "Dropout(0.25)"),
        (Dropout(1, dims=0), "Dropout(1, dims=(0,))"),
        (LayerNorm(4), "LayerNorm(4)"),
        (LayerNorm(4, ops.tanh, affine=False), "LayerNorm(4, tanh, affine=False)"),
        (BatchNorm(4, ops.relu), "BatchNorm(4, relu)"),
        (Chain(), "Chain()"),
        (
            Chain(Dense(1, 2), named_function, ops.softmax, lambda x: x),
            "Chain(Dense(1 => 2), named_function, softmax, <lambda>)",
        ),
        (Chain(a=Dense(1, 2), b=ops.tanh), "Chain(a=Dense(1 => 2), b=tanh)"),
        (Parallel("+", ops.tanh, ops.relu), "Parallel(+, tanh, relu)"),
        (Parallel(operator.mul, a=ops.tanh), "Parallel(*, a=tanh)"),
        (Parallel(ops.vcat, Dense(1, 2)), "Parallel(vcat, Dense(1 => 2))"),
        (Parallel(tuple, Dense(1, 2)), "Parallel(tuple, Dense(1 => 2))"),
        (SkipConnection(Dense(2, 2), "+"), "SkipConnection(Dense(2 => 2), +)"),
        (
            Net(),
            "Net(body=Stepper(Dense(2 => 2)), heads[0]=Dense(2 => 1), "
            "by_name['out']=Dense(2 => 3, bias=False))",
        ),
    ],
)
def test_a_layer_prints_on_one_line_with_its_sizes(layer, line):
    assert repr(layer) == str(layer) == line


def test_a_layer_that_holds_itself_prints():
    net = Net()
    net.body = net
    assert repr(net).startswith("Net(body=..., heads[0]=")
    assert "body = Net" in summary(net)


def test_layers_in_any_ordered_holder_are_shown():
    net = Net()
    net.body, net.heads = MappingProxyType({"a": Dense(1, 2)}), deque([Dense(2, 3)])
    assert repr(net).startswith("Net(body['a']=Dense(1 => 2), heads[0]=Dense(2 => 3), ")


def test_the_summary_is_a_tree_with_counts_bytes_and_state():
    m = Chain(Stepper(2), Dropout(0.5), Parallel("+", a=Dense(2, 1), b=ops.tanh), BatchNorm(1))
    assert summary(m).splitlines() == [
        "Chain(",
        "  Stepper(Dense(2 => 2)),  6 parameters, 24 bytes, 3 numbers not trained, state: start",
        "  Dropout(0.5),",
        "  Parallel(",
        "    +,",
        "    a = Dense(2 => 1),     3 parameters, 12 bytes",
        "    b = tanh,",
        "  ),",
        "  BatchNorm(1),            2 parameters, 8 bytes, 2 numbers not trained",
        ")",
        "Total: 11 parameters in 6 arrays, 44 bytes; not trained: 5 numbers in 3 arrays, 20 bytes",
    ]


def test_the_summary_shows_the_batch_of_a_state():
    m = Stepper(2)
    m(np.zeros((2, 10)))
    assert summary(m).splitlines()[0].endswith("state: batch 10")


def test_the_summary_of_a_class_of_ones_own_names_its_attributes_and_its_own_arrays():
    lines = summary(Net()).splitlines()
    assert lines[0] == "Net(" + 43 * " " + "14 parameters, 76 bytes"
    assert lines[1].startswith("  body = Stepper(Dense(2 => 2)),")
    assert lines[2].startswith("  heads[0] = Dense(2 => 1),")
    assert lines[3].startswith("  by_name['out'] = Dense(2 => 3, bias=False),")
    assert lines[-1].startswith("Total: 29 parameters in 8 arrays, 136 bytes")


def test_a_shared_layer_is_marked_and_counted_once():
    layer = Dense(2, 2)
    lines = summary(Chain(layer, ops.tanh, layer, ops.tanh)).splitlines()
    assert lines[1].endswith("6 parameters, 24 bytes")
    assert lines[3].split() == ["Dense(2", "=>", "2),", "shared"]
    assert lines[4].split() == ["tanh,"]
    assert lines[-1] == "Total: 6 parameters in 2 arrays, 24 bytes"


def test_large_sizes_read_in_larger_units():
    assert "1,001,000 parameters, 3.8 MiB" in summary(Dense(1000, 1000))
    assert summary(Dense(1, 1, bias=False)).endswith("Total: 1 parameter in 1 array, 4 bytes")
    huge = Chain(Dense(2, 2))
    huge[0].weight = Param(np.zeros((2, 2)))
    assert "48 bytes" not in summary(huge)


def test_printing_changes_nothing(rng):
    m = Chain(Dense(2, 3), Dropout(0.5, active=True, rng=rng), Stepper(3))
    before = state_dict(m), m[1].generator.bit_generator.state
    versions = [p.version for p in (m[0].weight, m[0].bias)]
    text = (repr(m), summary(m))
    assert (repr(m), summary(m)) == text
    assert m[1].generator.bit_generator.state == before[1]
    assert m[2].batch is None
    assert [p.version for p in (m[0].weight, m[0].bias)] == versions
    for path, array in state_dict(m).items():
        np.testing.assert_array_equal(array, before[0][path])


def test_anything_that_holds_layers_has_a_summary():
    holder: Any = [Dense(2, 2), {"x": Dense(1, 1)}]
    assert summary(holder).splitlines()[-1] == "Total: 8 parameters in 4 arrays, 32 bytes"
    assert summary(ops.tanh) == "tanh\nTotal: 0 parameters in 0 arrays, 0 bytes"
