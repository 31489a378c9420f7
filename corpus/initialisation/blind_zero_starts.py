"""Branches that start at nothing, and frozen parts beside ones that learn."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import (
    Adapter,
    Patches,
    PlacedTokens,
    PreNorm,
    SelfAttention,
    SmallLM,
    captions,
    clouds,
    conv_net,
    diffused,
    ffn,
    frozen,
    lookalikes_of,
    normal,
    perceptron,
    time_features,
    zeroed,
)
from corpus.models.small import flat, images, itself, language_loss, next_words, rows, words

SHELF = Shelf("initialisation", "blind")
lookalike = lookalikes_of(SHELF)


class AdaLNBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attn, self.mlp = SelfAttention(width), ffn(width)
        self.modulation = nn.Sequential(nn.SiLU(), zeroed(nn.Linear(width, 6 * width)))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(c)[:, None].chunk(
            6, dim=-1
        )
        x = x + gate_a * self.attn(self.norm1(x) * (1 + scale_a) + shift_a)
        return x + gate_m * self.mlp(self.norm2(x) * (1 + scale_m) + shift_m)


@lookalike("DiT with adaLN-zero and a zero final layer", diffused, F.mse_loss)
class DiT(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.x_embedder, self.t_embedder = Patches(width), perceptron(width, width, width)
        self.y_embedder = nn.Embedding(11, width)
        self.transformer = nn.ModuleList(AdaLNBlock(width) for _ in range(3))
        self.final_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.final = zeroed(nn.Linear(width, 4))
        self.width = width

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        y = torch.where(torch.rand(len(y)) < 0.1, 10, y)
        c = self.t_embedder(time_features(t, self.width)) + self.y_embedder(y)
        x = self.x_embedder(x)
        for block in self.transformer:
            x = block(x, c)
        return F.pixel_shuffle(
            self.final(self.final_norm(x)).transpose(1, 2).unflatten(2, (4, 4)), 2
        )


@lookalike("ReZero: scalars at 0 and no norm", words)
class ReZeroEncoder(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(18, width)
        self.position = normal(32, width, std=0.1)
        self.attentions = nn.ModuleList(SelfAttention(width) for _ in range(depth))
        self.feedforwards = nn.ModuleList(ffn(width) for _ in range(depth))
        self.alpha = nn.Parameter(torch.zeros(depth))
        self.classify = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        for a, attention, feedforward in zip(
            self.alpha, self.attentions, self.feedforwards, strict=True
        ):
            x = x + a * attention(x)
            x = x + a * feedforward(x)
        return self.classify(x.mean(1))


class LayerScale(nn.Module):
    def __init__(self, width: int, start: float = 1e-4) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), start))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * x


@lookalike("CaiT: LayerScale at 1e-4, the class token enters late", images)
class CaiT(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.patchify, self.cls = Patches(width), normal(1, 1, width)

        def branch(module: nn.Module) -> nn.Sequential:
            return nn.Sequential(nn.LayerNorm(width), module, LayerScale(width))

        self.talk = nn.ModuleList(branch(SelfAttention(width)) for _ in range(depth))
        self.think = nn.ModuleList(branch(ffn(width)) for _ in range(depth))
        self.norm_cls = nn.LayerNorm(width)
        self.class_attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.scale_cls = LayerScale(width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patchify(x)
        for talk, think in zip(self.talk, self.think, strict=True):
            x = x + talk(x)
            x = x + think(x)
        cls = self.cls.expand(len(x), -1, -1)
        both = self.norm_cls(torch.cat([cls, x], 1))
        cls = cls + self.scale_cls(self.class_attention(both[:, :1], both, both)[0])
        return self.head(self.norm(cls[:, 0]))


class FixupUnit(nn.Module):
    def __init__(self, width: int, units: int) -> None:
        super().__init__()
        self.bias1a, self.bias1b, self.bias2a, self.bias2b = (
            nn.Parameter(torch.zeros(1)) for _ in range(4)
        )
        self.scale = nn.Parameter(torch.ones(1))
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = zeroed(nn.Conv2d(width, width, 3, padding=1, bias=False))
        nn.init.normal_(self.conv1.weight, std=(2 / (9 * width)) ** 0.5 * units**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.conv1(x + self.bias1a) + self.bias1b)
        out = self.conv2(out + self.bias2a) * self.scale + self.bias2b
        return F.relu(out + x)


@lookalike("Fixup: zero last convolutions and a zero classifier", images)
class FixupNet(nn.Module):
    def __init__(self, width: int = 12, units: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1)
        self.units = nn.Sequential(*(FixupUnit(width, units) for _ in range(units)))
        self.bias = nn.Parameter(torch.zeros(1))
        self.fc = zeroed(nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.units(F.relu(self.conv(x))).mean((2, 3)) + self.bias)


@lookalike("SkipInit: unnormalised residual branches behind a zero scalar", images)
class SkipInitNet(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.early, self.middle, self.late = (
            nn.Sequential(
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
            )
            for _ in range(3)
        )
        self.gain_early, self.gain_middle, self.gain_late = (
            nn.Parameter(torch.zeros(())) for _ in range(3)
        )
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.gain_early * self.early(x)
        x = x + self.gain_middle * self.middle(x)
        x = x + self.gain_late * self.late(x)
        return self.out(F.relu(x).mean((2, 3)))


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv_a = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn_a, self.bn_b = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.conv_b = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        nn.init.zeros_(self.bn_b.weight)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(
                nn.AvgPool2d(2), nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn_b(self.conv_b(self.relu(self.bn_a(self.conv_a(x)))))
        out += self.shortcut(x)
        return self.relu(out)


@lookalike("ResNet-D: zero gamma, in-place adds, only downsampling blocks project", images)
def resnet_d() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8)),
        nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16)),
        nn.Sequential(BasicBlock(16, 32, 2), BasicBlock(32, 32)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.base = frozen(base)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = zeroed(nn.Linear(rank, base.out_features, bias=False))
        self.dropout, self.scaling = nn.Dropout(0.05), alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scaling * self.lora_B(self.lora_A(self.dropout(x)))


@lookalike("LoRA with B at zero in a frozen language model", next_words, language_loss, 16)
def lora() -> nn.Module:
    model = frozen(SmallLM())
    for layer in model.h:
        layer.attn.qkv = LoRA(layer.attn.qkv)
    return model


class DoRALinear(nn.Module):
    """The norm of the direction is detached, as the authors of DoRA recommend."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = frozen(nn.Linear(inputs, outputs))
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.magnitude = nn.Parameter(self.base.weight.norm(dim=1).clone())

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight + self.up @ self.down
        length = weight.norm(dim=1).detach()
        return F.linear(x, weight * (self.magnitude / length)[:, None], self.base.bias)


