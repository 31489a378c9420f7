"""Compiles the fused kernel into the package, for wheels and editable installs alike.

A C compiler on the machine is used (``CC``, or ``cc``); otherwise, and on Windows, ziglang, which
pip brings as a wheel for the time of the build. Where nothing compiles, the package works without:
slower.
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
from typing import Any, NamedTuple

NATIVE = Path(__file__).parent / "pytest_modelhealth" / "statistics" / "native"
SOURCES = ("fused.c", "block.h", "vectors.h", "samples.h")

FLAGS = ["-std=c11", "-O3", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"]
# Let comparisons become vector minima. Sums keep the order they are written in, without fused
# multiply-add, so that every CPU gives the same bits.
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-ffp-contract=off"]

X86_LEVELS = {
    "base": ["-march=x86-64-v2"],
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
}

OLDEST_GLIBC = "2.17"  # that a library compiled by ziglang runs on


class Target(NamedTuple):
    """What is compiled for.

    Attributes:
        system: ``linux``, ``macosx`` or ``win``.
        version: the oldest macOS that the library runs on.
        machine: the kind of CPU, by the system's own name for it.
    """

    system: str
    version: str
    machine: str

    @property
    def suffix(self) -> str:
        """How a library's name ends, as ``pytest_modelhealth.statistics.native`` looks for it."""
        return {"win": ".dll", "macosx": ".dylib"}.get(self.system, ".so")

    @property
    def levels(self) -> dict[str, list[str]]:
        """The flags of each level of CPU that gets a library of its own."""
        return X86_LEVELS if self.machine in ("x86_64", "amd64") else {"base": []}

    @property
    def tag(self) -> str:
        """The tag of a wheel: the libraries know no version of Python."""
        parts = [self.system, self.version, self.machine]
        return "py3-none-" + "_".join(filter(None, parts)).replace(".", "_").replace("-", "_")

    def flags(self, compiler: list[str]) -> list[str]:
        """Return what tells the compiler the system; ziglang compiles for any."""
        position = [] if self.system == "win" else ["-fPIC"]
        if "ziglang" in compiler:
            machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(self.machine, self.machine)
            systems = {"win": "windows-gnu", "macosx": f"macos.{self.version}"}
            system = systems.get(self.system, f"linux-gnu.{OLDEST_GLIBC}")
            return [*position, "-s", "-target", f"{machine}-{system}"]
        if self.system == "macosx":
            return [*position, "-arch", self.machine, f"-mmacosx-version-min={self.version}"]
        return position


def read_target(name: str) -> Target:
    """Return the target that `name` means, as ``sysconfig.get_platform()`` gives it.

    A Python for both CPUs of macOS gets a library for the one it runs on. pip knows no minor
    versions of macOS from 11 on, and none before it on arm64.
    """
    system, _, rest = name.partition("-")
    version, _, machine = rest.rpartition("-")
    if system == "macosx":
        machine = platform.machine() if machine == "universal2" else machine
        major, minor = (int(number) for number in f"{version}.0".split(".")[:2])
        if machine == "arm64":
            major = max(major, 11)
        version = f"{major}.{minor if major < 11 else 0}"
    return Target(system, version, machine)


def find_compiler() -> list[str]:
    """Return the command of a C compiler, empty where there is none.

    What is called cc on Windows is gcc, whose 64-bit code leaves vectors unaligned on the stack.
    """
    default = "" if sys.platform == "win32" else "cc"
    command = shlex.split(os.environ.get("CC", default))
    if command and shutil.which(command[0]):
        return command
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    return []


def checksum() -> str:
    """Return the checksum of the sources, which the library carries as well."""
    text = b"".join((NATIVE / name).read_bytes() for name in SOURCES)
    return hashlib.sha256(text).hexdigest()[:16]


def compile_kernel(target: Target) -> list[str]:
    """Compile a library for each level of CPU, and return what went wrong."""
    compiler = find_compiler()
    if not compiler:
        return ["no C compiler was found"]
    problems = []
    define = f'-DSOURCE="{checksum()}"'
    for level, flags in target.levels.items():
        library = NATIVE / f"{level}{target.suffix}"
        library.unlink(missing_ok=True)
        if "ziglang" in compiler:  # spells the names of CPUs its own way
            flags = [flag.replace("x86-64-", "x86_64_") for flag in flags]
        command = [*compiler, *FLAGS, *target.flags(compiler), *flags, define]
        command += [str(NATIVE / "fused.c"), "-o", str(library)]
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
        """Compile, and tag the wheel with the system where that brought a library."""
        target = read_target(sysconfig.get_platform())
        for problem in compile_kernel(target):
            self.app.display_warning(f"pytest-modelhealth: kernel not compiled: {problem}")
        if any(NATIVE.glob(f"*{target.suffix}")):
            build_data["pure_python"] = False
            build_data["tag"] = target.tag


if __name__ == "__main__":
    sys.exit("\n".join(compile_kernel(read_target(sysconfig.get_platform()))) or 0)
