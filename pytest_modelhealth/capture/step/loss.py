"""The loss of an inspected step, and how it is computed from the output."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.loss_path import LossWatch
from pytest_modelhealth.capture.step.loss_value import compute_loss
from pytest_modelhealth.capture.step.prepare import Step


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
