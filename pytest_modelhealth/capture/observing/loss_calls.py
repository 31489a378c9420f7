"""Sees the calls of torch's loss functions and tells what they were given.

Of large arguments a sample is looked at, beside the statistics of all.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_modelhealth.capture.observing.autograd_graph import Origin, are_cosines, origin
from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.observing.tensors import Reader, is_a, noted
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import ClassTargets, LossCall, Option
from pytest_modelhealth.statistics import Entry

LOSS_FUNCTIONS: dict[Callable[..., Any], str] = {
    getattr(F, name): name
    for name in dir(F)
    if name.endswith(("_loss", "cross_entropy", "_with_logits", "kl_div"))
    and name != "linear_cross_entropy"  # which takes the layer's input and weight
}
"""torch's loss functions; those in `torch.nn` call them."""

_PLAIN = frozenset({bool, int, float, str})
_MOST_ROWS = 64
_MOST_VALUES = 1 << 16
_SHORTEST_SEQUENCE = 4

Read = Callable[[Any], Entry | None]
"""Returns where the statistics of a tensor are to be had, if there are any."""


class LossCalls:
    """The calls of loss functions in one run."""

    def __init__(self, reader: Reader, errors: list[str]) -> None:
        self.seen: list[LossCall] = []  # in order
        self._reader = reader
        self._errors = errors

    def add(
        self,
        layer: Layer | None,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        value: Any,
    ) -> None:
        """Take what a loss function was given and gave; it was called by `layer`, if by any."""
        function = LOSS_FUNCTIONS[call]
        with noted(self._errors, f"loss {function}: "), torch._C.DisableTorchFunction():
            name, reader = None if layer is None else layer.name, self._reader
            seen = see_loss(
                call, args, kwargs, value, layer=name, samples=reader.samples, read=reader.of_loss
            )
            self.seen.append(seen)


def see_loss(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    value: Any,
    *,
    layer: str | None,
    samples: int,
    read: Read,
) -> LossCall:
    """Look at one call of a loss function from the forward of `layer`; `read` reads statistics."""
    function = LOSS_FUNCTIONS[call]
    names = _parameter_names(call)
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    values: Any = given.get(names[0])
    target: Any = given.get("target", given.get("targets", given.get(names[1])))
    options: dict[str, Option] = {n: v for n, v in given.items() if type(v) in _PLAIN}
    options |= {name: True for name in ("weight", "pos_weight") if is_a(given.get(name), Tensor)}
    dimension = _class_dimension(function, values)
    made_by = origin(values) if is_a(values, Tensor) else Origin()
    input_, target_, value_ = (
        None if one is None else one.statistics for one in (read(values), read(target), read(value))
    )
    rows = targets = None
    with torch.no_grad():
        # of a DTensor this rank may have a part of each row alone
        is_whole = input_ is not None and not hasattr(values, "to_local")
        if dimension is not None and is_whole and values.shape[dimension] > 1:
            rows = _sample(values, dimension)
        is_class = function in having("classes") and target_ is not None
        if is_class and not target.is_floating_point() and target.numel():
            targets = _see_targets(target, int(given.get("ignore_index", -100)), samples)
    probabilities: dict[str, Any] = {}
    if rows is not None and input_ is not None and not input_.nan_count:
        # a copy in this process's memory; NumPy takes a microsecond where torch takes three
        numbers = rows.cpu().double().numpy()
        probabilities = {
            "rows": _kind(numbers, torch.finfo(values.dtype).eps),
            "log_normalizer": float(np.median(np.abs(_log_normalizers(numbers)))),
        }
    return LossCall(
        function=function,
        layer=layer,
        input=input_,
        target=target_,
        value=None if value_ is None else value_.mean_of_all,
        options=options,
        classes=0 if dimension is None else values.shape[dimension],
        made_by=made_by.function,
        made_along=made_by.dimension,
        clamped=made_by.clamped,
        cosines=isinstance(values, Tensor) and are_cosines(values),
        targets=targets,
        **probabilities,
    )


@cache
def _parameter_names(call: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(call).parameters)


