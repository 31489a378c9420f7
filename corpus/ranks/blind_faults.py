"""Faults that take several ranks, and healthy models that look like them.

They were written before the checks, and what each check must say stands beside each. A case is a
function of the rank: called on each rank of a process group, it makes that rank's model and batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from corpus.ranks.networks import (
    Averaging,
    Bend,
    Cnn,
    Features,
    Fork,
    Gate,
    Language,
    Mlp,
    Repeating,
    Scaled,
    Skipping,
    Spare,
    Trunk,
)


@dataclass
class Made:
    """What a rank inspects.

    Args:
        model: the model.
        inputs, target, loss: its batch, as `run_inspection` takes them.
        ranks: what the inspector is told of ranks.
        within: what the inspection runs in.
        seed: of the rank's generator when it starts.
    """

    model: nn.Module
    inputs: Any
    target: Any
    loss: Any = F.cross_entropy
    ranks: bool | None = None
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """One case.

    Args:
        make: makes what a rank inspects.
        size: how many ranks.
        check: the check that must speak; ``""`` where none may. ``"InspectionError"`` is raised on
            every rank before the forward.
        layer: the layer that it must name, one of several where several would do.
        ranks: the ranks that it must name.
        severity: whether it fails or warns.
        also: checks that object in one process, too, and rightly so.
        missed: why nothing is said of a fault, as far as the checks go; ``""`` where it is found.
    """

    make: Callable[[int], Made]
    size: int = 2
    check: str = ""
    layer: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    severity: str = "fail"
    also: tuple[str, ...] = ()
    missed: str = ""

    @property
    def name(self) -> str:
        return self.make.__name__


@dataclass
class Shelf:
    """All cases, in order."""

    cases: list[Case] = field(default_factory=list)

    def __iter__(self) -> Iterator[Case]:
        return iter(self.cases)

    def fault(
        self,
        check: str,
        *layer: str,
        ranks: tuple[int, ...] = (1,),
        size: int = 2,
        severity: str = "fail",
        missed: str = "",
    ) -> Callable[[Callable[[int], Made]], Callable[[int], Made]]:
        def keep(make: Callable[[int], Made]) -> Callable[[int], Made]:
            self.cases.append(Case(make, size, check, layer, ranks, severity, missed=missed))
            return make

        return keep

    def healthy(
        self, size: int = 2, also: tuple[str, ...] = ()
    ) -> Callable[[Callable[[int], Made]], Callable[[int], Made]]:
        def keep(make: Callable[[int], Made]) -> Callable[[int], Made]:
            self.cases.append(Case(make, size, also=also))
            return make

        return keep


FAULTS, HEALTHY = Shelf(), Shelf()


def seeded(seed: int) -> None:
    torch.manual_seed(seed)


def rows(seed: int, count: int = 40, width: int = 24) -> tuple[Tensor, Tensor]:
    """Return rows and their classes."""
    chance = torch.Generator().manual_seed(1000 + seed)
    return (
        torch.randn(count, width, generator=chance),
        torch.randint(10, (count,), generator=chance),
    )


def images(seed: int, count: int = 40) -> tuple[Tensor, Tensor]:
    """Return images and their classes."""
    chance = torch.Generator().manual_seed(2000 + seed)
    return (
        torch.randn(count, 3, 12, 12, generator=chance),
        torch.randint(10, (count,), generator=chance),
    )


def tokens(seed: int, count: int = 32, length: int = 16) -> Tensor:
    """Return sequences without padding."""
    chance = torch.Generator().manual_seed(3000 + seed)
    return torch.randint(1, 64, (count, length), generator=chance)


def language_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean over this rank's own tokens."""
    return F.cross_entropy(logits, target, ignore_index=0)


