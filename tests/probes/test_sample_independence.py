"""Samples do not see each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth.report import Outcome
from tests.probes.models import Rows, found, probed, rows

PROBE = "sample_independence"


@pytest.mark.parametrize(
    ("between", "step"),
    [
        (lambda h: h - h.mean(0), "mean"),
        (lambda h: h * h.softmax(0), None),
        (lambda h: h / h.std(0), "std"),
        (lambda h: h.T.reshape(h.shape), "view"),
        (lambda h: h * h[:1], "mul"),
    ],
    ids=["mean", "softmax", "std", "view after a transpose", "of the first sample"],
)
def test_what_crosses_the_batch_is_located_in_the_code_that_does_it(
    between: Callable[[Tensor], Tensor], step: str | None
) -> None:
    """The first layer that differs is named, or the code before it with its last operations."""
    report = probed(Rows(between), *rows(), probes=PROBE)
    ((layer, message),) = found(report, PROBE)
    assert layer == ("softmax" if step is None else "")
    assert step is None or f"`{step}`" in message
    assert "models.py" in message or "test_sample_independence.py" in message
    assert not report.healthy
    assert any(one.details for one in report.violations)
    with pytest.raises(AssertionError, match="samples see each other"):
        report.assert_samples_independent()


def test_a_mean_by_hand_is_measured_as_numpy_measures_it() -> None:
    """The effect is that of the overwritten batch on the samples left alone."""
    model, (x, y) = Rows(lambda h: h - h.mean(0)), rows()
    report = probed(model, x, y, probes=PROBE)
    effects = []
    for parity in (0, 1):
        index = torch.arange(10)
        source = index - index % 2 if parity == 0 else (index | 1).clamp(max=9)
        with torch.no_grad():
            before, after = model(x).double(), model(x[source]).double()
        moved = (before - after).abs()[source == index]
        effects.append(float(moved.max() / before.square().mean().sqrt()))
    assert report.observation.probes[PROBE].partings[0].effect == pytest.approx(max(effects))


@pytest.mark.parametrize(
    "model",
    [
        Rows(),
        Rows(lambda h: F.normalize(h, dim=1)),
        nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 3)),
        Rows(lambda h: F.layer_norm(h, (16,))),
    ],
    ids=["perceptron", "normalised rows", "batch norm", "layer norm"],
)
def test_a_healthy_model_is_judged_and_not_objected_to(model: nn.Module) -> None:
    """Batch statistics of training mode are no leak."""
    report = probed(model, *rows(), probes=PROBE)
    assert report.observation.probes[PROBE].outcome is Outcome.JUDGED
    assert found(report, PROBE) == []
    report.assert_samples_independent()


def test_a_lost_dimension_shows_with_one_sample_alone() -> None:
    """squeeze() without a dimension changes nothing for a batch of several samples."""
    model = Rows()
    model.last = nn.Sequential(nn.Linear(16, 1), nn.Flatten(0))
    report = probed(model, rows()[0], torch.randn(10), loss=F.mse_loss, probes=PROBE)
    assert found(report, PROBE) == []

    class Squeezed(Rows):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).squeeze()

    report = probed(Squeezed(), *rows(), probes=PROBE)
    assert "of one sample alone" in found(report, PROBE)[0][1]


def test_similarities_of_pairs_are_no_leak() -> None:
    """An output whose other dimension follows the number of samples pairs them."""

    class Pairs(Rows):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            return h @ h.T

    report = probed(Pairs(), rows()[0], torch.arange(10), probes=PROBE)
    assert found(report, PROBE) == []


@pytest.mark.parametrize(
    ("inputs", "model", "reason"),
    [
        (torch.randn(1, 12), Rows(), "one sample"),
        (torch.ones(8, 12), Rows(), "are equal"),
        ((torch.randn(8, 12), torch.randn(3, 12)), None, "no first dimension in common"),
        (
            torch.randn(8, 12),
            nn.Sequential(Rows(), nn.Flatten(0), nn.Linear(24, 5)),
            "no output has a row",
        ),
    ],
    ids=["one sample", "equal samples", "no common dimension", "no rows"],
)
def test_where_nothing_can_be_told_the_verdict_is_inconclusive(
    inputs: Tensor, model: nn.Module | None, reason: str
) -> None:
    """It says why, and what to give."""

    class Two(Rows):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return super().forward(x) + other.mean()

    report = probed(model or Two(), inputs, probes=PROBE)
    record = report.observation.probes[PROBE]
    assert record.outcome is Outcome.NOT_TOLD
    assert reason in record.reason
    assert reason in " ".join(one.reason for one in report.inconclusive)
    with pytest.raises(AssertionError, match="inconclusive"):
        report.assert_samples_independent()


def test_a_model_bound_to_its_batch_is_not_judged() -> None:
    """An adjacency matrix has as many rows as the batch has nodes."""

    class Graph(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("adjacency", torch.softmax(torch.randn(10, 10), 1))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.adjacency @ x)

    report = probed(Graph(), *rows(), probes=PROBE)
    assert "bound to the size of this batch" in report.observation.probes[PROBE].reason


def test_the_dimension_of_samples_can_be_said() -> None:
    """Time-major, the second dimension is that of samples: said so, it is judged along it."""
    model = nn.GRU(12, 16)
    report = probed(model, torch.randn(7, 5, 12), probes=PROBE)
    assert "batch_dim=1" in report.observation.probes[PROBE].reason
    report = probed(model, torch.randn(7, 5, 12), probes=PROBE, batch_dim=1)
    assert report.observation.probes[PROBE].outcome is Outcome.JUDGED
    assert found(report, PROBE) == []


def test_a_batch_taken_for_a_sequence_names_the_layer() -> None:
    """Without batch_first a recurrent layer runs over the samples."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(12, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    report = probed(Last(), torch.randn(6, 5, 12), torch.randint(0, 3, (6,)), probes=PROBE)
    assert found(report, PROBE)[0][0] == "rnn"
    assert "batch_first" in report.violations[0].cause


