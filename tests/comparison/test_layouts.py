"""Tensors in another shape: no divergence in themselves, and no cover for one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from corpus.models.paired import seeded
from corpus.models.rewritten import Tagger, TimeFirst, step_by_step, time_first
from pytest_modelhealth import compare
from pytest_modelhealth.comparing import without_effect
from pytest_modelhealth.comparison.counterparts import Link
from pytest_modelhealth.comparison.results import TensorResult
from pytest_modelhealth.comparison.runs import Key


@pytest.mark.parametrize("rewrite", [time_first, step_by_step])
def test_another_order_of_axes_is_a_note_where_what_follows_agrees(rewrite):
    """Inner tensors of another shape hold the same numbers if all that is made of them agrees."""
    reference = seeded(Tagger)
    comparison = compare(reference, rewrite(reference), torch.randn(4, 9, 6))
    assert comparison.equivalent, str(comparison)
    assert any(
        note.startswith("lstm: its inputs are ") and "were 4x9x5: not compared" in note
        for note in comparison.notes
    )


@pytest.mark.parametrize("rewrite", [time_first, step_by_step])
def test_another_order_of_axes_hides_no_other_weight(rewrite):
    """A rewritten layer with a weight off by a thousandth is no rewriting of the same."""
    reference = seeded(Tagger)
    candidate = rewrite(reference)
    recurrent = candidate.lstm if rewrite is time_first else candidate.cell
    next(recurrent.parameters()).data[2] *= 1.001
    comparison = compare(reference, candidate, torch.randn(4, 9, 6))
    assert not comparison.equivalent


def test_a_fault_after_another_order_of_axes_is_named_where_it_begins():
    """The layout of one layer is not blamed for the weights of a later one."""
    reference = seeded(Tagger)
    candidate = time_first(reference)
    candidate.head.weight.data[1] *= 1.01
    comparison = compare(reference, candidate, torch.randn(4, 9, 6))
    assert comparison.first_divergence.layer == "head"


def test_the_wrong_step_after_another_order_of_axes_is_a_divergence():
    """The last sample for the last step has the right shape and other numbers."""

    class LastSample(TimeFirst):
        def forward(self, x: Tensor) -> Tensor:
            states = self.lstm(self.into(x).transpose(0, 1))[0]
            return self.head(states[:, -1][:4])

    reference = seeded(Tagger)
    candidate = LastSample()
    candidate.load_state_dict(reference.state_dict())
    candidate.lstm.batch_first = False
    comparison = compare(reference, candidate, torch.randn(4, 9, 6))
    assert not comparison.equivalent


def result(role: str, ratio: float, shape: str = "") -> TensorResult:
    """Return what became of a tensor; those with a shape have another one than before."""
    key = Key("a", role)
    size = (ratio, 0.0)
    return TensorResult(Link(key, (key,)), 10.0, shape=shape, error=size, floor=(1.0, 1.0))


@pytest.mark.parametrize("role", ["activations", "gradients"])
def test_another_shape_is_judged_by_the_next_tensor_of_its_own_direction(role):
    """It is set aside where that agrees; not where it differs, comes before, or is of the other."""
    moved, right, wrong = result(role, 99.0, "2x3"), result(role, 1.0), result(role, 11.0)
    other = result("gradients" if role == "activations" else "activations", 1.0)
    assert without_effect([moved, right, wrong]) == [moved]
    assert without_effect([moved, moved, other, right]) == [moved, moved]
    assert without_effect([moved, wrong, right]) == []
    assert without_effect([right, moved, other]) == []
    assert without_effect([moved, result("buffers", 1.0)]) == []
