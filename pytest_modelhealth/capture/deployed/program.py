"""What a runtime runs: operations, and which of them make up one call of a layer.

A program lists them in one flat row, with the layers around each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby, takewhile
from typing import Any, NamedTuple, TypeVar

import networkx as nx
import torch
from torch import Tensor
from torch.nn import functional

from pytest_modelhealth.capture.step.batch import Inputs


@dataclass(frozen=True, slots=True)
class Operator:
    """An operation of a runtime, where there is no function of torch for it: ``"Gather"``."""

    __name__: str


@cache
def operator(name: str) -> Any:
    """Return the operator of a name: the same one each time."""
    return Operator(name)


_CALLED_BY_METHOD = frozenset({"sigmoid", "tanh"})
"""Functions of `torch.nn.functional` that only call the method of the tensor."""


def activation_called(name: str) -> Callable[..., Any] | None:
    """Return the function of torch that is the activation of a name, if there is one."""
    return getattr(torch if name in _CALLED_BY_METHOD else functional, name, None)


@dataclass(frozen=True, slots=True)
class Scope:
    """A layer around operations.

    Args:
        path: its fully qualified name.
        type_name: qualified name of its class, such as ``torch.nn.modules.conv.Conv2d``; ``""``
            where it is not known.
        call: tells calls of it apart which follow one another.
    """

    path: str
    type_name: str = ""
    call: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """One operation.

    Args:
        scopes: the layers around it, outermost first; the model itself is left out.
        function: the function of torch that it computes, or an `Operator` where that is not known.
        inputs: names of the values that it takes.
        outputs: names of the values that it makes.
        source: ``path:line`` of the user's code that it comes from, ``""`` where that is not known.
        settings: what it is called with besides tensors, by torch's names for it.
    """

    scopes: tuple[Scope, ...]
    function: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """The operations of a model in an order in which they can be run.

    Args:
        type_name: qualified name of the model's class, or what the model is.
        nodes: the operations.
        inputs: names of the values that the batch gives.
        outputs: names of the values that the model returns.
        parameters: the parameters that can be read, by their fully qualified names.
        buffers: the buffers that can be read, likewise.
        training: layers that run in training mode.
        notes: what a reader should know of how it is seen.
    """

    type_name: str
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    training: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


class Ran(NamedTuple):
    """What became of a batch.

    Args:
        program: what ran: all of the program, but for operations on a condition.
        values: the values by name, as far as they are tensors, those of the batch too. None shares
            memory with another that is written to later.
        output: what the model returned.
    """

    program: Program
    values: Mapping[str, Tensor]
    output: Any


class Runtime(ABC):
    """Runs a program outside of torch's modules: one for each kind of model."""

    @property
    @abstractmethod
    def program(self) -> Program:
        """What it runs."""

    @abstractmethod
    def run(self, inputs: Inputs) -> Ran:
        """Run a batch.

        Raises:
            InspectionError: the batch does not fill the model's inputs.
            Exception: whatever the runtime raises.
        """


_T = TypeVar("_T")
_Names = Callable[[_T], Iterable[str]]


def neighbours(
    operations: Sequence[_T],
    inputs: _Names[_T],
    outputs: _Names[_T],
    is_known: Callable[[_T], bool],
) -> list[tuple[list[_T], list[_T]]]:
    """Return for each operation the nearest known ones before and behind it, past all others."""

    def one_side(ordered: Sequence[_T], near: _Names[_T], far: _Names[_T]) -> list[list[_T]]:
        of_value: dict[str, list[_T]] = defaultdict(list)
        found = []
        for one in ordered:
            around = {id(other): other for name in near(one) for other in of_value[name]}
            for name in far(one):
                of_value[name] += [one] if is_known(one) else around.values()
            found.append(list(around.values()))
        return found

    before = one_side(operations, inputs, outputs)
    behind = one_side(operations[::-1], outputs, inputs)[::-1]
    return list(zip(before, behind, strict=True))


