"""Callbacks for trainers of other libraries.

A file has its ``Hooks``. The library is imported when a callback is asked for, never before.
"""

from __future__ import annotations

import importlib
from typing import Any

from pytest_modelhealth.errors import InspectionError, suggest

_LIBRARIES = {
    "lightning": ("lightning", "lightning.pytorch", "Callback"),
    "pytorch_lightning": ("lightning", "pytorch_lightning", "Callback"),
    "transformers": ("transformers", "transformers", "TrainerCallback"),
}
"""By library: our file, and where the class is from which its callbacks derive."""


class TrainerHooks:
    """What tells a monitor of a training, in its main process.

    Args:
        monitor: a `TrainingMonitor`; one that runs already is not started, nor closed.
    """

    def __init__(self, monitor: Any) -> None:
        self._monitor = monitor
        self._is_ours = False
        self._last = -1

    def _begin(self, scaler: Any) -> None:
        """Start the monitor, once more where a trainer begins again after it failed."""
        if not self._monitor._is_started:
            self._monitor.start()
            self._is_ours = True
        if scaler is not None:
            self._monitor._watch.use_scaler(scaler)

    def _end_step(self, number: int, loss: Any = None) -> None:
        """Say that an optimizer's step is over; numbers that do not rise are replaced."""
        if self._monitor._is_started:
            self._last = max(number, self._last + 1)
            self._monitor.step_end(self._last, loss)

    def _end(self) -> None:
        """Close the monitor, if it was started here."""
        if self._is_ours:
            self._monitor.close()


def callback_of(monitor: Any, library: str) -> Any:
    """Return a callback for the trainer of a library.

    Args:
        monitor: what the callback starts, tells of each step, and closes.
        library: its name as it is imported, such as ``"lightning"``.

    Raises:
        InspectionError: there is none for it, or it is not installed.
    """
    if library not in _LIBRARIES:
        raise InspectionError(
            f"unknown library {library!r}{suggest(library, _LIBRARIES)} There are callbacks for "
            f"{', '.join(_LIBRARIES)}; any other loop calls monitor.step_end(step, loss=loss)."
        )
    file, module, base = _LIBRARIES[library]
    hooks = importlib.import_module(f"{__name__}.{file}").Hooks
    try:
        bases = hooks, getattr(importlib.import_module(module), base)
        derived: Any = type("ModelHealthCallback", bases, {})
    except ImportError as error:
        raise InspectionError(
            f"callback({library!r}) needs {library}, which cannot be imported: {error}"
        ) from error
    return derived(monitor)
