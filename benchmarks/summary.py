"""What a summary and the costs of an inspection take, as a ratio to a bare forward and backward.

Usage: ``python -m benchmarks.summary [--rounds 15] [STEP ...]``

The ratios are of processor time, medians of turns in one process. ``costs=True`` is the inspection
with its further run; beside it stand the inspection without, and the bare step itself once more,
which shows what noise there is. ``summary`` runs one forward alone. In the last columns are the
multiply-adds of the forward in billions, by torch's counter alone, as the summary has them, and by
torchinfo.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.steps import STEPS, Step
from benchmarks.timing import digits, header, load, machine, row, time_in_turns
from pytest_modelhealth import HealthReport, Inspector

USUAL = ("BERT-like", "ResNet-50", "wide linears", "500 tiny layers", "example CNN")
RUNS = ("bare step again", "inspection", "costs=True", "summary")
COUNTS = ("torch's counter", "summary's", "torchinfo's")


def inspect(step: Step, *, costs: bool) -> HealthReport:
    """Return the report of a step."""
    return Inspector(step.model).run_inspection(step.inputs, loss=step.loss_of, costs=costs)


def forward(step: Step) -> None:
    """Run the model once."""
    _ = step.model(**step.inputs) if step.takes_keywords else step.model(step.inputs)


def timings(step: Step, rounds: int) -> list[str]:
    """Return the ratio of each run to the bare step."""
    runs: dict[str, Callable[[], object]] = {
        "bare step again": step.run,
        "inspection": partial(inspect, step, costs=False),
        "costs=True": partial(inspect, step, costs=True),
        "summary": lambda: Inspector(step.model).summary(step.inputs),
    }
    found = time_in_turns(step.run, runs, rounds, step.forget_gradients)
    return [found[name].ratio("cpu") for name in RUNS]


def counts(step: Step) -> list[str]:
    """Return the multiply-adds of the forward in billions, by each that counts them."""
    import torchinfo

    with FlopCounterMode(display=False) as counter:
        forward(step)
    ours = Inspector(step.model).summary(step.inputs).totals["multiply_adds"]
    theirs = torchinfo.summary(step.model, input_data=step.inputs, verbose=0).total_mult_adds
    return [digits(n / 1e9) for n in (counter.get_total_flops() / 2, ours or 0, theirs)]


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of: {', '.join(STEPS)}")
    parser.add_argument("--rounds", type=int, default=15, help="default: 15")
    options = parser.parse_args(arguments)
    for unknown in set(options.steps) - set(STEPS):
        parser.error(f"unknown step {unknown!r}; there are: {', '.join(STEPS)}")
    torch.set_num_threads(1)
    print(f"{machine()}; 1 thread, {options.rounds} rounds, {load()}\n")
    print(header(["step", *RUNS, *COUNTS]))
    for name in options.steps or USUAL:
        torch.manual_seed(0)
        step = STEPS[name]()
        print(row([name, *timings(step, options.rounds), *counts(step)]), flush=True)


if __name__ == "__main__":
    main()
