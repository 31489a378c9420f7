"""A training: the loss, and each statistic of its layers, over steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pytest_modelhealth.rendering.charts import svg
from pytest_modelhealth.rendering.notation import plural

_LOSS, _SMALL, _GAP, _ABOVE, _BELOW, _LEFT, _LABEL = 120, 96, 26, 24, 24, 44, 96
_LOG_FROM = 30
"""Times the least: positive values that differ by more have a log axis."""

_MOST_LINES = 12
"""Of more layers, those are drawn that end lowest, highest, and at the quartiles between."""

_Line = tuple[str, Sequence["float | None"]]
_Place = Callable[[float, float], tuple[float, float]]


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
    panel = _Panel(steps, 0, _ABOVE, svg.WIDTH, _LOSS)
    body, marks = [panel.loss(loss)], [panel.mark("loss", [("", loss)])]
    width, row = (svg.WIDTH - _GAP) / 2, _ABOVE + _SMALL + _BELOW
    top = 2 * _ABOVE + _LOSS + _BELOW
    for at, (statistic, lines) in enumerate(by_statistic.items()):
        panel = _Panel(steps, at % 2 * (width + _GAP), top + at // 2 * row, width, _SMALL)
        title = svg.words(statistic)
        marks.append(panel.mark(title, lines))  # below those of its lines
        body.append(panel.statistic(title, lines, marks, anchor))
    height = top - _ABOVE + math.ceil(len(by_statistic) / 2) * row
    told = _told(steps, loss)
    return svg.chart("course", (svg.WIDTH, height), told, "".join(body), "".join(marks))


class _Panel:
    """A panel of lines over steps: place and size of its axes, the title above them."""

    def __init__(self, steps: Sequence[int], x: float, y: float, width: float, height: int) -> None:
        self.steps, self.x, self.y, self.bottom = steps, x, y, y + height
        self.left, self.end = x + _LEFT, x + width
        self.across = svg.linear_scale(steps, 0, 1, 8 if width > 400 else 5)

    def loss(self, loss: Sequence[float | None]) -> str:
        known = [value for value in loss if value is not None]
        right = self.end - 8
        place, parts = self._axes(known, right)
        parts.append(svg.write(right, self.bottom + 14, "step", "quiet small end"))
        parts.append(self._line(loss, place, "line chosen first"))
        if not known:
            why = "no finite loss was given to step_end()"
            parts.append(svg.write(self.left + 8, self.y + 40, why, "quiet"))
        elif (bad := _first_bad(self.steps, loss)) is not None:
            x = place(bad, 0.0)[0]
            is_late = x > svg.WIDTH - 160
            text, class_ = f"NaN or inf from step {bad}", f"alarm{' end' * is_late}"
            parts.append(svg.cross(x, self.y + 5))
            parts.append(svg.write(x - 8 if is_late else x + 8, self.y + 9, text, class_))
        return svg.write(self.x, self.y - 12, "loss", "strong") + svg.tag(
            "g", *parts, class_="panel loss"
        )

    def statistic(self, title: str, lines: Sequence[_Line], marks: list[str], anchor: str) -> str:
        """Return a line for each layer; those that end highest and lowest are named."""
        right = self.end - _LABEL
        place, parts = self._axes([v for _, own in lines for v in own if v is not None], right)
        ends = [next(v for v in reversed(values) if v is not None) for _, values in lines]
        order = sorted(range(len(lines)), key=lambda at: (ends[at], at))
        others, count = order[1:-1], plural(len(lines), "layer")
        if len(lines) > _MOST_LINES:
            others = others[len(others) // 4 :: len(others) // 4][:3]
            count += f", {len(others) + 2} drawn"
        parts += [self._line(lines[at][1], place, "line other") for at in others]
        above = -math.inf
        for at, style in zip(
            dict.fromkeys((order[-1], order[0])), ("first", "second"), strict=False
        ):
            name, values = lines[at]
            parts.append(self._line(values, place, f"line chosen {style}"))
            label = name or "model"
            above = max(place(0, ends[at])[1] + 3.5, above + 12.5)
            text = svg.fitted(label, 14)
            parts.append(svg.write(right + 5, above, text, f"small coloured {style}"))
            shape = svg.area(right + 2, above - 10, _LABEL - 4, 13)
            title_ = f"{label}: ends at {svg.brief(ends[at])}"
            marks.append(svg.mark(title_, shape, svg.link_to(anchor, name)))
        parts.append(svg.write(right, self.y - 12, count, "quiet small end"))
        return svg.write(self.x, self.y - 12, title, "strong") + svg.tag(
            "g", *parts, class_="panel statistic"
        )

    def mark(self, title: str, lines: Sequence[_Line]) -> str:
        told = f"of {plural(len(lines), 'layer')}, steps {self.steps[0]} to {self.steps[-1]}"
        shape = svg.area(self.left, self.y, self.end - self.left - 8, self.bottom - self.y)
        return svg.mark(f"{title} {told}" if lines[0][0] else _told(self.steps, lines[0][1]), shape)

    def _axes(self, known: Sequence[float], right: float) -> tuple[_Place, list[str]]:
        """Return where a value at a step stands, and the axes."""
        positive = [value for value in known if value > 0] or [1.0]
        is_log = min(known, default=-1) >= 0 and max(positive) > _LOG_FROM * min(positive)
        ends = self.bottom - 3, self.y + 3
        vertical = (
            svg.log_scale(positive, *ends, 4) if is_log else svg.linear_scale(known, *ends, 4)
        )
        start, span = self.left + 3, right - self.left - 6

        def place(step: float, value: float) -> tuple[float, float]:
            y = self.bottom if is_log and not value else vertical.at(value)
            return start + self.across.at(step) * span, y

        left, bottom, end = map(svg.plain, (self.left, self.bottom, right))
        parts = [svg.path(f"M{left} {bottom}H{end}", "axis-line")]
        for y, text in vertical.ticks:
            parts.append(svg.path(f"M{left} {svg.plain(y)}H{end}", "rule"))
            parts.append(svg.write(self.left - 5, y + 3.5, text, "quiet small end"))
        for part, text in self.across.ticks:
            x = start + part * span
            if "." not in text and x <= right - 40 * (self.end - right < _LABEL):
                parts.append(svg.path(f"M{svg.plain(x)} {bottom}v3", "axis-line"))
                parts.append(svg.write(x, self.bottom + 14, text, "quiet small middle"))
        return place, parts

    def _line(self, values: Sequence[float | None], place: _Place, class_: str) -> str:
        """Return a line that breaks where there is no number."""
        d, run = "", []
        for step, value in [*zip(self.steps, values, strict=True), (0, None)]:
            if value is not None:
                run.append(place(step, value))
            elif run:
                d += svg.line(run) + "h.1" * (len(run) == 1)
                run = []
        return svg.path(d, class_)


def _first_bad(steps: Sequence[int], loss: Sequence[float | None]) -> int | None:
    return next((s for s, value in zip(steps, loss, strict=False) if value is None), None)


def _told(steps: Sequence[int], loss: Sequence[float | None]) -> str:
    known = [value for value in loss if value is not None]
    if not known:
        return f"course of {plural(len(steps), 'step')}; no loss was recorded"
    first, last = known[0], known[-1]
    verb = "rises" if last > first else "falls" if last < first else "stays"
    bad = _first_bad(steps, loss)
    end = f" at step {steps[-1]}" if bad is None else f"; NaN or infinity from step {bad}"
    return f"loss {verb} from {svg.brief(first)} at step {steps[0]} to {svg.brief(last)}{end}"
