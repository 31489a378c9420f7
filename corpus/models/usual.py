"""Variations of the small models that are usual, and could be taken for a fault."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.models.small import (
    CNN,
    MLP,
    Attention,
    ViT,
    autoencoder,
    bert,
    binary,
    cnn,
    contrastive,
    deep,
    flat,
    gpt,
    graph,
    gru,
    lstm,
    mlp,
    moe,
    multitask,
    plain,
    recommender,
    regression,
    resnet,
    rows,
    seq2seq,
    sequential,
    some_digits,
    unet,
    vae,
    vit,
    words,
)
from corpus.subject import Healthy, Subject
from corpus.variants import with_model

# ---- every subject, before and after training ----------------------------------------------------


EVERY = [mlp, sequential, deep, regression, binary, cnn, resnet, lstm, gru, gpt, vit, seq2seq, bert]
EVERY += [autoencoder, vae, unet, moe, recommender, graph, multitask, contrastive]

TRANSFORMERS = [
    "bert",
    "roberta",
    "albert",
    "gpt2",
    "llama",
    "mistral",
    "gemma",
    "gptneox",
    "mixtral",
    "mamba",
    "t5",
    "bart",
]

TRANSFORMERS += [
    "whisper",
    "wav2vec2",
    "vit",
    "dinov2",
    "swin",
    "resnet",
    "convnext",
    "clip",
    "deberta",
    "longformer",
]

TRANSFORMERS += ["modernbert", "bloom", "qwen2 moe", "switch", "mamba2", "rwkv"]
TRANSFORMERS += ["patchtst", "detr", "segformer", "llava", "recurrent gemma"]

# ---- initialisation that looks like a fault ------------------------------------------------------


class Gated(nn.Module):
    """ReZero (Bachlechner et al. 2020): each branch behind a scalar gate of zero."""

    def __init__(self, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.branches = nn.ModuleList(plain(width, width, width) for _ in range(depth))
        self.gates = nn.Parameter(torch.zeros(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for gate, branch in zip(self.gates, self.branches, strict=True):
            x = x + gate * branch(x)
        return self.head(x)


class LayerScale(nn.Module):
    def __init__(self, layer: nn.Module, width: int, start: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.full((width,), start))

    def forward(self, *arguments: Tensor) -> Tensor:
        return self.scale * self.layer(*arguments)


class LoRA(nn.Module):
    """A frozen layer beside a product of two small ones, the second of zeros."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = layer.requires_grad_(False)
        self.a = nn.Linear(layer.in_features, rank, bias=False)
        self.b = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def adapt(s: Subject) -> None:
    """Freeze a transformer and put adapters beside its queries and values."""
    s.model.requires_grad_(False)
    for block in s.model.blocks:
        block.attention.q = LoRA(block.attention.q)
        block.attention.v = LoRA(block.attention.v)


# ---- activations and norms -----------------------------------------------------------------------


def activated(activation: type[nn.Module]) -> Healthy:
    """Return a net of four hidden layers with this activation."""
    return with_model(
        lambda: plain(64, 64, 64, 64, 64, 10, activation=activation), flat, F.cross_entropy
    )


def normed(norm: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    """Return a maker of a convolutional net with this norm."""

    def build() -> nn.Module:
        model = CNN()
        model.bn1, model.bn2 = norm(16), norm(32)
        return model

    return build


class PostNorm(nn.Module):
    """A block with the norm behind the sum; `alpha` as in DeepNorm (Wang et al. 2022)."""

    def __init__(self, width: int = 32, alpha: float = 1.0) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(width, 4), nn.LayerNorm(width)
        self.mlp, self.norm2 = plain(width, 4 * width, width), nn.LayerNorm(width)
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.alpha * x + self.attention(x))
        return self.norm2(self.alpha * x + self.mlp(x))


def post_norm(depth: int = 4, alpha: float = 1.0) -> Callable[[], nn.Module]:
    """Return a maker of a vision transformer of post-norm blocks."""

    def build() -> nn.Module:
        model = ViT(depth=1)
        model.blocks = nn.Sequential(*(PostNorm(alpha=alpha) for _ in range(depth)))
        return model

    return build


class Siren(nn.Module):
    """Sine layers (Sitzmann et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(2, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        nn.init.uniform_(self.fc1.weight, -1 / 2, 1 / 2)
        for layer in (self.fc2, self.head):
            bound = math.sqrt(6 / 64) / 30
            nn.init.uniform_(layer.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sin(30 * self.fc2(torch.sin(30 * self.fc1(x)))))


def picture(n: int) -> tuple[Tensor, Tensor]:
    """Return coordinates and the brightness of one image there."""
    where = torch.rand(n, 2) * 2 - 1
    return where, torch.sin(5 * where).prod(1, keepdim=True)


# ---- parts that one batch leaves alone -----------------------------------------------------------


class TwoHeads(nn.Module):
    """The loss reads one head of two."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.used, self.spare = plain(64, 64, 32), nn.Linear(32, 10), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.trunk(x))
        return self.used(x), self.spare(x)


