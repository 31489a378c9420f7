"""Healthy nets that see, hear, draw and simulate, on digits, tones and equations.

As in `corpus.models.small`, a step that practitioners get wrong is an attribute.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.models.small import plain, same, some_digits
from corpus.subject import Subject, subject
from corpus.variants import after_training

# ---- data ----------------------------------------------------------------------------------------


def grey(n: int) -> tuple[Tensor, Tensor]:
    """Return digits from 0 to 1 as images (n, 1, 16, 16), and labels."""
    pixels, labels = some_digits(n)
    return F.interpolate(pixels.view(-1, 1, 8, 8) / 16, scale_factor=2, mode="bilinear"), labels


def colours(n: int) -> tuple[Tensor, Tensor]:
    """Return noisy digits in colour, standardised (n, 3, 16, 16), and labels."""
    ink, labels = grey(n)
    tint = 0.5 + torch.rand(n, 3, 1, 1)
    return (ink * tint - 0.3) / 0.4 + 0.1 * torch.randn(n, 3, 16, 16), labels


def scenes(n: int) -> tuple[Tensor, Tensor]:
    """Return images in colour, and for each pixel its class of 4, or 255 on the border."""
    ink, labels = grey(n)
    kinds = torch.where(ink[:, 0] > 0.3, labels[:, None, None] % 3 + 1, 0)
    kinds[:, 0] = kinds[:, -1] = 255
    return (ink - 0.3) / 0.4 + 0.1 * torch.randn(n, 3, 16, 16), kinds


def depths(n: int) -> tuple[Tensor, Tensor]:
    """Return images in colour and positive depths (n, 1, 16, 16)."""
    ink, _ = grey(n)
    return (ink - 0.3) / 0.4 + 0.1 * torch.randn(n, 3, 16, 16), 2.0 - ink


def placed(n: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return images; for cells of an 8 x 8 grid the class of 3, a mask of objects, and boxes."""
    images, labels = colours(n)
    mask = torch.zeros(n, 8, 8)
    mask[torch.arange(n), 3 + labels % 2, 4] = 1.0
    classes = (
        F.one_hot(labels % 3, 3).permute(1, 0)[..., None, None].permute(1, 0, 2, 3) * mask[:, None]
    )
    boxes = 1.0 + torch.rand(n, 4, 8, 8)
    return images, (classes, mask, boxes)


def signed(n: int) -> tuple[Tensor, Tensor]:
    """Return images from -1 to 1, and themselves."""
    ink, _ = grey(n)
    return 2 * ink - 1, 2 * ink - 1


def latents(n: int) -> tuple[Tensor, None]:
    return torch.randn(n, 16), None


def pairs_of_views(n: int) -> tuple[tuple[Tensor, Tensor], None]:
    images, _ = colours(n)
    return (images + 0.1 * torch.randn_like(images), images.roll(1, -1)), None


