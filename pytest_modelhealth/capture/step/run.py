"""One inspected step: forward, loss and backward, watched, on a model that is left as it was."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pytest_modelhealth.capture.engine import Backward, Request
from pytest_modelhealth.capture.observing.flow import Source
from pytest_modelhealth.capture.observing.graphs import containers_shown
from pytest_modelhealth.capture.observing.hooks import Hooks, observed
from pytest_modelhealth.capture.observing.recorder import Held, Recorder
from pytest_modelhealth.capture.observing.scaling import LossScale
from pytest_modelhealth.capture.observing.sources import note_sources
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.observing.visiting import VisitedRecorder
from pytest_modelhealth.capture.step.apart import Running
from pytest_modelhealth.capture.step.collection import collected_rarely
from pytest_modelhealth.capture.step.deep_graphs import deep_graphs_freed
from pytest_modelhealth.capture.step.inputs import Inputs
from pytest_modelhealth.capture.step.interruption import exited_whole
from pytest_modelhealth.capture.step.loss import compute_loss
from pytest_modelhealth.capture.step.loss_phase import LossPhase
from pytest_modelhealth.capture.step.state import (
    State,
    Versions,
    gradients_set_aside,
    graph_leaves,
    untouched,
)
from pytest_modelhealth.capture.step.tasks import TaskLosses, conflicts
from pytest_modelhealth.capture.step.unregistered import Registered
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import ensure_match, named_modules
from pytest_modelhealth.report import (
    Kind,
    LayerRecord,
    LossPath,
    Observation,
    TaskGradients,
    UnregisteredParameter,
)


@contextmanager
def _observed_eagerly(recorder: Recorder) -> Iterator[Hooks]:
    with _eager_stance(), observed(recorder) as hooks, containers_shown(hooks):
        yield hooks


@collected_rarely()
def run_step(
    request: Request,
    model: nn.Module,
    notes: list[str],
    watch: Callable[[Recorder], AbstractContextManager[Hooks]] = _observed_eagerly,
    state: State | None = None,
) -> Observation:
    """Run the request's batch through `model`, watched.

    Args:
        request: what is asked.
        model: the module that stands for ``request.model``.
        notes: what a reader should know of this model.
        watch: lets a recorder see the layers; hooks on every module, unless a kind has another way.
        state: what `model` holds, where the caller has looked already.

    Raises:
        InspectionError: the request cannot be carried out on this model.
        Exception: whatever the user's model or loss raises, untouched.
    """
    with deep_graphs_freed() as graph:
        return _run_step(request, model, notes, watch, state, graph)


def _run_step(
    request: Request,
    model: nn.Module,
    notes: list[str],
    watch: Callable[[Recorder], AbstractContextManager[Hooks]],
    state: State | None,
    graph: list[Any],
) -> Observation:
    scale = LossScale.of(request.scaler)
    arguments = Inputs.of(request.inputs)
    batch = (arguments.args, arguments.kwargs, request.target)
    samples = _samples(batch)
    recorder = _recorder(request, model, scale, samples)
    note_sources(recorder)
    state = State(model) if state is None else state
    writes = _Writes(recorder, batch)
    registered = Registered(model, writes.parameters, batch)
    recorder.flow.name_sources(_sources(recorder, state, arguments, request.target))
    notes = [*notes, *_unregistered(recorder, registered, state)]
    unregistered: tuple[UnregisteredParameter, ...] = ()
    tasks = TaskLosses(request.loss) if isinstance(request.loss, Mapping) else None
    function: Any = tasks or request.loss
    by_task: tuple[TaskGradients, ...] = ()
    _refuse_fake(state, batch)
    running = Running(state, request.model)
    with exited_whole(running.apart(), untouched(running, batch), watch(recorder)) as hooks:
        running.hooks = hooks
        read = hooks.functional.read if hooks.functional.is_on else None
        output = model(*arguments.args, **arguments.kwargs)
        running.doing = "loss"
        if request.visitor is not None:
            request.visitor.see_output(output)
        loss, path = _watched_loss(output, request, function, hooks)
        returned = find_tensors(output)
        is_given = function is not None or any(loss is tensor for tensor in returned)
        recorder.flow.finish(returned, loss, is_given)
        del returned
        backward = _wants_backward(loss, request.backward, notes)
        # buffers and parameters as the forward left them: what the loss was computed with
        recorder.note_options()
        recorder.note_ties()
        recorder.add_state("buffers", recorder.held("_buffers"))
        parameters = recorder.held("_parameters")
        recorder.add_state("parameters", parameters)
        if loss is not None and not loss.is_meta:
            recorder.add_loss(loss)
        ends = [tensor.grad_fn for tensor in find_tensors(output) if tensor.grad_fn is not None]
        graph += [*ends, None if loss is None else loss.grad_fn]
        del output
        no_gradients = ""
        if request.backward is not False:
            no_gradients = _why_no_gradients(loss, bool(ends), [held[2] for held in parameters])
        running.doing = "backward pass"
        if backward and loss is not None and loss.requires_grad:
            if tasks is not None:
                by_task, remarks = tasks.gradients(parameters, scale)
                notes += [*remarks, *conflicts(by_task)]
            unregistered = _run_backward(
                scale.apply(loss), request.backward, hooks, state, registered, parameters
            )
        if backward and loss is not None and (loss.requires_grad or path is not None):
            recorder.note_unreached(parameters, lambda: graph_leaves(ends), hooks.functional.read)
        del parameters
    notes += [f"the forward wrote to {name}, which is not undone" for name in writes.written()]
    _ensure_all_rules_matched(request, recorder)
    layers = recorder.records(backward=backward, read=read)
    recorder.settle_losses()
    notes += [] if scale.factor == 1.0 else _overflow(layers.values(), scale)
    return Observation(
        layers=layers,
        model_type=recorder.layers[""].type_name,
        loss=recorder.loss,
        backward=backward,
        no_gradients=no_gradients,
        samples=samples,
        notes=(*notes, *recorder.notes),
        errors=tuple(recorder.errors),
        loss_calls=tuple(recorder.loss_calls),
        loss_path=path,
        unregistered=unregistered,
        tasks=by_task,
        flow=recorder.flow.flow(),
    )


def _sources(recorder: Recorder, state: State, arguments: Inputs, target: Any) -> Iterator[Source]:
    """Yield the batch and what the model holds with their names in the flow."""
    for key, value in (*enumerate(arguments.args), *arguments.kwargs.items()):
        yield from ((Kind.INPUT, *named) for named in _numbered(f"input {key}", value))
    yield from ((Kind.TARGET, *named) for named in _numbered("target", target))
    for layer, name, tensor in recorder.held("_parameters"):
        yield Kind.PARAMETER, (layer.name, name), tensor
    for layer, name, tensor in recorder.held("_buffers"):
        yield Kind.BUFFER, (layer.name, name), tensor
    for tensor in (*state.leaves, *state.tensors):
        yield Kind.UNKNOWN, ("attribute",), tensor


def _numbered(name: str, value: Any) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    tensors = find_tensors(value)
    for index, tensor in enumerate(tensors):
        yield (name if len(tensors) == 1 else f"{name}[{index}]",), tensor


def _watched_loss(
    output: Any, request: Request, function: Callable[..., Any] | None, hooks: Hooks
) -> tuple[Tensor | None, LossPath | None]:
    """Return the loss and, where it is the user's, how it was computed."""
    if function is None or not hooks.functional.is_on:
        return compute_loss(output, request.target, function), None
    phase = LossPhase(output, request.target, function)
    with phase.watching(hooks):
        loss = compute_loss(output, request.target, function)
    return loss, None if loss is None else phase.path(loss)


