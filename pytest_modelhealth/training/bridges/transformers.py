"""The callback for `transformers.Trainer`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pytest_modelhealth.training.bridges import Follower


class Hooks:
    """The hooks of a callback.

    Steps bear the numbers of ``state.global_step``. The trainer tells no callback the loss: it is
    taken from what the model returns.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._losses = _Losses()

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin."""
        scaler = getattr(given.get("optimizer"), "scaler", None)
        self._follower.begin(is_main=state.is_world_process_zero, scaler=scaler)
        if self._follower.is_on and not args.torch_compile:
            self._losses.begin(given["model"])
            self._follower.when_closed(self._losses.end)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End a step: the optimizer has made one."""
        self._follower.step_end(state.global_step, self._losses.take())

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End."""
        self._losses.end()
        self._follower.end()


class _Losses:
    """Takes the losses that a model returns between two steps of the optimizer.

    Without a number of items by which the trainer has each divided, it takes their mean.
    """

    def __init__(self) -> None:
        self._hook: Any = None
        self._found: list[Tensor] = []
        self._is_summed = False

    def begin(self, model: nn.Module) -> None:
        """Look at what the model returns from now on."""
        self.end()
        self._hook = model.register_forward_hook(self._look, with_kwargs=True)

    def take(self) -> Tensor | None:
        """Return the loss of a step; ``None`` where the model returned none."""
        found, self._found = self._found, []
        if not found:
            return None
        total = sum(found[1:], found[0])
        return total if self._is_summed else total / len(found)

    def end(self) -> None:
        """Leave nothing on the model."""
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._found = None, []

    def _look(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
            self._is_summed = kwargs.get("num_items_in_batch") is not None
            self._found.append(loss.detach())
