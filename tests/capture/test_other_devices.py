"""A model on another device: nobody waits for the device until the run is over.

There is no other device here, so CPU tensors are treated as those of one, and a dispatch mode
refuses what would wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corpus.models.counted import residual
from pytest_modelhealth import Inspector
from pytest_modelhealth.capture.observing import recorder
from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.statistics import Ledger, dense, queued
from tests.statistics.test_queued import NoWaiting, assert_same


def mean_square(output: Tensor) -> Tensor:
    """Return the mean square."""
    return output.square().mean()


def inspect(layers: int = 3, **options: Any) -> HealthReport:
    """Inspect one step of it."""
    torch.manual_seed(1)
    images = torch.randn(6, 3, 8, 8)
    # no loss function of torch's, at whose arguments an inspection looks, once a run
    return Inspector(residual(layers)).run_inspection(images, loss=mean_square, **options)


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Treat all tensors as another device's, refuse to wait, and count the transfers."""
    sizes: list[int] = []
    fetch_all = queued.fetch_all
    monkeypatch.setattr(recorder, "Ledger", partial(Ledger, queue_all=True))
    monkeypatch.setattr(dense, "_disable_current_modes", nullcontext)  # ours are seen too
    monkeypatch.setattr(queued, "fetch_all", lambda q: sizes.append(len(q)) or fetch_all(q))
    with NoWaiting():
        yield sizes


@pytest.mark.parametrize("layers", [1, 6])
def test_one_transfer_brings_everything(fetches: list[int], layers: int) -> None:
    """However many layers there are, the device is waited for once, the loss included."""
    report = inspect(layers)
    assert report.observation.errors == ()
    assert len(fetches) == 1
    assert fetches[0] > 20 * layers


def test_statistics_are_those_of_the_cpu(fetches: list[int]) -> None:
    """Every layer, role and tensor has the numbers of an ordinary inspection."""
    found = inspect()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "Ledger", Ledger)
        expected = inspect()
    assert found.loss == expected.loss
    assert list(found.layers) == list(expected.layers)
    compared = 0
    for name, record in expected.layers.items():
        for role in ("inputs", "activations", "gradients", "parameters", "buffers"):
            for tensor, statistics in record.tensors(role).items():
                assert_same(found[name].tensors(role)[tensor], statistics)
                compared += 1
    assert compared > 60


def test_a_scaled_loss_is_fetched_with_the_rest(fetches: list[int]) -> None:
    """Gradients without the factor, under the dtype that they have."""
    found = inspect(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    assert len(fetches) == 1
    expected = inspect()
    for name, record in expected.layers.items():
        if record.gradients is not None:
            assert found[name].gradients.norm == pytest.approx(record.gradients.norm, rel=1e-5)
            assert found[name].gradients.dtype == "float32"


class Strict(nn.Sequential):
    """Runs under CUDA's own check, which raises at a wait."""

    def forward(self, x: Tensor) -> Tensor:
        with strictly():
            return super().forward(x)


@contextmanager
def strictly() -> Iterator[None]:
    """Have CUDA raise where somebody waits for it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_no_layer_is_waited_for() -> None:
    """Anywhere in the forward or the backward."""
    watched, images = Strict(residual().cuda()), torch.randn(6, 3, 8, 8, device="cuda")

    def backward(value: Tensor) -> None:
        with strictly():
            value.backward()

    report = Inspector(watched).run_inspection(images, loss=mean_square, backward=backward)
    assert report.observation.errors == ()
    assert report["0.0"].activations.device == "cuda:0"
