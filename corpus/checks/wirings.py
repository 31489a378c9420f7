"""Models put together wrongly, and designs that look alike: what the tests of `wiring` judge."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence

WIDTH, ROWS, LENGTH, SAMPLES = 8, 32, 6, 4

# ---- what the models are made of ----------------------------------------------------------------


class Attention(nn.Module):
    """Attention of one head; `causal` has the fused function hide the future."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.causal = causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.causal:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = q @ k.transpose(1, 2)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, :], -1e4)
        return scores.softmax(-1) @ v


class Block(nn.Module):
    """A block of a transformer; `leave_out` says what is forgotten."""

    def __init__(self, leave_out: str = "", causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(causal and leave_out != "causal")
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.leave_out = leave_out

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.leave_out == "mask":
            mask = None
        x = x + self.attention(self.norm1(x), mask)
        if self.leave_out == "norm":
            return x + self.mlp(x)
        if self.leave_out == "residual":
            return self.mlp(self.norm2(x))
        second = self.norm1 if self.leave_out == "own norm" else self.norm2
        return x + self.mlp(second(x))


Run = Callable[..., Tensor]


class Model(nn.Module):
    """Embeds ids, does what it is told with its parts, and has a head."""

    def __init__(self, run: Run, **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.token = nn.Embedding(ROWS, WIDTH).requires_grad_(False)
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)
        self.head = nn.Linear(WIDTH, 3)
        self.run = [run]

    def forward(self, ids: Tensor, *others: Tensor) -> Tensor:
        x = self.token(ids) if ids.dtype == torch.long else ids
        return self.head(self.run[0](self, x, *others))


def ids() -> Tensor:
    """Return ids of words."""
    return torch.randint(1, ROWS, (SAMPLES, LENGTH))


def mask() -> Tensor:
    """Return where the batch is padding."""
    return torch.arange(LENGTH) >= torch.tensor([[6], [5], [4], [3]])


def features(*shape: int) -> Tensor:
    """Return numbers of the models' width."""
    return torch.randn(*(shape or (SAMPLES, LENGTH)), WIDTH)


def blocks(*leave_out: str, **options: Any) -> nn.ModuleList:
    """Return a block for each of these."""
    return nn.ModuleList(Block(what, **options) for what in leave_out)


def linears(count: int = 4) -> nn.ModuleList:
    """Return layers of one shape."""
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


def norms(count: int = 4) -> nn.ModuleList:
    """Return normalisations."""
    return nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(count))


def in_a_row(model: Any, x: Tensor, *others: Tensor) -> Tensor:
    """Call the blocks one after the other."""
    for block in model.blocks:
        x = block(x, *others)
    return x


# ---- put together wrongly -----------------------------------------------------------------------


def first_block_for_all(model: Any, x: Tensor) -> Tensor:
    for _ in model.blocks:
        x = model.blocks[0](x)
    return x


