"""Only a test that asks for a verdict decides itself: every other read leaves the check on."""

from __future__ import annotations

import os
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from pytest_modelhealth import HealthReport, Inspector, compare
from pytest_modelhealth.comparison.comparison import Comparison

REPORT = {
    False: (
        repr, str, len, list, HealthReport._repr_html_, HealthReport.to_dict,
        HealthReport.plot_histograms, HealthReport.plot_gradient_flow,
        lambda report: (report.loss, report.layers, report.observation, report.warnings),
        lambda report: (report.to_csv(os.devnull), report.to_json(os.devnull)),
        lambda report: (report["0"].activations, report.plot_histogram("0")),
        lambda report: report.render("failure"),
        lambda report: (report._settings, report._judgement.verdict),
    ),
    True: (
        bool, HealthReport._failure,
        lambda report: report.verdict, lambda report: report.healthy,
        lambda report: report.violations, lambda report: report.inconclusive,
    ),
}  # fmt: skip
COMPARISON = {
    False: (
        repr, str, len, Comparison._repr_html_, Comparison.to_dict, Comparison.plot_errors,
        lambda found: (found["0"].diverged, found.first_divergence),
        lambda found: (found.diverged, found.changed_names, found.outputs),
    ),
    True: (bool, Comparison._failure, lambda found: found.equivalent),
}  # fmt: skip


def test_what_asks_for_the_verdict() -> None:
    """Numbers, tables and pictures do not, though some show it; nor does where two models part."""
    model = nn.Sequential(nn.Linear(4, 2))
    nn.init.constant_(model[0].bias, float("nan"))
    report = Inspector(model).run_inspection(torch.ones(4, 4))
    other = nn.Sequential(nn.Linear(4, 2))
    comparison = compare(nn.Sequential(nn.Linear(4, 2)), other, torch.ones(4, 4))
    judged: Any
    for judged, table in ((report, REPORT), (comparison, COMPARISON)):
        for is_question, reads in table.items():
            for number, read in enumerate(reads):
                judged._verdict_asked = False
                read(judged)
                assert judged._verdict_asked is is_question, (type(judged), number)


READS = """
import copy
import nets, pytest

def run(inspector, **settings):
    return inspector(nets.with_nan(), **settings).run_inspection(nets.BATCH)

def comparison(inspector, **options):
    reference = nets.healthy()
    candidate = copy.deepcopy(reference)
    candidate[2].bias.data[0] += 1
    return inspector.compare(reference, candidate, nets.BATCH, **options)

def test_read_comparison(inspector):
    assert comparison(inspector).first_divergence.layer == "2"

def test_ask_by_assert_equivalent(inspector):
    with pytest.raises(AssertionError, match="not equivalent"):
        comparison(inspector).assert_equivalent()

def test_ask_by_assert(inspector):
    assert not run(inspector)
    assert not comparison(inspector)

def test_ask_by_a_snapshot(inspector, health_snapshot):
    with pytest.raises(AssertionError, match="unhealthy"):
        assert run(inspector) == health_snapshot

@pytest.mark.modelhealth(auto_check=False)
def test_off_by_marker(inspector):
    print(run(inspector))
    print(comparison(inspector))

def test_off_by_call(inspector):
    print(run(inspector, auto_check=False))
    print(comparison(inspector, auto_check=False))

@pytest.mark.modelhealth(auto_check=False)
def test_read_on_again(inspector):
    print(run(inspector, auto_check=True))

def test_evidence(inspector):
    run(inspector, auto_check=False)
    assert 1 == 2

def test_word_of_a_call(inspector):
    with pytest.raises(ValueError, match="argument of compare: auto_check must be"):
        comparison(inspector, auto_check="no")
    comparison(inspector, auto_check=True)
"""


def test_only_a_test_that_asks_for_the_verdict_decides_itself(nets: pytest.Pytester) -> None:
    """Reading an unhealthy model's numbers leaves its test red, unless it says that it does."""
    nets.makepyfile(test_reads=READS)
    result = nets.runpytest("-rfp", "-p", "no:modelhealth.terminal", "-W", "error")
    result.assert_outcomes(failed=4, passed=5)
    result.stdout.no_fnmatch_line("FAILED *::test_ask*")
    result.stdout.no_fnmatch_line("FAILED *::test_off*")
    result.stdout.fnmatch_lines(
        [
            "E   The test did not ask for this report's verdict, so it was checked when the *;",
            "E   for numbers alone: @pytest.mark.modelhealth(auto_check=False)",
        ]
    )