def mesh(*shape: int, names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def stepped(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> nn.Module:
    """Train the model for some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, target in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


# ----------------------------------------------------- weights and buffers that differ


@FAULTS.fault("same_weights", "first", "")
def no_wrapper_and_another_seed(rank: int) -> Made:
    seeded(rank)
    return Made(Mlp(), *rows(rank), ranks=True, seed=10 + rank)


@FAULTS.fault("same_weights", "norm2")
def one_rank_writes_a_norm_of_a_convnet(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Cnn())
    if rank == 1:
        with torch.no_grad():
            model.module.norm2.weight.mul_(1.5)
    return Made(model, *images(rank), seed=10 + rank)


@FAULTS.fault("same_weights", "embed", ranks=(0,), size=3)
def checkpoint_read_on_the_first_rank_alone(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Language(0.1))
    if rank == 0:
        seeded(1)
        model.module.load_state_dict(Language(0.1).state_dict())
    ids = tokens(rank)
    return Made(model, ids, ids.roll(-1, 1), language_loss, seed=10 + rank)


@FAULTS.fault("same_weights", "features")
def random_features_drawn_by_each_rank_of_fsdp(rank: int) -> Made:
    seeded(rank)
    model = Features()
    seeded(0)
    model.net = Mlp(64)
    fully_shard(model, mesh=mesh(2, names=("dp",)))
    return Made(model, *rows(rank), seed=10 + rank)


@FAULTS.fault("same_weights", "scale")
def scale_measured_on_the_ranks_own_shard(rank: int) -> Made:
    seeded(0)
    data = rows(50, 200)[0] + 0.3
    model = DistributedDataParallel(Scaled(data), broadcast_buffers=False)
    model.module.scale.mean.copy_(data[rank::2].mean(0))
    return Made(model, *rows(rank), seed=10 + rank)


@FAULTS.fault("same_weights", "norm")
def norm_drawn_by_each_rank_of_a_tensor_parallel_group(rank: int) -> Made:
    seeded(0)
    model = Bend()
    seeded(rank)
    nn.init.normal_(model.norm.weight, 1.0, 0.1)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh(2, names=("tp",)), plan)
    return Made(model, *rows(7, 40, 32), seed=5)


# ----------------------------------------------------- gradients that are not averaged


class Aside(nn.Module):
    """Holds a wrapped network and calls what is wrapped."""

    def __init__(self, net: DistributedDataParallel) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net.module(x)


class Headed(nn.Module):
    """A trunk and a head."""

    def __init__(self, trunk: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


@FAULTS.fault("averaged_gradients", "net", "net.conv1", ranks=(0, 1))
def wrapped_network_called_directly(rank: int) -> Made:
    seeded(0)
    return Made(Aside(DistributedDataParallel(Cnn())), *images(rank), seed=10 + rank)


@FAULTS.fault("averaged_gradients", "head", ranks=(0, 1))
def head_outside_the_wrapper(rank: int) -> Made:
    seeded(0)
    model = Headed(DistributedDataParallel(Trunk()), nn.Linear(16, 10))
    return Made(model, *images(rank), seed=10 + rank)


@FAULTS.fault("averaged_gradients", "embed", ranks=(0, 1))
def blocks_sharded_but_not_what_holds_them(rank: int) -> Made:
    seeded(0)
    model = Language(tied=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh(2, names=("dp",)))
    ids = tokens(rank)
    return Made(model, ids, ids.roll(-1, 1), language_loss, seed=10 + rank)


class Adapted(nn.Module):
    """A layer with an adapter beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


@FAULTS.fault("averaged_gradients", "second.down", ranks=(0, 1, 2), size=3)
def adapters_added_after_wrapping(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Mlp())
    model.module.second = Adapted(model.module.second)
    return Made(model, *rows(rank), seed=10 + rank)


@FAULTS.fault("averaged_gradients", "trunk.conv2", ranks=(0, 1))
def unfrozen_after_wrapping(rank: int) -> Made:
    seeded(0)
    net = Trunked()
    net.trunk.requires_grad_(False)
    model = DistributedDataParallel(net)
    model.module.trunk.conv2.requires_grad_(True)
    return Made(model, *images(rank), seed=10 + rank)


# ----------------------------------------------------- a NaN on one rank


@FAULTS.fault("finite", "")
def nan_in_the_batch_of_one_rank(rank: int) -> Made:
    seeded(0)
    inputs, target = rows(rank)
    if rank == 1:
        inputs[3, 5] = float("nan")
    return Made(DistributedDataParallel(Mlp()), inputs, target, seed=10 + rank)


@FAULTS.fault("finite", "blocks.0", "blocks.0.softmax", ranks=(0,))
def sequence_of_padding_on_one_rank(rank: int) -> Made:
    seeded(0)
    ids = tokens(rank)
    ids[rank + 1 :: 5, 10:] = 0
    if rank == 0:
        ids[4] = 0
    return Made(
        DistributedDataParallel(Language()), ids, ids.roll(-1, 1), language_loss, seed=10 + rank
    )


@FAULTS.fault("finite", "", "head")
def nothing_to_learn_on_one_rank(rank: int) -> Made:
    seeded(0)
    ids = tokens(rank)
    target = ids.roll(-1, 1)
    if rank == 1:
        target = torch.zeros_like(target)
    return Made(DistributedDataParallel(Language()), ids, target, language_loss, seed=10 + rank)


# of -inf, which masks are made of, one process says the same: the model makes the NaN
@FAULTS.fault("finite", "1", "", ranks=(2,), size=3)
def logarithm_of_nothing_on_one_rank_of_fsdp(rank: int) -> Made:
    seeded(0)
    model = nn.Sequential(nn.Linear(24, 48), Gate(0.0), nn.Linear(48, 10))
    nn.init.uniform_(model[0].weight, 0.0, 0.3)
    nn.init.constant_(model[0].bias, 0.1)
    fully_shard(model, mesh=mesh(3, names=("dp",)))
    inputs, target = rows(rank)
    inputs = inputs.abs()
    if rank == 2:
        inputs[0] = -1.0
    return Made(model, inputs, target, seed=10 + rank)


@FAULTS.fault("finite", "second")
def nan_in_a_weight_of_one_rank(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Mlp())
    if rank == 1:
        with torch.no_grad():
            model.module.second.weight[2, 3] = float("nan")
    return Made(model, *rows(rank), seed=10 + rank)


# ----------------------------------------------------- the same batch on every rank


@FAULTS.fault("distinct_data", "", ranks=(0, 1))
def sampler_forgotten(rank: int) -> Made:
    seeded(0)
    return Made(DistributedDataParallel(Trunked()), *images(3), seed=10 + rank)


class Trunked(nn.Module):
    """Convolutions and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


@FAULTS.fault("distinct_data", "", ranks=(2, 3), size=4)
def two_of_four_ranks_got_the_same_tokens(rank: int) -> Made:
    seeded(0)
    ids = tokens(min(rank, 2))
    return Made(
        DistributedDataParallel(Language(0.1)), ids, ids.roll(-1, 1), language_loss, seed=10 + rank
    )


@FAULTS.fault("distinct_data", "", ranks=(0, 1, 2, 3), size=4)
def sampler_knows_no_mesh(rank: int) -> Made:
    seeded(0)
    both = mesh(2, 2, names=("dp", "tp"))
    model = Bend()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, both["tp"], plan)
    fully_shard(model, mesh=both["dp"])
    return Made(model, *rows(3, 40, 32), seed=10 + rank // 2)


# ----------------------------------------------------- another structure or mode


@FAULTS.fault("InspectionError", "act")
def another_activation_on_one_rank(rank: int) -> Made:
    seeded(0)
    net = Mlp()
    if rank == 1:
        net.act = nn.GELU()
    return Made(DistributedDataParallel(net), *rows(rank), seed=10 + rank)


@FAULTS.fault("InspectionError", "norm1")
def norm_in_evaluation_mode_on_one_rank(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Cnn())
    if rank == 1:
        model.module.norm1.eval()
    return Made(model, *images(rank), seed=10 + rank)


@FAULTS.fault("InspectionError", "head", size=3)
def head_frozen_on_one_rank(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Mlp())
    if rank == 1:
        model.module.head.requires_grad_(False)
    return Made(model, *rows(rank), seed=10 + rank)


@FAULTS.fault("InspectionError", "blocks.2")
def one_block_more_on_one_rank(rank: int) -> Made:
    seeded(0)
    ids = tokens(rank)
    model = Language(blocks=2 + rank)
    return Made(model, ids, ids.roll(-1, 1), language_loss, ranks=True, seed=10 + rank)


@FAULTS.fault("InspectionError", "blocks.1.drop")
def dropout_set_by_rank(rank: int) -> Made:
    seeded(0)
    model = Language(0.1)
    model.blocks[1].drop.p = 0.1 if rank == 0 else 0.5
    fully_shard(model, mesh=mesh(2, names=("dp",)))
    ids = tokens(rank)
    return Made(model, ids, ids.roll(-1, 1), language_loss, seed=10 + rank)


# ----------------------------------------------------- another way through the model


@FAULTS.fault("same_path", "left", "right", ranks=(0, 1))
def branch_by_what_the_batch_holds(rank: int) -> Made:
    seeded(0)
    inputs, target = rows(rank)
    inputs = inputs + (0.5 if rank == 0 else -0.5)
    return Made(DistributedDataParallel(Fork()), inputs, target, seed=10 + rank)


@FAULTS.fault("same_path", "blocks.2", size=3)
def layer_dropped_by_chance_on_one_rank(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Skipping())
    if rank == 1:
        model.module.keep[2] = False
    return Made(model, *rows(rank), seed=10 + rank)


# ----------------------------------------------------- a parameter that no rank uses


@FAULTS.fault("unused_parameters", "spare", ranks=(0, 1))
def layer_that_is_never_called(rank: int) -> Made:
    seeded(0)
    return Made(DistributedDataParallel(Spare()), *rows(rank), seed=10 + rank)


@FAULTS.fault("unused_parameters", "trunk.conv1", ranks=(0, 1))
def frozen_after_wrapping(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Trunked())
    model.module.trunk.conv1.requires_grad_(False)
    return Made(model, *images(rank), seed=10 + rank)


class Pooled(nn.Module):
    """A language model with a pooler whose output its loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Language()
        self.pooler = nn.Linear(64, 8)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.net(ids)
        return logits, self.pooler(logits.mean(2))


@FAULTS.fault("unused_parameters", "pooler", ranks=(0, 1))
def pooler_that_no_loss_reads(rank: int) -> Made:
    seeded(0)
    ids = tokens(rank)
    loss = _of_logits
    return Made(DistributedDataParallel(Pooled()), ids, ids.roll(-1, 1), loss, seed=10 + rank)


def _of_logits(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return language_loss(output[0], target)


# ----------------------------------------------------- samples or tokens of uneven weight


@FAULTS.fault("even_weights", "", "head", ranks=(0,))
def mean_over_the_ranks_own_tokens(rank: int) -> Made:
    seeded(0)
    ids = tokens(rank)
    target = ids.roll(-1, 1)
    if rank == 0:
        ids[:, 4:] = 0
        target[:, 4:] = 0
    return Made(DistributedDataParallel(Language()), ids, target, language_loss, seed=10 + rank)


@FAULTS.fault("even_weights", "", "head", ranks=(2,), size=3)
def short_batch_on_one_rank(rank: int) -> Made:
    seeded(0)
    return Made(
        DistributedDataParallel(Trunked()), *images(rank, 40 if rank < 2 else 10), seed=10 + rank
    )


def _sum_by_own_count(logits: Tensor, target: Tensor) -> Tensor:
    count = (target != 0).sum()
    return F.cross_entropy(logits, target, ignore_index=0, reduction="sum") / count


@FAULTS.fault("even_weights", "", "head")
def sum_divided_by_the_ranks_own_count(rank: int) -> Made:
    seeded(0)
    model = Language(tied=False)
    fully_shard(model, mesh=mesh(2, names=("dp",)))
    ids = tokens(rank)
    target = ids.roll(-1, 1)
    if rank == 1:
        target[:, 3:] = 0
    return Made(model, ids, target, _sum_by_own_count, seed=10 + rank)


# ----------------------------------------------------- replicas that disagree


@FAULTS.fault("replicas_agree", "drop", ranks=(0, 1))
def dropout_by_the_ranks_own_seed_in_a_tensor_parallel_group(rank: int) -> Made:
    seeded(0)
    model = Bend(0.2)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh(2, names=("tp",)), plan)
    return Made(model, *rows(7, 40, 32), seed=10 + rank)


class Noisy(Bend):
    """Adds noise of its own to what it is given, in training."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = F.dropout(x, 0.1, self.training)
        return self.head(x + self.down(F.gelu(self.up(x))))


@FAULTS.fault("replicas_agree", "", "dropout", ranks=(0, 1))
def functional_dropout_by_the_ranks_own_seed(rank: int) -> Made:
    seeded(0)
    model = Noisy()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh(2, names=("tp",)), plan)
    return Made(model, *rows(7, 40, 32), seed=10 + rank)


# ----------------------------------------------------- warnings


@FAULTS.fault("synced_norm", "norm1", ranks=(0, 1), severity="warn")
def few_images_for_a_batch_norm(rank: int) -> Made:
    seeded(0)
    return Made(DistributedDataParallel(Cnn()), *images(rank, 4), seed=10 + rank)


@FAULTS.fault("synced_norm", "1", ranks=(0, 1), severity="warn")
def few_rows_for_a_batch_norm_of_fsdp(rank: int) -> Made:
    seeded(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10))
    fully_shard(model, mesh=mesh(2, names=("dp",)))
    return Made(model, *rows(rank, 6), seed=10 + rank)


@FAULTS.fault("distinct_dropout", "blocks.0.drop", ranks=(0, 1), severity="warn")
def one_seed_for_all_ranks_of_a_language_model(rank: int) -> Made:
    seeded(0)
    ids = tokens(rank)
    return Made(
        DistributedDataParallel(Language(0.1)), ids, ids.roll(-1, 1), language_loss, seed=10
    )


@FAULTS.fault("distinct_dropout", "drop", ranks=(1, 3), size=4, severity="warn")
def one_seed_for_two_of_four_ranks_of_fsdp(rank: int) -> Made:
    seeded(0)
    model = Mlp(drop=0.2)
    fully_shard(model, mesh=mesh(4, names=("dp",)))
    return Made(model, *rows(rank), seed=11 if rank in (1, 3) else 20 + rank)


# ===================================================== healthy


@HEALTHY.healthy()
def ddp(rank: int) -> Made:
    seeded(0)
    return Made(DistributedDataParallel(Mlp()), *rows(rank), seed=10 + rank)


@HEALTHY.healthy()
def synced_norm_that_is_not_trained(rank: int) -> Made:
    seeded(0)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(stepped(Cnn(), [images(9)]))
    fully_shard(model, mesh=mesh(2, names=("dp",)))
    return Made(model.eval(), *images(rank), seed=10 + rank)


@HEALTHY.healthy()
def running_statistics_after_some_steps(rank: int) -> Made:
    seeded(0)
    model = stepped(
        DistributedDataParallel(Cnn()), [images(20 + 2 * step + rank) for step in range(3)]
    )
    return Made(model, *images(rank), seed=10 + rank)


@HEALTHY.healthy()
def running_statistics_that_nobody_sends(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Cnn(), broadcast_buffers=False)
    model = stepped(model, [images(20 + 2 * step + rank) for step in range(3)])
    return Made(model, *images(rank), seed=10 + rank)


@HEALTHY.healthy(3)
def running_statistics_read_in_evaluation_mode(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Cnn(), broadcast_buffers=False)
    model = stepped(model, [images(20 + 3 * step + rank) for step in range(3)])
    return Made(model.eval(), *images(rank), seed=10 + rank)


@HEALTHY.healthy()
def batch_norm_frozen_in_a_trained_network(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Cnn())
    model = stepped(model, [images(20 + 2 * step + rank) for step in range(3)])
    for norm in (model.module.norm1, model.module.norm2):
        norm.eval()
    return Made(model, *images(rank, 4), seed=10 + rank)


@HEALTHY.healthy(also=("wiring",))
def unused_layer_that_is_declared(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Spare(), find_unused_parameters=True)
    return Made(model, *rows(rank), seed=10 + rank)


@HEALTHY.healthy(also=("wiring",))
def unused_layer_of_a_static_graph(rank: int) -> Made:
    seeded(0)
    return Made(DistributedDataParallel(Spare(), static_graph=True), *rows(rank), seed=10 + rank)


@HEALTHY.healthy()
def branches_that_are_declared(rank: int) -> Made:
    seeded(0)
    inputs, target = rows(rank)
    inputs = inputs + (0.5 if rank == 0 else -0.5)
    return Made(
        DistributedDataParallel(Fork(), find_unused_parameters=True), inputs, target, seed=10 + rank
    )


@HEALTHY.healthy(3)
def layers_dropped_by_chance_and_declared(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Skipping(), find_unused_parameters=True)
    model.module.keep[rank] = False
    return Made(model, *rows(rank), seed=10 + rank)


@HEALTHY.healthy()
def block_repeated_as_the_batch_asks(rank: int) -> Made:
    seeded(0)
    inputs, target = rows(rank)
    return Made(
        DistributedDataParallel(Repeating()),
        {"x": inputs, "steps": 1 + rank},
        target,
        seed=10 + rank,
    )


@HEALTHY.healthy()
def dropout_of_the_ranks_own(rank: int) -> Made:
    seeded(0)
    ids = tokens(rank)
    return Made(
        DistributedDataParallel(Language(0.1)), ids, ids.roll(-1, 1), language_loss, seed=10 + rank
    )


@HEALTHY.healthy()
def one_seed_but_nothing_to_drop(rank: int) -> Made:
    seeded(0)
    return Made(DistributedDataParallel(Mlp(drop=0.0)), *rows(rank), seed=10)


@HEALTHY.healthy()
def one_seed_and_dropout_in_evaluation_mode(rank: int) -> Made:
    seeded(0)
    return Made(DistributedDataParallel(Mlp(drop=0.3)).eval(), *rows(rank), seed=10)


@HEALTHY.healthy()
def trunk_frozen_before_wrapping(rank: int) -> Made:
    seeded(0)
    net = Trunked()
    net.trunk.requires_grad_(False)
    return Made(DistributedDataParallel(net), *images(rank), seed=10 + rank)


class Taught(nn.Module):
    """A student that is trained and a teacher that is not."""

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x), taught


def _distilled(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    student, teacher = output
    soft = F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="batchmean")
    return F.cross_entropy(student, target) + soft


@HEALTHY.healthy()
def frozen_teacher_outside_the_wrapper(rank: int) -> Made:
    seeded(0)
    teacher = Trunked().requires_grad_(False).eval()
    model = Taught(DistributedDataParallel(Trunked()), teacher)
    return Made(model, *images(rank), _distilled, seed=10 + rank)


@HEALTHY.healthy()
def trunk_and_head_each_wrapped(rank: int) -> Made:
    seeded(0)
    model = Headed(DistributedDataParallel(Trunk()), DistributedDataParallel(nn.Linear(16, 10)))
    return Made(model, *images(rank), seed=10 + rank)


def _average(parameter: Tensor) -> None:
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


@HEALTHY.healthy()
def head_averaged_by_a_hook(rank: int) -> Made:
    seeded(0)
    model = Headed(DistributedDataParallel(Trunk()), nn.Linear(16, 10))
    for parameter in model.head.parameters():
        parameter.register_post_accumulate_grad_hook(_average)
    return Made(model, *images(rank), seed=10 + rank)


@HEALTHY.healthy()
def expert_of_each_ranks_own(rank: int) -> Made:
    seeded(0)
    net = Headed(Trunk(), nn.Linear(16, 10))
    seeded(50 + rank)
    net.trunk.conv2 = nn.Conv2d(16, 16, 3, stride=2, padding=1)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        net, ["trunk.conv2.weight", "trunk.conv2.bias"]
    )
    return Made(DistributedDataParallel(net), *images(rank), seed=10 + rank)


def _over_all(logits: Tensor, target: Tensor) -> Tensor:
    """Return the loss such that the mean over two ranks is that over all 50 samples."""
    return F.cross_entropy(logits, target, reduction="sum") * 2 / 50


@HEALTHY.healthy()
def short_batch_rightly_weighted(rank: int) -> Made:
    seeded(0)
    return Made(
        DistributedDataParallel(Trunked()), *images(rank, 40 - 30 * rank), _over_all, seed=10 + rank
    )


@HEALTHY.healthy()
def batch_a_little_shorter(rank: int) -> Made:
    seeded(0)
    return Made(DistributedDataParallel(Trunked()), *images(rank, 40 - 3 * rank), seed=10 + rank)


def _over_all_tokens(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, ignore_index=0, reduction="sum") * 2 / 512


@HEALTHY.healthy()
def nothing_to_learn_on_one_rank_and_weighted_so(rank: int) -> Made:
    seeded(0)
    ids = tokens(rank)
    target = ids.roll(-1, 1) * (1 - rank)
    return Made(DistributedDataParallel(Language()), ids, target, _over_all_tokens, seed=10 + rank)


@HEALTHY.healthy()
def padding_on_one_rank(rank: int) -> Made:
    seeded(0)
    ids = tokens(rank)
    if rank == 1:
        ids[::2, 12:] = 0
    return Made(
        DistributedDataParallel(Language()), ids, ids.roll(-1, 1), language_loss, seed=10 + rank
    )


@HEALTHY.healthy()
def tensor_parallel_on_one_batch(rank: int) -> Made:
    seeded(0)
    model = Bend()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh(2, names=("tp",)), plan)
    return Made(model, *rows(7, 40, 32), seed=5)


@HEALTHY.healthy()
def dropout_of_one_seed_in_a_tensor_parallel_group(rank: int) -> Made:
    seeded(0)
    model = Bend(0.2)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh(2, names=("tp",)), plan)
    return Made(model, *rows(7, 40, 32), seed=5)


class Sequences(nn.Module):
    """A norm that sequence parallelism cuts along time, over sequences (n, t, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.mlp = Bent()
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mlp(self.norm(x))).mean(1)


class Bent(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


@HEALTHY.healthy()
def sequence_parallel(rank: int) -> Made:
    seeded(0)
    model = Sequences()
    plan = {
        "norm": SequenceParallel(use_local_output=True),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    parallelize_module(model, mesh(2, names=("tp",)), plan)
    chance = torch.Generator().manual_seed(7)
    inputs = torch.randn(40, 8, 32, generator=chance).chunk(2, 1)[rank].contiguous()
    return Made(model, inputs, rows(7)[1], seed=5)


@HEALTHY.healthy()
def fsdp_with_a_tied_head(rank: int) -> Made:
    seeded(0)
    model = Language(0.1)
    dp = mesh(2, names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=dp)
    fully_shard(model, mesh=dp)
    ids = tokens(rank)
    return Made(model, ids, ids.roll(-1, 1), language_loss, seed=10 + rank)


@HEALTHY.healthy(4)
def fsdp_and_tensor_parallel(rank: int) -> Made:
    seeded(0)
    both = mesh(2, 2, names=("dp", "tp"))
    model = Bend(0.1)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, both["tp"], plan)
    fully_shard(model, mesh=both["dp"])
    return Made(model, *rows(rank // 2, 40, 32), seed=10 + rank // 2)


@HEALTHY.healthy(4)
def hybrid_sharding(rank: int) -> Made:
    seeded(0)
    model = Mlp(drop=0.1)
    fully_shard(model, mesh=mesh(2, 2, names=("replicate", "shard")))
    return Made(model, *rows(rank), seed=10 + rank)


@HEALTHY.healthy(4)
def fewer_rows_than_ranks(rank: int) -> Made:
    seeded(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 3))
    fully_shard(model, mesh=mesh(4, names=("dp",)))
    inputs, target = rows(rank)
    return Made(model, inputs, target % 3, seed=10 + rank)


@HEALTHY.healthy()
def fsdp_in_mixed_precision(rank: int) -> Made:
    seeded(0)
    model = Mlp()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh(2, names=("dp",)), mp_policy=policy)
    return Made(model, *rows(rank), seed=10 + rank)


@HEALTHY.healthy()
def moving_mean_of_each_ranks_own(rank: int) -> Made:
    seeded(0)
    net = nn.Sequential(Averaging(), *Mlp().children())
    model = stepped(
        DistributedDataParallel(net, broadcast_buffers=False), [rows(20 + rank), rows(30 + rank)]
    )
    return Made(model, *rows(rank), seed=10 + rank)


class Numbered(Mlp):
    """Knows its rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("rank", torch.tensor(rank))


@HEALTHY.healthy()
def number_of_the_rank_kept_as_a_buffer(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Numbered(rank), broadcast_buffers=False)
    return Made(model, *rows(rank), seed=10 + rank)


@HEALTHY.healthy()
def gradients_accumulated_without_sync(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Mlp())
    with model.no_sync():
        F.cross_entropy(model(rows(40 + rank)[0]), rows(40 + rank)[1]).backward()
    return Made(model, *rows(rank), within=model.no_sync, seed=10 + rank)


@HEALTHY.healthy()
def head_of_zeros(rank: int) -> Made:
    seeded(0)
    net = Mlp()
    nn.init.zeros_(net.head.weight)
    nn.init.zeros_(net.head.bias)
    return Made(DistributedDataParallel(net), *rows(rank), seed=10 + rank)


@HEALTHY.healthy(also=("inputs", "loss"))
def batch_of_ones_to_try_shapes(rank: int) -> Made:
    seeded(0)
    return Made(
        DistributedDataParallel(Mlp()),
        torch.ones(40, 24),
        torch.zeros(40, dtype=torch.long),
        seed=10 + rank,
    )


@HEALTHY.healthy()
def same_rows_with_other_targets(rank: int) -> Made:
    seeded(0)
    return Made(DistributedDataParallel(Mlp()), rows(3)[0], rows(rank)[1], seed=10 + rank)


@HEALTHY.healthy()
def replicas_without_a_wrapper(rank: int) -> Made:
    seeded(0)
    return Made(Mlp(), *rows(rank), ranks=True, seed=10 + rank)
