"""Where gradients end, as the recorded flow tells it: cuts, values in vain, detached states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from corpus.checks.cuts import Part, Reading, net, translated
from pytest_modelhealth import HealthReport
from pytest_modelhealth.checks.judging import judge

Inspect = Callable[..., HealthReport]


def test_a_cut_is_told_once_in_the_text(inspect: Inspect) -> None:
    """Though the line is a part of the message and of the cause."""
    model, inputs, _, loss = translated(cuts=True)
    assert inspect(model, inputs, loss=loss).render("failure").count("`detach` at") == 1


class Auxiliary(nn.Module):
    """A trunk with two heads and a part that is detached, or not."""

    def __init__(self, *, cuts: bool) -> None:
        super().__init__()
        self.trunk, self.head, self.aux = net(16, 16, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.cuts = cuts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.head(h.detach() if self.cuts else h), self.aux(x)


def test_a_flow_that_was_inferred_accuses_no_head(batch: Tensor, inspect: Inspect) -> None:
    """Autograd still says what no output depends on."""
    for cuts, layers in ((False, []), (True, ["trunk.2"])):
        report = inspect(Auxiliary(cuts=cuts), batch, loss=lambda out: out[0].square().mean())
        assert [violation.layer for violation in report.violations] == layers
        observation = replace(report.observation, flow=None)
        assert [warning.layer for warning in judge(observation, report._settings).warned] == layers
    inferred = replace(inspect(Reading(Part(), 0), batch).observation, flow=None)
    assert judge(inferred, report._settings).violations == ()
