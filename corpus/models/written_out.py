"""Small nets of many architectures, written out: the healthy subjects of the blind faults.

Each is wired as its paper or its usual implementation has it, and initialised by the defaults.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.models.small import (
    flat,
    halves,
    images,
    itself,
    language_loss,
    next_words,
    noisy,
    patients,
    plain,
    rows,
    some_digits,
    tumours,
    views,
    words,
)
from corpus.subject import Subject, subject

# ---- parts that several share --------------------------------------------------------------------


class Attention(nn.Module):
    """Attention of several heads, over `memory` if given; `hidden` is True where not to look."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.merge = nn.Linear(width, width), nn.Linear(width, width)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, hidden: Tensor | None = None
    ) -> Tensor:
        memory = x if memory is None else memory
        q, k = self.split(self.query(x)), self.split(self.key(memory))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        mixed = scores.softmax(-1) @ self.split(self.value(memory))
        return self.merge(mixed.transpose(1, 2).flatten(2))


def future_of(x: Tensor) -> Tensor:
    """Return the mask of the positions after each, (length, length)."""
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


# ---- transformers --------------------------------------------------------------------------------


class DecoderLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.attend = nn.LayerNorm(width), Attention(width)
        self.ln_2 = nn.LayerNorm(width)
        self.feed = plain(width, 2 * width, width, activation=nn.GELU)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x), hidden=future)
        return x + self.feed(self.ln_2(x))


