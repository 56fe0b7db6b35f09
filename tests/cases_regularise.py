"""Handlers of group G (WeightDrop), and of I19, which switches it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np

import recur
from casebook import Case, handles, make_cell, run, sum_of_squares
from recur.regularise import WeightDrop, resample


def dropped(case: Case, mask: str | None = "mask", p: float | None = None) -> Any:
    """The case's LSTM with weight-dropped recurrent weights and, if named, a fixed mask."""
    weights = {name: case.array(name) for name in ("Wi", "b")}
    weights["Wh"] = case.array("Wh_raw")
    m = recur.Recur(make_cell(weights), init=case.init(), learn_init=True)
    wd = WeightDrop(m, ["Wh"], p=case.given.get("p", 0.5) if p is None else p)
    if mask is not None:
        wd.set_mask("Wh", case.array(mask))
    return wd


def grads_of(case: Case, wd: Any, loss: Any = None) -> tuple[Any, dict[str, np.ndarray]]:
    """Loss and gradients by the case's names, whatever path the wrapper gives them."""
    loss = loss or (lambda m: sum_of_squares(run(m, case.xs())))
    value, grads = recur.withgradient(loss, wd)
    named = {}
    for path in recur.named_params(wd):
        tail = path.split(".")
        name = f"{tail[-1]}0" if tail[-2] == "init" else tail[-1]
        named[name] = grads[path]
    return value, named


def near_all(case: Case, named: dict[str, np.ndarray]) -> None:
    for name, want in case.expect["grads"].items():
        case.near(named[name], want, f"d{name}")


@handles("G01")
def the_raw_weight_gets_the_masked_gradient(case: Case) -> None:
    wd = dropped(case)
    value, named = grads_of(case, wd)
    case.near(value, case.expect["loss"], "loss")
    near_all(case, named)
    scale = case.array("mask") / (1 - case.given["p"])
    case.near(named["Wh_raw"], scale * np.array(case.expect["grad_of_dropped_Wh"]), "dWh_raw")


@handles("G02")
def masked_entries_get_exactly_nothing(case: Case) -> None:
    mask = case.array("mask")
    rng = np.random.default_rng(11)
    m = recur.LSTM(3, mask.shape[1], dtype=case.dtype, rng=rng)
    wd = WeightDrop(m, ["Wh"], p=0.5)
    wd.set_mask("Wh", mask)
    xs = rng.normal(size=(3, 3, 2)).astype(case.dtype)
    _, named = grads_of(case, wd, lambda m: sum_of_squares(run(m, xs)))
    assert np.all(named["Wh_raw"][mask == 0] == 0)
    assert np.all(named["Wh_raw"][mask != 0] != 0)


@handles("G03")
def test_mode_uses_the_raw_weight(case: Case) -> None:
    wd = dropped(case, mask=None)
    recur.testmode(wd)
    value, named = grads_of(case, wd)
    case.near(value, case.expect["loss"], "loss")
    near_all(case, named)


@handles("G04")
def one_mask_for_a_whole_sequence(case: Case) -> None:
    for loss in (
        lambda m: sum_of_squares(run(m, case.xs())),
        lambda m: sum_of_squares([m(np.stack(case.xs(), -1))]),
    ):
        value, _ = grads_of(case, dropped(case), loss)
        case.near(value, case.expect["loss"], "loss")
        case.far(value, case.expect["must_not_be"]["loss"])


@handles("G05")
def one_mask_value_a_row(case: Case) -> None:
    value, named = grads_of(case, dropped(case))
    case.near(value, case.expect["loss"], "loss")
    near_all(case, named)


@handles("G06")
def a_step_moves_the_raw_weight(case: Case) -> None:
    wd = dropped(case, "mask1")
    grads = recur.gradient(lambda m: sum_of_squares(run(m, case.xs())), wd)
    raw = next(p for path, p in recur.named_params(wd).items() if path.endswith("Wh_raw"))
    raw -= case.given["lr"] * grads[raw]
    case.near(raw, case.expect["Wh_raw_new"], "Wh_raw")
    wd.set_mask("Wh", case.array("mask2"))
    recur.reset(wd)
    value, _ = grads_of(case, wd)
    case.near(value, case.expect["loss_second"], "loss")


