"""The seam between a model of any kind and what is seen of it.

A kind of model is a subclass of `Engine`, one of `KINDS` of its file, which `_engines` names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from pytest_modelhealth.capture.observing.layer import Held
from pytest_modelhealth.capture.observing.sample_statistics import Visitor
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import Selection
from pytest_modelhealth.report import Observation
from pytest_modelhealth.wings import has_wing, why_missing, wing

Loss = Callable[..., Any] | Mapping[str, Callable[..., Any]]
Backward = bool | Callable[[Tensor], Any] | None


@dataclass(frozen=True)
class Request:
    """What is asked of an engine."""

    model: Any
    # a mapping goes in as keywords, a tuple or list as positionals, `Inputs` as both, anything else
    # as the one argument
    inputs: Any
    target: Any = None  # the second argument of the loss; None calls loss(output)
    # None takes the model's own, a scalar output, or a fixed random projection; a mapping of named
    # losses is summed, and each is differentiated by itself as well
    loss: Loss | None = None
    # None runs it where a gradient path exists, True demands it, False leaves it out, and a
    # function runs it in the user's way
    backward: Backward = None
    # a torch.amp.GradScaler: the backward pass runs on the loss it scales, and gradients are
    # reported without the scale
    scaler: Any = None
    selection: Selection = field(default_factory=Selection)
    visitor: Visitor | None = None
    # is given the gradients of parameters after a backward pass that succeeded, and returns those
    # to report: their mean over the ranks that share the batch out
    averager: Callable[[list[Held]], list[Held]] | None = None


class Engine(ABC):
    """Runs one batch through a model of its kind and tells what was seen."""

    # whether torch computes what is seen, so that a model can be perturbed and differentiated
    runs_in_torch: ClassVar[bool] = True
    # whether it returns tensors in a row, however the model nested them
    flat_outputs: ClassVar[bool] = False
    # which files are read from disk where a path is given for a model
    files: ClassVar[str] = ""
    # whether it runs compiled code, which only a comparison does
    compiled: ClassVar[bool] = False
    # whether functions that a forward calls, such as `F.relu`, are seen as layers
    shows_functions: ClassVar[bool] = True
    # why `measure` cannot run models of this kind, and what can; empty where it does
    why_not_measured: ClassVar[str] = ""

    @abstractmethod
    def supports(self, model: object) -> bool:
        """Whether `model` is of this kind."""

    def load(self, model: Any) -> Any:
        """Return what is run of a model of this kind: itself, unless it lies in a file, say.

        Raises:
            InspectionError: it cannot be loaded.
        """
        return model

    def module(self, model: Any) -> nn.Module:
        """Return the module that has the layers of `model`: itself, unless a kind says otherwise.

        Raises:
            InspectionError: its layers are out of reach.
        """
        return model  # type: ignore[no-any-return]

    @abstractmethod
    def run(self, request: Request) -> Observation:
        """Run the batch forward and backward, and leave the model as it was, bit for bit.

        Raises:
            InspectionError: the request cannot be carried out on this model.
            Exception: whatever the user's model or loss raises, untouched.
        """

    def measure(self, request: Request) -> Observation:
        """Run the batch as `run` does, and measure what that costs, in place of statistics.

        Raises:
            InspectionError: that is not possible for this kind of model, with the reason.
            Exception: whatever the user's model or loss raises, untouched.
        """
        raise InspectionError(self.why_not_measured)


@cache
def _engines(left_python: bool = True) -> tuple[Engine, ...]:
    """Return the engines that may run a model, special kinds before plain modules."""
    homes = ["capture.eager:KINDS"]
    if left_python and has_wing("capture.deployed"):
        homes = ["capture.deployed:KINDS", *homes]
    return tuple(kind() for home in homes for kind in wing(home))


def _has_left_python(model: object) -> bool:
    """Whether a model may be one that another runtime runs; only then are its kinds loaded."""
    if type(model).__module__.startswith(f"{__package__}.deployed"):
        return True
    graphs = (torch.jit.ScriptModule, fx.GraphModule)
    return isinstance(model, graphs) or not isinstance(model, nn.Module)


def find_engine(model: object) -> Engine:
    """Return the engine for this kind of model; compiled modules run uncompiled.

    Raises:
        InspectionError: none fits; the message says what a model must be.
    """
    for engine in _engines(_has_left_python(model)):
        if engine.supports(model):
            return engine
    missing = why_missing("capture.deployed")
    raise InspectionError(
        f"cannot inspect {_describe(model)}: the model must be a torch.nn.Module, a "
        f"torch.export.ExportedProgram or an ONNX model.{_hint(model)}"
        f"{f' A model that left Python is no module: {missing}.' if missing else ''}"
    )


def _hint(model: object) -> str:
    if isinstance(model, type):
        return " Pass an instance: Model(), not Model."
    if isinstance(model, str | Path):
        files = ", ".join(filter(None, (engine.files for engine in _engines())))
        return f" Load it first: what is read from disk is {files}."
    if isinstance(model, Iterable) and not isinstance(model, str | Mapping):
        return " A batch goes into the next call: inspector(model).run_inspection(batch)."
    homes = [kind.__module__ for kind in type(model).mro()]
    if any(home.startswith("torch.distributed.pipelining") for home in homes):
        return (
            " Inspect a stage of a pipeline as the module that it is, schedule._stage.submod, with "
            "a batch of its own, or the model before it was split."
        )
    if isinstance(getattr(model, "__self__", None), nn.Module):
        return " Pass the module itself, not a method of it."
    if callable(model):
        return (
            " Wrap it in a module: keep the layers that it calls as attributes, set in __init__, "
            "and call it in forward(self, ...)."
        )
    return ""


def _describe(model: object) -> str:
    if isinstance(model, type):
        return f"the class {model.__name__}"
    if isinstance(model, str | Path):
        return f"the path {str(model)!r}"
    return f"an object of type {type(model).__name__}"
