"""What `make` returns, a model and what it is run on, and how users name what makes one."""

from __future__ import annotations

import operator
import random
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs, copied_batch
from pytest_modelhealth.capture.step.guard import Guard
from pytest_modelhealth.errors import InspectionError, SettingsError, suggest
from pytest_modelhealth.plugin.suite.suite import TODO, ModelHealthSuite, arguments_of, required
from pytest_modelhealth.rendering.notation import abbreviate


def named(spelled: str, folder: Path) -> Any:
    """Return what a user names; modules of `folder` are found, too.

    Raises:
        SettingsError: it cannot be imported; the message has the nearest name, or the traceback.
    """
    module_name, _, attribute = spelled.partition(":")
    if not all(map(str.isidentifier, (*module_name.split("."), *attribute.split(".")))):
        raise SettingsError(
            f"name a module and what in it makes the model, such as package.module:Model, not "
            f"{spelled!r}"
        )
    if str(folder) not in sys.path:  # as `python -m pytest` has it
        sys.path.insert(0, str(folder))
    try:
        __import__(module_name)
        module = sys.modules[module_name]
    except Exception as error:  # noqa: BLE001 - the user's module
        missing = (error.name if isinstance(error, ModuleNotFoundError) else None) or ""
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise SettingsError(
                f"there is no module {missing!r} in {folder} or on sys.path: name it as import "
                "does, in the folder that your tests run in"
            ) from None
        shown = [one for one in traceback.format_exception(error)[1:] if "importlib" not in one]
        raise SettingsError(f"importing {module_name} raises\n{''.join(shown[1:])}") from None
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError:
        known = [name for name in dir(module) if not name.startswith("_")]
        raise SettingsError(
            f"{module_name} has no {attribute!r}{suggest(attribute, known)}"
        ) from None


@dataclass(frozen=True)
class Made:
    """A model with what it is run on.

    Args:
        model: the model.
        inputs: the batch.
        target: what the loss compares the output with; ``None`` where there is none.
        loss: the loss; ``None`` takes the model's own, or a fixed projection.
    """

    model: nn.Module
    inputs: Any
    target: Any = None
    loss: Any = None

    @property
    def batch(self) -> dict[str, Any]:
        """The batch as a run takes it, copied: a forward may write to its own."""
        return {
            "inputs": copied_batch(self.inputs),
            "target": copied_batch(self.target),
            "loss": self.loss,
        }

    @property
    def described(self) -> str:
        """The tensors of the batch, for people."""
        given = Inputs.of(self.inputs)
        tensors = find_tensors((given.args, given.kwargs))
        listed = [f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in tensors]
        return ", ".join(listed) or abbreviate(repr(self.inputs), 60)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from a fixed seed inside, and go on as before afterwards."""
    with Guard():
        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        yield


def made_by(suite: ModelHealthSuite, name: str, seed: int) -> Made:
    """Return what a suite makes under `seed`.

    Raises:
        InspectionError: it makes something else, needs arguments, or has no batch yet.
        Exception: whatever the user's function raises, untouched.
    """
    with seeded(seed):
        made = _as_made(suite.make, name)
        model = made.model
        if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
            inputs, was = Inputs.of(copied_batch(made.inputs)), model.training
            with torch.no_grad():  # as a user does before the optimizer is made
                inputs.call(model.eval())
            model.train(was)
    return made


def _as_made(make: Any, name: str) -> Made:
    """Return what a function of the user's makes.

    Raises:
        InspectionError: it is no model with a batch; the message says what to write.
    """
    if needed := [p.name for p in required(make)]:
        raise InspectionError(
            f"{name} needs arguments ({', '.join(needed)}), and is called without any: give them "
            "defaults"
        )
    unwritten = f"{name} has no batch yet: write it below {TODO!r}, in place of each ..."
    try:
        made: Any = make()
    except TypeError as error:
        if "ellipsis" in str(error):  # that a model was given in the place of a size
            raise InspectionError(unwritten) from error
        raise
    model, *rest = made if isinstance(made, tuple) and made else (made,)
    if not isinstance(model, nn.Module) or len(rest) not in (0, 1, 3):
        what = f"a tuple of {len(made)}" if rest else f"a {type(model).__name__}"
        what = "None" if made is None else what
        raise InspectionError(
            f"{name} returned {what}: return (model, inputs), or (model, inputs, target, loss)"
        )
    if any(one is ... or (isinstance(one, dict) and ... in one.values()) for one in rest):
        raise InspectionError(unwritten)
    if not rest:
        raise InspectionError(model_alone(name, type(model)))
    target, loss = rest[1:] or (None, None)
    losses = list(loss.values()) if isinstance(loss, Mapping) else [loss]  # one for each task
    if loss is not None and (not losses or not all(map(callable, losses))):
        raise InspectionError(
            f"{name} returned something of type {type(loss).__name__} as the loss, which is the "
            "last of (model, inputs, target, loss): give a function loss(output, target)"
        )
    return Made(model, rest[0], None if loss is None else target, loss)


def model_alone(name: str, kind: type[nn.Module]) -> str:
    """Return the message on a model that comes without a batch, with the function to write."""
    return (
        f"{name} makes a model alone, and no batch to run it on: return "
        "(model, inputs), or (model, inputs, target, loss), such as\n"
        "    def make():\n"
        f"        model = {kind.__name__}({arguments_of(kind)})\n"
        "        return model, torch.randn(16, 8), torch.randint(3, (16,)), F.cross_entropy"
    )
