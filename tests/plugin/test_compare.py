"""`inspector.compare` in a test run: its verdict, its text and its picture."""

from __future__ import annotations

import pytest

SUITE = """
import copy, nets, torch
from torch import nn

def pair():
    reference = nets.healthy()
    candidate = copy.deepcopy(reference)
    candidate[2].bias.data[0] += 1
    return reference, candidate

def test_equal_and_asked(inspector):
    model = nets.healthy()
    inspector.compare(model, copy.deepcopy(model), nets.BATCH).assert_equivalent()

def test_equal_and_unasked(inspector):
    model = nets.healthy()
    inspector.compare(model, copy.deepcopy(model), nets.BATCH)
    assert inspector.reports == []

def test_asked(inspector):
    inspector.compare(*pair(), nets.BATCH).assert_equivalent()

def test_unasked(inspector):
    inspector.compare(*pair(), nets.BATCH)

def test_deep(inspector):
    torch.manual_seed(0)
    reference = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    candidate = copy.deepcopy(reference)
    candidate[2].bias.data[0] += 1
    inspector.compare(reference, candidate, torch.randn(4, 8)).assert_equivalent()
"""


def test_two_models_that_differ_fail_a_test(nets: pytest.Pytester) -> None:
    """The culprit is told once, and in the summary, with the layers around it.

    Two equal models pass, whether or not the test asks for the verdict. A comparison that nobody
    asked points at its line.
    """
    nets.makepyfile(test_it=SUITE)
    result = nets.runpytest("-W", "error", "--modelhealth-artifacts=out")
    result.assert_outcomes(passed=2, failed=3)
    _, asked, unasked, deep = result.stdout.str().split("\n____")
    (told,) = [line for line in asked.splitlines() if "other weights" in line]
    assert "not equivalent: 2: same input, other weights, other output: bias differs in 1" in told
    assert "activations of 2: " in asked
    assert "times the natural noise (limit 10)" in asked
    assert "- modelhealth: " not in asked
    assert ">   inspector.compare(*pair(), nets.BATCH)\nE   not equivalent: 2: " in unasked
    assert "E   The test did not ask for this report's verdict, so it was checked when" in unasked
    assert "  7 " in deep
    assert "  19 " not in deep
    result.stdout.fnmatch_lines("FAILED *::test_asked - not equivalent: 2: *")
    pictures = [*nets.path.glob("out/*/*.png")]
    assert {path.name for path in pictures} == {"error_depth.png"}
    assert len(pictures) == 3
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
