"""`judge`: all checks together, selection of layers, waivers and the verdict."""

import pytest
from torch import nn

from pytest_modelhealth import Inspector, ModelHealthError
from pytest_modelhealth.checks import default_settings
from pytest_modelhealth.settings.setting import Waiver


def waiver(layers, check=None):
    """A waiver with a reason."""
    return Waiver(layers, check, "a reason", "here")


def test_setting_layers_restricts_what_is_judged(dead, batch):
    """A fault outside of `layers` is observed and not judged."""
    report = Inspector(dead, layers=["fc*", "fc1"]).run_inspection(batch)
    assert report.healthy
    assert report["act1"].activations.dead_fraction == 1.0


def test_fault_that_begins_elsewhere_is_told_where_its_effect_is_judged(batch):
    """A layer without a gradient is judged; the cut behind which it lies is named all the same."""

    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm, self.head = nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.norm(self.fc(x)).detach())

    (violation,) = Inspector(Cut(), layers="fc").run_inspection(batch).violations
    assert (violation.check, violation.layer) == ("missing_gradients", "norm")
    assert violation.affected == ("fc",)
    assert Inspector(Cut(), layers="head").run_inspection(batch).healthy


@pytest.mark.parametrize("waived", [waiver("act1"), waiver("act*", "dead_units"), waiver("*")])
def test_waiver_accepts_a_violation(waived, dead, batch):
    """A waived violation is kept apart with its waiver and does not count."""
    settings = default_settings().waive(waived)
    report = Inspector(dead, settings=settings).run_inspection(batch)
    assert report.healthy
    (found,) = report._judgement.waived
    assert (found.layer, found.waiver) == ("act1", waived)
    assert report._judgement.unused_waivers == ()


@pytest.mark.parametrize("idle", [waiver("act2"), waiver("act1", "finite")])
def test_waiver_without_effect_is_reported(idle, dead, batch):
    """A waiver for another layer or check accepts nothing, and that is known."""
    report = Inspector(dead, settings=default_settings().waive(idle)).run_inspection(batch)
    assert not report.healthy
    assert report._judgement.unused_waivers == (idle,)


def test_call_overrides_the_reports_own_limits(mlp, batch):
    """`assert_healthy` judges anew under the limits it is given, and says where they came from."""
    report = Inspector(mlp).run_inspection(batch)
    report.assert_healthy()
    with pytest.raises(ModelHealthError, match="argument of assert_healthy"):
        report.assert_healthy(max_grad_norm=1e-9)
    assert report.healthy


def test_graver_findings_come_first(batch):
    """NaN stands before dead units, whatever the order of execution."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.dead, self.act, self.head = nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)
            nn.init.constant_(self.dead.bias, -50.0)

        def forward(self, x):
            return self.head(self.act(self.dead(x))) / 0.0

    report = Inspector(Both()).run_inspection(batch)
    assert [v.check for v in report.violations] == ["finite", "dead_units"]
