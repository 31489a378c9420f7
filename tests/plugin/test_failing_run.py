"""One inner run with every kind of outcome; each test below states one thing about it."""

from __future__ import annotations

import base64
import html
import re
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

SUITE = """
import unittest

import nets
import pytest
from pytest_modelhealth import ModelHealthError, Verdict


def test_asserts(inspector):
    report = inspector(nets.with_nan()).run_inspection(nets.BATCH)
    report.assert_healthy()  # line: asserts


def test_never_looks(inspector):
    inspector(nets.with_nan()).run_inspection(nets.BATCH)  # line: never_looks


def test_never_looks_at_three(inspector):
    inspector(nets.healthy()).run_inspection(nets.BATCH)
    inspector(nets.with_nan()).run_inspection(nets.BATCH)  # line: three_first
    inspector(nets.with_dead_relu()).run_inspection(nets.BATCH)  # line: three_second


@pytest.mark.modelhealth(max_grad_norm=1e-9)
def test_marked(inspector):
    inspector(nets.healthy()).run_inspection(nets.BATCH)


def test_call_overrides_marker(inspector):
    inspector(nets.healthy(), max_grad_norm=1e-9).run_inspection(nets.BATCH)


def test_own_exception(inspector):
    inspector(nets.with_nan()).run_inspection(nets.BATCH)
    assert 1 == 2, "my own"


@pytest.mark.parametrize("path", ["a/b", "a:b"])
def test_parameter(inspector, path):
    inspector(nets.with_nan()).run_inspection(nets.BATCH)


@pytest.fixture
def inspected(inspector):
    return inspector(nets.with_nan()).run_inspection(nets.BATCH)


def test_inspected_by_a_fixture(inspected):
    pass


@pytest.fixture
def inspects_afterwards(inspector):
    yield
    inspector(nets.with_nan()).run_inspection(nets.BATCH)


def test_inspected_in_teardown(inspects_afterwards):
    pass


def test_layer_pattern_matches_nothing(inspector):
    inspector(nets.healthy(), layers="encoder.*").run_inspection(nets.BATCH)


class TestBoundToUnittest(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def bind(self, inspector):
        self.inspector = inspector

    def test_never_looks(self):
        self.inspector(nets.with_nan()).run_inspection(nets.BATCH)

    def test_own_exception(self):
        self.inspector(nets.with_nan()).run_inspection(nets.BATCH)
        self.assertEqual(1, 2)

    def test_skips(self):
        self.inspector(nets.with_nan()).run_inspection(nets.BATCH)
        self.skipTest("not today")


class TestPasses:
    def test_healthy(self, inspector):
        inspector(nets.healthy()).run_inspection(nets.BATCH)

    def test_asked(self, inspector):
        report = inspector(nets.with_nan()).run_inspection(nets.BATCH)
        assert report.verdict is Verdict.UNHEALTHY
        assert inspector.reports == [report]

    def test_raises(self, inspector):
        report = inspector(nets.with_nan()).run_inspection(nets.BATCH)
        with pytest.raises(ModelHealthError, match="unhealthy"):
            report.assert_healthy()

    @pytest.mark.modelhealth(min_samples=65)
    def test_inconclusive(self, inspector):
        inspector(nets.with_dead_relu()).run_inspection(nets.BATCH)

    def test_uses_no_inspector(self):
        pass


class TestOther:
    @pytest.mark.xfail(raises=ModelHealthError, strict=True)
    def test_xfails(self, inspector):
        inspector(nets.with_nan()).run_inspection(nets.BATCH)

    def test_skips(self, inspector):
        inspector(nets.with_nan()).run_inspection(nets.BATCH)
        pytest.skip("not today")

    def test_fails_by_pytest(self, inspector):
        inspector(nets.healthy()).run_inspection(nets.BATCH)
        pytest.fail("by hand")
"""

HEADLINE = "unhealthy: 2 (finite): "


