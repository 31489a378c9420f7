"""Any `torch.nn.Module`: plain, compiled, traced or scripted."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.step.bare import copied
from pytest_modelhealth.capture.step.guard import collected_rarely, exited_whole
from pytest_modelhealth.capture.step.run import Watch, observed_eagerly, run_step
from pytest_modelhealth.capture.step.state import State
from pytest_modelhealth.layers import stop_gradients
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
        # to look at what the model holds makes as many objects as the run, gone when it ends
        with exited_whole(collected_rarely()):
            return self._observe(request, watch)

    def _observe(self, request: Request, watch: Watch) -> Observation:
        notes = []
        model = request.model
        state = State(model)
        if any(map(is_compiled, state.modules)):
            notes.append(
                "the model is compiled: these are the values it has when run eagerly; "
                "inspector.compare(model, torch.compile(model), batch) looks at the compiled code"
            )
        if state.lazy:
            notes.append("the model is lazy: a copy was inspected, the model is not initialised")
            model = copied(model)
            state = State(model)
        if request.backward is None and stop_gradients(state.modules):
            notes.append("no gradient flows through quantised layers: the forward pass alone ran")
            request = replace(request, backward=False)
        return run_step(request, model, notes, watch, state)


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made this module, or `module.compile()` was called."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


KINDS = (EagerEngine,)
