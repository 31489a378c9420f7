"""What a test made, as plain data: the numbers are those of the report, the way is a way."""

from __future__ import annotations

import copy
import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelhealth import Inspector, compare
from pytest_modelhealth.rendering.recorded import record


class Residual(nn.Module):
    """Adds what its branch makes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x):
        return x + self.branch(x)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Residual(), Residual(), nn.Linear(8, 3))


BATCH = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(64) % 3


def _recorded(net: nn.Module) -> dict:
    report = Inspector(net).run_inspection(BATCH, LABELS, loss=F.cross_entropy)
    made = record(report, "test_net.py:7")
    assert not report._verdict_asked
    return json.loads(json.dumps(made, allow_nan=False))


def test_an_inspection():
    """Counts, sizes and bins are those of the tensors themselves; nothing is no JSON."""
    net = _net()
    net[0].weight.requires_grad_(False)
    with torch.no_grad():
        net[3].bias[0] = float("nan")
    made = _recorded(net)

    assert (made["kind"], made["of"], made["place"]) == ("inspection", "batch", "test_net.py:7")
    assert made["verdict"] == "unhealthy"
    assert made["text"].startswith(made["headline"])
    assert made["loss"] is None
    assert made["evidence"][-1]["label"] == made["violations"][0]["label"]
    layers = {layer["name"]: layer for layer in made["layers"]}
    assert next(iter(layers)) == ""
    assert layers[""]["label"] == "Sequential"
    assert made["totals"]["parameters"] == sum(p.numel() for p in net.parameters())
    assert made["totals"]["trainable"] == sum(
        p.numel() for p in net.parameters() if p.requires_grad
    )
    first = layers["0"]
    assert (first["input_shape"], first["shape"]) == ([64, 4], [64, 8])
    (weight,) = [t for t in first["tensors"] if (t["role"], t["name"]) == ("parameters", "weight")]
    exact = net[0].weight.double()
    assert weight["norm"] == pytest.approx(float(exact.norm()))
    bins = weight["bins"]
    for index, count in enumerate(bins["negative"]):
        low, high = 2.0 ** (bins["lowest"] + index), 2.0 ** (bins["lowest"] + index + 1)
        assert count == int(((-exact >= low) & (-exact < high)).sum())
    assert sum(bins["negative"]) + sum(bins["positive"]) + weight["zeros"] == exact.numel()
    (bias,) = [
        t for t in layers["3"]["tensors"] if (t["role"], t["name"]) == ("parameters", "bias")
    ]
    assert (bias["nan"], bias["inf"]) == (1, 0)


def test_the_way_through_the_culprit():
    """It leads from the batch to the loss along recorded edges, and sums are nodes of their own."""
    net = _net()
    with torch.no_grad():
        net[2].branch[0].bias.fill_(-100)
    made = _recorded(net)

    assert made["violations"][0]["layer"] == "2.branch.1"
    flow = made["flow"]
    way = flow["way"]
    assert (way[0], way[-1]) == ("input 0", "loss")
    assert "2.branch.1" in way
    edges = {(source, target) for source, target, _, _ in flow["edges"]}
    assert set(itertools.pairwise(way)) <= edges
    assert len(flow["joins"]) == 2
    assert all(join.startswith("+ #") for join in flow["joins"])
    assert {name for edge in edges for name in edge} >= set(flow["joins"])
    assert flow["exact"]
    assert len(flow["edges"]) == 12  # a residual stream gives a block an edge to the next alone


def test_a_verdict_under_the_limits_that_it_was_asked_with():
    """Thresholds of `assert_healthy` are those that the record is about."""
    net = _net()
    with torch.no_grad():
        net[2].branch[0].bias.fill_(-100)
    report = Inspector(net).run_inspection(BATCH, LABELS, loss=F.cross_entropy)
    assert record(report, "")["verdict"] == "unhealthy"
    report.assert_healthy(max_dead_fraction=1.0, max_held_fraction=1.0, skip_checks="collapse")
    assert record(report, "")["violations"] == []


def test_a_comparison():
    """Each layer has both names and its error, which is that of float64."""
    old = _net()
    new = nn.Sequential(nn.Identity(), *copy.deepcopy(old))
    with torch.no_grad():
        new[4].weight.mul_(1.5)
    made = record(compare(old, new, BATCH), "")
    json.dumps(made, allow_nan=False)

    assert (made["kind"], made["verdict"]) == ("comparison", "different")
    assert (made["divergence"]["layer"], made["divergence"]["candidate"]) == ("3", "4")
    layers = {(layer["reference"], layer["candidate"]): layer for layer in made["layers"]}
    assert layers[None, "0"]["change"] == "inserted"
    last = layers["3", "4"]
    (output,) = [t for t in last["tensors"] if t["role"] == "activations"]
    expected, found = old(BATCH).detach().double(), new(BATCH).detach().double()
    error = float((expected - found).norm() / expected.norm())
    assert output["error"] == pytest.approx(error)
    assert last["diverged"]
    assert output["diverged"]
    first = {t["role"]: t["diverged"] for t in layers["0", "1"]["tensors"]}
    assert not first["activations"]


def test_a_training():
    """The steps of a monitor are there, thinned, with the loss that the loop gave.

    From the step on whose gradients are all NaN, their norm is no number, and not 0.
    """
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    with Inspector(net).monitor() as monitor:
        for step in range(300):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(BATCH), LABELS) * (1.0 if step < 298 else float("nan"))
            loss.backward()
            optimizer.step()
            losses.append(loss.item() if step < 298 else None)
            monitor.step_end(step, loss=loss)
    made = record(monitor.report_of_training(), "")

    course = made["course"]
    assert made["of"] == "training"
    assert course["steps"] == [*range(0, 300, 2), 299]
    assert course["loss"] == pytest.approx([losses[step] for step in course["steps"]])
    assert set(course["layers"]) == set(dict(net.named_modules()))
    for name, statistics in course["layers"].items():
        known = [norm is not None for norm in statistics["gradient_norm"]]
        assert known == [True] * 149 + [False] * 2, name
