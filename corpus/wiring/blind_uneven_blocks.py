"""Blocks that differ from their siblings, and branches that end unread, on purpose."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from corpus.cards import Shelf
from corpus.models.parts import (
    Patches,
    PlacedTokens,
    PreNorm,
    Rotary,
    SelfAttention,
    attend,
    captions,
    diffused,
    ffn,
    lookalikes_of,
    normal,
    time_features,
    tokens,
)
from corpus.models.small import flat, images, language_loss, next_words, rows, words

SHELF = Shelf("wiring", "blind")
lookalike = lookalikes_of(SHELF)


@lookalike("the first layer has no norm, the last no residual", rows)
class Uneven(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.lift = nn.Linear(8, width)
        self.mixers = nn.ModuleList(nn.Conv1d(width, width, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList([nn.Identity(), *(nn.GroupNorm(4, width) for _ in range(3))])
        self.tell = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x).transpose(1, 2)
        for i, (mixer, norm) in enumerate(zip(self.mixers, self.norms, strict=True)):
            made = F.gelu(mixer(norm(x)))
            x = made if i == len(self.mixers) - 1 else x + made
        return self.tell(x.amax(2))


class SandwichLayer(nn.Module):
    def __init__(self, width: int, window: int | None) -> None:
        super().__init__()
        self.pre_attn, self.post_attn, self.pre_ff, self.post_ff = (
            nn.RMSNorm(width) for _ in range(4)
        )
        self.q_proj, self.kv_proj = nn.Linear(width, width), nn.Linear(width, width // 2)
        self.o_proj, self.window = nn.Linear(width, width), window
        self.rope = Rotary(8)
        self.gate, self.up, self.down = (
            nn.Linear(width, 64),
            nn.Linear(width, 64),
            nn.Linear(64, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        h, n = self.pre_attn(x), x.shape[1]
        k, v = (t.repeat(1, 1, 4) for t in self.kv_proj(h).chunk(2, -1))
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        if self.window:
            mask = mask.triu(1 - self.window)
        x = x + self.post_attn(
            self.o_proj(attend(self.rope(self.q_proj(h)), self.rope(k), v, attn_mask=mask))
        )
        h = self.pre_ff(x)
        return x + self.post_ff(self.down(F.gelu(self.gate(h)) * self.up(h)))


@lookalike(
    "Gemma: sandwich norms, one key head, local and global masks in turn, soft caps",
    next_words,
    language_loss,
    16,
)
class LocalGlobal(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedder = nn.Embedding(18, width)
        nn.init.normal_(self.embedder.weight, std=width**-0.5)
        self.stack = nn.Sequential(
            *(SandwichLayer(width, 8 if i % 2 == 0 else None) for i in range(4))
        )
        self.final_norm = nn.RMSNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.stack(self.embedder(ids) * self.embedder.embedding_dim**0.5)
        logits = self.final_norm(x) @ self.embedder.weight.T
        return 30 * torch.tanh(logits / 30)


@lookalike(
    "GPT-J: attention and MLP in parallel from one norm, and a cache that nobody reads",
    next_words,
    lambda out, y: language_loss(out["logits"], y),
    16,
)
class ParallelLM(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.wte, self.rotary = tokens(width), Rotary(8)
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth + 1))
        self.fused_in = nn.ModuleList(nn.Linear(width, 7 * width, bias=False) for _ in range(depth))
        self.fused_out = nn.ModuleList(
            nn.Linear(5 * width, width, bias=False) for _ in range(depth)
        )
        self.lm_head = nn.Linear(width, 18)

    def forward(self, ids: Tensor, use_cache: bool = True) -> dict[str, Any]:
        x, cache = self.wte(ids), []
        for norm, into, out in zip(self.norm[:-1], self.fused_in, self.fused_out, strict=True):
            q, k, v, mlp = into(norm(x)).split([32, 32, 32, 128], -1)
            q, k = self.rotary(q), self.rotary(k)
            if use_cache:
                cache.append((k, v))
            x = x + out(torch.cat([attend(q, k, v, is_causal=True), F.gelu(mlp)], -1))
        return {"logits": self.lm_head(self.norm[-1](x)), "past_key_values": cache}


@lookalike(
    "cross-layer attention: every second layer borrows keys and values",
    next_words,
    language_loss,
    16,
)
class BorrowedKeys(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.emb, self.rope = tokens(width), Rotary(8)
        self.q, self.o = (
            nn.ModuleList(nn.Linear(width, width) for _ in range(depth)) for _ in "qo"
        )
        self.kv = nn.ModuleDict({str(i): nn.Linear(width, 2 * width) for i in range(0, depth, 2)})
        self.norm_a, self.norm_f = (
            nn.ModuleList(nn.LayerNorm(width) for _ in range(depth)) for _ in "af"
        )
        self.ff, self.norm = nn.ModuleList(ffn(width) for _ in range(depth)), nn.LayerNorm(width)
        self.head = nn.Linear(width, 18)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for i, (q, o) in enumerate(zip(self.q, self.o, strict=True)):
            h = self.norm_a[i](x)
            if str(i) in self.kv:
                k, v = self.kv[str(i)](h).chunk(2, -1)
                k = self.rope(k)
            x = x + o(attend(self.rope(q(h)), k, v, is_causal=True))
            x = x + self.ff[i](self.norm_f[i](x))
        return self.head(self.norm(x))


@lookalike("Jamba: one attention layer among scans", next_words, language_loss, 16)
class ScanAndAttend(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.vocabulary = tokens(width)
        self.mixers = nn.ModuleList(
            SelfAttention(width, causal=True) if i == 2 else SelectiveScan(width) for i in range(4)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(5))
        self.predict = nn.Linear(width, 18)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.vocabulary(ids)
        for mixer, norm in zip(self.mixers, self.norms[:-1], strict=True):
            x = x + mixer(norm(x))
        return self.predict(self.norms[-1](x))


class SelectiveScan(nn.Module):
    """A small Mamba: selective state space, step by step."""

    def __init__(self, width: int, state: int = 4) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.conv1d = nn.Conv1d(width, width, 3, groups=width, padding=2)
        self.x_proj, self.dt_proj = nn.Linear(width, 2 * state + 2), nn.Linear(2, width)
        nn.init.constant_(self.dt_proj.bias, -3.0)
        self.A_log = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(width, 1))
        self.D, self.state = nn.Parameter(torch.ones(width)), state

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.in_proj(x).chunk(2, -1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        b, c, dt = self.x_proj(x).split([self.state, self.state, 2], -1)
        dt = F.softplus(self.dt_proj(dt))[..., None]
        decay, push = torch.exp(-dt * self.A_log.exp()), dt * b[:, :, None] * x[..., None]
        h, ys = torch.zeros_like(push[:, 0]), []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + push[:, t]
            ys.append((h * c[:, t, None]).sum(-1))
        return self.out_proj((torch.stack(ys, 1) + self.D * x) * F.silu(gate))


def captioned_noise(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return noised digits with the ids of 8 tokens, and the noise by patches."""
    (pixels, ids), _ = captions(n)
    noise = torch.randn_like(pixels)
    return (0.7 * pixels + 0.7 * noise, ids[:, :8]), F.pixel_unshuffle(noise, 2).flatten(
        2
    ).transpose(1, 2)


