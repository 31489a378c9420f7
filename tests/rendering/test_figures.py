"""Figures: what their charts hold, `tests/runs/test_charts.py` has; here, that they are drawn."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Circle, FancyBboxPatch, PathPatch
from torch import Tensor, nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.errors import InspectionError, LayerNotFoundError
from pytest_modelhealth.rendering.charts.svg import STYLE
from pytest_modelhealth.rendering.figures import figure_of, figures, path_of
from tests.builders import layer, observation
from tests.rendering import reports


def png(figure: Figure) -> bytes:
    """The figure's file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=40)
    return buffer.getvalue()


def texts(figure: Figure) -> list[str]:
    """Everything that is written in the figure."""
    return [text.get_text() for text in figure.axes[0].texts]


def said(figure: Figure) -> str:
    """The same as one text, on which lines were broken."""
    return " ".join(texts(figure))


def test_shapes_stand_where_the_chart_has_them() -> None:
    """Text, boxes, circles and each command of a path, in the colours of the page's style."""
    chart = (
        '<svg class="chart chart-histogram" width="100" height="50">'
        '<g class="second"><path class="line second" d="M1 2L3 4"/>'
        '<circle class="point" cx="9" cy="8" r="2"/></g>'
        '<text x="5" y="6" class="alarm end">a $b$</text>'
        '<rect x="10" y="20" width="30" height="5" class="bin"/>'
        '<path class="head cut" d="M1 1z"/><g><title>no</title><rect class="mark"/></g></svg>'
    )
    axes = figure_of(chart, "title", ["said"], ["wrong"]).axes[0]
    palette = STYLE.read_text()
    line, circle, box, head = axes.patches
    assert isinstance(line, PathPatch)
    assert isinstance(circle, Circle)
    assert isinstance(box, FancyBboxPatch)
    assert [tuple(v) for v in line.get_path().vertices.tolist()] == [(1, 2), (3, 4)]
    assert line.get_linestyle() != "-"
    assert (box.get_x(), box.get_y(), box.get_width(), box.get_height()) == (10, 20, 30, 5)
    for patch, name in ((box, "accent"), (circle, "accent2"), (head, "alarm")):
        color = "#{:02x}{:02x}{:02x}".format(*(round(255 * c) for c in patch.get_facecolor()[:3]))
        assert f"--{name}: {color};" in palette
    (written,) = [text for text in axes.texts if text.get_text() == "a $b$"]
    assert (written.get_position(), written.get_ha()) == ((5, 6), "right")
    assert {"title", "said", "wrong"} <= {text.get_text() for text in axes.texts}


@pytest.mark.parametrize(
    ("d", "ends"),
    [
        ("M1 2l7 7m0 -7l-7 7", [(1, 2), (8, 9), (8, 2), (1, 9)]),
        ("M4 5H9v-2h1V0", [(4, 5), (9, 5), (9, 3), (10, 3), (10, 0)]),
        ("M0 0c1 2 3 4 5 6C7 8 9 1 2 3", [(0, 0), (1, 2), (3, 4), (5, 6), (7, 8), (9, 1), (2, 3)]),
        ("M1 1L2 2z", [(1, 1), (2, 2), (2, 2)]),
    ],
)  # fmt: skip
def test_a_path(d: str, ends: list[tuple[int, int]]) -> None:
    """Commands in either case, relative and absolute, each repeated where numbers go on."""
    path = path_of(d)
    assert path is not None
    assert [tuple(vertex) for vertex in path.vertices.tolist()] == ends


def test_histograms_say_what_no_bar_can_show() -> None:
    """NaN and infinity are counted, numbers and the violation told, layers left out as well."""
    values = torch.tensor([torch.nan, torch.nan, torch.inf, -torch.inf, 1.0, 3.0])
    report = reports.judged(observation(layer("fc", activations=values)))
    assert "2 NaN, 2 inf" in texts(report.plot_histogram("fc"))
    assert "min 1.00   max 3.00" in said(report.plot_histogram("fc"))
    report = reports.dead()
    assert "dead_units: 3 of 4 units are dead" in said(report.plot_histogram("relu"))
    assert "dead_units" not in said(report.plot_histogram("fc1"))
    assert "dead_units" not in said(report.plot_histogram("relu", "gradients"))
    rows = texts(report.plot_histograms("fc*"))  # in execution order
    assert [text for text in rows if text.startswith("fc")] == ["fc1", "fc2"]
    assert "1 matching layer without activations left out" in texts(report.plot_histograms())


