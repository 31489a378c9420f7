"""What recording, reading and comparing cost, as a ratio to the bare training step.

The ratios are of processor time, which other work on the machine moves less than the clock.

Usage: ``python -m benchmarks.drift_cost [--rounds 3] [STEP ...]``
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch

from benchmarks.speed import bare_milliseconds
from benchmarks.steps import STEPS, Step
from benchmarks.timing import header, load, machine, row, time_in_turns
from benchmarks.tools import drift_of, inspect, record
from corpus.subject import Subject
from pytest_modelhealth import compare

USUAL = ("BERT-like", "ResNet-50", "example CNN", "example GPT")


def contenders(step: Step) -> dict[str, Callable[[], object]]:
    """Return what is timed on a step."""
    made = Subject(step.model, step.inputs, step.target, step.loss)
    same, other = copy.deepcopy(step.model), copy.deepcopy(step.model)
    last = [p for p in other.parameters() if p.ndim > 1][-1]
    last.data *= 1.001
    recorded = record(made, made.model)
    return {
        "inspect": lambda: inspect(made, made.model),
        "record": lambda: record(made, made.model),
        "read": lambda: drift_of(recorded, inspect(made, made.model)),
        "compare, equal": lambda: _compare(made, same),
        "compare, one layer scaled": lambda: _compare(made, other),
    }


def _compare(made: Subject, candidate: torch.nn.Module) -> object:
    return compare(made.model, candidate, made.inputs, made.target, loss=made.loss)


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of: {', '.join(STEPS)}")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{machine()}; 1 thread, {options.rounds} rounds, {load()}\n")
    first = True
    for name in options.steps or USUAL:
        torch.manual_seed(0)
        step = STEPS[name]()
        timings = time_in_turns(step.run, contenders(step), options.rounds)
        if first:
            print(header(["step", "bare ms", *timings]))
        first = False
        ratios = [timing.ratio("cpu") for timing in timings.values()]
        print(row([name, bare_milliseconds(timings), *ratios]), flush=True)


if __name__ == "__main__":
    main()
