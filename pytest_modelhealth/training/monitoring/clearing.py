"""Whether gradients are cleared between the steps of a training, seen at one parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Clearing:
    """Looks whether gradients are there already as the backward passes of a step begin.

    They may add up over steps. Where they do, and an optimizer steps, the step after that is looked
    at too, if it is not watched: by one hook on the smallest parameter that has a gradient.

    Args:
        model: the model that is trained.

    Attributes:
        left_over: whether gradients were there in a step after one in which an optimizer stepped
            on such, and in each of its backward passes; `taken` forgets it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stepped: set[str] = set()  # the parameters that an optimizer moved
        self._leaf: Tensor | None = None
        self._handle: RemovableHandle | None = None
        self._seen: list[bool] = []  # of each backward pass that reached the parameter
        self._is_after_step = False
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
                self._handle = self._leaf.register_hook(self._look)

    def _look(self, _: Tensor) -> None:
        """See a backward pass come to the parameter, before it adds its gradient."""
        gradient: Any = None if self._leaf is None else self._leaf.grad
        self._seen.append(gradient is not None and bool(gradient.any()))

    def taken(self) -> bool:
        """Return `left_over`, and forget it."""
        left_over, self.left_over = self.left_over, False
        return left_over

    def close(self) -> None:
        """Leave nothing on the model."""
        if self._handle is not None:
            self._handle.remove()
        if self._leaf is not None and not self._leaf._backward_hooks:
            self._leaf._backward_hooks = None  # as a tensor has it without a hook
        self._handle, self._leaf, self._seen = None, None, []
