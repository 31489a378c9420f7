"""What to begin with: names, annotations and layers say what an argument may be."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_origin

from torch import nn

from pytest_modelhealth.guessing.drawing import LENGTH
from pytest_modelhealth.guessing.kinds.plain.layers import Expected, expected
from pytest_modelhealth.guessing.kinds.plain.slots import Slot, Slots

NODES, EDGES = 40, 160
"""The size of a guessed graph."""

_IDS = re.compile(
    r"(.*_)?(ids?|idx|tokens?|indices|text|words|sentences?|categories|category|categorical)$|src$|tgt$"
)
_SINGLE_ID = re.compile(r".*_id$")
_LENGTHS = re.compile(r".*(lengths?|lens?)$")
_TIMES = re.compile(r"(t|time|timesteps?|sigma)$")
_MASK = re.compile(r".*mask$")
_FLAGS = {bool: False, int: 1, float: 1.0}
_MOST_LAYERS = 6


def starts(model: nn.Module) -> Iterator[Slots]:
    """Yield what forward may take, the likeliest first."""
    parameters = _required(model)
    layers = _first_layers(model)
    if not parameters:
        return
    if any(p.name == "edge_index" for p in parameters):
        yield _graph(parameters, layers)
        return
    width = sum(_named(p) is None for p in parameters)
    for choice in _choices(layers, width):
        given = iter(choice)
        yield Slots(tuple(s for p in parameters for s in _slots(p, given, layers)))


def _choices(layers: list[Expected], width: int) -> list[tuple[Expected, ...]]:
    """Return what so many arguments may be: all for one layer, or each for the next."""
    alike = [(one,) * width for one in (*layers, _VECTOR, _SEQUENCE, _IMAGE)]
    in_order = [tuple(layers[:width])] if 1 < width <= len(layers) else []
    return list(dict.fromkeys((*alike[:1], *in_order, *alike[1:])))


_VECTOR = Expected(16)
_SEQUENCE = Expected(16, -1, (LENGTH,))
_IMAGE = Expected(3, 1, (32, 32))


def _required(model: nn.Module) -> list[inspect.Parameter]:
    """Return the arguments that forward needs."""
    try:
        signature = inspect.signature(model.forward, eval_str=False)
    except (TypeError, ValueError):
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    every = list(signature.parameters.values())
    needed = [p for p in every if p.default is p.empty and p.kind not in several]
    if needed:
        return needed
    # one of several optional inputs, or *args
    return [p for p in every if p.kind is not inspect.Parameter.VAR_KEYWORD][:1]


def _first_layers(model: nn.Module) -> list[Expected]:
    """Return what different layers take, in the order in which they were registered."""
    found = filter(None, map(expected, model.modules()))
    return list(dict.fromkeys(found))[:_MOST_LAYERS]


def _annotation(parameter: inspect.Parameter) -> Any:
    given = parameter.annotation
    if isinstance(given, str):
        known: dict[str, Any] = {"bool": bool, "int": int, "float": float}
        return known.get(given, given)
    return get_origin(given) or given


def _is_mapping(parameter: inspect.Parameter) -> bool:
    kind = _annotation(parameter)
    if isinstance(kind, str):
        return kind.startswith(("dict", "Mapping", "Dict"))
    return isinstance(kind, type) and issubclass(kind, Mapping)


def _is_listing(parameter: inspect.Parameter) -> bool:
    kind = _annotation(parameter)
    if isinstance(kind, str):
        return kind.startswith(("list", "Sequence", "tuple", "List", "Tuple"))
    return isinstance(kind, type) and kind.__name__ in ("list", "Sequence", "tuple")


def _named(parameter: inspect.Parameter) -> Slot | None:
    """Return what a name or annotation says by itself; ids are settled by the dictionaries."""
    name, by_name = parameter.name, parameter.kind is parameter.KEYWORD_ONLY
    kind = _annotation(parameter)
    if isinstance(kind, type) and kind in _FLAGS:
        return Slot(name, "fixed", value=_FLAGS[kind], keyword=by_name)
    if _MASK.match(name):
        return Slot(name, "mask", (LENGTH,), keyword=by_name, why="a mask, by its name")
    if _LENGTHS.match(name):
        return Slot(name, "ids", (), LENGTH + 1, 1, keyword=by_name, why="lengths, by its name")
    if _TIMES.match(name):
        return Slot(name, "ids", (), 1000, keyword=by_name, why="time steps, by its name")
    return None


def _slots(
    parameter: inspect.Parameter, given: Iterator[Expected], layers: list[Expected]
) -> Iterator[Slot]:
    by_name = parameter.kind is parameter.KEYWORD_ONLY
    named = _named(parameter)
    if named is not None:
        yield named
        return
    choice = next(given)
    words = next((layer for layer in layers if layer.is_index), None)
    if _IDS.match(parameter.name) and words is not None:
        choice = choice if choice.is_index else words
        shape = () if _SINGLE_ID.match(parameter.name) else choice.shape
    else:
        shape = choice.shape
    key = "x" if _is_mapping(parameter) else 0 if _is_listing(parameter) else None
    yield _slot(parameter.name, choice, shape, key=key, keyword=by_name)


def _slot(name: str, choice: Expected, shape: tuple[int, ...], **more: Any) -> Slot:
    if choice.is_index:
        return Slot(name, "ids", shape, choice.width, choice.least, why=choice.why, **more)
    return Slot(name, "float", shape, why=choice.why, **more)


def _graph(parameters: list[inspect.Parameter], layers: list[Expected]) -> Slots:
    """Return nodes with features, and edges between them."""
    width = next((one for one in layers if not one.is_index), _VECTOR)
    made = []
    for p in parameters:
        if p.name == "edge_index":
            slot = Slot(p.name, "ids", (2, EDGES), NODES, is_whole=True, why=f"{EDGES} edges")
        elif p.name == "batch":
            slot = Slot(p.name, "ids", (NODES,), 1, is_whole=True, why="one graph")
        elif p.name in ("edge_weight", "edge_attr"):
            slot = Slot(p.name, "float", (EDGES,), is_whole=True, why="a number an edge")
        else:
            slot = Slot(p.name, "float", (NODES, width.width), is_whole=True, why=width.why)
        made.append(slot)
    return Slots(tuple(made))
