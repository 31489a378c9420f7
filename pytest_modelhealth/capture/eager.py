"""Any `torch.nn.Module`: plain, compiled, traced by torch.fx, scripted."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.step.forward import observed_eagerly
from pytest_modelhealth.capture.step.run import Watch, run_step
from pytest_modelhealth.capture.step.state import State
from pytest_modelhealth.layers import stops_gradients
from pytest_modelhealth.report import Observation


class EagerEngine(Engine):
    """Modules whose hooks run; where they do not, as inside a script, layers are `opaque`."""

    def supports(self, model: object) -> bool:
        """Whether `model` is a module."""
        return isinstance(model, nn.Module)

    def run(self, request: Request) -> Observation:
        """Run the batch with hooks on every module that can have them."""
        return self._run(request, observed_eagerly)

    def measure(self, request: Request) -> Observation:
        """Run the batch with hooks that tell which layer runs, and measure what that costs."""
        from pytest_modelhealth.capture.costing.measure import measured

        return measured(request, self._run)

    def _run(self, request: Request, watch: Watch) -> Observation:
        notes = []
        model = request.model
        state = State(model)
        if any(map(is_compiled, state.modules)):
            notes.append(
                "the model is compiled: these are the values it has when run eagerly; "
                'Inspector(model, compiled="observe") looks at the compiled code'
            )
        if state.lazy:
            notes.append("the model is lazy: a copy was inspected, the model is not initialised")
            model = _copy_of_lazy(model, state.lazy)
            state = State(model)
        if request.backward is None and any(map(stops_gradients, state.modules)):
            notes.append("no gradient flows through quantised layers: the forward pass alone ran")
            request = replace(request, backward=False)
        return run_step(request, model, notes, watch, state)


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made this module, or `module.compile()` was called."""
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def _copy_of_lazy(model: nn.Module, lazy: list[Tensor]) -> nn.Module:
    """Return a deep copy; torch itself cannot copy buffers that are not initialised."""
    memo = {
        id(buffer): UninitializedBuffer(  # type: ignore[call-arg]
            device=buffer.device, dtype=buffer.dtype
        )
        for buffer in lazy
        if isinstance(buffer, UninitializedBuffer)
    }
    return copy.deepcopy(model, memo)
