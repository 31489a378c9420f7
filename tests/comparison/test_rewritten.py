"""Rewritten models: what differs and changes nothing that is made of it is a note, no cover."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

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
    Tagger,
    Thirds,
    Twice,
    TwoTables,
    having,
    last_sample,
    merged,
    spoiled,
    step_by_step,
    time_first,
)
from pytest_modelhealth import compare
from pytest_modelhealth.comparing import without_effect
from pytest_modelhealth.comparison.counterparts import Link
from pytest_modelhealth.comparison.results import TensorResult
from pytest_modelhealth.comparison.runs import Key

STEPS, ROWS, SERIES = torch.randn(4, 5, 6), torch.randn(16, 6), torch.randn(4, 9, 6)
IDS = torch.stack([torch.arange(16) % 5, torch.arange(16) % 7], 1)


def adapted() -> nn.Module:
    """A net with an adapter."""
    return nn.Sequential(Beside(), nn.ReLU(), nn.Linear(8, 3))


def normed() -> nn.Module:
    """A net whose norm has nearly no epsilon."""
    made = nn.Sequential(nn.Linear(6, 64), nn.LayerNorm(64), nn.Linear(64, 3))
    made[1].eps = 1e-12
    return made


ANY = "any layer"
MASKED = "softmax: its inputs are others, -1e+09 for -inf; what is computed from them agrees"
OTHER_AXES = "lstm: its inputs are "
CASES: dict[str, tuple[Any, Callable[[nn.Module], nn.Module], Tensor, str | None, str]] = {
    "a finite mask": (Scored, having(lowest=-1e9), STEPS, None, MASKED),
    # a softmax cancels the one and not the other
    "a shift of all scores": (Scored, having(shift=0.5), STEPS, None, "softmax: its inputs are"),
    "a scale of all scores": (Scored, having(scale=0.999), STEPS, "Scored", ""),
    "a gradient that a reentrant checkpoint hides": (
        Scored, having(reentrant=True), STEPS.clone().requires_grad_(), None,
        "softmax: its gradient was not seen in the candidate",
    ),
    # neither what the norm gives nor the gradient of a weight knows of it
    "a scale that a norm cancels": (
        Normed, having(gain=0.9), ROWS, None, "norm: its inputs are others"
    ),
    "and one of the gradient alone": (
        Normed, having(gain=0.9, backward_gain=0.6), ROWS, ANY, ""
    ),
    "a merged adapter": (adapted, merged(1.0), ROWS, None, ""),
    "one that is merged wrongly": (adapted, merged(0.5), ROWS, "0", ""),
    # both embeddings in one tensor fit neither; the layer after them tells
    "one table for two": (
        TwoTables, lambda m: OneTable(copy.deepcopy(m), 5), IDS, None, ""
    ),
    "read from the wrong row": (
        TwoTables, lambda m: OneTable(copy.deepcopy(m), 4), IDS, ANY, ""
    ),
    # beside a variance of ten thousand it is no more than rounding
    "an epsilon that shows in no number": (
        normed, having(**{"1__eps": 1e-11}), 100 * ROWS, None,
        "1: eps is 1e-11, was 1e-12; no number of this batch shows it",
    ),
    "one that does": (normed, having(**{"1__eps": 0.1}), ROWS, "1", ""),
    # in compiled code a copy, behind what the head reads; where the head gives none, all differs
    "an output that is read inside": (
        Twice, lambda m: torch.compile(copy.deepcopy(m), backend="eager"), torch.ones(4, 6), None,
        "Twice: its gradients are others",
    ),
    "and one whose gradient is stopped": (Twice, having(stopped=True), torch.ones(4, 6), ANY, ""),
    "time first": (Tagger, time_first, SERIES, None, OTHER_AXES),
    "a cell in a loop": (Tagger, step_by_step, SERIES, None, OTHER_AXES),
    "time first, with another weight": (
        Tagger, spoiled(time_first, "lstm.weight_ih_l0", 1.001), SERIES, ANY, ""
    ),
    "a cell with another weight": (
        Tagger, spoiled(step_by_step, "cell.weight_ih", 1.001), SERIES, ANY, ""
    ),
    # the layout of one layer is not blamed for the weights of a later one
    "another weight behind it": (
        Tagger, spoiled(time_first, "head.weight", 1.01), SERIES, "head", ""
    ),
    "the wrong step behind it": (Tagger, last_sample, SERIES, ANY, ""),
}  # fmt: skip


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


@pytest.mark.parametrize("role", ["activations", "gradients"])
def test_another_shape_is_judged_by_the_next_tensor_of_its_own_direction(role):
    """It is set aside where that agrees; not where it differs, comes before, or is of the other."""

    def result(role: str, ratio: float, shape: str = "") -> TensorResult:
        link, size = Link(Key("a", role), (Key("a", role),)), (ratio, 0.0)
        return TensorResult(link, 10.0, shape=shape, error=size, floor=(1.0, 1.0))

    moved, right, wrong = result(role, 99.0, "2x3"), result(role, 1.0), result(role, 11.0)
    other = result("gradients" if role == "activations" else "activations", 1.0)
    assert without_effect([moved, right, wrong]) == [moved]
    assert without_effect([moved, moved, other, right]) == [moved, moved]
    assert without_effect([moved, wrong, right]) == []
    assert without_effect([right, moved, other]) == []
    assert without_effect([moved, result("buffers", 1.0)]) == []
