"""Notes on a model's own exception: what to pass instead of a batch that it could not take.

A model may take NumPy arrays, iterators and lists, so that none of them is refused. The exception
passes as it is; where it comes of the kind of value that was passed, it gets a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pytest_modelhealth.capture.engine import Request
from pytest_modelhealth.capture.step.batch import Inputs
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
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    name = "" if traceback is None else str(traceback.tb_frame.f_globals.get("__name__"))
    return name.partition(".")[0] == "torch"


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
