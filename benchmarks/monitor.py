"""What the training monitor costs, as a ratio to the bare training step.

Usage: ``python -m benchmarks.monitor [--threads 1] [--rounds 15] [STEP ...]``

A step is zero_grad, forward, loss, backward and AdamW. Copies of a model are trained in turns, in
one process, ten steps a turn, as a step is slower after another that freed much: one bare, one with
every step watched, one with every tenth, and one with a monitor that watches none of the steps that
are timed. A ratio is the median over rounds of the copy's steps to the bare ones, its spread the
quartiles. An inspection and ``run_step``, the whole contract of a step in five calls or more, are
timed against a single step.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed import bare_milliseconds
from benchmarks.steps import STEPS, Step
from benchmarks.timing import Timing, header, load, machine, row, time_in_turns
from pytest_modelhealth import Inspector

NEVER, TURN = 10**9, 10
USUAL = ("BERT-like", "GPT-2-like", "MLP", "small MLP")


def mlp() -> Step:
    """Five linear layers of 512 with ReLU, batch 256."""
    widths = (784, 512, 512, 512, 512, 10)
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    target = torch.randint(0, 10, (256,))
    return Step(nn.Sequential(*layers[:-1]), torch.randn(256, 784), target, F.cross_entropy)


def small_mlp() -> Step:
    """Three linear layers of 32 with ReLU, batch 32."""
    layers = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)]
    target = torch.randint(0, 4, (32,))
    return Step(nn.Sequential(*layers), torch.randn(32, 16), target, F.cross_entropy)


ALL: dict[str, Callable[[], Step]] = {**STEPS, "MLP": mlp, "small MLP": small_mlp}


class Training:
    """A copy of a step's model, with an optimizer of its own."""

    def __init__(self, step: Step) -> None:
        self.step = copy.deepcopy(step)
        self.optimizer = torch.optim.AdamW(self.step.model.parameters(), lr=1e-6)

    def run(self) -> Tensor:
        """Run one step of the training."""
        step = self.step
        self.optimizer.zero_grad()
        output = step.model(**step.inputs) if step.takes_keywords else step.model(step.inputs)
        loss = step.loss_of(output)
        loss.backward()
        self.optimizer.step()
        return loss


def monitored(step: Step, every: int, stack: ExitStack) -> Callable[[], object]:
    """Return what runs a step under a monitor, which ends with `stack`."""
    training = Training(step)
    monitor = stack.enter_context(Inspector(training.step.model).monitor(every))
    return lambda: monitor.step_end(loss=training.run())


def repeated(run: Callable[[], object]) -> Callable[[], None]:
    """Return what runs a turn of steps."""

    def turn() -> None:
        for _ in range(TURN):
            run()

    return turn


def inspected(step: Step) -> Callable[[], object]:
    """Return what runs a step whose forward and backward are an inspection's."""
    training = Training(step)
    training.run()
    model = training.step.model
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    loss = None if step.loss is None else lambda output, *_: training.step.loss_of(output)

    def run() -> None:
        training.optimizer.zero_grad()
        Inspector(model).run_inspection(training.step.inputs, training.step.target, loss=loss)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        training.optimizer.step()

    return run


def contract(step: Step) -> Callable[[], object]:
    """Return what runs the contract of a step: all of its calls, watched and changed."""
    training = Training(step)

    def one(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> Tensor:
        optimizer.zero_grad()
        output = model(**inputs) if step.takes_keywords else model(inputs)
        loss = training.step.loss_of(output)
        loss.backward()
        optimizer.step()
        return loss

    inspector = Inspector(training.step.model)
    return lambda: inspector.run_step(one, training.optimizer, training.step.inputs)


def measure(name: str, rounds: int) -> dict[str, Timing]:
    """Return the timings of each copy on the step of this name."""
    torch.manual_seed(0)
    step = ALL[name]()
    step.model.train()
    with ExitStack() as stack:
        ways = {"watched": 1, "every tenth": TURN, "not watched": NEVER}
        turns = {name: repeated(monitored(step, n, stack)) for name, n in ways.items()}
        others = {"inspected": inspected(step), "run_step": contract(step)}
        bare = Training(step).run
        timed = time_in_turns(repeated(bare), turns, rounds)
        return timed | time_in_turns(bare, others, rounds)


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "steps",
        nargs="*",
        metavar="STEP",
        help=f"any of: {', '.join(ALL)}; default: {', '.join(USUAL)}",
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch; default: 1")
    parser.add_argument("--rounds", type=int, default=15, help="default: 15")
    options = parser.parse_args(arguments)
    for unknown in set(options.steps) - set(ALL):
        parser.error(f"unknown step {unknown!r}; there are: {', '.join(ALL)}")
    torch.set_num_threads(options.threads)
    print(f"{machine()}; {options.threads} threads, {options.rounds} rounds, {load()}\n")
    for clock, what in (("wall", "on the clock"), ("cpu", "of all cores")):
        print(f"Time {what}, as a ratio to the bare step: median (quartiles)\n")
        if clock == "wall":
            timings = {name: measure(name, options.rounds) for name in options.steps or USUAL}
        print(header(["step", "bare ms", *next(iter(timings.values()))]))
        for name, timed in timings.items():
            ratios = [timing.ratio(clock) for timing in timed.values()]
            one = {"inspected": timed["inspected"]}  # the others were timed in turns of many steps
            print(row([name, bare_milliseconds(one), *ratios]))
        print()


if __name__ == "__main__":
    main()
