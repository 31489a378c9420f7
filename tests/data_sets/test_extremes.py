"""Batch and sample of what stands out: planted, and found again."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import Inspector


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a small healthy model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).to(dtype)


def data(batches: int = 12) -> list[Tensor]:
    """Return batches of 10, the last one of 4."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(10 * batches - 6, 6, generator=generator)
    return list(whole.split(10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_largest_activation_is_where_numpy_finds_it(dtype: torch.dtype) -> None:
    """Of every layer and of gradients too, also where nothing was planted."""
    net, batches = model(dtype), [batch.to(dtype) for batch in data()]
    report = Inspector(net).run_batches(batches)
    for name in ("0", "1", "2", ""):
        outputs = [(net[: int(name) + 1] if name else net)(b).detach() for b in batches]
        best = max(range(len(batches)), key=lambda i: float(outputs[i].abs().max()))
        flat = int(outputs[best].abs().argmax())
        found = report[name].largest["activations"]
        assert (found.batch, found.sample) == (best, flat // outputs[best].shape[1])
        assert found.index == (flat // outputs[best].shape[1], flat % outputs[best].shape[1])
        assert abs(found.value) == report[name].activations.abs_max
        assert report[name].largest["gradients"].value <= report[name].gradients.abs_max


def test_an_overflow_to_come_says_where() -> None:
    """The failure of headroom names batch and sample of what is so large."""
    batches = [batch.half() for batch in data()]
    net = model(torch.float16)
    nn.init.uniform_(net[0].weight, 10.0, 11.0)
    batches[7][2] = 1000.0
    report = Inspector(net, checks="headroom").run_batches(batches, backward=False)
    text = report.render("failure")
    assert "headroom" in text
    assert "batch 7, sample 2" in text


def test_a_nan_in_one_sample_is_found() -> None:
    """The first batch and sample with a NaN; masks of negative infinity are no news."""
    batches = data()
    batches[3][5, 1] = float("nan")
    batches[9][1] = float("nan")
    report = Inspector(model()).run_batches(batches)
    found = report["0"].nonfinite["activations"]
    assert (found.batch, found.sample) == (3, 5)
    assert "batch 3, sample 5" in report.render("failure")
    clean = Inspector(model()).run_batches(data())
    assert all(not record.nonfinite for record in clean)


class Turned(nn.Module):
    """Its first layer has time before the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x.transpose(0, 1)).mean(0))


def test_without_a_batch_dimension_there_is_a_batch_and_no_sample() -> None:
    """A sample is told only where dimension 0 is as long as the batch."""
    batches = [torch.randn(10, 4, 6) for _ in range(3)]
    batches[1][7, 2] = 1e3
    report = Inspector(Turned()).run_batches(batches)
    found = report["first"].largest["activations"]
    assert (found.batch, found.sample) == (1, None)
    assert found.index is not None
    assert found.index[:2] == (2, 7)
    assert report["head"].largest["activations"].sample == 7


def test_places_survive_pickling_and_are_in_the_data() -> None:
    """A report with them is data as any other."""
    report = Inspector(model()).run_batches(data())
    for other in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert other["0"].largest == report["0"].largest
    layer = next(one for one in report.to_dict()["layers"] if one["name"] == "0")
    assert layer["largest"]["activations"]["batch"] == report["0"].largest["activations"].batch
    alone = Inspector(model()).run_inspection(data()[0])
    assert all(not record.largest for record in alone)


def test_observations_of_two_runs_are_merged() -> None:
    """Batches of the second count on from those of the first."""
    batches = data()
    batches[7][2] = 1e4
    first = Inspector(model()).run_batches(batches[:5]).observation
    second = Inspector(model()).run_batches(batches[5:]).observation
    found = first.merge(second).layers["0"].largest["activations"]
    assert (found.batch, found.sample) == (7, 2)
    found = second.merge(first).layers["0"].largest["activations"]
    assert (found.batch, found.sample) == (2, 2)


def test_a_layer_that_is_called_twice_has_one_place() -> None:
    """The largest of all calls of a batch."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.same(F.relu(self.same(x)) * 50)

    net, batches = Twice(), [torch.randn(8, 4) for _ in range(6)]
    report = Inspector(net).run_batches(batches)
    found = report["same"].largest["activations"]
    largest = [float(net(batch).detach().abs().max()) for batch in batches]
    assert found.batch == max(range(6), key=largest.__getitem__)
