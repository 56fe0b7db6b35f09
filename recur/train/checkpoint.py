"""Checkpoints: all that a training run needs to go on as if it had never stopped, in one file.

The file is a model file (`recur.io.model`) with the recurrent state included, so `recur.load`
opens it.  What training adds lies in arrays named `checkpoint/...` and in one JSON string.  It is
written atomically: a process that is killed leaves the last whole one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from recur.errors import FormatError, StateError
from recur.files import AnyPath
from recur.io import safetensors
from recur.io.model import EXTRA, arrays_of, check_format, header, pack
from recur.module import generator, generators, load_state_dict

_KEY = "checkpoint"


Generators = Mapping[str, np.random.Generator]


def write(
    path: AnyPath,
    model: Any,
    run: Mapping[str, Any],
    own: Generators,
    metadata: Mapping[str, str],
) -> None:
    """Write the model and `run`, a tree of dicts, lists, arrays, numbers and strings.

    With them go the generators: recur's, those of the model's random layers, the caller's `own`.

    A model with layers that are not registered is written without its description: training can
    go on from the file, `recur.load` cannot open it.
    """
    try:
        arrays, notes = pack(model, include_state=True)
    except StateError:
        arrays, notes = arrays_of(model, include_state=True), header(include_state=True)
    tree = {**run, "random": random_state(model, own)}
    text = json.dumps(_take_arrays(tree, EXTRA + "run", arrays), separators=(",", ":"))
    safetensors.write(path, arrays, {**metadata, **notes, _KEY: text})


def read(path: AnyPath) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The model's arrays and the `run` of `write`, with the generators under "random".

    Raises FormatError if the file is damaged or is no checkpoint.
    """
    arrays, metadata = safetensors.read(path)
    check_format(metadata, str(path))
    if _KEY not in metadata:
        raise FormatError(f"{path}: a model file, not a checkpoint. Open it with recur.load.")
    try:
        run = _put_arrays(json.loads(metadata[_KEY]), arrays)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise FormatError(f"{path}: the record of the training run is damaged: {error}") from error
    return {name: a for name, a in arrays.items() if not name.startswith(EXTRA)}, run


def restore(
    model: Any, own: Generators, arrays: Mapping[str, np.ndarray], random: Mapping[str, Any]
) -> None:
    """Load what `read` found into the model and the generators.

    Raises StateError or ShapeError if it belongs to another model; nothing is changed then.
    """
    before = random_state(model, own)
    try:
        load_random_state(model, own, random)
        load_state_dict(model, arrays)
    except BaseException:
        load_random_state(model, own, before)
        raise


def random_state(model: Any, own: Generators) -> dict[str, Any]:
    """Where recur's own generator, those of the model's random layers and `own` stand."""
    return {name: dict(g.bit_generator.state) for name, g in _generators(model, own).items()}


def load_random_state(model: Any, own: Generators, saved: Mapping[str, Any]) -> None:
    """Put the generators back where `random_state` found them.

    Raises StateError if the model's random layers are others, or use another kind of generator.
    """
    held = _generators(model, own)
    if held.keys() != saved.keys():
        raise StateError(
            f"the checkpoint has random generators {sorted(saved)}, the model {sorted(held)}. "
            "Build the model as it was."
        )
    for name, g in held.items():
        kind, wanted = type(g.bit_generator).__name__, saved[name]["bit_generator"]
        if wanted != kind:
            raise StateError(f"{name}: the checkpoint holds a {wanted}, the model a {kind}.")
    for name, g in held.items():
        g.bit_generator.state = dict(saved[name])


def _generators(model: Any, own: Generators) -> dict[str, np.random.Generator]:
    layers = {f"layer {path or 'model'}": g for path, g in generators(model).items()}
    return {"recur": generator(), **layers, **{f"own {name}": g for name, g in own.items()}}


def _take_arrays(tree: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """`tree` as JSON-able data, its arrays moved to `arrays` under names that start with `name`."""
    if isinstance(tree, Mapping):
        if not all(isinstance(key, str) for key in tree):
            raise StateError(f"{name}: a checkpoint holds dicts whose keys are strings.")
        return {key: _take_arrays(part, f"{name}/{key}", arrays) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        return [_take_arrays(part, f"{name}/{i}", arrays) for i, part in enumerate(tree)]
    if isinstance(tree, np.ndarray | np.generic):
        while name in arrays:  # {"a/b": .., "a": {"b": ..}}
            name += "'"
        arrays[name] = np.asarray(tree)
        return {"$array": name}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise StateError(
        f"{name}: a checkpoint cannot hold a {type(tree).__name__}. state_dict() must give arrays, "
        "numbers, strings, dicts and lists."
    )


def _put_arrays(tree: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(tree, dict):
        if "$array" in tree:
            return arrays[tree["$array"]]
        return {key: _put_arrays(part, arrays) for key, part in tree.items()}
    if isinstance(tree, list):
        return [_put_arrays(part, arrays) for part in tree]
    return tree