def noised(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return noised images with their time, and the noise."""
    clean, _ = signed(n)
    time, noise = torch.rand(n), torch.randn_like(clean)
    level = time[:, None, None, None]
    return (((1 - level).sqrt() * clean + level.sqrt() * noise), time), noise


def tones(n: int) -> tuple[Tensor, Tensor]:
    """Return tones of 8 pitches (n, 512) with some noise, from -1 to 1, and the pitch."""
    pitch = torch.randint(0, 8, (n,))
    time = torch.arange(512) / 512
    wave = torch.sin(2 * math.pi * (10 + 12 * pitch[:, None]) * time + 6 * torch.rand(n, 1))
    return 0.5 * wave + 0.02 * torch.randn(n, 512), pitch


def spoken(n: int) -> tuple[Tensor, Tensor]:
    """Return frames (n, 32, 16) in which four symbols of 1 to 6 follow each other, and those."""
    symbols = torch.randint(1, 7, (n, 4))
    frames = F.one_hot(symbols.repeat_interleave(8, 1), 16).float()
    return frames + 0.3 * torch.randn_like(frames), symbols


def small_and_large(n: int) -> tuple[Tensor, Tensor]:
    """Return images (n, 1, 8, 8) and the same ones of twice the size, from 0 to 1."""
    large, _ = grey(n)
    return F.avg_pool2d(large, 2), large


def joints(n: int) -> tuple[Tensor, Tensor]:
    """Return images and two points in each, from 0 to 1 (n, 2, 2)."""
    images, _ = colours(n)
    ink = F.relu(images.mean(1))
    place = torch.linspace(0, 1, 16)
    mass = ink.sum((1, 2)) + 1e-3
    middle = torch.stack([(ink.sum(2) * place).sum(1), (ink.sum(1) * place).sum(1)], 1)
    middle = (middle / mass[:, None]).clamp(0, 1)
    return images, torch.stack([middle, middle.flip(1)], 1)


def moved(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return two frames, and by how many pixels each point of the first moved (n, 2, 16, 16)."""
    first, _ = signed(n)
    return (first, first.roll(1, -1)), torch.tensor([1.0, 0.0]).view(1, 2, 1, 1).expand(
        n, 2, 16, 16
    )


def rays(n: int) -> tuple[Tensor, Tensor]:
    """Return points along rays (n, 12, 3) from -1 to 1, and colours (n, 3)."""
    origin, towards = torch.rand(n, 1, 3) - 0.5, F.normalize(torch.randn(n, 1, 3), dim=-1)
    points = origin + towards * torch.linspace(0, 0.8, 12)[:, None]
    return points, 0.5 + 0.4 * torch.sin(4 * origin[:, 0])


def collocation(n: int) -> tuple[Tensor, None]:
    return 2 * torch.rand(n, 1) - 1, None


# ---- classifiers ---------------------------------------------------------------------------------


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, norm, two linear layers, a scale that starts at 1e-6."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.expand = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.activation, self.shrink = nn.GELU(), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.shrink(self.activation(self.expand(y))) * self.scale
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Liu et al. 2022."""

    def __init__(self, width: int = 24, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, stride=2)
        self.blocks = nn.ModuleList(ConvNeXtBlock(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean((2, 3))))


def convnext() -> Subject:
    return subject(ConvNeXt(), colours, F.cross_entropy, batch=32)


class MBConv(nn.Module):
    """Expand, filter each channel, weigh the channels, shrink (Tan and Le 2019)."""

    def __init__(self, width: int, drop: float = 0.1) -> None:
        super().__init__()
        wide = 3 * width
        self.expand, self.bn1 = nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.filter = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        self.bn2, self.squeeze, self.excite = (
            nn.BatchNorm2d(wide),
            nn.Linear(wide, 8),
            nn.Linear(8, wide),
        )
        self.shrink, self.bn3 = nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.bn1(self.expand(x)))
        y = F.silu(self.bn2(self.filter(y)))
        gate = torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3))))))
        y = self.bn3(self.shrink(y * gate[..., None, None]))
        if self.training:
            keep = 1 - self.drop
            y = y * (torch.rand(len(x), 1, 1, 1) < keep) / keep
        return x + y


class EfficientNet(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3, drop: float = 0.1) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(MBConv(width, drop) for _ in range(depth)))
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.silu(self.bn(self.stem(x))))
        return self.head(self.dropout(x.mean((2, 3))))


def efficientnet() -> Subject:
    return subject(EfficientNet(), colours, F.cross_entropy, batch=32)


class WindowAttention(nn.Module):
    """Attention within 4 x 4 windows, with a learnt bias for each offset."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(0.02 * torch.randn(49, heads))
        at = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        offset = at[:, :, None] - at[:, None, :] + 3
        self.register_buffer("index", offset[0] * 7 + offset[1])
        self.heads, self.look_up = heads, lambda table, index: table[index]

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        scores = scores + self.look_up(self.table, self.index).permute(2, 0, 1)
        if mask is not None:
            scores = (scores.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
        return self.project((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class SwinBlock(nn.Module):
    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), WindowAttention(width)
        self.norm2, self.mlp = (
            nn.LayerNorm(width),
            plain(width, 4 * width, width, activation=nn.GELU),
        )
        region = torch.zeros(8, 8)
        region[-4 : -shift or None] += 1
        region[:, -4 : -shift or None] += 2
        if shift:
            region[-shift:] += 4
            region[:, -shift:] += 8
        cut = self._windows(region[None, ..., None])[..., 0]
        mask = -100.0 * (cut[:, None] != cut[:, :, None]) if shift else None
        self.register_buffer("mask", mask)
        self.shift = shift

    @staticmethod
    def _windows(x: Tensor) -> Tensor:
        n, _, _, width = x.shape
        return x.view(n, 2, 4, 2, 4, width).transpose(2, 3).reshape(n * 4, 16, width)

    def forward(self, x: Tensor) -> Tensor:
        n, _, _, width = x.shape
        y = self.norm1(x).roll((-self.shift, -self.shift), (1, 2))
        y = self.attention(self._windows(y), self.mask)
        y = y.view(n, 2, 2, 4, 4, width).transpose(2, 3).reshape(n, 8, 8, width)
        x = x + y.roll((self.shift, self.shift), (1, 2))
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    """Liu et al. 2021."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, stride=2)
        self.blocks = nn.Sequential(SwinBlock(width, 0), SwinBlock(width, 2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patches(x).permute(0, 2, 3, 1))
        return self.head(self.norm(x).mean((1, 2)))


def swin() -> Subject:
    return subject(Swin(), colours, F.cross_entropy, batch=16)


# ---- dense predictions ---------------------------------------------------------------------------


def conv_bn(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class Pyramid(nn.Module):
    """A feature pyramid (Lin et al. 2017) with a class for each pixel."""

    def __init__(self, width: int = 16, classes: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv_bn(3, 16), conv_bn(16, 24, 2), conv_bn(24, 32, 2)])
        self.lateral: Any = nn.ModuleList(nn.Conv2d(c, width, 1) for c in (16, 24, 32))
        self.smooth, self.out = conv_bn(width, width), nn.Conv2d(width, classes, 1)
        self.finish: Callable[[Tensor], Tensor] = same

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for down in self.down:
            x = down(x)
            levels.append(x)
        x = self.lateral[2](levels[2])
        for level in (1, 0):
            x = F.interpolate(x, scale_factor=2.0) + self.lateral[level](levels[level])
        return self.finish(self.out(self.smooth(x)))


def void(logits: Tensor, kinds: Tensor) -> Tensor:
    return F.cross_entropy(logits, kinds, ignore_index=255)


def segmenter() -> Subject:
    return subject(Pyramid(), scenes, void, batch=16)


def depth_net() -> Subject:
    made = subject(Pyramid(classes=1), depths, F.l1_loss, batch=16)
    made.model.finish = F.softplus
    return made


class Detector(nn.Module):
    """Classes and distances to the sides of a box for each cell (Tian et al. 2019)."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 2, 1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
        )
        self.classes, self.boxes = self._tower(width, 3), self._tower(width, 4)
        nn.init.constant_(self.classes[-1].bias, -math.log(99))
        self.finish, self.to_sides = same, torch.exp

    @staticmethod
    def _tower(width: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 3, padding=1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.backbone(x)
        return self.finish(self.classes(x)), self.to_sides(self.boxes(x))


Found = tuple[Tensor, Tensor]

Objects = tuple[Tensor, Tensor, Tensor]


def focal(output: Found, target: Objects) -> Tensor:
    """Lin et al. 2017, over the number of objects."""
    logits, (classes, mask, _) = output[0], target
    chance = logits.sigmoid()
    right = torch.where(classes > 0, chance, 1 - chance)
    weight = torch.where(classes > 0, 0.25, 0.75) * (1 - right) ** 2
    loss = F.binary_cross_entropy_with_logits(logits, classes, reduction="none")
    return (weight * loss).sum() / mask.sum().clamp(min=1)


def overlap(made: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return intersection and union of boxes given by distances to left, top, right, bottom."""
    least = torch.minimum(made, boxes)
    inside = (least[:, 0] + least[:, 2]) * (least[:, 1] + least[:, 3])
    areas = [(b[:, 0] + b[:, 2]) * (b[:, 1] + b[:, 3]) for b in (made, boxes)]
    return inside, sum(areas) - inside


def box_loss(output: Found, target: Objects) -> Tensor:
    _, mask, boxes = target
    inside, union = overlap(output[1], boxes)
    return (-((inside + 1) / (union + 1)).log() * mask).sum() / mask.sum().clamp(min=1)


def detection_loss(output: Found, target: Objects) -> Tensor:
    return focal(output, target) + box_loss(output, target)


def detector() -> Subject:
    return subject(Detector(), placed, detection_loss, batch=16)


def detector_of_two_losses() -> Subject:
    return subject(Detector(), placed, {"class": focal, "box": box_loss}, batch=16)


class Keypoints(nn.Module):
    """A heatmap for each of two points, whose mean place is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(conv_bn(3, 16), conv_bn(16, 16))
        self.heat = nn.Conv2d(16, 2, 1)
        self.to_points: Callable[[Tensor], Tensor] = soft_argmax

    def forward(self, x: Tensor) -> Tensor:
        return self.to_points(self.heat(self.trunk(x)))


def soft_argmax(heat: Tensor) -> Tensor:
    weights = heat.flatten(2).softmax(-1).view_as(heat)
    place = torch.linspace(0, 1, heat.shape[-1])
    return torch.stack([(weights.sum(3) * place).sum(2), (weights.sum(2) * place).sum(2)], -1)


def keypoints() -> Subject:
    return subject(Keypoints(), joints, F.smooth_l1_loss, batch=32)


class SuperResolution(nn.Module):
    """Residual blocks without norms, then a pixel shuffle (Lim et al. 2017)."""

    def __init__(self, width: int = 16, depth: int = 6) -> None:
        super().__init__()
        self.shift = 0.3
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
            )
            for _ in range(depth)
        )
        self.scale = 0.1
        self.last = nn.Conv2d(width, 4, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)
        self.finish: Callable[[Tensor], Tensor] = same

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.first(x - self.shift)
        for block in self.blocks:
            x = x + self.scale * block(x)
        return self.finish(self.shuffle(self.last(x + first)) + self.shift)


def super_resolution() -> Subject:
    return subject(SuperResolution(), small_and_large, F.l1_loss, batch=32)


class OpticalFlow(nn.Module):
    """A first guess from both frames, then a correction from the second one moved back by it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )
        self.guess = nn.Conv2d(2 * width, 2, 3, padding=1)
        self.refine = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 2, 3, padding=1)
        )
        self.to_grid: Callable[[Tensor], Tensor] = lambda place: place / 7.5 - 1

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        a, b = self.features(first), self.features(second)
        flow = self.guess(torch.cat([a, b], 1))
        line = torch.arange(16.0)
        place = torch.stack(torch.meshgrid(line, line, indexing="xy")) + flow
        back = F.grid_sample(b, self.to_grid(place).permute(0, 2, 3, 1), align_corners=True)
        return flow + self.refine(back)


def endpoint(flow: Tensor, target: Tensor) -> Tensor:
    return (((flow - target) ** 2).sum(1) + 1e-6).sqrt().mean()


def optical_flow() -> Subject:
    return subject(OpticalFlow(), moved, endpoint, batch=16)


# ---- nets that make images -----------------------------------------------------------------------


class ConvVAE(nn.Module):
    def __init__(self, latent: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.mean, self.log_variance = nn.Linear(512, latent), nn.Linear(512, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, 512),
            nn.ReLU(),
            nn.Unflatten(1, (32, 4, 4)),
            nn.ConvTranspose2d(32, 16, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, 2, 1),
        )
        self.sample: Callable[[Tensor, Tensor], Tensor] = lambda mean, deviation: (
            mean + deviation * torch.randn_like(mean)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        return self.decoder(self.sample(mean, (log_variance / 2).exp())), mean, log_variance


def bernoulli_bound(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    """Sum over pixels, mean over samples."""
    made, mean, log_variance = output
    divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1)
    wrong = F.binary_cross_entropy_with_logits(made, target, reduction="none").sum((1, 2, 3))
    return (wrong + divergence).mean()


def unit(n: int) -> tuple[Tensor, Tensor]:
    ink, _ = grey(n)
    return ink, ink.clone()


def conv_vae() -> Subject:
    return subject(ConvVAE(), unit, bernoulli_bound, batch=32)


class Generator(nn.Module):
    """Radford et al. 2016."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.bn1 = nn.Linear(16, 32 * 16), nn.BatchNorm2d(32)
        self.up, self.bn2 = nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.BatchNorm2d(16)
        self.out = nn.ConvTranspose2d(16, 1, 4, 2, 1)
        self.prepare: Callable[[Tensor], Tensor] = same

    def forward(self, z: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.start(self.prepare(z)).view(-1, 32, 4, 4)))
        return torch.tanh(self.out(F.relu(self.bn2(self.up(x)))))


def critic(activation: Callable[[], nn.Module] = lambda: nn.LeakyReLU(0.2)) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1),
        activation(),
        nn.Conv2d(16, 32, 4, 2, 1),
        nn.BatchNorm2d(32),
        activation(),
        nn.Flatten(),
        nn.Linear(512, 1),
    )


