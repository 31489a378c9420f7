"""How near a report came to its limits, against numbers computed with NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelhealth import Check, HealthReport, Inspector, Setting
from pytest_modelhealth.rendering.margins import Margin, margins


def _net(dead: int) -> nn.Sequential:
    """Return a network of which so many of 50 units of layer "1" are off for every sample."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3))
    with torch.no_grad():
        net[0].weight[:dead] = -net[0].weight[:dead].abs()
        net[0].bias[:dead] = -0.1
    return net


BATCH = torch.rand(256, 20, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(256) % 3


def _report(net: nn.Module, **settings: object) -> HealthReport:
    return Inspector(net, **settings).run_inspection(BATCH, LABELS, loss=F.cross_entropy)


def _by_setting(report: HealthReport) -> dict[str, Margin]:
    return {margin.setting: margin for margin in margins(report)}


def test_the_largest_value_beside_its_limit():
    """What a check measures where nothing is wrong is what NumPy computes."""
    net = _net(dead=16)
    report = _report(net)

    found = _by_setting(report)

    dead = found["max_dead_fraction"]
    alive = (net[1](net[0](BATCH)).detach().numpy() > 0).any(axis=0)
    assert dead.violation.value == pytest.approx(1 - alive.mean())
    assert dead.violation.value == pytest.approx(16 / 50)
    assert (dead.violation.layer, dead.limit) == ("1", 0.8)
    assert dead.used == pytest.approx(0.32 / 0.8)
    scales = [
        layer.weight.detach().double().numpy().std() * np.sqrt(layer.in_features)
        for layer in (net[0], net[2])
    ]
    assert found["max_weight_scale"].violation.value == pytest.approx(max(scales), rel=1e-5)
    rms = np.sqrt((BATCH.double().numpy() ** 2).mean())
    assert found["max_input_rms"].violation.value == pytest.approx(rms, rel=1e-6)
    assert report.healthy


def test_the_nearest_first_and_the_limit_of_the_layer():
    """Limits of their own for some layers are those that a value is beside."""
    report = _report(_net(dead=16), thresholds={"1": {"max_dead_fraction": 0.33}})
    found = margins(report)
    assert found[0].setting == "max_dead_fraction"
    assert found[0].used == pytest.approx(0.32 / 0.33)
    assert [margin.used for margin in found] == sorted((m.used for m in found), reverse=True)


def test_a_broken_limit_is_over_one():
    """A violation is a margin of more than the whole limit, with the value that it has there."""
    report = _report(_net(dead=45))
    dead = _by_setting(report)["max_dead_fraction"]
    violation = next(v for v in report.violations if v.check == "dead_units")
    assert dead.used > 1
    assert dead.violation.value == violation.value


def test_limits_from_below():
    """A least value allowed is used up as the value comes down to it."""
    report = _report(_net(dead=0), min_grad_norm=1e-3)
    least = _by_setting(report)["min_grad_norm"]
    norms = {
        record.name: record.statistics("parameter_gradients").norm
        for record in report
        if record.parameter_gradients
    }
    assert least.violation.value == pytest.approx(min(norms.values()))
    assert least.used == pytest.approx(1e-3 / min(norms.values()))


def test_only_what_is_judged():
    """Checks that are left out and layers that are not judged have no margin; none is asked for."""
    report = _report(_net(dead=16), layers="2", skip_checks="initial_weights")
    found = margins(report)
    assert {margin.violation.layer for margin in found} == {"2"}
    assert "initial_weights" not in {margin.violation.check for margin in found}
    assert not report._verdict_asked


class _Picky(Check):
    """Fails itself under any limit but its own."""

    name = "picky"
    settings = (Setting("max_pickiness", float, default=3.0, help="a limit"),)

    def run(self, observation, settings) -> Iterator[object]:
        limit = settings.limit("max_pickiness", "")
        if limit.value != 3.0:
            raise ValueError("not with me")
        yield from ()


def test_a_check_that_fails_under_tight_limits_has_no_margin():
    """A project's check need not bear limits that nobody set."""
    report = _report(_net(dead=16), own_checks=[_Picky])
    assert "max_pickiness" not in _by_setting(report)
    assert report.healthy


def test_what_the_judge_explains_is_no_margin():
    """A value beyond its limit is there only where something was found at its layer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with torch.no_grad():
        net[0].weight.mul_(100)  # far too large to begin with, which a training outgrows
    monitor = Inspector(net).monitor()
    with monitor:
        for step in range(30):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(BATCH), LABELS)
            loss.backward()
            optimizer.step()
            monitor.step_end(step, loss=loss)
    training = monitor.report_of_training()
    assert {margin.violation.check for margin in margins(training)} <= {
        check.name for check in training._settings.checks if check.judges_steps
    }
    found = {violation.layer for violation in (*training.violations, *training.warnings)}
    assert {m.violation.layer for m in margins(training) if m.used > 1} <= found
