"""Checks that read in what ranks disagree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.checks.judging import judge
from pytest_modelhealth.report import Finding, Observation
from pytest_modelhealth.report.parts import Ranks, named_ranks
from pytest_modelhealth.settings import Settings


@pytest.fixture
def seen() -> tuple[Observation, Settings]:
    """Return a healthy observation of two layers, and settings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    report = Inspector(model).run_inspection(torch.randn(64, 12))
    return report.observation, report._settings


def of_ranks(observation: Observation, *found: Finding) -> Observation:
    """Return the observation as one of two ranks that disagree."""
    return replace(observation, ranks=Ranks((0, 1), "DDP", found))


def told(kind: str, value: float = 1.0, **more: object) -> Finding:
    """Return a disagreement at the first layer."""
    given = {"tensor": "weight", "message": "it is wrong", "between_ranks": True, **more}
    return Finding(kind, "0", "parameters", value, **given)


FAILS = (
    *("same_weights", "distinct_data", "replicas_agree", "averaged_gradients", "same_path"),
    "unused_parameters",
)


def test_a_disagreement_fails_as_it_is_told(seen: tuple[Observation, Settings]) -> None:
    """Its message, layer, role and tensor are those of the violation; one process has none.

    Each fault between ranks stands by itself, and hides no other.
    """
    observation, settings = seen
    assert judge(observation, settings).violations == ()
    violations = judge(of_ranks(observation, *map(told, FAILS)), settings).violations
    assert {found.check for found in violations} == {*FAILS}
    for found in violations:
        place = (found.layer, found.role, found.tensor)
        assert (place, found.message) == (("0", "parameters", "weight"), "it is wrong")
        assert found.cause


@pytest.mark.parametrize(
    ("found", "grade"),
    [
        # up to one and a half a target may weigh more
        (told("even_weights", 1.5), None),
        (told("even_weights", 1.51), "fail"),
        # sixteen samples of a batch norm are enough
        (told("synced_norm", 16.0), None),
        (told("synced_norm", 15.0), "warn"),
        # a buffer that differs in evaluation mode may be written in training
        (told("same_weights", grade="warn"), "warn"),
    ],
)
def test_what_has_a_limit_or_may_be_meant(
    seen: tuple[Observation, Settings], found: Finding, grade: str | None
) -> None:
    """Beyond its limit it fails, or warns where fewer are no fault."""
    judged = judge(of_ranks(seen[0], found), seen[1])
    assert [one.check for one in judged.violations] == [found.check] * (grade == "fail")
    assert [one.check for one in judged.warned] == [found.check] * (grade == "warn")


def test_ranks_have_names() -> None:
    """All of them are named."""
    texts = {(1,): "rank 1", (0, 2): "ranks 0 and 2", (0, 1, 2): "ranks 0, 1 and 2"}
    assert {ranks: named_ranks(ranks) for ranks in texts} == texts
