"""Build the extension `recur._kernels`; everything else is in pyproject.toml.

target.c is compiled once for each CPU path that the compiler and the machine's architecture know;
the path is chosen at import.  RECUR_DEBUG=1 builds with bounds checks and debug symbols.
"""

import os
import platform
from pathlib import Path

import numpy as np
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("recur") / "_csrc"
DEBUG = os.environ.get("RECUR_DEBUG", "") not in ("", "0")

# path: (bytes of a register, registers, flags)
PATHS_X86_64 = {
    "baseline": (16, 16, []),
    "avx2": (32, 16, ["-mavx2", "-mfma", "-mf16c"]),
    "avx512": (64, 32, ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma"]),
}
PATHS_ARM64 = {"neon": (16, 32, [])}
PATHS_OTHER = {"baseline": (16, 16, [])}


def vector_paths(msvc: bool, machine: str) -> dict[str, tuple[int, int, list[str]]]:
    """The paths besides "plain": those of the vector extensions of GCC and clang."""
    if msvc:
        return {}
    if machine in ("x86_64", "amd64"):
        return PATHS_X86_64
    return PATHS_ARM64 if machine in ("arm64", "aarch64") else PATHS_OTHER


def target_machine() -> str:
    """The architecture compiled for, which on macOS may be another than the machine's."""
    flags = os.environ.get("ARCHFLAGS", "").split()
    named = [flags[i + 1] for i, flag in enumerate(flags[:-1]) if flag == "-arch"]
    if len(named) > 1:
        raise SystemExit("recur builds for one architecture at a time: name one -arch in ARCHFLAGS")
    return (named[0] if named else platform.machine()).lower()


class BuildKernels(build_ext):
    """build_ext that adds one object of target.c for each CPU path."""

    def build_extension(self, ext: Extension) -> None:
        msvc = self.compiler.compiler_type == "msvc"
        paths = vector_paths(msvc, target_machine())
        flags = ["/O2", "/std:c11"] if msvc else ["-O3", "-std=gnu11"]
        if not msvc:
            # each is free: nothing here reads errno or traps; contraction is written out by hand
            flags += ["-fno-trapping-math", "-fno-math-errno", "-ffp-contract=off"]
            flags += ["-g", "-O1"] if DEBUG else ["-g0"]
        ext.extra_compile_args += flags
        ext.define_macros += [(f"HAVE_{name}", None) for name in paths]
        ext.extra_objects = [
            self.compile_path(name, *settings, flags)
            for name, settings in {"plain": (0, 16, []), **paths}.items()
        ]
        if not msvc:
            ext.extra_link_args.append("-pthread")
        super().build_extension(ext)

    def compile_path(
        self, name: str, width: int, registers: int, machine_flags: list[str], flags: list[str]
    ) -> str:
        """Compile target.c for one path; returns the object's file name."""
        [built] = self.compiler.compile(
            [str(SOURCES / "target.c")],
            output_dir=str(Path(self.build_temp) / name),
            macros=[
                ("RECUR_TARGET", name),
                ("RECUR_VECTOR_BYTES", str(width)),
                ("REGISTERS", str(registers)),
            ],
            extra_postargs=[*flags, *machine_flags],
        )
        return str(built)


kernels = Extension(
    "recur._kernels",
    sources=[
        "recur/_kernels.pyx",
        *(str(SOURCES / name) for name in ("dispatch.c", "memory.c", "pool.c")),
    ],
    include_dirs=[np.get_include(), str(SOURCES)],
    depends=[str(path) for path in sorted(SOURCES.glob("*"))],
    define_macros=[
        ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
        ("NPY_TARGET_VERSION", "NPY_2_0_API_VERSION"),
    ],
)

setup(
    ext_modules=cythonize(
        [kernels],
        compiler_directives={
            "language_level": 3,
            "boundscheck": DEBUG,
            "cdivision": not DEBUG,
            "embedsignature": True,
        },
    ),
    cmdclass={"build_ext": BuildKernels},
)
