"""Finds the lists that TorchScript leaves out of names: it says ``0`` of ``layers.0``.

The parameters that are used in a layer have its whole name. A layer without any lies in the same
list as one that is called next to it and has the number next to its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from pytest_modelhealth.capture.torchscript.reading import Around, Graph, Operation

Path = tuple[str, ...]


@dataclass(eq=False)
class _Sibling:
    """One call of a layer, as far as calls can be told, beside others in the same layer.

    Args:
        around: the layer.
        operations: what it runs.
        lists: the names that TorchScript leaves out before its own; ``None`` where not known.
    """

    around: Around
    operations: list[Operation]
    lists: Path | None = None


def paths(graph: Graph, operations: Sequence[Operation]) -> dict[Operation, list[str]]:
    """Return the fully qualified name of each layer around each operation, outermost first."""
    finder = _Finder(graph, _beside(operations))
    finder.enter([one for one in operations if not one.made_up], 0, ())
    return finder.found


def _beside(operations: Sequence[Operation]) -> dict[Operation, list[Operation]]:
    """Return the operations next to each that an optimisation put there, which have no layer."""
    beside: dict[Operation, list[Operation]] = defaultdict(list)
    before: list[Operation] = []
    last: Operation | None = None
    for operation in operations:
        if not operation.made_up:
            beside[operation] += before
            before, last = [], operation
            continue
        before.append(operation)
        if last is not None:
            beside[last].append(operation)
    return beside


class _Finder:
    def __init__(self, graph: Graph, beside: Mapping[Operation, Sequence[Operation]]) -> None:
        self.found: dict[Operation, list[str]] = {}
        self._graph = graph
        self._beside = beside

    def enter(self, operations: Sequence[Operation], depth: int, path: Path) -> None:
        """Name the layers in a layer that has `depth` layers around its code."""
        siblings = []
        for around, run in groupby(operations, lambda one: one.around[depth : depth + 1]):
            if around:
                siblings.append(_Sibling(around[0], list(run)))
            else:
                for operation in run:
                    self.found.setdefault(operation, [])
        for sibling in siblings:
            sibling.lists = self._by_parameters(sibling, depth, path)
        for place, sibling in enumerate(siblings):
            if sibling.lists is None:
                sibling.lists = _by_neighbours(siblings, place)
        for sibling in siblings:
            inner = (*path, *(sibling.lists or ()), sibling.around.name)
            for operation in sibling.operations:
                self.found.setdefault(operation, []).append(".".join(inner))
            self.enter(sibling.operations, depth + 1, inner)

    def _by_parameters(self, sibling: _Sibling, depth: int, path: Path) -> Path | None:
        """Return what the names of the parameters that a layer uses say most often.

        Equal ones of several layers are one constant, which has the name of any of them.
        """
        votes: Counter[Path | None] = Counter()
        for operation in sibling.operations:
            names = [one.name for one in operation.around[depth:]]
            votes.update(_left_out(names, whole) for whole in self._owners(operation, path))
            for hint in self._beside.get(operation, ()):
                inside = [w for w in self._owners(hint, path) if names[0] in w[:-1]]
                votes.update(whole[: whole.index(names[0])] for whole in inside)
        del votes[None]
        return votes.most_common(1)[0][0] if votes else self._by_lost(sibling, path)

    def _by_lost(self, sibling: _Sibling, path: Path) -> Path | None:
        """Return the list of a layer next to this one that an optimisation put operations for."""
        for operation in sibling.operations:
            for hint in self._beside.get(operation, ()):
                for owner in self._owners(hint, path):
                    if _are_neighbours(owner[-1:], sibling.around.name):
                        return owner[:-1]
        return None

    def _owners(self, operation: Operation, path: Path) -> Iterator[Path]:
        """Yield which layers in the one at `path` the parameters that an operation takes are of."""
        for value in operation.inputs:
            full = self._graph.paths.get(value.name)
            owner = tuple(full.split("."))[:-1] if full else ()
            is_inside = bool(owner) and owner[: len(path)] == path
            if is_inside and not self._graph.may_be_several(value.name):
                yield owner[len(path) :]


def _are_neighbours(names: Path, other: str) -> bool:
    """Whether a name is that of the layer before or after another in a list."""
    numbers = [int(name) for name in (*names, other) if name.isdigit()]
    return len(numbers) == len(names) + 1 == 2 and abs(numbers[0] - numbers[1]) == 1


def _left_out(names: Sequence[str], path: Path) -> Path | None:
    """Return what stands in a path before the first of some names; ``None`` if they do not fit.

    The last name must be the last of the path.
    """
    if not names or names[-1:] != list(path[-1:]):
        return None
    end = len(path)
    for name in reversed(names):
        while end and path[end - 1] != name:
            end -= 1
        if not end:
            return None
        end -= 1
    return path[:end]


def _by_neighbours(siblings: Sequence[_Sibling], place: int) -> Path | None:
    """Return the list of the layer that is called before or after this one, and numbered so."""
    name = siblings[place].around.name
    if not name.isdigit():
        return ()
    known = {s.lists for s in siblings if s.lists and s.around.name.isdigit()}
    for step in (-1, 1):
        at = place + step
        is_next = 0 <= at < len(siblings) and siblings[at].around.name == str(int(name) + step)
        if is_next and siblings[at].lists:
            return siblings[at].lists
    return known.pop() if len(known) == 1 else ()
