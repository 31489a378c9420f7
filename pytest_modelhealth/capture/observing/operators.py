"""Operators and graph nodes that show what runs where hooks do not.

Whoever runs the graph takes them for opaque calls and so keeps them in their places.
"""

from __future__ import annotations

import copy
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from pytest_modelhealth.capture.observing.hooks import Hooks, is_traced
from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.observing.tensors import holds_numbers, is_a
from pytest_modelhealth.layers import ACTIVATION_MODULES, FUNCTIONAL_LAYERS


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
        if (layer := _submodule(module, call.path, hooks.recorder))
        if layer.opaque and call.results()  # it is not seen otherwise, and gives something out
    ]
    if not calls:
        yield
        return
    for call, layer in calls:
        layer.opaque = ""  # it is seen all the same
        layer.kind, layer.type_name = call.type, call.type.__name__
        layer.activation = ACTIVATION_MODULES.get(call.type)
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


_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[2])


def note_source_lines(recorder: Recorder) -> None:
    """Take down the line of each layer that a graph knows it of, as ``torch.export`` does."""
    root: nn.Module | None = None  # of a program, whose parts tell paths from there
    for module, layer in list(recorder.by_module.items()):
        if module.__dict__.keys().isdisjoint(_TELLING):  # nearly all
            continue
        if isinstance(line := vars(module).get("_source"), str):  # of a deployed model
            layer.source = layer.source or line
        graph = _graph(module)
        if graph is None:
            continue
        if root is None or not type(module).__name__.startswith("InterpreterModule"):
            root = module
        for node in graph.nodes:
            for called, line in _calls(node, module, root, recorder):
                called.source = called.source or line
        _note_functional_calls(graph, module, layer, recorder)


_TELLING = frozenset({"_source", "_call_modules", "_graph", "graph"})
"""Attributes of modules that know lines, as those of ``torch.fx`` and ``torch.export`` do."""


def _graph(module: nn.Module) -> fx.Graph | None:
    """Return the graph that a module runs, of several, one for each call, the first."""
    held = vars(module)  # not the attribute, which a user's class may compute
    runs = held.get("_call_modules") or [module]
    graph: Any = vars(runs[0]).get("_graph", vars(runs[0]).get("graph"))
    return graph if is_a(graph, fx.Graph) else None


def _note_functional_calls(
    graph: fx.Graph, module: nn.Module, layer: Layer, recorder: Recorder
) -> None:
    """Take down the line of each functional layer that a graph calls."""
    containers = {id(node): call.path for call in calls_of_containers(graph) for node in call.nodes}
    counts: Counter[tuple[str, str]] = Counter()
    for node in graph.nodes:
        function: Any = node.target
        if node.op == "call_method":
            function = getattr(torch.Tensor, function, None)
        name = FUNCTIONAL_LAYERS.get(function) if node.op.startswith("call_") else None
        if name is not None:
            inside = _submodule(module, containers.get(id(node), ""), recorder) or layer
            place = inside.name, name
            line = source_line(node.meta.get("stack_trace"))
            recorder.lines.setdefault((*place, counts[place]), line)
            counts[place] += 1


def _calls(
    node: fx.Node, module: nn.Module, root: nn.Module, recorder: Recorder
) -> Iterator[tuple[Layer, str]]:
    """Yield the layers that a node came from or calls, each with the line that calls it."""
    frames = _frames(node.meta.get("stack_trace"))
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if node.op == "call_module" and (layer := _submodule(module, str(node.target), recorder)):
        yield layer, _innermost(frames)
    forwards = [place for place, (_, is_forward) in enumerate(frames) if is_forward]
    own = 0 if stack and not stack[0][0] else 1  # the model itself, which torch.fx leaves out
    is_whole = len(forwards) == own + sum(_is_users(kind) for _, kind in stack)
    for path, kind in stack:
        line = ""
        if is_whole:
            began = forwards[own] if own < len(forwards) else len(frames)
            line = frames[began - 1][0] if began else ""
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


def _frames(stack_trace: str | None) -> list[tuple[str, bool]]:
    """Return the places of the user's code in a trace, the outermost first.

    With each comes whether a module's forward began with it.
    """
    found = [match.groups() for match in _FRAME.finditer(stack_trace or "")]
    return [
        (f"{path}:{line}", function == "forward")
        for path, line, function in found
        if not path.startswith((_TORCH, _OURS))
    ]


def _innermost(frames: list[tuple[str, bool]]) -> str:
    return frames[-1][0] if frames else ""


def _submodule(module: nn.Module, path: str, recorder: Recorder) -> Layer | None:
    """Return the layer at a path below a module; the module itself and what is gone are none."""
    try:
        return recorder.by_module.get(module.get_submodule(path)) if path else None
    except AttributeError:  # a path of the original model, or of another tracer
        return None


_lock = threading.RLock()
_listeners: list[Listener] = []


