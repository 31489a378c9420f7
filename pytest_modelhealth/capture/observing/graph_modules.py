"""Sees the containers that torch.fx inlined: its graphs remember which nodes were whose."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from pytest_modelhealth.capture.observing.hooks import Hooks, is_traced
from pytest_modelhealth.capture.observing.layer import Layer


@contextmanager
def containers_shown(hooks: Hooks) -> Iterator[None]:
    """Call the hooks of inlined containers around the nodes that once were their calls."""
    with ExitStack() as stack:
        for module in list(hooks.recorder.by_module):
            if isinstance(module, fx.GraphModule):
                stack.enter_context(_shown(module, hooks))
        yield


@contextmanager
def _shown(module: fx.GraphModule, hooks: Hooks) -> Iterator[None]:
    """Run the code of another graph: the module's own, with calls of hooks between its nodes.

    The code is exchanged on the class, of which torch.fx makes one for each graph module; so copies
    and pickles made meanwhile know nothing of it.
    """
    graph = copy.deepcopy(module.graph)
    calls = [
        (call, layer)
        for call in calls_of_containers(graph)
        if (layer := _layer(call, module, hooks))
    ]
    if not calls:
        yield
        return
    for call, layer in calls:
        hooks.recorder.note_container(layer, call.type)
        _insert(graph, call, layer, hooks)
    kind = type(module)
    original = kind.forward
    kind.forward = watched = type(fx.GraphModule(module, graph)).forward
    try:
        yield
    finally:
        if kind.forward is watched:  # pickling compiles it afresh
            kind.forward = original


@dataclass
class ContainerCall:
    """The nodes that came from one call of a container, and the container's path and class."""

    path: str
    type: type[nn.Module]
    nodes: list[fx.Node] = field(default_factory=list)

    def arguments(self) -> list[fx.Node]:
        """Return the values that come in from outside, parameters not among them."""
        inside = set(self.nodes)
        given = (value for node in self.nodes for value in node.all_input_nodes)
        return [v for v in dict.fromkeys(given) if v not in inside and v.op != "get_attr"]

    def results(self) -> list[fx.Node]:
        """Return the values that go out; not a parameter that another call reads from this one."""
        inside = set(self.nodes)
        made = (node for node in self.nodes if node.op != "get_attr")
        return [node for node in made if not inside.issuperset(node.users)]


def calls_of_containers(graph: fx.Graph) -> list[ContainerCall]:
    """Return the calls whose nodes still stand together, the outer ones before those in them.

    Those that a quantised operation reads from are left out: it has lost its place, and may be the
    last of the call.
    """
    calls: dict[str, ContainerCall] = {}
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
            if isinstance(kind, type):
                calls.setdefault(key, ContainerCall(path, kind)).nodes.append(node)
    return [
        call
        for call in calls.values()
        if places[call.nodes[-1]] - places[call.nodes[0]] < len(call.nodes)
        and not any(_is_unplaced(user) for node in call.results() for user in node.users)
    ]


def _is_unplaced(node: fx.Node) -> bool:
    """Whether `convert_fx` put a node in place of others, of which it keeps no metadata."""
    name = str(getattr(node.target, "_qualified_op_name", ""))
    return name.startswith("quantized::") and not node.meta.get("nn_module_stack")


def _layer(call: ContainerCall, module: fx.GraphModule, hooks: Hooks) -> Layer | None:
    """Return the layer that is not seen otherwise and gives something out, if it is one."""
    try:
        layer = hooks.recorder.by_module.get(module.get_submodule(call.path))
    except AttributeError:  # another tracer's path
        return None
    return layer if layer is not None and layer.opaque and call.results() else None


def _insert(graph: fx.Graph, call: ContainerCall, layer: Layer, hooks: Hooks) -> None:
    def enter_layer(*values: Any) -> None:
        if not is_traced():
            hooks.enter(layer, values)

    def complete_layer(*values: Any) -> None:
        if not is_traced():
            hooks.complete(layer, values)

    arguments, results = tuple(call.arguments()), tuple(call.results())
    with graph.inserting_before(call.nodes[0]):
        graph.call_function(enter_layer, arguments)
    with graph.inserting_after(call.nodes[-1]):
        graph.call_function(complete_layer, results)
