"""One node of an ONNX graph, and what its metadata or its name says of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from pytest_modelhealth.capture.deployed.program import Scope
from pytest_modelhealth.capture.observing.source_lines import source_line

_SCOPES, _CLASSES, _NODE, _TRACE = (
    f"pkg.torch.onnx.{name}"
    for name in ("name_scopes", "class_hierarchy", "fx_node", "stack_trace")
)
UNKNOWN_CLASS = "ONNX"
_TARGET = re.compile(r"\[target=torch\.ops\.([\w.]+)\]")
_ARGUMENT = re.compile(r"%(\w+)")


class Read(NamedTuple):
    """One node of the graph.

    Args:
        operation: the operation of the exported program that it is a part of; ``""`` where it is
            one by itself.
        scopes: the layers around it, outermost first, without the model.
        root: class of the model.
        call: the call of an operator of `torch.ops` that the operation is.
        source: ``path:line`` of the user's code.
        node: the node.
    """

    operation: str
    scopes: tuple[Scope, ...]
    root: str
    call: str
    source: str
    node: Any

    @classmethod
    def of(cls, node: Any) -> Read:
        """Return a node of an ``onnx.GraphProto``."""
        known = metadata(node)
        names, classes = _list(known.get(_SCOPES)), _list(known.get(_CLASSES))
        if not names or len(names) != len(classes):
            return cls("", _scopes_in(node.name), "", "", "", node)
        scopes = tuple(map(Scope, names[1:-1], classes[1:-1]))
        _, _, call = known.get(_NODE, "").partition(" = ")
        return cls(
            operation=names[-1],
            scopes=scopes,
            root=classes[0],
            call=call,
            source=source_line(known.get(_TRACE)),
            node=node,
        )

    @property
    def inputs(self) -> Sequence[str]:
        """Names of the values that the node takes."""
        return self.node.input  # type: ignore[no-any-return]

    @property
    def outputs(self) -> Sequence[str]:
        """Names of the values that the node makes."""
        return self.node.output  # type: ignore[no-any-return]

    @property
    def target(self) -> str:
        """The operator of `torch.ops` that the operation is."""
        found = _TARGET.search(self.call)
        return found[1] if found else ""

    @property
    def arguments(self) -> list[str]:
        """The names of what that is called with, in order."""
        return _ARGUMENT.findall(self.call)


def metadata(proto: Any) -> dict[str, str]:
    """Return what an exporter wrote down of a part of a file."""
    return {entry.key: entry.value for entry in proto.metadata_props}


def _list(text: str | None) -> list[str]:
    """Return the words of a list that was written down; none where it is something else."""
    try:
        words = ast.literal_eval(text or "[]")
    except (ValueError, SyntaxError):
        return []
    is_list = isinstance(words, list) and all(isinstance(word, str) for word in words)
    return words if is_list else []


def _scopes_in(name: str) -> tuple[Scope, ...]:
    """Return the layers in the name of a node, as ``/layers/layers.0/fc/MatMul`` has them."""
    if not name.startswith("/"):
        return ()
    path, scopes = "", []
    for part in name.split("/")[1:-1]:
        head, _, rest = part.partition(".")
        repeats = rest and path.rpartition(".")[2] == head
        path = ".".join(filter(None, (path, rest if repeats else part)))
        scopes.append(Scope(path))
    return tuple(scopes)
