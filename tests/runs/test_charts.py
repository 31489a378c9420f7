"""The charts of the page, read again from their SVG."""

from __future__ import annotations

import itertools
import json
import math
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from graphlib import TopologicalSorter
from typing import Any

import pytest

from pytest_modelhealth.rendering.charts.course import course
from pytest_modelhealth.rendering.charts.flow import flow
from pytest_modelhealth.rendering.charts.rows import depth, errors
from pytest_modelhealth.rendering.charts.svg import link_to
from pytest_modelhealth.rendering.charts.values import histograms
from pytest_modelhealth.runs.page.panels import drawn as drawn_of
from tests.runs.charted import (
    HOSTILE,
    RECURRENT,
    SUMS,
    SVG,
    TOWERS,
    Edge,
    boxes_of,
    chain,
    comparison,
    finding,
    flow_of,
    hostile,
    layer,
    numbers,
    of_class,
    pair,
    reader,
    resnet,
    tensor,
    texts,
    titles,
    unet,
    violation,
    way_through,
)
from tests.runs.difference import made
from tests.runs.made_runs import inspection

DRAWN: dict[str, Callable[..., str]] = {
    "histograms": lambda tensor: histograms([(tensor["role"], tensor)], row=80),
    "depth": lambda layers, violations: depth(layers, violations, "t0-0"),
    "flow": lambda found, violations: flow(found, violations, "t0-0"),
    "errors": lambda found: errors(found, "t0-0"),
    "course": lambda found: course(found, "t0-0"),
}


def draw(chart: str, *data: Any) -> ET.Element:
    """A chart of the data, as the tree of its SVG."""
    drawn = str(DRAWN[chart](*json.loads(json.dumps(data))))
    return ET.fromstring(drawn.replace("<svg ", f'<svg xmlns="{SVG[1:-1]}" ', 1))


def panel(result: dict[str, Any], title: str) -> ET.Element:
    """A panel of a result's, as the tree of its HTML."""
    (found,) = re.findall(
        f'<section class="panel">(?:(?!<section).)*<h3>{title}.*?</section>',
        drawn_of(inspection([""]) | result, "t0-0")[1],
        re.DOTALL,
    )
    return ET.fromstring(found.replace("<details open", "<details").replace("&nbsp;", " "))


# Histograms


def test_histograms() -> None:
    """A bar a filled bin, from the least to the greatest value, as high as its count says."""
    bins = {"lowest": -3, "negative": [0, 4, 8, 0], "positive": [2, 0, 16, 1], "sampled": False}
    data = tensor("activations", zeros=7, nan=2, inf=1, dead=0.31, bins=bins, count=41)
    svg = draw("histograms", data)
    drawn = sorted((*numbers(bar, "x", "height"),) for bar in of_class(svg, "bin"))
    counts = [8, 4, 2, 16, 1]
    assert len(drawn) == len(counts)
    unit = drawn[3][1] / 16
    for (_, height), count in zip(drawn, counts, strict=True):
        assert height == pytest.approx(max(unit * count, 1.5), abs=0.06)
    (zeros,) = of_class(svg, "zeros")
    assert drawn[1][0] < float(zeros.get("x", "")) < drawn[2][0]
    assert "2 NaN, 1 inf" in texts(svg)
    assert "31% dead" in "".join(texts(svg))
    # the axes have a unit and the height of the highest bar, 16 of 41; the colours a legend
    assert {"value", "39%", "\u25a0 zeros"} <= {*texts(svg)}
    assert any(text.startswith("\u25a0 part of the values between") for text in texts(svg))
    side = [1] * 2098  # all of float64: bins share bars
    bins = {"lowest": -1074, "negative": side, "positive": side, "sampled": True}
    svg = draw("histograms", tensor("activations", bins=bins, count=4196))
    assert 20 < len(of_class(svg, "bin")) < 200


# Depth


