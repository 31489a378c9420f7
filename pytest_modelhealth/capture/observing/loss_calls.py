"""Sees the calls of torch's loss functions and tells what they were given.

Of large arguments a sample is looked at, beside the statistics of all. Nothing waits for a device:
what was taken is worked out when somebody asks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

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

Read = Callable[[Any], Entry | None]
"""Returns where the statistics of a tensor are to be had, if there are any."""


@dataclass(frozen=True)
class SeenLoss:
    """One call of a loss function: samples of what it was given, and what else is known of it."""

    call: LossCall  # what is known at once
    input: Entry | None
    target: Entry | None
    value: Entry | None
    rows: Tensor | None  # rows of classes in the input, shape (rows, classes)
    columns: Tensor | None  # its columns over all samples of the batch, shape (columns, samples)
    eps: float  # of the dtype of the input
    targets: _Targets | None  # what there is of class indices

    def settled(self) -> LossCall:
        """Return all of it as plain data; of what is on another device this waits for that."""
        given = None if self.input is None else self.input.statistics
        has_nan = given is None or given.nan_count > 0
        rows = {} if has_nan else _rows(self.rows, self.columns, self.eps)
        return replace(
            self.call,
            input=given,
            target=None if self.target is None else self.target.statistics,
            value=None if self.value is None else self.value.statistics.mean_of_all,
            targets=None if self.targets is None else self.targets.settled(),
            **rows,
        )


class LossCalls:
    """The calls of loss functions in one run."""

    def __init__(self, reader: Reader, errors: list[str]) -> None:
        self.settled: list[LossCall] = []  # what is known of them, in order
        self._reader = reader
        self._errors = errors
        self._waiting: list[SeenLoss] = []

    def add(
        self,
        layer: Layer | None,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        value: Any,
    ) -> None:
        """Take what a loss function was given and gave; it was called by `layer`, if by any."""
        with noted(self._errors, f"loss {LOSS_FUNCTIONS[call]}: "), torch._C.DisableTorchFunction():
            name, reader = None if layer is None else layer.name, self._reader
            samples, read = reader.samples, reader.of_loss
            seen = see_loss(call, args, kwargs, value, layer=name, samples=samples, read=read)
            self._waiting.append(seen)
            waits = isinstance(value, Tensor) and self._reader.ledger.queues(value)
            if not waits or len(self._waiting) > _MOST_WAITING:
                self.settle()

    def settle(self) -> None:
        """Work out what was seen."""
        seen, self._waiting = self._waiting, []
        for loss in seen:
            with noted(self._errors, f"loss {loss.call.function}: "):
                self.settled.append(loss.settled())


_MOST_WAITING = 64
"""Of calls on another device so many wait, as the samples taken of them need memory."""


def see_loss(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    value: Any,
    *,
    layer: str | None,
    samples: int,
    read: Read,
) -> SeenLoss:
    """Return what one call of a loss function, from the forward of `layer`, was given and gave."""
    function = LOSS_FUNCTIONS[call]
    names = _parameter_names(call)
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    values: Any = given.get(names[0])
    target: Any = given.get("target", given.get("targets", given.get(names[1])))
    options: dict[str, Option] = {n: v for n, v in given.items() if type(v) in _PLAIN}
    options |= {name: True for name in ("weight", "pos_weight") if is_a(given.get(name), Tensor)}
    dimension = _class_dimension(function, values)
    made_by = origin(values) if is_a(values, Tensor) else Origin()
    entry, target_entry = read(values), read(target)
    rows = columns = targets = None
    with torch.no_grad():
        # of a DTensor this rank may have a part of each row alone
        is_whole = entry is not None and not hasattr(values, "to_local")
        if dimension is not None and is_whole and values.shape[dimension] > 1:
            rows = _sample(values, dimension)
            if dimension != 0 and values.shape[0] == samples > 1:
                columns = _sample(values, 0)
        if target_entry is not None:
            targets = _targets(function, target, given, samples)
    return SeenLoss(
        LossCall(
            function=function,
            layer=layer,
            input=None,
            target=None,
            options=options,
            classes=0 if dimension is None else values.shape[dimension],
            made_by=made_by.function,
            made_along=made_by.dimension,
            clamped=made_by.clamped,
            cosines=isinstance(values, Tensor) and are_cosines(values),
        ),
        entry,
        target_entry,
        read(value),
        rows,
        columns,
        torch.finfo(values.dtype).eps if rows is not None else 0.0,
        targets,
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
    if function in having("log_probabilities"):
        return values.ndim - 1
    return None


def _sample(values: Tensor, dimension: int) -> Tensor | None:
    """Return copies of some rows along `dimension`, evenly spread: of a few, all.

    It asks nothing of the device that the tensor is on.
    """
    moved = values.detach().movedim(dimension, -1)
    length = moved.shape[-1]
    count = math.prod(moved.shape[:-1])
    if not count or not length:
        return None
    wanted = min(count, _MOST_ROWS, max(2, _MOST_VALUES // length))
    at = torch.arange(wanted, device=values.device) * count // wanted
    index = []
    for size in reversed(moved.shape[:-1]):
        index.append(at % size)
        at = at // size
    return moved[tuple(reversed(index))] if index else moved[None]


def _rows(rows: Tensor | None, columns: Tensor | None, eps: float) -> dict[str, Any]:
    """Tell whether the input holds probabilities, log-probabilities or neither."""
    if rows is None:
        return {}
    values = _float64(rows)
    kind = _kind(values, eps)
    return {
        "rows": kind,
        "over_batch": not kind and columns is not None and _kind(_float64(columns), eps) != "",
        "log_normalizer": float(np.median(np.abs(_log_normalizers(values)))),
    }


def _float64(values: Tensor) -> npt.NDArray[np.float64]:
    """Return a copy in this process's memory; NumPy takes a microsecond where torch takes three."""
    return values.cpu().double().numpy()


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


