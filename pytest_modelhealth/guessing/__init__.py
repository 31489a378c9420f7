"""Guesses a batch that a model takes, and says how: `guess_inputs`.

What is guessed is what a person would write, and has run once through the model.
"""

from __future__ import annotations

from torch import nn

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.guessing.drawing import Candidate, Drawn
from pytest_modelhealth.guessing.guess import Guess, guess_of
from pytest_modelhealth.guessing.kinds import kinds
from pytest_modelhealth.guessing.losses import with_loss
from pytest_modelhealth.guessing.trying import Trial

__all__ = ["Candidate", "Drawn", "Guess", "guess_inputs"]


def guess_inputs(model: nn.Module) -> Guess:
    """Return a batch that the model's forward took, with how it was guessed.

    The model, its mode and all random generators are left as they were; values are drawn as torch
    would draw them next.

    Raises:
        InspectionError: `model` is no module, or nothing that was tried ran; the message says what
            was tried and what to write instead.
    """
    if not isinstance(model, nn.Module):
        raise InspectionError(
            f"a batch is guessed for a torch.nn.Module, not for {type(model).__name__}"
        )
    trial = Trial(model)
    for kind in kinds():
        if not kind.recognises(model):
            continue
        for candidate in kind.candidates(model, trial):
            outcome = trial.run(candidate)
            if outcome.error is None:
                return guess_of(with_loss(candidate, outcome.output, model, trial), trial)
    raise InspectionError(trial.why_nothing_ran())
