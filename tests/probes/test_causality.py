"""Nothing sees what it is to predict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth.report import Outcome
from tests.probes.models import Rows, Writer, found, language, probed, rows

PROBE = "causality"
IDS = torch.randint(0, 20, (6, 13), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("causal", "block"), [((False, True), 0), ((True, False), 1)])
def test_a_missing_mask_is_named_in_its_block(causal: tuple[bool, bool], block: int) -> None:
    """The softmax of the block without a mask is where the future comes in."""
    report = probed(Writer(*causal), IDS[:, :-1], IDS[:, 1:], loss=language, probes=PROBE)
    ((layer, message),) = found(report, PROBE)
    assert layer == f"blocks.{block}.softmax"
    assert "models.py" in message
    assert "mask" in report.violations[0].cause
    with pytest.raises(AssertionError, match="sees the future"):
        report.assert_causal()


def test_a_causal_model_is_judged_healthy() -> None:
    """Read off the target, with no more said."""
    report = probed(Writer(True, True), IDS[:, :-1], IDS[:, 1:], loss=language, probes=PROBE)
    record = report.observation.probes[PROBE]
    assert (record.outcome, record.partings, record.forwards) == (Outcome.JUDGED, (), 1)
    report.assert_causal()


@pytest.mark.parametrize("is_causal", [True, False])
def test_labels_that_are_the_inputs_are_read_off_a_loss_that_shifts(is_causal: bool) -> None:
    """The loss is flat at the last output alone."""

    class Labelled(Writer):
        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = super().forward(ids)
            return {"loss": language(logits[:, :-1], labels[:, 1:]), "logits": logits}

    batch = {"ids": IDS, "labels": IDS}
    report = probed(Labelled(True, is_causal), batch, probes=PROBE)
    assert bool(found(report, PROBE)) is not is_causal


def test_pairs_of_steps_that_are_merged_are_a_leak() -> None:
    """What is changed begins at an odd step, or pairs would hide on one side of it."""

    class Merged(Writer):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.words(ids)
            pairs = x.unflatten(1, (-1, 2)).mean(2).repeat_interleave(2, 1)
            return self.head(x + pairs)

    report = probed(Merged(), IDS[:, :-1], IDS[:, 1:], loss=language, probes=PROBE)
    assert len(found(report, PROBE)) == 1


@pytest.mark.parametrize(
    ("bidirectional", "padding"), [(True, None), (False, "both"), (False, "left")]
)
def test_series_of_numbers(bidirectional: bool, padding: str | None) -> None:
    """Recurrences in two directions and convolutions padded on both sides see what is to come."""

    class Forecast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(2, 8, batch_first=True, bidirectional=bidirectional)
            self.conv = nn.Conv1d(2, 16 if bidirectional else 8, 3)
            self.head = nn.Linear(16 if bidirectional else 8, 2)

        def forward(self, x: Tensor) -> Tensor:
            if padding is None:
                return self.head(self.rnn(x)[0])
            sides = (1, 1) if padding == "both" else (2, 0)
            return self.head(self.conv(F.pad(x.transpose(1, 2), sides)).transpose(1, 2))

    x = torch.randn(5, 12, 2)
    report = probed(Forecast(), x[:, :-1], x[:, 1:], loss=F.mse_loss, probes=PROBE)
    layers = [layer for layer, _ in found(report, PROBE)]
    assert layers == ([] if padding == "left" else ["rnn" if padding is None else "conv"])


def test_without_a_claim_it_does_not_apply() -> None:
    """A classifier stays healthy; asked for by name, the verdict says that nothing was judged."""
    report = probed(Rows(), *rows())
    assert report.observation.probes[PROBE].outcome is Outcome.NOT_APPLICABLE
    assert report.healthy
    report = probed(Rows(), *rows(), probes=PROBE)
    assert "say causal=True" in report.inconclusive[0].reason
    with pytest.raises(AssertionError, match="no input one step later"):
        report.assert_causal()


def test_it_can_be_said() -> None:
    """causal=True judges every output with the steps of the inputs; causal=False none."""
    x = torch.randn(5, 9, 12)
    model = nn.GRU(12, 8, batch_first=True, bidirectional=True)
    assert found(probed(model, x, causal=True), PROBE)
    assert not found(probed(nn.GRU(12, 8, batch_first=True), x, causal=True), PROBE)
    record = probed(model, x, causal=False).observation.probes[PROBE]
    assert record.outcome is Outcome.NOT_APPLICABLE


class Conv(nn.Module):
    """Two convolutions over the last dimension, the second one padded on both sides if it leaks."""

    def __init__(self, channels: int, hidden: int, *, leaks: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(channels, hidden, 3), nn.Conv1d(hidden, channels, 3)
        self.leaks = leaks

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(F.pad(x, (2, 0))))
        return self.last(F.pad(h, (1, 1) if self.leaks else (2, 0)))


class Folded(nn.Module):
    """Time and samples folded, with as many features as steps, before a recurrence."""

    def __init__(self, channels: int, hidden: int, *, leaks: bool) -> None:
        super().__init__()
        self.first = nn.Linear(channels, hidden)
        self.last = nn.GRU(hidden, channels, batch_first=True, bidirectional=leaks)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.flatten(0, 1)).unflatten(0, x.shape[:2]))[0]


@pytest.mark.parametrize("time_dim", [None, True])
@pytest.mark.parametrize("leaks", [False, True])
@pytest.mark.parametrize(
    ("kind", "shape", "time"),
    [(Conv, (3, 4, 11), 2), (Conv, (3, 8, 8), 2), (Folded, (3, 8, 5), 1), (Folded, (3, 8, 8), 1)],
)
def test_time_may_be_any_dimension(
    kind: Any, shape: tuple[int, ...], time: int, leaks: bool, time_dim: bool | None
) -> None:
    """It is read off the sizes, also where channels are as many as steps, or it is said."""
    model, x = kind(shape[3 - time], 8, leaks=leaks), torch.randn(shape)
    said = {} if time_dim is None else {"time_dim": time - 3 if time == 2 else time}
    report = probed(model, x, probes=PROBE, causal=True, **said)
    assert report.probes[PROBE].outcome is Outcome.JUDGED
    assert f"time is dimension {time}" in report.probes[PROBE].changed
    assert [layer for layer, _ in found(report, PROBE)] == (["last"] if leaks else [])


@pytest.mark.parametrize(
    ("ids", "reason"),
    [(torch.ones(4, 9, dtype=torch.long), "all steps of the sequence are equal")],
)
def test_where_nothing_can_be_told_it_says_why(ids: Tensor, reason: str) -> None:
    """A constant sequence has no later steps to change."""
    report = probed(Writer(True), ids[:, :-1], ids[:, 1:], loss=language, probes=PROBE)
    assert reason in report.observation.probes[PROBE].reason


def test_left_padding_is_left_out() -> None:
    """A row that sees nothing attends everywhere, future included, and nobody reads it."""

    class Padded(Writer):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.words(ids)
            steps = ids.shape[1]
            seen = torch.ones(steps, steps, dtype=torch.bool).tril() & (ids != 0).unsqueeze(1)
            scores = (x @ x.transpose(1, 2)).masked_fill(~seen, -1e9)
            return self.head(x + scores.softmax(-1) @ x)

    ids = IDS.clamp(min=1).clone()
    ids[:3, :4] = 0
    report = probed(Padded(), ids[:, :-1], ids[:, 1:], loss=language, probes=PROBE)
    assert found(report, PROBE) == []


def test_padded_rows_count_in_no_output() -> None:
    """A row that sees nothing attends everywhere; keys made of it are padding too."""

    class Keeps(Writer):
        def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            x = self.words(ids)
            scores = (x @ x.transpose(1, 2)).masked_fill(~mask.unsqueeze(1), -1e9)
            seen = torch.ones(8, 8, dtype=torch.bool).tril()
            x = x + scores.masked_fill(~seen, -1e9).softmax(-1) @ x
            keys = self.head(x).unflatten(-1, (2, 10)).transpose(1, 2)
            return self.head(x), keys

    mask = torch.arange(8) >= torch.tensor([[0], [2], [3], [0]])
    ids = torch.randint(1, 20, (4, 8)) * mask

    def both(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        labels = target[:, 1:].masked_fill(~mask[:, 1:], -100)
        loss = F.cross_entropy(output[0][:, :-1].flatten(0, 1), labels.flatten())
        return loss + output[1][:, :, :-1].square().mean()

    report = probed(Keeps(), {"ids": ids, "mask": mask}, ids, loss=both, probes="causality")
    assert report.observation.probes["causality"].outcome is Outcome.JUDGED
    assert found(report, "causality") == []
