"""What a result shows beside its story: histograms of the evidence, charts and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from pytest_modelhealth.rendering.notation import in_bytes, plural, printable

_TEMPLATES = Path(__file__).parent / "templates"

FOLDED_FROM = 400
"""Edges of a flow that is shown when asked for."""

MOST_ROWS, MOST_DRIFTS = 15, 200

_SIZES = {
    "parameters": "parameter_bytes",
    "activations": "activation_bytes",
    "saved for backward": "saved_bytes",
}


@dataclass(frozen=True)
class Panel:
    """A part that can be closed; `kind` names the macro of ``panels.html`` that `body` is for."""

    title: str
    remark: str
    body: Any
    kind: str = "chart"
    is_open: bool = True


@dataclass(frozen=True)
class Drawn:
    """The histograms of the evidence, and the charts and tables below them."""

    evidence: str = ""
    panels: str = ""

    @property
    def size(self) -> int:
        """Characters of both."""
        return len(self.evidence) + len(self.panels)


def drawn(result: Mapping[str, Any], anchor: str) -> Drawn:
    """Return a result's charts and tables as markup, with links to the layers of `anchor`."""
    kind, evidence, panels = result["kind"], Markup(), []
    if kind == "inspection":
        evidence, panels = _evidence(result), [*_inspection(result, anchor)]
    elif kind == "comparison":
        told = f"{result['candidate']} beside {result['model']}"
        panels = [Panel("Error through depth", told, errors(result, anchor))]
    elif kind == "drift" and result["drifts"]:
        panels = [_drift(result)]
    macros: Any = templates(_TEMPLATES).get_template("panels.html").module
    return Drawn(evidence, macros.panels_of(panels))


def _inspection(result: Mapping[str, Any], anchor: str) -> Iterator[Panel]:
    layers, violations = result["layers"], result["violations"]
    if result.get("course"):
        known = result["course"]["layers"]  # accused ones first
        ordered = {one["name"]: known[one["name"]] for one in layers if one["name"] in known}
        trained = {**result["course"], "layers": ordered | known}
        yield Panel("Training", "", course(trained, anchor))
    if len(layers) > 1:
        told = "activations and gradients, in execution order"
        yield Panel("Scale through depth", told, depth(layers, violations, anchor))
    found = result.get("flow")
    if found and found["edges"]:
        told = plural(len(found["edges"]), "edge")
        told += "; the way through the culprit is lit" if found["way"] else ""
        is_open = len(found["edges"]) <= FOLDED_FROM
        yield Panel("Flow of data", told, flow(found, violations, anchor), is_open=is_open)
    if any(layer["activation_bytes"] is not None for layer in layers):
        told = f"{in_bytes(result['totals']['activation_bytes'])} of activations"
        yield Panel("Memory by layer", told, _memory(result, anchor), "memory", is_open=False)


def _drift(result: Mapping[str, Any]) -> Panel:
    rows = [
        {
            "label": printable(str(item["label"] or svg.label_of(item))),
            "tensor": printable(svg.words(item["role"])),
            "statistic": printable(svg.words(item["statistic"])),
            "numbers": [
                svg.brief(value) if isinstance(value, int | float) else printable(str(value))
                for key in ("before", "now", "moved", "distance", "allowed")
                for value in [item[key]]
            ],
        }
        for item in result["drifts"][:MOST_DRIFTS]
    ]
    more = len(result["drifts"]) - MOST_DRIFTS
    rest = plural(more, "effect") if more > 0 else ""
    return Panel("What drifted", "from cause to effect", {"rows": rows, "rest": rest}, "drifts")


def _evidence(result: Mapping[str, Any]) -> Markup:
    """Return the tensor that the verdict rests on, below that of the layer computed before it."""
    tensors = [(one["label"], one) for one in result.get("evidence", ())]
    roles = " and ".join(dict.fromkeys(svg.words(one["role"]) for _, one in tensors))
    what = f"values of {roles}, by sign and power of two"
    return histograms(tensors, what, 76) if tensors else Markup()


def _memory(result: Mapping[str, Any], anchor: str) -> dict[str, Any]:
    """Return what each layer holds, the largest first; a container gives out what others made."""
    holders = containers(layer["name"] for layer in result["layers"])
    rows = []
    for layer in result["layers"]:
        sizes = [layer[key] for key in _SIZES.values()]
        if layer["name"] in holders:
            sizes[1] = None
        rows.append((sum(filter(None, sizes)), layer, sizes))
    rows.sort(key=lambda row: -row[0])
    rows = [row for row in rows[:MOST_ROWS] if row[0]]
    most = max((size or 0 for _, _, sizes in rows for size in sizes), default=1)
    totals = [result["totals"][key] for key in _SIZES.values()]
    texts = ["not measured" if one is None else f"{in_bytes(one)} in all" for one in totals]
    shown = [
        {
            "label": printable(svg.label_of(layer)),
            "link": svg.link_to(anchor, layer["name"]),
            "sizes": [(in_bytes(size), round(100 * (size or 0) / most)) for size in sizes],
        }
        for _, layer, sizes in rows
    ]
    return {"columns": list(zip(_SIZES, texts, strict=True)), "rows": shown}
