"""Standardised weights, scaled cosines, branches that start nearly closed, class tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.checks.parts import Applies
from corpus.models.small import flat, images, plain
from corpus.subject import Subject, subject

# ---- standardised weights (Brock et al. 2021) ----------------------------------------------------


class StandardisedConv(nn.Conv2d):
    """Standardises its weights whenever it is called, and scales each unit by a gain."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0) -> None:
        super().__init__(inputs, outputs, 3, padding=1)
        self.gain = nn.Parameter(torch.full((outputs, 1, 1, 1), gain))

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True)
        fan_in = self.weight[0].numel()
        weight = (self.weight - mean) * (var * fan_in + 1e-8).rsqrt() * self.gain
        return F.conv2d(x, weight, self.bias, padding=1)


class Excited(nn.Module):
    """A branch whose last gain starts at zero, with squeeze-and-excitation behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = StandardisedConv(width, width)
        self.conv2 = StandardisedConv(width, width, gain=0.0)
        self.squeeze, self.act = nn.Conv2d(width, width, 1), nn.ReLU()
        self.excite = nn.Conv2d(width, width, 1)
        nn.init.zeros_(self.squeeze.bias)
        nn.init.zeros_(self.conv2.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.conv1(F.relu(x))))
        means = y.mean((2, 3), keepdim=True)
        return x + y * self.excite(self.act(self.squeeze(means))).sigmoid()


class NormalizerFree(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = StandardisedConv(1, width)
        self.blocks = nn.Sequential(Excited(width), Excited(width))
        self.last, self.head = StandardisedConv(width, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.last(self.blocks(self.stem(x)))).mean((2, 3)))


def normalizer_free() -> Subject:
    return subject(NormalizerFree(), images, F.cross_entropy)


# ---- logits that are scaled cosines (Deng et al. 2019, Wang et al. 2018) -------------------------


class Margin(nn.Module):
    """Cosines to the centre of each class, the target's less a margin, times a scale."""

    def __init__(self, scale: float = 64.0, by_angle: bool = True, width: int = 32) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(10, width))
        self.scale, self.by_angle = scale, by_angle

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        cosines = F.linear(F.normalize(x), F.normalize(self.centres))
        chosen = F.one_hot(labels, 10).bool()
        if self.by_angle:
            moved = (cosines.clamp(-1 + 1e-6, 1 - 1e-6).acos() + 0.5).cos()
        else:
            moved = cosines - 0.35
        return self.scale * torch.where(chosen, moved, cosines)


class Faces(nn.Module):
    """Features with the margin of the head inside the model, which is given the labels."""

    def __init__(self, scale: float = 64.0, by_angle: bool = True) -> None:
        super().__init__()
        self.body, self.head = plain(64, 64, 32), Margin(scale, by_angle)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.body(x), labels)


class Cosines(nn.Module):
    """Cosines written with torch's own function, scaled by 64, without a margin."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.centres = plain(64, 64, 32), nn.Parameter(torch.randn(10, 32))
        self.body[2].weight.data *= 1e-3  # the length of features is free

    def forward(self, x: Tensor) -> Tensor:
        return 64 * F.cosine_similarity(self.body(x)[:, None], self.centres[None], dim=-1)


class Scaled(nn.Module):
    """A plain classifier whose logits are multiplied."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.body, self.head, self.scale = plain(64, 64, 32), nn.Linear(32, 10), scale
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(x))) * self.scale


