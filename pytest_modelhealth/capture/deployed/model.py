"""The layers of a model that another runtime runs, and what writes their tensors down."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any, ClassVar

from torch import Tensor, nn

from pytest_modelhealth.capture.deployed.program import Call, Node, Program, Runtime, call_of
from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.graph_settings import merged
from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.run import observed_eagerly, run_step
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import FUNCTIONAL_LAYERS
from pytest_modelhealth.report import Observation

_WHY_UNBOUNDED = "the graph names layers in it, and not what it takes and gives itself"
_WHY_UNLISTED = "the runtime gives the outputs of the model alone"


class DeployedLayer(nn.Module):
    """What a file says of one layer: its name, its class by name, its parameters and settings.

    Args:
        type_name: qualified name of the layer's class.
    """

    def __init__(self, type_name: str) -> None:
        super().__init__()
        self._ty = type_name
        self._opaque = ""
        self._source = ""
        self._settings: Mapping[str, Any] = {}
        self.training = False

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
        self._call, mixed = call_of(program)
        self._hooks: Hooks | None = None
        self._layers: dict[str, DeployedLayer] = {"": self}
        own: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for node in program.nodes:
            for scope in node.scopes:
                self._layer(scope.path, scope.type_name)
            if node.scopes:
                layer = self._layers[node.scopes[-1].path]
                layer._source = layer._source or node.source
                own[node.scopes[-1].path].append(node.settings)
        for path, operations in own.items():
            self._layer(path)._settings = merged(operations)
        for path, reason in mixed.items():
            self._layer(path)._opaque = reason
        for path in program.training:
            self._layer(path).training = True
        for name, tensor in program.parameters.items():
            path, _, last = name.rpartition(".")
            parameter = nn.Parameter(tensor, requires_grad=False)
            self._layer(path).register_parameter(last, parameter)
        for name, tensor in program.buffers.items():
            path, _, last = name.rpartition(".")
            self._layer(path).register_buffer(last, tensor)

    def _layer(self, path: str, type_name: str = "") -> DeployedLayer:
        """Return a layer, made with those around it if need be."""
        if path not in self._layers:
            outer, _, name = path.rpartition(".")
            self._layers[path] = DeployedLayer(type_name)
            if outer not in self._layers:
                self._layer(outer)._opaque = _WHY_UNBOUNDED
            self._layers[outer].add_module(name, self._layers[path])
        layer = self._layers[path]
        layer._ty = layer._ty or type_name
        return layer

    def __deepcopy__(self, memo: dict[int, Any]) -> DeployedModel:
        """Return layers of their own for the same runtime."""
        return DeployedModel(self.runtime)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Let the runtime run the batch, and write down what it computed where that is watched."""
        program, values, output = self.runtime.run(Inputs(*args, **kwargs))
        if self._hooks is not None:
            call = self._call if program is self.program else call_of(program)[0]
            self._write(self._hooks, call, values)
        return output

    @contextmanager
    def watched(self, recorder: Recorder) -> Iterator[Hooks]:
        """Let `recorder` be told what the runtime computes."""
        with observed_eagerly(recorder) as hooks:
            self._hooks = hooks
            try:
                yield hooks
            finally:
                self._hooks = None

    def _write(self, hooks: Hooks, call: Call, values: Mapping[str, Tensor]) -> None:
        """Write down what the steps of a call took and gave."""
        for step in call.steps:
            given, made = (
                [values[name] for name in names if name in values]
                for names in (step.inputs, step.outputs)
            )
            result = made[0] if len(made) == 1 else tuple(made)
            if isinstance(step, Node):
                _write_function(hooks, step, given, result)
                continue
            layer = hooks.recorder.by_module[self._layers[step.scope.path]]
            is_torchs = step.scope.type_name.startswith("torch.")
            if not layer.opaque:
                _called_at(step.source if is_torchs else "")(hooks.enter, layer, given)
            self._write(hooks, step, values)
            if not layer.opaque:
                hooks.complete(layer, result)


class _Computed:
    """A function that returns what a runtime computed in its place, once."""

    def __init__(self, function: Any, result: Any) -> None:
        self.__name__ = getattr(function, "__name__", "")
        self._result = [result]

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._result.pop()


def _write_function(hooks: Hooks, node: Node, given: list[Tensor], result: Any) -> None:
    """Write down an operation, from the user's line, but inside a layer that is one vertex."""
    if not hooks.functions.is_on:
        return
    computed, name = _Computed(node.function, result), FUNCTIONAL_LAYERS.get(node.function)
    see = _called_at(node.source)
    if name is None or hooks.functions.observe is None:
        see(hooks.flow.run_function, computed, tuple(given), {})
    else:
        see(hooks.functions.observe, name, computed, tuple(given), dict(node.settings))


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@cache
def _called_at(source: str) -> Callable[..., Any]:
    """Return what calls a function so that the call seems to stand in a line of the user's code.

    Args:
        source: ``path:line``; with ``""`` the call has no place.
    """
    path, _, line = source.rpartition(":")
    if not path:
        return _call
    # the call stands in the second line of the function
    code = _call.__code__.replace(co_filename=path, co_firstlineno=int(line) - 1)
    return FunctionType(code, {}, _call.__name__)


class DeployedEngine(Engine):
    """Models that another runtime runs; a kind of them says which, and how they are read."""

    runs_in_torch: ClassVar[bool] = False
    runtime_class: ClassVar[type[Any]]
    """What runs models of this kind, made of one; it raises an `InspectionError` if it cannot."""
    why_no_backward: ClassVar[str] = ""
    """Why there are no gradients, where it is not that torch does not run the model."""

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
        return (
            model if isinstance(model, DeployedModel) else DeployedModel(self.runtime_class(model))
        )

    def run(self, request: Request) -> Observation:
        """Run the request's batch, and write down what was computed.

        Raises:
            InspectionError: a backward pass is demanded, or the batch does not fill the inputs.
            Exception: whatever the runtime raises.
        """
        model: DeployedModel = request.model
        program: Program = model.program
        if request.backward:
            there_is_none = f"there is no backward pass through {program.type_name}"
            why = self.why_no_backward or f"{there_is_none}, which torch does not run"
            raise InspectionError(
                f"{why}: leave backward out, or inspect the module that it was made of"
            )
        own = replace(request, model=model, backward=False)
        observation = run_step(own, model, list(program.notes), model.watched)
        return observation if program.nodes else replace(observation, unlisted=_WHY_UNLISTED)
