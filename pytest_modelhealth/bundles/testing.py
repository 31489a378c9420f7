"""Runs the test of a bundle again, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pytest_modelhealth.bundles.file import read
from pytest_modelhealth.errors import InspectionError

FAILS = 1


def run_test(path: Path) -> bool:
    """Run the test that made a bundle, on what the bundle has; return whether it passes.

    Args:
        path: the bundle's folder.

    Raises:
        InspectionError: the bundle is of no test, the test is not here, or nothing was replayed,
            of which pytest has said why.
    """
    test = read(path).content.test
    if test is None:
        raise InspectionError(
            f"{path} was made outside of tests: give the model, --model package.module:function"
        )
    options = [f"--modelhealth-replay-from={path.absolute()}"]
    # a project's own options may deselect it
    options += ["-m", "", "-k", ""]
    command = [sys.executable, "-m", "pytest", *options, _argument(test.id, path)]
    status = subprocess.run(command, check=False).returncode
    if status not in (0, FAILS):
        raise InspectionError(f"the inspection of {path} was not replayed; pytest says why")
    return status == 0


def _argument(nodeid: str, bundle: Path) -> str:
    """Return a test's id as an argument for pytest: its file as it is found from here.

    Raises:
        InspectionError: there is no such file here, or the id leads somewhere else.
    """
    file, _, rest = nodeid.partition("::")
    relative = Path(file)
    if not file or file.startswith("-") or relative.is_absolute() or ".." in relative.parts:
        raise InspectionError(f"the bundle is damaged: {nodeid!r} is no id of a test")
    for folder in (Path.cwd(), *Path.cwd().parents):
        found = folder / relative
        # code that came with the bundle is not run
        if found.is_file() and not found.resolve().is_relative_to(bundle.resolve()):
            return f"{found}::{rest}"
    raise InspectionError(
        f"the test of the bundle, {nodeid}, is not here: start this in the project's folder, or "
        "run it without the test, --model package.module:function"
    )