def _recorder(request: Request, model: nn.Module, scale: LossScale, samples: int) -> Recorder:
    if request.visitor is None:
        return Recorder(named_modules(model), request.selection, scale, samples)
    recorder = VisitedRecorder(named_modules(model), request.selection, scale, samples)
    recorder.visitor = request.visitor
    return recorder


def _overflow(layers: Iterable[LayerRecord], scale: LossScale) -> list[str]:
    """Return what to say of parameter gradients that are not finite under a loss scale."""
    gradients = [g for layer in layers for g in layer.parameter_gradients.values()]
    overflowed = sum(statistics.nonfinite_count > 0 for statistics in gradients)
    if not overflowed:
        return []
    note = (
        f"under the loss scale of {scale.factor:g} the gradients of {overflowed} of "
        f"{len(gradients)} parameters are not finite: GradScaler would skip this step and lower "
        "the scale"
    )
    return [note]


def _unregistered(recorder: Recorder, registered: Registered, state: State) -> list[str]:
    """Return a note on modules with parameters that torch does not know to be in the model."""
    others = [module for module in state.modules if module not in recorder.by_module]
    unknown = [module for module in others if not registered.knows(module)]
    if not unknown:
        return []
    types = ", ".join(sorted({type(module).__name__ for module in unknown}))
    note = (
        f"{len(unknown)} modules ({types}) are kept in plain attributes, lists or dictionaries: "
        "model.parameters() leaves them out, and they were not looked into; nn.ModuleList and "
        "nn.ModuleDict register them"
    )
    return [note]


class _Writes:
    """Tells what was written to of that which is not copied beforehand.

    Attributes:
        parameters: those of the model, each once.
    """

    def __init__(self, recorder: Recorder, batch: Any) -> None:
        self._recorder = recorder
        self.parameters = [parameter for _, _, parameter in recorder.held("_parameters")]
        self._versions = Versions([*self.parameters, *find_tensors(batch)])

    def written(self) -> list[str]:
        """Return what was written to, by name; the model holds the same parameters again."""
        return [self._name(index) for index in self._versions.written()]

    def _name(self, index: int) -> str:
        if index >= len(self.parameters):
            return f"tensor {index - len(self.parameters)} of the batch"
        layer, name, _ = self._recorder.held("_parameters")[index]
        return f"the parameter {'.'.join(filter(None, (layer.name, name)))!r}"


