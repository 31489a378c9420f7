"""What a runtime runs, as named values, and which of them are one call of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.layers import FUNCTIONAL_LAYERS

_FUNCTIONS = frozenset(FUNCTIONAL_LAYERS.values())


class Scope(NamedTuple):
    """A layer around operations."""

    path: str  # its fully qualified name
    type_name: str = ""  # qualified name of its class; ``""`` where it is not known
    call: int = 0  # tells calls apart where the runtime does


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation."""

    name: str  # what it computes, as torch calls it where that is known: ``"gelu"``
    # the layers around it, outermost first, without the model; ``None`` where nothing says which
    # they are
    scopes: tuple[Scope, ...] | None
    inputs: tuple[str, ...]  # names of the values that it takes
    outputs: tuple[str, ...]  # names of the values that it makes
    rounds: bool = False  # whether what it makes is what it takes, rounded
    # ``path:line`` of the user's code that it comes from, ``""`` where that is not known
    source: str = ""
    # what it is called with besides tensors, by torch's names for it
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """What is known of a model before it runs."""

    type_name: str  # qualified name of the model's class, or what the model is
    operations: Sequence[Operation] = ()  # the operations that it may run
    # the classes of further layers, by their names
    layers: Mapping[str, str] = field(default_factory=dict)
    # the parameters that can be read, by their fully qualified names
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    # the buffers that can be read, likewise
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    rounds: bool = False  # whether it computes with quantised numbers
    names_layers: bool = True  # whether its layers have the names of the model that it was made of
    unlisted: str = ""  # why nothing inside it can be seen, ``""`` where it can
    note: str = ""  # what a reader should know of how it is seen


class Ran(NamedTuple):
    """What became of a batch."""

    operations: Sequence[Operation]  # what ran, in order
    inputs: Sequence[str]  # names of the values that the batch gave
    outputs: Sequence[str]  # names of the values that were returned
    # the values by name, as far as they are tensors. None shares memory with another that is
    # written to later
    values: Mapping[str, Tensor]
    output: Any  # what the model returned


class Runtime(ABC):
    """Runs a program outside of torch's modules: one for each kind of model."""

    @property
    @abstractmethod
    def program(self) -> Program:
        """What it runs."""

    @abstractmethod
    def run(self, inputs: Inputs) -> Ran:
        """Run a batch; an `InspectionError` says that it does not fill the model's inputs."""


class Call(NamedTuple):
    """One call of a layer, or of a function that counts as one."""

    layer: str  # name of the layer, or of that which calls the function
    depth: int  # how many layers are around it
    first: int  # place of its first operation
    last: int  # place of its last operation
    # names of the values that come in from outside; none where that is not known
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]  # names of the values that are used outside
    function: str = ""  # what the function computes, ``""`` for a layer
    number: int = 0  # how many calls of the function the same call of the layer made before


def calls_of(ran: Ran) -> list[Call]:
    """Return the calls of layers that a run made."""
    calls = _Calls(ran)
    return list(calls.inside(calls.placed, "", 0))


