"""The refactors on which comparisons may be tuned: other code that computes the same."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from corpus.cards import Shelf
from corpus.models.small import (
    CNN,
    GPT,
    LSTM,
    MLP,
    Attention,
    ResNet,
    UNet,
    bert,
    cnn,
    deep,
    gpt,
    lstm,
    mlp,
    recommender,
    resnet,
    sequential,
    unet,
    vae,
    vit,
)
from corpus.pair import loaded, remade, warm, with_forward

SHELF = Shelf("refactor")
refactor = SHELF.refactor

# ---- names and nesting ---------------------------------------------------------------------------


@refactor("nothing, but saved and loaded", resnet)
def _(model: ResNet) -> ResNet:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    made = ResNet()
    made.load_state_dict(torch.load(file))
    return made


@refactor("a state_dict for a model", bert)
def _(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


@refactor("every layer renamed", mlp)
def _(model: MLP) -> nn.Module:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = model.fc1, model.fc2, model.head

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.relu(self.second(F.relu(self.first(x)))))

    return Renamed()


@refactor("attributes into a Sequential", mlp)
def _(model: MLP) -> nn.Module:
    return nn.Sequential(model.fc1, nn.ReLU(), model.fc2, nn.ReLU(), model.head)


@refactor("Sequential into attributes and functions", sequential)
def _(model: nn.Sequential) -> nn.Module:
    made = MLP()
    made.fc1, made.fc2, made.head = model[0], model[2], model[4]
    return made


@refactor("blocks renamed, as other libraries call them", gpt)
def _(model: GPT) -> nn.Module:
    return blocks_renamed(model)


def blocks_renamed(model: GPT) -> GPT:
    """Return the model with its blocks as `h` and its embeddings as `wte` and `wpe`."""

    class Renamed(GPT):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.wte, self.wpe, self.h = model.embedding, model.position, model.blocks
            self.ln_f, self.lm_head = model.norm, model.head

        def forward(self, ids: Tensor) -> Tensor:
            x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
            for block in self.h:
                x = block(x)
            return self.lm_head(self.ln_f(x))

    return Renamed()


@refactor("an Identity after each activation", deep)
def _(model: nn.Sequential) -> nn.Module:
    layers: list[nn.Module] = []
    for layer in model:
        layers += [layer, nn.Identity()] if isinstance(layer, nn.ReLU) else [layer]
    return nn.Sequential(*layers)


@refactor("a Flatten inserted", mlp)
def _(model: MLP) -> nn.Module:
    return nn.Sequential(nn.Flatten(), model)


class Wrapper(nn.Module):
    """Calls a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@refactor("one block wrapped", gpt)
def _(model: GPT) -> None:
    model.blocks[1] = Wrapper(model.blocks[1])


@refactor("the whole model wrapped", bert)
def _(model: nn.Module) -> nn.Module:
    return Wrapper(model)


@refactor("the whole model unwrapped", remade(unet, Wrapper))
def _(model: Wrapper) -> nn.Module:
    return model.module


@refactor("the last norm moved into the head", gpt)
def _(model: GPT) -> None:
    model.head, model.norm = nn.Sequential(model.norm, model.head), nn.Identity()


@refactor("ModuleList into Sequential", resnet)
def _(model: ResNet) -> nn.Module:
    body = nn.Sequential(*model.blocks)

    class Chained(ResNet):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.stem, self.bn, self.body, self.head = model.stem, model.bn, body, model.head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(F.relu(self.bn(self.stem(x)))).mean((2, 3)))

    return Chained()


@refactor("a layer added that is never called", mlp)
def _(model: MLP) -> None:
    model.spare = nn.Linear(64, 64)


@refactor(
    "one ReLU called twice into two", remade(mlp, lambda m: setattr(m, "activation", nn.ReLU()))
)
def _(model: MLP) -> nn.Module:
    return nn.Sequential(
        OrderedDict(fc1=model.fc1, act1=nn.ReLU(), fc2=model.fc2, act2=nn.ReLU(), head=model.head)
    )


# ---- the same operation by another name ----------------------------------------------------------


@refactor("ReLU modules into functions", cnn)
def _(model: CNN) -> None:
    del model.relu1, model.relu2
    model.relu1 = model.relu2 = F.relu


@refactor("GELU module into a function", vit)
def _(model: nn.Module) -> None:
    for block in model.blocks:
        with_forward(block.mlp, lambda self, x: self[2](F.gelu(self[0](x))))


@refactor("ReLU in place", cnn)
def _(model: CNN) -> None:
    model.relu1, model.relu2 = nn.ReLU(inplace=True), nn.ReLU(inplace=True)


@refactor("ReLU out of place", resnet)
def _(model: ResNet) -> None:
    for block in model.blocks:
        block.relu = nn.ReLU()


