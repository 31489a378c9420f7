"""How a failure is shown: the user's lines and the text, without the frames between them."""

from __future__ import annotations

import linecache
import re
import sys
from itertools import dropwhile, islice, takewhile
from typing import TYPE_CHECKING, Any

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ReprEntry,
    ReprFileLocation,
    ReprTraceback,
)

from pytest_modelhealth.errors import (
    InspectionError,
    ModelHealthError,
    ModelHealthWarning,
    SettingsError,
)
from pytest_modelhealth.plugin.inspections import UNASKED_FAILURE, UnaskedFailure, headline

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from types import TracebackType

    from pytest_modelhealth.report.verdict import Denied

_PACKAGE = __name__.partition(".")[0]
_OWN_ERRORS = (ModelHealthError, InspectionError, SettingsError, ModelHealthWarning)


# No wrapper: pytest's part for unittest, which is called first, puts the exception in place.
@pytest.hookimpl(specname="pytest_runtest_makereport")
def pytest_before_report(item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
    """Have a bare `assert` of a report fail with the report's text, and hide frames between."""
    asserted = _error_of_assert(call.excinfo)
    if asserted is not None:
        call.excinfo = pytest.ExceptionInfo.from_exception(asserted)
    if call.excinfo is not None and not _shows_all(item):
        _hide_frames_between(call.excinfo)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shorten what pytest makes of an exception that has to do with this package."""
    report = yield
    unasked = item.stash.get(UNASKED_FAILURE, None)
    if unasked is not None:
        del item.stash[UNASKED_FAILURE]
    if call.excinfo is None:
        return report
    error = call.excinfo.value
    is_unasked = unasked is not None and error is unasked.error
    if unasked is not None and is_unasked and not _shows_all(item):
        report.longrepr = _representation(unasked, item)
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None and (is_unasked or isinstance(error, ModelHealthError)):
        crash.message = headline(error)  # for the short summary, whole on CI, and JUnit
        if item.config.getoption("tbstyle", "auto") == "line":  # this one
            nothing = ReprTraceback([], None, style="long")
            report.longrepr = ExceptionChainRepr([(nothing, crash, None)])
    return report


def _shows_all(item: pytest.Item) -> bool:
    """Whether every frame is asked for; under ``-p no:terminal`` there is no such option."""
    return bool(item.config.getoption("fulltrace", False))


def _error_of_assert(
    excinfo: pytest.ExceptionInfo[BaseException] | None,
) -> ModelHealthError | None:
    """Return the error for ``assert report``, if that is what failed.

    It did where a report was false as a truth value in the very statement that raised, or in
    unittest's ``assertTrue``.
    """
    asked = sys.modules.get(f"{_PACKAGE}.report.verdict")  # not loaded: no report was made
    denied: Denied | None = None if asked is None else asked.take_denied()
    if denied is None or excinfo is None or type(excinfo.value) is not AssertionError:
        return None
    *_, innermost = _entries(excinfo.tb)
    code = innermost.tb_frame.f_code
    first, last, *_ = next(islice(code.co_positions(), innermost.tb_lasti // 2, None))
    here = (first or 0) <= denied.line <= (last or 0) or code.co_name == "assertTrue"
    if denied.path != code.co_filename or not here:
        return None
    error = denied.error().with_traceback(excinfo.tb)
    message = _SHOWN_BY_PYTEST.split(str(excinfo.value))[0].strip()
    if message:
        error.add_note(message)
    return error


_SHOWN_BY_PYTEST = re.compile(r"^(?:assert .*)?<(?:HealthReport|Comparison) ", re.MULTILINE)
"""How pytest and unittest spell out what failed; the message of an `assert` stands before it."""


def _hide_frames_between(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    if isinstance(excinfo.value, ModelHealthError):
        # As pytest does for `assert`: the class stands at the end, the text speaks for itself.
        excinfo._striptext = f"{_PACKAGE}.ModelHealthError: "
    elif isinstance(excinfo.value, _OWN_ERRORS):
        excinfo._striptext = f"{_PACKAGE}."
    entries = list(_entries(excinfo.tb))
    innermost = entries[-1].tb_frame.f_code.co_name
    is_own = _package(entries[-1]) == _PACKAGE and not isinstance(excinfo.value, _OWN_ERRORS)
    if is_own and innermost not in _MAKES_CALLS_OF_THE_MODEL:
        return  # a defect: our frames are what a bug report needs
    backwards = dropwhile(_RUN_TESTS.__contains__, map(_package, reversed(entries)))
    if _PACKAGE in takewhile(lambda package: package not in _RUN_TESTS, backwards):
        error: BaseException | None = excinfo.value
        seen = set[int]()  # one may be its own cause
        while error is not None and id(error) not in seen:
            _hide_between(excinfo.tb if not seen else error.__traceback__)
            seen.add(id(error))
            error = error.__cause__ or error.__context__


_RUN_TESTS = frozenset({"_pytest", "pluggy"})
_BETWEEN = frozenset({_PACKAGE, "torch", "contextlib"})
"""What stands between a test and the lines of its model: `_call_impl` alone thrice a layer."""


def _hide_between(traceback: TracebackType | None) -> None:
    """Leave, after the first, the frames of the test and of its model."""
    entries = list(_entries(traceback))
    shown = [entry for entry in entries[1:] if _package(entry) not in _BETWEEN]
    # pytest reads the raw traceback again after `excinfo.traceback` is set: unlink them there.
    for entry, following in zip([*entries[:1], *shown], [*shown, None], strict=False):
        entry.tb_next = following


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


_MAKES_CALLS_OF_THE_MODEL = frozenset({"__torch_function__", "_function", "run_function"})
"""Frames of ours through which every torch function that the model calls passes."""


def _package(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__")).partition(".")[0]


def _representation(unasked: UnaskedFailure, item: pytest.Item) -> ExceptionChainRepr:
    """Return what pytest would show, had the error been raised where the report was made."""
    (_, path, line, _), error = unasked
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    short = item.config.getoption("tbstyle", "auto") == "short"
    here = item.config.invocation_params.dir
    shown = str(path.relative_to(here) if path.is_relative_to(here) else path)
    where = f"in {item.name}" if short else type(error).__name__
    entry = ReprEntry(
        lines=[
            ("    " if short else ">   ") + linecache.getline(str(path), line).strip(),
            *(f"E   {text_line}".rstrip() for text_line in text.splitlines()),
        ],
        reprfuncargs=None,
        reprlocals=None,
        reprfileloc=ReprFileLocation(shown, line, where),
        style="short" if short else "long",
    )
    crash = ReprFileLocation(str(path), line, headline(error))
    return ExceptionChainRepr([(ReprTraceback([entry], None, style="long"), crash, None)])
