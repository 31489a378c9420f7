"""Refactors of `corpus.models.refactored`, written down before anything judged them."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, remove_weight_norm
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from corpus.cards import Shelf
from corpus.models.refactored import (
    Decoder,
    Excitation,
    GatedMLP,
    GroupedAttention,
    Inverted,
    Mixture,
    MobileNet,
    RMSNorm,
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
    stacked,
    t5,
    tagger,
    temporal,
    upscaler,
)
from corpus.models.small import (
    CNN,
    GPT,
    Attention,
    Recommender,
    UNet,
    ViT,
    cnn,
    deep,
    gpt,
    graph,
    recommender,
    seq2seq,
    unet,
    vit,
)
from corpus.pair import loaded, warm, with_forward

SHELF = Shelf("refactor", "blind")
refactor = SHELF.refactor

# ---- attention -----------------------------------------------------------------------------------


@refactor("heads of keys expanded, not repeated", decoder)
def _(model: Decoder) -> None:
    def shared(x: Tensor) -> Tensor:
        batch, groups, length, size = x.shape
        return x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(batch, 2 * groups, length, size)

    for layer in model.layers:
        layer.attention.shared = shared


@refactor("grouped attention by sdpa with enable_gqa", decoder)
def _(model: Decoder) -> None:
    for layer in model.layers:
        layer.attention.attend = lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )


@refactor("rotation as a product of complex numbers", decoder)
def _(model: Decoder) -> None:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = torch.complex(*x.chunk(2, -1)) * torch.complex(cos, sin)
        return torch.cat([turned.real, turned.imag], -1)

    for layer in model.layers:
        layer.attention.rotate = rotate


@refactor("table of angles computed once and kept in buffers", decoder)
def _(model: Decoder) -> None:
    for layer in model.layers:
        angle = angles(64, 8, 10000.0)
        layer.attention.register_buffer("cos", angle.cos(), persistent=False)
        layer.attention.register_buffer("sin", angle.sin(), persistent=False)
        layer.attention.table = lambda x, it=layer.attention: (
            it.cos[: x.shape[1]],
            it.sin[: x.shape[1]],
        )


@refactor("mask as finite numbers that are added", decoder)
def _(model: Decoder) -> None:
    def attend(self: GroupedAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        mask = torch.full((length, length), torch.finfo(q.dtype).min).triu(1)
        scores = torch.matmul(q * self.size**-0.5, self.shared(k).mT) + mask
        return F.softmax(scores, -1).matmul(self.shared(v))

    for layer in model.layers:
        layer.attention.attend = attend.__get__(layer.attention)


@refactor("heads in the batch, attention by baddbmm and bmm", vit)
def _(model: ViT) -> None:
    def forward(self: Attention, x: Tensor) -> Tensor:
        n, length, width = x.shape

        def heads(t: Tensor) -> Tensor:
            t = t.view(n, length, self.heads, -1).permute(0, 2, 1, 3)
            return t.reshape(n * self.heads, length, -1)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        scores = torch.baddbmm(x.new_zeros(1), q, k.mT, beta=0, alpha=self.scale)
        y = torch.bmm(scores.softmax(-1), v).view(n, self.heads, length, -1)
        return self.out(y.permute(0, 2, 1, 3).reshape(n, length, width))

    for block in model.blocks:
        with_forward(block.attention, forward)


@refactor("sdpa into eager attention, Llama", llama)
def _(model: nn.Module) -> None:
    model.set_attn_implementation("eager")


@refactor("fused convolution of GPT-2 into three linear layers", gpt2)
def _(model: nn.Module) -> None:
    class Apart(nn.Module):
        def __init__(self, fused: nn.Module) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
            parts = zip(fused.weight.chunk(3, 1), fused.bias.chunk(3), strict=True)
            for linear, (weight, bias) in zip(self.children(), parts, strict=True):
                linear.weight.data, linear.bias.data = weight.detach().T.clone(), bias.data.clone()

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.query(x), self.key(x), self.value(x)], -1)

    for block in model.transformer.h:
        block.attn.c_attn = Apart(block.attn.c_attn)


@refactor("encoder blocks into nn.TransformerEncoderLayer", vit)
def _(model: ViT) -> None:
    blocks = []
    for block in model.blocks:
        made = nn.TransformerEncoderLayer(
            32, 4, 128, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        own = block.attention
        with torch.no_grad():
            made.self_attn.in_proj_weight.copy_(
                torch.cat([p.weight for p in (own.q, own.k, own.v)])
            )
            made.self_attn.in_proj_bias.copy_(torch.cat([p.bias for p in (own.q, own.k, own.v)]))
        made.self_attn.out_proj.load_state_dict(own.out.state_dict())
        made.norm1, made.norm2 = block.norm1, block.norm2
        made.linear1, made.linear2 = block.mlp[0], block.mlp[2]
        blocks.append(made)
    model.blocks = nn.Sequential(*blocks)


# ---- norms, activations, projections -------------------------------------------------------------


@refactor("written-out root mean square norm into nn.RMSNorm", decoder)
def _(model: Decoder) -> None:
    def library(norm: RMSNorm) -> nn.RMSNorm:
        return loaded(nn.RMSNorm(32, norm.eps), norm)

    for layer in model.layers:
        layer.input_norm, layer.post_norm = library(layer.input_norm), library(layer.post_norm)
    model.norm = library(model.norm)


@refactor("gate and up projection fused", decoder)
def _(model: Decoder) -> None:
    class Fused(nn.Module):
        def __init__(self, mlp: GatedMLP) -> None:
            super().__init__()
            self.gate_up_proj, self.down_proj = nn.Linear(32, 128, bias=False), mlp.down_proj
            with torch.no_grad():
                both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
                self.gate_up_proj.weight.copy_(both)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.gate_up_proj(x).chunk(2, -1)
            return self.down_proj(F.silu(gate) * up)

    for layer in model.layers:
        layer.mlp = Fused(layer.mlp)


@refactor("adapters merged into the weights", adapted)
def _(model: Decoder) -> None:
    for layer in model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.attention, name, getattr(layer.attention, name).merged())


@refactor("old weight norm into its parametrisation", temporal)
def _(model: TemporalNet) -> None:
    for block in model.blocks:
        gain, direction = block.conv.weight_g.data, block.conv.weight_v.data
        remove_weight_norm(block.conv)
        block.conv = parametrizations.weight_norm(block.conv)
        block.conv.parametrizations.weight.original0.data = gain
        block.conv.parametrizations.weight.original1.data = direction


@refactor("padding by the convolution, and the end cut off", temporal)
def _(model: TemporalNet) -> None:
    def forward(self: TemporalBlock, x: Tensor) -> Tensor:
        self.conv.padding = (2 * self.dilation,)
        y = self.conv(x)[:, :, : -2 * self.dilation]
        return x + self.out(torch.tanh(self.norm(y)))

    for block in model.blocks:
        with_forward(block, forward)


@refactor("excitation by 1 x 1 convolutions", mobile)
def _(model: MobileNet) -> None:
    class Convolved(nn.Module):
        def __init__(self, excite: Excitation) -> None:
            super().__init__()
            self.reduce, self.expand = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
            for name, conv in self.named_children():
                linear = getattr(excite, name)
                conv.weight.data = linear.weight.data[:, :, None, None].clone()
                conv.bias.data = linear.bias.data.clone()

        def forward(self, x: Tensor) -> Tensor:
            mean = F.adaptive_avg_pool2d(x, 1)
            return x * self.expand(self.reduce(mean).relu()).sigmoid()

    for stage in model.stages:
        stage.excite = Convolved(stage.excite)


@refactor("all batch norms fused in evaluation", warm(mobile))
def _(model: MobileNet) -> nn.Module:
    class Fused(Inverted):
        def __init__(self, it: Inverted) -> None:
            nn.Module.__init__(self)
            self.widen = fuse_conv_bn_eval(it.widen, it.bn1)
            self.depthwise = fuse_conv_bn_eval(it.depthwise, it.bn2)
            self.narrow = fuse_conv_bn_eval(it.narrow, it.bn3)
            self.excite, self.act, self.shuffle = it.excite, it.act, it.shuffle

        def forward(self, x: Tensor) -> Tensor:
            y = self.excite(self.act(self.depthwise(self.shuffle(self.act(self.widen(x))))))
            return x + self.narrow(y)

    model.stem, model.bn = fuse_conv_bn_eval(model.stem, model.bn), nn.Identity()
    model.stages = nn.Sequential(*map(Fused, model.stages))
    return model.eval()


@refactor("patches by a linear layer", vit)
def _(model: ViT) -> None:
    class Linear(nn.Module):
        def __init__(self, conv: nn.Conv2d) -> None:
            super().__init__()
            self.proj = nn.Linear(4, 32)
            self.proj.weight.data = conv.weight.data.flatten(1).clone()
            self.proj.bias.data = conv.bias.data.clone()

        def forward(self, x: Tensor) -> Tensor:
            n = len(x)
            pieces = x.view(n, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(n, 16, 4)
            return self.proj(pieces).transpose(1, 2).unflatten(-1, (4, 4))

    model.patches = Linear(model.patches)


@refactor("experts stacked into one tensor", mixture)
def _(model: Mixture) -> nn.Module:
    class Stack(Mixture):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.router, self.head = model.router, model.head

            def put_together(layer: int, name: str) -> nn.Parameter:
                return nn.Parameter(
                    torch.stack([getattr(e[layer], name).detach() for e in model.experts])
                )

            self.up, self.up_bias = put_together(0, "weight"), put_together(0, "bias")
            self.down, self.down_bias = put_together(2, "weight"), put_together(2, "bias")

        def mix(self, x: Tensor) -> Tensor:
            hidden = F.gelu(torch.einsum("nd,ehd->neh", x, self.up) + self.up_bias)
            return torch.einsum("neh,edh->ned", hidden, self.down) + self.down_bias

    return Stack()


# ---- structure -----------------------------------------------------------------------------------


@refactor("every module of the decoder renamed, and made in another order", decoder)
def _(model: Decoder) -> nn.Module:
    class Layer(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.ffn, self.ffn_norm = layer.mlp, layer.post_norm
            self.self_attn, self.attn_norm = layer.attention, layer.input_norm

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.self_attn(self.attn_norm(x))
            return x + self.ffn(self.ffn_norm(x))

    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head, self.final_norm = model.head, model.norm
            self.h = nn.ModuleDict({f"layer_{i}": Layer(it) for i, it in enumerate(model.layers)})
            self.tok_embeddings = model.embed

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tok_embeddings(ids)
            for layer in self.h.values():
                x = layer(x)
            return self.lm_head(self.final_norm(x))

    return Renamed()


@refactor("two tables of embeddings in one, with an offset", recommender)
def _(model: Recommender) -> nn.Module:
    class OneTable(Recommender):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.table, self.mlp = nn.Embedding(90, 16), model.mlp
            self.table.weight.data = torch.cat([model.user.weight.data, model.item.weight.data])

        def forward(self, users: Tensor, items: Tensor) -> Tensor:
            u, i = self.table(torch.stack([users, items + 50])).unbind(0)
            return (u * i).sum(1) + self.mlp(torch.cat([u, i], 1)).squeeze(1)

    return OneTable()


@refactor("two recurrent layers into two modules", stacked)
def _(model: Stacked) -> None:
    class Two(nn.Module):
        def __init__(self, both: nn.GRU) -> None:
            super().__init__()
            self.lower, self.upper = (
                nn.GRU(8, 24, batch_first=True),
                nn.GRU(24, 24, batch_first=True),
            )
            for index, gru in enumerate(self.children()):
                for name, parameter in gru.named_parameters():
                    parameter.data = getattr(both, name.replace("l0", f"l{index}")).data.clone()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.upper(self.lower(x)[0])

    model.gru = Two(model.gru)


@refactor("a bidirectional LSTM as two, one of them on flipped rows", tagger)
def _(model: Tagger) -> None:
    class Both(nn.Module):
        def __init__(self, both: nn.LSTM) -> None:
            super().__init__()
            self.forth, self.back = (nn.LSTM(16, 16, batch_first=True) for _ in range(2))
            for lstm, end in ((self.forth, ""), (self.back, "_reverse")):
                for name, parameter in lstm.named_parameters():
                    parameter.data = getattr(both, name + end).data.clone()

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            there, back = self.forth(x)[0], self.back(x.flip(1))[0].flip(1)
            return torch.cat([there, back], -1), None

    model.recurrent = Both(model.recurrent)


@refactor("tied the other way round, the head made first", gpt)
def _(model: GPT) -> nn.Module:
    class HeadFirst(GPT):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.head, self.blocks, self.norm = model.head, model.blocks, model.norm
            self.position, self.embedding = model.position, nn.Embedding(18, 32)
            self.embedding.weight = self.head.weight
            self.between, self.finish = model.between, model.finish

    return HeadFirst()


@refactor("position ids in a buffer", gpt)
def _(model: GPT) -> None:
    model.register_buffer("position_ids", torch.arange(32)[None])

    def forward(self: GPT, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position(self.position_ids[:, : ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    with_forward(model, forward)


@refactor("saved, and loaded into a model made on the meta device", gpt2)
def _(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with torch.device("meta"):
        made = type(model)(model.config)
    made.load_state_dict(torch.load(file), assign=True)
    made.tie_weights()
    return made.eval()


# ---- functions and modules -----------------------------------------------------------------------


@refactor("dropout by function, in training", cnn)
def _(model: CNN) -> nn.Module:
    class Functional(CNN):
        def forward(self, x: Tensor) -> Tensor:
            x = F.max_pool2d(self.relu1(self.bn1(self.conv1(x))), 2)
            x = self.pool(self.relu2(self.bn2(self.conv2(x))))
            return self.head(F.dropout(x, 0.2, self.training))

    made = loaded(Functional(), model)
    del made.dropout
    return made


@refactor("functions of a graph net into modules", graph)
def _(model: nn.Module) -> None:
    model.acts = nn.ModuleList(nn.ReLU() for _ in model.layers)

    def forward(self: nn.Module, nodes: Tensor, edges: Tensor) -> Tensor:
        for layer, act in zip(self.layers, self.acts, strict=True):
            nodes = act(layer(torch.einsum("ij,jk->ik", edges, nodes)))
        return self.head(edges.mm(nodes))

    with_forward(model, forward)


@refactor("all activations in place", unet)
def _(model: UNet) -> None:
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = True


@refactor("pixel shuffle by view and permute, nearest by repetition", upscaler)
def _(model: Upscaler) -> None:
    def forward(self: Upscaler, x: Tensor) -> Tensor:
        x = self.act(self.norm1(self.enter(x)))
        x = x + self.act(self.norm2(self.body(x)))
        coarse = self.coarse(x)
        n, _, height, width = coarse.shape
        coarse = coarse.view(n, 1, 2, 2, height, width).permute(0, 1, 4, 2, 5, 3)
        fine = self.fine(x).repeat_interleave(2, 2).repeat_interleave(2, 3)
        return coarse.reshape(n, 1, 2 * height, 2 * width) + fine

    with_forward(model, forward)


@refactor("instance norm into a group norm of one channel a group", upscaler)
def _(model: Upscaler) -> None:
    model.norm2 = loaded(nn.GroupNorm(16, 16), model.norm2)


@refactor("PReLU as a maximum and a minimum", upscaler)
def _(model: Upscaler) -> None:
    with_forward(model.act, lambda self, x: x.clamp(min=0) + self.weight * x.clamp(max=0))


@refactor("loss as a mean over what is not padding", tagger)
def _(model: Tagger) -> None:
    def loss(logits: Tensor, tags: Tensor) -> Tensor:
        chosen = logits.log_softmax(-1).gather(-1, tags.clamp_min(0)[..., None]).squeeze(-1)
        real = tags != -100
        return -(chosen * real).sum() / real.sum()

    model.loss = loss


# ---- run by something else -----------------------------------------------------------------------


@refactor("checkpointed in segments", deep)
def _(model: nn.Sequential) -> nn.Module:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint_sequential(self.net, 4, x, use_reentrant=False)

    return Segments()


@refactor("stages checkpointed by the reentrant way", warm(mobile))
def _(model: MobileNet) -> None:
    def forward(self: Inverted, x: Tensor) -> Tensor:
        return checkpoint(type(self).forward, self, x, use_reentrant=True)

    for stage in model.stages:
        with_forward(stage, forward)


@refactor("decoder compiled for autograd", decoder)
def _(model: Decoder) -> Any:
    return torch.compile(model, backend="aot_eager")


@refactor("exported in evaluation", warm(mobile))
def _(model: MobileNet) -> Any:
    return torch.export.export(model, (mobile().inputs,))


@refactor("channels last, warm", warm(mobile))
def _(model: MobileNet) -> nn.Module:
    return model.to(memory_format=torch.channels_last)


@refactor("gradient checkpointing of T5", t5)
def _(model: nn.Module) -> None:
    model.gradient_checkpointing_enable()


@refactor("encoder run in another method, its blocks as attributes", seq2seq)
def _(model: nn.Module) -> None:
    first, second, norm = model.encoder
    del model.encoder
    model.first, model.second, model.encoder_norm = first, second, norm
    model.encoder_of = lambda x: norm(second(first(x)))

    def forward(self: nn.Module, source: Tensor, ids: Tensor) -> Tensor:
        memory = self.encoder_of(self.embedding(source))
        x = self.decoder(self.embedding(ids))
        return self.head(x + self.cross(self.norm(x), memory))

    with_forward(model, forward)


@refactor("deep copy moved to float64 and back", stacked)
def _(model: Stacked) -> nn.Module:
    return copy.deepcopy(model).double().float()
