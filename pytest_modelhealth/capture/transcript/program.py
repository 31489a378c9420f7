"""What a runtime runs: operations, the layers around them, the values they take and make."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pytest_modelhealth.capture.step.batch import Inputs


@dataclass(frozen=True, slots=True)
class Scope:
    """A layer around operations.

    Args:
        path: its fully qualified name.
        type_name: qualified name of its class, such as ``torch.nn.modules.conv.Conv2d``; ``""``
            where it is not known.
        call: numbers that tell calls of it apart which follow one another.
    """

    path: str
    type_name: str = ""
    call: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """One operation.

    Args:
        scopes: the layers around it, outermost first; the model itself is left out.
        function: the function of torch that it computes, or an `Operator` where that is not known.
        inputs: names of the values that it takes, those of parameters and constants too.
        outputs: names of the values that it makes.
        source: ``path:line`` of the user's code that it came from, ``""`` where it is not known.
        settings: what it is called with besides tensors, by torch's names for it.
    """

    scopes: tuple[Scope, ...]
    function: Callable[..., Any]
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
        opaque: layers of which nothing can be seen, and why.
        training: layers that run in training mode.
    """

    type_name: str
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    opaque: Mapping[str, str] = field(default_factory=dict)
    training: frozenset[str] = frozenset()


class Runtime(ABC):
    """Runs a program outside of torch's modules."""

    @property
    @abstractmethod
    def program(self) -> Program:
        """What it runs."""

    @property
    def ran(self) -> Program:
        """What the last batch ran of it: all, where nothing in it runs on a condition."""
        return self.program

    @abstractmethod
    def execute(self, inputs: Inputs) -> tuple[Mapping[str, Tensor], Any]:
        """Run a batch.

        Returns:
            The values by name, as far as they are tensors, those of the batch too, and what the
            model returns. No value may share memory with another that is written to later.

        Raises:
            InspectionError: the batch does not fill the model's inputs.
            Exception: whatever the runtime raises.
        """
