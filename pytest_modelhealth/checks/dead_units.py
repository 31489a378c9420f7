"""Units behind an activation function that never become active."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_modelhealth.checks.check import Check, Finding
from pytest_modelhealth.checks.evidence import called, producer
from pytest_modelhealth.report import Inconclusive, LayerRecord, Observation, Violation
from pytest_modelhealth.settings import Setting, Settings

DYING_ACTIVATIONS = frozenset(
    {"gelu", "hardshrink", "hardswish", "mish", "relu", "relu6", "silu", "softplus"}
    | {"softshrink", "threshold"}
)
"""Activations with a side on which they, and their gradient, are zero or end there."""

_NEGLIGIBLE = 2.0**-20


class DeadUnits(Check):
    """Most units of every activation are active for some sample.

    A deep plain ReLU network at its initialisation sends all samples in one direction, so that each
    unit is on for all of them or off for all: half of the units dead is no fault there.
    """

    name = "dead_units"
    summary = "Behind each activation that can die, enough units are active for some sample."
    gravity = 20
    definition = (
        "A unit (a channel, or a feature of a sequence) is dead if it never exceeds 2^-20 of the "
        "largest magnitude of its layer in any sample. The dead part of the units behind an "
        "activation function that has a flat side is at most max_dead_fraction."
    )
    source = (
        "SageMaker Debugger (over 50 % inactive) and AutoTrainer (70 % zero gradients); the limit "
        "is measured: half of the units of a healthy deep ReLU network are dead when initialised"
    )
    minimum_evidence = "min_samples samples, or tokens where units are features of a sequence"
    settings = (
        Setting(
            "max_dead_fraction",
            float,
            default=0.8,
            minimum=0.0,
            maximum=1.0,
            help="largest part of a layer's units that may be inactive for every sample (0.5 and "
            "0.7 are usual, but healthy deep ReLU networks reach 0.5 to 0.7 when initialised)",
        ),
        Setting(
            "min_samples",
            int,
            default=32,
            minimum=1,
            help="fewest samples (tokens, where units are features of a sequence) that say "
            "anything about dead units; with fewer, a dead fraction over its limit is inconclusive",
        ),
    )

    def run(self, observation: Observation, settings: Settings) -> Iterator[Finding]:
        """Yield activations with too many dead units."""
        for record in called(observation):
            if record.activation not in DYING_ACTIVATIONS or record.activations is None:
                continue
            limit = settings.limit("max_dead_fraction", record.name)
            needed = settings.limit("min_samples", record.name)
            dead, units = _dead_fraction(record), record.activations.units
            if dead is None or units is None or dead <= limit.value:
                continue
            count = f"{round(dead * len(units.alive))} of {len(units.alive)} units"
            if units.observations < needed.value:
                reason = (
                    f"{count} were inactive, but {units.observations} samples say nothing about "
                    f"dead units; give at least {needed.value} (min_samples, {needed.origin})"
                )
                yield Inconclusive(self.name, record.name, reason)
                continue
            yield Violation(
                check=self.name,
                layer=record.name,
                role="activations",
                value=dead,
                limit=limit.value,
                origin=limit.origin,
                message=f"{count} are dead: inactive for all {units.observations} samples",
                cause=_cause(record, producer(observation, record)),
            )


def _dead_fraction(record: LayerRecord) -> float | None:
    """Return the part of the units that is dead.

    Units are measured against the largest of their layer. Where all are silent, smooth activations
    (SiLU at -50 is -1e-20) still have a largest one: then the inputs tell that it is nothing.
    """
    out, given = record.activations, record.inputs
    if out is None or out.dead_fraction is None:
        return None
    silent = given is not None and out.abs_max <= _NEGLIGIBLE * given.abs_max
    return 1.0 if silent else out.dead_fraction


def _cause(record: LayerRecord, before: LayerRecord | None) -> str:
    given = record.inputs
    if given is not None and given.finite_count and given.abs_max == 0.0:
        return "all its inputs are zero: the signal died before it"
    source = "its inputs" if before is None else f"the outputs of {before.label!r}"
    if given is None or not given.finite_count:
        return f"{source} are on its flat side for every sample"
    where = f"{source} lie in [{given.min:.3g}, {given.max:.3g}], mean {given.mean:.3g}"
    bias = before.parameters.get("bias") if before is not None else None
    if bias is not None and given.std and bias.mean < -given.std:
        return f"{where}: its bias (mean {bias.mean:.3g}) holds them on the flat side"
    return f"{where}: a learning rate too high, a shifted bias or unnormalised inputs"
