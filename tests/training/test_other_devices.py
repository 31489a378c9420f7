"""A training on another device: a watched step waits for it once, when the step is over."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from pytest_modelhealth import Inspector
from pytest_modelhealth.capture.observing import recorder
from pytest_modelhealth.statistics import Ledger, dense, queued
from pytest_modelhealth.training.monitoring.row import STATISTICS, StepRow
from tests.statistics.test_queued import NoWaiting
from tests.training.models import net, train


def rows() -> list[StepRow]:
    """Return the rows of a short training."""
    model, seen = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Inspector(model).monitor() as monitor:
        monitor.observers.append(seen.append)
        train(model, monitor, 3, optimizer=optimizer)
        assert monitor.report.observation.errors == ()
    return seen


def test_one_transfer_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors, treated as another device's, give the numbers of an ordinary training."""
    expected = rows()
    sizes: list[int] = []
    fetch_all = queued.fetch_all
    monkeypatch.setattr(recorder, "Ledger", partial(Ledger, queue_all=True))
    monkeypatch.setattr(dense, "_disable_current_modes", nullcontext)  # ours are seen too
    monkeypatch.setattr(queued, "fetch_all", lambda q: sizes.append(len(q)) or fetch_all(q))
    with NoWaiting():
        seen = rows()
    assert len(sizes) == 3
    for row, other in zip(seen, expected, strict=True):
        assert row.loss == other.loss
        assert row.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-12)
        assert row.update_ratio == pytest.approx(other.update_ratio, rel=1e-12)
        for statistic in STATISTICS:
            assert row.values[statistic].tolist() == pytest.approx(
                other.values[statistic].tolist(), rel=1e-12, nan_ok=True
            )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda() -> None:
    """With a fused optimizer and its scaler, on the device itself."""
    model = net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    with Inspector(model).monitor(scaler=scaler) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = model(torch.ones(4, 8, device="cuda")).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            monitor.step_end(loss=loss)
    row = monitor.latest
    assert monitor.report.observation.errors == ()
    assert row.loss == pytest.approx(loss.item())
    assert row.gradient_norm > 0
    assert row.update_ratio > 0
