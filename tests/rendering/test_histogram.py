import io
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Rectangle, StepPatch

from pytest_modelhealth.errors import InspectionError, LayerNotFoundError
from pytest_modelhealth.rendering.histogram import figures
from tests.builders import layer, observation
from tests.rendering import reports


def png(figure: Figure) -> bytes:
    """The figure's file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def texts(figure: Figure) -> str:
    """Everything that is written in the figure."""
    figure.draw_without_rendering()
    found = figure.findobj(lambda artist: hasattr(artist, "get_text"))
    return "\n".join(artist.get_text() for artist in found)


def one(name: str = "fc", **tensors) -> Figure:
    """The figure of a single layer's activations."""
    return reports.judged(observation(layer(name, **tensors))).plot_histogram(name)


def test_bars_are_the_counts() -> None:
    """Each bar is as high as the number of values that numpy finds between its powers of two."""
    torch.manual_seed(0)
    values = torch.randn(999)
    values[:100] = 0
    figure = one(activations=values)
    bars = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    drawn = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in bars}
    exponents = np.floor(np.log2(np.abs(values[100:].double().numpy()))).astype(int)
    place = np.sign(values[100:].numpy()) * (exponents - exponents.min() + 1)
    expected = dict(zip(*np.unique(place, return_counts=True), strict=True)) | {0: 100}
    assert {x: height for x, height in drawn.items() if height} == expected


def test_ticks_stand_at_the_borders_of_bins() -> None:
    """The bin from 1 to 2 lies between the ticks 1 and 2, on either side of zero."""
    axes = one(activations=torch.tensor([-1.5, 1.5, 0.0])).axes[0]
    ticks = dict(
        zip((t.get_text() for t in axes.get_xticklabels()), axes.get_xticks(), strict=True)
    )
    assert ticks == {"-2": -1.5, "-1": -0.5, "0": 0.0, "1": 0.5, "2": 1.5}
    bars = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in axes.patches}
    assert bars == {-1: 1, 0: 1, 1: 1}


def test_what_no_bar_can_show_is_written() -> None:
    """NaN and infinity are counted, and the numbers stand in the caption."""
    values = torch.tensor([torch.nan, torch.nan, torch.inf, -torch.inf, 1.0, 3.0])
    shown = texts(one(activations=values))
    assert "NaN: 2 (33%)\n+inf: 1 (17%)\n-inf: 1 (17%)" in shown
    assert "mean 2.00     std 1.00     min 1.00     max 3.00" in shown


def test_a_violation_is_written_into_its_histogram() -> None:
    """Only the figure of the culprit, and in the violated role, says what is wrong."""
    report = reports.dead()
    assert "dead_units: 3 of 4 units are dead" in texts(report.plot_histogram("relu"))
    assert "dead_units" not in texts(report.plot_histogram("fc1"))
    assert "dead_units" not in texts(report.plot_histogram("relu", "gradients"))


def test_bins_below_float16_are_shaded() -> None:
    """Subnormal values are shaded in the tensor's own dtype, and only where there are some."""
    values = torch.tensor([2.0**-20, 1.0])
    assert "subnormal float16" in texts(one(activations=values.half()))
    assert "subnormal" not in texts(one(activations=values))


def test_an_alias_is_plotted_under_its_layer() -> None:
    """Both names of a shared module reach the same figure."""
    record = layer("fc", activations=torch.ones(2, 2), aliases=("tied",))
    report = reports.judged(observation(record))
    assert png(report.plot_histogram("tied")) == png(report.plot_histogram("fc"))


def test_unknown_layers_and_roles_are_refused_with_a_hint() -> None:
    """A typing error is answered with the nearest name."""
    report = reports.dead()
    with pytest.raises(LayerNotFoundError, match="did you mean 'fc1'"):
        report.plot_histogram("fc_1")
    with pytest.raises(LayerNotFoundError, match="did you mean 'gradients'"):
        report.plot_histogram("fc1", "gradient")
    with pytest.raises(LayerNotFoundError, match="did you mean 'relu'"):
        report.plot_histograms("rellu")


