"""TorchScript that was frozen, or inlined: one graph, whose operations are named."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from pytest_modelhealth.capture.deployed.model import DeployedEngine
from pytest_modelhealth.capture.torchscript.operations import is_inlined
from pytest_modelhealth.capture.torchscript.runtime import NO_GRADIENTS, InlinedScript


class FrozenEngine(DeployedEngine):
    """Scripts and traces that were frozen, optimised for inference, or inlined."""

    precedence = 2
    why_not_measured: ClassVar[str] = (
        "the costs of a frozen script are not measured, as it calls no hooks that would tell its "
        "layers apart; the module that it was made of has them"
    )
    why_no_backward: ClassVar[str] = NO_GRADIENTS
    runtime_class: ClassVar[type[Any]] = InlinedScript

    def reads(self, model: Any) -> bool:
        """Whether `model` is a script without calls of layers."""
        if not isinstance(model, torch.jit.ScriptModule):
            return False
        script: Any = model
        return script._c._has_method("forward") and is_inlined(script)
