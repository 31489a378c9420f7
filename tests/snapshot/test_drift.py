"""Comparison with a tolerance: rounding passes, a change of a thousandth does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corpus.models.recorded import Bare, Convolutional, Tower, Wrapped
from pytest_modelhealth import HealthReport, Inspector
from pytest_modelhealth.rendering.comparison import drift as explain
from pytest_modelhealth.report import LayerRecord
from pytest_modelhealth.snapshot.changes import phrases
from pytest_modelhealth.snapshot.drift import DriftReport, detect_drift
from pytest_modelhealth.snapshot.file_format import dump, load
from pytest_modelhealth.snapshot.snapshot import (
    Snapshot,
    Tolerances,
    from_observation,
)
from pytest_modelhealth.snapshot.snapshot import (
    of_report as seen_by,
)
from tests.builders import layer, observation


def snapshot(*records: LayerRecord, **fields: object) -> Snapshot:
    """A snapshot as it is read back from its file."""
    return reread(from_observation(observation(*records, **fields)))


def reread(written: Snapshot) -> Snapshot:
    """What a file holds of a snapshot."""
    return load(dump(written))


def of_report(report: HealthReport) -> Snapshot:
    """The same of a report; where its noise was not measured, every digit of what was seen."""
    seen = seen_by(report)
    return reread(seen) if seen.calibrated else seen


def numbers_of(written: Snapshot) -> list[tuple[float, float]]:
    """Mean and deviation of each tensor."""
    return [(one.mean, one.std) for of in written.tensors.values() for one in of.values()]


def values(seed: int = 0, rows: int = 64, columns: int = 32) -> Tensor:
    """Standard normal values."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def drifted(comparison: DriftReport) -> list[tuple[str, str]]:
    """Label and role of each drift, in order."""
    return [(drift.label, drift.role) for drift in comparison.drifts]


def inspected(
    scaled: str = "",
    *,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    mkldnn: bool = True,
    threads: int = 1,
) -> Snapshot:
    """The snapshot of one seeded run, with the weights of one layer times 1.001."""
    torch.manual_seed(0)
    model = Convolutional().to(dtype)
    images, labels = torch.randn(32, 3, 8, 8).to(dtype), torch.randint(5, (32,))
    if scaled:
        with torch.no_grad():
            model.get_submodule(scaled).weight.mul_(1.001)
    model = model.to(memory_format=memory_format)
    known = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with nullcontext() if mkldnn else torch.backends.mkldnn.flags(enabled=False):
            images = images.to(memory_format=memory_format)
            loss = nn.functional.cross_entropy
            return of_report(Inspector(model).run_inspection(images, labels, loss=loss))
    finally:
        torch.set_num_threads(known)


ROUNDINGS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "layout": (torch.float32, {"memory_format": torch.channels_last}),
    "kernels": (torch.float32, {"mkldnn": False}),
    "bfloat16": (torch.bfloat16, {"mkldnn": False}),
    "threads": (torch.float32, {"threads": 2}),
}


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("case", ROUNDINGS)
def test_rounding_is_within_tolerance(case: str) -> None:
    """Another memory layout, other kernels or threads change digits, and nothing drifts."""
    dtype, change = ROUNDINGS[case]
    before, now = inspected(dtype=dtype), inspected(dtype=dtype, **change)
    # a processor without bfloat16 of its own has one kernel for both
    assert numbers_of(before) != numbers_of(now) or case in ("bfloat16", "threads")
    assert explain(detect_drift(before, now)) == []


@pytest.mark.parametrize("name", ["conv", "fc1", "fc2"])
def test_a_layer_scaled_by_a_thousandth_is_named_first(name: str) -> None:
    """Weights times 1.001 drift, and their layer heads the table, not a layer that follows it."""
    comparison = detect_drift(inspected(), inspected(name))
    assert drifted(comparison)[0] == (f"{name}.weight", "parameters")
    assert explain(comparison)[0].startswith(f"drift in {name}.weight (parameters): rms ")


