"""Models from Flux files: every era, container and layer computes what Flux computes."""

from __future__ import annotations

import json
import sys
import tracemalloc
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from flux_models import ERAS, KINDS, Layer, chain, dense, has, tracked
from hypothesis import given, settings
from hypothesis import strategies as st
from julia_writer import I32, NT, Bson, Jld2, S, Sym, T, bson_bytes, fn, type_of

from recur import ops
from recur.__main__ import main
from recur.cells import GRUv3Cell
from recur.errors import FormatError, RecurError, ShapeError, StateError
from recur.io import _hdf5, flux
from recur.io.flux import values
from recur.io.model import load
from recur.layers import Chain, Dense, Dropout, Embedding, LayerNorm
from recur.module import Module, named_params, params, state_dict, testmode
from recur.recurrent import GRU, LSTM, RNN, GRUv3
from recur.tape import Param

REAL = Path(__file__).resolve().parents[2] / "shared" / "realfiles"

WRITERS = {
    "bson": lambda variables: bson_bytes(Bson().document(variables)),
    "bson of 32 bits": lambda variables: bson_bytes(Bson(I32, ("Main",)).document(variables)),
    "jld2 0.1.0": lambda variables: Jld2("0.1.0").file(variables),
    "jld2 0.1.1": lambda variables: Jld2("0.1.1").file(variables),
    "jld2 0.2.0": lambda variables: Jld2("0.2.0", compact=0, attribute=3).file(variables),
    "jld2 deflated": lambda variables: Jld2("0.2.0", compact=0, compress=True).file(variables),
}


@pytest.fixture
def save(tmp_path):
    """Write variables to a file of one container; returns its path."""

    def write(container="bson", **variables):
        path = tmp_path / "model.file"
        path.write_bytes(WRITERS[container](variables))
        return path

    return write


def draw(rng, *shape, dtype="f4"):
    return np.asfortranarray(rng.standard_normal(shape).astype(dtype))


def steps(rng, n_in, batch=2, n=3):
    return [draw(rng, n_in, batch) for _ in range(n)]


def close(got, wanted, dtype="f4"):
    tolerance = 2e-5 if np.dtype(dtype) == np.float32 else 1e-12
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


# ---- recurrent layers ------------------------------------------------------------------------


@pytest.mark.parametrize("container", sorted(WRITERS))
@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrent_model_gives_fluxs_numbers_from_its_initial_state(
    container, era, kind, save, rng, dtype
):
    if not has(kind, era):
        return
    layer = Layer(kind, 3, 4, rng, dtype, start=era != "0.16")
    W, b = draw(rng, 2, 4, dtype=dtype), draw(rng, 2, dtype=dtype)
    path = save(container, model=chain(layer.layer(era), dense(W, b, fn("Base.tanh"), era)))
    model = flux.load(path)
    xs = steps(rng, 3)
    wanted = [np.tanh(W @ y + b[:, None]) for y in layer.outputs(xs, layer.columns(2))]
    for x, y in zip(xs, wanted, strict=True):
        got = model(x)
        assert got.dtype == dtype
        close(got, y, dtype)


@pytest.mark.parametrize("container", ["bson", "jld2 0.1.1"])
@pytest.mark.parametrize("era", ["0.8", "0.11", "0.12", "0.14"])
@pytest.mark.parametrize("kind", KINDS)
def test_resume_goes_on_from_the_saved_state_and_reset_goes_to_the_start(
    container, era, kind, save, rng
):
    if not has(kind, era):
        return
    layer = Layer(kind, 3, 4, rng)
    model = flux.load(save(container, m=layer.layer(era)), resume=True)
    xs = steps(rng, 3)
    for x, y in zip(xs, layer.outputs(xs, layer.running), strict=True):
        close(model(x), y)
    model.reset()
    for x, y in zip(xs, layer.outputs(xs, layer.columns(2)), strict=True):
        close(model(x), y)


def test_a_saved_state_of_another_dtype_is_converted(save, rng):
    layer = Layer("LSTM", 3, 4, rng)
    layer.running = [part.astype("f8") for part in layer.running]
    model = flux.load(save(m=layer.layer("0.11")), resume=True)
    assert model.state.h.dtype == np.float32
    close(model.state.c, layer.running[1])


def test_a_layer_that_was_never_stepped_is_at_its_start_also_with_resume(save, rng):
    layer = Layer("LSTM", 3, 4, rng)
    stored = layer.layer("0.11")
    stored.fields["state"] = stored.fields["init"]
    assert flux.load(save(m=stored), resume=True).at_start


def test_initial_states_are_constants_unless_learning_is_asked_for(save, rng):
    layer = Layer("LSTM", 3, 4, rng)
    path = save(m=layer.layer("0.14"))
    assert list(named_params(flux.load(path))) == ["cell.Wi", "cell.Wh", "cell.b"]
    model = flux.load(path, learn_init=True)
    assert list(named_params(model))[3:] == ["init.h", "init.c"]
    close(model.init.c, layer.start[1].reshape(-1, 1))


