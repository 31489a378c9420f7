"""Comparison with a tolerance: rounding passes, a change of a thousandth does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from corpus.models.recorded import Bare, Tower, Wrapped
from pytest_modelhealth import HealthReport, Inspector
from pytest_modelhealth.rendering.drift import explain
from pytest_modelhealth.report import LayerRecord
from pytest_modelhealth.snapshot.changes import phrases
from pytest_modelhealth.snapshot.drift import DriftReport, detect_drift
from pytest_modelhealth.snapshot.file_format import dump, load
from pytest_modelhealth.snapshot.snapshot import Snapshot, Tolerances, from_observation
from pytest_modelhealth.snapshot.snapshot import of_report as seen_by
from pytest_modelhealth.statistics import TensorStatistics
from pytest_modelhealth.tolerance import TensorName
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


class Net(nn.Module):
    """Two blocks with batch norm; the bias before it has a gradient of nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.fc1 = nn.Linear(8 * 36, 32)
        self.fc2 = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


def inspected(
    scaled: str = "",
    *,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    mkldnn: bool = True,
) -> Snapshot:
    """The snapshot of one seeded run of `Net`, with the weights of one layer times 1.001."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    images, labels = torch.randn(32, 3, 8, 8).to(dtype), torch.randint(5, (32,))
    if scaled:
        with torch.no_grad():
            model.get_submodule(scaled).weight.mul_(1.001)
    model = model.to(memory_format=memory_format)
    with nullcontext() if mkldnn else torch.backends.mkldnn.flags(enabled=False):
        return of_report(
            Inspector(model).run_inspection(
                images.to(memory_format=memory_format),
                target=labels,
                loss=nn.functional.cross_entropy,
            )
        )


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        (torch.float32, {"memory_format": torch.channels_last}),
        (torch.float32, {"mkldnn": False}),
        (torch.bfloat16, {"mkldnn": False}),
    ],
    ids=["layout", "kernels", "bfloat16"],
)
def test_rounding_is_within_tolerance(dtype: torch.dtype, change: dict[str, object]) -> None:
    """Another memory layout or other kernels change digits, and nothing drifts."""
    before, now = inspected(dtype=dtype), inspected(dtype=dtype, **change)
    # a processor without bfloat16 of its own has one kernel for both
    assert numbers_of(before) != numbers_of(now) or dtype is torch.bfloat16
    assert explain(detect_drift(before, now)) == []


def test_threads_are_within_tolerance() -> None:
    """Sums split over two threads drift nowhere."""
    before = inspected()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        now = inspected()
    finally:
        torch.set_num_threads(threads)
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


@pytest.mark.parametrize(
    ("role", "passes", "drifts"),
    [("activations", 4e-4, 7e-4), ("inputs", 1e-6, 4e-6), ("gradients", 4e-3, 7e-3)],
)
def test_without_a_noise_a_tolerance_is_a_part_of_the_scale(
    role: str, passes: float, drifts: float
) -> None:
    """Growth by 4e-4 of the scale passes and by 7e-4 drifts; for gradients ten times as much.

    The batch is given rather than computed: it may move by twenty machine epsilons.
    """
    before = snapshot(layer("", **{role: values()}))
    assert detect_drift(before, snapshot(layer("", **{role: values() * (1 + passes)}))).drifts == ()
    assert detect_drift(before, snapshot(layer("", **{role: values() * (1 + drifts)}))).drifts != ()


@pytest.mark.parametrize(
    ("role", "passes", "drifts"), [("activations", 0.02, 0.05), ("gradients", 0.05, 0.1)]
)
def test_half_precision_has_wider_tolerances(role: str, passes: float, drifts: float) -> None:
    """A model that computes in bfloat16 is held to a few of bfloat16's machine epsilons."""

    def net(factor: float) -> Snapshot:
        coarse = layer("a", activations=values().bfloat16())
        return snapshot(coarse, layer("b", **{role: values() * factor}))

    assert detect_drift(net(1), net(1 + passes)).drifts == ()
    assert drifted(detect_drift(net(1), net(1 + drifts))) == [("b", role)]