def dcgan_weights(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(module.weight, std=0.02)
    return model


class GeneratorStep(nn.Module):
    """What the critic says of made images."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = Generator(), critic()
        self.between: Callable[[Tensor], Tensor] = same
        dcgan_weights(self)

    def forward(self, z: Tensor) -> Tensor:
        return self.critic(self.between(self.generator(z)))


def as_real(scores: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))


def generator_step() -> Subject:
    return subject(GeneratorStep(), latents, as_real, batch=32)


def real_and_made(n: int) -> tuple[Tensor, Tensor]:
    real, _ = signed(n // 2)
    made = torch.tanh(0.3 * torch.randn(n - n // 2, 1, 16, 16))
    truth = torch.cat([torch.ones(n // 2, 1), torch.zeros(n - n // 2, 1)])
    return torch.cat([real, made]), truth


def critic_step() -> Subject:
    model = dcgan_weights(critic())
    return subject(model, real_and_made, F.binary_cross_entropy_with_logits, batch=32)


class Denoiser(nn.Module):
    """A small U-Net that knows the time (Ho et al. 2020); its last convolution starts at zero."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = plain(8, width, 2 * width, activation=nn.SiLU)
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down, self.norm1 = nn.Conv2d(width, 2 * width, 3, 2, 1), nn.GroupNorm(8, 2 * width)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, 2 * width)
        self.up, self.norm3 = nn.ConvTranspose2d(2 * width, width, 2, 2), nn.GroupNorm(8, 2 * width)
        self.out = nn.Conv2d(2 * width, 1, 3, padding=1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.told: Callable[[Tensor], Tensor] = same

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        phase = time[:, None] * 2.0 ** torch.arange(4)
        when = self.told(self.time(torch.cat([phase.sin(), phase.cos()], 1)))[..., None, None]
        first = self.first(x)
        x = F.silu(self.norm1(self.down(first)) + when)
        x = x + F.silu(self.norm2(self.middle(x)))
        x = torch.cat([self.up(x), first], 1)
        return self.out(F.silu(self.norm3(x)))


def denoiser() -> Subject:
    return subject(Denoiser(), noised, F.mse_loss, batch=16)


class GlowStep(nn.Module):
    """Scale and shift, a mixing matrix, an affine coupling (Kingma and Dhariwal 2018)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.log_scale, self.shift = (
            nn.Parameter(torch.zeros(width)),
            nn.Parameter(torch.zeros(width)),
        )
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(width, width))[0])
        self.net = plain(width // 2, 32, width)
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)
        self.volume: Callable[[Tensor], Tensor] = lambda mix: torch.linalg.slogdet(mix)[1]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = (x + self.shift) * self.log_scale.exp() @ self.mix
        kept, moved = x.chunk(2, 1)
        scale, shift = self.net(kept).chunk(2, 1)
        scale = torch.tanh(scale)
        gain = self.log_scale.sum() + self.volume(self.mix) + scale.sum(1)
        return torch.cat([kept, moved * scale.exp() + shift], 1), gain


class Glow(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.steps = nn.ModuleList(GlowStep(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        gains = 0.0
        for step in self.steps:
            x, gain = step(x)
            gains = gains + gain
        return (0.5 * (x**2 + math.log(2 * math.pi)).sum(1) - gains).mean()


def patches(n: int) -> tuple[Tensor, None]:
    ink, _ = grey(n)
    return ink[:, 0, 6:10, 6:10].flatten(1) - 0.5 + 0.05 * torch.randn(n, 16), None


def glow() -> Subject:
    return subject(Glow(), patches, None)


# ---- physics -------------------------------------------------------------------------------------


def slope(u: Tensor, x: Tensor, create_graph: bool = True) -> Tensor:
    return torch.autograd.grad(u.sum(), x, create_graph=create_graph, retain_graph=True)[0]


class Equation(nn.Module):
    """The residual of u'(x) = cos(3 x) along a net u, and its value at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.slope = plain(1, 32, 32, 1, activation=nn.Tanh), slope

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            residual = self.slope(self.net(x), x) - torch.cos(3 * x)
        return (residual**2).mean()


def equation() -> Subject:
    return subject(Equation(), collocation, None)


class Solution(nn.Module):
    """A net of place and time, fitted to measurements."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain(2, 32, 32, 1, activation=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def measured(n: int) -> tuple[Tensor, Tensor]:
    where = 2 * torch.rand(n, 2) - 1
    return where, torch.sin(3 * where[:, :1]) * where[:, 1:]


def solution() -> Subject:
    return subject(Solution(), measured, F.mse_loss)


class NeRF(nn.Module):
    """Density and colour of points, added up along rays (Mildenhall et al. 2020)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(27, width), nn.Linear(width, width)
        self.fc3 = nn.Linear(width + 27, width)
        self.density, self.colour = nn.Linear(width, 1), nn.Linear(width, 3)
        self.to_density: Callable[[Tensor], Tensor] = F.softplus
        self.through: Callable[[Tensor], Tensor] = lambda alpha: torch.cumprod(1 - alpha + 1e-10, 1)

    def forward(self, points: Tensor) -> Tensor:
        phase = (points[..., None] * 2.0 ** torch.arange(4)).flatten(2)
        seen = torch.cat([points, phase.sin(), phase.cos()], -1)
        x = F.relu(self.fc2(F.relu(self.fc1(seen))))
        x = F.relu(self.fc3(torch.cat([x, seen], -1)))
        density, colour = self.to_density(self.density(x))[..., 0], self.colour(x).sigmoid()
        gaps = torch.full((points.shape[1],), 0.07)
        gaps[-1] = 1e10
        alpha = 1 - torch.exp(-density * gaps)
        left = torch.cat([torch.ones(len(points), 1), self.through(alpha)[:, :-1]], 1)
        return ((alpha * left)[..., None] * colour).sum(1)


def nerf() -> Subject:
    return subject(NeRF(), rays, F.mse_loss)


# ---- without labels ------------------------------------------------------------------------------


def small_encoder(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=bias),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1, bias=bias),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 32, bias=bias),
    )


