"""The fewest samples of a batch that still fail as the whole batch does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pytest_modelhealth.capture import Inputs
from pytest_modelhealth.progress import advance, task

MOST_RUNS = 200
"""How many inspections a search may take."""


class Fewest(NamedTuple):
    """What a search found.

    Args:
        samples: the smallest part that fails, in order.
        runs: how many were tried.
        smallest: whether leaving out any one of them is known to pass; else the search ended at
            its limit.
    """

    samples: tuple[int, ...]
    runs: int
    smallest: bool


def fewest(
    samples: Sequence[int], fails: Callable[[tuple[int, ...]], bool], most: int = MOST_RUNS
) -> Fewest:
    """Return a small part of `samples` that fails: the algorithm ddmin.

    Andreas Zeller and Ralf Hildebrandt, Simplifying and Isolating Failure-Inducing Input, IEEE
    Transactions on Software Engineering 28 (2), 2002. Parts are tried first, then what is left
    without each; of one that fails, smaller parts. One sample of 64 is found in some dozen runs.

    Args:
        samples: what fails as a whole.
        fails: whether a part of them does, too.
        most: the most parts to try.
    """
    tried: dict[tuple[int, ...], bool] = {}

    def does_fail(part: tuple[int, ...]) -> bool:
        if part not in tried:
            if len(tried) >= most:
                raise _AtTheLimitError
            tried[part] = fails(part)
            advance()
        return tried[part]

    found, parts = tuple(samples), 2
    try:
        with task("looking for the fewest samples"):
            while len(found) > 1:
                smaller = _smaller(found, min(parts, len(found)), does_fail)
                if smaller is not None:
                    # of a part, halves again; of the rest without one, parts of the same size
                    is_part = len(smaller) <= -(-len(found) // parts)
                    parts = 2 if is_part else max(parts - 1, 2)
                    found = smaller
                elif parts >= len(found):
                    break
                else:
                    parts = min(2 * parts, len(found))
    except _AtTheLimitError:
        return Fewest(found, len(tried), smallest=False)
    return Fewest(found, len(tried), smallest=True)


class _AtTheLimitError(Exception):
    """No more parts may be tried."""


def _smaller(
    found: tuple[int, ...], parts: int, fails: Callable[[tuple[int, ...]], bool]
) -> tuple[int, ...] | None:
    """Return one of the parts that fails, or what is left without one of them, if any does."""
    edges = [round(len(found) * part / parts) for part in range(parts + 1)]
    spans = list(pairwise(edges))
    for start, end in spans:
        if fails(found[start:end]):
            return found[start:end]
    for start, end in spans if parts > 2 else ():
        if fails(found[:start] + found[end:]):
            return found[:start] + found[end:]
    return None


class Part:
    """Takes some of the samples of a batch.

    Args:
        samples: which.
        of: how many there are.
        dimension: the dimension of tensors that they lie along.
    """

    def __init__(self, samples: Sequence[int], of: int, dimension: int) -> None:
        self._samples = list(samples)
        self._of = of
        self._dimension = dimension
        self._made: dict[int, Tensor] = {}

    def take(self, value: Any, *, outermost: bool = True) -> Any:
        """Return a value with these samples only.

        Tensors and arrays with as many rows as there are samples are cut, and lists of as many
        values inside the batch; anything else stays.
        """
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return np.take(value, self._samples, self._dimension) if self._has(value) else value
        if isinstance(value, Inputs):
            return Inputs(*self._all(value.args), **self._named(value.kwargs))
        if isinstance(value, Mapping):
            return self._named(value)
        if isinstance(value, list) and len(value) == self._of and not outermost:
            return [value[sample] for sample in self._samples]
        if isinstance(value, list | tuple):
            items, kind = self._all(value), type(value)
            return kind._make(items) if hasattr(kind, "_make") else kind(items)
        return value

    def _all(self, values: Sequence[Any]) -> list[Any]:
        return [self.take(value, outermost=False) for value in values]

    def _named(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        return {name: self.take(value, outermost=False) for name, value in values.items()}

    def _has(self, value: Tensor | np.ndarray) -> bool:
        return value.ndim > self._dimension and value.shape[self._dimension] == self._of

    def _tensor(self, tensor: Tensor) -> Tensor:
        if tensor.is_nested or tensor.layout is not torch.strided or not self._has(tensor):
            return tensor
        if id(tensor) not in self._made:
            chosen = torch.tensor(self._samples, device=tensor.device)
            part = tensor.detach().index_select(self._dimension, chosen)
            self._made[id(tensor)] = part.requires_grad_(tensor.requires_grad)
        return self._made[id(tensor)]
