"""Models spread over ranks by every engine, and what must be as if nobody had looked."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH = 6


class Block(nn.Module):
    """A norm, and two layers around an activation; 7 units are no multiple of 2 or 3 ranks."""

    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks, dropout, statistics of batches, a head of 3 rows, and perhaps one unused."""

    def __init__(self, *, hidden: int = 7, spare: bool = False, recurrent: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(hidden), Block(hidden))
        self.drop = nn.Dropout(0.1)
        self.memory = nn.LSTM(WIDTH, WIDTH, batch_first=True) if recurrent else None
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(1))  # of which one rank alone has something
        self.spare = nn.Linear(2, 2) if spare else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.blocks(x))
        if self.memory is not None:
            x = self.memory(x[:, None])[0][:, 0]
        return self.head(self.batch_norm(x) * self.scale)


Made = Callable[[], nn.Module]


def ddp(net: dict[str, bool] | None = None, *, hook: str = "", **options: Any) -> Made:
    """Return what makes a DDP model."""

    def make() -> nn.Module:
        # several buckets, but for PowerSGD, which waits for ever with gloo and two of them
        size = 25 if hook == "PowerSGD" else 0.0005
        model = nn.parallel.DistributedDataParallel(Net(**net or {}), bucket_cap_mb=size, **options)
        if hook == "fp16":
            model.register_comm_hook(None, fp16_compress_hook)
        elif hook == "PowerSGD":
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            model.comm_state = state
        return model

    return make


def accelerated(precision: str) -> Made:
    """Return what makes a model that accelerate has prepared: DDP, under autocast."""

    def make() -> nn.Module:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        # as torchrun sets them: by these it knows that there is a group
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
        os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        model: nn.Module = accelerator.prepare(Net())
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        return model

    return make


class Nested(nn.Module):
    """A DDP model within a model, and a head of its own outside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ddp(static_graph=True)()
        self.outer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


def fsdp(mesh: Callable[[], DeviceMesh | None] = lambda: None, **options: Any) -> Made:
    """Return what makes a model with `fully_shard`."""

    def make() -> nn.Module:
        model = Net()
        if "mp_policy" in options:  # whose buffers stay float32
            model.batch_norm = nn.LayerNorm(WIDTH)
        mesh_options = {"mesh": found} if (found := mesh()) is not None else {}
        for block in model.blocks:
            fully_shard(block, **mesh_options, **options)
        return fully_shard(model, **mesh_options, **options)

    return make


def waiting() -> nn.Module:
    """Return an FSDP model that accumulates gradients, without reducing them for now."""
    model: Any = fsdp()()
    model.set_requires_gradient_sync(False)
    return model


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def tensor_parallel() -> nn.Module:
    """Return a model whose blocks are cut along their units."""
    model = Net(hidden=12)
    for block in model.blocks:
        parallelize_module(block, _mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


class Sequence(nn.Module):
    """Blocks on sequences, shared out along them."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def sequence_parallel() -> nn.Module:
    """Return a model with a norm on shards of sequences."""
    model = Sequence()
    plan = {
        "block": PrepareModuleInput(
            input_layouts=(Shard(0),),
            desired_input_layouts=(Shard(0),),
        ),
        "block.0": SequenceParallel(sequence_dim=0),
        "block.1": ColwiseParallel(input_layouts=Shard(0)),
        "block.2": RowwiseParallel(output_layouts=Shard(0)),
    }
    return parallelize_module(model, _mesh(), plan)


