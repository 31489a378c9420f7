"""Files of the whole run: its data as JSON, a page of it, GitLab's code-quality report."""

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
from pytest_modelhealth.wings import wing

if TYPE_CHECKING:
    from pytest_modelhealth.runs.run import Run


def _write_page(run: Run, file: TextIO, config: pytest.Config) -> None:
    wing("runs.page:write")(run, file)  # brings torch


def _write_data(run: Run, file: TextIO, config: pytest.Config) -> None:
    """Write the run as strict JSON (RFC 8259) in ASCII, a test a line, one at a time.

    ``docs/reference/run-format.md`` has its keys.
    """
    entries = [f"{_json(key)}: {_json(value)}" for key, value in run.head.items()]
    file.write("{\n" + ",\n".join(entries) + ',\n"tests": [')
    separator = "\n"
    for test in run.tests:
        file.write(separator + _json(dict(test)))
        separator = ",\n"
    file.write("\n]}\n")


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _write_issues(run: Run, file: TextIO, config: pytest.Config) -> None:
    """Write the issues, without any too: GitLab then tells which were settled.

    The format is that of
    https://docs.gitlab.com/ci/testing/code_quality/#code-quality-report-format.
    """
    root = Path(os.environ.get("CI_PROJECT_DIR") or config.rootpath)
    json.dump(list(_issues(run, config.rootpath, root)), file, indent=1)
    file.write("\n")


def _issues(run: Run, rootdir: Path, root: Path) -> Iterator[dict[str, Any]]:
    """Yield one issue for each fault of each test; what only warns is ``minor``."""
    from pytest_modelhealth.rendering.notation import printable

    faults = wing("runs.faults:faults")
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


PLUGINS = {
    "gitlab": OutputFile("--modelhealth-codequality", "code quality", _write_issues),
    "page": OutputFile("--modelhealth-html", "page", _write_page),
    "run_json": OutputFile("--modelhealth-json", "run data", _write_data),
}
"""By the names that switch them off."""
