"""Parameters without gradient have no effect on the loss, or none that could be learnt by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from pytest_modelhealth.checks.check import Finding
from pytest_modelhealth.checks.facts import at, flow_of, place, trainable
from pytest_modelhealth.probes.probe import Evidence, Probe
from pytest_modelhealth.settings import Ratio

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, Parting


_LISTED = 4


class ParameterEffect(Probe):
    """A smooth effect on the loss that autograd does not know is a cut in the graph.

    Whether it is a fault only the optimizer tells (`Conventions.trained`): a teacher, a target
    network or the critic's features have such an effect and should not learn.
    """

    name = "parameter_effect"
    summary = "Trainable parameters that the loss depends on smoothly get a gradient."
    rank = 43
    experiment = "moving_parameters:what_parameters_do"
    role = "parameter_gradients"
    settings = (
        Ratio(
            "min_loss_slope",
            default=1e-6,
            help="least slope of the loss, along independent standard normal numbers, at which "
            "parameters without gradient have an effect (float64 rounds at 1e-9)",
            per_layer=False,
        ),
    )

    def judge(self, parting: Parting, seen: Evidence) -> Iterator[Finding]:
        """Yield that the loss depends on parameters that get no gradient."""
        limit = seen.settings["min_loss_slope"]
        if parting.effect <= limit.value:
            return
        culprit = place(seen.observation, parting.layer)
        listed = ", ".join(parting.names[:_LISTED])
        more = len(parting.names) - _LISTED
        which = f"{listed} and {more} more" if more > 0 else listed
        what = (
            f"the loss depends smoothly on parameters without gradient ({which}): moved along a "
            f"random direction, it changes at a slope of {parting.effect:.2g}{at(parting.line)}"
        )
        is_settled = parting.kind == "trained"
        if not is_settled and self.is_named(seen.settings):
            yield self.inconclusive(culprit, f"{what}; {_UNSETTLED}")
            return
        yield self.violation(
            culprit,
            f"{what}, and the optimizer holds them" if is_settled else what,
            value=parting.effect,
            limit=limit,
            tensor=parting.tensor,
            cause=_CUT if is_settled else _UNSETTLED,
            independent=True,
            severity="fail" if is_settled else "warn",
        )


_UNSETTLED = (
    "only the optimizer tells whether they should learn: if they should, the graph is cut; if not, "
    "freeze them by requires_grad_(False)"
)
_CUT = (
    ".detach(), .data, .item(), .numpy(), torch.tensor(...) or no_grad on the way from them to the "
    "loss, or a backward of one's own that gives them nothing"
)


class Lacking(NamedTuple):
    """A trainable parameter without gradient, by its layer and its own name there."""

    layer: str
    own: str

    @property
    def name(self) -> str:
        """Full name."""
        return f"{self.layer}.{self.own}".lstrip(".")

    @property
    def part(self) -> str:
        """The top-level part of the model that it lies in."""
        return self.name.partition(".")[0]


def without_gradient(observation: Observation) -> Iterator[Lacking]:
    """Yield the trainable parameters that took part in the run and have no gradient, or only zeros.

    Their layer ran, or another one read them: a `ParameterList` is never called.
    """
    for record in observation.layers.values():
        if "parameter_gradients" not in record.watched:
            continue
        for own in trainable(record):
            gradient = record.parameter_gradients.get(own)
            if gradient is None or (gradient.abs_max == 0.0 and not gradient.nonfinite_count):
                lacking = Lacking(record.name, own)
                if record.calls or lacking.name in flow_of(observation):
                    yield lacking
