"""Failing inspections as bundles under ``--modelhealth-replay DIR``, to be run again elsewhere."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.plugin.inspections import MAKER, left_on_reports
from pytest_modelhealth.plugin.keeping import OPTION, Keeper
from pytest_modelhealth.plugin.output_files import writable

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_modelhealth.plugin.keeping import Kept

_PARTS = ("weights", "inputs")
_DEFAULT_LIMIT = 1024.0
_MEGABYTE = 1_000_000
_SHOWN = 3
_KEEPER = pytest.StashKey[Keeper]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("modelhealth")
    group.addoption(
        OPTION,
        metavar="DIR",
        default=None,
        help="save each failing inspection to DIR, a folder a test: batch, model state, random "
        "state, settings, report; python -m pytest_modelhealth replay runs one again",
    )
    group.addoption(
        f"{OPTION}-limit",
        metavar="MB",
        type=float,
        default=None,
        help="the most megabytes of tensors in one of them: over it the weights are left out, then "
        f"the inputs (default: {_DEFAULT_LIMIT:g})",
    )
    group.addoption(
        f"{OPTION}-without",
        metavar="weights|inputs",
        action="append",
        default=None,
        help="what to leave out of them: weights, inputs or both",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the directory now, so that a long run does not end without its bundles.

    Raises:
        pytest.UsageError: it cannot be made or written to, or an option has a wrong value.
    """
    given = config.getoption(OPTION)
    if given is None:
        return
    limit = _limit(config)
    if not (limit > 0 and math.isfinite(limit)):
        raise pytest.UsageError(
            f"{OPTION}-limit: must be a number of megabytes above 0, not {limit:g}"
        )
    _without(config)
    config.option.modelhealth_replay = str(writable(config, OPTION, given))


def _limit(config: pytest.Config) -> float:
    """Return the most megabytes of tensors in a bundle."""
    given = config.getoption(f"{OPTION}-limit")
    return _DEFAULT_LIMIT if given is None else float(given)


def _without(config: pytest.Config) -> tuple[str, ...]:
    """Return the parts to leave out.

    Raises:
        pytest.UsageError: there is no such part.
    """
    given = ",".join(config.getoption(f"{OPTION}-without") or ())
    parts = tuple(dict.fromkeys(part.strip() for part in given.split(",") if part.strip()))
    for part in parts:
        if part not in _PARTS:
            raise pytest.UsageError(
                f"{OPTION}-without: no such part {part!r}; there are {' and '.join(_PARTS)}"
            )
    return parts


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have the inspectors of this test keep what fails."""
    directory = item.config.getoption(OPTION)
    is_replay = item.config.getoption(f"{OPTION}-from", None) is not None
    if directory is not None and not is_replay:
        limit = _limit(item.config) * _MEGABYTE
        keeper = Keeper(item, Path(directory), limit, _without(item.config))
        item.stash[_KEEPER] = keeper
        item.stash[MAKER] = keeper.make


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Place the bundles of a test that failed and say how to run them; remove those of others."""
    report = yield
    keeper = item.stash.get(_KEEPER, None)
    if keeper is None:
        return report
    if report.failed and call.excinfo is not None:
        try:
            _place(keeper, report, call.excinfo.value, item.config.invocation_params.dir)
        except Exception as error:  # noqa: BLE001 - a failing test must never be lost to its bundle
            text = f"no bundle: {type(error).__name__}: {error}"
            report.sections.append(("modelhealth: replay", text))
    if call.when == "teardown":
        keeper.discard()
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Leave nothing behind where the run is ended from the keyboard."""
    try:
        return (yield)
    finally:
        if _KEEPER in item.stash:
            item.stash[_KEEPER].discard()
            del item.stash[_KEEPER]


def _place(keeper: Keeper, report: pytest.TestReport, error: BaseException, here: Path) -> None:
    kept, why = keeper.place(error)
    lines = [f"no bundle of this failure: {why}"] if why else []
    for bundle in kept:
        lines += _told(bundle, here)
    if lines:
        report.sections.append(("modelhealth: replay", "\n".join(lines)))
    if kept:
        told = [str(bundle.folder) for bundle in kept]
        report.modelhealth_replay = told  # type: ignore[attr-defined]


def _told(bundle: Kept, here: Path) -> list[str]:
    """Return the command that runs a bundle again, and what it lacks."""
    from pytest_modelhealth.rendering.notation import printable, shorten

    lines = [f"{_command(bundle.folder, here)}   ({bundle.saved.bytes / _MEGABYTE:,.1f} MB)"]
    lines += [f"  without {part}: {why}" for part, why in bundle.saved.left_out.items()]
    left_out = tuple(bundle.saved.left_out.values())
    missing = [
        f"  not in it: {shorten(printable(str(missing)), 110)}"
        for missing in bundle.saved.missing
        if missing.reason not in left_out
    ]
    if len(missing) > _SHOWN:
        missing[_SHOWN:] = [f"  not in it: {len(missing) - _SHOWN:,} more"]
    return lines + missing


def _command(folder: Path, here: Path) -> str:
    shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
    return f"python -m pytest_modelhealth replay {shlex.quote(str(shown))}"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say where the bundles are, and how to run the first."""
    folders = left_on_reports(terminalreporter, "modelhealth_replay")
    if folders:
        count = "1 failing inspection" if len(folders) == 1 else f"{len(folders)} inspections"
        command = _command(Path(folders[0]), config.invocation_params.dir)
        where = "" if len(folders) == 1 else f" in {config.getoption(OPTION)}"
        terminalreporter.write_line(f"modelhealth: {count} saved{where}; run it again: {command}")
