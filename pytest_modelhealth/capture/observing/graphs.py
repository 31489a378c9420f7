"""What graphs of ``torch.fx`` and ``torch.export`` tell of layers: inlined containers, lines."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from pytest_modelhealth.capture.observing.hooks import Hooks, is_traced
from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.observing.tensors import is_a
from pytest_modelhealth.layers import ACTIVATION_MODULES, FUNCTIONAL_LAYERS


@contextmanager
def containers_shown(hooks: Hooks) -> Iterator[None]:
    """Call the hooks of inlined containers around the nodes that once were their calls.

    Their graph modules run the code of another graph. It is exchanged on the class, of which
    torch.fx makes one for each graph module; so copies and pickles made meanwhile know nothing.
    """
    exchanged = []
    try:
        for module in list(hooks.recorder.by_module):
            if not isinstance(module, fx.GraphModule):
                continue
            kind, watched = type(module), _watched_forward(module, hooks)
            if watched is not None:
                exchanged.append((kind, kind.forward, watched))
                kind.forward = watched
        yield
    finally:
        for kind, original, watched in exchanged:
            if kind.forward is watched:  # pickling compiles it afresh
                kind.forward = original


def _watched_forward(module: fx.GraphModule, hooks: Hooks) -> Any:
    """Return a module's forward with calls of hooks in it; ``None`` if there is nothing to see."""
    graph = copy.deepcopy(module.graph)
    calls = [
        (call, layer)
        for call in _calls_of_containers(graph)
        if (layer := _submodule(module, call.path, hooks.recorder))
        if layer.opaque and call.results()  # it is not seen otherwise, and gives something out
    ]
    for call, layer in calls:
        layer.opaque, layer.activation = "", ACTIVATION_MODULES.get(call.type)
        layer.kind, layer.type_name = call.type, call.type.__name__
        _insert(graph, call, layer, hooks)
    return type(fx.GraphModule(module, graph)).forward if calls else None


def _insert(graph: fx.Graph, call: _ContainerCall, layer: Layer, hooks: Hooks) -> None:
    def enter_layer(*values: Any) -> None:
        if not is_traced():
            hooks.enter(layer, values)

    def complete_layer(*values: Any) -> None:
        if not is_traced():
            hooks.complete(layer, values)

    inside = set(call.nodes)
    inputs = dict.fromkeys(value for node in call.nodes for value in node.all_input_nodes)
    arguments = [v for v in inputs if v not in inside and v.op != "get_attr"]  # no parameters
    with graph.inserting_before(call.nodes[0]):
        graph.call_function(enter_layer, tuple(arguments))
    with graph.inserting_after(call.nodes[-1]):
        graph.call_function(complete_layer, tuple(call.results()))


class _ContainerCall(NamedTuple):
    """The nodes that came from one call of a container, and the container's path and class."""

    path: str
    type: type[nn.Module]
    nodes: list[fx.Node]

    def results(self) -> list[fx.Node]:
        """Return the values that go out; not a parameter that another call reads from this one."""
        inside = set(self.nodes)
        made = (node for node in self.nodes if node.op != "get_attr")
        return [node for node in made if not inside.issuperset(node.users)]


def _calls_of_containers(graph: fx.Graph) -> list[_ContainerCall]:
    """Return the calls whose nodes still stand together, the outer ones before those in them.

    Those that a quantised operation reads from are left out: `convert_fx` put it in place of
    others, of which it keeps no metadata, and it may be the last of the call.
    """
    calls: dict[str, _ContainerCall] = {}
    places, unplaced = {}, set()
    for place, node in enumerate(graph.nodes):
        places[node], stack = place, node.meta.get("nn_module_stack") or {}
        operator = str(getattr(node.target, "_qualified_op_name", ""))
        if operator.startswith("quantized::") and not stack:
            unplaced.add(node)
        for key, (path, kind) in stack.items():
            if isinstance(kind, type):
                calls.setdefault(key, _ContainerCall(path, kind, [])).nodes.append(node)
    return [
        call
        for call in calls.values()
        if places[call.nodes[-1]] - places[call.nodes[0]] < len(call.nodes)
        and all(unplaced.isdisjoint(node.users) for node in call.results())
    ]


