"""The figures of a report and a comparison: the page's charts, drawn again from their SVG.

Their colours are those of `charts.css`. Figures are made without pyplot: no global state, no
window, nothing to close. One report always gives the same bytes.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Circle, FancyBboxPatch, Patch, PathPatch
from matplotlib.path import Path
from matplotlib.patheffects import withStroke

from pytest_modelhealth.comparison.comparison import Comparison
from pytest_modelhealth.errors import InspectionError, LayerNotFoundError, suggest_layer
from pytest_modelhealth.rendering.charts import flow as flow_chart
from pytest_modelhealth.rendering.charts.rows import depth, errors
from pytest_modelhealth.rendering.charts.svg import LETTER, STYLE
from pytest_modelhealth.rendering.charts.values import histograms
from pytest_modelhealth.rendering.notation import few, number, plural, printable, shape
from pytest_modelhealth.rendering.recorded import (
    comparison_data,
    evidence_data,
    findings_data,
    flow_data,
    tensor_data,
    tensors_data,
)
from pytest_modelhealth.rendering.summary import label
from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.report.codec import encode

GRADIENTS = ("gradients", "parameter_gradients")
MOST_ALARMS = 4  # findings that are written above a figure


def figures(made: HealthReport | Comparison) -> dict[str, Figure]:
    """Return the figures that explain a verdict, by name; only those there is something for.

    Of a report ``culprit`` has the histogram of its layer below that of the layer before it, in the
    role that is violated, and ``gradient_flow`` shows the whole model.
    """
    if isinstance(made, Comparison):
        return {"error_depth": plot_errors(made)}
    drawn: dict[str, Figure] = {}
    if tensors := [(one["label"], one) for one in encode(evidence_data(made))]:
        label, culprit = tensors[-1]
        title = f"{culprit['role'].replace('_', ' ')} of {label}"
        drawn["culprit"] = figure_of(histograms(tensors, row=110), title, (), _alarms(made))
    if any(record.tensors(role) for record in made for role in GRADIENTS):
        drawn["gradient_flow"] = plot_gradient_flow(made)
    return drawn


def plot_histogram(report: HealthReport, layer: str, what: str = "activations") -> Figure:
    """Return a figure of one layer's values by sign and power of two, its tensors merged."""
    record = report[layer]
    if (seen := record.statistics(what)) is None:
        raise InspectionError(record.why_not_seen(what))
    notes = [
        f"{record.type_name}, {seen.dtype}, {shape(seen.shape)}, {plural(seen.count, 'value')}",
        f"min {number(seen.min)}   max {number(seen.max)}   L2 norm {number(seen.norm)}",
    ]
    found = [f for f in report.violations if (f.layer, f.role) == (record.name, what)]
    alarms = [f"{f.check}: {f.message}" for f in found]
    title = f"{record.label}: {what.replace('_', ' ')}"
    chart = histograms([(record.label, encode(tensor_data(what, "", seen)))], row=110)
    return figure_of(chart, title, notes, alarms[:MOST_ALARMS])


def plot_histograms(report: HealthReport, pattern: str = "*", what: str = "activations") -> Figure:
    """Return a figure with a row for each layer that matches `pattern`, in execution order.

    The rows share the axis of values; each is scaled to its own highest bar. How many matching
    layers have nothing in role `what` is said below.
    """
    if not isinstance(pattern, str):
        raise InspectionError(
            f"the pattern of layers must be a shell wildcard such as 'encoder.*', not {pattern!r}"
        )
    matched = [record for record in report if fnmatchcase(record.name, pattern)]
    if not matched:
        nearest = suggest_layer(pattern, report.layers)
        raise LayerNotFoundError(f"no layer matches {pattern!r}{nearest} report.layers lists all.")
    seen = [(record, found) for record in matched if (found := record.statistics(what)) is not None]
    if not seen:
        raise InspectionError(matched[0].why_not_seen(what))
    rest, role = len(matched) - len(seen), what.replace("_", " ")
    left_out = f"{plural(rest, 'matching layer')} without {role} left out" if rest else ""
    named = [(record.label, encode(tensor_data(what, "", found))) for record, found in seen]
    title = f"{role} of {report.observation.model_type}"
    return figure_of(histograms(named, left_out), title)