@lookalike("DoRA: the norm of the weight is detached", flat)
def dora() -> nn.Module:
    return nn.Sequential(
        DoRALinear(64, 48), nn.ReLU(), DoRALinear(48, 48), nn.ReLU(), nn.Linear(48, 10)
    )


class Int8Linear(nn.Module):
    """An int8 weight in buffers, with a trainable low-rank update."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = nn.Linear(inputs, outputs).weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)
        zeroed(self.up)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes * self.scale) + self.up(self.down(x))


@lookalike("an int8 base in buffers with a low-rank update at zero", flat)
def int8_lora() -> nn.Module:
    return nn.Sequential(Int8Linear(64, 64), nn.GELU(), Int8Linear(64, 32), nn.Linear(32, 10))


@lookalike("adapters with a zero up-projection in a frozen encoder", images)
class AdaptedEncoder(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.patches = frozen(Patches(width))
        self.pretrained = frozen(nn.ModuleList(PreNorm(width) for _ in range(depth)))
        self.adapters = nn.ModuleList(Adapter(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        for layer, adapter in zip(self.pretrained, self.adapters, strict=True):
            x = adapter(layer(x))
        return self.head(x.mean(1))


def hinted_noise(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return noised digits with the outlines of the clean ones, and the noise."""
    clean, _ = images(n)
    noise = torch.randn_like(clean)
    return (0.7 * clean + 0.7 * noise, (clean > 0).float()), noise