class SimCLR(nn.Module):
    """Chen et al. 2020: each view finds the other one among all views but itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = small_encoder(bias=False)
        self.project = nn.Sequential(
            nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 16, bias=False)
        )
        self.unit: Callable[[Tensor], Tensor] = lambda x: F.normalize(x, dim=1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        z = self.unit(self.project(self.encoder(torch.cat([a, b]))))
        return (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -math.inf)


def next_view(scores: Tensor) -> Tensor:
    return F.cross_entropy(scores, torch.arange(len(scores)).roll(len(scores) // 2))


def simclr() -> Subject:
    return subject(SimCLR(), pairs_of_views, next_view, batch=32)


class BYOL(nn.Module):
    """Grill et al. 2020: predict what a slow copy makes of the other view."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = small_encoder(), plain(32, 32, 32)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        made = self.predictor(self.online(a))
        with torch.no_grad():
            wanted = self.target(b)
        return 2 - 2 * F.cosine_similarity(made, wanted).mean()


def byol() -> Subject:
    return subject(BYOL(), pairs_of_views, None, batch=32)


class CLIP(nn.Module):
    """Images and words in one space (Radford et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.words = small_encoder(), nn.Embedding(10, 32)
        self.to_space = nn.Linear(32, 32, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.read: Callable[[Tensor], Any] = lambda log_scale: log_scale.exp()

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        a = F.normalize(self.image(images), dim=1)
        b = F.normalize(self.to_space(self.words(labels)), dim=1)
        return self.read(self.log_scale) * a @ b.T


def captioned(n: int) -> tuple[tuple[Tensor, Tensor], None]:
    return colours(n), None


def both_ways(scores: Tensor) -> Tensor:
    truth = torch.arange(len(scores))
    return (F.cross_entropy(scores, truth) + F.cross_entropy(scores.T, truth)) / 2


def clip() -> Subject:
    return subject(CLIP(), captioned, both_ways, batch=16)


class ArcFace(nn.Module):
    """Cosines to class centres with a margin, times 16 (Deng et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.centres = small_encoder(), nn.Parameter(torch.randn(10, 32))
        self.unit: Callable[[Tensor], Tensor] = lambda x: F.normalize(x, dim=1)
        self.scale = 16.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.unit(self.encoder(x)) @ self.unit(self.centres).T


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits - 3.2 * F.one_hot(labels, 10), labels)


