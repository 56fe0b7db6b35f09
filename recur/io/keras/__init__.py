"""Weights and models of Keras.

`cell_to_keras` and `cell_from_keras` convert one cell's arrays and need NumPy alone.
"""

from __future__ import annotations

from recur.io.keras.cells import cell_from_keras, cell_to_keras

__all__ = ["cell_from_keras", "cell_to_keras"]
