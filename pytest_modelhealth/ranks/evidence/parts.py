"""Ranks that nothing wraps, and that each hold a part of one model: tensor parallelism by hand."""

from __future__ import annotations

from dataclasses import replace

from pytest_modelhealth.ranks.company import Company
from pytest_modelhealth.ranks.evidence.replicas import numbers_of
from pytest_modelhealth.ranks.places import NO_ENGINE
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.ranks import Disagreement, named_ranks
from pytest_modelhealth.settings.layer_names import is_inside


def with_parts(
    company: Company, found: tuple[Disagreement, ...], own: Observation, joint: Observation
) -> tuple[Disagreement, ...]:
    """Return disagreements, told anew where ranks with one batch hold other weights in some layers.

    Equal outputs, bit for bit, are computed together: each rank has a part, and nothing is wrong.
    Else what should have made them equal is missing, or weights differ that should not. Where all
    layers differ nothing speaks for parts.

    Args:
        company: the ranks; each calls this at the same time, with the same disagreements.
        found: where they disagree.
        own: what this rank saw.
        joint: what all saw.
    """
    of = {one.kind: one for one in found}
    weights, batch = of.get("same_weights"), of.get("distinct_data")
    if company.place.engine != NO_ENGINE or weights is None or batch is None:
        return found
    if batch.ranks != company.ranks:
        return found
    sent = company.gather(numbers_of(own))
    layers = [name for name in joint.layers if all(name in each for each in sent)]
    given, held, returned = (
        {name for name in layers if len({each[name][which] for each in sent}) > 1}
        for which in range(3)
    )
    replicas = [
        name
        for name in layers
        if joint.layers[name].parameters
        and not any(other == name or is_inside(other, name) for other in held)
    ]
    if not any(_is_drawn(joint, name) for name in replicas):
        return found
    others = tuple(one for one in found if one not in (weights, batch))
    if not any(name in returned for name in ("", layers[-1])):
        return others
    first = next((name for name in replicas if name in given), "")
    what = f"{first!r}, with the same weights on each, is given" if first else "they return"
    ranks = named_ranks(company.ranks)
    text = f"{ranks} got the same batch, and {what} other values: {weights.message}"
    return (replace(weights, message=text, layer=first or weights.layer), *others)


def _is_drawn(joint: Observation, layer: str) -> bool:
    """Whether a layer has a matrix that was not filled with one number."""
    parameters = joint.layers[layer].parameters.values()
    return any(len(one.shape or ()) > 1 and bool(one.std) for one in parameters)
