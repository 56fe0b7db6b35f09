"""Zip archives as libraries write them for weights: members stored as they are, one after another.

Members that are compressed, or that overlap, could hold more bytes than the file; so what is read
here is never larger than the file.
"""

from __future__ import annotations

import errno
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from recur.errors import FormatError

_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError),
    *(ValueError, LookupError, OverflowError, struct.error),
)


class Archive:
    """The members of a zip file by name.

    Raises `FormatError` if it is damaged, or if a member is compressed; its methods too.
    """

    def __init__(self, file: BinaryIO) -> None:
        size = file.seek(0, 2)
        with _damage():
            self._zip = zipfile.ZipFile(file)
        members = self._zip.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise FormatError("it is a zip archive with compressed members, which is not read.")
        self.sizes = {member.filename: member.file_size for member in members}
        if sum(self.sizes.values()) > size:
            raise FormatError("its members are larger than the file.")

    def __contains__(self, name: str) -> bool:
        return name in self.sizes

    def read(self, name: str) -> bytes:
        """The bytes of a member."""
        if name not in self.sizes:
            raise FormatError(f"the archive lacks {name}.")
        with _damage():
            return self._zip.read(name)


@contextmanager
def _damage() -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise FormatError(f"the zip archive is damaged: {error}") from None
    except OSError as error:
        if error.errno != errno.EINVAL:  # what seeking to a damaged place raises
            raise
        raise FormatError("the zip archive is damaged: it points outside of itself.") from None
