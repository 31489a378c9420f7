"""Compiles the fused kernel into the package, for wheels and editable installs alike.

A C compiler on the machine is used (``CC``, or ``cc``); otherwise ziglang, which pip brings as a
wheel for the time of the build. Where nothing compiles, the package works without: slower.
``python hatch_build.py`` compiles in place.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

NATIVE = Path(__file__).parent / "pytest_modelhealth" / "statistics" / "native"
SOURCES = ("fused.c", "block.h", "vectors.h", "samples.h")

FLAGS = ["-std=c11", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# Let comparisons become vector minima. Sums keep the order they are written in, without fused
# multiply-add, so that every CPU gives the same bits.
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-ffp-contract=off"]

LEVELS: dict[str, list[str]] = {"base": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    LEVELS = {
        "base": ["-march=x86-64-v2"],
        "avx2": ["-march=x86-64-v3"],
        "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    }


def find_compiler() -> list[str]:
    """Return the command of a C compiler, empty where there is none."""
    command = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(command[0]):
        return command
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    return []


def checksum() -> str:
    """Return the checksum of the sources, which the library carries as well."""
    text = b"".join((NATIVE / name).read_bytes() for name in SOURCES)
    return hashlib.sha256(text).hexdigest()[:16]


def compile_kernel() -> list[str]:
    """Compile a library for each level of CPU, and return what went wrong."""
    compiler = find_compiler()
    if not compiler:
        return ["no C compiler was found"]
    problems = []
    for level, flags in LEVELS.items():
        target = NATIVE / f"{level}.so"
        target.unlink(missing_ok=True)
        if "ziglang" in compiler:  # spells the names of CPUs its own way
            flags = [flag.replace("x86-64-", "x86_64_") for flag in flags]
        define = f'-DSOURCE="{checksum()}"'
        command = [*compiler, *FLAGS, *flags, define, str(NATIVE / "fused.c"), "-o", str(target)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            problems.append(f"{shlex.join(command)}\n{run.stderr}")
    return problems


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # compiling in place needs no hatchling
    BuildHookInterface = object


class KernelBuildHook(BuildHookInterface):
    """Compiles the kernel before files are collected."""

    def dependencies(self) -> list[str]:
        """Return what the build needs besides hatchling: a compiler, where there is none."""
        return [] if find_compiler() else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tag the wheel with the platform: the library knows no Python version."""
        problems = compile_kernel()
        for problem in problems:
            self.app.display_warning(f"pytest-modelhealth: kernel not compiled: {problem}")
        if any(NATIVE.glob("*.so")):
            system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{system}"


if __name__ == "__main__":
    sys.exit("\n".join(compile_kernel()) or 0)
