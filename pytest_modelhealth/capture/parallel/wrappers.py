"""Finds what in a model is spread over ranks, and by which engine."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from pytest_modelhealth.errors import InspectionError

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"


@dataclass(frozen=True)
class Wrappers:
    """The modules of a model that talk to other ranks, outer ones first.

    Args:
        replicated: instances of `DistributedDataParallel`.
        sharded: modules that `fully_shard` was called on.
        flat: instances of `FullyShardedDataParallel`, the older FSDP.
    """

    replicated: tuple[Any, ...]
    sharded: tuple[Any, ...]
    flat: tuple[Any, ...]

    def __bool__(self) -> bool:
        return bool(self.replicated or self.sharded or self.flat)


def find_wrappers(modules: Iterable[nn.Module]) -> Wrappers:
    """Return those among `modules`."""
    modules = list(modules)
    return Wrappers(
        tuple(m for m in modules if isinstance(m, nn.parallel.DistributedDataParallel)),
        _instances(modules, "torch.distributed.fsdp", "FSDPModule"),
        _instances(modules, _FSDP1, "FullyShardedDataParallel"),
    )


def _instances(modules: list[nn.Module], home: str, name: str) -> tuple[Any, ...]:
    kind = getattr(sys.modules.get(home), name, None)
    return () if kind is None else tuple(m for m in modules if isinstance(m, kind))


def refuse_unknown_ways(wrappers: Wrappers) -> None:
    """Do nothing if all of them can be run by this rank and be left as they were.

    Raises:
        InspectionError: one cannot; the message says which and what can be inspected instead.
    """
    if wrappers.flat:
        raise InspectionError(
            "cannot inspect a model in FullyShardedDataParallel, torch's older FSDP: it keeps the "
            "parameters of many layers in one flat tensor, and no layer has its own; inspect it "
            "with fully_shard(module), which torch recommends in its place, or the plain model "
            "before it is wrapped"
        )
    for one in wrappers.replicated:
        if getattr(one, "mixed_precision", None) is not None:
            raise InspectionError(
                "cannot inspect DistributedDataParallel with mixed_precision=...: it casts the "
                "parameters in hooks of its own; inspect model.module under torch.autocast"
            )
