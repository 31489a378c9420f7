"""Harmful changes of `corpus.models.refactored`, written down before anything judged them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import remove_weight_norm, weight_norm
from torch.nn.utils.fusion import fuse_conv_bn_eval

from corpus.cards import Shelf
from corpus.models.refactored import (
    Decoder,
    DecoderLayer,
    GatedMLP,
    GroupedAttention,
    Mixture,
    MobileNet,
    Stacked,
    Tagger,
    TemporalBlock,
    TemporalNet,
    Upscaler,
    adapted,
    angles,
    decoder,
    gpt2,
    llama,
    mixture,
    mobile,
    shuffle,
    stacked,
    t5,
    tagger,
    temporal,
    upscaler,
)
from corpus.models.small import CNN, GPT, ViT, bert, cnn, gpt, sequential, vit
from corpus.pair import remade, warm, with_forward
from corpus.refactor.refactors import Fused, fuse

SHELF = Shelf("refactor", "blind")
change = SHELF.change

# ---- attention -----------------------------------------------------------------------------------


@change(
    "norm before the branch moved after the sum",
    decoder,
    "layers.1*",
    why="The stream itself is normed, in place of what the branch reads.",
)
def _(model: Decoder) -> None:
    def forward(self: DecoderLayer, x: Tensor) -> Tensor:
        x = self.input_norm(x + self.attention(x))
        return self.post_norm(x + self.mlp(x))

    with_forward(model.layers[1], forward)


@change(
    "rotary base 500,000 for 10,000",
    decoder,
    "layers.0.attention*",
    why="Positions are turned by other angles.",
)
def _(model: Decoder) -> None:
    for layer in model.layers:
        layer.attention.theta = 500000.0


@change(
    "rotation of neighbours instead of halves",
    decoder,
    "layers.1.attention*",
    why="Weights trained for halves are read in another order.",
)
def _(model: Decoder) -> None:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)

    model.layers[1].attention.rotate = rotate


@change(
    "heads of keys tiled instead of repeated",
    decoder,
    "layers.0.attention*",
    why="Queries are matched with the keys of another group.",
)
def _(model: Decoder) -> None:
    model.layers[0].attention.shared = lambda x: x.repeat(1, 2, 1, 1)


@change(
    "table of angles in bfloat16",
    decoder,
    "layers.0.attention*",
    why="Angles rounded to three digits turn far positions wrongly.",
)
def _(model: Decoder) -> None:
    for layer in model.layers:
        angle = angles(64, 8, 10000.0)
        layer.attention.register_buffer("cos", angle.cos().bfloat16(), persistent=False)
        layer.attention.register_buffer("sin", angle.sin().bfloat16(), persistent=False)
        layer.attention.table = lambda x, it=layer.attention: (
            it.cos[: x.shape[1]].float(),
            it.sin[: x.shape[1]].float(),
        )


@change(
    "dropout of sdpa active in evaluation",
    remade(decoder, nn.Module.eval),
    "layers.2.attention*",
    why="In evaluation the same input gives another result each time.",
)
def _(model: Decoder) -> None:
    model.layers[2].attention.attend = lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True, dropout_p=0.1
    )


@change(
    "fused projection read head by head",
    remade(vit, fuse),
    "blocks.1.attention*",
    why="Parts of queries, keys and values are taken for each other.",
)
def _(model: nn.Module) -> None:
    def forward(self: Fused, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = self.qkv(x).view(n, length, self.heads, 3, -1).permute(3, 0, 2, 1, 4)
        y = (q @ k.mT * self.scale).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))

    with_forward(model.blocks[1].attention, forward)


@change(
    "window of 16 tokens on top of the causal mask",
    decoder,
    "layers.0.attention*",
    why="Positions further than 16 tokens apart no longer see each other.",
)
def _(model: Decoder) -> None:
    def attend(self: GroupedAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        seen = torch.ones(length, length, dtype=torch.bool).tril().triu(-15)
        return F.scaled_dot_product_attention(q, self.shared(k), self.shared(v), attn_mask=seen)

    model.layers[0].attention.attend = attend.__get__(model.layers[0].attention)


@change(
    "scores of T5 divided by sqrt(d)",
    t5,
    "*encoder.block.0.layer.0.SelfAttention*",
    why="T5 has the scale in its weights: attention gets flatter.",
)
def _(model: nn.Module) -> None:
    attention = model.encoder.block[0].layer[0].SelfAttention
    attention.scaling = 8**-0.5
    with_forward(attention.q, lambda self, x: F.linear(x, self.weight) * 8**-0.5)


@change(
    "position ids that start at 1",
    gpt2,
    ("transformer", "transformer.wpe", ""),
    why="Each word gets the embedding of its neighbour's place.",
)
def _(model: nn.Module) -> None:
    with_forward(model.transformer.wpe, lambda self, ids: F.embedding(ids + 1, self.weight))


# ---- settings ------------------------------------------------------------------------------------


@change(
    "eps of Llama's norm 1e-5 for 1e-6",
    llama,
    "*layers.1.post_attention_layernorm",
    why="Rows of little variance are scaled differently.",
)
def _(model: nn.Module) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-5


@change(
    "GELU for SiLU in the gate", llama, "*layers.0.mlp*", why="The gate opens along another curve."
)
def _(model: nn.Module) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


@change(
    "tanh GELU of GPT-2 into the exact one",
    gpt2,
    "transformer.h.1.mlp*",
    why="The two differ by up to 5e-4.",
)
def _(model: nn.Module) -> None:
    model.transformer.h[1].mlp.act = nn.GELU()


@change(
    "dropout 0.15 for 0.1 after the embeddings",
    bert,
    "*embeddings.dropout",
    why="More is dropped in training, and what remains is scaled more.",
)
def _(model: nn.Module) -> None:
    model.bert.embeddings.dropout.p = 0.15


@change("dilation 2 for 4", temporal, "blocks.2*", why="The kernel sees other moments.")
def _(model: TemporalNet) -> None:
    model.blocks[2].conv.dilation = (2,)
    model.blocks[2].dilation = 2


@change(
    "padding on the right",
    temporal,
    ("blocks.0", "blocks.0.conv"),
    why="Each moment sees those after it.",
)
def _(model: TemporalNet) -> None:
    def forward(self: TemporalBlock, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 2 * self.dilation))
        return x + self.out(torch.tanh(self.norm(self.conv(padded))))

    with_forward(model.blocks[0], forward)


@change(
    "two groups for four in a group norm",
    upscaler,
    "norm1",
    why="Means and variances are taken over other channels.",
)
def _(model: Upscaler) -> None:
    model.norm1.num_groups = 2


@change(
    "bilinear for nearest, without aligned corners",
    upscaler,
    "larger",
    why="Pixels are interpolated in place of copied.",
)
def _(model: Upscaler) -> None:
    model.larger.mode = "bilinear"


@change(
    "kernel, stride and padding of the other axis",
    upscaler,
    "enter",
    why="Rows are treated as columns.",
)
def _(model: Upscaler) -> None:
    def forward(self: nn.Conv2d, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight.mT, self.bias, self.stride[::-1], self.padding[::-1])

    with_forward(model.enter, forward)


@change(
    "batch norm without running statistics",
    warm(mobile),
    "stages.1.bn2",
    why="In evaluation a sample's result depends on the others in its batch.",
)
def _(model: MobileNet) -> None:
    norm = model.stages[1].bn2
    norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None


@change(
    "slope of one PReLU fixed at 0.2",
    upscaler,
    "act",
    why="The slope no longer learns, or begins elsewhere.",
)
def _(model: Upscaler) -> None:
    model.act.weight.data.fill_(0.2)


@change(
    "gain of the initialisation sqrt(2)",
    sequential,
    "4",
    why="Other weights are another start: results cannot be reproduced.",
)
def _(model: nn.Sequential) -> None:
    torch.manual_seed(7)
    nn.init.xavier_uniform_(model[4].weight, gain=math.sqrt(2))


# ---- structure -----------------------------------------------------------------------------------


@change(
    "first layer skipped",
    decoder,
    ("", "layers", "layers.0*", "layers.1*"),
    why="The layer is never called and never learns.",
)
def _(model: Decoder) -> None:
    model.layers = model.layers[1:]


@change(
    "layers run in the reverse order",
    decoder,
    ("", "layers", "layers.0*", "layers.2*"),
    why="Each layer gets what another was trained for.",
)
def _(model: Decoder) -> None:
    def forward(self: Decoder, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(self.norm(x))

    with_forward(model, forward)


@change(
    "skip connection divided by sqrt(2)",
    temporal,
    "blocks.1",
    why="The stream shrinks at each block.",
)
def _(model: TemporalNet) -> None:
    def forward(self: TemporalBlock, x: Tensor) -> Tensor:
        y = self.out(torch.tanh(self.norm(self.conv(F.pad(x, (2 * self.dilation, 0))))))
        return (x + y) / 2**0.5

    with_forward(model.blocks[1], forward)


@change(
    "channels not shuffled",
    mobile,
    ("stages.2", "stages.2.depthwise"),
    why="Groups of channels never meet.",
)
def _(model: MobileNet) -> None:
    model.stages[2].shuffle = lambda x: x


@change(
    "channels shuffled back",
    mobile,
    ("stages.0", "stages.0.depthwise"),
    why="The next layer's weights belong to other channels.",
)
def _(model: MobileNet) -> None:
    model.stages[0].shuffle = lambda x: shuffle(x, 8)


@change(
    "gain of channels spread over columns",
    mobile,
    ("", "stages", "stages.0", "stages.0.widen"),
    why="A gain of one channel is applied to a column of pixels.",
)
def _(model: MobileNet) -> None:
    def forward(self: MobileNet, x: Tensor) -> Tensor:
        x = F.hardswish(self.bn(self.stem(x))) * self.gain
        return self.head(self.dropout(self.stages(x).mean((2, 3))))

    with_forward(model, forward)


@change(
    "keys detached",
    vit,
    ("blocks.1.attention", "blocks.1.attention.k"),
    why="The output is the same, and the keys never learn.",
)
def _(model: ViT) -> None:
    with_forward(
        model.blocks[1].attention.k, lambda self, x: F.linear(x, self.weight, self.bias).detach()
    )


@change(
    "head untied, an older copy",
    gpt2,
    ("lm_head", "transformer.wte"),
    why="The head's weights are those of an earlier day, and no longer follow the embedding.",
)
def _(model: nn.Module) -> None:
    older = model.lm_head.weight.detach().clone()
    model.lm_head.weight = nn.Parameter(older + 1e-4 * torch.randn_like(older))


@change(
    "padding in the summary",
    tagger,
    ("", "norm", "softmax", "query"),
    why="Padding counts as words.",
)
def _(model: Tagger) -> None:
    def summary(states: Tensor, real: Tensor) -> Tensor:
        return (model.query(states).softmax(1) * states).sum(1, keepdim=True)

    model.summary = summary


@change(
    "padding in the loss",
    tagger,
    ("", "cross_entropy", "loss"),
    why="The model learns to predict padding.",
)
def _(model: Tagger) -> None:
    model.loss = lambda logits, tags: F.cross_entropy(
        logits.flatten(0, 1), tags.clamp_min(0).flatten()
    )


@change(
    "embedding without a padding index",
    tagger,
    "embedding",
    why="Padding gets a vector that learns, in place of zeros.",
)
def _(model: Tagger) -> None:
    model.embedding.padding_idx = None


@change(
    "shares of experts not normalised",
    mixture,
    ("", "head", "topk"),
    why="Shares no longer add up to one: the output shrinks.",
)
def _(model: Mixture) -> None:
    def share(x: Tensor) -> Tensor:
        weight, chosen = model.router(x).softmax(-1).topk(2, -1)
        return torch.zeros(len(x), 4).scatter(1, chosen, weight)

    model.share = share


@change(
    "softmax after the choice of experts",
    mixture,
    ("", "router", "softmax", "head", "topk"),
    why="Shares are taken among the chosen alone: they are larger, and others get no gradient.",
)
def _(model: Mixture) -> None:
    def share(x: Tensor) -> Tensor:
        weight, chosen = model.router(x).topk(1, -1)
        return torch.zeros(len(x), 4).scatter(1, chosen, weight.softmax(-1))

    model.share = share


@change(
    "upper recurrent layer with the weights of another seed",
    stacked,
    "gru",
    why="Weights that nobody meant to change.",
)
def _(model: Stacked) -> None:
    torch.manual_seed(5)
    other = Stacked().gru
    model.gru.weight_hh_l1.data = other.weight_hh_l1.data


# ---- refactors gone wrong ------------------------------------------------------------------------


@change(
    "adapters merged without their scale",
    adapted,
    "layers.0.attention.q_proj*",
    why="The adapters count as much as their rank and alpha do not say.",
)
def _(model: Decoder) -> None:
    for layer in model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.attention, name, getattr(layer.attention, name).merged(scale=1.0))


@change(
    "gate and up projection fused, read the wrong way",
    decoder,
    "layers.1.mlp*",
    why="What is read as the gate is the other half.",
)
def _(model: Decoder) -> None:
    class Swapped(nn.Module):
        def __init__(self, mlp: GatedMLP) -> None:
            super().__init__()
            self.gate_up_proj, self.down_proj = nn.Linear(32, 128, bias=False), mlp.down_proj
            both = torch.cat([mlp.gate_proj.weight.data, mlp.up_proj.weight.data])
            self.gate_up_proj.weight.data = both

        def forward(self, x: Tensor) -> Tensor:
            up, gate = self.gate_up_proj(x).chunk(2, -1)
            return self.down_proj(F.silu(gate) * up)

    model.layers[1].mlp = Swapped(model.layers[1].mlp)


@change(
    "batch norm fused without its mean",
    warm(cnn),
    ("conv2", "bn2"),
    why="The channel is shifted by what the norm took away.",
)
def _(model: CNN) -> None:
    model.bn2.running_mean.zero_()
    model.conv2 = fuse_conv_bn_eval(model.conv2, model.bn2)
    model.bn2 = nn.Identity()


@change(
    "weight norm over the other axis",
    temporal,
    "blocks.1.conv",
    why="Lengths are taken over inputs in place of outputs.",
)
def _(model: TemporalNet) -> None:
    conv = model.blocks[1].conv
    gain = conv.weight_g.data.clone()
    remove_weight_norm(conv)
    weight_norm(conv, dim=1)
    conv.weight_g.data = gain.view_as(conv.weight_g)
    conv.weight = conv.weight.detach()


@change(
    "rewritten with sdpa, scaled twice",
    gpt,
    "blocks.0.attention*",
    why="Attention is flatter by the root of the width.",
)
def _(model: GPT) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.q(x) * self.scale, self.k(x), self.v(x))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    with_forward(model.blocks[0].attention, forward)


@change(
    "renamed, and the wrong checkpoint loaded into one layer",
    decoder,
    ("layers.1.mlp.up_proj", "h.1.mlp.up_proj"),
    why="Weights that nobody meant to load.",
)
def _(model: Decoder) -> nn.Module:
    torch.manual_seed(11)
    model.layers[1].mlp.up_proj.reset_parameters()

    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.h, self.ln_f, self.lm_head = (
                model.embed,
                model.layers,
                model.norm,
                model.head,
            )

        def forward(self, ids: Tensor) -> Tensor:
            x = self.wte(ids)
            for layer in self.h:
                x = layer(x)
            return self.lm_head(self.ln_f(x))

    return Renamed()
