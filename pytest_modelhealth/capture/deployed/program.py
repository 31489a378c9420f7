"""What a runtime runs: operations, the layers around them, the values they take and make."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

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
