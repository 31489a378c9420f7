"""Several named losses on one output: their sum, and what each asks of the shared layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.observing.scaling import LossScale
from pytest_modelhealth.capture.step.loss_value import validate_loss
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report import TaskGradients, TaskPair

_OPPOSED = -0.9


class TaskLosses:
    """A loss that is the sum of named ones, in their order.

    Args:
        losses: ``loss(output, target)`` by name; ``loss(output)`` where there is no target. A
            target that is a mapping with a value for each name is handed out by name.

    Raises:
        InspectionError: `losses` is empty, or one of them cannot be called.
    """

    def __init__(self, losses: Mapping[str, Any]) -> None:
        if not losses:
            raise InspectionError(
                "loss={} names no loss: pass loss={'detect': f, 'segment': g}, or one function"
            )
        for name, loss in losses.items():
            if not callable(loss):
                raise InspectionError(
                    f"the loss of task {name!r} is of type {type(loss).__name__} and cannot be "
                    "called: give a function loss(output, target)"
                )
        self._losses = {str(name): loss for name, loss in losses.items()}
        self.values: dict[str, Tensor] = {}

    def __call__(self, output: Any, *target: Any) -> Tensor:
        """Return the sum, as ``first + second + ...`` gives it, and keep each for its gradient."""
        self._validate_target(*target)
        total: Tensor | None = None
        for name, loss in self._losses.items():
            value = loss(output, *self._own(name, *target))
            validate_loss(value, output, f"the loss of task {name!r}")
            self.values[name] = value.reshape(()) if value.ndim else value
            total = self.values[name] if total is None else total + self.values[name]
        assert total is not None
        return total

    def _validate_target(self, *target: Any) -> None:
        if not target or not issubclass(type(target[0]), Mapping):
            return
        missing = [name for name in self._losses if name not in target[0]]
        if missing and len(missing) < len(self._losses):
            raise InspectionError(
                f"the target has no value for task {missing[0]!r}, and has for others: it is "
                f"handed out by name; it holds {', '.join(map(repr, target[0]))}"
            )

    def _own(self, name: str, *target: Any) -> tuple[Any, ...]:
        if target and issubclass(type(target[0]), Mapping) and name in target[0]:
            return (target[0][name],)
        return target

    def gradients(
        self, parameters: Iterable[tuple[Layer, str, Tensor]], scale: LossScale
    ) -> tuple[tuple[TaskGradients, ...], list[str]]:
        """Return what each task asks of each layer, and what a reader should know of it.

        One backward pass a task, on the graph that the pass of the sum uses afterwards; ``.grad``
        is not touched.

        Raises:
            InspectionError: a task gives no parameter a gradient.
        """
        trained = [(layer, p) for layer, _, p in parameters if p.requires_grad]
        tensors = [parameter for _, parameter in trained]
        by_task: dict[str, dict[str, list[Tensor]]] = {}
        for name, value in self.values.items():
            try:
                found = torch.autograd.grad(
                    scale.apply(value), tensors, retain_graph=True, allow_unused=True
                )
            except RuntimeError as error:
                cause = str(error).partition("\n")[0]
                return (), [f"no gradients by task: autograd.grad cannot run here: {cause}"]
            by_task[name] = _by_layer(trained, found, scale)
            if not by_task[name]:
                raise InspectionError(
                    f"task {name!r} gives no parameter a gradient: its loss does not depend on "
                    "what the model learns"
                )
        return self._compared(by_task), []

    def _compared(self, by_task: dict[str, dict[str, list[Tensor]]]) -> tuple[TaskGradients, ...]:
        tasks = []
        for name, layers in by_task.items():
            pairs = tuple(
                TaskPair(other, {lyr: _cosine(layers[lyr], theirs[lyr]) for lyr in common})
                for first, other in combinations(by_task, 2)
                if first == name and (theirs := by_task[other])
                if (common := [layer for layer in layers if layer in theirs])
            )
            norms = {layer: math.sqrt(_dot(g, g)) for layer, g in layers.items()}
            tasks.append(TaskGradients(name, float(self.values[name].detach()), norms, pairs))
        return tuple(tasks)


def _by_layer(
    trained: list[tuple[Layer, Tensor]], gradients: Iterable[Tensor | None], scale: LossScale
) -> dict[str, list[Tensor]]:
    """Return the gradients that there are, by layer; those of a tensor without one are left out."""
    found: dict[str, list[Tensor]] = {}
    pairs = [(layer, p, g) for (layer, p), g in zip(trained, gradients, strict=True)]
    reached = {layer.name for layer, _, gradient in pairs if gradient is not None}
    for layer, parameter, gradient in pairs:
        if layer.name in reached:
            values = torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
            found.setdefault(layer.name, []).append(scale.unscale(values))
    return found


def _dot(a: list[Tensor], b: list[Tensor]) -> float:
    return math.fsum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))


def _cosine(a: list[Tensor], b: list[Tensor]) -> float:
    """Return the cosine of the angle between two gradients; 0 where one is zero."""
    norms = math.sqrt(_dot(a, a) * _dot(b, b))
    return _dot(a, b) / norms if norms else 0.0


def conflicts(tasks: Iterable[TaskGradients]) -> list[str]:
    """Return a note for each pair of tasks that pull a shared layer in opposite directions."""
    return [
        f"tasks {task.name!r} and {pair.other!r} pull against each other on {layer!r}: the cosine "
        f"of their gradients is {cosine:.2f}"
        for task in tasks
        for pair in task.pairs
        for layer, cosine in [min(pair.cosines.items(), key=lambda item: item[1])]
        if cosine <= _OPPOSED
    ]
