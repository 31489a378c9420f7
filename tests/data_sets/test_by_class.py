"""Statistics by class: exact, and what never fires for a class, planted and not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import HealthReport, InspectionError, Inspector
from tests.data_sets import planted
from tests.data_sets.planted import CLASSES, Planted, batches, healthy, labelled


def run(model: nn.Module, pairs: Any, by: Any = "target", **options: Any) -> HealthReport:
    """Return the report of a run by class."""
    return Inspector(model).run_batches(pairs, by=by, **options)


@pytest.mark.parametrize("loss", [None, F.cross_entropy])
def test_what_was_planted_is_found_and_nothing_else(loss: Any) -> None:
    """Unit and class, a layer dead for one class, a missing class; no dead, no rare unit."""
    found = run(Planted(), batches(*labelled()), loss=loss).by_class
    assert found is not None
    silent = {(s.layer, s.label): s.units for s in found.silent}
    alive = tuple(u for u in range(planted.UNITS) if u != planted.DEAD_UNIT)
    unit, label = planted.ONE_UNIT
    assert silent == {("act", planted.DEAD_CLASS): alive, ("act", label): (unit,)}
    assert planted.MISSING not in found.samples
    assert found.alike == (planted.DEAD_CLASS,)
    truth = labelled()[1].bincount()
    assert dict(found.samples) == {c: int(n) for c, n in enumerate(truth)}


@pytest.mark.parametrize(
    "activation", [nn.ELU(), nn.GELU(), nn.SiLU(), nn.CELU(0.5), nn.SELU(), nn.Hardswish()]
)
def test_smooth_activations_that_die_elsewhere_than_at_zero(activation: nn.Module) -> None:
    """The floor of an activation is what it gives far below zero, be that zero or not."""
    found = run(Planted(activation), batches(*labelled())).by_class
    assert found is not None
    silent = {(s.layer, s.label): s.units for s in found.silent}
    assert silent["act", planted.ONE_UNIT[1]] == (planted.ONE_UNIT[0],)
    assert len(silent["act", planted.DEAD_CLASS]) == planted.UNITS - 1
    assert len(silent) == 2


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.Sigmoid(), nn.LeakyReLU()])
def test_activations_that_cannot_die_are_not_said_to(activation: nn.Module) -> None:
    """A healthy model of one of these has no unit that never fires."""
    found = run(healthy(activation), batches(*labelled())).by_class
    assert found is not None
    assert found.silent == ()
    assert found.alike == ()


def test_a_nan_is_not_taken_for_a_unit_that_fires() -> None:
    """A unit with a NaN is ill, neither silent nor alive for its class."""
    inputs, labels = labelled()
    inputs[int((labels == 1).nonzero()[0]), CLASSES] = float("nan")
    found = run(Planted(), batches(inputs, labels)).by_class
    assert found is not None
    assert {(s.layer, s.label) for s in found.silent} == {("act", 7), ("act", 3)}
    assert all(planted.DEAD_UNIT not in s.units for s in found.silent)


def outputs_of(model: nn.Module, pairs: Any) -> tuple[dict[str, Any], Any]:
    """Return the outputs of all layers over all batches, as float64 arrays, and the labels."""
    seen: dict[str, list[Tensor]] = {}
    hooks = [
        module.register_forward_hook(
            lambda _, args, output, name=name: seen.setdefault(name, []).append(output.detach())
        )
        for name, module in model.named_modules()
    ]
    labels = []
    for inputs, target in pairs:
        model(inputs)
        labels.append(target)
    for hook in hooks:
        hook.remove()
    arrays = {name: torch.cat(parts).double().numpy() for name, parts in seen.items()}
    return arrays, torch.cat(labels).numpy()


class Convolved(nn.Module):
    """Channels in dimension 1, features in the last, and a call that is made twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.relu = nn.Conv2d(1, 6, 3), nn.ReLU()
        self.mix, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv(x)).mean((2, 3))
        return self.head(self.mix(x))


def test_statistics_of_a_class_are_those_of_its_samples() -> None:
    """Counts, moments, extremes, histogram and units are those of NumPy in float64."""
    model = Convolved()
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(150, 1, 8, 8, generator=generator)
    labels = torch.randint(0, 4, (150,), generator=generator)
    found = run(model, batches(inputs, labels, 32)).by_class
    assert found is not None
    truth, classes = outputs_of(model, batches(inputs, labels, 32))
    for label in range(4):
        for name, values in truth.items():
            own, seen = values[classes == label], found.statistics[label][name]
            assert (seen.count, seen.zero_count) == (own.size, int((own == 0).sum()))
            assert (seen.min, seen.max) == (own.min(), own.max())
            assert (seen.mean, seen.std) == pytest.approx((own.mean(), own.std()), rel=1e-12)
            counts, edges = seen.histogram
            assert counts.sum() == own.size
            upper = (own > 2.0**-4).sum() if 2.0**-4 in edges else None
            if upper is not None:  # bins hold low <= x < high
                at = int(np.flatnonzero(edges == 2.0**-4)[0])
                assert counts[at:].sum() == (own >= 2.0**-4).sum()
            moved = np.moveaxis(own, 1, 0).reshape(own.shape[1], -1)
            assert seen.units is not None
            assert (seen.units.minimum == moved.min(1)).all()
            assert (seen.units.maximum == moved.max(1)).all()


