"""A watched step as numbers, and where what is no number came from."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pytest_modelhealth.capture.passive.step import WatchedStep
from pytest_modelhealth.errors import LayerNotFoundError, UnknownNameError, suggest, suggest_layer
from pytest_modelhealth.report import Finding, LayerRecord
from pytest_modelhealth.statistics import TensorStatistics


class Event(NamedTuple):
    """Something that went wrong.

    Args:
        step: the number of the step.
        layer: the layer, ``""`` for the model itself.
        text: what it was, in a few words.
    """

    step: int
    layer: str
    text: str


WORDS = {
    "inputs": "the inputs",
    "parameters": "the parameter {name!r}",
    "activations": "the activations",
    "gradients": "the gradients",
    "parameter_gradients": "the gradient of the parameter {name!r}",
}
"""What a role is called, by the name of the parameter."""


def _origin_of(layers: Sequence[LayerRecord], loss: float | None) -> Finding | None:
    """Return where the first value of a step came from that is no number, if there is one."""
    # in the order in which they returned: one that holds others comes after these
    called = sorted((lyr for lyr in layers if lyr.completed), key=lambda lyr: lyr.completed or 0)
    bad = [layer for layer in called if _is_bad(layer.activations)]
    if bad:
        # the first layer that was given numbers
        makers = [layer for layer in bad if not _is_bad(layer.inputs)]
        first = (makers or bad)[0]
        if name := _first_bad(first.parameters):
            return _first_at(first, "parameters", name)
        return _first_at(first, "activations" if makers else "inputs")
    if loss is not None and not math.isfinite(loss):
        message = "the loss is not finite, though all activations are"
        return Finding("nonfinite_steps", "", "loss", message=message)
    for layer in reversed(called):
        if layer.gradients is not None and layer.gradients.nonfinite_count:
            return _first_at(layer, "gradients")
    for role in ("parameter_gradients", "parameters"):
        for layer in layers:
            if name := _first_bad(getattr(layer, role)):
                return _first_at(layer, role, name)
    return None


def _first_at(layer: LayerRecord, role: str, name: str = "") -> Finding:
    message = f"not finite first in {WORDS[role].format(name=name)} of {layer.label!r}"
    return Finding("nonfinite_steps", layer.name, role, tensor=name, message=message)


def _is_bad(seen: TensorStatistics | None) -> bool:
    """Whether there is a NaN or positive infinity; masks are made of the negative one."""
    return seen is not None and seen.nan_count + seen.positive_inf_count > 0


def _first_bad(held: Mapping[str, TensorStatistics]) -> str:
    """Return the name of the first tensor that is not finite, ``""`` if all are."""
    return next((name for name, seen in held.items() if seen.nonfinite_count), "")


Reals = npt.NDArray[np.float64]

STATISTICS = (
    "activation_mean",
    "activation_std",
    "activation_rms",
    "activation_abs_max",
    "zero_fraction",
    "dead_fraction",
    "activation_nonfinite",
    "gradient_rms",
    "gradient_norm",
    "gradient_nonfinite",
    "parameter_norm",
    "parameter_nonfinite",
    "parameter_gradient_norm",
    "parameter_gradient_nonfinite",
    "update_norm",
    "update_ratio",
    "input_std",
    "unit_observations",
    "parameter_rms",
    "weight_update_ratio",
    "trainable_fraction",
    "learning_rate",
    "running_std",
    "saturation",
    "training_mode",
    "hooks",
)
"""What is kept of a layer in each watched step.

``zero_fraction`` and ``dead_fraction`` are of activations, ``gradient_*`` of the gradients with
respect to activations. All that is said of parameters is of the layer's own, together. Moments,
extremes and norms are of finite values; ``*_nonfinite`` counts the others, in activations NaN and
positive infinity, since masks are made of the negative one. ``update_ratio`` is the norm of what
the optimizer changed by the norm of the weights before. NaN stands where nothing was seen.

