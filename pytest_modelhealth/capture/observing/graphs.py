"""Lines of the user's code that graphs of ``torch.fx`` and ``torch.export`` know."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.observing.tensors import is_a
from pytest_modelhealth.layers import FUNCTIONAL_LAYERS

_FILE_AND_LINE = re.compile(r'File "([^"]+)", line (\d+)')
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))

_TELLING = frozenset({"_source", "_call_modules", "_graph", "graph"})
"""Attributes of modules that know lines, as those of ``torch.fx`` and ``torch.export`` do."""


def source_line(stack_trace: str | None) -> str:
    """Return ``path:line`` of the innermost frame outside torch; ``""`` where there is none."""
    places = _FILE_AND_LINE.findall(stack_trace or "")
    return next(
        (f"{path}:{line}" for path, line in places[::-1] if not path.startswith(_NOT_THE_USERS)), ""
    )


def note_source_lines(recorder: Recorder) -> None:
    """Take down the line of each of torch's layers, and each function, that a graph knows it of.

    The innermost line of a container's operations lies inside of it, and does not call it.
    """
    for module, layer in list(recorder.by_module.items()):
        held = vars(module)  # not attributes, which a user's class may compute
        if held.keys().isdisjoint(_TELLING):  # nearly all
            continue
        if isinstance(line := held.get("_source"), str):  # of a deployed model
            layer.source = layer.source or line
        # the graph that it runs, of several, one for each call, the first
        runs = vars((held.get("_call_modules") or [module])[0])
        graph: Any = runs.get("_graph", runs.get("graph"))
        if is_a(graph, fx.Graph):
            _note_lines(graph, module, layer, recorder)


def _note_lines(graph: fx.Graph, module: nn.Module, layer: Layer, recorder: Recorder) -> None:
    counts: Counter[str] = Counter()
    is_torchs = str(vars(module).get("_ty", "")).startswith("torch.nn.")  # of a program
    for node in (node for node in graph.nodes if node.op.startswith("call_")):
        line, function = source_line(node.meta.get("stack_trace")), node.target
        called = layer if is_torchs else None
        if node.op == "call_module":
            called = recorder.by_module.get(module.get_submodule(str(function)))
        elif node.op == "call_method":
            function = getattr(torch.Tensor, str(function), None)
        if called is not None:
            called.source = called.source or line
        if name := FUNCTIONAL_LAYERS.get(function):
            recorder.lines.setdefault((layer.name, name, counts[name]), line)
            counts[name] += 1
