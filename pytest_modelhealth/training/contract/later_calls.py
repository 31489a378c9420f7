"""A step can be called again, and keeps nothing of the call before but what it should."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.settings import Setting
from pytest_modelhealth.training.contract.step_check import StepCheck, listed

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, Stepped
    from pytest_modelhealth.settings import Settings


_LARGE = 0.05


class LaterCalls(StepCheck):
    """The second call is as good as the first."""

    name = "later_calls"
    summary = "A step can be called again, keeps no graph of the call before, and does not diverge."
    rank = 70
    role = "activations"
    definition = (
        "A violation: a later call raises; a list grows by a tensor with its graph in every call; "
        "a loss is not finite, or more than max_loss_growth times the first, on the one batch."
    )
    source = "exact; of 35 healthy steps none multiplies its loss by 3 in three calls"
    settings = (
        Setting(
            "max_loss_growth",
            float,
            default=100.0,
            minimum=1.0,
            help="largest loss of a later call of a training step on one batch, by that of the "
            "first",
            per_layer=False,
        ),
    )

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield what goes wrong after the first call."""
        root = place(observation)
        if stepped.raised:
            yield self.violation(
                root,
                f"call {stepped.raised_at} of the step raises {stepped.raised}",
                value=float(stepped.raised_at),
                cause=_why_raised(stepped.raised),
                independent=True,
            )
        if stepped.growing:
            yield self.violation(
                root,
                f"{listed(stepped.growing)} grows by a tensor with its graph in every call, which "
                "keeps the memory of every step",
                value=float(len(stepped.growing)),
                cause="a loss or an output is appended as it is: append .detach() or .item()",
                independent=True,
            )
        yield from self._course(stepped, observation, settings)

    def _course(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        limit = settings["max_loss_growth"]
        losses = [loss for loss in stepped.losses if loss is not None]
        bad = next((n for n, loss in enumerate(losses) if not math.isfinite(loss)), None)
        grown = next(
            (n for n, loss in enumerate(losses) if _grows(losses, loss, limit.value)), None
        )
        if bad is not None:
            yield self.violation(
                place(observation),
                f"the loss of call {bad + 1} is {losses[bad]}",
                value=losses[bad],
                cause="see run_inspection for the layer where it begins"
                if not bad
                else "the update before it was too large: the learning rate, a scale that was not "
                "removed, or gradients that are not clipped",
                independent=True,
            )
        elif grown is not None:
            ratio = losses[grown] / losses[0]
            yield self.violation(
                place(observation),
                f"on one batch the loss grows from {losses[0]:.4g} to {losses[grown]:.4g} by call "
                f"{grown + 1}",
                value=ratio,
                limit=limit,
                cause="the learning rate is too large, the gradient is not what it should be, or "
                "the update has the wrong sign",
                independent=True,
                severity="fail" if _is_large(stepped) else "warn",
            )


def _is_large(stepped: Stepped) -> bool:
    """Whether an update was large: a loss that starts at next to nothing may grow by little."""
    return any(size > _LARGE for p in stepped.parameters for size in p.updates if p.dimensions > 1)


def _grows(losses: list[float], loss: float, limit: float) -> bool:
    return losses[0] > 0.0 and loss > limit * losses[0]


def _why_raised(text: str) -> str:
    if "second time" in text or "inplace" in text:
        return (
            "something with its graph is carried from call to call: a hidden state, a running "
            "mean, a loss; detach() it"
        )
    if text.startswith("StopIteration"):
        return (
            "an iterator that the step reads from runs out, which cannot be put back: have the "
            "step work on the batch that it is given"
        )
    return "the step leaves something behind that the next call cannot work with"
