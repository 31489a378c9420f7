"""On a GPU, places and classes are found without a wait in each layer, and are the CPU's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pytest_modelhealth import Inspector
from pytest_modelhealth.statistics import Ledger
from tests.data_sets.test_extremes import data, model

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
