"""Where the first value of a step came from that is no number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.passive.step import WatchedStep
from pytest_modelhealth.statistics import TensorStatistics


@dataclass(frozen=True)
class Origin:
    """Where the first NaN or infinity of a step was seen.

    Args:
        layer: the layer; ``""`` is the model itself.
        role: in which of its tensors: ``inputs`` where the batch held it, ``parameters`` where it
            was in the weights before the step, ``activations``, ``gradients``,
            ``parameter_gradients``, or ``loss``.
        name: own name of the parameter, else ``""``.
        label: the layer's name for people.
    """

    layer: str
    role: str
    name: str = ""
    label: str = ""

    def __str__(self) -> str:
        if self.role == "loss":
            return "the loss is not finite, though all activations are"
        what = _WORDS[self.role].format(name=self.name)
        return f"not finite first in {what} of {self.label!r}"


_WORDS = {
    "inputs": "the inputs",
    "parameters": "the parameter {name!r}",
    "activations": "the activations",
    "gradients": "the gradients",
    "parameter_gradients": "the gradient of the parameter {name!r}",
}


def origin_of(layers: Sequence[Layer], seen: WatchedStep) -> Origin | None:
    """Return where the first value of a step came from that is no number, if there is one.

    Args:
        layers: the layers that were observed.
        seen: what was seen of the step.
    """
    called = sorted((lyr for lyr in layers if lyr.completed is not None), key=_completed)
    bad = [layer for layer in called if _is_bad(seen.statistics(layer, "activations"))]
    if bad:
        return _forward(bad, seen)
    loss = seen.observation.loss
    if loss is not None and not math.isfinite(loss):
        return Origin("", "loss")
    for layer in reversed(called):
        gradients = seen.statistics(layer, "gradients")
        if gradients is not None and gradients.nonfinite_count:
            return Origin(layer.name, "gradients", label=layer.label)
    for role in ("parameter_gradients", "parameters"):
        for layer in layers:
            if name := _first_bad(layer, role):
                return Origin(layer.name, role, name, layer.label)
    return None


def _completed(layer: Layer) -> int:
    """The order in which layers returned: one that holds others comes after these."""
    return layer.completed or 0


def _forward(bad: Sequence[Layer], seen: WatchedStep) -> Origin:
    """Return where activations stopped being numbers: in the first layer that was given numbers."""
    makers = [layer for layer in bad if not _is_bad(seen.statistics(layer, "inputs"))]
    first = (makers or bad)[0]
    if name := _first_bad(first, "parameters"):
        return Origin(first.name, "parameters", name, first.label)
    return Origin(first.name, "activations" if makers else "inputs", label=first.label)


def _is_bad(statistics: TensorStatistics | None) -> bool:
    """Whether there is a NaN or positive infinity; masks are made of the negative one."""
    return statistics is not None and statistics.nan_count + statistics.positive_inf_count > 0


def _first_bad(layer: Layer, role: str) -> str:
    """Return the name of a layer's first parameter that is not finite, ``""`` if all are."""
    held = layer.own.get(role, {}).items()
    return next((name for name, entry in held if entry.statistics.nonfinite_count), "")
