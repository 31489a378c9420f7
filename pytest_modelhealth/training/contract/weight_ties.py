"""Weights that are tied by configuration are one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.training.contract.step_check import StepCheck

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, Stepped
    from pytest_modelhealth.settings import Settings


class WeightTies(StepCheck):
    """What a configuration ties is tied in the model."""

    name = "weight_ties"
    summary = "Weights that a configuration ties are one tensor in the model."
    rank = 73
    definition = (
        "A module's config says tie_word_embeddings, and its input and output embeddings, of one "
        "shape, do not share their memory."
    )
    source = "exact: the attribute of the transformers library"

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield a tie that is lost."""
        if not stepped.untied:
            return
        out, into = stepped.untied
        layer, _, own = out.rpartition(".")
        yield self.violation(
            place(observation, layer),
            f"{out or 'the output embedding'} is tied to {into or 'the input embedding'} by the "
            "configuration (tie_word_embeddings), and is a tensor of its own in the model",
            value=0.0,
            tensor=own,
            cause="one of them was replaced, copied or loaded by assignment after tying: call "
            "model.tie_weights()",
            independent=True,
        )
