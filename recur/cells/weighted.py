"""`WeightedCell`: a cell whose weights come from a table of shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ClassVar

import numpy as np

from recur.cells.base import Cell
from recur.errors import ShapeError
from recur.module import glorot_uniform, new_param, numeric, zeros
from recur.tape import Param

Initialiser = Callable[..., Any]


class WeightedCell(Cell):
    """A cell with parameters, to be given by its shapes and its equations:

        @recur.register("ResidualCell")
        class ResidualCell(WeightedCell):
            weight_names = ("Wi", "Wh", "b")

            def shapes(self):
                n = self.n_out
                return {"Wi": (n, self.n_in), "Wh": (n, n), "b": (n,)}

            def equations(self, x, h):
                h = h + tanh(affine(self.Wi, x, self.b) + self.Wh @ h)
                return (h,), h

    `optional` names the weights that may be None, `fill` the initialisers of weights that are
    neither matrices nor biases.  Assigning to a weight checks its shape.
    """

    positional: ClassVar[tuple[str, ...]] = ("n_in", "n_out")
    weight_names: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[frozenset[str]] = frozenset({"b"})
    fill: ClassVar[dict[str, Initialiser]] = {}
    Wh: Any
    b: Any

    def __init__(
        self,
        n_in: int,
        n_out: int,
        absent: Collection[str] = (),
        /,
        *,
        init: Initialiser = glorot_uniform,
        recurrent_init: Initialiser | None = None,
        bias: bool = True,
        bias_init: Initialiser = zeros,
        dtype: Any = np.float32,
        rng: np.random.Generator | None = None,
    ) -> None:
        for name, size in (("n_in", n_in), ("n_out", n_out)):
            if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < 1:
                raise ShapeError(
                    f"{type(self).__name__}: {name} is {size!r}, expected a positive integer."
                )
        self.n_in, self.n_out = int(n_in), int(n_out)
        makers = {"Wi": init, "b": bias_init, "bh": bias_init, **self.fill}
        for name, shape in self.shapes().items():
            if name in absent or (name == "b" and not bias):
                object.__setattr__(self, name, None)  # keeps the weights in their order
                continue
            maker = makers.get(name, init if recurrent_init is None else recurrent_init)
            if not callable(maker):
                raise TypeError(
                    f"{self.title}: the initialiser of {name} is a {type(maker).__name__}, "
                    "expected a function such as recur.glorot_uniform. An initial state is given "
                    "as init_state=; weights are assigned once the layer is made."
                )
            param = new_param(f"{self.title}.{name}", maker, shape, rng=rng, dtype=dtype)
            object.__setattr__(self, name, param)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight, present or not, in the order of `weight_names`."""
        raise NotImplementedError

    def __setattr__(self, name: str, new: Any) -> None:
        if name in self.weight_names:
            new = self._weight(name, new)
        super().__setattr__(name, new)

    def _weight(self, name: str, new: Any) -> Any:
        """What may be assigned as weight `name`: its shape is checked, a first array is a Param."""
        if new is None:
            if name in self.optional:
                return None
            raise ShapeError(f"{self.title}.{name} cannot be None. Nothing was changed.")
        if not hasattr(new, "shape"):
            new = numeric(f"{self.title}.{name}", new)
        shape = self.shapes()[name]
        if tuple(new.shape) != shape:
            raise ShapeError(
                f"{self.title}.{name}: the new array has shape {tuple(new.shape)}, expected "
                f"{shape}. Nothing was changed."
            )
        if isinstance(new, np.ndarray) and not self.holds_param(name):
            return Param(new.astype(self.dtype), f"{self.title}.{name}")
        return new

    def describe(self) -> str:
        return f"{type(self).__name__}({self.n_in} => {self.n_out})"

    def config(self) -> dict[str, Any]:
        return {
            "n_in": self.n_in,
            "n_out": self.n_out,
            "bias": self.b is not None,
            "dtype": self.dtype,
        }
