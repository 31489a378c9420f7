"""Where in the source a node of a TorchScript graph came from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_SCRIPTED = re.compile(r'^ *File "(?P<path>[^"]+)", line (?P<line>\d+)')
_TRACED = re.compile(r"^(?P<path>\S.*)\((?P<line>\d+)\): \S+$")
_OF_MODULES = ("prim::GetAttr", "prim::CallMethod")
_SERIALIZED = "Serialized"
_TORCH = str(Path(torch.__file__).parent)
_INSTALLED = "/site-packages/torch/"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node came from.

    Args:
        source: ``path:line`` of the innermost line outside torch, ``""`` where none is known.
        within_torch: whether the line that made the node is one of torch's own.
        mark: tells the place from others: the line, and where in it.
    """

    source: str = ""
    within_torch: bool = False
    mark: str = ""


def place_of(node: Any) -> Place:
    """Return where a node came from, as far as its source range tells.

    A trace has the stack of the Python code there, compiled code the innermost line alone. The
    stack of calls that TorchScript keeps besides is out of reach: it points to functions that
    freezing may have deleted.
    """
    mark, _, _ = node.sourceRange().partition(_SERIALIZED)
    lines = mark.splitlines()
    pattern = _SCRIPTED if mark.lstrip().startswith("File") else _TRACED
    frames = [match.groups() for match in map(pattern.match, lines) if match]
    if not frames:
        return Place()
    own = [":".join(frame) for frame in frames if not _is_torchs(frame[0])]
    return Place(own[0] if own else "", _is_torchs(frames[0][0]), mark)


def lines_of(script: Any) -> dict[str, str]:
    """Return ``path:line`` of the user's code for each layer of a script, by its name.

    It is the line that calls the layer. A trace tells it of torch's own layers, and of others a
    line inside.
    """
    found: dict[str, str] = {}
    for name, module in script.named_modules():
        if not module._c._has_method("forward"):
            continue
        graph = module._c._get_method("forward").graph
        inner = {next(iter(graph.inputs())).debugName(): name}
        for node in _all_nodes(graph):
            owner = next(node.inputs(), None) if node.kind() in _OF_MODULES else None
            path = inner.get(owner.debugName()) if owner is not None else None
            if path is not None and node.kind() == "prim::GetAttr":
                own = node.s("name")
                inner[node.output().debugName()] = f"{path}.{own}" if path else own
            else:
                source = place_of(node).source
                if source:
                    found.setdefault(name if path is None else path, source)
    return found


def _all_nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _all_nodes(inner)


def _is_torchs(path: str) -> bool:
    """Whether a file is one of torch's, on this machine or where the script was made."""
    return path.startswith((_TORCH, "<")) or _INSTALLED in path.replace("\\", "/")
