from __future__ import annotations

import io
import pickle
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from torch import nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.errors import InspectionError, LayerNotFoundError
from pytest_modelhealth.rendering.figures import ALARM
from pytest_modelhealth.rendering.training import MISSING, MOST_COLUMNS, MOST_ROWS, NONFINITE, ZERO
from pytest_modelhealth.statistics import reduce
from pytest_modelhealth.training.monitoring.history import History
from pytest_modelhealth.training.monitoring.row import BINS, EDGES, Event, binned
from tests.rendering import histories

GRADIENT, DEAD, UPDATE = "gradient norm", "dead units", "update ratio"


def png(figure: Figure) -> bytes:
    """The figure's file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=40)
    return buffer.getvalue()


def texts(figure: Figure) -> str:
    """Everything that is written in the figure."""
    figure.draw_without_rendering()
    found = figure.findobj(lambda artist: hasattr(artist, "get_text"))
    return "\n".join(artist.get_text() for artist in found)


def panel(figure: Figure, title: str) -> Axes:
    """The panel whose title begins so."""
    return next(axes for axes in figure.axes if axes.get_title(loc="left").startswith(title))


def rows(axes: Axes) -> list[str]:
    """The names of its rows."""
    return [label.get_text() for label in axes.get_yticklabels()]


def colors(axes: Axes) -> np.ndarray:
    """The colour of each cell, by row and column."""
    (mesh,) = (found for found in axes.collections if isinstance(found, QuadMesh))
    values = mesh.get_array()
    return mesh.cmap(mesh.norm(values))[..., :3]


def rgb(color: str) -> np.ndarray:
    """Red, green and blue of a colour that is written as hexadecimal digits."""
    return np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])


def is_color(cells: np.ndarray, color: str) -> np.ndarray:
    """Whether each cell has the colour."""
    return np.abs(cells - rgb(color)).max(axis=-1) < 0.01


def test_layers_stand_in_execution_order_where_they_have_something_to_show() -> None:
    """Containers without parameters have no row, and a ReLU none among gradients of parameters."""
    figure = histories.dying().plot()
    assert rows(panel(figure, GRADIENT)) == ["fc1", "fc2"]
    assert rows(panel(figure, DEAD)) == ["relu"]
    assert rows(panel(figure, UPDATE)) == ["fc1", "fc2"]
    assert "2 further layers never had one" in panel(figure, DEAD).get_title(loc="left")
    assert panel(figure, UPDATE).get_xlabel() == "step"


def test_a_reader_sees_which_layer_died_when() -> None:
    """The line at the top says it; zeros of gradients are black from that step on."""
    figure = histories.dying().plot()
    assert "worst: relu: all units dead since step 12" in texts(figure)
    cells = is_color(colors(panel(figure, GRADIENT)), ZERO)
    assert cells[0].tolist() == [False] * 6 + [True] * 14
    assert not cells[1].any()
    assert "zero" in texts(figure)
    assert panel(figure, GRADIENT).get_yticklabels()[0].get_color() == ALARM


def test_what_is_not_finite_is_loud_and_what_was_not_seen_is_grey() -> None:
    """Neither is drawn as a number, and both are in the legend; without them it is silent."""
    figure = histories.exploding().plot()
    for title in (GRADIENT, UPDATE):
        assert is_color(colors(panel(figure, title)), NONFINITE)[:, 15:].all()
        assert not is_color(colors(panel(figure, title)), NONFINITE)[:, :15].any()
    assert "not finite" in texts(figure)
    grey = is_color(colors(panel(histories.late().plot(), GRADIENT)), MISSING)
    assert grey.any(axis=1).tolist() == [False, False, True]
    assert grey[2, :10].all()
    assert not grey[2, 10:].any()
    silent = texts(histories.healthy().plot())
    assert "not finite" not in silent
    assert "not seen" not in silent


def test_a_loss_that_is_no_number_has_crosses() -> None:
    """They stand at its steps; where no loss was given the panel says so."""
    loss = histories.exploding().plot().axes[0]
    (crosses,) = (line for line in loss.lines if line.get_marker() == "x")
    assert list(crosses.get_xdata()) == [15, 16, 17, 18, 19]
    assert "no finite loss was given" in texts(histories.without_loss().plot())


def test_events_are_marked_in_every_panel_and_at_their_layer() -> None:
    """A line through all panels, a ring in the row, a number above, the text below."""
    events = [(30, "fc2", "later"), Event(12, "relu", "all units dead"), (12, "fc1", "no gradient")]
    figure = histories.dying().plot(events=events)
    drawn = texts(figure)
    assert "1  step 12, relu: all units dead" in drawn
    assert "3  step 30, fc2: later" in drawn
    rings = {
        title: {
            (line.get_xdata()[0], line.get_ydata()[0])
            for line in panel(figure, title).lines
            if line.get_marker() == "o"
        }
        for title in (GRADIENT, DEAD)
    }
    assert rings[GRADIENT] == {(12, 0)}
    assert rings[DEAD] == {(12, 0)}
    for axes in (panel(figure, GRADIENT), panel(figure, DEAD), panel(figure, UPDATE)):
        assert {12, 30} <= {x for line in axes.lines for x in np.ravel(line.get_xdata())}
    assert "1-2" in drawn.splitlines()
    many = texts(histories.dying().plot(events=[(12, "relu", f"event {i}") for i in range(30)]))
    assert "and 22 more" in many


def test_the_usual_band_is_drawn() -> None:
    """Two lines on the colour scale, and a word in the legend."""
    figure = histories.healthy().plot()
    bars = [axes for axes in figure.axes if len(axes.lines) == 2 and axes.get_title() == ""]
    assert any([line.get_ydata()[0] for line in axes.lines] == [-4, -2] for axes in bars)
    assert "usual: 1e-4 to 1e-2" in texts(figure)


def test_one_bad_cell_of_half_a_million_is_drawn() -> None:
    """Rows and columns are put together, never left out: the worst of each is shown."""
    figure = histories.large().plot()
    dead = panel(figure, DEAD)
    assert rows(dead) == ["encoder.layers.12.part.5"]
    every = panel(figure, GRADIENT)
    shape = colors(every).shape
    assert shape[0] <= MOST_ROWS
    assert shape[1] <= MOST_COLUMNS
    assert "a column is 2 watched steps" in texts(figure)
    assert "e.layers.0.part.0 and 4 more layers" in rows(every)
    reds = colors(dead)[0]
    assert (np.abs(reds - reds[0]).max(axis=1) > 0.2).sum() == 1


def test_names_of_many_layers_do_not_overlap() -> None:
    """Drawn, each name ends above the next one."""
    names = tuple(f"block.{i}.fc" for i in range(90))
    figure = histories.history(names, range(4)).plot()
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in panel(figure, GRADIENT).get_yticklabels()]
    assert len(boxes) > 15
    assert all(a.y0 >= b.y1 - 0.5 for a, b in pairwise(boxes))


@pytest.mark.parametrize("case", histories.CASES, ids=lambda case: case.__name__)
def test_every_history_is_shown_without_a_warning(case) -> None:
    """One step, no loss, nothing seen, hostile names: all figures and the text, twice the same."""
    made = case()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert png(made.plot()).startswith(b"\x89PNG")
        for layer in made.layers[1:2]:
            assert png(made.plot_layer(layer)).startswith(b"\x89PNG")
        assert made.summary() == made.summary()
    text = made.summary()
    assert [letter for letter in text if not letter.isprintable() and letter != "\n"] == []
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


def test_a_layer_through_time() -> None:
    """Only panels with something to show, the finding at the top, events of this layer alone."""
    made = histories.dying()
    shown = texts(made.plot_layer("relu", events=[(12, "relu", "dead"), (12, "fc1", "mute")]))
    assert "all units dead since step 12" in shown
    assert "1  step 12, relu: dead" in shown
    assert "mute" not in shown
    assert "update ratio" not in shown
    assert "update ratio" in texts(made.plot_layer("fc2"))
    with pytest.raises(LayerNotFoundError, match="did you mean 'fc1'"):
        made.plot_layer("fc_1")


def test_histograms_are_columns_of_a_heat_map() -> None:
    """Three filled bins of the kept ones, in each step; without histograms there is no such map."""
    figure = histories.with_histograms().plot_layer("fc1")
    axes = panel(figure, "activations: which part of the values")
    filled = np.abs(colors(axes) - 1).max(axis=-1) > 0.01
    assert filled.sum(axis=0).tolist() == [3] * 20
    assert "which part" not in texts(histories.healthy().plot_layer("fc1"))


def test_bins_hold_every_finite_value() -> None:
    """Each value is in the bin whose edges enclose it; what is beyond the scale is in the last."""
    values = torch.tensor([0.0, 3.0, -3.0, 1e9, 1e-30, torch.nan])
    parts = binned(reduce(values))
    assert len(parts) == BINS
    assert parts.sum(dtype=float) == pytest.approx(1, abs=1e-3)
    middle = BINS // 2
    place = int(np.searchsorted(EDGES, 3.0, side="right"))
    assert np.flatnonzero(parts).tolist() == [
        middle - place, middle, middle + 1, middle + place, BINS - 1
    ]  # fmt: skip
    assert np.isnan(binned(reduce(torch.full((3,), torch.nan)))).all()


def test_the_text_says_it_in_its_first_line() -> None:
    """Steps, loss, the worst layer; then a table with the gravest first, no longer than asked."""
    first, _, head, *table = histories.dying().summary().splitlines()
    assert first == (
        "training of Net: 20 steps watched (0 to 38); loss 2.00 to 0.0513; "
        "worst: relu: all units dead since step 12"
    )
    assert head.split() == ["layer", "p.grad", "update", "act.std", "dead"]
    assert [line.split()[0] for line in table] == ["relu", "fc1", "fc2"]
    assert histories.dying().summary(1).splitlines()[-1] == "  and 2 layers more"
    text = histories.exploding().summary()
    assert "loss 2.00 to nan; worst: fc2: not finite since step 15" in text
    assert "step 15: not finite first in the activations of 'fc2'" in text
    assert "no layer stands out" in histories.healthy().summary()
    assert "no step was watched yet" in histories.history(("a",), range(0)).summary()


def test_figures_of_a_history_are_the_same_each_time() -> None:
    """Bytes and all; the history is as it was."""
    made = histories.dying()
    before = pickle.dumps(made)
    assert png(made.plot()) == png(made.plot())
    assert pickle.dumps(made) == before


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
    """It saves the figures, prints the text, and a notebook gets it escaped."""
    monitor = train(histograms=True)
    monitor.plot(tmp_path / "all.png")
    monitor.plot_layer("0", tmp_path / "layer.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")
    assert str(monitor) == monitor.summary()
    assert str(monitor).startswith("training of Sequential: 10 steps watched (0 to 9); loss ")
    assert monitor._repr_html_().startswith("<pre>training of Sequential")
    parts = monitor.history.histograms("1", "activations")
    assert parts.shape == (10, BINS)
    assert parts[:, BINS // 2] == pytest.approx(monitor.history["1", "zero_fraction"], abs=1e-3)
    assert not parts[:, : BINS // 2].any()


def test_histograms_cost_nothing_where_they_are_not_asked_for() -> None:
    """No byte is kept, and the history says how to get them."""
    history = train().history
    assert history._histograms.nbytes == 0
    with pytest.raises(InspectionError, match=r"monitor\(histograms=True\)"):
        history.histograms("0")


def test_histograms_are_thinned_as_the_rows_are() -> None:
    """A column belongs to each kept step, the latest among them."""
    history = train(histograms=True, keep=4).history
    assert history.histograms("0").shape == (len(history), BINS)
    assert history.steps[-1] == 9
    assert len(history) <= 4
    zeros = history.histograms("1")[:, BINS // 2]
    assert zeros == pytest.approx(history["1", "zero_fraction"], abs=1e-3)


def test_what_cannot_be_drawn_is_refused() -> None:
    """No step yet, a path that is none, a history of its own, an unknown role."""
    with pytest.raises(InspectionError, match="no step was watched yet"):
        histories.history(("a",), range(0)).plot()
    with pytest.raises(InspectionError, match="path of a file"):
        histories.healthy().plot(3)
    with pytest.raises(InspectionError, match="without a renderer"):
        History(4).summary()
    with pytest.raises(InspectionError, match="did you mean 'gradients'"):
        histories.with_histograms().histograms("fc1", "gradient")
    with pytest.raises(InspectionError, match="histograms must be True or False"):
        Inspector(nn.Linear(2, 2)).monitor(histograms=3)
