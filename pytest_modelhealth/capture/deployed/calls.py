"""Which operations make up one call of a layer: a program lists them in one flat row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

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
