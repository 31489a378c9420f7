"""Learning rates that optimizers step with, by parameter, in watched steps."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from pytest_modelhealth.layers import named_modules


class Rates:
    """Sees with which rate each parameter of a model is about to be changed.

    Between `begin` and `end` torch tells it of each optimizer's step; before and after of none. Of
    a parameter that the model got later nothing is known.

    Args:
        model: the model that is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners = {
            id(parameter): named.name
            for named in reversed(list(named_modules(model)))
            for parameter in named.module._parameters.values()
            if parameter is not None
        }
        self._seen: dict[str, float] = {}
        self._handle: RemovableHandle | None = None

    def begin(self) -> None:
        """See the steps that follow."""
        self.end()
        self._handle = register_optimizer_step_pre_hook(self._note)

    def end(self) -> dict[str, float]:
        """See no more steps, and return the largest rate by layer."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        seen, self._seen = self._seen, {}
        return seen

    def _note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if rate is None:
                continue
            value = float(rate)
            for parameter in group["params"]:
                owner = self._owners.get(id(parameter))
                if owner is not None:
                    self._seen[owner] = max(value, self._seen.get(owner, value))
