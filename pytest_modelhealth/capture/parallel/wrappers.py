"""Finds what in a model is spread over ranks, and by which engine."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import distributed as dist
from torch import nn

from pytest_modelhealth.errors import InspectionError

_REPLICATE = "torch.distributed._composable.replicate"
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"


@dataclass(frozen=True)
class Wrappers:
    """The modules of a model that talk to other ranks, outer ones first."""

    replicated: tuple[Any, ...]  # instances of `DistributedDataParallel`
    sharded: tuple[Any, ...]  # modules that `fully_shard` was called on
    # instances of `FullyShardedDataParallel`, the older FSDP, and modules that ``replicate`` was
    # called on, which hides a DDP in their hooks
    hidden: tuple[Any, ...]

    def __bool__(self) -> bool:
        return bool(self.replicated or self.sharded or self.hidden)


def find_wrappers(modules: Iterable[nn.Module]) -> Wrappers:
    """Return those among `modules`."""
    modules = list(modules)
    return Wrappers(
        tuple(m for m in modules if isinstance(m, nn.parallel.DistributedDataParallel)),
        _instances(modules, "torch.distributed.fsdp", "FSDPModule"),
        _instances(modules, _FSDP1, "FullyShardedDataParallel")
        + _instances(modules, _REPLICATE, "DDP"),
    )


def _instances(modules: list[nn.Module], home: str, name: str) -> tuple[Any, ...]:
    kind = getattr(sys.modules.get(home), name, None)
    return () if kind is None else tuple(m for m in modules if isinstance(m, kind))


def refuse_unknown_ways(wrappers: Wrappers) -> None:
    """Do nothing if all of them can be run by this rank and be left as they were.

    Raises:
        InspectionError: one cannot; the message says which and what can be inspected instead.
    """
    if wrappers.hidden:
        raise InspectionError(
            "cannot inspect a model in FullyShardedDataParallel, torch's older FSDP, or one that "
            "replicate() was called on: the first keeps the parameters of many layers in one flat "
            "tensor, the second a reducer in its hooks; inspect it with fully_shard(module) or "
            "DistributedDataParallel(module), or the plain model before it is wrapped"
        )
    for one in wrappers.replicated:
        if getattr(one, "mixed_precision", None) is not None:
            raise InspectionError(
                "cannot inspect DistributedDataParallel with mixed_precision=...: it casts the "
                "parameters in hooks of its own; inspect model.module under torch.autocast"
            )


def refuse_repetition(wrappers: Wrappers, *, reduces: bool) -> None:
    """Do nothing if what is run several times can be put back each time.

    Raises:
        InspectionError: it cannot; the message says what can be done instead.
    """
    if wrappers.sharded or wrappers.hidden:
        raise InspectionError(
            "the model is sharded by FSDP, which gathers its parameters anew in each run, so that "
            "they cannot be put back in between: what runs a model several times takes the plain "
            "model, in one process; run_inspection, which runs one step, works on shards"
        )
    for one in wrappers.replicated if reduces else ():
        is_settled = one._get_ddp_logging_data().get("iteration")  # it says 1 after the second step
        states = [state for _, state in getattr(one, "_comm_hooks", [])]
        if not is_settled or not all(isinstance(s, dist.ProcessGroup | None) for s in states):
            raise InspectionError(
                "DistributedDataParallel settles how it averages gradients in its first two steps, "
                "and a communication hook with a state of its own changes in each step, which "
                "cannot be undone: train for two steps first, without such a hook, or give the "
                "plain model, model.module, and its own optimizer"
            )
