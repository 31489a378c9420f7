"""Checks a hypothesis test's unasked reports as each example ends, so that a failure shrinks.

hypothesis runs the body of a ``@given`` test once an example. What is found only after the last of
them it never sees: it neither shrinks that example nor shows it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.plugin.inspections import INSPECTOR, InspectorFixture, _check_unasked

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Let each example of a ``@given`` test end with the check of its reports."""
    fixture = item.stash.get(INSPECTOR, None)
    # Where hypothesis lets other plugins replace the body; it is never imported for this.
    handle: Any = getattr(getattr(item, "obj", None), "hypothesis", None)
    if fixture is None or "hypothesis" not in sys.modules or not hasattr(handle, "inner_test"):
        return (yield)
    examples, body = _Examples(fixture, item), handle.inner_test
    handle.inner_test = examples.checked(body)
    try:
        result = yield
    finally:
        handle.inner_test = body
    examples.forget_unfinished()
    return result


class _Examples:
    def __init__(self, fixture: InspectorFixture, item: pytest.Item) -> None:
        self._fixture = fixture
        self._item = item
        self._finished = len(fixture._inspections)

    def checked(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Return `body` with the check at its end; asynchronous if it is."""

        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.forget_unfinished()
            result = body(*args, **kwargs)
            self._finish()
            return result

        @functools.wraps(body)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            self.forget_unfinished()
            result = await body(*args, **kwargs)
            self._finish()
            return result

        return run_async if inspect.iscoroutinefunction(body) else run

    def forget_unfinished(self) -> None:
        """Drop the reports of an example that was rejected, or failed and is tried again."""
        del self._fixture._inspections[self._finished :]

    def _finish(self) -> None:
        self._fixture._checked = self._finished
        try:
            _check_unasked(self._fixture, self._item)
        finally:
            self._fixture._checked = None  # the whole body has not passed yet
        self._finished = len(self._fixture._inspections)
