"""Parameters that learn nothing because no optimizer is told of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.check import ALWAYS, Check
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.settings import Settings

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, UnregisteredParameter, Violation

_SHOWN = 3


class UnregisteredParameters(Check):
    """Everything that gets a gradient is in ``named_parameters()``.

    An optimizer made from ``model.parameters()`` trains nothing else, ``model.to`` moves nothing
    else and ``state_dict`` saves nothing else. What the batch, the loss or another model owns is
    theirs.
    """

    name = "unregistered_parameters"
    summary = "Every leaf of the model that gets a gradient is one of its parameters."
    rank = 17
    role = "parameters"
    definition = (
        "No leaf that the backward pass gives a gradient to sits in the model, in a plain list, "
        "dictionary or attribute, or was made by its forward, without being in "
        "named_parameters() when the run began."
    )
    source = (
        "torch.nn.Module: only attributes that are modules or parameters are registered; "
        "torch.nn.ModuleList exists for the others"
    )
    minimum_evidence = "one backward pass"

    def run(self, observation: Observation, settings: Settings) -> Iterator[Violation]:
        """Yield one violation for each layer that keeps such leaves."""
        from pytest_modelhealth.report.flow import near

        for layer, group in groupby(observation.unregistered, key=lambda one: one.layer):
            leaves = list(group)
            paths = [one.path for one in leaves if one.path]
            if made := len(leaves) - len(paths):
                lines = dict.fromkeys(near(one.line) for one in leaves if one.line)
                used = f" (used at {', '.join([*lines][:_SHOWN])})" if lines else ""
                paths.insert(0, f"{made} that only the graph holds{used}")
            more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
            yield self.violation(
                place(observation, layer),
                f"{len(leaves)} tensors ({sum(one.count for one in leaves):,} elements) get a "
                "gradient but are no parameters of the model: "
                f"{', '.join(paths[:_SHOWN])}{more}",
                value=float(len(leaves)),
                limit=ALWAYS,
                cause=_cause(leaves),
            )


def _cause(leaves: list[UnregisteredParameter]) -> str:
    kinds = {one.kind for one in leaves}
    if "module" in kinds:
        return (
            "modules in a plain list, dictionary or object are not registered: use nn.ModuleList "
            "or nn.ModuleDict"
        )
    if "attribute" in kinds:
        return (
            "a tensor with requires_grad is no parameter: wrap it in nn.Parameter, several in "
            "nn.ParameterList or nn.ParameterDict"
        )
    return (
        "the forward makes them anew, or what is kept is computed of them (nn.Parameter(...) * 2), "
        "so that no optimizer holds them: make each nn.Parameter once, in __init__, and keep it"
    )
