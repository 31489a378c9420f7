"""The failure of every kind of result: a screen of lines, which narrow without a loss."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from pytest_modelhealth import Inspector, compare
from pytest_modelhealth.rendering.comparison import drift as explain
from pytest_modelhealth.rendering.document import Document, Row
from pytest_modelhealth.rendering.notation import Column
from tests.builders import check, record
from tests.rendering import reports


class Tower(nn.Module):
    """Forty blocks under long names, each of which may draw its batch together or scale it."""

    def __init__(self, name: str = "block", mixes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixes = mixes
        self.blocks = nn.ModuleDict({f"transformer_{name}_{i}": nn.Linear(8, 8) for i in range(40)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = x + block(x).relu()
            x = x - x.mean(0) if self.mixes else x
        return x


def scaled(model: nn.Module, factor: float) -> nn.Module:
    """Another model of the same form, whose every weight is off."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


BATCH = torch.linspace(-1, 1, 256).reshape(32, 8)


def report() -> str:
    """Many findings, with all that can be said of the gravest, and many notes."""
    seen = replace(reports.large().observation, notes=["a note of many words " * 12] * 9)
    found = [
        reports.violation(
            name, cause="because of it, " * 12, details=("one detail " * 9, "two", "three"),
            check="missing_gradients", role="parameter_gradients", tensor="in_proj_weight",
            origin="pyproject.toml: modelhealth_max_dead_fraction",
        )
        for name in [*seen.layers][:30]
    ]  # fmt: skip
    return reports.judged(seen, *found).render("failure")


def step() -> str:
    """A step whose optimizer has one of forty layers."""
    model = Tower()
    optimizer = torch.optim.SGD(next(iter(model.blocks.values())).parameters(), 0.1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    made = Inspector(model).run_step(train, optimizer, BATCH)
    assert made.violations
    return made.render("failure")


def training() -> str:
    """A training that becomes NaN everywhere."""
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), 1e9)
    with Inspector(model).monitor() as monitor:
        for number in range(5):
            optimizer.zero_grad()
            loss = model(BATCH).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step_end(number, loss=loss)
    assert monitor.report.violations
    return monitor.report.render("failure")


def probed() -> str:
    """A model that mixes its batch, and fails a probe."""
    made = Inspector(Tower(mixes=True).eval()).run_inspection(
        BATCH, loss=lambda output: output.square().mean(), probes=True
    )
    assert made.violations
    return made.render("failure")


def comparison() -> str:
    """Forty layers under other names with other weights."""
    made = compare(Tower(), scaled(Tower("layer"), 1.5), BATCH, loss=torch.Tensor.sum)
    assert not made.equivalent
    return str(made._denial())


def drift() -> str:
    """Forty layers that left their snapshot, and were renamed."""
    before = Inspector(Tower(), calibrate=True).run_inspection(BATCH, loss=torch.Tensor.sum)
    model = scaled(Tower("layer"), 1.5)
    found = check(record(before), Inspector(model).run_inspection(BATCH, loss=torch.Tensor.sum))
    return "\n".join(explain(found))


KINDS = (report, step, training, probed, comparison, drift)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_failure_fits_a_screen_whatever_the_model(
    kind: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has 24 lines at most; at 60 columns the same words, no cell cut, no line wider."""
    monkeypatch.setenv("COLUMNS", "200")
    wide = kind()
    assert 5 < len(wide.splitlines()) <= 24
    monkeypatch.setenv("COLUMNS", "60")
    headline, *lines = kind().splitlines()
    assert headline == wide.splitlines()[0]  # one line that stands alone, as in a summary
    assert max(map(len, lines)) <= 56  # four are pytest's
    end = "".join(re.sub(r"[\d.]+", "", wide.splitlines()[-1]).split())  # it may take longer
    assert "".join(re.sub(r"[\d.]+", "", " ".join(lines)).split()).endswith(end)


@pytest.mark.parametrize("case", reports.CASES, ids=lambda case: case.__name__)
def test_every_report_narrows(case: Callable[[], object]) -> None:
    """No line but the first is wider than 60 columns, and none of another says less."""
    made = case()
    wide, narrow = (made.render("failure", width=width) for width in (100, 60))
    assert max((len(line) for line in narrow.splitlines()[1:]), default=0) <= 60
    code = wide.partition("likely cause:")[2]
    assert "".join(code.split()) in "".join(narrow.split())


def test_a_row_is_a_sentence_in_a_narrow_terminal() -> None:
    """Where a table would have to cut its cells."""
    document = Document(
        "said",
        columns=[Column("check", is_text=True), Column("value")],
        rows=[Row(["missing_gradients", "1"]), Row(["finite", "2"])],
    )
    lines = ["said", "", "missing_gradients: value 1", "finite: value 2"]
    assert document.text(width=30).splitlines() == lines


def test_the_heaviest_rows_stay_in_their_order() -> None:
    """Where lines or rows are too many, what weighs least is left out and counted."""
    rows = [Row([str(n)], weight=-abs(n - 5)) for n in range(9)]
    document = Document("said", columns=[Column("n")], rows=rows, code=["code"])
    few = replace(document, most=3)
    assert few.text().splitlines()[3:6] == ["4", "5", "6"]
    assert document.text(lines=9).splitlines() == [
        "said", "", "n", "4", "5", "6", "... and 6 more", "", "code"
    ]  # fmt: skip
    assert few.markdown().count("\n| ") == 5
    assert few.html().count("<tr") == 4