def test_the_check_is_switched_off_for_some_or_for_all(nets: pytest.Pytester) -> None:
    """A failing test has then no pictures of what it knows to be sick.

    By ini file and option as every setting; a comparison's own word wins, and is a truth value.
    """
    nets.makepyfile(test_reads=READS)
    for options in (["--modelhealth-set=auto_check=false"], ["-o", "modelhealth_auto_check=off"]):
        nets.runpytest(*options).assert_outcomes(passed=6, failed=3)
    result = nets.runpytest("-o", "modelhealth_auto_check=true", "-k", "evidence")
    result.assert_outcomes(failed=1, deselected=8)
    result.stdout.no_fnmatch_line("*- modelhealth*")


ASSERTS = """
import copy, unittest
import nets, pytest
from pytest_modelhealth import Inspector

def sick(inspector):
    return inspector(nets.with_nan()).run_inspection(nets.BATCH)

def test_call(inspector):
    assert inspector(nets.with_nan()).run_inspection(nets.BATCH)

def test_message(inspector):
    assert sick(inspector), "my own words"

def test_and(inspector):
    report = sick(inspector)
    assert report and len(report) == 4

def test_lines(inspector):
    report = sick(inspector)
    assert (
        len(report) == 4
        and report
    )

def test_without_the_fixture():
    assert Inspector(nets.with_nan()).run_inspection(nets.BATCH)

def test_all(inspector):
    assert all(report for report in [sick(inspector)])

def test_comparison(inspector):
    candidate = copy.deepcopy(nets.healthy())
    candidate[2].bias.data[0] += 1
    assert inspector.compare(nets.healthy(), candidate, nets.BATCH)

class TestUnit(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def bind(self, inspector):
        self.inspector = inspector

    def test_assert(self):
        assert sick(self.inspector)

    def test_assert_true(self):
        self.assertTrue(sick(self.inspector))

@pytest.fixture
def checked(inspector):
    assert sick(inspector)

def test_fixture(checked):
    pass

class TestOther:
    def test_if(self, inspector):
        report = sick(inspector)
        if report or not report:
            pass
        assert "my own" == "comparison"

    def test_number(self, inspector):
        report = sick(inspector)
        assert (3 if report else 4) == 3, "more words"

    @pytest.mark.xfail(raises=AssertionError, strict=True)
    def test_expected(self, inspector):
        assert sick(inspector)

    def test_healthy(self, inspector):
        assert inspector(nets.healthy()).run_inspection(nets.BATCH)
"""
TOLD = 11
"""How many of these fail with the text of a report or a comparison."""


@pytest.mark.parametrize("options", [[], ["--assert=plain"]], ids=" ".join)
def test_a_bare_assert_fails_with_the_whole_text(nets: pytest.Pytester, options: list[str]) -> None:
    """In any form, as `assert_healthy` does; an assertion about something else is left alone."""
    nets.makepyfile(test_asserts=ASSERTS)
    result = nets.runpytest(*options, "-p", "no:modelhealth.terminal", "-W", "error")
    result.assert_outcomes(failed=TOLD, passed=1, errors=1, xfailed=1)
    text = result.stdout.str()
    if not options:
        assert len(re.findall("^E +assert 4 == 3$", text, re.MULTILINE)) == 1
        assert "TestOther::test_if - AssertionError: assert 'my own' == 'comparison'" in text

    def count(pattern: str) -> int:
        return len(re.findall(f"^{pattern}", text, re.MULTILINE))

    assert count(r"E +unhealthy: 2 \(finite\): 1 NaN") == TOLD - 1
    assert count(r'E +accept it: +@pytest.mark.modelhealth_waive\("2", check="finite"') == TOLD - 1
    assert count("E +not equivalent: 2: same input, other weights") == 1
    assert count(r"(FAILED|ERROR) \S+ - (unhealthy: 2|not equivalent)") == TOLD
    assert count("E +my own words$") == count("E +more words$") == 1
    assert "HealthReport unhealthy" not in text
    assert "Comparison not" not in text


