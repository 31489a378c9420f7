"""Samples whose outputs are next to equal, and whether a few training steps part them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from pytest_modelhealth.checks.check import Finding
from pytest_modelhealth.checks.facts import (
    HEALTHY_SPREAD,
    flow_of,
    leaves,
    seems_trained,
    spread_of,
    units_of,
)
from pytest_modelhealth.checks.gradient_scale import contracting_chains
from pytest_modelhealth.checks.paths import factors, nearest
from pytest_modelhealth.checks.zero_gradients import STEPS
from pytest_modelhealth.probes.probe import Evidence, Probe
from pytest_modelhealth.settings import Limit, Settings, Share

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord, Observation, Parting, Violation


class AlikeSamples(Probe):
    """The samples of a fresh model's output differ, or begin to as soon as it is trained.

    Branches that start near zero (LayerScale) leave samples as alike as a signal that vanished;
    three steps of training tell the two apart.
    """

    name = "alike_samples"
    summary = "The samples of an output differ by more than a trace of what its numbers differ by."
    rank = 28
    experiment = "moving_parameters:what_training_parts"
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
        """Whether samples are alike in a model that is not trained."""
        return alike_outputs(observation, settings) is not None and not seems_trained(observation)

    def run(self, observation: Observation, settings: Settings) -> Iterator[Finding]:
        """Yield where samples become alike, or why it is not known whether training parts them."""
        from pytest_modelhealth.report import Outcome

        found = alike_outputs(observation, settings)
        record = observation.probes.get(self.name)
        if found is None:
            return
        flow = flow_of(observation)
        heads = (chain.layers[0].name for chain in contracting_chains(observation))
        if any(found.culprit.name in {"", head, *flow.reach(head)} for head in heads):
            return  # sigmoids in a row, of which `grad_norm` tells
        text = f"its samples deviate by {found.deviation:.2g} of what all its numbers deviate by"
        if seems_trained(observation):
            reason = "trained models may have come to that on purpose, or by a collapse in training"
            yield self.inconclusive(found.culprit, f"{text}: {reason}")
        elif record is None or record.outcome is not Outcome.JUDGED:
            why = "probes are switched off" if record is None else record.reason
            reason = "a signal that vanished, or branches that start near zero and grow"
            yield self.inconclusive(found.culprit, f"{text}: {reason}; {why}")
        else:
            for parting in record.partings:
                yield from self.judge(parting, Evidence(record, observation, settings))

    def judge(self, parting: Parting, seen: Evidence) -> Iterator[Violation]:
        """Yield that training does not part them, at the layer where they become alike."""
        found = alike_outputs(seen.observation, seen.settings)
        if found is None or parting.after is None or parting.after >= found.limit.value:
            return
        is_offset = _is_offset_at_the_end(seen.observation)
        yield self.violation(
            found.culprit,
            f"its samples deviate by {found.deviation:.2g} of what all its numbers deviate by, and "
            f"by {parting.after:.2g} after {STEPS} training steps",
            value=found.deviation,
            limit=found.limit,
            cause=found.cause if not is_offset else f"{found.cause}; {_OFFSET}",
            severity="warn" if is_offset else "fail",
        )


_OFFSET = "here it is learnt, and may stand for targets that lie far apart (quantiles of prices)"
_FAR = 10.0


def _is_offset_at_the_end(observation: Observation) -> bool:
    """Whether an offset that is learnt, added to what tells samples apart, makes them alike.

    It is the bias of the last layer, or a parameter that is added to what that returns.
    """
    flow, layers = flow_of(observation), observation.layers
    ends = flow.producers("output") if flow.graph.outputs else ()
    offsets = [s for name, s in layers[""].parameters.items() if name in ends]
    for maker in (layers[name] for name in ends if name in layers):
        out, given, bias = maker.activations, maker.inputs, maker.parameters.get("bias")
        before = (layers[n].activations for n in flow.producers(maker.name) if n in layers)
        if out is None or given is None:
            continue
        told = (a for a in before if a is not None and given.rms >= 0.1 * a.rms)
        is_larger = bias is not None and bias.std >= 0.5 * out.std > 0.0
        is_larger = is_larger or any(offset.rms > _FAR * out.rms for offset in offsets)
        if is_larger and any(spread_of(a) >= HEALTHY_SPREAD for a in told):
            return True
    return False


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