def test_classes_together_are_the_whole() -> None:
    """Merged over classes, the statistics are those of the layer."""
    report = run(healthy(), batches(*labelled()))
    assert report.by_class is not None
    for layer in ("fc", "act", "head", ""):
        parts = [report.by_class.statistics[c][layer] for c in report.by_class.samples]
        merged = parts[0]
        for part in parts[1:]:
            merged = merged.merge(part)
        whole = report[layer].activations
        assert (merged.count, merged.zero_count) == (whole.count, whole.zero_count)
        assert (merged.min, merged.max) == (whole.min, whole.max)
        assert (merged.mean, merged.std) == pytest.approx((whole.mean, whole.std), rel=1e-12)


def test_labels_may_be_flags_strings_and_what_a_function_says() -> None:
    """Booleans and strings are classes as integers are; a function makes them of the batch."""
    inputs, labels = labelled(200)
    of_bool = run(healthy(), batches(inputs, labels < 4)).by_class
    assert of_bool is not None
    assert dict(of_bool.samples) == {False: int((labels >= 4).sum()), True: int((labels < 4).sum())}
    names = [f"<{c}>" for c in labels.tolist()]
    pairs = [(inputs[:120], names[:120]), (inputs[120:], tuple(names[120:]))]
    of_words = run(healthy(), pairs).by_class
    assert of_words is not None
    assert of_words.samples["<3>"] == int((labels == 3).sum())
    parity = run(healthy(), batches(inputs, labels), by=lambda x, target: target % 2).by_class
    assert parity is not None
    assert sorted(parity.samples) == [0, 1]
    whole = [{"x": part} for part in inputs.split(50)]
    of_inputs = run(healthy(), whole, by=lambda batch, _: batch["x"][:, 10] > 0.5).by_class
    assert of_inputs is not None
    assert sum(of_inputs.samples.values()) == 200


class Pooled(nn.Module):
    """Sequences of any length, and a layer whose dimension 0 is not the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words, self.mix, self.relu = nn.Embedding(20, 8), nn.Linear(8, 8), nn.ReLU()
        self.turned, self.head = nn.Identity(), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.relu(self.mix(self.words(ids)))
        x = self.turned(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x.mean(1))


def test_sequences_of_varying_length_and_layers_without_a_batch_dimension() -> None:
    """Each layer with samples in dimension 0 is split; what is not is named, with the reason."""
    generator = torch.Generator().manual_seed(6)
    pairs = [
        (torch.randint(0, 20, (n, length), generator=generator), torch.arange(n) % 3)
        for n, length in ((30, 7), (30, 11), (12, 5))
    ]
    report = run(Pooled(), pairs)
    assert report.by_class is not None
    assert report.by_class.statistics[0]["mix"].count == 8 * (10 * 7 + 10 * 11 + 4 * 5)
    assert "turned" in report.by_class.left_out
    assert "dimension 0" in report.by_class.left_out["turned"]
    assert "turned" not in report.by_class.statistics[0]


def test_one_line_first() -> None:
    """What never fires is said in one line; report, failure, and a table of all."""
    report = run(Planted(), batches(*labelled()))
    lines = report.render("by_class").splitlines()
    assert lines[0].startswith("act: no unit fires for class 7 (of 15 that fire for others")
    assert "1 unit never fires for class 3 (5; 73 samples)" in lines[0]
    assert "act: no unit fires for class 7" in str(report)
    assert "act: no unit fires for class 7" in report._repr_html_()
    data = report.to_dict()["by_class"]
    assert data["silent"][0]["layer"] == "act"
    assert data["alike"] == [7]
    quiet = Inspector(healthy()).run_batches(labelled()[0].split(64))
    assert quiet.by_class is None
    assert quiet.to_dict()["by_class"] is None


WRONG = [
    ([torch.ones(4, 15)], "target", "batch 0 is a Tensor, not a pair"),
    ([(torch.ones(4, 15), torch.zeros(4, 8, 8).long())], "target", r"4x8x8.*by=lambda"),
    ([(torch.ones(4, 15), torch.ones(4, 10) / 10)], "target", r"4x10.*argmax"),
    ([(torch.ones(4, 15), torch.ones(4, 3).long())], "target", "several labels a sample"),
    ([(torch.ones(4, 15), torch.ones(4))], "target", "float32"),
    ([(torch.ones(4, 15), torch.ones(3).long())], "target", "3 labels for 4 samples"),
    ([(torch.ones(4, 15), None)], "target", "no target"),
    ([(torch.ones(4, 15), {"a": torch.ones(4)})], "target", r"target\['a'\]"),
    ([(torch.ones(4, 15), torch.ones(4).long())], "targets", "by must be 'target' or a function"),
    ([(torch.ones(4, 15), torch.ones(4).long())], 3, "by must be 'target' or a function"),
    ([(torch.ones(4, 15), torch.ones(4).long())], lambda x, t: None, "returned NoneType"),
    ([(torch.ones(4, 15), [1, 2, None, 3])], "target", "NoneType"),
]


@pytest.mark.parametrize(("pairs", "by", "message"), WRONG)
def test_labels_that_are_no_classes_are_refused(pairs: Any, by: Any, message: str) -> None:
    """The message says what was given and what to write instead."""
    model = healthy()
    with pytest.raises(InspectionError, match=message):
        run(model, pairs, by=by)
    assert not any(module._forward_hooks for module in model.modules())


def test_too_many_classes_are_refused() -> None:
    """Ids of samples taken for classes would fill the memory."""
    pairs = [(torch.ones(600, 15), torch.arange(600) + 600 * i) for i in range(3)]
    with pytest.raises(InspectionError, match=r"1,200 classes.*at most 1,000.*by=lambda"):
        run(healthy(), pairs)


def test_an_error_of_the_function_passes_untouched() -> None:
    """What `by` raises is the user's."""

    def by(inputs: Tensor, target: Tensor) -> Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run(healthy(), batches(*labelled()), by=by)
