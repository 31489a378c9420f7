"""Who feeds whom: a box below the other in order of execution, folded until it is read.

What feeds the next box leads straight down, what feeds a later one along the right side, and what
is fed to a box that was called before along the left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from pytest_modelhealth.rendering.charts import svg
from pytest_modelhealth.rendering.diagram import ELLIPSIS, Arrow, Box, arrows, folded, is_join
from pytest_modelhealth.rendering.notation import plural, shorten

MOST_BOXES, FOLDED_TO = 80, 40  # all are shown; of more, at most about half as many after folding

# pixels: the height of a box, from one to the next, a line of text, the margin
BOX, PITCH, LINE, LEFT = 22, 36, 13, 10

Violations = Sequence[Mapping[str, Any]]
Place = tuple[float, float, float]


def flow(data: Mapping[str, Any], violations: Violations, anchor: str) -> Markup:
    """Return a chart of boxes and arrows; the way through the culprit is lit."""
    edges, way = data["edges"], data["way"]
    names = list(dict.fromkeys([*(name for edge in edges for name in edge[:2]), *way]))
    if not names:
        return svg.nothing("flow", "No flow was recorded.")
    culprit = violations[0]["layer"] if violations else None
    focus = culprit if culprit in names else way[len(way) // 2] if way else culprit
    boxes = folded(names, edges, MOST_BOXES if len(names) <= MOST_BOXES else FOLDED_TO, focus)
    first = {name: at for at, name in enumerate(names)}
    boxes = sorted(boxes, key=lambda box: min(first[leaf] for leaf in box.leaves))
    links = arrows(boxes, edges)
    notes = [*_notes(names, boxes, links, way)]
    notes += [("\u25ad", "alarm", "a check fails there; the culprit is filled")] * bool(violations)
    if not data.get("exact", True):
        notes.append(("", "quiet", "The flow was recorded in part: a way may be missing."))
    body, marks = [], []
    for row, (glyph, class_, text) in enumerate(notes):
        body.append(svg.write(0, 12 + 17 * row, glyph, class_))
        body.append(svg.write(28 * bool(glyph), 12 + 17 * row, text, "quiet"))
    top = len(notes) * 17 + 8 + BOX / 2
    back = max((a.source - a.target for a in links if a.target <= a.source), default=-1)
    left = LEFT + (_reach(back) if back >= 0 else 0)
    right = left + max(26 if is_join(b.name) else len(_text(b)) * svg.LETTER + 18 for b in boxes)
    box_of = {leaf: index for index, box in enumerate(boxes) for leaf in box.leaves}
    lit = {(box_of[a], box_of[b]) for a, b in pairwise(way)}
    edge_of_text = right
    straight: set[tuple[int, int]] = set()
    labelled: list[float] = []
    for arrow in sorted(links, key=lambda arrow: (arrow.source, arrow.target) in lit):
        ends = arrow.source, arrow.target
        is_straight = ends[1] == ends[0] + 1 and ends not in straight
        straight.update([ends] * is_straight)
        is_way = ends in lit and ends[0] != ends[1]
        drawn, mark, (x, y) = _arrow(
            arrow, boxes, (top, left, right), is_straight=is_straight, is_way=is_way
        )
        body.append(drawn)
        marks.append(mark)
        edge_of_text = max(edge_of_text, x)
        if arrow.is_cut and ends[0] != ends[1]:
            while any(abs(y - other) < LINE for other in labelled):
                y += LINE
            labelled.append(y)
            text = shorten(f"no gradient: {', '.join(arrow.operations) or 'cut'}", 40)
            marks.append(svg.write(x + 5, y, text, "operations"))
            edge_of_text = max(edge_of_text, x + 5 + len(text) * 5.8)
    for index, box in enumerate(boxes):
        place_of = left, top + index * PITCH - BOX / 2, right - left
        marks.append(_box(box, place_of, way, violations, anchor))
    width = max(360, edge_of_text + 12, *(42 + len(text) * svg.LETTER * 0.92 for *_, text in notes))
    finding = f"flow of {plural(sum(map(_is_layer, names)), 'layer')}{svg.accused(violations)}"
    size = width, top + len(boxes) * PITCH
    return svg.chart("flow", size, finding, "".join(body), "".join(marks))


def _is_layer(name: str) -> bool:
    return not is_join(name) and not re.match(r"(output|loss)$|(input|target)( |$)", name)


def _text(box: Box) -> str:
    count = f" ({len(box.leaves):,})" * (len(box.leaves) > 1)
    if len(box.ends) > 1:
        return ELLIPSIS.join(svg.fitted(end, 17) for end in box.ends) + count
    return svg.fitted(re.sub(r" #\d+$", "", box.name) or "model", 30) + count


def _notes(
    names: Sequence[str], boxes: Sequence[Box], links: Sequence[Arrow], way: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield what the legend says: a sign, its class, a text."""
    if way:
        yield "\u2501\u2501", "coloured first", "the way from the batch to the end"
    if any(arrow.is_cut for arrow in links):
        yield "\u254c\u254c", "alarm", "values pass, gradients do not"
    if closed := [box for box in boxes if len(box.leaves) > 1]:
        inside = sum(_is_layer(leaf) for box in closed for leaf in box.leaves)
        of = f"{inside:,} of {plural(sum(map(_is_layer, names)), 'layer')}"
        into = "1 box" if len(closed) == 1 else f"{len(closed)} boxes"
        yield "\u25a3", "quiet", f"{of} are folded into {into}"


