"""A `LightningModule` whose batch comes alone is run by its training step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import InspectionError, Inspector
from pytest_modelhealth.capture import Inputs
from pytest_modelhealth.report import Outcome

BATCH = torch.linspace(-1, 1, 64).reshape(16, 4).sin(), torch.arange(16) % 2


@pytest.fixture
def made():
    """Makes modules with methods of their own."""
    base = pytest.importorskip("lightning.pytorch").LightningModule

    class Classifier(base):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

    return lambda **methods: type("Classifier", (Classifier,), methods)()


def test_the_loss_is_that_of_the_training_step(made):
    """Loss and gradients are those of a bare step; the module is left as it was."""
    module = made()
    before, twin = dict(vars(module)), copy.deepcopy(module.net)
    expected = F.cross_entropy(twin(BATCH[0]), BATCH[1])
    expected.backward()
    report = Inspector(module).run_inspection(BATCH)
    assert report.observation.loss == pytest.approx(expected.item())
    norm = torch.cat([twin[0].weight.grad.flatten(), twin[0].bias.grad]).norm().item()
    assert report["net.0"].statistics("parameter_gradients").norm == pytest.approx(norm, rel=1e-5)
    assert vars(module) == before
    assert report.healthy


def test_with_a_loss_inputs_go_into_the_forward(made):
    """The training step is not called."""
    module = made(training_step=lambda *_: 1 / 0)
    report = Inspector(module).run_inspection(BATCH[0], target=BATCH[1], loss=F.cross_entropy)
    assert report.observation.loss == pytest.approx(
        F.cross_entropy(module.net(BATCH[0]), BATCH[1]).item()
    )
    assert "58 parameters" in str(Inspector(module).summary(BATCH[0]))


def test_batches_of_any_kind_go_in_as_they_come(made):
    """A mapping is no keywords, and arguments of its own go in as they are."""
    seen = []

    def training_step(self, *arguments):
        seen.append(arguments)
        return self(BATCH[0]).square().mean()

    module = made(training_step=training_step)
    batch = {"x": BATCH[0]}
    inspector = Inspector(module)
    inspector.run_inspection(batch)
    inspector.run_inspection(Inputs(batch, 7))
    inspector.run_batches([BATCH[0], BATCH[0]])
    assert [type(arguments[0]) for arguments in seen] == [dict, dict, Tensor, Tensor]
    assert [arguments[1] for arguments in seen] == [0, 7, 0, 0]


def test_code_of_the_step_is_looked_into(made):
    """A functional activation of the training step is a layer, and its faults are found."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(F.relu(self.net(batch[0]) - 20), batch[1])

    report = Inspector(made(training_step=training_step)).run_inspection(BATCH)
    assert report["relu"].statistics("activations").zero_fraction == 1
    assert any(violation.layer == "relu" for violation in report.violations)


@pytest.mark.parametrize("leaks", [False, True])
def test_probes_see_what_the_forward_returns(made, leaks):
    """A loss alone would tell no sample from another."""

    def forward(self, x):
        return self.net(x - x.mean(0) if leaks else x)

    record = (
        Inspector(made(forward=forward))
        .run_inspection(BATCH, probes="sample_independence", costs=True)
        .probes["sample_independence"]
    )
    assert record.outcome is Outcome.JUDGED
    assert bool(record.partings) is leaks


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss: None, "training_step of Classifier returned None, so there is no loss"),
        (lambda loss: {"acc": loss}, "returned a mapping without 'loss'"),
        (lambda loss: loss.detach(), "has no graph"),
        (lambda loss: loss.item(), "training_step of Classifier returned float, not a tensor"),
        (lambda loss: loss.expand(2), r"has shape \(2,\), not a scalar"),
    ],
)
def test_what_is_no_loss_is_refused(made, returned, message):
    """The message says what to return."""

    def training_step(self, batch, batch_idx):
        return returned(self(batch[0]).square().mean())

    module = made(training_step=training_step)
    with pytest.raises(InspectionError, match=message):
        Inspector(module).run_inspection(BATCH)
    assert "forward" not in vars(module)
    assert "log" not in vars(module)


def stops(self, batch, batch_idx):
    """A training step that needs a trainer."""
    raise RuntimeError("Classifier is not attached to a `Trainer`.")


@pytest.mark.parametrize(
    ("methods", "batch", "words"),
    [
        ({}, BATCH[0], "went into training_step of Classifier, as it came alone; with loss="),
        ({"training_step": stops}, BATCH, "module.trainer = Trainer"),
        # its training step would train
        ({"automatic_optimization": False}, BATCH, "run_step(batch=batch)"),
    ],
)
def test_an_exception_says_what_ran(made, methods, batch, words):
    """It passes as it is, with a note on where the batch went."""
    with pytest.raises(Exception) as caught:
        Inspector(made(**methods)).run_inspection(batch)
    assert any(words in note for note in caught.value.__notes__)


def test_a_module_that_steps_itself_runs_its_forward(made):
    """Its training step would train."""
    assert Inspector(made(automatic_optimization=False)).run_inspection(BATCH[0]).healthy
