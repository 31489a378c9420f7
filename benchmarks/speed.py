"""What an inspection costs, as a ratio to the bare training step.

Usage: ``python -m benchmarks.speed [--threads 2] [--rounds 15] [NAME ...]``

Every contender runs once a round, in one process, so that a slow moment of the machine hits all of
them; a ratio is the median over rounds of contender / bare, its spread the quartiles.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor

from benchmarks.steps import STEPS, Step
from pytest_modelhealth import Inspector, __version__

Contender = Callable[[Step], None]


def bare(step: Step) -> None:
    """Run the step as a training loop does."""
    step.run()


def _with_hooks(step: Step, see: Callable[[Tensor], object]) -> None:
    """Run the step with `see` on each leaf module's output, its gradient and every parameter's."""

    def on_gradient(gradient: Tensor) -> None:
        see(gradient)

    def after(module: object, arguments: object, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            see(output.detach())
            if output.requires_grad:
                output.register_hook(on_gradient)

    with ExitStack() as stack:
        for module in step.model.modules():
            if not list(module.children()):
                stack.callback(module.register_forward_hook(after).remove)
        step.run()
    for parameter in step.model.parameters():
        see(parameter.detach())
        if parameter.grad is not None:
            see(parameter.grad)


def hooks_only(step: Step) -> None:
    """See every tensor and do nothing with it."""
    _with_hooks(step, lambda tensor: None)


def read_once(step: Step) -> None:
    """Sum every tensor: what reading each byte once costs, the bound for any monitor."""
    _with_hooks(step, torch.sum)


def eight_passes(step: Step) -> None:
    """Do what a plain monitor does: one torch call a statistic."""

    def see(t: Tensor) -> None:
        _ = t.isnan().any().item(), t.isinf().any().item(), t.mean().item(), t.std().item()
        _ = t.min().item(), t.max().item(), t.norm().item(), (t == 0).sum().item()

    _with_hooks(step, see)


def modelhealth(step: Step) -> None:
    """Inspect everything with complete statistics, histograms and unit liveliness."""
    Inspector(step.model).run_inspection(step.inputs, step.target, loss=_loss(step))


def _loss(step: Step) -> Callable[..., Tensor] | None:
    if step.loss is None or step.target is not None:
        return step.loss
    loss = step.loss
    return lambda output: loss(output, None)


CONTENDERS: dict[str, Contender] = {
    "bare": bare,
    "hooks only": hooks_only,
    "read once": read_once,
    "modelhealth": modelhealth,
    "eight passes": eight_passes,
}


def measure(step: Step, rounds: int) -> dict[str, list[float]]:
    """Return each contender's seconds, one a round."""
    for contender in CONTENDERS.values():
        contender(step)
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, contender in CONTENDERS.items():
            start = time.perf_counter()
            contender(step)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: list[float], base: list[float]) -> str:
    """Return the median ratio and its quartiles."""
    low, middle, high = statistics.quantiles(
        [a / b for a, b in zip(seconds, base, strict=True)], n=4
    )
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*STEPS, []], help="steps; default: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"pytest-modelhealth {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.processor() or platform.machine()}, "
        f"{options.threads} threads, {options.rounds} rounds\n"
    )
    others = [name for name in CONTENDERS if name != "bare"]
    print("| step | bare ms | " + " | ".join(others) + " |")
    print("| --- | --- |" + " --- |" * len(others))
    for name in options.names or STEPS:
        torch.manual_seed(0)
        seconds = measure(STEPS[name](), options.rounds)
        ratios = [ratio(seconds[other], seconds["bare"]) for other in others]
        median = statistics.median(seconds["bare"]) * 1e3
        print(f"| {name} | {median:.1f} | " + " | ".join(ratios) + " |", flush=True)


if __name__ == "__main__":
    main()
