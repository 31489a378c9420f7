"""What differs and changes nothing that is computed from it: a note, and no cover for a fault."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from corpus.models.paired import seeded
from corpus.models.rewritten import (
    Beside,
    Conv1D,
    Normed,
    OneTable,
    Scored,
    Thirds,
    Twice,
    TwoTables,
)
from pytest_modelhealth import Comparison, compare


def against(reference: nn.Module, batch: Tensor, **attributes: object) -> Comparison:
    """Compare a model with a copy that has other attributes."""
    candidate = copy.deepcopy(reference)
    for name, value in attributes.items():
        setattr(candidate, name, value)
    return compare(reference, candidate, batch)


def note_on(comparison: Comparison, layer: str) -> str:
    """Return the note on what a layer takes."""
    return next(note for note in comparison.notes if note.startswith(f"{layer}: its "))


def test_a_finite_mask_is_as_good_as_an_infinite_one():
    """The scores differ by infinity, what the softmax makes of them does not."""
    comparison = against(seeded(Scored), torch.randn(4, 5, 6), lowest=-1e9)
    assert comparison.equivalent, str(comparison)
    assert note_on(comparison, "softmax") == (
        "softmax: its inputs are others, -1e+09 for -inf; what is computed from them agrees"
    )


def test_a_shift_of_all_scores_is_no_divergence_and_a_scale_is_one():
    """A softmax cancels the one and not the other."""
    reference, batch = seeded(Scored), torch.randn(4, 5, 6)
    assert against(reference, batch, shift=0.5).equivalent
    scaled = against(reference, batch, scale=0.999)
    assert scaled.first_divergence.result.key[:2] == ("softmax", "inputs")


def test_a_scale_that_a_norm_cancels_both_ways_is_a_note():
    """Neither what the norm gives nor the gradient of a weight knows of it."""
    comparison = against(seeded(Normed), torch.randn(16, 6), gain=0.9)
    assert comparison.equivalent, str(comparison)
    assert "its inputs are others" in note_on(comparison, "norm")


def test_a_scale_of_the_gradient_alone_is_a_divergence():
    """Forward nothing differs, and the layer before the norm learns half as fast."""
    comparison = against(seeded(Normed), torch.randn(16, 6), gain=0.9, backward_gain=0.6)
    assert not comparison.equivalent


def test_a_gradient_that_a_reentrant_checkpoint_hides_is_a_note():
    """Functions in it are not seen in its backward; the gradients of parameters are."""
    batch = torch.randn(4, 5, 6, requires_grad=True)
    comparison = against(seeded(Scored), batch, reentrant=True)
    assert comparison.equivalent, str(comparison)
    assert "its gradient was not seen in the candidate" in note_on(comparison, "softmax")


def adapted() -> nn.Module:
    """Return a net with an adapter."""
    return nn.Sequential(Beside(), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_merged_adapter_is_judged_by_what_it_gives(scale):
    """Merged, its weights are others and its output is the same; merged wrongly, it is not."""
    reference = seeded(adapted)
    candidate = copy.deepcopy(reference)
    merged = copy.deepcopy(candidate[0].base)
    merged.weight.data += scale * candidate[0].b.weight.data @ candidate[0].a.weight.data
    candidate[0] = merged
    comparison = compare(reference, candidate, torch.randn(16, 6))
    assert comparison.equivalent is (scale == 1.0), str(comparison)
    assert comparison.alignment.to_candidate["0"] == "0"
    if scale != 1.0:
        assert comparison.first_divergence.layer == "0"


@pytest.mark.parametrize("fused_first", [True, False])
def test_a_transposed_projection_is_split_and_fused_by_its_columns(fused_first):
    """Gradients of its weight stand side by side, those of its parts one below the other."""
    fused = nn.Sequential(nn.Linear(4, 4), seeded(Conv1D), nn.Linear(12, 2))
    apart = copy.deepcopy(fused)
    apart[1] = Thirds(fused[1])
    pair = (fused, apart) if fused_first else (apart, fused)
    comparison = compare(*pair, torch.randn(16, 4))
    assert comparison.equivalent, str(comparison)
    apart[1].k.weight.data[0] *= 1.01
    assert not compare(*pair, torch.randn(16, 4)).equivalent


@pytest.mark.parametrize("offset", [5, 4])
def test_fused_tables_that_are_read_in_one_call_are_judged_by_what_follows(offset):
    """Both embeddings in one tensor fit neither; the layer after them tells."""
    reference = seeded(TwoTables)
    ids = torch.stack([torch.arange(16) % 5, torch.arange(16) % 7], 1)
    comparison = compare(reference, OneTable(copy.deepcopy(reference), offset), ids)
    assert comparison.equivalent is (offset == 5), str(comparison)


def test_settings_that_differ_and_change_no_number_are_a_note():
    """An epsilon beside a variance of 1 is no more than rounding, and is said all the same."""
    reference = seeded(lambda: nn.Sequential(nn.Linear(6, 64), nn.LayerNorm(64), nn.Linear(64, 3)))
    reference[1].eps = 1e-12
    candidate = copy.deepcopy(reference)
    candidate[1].eps = 1e-11
    comparison = compare(reference, candidate, 100 * torch.randn(16, 6))
    assert comparison.equivalent
    assert comparison.notes[0] == "1: eps is 1e-11, was 1e-12; no number of this batch shows it"
    candidate[1].eps = 0.1
    told = compare(reference, candidate, torch.randn(16, 6))
    assert not told.equivalent
    assert not any("no number of this batch" in note for note in told.notes)


def test_an_output_that_is_read_inside_has_another_gradient_in_compiled_code():
    """There it is a copy, behind what the head reads; where the head gives none, all differs."""
    model = seeded(Twice)
    comparison = compare(
        model, torch.compile(copy.deepcopy(model), backend="eager"), torch.ones(4, 6)
    )
    assert comparison.equivalent, str(comparison)
    assert note_on(comparison, "Twice").startswith("Twice: its gradients are others")
    assert not against(model, torch.ones(4, 6), stopped=True).equivalent