@refactor("pooling by function into a module", unet)
def _(model: UNet) -> nn.Module:
    class Pooled(UNet):
        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.MaxPool2d(2)

        def forward(self, x: Tensor) -> Tensor:
            a = self.down1(x)
            b = self.down2(self.pool(a))
            x = self.join2(torch.cat([self.up2(self.middle(self.pool(b))), b], 1))
            return self.out(self.join1(torch.cat([self.up1(x), a], 1)))

    return loaded(Pooled(), model)


@refactor("mean over pixels into adaptive pooling", resnet)
def _(model: ResNet) -> nn.Module:
    class Pooled(ResNet):
        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.bn(self.stem(x)))
            for block in self.blocks:
                x = block(x)
            return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))

    return loaded(Pooled(), model)


@refactor("batch first into time first", lstm)
def _(model: LSTM) -> nn.Module:
    class TimeFirst(LSTM):
        def forward(self, ids: Tensor) -> Tensor:
            states, _ = self.lstm(self.embedding(ids).transpose(0, 1))
            return self.head(states[-1])

    made = loaded(TimeFirst(), model)
    made.lstm.batch_first = False
    return made


@refactor("product of embeddings by einsum", recommender)
def _(model: nn.Module) -> None:
    def forward(self: nn.Module, users: Tensor, items: Tensor) -> Tensor:
        u, i = self.user(users), self.item(items)
        return torch.einsum("nd,nd->n", u, i) + self.mlp(torch.cat([u, i], 1)).squeeze(1)

    with_forward(model, forward)


# ---- the same numbers but for rounding -----------------------------------------------------------


@refactor("linear by addmm", mlp)
def _(model: MLP) -> None:
    with_forward(model.fc2, lambda self, x: torch.addmm(self.bias, x, self.weight.T))


@refactor("linear as two halves, summed", mlp)
def _(model: MLP) -> None:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        left, right = (a @ b.T for a, b in zip(x.chunk(2, 1), self.weight.chunk(2, 1), strict=True))
        return right + left + self.bias

    with_forward(model.fc2, forward)


