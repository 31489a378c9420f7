"""The callback for the `Trainer` of Lightning, in either of its packages."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pytest_modelhealth.training.bridges import TrainerHooks


class Hooks(TrainerHooks):
    """The hooks of a callback.

    A step is over when the batch is that the optimizer stepped at, so that batches whose gradients
    are accumulated are one step. Steps are counted from 0, as Lightning's own loggers do.
    """

    def __init__(self, monitor: Any) -> None:
        super().__init__(monitor)
        self._number = self._global_step = 0
        self._loss: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin."""
        self._number = self._global_step = trainer.global_step
        if trainer.is_global_zero:
            self._begin(getattr(trainer.precision_plugin, "scaler", None))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a step, if an optimizer made one."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        loss = loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None
        if self._loss is not None and loss is not None and pl_module.automatic_optimization:
            loss = self._loss + loss  # Lightning has divided each by their number
        self._loss = loss
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._loss = None
            if trainer.is_global_zero:
                self._end_step(self._number, loss)
            self._number += 1

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End early."""
        self._end()
