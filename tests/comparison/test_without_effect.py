"""What differs and changes nothing that is computed from it: a note, and no cover for a fault."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from corpus.models.paired import seeded
from pytest_modelhealth import Comparison, compare


class Scored(nn.Module):
    """Scores with a causal mask, a softmax, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.lowest, self.scale, self.shift = -math.inf, 1.0, 0.0
        self.reentrant = False

    def attend(self, x: Tensor) -> Tensor:
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = self.scale * self.q(x) @ self.k(x).mT + self.shift
        return torch.softmax(scores.masked_fill(future, self.lowest), -1) @ x

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant:
            return self.head(checkpoint(self.attend, x, use_reentrant=True))
        return self.head(self.attend(x))


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


class Normed(nn.Module):
    """A gain between a linear layer and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8, eps=0.0), nn.Linear(8, 3)
        self.gain, self.backward_gain = 1.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        scaled = self.gain * x + (self.backward_gain - 1) * (x - x.detach())
        return self.head(self.norm(scaled))


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


class Beside(nn.Module):
    """A linear layer with a product of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 8)
        self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


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


class Conv1D(nn.Module):
    """A linear layer that keeps its weight transposed, as GPT-2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 12)), nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Thirds(nn.Module):
    """The same as three linear layers."""

    def __init__(self, whole: Conv1D) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        parts = zip(whole.weight.chunk(3, 1), whole.bias.chunk(3), strict=True)
        for linear, (weight, bias) in zip(self.children(), parts, strict=True):
            linear.weight.data, linear.bias.data = weight.data.T.clone(), bias.data.clone()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


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


class TwoTables(nn.Module):
    """Two embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(5, 4), nn.Embedding(7, 4)
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.cat([self.user(ids[:, 0]), self.item(ids[:, 1])], -1))


class OneTable(nn.Module):
    """The same with one, whose rows come one below the other."""

    def __init__(self, model: TwoTables, offset: int) -> None:
        super().__init__()
        self.table, self.head, self.offset = nn.Embedding(12, 4), model.head, offset
        self.table.weight.data = torch.cat([model.user.weight.data, model.item.weight.data])

    def forward(self, ids: Tensor) -> Tensor:
        both = self.table(torch.stack([ids[:, 0], ids[:, 1] + self.offset]))
        return self.head(torch.cat([*both], -1))


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


class Twice(nn.Module):
    """Returns what its head reads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.stopped = nn.Linear(6, 6), nn.Linear(6, 3), False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.body(x))
        return self.head(hidden.detach() if self.stopped else hidden), hidden


def test_an_output_that_is_read_inside_has_another_gradient_in_compiled_code():
    """There it is a copy, behind what the head reads; where the head gives none, all differs."""
    model = seeded(Twice)
    comparison = compare(
        model, torch.compile(copy.deepcopy(model), backend="eager"), torch.ones(4, 6)
    )
    assert comparison.equivalent, str(comparison)
    assert note_on(comparison, "Twice").startswith("Twice: its gradients are others")
    assert not against(model, torch.ones(4, 6), stopped=True).equivalent
