"""The layers of a model that another runtime runs, and what shows their tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.deployed.program import Ran, Runtime, calls_of
from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.observing.tensors import holds_numbers
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.run import run_step
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report import Observation

_WHY_UNBOUNDED = "the graph names layers in it, and not what it takes and gives itself"


class DeployedLayer(nn.Module):
    """What a file says of one layer: the qualified name of its class and its parameters."""

    def __init__(self, type_name: str) -> None:
        super().__init__()
        self._ty = type_name
        self._opaque = ""
        self._source = ""
        self.training = None  # type: ignore[assignment]  # which no graph says

    def forward(self, *_: Tensor) -> Any:
        """Do nothing: the runtime runs a model as a whole."""
        raise NotImplementedError


class DeployedModel(DeployedLayer):
    """A whole model, and the runtime that runs it."""

    def __init__(self, runtime: Runtime) -> None:
        program = runtime.program
        super().__init__(program.type_name)
        self.runtime = runtime
        self.program = program
        self._hooks: Hooks | None = None
        self._layers: dict[str, DeployedLayer] = {"": self}
        for path, type_name in program.layers.items():
            self._layer(path, type_name)
        for one in program.operations:
            for scope in one.scopes or ():
                self._layer(scope.path, scope.type_name)
            if one.scopes:
                path = one.scopes[-1].path
                self._layers[path]._source = self._layers[path]._source or one.source
        state: dict[str, Tensor] = {**program.buffers}
        state |= {n: nn.Parameter(p, requires_grad=False) for n, p in program.parameters.items()}
        for name, tensor in state.items():
            path, _, own = name.rpartition(".")
            if isinstance(tensor, nn.Parameter):
                self._layer(path).register_parameter(own, tensor)
            else:
                self._layer(path).register_buffer(own, tensor)

    def _layer(self, path: str, type_name: str = "") -> DeployedLayer:
        """Return a layer, made with those around it if need be."""
        if path not in self._layers:
            outer, _, name = path.rpartition(".")
            if outer not in self._layers:
                self._layer(outer)._opaque = _WHY_UNBOUNDED
            self._layers[path] = DeployedLayer(type_name)
            self._layers[outer].add_module(name, self._layers[path])
        layer = self._layers[path]
        if type_name:
            layer._ty, layer._opaque = type_name, ""
        return layer

    def __deepcopy__(self, memo: dict[int, Any]) -> DeployedModel:
        """Return layers of their own for the same runtime."""
        return DeployedModel(self.runtime)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Let the runtime run the batch, and show what it computed where that is watched."""
        ran = self.runtime.run(Inputs(*args, **kwargs))
        if self._hooks is not None:
            with torch._C.DisableTorchFunction():
                self._show(self._hooks.recorder, ran)
        return ran.output

    @contextmanager
    def watched(self, recorder: Recorder) -> Iterator[Hooks]:
        """Let `recorder` be told what the runtime computes."""
        recorder.flow.is_on = False  # of operations that are not torch's
        hooks = self._hooks = Hooks(recorder)
        hooks.hook(self, recorder.by_module[self])
        try:
            yield hooks
        finally:
            self._hooks = None
            hooks.end_calls()
            hooks.remove()

    def _show(self, recorder: Recorder, ran: Ran) -> None:
        """Tell of each call of a layer when it began and what it gave."""
        calls = calls_of(ran)
        events = [(call.first, 0, call.depth, call) for call in calls]
        events += [(call.last, 1, -call.depth, call) for call in calls]
        events.sort(key=lambda event: event[:3])
        begun: dict[int, tuple[Layer, Any]] = {}
        for _, is_end, _, call in events:
            names = call.outputs if is_end else call.inputs
            tensors = [ran.values[name] for name in names if name in ran.values]
            if not is_end:
                layer = recorder.by_module[self._layers[call.layer]]
                if call.function:
                    operation = ran.operations[call.first]
                    layer = recorder.functional_layer(
                        layer, call.function, call.number, dict(operation.options)
                    )
                    layer.source = layer.source or operation.source
                begun[id(call)] = layer, recorder.enter(layer, tensors)
                continue
            layer, inputs = begun[id(call)]
            returned, entries = list(filter(holds_numbers, tensors)), []
            recorder.complete(layer)
            for tensor in returned:
                recorder.note_returned(layer, False)
                dimension = recorder.unit_dimension(layer.kind, tensor)
                entries.append(recorder.add_output(layer, tensor, dimension))
            recorder.compare_samples(layer, inputs, returned, entries)


class DeployedEngine(Engine):
    """Models that another runtime runs; a kind of them says which, and how they are read."""

    runs_in_torch: ClassVar[bool] = False
    why_not_measured: ClassVar[str] = (
        "the costs of a deployed model are not measured, as no module of torch runs in it; the "
        "module that it was made of has them"
    )
    runtime_class: ClassVar[type[Any]]
    """What runs models of this kind, made of one; it raises an `InspectionError` if it cannot."""

    def supports(self, model: object) -> bool:
        """Whether `model` is of this kind, loaded or not."""
        if isinstance(model, DeployedModel):
            return isinstance(model.runtime, self.runtime_class)
        return self.reads(model)

    @abstractmethod
    def reads(self, model: Any) -> bool:
        """Whether `model` is of this kind and not loaded yet."""

    def load(self, model: Any) -> DeployedModel:
        """Return the layers of a model and what runs it.

        Raises:
            InspectionError: it cannot be loaded.
        """
        is_loaded = isinstance(model, DeployedModel)
        return model if is_loaded else DeployedModel(self.runtime_class(model))

    def run(self, request: Request) -> Observation:
        """Run the request's batch, and show what was computed.

        Raises:
            InspectionError: a backward pass is demanded, or the batch does not fill the inputs.
            Exception: whatever the runtime raises.
        """
        model = self.load(request.model)
        program = model.program
        if request.backward:
            raise InspectionError(
                f"there is no backward pass through a deployed {program.type_name}: leave backward "
                "out, or inspect the module that it was made of"
            )
        own = replace(request, model=model, backward=False)
        observation = run_step(own, model, [program.note], model.watched)
        return replace(observation, unlisted=program.unlisted)
