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


def instead(forward: Callable[[Tensor], Any]) -> Net:
    """Return a net that runs this in place of its forward."""
    model = Net(nn.Identity())
    model.forward = forward
    return model


def streaming(x: Tensor) -> Any:
    """Yield what would be computed."""
    yield x


def inspect(model: nn.Module, batch: Tensor = BATCH, **arguments: Any) -> HealthReport:
    """One inspection under the default settings."""
    torch.manual_seed(0)
    return Inspector(model).run_inspection(batch, **arguments)


def in_mode(mode: Any, **arguments: Any) -> HealthReport:
    """An inspection inside a context that switches gradients off."""
    with mode:
        return inspect(Net(nn.ReLU()), **arguments)


def returning(loss: Callable[[Tensor], Tensor]) -> Net:
    """Return a net that returns a loss beside its output, as transformers do."""
    return Net(lambda output: {"loss": loss(output), "logits": output})


NO_NUMBER: dict[str, tuple[Callable[[], HealthReport], str, str]] = {
    # how it is run, why nothing was seen, and the next move
    "empty batch": (
        lambda: inspect(Net(nn.ReLU()), BATCH[:0]), "activation is empty", "give at least one"
    ),
    "meta": (
        lambda: inspect(Net(nn.ReLU()).to("meta"), BATCH.to("meta")),
        "on the meta device has no values", "move model and batch to a device",
    ),
    "generator": (
        lambda: inspect(instead(streaming)),
        "returned a value of type generator", "consume generators",
    ),
    "nothing": (
        lambda: inspect(instead(lambda x: None)), "it returned None", "return what it computes"
    ),
    "lost": (lambda: inspect(Net(lambda y: None)), "it returned None", "return what it computes"),
    "text": (
        lambda: inspect(Net(str)), "returned a value of type str", "return what it computes"
    ),
}  # fmt: skip
OFF = "gradients are off here", "inspect outside of it"
NEW = "the loss is a new tensor without a graph", "compute it from the output"
LEAF = torch.tensor(1.0, requires_grad=True)
NO_GRADIENT: dict[str, tuple[Callable[[], HealthReport], str, str]] = {
    "no_grad": (lambda: in_mode(torch.no_grad()), *OFF),
    "inference_mode": (lambda: in_mode(torch.inference_mode()), *OFF),
    "set_grad_enabled": (lambda: in_mode(torch.set_grad_enabled(False)), *OFF),
    "frozen": (
        lambda: inspect(Net(nn.ReLU()).requires_grad_(False).eval()),
        "every parameter is frozen", "unfreeze what is trained",
    ),
    "new loss": (lambda: inspect(Net(nn.ReLU()), loss=lambda y: LEAF), *NEW),
    "detached loss": (lambda: inspect(returning(lambda y: y.mean().detach())), *NEW),
    "new loss of its own": (lambda: inspect(returning(lambda y: LEAF)), *NEW),
    "loss of something else": (
        lambda: inspect(returning(lambda y: LEAF * 2)),
        "reached no layer", "compute the loss from the output",
    ),
    "class indices": (
        lambda: inspect(Net(lambda y: y.argmax(-1))), "no floating-point number", "give a loss"
    ),
    "detached output": (
        lambda: inspect(Net(Tensor.detach)), "depends on a parameter", r"look for \.detach"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [*NO_NUMBER, *NO_GRADIENT])
def test_a_run_that_showed_no_number_or_no_gradient_is_inconclusive(case: str) -> None:
    """One reason and the next move, in the model's own line; the test passes with a warning.

    Where gradients alone are missing, what could be judged is healthy.
    """
    make, reason, move = (NO_NUMBER | NO_GRADIENT)[case]
    report = make()
    assert report.verdict == "inconclusive"
    (found,) = report.inconclusive
    if case in NO_NUMBER:
        assert found.layer == ""
    else:
        assert found.reason.startswith("no gradient could be judged: ")
        move += ".*, or say backward=False"
    with pytest.warns(ModelHealthWarning, match=f"inconclusive: .*{reason}.*{move}"):
        report.assert_healthy()


def one_batch_with_gradients() -> HealthReport:
    """Of two batches the second has a loss that comes from the output."""
    modes = iter([False, True])
    return Inspector(Net(nn.ReLU())).run_batches(
        [(BATCH, BATCH)] * 2, loss=lambda output, _: output.mean() if next(modes) else LEAF
    )


FROZEN = Net(nn.ReLU()).requires_grad_(False)
JUDGED: dict[str, Callable[[], HealthReport]] = {
    # a forward pass whose layers were seen is evidence, whatever comes of it
    "no backward": lambda: inspect(Net(nn.ReLU()), backward=False),
    "class indices": lambda: inspect(Net(lambda y: y.argmax(-1)), backward=False),
    "frozen": lambda: inspect(FROZEN, backward=False),
    "identity": lambda: inspect(nn.Identity()),
    # batches are judged together: an empty one, or one without gradients, hides nothing
    "a later batch": lambda: Inspector(Net(nn.ReLU())).run_batches([BATCH[:0], BATCH]),
    "one batch with gradients": one_batch_with_gradients,
    # what nobody watched is not missing, nor a gradient that was left out or that nobody needs
    "parameters alone": lambda: (
        Inspector(instead(streaming)).watch("*", what="parameters").run_inspection(BATCH)
    ),
    "activations alone": lambda: (
        Inspector(FROZEN).watch("*", what="activations").run_inspection(BATCH)
    ),
    "without gradients": lambda: in_mode(torch.no_grad(), backward=False),
    "no parameters": lambda: inspect(nn.Sequential(nn.ReLU(), nn.Tanh())),
    "gradient of inputs": lambda: inspect(
        nn.Linear(4, 4).requires_grad_(False), BATCH.clone().requires_grad_()
    ),
    "frozen backbone": lambda: inspect(
        nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    ),
    "batches": lambda: Inspector(FROZEN).run_batches([BATCH, BATCH], backward=False),
    "no check of gradients": lambda: Inspector(FROZEN, checks="finite").run_inspection(BATCH),
}


@pytest.mark.parametrize("case", JUDGED)
def test_a_run_that_showed_something_is_judged(case: str) -> None:
    """What was seen is evidence enough, and what was not looked for is not missing."""
    assert JUDGED[case]().verdict == "healthy"


def test_an_unhealthy_run_without_gradients_is_unhealthy() -> None:
    """What was seen decides; the missing gradients add nothing to it."""
    model = Net(nn.ReLU())
    nn.init.constant_(model.fc.weight, float("nan"))
    with torch.no_grad():
        report = inspect(model)
    assert report.verdict == "unhealthy"
    assert not report.inconclusive
