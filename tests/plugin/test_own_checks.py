"""A project's own checks by the hook: options, ini values and markers as for ours."""

from __future__ import annotations

import pytest

CONFTEST = """
from pytest_modelhealth import Check, Setting

class Peak(Check):
    name = "peak"
    summary = "No activation is larger than a limit."
    settings = (Setting("max_peak", float, default=1e-6, minimum=0.0, help="largest value"),)

    def run(self, observation, settings):
        for record in observation.layers.values():
            limit = settings.limit("max_peak", record.name)
            if record.activations is not None and record.activations.abs_max > limit.value:
                peak = record.activations.abs_max
                yield self.violation(record, "is over", value=peak, limit=limit)

def pytest_modelhealth_checks():
    return [Peak]
"""

TESTS = """
import nets, pytest

def test_default(inspector):
    inspector(nets.healthy()).run_inspection(nets.BATCH)

@pytest.mark.modelhealth(max_peak=99.0)
def test_marker(inspector):
    inspector(nets.healthy()).run_inspection(nets.BATCH)

@pytest.mark.modelhealth_waive("*", check="peak", reason="known")
def test_waived(inspector):
    inspector(nets.healthy()).run_inspection(nets.BATCH)

@pytest.mark.modelhealth(severity={"peak": "warn"})
def test_warned(inspector):
    inspector(nets.healthy()).run_inspection(nets.BATCH)
"""


def test_an_own_check_gets_what_ours_have(nets: pytest.Pytester) -> None:
    """It fails, and a marker, a waiver, a severity, an option and an ini value each lift that.

    It is listed with ours, and a run in another folder of the same process knows nothing of it.
    """
    nets.makeconftest(CONFTEST)
    nets.makepyfile(test_it=TESTS)
    result = nets.runpytest("-W", "default")
    result.assert_outcomes(failed=1, passed=3, warnings=1)
    result.stdout.fnmatch_lines(["FAILED *(peak): *", "0 (peak): is over"])
    by_option = nets.runpytest("-W", "default", "--modelhealth-set=max_peak=99")
    by_option.assert_outcomes(passed=4, warnings=1)
    nets.makeini("[pytest]\nmodelhealth_thresholds = *: max_peak=99\n")
    nets.runpytest("-W", "default").assert_outcomes(passed=4, warnings=1)
    nets.runpytest("--modelhealth-explain").stdout.fnmatch_lines(["* max_peak*"])
    assert nets.runpytest("--modelhealth-explain=peak").ret == pytest.ExitCode.OK
    for name in ("conftest.py", "tox.ini"):
        nets.path.joinpath(name).unlink()
    assert nets.runpytest("--modelhealth-explain=peak").ret == pytest.ExitCode.USAGE_ERROR


def test_a_conftest_that_comes_too_late_is_refused(nets: pytest.Pytester) -> None:
    """Its tests are not run without the check; started on that folder, it is in time."""
    folder = nets.mkdir("deep").joinpath("deeper")
    folder.mkdir()
    folder.joinpath("conftest.py").write_text(CONFTEST)
    folder.joinpath("test_it.py").write_text(TESTS)
    result = nets.runpytest()
    result.assert_outcomes(errors=1)
    assert "conftest.py: pytest_modelhealth_checks comes too late" in result.stdout.str()
    assert "INTERNALERROR" not in result.stdout.str()
    result = nets.runpytest("-W", "default", str(folder))
    result.assert_outcomes(failed=1, passed=3, warnings=1)


WRONG = {
    "return [int]": "pytest_modelhealth_checks: builtins.int: it is no subclass of",
    "return 3": "pytest_modelhealth_checks: give a list of subclasses of Check, not 3",
    "return [Own]": "pytest_modelhealth_checks: conftest.Own: there is a check 'finite' already",
    "1 / 0": "pytest_modelhealth_checks raised ZeroDivisionError: division by zero",
}


@pytest.mark.parametrize("body", WRONG)
def test_an_unsound_hook_is_one_line_and_exit_status_4(
    pytester: pytest.Pytester, body: str
) -> None:
    """The class and what to correct are named before any test runs."""
    pytester.makeconftest(
        "from pytest_modelhealth import Check\n"
        "class Own(Check):\n"
        "    name = 'finite'\n"
        "    def run(self, observation, settings): return []\n"
        f"def pytest_modelhealth_checks(): {body}\n"
    )
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if line]
    assert line.startswith(f"ERROR: {WRONG[body]}")


def test_a_check_that_raises_fails_its_test(nets: pytest.Pytester) -> None:
    """The short summary names the check and the exception, and nothing of ours crashes."""
    nets.makeconftest(CONFTEST.replace("for record in", "1 / 0\n        for record in"))
    nets.makepyfile(TESTS)
    result = nets.runpytest("-k", "default")
    result.assert_outcomes(failed=1, deselected=3)
    text = result.stdout.str()
    broken = "check peak is broken: it raised ZeroDivisionError: division by zero (conftest.py:"
    assert broken in text
    assert " in run: 1 / 0)" in text
    assert "The other checks ran and object to nothing." in text
    assert "INTERNALERROR" not in text


# ---- the check removable_units -------------------------------------------------------------------


OF_UNITS = """
import pytest
import torch
from nets import BATCH
from torch import nn

def model():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 2))
    with torch.no_grad():
        made[0].bias[:] = 1.0
        made[2].bias[:] = 1.0
        made[0].bias[5] = -100.0
        made[2].bias[[1, 2, 3]] = -100.0
    return made

def test_silent(inspector):
    inspector(model()).removable([BATCH] * 3)

def test_no_search(inspector):
    inspector(model(), max_removable_fraction=0.0).run_inspection(BATCH)

def test_within(inspector):
    inspector(model(), max_removable_fraction=0.3).removable([BATCH] * 3)

def test_beyond(inspector):
    inspector(model(), max_removable_fraction=0.05).removable([BATCH] * 3)

@pytest.mark.modelhealth(max_removable_fraction=0.2)
def test_by_marker(inspector):
    inspector(model()).removable([BATCH] * 3)

@pytest.mark.modelhealth(thresholds={"2": {"max_removable_fraction": 0.5}})
@pytest.mark.modelhealth(max_removable_fraction=0.2)
def test_by_layer(inspector):
    inspector(model()).removable([BATCH] * 3)

def test_asserted(inspector):
    found = inspector(model()).removable([BATCH] * 3)
    found.report.assert_healthy()
    with pytest.raises(AssertionError, match=r"2 \\(removable_units\\): 3 of 10 units can go"):
        found.report.assert_healthy(max_removable_fraction=0.1)
"""


def test_a_layer_with_too_many_units_that_can_go_fails(nets: pytest.Pytester) -> None:
    """At the worst layer first, and only where somebody set how many there may be."""
    nets.makepyfile(OF_UNITS)
    result = nets.runpytest()
    result.assert_outcomes(passed=5, failed=2)
    result.stdout.fnmatch_lines(
        [
            "*unhealthy: 2 (removable_units): 3 of 10 units can go: 3 inactive over 128 samples*",
            "*2 * removable_units *0.300 *0.05 *argument of inspector*",
        ]
    )
    by_option = nets.runpytest("--modelhealth-set=max_removable_fraction=0.2", "-k", "silent")
    by_option.assert_outcomes(failed=1, deselected=6)
