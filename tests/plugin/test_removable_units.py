"""The check `removable_units` in a user's tests."""

import pytest

TESTS = """
import pytest
import torch
from nets import BATCH
from torch import nn

def model():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 2))
    with torch.no_grad():
        made[0].bias[:] = 1.0
        made[2].bias[:] = 1.0
        made[0].bias[5] = -100.0
        made[2].bias[[1, 2, 3]] = -100.0
    return made

def test_silent(inspector):
    inspector(model()).removable([BATCH] * 3)

def test_no_search(inspector):
    inspector(model(), max_removable_fraction=0.0).run_inspection(BATCH)

def test_within(inspector):
    inspector(model(), max_removable_fraction=0.3).removable([BATCH] * 3)

def test_beyond(inspector):
    inspector(model(), max_removable_fraction=0.05).removable([BATCH] * 3)

@pytest.mark.modelhealth(max_removable_fraction=0.2)
def test_by_marker(inspector):
    inspector(model()).removable([BATCH] * 3)

@pytest.mark.modelhealth(thresholds={"2": {"max_removable_fraction": 0.5}})
@pytest.mark.modelhealth(max_removable_fraction=0.2)
def test_by_layer(inspector):
    inspector(model()).removable([BATCH] * 3)

def test_asserted(inspector):
    found = inspector(model()).removable([BATCH] * 3)
    found.report.assert_healthy()
    with pytest.raises(AssertionError, match=r"2 \\(removable_units\\): 3 of 10 units can go"):
        found.report.assert_healthy(max_removable_fraction=0.1)
"""


def test_a_layer_with_too_many_units_that_can_go_fails(nets: pytest.Pytester) -> None:
    """At the worst layer first, and only where somebody set how many there may be."""
    nets.makepyfile(TESTS)
    result = nets.runpytest()
    result.assert_outcomes(passed=5, failed=2)
    result.stdout.fnmatch_lines(
        [
            "*unhealthy: 2 (removable_units): 3 of 10 units can go: 3 inactive over 128 samples*",
            "*2 * removable_units *0.300 *0.05 *argument of inspector*",
        ]
    )
    by_option = nets.runpytest("--modelhealth-set=max_removable_fraction=0.2", "-k", "silent")
    by_option.assert_outcomes(failed=1, deselected=6)