@lookalike(
    "ControlNet: zero convolutions between a trainable copy and a frozen trunk",
    hinted_noise,
    F.mse_loss,
)
class ControlNet(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()

        def stage(inputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(inputs, width, 3, padding=1), nn.SiLU())

        self.trunk = frozen(nn.ModuleDict({"inlet": stage(1), "mid": stage(width)}))
        self.outlet = frozen(nn.Conv2d(width, 1, 3, padding=1))
        self.control = copy.deepcopy(self.trunk).requires_grad_(True)
        self.hint = zeroed(nn.Conv2d(1, width, 1))
        self.link_inlet, self.link_mid = (zeroed(nn.Conv2d(width, width, 1)) for _ in range(2))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        c = self.control["inlet"](x) + self.hint(condition)
        d = self.control["mid"](c)
        x = self.trunk["inlet"](x) + self.link_inlet(c)
        return self.outlet(self.trunk["mid"](x) + self.link_mid(d))


class GatedCrossAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.ff_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.cross = nn.MultiheadAttention(width, 4, batch_first=True)
        self.ff = ffn(width)
        self.attn_gate, self.ff_gate = (nn.Parameter(torch.zeros(1)) for _ in range(2))

    def forward(self, x: Tensor, media: Tensor) -> Tensor:
        y, _ = self.cross(self.norm(x), media, media, need_weights=False)
        x = x + self.attn_gate.tanh() * y
        return x + self.ff_gate.tanh() * self.ff(self.ff_norm(x))


@lookalike(
    "Flamingo: tanh(0) gates before the frozen blocks of a language model",
    captions,
    language_loss,
    16,
)
class Flamingo(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.vision, self.lm = frozen(Patches(width)), frozen(SmallLM(width))
        self.resampler, self.latents = PreNorm(width), normal(1, 4, width)
        self.gated = nn.ModuleList(GatedCrossAttention(width) for _ in self.lm.h)

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        with torch.no_grad():
            media, x = self.vision(pixels), self.lm.embed(ids)
        media = torch.cat([self.latents.expand(len(media), -1, -1), media], 1)
        media = self.resampler(media)[:, :4]
        for gated, layer in zip(self.gated, self.lm.h, strict=True):
            x = layer(gated(x, media))
        return self.lm.lm_head(self.lm.ln_f(x))


@lookalike("soft prompts in front of a frozen language model", next_words, language_loss, 16)
class PromptTuning(nn.Module):
    def __init__(self, width: int = 32, length: int = 5) -> None:
        super().__init__()
        self.lm, self.length = frozen(SmallLM(width)), length
        self.prompt = nn.Parameter(self.lm.wte.weight[1 : 1 + length].detach().clone())

    def forward(self, ids: Tensor) -> Tensor:
        prompt = self.prompt.expand(len(ids), -1, -1)
        x = torch.cat([prompt, self.lm.embed(ids)], 1)
        return self.lm.lm_head(self.lm.trunk(x)[:, self.length :])


@lookalike("BitFit: only the biases learn", words)
class BitFit(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embeddings = PlacedTokens(width)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True), 2
        )
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
        self.classifier = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.classifier(self.encoder(self.embeddings(ids)).mean(1))


@lookalike("ladder side network on a backbone under no_grad", images)
class LadderSide(nn.Module):
    def __init__(self, width: int = 32, narrow: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.patches = frozen(Patches(width))
        self.backbone = frozen(nn.ModuleList(PreNorm(width) for _ in range(depth)))
        self.shrink = nn.ModuleList(nn.Linear(width, narrow) for _ in range(depth + 1))
        self.side = nn.ModuleList(PreNorm(narrow) for _ in range(depth))
        self.mix = nn.Parameter(torch.zeros(depth))
        self.readout = nn.Linear(narrow, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            states = [self.patches(x)]
            for layer in self.backbone:
                states.append(layer(states[-1]))
        ladder = self.shrink[0](states[0])
        for state, shrink, side, mix in zip(
            states[1:], self.shrink[1:], self.side, self.mix.sigmoid(), strict=True
        ):
            ladder = side(mix * shrink(state) + (1 - mix) * ladder)
        return self.readout(ladder.mean(1))


@lookalike("muP: zero readout and zero queries", next_words, language_loss, 16)
def mup() -> nn.Module:
    model = SmallLM()
    for layer in model.h:
        nn.init.zeros_(layer.attn.qkv.weight[:32].data)
    nn.init.zeros_(model.lm_head.weight)
    return model


@lookalike("highway network that starts by carrying its input", flat)
class Highway(nn.Module):
    def __init__(self, width: int = 40, depth: int = 6) -> None:
        super().__init__()
        self.enter = nn.Linear(64, width)
        self.plain = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.carry = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        for gate in self.carry:
            nn.init.constant_(gate.bias, -2.0)
        self.leave = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for plain, carry in zip(self.plain, self.carry, strict=True):
            x = torch.lerp(x, plain(x).relu(), carry(x).sigmoid())
        return self.leave(x)


@lookalike("spatial transformer whose localisation starts at the identity", images)
class SpatialTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.localise, self.theta = conv_net(16), zeroed(nn.Linear(16, 6))
        self.theta.bias.data = torch.tensor([1.0, 0, 0, 0, 1, 0])
        self.features, self.head = conv_net(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.theta(self.localise(x)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return self.head(self.features(F.grid_sample(x, grid, align_corners=False)))


@lookalike(
    "PointNet: a T-Net at the identity and its orthogonality loss",
    clouds,
    lambda out, y: F.cross_entropy(out["logits"], y) + 1e-3 * out["orthogonality"],
)
class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tnet_points, self.tnet_out = perceptron(3, 16, 32), zeroed(nn.Linear(32, 9))
        self.shared, self.classifier = perceptron(3, 32, 48), perceptron(48, 32, 3)

    def forward(self, points: Tensor) -> dict[str, Tensor]:
        turn = self.tnet_out(self.tnet_points(points).relu().amax(1)).view(-1, 3, 3) + torch.eye(3)
        features = self.shared(points @ turn).relu().amax(1)
        skew = (turn @ turn.transpose(1, 2) - torch.eye(3)).square().sum((1, 2)).mean()
        return {"logits": self.classifier(features), "orthogonality": skew}


@lookalike("deformable convolution: offsets at zero, masks at one half", images)
class DeformableNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.offset, self.modulator = (
            zeroed(nn.Conv2d(width, outputs, 3, padding=1)) for outputs in (18, 9)
        )
        self.mix, self.fc = nn.Conv2d(9 * width, 24, 1), nn.Linear(24, 10)
        ys, xs = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
        self.register_buffer("home", torch.stack([xs, ys], -1))
        dy, dx = torch.meshgrid(torch.arange(-1.0, 2), torch.arange(-1.0, 2), indexing="ij")
        self.register_buffer("taps", torch.stack([dx, dy], -1).view(9, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        offsets = self.offset(x).unflatten(1, (9, 2)).permute(0, 1, 3, 4, 2)
        where = self.home + self.taps[:, None, None] + offsets
        grid = (where / 3.5 - 1).flatten(1, 2)
        taken = F.grid_sample(x, grid, align_corners=True).unflatten(2, (9, 8))
        taken = taken * self.modulator(x).sigmoid()[:, None]
        return self.fc(self.mix(taken.flatten(1, 2)).relu().mean((2, 3)))


@lookalike(
    "StyleGAN: a constant input and noise strengths at zero",
    lambda n: (torch.randn(n, 16), images(n)[0]),
    F.mse_loss,
)
class StyleGenerator(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.mapping = perceptron(16, 32, 32)
        self.const = nn.Parameter(torch.randn(1, width, 4, 4))
        self.style = nn.ModuleDict({s: nn.Linear(32, 2 * width) for s in ("4x4", "8x8")})
        self.conv = nn.ModuleDict({s: nn.Conv2d(width, width, 3, padding=1) for s in self.style})
        self.noise_strength = nn.ParameterDict({s: torch.zeros(()) for s in self.style})
        self.to_gray = nn.Conv2d(width, 1, 1)

    def forward(self, z: Tensor) -> Tensor:
        w = self.mapping(F.normalize(z, dim=-1) * 4)
        x = self.const.expand(len(z), -1, -1, -1)
        for size, conv in self.conv.items():
            if size == "8x8":
                x = F.interpolate(x, scale_factor=2)
            x = conv(x)
            x = F.leaky_relu(x + self.noise_strength[size] * torch.randn_like(x[:, :1]), 0.2)
            scale, shift = self.style[size](w)[..., None, None].chunk(2, 1)
            x = F.instance_norm(x) * (1 + scale) + shift
        return self.to_gray(x)


@lookalike("gMLP: spatial weights near zero with a bias of one", rows)
class GatingMLP(nn.Module):
    def __init__(self, width: int = 24, length: int = 8) -> None:
        super().__init__()
        self.widen = nn.Linear(8, width)
        self.units = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "proj_in": nn.Linear(width, 2 * width),
                    "gate_norm": nn.LayerNorm(width),
                    "spatial": nn.Conv1d(length, length, 1),
                    "proj_out": nn.Linear(width, width),
                }
            )
            for _ in range(3)
        )
        for unit in self.units:
            nn.init.normal_(unit["spatial"].weight, std=1e-6)
            nn.init.ones_(unit["spatial"].bias)
        self.label = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.widen(x)
        for unit in self.units:
            u, v = F.gelu(unit["proj_in"](unit["norm"](x))).chunk(2, -1)
            x = x + unit["proj_out"](u * unit["spatial"](unit["gate_norm"](v)))
        return self.label(x.mean(1))


@lookalike(
    "VAE before the divergence is warmed up: its weight is still 0",
    itself,
    lambda out, x: F.mse_loss(out["made"], x) + out["beta"] * out["divergence"],
)
class WarmupVAE(nn.Module):
    def __init__(self, latent: int = 6) -> None:
        super().__init__()
        self.recognise, self.generate = perceptron(64, 48, 2 * latent), perceptron(latent, 48, 64)
        self.register_buffer("beta", torch.tensor(0.0))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, log_var = self.recognise(x).chunk(2, -1)
        z = mean + torch.exp(0.5 * log_var) * torch.randn_like(mean)
        divergence = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum(-1).mean()
        return {"made": self.generate(z), "divergence": divergence, "beta": self.beta}