class Stacked(nn.Module):
    """Four heads stacked, of which the output keeps three."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = plain(64, 64, 32)
        self.heads = nn.ModuleList(plain(32, 16, 10) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.trunk(x))
        return torch.stack([head(x) for head in self.heads], 1)[:, 1:].mean(1)


class TargetNetwork(nn.Module):
    """BYOL-like: a frozen copy makes the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = plain(64, 64, 16), plain(16, 32, 16)
        self.target = plain(64, 64, 16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        predicted = self.predictor(self.online(x))
        with torch.no_grad():
            target = self.target(x + 0.1)
        return 2 - 2 * F.cosine_similarity(predicted, target, dim=-1).mean()


class Generator(nn.Module):
    """A generator judged by a discriminator that this step does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(plain(16, 64, 64), nn.Tanh())
        self.discriminator = plain(64, 64, 1, activation=nn.LeakyReLU).requires_grad_(False)

    def forward(self, z: Tensor) -> Tensor:
        return self.discriminator(self.generator(z))


def real(scores: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))


# ---- losses --------------------------------------------------------------------------------------


def quantile(output: Tensor, target: Tensor) -> Tensor:
    error = target - output
    return torch.maximum(0.9 * error, -0.1 * error).mean()


def gaussian(output: Tensor, target: Tensor) -> Tensor:
    return F.gaussian_nll_loss(output[:, :1], target * 0.01, F.softplus(output[:, 1:]) * 1e-3)


def rare(n: int) -> tuple[Tensor, Tensor]:
    """Return digits, nearly all of them labelled 0."""
    pixels, labels = flat(n)
    return pixels, torch.where(torch.rand(n) < 0.95, 0, labels)


# ---- inputs --------------------------------------------------------------------------------------


def unit_images(n: int) -> tuple[Tensor, Tensor]:
    """Return images from 0 to 1, half of their pixels black."""
    pixels, labels = some_digits(n)
    return pixels.view(-1, 1, 8, 8) / 16, labels


def one_hot(n: int) -> tuple[Tensor, Tensor]:
    """Return the middle pixels one-hot (n, 576), and labels."""
    ids, labels = words(n)
    return F.one_hot(ids, 18).flatten(1).float(), labels


def sparse(n: int) -> tuple[Tensor, Tensor]:
    """Return counts, 98 % of them zero."""
    _, labels = flat(n)
    return torch.poisson(torch.full((n, 500), 0.02)), labels


def padded(n: int) -> tuple[Tensor, Tensor]:
    """Return ids that end in padding of random length."""
    ids, labels = words(n)
    return ids * (torch.arange(32) < torch.randint(4, 33, (n, 1))), labels


def long_rows(n: int) -> tuple[Tensor, Tensor]:
    """Return sequences of 240 rows, and labels."""
    sequences, labels = rows(n)
    return sequences.repeat(1, 30, 1), labels


class PaddedAttention(nn.Module):
    """Attention that does not see padding: -inf in its scores on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(18, 32, padding_idx=0), nn.Linear(32, 10)
        self.attention = Attention(32, 4)

    def forward(self, ids: Tensor) -> Tensor:
        padding = (ids == 0)[:, None, None]
        self.attention.mask = lambda scores: scores.masked_fill(padding, -math.inf)
        x = self.embedding(ids)
        return self.head((x + self.attention(x)).mean(1))


# ---- what is usual, and could be taken for a fault -----------------------------------------------


def with_masks(s: Subject) -> None:
    """Hand over what tokenizers do: a mask of ones, types of zero."""
    ids = s.inputs["input_ids"]
    s.inputs["attention_mask"] = torch.ones_like(ids)
    s.inputs["token_type_ids"] = torch.zeros_like(ids)


class Policy(nn.Module):
    """A Gaussian policy whose spread does not depend on the state."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_std = MLP(64, 64, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(x)
        return mean, self.log_std.exp().expand_as(mean)


def advantage(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    policy = torch.distributions.Normal(*output)
    likelihood = policy.log_prob(torch.randn_like(output[0])).sum(1)
    return -(likelihood * (labels - 4.5) / 3).mean()


class ArcFace(nn.Module):
    """Cosines scaled by 30: the loss starts far above ln(classes) by design (Deng et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.centres = plain(64, 64, 32), nn.Parameter(torch.randn(10, 32))

    def forward(self, x: Tensor) -> Tensor:
        return 30 * F.normalize(self.trunk(x)) @ F.normalize(self.centres).T


def with_margin(cosines: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(cosines - 10 * F.one_hot(labels, 10), labels)


class Timed(nn.Module):
    """A denoiser that gets its step from 0 to 999 as a number, behind sinusoids."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.mlp = nn.Linear(32, 64), plain(128, 128, 64, activation=nn.SiLU)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        phase = step[:, None] * 10_000 ** (-torch.arange(16) / 16)
        return self.mlp(torch.cat([x, self.time(torch.cat([phase.sin(), phase.cos()], 1))], 1))


def noised(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return noised digits with their step, and the noise."""
    clean, _ = flat(n)
    step, noise = torch.randint(0, 1000, (n,)).float(), torch.randn_like(clean)
    kept = (1 - step / 1000)[:, None]
    return (kept.sqrt() * clean + (1 - kept).sqrt() * noise, step), noise


class Centres(nn.Module):
    """A loss with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(10, 10))

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        distance = F.mse_loss(output, self.centres[labels])
        return F.cross_entropy(output, labels) + 0.01 * distance


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return self.head(self.gru(x, state)[0][:, -1])