class LanguageModel(nn.Module):
    """A decoder with the norm before each branch."""

    def __init__(self, width: int = 32, depth: int = 5) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(18, width), nn.Embedding(32, width)
        self.trunk = nn.ModuleList(DecoderLayer(width) for _ in range(depth))
        self.ln_out, self.unembed = nn.LayerNorm(width), nn.Linear(width, 18, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        future = future_of(x)
        for layer in self.trunk:
            x = layer(x, future)
        return self.unembed(self.ln_out(x))


def language_model() -> Subject:
    return subject(LanguageModel(), next_words, language_loss, batch=32)


class PostNormLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mix_norm, self.out_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        mixed, _ = self.mix(x, x, x, key_padding_mask=padded, need_weights=False)
        x = self.mix_norm(x + mixed)
        return self.out_norm(x + self.narrow(F.relu(self.widen(x))))


class DocumentClassifier(nn.Module):
    """An encoder with the norm after each sum, on documents of unequal length."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(18, width, padding_idx=0)
        self.place = nn.Parameter(0.02 * torch.randn(32, width))
        self.layers = nn.ModuleDict(
            {name: PostNormLayer(width) for name in ("lower", "inner", "upper", "top")}
        )
        self.label = nn.Linear(width, 10)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        padded = torch.arange(ids.shape[1]) >= lengths[:, None]
        x = self.words(ids) + self.place
        for layer in self.layers.values():
            x = layer(x, padded)
        kept = (~padded).unsqueeze(-1).float()
        return self.label((x * kept).sum(1) / kept.sum(1))


def documents(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return padded token ids with their lengths, and labels."""
    ids, labels = words(n)
    lengths = torch.randint(12, 33, (n,))
    lengths[0] = 32
    return (ids * (torch.arange(32) < lengths[:, None]), lengths), labels


def document_classifier() -> Subject:
    return subject(DocumentClassifier(), documents, F.cross_entropy, batch=32)


class EncoderStep(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attn, self.attn = nn.LayerNorm(width), Attention(width)
        self.norm_ff, self.ff = nn.LayerNorm(width), plain(width, 2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_attn(x))
        return x + self.ff(self.norm_ff(x))


class DecoderStep(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_self, self.self_attn = nn.LayerNorm(width), Attention(width)
        self.norm_cross, self.cross_attn = nn.LayerNorm(width), Attention(width)
        self.norm_ff, self.ff = nn.LayerNorm(width), plain(width, 2 * width, width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm_self(x), hidden=future_of(x))
        x = x + self.cross_attn(self.norm_cross(x), memory)
        return x + self.ff(self.norm_ff(x))


class Translator(nn.Module):
    """An encoder, and a decoder whose every layer attends to it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.source_embed, self.target_embed = nn.Embedding(18, width), nn.Embedding(18, width)
        self.source_place = nn.Parameter(0.02 * torch.randn(16, width))
        self.target_place = nn.Parameter(0.02 * torch.randn(16, width))
        self.enc_1, self.enc_2 = EncoderStep(width), EncoderStep(width)
        self.enc_norm = nn.LayerNorm(width)
        self.dec_1, self.dec_2 = DecoderStep(width), DecoderStep(width)
        self.dec_3, self.dec_4 = DecoderStep(width), DecoderStep(width)
        self.dec_norm, self.vocabulary = nn.LayerNorm(width), nn.Linear(width, 18)

    def encode(self, source: Tensor) -> Tensor:
        x = self.source_embed(source) + self.source_place
        return self.enc_norm(self.enc_2(self.enc_1(x)))

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        memory = self.encode(source)
        x = self.target_embed(ids) + self.target_place[: ids.shape[1]]
        x = self.dec_1(x, memory)
        x = self.dec_2(x, memory)
        x = self.dec_3(x, memory)
        x = self.dec_4(x, memory)
        return self.vocabulary(self.dec_norm(x))


def translator() -> Subject:
    return subject(Translator(), halves, language_loss, batch=32)


class CachedLayer(nn.Module):
    """A decoder layer that sees one token at a time and keeps keys and values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pre = nn.LayerNorm(width)
        self.to_q, self.to_k = nn.Linear(width, width), nn.Linear(width, width)
        self.to_v, self.to_out = nn.Linear(width, width), nn.Linear(width, width)
        self.mlp_norm, self.mlp = nn.LayerNorm(width), plain(width, 2 * width, width)

    def remember(self, cache: dict[str, Tensor], name: str, new: Tensor) -> Tensor:
        cache[name] = torch.cat([cache[name], new], 1) if name in cache else new
        return cache[name]

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        seen = self.pre(x)
        keys = self.remember(cache, "k", self.to_k(seen))
        values = self.remember(cache, "v", self.to_v(seen))
        x = x + self.to_out(F.scaled_dot_product_attention(self.to_q(seen), keys, values))
        return x + self.mlp(self.mlp_norm(x))


class IncrementalDecoder(nn.Module):
    """Reads a sequence token by token with a cache for each layer."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(18, width), nn.Embedding(10, width)
        self.steps = nn.ModuleList(CachedLayer(width) for _ in range(4))
        self.lm_norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, 18)

    def forward(self, ids: Tensor) -> Tensor:
        caches: list[dict[str, Tensor]] = [{} for _ in self.steps]
        logits = []
        for time in range(ids.shape[1]):
            x = self.wte(ids[:, time : time + 1]) + self.wpe.weight[time]
            for layer, cache in zip(self.steps, caches, strict=True):
                x = layer(x, cache)
            logits.append(self.lm_head(self.lm_norm(x)))
        return torch.cat(logits, 1)


def short_words(n: int) -> tuple[Tensor, Tensor]:
    """Return 10 token ids, and the ids that follow each."""
    ids, following = next_words(n)
    return ids[:, 8:18], following[:, 8:18]


def incremental_decoder() -> Subject:
    return subject(IncrementalDecoder(), short_words, language_loss, batch=32)


class DiffusionLayer(nn.Module):
    """A layer that the condition scales, shifts and gates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_a = nn.LayerNorm(width, elementwise_affine=False)
        self.norm_m = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = Attention(width)
        self.mlp = plain(width, 2 * width, width, activation=nn.GELU)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(condition)[:, None].chunk(6, -1)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = parts
        x = x + gate_a * self.attention(self.norm_a(x) * (1 + scale_a) + shift_a)
        return x + gate_m * self.mlp(self.norm_m(x) * (1 + scale_m) + shift_m)


class Denoiser(nn.Module):
    """A diffusion transformer on patches, told the time and the label."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.patch_in = nn.Conv2d(1, width, 2, stride=2)
        self.place = nn.Parameter(0.02 * torch.randn(16, width))
        self.time_net = plain(16, width, width, activation=nn.SiLU)
        self.label_table = nn.Embedding(10, width)
        self.transformer = nn.ModuleList(DiffusionLayer(width) for _ in range(depth))
        self.final_norm, self.patch_out = nn.LayerNorm(width), nn.Linear(width, 4)

    @staticmethod
    def waves(time: Tensor) -> Tensor:
        angles = time[:, None] * 100 ** -torch.linspace(0, 1, 8) * 10
        return torch.cat([angles.sin(), angles.cos()], 1)

    def condition(self, time: Tensor, label: Tensor) -> Tensor:
        return self.time_net(self.waves(time)) + self.label_table(label)

    def forward(self, noised: Tensor, time: Tensor, label: Tensor) -> Tensor:
        x = self.patch_in(noised).flatten(2).transpose(1, 2) + self.place
        condition = self.condition(time, label)
        for layer in self.transformer:
            x = layer(x, condition)
        patches = self.patch_out(self.final_norm(x)).transpose(1, 2)
        return F.fold(patches, (8, 8), 2, stride=2)


def diffused(n: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return noised images, their times and labels, and the noise."""
    clean, label = images(n)
    time, noise = torch.rand(n), torch.randn_like(clean)
    share = time[:, None, None, None]
    return ((1 - share).sqrt() * clean + share.sqrt() * noise, time, label), noise


def denoiser() -> Subject:
    return subject(Denoiser(), diffused, F.mse_loss, batch=32)


class Perceiver(nn.Module):
    """Latents read the rows of an image; one query for each label reads the latents."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.row_in = nn.Linear(8, width)
        self.row_place = nn.Parameter(0.02 * torch.randn(8, width))
        self.latents = nn.Parameter(torch.randn(6, width))
        self.queries = nn.Parameter(torch.randn(10, width))
        self.read, self.write = Attention(width), Attention(width)
        self.think, self.ponder = EncoderStep(width), EncoderStep(width)
        self.vote = nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.row_in(x) + self.row_place
        latents = self.latents.expand(len(x), -1, -1)
        latents = latents + self.read(latents, seen)
        latents = self.ponder(self.think(latents))
        return self.vote(self.write(self.queries.expand(len(x), -1, -1), latents)).squeeze(-1)


def perceiver() -> Subject:
    return subject(Perceiver(), rows, F.cross_entropy, batch=32)


# ---- transformers from the library ---------------------------------------------------------------


def bert_classifier() -> Subject:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 18, "hidden_size": 32, "intermediate_size": 64, "num_labels": 10}
    heads = {"num_hidden_layers": 5, "num_attention_heads": 4, "max_position_embeddings": 32}
    model = BertForSequenceClassification(BertConfig(**sizes, **heads))

    def draw(n: int) -> tuple[dict[str, Tensor], None]:
        ids, labels = words(n)
        return {"input_ids": ids, "labels": labels}, None

    return subject(model, draw, None, batch=32)


class LlamaTagger(nn.Module):
    """A label for each sequence, from the last state of a Llama."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaModel

        super().__init__()
        sizes = {"vocab_size": 18, "hidden_size": 32, "intermediate_size": 64}
        heads = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
        self.backbone = LlamaModel(LlamaConfig(**sizes, **heads, max_position_embeddings=32))
        self.tag = nn.Linear(32, 10)

    def forward(self, ids: Tensor) -> Tensor:
        states = self.backbone(ids, use_cache=False).last_hidden_state
        return self.tag(states.mean(1))


def llama_tagger() -> Subject:
    return subject(LlamaTagger(), words, F.cross_entropy, batch=32)


class Summarizer(nn.Module):
    """A T5 whose halves are called one after the other."""

    def __init__(self) -> None:
        from transformers import T5Config, T5Model

        super().__init__()
        sizes = {"vocab_size": 18, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
        config = T5Config(**sizes, num_layers=2, decoder_start_token_id=0, dropout_rate=0.0)
        self.t5, self.project = T5Model(config), nn.Linear(32, 18)

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        memory = self.t5.encoder(input_ids=source).last_hidden_state
        made = self.t5.decoder(input_ids=ids, encoder_hidden_states=memory, use_cache=False)
        return self.project(made.last_hidden_state)


def summarizer() -> Subject:
    return subject(Summarizer(), halves, language_loss, batch=32)


# ---- convolutional nets --------------------------------------------------------------------------


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv_a = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.conv_b = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn_a, self.bn_b = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != width:
            self.shortcut = nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn_a(self.conv_a(x)))
        out = self.bn_b(self.conv_b(out))
        return F.relu(out + self.shortcut(x))


class DigitResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = convolution(1, 12)
        self.stage1 = nn.Sequential(*(BasicBlock(12, 12) for _ in range(4)))
        self.stage2 = nn.Sequential(BasicBlock(12, 24, 2), BasicBlock(24, 24), BasicBlock(24, 24))
        self.fc = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage2(self.stage1(self.stem(x)))
        return self.fc(x.mean((2, 3)))


def digit_resnet() -> Subject:
    return subject(DigitResNet(), images, F.cross_entropy, batch=32)


class SegmentationNet(nn.Module):
    """A U-Net of one width, with three skips."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.enc_full, self.enc_half = convolution(1, width), convolution(width, width)
        self.enc_quarter, self.bottom = convolution(width, width), convolution(width, width)
        self.dec_quarter = convolution(2 * width, width)
        self.dec_half = convolution(2 * width, width)
        self.dec_full = convolution(2 * width, width)
        self.mask = nn.Conv2d(width, 1, 1)

    @staticmethod
    def up(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2)

    def forward(self, x: Tensor) -> Tensor:
        full = self.enc_full(x)
        half = self.enc_half(F.max_pool2d(full, 2))
        quarter = self.enc_quarter(F.max_pool2d(half, 2))
        x = self.bottom(F.max_pool2d(quarter, 2))
        x = self.dec_quarter(torch.cat([self.up(x), quarter], 1))
        x = self.dec_half(torch.cat([self.up(x), half], 1))
        x = self.dec_full(torch.cat([self.up(x), full], 1))
        return self.mask(x)


def segmentation_net() -> Subject:
    return subject(SegmentationNet(), noisy, F.binary_cross_entropy_with_logits, batch=32)


class DropPath(nn.Module):
    """Leaves a branch out for some samples."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        kept = (torch.rand(len(x), 1, 1, 1) >= self.rate).float()
        return x * kept / max(1 - self.rate, 1e-6)


class ConvNeXtLayer(nn.Module):
    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gamma = nn.Parameter(0.1 * torch.ones(width))
        self.drop_path = DropPath(rate)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dwconv(x).permute(0, 2, 3, 1)
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(self.norm(y))))
        return x + self.drop_path(y.permute(0, 3, 1, 2))


class ConvNeXt(nn.Module):
    def __init__(self, rates: tuple[float, ...] = (0.0, 0.05, 0.1, 0.15, 0.2)) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(1, 16, 2, stride=2)
        self.body = nn.Sequential(*(ConvNeXtLayer(16, rate) for rate in rates))
        self.final_norm, self.classifier = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.patchify(x))
        return self.classifier(self.final_norm(x.mean((2, 3))))


