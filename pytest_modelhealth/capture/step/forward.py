"""The forward pass of an inspected step, run eagerly and watched."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_modelhealth.capture.observing.graph_modules import containers_shown
from pytest_modelhealth.capture.observing.hooks import Hooks, observed
from pytest_modelhealth.capture.observing.layer import Held
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.step.prepare import Step


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
    with step.parameters_shown():
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


_stance_lock = threading.Lock()
_stance: list[Any] = []
_stance_holders = 0


@contextmanager
def eagerly() -> Iterator[None]:
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