def arcface() -> Subject:
    return subject(ArcFace(), colours, margin, batch=32)


# ---- sound ---------------------------------------------------------------------------------------


class Recogniser(nn.Module):
    """Convolutions that halve the time, a recurrent layer, log-probabilities for CTC."""

    def __init__(self, symbols: int = 7) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv1d(16, 32, 3, 2, 1), nn.BatchNorm1d(32)
        self.gru = nn.GRU(32, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, symbols)
        self.finish: Callable[[Tensor], Tensor] = lambda x: x.log_softmax(-1)

    def forward(self, frames: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(frames.transpose(1, 2)))).transpose(1, 2)
        return self.finish(self.head(self.gru(x)[0]))


def connectionist(scores: Tensor, symbols: Tensor) -> Tensor:
    n, steps, _ = scores.shape
    return F.ctc_loss(
        scores.transpose(0, 1), symbols, torch.full((n,), steps), torch.full((n,), symbols.shape[1])
    )


def recogniser() -> Subject:
    return subject(Recogniser(), spoken, connectionist, batch=32)


class SoundCNN(nn.Module):
    """Log power over frequency and time, then convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(64))
        self.conv1, self.bn1 = nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32)
        self.head = nn.Linear(32, 8)
        self.loudness: Callable[[Tensor], Tensor] = lambda power: (power + 1e-6).log()

    def forward(self, wave: Tensor) -> Tensor:
        spectrum = torch.stft(wave, 64, 32, window=self.window, return_complex=True)
        x = self.loudness(spectrum.abs() ** 2)[:, None]
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


def sound_cnn() -> Subject:
    return subject(SoundCNN(), tones, F.cross_entropy, batch=32)


class WaveNet(nn.Module):
    """Gated dilated convolutions with residuals and skips (van den Oord et al. 2016)."""

    def __init__(self, width: int = 16, depth: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.gated = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, dilation=2 ** (i % 6)) for i in range(depth)
        )
        self.residual = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))
        self.skip = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))
        self.mix, self.head = nn.Conv1d(width, width, 1), nn.Linear(width, 8)
        self.join: Callable[[Tensor, Tensor], Tensor] = torch.add
        self.skips: Callable[[list[Tensor]], Tensor] = lambda all_: torch.stack(all_).sum(0)

    def forward(self, wave: Tensor) -> Tensor:
        x, skips = self.first(wave[:, None]), []
        for gated, residual, skip in zip(self.gated, self.residual, self.skip, strict=True):
            a, b = gated(F.pad(x, (gated.dilation[0], 0))).chunk(2, 1)
            y = a.tanh() * b.sigmoid()
            skips.append(skip(y))
            x = self.join(x, residual(y))
        return self.head(F.relu(self.mix(F.relu(self.skips(skips)))).mean(2))


def wavenet() -> Subject:
    return subject(WaveNet(), tones, F.cross_entropy, batch=16)


# ---- few bits ------------------------------------------------------------------------------------


def straight_round(x: Tensor) -> Tensor:
    return x + (x.round() - x).detach()


class Quantised(nn.Module):
    """A net whose weights are rounded to 4 bits as they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32)
        self.head, self.round = nn.Linear(32, 10), straight_round

    def few_bits(self, weight: Tensor) -> Tensor:
        step = weight.detach().abs().max() / 7
        return self.round(weight / step) * step

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in ((self.conv1, self.bn1), (self.conv2, self.bn2)):
            x = F.conv2d(x, self.few_bits(conv.weight), conv.bias, 2, 1)
            x = F.relu(norm(x))
        return self.head(x.mean((2, 3)))