From ``input_std`` on they are evidence for rules. ``unit_observations`` is how many values of each
unit were seen, ``weight_update_ratio`` the update ratio of the parameters with two dimensions or
more, ``trainable_fraction`` how many of the parameters require gradients, ``learning_rate`` the
largest that an optimizer stepped with, ``running_std`` the root of the mean of running variances,
``saturation`` how near to its ends a bounded activation is, from 0 to 1, ``training_mode`` 1 or 0
for dropout and batch norm, ``hooks`` how many hooks the module had.
"""


@dataclass(frozen=True, eq=False)
class StepRow:
    """The numbers of one watched step.

    Args:
        step: its number.
        loss: value of the loss; ``None`` where it was not given.
        gradient_norm: norm of all parameter gradients, as the backward pass left them: before an
            optimizer or a clip changes them. NaN or infinity if one is in them, NaN if none came.
        update_ratio: norm of all changes of parameters by the norm of those parameters before; NaN
            where no optimizer made a step.
        layers: names of the layers, in execution order, those never called last.
        values: an array over `layers` by statistic (`STATISTICS`).
        origin: where the first value that is no number came from, if there is one.
        passes: how many forward passes the step had.
        optimizer_steps: how many steps optimizers made in it; none where a gradient scaler skipped
            them, or while gradients are accumulated.
        left_over: whether gradients that an optimizer had stepped on were there still when the
            backward passes of a step after that added to them.
        began: what rules say began, a phrase each.
    """

    step: int
    loss: float | None
    gradient_norm: float
    update_ratio: float
    layers: tuple[str, ...]
    values: Mapping[str, Reals]
    origin: Finding | None = None
    passes: int = 0
    optimizer_steps: int = 0
    left_over: bool = False
    began: tuple[str, ...] = ()

    def __getitem__(self, key: tuple[str, str]) -> float:
        """Return a layer's statistic: ``row["encoder.0", "gradient_norm"]``.

        Raises:
            LayerNotFoundError: there is no such layer.
            InspectionError: there is no such statistic.
        """
        layer, statistic = key
        require_statistic(statistic)
        if layer not in self.layers:
            raise LayerNotFoundError(
                f"no layer {layer!r} was seen{suggest_layer(layer, self.layers)}"
            )
        return float(self.values[statistic][self.layers.index(layer)])

    def __str__(self) -> str:
        parts = [] if self.loss is None else [f"loss {self.loss:.4g}"]
        parts.append(f"gradient norm {self.gradient_norm:.3g}")
        if math.isnan(self.update_ratio):
            parts.append("no optimizer step" if not self.optimizer_steps else "no update seen")
        else:
            parts.append(f"update ratio {self.update_ratio:.1e}")
        dead = self.values["dead_fraction"]
        if np.any(dead > 0):
            worst = int(np.nanargmax(dead))
            parts.append(f"most dead units {dead[worst]:.0%} in {self.layers[worst]!r}")
        if self.origin is not None:
            parts.append(self.origin.message)
        parts += self.began
        return f"step {self.step}: {', '.join(parts)}"


def require_statistic(statistic: object) -> None:
    """Do nothing if there is such a statistic.

    Raises:
        UnknownNameError: there is none; the message names the nearest.
    """
    if statistic not in STATISTICS:
        raise UnknownNameError(
            f"unknown statistic {statistic!r}{suggest(statistic, STATISTICS)} "
            f"Statistics: {', '.join(STATISTICS)}."
        )


def row_of(step: int, seen: WatchedStep) -> StepRow:
    """Return the numbers of a watched step.

    Args:
        step: its number.
        seen: what was seen of it.
    """
    layers = [layer for layer in seen.observation.layers.values() if layer.watched]
    updates = {
        layer.name: [
            (seen.updates[layer.name, name], held)
            for name, held in layer.parameters.items()
            if (layer.name, name) in seen.updates
        ]
        for layer in layers
    }
    rows = [_numbers(layer, updates[layer.name], seen) for layer in layers]
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(STATISTICS)).T
    return StepRow(
        step=step,
        loss=seen.observation.loss,
        gradient_norm=_joined([g for lyr in layers for g in lyr.parameter_gradients.values()]),
        update_ratio=_ratio([update for own in updates.values() for update in own]),
        layers=tuple(layer.name for layer in layers),
        values=dict(zip(STATISTICS, table, strict=True)),
        origin=_origin_of(layers, seen.observation.loss),
        passes=seen.passes,
        optimizer_steps=seen.optimizer_steps,
    )


Updates = Sequence[tuple[TensorStatistics, TensorStatistics]]
"""What an optimizer changed, each beside the parameter as it was before."""


def _numbers(layer: LayerRecord, updates: Updates, seen: WatchedStep) -> tuple[float, ...]:
    """Return the statistics of a layer, in the order of `STATISTICS`."""
    made, back, given, own = layer.activations, layer.gradients, layer.inputs, layer.parameters
    activations: tuple[float, ...] = (math.nan,) * 7
    gradients: tuple[float, ...] = (math.nan,) * 3
    if made is not None:
        dead = math.nan if made.dead_fraction is None else made.dead_fraction
        bad = made.nan_count + made.positive_inf_count
        activations = made.mean, made.std, made.rms, made.abs_max, made.zero_fraction, dead, bad
    if back is not None:
        gradients = back.rms, back.norm, back.nonfinite_count
    units = None if made is None else made.units
    running = layer.buffers.get("running_var")
    variance = running.mean if running and running.finite_count else math.nan
    size, others = _together(own.values())
    count = sum(held.finite_count for held in own.values())
    wide = [(change, held) for change, held in updates if len(held.shape) > 1]
    before = math.hypot(*(held.norm for _, held in wide))
    frozen = sum(name in layer.frozen for name in own)
    return (
        *activations,
        *gradients,
        size,
        others,
        *_together(layer.parameter_gradients.values()),
        _joined([change for change, _ in updates]),
        _ratio(updates),
        math.nan if given is None else given.std,
        math.nan if units is None else units.observations,
        size / math.sqrt(count) if count else math.nan,
        math.hypot(*(change.norm for change, _ in wide)) / before if before else math.nan,
        1.0 - frozen / len(own) if own else math.nan,
        seen.rates.get(layer.name, math.nan),
        math.sqrt(max(variance, 0.0)),  # NaN stays NaN
        _saturation(layer, made),
        float(seen.modes.get(layer.name, math.nan)),
        float(seen.hooks.get(layer.name, math.nan)),
    )


def _together(held: Collection[TensorStatistics]) -> tuple[float, float]:
    """Return the norm of tensors together, of finite values, and how many others they have."""
    others = sum(one.nonfinite_count for one in held)
    return (math.hypot(*(one.norm for one in held)), others) if held else (math.nan, math.nan)


def _joined(held: Collection[TensorStatistics]) -> float:
    """Return the norm of tensors together, NaN or infinity if one is in them; NaN of none."""
    norm, others = _together(held)
    if not (held and others):
        return norm
    return math.nan if any(one.nan_count for one in held) else math.inf


def _ratio(updates: Updates) -> float:
    """Return the norm of updates together by that of the parameters that they are of."""
    size = math.hypot(*(held.norm for _, held in updates))
    return _joined([change for change, _ in updates]) / size if size else math.nan


def _saturation(layer: LayerRecord, made: TensorStatistics | None) -> float:
    """Return how near to its ends a bounded activation is: 1 where all values are 0, 1 or -1."""
    if made is None or not made.finite_count or made.nonfinite_count:
        return math.nan
    square = made.rms**2
    if layer.activation == "tanh" or layer.options.get("nonlinearity") == "tanh":
        return min(square, 1.0)
    if layer.activation == "sigmoid":
        return min(max(1.0 - 4.0 * (made.mean - square), 0.0), 1.0)
    if layer.activation == "softmax" and made.mean > 0.0:
        return min(square / made.mean, 1.0)
    return math.nan
