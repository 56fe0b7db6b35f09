"""A whole model in one safetensors file: its arrays by path, what it is made of in the metadata.

    format, format_version    "recur", "1"
    recur_version             which recur wrote it
    model                     layers and options as JSON (`recur.module.describe_model`)
    state                     "included" if the arrays hold what recurrent layers carried

Arrays whose name starts with `checkpoint/` belong to a training run and are no part of the model;
`load` passes over them, so a checkpoint is a model file too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from recur._version import __version__
from recur.errors import FormatError, RecurError, StateError
from recur.files import AnyPath
from recur.io import safetensors
from recur.module import Module, build_model, describe_model, label, load_state_dict, state_dict

FORMAT_VERSION = 1
EXTRA = "checkpoint/"
_OWN = {"format", "format_version", "recur_version", "model", "state"}
# A description has some 200 bytes a layer.  Parsed JSON takes a multiple of its text, so this
# bounds the memory that a hostile file can claim.
_DESCRIPTION_LIMIT = 1_000_000
# Parameters that layers share lie in the file once, but are there as often as they are met while
# the model is built.
_SHARING_LIMIT = 4
_SLACK = 1 << 16  # so that a small array that is missing is missed by its name


def save(
    model: Module,
    path: AnyPath,
    include_state: bool = False,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a model to a safetensors file, from which `load` builds it again.

    `include_state` keeps what recurrent layers carry; without it they load at their start.
    `metadata` adds strings of your own.  An old file stays whole until the new one is.

    Raises StateError for a layer that a file cannot describe (register it), ValueError for
    metadata under a name that the format uses.
    """
    if not isinstance(model, Module):
        raise TypeError(
            f"save: {label(model)} is no model that a file can hold, expected a Module such as a "
            "Chain. The model comes first: save(model, path)."
        )
    arrays, notes = pack(model, include_state)
    safetensors.write(path, arrays, {**notes, **own_metadata(metadata)})


def load(path: AnyPath) -> Module:
    """The model that `save` wrote, or that a checkpoint holds.

    Layers of your own must be registered before (`recur.register`).  Builds registered layers and
    copies arrays; nothing in the file is run.

    Raises FormatError if the file is damaged, holds no model, or needs a newer recur or a layer
    that is not registered.
    """
    arrays, metadata = safetensors.read(path)
    return unpack(arrays, metadata, str(path))


def own_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """`metadata` as a dict; raises ValueError if it uses a name of the format's own."""
    taken = _OWN & set(metadata or ())
    if taken:
        raise ValueError(
            f"metadata {sorted(taken)}: these names belong to the format. Rename them."
        )
    return dict(metadata or {})


def pack(model: Module, include_state: bool) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays and the metadata of a model file.  Raises StateError for an unregistered layer."""
    described = describe_model(model)
    arrays = arrays_of(model, include_state)
    held, needed = _memory(described, arrays)
    if needed > _SHARING_LIMIT * held:
        raise StateError(
            f"save: its layers share parameters so often that they would take {needed} bytes "
            f"unshared, more than {_SHARING_LIMIT} times the {held} they are. Share layers instead."
        )
    description = json.dumps(described, separators=(",", ":"))
    if len(description) > _DESCRIPTION_LIMIT:
        raise StateError(
            f"save: the model's description has {len(description)} characters, expected at most "
            f"{_DESCRIPTION_LIMIT}. Save its parts on their own."
        )
    return arrays, {**header(include_state), "model": description}


def header(include_state: bool) -> dict[str, str]:
    """The metadata that every file of this format starts with."""
    start = {"format": "recur", "format_version": str(FORMAT_VERSION)}
    return {
        **start,
        "recur_version": __version__,
        **({"state": "included"} if include_state else {}),
    }


def arrays_of(model: Any, include_state: bool) -> dict[str, np.ndarray]:
    """`state_dict`, refusing a path that would be read back as a part of a checkpoint."""
    arrays = state_dict(model, include_state)
    for path in arrays:
        if path.startswith(EXTRA):
            raise StateError(f"{path}: a name that starts with {EXTRA!r} cannot be saved. Rename.")
    return arrays


def unpack(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str], name: str) -> Module:
    """Build the model of a file named `name`.  Raises FormatError as `load` does."""
    # A file may name their layers, which are registered once they are imported.
    from recur import extra_cells, regularise  # noqa: F401

    check_format(metadata, name)
    own = {path: array for path, array in arrays.items() if not path.startswith(EXTRA)}
    try:
        description = _description(metadata)
        held, needed = _memory(description, own)
        model = build_model(description, min(needed, _SHARING_LIMIT * held) + _SLACK)
        load_state_dict(model, own)
    except RecurError as error:
        raise FormatError(f"{name}: {error}") from error
    return model


def check_format(metadata: Mapping[str, str], name: str) -> None:
    """Raise FormatError unless the metadata is that of a model file this version can read."""
    if metadata.get("format") != "recur":
        raise FormatError(
            f"{name}: a safetensors file, but not one that recur.save wrote. Read its arrays with "
            "recur.io.safetensors.read and fill a model with load_state_dict."
        )
    version = metadata.get("format_version", "")
    if version != str(FORMAT_VERSION):
        raise FormatError(
            f"{name}: format version {version!r}, expected {FORMAT_VERSION}. It was written by "
            f"recur {metadata.get('recur_version', 'unknown')}; this is {__version__}."
        )


def _memory(description: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """The bytes of the arrays, and of the weights before shared ones are shared."""
    held = sum(array.nbytes for array in arrays.values())
    ties = description.get("ties")
    firsts = ties.values() if isinstance(ties, dict) else ()
    shared = [arrays[path] for path in firsts if isinstance(path, str) and path in arrays]
    return held, held + sum(array.nbytes for array in shared)


def _description(metadata: Mapping[str, str]) -> dict[str, Any]:
    text = metadata.get("model")
    if text is None:
        raise FormatError(
            "the file does not say what its model is made of, because a layer was not registered. "
            "Build the model and fill it with load_state_dict, or register it and save again."
        )
    if len(text) > _DESCRIPTION_LIMIT:
        raise FormatError(f"the model's description has {len(text)} characters, too many.")
    try:
        description = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the model's description is damaged: {error}") from None
    if not isinstance(description, dict):
        raise FormatError("the model's description is damaged: it is no object.")
    return description