def places(svg: ET.Element, key: str) -> list[float]:
    """Where the points of a series stand along x: circles, or diamonds begun at their middle."""
    (series,) = of_class(svg, "series", key)
    return [
        float(point.get("cx") or re.findall(r"M([\d.]+)", point.get("d", ""))[0])
        for point in of_class(series, "point")
    ]


def test_depth_can_be_read_off_its_axes() -> None:
    """Each point stands where its axis has the rms or norm computed here."""
    norms = [10.0 ** (-i / 3) for i in range(12)]
    svg = draw("depth", chain(norms), [])
    scale, gradients = map(reader, of_class(svg, "axis"))
    rms = [3 * norm / math.sqrt(100) for norm in norms]
    assert [*map(scale, places(svg, "activations"))] == pytest.approx(rms, rel=0.01)
    assert [*map(gradients, places(svg, "gradients"))] == pytest.approx(norms, rel=0.01)
    own = [2 * norm for norm in norms[1::2]]
    assert [*map(gradients, places(svg, "parameter_gradients"))] == pytest.approx(own, rel=0.01)


def test_depth_shows_what_is_no_positive_number() -> None:
    """Zeros are hollow, NaN is a cross, and neither is joined by the line."""
    layers = chain([1.0, 0.1, 0.01, 0.001, 0.0001])
    layers[2]["tensors"][1]["norm"] = 0.0
    layers[3]["tensors"][0].update(nan=5, norm=None, min=None, max=None)
    # the norm of no finite value is recorded as 0: a cross, and not a zero
    layers[4]["tensors"][1].update(nan=100, norm=0.0, min=None, max=None)
    svg = draw("depth", layers, [violation("blocks.2"), violation("blocks.3", "finite")])
    (gradients,) = of_class(svg, "series", "gradients")
    assert len(of_class(gradients, "zero")) == len(of_class(gradients, "bad")) == 1
    assert len(of_class(gradients, "line")) == 1
    (activations,) = of_class(svg, "series", "activations")
    assert len(of_class(activations, "bad")) == 1
    assert len(of_class(activations, "point")) == 4
    assert [one.text for one in of_class(svg, "name", "culprit")] == ["blocks.2"]
    assert "culprit blocks.2: grad norm" in finding(svg)


@pytest.mark.parametrize("count", [1, 100, 10_000])
def test_depth_of_any_number_of_layers(count: int) -> None:
    """At most 64 are drawn, on a page of paper, and it is said.

    The culprit is among them and has its legend, and a container is not.
    """
    layers = [layer("", tensor("activations")), *chain([1.0] * count)]
    svg = draw("depth", layers, [violation(f"blocks.{count // 3}")])
    assert len(titles(svg)) == min(count, 64)
    assert sum(1 for _ in svg.iter()) < 2_000
    assert float(svg.get("height", "")) < 1_000
    assert any("\u25b6 the culprit" in text for text in texts(svg))
    assert ("64 of 10,000 layers" in "".join(texts(svg))) == (count > 100)
    assert [one.text for one in of_class(svg, "name", "culprit")] == [f"blocks.{count // 3}"]


# Memory


