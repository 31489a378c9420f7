"""Calls a training step a few times and takes down what it did, as a `Stepped`."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import Selection
from pytest_modelhealth.report import Observation, Stepped
from pytest_modelhealth.training.stepping.calls import (
    call_step,
    layer_modes,
    overfitted,
    resumed,
    switches_on_purpose,
)
from pytest_modelhealth.training.stepping.interventions import (
    half_influence,
    left_over,
    loss_slope,
    slope_without_gradient,
)
from pytest_modelhealth.training.stepping.optimizers import (
    climbs,
    copies,
    frozen_in_vain,
    mixed,
    moved_copies,
    stepped_optimizers,
    stepped_parameters,
    strays,
    untied_weights,
)
from pytest_modelhealth.training.stepping.session import Session, TrainingStep, loss_in


class Asked(NamedTuple):
    """What is asked of a step.

    Args:
        calls: how often it is called from the beginning.
        overfit: how often on the one batch; ``None`` not at all.
        resume: whether it has to resume from its saved state.
    """

    calls: int = 3
    overfit: int | None = None
    resume: bool = False

    def require_sound(self) -> None:
        """Do nothing if all of it is of the right type.

        Raises:
            InspectionError: something is not; the message says what is expected.
        """
        overfit = 2 if self.overfit is None else self.overfit
        numbers: list[tuple[str, object, int]] = [
            ("calls", self.calls, 1),
            ("overfit", overfit, 2),
        ]
        for name, value, least in numbers:
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InspectionError(
                    f"{name} must be a whole number from {least} on, not {value!r}"
                )


def run_contract(
    model: nn.Module, given: TrainingStep, asked: Asked, selection: Selection
) -> Observation:
    """Return what the step did, and the layers of its first call; all else is as it was.

    Raises:
        InspectionError: the step returns no loss.
        Exception: whatever the first call raises, untouched.
    """
    start = time.perf_counter()
    given.require_sound()
    asked.require_sound()
    session = Session(model, given, selection)
    with session.open():
        untied, copied = untied_weights(model), copies(model)
        made = call_step(session, asked.calls)
        first = made.seen[0]
        optimizers = tuple(stepped_optimizers(session, made))
        parameters = tuple(stepped_parameters(session, made))
        modes = tuple(layer_modes(session, made))
        left = left_over(session, first) if any(seen.left_over for seen in made.seen[:2]) else None
        slope = loss_slope(session, first)
        unlearned = slope_without_gradient(session, made.seen)
        halves, why_no_halves = half_influence(session, first, len(made.seen))
        seeds = _sets_a_seed(session, made.ends_at)
        best = None if asked.overfit is None else overfitted(session, asked.overfit)
        differs = resumed(session) if asked.resume else None
    stepped = Stepped(
        step=given.name,
        losses=tuple(loss_in(seen.result) for seen in made.seen),
        parameters=parameters,
        optimizers=optimizers,
        modes=modes,
        slope=slope,
        halves=halves,
        why_no_halves=why_no_halves,
        left_over=left,
        unlearned=unlearned,
        passes=len(first.passes),
        mixed=mixed(session, first),
        climbs=climbs(session, made),
        switched=switches_on_purpose(first),
        seeds=seeds,
        strays=tuple(strays(session, made)),
        switches=tuple(frozen_in_vain(model)),
        untied=untied,
        copies=moved_copies(copied, model, made.seen),
        overfit=best,
        resumed=differs,
        calls=session.called,
        seconds=time.perf_counter() - start,
        **made.facts,
    )
    assert made.observation is not None
    notes = (
        f"the step reads an iterator from around it ({kind}), which cannot be put back: it has "
        f"moved on by what {session.called} calls take; give the batch as an argument"
        for kind in dict.fromkeys(session.snapshot.iterators)
    )
    return replace(made.observation, stepped=stepped, notes=(*made.observation.notes, *notes))


def _sets_a_seed(session: Session, end: Tensor | None) -> bool:
    """Whether a call leaves the random numbers there from another start, too: it sets a seed.

    A step that draws in its first call only leaves them as they are in later ones.
    """
    if end is None:
        return False
    session.rewind()
    torch.rand(1)
    try:
        session.call()
    except Exception:  # noqa: BLE001 - the user's
        return False
    return torch.equal(torch.get_rng_state(), end)
