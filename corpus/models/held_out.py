"""What the held-out cases alone are made of: read it only after the limits are fixed."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.models.small import GPT, MLP, patients, plain

TRANSFORMERS = [
    "distilbert",
    "electra",
    "qwen2",
    "phi",
    "deit",
    "mobilenet",
    "xlnet",
    "funnel",
    "gemma3",
    "deepseek",
]

TRANSFORMERS += ["gpt-oss", "jamba", "ast", "videomae", "regnet", "sam", "vilt"]


class Weighed(nn.Module):
    """Squeeze and excitation: channels weighed by sigmoids."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.squeeze = nn.Conv2d(1, 16, 3), nn.Linear(16, 4)
        self.excite, self.head = nn.Linear(4, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        weights = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3))))))
        return self.head((x * weights[:, :, None, None]).amax((2, 3)))


class Fourier(nn.Module):
    """Random Fourier features (Tancik et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 10 * torch.randn(2, 32))
        self.mlp = plain(64, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        phase = 2 * math.pi * x @ self.frequencies
        return self.mlp(torch.cat([phase.sin(), phase.cos()], 1))


class ZeroConv(nn.Module):
    """ControlNet-like: a trained part with a copy behind a convolution of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Conv2d(1, 8, 3, padding=1).requires_grad_(False)
        self.copy, self.zero = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.head = nn.Conv2d(8, 1, 1)
        nn.init.zeros_(self.zero.weight)
        nn.init.zeros_(self.zero.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.silu(self.trunk(x) + self.zero(self.copy(x))))


class Quantizer(nn.Module):
    """An autoencoder over a codebook, with the straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = plain(64, 32, 8), plain(8, 32, 64)
        self.codes = nn.Embedding(32, 8)
        nn.init.normal_(self.codes.weight, std=0.2)  # as the encoder's outputs: all are in use

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x)
        nearest = self.codes(torch.cdist(code, self.codes.weight).argmin(1))
        commitment = F.mse_loss(code, nearest.detach()) + F.mse_loss(nearest, code.detach())
        return self.decoder(code + (nearest - code).detach()), commitment


class SimSiam(nn.Module):
    """Each view predicts the other, whose gradient is stopped on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = plain(64, 64, 32), plain(32, 16, 32)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.encoder(a), self.encoder(b)
        left = F.cosine_similarity(self.predictor(a), b.detach()).mean()
        return -(left + F.cosine_similarity(self.predictor(b), a.detach()).mean()) / 2


class Flow(nn.Module):
    """An affine coupling, whose likelihood may be above one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain(5, 32, 10)
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=1)
        scale, shift = self.net(a).chunk(2, dim=1)
        made = torch.cat([a, b * scale.tanh().exp() + shift], 1)
        return (0.5 * made**2).sum(1).mean() - scale.tanh().sum(1).mean()


def natural_targets(n: int) -> tuple[Tensor, Tensor]:
    """Return standardised features, and the progression in its own unit."""
    features, target = patients(n)
    return features, 152 + 77 * target


def skewed(n: int) -> tuple[Tensor, Tensor]:
    """Return features as of money: positive, with a long tail."""
    features, target = patients(n)
    return features.exp().clamp(max=50), target


class Highway(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.constant_(self.gate.bias, -3.0)

    def forward(self, x: Tensor) -> Tensor:
        open_ = torch.sigmoid(self.gate(x))
        return open_ * F.relu(self.layer(x)) + (1 - open_) * x


class Glu(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.glu(self.up(self.norm(x))))


# ---- controls: what is usual, and could be taken for a fault -------------------------------------


class Distilled(nn.Module):
    """A student beside its frozen teacher, both in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = MLP(), MLP().requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher(x)


def distillation(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    student, teacher = ((part / 4).log_softmax(1) for part in output)
    return F.kl_div(student, teacher, log_target=True, reduction="batchmean")


def focal(output: Tensor, labels: Tensor) -> Tensor:
    likelihood = output.log_softmax(1).gather(1, labels[:, None])
    return -((1 - likelihood.exp()) ** 2 * likelihood).mean()


class Prompted(nn.Module):
    """A frozen transformer behind a prompt that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = GPT().requires_grad_(False)
        self.prompt = nn.Parameter(0.02 * torch.randn(4, 32))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.trunk.embedding(ids[:, :24])
        x = torch.cat([self.prompt.expand(len(x), -1, -1), x], 1)
        for block in self.trunk.blocks:
            x = block(x)
        return self.trunk.head(self.trunk.norm(x))[:, 4:]


class Gumbel(nn.Module):
    """A choice made hard forwards and soft backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.choose, self.codes = plain(64, 64, 16), nn.Linear(16, 32, bias=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.codes(F.gumbel_softmax(self.choose(x), hard=True)))