def test_half_precision_may_round_to_zero() -> None:
    """Four more zeros in a thousand drift in float32 and pass in bfloat16."""

    def net(threshold: float, dtype: torch.dtype) -> Snapshot:
        x = values() * (values() > threshold)
        return snapshot(layer("a", activations=x.to(dtype)))

    full, half = torch.float32, torch.bfloat16
    (drift,) = detect_drift(net(0, full), net(0.01, full)).drifts
    assert drift.statistic == "zeros"
    assert 0.001 < drift.distance < 0.015
    assert detect_drift(net(0, half), net(0.01, half)).drifts == ()


def test_a_mean_near_zero_is_judged_by_the_tensor_s_scale() -> None:
    """A mean that doubles is no drift while it is a millionth of the values."""
    centred = values() - values().mean()
    before = snapshot(layer("a", activations=centred + 1e-5))
    assert detect_drift(before, snapshot(layer("a", activations=centred + 2e-5))).drifts == ()


def test_a_gradient_of_nothing_but_rounding_has_its_layer_s_scale() -> None:
    """A bias gradient of 1e-9 may double; a weight gradient of the layer's scale may not."""

    def net(bias: float, weight: float) -> Snapshot:
        gradients = {"weight": values() * weight, "bias": values()[0] * bias}
        return snapshot(layer("a", parameter_gradients=gradients))

    assert detect_drift(net(1e-9, 1.0), net(2e-9, 1.0)).drifts == ()
    found = detect_drift(net(1e-9, 1.0), net(1e-9, 1.1))
    assert drifted(found) == [("a.weight", "parameter_gradients")]


@pytest.mark.parametrize("role", ["gradients", "parameter_gradients"])
def test_a_gradient_may_be_zero_or_rounding(role: str) -> None:
    """Where terms cancel, as at a causal attention's first position, zero may become 1e-12."""

    def net(first: float) -> Snapshot:
        x = values()
        x[0] = first
        return snapshot(layer("a", **{role: x if role == "gradients" else {"w": x}}))

    assert explain(detect_drift(net(0.0), net(1e-12))) == []


@pytest.mark.parametrize(
    ("before", "now", "statistic"),
    [
        (values(), values().double(), "dtype"),
        (values(), values().reshape(32, 64), "shape"),
        (values(), values().masked_fill(values() > 3, math.nan), "nan"),
        (values(), values().masked_fill(values() > 3, -math.inf), "inf"),
        (values().relu(), values().relu() * (values() > 0.003), "zeros"),
        (torch.zeros(4, 4), torch.full((4, 4), math.nan), "nan"),
    ],
)
def test_what_changed_is_the_statistic_named(before: Tensor, now: Tensor, statistic: str) -> None:
    """The table names what changed most, exact properties first."""
    comparison = detect_drift(
        snapshot(layer("a", activations=before)), snapshot(layer("a", activations=now))
    )
    assert comparison.drifts[0].statistic == statistic


def test_nan_on_both_sides_is_equal() -> None:
    """A tensor without a finite value has NaN moments, and equals itself."""
    lost = snapshot(layer("a", activations=torch.full((4, 4), math.nan)), loss=math.nan)
    assert explain(detect_drift(lost, lost)) == []


def test_a_number_that_became_nan_drifts() -> None:
    """NaN on one side only is beyond every tolerance."""
    before = snapshot(layer("a", activations=values()))
    now = before.with_tensors(lambda name, seen: replace(seen, mean=math.nan))
    assert "nan" in detect_drift(before, now).drifts[0].now
    assert "nan" in detect_drift(now, before).drifts[0].before


@pytest.mark.parametrize("pair", [(1.0, 1.01), (None, 1.0), (1.0, None), (1.0, math.nan)])
def test_the_loss_is_compared(pair: tuple[float | None, float | None]) -> None:
    """A loss that moved, came or went is a drift."""
    before, now = (snapshot(layer("a"), loss=loss) for loss in pair)
    assert explain(detect_drift(before, now))[0].startswith("drift in loss: value ")


def chain(*names: str, **types: str) -> Snapshot:
    """A snapshot of layers with these names, each with its own values."""
    return snapshot(
        *(
            layer(name, type_name=types.get(name, "Linear"), activations=values(columns=8 + index))
            for index, name in enumerate(names)
        )
    )


