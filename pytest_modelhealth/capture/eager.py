"""Any `torch.nn.Module`: plain, compiled, traced by torch.fx, scripted."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.step.run import run_step
from pytest_modelhealth.report import Observation


class EagerEngine(Engine):
    """Modules whose hooks run; where they do not, as inside a script, layers are `opaque`."""

    def supports(self, model: object) -> bool:
        """Whether `model` is a module."""
        return isinstance(model, nn.Module)

    def run(self, request: Request) -> Observation:
        """Run the batch with hooks on every module that can have them."""
        notes = []
        model = request.model
        modules = list(model.modules())
        if any(map(is_compiled, modules)):
            notes.append(
                "the model is compiled: these are the values it has when run eagerly; "
                'Inspector(model, compiled="observe") looks at the compiled code'
            )
        if _is_lazy(modules):
            notes.append("the model is lazy: a copy was inspected, the model is not initialised")
            model = _copy_of_lazy(model)
        return run_step(request, model, notes)


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made this module, or `module.compile()` was called."""
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def _is_lazy(modules: Iterable[nn.Module]) -> bool:
    """Whether the first forward of one of them creates parameters or buffers."""
    return any(
        tensor is not None and is_lazy(tensor)
        for module in modules
        for held in (module._parameters, module._buffers)
        if held
        for tensor in held.values()
    )


def _copy_of_lazy(model: nn.Module) -> nn.Module:
    """Return a deep copy; torch itself cannot copy buffers that are not initialised."""
    memo = {
        id(buffer): UninitializedBuffer(  # type: ignore[call-arg]
            device=buffer.device, dtype=buffer.dtype
        )
        for buffer in model.buffers()
        if isinstance(buffer, UninitializedBuffer)
    }
    return copy.deepcopy(model, memo)
