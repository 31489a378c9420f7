"""What a result shows beside its story: histograms of the evidence, charts and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from pytest_modelhealth.rendering.notation import in_bytes, plural

FOLDED_FROM = 400  # edges of a flow that is shown when asked for
MOST_ROWS, MOST_DRIFTS = 15, 200

_SIZES = {
    "parameters": "parameter_bytes",
    "activations": "activation_bytes",
    "saved for backward": "saved_bytes",
}


def drawn(result: Mapping[str, Any], anchor: str) -> tuple[str, str]:
    """Return histograms of the evidence, and charts and tables below, with links to the layers."""
    folder = Path(__file__).parent / "templates"
    macros: Any = templates(folder).get_template("panels.html").module
    return _evidence(result), Markup().join(_panels(result, anchor, macros))


def _evidence(result: Mapping[str, Any]) -> str:
    """Return the tensor that the verdict rests on, below that of the layer computed before it."""
    tensors = [(one["label"], one) for one in result.get("evidence", ())]
    roles = " and ".join(dict.fromkeys(svg.words(one["role"]) for _, one in tensors))
    what = f"values of {roles}, by sign and power of two"
    return histograms(tensors, what, 76) if tensors else ""


def _panels(result: Mapping[str, Any], anchor: str, macros: Any) -> Iterator[str]:
    panel = macros.panel
    if result["kind"] == "comparison":
        said = f"{result['candidate']} beside {result['model']}"
        yield panel("Error through depth", said, errors(result, anchor))
    if result["kind"] == "drift" and result["drifts"]:
        table = macros.drifts(result["drifts"], MOST_DRIFTS, svg)
        yield panel("What drifted", "from cause to effect", table)
    if result["kind"] != "inspection":
        return
    layers, violations = result["layers"], result["violations"]
    if result.get("course"):
        known = result["course"]["layers"]  # accused ones first
        ordered = {one["name"]: known[one["name"]] for one in layers if one["name"] in known}
        trained = {**result["course"], "layers": ordered | known}
        yield panel("Training", "", course(trained, anchor))
    if len(layers) > 1:
        said = "activations and gradients, in execution order"
        yield panel("Scale through depth", said, depth(layers, violations, anchor))
    graph = result.get("flow")
    if graph and graph["edges"]:
        said = plural(len(graph["edges"]), "edge")
        said += "; the way through the culprit is lit" if graph["way"] else ""
        is_open = len(graph["edges"]) <= FOLDED_FROM
        yield panel("Flow of data", said, flow(graph, violations, anchor), is_open)
    if any(layer["activation_bytes"] is not None for layer in layers):
        said = f"{in_bytes(result['totals']['activation_bytes'])} of activations"
        table = macros.memory(*_memory(result, anchor))
        yield panel("Memory by layer", said, table, False)


def _memory(result: Mapping[str, Any], anchor: str) -> tuple[Any, Any]:
    """Return titles, and what each layer holds, the largest first.

    A container gives out what others made.
    """
    holders = containers(layer["name"] for layer in result["layers"])
    sized = []
    for layer in result["layers"]:
        sizes = [layer[key] for key in _SIZES.values()]
        if layer["name"] in holders:
            sizes[1] = None
        sized.append((layer, sizes, sum(filter(None, sizes))))
    sized = [one for one in sorted(sized, key=lambda one: -one[2])[:MOST_ROWS] if one[2]]
    most = max((size or 0 for _, sizes, _ in sized for size in sizes), default=1)
    totals = [result["totals"][key] for key in _SIZES.values()]
    texts = ["not measured" if one is None else f"{in_bytes(one)} in all" for one in totals]
    rows = [
        (
            svg.label_of(layer),
            svg.link_to(anchor, layer["name"]),
            [(in_bytes(size), round(100 * (size or 0) / most)) for size in sizes],
        )
        for layer, sizes, _ in sized
    ]
    return [*zip(_SIZES, texts, strict=True)], rows