def test_a_role_that_was_not_seen_is_refused_with_the_reason() -> None:
    """The message names the layer, its status and why."""
    report = reports.dead()
    for plot in (report.plot_histogram, report.plot_histograms):
        with pytest.raises(InspectionError, match=r"'spare'.*not_called.*forward never called it"):
            plot("spare")
    with pytest.raises(InspectionError, match="no backward pass ran"):
        reports.judged(observation(layer("fc"), backward=False)).plot_gradient_flow()


def test_a_row_for_each_matching_layer() -> None:
    """Rows stand in execution order; the fullest bin of each reaches the same height."""
    figure = reports.dead().plot_histograms("fc*")
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["fc1", "fc2"]
    steps = [patch for patch in axes.patches if isinstance(patch, StepPatch)]
    for row in (0, 1):
        mine = [s for s in steps if s.get_data().baseline == row + 0.4]
        heights = np.concatenate([row + 0.4 - s.get_data().values for s in mine])
        counts = reports.dead()[f"fc{row + 1}"].activations.histogram.counts
        assert heights.max() == pytest.approx(0.85)
        assert heights.sum() == pytest.approx(0.85 * counts.sum() / counts.max(), rel=0.05)
        assert (heights >= -1e-9).all()


def test_rows_hold_every_value_though_small_ones_share_a_bin() -> None:
    """Tails beyond the bulk are joined, not cut off."""
    tail = torch.cat([torch.full((1000,), 1.5), torch.full((5,), 2.0**-60)])
    seen = observation(layer("a", activations=tail), layer("b", activations=-tail))
    axes = reports.judged(seen).plot_histograms().axes[0]
    steps = [patch.get_data() for patch in axes.patches if isinstance(patch, StepPatch)]
    for row in (0, 1):
        heights = [row + 0.4 - s.values for s in steps if s.baseline == row + 0.4]
        assert np.concatenate(heights).sum() == pytest.approx(0.85 * 1005 / 1000)
    assert axes.get_xlim()[1] < 10


def test_layers_that_are_left_out_are_counted() -> None:
    """A matching layer without this role is not passed over in silence."""
    assert "1 matching layer without activations left out" in texts(
        reports.dead().plot_histograms()
    )


def flow(figure: Figure) -> dict[str, dict[int, float]]:
    """The points of a gradient flow: label to row to norm."""
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    return {
        label: dict(zip(line.get_ydata().tolist(), line.get_xdata().tolist(), strict=True))
        for label, line in lines.items()
    }


def test_the_gradient_flow_shows_the_norms() -> None:
    """Both series hold the L2 norms that torch computes, first layer in row 0."""
    torch.manual_seed(0)
    gradients = [torch.randn(8, 4) * 10.0**-i for i in range(3)]
    records = [
        layer(f"fc{i}", gradients=g, parameter_gradients={"weight": 2 * g})
        for i, g in enumerate(gradients)
    ]
    drawn = flow(reports.judged(observation(*records)).plot_gradient_flow())
    norms = {i: g.double().norm().item() for i, g in enumerate(gradients)}
    assert drawn["activations"] == pytest.approx(norms)
    assert drawn["parameters"] == pytest.approx({i: 2 * norm for i, norm in norms.items()})


def test_what_a_log_scale_cannot_show_stands_at_the_edges() -> None:
    """A zero gradient is at the left edge, one with NaN at the right, each under its own label."""
    bad = torch.tensor([[1.0, torch.nan]])
    records = [layer("a", gradients=torch.ones(2, 2)), layer("zero", gradients=torch.zeros(2, 2))]
    figure = reports.judged(observation(*records, layer("bad", gradients=bad))).plot_gradient_flow()
    drawn, (left, right) = flow(figure), figure.axes[0].get_xlim()
    assert drawn["activations: zero"] == {1: left}
    assert drawn["activations: NaN or inf"] == {2: right}
    assert drawn["activations"][2] == 1.0
    # matplotlib would draw a line to a zero, far off to the left
    assert np.isnan(drawn["activations"][1])


