"""The backward pass of an inspected step, and why there is none where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.engine import Backward
from pytest_modelhealth.capture.observing.layer import Held
from pytest_modelhealth.capture.step.prepare import Step
from pytest_modelhealth.capture.step.state import graph_leaves
from pytest_modelhealth.capture.step.tasks import conflicts
from pytest_modelhealth.capture.step.untouched import gradients_set_aside
from pytest_modelhealth.errors import InspectionError


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
        with step.parameters_shown():
            step.recorder.note_unreached(parameters, lambda: step.known(graph_leaves(ends)), read)


def _differentiate(step: Step, loss: Tensor, parameters: list[Held]) -> None:
    """Run the backward pass; take gradients, and the leaves it reached that are no parameters."""
    backward, recorder = step.request.backward, step.recorder
    known = {id(leaf) for leaf in step.state.leaves}
    leaves = graph_leaves([loss.grad_fn])
    unknown = [leaf for leaf in leaves if id(leaf) not in known]
    with gradients_set_aside(unknown), step.hooks.differentiating():
        if callable(backward):
            backward(loss)
        else:
            loss.backward()
        del unknown
        # a function mode would see each attribute
        with torch._C.DisableTorchFunction(), step.parameters_shown():
            gradients = [(lyr, n, p.grad) for lyr, n, p in parameters if p.grad is not None]
            gradients = _over_ranks(step, gradients)
            recorder.add_state("parameter_gradients", gradients)
            try:
                recorder.note_zero_slices()
            except Exception as error:  # noqa: BLE001 - ours, as in a hook
                recorder.errors.append(f"rows of zeros: {type(error).__name__}: {error}")
            try:
                step.unregistered = step.registered.leaves_out(leaves, recorder.flow.line_of_leaf)
            except Exception as error:  # noqa: BLE001 - ours, as in a hook
                recorder.errors.append(f"unregistered parameters: {type(error).__name__}: {error}")


def _over_ranks(step: Step, gradients: list[Held]) -> list[Held]:
    """Return the gradients to report, where other ranks have a share in them."""
    if step.request.averager is not None:
        return step.request.averager(gradients)
    if step.company is not None and step.company.on_ranks:
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
