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


def gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients of the bare training step."""
    twin = copy.deepcopy(model.net)
    loss = F.cross_entropy(twin(BATCH[0]), BATCH[1])
    return list(torch.autograd.grad(loss, list(twin.parameters())))


def test_the_loss_is_that_of_the_training_step(made):
    """Loss and gradients are those of a bare step; the module is left as it was."""
    module = made()
    before = dict(vars(module))
    report = Inspector(module).run_inspection(BATCH)
    expected = F.cross_entropy(module.net(BATCH[0]), BATCH[1])
    assert report.observation.loss == pytest.approx(expected.item())
    norm = report["net.0"].statistics("parameter_gradients").norm
    weight, bias = gradients(module)[:2]
    assert norm == pytest.approx(float(torch.cat([weight.flatten(), bias]).norm()), rel=1e-5)
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


def raised(module: Any, batch: Any) -> BaseException:
    """Return what an inspection raises."""
    with pytest.raises(Exception) as caught:
        Inspector(module).run_inspection(batch)
    return caught.value


def test_an_exception_says_what_ran(made):
    """It passes as it is, with a note on where the batch went."""
    (note,) = raised(made(), BATCH[0]).__notes__
    assert "went into training_step of Classifier" in note
    assert "loss=" in note

    def training_step(self, batch, batch_idx):
        raise RuntimeError("Classifier is not attached to a `Trainer`.")

    (note,) = raised(made(training_step=training_step), BATCH).__notes__
    assert "module.trainer = Trainer" in note


def test_a_module_that_steps_itself_runs_its_forward(made):
    """Its training step would train; the message names what runs it."""
    module = made()
    module.automatic_optimization = False
    assert Inspector(module).run_inspection(BATCH[0]).healthy
    assert any("run_step(batch=batch)" in note for note in raised(module, BATCH).__notes__)
