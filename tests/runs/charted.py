"""What the charts are given, parts of the file of a run, made up; and what one shows."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from typing import Any

import networkx as nx

from tests.runs.difference import made

HOSTILE = (
    "<img src=x onerror=window.hacked=1>",
    "</script><script>window.hacked=1</script>",
    "__proto__",
    "constructor",
    "toString.__proto__",
    "a\"'&b.\N{RIGHT-TO-LEFT OVERRIDE}c",
    "wide." * 60,
    "",
)


def tensor(role: str, norm: float | None = 1.0, **more: Any) -> dict[str, Any]:
    """A tensor of a hundred numbers with this L2 norm."""
    size = abs(norm or 0.0)
    own = {"std": size / 10, "min": -size / 3, "max": size / 2, "norm": norm, "bins": None}
    rest = {"shape": [100], "count": 100, "dead": None, "mean": 0.0}
    return made.tensor(role, **{**rest, **own, **more})


def layer(name: str, *tensors: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A layer with these tensors, of which no size was measured."""
    sizes = {"parameter_bytes": 0, "activation_bytes": None, "saved_bytes": None}
    return made.layer(name, tensors=list(tensors), **{"label": name or "Net", **sizes, **more})


def violation(name: str, check: str = "grad_norm") -> dict[str, Any]:
    """A finding about a layer."""
    return made.finding(check, name, label=name or "Net", message=f"{check} broke")


def chain(norms: Sequence[float]) -> list[dict[str, Any]]:
    """Layers with these gradient norms, every second with parameters."""
    return [
        layer(
            f"blocks.{i}",
            tensor("activations", 3 * norm),
            tensor("gradients", norm),
            *([tensor("parameter_gradients", 2 * norm)] if i % 2 else []),
        )
        for i, norm in enumerate(norms)
    ]


Edge = tuple[str, str, bool, str]


def resnet(blocks: int) -> list[Edge]:
    """Blocks of five layers, each beside a way around it."""
    edges = [("input 0", "stem", True, "")]
    last = "stem"
    for i in range(blocks):
        names = [f"blocks.{i}.{part}" for part in ("conv1", "bn1", "relu", "conv2", "add")]
        edges += [(a, b, True, "") for a, b in itertools.pairwise([last, *names])]
        edges.append((last, names[-1], True, "add"))
        last = names[-1]
    return [*edges, (last, "head", True, "flatten"), ("head", "loss", True, "cross_entropy")]


def unet(depth: int) -> list[Edge]:
    """A way down and up again, with ways across; the second lets no gradient back."""
    down = [f"down.{i}" for i in range(depth)]
    up = [f"up.{i}" for i in reversed(range(depth))]
    edges = [(a, b, True, "") for a, b in itertools.pairwise(["input 0", *down, *up, "loss"])]
    return edges + [
        (a, b, i != 1, "detach" if i == 1 else "cat")
        for i, (a, b) in enumerate(zip(down, reversed(up), strict=True))
        if i < depth - 1
    ]


TOWERS: list[Edge] = [
    ("input 1", "text.embed", True, ""), ("input 0", "image.conv", True, ""),
    ("image.conv", "image.fc", True, ""), ("text.embed", "text.fc", True, ""),
    ("text.fc", "fuse", False, "detach argmax"), ("image.fc", "fuse", True, "cat"),
    ("temperature", "fuse", True, "exp"), ("fuse", "loss", True, ""),
]  # fmt: skip
RECURRENT: list[Edge] = [
    ("input 0", "cell.i2h", True, ""), ("cell.i2h", "cell.tanh", True, ""),
    ("cell.tanh", "cell.h2h", True, ""), ("cell.h2h", "cell.tanh", True, "add"),
    ("cell.tanh", "cell.tanh", False, "detach"), ("cell.tanh", "head", True, ""),
    ("head", "cell.i2h", False, "argmax"), ("head", "loss", True, ""),
]  # fmt: skip


SUMS: list[Edge] = [("input 0", "blocks.0.a", True, "")]  # each block ends in one
for i in range(30):
    SUMS += [(f"blocks.{i}.a", f"blocks.{i}.b", True, ""), (f"blocks.{i}.a", f"+ #{i}", True, "")]
    SUMS += [(f"blocks.{i}.b", f"+ #{i}", True, ""), (f"+ #{i}", f"blocks.{i + 1}.a", True, "")]


