"""The fewest samples that still fail are found, and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pytest_modelhealth import Inputs, replay
from pytest_modelhealth.bundles.shrinking import Part, fewest

from .conftest import Save


def plain() -> nn.Module:
    """Take any number of samples."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def normalised() -> nn.Module:
    """Take two samples or more, as batch normalisation does in training."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))


@pytest.mark.parametrize("make", [plain, normalised])
def test_the_one_row_of_a_batch_is_named(saved: Save, make: Callable[[], nn.Module]) -> None:
    """One NaN in row 17 of 64, in a dozen runs, though the model may take no single row."""
    batch = torch.randn(64, 4)
    batch[17, 2] = float("nan")
    then, folder = saved(make(), batch, torch.randint(3, (64,)), loss=F.cross_entropy)
    assert then.verdict == "unhealthy"
    report = replay(folder, make(), shrink=True)
    replayed = report.replayed
    assert replayed is not None
    assert (replayed.samples, replayed.of, replayed.smallest) == ((17,), 64, True)
    assert replayed.runs <= 14
    assert replayed.twice is (make is normalised)
    assert report.verdict == "unhealthy"
    assert report.observation.samples == (2 if replayed.twice else 1)
    assert "1 of 64 samples is enough: 17 (found in" in report.observation.notes[0]
    assert replayed.same  # of the whole batch, which ran first


def test_two_rows_that_fail_together(saved: Save) -> None:
    """Neither alone overflows: both are named, in the dimension that they lie along."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:  # (time, samples, features)
            return self.linear(x) * torch.log(2.5 - (x == 9).any(0).any(-1).sum())

    batch = torch.randn(5, 32, 3)
    batch[2, 4], batch[1, 30] = 9, 9
    batch[3, 11] = 9
    _, folder = saved(Sums(), Inputs(batch), batch_dim=1, probes="sample_independence")
    report = replay(folder, Sums(), shrink=True)
    assert report.replayed is not None
    assert report.replayed.samples == (4, 11, 30)
    assert "3 of 32 samples are enough: 4, 11, 30" in report.observation.notes[0]


def test_a_fault_of_the_whole_needs_the_whole(saved: Save) -> None:
    """Dead units take many samples to tell: no fewer is said, not one."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].bias.fill_(-10)
    then, folder = saved(model, torch.randn(33, 4))
    assert then.violations[0].check == "dead_units"
    report = replay(folder, model, shrink=True)
    assert report.replayed is not None
    fewer = report.replayed.samples
    assert fewer is None or len(fewer) >= 16


def test_nothing_to_look_for(saved: Save) -> None:
    """Where nothing fails, no sample is blamed."""
    _, folder = saved(plain(), torch.randn(64, 4))
    report = replay(folder, plain(), shrink=True)
    assert report.replayed is not None
    assert report.replayed.samples is None
    assert report.replayed.runs == 0
    assert "nothing fails here" in report.observation.notes[0]


@given(st.integers(1, 200).flatmap(
    lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1), min_size=1, max_size=4))
))  # fmt: skip
def test_what_is_needed_is_what_is_found(case: tuple[int, set[int]]) -> None:
    """Where a part fails just if it holds some samples, these are found, and in order."""
    size, needed = case
    found = fewest(range(size), needed.issubset, most=10_000)
    assert found.samples == tuple(sorted(needed))
    assert found.smallest
    if len(needed) == 1:
        assert found.runs <= 2 * size.bit_length()


def test_a_search_ends_at_its_limit() -> None:
    """And says that fewer may do; what it has by then does fail."""
    found = fewest(range(1000), lambda part: len(part) > 600, most=25)
    assert found.runs == 25
    assert not found.smallest
    assert len(found.samples) > 600


def test_what_is_cut_and_what_is_not() -> None:
    """Tensors and lists by samples are, tables and settings are not; a tensor that is one stays."""
    ids = torch.arange(4.0, requires_grad=True)
    batch = {"ids": ids, "table": torch.ones(7, 4), "names": list("abcd"), "k": 4, "pair": (ids, 2)}
    part = Part((1, 3), of=4, dimension=0)
    cut = part.take(batch)
    assert cut["ids"].tolist() == [1, 3]
    assert cut["ids"].requires_grad
    assert cut["pair"][0] is cut["ids"] is part.take(ids)
    assert cut["table"].shape == (7, 4)
    assert cut["names"] == ["b", "d"]
    assert cut["k"] == 4
    assert part.take([ids, ids, ids, ids])[0].tolist() == [1, 3]  # positional arguments, not rows