def plot_gradient_flow(report: HealthReport) -> Figure:
    """Return a figure of gradients through the depth of a model, beside the activations.

    A row is a layer that contains no other; a container is one only where it has parameters of its
    own or a violation. Norms are L2 norms on a log scale; zero is drawn hollow at the left edge,
    what has NaN or infinity as a cross at the right.
    """
    if not any(record.tensors(role) for record in report for role in GRADIENTS):
        seen, model = report.observation, printable(report.observation.model_type)
        why = "no layer watched has a gradient" if seen.backward else "no backward pass ran"
        raise InspectionError(f"no gradients were seen of {model}: {why}.")
    layers = [
        {"name": r.name, "label": label(report, r.name), "tensors": tensors_data(r)} for r in report
    ]
    chart = depth(encode(layers), encode(findings_data(report)), "")
    title = f"gradient flow of {report.observation.model_type}"
    return figure_of(chart, title, alarms=_alarms(report))


def _alarms(report: HealthReport) -> list[str]:
    lines = [f"{label(report, f.layer)}: {f.check}: {f.message}" for f in report.violations]
    return few(lines, MOST_ALARMS, "more violation")


def plot_flow(report: HealthReport) -> Figure:
    """Return a figure of who feeds whom; the way through the worst layer is lit.

    A dashed arrow lets no gradient back. A large model is folded into its containers.
    """
    found = flow_data(report)
    if found is None:
        why = "; ".join(report.flow.notes if report.flow is not None else ())
        why = why or "a deployed model shows none"
        raise InspectionError(f"no flow was recorded in this run: {why}")
    chart = flow_chart.flow(found, encode(findings_data(report)), "")
    return figure_of(chart, f"flow of {report.observation.model_type}", alarms=_alarms(report))


def plot_errors(comparison: Comparison) -> Figure:
    """Return a figure of relative L2 errors, forward and backward, the first layer at the top.

    The bar of a row ends where the noise times the factor does: up to there rounding explains an
    error. Rows that have diverged are tinted; the culprit's name is red. No error is drawn hollow
    at the left edge, what has no number (NaN, another shape, a missing gradient) as a cross at the
    right.
    """
    verdict = "equivalent" if comparison.equivalent else "not equivalent"
    title = f"{verdict}: {comparison.reference} and {comparison.candidate}"
    return figure_of(errors(encode(comparison_data(comparison)), ""), title)


# Charts in matplotlib

INK, ALARM = "#1c2127", "#c3261f"
_INCH, _PAD = 100, 10.0  # Pixels: of an inch, and around a chart
_POINT = 72 / _INCH  # of a pixel
_HIDDEN = {"title", "mark", "edge-mark"}  # what stands above a chart on the page, for a mouse

_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


