"""`Sink`: what every destination has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from pytest_modelhealth.statistics import TensorStatistics


class Sink(ABC):
    """Writes numbers by an object of another library, which the user made and closes.

    Args:
        destination: that object.
    """

    meant: ClassVar[str]
    """What the object is, for messages."""

    is_fallback: ClassVar[bool] = False
    """Whether it is asked after the others."""

    takes_histograms: ClassVar[bool] = False

    def __init__(self, destination: Any) -> None:
        self._destination = destination

    @classmethod
    @abstractmethod
    def accepts(cls, destination: object) -> bool:
        """Whether this kind writes to such an object."""

    @abstractmethod
    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step by their names."""

    def write_histograms(self, step: int, histograms: Mapping[str, TensorStatistics]) -> None:
        """Write what was seen of tensors as histograms; only where the kind takes them."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(getattr(self._destination, "__name__", type(self._destination).__name__))
