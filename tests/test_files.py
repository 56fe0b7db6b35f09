"""Atomic writing: old or new, whole, whatever happens on the way."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recur import files
from recur.files import atomic_writer, write_atomically

posix_only = pytest.mark.skipif(os.name == "nt", reason="POSIX permissions, links and signals")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "model.bin"
    path.write_bytes(b"old")
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("content", [b"new", bytearray(b"new"), memoryview(b"new")])
def test_bytes_of_every_kind_replace_the_old_file(old, content):
    write_atomically(old, content)
    assert old.read_bytes() == b"new"
    assert names_in(old.parent) == ["model.bin"]


def test_a_function_writes_in_pieces_and_may_seek(tmp_path):
    def header_last(file):
        file.write(b"....body")
        file.seek(0)
        file.write(b"head")

    write_atomically(str(tmp_path / "new.bin"), header_last)
    assert (tmp_path / "new.bin").read_bytes() == b"headbody"


def test_the_new_bytes_are_invisible_until_the_block_ends(old):
    with atomic_writer(old) as file:
        file.write(b"new")
        file.flush()
        assert old.read_bytes() == b"old"
    assert old.read_bytes() == b"new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_block_keeps_the_old_file_and_leaves_nothing_behind(old, error):
    with pytest.raises(error), atomic_writer(old) as file:
        file.write(b"half of the new")
        raise error
    assert old.read_bytes() == b"old"
    assert names_in(old.parent) == ["model.bin"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_disk_error_keeps_the_old_file_and_leaves_nothing_behind(old, monkeypatch, step):
    def no_space(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, step, no_space)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(old, b"new")
    monkeypatch.undo()
    assert old.read_bytes() == b"old"
    assert names_in(old.parent) == ["model.bin"]


def test_a_missing_folder_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_atomically(tmp_path / "nowhere" / "model.bin", b"new")


def test_a_folder_of_that_name_is_an_error_and_stays(tmp_path):
    (tmp_path / "model.bin").mkdir()
    with pytest.raises(OSError):
        write_atomically(tmp_path / "model.bin", b"new")
    assert names_in(tmp_path) == ["model.bin"]


def test_the_file_is_synced_before_the_rename_and_the_folder_after_it(old, monkeypatch):
    steps = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        steps.append("sync folder" if is_folder else "sync file")
        fsync(descriptor)

    def note_replace(source, target):
        steps.append("rename")
        assert Path(source).read_bytes() == b"new", "not all bytes were handed to the system"
        replace(source, target)

    monkeypatch.setattr(files.os, "fsync", note_fsync)
    monkeypatch.setattr(files.os, "replace", note_replace)
    write_atomically(old, b"new")
    assert steps == ["sync file", "rename"] + ["sync folder"] * (os.name != "nt")


@posix_only
@pytest.mark.parametrize(("number", "fatal"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_only_a_file_system_that_cannot_sync_folders_is_forgiven(old, monkeypatch, number, fatal):
    fsync = os.fsync

    def refuse_folders(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, "no")
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", refuse_folders)
    if fatal:
        with pytest.raises(OSError):
            write_atomically(old, b"new")
    else:
        write_atomically(old, b"new")
    assert old.read_bytes() == b"new"
    assert names_in(old.parent) == ["model.bin"]


@posix_only
def test_permissions_carry_over_and_a_new_file_obeys_the_umask(old):
    old.chmod(0o640)
    write_atomically(old, b"new")
    assert stat.S_IMODE(old.stat().st_mode) == 0o640

    mask = os.umask(0o027)
    try:
        write_atomically(old.with_name("other.bin"), b"new")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(old.with_name("other.bin").stat().st_mode) == 0o640


@posix_only
def test_a_symbolic_link_stays_a_link(old):
    link = old.with_name("latest")
    link.symlink_to("model.bin")
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert old.read_bytes() == b"new"


@posix_only
def test_a_relative_path_is_written_in_the_working_folder(in_tmp_path):
    write_atomically("model.bin", b"new")
    assert (in_tmp_path / "model.bin").read_bytes() == b"new"


WRITER = """
import sys
from recur.files import write_atomically
print("ready", flush=True)
turn = 0
while True:
    turn += 1
    write_atomically(sys.argv[1], bytes([turn % 256]) * 200_000)
"""


@posix_only
def test_a_reader_finds_a_whole_file_whenever_the_writer_is_killed(tmp_path, rng):
    path = tmp_path / "checkpoint.bin"
    path.write_bytes(b"\0" * 200_000)
    for delay in rng.uniform(0.0, 0.05, size=8):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], cwd=tmp_path, stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(delay)
            writer.send_signal(signal.SIGKILL)
        content = path.read_bytes()
        assert content == content[:1] * 200_000
