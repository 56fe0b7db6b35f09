"""The `.pt` files of `torch.save`: a pickle that describes tensors, and the bytes of storages.

Since PyTorch 1.6 a zip archive with stored (uncompressed) members:

    <name>/data.pkl     the pickle; persistent ids stand for storages
    <name>/data/<key>   the bytes of one storage
    <name>/byteorder    "little" or "big", in later versions

and before it one stream: pickles of a magic number, a protocol number and the writer's sizes, the
pickle of the object, the pickle of the list of storage keys, then for each storage its length
(int64) and bytes.

A pickle is a program for a machine that can call anything.  The machine here knows containers,
numbers, strings, and the few names that tensors are made with, which it does not import but
understands.  `pickletools` splits the program into operations and checks lengths against the bytes
that there are.

Source: torch/serialization.py, torch/_utils.py (names and order of arguments).
"""

from __future__ import annotations

import io
import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

import numpy as np

from recur.errors import FormatError
from recur.io._archive import Archive

_LEGACY = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")  # the pickle of the magic number
_OLDEST = b"\x80\x02"
_PROTOCOL = 1001
_DEEPEST = 100
_LONGEST = 1000
_PICKLE_LIMIT = 100_000_000

_STORAGES = {
    "DoubleStorage": "f8",
    "FloatStorage": "f4",
    "HalfStorage": "f2",
    "BFloat16Storage": "u2",  # NumPy has no bfloat16: widened to float32
    "LongStorage": "i8",
    "IntStorage": "i4",
    "ShortStorage": "i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
}


@dataclass(frozen=True)
class _Name:
    """A global that the pickle names; it stands for itself and is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class _Storage:
    """Memory that tensors are views of; `data` comes when the pickle has been read."""

    kind: str
    key: str
    count: int
    data: np.ndarray | None = None

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(_STORAGES[self.kind])


@dataclass(eq=False)
class _View:
    """A tensor: counts of elements, not of bytes."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def array(self) -> np.ndarray:
        data = self.storage.data
        if data is None:
            raise FormatError(f"the file lacks the bytes of storage {self.storage.key!r}.")
        strides = tuple(step * data.itemsize for step in self.strides)
        return np.lib.stride_tricks.as_strided(data[self.offset :], self.shape, strides)


def read(file: BinaryIO, name: str) -> dict[str, np.ndarray]:
    """The tensors in the file by the path of their place.  Raises `FormatError`."""
    try:
        file.seek(0)
        start = file.read(len(_LEGACY))
        file.seek(0)
        if start.startswith(b"PK"):
            return _read_zip(file)
        if start == _LEGACY:
            return _read_stream(file)
        if start.startswith(_OLDEST):
            raise FormatError("it is a plain pickle, not a file of torch.save.")
        raise FormatError("it is neither a safetensors file nor one of torch.save.")
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise FormatError(f"{name}: the pickle inside is damaged: {error}") from None


# ---------------------------------------------------------------------- the two formats


def _read_zip(file: BinaryIO) -> dict[str, np.ndarray]:
    archive = Archive(file)
    roots = [name[: -len("data.pkl")] for name in archive.sizes if name.endswith("data.pkl")]
    if len(roots) != 1:
        raise FormatError("it is a zip archive without one data.pkl: not one of torch.save.")
    (root,) = roots
    if f"{root}constants.pkl" in archive:
        raise FormatError(
            "it is a TorchScript archive, which holds a program. Save the weights: "
            "torch.save(model.state_dict(), path)."
        )
    order = archive.read(f"{root}byteorder") if f"{root}byteorder" in archive else b"little"
    machine = _Machine()
    tree = machine.run(io.BytesIO(archive.read(f"{root}data.pkl")))
    for storage in machine.storages.values():
        if storage.count:
            content = archive.read(f"{root}data/{storage.key}")
            storage.data = _elements(storage, content, ">" if order == b"big" else "<")
    return _tensors(tree, machine.steps)


