"""Reads off traced graphs which line of the user's code each layer came from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.observing.tensors import is_a

_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+)')
_TORCH = str(Path(torch.__file__).parent)


def source_lines(recorder: Recorder) -> Iterator[tuple[Layer, str]]:
    """Yield each layer that a graph knows the source of, as ``torch.export`` does, and its line."""
    for module in list(recorder.by_module):
        held = vars(module)  # not the attribute, which a user's class may compute
        if isinstance(line := held.get("_source"), str) and line:  # of a transcript
            yield recorder.by_module[module], line
        graph = held.get("_graph", held.get("graph"))
        for node in graph.nodes if is_a(graph, fx.Graph) else ():
            layer = _layer(node, module, recorder)
            if layer is not None and not layer.source:
                yield layer, source_line(node.meta.get("stack_trace"))


def source_line(stack_trace: str | None) -> str:
    """Return ``path:line`` of the innermost frame outside torch; ``""`` where there is none."""
    frames = [match.groups() for match in _FRAME.finditer(stack_trace or "")]
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    return ":".join(own[-1]) if own else ""


def _layer(node: fx.Node, module: nn.Module, recorder: Recorder) -> Layer | None:
    path: Any = node.target if node.op == "call_module" else _innermost_path(node)
    try:
        return recorder.by_module.get(module.get_submodule(path)) if path else None
    except AttributeError:  # a path of the original model, which is no longer there
        return recorder.layers.get(path)


def _innermost_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path: str = list(stack.values())[-1][0] if stack else ""
    return path
