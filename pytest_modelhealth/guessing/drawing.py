"""Parts of a batch: the Python text that makes them, and the values that it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

SAMPLES = 32
"""How many samples a guessed batch has: enough to tell a dead unit by."""

LARGE = 20_000
"""From so many values a sample on, a batch is of `FEW_SAMPLES`."""

FEW_SAMPLES = 8
LENGTH = 12
"""How long a guessed sequence is, where nothing says another length."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """One value of a batch.

    Args:
        source: the expression that makes it.
        make: makes it.
        imports: the import lines that the expression needs, beside torch.
    """

    source: str
    make: Callable[[], Any]
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A batch that is to be tried.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        how: one sentence on where it was read.
        target: what the loss compares the output with.
        loss: the loss, called with the output and the target.
    """

    args: tuple[Drawn, ...] = ()
    kwargs: Mapping[str, Drawn] = field(default_factory=dict)
    how: str = ""
    target: Drawn | None = None
    loss: Drawn | None = None

    def made(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return new values of the arguments; what occurs twice is one object."""
        known: dict[int, Any] = {}

        def value(drawn: Drawn) -> Any:
            if id(drawn) not in known:
                known[id(drawn)] = drawn.make()
            return known[id(drawn)]

        return tuple(map(value, self.args)), {k: value(v) for k, v in self.kwargs.items()}

    def __str__(self) -> str:
        listed = [d.source for d in self.args] + [f"{k}={d.source}" for k, d in self.kwargs.items()]
        return f"({', '.join(listed)})"


def samples(*shape: int) -> int:
    """Return how many samples of a shape a batch has."""
    return FEW_SAMPLES if torch.Size(shape).numel() > LARGE else SAMPLES


def _spelled(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _typed(dtype: torch.dtype) -> str:
    return "" if dtype is torch.float32 else f", dtype={dtype}"


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Drawn:
    """Return numbers of a standard normal distribution."""
    source = f"torch.randn({', '.join(map(str, shape))}{_typed(dtype)})"
    return Drawn(source, lambda: torch.randn(shape, dtype=dtype))


def uniform(*shape: int, dtype: torch.dtype = torch.float32) -> Drawn:
    """Return numbers in [0, 1)."""
    source = f"torch.rand({', '.join(map(str, shape))}{_typed(dtype)})"
    return Drawn(source, lambda: torch.rand(shape, dtype=dtype))


def whole(high: int, shape: tuple[int, ...], low: int = 0) -> Drawn:
    """Return whole numbers in [`low`, `high`)."""
    first = f"{low}, " if low else ""
    return Drawn(
        f"torch.randint({first}{high}, {_spelled(shape)})",
        lambda: torch.randint(low, high, shape),
    )


def ones(shape: tuple[int, ...], dtype: torch.dtype) -> Drawn:
    """Return ones, or what is true."""
    source = f"torch.ones({', '.join(map(str, shape))}{_typed(dtype)})"
    return Drawn(source, lambda: torch.ones(shape, dtype=dtype))


def fixed(value: Any) -> Drawn:
    """Return a plain Python value."""
    return Drawn(repr(value), lambda: value)


def taken(source: str, make: Callable[[], Any]) -> Drawn:
    """Return what the model itself has or makes; `source` calls the model ``model``."""
    return Drawn(source, make)
