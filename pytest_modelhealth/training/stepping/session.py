"""A user's training step, called again and again from the state that it has now."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_modelhealth.capture.passive.hooks import parameters_of
from pytest_modelhealth.capture.passive.step import PassiveWatch
from pytest_modelhealth.capture.step.batch import Inputs, copied_batch, deep_copy
from pytest_modelhealth.capture.step.company import refuse_again_and_again
from pytest_modelhealth.capture.step.guard import Guard, collected_rarely, exited_whole
from pytest_modelhealth.capture.step.state import State
from pytest_modelhealth.capture.step.unregistered import places
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import Selection
from pytest_modelhealth.training.rows import rows_in
from pytest_modelhealth.training.stepping.reached import Reached


class TrainingStep(NamedTuple):
    """What a user gives to be run."""

    model: nn.Module
    # a function ``step(model, optimizer, batch)``, or what one is made of: a trainer, or nothing
    step: Any = None
    # one, or a tuple, list or mapping of several; none where the step moves the parameters itself,
    # or has its own
    optimizer: Any = None
    batch: Any = None  # what a step is given
    restore: Any = ()  # what else a step changes, each with `state_dict` and `load_state_dict`
    inputs: Any = None  # of the usual step, as are target and loss
    target: Any = None
    loss: Any = None
    name: str = "step"  # what the step is called in messages

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers, each by itself."""
        return optimizers_in(self.optimizer)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler that is put back after the step, if one is."""
        kinds = torch.amp.GradScaler
        return next((one for one in self.restore if isinstance(one, kinds)), None)

    def require_sound(self) -> None:
        """Do nothing if all of it is of the right type.

        Raises:
            InspectionError: something is not; the message says what is expected.
        """
        if not callable(self.step):
            raise InspectionError(
                f"the step must be a function step(model, optimizer, batch), not "
                f"{_described(self.step)}"
            )
        if isinstance(self.batch, Iterator):
            raise InspectionError(
                f"batch is {_described(self.batch)}, which no call could be given twice: give one "
                "batch of it, such as next(iterator)"
            )
        for optimizer in self.optimizers:
            # or it wraps one, as sharpness-aware ones and accelerators do
            acts_as_one = hasattr(optimizer, "param_groups") and hasattr(optimizer, "step")
            if not isinstance(optimizer, torch.optim.Optimizer) and not acts_as_one:
                raise InspectionError(
                    "optimizer must be a torch.optim.Optimizer, or a tuple of several, not "
                    f"{_described(optimizer)}"
                )
        if not self.optimizers and self.optimizer is not None:
            raise InspectionError("optimizer is empty: give the optimizer that the step steps")
        for one in self.restore:
            stateful = hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
            if not stateful or isinstance(one, type):
                raise InspectionError(
                    "restore takes objects with state_dict and load_state_dict, such as a scaler, "
                    f"a scheduler or a moving average, not {_described(one)}"
                )
        try:
            signature = inspect.signature(self.step)
        except (TypeError, ValueError):
            return
        try:
            signature.bind(None, None, None)
        except TypeError:
            raise InspectionError(
                f"{self.name}{signature} cannot be called as {self.name}(model, optimizer, batch): "
                "it must take these three; bind what else it needs with functools.partial, or take "
                "it from around the function"
            ) from None


NEEDS_OPTIMIZER = (
    "run_step needs the optimizer that the step steps: run_step(step, optimizer, batch), or "
    "run_step(optimizer=..., inputs=..., loss=...)"
)


def optimizers_in(given: Any) -> list[Any]:
    """Return the optimizers in what was given: one, or a tuple, list or mapping of several."""
    if given is None or isinstance(given, Mapping):
        return list((given or {}).values())
    return list(given) if isinstance(given, tuple | list) else [given]


def name_of(step: Any) -> str:
    """Return what a step is called: a function, a part of one, or an object."""
    step = step.func if isinstance(step, functools.partial) else step
    return str(getattr(step, "__name__", type(step).__name__))


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, Iterator):
        return f"an iterator of type {type(value).__name__}"
    return f"an object of type {type(value).__name__}"


class Session:
    """Calls of a step, each series of them from the state and the random numbers of the first.

    Args:
        given: the step, and what it works on.
        selection: which roles of which layers to observe in the first call.
    """

    def __init__(self, given: TrainingStep, selection: Selection) -> None:
        model = given.model
        _require_values(model)
        refuse_again_and_again(model, reduces=True)
        self.model, self.given = model, given
        self.passive = PassiveWatch(model, selection, given.scaler)
        self.reached = Reached(given.step, (model, *given.optimizers, *given.restore))
        self.guard = Guard(self.reached, values=True, switches=True, stateful=given.restore)
        scalers = [o for o in self.reached.objects if isinstance(o, torch.amp.GradScaler)]
        self.scale = float(scalers[0].get_scale()) if scalers else 1.0
        self.called = 0
        self.reaches_halves = False  # of the batch, by the gradient of the observed call
        held = [p for optimizer in given.optimizers for p in parameters_of(optimizer)]
        kept = State(model).leaves
        leaves = (*model.parameters(), *held, *kept, *self.reached.leaves)
        self.parameters = {id(p): p for p in leaves}
        unknown = {id(leaf) for leaf in kept}.difference(map(id, model.parameters()))
        self.strays = {  # names of leaves in modules that torch does not know to be in the model
            key: ".".join(filter(None, (place.layer, place.path)))
            for key, place in (places(model, unknown) if unknown else {}).items()
            if place.kind == "module"
        }
        self.zeros = {
            id(p) for p in model.parameters() if p.ndim > 1 and p.numel() and not p.detach().any()
        }
        known = {*map(id, (*model.parameters(), *kept))}
        self.outside = {k: n for k, n in self.reached.leaf_names() if k not in known}
        self.trainable = {id(p) for p in model.parameters() if p.requires_grad}
        self.kept = {id(p) for p in model.parameters() if p.grad is not None} - self.trainable
        self.named = [(name, id(p), p) for name, p in model.named_parameters()]
        sizes = {len(tensor) for tensor in rows_in(given.batch)}
        self.samples = sizes.pop() if len(sizes) == 1 else 0
        self.first_statistics = {
            module: mean.clone()
            for module in model.modules()
            if isinstance(mean := getattr(module, "running_mean", None), Tensor)
        }

    @contextmanager
    def open(self) -> Iterator[None]:
        """Put everything back in the end, however it ends.

        Raises:
            InspectionError: the model is being inspected or monitored.
        """
        try:
            self.passive.open()
        except InspectionError as error:
            raise InspectionError(f"run_step watches as a monitor does: {error}") from None
        with exited_whole(closing(self.passive), self.guard, collected_rarely()):
            self.guard.rewind()
            yield

    def call(self, batch: Any = None) -> Any:
        """Call the step once, on a copy of the batch unless another is given."""
        self.called += 1
        batch = copied_batch(self.given.batch) if batch is None else batch
        try:
            return Inputs(self.model, self.given.optimizer, batch).call(self.given.step)
        except AttributeError as error:
            if self.given.optimizer is None and "'NoneType'" in str(error):
                raise InspectionError(f"{NEEDS_OPTIMIZER} ({error})") from error
            raise

    def values(self) -> dict[int, Tensor]:
        """Return copies of the parameters."""
        return {key: p.detach().clone() for key, p in self.parameters.items()}

    def after(self, calls: int, order: list[int] | None = None) -> dict[int, Tensor]:
        """Return the parameters after some calls from the beginning.

        Args:
            calls: how many.
            order: numbers of the samples that the batch has instead of its own.
        """
        self.guard.rewind()
        for _ in range(calls):
            self.call(None if order is None else self.changed_batch(order))
        return self.values()

    def changed_batch(self, order: list[int]) -> Any:
        """Return a copy of the batch whose samples are others of it, by their numbers."""
        batch = deep_copy(self.given.batch)
        for tensor in rows_in(batch):
            tensor.data = tensor.detach()[order].clone()
        return batch


def _require_values(model: nn.Module) -> None:
    """Do nothing if every parameter has values.

    Raises:
        InspectionError: one is made by the first forward, or lies on the meta device.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise InspectionError(
                f"{name} is lazy and has no values before the first forward, which an optimizer "
                "needs as well: run the model once, then make the optimizer"
            )
        if parameter.is_meta:
            raise InspectionError(
                f"{name} lies on the meta device and has no values, so that no step can be run: "
                "load the weights, or model.to_empty(device=...) and initialise them"
            )


def loss_in(result: Any) -> float | None:
    """Return the loss that a step returned; ``None`` where there is no number.

    It is a number or a tensor of one, the entry ``loss`` of a mapping or an attribute of this name,
    or the sum of the numbers in a tuple, list or mapping.
    """
    if isinstance(result, Mapping):
        result = result["loss"] if "loss" in result else [*result.values()]
    elif not isinstance(result, Tensor):
        result = getattr(result, "loss", result)
    if isinstance(result, tuple | list):
        numbers = [loss_in(value) for value in result]
        known = [number for number in numbers if number is not None]
        return math.fsum(known) if known and len(known) == len(numbers) else None
    if isinstance(result, Tensor):
        return float(result.detach()) if result.numel() == 1 and not result.is_complex() else None
    is_number = hasattr(result, "__float__") and not isinstance(result, bool)
    return float(result) if is_number and getattr(result, "shape", ()) == () else None
