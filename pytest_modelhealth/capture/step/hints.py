"""Notes on a model's own exception: what to pass instead of a batch that it could not take.

A model may take NumPy arrays, iterators and lists, so that none of them is refused. The exception
passes as it is; where it comes of the kind of value that was passed, it gets a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.engine import Request
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.loss_value import compute_loss
from pytest_modelhealth.capture.step.training_step import is_run_by_training_step
from pytest_modelhealth.errors import InspectionError

_TOO_MANY = re.compile(r"takes .*positional arguments? but (\d+) ")


@contextmanager
def hinted(request: Request) -> Iterator[None]:
    """Add a note to what the model or the loss raises, if what was passed is why."""
    try:
        yield
    except InspectionError:
        raise
    except Exception as error:
        with suppress(Exception):  # values of the user's own, whose attributes may raise anything
            for hint in _hints(request, error):
                error.add_note(hint)
        raise


def _hints(request: Request, error: Exception) -> Iterator[str]:
    arguments = Inputs.of(request.inputs)
    passed = (*arguments.args, *arguments.kwargs.values())
    hints = [_instead(value, "batch") for value in passed if _is_blamed(value, error)]
    if _is_blamed(request.target, error):
        hints.append(_instead(request.target, "target"))
    if _is_raised_by_loss(error):
        hints += [_of_another_dtype(tensor, error) for tensor in find_tensors(request.target)]
    yield from dict.fromkeys(hint for hint in hints if hint)
    too_many = _TOO_MANY.search(str(error)) if isinstance(error, TypeError) else None
    is_spread = isinstance(request.inputs, list | tuple) and not is_run_by_training_step(request)
    if too_many and is_spread and len(passed) > 1:
        yield (
            f"The batch is a {type(request.inputs).__name__} of {len(passed)}, which go in as "
            "positional arguments. Of a pair of inputs and target, the target goes in by itself: "
            "run_inspection(inputs, target=target, loss=...), or run_batches(loader, loss=...)."
        )


def _is_blamed(value: object, error: Exception) -> bool:
    """Whether `error` names the type of `value`, or torch stumbled over it."""
    text = str(error)
    named = type(value).__name__ in text or (type(value).__module__ == "numpy" and "numpy" in text)
    # F.mse_loss(output, array) says no more than "'int' object is not callable".
    return named or (isinstance(error, TypeError | AttributeError) and _is_raised_in_torch(error))


def _is_raised_in_torch(error: Exception) -> bool:
    *_, (innermost, _) = walk_tb(error.__traceback__)
    return str(innermost.f_globals.get("__name__")).partition(".")[0] == "torch"


def _is_raised_by_loss(error: Exception) -> bool:
    """Whether the loss raised it, or the backward pass, in which some losses stumble first."""
    codes = {frame.f_code for frame, _ in walk_tb(error.__traceback__)}
    return not codes.isdisjoint((compute_loss.__code__, torch.autograd.backward.__code__))


def _of_another_dtype(target: Tensor, error: Exception) -> str | None:
    """Return what to pass in place of a target whose dtype `error` objects to."""
    named = set(re.findall(r"[A-Z]\w+|bool", str(error)))
    dtype = target.type().rpartition(".")[2].removesuffix("Tensor")  # "Float", as torch says it
    if not named & {dtype, dtype.lower()}:
        return None
    takes_indices = dtype != "Long" and ("Long" in named or "_index" in str(error))
    if takes_indices:
        return f"The target is of {target.dtype}, and the loss takes class indices: target.long()."
    if target.is_floating_point():
        return None
    return f"The target is of {target.dtype}, and the loss takes floating numbers: target.float()."


def _instead(value: Any, role: str) -> str | None:
    """Return what to pass in place of `value`, if it is nothing that models and losses take."""
    import numpy as np
    from torch.utils.data import DataLoader, Dataset

    if isinstance(value, np.ndarray):
        spelled = f"torch.from_numpy({role})" + (".float()" if value.dtype == np.float64 else "")
        kind = f"{value.dtype}, {'x'.join(map(str, value.shape)) or 'a scalar'}"
        return f"The {role} holds a NumPy array ({kind}); {spelled} makes a tensor of it."
    if isinstance(value, DataLoader):
        return (
            f"The {role} is a DataLoader: run_batches(loader, loss=...) runs its batches; "
            "run_inspection and compare take one: inputs, target = next(iter(loader))."
        )
    if isinstance(value, Dataset):
        return (
            f"The {role} is a data set of samples: run_batches(DataLoader(dataset, batch_size=64), "
            "loss=...) runs batches of them."
        )
    if isinstance(value, Iterator):
        return (
            f"The {role} is an iterator ({type(value).__name__}): run_batches(batches) runs each "
            "batch that it gives; run_inspection and compare take one: next(batches)."
        )
    return None