@dataclass(frozen=True)
class Run:
    folder: Path
    status: int
    output: str
    errors: str

    def block(self, title: str) -> str:
        """What stands below one test's title in the section of failures or errors."""
        found = re.search(
            rf"^_+ {re.escape(title)} _+\n(.*?)(?=^(_+|=+) )", self.output, re.MULTILINE | re.DOTALL
        )
        assert found, f"no {title!r} in:\n{self.output}"
        return found[1]

    def summary(self, test: str) -> str:
        """A test's line in the short summary, after its name."""
        lines = re.findall(
            rf"^[A-Z]+ test_suite\.py::{re.escape(test)}(?: - (.*))?$", self.output, re.MULTILINE
        )
        assert len(lines) == 1, f"{len(lines)} of {test!r} in:\n{self.output}"
        return str(lines[0])

    def figures(self) -> dict[str, list[str]]:
        """The names of the files in each folder of artifacts."""
        folders = (self.folder / "artifacts").iterdir()
        return {folder.name: sorted(file.name for file in folder.iterdir()) for folder in folders}


RUNS: list[Run] = []
"""What the run gave: the tests below share it."""


@pytest.fixture
def run(nets: pytest.Pytester) -> Run:
    """Run the suite once with every destination on."""
    if not RUNS:
        nets.path.joinpath("test_suite.py").write_text(SUITE)
        options = "--modelhealth-artifacts=artifacts --html=report.html --self-contained-html"
        result = nets.runpytest_inprocess(
            "-W", "default", *options.split(), "-rfEsx", "--junitxml=junit.xml"
        )
        RUNS.append(Run(nets.path, int(result.ret), result.stdout.str(), result.stderr.str()))
    return RUNS[0]


def line(mark: str) -> int:
    """The number of the suite's line with this mark."""
    return next(
        n for n, text in enumerate(SUITE.splitlines(), 1) if text.endswith(f"# line: {mark}")
    )


FAILED = {
    "test_asserts": HEADLINE,
    "test_never_looks": HEADLINE,
    "test_never_looks_at_three": HEADLINE,
    "test_marked": "unhealthy: 0 (grad_norm): ",
    "test_call_overrides_marker": "unhealthy: 0 (grad_norm): ",
    "test_own_exception": "AssertionError: my own",
    "test_parameter[a/b]": HEADLINE,
    "test_parameter[a:b]": HEADLINE,
    "test_inspected_by_a_fixture": HEADLINE,
    "test_layer_pattern_matches_nothing": "layers='encoder.*' (argument",
    "TestBoundToUnittest::test_never_looks": HEADLINE,
    "TestBoundToUnittest::test_own_exception": "AssertionError: 1 != 2",
    "TestOther::test_fails_by_pytest": "Failed: by hand",
}
"""What the short summary begins with."""


def test_the_outcomes(run: Run) -> None:
    """Unhealthy reports fail their tests; asking, skipping and expecting leave them alone."""
    counts = f"{len(FAILED)} failed, 6 passed, 2 skipped, 1 xfailed, 1 warning, 1 error in "
    assert counts in run.output.splitlines()[-1]
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert "INTERNALERROR" not in run.output
    assert run.errors == ""


@pytest.mark.parametrize("test", FAILED)
def test_the_short_summary_says_the_verdict(run: Run, test: str) -> None:
    """Its line begins with verdict, worst layer and check, before any class or module name."""
    assert run.summary(test)[:24].startswith(FAILED[test][:24])


def test_an_assertion_shows_the_users_line_and_no_frame_of_ours(run: Run) -> None:
    """Between the user's line and our text stands nothing."""
    block = run.block("test_asserts")
    assert re.search(
        r">       report.assert_healthy\(\)  # line: asserts\n( +\^+\n)?E       unhealthy: 2 ",
        block,
    )
    assert f"test_suite.py:{line('asserts')}: ModelHealthError" in block
    assert "pytest_modelhealth" not in block


