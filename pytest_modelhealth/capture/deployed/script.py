"""TorchScript, scripted or traced: one graph with the code of all layers in it.

A copy of it runs, and shows every tensor. Each operation knows the layers that it was inlined from,
until freezing takes the layers away: then it is shown by what it computes.
"""

from __future__ import annotations

import copy
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from inspect import Parameter, Signature
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.jit._fuser import optimized_execution

from pytest_modelhealth.capture.deployed.model import DeployedEngine
from pytest_modelhealth.capture.deployed.program import Operation, Program, Ran, Runtime, Scope
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import has_forward

_NOTE = "operations are seen in a run of a copy of the script's graph, without gradients"
_FROZEN = "it is frozen: operations stand for layers, named after what they compute"
_HELD = frozenset({"prim::Constant", "prim::ConstantMKLDNNTensor", "prim::GetAttr"})
"""What gives a tensor of the model's own."""
_UNSHOWN = _HELD | {
    "prim::If", "prim::Loop", "prim::ListConstruct", "prim::TupleConstruct", "prim::TupleUnpack",
    "prim::DictConstruct", "prim::Uninitialized", "prim::RaiseException",
}  # fmt: skip
_MANGLED = re.compile(r"^__torch__\.|___torch_mangle_\d+\.")

_lock = threading.RLock()
_runs: list[_Run] = []  # the run that is shown what its graph computes


@torch.library.custom_op("modelhealth::see_values", mutates_args=("clock",))
def see_values(given: list[Tensor], made: list[Tensor], clock: Tensor, place: int) -> None:
    """See tensors; the write to `clock`, any integer tensor, keeps the call in its place."""
    with torch._C.DisableTorchFunction():  # no function of the model's
        clock.add_(1)
        if _runs:
            _runs[-1].see(place, given, made)


class _Shown(NamedTuple):
    """A node of the graph that is shown: what it takes and makes, and the operation that it is."""

    node: Any
    inputs: list[Any]
    outputs: list[Any]
    operation: Operation


class ScriptRuntime(Runtime):
    """A script, with its own optimisations in it and none made on the way."""

    def __init__(self, script: Any) -> None:
        self._script = script
        self._layers = _Layers(script)
        graph = script.graph.copy()
        torch._C._jit_pass_inline(graph)
        self._names = [value.debugName() for value in graph.inputs()][1:]
        self._shown = list(self._operations(graph))
        _show(graph, self._shown)
        self._function = torch._C._create_function_from_graph("forward", graph)

    @property
    def program(self) -> Program:
        """All that the graph may run."""
        return Program(
            type_name=_class_name(self._script),
            operations=[shown.operation for shown in self._shown],
            layers=self._layers.classes,
            parameters={n: p.detach() for n, p in self._script.named_parameters()},
            buffers=dict(self._script.named_buffers()),
            names_layers=not self._layers.are_gone,
            note=f"{_NOTE}; {_FROZEN}" if self._layers.are_gone else _NOTE,
        )

    def run(self, inputs: Inputs) -> Ran:
        """Run a batch; an `InspectionError` says that it does not fill the inputs."""
        given = _bound(self._script.forward.schema, inputs)
        run = _Run(self._shown)
        begin = [run.name_of(tensor) for tensor in find_tensors(given)]
        clock = torch.zeros((), dtype=torch.int64)
        try:
            script = copy.deepcopy(self._script)  # its buffers may be written to
        except RuntimeError as error:
            said = str(error).strip().partition("\n")[0]
            raise InspectionError(f"the script cannot be copied to be looked at: {said}") from error
        with _lock, torch.no_grad(), optimized_execution(False):  # one run after the other
            _runs.append(run)
            try:
                output = self._function(script, *given, clock)
            finally:
                _runs.pop()
        returned = [run.name_of(tensor) for tensor in find_tensors(output)]
        made = {name for one in run.operations for name in one.outputs}
        unmade = [name for name in run.values if name not in made]
        return Ran(run.operations, [*begin, *unmade], returned, run.values, output)

    def _operations(self, block: Any) -> Iterator[_Shown]:
        """Yield the operations of a block, and of those in it."""
        for node in block.nodes():
            for inner in node.blocks():
                yield from self._operations(inner)
            taken, made = list(_tensors(node)), list(filter(_is_tensor, node.outputs()))
            if (taken or made) and node.kind() not in _UNSHOWN:
                name = node.kind().partition("::")[2].strip("_")
                operation = Operation(name, self._layers.around(node, name), (), ())
                yield _Shown(node, taken, made, operation)


