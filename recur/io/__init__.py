"""Weights and models of other libraries: one module a file format."""

from __future__ import annotations

import importlib
from types import ModuleType

FORMATS = ("bson", "flux", "jld2", "julia", "keras", "model", "onnx", "safetensors", "torch")


def __getattr__(name: str) -> ModuleType:
    """`recur.io.flux` without an import of its own: a format is imported when it is first used."""
    if name not in FORMATS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *FORMATS})
