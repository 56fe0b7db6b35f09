"""Writing a file so that a reader finds either the whole old one or the whole new one.

The new bytes go to a temporary name in the same folder, reach the disk (fsync), then take the
file's place in one rename; the folder is synced too, so that the rename itself survives a power
cut.  Any failure before the rename removes the temporary file and leaves the old one alone.  A
process that is killed outright may leave a hidden `.<name>.<random>.tmp` behind, which nothing
reads.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

AnyPath = str | os.PathLike[str]
Buffer = bytes | bytearray | memoryview


@contextmanager
def atomic_writer(path: AnyPath) -> Iterator[BinaryIO]:
    """Open a binary file for writing that becomes `path` when the block ends without an error.

    A symbolic link stays a link: the file that it points to is replaced.  The old file's permission
    bits carry over; a new file gets those of the umask.

    Raises OSError as `open` does (no such folder, no space, no permission); `path` is then as it
    was.
    """
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            _copy_permissions(target, temporary)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:  # KeyboardInterrupt too: nothing may be left behind
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


def write_atomically(path: AnyPath, content: Buffer | Callable[[BinaryIO], object]) -> None:
    """Write `content`, bytes or a function that writes them to the file it is given, to `path`.

    Raises what `content` raises, and OSError as `atomic_writer` does; `path` is then as it was.
    """
    with atomic_writer(path) as file:
        if callable(content):
            content(file)
        else:
            file.write(content)


def _copy_permissions(source: str, destination: str) -> None:
    with suppress(FileNotFoundError):
        os.chmod(destination, stat.S_IMODE(os.stat(source).st_mode))


def _sync_folder(folder: str) -> None:
    if os.name == "nt":  # Windows neither opens nor needs to sync a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot
            raise
    finally:
        os.close(descriptor)
