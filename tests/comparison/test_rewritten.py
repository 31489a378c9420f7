"""Rewritten models: what differs and changes nothing that is made of it is a note, no cover."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from corpus.models.paired import seeded
from corpus.models.rewritten import ANY, CASES, Conv1D, Thirds
from pytest_modelhealth import compare
from pytest_modelhealth.comparing import without_effect
from pytest_modelhealth.comparison.counterparts import Link
from pytest_modelhealth.comparison.results import TensorResult
from pytest_modelhealth.comparison.runs import Key


@pytest.mark.parametrize("case", CASES)
def test_a_rewriting_is_judged_by_what_is_computed_from_it(case: str) -> None:
    """Where that agrees, what differs is a note; where it does not, the layer is named."""
    build, make, inputs, culprit, words = CASES[case]
    reference = seeded(build)
    comparison = compare(reference, make(reference), inputs)
    assert comparison.equivalent is (culprit is None), str(comparison)
    if culprit not in (None, ANY):
        assert comparison.first_divergence.label == culprit
    assert any(note.startswith(words) for note in comparison.notes) or not words, comparison.notes
    assert culprit is None or not any("no number of this" in note for note in comparison.notes)


@pytest.mark.parametrize("fused_first", [True, False])
def test_a_projection_is_split_and_fused(fused_first):
    """The parts have no counterpart; what they give together is read in the next layer."""
    fused = nn.Sequential(nn.Linear(4, 4), seeded(Conv1D), nn.Linear(12, 2))
    apart = copy.deepcopy(fused)
    apart[1] = Thirds(fused[1])
    pair = (fused, apart) if fused_first else (apart, fused)
    comparison = compare(*pair, torch.randn(16, 4))
    assert comparison.equivalent, str(comparison)
    apart[1].k.weight.data[0] *= 1.01
    assert not compare(*pair, torch.randn(16, 4)).equivalent


@pytest.mark.parametrize("role", ["activations", "gradients"])
def test_another_shape_is_judged_by_the_next_tensor_of_its_own_direction(role):
    """It is set aside where that agrees; not where it differs, comes before, or is of the other."""

    def result(role: str, ratio: float, shape: str = "") -> TensorResult:
        link, size = Link(Key("a", role), Key("a", role)), (ratio, 0.0)
        return TensorResult(link, 10.0, shape=shape, error=size, floor=(1.0, 1.0))

    moved, right, wrong = result(role, 99.0, "2x3"), result(role, 1.0), result(role, 11.0)
    other = result("gradients" if role == "activations" else "activations", 1.0)
    assert without_effect([moved, right, wrong]) == [moved]
    assert without_effect([moved, moved, other, right]) == [moved, moved]
    assert without_effect([moved, wrong, right]) == []
    assert without_effect([right, moved, other]) == []
    assert without_effect([moved, result("buffers", 1.0)]) == []
