"""What the plugin adds to a suite that does not use it.

Usage: ``python -m benchmarks.unrelated [--rounds 30]``

Suites of trivial tests, each run by pytest in a process of its own, in turns: without the plugin
and without syrupy, which it brings along; with syrupy alone; with both. Given are medians of the
processor time of the whole process, and of the differences to the run without, one a round, with
the quarters around them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles

from benchmarks.timing import machine

KINDS: dict[str, Sequence[str]] = {
    "neither": ("-p", "no:modelhealth", "-p", "no:syrupy"),
    "syrupy": ("-p", "no:modelhealth"),
    "syrupy and modelhealth": (),
}
SIZES = (1, 1000)


def milliseconds(folder: Path, options: Sequence[str]) -> float:
    """Return the processor time of one run of the suite in a folder."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    ) as run:
        _, status, used = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode:
        raise SystemExit(f"{command} in {folder} exited with {run.returncode}")
    return 1000 * (used.ru_utime + used.ru_stime)


def measure(tests: int, rounds: int) -> dict[str, list[float]]:
    """Return the processor time of each kind, one a round."""
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        suite = "\n".join(f"def test_{number}(): pass" for number in range(tests))
        (folder / "test_suite.py").write_text(suite)
        for number in range(rounds + 1):
            for kind, options in KINDS.items():
                used = milliseconds(folder, options)
                if number:  # the first round writes bytecode
                    taken[kind].append(used)
    return taken


def main() -> None:
    """Print a table for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    print(machine())
    print("| tests | plugins | ms | added, ms (quarters) |\n| --- | --- | --- | --- |")
    for tests in SIZES:
        taken = measure(tests, rounds)
        for kind, used in taken.items():
            added = [one - base for one, base in zip(used, taken["neither"], strict=True)]
            low, middle, high = quantiles(added, n=4)
            shown = f"{middle:.0f} ({low:.0f} to {high:.0f})" if any(added) else ""
            print(f"| {tests} | {kind} | {quantiles(used, n=4)[1]:.0f} | {shown} |")


if __name__ == "__main__":
    main()
