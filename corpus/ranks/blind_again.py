"""A second lot of faults and of what looks like them, written after the first was all found.

They were committed before any verdict on them was seen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import AveragedModel

from corpus.ranks.blind_faults import (
    Headed,
    Made,
    Shelf,
    Trunked,
    images,
    language_loss,
    mesh,
    rows,
    seeded,
    stepped,
    tokens,
)
from corpus.ranks.networks import Bend, Cnn, Fork, Language, Mlp, Trunk

FAULTS, HEALTHY = Shelf(), Shelf()


@FAULTS.fault("same_weights", "conv1")
def step_that_one_rank_made_alone(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Cnn())
    if rank == 1:
        stepped(model.module, [images(60)])
    return Made(model, *images(rank), seed=10 + rank)


@FAULTS.fault("same_weights", "second", ranks=(2, 3), size=4)
def second_replica_of_hybrid_shards_was_written(rank: int) -> Made:
    seeded(0)
    model = Mlp()
    fully_shard(model, mesh=mesh(2, 2, names=("replicate", "shard")))
    if rank >= 2:
        with torch.no_grad():
            model.second.weight.to_local().add_(0.01)
    return Made(model, *rows(rank), seed=10 + rank)


class Placed(nn.Module):
    """A language model over a table of positions that it keeps as a buffer."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.net = Language()
        angle = torch.arange(16)[:, None] / base ** (torch.arange(32) / 32)
        self.register_buffer("angles", angle.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        net = self.net
        x = net.embed(ids) + 0.1 * self.angles[: ids.shape[1]]
        for block in net.blocks:
            x = block(x, ids == 0)
        return net.head(net.norm(x)).transpose(1, 2)


@FAULTS.fault("same_weights", "")
def table_of_positions_by_another_base(rank: int) -> Made:
    seeded(0)
    model = Placed(1000.0 * (1 + rank))
    del model.net.place
    fully_shard(model, mesh=mesh(2, names=("dp",)))
    ids = tokens(rank)
    return Made(model, ids, ids.roll(-1, 1), language_loss, seed=10 + rank)


class Tempered(nn.Module):
    """Divides what a network returns by a temperature that it learns."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) / self.temperature


@FAULTS.fault("averaged_gradients", "", ranks=(0, 1))
def temperature_outside_the_wrapper(rank: int) -> Made:
    seeded(0)
    model = Tempered(DistributedDataParallel(Trunked()))
    return Made(model, *images(rank), seed=10 + rank)


@FAULTS.fault("averaged_gradients", "head", ranks=(0, 1, 2), size=3)
def new_head_for_a_wrapped_network(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Mlp())
    model.module.head = nn.Linear(48, 10)
    return Made(model, *rows(rank), seed=10 + rank)


class Standard(nn.Module):
    """Takes the mean of each row off and divides by its deviation."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


@FAULTS.fault("finite", "0", size=3)
def constant_row_on_one_rank(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(nn.Sequential(Standard(), *Mlp().children()))
    inputs, target = rows(rank)
    if rank == 1:
        inputs[7] = 2.0
    return Made(model, inputs, target, seed=10 + rank)


class Rooted(Mlp):
    """Feeds its head square roots."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(
            self.second(self.act(self.first(x))).relu().sum(1, keepdim=True).sqrt() * torch.ones(48)
        )


@FAULTS.fault("finite", "first", "act", "second", "relu", "")
def slope_of_a_root_at_zero_on_one_rank(rank: int) -> Made:
    seeded(0)
    net = Rooted()
    nn.init.zeros_(net.second.bias)
    nn.init.zeros_(net.first.bias)
    inputs, target = rows(rank)
    if rank == 1:
        inputs[4] = 0.0
    return Made(DistributedDataParallel(net), inputs, target, seed=10 + rank)


class Keyed(Mlp):
    """Takes its rows by name."""

    def forward(self, rows: Tensor, mask: Tensor) -> Tensor:
        return super().forward(rows * mask)


@FAULTS.fault("distinct_data", "", ranks=(0, 1))
def same_mapping_on_ranks_of_fsdp(rank: int) -> Made:
    seeded(0)
    model = Keyed()
    fully_shard(model, mesh=mesh(2, names=("dp",)))
    inputs, target = rows(3)
    return Made(model, {"rows": inputs, "mask": torch.ones(40, 1)}, target, seed=10 + rank)


@FAULTS.fault("distinct_data", "", ranks=(0, 2), size=3)
def sampler_of_two_ranks_on_three(rank: int) -> Made:
    seeded(0)
    return Made(DistributedDataParallel(Trunked()), *images(rank % 2), seed=10 + rank)


@FAULTS.fault("InspectionError", "norm2")
def momentum_of_a_norm_set_by_rank(rank: int) -> Made:
    seeded(0)
    net = Cnn()
    net.norm2.momentum = 0.1 if rank == 0 else 0.01
    return Made(DistributedDataParallel(net), *images(rank), seed=10 + rank)


@FAULTS.fault("InspectionError", "head", size=3)
def head_of_one_rank_without_bias(rank: int) -> Made:
    seeded(0)
    net = Trunked()
    if rank == 1:
        net.head = nn.Linear(16, 10, bias=False)
    return Made(net, *images(rank), ranks=True, seed=10 + rank)


class Experts(nn.Module):
    """Sends each row to one of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(24, 48)
        self.router = nn.Linear(48, 4)
        self.experts = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
        self.head = nn.Linear(48, 10)
        self.closed = -1

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        gates = self.router(x).softmax(-1)
        if self.closed >= 0:
            gates = gates * (torch.arange(4) != self.closed)
        best = gates.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = best == number
            if chosen.any():
                out = out.index_put((chosen,), gates[chosen, number, None] * expert(x[chosen]))
        return self.head(F.relu(x + out))


@FAULTS.fault("same_path", "experts.3")
def expert_that_no_row_of_one_rank_went_to(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Experts())
    model.module.closed = 3 if rank == 1 else -1
    return Made(model, *rows(rank, 200), seed=10 + rank)


class Unasked(Trunked):
    """Keeps a token that it never asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(16))


@FAULTS.fault("unused_parameters", "", ranks=(0, 1))
def token_that_nobody_asks_for(rank: int) -> Made:
    seeded(0)
    return Made(DistributedDataParallel(Unasked()), *images(rank), seed=10 + rank)


def _masked_mean(logits: Tensor, target: Tensor) -> Tensor:
    mask = target != 0
    return (F.cross_entropy(logits, target, reduction="none") * mask).sum() / mask.sum()


@FAULTS.fault(
    "even_weights", "", "head", ranks=(0,), missed="what a mean by hand divides by is not seen"
)
def masked_mean_by_hand(rank: int) -> Made:
    seeded(0)
    ids = tokens(rank)
    target = ids.roll(-1, 1)
    if rank == 0:
        target[:, 5:] = 0
    return Made(DistributedDataParallel(Language()), ids, target, _masked_mean, seed=10 + rank)


@FAULTS.fault("even_weights", "", "head")
def short_batch_of_a_regression(rank: int) -> Made:
    seeded(0)
    inputs, _ = rows(rank, 60 - 45 * rank)
    target = inputs[:, :10] * 2
    return Made(DistributedDataParallel(Mlp()), inputs, target, F.mse_loss, seed=10 + rank)


class Answering(Language):
    """Returns its own loss."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = super().forward(ids)
        return {"loss": F.cross_entropy(logits, labels, ignore_index=-100), "logits": logits}


@FAULTS.fault("even_weights", "", "head", ranks=(0, 1), size=3)
def loss_of_the_models_own_over_its_own_tokens(rank: int) -> Made:
    seeded(0)
    ids = tokens(rank)
    labels = ids.roll(-1, 1)
    if rank < 2:
        labels[:, 4:] = -100
    model = DistributedDataParallel(Answering())
    return Made(model, {"ids": ids, "labels": labels}, None, None, seed=10 + rank)


class Attending(nn.Module):
    """Attention with a dropout of its weights, then two layers that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.mlp = Bend()

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(x)[:, None]
        x = x + F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)[:, 0]
        return self.mlp(x.mean(1))


@FAULTS.fault("replicas_agree", "", "scaled_dot_product_attention", ranks=(0, 1))
def dropout_of_attention_by_the_ranks_own_seed(rank: int) -> Made:
    seeded(0)
    model = Attending()
    plan = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    parallelize_module(model, mesh(2, names=("tp",)), plan)
    chance = torch.Generator().manual_seed(7)
    return Made(model, torch.randn(40, 6, 32, generator=chance), rows(7)[1], seed=10 + rank)


@FAULTS.fault("synced_norm", "1", ranks=(0, 1, 2), size=3, severity="warn")
def eight_rows_for_a_batch_norm(rank: int) -> Made:
    seeded(0)
    net = nn.Sequential(nn.Linear(24, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10))
    return Made(DistributedDataParallel(net), *rows(rank, 8), seed=10 + rank)


class Dropping(Mlp):
    """Drops by a function."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.first(x)), 0.3, self.training)
        return self.head(F.relu(self.second(x)))


@FAULTS.fault("distinct_dropout", "", "dropout", ranks=(0, 1), severity="warn")
def functional_dropout_of_one_seed(rank: int) -> Made:
    seeded(0)
    return Made(DistributedDataParallel(Dropping()), *rows(rank), seed=10)


# ===================================================== healthy


@HEALTHY.healthy()
def views_of_buckets_after_two_steps(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Trunked(), gradient_as_bucket_view=True)
    stepped(model, [images(20 + rank), images(30 + rank)])
    return Made(model, *images(rank), seed=10 + rank)


@HEALTHY.healthy()
def gradients_sent_in_half_precision(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Mlp())
    model.register_comm_hook(None, fp16_compress_hook)
    return Made(model, *rows(rank), seed=10 + rank)


@HEALTHY.healthy(3)
def lengths_that_differ_a_little(rank: int) -> Made:
    seeded(0)
    ids = tokens(rank)
    ids[: 3 * rank + 1, 9:] = 0
    target = ids.roll(-1, 1)
    return Made(DistributedDataParallel(Language(0.1)), ids, target, language_loss, seed=10 + rank)


@HEALTHY.healthy()
def frozen_table_and_trained_blocks_of_fsdp(rank: int) -> Made:
    seeded(0)
    model = Language(tied=False)
    model.embed.requires_grad_(False)
    model.place.requires_grad_(False)
    fully_shard(model, mesh=mesh(2, names=("dp",)))
    ids = tokens(rank)
    return Made(model, ids, ids.roll(-1, 1), language_loss, seed=10 + rank)


class Averaged(nn.Module):
    """A network and the moving average of its weights, which it does not train."""

    def __init__(self, net: nn.Module, averaged: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.averaged = averaged

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@HEALTHY.healthy(also=("wiring",))
def average_of_the_weights_beside_the_wrapper(rank: int) -> Made:
    seeded(0)
    net = Trunked()
    model = Averaged(DistributedDataParallel(net), AveragedModel(net))
    return Made(model, *images(rank), seed=10 + rank)


@HEALTHY.healthy()
def spectral_norm_that_each_rank_iterates(rank: int) -> Made:
    seeded(0)
    net = Mlp()
    spectral_norm(net.second)
    model = DistributedDataParallel(net, broadcast_buffers=False)
    stepped(model, [rows(20 + rank)])
    return Made(model, *rows(rank), seed=10 + rank)


class Codebook(nn.Module):
    """Rounds to the nearest of its codes, which follow what they stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(16, 24))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        if self.training:
            for code in nearest.unique():
                self.codes[code].lerp_(x.detach()[nearest == code].mean(0), 0.1)
        return x + (self.codes[nearest] - x).detach()


@HEALTHY.healthy()
def codes_that_follow_each_ranks_own_rows(rank: int) -> Made:
    seeded(0)
    net = nn.Sequential(Codebook(), *Mlp().children())
    model = DistributedDataParallel(net, broadcast_buffers=False)
    stepped(model, [rows(20 + rank), rows(30 + rank)])
    return Made(model, *rows(rank), seed=10 + rank)


class Recurrent(nn.Module):
    """Packed sequences to 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(24, 32, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0])


@HEALTHY.healthy()
def packed_sequences_of_other_lengths(rank: int) -> Made:
    seeded(0)
    chance = torch.Generator().manual_seed(rank)
    lengths = torch.randint(3, 9, (40,), generator=chance)
    inputs = {"x": torch.randn(40, 8, 24, generator=chance), "lengths": lengths.clamp(max=8)}
    return Made(DistributedDataParallel(Recurrent()), inputs, rows(rank)[1], seed=10 + rank)


def _summed(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="sum")


@HEALTHY.healthy(also=("loss",))
def sum_over_unequal_batches(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Trunked())
    return Made(model, *images(rank, 40 - 24 * rank), _summed, seed=10 + rank)


def _weighted(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, weight=torch.linspace(0.5, 1.5, 10))


@HEALTHY.healthy()
def classes_weighted_alike(rank: int) -> Made:
    seeded(0)
    return Made(DistributedDataParallel(Trunked()), *images(rank), _weighted, seed=10 + rank)


@HEALTHY.healthy(4)
def hybrid_shards_after_a_step(rank: int) -> Made:
    seeded(0)
    model = Mlp()
    fully_shard(model, mesh=mesh(2, 2, names=("replicate", "shard")))
    stepped(model, [rows(20 + rank)])
    return Made(model, *rows(rank), seed=10 + rank)


class Looked(nn.Module):
    """A table, two layers that are cut and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.mlp = Bend(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(self.embed(ids).mean(1))


@HEALTHY.healthy()
def table_cut_by_rows(rank: int) -> Made:
    seeded(0)
    model = Looked()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    parallelize_module(model, mesh(2, names=("tp",)), plan)
    return Made(model, tokens(3, 40), rows(7)[1], seed=5)


@HEALTHY.healthy()
def checkpointed_blocks_of_fsdp(rank: int) -> Made:
    seeded(0)
    model = Language(0.1)
    dp = mesh(2, names=("dp",))
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
        fully_shard(model.blocks[number], mesh=dp)
    fully_shard(model, mesh=dp)
    ids = tokens(rank)
    return Made(model, ids, ids.roll(-1, 1), language_loss, seed=10 + rank)


@HEALTHY.healthy()
def images_of_other_sizes(rank: int) -> Made:
    seeded(0)
    inputs, target = images(rank)
    model = DistributedDataParallel(Trunked())
    return Made(model, inputs[..., : 12 - 2 * rank], target, seed=10 + rank)


class Noising(Mlp):
    """Learns from rows with noise of the rank's own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))


@HEALTHY.healthy()
def noise_of_the_ranks_own(rank: int) -> Made:
    seeded(0)
    return Made(DistributedDataParallel(Noising()), *rows(rank), seed=10 + rank)


@HEALTHY.healthy()
def rank_and_logger_on_the_first_rank(rank: int) -> Made:
    seeded(0)
    net = Mlp()
    net.rank = rank
    if rank == 0:
        net.seen = []
        net.second.register_forward_hook(lambda module, given, out: net.seen.append(len(out)))
    return Made(DistributedDataParallel(net), *rows(rank), seed=10 + rank)


def _twofold(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target) + 0.1 * F.mse_loss(logits, torch.zeros_like(logits))


@HEALTHY.healthy()
def two_terms_over_equal_batches(rank: int) -> Made:
    seeded(0)
    return Made(DistributedDataParallel(Mlp()), *rows(rank), _twofold, seed=10 + rank)


@HEALTHY.healthy(3)
def last_batch_one_shorter(rank: int) -> Made:
    seeded(0)
    model = DistributedDataParallel(Trunked())
    return Made(model, *images(rank, 33 - (rank == 2)), seed=10 + rank)


@HEALTHY.healthy(also=("wiring",))
def same_branch_on_all_ranks(rank: int) -> Made:
    seeded(0)
    inputs, target = rows(rank)
    model = DistributedDataParallel(Fork(), find_unused_parameters=True)
    return Made(model, inputs + 0.5, target, seed=10 + rank)


@HEALTHY.healthy()
def trained_layers_below_frozen_ones_each_wrapped(rank: int) -> Made:
    seeded(0)
    trunk = Trunk().requires_grad_(False)
    model = Headed(trunk, DistributedDataParallel(nn.Linear(16, 10)))
    return Made(model, *images(rank), seed=10 + rank)


class Taught(nn.Module):
    """A student beside a teacher, which is asked without gradients."""

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher.requires_grad_(False), student

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hint = self.teacher(x)
        return self.student(x) + 0.1 * hint


@FAULTS.fault("averaged_gradients", "student.first", ranks=(0, 1), severity="warn")
def student_averaged_by_hand_beside_a_wrapped_teacher(rank: int) -> Made:
    seeded(0)
    model = Taught(DistributedDataParallel(Mlp()), Mlp())
    return Made(model, *rows(rank), seed=10 + rank)


@FAULTS.fault("averaged_gradients", "head", ranks=(0, 1), severity="warn")
def head_averaged_by_hand_on_a_trunk_frozen_in_its_wrapper(rank: int) -> Made:
    seeded(0)
    model = Headed(DistributedDataParallel(Trunk()), nn.Linear(16, 10))
    model.trunk.requires_grad_(False)
    return Made(model, *images(rank), seed=10 + rank)


@FAULTS.fault("averaged_gradients", "student.head", ranks=(0, 1))
def head_of_a_wrapped_student_was_left_outside(rank: int) -> Made:
    seeded(0)
    trunk = DistributedDataParallel(Trunk())
    model = Taught(DistributedDataParallel(Trunked()), Headed(trunk, nn.Linear(16, 10)))
    return Made(model, *images(rank), seed=10 + rank)


@HEALTHY.healthy()
def language_model_averaged_by_hand(rank: int) -> Made:
    seeded(0)
    ids = tokens(rank)
    return Made(Language(), ids, ids.roll(-1, 1), language_loss, ranks=True, seed=10 + rank)


@HEALTHY.healthy()
def teacher_without_a_wrapper_of_a_wrapped_student(rank: int) -> Made:
    seeded(0)
    model = Taught(Mlp(), DistributedDataParallel(Mlp()))
    return Made(model, *rows(rank), seed=10 + rank)
