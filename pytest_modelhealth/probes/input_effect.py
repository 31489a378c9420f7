"""Inputs have an effect on the output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.probes.endings import Found, NotApplicableError
from pytest_modelhealth.probes.probe import Probe

if TYPE_CHECKING:
    from pytest_modelhealth.probes.intervening.running import Runs

CHANGED = "each input by itself, by that of other samples"
NO_EFFECT = "has no effect on the output"


class InputEffect(Probe):
    """An input that the output does not depend on is a note, never a violation.

    A head of zeros, a gate that has not opened, an id for a log and a mask that nothing needs
    look the same.
    """

    name = "input_effect"
    summary = "Every input has an effect on the output; one without is a note."
    rank = 44
    severity = "warn"
    role = "inputs"

    def probe(self, runs: Runs) -> Found:
        """Replace one input after the other."""
        from pytest_modelhealth.probes.intervening.batches import (
            are_equal,
            named_inputs,
            replaced,
            samples_in,
        )

        base = runs.base
        if not base.outputs:
            raise NotApplicableError("the model returns no tensor on which an input could show")
        samples = samples_in(runs)
        if samples is None or samples.number < 2:
            raise NotApplicableError(
                "the batch has one sample, or its tensors have no dimension of samples in common, "
                "so that no input can be replaced by that of another sample"
            )
        notes, judged = [], False
        for number, name in enumerate(named_inputs(runs)):
            batch = replaced(runs, number, samples)
            if batch is None:
                continue
            ran = runs.forward(batch)
            judged = judged or not ran.error
            if ran.error:
                notes.append(f"with input {name!r} of other samples the model raises {ran.error}")
            elif are_equal(base.outputs, ran.outputs):
                notes.append(f"input {name!r} {NO_EFFECT}")
        if not judged:
            why = "; ".join(notes) or "all samples of the batch are equal"
            raise NotApplicableError(f"no input could be replaced: {why}", notes=tuple(notes))
        return Found(CHANGED, notes=tuple(notes))
