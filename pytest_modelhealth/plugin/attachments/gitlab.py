"""GitLab's code-quality file (``--modelhealth-codequality=PATH``), which merge requests show.

The format is that of
https://docs.gitlab.com/ci/testing/code_quality/#code-quality-report-format.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.plugin.attachments import source_place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_modelhealth.runs.faults import Fault
    from pytest_modelhealth.runs.run import Run, Test

_OPTION = "--modelhealth-codequality"
_DESTINATION = "modelhealth_codequality"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option."""
    parser.getgroup("modelhealth").addoption(
        _OPTION,
        metavar="PATH",
        default=None,
        help="write what is wrong with the models to PATH, as GitLab reads it (code quality)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the file now, so that a long run does not end without it.

    Raises:
        pytest.UsageError: it cannot be written.
    """
    path = _path(config)
    if path is None or hasattr(config, "workerinput"):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[]\n", encoding="ascii")  # not the findings of an earlier run
    except OSError as error:
        raise pytest.UsageError(
            f"{_OPTION}: cannot write to {str(path)!r}: {error.strerror}; name a file that can be "
            "written"
        ) from None


def pytest_modelhealth_wants_run(config: pytest.Config) -> bool:
    """Ask for the run where the file is wanted."""
    return _path(config) is not None


def pytest_modelhealth_run_ended(config: pytest.Config, run: Run) -> None:
    """Write the file, without findings too: GitLab then tells which were settled.

    Raises:
        OSError: it can be written no longer.
    """
    path = _path(config)
    if path is not None:
        root = Path(os.environ.get("CI_PROJECT_DIR") or config.rootpath)
        found = list(issues(run.tests, config.rootpath, root))
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="ascii")


def issues(tests: Iterable[Test], rootdir: Path, root: Path) -> Iterator[dict[str, Any]]:
    """Yield one issue for each fault of each test; what only warns is ``minor``.

    Args:
        tests: those of a run.
        rootdir: the folder that its places are relative to.
        root: the checkout, which paths are to be relative to.
    """
    from pytest_modelhealth.runs.faults import faults

    seen: dict[tuple[str, ...], int] = {}
    for test in tests:
        for fault in faults(test):
            place = source_place(fault.places, rootdir, root)
            key = (test["id"], fault.check, fault.label)
            seen[key] = nth = seen.get(key, 0) + 1
            yield {
                "description": _description(test, fault),
                "check_name": f"modelhealth.{fault.check}",
                "fingerprint": _fingerprint(*key, str(nth)),
                "severity": "major" if fault.fails else "minor",
                "location": {
                    "path": test["file"] if place is None else place.path,
                    "lines": {"begin": max(1, test["line"]) if place is None else place.line},
                },
            }


def _description(test: Test, fault: Fault) -> str:
    from pytest_modelhealth.rendering.notation import printable

    culprit = f"{fault.label} ({fault.check})" if fault.label else fault.check
    return printable(f"{culprit}: {fault.message} [{test['id']}]")


def _fingerprint(*what: str) -> str:
    """Return the same digits for the same finding, whatever its line and its numbers."""
    text = "\0".join(what)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _path(config: pytest.Config) -> Path | None:
    given = config.getoption(_DESTINATION)
    return None if given is None else config.invocation_params.dir / given
