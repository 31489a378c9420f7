"""Claims on real models before and after a change; what is expected stood before the code."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest

from corpus.runs import FAULTS, LOOK_ALIKES, Expected, Pair
from pytest_modelhealth.runs.difference.comparing import TestDifference, compare
from pytest_modelhealth.runs.difference.inspections import Grade
from tests.runs.difference import made
from tests.runs.difference.recorded import inspected


def differing(pair: Pair) -> TestDifference:
    """Return what is said of a pair; the two sides are inspected under different seeds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before, now = (inspected(side, seed) for seed, side in enumerate(pair))
    # Costs are not of interest here; they follow from shapes.
    difference = compare(made.run(made.test(before)), made.run(made.test(now)))
    return difference.tests[0] if difference.tests else TestDifference("")


@pytest.mark.parametrize("pair", LOOK_ALIKES, ids=lambda pair: pair.__name__)
def test_look_alikes_are_left_in_peace(pair: Callable[[], Pair]) -> None:
    """Nothing is worse, and no statistic, weight or batch is said to have changed."""
    found = differing(pair())
    assert found.grade is not Grade.WORSE
    noise = {"statistic", "weights", "batch", "finding", "verdict", "parameters", "shape"}
    assert not {change.kind for change in found.changes} & noise


@pytest.mark.parametrize(
    ("pair", "expected"), FAULTS.items(), ids=lambda one: getattr(one, "__name__", "")
)
def test_faults_are_named_where_they_are(pair: Callable[[], Pair], expected: Expected) -> None:
    """A change of the kind and at the layer expected is told, among the first of its kind."""
    found = differing(pair())
    named = {
        place.label
        for change in found.changes
        if change.kind in expected.kinds
        for place in change.places[:2]
    }
    assert named if not expected.layers else named & expected.layers
    if expected.worse is not None:
        assert (found.grade is Grade.WORSE) is expected.worse
