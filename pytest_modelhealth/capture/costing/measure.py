"""Runs a model once to measure what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from pytest_modelhealth.capture.costing.hooks import Form, MeteringHooks
from pytest_modelhealth.capture.costing.meter import Meter
from pytest_modelhealth.capture.engine import Request
from pytest_modelhealth.capture.observing.graph_modules import containers_shown
from pytest_modelhealth.capture.observing.hooks import observed
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.forward import eagerly
from pytest_modelhealth.capture.step.run import Watch
from pytest_modelhealth.capture.step.tasks import TaskLosses
from pytest_modelhealth.layers import Rule, Selection
from pytest_modelhealth.report import Costs, LayerCosts, Observation, Size


def measured(request: Request, run: Callable[[Request, Watch], Observation]) -> Observation:
    """Return what a run saw, which is no number of a tensor, with what it cost.

    Args:
        request: what is asked. Its own way to run the backward pass, which may do more than that,
            is left out, and several losses are added up without a pass for each.
        run: runs it, watched.
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
    watch = _Watch(batch)
    try:
        seen = run(request, watch)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        watch = _Watch(batch, why_not_saved=_NO_HOOKS)
        seen = run(request, watch)
    return replace(seen, costs=replace(watch.costs, backward=seen.backward))


_NO_HOOKS = (
    "what autograd saves was not measured: the model calls torch.func or switches the hooks off "
    "that would tell"
)


_NOTHING = Selection((Rule("*", frozenset()),))


class _Watch:
    """Measures one run.

    Args:
        batch: the tensors that it is given.
        why_not_saved: why what autograd saves is not to be seen, if it is not.
    """

    def __init__(self, batch: list[Tensor], why_not_saved: str = "") -> None:
        self.costs = Costs()
        self._batch = batch
        self._why_not_saved = why_not_saved

    @contextmanager
    def __call__(self, recorder: Recorder) -> Iterator[MeteringHooks]:
        """Let `recorder` see the layers that run inside, and measure what they cost."""
        hooks = MeteringHooks(recorder)
        meter = Meter(hooks.metered_layer, sees_saved=not self._why_not_saved)
        meter.storages.give(_held(recorder))
        meter.storages.give(self._batch)
        held, on_cuda = meter.storages.given(""), meter.storages.given("cuda")
        allocator = _Allocator()
        with eagerly(), observed(recorder, hooks), containers_shown(hooks), meter.running():
            yield hooks
        self.costs = Costs(
            layers=_layers(recorder, hooks.forms, meter),
            multiply_adds=meter.multiply_adds.total(),
            saved_bytes=None if meter.saved_bytes is None else meter.saved_bytes.total(),
            held_bytes=held,
            peak_bytes=meter.storages.peak,
            cuda_peak_bytes=allocator.peak(on_cuda),
            why_not_saved=self._why_not_saved,
        )
        meter.storages.forget()


def _held(recorder: Recorder) -> list[Tensor]:
    """Return the parameters and buffers of a model, but those that its first forward makes."""
    held = (*recorder.held("_parameters"), *recorder.held("_buffers"))
    return [tensor for _, _, tensor in held if not is_lazy(tensor)]


class _Allocator:
    """CUDA's allocator, on every device that is in use."""

    def __init__(self) -> None:
        self._is_there = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._devices = range(torch.cuda.device_count()) if self._is_there else range(0)
        for device in self._devices:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        self._before = sum(map(torch.cuda.memory_allocated, self._devices))

    def peak(self, held: int) -> int | None:
        """Return the most that was handed out since, with `held` for what was there before."""
        if not self._is_there:
            return None
        return sum(map(torch.cuda.max_memory_allocated, self._devices)) - self._before + held


def _layers(recorder: Recorder, forms: dict[str, Form], meter: Meter) -> dict[str, LayerCosts]:
    parameters: dict[str, dict[str, Size]] = {}
    for layer, name, tensor in recorder.held("_parameters"):
        sizes = parameters.setdefault(layer.name, {})
        sizes[name] = Size(tensor.numel(), tensor.numel() * tensor.itemsize)
    return {
        name: LayerCosts(
            multiply_adds=meter.multiply_adds[name],
            saved_bytes=None if meter.saved_bytes is None else meter.saved_bytes[name],
            parameters=parameters.get(name, {}),
            **vars(forms.get(name, Form())),
        )
        for name in dict.fromkeys((*forms, *parameters))
    }