def _read_stream(file: BinaryIO) -> dict[str, np.ndarray]:
    # Pickles come before the arrays and are small; they are read from memory, in bounds.
    size = file.seek(0, 2)
    file.seek(0)
    head = io.BytesIO(file.read(min(size, _PICKLE_LIMIT)))
    _Machine().run(head)
    if _Machine().run(head) != _PROTOCOL:
        raise FormatError(f"it is of another protocol than {_PROTOCOL}.")
    system = _Machine().run(head)
    little = not isinstance(system, dict) or system.get("little_endian", True)
    machine = _Machine()
    tree = machine.run(head)
    keys = _Machine().run(head)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise FormatError("it lacks its list of storages.")
    file.seek(head.tell())
    order: Literal["<", ">"] = "<" if little else ">"
    for key in keys:
        count = int.from_bytes(file.read(8), "little" if little else "big")
        storage = machine.storages.get(key)
        if storage is None or storage.data is not None or storage.count != count:
            raise FormatError(f"storage {key!r} does not fit its description.")
        nbytes = count * storage.dtype.itemsize
        if nbytes > size:
            raise FormatError(f"storage {key!r} of {nbytes} bytes is larger than the file.")
        storage.data = _elements(storage, file.read(nbytes), order)
    return _tensors(tree, machine.steps)


def _elements(storage: _Storage, content: bytes, order: Literal["<", ">"]) -> np.ndarray:
    dtype = storage.dtype
    if len(content) != storage.count * dtype.itemsize:
        raise FormatError(
            f"storage {storage.key!r} has {len(content)} bytes, expected {storage.count} elements "
            f"of {dtype}."
        )
    if storage.kind == "BoolStorage" and max(content, default=0) > 1:
        raise FormatError(f"storage {storage.key!r} holds bytes that are neither true nor false.")
    data = np.frombuffer(content, dtype.newbyteorder(order)).astype(dtype)
    if storage.kind == "BFloat16Storage":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data


def _tensors(tree: Any, limit: int) -> dict[str, np.ndarray]:
    """The tensors in nested containers by their path.

    Containers may hold each other again and again; a pickle of n operations gets n visits.
    """
    found: dict[str, np.ndarray] = {}
    places: list[tuple[tuple[str, ...], Any]] = [((), tree)]
    visits = 0
    while places:
        path, value = places.pop()
        visits += 1
        if visits > limit + 1 or len(path) > _DEEPEST:
            raise FormatError("its containers nest too deeply, or hold each other.")
        if isinstance(value, _View):
            if sum(map(len, path)) > _LONGEST:
                raise FormatError("the name of a tensor is too long.")
            name = ".".join(path)
            if name in found:
                raise FormatError(f"it holds two tensors named {name!r}.")
            found[name] = value.array()
        elif isinstance(value, dict):
            places += [((*path, str(key)), value[key]) for key in reversed(value)]
        elif isinstance(value, (list, tuple)):
            places += [((*path, str(k)), part) for k, part in reversed(list(enumerate(value)))]
    return found


# ---------------------------------------------------------------------- the machine


