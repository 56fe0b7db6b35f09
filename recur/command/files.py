"""Telling kinds of model files apart."""

from __future__ import annotations

from recur.files import AnyPath


def is_safetensors(path: AnyPath) -> bool:
    """Whether a file starts as a safetensors file does, whatever its name."""
    with open(path, "rb") as file:
        return file.read(9)[8:] == b"{"
