"""Runs a model in training or in evaluation mode, and puts each module's own mode back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from pytest_modelhealth.capture.deployed.model import DeployedModel
from pytest_modelhealth.capture.step.interruption import exited_whole
from pytest_modelhealth.capture.step.memory import Memory
from pytest_modelhealth.capture.step.state import State
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import type_name


@contextmanager
def in_mode(model: Any, training: bool | None) -> Iterator[None]:
    """Have `model` be in a mode inside; ``None`` leaves it in its own.

    A `train` of the user's own is called, as it may keep parts frozen; what it changes, values of
    parameters among them, is put back.

    Raises:
        InspectionError: the model has no modes.
    """
    if training is None:
        yield
        return
    is_module = isinstance(model, nn.Module) and not isinstance(model, DeployedModel)
    if not is_module or not hasattr(model, "training"):  # exported, or run by another runtime
        raise InspectionError(_ONE_MODE.format(type_name(model)))
    with exited_whole(_put_back(model)):
        try:
            model.train(training)
        except NotImplementedError:  # the module of an exported program
            raise InspectionError(_ONE_MODE.format(type_name(model))) from None
        yield


_ONE_MODE = (
    "{} is in the mode it was made in, for good: leave training out, or inspect the model that it "
    "was made of"
)


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    state = State(model)
    modes = [(module, module.training) for module in model.modules() if hasattr(module, "training")]
    required = [(leaf, leaf.requires_grad) for leaf in state.leaves]
    with ExitStack() as stack:
        stack.callback(_set_modes, modes)
        stack.callback(_set_required, required)
        stack.callback(state.restore_containers)
        if any(map(_has_own_train, state.modules)):
            stack.callback(Memory([*state.leaves, *state.tensors]).restore)
        yield


def _has_own_train(module: nn.Module) -> bool:
    """Whether `train` or `eval` of a module is not that of torch."""
    return any(
        not getattr(getattr(type(module), name), "__module__", "").startswith("torch.")
        for name in ("train", "eval")
    )


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        if module.training != training:
            module.training = training  # of a script, which keeps it in C++


def _set_required(required: list[tuple[Tensor, bool]]) -> None:
    for leaf, requires_grad in required:
        if leaf.requires_grad != requires_grad:
            leaf.requires_grad = requires_grad
