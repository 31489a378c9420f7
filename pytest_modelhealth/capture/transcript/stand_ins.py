"""Modules that stand for the layers of a model that another runtime runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from pytest_modelhealth.capture.engine import Request
from pytest_modelhealth.capture.graph_settings import merged
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.run import run_step
from pytest_modelhealth.capture.transcript.calls import Call, call_of
from pytest_modelhealth.capture.transcript.playing import Playback, called_at, observed_playback
from pytest_modelhealth.capture.transcript.program import Program, Runtime
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report import Observation


class StandIn(nn.Module):
    """Stands for one layer: it has its name, its class by name, and what can be read of its state.

    Args:
        type_name: qualified name of the layer's class.
        opaque: why nothing of the layer can be seen, if nothing can.
    """

    def __init__(self, type_name: str, opaque: str = "") -> None:
        super().__init__()
        self._ty = type_name
        self._opaque = opaque
        self._source = ""
        self._settings: Mapping[str, Any] = {}
        self._playing: tuple[Run, Call] | None = None
        self.training = False

    def forward(self, *tensors: Tensor) -> Any:
        """Make the steps of the call that is played, and return what it gave."""
        assert self._playing is not None
        run, call = self._playing
        return run.make(call)


class StandInModel(StandIn):
    """Stands for a whole model.

    Args:
        runtime: what runs the model.
    """

    def __init__(self, runtime: Runtime) -> None:
        program = runtime.program
        super().__init__(program.type_name, program.opaque.get("", ""))
        self.runtime = runtime
        self.program = program
        self._call, mixed = call_of(program)
        self._playback = Playback()
        self._layers: dict[str, StandIn] = {"": self}
        self._add_called(self._call)
        for path, reason in {**mixed, **program.opaque}.items():
            self._layer(path)._opaque = reason
        for path in program.training:
            self._layer(path).training = True
        own: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for node in program.nodes:
            if node.scopes:
                own[node.scopes[-1].path].append(node.settings)
        for path, operations in own.items():
            self._layer(path)._settings = merged(operations)
        self._add_state(program)

    def _add_called(self, call: Call) -> None:
        layer = self._layer(call.scope.path, call.scope.type_name)
        layer._source = layer._source or call.source
        for step in call.steps:
            if isinstance(step, Call):
                self._add_called(step)

    def _layer(self, path: str, type_name: str = "") -> StandIn:
        """Return the stand-in for a layer, made with those around it if need be."""
        if path not in self._layers:
            outer, _, name = path.rpartition(".")
            self._layers[path] = StandIn(type_name)
            self._layer(outer).add_module(name, self._layers[path])
        layer = self._layers[path]
        layer._ty = layer._ty or type_name
        return layer

    def _add_state(self, program: Program) -> None:
        for name, tensor in program.parameters.items():
            path, _, own = name.rpartition(".")
            parameter = nn.Parameter(tensor, requires_grad=False)
            self._layer(path).register_parameter(own, parameter)
        for name, tensor in program.buffers.items():
            path, _, own = name.rpartition(".")
            self._layer(path).register_buffer(own, tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> StandInModel:
        """Return stand-ins of their own for the same runtime."""
        return StandInModel(self.runtime)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Let the runtime run the batch, and play back what it did."""
        values, output = self.runtime.execute(Inputs(*args, **kwargs))
        ran = self.runtime.ran
        call = self._call if ran is self.program else call_of(ran)[0]
        with self._playback.at_hand():
            Run(self._layers, self._playback, values).make(call)
        return output


class Run:
    """One run that is played back.

    Args:
        layers: the stand-ins by name.
        playback: returns results of functions.
        values: what the runtime computed, by name.
    """

    def __init__(
        self, layers: Mapping[str, StandIn], playback: Playback, values: Mapping[str, Tensor]
    ) -> None:
        self._layers = layers
        self._playback = playback
        self._values = values

    def make(self, call: Call) -> Any:
        """Make the steps of a call, and return what it gave."""
        for step in call.steps:
            given = self._known(step.inputs)
            if isinstance(step, Call):
                self._enter(step, given)
            else:
                self._playback.play(step, given, _one_or_all(self._known(step.outputs)))
        return _one_or_all(self._known(call.outputs))

    def _enter(self, call: Call, given: list[Tensor]) -> None:
        layer = self._layers[call.scope.path]
        before, layer._playing = layer._playing, (self, call)
        try:
            is_torchs = call.scope.type_name.startswith("torch.")
            called_at(call.source if is_torchs else "")(layer, *given)
        finally:
            layer._playing = before

    def _known(self, names: tuple[str, ...]) -> list[Tensor]:
        return [self._values[name] for name in names if name in self._values]


def _one_or_all(tensors: list[Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


_WHY_UNLISTED = "the runtime gives the outputs of the model alone"


def run_program(request: Request, model: StandInModel, notes: list[str]) -> Observation:
    """Run the request's batch and play it back, watched.

    Raises:
        InspectionError: a backward pass is demanded, or the batch does not fill the inputs.
        Exception: whatever the runtime raises.
    """
    if request.backward:
        raise InspectionError(
            f"there is no backward pass through {model.program.type_name}, which torch does not "
            "run: leave backward out, or inspect the module that it was made of"
        )
    own = replace(request, model=model, backward=False)
    watch = partial(observed_playback, playback=model._playback)
    observation = run_step(own, model, notes, watch)
    return observation if model.program.nodes else replace(observation, unlisted=_WHY_UNLISTED)
