"""Which statistics of a model moved by more than rounding and chance explain, the cause first.

The file of a run holds no measured noise. The tolerances are those of snapshots without it: fixed
parts of each statistic's scale, which rounding, other threads and other kernels stay within.

Where no seed was set, every number moves from run to run. A tensor that was drawn anew has other
values of one distribution: its mean, deviation and zeros move no further than samples of its size
do. What is computed from it is not to be compared; what moved further was changed by somebody.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytest_modelhealth.alignment.result import containers
from pytest_modelhealth.layers import ACTIVATION_MODULES
from pytest_modelhealth.report import ROLES
from pytest_modelhealth.runs.difference.result import Change, Place
from pytest_modelhealth.settings.setting import ancestors
from pytest_modelhealth.snapshot.changes import MatchedTensor, SnapshotPair
from pytest_modelhealth.snapshot.detection import detect_drift
from pytest_modelhealth.snapshot.drift import LOSS, Drift
from pytest_modelhealth.snapshot.snapshot import (
    LayerLine,
    Snapshot,
    TensorKey,
    TensorLine,
    is_judged_whole,
    judges_zeros,
    shape_text,
)
from pytest_modelhealth.tolerance import TF32, epsilon_of

Data = Mapping[str, Any]

_STAGES = {
    "activations": ("buffers", "inputs", "activations"),
    LOSS: (LOSS,),
    "gradients": ("gradients", "parameter_gradients"),
}
"""What is computed, from causes to effects, and the roles that belong to each."""


def moved(pair: SnapshotPair, samples: tuple[int, int]) -> tuple[list[Change], str, list[str]]:
    """Return which statistics moved, what began it, and what was not compared and why.

    Args:
        pair: both sides.
        samples: how many samples the batches have.
    """
    found = detect_drift(pair.old, pair.new)
    if not found.drifts:
        return [], "", []
    differing = [
        tensor
        for tensor in pair.tensors()
        if (tensor.layer, (tensor.role, tensor.own_name)) not in found.kept
    ]
    batch = next((one for one in differing if one.role == "inputs" and not one.layer), None)
    if batch is None and not all(map(_is_watched, (pair.old, pair.new))):
        unseen = "its batch or its weights were not watched: what is computed is not compared"
        return [], "", [unseen]
    weights = [one for one in differing if one.role == "parameters"]
    every = sum(
        role == "parameters" for line in pair.new.layers.values() for role, _ in line.tensors
    )
    are_most = len(weights) > max(every / 2, 1)
    drawn = [one for one in weights if _is_drawn(one, TRAINED if are_most else 0.0)]
    altered = [one for one in weights if one not in drawn]

    changes: list[Change] = []
    remarks: list[str] = []
    cause = ""
    # the form of a tensor is told of the layers
    drifts = [one for one in found.drifts if one.statistic not in ("dtype", "shape", "count")]
    if batch is not None:
        drifts = []
        remarks.append("the batches differ: what is computed from them is not compared")
        if not _is_batch_drawn(batch, samples):
            changes.append(Change("batch", "the batch", (_place(batch, "batch"),)))
    elif drawn or are_most:
        place = pair.new.place
        first = min(place[one.layer] for one in weights)
        drifts = [
            one for one in drifts if one.role in _STAGES["activations"] and place[one.layer] < first
        ]
        remarks.append(_why_not_compared(pair, drawn))
    else:
        drifts = [one for one in drifts if one.role != "parameters"]
        cause = found.story
    if altered:
        places = [_place(one, pair.new.label(one.layer, one.own_name)) for one in altered]
        changes.append(Change("weights", "weights", tuple(places)))
    if drifts and _is_another_mask(drifts[0], pair):
        label = drifts[0].label
        remarks.append(f"{label} drew another mask: what is computed from it is not compared")
        drifts = []
    changes += _stages(drifts)
    return changes, cause if drifts or altered else "", remarks


def _stages(drifts: Sequence[Drift]) -> Iterator[Change]:
    """Yield what of each stage drifted, by the first drift of each layer."""
    for stage, roles in _STAGES.items():
        first_of_each: dict[str, Place] = {}
        for drift in drifts:
            if drift.role in roles and drift.label not in first_of_each:
                # the input of a layer that drifts first tells of what happens before it
                what = f"{'input ' if drift.role == 'inputs' else ''}{drift.statistic}"
                sides = f"{what} {drift.before}", f"{what} {drift.now}"
                by = drift.moved.replace("fixed ", "")
                first_of_each[drift.label] = Place(drift.label, *sides, by)
        if first_of_each:
            yield Change("statistic", stage, tuple(first_of_each.values()))


def _is_watched(side: Snapshot) -> bool:
    """Whether it can be told that the batch and the weights are the same."""
    seen = {(role, bool(name)) for name, line in side.layers.items() for role, _ in line.tensors}
    return ("inputs", False) in seen and bool(seen & {("parameters", False), ("parameters", True)})


def _why_not_compared(pair: SnapshotPair, drawn: Sequence[MatchedTensor]) -> str:
    if not drawn:
        return "most weights differ: what is computed from them is not compared"
    reshaped = [one for one in drawn if _is_of_other_form(one)]
    first, *others = reshaped or drawn
    named = pair.new.label(first.layer, first.own_name)
    more = f" and {len(others):,} more" if others else ""
    how = "another shape" if reshaped else "other values, as by another seed"
    return f"{named}{more}: {how}; what is computed from there on is not compared"


def _place(tensor: MatchedTensor, label: str) -> Place:
    """Return what of a tensor differs: its form, what is not finite, or what moved furthest."""
    before, now = tensor.before, tensor.now
    if before.shape != now.shape:
        return Place(label, *(f"shape {shape_text(line.shape)}" for line in (before, now)))
    for name in ("dtype", "nan", "inf"):
        if getattr(before, name) != getattr(now, name):
            return Place(label, *(f"{name} {getattr(line, name)}" for line in (before, now)))

    def distance(name: str) -> float:
        far: float = abs(getattr(now, name) - getattr(before, name))
        return far if name in ("std", "mean") else far / 10  # extremes move further by nature

    furthest = max(("std", "mean", "min", "max"), key=distance)
    return Place(label, *(f"{furthest} {getattr(line, furthest):.5g}" for line in (before, now)))


# Chance

DEVIATIONS = 6.0
"""So many standard errors apart two draws may be: by chance once in a billion, for normal ones."""

KURTOSIS = 5.0
"""Of what is drawn, at most: of a normal distribution it is 3, of a uniform one 1.8."""

TRAINED = 0.25
"""Weights that were trained apart are no samples of one distribution: by this part of their
deviation they may differ in any case."""


def _is_batch_drawn(batch: MatchedTensor, samples: tuple[int, int]) -> bool:
    before, now = batch.before, batch.now
    if before.dtype != now.dtype or before.shape[1:] != now.shape[1:]:
        return False
    old, new = (
        known or (line.shape[0] if line.shape else 1)
        for known, line in zip(samples, (before, now), strict=True)
    )
    return is_another_draw(before, now, (old, new))


def _is_drawn(weight: MatchedTensor, least: float) -> bool:
    sizes = weight.before.count, weight.now.count
    return _is_of_other_form(weight) or is_another_draw(weight.before, weight.now, sizes, least)


def _is_of_other_form(weight: MatchedTensor) -> bool:
    before, now = weight.before.shape, weight.now.shape
    return before != now and before[::-1] != now


def _is_another_mask(first: Drift, pair: SnapshotPair) -> bool:
    """Whether the first drift is another mask of a dropout."""
    origin = pair.origin(first.layer) if first.role == "activations" else None
    if origin is None or "dropout" not in pair.new.layers[first.layer].type.lower():
        return False
    before = pair.old.layers[origin].tensors["activations", ""]
    now = pair.new.layers[first.layer].tensors["activations", ""]
    return is_another_draw(before, now, (before.count, now.count))


def is_another_draw(
    before: TensorLine, now: TensorLine, sizes: tuple[int, int], least: float = 0.0
) -> bool:
    """Whether two tensors may be two draws from one distribution.

    Args:
        before: one.
        now: the other.
        sizes: how many independent values either has: of a weight its elements, of a batch its
            samples.
        least: by this part of their deviation they may differ in any case.
    """
    if min(sizes) < 1 or (before.nan, before.inf) != (now.nan, now.inf):
        return False
    if not (before.std > 0 and now.std > 0):  # what is constant is not drawn
        return False
    spread = math.sqrt(before.std) * math.sqrt(now.std)
    step = max(DEVIATIONS * math.sqrt(1 / sizes[0] + 1 / sizes[1]), least)
    part = (before.zeros + now.zeros) / 2
    return (
        abs(now.mean - before.mean) <= step * spread
        and abs(math.log(now.std / before.std)) <= step * math.sqrt(KURTOSIS - 1) / 2
        and abs(now.zeros - before.zeros) <= step * math.sqrt(max(part * (1 - part), 0.0))
    )


# An inspection of the file of a run as a snapshot, so that drift is judged as a snapshot's is

_ACTIVATIONS = {module.__name__: name for module, name in ACTIVATION_MODULES.items()}
_ACTIVATIONS |= {name: name for name in _ACTIVATIONS.values()}
"""The canonical name of an activation by the class of the module, or by the function."""


def snapshot_of(inspection: Data) -> Snapshot:
    """Return what a snapshot of an inspection would keep, as far as the file of a run has it."""
    layers: Sequence[Data] = inspection["layers"]
    holders = containers(layer["name"] for layer in layers)
    devices = {layer["device"].partition(":")[0] for layer in layers if layer["device"]}
    return Snapshot(
        profile=" ".join(sorted(devices)),
        model=inspection["model"],
        recorded="",
        calibrated=False,
        epsilon=_coarsest_epsilon(layers),
        loss=inspection["loss"],
        layers={layer["name"]: _line(layer, holders) for layer in _as_returned(layers)},
    )


def in_one_dtype(one: Snapshot, other: Snapshot) -> tuple[Snapshot, Snapshot]:
    """Return two snapshots whose tensors of one name have the coarser dtype of the two.

    A change of the dtype is told of the layers; statistics are compared by its tolerances.
    """

    def coarsened(side: Snapshot, beside: Snapshot) -> Snapshot:
        def coarser(layer: str, key: TensorKey, tensor: TensorLine) -> TensorLine:
            line = beside.layers.get(layer)
            counterpart = line.tensors.get(key, tensor) if line else tensor
            dtypes = sorted((tensor.dtype, counterpart.dtype))
            return replace(tensor, dtype=max(dtypes, key=epsilon_of))

        return side.with_tensors(coarser)

    return coarsened(one, other), coarsened(other, one)


def _as_returned(layers: Sequence[Data]) -> list[Data]:
    """Return the layers in the order in which they returned: each after all that it holds.

    The file has the order in which they were entered.
    """
    last: dict[str, int] = {}
    for place, layer in enumerate(layers):
        holding = ancestors(layer["name"]) if layer["calls"] else ()
        last |= dict.fromkeys((layer["name"], *holding), place)
    return sorted(
        layers,
        key=lambda layer: (last[layer["name"]], -layer["name"].count("."), not layer["name"]),
    )


def _coarsest_epsilon(layers: Sequence[Data]) -> float:
    dtypes = {
        tensor["dtype"]
        for layer in layers
        for tensor in layer["tensors"]
        if tensor["role"] in ("activations", "parameters")
    }
    on_gpu = any(layer["device"].startswith("cuda") for layer in layers)
    coarse = [TF32] if on_gpu and "float32" in dtypes else []  # convolutions, unless told not to
    return max([*map(epsilon_of, dtypes), *coarse], default=0.0)


def _line(layer: Data, holders: frozenset[str]) -> LayerLine:
    name = layer["name"]
    is_inner = bool(name) and name in holders
    tensors = {
        (tensor["role"], tensor["name"]): _tensor(tensor, name)
        for tensor in layer["tensors"]
        if tensor["role"] in ROLES and (tensor["role"] != "inputs" or not is_inner)
    }
    return LayerLine(
        **{key: layer[key] for key in ("type", "status", "calls", "tied")},
        activation=_ACTIVATIONS.get(layer["type"], ""),
        tensors=tensors,
    )


def _tensor(tensor: Data, layer: str) -> TensorLine:
    role, count = tensor["role"], tensor["count"]
    zeros = tensor["zeros"] / count if count else math.nan
    moments: dict[str, Any] = {
        key: math.nan if tensor[key] is None else tensor[key]
        for key in ("mean", "std", "min", "max")
    }
    return TensorLine(
        **{key: tensor[key] for key in ("dtype", "count", "nan", "inf")},
        **moments,
        shape=tuple(tensor["shape"]),
        zeros=zeros if judges_zeros(role, layer) else 0.0,
        dead=tensor["dead"] if is_judged_whole(role, layer) else None,
    )
