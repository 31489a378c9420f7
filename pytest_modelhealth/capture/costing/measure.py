"""Runs a model once to measure what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from pytest_modelhealth.capture.costing.meter import Meter
from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.observing.function_mode import Call
from pytest_modelhealth.capture.observing.hooks import Frame, Hooks, observed
from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import Beside
from pytest_modelhealth.capture.step.batch import Inputs, copied_batch
from pytest_modelhealth.capture.step.loss import TaskLosses, no_loss
from pytest_modelhealth.capture.step.run import Watch, eagerly
from pytest_modelhealth.layers import Rule, Selection
from pytest_modelhealth.report import Costs, LayerCosts, Observation, Shape, Size


class MeteringHooks(Hooks):
    """Sees the calls of layers in place of what their tensors hold."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        recorder.flow.is_on = False
        self.forms: dict[str, dict[str, Any]] = {}  # by layer, fields of its `LayerCosts`
        self._function_layer: str | None = None

    def metered_layer(self) -> str | None:
        """Return the innermost layer whose forward runs, by name; ``None`` outside of it.

        What activation checkpointing runs again in the backward pass is no forward.
        """
        if self._function_layer is not None:
            return self._function_layer
        if not self._stack or self._stack[-1].is_recomputation:
            return None
        return self._stack[-1].layer.name

    def _function(
        self, name: str | None, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return super()._function(name, call, args, kwargs)
        finally:
            self._function_layer = None

    def _see_inputs(self, layer: Layer, frame: Frame, arguments: Any) -> None:
        super()._see_inputs(layer, frame, arguments)
        if frame.is_recomputation:
            return
        if layer.functional:
            self._function_layer = layer.name
        form = self.forms.setdefault(layer.name, {"activation_bytes": 0})
        if frame.inputs:
            form.setdefault("input_shape", _shape(frame.inputs[0][0]))

    def _see_output(self, layer: Layer, frame: Frame, output: Any) -> None:
        super()._see_output(layer, frame, output)
        form = self.forms.get(layer.name)
        if frame.is_recomputation or form is None:
            return
        for tensor in find_tensors(output):
            form.setdefault("output_shape", _shape(tensor))
            form.setdefault("dtype", str(tensor.dtype).removeprefix("torch."))
            form["activation_bytes"] += tensor.numel() * tensor.itemsize


def _shape(tensor: Tensor) -> Shape:
    return tuple((tensor.values() if tensor.is_nested else tensor).shape)


_NOTHING = Selection((Rule("*", frozenset()),))
_NO_HOOKS = (
    "what autograd saves was not measured: the model calls torch.func or switches the hooks off "
    "that would tell"
)


def measured(request: Request, run: Callable[[Request, Watch], Observation]) -> Observation:
    """Return what a run saw, which is no number of a tensor, with what it cost.

    The request's own way to run the backward pass, which may do more than that, is left out, and
    several losses are added up without a pass for each.
    """
    request = replace(
        request,
        loss=TaskLosses(request.loss) if isinstance(request.loss, Mapping) else request.loss,
        backward=None if callable(request.backward) else request.backward,
        scaler=None,
        selection=_NOTHING,
        visitor=None,
    )
    arguments = Inputs.of(request.inputs)
    batch = find_tensors((arguments.args, arguments.kwargs, request.target))
    costs, why_not_saved = Costs(), ""

    @contextmanager
    def watch(recorder: Recorder) -> Iterator[MeteringHooks]:
        nonlocal costs
        hooks = MeteringHooks(recorder)
        meter = Meter(hooks.metered_layer, sees_saved=not why_not_saved)
        held = [tensor for own in recorder.held() for _, _, tensor in own]
        # but those that the first forward makes
        for tensor in (*(tensor for tensor in held if not is_lazy(tensor)), *batch):
            meter.storages.follow(tensor, is_given=True)
        given, on_cuda = meter.storages.given(""), meter.storages.given("cuda")
        cuda_peak = _watch_cuda()
        with eagerly(), observed(recorder, hooks), meter.running():
            yield hooks
        costs = Costs(
            layers=_layers(recorder, hooks.forms, meter),
            multiply_adds=meter.multiply_adds.total(),
            saved_bytes=None if meter.saved_bytes is None else meter.saved_bytes.total(),
            held_bytes=given,
            peak_bytes=meter.storages.peak,
            cuda_peak_bytes=None if cuda_peak is None else cuda_peak() + on_cuda,
            why_not_saved=why_not_saved,
        )
        meter.storages.forget()

    try:
        seen = run(request, watch)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        why_not_saved = _NO_HOOKS
        seen = run(request, watch)
    return replace(seen, costs=replace(costs, backward=seen.backward))


def _watch_cuda() -> Callable[[], int] | None:
    """Return what tells the most that CUDA's allocator hands out from now on, if CUDA is in use."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    devices = range(torch.cuda.device_count())
    for device in devices:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = sum(map(torch.cuda.memory_allocated, devices))
    return lambda: sum(map(torch.cuda.max_memory_allocated, devices)) - before


def _layers(
    recorder: Recorder, forms: dict[str, dict[str, Any]], meter: Meter
) -> dict[str, LayerCosts]:
    parameters: dict[str, dict[str, Size]] = {}
    for layer, name, tensor in recorder.held()[0]:
        sizes = parameters.setdefault(layer.name, {})
        sizes[name] = Size(tensor.numel(), tensor.numel() * tensor.itemsize)
    return {
        name: LayerCosts(
            multiply_adds=meter.multiply_adds[name],
            saved_bytes=None if meter.saved_bytes is None else meter.saved_bytes[name],
            parameters=parameters.get(name, {}),
            **forms.get(name, {}),
        )
        for name in dict.fromkeys((*forms, *parameters))
    }


class FurtherRun:
    """One more run of an inspected model, begun before: the inspection may write to its batch."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._request = replace(
            request, inputs=copied_batch(request.inputs), target=copied_batch(request.target)
        )

    def after(self, observation: Observation) -> Observation:
        """Return what the inspection saw, with what the same step costs."""
        if self._engine.why_not_measured:
            return replace(observation, costs=Costs(why_not=self._engine.why_not_measured))
        request = self._request
        arguments = Inputs.of(request.inputs)
        batch = arguments.args, arguments.kwargs, request.target
        try:
            beside = Beside(self._engine.module(request.model), request.loss)
            with beside.put_back(batch, evaluation=False, watched=True, fused=True):
                seen = self._engine.measure(request)
        except Exception as error:  # noqa: BLE001 - of a model that has just run without a meter
            return replace(observation, costs=Costs(why_not=_only_measured(error)))
        return replace(observation, costs=seen.costs)


def measured_forward(engine: Engine, request: Request) -> Observation:
    """Return what a forward without a loss shows, with what it costs.

    Where that cannot be measured it is inspected, and the costs say why.

    Raises:
        InspectionError: the request cannot be carried out on this model.
        Exception: whatever the user's model raises, untouched.
    """
    request = replace(request, target=None, loss=no_loss, backward=False)
    why_not = engine.why_not_measured
    if not why_not:
        try:
            return engine.measure(request)
        except Exception as error:  # noqa: BLE001 - if it is the model's own, it comes again
            why_not = _only_measured(error)
    return replace(engine.run(request), costs=Costs(why_not=why_not))


def _only_measured(error: Exception) -> str:
    return (
        "costs were not measured: while operations and saved tensors are counted, the model raises "
        f"{type(error).__name__}: {error}".partition("\n")[0]
    )
