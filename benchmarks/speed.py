"""What an inspection costs, as a ratio to the bare training step.

Usage: ``python -m benchmarks.speed [--threads 2] [--rounds 15] [STEP ...]``

Every contender runs in turns with the bare step, in one process, and each starts without gradients,
as a test and a training loop do; a ratio is the median over rounds of contender / bare, its spread
the quartiles. Contenders are in `benchmarks.contenders`.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch

from benchmarks.contenders import CONTENDERS
from benchmarks.steps import STEPS
from benchmarks.timing import Timing, digits, header, load, machine, row, time_in_turns

GOALS = {
    "BERT-like": 1.08,
    "GPT-2-like": 1.08,
    "ResNet-50": 1.15,
    "wide linears": 1.10,
    "500 tiny layers": 2.5,
}
"""The greatest ratio that modelhealth should have."""


def measure(name: str, contenders: list[str], rounds: int) -> dict[str, Timing]:
    """Return the timings of each contender on the step of this name."""
    torch.manual_seed(0)
    step = STEPS[name]()
    runs = {contender: partial(CONTENDERS[contender].run, step) for contender in contenders}
    return time_in_turns(step.run, runs, rounds, step.forget_gradients)


def bare_milliseconds(timings: dict[str, Timing]) -> str:
    """Return the median time of the bare step."""
    runs = max((timing.runs for timing in timings.values()), key=len)
    return digits(statistics.median(base.wall for _, base in runs) * 1e3)


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "steps", nargs="*", metavar="STEP", help=f"any of: {', '.join(STEPS)}; default: all"
    )
    parser.add_argument("--threads", type=int, default=2, help="of torch; default: 2")
    parser.add_argument("--rounds", type=int, default=15, help="default: 15")
    options = parser.parse_args(arguments)
    for unknown in set(options.steps) - set(STEPS):
        parser.error(f"unknown step {unknown!r}; there are: {', '.join(STEPS)}")
    torch.set_num_threads(options.threads)
    print(f"{machine()}; {options.threads} threads, {options.rounds} rounds, {load()}\n")
    names = [name for name, contender in CONTENDERS.items() if contender.is_installed]
    for name, contender in CONTENDERS.items():
        there = "" if contender.is_installed else " (not installed, left out)"
        print(f"- {name}{there}: {contender.sees}")

    print("\nTime on the clock, as a ratio to the bare step: median (quartiles)\n")
    print(header(["step", "bare ms", "goal for modelhealth", *names]))
    cpu_rows = []
    for step in options.steps or STEPS:
        timings = measure(step, names, options.rounds)
        goal = f"{GOALS[step]:.2f}" if step in GOALS else ""
        ratios = [timing.ratio() for timing in timings.values()]
        print(row([step, bare_milliseconds(timings), goal, *ratios]), flush=True)
        cpu_rows.append(row([step, *(timing.ratio("cpu") for timing in timings.values())]))

    print("\nTime of all cores, which other processes disturb less\n")
    print(header(["step", *names]))
    print("\n".join(cpu_rows))
    print(f"\nafterwards: {load().partition(':')[0]}, this run included")


if __name__ == "__main__":
    main()
