"""A watched step as numbers, and where what is no number came from."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.passive.step import WatchedStep
from pytest_modelhealth.errors import LayerNotFoundError, UnknownNameError, suggest, suggest_layer
from pytest_modelhealth.report import Finding, LayerRecord
from pytest_modelhealth.statistics import Entry, TensorStatistics


class Event(NamedTuple):
    """Something that went wrong."""

    step: int
    layer: str  # ``""`` for the model itself
    text: str  # what it was, in a few words


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
        altered: whether an optimizer stepped on a gradient that is no multiple of what the backward
            passes left, at the parameter that was looked at.
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
    altered: bool = False
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


class _Moments(NamedTuple):
    """What a row takes of a tensor, or of all that a layer's calls showed in a role."""

    nans: float
    bad: float  # NaN and positive infinity: masks are made of the negative one
    others: float  # all that is not finite
    zeros: float
    finite: float
    mean: float
    std: float
    abs_max: float
    rms: float
    norm: float

    @classmethod
    def of(cls, entry: Entry) -> _Moments:
        """Return them as the statistics have them, which are not made for that."""
        nans, high, low, zeros, finite, mean, std, least, most = entry.moments
        others, rms = nans + high + low, math.hypot(mean, std)
        size = -least if -least > most else abs(most)
        norm = rms * math.sqrt(finite) if finite else 0.0
        return cls(nans, nans + high, others, zeros, finite, mean, std, size, rms, norm)


class _Found:
    """What was found in a step, by layer.

    Attributes:
        outputs: entries of what each layer returned; of several calls, together.
        calls: the moments of each role of its calls.
        own: those of its parameters, their gradients and buffers, by role and name.
    """

    def __init__(self, seen: WatchedStep) -> None:
        calls = {}
        for layer in seen.recorder.layers.values():
            for role in layer.seen:
                one, *more = layer.entries(role)
                merged = layer.statistics(role) if more else None
                calls[layer, role] = one if merged is None else Entry.of(merged)
        own = [
            (layer, role, name, entry)
            for role, held in seen.recorder.own.items()
            for (layer, name), entry in zip(held.places(), held.entries, strict=True)
            if entry is not None
        ]
        changes = [entry for entry, _ in seen.updates.values()]
        every = {*calls.values(), *(one[-1] for one in own), *changes}
        moments = {entry: _Moments.of(entry) for entry in every}
        self.outputs = {
            layer: entry for (layer, role), entry in calls.items() if role == "activations"
        }
        self.calls = {place: moments[entry] for place, entry in calls.items()}
        self.own: dict[tuple[Layer, str], dict[str, _Moments]] = {}
        for layer, role, name, entry in own:
            self.own.setdefault((layer, role), {})[name] = moments[entry]
        self._changes = {key: (moments[e], dims > 1) for key, (e, dims) in seen.updates.items()}

    def updates(self, layer: Layer) -> list[tuple[_Moments, _Moments, bool]]:
        """Return what an optimizer changed, each beside the parameter as it was before.

        The last says whether it is a matrix.
        """
        return [
            (change[0], before, change[1])
            for name, before in self.own.get((layer, "parameters"), {}).items()
            if (change := self._changes.get((layer.name, name))) is not None
        ]

    def is_sound(self) -> bool:
        """Whether all are numbers that are to be; buffers may hold anything."""
        of_calls = all(
            not (seen.others if role == "gradients" else seen.bad)
            for (_, role), seen in self.calls.items()
        )
        held = (own for (_, role), own in self.own.items() if role != "buffers")
        return of_calls and not any(one.others for own in held for one in own.values())


def row_of(step: int, seen: WatchedStep) -> StepRow:
    """Return the numbers of a watched step, by its number and what was seen of it."""
    found, loss = _Found(seen), seen.observation.loss
    every = map(seen.recorder.layers.__getitem__, seen.observation.layers)  # as they ran
    layers = [layer for layer in every if layer.roles]
    rows = [_numbers(layer, found, seen) for layer in layers]
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(STATISTICS)).T
    gradients = [found.own.get((layer, "parameter_gradients"), {}) for layer in layers]
    origin = None
    if not (found.is_sound() and (loss is None or math.isfinite(loss))):
        records = seen.observation.layers.values()
        origin = _origin_of([layer for layer in records if layer.watched], loss)
    return StepRow(
        step=step,
        loss=loss,
        gradient_norm=_joined([one for own in gradients for one in own.values()]),
        update_ratio=_ratio([change for layer in layers for change in found.updates(layer)]),
        layers=tuple(layer.name for layer in layers),
        values=dict(zip(STATISTICS, table, strict=True)),
        origin=origin,
        passes=seen.hooks.passes,
        optimizer_steps=seen.optimizer_steps,
    )


