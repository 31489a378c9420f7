"""What starts at zero, is frozen, cast or cut off, as threads have it wrong; each with its fix."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import SelfAttention, frozen, normal, perceptron
from corpus.models.small import ViT, flat, images, rows
from corpus.subject import Subject, subject

SHELF = Shelf("threads", "blind")
GITHUB = "https://github.com"


# ---- adapters ------------------------------------------------------------------------------------


class Lora(nn.Module):
    """A frozen layer with a product of two small ones beside it."""

    def __init__(self, a: int, b: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = frozen(nn.Linear(a, b)), scale
        self.lora_a, self.lora_b = nn.Linear(a, 4, bias=False), nn.Linear(4, b, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.lora_b(self.lora_a(x))


@SHELF.report(
    f"{GITHUB}/nvidia-cosmos/cosmos-predict2.5/pull/15",
    "both factors of an adapter start at zero",
    ("*lora*", "0", "2", ""),
    ("zero", "both", "product", "gradient"),
)
def cosmos(fixed: bool) -> Subject:
    """Weights are initialised once more after adapters are in: no factor gets a gradient."""
    model = nn.Sequential(Lora(64, 48, 1.0), nn.GELU(), Lora(48, 10, 1.0))
    if not fixed:
        for name, weight in model.named_parameters():
            if "lora_a" in name:
                nn.init.zeros_(weight)
    return subject(model, flat, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/rasbt/LLMs-from-scratch/issues/821",
    "alpha of an adapter not divided by its rank",
    ("*lora*", "0", "2", ""),
    ("scale", "alpha", "rank", "large", "times"),
)
def alpha(fixed: bool) -> Subject:
    """The update is as many times too large as the adapter has ranks."""
    scale = 16 / 4 if fixed else 16
    model = nn.Sequential(Lora(64, 48, scale), nn.GELU(), Lora(48, 10, scale))
    return subject(model, flat, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/CSCYQJ/MICCAI23-ProtoContra-SFDA/issues/18",
    "requires_grad set on a layer, and not on its parameters",
    ("outc*", ""),
    ("requires_grad", "frozen", "freez", "attribute"),
)
def outc(fixed: bool) -> Subject:
    """A module takes any attribute: the last layer is trained all the same."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.outc = perceptron(64, 48, 32), nn.Linear(32, 10)
            if fixed:
                self.outc.requires_grad_(False)
            else:
                self.outc.requires_grad = False

        def forward(self, x: Tensor) -> Tensor:
            return self.outc(self.body(x).relu())

    return subject(Net(), flat, F.cross_entropy, 32)


# ---- starts and ends of gradients ----------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/yz93/LAVT-RIS/issues/25",
    "gate of two layers that both start at zero",
    ("gate*", "fuse*", ""),
    ("zero", "both", "dead", "never", "gradient"),
)
def lavt(fixed: bool) -> Subject:
    """Behind the ReLU of zeros no gradient is left for either, nor for what is gated."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.position, self.head = (
                nn.Linear(8, 32),
                normal(8, 32),
                nn.Linear(32, 10),
            )
            self.fuse = SelfAttention()
            linear = [nn.Linear(32, 32, bias=False) for _ in range(2)]
            self.gate = nn.Sequential(linear[0], nn.ReLU(), linear[1], nn.Tanh())
            for layer in linear[1:] if fixed else linear:
                nn.init.zeros_(layer.weight)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x) + self.position
            fused = self.fuse(x)
            return self.head((x + self.gate(fused) * fused).relu().mean(1))

    return subject(Net(), rows, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/mahmoodlab/TRIDENT/issues/122",
    "encoder that comes frozen, and is to be trained from nothing",
    ("feature_encoder*", ""),
    ("frozen", "freez", "requires_grad", "no gradient", "not train", "never learn"),
)
def trident(fixed: bool) -> Subject:
    """The loader freezes what it makes, as it is for pretrained ones: random features stay."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.feature_encoder = nn.ModuleDict(
                {"features": nn.Linear(8, 32), "score": perceptron(32, 16, 1)}
            )
            self.classifier = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
            if not fixed:
                frozen(self.feature_encoder)

        def forward(self, x: Tensor) -> Tensor:
            x = self.feature_encoder["features"](x).relu()
            weight = self.feature_encoder["score"](x).softmax(1)
            return self.classifier((weight * x).sum(1))

    return subject(Net(), rows, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/Hiyuur/SR-TOD/issues/5",
    "learnable threshold behind a sign",
    ("mask*", ""),
    ("sign", "zero", "flat", "gradient", "never learn"),
)
def threshold(fixed: bool) -> Subject:
    """The sign is flat on both sides, so that its threshold is never taught."""

    class Mask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.threshold = nn.Parameter(torch.tensor(0.3))

        def forward(self, x: Tensor) -> Tensor:
            above = x.abs() - self.threshold
            return (10 * above).sigmoid() if fixed else (above.sign() + 1) * 0.5

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.again = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)
            self.mask, self.head = Mask(), nn.Linear(16, 10)

        def forward(self, x: Tensor) -> Tensor:
            features = self.stem(x).relu()
            features = features * (1 + self.mask(self.again(features) - x))
            return self.head(features.mean((2, 3)))

    return subject(Net(), images, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/huggingface/transformers/pull/47468",
    "root cast to an integer",
    ("block*", ""),
    ("scale", "root", "sqrt", "integer", "trunc"),
)
def image_gpt(fixed: bool) -> Subject:
    """A helper by the name of a float truncates: scores are divided by 2, not by 2.8."""
    model = ViT()
    for block in model.blocks:
        block.attention.scale = 1 / (math.sqrt(8) if fixed else int(math.sqrt(8)))
    return subject(model, images, F.cross_entropy, 32)
