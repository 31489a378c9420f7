"""Samples whose outputs are next to equal, and whether a few training steps part them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from pytest_modelhealth.checks.facts import (
    HEALTHY_SPREAD,
    flow_of,
    leaves,
    seems_trained,
    spread_of,
    units_of,
)
from pytest_modelhealth.checks.paths import factors, nearest
from pytest_modelhealth.checks.zero_gradients import STEPS
from pytest_modelhealth.probes.probe import Probe
from pytest_modelhealth.settings import Limit, Settings, Share

if TYPE_CHECKING:
    from pytest_modelhealth.report import Finding, LayerRecord, Observation, Parting


_FAR = 10.0


class AlikeSamples(Probe):
    """The samples of a fresh model's output differ, or begin to as soon as it is trained.

    Branches that start near zero (LayerScale) leave samples as alike as a signal that vanished;
    three steps of training tell the two apart.
    """

    name = "alike_samples"
    summary = "The samples of an output differ by more than a trace of what its numbers differ by."
    rank = 28
    experiment = "alike:what_training_parts"
    reads_scale = True
    automatic = True
    settings = (
        Share(
            "min_sample_deviation",
            default=5e-4,
            help="smallest deviation between samples of an output of two values a sample or more, "
            "as a part of the deviation of all its numbers (a fresh encoder in evaluation has "
            "2.2e-3; less behind branches that start near zero, which a few steps heal)",
            per_layer=False,
        ),
    )

    def is_called_for(self, observation: Observation, settings: Settings) -> bool:
        """Whether samples are alike in a model that is not trained: then they may be on purpose."""
        return alike_outputs(observation, settings) is not None and not seems_trained(observation)

    def judge(
        self, parting: Parting, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield that training does not part them, at the layer where they become alike."""
        alike = alike_outputs(observation, settings)
        if alike is None or parting.after is None or parting.after >= alike.limit.value:
            return
        yield self.violation(
            alike.culprit,
            f"its samples deviate by {alike.deviation:.2g} of what all its numbers deviate by, and "
            f"by {parting.after:.2g} after {STEPS} training steps",
            value=alike.deviation,
            limit=alike.limit,
            cause=alike.cause,
        )


class AlikeOutputs(NamedTuple):
    """An output whose samples deviate too little."""

    deviation: float  # as in `Observation.sample_deviation`
    limit: Limit
    culprit: LayerRecord  # the model, where positions spread units and hide the place
    cause: str


def alike_outputs(observation: Observation, settings: Settings) -> AlikeOutputs | None:
    """Return how alike the samples of the outputs are, if they are, and where they become so.

    Batches whose samples are equal, and outputs whose samples all are, are another matter. So are
    offsets that the targets have as well: years in a column beside months.
    """
    deviation, limit = observation.sample_deviation, settings["min_sample_deviation"]
    root = observation.layers.get("")
    if deviation is None or deviation >= limit.value or root is None:
        return None
    needed = settings["min_collapse_samples"].value * observation.batches
    if root.equal_samples or root.equal_input_samples is not False or observation.samples < needed:
        return None
    out = root.activations
    for call in observation.loss_calls:
        asked = call.target
        if asked is not None and out is not None and not call.classes and asked.shape == out.shape:
            is_there = abs(out.mean - asked.mean) <= 0.5 * asked.std
            if is_there and 0.5 * asked.std <= out.std <= 2.0 * asked.std:
                return None
    cause = "what all samples share is far larger than what they differ by: "
    culprit, before = _where(observation)
    # it loads torch, which what declares the checks may not
    from pytest_modelhealth.checks.grad_norm import lost_behind_sigmoids

    if lost_behind_sigmoids(observation, settings):
        return None  # `grad_norm` tells
    if _is_offset_at_the_end(observation):
        return None  # learnt, it may stand for targets that lie far apart: quantiles of prices
    if culprit is None or before is None:
        cause += "an input drowned by another or by a constant, or a signal that fades on its way"
    else:
        cause += (
            f"the signal of {before.label!r} is lost on the way through here"
            f"{factors(observation, [before.name], culprit.name)}, in a bias, an offset or a mean "
            "that is larger by far, or in weights that are too small"
        )
    return AlikeOutputs(deviation, limit, culprit or root, cause)


def _where(observation: Observation) -> tuple[LayerRecord | None, LayerRecord | None]:
    """Return the first layer that feeds none with a healthy spread, and the last that has it."""
    flow, layers = flow_of(observation), observation.layers
    feeding = flow.feeding("output") if flow.graph.outputs else layers.keys()
    seen = [r for r in leaves(observation) if r.name in feeding and units_of(r.activations)]
    spreads = {record.name: spread_of(record.activations) for record in seen}
    healthy = {name: spread for name, spread in spreads.items() if spread >= HEALTHY_SPREAD}
    after = nearest(observation, healthy, back=True)
    first = next((name for name in spreads if name not in healthy and name not in after), None)
    if first is None:
        return None, None
    before = nearest(observation, healthy).get(first)
    return layers[first], layers[before[1]] if before else None


def _is_offset_at_the_end(observation: Observation) -> bool:
    """Whether a parameter is added to the output that is far larger than the rest of it."""
    flow, layers = flow_of(observation), observation.layers
    ends = flow.producers("output") if flow.graph.outputs else ()
    outputs = [layers[name].activations for name in ends if name in layers]
    offsets = [offset for name, offset in layers[""].parameters.items() if name in ends]
    return any(
        out is not None and offset.rms > _FAR * out.rms for offset in offsets for out in outputs
    )
