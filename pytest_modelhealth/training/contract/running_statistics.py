"""Running statistics follow the batches that a model is trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.settings import Severity
from pytest_modelhealth.training.contract.step_check import StepCheck, listed

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerMode, Observation, Stepped
    from pytest_modelhealth.settings import Settings


class RunningStatistics(StepCheck):
    """Batch normalisations that learn keep statistics that move."""

    name = "running_statistics"
    summary = "Running statistics of a batch normalisation that learns move in training."
    rank = 72
    role = "buffers"
    definition = (
        "A batch normalisation with trainable weights runs in training mode with gradients on, and "
        "its running mean is the same, bit for bit, after all calls. A momentum of more than 0.5 "
        "is warned of, and so are statistics that move although the weights are frozen, or by a "
        "forward without gradients."
    )
    source = "exact: a momentum of 0, or statistics that are put back"

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield the normalisations whose statistics do not follow the batches."""
        for odd in _ODD:
            names = [mode.layer for mode in stepped.modes if odd.applies(mode)]
            if names:
                yield self.violation(
                    place(observation, names[0]),
                    f"the running statistics of {listed(names)} {odd.what}",
                    value=float(len(names)),
                    tensor="running_mean",
                    cause=odd.cause,
                    affected=names[1:],
                    independent=odd.severity == "fail",
                    severity=odd.severity,
                )


class _Odd(NamedTuple):
    applies: Callable[[LayerMode], bool]
    what: str
    cause: str
    severity: Severity = "warn"


_ODD = (
    _Odd(
        lambda mode: mode.still and mode.trainable,
        "do not move in training, so that evaluation normalises by what they were at the start",
        "momentum=0 (torch's momentum is the share of the new batch: 0.1 is usual), or buffers "
        "that are written back",
        "fail",
    ),
    _Odd(
        lambda mode: mode.drifts,
        "move, although their normalisations are frozen",
        "requires_grad_(False) leaves statistics alone: call eval() on the frozen part too",
    ),
    _Odd(
        lambda mode: mode.unseen and mode.kind == "batch_norm",
        "also move in a forward without gradients, which runs in training mode",
        "a forward for logging, counting or a look ahead: call eval() around it",
    ),
    _Odd(
        lambda mode: mode.hasty and mode.trainable,
        "are made of the latest batch by more than half",
        "torch's momentum is the share of the new batch, 0.1 as a rule: 0.9 or 0.99 is how other "
        "frameworks write 0.1 or 0.01",
    ),
)
