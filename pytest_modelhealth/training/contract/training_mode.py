"""A training step runs the model in training mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.settings import Severity
from pytest_modelhealth.training.contract.step_check import StepCheck, listed

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerMode, Observation, Stepped
    from pytest_modelhealth.settings import Settings


class TrainingMode(StepCheck):
    """Dropouts drop and batch normalisations normalise by the batch while the model learns."""

    name = "training_mode"
    summary = "A training step runs dropouts and trainable batch normalisations in training mode."
    rank = 65
    role = "activations"
    definition = (
        "With gradients on, a Dropout, or a batch normalisation with trainable weights, runs in "
        "evaluation mode: a violation if the whole model is in that mode, in any call; a warning "
        "if a part is that has parameters which an optimizer moves. Frozen parts may be."
    )
    source = "exact; a frozen backbone, and normalisations that are frozen, pass"

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield what runs in evaluation mode."""
        affected = [mode for mode in stepped.modes if _is_affected(mode)]
        if not affected:
            return
        root = next((mode for mode in stepped.modes if mode.layer == ""), None)
        whole = _outermost(stepped) if root is None else [root]
        names = [mode.layer for mode in affected]
        call = _first_call(affected)
        severity: Severity = "warn" if stepped.switched and call == 1 else "fail"
        since = f" from call {call} on" if call > 1 else ""
        if whole and all(any(t is False for t in mode.training) for mode in whole):
            yield self.violation(
                place(observation),
                f"the model trains in evaluation mode{since}: {_effects(affected)} "
                f"({listed(names)})",
                value=float(len(affected)),
                cause="model.train() is missing: after a validation, after from_pretrained, which "
                "returns a model in evaluation mode, or before the first step",
                affected=names[1:],
                independent=True,
                severity=severity,
            )
            return
        part = _part(affected, stepped)
        if part:
            yield self.violation(
                place(observation, part[0].layer),
                f"a part of the model trains in evaluation mode{since}: "
                f"{_effects(part)} ({listed([mode.layer for mode in part])})",
                value=float(len(part)),
                cause="eval() was called on this part, which an optimizer moves: call train() "
                "again, or freeze it",
                severity="warn",
            )


def _is_affected(mode: LayerMode) -> bool:
    ran_so = any(training is False for training in mode.training)
    return ran_so and (mode.kind == "dropout" or (mode.kind == "batch_norm" and mode.trainable))


def _outermost(stepped: Stepped) -> list[LayerMode]:
    """Return the layers that ran and lie in no other one that did."""
    names = {mode.layer for mode in stepped.modes}
    return [
        mode
        for mode in stepped.modes
        if not any(mode.layer.startswith(f"{name}.") for name in names)
    ]


def _first_call(affected: list[LayerMode]) -> int:
    return min(mode.training.index(False) for mode in affected) + 1


def _effects(affected: list[LayerMode]) -> str:
    kinds = {mode.kind for mode in affected}
    said = {
        "dropout": "nothing is dropped",
        "batch_norm": "batch normalisation takes its running statistics",
    }
    return " and ".join(said[kind] for kind in sorted(kinds, reverse=True))


def _part(affected: list[LayerMode], stepped: Stepped) -> list[LayerMode]:
    """Return those whose own part of the model an optimizer moves."""
    moved = {p.layer for p in stepped.parameters if any(p.updates)}
    found = []
    for mode in affected:
        around = mode.layer.rpartition(".")[0]
        if any(layer == around or layer.startswith(f"{around}.") for layer in moved if around):
            found.append(mode)
    return found
