"""Watches a loss of the user's being computed: what it depends on, and how."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.autograd_graph import loss_path
from pytest_modelhealth.capture.observing.function_mode import ASKS_FOR_FORM
from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.observing.tensors import find_tensors, is_a
from pytest_modelhealth.report import LossPath

Shape = tuple[int, ...]

_ARITHMETIC = frozenset(
    name for stem in ("add", "sub", "mul", "div") for name in (stem, f"__{stem}__", f"__r{stem}__")
) | {"rsub", "subtract", "multiply", "divide", "true_divide", "__truediv__", "__rtruediv__"}


class LossWatch:
    """What is learnt while the loss runs; nothing it does changes a value.

    Args:
        output: what the model returned.
        target: what the loss compares it with.
        loss: the loss; it says that it needs no target by the name of that parameter, ``_``.
    """

    def __init__(self, output: Any, target: Any, loss: Callable[..., Any]) -> None:
        outputs, targets = list(find_tensors(output)), list(find_tensors(target))
        with torch._C.DisableTorchFunction():
            self._ends = [tensor.grad_fn for tensor in outputs]
            self._shapes = [_shape(tensor) for tensor in outputs if tensor.requires_grad]
            self._target_shapes = [_shape(tensor) for tensor in targets]
        self._targets = {id(tensor) for tensor in targets}
        needed = targets and not _leaves_target_out(loss)
        self.uses_target: bool | None = False if needed else None
        self.widened: tuple[Shape, Shape] | None = None

    @contextmanager
    def watching(self, hooks: Hooks) -> Iterator[None]:
        """See the calls made inside; an error of ours must not reach the user's loss."""

        def see(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            try:
                self.see(call, args, kwargs)
            except Exception as error:  # noqa: BLE001 - ours
                hooks.recorder.errors.append(f"loss: {type(error).__name__}: {error}")

        hooks.functions.onlooker = see
        try:
            yield
        finally:
            hooks.functions.onlooker = None

    def see(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take one call of any function of torch."""
        with torch._C.DisableTorchFunction():
            name = getattr(call, "__name__", "")
            if self.uses_target is False and name not in ASKS_FOR_FORM:
                given = find_tensors((args, kwargs))
                self.uses_target = any(id(tensor) in self._targets for tensor in given)
            if name in _ARITHMETIC and len(args) == 2 and self.widened is None:
                self._see_arithmetic(*args)

    def _see_arithmetic(self, a: Any, b: Any) -> None:
        """Note (N, 1) against (N,), one from the output and one from the target."""
        if not (is_a(a, Tensor) and is_a(b, Tensor)):
            return
        made, given = (a, b) if a.requires_grad else (b, a)
        if given.requires_grad or not made.requires_grad:
            return
        shapes = _shape(made), _shape(given)
        known = shapes[0] in self._shapes and shapes[1] in self._target_shapes
        if known and widens(*shapes) and not self._is_meant(made):
            self.widened = shapes

    def _is_meant(self, made: Tensor) -> bool:
        """Whether the loss itself added a dimension to the output: it compares all pairs."""
        return "unsqueeze" in loss_path(made, self._ends).operations

    def path(self, loss: Tensor) -> LossPath:
        """Return how `loss` was computed."""
        with torch._C.DisableTorchFunction():
            found = loss_path(loss, self._ends)
        return replace(found, uses_target=self.uses_target, widened=self.widened)


def _leaves_target_out(loss: Callable[..., Any]) -> bool:
    try:
        names = list(inspect.signature(loss).parameters)
    except (TypeError, ValueError):  # a builtin
        return False
    return len(names) > 1 and names[1].startswith("_")


def widens(a: Shape, b: Shape) -> bool:
    """Whether broadcasting the two gives more elements than either has."""
    try:
        together = torch.broadcast_shapes(a, b).numel()
    except RuntimeError:
        return False
    return bool(together > max(torch.Size(a).numel(), torch.Size(b).numel()))


def _shape(tensor: Tensor) -> Shape:
    return () if tensor.is_nested else tuple(tensor.shape)
