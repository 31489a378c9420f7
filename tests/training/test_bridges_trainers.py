"""Trainers of other libraries: they are monitored, and one step of them is inspected."""

from __future__ import annotations

import copy
import importlib
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from pytest_modelhealth import InspectionError, Inspector

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}
BATCH = torch.linspace(-1, 1, 64).reshape(16, 4).sin(), torch.arange(16) % 2
pytestmark = pytest.mark.filterwarnings(
    "ignore", "error::pytest_modelhealth.ModelHealthWarning"
)  # of trainers


@pytest.fixture(params=["lightning", "pytorch_lightning"])
def lightning(request):
    """The part of Lightning with its trainer, and the name it is imported by."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(request.param)
        name = "lightning.pytorch" if request.param == "lightning" else request.param
        return importlib.import_module(name), request.param


def classifier(pl: Any, **overrides: Any) -> Any:
    """A small module of Lightning, and methods of its own."""

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return {"loss": loss}

        configure_optimizers = scheduled(interval="step")

    return type("Classifier", (Classifier,), overrides)()


def scheduled(**config: Any) -> Any:
    """Return what configures an optimizer with a schedule that is stepped so."""

    def configure_optimizers(module):
        optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **config}}

    return configure_optimizers


def gan(pl: Any) -> Any:
    """A module of Lightning with two optimizers, which it steps itself."""

    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.generator, self.critic = nn.Linear(3, 4), nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            fake = self.generator(torch.randn(16, 3))
            for optimizer, output in ((first, -self.critic(fake)), (second, self.critic(batch[0]))):
                optimizer.zero_grad()
                self.manual_backward(F.softplus(output).mean())
                optimizer.step()
            for schedule in self.lr_schedulers():
                schedule.step()

        def configure_optimizers(self):
            held = [torch.optim.SGD(p.parameters(), 0.1) for p in (self.generator, self.critic)]
            return held, [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in held]

    return Gan()


def batches(count: int) -> DataLoader:
    """Return a loader of the one batch."""
    return DataLoader([BATCH] * count, batch_size=None)


def has_hooks(model: nn.Module) -> bool:
    """Whether a hook is on any module."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# ---- Lightning, monitored


@pytest.mark.parametrize("every_nth", [1, 2])
def test_lightning_steps_are_those_of_the_optimizer(lightning, every_nth):
    """Watched from the first step on, with the loss; batches accumulated are one step."""
    pl, library = lightning
    module = classifier(pl)
    monitor = Inspector(module).monitor(every=2)
    callback = monitor.callback(library)
    assert isinstance(callback, pl.Callback)
    pl.Trainer(callbacks=[callback], accumulate_grad_batches=every_nth, **QUIET).fit(
        module, batches(6)
    )
    assert monitor.history.steps.tolist() == ([0, 2, 4] if every_nth == 1 else [0, 2])
    assert monitor.latest.passes == every_nth
    assert monitor.latest.optimizer_steps == 1
    assert monitor.history.loss[0] == pytest.approx(0.69, abs=0.1)
    assert monitor.history["net.0", "update_ratio"].min() > 0
    assert not monitor._is_started
    assert not has_hooks(module)


def test_an_exception_ends_the_monitor_in_lightning(lightning):
    """Nothing stays on the model."""
    pl, library = lightning

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise ValueError("a bad batch")
        return {"loss": self.net(batch[0]).square().mean()}

    module = classifier(pl, training_step=training_step)
    monitor = Inspector(module).monitor()
    with pytest.raises(ValueError, match="a bad batch"):
        pl.Trainer(callbacks=[monitor.callback(library)], **QUIET).fit(module, batches(4))
    assert len(monitor.history) == 2
    assert not monitor._is_started
    assert not has_hooks(module)


def test_unknown_and_missing_libraries_are_named(monkeypatch):
    """The message says which there are, or what cannot be imported."""
    monitor = Inspector(nn.Linear(2, 2)).monitor()
    with pytest.raises(InspectionError, match=r"'ligthning'.*lightning.*transformers.*step_end"):
        monitor.callback("ligthning")
    monkeypatch.setitem(__import__("sys").modules, "lightning.pytorch", None)
    with pytest.raises(InspectionError, match="needs lightning, which cannot be imported"):
        monitor.callback("lightning")