def test_unknown_layers_and_roles_are_refused_with_a_hint() -> None:
    """A typing error is answered with the nearest name, what was not seen with the reason."""
    report = reports.dead()
    with pytest.raises(LayerNotFoundError, match="did you mean 'fc1'"):
        report.plot_histogram("fc_1")
    with pytest.raises(LayerNotFoundError, match="did you mean 'gradients'"):
        report.plot_histogram("fc1", "gradient")
    with pytest.raises(LayerNotFoundError, match="did you mean 'relu'"):
        report.plot_histograms("rellu")
    for plot in (report.plot_histogram, report.plot_histograms):
        with pytest.raises(InspectionError, match=r"'spare'.*not_called.*forward never called it"):
            plot("spare")
    nothing = reports.judged(observation(layer("fc"), backward=False))
    with pytest.raises(InspectionError, match="no backward pass ran"):
        nothing.plot_gradient_flow()
    with pytest.raises(InspectionError, match="no flow was recorded"):
        nothing.plot_flow()


class Net(nn.Module):
    """A residual block with dead units, and a detach before a head with a name of markup."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.add_module('h"<b>', nn.Linear(8, 3))
        nn.init.constant_(self.fc1.bias, -100.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.fc2(self.fc1(x).relu())
        head: Tensor = self._modules['h"<b>'](x.detach())
        return head


def test_the_figure_of_the_flow_has_every_box_and_marks_violations() -> None:
    """A layer with a violation stands out; its name is taken literally."""
    report = Inspector(Net()).run_inspection(torch.randn(64, 8))
    drawn = {text.get_text(): text for text in report.plot_flow().axes[0].texts}
    assert {"input 0", "fc1", "relu", 'h"<b>', "+"} <= set(drawn)
    alarmed = {violation.layer for violation in report.violations}
    reds = {name for name, text in drawn.items() if text.get_color() == "#c3261f"}
    assert reds & set(report.layers) == alarmed & set(drawn) != set()


def test_the_gradient_flow_names_the_violated_layers() -> None:
    """The check stands above, the layer's name in red, a container without violation nowhere."""
    figure = reports.dead().plot_gradient_flow()
    assert "relu: dead_units: 3 of 4 units are dead" in said(figure)
    reds = {text.get_text() for text in figure.axes[0].texts if text.get_color() == "#c3261f"}
    assert "relu" in reds
    assert not {"fc1", "fc2"} & reds
    model = layer("", type_name="Model", gradients=torch.ones(4, 4))
    inner = layer("block.fc", gradients=torch.ones(4, 4))
    shown = texts(reports.judged(observation(model, inner)).plot_gradient_flow())
    assert "block.fc" in shown
    assert "Model" not in shown


def test_figures_of_a_report_are_the_same_each_time_in_every_style() -> None:
    """Bytes and all, whatever was drawn between; on a dark style, the page stays white."""
    assert list(figures(reports.dead())) == ["culprit", "gradient_flow"]
    assert list(figures(reports.healthy())) == []
    first = {name: png(figure) for name, figure in figures(reports.dead()).items()}
    png(reports.nonfinite().plot_histogram("log"))
    assert {name: png(figure) for name, figure in figures(reports.dead()).items()} == first
    dark = {"figure.facecolor": "black", "axes.facecolor": "black", "text.color": "white"}
    with rc_context(dark):
        pixels = imread(io.BytesIO(png(reports.dead().plot_histogram("relu"))))
    assert pixels[0, 0, :3].tolist() == [1, 1, 1]
    assert np.median(pixels[..., :3]) == 1
    assert reports.dead().plot_histogram("relu")._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("case", reports.CASES, ids=lambda case: case.__name__)
def test_every_report_gives_the_figures_it_can_without_a_warning(case) -> None:
    """Hostile names, no finite value, a thousand layers: each figure is drawn, none warns."""
    report = case()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = figures(report)
        assert all(png(figure).startswith(b"\x89PNG") for figure in made.values())
    unhealthy = bool(report.violations) and case is not reports.absent_culprit
    assert ("culprit" in made) == unhealthy
