"""Outputs whose samples are next to equal, and where they become so."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pytest_modelhealth.checks.facts import HEALTHY_SPREAD, flow_of, leaves, spread_of, units_of
from pytest_modelhealth.checks.paths import factors, nearest
from pytest_modelhealth.settings import Limit, Settings

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord, Observation


class AlikeOutputs(NamedTuple):
    """An output whose samples deviate too little.

    Args:
        deviation: by how much they do, as in `Observation.sample_deviation`.
        limit: what it is under.
        culprit: the first layer past which no units spread over the samples; the model where that
            does not show, as where positions spread them.
        cause: the likely cause.
    """

    deviation: float
    limit: Limit
    culprit: LayerRecord
    cause: str


def alike_outputs(observation: Observation, settings: Settings) -> AlikeOutputs | None:
    """Return how alike the samples of the outputs are, if they are, and where they become so.

    Batches whose samples are equal, and outputs whose samples all are, are another matter. So are
    offsets that the targets have as well: years in a column beside months.
    """
    deviation, limit = observation.sample_deviation, settings["min_sample_deviation"]
    if deviation is None or deviation >= limit.value:
        return None
    root = observation.layers.get("")
    if root is None or root.equal_samples or root.equal_input_samples is not False:
        return None
    needed = settings["min_collapse_samples"].value * observation.batches
    if observation.samples < needed or _is_asked_for(root, observation):
        return None
    culprit, before = _where(observation)
    cause = "what all samples share is far larger than what they differ by: "
    if before is None:
        cause += "an input drowned by another or by a constant, or a signal that fades on its way"
    else:
        cause += (
            f"the signal of {before.label!r} is lost on the way through here"
            f"{factors(observation, [before.name], culprit.name) if culprit else ''}, in a bias, "
            "an offset or a mean that is larger by far, or in weights that are too small"
        )
    return AlikeOutputs(deviation, limit, culprit or root, cause)


def _is_asked_for(root: LayerRecord, observation: Observation) -> bool:
    """Whether targets lie as the outputs do: their columns are far apart, too."""
    out = root.activations
    for call in observation.loss_calls:
        asked = call.target
        if asked is None or out is None or call.classes or asked.shape != out.shape:
            continue
        is_there = abs(out.mean - asked.mean) <= 0.5 * asked.std
        if is_there and 0.5 * asked.std <= out.std <= 2.0 * asked.std:
            return True
    return False


def _where(observation: Observation) -> tuple[LayerRecord | None, LayerRecord | None]:
    """Return the first layer that feeds none with a healthy spread, and the last that has it."""
    flow = flow_of(observation)
    feeding = flow.feeding("output") if flow.graph.outputs else observation.layers.keys()
    seen = [r for r in leaves(observation) if r.name in feeding and units_of(r.activations)]
    spreads = {record.name: spread_of(record.activations) for record in seen}
    healthy = {name: spread for name, spread in spreads.items() if spread >= HEALTHY_SPREAD}
    after = nearest(observation, healthy, back=True)
    for name in spreads:
        if name not in healthy and name not in after:
            before = nearest(observation, healthy).get(name)
            return observation.layers[name], observation.layers[before[1]] if before else None
    return None, None
