"""How a layer of a deployed model is set up, as its graph says it, in the words of torch's modules.

The operators of torch name their arguments as its modules name their attributes: `eps`, `stride`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from pytest_modelhealth.operations import having

Settings = Mapping[str, Any]

_PLUMBING = having("view", "join", "constant", "sum", "product", "quotient", "power") | having(
    "total", "average"
)
"""Operators that set up no layer: arithmetic, and how tensors are laid out."""


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


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a word or several; an empty list stands for a default."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str)
