"""Recording and merging snapshot files: nothing that another run recorded is lost."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pytest_modelhealth import HealthReport, Inspector, ModelHealthError
from pytest_modelhealth.snapshot.file_format import dump, merge
from pytest_modelhealth.snapshot.snapshot import of_report
from tests.builders import check, record


def inspected(
    dtype: torch.dtype = torch.float32, *, scale: float = 1, calibrate: bool = False
) -> HealthReport:
    """The report of one run of a small model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3)).to(dtype)
    with torch.no_grad():
        model[3].weight.mul_(scale)
    torch.manual_seed(1)
    batch = torch.linspace(-1, 1, 256).reshape(32, 8).to(dtype)
    return Inspector(model, calibrate=calibrate).run_inspection(batch)


def test_calibration_leaves_everything_as_it_was() -> None:
    """Model, batch, buffers and random state are the same, bit for bit, with and without it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    before = copy.deepcopy(model.state_dict())
    batch = torch.randn(16, 8)
    kept = batch.clone()
    states = []
    for calibrate in (False, True):
        torch.manual_seed(3)
        report = Inspector(model, calibrate=calibrate).run_inspection(batch)
        states.append(torch.get_rng_state())
        assert (report._noise is not None) == calibrate
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert torch.equal(batch, kept)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(*states)


def test_a_model_that_cannot_be_copied_is_recorded_without_noise() -> None:
    """The file says that nothing was measured, and its tolerances are fixed."""

    class Unique(nn.Linear):
        def __deepcopy__(self, memo: object) -> Unique:
            raise TypeError("there is only one of me")

    torch.manual_seed(0)
    report = Inspector(Unique(8, 3), calibrate=True).run_inspection(torch.ones(4, 8))
    assert report._noise is None
    assert "noise: not measured" in record(report)


def test_batches_are_calibrated_together() -> None:
    """`run_batches` merges the noise of its batches."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    batches = [torch.randn(16, 8) for _ in range(3)]
    report = Inspector(model, calibrate=True).run_batches(batches)
    assert report._noise is not None
    plain = Inspector(model).run_batches(batches)
    assert not check(record(report), plain).drifted


def test_only_what_drifted_is_rewritten() -> None:
    """Lines within their tolerance stay, though their last digits differ."""
    text = record(inspected(calibrate=True))
    moved = of_report(inspected(scale=1.001, calibrate=True))
    kept, new = (
        {line.split()[0]: set(line.split()) for line in one.splitlines() if line[:6] == "layer="}
        for one in (text, merge(text, moved))
    )
    for key in (".weight=", "out="):
        changed = {cell for name in kept for cell in new[name] - kept[name] if key in cell[:8]}
        assert not any(cell in new["layer=0"] for cell in changed)
        assert any(cell in new["layer=3"] for cell in changed)
    inside = of_report(inspected(scale=1 + 3e-7, calibrate=True))
    assert dump(inside) != text
    assert merge(text, inside) == text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format 5", "format 9", "format '9' is that of a later version"),
        ("test: a", "test: b", "the snapshot is of another test: b"),
        ("cpu float32", "cpu float64", "the snapshot is of cpu float64, the report of cpu float32"),
    ],
    ids=["future", "other test", "other profile"],
)
def test_nothing_of_others_is_lost(old: str, new: str, message: str) -> None:
    """Recording refuses where what another test, dtype or version recorded would go."""
    text = dump(of_report(inspected(), "a")).replace(old, new, 1)
    with pytest.raises(ModelHealthError, match=message):
        merge(text, of_report(inspected(), "a"))


@pytest.mark.parametrize("change", [("layer=", "layers="), ("format 5", "format 4")])
def test_a_damaged_or_an_earlier_file_is_replaced(change: tuple[str, str]) -> None:
    """What would be overwritten anyway may be damaged."""
    new = of_report(inspected())
    assert merge(dump(new).replace(*change, 1), new) == dump(new)
