"""GitLab's code-quality file (``--modelhealth-codequality=PATH``), which merge requests show.

The format is that of
https://docs.gitlab.com/ci/testing/code_quality/#code-quality-report-format.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import pytest

from pytest_modelhealth.plugin.output_files import OutputFile

if TYPE_CHECKING:
    from pytest_modelhealth.runs.run import Run


def _write(run: Run, file: TextIO, config: pytest.Config) -> None:
    """Write the file, without findings too: GitLab then tells which were settled."""
    root = Path(os.environ.get("CI_PROJECT_DIR") or config.rootpath)
    json.dump(list(_issues(run, config.rootpath, root)), file, indent=1)
    file.write("\n")


DESTINATION = OutputFile(
    "--modelhealth-codequality",
    "code quality",
    "write what is wrong with the models to PATH, as GitLab reads it (code quality)",
    _write,
)


def _issues(run: Run, rootdir: Path, root: Path) -> Iterator[dict[str, Any]]:
    """Yield one issue for each fault of each test; what only warns is ``minor``."""
    from pytest_modelhealth.rendering.notation import printable
    from pytest_modelhealth.runs.faults import faults

    seen = Counter[tuple[str, ...]]()
    for test, fault in ((one, fault) for one in run.tests for fault in faults(one)):
        path, line = fault.place_in(root, rootdir) or (test["file"], max(1, test["line"]))
        key = (test["id"], fault.check, fault.label)
        seen[key] += 1
        # the same digits for the same finding, whatever its line and its numbers
        text = "\0".join((*key, str(seen[key])))
        yield {
            "description": printable(f"{fault.culprit}: {fault.message} [{test['id']}]"),
            "check_name": f"modelhealth.{fault.check}",
            "fingerprint": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
            "severity": "major" if fault.fails else "minor",
            "location": {"path": path, "lines": {"begin": line}},
        }
