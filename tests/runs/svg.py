"""What a chart shows, read from its SVG."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable

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