class _Machine:
    """Runs a pickle that may only build containers, numbers, strings and tensors."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, _Storage] = {}
        self.steps = 0

    def run(self, file: BinaryIO) -> Any:
        """What the pickle at the file's position builds; the file then stands after it."""
        for opcode, argument, _ in pickletools.genops(file):
            self.steps += 1
            name = opcode.name
            if name in _VALUES:
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name]())
            elif name in _OPERATIONS:
                _OPERATIONS[name](self, argument)
            elif name not in _IGNORED:
                raise FormatError(f"the pickle uses {name}, which no state_dict needs.")
        if len(self.stack) != 1 or self.marks:
            raise FormatError("the pickle does not leave one object.")
        return self.stack.pop()

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise FormatError("the pickle takes more than it has put down.")
        return self.stack.pop()

    def peek(self) -> Any:
        self.stack.append(top := self.pop())
        return top

    def since_mark(self) -> list[Any]:
        if not self.marks:
            raise FormatError("the pickle goes back to a mark that it never set.")
        start = self.marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def put(self, index: Any) -> None:
        self.memo[len(self.memo) if index is None else index] = self.peek()

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise FormatError("the pickle refers to an object that is not there.")
        self.stack.append(self.memo[index])

    def tuple(self, count: int | None) -> None:
        if count is None:
            self.stack.append(tuple(self.since_mark()))
            return
        parts = [self.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(parts)))

    def new_list(self, _: Any) -> None:
        self.stack.append(self.since_mark())

    def new_dict(self, _: Any) -> None:
        items, target = self.since_mark(), {}  # type: ignore[var-annotated]
        self.stack.append(target)
        self.set_items(target, items)

    def append(self, values: list[Any]) -> None:
        target = self.peek()
        if type(target) is not list:
            raise FormatError("the pickle appends to what is no list.")
        target += values

    def set_items(self, target: Any, items: list[Any]) -> None:
        if type(target) is not dict or len(items) % 2:
            raise FormatError("the pickle sets items of what is no dictionary.")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (str, int, float)):
                raise FormatError(f"a dictionary has a {type(key).__name__} for a key.")
            target[key] = value

    def set_item(self, _: Any) -> None:
        value, key = self.pop(), self.pop()
        self.set_items(self.peek(), [key, value])

    def set_many(self, _: Any) -> None:
        items = self.since_mark()
        self.set_items(self.peek(), items)

    def name(self, argument: Any) -> None:
        if argument is None:
            name, module = self.pop(), self.pop()
        else:
            module, _, name = str(argument).partition(" ")
        self.stack.append(self.known(module, name))

    def known(self, module: Any, name: Any) -> _Name:
        found = _Name(str(module), str(name))
        storage = module in ("torch", "torch.cuda") and name in _STORAGES
        if not storage and str(found) not in _CALLS and str(found) not in _INERT:
            raise FormatError(
                f"the pickle names {found}, which is not read: only tensors and plain containers "
                "are. Save the weights alone: torch.save(model.state_dict(), path)."
            )
        return found

    def call(self, _: Any) -> None:
        arguments, function = self.pop(), self.pop()
        call = _CALLS.get(str(function)) if isinstance(function, _Name) else None
        if call is None or type(arguments) is not tuple:
            raise FormatError("the pickle calls what makes no tensor.")
        self.stack.append(call(*arguments))

    def build(self, _: Any) -> None:
        """State of an OrderedDict: its `_metadata` of versions, which means nothing here."""
        self.pop()
        if type(self.peek()) is not dict:
            raise FormatError("the pickle gives a state to what is no dictionary.")

    def persistent(self, _: Any) -> None:
        """A storage: ("storage", type, key, location, count), in old files with a view after it."""
        described = self.pop()
        if (
            type(described) is not tuple
            or len(described) not in (5, 6)
            or described[0] != "storage"
        ):
            raise FormatError("the pickle holds a persistent id that is no storage.")
        _, kind, key, _, count = described[:5]
        if described[5:] not in ((), (None,)):
            raise FormatError("a storage is a view of another one; save the weights again.")
        if not isinstance(kind, _Name) or kind.name not in _STORAGES or not _is_count(count):
            raise FormatError("a storage has a type or a size that is not read.")
        if not isinstance(key, (str, int)):
            raise FormatError("a storage has no name.")
        found = self.storages.setdefault(str(key), _Storage(kind.name, str(key), count))
        if (found.kind, found.count) != (kind.name, count):
            raise FormatError(f"storage {key!r} is described twice, and not alike.")
        self.stack.append(found)


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**48


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _View:
    if not isinstance(storage, _Storage) or type(shape) is not tuple or type(strides) is not tuple:
        raise FormatError("a tensor is not described as PyTorch does it.")
    if not all(map(_is_count, (offset, *shape, *strides))) or not len(shape) == len(strides) <= 32:
        raise FormatError(f"a tensor has shape {shape} and strides {strides}.")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    count = math.prod(shape)
    if count > storage.count or (count and last >= storage.count) or offset > storage.count:
        raise FormatError(
            f"a tensor of shape {shape} reaches outside of its storage of {storage.count} elements."
        )
    if not count:
        empty = np.empty(0, np.float32 if storage.kind == "BFloat16Storage" else storage.dtype)
        storage, offset = _Storage(storage.kind, storage.key, 0, empty), 0
    return _View(storage, offset, shape, strides)


def _ordered(*items: Any) -> dict[Any, Any]:
    if items not in ((), ([],)):
        raise FormatError("an OrderedDict is not made as PyTorch does it.")
    return {}


def _parameter(data: Any, *_: Any) -> Any:
    return data


_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.Size": lambda sizes=(): tuple(sizes) if isinstance(sizes, (tuple, list)) else (),
    "torch.device": lambda *_: None,
}
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "bool")
_INERT = {f"torch.{name}" for name in _DTYPES}
_IGNORED = {"PROTO", "FRAME", "STOP"}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING"),
}
_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "TUPLE": lambda machine, _: machine.tuple(None),
    "TUPLE1": lambda machine, _: machine.tuple(1),
    "TUPLE2": lambda machine, _: machine.tuple(2),
    "TUPLE3": lambda machine, _: machine.tuple(3),
    "LIST": _Machine.new_list,
    "DICT": _Machine.new_dict,
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_many,
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name,
    "REDUCE": _Machine.call,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
}