class _Layers:
    """The layers of a script, by what an inlined operation says of them.

    Such an operation leaves out a `ModuleList`, which has no forward: where two layers look the
    same without it, the one is meant whose weight the operation reads.
    """

    def __init__(self, script: Any) -> None:
        self.classes = {name: _class_name(m) for name, m in script.named_modules() if name}
        self.are_gone = not self.classes and next(script.parameters(), None) is None
        self._counts = Counter[str]()
        self._paths: dict[tuple[tuple[str, str], ...], list[str]] = defaultdict(list)
        modules = dict(script.named_modules())
        for name in self.classes:
            if not has_forward(modules[name]):
                continue
            names = name.split(".")
            around = (".".join(names[:end]) for end in range(1, len(names) + 1))
            called = [path for path in around if has_forward(modules[path])]
            parts = (
                (path.rpartition(".")[2], self.classes[path].rpartition(".")[2]) for path in called
            )
            self._paths[tuple(parts)].append(name)

    def around(self, node: Any, name: str) -> tuple[Scope, ...] | None:
        """Return the layers around an operation; ``None`` where they are not known."""
        held = [value.node() for value in node.inputs() if value.node().kind() in _HELD]
        if self.are_gone:  # an operation with weights is the layer; any other is of the model
            if not any("Tensor" in str(one.output().type()) for one in held):
                return ()
            number = self._counts[name]
            self._counts[name] += 1
            return (Scope(f"{name}_{number}" if number else name, f"torch.{name}"),)
        said = re.findall(r"([\w.]+)\(([\w.]*)\)", node.getModuleHierarchy())
        parts = [(own.lstrip("."), kind) for own, kind in said]
        parts = [part for part in parts if part[0] not in ("SELF", "UNKNOWN_INSTANCE")]
        if not parts:
            return ()
        paths = self._paths.get(tuple(parts), [])
        owners = {_path_of(one).rpartition(".")[0] for one in held if one.kind() == "prim::GetAttr"}
        paths = paths if len(paths) == 1 else [path for path in paths if path in owners]
        if len(paths) != 1:
            return None
        names = paths[0].split(".")
        around = [".".join(names[:end]) for end in range(1, len(names) + 1)]
        known = {path for found in self._paths.values() for path in found}
        return tuple(Scope(path, self.classes[path]) for path in around if path in known)


class _Run:
    """What one run showed: the operations that ran, in order, and what they took and made, by name.

    The values are copies, as an operation may write to them later.
    """

    def __init__(self, shown: Sequence[_Shown]) -> None:
        self._shown = shown
        self.operations: list[Operation] = []
        self.values: dict[str, Tensor] = {}
        self._known: dict[int, tuple[str, Tensor, int]] = {}  # held, so that no id is given twice

    def name_of(self, tensor: Tensor, *, is_new: bool = False) -> str:
        """Return the name of what a tensor holds now."""
        version = 0 if tensor.is_inference() else tensor._version  # which has none
        name, _, known = self._known.get(id(tensor), ("", None, -1))
        if is_new or known != version:
            name = f"value_{len(self.values)}"
            is_dense = tensor.layout != torch._mkldnn  # type: ignore[attr-defined]
            self.values[name] = tensor.detach().clone() if is_dense else tensor.to_dense()
            self._known[id(tensor)] = name, tensor, version
        return name

    def see(self, place: int, given: list[Tensor], made: list[Tensor]) -> None:
        """See what an operation took and made; what it wrote to, it took as that was before."""
        written = {id(tensor) for tensor in made} & self._known.keys()
        inputs = tuple(
            self._known[id(tensor)][0] if id(tensor) in written else self.name_of(tensor)
            for tensor in given
        )
        outputs = tuple(self.name_of(tensor, is_new=True) for tensor in made)
        operation = self._shown[place].operation
        self.operations.append(replace(operation, inputs=inputs, outputs=outputs))


def _show(graph: Any, shown: Sequence[_Shown]) -> None:
    """Rewrite a graph so that it shows its values: it takes a clock as a further, last input."""
    clock = graph.addInput("modelhealth_clock")
    clock.setType(torch._C.TensorType.get())
    for place, one in enumerate(shown):
        marker = graph.create("prim::Constant", [], 1)
        marker.insertAfter(one.node)
        marker.output().setType(torch._C.NoneType.get())
        graph.setInsertPoint(marker)
        lists = [graph.create("prim::ListConstruct", v, 1) for v in (one.inputs, one.outputs)]
        for values in lists:
            values.output().setType(torch._C.ListType(torch._C.TensorType.get()))
            graph.insertNode(values)
        arguments = [*(one.output() for one in lists), clock, graph.insertConstant(place)]
        graph.insertNode(graph.create("modelhealth::see_values", arguments, 0))


def _bound(schema: Any, inputs: Inputs) -> list[Any]:
    """Return the arguments of a call in the order of the script's inputs.

    Raises:
        InspectionError: one is missing, or there is one too many.
    """
    kind, none = Parameter.POSITIONAL_OR_KEYWORD, Parameter.empty
    expected = [
        Parameter(one.name, kind, default=one.default_value if one.has_default_value() else none)
        for one in schema.arguments[1:]
    ]
    try:
        bound = Signature(expected).bind(*inputs.args, **inputs.kwargs)
    except TypeError as error:
        raise InspectionError(
            f"the batch does not fill the inputs of the script, {error}; it takes: "
            f"{', '.join(one.name for one in expected)}"
        ) from None
    bound.apply_defaults()
    return list(bound.arguments.values())


def _tensors(node: Any) -> Iterator[Any]:
    """Yield the tensors that a node takes which are not the model's own, those in lists too."""
    for value in node.inputs():
        if _is_tensor(value) and value.node().kind() not in _HELD:
            yield value
        elif value.node().kind() == "prim::ListConstruct":
            yield from _tensors(value.node())


def _is_tensor(value: Any) -> bool:
    return bool(value.type().kind() == "TensorType")


def _path_of(node: Any) -> str:
    """Return the full name of an attribute that a node reads of the script or its layers."""
    if node.kind() != "prim::GetAttr":
        return ""
    return ".".join(filter(None, (_path_of(node.input().node()), node.s("name"))))


def _class_name(script: Any) -> str:
    """Return the qualified name of the class that a script was made of."""
    return _MANGLED.sub("", script._c._type().qualified_name())


class ScriptEngine(DeployedEngine):
    """Scripts and traces, from memory or from a file, frozen or not."""

    runtime_class: ClassVar[type[Any]] = ScriptRuntime

    def reads(self, model: Any) -> bool:
        """Whether `model` as a whole is TorchScript that can be called."""
        return isinstance(model, torch.jit.ScriptModule) and has_forward(model)
