"""Batch and sample of what stands out: planted, and found again."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.models.loaded import Turned
from pytest_modelhealth import Inspector
from pytest_modelhealth.statistics import Ledger


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
        found = report[name].largest["activations"]
        assert (found.batch, found.sample, found.index) == (best, None, None)
        assert abs(found.value) == report[name].activations.abs_max
        assert report[name].largest["gradients"].value <= report[name].gradients.abs_max


def test_an_overflow_to_come_says_where() -> None:
    """The failure of headroom names the batch of what is so large."""
    batches = [batch.half() for batch in data()]
    net = model(torch.float16)
    nn.init.uniform_(net[0].weight, 10.0, 11.0)
    batches[7][2] = 1000.0
    report = Inspector(net, checks="headroom").run_batches(batches, backward=False)
    text = report.render("failure")
    assert "headroom" in text
    assert "was in batch 7" in text


def test_a_nan_in_one_sample_is_found() -> None:
    """The first batch and sample with a NaN; masks of negative infinity are no news."""
    batches = data()
    batches[3][5, 1] = float("nan")
    batches[9][1] = float("nan")
    report = Inspector(model()).run_batches(iter(batches), max_batches=10)
    found = report["0"].nonfinite["activations"]
    assert (found.batch, found.sample) == (3, 5)
    text = report.render("failure")
    assert "batch 3, sample 5" in text
    assert "of 10 batches (max_batches=10 ended the run)" in text
    assert '"ended_by"' in report.render("json")
    clean = Inspector(model()).run_batches(data())
    assert all(not record.nonfinite for record in clean)


def test_without_a_batch_dimension_there_is_a_batch_and_no_sample() -> None:
    """A sample is told only where dimension 0 is as long as the batch."""
    batches = [torch.randn(10, 4, 6) for _ in range(3)]
    batches[1][7, 2] = float("nan")
    report = Inspector(Turned()).run_batches(batches)
    found = report["first"].nonfinite["activations"]
    assert (found.batch, found.sample) == (1, None)
    assert found.index[:2] == (2, 7)
    assert report["head"].nonfinite["activations"].sample == 7


def test_places_survive_pickling_and_are_in_the_data() -> None:
    """A report with them is data as any other."""
    report = Inspector(model()).run_batches(data())
    assert pickle.loads(pickle.dumps(report))["0"].largest == report["0"].largest
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
    assert found.batch == 7
    found = second.merge(first).layers["0"].largest["activations"]
    assert found.batch == 2


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


# On a GPU, places are found without a wait in each layer, and are the CPU's.

DEVICES = [
    "queued",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
    ),
]
OF_LEDGER = Ledger.__init__


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a device; the first is the CPU, treated as another one."""
    if request.param == "cuda":
        return "cuda"
    monkeypatch.setattr(Ledger, "__init__", lambda self: OF_LEDGER(self, queue_all=True))
    return "cpu"


def test_places_are_those_of_the_cpu(device: str) -> None:
    """The batch of the largest and of the first NaN; sample and index stay there."""
    planted = data()
    planted[7][2] = 1e4
    planted[3][5, 1] = float("nan")
    planted[5][1, 0] = -float("inf")
    net = model().to(device)
    report = Inspector(net).run_batches([batch.to(device) for batch in planted])
    truth = [net[0](batch.to(device)).detach().double().cpu() for batch in planted]
    finite = [torch.where(t.isfinite(), t, 0.0).abs().max().item() for t in truth]
    found = report["0"].largest["activations"]
    assert (found.batch, found.sample, found.index) == (7, None, None)
    assert abs(found.value) == pytest.approx(max(finite))
    assert report["0"].nonfinite["activations"].batch == 3
    assert report[""].nonfinite["inputs"].batch == 3


def test_gradients_under_a_loss_scale_have_the_values_without(device: str) -> None:
    """The place is that of the gradient, the value the one reported."""
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    net = model().to(device)
    pairs = [(batch.to(device), torch.arange(len(batch)).to(device) % 3) for batch in data()]
    plain = Inspector(net).run_batches(pairs, loss=F.cross_entropy)
    scaled = Inspector(net).run_batches(pairs, loss=F.cross_entropy, scaler=scaler)
    for name in ("0", "2"):
        found, truth = (r[name].largest["gradients"] for r in (scaled, plain))
        assert found.batch == truth.batch
        assert found.value == pytest.approx(truth.value, rel=1e-5)