def one_norm_of_a_list(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = x + layer(model.norms[0](x))
    return x


def first_of_both_twice(model: Any, x: Tensor) -> Tensor:
    return torch.minimum(model.left(x), model.left(x))


def one_tower(model: Any, x: Tensor, other: Tensor) -> Tensor:
    return model.left(x) * model.left(other)


def one_convolution(model: Any, x: Tensor) -> Tensor:
    return x + model.fc1(F.relu(model.fc1(x)))


def encoder_decodes(model: Any, x: Tensor) -> Tensor:
    return model.encoder(model.encoder(x))


def same_position(model: Any, x: Tensor) -> Tensor:
    return x + model.position(torch.zeros(x.shape[:2], dtype=torch.long))


def other_ids_not_given(model: Any, x: Tensor) -> Tensor:
    """Two embeddings of a token, one of ids that default to zeros; positions are added later."""
    shape = model.shape(torch.zeros(x.shape[:2], dtype=torch.long))
    return model.join(torch.cat([x, shape], -1)) + model.position(torch.arange(x.shape[1]))


def positions_in_a_cell(model: Any, x: Tensor) -> Tensor:
    """Positions begin anew in each cell; which cell a token is in was not given: all in one."""
    cells = torch.zeros(x.shape[:2], dtype=torch.long)
    counts = torch.arange(LENGTH).expand(x.shape[:2])
    first = torch.zeros_like(cells).scatter_reduce(1, cells, counts, "amin", include_self=False)
    return x + model.position(counts - first.gather(1, cells)) + model.cell(cells)


def position_of_one_row(model: Any, x: Tensor) -> Tensor:
    return x + model.position(torch.full((1, LENGTH), 3))


def positions_times_zero(model: Any, x: Tensor) -> Tensor:
    return x + model.position(torch.arange(x.shape[1]) * 0)


def ignores_others(model: Any, x: Tensor, *_: Tensor) -> Tensor:
    return model.fc(x)


def reads_nothing(model: Any, x: Tensor) -> Tensor:
    return model.fc(model.table[: x.shape[1]]).expand(len(x), -1, -1)


class Deaf(nn.Module):
    """Takes a mask and has no use for it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return x + self.fc(x)


def both_towers_on_one(model: Any, x: Tensor, _: Tensor) -> Tensor:
    return model.left(x) * model.right(x)


def one_input_twice(model: Any, x: Tensor, _: Tensor) -> Tensor:
    return (model.tower(x) - model.tower(x)).abs()


def masked_otherwise_but_once(model: Any, x: Tensor, hidden: Tensor) -> Tensor:
    for number, block in enumerate(model.blocks):
        x = block(x, hidden.flip(0) if number == 3 else hidden)
    return x


def state_not_carried(model: Any, x: Tensor) -> Tensor:
    state = x.new_zeros(len(x), WIDTH)
    return torch.stack([model.cell(step, state) for step in x.unbind(1)], dim=1)


def no_state_at_all(model: Any, x: Tensor) -> Tensor:
    return torch.stack([model.cell(step) for step in x.unbind(1)], dim=1)


def cell_state_dropped(model: Any, x: Tensor) -> Tensor:
    state = memory = x.new_zeros(len(x), WIDTH)
    for step in x.unbind(1):
        state, _ = model.cell(step, (state, memory))
    return state


def steps_by_themselves(model: Any, x: Tensor) -> Tensor:
    return torch.cat([model.lstm(x[:, t : t + 1])[0] for t in range(x.shape[1])], dim=1)


class Cell(nn.Module):
    """A recurrent cell written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.kept = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return torch.tanh(self.given(x) + self.kept(state))


def with_context(model: Any, x: Tensor, context: Tensor) -> Tensor:
    return torch.stack([model.cell(step, context) for step in x.unbind(1)], dim=1)


def encoder_blocks_decode(model: Any, x: Tensor) -> Tensor:
    for block in model.encoder:
        x = block(x)
    for block in model.encoder:
        x = block(x)
    return x


class Doubled(nn.Module):
    """Adds its branch to itself in place of to its input."""

    def __init__(self, fault: bool = True) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fault = [fault]

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(self.norm(x))
        return h + h if self.fault[0] else x + h


class Coded(nn.Module):
    """A block whose code is given."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.run = [run]

    def forward(self, x: Tensor) -> Tensor:
        return self.run[0](self, x)


class Holding(nn.Module):
    """A block around one whose code is given."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.inner, self.out = Coded(run), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


def coded(*runs: Run, block: Callable[[Run], nn.Module] = Coded) -> nn.ModuleList:
    """Return a block for each of these."""
    return nn.ModuleList(map(block, runs))


def gated(block: Any, x: Tensor) -> Tensor:
    return x + torch.sigmoid(block.gate(x)) * block.fc(block.norm(x))


def gate_not_applied(block: Any, x: Tensor) -> Tensor:
    torch.sigmoid(block.gate(x))
    return x + block.fc(block.norm(x))


def not_added(block: Any, x: Tensor) -> Tensor:
    return torch.sigmoid(block.gate(x)) * block.fc(block.norm(x))


def scaled(block: Any, x: Tensor) -> Tensor:
    return gated(block, x * 3.0)


def skipped(_: Any, x: Tensor) -> Tensor:
    return x


def with_a_kept_sum() -> nn.ModuleList:
    """Return blocks of which the first computes a sum for all."""
    kept: list[Tensor] = []

    def first(block: Any, x: Tensor) -> Tensor:
        kept[:] = [x.sum(1, keepdim=True)]
        return later(block, x)

    def later(block: Any, x: Tensor) -> Tensor:
        return gated(block, x) + kept[0]

    return coded(first, later, later, later, later)


def joined(model: Any, x: Tensor) -> Tensor:
    return model.join(torch.cat([model.one(x), model.other(x)], -1))


def joined_to_itself(model: Any, x: Tensor) -> Tensor:
    one = model.one(x)
    model.other(x)
    return model.join(torch.cat([one, one], -1))


def both_states(model: Any, x: Tensor) -> Tensor:
    _, (state, memory) = model.lstm(x)
    return model.join(torch.cat([state, memory], -1))[0]


def chosen_from_one(model: Any, x: Tensor, hidden: Tensor) -> Tensor:
    h = model.fc(x)
    return torch.where(hidden[..., None], h, h)


def chosen_from_two(model: Any, x: Tensor, hidden: Tensor) -> Tensor:
    h = model.fc(x)
    return torch.where(hidden[..., None], h, x)


def repeated(model: Any, x: Tensor) -> Tensor:
    return torch.stack([model.fc(x)] * 4).mean(0)


def two_dropouts(model: Any, x: Tensor) -> Tensor:
    return model.join(torch.cat([model.drop(x), model.drop(x)], -1))


def rotary(model: Any, x: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(x.shape[1]), torch.ones(WIDTH // 2))
    angles = torch.cat([angles, angles], -1)
    return model.fc(x * angles.cos())


def parts() -> dict[str, nn.Module]:
    """Return two layers of one shape, and one that joins what they give."""
    wide = nn.Linear(2 * WIDTH, WIDTH)
    return {"one": nn.Linear(WIDTH, WIDTH), "other": nn.Linear(WIDTH, WIDTH), "join": wide}


def attends(model: Any, x: Tensor) -> Tensor:
    q, k, v = model.q(x), model.k(x), model.v(x)
    return model.out((q @ k.transpose(1, 2)).softmax(-1) @ v)


def projections(*names: str) -> dict[str, nn.Module]:
    """Return a layer of one shape for each name."""
    return {name: nn.Linear(WIDTH, WIDTH) for name in names}


def towers() -> dict[str, nn.Module]:
    """Return two towers and a head for each."""
    heads = {"label": nn.Linear(WIDTH, WIDTH), "place": nn.Linear(WIDTH, WIDTH, bias=False)}
    return {"left": Block(), "right": Block(), **heads}


def last_left_out(model: Any, x: Tensor) -> Tensor:
    for layer in (model.first, model.second):
        x = x + F.gelu(layer(x))
    return x


class TwoTasks(nn.Module):
    """Returns what two heads make, or one under two names."""

    def __init__(self, fault: bool) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleDict({"age": nn.Linear(WIDTH, 1), "size": nn.Linear(WIDTH, 1)})
        if fault:
            self.heads["size"] = self.heads["age"]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = F.gelu(self.trunk(x))
        return {name: head(h) for name, head in self.heads.items()}


def position_table() -> nn.Embedding:
    """Return a table of positions."""
    return nn.Embedding(LENGTH + 2, WIDTH)


def table() -> nn.Parameter:
    """Return a table of positions that is no layer."""
    return nn.Parameter(torch.randn(LENGTH + 2, WIDTH))


class Skipping(nn.Module):
    """A block whose branch begins with an activation that may write over the skip."""

    def __init__(self, inplace: bool, inside: bool = True) -> None:
        super().__init__()
        self.act, self.fc = nn.ReLU(inplace), nn.Linear(WIDTH, WIDTH)
        self.branch = nn.Sequential(self.act, self.fc)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.branch(x) if self.inside else self.fc(self.act(x)))


class Activated(nn.Module):
    """A block that ends in an activation in place, as a ResNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(self.act(self.fc(x))) + x)


def after_a_layer(model: Any, x: Tensor) -> Tensor:
    return in_a_row(model, model.fc(x))


def both_lists(model: Any, x: Tensor) -> Tensor:
    for block in (*model.encoder, *model.decoder):
        x = block(x)
    return x


def two_heads_on_a_trunk(model: Any, x: Tensor) -> Tensor:
    return model.actor(x) + model.critic(x)


def trunk_and_heads() -> dict[str, nn.Module]:
    """Return two heads in a row after the same layers."""
    trunk = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    return {name: nn.Sequential(*trunk, nn.Linear(WIDTH, WIDTH)) for name in ("actor", "critic")}


def same_layers(*names: str) -> list[tuple[str, list[nn.Module]]]:
    """Return the same layers for each name."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return [(name, layers) for name in names]


class Normed(nn.Module):
    """A layer with a normalisation that it is given."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(WIDTH, WIDTH), norm

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.fc(x).transpose(1, 2)).transpose(1, 2))


def shared_norm(make: Callable[[], nn.Module]) -> nn.ModuleList:
    norm = make()
    return nn.ModuleList(Normed(norm) for _ in range(3))


# ---- designs that look alike --------------------------------------------------------------------


def universal(model: Any, x: Tensor) -> Tensor:
    for step in model.steps.unbind(0):
        x = model.block(x + step)
    return x


def mixture(model: Any, x: Tensor) -> Tensor:
    chosen = model.router(x).argmax(-1) % 2  # experts 2 and 3 stay idle
    out = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        at = chosen == number
        if at.any():
            out[at] = expert(x[at])
    return x + out


def routed_by_sample(model: Any, x: Tensor) -> Tensor:
    return torch.stack([model.experts[0](sample) for sample in x])


def dropped_layer(model: Any, x: Tensor) -> Tensor:
    for number, block in enumerate(model.blocks):
        x = x if number == 2 else block(x)
    return x


def early_exit(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks[:2]:
        x = block(x)
    return x


def adapted(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = x + model.adapters["en"](block(x))
    return x


def borrowed_weights(model: Any, x: Tensor) -> Tensor:
    return F.linear(model.first(model.first(x)), model.second.weight, model.second.bias)


def ensemble(model: Any, x: Tensor) -> Tensor:
    template = model.members[0]
    outputs = [functional_call(template, dict(m.named_parameters()), x) for m in model.members]
    return torch.stack(outputs).mean(0)


def views(model: Any, x: Tensor, other: Tensor) -> Tensor:
    online = model.online(x) + model.online(other)
    if model.use_target:
        online = online + model.target(x)
    return online


def two_views(model: Any, x: Tensor, other: Tensor) -> Tensor:
    return model.left(x) * model.right(other)


def committee(model: Any, x: Tensor) -> Tensor:
    return model.left(x) + model.right(x)


def siamese(model: Any, x: Tensor, other: Tensor) -> Tensor:
    return (model.tower(x) - model.tower(other)).abs()


def with_types(model: Any, x: Tensor) -> Tensor:
    positions = model.position(torch.arange(x.shape[1]))
    return x + positions + model.types(torch.zeros(x.shape[:2], dtype=torch.long))


def with_boxes(model: Any, x: Tensor) -> Tensor:
    boxes = torch.zeros(*x.shape[:2], 4, dtype=torch.long)
    x = x + model.position(torch.arange(x.shape[1]))
    return x + model.left(boxes[..., 0]) + model.top(boxes[..., 1])


def one_row(model: Any, x: Tensor) -> Tensor:
    return x + model.only(torch.zeros(x.shape[:2], dtype=torch.long))


def of_a_kind(model: Any, x: Tensor) -> Tensor:
    return x + model.kind(torch.zeros(len(x), dtype=torch.long))[:, None]


def encoded_positions(model: Any, x: Tensor) -> Tensor:
    return x + model.table[:LENGTH] + model.kind(torch.zeros(x.shape[:2], dtype=torch.long))


def counted_from_a_buffer(model: Any, x: Tensor) -> Tensor:
    return x + model.position(model.numbers[:, : x.shape[1]])


class T5Block(nn.Module):
    """A block of which the first makes the bias that all add to their scores."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.bias = nn.Embedding(2 * LENGTH, 1) if first else None

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            at = torch.arange(x.shape[1])
            bias = self.bias(at[None] - at[:, None] + x.shape[1])[..., 0]
        scores = self.q(x) @ self.k(x).transpose(1, 2) + bias
        return x + scores.softmax(-1) @ self.v(x), bias


def t5(model: Any, x: Tensor) -> Tensor:
    bias = None
    for block in model.blocks:
        x, bias = block(x, bias)
    return x


class Remembering(nn.Module):
    """A block that adds the first one's values to its own."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        values = self.v(x)
        mixed = values if first is None else values + first
        return x + self.out(mixed), values if first is None else first


def every_other_masked(model: Any, x: Tensor, hidden: Tensor) -> Tensor:
    for number, block in enumerate(model.blocks):
        x = block(x, hidden) if number % 2 else block(x)
    return x


class DropPath(nn.Module):
    """Leaves out the branch of whole samples; the first block's never."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.p:
            return x
        return x * torch.empty(len(x), 1, 1).bernoulli_(1 - self.p) / (1 - self.p)


class Deep(nn.Module):
    """A block with stochastic depth."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(WIDTH, WIDTH), DropPath(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(F.gelu(self.fc(x)))


class Bottleneck(nn.Module):
    """A block of a ResNet, with a projection where it strides."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, stride, 1)
        self.project = nn.Conv1d(WIDTH, WIDTH, 1, stride) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        short = x if self.project is None else self.project(x)
        return F.relu(self.conv(x)) + short


def convolved(model: Any, x: Tensor) -> Tensor:
    x = x.transpose(1, 2)
    for block in model.blocks:
        x = block(x)
    return x.mean(-1)


class Inverted(nn.Module):
    """A block of a MobileNet: what strides has no residual."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, stride, 1), nn.BatchNorm1d(WIDTH)
        self.residual = stride == 1

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        return x + out if self.residual else out


def dense(model: Any, x: Tensor) -> Tensor:
    grown = [x]
    for layer in model.layers:
        grown.append(F.relu(layer(sum(grown))))
    return sum(grown)


def u_net(model: Any, x: Tensor) -> Tensor:
    skips = []
    for down in model.down:
        x = down(x)
        skips.append(x)
    x = model.bottom(x)
    for up, skip in zip(reversed(model.up), reversed(skips), strict=True):
        x = up(x + skip)
    return x


def packed(model: Any, x: Tensor, lengths: Tensor) -> Tensor:
    rows = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    return model.lstm(rows)[1][0][-1]


def activation_dropped(model: Any, x: Tensor) -> Tensor:
    h = model.up(x)
    model.act(h)
    return model.down(h)


def dropped_mask(model: Any, x: Tensor, seen: Tensor) -> Tensor:
    hidden = None if seen.all() else ~seen
    return model.block(x, hidden)


def adapted_inside(model: Any, x: Tensor, target: Tensor) -> Tensor:
    """One step of its own loss, differentiated through: the target is read by that loss alone."""
    loss = nn.functional.mse_loss(model.fc(x), target)
    slopes = torch.autograd.grad(loss, model.fc.weight, create_graph=True)[0]
    return nn.functional.linear(x, model.fc.weight - 0.1 * slopes, model.fc.bias)


def told_by_number(model: Any, x: Tensor, count: Tensor) -> Tensor:
    return model.fc(x[:, : int(count)])


def told_by_list(model: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.stack([model.fc(s[:n]).mean(0) for s, n in zip(x, lengths.tolist(), strict=True)])


def told_by_numpy(model: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return model.fc(x[:, : lengths.numpy().max()])


def recurrent(model: Any, x: Tensor) -> Tensor:
    state = x.new_zeros(len(x), WIDTH)
    for step in x.unbind(1):
        state = model.cell(step, state)
    return state


def both_states_carried(model: Any, x: Tensor) -> Tensor:
    state = memory = x.new_zeros(len(x), WIDTH)
    for step in x.unbind(1):
        state, memory = model.cell(step, (state, memory))
    return state


def inputs_with_their_own_state(model: Any, x: Tensor, context: Tensor) -> Tensor:
    memory = x.new_zeros(len(x), WIDTH)
    return torch.stack([model.cell(part, (context, memory))[0] for part in x.unbind(1)], 1)


def asked_by_one_query(model: Any, x: Tensor) -> Tensor:
    query = x.new_zeros(len(x), 1, WIDTH)
    seen = [model.fc(x[:, : time + 1]) for time in range(x.shape[1])]
    return torch.cat([F.scaled_dot_product_attention(query, k, k) for k in seen], 1)


def each_step(model: Any, x: Tensor) -> Tensor:
    return torch.stack([F.gelu(model.fc(step)) for step in x.unbind(1)], dim=1)


def sentences(model: Any, x: Tensor) -> Tensor:
    halves = [model.words(x[:, :3])[0][:, -1], model.words(x[:, 3:])[0][:, -1]]
    return model.sentences(torch.stack(halves, dim=1))[0]


def passes_messages(model: Any, x: Tensor, edges: Tensor) -> Tensor:
    state = x
    for _ in range(3):
        message = edges.softmax(-1) @ model.fc(state)
        state = model.cell(message.flatten(0, 1), state.flatten(0, 1)).view_as(state)
    return state


def many_dropouts(model: Any, x: Tensor) -> Tensor:
    return torch.stack([model.fc(F.dropout(x, 0.5)) for _ in range(4)]).mean(0)


def both_directions(model: Any, x: Tensor) -> Tensor:
    out, (state, _) = model.lstm(x)
    return out[:, -1] + state[-1]


def last_layer_reads_one(model: Any, x: Tensor, hidden: Tensor) -> Tensor:
    for block in model.blocks[:2]:
        x = block(x, hidden)
    return model.blocks[2](x[:, :1])


def linear_tables(count: int) -> nn.ModuleList:
    """Return blocks with stochastic depth that grows."""
    return nn.ModuleList(Deep(0.1 * number) for number in range(count))


def frozen(part: nn.Module) -> nn.Module:
    """Return a copy that does not learn."""
    return copy.deepcopy(part).requires_grad_(False)


def online_and_target() -> Model:
    """Return a model that keeps a slow copy for training."""
    online = Block()
    model = Model(views, online=online, target=frozen(online))
    model.use_target = False
    return model


def written_to_a_copy(model: Any, x: Tensor) -> Tensor:
    h = model.fc(x)
    h[h > 0].clamp_(max=1)
    return h


def stored_in_vain(model: Any, x: Tensor) -> Tensor:
    h = model.fc(x)
    kept = torch.zeros_like(h)
    kept[:, 0] = h[:, 0]
    return h


def stored(model: Any, x: Tensor) -> Tensor:
    h = model.fc(x)
    kept = torch.zeros_like(h)
    for step in range(x.shape[1]):
        kept[:, step] = h[:, : step + 1].mean(1)
    model.kept = h.detach().clone()
    model.kept[:, 0] = 0
    return kept


def logged(model: Any, x: Tensor) -> Tensor:
    steps = torch.zeros(3, dtype=torch.long)
    steps[0] = x.shape[1]
    return model.fc(x)


def halved(model: Any, x: Tensor) -> Tensor:
    return model.up(x).chunk(2, -1)[0]


def gated_half(model: Any, x: Tensor) -> Tensor:
    h, gate = model.up(x).chunk(2, -1)
    return h * gate.sigmoid()


def streamed(model: Any, x: Tensor) -> Tensor:
    for step in x.unbind(1):
        h = F.gelu(model.fc(step))
    return h
