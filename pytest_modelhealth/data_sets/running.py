"""Runs a model over the batches of a user's, in a mode, and merges what is seen of each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.step.bare import in_mode
from pytest_modelhealth.errors import InspectionError, ModelHealthWarning
from pytest_modelhealth.progress import track
from pytest_modelhealth.report import Extreme, Observation, Part


def require_batches(batches: object, method: str, most: int | None = None) -> None:
    """Do nothing if these may be batches; warn of rows of a tensor.

    Raises:
        InspectionError: they are none; the message says what makes some.
    """
    if not (most is None or (type(most) is int and most >= 0)):
        raise InspectionError(f"max_batches must be a whole number from 0 on, not {most!r}")
    if isinstance(batches, str | Mapping) or not isinstance(batches, Iterable):
        raise InspectionError(
            "batches must be batches to iterate over, such as DataLoader(dataset, batch_size=64), "
            f"not a {type(batches).__name__}; one batch goes into run_inspection"
        )
    if isinstance(batches, Tensor):
        shape = "x".join(map(str, batches.shape))
        warnings.warn(
            f"{method} takes each row of the tensor {shape} for a batch; run_inspection takes the "
            f"tensor as one batch, and {method}(x.unbind()) says that rows are meant",
            ModelHealthWarning,
            stacklevel=4,  # after the method and the check of its arguments
        )


def pair(batch: Any, name: str, why: str) -> tuple[Any, Any]:
    """Return inputs and target of a batch; `why` says what needs the target.

    Raises:
        InspectionError: it is no pair; the message calls it by its `name`.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise InspectionError(
        f"{name} is a {type(batch).__name__}, not a pair (inputs, target), but {why}"
    )


@contextmanager
def noted(name: str, method: str) -> Iterator[None]:
    """Note on what is raised inside which batch of which method it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This was {name}, counted from 0, of {method}.")
        raise


@contextmanager
def opened(batches: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """Give what iterates over batches once, and end it, unless it is the user's own iterator.

    An exception keeps the frames of a loader alive, and with them its worker processes.
    """
    iterator = iter(batches)
    try:
        yield iterator
    finally:
        if iterator is not batches and isinstance(iterator, Generator):
            iterator.close()
        workers: Any = iterator if isinstance(iterator, _MultiProcessingDataLoaderIter) else None
        if workers is not None and not workers._persistent_workers:  # those stay for another run
            workers._shutdown_workers()


def run_over(
    batches: Any,
    model: Any,
    has_loss: bool,
    request: Callable[[Any, Any], Request],
    observe: Callable[[Request], Observation],
    probes: Callable[[Request], Any],
    *,
    training: bool | None = None,
    max_batches: int | None = None,
    progress: bool | None = None,
) -> Observation:
    """Run a model over batches, and return what was seen of all.

    Args:
        batches: the user's.
        model: the model.
        has_loss: whether a loss needs a target.
        request: makes what is asked of the engine, of inputs and target of a batch.
        observe: runs it.
        probes: returns what probes a batch after its run; ``None`` where nothing does.
        training, max_batches, progress: as in `Inspector.run_batches`.

    Raises:
        InspectionError: there was none, or one is not as it must be.
        Exception: whatever loader, model or loss raise, untouched.
    """
    merged: Observation | None = None
    index = -1
    with in_mode(model, training), opened(batches) as iterator:
        for index, batch in enumerate(
            track(iterator, "inspecting batches", most=max_batches, shown=progress)
        ):
            with noted(f"batch {index}", "run_batches"):
                inputs, target = pair(batch, f"batch {index}", _LOSS) if has_loss else (batch, None)
                asked = request(inputs, target)
                probing = probes(asked) if index == 0 else None
                seen = with_places(observe(asked))
                seen = seen if probing is None else probing.after(seen)
            merged = seen if merged is None else merged.merge(seen)
    if merged is None:
        raise InspectionError(
            "there was no batch to run: batches is empty, an iterator that is used up, or a "
            "loader with drop_last of fewer samples than a batch; or max_batches=0"
        )
    part = _part(batches, index + 1) if index + 1 == max_batches else None
    return replace(merged, part=part)


def with_places(seen: Observation) -> Observation:
    """Return what was seen of a batch, with where the largest values and the first NaN stood.

    It is the first batch of those it is merged with, so all places are in batch 0.
    """
    layers = {}
    for name, record in seen.layers.items():
        largest, nonfinite = {}, {}
        for role in ("activations", "gradients", *["inputs"] * (not name)):
            found = record.statistics(role)
            if found is not None and found.abs_max > 0.0:
                value = found.max if found.max >= -found.min else found.min
                largest[role] = Extreme(value, 0)
            if found is not None and found.nan_count + found.positive_inf_count:
                index = found.first_nonfinite
                sample = index[0] if index and found.shape[:1] == (seen.samples,) else None
                value = math.nan if found.nan_count else math.inf
                nonfinite[role] = Extreme(value, 0, sample, index)
        layers[name] = replace(record, largest=largest, nonfinite=nonfinite)
    return replace(seen, layers=layers)


def _part(batches: Any, seen: int) -> Part | None:
    """Return which part of the batches was seen; ``None`` where it was all of them."""
    try:  # an iterator that was begun does not say how many there are
        whole = None if isinstance(batches, Iterator) else len(batches)
    except Exception:  # noqa: BLE001 - a loader of the user's
        whole = None
    is_all = whole is not None and whole <= seen
    return None if is_all else Part(seen, whole, f"max_batches={seen}")


_LOSS = (
    "a loss needs the target. One batch goes into run_inspection(inputs, target=..., loss=...); "
    "without a target leave loss out or bind it beforehand"
)