def _class_dimension(function: str, values: Any) -> int | None:
    """Return where the classes lie in the input; ``None`` where there are none."""
    if not is_a(values, Tensor) or not values.ndim:
        return None
    if function in having("classes"):
        return 1 if values.ndim > 1 else 0
    return values.ndim - 1 if function in having("log_probabilities") else None


def _sample(values: Tensor, dimension: int) -> Tensor | None:
    """Return copies of some rows along `dimension`, evenly spread: of a few, all.

    It asks nothing of the device that the tensor is on.
    """
    moved = values.detach().movedim(dimension, -1)
    length, count = moved.shape[-1], math.prod(moved.shape[:-1])
    if not count or not length:
        return None
    wanted = min(count, _MOST_ROWS, max(2, _MOST_VALUES // length))
    at = torch.arange(wanted, device=values.device) * count // wanted
    index = []
    for size in reversed(moved.shape[:-1]):
        index.append(at % size)
        at = at // size
    return moved[tuple(reversed(index))] if index else moved[None]


def _log_normalizers(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the logarithm of what the exponentials of each row sum to."""
    top = rows.max(-1)
    with np.errstate(all="ignore"):
        top = np.where(np.isfinite(top), top, 0.0)
        logarithms: npt.NDArray[np.float64] = top + np.log(np.exp(rows - top[:, None]).sum(-1))
    return logarithms


def _kind(rows: npt.NDArray[np.float64], eps: float) -> str:
    """Return what every row is: ``"probabilities"``, ``"log_probabilities"`` or ``""``."""
    tolerance = max(1e-4, 16 * eps)
    if (rows >= 0).all():
        return "probabilities" if (np.abs(rows.sum(-1) - 1) <= tolerance).all() else ""
    if (rows <= tolerance).all():
        # Rounding moves the normaliser by eps / 2 times the row's entropy at most; eight times
        # that, for what was computed in few bits. Logits near zero are off by the logarithm.
        limit = max(8e-4, 4 * eps * (1.0 + math.log(rows.shape[-1])))
        return "log_probabilities" if (np.abs(_log_normalizers(rows)) <= limit).all() else ""
    return ""


def _see_targets(target: Tensor, ignored: int, samples: int) -> ClassTargets:
    """Look at class indices, some of which are to be ignored."""
    is_ignored, count = target == ignored, target.numel()
    layouts, tail, share, only = list[npt.NDArray[Any]](), None, 0.0, None
    if samples > 1 and count % samples == 0 and count // samples >= _SHORTEST_SEQUENCE:
        sequences = _sample(target.reshape(samples, -1), 1)
        steps = _sample(target.reshape(-1, samples), 0)  # where time comes first
        layouts = [rows.cpu().numpy() for rows in (sequences, steps) if rows is not None]
        tail, share = _constant_tail(layouts[0])
    left_out = int(is_ignored.sum())
    if left_out < count:
        least, most = map(int, target[~is_ignored].aminmax())
        only = least if least == most else None
    skips = 0 < 2 * left_out < count and (count == samples or bool(layouts))
    skips &= all(_has_gaps(rows == ignored) for rows in layouts)
    return ClassTargets(count, left_out, tail, share, only, skips)


def _constant_tail(sequences: npt.NDArray[Any]) -> tuple[int | None, float]:
    """Return the index that sequences end in, repeated like padding, and their share."""
    ends, counts = np.unique(sequences[:, -1], return_counts=True)
    last = ends[counts.argmax()]
    run = np.cumprod(sequences[:, ::-1] == last, axis=1).sum(1)
    run = run[run >= 2]
    if len(run) < 2:
        return None, 0.0
    return int(last), float(run.sum()) / sequences.size


def _has_gaps(ignored: npt.NDArray[np.bool_]) -> bool:
    """Whether sequences are ignored in their midst, and not at their ends alone.

    Without the last step, where a target that was rolled has its first one.
    """
    ignored = ignored[:, :-1]
    ends = np.cumprod(ignored, 1) + np.cumprod(ignored[:, ::-1], 1)[:, ::-1]
    return bool((ignored & (ends == 0)).any())
