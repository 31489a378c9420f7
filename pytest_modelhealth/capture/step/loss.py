"""What is differentiated: the user's loss, the model's own, a projection, or several tasks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.observing.tensors import LossScale, find_tensors, is_a
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report import TaskGradients, TaskPair

_PROJECTION_SEED = 20_240_229


def compute_loss(output: Any, target: Any, loss: Any) -> Tensor | None:
    """Return the scalar to differentiate, or ``None`` where the output has no number to project.

    Several losses by name are added up.

    Raises:
        InspectionError: the loss cannot be called, is not a scalar tensor, has no graph although
            the output has one, or a target stands without a loss.
    """
    if loss is None:
        if target is not None:
            raise InspectionError(
                "a target was given without a loss: pass loss=..., for example "
                "loss=torch.nn.functional.cross_entropy"
            )
        return _own_loss(output)
    if isinstance(loss, type) and nn.Module in loss.__mro__:
        name = loss.__name__
        raise InspectionError(f"loss is the class {name}: give an instance, {name}()")
    if isinstance(loss, Mapping):
        loss = TaskLosses(loss)
    if not callable(loss):
        raise InspectionError(
            f"loss is {loss!r} and cannot be called: give a function loss(output, target), for "
            "example torch.nn.functional.cross_entropy"
        )
    return _called(loss, *((output,) if target is None else (output, target)))


def _called(loss: Callable[..., Any], *of: Any, what: str = "the loss") -> Tensor:
    """Return what a loss of the user's gives: the one place that calls one."""
    value = loss(*of)
    validate_loss(value, of[0], what)
    return value.reshape(()) if value.ndim else value  # type: ignore[no-any-return]


def no_loss(output: Any) -> Tensor:
    """A loss that asks nothing of the output."""
    return torch.zeros((), requires_grad=torch.is_grad_enabled())


def validate_loss(value: object, output: Any, what: str = "the loss") -> None:
    """Do nothing if `value` is a real scalar tensor, with a graph where `output` has one.

    Raises:
        InspectionError: it is not; the message calls it `what`.
    """
    if not is_a(value, Tensor):
        raise InspectionError(
            f"{what} returned {type(value).__name__}, not a tensor: return the tensor itself, "
            "without .item() or float()"
        )
    if value.numel() != 1:
        raise InspectionError(
            f"{what} has shape {tuple(value.shape)}, not a scalar: reduce it, for example with "
            ".mean()"
        )
    if value.is_complex():
        raise InspectionError(
            f"{what} is complex: return a real one, for example its .abs() or .real"
        )
    if (
        not value.requires_grad
        and torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in find_tensors(output))
    ):
        raise InspectionError(
            f"{what} has no graph although what it comes from has one: it was computed from a "
            "detached copy (.detach(), .data, .numpy(), .argmax() or torch.no_grad())"
        )


def _own_loss(output: Any) -> Tensor | None:
    candidates = [output]
    with suppress(Exception):  # the user's own, and it was we who asked for a loss
        is_mapping = issubclass(type(output), Mapping)
        named = output.get("loss") if is_mapping else getattr(output, "loss", None)
        candidates.insert(0, named)
    for candidate in candidates:
        if is_a(candidate, Tensor) and candidate.numel() == 1 and _is_real(candidate):
            return candidate.reshape(()) if candidate.ndim else candidate
    # The floating outputs times fixed random weights, summed. A plain sum has no gradient through
    # softmax and LayerNorm, whose outputs sum to a constant. The weights make the gradient with
    # respect to each output tensor about 1 in L2 norm, whatever its size, so that gradient norms
    # mean the same on every model.
    generator = torch.Generator().manual_seed(_PROJECTION_SEED)
    terms = []
    for tensor in find_tensors(output):
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if not (_is_real(tensor) and tensor.numel()):
            continue
        if tensor.is_nested:
            tensor = tensor.values()
        weights = torch.randn(tensor.shape, generator=generator, device="cpu", dtype=torch.float32)
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        weights = (weights / math.sqrt(tensor.numel())).to(tensor.device, dtype)
        terms.append((tensor.to(dtype) * weights).sum())
    if not terms:
        return None
    device = terms[0].device
    return torch.stack([term.to(device, torch.float32) for term in terms]).sum()


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not tensor.is_meta


def may_need_target(loss: Callable[..., Any]) -> bool:
    """Whether a loss does not say that it needs no target, by the name of that parameter: ``_``."""
    with suppress(TypeError, ValueError):  # of a builtin
        names = list(inspect.signature(loss).parameters)
        return not (len(names) > 1 and names[1].startswith("_"))
    return True


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
        targets = {name: self._own(name, *target) for name in self._losses}
        self.values = {
            name: _called(loss, output, *targets[name], what=f"the loss of task {name!r}")
            for name, loss in self._losses.items()
        }
        first, *others = (self.values[name] for name in self._losses)
        return sum(others, first)

    def _own(self, name: str, *target: Any) -> tuple[Any, ...]:
        """Return the target of one task."""
        if not target or not issubclass(type(target[0]), Mapping):
            return target
        if name in target[0]:
            return (target[0][name],)
        if any(other in target[0] for other in self._losses):
            raise InspectionError(
                f"the target has no value for task {name!r}, and has for others: it is handed out "
                f"by name; it holds {', '.join(map(repr, target[0]))}"
            )
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
                found: tuple[Tensor | None, ...] = torch.autograd.grad(
                    scale.apply(value), tensors, retain_graph=True, allow_unused=True
                )
            except RuntimeError as error:
                cause = str(error).partition("\n")[0]
                return (), [f"no gradients by task: autograd.grad cannot run here: {cause}"]
            pairs = [(*one, gradient) for one, gradient in zip(trained, found, strict=True)]
            reached = {layer.name for layer, _, gradient in pairs if gradient is not None}
            if not reached:
                raise InspectionError(
                    f"task {name!r} gives no parameter a gradient: its loss does not depend on "
                    "what the model learns"
                )
            layers = by_task.setdefault(name, {})
            for layer, parameter, gradient in pairs:
                if layer.name in reached:
                    g = torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
                    layers.setdefault(layer.name, []).append(scale.unscale(g))
        tasks = []
        for name, layers in by_task.items():
            angles = tuple(
                TaskPair(other, {lyr: _cosine(layers[lyr], theirs[lyr]) for lyr in common})
                for first, other in combinations(by_task, 2)
                if first == name and (theirs := by_task[other])
                if (common := [layer for layer in layers if layer in theirs])
            )
            norms = {layer: math.sqrt(_dot(g, g)) for layer, g in layers.items()}
            tasks.append(TaskGradients(name, float(self.values[name].detach()), norms, angles))
        # two tasks that pull a shared layer in opposite directions
        notes = [
            f"tasks {task.name!r} and {pair.other!r} pull against each other on {layer!r}: the "
            f"cosine of their gradients is {cosine:.2f}"
            for task in tasks
            for pair in task.pairs
            for layer, cosine in [min(pair.cosines.items(), key=lambda item: item[1])]
            if cosine <= _OPPOSED
        ]
        return tuple(tasks), notes


def _dot(a: list[Tensor], b: list[Tensor]) -> float:
    return math.fsum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))


def _cosine(a: list[Tensor], b: list[Tensor]) -> float:
    """Return the cosine of the angle between two gradients; 0 where one is zero."""
    norms = math.sqrt(_dot(a, a) * _dot(b, b))
    return _dot(a, b) / norms if norms else 0.0
