"""Arguments of forward that are still to be settled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pytest_modelhealth.guessing.drawing import (
    Candidate,
    Drawn,
    fixed,
    normal,
    ones,
    samples,
    whole,
)

WORDS = 100
"""How many words a dictionary of unknown size is taken to have."""


@dataclass(frozen=True)
class Slot:
    """One tensor of a batch.

    Args:
        name: of the argument.
        kind: ``"float"``, ``"ids"``, ``"mask"`` or ``"fixed"``.
        shape: of one sample; of the whole tensor where `whole` is set.
        high: for ids, one more than the largest.
        low: for ids, the least.
        is_whole: whether the first dimension is no sample.
        value: of a fixed one.
        keyword: whether it goes in by name.
        key: where it lies in a mapping or sequence that the argument is; ``None`` for itself.
        why: where its shape was read.
    """

    name: str
    kind: str = "float"
    shape: tuple[int, ...] = ()
    high: int = WORDS
    low: int = 0
    is_whole: bool = False
    value: Any = None
    keyword: bool = False
    key: str | int | None = None
    why: str = ""

    def drawn(self, size: int, dtype: torch.dtype) -> Drawn:
        """Return what makes it, in a batch of so many samples."""
        shape = self.shape if self.is_whole else (size, *self.shape)
        if self.kind == "ids":
            return whole(self.high, shape, self.low)
        if self.kind == "mask":
            return ones(shape, torch.bool)
        if self.kind == "fixed":
            return fixed(self.value)
        return normal(*shape, dtype=dtype)


@dataclass(frozen=True)
class Slots:
    """All arguments of one forward."""

    every: tuple[Slot, ...]

    def with_slot(self, index: int, **changed: Any) -> Slots:
        """Return these with one of them changed."""
        changed_one = replace(self.every[index], **changed)
        return Slots((*self.every[:index], changed_one, *self.every[index + 1 :]))

    @property
    def size(self) -> int:
        """How many samples the batch has."""
        sizes = [samples(*s.shape) for s in self.every if s.kind == "float" and not s.is_whole]
        return min(sizes, default=samples())

    def candidate(self, model: nn.Module) -> Candidate:
        """Return the batch."""
        dtype = _dtype(model)
        args: list[Drawn] = []
        kwargs: dict[str, Drawn] = {}
        for name, group in self._grouped().items():
            drawn = _joined([(s.key, s.drawn(self.size, dtype)) for s in group])
            if group[0].keyword:
                kwargs[name] = drawn
            else:
                args.append(drawn)
        reasons = dict.fromkeys(f"{s.name}: {s.why}" for s in self.every if s.why)
        how = "; ".join(reasons) or "the signature of forward"
        return Candidate((*args,), kwargs, how)

    def _grouped(self) -> dict[str, list[Slot]]:
        groups: dict[str, list[Slot]] = {}
        for slot in self.every:
            groups.setdefault(slot.name, []).append(slot)
        return groups

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the value of each slot among the arguments of a call."""
        positional = [name for name, group in self._grouped().items() if not group[0].keyword]
        values = {**dict(zip(positional, args, strict=False)), **kwargs}
        return [values[s.name] if s.key is None else values[s.name][s.key] for s in self.every]


def _dtype(model: nn.Module) -> torch.dtype:
    floating = (p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    return next(floating, torch.float32)


def _joined(parts: list[tuple[str | int | None, Drawn]]) -> Drawn:
    """Return one argument: a tensor, or a mapping or list of several."""
    key, first = parts[0]
    if key is None:
        return first
    imports = tuple(line for _, drawn in parts for line in drawn.imports)
    if isinstance(key, str):
        source = ", ".join(f'"{k}": {drawn.source}' for k, drawn in parts)
        return Drawn(f"{{{source}}}", lambda: {k: drawn.make() for k, drawn in parts}, imports)
    source = ", ".join(drawn.source for _, drawn in parts)
    return Drawn(f"[{source}]", lambda: [drawn.make() for _, drawn in parts], imports)