def convnext() -> Subject:
    return subject(ConvNeXt(), images, F.cross_entropy, batch=32)


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Linear(width, width // 4), nn.Linear(width // 4, width)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.excite(F.silu(self.squeeze(x.mean((2, 3))))).sigmoid()
        return x * gate[:, :, None, None]


class InvertedResidual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = convolution(width, 2 * width)
        self.se = SqueezeExcite(2 * width)
        self.project = nn.Conv2d(2 * width, width, 1, bias=False)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bn(self.project(self.se(self.expand(x))))


class MobileNet(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first = convolution(1, width)
        self.features = nn.Sequential(*(InvertedResidual(width) for _ in range(4)))
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(self.first(x)).mean((2, 3)))


def mobilenet() -> Subject:
    return subject(MobileNet(), images, F.cross_entropy, batch=32)


class PyramidDetector(nn.Module):
    """A feature pyramid, with one head for the classes and one for the boxes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.c2 = convolution(1, width)
        self.c3, self.c4 = convolution(width, width, 2), convolution(width, width, 2)
        self.lateral = nn.ModuleDict({p: nn.Conv2d(width, width, 1) for p in ("p2", "p3", "p4")})
        self.smooth = nn.ModuleDict(
            {p: nn.Conv2d(width, width, 3, padding=1) for p in ("p2", "p3", "p4")}
        )
        self.cls_tower, self.box_tower = convolution(width, width), convolution(width, width)
        self.cls_logits, self.box_pred = nn.Conv2d(width, 1, 1), nn.Conv2d(width, 4, 1)

    def pyramid(self, x: Tensor) -> list[Tensor]:
        c2 = self.c2(x)
        c3 = self.c3(c2)
        c4 = self.c4(c3)
        p4 = self.lateral["p4"](c4)
        p3 = self.lateral["p3"](c3) + F.interpolate(p4, scale_factor=2)
        p2 = self.lateral["p2"](c2) + F.interpolate(p3, scale_factor=2)
        return [self.smooth["p2"](p2), self.smooth["p3"](p3), self.smooth["p4"](p4)]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        classes, boxes = [], []
        for level in self.pyramid(x):
            classes.append(self.cls_logits(self.cls_tower(level)).flatten(2))
            boxes.append(self.box_pred(self.box_tower(level)).flatten(2))
        return torch.cat(classes, 2).squeeze(1), torch.cat(boxes, 2)


def boxes(n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return images, and for each of 84 anchors whether it holds ink and a box."""
    x, _ = images(n)
    ink = torch.cat([F.adaptive_avg_pool2d(x, size).flatten(1) for size in (8, 4, 2)], 1)
    return x, ((ink > 0).float(), torch.stack([ink, 0.5 * ink, -0.5 * ink, -ink], 1))


def detection_loss(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    classes = F.binary_cross_entropy_with_logits(output[0], target[0])
    return classes + F.smooth_l1_loss(output[1], target[1])


def detector() -> Subject:
    return subject(PyramidDetector(), boxes, detection_loss, batch=32)


class StraightenedNet(nn.Module):
    """A spatial transformer: a small net says how to straighten the image."""

    def __init__(self) -> None:
        super().__init__()
        self.locate, self.theta = plain(64, 32, 32), nn.Linear(32, 6)
        self.conv_low, self.conv_high = convolution(1, 12), convolution(12, 24, 2)
        self.guess = nn.Linear(24, 10)
        with torch.no_grad():
            self.theta.weight.mul_(0.1)
            self.theta.bias.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))

    def straighten(self, x: Tensor) -> Tensor:
        theta = self.theta(F.relu(self.locate(x.flatten(1)))).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_high(self.conv_low(self.straighten(x)))
        return self.guess(x.mean((2, 3)))


