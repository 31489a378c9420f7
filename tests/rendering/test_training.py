"""The figure and the text of a training, of histories made up row by row and of a real one."""

from __future__ import annotations

import pickle
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.rendering import renderer
from pytest_modelhealth.rendering.charts.course import (
    BAD,
    MISSING,
    MOST_COLUMNS,
    MOST_ROWS,
    ZERO,
    course,
)
from pytest_modelhealth.rendering.training import course_of
from pytest_modelhealth.report import Finding
from pytest_modelhealth.training.monitoring.history import History
from pytest_modelhealth.training.monitoring.row import STATISTICS, Event, StepRow
from tests.rendering.reports import HOSTILE
from tests.rendering.test_figures import png
from tests.runs.charted import of_class

USUAL = {name: 0.0 if "nonfinite" in name else 1.0 for name in STATISTICS} | {
    "dead_fraction": 0.0,
    "update_ratio": 1e-3,
    "parameter_gradient_norm": 0.5,
}
NO_PARAMETERS = {name: np.nan for name in USUAL if name.startswith(("parameter", "update"))}
NET = ("", "fc1", "relu", "fc2")

Changes = Callable[[int, str], Mapping[str, float]]


def row(step: int, layers: tuple[str, ...], changes: Changes, **fields: Any) -> StepRow:
    """A step whose layers have the usual numbers but for `changes`."""
    tables = [USUAL | dict(changes(step, layer)) for layer in layers]
    values = {name: np.array([table[name] for table in tables]) for name in STATISTICS}
    usual: dict[str, Any] = {"loss": 2.0 / (1 + step), "gradient_norm": 1.0, "update_ratio": 1e-3}
    return StepRow(step=step, layers=layers, values=values, **usual | fields)


def net(step: int, layer: str) -> dict[str, float]:
    """A model and an activation have no parameters."""
    return NO_PARAMETERS if layer in ("", "relu") else {}


def history(
    layers: tuple[str, ...] = NET,
    steps: range = range(20),
    changes: Changes = net,
    fields: Callable[[int], Mapping[str, Any]] = lambda step: {},
    keep: int = 1024,
) -> History:
    """The history of these steps."""
    made = History(keep, renderer=renderer, model_type="Net")
    for step in steps:
        made.add(row(step, layers, changes, **fields(step)))
    return made


def dying() -> History:
    """From step 12 on, the units of ``relu`` are dead, and ``fc1`` gets no gradient."""
    dead = {"dead_fraction": 1.0, "zero_fraction": 1.0}
    none = {"parameter_gradient_norm": 0.0, "gradient_norm": 0.0, "update_ratio": 0.0}
    late = {"relu": NO_PARAMETERS | dead, "fc1": none}
    return history(
        steps=range(0, 40, 2),
        changes=lambda step, layer: (late if step >= 12 else {}).get(layer, net(step, layer)),
    )


def exploding() -> History:
    """From step 15 on nothing is finite, which begins in ``fc2``."""

    def changes(step: int, layer: str) -> dict[str, float]:
        bad = {"activation_nonfinite": 9.0, "activation_mean": np.nan, "update_norm": np.nan}
        bad |= {"update_ratio": np.nan, "gradient_norm": 0.0, "gradient_nonfinite": 9.0}
        if layer in ("fc1", "fc2"):
            bad |= {"parameter_gradient_nonfinite": 9.0, "parameter_nonfinite": 3.0 * (step > 15)}
            bad |= {"parameter_gradient_norm": 0.0}
        return net(step, layer) | bad if step >= 15 else net(step, layer)

    message = "not finite first in the activations of 'fc2'"
    origin = Finding("nonfinite_steps", "fc2", message=message)
    fields = {"loss": np.nan, "origin": origin}
    return history(changes=changes, fields=lambda step: fields if step >= 15 else {})


def late() -> History:
    """A layer is seen from the tenth step on only, and steps are far from each other."""
    made = history(steps=range(0, 1000, 100))
    for step in range(1000, 100_000, 10_000):
        made.add(row(step, (*NET, "late"), net))
    return made


def large() -> History:
    """Six hundred layers and a thousand steps; one layer dies in one step alone."""
    names = tuple(f"encoder.layers.{i // 6}.part.{i % 6}" for i in range(600))
    made = history(names, range(1), lambda step, layer: {}, keep=900)
    usual = row(1, names, lambda step, layer: {})
    dead = row(500, names, lambda _, layer: {"dead_fraction": float(layer == names[77])})
    for step in range(1, 899):
        made.add(StepRow(**{**vars(dead if step == 500 else usual), "step": step}))
    return made


def without_loss() -> History:
    """No loss was given."""
    return history(steps=range(5), fields=lambda step: {"loss": None})


def extreme() -> History:
    """Numbers at the limits of float64, infinities among them, zeros, and names of markup."""
    sizes = (5e-324, 1e308, np.inf, -np.inf, 1.0, 0.0)
    half = {"dead_fraction": 0.5}
    names = (HOSTILE, "b")
    return history(names, range(6), lambda step, _: dict.fromkeys(USUAL, sizes[step]) | half)


CASES = {
    "healthy": history,
    "dying": dying,
    "exploding": exploding,
    "one step": lambda: history(steps=range(1)),
    "without loss": without_loss,
    "infinite loss": lambda: history(steps=range(5), fields=lambda step: {"loss": np.inf}),
    "nothing seen": lambda: history(changes=lambda step, layer: dict.fromkeys(USUAL, np.nan)),
    "no layers": lambda: history((), range(3)),
    "extreme": extreme,
    "late": late,
    "large": large,
}

