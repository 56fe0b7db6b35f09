"""RNN, LSTM and GRU against torch: outputs, final states, and the gradient of everything.

The loss weighs every output and every final state with numbers of its own, so that no part of a
gradient can hide behind another.
"""

from __future__ import annotations

import numpy as np
import pytest

import recur
from recur.io.torch import cell_to_torch

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

CELLS = {
    "RNN tanh": lambda *sizes, **more: recur.RNNCell(*sizes, **more),
    "RNN relu": lambda *sizes, **more: recur.RNNCell(*sizes, recur.relu, **more),
    "LSTM": recur.LSTMCell,
    "GRU": lambda *sizes, **more: recur.GRUCell(*sizes, recurrent_bias=True, **more),
}
MEMORY = {
    "as (T, B, in)": lambda x: np.ascontiguousarray(x.T).T,
    "C": np.ascontiguousarray,
    "every other": lambda x: np.repeat(np.repeat(x, 2, axis=0), 2, axis=2)[::2, :, ::2],
    "backwards": lambda x: np.ascontiguousarray(x[::-1, :, ::-1])[::-1, :, ::-1],
}
each_cell = pytest.mark.parametrize("kind", CELLS)


class Pair:
    """One layer of ours and the same of torch's, with the numbers that both are given."""

    def __init__(self, kind, n_in, n_out, batch, steps, dtype, rng):
        # Small recurrent weights: a relu's state must not explode over 50 steps.
        cell = CELLS[kind](n_in, n_out, dtype=dtype, rng=rng)
        for p in recur.params(cell):
            p[...] = rng.uniform(-1, 1, p.shape) / np.sqrt(max(n_in, n_out))

        def draw(*shape):
            return rng.standard_normal(shape).astype(dtype)

        self.names = ("h", "c") if kind == "LSTM" else ("h",)
        starts = tuple(draw(n_out) for _ in self.names)  # one for all samples, and learned
        self.starts = starts
        self.layer = recur.Recur(cell, cell.wrap(starts), learn_init=True)
        self.X, self.of_y = draw(n_in, batch, steps), draw(n_out, batch, steps)
        self.of_state = [draw(n_out, batch) for _ in self.names]

        self.theirs = self._torch_layer(kind, cell, torch.from_numpy(self.X).dtype)

    def _torch_layer(self, kind, cell, dtype):
        name, _, act = kind.partition(" ")
        options = {"nonlinearity": act} if act else {}
        layer = getattr(torch.nn, name)(cell.n_in, cell.n_out, dtype=dtype, **options)
        arrays = cell_to_torch(cell)
        with torch.no_grad():
            for ours, its in zip(("w_ih", "w_hh", "b_ih", "b_hh"), layer.parameters(), strict=True):
                its.copy_(torch.tensor(arrays[ours]))
        return layer

    def ours(self, arrange=np.asarray, **options):
        """Outputs, final states and gradients by name, of one call on the whole sequence."""
        kept = []

        def loss(m, X):
            recur.reset(m)
            Y = m(X, **options)
            states = m.state if isinstance(m.state, tuple) else (m.state,)
            kept[:] = [recur.value(part).copy() for part in (Y, *states)]
            ends = sum((s * w).sum() for s, w in zip(states, self.of_state, strict=True))
            return (Y * self.of_y).sum() + ends

        _, (g, dX) = recur.withgradient(loss, self.layer, arrange(self.X))
        found = {"Wi": g.cell.Wi, "Wh": g.cell.Wh, "b": g.cell.b, "X": dX}
        if getattr(self.layer.cell, "bh", None) is not None:
            found["bh"] = g.cell.bh
        for name in self.names:
            found[f"{name}0"] = g["init" if len(self.names) == 1 else f"init.{name}"]
        return {"Y": kept[0], **dict(zip(self.names, kept[1:], strict=True))}, found

    def torch(self, lengths=None):
        """The same from torch; sequences of different lengths are packed."""
        X = torch.tensor(np.ascontiguousarray(self.X.T), requires_grad=True)
        starts = [torch.tensor(s, requires_grad=True) for s in self.starts]
        first = tuple(s.expand(1, X.shape[1], -1).contiguous() for s in starts)
        given = X
        if lengths is not None:
            given = torch.nn.utils.rnn.pack_padded_sequence(
                X, torch.tensor(lengths), enforce_sorted=False
            )
        Y, states = self.theirs(given, first if len(first) == 2 else first[0])
        if lengths is not None:
            Y, _ = torch.nn.utils.rnn.pad_packed_sequence(Y, total_length=len(X))
        states = states if len(starts) == 2 else (states,)
        loss = (Y * torch.tensor(self.of_y.T.copy())).sum()
        for state, weight in zip(states, self.of_state, strict=True):
            loss = loss + (state[0] * torch.tensor(weight.T.copy())).sum()
        loss.backward()
        w_ih, w_hh, b_ih, b_hh = (p.grad.numpy() for p in self.theirs.parameters())
        found = {"Wi": w_ih, "Wh": w_hh, "b": b_ih, "X": X.grad.numpy().T}
        if getattr(self.layer.cell, "bh", None) is not None:
            found["bh"] = b_hh[-self.layer.cell.n_out :]
        for name, start in zip(self.names, starts, strict=True):
            found[f"{name}0"] = start.grad.numpy()
        values = {name: s.detach().numpy()[0].T for name, s in zip(self.names, states, strict=True)}
        return {"Y": Y.detach().numpy().T, **values}, found


