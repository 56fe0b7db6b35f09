"""Initial states: given, checked, copied, learned, and described for files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from recur.cells import Cell, as_parts, floats, own_state
from recur.errors import FormatError, ShapeError, StateError
from recur.module import charge
from recur.recurrent.state import map_tree, named_leaves, value_of
from recur.tape import Operand, Param, peek


def own_init(cell: Any, title: str, init: Any) -> Any:
    """A copy of an initial state, checked if the cell is ours; a `Param` in it is shared.

    Parts for our cells are (n,) or (n, 1), as they were given.
    """
    if init is None:
        if not hasattr(cell, "initial_state"):
            raise StateError(
                f"{title}: init= is missing. A cell of your own needs an initial state: a number, "
                "an array, or a tuple of them."
            )
        init = cell.initial_state()
    if not isinstance(cell, Cell):
        return map_tree(lambda x: x if type(x) is Param else value_of(x), init)
    given = tuple(
        part if isinstance(part, Operand) else floats(title, "init", part, cell.dtype)
        for part in as_parts(cell, init)
    )
    shapes = [part.shape for part in given]
    if len(given) == len(cell.state_names):
        for shape, name, n in zip(shapes, cell.state_names, cell.state_sizes, strict=True):
            if shape not in ((n,), (n, 1)):
                raise ShapeError(
                    f"{title}: init {name} has shape {shape}, expected ({n},) or ({n}, 1)."
                )
    arrays = own_state(cell, title, tuple(flat(part) for part in given))
    return cell.wrap(
        tuple(
            part if type(part) is Param else array.reshape(shape)
            for part, array, shape in zip(given, arrays, shapes, strict=True)
        )
    )


def flat(part: Any) -> np.ndarray:
    """The values of a part (n,) or (n, 1) as (n,)."""
    return np.asarray(peek(part)).reshape(-1)


def learned(tree: Any, title: str, learn_init: bool | str | Iterable[str]) -> Any:
    """An initial state with the parts that are to be learned as parameters."""
    paths = [path for path, _ in named_leaves(tree, "init")]
    if isinstance(learn_init, bool):
        wanted = set(paths) if learn_init else set()
    elif not isinstance(learn_init, Iterable):
        raise TypeError(
            f"{title}: learn_init is {learn_init!r}, expected True, False, or the names of parts, "
            'such as ("h",).'
        )
    else:
        names = [learn_init] if isinstance(learn_init, str) else list(learn_init)
        single = paths == ["init"]
        wanted = {"init" if single and name == "h" else f"init.{name}" for name in names}
        if not wanted <= set(paths):
            have = "h" if single else ", ".join(path.removeprefix("init.") for path in paths)
            raise StateError(
                f"{title}: learn_init names {', '.join(map(repr, names))}, the parts of the state "
                f"are {have}."
            )
    order = iter(paths)

    def leaf(x: Any) -> Any:
        path = next(order)
        return Param(x, f"{title}.{path}") if path in wanted and type(x) is not Param else x

    return map_tree(leaf, tree)


def learned_names(tree: Any) -> bool | list[str]:
    """What `learned` was given for this tree."""
    leaves = dict(named_leaves(tree, "init"))
    names = [path.removeprefix("init.") for path, x in leaves.items() if type(x) is Param]
    return len(names) == len(leaves) if len(names) in (0, len(leaves)) else names


def pattern(tree: Any) -> Any:
    """The form of an initial state as data: its numbers, and the shapes of its arrays."""
    if isinstance(tree, tuple):
        return {"tuple": [pattern(part) for part in tree]}
    if isinstance(tree, list):
        return [pattern(part) for part in tree]
    if isinstance(tree, dict):
        return {"dict": {key: pattern(part) for key, part in tree.items()}}
    if hasattr(tree, "shape"):
        return {"zeros": list(tree.shape), "dtype": tree.dtype.name}
    return tree


def from_pattern(form: Any) -> Any:
    """An initial state of that form; its arrays are zeros, to be loaded into."""
    if isinstance(form, list):
        return [from_pattern(part) for part in form]
    if not isinstance(form, dict):
        return form
    if "tuple" in form:
        return tuple(from_pattern(part) for part in form["tuple"])
    if "dict" in form:
        return {key: from_pattern(part) for key, part in form["dict"].items()}
    shape, dtype = tuple(form["zeros"]), np.dtype(form["dtype"])
    if dtype.kind not in "biuf" or min(shape, default=0) < 0:
        raise FormatError(f"an initial state of shape {shape} and dtype {dtype}.")
    charge("init", shape, dtype)
    return np.zeros(shape, dtype)