def test_the_layout_is_that_of_flux_0_15_on_request(save, rng):
    layer = Layer("GRU", 3, 4, rng, start=False)
    path = save(m=layer.layer("0.16"))
    X = draw(rng, 3, 5, 2)  # (features, time, batch)
    wanted = np.stack(layer.outputs([X[:, t] for t in range(5)], layer.columns(2)), 1)
    close(flux.load(path, layout="ftb")(X), wanted)
    close(flux.load(path)(X.swapaxes(1, 2)), wanted.swapaxes(1, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_of_false_is_no_bias(kind, save, rng):
    layer = Layer(kind, 3, 4, rng)
    layer.b = False
    model = flux.load(save(m=layer.layer("0.14")))
    assert model.cell.b is None
    model = flux.load(save("jld2 0.1.1", m=layer.tree("0.14")), functions=_tanh(kind, "cell.act"))
    assert model.cell.b is None


def _tanh(kind, *places):
    return {place: ops.tanh for place in places} if kind == "RNN" else {}


def test_layers_that_share_a_cell_or_an_array_share_it_here(save, rng):
    layer = Layer("GRU", 3, 3, rng)
    cell = layer.cell("0.14")
    recurs = [
        S(T("Flux.Recur", (cell.type,)), {"cell": cell, "state": layer.state()}, True) for _ in "ab"
    ]
    W = draw(rng, 3, 3)
    tied = [dense(W, draw(rng, 3), fn("Base.identity")) for _ in "ab"]
    model = flux.load(save(m=chain(recurs[0], recurs[1], recurs[0], *tied)))
    assert model[0] is model[2] and model[0] is not model[1]
    assert model[0].cell.Wi is model[1].cell.Wi
    assert model[3].weight is model[4].weight and model[3].bias is not model[4].bias


def test_many_layers_whose_weights_are_cut_out_of_larger_ones_keep_their_own(save, rng):
    layers = [Layer("GRUv3", 3, 3, rng, start=False) for _ in range(8)]
    model = flux.load(save(m=chain(*(layer.layer("0.16") for layer in layers))))
    for layer, ours in zip(layers, model, strict=True):
        close(ours.cell.Wh, layer.Wh)


def test_a_bare_cell_loads_as_a_cell(save, rng):
    layer = Layer("LSTM", 3, 4, rng)
    cell = flux.load(save(m=layer.cell("0.16")))
    x = draw(rng, 3, 2)
    _, y = cell(tuple(layer.columns(2)), x)
    close(y, layer.outputs([x], layer.columns(2))[0])


# ---- the cells of Flux 0.3 and 0.4 -----------------------------------------------------------


def _gate(W, b, act):
    return S(T("Flux.Dense"), {"W": tracked(W), "b": tracked(b), "σ": fn(act)})


def _old_cell(kind, gates, starts):
    acts = {"cell": "Base.tanh", "new": "Base.tanh", "d": "Base.tanh"}
    fields = {n: _gate(W, b, acts.get(n, "NNlib.σ")) for n, (W, b) in gates.items()}
    fields |= {name: tracked(s) for name, s in zip("hc", starts, strict=False)}
    return S(T("Flux.Recur"), {"cell": S(T(f"Flux.{kind}Cell"), fields), "state": 0}, True)


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_a_layer_of_flux_0_4_gives_its_numbers(kind, save, rng):
    names = {"RNN": ["d"], "LSTM": ["forget", "input", "output", "cell"]}.get(
        kind, ["update", "reset", "new"]
    )
    gates = {name: (draw(rng, 4, 7), draw(rng, 4)) for name in names}
    start = [draw(rng, 4) for _ in range(2 if kind == "LSTM" else 1)]
    model = flux.load(save(m=_old_cell(kind, gates, start)))
    assert isinstance(model.cell, GRUv3Cell) or kind != "GRU"

    def gate(name, x, h):
        W, b = gates[name]
        return W @ np.concatenate([x, h]) + b[:, None]

    def s(x):
        return 1 / (1 + np.exp(-x))

    h, *rest = (np.repeat(part[:, None], 2, 1) for part in start)
    for x in steps(rng, 3):
        if kind == "RNN":
            h = np.tanh(gate("d", x, h))
        elif kind == "GRU":
            z, r = s(gate("update", x, h)), s(gate("reset", x, h))
            h = (1 - z) * h + z * np.tanh(gate("new", x, r * h))
        else:
            c = s(gate("forget", x, h)) * rest[0] + s(gate("input", x, h)) * np.tanh(
                gate("cell", x, h)
            )
            h, rest = s(gate("output", x, h)) * np.tanh(c), [c]
        close(model(x), h)


def test_the_gru_of_flux_0_4_becomes_a_gruv3():
    data = Path(__file__).parent / "data" / "flux_0_4_gru.json"
    case = json.loads(data.read_text())
    given = case["given"]
    pair = [(np.array(given[f"W{g}"]), np.array(given[f"b{g}"])) for g in "zrn"]
    cell = flux.gru_from_dense(*pair)
    for name in ("Wi", "Wh", "Whh", "b"):
        np.testing.assert_allclose(getattr(cell, name), case["expect"][name])
    state = np.repeat(np.array(given["h0"])[:, None], 2, 1)
    for x, y in zip(given["xs"], case["expect"]["ys"], strict=True):
        state, got = cell(state, np.array(x))
        np.testing.assert_allclose(got, y, rtol=1e-9)
    with pytest.raises(ShapeError, match="gru_from_dense"):
        flux.gru_from_dense(pair[0], pair[1], (pair[2][0][:, 1:], pair[2][1]))


# ---- Flux.state, lists, Restructure ----------------------------------------------------------


@pytest.mark.parametrize("container", sorted(WRITERS))
@pytest.mark.parametrize("era", ["0.14", "0.16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_tree_builds_the_model_once_its_activations_are_given(
    container, era, kind, save, rng
):
    layer = Layer(kind, 3, 4, rng, start=era != "0.16")
    W, b = draw(rng, 2, 4), draw(rng, 2)
    state = NT(layers=(layer.tree(era), NT(weight=W, bias=b, σ=()), ()))
    path = save(container, model_state=state)
    functions = {"layers.1.act": ops.tanh, "layers.2": np.abs} | _tanh(kind, "layers.0.cell.act")
    with pytest.raises(FormatError, match=r"layers\.1\.act: the file does not hold this function"):
        flux.load(path)
    model = flux.load(path, functions=functions)
    xs = steps(rng, 3)
    for x, y in zip(xs, layer.outputs(xs, layer.columns(2)), strict=True):
        close(model(x), np.abs(np.tanh(W @ y + b[:, None])))


def test_leaves_that_an_early_state_tree_marks_as_missing_are_asked_for(save, rng):
    missing = S(T("Base.Missing"))
    state = NT(layers=(NT(weight=draw(rng, 2, 3), bias=draw(rng, 2), σ=missing),))
    with pytest.raises(FormatError, match=r"layers\.0\.act"):
        flux.load(save(s=state))


def _lists(arrays, form):
    if form == "list":
        return list(arrays)
    buffer = S(T("Zygote.Buffer"), {"data": list(arrays), "freeze": False}, True)
    if form == "Zygote.Params":
        return S(T("Zygote.Params"), {"order": buffer, "params": S(T("Zygote.IdSet"))}, True)
    return S(T("Tracker.Params"), {"order": list(arrays), "params": S(T("Tracker.IdSet"))}, True)


@pytest.mark.parametrize("form", ["list", "Zygote.Params", "Tracker.Params"])
@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_parameters_builds_and_fills_the_model(form, era, kind, save, rng):
    if not has(kind, era):
        return
    layer = Layer(kind, 3, 4, rng, start=era != "0.16")
    W, b = draw(rng, 2, 4), draw(rng, 2)
    path = save(weights=_lists([*layer.parameters(era), W, b], form))
    xs = steps(rng, 3)
    wanted = [np.tanh(W @ y + b[:, None]) for y in layer.outputs(xs, layer.columns(2))]
    functions = {"layers.1.act": ops.tanh} | _tanh(kind, "layers.0.cell.act")
    made = {"RNN": RNN, "LSTM": LSTM, "GRU": GRU, "GRUv3": GRUv3}[kind](3, 4)
    for model in (
        flux.load(path, functions=functions),
        flux.load_into(Chain(made, Dense(4, 2, ops.tanh)), path),
    ):
        for x, y in zip(xs, wanted, strict=True):
            close(model(x), y)


def test_a_list_whose_sizes_leave_a_choice_is_refused(save, rng):
    path = save(weights=[draw(rng, 4, 3), draw(rng, 5)])
    with pytest.raises(FormatError, match=r"Array 0 and those after it do not tell.*load_into"):
        flux.load(path)
    with pytest.raises(FormatError, match="a list of 2 arrays; the model has 3"):
        flux.load_into(LSTM(3, 4), path)


def test_a_list_whose_layers_do_not_follow_each_other_is_refused(save, rng):
    shapes = ((4, 2), (4,), (3, 4), (3,), (4, 2), (4,), (1, 4), (1,))  # two heads on one trunk
    path = save(weights=[draw(rng, *shape) for shape in shapes])
    with pytest.raises(FormatError, match="Array 4 takes 2 features, and the layer before gives 3"):
        flux.load(path)


def test_a_restructure_takes_its_parameters_from_the_flat_vector(save, rng):
    layer = Layer("LSTM", 3, 4, rng)
    W, b = draw(rng, 2, 4), draw(rng, 2)
    model = chain(layer.layer("0.14"), dense(W, b, fn("Base.tanh")))
    arrays = [layer.Wi, layer.Wh, layer.b, *layer.state0("0.14"), W, b]
    ends = np.cumsum([a.size for a in arrays]).tolist()
    at = [0, *ends[:-1]]
    cell = NT(Wi=at[0], Wh=at[1], b=at[2], state0=(at[3], at[4]))
    offsets = NT(layers=(NT(cell=cell), NT(weight=at[5], bias=at[6], σ=())))
    flat = draw(rng, ends[-1])
    kind = T("Optimisers.Restructure", (model.type, type_of(offsets)))
    re = S(kind, {"model": model, "offsets": offsets, "length": ends[-1]})
    for container in ("bson", "jld2 0.1.1"):
        loaded = flux.load(save(container, flat=flat, re=re))
        new = [
            flat[i : i + a.size].reshape(a.shape, order="F")
            for i, a in zip(at, arrays, strict=True)
        ]
        close(loaded[0].cell.Wh, new[1])
        close(loaded[0].init.c, new[4])
        close(loaded[1].weight, new[5])
    with pytest.raises(FormatError, match="no such vectors"):
        flux.load(save(re=re))


# ---- other layers ----------------------------------------------------------------------------


@pytest.mark.parametrize("container", ["bson", "jld2 0.1.1", "jld2 0.2.0"])
@pytest.mark.parametrize(
    "name", ["identity", "relu", "σ", "tanh_fast", "leakyrelu", "gelu", "swish"]
)
def test_activations_are_found_by_name(container, name, save, rng):
    module = "Base" if name == "identity" else "NNlib"
    W = draw(rng, 2, 3)
    model = flux.load(save(container, m=dense(W, False, fn(f"{module}.{name}"))))
    ours = {"σ": ops.sigmoid, "tanh_fast": ops.tanh}.get(name) or ops.activation(name)
    x = draw(rng, 3)
    close(model(x), ours(W @ x))


@pytest.mark.parametrize("container", ["bson", "jld2 0.1.1", "jld2 0.2.0"])
def test_functions_stand_in_chains_of_tuples_vectors_and_names(container, save, rng):
    W = draw(rng, 2, 3)
    layers = [dense(W, False, fn("Base.identity")), fn("NNlib.softmax")]
    x = draw(rng, 3)
    wanted = ops.softmax(W @ x)
    for held in (tuple(layers), layers, NT(encoder=layers[0], head=layers[1])):
        model = S(T("Flux.Chain", (type_of(held),)), {"layers": held})
        loaded = flux.load(save(container, m=model))
        close(loaded(x), wanted)
    assert loaded["head"] is ops.softmax


def test_embedding_dropout_parallel_and_skip_connection(save, rng):
    table = draw(rng, 3, 7)
    drop = S(T("Flux.Dropout"), {"p": 0.25, "dims": S(T("Base.Colon")), "active": None}, True)
    W = draw(rng, 3, 3)
    inner = dense(W, False, fn("Base.identity"))
    branch = (inner, fn("Base.identity"))
    parallel = S(
        T("Flux.Parallel", (fn("Base.vcat").type,)),
        {"connection": fn("Base.vcat"), "layers": branch},
    )
    skip = S(T("Flux.SkipConnection"), {"layers": inner, "connection": fn("Base.+")})
    embed = S(T("Flux.Embedding", (type_of(table),)), {"weight": table})
    model = flux.load(save(m=chain(embed, drop, skip, parallel)))
    assert isinstance(model[1], Dropout) and model[1].p == 0.25 and model[1].dims is None
    index = np.array([6, 0])
    y = table[:, index]
    y = W @ y + y
    close(model(index), np.concatenate([W @ y, y]))


@pytest.mark.parametrize(("dims", "ours"), [(1, (0,)), ((1, 2), (0, 1))])
def test_dropout_dims_count_from_zero_here(dims, ours, save):
    drop = S(T("Flux.Dropout"), {"p": 0.5, "dims": dims, "active": True, "rng": None}, True)
    layer = flux.load(save(m=drop))
    assert layer.dims == ours and layer.active is True


def test_layer_norm_and_scale(save, rng):
    scale, bias = draw(rng, 4), draw(rng, 4)
    diag = S(T("Flux.Scale"), {"scale": scale, "bias": bias, "σ": fn("NNlib.relu")})
    norm = S(
        T("Flux.LayerNorm"),
        {"λ": fn("NNlib.relu"), "diag": diag, "ϵ": np.float32(1e-5), "size": (4,), "affine": True},
    )
    x = draw(rng, 4, 5)
    normal = (x - x.mean(0)) / x.std(0)
    model = flux.load(save(m=norm))
    np.testing.assert_allclose(
        model(x), np.maximum(normal * scale[:, None] + bias[:, None], 0), rtol=1e-3, atol=1e-4
    )
    assert isinstance(model, LayerNorm)
    close(flux.load(save(m=diag))(x), np.maximum(x * scale[:, None] + bias[:, None], 0))
    old = S(T("Flux.LayerNorm"), {"diag": S(T("Flux.Diagonal"), {"α": scale, "β": bias})})
    with pytest.raises(FormatError, match=r"LayerNorm of Flux 0\.11"):
        flux.load(save(m=old))


@pytest.mark.parametrize("container", ["bson", "jld2 0.1.1", "jld2 0.2.0"])
@pytest.mark.parametrize("era", ["0.10", "0.14"])
def test_batch_norm_uses_its_running_statistics(container, era, save, rng):
    β, γ, μ, σ2 = draw(rng, 4), draw(rng, 4), draw(rng, 4), np.abs(draw(rng, 4)) + 1
    fields = {"λ": fn("NNlib.relu"), "β": β, "γ": γ, "μ": μ, "σ²": σ2, "ϵ": np.float32(1e-5)}
    fields["momentum"] = np.float32(0.1)
    if era == "0.14":
        fields |= {"affine": True, "track_stats": True, "active": None, "chs": 4}
    else:
        fields["active"] = None
    kinds = tuple(map(type_of, (fields["λ"], β, μ, np.float32(0))))
    model = testmode(flux.load(save(container, m=S(T("Flux.BatchNorm", kinds), fields, True))))
    x = draw(rng, 4, 3)
    column = (slice(None), None)
    wanted = γ[column] * (x - μ[column]) / np.sqrt(σ2[column] + 1e-5) + β[column]
    close(model(x), np.maximum(wanted, 0))


def test_a_batch_norm_of_different_sizes_is_refused(save, rng):
    fields = {"λ": fn("Base.identity"), "β": draw(rng, 4), "γ": draw(rng, 4), "μ": draw(rng, 1)}
    fields |= {"σ²": draw(rng, 4), "ϵ": 1e-5, "momentum": 0.1, "active": None}
    kind = T("Flux.BatchNorm", tuple(T(f"Core.{n}") for n in ("A", "B", "C", "D")))
    with pytest.raises(FormatError, match="different sizes"):
        flux.load(save(m=S(kind, fields, True)))


def test_what_cannot_be_built_is_listed_place_by_place(save, rng):
    anonymous = {"tag": "jl_anonymous", "typename": None, "params": []}
    doc = Bson().document(
        {"m": chain(dense(draw(rng, 2, 3), False, fn("Base.sin")), 1, fn("Main.f"))}
    )
    layers = doc["m"]["data"][0]["data"]
    layers[1] = {"tag": "struct", "type": anonymous, "data": []}
    layers.append(Bson().lower(S(T("Main.Mine"), {"x": 1})))
    path = save()
    path.write_bytes(bson_bytes(doc))
    with pytest.raises(FormatError) as error:
        flux.load(path)
    for line in (
        "layers.0.act: the function Base.sin",
        "layers.1: an anonymous function",
        "layers.2: the function f",
        "layers.3: a Mine, which is not one of Flux's layers",
    ):
        assert line in str(error.value)
    assert str(path) in str(error.value)
    functions = {"layers.0.act": np.sin, "layers.1": np.abs, "layers.2": np.sqrt}
    model = flux.load(path, functions=functions | {"layers.3": np.negative})
    assert [*model][1:] == [np.abs, np.sqrt, np.negative]
    with pytest.raises(FormatError, match=r"functions= names 'layers\.9'"):
        flux.load(path, functions=functions | {"layers.3": np.abs, "layers.9": np.abs})


def test_a_cell_of_the_users_own_can_be_given(save):
    start = np.ones(2, "f4")
    cell = S(T("Main.MyCell"), {"w": 2})
    recur = S(T("Flux.Recur"), {"cell": cell, "init": start, "state": start}, True)
    path = save(m=recur)
    with pytest.raises(FormatError, match="its cell is a MyCell"):
        flux.load(path)
    model = flux.load(path, functions={"cell": lambda state, x: (state + x, 2 * state)})
    assert model(np.zeros(2)).tolist() == [2, 2]


def test_a_struct_named_like_a_layer_of_flux_is_not_taken_for_one(save):
    path = save(m=S(T("Main.LSTM"), {"cell": 1}))
    with pytest.raises(FormatError, match="a LSTM, which is not one of Flux's layers"):
        flux.load(path)


@pytest.mark.parametrize("count", [0, 1, 4, 7])
@pytest.mark.parametrize("kind", [*sorted(values.RECURRENT), *values.CELLS, "Chain", "Dense"])
def test_a_layer_with_an_unknown_number_of_fields_is_refused(kind, count, save):
    """Found by a fuzzer: a Recur of no known version, inside another value."""
    layer = S(T(f"Flux.{kind}"), {str(i): i for i in range(count)}, True)
    path = save(m=S(T("Main.Mine"), {"inner": layer}))
    for name in (None, "m", "m.0"):
        with pytest.raises(FormatError):
            flux.load(path, name)
    assert "load builds nothing" in flux.describe(path)


def test_a_model_nested_too_deeply_is_refused(save, rng, request):
    request.addfinalizer(partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(5000)  # for the writer
    model = dense(draw(rng, 2, 2), False, fn("Base.tanh"))
    for _ in range(150):
        model = S(T("Flux.Chain"), {"layers": (model,)})
    with pytest.raises(FormatError, match="nest too deeply"):
        flux.load(save(m=model))


def test_a_model_shared_fifty_times_over_is_built_once(save, rng):
    model = dense(draw(rng, 2, 2), False, fn("Base.tanh"))
    for _ in range(50):
        model = S(T("Flux.Chain"), {"layers": [model, model]}, True)
    loaded = flux.load(save(m=model))
    assert loaded[0] is loaded[1] and len(params(loaded)) == 1


# ---- which variable --------------------------------------------------------------------------


def test_the_model_is_found_beside_optimiser_state_and_other_values(save, rng):
    W = draw(rng, 2, 3)
    adam = S(
        T("Flux.Optimise.ADAM"), {"eta": 0.1, "state": S(T("Base.IdDict"), {"k": [W], "v": [1]})}
    )
    model = chain(dense(W, False, fn("Base.tanh")))
    path = save(opt=adam, model=model, epoch=3, losses=[1.0, 2.0], history=draw(rng, 9))
    assert isinstance(flux.load(path), Chain)


def test_several_models_are_told_apart_by_name_and_parts_by_path(save, rng):
    encoder, decoder = (chain(dense(draw(rng, 2, n), False, fn("Base.tanh"))) for n in (3, 4))
    path = save("jld2 0.1.1", encoder=encoder, decoder=decoder, best={"model": encoder})
    with pytest.raises(FormatError, match=r"several models: encoder, decoder, best\.model"):
        flux.load(path)
    assert flux.load(path, "decoder")[0].weight.shape == (2, 4)
    assert flux.load(path, "best/model")[0].weight.shape == (2, 3)
    assert isinstance(flux.load(path, "encoder.layers.0"), Dense)
    with pytest.raises(FormatError, match="nothing named 'nine' in encoder, which holds layers"):
        flux.load(path, "encoder.nine")


def test_a_file_without_a_model_says_what_it_holds(save, rng):
    with pytest.raises(FormatError, match=r"no variable of the file is a model.*x \(an array"):
        flux.load(save(x=draw(rng, 2, 2), note="hello"))


# ---- load_into -------------------------------------------------------------------------------


class Net(Module):
    def __init__(self):
        self.encoder = LSTM(3, 4)
        self.head = [Dense(4, 2), ops.relu]
        self.scale = Param(np.ones(2))


@pytest.mark.parametrize("container", ["bson", "jld2 0.1.1"])
@pytest.mark.parametrize("source", ["names", "positions", "dict"])
def test_load_into_fills_a_class_of_the_users_own(container, source, save, rng):
    layer = Layer("LSTM", 3, 4, rng)
    W, b, scale = draw(rng, 2, 4), draw(rng, 2), draw(rng, 2)
    parts = {
        "encoder": layer.tree("0.14"),
        "head": (NT(weight=W, bias=b, σ=()), ()),
        "scale": scale,
    }
    value = NT(parts) if source == "names" else S(T("Main.Net"), parts)
    if source == "dict":
        value = S(T("Base.Dict"), {"k": [Sym(k) for k in parts], "v": list(parts.values())})
        container = "bson"
    net = flux.load_into(Net(), save(container, model=value, other=1), name="model")
    close(net.encoder.cell.Wh, layer.Wh)
    close(net.encoder.init.c, layer.start[1])
    close(net.head[0].weight, W)
    close(net.scale, scale)


def test_load_into_takes_a_whole_model_and_resumes(save, rng):
    layer = Layer("GRU", 3, 4, rng)
    W, b = draw(rng, 2, 4), draw(rng, 2)
    path = save(m=chain(layer.layer("0.11"), dense(W, b, fn("Base.tanh"), "0.11")))
    model = flux.load_into(Chain(GRU(3, 4), Dense(4, 2, ops.tanh)), path, resume=True)
    xs = steps(rng, 3)
    for x, y in zip(xs, layer.outputs(xs, layer.running), strict=True):
        close(model(x), np.tanh(W @ y + b[:, None]))


def test_load_into_sets_a_missing_start_and_a_missing_bias_to_zero(save, rng):
    layer = Layer("LSTM", 3, 4, rng)
    layer.b = False
    model = LSTM(3, 4, learn_init=True, init_state=ops_ones)
    flux.load_into(model, save(m=layer.tree("0.16")))
    assert not np.any(model.init.h) and not np.any(model.cell.b)


def ops_ones(*shape, **_):
    return np.ones(shape, "f4")


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (lambda: LSTM(3, 5), ShapeError),
        (lambda: GRU(3, 4), RecurError),
        (lambda: Dense(3, 4), FormatError),
        (lambda: Chain(LSTM(3, 4), Dense(4, 2)), FormatError),
    ],
)
def test_load_into_another_model_changes_nothing(model, error, save, rng):
    model = model()
    before = state_dict(model)
    with pytest.raises(error, match="Nothing was changed"):
        flux.load_into(model, save(m=Layer("LSTM", 3, 4, rng).tree("0.14")))
    for path, value in state_dict(model).items():
        np.testing.assert_array_equal(value, before[path])


# ---- save_npz --------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.14", "0.16"])
def test_npz_has_the_names_and_the_order_of_flux_state(version, tmp_path, rng):
    model = Chain(LSTM(3, 4), GRUv3(4, 4), Dense(4, 2, bias=False), Embedding(5, 2))
    path = tmp_path / "m.npz"
    flux.save_npz(model, path, flux=version)
    saved = np.load(path)
    bias = "bias" if version == "0.16" else "b"
    names = {f"layers.1.cell.{n}" for n in ("Wi", "Wh", bias)}
    names |= {f"layers.2.cell.{n}" for n in ("Wi", "Wh", "b", "Wh_h̃")}
    names |= {"layers.3.weight", "layers.4.weight"}
    if version == "0.14":
        names |= {"layers.1.cell.state0.1", "layers.1.cell.state0.2", "layers.2.cell.state0"}
    assert set(saved) == names
    np.testing.assert_array_equal(saved["layers.1.cell.Wi"], model[0].cell.Wi.value)
    assert saved["layers.1.cell.Wi"].flags.f_contiguous
    rows = 12 if version == "0.16" else 8
    assert saved["layers.2.cell.Wh"].shape == (rows, 4)


def test_npz_fills_a_model_again_through_a_state_tree(tmp_path, save, rng):
    """What Julia does with the file: put each array where its name says."""
    model = Chain(GRU(3, 4), Dense(4, 2, ops.tanh))
    flux.save_npz(model, tmp_path / "m.npz", flux="0.16")
    w = np.load(tmp_path / "m.npz")
    tree = NT(
        layers=(
            NT(cell=NT({n: w[f"layers.1.cell.{n}"] for n in ("Wi", "Wh", "b")})),
            NT(weight=w["layers.2.weight"], bias=w["layers.2.bias"], σ=()),
        )
    )
    again = flux.load(save("jld2 0.2.0", s=tree), functions={"layers.1.act": ops.tanh})
    x = draw(rng, 3, 2)
    np.testing.assert_array_equal(again(x), model(x))


def test_npz_refuses_what_flux_cannot_hold(tmp_path):
    path = tmp_path / "m.npz"
    inner = GRU(3, 4, recurrent_bias=True)
    inner.cell.bh[...] = 1
    started = LSTM(3, 4, init_state=ops_ones)
    for model, word in (
        (inner, "bh"),
        (LSTM(3, 4, gate_act="hard_sigmoid"), "hard_sigmoid"),
        (started, "initial state"),
    ):
        with pytest.raises(StateError, match=word):
            flux.save_npz(model, path)
    with pytest.raises(ValueError, match="version"):
        flux.save_npz(started, path, flux="latest")
    assert not path.exists()
    flux.save_npz(started, path, flux="0.14")
    assert np.load(path)["cell.state0.2"].shape == (4, 1)


# ---- describe --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("era", "kind", "told"),
    [
        ("0.8", "LSTM", "Flux 0.5.0 to 0.9.0"),
        ("0.11", "LSTM", "Flux 0.5.0 to 0.11.6"),
        ("0.11", "GRU", "Flux 0.5.0 to 0.11.6"),
        ("0.12", "RNN", "Flux 0.12.0 to 0.13.6"),
        ("0.12", "GRU", "Flux 0.12.0 to 0.13.6"),
        ("0.14", "GRUv3", "Flux 0.13.7 to 0.14.25"),
        ("0.14", "LSTM", "Flux 0.13.7 to 0.14.25"),
        ("0.16", "LSTM", "Flux 0.16.1 and later"),
    ],
)
@pytest.mark.parametrize("container", ["bson", "jld2 0.1.1"])
def test_describe_tells_which_flux_wrote_a_model(era, kind, told, container, save, rng):
    text = flux.describe(save(container, m=Layer(kind, 3, 4, rng).layer(era)))
    assert f"written by: {told}" in text
    assert f"load builds: Recur({kind}Cell(3 => 4" in text


def test_describe_shows_the_tree_with_what_is_shared_and_what_is_missing(save, rng):
    W = draw(rng, 2, 3)
    layer = dense(W, False, fn("Main.f"))
    text = flux.describe(save(m=chain(layer), again=W, note="hello"))
    assert "    0: Flux.Dense\n      weight: float32 (2, 3)\n      bias: False" in text
    assert "again: the same as m.layers.0.weight" in text and "note: 'hello'" in text
    assert "layers.0.act: the function f, which has no namesake here" in text
    tree = NT(layers=(Layer("GRU", 3, 4, rng).tree("0.14"),))
    assert "Flux 0.13.15 to 0.14.25" in flux.describe(save("jld2 0.1.1", s=tree))


def test_describe_stays_short_and_ends_on_cycles(save):
    node = S(T("Main.Node"), {"many": [S(T("Main.A"), {"i": i}) for i in range(5000)]}, True)
    node.fields["me"] = node
    lines = flux.describe(save(n=node)).splitlines()
    assert len(lines) < 420


# ---- files of other kinds --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (b"7JL\x0b", r"serialize.*jldsave\("),
        (b"Julia data file (HDF5), version 0.1.1\0", r"old \.jld.*jldsave\("),
        (b"\x89HDF\r\n\x1a\n", r"plain HDF5.*jldsave\("),
        (b"PK\x03\x04", "zip archive"),
        (b"\x93NUMPY", r"numpy\.load"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"", "empty"),
        (b"hello world, this is text", "complete BSON file"),
    ],
)
def test_other_kinds_of_file_are_refused_with_what_they_are_and_what_to_do(start, reason, tmp_path):
    path = tmp_path / "m.bson"
    path.write_bytes(start + bytes(600) if start[:4] not in (b"", b"hell") else start)
    with pytest.raises(FormatError, match=rf"(?s)m\.bson: .*{reason}"):
        flux.read(path)