def with_labels(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    pixels, labels = flat(n)
    return (pixels, labels), labels


def arcface() -> Subject:
    return subject(Faces(), with_labels, F.cross_entropy)


def cosface() -> Subject:
    return subject(Faces(by_angle=False), with_labels, F.cross_entropy)


def margin_outside() -> Subject:
    """The margin is the loss, which has the weights, as in libraries of metric learning."""
    margin = Margin(width=32)
    body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    return subject(body, flat, lambda x, labels: F.cross_entropy(margin(x, labels), labels))


def classifier() -> Subject:
    return subject(Scaled(1.0), flat, F.cross_entropy)


# ---- weights whose scale a normalisation takes away ----------------------------------------------


class ChannelNorm(nn.Module):
    """Normalises the channels of each pixel by their root mean square, as a project writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma, self.eps = nn.Parameter(torch.ones(width, 1, 1)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(1, keepdim=True) + self.eps).rsqrt() * self.gamma


class Inception(nn.Module):
    """Convolutions, each with a norm behind it, whose outputs are concatenated."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d, std: float = 0.3) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 64, 3, padding=1), norm(64)
        self.one, self.norm1 = nn.Conv2d(64, 32, 3, padding=1, bias=False), norm(32)
        self.two, self.norm2 = nn.Conv2d(32, 32, 3, padding=1, bias=False), norm(32)
        self.head = nn.Linear(64, 10)
        for conv in (self.one, self.two):
            nn.init.trunc_normal_(conv.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        one = F.relu(self.norm1(self.one(x)))
        two = F.relu(self.norm2(self.two(one)))
        return self.head(torch.cat([one, two], 1).mean((2, 3)))


def inception() -> Subject:
    return subject(Inception(), images, F.cross_entropy)


# ---- branches that start nearly closed (Touvron et al. 2021), of which a class token is read -----


class Scale(nn.Module):
    """LayerScale: a small factor for each channel of a branch."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class PooledAttention(nn.Module):
    """Pools the patches of queries, keys and values, not the class token (Fan et al. 2021)."""

    def __init__(self, width: int = 32, side: int = 4) -> None:
        super().__init__()
        self.qkv, self.out, self.side = nn.Linear(width, 3 * width), nn.Linear(width, width), side
        self.pool_q, self.pool_k = (
            nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False) for _ in range(2)
        )
        self.norm_q, self.norm_k = nn.LayerNorm(width), nn.LayerNorm(width)
        self.round: Callable[[Tensor], Tensor] = lambda patches: patches

    def pooled(self, x: Tensor, pool: nn.Module) -> Tensor:
        token, patches = x[:, :1], x[:, 1:].transpose(1, 2).unflatten(2, (self.side, self.side))
        return torch.cat([token, pool(patches).flatten(2).transpose(1, 2)], 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = self.norm_q(self.pooled(q, self.pool_q)), self.pooled(k, self.pool_k)
        scores = q @ self.norm_k(self.round(k)).transpose(1, 2) / math.sqrt(q.shape[-1])
        return self.out(scores.softmax(-1) @ v)


class RelativeAttention(nn.Module):
    """Adds a score for each pair of patches, made from how far they lie apart."""

    def __init__(self, width: int = 32, side: int = 4) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Linear(2, 1)
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).float()
        self.register_buffer("apart", places[:, None] - places[None])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        bias = F.pad(self.table(self.apart).squeeze(-1), (1, 0, 1, 0))
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + bias
        return self.out(scores.softmax(-1) @ v)


class GatedBlock(nn.Module):
    def __init__(self, attention: nn.Module, start: float, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.attention, self.scale1 = (
            nn.LayerNorm(width),
            attention,
            Scale(width, start),
        )
        self.norm2, self.mlp = nn.LayerNorm(width), plain(width, 64, width, activation=nn.GELU)
        self.gamma = nn.Parameter(torch.full((width,), start))  # of the block itself, as others do

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale1(self.attention(self.norm1(x)))
        return x + self.gamma * self.mlp(self.norm2(x))


class ClassToken(nn.Module):
    """A vision transformer that reads its class token, which sees the patches through branches."""

    def __init__(self, attention: type[nn.Module] = RelativeAttention, start: float = 1e-6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 32, 2, stride=2)
        self.token = nn.Parameter(1e-6 * torch.randn(1, 1, 32))
        self.blocks = nn.Sequential(*(GatedBlock(attention(), start) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.head(self.norm(self.blocks(x))[:, 0])


def relative() -> Subject:
    return subject(ClassToken(), images, F.cross_entropy, batch=32)


def pooled() -> Subject:
    return subject(ClassToken(PooledAttention, start=1e-4), images, F.cross_entropy, batch=32)


class Trunk(nn.Module):
    """Layers behind each other, a small factor after each, and nothing that goes past them."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        layers = [m for _ in range(4) for m in (nn.Linear(64, 64), Scale(64, start), nn.GELU())]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def trunk() -> Subject:
    return subject(Trunk(), flat, F.cross_entropy)


def cosine_logits():
    """Logits that are cosines and logits that are not, with the truth."""
    torch.manual_seed(0)
    x, w = torch.randn(8, 6, requires_grad=True), nn.Parameter(torch.randn(3, 6))
    labels = torch.randint(0, 3, (8,))
    unit, centres = nn.functional.normalize(x), nn.functional.normalize(w)
    cosines = unit @ centres.T
    moved = cosines.clone()
    moved[torch.arange(8), labels] -= 0.35
    by_hand = (x / x.norm(dim=1, keepdim=True)) @ (w / w.square().sum(1, keepdim=True).sqrt()).T
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3, bias=False))
    yield "mm", cosines * 64, True
    yield "index", moved * 64, True
    yield "by hand", by_hand, True
    yield "weight norm", normed(unit) / 0.07, True
    yield "angle", Margin(width=6)(x, labels), True
    yield "function", nn.functional.cosine_similarity(x[:, None], w[None], dim=-1) * 30, True
    yield "learned scale", cosines * nn.Parameter(torch.tensor(2.6)).exp(), True
    yield "plain", (x @ w.T) * 64, False
    yield "one side only", (unit @ w.T) * 64, False
    yield "a layer after", torch.relu(cosines) * 64, False
    yield "normalised late", nn.functional.normalize(x @ w.T) * 64, False


class Last(nn.Module):
    """Applies a net to the dimension of the channels."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x.transpose(1, 2)).transpose(1, 2)


class Rounded(nn.Module):
    """Queries from a layer of their own, rounded."""

    def __init__(self, width):
        super().__init__()
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)

    def forward(self, x):
        return torch.cat([self.q(x).round(), self.kv(x)], -1)


def deep(activation, std, after, depth=16):
    """Return a net of batch normalisations whose weights have this deviation, fresh."""
    layers = []
    for _ in range(depth):
        linear = nn.Linear(16, 16)
        nn.init.normal_(linear.weight, std=std)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.BatchNorm1d(16), activation()]
    return nn.Sequential(*layers, after, nn.Linear(16, 4))


def drawn(model, centre, shift):
    """Draw the scales of its batch normalisations around `centre`, and shifts with a deviation."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.weight, centre, 0.02)
            nn.init.normal_(module.bias, std=shift)
    nn.init.zeros_(model[-1].bias)
    return model


UNFITTED = {
    "activation_scale": lambda: deep(nn.Identity, 0.6, nn.Identity()),
    "collapse": lambda: deep(nn.GELU, 0.02, Applies(lambda x: x + 1.0), 8),
    "dead_units": lambda: deep(lambda: nn.Hardshrink(0.1), 0.1, nn.Identity(), 4),
    "grad_norm": lambda: deep(nn.Identity, 0.01, nn.Identity()),
    "saturation": lambda: deep(nn.Identity, 1.0, nn.Tanh()),
}