GRADIENT, DEAD, UPDATE = range(3)


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


def test_a_reader_sees_which_layer_died_when() -> None:
    """Zeros of gradients are black from that step on, in rows in execution order.

    Containers without parameters have no row, and a ReLU none among gradients of parameters.
    """
    shown = panels(dying())
    assert [rows(panel) for panel in shown] == [["fc1", "fc2"], ["relu"], ["fc1", "fc2"]]
    assert "2 further layers never had one" in texts(dying().plot())
    ((left, _, width),) = cells(shown[GRADIENT], ZERO)
    start, end = min(x for x, *_ in cells(shown[GRADIENT], "cell")), left + width
    assert (end - left) / (end - start) == pytest.approx(14 / 20, abs=0.01)
    assert [name.text for name in of_class(shown[GRADIENT], "name", "alarm")] == ["fc1"]


def test_what_is_not_finite_is_loud_and_what_was_not_seen_is_grey() -> None:
    """Neither is drawn as a number, and both are in the key; without them it is silent."""
    for at in (GRADIENT, UPDATE):
        panel = panels(exploding())[at]
        runs = cells(panel, BAD)
        assert len(runs) == 2
        assert runs[0][0] == runs[1][0] > min(x for x, *_ in cells(panel, "cell"))
    drawn = texts(exploding().plot())
    assert "not finite" in drawn
    assert "NaN or inf from step 15" in drawn  # of the loss
    assert "no finite loss was given" in texts(without_loss().plot())
    panel = panels(late())[GRADIENT]
    ((_, top, _),) = cells(panel, MISSING)
    assert top == max(y for _, y, _ in cells(panel, "cell"))
    silent = texts(history().plot())
    assert "not finite" not in silent
    assert "no number" not in silent


def test_events_are_marked_in_every_panel_and_at_their_layer() -> None:
    """A line through all panels, the layer in red, a number and the text above."""
    events = [(30, "fc2", "later"), Event(12, "relu", "all units dead"), (12, "fc1", "no gradient")]
    drawn = texts(dying().plot(events=events))
    assert "1  step 12, relu: all units dead" in drawn
    assert "3  step 30, fc2: later" in drawn
    assert "1-2" in drawn.splitlines()
    red = [of_class(panel, "name", "alarm") for panel in panels(history(), (12, "fc1"))]
    assert [[name.text for name in found] for found in red] == [["fc1"], [], ["fc1"]]
    many = texts(dying().plot(events=[(12, "relu", f"event {i}") for i in range(30)]))
    assert "and 22 more" in many


def test_one_bad_cell_of_half_a_million_is_drawn() -> None:
    """Layers that went wrong come first, and of steps in a column the worst is shown."""
    every, dead, _ = panels(large())
    assert rows(dead) == ["encoder.layers.12.part.5"]
    assert len({y for _, y, _ in cells(every, "cell")}) <= MOST_ROWS
    assert f"a column is {-(-899 // MOST_COLUMNS)} watched steps" in texts(large().plot())
    assert "gradient norm of parameters (32 of 600 layers, those" in texts(large().plot())
    assert len(cells(dead, "level-7")) == 1


@pytest.mark.parametrize("case", CASES)
def test_every_history_is_shown_without_a_warning(case) -> None:
    """One step, no loss, nothing seen, hostile names: all figures and the text, twice the same."""
    made = CASES[case]()
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
    made, read = large(), []
    usual = History.__getitem__
    monkeypatch.setattr(
        History, "__getitem__", lambda one, key: read.append(key) or usual(one, key)
    )
    made.summary()
    assert 5 <= len(read) < 15


def test_the_text_says_it_in_its_first_line() -> None:
    """Steps, loss, the worst layer; then a table with the gravest first, no longer than asked."""
    worst = Event(12, "relu", "all units dead")
    first, _, head, *table = dying().summary(worst=worst).splitlines()
    assert first == (
        "training of Net: 20 steps watched (0 to 38); loss 2.00 to 0.0513; "
        "worst, from step 12 on: relu: all units dead"
    )
    assert head.split() == ["layer", "p.grad", "update", "act.std", "dead"]
    assert [line.split()[0] for line in table] == ["relu", "fc2", "fc1"]
    assert dying().summary(1).splitlines()[-1] == "  and 2 layers more"
    text = exploding().summary()
    assert "loss 2.00 to nan; step 15: not finite first in the activations of 'fc2'" in text
    assert "no step was watched yet" in history(steps=range(0)).summary()


def test_a_monitor_shows_its_training(tmp_path) -> None:
    """It saves the figure, prints the text, and a notebook gets it as a table."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model).monitor() as monitor:
        for step in range(10):
            optimizer.zero_grad()
            loss = model(torch.randn(32, 8)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step_end(step, loss=loss)
    monitor.plot(tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    assert str(monitor) == monitor.summary()
    assert str(monitor).startswith("training of Sequential: 10 steps watched (0 to 9); loss ")
    assert "training of Sequential" in monitor._repr_html_()
    assert "<th>p.grad</th>" in monitor._repr_html_()


def test_what_cannot_be_drawn_is_refused() -> None:
    """No step yet, a path that is none, a history of its own."""
    with pytest.raises(InspectionError, match="no step was watched yet"):
        history(steps=range(0)).plot()
    with pytest.raises(InspectionError, match="path of a file"):
        history().plot(3)
    with pytest.raises(InspectionError, match="without a renderer"):
        History(4).summary()
