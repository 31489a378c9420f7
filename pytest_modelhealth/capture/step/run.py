"""One inspected step: forward, loss, backward, and what was seen, on a model left as it was."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from pytest_modelhealth.capture.engine import Request
from pytest_modelhealth.capture.observing.cuda_graphs import is_capturing
from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.step.backward import run_backward
from pytest_modelhealth.capture.step.collection import collected_rarely
from pytest_modelhealth.capture.step.company import Company, in_company
from pytest_modelhealth.capture.step.deep_graphs import deep_graphs_freed
from pytest_modelhealth.capture.step.forward import observed_eagerly, read_state, run_forward
from pytest_modelhealth.capture.step.interruption import exited_whole
from pytest_modelhealth.capture.step.loss import run_loss
from pytest_modelhealth.capture.step.prepare import prepare
from pytest_modelhealth.capture.step.settle import settle
from pytest_modelhealth.capture.step.state import State
from pytest_modelhealth.capture.step.untouched import untouched
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report import Observation

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
    step = prepare(request, model, [*notes, *company.notes], company.state, company)
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