def test_a_file_of_jlso_is_refused(save):
    path = save(
        metadata={"compression": Sym("gzip"), "version": "1"}, objects={"m": b""[:0] or "x"}
    )
    with pytest.raises(FormatError, match=r"JLSO.*jldsave\("):
        flux.read(path)


@pytest.mark.parametrize("container", ["bson", "jld2 0.1.1"])
def test_arrays_on_a_gpu_are_refused_with_the_reason(container, save):
    gpu = S(T("CUDA.CuArray", (T("Core.Float32"), 2)), {"storage": 1, "dims": (2, 2)}, True)
    path = save(container, m=S(T("Flux.Dense"), {"weight": gpu, "bias": False, "σ": ()}))
    with pytest.raises(FormatError, match=r"CuArray: it was saved from a GPU.*cpu\(model\)"):
        flux.read(path)


def test_a_file_that_is_not_there_raises_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        flux.read(tmp_path / "none.bson")


def test_loading_a_large_model_takes_twice_its_memory(save, rng):
    W = np.zeros((1000, 600), "f4", order="F")
    layers = [Layer("LSTM", 600, 600, rng, start=False).layer("0.16") for _ in range(2)]
    path = save(m=chain(*layers, *(dense(W + i, False, fn("Base.tanh")) for i in range(2))))
    size = path.stat().st_size
    tracemalloc.start()
    model = flux.load(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(params(model)) == 8
    assert peak < 2.2 * size


# ---- real files ------------------------------------------------------------------------------


@pytest.mark.skipif(not REAL.exists(), reason="the real files are not here")
def test_real_models_load():
    model = flux.load(REAL / "flux_docs_mymodel.bson")
    assert repr(model) == "Chain(Dense(10 => 5, relu), Dense(5 => 2), softmax)"
    x = np.linspace(-1, 1, 10, dtype="f4")
    W1, b1, W2, b2 = (np.array(p.value) for p in params(model))
    close(model(x), ops.softmax(W2 @ np.maximum(W1 @ x + b1, 0) + b2))
    assert repr(flux.load(REAL / "mcreel_tracker_dense.bson")).count("Dense") == 3
    lists = flux.load_into(
        [*(Dense(a, b) for a, b in ((2, 32), (32, 4), (2, 32), (32, 1)))],
        REAL / "deepcorrections_weightlist.bson",
    )
    assert np.any(lists[3].bias.value)


@pytest.mark.skipif(not REAL.exists(), reason="the real files are not here")
def test_the_lstm_inside_a_real_model_streams(rng):
    path = REAL / "dnc_lstm_flux010.bson"
    with pytest.raises(FormatError, match=r"(?s)DNC\.DNCCell.*name='model\.cell\.0'"):
        flux.load(path)
    model = flux.load(path, "model.cell.0", resume=True)
    stored = flux.read(path)["model"]["cell"][0]
    cell = stored["cell"]
    layer = Layer("LSTM", 8, 27, rng)
    layer.Wi, layer.Wh, layer.b = (cell[n] for n in ("Wi", "Wh", "b"))
    xs = [draw(rng, 8, 1) for _ in range(4)]
    for x, y in zip(xs, layer.outputs(xs, [s[:, None] for s in stored["state"]]), strict=True):
        close(model(x[:, 0]), y[:, 0])


@pytest.mark.skipif(not REAL.exists(), reason="the real files are not here")
def test_every_real_file_can_be_described():
    for path in sorted([*REAL.glob("*.bson"), *REAL.glob("*.jld2")]):
        text = flux.describe(path)
        assert "load builds" in text


# What stands in the way of `recur convert`; the other files become models.
NOT_CONVERTED = {
    "bsonjl_test": "no variable of the file is a model of Flux",
    "bsonjl_test_41_from_32bit": "no variable of the file is a model of Flux",
    "bsonjl_test_41_from_64bit": "no variable of the file is a model of Flux",
    "bsonjl_test_MultiDimsArray_from_64bit": "no variable of the file is a model of Flux",
    "flux_xy_arrays": "no variable of the file is a model of Flux: x (an array of float32",
    "deepcorrections_weightlist": "Array 4 takes 2 features, and the layer before gives 4",
    "dnc_lstm_flux010": "its cell is a DNC.DNCCell, which is none of Flux's own",
    "flux_docs_checkpoint_state": "layers.0.act: the file does not hold this function",
    "seq2seq_letter_model": "a seq2seq, which is not one of Flux's layers",
    "seq2seq_model": "a seq2seq, which is not one of Flux's layers",
}


@pytest.mark.skipif(not REAL.exists(), reason="the real files are not here")
def test_the_command_shows_every_real_file_and_converts_it_or_says_why_not(tmp_path, capsys):
    converted = []
    for path in sorted([*REAL.glob("*.bson"), *REAL.glob("*.jld2")]):
        assert main(["info", str(path)]) == 0
        assert "load builds" in capsys.readouterr().out
        target = tmp_path / f"{path.stem}.safetensors"
        code = main(["convert", str(path), str(target)])
        out, err = capsys.readouterr()
        if path.stem in NOT_CONVERTED:
            assert (code, out) == (1, "") and NOT_CONVERTED[path.stem] in err
            assert not target.exists()
        else:
            assert (code, err) == (0, "") and out.startswith(f"{target}: Chain(Dense(")
            model = flux.load(path)
            x = np.linspace(-1, 1, model[0].weight.shape[1], dtype="f4")
            np.testing.assert_array_equal(load(target)(x), model(x))
            converted.append(path.stem)
    assert converted == ["flux_docs_mymodel", "mcreel_tracker_dense"]


@pytest.mark.skipif(not REAL.exists(), reason="the real files are not here")
@pytest.mark.parametrize(
    ("file", "options", "built"),
    [
        ("dnc_lstm_flux010", ["--name", "model.cell.0", "--resume"], "Recur(LSTMCell(8 => 27))"),
        (
            "flux_docs_checkpoint_state",
            ["--act", "layers.0.act=relu", "--act", "layers.1.act=identity"],
            "Chain(Dense(1 => 2, relu), Dense(2 => 1))",
        ),
    ],
)
def test_what_a_real_file_lacks_is_given_to_convert(file, options, built, tmp_path, capsys):
    target = tmp_path / "model.safetensors"
    assert main(["convert", str(REAL / f"{file}.bson"), str(target), *options]) == 0
    assert capsys.readouterr().out == f"{target}: {built}\n"
    assert repr(load(target)) == built


# ---- damaged files ---------------------------------------------------------------------------


def sample(container: str) -> bytes:
    """A model file with most kinds of layer."""
    rng = np.random.default_rng(0)
    layers = [Layer(kind, 3, 3, rng).layer("0.14") for kind in KINDS]
    W, b = draw(rng, 3, 3), draw(rng, 3)
    diag = S(T("Flux.Scale"), {"scale": b, "bias": b, "σ": fn("NNlib.relu")})
    norm = {
        "λ": fn("NNlib.relu"),
        "diag": diag,
        "ϵ": np.float32(1e-5),
        "size": (3,),
        "affine": True,
    }
    skip = {"layers": dense(W, False, fn("Base.identity")), "connection": fn("Base.+")}
    drop = {"p": 0.25, "dims": S(T("Base.Colon")), "active": None, "rng": None}
    layers += [
        S(T("Flux.LayerNorm", (fn("NNlib.relu").type,)), norm),
        S(T("Flux.SkipConnection", (T("Flux.Dense"), fn("Base.+").type)), skip),
        S(T("Flux.Dropout"), drop, True),
        S(T("Flux.Embedding"), {"weight": W}),
    ]
    tree = NT(layers=(Layer("LSTM", 3, 4, rng).tree("0.14"), NT(weight=W, bias=b, σ=())))
    return WRITERS[container]({"model": chain(*layers), "state": tree, "list": [W, b]})


@settings(max_examples=60)
@given(container=st.sampled_from(["bson", "jld2 0.1.1", "jld2 0.2.0"]), data=st.data())
def test_mutated_model_files_raise_nothing_but_format_errors(container, data, tmp_path_factory):
    file = bytearray(SAMPLES[container])
    start = 512 if container.startswith("jld2") else 4
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(start, len(file) - 1))
        file[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "mutated"
    path.write_bytes(file)
    # Without checksums, so that damage reaches the readers behind them.
    with mock.patch.object(_hdf5, "_CHECKED", 0):
        for name in ("model", "state", "list"):
            with suppress(FormatError):
                flux.load(path, name, resume=True)
        with suppress(FormatError):
            flux.describe(path)


SAMPLES = {container: sample(container) for container in ("bson", "jld2 0.1.1", "jld2 0.2.0")}
