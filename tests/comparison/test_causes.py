"""A layer called more or less often and a weight tied or not: the first line says so, once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.models.called import (
    Net,
    Tied,
    TwoHeads,
    by_forward,
    by_its_parts,
    checkpointed,
    forgotten,
    halves,
    untied,
    without_effect,
)
from pytest_modelhealth import Comparison, Inspector, compare
from pytest_modelhealth.snapshot import check, record
from pytest_modelhealth.snapshot.drift import DriftReport, explain

IDS = torch.arange(35).reshape(5, 7) % 20


def next_token(logits: Tensor) -> Tensor:
    """Cross entropy of each next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def beside(reference: nn.Module, candidate: nn.Module) -> tuple[Comparison, DriftReport]:
    """Compare two models, and one with the snapshot of the other."""
    inputs, loss = (IDS, next_token) if isinstance(reference, Tied) else (BATCH, None)

    def run(model: nn.Module, **settings: bool) -> object:
        torch.manual_seed(2)
        return Inspector(model, **settings).run_inspection(inputs, loss=loss)

    drift = check(record(run(reference, calibrate=True)), run(candidate))
    return compare(reference, candidate, inputs, loss=loss), drift


BATCH = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))

CALLS = [
    ("inp fc fc norm block block dropout2 head", "fc: called twice, was once", "act"),
    ("inp fc act norm norm block block dropout2 head", "norm: called twice, was once", ""),
    ("inp fc act norm block block block dropout2 head", "block: called 3 times, was twice", ""),
    ("inp fc act norm dropout2 head", "block: no longer called", ""),
    ("inp fc act norm block block head", "dropout2: no longer called", ""),
    ("inp fc act block block dropout2 head", "norm: no longer called", ""),
    ("inp fc spare act norm block block dropout2 head", "spare: now called, was not", ""),
    ("inp fc act norm block block fc dropout2 head", "fc: called twice, was once", ""),
]


@pytest.mark.parametrize(("steps", "cause", "other"), CALLS)
def test_a_layer_called_more_or_less_often_is_the_first_cause(
    steps: str, cause: str, other: str
) -> None:
    """Both stories begin with it, and say it of one layer, at one place."""
    torch.manual_seed(0)
    reference = Net()
    candidate = copy.deepcopy(reference)
    candidate.steps = steps.split()
    comparison, drift = beside(reference, candidate)
    divergence = comparison.first_divergence
    assert divergence is not None
    assert (divergence.kind, divergence.layer) == ("calls", cause.partition(":")[0])
    assert repr(comparison).startswith(f"<Comparison not equivalent: {cause}; ")
    first, *rest = explain(drift)
    assert first.startswith(f"drift in {cause}; "), first
    assert "drifts follow" in first
    assert not any("called" in line and not (other and other in line) for line in rest), rest
    assert not any("called" in note for note in comparison.notes), comparison.notes


@pytest.mark.parametrize("change", [untied, forgotten])
@pytest.mark.parametrize("now", [False, True])
def test_a_weight_tied_no_longer_or_now_is_the_first_cause(
    change: Callable[[Tied], None], now: bool
) -> None:
    """Whether the values are still equal, so that only gradients differ, or are others."""
    torch.manual_seed(0)
    tied = Tied()
    apart = copy.deepcopy(tied)
    change(apart)
    reference, candidate = (apart, tied) if now else (tied, apart)
    comparison, drift = beside(reference, candidate)
    cause = f"head.weight: {'now' if now else 'no longer'} tied to embedding.weight; "
    assert comparison.first_divergence is not None
    assert comparison.first_divergence.kind == "tying"
    assert repr(comparison).startswith(f"<Comparison not equivalent: {cause}")
    first, *rest = explain(drift)
    assert first.startswith(f"drift in {cause}"), first
    assert not any("tied" in line or "head.weight" in line for line in rest), rest


@pytest.mark.parametrize("change", [halves, checkpointed, by_its_parts, by_forward, without_effect])
def test_another_number_of_calls_passes_where_every_number_agrees(
    change: Callable[[Net], None],
) -> None:
    """As much goes through the layer, or nothing comes of it: a note, no divergence, no drift."""
    torch.manual_seed(0)
    reference = Net().eval()
    candidate = Net().eval()
    candidate.load_state_dict(reference.state_dict())
    change(candidate)
    comparison, drift = beside(reference, candidate)
    assert comparison.equivalent, str(comparison)
    assert not any(change.layer and not change.harmless for change in drift.changes), str(drift)
    assert drift.drifts == (), str(drift)


def test_a_tied_weight_under_other_names_or_of_copies_that_share_passes() -> None:
    """A shared block unrolled into copies that share their weights computes the same."""
    torch.manual_seed(0)
    reference = Net()
    candidate = copy.deepcopy(reference)
    candidate.again = copy.deepcopy(candidate.block)
    candidate.again[0].weight = candidate.block[0].weight
    candidate.again[0].bias = candidate.block[0].bias
    candidate.second = lambda x: x + candidate.again(x)
    candidate.steps = ["inp", "fc", "act", "norm", "block", "second", "dropout2", "head"]
    comparison, drift = beside(reference, candidate)
    assert comparison.equivalent, str(comparison)
    assert not drift.drifted, str(drift)


def test_a_tie_that_no_gradient_shows_is_a_note_of_a_comparison() -> None:
    """Two equal parameters compute the same; that they are two is said all the same."""
    reference = Tied()
    candidate = copy.deepcopy(reference)
    untied(candidate)
    comparison = compare(reference, candidate, IDS, backward=False)
    assert comparison.equivalent
    (note,) = comparison.notes
    assert note == (
        "head.weight: no longer tied to embedding.weight; no number of this batch shows it"
    )


def test_a_fault_elsewhere_is_not_blamed_on_calls() -> None:
    """A layer on halves of the batch, and behind it another scale: the scale is the fault."""
    torch.manual_seed(0)
    reference = Net().eval()
    candidate = copy.deepcopy(reference)
    halves(candidate)
    candidate.norm.eps = 0.1
    comparison, drift = beside(reference, candidate)
    assert comparison.first_divergence is not None
    assert comparison.first_divergence.layer == "norm"
    assert "called" not in repr(comparison)
    assert "called" not in explain(drift)[0]


def test_another_head_is_used():
    """Neither is renamed to the other: each keeps its name, and one is no longer called."""
    torch.manual_seed(0)
    reference, candidate = TwoHeads("a"), TwoHeads("b")
    candidate.load_state_dict(reference.state_dict())
    text = str(compare(reference, candidate, torch.randn(8, 16)))
    assert "b: now called, was not; a: no longer called" in text
    assert "renamed" not in text
