"""How a batch goes into a model, and what to pass where it cannot.

A model may take NumPy arrays, iterators and lists, so that none of them is refused. The exception
passes as it is; where it comes of the kind of value that was passed, it gets a note.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.engine import Request
from pytest_modelhealth.capture.observing.tensors import find_tensors, is_a
from pytest_modelhealth.capture.step.loss import compute_loss
from pytest_modelhealth.errors import InspectionError


class Inputs:
    """Positional and keyword arguments of one call: ``Inputs(x, mask=mask)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        return f"Inputs({len(self.args)} positional, keywords {sorted(self.kwargs)})"

    @classmethod
    def of(cls, batch: Any) -> Inputs:
        """Return how `batch` goes in.

        A mapping goes in as keywords, a tuple or list as positionals, `Inputs` as it is, anything
        else as the one argument. A named tuple is a tuple.
        """
        if is_a(batch, cls):
            return batch
        if issubclass(type(batch), Mapping):
            return cls(**{str(name): value for name, value in batch.items()})
        if is_a(batch, tuple) or is_a(batch, list):
            return cls(*batch)
        return cls(batch)

    def call(self, model: Callable[..., Any]) -> Any:
        """Return what a model, or a step, gives for them: the one place that calls the user's."""
        return model(*self.args, **self.kwargs)


def batch_size(tensors: Iterable[Tensor]) -> int:
    """Return how many samples a batch of these tensors has: the first that has a dimension 0."""
    return next((len(t) for t in tensors if t.ndim and not t.is_nested), 0)


def copied_batch(batch: Any) -> Any:
    """Return a deep copy of a batch; the batch itself where it cannot be copied."""
    try:
        return deep_copy(batch)
    except Exception:  # noqa: BLE001 - an object of the user's
        return batch


def deep_copy(batch: Any) -> Any:
    """Return a deep copy of a batch, in which tensors that have a graph are cut off from it.

    Raises:
        Exception: whatever an object of the user's raises where it is copied.
    """
    copies = {
        id(t): t.detach().clone().requires_grad_(t.requires_grad)
        for t in find_tensors(batch)
        # of sparse and nested ones torch cannot make a deep copy of all
        if not t.is_leaf or t.layout is not torch.strided or t.is_nested
    }
    return copy.deepcopy(batch, copies)


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
    # by the loss, or by the backward pass, in which some losses stumble first
    codes = {frame.f_code for frame, _ in walk_tb(error.__traceback__)}
    if not codes.isdisjoint((compute_loss.__code__, torch.autograd.backward.__code__)):
        hints += [_of_another_dtype(tensor, error) for tensor in find_tensors(request.target)]
    yield from dict.fromkeys(hint for hint in hints if hint)
    too_many = re.search(r"takes .*positional arguments? but (\d+) ", str(error))
    is_spread = isinstance(request.inputs, list | tuple)
    if isinstance(error, TypeError) and too_many and is_spread and len(passed) > 1:
        yield (
            f"The batch is a {type(request.inputs).__name__} of {len(passed)}, which go in as "
            "positional arguments. Of a pair of inputs and target, the target goes in by itself: "
            "run_inspection(inputs, target=target, loss=...), or run_batches(loader, loss=...)."
        )


def _is_blamed(value: object, error: Exception) -> bool:
    """Whether `error` names the type of `value`, or torch stumbled over it."""
    text = str(error)
    if type(value).__name__ in text or (type(value).__module__ == "numpy" and "numpy" in text):
        return True
    # F.mse_loss(output, array) says no more than "'int' object is not callable".
    *_, (innermost, _) = walk_tb(error.__traceback__)
    is_torchs = str(innermost.f_globals.get("__name__")).partition(".")[0] == "torch"
    return isinstance(error, TypeError | AttributeError) and is_torchs


def _of_another_dtype(target: Tensor, error: Exception) -> str | None:
    """Return what to pass in place of a target whose dtype `error` objects to."""
    named = set(re.findall(r"[A-Z]\w+|bool", str(error)))
    dtype = target.type().rpartition(".")[2].removesuffix("Tensor")  # "Float", as torch says it
    if not named & {dtype, dtype.lower()}:
        return None
    remedy = "" if target.is_floating_point() else "floating numbers: target.float()"
    if dtype != "Long" and ("Long" in named or "_index" in str(error)):
        remedy = "class indices: target.long()"
    return remedy and f"The target is of {target.dtype}, and the loss takes {remedy}."


def _instead(value: Any, role: str) -> str | None:
    """Return what to pass in place of `value`, if it is nothing that models and losses take."""
    import numpy as np
    from torch.utils.data import DataLoader, Dataset

    if isinstance(value, np.ndarray):
        spelled = f"torch.from_numpy({role})" + (".float()" if value.dtype == np.float64 else "")
        kind = f"{value.dtype}, {'x'.join(map(str, value.shape)) or 'a scalar'}"
        return f"The {role} holds a NumPy array ({kind}); {spelled} makes a tensor of it."
    loader = "DataLoader(dataset, batch_size=64), loss=..."
    kinds: tuple[tuple[type, str, str, str], ...] = (
        (DataLoader, "a DataLoader", "loader, loss=...", "inputs, target = next(iter(loader))"),
        (Dataset, "a data set of samples", loader, "a batch of samples"),
        (Iterator, f"an iterator ({type(value).__name__})", "batches", "next(batches)"),
    )
    for class_, what, batches, one in kinds:
        if isinstance(value, class_):
            return (
                f"The {role} is {what}: run_batches({batches}) runs its batches; run_inspection "
                f"and compare take one: {one}."
            )
    return None