def assert_equal(ours, theirs, dtype):
    """Equal to rounding, measured against the largest entry: both sum in orders of their own."""
    small = 3e-5 if dtype == np.float32 else 1e-12
    for got, want in zip(ours, theirs, strict=True):
        assert set(got) == set(want)
        for name in want:
            assert got[name].dtype == dtype
            assert got[name].shape == want[name].shape
            scale = max(1.0, np.abs(want[name]).max())
            np.testing.assert_allclose(
                got[name], want[name], rtol=0, atol=small * scale, err_msg=name
            )


@each_cell
@pytest.mark.parametrize("steps", [1, 2, 7, 50])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_values_and_all_gradients_are_those_of_torch(kind, steps, batch, dtype, rng):
    pair = Pair(kind, 5, 7, batch, steps, dtype, rng)
    assert_equal(pair.ours(), pair.torch(), dtype)


@each_cell
@pytest.mark.parametrize("n_in", [1, 3, 17, 65])
@pytest.mark.parametrize("n_out", [1, 3, 17, 65])
def test_odd_sizes_are_those_of_torch(kind, n_in, n_out, dtype, rng):
    pair = Pair(kind, n_in, n_out, 3, 7, dtype, rng)
    assert_equal(pair.ours(), pair.torch(), dtype)


@each_cell
@pytest.mark.parametrize("memory", MEMORY)
def test_inputs_in_any_memory_order_are_those_of_torch(kind, memory, dtype, rng):
    pair = Pair(kind, 4, 6, 3, 5, dtype, rng)
    arranged = MEMORY[memory](pair.X)
    np.testing.assert_array_equal(arranged, pair.X)
    assert_equal(pair.ours(MEMORY[memory]), pair.torch(), dtype)


@each_cell
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_sequences_of_different_lengths_are_those_that_torch_packs(kind, batch, dtype, rng):
    pair = Pair(kind, 5, 17, batch, 7, dtype, rng)
    lengths = rng.permutation(np.arange(batch) % 7 + 1)
    assert_equal(pair.ours(lengths=lengths), pair.torch(lengths), dtype)


@each_cell
def test_steps_in_a_loop_are_the_sequence_of_torch(kind, dtype, rng):
    pair = Pair(kind, 5, 7, 3, 7, dtype, rng)
    of_sequence, _ = pair.torch()
    recur.reset(pair.layer)
    Y = np.stack([pair.layer(pair.X[:, :, t]) for t in range(7)], -1)
    assert_equal([{"Y": Y}], [{"Y": of_sequence["Y"]}], dtype)
