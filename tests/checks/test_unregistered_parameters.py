"""The `unregistered_parameters` check beside its table: lines, and what is put back."""

from __future__ import annotations

import linecache
import re

import torch
from torch import nn

from corpus.checks.unregistered import in_a_list, keeping, linear


def test_parameters_made_by_the_forward_are_told_once_with_their_lines(batch, inspect, only):
    """Some are used at a line of the user's code, some in a layer that is made anew."""

    def use(model, x):
        scale, layer = nn.Parameter(torch.ones(16)), linear()
        for _ in range(2):
            x = x @ nn.Parameter(torch.randn(16, 16))
        return layer(model.heads["a"](x)) * scale

    report = inspect(keeping(use, heads={"a": linear()}), batch)
    assert [one.path for one in report.observation.unregistered if one.path] == [
        "heads['a'].bias", "heads['a'].weight",
    ]  # fmt: skip
    shown = only(report, "unregistered_parameters").message.partition(": ")[2]
    assert shown.startswith("5 that only the graph holds (used at ")
    assert shown.endswith("), heads['a'].bias, heads['a'].weight")
    places = re.findall(r"([\w./-]+\.py):(\d+)", shown)
    assert sorted(linecache.getline(path, int(line)).strip() for path, line in places) == [
        'return layer(model.heads["a"](x)) * scale',
        "x = x @ nn.Parameter(torch.randn(16, 16))",
    ]


def test_gradients_of_what_is_hidden_are_put_back(batch, inspect):
    """What a hidden parameter had as gradient is there again afterwards, the same object."""
    model = in_a_list()
    before = model.blocks[0].weight.grad = torch.ones(16, 16)
    inspect(model, batch)
    assert model.blocks[0].weight.grad is before
    assert bool((before == 1).all())
