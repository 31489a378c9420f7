"""Flat graphs of exported programs: run node by node, their layers by the metadata."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from pytest_modelhealth.capture.deployed.model import DeployedEngine
from pytest_modelhealth.capture.deployed.program import Operation, Program, Ran, Runtime, Scope
from pytest_modelhealth.capture.observing.graphs import source_line
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.guard import Guard
from pytest_modelhealth.capture.step.state import State
from pytest_modelhealth.statistics.dense import quantised, unseen

_NAMESPACE = "quantized_decomposed"
_QUANTISED = {torch.int8: torch.qint8, torch.uint8: torch.quint8}
_NOTES = {
    True: "a PT2E graph, run node by node: a tensor that it quantises is shown with its scale and "
    "zero point; no gradient flows through it",
    False: "a flat graph, run node by node without gradients: the ExportedProgram that it is of "
    "has them",
}


def _quantises(model: fx.GraphModule) -> bool:
    graph = vars(model).get("_graph")
    return graph is not None and any(map(_is_quantising, graph.nodes))


def _is_quantising(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "namespace", "") == _NAMESPACE


class GraphRuntime(Runtime):
    """Runs a graph of an exported program, and keeps what every node gives."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.quantises = _quantises(module)
        self._module = module
        self._nodes = list(module.graph.nodes)
        self._constant: set[fx.Node] = set()  # those that no batch has a part in
        for node in self._nodes:
            given = node.all_input_nodes if node.op == "call_function" else ()
            if node.op == "get_attr" or (given and self._constant.issuperset(given)):
                self._constant.add(node)

    @cached_property
    def program(self) -> Program:
        """What it runs."""
        stacks = ((node.meta.get("nn_module_stack") or {}).values() for node in self._nodes)
        roots = (_class_name(kind) for stack in stacks for path, kind in stack if not path)
        parameters, buffers = self._state()
        return Program(
            type_name=next(roots, "torch.fx.GraphModule"),
            operations=[
                Operation(
                    name=getattr(node.target, "__name__", node.name).partition(".")[0].strip("_"),
                    scopes=_scopes(node),
                    inputs=tuple(n.name for n in node.all_input_nodes if n not in self._constant),
                    outputs=(node.name,),
                    rounds=_is_quantising(node),
                    source=source_line(node.meta.get("stack_trace")),
                    options={
                        name: value
                        for name, value in _arguments(node).items()
                        if type(value) in (bool, int, float, str)
                    },
                )
                for node in self._nodes
                if node.op == "call_function" and node not in self._constant
            ],
            parameters=parameters,
            buffers=buffers,
            rounds=self.quantises,
            note=_NOTES[self.quantises],
        )

    def run(self, inputs: Inputs) -> Ran:
        """Run a batch; a tensor that comes out of rounding is shown as a quantised one."""
        watched = _Watched(self._module)
        names = getattr(self._module.graph._codegen, "pytree_info", None)
        order = names.orig_args if names is not None else []
        given = sorted(inputs.kwargs, key=lambda name: order.index(name) if name in order else 0)
        # unseen: the functions that it calls; a graph may write to buffers of the user's model
        with unseen(), Guard(State(self._module), numbers=False):
            output = watched.run(*inputs.args, *(inputs.kwargs[name] for name in given))
        return Ran(
            operations=self.program.operations,
            inputs=[node.name for node in self._nodes if node.op == "placeholder"],
            outputs=[n.name for n in self._nodes[-1].all_input_nodes],
            values=watched.values,
            output=output,
        )

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the parameters and buffers of layers: what their operations take that is given.

        A parameter that was quantised has lost its name: it takes that of the operation's argument.
        """
        watched = _Watched(self._module)
        found: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        for node in self._nodes:
            scopes = _scopes(node)
            path = scopes[-1].path if scopes else ""
            is_looked_at = path and node not in self._constant and not _is_quantising(node)
            for argument, given in _arguments(node).items() if is_looked_at else ():
                if not isinstance(given, fx.Node) or given not in self._constant:
                    continue
                with unseen():
                    watched.evaluate(given)
                own = str(given.target).removeprefix(f"{path}.")
                name = own if given.op == "get_attr" and "." not in own else argument
                if given.name in watched.values:
                    is_buffer = name.startswith("running_")
                    found[is_buffer].setdefault(f"{path}.{name}", watched.values[given.name])
        return found


class _Watched(fx.Interpreter):
    """Runs a graph and keeps a copy of each tensor that it computes, by the name of its node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and keep what it gives."""
        result = super().run_node(n)
        if isinstance(result, Tensor):
            quantised = self._quantised(n) if _is_quantising(n) else None
            # what the graph holds is the user's, who may write to it between two runs
            own = result.detach() if n.op == "get_attr" else result.detach().clone()
            self.values[n.name] = own if quantised is None else quantised
        return result

    def evaluate(self, node: fx.Node) -> None:
        """Run a node that no batch has a part in, after those that it needs."""
        for given in node.all_input_nodes:
            if given not in self.env:
                self.evaluate(given)
        if node not in self.env:
            self.env[node] = self.run_node(node)

    def _quantised(self, node: fx.Node) -> Tensor | None:
        """Return what a node brought back from whole numbers as a quantised tensor of torch."""
        name = getattr(node.target, "__name__", "")
        if not name.startswith(("dequantize_per_tensor", "dequantize_per_channel")):
            return None
        args, _ = self.fetch_args_kwargs_from_env(node)
        whole, scale, zero_point = args[:3]
        if whole.dtype not in _QUANTISED:
            return None
        axis = None if name.startswith("dequantize_per_tensor") else args[3]
        return quantised(whole, scale, zero_point, axis)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return what an operation is called with by the names of its arguments, left out or not."""
    declared = getattr(getattr(node.target, "_schema", None), "arguments", ())
    values = {one.name: one.default_value for one in declared if one.has_default_value()}
    values |= {one.name: value for one, value in zip(declared, node.args, strict=False)}
    return values | node.kwargs


def _scopes(node: fx.Node) -> tuple[Scope, ...] | None:
    """Return the layers around a node; ``None`` for what quantisation put in."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    return tuple(
        Scope(path, _class_name(kind), int(key.rpartition("@")[2] if "@" in key else 0))
        for key, (path, kind) in stack.items()
        if path
    )


def _class_name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


class FlatGraphEngine(DeployedEngine):
    """What `ExportedProgram.module()` and `convert_pt2e` return: no hook would fire inside."""

    runtime_class: ClassVar[type[Any]] = GraphRuntime

    def reads(self, model: Any) -> bool:
        """Whether `model` is one flat graph of an exported program."""
        if not isinstance(model, fx.GraphModule):
            return False
        bases = {base.__name__ for base in type(model).__mro__}
        return "_StatefulGraphModule" in bases or _quantises(model)