def test_a_renamed_layer_is_said_to_be_renamed() -> None:
    """One that went and one of the same type and shapes that came are one layer, still compared."""
    comparison = detect_drift(chain("a", "b"), chain("a", "c"))
    assert phrases(comparison.changes) == ["renamed b to c"]
    assert comparison.tensors == 2
    assert explain(comparison) == []
    assert comparison.note == (
        "all 2 tensors agree with the snapshot, but layers changed: renamed b to c"
    )


def test_layers_that_came_and_went_are_listed() -> None:
    """Added, removed and changed layers are named with their types."""
    before = chain("a", "b", act="ReLU")
    for names, phrase in (
        (("a", "b", "c"), "added c (Linear)"),
        (("a",), "removed b (Linear)"),
        (("c", "d", "e", "a", "b"), "added c and 2 more (Linear)"),
    ):
        found = detect_drift(before, chain(*names))
        assert found.drifted
        assert phrases(found.failing_changes) == [phrase]
    changed = detect_drift(before, chain("a", "b", b="Fast"))
    assert phrases(changed.changes) == ["changed b: type Linear is now Fast"]
    assert not changed.drifted


def test_a_tensor_that_is_no_longer_seen_is_listed() -> None:
    """A layer that lost its gradient differs, though no number drifted."""
    before = snapshot(layer("a", activations=values(), gradients=values()))
    now = snapshot(layer("a", activations=values()))
    assert phrases(detect_drift(before, now).failing_changes) == ["no gradients any more of a"]
    assert phrases(detect_drift(now, before).failing_changes) == ["new gradients of a"]


def test_a_changed_batch_is_said_to_be_the_cause() -> None:
    """Where the model's input drifted, the message says so."""
    before, now = (snapshot(layer("", inputs=values(seed))) for seed in (0, 1))
    assert "The batch itself changed; the rest may only follow from that." in explain(
        detect_drift(before, now)
    )


def test_missing_seeds_are_said_to_be_the_cause() -> None:
    """Where most parameters drifted, the message points to the seed."""
    before, now = (snapshot(layer("a", parameters={"w": values(seed)})) for seed in (0, 1))
    assert any("torch.manual_seed" in line for line in explain(detect_drift(before, now)))


