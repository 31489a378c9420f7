"""The record of one run's flow, and what is said of it: plain frozen data."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pytest_modelhealth.operations import having

By = Literal["value", "gradient"]

LOSS, OUTPUT = "loss", "output"
"""What the ends of a run are called in questions, unless a layer has that name."""

UNSEEN = "unseen code"
"""The operation of a `Cut` at a tensor that was made where nothing shows it."""


class Kind(StrEnum):
    """What a vertex is."""

    CALL = "call"
    OPERATION = "operation"
    INPUT = "input"
    TARGET = "target"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    UNKNOWN = "unknown"


SOURCES = frozenset(Kind) - {Kind.CALL, Kind.OPERATION}
"""What a run starts from; unknown is where values came from that nothing showed."""


@dataclass(frozen=True, slots=True)
class Vertex:
    """One call of a layer, one operation, or one source.

    Args:
        kind: which of these it is.
        name: name of the layer, the operation (``"add"``, ``"detach"``), the parameter or buffer,
            the place in the batch (``"input 0"``), or the function that made a constant.
        operands: the vertices it was computed from, which all come before it.
        cuts: positions in `operands` by which values come and no gradient goes back.
        call: the innermost call that made it, an index into `Flow.calls`; -1 outside the model.
        live: whether a gradient can come to it.
        line: ``path:line`` of the user's code, ``""`` where it is not known.
        facts: what was read of an operation while it ran: ``sizes`` of what a view took and gave,
            the ``dims`` that a reduction runs along, the ``number`` beside a tensor, the ends of
            the ``sums`` of the weights of a ``softmax`` that a product adds up, how a ``mask``
            came into scores and what weight it left, whether what was written into ``is_held``;
            ``unused``: nothing took what it made, and its operands are not known.
    """

    kind: Kind
    name: str
    operands: tuple[int, ...] = ()
    cuts: frozenset[int] = frozenset()
    call: int = -1
    live: bool = False
    line: str = ""
    facts: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def function(self) -> str:
        """The operation without the number of the output that was taken: ``split[2]``."""
        return self.name.partition("[")[0]

    def has(self, *traits: str) -> bool:
        """Whether this is an operation, or a constant made by one, of one of these traits."""
        is_made = self.kind is Kind.OPERATION or self.kind is Kind.CONSTANT
        return is_made and self.function in having(*traits)

    def passes_gradient(self, position: int) -> bool:
        """Whether a gradient can go back to the operand at a position."""
        return self.live and position not in self.cuts


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer; calls are numbered in the order in which they began.

    Args:
        layer: its name.
        type_name: its class, or the function's name.
        parent: the call that made it; -1 for that of the model.
        last: the last call inside it, itself if there is none.
        inputs: the vertices of the tensors it was called with.
        outputs: the vertices of the tensors it returned.
        line: ``path:line`` of the user's code that made the call.
    """

    layer: str
    type_name: str
    parent: int
    last: int
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    line: str = ""


@dataclass(frozen=True, slots=True)
class Graph:
    """What was recorded of one run.

    Args:
        vertices: in an order in which operands come first.
        calls: in the order in which they began.
        outputs: the vertices of what the model returned.
        loss: the vertex of the loss; ``None`` where there was none.
        notes: where the graph is not exact, and why; empty where it is.
        own_functions: the vertices of the user's own `torch.autograd.Function`, in the order in
            which they ran; of several outputs the first that was taken.
    """

    vertices: tuple[Vertex, ...] = ()
    calls: tuple[Call, ...] = ()
    outputs: tuple[int, ...] = ()
    loss: int | None = None
    notes: tuple[str, ...] = ()
    own_functions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cut:
    """An operation by which values pass and gradients do not.

    Args:
        operation: its name (``"detach"``), or that of the layer that cut; `UNSEEN` where a tensor
            comes in that nothing shows being made, and that may be made of `source`.
        source: the layer or source before it.
        target: the layer after it, ``"output"`` or ``"loss"``.
        line: ``path:line`` of the user's code, where it is known.
    """

    operation: str
    source: str
    target: str
    line: str = ""

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        return f"`{self.operation}`{where}, between {self.source} and {self.target}"


@dataclass(frozen=True)
class Operation:
    """An operation that a layer's own code makes.

    Args:
        name: its function (``"add"``, ``"detach"``), without trailing underscores.
        operands: what it takes: layers and sources, ``"input"`` for what the layer was called
            with, other operations of the same code in backquotes.
        line: ``path:line`` of the user's code, where it is known.
        cuts: whether it passes values and no gradient.
        returned: whether what the layer returns is made of it.
    """

    name: str
    operands: tuple[str, ...] = ()
    line: str = ""
    cuts: bool = False
    returned: bool = True


@dataclass(frozen=True)
class Ending:
    """Where gradients would begin that come to a layer or parameter, and do not.

    Args:
        last: the last, of those that were asked for, that they would come by: what has the same
            last one is lost by the same fault.
        cut: what cuts behind it; ``None`` where it runs without gradients itself, or nothing takes
            what it gives.
    """

    last: str
    cut: Cut | None


def near(text: str) -> str:
    """Return `text` with each path in it as seen from the current folder, where it lies below."""
    return re.sub(rf"(?<![\w./-]){re.escape(str(Path.cwd()))}{re.escape(os.sep)}", "", text)
