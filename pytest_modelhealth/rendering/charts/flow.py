"""Who feeds whom, from the batch at the top to the loss at the bottom, folded until it is read."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from markupsafe import Markup

from pytest_modelhealth.rendering.charts import svg
from pytest_modelhealth.rendering.diagram import (
    ELLIPSIS,
    Arrow,
    Box,
    Edge,
    arrows,
    folded,
    is_join,
)
from pytest_modelhealth.rendering.layout import Layout, layered
from pytest_modelhealth.rendering.notation import plural, shorten

MOST_BOXES = 80
"""All are shown; of more, about half as many after folding."""

FOLDED_TO = (40, 24, 14)
WIDEST = 1000
"""Pixels, before a graph is folded further."""

BOX, GAP, LINE, PAD = 22, 22, 13, 10

MOST_LABELS = 4
"""Between two rows."""

Violations = Sequence[Mapping[str, Any]]


def flow(found: Mapping[str, Any], violations: Violations, anchor: str) -> Markup:
    """Return a chart of boxes and arrows; the way through the culprit is lit."""
    edges, way = found["edges"], found["way"]
    names = list(dict.fromkeys([*(name for edge in edges for name in edge[:2]), *way]))
    if not names:
        return svg.nothing("flow", "No flow was recorded.")
    culprit = violations[0]["layer"] if violations else None
    focus = culprit if culprit in names else way[len(way) // 2] if way else culprit
    for size in (MOST_BOXES, *FOLDED_TO) if len(names) <= MOST_BOXES else FOLDED_TO:
        picture = _pictured(folded(names, edges, size, focus), edges, way)
        if picture.layout.width <= WIDEST:
            break
    notes = _notes(names, picture, way)
    if not found.get("exact", True):
        notes.append(("", "quiet", "The flow was recorded in part: a way may be missing."))
    finding = _finding(names, picture, way, violations)
    return _drawn(picture, notes, way, violations, anchor, finding)


class _Picture(NamedTuple):
    """What is drawn, and where it stands; widths are of the boxes, styles of the arrows."""

    boxes: Sequence[Box]
    arrows: Sequence[Arrow]
    styles: Sequence[str]
    widths: Mapping[int, float]
    layout: Layout


def _pictured(boxes: Sequence[Box], edges: Sequence[Edge], way: Sequence[str]) -> _Picture:
    joined = arrows(boxes, edges)
    box_of = {leaf: index for index, box in enumerate(boxes) for leaf in box.leaves}
    lit = {(box_of[a], box_of[b]) for a, b in pairwise(way)}
    styles = [
        f"{'way' * ((a.source, a.target) in lit and a.source != a.target)} {'cut' * a.is_cut}"
        .strip() or "plain"
        for a in joined
    ]  # fmt: skip
    widths = {index: _width(box) for index, box in enumerate(boxes)}
    ends = [(a.source, a.target, style) for a, style in zip(joined, styles, strict=True)]
    return _Picture(boxes, joined, styles, widths, layered(widths, ends))


def _drawn(
    picture: _Picture,
    notes: Sequence[tuple[str, str, str]],
    way: Sequence[str],
    violations: Violations,
    anchor: str,
    finding: str,
) -> Markup:
    boxes, joined, styles, widths, layout = picture
    tops, labels, height = _rows(joined, layout, len(notes) * 17 + 8)
    width = max(360, layout.width + 2 * PAD + 26 * any(a.source == a.target for a in joined))
    width = max([width, *(42 + len(text) * svg.LETTER * 0.92 for *_, text in notes)])
    shift = max(PAD, (min(width, svg.WIDTH) - layout.width) / 2)
    room = max(svg.WIDTH, layout.width + 300)
    width = max([width, *(min(x + shift + len(text) * 5.8 + 12, room) for x, _, text in labels)])
    body, marks = [], []
    for row, (glyph, class_, text) in enumerate(notes):
        body.append(svg.write(0, 12 + 17 * row, glyph, class_))
        body.append(svg.write(28 * bool(glyph), 12 + 17 * row, text, "quiet"))
    pairs = Counter(frozenset((a.source, a.target)) for a in joined)
    for index in sorted(range(len(joined)), key=lambda at: styles[at] != "plain"):
        arrow, is_back = joined[index], layout.is_back[index]
        places = [(x + shift, tops[row]) for x, row in layout.routes[index]]
        aside = 0
        if pairs[frozenset((arrow.source, arrow.target))] > 1:  # beside each other
            aside = 8 if is_back else -8 + 16 * arrow.is_cut
        half = widths[arrow.source] / 2
        drawn, touched = _arrow(arrow, boxes, styles[index], places, aside, half, is_back=is_back)
        body.append(drawn)
        marks.append(touched)
    for index, box in enumerate(boxes):
        x, y = shift + layout.x[index] - widths[index] / 2, tops[layout.row[index]] - BOX / 2
        is_few = len(boxes) <= FOLDED_TO[0]
        marks.append(_box(box, x, y, way, violations, anchor, is_few=is_few))
    for x, y, text in labels:
        is_end = x + shift + 6 + len(text) * 5.6 > width
        at = x + shift + (-6 if is_end else 6)
        body.append(svg.write(at, y, text, "operations" + " end" * is_end))
    return svg.chart("flow", (width, height), finding, "".join(body), "".join(marks))


def _finding(
    names: Sequence[str], picture: _Picture, way: Sequence[str], violations: Violations
) -> str:
    said = [f"flow of {plural(sum(map(_is_layer, names)), 'layer')}"]
    said += [f"from {way[0]} to {way[-1]}"] if way else []
    if violations:
        said.append(f"culprit {svg.label_of(violations[0])}: {svg.words(violations[0]['check'])}")
    cut = sum(arrow.is_cut for arrow in picture.arrows)
    said += [f"no gradient goes back along {plural(cut, 'edge')}"] if cut else []
    return "; ".join(said)


def _is_layer(name: str) -> bool:
    return not is_join(name) and not re.match(r"(output|loss)$|(input|target)( |$)", name)


def _text(box: Box) -> str:
    count = f" ({len(box.leaves):,})" * (len(box.leaves) > 1)
    if len(box.ends) > 1:
        return ELLIPSIS.join(svg.fitted(end, 17) for end in box.ends) + count
    return svg.fitted(re.sub(r" #\d+$", "", box.name) or "model", 30) + count


def _width(box: Box) -> float:
    return max(26 if is_join(box.name) else 48, len(_text(box)) * svg.LETTER + 18)


def _notes(
    names: Sequence[str], picture: _Picture, way: Sequence[str]
) -> list[tuple[str, str, str]]:
    """Return what the legend says: a sign, its class, a text."""
    notes = []
    if way:
        notes.append(("\u2501\u2501", "coloured first", "the way from the batch to the end"))
    if any(arrow.is_cut for arrow in picture.arrows):
        notes.append(("\u254c\u254c", "alarm", "values pass, gradients do not"))
    if any(picture.layout.is_back):
        notes.append(("\u25b2", "quiet", "upward: a layer that is called again"))
    if closed := [box for box in picture.boxes if len(box.leaves) > 1]:
        inside = sum(_is_layer(leaf) for box in closed for leaf in box.leaves)
        of = f"{inside:,} of {plural(sum(map(_is_layer, names)), 'layer')}"
        into = "1 box" if len(closed) == 1 else f"{len(closed)} boxes"
        notes.append(("\u25a3", "quiet", f"{of} are folded into {into}"))
    return notes


def _rows(
    joined: Sequence[Arrow], layout: Layout, head: float
) -> tuple[list[float], list[tuple[float, float, str]], float]:
    """Return where each row stands, and what is written of arrows that let no gradient back."""
    cut: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for arrow, route in zip(joined, layout.routes, strict=True):
        if arrow.is_cut and arrow.source != arrow.target:
            text = shorten(f"no gradient: {', '.join(arrow.operations) or 'cut'}", 40)
            cut[route[-2][1]].append(((route[-2][0] + route[-1][0]) / 2, text))
    tops, labels, y = [], [], head + BOX / 2 + 4
    for row in range(max(layout.row.values(), default=0) + 1):
        tops.append(y)
        first, rest = sorted(cut[row])[:MOST_LABELS], len(cut[row]) - MOST_LABELS
        for number, (x, text) in enumerate(first):
            more = f", and {rest} more" if number == MOST_LABELS - 1 and rest > 0 else ""
            labels.append((x, y + BOX / 2 + 15 + number * LINE, text + more))
        y += BOX + GAP + (6 + len(first) * LINE if first else 0)
    return tops, labels, y - GAP + 4


def _arrow(
    arrow: Arrow,
    boxes: Sequence[Box],
    style: str,
    places: list[tuple[float, float]],
    aside: float,
    half: float,
    *,
    is_back: bool,
) -> tuple[str, str]:
    """Return an arrow through these places, and a shape above it with what it stands for."""
    head = 4.5 if "way" in style else 3.3
    (x0, y0), (x1, y1) = places[0], places[-1]
    if arrow.source == arrow.target:
        d = f"M{svg.plain(x0 + half)} {svg.plain(y0 - 5)}c22 -12 22 22 3 10"
        tip = (
            f"M{svg.plain(x0 + half + 1)} {svg.plain(y0 + 5)}l{head * 1.7:.1f} {-head}v{2 * head}z"
        )
    else:
        first = x0 + aside, y0 + BOX / 2 + 5 * is_back
        last = x1 + aside, y1 - BOX / 2 - 5 * (not is_back)
        d = svg.line([first])
        for at, ((x0, y0), (x1, y1)) in enumerate(pairwise([first, *places[1:-1], last])):
            start = y0 + BOX / 2 if at else y0  # between rows: straight past the boxes
            end = y1 - BOX / 2 if at < len(places) - 2 else y1
            middle = svg.plain((start + end) / 2)
            d += f"V{svg.plain(start)}" if at else ""
            ends = f"{svg.plain(x1)} {middle} {svg.plain(x1)} {svg.plain(end)}"
            d += f"C{svg.plain(x0)} {middle} {ends}" if x0 != x1 else f"V{svg.plain(end)}"
        x, y, rise = (*first, 1) if is_back else (*last, -1)
        tip = f"{svg.line([(x, y - 5 * rise)])}l{-head} {rise * head * 1.7:.1f}h{2 * head}z"
    source, target = boxes[arrow.source].name, boxes[arrow.target].name
    class_ = f"edge {style}{' back' * is_back}"
    drawn = svg.tag("path", class_=class_, d=d, data_source=source, data_target=target)
    told = [f"{source or 'model'} \N{RIGHTWARDS ARROW} {target or 'model'}"]
    told += [f"by {', '.join(arrow.operations)}"] if arrow.operations else []
    told += [f"{arrow.count} edges"] if arrow.count > 1 else []
    told += ["no gradient goes back"] if arrow.is_cut else []
    mark = svg.mark("\n".join(told), svg.path(d, "edge-mark"))
    return drawn + svg.path(tip, f"head {style}"), mark


def _box(
    box: Box,
    x: float,
    y: float,
    way: Sequence[str],
    violations: Violations,
    anchor: str,
    *,
    is_few: bool,
) -> str:
    """Return a box, with a link to the layer, or to what was found in it."""
    found = [v for v in violations if _holds(box, v["layer"])]
    is_culprit = bool(found) and _holds(box, violations[0]["layer"])
    is_way = not set(box.leaves).isdisjoint(way)
    is_folded = len(box.leaves) > 1
    is_end = not is_folded and not _is_layer(box.name)
    width = _width(box)
    kinds = {
        "box": True, "culprit": is_culprit, "found": bool(found), "way": is_way,
        "folded": is_folded, "end-box": is_end,
    }  # fmt: skip
    class_ = " ".join(kind for kind, holds in kinds.items() if holds)
    shape = {"x": x, "y": y, "width": width, "height": BOX, "rx": 11 if is_end else 4}
    kind = f"middle{' alarm' * bool(found)}{' strong' * is_culprit}"
    drawn = svg.tag("rect", **shape, class_=class_, data_name=box.name)
    drawn += svg.write(x + width / 2, y + BOX / 2 + 3.8, _text(box), kind)
    told = [box.name or "model"]
    told += [f"{plural(len(box.leaves), 'part')} folded"] if is_folded else []
    told += [f"{svg.label_of(v)}: {v['message'] or svg.words(v['check'])}" for v in found[:5]]
    told += ["on the way from the batch through the culprit to the end"] * is_way
    layer = box.leaves[0] if len(box.ends) > 1 else box.name
    layer = found[0]["layer"] if found and is_folded else layer
    link = None if is_end else svg.link_to(anchor, layer)
    return svg.mark("\n".join(told), drawn, link, is_reached=is_few or is_culprit or is_way)


def _holds(box: Box, layer: str) -> bool:
    """Return whether a box shows a layer, or holds it folded, or is a part of it."""
    if not layer or layer in box.leaves or layer == box.name:
        return box.name == layer or layer in box.leaves
    if len(box.leaves) > 1:
        return len(box.ends) == 1 and layer.startswith(f"{box.name}.")
    return box.name.startswith(f"{layer}.")
