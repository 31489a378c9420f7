"""Puts together the nodes of an ONNX graph that are parts of one operation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from pytest_modelhealth.capture.deployed.calls import in_order
from pytest_modelhealth.capture.deployed.program import Node, Scope, operator
from pytest_modelhealth.capture.graph_settings import merged
from pytest_modelhealth.capture.onnx_graphs.nodes import Read
from pytest_modelhealth.capture.onnx_graphs.operators import function_of, is_rounding
from pytest_modelhealth.capture.onnx_graphs.settings import settings_of, settings_of_call

Classes = Mapping[str, str]
"""Classes of layers by their names."""
Numbers = Callable[[str], float | None]


def joined(
    reads: Sequence[Read], outputs: Iterable[str], classes: Classes, number: Numbers
) -> Iterator[Node]:
    """Yield the operations of the exported program, of which a node may be a part only.

    Args:
        reads: the nodes.
        outputs: names of what the model returns.
        classes: the classes of layers that do not say theirs.
        number: returns the constant number of a name, where it is one.
    """
    readings = Counter(name for read in reads for name in read.node.input)
    readings.update(outputs)
    values = _Values(reads)
    for parts in _operations(reads):
        first = next((part for part in parts if not is_rounding(part.node.op_type)), parts[0])
        made = [name for part in parts for name in part.node.output if name]
        inside = Counter(name for part in parts for name in part.node.input)
        used = tuple(name for name in made if readings[name] > inside[name])
        function = _function(first)
        said = settings_of_call(first.call, function)
        yield Node(
            scopes=tuple(
                s if s.type_name else Scope(s.path, classes.get(s.path, "")) for s in first.scopes
            ),
            function=function,
            inputs=tuple(values.given(parts)),
            outputs=used or tuple(filter(None, parts[-1].node.output)),
            source=first.source,
            settings={**said, **merged(settings_of(part.node, number) for part in parts)},
        )


class _Values:
    """The values that the nodes of a graph give to each other, by name."""

    def __init__(self, reads: Iterable[Read]) -> None:
        self._computed: dict[str, int] = {}
        self._rounded: dict[str, str] = {}  # what each was before it was brought to eight bits
        self._whole: dict[
            str, str
        ] = {}  # what integers and the scale that the batch decides are of
        for at, read in enumerate(reads):
            self._computed.update(dict.fromkeys(read.node.output, at))
            if is_rounding(read.node.op_type):
                self._rounded[read.node.output[0]] = self._before(read.node.input[0])
            elif read.node.op_type == "DynamicQuantizeLinear":
                self._whole.update(dict.fromkeys(read.node.output, read.node.input[0]))

    def _before(self, name: str) -> str:
        return self._rounded.get(name, name)

    def given(self, parts: Sequence[Read]) -> list[str]:
        """Return what the nodes of an operation take, in the order of its arguments."""
        made = {name for part in parts for name in part.node.output}
        taken = dict.fromkeys(name for part in parts for name in part.node.input if name)
        names = dict.fromkeys(self._whole.get(name, name) for name in taken if name not in made)
        places = {name: place for place, name in enumerate(parts[0].arguments)}
        known = {name: places.get(self._before(name)) for name in names}
        # values that an optimisation gave other names stand where arguments are missing
        unknown = [name for name in known if self._before(name) in self._computed]
        unknown = [name for name in unknown if known[name] is None]
        unknown.sort(key=lambda name: self._computed[self._before(name)])
        missing = sorted(set(places.values()).difference(known.values()))
        known.update(zip(unknown, missing, strict=False))
        return sorted(names, key=lambda name: (known[name] is None, known[name]))


def _operations(reads: Sequence[Read]) -> Iterable[Sequence[Read]]:
    """Return the parts of each operation together, which a quantiser sorts among others.

    Where they cannot run together, those are that stand together.
    """
    keys = [
        (read.scopes, read.operation) if read.operation else at for at, read in enumerate(reads)
    ]
    whole: dict[Any, list[Read]] = defaultdict(list)
    for key, read in zip(keys, reads, strict=True):
        whole[key].append(read)
    places = {key: at for at, key in reversed(list(enumerate(keys)))}
    ordered = in_order(list(whole.values()), [places[key] for key in whole])
    if ordered is not None:
        return ordered
    runs = groupby(range(len(reads)), keys.__getitem__)
    return [[reads[at] for at in run] for _, run in runs]


def _function(read: Read) -> Callable[..., Any]:
    """Return the function of torch that an operation is, or an operator by the name of the node."""
    found: Any = torch.ops
    for name in read.target.split(".") if read.target else ():
        found = getattr(found, name, None)
    if read.target and callable(found):
        return found  # type: ignore[no-any-return]
    return function_of(read.node.op_type) or operator(read.node.op_type)
