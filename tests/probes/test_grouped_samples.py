"""Where rows are no samples: groups of rows, as the nodes of several graphs, and nodes of one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth.report import Outcome
from tests.probes.models import found, probed

PROBE = "sample_independence"
SIZES = torch.tensor([3, 5, 4, 2, 6])
GROUPS = torch.arange(5).repeat_interleave(SIZES)


def mean_by(h: Tensor, groups: Tensor) -> Tensor:
    """Return the mean of each group's rows."""
    total = h.new_zeros(int(groups[-1]) + 1, h.shape[1]).index_add(0, groups, h)
    return total / groups.bincount()[:, None]


def ring(groups: Tensor) -> Tensor:
    """Return edges from each row to the next of its group, shape (2, edges)."""
    rows = torch.arange(len(groups) - 1)
    return torch.stack([rows, rows + 1])[:, groups[:-1] == groups[1:]]


class Graphs(nn.Module):
    """One round of messages along edges, something between, and an output a row or a group."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor], *, pools: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.between, self.pools = between, pools

    def forward(self, x: Tensor, edges: Tensor, groups: Tensor) -> Tensor:
        h = self.first(x)
        h = F.relu(h.index_add(0, edges[1], h[edges[0]]))
        h = self.between(h, groups)
        return self.last(mean_by(h, groups) if self.pools else h)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return features of the rows of five groups, their edges and the number of the group."""
    return torch.randn(len(GROUPS), 6), ring(GROUPS), GROUPS


@pytest.mark.parametrize("pools", [False, True])
@pytest.mark.parametrize(
    ("between", "leaks"),
    [
        (lambda h, groups: h, False),
        (lambda h, groups: h - mean_by(h, groups)[groups], False),
        (lambda h, groups: h - h.mean(0), True),
        (lambda h, groups: h * h.softmax(0), True),
    ],
    ids=["nothing", "mean of the group", "mean of all", "softmax over all"],
)
def test_groups_are_the_samples(
    between: Callable[[Tensor, Tensor], Tensor], leaks: bool, pools: bool
) -> None:
    """Rows of one group may see each other, through edges or a mean; those of others may not."""
    report = probed(Graphs(between, pools=pools), batch(), probes=PROBE)
    record = report.probes[PROBE]
    assert record.outcome is Outcome.JUDGED
    assert "5 groups" in record.notes[0]
    assert report.healthy is not leaks
    if leaks:
        ((layer, message),) = found(report, PROBE)
        assert layer in ("", "softmax")
        assert "groups see each other" in message


def test_the_effect_is_that_of_the_other_groups() -> None:
    """The number is what overwriting every second group by hand gives."""
    model = Graphs(lambda h, groups: h - h.mean(0), pools=True)
    x, edges, groups = batch()
    first = torch.tensor([0, 3, 8, 12, 14])[groups]
    effects = []
    for parity in (0, 1):
        changed = torch.where((groups % 2 == parity)[:, None], x, x[first])
        with torch.no_grad():
            before, after = (model(one, edges, groups).double() for one in (x, changed))
        moved = (before - after).abs()[parity::2]
        effects.append(float(moved.max() / before.square().mean().sqrt()))
    report = probed(model, (x, edges, groups), probes=PROBE)
    assert report.probes[PROBE].partings[0].effect == pytest.approx(max(effects), rel=1e-4)


class Points(nn.Module):
    """Normalises the points of a cloud together, and returns a row a point."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, points: Tensor, groups: Tensor) -> Tensor:
        h = self.first(points)
        return self.last(h - mean_by(h, groups)[groups])


def test_rows_that_see_their_group_alone_are_no_leak() -> None:
    """Points and the vector have as many rows, so that a row looks like a sample."""
    report = probed(Points(), (torch.randn(20, 3), GROUPS), probes=PROBE)
    assert report.probes[PROBE].outcome is Outcome.JUDGED
    assert found(report, PROBE) == []


def test_an_object_may_hold_the_batch() -> None:
    """As that of a graph library does; labels a group and a pointer are left alone."""

    class OfObject(Graphs):
        def forward(self, data: SimpleNamespace) -> Tensor:
            return super().forward(data.x, data.edges, data.groups)

    class Data:
        def __init__(self) -> None:
            self.x, self.edges, self.groups = batch()
            self.labels, self.pointer = torch.tensor([1, 0, 1, 1, 0]), SIZES.cumsum(0)

    for between, leaks in ((lambda h, g: h, False), (lambda h, g: h - h.mean(0), True)):
        report = probed(OfObject(between, pools=True), Data(), probes=PROBE)
        assert report.probes[PROBE].outcome is Outcome.JUDGED
        assert bool(report.probes[PROBE].partings) is leaks


def test_nodes_of_one_graph_are_no_samples() -> None:
    """Nothing warns: the probe does not apply."""

    class Nodes(Graphs):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return super().forward(x, edges, torch.zeros(len(x), dtype=torch.long))

    one = torch.randn(20, 6), ring(torch.zeros(20, dtype=torch.long))
    report = probed(Nodes(lambda h, groups: h, pools=False), one, probes=PROBE)
    assert report.probes[PROBE].outcome is Outcome.NOT_APPLICABLE
    assert "no samples" in report.probes[PROBE].reason
    assert not report.warnings


def test_ids_in_order_do_not_hide_a_leak() -> None:
    """A column that happens to ascend makes groups of no rows that see all others."""

    class Users(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.first, self.last = (
                nn.Embedding(10, 8),
                nn.Linear(6, 8),
                nn.Linear(8, 3),
            )

        def forward(self, x: Tensor, users: Tensor) -> Tensor:
            h = self.first(x) + self.users(users)
            return self.last(h - h.mean(0))

    users = torch.arange(10).repeat_interleave(2)
    ((_, message),) = found(probed(Users(), (torch.randn(20, 6), users), probes=PROBE), PROBE)
    assert "samples see each other" in message
