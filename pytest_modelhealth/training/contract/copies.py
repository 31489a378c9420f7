"""Checks of tied weights, learning copies and the settings of the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.report import Stepped, SteppedOptimizer
from pytest_modelhealth.settings import Settings, Severity
from pytest_modelhealth.training.contract.step_check import StepCheck, listed


class WeightTies(StepCheck):
    """What a configuration ties is tied in the model."""

    name = "weight_ties"
    summary = "Weights that a configuration ties are one tensor in the model."
    rank = 73

    def judge(self, stepped: Stepped, settings: Settings) -> Iterator[Finding]:
        """Yield a tie that is lost."""
        if not stepped.untied:
            return
        out, into = stepped.untied
        layer, _, own = out.rpartition(".")
        yield self.broken(
            f"{out or 'the output embedding'} is tied to {into or 'the input embedding'} by the "
            "configuration (tie_word_embeddings), and is a tensor of its own in the model",
            "one of them was replaced, copied or loaded by assignment after tying: call "
            "model.tie_weights()",
            layer=layer,
            tensor=own,
        )


class LearningCopies(StepCheck):
    """Targets and teachers do not learn by themselves."""

    name = "learning_copies"
    summary = (
        "A target, teacher or moving average that starts as a copy does not learn by gradient."
    )
    rank = 74
    severity: ClassVar[Severity] = "warn"

    def judge(self, stepped: Stepped, settings: Settings) -> Iterator[Finding]:
        """Yield the copies that learn."""
        for name, other in stepped.copies:
            yield self.broken(
                f"{name!r} starts as a copy of {other!r}, and an optimizer moves it",
                "a slow copy is updated from the other's weights under no_grad: freeze it by "
                "requires_grad_(False) and leave it out of the optimizer",
                layer=name,
                warns=True,
            )


_SPREAD = 1e-5
_Odd = tuple[bool, str, str]
"""Whether it fails, what is odd, and the likely cause."""


class OptimizerSettings(StepCheck):
    """Options that are legal and in no recipe."""

    name = "optimizer_settings"
    summary = "Options of an optimizer and of a step are ones that a recipe has."
    rank = 71

    def judge(self, stepped: Stepped, settings: Settings) -> Iterator[Finding]:
        """Yield what is set oddly."""
        odd = [one for optimizer in stepped.optimizers for one in _of_optimizer(optimizer)]
        for fails, what, cause in (*odd, *_of_step(stepped)):
            yield self.broken(
                what, cause, value=1.0, severity="fail" if fails else "warn", independent=fails
            )


def _of_optimizer(optimizer: SteppedOptimizer) -> Iterator[_Odd]:
    kind, betas = optimizer.type_name, optimizer.betas
    if len(betas) > 1 and betas[0] > betas[1]:
        what = f"the betas of {kind} are {betas[0]:g} and {betas[1]:g}: the average of the "
        what += "gradient is slower than that of its square"
        yield True, what, "the two are the wrong way round"
    if "constant" in optimizer.traits:
        what = f"the closure of {kind} returns the very same loss at every evaluation"
        yield True, what, "the loss is computed once, outside of the closure"
    if optimizer.spread < _SPREAD:
        what = f"the learning rates of the groups of {kind} differ by {1.0 / optimizer.spread:.2g}"
        yield False, what, "a decay by layer that is applied to each parameter, or other units"
    if optimizer.frozen_groups:
        what = f"{kind} has {optimizer.frozen_groups} groups in which every parameter is frozen"
        cause = "requires_grad_(True) is missing after another stage; what is frozen needs no group"
        yield False, what, cause


def _of_step(stepped: Stepped) -> Iterator[_Odd]:
    if stepped.switches:
        what = f"{listed(stepped.switches)} has an attribute requires_grad that freezes nothing: "
        what += "its parameters are trained"
        yield True, what, "module.requires_grad = False is no setting; call requires_grad_(False)"
    if stepped.seeds:
        what = "every call draws the very same random numbers: the same units are dropped, the "
        yield True, what + "same noise is added", "a seed is set in the step"
    if stepped.idle_schedules:
        what = f"no call advances the {listed(stepped.idle_schedules)} that restore names"
        yield False, what, "scheduler.step() is missing, or another schedule is made in the step"
    shared = [p.name for p in stepped.parameters if p.shared]
    if shared:
        what = f"several optimizers step {len(shared)} parameters: {listed(shared)}"
        yield False, what, "an optimizer was made of the whole model in place of a part"
