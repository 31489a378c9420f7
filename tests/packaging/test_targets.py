"""What `hatch_build.py` makes of the systems that wheels are for."""

from __future__ import annotations

import runpy
import sys
import sysconfig
from pathlib import Path

import pytest

from pytest_modelhealth.statistics import native

BUILD = runpy.run_path(str(Path(__file__).parents[2] / "hatch_build.py"))
ZIG = ["python", "-m", "ziglang", "cc"]


@pytest.mark.parametrize(
    ("name", "tag", "suffix", "levels", "zig", "cc"),
    [
        ("linux-x86_64", "linux_x86_64", ".so", 3, "x86_64-linux-gnu.2.17", ["-fPIC"]),
        ("linux-aarch64", "linux_aarch64", ".so", 1, "aarch64-linux-gnu.2.17", ["-fPIC"]),
        ("win-amd64", "win_amd64", ".dll", 3, "x86_64-windows-gnu", []),
        (
            *("macosx-10.9-x86_64", "macosx_10_9_x86_64", ".dylib", 3, "x86_64-macos.10.9"),
            ["-fPIC", "-arch", "x86_64", "-mmacosx-version-min=10.9"],
        ),
        (
            *("macosx-14.5-arm64", "macosx_14_0_arm64", ".dylib", 1, "aarch64-macos.14.0"),
            ["-fPIC", "-arch", "arm64", "-mmacosx-version-min=14.0"],
        ),
    ],
)
def test_a_system_has_its_tag_names_and_flags(name, tag, suffix, levels, zig, cc):
    """The tag is one that pip knows, and the library runs on what the tag says."""
    target = BUILD["read_target"](name)
    assert target.tag == f"py3-none-{tag}"
    assert target.suffix == suffix
    assert len(target.levels) == levels
    assert target.flags(ZIG)[-2:] == ["-target", zig]
    assert target.flags(["cc"]) == cc


def test_a_python_for_both_macs_gets_the_library_of_the_one_it_runs_on(monkeypatch):
    """No macOS before 11 runs on arm64, whatever the other half of that Python runs on."""
    for machine, tag in (("arm64", "macosx_11_0_arm64"), ("x86_64", "macosx_10_13_x86_64")):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert BUILD["read_target"]("macosx-10.13-universal2").tag == f"py3-none-{tag}"


def test_the_package_looks_for_what_is_compiled():
    """Both have the name of this system's libraries."""
    assert BUILD["read_target"](sysconfig.get_platform()).suffix == native._SUFFIX


def test_without_a_compiler_ziglang_is_asked_for(monkeypatch):
    """As on Windows, where what is called cc is not used."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/cc")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert BUILD["find_compiler"]() == ([] if sys.platform == "win32" else ["cc"])
    monkeypatch.setattr(sys, "platform", "win32")
    assert BUILD["find_compiler"]() == []
