"""Two factors of zero in different layers: found by the `missing_gradients` check."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn


class LowRank(nn.Module):
    """Two low-rank changes from one packed layer, whose second factors start at zero."""

    def __init__(self):
        super().__init__()
        self.base, self.down = nn.Linear(16, 32), nn.Linear(16, 8, bias=False)
        self.a, self.b = (nn.Linear(4, 16, bias=False) for _ in range(2))
        self.head = nn.Linear(32, 3)
        for factor in (self.a, self.b):
            nn.init.zeros_(factor.weight)

    def forward(self, x):
        for_a, for_b = self.down(x).chunk(2, -1)
        change = torch.cat([self.a(for_a), self.b(for_b)], -1)
        return self.head(torch.tanh(self.base(x) + change))


def told(report):
    """The layers that the check names."""
    return [v.layer for v in report.violations if v.check == "missing_gradients"]


@pytest.fixture
def target():
    """A class for each sample."""
    return torch.randint(3, (64,))


def test_rows_and_the_layer_that_takes_them_are_zero(batch, target, inspect):
    """Neither gets a gradient but through the other."""
    model = LowRank()
    with torch.no_grad():
        model.down.weight[4:] = 0.0
    report = inspect(model, batch, target, loss=F.cross_entropy)
    assert told(report) == ["b"]
    assert "still is after 3 steps of training" in report.violations[0].message


def test_one_factor_of_zero_is_a_start(batch, target, inspect):
    """The usual start of low-rank changes."""
    assert told(inspect(LowRank(), batch, target, loss=F.cross_entropy)) == []


def test_rows_that_something_else_takes_may_begin(batch, target, inspect):
    """What is taken elsewhere, too, gets a gradient there."""

    class Elsewhere(LowRank):
        def forward(self, x):
            part = self.down(x)[:, 4:]
            change = F.pad(self.b(part), (0, 16))
            return self.head(torch.tanh(self.base(x) + change)) + part.mean(1, keepdim=True)

    model = Elsewhere()
    del model.a
    with torch.no_grad():
        model.down.weight[4:] = 0.0
    assert told(inspect(model, batch, target, loss=F.cross_entropy)) == []
