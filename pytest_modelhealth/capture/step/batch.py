"""How a batch goes into a model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pytest_modelhealth.capture.observing.tensors import is_a


class Inputs:
    """Positional and keyword arguments of one call: ``Inputs(x, mask=mask)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        return f"Inputs({len(self.args)} positional, keywords {sorted(self.kwargs)})"

    @classmethod
    def of(cls, batch: Any) -> Inputs:
        """Return how `batch` goes in.

        A mapping goes in as keywords, a tuple or list as positionals, `Inputs` as it is, anything
        else as the one argument. A named tuple is a tuple.
        """
        if is_a(batch, cls):
            return batch
        if issubclass(type(batch), Mapping):
            return cls(**{str(name): value for name, value in batch.items()})
        if is_a(batch, tuple) or is_a(batch, list):
            return cls(*batch)
        return cls(batch)


def copied_batch(batch: Any) -> Any:
    """Return a deep copy of a batch; the batch itself where it cannot be copied."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # noqa: BLE001 - a tensor with a graph, an object of the user's
        return batch
