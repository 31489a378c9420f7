"""How far the samples of an output deviate, as it is recorded of the model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from pytest_modelhealth import Inspector
from tests.capture.oracle import report_of


class Returns(nn.Module):
    """Gives out what a function makes of its input."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> object:
        return self.function(self.fc(x))  # type: ignore[operator]


def deviation(function: object, batch: Tensor) -> float | None:
    """What is recorded of a model that returns such."""
    return report_of(Returns(function), batch).observation.sample_deviation


def expected(output: Tensor) -> float:
    """The same by its definition."""
    wide = output.detach().double()
    return math.sqrt(wide.var(0, correction=0).mean()) / float(wide.std(correction=0))


@pytest.mark.parametrize("per_sample", [4, 40_000, 140_000])
def test_of_large_outputs_a_part_stands_for_all(per_sample: int) -> None:
    """It is the root of the mean variance along dimension 0, over the deviation of all numbers.

    Above 65,536 values a sample some are taken, and a pattern in them does not bias that.
    """
    outputs: list[Tensor] = []

    def widened(x: Tensor) -> Tensor:
        scales = torch.tensor([1.0, 3.0]).repeat(per_sample // 2)  # every second value is larger
        noise = torch.randn(len(x), per_sample, generator=torch.Generator().manual_seed(0))
        outputs.append(x.sum() * 0.0 + noise * scales + 5.0 * torch.arange(per_sample).remainder(7))
        return outputs[-1]

    exact = per_sample <= 65_536
    found = deviation(widened, torch.randn(8, 4))
    assert found == pytest.approx(expected(outputs[-1]), rel=1e-4 if exact else 2e-2)


@pytest.mark.parametrize(
    ("function", "samples"),
    [
        (lambda x: x[:, :1], 16),
        (lambda x: x.sum(), 16),
        (lambda x: x[:8], 16),
        (lambda x: x, 1),
        (lambda x: x * math.nan, 16),
        (lambda x: x * 0.0 + 3.0, 16),
    ],
    ids=["one value a sample", "a number", "no batch", "one sample", "not finite", "constant"],
)
def test_nothing_is_recorded_where_nothing_can_be_said(function: object, samples: int) -> None:
    """A single column around a large mean is no collapse."""
    assert deviation(function, torch.randn(samples, 4)) is None


def test_largest_of_several_outputs_counts() -> None:
    """One output that tells samples apart is enough; batches are merged the same way."""
    batch = torch.randn(16, 4)
    offset = torch.tensor([0.0, 1e3, 2e3, 3e3])
    torch.manual_seed(0)
    one = deviation(lambda x: x, batch)
    torch.manual_seed(0)
    assert deviation(lambda x: (x + offset, x), batch) == one
    model = Returns(lambda x: x + offset)
    inspector = Inspector(model)
    each = [inspector.run_inspection(b).observation.sample_deviation for b in (batch, 9 * batch)]
    merged = inspector.run_batches([batch, 9 * batch]).observation.sample_deviation
    assert merged == max(x for x in each if x is not None) != min(x for x in each if x is not None)
