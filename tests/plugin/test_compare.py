"""`inspector.compare` in a test run: its verdict, its text and its picture."""

from __future__ import annotations

import pytest

BROKEN = """
import copy, nets

def pair():
    reference = nets.healthy()
    candidate = copy.deepcopy(reference)
    candidate[2].bias.data[0] += 1
    return reference, candidate
"""


def test_a_refactor_that_changes_nothing_passes(nets: pytest.Pytester) -> None:
    """Two equal models pass, whether or not the test asks for the verdict."""
    nets.makepyfile(
        """
        import copy, nets

        def test_asked(inspector):
            model = nets.healthy()
            inspector.compare(model, copy.deepcopy(model), nets.BATCH).assert_equivalent()

        def test_unasked(inspector):
            model = nets.healthy()
            inspector.compare(model, copy.deepcopy(model), nets.BATCH)
            assert inspector.reports == []
        """
    )
    nets.runpytest("-W", "error").assert_outcomes(passed=2)


def test_a_failure_tells_its_story_once(nets: pytest.Pytester) -> None:
    """The culprit is in the summary line too; a section below would only repeat the table."""
    nets.makepyfile(
        BROKEN
        + """
def test_it(inspector):
    inspector.compare(*pair(), nets.BATCH).assert_equivalent()
"""
    )
    result = nets.runpytest("-W", "error")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E * not equivalent: 2: same input, other weights, other output: bias differs in 1 of*",
            "E * activations of 2: * elements differ, by * times the natural noise (limit 10)",
            "*FAILED *::test_it - not equivalent: 2: *",
        ]
    )
    result.stdout.no_fnmatch_line("*- modelhealth: *")
    told = [line for line in result.outlines if line.startswith("E") and "other weights" in line]
    assert len(told) == 1


def test_a_deep_model_has_more_layers_in_a_section(nets: pytest.Pytester) -> None:
    """The failure holds the layers around the culprit, the section below it those further off."""
    nets.makepyfile(
        """
        import copy, torch
        from torch import nn

        def test_it(inspector):
            torch.manual_seed(0)
            reference = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
            candidate = copy.deepcopy(reference)
            candidate[2].bias.data[0] += 1
            inspector.compare(reference, candidate, torch.randn(4, 8)).assert_equivalent()
        """
    )
    result = nets.runpytest("-W", "error")
    result.stdout.fnmatch_lines(["*- modelhealth: 2 through depth -*", "*~  19 *"])
    result.stdout.no_fnmatch_line("E *19 *")


def test_a_comparison_that_nobody_asked_is_checked(nets: pytest.Pytester) -> None:
    """The failure points at the line that compared."""
    nets.makepyfile(
        BROKEN
        + """
def test_it(inspector):
    inspector.compare(*pair(), nets.BATCH)
"""
    )
    result = nets.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            ">   inspector.compare(*pair(), nets.BATCH)",
            "E   not equivalent: 2: *",
            "E   The test did not ask for this report's verdict, so it was checked when the *;",
        ]
    )


def test_the_picture_is_among_the_artifacts(nets: pytest.Pytester) -> None:
    """`--modelhealth-artifacts` writes the error through depth, one folder a test."""
    nets.makepyfile(
        BROKEN
        + """
def test_it(inspector):
    inspector.compare(*pair(), nets.BATCH).assert_equivalent()
"""
    )
    nets.runpytest("--modelhealth-artifacts=out").assert_outcomes(failed=1)
    (picture,) = nets.path.glob("out/*/*.png")
    assert picture.name == "error_depth.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
