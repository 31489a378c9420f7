"""Unused means silent and fast; switched off means gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PLAIN = "def test_pass(): pass\ndef test_fail(): assert 1 == 2\n"


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The modules that a fresh interpreter imports for help, and for tests without inspectors."""
    folder = tmp_path_factory.mktemp("plain")
    folder.joinpath("test_plain.py").write_text(PLAIN)
    return {what: imported_by(*options, cwd=folder) for what, options in RUNS.items()}


RUNS = {"help": ["--help"], "unused": []}


def imported_by(*arguments: str, cwd: Path) -> set[str]:
    """The modules that a pytest run in a fresh interpreter imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "pytest", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pytest_modelhealth.plugin.inspections" in names
    return names


@pytest.mark.parametrize("what", RUNS)
def test_an_unused_plugin_imports_no_heavy_library(
    imported: dict[str, set[str]], what: str
) -> None:
    """Neither `pytest --help` nor a suite without inspectors loads torch, numpy or matplotlib."""
    assert not imported[what] & {"torch", "numpy", "matplotlib"}


@pytest.mark.parametrize("what", RUNS)
def test_an_unused_plugin_loads_no_check(imported: dict[str, set[str]], what: str) -> None:
    """Help and a suite without inspectors need no settings: neither they nor a check are loaded."""
    ours = {f"pytest_modelhealth.{name}" for name in ("settings", "checks", "report")}
    assert not imported[what] & ours


def test_what_nobody_asked_for_is_neither_loaded_nor_written(
    nets: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No page, recorder or bundle; and Python loads the package from its own bytecode.

    No assert of ours is rewritten, which would cost each start more than our imports do.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    nets.makepyfile(
        """
        import nets, sys
        import pytest_modelhealth

        def test_it(inspector, pytestconfig):
            made = inspector(nets.healthy())
            assert type(made) is pytest_modelhealth.Inspector
            made.run_inspection(nets.BATCH)
            ours = {n: m for n, m in sys.modules.items() if n.startswith("pytest_modelhealth.")}
            unasked = ("bundles", "runs")
            assert not [name for name in ours if name.split(".")[1] in unasked]
            rewritten = [n for n, m in ours.items() if "Rewrit" in type(m.__loader__).__name__]
            assert len(ours) > 50
            assert set(rewritten) <= {"pytest_modelhealth.plugin"}
            names = [name for name, _ in pytestconfig.pluginmanager.list_name_plugin()]
            assert "modelhealth.recording" in names
            assert "modelhealth.recorder" not in names
        """
    )
    result = nets.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    assert "modelhealth: " not in result.stdout.str()
    assert not list(tmp_path.glob("modelhealth-*"))


def test_an_unused_plugin_says_nothing(pytester: pytest.Pytester) -> None:
    """Beside its place in the list of plugins, the output is what it is without the plugin."""
    pytester.makepyfile(PLAIN)

    def lines(*options: str) -> list[str]:
        result = pytester.runpytest(*options)
        return [
            line
            for line in result.outlines
            if not line.startswith(("plugins:", "=")) and "modelhealth-" not in line
        ]

    assert lines() == lines("-p", "no:modelhealth")


def test_a_healthy_test_says_nothing(nets: pytest.Pytester) -> None:
    """No header, section or summary where every verdict is healthy."""
    nets.makepyfile(
        "import nets\n"
        "def test_it(inspector): inspector(nets.healthy()).run_inspection(nets.BATCH)\n"
    )
    result = nets.runpytest()
    result.assert_outcomes(passed=1)
    assert [line for line in result.outlines if "modelhealth" in line] == [
        line for line in result.outlines if line.startswith("plugins:")
    ]


def test_switched_off_it_is_gone(pytester: pytest.Pytester) -> None:
    """`-p no:modelhealth` leaves no option, marker or fixture behind."""
    pytester.makepyfile("def test_it(inspector): pass")
    result = pytester.runpytest("-p", "no:modelhealth")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*fixture 'inspector' not found*")
    assert "modelhealth" not in pytester.runpytest("-p", "no:modelhealth", "--help").stdout.str()


UNHEALTHY = (
    "import nets\ndef test_it(inspector): inspector(nets.with_nan()).run_inspection(nets.BATCH)\n"
)


@pytest.mark.parametrize("absent", ["html", "xdist", "syrupy", "terminalreporter", "junitxml"])
def test_it_works_without_the_plugins_it_attaches_to(nets: pytest.Pytester, absent: str) -> None:
    """Each integration is made only where the other side is."""
    nets.makepyfile(UNHEALTHY)
    result = nets.runpytest("-p", f"no:{absent}")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()


def test_one_destination_can_be_switched_off(nets: pytest.Pytester) -> None:
    """`-p no:modelhealth.terminal` drops the section and keeps the failure."""
    nets.makepyfile(UNHEALTHY)
    assert "- modelhealth: 2 beside 0 -" in nets.runpytest().stdout.str()
    result = nets.runpytest("-p", "no:modelhealth.terminal")
    result.assert_outcomes(failed=1)
    assert "- modelhealth: 2 beside 0 -" not in result.stdout.str()