def quantised() -> Subject:
    return subject(Quantised(), colours, F.cross_entropy, batch=32)


class Spike(torch.autograd.Function):
    """A step whose gradient is that of a fast sigmoid."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v > 0).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (v,) = ctx.saved_tensors
        return grad / (1 + 5 * v.abs()) ** 2


class Spiking(nn.Module):
    """Leaky neurons over 8 steps; the output adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(256, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.spike, self.threshold = Spike.apply, 0.5
        nn.init.kaiming_normal_(self.fc1.weight)
        nn.init.kaiming_normal_(self.fc2.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        v1 = v2 = x.new_zeros(len(x), 64)
        out = 0.0
        for _ in range(8):
            v1 = 0.9 * v1 + self.fc1(x)
            s1 = self.spike(v1 - self.threshold)
            v1 = v1 - s1.detach() * self.threshold
            v2 = 0.9 * v2 + self.fc2(s1)
            s2 = self.spike(v2 - self.threshold)
            v2 = v2 - s2.detach() * self.threshold
            out = out + self.head(s2) / 8
        return out


def spiking() -> Subject:
    return subject(Spiking(), grey, F.cross_entropy, batch=32)


# ---- classifiers ---------------------------------------------------------------------------------


def shallow_training(healthy: Any) -> Any:
    """Return the subject after a few steps."""
    return after_training(healthy, steps=20)


def unmoved() -> Subject:
    """An EfficientNet in evaluation whose norms were trained with momentum 0."""
    return subject(EfficientNet(), colours, F.cross_entropy, batch=32)


# ---- images made ---------------------------------------------------------------------------------


class Bottlenecked(Denoiser):
    """Down to a single pixel, where a norm has a channel for each group."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Conv2d(32, 32, 8)
        self.deep_norm = nn.GroupNorm(8, 32)
        nn.init.normal_(self.out.weight, std=0.1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        when = self.time(torch.cat([time[:, None] * 2.0**k for k in range(8)], 1).sin())
        first = self.first(x)
        x = F.silu(self.norm1(self.down(first)) + when[..., None, None])
        x = x + F.silu(self.deep_norm(self.deep(x)))
        x = x + F.silu(self.norm2(self.middle(x)))
        return self.out(F.silu(self.norm3(torch.cat([self.up(x), first], 1))))


def bottleneck() -> Subject:
    return subject(Bottlenecked(), noised, F.mse_loss, batch=16)


def late_denoiser() -> Subject:
    made = denoiser()
    nn.init.normal_(made.model.out.weight, std=0.1)
    return made


# ---- sound ---------------------------------------------------------------------------------------


def deep_wavenet() -> Subject:
    return subject(WaveNet(depth=20), tones, F.cross_entropy, batch=4)


# ---- points and resolution -----------------------------------------------------------------------


def deep_super_resolution() -> Subject:
    return subject(SuperResolution(depth=32), small_and_large, F.l1_loss, batch=8)


# ---- half precision ------------------------------------------------------------------------------


class HandNorm(nn.Module):
    """Divides by the root of the mean of squares (Zhang and Sennrich 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return (
            x * torch.rsqrt((x.float() ** 2).mean(-1, keepdim=True) + 1e-6).type_as(x) * self.weight
        )


def half_precision() -> Subject:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(768, 64), HandNorm(64), nn.GELU(), nn.Linear(64, 10)
    ).half()
    nn.init.normal_(model[1].weight, std=0.05)
    made = subject(model, colours, lambda out, y: F.cross_entropy(out.float(), y))
    made.inputs = made.inputs.half()
    return made


class Painted(nn.Module):
    """Makes an image from a map of classes as one-hot channels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(conv_bn(6, 16), conv_bn(16, 16), nn.Conv2d(16, 3, 1))

    def forward(self, kinds: Tensor) -> Tensor:
        return self.net(F.one_hot(kinds, 6).permute(0, 3, 1, 2).float()).tanh()


def maps(n: int) -> tuple[Tensor, Tensor]:
    images, kinds = scenes(n)
    return kinds.where(kinds < 4, 0), (images / 3).clamp(-1, 1)


class Masked(nn.Module):
    """Reads a quarter of the patches and draws the others (He et al. 2022)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(48, width), nn.Parameter(0.02 * torch.randn(16, width))
        layer = {"d_model": width, "nhead": 4, "dim_feedforward": 64, "batch_first": True}
        self.encoder = nn.TransformerEncoderLayer(**layer, norm_first=True)
        self.decoder = nn.TransformerEncoderLayer(**layer, norm_first=True)
        self.token, self.head = nn.Parameter(torch.zeros(1, 1, width)), nn.Linear(width, 48)

    def forward(self, x: Tensor) -> Tensor:
        patches = (
            x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(len(x), 16, 48)
        )
        seen = torch.rand(len(x), 16).argsort(1)[:, :4, None]
        tokens = self.embed(patches) + self.place
        memory = self.encoder(tokens.gather(1, seen.expand(-1, -1, 32)))
        full = (self.token + self.place).expand(len(x), -1, -1)
        made = self.head(self.decoder(full.scatter(1, seen.expand(-1, -1, 32), memory)))
        missing = torch.ones(len(x), 16, 1).scatter(1, seen, 0.0)
        return (((made - patches) ** 2) * missing).mean()


class Reverse(torch.autograd.Function):
    """Turns the gradient round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Domains(nn.Module):
    """Features that tell classes but not domains (Ganin et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.label, self.domain = (
            small_encoder(),
            nn.Linear(32, 10),
            plain(32, 32, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.encoder(x))
        return self.label(x), self.domain(Reverse.apply(x))


def of_domains(n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    images, labels = colours(n)
    return images, (labels, (torch.arange(n)[:, None] % 2).float())


def hinge(scores: Tensor, truth: Tensor) -> Tensor:
    return F.relu(1 - scores * (2 * truth - 1)).mean()


def smooth_critic() -> nn.Module:
    model = critic()
    for module in model:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.utils.parametrizations.spectral_norm(module)
    return model


class Queries(nn.Module):
    """Learnt queries over an image; each may have found nothing (Carion et al. 2020)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches, self.place = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.randn(16, width))
        self.query = nn.Embedding(10, width)
        self.decoder = nn.TransformerDecoderLayer(width, 4, 64, batch_first=True)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.patches(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.decoder(self.query.weight.expand(len(x), -1, -1), memory))


def one_found(logits: Tensor, labels: Tensor) -> Tensor:
    """The query nearest to the label answers for it; all others say "nothing", weighted 0.1."""
    truth = torch.full(logits.shape[:2], 3)
    nearest = logits.detach().softmax(-1)[torch.arange(len(labels)), :, labels % 3].argmax(1)
    truth[torch.arange(len(labels)), nearest] = labels % 3
    return F.cross_entropy(
        logits.flatten(0, 1), truth.flatten(), torch.tensor([1.0, 1.0, 1.0, 0.1])
    )


class Operator(nn.Module):
    """Filters in frequency space with complex weights (Li et al. 2021)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv1d(1, width, 1), plain(width, 32, 1, activation=nn.GELU)
        self.weights = nn.ParameterList(
            torch.randn(width, width, 12, dtype=torch.cfloat) / width for _ in range(2)
        )
        self.local = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x[:, None])
        for weight, local in zip(self.weights, self.local, strict=True):
            low = torch.einsum("bif,iof->bof", torch.fft.rfft(x)[..., :12], weight)
            x = F.gelu(torch.fft.irfft(low, n=x.shape[-1]) + local(x))
        return self.project(x.transpose(1, 2))[..., 0]


def smoothed(n: int) -> tuple[Tensor, Tensor]:
    waves, _ = tones(n)
    waves = waves[:, :64] * 2
    return waves, F.avg_pool1d(F.pad(waves[:, None], (2, 2), mode="circular"), 5, 1)[:, 0]


class Distilled(nn.Module):
    """A small net follows a large frozen one in evaluation; only the loss knows labels."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = (
            nn.Sequential(small_encoder(), nn.Linear(32, 10)).requires_grad_(False).eval()
        )
        self.student = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            soft = (self.teacher(x) / 4).softmax(1)
        made = self.student(x)
        wanted = F.kl_div((made / 4).log_softmax(1), soft, reduction="batchmean") * 16
        return 0.9 * wanted + 0.1 * F.cross_entropy(made, labels)
