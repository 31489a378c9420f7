"""What a verdict costs grows with the layers, and not with their square."""

import sys
from collections import Counter

import torch
from torch import nn

from pytest_modelhealth import Inspector


def _calls(pairs: int) -> Counter[str]:
    """Return how many functions an inspection and its verdict call."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(pairs) for m in (nn.Linear(4, 4), nn.ReLU())))
    calls: Counter[str] = Counter()

    def count(frame: object, event: str, argument: object) -> None:
        calls[phase] += event in ("call", "c_call")

    phase = "inspection"
    sys.setprofile(count)
    try:
        report = Inspector(model).run_inspection(torch.randn(8, 4), probes=False)
        phase = "verdict"
        _ = report.verdict
    finally:
        sys.setprofile(None)
    return calls


def test_twice_the_layers_take_twice_the_calls() -> None:
    """A list of layers is gone through once, not once for each of its members."""
    _calls(2)  # what is loaded and remembered at first
    few, many = _calls(50), _calls(100)
    for phase, count in few.items():
        assert many[phase] < 2.2 * count, phase
