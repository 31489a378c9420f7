"""Reads facts of operations while they run: sizes, numbers, and what weights of a softmax sum to.

A fact is plain data, or a tensor of a few numbers that is read when the graph is made, so that
nothing waits for a device; no tensor of the model's is held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import KnownTensors, version
from pytest_modelhealth.operations import having

Facts = dict[str, Any]
Reader = Callable[["FactReader", tuple[Any, ...], Mapping[str, Any], Any], Facts]

_NUMBERS = (int, float)
_MOST_WEIGHTS = 1 << 24
"""Sums of more weights are not taken: each is one more pass over them."""


class FactReader:
    """Reads facts; knows which tensors hold the weights of a softmax, in another layout maybe."""

    def __init__(self) -> None:
        # by the share that a dropout zeroed
        self._weights = KnownTensors[float]()
        self._has_weights = False

    def read(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> Facts | None:
        """Return the facts of a call of a function; ``None`` where there are none."""
        if self._has_weights:
            self._pass_on(name, args, kwargs, result)
        reader = _reader_of(name)
        return None if reader is None else reader(self, args, kwargs, result) or None

    def add_weights(self, tensor: Any, dropped: float = 0.0) -> None:
        """Take what a softmax made, or what was made of that by layout, mask or dropout."""
        if isinstance(tensor, Tensor):
            self._has_weights = True
            self._weights.put(tensor, version(tensor), dropped)

    def dropped(self, tensor: Any) -> float | None:
        """Return which share of weights of a softmax a dropout zeroed; ``None``: they are none."""
        if not (self._has_weights and isinstance(tensor, Tensor)):
            return None
        return self._weights.get(tensor, version(tensor))

    def _pass_on(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        dropped = self.dropped(args[0]) if args else None
        if dropped is None or result is args[0]:
            return
        if name in having("dropout"):
            share = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            is_on = kwargs.get("training", args[2] if len(args) > 2 else True)
            self.add_weights(result, share if is_on else dropped)
        elif name in having("whole", "fill") or name in ("expand", "expand_as"):
            self.add_weights(result, dropped)


def _sizes(_: FactReader, args: tuple[Any, ...], __: Mapping[str, Any], result: Any) -> Facts:
    """Of a view the sizes before and after, where they differ."""
    given = args[0] if args else None
    if not (isinstance(given, Tensor) and isinstance(result, Tensor)):
        return {}
    before, after = tuple(given.shape), tuple(result.shape)
    return {} if before == after else {"sizes": (before, after)}


def _number(_: FactReader, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Facts:
    """Of arithmetic the number beside the tensor; the sizes where both are broadcast."""
    facts: Facts = {}
    numbers = [a for a in (*args, *kwargs.values()) if type(a) in _NUMBERS]
    if len(numbers) == 1:
        facts["number"] = float(numbers[0])
    tensors = [a for a in args[:2] if isinstance(a, Tensor)]
    is_pair = len(tensors) == 2 and isinstance(result, Tensor)
    if is_pair and result.numel() > max(t.numel() for t in tensors):
        facts["sizes"] = tuple(tuple(t.shape) for t in (*tensors, result))
    return facts


def _dimensions(_: FactReader, args: tuple[Any, ...], kwargs: Mapping[str, Any], r: Any) -> Facts:
    """Of a reduction the dimensions that it runs along, from 0, and the sizes before them."""
    given = args[0] if args else None
    if not isinstance(given, Tensor):
        return {}
    dims = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, list | tuple) or not dims:
        dims = range(given.ndim)
    along = tuple(d % given.ndim for d in dims) if given.ndim else ()
    return {"dims": along, "sizes": (tuple(given.shape),)}


def _weights(reader: FactReader, args: tuple[Any, ...], __: Any, result: Any) -> Facts:
    """Of a product the ends of what the weights of a softmax in it sum to, where it adds them up.

    Where a dropout zeroed some of them it is their mean, in place of both ends.
    """
    if not reader._has_weights:
        return {}
    for at, operand in enumerate(_operands(args)):
        dropped = reader.dropped(operand)
        axis = None if dropped is None else _contracted(args, at, operand)
        if dropped is None or axis is None or not 0 < operand.numel() <= _MOST_WEIGHTS:
            continue
        sums = operand.detach().float().sum(axis)
        ends = sums.mean() if dropped else sums.aminmax()
        facts = {"operand": at, "axis": axis % operand.ndim, "shape": tuple(operand.shape)}
        return {"weights": facts, "sums": (ends, ends) if dropped else tuple(ends)}
    return {}


def _operands(args: tuple[Any, ...]) -> list[Any]:
    """Return the tensors that a product takes; of an einsum behind its equation."""
    flat = [a for arg in args for a in (arg if isinstance(arg, list | tuple) else (arg,))]
    return [a for a in flat if isinstance(a, Tensor)]


def _contracted(args: tuple[Any, ...], at: int, operand: Tensor) -> int | None:
    """Return the one dimension of an operand that a product sums over; ``None``: there is none."""
    if isinstance(args[0], str):
        taken, _, given = args[0].replace(" ", "").replace("...", "").partition("->")
        letters = taken.split(",")[at]
        summed = [n for n, letter in enumerate(letters) if given and letter not in given]
        return summed[0] - len(letters) if len(summed) == 1 else None
    if operand.ndim == 1 or at == 0:
        return -1
    return -2


_READERS: dict[str, Reader] = {
    **dict.fromkeys(having("whole") - having("copy"), _sizes),
    **dict.fromkeys(having("sum", "product", "quotient", "fill", "power", "clamp"), _number),
    **dict.fromkeys(having("total", "average", "length", "softmax"), _dimensions),
    "std": _dimensions,
    "var": _dimensions,
    **dict.fromkeys(("matmul", "bmm", "mm", "einsum", "baddbmm", "mv"), _weights),
}


@cache
def _reader_of(name: str) -> Reader | None:
    return _READERS.get(name)


def settled(facts: Facts | None) -> Facts:
    """Return facts as plain data."""
    if not facts:
        return {}
    return {
        name: tuple(v.item() if isinstance(v, Tensor) else v for v in fact)
        if type(fact) is tuple
        else fact
        for name, fact in facts.items()
    }