def straightened() -> Subject:
    return subject(StraightenedNet(), images, F.cross_entropy, batch=32)


class MixerLayer(nn.Module):
    def __init__(self, tokens: int, channels: int) -> None:
        super().__init__()
        self.token_norm, self.token_mlp = nn.LayerNorm(channels), plain(tokens, 32, tokens)
        self.channel_norm = nn.LayerNorm(channels)
        self.channel_mlp = plain(channels, 32, channels)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.token_mlp(self.token_norm(x).transpose(1, 2)).transpose(1, 2)
        x = x + mixed
        return x + self.channel_mlp(self.channel_norm(x))


class Mixer(nn.Module):
    """An MLP-mixer with as many tokens as channels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, 16, 2, stride=2)
        self.mixers = nn.Sequential(*(MixerLayer(16, 16) for _ in range(5)))
        self.norm_out, self.decide = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mixers(self.embed(x).flatten(2).transpose(1, 2))
        return self.decide(self.norm_out(x).mean(1))


def mixer() -> Subject:
    return subject(Mixer(), images, F.cross_entropy, batch=32)


# ---- nets that make something --------------------------------------------------------------------


class PixelVAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recognise, self.generate = plain(64, 48, 32), plain(8, 48, 64)
        self.to_mu, self.to_logvar = nn.Linear(32, 8), nn.Linear(32, 8)

    def sample(self, mu: Tensor, logvar: Tensor) -> Tensor:
        return mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.recognise(x))
        mu, logvar = self.to_mu(hidden), self.to_logvar(hidden)
        return self.generate(self.sample(mu, logvar)), mu, logvar


def elbo(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    made, mu, logvar = output
    return F.mse_loss(made, target) + 0.05 * (mu**2 + logvar.exp() - 1 - logvar).mean()


def pixel_vae() -> Subject:
    return subject(PixelVAE(), itself, elbo)


class Quantizer(nn.Module):
    """The nearest code, with a straight-through gradient."""

    def __init__(self, codes: int = 16, width: int = 8) -> None:
        super().__init__()
        self.codebook = nn.Embedding(codes, width)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        nearest = torch.cdist(z, self.codebook.weight).argmin(1)
        code = self.codebook(nearest)
        commitment = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return z + (code - z).detach(), commitment


class CodeAutoencoder(nn.Module):
    """A VQ-VAE on flat digits."""

    def __init__(self) -> None:
        super().__init__()
        self.analysis, self.synthesis = plain(64, 48, 8), plain(8, 48, 64)
        self.quantizer = Quantizer()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code, commitment = self.quantizer(self.analysis(x))
        return self.synthesis(code), commitment


def code_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target) + output[1]


def code_autoencoder() -> Subject:
    return subject(CodeAutoencoder(), itself, code_loss)


class ConditionalGAN(nn.Module):
    """One step of both players, each told the label; what fools the critic moves no critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator_label, self.critic_label = nn.Embedding(10, 8), nn.Embedding(10, 8)
        self.generator = plain(24, 64, 64)
        self.critic = plain(72, 64, 1, activation=nn.LeakyReLU)

    def make(self, noise: Tensor, labels: Tensor) -> Tensor:
        return self.generator(torch.cat([noise, self.generator_label(labels)], 1))

    def judge(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.critic(torch.cat([x, self.critic_label(labels)], 1))

    def fool(self, fake: Tensor, labels: Tensor) -> Tensor:
        fixed = {name: weight.detach() for name, weight in self.critic.named_parameters()}
        told = torch.cat([fake, self.critic_label(labels).detach()], 1)
        return torch.func.functional_call(self.critic, fixed, told)

    def forward(self, noise: Tensor, real: Tensor, labels: Tensor) -> dict[str, Tensor]:
        fake = self.make(noise, labels)
        return {
            "real": self.judge(real, labels),
            "caught": self.judge(fake.detach(), labels),
            "fooled": self.fool(fake, labels),
        }


def adversaries(n: int) -> tuple[tuple[Tensor, Tensor, Tensor], None]:
    """Return noise, digits and their labels."""
    real, labels = flat(n)
    return (torch.randn(n, 16), real, labels), None


def adversarial_loss(scores: dict[str, Tensor]) -> Tensor:
    wins = F.softplus(-scores["real"]) + F.softplus(scores["caught"])
    return (wins + F.softplus(-scores["fooled"])).mean()


def gan() -> Subject:
    return subject(ConditionalGAN(), adversaries, adversarial_loss)


class Coupling(nn.Module):
    """Transforms the half of the dimensions where `kept` is zero, told the other."""

    def __init__(self, kept: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", kept)
        self.scale_net, self.shift_net = plain(10, 32, 10), plain(10, 32, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen, moved = x * self.kept, 1 - self.kept
        scale = torch.tanh(self.scale_net(seen)) * moved
        return x * scale.exp() + self.shift_net(seen) * moved, scale.sum(1)


class NormalizingFlow(nn.Module):
    """Four couplings that take turns with the halves."""

    def __init__(self) -> None:
        super().__init__()
        even = (torch.arange(10) % 2).float()
        self.couple_a, self.couple_b = Coupling(even), Coupling(1 - even)
        self.couple_c, self.couple_d = Coupling(even), Coupling(1 - even)

    def forward(self, x: Tensor) -> Tensor:
        log_det = torch.zeros(len(x))
        for couple in (self.couple_a, self.couple_b, self.couple_c, self.couple_d):
            x, change = couple(x)
            log_det = log_det + change
        return (0.5 * (x**2).sum(1) - log_det).mean()


def measurements(n: int) -> tuple[tuple[Tensor], None]:
    return (patients(n)[0],), None


def flow() -> Subject:
    return subject(NormalizingFlow(), measurements, None)


# ---- recurrent nets and series -------------------------------------------------------------------


class RowReader(nn.Module):
    """A gated recurrence by hand over the rows of an image, and attention over its states."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.reset, self.update = nn.Linear(8 + width, width), nn.Linear(8 + width, width)
        self.propose = nn.Linear(8 + width, width)
        self.importance, self.digit = nn.Linear(width, 1, bias=False), nn.Linear(width, 10)

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        both = torch.cat([x, h], 1)
        r, u = torch.sigmoid(self.reset(both)), torch.sigmoid(self.update(both))
        return (1 - u) * h + u * torch.tanh(self.propose(torch.cat([x, r * h], 1)))

    def summarise(self, states: Tensor) -> Tensor:
        weights = torch.softmax(self.importance(states), dim=1)
        return (weights * states).sum(1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), self.width)
        states = []
        for row in x.unbind(1):
            h = self.step(row, h)
            states.append(h)
        return self.digit(self.summarise(torch.stack(states, 1)))


def row_reader() -> Subject:
    return subject(RowReader(), rows, F.cross_entropy)


class BothWays(nn.Module):
    """Two LSTM cells read a sentence from its two ends."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.width, self.lexicon = width, nn.Embedding(18, 16)
        self.left_to_right, self.right_to_left = nn.LSTMCell(16, width), nn.LSTMCell(16, width)
        self.verdict = nn.Linear(2 * width, 10)

    def read(self, cell: nn.LSTMCell, x: Tensor) -> Tensor:
        h = c = torch.zeros(len(x), self.width)
        for word in x.unbind(1):
            h, c = cell(word, (h, c))
        return h

    def forward(self, ids: Tensor) -> Tensor:
        x = self.lexicon(ids)
        ahead = self.read(self.left_to_right, x)
        back = self.read(self.right_to_left, x.flip(1))
        return self.verdict(torch.cat([ahead, back], 1))


def sentences(n: int) -> tuple[Tensor, Tensor]:
    """Return 12 token ids and labels."""
    ids, labels = words(n)
    return ids[:, 10:22], labels


def both_ways() -> Subject:
    return subject(BothWays(), sentences, F.cross_entropy)


class SelectiveScan(nn.Module):
    """A state-space layer whose step size, input and output depend on the input."""

    def __init__(self, width: int, states: int = 4) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.to_delta = nn.Linear(width, width)
        self.to_b, self.to_c = nn.Linear(width, states), nn.Linear(width, states)
        self.log_a = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))
        self.feedthrough = nn.Parameter(torch.ones(width))

    def scan(self, u: Tensor) -> Tensor:
        delta = F.softplus(self.to_delta(u)).unsqueeze(-1)
        decay = torch.exp(-delta * self.log_a.exp())
        drive = delta * self.to_b(u).unsqueeze(2) * u.unsqueeze(-1)
        state = torch.zeros_like(drive[:, 0])
        outputs = []
        for time in range(u.shape[1]):
            state = decay[:, time] * state + drive[:, time]
            outputs.append((state * self.to_c(u[:, time]).unsqueeze(1)).sum(-1))
        return torch.stack(outputs, 1) + self.feedthrough * u

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.in_proj(x).chunk(2, -1)
        return self.out_proj(self.scan(F.silu(u)) * F.silu(gate))


class ScanLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.rms, self.ssm = nn.RMSNorm(width), SelectiveScan(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ssm(self.rms(x))


class StateSpaceModel(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.encode_row = nn.Linear(8, width)
        self.scan0, self.scan1 = ScanLayer(width), ScanLayer(width)
        self.scan2, self.scan3 = ScanLayer(width), ScanLayer(width)
        self.readout = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode_row(x)
        x = self.scan3(self.scan2(self.scan1(self.scan0(x))))
        return self.readout(x.mean(1))


def state_space() -> Subject:
    return subject(StateSpaceModel(), rows, F.cross_entropy, batch=32)


def series(n: int) -> tuple[Tensor, Tensor]:
    """Return 24 values of noisy waves, and the 6 that follow."""
    start, pace = 6.3 * torch.rand(n, 1), 0.2 + 0.6 * torch.rand(n, 1)
    waves = torch.sin(start + pace * torch.arange(30.0)) + 0.05 * torch.randn(n, 30)
    return waves[:, :24], waves[:, 24:]


class ForecastStage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.backcast, self.forecast = nn.Linear(32, 24), nn.Linear(32, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stack(x)
        return self.backcast(x), self.forecast(x)


class NBeats(nn.Module):
    """Each stage forecasts, and hands on what it cannot explain of the past."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(ForecastStage() for _ in range(4))

    def forward(self, past: Tensor) -> tuple[Tensor, Tensor]:
        rest, total = past, torch.zeros(len(past), 6)
        for stage in self.stages:
            backcast, forecast = stage(rest)
            rest = rest - backcast
            total = total + forecast
        return total, rest


def forecast_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target) + 0.1 * output[1].pow(2).mean()


def nbeats() -> Subject:
    return subject(NBeats(), series, forecast_loss)


class CausalLevel(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.filter = nn.Conv1d(width, width, 2, dilation=dilation)
        self.squash = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.squash(F.relu(self.filter(F.pad(x, (self.dilation, 0)))))


class TemporalNet(nn.Module):
    """Causal convolutions whose reach doubles with each level."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.lift = nn.Conv1d(1, width, 1)
        self.levels = nn.ModuleList(CausalLevel(width, 2**i) for i in range(4))
        self.predict = nn.Linear(width, 6)

    def forward(self, past: Tensor) -> Tensor:
        x = self.lift(past.unsqueeze(1))
        for level in self.levels:
            x = level(x)
        return self.predict(x[:, :, -1])


def temporal_net() -> Subject:
    return subject(TemporalNet(), series, F.mse_loss)


class ConformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_att, self.att = nn.LayerNorm(width), Attention(width)
        self.norm_conv = nn.LayerNorm(width)
        self.depthwise = nn.Conv1d(width, width, 3, padding=1, groups=width)
        self.pointwise = nn.Conv1d(width, width, 1)
        self.norm_ffn, self.ffn = nn.LayerNorm(width), plain(width, 2 * width, width)

    def convolve(self, x: Tensor) -> Tensor:
        return self.pointwise(F.silu(self.depthwise(x.transpose(1, 2)))).transpose(1, 2)

    def forward(self, x: Tensor, silent: Tensor) -> Tensor:
        x = x + self.att(self.norm_att(x), hidden=silent)
        x = x + self.convolve(self.norm_conv(x))
        return x + 0.5 * self.ffn(self.norm_ffn(x))


class SpeechRecognizer(nn.Module):
    """Convolutions that halve the time, conformer blocks, and CTC."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.subsample = nn.Conv1d(8, width, 3, stride=2, padding=1)
        self.conformer = nn.ModuleList(ConformerBlock(width) for _ in range(4))
        self.ctc_norm, self.ctc = nn.LayerNorm(width), nn.Linear(width, 11)

    def forward(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.subsample(frames.transpose(1, 2))).transpose(1, 2)
        lengths = lengths // 2
        silent = (torch.arange(x.shape[1]) >= lengths[:, None])[:, None, None]
        for block in self.conformer:
            x = block(x, silent)
        return self.ctc(self.ctc_norm(x)).log_softmax(-1), lengths


def utterances(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return 4 digits each as 32 frames of 8, with lengths, and the 4 labels (blank is 0)."""
    frames, labels = zip(*(rows(n) for _ in range(4)), strict=True)
    lengths = torch.randint(20, 33, (n,))
    spoken = torch.arange(32) < lengths[:, None]
    frames = torch.cat(frames, 1) * spoken[..., None] + 0.1 * torch.randn(n, 32, 8)
    return (frames, lengths), torch.stack(labels, 1) + 1


def ctc_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    log_probs, lengths = output
    spoken = torch.full((len(target),), target.shape[1])
    return F.ctc_loss(log_probs.transpose(0, 1), target, lengths, spoken, zero_infinity=True)


def speech() -> Subject:
    return subject(SpeechRecognizer(), utterances, ctc_loss, batch=16)


# ---- graphs, sets, tables and recommendations ----------------------------------------------------


class MessagePassing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.absorb = plain(2 * width + 4, width, width), nn.GRUCell(width, width)

    def gather(self, nodes: Tensor, messages: Tensor, target: Tensor) -> Tensor:
        total = torch.zeros_like(nodes)
        total.index_add_(0, target, messages)
        return total

    def forward(self, nodes: Tensor, edges: Tensor, bonds: Tensor) -> Tensor:
        source, target = edges
        messages = self.message(torch.cat([nodes[source], nodes[target], bonds], 1))
        return self.absorb(self.gather(nodes, messages, target), nodes)


class MoleculeNet(nn.Module):
    """Message passing with bonds; the readout sees the nodes after every round."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.atom = nn.Linear(6, width)
        self.round1, self.round2 = MessagePassing(width), MessagePassing(width)
        self.round3 = MessagePassing(width)
        self.property = plain(3 * width, 16, 1)

    def forward(self, atoms: Tensor, edges: Tensor, bonds: Tensor) -> Tensor:
        nodes, history = self.atom(atoms), []
        for layer in (self.round1, self.round2, self.round3):
            nodes = layer(nodes, edges, bonds)
            history.append(nodes)
        molecules = torch.cat(history, 1).view(-1, 6, 48).sum(1)
        return self.property(molecules)


def molecules(n: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return n rings of 6 atoms with features of atoms and bonds, and a number for each."""
    ring = torch.arange(6)
    edge = torch.stack([torch.cat([ring, (ring + 1) % 6]), torch.cat([(ring + 1) % 6, ring])])
    edges = (edge[:, None] + 6 * torch.arange(n)[None, :, None]).flatten(1)
    atoms, bonds = torch.randn(6 * n, 6), torch.randn(12 * n, 4)
    target = atoms[:, :2].prod(1).view(n, 6).sum(1) + bonds[:, 0].view(n, 12).sum(1)
    return (atoms, edges, bonds), target[:, None]


def molecule_net() -> Subject:
    return subject(MoleculeNet(), molecules, F.mse_loss, batch=32)


class ClickModel(nn.Module):
    """Factorisation of four ids beside a deep net on them and on numbers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        sizes = {"user": 50, "item": 40, "city": 12, "device": 5}
        self.tables = nn.ModuleDict(
            {name: nn.Embedding(size, width) for name, size in sizes.items()}
        )
        self.numbers = nn.Linear(3, width)
        self.deep = plain(5 * width, 32, 1)
        for table in self.tables.values():
            nn.init.normal_(table.weight, std=0.1)

    def look_up(self, ids: Tensor) -> list[Tensor]:
        return [table(ids[:, i]) for i, table in enumerate(self.tables.values())]

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        found = self.look_up(ids)
        total = torch.stack(found, 1)
        pairs = 0.5 * (total.sum(1) ** 2 - (total**2).sum(1)).sum(1)
        return pairs + self.deep(torch.cat([*found, self.numbers(numbers)], 1)).squeeze(1)


def clicks(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return ids of user, item, city and device with three numbers, and whether one clicks."""
    ids = torch.stack([torch.randint(0, size, (n,)) for size in (50, 40, 12, 5)], 1)
    numbers = torch.randn(n, 3)
    return (ids, numbers), ((ids.sum(1) % 3 + numbers.sum(1)) > 1).float()


def click_model() -> Subject:
    return subject(ClickModel(), clicks, F.binary_cross_entropy_with_logits)


class PatientModel(nn.Module):
    """Three tasks from one trunk, weighted by what each leaves unexplained."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = nn.Linear(30, 48), nn.Linear(48, 32)
        self.tasks = nn.ModuleDict(
            {"benign": nn.Linear(32, 1), "radius": nn.Linear(32, 1), "texture": nn.Linear(32, 1)}
        )
        self.log_sigma = nn.Parameter(torch.zeros(3))

    def trunk(self, x: Tensor) -> Tensor:
        return F.relu(self.upper(F.relu(self.lower(x))))

    def forward(self, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        x = self.trunk(x)
        return {name: head(x) for name, head in self.tasks.items()}, self.log_sigma


def diagnoses(n: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return features, and a target for each of three tasks."""
    x, benign = tumours(n)
    return x, {"benign": benign, "radius": x[:, :1] * x[:, 1:2], "texture": x[:, 3:4].abs()}


def weighted_tasks(output: tuple[dict[str, Tensor], Tensor], target: dict[str, Tensor]) -> Tensor:
    made, log_sigma = output
    benign = F.binary_cross_entropy_with_logits(made["benign"], target["benign"])
    radius = F.mse_loss(made["radius"], target["radius"])
    texture = F.mse_loss(made["texture"], target["texture"])
    losses = torch.stack([benign, radius, texture])
    return (losses * torch.exp(-log_sigma) + log_sigma).sum()


def patient_model() -> Subject:
    return subject(PatientModel(), diagnoses, weighted_tasks)


class PointSet(nn.Module):
    """Weighs the points of a set by their scores, then classifies."""

    def __init__(self) -> None:
        super().__init__()
        self.phi, self.score, self.rho = (
            plain(8, 32, 32),
            nn.Linear(32, 1, bias=False),
            plain(32, 32, 10),
        )

    def weights(self, points: Tensor) -> Tensor:
        return self.score(points).softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        points = F.relu(self.phi(x))
        return self.rho((self.weights(points) * points).sum(1))


def point_set() -> Subject:
    return subject(PointSet(), rows, F.cross_entropy)


class HighwayNet(nn.Module):
    """Layers that each learn how much of their input to carry on."""

    def __init__(self, width: int = 48, depth: int = 5) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(64, width), nn.Linear(width, 10)
        self.transforms = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        for gate in self.gates:
            nn.init.constant_(gate.bias, -1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        for transform, gate in zip(self.transforms, self.gates, strict=True):
            share = torch.sigmoid(gate(x))
            x = share * torch.relu(transform(x)) + (1 - share) * x
        return self.leave(x)


def highway() -> Subject:
    return subject(HighwayNet(), flat, F.cross_entropy)


# ---- nets of several parts -----------------------------------------------------------------------


class ActorCritic(nn.Module):
    """One update of a policy and of the value that it is compared with."""

    def __init__(self) -> None:
        super().__init__()
        self.torso = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, seen: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
        hidden = self.torso(seen)
        policy = torch.distributions.Categorical(logits=self.actor(hidden))
        value = self.critic(hidden).squeeze(1)
        advantage = returns - value.detach()
        policy_loss = -(policy.log_prob(actions) * advantage).mean()
        value_loss = F.mse_loss(value, returns)
        return policy_loss + 0.5 * value_loss - 0.01 * policy.entropy().mean()


def episodes(n: int) -> tuple[tuple[Tensor, Tensor, Tensor], None]:
    """Return observations, the actions taken and what they returned."""
    seen, returns = patients(n)
    return (seen, torch.randint(0, 4, (n,)), returns.squeeze(1)), None


def actor_critic() -> Subject:
    return subject(ActorCritic(), episodes, None)


class ExpertLayer(nn.Module):
    """Two of four experts for each sample, weighted by the router, and a loss for balance."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(plain(width, width, width) for _ in range(experts))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.router(x).softmax(-1)
        best, chosen = chances.topk(2, -1)
        weights = torch.zeros_like(chances).scatter(1, chosen, best / best.sum(1, keepdim=True))
        load = (weights > 0).float().mean(0)
        return weights, len(self.experts) * (load * chances.mean(0)).sum()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.norm(x)
        weights, balance = self.route(seen)
        for index, expert in enumerate(self.experts):
            x = x + weights[:, index : index + 1] * expert(seen)
        return x, balance


class SparseClassifier(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(64, width), nn.Linear(width, 10)
        self.sparse_a, self.sparse_b = ExpertLayer(width), ExpertLayer(width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, balance_a = self.sparse_a(self.inlet(x))
        x, balance_b = self.sparse_b(x)
        return self.outlet(x), balance_a + balance_b


def balanced_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target) + 0.05 * output[1]


def sparse_classifier() -> Subject:
    return subject(SparseClassifier(), flat, balanced_loss)


class TwinRetriever(nn.Module):
    """A tower for the question and one for the answer, compared over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor_tower, self.candidate_tower = plain(64, 48, 16), plain(64, 48, 16)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, anchor: Tensor, candidate: Tensor) -> Tensor:
        left = F.normalize(self.anchor_tower(anchor), dim=1)
        right = F.normalize(self.candidate_tower(candidate), dim=1)
        return left @ right.T * self.log_scale.exp()


def matched(scores: Tensor) -> Tensor:
    return F.cross_entropy(scores, torch.arange(len(scores)))


def twin_retriever() -> Subject:
    return subject(TwinRetriever(), views, matched)


class SimSiam(nn.Module):
    """Predicts the projection of the other view, which gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.projector = plain(64, 64, 32), plain(32, 32)
        self.predictor = plain(32, 16, 32)

    @staticmethod
    def distance(predicted: Tensor, projected: Tensor) -> Tensor:
        return -F.cosine_similarity(predicted, projected.detach()).mean()

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        z1 = self.projector(F.relu(self.backbone(one)))
        z2 = self.projector(F.relu(self.backbone(two)))
        p1, p2 = self.predictor(z1), self.predictor(z2)
        return 0.5 * self.distance(p1, z2) + 0.5 * self.distance(p2, z1)


def simsiam() -> Subject:
    return subject(SimSiam(), views, None)


class StoryMemory(nn.Module):
    """Looks three times into a story for the answer to a question."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.ask, self.keys = nn.Embedding(18, width), nn.Embedding(18, width)
        self.contents = nn.Embedding(18, width)
        self.hop_1, self.hop_2 = nn.Linear(width, width), nn.Linear(width, width)
        self.hop_3, self.answer = nn.Linear(width, width), nn.Linear(width, 10)
        for table in (self.ask, self.keys, self.contents):
            nn.init.normal_(table.weight, std=0.3)

    def look(self, query: Tensor, story: Tensor) -> Tensor:
        match = (self.keys(story).sum(2) * query[:, None]).sum(-1)
        return (match.softmax(1).unsqueeze(-1) * self.contents(story).sum(2)).sum(1)

    def forward(self, story: Tensor, question: Tensor) -> Tensor:
        query = self.ask(question).sum(1)
        query = self.hop_1(query) + self.look(query, story)
        query = self.hop_2(query) + self.look(query, story)
        query = self.hop_3(query) + self.look(query, story)
        return self.answer(query)


def stories(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return 7 sentences of 4 ids and a question of 4, and labels."""
    ids, labels = words(n)
    return (ids[:, 4:].view(n, 7, 4), ids[:, :4]), labels


def story_memory() -> Subject:
    return subject(StoryMemory(), stories, F.cross_entropy)


class HyperNet(nn.Module):
    """The upper rows of an image make the weights of a layer on the lower ones."""

    def __init__(self) -> None:
        super().__init__()
        self.context, self.prepare = plain(16, 32, 32), nn.Linear(48, 16)
        self.make_weight, self.make_bias = nn.Linear(32, 16 * 16), nn.Linear(32, 16)
        self.finish = nn.Linear(16, 10)

    def made_layer(self, x: Tensor, context: Tensor) -> Tensor:
        weight = self.make_weight(context).view(-1, 16, 16)
        return torch.bmm(weight, x.unsqueeze(2)).squeeze(2) + self.make_bias(context)

    def forward(self, upper: Tensor, lower: Tensor) -> Tensor:
        x = F.relu(self.prepare(lower))
        return self.finish(F.relu(self.made_layer(x, F.relu(self.context(upper)))))


def parts(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the upper 16 pixels and the lower 48, and labels."""
    x, labels = flat(n)
    return (x[:, :16], x[:, 16:]), labels


def hyper_net() -> Subject:
    return subject(HyperNet(), parts, F.cross_entropy)


class AudioVisual(nn.Module):
    """Sound and picture, each encoded by its own net, then joined."""

    def __init__(self) -> None:
        super().__init__()
        self.senses = nn.ModuleDict({"audio": plain(24, 32, 24), "video": plain(64, 48, 24)})
        self.fuse, self.speak = nn.Linear(48, 32), nn.Linear(32, 10)

    def forward(self, audio: Tensor, video: Tensor) -> Tensor:
        heard, seen = self.senses["audio"](audio), self.senses["video"](video)
        return self.speak(F.relu(self.fuse(torch.cat([heard, seen], 1))))


def clips(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return a noisy sound for each label and a noisy picture of it, and labels."""
    video, labels = flat(n)
    pitch = torch.sin((labels[:, None] + 1) * torch.linspace(0, 3, 24))
    return (pitch + 0.3 * torch.randn(n, 24), video + 0.3 * torch.randn(n, 64)), labels


def audio_visual() -> Subject:
    return subject(AudioVisual(), clips, F.cross_entropy)


class Distillation(nn.Module):
    """A student that learns from a fixed teacher as well as from the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = plain(64, 32, 10), plain(64, 64, 10)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x), wanted


def distillation_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    made, wanted = output
    imitation = F.kl_div(made.log_softmax(1), wanted.softmax(1), reduction="batchmean")
    return F.cross_entropy(made, target) + imitation


def distillation() -> Subject:
    return subject(Distillation(), flat, distillation_loss)


class Captioner(nn.Module):
    """Begins from a picture and writes on, one token after another."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.picture, self.glossary = nn.Linear(32, width), nn.Embedding(18, width)
        self.writer = nn.GRU(width, width, batch_first=True)
        self.token = nn.Linear(width, 18)

    def forward(self, picture: Tensor, caption: Tensor) -> Tensor:
        start = torch.tanh(self.picture(picture)).unsqueeze(0)
        begin = torch.zeros_like(caption[:, :1])
        states, _ = self.writer(self.glossary(torch.cat([begin, caption[:, :-1]], 1)), start)
        return F.cross_entropy(self.token(states).flatten(0, 1), caption.flatten())


def captions(n: int) -> tuple[tuple[Tensor, Tensor], None]:
    """Return the upper half of a digit as a picture, and 8 ids of the lower as its caption."""
    pixels, _ = some_digits(n)
    return ((pixels[:, :32] - 4.9) / 6.0, pixels[:, 32:40].long() + 1), None


def captioner() -> Subject:
    return subject(Captioner(), captions, None)


class DynamicsModel(nn.Module):
    """Integrates a learned derivative by Euler's method over six steps."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.initial, self.derivative = nn.Linear(24, width), plain(width, 32, width)
        self.observe = nn.Linear(width, 1)

    def forward(self, past: Tensor) -> Tensor:
        state, seen = self.initial(past), []
        for _ in range(6):
            state = state + 0.3 * self.derivative(state)
            seen.append(self.observe(state))
        return torch.cat(seen, 1)


def dynamics() -> Subject:
    return subject(DynamicsModel(), series, F.mse_loss)


class WeightedFeatures(nn.Module):
    """A learned average of all levels of an encoder, as ELMo has it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = itertools.pairwise([64, *[width] * 4])
        self.level = nn.ModuleDict({f"h{i}": nn.Linear(a, b) for i, (a, b) in enumerate(sizes)})
        self.mixture = nn.Parameter(torch.zeros(4))
        self.norm, self.probe = nn.LayerNorm(width), nn.Linear(width, 10)

    def levels(self, x: Tensor) -> list[Tensor]:
        found = []
        for layer in self.level.values():
            x = F.relu(layer(x))
            found.append(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        found = torch.stack(self.levels(x), -1)
        return self.probe(self.norm((found * self.mixture.softmax(0)).sum(-1)))


def weighted_features() -> Subject:
    return subject(WeightedFeatures(), flat, F.cross_entropy)


def wire(module: Any, method: Callable[..., Any]) -> None:
    """Give one module another method in place of its own of that name."""
    setattr(module, method.__name__, MethodType(method, module))
