"""Inputs that the output does not depend on, which are notes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelhealth import Inputs, Inspector
from pytest_modelhealth.report import Outcome, ProbeRecord

NAME = "input_effect"


def normal(*shape: int) -> Tensor:
    """Return seeded normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


class Takes(nn.Module):
    """Reads `x`, and of `extra` what it is told to."""

    def __init__(self, read: Any = lambda extra: 0.0) -> None:
        super().__init__()
        self.fc, self.read = nn.Linear(6, 3), read

    def forward(self, x: Tensor, extra: Any = None) -> Tensor:
        return self.fc(x) + self.read(extra)


def record_of(model: nn.Module, batch: Any, **given: Any) -> ProbeRecord:
    """Return what the probe took down; the model is healthy."""
    report = Inspector(model).run_inspection(batch, **({"probes": True} | given))
    assert not [v for v in (*report.violations, *report.warnings) if v.check == NAME]
    return report.observation.probes[NAME]


@pytest.mark.parametrize(
    "batch",
    [
        (normal(8, 6), normal(8, 3)),
        Inputs(normal(8, 6), extra=normal(8, 3)),
        {"x": normal(8, 6), "extra": normal(8, 3)},
        [normal(8, 6), torch.arange(8)],
    ],
)
def test_an_input_without_effect_is_a_note(batch: Any) -> None:
    """By position or by keyword, numbers or ids: it has the name that the forward gives it."""
    record = record_of(Takes(), batch)
    assert (record.outcome, record.forwards) == (Outcome.JUDGED, 2)
    assert record.notes == ("input 'extra' has no effect on the output",)


def test_inputs_inside_others_have_their_path() -> None:
    """One of a dictionary's."""
    extra = {"used": normal(8, 3), "kept": normal(8, 3)}
    record = record_of(Takes(lambda extra: extra["used"]), (normal(8, 6), extra))
    assert record.notes == ("input \"extra['kept']\" has no effect on the output",)


def test_an_effect_is_seen_through_a_mean_and_of_samples_in_equal_pairs() -> None:
    """A change of places would leave a mean; of equal neighbours another sample is taken."""
    record = record_of(Takes(lambda extra: extra.mean()), (normal(8, 6), normal(8, 3)))
    assert record.notes == ()
    extra = normal(4, 3).repeat_interleave(2, 0)
    assert record_of(Takes(lambda extra: extra), (normal(8, 6), extra)).notes == ()
    assert record_of(Takes(), (normal(8, 6), extra)).notes


def test_nan_is_no_effect() -> None:
    """Bits are compared, not numbers."""
    record = record_of(Takes(lambda _: torch.nan), (normal(8, 6), normal(8, 3)))
    assert len(record.notes) == 2


def test_what_the_model_refuses_is_a_note() -> None:
    """An input may be bound to another."""

    def strict(extra: Tensor) -> float:
        if not torch.equal(extra, torch.arange(8)):
            raise ValueError("ids must ascend")
        return 0.0

    (note,) = record_of(Takes(strict), (normal(8, 6), torch.arange(8))).notes
    assert "ids must ascend" in note


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        (normal(1, 6), "one sample"),
        ((normal(8, 6), normal(5, 3).sum(0, keepdim=True)), "in common"),
        (torch.ones(8, 6), "equal"),
    ],
)
def test_where_it_does_not_apply_it_says_so(batch: Any, why: str) -> None:
    """And is inconclusive if it was asked for by name."""
    record = record_of(Takes(), batch)
    assert record.outcome is Outcome.NOT_APPLICABLE
    assert why in record.reason
    report = Inspector(Takes()).run_inspection(batch, probes=NAME)
    assert why in report.inconclusive[0].reason


def test_the_dimension_of_samples_may_be_given() -> None:
    """What has none of it is left alone."""
    batch = (normal(5, 8, 6), normal(3))
    assert record_of(Takes(), batch, batch_dim=1).notes == ()
    batch = (normal(5, 8, 6), normal(5, 8, 3))
    assert record_of(Takes(), batch, batch_dim=1).notes