def test_memory() -> None:
    """Bars are as long as the bytes, the largest first, and no container counts twice."""
    sizes = [2**20 * (i + 1) for i in range(40)]
    layers = [layer("", parameter_bytes=0, activation_bytes=10**12, saved_bytes=None)]
    layers += [
        layer(f"l.{i}", parameter_bytes=n, activation_bytes=n // 2) for i, n in enumerate(sizes)
    ]
    totals = {"parameter_bytes": sum(sizes), "activation_bytes": 2**20, "saved_bytes": None}
    table = panel({"layers": layers, "totals": totals}, "Memory by layer")
    bars = [row.findall("td")[0].get("style", "") for row in table.findall(".//tbody/tr")]
    named = sorted(sizes, reverse=True)[: len(bars)]
    assert [float(bar[4:-1]) for bar in bars] == pytest.approx(
        [100 * n / named[0] for n in named], abs=0.51
    )
    told = " ".join("".join(table.itertext()).split())
    assert f"parameters {sum(sizes) / 2**20:.0f} MiB in all" in told
    assert "activations 1.00 MiB in all" in told
    assert "saved for backward not measured" in told


SIDES = ((min, 0), (max, 1))


@pytest.mark.parametrize(
    ("edges", "culprit"),
    [
        (resnet(4), "blocks.2.conv2"),
        (unet(5), "up.2"),
        (TOWERS, "text.fc"),
        (RECURRENT, "cell.tanh"),
    ],
    ids=["resnet", "unet", "towers", "recurrent"],
)
def test_flow(edges: list[Edge], culprit: str) -> None:
    """Every edge is drawn once, downward unless it closes a cycle; the lit ones are the way."""
    way = way_through(edges, culprit)
    svg = draw("flow", flow_of(edges, way), [violation(culprit)])
    drawn = of_class(svg, "edge")
    assert Counter(map(pair, drawn)) == Counter((source, target) for source, target, *_ in edges)
    assert {pair(edge) for edge in of_class(svg, "edge", "way")} == set(itertools.pairwise(way))
    assert {box.get("data-name") for box in of_class(svg, "box", "way")} == set(way)
    assert [box.get("data-name") for box in of_class(svg, "box", "culprit")] == [culprit]
    cut = {(source, target) for source, target, passes, _ in edges if not passes}
    assert {pair(edge) for edge in of_class(svg, "edge", "cut")} == cut
    boxes = boxes_of(svg)
    forward: dict[str, set[str]] = {name: set() for name in boxes}
    for edge in drawn:
        source, target = pair(edge)
        if "back" in edge.get("class", "").split():
            assert boxes[target][1] < boxes[source][1]
        elif source != target:
            assert boxes[source][1] < boxes[target][1]
            forward[target].add(source)
    assert len(list(TopologicalSorter(forward).static_order())) == len(boxes)
    # an arc stays beside the boxes, and a straight arrow leads to the next; each colour is told
    left, right = (f(x + side * w for x, _, w, _ in boxes.values()) for f, side in SIDES)
    below = {name: at for at, name in enumerate(sorted(boxes, key=lambda name: boxes[name][1]))}
    for edge in drawn:
        if "C" in edge.get("d", ""):
            xs = [
                float(x) for x in re.findall(r"(?:[MC ]|^)(-?[\d.]+) -?[\d.]+", edge.get("d", ""))
            ]
            assert all(x >= right - 0.1 for x in xs) or all(x <= left + 0.1 for x in xs)
        else:
            source, target = pair(edge)
            assert below[target] == below[source] + 1
    told = " ".join(texts(svg))
    assert "the way from the batch" in told
    assert "a check fails there; the culprit is filled" in told
    for (ax, ay, aw, ah), (bx, by, bw, bh) in itertools.combinations(boxes.values(), 2):
        assert ax + aw < bx or bx + bw < ax or ay + ah < by or by + bh < ay


def test_flow_names_the_operations_of_a_cut() -> None:
    """A dashed arrow says by what no gradient goes back, and each arrow has it in its title.

    What has the role of an image hides all in it from a screen reader: no link lies there.
    """
    svg = draw("flow", flow_of(TOWERS), [])
    assert [one.text for one in of_class(svg, "operations")] == ["no gradient: detach, argmax"]
    assert "temperature → fuse\nby exp" in titles(svg)
    assert "values pass, gradients do not" in texts(svg)
    (image,) = [one for one in svg.iter() if one.get("role") == "img"]
    assert not list(image.iter(f"{SVG}a"))
    links = list(svg.iter(f"{SVG}a"))
    assert links
    assert all(link.findtext(f"{SVG}title") for link in links)


@pytest.mark.parametrize(
    ("edges", "culprit"),
    [
        (resnet(2_000), "blocks.1200.bn1"),
        (resnet(2_000), None),
        ([(f"{i}", f"{(i * 7919 + 13) % 9_973}", True, "") for i in range(9_973)], "500"),
        (SUMS, "blocks.15.b"),
        ([("a" + ".a" * i, "a.a" + ".a" * i, True, "") for i in range(899)], None),
    ],
    ids=["resnet", "healthy", "cycles", "sums", "nested"],
)
def test_large_flow_is_folded(edges: list[Edge], culprit: str | None) -> None:
    """At most 80 boxes hold each layer once; the culprit is one by itself."""
    names = {name for source, target, *_ in edges for name in (source, target)}
    has_way = culprit is not None and "loss" in names
    way = way_through(edges, culprit) if has_way and culprit is not None else []
    svg = draw("flow", flow_of(edges, way), [violation(culprit)] if culprit is not None else [])
    boxes = of_class(svg, "box")
    assert len(boxes) <= 80
    sizes = [
        int(n.replace(",", ""))
        for n in re.findall(r"([\d,]+) parts folded", "\n".join(titles(svg)))
    ]
    assert sum(sizes) + len(boxes) - len(sizes) == len(names)
    assert any("are folded into" in text for text in texts(svg))
    assert not any("#" in text for text in texts(svg))  # operations are folded with their layers
    if culprit is not None:
        assert [box.get("data-name") for box in of_class(svg, "box", "culprit")] == [culprit]
    if way:
        assert of_class(svg, "edge", "way")


def test_flow_has_a_box_for_all_on_the_way() -> None:
    """The layers in a container are marked where it is the culprit; one without edges is a box."""
    svg = draw("flow", flow_of(resnet(3)), [violation("blocks.1")])
    marked = [box.get("data-name", "") for box in of_class(svg, "box", "culprit")]
    assert len(marked) == 5
    assert all(name.startswith("blocks.1.") for name in marked)
    svg = draw("flow", flow_of([("a", "b", True, "")], ["z"]) | {"exact": False}, [])
    assert set(boxes_of(svg)) == {"a", "b", "z"}
    assert any("in part" in text for text in texts(svg))


# Comparison


def test_errors_can_be_read_off_their_axes() -> None:
    """Points stand at the errors, bars end at noise times limit, each pass on its own axis."""
    svg = draw("errors", comparison(8, 5))
    forward, backward = map(reader, of_class(svg, "axis"))
    expected = pytest.approx([3e-7] * 5 + [1e-2] * 3, rel=0.02)
    assert [*map(forward, places(svg, "activations"))] == expected
    expected = pytest.approx([4e-7] * 5 + [2e-2] * 3, rel=0.02)
    assert [*map(backward, places(svg, "gradients"))] == expected
    ends = [sum(numbers(bar, "x", "width")) for bar in of_class(svg, "ranges")]
    assert [*map(forward, ends[:8])] == pytest.approx([8e-7] * 8, rel=0.02)
    assert [*map(backward, ends[8:])] == pytest.approx([1.6e-6] * 8, rel=0.02)
    assert [one.text for one in of_class(svg, "name", "culprit")] == ["l.5"]
    assert "first divergence at l.5" in finding(svg)


def test_errors_mark_layers_of_one_side() -> None:
    """A layer that one side lacks has its row and a sign; an error without a number is a cross."""
    data = comparison(6, 9)
    data["layers"].append(made.aligned("", made.compared("outputs"), label="output"))
    (activations,) = of_class(draw("errors", data), "series", "activations")
    assert len(of_class(activations, "point")) == 7  # outputs stand beside the activations
    data["layers"][1].update(candidate=None, tensors=[])
    data["layers"][2].update(reference=None, label="new", tensors=[])
    data["layers"][3]["tensors"] = [made.compared(error=None, diverged=True)]
    data["layers"][4]["tensors"] = [made.compared(error=0.0)]
    svg = draw("errors", data)
    names = [one.text for one in of_class(svg, "name")]
    assert {"l.1 (\N{MINUS SIGN})", "new (+)"} <= set(names)
    assert len(of_class(svg, "bad")) == 1
    assert len(of_class(svg, "zero")) == 1


# Training


def test_course() -> None:
    """A panel for the loss, which ends where there is no number, and a map for each statistic."""
    course = {
        "steps": [0, 10, 20, 30, 40],
        "loss": [2.0, 1.5, 1.0, None, None],
        "layers": {
            name: {
                "gradient_norm": [1.0, 0.5, None, 0.2, scale],
                "dead_fraction": [0.0, 0.1, 0.2, 0.3, 0.4],
            }
            for name, scale in (("a", 0.1), ("b", 0.01), ("__proto__", 0.05))
        },
    }
    svg = draw("course", course)
    (loss,) = of_class(svg, "panel", "loss")
    assert len(of_class(svg, "panel", "cells")) == 2
    (line,) = of_class(loss, "line")
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", line.get("d", ""))]
    assert heights == sorted(heights)
    assert heights[2] - heights[1] == pytest.approx(heights[1] - heights[0], abs=0.05)
    assert "NaN or inf from step 30" in texts(svg)
    norms, dead = of_class(svg, "panel", "cells")
    assert [name.text for name in of_class(norms, "name")] == ["a", "b", "__proto__"]
    (missing,) = [path for path in of_class(norms, "no-cell") if path.tag == f"{SVG}path"]
    assert missing.get("d", "").count("M") == 3
    assert not of_class(dead, "no-cell")
    assert titles(svg)[:3] == ["a", "b", "__proto__"]


# All of them


@pytest.mark.parametrize("chart", sorted(DRAWN))
def test_names_are_text(chart: str) -> None:
    """No name becomes markup, and colours are those of the page: classes, light or dark."""
    svg = draw(chart, *hostile()[chart])
    drawn = {one.tag.removeprefix(SVG) for one in svg.iter()}
    assert drawn <= {"svg", "g", "a", "text", "title", "rect", "path", "circle"}
    assert any(HOSTILE[0] in title or HOSTILE[1] in title for title in (*titles(svg), finding(svg)))
    assert not {name for one in svg.iter() for name in one.attrib} & {"fill", "stroke", "style"}
    links = {one.get("href", "") for one in svg.iter(f"{SVG}a")}
    assert all(re.fullmatch(r"#t0-0/[\w%.~-]*", link) for link in links)
    if chart == "depth":
        marks = [one.get("href") for one in draw(chart, hostile()[chart][0], []).iter(f"{SVG}a")]
        assert marks == [link_to("t0-0", name) for name in HOSTILE if name]  # "" holds all others


@pytest.mark.parametrize(
    ("chart", "data"),
    [
        ("histograms", [tensor("parameters", None, count=0, mean=None, std=None)]),
        ("depth", [[], []]),
        ("depth", [[layer("a", tensor("activations", None, min=None, max=None))], []]),
        ("flow", [flow_of([]), []]),
        ("errors", [{"layers": [], "divergence": None}]),
        ("course", [{"steps": [], "loss": [], "layers": {}}]),
        ("course", [{"steps": [1], "loss": [None], "layers": {"a": {"x": [None]}}}]),
        ("course", [{"steps": [1, 2], "loss": [-1.7e308, 1.7e308], "layers": {}}]),
    ],
)  # fmt: skip
def test_little_data(chart: str, data: list[Any]) -> None:
    """With nothing or no number given there is still a chart, which says so."""
    svg = draw(chart, *data)
    assert finding(svg)
    placed = [
        value
        for one in svg.iter()
        for name, value in one.items()
        if name in ("d", "x", "y", "cx", "cy", "width", "height", "viewBox")
    ]
    assert not [value for value in placed if re.search("nan|inf|None", value)]
