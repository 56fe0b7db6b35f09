"""An ONNX graph as nodes in a row: what is constant, what is a state, what carries the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from recur.errors import FormatError

RECURRENT = frozenset({"RNN", "LSTM", "GRU"})
_DEEPEST = 100
# What may lie between a state's input and the layer that starts from it, or between the layer and
# the state's output: it moves numbers and changes none.
_MOVES = frozenset(
    {"Identity", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Gather", "Reshape", "Cast", "Split"}
)


class Graph:
    """Names resolved: `nodes` by output, `constants` by name, `inputs` with their shapes."""

    def __init__(self, onnx: Any, proto: Any, constants: Mapping[str, Any]) -> None:
        self.onnx = onnx
        graph = proto.graph
        if graph.sparse_initializer:
            raise FormatError("its weights are sparse, which is not read.")
        self.nodes: dict[str, Any] = {}
        for node in graph.node:
            if node.domain not in ("", "ai.onnx"):
                raise FormatError(
                    f"it has an operator {node.domain}.{node.op_type}, not ONNX's own."
                )
            self.nodes.update((output, node) for output in node.output if output)
        self._initializers = {tensor.name: tensor for tensor in graph.initializer}
        self._constants = {name: np.asarray(array) for name, array in constants.items()}
        self.inputs: dict[str, int | None] = {}
        for value in graph.input:
            if value.name not in self._initializers and value.name not in self._constants:
                kind = value.type.tensor_type
                known = value.type.HasField("tensor_type") and kind.HasField("shape")
                self.inputs[value.name] = len(kind.shape.dim) if known else None
        self.outputs = [value.name for value in graph.output]
        self.metadata = {entry.key: entry.value for entry in proto.metadata_props}

    # ---- attributes and constants ------------------------------------------------------------

    def attributes(self, node: Any) -> dict[str, Any]:
        """A node's attributes as Python's values; text as str."""
        found = {}
        for attribute in node.attribute:
            value = self.onnx.helper.get_attribute_value(attribute)
            if isinstance(value, bytes):
                value = value.decode("utf-8", "replace")
            elif isinstance(value, list) and value and isinstance(value[0], bytes):
                value = [text.decode("utf-8", "replace") for text in value]
            found[attribute.name] = value
        return found

    def constant(self, name: str, depth: int = 0) -> np.ndarray | None:
        """The array named so if it depends on nothing, else None."""
        if name in self._constants:
            return self._constants[name]
        if name in self._initializers:
            self._constants[name] = self._array(self._initializers[name])
            return self._constants[name]
        node = self.nodes.get(name)
        if node is None or depth > _DEEPEST:
            return None
        found = None
        if node.op_type == "Constant":
            found = self._of_constant(node)
        elif node.op_type in _FOLDED:
            parts = [self.constant(part, depth + 1) for part in node.input if part]
            if all(part is not None for part in parts):
                found = _FOLDED[node.op_type](parts, self.attributes(node))
        if found is not None:
            self._constants[name] = found
        return found

    def _array(self, tensor: Any) -> np.ndarray:
        try:
            return np.asarray(self.onnx.numpy_helper.to_array(tensor))
        except (ValueError, TypeError, OverflowError, KeyError) as error:
            raise FormatError(f"the tensor {tensor.name!r} is damaged: {error}") from None

    def _of_constant(self, node: Any) -> np.ndarray:
        attributes = self.attributes(node)
        for name, value in attributes.items():
            if name == "value":
                return self._array(value)
            if name.startswith("value_"):
                dtype = np.float32 if "float" in name else np.int64
                return np.asarray(value, None if "string" in name else dtype)
        raise FormatError("a Constant holds nothing that is read.")

    def needed(self, name: str, what: str) -> np.ndarray:
        """The constant named so; raises `FormatError` if it is computed from the input."""
        found = self.constant(name)
        if found is None:
            raise FormatError(
                f"{what} ({name!r}) is no constant. If it is an input that always gets the same "
                f"array, pass it: constants={{{name!r}: array}}."
            )
        return found

    # ---- the row -----------------------------------------------------------------------------

    def row(self, output: str) -> tuple[str, list[tuple[Any, int, str]]]:
        """The graph's input that `output` is computed from, and the nodes on the way.

        Each with the place of the input that carries the data, and the name of the output that is
        used.  Raises `FormatError` where two values that depend on the input meet.
        """
        found: list[tuple[Any, int, str]] = []
        while output not in self.inputs:
            node = self.nodes.get(output)
            if node is None or len(found) > len(self.nodes):
                raise FormatError(f"nothing computes {output!r}.")
            place = 0
            if node.op_type not in RECURRENT:
                moving = [k for k, n in enumerate(node.input) if n and self.constant(n) is None]
                if len(moving) != 1:
                    raise FormatError(
                        f"{told(node)} joins {len(moving)} computed values; only a row of layers "
                        "is read, each with one input."
                    )
                (place,) = moving
            if not node.input:
                raise FormatError(f"{told(node)} has no input.")
            found.append((node, place, output))
            output = self.last_of_joined(node) or node.input[place]
        return output, found[::-1]

    def last_of_joined(self, node: Any) -> str | None:
        """What a node takes the last of, if several values are joined for it.

        PyTorch joins the final states of all layers, and most models take those of the last one.
        """
        if node.op_type != "Gather" or len(node.input) != 2:
            return None
        index, joined = self.constant(node.input[1]), self.nodes.get(node.input[0])
        if index is None or index.shape != () or index != -1 or joined is None:
            return None
        axes = [self.attributes(part).get("axis", 0) for part in (node, joined)]
        return joined.input[-1] if joined.op_type == "Concat" and axes[0] == axes[1] else None

    def sources(self, name: str, through: Iterable[str] = _MOVES) -> list[tuple[Any, str]]:
        """Where the numbers of a value come from: (None, input or constant) or (node, output)."""
        allowed = {*through, "Concat"}
        found, left, seen = [], [name], set()
        while left:
            name = left.pop()
            if name in seen:
                continue
            seen.add(name)
            node = self.nodes.get(name)
            if node is None or self.constant(name) is not None:
                found.append((None, name))
            elif node.op_type in allowed:
                left += node.input if node.op_type == "Concat" else node.input[:1]
            else:
                found.append((node, name))
        return found

    def directions_of(self, name: str, ways: int) -> list[str]:
        """The values that the directions start from: one for both, or those that are joined."""
        node = self.nodes.get(name)
        if node is not None and node.op_type == "Concat" and len(node.input) == ways > 1:
            return list(node.input)
        return [name] * ways

    def is_zero(self, node: Any, name: str) -> bool:
        """Whether a source is zeros of some shape."""
        constant = self.constant(name)
        if constant is not None:
            return not constant.any()
        if node is None:
            return False
        if node.op_type == "ConstantOfShape":
            value = self.attributes(node).get("value")
            return value is None or not self._array(value).any()
        if node.op_type == "Expand":
            filling = self.constant(node.input[0])
            return filling is not None and not filling.any()
        return False


def told(node: Any) -> str:
    """A node in messages."""
    return f"{node.op_type} {node.name!r}" if node.name else f"{node.op_type}"


def _squeeze(parts: list[np.ndarray], attributes: dict[str, Any]) -> np.ndarray:
    axes = attributes.get("axes", parts[1].tolist() if len(parts) > 1 else None)
    return np.squeeze(parts[0], None if axes is None else tuple(axes))


def _unsqueeze(parts: list[np.ndarray], attributes: dict[str, Any]) -> np.ndarray:
    axes = attributes.get("axes", parts[1].tolist() if len(parts) > 1 else ())
    return np.expand_dims(parts[0], tuple(axes))


def _reshape(parts: list[np.ndarray], attributes: dict[str, Any]) -> np.ndarray:
    if attributes.get("allowzero"):
        raise FormatError("a constant is reshaped with allowzero.")
    shape = [n or parts[0].shape[k] for k, n in enumerate(parts[1].tolist())]
    return parts[0].reshape(shape)


def _checked(fold: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def folded(parts: list[np.ndarray], attributes: dict[str, Any]) -> np.ndarray:
        try:
            return fold(parts, attributes)
        except (ValueError, LookupError, TypeError) as error:
            raise FormatError(f"a constant is damaged: {error}") from None

    return folded


_FOLDED: dict[str, Callable[..., np.ndarray]] = {
    "Identity": lambda parts, _: parts[0],
    "Squeeze": _checked(_squeeze),
    "Unsqueeze": _checked(_unsqueeze),
    "Reshape": _checked(_reshape),
    "Transpose": _checked(lambda parts, a: np.transpose(parts[0], a.get("perm"))),
    "Concat": _checked(lambda parts, a: np.concatenate(parts, a["axis"])),
}
