"""A training: the loss, and each statistic of its layers, over steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from pytest_modelhealth.rendering.charts import svg
from pytest_modelhealth.rendering.notation import plural

_LOSS, _SMALL, _GAP, _ABOVE, _BELOW, _LEFT, _LABEL = 120, 96, 26, 24, 24, 44, 96
_LOG_FROM = 30
"""Times the least: positive values that differ by more have a log axis."""

_MOST_LINES = 12
"""Of more layers, the band from the least to the greatest is drawn."""

_Line = tuple[str, Sequence["float | None"]]


@dataclass(frozen=True)
class _Frame:
    x: float
    y: float
    width: float
    height: float


def course(found: Mapping[str, Any], anchor: str) -> Markup:
    """Return the loss of a training, and each statistic of its layers, over steps."""
    steps, loss = found["steps"], found["loss"]
    if not steps:
        return svg.nothing("course", "No step was recorded.")
    by_statistic: dict[str, list[_Line]] = defaultdict(list)
    for name, statistics in found["layers"].items():
        for statistic, values in statistics.items():
            if any(map(svg.finite, values)):
                by_statistic[statistic].append((name, values))
    top = _ABOVE + _LOSS + _BELOW
    row = _ABOVE + _SMALL + _BELOW
    marks: list[str] = []
    frame = _Frame(0, 0, svg.WIDTH, _LOSS)
    body = [_over_steps("loss", frame, steps, [("", loss)], marks, None)]
    width = (svg.WIDTH - _GAP) / 2
    for index, (statistic, lines) in enumerate(by_statistic.items()):
        frame = _Frame(index % 2 * (width + _GAP), top + index // 2 * row, width, _SMALL)
        body.append(_over_steps(svg.words(statistic), frame, steps, lines, marks, anchor))
    height = top + math.ceil(len(by_statistic) / 2) * row
    return svg.chart(
        "course", (svg.WIDTH, height), _course_told(steps, loss), "".join(body), "".join(marks)
    )


def _over_steps(
    title: str,
    frame: _Frame,
    steps: Sequence[int],
    lines: Sequence[_Line],
    marks: list[str],
    anchor: str | None,
) -> str:
    """Return a panel of one statistic; `anchor` is ``None`` for the loss."""
    top, bottom = frame.y + _ABOVE, frame.y + _ABOVE + frame.height
    left = frame.x + _LEFT
    right = frame.x + frame.width - (8 if len(lines) == 1 else _LABEL)
    known = [value for _, values in lines for value in values if value is not None]
    positive = [value for value in known if value > 0] or [1.0]
    is_log = min(known, default=-1) >= 0 and max(positive) > _LOG_FROM * min(positive)
    scale = svg.log_scale if is_log else svg.linear_scale
    vertical = scale(positive if is_log else known, bottom - 3, top + 3, 4)
    across = svg.linear_scale(steps, left + 3, right - 3, 8 if frame.width > 400 else 5)

    def place(step: float, value: float) -> tuple[float, float]:
        return across.at(step), bottom if is_log and not value else vertical.at(value)

    parts = _grid(vertical, across, frame, right, len(lines))
    marks.append(
        svg.mark(_summary(title, steps, lines), svg.area(left, top, right - left, frame.height))
    )
    ended = sorted(
        (_last(own), at) for at, (_, own) in enumerate(lines) if any(map(svg.finite, own))
    )
    chosen = list(dict.fromkeys(at for _, at in (*ended[-1:], *ended[:1])))
    named = [lines[at] for at in chosen]
    if len(lines) > _MOST_LINES:
        parts.append(_band(steps, lines, place))
    else:
        others = [own for at, (_, own) in enumerate(lines) if at not in chosen]
        parts += [_line(steps, values, place, "line other") for values in others]
    for (_, values), style in zip(named, ("first", "second"), strict=False):
        parts.append(_line(steps, values, place, f"line chosen {style}"))
    if anchor is not None and len(lines) > 1:
        parts.append(_line_names(named, place, right, marks, anchor))
    if anchor is None and not known:
        parts.append(
            svg.write(left + 8, top + 40, "no finite loss was given to step_end()", "quiet")
        )
    bad = _first_bad(steps, lines[0][1]) if anchor is None and known else None
    if bad is not None:
        x = across.at(bad)
        is_late = x > svg.WIDTH - 160
        parts.append(svg.cross(x, top + 5))
        text = f"NaN or inf from step {bad}"
        parts.append(
            svg.write(x - 8 if is_late else x + 8, top + 9, text, f"alarm{' end' * is_late}")
        )
    kind = "loss" if anchor is None else "statistic"
    return svg.write(frame.x, frame.y + 12, title, "strong") + svg.tag(
        "g", *parts, class_=f"panel {kind}"
    )


def _grid(
    vertical: svg.Scale, across: svg.Scale, frame: _Frame, right: float, lines: int
) -> list[str]:
    """Return the axes of a panel, and what stands at their end."""
    left, bottom = svg.plain(frame.x + _LEFT), frame.y + _ABOVE + frame.height
    parts = [svg.path(f"M{left} {svg.plain(bottom)}H{svg.plain(right)}", "axis-line")]
    for y, text in vertical.ticks:
        parts.append(svg.path(f"M{left} {svg.plain(y)}H{svg.plain(right)}", "rule"))
        parts.append(svg.write(frame.x + _LEFT - 5, y + 3.5, text, "quiet small end"))
    for x, text in across.ticks:
        if "." not in text and (lines > 1 or x <= right - 40):
            parts.append(svg.path(f"M{svg.plain(x)} {svg.plain(bottom)}v3", "axis-line"))
            parts.append(svg.write(x, bottom + 14, text, "quiet small middle"))
    y, text = (bottom + 14, "step") if lines == 1 else (frame.y + 12, plural(lines, "layer"))
    return [*parts, svg.write(right, y, text, "quiet small end")]


def _last(values: Sequence[float | None]) -> float:
    return next(value for value in reversed(values) if value is not None)


def _line(steps: Sequence[int], values: Sequence[float | None], place: Any, class_: str) -> str:
    """Return a line that breaks where there is no number."""
    parts, run = [], []
    for step, value in [*zip(steps, values, strict=True), (0, None)]:
        if value is not None:
            run.append(place(step, value))
        elif run:
            alone = "h.1" if len(run) == 1 else ""
            parts.append(svg.line(run) + alone)
            run = []
    return svg.path("".join(parts), class_)


def _band(steps: Sequence[int], lines: Sequence[_Line], place: Any) -> str:
    """Return the band from the least to the greatest of all layers, and the median."""
    lows, medians, highs = [], [], []
    for index, step in enumerate(steps):
        known = sorted(v for _, values in lines if (v := values[index]) is not None)
        if known:
            lows.append(place(step, known[0]))
            medians.append(place(step, known[len(known) // 2]))
            highs.append(place(step, known[-1]))
    band = f"{svg.line(lows)}L{svg.line(highs[::-1])[1:]}z"
    return svg.path(band, "band") + svg.path(svg.line(medians), "median")


def _line_names(
    named: Sequence[_Line],
    place: Any,
    right: float,
    marks: list[str],
    anchor: str,
) -> str:
    """Return the names of lines at their ends, apart from each other."""
    parts, above = [], -math.inf
    ends = [
        (place(0, _last(values))[1], style, name, _last(values))
        for (name, values), style in zip(named, ("first", "second"), strict=False)
    ]
    for y, style, name, end in sorted(ends):
        above = max(y + 3.5, above + 12.5)
        label = name or "model"
        text = svg.fitted(label, 14)
        parts.append(svg.write(right + 5, above, text, f"small coloured {style}"))
        shape = svg.area(right + 2, above - 10, _LABEL - 4, 13)
        marks.append(
            svg.mark(f"{label}: ends at {svg.brief(end)}", shape, svg.link_to(anchor, name))
        )
    return "".join(parts)


def _first_bad(steps: Sequence[int], loss: Sequence[float | None]) -> int | None:
    return next((s for s, value in zip(steps, loss, strict=False) if value is None), None)


def _summary(title: str, steps: Sequence[int], lines: Sequence[_Line]) -> str:
    known = [value for value in lines[0][1] if value is not None]
    if len(lines) > 1:
        return f"{title} of {len(lines)} layers, steps {steps[0]} to {steps[-1]}"
    ends = (svg.brief(known[0]), svg.brief(known[-1])) if known else ("no number", "no number")
    return f"{title}: {ends[0]} at first, {ends[1]} at last"


def _course_told(steps: Sequence[int], loss: Sequence[float | None]) -> str:
    known = [value for value in loss if value is not None]
    if not known:
        return f"course of {plural(len(steps), 'step')}; no loss was recorded"
    first, last = known[0], known[-1]
    verb = "rises" if last > first else "falls" if last < first else "stays"
    bad = _first_bad(steps, loss)
    end = f" at step {steps[-1]}" if bad is None else f"; NaN or infinity from step {bad}"
    return f"loss {verb} from {svg.brief(first)} at step {steps[0]} to {svg.brief(last)}{end}"
