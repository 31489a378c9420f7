"""Where the numbers of a monitor go: a `SummaryWriter` of TensorBoard, or a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.statistics import TensorStatistics
from pytest_modelhealth.training.libraries import is_of


class Function:
    """Calls ``function(step, numbers)``."""

    takes_histograms = False

    def __init__(self, destination: Callable[[int, dict[str, float]], object]) -> None:
        self._destination = destination

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step by their names."""
        self._destination(step, dict(numbers))

    def write_histograms(self, step: int, histograms: Mapping[str, TensorStatistics]) -> None:
        """Write what was seen of tensors; nothing, as a function gets numbers alone."""

    def __str__(self) -> str:
        return str(getattr(self._destination, "__name__", type(self._destination).__name__))


class TensorBoard(Function):
    """Adds scalars, and histograms, to a `SummaryWriter` of torch or of tensorboardX."""

    takes_histograms = True
    _destination: Any

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add a scalar for each number."""
        for name, value in numbers.items():
            self._destination.add_scalar(name, value, step)

    def write_histograms(self, step: int, histograms: Mapping[str, TensorStatistics]) -> None:
        """Add the counts that were kept of each tensor, in bins by powers of two."""
        for name, seen in histograms.items():
            counts, edges = seen.histogram
            self._destination.add_histogram_raw(
                name,
                min=seen.min,
                max=seen.max,
                num=seen.finite_count,
                sum=seen.mean * seen.finite_count,
                sum_squares=seen.norm**2,
                bucket_limits=edges[1:].tolist(),
                bucket_counts=counts.tolist(),
                global_step=step,
            )


def writers_of(to: Any) -> list[Function]:
    """Return what writes to a destination, or to several in a list or tuple.

    Raises:
        InspectionError: something is no destination.
    """
    if to is None:
        return []
    return [_writer(one) for one in (to if isinstance(to, list | tuple) else [to])]


def _writer(destination: Any) -> Function:
    is_tensorboard = is_of(destination, "torch.utils.tensorboard", "tensorboardX")
    if is_tensorboard and hasattr(destination, "add_scalar"):
        return TensorBoard(destination)
    if callable(destination) and not isinstance(destination, type):
        return Function(destination)
    raise InspectionError(
        f"to={destination!r} ({type(destination).__name__}) is nothing that numbers can be "
        "written to. Give a SummaryWriter of TensorBoard, a function of the step and a dictionary "
        "of numbers by name (for any other logger: to=lambda step, numbers: run.log(numbers)), or "
        "a list of them."
    )
