"""Several losses that share layers, none of which drowns the others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.check import ALWAYS, Check, Finding
from pytest_modelhealth.checks.facts import completed
from pytest_modelhealth.settings import Setting, Settings

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, TaskGradients


class TaskBalance(Check):
    """No task's gradient on the layers it shares is negligible beside another's.

    As GradNorm does, gradients are compared at the last layer that the tasks share.
    """

    name = "task_balance"
    summary = "No task's gradient drowns that of another on a layer that they share."
    rank = 38
    role = "parameter_gradients"
    definition = (
        "With several named losses, the L2 norms of the gradients of each two of them are compared "
        "at the last layer that both reach; the larger is at most max_task_ratio times the "
        "smaller (only warned of up to 10,000 times, unless the limit was set). A loss that is not "
        "zero has a gradient that is not, somewhere."
    )
    source = (
        "Chen et al. 2018, GradNorm (norms at the last shared layer); the limit is measured on two "
        "tasks on scikit-learn's digits: from a ratio of 44 on the weaker learns nothing more"
    )
    minimum_evidence = "two named losses that are not zero, and one backward pass"
    settings = (
        Setting(
            "max_task_ratio",
            float,
            default=100.0,
            minimum=1.0,
            help="largest ratio of the gradient norms of two tasks at the last layer they share",
        ),
    )

    def run(self, observation: Observation, settings: Settings) -> Iterator[Finding]:
        """Yield each pair of tasks of which one drowns the other."""
        silent = [task for task in observation.tasks if _asks_nothing(task)]
        for task in silent:
            yield from _silent(task, observation)
        for a, b in combinations(observation.tasks, 2):
            if any(task.loss != 0.0 for task in (a, b) if task in silent):
                continue
            layer = _last_shared(a, b, observation)
            if layer is None:
                continue
            strong, weak = sorted((a, b), key=lambda t: t.gradient_norms[layer], reverse=True)
            high, low = strong.gradient_norms[layer], weak.gradient_norms[layer]
            limit = settings.limit("max_task_ratio", layer)
            if not (math.isfinite(high) and high > limit.value * low):
                continue
            if weak.loss == 0.0:
                reason = (
                    f"the loss of task {weak.name!r} is zero: it asks for nothing on this batch"
                )
                yield self.inconclusive(observation.layers[layer], reason)
                continue
            ratio = high / low if low else math.inf
            may_be_meant = limit.origin == "default" and ratio <= _MOST_BY_WEIGHT
            yield self.violation(
                observation.layers[layer],
                f"task {strong.name!r} has {ratio:.3g} times the gradient of task "
                f"{weak.name!r} here, where the two meet (norms {high:.3g} and {low:.3g})",
                value=ratio,
                limit=limit,
                cause=f"{_why_apart(strong, weak)}: "
                f"weight them, for example {weak.name!r} by {min(ratio, 1e9):.0g}, or normalise "
                "the targets" + ("; a small weight may be meant so" if may_be_meant else ""),
                independent=True,
                severity="warn" if may_be_meant else "fail",
            )


def _asks_nothing(task: TaskGradients) -> bool:
    return bool(task.gradient_norms) and not any(task.gradient_norms.values())


def _silent(task: TaskGradients, observation: Observation) -> Iterator[Finding]:
    """Yield a task whose loss is something, and whose gradient is nothing at every layer."""
    reached = [observation.layers[n] for n in task.gradient_norms if n in observation.layers]
    if task.loss == 0.0 or not math.isfinite(task.loss) or not reached:
        return
    yield TaskBalance.violation(
        max(reached, key=completed),
        f"task {task.name!r} has a loss of {task.loss:.3g} and asks nothing of any of the "
        f"{len(reached)} layers that it reaches: its gradient is exactly zero",
        value=0.0,
        limit=ALWAYS,
        cause="it is flat here: rounded, clamped, chosen by an index, or multiplied by zero beside "
        "a constant",
    )


def _why_apart(strong: TaskGradients, weak: TaskGradients) -> str:
    losses = f"{strong.loss:.3g} and {weak.loss:.3g}"
    if abs(strong.loss) > _APART * abs(weak.loss):
        return f"their losses differ in scale ({losses})"
    return f"their losses are {losses}, and what lies between them and this layer differs in scale"


_APART = 10.0
_MOST_BY_WEIGHT = 1e4
"""Auxiliary terms are given weights down to 1e-3 on purpose; units and sums go beyond."""


def _last_shared(a: TaskGradients, b: TaskGradients, observation: Observation) -> str | None:
    """Return the layer, of those that both tasks reach, that completed last."""
    shared = [name for name in a.gradient_norms if name in b.gradient_norms]
    known = [observation.layers[name] for name in shared if name in observation.layers]
    return max(known, key=completed).name if known else None
