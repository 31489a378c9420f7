"""Stand-ins with the interfaces of Lightning and transformers that the bridges use.

They are put where the real packages would be imported from, so that the bridges run where these are
not installed.
"""

from __future__ import annotations

import copy
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn


def install(monkeypatch: Any, **modules: dict[str, Any]) -> None:
    """Have modules imported that hold these names; ``__`` in a module's name is a dot."""
    for name, held in modules.items():
        module = ModuleType(name.replace("__", "."))
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def of(package: str, kind: Any) -> Any:
    """Return a class as if that package had defined it, its methods too."""
    kind.__module__ = package
    for value in vars(kind).values():
        if hasattr(value, "__code__"):
            value.__module__ = package
    return kind


def lightning(monkeypatch: Any) -> Any:  # noqa: C901 - classes in a row
    """Install a stand-in of Lightning, and return its `pytorch` part."""

    class Callback:
        pass

    class Fabric:
        def __init__(self, accelerator: str, devices: int) -> None:
            self.accelerator = accelerator

        def backward(self, tensor: Any, *args: Any, **kwargs: Any) -> None:
            tensor.backward(*args, **kwargs)

        def clip_gradients(self, module: Any, optimizer: Any, clip_val: Any, max_norm: Any) -> None:
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm)

    class Shim:
        def __init__(self, fabric: Any) -> None:
            self.fabric = fabric

        def __getattr__(self, name: str) -> Any:
            try:
                return getattr(self.fabric, name)
            except AttributeError:
                raise AttributeError(f"Your code tried to access `self.trainer.{name}`") from None

    class LightningModule(nn.Module):
        automatic_optimization = True
        fabric: Any = None
        _trainer: Any = None

        def __init__(self) -> None:
            super().__init__()
            self._fabric_optimizers: list[Any] = []

        @property
        def trainer(self) -> Any:
            return self._trainer if self.fabric is None else Shim(self.fabric)

        @trainer.setter
        def trainer(self, trainer: Any) -> None:
            self._trainer = trainer

        def log(self, *args: Any, **kwargs: Any) -> None:
            if self.fabric is not None:
                raise ValueError("Fabric logs no metrics")

        log_dict = log

        def optimizers(self) -> Any:
            held = self._fabric_optimizers
            return held[0] if len(held) == 1 else held

        def lr_schedulers(self) -> Any:
            return [config.scheduler for config in self.trainer.lr_scheduler_configs]

        def backward(self, loss: Any) -> None:
            loss.backward() if self.fabric is None else self.fabric.backward(loss)

        manual_backward = backward

        def clip_gradients(self, optimizer: Any, gradient_clip_val: Any, **_: Any) -> None:
            clip = Fabric.clip_gradients
            clip(self.fabric, self, optimizer, None, gradient_clip_val)

        def configure_gradient_clipping(self, optimizer: Any, value: Any, by: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm=by)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad()

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            optimizer.step(closure=closure)

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()

        def on_hook(self, *args: Any) -> None:
            pass

        on_before_zero_grad = on_before_backward = on_after_backward = on_hook
        on_before_optimizer_step = on_train_batch_start = on_train_batch_end = on_hook

    class Trainer:
        is_global_zero = True
        global_step = 0

        def __init__(self, callbacks: Any = (), **settings: Any) -> None:
            self.callbacks = callbacks
            self.precision_plugin = SimpleNamespace()
            self.gradient_clip_val = settings.get("gradient_clip_val")
            self.gradient_clip_algorithm = None
            self.accumulate_grad_batches = settings.get("accumulate_grad_batches", 1)
            self.max_epochs = settings.get("max_epochs", 1)

        def tell(self, hook: str, *arguments: Any) -> None:
            for each in self.callbacks:
                getattr(each, hook, lambda *_: None)(self, *arguments)

        def fit(self, module: Any, data: Any) -> None:
            optimizer = module.configure_optimizers()
            schedules = []
            if isinstance(optimizer, dict):
                schedules = [optimizer["lr_scheduler"]["scheduler"]]
                optimizer = optimizer["optimizer"]
            self.tell("on_train_start", module)
            try:
                for number, batch in enumerate(list(data) * self.max_epochs):
                    self.step(module, optimizer, schedules, batch, number)
            except BaseException as error:
                self.tell("on_exception", module, error)
                raise
            self.tell("on_train_end", module)

        def step(self, module: Any, optimizer: Any, schedules: Any, batch: Any, n: int) -> None:
            output = module.training_step(batch, n)
            if n % self.accumulate_grad_batches == 0:
                optimizer.zero_grad()
            output["loss"] = output["loss"] / self.accumulate_grad_batches
            output["loss"].backward()
            if (n + 1) % self.accumulate_grad_batches == 0:
                if self.gradient_clip_val:
                    nn.utils.clip_grad_norm_(module.parameters(), self.gradient_clip_val)
                optimizer.step()
                self.global_step += 1
                for schedule in schedules:
                    schedule.step()
            self.tell("on_train_batch_end", module, output, batch, n)

    of("lightning.pytorch.core.module", LightningModule)
    of("lightning.pytorch.trainer.trainer", Trainer)
    held = {"Callback": Callback, "LightningModule": LightningModule, "Trainer": Trainer}
    install(
        monkeypatch, lightning={}, lightning__pytorch=held, lightning__fabric={"Fabric": Fabric}
    )
    return sys.modules["lightning.pytorch"]