def common_scopes(scopes: Sequence[tuple[Scope, ...]]) -> tuple[Scope, ...]:
    """Return the layers that are around all of several operations."""
    levels = zip(*scopes, strict=False)
    return tuple(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Names of functions that return what a layer returns, used or not."""

WHY_MIXED = "the runtime runs its operations mixed with those of other layers"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer.

    Args:
        scope: the layer.
        steps: the operations and calls that it makes, in order.
        inputs: names of the values that come in from outside.
        outputs: names of the values that are used outside.
    """

    scope: Scope
    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def source(self) -> str:
        """The line of the first operation that it makes itself; ``""`` where there is none."""
        return next((step.source for step in self.steps if isinstance(step, Node)), "")


Step = Node | Call


def in_order(groups: Sequence[Sequence[Any]], places: Sequence[int]) -> list[Sequence[Any]] | None:
    """Return groups of operations in an order in which they can run, as near as can be to a given.

    Args:
        groups: operations that run together, each with the names of its `inputs` and `outputs`.
        places: where each group stands.

    Returns:
        ``None`` where two of them need each other.
    """
    maker = {name: at for at, group in enumerate(groups) for one in group for name in one.outputs}
    needs = nx.DiGraph()
    needs.add_nodes_from(range(len(groups)))
    for at, group in enumerate(groups):
        made = {maker[name] for one in group for name in one.inputs if name in maker} - {at}
        needs.add_edges_from((other, at) for other in made)
    try:
        return [groups[at] for at in nx.lexicographical_topological_sort(needs, places.__getitem__)]
    except nx.NetworkXUnfeasible:
        return None


def call_of(program: Program) -> tuple[Call, dict[str, str]]:
    """Return the call of a model, and the layers whose calls cannot be told, and why."""
    nesting = _Nesting(program)
    steps = nesting.steps(program.nodes, 0)
    root = Call(Scope("", program.type_name), steps, program.inputs, program.outputs)
    return root, nesting.mixed


_Group = Sequence[Node]
"""One operation, or all operations of one call of a layer."""


class _Nesting:
    """Puts the operations of a program into calls.

    Args:
        program: the program.
    """

    def __init__(self, program: Program) -> None:
        self.mixed: dict[str, str] = {}
        self._computed = {
            *program.inputs,
            *(name for node in program.nodes for name in node.outputs),
        }
        self._returned = frozenset(program.outputs)
        self._makers = {name: node for node in program.nodes for name in node.outputs}
        self._readers: dict[str, list[Node]] = defaultdict(list)
        for node in program.nodes:
            for name in node.inputs:
                self._readers[name].append(node)

    def steps(self, nodes: _Group, depth: int) -> tuple[Step, ...]:
        """Return the steps of a layer that has `depth` others around it."""
        return tuple(
            self._call(group, depth) if _scope(group[0], depth) else group[0]
            for group in self._groups(nodes, depth)
        )

    def _call(self, nodes: _Group, depth: int) -> Call:
        made = [name for node in nodes for name in node.outputs]
        inside = set(made)
        known = self._computed - inside
        taken = dict.fromkeys(name for node in nodes for name in node.inputs)
        inputs = tuple(name for name in taken if name in known)
        given = tuple(name for name in made if self._is_used(name, inside))
        if not given and inputs:  # without either it is what was left of a call
            given = nodes[-1].outputs
        return Call(nodes[0].scopes[depth], self.steps(nodes, depth + 1), inputs, given)

    def _is_used(self, name: str, inside: set[str]) -> bool:
        """Whether a value is used outside, or came with one that is out of a recurrent layer."""
        node = self._makers[name]
        together = node.outputs if node.function.__name__ in _RECURRENT else (name,)
        return any(
            one in self._returned
            or any(inside.isdisjoint(reader.outputs) for reader in self._readers[one])
            for one in together
        )

    def _groups(self, nodes: _Group, depth: int) -> list[_Group]:
        """Return the operations call by call.

        Equal runs of one layer's operations, with others in between, are several calls of it.
        Unequal ones are one call, if all of it can run together.
        """
        runs = _runs(nodes, depth)
        of_scope: dict[Scope, list[_Group]] = defaultdict(list)
        for run in runs:
            if (scope := _scope(run[0], depth)) is not None:
                of_scope[scope].append(run)
        torn = {
            scope
            for scope, parts in of_scope.items()
            if len({tuple(node.function for node in part) for part in parts}) > 1
        }
        if not torn:
            return runs
        whole = [[node for part in of_scope[scope] for node in part] for scope in torn]
        rest = [run for run in runs if _scope(run[0], depth) not in torn]
        places = {id(node): at for at, node in enumerate(nodes)}
        groups = [*rest, *whole]
        ordered = in_order(groups, [places[id(group[0])] for group in groups])
        if ordered is not None:
            return ordered
        self.mixed |= {scope.path: WHY_MIXED for scope in torn}
        return self._groups([_without(torn, node, depth) for node in nodes], depth)


def _runs(nodes: _Group, depth: int) -> list[_Group]:
    """Return what stands together of one layer, and each operation of none by itself."""
    found: list[_Group] = []
    for scope, group in groupby(nodes, lambda node: _scope(node, depth)):
        run = list(group)
        found += [run] if scope else [[node] for node in run]
    return found


def _scope(node: Node, depth: int) -> Scope | None:
    return node.scopes[depth] if len(node.scopes) > depth else None


def _without(scopes: set[Scope], node: Node, depth: int) -> Node:
    if _scope(node, depth) not in scopes:
        return node
    return replace(node, scopes=(*node.scopes[:depth], *node.scopes[depth + 1 :]))
