"""How a layer of a deployed model is set up, as its graph says it, in the words of torch's modules.

The operators of torch name their arguments as its modules name their attributes: `eps`, `stride`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

Settings = Mapping[str, Any]


_PLUMBING = frozenset(
    {"add", "div", "mean", "mul", "pow", "rsub", "sub", "sum"}
    | {"cat", "expand", "full", "ones", "permute", "reshape", "select", "slice", "split"}
    | {"squeeze", "stack", "transpose", "unsqueeze", "view", "zeros"}
)
"""Operators that set up no layer: arithmetic, and how tensors are laid out."""


def graph_settings(module: nn.Module) -> dict[str, Any] | None:
    """Return the settings of a layer that its graph says; ``None`` where its own code runs."""
    if "_settings" in vars(module):  # of a deployed model
        return vars(module)["_settings"]  # type: ignore[no-any-return]
    graph: Any = vars(module).get("graph")
    # by its type: an object of the user's may lie about its class
    return merged(map(of_node, graph.nodes)) if issubclass(type(graph), fx.Graph) else None


def merged(operations: Iterable[Settings]) -> dict[str, Any]:
    """Return what the operations of a layer say; nothing of what two of them say differently.

    An operation that pads takes that from the one behind it.
    """
    found: dict[str, Any] = {}
    unclear = set()
    for settings in operations:
        for name, value in settings.items():
            if name in found and found[name] != value:
                unclear.add(name)
            found[name] = value
    if "pad" in found:
        unclear.add("padding")
    return {name: value for name, value in found.items() if name not in unclear}


def of_node(node: fx.Node) -> dict[str, Any]:
    """Return what a node of a graph of torch's operators is called with besides tensors."""
    schema = getattr(node.target, "_schema", None)
    is_call = node.op == "call_function" and schema is not None
    return of_call(schema, node.args, node.kwargs) if is_call else {}


def of_call(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that are no tensors by name, those left out as well."""
    if schema.name.partition("::")[2].rstrip("_") in _PLUMBING:
        return {}
    given = {one.name: one.default_value for one in schema.arguments if one.has_default_value()}
    given |= {one.name: value for one, value in zip(schema.arguments, args, strict=False)}
    return {name: value for name, value in (given | dict(kwargs)).items() if _is_plain(value)}


def defaults_of(function: str) -> dict[str, Any]:
    """Return what arguments of an activation are where a call leaves them out."""
    overloads = getattr(torch.ops.aten, function, None)
    if overloads is None:
        return {}
    return of_call(getattr(overloads, overloads.overloads()[0])._schema, (), {})


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a word or several; an empty list stands for a default."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str)
