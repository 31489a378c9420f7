"""Times contenders in turns, so that a slow moment of the machine hits all of them alike."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

LONGEST_STRIDE = 5  # a dear contender runs in every fifth round at least


class Seconds(NamedTuple):
    """What one run took: on the clock, and of all cores together."""

    wall: float
    cpu: float


@dataclass
class Timing:
    """The runs of one contender, each with the base's run of the same round.

    Args:
        runs: pairs of contender and base.
        error: why there are none.
    """

    runs: list[tuple[Seconds, Seconds]] = field(default_factory=list)
    error: str = ""

    def ratios(self, clock: str = "wall") -> list[float]:
        """Return contender / base for each round, of ``"wall"`` or ``"cpu"`` seconds."""
        return [getattr(own, clock) / getattr(base, clock) for own, base in self.runs]

    def ratio(self, clock: str = "wall") -> str:
        """Return the median ratio and its quartiles for a table, or what went wrong."""
        return self.error or median_and_quartiles(self.ratios(clock))


def time_once(run: Callable[[], object]) -> Seconds:
    """Time one run."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def time_in_turns(
    base: Callable[[], object],
    others: Mapping[str, Callable[[], object]],
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Run `base` and every other once a round, the dear ones not in all rounds.

    Each starts from what `before` leaves, which is not counted. A first run of each, not counted
    either, warms up; one that raises there is out, with its error. A run is slower after one that
    freed much memory, so another goes first in each round, the dear ones come last, and a run of
    the base that is not counted follows them.
    """
    timings = {name: Timing() for name in others}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what tools warn of is not what is measured
        strides = _warm_up(base, others, timings)
        cheap = [None, *(name for name, stride in strides.items() if stride == 1)]
        for number in range(rounds):
            gc.collect()
            base()
            first = number % len(cheap)
            dear = [name for name, stride in strides.items() if stride > 1 and number % stride == 0]
            seconds = {}
            for name in (*cheap[first:], *cheap[:first], *dear):
                before()
                seconds[name] = time_once(base if name is None else others[name])
            base_seconds = seconds.pop(None)
            for name, own in seconds.items():
                timings[name].runs.append((own, base_seconds))
    return timings


def _warm_up(
    base: Callable[[], object],
    others: Mapping[str, Callable[[], object]],
    timings: dict[str, Timing],
) -> dict[str, int]:
    """Return in every how many rounds each takes part that works."""
    base()
    usual = time_once(base).wall
    strides = {}
    for name, run in others.items():
        try:
            run()
            strides[name] = _stride(time_once(run).wall / usual)
        except Exception as error:  # noqa: BLE001 - whatever a tool raises on a model
            timings[name].error = f"raises {type(error).__name__}"
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    return strides


def _stride(cost: float) -> int:
    """Return in every how many rounds a contender of this ratio to the base takes part."""
    return min(max(round(cost / 1.5), 1), LONGEST_STRIDE)


def median_and_quartiles(values: Sequence[float]) -> str:
    """Return for example ``1.07 (1.05-1.10)``, with three digits or all before the point."""
    if len(values) < 2:
        return digits(values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{digits(middle)} ({digits(low)}-{digits(high)})"


def digits(value: float) -> str:
    """Return a number with three digits, or all of those before the point."""
    places = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{places}f}"


def row(cells: Iterable[object]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def header(cells: Sequence[object]) -> str:
    """Return the two first rows of a Markdown table."""
    return row(cells) + "\n" + row(["---"] * len(cells))


def machine() -> str:
    """Return processor, cores, system and versions."""
    import torch

    from pytest_modelhealth import __version__

    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"pytest-modelhealth {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.system()}, {_processor()} ({capability}), "
        f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def load() -> str:
    """Return the load average of the last minute, with a warning where others are at work."""
    if not hasattr(os, "getloadavg"):
        return "load average unknown"
    average = os.getloadavg()[0]
    if average < 0.5 * (os.cpu_count() or 1):
        return f"load average {average:.1f}"
    return (
        f"load average {average:.1f}: OTHER PROCESSES ARE RUNNING, ratios of several threads mean "
        "little now (OpenMP threads spin while they wait); wait, or take --threads 1"
    )
