"""Residuals, modes, norms and quantisers, as threads have them wrong; each with its fix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import Patches, SelfAttention, clouds, ffn
from corpus.models.small import flat, images, noisy, rows
from corpus.subject import Subject, subject

SHELF = Shelf("threads", "blind")
GITHUB = "https://github.com"

SKIP = ("residual", "skip", "shortcut")
SHARED = ("shared", "same module", "one module", "several", "times", "tied", "again", "reused")
MODE = ("evaluation", "eval(", "training mode", "running", "statistic")
RANDOM = ("random", "dropout", "chance", "repeat", "evaluation")
BACKWARD = ("backward", "gradient", "autograd", "derivative")


def conv(a: int, b: int, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(a, b, size, padding=size // 2)


# ---- residuals and activations -------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/ChristophReich1996/MaxViT/issues/8",
    "input times branch where their sum was meant",
    ("block*",),
    (*SKIP, "multipl", "product", "times"),
)
def maxvit(fixed: bool) -> Subject:
    """Output * mlp(norm(output)): a sign for a sum, and no way past the branch is left."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(32), nn.LayerNorm(32)
            self.attention, self.mlp = SelfAttention(), ffn(32)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norm_1(x))
            branch = self.mlp(self.norm_2(x))
            return x + branch if fixed else x * branch

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.block = Patches(), nn.Sequential(Block(), Block())
            self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.block(self.patches(x))).mean(1))

    return subject(Net(), images, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/kyegomez/BitNet/issues/32",
    "x + x in place of a residual",
    ("attentions*", "mlps*", ""),
    (*SKIP, "itself", "twice", "double"),
)
def bitnet(fixed: bool) -> Subject:
    """What attention returns is added to itself, and its input is gone."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(8, 32), nn.Linear(32, 10)
            self.attentions = nn.ModuleList(SelfAttention() for _ in range(3))
            self.mlps = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), ffn(32)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for attention, mlp in zip(self.attentions, self.mlps, strict=True):
                read = attention(x)
                x = x + read if fixed else read + read
                x = mlp(x) + x
            return self.head(x.mean(1))

    return subject(Net(), rows, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/unit8co/darts/issues/329",
    "one activation twice, and none after the second convolution",
    ("blocks*", ""),
    ("activation", "relu", "twice", "no effect", "idempot"),
)
def darts(fixed: bool) -> Subject:
    """ReLU stands before the second convolution, where its input has passed one."""

    class Block(nn.Module):
        def __init__(self, dilation: int) -> None:
            super().__init__()
            self.past = 2 * dilation
            self.conv1, self.conv2 = (nn.Conv1d(24, 24, 3, dilation=dilation) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.conv1(F.pad(x, (self.past, 0))))
            if fixed:
                y = F.relu(self.conv2(F.pad(y, (self.past, 0))))
            else:
                y = self.conv2(F.relu(F.pad(y, (self.past, 0))))
            return x + y

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv1d(8, 24, 1), nn.Linear(24, 10)
            self.blocks = nn.Sequential(Block(1), Block(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks(self.stem(x.transpose(1, 2)))[..., -1])

    return subject(Net(), rows, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/SSinyu/RED-CNN/issues/8",
    "one convolution called where each stage was to have its own",
    ("conv*", "conv_t*"),
    SHARED,
)
def red_cnn(fixed: bool) -> Subject:
    """All stages but the first and the last are the same layer."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = conv(1, 12), nn.ConvTranspose2d(12, 1, 3, padding=1)
            down = [conv(12, 12) for _ in range(3)]
            up = [nn.ConvTranspose2d(12, 12, 3, padding=1) for _ in range(3)]
            self.conv = nn.ModuleList(down if fixed else down[:1] * 3)
            self.conv_t = nn.ModuleList(up if fixed else up[:1] * 3)

        def forward(self, x: Tensor) -> Tensor:
            x, kept = self.first(x).relu(), []
            for layer in self.conv:
                kept.append(x)
                x = layer(x).relu()
            for layer in self.conv_t:
                x = (layer(x) + kept.pop()).relu()
            return self.last(x)

    return subject(Net(), noisy, F.binary_cross_entropy_with_logits, 32)


