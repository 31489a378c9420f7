"""Reads which class each sample of a batch is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report import Label

By = str | Callable[[Any, Any], Any]
"""``"target"``, or a function of a batch's inputs and target."""

MOST_CLASSES = 1000
"""More than this are not kept apart: each has statistics of its own of every layer."""

_WHOLE = frozenset(
    {torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
    | {torch.uint16, torch.uint32, torch.uint64}
)


def require_by(by: object) -> None:
    """Do nothing if `by` is one of the ways to say the class of a sample.

    Raises:
        InspectionError: it is not.
    """
    if by is None or by == "target" or callable(by):
        return
    raise InspectionError(
        f"by must be 'target' or a function by(inputs, target) that returns the class of each "
        f"sample, not {by!r}"
    )


def read_labels(by: By, inputs: Any, target: Any, samples: int, batch: int) -> list[Label]:
    """Return the class of each sample of a batch.

    Args:
        by: who says it.
        inputs, target: the batch.
        samples: how many samples it has.
        batch: its number, for messages.

    Raises:
        InspectionError: that are no classes, or not one a sample; the message says what to write.
        Exception: whatever a function of the user's raises, untouched.
    """
    if callable(by):
        labels, said = by(inputs, target), f"by(...) of batch {batch}"
    else:
        labels, said = target, f"the target of batch {batch}"
        if labels is None:
            raise InspectionError(
                f"batch {batch} has no target to split by; by=lambda inputs, target: ... takes the "
                "class from the inputs"
            )
    found = _read(labels, said)
    if len(found) != samples:
        raise InspectionError(
            f"{said} has {len(found)} labels for {samples} samples; give one class a sample: "
            f"{_LAMBDA}"
        )
    return found


def require_few(classes: int, batch: int) -> None:
    """Do nothing if so many classes can be kept apart.

    Raises:
        InspectionError: there are too many.
    """
    if classes > MOST_CLASSES:
        raise InspectionError(
            f"up to batch {batch} there are {classes:,} classes, and at most {MOST_CLASSES:,} are "
            "kept apart, as each has statistics of every layer; group them: "
            "by=lambda inputs, target: target // 100"
        )


_LAMBDA = "by=lambda inputs, target: ..."


def class_of_each(target: Any, samples: int) -> list[Label] | None:
    """Return the class of each sample where a target holds such, ``None`` where it does not."""
    is_one = isinstance(target, Tensor) and target.shape == (samples,) and target.dtype in _WHOLE
    return target.tolist() if is_one else None


def _read(labels: Any, said: str) -> list[Label]:
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "biufc":
        labels = torch.from_numpy(labels)
    if isinstance(labels, Tensor):
        return _of_tensor(labels, said)
    if isinstance(labels, Mapping):
        first = next(iter(labels), "name")
        raise InspectionError(
            f"{said} is a mapping of {', '.join(map(repr, list(labels)[:3])) or 'nothing'}; say "
            f"which of it is the class: by=lambda inputs, target: target[{first!r}]"
        )
    if isinstance(labels, str) or not isinstance(labels, Sequence | np.ndarray):
        does = "returned" if said.startswith("by") else "is"
        raise InspectionError(
            f"{said} {does} {type(labels).__name__}, not one class a sample: a tensor of integers "
            f"or booleans, or a list of integers or strings; {_LAMBDA}"
        )
    return [_of_item(item, said) for item in labels]


def _of_item(item: Any, said: str) -> Label:
    if isinstance(item, Tensor | np.generic) and item.ndim == 0:
        item = item.item()
    if isinstance(item, bool | int | str):
        return item
    raise InspectionError(
        f"{said} holds a {type(item).__name__}, and a class is an integer, a boolean or a string; "
        f"{_LAMBDA}"
    )


def _of_tensor(labels: Tensor, said: str) -> list[Label]:
    shape = "x".join(map(str, labels.shape)) or "a scalar"
    kind = str(labels.dtype).removeprefix("torch.")
    if labels.ndim == 1 and labels.dtype in _WHOLE:
        found: list[Label] = labels.tolist()
        return found
    what = f"{said} is no class a sample, which has the shape (samples,): it is {shape}, {kind}"
    raise InspectionError(f"{what}. {_next_move(labels)}")


def _next_move(labels: Tensor) -> str:
    """Return what such labels may be, and how to make classes of them."""
    is_whole, has_one = labels.dtype in _WHOLE, labels.ndim == 2 and labels.shape[1] == 1
    if labels.ndim == 1:
        return (
            "Numbers with a fraction are no classes: by=lambda inputs, target: target.long(), or "
            "target > 0.5"
        )
    if has_one:
        squeezed = "target.squeeze(1)" + ("" if is_whole else ".long()")
        return f"Take the dimension off: by=lambda inputs, target: {squeezed}"
    if labels.ndim == 2 and is_whole:
        return (
            "Of several labels a sample, choose one: by=lambda inputs, target: target[:, 0]; or "
            "the class that counts most, target.argmax(1)"
        )
    if labels.ndim == 2:
        return "Of soft targets, take the likeliest: by=lambda inputs, target: target.argmax(1)"
    return (
        "Of a class for each pixel or token, take the commonest: "
        "by=lambda inputs, target: target.flatten(1).mode(1).values"
    )
