"""Which operations make up one call of a layer: a program lists them in one flat row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol, TypeVar

import networkx as nx

from pytest_modelhealth.capture.deployed.program import Node, Program, Scope

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


class _Step(Protocol):
    @property
    def inputs(self) -> Sequence[str]: ...
    @property
    def outputs(self) -> Sequence[str]: ...


_S = TypeVar("_S", bound=_Step)


def in_order(groups: Sequence[Sequence[_S]], places: Sequence[int]) -> list[Sequence[_S]] | None:
    """Return groups of operations in an order in which they can run, as near as can be to a given.

    Args:
        groups: operations that run together.
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
        known = self._computed.difference(made)
        taken = dict.fromkeys(name for node in nodes for name in node.inputs)
        inputs = tuple(name for name in taken if name in known)
        given = self._outputs(made, nodes[0].scopes[depth])
        if not given and inputs:  # without either it is what was left of a call
            given = nodes[-1].outputs
        return Call(nodes[0].scopes[depth], self.steps(nodes, depth + 1), inputs, given)

    def _outputs(self, made: list[str], scope: Scope) -> tuple[str, ...]:
        """Return the values that a call gave, of those that it made.

        They are used outside. So may be what every layer of a class computes alike, of a mask say,
        where a runtime computes it in the first of them alone: this is none.
        """
        inside = set(made)
        used = [name for name in made if self._is_used(name, inside)]
        alike = [name for name in used if self._is_alike(name, scope, inside)]
        return tuple(name for name in used if name not in alike) or tuple(used)

    def _is_alike(self, name: str, scope: Scope, inside: set[str]) -> bool:
        """Whether a value may be what every layer of a class computes."""
        readers = self._outside(name, inside)
        if name in self._returned or not readers or self._takes_parameters(name, inside):
            return False
        return all(_is_in_another(node, scope) for node in readers)

    def _is_used(self, name: str, inside: set[str]) -> bool:
        """Whether a value is used outside, or came with one that is out of a recurrent layer."""
        node = self._makers[name]
        together = node.outputs if node.function.__name__ in _RECURRENT else (name,)
        return any(one in self._returned or self._outside(one, inside) for one in together)

    def _outside(self, name: str, inside: set[str]) -> list[Node]:
        """Return the operations that read a value, but for those of the call that made it."""
        return [node for node in self._readers[name] if inside.isdisjoint(node.outputs)]

    def _takes_parameters(self, name: str, inside: set[str]) -> bool:
        """Whether a value that a call made depends on parameters that are read in it."""
        waiting, seen = [name], set()
        while waiting:
            node = self._makers[waiting.pop()]
            if any(other not in self._computed for other in node.inputs):
                return True
            new = [other for other in node.inputs if other in inside and other not in seen]
            seen.update(new)
            waiting += new
        return False

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
        torn = {scope for scope, parts in of_scope.items() if len(set(map(_functions, parts))) > 1}
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


def _is_in_another(node: Node, scope: Scope) -> bool:
    """Whether an operation lies in another layer of the same class."""
    return bool(scope.type_name) and any(
        other.type_name == scope.type_name and other.path != scope.path for other in node.scopes
    )


def _runs(nodes: _Group, depth: int) -> list[_Group]:
    """Return what stands together of one layer, and each operation of none by itself."""
    found: list[_Group] = []
    for scope, group in groupby(nodes, lambda node: _scope(node, depth)):
        run = list(group)
        found += [run] if scope else [[node] for node in run]
    return found


def _scope(node: Node, depth: int) -> Scope | None:
    return node.scopes[depth] if len(node.scopes) > depth else None


def _functions(nodes: _Group) -> tuple[Any, ...]:
    return tuple(node.function for node in nodes)


def _without(scopes: set[Scope], node: Node, depth: int) -> Node:
    if _scope(node, depth) not in scopes:
        return node
    return replace(node, scopes=(*node.scopes[:depth], *node.scopes[depth + 1 :]))
