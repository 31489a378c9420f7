"""Rows of zeros that stay so, and losses whose gradient moves no optimizer."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from corpus.cards import Shelf
from corpus.models.parts import Patches, PreNorm, SmallLM, attend, frozen, lookalikes_of, perceptron
from corpus.models.small import (
    autoencoder,
    contrastive,
    flat,
    images,
    language_loss,
    mlp,
    next_words,
    regression,
    rows,
    unet,
)
from corpus.subject import Subject, subject, trained

SHELF = Shelf("gradient", "blind")
fault = SHELF.fault
lookalike = lookalikes_of(SHELF)

STILL = ("zero", "rows", "dead", "no gradient", "stuck", "never learn", "wait")
TINY = ("small", "tiny", "eps", "vanish", "saturat", "scale", "flat", "no optimizer", "1e-")

# ---- faults: rows of zeros without gradient ------------------------------------------------------


def patch_net() -> Subject:
    net = nn.Sequential(Patches(), PreNorm(), nn.Flatten(), nn.Linear(512, 10))
    return subject(net, images, F.cross_entropy, 32)


@fault(
    "queries and keys of a packed projection both zero",
    patch_net,
    ("1", "1.attn", "1.attn.qkv"),
    STILL,
    why="Queries get their gradient from keys and keys theirs from queries: both stay zero.",
)
def _(s: Subject) -> None:
    with torch.no_grad():
        s.model[1].attn.qkv.weight[:64] = 0
        s.model[1].attn.qkv.bias[:64] = 0


@fault(
    "packed queries and keys zero in half of the heads",
    patch_net,
    ("1", "1.attn", "1.attn.qkv"),
    STILL,
    why="Two heads average over all patches for ever.",
)
def _(s: Subject) -> None:
    with torch.no_grad():
        for part in (slice(0, 16), slice(32, 48)):
            s.model[1].attn.qkv.weight[part] = 0
            s.model[1].attn.qkv.bias[part] = 0


def plain_cnn() -> Subject:
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 10),
    )
    return subject(net, images, F.cross_entropy, 32)


@fault(
    "new filters of zeros before a relu, to widen a trained net",
    plain_cnn,
    ("", "0", "1", "2"),
    STILL,
    why="A ReLU at zero passes nothing back, so that the new filters never learn.",
)
def _(s: Subject) -> None:
    with torch.no_grad():
        s.model[0].weight[8:] = 0
        s.model[0].bias[8:] = 0


class SwiGLU(nn.Module):
    """Gate and value from one packed layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem, self.w12 = nn.Linear(64, width), nn.Linear(width, 4 * width, bias=False)
        self.w3, self.head = nn.Linear(2 * width, width, bias=False), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        gate, value = self.w12(x).chunk(2, -1)
        return self.head(x + self.w3(F.silu(gate) * value))


def swiglu() -> Subject:
    return subject(SwiGLU(), flat, F.cross_entropy)


@fault(
    "a packed gate grown by rows of zeros in both halves",
    swiglu,
    ("w12", "w3"),
    STILL,
    why="Gate and value are both zero in the new units; each waits for the other to move.",
)
def _(s: Subject) -> None:
    with torch.no_grad():
        s.model.w12.weight[48:64] = 0
        s.model.w12.weight[112:] = 0


class PackedLoRA(nn.Module):
    """A frozen projection, with low-rank updates for queries and values in one pair of matrices."""

    def __init__(self, width: int, rank: int = 4) -> None:
        super().__init__()
        self.base = frozen(nn.Linear(width, 3 * width))
        self.down = nn.Linear(width, 2 * rank, bias=False)
        self.up_q, self.up_v = (nn.Linear(rank, width, bias=False) for _ in range(2))
        for up in (self.up_q, self.up_v):
            nn.init.zeros_(up.weight)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.base(x).chunk(3, -1)
        for_q, for_v = self.down(x).chunk(2, -1)
        return attend(q + self.up_q(for_q), k, v + self.up_v(for_v))