@SHELF.report(
    f"{GITHUB}/facebookresearch/neuromorph/issues/2",
    "maximum over features where that over points was meant",
    ("", "each*", "after*"),
    ("axis", "dimension", "features", "same for", "expand"),
)
def neuromorph(fixed: bool) -> Subject:
    """Each point gets its own largest feature, repeated, and learns nothing of the cloud."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.after = nn.Linear(3, 32), nn.Linear(64, 32)
            self.head = nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.each(x).relu()
            pooled = x.amax(1 if fixed else 2, keepdim=True).expand_as(x)
            return self.head(self.after(torch.cat([x, pooled], -1)).relu().mean(1))

    return subject(Net(), clouds, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/NYUMedML/CNN_design_for_AD/issues/7",
    "norm added under a name that is taken",
    ("net*", ""),
    ("overwr", "replac", "missing", "same name", "without a norm", "no norm"),
)
def taken(fixed: bool) -> Subject:
    """The third norm takes the place of the second, and none follows the third convolution."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = nn.Sequential(), nn.Linear(16, 10)
            for number, norm in enumerate((1, 2, 3 if fixed else 2), 1):
                self.net.add_module(f"conv{number}", conv(1 if number == 1 else 16, 16))
                self.net.add_module(f"norm{norm}", nn.BatchNorm2d(16))
                self.net.add_module(f"relu{number}", nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.net(x).mean((2, 3)))

    return subject(Net(), images, F.cross_entropy, 32)


# ---- modes ---------------------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/Coderx7/SimpleNet/issues/2",
    "functional dropout that stays on in evaluation",
    ("", "classifier*"),
    RANDOM,
)
def simple_net(fixed: bool) -> Subject:
    """F.dropout2d(.., training=True): the model in evaluation answers by chance."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(conv(1, 16), nn.ReLU(), conv(16, 32), nn.ReLU())
            self.classifier = nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.features(x)
            x = F.max_pool2d(x, x.shape[2:])
            x = F.dropout2d(x, 0.1, training=self.training if fixed else True)
            return self.classifier(x.flatten(1))

    return subject(Net().eval(), images, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/ServiceNow/LCFCN/issues/20",
    "helper that leaves the model in evaluation, before its loss",
    ("", "net*"),
    MODE,
)
def lcfcn(fixed: bool) -> Subject:
    """Predictions that weigh the loss are made in evaluation, and so is the loss thereafter."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            features = [conv(1, 16), nn.BatchNorm2d(16), nn.ReLU(), conv(16, 16)]
            pooled = [nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
            self.net = nn.Sequential(*features, *pooled, nn.Linear(16, 10))

        @torch.no_grad()
        def guess(self, x: Tensor) -> Tensor:
            mode = self.training
            made = self.eval().net(x).argmax(1)
            self.train(mode and fixed)
            return made

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            guess = self.guess(x)
            return self.net(x), guess

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        each = F.cross_entropy(output[0], target, reduction="none")
        return (each * (1 + (output[1] != target))).mean()

    return subject(Net(), images, loss, 32)


# ---- quantisers ----------------------------------------------------------------------------------


class Quantised(nn.Module):
    """A net whose middle layer has its weight quantised by a function of its own."""

    def __init__(self, function: Any, *scales: float) -> None:
        super().__init__()
        self.stem, self.layer, self.head = nn.Linear(64, 48), nn.Linear(48, 48), nn.Linear(48, 10)
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(scale)) for scale in scales)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        weight = self.function.apply(self.layer.weight, *self.scales)
        return self.head(F.linear(self.stem(x).relu(), weight, self.layer.bias).relu())


@SHELF.report(
    f"{GITHUB}/vinsis/ternary-quantization/issues/1",
    "backward of a quantiser that leaves the gradient out",
    ("layer*", "scales*", ""),
    BACKWARD,
)
def ternary(fixed: bool) -> Subject:
    """The weights themselves are returned as their gradient, whatever the loss says."""

    class Ternary(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor, up: Tensor, down: Tensor) -> Tensor:
            ctx.save_for_backward(w, up, down)
            return (w > 0.05) * up - (w < -0.05) * down

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            w, up, down = ctx.saved_tensors
            above, below = (w > 0.05).float(), (w < -0.05).float()
            factor = above * up + below * down + (1 - above - below)
            given = grad if fixed else w
            return factor * given, (above * grad).sum(), -(below * grad).sum()

    return subject(Quantised(Ternary, 0.1, 0.1), flat, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/hustzxd/LSQuantization/issues/1",
    "gradient of a quantised weight not cut where it is clipped",
    ("layer*", "scales*", ""),
    (*BACKWARD, "clip", "clamp", "range"),
)
def learnt_step(fixed: bool) -> Subject:
    """What is beyond the last step has no say in the output, and is pushed further."""

    class Steps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor, step: Tensor) -> Tensor:
            ctx.save_for_backward(w, step)
            return (w / step).round().clamp(-3, 3) * step

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            w, step = ctx.saved_tensors
            at = w / step
            inside = (at.abs() <= 3).float()
            slope = inside * (at.round() - at) + (1 - inside) * at.sign() * 3
            return grad * inside if fixed else grad, (grad * slope).sum() / 48

    return subject(Quantised(Steps, 0.03), flat, F.cross_entropy, 32)
