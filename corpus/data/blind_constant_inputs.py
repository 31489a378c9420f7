"""Inputs that make no difference, queries that never change, outputs that nobody reads."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import (
    Patches,
    PreNorm,
    SelfAttention,
    SmallLM,
    attend,
    captions,
    frozen,
    lookalikes_of,
    normal,
    perceptron,
    tokens,
    zeroed,
)
from corpus.models.small import images, language_loss, next_words, words

SHELF = Shelf("data", "blind")
lookalike = lookalikes_of(SHELF)


def scenes(n: int) -> tuple[Tensor, Tensor]:
    """Return images with two bright squares, and their centres and classes, (n, 2, 3)."""
    x, truth = 0.1 * torch.randn(n, 1, 8, 8), torch.zeros(n, 2, 3)
    for i, j in itertools.product(range(n), range(2)):
        row, column, kind = (int(torch.randint(0, k, ())) for k in (6, 6, 2))
        x[i, 0, row : row + 2, column : column + 2] = 1.0 + kind
        truth[i, j] = torch.tensor([row / 6, column / 6, kind])
    return x, truth


def matched(out: dict[str, Tensor], truth: Tensor) -> Tensor:
    loss = torch.zeros(())
    for logits, boxes, objects in zip(out["logits"], out["boxes"], truth, strict=True):
        with torch.no_grad():
            cost = torch.cdist(boxes, objects[:, :2]) - logits.softmax(-1)[:, objects[:, 2].long()]
        row, column = (torch.as_tensor(i) for i in linear_sum_assignment(cost.numpy()))
        kinds = torch.full((len(logits),), 2)
        kinds[row] = objects[column, 2].long()
        loss = loss + F.cross_entropy(logits, kinds, weight=torch.tensor([1.0, 1.0, 0.1]))
        loss = loss + 5 * F.l1_loss(boxes[row], objects[column, :2])
    return loss / len(truth)


@lookalike(
    "DETR: object queries, a decoder that starts from zeros, Hungarian matching",
    scenes,
    matched,
    16,
)
class DETR(nn.Module):
    def __init__(self, width: int = 32, queries: int = 6) -> None:
        super().__init__()
        self.backbone = Patches(width)
        self.transformer = nn.Transformer(width, 4, 1, 2, 64, dropout=0.0, batch_first=True)
        self.query_embed = nn.Embedding(queries, width)
        self.class_embed, self.bbox_embed = nn.Linear(width, 3), perceptron(width, width, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        memory = self.transformer.encoder(self.backbone(x))
        queries = self.query_embed.weight.expand(len(x), -1, -1)
        h = self.transformer.decoder(torch.zeros_like(queries) + queries, memory)
        return {"logits": self.class_embed(h), "boxes": self.bbox_embed(h).sigmoid()}


@lookalike("Perceiver: learned latents read the input, Fourier positions in a buffer", images)
class Perceiver(nn.Module):
    def __init__(self, width: int = 32, latents: int = 6) -> None:
        super().__init__()
        at = torch.cartesian_prod(torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8))
        angles = (at[..., None] * math.pi * torch.tensor([1.0, 2.0, 4.0])).flatten(1)
        self.register_buffer("fourier", torch.cat([at, angles.sin(), angles.cos()], 1))
        self.array, self.to_kv = normal(latents, width, std=0.2), nn.Linear(15, 2 * width)
        self.to_q, self.norm, self.think = (
            nn.Linear(width, width),
            nn.LayerNorm(width),
            PreNorm(width),
        )
        self.decode = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        bytes_ = torch.cat([x.flatten(2).transpose(1, 2), self.fourier.expand(len(x), -1, -1)], -1)
        k, v = self.to_kv(bytes_).chunk(2, -1)
        z = self.array.expand(len(x), -1, -1)
        for _ in range(2):
            z = self.think(z + attend(self.to_q(self.norm(z)), k, v))
        return self.decode(z.mean(1))


@lookalike("register tokens are thrown away, attention pools with one learned query", images)
class Registers(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokenizer, self.reg_token = Patches(width), normal(1, 3, width)
        self.body, self.norm = nn.Sequential(PreNorm(width), PreNorm(width)), nn.LayerNorm(width)
        self.probe = normal(1, 1, width, std=0.2)
        self.attention_pool, self.fc = (
            nn.MultiheadAttention(width, 4, batch_first=True),
            nn.Linear(width, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        x = self.body(torch.cat([self.reg_token.expand(n, -1, -1), self.tokenizer(x)], 1))
        x = self.norm(x[:, self.reg_token.shape[1] :])
        return self.fc(self.attention_pool(self.probe.expand(n, -1, -1), x, x)[0].squeeze(1))


def with_masks(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return what a tokenizer returns, and labels of tokens of which 15% count."""
    ids, _ = words(n)
    labels = torch.where(torch.rand(ids.shape) < 0.15, ids, -100)
    ids = ids.masked_fill(labels >= 0, 18)
    extra = {"attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    return {"input_ids": ids, **extra}, labels


class MaskedHead(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        width = embedding.embedding_dim
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.decoder = nn.Linear(width, embedding.num_embeddings)
        self.decoder.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.transform(x))


@lookalike(
    "masked language model on a backbone whose pooler nobody uses",
    with_masks,
    lambda out, y: F.cross_entropy(out["logits"].flatten(0, 1), y.flatten()),
    16,
)
class MaskedLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        sizes = {"vocab_size": 19, "hidden_size": 32, "intermediate_size": 64}
        self.bert = BertModel(BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=4))
        self.cls = MaskedHead(self.bert.embeddings.word_embeddings)

    def forward(self, **inputs: Tensor) -> dict[str, Any]:
        out = self.bert(**inputs, output_hidden_states=True)
        return {"logits": self.cls(out.last_hidden_state), "hidden_states": out.hidden_states}