class _Targets(NamedTuple):
    """Class indices that a loss was given."""

    total: int
    ignored: Tensor  # how many of them are to be ignored
    ends: Tensor  # the least and the largest of the others
    sequences: Tensor | None  # those of some samples, shape (sequences, length)

    def settled(self) -> ClassTargets:
        """Count them."""
        tail, share = None, 0.0
        if self.sequences is not None:
            tail, share = _constant_tail(self.sequences.cpu().numpy())
        ignored = int(self.ignored.cpu().numpy().item())
        least, most = self.ends.cpu().numpy().tolist()
        only = int(least) if least == most and ignored < self.total else None
        return ClassTargets(self.total, ignored, tail, share, only)


def _targets(
    function: str, target: Tensor, given: Mapping[str, Any], samples: int
) -> _Targets | None:
    """Return what there is of class indices; ``None`` where the target is none of them."""
    if function not in having("classes"):
        return None
    if target.is_floating_point() or not target.numel():
        return None
    is_ignored = target == int(given.get("ignore_index", -100))
    info = torch.iinfo(target.dtype)  # to find both ends waits for no device
    least = target.masked_fill(is_ignored, info.max).amin()
    ends = torch.stack([least, target.masked_fill(is_ignored, info.min).amax()])
    count, sequences = target.numel(), None
    if samples > 1 and count % samples == 0 and count // samples >= _SHORTEST_SEQUENCE:
        sequences = _sample(target.reshape(samples, -1), 1)
    return _Targets(count, is_ignored.sum(), ends, sequences)


_SHORTEST_SEQUENCE = 4


def _constant_tail(sequences: npt.NDArray[Any]) -> tuple[int | None, float]:
    """Return the index that sequences end in, repeated like padding, and their share."""
    ends, counts = np.unique(sequences[:, -1], return_counts=True)
    last = ends[counts.argmax()]
    run = np.cumprod(sequences[:, ::-1] == last, axis=1).sum(1)
    run = run[run >= 2]
    if len(run) < 2:
        return None, 0.0
    return int(last), float(run.sum()) / sequences.size
