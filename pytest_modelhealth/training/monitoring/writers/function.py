"""A function of the user's."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_modelhealth.training.monitoring.writers.sink import Sink


class Function(Sink):
    """Calls ``function(step, numbers)``."""

    meant = "a function of the step and a dictionary of numbers by name"
    is_fallback = True

    @classmethod
    def accepts(cls, destination: object) -> bool:
        """Whether it can be called."""
        return callable(destination) and not isinstance(destination, type)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Hand over a dictionary."""
        self._destination(step, dict(numbers))
