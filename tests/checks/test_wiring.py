"""The `wiring` check beside the tables of the corpus: names of blocks, and what nothing reads."""

from __future__ import annotations

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
    """Reads one key of the object that it is given."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 4)

    def forward(self, batch):
        return self.fc(batch["x"])


def test_what_lies_inside_an_object_may_be_for_others(inspect):
    """A loss or a metric may read the keys that a model leaves alone."""
    report = inspect(TakesKeys(), ({"x": torch.randn(8, 16), "y": torch.randn(8, 16)},))
    assert findings(report) == []
