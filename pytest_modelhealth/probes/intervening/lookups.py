"""Rows that ids are looked up as, exchanged where the ids stay what they are.

Models derive positions, masks and the place that they read from ids. Other ids change these too,
other rows for the same ids do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class OtherRows(TorchFunctionMode):
    """While on, ids of the batch that a table is asked for get rows of other places.

    Args:
        ids: tensors of whole numbers, each of the shape of `places`.
        places: the places ``(samples, steps)`` that get other rows.
        sources: the place, counted along the flattened ones, that each of them gets its row from.

    Attributes:
        count: how many lookups were changed.
    """

    def __init__(self, ids: Sequence[Tensor], places: Tensor, sources: Tensor) -> None:
        super().__init__()
        self._ids, self._places, self._sources = list(ids), places, sources
        self.count = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, and exchange rows of what it returns if it looks up ids of the batch."""
        made = func(*args, **(kwargs or {}))
        asked = _asked(func, args, kwargs or {})
        if asked is None or not any(_equal(asked, ids) for ids in self._ids):
            return made
        if not isinstance(made, Tensor) or made.shape[:2] != self._places.shape:
            return made
        self.count += 1
        rows = made.flatten(0, 1)[self._sources.to(made.device)]
        return made.index_put((self._places.to(made.device),), rows)


def _asked(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """Return the ids that a function looks up."""
    if func is torch.nn.functional.embedding:
        ids = args[0] if args else kwargs.get("input")
    elif func is torch.Tensor.__getitem__ and len(args) > 1:
        ids = args[1]
    else:
        return None
    return ids if isinstance(ids, Tensor) else None


def _equal(asked: Tensor, ids: Tensor) -> bool:
    if asked.shape != ids.shape or asked.is_floating_point() or asked.dtype is torch.bool:
        return False
    return bool((asked == ids.to(asked.device)).all())