def _reach(rows: int) -> float:
    """Return how far an arrow past so many boxes goes aside."""
    return min(22.0 + 7 * rows, 150.0)


def _arrow(
    arrow: Arrow, boxes: Sequence[Box], frame: Place, *, is_straight: bool, is_way: bool
) -> tuple[str, str, tuple[float, float]]:
    """Return an arrow, a shape above it that says what it stands for, and where a label stands."""
    top, left, right = frame
    head = 4.5 if is_way else 3.3
    start, end = (top + at * PITCH for at in (arrow.source, arrow.target))
    is_back = arrow.target <= arrow.source
    if is_straight:
        x, label = left + 24, (left + 24, (start + end) / 2 + 4)
        d = f"{svg.line([(x, start + BOX / 2)])}V{svg.plain(end - BOX / 2 - 5)}"
        tip = f"{svg.line([(x, end - BOX / 2)])}l{-head} {-head * 1.7:.1f}h{2 * head}z"
    else:
        x, side = (left, -1) if is_back else (right, 1)
        aside = x + side * _reach(abs(arrow.target - arrow.source))
        label = ((x + 3 * aside) / 4, (start + end) / 2 + 4)
        ends = svg.plain(aside), svg.plain(start + 4), svg.plain(end - 4)
        d = f"M{svg.plain(x)} {ends[1]}C{ends[0]} {ends[1]} {ends[0]} {ends[2]} "
        d += f"{svg.plain(x + side * 6)} {ends[2]}"
        tip = f"M{svg.plain(x)} {ends[2]}l{side * head * 1.7:.1f} {-head}v{2 * head}z"
    source, target = boxes[arrow.source].name, boxes[arrow.target].name
    style = " ".join(["way"] * is_way + ["cut"] * arrow.is_cut) or "plain"
    class_ = f"edge {style}{' back' * (is_back and source != target)}"
    drawn = svg.tag("path", class_=class_, d=d, data_source=source, data_target=target)
    title = [f"{source or 'model'} \N{RIGHTWARDS ARROW} {target or 'model'}"]
    title += [f"by {', '.join(arrow.operations)}"] if arrow.operations else []
    mark = svg.mark("\n".join(title), svg.path(d, "edge-mark"))
    return drawn + svg.path(tip, f"head {style}"), mark, label


def _box(box: Box, place: Place, way: Sequence[str], violations: Violations, anchor: str) -> str:
    """Return a box, with a link to the layer, or to what was findings in it."""
    findings = [v for v in violations if _holds(box, v["layer"])]
    is_culprit = bool(findings) and _holds(box, violations[0]["layer"])
    is_way = not set(box.leaves).isdisjoint(way)
    is_folded = len(box.leaves) > 1
    is_end = not is_folded and not _is_layer(box.name)
    kinds = {
        "box": True, "culprit": is_culprit, "found": bool(findings), "way": is_way,
        "folded": is_folded, "end-box": is_end,
    }  # fmt: skip
    class_ = " ".join(kind for kind, holds in kinds.items() if holds)
    x, y, width = place
    shape = {"x": x, "y": y, "width": width, "height": BOX, "rx": 11 if is_end else 4}
    kind = f"middle{' alarm' * bool(findings)}{' strong' * is_culprit}"
    drawn = svg.tag("rect", **shape, class_=class_, data_name=box.name)
    drawn += svg.write(x + width / 2, y + BOX / 2 + 3.8, _text(box), kind)
    title = box.name or "model"
    title += f"\n{plural(len(box.leaves), 'part')} folded" * is_folded
    layer = box.leaves[0] if len(box.ends) > 1 else box.name
    layer = findings[0]["layer"] if findings and is_folded else layer
    link = None if is_end else svg.link_to(anchor, layer)
    return svg.mark(title, drawn, link)


def _holds(box: Box, layer: str) -> bool:
    """Return whether a box shows a layer, or holds it folded, or is a part of it."""
    if not layer or layer in box.leaves or layer == box.name:
        return box.name == layer or layer in box.leaves
    if len(box.leaves) > 1:
        return len(box.ends) == 1 and layer.startswith(f"{box.name}.")
    return box.name.startswith(f"{layer}.")
