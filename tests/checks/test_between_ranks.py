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


def test_without_ranks_nothing_is_said(seen: tuple[Observation, Settings]) -> None:
    """One process has nobody to disagree with."""
    assert judge(*seen).violations == ()


@pytest.mark.parametrize(
    "kind",
    [
        "same_weights",
        "distinct_data",
        "replicas_agree",
        "averaged_gradients",
        "same_path",
        "unused_parameters",
    ],
)
def test_a_disagreement_fails_as_it_is_told(seen: tuple[Observation, Settings], kind: str) -> None:
    """Its message, layer, role and tensor are those of the violation, which stands by itself."""
    observation, settings = seen
    (found,) = judge(of_ranks(observation, told(kind)), settings).violations
    assert (found.check, found.layer, found.role, found.tensor) == (
        kind,
        "0",
        "parameters",
        "weight",
    )
    assert found.message == "it is wrong"
    assert found.cause


@pytest.mark.parametrize(("value", "fails"), [(1.5, False), (1.51, True)])
def test_weights_of_samples_have_a_limit(
    seen: tuple[Observation, Settings], value: float, fails: bool
) -> None:
    """Up to one and a half a target may weigh more."""
    observation, settings = seen
    judged = judge(of_ranks(observation, told("even_weights", value)), settings)
    assert bool(judged.violations) is fails


@pytest.mark.parametrize(("samples", "warns"), [(16.0, False), (15.0, True)])
def test_batch_norms_warn_of_few_samples(
    seen: tuple[Observation, Settings], samples: float, warns: bool
) -> None:
    """Sixteen are enough, and fewer fail nothing."""
    observation, settings = seen
    judged = judge(of_ranks(observation, told("synced_norm", samples)), settings)
    assert judged.violations == ()
    assert bool(judged.warned) is warns


def test_what_may_be_meant_warns(seen: tuple[Observation, Settings]) -> None:
    """A buffer that differs in evaluation mode may be written in training."""
    observation, settings = seen
    judged = judge(of_ranks(observation, told("same_weights", grade="warn")), settings)
    assert judged.violations == ()
    assert [found.check for found in judged.warned] == ["same_weights"]


def test_disagreements_explain_nothing(seen: tuple[Observation, Settings]) -> None:
    """Each fault between ranks stands by itself, and hides no other."""
    observation, settings = seen
    both = of_ranks(observation, told("same_weights"), told("same_path"))
    judged = judge(both, settings)
    assert [found.check for found in judged.violations] == ["same_weights", "same_path"]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((1,), "rank 1"),
        ((0, 2), "ranks 0 and 2"),
        ((0, 1, 2), "ranks 0, 1 and 2"),
    ],
)
def test_ranks_have_names(ranks: tuple[int, ...], text: str) -> None:
    """All of them are named."""
    assert named_ranks(ranks) == text