def test_an_unasked_report_shows_the_line_that_made_it(run: Run) -> None:
    """The failure points at the inspection, says why it was checked and shows no frame of ours."""
    block = run.block("test_never_looks")
    shown = ">   inspector(nets.with_nan()).run_inspection(nets.BATCH)  # line: never_looks"
    assert f"{shown}\nE   unhealthy: 2 (finite)" in block
    assert (
        "E   The test did not ask for this report's verdict, so it was checked when the test ended;"
        in block
    )
    assert f"test_suite.py:{line('never_looks')}: ModelHealthError" in block
    assert "pytest_modelhealth" not in block
    assert "Traceback" not in block


def test_several_unasked_reports_raise_for_the_first_and_name_the_others(run: Run) -> None:
    """The healthy one is not named, and the second failure is told by its headline and line."""
    block = run.block("test_never_looks_at_three")
    assert f"test_suite.py:{line('three_first')}: ModelHealthError" in block
    assert "E   1 more inspection of this test failed:\n" in block
    assert f"E     test_suite.py:{line('three_second')}: unhealthy: 1 (dead_units)" in block


def test_the_limit_says_who_set_it(run: Run) -> None:
    """A marker and an argument are named where their limit broke."""
    assert "@modelhealth on test_marked" in run.block("test_marked")
    assert "argument of inspector" in run.block("test_call_overrides_marker")


def test_the_bodys_own_exception_stands_and_the_evidence_is_attached(run: Run) -> None:
    """The section says the verdict first, as the failure itself is about something else."""
    block = run.block("test_own_exception")
    assert "E       AssertionError: my own" in block
    assert "did not ask" not in block
    assert re.search(r"-+ modelhealth: 2 beside 0 -+\n.*unhealthy: 2 \(finite\)", block)


def test_evidence_is_a_section_of_the_failure(run: Run) -> None:
    """The culprit stands beside its predecessor, under a title that names both."""
    assert re.search(r"-+ modelhealth: 2 beside 0 -+\n", run.block("test_never_looks"))


def test_a_healthy_failure_has_no_section(run: Run) -> None:
    """A test that failed with healthy reports is not decorated, nor one that nothing can judge."""
    assert "modelhealth: 2" in run.output
    assert "- modelhealth" not in run.block("TestOther.test_fails_by_pytest")
    assert "- modelhealth" not in run.block("test_layer_pattern_matches_nothing")


def test_a_report_made_in_teardown_is_an_error_of_the_teardown(run: Run) -> None:
    """It came after the verdict on the test, and is not passed over."""
    block = run.block("ERROR at teardown of test_inspected_in_teardown")
    assert "unhealthy: 2 (finite)" in block


def test_an_inconclusive_verdict_is_told_once(run: Run) -> None:
    """The summary names the test, the layer and what would be needed; the test passed."""
    lines = run.output.splitlines()
    (told,) = [n for n, text in enumerate(lines) if "ModelHealthWarning: inconclusive" in text]
    assert lines[told - 1] == "test_suite.py::TestPasses::test_inconclusive"
    assert "1 (dead_units): " in lines[told]
    assert "65" in lines[told]


UNHEALTHY = 12
"""Failing or erring tests whose reports are unhealthy."""


