"""TensorBoard: a `SummaryWriter` of torch or of tensorboardX."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_modelhealth.statistics import TensorStatistics
from pytest_modelhealth.training.libraries import is_of
from pytest_modelhealth.training.monitoring.writers.sink import Sink


class TensorBoard(Sink):
    """Writes scalars, and histograms where they are asked for."""

    meant = "a SummaryWriter of TensorBoard"
    takes_histograms = True

    @classmethod
    def accepts(cls, destination: object) -> bool:
        """Whether it is a `SummaryWriter`."""
        is_known = is_of(destination, "torch.utils.tensorboard", "tensorboardX")
        return is_known and hasattr(destination, "add_scalar")

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
