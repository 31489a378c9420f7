"""What a run over batches takes, as a ratio to bare steps.

Usage: ``python -m benchmarks.data_sets [--rounds 9] [--batches 8] [STEP ...]``

The ratios are of processor time, medians of turns in one process. The base are bare steps (forward,
loss, backward) on as many batches as ``run_batches`` is given; each sample has one of ten classes.
``inspections`` calls ``run_inspection`` on each batch and reads each verdict; ``merged`` runs
``run_batches`` without a look for places, which it cannot be asked for: what is between the two and
``run_batches`` is what merging and looking take.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.steps import STEPS, Step
from benchmarks.timing import header, load, machine, row, time_in_turns
from pytest_modelhealth import Inspector
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.data_sets import running

USUAL = ("example CNN", "example GPT", "BERT-like", "ResNet-50")
RUNS = ("bare steps again", "inspections", "merged", "run_batches")
CLASSES = 10


@contextmanager
def without_places() -> Iterator[None]:
    """Have `run_batches` look for no place."""
    with patch.object(running, "with_places", lambda seen: seen):
        yield


def ratios(step: Step, batches: int, rounds: int) -> list[str]:
    """Return the ratio of each run to bare steps."""
    samples = len(find_tensors(step.inputs)[0])
    labels = torch.arange(samples) % CLASSES
    pairs = [(step.inputs, labels)] * batches

    def loss(output: Any, _: Any) -> Any:
        return step.loss_of(output)

    def bare() -> None:
        for _ in pairs:
            step.run()

    def inspections() -> None:
        for inputs, _ in pairs:
            _ = Inspector(step.model).run_inspection(inputs, loss=step.loss_of).verdict

    def over() -> None:
        _ = Inspector(step.model).run_batches(pairs, loss=loss, progress=False).verdict

    def merged() -> None:
        with without_places():
            over()

    runs: dict[str, Callable[[], object]] = {
        "bare steps again": bare,
        "inspections": inspections,
        "merged": merged,
        "run_batches": over,
    }
    found = time_in_turns(bare, runs, rounds, step.forget_gradients)
    return [found[name].ratio("cpu") for name in RUNS]


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of: {', '.join(STEPS)}")
    parser.add_argument("--rounds", type=int, default=9, help="default: 9")
    parser.add_argument("--batches", type=int, default=8, help="default: 8")
    options = parser.parse_args(arguments)
    for unknown in set(options.steps) - set(STEPS):
        parser.error(f"unknown step {unknown!r}; there are: {', '.join(STEPS)}")
    torch.set_num_threads(1)
    print(f"{machine()}; 1 thread, {options.rounds} rounds, {load()}\n")
    print(header(["step", *RUNS]))
    for name in options.steps or USUAL:
        torch.manual_seed(0)
        print(row([name, *ratios(STEPS[name](), options.batches, options.rounds)]), flush=True)


if __name__ == "__main__":
    main()
