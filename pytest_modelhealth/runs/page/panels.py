"""What a result shows beside its story: histograms of the evidence, charts and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from pytest_modelhealth.alignment.result import containers
from pytest_modelhealth.rendering.charts import svg
from pytest_modelhealth.rendering.charts.course import course
from pytest_modelhealth.rendering.charts.flow import flow
from pytest_modelhealth.rendering.charts.rows import depth, errors
from pytest_modelhealth.rendering.charts.values import histograms
from pytest_modelhealth.rendering.document import templates
from pytest_modelhealth.rendering.notation import in_bytes, number, plural

MOST_ROWS = 15
_BYTES = ("parameter_bytes", "activation_bytes", "saved_bytes")


def facts(result: Mapping[str, Any]) -> Markup:
    """Return what was run, a phrase each."""
    return Markup(_macros().facts(result).strip())


def drawn(result: Mapping[str, Any], anchor: str) -> tuple[Markup, Markup]:
    """Return histograms of the evidence, and charts and tables below, with links to the layers."""
    macros = _macros()
    return Markup(macros.evidence(result).strip()), Markup(macros.panels(result, anchor).strip())


@cache
def _macros() -> Any:
    template = templates(Path(__file__).parent / "templates").get_template("panels.html")
    known = (course, depth, errors, flow, histograms, in_bytes, number, plural)
    names: dict[str, Any] = {one.__name__: one for one in known}
    names |= {"svg": svg, "heaviest": _heaviest}
    return template.make_module(names)


def _heaviest(result: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], list[Any]]]:
    """Yield the layers that hold most, each with its bytes and their part of the most, in percent.

    A container gives out what others made.
    """
    holders = containers(layer["name"] for layer in result["layers"])
    sized = []
    for layer in result["layers"]:
        sizes = [layer[key] for key in _BYTES]
        sizes[1] = None if layer["name"] in holders else sizes[1]
        sized.append((sum(filter(None, sizes)), layer, sizes))
    sized = sorted(sized, key=lambda one: -one[0])[:MOST_ROWS]
    most = max(size or 0 for _, _, sizes in sized for size in sizes) or 1
    for total, layer, sizes in sized:
        if total:
            yield layer, [(size, round(100 * (size or 0) / most)) for size in sizes]