@lookalike(
    "MMDiT: the text stream ends unused after the last joint block", captioned_noise, F.mse_loss
)
class JointStreams(nn.Module):
    class Joint(nn.Module):
        """Attention over both streams, with weights for each."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.ModuleDict({s: nn.LayerNorm(width) for s in ("image", "text")})
            self.qkv = nn.ModuleDict({s: nn.Linear(width, 3 * width) for s in self.norm})
            self.out = nn.ModuleDict({s: nn.Linear(width, width) for s in self.norm})
            self.ff = nn.ModuleDict(
                {s: nn.Sequential(nn.LayerNorm(width), ffn(width)) for s in self.norm}
            )

        def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
            streams = {"image": image, "text": text}
            qkv = torch.cat([self.qkv[s](self.norm[s](x)) for s, x in streams.items()], 1)
            mixed = attend(*qkv.chunk(3, -1)).split([image.shape[1], text.shape[1]], 1)
            for (name, x), more in zip(list(streams.items()), mixed, strict=True):
                x = x + self.out[name](more)
                streams[name] = x + self.ff[name](x)
            return streams["image"], streams["text"]

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches, self.text = Patches(width), PlacedTokens(width)
        self.joint = nn.ModuleList(self.Joint(width) for _ in range(2))
        self.unpatch = nn.Linear(width, 4)

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        image, text = self.patches(image), self.text(ids)
        for block in self.joint:
            image, text = block(image, text)
        return self.unpatch(image)


@lookalike(
    "WaveNet: the last residual convolution feeds nobody, the skips are summed",
    next_words,
    lambda out, y: F.cross_entropy(out, y),
)
class WaveNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.causal = nn.Embedding(18, width)
        self.dilated = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(4)
        )
        self.residual, self.skip = (
            nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(4)) for _ in range(2)
        )
        self.post1, self.post2 = nn.Conv1d(width, width, 1), nn.Conv1d(width, 18, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x, skips = self.causal(ids).transpose(1, 2), 0
        for dilated, residual, skip in zip(self.dilated, self.residual, self.skip, strict=True):
            filtered, gate = dilated(F.pad(x, (dilated.dilation[0], 0))).chunk(2, 1)
            out = filtered.tanh() * gate.sigmoid()
            skips = skips + skip(out)
            x = x + residual(out)
        return self.post2(self.post1(F.relu(skips)).relu())


def waves(n: int) -> tuple[Tensor, Tensor]:
    """Return 24 steps of sine waves, and the next 6."""
    series = torch.sin(torch.arange(30) * (0.2 + torch.rand(n, 1)))
    return series[:, :24], series[:, 24:]


@lookalike("N-BEATS: the backcast of the last block is dropped", waves, F.l1_loss)
class NBeats(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stack = nn.ModuleList(
            nn.ModuleDict(
                {
                    "body": nn.Sequential(
                        nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU()
                    ),
                    "backcast": nn.Linear(48, 24),
                    "forecast": nn.Linear(48, 6),
                }
            )
            for _ in range(blocks)
        )

    def forward(self, left: Tensor) -> Tensor:
        made = torch.zeros(len(left), 6)
        for block in self.stack:
            theta = block["body"](left)
            made, left = made + block["forecast"](theta), left - block["backcast"](theta)
        return made


@lookalike(
    "U-ViT: long skips are concatenated from the first half to the second", diffused, F.mse_loss
)
class LongSkips(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch, self.when = Patches(width), nn.Linear(16, width)
        self.descend, self.ascend = (nn.ModuleList(PreNorm(width) for _ in range(2)) for _ in "da")
        self.bottom, self.merge = (
            PreNorm(width),
            nn.ModuleList(nn.Linear(2 * width, width) for _ in "12"),
        )
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        x = torch.cat([self.when(time_features(t, 16))[:, None], self.patch(x)], 1)
        kept = []
        for block in self.descend:
            x = block(x)
            kept.append(x)
        x = self.bottom(x)
        for block, merge in zip(self.ascend, self.merge, strict=True):
            x = block(merge(torch.cat([x, kept.pop()], -1)))
        x = self.out(self.norm(x))[:, 1:].transpose(1, 2).unflatten(2, (4, 4))
        return F.pixel_shuffle(x, 2)


@lookalike("DenseNet with concatenation and checkpointed layers", images)
class DenseNet(nn.Module):
    def __init__(self, growth: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(1, 8, 3, padding=1)
        self.denselayers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(8 + i * growth),
                nn.ReLU(inplace=True),
                nn.Conv2d(8 + i * growth, growth, 3, padding=1, bias=False),
            )
            for i in range(layers)
        )
        self.classifier = nn.Linear(8 + layers * growth, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.conv0(x)]
        for layer in self.denselayers:
            features.append(
                checkpoint(lambda *xs, f=layer: f(torch.cat(xs, 1)), *features, use_reentrant=False)
            )
        return self.classifier(torch.cat(features, 1).mean((2, 3)))


def requiring_grad(n: int) -> tuple[Tensor, Tensor]:
    """Return standardised pixels that require a gradient, and labels."""
    x, labels = flat(n)
    return x.requires_grad_(), labels


@lookalike("a deep stack under reentrant checkpoints", requiring_grad)
class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (64, 48, 48, 48, 48)
        self.tower = nn.Sequential(
            *(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes))
        )
        self.last = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint_sequential(self.tower, 2, x, use_reentrant=True))


@lookalike(
    "GoogLeNet: parallel branches and an auxiliary classifier",
    images,
    lambda out, y: F.cross_entropy(out[0], y) + 0.3 * F.cross_entropy(out[1], y),
)
class GoogLeNet(nn.Module):
    class Inception(nn.Module):
        """Four branches, concatenated."""

        def __init__(self, inputs: int) -> None:
            super().__init__()
            self.b1, self.b3_reduce = nn.Conv2d(inputs, 8, 1), nn.Conv2d(inputs, 4, 1)
            self.b3, self.b5_reduce = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(inputs, 4, 1)
            self.b5, self.pool_proj = nn.Conv2d(4, 4, 5, padding=2), nn.Conv2d(inputs, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            branches = (
                self.b1(x),
                self.b3(self.b3_reduce(x).relu()),
                self.b5(self.b5_reduce(x).relu()),
                self.pool_proj(F.max_pool2d(x, 3, 1, 1)),
            )
            return torch.cat(branches, 1).relu()

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inception_a = nn.Conv2d(1, 12, 3, padding=1), self.Inception(12)
        self.inception_b, self.aux, self.fc = (
            self.Inception(24),
            nn.Linear(24, 10),
            nn.Linear(24, 10),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        middle = self.inception_a(self.stem(x).relu())
        return self.fc(self.inception_b(middle).mean((2, 3))), self.aux(middle.mean((2, 3)))


@lookalike("MobileNetV2: some blocks have no skip, bottlenecks no activation", images)
class InvertedResiduals(nn.Module):
    class Unit(nn.Module):
        """An inverted residual."""

        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            hidden, self.skip = 3 * inputs, stride == 1 and inputs == outputs
            self.conv = nn.Sequential(
                nn.Conv2d(inputs, hidden, 1, bias=False),
                nn.BatchNorm2d(hidden),
                nn.ReLU6(inplace=True),
                nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
                nn.BatchNorm2d(hidden),
                nn.ReLU6(inplace=True),
                nn.Conv2d(hidden, outputs, 1, bias=False),
                nn.BatchNorm2d(outputs),
            )

        def forward(self, x: Tensor) -> Tensor:
            return x + self.conv(x) if self.skip else self.conv(x)

    def __init__(self) -> None:
        super().__init__()
        plan = ((8, 8, 1), (8, 12, 2), (12, 12, 1), (12, 20, 1))
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), *(self.Unit(*sizes) for sizes in plan)
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(20, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


@lookalike("Swin: every second block is shifted, relative positions from an index buffer", images)
class ShiftedWindows(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, width, 2, 2)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.attns = nn.ModuleList(SelfAttention(width) for _ in range(2))
        self.mlps = nn.ModuleList(ffn(width) for _ in range(2))
        self.bias_tables = nn.ParameterList(normal(9, 4) for _ in range(2))
        at = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        gap = at[:, :, None] - at[:, None] + 1
        self.register_buffer("relative_position_index", gap[0] * 3 + gap[1])
        self.head = nn.Linear(width, 10)

    @staticmethod
    def windows(x: Tensor) -> Tensor:
        n, _, _, c = x.shape
        return x.view(n, 2, 2, 2, 2, c).transpose(2, 3).reshape(n * 4, 4, c)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).permute(0, 2, 3, 1)
        for i, (attn, mlp) in enumerate(zip(self.attns, self.mlps, strict=True)):
            h = self.norms[2 * i](x).roll((-i, -i), (1, 2))
            bias = self.bias_tables[i][self.relative_position_index].permute(2, 0, 1)
            h = attn(self.windows(h), bias).view(len(x), 2, 2, 2, 2, -1).transpose(2, 3)
            x = x + h.reshape(x.shape).roll((i, i), (1, 2))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(x.mean((1, 2)))


@lookalike("reversible residuals: each coupling leaves one stream alone", flat)
class Reversible(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.split = nn.Linear(64, 2 * width)
        self.f, self.g = (
            nn.ModuleList(
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
                for _ in range(depth)
            )
            for _ in "fg"
        )
        self.join = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.split(x).chunk(2, -1)
        for f, g in zip(self.f, self.g, strict=True):
            a = a + f(b)
            b = b + g(a)
        return self.join(torch.cat([a, b], -1))


@lookalike("FNet: the Fourier transform mixes without a weight, half-step branches", rows)
class FourierMixer(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.project = nn.Linear(8, width)
        self.before, self.after = (
            nn.ModuleList(nn.Sequential(nn.LayerNorm(width), ffn(width)) for _ in range(2))
            for _ in "ba"
        )
        self.mix_norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dense = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        for before, norm, after in zip(self.before, self.mix_norm, self.after, strict=True):
            x = x + 0.5 * before(x)
            x = x + torch.fft.fft2(norm(x), norm="ortho").real
            x = x + 0.5 * after(x)
        return self.dense(x.mean(1))


@lookalike("Reformer: queries and keys are one projection", words)
class SharedQK(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.emb, self.pos = tokens(width), normal(32, width)
        self.qk, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.norm, self.ff, self.cls = nn.LayerNorm(width), ffn(width), nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) + self.pos
        h = self.norm(x)
        qk = self.qk(h)
        itself_too = torch.eye(ids.shape[1]) * -1e5
        x = x + self.o(attend(qk, F.normalize(qk, dim=-1), self.v(h), attn_mask=itself_too))
        return self.cls((x + self.ff(x)).mean(1))