INCONCLUSIVE = """
import nets, pytest, torch

def run(inspector, **settings):
    return inspector(nets.with_dead_relu(), min_samples=100, **settings).run_inspection(nets.BATCH)

def test_unasked(inspector):
    run(inspector)

def test_asserted(inspector):
    run(inspector).assert_healthy()

def test_bare(inspector):
    assert run(inspector)

def test_decides_itself(inspector):
    assert run(inspector).verdict == "inconclusive"

def test_accepted(inspector):
    run(inspector, inconclusive="pass")
    run(inspector).assert_healthy(inconclusive="pass")

@pytest.mark.modelhealth(auto_check=False)
def test_off(inspector):
    run(inspector)

@pytest.fixture
def late(inspector):
    yield
    run(inspector)

def test_in_teardown(late):
    pass
"""
IDLE = """
import nets, pytest
from torch import nn

def test_forgotten(inspector):
    inspector(nets.healthy()).watch("0")

def test_failing(inspector):
    inspector(nets.healthy())
    pytest.skip("the body did not get so far")

def test_raising(inspector):
    with pytest.raises(RuntimeError):
        inspector(nets.healthy()).run_inspection(nets.BATCH[:, :2])
    with pytest.raises(RuntimeError, match="no batch"):
        inspector(nets.healthy()).run_batches([])

@pytest.fixture
def checked(inspector):
    made = inspector(nets.healthy())
    yield
    made.run_inspection(nets.BATCH)

def test_in_teardown(checked):
    pass

def test_several(inspector):
    model = nn.Sequential(*nets.with_dead_relu(), *(nets.with_dead_relu()[:2]))
    model[3] = nn.Linear(2, 8)
    nn.init.constant_(model[3].bias, -10.0)
    report = inspector(model, min_samples=100).run_inspection(nets.BATCH)
    report.assert_healthy()
    report.assert_healthy()
"""
DOUBT = "ModelHealthWarning: inconclusive: 1 (dead_units): 8 of 8 units were inactive*at least 100*"
BARE = [
    "E *inconclusive: 1 (dead_units): 8 of 8 units were inactive*",
    "E *Nothing is violated, but not enough was seen to call it healthy.*",
]


def test_an_inconclusive_report_is_a_warning(nets: pytest.Pytester) -> None:
    """Under -q too the summary names test, layer, check and reason, a line each.

    So is an inspector that never ran, by its line, but not one that ran or that a fixture runs
    later. Of several findings the first is named and the others are counted; what is asked twice is
    told once.
    """
    nets.makepyfile(test_doubt=INCONCLUSIVE, test_idle=IDLE)
    result = nets.runpytest("-q", "-W", "always")
    result.assert_outcomes(passed=10, failed=1, skipped=1, warnings=5)
    result.stdout.fnmatch_lines(
        [
            *BARE,
            "E * or use report.assert_healthy(), which fails for violations alone",
            "test_doubt.py::test_unasked",
            f"*test_doubt.py:*: {DOUBT}",
            "test_doubt.py::test_asserted",
            f"*test_doubt.py:*: {DOUBT}",
            "test_doubt.py::test_in_teardown",
            f"*test_doubt.py:*: {DOUBT}",
            "test_idle.py::test_forgotten",
            "*ModelHealthWarning: test_idle.py:5: this inspector was made and never run, so *",
            "*ModelHealthWarning: inconclusive: * (and 1 more)",
            "FAILED test_doubt.py::test_bare - inconclusive: *",
        ]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nets.runpytest("-q", "-p", "no:warnings", "test_doubt.py").assert_outcomes(
            passed=6, failed=1
        )


def test_an_inconclusive_report_fails_or_passes_where_the_project_says_so(
    nets: pytest.Pytester,
) -> None:
    """`fail` names who set it, and `pass` is silent; -W error fails as for any warning."""
    nets.makepyfile(test_doubt=INCONCLUSIVE)
    result = nets.runpytest("-o", "modelhealth_inconclusive=fail", "-W", "error")
    result.assert_outcomes(passed=4, failed=3, errors=1)
    result.stdout.fnmatch_lines(
        [
            ">   return inspector(*",
            *BARE,
            'E   or let it pass: @pytest.mark.modelhealth(inconclusive="warn")',
            'E   "fail" was set by: --override-ini modelhealth_inconclusive',
        ]
    )
    result = nets.runpytest("--modelhealth-set=inconclusive=pass", "-W", "error")
    result.assert_outcomes(passed=6, failed=1)
    result = nets.runpytest("-W", "error")
    result.assert_outcomes(passed=4, failed=3, errors=1)
    result.stdout.fnmatch_lines("FAILED *::test_unasked - *inconclusive: 1 (dead_units)*")
