"""Callbacks for trainers of other libraries, which are imported when one is asked for.

A library has its hooks, and a row of the table.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn

from pytest_modelhealth.errors import InspectionError, suggest


class TrainerHooks:
    """What tells a monitor of a training, in its main process.

    Args:
        monitor: a `TrainingMonitor`; one that runs already is not started, nor closed.
    """

    def __init__(self, monitor: Any) -> None:
        self._monitor = monitor
        self._is_ours = False
        self._last = -1

    def _begin(self, scaler: Any) -> None:
        """Start the monitor, once more where a trainer begins again after it failed."""
        if not self._monitor._is_started:
            self._monitor.start()
            self._is_ours = True
        if scaler is not None:
            self._monitor._watch.use_scaler(scaler)

    def _end_step(self, number: int, loss: Any = None) -> None:
        """Say that an optimizer's step is over; numbers that do not rise are replaced."""
        if self._monitor._is_started:
            self._last = max(number, self._last + 1)
            self._monitor.step_end(self._last, loss)

    def _end(self) -> None:
        """Close the monitor, if it was started here."""
        if self._is_ours:
            self._monitor.close()


class LightningHooks(TrainerHooks):
    """The hooks of a callback for the `Trainer` of Lightning, in either of its packages.

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


class TransformersHooks(TrainerHooks):
    """The hooks of a callback for `transformers.Trainer`.

    Steps bear the numbers of ``state.global_step``. The trainer tells no callback the loss: it is
    taken from what the model returns.
    """

    def __init__(self, monitor: Any) -> None:
        super().__init__(monitor)
        self._hook: Any = None
        self._losses: list[Tensor] = []  # between two steps of the optimizer
        self._is_summed = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin."""
        if not state.is_world_process_zero:
            return
        self._begin(getattr(given.get("optimizer"), "scaler", None))
        self._monitor._on_close.append(self._remove)
        self._begin_step(args, given["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End a step: the optimizer has made one."""
        losses, self._losses = self._losses, []
        loss = sum(losses[1:], losses[0]) if losses else None
        if loss is not None and not self._is_summed:
            loss = loss / len(losses)
        if state.is_world_process_zero:
            self._end_step(state.global_step, loss)
            self._begin_step(args, given["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End."""
        self._remove()
        self._end()

    def _begin_step(self, args: Any, model: nn.Module) -> None:
        """Look for the loss in steps that are watched, and leave the model alone in others."""
        self._remove()
        if self._monitor._watch.step is not None and not args.torch_compile:
            self._hook = model.register_forward_hook(self._look, with_kwargs=True)

    def _remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._losses = None, []

    def _look(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
            # the trainer has divided each by the number of items already, if it knows that
            self._is_summed = kwargs.get("num_items_in_batch") is not None
            self._losses.append(loss.detach())


_LIBRARIES = {
    "lightning": (LightningHooks, "lightning.pytorch", "Callback"),
    "pytorch_lightning": (LightningHooks, "pytorch_lightning", "Callback"),
    "transformers": (TransformersHooks, "transformers", "TrainerCallback"),
}
"""By library: our hooks, and where the class is from which its callbacks derive."""


def callback_of(monitor: Any, library: str) -> Any:
    """Return a callback for the trainer of a library.

    Args:
        monitor: what the callback starts, tells of each step, and closes.
        library: its name as it is imported, such as ``"lightning"``.

    Raises:
        InspectionError: there is none for it, or it is not installed.
    """
    if library not in _LIBRARIES:
        raise InspectionError(
            f"unknown library {library!r}{suggest(library, _LIBRARIES)} There are callbacks for "
            f"{', '.join(_LIBRARIES)}; any other loop calls monitor.step_end(step, loss=loss)."
        )
    hooks, module, base = _LIBRARIES[library]
    try:
        bases = hooks, getattr(importlib.import_module(module), base)
        derived: Any = type("ModelHealthCallback", bases, {})
    except ImportError as error:
        raise InspectionError(
            f"callback({library!r}) needs {library}, which cannot be imported: {error}"
        ) from error
    return derived(monitor)
