"""Reads off traced graphs which line of the user's code calls each layer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from pytest_modelhealth.capture.observing.graph_modules import calls_of_containers
from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.observing.recorder import FunctionalCall, Recorder
from pytest_modelhealth.capture.observing.tensors import is_a
from pytest_modelhealth.layers import FUNCTIONAL_LAYERS

_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[2])


class _Frame(NamedTuple):
    """A frame of the user's code: its place, and whether a module's forward began with it."""

    place: str
    is_forward: bool


def note_source_lines(recorder: Recorder) -> None:
    """Take down the line of each layer that a graph knows it of, as ``torch.export`` does."""
    root: nn.Module | None = None  # of a program, whose parts tell paths from there
    for module, layer in list(recorder.by_module.items()):
        if isinstance(line := vars(module).get("_source"), str):  # of a deployed model
            recorder.note_source(layer, line)
        graph = _graph(module)
        if graph is None:
            continue
        if root is None or not type(module).__name__.startswith("InterpreterModule"):
            root = module
        for node in graph.nodes:
            for called, line in _calls(node, module, root, recorder):
                recorder.note_source(called, line)
        for call, line in _functional_calls(graph, module, layer, recorder):
            recorder.note_source_of_function(call, line)


def _graph(module: nn.Module) -> fx.Graph | None:
    """Return the graph that a module runs, of several, one for each call, the first."""
    held = vars(module)  # not the attribute, which a user's class may compute
    runs = held.get("_call_modules") or [module]
    graph: Any = vars(runs[0]).get("_graph", vars(runs[0]).get("graph"))
    return graph if is_a(graph, fx.Graph) else None


def _functional_calls(
    graph: fx.Graph, module: nn.Module, layer: Layer, recorder: Recorder
) -> Iterator[tuple[FunctionalCall, str]]:
    """Yield the functional layers that a graph calls, each with its line."""
    containers = {id(node): call.path for call in calls_of_containers(graph) for node in call.nodes}
    counts: Counter[tuple[str, str]] = Counter()
    for node in graph.nodes:
        function: Any = node.target
        if node.op == "call_method":
            function = getattr(torch.Tensor, function, None)
        elif node.op != "call_function":
            continue
        name = FUNCTIONAL_LAYERS.get(function)
        if name is not None:
            inside = _submodule(module, containers.get(id(node), ""), recorder) or layer
            place = inside.name, name
            yield FunctionalCall(*place, counts[place]), source_line(node.meta.get("stack_trace"))
            counts[place] += 1


def _calls(
    node: fx.Node, module: nn.Module, root: nn.Module, recorder: Recorder
) -> Iterator[tuple[Layer, str]]:
    """Yield the layers that a node came from or calls, each with the line that calls it."""
    frames = _frames(node.meta.get("stack_trace"))
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if node.op == "call_module" and (layer := _submodule(module, str(node.target), recorder)):
        yield layer, _innermost(frames)
    forwards = [place for place, frame in enumerate(frames) if frame.is_forward]
    own = 0 if stack and not stack[0][0] else 1  # the model itself, which torch.fx leaves out
    is_whole = len(forwards) == own + sum(_is_users(kind) for _, kind in stack)
    for path, kind in stack:
        line = ""
        if is_whole:
            began = forwards[own] if own < len(forwards) else len(frames)
            line = frames[began - 1].place if began else ""
        elif (path, kind) == stack[-1]:
            line = _innermost(frames)
        own += _is_users(kind)
        if layer := _submodule(root, path, recorder):
            yield layer, line


def _is_users(kind: Any) -> bool:
    """Whether a class, or the name of one, is not of torch: its forward is a frame of the trace."""
    home = kind if isinstance(kind, str) else getattr(kind, "__module__", "")
    return not home.startswith("torch.")


def source_line(stack_trace: str | None) -> str:
    """Return ``path:line`` of the innermost frame outside torch; ``""`` where there is none."""
    return _innermost(_frames(stack_trace))


def _frames(stack_trace: str | None) -> list[_Frame]:
    """Return the frames of the user's code in a trace, the outermost first."""
    found = [match.groups() for match in _FRAME.finditer(stack_trace or "")]
    return [
        _Frame(f"{path}:{line}", function == "forward")
        for path, line, function in found
        if not path.startswith((_TORCH, _OURS))
    ]


def _innermost(frames: list[_Frame]) -> str:
    return frames[-1].place if frames else ""


def _submodule(module: nn.Module, path: str, recorder: Recorder) -> Layer | None:
    """Return the layer at a path below a module; the module itself and what is gone are none."""
    try:
        return recorder.by_module.get(module.get_submodule(path)) if path else None
    except AttributeError:  # a path of the original model, which is no longer there
        return None
