"""What each probe costs, as a ratio to a bare forward in evaluation mode.

Usage: ``python -m benchmarks.probes [--rounds 15] [STEP ...]``

The ratios are of processor time. A probe runs beside an inspection, whose own time is taken off:
the median of inspections without probes, in turns with those with it. In brackets is the number of
forwards that the probe took, beside the one that all share. Of a leaking twin the layer that leaks
is looked for as well. The last column holds an inspection with default settings against one with
``probes=False``, of a healthy model: nothing calls for a probe there.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.steps import STEPS, Step
from benchmarks.timing import Timing, digits, header, load, machine, row, time_in_turns
from pytest_modelhealth import HealthReport, Inspector
from pytest_modelhealth.probes import all_probes

USUAL = ("BERT-like", "ResNet-50", "example GPT", "example CNN")
PROBES = tuple(probe.name for probe in all_probes())
NONE, DEFAULT, ALL = "probes=False", "default / False", "all"


def inspect(step: Step, probes: Any) -> HealthReport:
    """Return the report of a step, with probes by name, all of them, none, or those by default."""
    inspector = Inspector(step.model)
    return inspector.run_inspection(step.inputs, step.target, loss=step.loss, probes=probes)


def forward(step: Step) -> None:
    """Run the model once in evaluation mode, with gradients on, as probes do."""
    step.model.eval()
    _ = step.model(**step.inputs) if step.takes_keywords else step.model(step.inputs)
    step.model.train()


class Mixed(nn.Module):
    """A model whose samples see each other: a trace of their mean is added to the outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        made = self.model(*args, **kwargs)
        if isinstance(made, Tensor):
            return made + 0.01 * made.mean(0, keepdim=True)
        made.logits = made.logits + 0.01 * made.logits.mean(0, keepdim=True)
        return made


def measure(step: Step, asked: Mapping[str, Any], rounds: int) -> dict[str, Timing]:
    """Return the timings of inspections with these probes and with none, against a forward."""
    runs: dict[str, Callable[[], object]] = {
        name: partial(inspect, step, probes) for name, probes in {NONE: False, **asked}.items()
    }
    return time_in_turns(partial(forward, step), runs, rounds, step.forget_gradients)


def beyond(timing: Timing, without: Timing) -> str:
    """Return how many forwards an inspection takes longer than one without probes, in medians."""
    if timing.error or without.error:
        return timing.error or without.error
    more = statistics.median(timing.ratios("cpu")) - statistics.median(without.ratios("cpu"))
    return digits(more)


def forwards(step: Step, probe: str | None = None) -> int:
    """Return how many forwards a probe takes, or all of them with the one that they share."""
    probed = inspect(step, True if probe is None else probe).observation.probes
    return probed.forwards if probe is None else probed[probe].forwards


def cells(step: Step, rounds: int) -> list[str]:
    """Return the columns of a healthy step: each probe, all, and the default against none."""
    asked = {name: name for name in PROBES} | {ALL: True}
    timings = measure(step, asked, rounds)
    found = [f"{beyond(timings[n], timings[NONE])} ({forwards(step, n)})" for n in PROBES]
    found.append(f"{beyond(timings[ALL], timings[NONE])} ({forwards(step)})")
    usual = {DEFAULT: partial(inspect, step, None)}
    beside = time_in_turns(partial(inspect, step, False), usual, rounds, step.forget_gradients)
    return [*found, beside[DEFAULT].ratio("cpu")]


def leaking(step: Step, rounds: int) -> str:
    """Return the cost of finding the leak of a twin of a step, and where."""
    twin = Step(Mixed(step.model), step.inputs, step.target, step.loss)
    probe = "sample_independence"
    timings = measure(twin, {probe: probe}, rounds)
    cost = f"{beyond(timings[probe], timings[NONE])} ({forwards(twin, probe)})"
    found = {violation.layer or "the model" for violation in inspect(twin, probe).violations}
    return f"{cost}, at {', '.join(sorted(found)) or 'no layer'}"


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of: {', '.join(STEPS)}")
    parser.add_argument(
        "--rounds", type=int, default=15, help="default: 15; what is dear runs in every fifth"
    )
    options = parser.parse_args(arguments)
    for unknown in set(options.steps) - set(STEPS):
        parser.error(f"unknown step {unknown!r}; there are: {', '.join(STEPS)}")
    torch.set_num_threads(1)
    print(f"{machine()}; 1 thread, {options.rounds} rounds, {load()}\n")
    print(header(["step", *PROBES, ALL, DEFAULT, "sample_independence of a leaking twin"]))
    for name in options.steps or USUAL:
        torch.manual_seed(0)
        step = STEPS[name]()
        healthy = cells(step, options.rounds)
        print(row([name, *healthy, leaking(step, options.rounds)]), flush=True)


if __name__ == "__main__":
    main()