class Transposed(nn.Module):
    """A linear layer that keeps its weight as (inputs, outputs)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().T.clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


@refactor("weights stored transposed", gpt)
def _(model: GPT) -> None:
    for block in model.blocks:
        block.mlp[0], block.mlp[2] = Transposed(block.mlp[0]), Transposed(block.mlp[2])


def normalise(self: nn.LayerNorm, x: Tensor) -> Tensor:
    """Compute a layer norm, written out."""
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + self.eps).sqrt() * self.weight + self.bias


@refactor("layer norm written out", gpt)
def _(model: GPT) -> None:
    for block in model.blocks:
        with_forward(block.norm1, normalise)


@refactor("GELU by its formula", vit)
def _(model: nn.Module) -> None:
    for block in model.blocks:
        with_forward(block.mlp[1], lambda self, x: 0.5 * x * (1 + torch.erf(x / 2**0.5)))


@refactor("standard deviation by a square root", vae)
def _(model: nn.Module) -> None:
    model.sample = lambda mean, log_variance: (
        mean + log_variance.exp().sqrt() * torch.randn_like(mean)
    )


@refactor(
    "log of a softmax into log_softmax",
    remade(mlp, lambda m: setattr(m, "finish", lambda x: x.softmax(-1).log())),
)
def _(model: MLP) -> None:
    model.finish = lambda x: x.log_softmax(-1)


@refactor("channels last", unet)
def _(model: UNet) -> nn.Module:
    return model.to(memory_format=torch.channels_last)


@refactor("convolution as unfold and matmul", unet)
def _(model: UNet) -> None:
    def forward(self: nn.Conv2d, x: Tensor) -> Tensor:
        columns = F.unfold(x, 3, padding=1)
        return (self.weight.flatten(1) @ columns + self.bias[:, None]).unflatten(-1, x.shape[2:])

    with_forward(model.middle[0], forward)


@refactor("bias of a convolution added apart", cnn)
def _(model: CNN) -> None:
    def forward(self: nn.Conv2d, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, padding=1) + self.bias[:, None, None]

    with_forward(model.conv1, forward)


@refactor("batch norms folded", warm(cnn))
def _(model: CNN) -> None:
    for conv, norm in (("conv1", "bn1"), ("conv2", "bn2")):
        setattr(model, conv, fuse_conv_bn_eval(getattr(model, conv), getattr(model, norm)))
        setattr(model, norm, nn.Identity())


@refactor("dropout removed in evaluation", warm(cnn))
def _(model: CNN) -> None:
    model.dropout = nn.Identity()


@refactor("weight norm removed", remade(sequential, lambda m: weight_norm(m[2]) and None))
def _(model: nn.Sequential) -> None:
    made = nn.Linear(64, 64)
    made.weight.data, made.bias.data = model[2].weight.detach().clone(), model[2].bias.data
    model[2] = made


# ---- attention -----------------------------------------------------------------------------------


class Fused(Attention):
    """Attention whose queries, keys and values come from one layer."""

    def __init__(self, attention: Attention) -> None:
        nn.Module.__init__(self)
        width = attention.out.in_features
        self.qkv, self.out = nn.Linear(width, 3 * width), attention.out
        self.heads, self.causal, self.scale = attention.heads, attention.causal, attention.scale
        parts = attention.q, attention.k, attention.v
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([part.weight for part in parts]))
            self.qkv.bias.copy_(torch.cat([part.bias for part in parts]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.transpose(-2, -1) * self.scale
        if self.causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def fuse(model: nn.Module) -> None:
    """Fuse the projections of every attention of a model."""
    for block in model.blocks:
        block.attention = Fused(block.attention)


@refactor("q, k and v fused", gpt)
def _(model: GPT) -> None:
    fuse(model)


@refactor("a fused projection split", remade(vit, fuse))
def _(model: nn.Module) -> None:
    for block in model.blocks:
        fused, apart = block.attention, Attention(32, 4)
        apart.out = fused.out
        parts = zip(fused.qkv.weight.chunk(3), fused.qkv.bias.chunk(3), strict=True)
        for name, (weight, bias) in zip("qkv", parts, strict=True):
            linear = getattr(apart, name)
            linear.weight.data, linear.bias.data = weight.detach().clone(), bias.detach().clone()
        block.attention = apart


def fused_kernel(self: Attention, x: Tensor) -> Tensor:
    """Compute attention by `F.scaled_dot_product_attention`."""
    q, k, v = (
        t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x))
    )
    y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
    return self.out(y.transpose(1, 2).flatten(2))


@refactor("attention by F.scaled_dot_product_attention", gpt)
def _(model: GPT) -> None:
    for block in model.blocks:
        with_forward(block.attention, fused_kernel)


@refactor("sdpa into eager attention", bert)
def _(model: nn.Module) -> None:
    model.config._attn_implementation = "eager"


@refactor("attention by einsum", vit)
def _(model: nn.Module) -> None:
    def forward(self: Attention, x: Tensor) -> Tensor:
        q, k, v = (
            t.reshape(len(x), -1, self.heads, 8).permute(0, 2, 1, 3)
            for t in (self.q(x), self.k(x), self.v(x))
        )
        weights = torch.einsum("bhid,bhjd->bhij", q, k).mul(self.scale).softmax(-1)
        return self.out(torch.einsum("bhij,bhjd->bihd", weights, v).reshape(x.shape))

    for block in model.blocks:
        with_forward(block.attention, forward)


# ---- the same code, run by something else --------------------------------------------------------


def checkpointed(self: nn.Module, x: Tensor) -> Tensor:
    """Compute a module, and compute it again in the backward pass."""
    return checkpoint(type(self).forward, self, x, use_reentrant=False)


@refactor("a layer on halves of the batch", mlp)
def _(model: MLP) -> None:
    def forward(self: MLP, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x))
        x = torch.cat([self.fc2(part) for part in x.chunk(2)])
        return self.head(F.relu(x))

    with_forward(model, forward)


@refactor("layers of one block called by themselves", gpt)
def _(model: GPT) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = self.join(x, self.attention(self.norm1(x)))
        y = self.norm2(x)
        for layer in self.mlp:
            y = layer(y)
        return self.join(x, y)

    with_forward(model.blocks[1], forward)


@refactor("a dropout of nothing left out, still registered", warm(cnn))
def _(model: CNN) -> None:
    def forward(self: CNN, x: Tensor) -> Tensor:
        x = self.relu1(self.bn1(self.conv1(x)))
        x = self.relu2(self.bn2(self.conv2(F.max_pool2d(x, 2))))
        return self.head(x.mean((2, 3)))

    with_forward(model, forward)


@refactor("blocks checkpointed", gpt)
def _(model: GPT) -> None:
    for block in model.blocks:
        with_forward(block, checkpointed)


@refactor("compiled for autograd", gpt)
def _(model: GPT) -> Any:
    return torch.compile(model, backend="aot_eager")


@refactor("exported", vit)
def _(model: nn.Module) -> Any:
    return torch.export.export(model, (vit().inputs,))


@refactor("scripted", deep)
def _(model: nn.Module) -> Any:
    return torch.jit.script(model)


@refactor("traced by fx", resnet)
def _(model: ResNet) -> nn.Module:
    return torch.fx.symbolic_trace(model)
