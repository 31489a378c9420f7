"""Evaluation repeats itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth.report import Outcome
from tests.probes.models import Rows, found, probed, rows

PROBE = "repeatability"


class Kept(Rows):
    """Keeps something from call to call."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.seen, self.first_seen = what, [], None
        self.register_buffer("mean", torch.zeros(16))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.mul_(0.5) if self.what == "batch" else x)
        if self.what == "buffer":
            with torch.no_grad():
                self.mean += 0.1 * h.mean(0)
            h = h - self.mean
        elif self.what == "list":
            self.seen.append(h.detach().mean())
        elif self.what == "first batch":
            self.first_seen = h.detach() if self.first_seen is None else self.first_seen
            h = h + self.first_seen
        elif self.what == "number":
            self.scale *= 0.9
            h = h * self.scale
        elif self.what == "weight":
            with torch.no_grad():
                self.last.weight.mul_(0.99)
        return self.last(h)


@pytest.mark.parametrize("what", ["buffer", "list", "first batch", "number"])
def test_what_is_kept_from_call_to_call_is_warned_of(what: str) -> None:
    """Queues and carried states do so on purpose; a direct assertion takes it as a no."""
    report = probed(Kept(what), *rows(), probes=PROBE)
    assert [one.check for one in report.warnings] == [PROBE]
    named = {"buffer": "'mean'", "list": "'seen' goes from", "number": "'scale'"}
    assert named.get(what, "another batch") in report.warnings[0].message
    with pytest.raises(AssertionError):
        report.assert_repeatable()


@pytest.mark.parametrize("what", ["weight", "batch"])
def test_writing_to_weights_or_batch_is_a_fault(what: str) -> None:
    """Neither is for a forward to do."""
    model, (x, y) = Kept(what), rows()
    before = model.last.weight.detach().clone(), x.clone()
    report = probed(model, x, y, probes=PROBE)
    assert what in found(report, PROBE)[0][1]
    assert not report.healthy
    if what == "weight":  # written by the inspection, as ever, and by no run of a probe
        assert torch.equal(model.last.weight, before[0] * 0.99)
    else:
        assert torch.equal(x, before[1] * 0.5)


def test_dropout_in_evaluation_mode_is_located() -> None:
    """F.dropout without training= is active in every mode."""
    report = probed(Rows(lambda h: F.dropout(h, 0.3)), *rows(), probes=PROBE)
    ((layer, message),) = found(report, PROBE)
    assert (layer, "dropout is active" in message) == ("", True)
    assert "training=self.training" in report.violations[0].cause
    probed(nn.Sequential(Rows(), nn.Dropout()), *rows(), probes=PROBE).assert_repeatable()


def test_fused_attention_with_a_dropout_of_its_own_is_located() -> None:
    """The function knows no mode."""

    def attend(h: Tensor) -> Tensor:
        x = h.unflatten(1, (4, 4))
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).flatten(1)

    report = probed(Rows(attend), *rows(), probes=PROBE)
    assert found(report, PROBE)[0][0] == "scaled_dot_product_attention"
    assert not report.healthy


def test_other_draws_are_warned_of_by_the_layer_that_draws() -> None:
    """A latent may be drawn on purpose."""
    report = probed(Rows(lambda h: h + torch.randn_like(h)), *rows(), probes=PROBE)
    assert "draws random numbers" in report.warnings[0].message
    assert report.healthy


def test_what_is_drawn_shows_beside_what_is_kept() -> None:
    """Two findings of one model: the seed is tried in a run of its own, too."""

    class Both(Kept):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.5)

    report = probed(Both("first batch"), *rows(), probes=PROBE)
    assert "dropout is active" in report.violations[0].message
    assert "another batch" in report.warnings[0].message


@pytest.mark.parametrize(
    "model",
    [
        Rows(),
        nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 3)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(12, 3)),
    ],
    ids=["perceptron", "norm and dropout", "spectral norm"],
)
def test_a_healthy_model_repeats_itself(model: nn.Module) -> None:
    """Running statistics and power iterations move in training mode only."""
    record = probed(model, *rows(), probes=PROBE).observation.probes[PROBE]
    assert (record.outcome, record.partings, record.forwards) == (Outcome.JUDGED, (), 3)


def test_counters_and_caches_filled_once_are_no_trace() -> None:
    """Whole numbers count calls, and what is filled by the first call stays."""

    class Cached(Rows):
        calls, table = 0, None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.table is None:
                self.table = torch.arange(12.0)
            return super().forward(x + self.table)

    assert found(probed(Cached(), *rows(), probes=PROBE), PROBE) == []


def test_a_table_with_a_largest_norm_moves_by_rounding_alone() -> None:
    """`Embedding(max_norm=...)` writes to its weight in forward, by design."""
    model = nn.Sequential(nn.Embedding(20, 8, max_norm=1.0), nn.Flatten(), nn.Linear(24, 3))
    ids = torch.randint(0, 20, (10, 3))
    assert found(probed(model, ids, rows()[1], probes=PROBE), PROBE) == []
