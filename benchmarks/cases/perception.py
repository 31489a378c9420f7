"""Faults in nets that see, hear, draw and simulate, and healthy ones that look suspicious.

All were written before a check was tried on them; what was changed since is in the docs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import perception_models as models
from benchmarks.cases.controls import after_training, changed, evaluated, of_batch, with_model
from benchmarks.cases.models import he, plain
from benchmarks.cases.perception_models import (
    arcface,
    byol,
    clip,
    colours,
    conv_vae,
    convnext,
    critic,
    critic_step,
    denoiser,
    depth_net,
    detector,
    detector_of_two_losses,
    efficientnet,
    equation,
    generator_step,
    glow,
    keypoints,
    nerf,
    optical_flow,
    overlap,
    quantised,
    recogniser,
    scenes,
    segmenter,
    simclr,
    solution,
    sound_cnn,
    spiking,
    super_resolution,
    swin,
    tones,
    wavenet,
)
from benchmarks.cases.subject import Shelf, Subject, subject

SHELF = Shelf()
fault = SHELF.fault
control = SHELF.control

MODEL = ("", "loss")
CUT = ("detach", "no_grad", "cut", "graph", ".data", "not differentiable", "argmax", "item")
NONFINITE = ("nan", "inf", "overflow", "log", "divi", "sqrt")
ZERO = ("zero", "init")
LARGE = ("large", "scale", "init", "grow", "explod")
INPUT = ("normal", "standard", "scale", "raw", "255", "twice")

# ---- classifiers --------------------------------------------------------------------------------


def shallow_training(healthy: Any) -> Any:
    """Return the subject after a few steps."""
    return after_training(healthy, steps=20)


@fault("a block whose scale and last layer are both zero", convnext, "blocks.1*", ZERO)
def _(s: Subject) -> None:
    block = s.model.blocks[1]
    for parameter in (block.scale, block.shrink.weight, block.shrink.bias):
        nn.init.zeros_(parameter)


@fault("layer scales that are plain tensors", convnext, ("blocks.*", ""), ("regist", "parameter"))
def _(s: Subject) -> None:
    for block in s.model.blocks:
        del block.scale
        block.scale = torch.full((24,), 0.1, requires_grad=True)


@fault("standardised images standardised again", convnext, ("", "stem"), INPUT)
def _(s: Subject) -> None:
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    ink, _ = models.grey(32)
    once = (ink - mean[:, None, None]) / std[:, None, None]
    s.inputs = (once / 255 - mean[:, None, None]) / std[:, None, None]


def unmoved() -> Subject:
    """An EfficientNet in evaluation whose norms were trained with momentum 0."""
    return subject(models.EfficientNet(), colours, F.cross_entropy, batch=32)


@fault(
    "norms with a momentum of 0, after training, in evaluation",
    unmoved,
    ("bn", "blocks.*"),
    ("running", "momentum", "statistics", "update"),
)
def _(s: Subject) -> None:
    for module in s.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    s.model.train()
    optimizer = torch.optim.Adam(s.model.parameters(), lr=3e-3)
    for _ in range(20):
        images, labels = colours(32)
        optimizer.zero_grad()
        F.cross_entropy(s.model(images), labels).backward()
        optimizer.step()
    optimizer.zero_grad()
    s.model.eval()


@fault(
    "offsets of a window's bias looked up in .data", swin, ("blocks.*attention", "blocks.*"), CUT
)
def _(s: Subject) -> None:
    for block in s.model.blocks:
        block.attention.look_up = lambda table, index: table.data[index]


# ---- dense predictions --------------------------------------------------------------------------


@fault("lateral convolutions in a plain list", segmenter, ("", "lateral*"), ("regist", "list"))
def _(s: Subject) -> None:
    convolutions = list(s.model.lateral)
    del s.model.lateral
    s.model.lateral = convolutions


@fault(
    "classes of pixels after softmax into cross_entropy",
    segmenter,
    (*MODEL, "softmax*", "out"),
    ("probabilit", "softmax"),
)
def _(s: Subject) -> None:
    s.model.finish = lambda logits: logits.softmax(1)


@fault("every pixel is void", segmenter, (*MODEL, "out"), (*NONFINITE, "ignore"))
def _(s: Subject) -> None:
    s.target = torch.full_like(s.target, 255)


@fault("raw colours from 0 to 255", segmenter, ("", "down*"), INPUT)
def _(s: Subject) -> None:
    s.inputs = (models.grey(16)[0].expand(-1, 3, -1, -1) * 255).round()


@fault(
    "depths (N, 1, H, W) against (N, H, W)", depth_net, (*MODEL, "softplus"), ("shape", "broadcast")
)
def _(s: Subject) -> None:
    s.target = s.target[:, 0]


# ---- detection ----------------------------------------------------------------------------------


@fault(
    "the bias of rare objects on every convolution of a tower",
    detector,
    "classes.*",
    ("bias", "dead"),
)
def _(s: Subject) -> None:
    for module in s.model.classes:
        if isinstance(module, nn.Conv2d):
            nn.init.constant_(module.bias, -math.log(99))


@fault("divided by the number of objects, which is zero", detector, MODEL, NONFINITE)
def _(s: Subject) -> None:
    classes, mask, boxes = s.target
    s.target = (classes * 0, mask * 0, boxes)
    s.loss = lambda output, target: (
        F.binary_cross_entropy_with_logits(output[0], target[0], reduction="sum") / target[1].sum()
    )


@fault(
    "overlap of boxes of no size, in a logarithm", detector, (*MODEL, "boxes*", "relu*"), NONFINITE
)
def _(s: Subject) -> None:
    s.model.to_sides = F.relu
    nn.init.constant_(s.model.boxes[-1].bias, -0.1)

    def loss(output: Any, target: Any) -> Tensor:
        inside, union = overlap(output[1], target[2])
        return models.focal(output, target) - (inside / union).log().mean()

    s.loss = loss


@fault(
    "chances of objects through sigmoid twice",
    detector,
    (*MODEL, "sigmoid*", "classes*"),
    ("sigmoid", "probabilit", "twice"),
)
def _(s: Subject) -> None:
    s.model.finish = torch.sigmoid


@fault(
    "squared box errors in pixels, summed",
    detector_of_two_losses,
    ("", "backbone*", "boxes*", "classes*"),
    ("task", "imbalance", "dominat", "box"),
    ("task_balance",),
)
def _(s: Subject) -> None:
    s.loss = {
        "class": models.focal,
        "box": lambda output, target: (((output[1] - target[2]) * 64) ** 2).sum(),
    }


# ---- images made --------------------------------------------------------------------------------


@fault(
    "binary cross-entropy of pixels from -1 to 1",
    conv_vae,
    (*MODEL, "decoder.5"),
    ("target", "0 and 1", "range", "negative"),
)
def _(s: Subject) -> None:
    s.target = 2 * s.target - 1
    s.inputs = 2 * s.inputs - 1


@fault(
    "raw logarithmic variance of a latent",
    conv_vae,
    ("log_variance", "", "decoder*", "exp*"),
    NONFINITE,
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.log_variance.bias, 200.0)


@fault("made images detached in the generator's step", generator_step, ("generator*",), CUT)
def _(s: Subject) -> None:
    s.model.between = lambda images: images.detach()


@fault(
    "last convolution of a generator drawn with std 1",
    generator_step,
    ("generator.tanh*", "generator.out"),
    ("satur", "large", "init"),
)
def _(s: Subject) -> None:
    nn.init.normal_(s.model.generator.out.weight)


@fault(
    "every convolution of a denoiser starts at zero",
    denoiser,
    ("first", "down", "norm*", "middle"),
    ZERO,
)
def _(s: Subject) -> None:
    for module in s.model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)


class Bottlenecked(models.Denoiser):
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
    return subject(Bottlenecked(), models.noised, F.mse_loss, batch=16)


@fault(
    "a group of one channel on one pixel",
    bottleneck,
    ("deep_norm", "silu*", "deep"),
    ("group", "constant", "zero", "single", "one"),
)
def _(s: Subject) -> None:
    s.model.deep_norm = nn.GroupNorm(32, 32)


def late_denoiser() -> Subject:
    made = denoiser()
    nn.init.normal_(made.model.out.weight, std=0.1)
    return made


@fault("time embedded under no_grad", late_denoiser, "time*", CUT)
def _(s: Subject) -> None:
    net = s.model.time
    inner = net.forward
    net.forward = torch.no_grad()(inner)


@fault("logarithm of a determinant below zero", glow, ("steps*", ""), NONFINITE)
def _(s: Subject) -> None:
    for step in s.model.steps:
        step.volume = lambda mix: torch.det(mix).log()
    mix = s.model.steps[1].mix
    if torch.det(mix.data) > 0:
        mix.data[0] *= -1


# ---- physics ------------------------------------------------------------------------------------


@fault("a derivative without create_graph", equation, ("", "loss", "net*"), (*CUT, "gradient"))
def _(s: Subject) -> None:
    s.model.slope = lambda u, x: models.slope(u, x, create_graph=False)


@fault(
    "places in kilometres where the net expects millimetres",
    solution,
    ("", "net*"),
    (*INPUT, "same", "constant", "equal", "small"),
)
def _(s: Subject) -> None:
    s.inputs = s.inputs * 1e-6


@fault(
    "density clipped below zero everywhere", nerf, ("density", "relu*"), ("dead", "bias", "zero")
)
def _(s: Subject) -> None:
    s.model.to_density = F.relu
    nn.init.constant_(s.model.density.bias, -5.0)


# ---- without labels -----------------------------------------------------------------------------


@fault("a vector of zeros divided by its norm", simclr, ("", "project*"), NONFINITE)
def _(s: Subject) -> None:
    s.inputs[0][5] = 0.0
    s.model.unit = lambda x: x / x.norm(dim=1, keepdim=True)


@fault("no_grad around the online encoder", byol, "online*", CUT)
def _(s: Subject) -> None:
    encoder = s.model.online
    encoder.forward = torch.no_grad()(encoder.forward)


@fault(
    "a scale of 64 on features of any length",
    arcface,
    (*MODEL, "encoder*"),
    ("large", "scale", "logit", "normal"),
)
def _(s: Subject) -> None:
    s.model.scale = 64.0
    s.model.unit = lambda x: x * 3


# ---- sound --------------------------------------------------------------------------------------


@fault(
    "probabilities into ctc_loss",
    recogniser,
    (*MODEL, "softmax*"),
    ("probabilit", "log_softmax", "softmax"),
)
def _(s: Subject) -> None:
    s.model.finish = lambda x: x.softmax(-1)


@fault("logarithm of silence", sound_cnn, ("", "conv1", "bn1"), NONFINITE)
def _(s: Subject) -> None:
    s.model.loudness = torch.log
    s.inputs[3, 200:] = 0.0


@fault(
    "samples of sound from -32768 to 32767",
    wavenet,
    ("", "first", "gated.0", "tanh*"),
    (*INPUT, "large", "satur"),
)
def _(s: Subject) -> None:
    s.inputs = (s.inputs * 32767).round()


def deep_wavenet() -> Subject:
    return subject(models.WaveNet(depth=20), tones, F.cross_entropy, batch=4)


@fault("only the last skip is read", deep_wavenet, "skip.*", ("depend", "not used"))
def _(s: Subject) -> None:
    s.model.skips = lambda all_: all_[-1]


# ---- points and resolution ----------------------------------------------------------------------


def deep_super_resolution() -> Subject:
    return subject(models.SuperResolution(depth=32), models.small_and_large, F.l1_loss, batch=8)


@fault(
    "32 blocks by He without a scale for residuals",
    deep_super_resolution,
    ("", "blocks.*", "last", "loss"),
    LARGE,
)
def _(s: Subject) -> None:
    he(s.model)
    s.model.scale = 1.0


@fault("places of keypoints by argmax", keypoints, ("heat", "trunk*", ""), CUT)
def _(s: Subject) -> None:
    def hard(heat: Tensor) -> Tensor:
        best = heat.flatten(2).argmax(-1)
        return torch.stack([best // 16, best % 16], -1) / 15

    s.model.to_points = hard


@fault(
    "heatmaps drawn by a convolution of constant weights",
    keypoints,
    ("heat", "trunk*"),
    ("constant", "same", "equal", "symmetr", "identical"),
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.trunk[1][0].weight, 0.01)


# ---- few bits -----------------------------------------------------------------------------------


@fault(
    "weights rounded without a straight-through gradient", quantised, ("conv*", ""), (*CUT, "round")
)
def _(s: Subject) -> None:
    s.model.round = torch.round


@fault("spikes by comparison", spiking, ("fc1", "fc2", ""), (*CUT, "compar"))
def _(s: Subject) -> None:
    s.model.spike = lambda v: (v > 0).float()


@fault(
    "moved frames' error as a root without epsilon",
    optical_flow,
    (*MODEL, "guess", "refine*"),
    NONFINITE,
)
def _(s: Subject) -> None:
    s.inputs = (s.inputs[0], s.inputs[0])
    s.target = torch.zeros_like(s.target)
    for conv in (s.model.guess, s.model.refine[-1]):
        nn.init.zeros_(conv.weight)
        nn.init.zeros_(conv.bias)
    s.loss = lambda flow, target: ((flow - target) ** 2).sum(1).sqrt().mean()


# ---- half precision -----------------------------------------------------------------------------


class HandNorm(nn.Module):
    """Divides by the root of the mean of squares (Zhang and Sennrich 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return (
            x * torch.rsqrt((x.float() ** 2).mean(-1, keepdim=True) + 1e-6).type_as(x) * self.weight
        )


class Narrow(HandNorm):
    """The same, in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + 1e-6) * self.weight


def half_precision() -> Subject:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(768, 64), HandNorm(64), nn.GELU(), nn.Linear(64, 10)
    ).half()
    nn.init.normal_(model[1].weight, std=0.05)
    made = subject(model, colours, lambda out, y: F.cross_entropy(out.float(), y))
    made.inputs = made.inputs.half()
    return made


@fault(
    "squares that overflow in float16",
    half_precision,
    ("1", "2", "3"),
    ("overflow", "zero", "inf", "float16", "large"),
)
def _(s: Subject) -> None:
    s.model[1].weight.data *= 300
    s.model[2] = Narrow(64).half()


@fault(
    "gradients too small for float16",
    half_precision,
    ("", "1", "2", "4", "loss"),
    ("underflow", "subnormal", "float16", "small"),
)
def _(s: Subject) -> None:
    s.loss = lambda out, y: F.cross_entropy(out.float(), y) * 1e-5


# ---- controls -----------------------------------------------------------------------------------

for _healthy in (
    convnext, efficientnet, swin, segmenter, depth_net, detector, detector_of_two_losses, keypoints,
    super_resolution, optical_flow, conv_vae, generator_step, critic_step, denoiser, glow, equation,
    solution, nerf, simclr, byol, clip, arcface, recogniser, sound_cnn, wavenet, quantised, spiking,
    bottleneck, half_precision, late_denoiser,
):  # fmt: skip
    control(f"{_healthy.__name__}, initialised", _healthy)
for _healthy in (
    efficientnet, segmenter, depth_net, keypoints, optical_flow, conv_vae, generator_step,
    critic_step, denoiser, glow, equation, nerf, simclr, byol, clip, arcface, recogniser, sound_cnn,
    quantised, spiking,
):  # fmt: skip
    control(f"{_healthy.__name__}, trained", shallow_training(_healthy))
for _healthy in (efficientnet, segmenter, sound_cnn, quantised, critic_step, recogniser):
    control(f"{_healthy.__name__}, trained, eval", evaluated(shallow_training(_healthy)))

control("stochastic depth that drops whole blocks", with_model(
    lambda: models.EfficientNet(depth=6, drop=0.8), colours, F.cross_entropy, 2))  # fmt: skip


def _without_objects(s: Subject) -> None:
    classes, mask, boxes = s.target
    s.target = (classes * 0, mask * 0, boxes)


control("a batch without objects", changed(detector, _without_objects))


def _mostly_void(s: Subject) -> None:
    s.target[torch.rand(s.target.shape) < 0.95] = 255


control("95 % of the pixels void", changed(segmenter, _mostly_void))


def _with_opacity(s: Subject) -> None:
    s.inputs = torch.cat([s.inputs, torch.ones(len(s.inputs), 1, 16, 16)], 1)
    s.model.stem = nn.Conv2d(4, 24, 2, stride=2)


control("a channel of opacity, all ones", changed(convnext, _with_opacity))


def _mostly_silent(s: Subject) -> None:
    s.inputs[:, 150:] = 0.0


control("sounds padded with silence", changed(sound_cnn, _mostly_silent))


class Painted(nn.Module):
    """Makes an image from a map of classes as one-hot channels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(models.conv_bn(6, 16), models.conv_bn(16, 16), nn.Conv2d(16, 3, 1))

    def forward(self, kinds: Tensor) -> Tensor:
        return self.net(F.one_hot(kinds, 6).permute(0, 3, 1, 2).float()).tanh()


def maps(n: int) -> tuple[Tensor, Tensor]:
    images, kinds = scenes(n)
    return kinds.where(kinds < 4, 0), (images / 3).clamp(-1, 1)


control(
    "images from maps of classes, two of which are absent", with_model(Painted, maps, F.l1_loss, 16)
)


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


control("masked autoencoder", with_model(Masked, lambda n: (colours(n)[0], None), None, 16))


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
            models.small_encoder(),
            nn.Linear(32, 10),
            plain(32, 32, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.encoder(x))
        return self.label(x), self.domain(Reverse.apply(x))


def of_domains(n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    images, labels = colours(n)
    return images, (labels, (torch.arange(n)[:, None] % 2).float())


control("gradient turned round for a domain", with_model(Domains, of_domains, {
    "label": lambda o, t: F.cross_entropy(o[0], t[0]),
    "domain": lambda o, t: F.binary_cross_entropy_with_logits(o[1], t[1]),
}))  # fmt: skip


def hinge(scores: Tensor, truth: Tensor) -> Tensor:
    return F.relu(1 - scores * (2 * truth - 1)).mean()


def smooth_critic() -> nn.Module:
    model = critic()
    for module in model:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.utils.parametrizations.spectral_norm(module)
    return model


control("critic with a hinge loss and spectral norms", with_model(
    smooth_critic, models.real_and_made, hinge, 32))  # fmt: skip


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


control(
    "queries of objects, most of which find nothing", with_model(Queries, colours, one_found, 16)
)
control(
    "queries of objects, trained", after_training(with_model(Queries, colours, one_found, 16), 20)
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


control("Fourier neural operator", with_model(Operator, smoothed, F.mse_loss))
control(
    "Fourier neural operator, trained", after_training(with_model(Operator, smoothed, F.mse_loss))
)


class Distilled(nn.Module):
    """A small net follows a large frozen one in evaluation; only the loss knows labels."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = (
            nn.Sequential(models.small_encoder(), nn.Linear(32, 10)).requires_grad_(False).eval()
        )
        self.student = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            soft = (self.teacher(x) / 4).softmax(1)
        made = self.student(x)
        wanted = F.kl_div((made / 4).log_softmax(1), soft, reduction="batchmean") * 16
        return 0.9 * wanted + 0.1 * F.cross_entropy(made, labels)


control(
    "a student beside a frozen teacher", with_model(Distilled, lambda n: (colours(n), None), None)
)
control("detector, batch of 1", of_batch(detector, 1))
control("super resolution of 32 blocks, scaled", deep_super_resolution)
control("wavenet of 20 layers", deep_wavenet)
control("spiking net of dark images", changed(spiking, lambda s: s.inputs.mul_(0.2)))
control(
    "quantised, fresh norms in evaluation after one step", evaluated(after_training(quantised, 5))
)
control("masked autoencoder, trained", after_training(with_model(
    Masked, lambda n: (colours(n)[0], None), None, 16), 20))  # fmt: skip