@handles("G07")
def the_raw_array_is_the_only_parameter(case: Case) -> None:
    wd = WeightDrop(recur.LSTM(2, 3, dtype=case.dtype), ["Wh"], p=0.5)
    for model in (wd, copy.deepcopy(wd), pickle.loads(pickle.dumps(wd)), recur.f32(wd)):
        names = [path.split(".")[-1] for path in recur.named_params(model)]
        assert names == case.expect["names"]
        saved = recur.state_dict(model)
        recur.load_state_dict(model, saved)
        assert [path.split(".")[-1] for path in recur.named_params(model)] == names
        with recur.Tape() as tape:
            tape.backward(model(np.ones(2, case.dtype)).sum())
        assert all(p.grad is not None for p in recur.params(model))


@handles("G08")
def p_of_zero_is_the_identity(case: Case) -> None:
    plain = recur.LSTM(2, 3, dtype=case.dtype, rng=np.random.default_rng(12))
    rng = np.random.default_rng(13)
    wd = WeightDrop(copy.deepcopy(plain), ["Wh"], p=0.0, rng=rng)
    before = copy.deepcopy(wd.generator.bit_generator.state)
    xs = np.random.default_rng(14).normal(size=(3, 2, 2)).astype(case.dtype)

    def loss(m):
        return sum_of_squares(run(m, xs))

    a, of_plain = recur.withgradient(loss, plain)
    b, of_wd = recur.withgradient(loss, wd)
    assert a == b
    pairs = zip(recur.params(plain), recur.params(wd), strict=True)
    assert all(np.array_equal(of_plain[p], of_wd[q]) for p, q in pairs)
    assert wd.generator.bit_generator.state == before


@handles("G09")
def when_the_mask_changes(case: Case) -> None:
    wd = WeightDrop(
        recur.LSTM(2, 8, dtype=case.dtype), ["Wh"], p=0.5, rng=np.random.default_rng(15)
    )
    x = np.ones((2, 1), case.dtype)
    with recur.Tape():
        wd(x)
        first = wd.mask("Wh").copy()
        recur.truncate(wd)
        wd(x)
        assert np.array_equal(wd.mask("Wh"), first)
        recur.reset(wd)
        wd(x)
        second = wd.mask("Wh").copy()
        assert not np.array_equal(second, first)
        resample(wd)
        wd(x)
        third = wd.mask("Wh").copy()
        assert not np.array_equal(third, second)
    with recur.Tape():
        wd(x)
        assert not np.array_equal(wd.mask("Wh"), third)


@handles("G10")
def a_cut_composes_with_dropped_weights(case: Case) -> None:
    value, named = grads_of(
        case, dropped(case), lambda m: sum_of_squares(run(m, case.xs(), cuts=[1]))
    )
    case.near(value, case.expect["loss"], "loss")
    near_all(case, named)


# ---------------------------------------------------------------------- I19


@handles("I19")
def modes_leave_the_state_alone(case: Case) -> None:
    m = recur.Chain(
        recur.LSTM(2, 3, dtype=case.dtype),
        WeightDrop(recur.GRU(3, 3, dtype=case.dtype), ["Wh"], p=0.5),
        recur.Dropout(0.5),
    )
    x = np.ones((2, 4), case.dtype)
    m(x)
    before = recur.states(m)
    for switch in (recur.trainmode, recur.testmode):
        switch(m)
        after = recur.states(m)
        assert before.keys() == after.keys()
        for path, state in before.items():
            for a, b in zip(np.atleast_1d(state), np.atleast_1d(after[path]), strict=True):
                assert np.array_equal(a, b)
    recur.trainmode(m)
    assert not np.array_equal(m[2](np.ones(64)), np.ones(64))
    recur.testmode(m)
    assert np.array_equal(m[2](np.ones(64)), np.ones(64))
