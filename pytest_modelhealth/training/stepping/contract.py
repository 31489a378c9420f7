"""Calls a training step a few times and takes down what it did, as a `Stepped`."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import Selection
from pytest_modelhealth.report import Observation, Stepped
from pytest_modelhealth.training.stepping.calls import call_step, layer_modes
from pytest_modelhealth.training.stepping.interventions import (
    half_influence,
    loss_slope,
    overfitted,
    resumed,
    sets_a_seed,
    slope_without_gradient,
)
from pytest_modelhealth.training.stepping.optimizers import (
    frozen_in_vain,
    stepped_optimizers,
    stepped_parameters,
    strays,
    untied_weights,
)
from pytest_modelhealth.training.stepping.session import Session, TrainingStep, loss_in


def run_contract(
    model: nn.Module,
    given: TrainingStep,
    selection: Selection,
    *,
    calls: int = 3,
    overfit: int | None = None,
    resume: bool = False,
) -> Observation:
    """Return what the step did, and the layers of its first call; all else is as it was.

    Args:
        model: the model.
        given: the step, and what it works on.
        selection: which roles of which layers to observe in the first call.
        calls: how often the step is called from the beginning.
        overfit: how often on the one batch; ``None`` not at all.
        resume: whether it has to resume from its saved state.

    Raises:
        InspectionError: an argument is wrong, or the step returns no loss.
        Exception: whatever the first call raises, untouched.
    """
    given.require_sound()
    numbers: list[tuple[str, object, int]] = [("calls", calls, 1)]
    numbers += [] if overfit is None else [("overfit", overfit, 2)]
    for name, value, least in numbers:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InspectionError(f"{name} must be a whole number from {least} on, not {value!r}")
    session = Session(model, given, selection)
    with session.open():
        untied = untied_weights(model)
        made = call_step(session, calls)
        first = made.seen[0]
        stepped = Stepped(
            losses=tuple(loss_in(seen.result) for seen in made.seen),
            parameters=tuple(stepped_parameters(session, made)),
            optimizers=tuple(stepped_optimizers(session, made)),
            modes=tuple(layer_modes(session, made)),
            samples=session.samples,
            runs_whole=session.samples in first.sizes,
            passes=len(first.passes),
            # the step itself brings the model to evaluation mode, and not for a validation
            switched=first.began and first.modes.get(model) == {(False, True)},
            strays=tuple(strays(session, made)),
            switches=tuple(frozen_in_vain(model)),
            untied=untied,
            slope=loss_slope(session, first),
            unlearned=slope_without_gradient(session, made.seen),
            halves=half_influence(session, first, len(made.seen)),
            seeds=made.ends_at is not None and sets_a_seed(session, made.ends_at),
            overfit=None if overfit is None else overfitted(session, overfit),
            resumed=resumed(session) if resume else "",
            **made.facts,
        )
    assert made.observation is not None
    notes = (
        f"the step reads an iterator from around it ({kind}), which cannot be put back: it has "
        f"moved on by what {session.called} calls take; give the batch as an argument"
        for kind in dict.fromkeys(session.reached.iterators)
    )
    return replace(made.observation, stepped=stepped, notes=(*made.observation.notes, *notes))
