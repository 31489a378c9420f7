"""Pairs that no comparison is tuned on: read them only after the limits are fixed."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.small import (
    CNN,
    GCN,
    GPT,
    GRU,
    LSTM,
    MLP,
    Attention,
    Autoencoder,
    MoE,
    Multitask,
    ResidualBlock,
    ResNet,
    Seq2Seq,
    Siamese,
    UNet,
    ViT,
    autoencoder,
    bert,
    cnn,
    contrastive,
    gpt,
    graph,
    gru,
    ink_loss,
    label_loss,
    lstm,
    mlp,
    moe,
    multitask,
    recommender,
    resnet,
    seq2seq,
    unet,
    vit,
)
from corpus.pair import loaded, warm, with_forward
from corpus.refactor.changes import resizing, with_loss
from corpus.refactor.refactors import Transposed, blocks_renamed
from corpus.subject import Subject

SHELF = Shelf("refactor", "held out")
refactor, change = SHELF.refactor, SHELF.change

# ---- refactors -----------------------------------------------------------------------------------


class Unrolled(LSTM):
    """Steps through the sequence with a cell."""

    def __init__(self, model: LSTM) -> None:
        nn.Module.__init__(self)
        self.embedding, self.head, self.cell = model.embedding, model.head, nn.LSTMCell(16, 32)
        weights = {name.removesuffix("_l0"): p for name, p in model.lstm.state_dict().items()}
        self.cell.load_state_dict(weights)

    def forward(self, ids: Tensor) -> Tensor:
        state = None
        for x in self.embedding(ids).unbind(1):
            state = self.cell(x, state)
        return self.head(state[0])


@refactor("LSTM into a loop over a cell", lstm)
def _(model: LSTM) -> nn.Module:
    return Unrolled(model)


@refactor("attention by hand into nn.MultiheadAttention", vit)
def _(model: ViT) -> None:
    class Library(nn.Module):
        def __init__(self, attention: Attention) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(32, 4, batch_first=True)
            parts = attention.q, attention.k, attention.v
            with torch.no_grad():
                self.inner.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
                self.inner.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
            self.inner.out_proj.load_state_dict(attention.out.state_dict())

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, x, need_weights=False)[0]

    for block in model.blocks:
        block.attention = Library(block.attention)


@refactor("tied head by F.linear with the embedding's weight", gpt)
def _(model: GPT) -> nn.Module:
    class Headless(GPT):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x)
            return F.linear(self.norm(x), self.embedding.weight)

    model.__class__ = Headless
    del model.head


@refactor("shared encoder written twice, its weights tied", contrastive)
def _(model: Siamese) -> None:
    model.second = copy.deepcopy(model.encoder)
    for ours, theirs in zip(model.second, model.encoder, strict=True):
        if isinstance(ours, nn.Linear):
            ours.weight, ours.bias = theirs.weight, theirs.bias
    model.other = lambda encoder, x: model.second(x)


def both_heads() -> Subject:
    """Return the subject of several tasks with one loss."""
    made = multitask()
    made.loss = lambda output, target: label_loss(output, target) + ink_loss(output, target)
    return made


@refactor("two heads fused into one", both_heads)
def _(model: Multitask) -> nn.Module:
    class OneHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.heads = model.trunk, nn.Linear(32, 11)
            with torch.no_grad():
                self.heads.weight.copy_(torch.cat([model.label.weight, model.ink.weight]))
                self.heads.bias.copy_(torch.cat([model.label.bias, model.ink.bias]))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            label, ink = self.heads(self.trunk(x)).split([10, 1], 1)
            return label, ink

    return OneHead()


@refactor("batch norm written out", warm(cnn))
def _(model: CNN) -> None:
    def forward(self: nn.BatchNorm2d, x: Tensor) -> Tensor:
        gain = self.weight / (self.running_var + self.eps).sqrt()
        return x * gain[:, None, None] + (self.bias - self.running_mean * gain)[:, None, None]

    with_forward(model.bn1, forward)


@refactor("patches by unfold and matmul", vit)
def _(model: ViT) -> None:
    def forward(self: nn.Conv2d, x: Tensor) -> Tensor:
        columns = F.unfold(x, 2, stride=2)
        return (self.weight.flatten(1) @ columns + self.bias[:, None]).unflatten(-1, (4, 4))

    with_forward(model.patches, forward)


def attend(self: Attention, x: Tensor) -> Tensor:
    """Compute causal attention with the scale on the queries and an added mask."""
    q, k, v = (
        t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x))
    )
    length = x.shape[1]
    mask = torch.full((length, length), float("-inf")).triu(1)
    return self.out((((q * self.scale) @ k.mT + mask).softmax(-1) @ v).transpose(1, 2).flatten(2))


@refactor("queries scaled instead of scores, mask added", gpt)
def _(model: GPT) -> None:
    for block in model.blocks:
        with_forward(block.attention, attend)


@refactor("embedding as a product with one-hot rows", lstm)
def _(model: LSTM) -> None:
    with_forward(
        model.embedding, lambda self, ids: F.one_hot(ids, 18).to(self.weight.dtype) @ self.weight
    )


@refactor("experts in the reverse order", moe)
def _(model: MoE) -> nn.Module:
    class Reversed(MoE):
        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.stem(x))
            weight, chosen = self.router(x).softmax(-1).max(-1)
            made = torch.zeros_like(x)
            for index in reversed(range(4)):
                mine = chosen == index
                if mine.any():
                    made[mine] = self.experts[index](x[mine])
            return self.head(x + weight[:, None] * made)

    return loaded(Reversed(), model)


@refactor("gradient checkpointing of transformers", bert)
def _(model: nn.Module) -> None:
    model.gradient_checkpointing_enable()


@refactor("compiled by inductor", mlp)
def _(model: MLP) -> Any:
    return torch.compile(model)


@refactor("layer norm in float64", vit)
def _(model: ViT) -> None:
    for block in model.blocks:
        with_forward(
            block.norm1,
            lambda self, x: F.layer_norm(
                x.double(), (32,), self.weight.double(), self.bias.double(), self.eps
            ).float(),
        )


@refactor("layers of a Sequential named", seq2seq)
def _(model: Seq2Seq) -> None:
    names = ("first", "second", "norm")
    model.encoder = nn.Sequential(OrderedDict(zip(names, model.encoder, strict=True)))


@refactor("in DataParallel", resnet)
def _(model: ResNet) -> nn.Module:
    return nn.DataParallel(model)


@refactor("softmax written out", gru)
def _(model: GRU) -> None:
    def forward(self: GRU, x: Tensor) -> Tensor:
        states = self.gru(x)[0]
        scores = self.score(states)
        weights = (scores - scores.amax(1, keepdim=True)).exp()
        return self.head((weights / weights.sum(1, keepdim=True) * states).sum(1))

    with_forward(model, forward)


@refactor("mean as sum by count", cnn)
def _(model: CNN) -> None:
    model.pool = lambda x: x.flatten(2).sum(-1) / x[0, 0].numel()


@refactor("neighbours by einsum", graph)
def _(model: GCN) -> nn.Module:
    class Einsum(GCN):
        def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
            for layer in self.layers:
                nodes = layer(torch.einsum("ij,jd->id", edges, nodes)).relu()
            return self.head(torch.einsum("ij,jd->id", edges, nodes))

    return loaded(Einsum(), model)


@refactor("encoder and decoder into one Sequential", autoencoder)
def _(model: Autoencoder) -> nn.Module:
    return nn.Sequential(*model.encoder, *model.decoder)


@refactor("1 x 1 convolution as a product", unet)
def _(model: UNet) -> None:
    with_forward(
        model.out,
        lambda self, x: torch.einsum("nihw,oi->nohw", x, self.weight[:, :, 0, 0]) + self.bias,
    )


@refactor("in-place sum of a residual", resnet)
def _(model: ResNet) -> None:
    for block in model.blocks:
        block.join = lambda x, branch: branch.add_(x)


@refactor("two halves of the batch, one after the other, put together", mlp)
def _(model: MLP) -> None:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return torch.cat([F.linear(half, self.weight, self.bias) for half in x.chunk(2)])

    with_forward(model.fc1, forward)


# ---- harmful changes -----------------------------------------------------------------------------


@change(
    "LSTM into a loop, forget gates biased by 1",
    lstm,
    ("lstm", "cell"),
    why="The state forgets more slowly.",
)
def _(model: LSTM) -> nn.Module:
    made = Unrolled(model)
    made.cell.bias_ih.data[32:64] += 1
    return made


@change(
    "eps outside the root",
    gpt,
    "blocks.0.norm1",
    why="Rows of little variance are scaled differently.",
)
def _(model: GPT) -> None:
    def forward(self: nn.LayerNorm, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        deviation = centred.square().mean(-1, keepdim=True).sqrt()
        return centred / (deviation + self.eps) * self.weight + self.bias

    with_forward(model.blocks[0].norm1, forward)


@change(
    "layer norm written out, with the unbiased variance",
    vit,
    "blocks.1.norm2",
    why="Every row is scaled by sqrt((n - 1) / n).",
)
def _(model: ViT) -> None:
    def forward(self: nn.LayerNorm, x: Tensor) -> Tensor:
        scale = (x.var(-1, keepdim=True) + self.eps).sqrt()
        return (x - x.mean(-1, keepdim=True)) / scale * self.weight + self.bias

    with_forward(model.blocks[1].norm2, forward)


@change(
    "bilinear with aligned corners", resizing, "2", why="Pixels are interpolated at other places."
)
def _(model: nn.Sequential) -> None:
    model[2].align_corners = True


@change(
    "smoothed labels",
    with_loss,
    ("", "cross_entropy*", "loss"),
    why="Targets are others: loss and gradients differ.",
)
def _(model: nn.Module) -> None:
    model.options["label_smoothing"] = 0.1


@change(
    "twice the heads",
    gpt,
    "blocks.1.attention*",
    why="Each head compares half as many features, and its scale is another.",
)
def _(model: GPT) -> None:
    model.blocks[1].attention.heads = 8


@change(
    "queries and keys swapped",
    vit,
    "blocks.0.attention.[qk]",
    why="Scores are transposed: who looks at whom is turned round.",
)
def _(model: ViT) -> None:
    attention = model.blocks[0].attention
    attention.q, attention.k = attention.k, attention.q


@change(
    "decoder attends to itself",
    seq2seq,
    ("", "cross", "cross.[kv]"),
    why="The decoder never sees the source.",
)
def _(model: Seq2Seq) -> None:
    model.remember = lambda memory, x: x


@change(
    "gradient halved on its way",
    cnn,
    ("", "relu1", "bn1", "conv1"),
    why="The output is the same, and what lies before learns half as fast.",
)
def _(model: CNN) -> None:
    def between(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / 2)
        return x

    model.between = between


@change("one block in bfloat16", gpt, "blocks.1*", why="Digits are lost in the block.")
def _(model: GPT) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return type(self).forward(self, x).float()

    with_forward(model.blocks[1], forward)


@change(
    "activation after a residual dropped",
    resnet,
    ("blocks.3", "blocks.3.relu*"),
    why="What was zero below zero is no longer.",
)
def _(model: ResNet) -> None:
    def forward(self: ResidualBlock, x: Tensor) -> Tensor:
        return x + self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))

    with_forward(model.blocks[3], forward)


@change(
    "mean of all tokens for the first",
    vit,
    ("", "head"),
    why="The head reads another summary than it was trained for.",
)
def _(model: ViT) -> None:
    model.pool = lambda x: x.mean(1)


@change("input scaled by 0.99", mlp, ("", "fc1"), why="Everything is computed of other numbers.")
def _(model: MLP) -> None:
    model.prepare = lambda x: 0.99 * x


@change("GELU of another kind", bert, "*layer.0.intermediate*", why="The two differ by up to 5e-4.")
def _(model: nn.Module) -> None:
    model.bert.encoder.layer[0].intermediate.intermediate_act_fn = nn.GELU(approximate="tanh")


@change(
    "noise of 0.001 added",
    autoencoder,
    ("", "decoder", "decoder.0"),
    why="The same input gives another result each time.",
)
def _(model: Autoencoder) -> None:
    model.between = lambda x: x + 1e-3 * torch.randn_like(x)


@change(
    "graph without its self-loops",
    graph,
    ("", "layers.0", "relu"),
    why="Nodes forget themselves at each layer.",
)
def _(model: GCN) -> None:
    def forward(self: GCN, nodes: Tensor, edges: Tensor) -> Tensor:
        edges = edges - edges.diag().diag()
        for layer in self.layers:
            nodes = layer(edges @ nodes).relu()
        return self.head(edges @ nodes)

    with_forward(model, forward)


@change(
    "shared encoder copied, not tied",
    contrastive,
    ("", "encoder*", "second*"),
    why="The output is the same, and from the first step on the two part.",
)
def _(model: Siamese) -> None:
    model.second = copy.deepcopy(model.encoder)
    model.other = lambda encoder, x: model.second(x)


@change("mean of products for their sum", recommender, "", why="Scores shrink by the width.")
def _(model: nn.Module) -> None:
    def forward(self: nn.Module, users: Tensor, items: Tensor) -> Tensor:
        u, i = self.user(users), self.item(items)
        return (u * i).mean(1) + self.mlp(torch.cat([u, i], 1)).squeeze(1)

    with_forward(model, forward)


@change(
    "first state for the last", lstm, ("", "head"), why="The summary has seen the first step only."
)
def _(model: LSTM) -> None:
    model.pool = lambda states: states[:, 0]


@change(
    "gain of one norm decayed by 0.0001",
    bert,
    "*layer.0.attention.output.LayerNorm",
    why="A weight that nobody meant to change.",
)
def _(model: nn.Module) -> None:
    model.bert.encoder.layer[0].attention.output.LayerNorm.weight.data *= 0.9999


@change(
    "one dropout active in evaluation",
    warm(bert),
    "*layer.1.output.dropout",
    why="In evaluation the same input gives another result each time.",
)
def _(model: nn.Module) -> None:
    model.bert.encoder.layer[1].output.dropout.train()


@change(
    "one square weight not transposed",
    gpt,
    "blocks.0.attention.out",
    why="Libraries store matrices either way: a square one fits both.",
)
def _(model: GPT) -> None:
    out = Transposed(model.blocks[0].attention.out)
    out.weight.data = out.weight.data.T.clone()
    model.blocks[0].attention.out = out


@change(
    "blocks renamed, one norm frozen",
    gpt,
    ("blocks.2.norm1", "h.2.norm1"),
    why="The output is the same, and the norm never learns.",
)
def _(model: GPT) -> nn.Module:
    model.blocks[2].norm1.requires_grad_(False)
    return blocks_renamed(model)


@change(
    "stacked into Sequential, one residual dropped",
    resnet,
    ("*.1", "*.1.relu*"),
    why="Nothing of the stream passes the branch by.",
)
def _(model: ResNet) -> nn.Module:
    model.blocks[1].join = lambda x, branch: branch
    body = nn.Sequential(*model.blocks)

    class Chained(ResNet):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.stem, self.bn, self.body, self.head = model.stem, model.bn, body, model.head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(F.relu(self.bn(self.stem(x)))).mean((2, 3)))

    return Chained()


@change(
    "bias of a projection dropped",
    gpt,
    ("blocks.0.attention.v",),
    why="The layer computes something else wherever its bias was not zero.",
)
def _(model: GPT) -> None:
    model.blocks[0].attention.v.bias = None
