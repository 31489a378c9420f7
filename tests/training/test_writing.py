"""Where the numbers of a monitor go, a watched step at once: a table, TensorBoard, a function."""

from __future__ import annotations

import csv
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import InspectionError, Inspector, ModelHealthWarning
from pytest_modelhealth.training.monitoring.monitor import TrainingMonitor
from pytest_modelhealth.training.monitoring.row import STATISTICS
from tests.training.models import Net, loss_of, net, train


def monitored(steps: int = 5, model: nn.Module | None = None, **options: Any) -> TrainingMonitor:
    """Train a model; return its monitor."""
    model = net() if model is None else model
    with Inspector(model).monitor(**options) as monitor:
        train(model, monitor, steps)
    return monitor


# ---- a table


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
        monitored(2, csv=path)
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
    model, path, other = Late(), tmp_path / "a.csv", tmp_path / "b.csv"
    monitor = Inspector(model).monitor(csv=path)
    with pytest.warns(ModelHealthWarning, match="does not know: gelu"), monitor:
        train(model, monitor, 3, after=lambda step: setattr(model, "is_late", True))
    assert "gelu:gradient_norm" not in table(path)[-1]
    assert "gelu" in monitor.history.layers
    for model.is_late in (True, False):
        monitored(1, model, csv=other)
    assert [row["gelu:gradient_norm"] == "" for row in table(other)] == [False, True]


def test_what_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """No folder, a folder, another file: a clear error, the file as it was, the model untouched."""
    model, other, short = net(), tmp_path / "other", tmp_path / "short"
    other.write_text("a,b\n1,2\n")
    monitored(1, nn.Linear(8, 4), csv=short)
    before = short.read_text()
    for path, message in (
        (tmp_path / "none" / "a", "cannot write .*No such file"),
        (tmp_path, "cannot write .*[Ii]s a directory"),
        (other, "something else"),
        (short, "its header lacks 'a:activation_mean'"),
    ):
        with pytest.raises(InspectionError, match=message):
            Inspector(model).monitor(csv=path).start()
        assert not any(module._forward_hooks for module in model.modules())
    assert other.read_text() == "a,b\n1,2\n"
    assert short.read_text() == before
    monitored(1, model, csv=tmp_path / "a")


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


# ---- writers of other libraries, of which none is imported


class SummaryWriter:
    """A stand-in of TensorBoard's: anything with `add_scalar`."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


def written(model: nn.Module | None = None, **options: Any) -> dict[str, float]:
    """Return the numbers of the last step that a function gets."""
    got: list[dict[str, float]] = []
    monitored(1, model, to=lambda _, numbers: got.append(numbers), **options)
    return got[-1]


def test_names_and_values_reach_a_function() -> None:
    """Of the model loss, gradient norm and update ratio; of each layer five statistics."""
    got: list[tuple[int, dict[str, float]]] = []
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    monitor = monitored(5, model, every=2, to=lambda step, numbers: got.append((step, numbers)))
    assert [step for step, _ in got] == [0, 2, 4]
    last = got[-1][1]
    assert last["modelhealth/loss"] == monitor.latest.loss
    assert last["modelhealth/gradient_norm"] == monitor.latest.gradient_norm
    assert last["modelhealth/0/update_ratio"] == monitor.latest["0", "update_ratio"]
    names = "0/activation_rms", "1/dead_fraction", "2/parameter_gradient_norm", "2/update_ratio"
    assert {f"modelhealth/{name}" for name in names} < last.keys()
    assert "modelhealth/1/update_ratio" not in last  # it has no parameters
    assert not any(name.startswith("modelhealth/Sequential") for name in last)  # it holds others


def test_a_model_of_one_layer_goes_by_its_type() -> None:
    """Its statistics do not take the names of those of the whole."""
    names = written(nn.Linear(8, 4))
    assert {"modelhealth/gradient_norm", "modelhealth/Linear/gradient_norm"} < names.keys()


def test_statistics_are_chosen() -> None:
    """Only those that are asked for, for each layer; unknown ones are refused."""
    names = written(statistics="activation_mean")
    assert {n.rpartition("/")[2] for n in names if n.count("/") > 1} == {"activation_mean"}
    with pytest.raises(InspectionError, match="activation_mean"):
        monitored(to=print, statistics=["activation_meen"])


def test_tensorboard_gets_scalars() -> None:
    """Each at its step, alone or in a list."""
    alone, listed = SummaryWriter(), SummaryWriter()
    monitored(every=2, to=alone)
    monitored(every=2, to=[listed])
    assert alone.scalars == listed.scalars
    assert [step for name, _, step in alone.scalars if name == "modelhealth/loss"] == [0, 2, 4]


def test_the_real_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    """Its own reader finds the scalars."""
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(tmp_path))
        monitor = monitored(to=writer)
        writer.close()
        events = EventAccumulator(str(tmp_path)).Reload()
    losses = [event.value for event in events.Scalars("modelhealth/loss")]
    assert losses == pytest.approx(monitor.history.loss.tolist())


def test_a_failing_writer_does_not_end_the_training() -> None:
    """One warning, of the line of the loop; three failures end the attempts; others get all."""
    tried: list[int] = []
    got: list[int] = []

    def full(step: int, _: Any) -> None:
        tried.append(step)
        raise OSError("no space left")

    def loop() -> None:
        model = net()
        both = [full, lambda step, _: got.append(step)]
        with Inspector(model).monitor(every=2, to=both) as monitor:
            for step in range(20):
                loss_of(model).backward()
                monitor.step_end(step)

    with pytest.warns(ModelHealthWarning, match="full did not take .* step 0: OSError: no") as seen:
        loop()
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert tried == [0, 2, 4]
    assert len(got) == 10


@pytest.mark.parametrize("to", [3, SummaryWriter, "runs/1", [print, None]])
def test_what_is_no_destination_is_refused(to: object) -> None:
    """Before the training, with a list of what is one."""
    with pytest.raises(InspectionError, match=r"SummaryWriter of TensorBoard, a function of the"):
        monitored(to=to)