class Accelerator:
    """What the bridge uses of an accelerator of one device."""

    distributed_type = "DistributedType.NO"
    optimizer_step_was_skipped = False
    scaler = None

    def __init__(self) -> None:
        self.gradient_state = SimpleNamespace(sync_gradients=True)
        self._optimizers: list[Any] = []
        self._models: list[Any] = []
        self._schedulers: list[Any] = []

    def prepare_model(self, model: Any, device_placement: bool) -> Any:
        """Do what mixed precision does: put another forward on the model."""
        self._models.append(model)
        model.forward = model.forward
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool) -> Any:
        """Remember the optimizer."""
        self._optimizers.append(optimizer)
        return optimizer

    def clip_grad_norm_(self, parameters: Any, norm: float) -> Any:
        """Clip."""
        return nn.utils.clip_grad_norm_(parameters, norm)


class Trainer:
    """A stand-in of `transformers.Trainer`, for models that return a mapping with a loss."""

    def __init__(self, model: Any, args: Any, train_dataset: Any, callbacks: Any = ()) -> None:
        self.model, self.args, self.train_dataset = model, args, train_dataset
        self.callbacks = callbacks
        self.accelerator = Accelerator()
        self.optimizer = self.lr_scheduler = None
        self._created_lr_scheduler = False
        self.current_gradient_accumulation_steps = 1

    def get_train_dataloader(self) -> Any:
        """Return the batches."""
        return torch.utils.data.DataLoader(self.train_dataset, self.args.train_batch_size)

    def create_optimizer(self) -> Any:
        """Make the optimizer, once."""
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(
                self.model.parameters(), self.args.learning_rate, weight_decay=0.0
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make a linear schedule."""
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: max(0.0, 1 - step / num_training_steps)
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_batch_samples(self, batches: Any, count: int, device: Any) -> Any:
        """Return so many batches, and no number of items."""
        return [next(batches) for _ in range(count)], None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Go forward and backward."""
        model.train()
        loss = model(**inputs)["loss"] / self.current_gradient_accumulation_steps
        loss.backward()
        return loss.detach()

    def train(self) -> None:
        """Train for one epoch."""
        control, args = SimpleNamespace(), self.args
        state = SimpleNamespace(is_world_process_zero=True, global_step=0)
        self.current_gradient_accumulation_steps = count = args.gradient_accumulation_steps
        optimizer = self.create_optimizer()
        batches = list(self.get_train_dataloader())
        schedule = self.create_scheduler(len(batches) // count, optimizer)
        for each in self.callbacks:
            each.on_train_begin(args, state, control, model=self.model, optimizer=optimizer)
        for number, batch in enumerate(batches, start=1):
            self.training_step(self.model, copy.copy(batch))
            if number % count == 0:
                self.accelerator.clip_grad_norm_(self.model.parameters(), args.max_grad_norm)
                optimizer.step()
                schedule.step()
                self.model.zero_grad()
                state.global_step += 1
                for each in self.callbacks:
                    each.on_step_end(args, state, control, model=self.model)
        for each in self.callbacks:
            each.on_train_end(args, state, control, model=self.model)


def arguments(**settings: Any) -> Any:
    """Return stand-ins of `TrainingArguments`."""
    usual = {"gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "max_steps": -1, "n_gpu": 1}
    usual |= {"learning_rate": 1e-3, "num_train_epochs": 1, "train_batch_size": 4, "device": "cpu"}
    return SimpleNamespace(**usual | {"torch_compile": False, **settings})


of("transformers.trainer", Trainer)