def way_through(edges: Sequence[Edge], culprit: str, end: str = "loss") -> list[str]:
    """A shortest way from a source through the culprit to the end."""
    graph = nx.DiGraph((source, target) for source, target, *_ in edges)
    ways = nx.single_source_shortest_path(graph.reverse(), culprit)
    start = next(way for name, way in ways.items() if not graph.in_degree(name))
    return [*reversed(start), *nx.shortest_path(graph, culprit, end)[1:]]


def flow_of(edges: Sequence[Edge], way: Sequence[str] = ()) -> dict[str, Any]:
    """The flow of an inspection."""
    listed = [[*ends, operations.split()] for *ends, operations in edges]
    return {"edges": listed, "joins": [], "way": list(way), "exact": True}


def comparison(count: int, at: int) -> dict[str, Any]:
    """Two models of so many layers that differ from one on."""
    layers = [
        made.aligned(
            f"l.{i}",
            made.compared("activations", 1e-2 if i >= at else 3e-7, 1e-7, i >= at),
            made.compared("gradients", 2e-2 if i >= at else 4e-7, 2e-7, i >= at),
        )
        for i in range(count)
    ]
    return made.comparison(*layers, culprit=f"l.{at}" if at < count else "")


def hostile() -> dict[str, list[Any]]:
    """Every chart with names of markup and of JavaScript's own properties."""
    layers = [
        layer(
            name,
            tensor("activations"),
            tensor("gradients"),
            parameter_bytes=8,
            label=name or "<b>Net</b>",
        )
        for name in HOSTILE
    ]
    edges = [(a, b, False, "<b>x</b> __proto__") for a, b in itertools.pairwise(HOSTILE)]
    found = [violation(HOSTILE[0], "<i>check</i>")]
    trained = {name: {"<b>": [1.0, 2.0]} for name in HOSTILE}
    different = made.compared("activations", 1.0, 1e-3, True)
    rows = [made.aligned(name, different) for name in HOSTILE]
    return {
        "histograms": [tensor(HOSTILE[0], name=HOSTILE[1], zeros=1)],
        "depth": [layers, found],
        "flow": [flow_of(edges, HOSTILE), found],
        "errors": [made.comparison(*rows, culprit=HOSTILE[0])],
        "course": [{"steps": [0, 1], "loss": [1.0, 2.0], "layers": trained}],
    }  # fmt: skip


# What a chart shows, read from its SVG

SVG = "{http://www.w3.org/2000/svg}"


def of_class(svg: ET.Element, *names: str) -> list[ET.Element]:
    """All elements that have all these classes."""
    return [one for one in svg.iter() if set(names) <= set(one.get("class", "").split())]


def numbers(element: ET.Element, *names: str) -> list[float]:
    """Attributes as numbers."""
    return [float(element.get(name, "nan")) for name in names]


def finding(svg: ET.Element) -> str:
    """The sentence that says what the chart shows."""
    (image,) = [one for one in svg.iter() if one.get("role") == "img"]
    return image.get("aria-label", "")


def texts(svg: ET.Element) -> list[str]:
    """All that is written."""
    return [one.text or "" for one in svg.iter(f"{SVG}text")]


def titles(svg: ET.Element) -> list[str]:
    """What is shown by hovering, of each mark."""
    return [one.text or "" for one in svg.iter(f"{SVG}title")]


def reader(axis: ET.Element, *, log: bool = True) -> Callable[[float], float]:
    """Reads values off an axis along x by its first and last labelled tick."""
    ticks = []
    for text in axis.iter(f"{SVG}text"):
        written = text.text or ""
        if re.fullmatch(r"-?[\d.]+(e-?\d+)?", written) and (float(written) > 0 or not log):
            ticks.append((float(text.get("x", "")), float(written)))
    (x0, low), (x1, high) = ticks[0], ticks[-1]
    if log:
        low, high = math.log10(low), math.log10(high)
    scale = (high - low) / (x1 - x0)
    return lambda x: 10 ** (low + (x - x0) * scale) if log else low + (x - x0) * scale


def boxes_of(svg: ET.Element) -> dict[str, tuple[float, float, float, float]]:
    """Left, top, width and height of each box, by name."""
    return {
        box.get("data-name", ""): (*numbers(box, "x", "y", "width", "height"),)  # type: ignore[misc]
        for box in of_class(svg, "box")
    }


def pair(edge: ET.Element) -> tuple[str, str]:
    """The boxes at both ends of an edge."""
    return edge.get("data-source", ""), edge.get("data-target", "")
