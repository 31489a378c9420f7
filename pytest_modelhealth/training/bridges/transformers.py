"""The callback for `transformers.Trainer`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pytest_modelhealth.training.bridges import TrainerHooks


class Hooks(TrainerHooks):
    """The hooks of a callback.

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
        if self._monitor._watch.is_on and not args.torch_compile:
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
