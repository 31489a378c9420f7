"""Who feeds whom, from the batch at the top to the loss at the bottom, folded until it is read."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from pytest_modelhealth.rendering.charts import svg
from pytest_modelhealth.rendering.diagram import (
    ELLIPSIS,
    Arrow,
    Box,
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


def flow(found: Mapping[str, Any], violations: Sequence[Mapping[str, Any]], anchor: str) -> Markup:
    """Return a chart of boxes and arrows; the way through the culprit is lit."""
    edges, way = found["edges"], found["way"]
    names = list(dict.fromkeys([*(name for edge in edges for name in edge[:2]), *way]))
    if not names:
        return svg.nothing("flow", "No flow was recorded.")
    culprit = violations[0]["layer"] if violations else None
    focus = culprit if culprit in names else way[len(way) // 2] if way else culprit
    for size in (MOST_BOXES, *FOLDED_TO) if len(names) <= MOST_BOXES else FOLDED_TO:
        boxes = folded(names, edges, size, focus=focus)
        picture = _Picture(boxes, arrows(boxes, edges), way, violations, anchor)
        if picture.layout.width <= WIDEST:
            break
    return picture.drawn(names, is_exact=found.get("exact", True))


def _is_layer(name: str) -> bool:
    return not is_join(name) and not re.match(r"(output|loss)$|(input|target)( |$)", name)


def _text(box: Box) -> str:
    count = f" ({len(box.leaves):,})" * (len(box.leaves) > 1)
    if box.is_range:
        return ELLIPSIS.join(svg.fitted(end, 17) for end in box.ends) + count
    return svg.fitted(re.sub(r" #\d+$", "", box.name) or "model", 30) + count


def _width(box: Box) -> float:
    return max(26 if is_join(box.name) else 48, len(_text(box)) * svg.LETTER + 18)


def _holds(box: Box, layer: str) -> bool:
    """Return whether a box shows a layer, or holds it folded, or is a part of it."""
    if not layer or layer in box.leaves or layer == box.name:
        return box.name == layer or layer in box.leaves
    if len(box.leaves) > 1:
        return not box.is_range and layer.startswith(f"{box.name}.")
    return box.name.startswith(f"{layer}.")


@dataclass
class _Picture:
    boxes: Sequence[Box]
    arrows: Sequence[Arrow]
    way: Sequence[str]
    violations: Sequence[Mapping[str, Any]]
    anchor: str

    def __post_init__(self) -> None:
        box_of = {leaf: index for index, box in enumerate(self.boxes) for leaf in box.leaves}
        lit = {(box_of[a], box_of[b]) for a, b in pairwise(self.way)}
        self.styles = [
            f"{'way' * (a.source != a.target and (a.source, a.target) in lit)} {'cut' * a.is_cut}"
            .strip() or "plain"
            for a in self.arrows
        ]  # fmt: skip
        ends = [(str(arrow.source), str(arrow.target)) for arrow in self.arrows]
        self.layout: Layout = layered(
            {str(index): _width(box) for index, box in enumerate(self.boxes)},
            [(*pair, style) for pair, style in zip(ends, self.styles, strict=True)],
            gap=14,
            lane=8,
        )

    def drawn(self, names: Sequence[str], *, is_exact: bool) -> Markup:
        notes = list(self._notes(names, is_exact))
        self._tops, labels, height = self._rows(len(notes) * 17 + 8)
        room = max(svg.WIDTH, self.layout.width + 300)
        middle = max(PAD, (svg.WIDTH - self.layout.width) / 2)
        width = max(
            360,
            self.layout.width + 2 * PAD + 26 * any(a.source == a.target for a in self.arrows),
            *(min(x + middle + len(text) * 5.8 + 12, room) for x, _, text in labels),
            *(42 + len(text) * svg.LETTER * 0.92 for _, _, text in notes),
        )
        self._shift = max(PAD, (min(width, svg.WIDTH) - self.layout.width) / 2)
        self._pairs = Counter(frozenset((a.source, a.target)) for a in self.arrows)
        body, marks = [], []
        for row, (glyph, class_, text) in enumerate(notes):
            body.append(svg.write(0, 12 + 17 * row, glyph, class_))
            body.append(svg.write(28 * bool(glyph), 12 + 17 * row, text, "quiet"))
        for index in sorted(range(len(self.arrows)), key=lambda at: self.styles[at] != "plain"):
            arrow, touched = self._arrow(index)
            body.append(arrow)
            marks.append(touched)
        marks += map(self._box, range(len(self.boxes)))
        for x, y, text in labels:
            is_end = x + self._shift + 6 + len(text) * 5.6 > width
            at = x + self._shift + (-6 if is_end else 6)
            body.append(svg.write(at, y, text, "operations" + " end" * is_end))
        size = (width, height)
        return svg.chart("flow", size, self._finding(names), "".join(body), "".join(marks))

    def _rows(self, head: float) -> tuple[list[float], list[tuple[float, float, str]], float]:
        """Return where each row stands, and what is written of arrows that let no gradient back."""
        cut: dict[int, list[tuple[float, str]]] = defaultdict(list)
        for arrow, route in zip(self.arrows, self.layout.routes, strict=True):
            if arrow.is_cut and arrow.source != arrow.target:
                text = shorten(f"no gradient: {', '.join(arrow.operations) or 'cut'}", 40)
                cut[route[-2][1]].append(((route[-2][0] + route[-1][0]) / 2, text))
        tops, labels, y = [], [], head + BOX / 2 + 4
        for row in range(max(self.layout.row.values(), default=0) + 1):
            tops.append(y)
            first, rest = sorted(cut[row])[:MOST_LABELS], len(cut[row]) - MOST_LABELS
            for number, (x, text) in enumerate(first):
                more = f", and {rest} more" if number == MOST_LABELS - 1 and rest > 0 else ""
                labels.append((x, y + BOX / 2 + 15 + number * LINE, text + more))
            y += BOX + GAP + (6 + len(first) * LINE if first else 0)
        return tops, labels, y - GAP + 4

    def _arrow(self, index: int) -> tuple[str, str]:
        arrow, style = self.arrows[index], self.styles[index]
        route, is_back = self.layout.routes[index], self.layout.is_back[index]
        head = 4.5 if "way" in style else 3.3
        if arrow.source == arrow.target:
            x = self._shift + route[0][0] + _width(self.boxes[arrow.source]) / 2
            y = self._tops[route[0][1]]
            d = f"M{svg.plain(x)} {svg.plain(y - 5)}c22 -12 22 22 3 10"
            tip = f"M{svg.plain(x + 1)} {svg.plain(y + 5)}l{head * 1.7:.1f} {-head}v{2 * head}z"
        else:
            places = [[x + self._shift, self._tops[row]] for x, row in route]
            if self._pairs[frozenset((arrow.source, arrow.target))] > 1:  # beside each other
                aside = 8 if is_back else -8 + 16 * arrow.is_cut
                places[0][0] += aside
                places[-1][0] += aside
            places[0][1] += BOX / 2 + 5 * is_back
            places[-1][1] -= BOX / 2 + 5 * (not is_back)
            d = f"M{svg.plain(places[0][0])} {svg.plain(places[0][1])}"
            for at, ((x0, y0), (x1, y1)) in enumerate(pairwise(places)):
                start = y0 + BOX / 2 if at else y0  # between rows: straight past the boxes
                end = y1 - BOX / 2 if at < len(places) - 2 else y1
                middle = svg.plain((start + end) / 2)
                d += f"V{svg.plain(start)}" if at else ""
                ends = f"{svg.plain(x1)} {middle} {svg.plain(x1)} {svg.plain(end)}"
                d += f"C{svg.plain(x0)} {middle} {ends}" if x0 != x1 else f"V{svg.plain(end)}"
            x, y = places[0] if is_back else places[-1]
            y, rise = (y - 5, 1) if is_back else (y + 5, -1)
            tip = f"M{svg.plain(x)} {svg.plain(y)}l{-head} {rise * head * 1.7:.1f}h{2 * head}z"
        source, target = (self.boxes[at].name for at in (arrow.source, arrow.target))
        class_ = f"edge {style}{' back' * is_back}"
        drawn = svg.tag("path", class_=class_, d=d, data_source=source, data_target=target)
        told = [f"{source or 'model'} \N{RIGHTWARDS ARROW} {target or 'model'}"]
        told += [f"by {', '.join(arrow.operations)}"] if arrow.operations else []
        told += [f"{arrow.count} edges"] if arrow.count > 1 else []
        told += ["goes back to a layer that was called before"] if is_back else []
        told += ["no gradient goes back"] if arrow.is_cut else []
        mark = svg.mark("\n".join(told), svg.path(d, "edge-mark"))
        return drawn + svg.path(tip, f"head {style}"), mark

    def _box(self, index: int) -> str:
        box = self.boxes[index]
        found = [v for v in self.violations if _holds(box, v["layer"])]
        is_culprit = bool(found) and _holds(box, self.violations[0]["layer"])
        is_way = not set(box.leaves).isdisjoint(self.way)
        is_folded = len(box.leaves) > 1
        is_end = not is_folded and not _is_layer(box.name)
        width = _width(box)
        x = self._shift + self.layout.x[str(index)] - width / 2
        y = self._tops[self.layout.row[str(index)]] - BOX / 2
        shape = {"x": x, "y": y, "width": width, "height": BOX, "rx": 11 if is_end else 4}
        kinds = {
            "box": True, "culprit": is_culprit, "found": bool(found), "way": is_way,
            "folded": is_folded, "end-box": is_end,
        }  # fmt: skip
        class_ = " ".join(kind for kind, holds in kinds.items() if holds)
        behind = svg.tag("rect", **{**shape, "x": x + 3, "y": y + 3}, class_="behind") * is_folded
        slanted = " slanted" * (is_end and not is_join(box.name))
        kind = f"middle{' alarm' * bool(found)}{' strong' * is_culprit}{slanted}"
        drawn = (
            behind
            + svg.tag("rect", **shape, class_=class_, data_name=box.name)
            + svg.write(x + width / 2, y + BOX / 2 + 3.8, _text(box), kind)
        )
        told = [box.name or "model"]
        told += [f"{plural(len(box.leaves), 'part')} folded"] if is_folded else []
        for one in found[:5]:
            who = f"{svg.label_of(one)}: " * is_folded
            told.append(who + (one["message"] or svg.words(one["check"])))
        told += ["on the way from the batch through the culprit to the end"] * is_way
        inside = found[0]["layer"] if found and is_folded else box.name
        link = svg.link_to(self.anchor, box.leaves[0] if box.is_range and not found else inside)
        is_reached = is_culprit or is_way or len(self.boxes) <= FOLDED_TO[0]
        return svg.mark("\n".join(told), drawn, None if is_end else link, is_reached=is_reached)

    def _notes(self, names: Sequence[str], is_exact: bool) -> Iterator[tuple[str, str, str]]:
        """Yield what the legend says: a sign, its class, a text."""
        if self.way:
            through = "from the batch through the culprit" if self.violations else "from the batch"
            yield "\u2501\u2501", "coloured first", f"the way {through} to the end"
        if any(arrow.is_cut for arrow in self.arrows):
            yield "\u254c\u254c", "alarm", "values pass, gradients do not"
        if any(self.layout.is_back):
            yield "\u25b2", "quiet", "upward: a layer that is called again"
        if held := [box for box in self.boxes if len(box.leaves) > 1]:
            inside = sum(_is_layer(leaf) for box in held for leaf in box.leaves)
            whole = plural(sum(map(_is_layer, names)), "layer")
            into = "1 box" if len(held) == 1 else f"{len(held)} boxes"
            yield "\u25a3", "quiet", f"{inside:,} of {whole} are folded into {into}"
        if not is_exact:
            yield "", "quiet", "The flow was recorded in part: a way may be missing."

    def _finding(self, names: Sequence[str]) -> str:
        said = [f"flow of {plural(sum(map(_is_layer, names)), 'layer')}"]
        said += [f"from {self.way[0]} to {self.way[-1]}"] if self.way else []
        if self.violations:
            worst = self.violations[0]
            said.append(f"culprit {svg.label_of(worst)}: {svg.words(worst['check'])}")
        cut = sum(arrow.is_cut for arrow in self.arrows)
        said += [f"no gradient goes back along {plural(cut, 'edge')}"] if cut else []
        return "; ".join(said)
