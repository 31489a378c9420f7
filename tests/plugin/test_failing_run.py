"""What a run shows of tests that fail, pass, and cannot be judged; `outcomes` has the suite."""

from __future__ import annotations

import re

import pytest

from tests.plugin.outcomes import FAILED, OTHERS, SUITE, Run, place


def test_the_outcomes_and_the_short_summary(everything: Run) -> None:
    """Unhealthy reports fail their tests; asking, skipping and expecting leave them alone.

    A line begins with verdict, worst layer and check, before any class or module name.
    """
    result = everything.result
    result.assert_outcomes(failed=20, passed=8, skipped=2, xfailed=1, warnings=2, errors=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "INTERNALERROR" not in everything.text
    assert result.stderr.str() == ""
    lines = dict(
        re.findall(r"^(?:FAILED|ERROR) test_every\.py::(.*) - (.*)$", everything.text, re.MULTILINE)
    )
    assert lines.keys() == FAILED.keys()
    assert len(FAILED) + len(OTHERS) == 32
    for test, row in FAILED.items():
        assert lines[test].startswith(row.summary[:24]), test


def test_a_failure_is_the_users_line_and_our_text(everything: Run) -> None:
    """Between the two stands no frame of ours; a report that nobody asked shows what made it."""
    block = everything.block("test_asserts")
    shown = r">       report.assert_healthy\(\)  # line: asserts\n( +\^+\n)?E       unhealthy: 2 "
    assert re.search(shown, block)
    assert f"test_every.py:{place('asserts')[1]}: ModelHealthError" in block
    unasked = everything.block("test_dead")
    line = SUITE.splitlines()[place("dead")[1] - 1]
    assert f">   {line.strip()}\nE   unhealthy: 1 (dead_units)" in unasked
    assert "E   The test did not ask for this report's verdict, so it was checked when" in unasked
    assert f"test_every.py:{place('dead')[1]}: ModelHealthError" in unasked
    for text in (block, unasked):
        assert "pytest_modelhealth" not in text
        assert "Traceback" not in text
    compared = everything.block("test_different")
    assert compared.count("other weights") == 1
    assert "E   not equivalent: 2: same input, other weights, other output" in compared
    assert "- modelhealth: " not in compared

    several = everything.block("test_three")
    assert f"test_every.py:{place('run')[1]}: ModelHealthError" in several
    assert "E   1 more inspection of this test failed:\n" in several
    assert f"E     test_every.py:{place('third')[1]}: unhealthy: 1 (dead_units)" in several
    assert "@modelhealth on test_marked" in everything.block("test_marked")
    assert "argument of inspector" in everything.block("test_limit_of_a_call")
    assert "unhealthy: 2 (finite)" in everything.block("ERROR at teardown of test_torn_down")


def test_evidence_is_a_section_of_the_failure(everything: Run) -> None:
    """The culprit stands beside its predecessor; below a failure of another kind, the verdict too.

    A test that failed with healthy reports is not decorated, nor one that nothing can judge.
    """
    for test in ("test_three", "ERROR at setup of test_set_up"):
        assert re.search(r"-+ modelhealth: 2 beside 0 -+\n", everything.block(test))
    assert "pytest_modelhealth/" not in everything.block("ERROR at setup of test_set_up")
    own = everything.block("test_own_exception")
    assert "E       AssertionError: my own" in own
    assert "did not ask" not in own
    assert re.search(r"-+ modelhealth: 2 beside 0 -+\n.*unhealthy: 2 \(finite\)", own)
    for test in ("TestOther.test_fails_by_pytest", "test_no_such_layer"):
        assert "- modelhealth" not in everything.block(test)


def test_a_doubt_and_a_warning_are_told_once(everything: Run) -> None:
    """The summary names the test, the layer and what would be needed; the tests passed."""
    lines = everything.text.splitlines()
    told = lines[lines.index("test_every.py::TestPasses::test_inconclusive") + 1]
    for word in ("ModelHealthWarning: ", "inconclusive: ", "1 (dead_units): ", "65"):
        assert word in told
    warned = lines.index("in tests:     test_every.py::TestPasses::test_warned")
    assert lines[warned - 1].startswith("1 (dead_units): ")


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
    assert re.search("test_raising.py:[0-9]+: RuntimeError", shown["--tb=auto"]["test_in_forward"])
    for test, lines in USERS_LINES.items():
        short = shown["--tb=short"][test]
        assert re.findall(r"^test_raising.py:\d+: in (\w+)$", short, re.MULTILINE) == lines.split()
        for style in ("--tb=short", "--tb=auto", "--tb=native"):
            # native begins with pytest's own frames
            assert not BETWEEN.search(shown[style][test].partition("test_raising.py")[2])
        assert BETWEEN.search(shown["--full-trace"][test])
        assert short.split("==")[0].rstrip().splitlines()[-1].startswith("E   ")
    assert "_call_impl" in shown["--tb=short"]["test_without_us"]


def test_a_line_is_a_line_and_no_traceback_is_none(nets: pytest.Pytester) -> None:
    """Of a verdict that was asked for and of one that was not; short and long show all."""
    nets.makepyfile(
        """
        import nets

        def test_asked(inspector):
            inspector(nets.with_nan()).run_inspection(nets.BATCH).assert_healthy()

        def test_unasked(inspector):
            inspector(nets.with_nan()).run_inspection(nets.BATCH)
        """
    )
    for style, count in (("line", 2), ("no", 0)):
        lines = nets.runpytest("-rN", f"--tb={style}").outlines
        told = [line for line in lines if "unhealthy" in line]
        assert all(re.match(r".*\.py:\d+: unhealthy: 2 \(finite\): ", line) for line in told)
        assert len(told) == count
        assert not any(line.startswith(("E ", "> ", "-")) for line in lines)
        assert not [line for line in lines if "likely cause" in line]


def test_evidence_is_shown_where_another_folder_has_a_conftest(nets: pytest.Pytester) -> None:
    """There pytest asks a set of all plugins which of them know the test."""
    folder = nets.mkdir("beside")
    folder.joinpath("conftest.py").write_text("")
    folder.joinpath("test_beside.py").write_text("def test_beside(): pass")
    nets.makepyfile(
        """
        import nets

        def test_dead(inspector):
            inspector(nets.with_dead_relu()).run_inspection(nets.BATCH)
        """
    )
    result = nets.runpytest()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["-* modelhealth: 1 * -*"])
    result.stdout.no_fnmatch_line("*could not be shown*")