class HealthFigure(Figure):
    """A figure that notebooks show without pyplot being imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def drawable(text: str) -> str:
    """Return `text` with an escape for each character that the figure's font lacks.

    matplotlib would warn, and a warning fails the test of a user who turns warnings into errors.
    """
    known = () if text.isascii() else get_font(findfont(FontProperties())).get_charmap()
    return "".join(
        letter if letter.isascii() or ord(letter) in known else ascii(letter)[1:-1]
        for letter in printable(text)
    )


def figure_of(
    chart: str, title: str, notes: Sequence[str] = (), alarms: Sequence[str] = ()
) -> Figure:
    """Return a figure of a chart: SVG, of classes that `charts.css` colours.

    Above it stand the title, the notes and, in red, the alarms.
    """
    root = ElementTree.fromstring(chart)
    width, height = (float(root.get(side, "")) for side in ("width", "height"))
    lines = [(title, 13.0, INK)]
    for texts, color in ((notes, INK), (alarms, ALARM)):
        broken = [part for text in texts for part in textwrap.wrap(text, int(width / LETTER))]
        lines += [(part, 11.0, color) for part in broken]
    head = 17.0 * len(lines) + 12
    inches = (width + 2 * _PAD) / _INCH, (height + head + _PAD) / _INCH
    figure = HealthFigure(figsize=inches, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), facecolor="white")
    axes.set_xlim(-_PAD, width + _PAD)
    axes.set_ylim(height + _PAD, -head)
    axes.set_axis_off()
    for row, (text, size, color) in enumerate(lines):
        axes.text(
            0, 17 * (row + 1) - head, drawable(text), fontsize=size * _POINT, color=color,
            fontweight="normal" if row else "bold", parse_math=False,
        )  # fmt: skip
    _draw(axes, root, "black")
    return figure


def _draw(axes: Axes, element: Element, color: str) -> None:
    """Draw an element and all in it."""
    classes = {element.tag, *element.get("class", "").split()}
    if classes & _HIDDEN:
        return
    look: dict[str, str] = {}
    for needed, declarations in _rules():
        look |= declarations if needed <= classes else {}
    color = look.get("color", color)
    look = {key: color if value == "currentColor" else value for key, value in look.items()}
    names = ("x", "y", "width", "height", "rx", "cx", "cy", "r")
    at = {name: float(element.get(name, 0)) for name in names}
    if element.tag == "text":
        axes.text(
            at["x"], at["y"], drawable(element.text or ""), color=look.get("fill", "black"),
            fontsize=float(look.get("font-size", "11px").removesuffix("px")) * _POINT,
            fontweight="bold" if "font-weight" in look else "normal",
            fontstyle=look.get("font-style", "normal"), parse_math=False,
            ha=_ANCHORS[look.get("text-anchor", "start")],
            path_effects=[withStroke(linewidth=3, foreground="white")] * ("stroke" in look),
        )  # fmt: skip
    elif (patch := _patch(element, at)) is not None:
        fill = look.get("fill", "none" if "stroke" in look else "black")
        for name, value in (("fill", fill), ("stroke", look.get("stroke", "none"))):
            opacity = None if value == "none" else float(look.get(f"{name}-opacity", 1))
            patch.set(**{"facecolor" if name == "fill" else "edgecolor": to_rgba(value, opacity)})
        patch.set_linewidth(float(look.get("stroke-width", 1)) * _POINT)
        if "stroke-dasharray" in look:
            patch.set_linestyle((0, [float(part) for part in look["stroke-dasharray"].split()]))
        patch.set_clip_on(False)
        patch.set_antialiased("shape-rendering" not in look)  # no seams between cells
        axes.add_patch(patch)
    for inner in element:
        _draw(axes, inner, color)


def _patch(element: Element, at: dict[str, float]) -> Patch | None:
    if element.tag == "path":
        path = path_of(element.get("d", ""))
        return None if path is None else PathPatch(path, capstyle="butt")
    if element.tag == "circle":
        return Circle((at["cx"], at["cy"]), at["r"])
    if element.tag == "rect":
        form = f"round,pad=0,rounding_size={at['rx']}" if at["rx"] else "square,pad=0"
        return FancyBboxPatch((at["x"], at["y"]), at["width"], at["height"], boxstyle=form)
    return None


def path_of(d: str) -> Path | None:
    """Return a path of SVG, of the commands that charts are drawn with."""
    vertices: list[tuple[float, float]] = []
    codes: list[int] = []
    x = y = 0.0
    for command, written in re.findall(r"([MLHVCZmlhvcz])([^MLHVCZmlhvcz]*)", d):
        numbers = [float(number) for number in re.findall(r"-?[\d.]+(?:e-?\d+)?", written)]
        kind, own_code = command.upper(), Path.CURVE4 if command in "Cc" else Path.LINETO
        if kind == "Z":
            vertices.append((x, y))
            codes.append(int(Path.CLOSEPOLY))
        size = {"C": 6, "H": 1, "V": 1}.get(kind, 2)
        for start in range(0, len(numbers), size):
            from_x, from_y = (x, y) if command.islower() else (0.0, 0.0)
            part = numbers[start : start + size]
            if size == 1:  # the other one stays
                part = [part[0], y - from_y] if kind == "H" else [x - from_x, part[0]]
            points = [(from_x + a, from_y + b) for a, b in zip(part[::2], part[1::2], strict=True)]
            vertices += points
            code = Path.MOVETO if kind == "M" and not start else own_code
            codes += [int(code)] * len(points)
            x, y = points[-1]
    return Path(vertices, codes) if vertices else None


@cache
def _rules() -> list[tuple[frozenset[str], dict[str, str]]]:
    """Return the rules of `charts.css`, the less specific first: classes and declarations.

    A tag counts as a class.
    """
    css = STYLE.read_text(encoding="ascii")
    palette = dict(re.findall(r"--([\w-]+): (#\w+)", css))
    css = re.sub(r"var\(--([\w-]+)\)", lambda found: palette.get(found[1], ""), css)
    rules = []
    for selectors, body in re.findall(r"^(\.chart [.\w][^{:]*)\{([^}]*)\}", css, re.MULTILINE):
        declarations = dict(re.findall(r"([\w-]+): ([^;]+);", body))
        for selector in selectors.split(","):
            own = frozenset(re.findall(r"[\w-]+", selector.split()[1]))
            rules.append((own, declarations))
    return sorted(rules, key=lambda rule: len(rule[0]))
