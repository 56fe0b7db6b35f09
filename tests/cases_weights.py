"""Handlers of group J (weights of other libraries)."""

from __future__ import annotations

import numpy as np
import pytest

import recur
from casebook import Case, handles, run
from recur.io import keras as keras_io
from recur.io import onnx as onnx_io
from recur.io import torch as torch_io
from recur.io.flux import gru_from_dense


@handles("J01")
def lstm_from_torch(case: Case) -> None:
    cell = torch_io.cell_from_torch("LSTM", **torch_arrays(case))
    case.near(cell.b, case.expect["b"], "b")
    m = recur.Recur(cell)
    case.near(run(m, case.xs()), case.expect["ys"], "ys")
    case.near_state(m, case.expect["state"])


def torch_arrays(case: Case) -> dict[str, np.ndarray]:
    return {name: case.array(name) for name in ("w_ih", "w_hh", "b_ih", "b_hh")}


@handles("J02")
def gru_from_torch_needs_the_inner_bias(case: Case) -> None:
    arrays = torch_arrays(case)
    with pytest.raises(recur.RecurError, match="recurrent_bias"):
        torch_io.cell_from_torch("GRU", **arrays, recurrent_bias=False)
    cell = torch_io.cell_from_torch("GRU", **arrays, recurrent_bias=True)
    case.near(cell.b, case.expect["b"], "b")
    case.near(cell.bh, case.expect["bh"], "bh")
    ys = run(recur.Recur(cell), case.xs())
    case.near(ys, case.expect["ys"], "ys")
    case.far(ys, case.expect["must_not_be"]["ys"])


@handles("J03")
def gru_to_torch(case: Case) -> None:
    arrays = torch_io.cell_to_torch(case.cell())
    for theirs, ours in (("w_ih", "Wi"), ("w_hh", "Wh"), ("b_ih", "b")):
        case.near(arrays[theirs], case.given[ours], theirs)
    case.near(arrays["b_hh"], case.expect["b_hh"], "b_hh")
    case.near(run(case.recur(), case.xs()), case.expect["ys"], "ys")


@handles("J04", "J05", "J06")
def onnx_layout_there_and_back(case: Case) -> None:
    cell = case.cell()
    arrays, attributes = onnx_io.cell_to_onnx(cell)
    for name in ("W", "R", "B"):
        case.near(arrays[name], case.expect[name], name)
    if "linear_before_reset" in case.expect:
        assert attributes["linear_before_reset"] == case.expect["linear_before_reset"]
    kind = "LSTM" if "c0" in case.given else "GRU"
    back = onnx_io.cell_from_onnx(kind, **arrays, **attributes)
    m = recur.Recur(back, init=case.init())
    case.near(run(m, case.xs()), case.expect["ys"], "ys")
    if "state" in case.expect:
        case.near_state(m, case.expect["state"])


@handles("J07", "J08", "J09")
def keras_layout_there_and_back(case: Case) -> None:
    arrays, config = keras_io.cell_to_keras(case.cell())
    for name in ("kernel", "recurrent_kernel", "bias"):
        case.near(arrays[name], case.expect[name], name)
    kind = "LSTM" if "c0" in case.given else "GRU"
    if kind == "GRU":
        assert config["reset_after"] is (case.id == "J08")
    back = keras_io.cell_from_keras(kind, **arrays, **config)
    case.near(run(recur.Recur(back, init=case.init()), case.xs()), case.expect["ys"], "ys")


@handles("J10")
def features_first_is_time_major_reversed(case: Case) -> None:
    flat = case.array("bytes")
    shape = (2, 3, 4)
    fbt = flat.reshape(shape, order="F")
    tbf = flat.reshape(shape[::-1])
    assert fbt[1, 2, 3] == case.expect["fbt_element_1_2_3"]
    assert tbf[3, 2, 1] == case.expect["tbf_element_3_2_1"]
    assert np.shares_memory(tbf.T, tbf) and np.array_equal(tbf.T, fbt)
    m, other = (recur.GRU(2, 3, dtype=case.dtype, rng=np.random.default_rng(26)) for _ in range(2))
    np.testing.assert_array_equal(m(tbf.T), other(np.ascontiguousarray(fbt)))


@handles("J11")
def gru_of_flux_0_4_becomes_a_gruv3(case: Case) -> None:
    gates = [(case.array(f"W{gate}"), case.array(f"b{gate}")) for gate in "zrn"]
    cell = gru_from_dense(*gates)
    for name in ("Wi", "Wh", "Whh", "b"):
        case.near(getattr(cell, name), case.expect[name], name)
    m = recur.Recur(cell, init=case.cast(case.expect["h0"]))
    case.near(run(m, case.xs()), case.expect["ys"], "ys")
