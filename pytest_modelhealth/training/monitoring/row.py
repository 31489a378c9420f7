"""`StepRow`: the numbers of one watched step, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.passive.step import WatchedStep
from pytest_modelhealth.errors import LayerNotFoundError, UnknownNameError, suggest, suggest_layer
from pytest_modelhealth.statistics import TensorStatistics
from pytest_modelhealth.training.monitoring.bins import BINNED, BINS, Fractions, binned
from pytest_modelhealth.training.monitoring.origin import Origin, origin_of

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
)
"""What is kept of a layer in each watched step.

``zero_fraction`` and ``dead_fraction`` are of activations, ``gradient_*`` of the gradients with
respect to activations. All that is said of parameters is of the layer's own, together. Moments,
extremes and norms are of finite values; ``*_nonfinite`` counts the others, in activations NaN and
positive infinity, since masks are made of the negative one. ``update_ratio`` is the norm of what
the optimizer changed by the norm of the weights before. NaN stands where nothing was seen.
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
        parameter_updates: update ratio of each parameter by its full name.
        origin: where the first value that is no number came from, if there is one.
        passes: how many forward passes the step had.
        optimizer_steps: how many steps optimizers made in it; none where a gradient scaler skipped
            them, or while gradients are accumulated.
        histograms: an array over `layers` and bins by role (`bins.BINNED`), where they are kept.
    """

    step: int
    loss: float | None
    gradient_norm: float
    update_ratio: float
    layers: tuple[str, ...]
    values: Mapping[str, Reals]
    parameter_updates: Mapping[str, float] = field(default_factory=dict)
    origin: Origin | None = None
    passes: int = 0
    optimizer_steps: int = 0
    histograms: Mapping[str, Fractions] = field(default_factory=dict)

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
            parts.append(str(self.origin))
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


def row_of(step: int, seen: WatchedStep, *, histograms: bool = False) -> StepRow:
    """Return the numbers of a watched step, with `histograms` those of its tensors, too."""
    layers = [layer for layer in seen.layers.values() if layer.roles]
    table = np.full((len(STATISTICS), len(layers)), np.nan)
    weights: dict[tuple[str, str], TensorStatistics] = {}
    gradients: list[TensorStatistics] = []
    for column, layer in enumerate(layers):
        own = {role: _own(layer, role) for role in ("parameters", "parameter_gradients")}
        weights.update({(layer.name, name): seen for name, seen in own["parameters"].items()})
        gradients += own["parameter_gradients"].values()
        numbers = _flowing(layer, seen) | _held(own)
        numbers |= _updated(layer.name, own["parameters"], seen)
        for statistic, value in numbers.items():
            table[_INDEX[statistic], column] = value
    return StepRow(
        step=step,
        loss=seen.observation.loss,
        gradient_norm=_norm(gradients, of_all=True) if gradients else math.nan,
        update_ratio=_ratio(
            _norm(seen.updates.values(), of_all=True),
            _norm(weights[key] for key in seen.updates if key in weights),
        ),
        layers=tuple(layer.name for layer in layers),
        values=dict(zip(STATISTICS, table, strict=True)),
        parameter_updates={
            ".".join(filter(None, key)): _ratio(_norm([update], of_all=True), weights[key].norm)
            for key, update in seen.updates.items()
            if key in weights
        },
        origin=origin_of(layers, seen),
        passes=seen.passes,
        optimizer_steps=seen.optimizer_steps,
        histograms={role: _binned(layers, role, seen) for role in BINNED} if histograms else {},
    )


def _binned(layers: Sequence[Layer], role: str, seen: WatchedStep) -> Fractions:
    found = [seen.statistics(layer, role) for layer in layers]
    nothing = np.full(BINS, np.nan, dtype=np.float16)
    filled = [nothing if tensor is None else binned(tensor) for tensor in found]
    return np.array(filled, dtype=np.float16).reshape(len(layers), BINS)


_INDEX = {statistic: index for index, statistic in enumerate(STATISTICS)}


def _flowing(layer: Layer, seen: WatchedStep) -> dict[str, float]:
    """Return what there is to say of a layer's activations and their gradients."""
    numbers: dict[str, float] = {}
    out = seen.statistics(layer, "activations")
    if out is not None:
        dead = out.dead_fraction
        numbers |= {
            "activation_mean": out.mean,
            "activation_std": out.std,
            "activation_rms": out.rms,
            "activation_abs_max": out.abs_max,
            "zero_fraction": out.zero_fraction,
            "dead_fraction": math.nan if dead is None else dead,
            "activation_nonfinite": out.nan_count + out.positive_inf_count,
        }
    back = seen.statistics(layer, "gradients")
    if back is not None:
        numbers |= {
            "gradient_rms": back.rms,
            "gradient_norm": back.norm,
            "gradient_nonfinite": back.nonfinite_count,
        }
    return numbers


def _own(layer: Layer, role: str) -> dict[str, TensorStatistics]:
    return {name: entry.statistics for name, entry in layer.own.get(role, {}).items()}


def _held(own: Mapping[str, Mapping[str, TensorStatistics]]) -> dict[str, float]:
    """Return what there is to say of a layer's own parameters and their gradients."""
    numbers: dict[str, float] = {}
    for role, tensors in own.items():
        if tensors:
            name = role.removesuffix("s")
            numbers[f"{name}_norm"] = _norm(tensors.values())
            numbers[f"{name}_nonfinite"] = sum(t.nonfinite_count for t in tensors.values())
    return numbers


def _updated(
    layer: str, parameters: Mapping[str, TensorStatistics], seen: WatchedStep
) -> dict[str, float]:
    """Return by how much an optimizer changed a layer's own parameters, if it did."""
    touched = {n: seen.updates[layer, n] for n in parameters if (layer, n) in seen.updates}
    if not touched:
        return {}
    norm = _norm(touched.values(), of_all=True)
    return {
        "update_norm": norm,
        "update_ratio": _ratio(norm, _norm(parameters[name] for name in touched)),
    }


def _norm(tensors: Iterable[TensorStatistics], *, of_all: bool = False) -> float:
    """Return the norm of tensors together, of their finite values unless `of_all` is asked for."""
    listed = list(tensors)
    if of_all and any(seen.nan_count for seen in listed):
        return math.nan
    if of_all and any(seen.inf_count for seen in listed):
        return math.inf
    return math.hypot(*(seen.norm for seen in listed))


def _ratio(change: float, size: float) -> float:
    return change / size if size else math.nan
