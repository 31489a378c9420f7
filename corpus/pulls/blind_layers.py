"""Layers and how they are joined, as people report them wrong; each with its fix."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import PlacedTokens, SelfAttention, ffn, tokens
from corpus.models.small import flat, images, ratings, rows, words
from corpus.subject import Subject, subject

SHELF = Shelf("pulls", "blind")
GITHUB = "https://github.com"

UNREAD = ("never read", "nothing reads", "not read", "not used", "unused", "never used", "dropped")
CALLED = (*UNREAD, "no gradient", "no effect", "never called", "not called", "discard", "never ran")
TWICE = ("twice", "two times", "again", "same layer", "called 2", "reused", "shared")
LINEAR = ("activation", "nonlinear", "non-linear", "linear map", "one linear", "linearly")
SAMPLES = ("sample", "batch", "one number", "same for", "scalar")


def seen(model: nn.Module) -> Subject:
    return subject(model, images, F.cross_entropy, 32)


class Conv(nn.Sequential):
    """A convolution, a norm and an activation."""

    def __init__(self, a: int, b: int, stride: int = 1) -> None:
        norm = nn.BatchNorm2d(b)
        super().__init__(nn.Conv2d(a, b, 3, stride, 1, bias=False), norm, nn.ReLU())


# ---- gates of pictures ---------------------------------------------------------------------------


class Between(nn.Module):
    """Convolutions with a gate between them."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.second = Conv(1, 16), between, Conv(16, 32, 2)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.between(self.first(x))).mean((2, 3)))


@SHELF.report(
    f"{GITHUB}/Peachypie98/CBAM/issues/2",
    "gate of places without its sigmoid",
    ("between*", ""),
    ("sigmoid", "gate", "bound", "range", "negative", "squash", "activation", "scale"),
)
def cbam(fixed: bool) -> Subject:
    """Pixels are multiplied by whatever the convolution says, of any size and sign."""

    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 1, 3, padding=1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            said = self.conv(torch.cat([x.amax(1, keepdim=True), x.mean(1, keepdim=True)], 1))
            return x * (said.sigmoid() if fixed else said)

    return seen(Between(Places()))


@SHELF.report(
    f"{GITHUB}/nikhilroxtomar/Attention-Mechanism-Implementation/issues/1",
    "x1 + x1 where averages and maxima were to meet",
    ("between*", ""),
    (*CALLED, "twice", "itself", "same"),
)
def channels(fixed: bool) -> Subject:
    """What is made of the maxima is not read, and averages count twice."""

    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 16))

        def forward(self, x: Tensor) -> Tensor:
            x1 = self.shared(x.mean((2, 3)))
            x2 = self.shared(x.amax((2, 3)))
            return x * (x1 + (x2 if fixed else x1)).sigmoid()[:, :, None, None]

    return seen(Between(Channels()))


@SHELF.report(
    f"{GITHUB}/thedatumorg/TSB-AD/issues/31",
    "averages twice where averages and maxima were to be joined",
    ("pool*", "head*", ""),
    (*TWICE, "identical", "equal", "same", "copy", "copies", "maxim"),
)
def tsb_ad(fixed: bool) -> Subject:
    """Both pools of the pair are the same, and half of what is joined repeats the other half."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.AdaptiveAvgPool1d(1)
            self.max = nn.AdaptiveMaxPool1d(1) if fixed else nn.AdaptiveAvgPool1d(1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.mean(x), self.max(x)], 1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool = nn.Conv1d(8, 24, 3, padding=1), Joined()
            self.head = nn.Linear(48, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.pool(self.conv(x).relu()).flatten(1))

    return subject(Model(), rows, F.cross_entropy, 32)


# ---- loops and names -----------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/speedinghzl/Pytorch-Deeplab/issues/4",
    "return inside of the loop over convolutions",
    ("", "head*", "body*"),
    CALLED,
)
def deeplab(fixed: bool) -> Subject:
    """The loop ends in its first turn: of four dilations two are never seen."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            dilations = [nn.Conv2d(16, 10, 3, padding=d, dilation=d) for d in (1, 2, 3, 4)]
            self.convolutions = nn.ModuleList(dilations)

        def forward(self, x: Tensor) -> Tensor:
            said = self.convolutions[0](x)
            for conv in self.convolutions[1:]:
                said = said + conv(x)
                if not fixed:
                    return said
            return said

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(Conv(1, 16), Conv(16, 16)), Classifier()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x)).mean((2, 3))

    return seen(Model())


class Residual(nn.Module):
    """Adds two convolutions to what they read."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x.relu()).relu())


@SHELF.report(
    f"{GITHUB}/pytorch/rl/issues/3519",
    "first residual block called for the second, too",
    ("block*", ""),
    (*CALLED, *TWICE),
)
def impala(fixed: bool) -> Subject:
    """self.resnet1 stands in both lines, and self.resnet2 gets no gradient."""

    class Block(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.conv, self.pool = nn.Conv2d(a, b, 3, padding=1), nn.MaxPool2d(3, 2, 1)
            self.resnet1, self.resnet2 = Residual(b), Residual(b)

        def forward(self, x: Tensor) -> Tensor:
            x = self.resnet1(self.pool(self.conv(x)))
            return self.resnet2(x) if fixed else self.resnet1(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.Sequential(Block(1, 16), Block(16, 16)), nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks(x).relu().flatten(1))

    return seen(Model())


@SHELF.report(
    f"{GITHUB}/yakhyo/darknet-pytorch/issues/2",
    "shortcut added twice",
    ("blocks*", ""),
    ("residual", "skip", "shortcut", "twice", "grow", "doubl", "scale"),
)
def darknet(fixed: bool) -> Subject:
    """The block adds its input to the branch, and its caller does so once more."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(16, 8, 1, bias=False), Conv(8, 16)
            self.norm = nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            out = self.conv2(self.norm(self.conv1(x)).relu()) + x
            return out if fixed else out + x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = Conv(1, 16), nn.Linear(16, 10)
            self.blocks = nn.Sequential(*(Block() for _ in range(5)))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks(self.stem(x)).mean((2, 3)))

    return seen(Model())