class _Calls:
    """Which operations are one call of a layer.

    A value that was rounded stands for what it was before. What computes with constants alone is
    left out, as are operations that no layer is known of, which optimisers put in: what they give
    is not known to be what a layer takes in the model that was deployed.
    """

    def __init__(self, ran: Ran) -> None:
        self._operations = ran.operations
        self._scopes = [one.scopes or () for one in ran.operations]
        # the place of what made each value; the batch gives those that nothing made
        self._makers: dict[str, int | None] = dict.fromkeys(ran.inputs)
        self._before: dict[str, str] = {}  # what each value was before it was rounded
        self._rounded: dict[str, str] = {}  # and what it became
        self._readers: dict[str, list[int]] = defaultdict(list)
        self.placed: list[int] = []
        for at, one in enumerate(ran.operations):
            taken = [name for name in one.inputs if name in self._makers]
            if not taken and (one.scopes is None or one.rounds):
                continue
            if one.scopes is not None:
                self.placed.append(at)
            for name in taken:
                self._readers[self._origin(name)].append(at)
            if one.rounds:
                self._before[one.outputs[0]] = self._origin(taken[0])
                self._rounded[self._origin(taken[0])] = one.outputs[0]
            self._makers |= dict.fromkeys(one.outputs, at)
        self._returned = set(map(self._origin, ran.outputs))

    def _origin(self, name: str) -> str:
        return self._before.get(name, name)

    def inside(self, places: Sequence[int], around: str, depth: int) -> Iterator[Call]:
        """Yield the calls that one call of a layer makes, which has `depth` others around it."""
        of_scope: dict[Scope, list[list[int]]] = {}
        counts = Counter[str]()
        previous = None
        for at in places:
            one, scopes = self._operations[at], self._scopes[at]
            scope = scopes[depth] if len(scopes) > depth else None
            if scope is not None:
                runs = of_scope.setdefault(scope, [])
                if scope != previous:
                    runs.append([])
                runs[-1].append(at)
            elif one.name in _FUNCTIONS and not (
                scopes and scopes[-1].type_name.startswith("torch.")
            ):
                number, inputs = counts[one.name], self._taken([at])
                yield Call(around, depth, at, at, inputs, one.outputs, one.name, number)
                counts[one.name] += 1
            previous = scope
        for scope, runs in of_scope.items():
            for call in self._told_apart(scope, runs, depth + 1):
                yield self._call(scope, call, depth)
                yield from self.inside(call, scope.path, depth + 1)

    def _told_apart(
        self, scope: Scope, runs: Sequence[list[int]], depth: int
    ) -> Iterator[list[int]]:
        """Yield the operations of each call.

        Equal runs of a layer's operations with others in between are several calls, unequal ones
        are one that was interrupted. A run that repeats itself is several calls, but where the code
        of the user's own layer may do one thing twice.
        """

        def written(run: list[int]) -> list[tuple[tuple[Scope, ...], str]]:
            return [(self._scopes[at][depth:], self._operations[at].name) for at in run]

        if any(written(run) != written(runs[0]) for run in runs):
            runs = [[at for run in runs for at in run]]
        for run in runs:
            whole, size = written(run), len(run)
            if scope.type_name.startswith("torch.") or all(below for below, _ in whole):
                divisors = (n for n in range(1, size + 1) if size % n == 0)
                size = next(n for n in divisors if whole[:n] * (size // n) == whole)
            yield from (run[at : at + size] for at in range(0, len(run), size))

    def _call(self, scope: Scope, places: list[int], depth: int) -> Call:
        inputs, operations = self._taken(places), [self._operations[at] for at in places]
        inside = set(places)

        def is_used(name: str) -> bool:
            return name in self._returned or any(
                at not in inside and self._operations[at].scopes is not None
                for at in self._readers[name]
            )

        made = [name for one in operations for name in one.outputs]
        outputs = tuple(name for name in made if is_used(self._origin(name)))
        last = operations[-1].outputs
        if any(len(self._scopes[at]) > depth + 1 for at in places):
            # rounding may stand for an activation that ended a layer with others in it; where
            # operations of no known layer read what it gives last, it may go on with these
            readers = (self._operations[at] for name in last for at in self._readers[name])
            goes_on = any(one.scopes is None and not one.rounds for one in readers)
            is_ended = not goes_on or any(name in outputs for name in last)
            outputs = tuple(self._rounded.get(name, name) for name in outputs if is_ended)
        elif not outputs and (inputs or scope.type_name.startswith("torch.")):
            outputs = last  # what reads it lies in no layer that is known
        return Call(scope.path, depth, places[0], places[-1], inputs, outputs)

    def _taken(self, places: Sequence[int]) -> tuple[str, ...]:
        """Return what operations take from outside; nothing where that is no layer's output."""
        made = {name for at in places for name in self._operations[at].outputs}
        names = dict.fromkeys(name for at in places for name in self._operations[at].inputs)
        taken = [n for n in names if n in self._makers and self._origin(n) not in made]
        makers = [self._makers[self._origin(name)] for name in taken]
        is_known = all(at is None or self._operations[at].scopes is not None for at in makers)
        return tuple(taken) if is_known else ()
