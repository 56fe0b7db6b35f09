"""Inside which calls a layer was stepped, so that `reset(model)` can notice a layer that it misses.

A model may be any Python object or function, and may keep a layer where no walk over its parts
finds it: in a global variable, a generator, a weak reference.  Only the stack of calls knows that
the layer was stepped inside a call of that model.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

from recur.tape import Tape


class Callers:
    """The calls around the steps that one layer took in one scope."""

    __slots__ = ("entered", "owners", "seen", "serial")

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.seen: set[types.CodeType] = set()  # code that stepped the layer directly
        # Functions, with the ids of what they closed over: a reference could keep a graph alive.
        self.entered: list[tuple[types.CodeType, list[int]]] = []
        self.owners: dict[int, Any] = {}  # objects that were being called


def note(layer: Any, tape: Tape) -> None:
    """Notes who is calling `layer`, once for each piece of code that steps it in a scope."""
    frame: types.FrameType | None = sys._getframe(2)
    assert frame is not None
    callers: Callers | None = layer._callers
    if callers is None or callers.serial != tape.serial:
        callers = Callers(tape.serial)
        object.__setattr__(layer, "_callers", callers)
    if frame.f_code in callers.seen:
        return
    callers.seen.add(frame.f_code)
    while frame is not None:
        code = frame.f_code
        # Before Python 3.13 a frame that is asked for its variables holds on to their values until
        # it ends, so only frames that may be a model's call are asked.
        if code.co_freevars:
            local = frame.f_locals
            callers.entered.append((code, [id(local.get(name)) for name in code.co_freevars]))
        else:
            callers.entered.append((code, []))
        if code.co_name == "__call__" and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            callers.owners[id(owner)] = owner
        frame = frame.f_back


def was_called(model: Any, callers: Callers) -> bool:
    """Whether a call of `model` was under way at one of the noted steps."""
    while isinstance(model, functools.partial):
        model = model.func
    if isinstance(model, types.FunctionType):
        closed = [id(_contents(cell)) for cell in model.__closure__ or ()]
        return (model.__code__, closed) in callers.entered
    return id(model) in callers.owners


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None
