"""The `wiring` check beside the tables of the corpus: names of blocks, and what nothing reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from corpus.checks.wiring import HEALTHY


def findings(report):
    """Return what the check found, what only warns among it."""
    return [v for v in (*report.violations, *report.warnings) if v.check == "wiring"]


def test_weights_that_a_function_uses_are_used_without_gradients_too(inspect):
    """The flow has them by name where no gradient tells."""
    model, batch = HEALTHY["weights used by a function"]()
    assert findings(inspect(model, batch, backward=False)) == []


class TakesKeys(nn.Module):
    """Reads some keys of the object that it is given."""

    def __init__(self, *keys):
        super().__init__()
        self.fc, self.keys = nn.Linear(16, 4), keys

    def forward(self, batch):
        return sum(self.fc(batch[key]) for key in self.keys)


@pytest.mark.parametrize(
    ("keys", "other", "is_told"),
    [
        (["x"], torch.randn(8, 16), True),
        (["x", "y"], torch.randn(8, 16), False),
        (["x"], torch.arange(8), False),
    ],
    ids=["unread", "read", "ids"],
)
def test_numbers_inside_an_object_that_nothing_reads(keys, other, is_told, inspect):
    """Floating values of a dictionary that the forward never reads are warned of; ids are not."""
    report = inspect(TakesKeys(*keys), ({"x": torch.randn(8, 16), "y": other},))
    told = [v.message for v in report.warnings if "inside an object" in v.message]
    assert len(told) == is_told
    assert all("'input 0[1]'" in message for message in told)
    assert report.violations == ()


def test_what_only_the_loss_reads_is_read(inspect):
    """A target that the model is given in its batch, and the loss reads, is no input in vain."""
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    report = inspect(TakesKeys("x"), ({"x": x, "y": y},), y.clone(), loss=nn.MSELoss())
    assert [v for v in report.warnings if "inside an object" in v.message] == []
