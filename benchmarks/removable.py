"""What a search for units that can go takes, as a ratio to plain evaluation of the same batches.

Usage: ``python -m benchmarks.removable [--rounds 5] [--batches 10] [STEP ...]``

The ratios are of processor time, medians of turns in one process. Plain evaluation is a forward of
each batch in evaluation mode without gradients; beside it stand that once more, which shows what
noise there is, ``run_batches``, an inspection of each batch with its backward pass, and
``removable``, which is that and the proof. In the last column ``removable`` has twice as many
batches: 2.0 is linear.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.steps import STEPS, Step
from benchmarks.timing import digits, header, load, machine, row, time_in_turns
from pytest_modelhealth import Inspector

USUAL = ("example CNN", "500 tiny layers", "BERT-like", "ResNet-50")
RUNS = ("evaluation again", "run_batches", "removable")


def evaluate(step: Step, batches: int) -> None:
    """Run the model forward on so many batches."""
    with torch.no_grad():
        for _ in range(batches):
            _ = step.model(**step.inputs) if step.takes_keywords else step.model(step.inputs)


def search(step: Step, batches: int) -> None:
    """Look for units that can go on so many batches."""
    Inspector(step.model).removable([step.inputs] * batches)


def inspect(step: Step, batches: int) -> None:
    """Inspect so many batches."""
    Inspector(step.model).run_batches([step.inputs] * batches)


def timings(step: Step, rounds: int, batches: int) -> list[str]:
    """Return the ratio of each run to plain evaluation, and what twice the batches take."""
    step.model.eval()
    runs: dict[str, Callable[[], object]] = {
        "evaluation again": partial(evaluate, step, batches),
        "run_batches": partial(inspect, step, batches),
        "removable": partial(search, step, batches),
        "twice": partial(search, step, 2 * batches),
    }
    found = time_in_turns(partial(evaluate, step, batches), runs, rounds, step.forget_gradients)
    once, twice = (sorted(found[name].ratios("cpu")) for name in ("removable", "twice"))
    growth = digits(twice[len(twice) // 2] / once[len(once) // 2]) if once and twice else "-"
    return [*(found[name].ratio("cpu") for name in RUNS), growth]


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of: {', '.join(STEPS)}")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--batches", type=int, default=10, help="default: 10")
    options = parser.parse_args(arguments)
    for unknown in set(options.steps) - set(STEPS):
        parser.error(f"unknown step {unknown!r}; there are: {', '.join(STEPS)}")
    torch.set_num_threads(1)
    print(f"{machine()}; 1 thread, {options.rounds} rounds, {load()}\n")
    print(header(["step", *RUNS, "twice the batches"]))
    for name in options.steps or USUAL:
        torch.manual_seed(0)
        step = STEPS[name]()
        print(row([name, *timings(step, options.rounds, options.batches)]), flush=True)


if __name__ == "__main__":
    main()
