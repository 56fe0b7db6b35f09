"""`save` and `load`: a whole model in one file, and only FormatError from bad ones."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recur.errors import FormatError, StateError
from recur.io import safetensors
from recur.io.model import load, pack, save, unpack
from recur.layers import (
    BatchNorm,
    Chain,
    Dense,
    Dropout,
    Embedding,
    LayerNorm,
    Parallel,
    SkipConnection,
)
from recur.module import Module, buffers, named_params, register, state_dict
from recur.ops import relu, tanh
from recur.recurrent import GRU, LSTM, RNN, Bidirectional, GRUv3

MODELS = {
    "rnn": lambda **o: Chain(RNN(3, 4, relu, **o), Dense(4, 2, tanh, **o)),
    "lstm": lambda **o: Chain(LSTM(3, 4, learn_init=True, **o), Dense(4, 2, **o)),
    "peepholes": lambda **o: Chain(LSTM(3, 4, peepholes=True, forget_bias=2.0, **o)),
    "gru": lambda **o: Chain(GRU(3, 4, recurrent_bias=True, **o), Dropout(0.3)),
    "gruv3": lambda **o: Chain(GRUv3(3, 4, init_state=np.arange(4.0), **o)),
    "bidirectional": lambda **o: Chain(Bidirectional(LSTM(3, 4, **o), LSTM(3, 4, **o))),
    "norms": lambda **o: Chain(Dense(3, 4, bias=False, **o), LayerNorm(4, **o), BatchNorm(4, **o)),
    "branches": lambda **o: Parallel(
        "+", SkipConnection(GRU(3, 3, **o), "+"), Chain(a=RNN(3, 3, **o))
    ),
}


def assert_same(found, expected):
    assert repr(found) == repr(expected)
    ours, theirs = state_dict(found, include_state=True), state_dict(expected, include_state=True)
    assert list(ours) == list(theirs)
    for path, array in theirs.items():
        assert ours[path].dtype == array.dtype
        np.testing.assert_array_equal(ours[path], array)


def shaken(model, rng):
    """With numbers everywhere that no constructor gives."""
    for p in named_params(model).values():
        p[...] = rng.standard_normal(p.shape)
    for array in buffers(model).values():
        array[...] = rng.uniform(0.5, 2.0, array.shape)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_whole(tmp_path, rng, dtype, name):
    model = shaken(MODELS[name](dtype=dtype), rng)
    save(model, tmp_path / "m.safetensors")
    again = load(tmp_path / "m.safetensors")
    assert_same(again, model)
    x = rng.standard_normal((3, 2, 5)).astype(dtype)
    expected = model(x)
    found = again(x)
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()


def test_the_running_state_is_left_out_unless_it_is_asked_for(tmp_path, rng):
    model = MODELS["lstm"]()
    x = rng.standard_normal((3, 2)).astype(np.float32)
    model(x)
    save(model, tmp_path / "start")
    save(model, tmp_path / "running", include_state=True)
    assert load(tmp_path / "start").layers[0].at_start
    running = load(tmp_path / "running")
    assert_same(running, model)
    assert running(x).tobytes() == model(x).tobytes()


def test_a_shared_parameter_is_saved_once_and_shared_again(tmp_path):
    first, second = Dense(3, 3), Dense(3, 3)
    second.weight = first.weight
    save(Chain(first, second), tmp_path / "m")
    again = load(tmp_path / "m")
    assert again.layers[1].weight is again.layers[0].weight
    assert sorted(safetensors.read_header(tmp_path / "m").entries) == [
        "layers.0.bias",
        "layers.0.weight",
        "layers.1.bias",
    ]


def test_parameters_shared_too_often_are_refused_before_a_file_is_written(tmp_path):
    layers = [Dense(8, 8, bias=False) for _ in range(5)]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    save(Chain(layers[:4]), tmp_path / "m")
    assert len(load(tmp_path / "m").layers) == 4
    with pytest.raises(StateError, match="Share layers instead"):
        save(Chain(layers), tmp_path / "n")
    save(Chain([layers[0]] * 50), tmp_path / "n")
    assert len(load(tmp_path / "n").layers) == 50


def test_metadata_of_your_own_is_kept(tmp_path):
    save(Dense(2, 2), tmp_path / "m", metadata={"trained on": "prose"})
    assert safetensors.read_header(tmp_path / "m").metadata["trained on"] == "prose"
    with pytest.raises(ValueError, match="format"):
        save(Dense(2, 2), tmp_path / "m", metadata={"format": "mine"})


@pytest.mark.oracle
def test_the_safetensors_package_reads_the_tensors_by_path(tmp_path, rng):
    package = pytest.importorskip("safetensors.numpy")
    model = shaken(MODELS["lstm"](), rng)
    save(model, tmp_path / "m")
    found = package.load_file(tmp_path / "m")
    assert {path: array.tobytes() for path, array in found.items()} == {
        path: p.value.tobytes() for path, p in named_params(model).items()
    }


class Doubling(Module):
    def __call__(self, x):
        return 2 * x

    def config(self):
        return {}


def test_a_layer_of_your_own_is_refused_by_name_until_it_is_registered(tmp_path, monkeypatch):
    model = Chain(Doubling(), Dense(2, 2))
    (tmp_path / "m").write_bytes(b"old")
    with pytest.raises(StateError, match=r"layers\[0\]: Doubling .*register"):
        save(model, tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == b"old"
    monkeypatch.setattr("recur.module.registry._registry", dict(registered()))
    register("Doubling")(Doubling)
    save(model, tmp_path / "m")
    assert type(load(tmp_path / "m").layers[0]) is Doubling
    registered().pop("Doubling")
    with pytest.raises(FormatError, match="'Doubling' that is not registered"):
        load(tmp_path / "m")
    monkeypatch.setattr(Doubling, "kind", None)


def registered() -> dict:
    from recur.module import registry

    return registry._registry


def changed(arrays=None, **metadata) -> tuple[dict, dict]:
    """The file of a small model with parts of it exchanged; None takes a string out."""
    old, notes = pack(Chain(GRU(2, 3), Dense(3, 1)), include_state=False)
    notes = {key: text for key, text in {**notes, **metadata}.items() if text is not None}
    return {**old, **(arrays or {})}, notes


def described(**options) -> str:
    layer = {"$layer": "Dense", "version": 1, "config": {"n_in": 2, "n_out": 2}, **options}
    return json.dumps({"layers": layer, "ties": {}})


BROKEN = {
    "another library's": changed(format="pt"),
    "no metadata": ({"a": np.zeros(3)}, {}),
    "a newer format": changed(format_version="2"),
    "no version": changed(format_version=None),
    "no description": changed(model=None),
    "not JSON": changed(model="{"),
    "a list": changed(model="[]"),
    "deep": changed(model="[" * 100_000),
    "long": changed(model=json.dumps("x" * 2_000_000)),
    "null": changed(model='{"layers":null,"ties":{}}'),
    "an unknown layer": changed(model=described(**{"$layer": "os.system"})),
    "a newer layer": changed(model=described(version=99)),
    "no version of a layer": changed(model=described(version=None)),
    "unknown options": changed(model=described(config={"command": "rm"})),
    "a huge layer": changed(model=described(config={"n_in": 10**6, "n_out": 10**6})),
    "a negative size": changed(model=described(config={"n_in": -2, "n_out": 2})),
    "an unknown function": changed(
        model=described(config={"n_in": 2, "n_out": 2, "act": {"$function": "eval"}})
    ),
    "an array too many": changed({"layers.9.weight": np.zeros((1, 1))}),
    "an array of another shape": changed({"layers.1.bias": np.zeros(7)}),
    "an array of integers too large": changed({"layers.1.bias": np.zeros((1, 1), np.int64)}),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_damaged_or_hostile_model_file_is_a_format_error(tmp_path, content):
    safetensors.write(tmp_path / "m.safetensors", *content)
    with pytest.raises(FormatError, match=r"m\.safetensors: "):
        load(tmp_path / "m.safetensors")


def test_an_array_too_few_is_a_format_error(tmp_path):
    arrays, metadata = changed()
    del arrays["layers.1.bias"]
    safetensors.write(tmp_path / "m", arrays, metadata)
    with pytest.raises(FormatError, match=r"layers\.1\.bias"):
        load(tmp_path / "m")


@given(st.data())
@settings(max_examples=200)
def test_mutated_descriptions_raise_only_format_errors(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("mutated") / "m"
    arrays, metadata = changed()
    text = metadata["model"]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 6))
        text = (
            text[:at] + data.draw(st.text('{}[]",:0123-e.naultrfs$', max_size=4)) + text[at + cut :]
        )
    safetensors.write(path, arrays, {**metadata, "model": text})
    try:
        load(path)
    except FormatError:
        pass


def places(tree, path=()):
    """Where a description holds a number, a truth value or nothing."""
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, part in parts:
        if isinstance(part, dict | list):
            yield from places(part, (*path, key))
        elif not isinstance(part, str):
            yield (*path, key)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("number", [10**9, 10**6, [10**5, 10**5], -1, 2**70])
def test_no_number_in_a_description_claims_memory_that_the_file_does_not_have(name, number):
    arrays, metadata = pack(MODELS[name](), include_state=True)
    for *path, last in places(json.loads(metadata["model"])):
        description = json.loads(metadata["model"])
        place = description
        for key in path:
            place = place[key]
        place[last] = number
        tracemalloc.start()
        try:
            unpack(arrays, {**metadata, "model": json.dumps(description)}, "file")
        except FormatError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 1_000_000, (*path, last)


def test_embedding_and_its_strides_come_back(tmp_path):
    model = Chain(Embedding(7, 3), LSTM(3, 4))
    save(model, tmp_path / "m")
    again = load(tmp_path / "m")
    assert again.layers[0].weight.value.strides == model.layers[0].weight.value.strides
    numbers = np.array([[1, 6, 0]])
    assert again(numbers).tobytes() == model(numbers).tobytes()


def test_saving_with_swapped_arguments_says_which_comes_first(tmp_path):
    with pytest.raises(TypeError, match=r"save\(model, path\)"):
        save(tmp_path / "m.safetensors", Dense(2, 3))
    assert not list(tmp_path.iterdir())
