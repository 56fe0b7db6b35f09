"""Weights and models of ONNX.

`cell_to_onnx` and `cell_from_onnx` convert one cell's arrays and need NumPy alone.
"""

from __future__ import annotations

from recur.io.onnx.cells import cell_from_onnx, cell_to_onnx

__all__ = ["cell_from_onnx", "cell_to_onnx"]
