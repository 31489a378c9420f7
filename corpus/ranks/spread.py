"""One model under each engine that distributes one, and its share of a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

FEATURES, WIDTH, CLASSES = 6, 16, 4


class Net(nn.Module):
    """Two layers, a norm over features and a head, some units of which are dead."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.act = nn.ReLU()
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.act(self.first(x)))
        return self.head(F.gelu(self.second(hidden)))


def net(seed: int = 0, width: int = WIDTH) -> Net:
    """Return the model, the same for each seed; six units of the first layer are dead."""
    torch.manual_seed(seed)
    model = Net(width)
    with torch.no_grad():
        model.first.bias[:6] = -100.0
    return model


def batch(samples: int = 8, tokens: int = 4) -> tuple[Tensor, Tensor]:
    """Return inputs and classes of the whole batch."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, tokens, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (samples, tokens), generator=generator)


def share(whole: tuple[Tensor, Tensor], rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return what one rank gets of a batch: every so many samples in a row."""
    x, y = (part.chunk(ranks)[rank] for part in whole)
    return x, y


SHARING = {"ddp": 1, "fsdp": 1, "hsdp": 1, "tp": 0, "sp": 0, "fsdp+tp": 2}
"""By engine, what part of the ranks shares the batch out: all, none, or one in two."""


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over all tokens or samples."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def distributed(model: nn.Module, engine: str) -> nn.Module:
    """Return `model` as `engine` spreads it over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    size = dist.get_world_size()
    if engine == "ddp":
        return DistributedDataParallel(model)
    if engine == "fsdp":
        return _sharded(model, init_device_mesh("cpu", (size,)))
    if engine == "hsdp":
        return _sharded(model, init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("r", "s")))
    if engine == "fsdp+tp":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
        return _sharded(_parallel(model, mesh["tensor"], False), mesh["data"])
    return _parallel(model, init_device_mesh("cpu", (size,)), engine == "sp")


def _sharded(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _parallel(model: nn.Module, mesh: Any, by_sequence: bool) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {
        "first": ColwiseParallel(output_layouts=Replicate()),
        "second": ColwiseParallel(),
        "head": RowwiseParallel(),
    }
    if by_sequence:
        plan["first"] = ColwiseParallel(output_layouts=Shard(1), use_local_output=False)
        plan["norm"] = SequenceParallel()
        plan["second"] = ColwiseParallel(input_layouts=Shard(1))
    return parallelize_module(model, mesh, plan)


def sharing(engine: str, size: int) -> int:
    """Return among how many ranks the batch is shared out."""
    part = SHARING[engine]
    return 1 if part == 0 else size // part
