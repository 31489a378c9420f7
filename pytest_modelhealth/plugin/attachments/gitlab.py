"""GitLab's code-quality file (``--modelhealth-codequality=PATH``), which merge requests show.

The format is that of
https://docs.gitlab.com/ci/testing/code_quality/#code-quality-report-format.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pytest_modelhealth.plugin.attachments import source_place
from pytest_modelhealth.plugin.output_files import OutputFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pytest

    from pytest_modelhealth.runs.faults import Fault
    from pytest_modelhealth.runs.run import Run, Test


def _write(run: Run, file: TextIO, config: pytest.Config) -> None:
    """Write the file, without findings too: GitLab then tells which were settled."""
    root = Path(os.environ.get("CI_PROJECT_DIR") or config.rootpath)
    json.dump(list(_issues(run.tests, config.rootpath, root)), file, indent=1)
    file.write("\n")


DESTINATION = OutputFile(
    "--modelhealth-codequality",
    "code quality",
    "write what is wrong with the models to PATH, as GitLab reads it (code quality)",
    _write,
)


def _issues(tests: Iterable[Test], rootdir: Path, root: Path) -> Iterator[dict[str, Any]]:
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

    return printable(f"{fault.culprit}: {fault.message} [{test['id']}]")


def _fingerprint(*what: str) -> str:
    """Return the same digits for the same finding, whatever its line and its numbers."""
    text = "\0".join(what)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
