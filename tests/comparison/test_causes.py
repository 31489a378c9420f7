"""A layer called more or less often and a weight tied or not: the first line says so, once."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.models import changed
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
from corpus.models.changed import Block, Scale
from corpus.pairs import twins
from pytest_modelhealth import Comparison, Inspector, compare
from pytest_modelhealth.rendering.comparison import drift as explain
from pytest_modelhealth.snapshot.drift import DriftReport
from tests.builders import check, record

IDS = torch.arange(35).reshape(5, 7) % 20
BATCH = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))


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


FAULTS: list[tuple[str | Callable[[Tied], None], str, str]] = [
    ("inp fc fc norm block block dropout2 head", "fc: called twice, was once", "act"),
    ("inp fc act norm norm block block dropout2 head", "norm: called twice, was once", ""),
    ("inp fc act norm block block block dropout2 head", "block: called 3 times, was twice", ""),
    ("inp fc act norm dropout2 head", "block: no longer called", ""),
    ("inp fc act norm block block head", "dropout2: no longer called", ""),
    ("inp fc act block block dropout2 head", "norm: no longer called", ""),
    ("inp fc spare act norm block block dropout2 head", "spare: now called, was not", ""),
    ("inp fc act norm block block fc dropout2 head", "fc: called twice, was once", ""),
    (untied, "head.weight: no longer tied to embedding.weight", ""),
    (forgotten, "head.weight: no longer tied to embedding.weight", ""),
    (untied, "head.weight: now tied to embedding.weight", ""),
    (forgotten, "head.weight: now tied to embedding.weight", ""),
]
"""The layers called or the change, the cause that is told first, and what else may be "called"."""


@pytest.mark.parametrize(("change", "cause", "other"), FAULTS)
def test_what_is_called_or_tied_otherwise_is_the_first_cause(
    change: str | Callable[[Tied], None], cause: str, other: str
) -> None:
    """Both stories begin with it, and say it of one layer, at one place."""
    is_tie = not isinstance(change, str)
    reference, candidate = twins(Tied if is_tie else Net)
    if is_tie:
        change(candidate)
    else:
        candidate.steps = change.split()
    if "now tied" in cause:
        reference, candidate = candidate, reference
    comparison, drift = beside(reference, candidate)
    divergence = comparison.first_divergence
    assert divergence is not None
    assert divergence.kind == ("tying" if is_tie else "calls")
    assert is_tie or divergence.layer == cause.partition(":")[0]
    assert repr(comparison).startswith(f"<Comparison not equivalent: {cause}; ")
    # a snapshot says first what the run newly warns of
    first, *rest = (line for line in explain(drift) if not line.startswith("new warning: "))
    assert first.startswith(f"drift in {cause}; "), first
    assert is_tie or "drifts follow" in first
    words = ("tied", "head.weight") if is_tie else ("called",)
    later = [line for line in rest if any(word in line for word in words)]
    assert all(other and other in line for line in later), rest
    assert is_tie or not any("called" in note for note in comparison.notes), comparison.notes


def unrolled(model: Net) -> None:
    """Run a copy of a shared block that shares its weights."""
    model.again = copy.deepcopy(model.block)
    model.again[0].weight, model.again[0].bias = model.block[0].weight, model.block[0].bias
    model.second = lambda x: x + model.again(x)
    model.steps = ["inp", "fc", "act", "norm", "block", "second", "dropout2", "head"]


@pytest.mark.parametrize(
    "change", [halves, checkpointed, by_its_parts, by_forward, without_effect, unrolled]
)
def test_another_number_of_calls_or_other_ties_pass_where_every_number_agrees(
    change: Callable[[Net], None],
) -> None:
    """As much goes through the layer, or nothing comes of it: a note, no divergence, no drift."""
    reference, candidate = twins(lambda: Net().train(change is unrolled))
    change(candidate)
    comparison, drift = beside(reference, candidate)
    assert comparison.equivalent, str(comparison)
    assert not any(change.fails for change in drift.changes), str(drift)
    assert not drift.drifted, str(drift)
    assert drift.drifts == (), str(drift)


def test_a_tie_that_no_gradient_shows_is_a_note_of_a_comparison() -> None:
    """Two equal parameters compute the same; that they are two is said all the same."""
    reference, candidate = twins(Tied)
    untied(candidate)
    comparison = compare(reference, candidate, IDS, backward=False)
    assert comparison.equivalent
    (note,) = comparison.notes
    assert note == (
        "head.weight: no longer tied to embedding.weight; no number of this batch shows it"
    )


def test_a_fault_elsewhere_is_not_blamed_on_calls() -> None:
    """A layer on halves of the batch, and behind it another scale: the scale is the fault."""
    reference, candidate = twins(lambda: Net().eval())
    halves(candidate)
    candidate.norm.eps = 0.1
    comparison, drift = beside(reference, candidate)
    assert comparison.first_divergence is not None
    assert comparison.first_divergence.layer == "norm"
    assert "called" not in repr(comparison)
    assert "called" not in explain(drift)[0]


def test_another_head_is_used():
    """Neither is renamed to the other: each keeps its name, and one is no longer called."""
    reference, candidate = twins(lambda: TwoHeads("a"))
    candidate.use = "b"
    text = str(compare(reference, candidate, torch.randn(8, 16)))
    assert "b: now called, was not; a: no longer called" in text
    assert "renamed" not in text


# ---- the operation that is new or gone -----------------------------------------------------------


def slipped(wrong):
    """Two stacks of equal weights, the middle block of the second with a slip."""
    right = nn.Sequential(Block(), Block(), Block())
    other = nn.Sequential(Block(), Block(wrong), Block())
    other.load_state_dict(right.state_dict())
    return right, other


OF_A_SUM = "1: every layer before is right, its output is not: the sum of `1`'s input and a product"
WORDS = {
    "lost": f"{OF_A_SUM} is gone",
    "unmasked": "is not: `masked_fill` of `1.left` and `1.mask` is gone",
    "rooted": "`abs` of `masked_fill` is new (changed.py:",
    "detached": "`detach` of `masked_fill` is new (changed.py:",
    "rewritten": "its own code after",
}


@pytest.mark.parametrize("wrong", WORDS)
def test_the_operation_that_is_new_or_gone_is_named(wrong):
    """A lost residual or mask, a new function, a detach; no long lists. A line is that of it."""
    torch.manual_seed(0)
    text = repr(compare(*slipped(wrong), torch.randn(16, 8)))
    assert WORDS[wrong] in text, text
    if wrong == "rooted":
        numbers = {int(n) for n in re.findall(r"changed\.py:(\d+)", text)}
        lines = Path(changed.__file__).read_text().splitlines()
        assert numbers
        assert all("left.abs().sqrt()" in lines[number - 1] for number in numbers)


def test_the_code_of_a_layer_of_ones_own_is_known_too():
    """Same weights, other output: here is what it computes now."""
    text = repr(compare(Scale(), Scale(rooted=True), torch.rand(16, 8)))
    assert "`sqrt` of `square` is new" in text or "`sqrt` of `pow` is new" in text, text