def test_each_failing_test_has_a_folder_of_figures(run: Run) -> None:
    """Ids that differ in a forbidden character only do not share one; passing tests have none."""
    figures = run.figures()
    assert len(figures) == UNHEALTHY
    assert len([name for name in figures if "test_parameter-a-b" in name]) == 2
    for name, files in figures.items():
        assert re.fullmatch(r"[\w.-]+", name)
        assert {"culprit.png", "gradient_flow.png"} <= set(files), name
    for picture in run.folder.glob("artifacts/*/*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    folder = run.folder / "artifacts"
    assert f"modelhealth: figures of {UNHEALTHY} tests in {folder}" in run.output.splitlines()


def test_the_html_report_shows_the_same_pictures(run: Run) -> None:
    """pytest-html embeds each figure that was written, and no other."""
    text = html.unescape((run.folder / "report.html").read_text())
    embedded = {base64.b64decode(data) for data in re.findall(r"image/png;base64,([^\"]+)", text)}
    assert embedded == {path.read_bytes() for path in run.folder.glob("artifacts/*/*.png")}
    assert text.count('"name": "gradient flow"') >= UNHEALTHY


def test_junit_has_the_headline_as_its_message(run: Run) -> None:
    """What a CI server lists for a failed test is the verdict, and the details are its text."""
    cases = ElementTree.parse(run.folder / "junit.xml").iter("testcase")
    failure = next(case for case in cases if case.get("name") == "test_asserts").find("failure")
    assert failure is not None
    assert failure.get("message", "").startswith(HEADLINE)
    assert "\n" not in failure.get("message", "")
    assert "likely cause" in (failure.text or "")


RAISING = """
import pytest, torch
import torch.nn.functional as F
from torch import nn

BATCH = torch.ones(3, 4)

class Held(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held
    def forward(self, x):
        return self.held(x)  # line: forward

class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no gradient")  # line: backward

class Chained(Held):
    def forward(self, x):
        try:
            return self.held(x)
        except RuntimeError as error:
            raise ValueError("no such shape") from error

def refusing_loss(output):
    return output @ output  # line: loss

def test_in_forward(inspector):
    inspector(Held(Held(nn.Linear(5, 2)))).run_inspection(BATCH)

@torch.no_grad()
def test_in_a_step(inspector):
    model = Held(Held(nn.Linear(5, 2)))
    def step(model, optimizer, batch):
        return model(batch).sum()
    inspector(model).run_step(step, torch.optim.SGD(model.parameters()), BATCH)

def test_in_backward(inspector):
    model = Held(nn.Sequential(nn.Linear(4, 2), Held(Refusing.apply)))
    inspector(model).run_inspection(BATCH)

def test_in_the_loss(inspector):
    inspector(nn.Linear(4, 2)).run_inspection(BATCH, loss=refusing_loss)

def test_in_a_loss_of_torch(inspector):
    inspector(nn.Linear(4, 2)).run_inspection(BATCH, BATCH, loss=F.cross_entropy)

def test_of_a_cause(inspector):
    inspector(Chained(Held(nn.Linear(5, 2)))).run_inspection(BATCH)

def test_without_us(inspector):
    inspector(nn.Linear(4, 2)).run_inspection(BATCH)
    Held(nn.Linear(5, 2))(BATCH)
"""
USERS_LINES = {
    "test_in_forward": "test_in_forward forward forward",
    "test_in_a_step": "test_in_a_step step forward forward",
    "test_in_backward": "test_in_backward backward",
    "test_in_the_loss": "test_in_the_loss refusing_loss",
    "test_in_a_loss_of_torch": "test_in_a_loss_of_torch",
    "test_of_a_cause": "forward forward test_of_a_cause forward",
}
BETWEEN = re.compile(r"contextlib|[/\\]torch[/\\]|pytest_modelhealth[/\\]")


def test_of_a_models_own_exception_the_users_lines_stand_together(
    pytester: pytest.Pytester,
) -> None:
    """Neither torch's frames nor ours come between, in any style but with --full-trace."""
    pytester.makepyfile(test_raising=RAISING)
    shown = {}
    for style in ("--tb=short", "--tb=auto", "--tb=native", "--full-trace"):
        result = pytester.runpytest("-W", "default", "-rN", style)
        result.assert_outcomes(failed=len(USERS_LINES) + 1)
        parts = re.split(r"^_{3,} (\w+) _{3,}$", result.stdout.str(), flags=re.MULTILINE)
        shown[style] = dict(zip(parts[1::2], parts[2::2], strict=True))
    for test, lines in USERS_LINES.items():
        short = shown["--tb=short"][test]
        assert re.findall(r"^test_raising.py:\d+: in (\w+)$", short, re.MULTILINE) == lines.split()
        for style in ("--tb=short", "--tb=auto", "--tb=native"):
            # native begins with pytest's own frames
            assert not BETWEEN.search(shown[style][test].partition("test_raising.py")[2])
        assert BETWEEN.search(shown["--full-trace"][test])
        assert short.split("==")[0].rstrip().splitlines()[-1].startswith("E   ")
    assert "_call_impl" in shown["--tb=short"]["test_without_us"]