def own_labels(n: int) -> tuple[dict[str, Tensor], None]:
    """Return token ids, which are their own labels, and a mask of ones."""
    ids, _ = words(n)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}, None


@lookalike(
    "GPT-2 from transformers with labels and a cache that nobody reads", own_labels, None, 16
)
def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 18, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends, use_cache=True))


@lookalike(
    "LLaVA: only the projector between two frozen models learns", captions, language_loss, 16
)
class VisionLanguage(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.vision_tower = frozen(nn.Sequential(Patches(24), PreNorm(24)))
        self.mm_projector, self.language_model = (
            perceptron(24, width, width, act=nn.GELU),
            frozen(SmallLM(width)),
        )

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        with torch.no_grad():
            seen = self.vision_tower(pixels)
        x = torch.cat([self.mm_projector(seen), self.language_model.embed(ids)], 1)
        return self.language_model.lm_head(self.language_model.trunk(x)[:, seen.shape[1] :])


@lookalike(
    "Medusa: heads for later tokens on a frozen model, their residuals at zero",
    next_words,
    lambda heads, y: sum(language_loss(h[:, : -i - 1], y[:, i + 1 :]) for i, h in enumerate(heads)),
    16,
)
class Medusa(nn.Module):
    def __init__(self, width: int = 32, heads: int = 3) -> None:
        super().__init__()
        self.base = frozen(SmallLM(width))
        self.lift = nn.ModuleList(zeroed(nn.Linear(width, width)) for _ in range(heads))
        self.heads = nn.ModuleList(nn.Linear(width, 18, bias=False) for _ in range(heads))
        for head in self.heads:
            head.weight.data.copy_(self.base.lm_head.weight)

    def forward(self, ids: Tensor) -> list[Tensor]:
        with torch.no_grad():
            h = self.base.trunk(self.base.embed(ids))
        return [head(h + F.silu(lift(h))) for lift, head in zip(self.lift, self.heads, strict=True)]


@lookalike(
    "multi-token prediction: the second module shares embedding and head",
    next_words,
    lambda out, y: language_loss(out[0], y) + 0.3 * language_loss(out[1], y[:, 1:]),
    16,
)
class MultiToken(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.main = SmallLM(width)
        self.norm_h, self.norm_e = nn.RMSNorm(width), nn.RMSNorm(width)
        self.eh_proj, self.block = nn.Linear(2 * width, width), PreNorm(width, causal=True)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        h = self.main.trunk(self.main.embed(ids))
        ahead = self.norm_e(self.main.wte(ids[:, 1:]))
        x = self.block(self.eh_proj(torch.cat([self.norm_h(h[:, :-1]), ahead], -1)))
        return self.main.lm_head(h), self.main.lm_head(self.main.ln_f(x))


def journeys(n: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return returns to go, states and actions of 6 steps, and the actions again."""
    states = torch.randn(n, 6, 4)
    actions = states[..., :2].sum(-1).gt(0).long()
    togo = states[..., 2].flip(1).cumsum(1).flip(1)
    return (togo[..., None], states, actions), actions


@lookalike(
    "decision transformer: predictions at two of three tokens are thrown away",
    journeys,
    language_loss,
)
class DecisionTransformer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed_return, self.embed_state = nn.Linear(1, width), nn.Linear(4, width)
        self.embed_action, self.embed_time = nn.Embedding(2, width), nn.Embedding(6, width)
        self.embed_ln, self.core = (
            nn.LayerNorm(width),
            nn.Sequential(PreNorm(width, causal=True), PreNorm(width, causal=True)),
        )
        self.predict_action = nn.Linear(width, 2)

    def forward(self, togo: Tensor, states: Tensor, actions: Tensor) -> Tensor:
        time = self.embed_time(torch.arange(6))
        parts = (self.embed_return(togo), self.embed_state(states), self.embed_action(actions))
        x = torch.stack([part + time for part in parts], 2).flatten(1, 2)
        return self.predict_action(self.core(self.embed_ln(x))[:, 1::3])


@lookalike("T5: one relative bias, held by the first layer, serves all", words)
class SharedBias(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.shared, self.relative_attention_bias = tokens(width), nn.Embedding(16, 4)
        self.sa = nn.ModuleList(SelfAttention(width) for _ in range(depth))
        self.ff = nn.ModuleList(perceptron(width, 64, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * depth + 1))
        self.head = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x, at = self.shared(ids), torch.arange(ids.shape[1])
        gap = (at[None] - at[:, None]).clamp(-8, 7) + 8
        bias = self.relative_attention_bias(gap).permute(2, 0, 1)
        for i, (sa, ff) in enumerate(zip(self.sa, self.ff, strict=True)):
            x = x + sa(self.norms[2 * i](x), bias)
            x = x + ff(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x).mean(1))


def clicks(n: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return numbers, categories and bags of ids, and whether one clicked."""
    dense, kinds, bags = (
        torch.randn(n, 5),
        torch.randint(0, 200, (n, 3)),
        torch.randint(0, 500, (n, 4)),
    )
    return (dense, kinds, bags), ((kinds[:, 0] % 3 == 0) ^ (dense[:, 0] > 0)).float()


@lookalike(
    "DLRM: large tables with sparse gradients", clicks, F.binary_cross_entropy_with_logits, 64
)
class DLRM(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.bot, self.top = perceptron(5, 32, width), perceptron(10 + width, 32, 1)
        self.tables = nn.ModuleList(nn.Embedding(200, width, sparse=True) for _ in range(3))
        self.history = nn.EmbeddingBag(500, width, mode="sum", sparse=True)
        for table in (*self.tables, self.history):
            nn.init.uniform_(table.weight, -0.1, 0.1)

    def forward(self, dense: Tensor, kinds: Tensor, bags: Tensor) -> Tensor:
        x = self.bot(dense)
        looked_up = [table(k) for table, k in zip(self.tables, kinds.T, strict=True)]
        z = torch.stack([x, *looked_up, self.history(bags)], 1)
        i, j = torch.triu_indices(5, 5, 1)
        return self.top(torch.cat([x, (z @ z.transpose(1, 2))[:, i, j]], 1)).squeeze(1)
