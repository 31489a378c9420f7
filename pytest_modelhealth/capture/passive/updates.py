"""Sees the steps of optimizers: what each holds, and its parameters before and after."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

_Copies = dict[int, Tensor]
_PLAIN = frozenset({Tensor, nn.Parameter})


class OptimizerSteps(ABC):
    """Sees the steps of every optimizer.

    Weights are copied when a step begins; the copies are gone before the optimizer's `step`
    returns.

    Args:
        parameters: those that are looked at, by id.
    """

    def __init__(self, parameters: Mapping[int, Tensor]) -> None:
        self._parameters = parameters
        self._steps_that_run: dict[int, tuple[list[Tensor], _Copies]] = {}  # by optimizer
        self._handles: list[RemovableHandle] = []

    def hear_of_steps(self) -> None:
        """Have torch tell of every optimizer's steps."""
        self._handles.append(register_optimizer_step_pre_hook(self._before))
        self._handles.append(register_optimizer_step_post_hook(self._after))

    def hear_no_more(self) -> None:
        """Hear of nothing any longer, and hold nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._steps_that_run.clear()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        held = [p for p in parameters_of(optimizer) if id(p) in self._parameters]
        copies = {id(p): p.detach().clone() for p in held if self.is_compared(p)}
        changed = self.begin_step(optimizer, held, copies, args, kwargs)
        self._steps_that_run[id(optimizer)] = held, copies
        return changed

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._steps_that_run:
            self.end_step(optimizer, *self._steps_that_run.pop(id(optimizer)))

    def is_compared(self, parameter: Tensor) -> bool:
        """Whether a parameter is to be copied when a step begins."""
        return True

    @abstractmethod
    def begin_step(
        self, optimizer: Optimizer, held: list[Tensor], before: _Copies, args: Any, kwargs: Any
    ) -> Any:
        """See a step begin; return other arguments for it, or ``None``.

        Args:
            optimizer: the optimizer.
            held: which of the parameters it has.
            before: copies of them by id.
            args, kwargs: of its `step`.
        """

    @abstractmethod
    def end_step(self, optimizer: Optimizer, held: list[Tensor], before: _Copies) -> None:
        """See that a step is over; the arguments are those from when it began."""


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the tensors that an optimizer holds, each once."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return list({id(parameter): parameter for parameter in held}.values())


def can_be_subtracted(parameter: Tensor) -> bool:
    """Whether the parameter is one whose values can be subtracted from a copy of it."""
    return (
        type(parameter) in _PLAIN
        and parameter.requires_grad
        and parameter.layout is torch.strided
        and not parameter.is_nested
        and not parameter.is_meta
    )
