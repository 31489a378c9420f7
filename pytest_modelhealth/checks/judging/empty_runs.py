"""Tells a run that showed no check anything: what none objects to is then not healthy."""

from __future__ import annotations

from pytest_modelhealth.checks.facts import called, trainable
from pytest_modelhealth.report import Inconclusive, LayerRecord, Observation, Status


def without_numbers(observation: Observation) -> Inconclusive | None:
    """Return why no layer that ran returned a number, if none did, or the model no tensor."""
    ran = [record for record in called(observation) if "activations" in record.watched]
    if not ran:
        return None
    outermost = ran[0]
    is_silent = outermost.name == "" and outermost.reason.endswith(", no tensor")
    if not is_silent and not all(map(_returned_nothing, ran)):
        return None
    return Inconclusive("observation", outermost.name, _reason(outermost))


def without_layers(observation: Observation) -> Inconclusive | None:
    """Return why nothing inside the model could be judged, if nothing could."""
    if not observation.outputs_only:
        return None
    reason = (
        f"its inputs and outputs alone were judged, and no layer inside: {observation.outputs_only}"
    )
    return Inconclusive("observation", "", reason)


def without_gradients(observation: Observation) -> Inconclusive | None:
    """Return why no gradient could be judged, if none could and nobody left them out.

    They are left out by ``backward=False`` and by a ``watch()`` without them. A model that has no
    parameters has nothing to learn.
    """
    roles = ("gradients", "parameter_gradients")
    ran = [r for r in called(observation) if not r.watched.isdisjoint(roles)]
    reason = observation.no_gradients
    if observation.backward and any(map(trainable, ran)) and not any(map(_got_gradient, ran)):
        reason = reason or "the backward pass reached no layer; compute the loss from the output"
    if not ran or not reason:
        return None
    text = f"no gradient could be judged: {reason}, or say backward=False"
    return Inconclusive("observation", "", text)


def _got_gradient(record: LayerRecord) -> bool:
    # The loss that a model returns is an output of it, and has a gradient of one.
    is_inside = record.name != ""
    return bool(record.parameter_gradients) or (is_inside and record.gradients is not None)


def _returned_nothing(record: LayerRecord) -> bool:
    if record.activations is None:
        return record.status is Status.UNSUPPORTED
    return record.activations.count == 0


def _reason(record: LayerRecord) -> str:
    if record.activations is not None:
        return "every activation is empty: the batch has no samples; give at least one"
    if "meta device" in record.reason:
        move = "move model and batch to a device with values, such as the CPU"
        return f"no layer that ran returned a number to judge ({record.reason}); {move}"
    move = "return what it computes, and consume generators, before it is inspected"
    return f"nothing came of the model ({record.reason}); {move}"