def _numbers(layer: Layer, found: _Found, seen: WatchedStep) -> tuple[float, ...]:
    """Return the statistics of a layer, in the order of `STATISTICS`."""
    made, back = found.calls.get((layer, "activations")), found.calls.get((layer, "gradients"))
    given = found.calls.get((layer, "inputs"))
    own = found.own.get((layer, "parameters"), {})
    activations: tuple[float, ...] = (math.nan,) * 5
    dead = observations = math.nan
    if made is not None:
        count = made.finite + made.others
        zeros = made.zeros / count if count else math.nan
        activations = made.mean, made.std, made.rms, made.abs_max, zeros
        dead, observations = _units(found.outputs[layer])
    running = found.own.get((layer, "buffers"), {}).get("running_var")
    variance = running.mean if running and running.finite else math.nan
    size, others = _together(own.values())
    count = sum(held.finite for held in own.values())
    updates = found.updates(layer)
    wide = [(change, held) for change, held, is_matrix in updates if is_matrix]
    before = math.hypot(*(held.norm for _, held in wide))
    frozen = sum(name in layer.frozen for name in own)
    return (
        *activations,
        dead,
        math.nan if made is None else made.bad,
        *((math.nan,) * 3 if back is None else (back.rms, back.norm, back.others)),
        size,
        others,
        *_together(found.own.get((layer, "parameter_gradients"), {}).values()),
        _joined([change for change, *_ in updates]),
        _ratio(updates),
        math.nan if given is None else given.std,
        observations,
        size / math.sqrt(count) if count else math.nan,
        math.hypot(*(change.norm for change, _ in wide)) / before if before else math.nan,
        1.0 - frozen / len(own) if own else math.nan,
        seen.rates.get(layer.name, math.nan),
        math.sqrt(max(variance, 0.0)),  # NaN stays NaN
        _saturation(layer, made),
        float(seen.modes.get(layer.name, math.nan)),
        float(seen.hook_counts.get(layer.name, math.nan)),
    )


def _units(made: Entry) -> tuple[float, float]:
    """Return the part of a layer's units that are dead, and how many values of each were seen."""
    units = made.statistics.units if made.has_units else None
    if units is None:
        return math.nan, math.nan
    dead = made.statistics.dead_fraction
    return math.nan if dead is None else dead, units.observations


def _together(held: Collection[_Moments]) -> tuple[float, float]:
    """Return the norm of tensors together, of finite values, and how many others they have."""
    others = sum(one.others for one in held)
    return (math.hypot(*(one.norm for one in held)), others) if held else (math.nan, math.nan)


def _joined(held: Collection[_Moments]) -> float:
    """Return the norm of tensors together, NaN or infinity if one is in them; NaN of none."""
    norm, others = _together(held)
    if not (held and others):
        return norm
    return math.nan if any(one.nans for one in held) else math.inf


def _ratio(updates: Collection[tuple[_Moments, _Moments, bool]]) -> float:
    """Return the norm of updates together by that of the parameters that they are of."""
    size = math.hypot(*(held.norm for _, held, _ in updates))
    return _joined([change for change, *_ in updates]) / size if size else math.nan


def _saturation(layer: Layer, made: _Moments | None) -> float:
    """Return how near to its ends a bounded activation is: 1 where all values are 0, 1 or -1."""
    if made is None or not made.finite or made.others:
        return math.nan
    square = made.rms**2
    if layer.activation == "tanh" or layer.options.get("nonlinearity") == "tanh":
        return min(square, 1.0)
    if layer.activation == "sigmoid":
        return min(max(1.0 - 4.0 * (made.mean - square), 0.0), 1.0)
    if layer.activation == "softmax" and made.mean > 0.0:
        return min(square / made.mean, 1.0)
    return math.nan