def test_causes_come_before_effects() -> None:
    """Batch, parameters, layers in execution order, loss, then gradients backwards.

    A buffer may follow from earlier layers, as a batch norm's do, and stands with its own layer.
    """

    def net(factor: float) -> Snapshot:
        x = values() * factor
        seen = {"activations": x, "gradients": x, "parameters": {"w": x}}
        seen["parameter_gradients"] = {"w": x}
        a, b = layer("a", **seen), layer("b", **seen, buffers={"mean": x})
        return snapshot(a, b, layer("", inputs=x, **seen), loss=factor)

    assert drifted(detect_drift(net(1.0), net(1.1))) == [
        ("Model", "inputs"),
        ("a.w", "parameters"),
        ("b.w", "parameters"),
        ("Model.w", "parameters"),
        ("a", "activations"),
        ("b.mean", "buffers"),
        ("b", "activations"),
        ("Model", "activations"),
        ("loss", "loss"),
        ("Model", "gradients"),
        ("Model.w", "parameter_gradients"),
        ("b", "gradients"),
        ("b.w", "parameter_gradients"),
        ("a", "gradients"),
        ("a.w", "parameter_gradients"),
    ]


X = values()
CENTRED = X - X.mean()
LOST = torch.full((4, 4), math.nan)


def one(role: str = "activations", value: Tensor = X, **fields: object) -> Snapshot:
    """A snapshot of a layer, or of a model and its batch, with one tensor."""
    value = {"w": value} if "parameter" in role else value
    return snapshot(layer("" if role == "inputs" else "a", **{role: value}), **fields)


def coarse(role: str, factor: float) -> Snapshot:
    """One that computes in bfloat16, and a layer in it that may be off."""
    half = layer("a", activations=X.bfloat16())
    return snapshot(half, layer("b", **{role: X * factor}))


def gradients(bias: float, weight: float) -> Snapshot:
    """A layer with gradients of these sizes."""
    return snapshot(layer("a", parameter_gradients={"weight": X * weight, "bias": X[0] * bias}))


def cut(threshold: float, dtype: torch.dtype) -> Snapshot:
    """Zeros below a threshold."""
    return one(value=(X * (threshold < X)).to(dtype))


def cancelling(role: str, first: float) -> Snapshot:
    """Gradients whose first row cancels."""
    return one(role, torch.cat([torch.full_like(X[:1], first), X[1:]]))


DRIFTS: dict[str, tuple[Snapshot, Snapshot, str]] = {
    # without a noise, a part of the scale; for gradients ten times as much
    "activations within": (one(), one(value=X * 1.0004), ""),
    "activations beyond": (one(), one(value=X * 1.0007), "a activations rms"),
    "gradients within": (one("gradients"), one("gradients", X * 1.004), ""),
    "gradients beyond": (one("gradients"), one("gradients", X * 1.007), "a gradients rms"),
    # the batch is given rather than computed: it may move by twenty machine epsilons
    "a batch within": (one("inputs"), one("inputs", X * (1 + 1e-6)), ""),
    "a batch beyond": (one("inputs"), one("inputs", X * (1 + 4e-6)), "Model inputs rms"),
    # a model that computes in bfloat16 is held to a few of its machine epsilons
    "half within": (coarse("activations", 1), coarse("activations", 1.02), ""),
    "half beyond": (coarse("activations", 1), coarse("activations", 1.05), "b activations rms"),
    "half gradients within": (coarse("gradients", 1), coarse("gradients", 1.05), ""),
    "half gradients beyond": (coarse("gradients", 1), coarse("gradients", 1.1), "b gradients rms"),
    "zeros in half": (cut(0, torch.bfloat16), cut(0.01, torch.bfloat16), ""),
    "zeros in full": (cut(0, torch.float32), cut(0.01, torch.float32), "a activations zeros"),
    # the scale is that of the tensor, of a gradient that is nothing but rounding that of its layer
    "a mean near zero": (one(value=CENTRED + 1e-5), one(value=CENTRED + 2e-5), ""),
    "a bias of rounding": (gradients(1e-9, 1.0), gradients(2e-9, 1.0), ""),
    "a weight of that scale": (
        gradients(1e-9, 1.0), gradients(1e-9, 1.1), "a.weight parameter_gradients rms"
    ),
    # where terms cancel, as at a causal attention's first position, zero may become 1e-12
    "zero": (cancelling("gradients", 0.0), cancelling("gradients", 1e-12), ""),
    "zero of a weight": (
        cancelling("parameter_gradients", 0.0), cancelling("parameter_gradients", 1e-12), ""
    ),
    # exact properties first
    "dtype": (one(), one(value=X.double()), "a activations dtype"),
    "shape": (one(), one(value=X.reshape(32, 64)), "a activations shape"),
    "NaN": (one(), one(value=X.masked_fill(X > 3, math.nan)), "a activations nan"),
    "infinity": (one(), one(value=X.masked_fill(X > 3, -math.inf)), "a activations inf"),
    "zeros": (one(value=X.relu()), one(value=X.relu() * (X > 0.003)), "a activations zeros"),
    "all NaN": (one(value=torch.zeros(4, 4)), one(value=LOST), "a activations nan"),
    "NaN on both sides": (one(value=LOST, loss=math.nan), one(value=LOST, loss=math.nan), ""),
    "a loss": (one(loss=1.0), one(loss=1.01), "loss loss value"),
    "a loss that came": (one(loss=None), one(loss=1.0), "loss loss value"),
    "a loss that went": (one(loss=1.0), one(loss=None), "loss loss value"),
    "a loss that is lost": (one(loss=1.0), one(loss=math.nan), "loss loss value"),
}  # fmt: skip


