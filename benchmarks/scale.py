"""How the cost of an inspection grows, and what start-up costs.

Usage: ``python -m benchmarks.scale [--threads 1] [--large] [TABLE ...]``

- ``layers``: microseconds a layer, for models of 10 to 10,000 tiny layers.
- ``elements``: nanoseconds an element, for tensors of a thousand to 100 million; ``--large`` adds a
  billion, which takes 4 GB.
- ``first``: the first inspection in a fresh process, against a later one.
- ``help``: ``pytest --help`` with the plugin and without.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.timing import Seconds, digits, header, load, machine, row, time_once

if TYPE_CHECKING:
    from benchmarks.steps import Step

ROOT = Path(__file__).parents[1]

GROWTH_GOAL = 1.5
"""Growth is linear where a layer costs at most so many times one of 100, and an element at most so
many times one of a million: there, what an inspection or a call costs once counts little."""

FIRST_GOAL = 0.5
"""Seconds that a first inspection may take longer than a later one."""

HELP_GOAL = 20
"""Milliseconds that the plugin may add to ``pytest --help``."""


def layers(sizes: Sequence[int] = (10, 100, 1_000, 10_000), most_runs: int = 50) -> Iterator[str]:
    """Yield the table of microseconds a layer."""
    from benchmarks.contenders import modelhealth
    from benchmarks.steps import tiny

    yield header(["layers", "bare us a layer", "modelhealth adds", "goal", "runs"])
    basis = None
    for size in sizes:
        step = tiny(size // 2)
        runs = max(3, min(most_runs, 10_000 // size))
        bare, inspected = _medians([step.run, partial(modelhealth, step)], runs)
        added = (inspected - bare) / size * 1e6
        basis = added if size == 100 else basis
        goal = digits(GROWTH_GOAL * basis) if basis and size > 100 else ""
        yield row([f"{size:,}", digits(bare / size * 1e6), digits(added), goal, runs])


def elements(exponents: Sequence[int] = (3, 4, 5, 6, 7, 8)) -> Iterator[str]:
    """Yield the table of nanoseconds an element of float32; its units are 1,000 columns."""
    import torch

    from pytest_modelhealth.statistics import reduce

    yield header(["elements", "torch.sum ns", "statistics ns", "with units ns", "goal", "runs"])
    basis = None
    for exponent in exponents:
        size = 10**exponent
        tensor = torch.empty(size // 1000, 1000).normal_()
        calls = max(1, 10**5 // size)  # enough of them for the clock
        contenders = [
            partial(torch.sum, tensor),
            partial(reduce, tensor),
            partial(reduce, tensor, 1),
        ]
        runs = 3 if exponent > 8 else 9
        seconds = _medians([partial(_repeat, c, calls) for c in contenders], runs)
        nanoseconds = [s / calls / size * 1e9 for s in seconds]
        basis = nanoseconds[-1] if exponent == 6 else basis
        goal = digits(GROWTH_GOAL * basis) if basis and exponent > 6 else ""
        yield row([f"{size:,}", *map(digits, nanoseconds), goal, runs])


def first(steps: Sequence[str] = ("example CNN", "BERT-like"), processes: int = 5) -> Iterator[str]:
    """Yield the table of the first inspection in a fresh process, and of a later one there."""
    yield header(["step", "first s", "later s", "more s", "goal", "processes"])
    for name in steps:
        runs = [_run_apart(name) for _ in range(processes + 1)][1:]  # one compiles
        times = [statistics.median(run[i] for run in runs) for i in (0, 1)]
        more = statistics.median(run[0] - run[1] for run in runs)
        cells = (f"{seconds:.3f}" for seconds in (*times, more))
        yield row([name, *cells, FIRST_GOAL, processes])


def first_and_later(name: str) -> tuple[float, float]:
    """Return the seconds of a first inspection in this process, its imports included, and a later.

    torch is imported and the step has run bare: that is no part of an inspection.
    """
    from benchmarks.steps import STEPS

    step = STEPS[name]()
    step.run()
    earliest = time_once(partial(_inspect, step)).wall
    return earliest, min(time_once(partial(_inspect, step)).wall for _ in range(3))


def _inspect(step: Step) -> None:
    from benchmarks.contenders import modelhealth

    modelhealth(step)


def _run_apart(name: str) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", "--once", name],
        cwd=ROOT,
        env=_environment() | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    seconds: tuple[float, float] = tuple(json.loads(done.stdout))
    return seconds


def help_(runs: int = 15) -> Iterator[str]:
    """Yield the table of ``pytest --help``, with the plugin and without in turns."""
    yield header(["without ms", "with ms", "adds ms", "goal", "runs"])
    without, with_ = _plugin_flags()
    with tempfile.TemporaryDirectory() as nowhere:
        _help(with_, nowhere)  # compiles what is not yet
        pairs = [(_help(without, nowhere), _help(with_, nowhere)) for _ in range(runs)]
    figures = (
        statistics.median(pair[0] for pair in pairs),
        statistics.median(pair[1] for pair in pairs),
        statistics.median(pair[1] - pair[0] for pair in pairs),
    )
    yield row([*(f"{seconds * 1e3:.0f}" for seconds in figures), HELP_GOAL, runs])


def _plugin_flags() -> tuple[list[str], list[str]]:
    """Return what turns the plugin off and on, installed or not."""
    if entry_points(group="pytest11", name="modelhealth"):
        return ["-p", "no:modelhealth"], []
    return [], ["-p", "pytest_modelhealth.plugin"]


def _help(flags: list[str], folder: str) -> float:
    command = [sys.executable, "-m", "pytest", "--help", *flags]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    start = time.perf_counter()
    subprocess.run(
        command,
        cwd=folder,
        env=_environment() | {"PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - start


def _environment() -> dict[str, str]:
    """Return variables with which Python keeps compiled modules, as it does unless told not to."""
    return {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _repeat(run: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        run()


def _medians(contenders: Sequence[Callable[[], object]], runs: int) -> list[float]:
    """Return each contender's median seconds; they take turns, after one run that warms up."""
    for run in contenders:
        run()
    gc.collect()
    rounds: list[list[Seconds]] = [[time_once(run) for run in contenders] for _ in range(runs)]
    return [statistics.median(s.wall for s in own) for own in zip(*rounds, strict=True)]


TABLES: dict[str, tuple[str, Callable[..., Iterator[str]]]] = {
    "layers": ("Microseconds a layer: linear 32 x 32 and ReLU in turn, batch 32", layers),
    "elements": ("Nanoseconds an element of a float32 tensor", elements),
    "first": ("The first inspection in a fresh process, imports included", first),
    "help": ("pytest --help", help_),
}


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"any of: {', '.join(TABLES)}")
    parser.add_argument("--threads", type=int, default=1, help="of torch; default: 1")
    parser.add_argument("--large", action="store_true", help="a billion elements too: 4 GB")
    parser.add_argument("--once", metavar="STEP", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for unknown in set(options.tables) - set(TABLES):
        parser.error(f"unknown table {unknown!r}; there are: {', '.join(TABLES)}")

    if options.once:
        print(json.dumps(first_and_later(options.once)))
        return

    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{machine()}; {options.threads} threads, {load()}")
    for name in options.tables or TABLES:
        title, table = TABLES[name]
        print(f"\n{title}\n")
        large = {"exponents": (3, 4, 5, 6, 7, 8, 9)} if options.large and name == "elements" else {}
        for line in table(**large):
            print(line, flush=True)


if __name__ == "__main__":
    main()