def test_experts_that_choose_among_all_samples_are_warned_of() -> None:
    """A choice over the batch may be meant: a warning, which a direct assertion takes as a no."""

    class Chosen(Rows):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            best = h.sum(1).topk(5).indices
            return self.last(h.index_add(0, best, h[best]))

    report = probed(Chosen(), *rows(), probes=PROBE)
    assert [one.check for one in report.warnings] == [PROBE]
    assert report.healthy
    with pytest.raises(AssertionError, match="samples see each other"):
        report.assert_samples_independent()


class Steps(nn.Module):
    """Takes time first and returns samples first, or the other way round."""

    def __init__(self, *, is_first: bool, leaks: bool) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(5, 8), nn.Linear(8, 3)
        self.is_first, self.leaks = is_first, leaks

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.rnn(x if self.is_first else x.transpose(0, 1))[0]
        hidden = hidden * self.head(hidden)[..., :1].softmax(1 if self.leaks else 0)
        return self.head(hidden.sum(0) if self.is_first else hidden)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("leaks", [False, True])
def test_an_output_may_have_its_samples_elsewhere(is_first: bool, leaks: bool) -> None:
    """Time in front is pooled away; losses over sequences ask for time in front."""
    batch = torch.randn(9, 6, 5) if is_first else torch.randn(6, 9, 5)
    model = Steps(is_first=is_first, leaks=leaks)
    report = probed(model, batch, probes=PROBE, batch_dim=int(is_first))
    record = report.probes[PROBE]
    assert record.outcome is Outcome.JUDGED
    assert bool(record.partings) is leaks


def test_features_as_many_as_samples_are_no_samples() -> None:
    """Two views of each sample, one after the other: rows become fewer with the batch."""

    class Views(nn.Linear):
        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            return torch.cat([super().forward(one), super().forward(other)])

    model, views = Views(12, 8), (torch.randn(8, 12), torch.randn(8, 12))
    record = probed(model, views, probes=PROBE).probes[PROBE]
    assert (record.outcome, record.partings) == (Outcome.JUDGED, ())


X = torch.randn(7, 6, 12, generator=torch.Generator().manual_seed(0))
STATE = torch.zeros(1, 6, 16)
LAYOUTS: dict[str, tuple[Any, Any, Callable[[Tensor], Any]]] = {
    "flattened": (X.transpose(0, 1), None, lambda h: h.transpose(0, 1).flatten(0, 1)),
    "flattened, time in front": (X.transpose(0, 1), None, lambda h: h.flatten(0, 1)),
    "a first state tells": ((X, STATE), None, lambda h: h),
    "a first state tells, flattened": ((X, STATE), None, lambda h: h.flatten(0, 1)),
    "a first state tells, and comes back": ((X, STATE), None, lambda h: (h.flatten(0, 1), h[-1:])),
    "the output and its target tell": (X, torch.zeros(6, 3), lambda h: h[-1]),
    "moved, as its target": (X, torch.zeros(6, 7, 3), lambda h: h.transpose(0, 1)),
}


@pytest.mark.parametrize("leaks", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_are_found_by_sizes(layout: str, leaks: bool) -> None:
    """Flattened with time, or second in what has time in front."""
    inputs, target, returned = LAYOUTS[layout]

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(12, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor, state: Tensor | None = None) -> Any:
            h = self.head(self.rnn(x if x.shape[0] == 7 else x.transpose(0, 1), state)[0])
            return returned(h - h.mean(1, keepdim=True) if leaks else h)

    loss = None if target is None else F.mse_loss
    report = probed(Recurrent(), inputs, target, loss=loss, probes=PROBE)
    assert report.probes[PROBE].outcome is Outcome.JUDGED, report.probes[PROBE].reason
    assert bool(found(report, PROBE)) is leaks


@pytest.mark.parametrize("probes", [True, PROBE])
@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Sequential(Rows(), nn.Flatten(0), nn.Linear(24, 1), nn.Flatten(0)), torch.randn(8, 12)),
        (nn.GRU(12, 16), X),
        (Rows(), torch.randn(1, 12)),
    ],
    ids=["only a loss", "time in front, or a layer that takes samples for time", "one sample"],
)
def test_who_asks_for_all_gets_a_note(model: nn.Module, inputs: Tensor, probes: Any) -> None:
    """What cannot be told touches the verdict only where it was asked for by name."""
    report = probed(model, inputs, probes=probes)
    assert report.probes[PROBE].outcome is Outcome.NOT_TOLD
    assert report.verdict == ("healthy" if probes is True else "inconclusive")
    assert (f"note: {PROBE} cannot tell" in str(report)) is (probes is True)


def test_a_model_may_return_fewer_tensors_of_another_batch() -> None:
    """What it finds in a batch, say: then there is nothing to hold against it."""

    class Finds(nn.Linear):
        def forward(self, x: Tensor) -> list[Tensor]:
            every = super().forward(x)
            return [every, *([every + 1] if bool((x[1] != x[0]).any()) else [])]

    record = probed(Finds(12, 8), torch.randn(5, 12), probes=PROBE).probes[PROBE]
    assert record.outcome is Outcome.JUDGED
    assert not record.partings
