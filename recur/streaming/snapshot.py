"""A stream's state as bytes that are checked in every respect before they are believed.

    8     magic, "recurstm"
    2     format version
    2     flags: 1 signed, 2 holds an answer
    4     length n of the description
    8     step number
    8     hash of the last input
    16    tag, of whoever opened the stream
    32    SHA-256 of the model's layers
    32    SHA-256 of its weights
    n     description: JSON, the parts of the state with their sizes and dtypes
    m     the parts of the state, one after the other, little-endian
    k     the last answer: dtype (3 bytes), number of axes (1), its sizes (4 each), its bytes
    32    SHA-256 of all before, or HMAC-SHA-256 with a key

All numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import struct
import sys
from dataclasses import dataclass, field

import numpy as np

from recur.errors import FormatError
from recur.streaming.arguments import check_key
from recur.streaming.plan import Plan, shown

VERSION = 1
_MAGIC = b"recurstm"
_HEAD = struct.Struct("<8sHHIqQ16s32s32s")
_SIGNED, _ANSWERED = 1, 2
_CHECKSUM = 32
_AXES_LIMIT = 8
NO_TAG = bytes(16)


@dataclass
class Moment:
    """What a stream is at one moment.

    state   the parts of the state, (1, size) each
    step    how many steps it has taken
    answer  what the last step gave, without a batch; None if it is not kept
    digest  hash of the last input, 0 if unknown
    tag     16 bytes of whoever opened the stream
    """

    state: list[np.ndarray]
    step: int = 0
    answer: np.ndarray | None = None
    digest: int = 0
    tag: bytes = field(default=NO_TAG, repr=False)


def pack(plan: Plan, moment: Moment, key: bytes | None = None) -> bytes:
    """The bytes of a stream of this model; with `key` they are signed."""
    check_key(plan.title, key)
    flags = (_SIGNED if key is not None else 0) | (_ANSWERED if moment.answer is not None else 0)
    description = plan.description
    head = _HEAD.pack(
        _MAGIC,
        VERSION,
        flags,
        len(description),
        moment.step,
        moment.digest,
        moment.tag,
        plan.architecture,
        plan.weights,
    )
    pieces = [head, description]
    pieces += [_little(part).tobytes() for part in moment.state]
    if moment.answer is not None:
        answer = _little(np.asarray(moment.answer))
        pieces.append(answer.dtype.str.encode())
        pieces.append(struct.pack(f"<B{answer.ndim}I", answer.ndim, *answer.shape))
        pieces.append(answer.tobytes())
    body = b"".join(pieces)
    return body + _checksum(body, key)


def unpack(
    plan: Plan, snapshot: bytes, key: bytes | None = None, *, allow_weights_change: bool = False
) -> Moment:
    """The moment that `pack` wrote, for the same layers and, unless allowed, the same weights.

    Raises `FormatError`, having changed nothing, if the bytes are damaged, cut short or forged, of
    another version, or of another model.
    """
    check_key(plan.title, key)
    name = f"{plan.title}: the snapshot"
    if not isinstance(snapshot, (bytes, bytearray, memoryview)):
        raise FormatError(f"{name} is a {type(snapshot).__name__}, expected bytes.")
    snapshot = bytes(snapshot)
    if len(snapshot) < _HEAD.size + _CHECKSUM or snapshot[:8] != _MAGIC:
        raise FormatError(f"{name} is not one, or was cut short. Nothing was changed.")
    body, checksum = snapshot[:-_CHECKSUM], snapshot[-_CHECKSUM:]
    _, version, flags, length, step, digest, tag, architecture, weights = _HEAD.unpack_from(body)
    if version != VERSION:
        raise FormatError(
            f"{name} has format version {version}, expected {VERSION}. Nothing was changed."
        )
    _check_signature(name, body, checksum, bool(flags & _SIGNED), key)
    description = plan.description
    if body[_HEAD.size : _HEAD.size + length] != description:
        raise FormatError(
            f"{name} is of another model: {_difference(body, length, plan)}. Nothing was changed."
        )
    if architecture != plan.architecture:
        raise FormatError(
            f"{name} is of a model with other layers or options. Nothing was changed."
        )
    if weights != plan.weights and not allow_weights_change:
        raise FormatError(
            f"{name} is of the same layers with other weights. Nothing was changed. Pass "
            "allow_weights_change=True to go on from it with the new weights."
        )
    at = _HEAD.size + length
    state = []
    for part in plan.parts:
        if at + part.nbytes > len(body):
            raise FormatError(f"{name} ends inside its state. Nothing was changed.")
        row = np.frombuffer(body, part.dtype.newbyteorder("<"), part.size, at)
        state.append(row.astype(part.dtype)[None])
        at += part.nbytes
    answer = _answer(name, body[at:]) if flags & _ANSWERED else None
    form = plan.form if answer is not None else None
    if answer is not None and form is not None and (answer.shape, answer.dtype) != form:
        raise FormatError(
            f"{name} holds an answer that is {answer.dtype} of shape {answer.shape}, expected "
            f"{form[1]} of shape {form[0]}. Nothing was changed."
        )
    if answer is None and at != len(body):
        raise FormatError(f"{name} has {len(body) - at} bytes too many. Nothing was changed.")
    if step < 0:
        raise FormatError(f"{name} has step number {step}. Nothing was changed.")
    return Moment(state, step, answer, digest, tag)


def _difference(body: bytes, length: int, plan: Plan) -> str:
    """In words, how the state in a snapshot differs from the model's."""
    try:
        parts = json.loads(body[_HEAD.size : _HEAD.size + length])
        found = ", ".join(f"{path} {name} ({size},) {d}".strip() for path, name, size, d in parts)
    except (ValueError, TypeError, RecursionError):
        return "its description cannot be read"
    return f"its state is {found or 'empty'}, expected {shown(plan.parts)}"


def _check_signature(
    name: str, body: bytes, checksum: bytes, signed: bool, key: bytes | None
) -> None:
    if signed and key is None:
        raise FormatError(f"{name} is signed. Pass key= to check it. Nothing was changed.")
    if key is not None and not signed:
        raise FormatError(f"{name} is not signed, and key= asks for it. Nothing was changed.")
    if not hmac.compare_digest(checksum, _checksum(body, key)):
        why = "does not fit its signature: it was changed, or signed with another key"
        raise FormatError(
            f"{name} {why if signed else 'is damaged: its checksum is wrong'}. Nothing was changed."
        )


def _checksum(body: bytes, key: bytes | None) -> bytes:
    if key is None:
        return hashlib.sha256(body).digest()
    return hmac.new(key, body, hashlib.sha256).digest()


def _answer(name: str, data: bytes) -> np.ndarray:
    try:
        dtype = np.dtype(data[:3].decode())
        (axes,) = struct.unpack_from("<B", data, 3)
        if dtype.kind not in "fiub" or axes > _AXES_LIMIT:
            raise ValueError
        shape = struct.unpack_from(f"<{axes}I", data, 4)
    except (ValueError, TypeError, struct.error):
        raise FormatError(f"{name} holds no readable answer. Nothing was changed.") from None
    start = 4 + 4 * axes
    if len(data) - start != math.prod(shape) * dtype.itemsize:
        raise FormatError(f"{name} ends inside its answer. Nothing was changed.")
    flat = np.frombuffer(data, dtype, math.prod(shape), start)
    return flat.reshape(shape).astype(dtype.newbyteorder("="))


def _little(array: np.ndarray) -> np.ndarray:
    if sys.byteorder == "little":
        return array
    return array.astype(array.dtype.newbyteorder("<"))
