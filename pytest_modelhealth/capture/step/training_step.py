"""The `training_step` of a `LightningModule`, in the place of its forward and without a trainer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from pytest_modelhealth.capture.engine import Request
from pytest_modelhealth.capture.observing.tensors import is_a
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.loss_value import validate_loss
from pytest_modelhealth.errors import InspectionError

LIGHTNING_MODULES = tuple(
    f"{package}.core.module" for package in ("lightning.pytorch", "pytorch_lightning")
)
"""Where `LightningModule` is defined."""


def is_lightning(model: object) -> bool:
    """Whether `model` is a `LightningModule`; the library is not imported."""
    return any(kind.__module__ in LIGHTNING_MODULES for kind in type(model).__mro__)


def is_own(module: object, method: str) -> bool:
    """Whether a `LightningModule` defines a method itself."""
    found = getattr(type(module), method, None)
    return found is not None and found.__module__ not in LIGHTNING_MODULES


def is_run_by_training_step(request: Request) -> bool:
    """Whether what is inspected is the `training_step` of the model, and not its forward.

    It is where the batch came alone, as Lightning gives it. Where optimization is manual, that step
    would train.
    """
    model = request.model
    return (
        request.by_training_step
        and request.loss is None
        and request.target is None
        and is_lightning(model)
        and is_own(model, "training_step")
        and bool(model.automatic_optimization)
    )


def loss_in(output: Any) -> Any:
    """Return the loss in what a `training_step` returned: itself, or what is under ``"loss"``."""
    return output.get("loss") if isinstance(output, Mapping) else output


def arguments_of(module: Any, batch: Any, number: int = 0) -> Inputs:
    """Return how a batch goes into the `training_step` of a module; `Inputs` go in as they are."""
    if is_a(batch, Inputs):
        return batch
    parameters = inspect.signature(module.training_step).parameters.values()
    takes_number = len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return Inputs(batch, number) if takes_number else Inputs(batch)


@contextmanager
def run_by_training_step(request: Request, *, with_outputs: bool = False) -> Iterator[Request]:
    """Have a call of the model run its `training_step`, which logs nothing meanwhile.

    A call inside of that, ``self(inputs)``, runs the forward. A copy that is made of the model
    meanwhile does the same by itself.

    Args:
        request: what is inspected.
        with_outputs: whether the call returns what such calls of the forward returned, too.

    Yields:
        The request with the arguments of that call.
    """
    module = request.model
    attributes = vars(module)
    if isinstance(attributes.get("forward"), _TrainingStep):
        yield request
        return
    parts = [part for part in module.modules() if is_lightning(part)]
    before = [(vars(part), _silenced(vars(part))) for part in parts]
    before.append((attributes, {"forward": attributes.get("forward", _MISSING)}))
    try:
        attributes["forward"] = _TrainingStep(module, with_outputs)
        yield replace(request, inputs=arguments_of(module, request.inputs))
    finally:
        for held, saved in reversed(before):
            _put_back(held, saved)


_MISSING = object()


def log_nothing(*_: Any, **__: Any) -> None:
    """Stand in the place of `LightningModule.log`, which asks for the trainer."""


def _silenced(attributes: dict[str, Any]) -> dict[str, Any]:
    """Let a module log nothing; return what it had in those places."""
    before = {name: attributes.get(name, _MISSING) for name in ("log", "log_dict")}
    attributes.update(dict.fromkeys(before, log_nothing))
    return before


def _put_back(attributes: dict[str, Any], saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        if value is _MISSING:
            attributes.pop(name, None)
        else:
            attributes[name] = value


class _TrainingStep:
    """Runs the `training_step` of a module where its forward is called.

    Args:
        module: the module, whose attribute this is.
        with_outputs: whether to return what the forward returned meanwhile, beside the loss.
    """

    def __init__(self, module: nn.Module, with_outputs: bool) -> None:
        self._module: Any = module
        self._forward = vars(module).get("forward")  # the user may have set another
        self._with_outputs = with_outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what it returns, which must hold a loss."""
        module, attributes = self._module, vars(self._module)
        forward = self._forward or partial(type(module).forward, module)
        outputs: list[Any] = []

        def run_forward(*args: Any, **kwargs: Any) -> Any:
            outputs.append(forward(*args, **kwargs))
            return outputs[-1]

        attributes["forward"] = run_forward
        try:
            output = module.training_step(*args, **kwargs)
        finally:
            attributes["forward"] = self
        _require_loss(module, output)
        if not self._with_outputs:
            return output
        return {"loss": loss_in(output), "returned": output, "outputs": outputs}


def _require_loss(module: nn.Module, output: Any) -> None:
    """Do nothing if a `training_step` returned a loss that can be differentiated.

    Raises:
        InspectionError: it did not.
    """
    loss, name = loss_in(output), f"training_step of {type(module).__name__}"
    if loss is None:
        what = "a mapping without 'loss'" if output is not None else "None"
        raise InspectionError(
            f"{name} returned {what}, so there is no loss to inspect: return the loss or "
            "{'loss': loss}, or give one, run_inspection(inputs, target=..., loss=...)"
        )
    validate_loss(loss, None, name)
    learns = any(parameter.requires_grad for parameter in module.parameters())
    if learns and torch.is_grad_enabled() and not loss.requires_grad:
        raise InspectionError(
            f"the loss that {name} returned has no graph: it was computed from a detached copy "
            "(.detach(), .data, .numpy(), .argmax() or torch.no_grad())"
        )
