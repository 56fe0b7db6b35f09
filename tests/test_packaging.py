"""What is installed, what it needs, and what the build says when something is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path

import pytest

import recur

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
EXTRAS = {"cli", "serve", "redis", "ray", "torch", "onnx", "keras", "mpi", "sklearn"}


@pytest.fixture(scope="module")
def installed():
    try:
        return distribution("recur")
    except PackageNotFoundError:
        pytest.skip("recur is on the path, but not installed")


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", line)[0] for line in requirements}


def test_recur_needs_numpy_and_scipy_at_run_time_and_nothing_else(installed):
    needed = [line for line in installed.requires if "extra ==" not in line]
    assert names(needed) == {"numpy", "scipy"}


def test_the_extras_are_those_that_error_messages_name(installed):
    assert set(installed.metadata.get_all("Provides-Extra")) == EXTRAS


def test_the_server_is_tested_with_the_extra_that_it_names(installed):
    extra = {
        line.split(";")[0].strip()
        for line in installed.requires
        if re.search(r"""extra == ["']serve["']""", line)
    }
    group = re.search(r"^test = \[(.*?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL)
    assert extra
    assert extra <= set(re.findall(r'"(.+?)"', group[1]))


def test_the_licence_and_the_command_are_installed(installed):
    assert installed.metadata["License-Expression"] == "MIT"
    assert any(str(path).endswith("licenses/LICENSE") for path in installed.files)
    (command,) = [point for point in installed.entry_points if point.name == "recur"]
    assert command.load() is not None


def test_no_sources_of_the_extension_are_installed(installed):
    suffixes = {path.suffix for path in installed.files if path.parts[0] == "recur"}
    assert suffixes.isdisjoint({".c", ".h", ".pyx", ".pxd", ".pxi"})


def test_types_are_shipped():
    assert files(recur).joinpath("py.typed").is_file()
    assert files(recur).joinpath("_kernels.pyi").is_file()


EVERYTHING_WITHOUT_EXTRAS = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

refused = set(sys.argv[1:])
sys.meta_path.insert(0, Refuse())
import recur
for _, name, _ in pkgutil.walk_packages(recur.__path__, "recur."):
    importlib.import_module(name)
"""


def test_every_module_imports_where_no_extra_is_installed(tmp_path):
    from test_floors import OPTIONAL

    subprocess.run(
        [sys.executable, "-W", "error", "-c", EVERYTHING_WITHOUT_EXTRAS, *sorted(OPTIONAL)],
        cwd=tmp_path,
        check=True,
    )


def test_a_source_that_is_not_compiled_says_where_to_start_python(tmp_path):
    (tmp_path / "recur").mkdir()
    shutil.copy(recur.__file__, tmp_path / "recur")
    done = subprocess.run(
        [sys.executable, "-c", "import recur"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.endswith(
        f"ImportError: recur: {tmp_path / 'recur'} is the source, whose kernels are not compiled. "
        "Start Python in another folder, to import the recur that is installed, or compile this "
        "one: pip install -e .\n"
    )


def test_all_names_of_recur_are_there_and_are_listed_once():
    assert len(set(recur.__all__)) == len(recur.__all__)
    for name in recur.__all__:
        assert hasattr(recur, name), name


# The build's own checks: tools/check.sh with a PATH on which things are missing or lie.

needs_sh = pytest.mark.skipif(shutil.which("sh") is None, reason="the Makefile is for POSIX")


def check(python: str | Path, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        ["sh", str(ROOT / "tools" / "check.sh"), str(python), "500"],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def python_without(tmp_path: Path, *modules: str) -> Path:
    """A Python that has everything but these modules."""
    site = tmp_path / "site"
    site.mkdir()
    for module in modules:
        (site / f"{module}.py").write_text("raise ImportError")
    return script(tmp_path / "python3", f'PYTHONPATH="{site}" exec "{sys.executable}" "$@"')


def says(result: tuple[int, str], start: str, remedy: str) -> None:
    code, message = result
    assert code == 1
    assert message.startswith(f"recur: {start}"), message
    assert remedy in message
    assert message.count("\n") == 1, "one sentence, no traceback"


@needs_sh
def test_the_check_passes_in_silence_where_recur_can_be_built(tmp_path):
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("no C compiler on this machine")
    code, message = check(sys.executable)
    assert (code, message) == (0, "") or "Python.h" in message or "MB are free" in message


@needs_sh
def test_a_python_that_does_not_run_is_named_with_what_to_install(tmp_path):
    says(check(tmp_path / "no-python"), f'"{tmp_path}/no-python" does not run', "apt install")
    shim = script(tmp_path / "python3", "exit 127")
    says(check(shim), f'"{shim}" does not run', "make PYTHON=")


@needs_sh
def test_a_python_that_is_too_old_is_named_with_its_version(tmp_path):
    old = script(
        tmp_path / "python3",
        f'exec "{sys.executable}" -c "import sys; sys.version_info = (3, 9, 2)\n$2"',
    )
    says(check(old), f'"{old}" is Python 3.9, too old', "Python 3.10 or later")


@needs_sh
@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_a_missing_venv_module_is_one_sentence(tmp_path, module):
    python = python_without(tmp_path, module)
    says(check(python), f'"{python}" has no venv module', "apt install python3-venv")


@needs_sh
def test_a_full_disk_is_one_sentence(tmp_path):
    script(tmp_path / "df", "echo head; echo /dev/sda1 9000000 8700000 307200 97% /")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    says(check(sys.executable, PATH=path), "only 300 MB are free in", "free some space")


@needs_sh
def test_a_missing_compiler_is_one_sentence():
    says(check(sys.executable, CC="no-such-cc -pthread"), "the C compiler", "apt install gcc")


@needs_sh
def test_a_missing_python_header_is_one_sentence(tmp_path):
    cc = script(tmp_path / "cc", 'case "$*" in *python.c*) exit 1 ;; esac')
    says(check(sys.executable, CC=str(cc)), "Python.h, the C header of", "apt install python3-dev")


@needs_sh
def test_only_interpreters_that_run_are_found(tmp_path):
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    script(tmp_path / f"python{version}", "exit 127")
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", str(ROOT / "tools" / "pythons.sh"), version],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert str(tmp_path) not in done.stdout
    for line in done.stdout.splitlines():
        found, _, python = line.partition(" ")
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        ran = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == found == version
