"""Loggers of Lightning, of both of its packages."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_modelhealth.training.libraries import is_of
from pytest_modelhealth.training.monitoring.writers.sink import Sink


class LightningLogger(Sink):
    """Logs metrics by a logger of a Lightning `Trainer`."""

    meant = "a logger of Lightning"

    @classmethod
    def accepts(cls, destination: object) -> bool:
        """Whether it is a logger."""
        return is_of(
            destination,
            "lightning.fabric.loggers",
            "lightning.pytorch.loggers",
            "lightning_fabric.loggers",
            "pytorch_lightning.loggers",
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log a row."""
        self._destination.log_metrics(dict(numbers), step=step)