# ---- Lightning, one step


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}])
def test_a_step_of_lightning_is_the_one_its_trainer_makes(lightning, settings, monkeypatch):
    """After three steps the parameters are those after `fit` on the same batch; then they are back.

    Logging needs no trainer; schedules of each step are stepped.
    """
    pl, _ = lightning
    trained = classifier(pl)
    count = 3 * settings.get("accumulate_grad_batches", 1)
    pl.Trainer(**QUIET, **settings).fit(trained, batches(count))
    module = classifier(pl)
    seen = after_calls(monkeypatch, module)
    before, attributes = copy.deepcopy(module.state_dict()), dict(vars(module))
    state = torch.get_rng_state()
    trainer = pl.Trainer(**QUIET, **settings) if settings else None
    report = Inspector(module).run_step(trainer, batch=BATCH, resume=True)
    report.assert_healthy()
    for name, value in trained.state_dict().items():
        assert torch.allclose(seen[2][name], value, rtol=1e-5, atol=1e-7)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert vars(module) == attributes
    assert torch.equal(torch.get_rng_state(), state)


def after_calls(monkeypatch: Any, model: nn.Module) -> list[dict[str, Any]]:
    """Return a list that gets the state of a model after each call of a step."""
    from pytest_modelhealth.training.stepping.session import Session

    seen: list[dict[str, Any]] = []
    call = Session.call

    def noted(self: Session, batch: Any = None) -> Any:
        result = call(self, batch)
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        return result

    monkeypatch.setattr(Session, "call", noted)
    return seen


@pytest.mark.parametrize(
    ("override", "objection"),
    [
        ({"optimizer_zero_grad": lambda *_: None}, "left_over_gradients"),
        ({"configure_optimizers": scheduled(interval="epoch")}, None),
        ({"configure_optimizers": scheduled(interval="step", frequency=100)}, None),
    ],
    ids=["gradients kept", "schedule of epochs", "schedule of each hundredth step"],
)
def test_faults_in_a_step_of_lightning_are_found(lightning, override, objection):
    """A schedule that is not due is not missed: Lightning knows when to step it."""
    report = Inspector(classifier(lightning[0], **override)).run_step(batch=BATCH)
    found = {one.check for one in (*report.violations, *report.warnings)}
    assert objection in found if objection else not report.warnings


def test_manual_optimization_steps_several_optimizers(lightning):
    """Of a step that returns nothing, the loss is the sum of what went backward."""
    module = gan(lightning[0])
    report = Inspector(module).run_step(batch=BATCH)
    report.assert_healthy()
    assert len(report.observation.stepped.optimizers) == 2
    assert report.observation.stepped.losses[0] > 0.5
    module.automatic_optimization = True
    with pytest.raises(InspectionError, match="automatic_optimization = False"):
        Inspector(module).run_step(batch=BATCH)


def test_what_only_a_trainer_has_is_asked_for(lightning):
    """A step that reads it needs the trainer; the message says so."""
    pl, _ = lightning

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean() * self.trainer.max_epochs

    module = classifier(pl, training_step=training_step)
    with pytest.raises(InspectionError, match=r"self\.trainer\.max_epochs.*Give the Trainer"):
        Inspector(module).run_step(batch=BATCH)
    report = Inspector(module).run_step(pl.Trainer(**QUIET), batch=BATCH)
    assert report.observation.stepped.losses[0] > 0
    with pytest.raises(InspectionError, match="needs a batch"):
        Inspector(module).run_step()
    silent = classifier(pl, configure_optimizers=lambda self: None)
    with pytest.raises(InspectionError, match="returns no optimizer"):
        Inspector(silent).run_step(batch=BATCH)
    given = torch.optim.SGD(silent.parameters(), 0.1)
    Inspector(silent).run_step(optimizer=given, batch=BATCH).assert_healthy()


# ---- transformers


class Scorer(nn.Module):
    """A model as transformers has them: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x, labels):
        if x.isnan().any():
            raise ValueError("a bad batch")
        logits = self.head(self.inside(x).tanh())
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


DATA = [{"x": x, "labels": y} for x, y in zip(*BATCH, strict=True)]


@pytest.fixture
def make_trainer(tmp_path):
    """Make a trainer of a `Scorer`, whose data are in order."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    def make(callbacks=(), data=DATA, **settings):
        arguments = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=settings.pop("train_batch_size", 4),
            num_train_epochs=1,
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            logging_steps=1000,
            train_sampling_strategy="sequential",
            **settings,
        )
        return Trainer(Scorer(), arguments, train_dataset=data, callbacks=list(callbacks))

    return make