# Lines of the user's code.

_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))

_TELLING = frozenset({"_source", "_call_modules", "_graph", "graph"})
"""Attributes of modules that know lines, as those of ``torch.fx`` and ``torch.export`` do."""


def note_source_lines(recorder: Recorder) -> None:
    """Take down the line of each layer that a graph knows it of, as ``torch.export`` does."""
    root: nn.Module | None = None  # of a program, whose parts tell paths from there
    for module, layer in list(recorder.by_module.items()):
        held = vars(module)  # not attributes, which a user's class may compute
        if held.keys().isdisjoint(_TELLING):  # nearly all
            continue
        if isinstance(line := held.get("_source"), str):  # of a deployed model
            layer.source = layer.source or line
        # the graph that it runs, of several, one for each call, the first
        runs = vars((held.get("_call_modules") or [module])[0])
        graph: Any = runs.get("_graph", runs.get("graph"))
        if not is_a(graph, fx.Graph):
            continue
        if root is None or not type(module).__name__.startswith("InterpreterModule"):
            root = module
        for node in graph.nodes:
            for called, line in _calls(node, module, root, recorder):
                called.source = called.source or line
        _note_functional_calls(graph, module, layer, recorder)


def _note_functional_calls(
    graph: fx.Graph, module: nn.Module, layer: Layer, recorder: Recorder
) -> None:
    containers = {node: call.path for call in _calls_of_containers(graph) for node in call.nodes}
    counts: Counter[tuple[str, str]] = Counter()
    for node in graph.nodes:
        function: Any = node.target
        if node.op == "call_method":
            function = getattr(torch.Tensor, function, None)
        name = FUNCTIONAL_LAYERS.get(function) if node.op.startswith("call_") else None
        if name is not None:
            inside = _submodule(module, containers.get(node, ""), recorder) or layer
            place = inside.name, name
            line = source_line(node.meta.get("stack_trace"))
            recorder.lines.setdefault((*place, counts[place]), line)
            counts[place] += 1


def _calls(
    node: fx.Node, module: nn.Module, root: nn.Module, recorder: Recorder
) -> Iterator[tuple[Layer, str]]:
    """Yield the layers that a node came from or calls, each with the line that calls it."""
    frames = _frames(node.meta.get("stack_trace"))
    innermost = frames[-1][0] if frames else ""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if node.op == "call_module" and (layer := _submodule(module, str(node.target), recorder)):
        yield layer, innermost
    forwards = [place for place, (_, is_forward) in enumerate(frames) if is_forward]
    own = 0 if stack and not stack[0][0] else 1  # the model itself, which torch.fx leaves out
    is_whole = len(forwards) == own + sum(_is_users(kind) for _, kind in stack)
    for path, kind in stack:
        line = innermost if not is_whole and (path, kind) == stack[-1] else ""
        if is_whole:
            began = forwards[own] if own < len(forwards) else len(frames)
            line = frames[began - 1][0] if began else ""
        own += _is_users(kind)
        if layer := _submodule(root, path, recorder):
            yield layer, line


def _is_users(kind: Any) -> bool:
    """Whether a class, or the name of one, is not of torch: its forward is a frame of the trace."""
    home = kind if isinstance(kind, str) else getattr(kind, "__module__", "")
    return not home.startswith("torch.")


def source_line(stack_trace: str | None) -> str:
    """Return ``path:line`` of the innermost frame outside torch; ``""`` where there is none."""
    frames = _frames(stack_trace)
    return frames[-1][0] if frames else ""


def _frames(stack_trace: str | None) -> list[tuple[str, bool]]:
    """Return the places of the user's code in a trace, the outermost first.

    With each comes whether a module's forward began with it.
    """
    return [
        (f"{path}:{line}", function == "forward")
        for path, line, function in _FRAME.findall(stack_trace or "")
        if not path.startswith(_NOT_THE_USERS)
    ]


def _submodule(module: nn.Module, path: str, recorder: Recorder) -> Layer | None:
    """Return the layer at a path below a module; the module itself and what is gone are none."""
    try:
        return recorder.by_module.get(module.get_submodule(path)) if path else None
    except AttributeError:  # a path of the original model, or of another tracer
        return None
