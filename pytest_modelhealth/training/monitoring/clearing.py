"""What becomes of gradients between the steps of a training, seen at one parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from pytest_modelhealth.capture.passive.step import PassiveWatch
from pytest_modelhealth.statistics import Entry

_FEWEST = 16
"""Values that have a direction of their own: of one, each gradient is a multiple of another."""
_ALIKE = 0.99
"""The cosine of two gradients of which the one is the other, clipped, in half precision."""


class Clearing:
    """Looks whether gradients are there already as the backward passes of a step begin.

    They may add up over steps. Where they do, and an optimizer steps, the step after that is looked
    at too, if it is not watched: by one hook on the smallest parameter that has a gradient.
    In watched steps it is also asked whether one has still its direction as an optimizer steps.

    Args:
        model: the model that is trained.
        watch: sees the steps that are watched, and reads their tensors in one transfer.

    Attributes:
        left_over: whether gradients were there in a step after one in which an optimizer stepped
            on such, and in each of its backward passes.
    """

    def __init__(self, model: nn.Module, watch: PassiveWatch) -> None:
        self._model, self._watch = model, watch
        self._stepped: set[str] = set()  # the parameters that an optimizer moved
        self._leaf: Tensor | None = None
        self._wide: Tensor | None = None  # of some values
        self._handles: list[Any] = []
        self._seen: list[bool] = []  # of each backward pass that reached the parameter
        self._left: Tensor | None = None  # what those left
        self._is_after_step = False
        self._apart: list[Entry] = []  # whether an optimizer steps on something else
        self.left_over = False

    def end_step(self, moved: Iterable[str], is_watched: bool) -> None:
        """Say that a step is over, and whether the next one counts.

        Args:
            moved: the parameters that optimizers moved in it; none where it was not watched.
            is_watched: whether the next step is.
        """
        adds_up, moved = bool(self._seen) and all(self._seen), set(moved)
        self._stepped |= moved
        self.left_over |= adds_up and self._is_after_step
        self.close()
        self._is_after_step = adds_up and bool(moved)
        if is_watched or self._is_after_step:
            named = self._model.named_parameters()
            given = [p for n, p in named if n in self._stepped and p.grad is not None]
            self._leaf = min(given, key=lambda p: p.numel(), default=None)
        if self._leaf is not None and self._leaf.requires_grad:
            self._handles.append(self._leaf.register_hook(self._look))
        wide = [p for p in given if p.numel() >= _FEWEST and p.requires_grad] if is_watched else []
        self._wide = min(wide, key=lambda p: p.numel(), default=None)
        if self._wide is not None:
            keep = self._wide.register_post_accumulate_grad_hook(self._keep)
            self._handles += [keep, register_optimizer_step_pre_hook(self._compare)]

    def _look(self, _: Tensor) -> None:
        """See a backward pass come to the parameter, before it adds its gradient."""
        gradient: Any = None if self._leaf is None else self._leaf.grad
        self._seen.append(gradient is not None and bool(gradient.any()))

    def _keep(self, leaf: Tensor) -> None:
        """Take down what a backward pass left at the parameter."""
        left: Any = leaf.grad
        is_plain = type(left) is Tensor and not left.is_sparse and left.is_floating_point()
        self._left = left.detach().clone() if is_plain else None

    def _compare(self, optimizer: Optimizer, *_: object) -> None:
        """See an optimizer begin a step, and whether the gradient there is what was left.

        Of a clip, of values as of the norm, no value has another sign.
        """
        left, gradient = self._left, None if self._wide is None else self._wide.grad
        step, groups = self._watch.step, optimizer.param_groups
        if step is None or left is None or gradient is None or left.shape != gradient.shape:
            return
        if any(one is self._wide for group in groups for one in group["params"]):
            one, other = left.float().flatten(), gradient.detach().float().flatten()
            apart = one @ other < _ALIKE * one.norm() * other.norm()
            turned = (apart & (one * other < 0.0).any()).float()
            self._apart.append(step.recorder.reader.ledger.add(turned))

    def taken(self) -> dict[str, Any]:
        """Return what was seen, by name, and forget it."""
        is_altered = any(entry.statistics.max > 0.0 for entry in self._apart)
        seen = {"left_over": self.left_over, "altered": is_altered}
        self.left_over, self._apart = False, []
        return seen

    def close(self) -> None:
        """Leave nothing on the model."""
        for handle in self._handles:
            handle.remove()
        # as a tensor has it without a hook
        if self._leaf is not None and not self._leaf._backward_hooks:
            self._leaf._backward_hooks = None
        wide: Any = self._wide
        if wide is not None and not wide._post_accumulate_grad_hooks:
            wide._post_accumulate_grad_hooks = None
        self._leaf, self._wide, self._left = None, None, None
        self._handles, self._seen = [], []
