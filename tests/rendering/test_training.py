"""The figure and the text of a training."""

from __future__ import annotations

import io
import pickle
import re
import warnings
import xml.etree.ElementTree as ET

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.rendering.charts.course import (
    BAD,
    MISSING,
    MOST_COLUMNS,
    MOST_ROWS,
    ZERO,
    course,
)
from pytest_modelhealth.rendering.training import course_of
from pytest_modelhealth.training.monitoring.history import History
from pytest_modelhealth.training.monitoring.row import Event
from tests.rendering import histories
from tests.runs.svg import of_class

GRADIENT, DEAD, UPDATE = range(3)


def png(figure: Figure) -> bytes:
    """The figure's file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=40)
    return buffer.getvalue()


def texts(figure: Figure) -> str:
    """Everything that is written in the figure."""
    return "\n".join(text.get_text() for text in figure.findobj(lambda a: hasattr(a, "get_text")))


def panels(history: History, *events: tuple[int, str]) -> list[ET.Element]:
    """The maps of a training."""
    svg = str(course(course_of(history), "", events))
    return of_class(ET.fromstring(svg), "cells")


def rows(panel: ET.Element) -> list[str]:
    """The names of its rows."""
    return [name.text or "" for name in of_class(panel, "name")]


def cells(panel: ET.Element, kind: str) -> list[tuple[float, float, float]]:
    """Left, top and width of runs of cells of a class."""
    return [
        (float(x), float(y), float(width))
        for path in of_class(panel, kind)
        for x, y, width in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)", path.get("d", ""))
    ]


def test_layers_stand_in_execution_order_where_they_have_something_to_show() -> None:
    """Containers without parameters have no row, and a ReLU none among gradients of parameters."""
    shown = panels(histories.dying())
    assert [rows(panel) for panel in shown] == [["fc1", "fc2"], ["relu"], ["fc1", "fc2"]]
    assert "2 further layers never had one" in texts(histories.dying().plot())


def test_a_reader_sees_which_layer_died_when() -> None:
    """Zeros of gradients are black from that step on."""
    panel = panels(histories.dying())[GRADIENT]
    ((left, _, width),) = cells(panel, ZERO)
    start, end = min(x for x, *_ in cells(panel, "cell")), left + width
    assert (end - left) / (end - start) == pytest.approx(14 / 20, abs=0.01)
    red = [name.text for name in of_class(panel, "name", "alarm")]
    assert red == ["fc1"]


def test_what_is_not_finite_is_loud_and_what_was_not_seen_is_grey() -> None:
    """Neither is drawn as a number, and both are in the key; without them it is silent."""
    for at in (GRADIENT, UPDATE):
        panel = panels(histories.exploding())[at]
        runs = cells(panel, BAD)
        assert len(runs) == 2
        assert runs[0][0] == runs[1][0] > min(x for x, *_ in cells(panel, "cell"))
    assert "not finite" in texts(histories.exploding().plot())
    late = panels(histories.late())[GRADIENT]
    ((_, top, _),) = cells(late, MISSING)
    assert top == max(y for _, y, _ in cells(late, "cell"))
    silent = texts(histories.healthy().plot())
    assert "not finite" not in silent
    assert "no number" not in silent


def test_a_loss_that_is_no_number_is_marked() -> None:
    """At its first step; where no loss was given the panel says so."""
    assert "NaN or inf from step 15" in texts(histories.exploding().plot())
    assert "no finite loss was given" in texts(histories.without_loss().plot())


def test_events_are_marked_in_every_panel_and_at_their_layer() -> None:
    """A line through all panels, the layer in red, a number and the text above."""
    events = [(30, "fc2", "later"), Event(12, "relu", "all units dead"), (12, "fc1", "no gradient")]
    drawn = texts(histories.dying().plot(events=events))
    assert "1  step 12, relu: all units dead" in drawn
    assert "3  step 30, fc2: later" in drawn
    assert "1-2" in drawn.splitlines()
    red = [of_class(panel, "name", "alarm") for panel in panels(histories.healthy(), (12, "fc1"))]
    assert [[name.text for name in found] for found in red] == [["fc1"], [], ["fc1"]]
    many = texts(histories.dying().plot(events=[(12, "relu", f"event {i}") for i in range(30)]))
    assert "and 22 more" in many


def test_one_bad_cell_of_half_a_million_is_drawn() -> None:
    """Layers that went wrong come first, and of steps in a column the worst is shown."""
    every, dead, _ = panels(histories.large())
    assert rows(dead) == ["encoder.layers.12.part.5"]
    assert len({y for _, y, _ in cells(every, "cell")}) <= MOST_ROWS
    assert f"a column is {-(-899 // MOST_COLUMNS)} watched steps" in texts(histories.large().plot())
    assert "gradient norm of parameters (32 of 600 layers, those" in texts(histories.large().plot())
    assert len(cells(dead, "level-7")) == 1


@pytest.mark.parametrize("case", histories.CASES, ids=lambda case: case.__name__)
def test_every_history_is_shown_without_a_warning(case) -> None:
    """One step, no loss, nothing seen, hostile names: all figures and the text, twice the same."""
    made = case()
    before = pickle.dumps(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert png(made.plot()).startswith(b"\x89PNG")
        assert made.summary() == made.summary()
    text = made.summary()
    assert [letter for letter in text if not letter.isprintable() and letter != "\n"] == []
    assert [line for line in text.splitlines() if line != line.rstrip()] == []
    assert pickle.dumps(made) == before


def test_the_text_of_many_layers_reads_each_statistic_a_few_times(monkeypatch) -> None:
    """Read for every layer they took 12 seconds of 600 layers."""
    made, read = histories.large(), []
    usual = History.__getitem__
    monkeypatch.setattr(
        History, "__getitem__", lambda one, key: read.append(key) or usual(one, key)
    )
    made.summary()
    assert 5 <= len(read) < 15


def test_the_text_says_it_in_its_first_line() -> None:
    """Steps, loss, the worst layer; then a table with the gravest first, no longer than asked."""
    worst = Event(12, "relu", "all units dead")
    first, _, head, *table = histories.dying().summary(worst=worst).splitlines()
    assert first == (
        "training of Net: 20 steps watched (0 to 38); loss 2.00 to 0.0513; "
        "worst, from step 12 on: relu: all units dead"
    )
    assert head.split() == ["layer", "p.grad", "update", "act.std", "dead"]
    assert [line.split()[0] for line in table] == ["relu", "fc2", "fc1"]
    assert histories.dying().summary(1).splitlines()[-1] == "  and 2 layers more"
    text = histories.exploding().summary()
    assert "loss 2.00 to nan; step 15: not finite first in the activations of 'fc2'" in text
    assert "no step was watched yet" in histories.history(("a",), range(0)).summary()


def train(**options):
    """A monitor of ten steps of a small training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model).monitor(**options) as monitor:
        for step in range(10):
            optimizer.zero_grad()
            loss = model(torch.randn(32, 8)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step_end(step, loss=loss)
    return monitor


def test_a_monitor_shows_its_training(tmp_path) -> None:
    """It saves the figure, prints the text, and a notebook gets it as a table."""
    monitor = train()
    monitor.plot(tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    assert str(monitor) == monitor.summary()
    assert str(monitor).startswith("training of Sequential: 10 steps watched (0 to 9); loss ")
    assert "training of Sequential" in monitor._repr_html_()
    assert "<th>p.grad</th>" in monitor._repr_html_()


def test_what_cannot_be_drawn_is_refused() -> None:
    """No step yet, a path that is none, a history of its own."""
    with pytest.raises(InspectionError, match="no step was watched yet"):
        histories.history(("a",), range(0)).plot()
    with pytest.raises(InspectionError, match="path of a file"):
        histories.healthy().plot(3)
    with pytest.raises(InspectionError, match="without a renderer"):
        History(4).summary()
