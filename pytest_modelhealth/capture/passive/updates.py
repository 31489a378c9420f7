"""What an optimizer does to parameters: by how much each changes in one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from pytest_modelhealth.capture.observing.tensors import is_capturing, noted
from pytest_modelhealth.capture.step.isolation import is_inspecting
from pytest_modelhealth.statistics import Entry, Ledger

_COPIED = frozenset({Tensor, nn.Parameter})


OnStep = Callable[[list[int], Optimizer, bool], None]


class OptimizerSteps:
    """Sees the steps of every optimizer that holds one of a model's parameters.

    Weights are copied when a step begins, and the copies become the differences when it ends; they
    are gone before the optimizer's `step` returns.

    Args:
        parameters: those of the model by id, each with whether its update is to be seen.
        ledger: reads the differences.
        on_step: told of the ids of the parameters, the optimizer and whether its step is over, when
            a step begins and when it ends.
        errors: takes errors of ours.

    Attributes:
        updates: what was found in the difference of each parameter in its latest step, by id.
        rates: the largest learning rate that each parameter was stepped with, by id.
        count: how many steps were seen.
    """

    def __init__(
        self,
        parameters: Mapping[int, tuple[Tensor, bool]],
        ledger: Ledger,
        on_step: OnStep,
        errors: list[str],
    ) -> None:
        self.updates: dict[int, Entry] = {}
        self.rates: dict[int, float] = {}
        self.count = 0
        self._parameters = parameters
        self._ledger = ledger
        self._on_step: OnStep | None = on_step
        self._errors = errors
        self._open: dict[int, _Begun] = {}
        self._handles: list[RemovableHandle] = []
        self._thread = get_ident()

    def register(self) -> None:
        """Have torch tell of every optimizer's steps."""
        self._handles.append(register_optimizer_step_pre_hook(self._before))
        self._handles.append(register_optimizer_step_post_hook(self._after))

    def remove(self) -> None:
        """Hear of nothing any longer, and hold nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open.clear()
        self._on_step = None

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_compiling() or is_inspecting() or is_capturing() or get_ident() != self._thread:
            return
        with noted(self._errors), torch._C.DisableTorchFunction():
            self._begin(optimizer)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_compiling() or id(optimizer) not in self._open:
            return
        with noted(self._errors), torch._C.DisableTorchFunction():
            self._end(optimizer, self._open.pop(id(optimizer)))

    def _begin(self, optimizer: Optimizer) -> None:
        held = [id(p) for p in parameters_of(optimizer) if id(p) in self._parameters]
        if not held:
            return
        begun = self._open[id(optimizer)] = _Begun(held)
        self.count += 1
        for group in optimizer.param_groups:
            for key in map(id, group["params"] if group.get("lr") is not None else ()):
                if key in self._parameters:
                    self.rates[key] = max(float(group["lr"]), self.rates.get(key, 0.0))
        if self._on_step is not None:
            self._on_step(held, optimizer, False)
        for number in held:
            parameter, is_wanted = self._parameters[number]
            if is_wanted and _can_be_copied(parameter):
                begun.copied.append(number)
                begun.copies.append(parameter.detach().clone())

    def _end(self, optimizer: Optimizer, begun: _Begun) -> None:
        if self._on_step is not None:
            self._on_step(begun.held, optimizer, True)
        if not begun.copies:
            return
        now = [self._parameters[number][0].detach() for number in begun.copied]
        torch._foreach_sub_(begun.copies, now)
        found = self._ledger.add_many(begun.copies)
        for number, change, entry in zip(begun.copied, begun.copies, found, strict=True):
            self.updates[number] = entry or self._ledger.add(change)


@dataclass
class _Begun:
    """A step of an optimizer that is not over.

    Args:
        held: ids of the model's parameters that the optimizer has.
        copied: of those, which were copied.
        copies: the copies.
    """

    held: list[int]
    copied: list[int] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the tensors that an optimizer holds, each once."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return list({id(parameter): parameter for parameter in held}.values())


def _can_be_copied(parameter: Tensor) -> bool:
    """Whether the parameter is one whose values can be subtracted from a copy of it."""
    return (
        type(parameter) in _COPIED
        and parameter.requires_grad
        and parameter.layout is torch.strided
        and not parameter.is_nested
        and not parameter.is_meta
    )
