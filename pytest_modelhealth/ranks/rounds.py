"""Reductions of several parts of a report that go over the wire at once.

Each wait for the other ranks costs more than what it carries. What does not depend on each other is
therefore sent together: a part is a generator that adds its reductions and yields; when all parts
have, one message goes out for each operation and dtype, all at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from pytest_modelhealth.ranks.company import Company

R = TypeVar("R")

Steps = Generator[None, None, R]
"""Adds reductions and yields, as often as it needs what came of them."""

Values = npt.NDArray[Any] | torch.Tensor


class Reduced:
    """What a reduction returns, once its round was sent.

    Args:
        values: what this rank gives to it.
    """

    def __init__(self, values: Values) -> None:
        self.tensor: torch.Tensor = (
            torch.from_numpy(np.ascontiguousarray(values))
            if isinstance(values, np.ndarray)
            else values
        )
        """What this rank gives; once the round was sent, what came of it, of the same shape."""

    @property
    def result(self) -> npt.NDArray[Any]:
        """The same as an array."""
        array: npt.NDArray[Any] = self.tensor.numpy()
        return array


class Rounds:
    """Gathers reductions until they are sent.

    Every rank adds the same in the same order, of the same shapes and dtypes.

    Args:
        company: the ranks.
    """

    def __init__(self, company: Company) -> None:
        self._company = company
        self._added: dict[tuple[Any, torch.dtype], list[Reduced]] = {}

    def sum(self, values: Values) -> Reduced:
        """Have values added up over ranks, element by element."""
        return self._add(dist.ReduceOp.SUM, values)

    def smallest(self, values: Values) -> Reduced:
        """Have the smallest taken over ranks, element by element."""
        return self._add(dist.ReduceOp.MIN, values)

    def either(self, bits: npt.NDArray[np.uint8]) -> Reduced:
        """Have those bits set that are set on some rank."""
        return self._add(dist.ReduceOp.BOR, bits)

    def send(self) -> None:
        """Reduce all that was added; nothing is sent where that is nothing."""
        added, self._added = self._added, {}
        packed = [torch.cat([one.tensor.reshape(-1) for one in group]) for group in added.values()]
        self._company.reduce_all(packed, [operation for operation, _ in added])
        for group, whole in zip(added.values(), packed, strict=True):
            sizes = [one.tensor.numel() for one in group]
            for one, values in zip(group, whole.split(sizes), strict=True):
                one.tensor = values.reshape(one.tensor.shape)

    def _add(self, operation: Any, values: Values) -> Reduced:
        one = Reduced(values)
        self._added.setdefault((operation, one.tensor.dtype), []).append(one)
        return one


def in_rounds(company: Company, *parts: Callable[[Rounds], Steps[Any]]) -> list[Any]:
    """Return what each part returns; the n-th reductions of all of them are sent together."""
    rounds = Rounds(company)
    results: list[Any] = [None] * len(parts)
    running = {number: part(rounds) for number, part in enumerate(parts)}
    while running:
        for number, part in list(running.items()):
            try:
                next(part)
            except StopIteration as end:
                results[number] = end.value
                del running[number]
        rounds.send()
    return results