def test_violated_layers_are_named_in_the_flow() -> None:
    """The check stands beside the layer's row."""
    figure = reports.dead().plot_gradient_flow()
    assert [label.get_text() for label in figure.axes[1].get_yticklabels()] == [
        "",
        "dead_units",
        "",
    ]


@pytest.mark.parametrize("count", [5, 200])
def test_the_names_of_many_layers_do_not_overlap(count: int) -> None:
    """Drawn, each layer's name ends above the next one."""
    records = [layer(f"h.{i}", gradients=torch.ones(2)) for i in range(count)]
    figure = reports.judged(observation(*records)).plot_gradient_flow()
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert len(boxes) == count
    assert all(upper.y0 >= lower.y1 for upper, lower in pairwise(boxes))


def test_of_very_many_rows_the_violated_ones_are_named() -> None:
    """The figure stays at a height that can be viewed, and the culprit is named in it."""
    seen = reports.large().observation
    culprit = list(seen.layers)[503]
    figure = reports.judged(seen, reports.violation(culprit)).plot_gradient_flow()
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(names) == 200
    assert "e.layers.503.attention.output.dense" in names
    assert figure.get_figheight() < 60


def test_figures_are_byte_deterministic() -> None:
    """The same report gives the same files, whatever was drawn between."""
    first = {name: png(figure) for name, figure in figures(reports.dead()).items()}
    png(reports.nonfinite().plot_histogram("log"))
    assert {name: png(figure) for name, figure in figures(reports.dead()).items()} == first


def test_figures_do_not_depend_on_the_users_style() -> None:
    """On a dark style, the page stays white and the text dark."""
    with rc_context(
        {"figure.facecolor": "black", "axes.facecolor": "black", "text.color": "white"}
    ):
        figure = reports.dead().plot_histogram("relu")
        pixels = imread(io.BytesIO(png(figure)))
    assert pixels[0, 0, :3].tolist() == [1, 1, 1]
    assert np.median(pixels[..., :3]) == 1


@pytest.mark.parametrize("case", reports.CASES, ids=lambda case: case.__name__)
def test_every_report_gives_the_figures_it_can_without_a_warning(case) -> None:
    """Hostile names, no finite value, a thousand layers: each figure is drawn, none warns."""
    report = case()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = figures(report)
        for name, figure in made.items():
            if case is not reports.large or name != "gradient_flow":
                assert png(figure).startswith(b"\x89PNG")
    unhealthy = bool(report.violations) and case is not reports.absent_culprit
    assert ("culprit" in made) == unhealthy


def test_names_of_figures() -> None:
    """The failure report gets what exists: culprit, its predecessor, the flow."""
    assert list(figures(reports.dead())) == ["culprit", "predecessor", "gradient_flow"]
    assert list(figures(reports.healthy())) == []


def test_a_notebook_shows_the_figure() -> None:
    """Without pyplot, IPython finds the picture by `_repr_png_`."""
    assert reports.dead().plot_histogram("relu")._repr_png_().startswith(b"\x89PNG")


def test_containers_are_left_out_of_the_flow() -> None:
    """A container repeats its last layer's gradient; it would bend the line back at the top."""
    gradients = torch.ones(4, 4)
    model = layer("", type_name="Model", gradients=gradients)
    inner = layer("block.fc", gradients=gradients)
    shown = texts(reports.judged(observation(model, inner)).plot_gradient_flow())
    names = {text for text in shown.splitlines() if text in ("Model", "block.fc")}
    assert names == {"block.fc"}
