"""The numbers of a monitor go to writers of other libraries, of which none is imported."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelhealth import InspectionError, Inspector, ModelHealthWarning

LAYERS = {
    "0/activation_rms": True,
    "1/dead_fraction": True,
    "2/parameter_gradient_norm": True,
    "2/update_ratio": True,
}


def train(steps: int = 5, model: nn.Module | None = None, **monitor: Any) -> Any:
    """Train a small model; return its monitor."""
    torch.manual_seed(0)
    if model is None:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs, target = torch.randn(8, 4), torch.arange(8) % 2
    with Inspector(model).monitor(every=2, **monitor) as made:
        for number in range(steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
            made.step_end(number, loss=loss)
    return made


class SummaryWriter:
    """A stand-in of TensorBoard's: anything with `add_scalar`."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


def test_names_and_values_reach_a_function():
    """Of the model loss, gradient norm and update ratio; of each layer five statistics."""
    got: list[tuple[int, dict[str, float]]] = []
    monitor = train(to=lambda step, numbers: got.append((step, numbers)))
    assert [step for step, _ in got] == [0, 2, 4]
    last = got[-1][1]
    assert last["modelhealth/loss"] == monitor.latest.loss
    assert last["modelhealth/gradient_norm"] == monitor.latest.gradient_norm
    assert last["modelhealth/0/update_ratio"] == monitor.latest["0", "update_ratio"]
    assert {f"modelhealth/{name}" for name in LAYERS} < last.keys()
    assert "modelhealth/1/update_ratio" not in last  # it has no parameters
    assert not any(name.startswith("modelhealth/Sequential") for name in last)  # it holds others


def test_a_model_of_one_layer_goes_by_its_type():
    """Its statistics do not take the names of those of the whole."""
    got: list[dict[str, float]] = []
    train(1, nn.Linear(4, 2), to=lambda _, numbers: got.append(numbers))
    assert {"modelhealth/gradient_norm", "modelhealth/Linear/gradient_norm"} < got[0].keys()


def test_statistics_are_chosen():
    """Only those that are asked for, for each layer; unknown ones are refused."""
    got: list[dict[str, float]] = []
    train(1, to=lambda _, numbers: got.append(numbers), statistics="activation_mean")
    assert {name.rpartition("/")[2] for name in got[0] if name.count("/") > 1} == {
        "activation_mean"
    }
    with pytest.raises(InspectionError, match="activation_mean"):
        train(to=print, statistics=["activation_meen"])


def test_tensorboard_gets_scalars():
    """Each at its step, alone or in a list."""
    alone, listed = SummaryWriter(), SummaryWriter()
    train(to=alone)
    train(to=[listed])
    assert alone.scalars == listed.scalars
    assert [step for name, _, step in alone.scalars if name == "modelhealth/loss"] == [0, 2, 4]


def test_the_real_tensorboard_reads_what_was_written(tmp_path):
    """Its own reader finds the scalars."""
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(tmp_path))
        monitor = train(to=writer)
        writer.close()
        events = EventAccumulator(str(tmp_path)).Reload()
    losses = [event.value for event in events.Scalars("modelhealth/loss")]
    assert losses == pytest.approx(monitor.history.loss.tolist())


def test_a_failing_writer_does_not_end_the_training():
    """One warning; three failures end the attempts; others get all."""
    tried: list[int] = []
    got: list[int] = []

    def full(step: int, _: Any) -> None:
        tried.append(step)
        raise OSError("no space left")

    with pytest.warns(ModelHealthWarning, match="full did not take .* step 0: OSError: no") as seen:
        train(20, to=[full, lambda step, _: got.append(step)])
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert tried == [0, 2, 4]
    assert len(got) == 10


@pytest.mark.parametrize("to", [3, SummaryWriter, "runs/1", [print, None]])
def test_what_is_no_destination_is_refused(to):
    """Before the training, with a list of what is one."""
    with pytest.raises(InspectionError, match=r"SummaryWriter of TensorBoard, a function of the"):
        train(to=to)
