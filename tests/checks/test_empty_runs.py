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
        torch.manual_seed(0)  # of four units all may be dead by chance
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
    (found,) = report._judgement.inconclusive
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


def in_mode(mode: Any, **arguments: Any) -> HealthReport:
    """An inspection inside a context that switches gradients off."""
    with mode:
        return inspect(Net(nn.ReLU()), **arguments)


class OwnLoss(nn.Module):
    """Returns a loss beside its output, as transformers do."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.loss = loss

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        output = self.fc(x)
        return {"loss": self.loss(output), "logits": output}


def foreign(output: Tensor) -> Tensor:
    """Return a loss that depends on a tensor of its own alone."""
    return torch.tensor(1.0, requires_grad=True) * 2


@pytest.mark.parametrize(
    ("make", "reason", "move"),
    [
        (lambda: in_mode(torch.no_grad()), "gradients are off here", "inspect outside of it"),
        (lambda: in_mode(torch.inference_mode()), "gradients are off here", "inspect outside"),
        (lambda: in_mode(torch.set_grad_enabled(False)), "gradients are off here", "outside"),
        (
            lambda: inspect(Net(nn.ReLU()).requires_grad_(False).eval()),
            "every parameter is frozen",
            "unfreeze what is trained",
        ),
        (
            lambda: inspect(Net(nn.ReLU()), loss=lambda y: torch.tensor(1.0, requires_grad=True)),
            "the loss is a new tensor without a graph",
            "compute it from the output",
        ),
        (
            lambda: inspect(OwnLoss(lambda y: y.mean().detach())),
            "the loss is a new tensor without a graph",
            "compute it from the output",
        ),
        (
            lambda: inspect(OwnLoss(lambda y: torch.tensor(1.0, requires_grad=True))),
            "the loss is a new tensor without a graph",
            "compute it from the output",
        ),
        (lambda: inspect(OwnLoss(foreign)), "reached no layer", "compute the loss from the output"),
        (lambda: inspect(Net(lambda y: y.argmax(-1))), "no floating-point number", "give a loss"),
        (lambda: inspect(Net(Tensor.detach)), "depends on a parameter", r"look for \.detach"),
    ],
    ids=[
        *("no_grad", "inference_mode", "set_grad_enabled", "frozen", "new-loss", "detached-loss"),
        *("new-own-loss", "foreign-loss", "class-indices", "detached-output"),
    ],
)
def test_a_run_without_any_gradient_is_inconclusive(
    make: Callable[[], HealthReport], reason: str, move: str
) -> None:
    """What could be judged is healthy; why no gradient could, and what would help, is said once."""
    report = make()
    assert report.verdict == "inconclusive"
    (found,) = report.inconclusive
    assert found.reason.startswith("no gradient could be judged: ")
    with pytest.warns(ModelHealthWarning, match=f"{reason}.*; .*{move}.*, or say backward=False"):
        report.assert_healthy()


@pytest.mark.parametrize(
    "make",
    [
        lambda: in_mode(torch.no_grad(), backward=False),
        lambda: inspect(nn.Sequential(nn.ReLU(), nn.Tanh())),
        lambda: inspect(nn.Linear(4, 4).requires_grad_(False), BATCH.clone().requires_grad_()),
        lambda: inspect(nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))),
        lambda: (
            Inspector(Net(nn.ReLU()).requires_grad_(False))
            .watch("*", what="activations")
            .run_inspection(BATCH)
        ),
        lambda: Inspector(Net(nn.ReLU()).requires_grad_(False)).run_batches(
            [BATCH, BATCH], backward=False
        ),
        lambda: Inspector(Net(nn.ReLU()).requires_grad_(False), checks="finite").run_inspection(
            BATCH
        ),
    ],
    ids=[
        *("backward=False", "no-parameters", "gradient-of-inputs", "frozen-backbone"),
        *("not-watched", "batches", "no-check-of-gradients"),
    ],
)
def test_a_run_that_needs_no_gradient_is_judged_without(make: Callable[[], HealthReport]) -> None:
    """It was left out, not looked for, or there is nothing to learn."""
    assert make().verdict == "healthy"


def test_one_batch_with_gradients_is_evidence() -> None:
    """Batches are judged together here too."""
    model = Net(nn.ReLU())
    modes = iter([False, True])

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.mean() if next(modes) else torch.tensor(1.0, requires_grad=True)

    report = Inspector(model).run_batches([(BATCH, BATCH)] * 2, loss=loss)
    assert not report.inconclusive


def test_an_unhealthy_run_without_gradients_is_unhealthy() -> None:
    """What was seen decides; the missing gradients add nothing to it."""
    model = Net(nn.ReLU())
    nn.init.constant_(model.fc.weight, float("nan"))
    with torch.no_grad():
        report = inspect(model)
    assert report.verdict == "unhealthy"
    assert not report.inconclusive
