"""TorchScript that was frozen or inlined: one graph, whose operations are named.

Freezing puts the code of all layers into one graph and turns parameters into constants; which layer
an operation came from is lost. A copy of the graph runs, and shows every tensor.
"""

from __future__ import annotations

import copy
import re
import threading
from dataclasses import replace
from functools import cached_property
from inspect import Parameter, Signature
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.jit._fuser import optimized_execution

from pytest_modelhealth.capture.deployed.model import DeployedEngine
from pytest_modelhealth.capture.deployed.program import Node, Program, Ran, Runtime
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.torchscript.graph import Operations, Shown, is_inlined
from pytest_modelhealth.errors import InspectionError

_MANGLED = re.compile(r"^__torch__\.|___torch_mangle_\d+\.")
_NOTE = (
    "operations are seen in a run of a copy of the script's graph, and named after what they "
    "compute: the graph does not tell which layers they are of"
)
_NO_GRADIENTS = "a frozen script has constants in the place of parameters, without gradients"

_lock = threading.RLock()
_runs: list[_Run] = []
"""The run that is shown what its graph computes."""


@torch.library.custom_op("modelhealth::see_values", mutates_args=("clock",))
def see_values(given: list[Tensor], made: list[Tensor], clock: Tensor, place: int) -> None:
    """See tensors; the write to `clock`, any integer tensor, keeps the call in its place."""
    with torch._C.DisableTorchFunction():  # no function of the model's
        clock.add_(1)
        if _runs:
            _runs[-1].see(place, given, made)


class InlinedScript(Runtime):
    """A script that holds the code of all its layers in one graph.

    A copy of the graph runs, with the script's own optimisations in it and none made on the way.

    Args:
        script: the script, which is left alone.
    """

    def __init__(self, script: Any) -> None:
        self._script = script
        graph = script.graph.copy()
        torch._C._jit_pass_inline(graph)
        self._names = [value.debugName() for value in graph.inputs()][1:]
        self._read = Operations(graph, script)
        _show(graph, self._read.shown)
        self._function = torch._C._create_function_from_graph("forward", graph)

    @cached_property
    def program(self) -> Program:
        """All that the graph may run; what feeds what is known of a run."""
        is_frozen = next(self._script.parameters(), None) is None
        return Program(
            type_name=_MANGLED.sub("", self._script._c._type().qualified_name()),
            nodes=tuple(shown.node for shown in self._read.shown),
            inputs=tuple(self._names),
            outputs=(),
            parameters=self._read.parameters,
            buffers=self._read.buffers,
            training=frozenset(self._read.training),
            notes=(f"{_NOTE}; {_NO_GRADIENTS}" if is_frozen else _NOTE,),
        )

    def run(self, inputs: Inputs) -> Ran:
        """Run a batch.

        Raises:
            InspectionError: the batch does not fill the inputs.
            Exception: whatever the script raises.
        """
        given = _bound(self._script.forward.schema, inputs)
        run = _Run(self._read.shown)
        for name, argument in zip(self._names, given, strict=True):
            for tensor in find_tensors(argument):
                run.add(name, tensor)
        clock = torch.zeros((), dtype=torch.int64)
        with _lock, torch.no_grad(), optimized_execution(False):  # one run after the other
            _runs.append(run)
            try:
                output = self._function(copy.deepcopy(self._script), *given, clock)
            finally:
                _runs.pop()
        returned = {
            run.known[id(tensor)][0]: tensor
            for tensor in find_tensors(output)
            if id(tensor) in run.known
        }
        program = replace(
            self.program, nodes=tuple(run.nodes), inputs=run.inputs, outputs=tuple(returned)
        )
        return Ran(program, run.values | returned, output)


class _Run:
    """What one run showed.

    Args:
        shown: the operations of the graph, by their places.

    Attributes:
        nodes: the operations in the order in which they ran.
        values: what they computed, by name; copies, as an operation may write to it later.
        known: name, tensor and version of what was seen, by the ids of the tensors.
    """

    def __init__(self, shown: list[Shown]) -> None:
        self._shown = shown
        self.nodes: list[Node] = []
        self.values: dict[str, Tensor] = {}
        self.known: dict[int, tuple[str, Tensor, int]] = {}
        self._calls = 0

    @property
    def inputs(self) -> tuple[str, ...]:
        """The values that no operation made."""
        made = {name for node in self.nodes for name in node.outputs}
        return tuple(name for name in self.values if name not in made)

    def add(self, stem: str, tensor: Tensor) -> str:
        """Take what a tensor holds now."""
        name = f"{stem}~{len(self.values)}"
        is_dense = tensor.layout != torch._mkldnn  # type: ignore[attr-defined]
        self.values[name] = tensor.detach().clone() if is_dense else tensor.to_dense()
        self.known[id(tensor)] = name, tensor, _version(tensor)
        return name

    def see(self, place: int, given: list[Tensor], made: list[Tensor]) -> None:
        """See what an operation took and returned, and what it wrote to."""
        shown = self._shown[place]
        taken = (self.known[id(tensor)][0] for tensor in given if id(tensor) in self.known)
        inputs = tuple(dict.fromkeys(taken))
        new = [tensor for tensor in made if id(tensor) not in self.known]
        if shown.writes:  # to what it took, and all that shares its memory
            known = list(self.known.values())
            new += [tensor for _, tensor, version in known if _version(tensor) != version]
        if new:
            self._calls += shown.begins
            scopes = tuple(replace(scope, call=self._calls) for scope in shown.node.scopes)
            outputs = tuple(self.add(shown.node.function.__name__, tensor) for tensor in new)
            self.nodes.append(replace(shown.node, scopes=scopes, inputs=inputs, outputs=outputs))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # which has none


def _show(graph: Any, shown: list[Shown]) -> None:
    """Rewrite a graph so that it shows its values: it takes a clock as a further, last input."""
    clock = graph.addInput("modelhealth_clock")
    clock.setType(torch._C.TensorType.get())
    for place, one in enumerate(shown):
        marker = graph.create("prim::Constant", [], 1)
        marker.insertAfter(one.anchor)
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


class FrozenEngine(DeployedEngine):
    """Scripts and traces that were frozen, optimised for inference, or inlined."""

    precedence = 2
    why_not_measured: ClassVar[str] = (
        "the costs of a frozen script are not measured, as it calls no hooks that would tell its "
        "layers apart; the module that it was made of has them"
    )
    why_no_backward: ClassVar[str] = _NO_GRADIENTS
    runtime_class: ClassVar[type[Any]] = InlinedScript

    def reads(self, model: Any) -> bool:
        """Whether `model` is a script without calls of layers."""
        if not isinstance(model, torch.jit.ScriptModule):
            return False
        script: Any = model
        return script._c._has_method("forward") and is_inlined(script)
