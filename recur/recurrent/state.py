"""What a recurrent state is: `START`, or a tree of tuples, lists and dicts with arrays in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import numpy as np

from recur.cells import begin
from recur.errors import StateError
from recur.tape import Operand, Param, Tensor, current, peek

ThreeWays: TypeAlias = Literal["error", "reset", "broadcast"]


class _Start:
    """The type of `START`, of which there is one object."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "START"

    def __reduce__(self) -> str:
        return "START"


START = _Start()
"""The state of a layer whose next step starts from its initial state, as that then is."""


def map_tree(f: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """`f` applied to every leaf; what is no tuple, list or dict is a leaf."""
    if isinstance(tree, dict):
        return {k: map_tree(f, x, *(o[k] for o in others)) for k, x in tree.items()}
    if isinstance(tree, (tuple, list)):
        made = [map_tree(f, *parts) for parts in zip(tree, *others, strict=True)]
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    return f(tree, *others)


def named_leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, which begins with `name`: init, or init.h and init.c."""
    if isinstance(tree, dict):
        parts = [(str(key), part) for key, part in tree.items()]
    elif isinstance(tree, (tuple, list)):
        parts = [
            (str(key), part)
            for key, part in zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True)
        ]
    else:
        yield name, tree
        return
    for key, part in parts:
        yield from named_leaves(part, f"{name}.{key}")


def renamed(tree: Any, name: str, new: dict[str, Any]) -> Any:
    """A tree of the form of `tree` whose leaves are looked up by path; numbers stay numbers.

    Raises `StateError` if a path is missing or too many.
    """
    paths = [path for path, _ in named_leaves(tree, name)]
    if sorted(paths) != sorted(new):
        raise StateError(
            f"the saved state has the parts {', '.join(sorted(new))}, expected "
            f"{', '.join(sorted(paths))}. Nothing was changed."
        )
    arrays = iter([new[path] for path in paths])

    def leaf(old: Any) -> Any:
        array = np.asarray(next(arrays))
        return np.array(array, order="K") if hasattr(old, "shape") else array[()].item()

    return map_tree(leaf, tree)


def value_of(leaf: Any) -> Any:
    """A leaf without history and in memory of its own."""
    if isinstance(leaf, (Operand, np.ndarray)):
        return np.array(peek(leaf), order="K")
    return leaf


def owned(leaf: Any) -> Any:
    """A leaf that a cell returned, as a state may keep it: recorded, or in memory of its own."""
    if current() is None:
        return value_of(leaf)
    if type(leaf) is Param:
        return begin(leaf, leaf.shape)
    return leaf if type(leaf) is Tensor else value_of(leaf)


def is_recorded(leaf: Any) -> bool:
    return type(leaf) is Tensor and leaf.live


def read_only(leaf: Any) -> Any:
    """A leaf as users get it to read: recorded inside its scope, else a read-only copy."""
    if is_recorded(leaf) and current() is not None:
        return leaf
    leaf = value_of(leaf)
    if isinstance(leaf, np.ndarray):
        leaf.flags.writeable = False
    return leaf