class LoRANet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(8, width), nn.Embedding(8, width)
        self.lora, self.head = PackedLoRA(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place.weight
        return self.head((x + self.lora(x)).mean(1))


def lora() -> Subject:
    return subject(LoRANet(), rows, F.cross_entropy)


@fault(
    "both factors of the values' low-rank update zero",
    lora,
    ("lora", "lora.down", "lora.up_v"),
    STILL,
    why="Either factor's gradient is a product with the other, which is zero: neither ever moves.",
)
def _(s: Subject) -> None:
    with torch.no_grad():
        s.model.lora.down.weight[4:] = 0


# ---- look-alikes: rows of zeros by design --------------------------------------------------------

SHELF.control("low-rank updates for queries and values, the second factors zero", lora)


def structured() -> nn.Module:
    net = perceptron(64, 64, 48, 10)
    prune.ln_structured(net[2], "weight", 0.3, n=2, dim=0)
    return net


lookalike("a third of the rows pruned by their length", flat)(structured)


@lookalike("three quarters of all weights pruned", images)
def unstructured() -> nn.Module:
    net = plain_cnn().model
    for i in (0, 2):
        prune.l1_unstructured(net[i], "weight", 0.75)
    return net


@lookalike("each unit of the first layer sees one row of the picture, by a mask", flat)
class RowMasked(nn.Module):
    """Also some units that see nothing: their place is kept for rows that other pictures have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(64, 80), nn.Linear(80, 10)
        mask = torch.zeros(10, 8, 8, 8)
        for row in range(8):
            mask[row, :, row] = 1
        self.register_buffer("mask", mask.view(80, 64))
        with torch.no_grad():
            self.linear.weight.mul_(self.mask)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.linear.weight * self.mask, self.linear.bias)
        return self.head(F.relu(x))


@lookalike("sparse initialisation of nine weights in ten", flat)
def sparse_start() -> nn.Module:
    net = perceptron(64, 64, 64, 10, act=nn.Tanh)
    for i in (0, 2):
        nn.init.sparse_(net[i].weight, 0.9, std=0.3)
    return net


@lookalike("rows of zeros for words that are reserved", next_words, language_loss, 16)
class ReservedWords(nn.Module):
    """A vocabulary filled up to a multiple of 64, of which 18 words are in use."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.lm, self.project = SmallLM(width), nn.Linear(64, width, bias=False)
        self.lm.wte = nn.Embedding(64, width, padding_idx=0)
        with torch.no_grad():
            self.lm.wte.weight[18:] = 0
            self.project.weight[:, 18:] = 0

    def forward(self, ids: Tensor) -> Tensor:
        spelled = self.project(F.one_hot(ids, 64).float())
        return self.lm.lm_head(self.lm.trunk(self.lm.embed(ids) + spelled))


@lookalike("keys of a packed projection zero, queries drawn", images)
def zero_keys() -> nn.Module:
    net = patch_net().model
    with torch.no_grad():
        net[1].attn.qkv.weight[32:64] = 0
        net[1].attn.qkv.bias[32:64] = 0
    return net


# ---- faults: gradients on which no optimizer moves -----------------------------------------------


@fault(
    "loss in other units, a trillionth of what it was",
    mlp,
    ("", "loss"),
    TINY,
    why="Gradients are far below the epsilon of Adam, and no step is made.",
)
def _(s: Subject) -> None:
    s.loss = lambda out, y: 1e-12 * F.cross_entropy(out, y)


@fault(
    "temperature of 1e12",
    contrastive,
    ("", "loss", "encoder", "encoder.2"),
    (*TINY, "temperature"),
    why="All scores are zero to eleven digits, and gradients far below the epsilon of Adam.",
)
def _(s: Subject) -> None:
    s.model.temperature = 1e12


@fault(
    "output squashed by an exponential of a large negative number",
    regression,
    ("", "loss", "head"),
    TINY,
    why="The prediction is 1e-18 whatever the input: there is a loss, and nothing to lower it by.",
)
def _(s: Subject) -> None:
    s.model.finish = lambda x: torch.exp(x - 40)


@fault(
    "gaussian kernel of pixels in another unit",
    autoencoder,
    ("", "loss"),
    TINY,
    why="Each distance is far out on the kernel's tail, where it is flat.",
)
def _(s: Subject) -> None:
    s.loss = lambda out, y: 1 - torch.exp(-((out - y) ** 2).sum(1) / 1.2).mean().clamp(max=1)


@fault(
    "mean divided by the number of all pixels a second and a third time",
    unet,
    ("", "loss"),
    TINY,
    why="What remains of the loss is a two-billionth, and of its gradients as little.",
)
def _(s: Subject) -> None:
    s.loss = lambda out, y: F.binary_cross_entropy_with_logits(out, y) / out.numel() ** 3


# ---- look-alikes: small gradients at the end of training -----------------------------------------


def solved() -> Subject:
    """A linear task with its solution, which no noise is on."""
    net = nn.Linear(6, 1)
    true = torch.linspace(-1, 1, 6)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 6)
        return x, x @ true[:, None]

    with torch.no_grad():
        net.weight.copy_(true[None] + 1e-6)
        net.bias.zero_()
    return subject(net, draw, F.mse_loss)


SHELF.control("regression within a millionth of its solution", solved)


class Student(nn.Module):
    def __init__(self, gap: float) -> None:
        super().__init__()
        self.teacher, self.student = perceptron(64, 48, 10), perceptron(64, 48, 10)
        self.student.load_state_dict(self.teacher.state_dict())
        frozen(self.teacher)
        with torch.no_grad():
            self.student[-1].bias.add_(gap * torch.randn(10))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x), wanted


def unlabelled(n: int) -> tuple[Tensor, None]:
    return flat(n)[0], None


def distilled(out: tuple[Tensor, Tensor], heat: float = 4.0) -> Tensor:
    student, teacher = (o / heat for o in out)
    soft = F.kl_div(
        student.log_softmax(1), teacher.log_softmax(1), log_target=True, reduction="batchmean"
    )
    return heat**2 * soft


lookalike("distillation to the softened logits, nearly at its end", unlabelled, distilled)(
    lambda: Student(0.01)
)


def done() -> Subject:
    return trained(mlp, steps=300, rate=1e-2)


SHELF.control("digits learnt by heart until hardly any loss is left", done)


def hinge(out: Tensor, y: Tensor) -> Tensor:
    return F.multi_margin_loss(out, y, margin=1e-3)


lookalike("a margin so narrow that few samples are within it", flat, hinge)(
    lambda: perceptron(64, 48, 10)
)


def log_uniform(out: Tensor, y: Tensor) -> Tensor:
    return 1e-4 * F.cross_entropy(out, y) / math.log(10)


lookalike("a loss scaled by 1e-4 for the sake of a common rate", flat, log_uniform)(
    lambda: perceptron(64, 48, 10)
)
