"""Published designs that look like what people report: each is meant, and nothing is wrong."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import (
    Patches,
    PlacedTokens,
    PreNorm,
    SelfAttention,
    attend,
    captions,
    clouds,
    ffn,
    frozen,
    lookalikes_of,
    normal,
    perceptron,
    tokens,
    zeroed,
)
from corpus.models.small import (
    citations,
    flat,
    images,
    language_loss,
    next_words,
    patients,
    ratings,
    rows,
    words,
)

SHELF = Shelf("pulls", "blind")
design = lookalikes_of(SHELF)


class Reader(nn.Module):
    """Classifies sentences by two blocks of one kind."""

    block: type[nn.Module] = PreNorm

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = PlacedTokens(32), nn.Sequential(self.block(), self.block())
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(ids))).mean(1))


class Writer(Reader):
    """A language model of two blocks of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 18)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(ids))))


# ---- attention -----------------------------------------------------------------------------------


class PostNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm1 = SelfAttention(), nn.LayerNorm(32)
        self.mlp, self.norm2 = ffn(32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


@design("BERT: the residual itself goes through each norm", words)
class Post(Reader):
    block = PostNorm


class Sandwich(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        self.after_1, self.after_2 = nn.LayerNorm(32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.after_1(self.attn(self.ln_1(x)))
        return x + self.after_2(self.mlp(self.ln_2(x)))


@design("CogView: a norm before and a norm after each branch", words)
class CogView(Reader):
    block = Sandwich


@design("BLOOM: a norm right behind the embedding, before that of the first block", words)
class Bloom(Reader):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(self.embed, nn.LayerNorm(32))


class NormedAttention(SelfAttention):
    def __init__(self) -> None:
        super().__init__(causal=True)
        self.q_norm, self.k_norm = nn.RMSNorm(8), nn.RMSNorm(8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = self.q_norm(q.unflatten(-1, (4, 8))), self.k_norm(k.unflatten(-1, (4, 8)))
        return self.proj(attend(q.flatten(2), k.flatten(2), v, is_causal=True))


class KeyNorm(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        self.attn = NormedAttention()


@design("OLMo 2: queries and keys normalised head by head", next_words, language_loss, 16)
class NormedKeys(Writer):
    block = KeyNorm


class Talking(SelfAttention):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = self.before((q @ k.transpose(2, 3) / math.sqrt(8)).movedim(1, -1))
        weights = self.after(scores.softmax(2)).movedim(-1, 1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class TalkingBlock(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Talking()


@design("talking heads: heads mixed before and after the softmax over steps", words)
class TalkingHeads(Reader):
    block = TalkingBlock


class Retention(nn.Module):
    """Products of queries and keys that fade with distance, without a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate, self.out = (nn.Linear(32, n) for n in (96, 32, 32))
        self.norm = nn.GroupNorm(4, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        step = torch.arange(x.shape[1])
        fade = 1 - 2.0 ** (-2 - torch.arange(4))
        decay = (fade[:, None, None] ** (step[:, None] - step).clamp(min=0)).tril()
        read = (q @ k.transpose(2, 3) / math.sqrt(8) * decay) @ v
        normed = self.norm(read.transpose(1, 2).flatten(0, 1).flatten(1)).view_as(x)
        return self.out(F.silu(self.gate(x)) * normed)


class RetentionBlock(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Retention()


@design("RetNet: scores without a softmax, which fade", next_words, language_loss, 16)
class RetNet(Writer):
    block = RetentionBlock


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(32), nn.LayerNorm(32), ffn(32)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real
        x = self.norm1(x + mixed)
        return self.norm2(x + self.mlp(x))


@design("FNet: words mixed by a Fourier transform, without a weight", words)
class FNet(Reader):
    block = Spectrum


class External(nn.Module):
    """Scores with a memory, by a softmax over places and then shares of the memory."""

    def __init__(self, width: int = 32, size: int = 24) -> None:
        super().__init__()
        self.keys = nn.Linear(width, size, bias=False)
        self.values = nn.Linear(size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.keys(x).softmax(1)
        return self.values(weights / (weights.sum(-1, keepdim=True) + 1e-9))


class ExternalBlock(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        self.attn = External()


@design("external attention: softmax over places, then shares of the memory", words)
class Externals(Reader):
    block = ExternalBlock


class Separable(nn.Module):
    """One score a place; the context they sum up scales all places."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.score, self.key, self.value, self.out = (nn.Linear(width, n) for n in (1, 32, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        context = (self.score(x).softmax(1) * self.key(x)).sum(1, keepdim=True)
        return self.out(self.value(x).relu() * context)


class SeparableBlock(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Separable()


@design("MobileViT v2: one context vector multiplies each place", words)
class MobileViT(Reader):
    block = SeparableBlock


@design("Perceiver: a few learnt latents read the picture", images)
class Perceiver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.latents = Patches(), normal(6, 32)
        self.q, self.kv, self.block = nn.Linear(32, 32), nn.Linear(32, 64), PreNorm()
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(self.norm(self.patches(x))).chunk(2, -1)
        latents = self.latents.expand(len(x), -1, -1)
        latents = latents + attend(self.q(latents), k, v)
        return self.head(self.block(latents).mean(1))


@design("class token without a place of its own", images)
class Unplaced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = Patches(), normal(1, 1, 32)
        self.blocks, self.norm = nn.Sequential(PreNorm(), PreNorm()), nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x)], 1)
        return self.head(self.norm(self.blocks(x)[:, 0]))


# ---- recurrences ---------------------------------------------------------------------------------


@design("MinGRU: gates that do not look at the state", rows)
class MinGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.new, self.head = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        gate, new, h = self.gate(x).sigmoid(), self.new(x), x.new_zeros(len(x), 32)
        for z, entered in zip(gate.unbind(1), new.unbind(1), strict=True):
            h = (1 - z) * h + z * entered
        return self.head(h)


@design("diagonal state space: a state that is linear in its input", rows)
class StateSpace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 32), nn.Linear(32, 32)
        self.log_rate, self.skip = nn.Parameter(torch.linspace(-3, 0, 32)), nn.Linear(8, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        kept, h, read = (-self.log_rate.exp()).exp(), x.new_zeros(len(x), 32), []
        for step in self.enter(x).unbind(1):
            h = kept * h + (1 - kept) * step
            read.append(h)
        out = self.leave(torch.stack(read, 1)) + self.skip(x)
        return self.head(F.gelu(out).mean(1))


@design("IndRNN: each unit hears of itself alone", rows)
class IndRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(8, 32), nn.Linear(32, 10)
        self.own = nn.Parameter(torch.rand(32))

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 32)
        for step in self.enter(x).unbind(1):
            h = (step + self.own * h).relu()
        return self.head(h)


@design("LSTM with input and forget gate in one", rows)
class Coupled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.own, self.head = nn.Linear(8, 72), nn.Linear(24, 72), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 24)
        for step in x.unbind(1):
            forget, new, leave = (self.enter(step) + self.own(h)).chunk(3, 1)
            forget = forget.sigmoid()
            c = forget * c + (1 - forget) * new.tanh()
            h = leave.sigmoid() * c.tanh()
        return self.head(h)


@design(
    "show, attend and tell: first h and first c by two layers from one mean",
    captions,
    language_loss,
)
class ShowAndTell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.embed = nn.Conv2d(1, 24, 2, 2), tokens(24)
        self.first_h, self.first_c = nn.Linear(24, 32), nn.Linear(24, 32)
        self.rnn, self.head = nn.LSTM(24, 32, batch_first=True), nn.Linear(32, 18)

    def forward(self, picture: Tensor, ids: Tensor) -> Tensor:
        mean = self.stem(picture).relu().mean((2, 3))
        start = self.first_h(mean).tanh()[None], self.first_c(mean).tanh()[None]
        return self.head(self.rnn(self.embed(ids), start)[0])


@design("locked dropout: one mask for all steps of a sample", words)
class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = tokens(24), nn.GRU(24, 32, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.training:
            x = x * (torch.rand(len(x), 1, x.shape[2]) < 0.8) / 0.8
        return self.head(self.rnn(x)[0][:, -1])


@design("spiking neurons that are set back by the threshold", rows)
class Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        membrane, said = x.new_zeros(len(x), 64), x.new_zeros(len(x), 10)
        for _ in range(6):
            membrane = 0.9 * membrane + self.first(x.flatten(1))
            over = membrane - 1
            smooth = over.sigmoid()
            spikes = (over > 0).float() + smooth - smooth.detach()
            membrane = membrane - spikes.detach()
            said = said + self.second(spikes)
        return said


# ---- pictures ------------------------------------------------------------------------------------


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.depthwise, self.norm = (
            nn.Conv2d(width, width, 5, 1, 2, groups=width),
            nn.LayerNorm(width),
        )
        self.mlp, self.gamma = ffn(width), nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        branch = self.mlp(self.norm(self.depthwise(x).movedim(1, -1)))
        return x + (self.gamma * branch).movedim(-1, 1)


@design("ConvNeXt: branches scaled by a millionth at first", images)
class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 24, 2, 2)
        self.blocks, self.head = nn.Sequential(ConvNeXtBlock(), ConvNeXtBlock()), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Bottleneck(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        wide = 4 * width
        self.expand, self.norm1 = nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.depthwise = nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False)
        self.norm2 = nn.BatchNorm2d(wide)
        self.project, self.norm3 = nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu6(self.norm1(self.expand(x)))
        wide = F.relu6(self.norm2(self.depthwise(wide)))
        return x + self.norm3(self.project(wide))


@design("MobileNet v2: no activation behind the narrow convolution", images)
class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = (
            nn.Conv2d(1, 16, 3, 2, 1),
            nn.Sequential(Bottleneck(), Bottleneck()),
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class RepBlock(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(width, width, 3, 1, 1), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.norms
        return (one(self.wide(x)) + two(self.narrow(x)) + three(x)).relu()


@design("RepVGG: three branches of the same input, one of them a norm alone", images)
class RepVGG(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(1, 16, 3, 2, 1), nn.Sequential(RepBlock(), RepBlock())
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


@design("TridentNet: one convolution with three dilations", images)
class Trident(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shared = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = self.stem(x).relu(), self.shared.weight, self.shared.bias
        seen = [F.conv2d(x, weight, bias, padding=d, dilation=d).relu() for d in (1, 2, 3)]
        return self.head(self.norm(torch.stack(seen).mean(0)).mean((2, 3)))


@design("recurrent convolution: the same weights in three turns", images)
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forwards, self.again = (
            nn.Conv2d(1, 16, 3, 1, 1),
            nn.Conv2d(16, 16, 3, 1, 1, bias=False),
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        given = self.forwards(x)
        state = given.relu()
        for norm in self.norms:
            state = norm(given + self.again(state)).relu()
        return self.head(state.mean((2, 3)))


@design("BAM: one plus a gate", images)
class BAM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1)
        self.channel, self.place = perceptron(16, 4, 16), nn.Conv2d(16, 1, 3, padding=1)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        gate = (self.channel(x.mean((2, 3)))[:, :, None, None] + self.place(x)).sigmoid()
        return self.head(self.second(x * (1 + gate)).relu().mean((2, 3)))


@design("CReLU: activations of x and of -x beside each other", images)
class CReLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(self.second(torch.cat([x, -x], 1).relu()).relu().mean((2, 3)))


@design("blur before a stride, by a filter that does not learn", images)
class Blurred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        row = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("blur", (row[:, None] * row).expand(16, 1, 3, 3).clone())
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(self.first(x).relu(), self.blur, stride=2, padding=1, groups=16)
        return self.head(self.second(x).relu().mean((2, 3)))


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        mean, std = self.weight.mean((1, 2, 3), True), self.weight.std((1, 2, 3), keepdim=True)
        fan = self.weight[0].numel()
        weight = (self.weight - mean) / (std * fan**0.5 + 1e-4)
        return self._conv_forward(x, weight, self.bias)


class NormFree(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = (Standardised(width, width, 3, padding=1) for _ in range(2))
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        branch = self.second(1.7 * self.first(1.7 * x.relu()).relu())
        return x + 0.2 * self.gain * branch


@design("NFNet: standardised weights, no norm, and a gain that starts at zero", images)
class NFNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(1, 16, 3, 2, 1), nn.Sequential(NormFree(), NormFree())
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).relu().mean((2, 3)))


# ---- layers --------------------------------------------------------------------------------------


@design("highway: gates that let nearly nothing through at first", flat)
class Highway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, 48), nn.Linear(48, 10)
        self.new, self.gates = (
            nn.ModuleList(nn.Linear(48, 48) for _ in range(3)) for _ in range(2)
        )
        for gate in self.gates:
            nn.init.constant_(gate.bias, -3.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for new, gate in zip(self.new, self.gates, strict=True):
            through = gate(x).sigmoid()
            x = through * new(x).relu() + (1 - through) * x
        return self.head(x)


@design("ALBERT: a table of words of few features, and a linear layer to more", words)
class Factorised(Reader):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(tokens(8), nn.Linear(8, 32, bias=False))
        self.place = normal(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(ids) + self.place)).mean(1))


class DyT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.5))
        self.weight, self.bias = nn.Parameter(torch.ones(32)), nn.Parameter(torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        return (self.alpha * x).tanh() * self.weight + self.bias


class DyTBlock(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = DyT(), DyT()


@design("dynamic tanh in the place of norms", words)
class Normless(Reader):
    block = DyTBlock


class Modulated(nn.Module):
    """A block whose norms are shifted, scaled and gated by a condition, by nothing at first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(32, elementwise_affine=False) for _ in range(2))
        self.attn, self.mlp, self.by = SelfAttention(), ffn(32), zeroed(nn.Linear(16, 6 * 32))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        a, b, c, d, e, f = self.by(F.silu(condition))[:, None].chunk(6, -1)
        x = x + c * self.attn(self.norm1(x) * (1 + a) + b)
        return x + f * self.mlp(self.norm2(x) * (1 + d) + e)


@design("DiT: norms without weights, modulated by a condition that starts at zero", images)
class DiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.ink = Patches(), nn.Linear(1, 16)
        self.blocks = nn.ModuleList(Modulated() for _ in range(2))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        condition, x = self.ink(x.mean((2, 3))), self.patches(x)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x.mean(1))


@design("SIREN: sines of thirty times the sum", patients, F.mse_loss)
class Siren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(10, 32), nn.Linear(32, 32), nn.Linear(32, 1)
        nn.init.uniform_(self.first.weight, -0.1, 0.1)
        bound = math.sqrt(6 / 32) / 30
        nn.init.uniform_(self.second.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((30 * self.second((30 * self.first(x)).sin())).sin())


@design(
    "cross network: the input times a sum of itself, layer by layer",
    ratings,
    F.binary_cross_entropy_with_logits,
)
class Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(50, 12), nn.Embedding(40, 12)
        self.cross, self.head = nn.ModuleList(nn.Linear(24, 24) for _ in range(2)), nn.Linear(24, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        x = given = torch.cat([self.user(users), self.item(items)], 1)
        for layer in self.cross:
            x = given * layer(x) + x
        return self.head(x).squeeze(1)


# ---- experts and adapters ------------------------------------------------------------------------


@design("soft experts: slots that are means over words, and words that are means over slots", words)
class SoftExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.slots = PlacedTokens(32), nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(perceptron(32, 48, 32) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        normed = self.norm(x)
        scores = self.slots(normed)
        slots = (scores.softmax(1).transpose(1, 2) @ normed).unbind(1)
        made = torch.stack([e(s) for e, s in zip(self.experts, slots, strict=True)], 1)
        return self.head((x + scores.softmax(2) @ made).mean(1))


@design("expert choice: each expert takes the samples that it likes best", flat, batch=64)
class ExpertChoice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router, self.head = nn.Linear(64, 32), nn.Linear(32, 4), nn.Linear(32, 10)
        self.experts = nn.ModuleList(perceptron(32, 48, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        weight, chosen = self.router(x).softmax(-1).T.topk(max(len(x) // 2, 1), -1)
        made = torch.zeros_like(x)
        for expert, w, at in zip(self.experts, weight, chosen, strict=True):
            made = made.index_add(0, at, w[:, None] * expert(x[at]))
        return self.head(x + made)


@design("DeepSeek: sigmoids, a bias that only chooses, and one expert for all", flat, batch=64)
class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router, self.head = nn.Linear(64, 32), nn.Linear(32, 4), nn.Linear(32, 10)
        self.experts = nn.ModuleList(perceptron(32, 32, 32) for _ in range(4))
        self.common = perceptron(32, 32, 32)
        self.register_buffer("favour", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        scores = self.router(x).sigmoid()
        chosen = (scores.detach() + self.favour).topk(2, -1).indices
        weight = scores.gather(1, chosen)
        share = torch.zeros_like(scores).scatter(1, chosen, weight / weight.sum(1, keepdim=True))
        made = torch.stack([expert(x) for expert in self.experts], 1)
        return self.head(x + self.common(x) + (share[..., None] * made).sum(1))


@design("VeRA: random matrices that rest, and vectors that scale them", flat)
class VeRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = frozen(nn.Linear(64, 48)), nn.Linear(48, 10)
        self.down, self.up = (
            frozen(nn.Linear(64, 16, bias=False)),
            frozen(nn.Linear(16, 48, bias=False)),
        )
        self.d, self.b = nn.Parameter(torch.full((16,), 0.1)), nn.Parameter(torch.zeros(48))

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.base(x) + self.b * self.up(self.d * self.down(x))).relu())


@design("BitFit: biases alone are trained", words)
def bit_fit() -> nn.Module:
    model = Reader()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias") or name.startswith("head"))
    return model


class Prefixed(SelfAttention):
    def __init__(self) -> None:
        super().__init__()
        frozen(self)
        self.keys, self.values = normal(1, 4, 32), normal(1, 4, 32)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        k = torch.cat([self.keys.expand(len(x), -1, -1), k], 1)
        v = torch.cat([self.values.expand(len(x), -1, -1), v], 1)
        return self.proj(attend(q, k, v))


class PrefixedBlock(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        frozen(self)
        self.attn = Prefixed()


@design("prefix tuning: learnt keys and values before those of a frozen layer", words)
class Prefixes(Reader):
    block = PrefixedBlock

    def __init__(self) -> None:
        super().__init__()
        frozen(self.embed)


class Ternary(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.detach().abs().mean()
        whole = (self.weight.detach() / scale).round().clamp(-1, 1) * scale
        return F.linear(x, self.weight + (whole - self.weight).detach(), self.bias)


@design("weights of three values, with gradients as if they were their own", flat)
def ternary() -> nn.Module:
    return nn.Sequential(Ternary(64, 48), nn.ReLU(), Ternary(48, 10))


class Clipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.minimum(x.relu(), self.alpha)
        step = self.alpha.detach() / 15
        return y + ((y / step).round() * step - y).detach()


@design("PACT: activations of four bits, cut at a learnt height", flat)
def pact() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48), Clipped(), nn.Linear(48, 10))


# ---- graphs --------------------------------------------------------------------------------------


@design("SGC: three steps along the graph without a weight, and one linear layer", citations)
class SGC(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for _ in range(3):
            nodes = edges @ nodes
        return self.head(nodes)


@design("APPNP: answers that spread, and come back to where they began", citations)
class APPNP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(64, 32, 10)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = began = self.net(nodes)
        for _ in range(5):
            x = 0.9 * edges @ x + 0.1 * began
        return x


@design("GCNII: each layer is near to doing nothing, and hears of the first", citations)
class GCNII(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = began = self.stem(nodes).relu()
        for depth, layer in enumerate(self.layers, 1):
            beta, spread = math.log(0.5 / depth + 1), 0.9 * (edges @ x) + 0.1 * began
            x = ((1 - beta) * spread + beta * layer(spread)).relu()
        return self.head(x)


@design("PairNorm: nodes centred over the graph", citations)
class PairNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)

    def centred(self, x: Tensor) -> Tensor:
        x = x - x.mean(0)
        return x / (x.pow(2).sum(1).mean() + 1e-6).sqrt()

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.centred(edges @ self.first(nodes)).relu()
        return self.head(self.centred(edges @ self.second(x)).relu())


@design("EdgeConv: a point and what its neighbours are away from it", clouds)
class EdgeConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.head = perceptron(6, 32, 32), perceptron(32, 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        near = torch.cdist(x, x).topk(5, largest=False).indices
        there = x[torch.arange(len(x))[:, None, None], near]
        here = x[:, :, None].expand_as(there)
        return self.head(self.each(torch.cat([here, there - here], -1)).amax(2).relu().amax(1))
