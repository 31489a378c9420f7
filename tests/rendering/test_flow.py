"""The flow drawn, and told in a failure."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pytest_modelhealth import HealthReport, Inspector
from pytest_modelhealth.checks.judging import judge
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.rendering import renderer


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(x).relu())


class Net(nn.Module):
    """Blocks, with a detach before the head, under a name that would be markup."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.add_module('h"<b>', nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        head: Tensor = self._modules['h"<b>'](self.blocks(x).detach())
        return head


@pytest.fixture(scope="module")
def report() -> HealthReport:
    """The report of two blocks."""
    return Inspector(Net()).run_inspection(torch.randn(64, 8))


def test_the_figure_has_every_box_and_marks_violations() -> None:
    """A layer with a violation stands out; its name is taken literally."""
    net = Net()
    nn.init.constant_(net.blocks[0].fc1.bias, -100.0)
    report = Inspector(net).run_inspection(torch.randn(64, 8))
    texts = {text.get_text(): text for text in report.plot_flow().axes[0].texts}
    assert {"input 0", "blocks.0.fc1", "blocks.1.relu", 'h"<b>', "+"} <= set(texts)
    alarmed = {violation.layer for violation in report.violations}
    colours = {name: text.get_color() for name, text in texts.items()}
    reds = {name for name, colour in colours.items() if colour == "#c3261f"} & set(report.layers)
    assert reds == alarmed & set(texts)
    assert alarmed


def test_a_report_without_a_flow_has_nothing_to_draw(report: HealthReport) -> None:
    """A figure is refused."""
    empty = HealthReport(
        replace(report.observation, flow=None), report._settings, judge, renderer=renderer
    )
    with pytest.raises(InspectionError, match="no flow was recorded"):
        empty.plot_flow()


def test_the_failure_text_has_the_way_and_the_cut(report: HealthReport) -> None:
    """What feeds the culprit, what it feeds, and once the line at which its gradient ends."""
    text = report.render("failure")
    way = next(line for line in text.splitlines() if line.startswith("way:"))
    assert " -> blocks.1.fc2 -> " in way
    assert text.count("`detach` at ") == 1
    assert "test_flow.py:" in text.splitlines()[0]
