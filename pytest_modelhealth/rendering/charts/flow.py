"""Who feeds whom, from the batch at the top to the loss at the bottom, folded until it is read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from pytest_modelhealth.rendering.charts import svg
from pytest_modelhealth.rendering.layout import Layout, layered
from pytest_modelhealth.rendering.notation import plural, shorten

MOST_BOXES = 80
"""All are shown; of more, about half as many after folding."""

FOLDED_TO = (40, 24, 14)
WIDEST = 1000
"""Pixels, before a graph is folded further."""

BOX, GAP, LINE, PAD = 22, 22, 13, 10
MOST_CHILDREN, NEAR, RANGES = 12, 2, 6
"""Of a container, if all are shown; siblings beside what is looked at; of any other long stack."""

MOST_LABELS = 4
"""Between two rows."""

ELLIPSIS = " \N{HORIZONTAL ELLIPSIS} "


@dataclass
class _Node:
    """A part of a name: `leaf` is the name that ends there."""

    name: str
    leaf: str | None = None
    children: dict[str, _Node] = field(default_factory=dict)

    def leaves(self) -> Iterator[str]:
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if node.leaf is not None:
                yield node.leaf
            waiting += reversed(node.children.values())


@dataclass(frozen=True)
class _Box:
    """What is drawn as one: the leaves that it holds, and its name, that of the ends of a range."""

    ends: tuple[str, ...]
    leaves: tuple[str, ...]

    @property
    def name(self) -> str:
        return ELLIPSIS.join(self.ends)

    @property
    def is_range(self) -> bool:
        return len(self.ends) > 1

    @property
    def text(self) -> str:
        count = f" ({len(self.leaves):,})"
        if self.is_range:
            return ELLIPSIS.join(svg.fitted(end, 17) for end in self.ends) + count
        if _is_join(self.name):
            return svg.fitted(re.sub(r" #\d+$", "", self.name), 30)
        return svg.fitted(self.name or "model", 30) + (count if len(self.leaves) > 1 else "")

    @property
    def width(self) -> float:
        return max(26 if _is_join(self.name) else 48, len(self.text) * svg.LETTER + 18)

    def holds(self, layer: str) -> bool:
        """Return whether it shows a layer, or holds it folded, or is a part of it."""
        if not layer or layer in self.leaves or layer == self.name:
            return self.name == layer or layer in self.leaves
        if len(self.leaves) > 1:
            return not self.is_range and layer.startswith(f"{self.name}.")
        return self.name.startswith(f"{layer}.")


@dataclass
class _Arrow:
    source: int
    target: int
    is_cut: bool
    is_way: bool
    operations: dict[str, None] = field(default_factory=dict)
    count: int = 0

    @property
    def style(self) -> str:
        return f"{'way' * self.is_way} {'cut' * self.is_cut}".strip() or "plain"


def flow(found: Mapping[str, Any], violations: Sequence[Mapping[str, Any]], anchor: str) -> Markup:
    """Return a chart of boxes and arrows; the way through the culprit is lit."""
    edges, way = found["edges"], found["way"]
    names = list(dict.fromkeys([*(name for edge in edges for name in edge[:2]), *way]))
    if not names:
        return svg.nothing("flow", "No flow was recorded.")
    culprit = violations[0]["layer"] if violations else None
    focus = culprit if culprit in names else way[len(way) // 2] if way else culprit
    sizes = [len(names), *FOLDED_TO] if len(names) <= MOST_BOXES else FOLDED_TO
    boxes: list[_Box] = []
    for size in sizes:
        if size == len(names):
            folded = [_Box((name,), (name,)) for name in names]
        else:
            folded = _folded(names, focus, size, _places_of_joins(edges))
        if boxes and len(folded) >= len(boxes):
            continue
        boxes = folded
        arrows = _arrows(boxes, edges, way)
        layout = layered(
            {str(index): box.width for index, box in enumerate(boxes)},
            [(str(arrow.source), str(arrow.target), arrow.style) for arrow in arrows],
            gap=14,
            lane=8,
        )
        if layout.width <= WIDEST:
            break
    picture = _Picture(boxes, arrows, layout, way, violations, anchor)
    return picture.drawn(names, is_exact=found.get("exact", True))


def _is_join(name: str) -> bool:
    """Return whether this is an operation that joins several ways, which is numbered: "+ #45"."""
    return bool(re.search(r" #\d+$", name))


def _is_layer(name: str) -> bool:
    return not _is_join(name) and not re.match(r"(output|loss)$|(input|target)( |$)", name)


# Folding


def _places_of_joins(edges: Sequence[Sequence[Any]]) -> dict[str, str]:
    """Return under which name each operation is folded: with the first layer that feeds it."""
    places: dict[str, str] = {}
    for source, target, *_ in edges:
        if _is_join(target) and target not in places:
            outer = places.get(source, source).rpartition(".")[0]
            places[target] = f"{outer}." * bool(outer) + target.replace(".", " ")
    return places


def _folded(
    names: Sequence[str], focus: str | None, most: int, places: Mapping[str, str]
) -> list[_Box]:
    """Return at most about `most` boxes; what `focus` names and what is near is opened first."""
    root = _Node("")
    for leaf in names:
        node, name = root, places.get(leaf, leaf)
        parts = name.split(".")
        for end, part in enumerate(parts, 1):
            node = node.children.setdefault(part, _Node(""))
            node.name = node.name or ".".join(parts[:end])
        node.leaf = leaf
    looked_at: list[_Node] = []
    node = root
    for part in places.get(focus, focus).split(".") if focus is not None else ():
        if part not in node.children:
            break
        node = node.children[part]
        looked_at.append(node)
    on_path = {id(node) for node in looked_at}
    last = looked_at[-1] if looked_at else None
    groups = _opened([root], on_path)
    while len(groups) <= most:
        at = next(
            (
                at
                for at, group in enumerate(groups)
                if (len(group) > 1 or group[0].children)
                and any(id(item) in on_path for item in group)
            ),
            None,
        )
        if at is None or (len(groups[at]) == 1 and groups[at][0] is last):
            break
        groups[at : at + 1] = _opened(groups[at], on_path)
    waiting = [group for group in groups if group[0] is not last]
    for group in waiting:
        if len(group) == 1 and 0 < len(group[0].children) <= MOST_CHILDREN:
            parts_of_group = _opened(group, on_path)
            if len(groups) + len(parts_of_group) - 1 <= most:
                at = groups.index(group)
                groups[at : at + 1] = parts_of_group
                waiting += parts_of_group
    return [_box(group) for group in groups]


def _opened(group: list[_Node], on_path: set[int]) -> list[list[_Node]]:
    """Return the children of a container, the items of a range, as ranges where they are many."""
    items = group
    while len(items) == 1 and items[0].children:
        own = [_Node(items[0].name, items[0].leaf)] if items[0].leaf is not None else []
        items = [*own, *items[0].children.values()]
    if len(items) <= MOST_CHILDREN:
        return [[item] for item in items]
    at = next((at for at, item in enumerate(items) if id(item) in on_path), None)
    if at is None:
        size = -(-len(items) // RANGES)
        return [items[start : start + size] for start in range(0, len(items), size)]
    start, end = max(0, at - NEAR), at + NEAR + 1
    parts = [items[:start], *([item] for item in items[start:end]), items[end:]]
    return [part for part in parts if part]


def _box(group: list[_Node]) -> _Box:
    ends = [group[0], group[-1]] if len(group) > 1 else group
    spelt = tuple(node.name if node.children else node.leaf or "" for node in ends)
    return _Box(spelt, tuple(leaf for node in group for leaf in node.leaves()))


def _arrows(
    boxes: Sequence[_Box], edges: Sequence[Sequence[Any]], way: Sequence[str]
) -> list[_Arrow]:
    """Return one arrow for all edges from a box to another, apart by whether gradients go back."""
    box_of = {leaf: index for index, box in enumerate(boxes) for leaf in box.leaves}
    lit = {(box_of[a], box_of[b]) for a, b in pairwise(way)}
    arrows: dict[tuple[int, int, bool], _Arrow] = {}
    for source, target, passes, operations in edges:
        a, b = box_of[source], box_of[target]
        if a != b or source == target:
            is_way = a != b and (a, b) in lit
            arrow = arrows.setdefault((a, b, passes), _Arrow(a, b, not passes, is_way))
            arrow.count += 1
            if len(arrow.operations) < 6:
                arrow.operations.update(dict.fromkeys(operations))
    return list(arrows.values())


# Drawing


@dataclass
class _Picture:
    boxes: Sequence[_Box]
    arrows: Sequence[_Arrow]
    layout: Layout
    way: Sequence[str]
    violations: Sequence[Mapping[str, Any]]
    anchor: str

    def drawn(self, names: Sequence[str], *, is_exact: bool) -> Markup:
        notes = self._legend(names, is_exact)
        self._tops, labels, height = self._rows(len(notes) * 17 + 8)
        room = max(svg.WIDTH, self.layout.width + 300)
        middle = max(PAD, (svg.WIDTH - self.layout.width) / 2)
        width = max(
            360,
            self.layout.width + 2 * PAD + 26 * any(a.source == a.target for a in self.arrows),
            *(min(x + middle + len(text) * 5.8 + 12, room) for x, _, text in labels),
            *(sum(42 + len(text) * svg.LETTER * 0.92 for _, text in note) for note in notes),
        )
        self._shift = max(PAD, (min(width, svg.WIDTH) - self.layout.width) / 2)
        offsets = self._offsets()
        order = sorted(range(len(self.arrows)), key=lambda at: self.arrows[at].style != "plain")
        body = [self._note(note, 12 + 17 * at) for at, note in enumerate(notes)]
        marks = []
        for index in order:
            arrow, touched = self._arrow(index, offsets[index])
            body.append(arrow)
            marks.append(touched)
        marks += map(self._box, range(len(self.boxes)))
        for x, y, text in labels:
            is_end = x + self._shift + 6 + len(text) * 5.6 > width
            at = x + self._shift + (-6 if is_end else 6)
            body.append(svg.write(at, y, text, "operations" + " end" * is_end))
        size = (width, height)
        return svg.chart("flow", size, self._finding(names), "".join(body), "".join(marks))

    def _offsets(self) -> list[float]:
        """Return how far aside each arrow leaves and arrives, where several join two boxes."""
        pairs: dict[frozenset[int], list[int]] = defaultdict(list)
        for index, arrow in enumerate(self.arrows):
            pairs[frozenset((arrow.source, arrow.target))].append(index)
        offsets = [0.0] * len(self.arrows)
        for same in pairs.values():
            for at, index in enumerate(same):
                offsets[index] = (at - (len(same) - 1) / 2) * 16
        return offsets

    def _rows(self, head: float) -> tuple[list[float], list[tuple[float, float, str]], float]:
        """Return where each row stands, and what is written of arrows that let no gradient back."""
        cut: dict[int, list[tuple[float, _Arrow]]] = defaultdict(list)
        for arrow, route in zip(self.arrows, self.layout.routes, strict=True):
            if arrow.is_cut and arrow.source != arrow.target:
                cut[route[-2][1]].append(((route[-2][0] + route[-1][0]) / 2, arrow))
        tops, labels, y = [], [], head + BOX / 2 + 4
        for row in range(max(self.layout.row.values(), default=0) + 1):
            tops.append(y)
            written = sorted(cut[row], key=lambda pair: pair[0])
            for number, (x, arrow) in enumerate(written[:MOST_LABELS]):
                text = shorten(f"no gradient: {', '.join(arrow.operations) or 'cut'}", 40)
                if number == MOST_LABELS - 1 < len(written) - 1:
                    text += f", and {len(written) - MOST_LABELS} more"
                labels.append((x, y + BOX / 2 + 15 + number * LINE, text))
            lines = min(len(written), MOST_LABELS)
            y += BOX + GAP + (6 + lines * LINE if lines else 0)
        return tops, labels, y - GAP + 4

    def _arrow(self, index: int, offset: float) -> tuple[str, str]:
        arrow, route = self.arrows[index], self.layout.routes[index]
        is_back = self.layout.is_back[index]
        head = 4.5 if arrow.is_way else 3.3
        if arrow.source == arrow.target:
            x = self._shift + route[0][0] + self.boxes[arrow.source].width / 2
            y = self._tops[route[0][1]]
            d = f"M{svg.plain(x)} {svg.plain(y - 5)}c22 -12 22 22 3 10"
            tip = f"M{svg.plain(x + 1)} {svg.plain(y + 5)}l{head * 1.7:.1f} {-head}v{2 * head}z"
        else:
            places = [[x + self._shift, self._tops[row]] for x, row in route]
            places[0][0] += offset
            places[-1][0] += offset
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
        ends_of = [self.boxes[at].name for at in (arrow.source, arrow.target)]
        drawn = svg.tag(
            "path", class_=f"edge {arrow.style}{' back' * is_back}", d=d,
            data_source=ends_of[0], data_target=ends_of[1],
        )  # fmt: skip
        told = [" \N{RIGHTWARDS ARROW} ".join(end or "model" for end in ends_of)]
        told += [f"by {', '.join(arrow.operations)}"] if arrow.operations else []
        told += [f"{arrow.count} edges"] if arrow.count > 1 else []
        told += ["goes back to a layer that was called before"] if is_back else []
        told += ["no gradient goes back"] if arrow.is_cut else []
        kind = f"head {arrow.style}"
        return drawn + svg.path(tip, kind), svg.mark("\n".join(told), svg.path(d, "edge-mark"))

    def _box(self, index: int) -> str:
        box = self.boxes[index]
        found = [v for v in self.violations if box.holds(v["layer"])]
        is_culprit = bool(found) and box.holds(self.violations[0]["layer"])
        is_way = not set(box.leaves).isdisjoint(self.way)
        is_folded = len(box.leaves) > 1
        is_end = not is_folded and not _is_layer(box.name)
        x = self._shift + self.layout.x[str(index)] - box.width / 2
        y = self._tops[self.layout.row[str(index)]] - BOX / 2
        shape = {"x": x, "y": y, "width": box.width, "height": BOX, "rx": 11 if is_end else 4}
        kinds = {
            "box": True, "culprit": is_culprit, "found": bool(found), "way": is_way,
            "folded": is_folded, "end-box": is_end,
        }  # fmt: skip
        class_ = " ".join(kind for kind, holds in kinds.items() if holds)
        drawn = [svg.tag("rect", **shape, class_=class_, data_name=box.name)]
        if is_folded:
            drawn.insert(0, svg.tag("rect", **{**shape, "x": x + 3, "y": y + 3}, class_="behind"))
        slanted = " slanted" * (is_end and not _is_join(box.name))
        kind = f"middle{' alarm' * bool(found)}{' strong' * is_culprit}{slanted}"
        drawn.append(svg.write(x + box.width / 2, y + BOX / 2 + 3.8, box.text, kind))
        told = [box.name or "model"]
        told += [f"{plural(len(box.leaves), 'part')} folded"] if is_folded else []
        for one in found[:5]:
            told.append(
                f"{svg.label_of(one)}: " * is_folded + (one["message"] or svg.words(one["check"]))
            )
        told += ["on the way from the batch through the culprit to the end"] * is_way
        inside = found[0]["layer"] if found and is_folded else box.name
        link = svg.link_to(self.anchor, box.leaves[0] if box.is_range and not found else inside)
        is_reached = is_culprit or is_way or len(self.boxes) <= FOLDED_TO[0]
        title = "\n".join(told)
        return svg.mark(title, "".join(drawn), None if is_end else link, is_reached=is_reached)

    def _legend(self, names: Sequence[str], is_exact: bool) -> list[list[tuple[str, str]]]:
        through = "from the batch through the culprit" if self.violations else "from the batch"
        first = [("way", f"the way {through} to the end")] if self.way else []
        if any(arrow.is_cut for arrow in self.arrows):
            first.append(("cut", "values pass, gradients do not"))
        notes = [first]
        if any(self.layout.is_back):
            notes.append([("back", "upward: a layer that is called again")])
        folded = [box for box in self.boxes if len(box.leaves) > 1]
        if folded:
            inside = sum(_is_layer(leaf) for box in folded for leaf in box.leaves)
            whole = plural(sum(map(_is_layer, names)), "layer")
            into = "1 box" if len(folded) == 1 else f"{len(folded)} boxes"
            notes.append([("folded", f"{inside:,} of {whole} are folded into {into}")])
        if not is_exact:
            notes.append([("", "The flow was recorded in part: a way may be missing.")])
        return [note for note in notes if note]

    def _note(self, note: Sequence[tuple[str, str]], y: float) -> str:
        x, parts = 0.0, []
        for kind, text in note:
            if kind in ("way", "cut"):
                parts.append(svg.path(f"M{svg.plain(x)} {y - 4}h22", f"{kind}-key"))
            elif kind == "back":
                parts.append(svg.path(f"M{svg.plain(x + 11)} {y - 9}l-3.3 5.6h6.6z", "head"))
            elif kind == "folded":
                shape = {"width": 19, "height": 8, "rx": 2}
                parts.append(svg.tag("rect", x=x + 3, y=y - 7, **shape, class_="behind"))
                parts.append(svg.tag("rect", x=x, y=y - 10, **shape, class_="box-key"))
            parts.append(svg.write(x + 28 * bool(kind), y, text, "quiet"))
            x += 42 + len(text) * svg.LETTER * 0.92
        return "".join(parts)

    def _finding(self, names: Sequence[str]) -> str:
        said = [f"flow of {plural(sum(map(_is_layer, names)), 'layer')}"]
        culprit = svg.label_of(self.violations[0]) if self.violations else ""
        if self.way:
            through = f"through {culprit} " if culprit else ""
            said.append(f"from {self.way[0]} {through}to {self.way[-1]}")
        if culprit:
            said.append(f"culprit {culprit}: {svg.words(self.violations[0]['check'])}")
        cut = sum(arrow.is_cut for arrow in self.arrows)
        said += [f"no gradient goes back along {plural(cut, 'edge')}"] if cut else []
        return "; ".join(said)