@SHELF.report(
    f"{GITHUB}/huggingface/diffusers/pull/1381",
    "norm called on what it has just normalised",
    ("block*", ""),
    (*TWICE, "normalised", "norm is called", "repeated"),
)
def diffusers(fixed: bool) -> Subject:
    """With a linear projection the branch normalises what was normalised before the branch."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inwards = nn.GroupNorm(4, 32), nn.Linear(32, 32)
            self.attn, self.mlp, self.outwards = SelfAttention(), ffn(32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.norm(x)
            if not fixed:
                hidden = self.norm(hidden)
            hidden = self.inwards(hidden.flatten(2).transpose(1, 2))
            hidden = hidden + self.attn(hidden)
            hidden = self.outwards(hidden + self.mlp(hidden))
            return x + hidden.transpose(1, 2).unflatten(2, x.shape[2:])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block, self.head = nn.Conv2d(1, 32, 2, 2), Block(), nn.Linear(512, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.block(self.stem(x)).flatten(1))

    return seen(Model())


# ---- activations and dropouts --------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/somepago/saint/issues/23",
    "linear layers with nothing between them",
    ("mlp*", "embed*", ""),
    LINEAR,
)
def saint(fixed: bool) -> Subject:
    """The activation is asked for and not put in: the stack is one linear layer."""

    class MLP(nn.Module):
        def __init__(self, *sizes: int) -> None:
            super().__init__()
            layers: list[nn.Module] = []
            for a, b in itertools.pairwise(sizes):
                layers += [nn.Linear(a, b), nn.ReLU()] if fixed else [nn.Linear(a, b)]
            self.layers = nn.Sequential(*(layers[:-1] if fixed else layers))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attn = nn.Linear(8, 32), SelfAttention()
            self.norm, self.mlp = nn.LayerNorm(32), MLP(32, 96, 48, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            return self.mlp(self.norm(x + self.attn(x)).mean(1))

    return subject(Model(), rows, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/evintunador/templateGPT/issues/1",
    "result of a dropout not taken",
    ("block*", ""),
    (*CALLED, "no effect", "result", "thrown"),
)
def template(fixed: bool) -> Subject:
    """F.dropout(dx, p) stands alone in its line, and nothing is ever dropped."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.attn = nn.LayerNorm(32), SelfAttention()
            self.norm2, self.mlp = nn.LayerNorm(32), ffn(32)

        def dropped(self, x: Tensor) -> Tensor:
            thinned = F.dropout(x, 0.2, self.training)
            return thinned if fixed else x

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.dropped(self.attn(self.norm1(x)))
            return x + self.dropped(self.mlp(self.norm2(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = PlacedTokens(32), nn.Sequential(Block(), Block())
            self.head = nn.Linear(32, 10)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.blocks(self.embed(ids)).mean(1))

    return subject(Model(), words, F.cross_entropy, 32)


# ---- what is fused -------------------------------------------------------------------------------


def questions(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return pictures, the words of a part of each, and labels."""
    pixels, labels = flat(n)
    ids = (pixels[:, 24:40] * 6 + 4.9).round().long() + 1
    return (pixels.view(-1, 1, 8, 8), ids), labels


@SHELF.report(
    f"{GITHUB}/IBM/pytorchpipe/pull/53",
    "question as projected for the attention, joined for the question",
    ("", "latent*", "head*"),
    ("question", "project", *UNREAD, "twice", "wrong"),
)
def pytorchpipe(fixed: bool) -> Subject:
    """Beside the attended picture stands what was made to attend, not what was encoded."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.words = nn.Conv2d(1, 24, 2, 2), tokens(24)
            self.encoder = nn.LSTM(24, 24, batch_first=True)
            self.latent, self.score = nn.Linear(24, 24), nn.Linear(24, 1)
            self.head = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10))

        def forward(self, picture: Tensor, ids: Tensor) -> Tensor:
            cells = self.stem(picture).relu().flatten(2).transpose(1, 2)
            question = self.encoder(self.words(ids))[1][0][-1]
            latent = self.latent(question)
            weights = self.score((cells + latent[:, None]).tanh()).softmax(1)
            attended = (weights * cells).sum(1)
            return self.head(torch.cat([attended, question if fixed else latent], 1))

    return subject(Model(), questions, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/ShomyLiu/Neu-Review-Rec/issues/9",
    "pairs of factors summed over the batch, too",
    ("", "fm*"),
    SAMPLES,
)
def neu_review(fixed: bool) -> Subject:
    """torch.sum without a dimension gives each rating the pairs of all ratings."""

    class Machine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 1)
            self.factors = nn.Parameter(0.1 * torch.randn(32, 8))

        def forward(self, x: Tensor) -> Tensor:
            pairs = (x @ self.factors).pow(2) - x.pow(2) @ self.factors.pow(2)
            total: Any = pairs.sum(1, keepdim=True) if fixed else pairs.sum()
            return 0.5 * total + self.linear(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item, self.fm = nn.Embedding(50, 16), nn.Embedding(40, 16), Machine()

        def forward(self, users: Tensor, items: Tensor) -> Tensor:
            return self.fm(torch.cat([self.user(users), self.item(items)], 1)).squeeze(1)

    return subject(Model(), ratings, F.binary_cross_entropy_with_logits, 48)
