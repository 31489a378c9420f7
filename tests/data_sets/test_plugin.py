"""In a test: what a failure says of places and the part of the data."""

from __future__ import annotations

import pytest

TESTS = """
import torch
import torch.nn.functional as F
from torch import nn

class Planted(nn.Sequential):
    pass

model = Planted(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
inputs, labels = torch.randn(600, 6), torch.arange(600) % 3
inputs[130, 3] = float("nan")
pairs = list(zip(inputs.split(64), labels.split(64)))

def test_nan(inspector):
    inspector(model).run_batches(iter(pairs), loss=F.cross_entropy, max_batches=4)

def test_seconds(inspector):
    made = inspector(model, checks="dead_units")
    report = made.run_batches(pairs, loss=F.cross_entropy, max_batches=1)
    report.assert_healthy()
"""


def test_a_failure_names_sample_and_part(pytester: pytest.Pytester) -> None:
    """One line each."""
    pytester.makepyfile(TESTS)
    result = pytester.runpytest("--modelhealth-json=run.json")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*unhealthy: Planted (finite): 1 NaN*the first in batch 2, sample 2 at [[]2, 3[]]",
        ]
    )
    assert "of 4 batches (max_batches=4 ended the run)" in result.stdout.str()
    assert '"ended_by"' in pytester.path.joinpath("run.json").read_text()