def monitored(make_trainer: Any, every: int = 1, **settings: Any) -> tuple[Any, Any]:
    """Make a trainer that is monitored; return it and the monitor."""
    trainer = make_trainer(**settings)
    monitor = Inspector(trainer.model).monitor(every=every)
    trainer.add_callback(monitor.callback("transformers"))
    return trainer, monitor


@pytest.mark.parametrize("count", [1, 2])
def test_transformers_steps_are_those_of_the_optimizer(make_trainer, count):
    """They bear its numbers; the loss is what the model returned, the mean of batches."""
    trainer, monitor = monitored(make_trainer, gradient_accumulation_steps=count)
    first = trainer.model
    with torch.no_grad():
        loss = float(first(BATCH[0][: 4 * count], BATCH[1][: 4 * count])["loss"])
    trainer.train()
    assert monitor.history.steps.tolist() == list(range(1, 4 // count + 1))
    assert monitor.latest.passes == count
    assert monitor.history.loss[0] == pytest.approx(loss, rel=1e-5)
    assert monitor.history["head", "update_ratio"].min() >= 0
    assert not monitor._is_started
    assert not has_hooks(trainer.model)


def test_steps_of_transformers_between_are_free_of_us(make_trainer):
    """With ``every=2``, no hook is on the model in the others, that of the callback included."""
    from transformers import TrainerCallback

    class Looks(TrainerCallback):
        def on_step_begin(self, args, state, control, **given):
            seen.append((state.global_step + 1, has_hooks(given["model"])))

    seen: list[Any] = []
    trainer, monitor = monitored(make_trainer, every=2, callbacks=[Looks()])
    trainer.train()
    assert seen == [(1, True), (2, True), (3, False), (4, True)]
    assert monitor.history.steps.tolist() == [1, 2, 4]
    assert (monitor.history.loss > 0).all()


def test_a_context_ends_the_monitor_if_transformers_raises(make_trainer):
    """It tells no callback of exceptions, so the monitor is entered around the training."""
    bad = [*DATA[:8], *({"x": d["x"] * float("nan"), "labels": d["labels"]} for d in DATA[8:])]
    trainer, monitor = monitored(make_trainer, data=bad)
    with pytest.raises(ValueError, match="a bad batch"), monitor:
        trainer.train()
    assert len(monitor.history) == 2
    assert not has_hooks(trainer.model)


@pytest.mark.parametrize(
    "settings", [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.01}]
)
def test_a_step_of_transformers_is_the_one_its_trainer_makes(make_trainer, settings, monkeypatch):
    """After two steps the parameters are those after `train` on the batch; then all is back."""
    same = DATA[:4] * 2 * settings.get("gradient_accumulation_steps", 1)
    trained = make_trainer(data=same, **settings)
    trained.train()
    trainer = make_trainer(data=same, **settings)
    model = trainer.model
    seen = after_calls(monkeypatch, model)
    batch = {"x": BATCH[0][:4], "labels": BATCH[1][:4]}
    holders = [model, trainer, trainer.accelerator]
    before = copy.deepcopy(model.state_dict()), [dict(vars(one)) for one in holders]
    state = torch.get_rng_state()
    Inspector(model).run_step(trainer, batch=batch, calls=2)
    for name, value in trained.model.state_dict().items():
        assert torch.allclose(seen[1][name], value, rtol=1e-5, atol=1e-7)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[0][name])
    assert [vars(one) for one in holders] == before[1]
    assert not trainer.accelerator._models
    assert torch.equal(torch.get_rng_state(), state)


def test_a_trained_trainer_is_left_as_it_was(make_trainer):
    """Its optimizer and schedule keep their state; the step has a schedule from the beginning."""
    trainer = make_trainer()
    trainer.train()
    optimizer, schedule = trainer.optimizer, trainer.lr_scheduler
    before = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    batch = {"x": BATCH[0][:4], "labels": BATCH[1][:4]}
    report = Inspector(trainer.model).run_step(trainer, batch=batch)
    assert report.observation.stepped.optimizers[0].rates[0] == pytest.approx(1e-3)
    assert trainer.optimizer is optimizer
    assert trainer.lr_scheduler is schedule
    after = optimizer.state_dict(), schedule.state_dict()
    assert repr(after) == repr(before)


def test_what_no_step_can_be_made_of_is_said(make_trainer):
    """Another model, no batch."""
    trainer = make_trainer()
    with pytest.raises(InspectionError, match=r"inspector\(trainer\.model\)"):
        Inspector(Scorer()).run_step(trainer, batch=DATA[0])
    with pytest.raises(InspectionError, match="get_train_dataloader"):
        Inspector(trainer.model).run_step(trainer)
