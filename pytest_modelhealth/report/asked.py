"""What every result with a verdict has: how it is shown, and whether it was asked for."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from pytest_modelhealth.errors import ModelHealthError

Renderer = Callable[[str, str], Callable[..., Any]]
"""Gives a function by the file on the shelf of formats that holds it, and its name.

The shelf lies above the results in the order of imports: what makes one hands this in.
"""


class HasVerdict(ABC):
    """A result with a verdict; as a truth value it is whether that is the good one."""

    _renderer: Renderer
    _verdict_asked = False
    """Whether the verdict was asked for; numbers, tables and pictures are no question for it."""

    @abstractmethod
    def _passed(self) -> bool:
        """Return whether the verdict is the good one; this counts as asking."""

    @abstractmethod
    def _denial(self) -> ModelHealthError:
        """Return the error for an `assert` of this result that does not hold."""

    def _shown(self, form: str, function: str, *args: Any, **options: Any) -> Any:
        """Return what a format makes of this, which is not to ask for its verdict."""
        with self._unasked():
            return self._renderer(form, function)(self, *args, **options)

    def __bool__(self) -> bool:
        passed = self._passed()
        if not passed:
            _note(self, sys._getframe(1).f_code.co_filename, sys._getframe(1).f_lineno)
        return passed

    @contextmanager
    def _unasked(self) -> Iterator[None]:
        """Read the verdict inside to show it, which is not to ask for it."""
        asked = self._verdict_asked
        try:
            yield
        finally:
            self._verdict_asked = asked


class Denied(NamedTuple):
    """A result that was false as a truth value, and the line that asked."""

    result: HasVerdict
    path: str
    line: int

    def error(self) -> ModelHealthError:
        """Return the error that says why it was false."""
        with self.result._unasked():
            return self.result._denial()


_latest: Denied | None = None


def _note(result: HasVerdict, path: str, line: int) -> None:
    # Only in a test, which pytest says by this variable, does the plugin take it again: a script
    # would hold the report for nothing.
    global _latest
    if "PYTEST_CURRENT_TEST" in os.environ:
        _latest = Denied(result, path, line)


def take_denied() -> Denied | None:
    """Return the latest result that was false as a truth value, and forget it."""
    global _latest
    taken, _latest = _latest, None
    return taken
