"""Waivers and thresholds of the ini file and the command line, which hold for every model."""

from __future__ import annotations

import pytest

TESTS = """
import nets

def test_dead(inspector):
    inspector(nets.with_dead_relu()).run_inspection(nets.BATCH)

def test_healthy(inspector):
    inspector(nets.healthy()).run_inspection(nets.BATCH)
"""


def test_a_waiver_holds_for_every_test(nets: pytest.Pytester) -> None:
    """By the ini file or by an option; a test that did not need it is silent about it."""
    nets.makepyfile(TESTS)
    run = nets.runpytest
    run().assert_outcomes(failed=1, passed=1)
    run("--modelhealth-set", "waive=1 dead_units: a probe").assert_outcomes(passed=2)
    nets.makeini("[pytest]\nmodelhealth_waive =\n    1 dead_*: a probe: known\n")
    run().assert_outcomes(passed=2)


def test_several_values_by_options_add_up(nets: pytest.Pytester) -> None:
    """Each of these options may be given more than once."""
    nets.makepyfile(TESTS)
    run = nets.runpytest
    run("--modelhealth-set=checks=finite", "--modelhealth-set=checks=grad_norm").assert_outcomes(
        passed=2
    )
    run("--modelhealth-set", "skip-checks=dead_*,finite").assert_outcomes(passed=2)
    severity = ("--modelhealth-set=severity=finite:fail", "--modelhealth-set=severity=dead_*:warn")
    run(*severity, "-Wdefault").assert_outcomes(passed=2, warnings=1)
    limit = "--modelhealth-set=thresholds=1:max_dead_fraction=1,max_held_fraction=1"
    run(limit, "--modelhealth-set=thresholds=0:min_samples=2").assert_outcomes(passed=2)


BAD = {
    "checks=finit": "checks: unknown check 'finit'; did you mean 'finite'?",
    "severity=wran": "severity must be 'warn' or 'fail'",
    "thresholds=a:max_grad_norm=-1": "for 'a': max_grad_norm must be a number of at",
    "thresholds=a": "thresholds of layers are 'PATTERN: NAME=VALUE, ...'",
    "waive=a dead_units": "its reason is missing",
    "waive=a dead_unit: why": "unknown check 'dead_unit'; did you mean 'dead_units'?",
}


@pytest.mark.parametrize("given", BAD)
def test_a_bad_choice_is_one_line_and_exit_status_4(pytester: pytest.Pytester, given: str) -> None:
    """Said before any test runs, by an option and by the ini file."""
    name, _, value = given.partition("=")
    result = pytester.runpytest(f"--modelhealth-set={given}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if line]
    assert line.startswith(f"ERROR: --modelhealth-set {name}")
    assert BAD[given] in line
    ini = f"modelhealth_{name}"
    pytester.makeini(f"[pytest]\n{ini} = {value}\n")
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: tox.ini: {ini}" in result.stderr.str()
    assert BAD[given] in result.stderr.str()


def test_toml_takes_a_list(nets: pytest.Pytester) -> None:
    """A list of strings is a line each."""
    nets.makepyfile(TESTS)
    nets.makepyprojecttoml(
        "[tool.pytest.ini_options]\n"
        'modelhealth_skip_checks = ["dead_units"]\n'
        'modelhealth_waive = ["0 dead_units: a probe"]\n'
    )
    nets.runpytest().assert_outcomes(passed=2)