def _wants_backward(loss: Tensor | None, backward: Backward, notes: list[str]) -> bool:
    """Return whether gradients are asked for and can be asked for.

    Raises:
        InspectionError: they were demanded, and there is no path for them, or `backward` is
            nothing of the kind.
    """
    if not (backward is None or isinstance(backward, bool) or callable(backward)):
        raise InspectionError(
            f"backward must be True, False, None or a function backward(loss), not {backward!r}"
        )
    if backward is False:
        return False
    reason = ""
    if loss is None:
        reason = _NO_NUMBER
    elif not torch.is_grad_enabled():
        reason = _OFF
    if reason or (loss is not None and not loss.requires_grad):
        if backward is True or callable(backward):
            raise InspectionError(
                "no backward pass: "
                + (reason or "the loss depends on nothing that requires a gradient")
                + "; leave backward out to inspect the forward pass alone"
            )
        if reason:
            notes.append(f"no backward pass: {reason}")
    return not reason


_NO_NUMBER = "the output holds no floating-point number to differentiate"
_OFF = "gradients are off here (torch.no_grad() or inference_mode())"


def _why_no_gradients(loss: Tensor | None, has_graph: bool, parameters: Sequence[Tensor]) -> str:
    """Return why `loss` gives no parameter a gradient and what would, ``""`` where it may give one.

    Args:
        loss: what is differentiated.
        has_graph: whether an output of the model has a graph.
        parameters: those of the model; without any there is nothing to learn.
    """
    if not parameters:
        return ""
    if not torch.is_grad_enabled():
        return f"{_OFF}; inspect outside of it"
    if loss is None:
        return f"{_NO_NUMBER}; give a loss, or return what the output is computed from"
    if loss.grad_fn is not None or any(loss is parameter for parameter in parameters):
        return ""
    if not any(parameter.requires_grad for parameter in parameters):
        return "every parameter is frozen (requires_grad=False); unfreeze what is trained"
    if has_graph:
        return (
            "the loss is a new tensor without a graph, although the output has one; compute it "
            "from the output without .detach(), .item() or torch.tensor(...)"
        )
    return (
        "neither output nor loss depends on a parameter; look for .detach(), .item(), .numpy(), "
        "argmax or no_grad in the forward"
    )


def _run_backward(
    loss: Tensor,
    backward: Backward,
    hooks: Hooks,
    state: State,
    registered: Registered,
    parameters: list[Held],
) -> tuple[UnregisteredParameter, ...]:
    """Run the backward pass and return the leaves it reached that are no parameters."""
    recorder = hooks.recorder
    known = {id(leaf) for leaf in state.leaves}
    leaves = graph_leaves([loss.grad_fn])
    unknown = [leaf for leaf in leaves if id(leaf) not in known]
    with gradients_set_aside(unknown), hooks.differentiating():
        if callable(backward):
            backward(loss)
        else:
            loss.backward()
        del unknown
        with torch._C.DisableTorchFunction():  # a function mode would see each attribute
            recorder.add_state("parameter_gradients", _gradients(parameters))
            try:
                return registered.leaves_out(leaves)
            except Exception as error:  # noqa: BLE001 - ours, as in a hook
                recorder.errors.append(f"unregistered parameters: {type(error).__name__}: {error}")
                return ()


def _gradients(parameters: Iterable[Held]) -> Iterator[Held]:
    for layer, name, parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            yield layer, name, gradient


def _refuse_fake(state: State, batch: Any) -> None:
    """Do nothing if everything that is to run has values.

    Raises:
        InspectionError: a `FakeTensorMode` is on, or a tensor was made in one.
    """
    fake = None
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        fake = "it runs in a FakeTensorMode"
    elif FakeTensor in set(map(type, (*state.leaves, *state.tensors))):
        fake = "it was made in a FakeTensorMode"
    elif FakeTensor in set(map(type, find_tensors(batch))):
        fake = "its batch was made in a FakeTensorMode"
    if fake:
        raise InspectionError(
            f"cannot inspect {type(state.modules[0]).__name__}: {fake}, whose tensors have shapes "
            "and no values, so there is nothing to observe; make model and batch outside the mode, "
            "and inspect them there"
        )


def _samples(batch: Any) -> int:
    return next((len(t) for t in find_tensors(batch) if t.ndim and not t.is_nested), 0)


def _ensure_all_rules_matched(request: Request, recorder: Recorder) -> None:
    layers = ((layer.name, layer.module) for layer in recorder.layers.values())
    ensure_match(request.selection.rules, layers, request.model)


_stance_lock = threading.Lock()
_stance: list[Any] = []
_stance_holders = 0


@contextmanager
def _eager_stance() -> Iterator[None]:
    """Run compiled models eagerly: a warm one ignores hooks that were added later.

    The stance is one for the whole process, so the first to enter sets it and the last to leave
    resets it. Without torch._dynamo, which takes a second to import, nothing is compiled yet.
    """
    global _stance_holders
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _stance_lock:
        _stance_holders += 1
        if _stance_holders == 1:
            _stance.append(torch.compiler.set_stance("force_eager"))
            _stance[-1].__enter__()
    try:
        yield
    finally:
        with _stance_lock:
            _stance_holders -= 1
            if _stance_holders == 0:
                _stance.pop().__exit__(None, None, None)
