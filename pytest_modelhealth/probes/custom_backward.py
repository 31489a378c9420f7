"""Custom functions of autograd: their backward gives the slope of their forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.facts import at, place
from pytest_modelhealth.probes.parameter_effect import without_gradient
from pytest_modelhealth.probes.probe import Evidence, Probe
from pytest_modelhealth.settings import Setting, Settings

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, Parting, Violation


class CustomBackward(Probe):
    """What a custom ``backward`` returns is the slope of its ``forward``.

    What looks like a design is a note where the forward says so (the identity, or flat), and a
    warning where nothing does.
    """

    name = "custom_backward"
    summary = "The backward of a custom autograd.Function gives the slope of its forward."
    rank = 42
    experiment = "own_backwards:what_backwards_give"
    role = "gradients"
    automatic = True
    settings = (
        Setting(
            "max_slope_error",
            float,
            default=0.01,
            minimum=5e-3,
            help="largest difference between a custom gradient and the slope, by the larger of the "
            "two (right ones: 1e-6 in float64; a coefficient that is 10 % off: 0.1)",
            per_layer=False,
        ),
    )

    def is_called_for(self, observation: Observation, settings: Settings) -> bool:
        """Whether a custom function ran."""
        return observation.own_functions

    def judge(self, parting: Parting, seen: Evidence) -> Iterator[Violation]:
        """Yield that a gradient is not the slope."""
        limit = seen.settings["max_slope_error"]
        is_named_by_another = parting.kind == "none" and any(without_gradient(seen.observation))
        if parting.effect <= limit.value or is_named_by_another:
            return
        # Nobody asked where it runs by itself: what may be meant then is no failure.
        failing = {"slope", "approximation"} if seen.settings.probes(self.name) else {"slope"}
        function, _, argument = parting.place.rpartition(".")
        given, slope = parting.after or 0.0, parting.before or 0.0
        by = f"{given / slope:.2f} times the slope" if slope else "where there is none"
        yield self.violation(
            place(seen.observation, parting.layer),
            f"the backward of the custom autograd.Function {function!r}{at(parting.line)} gives "
            f"{argument!r} a gradient of {given:.4g} along a random direction, where the slope of "
            f"its forward is {slope:.4g}: {by}",
            value=parting.effect,
            limit=limit,
            cause=f"{parting.detail}; torch.autograd.gradcheck shows it number by number",
            independent=True,
            severity="fail" if parting.kind in failing else "warn",
        )