def sharded_and_parallel() -> nn.Module:
    """Return a model with tensor parallelism inside `fully_shard`."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    model = Net(hidden=12)
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def _hybrid() -> DeviceMesh:
    size = dist.get_world_size()
    return init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))


ENGINES: dict[str, Made] = {
    "DDP": ddp(),
    "DDP, static_graph": ddp(static_graph=True),
    "DDP, gradient_as_bucket_view": ddp(gradient_as_bucket_view=True),
    "DDP, find_unused_parameters": ddp({"spare": True}, find_unused_parameters=True),
    "DDP, static_graph with an unused parameter": ddp({"spare": True}, static_graph=True),
    "DDP, LSTM": ddp({"recurrent": True}),
    "DDP, fp16 hook": ddp(hook="fp16"),
    "DDP, PowerSGD hook": ddp(hook="PowerSGD"),
    "DDP inside a model": Nested,
    "DDP by accelerate": accelerated("no"),
    "DDP by accelerate, bf16": accelerated("bf16"),
    "FSDP2": fsdp(),
    "FSDP2, reshard_after_forward=False": fsdp(reshard_after_forward=False),
    "FSDP2, mixed precision": fsdp(
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "FSDP2, CPUOffloadPolicy": fsdp(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "FSDP2, set_requires_gradient_sync(False)": waiting,
    "HSDP": fsdp(_hybrid),
    "tensor parallel": tensor_parallel,
    "sequence parallel": sequence_parallel,
    "FSDP2 and tensor parallel": sharded_and_parallel,
}

IS_SHARED = ("tensor", "sequence", "FSDP2 and tensor")
"""Engines whose ranks see the same batch."""

WAYS = ("whole", "forward alone", "loss raises", "forward raises", "Ctrl-C", "after evaluation")
"""What happens in an inspection."""


Case = tuple[str, int, str]
"""An engine, the steps of training before the inspection, and what happens in it."""


def all_cases() -> list[Case]:
    """Return every engine in every way, before its first step, after one and after two."""
    return list(itertools.product(ENGINES, (0, 1, 2), WAYS))


def chosen_cases() -> list[Case]:
    """Return some ways of each engine: the first steps are the delicate ones."""
    ways = [(0, "whole"), (0, "forward raises"), (1, "forward alone"), (1, "after evaluation")]
    return [(engine, *way) for engine in ENGINES for way in [*ways, (2, "Ctrl-C")]]


class EndedError(RuntimeError):
    """What the user's code raises."""


def batch(engine: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of this rank."""
    rank = 0 if engine.startswith(IS_SHARED) else dist.get_rank()
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(4, WIDTH, generator=generator)
    return x, torch.randint(0, 3, (4,), generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of a step."""
    return nn.functional.cross_entropy(output, target)


def make(engine: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of this engine and its optimizer, the same at each call."""
    torch.manual_seed(3)
    model = ENGINES[engine]()
    if hasattr(model, "comm_state"):
        model.__dict__["comm_state"].rng.seed(0)
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def train(engine: str, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Run one step of training; gradients stay."""
    torch.manual_seed(50 + step + dist.get_rank() * (not engine.startswith(IS_SHARED)))
    x, y = batch(engine, step)
    if "sync(False)" in engine:
        optimizer.zero_grad(set_to_none=False)
        model.set_requires_gradient_sync(step % 2 == 0)  # type: ignore[operator]
    else:
        optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()


def local(tensor: Tensor | None) -> Any:
    """Return what of a tensor is on this rank, to be compared."""
    if tensor is None:
        return None
    if isinstance(tensor, DTensor):
        return "DTensor", tensor.placements, copy.deepcopy(tensor.to_local().detach())
    return "plain", tensor.detach().clone()


def held(model: nn.Module) -> dict[str, Any]:
    """Return all that a model holds, by name."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[name] = local(parameter)
        found[name, "gradient"] = local(parameter.grad)
    for name, buffer in model.named_buffers():
        found[name] = local(buffer)
    found["modes"] = [module.training for module in model.modules()]
    hook = model.__dict__.get("comm_state")
    if hook is not None:
        found["hook"] = (hook.iter, _copied(hook.error_dict), _copied(hook.p_memory_dict))
        found["hook rng"] = hook.rng.get_state()[1].tolist()
    return found


def _copied(tensors: dict[Any, Tensor]) -> list[Any]:
    return [local(one) for one in tensors.values()]


def same(a: Any, b: Any) -> bool:
    """Whether two things are equal bit for bit."""
    if isinstance(a, Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
