"""Two models for one batch: a reference, and what an edit of its source made of a copy."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from corpus.deploying import Session, is_onnx
from corpus.subject import Healthy, Subject, run


@dataclass
class Sides:
    """Two models for one batch.

    Args:
        reference: the model as it was, with its batch and loss.
        candidate: what became of it.
    """

    reference: Subject
    candidate: Any


def as_module(sides: Sides) -> nn.Module:
    """Return the candidate as a module that can be called: a `state_dict` in a copy, for one.

    An ONNX model runs in a session; what is callable otherwise is returned as it is.
    """
    candidate = sides.candidate
    if isinstance(candidate, Mapping):
        made = copy.deepcopy(sides.reference.model)
        made.load_state_dict(candidate)
        return made
    if isinstance(candidate, ExportedProgram):
        return candidate.module()
    return Session(candidate) if is_onnx(candidate) else candidate


Edit = Callable[[Any], Any]
"""Changes a copy of the reference, or returns what takes its place."""


def with_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give one module another forward, as an edit of its source would."""
    module.forward = types.MethodType(forward, module)


def loaded(target: nn.Module, source: nn.Module, rename: Callable[[str], str] = str) -> nn.Module:
    """Return `target` with the mode and the weights of `source`, whose keys are renamed."""
    target.load_state_dict({rename(key): value for key, value in source.state_dict().items()})
    return target.train(source.training)


def warm(healthy: Healthy) -> Healthy:
    """Return a maker of the same subject in evaluation mode, its running statistics warm."""

    @functools.wraps(healthy)
    def build() -> Subject:
        made = healthy()
        with torch.no_grad():
            for _ in range(5):
                run(made.model, made.draw(64)[0])
        made.model.eval()
        return made

    return build


def remade(healthy: Healthy, edit: Edit) -> Healthy:
    """Return a maker of the same subject with its model edited: a reference of another form."""

    @functools.wraps(healthy)
    def build() -> Subject:
        made = healthy()
        result = edit(made.model)
        made.model = made.model if result is None else result
        return made

    return build
