"""What is recorded of rows and columns that are zero and get no gradient."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from corpus.models.small import Masked
from pytest_modelhealth import Inspector
from pytest_modelhealth.capture.observing import recorder
from pytest_modelhealth.capture.observing.sample_statistics import zero_slices
from pytest_modelhealth.report import ZeroSlices
from pytest_modelhealth.statistics import Ledger
from tests.capture.oracle import report_of


def seen(model: nn.Module, batch: Tensor) -> dict[str, ZeroSlices]:
    """What is recorded of the layer."""
    return dict(report_of(model, batch, loss=None)["fc"].zero_slices)


def test_rows_and_columns_are_recorded() -> None:
    """Both have weights and gradients of zero."""
    found = seen(Masked(6, 5), torch.randn(8, 16))["weight"]
    assert found == ZeroSlices(frozenset(range(6)), frozenset(range(5)))
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (2, 0)], ids=["none", "too few"])
def test_ordinary_layer_is_not_looked_at(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the statistics count is enough to leave it."""
    found = []
    real = recorder.zero_slices
    monkeypatch.setattr(recorder, "zero_slices", lambda *a: found.append(real(*a)))
    assert seen(Masked(rows, columns), torch.randn(8, 16)) == {}
    assert found == [None] * bool(rows)  # zeros in both, and not of four rows


class Table(nn.Module):
    """Most ids are in no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Embedding(32, 8)
        with torch.no_grad():
            self.fc.weight[8:] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.sign().long() + 1)


def closed() -> nn.Module:
    """A closed gate is another matter."""
    model = Masked(6, 0)
    nn.init.zeros_(model.fc.weight)
    return model


def learning() -> nn.Module:
    """Zeros with a gradient move."""
    model = Masked(0, 0)
    with torch.no_grad():
        model.fc.weight[:6] = 0.0
    return model


@pytest.mark.parametrize("make", [Table, closed, learning])
def test_other_zeros_are_not_recorded(make: Callable[[], nn.Module]) -> None:
    """Rows of a table, a matrix that is all zero, and what learns."""
    assert seen(make(), torch.randn(8, 16)) == {}


def test_batches_keep_what_is_zero_in_all() -> None:
    """A row that learns in one batch learns."""

    class Switched(Masked):
        def forward(self, x: Tensor) -> Tensor:
            self.rows = int(x.sum().sign()) + 5  # 6 or 4
            return super().forward(x)

    merged = Inspector(Switched(6, 0)).run_batches([torch.ones(8, 16), -torch.ones(8, 16)])
    assert merged["fc"].zero_slices["weight"].rows == frozenset(range(4))


def test_nothing_waits_for_another_device() -> None:
    """What stays on a device is not asked for its zeros."""
    model = Masked(6, 0)
    model(torch.randn(8, 16)).sum().backward()
    weight = model.fc.weight
    for queue_all in (False, True):
        ledger = Ledger(queue_all=queue_all)
        entries = [ledger.add(tensor) for tensor in (weight, weight.grad)]
        assert (zero_slices(weight, *entries) is None) == queue_all
        assert entries[0].zero_count == (None if queue_all else 6 * 16)
        assert entries[0].of_dtype(torch.float16).zero_count == entries[0].zero_count
