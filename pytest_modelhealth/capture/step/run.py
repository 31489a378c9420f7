"""One inspected step: forward, loss, backward, and what was seen, on a model left untouched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.engine import Backward, Request
from pytest_modelhealth.capture.observing.hooks import Hooks, observed
from pytest_modelhealth.capture.observing.layer import Held
from pytest_modelhealth.capture.observing.operators import containers_shown
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.observing.records import layer_records
from pytest_modelhealth.capture.observing.tensors import (
    LossScale,
    find_tensors,
    is_capturing,
    noted,
    version,
)
from pytest_modelhealth.capture.step.company import Company, in_company
from pytest_modelhealth.capture.step.isolation import (
    Switch,
    collected_rarely,
    deep_graphs_freed,
    exited_whole,
    gradients_set_aside,
    untouched,
)
from pytest_modelhealth.capture.step.loss import LossWatch, compute_loss, conflicts
from pytest_modelhealth.capture.step.prepare import Step, prepare
from pytest_modelhealth.capture.step.state import State, graph_leaves
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import ensure_match
from pytest_modelhealth.report import LayerRecord, Observation


def run_forward(step: Step) -> Any:
    """Return what the model returns."""
    functions = step.hooks.functions
    step.functions = functions if functions.is_on else None
    output = step.model(*step.arguments.args, **step.arguments.kwargs)
    if step.request.visitor is not None:
        step.request.visitor.see_output(output)
    return output


def read_state(step: Step) -> list[Held]:
    """Read buffers and parameters as the forward left them: what the loss was computed with.

    Returns:
        The parameters.
    """
    recorder = step.recorder
    with step.company.parameters_shown():
        recorder.note_options()
        recorder.note_ties()
        recorder.add_state("buffers", recorder.held("_buffers"))
        parameters = recorder.held("_parameters")
        recorder.add_state("parameters", parameters)
    return parameters


@contextmanager
def observed_eagerly(recorder: Recorder) -> Iterator[Hooks]:
    """Let `recorder` see every layer by hooks."""
    with eagerly(), observed(recorder) as hooks, containers_shown(hooks):
        yield hooks


def eagerly() -> AbstractContextManager[None]:
    """Run compiled models eagerly: a warm one ignores hooks that were added later.

    Without torch._dynamo, which takes a second to import, nothing is compiled yet.
    """
    return _forced_eager() if "torch._dynamo" in sys.modules else nullcontext()


@Switch
@contextmanager
def _forced_eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def run_loss(step: Step, output: Any) -> tuple[Tensor | None, list[Any]]:
    """Return the loss, ``None`` where there is none, and the nodes that the output ends in."""
    function, target, hooks = step.loss, step.request.target, step.hooks
    if function is None or not hooks.functions.is_on:
        loss = compute_loss(output, target, function)
    else:
        watch = LossWatch(output, target, function)
        with watch.watching(hooks):
            loss = compute_loss(output, target, function)
        step.loss_path = None if loss is None else watch.path(loss)
    returned = find_tensors(output)
    is_given = function is not None or any(loss is tensor for tensor in returned)
    step.recorder.flow.finish(returned, loss, is_given)
    if loss is not None and not loss.is_meta:
        step.recorder.add_loss(loss)
    return loss, [tensor.grad_fn for tensor in returned if tensor.grad_fn is not None]


def run_backward(
    step: Step, loss: Tensor | None, ends: Sequence[Any], parameters: list[Held]
) -> None:
    """Differentiate `loss` where that is asked for and possible.

    Args:
        step: the step.
        loss: its loss.
        ends: the nodes of autograd's graph that the output ends in.
        parameters: those of the model, as the forward left them.

    Raises:
        InspectionError: gradients were demanded, and there is no path for them, or `backward` is
            nothing of the kind.
    """
    step.is_differentiated = _wants_backward(loss, step.request.backward, step.notes)
    if step.request.backward is not False:
        step.no_gradients = _why_no_gradients(
            loss, bool(ends), [tensor for _, _, tensor in parameters]
        )
    if loss is None or not step.is_differentiated:
        return
    if loss.requires_grad:
        if step.tasks is not None:
            step.task_gradients, remarks = step.tasks.gradients(parameters, step.scale)
            step.notes += [*remarks, *conflicts(step.task_gradients)]
        _differentiate(step, step.scale.apply(loss), parameters)
    if loss.requires_grad or step.loss_path is not None:
        read = step.hooks.functions.read
        with step.company.parameters_shown():
            step.recorder.note_unreached(
                parameters, lambda: step.company.known(graph_leaves(ends)), read
            )


def _differentiate(step: Step, loss: Tensor, parameters: list[Held]) -> None:
    """Run the backward pass; take gradients, and the leaves it reached that are no parameters."""
    backward, recorder = step.request.backward, step.recorder
    known = {id(leaf) for leaf in step.company.state.leaves}
    leaves = graph_leaves([loss.grad_fn])
    unknown = [leaf for leaf in leaves if id(leaf) not in known]
    with gradients_set_aside(unknown), step.hooks.differentiating():
        if callable(backward):
            backward(loss)
        else:
            loss.backward()
        del unknown
        # a function mode would see each attribute
        with torch._C.DisableTorchFunction(), step.company.parameters_shown():
            gradients = [(lyr, n, p.grad) for lyr, n, p in parameters if p.grad is not None]
            gradients = _over_ranks(step, gradients)
            recorder.add_state("parameter_gradients", gradients)
            with noted(recorder.errors, "rows of zeros: "):
                recorder.note_zero_slices()
            with noted(recorder.errors, "unregistered parameters: "):
                step.unregistered = step.registered.leaves_out(leaves, recorder.flow.line_of_leaf)


def _over_ranks(step: Step, gradients: list[Held]) -> list[Held]:
    """Return the gradients to report, where other ranks have a share in them."""
    if step.request.averager is not None:
        return step.request.averager(gradients)
    if step.company.on_ranks:
        from pytest_modelhealth.capture.parallel.placements import summed

        gradients = [(layer, name, summed(gradient)) for layer, name, gradient in gradients]
    return gradients


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


def settle(step: Step) -> Observation:
    """Return all that was seen.

    Raises:
        LayerNotFoundError: a rule of the request matches no layer.
    """
    recorder, notes = step.recorder, step.notes
    for name, tensor, before in step.versions:
        if before is not None and version(tensor) != before:
            # the number of a tensor of the batch, or the names of a layer and its parameter
            own = ".".join(filter(None, name))
            what = f"tensor {own} of the batch" if len(name) == 1 else f"the parameter {own!r}"
            notes.append(f"the forward wrote to {what}, which is not undone")
    named = [(layer.name, layer.module) for layer in recorder.layers.values()]
    ensure_match(step.request.selection.rules, named, step.request.model)
    layers = layer_records(
        recorder.layers.values(), backward=step.is_differentiated, functions=step.functions
    )
    recorder.let_go()
    recorder.loss_calls.settle()
    if step.scale.factor != 1.0:
        notes += _overflow(layers.values(), step.scale)
    return Observation(
        # what waits on a device is tensors, which a report must not hold either
        layers=dict(layers) if recorder.reader.ledger.has_queued else layers,
        model_type=recorder.layers[""].type_name,
        loss=recorder.loss,
        backward=step.is_differentiated,
        no_gradients=step.no_gradients,
        samples=step.samples,
        notes=(*notes, *recorder.notes),
        errors=tuple(recorder.errors),
        loss_calls=tuple(recorder.loss_calls.settled),
        loss_path=step.loss_path,
        unregistered=step.unregistered,
        tasks=step.task_gradients,
        own_functions=recorder.flow.has_own_functions,
        sample_deviation=recorder.sample_deviation,
        flow=recorder.flow.flow(),
        given=step.given,
    )


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


Watch = Callable[[Recorder], AbstractContextManager[Hooks]]
"""Lets a recorder see the layers of a model while it runs."""


@collected_rarely()
def run_step(
    request: Request,
    model: nn.Module,
    notes: list[str],
    watch: Watch = observed_eagerly,
    state: State | None = None,
) -> Observation:
    """Run the request's batch through `model`, watched.

    Args:
        request: what is asked.
        model: the module that stands for ``request.model``.
        notes: what a reader should know of this model.
        watch: hooks on every module, unless a kind of model has another way.
        state: what `model` holds, where the caller has looked already.

    Raises:
        InspectionError: the request cannot be carried out on this model.
        Exception: whatever the user's model or loss raises, untouched.
    """
    if is_capturing():
        raise InspectionError(
            f"cannot inspect {type(request.model).__name__} while a CUDA graph is captured: "
            "reading a tensor would end the capture; inspect it before or after torch.cuda.graph"
        )
    with deep_graphs_freed() as graph, exited_whole(in_company(model, state)) as company:
        return _run(request, model, notes, watch, company, graph)


def _run(
    request: Request,
    model: nn.Module,
    notes: list[str],
    watch: Watch,
    company: Company,
    graph: list[Any],
) -> Observation:
    step = prepare(request, model, [*notes, *company.notes], company)
    inspection = step.inspection
    with exited_whole(
        inspection.apart(), untouched(inspection, step.batch), watch(step.recorder)
    ) as hooks:
        inspection.hooks = hooks
        output = run_forward(step)
        inspection.doing = "loss"
        loss, ends = run_loss(step, output)
        del output
        parameters = read_state(step)
        graph += [*ends, None if loss is None else loss.grad_fn]
        inspection.doing = "backward pass"
        run_backward(step, loss, ends, parameters)
    return settle(step)
