"""What a runtime runs: operations, the layers around them, the values they take and make."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar

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