def test_another_torch_is_no_drift_but_said_where_something_drifted() -> None:
    """Versions and devices are not compared; they explain."""
    before = replace(snapshot(layer("a", activations=values())), recorded="torch 1.0, cuda")
    now = snapshot(layer("a", activations=values()))
    assert explain(detect_drift(before, now)) == []
    moved = snapshot(layer("a", activations=values() * 2))
    assert explain(detect_drift(before, moved))[-1].startswith(
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


@pytest.mark.parametrize(
    ("change", "story"),
    [
        (
            lambda model: setattr(model.norm, "eps", 1e-3),
            "norm: same input, same weights, other output: its settings or its forward?",
        ),
        (lambda model: model.first.weight.mul_(2), "first: same input, other weights"),
        (
            lambda model: setattr(model, "residual", 0.5),
            "Tower: every layer before is right, the input of head is not: its own code after",
        ),
    ],
    ids=["computation", "parameters", "input"],
)
def test_the_story_tells_input_parameters_and_computation_apart(
    change: Callable[[Tower], object], story: str
) -> None:
    """The second line says what of the first drifting layer is the same and what is not."""
    assert explain(detect_drift(tower(calibrate=True), changed(change)))[1].startswith(story)


def test_a_changed_batch_loss_and_backward_are_told_apart() -> None:
    """The batch, the loss alone, and gradients alone each have their own story."""
    before = tower(calibrate=True)
    assert explain(detect_drift(before, tower(shift=1)))[1] == "Tower: the batch is another one"
    loss = detect_drift(before, with_loss(tower(), 7.0))
    assert explain(loss)[1].startswith("every layer agrees and the loss does not")
    model = Tower()
    model.second.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    story = explain(detect_drift(before, tower(model)))[1]
    assert "forward is right; the gradient that reaches the output of relu is not" in story


def test_a_wrapped_model_agrees_with_a_note() -> None:
    """Prefixes and an Identity change no number: a note, and no cover for a fault."""
    before, now = tower(calibrate=True), tower(Wrapped(Tower()))
    found = detect_drift(before, now)
    assert not found.drifted
    assert "renamed first to inner.first" in found.note
    wrong = Tower()
    wrong.norm.eps = 1e-3
    assert drifted(detect_drift(before, tower(Wrapped(wrong))))[0] == ("inner.norm", "activations")


def test_a_layer_with_parameters_never_goes_unmatched() -> None:
    """Where every other number agrees, a layer with weights that is not found fails by itself."""
    w = {"weight": values()}
    root = layer("", activations=values(), type_name="Net")
    inner = layer("a", activations=values(columns=8), parameters=w)
    extra = layer("b", activations=values(seed=3), parameters={"weight": values(seed=4)})
    found = detect_drift(snapshot(inner, extra, root), snapshot(inner, root))
    assert found.drifts == ()
    assert explain(found)[0] == "not the layers of the snapshot: removed b (Linear)"
    bare = layer("c", type_name="softmax", activations=values(seed=3))
    passed = detect_drift(snapshot(inner, bare, root), snapshot(inner, root))
    assert not passed.drifted
    assert "removed c (softmax)" in passed.note


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


def tensors_of(recorded: Snapshot, role: str) -> Iterator[tuple[TensorName, TensorStatistics]]:
    """Yield each tensor of a role with its name."""
    for tensors in recorded.tensors.values():
        yield from (one for one in tensors.items() if one[0][1] == role)


@pytest.mark.parametrize(
    ("role", "factor"),
    [("activations", 20), ("gradients", 50), ("parameter_gradients", 50), ("parameters", 20)],
)
def test_a_tolerance_is_a_multiple_of_the_measured_noise(role: str, factor: int) -> None:
    """Gradients have the larger multiple: kernels of older processors move them further."""
    recorded = tower(calibrate=True)
    name, tensor = next(item for item in tensors_of(recorded, role) if item[1].rms)
    tolerances = Tolerances(recorded)
    allowance = tolerances.of(name, tensor, "std")
    assert allowance.noise == tolerances.noise(name, tensor, "std")
    assert allowance.distance == pytest.approx(factor * allowance.noise)
    noise = {name: {"std": 8.0 * recorded.noise.get(name, {}).get("std", 1.0)}}
    wider = Tolerances(replace(recorded, noise=noise)).of(name, tensor, "std")
    assert wider.distance == pytest.approx(8 * allowance.distance)


@pytest.mark.parametrize(("role", "part"), [("gradients", 1e-3), ("activations", 0.0)])
def test_single_gradients_may_move_by_a_thousandth(role: str, part: float) -> None:
    """Rounding takes an activation across zero, and one gradient comes or goes."""
    recorded = replace(tower(calibrate=True), noise={})
    name, tensor = next(item for item in tensors_of(recorded, role) if item[1].max)
    allowance = Tolerances(recorded).of(name, tensor, "max")
    noise = Tolerances(recorded).noise(name, tensor, "max") or 0.0
    factor = 50 if role == "gradients" else 20
    assert allowance.distance == pytest.approx(max(factor * noise, part * abs(tensor.max)))
    assert (allowance.noise is None) == (part > 0)


def test_a_model_without_layers_may_return_its_input() -> None:
    """Its numbers count, and not that they are no copy."""
    batch = torch.randn(8, 4)
    copied, given = (
        of_report(Inspector(Bare(function)).run_inspection(batch))
        for function in (lambda x: x * 1.0, lambda x: x)
    )
    assert not detect_drift(copied, given).drifted
    assert not detect_drift(given, copied).drifted


def test_a_model_without_layers_has_none_in_it_to_agree() -> None:
    """What it gives out is another thing, and the batch is not."""
    batch = torch.randn(8, 4)
    before, now = (
        of_report(Inspector(Bare(function)).run_inspection(batch))
        for function in (lambda x: x * 2.0, lambda x: x * 3.0)
    )
    assert "Bare: same input, other output: its settings or its forward?" in explain(
        detect_drift(before, now)
    )
