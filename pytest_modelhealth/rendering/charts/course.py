"""A training over steps: the loss, and where something went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from markupsafe import Markup

from pytest_modelhealth.rendering.charts import svg
from pytest_modelhealth.rendering.charts.rows import NAMES
from pytest_modelhealth.rendering.notation import plural

_LOSS, _TOP = 180, 50  # Pixels: the height of the loss, and what stands above it
_LEFT, _RIGHT = NAMES, svg.WIDTH - 8

_LOG_FROM = 30  # times the least: positive losses that differ by more have a log axis


def course(data: Mapping[str, Any], events: Sequence[int] = ()) -> Markup:
    """Return the loss of a training over steps.

    Args:
        data: steps and losses, as in the file of a run.
        events: steps at which something went wrong: a line at each, with a number above.
    """
    steps = data["steps"]
    if not steps:
        return svg.nothing("course", "No step was recorded.")
    half = (steps[-1] - steps[0]) / len(steps) / 2 or 0.5
    across = svg.linear_scale((steps[0] - half, steps[-1] + half), _LEFT, _RIGHT, 8)
    body = _loss(steps, data["loss"], across, _TOP)
    body += "".join(_events(events, across, _TOP, _TOP + _LOSS))
    finding = f"loss of {plural(len(steps), 'step')}"
    return svg.chart("course", (svg.WIDTH, _TOP + _LOSS + 26), finding, body)


def _events(steps: Sequence[int], across: svg.Scale, top: float, bottom: float) -> Iterator[str]:
    """Yield a line for each, and their numbers; those nearer than a number is wide share one."""
    groups: list[list[int]] = []
    for number, step in enumerate(steps, start=1):
        x = across.at(step)
        yield svg.path(f"M{svg.plain(x)} {svg.plain(top)}V{svg.plain(bottom)}", "event")
        if groups and x - across.at(steps[groups[-1][0] - 1]) <= 14:
            groups[-1].append(number)
        else:
            groups.append([number])
    for group in groups:
        text = "-".join(str(number) for number in dict.fromkeys((group[0], group[-1])))
        x = across.at(steps[group[0] - 1])
        yield svg.write(x, top - 28, text, "alarm strong small middle")


def _ticks(across: svg.Scale, bottom: float) -> Iterator[str]:
    """Yield the numbers of steps below a panel."""
    for x, text in across.ticks:
        if "." not in text and x <= _RIGHT - 40:
            yield svg.path(f"M{svg.plain(x)} {svg.plain(bottom)}v3", "axis-line")
            yield svg.write(x, bottom + 14, text, "quiet small middle")


def _loss(steps: Sequence[int], loss: Sequence[float | None], across: svg.Scale, top: float) -> str:
    """Return the line of the loss, which breaks where there is no number, and its axes."""
    bottom = top + _LOSS
    known = [value for value in loss if value is not None]
    is_log = min(known, default=0) > 0 and max(known) > _LOG_FROM * min(known)
    scale = (svg.log_scale if is_log else svg.linear_scale)(known, bottom - 3, top + 3, 4)
    parts = [svg.path(f"M{_LEFT} {bottom}H{_RIGHT}", "axis-line"), *_ticks(across, bottom)]
    parts.append(svg.write(_RIGHT, bottom + 14, "step", "quiet small end"))
    for y, text in scale.ticks:
        parts.append(svg.path(f"M{_LEFT} {svg.plain(y)}H{_RIGHT}", "rule"))
        parts.append(svg.write(_LEFT - 5, y + 3.5, text, "quiet small end"))
    d = ""
    for is_known, run in groupby(zip(steps, loss, strict=True), lambda pair: pair[1] is not None):
        if is_known:
            points = [(across.at(step), scale.at(value or 0.0)) for step, value in run]
            d += svg.line(points) + "h.1" * (len(points) == 1)
    parts.append(svg.path(d, "line first"))
    bad = next((s for s, value in zip(steps, loss, strict=True) if value is None), None)
    if not known:
        why = "no finite loss was given to step_end()"
        parts.append(svg.write(_LEFT + 8, top + 40, why, "quiet"))
    elif bad is not None:
        x = across.at(bad)
        class_, aside = ("alarm end", -8) if x > svg.WIDTH - 160 else ("alarm", 8)
        parts.append(svg.cross(x, top + 5))
        parts.append(svg.write(x + aside, top + 9, f"NaN or inf from step {bad}", class_))
    title = svg.write(0, top - 12, "loss", "strong")
    return title + svg.tag("g", *parts, class_="panel loss")
