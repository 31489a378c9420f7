"""Figures, text and data as files under ``--modelhealth-artifacts DIR``, a folder a failing test.

Each failing subtest has its own: the second one's name ends in ``-2``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_modelhealth.plugin.attachments import Evidence
from pytest_modelhealth.plugin.inspections import left_on_reports
from pytest_modelhealth.plugin.output_files import folder_name, rank_suffix, warn_once, writable

_OPTION = "--modelhealth-artifacts"
_WARNED = pytest.StashKey[bool]()
_FAILURES = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the directory now, so that a long run does not end without its figures.

    Raises:
        pytest.UsageError: it cannot be made or written to.
    """
    config.option.modelhealth_artifacts = str(writable(config, _OPTION, config.getoption(_OPTION)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Count anew where a test runs again."""
    item.stash[_FAILURES] = 0


def pytest_modelhealth_attach(
    item: pytest.Item, report: pytest.TestReport, evidence: Evidence
) -> None:
    """Write the figures; a directory lost meanwhile costs a warning, not the failure."""
    nth = item.stash[_FAILURES] = item.stash.get(_FAILURES, 0) + 1
    name = folder_name(item.nodeid) + rank_suffix() + (f"-{nth}" if nth > 1 else "")
    folder = Path(item.config.getoption(_OPTION)) / name
    text = f"{evidence.failure_text}\n\n{evidence.text}".rstrip() + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "failure.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
        (folder / "report.json").write_text(evidence.json, encoding="ascii")
        for name, png in evidence.figures.items():
            (folder / f"{name}.png").write_bytes(png)
    except OSError as error:
        warn_once(item, _WARNED, f"{_OPTION}: figures could not be written: {error}")
    else:
        report.modelhealth_artifacts = [[item.nodeid, str(folder)]]  # type: ignore[attr-defined]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say where the figures are."""
    written = left_on_reports(terminalreporter, "modelhealth_artifacts")
    if written:
        where = written[0][1] if len(written) == 1 else config.getoption(_OPTION)
        count = len({test for test, _ in written})
        tests = "1 test" if count == 1 else f"{count} tests"
        terminalreporter.write_line(f"modelhealth: figures of {tests} in {where}")
