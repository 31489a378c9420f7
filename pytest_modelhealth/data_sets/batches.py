"""Iterates over the batches of a user's, and leaves no worker of a loader behind."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import length_hint
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from pytest_modelhealth.errors import InspectionError, ModelHealthWarning
from pytest_modelhealth.progress import track
from pytest_modelhealth.report import Part


def require_batches(batches: object, method: str, name: str = "batches") -> None:
    """Do nothing if these may be batches; warn of rows of a tensor.

    Args:
        batches: what was given.
        method: the method it was given to.
        name: the argument it was given as.

    Raises:
        InspectionError: they are none; the message says what makes some.
    """
    if isinstance(batches, Dataset) and not isinstance(batches, Iterable):
        raise InspectionError(
            f"{name} is a data set of samples ({type(batches).__name__}); "
            "DataLoader(dataset, batch_size=64) makes batches of them"
        )
    if isinstance(batches, str | Mapping) or not isinstance(batches, Iterable):
        raise InspectionError(
            f"{name} must be batches to iterate over, such as a DataLoader, not "
            f"{_described(batches)}; one batch goes into run_inspection"
        )
    if isinstance(batches, Tensor):
        shape = "x".join(map(str, batches.shape))
        warnings.warn(
            f"{method} takes each row of the tensor {shape} for a batch; run_inspection takes the "
            f"tensor as one batch, and {method}(x.unbind()) says that rows are meant",
            ModelHealthWarning,
            stacklevel=4,  # after the method and the check of its arguments
        )


def require_how_many(max_batches: object, progress: object) -> None:
    """Do nothing if these say how many batches to take, and whether to show how far a run is.

    Raises:
        InspectionError: one is of a wrong type.
    """
    if not (max_batches is None or (type(max_batches) is int and max_batches >= 0)):
        raise InspectionError(f"max_batches must be a whole number from 0 on, not {max_batches!r}")
    if not isinstance(progress, bool | None):
        raise InspectionError(f"progress must be True, False or None, not {progress!r}")


def _described(batches: object) -> str:
    if isinstance(batches, Mapping):
        return f"a mapping of {', '.join(map(repr, list(batches)[:3])) or 'nothing'}"
    return repr(batches)


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


class Batches:
    """The batches of a run, until the last one or a limit.

    Args:
        batches: the user's.
        most: stop after so many; ``None`` for all.
        seconds: stop after the batch that passes these; ``None`` for no limit.
        progress: as in `Inspector.run_batches`.
        agreed: returns whether time is up for all ranks that run together, of whether it is here.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        most: int | None,
        seconds: float | None,
        progress: bool | None,
        agreed: Callable[[bool], bool] = bool,
    ) -> None:
        self._batches, self._most, self._seconds = batches, most, seconds
        self._progress, self._agreed = progress, agreed
        self._seen = 0
        self._ended_by = ""

    def __iter__(self) -> Iterator[Any]:
        start = time.monotonic()
        with opened(self._batches) as counted:
            for batch in track(
                counted, "inspecting batches", most=self._most, shown=self._progress
            ):
                self._seen += 1
                yield batch
                if self._seconds is None:
                    continue
                if self._agreed(time.monotonic() - start >= self._seconds):
                    self._ended_by = f"max_seconds={self._seconds}"
                    return
        if self._seen == self._most:
            self._ended_by = f"max_batches={self._most}"

    @property
    def part(self) -> Part | None:
        """Which part of the batches was seen; ``None`` where it was all of them."""
        if not self._ended_by:
            return None
        whole = self._length()
        if whole is not None and whole <= self._seen:
            return None
        return Part(self._seen, whole, self._ended_by)

    def _length(self) -> int | None:
        """Return how many there are; an iterator that was begun does not say."""
        if isinstance(self._batches, Iterator):
            return None
        try:
            return len(self._batches)  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001 - a loader of the user's
            return None


class _Counted:
    """An iterator, and what it iterates over, which may know how many there are."""

    def __init__(self, iterator: Iterator[Any], batches: Iterable[Any]) -> None:
        self._iterator, self._batches = iterator, batches

    def __iter__(self) -> Iterator[Any]:
        return self._iterator

    def __length_hint__(self) -> int:
        return length_hint(self._batches)


@contextmanager
def opened(batches: Iterable[Any]) -> Iterator[Iterable[Any]]:
    """Give what iterates over batches once, and end it, unless it is the user's own iterator.

    An exception keeps the frames of a loader alive, and with them its worker processes.
    """
    iterator = iter(batches)
    try:
        yield _Counted(iterator, batches)
    finally:
        if iterator is not batches:
            _end(iterator)


def _end(iterator: Iterator[Any]) -> None:
    if isinstance(iterator, Generator):
        iterator.close()
    workers: Any = iterator if isinstance(iterator, _MultiProcessingDataLoaderIter) else None
    if workers is not None and not workers._persistent_workers:  # those stay for the next iteration
        workers._shutdown_workers()
