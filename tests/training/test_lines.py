"""Rows of a table: one a watched step, at once."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import InspectionError, Inspector, ModelHealthWarning
from pytest_modelhealth.training.monitoring.row import STATISTICS
from tests.training.models import Net, loss_of, net, train


def table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_each_step_is_written_as_it_ends(tmp_path: Path) -> None:
    """Numbers are exact; a cell is empty where nothing was seen."""
    model, path, counts = net(), tmp_path / "a.csv", []
    with Inspector(model).monitor(every=2, csv=path) as monitor:
        train(model, monitor, 5, after=lambda _: counts.append(len(path.read_text().splitlines())))
    assert counts == [0, 2, 2, 3, 3]
    rows, row = table(path), monitor.latest
    assert [int(row["step"]) for row in rows] == [0, 2, 4]
    assert list(rows[0])[:4] == ["step", "loss", "gradient_norm", "update_ratio"]
    assert list(rows[0])[4] == ":activation_mean"
    assert float(rows[-1]["loss"]) == row.loss
    assert float(rows[-1]["update_ratio"]) == row.update_ratio
    for layer in row.layers:
        for statistic in STATISTICS:
            cell, number = rows[-1][f"{layer}:{statistic}"], row[layer, statistic]
            assert cell == "" if math.isnan(number) else float(cell) == number


def test_what_is_no_number_is_said(tmp_path: Path) -> None:
    """A loss is written as it is; a step without one has an empty cell."""
    model = net()
    with Inspector(model).monitor(csv=tmp_path / "a.csv") as monitor:
        (loss_of(model) * math.inf).backward()
        monitor.step_end(loss=math.inf)
        monitor.step_end(loss=torch.tensor(math.nan))
        monitor.step_end()
    assert [row["loss"] for row in table(tmp_path / "a.csv")] == ["inf", "nan", ""]


def test_a_file_is_continued(tmp_path: Path) -> None:
    """A second training adds rows under the same header; a line cut off by a crash goes."""
    path = tmp_path / "a.csv"
    for part in range(3):
        model = net()
        with Inspector(model).monitor(csv=path) as monitor:
            train(model, monitor, 2)
        data = path.read_bytes()
        assert data.endswith(b"\n")
        path.write_bytes(data[:-7] if part == 1 else data)
    assert [row["step"] for row in table(path)] == ["0", "1", "0", "0", "1"]


class Late(Net):
    """A model with a functional layer that shows from its second call on."""

    is_late = False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return F.gelu(out) if self.is_late else out


def test_layers_that_come_late_are_left_out_of_a_table_with_a_warning(tmp_path: Path) -> None:
    """The history has them; a table that has them is continued."""
    model = Late()
    path = tmp_path / "a.csv"

    def later(step: int) -> None:
        model.is_late = True

    monitor = Inspector(model).monitor(csv=path)
    with pytest.warns(ModelHealthWarning, match="does not know: gelu"), monitor:
        train(model, monitor, 3, after=later)
    assert "gelu:gradient_norm" not in table(path)[-1]
    assert "gelu" in monitor.history.layers
    other = tmp_path / "b.csv"
    with Inspector(model).monitor(csv=other) as monitor:
        train(model, monitor, 1)
    model.is_late = False
    with Inspector(model).monitor(csv=other) as monitor:
        train(model, monitor, 1)
    assert [row["gelu:gradient_norm"] == "" for row in table(other)] == [False, True]


def test_what_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """No folder, a folder, another file: a clear error, the file as it was, the model untouched."""
    model = net()
    other = tmp_path / "other"
    other.write_text("a,b\n1,2\n")
    for path, message in (
        (tmp_path / "none" / "a", "cannot write .*No such file"),
        (tmp_path, "cannot write .*[Ii]s a directory"),
        (other, "something else"),
    ):
        with pytest.raises(InspectionError, match=message):
            Inspector(model).monitor(csv=path).start()
        assert not any(module._forward_hooks for module in model.modules())
    assert other.read_text() == "a,b\n1,2\n"
    with Inspector(model).monitor(csv=tmp_path / "a") as monitor:
        train(model, monitor, 1)


def test_a_table_of_another_model_is_refused(tmp_path: Path) -> None:
    """The error says how the header differs."""
    path = tmp_path / "a.csv"
    with Inspector(nn.Linear(8, 4)).monitor(csv=path) as monitor:
        monitor.observers.clear()
        loss_of(monitor._model).backward()
        monitor.step_end()
    before = path.read_text()
    with pytest.raises(InspectionError, match="its header lacks 'a:activation_mean'"):
        Inspector(net()).monitor(csv=path).start()
    assert path.read_text() == before


def test_a_disk_that_is_full_does_not_end_the_training(tmp_path: Path) -> None:
    """A warning, once; the history goes on."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    model = net()
    monitor = Inspector(model).monitor(csv=tmp_path / "a.csv")
    with monitor:
        monitor._table._file.close()
        monitor._table._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115, PTH123
        with pytest.warns(ModelHealthWarning, match="any longer, after step 0") as caught:
            train(model, monitor, 3)
    assert len(caught) == 1
    assert len(monitor.history) == 3