class Listener:
    """Takes what the operators show of one run; their `layer` is an index into `layers`."""

    def __init__(self, hooks: Hooks, layers: list[Layer]) -> None:
        self._hooks = hooks
        self._layers = layers

    def input(self, index: int, value: Tensor, begins: bool) -> None:
        """Take one tensor that a layer is called with."""
        layer, recorder = self._layers[index], self._hooks.recorder
        if begins:
            recorder.enter(layer)
        recorder.forget()
        recorder.add_input(layer, value)

    def output(self, index: int, value: Tensor, begins: bool, requires_grad: bool) -> None:
        """Take one tensor that a layer returned."""
        layer, recorder = self._layers[index], self._hooks.recorder
        if begins:
            recorder.enter(layer)
        if not holds_numbers(value):
            return
        recorder.note_returned(layer, requires_grad or value.requires_grad)
        recorder.forget()
        recorder.complete(layer)
        recorder.add_output(layer, value, recorder.unit_dimension(layer.kind, value))

    def gradient(self, index: int, gradient: Tensor) -> None:
        """Take the gradient with respect to one tensor that a layer returned."""
        layer = self._layers[index]
        if "gradients" in layer.roles and self._hooks.takes_gradients([layer]):
            dimension = self._hooks.recorder.unit_dimension(layer.kind, gradient)
            self._hooks.recorder.add_gradient([layer], gradient, dimension)

    def close(self) -> None:
        """Say of each layer that was called, and whose output never showed, why it did not."""
        for layer in self._layers:
            if layer.calls and not layer.returned_own and not layer.unsupported:
                layer.unsupported = (
                    "its output holds no floating-point tensor, or nothing uses it and the "
                    "optimised code does not compute it"
                )

    def line(self, index: int, line: str) -> None:
        """Take the line of the user's code that calls a layer."""
        self._layers[index].source = self._layers[index].source or line

    def fail(self, index: int, error: Exception) -> None:
        """Note an error of ours."""
        self._hooks.recorder.fail(self._layers[index], error)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Hand what the operators see to `listener`; runs in several threads wait for one another.

    The operators know no run: a graph that knew one could not be taken from a compiler's cache.
    """
    with _lock:
        _listeners.append(listener)
        try:
            yield
        finally:
            _listeners.pop()
            listener.close()


def _tell(method: Callable[..., None], layer: int, *arguments: Any) -> None:
    """Pass on what an operator sees; an error of ours must not reach the graph."""
    if not _listeners:
        return
    try:
        method(_listeners[-1], layer, *arguments)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is ours
        _listeners[-1].fail(layer, error)


def note_lines(graph: fx.Graph) -> None:
    """Note the line of the user's code that calls each layer that a graph shows by operators.

    Behind a break of the graph, the hooks of several layers may share one graph, which is given the
    number of the layer: those lines stay unknown.
    """
    for node in graph.nodes:
        if node.target not in _SHOWN:
            continue
        index = next((value for value in node.args if type(value) is int), None)
        if index is not None:
            _tell(Listener.line, index, source_line(node.meta.get("stack_trace")))


def _is_recomputation() -> bool:
    return torch._C._current_graph_task_id() != -1


@torch.library.custom_op("modelhealth::see_input", mutates_args=("clock",))
def see_input(value: Tensor, clock: Tensor, layer: int, begins: bool) -> None:
    """See one tensor that a layer is called with; `begins` says that it is the call's first.

    The write to `clock`, any integer tensor, keeps a compiler from dropping the call.
    """
    clock.add_(1)
    if not _is_recomputation():
        _tell(Listener.input, layer, value, begins)


@torch.library.custom_op("modelhealth::see_output", mutates_args=())
def see_output(value: Tensor, layer: int, begins: bool, requires_grad: bool) -> Tensor:
    """Return a copy of one tensor that a layer returned, and see it and its gradient.

    `begins` says that the call showed no input; `requires_grad` says of `value` what does not show
    below autograd.
    """
    if not _is_recomputation():
        _tell(Listener.output, layer, value, begins, requires_grad)
    return value.clone()


@torch.library.custom_op("modelhealth::see_gradient", mutates_args=())
def see_gradient(gradient: Tensor, layer: int) -> Tensor:
    """Return a copy of the gradient with respect to an output of a layer, and see it."""
    _tell(Listener.gradient, layer, gradient)
    return gradient.clone()


see_input.register_fake(lambda value, clock, layer, begins: None)
see_output.register_fake(lambda value, layer, begins, requires_grad: torch.empty_like(value))
see_gradient.register_fake(lambda gradient, layer: torch.empty_like(gradient))


def _remember_layer(ctx: Any, inputs: tuple[Tensor, int, bool, bool], output: Tensor) -> None:
    ctx.layer = inputs[1]


def _pass_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.modelhealth.see_gradient(gradient, ctx.layer), None, None, None


see_output.register_autograd(_pass_gradient, setup_context=_remember_layer)

_SHOWN = {
    function
    for packet in (torch.ops.modelhealth.see_input, torch.ops.modelhealth.see_output)
    for function in (packet, packet.default)
}