@pytest.mark.parametrize("case", DRIFTS)
def test_what_leaves_its_tolerance_is_named(case: str) -> None:
    """The tensor, its role, and the statistic that changed most."""
    before, now, expected = DRIFTS[case]
    found = detect_drift(before, now)
    drifts = [f"{one.label} {one.role} {one.statistic}" for one in found.drifts]
    assert drifts[:1] == ([expected] if expected else [])
    assert bool(explain(found)) is bool(expected)
    assert len(drifts) <= 1


def test_a_number_that_became_nan_drifts() -> None:
    """NaN on one side only is beyond every tolerance."""
    before = one()
    now = before.with_tensors(lambda name, seen: replace(seen, mean=math.nan))
    assert "nan" in detect_drift(before, now).drifts[0].now
    assert "nan" in detect_drift(now, before).drifts[0].before


def chain(*names: str, **types: str) -> Snapshot:
    """A snapshot of layers with these names, each with its own values."""
    return snapshot(
        *(
            layer(name, type_name=types.get(name, "Linear"), activations=values(columns=8 + index))
            for index, name in enumerate(names)
        )
    )


ROOT = layer("", activations=X, type_name="Net")
INNER = layer("a", activations=values(columns=8), parameters={"weight": X})
EXTRA = layer("b", activations=values(seed=3), parameters={"weight": values(seed=4)})
BARE = layer("c", type_name="softmax", activations=values(seed=3))
BOTH = snapshot(layer("a", activations=X, gradients=X))
CHANGES: dict[str, tuple[Snapshot, Snapshot, str, bool]] = {
    # one that went and one of the same type and shapes that came are one layer, still compared
    "renamed": (chain("a", "b"), chain("a", "c"), "renamed b to c", False),
    "added": (chain("a", "b"), chain("a", "b", "c"), "added c (Linear)", True),
    "removed": (chain("a", "b"), chain("a"), "removed b (Linear)", True),
    "several": (
        chain("a", "b"), chain("a", "b", "c", "d", "e"), "added c and 2 more (Linear)", True
    ),
    "a type": (chain("a", "b"), chain("a", "b", b="Fast"),
               "changed b: type Linear is now Fast", False),
    # a layer that lost its gradient differs, though no number drifted
    "a tensor less": (BOTH, one(), "no gradients any more of a", True),
    "a tensor more": (one(), BOTH, "new gradients of a", True),
    # where every other number agrees, a layer with weights that is not found fails by itself
    "weights gone": (
        snapshot(INNER, EXTRA, ROOT), snapshot(INNER, ROOT), "removed b (Linear)", True
    ),
    "a function gone": (
        snapshot(INNER, BARE, ROOT), snapshot(INNER, ROOT), "removed c (softmax)", False
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_layers_that_came_went_or_changed_are_named(case: str) -> None:
    """What no number shows fails by itself; the rest is a note."""
    before, now, phrase, fails = CHANGES[case]
    found = detect_drift(before, now)
    assert found.drifted is fails
    assert phrases(found.failing_changes if fails else found.changes) == [phrase]
    first = explain(found)[0] if fails else found.note
    assert first == (
        f"not the layers of the snapshot: {phrase}"
        if fails
        else f"all {found.tensors} tensors agree with the snapshot, but layers changed: {phrase}"
    )


def test_what_may_explain_a_drift_is_said() -> None:
    """Another batch, missing seeds, another version of torch: these explain and are no drift."""
    another, old = one("inputs", values(1)), replace(one(), recorded="torch 1.0, cuda")
    assert "The batch itself changed; the rest may only follow from that." in explain(
        detect_drift(one("inputs"), another)
    )
    unseeded = detect_drift(one("parameters"), one("parameters", values(1)))
    assert any("torch.manual_seed" in line for line in explain(unseeded))
    assert explain(detect_drift(old, one())) == []
    assert explain(detect_drift(old, one(value=X * 2)))[-1].startswith(
        "The snapshot was recorded with torch 1.0, cuda; this is pytest-modelhealth "
    )


def test_a_large_drift_fits_on_a_screen() -> None:
    """A hundred drifting layers and fifty new ones take no more than 24 lines."""
    names = [f"layer{i}" for i in range(100)]
    before = snapshot(*(layer(name, activations=values()) for name in names))
    now = snapshot(
        *(layer(name, activations=values() * 2) for name in names),
        *(layer(f"new{i}", type_name=f"New{i}") for i in range(50)),
    )
    lines = explain(detect_drift(before, now))
    assert len(lines) <= 24
    assert "... and 92 more tensors after these" in lines
    assert "... and 44 more changes" in lines


# Calibrated snapshots of a real model.


def tower(model: nn.Module | None = None, *, calibrate: bool = False, shift: float = 0) -> Snapshot:
    """The snapshot of a run of a `Tower`, or of what became of it."""
    inspector = Inspector(Tower() if model is None else model, calibrate=calibrate)
    target = torch.arange(64) % 4
    return of_report(
        inspector.run_inspection(
            values(columns=16) + shift, target=target, loss=nn.functional.cross_entropy
        )
    )


def with_loss(seen: Snapshot, loss: float) -> Snapshot:
    """The same with another loss."""
    return replace(seen, observation=replace(seen.observation, loss=loss))


def changed(change: Callable[[Tower], object]) -> Snapshot:
    """The snapshot of a `Tower` after a change."""
    model = Tower()
    with torch.no_grad():
        change(model)
    return tower(model)


def test_measured_noise_catches_what_a_fixed_tolerance_cannot() -> None:
    """Weights times 1.00001 drift at their layer; without a noise they pass."""

    def scale(model: Tower) -> None:
        model.second.weight.mul_(1.00001)

    calibrated, plain = tower(calibrate=True), tower()
    assert calibrated.calibrated
    assert not plain.calibrated
    assert explain(detect_drift(calibrated, plain)) == []
    found = detect_drift(calibrated, changed(scale))
    assert drifted(found)[0] == ("second.weight", "parameters")
    assert ("second", "activations") in drifted(found)
    assert "times its noise" in explain(found)[0]
    unmeasured = detect_drift(plain, changed(scale))
    assert "activations" not in {role for _, role in drifted(unmeasured)}
    assert any("no measured noise" in line for line in explain(unmeasured))


STORIES: dict[str, Callable[[], Snapshot]] = {
    "norm: same input, same weights, other output: its settings or its forward?": lambda: changed(
        lambda model: setattr(model.norm, "eps", 1e-3)
    ),
    "first: same input, other weights": lambda: changed(lambda model: model.first.weight.mul_(2)),
    "Tower: every layer before is right, the input of head is not: its own code after": lambda: (
        changed(lambda model: setattr(model, "residual", 0.5))
    ),
    "Tower: the batch is another one": lambda: tower(shift=1),
    "every layer agrees and the loss does not": lambda: with_loss(tower(), 7.0),
    "Tower: forward is right; the gradient that reaches the output of relu is not": lambda: changed(
        lambda model: model.second.register_full_backward_hook(lambda m, x, y: (x[0] * 2,))
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_the_story_tells_where_it_began_and_what_is_right(story: str) -> None:
    """The second line says what of the first drifting layer is the same and what is not."""
    assert explain(detect_drift(tower(calibrate=True), STORIES[story]()))[1].startswith(story)


def test_a_wrapped_model_agrees_with_a_note() -> None:
    """Prefixes and an Identity change no number: a note, and no cover for a fault."""
    before, now = tower(calibrate=True), tower(Wrapped(Tower()))
    found = detect_drift(before, now)
    assert not found.drifted
    assert "renamed first to inner.first" in found.note
    wrong = Tower()
    wrong.norm.eps = 1e-3
    assert drifted(detect_drift(before, tower(Wrapped(wrong))))[0] == ("inner.norm", "activations")


def test_models_without_a_common_layer_are_said_to_be_others() -> None:
    """No table of everything: one line."""
    other = snapshot(
        layer("x", type_name="Conv2d", activations=values(rows=8)), layer("", type_name="CNN")
    )
    before = snapshot(layer("a", activations=values()), layer("", type_name="Net"))
    assert explain(detect_drift(before, other))[0] == (
        "not the model of the snapshot: no layer of it is in the report"
    )


def test_coarser_matrix_products_widen_the_tolerances() -> None:
    """Products in bfloat16 are no drift, and the text says by how much tolerances grew."""
    before = tower(calibrate=True)
    moved = changed(lambda model: model.second.weight.mul_(1.0001))
    assert detect_drift(before, moved).drifts
    coarse = replace(moved, epsilon=2.0**-8)
    assert "activations" not in {role for _, role in drifted(detect_drift(before, coarse))}
    assert any("times wider" in line for line in detect_drift(before, coarse).remarks)


@pytest.mark.parametrize(
    ("role", "factor"),
    [("activations", 20), ("gradients", 50), ("parameter_gradients", 50), ("parameters", 20)],
)
def test_a_tolerance_is_a_multiple_of_the_measured_noise(role: str, factor: int) -> None:
    """Gradients have the larger multiple: kernels of older processors move them further.

    Single ones may move by a thousandth: rounding takes an activation across zero.
    """
    recorded = tower(calibrate=True)
    of_role = [
        item for of in recorded.tensors.values() for item in of.items() if item[0][1] == role
    ]
    name, tensor = next(item for item in of_role if item[1].rms)
    tolerances = Tolerances(recorded)
    allowance = tolerances.of(name, tensor, "std")
    assert allowance.noise == tolerances.noise(name, tensor, "std")
    assert allowance.distance == pytest.approx(factor * allowance.noise)
    noise = {name: {"std": 8.0 * recorded.noise.get(name, {}).get("std", 1.0)}}
    wider = Tolerances(replace(recorded, noise=noise)).of(name, tensor, "std")
    assert wider.distance == pytest.approx(8 * allowance.distance)
    usual = Tolerances(replace(recorded, noise={}))
    name, tensor = next(item for item in of_role if item[1].max)
    least = 1e-3 * abs(tensor.max) if "gradients" in role else 0.0
    moved = factor * (usual.noise(name, tensor, "max") or 0.0)
    assert usual.of(name, tensor, "max").distance == pytest.approx(max(moved, least))


def test_a_model_without_layers_is_compared_by_its_numbers() -> None:
    """They count, and not that they are no copy; where they are others, the batch is not."""
    batch = torch.randn(8, 4)
    functions = (lambda x: x * 1.0), (lambda x: x), (lambda x: x * 3.0)
    copied, given, scaled = (
        of_report(Inspector(Bare(function)).run_inspection(batch)) for function in functions
    )
    assert not detect_drift(copied, given).drifted
    assert not detect_drift(given, copied).drifted
    assert "Bare: same input, other output: its settings or its forward?" in explain(
        detect_drift(copied, scaled)
    )
