"""TorchScript that was frozen or inlined: one graph, whose operations are named.

Freezing puts the code of all layers into one graph and turns parameters into constants; which layer
an operation came from is lost. A copy of the graph runs, and shows every tensor.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
_Log = list[tuple[int, list[Tensor], list[Tensor]]]
"""Places that were come by, the tensors that they showed, and copies of those written to later."""
_logs: list[tuple[_Log, list[Shown]]] = []


@torch.library.custom_op("modelhealth::see_values", mutates_args=("clock",))
def see_values(values: list[Tensor], clock: Tensor, place: int) -> None:
    """See tensors; the write to `clock`, any integer tensor, keeps the call in its place."""
    with torch._C.DisableTorchFunction():  # no function of the model's
        clock.add_(1)
        if _logs:
            log, shown = _logs[-1]
            log.append((place, values, [*map(_kept, values, shown[place].written)]))


def _kept(value: Tensor, is_written: bool) -> Tensor:
    if value.layout == torch._mkldnn:  # type: ignore[attr-defined]
        return value.to_dense()
    return value.detach().clone() if is_written else value


@contextmanager
def _recording(shown: list[Shown]) -> Iterator[_Log]:
    """Collect what a graph shows; runs in several threads wait for one another."""
    with _lock:
        _logs.append(([], shown))
        try:
            yield _logs[-1][0]
        finally:
            _logs.pop()


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
        self._shown = self._read.shown
        _show(graph, self._shown)
        self._function = torch._C._create_function_from_graph("forward", graph)

    @cached_property
    def program(self) -> Program:
        """All that the graph may run; what feeds what is known of a run."""
        is_frozen = next(self._script.parameters(), None) is None
        return Program(
            type_name=_MANGLED.sub("", self._script._c._type().qualified_name()),
            nodes=tuple(shown.node for shown in self._shown if shown.node is not None),
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
        retold = _Retold()
        for name, argument, is_written in zip(
            self._names, given, self._read.written_inputs, strict=True
        ):
            for at, tensor in enumerate(find_tensors(argument)):
                own = name if tensor is argument else f"{name}[{at}]"
                retold.add(own, tensor, _kept(tensor, is_written))
        clock = torch.zeros((), dtype=torch.int64)
        with _recording(self._shown) as log, torch.no_grad(), optimized_execution(False):
            output = self._function(copy.deepcopy(self._script), *given, clock)
        with torch._C.DisableTorchFunction():
            for place, tensors, copies in log:
                retold.see(self._shown[place], tensors, copies)
        outputs = tuple(
            name for tensor in find_tensors(output) if (name := retold.known.get(id(tensor)))
        )
        program = replace(
            self.program,
            nodes=tuple(retold.nodes),
            inputs=tuple(retold.values),
            outputs=outputs,
        )
        return Ran(program, retold.values, output)


class _Retold:
    """What one run showed.

    Attributes:
        nodes: the operations in the order in which they ran.
        values: what they computed, by name.
        known: the names of tensors by their ids, while the log holds them.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.values: dict[str, Tensor] = {}
        self.known: dict[int, str] = {}
        self._now: dict[str, str] = {}
        self._calls = 0

    def add(self, value: str, tensor: Tensor, copied: Tensor) -> str:
        """Take a tensor that is what a value of the graph is now."""
        name, number = value, 0
        while name in self.values:
            number += 1
            name = f"{value}~{number}"
        self.values[name] = copied
        self._now[value] = self.known[id(tensor)] = name
        return name

    def see(self, shown: Shown, tensors: list[Tensor], copies: list[Tensor]) -> None:
        """Take what was shown at one place."""
        given = tuple(dict.fromkeys(self._now[n] for n in shown.inputs if n in self._now))
        made = []
        own = len(list(shown.anchor.outputs())) if shown.node is not None else 0
        for at, (value, tensor, copied) in enumerate(
            zip(shown.values, tensors, copies, strict=True)
        ):
            name, before = value.debugName(), self.known.get(id(tensor))
            is_written = shown.writes and (
                before is None or at < own or not _are_equal(self.values[before], copied)
            )
            if before is not None and not is_written:
                self._now[name] = before
            else:
                made.append(self.add(name, tensor, copied))
        if made and shown.node is not None:
            self._calls += shown.begins
            scopes = tuple(replace(scope, call=self._calls) for scope in shown.node.scopes)
            self.nodes.append(replace(shown.node, scopes=scopes, inputs=given, outputs=tuple(made)))


def _are_equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x, y)


def _show(graph: Any, shown: list[Shown]) -> None:
    """Rewrite a graph so that it shows its values: it takes a clock as a further, last input."""
    clock = graph.addInput("modelhealth_clock")
    clock.setType(torch._C.TensorType.get())
    for place, one in enumerate(shown):
        if hasattr(one.anchor, "returnNode"):  # a block
            graph.setInsertPoint(next(iter(one.anchor.nodes()), one.anchor.returnNode()))
        else:
            marker = graph.create("prim::Constant", [], 1)
            marker.insertAfter(one.anchor)
            marker.output().setType(torch._C.NoneType.get())
            graph.setInsertPoint(marker)
        values = graph.create("prim::ListConstruct", one.values, 1)
        values.output().setType(torch._C.ListType(torch._C.TensorType.get()))
        graph.insertNode(values)
        number = graph.insertConstant(place)
        graph.insertNode(
            graph.create("modelhealth::see_values", [values.output(), clock, number], 0)
        )


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
