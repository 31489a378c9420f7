"""A run that showed nothing is inconclusive, and says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelhealth import HealthReport, Inspector, ModelHealthWarning

BATCH = torch.linspace(-1, 1, 256).reshape(64, 4)


class Net(nn.Module):
    """One layer, and whatever is made of its output."""

    def __init__(self, head: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.head = head

    def forward(self, x: Tensor) -> Any:
        return self.head(self.fc(x))


class Stream(nn.Module):
    """Yields what it would compute."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        yield self.fc(x)


class Silent(nn.Module):
    """Computes nothing and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> None:
        del x


def inspect(model: nn.Module, batch: Tensor = BATCH, **arguments: Any) -> HealthReport:
    """One inspection under the default settings."""
    torch.manual_seed(0)
    return Inspector(model).run_inspection(batch, **arguments)


@pytest.mark.parametrize(
    ("make", "reason", "move"),
    [
        (lambda: inspect(Net(nn.ReLU()), BATCH[:0]), "activation is empty", "give at least one"),
        (
            lambda: inspect(Net(nn.ReLU()).to("meta"), BATCH.to("meta")),
            "on the meta device has no values",
            "move model and batch to a device",
        ),
        (lambda: inspect(Stream()), "returned a value of type generator", "consume generators"),
        (lambda: inspect(Silent()), "it returned None", "return what it computes"),
        (lambda: inspect(Net(lambda y: None)), "it returned None", "return what it computes"),
        (lambda: inspect(Net(str)), "returned a value of type str", "return what it computes"),
    ],
    ids=["empty-batch", "meta", "generator", "nothing", "lost", "text"],
)
def test_a_run_that_showed_no_number_is_inconclusive(
    make: Callable[[], HealthReport], reason: str, move: str
) -> None:
    """One reason and the next move, in the model's own line; the test passes with a warning."""
    report = make()
    assert report.verdict == "inconclusive"
    (found,) = report.judgement.inconclusive
    assert found.layer == ""
    assert reason in found.reason
    assert move in found.reason
    with pytest.warns(ModelHealthWarning, match=f"inconclusive: .*{reason}"):
        report.assert_healthy()


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (Net(nn.ReLU()), {"backward": False}),
        (Net(lambda y: y.argmax(-1)), {"backward": False}),
        (Net(nn.ReLU()).requires_grad_(False), {"backward": False}),
        (nn.Identity(), {}),
    ],
    ids=["no-backward", "class-indices", "frozen", "identity"],
)
def test_a_run_that_showed_something_is_judged(model: nn.Module, arguments: Any) -> None:
    """A forward pass whose layers were seen is evidence, whatever comes of it."""
    assert inspect(model, **arguments).verdict == "healthy"


def test_a_later_batch_with_samples_is_evidence() -> None:
    """Batches are judged together: an empty one among them hides nothing."""
    assert Inspector(Net(nn.ReLU())).run_batches([BATCH[:0], BATCH]).verdict == "healthy"


def test_what_nobody_watched_is_not_missing() -> None:
    """Without activations to look at, their absence says nothing."""
    watching = Inspector(Stream()).watch("*", what="parameters")
    assert watching.run_inspection(BATCH).verdict == "healthy"
