"""Unused means silent and fast; switched off means gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PLAIN = "def test_pass(): pass\ndef test_fail(): assert 1 == 2\n"


@pytest.mark.parametrize("options", [["--help"], []], ids=["help", "unused"])
def test_an_unused_plugin_imports_nothing_heavy(tmp_path: Path, options: list[str]) -> None:
    """Neither `pytest --help` nor a suite without inspectors loads torch, numpy or matplotlib.

    Nor a setting or a check, which they do not need.
    """
    tmp_path.joinpath("test_plain.py").write_text(PLAIN)
    command = [sys.executable, "-X", "importtime", "-m", "pytest", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pytest_modelhealth.plugin.inspections" in names
    ours = {f"pytest_modelhealth.{name}" for name in ("settings", "checks", "report")}
    assert not names & ({"torch", "numpy", "matplotlib"} | ours)


def test_what_nobody_asked_for_is_neither_loaded_nor_written(
    nets: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No page, recorder, bundle, ranks or costs; Python loads the package from its own bytecode.

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
            unasked = ("bundles", "runs", "ranks")
            assert not [name for name in ours if name.split(".")[1] in unasked]
            assert not [n for n in sys.modules if "costing." in n or "flop_counter" in n]
            rewritten = [n for n, m in ours.items() if "Rewrit" in type(m.__loader__).__name__]
            assert len(ours) > 50
            assert set(rewritten) <= {"pytest_modelhealth.plugin"}
            names = [name for name, _ in pytestconfig.pluginmanager.list_name_plugin()]
            assert "modelhealth.inspections" in names
            assert "modelhealth.recorder" not in names
        """
    )
    result = nets.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    said = [line for line in result.outlines if "modelhealth" in line]
    assert [line for line in said if not line.startswith("plugins:")] == []
    assert not list(tmp_path.glob(".modelhealth-*"))


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


def test_switched_off_it_is_gone(pytester: pytest.Pytester) -> None:
    """`-p no:modelhealth` leaves no option, marker or fixture behind."""
    pytester.makepyfile("def test_it(inspector): pass")
    result = pytester.runpytest("-p", "no:modelhealth")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*fixture 'inspector' not found*")
    assert "modelhealth" not in pytester.runpytest("-p", "no:modelhealth", "--help").stdout.str()


@pytest.mark.parametrize("absent", ["html", "xdist", "syrupy", "terminalreporter", "junitxml"])
def test_it_works_without_the_plugins_it_attaches_to(nets: pytest.Pytester, absent: str) -> None:
    """Each integration is made only where the other side is."""
    nets.makepyfile(
        "import nets\n"
        "def test_it(inspector): inspector(nets.with_nan()).run_inspection(nets.BATCH)\n"
    )
    result = nets.runpytest("-p", f"no:{absent}")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()


def test_a_body_that_is_the_first_to_use_it_fails_like_any_other(pytester: pytest.Pytester) -> None:
    """What looks at each test is registered by then, though nothing asked for it before."""
    pytester.makepyfile(
        """
        def test_plain(pytestconfig):
            assert not pytestconfig.pluginmanager.hasplugin("modelhealth.failures")

        def test_it():
            import torch
            from pytest_modelhealth import Inspector
            net = torch.nn.Linear(4, 3)
            torch.nn.init.constant_(net.weight, float("nan"))
            assert Inspector(net).run_inspection(torch.ones(8, 4))
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["FAILED *::test_it - unhealthy: Linear (finite): *"])
