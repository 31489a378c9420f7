"""Parts that this step leaves idle, and layers that run several times in a row."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import (
    Adapter,
    PlacedTokens,
    PreNorm,
    Rotary,
    SmallLM,
    attend,
    ffn,
    lookalikes_of,
    normal,
    perceptron,
    tokens,
)
from corpus.models.small import flat, images, language_loss, next_words, rows, tumours, words

SHELF = Shelf("wiring", "blind")
lookalike = lookalikes_of(SHELF)


class SwitchLayer(nn.Module):
    """The tokens of an expert beyond its share are dropped; many experts stay idle."""

    def __init__(self, width: int, experts: int, capacity: float = 1.25) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(perceptron(width, 2 * width, width) for _ in range(experts))
        self.capacity = capacity

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.gate(x).softmax(-1)
        best, chosen = p.max(-1)
        out, room = torch.zeros_like(x), max(1, int(self.capacity * len(x) / len(self.experts)))
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero().squeeze(1)[:room]
            if len(mine):
                out[mine] = best[mine, None] * expert(x[mine])
        load = F.one_hot(chosen, len(self.experts)).float().mean(0)
        return out, len(self.experts) * (load * p.mean(0)).sum()


@lookalike(
    "switch layer: 24 experts for 32 samples, and a load loss",
    flat,
    lambda out, y: F.cross_entropy(out[0], y) + 0.01 * out[1],
)
class SwitchNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.norm = nn.Linear(64, 24), nn.LayerNorm(24)
        self.switch, self.predict = SwitchLayer(24, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.lift(x)
        more, load = self.switch(self.norm(x))
        return self.predict(x + more), load


class SharedExpertMoE(nn.Module):
    """Top 2 of 6, a shared expert, and balance by a bias that no gradient moves."""

    def __init__(self, width: int, experts: int = 6) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.register_buffer("balance", torch.zeros(experts))
        self.routed = nn.ModuleList(perceptron(width, width, width) for _ in range(experts))
        self.shared = perceptron(width, width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        score = self.router(rows).sigmoid()
        chosen = (score + self.balance).topk(2).indices
        weight = score.gather(1, chosen)
        weight = weight / weight.sum(1, keepdim=True)
        out = self.shared(rows)
        for i, expert in enumerate(self.routed):
            row, place = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(rows[row]) * weight[row, place, None])
        with torch.no_grad():
            load = torch.bincount(chosen.flatten(), minlength=len(self.balance)).float()
            self.balance += 1e-3 * (load.mean() - load).sign()
        return out.view_as(x)


@lookalike("a dense layer first, then mixtures with a shared expert", next_words, language_loss, 16)
class DenseThenSparse(nn.Module):
    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embed_tokens, self.rope = tokens(width), Rotary(8)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "input_norm": nn.RMSNorm(width),
                    "qkv": nn.Linear(width, 3 * width, bias=False),
                    "o_proj": nn.Linear(width, width, bias=False),
                    "post_norm": nn.RMSNorm(width),
                    "mlp": ffn(width) if i == 0 else SharedExpertMoE(width),
                }
            )
            for i in range(layers)
        )
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, 18, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["input_norm"](x)).chunk(3, -1)
            x = x + layer["o_proj"](attend(self.rope(q), self.rope(k), v, is_causal=True))
            x = x + layer["mlp"](layer["post_norm"](x))
        return self.output(self.norm(x))


@lookalike(
    "early exits with a loss at each",
    rows,
    lambda exits, y: sum(
        w * F.cross_entropy(e, y) for w, e in zip((0.3, 0.3, 1), exits.values(), strict=True)
    ),
)
class EarlyExit(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.proj, self.place = nn.Linear(8, width), normal(8, width)
        self.stages = nn.ModuleDict({s: PreNorm(width) for s in ("shallow", "middle", "deep")})
        self.exits = nn.ModuleDict({s: nn.Linear(width, 10) for s in self.stages})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x, out = self.proj(x) + self.place, {}
        for name, stage in self.stages.items():
            x = stage(x)
            out[name] = self.exits[name](x.mean(1))
        return out


@lookalike("stochastic depth: whole blocks are skipped in this step", images)
class StochasticDepth(nn.Module):
    def __init__(self, width: int = 12, depth: int = 6) -> None:
        super().__init__()
        self.entry = nn.Conv2d(1, width, 3, padding=1)
        self.residuals = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(depth)
        )
        self.survival, self.fc = torch.linspace(1, 0.5, depth).tolist(), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x).relu()
        for residual, p in zip(self.residuals, self.survival, strict=True):
            if not self.training:
                x = F.relu(x + p * residual(x))
            elif torch.rand(()) < p:
                x = F.relu(x + residual(x))
        return self.fc(x.mean((2, 3)))


@lookalike("LayerDrop in an encoder", words)
class LayerDropEncoder(nn.Module):
    def __init__(self, width: int = 32, p: float = 0.3) -> None:
        super().__init__()
        self.emb, self.p = PlacedTokens(width), p
        self.enc = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 64, batch_first=True, norm_first=True)
            for _ in range(5)
        )
        self.norm, self.cls = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.enc:
            if self.training and torch.rand(()) < self.p:
                continue
            x = layer(x)
        return self.cls(self.norm(x).mean(1))


@lookalike("ALBERT: one layer called six times, embeddings factorised", words)
class Albert(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(18, 8), nn.Embedding(32, 8)
        self.token_type_embeddings = nn.Embedding(2, 8)
        self.embedding_hidden_mapping = nn.Linear(8, width)
        self.albert_layer = nn.TransformerEncoderLayer(width, 4, 64, 0.0, "gelu", batch_first=True)
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(ids)
        x = self.word_embeddings(ids) + self.position_embeddings(torch.arange(ids.shape[1]))
        x = self.embedding_hidden_mapping(x + self.token_type_embeddings(token_type_ids))
        for _ in range(6):
            x = self.albert_layer(x)
        return self.classifier(self.pooler(x[:, 0]).tanh())


@lookalike(
    "universal transformer with adaptive halting",
    words,
    lambda out, y: F.cross_entropy(out[0], y) + 0.01 * out[1],
)
class UniversalTransformer(nn.Module):
    def __init__(self, width: int = 32, steps: int = 4) -> None:
        super().__init__()
        self.embed, self.shared = PlacedTokens(width), PreNorm(width)
        self.when, self.halt = normal(steps, width), nn.Linear(width, 1)
        nn.init.ones_(self.halt.bias)
        self.answer = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        left, total = torch.ones(ids.shape), torch.zeros_like(x)
        ponder = torch.zeros(())
        for i, when in enumerate(self.when):
            x = self.shared(x + when)
            p = self.halt(x).sigmoid().squeeze(-1) if i < len(self.when) - 1 else torch.ones(())
            total, ponder = total + (left * p)[..., None] * x, ponder + left.mean()
            left = left * (1 - p)
        return self.answer(total.mean(1)), ponder


@lookalike("MobileLLM: each layer runs twice in a row", next_words, language_loss, 16)
class PairSharing(SmallLM):
    def __init__(self) -> None:
        super().__init__(depth=2)
        self.lm_head.weight = self.wte.weight

    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(layer(x))
        return self.ln_f(x)


@lookalike("supernet: one path of the search space runs in this step", images)
class Supernet(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)

        def choices() -> nn.ModuleDict:
            sizes = {"conv3": 3, "conv5": 5, "conv1": 1}
            ops = {n: nn.Conv2d(width, width, k, padding=k // 2) for n, k in sizes.items()}
            return nn.ModuleDict({**ops, "skip": nn.Identity()})

        self.cells = nn.ModuleList(choices() for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width, affine=False) for _ in range(4))
        self.fc = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for cell, norm in zip(self.cells, self.norms, strict=True):
            name = list(cell)[int(torch.randint(len(cell), ()))]
            x = F.relu(norm(cell[name](x)))
        return self.fc(x.mean((2, 3)))


@lookalike("mixture of depths: half of the tokens pass a block by", next_words, language_loss, 16)
class MixtureOfDepths(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tok, self.pos = tokens(width), normal(32, width)
        self.full, self.last = PreNorm(width, causal=True), PreNorm(width, causal=True)
        self.router, self.routed = nn.Linear(width, 1), PreNorm(width, causal=True)
        self.unembed = nn.Linear(width, 18)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.full(self.tok(ids) + self.pos[: ids.shape[1]])
        score = self.router(x).squeeze(-1)
        chosen = score.topk(ids.shape[1] // 2).indices.sort(-1).values
        index = chosen[..., None].expand(-1, -1, x.shape[-1])
        taken = x.gather(1, index)
        change = (self.routed(taken) - taken) * score.gather(1, chosen).sigmoid()[..., None]
        return self.unembed(self.last(x.scatter_add(1, index, change)))


def german(n: int) -> tuple[dict[str, Any], Tensor]:
    """Return token ids in one language, and labels."""
    ids, labels = words(n)
    return {"ids": ids, "language": "de"}, labels


@lookalike("adapters by language, and the batch is in one language", german)
class LanguageAdapters(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embeddings, self.layer = PlacedTokens(width), PreNorm(width)
        self.by_language = nn.ModuleDict({s: Adapter(width) for s in ("en", "de", "fr", "sw")})
        self.classifier = nn.Linear(width, 10)

    def forward(self, ids: Tensor, language: str = "en") -> Tensor:
        x = self.by_language[language](self.layer(self.embeddings(ids)))
        return self.classifier(x.mean(1))


def sparse_assays(n: int) -> tuple[Tensor, Tensor]:
    """Return features, and labels of 3 assays, -1 where not measured: the third nowhere."""
    x, y = tumours(n)
    labels = y.long().expand(-1, 3).clone()
    labels[torch.rand(n) < 0.5, 1] = -1
    labels[:, 2] = -1
    return x, labels


def masked_assays(out: dict[str, Tensor], y: Tensor) -> Tensor:
    made = torch.stack(list(out.values()), 1).squeeze(-1)
    wrong = F.binary_cross_entropy_with_logits(made, y.clamp(min=0).float(), reduction="none")
    known = (y >= 0).float()
    return (wrong * known).sum() / known.sum()


@lookalike(
    "multi-task net: an assay that this batch does not measure", sparse_assays, masked_assays
)
class Assays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fingerprint = perceptron(30, 32, 24)
        self.assay = nn.ModuleDict({s: nn.Linear(24, 1) for s in ("toxic", "soluble", "binds")})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.fingerprint(x).relu()
        return {name: head(h) for name, head in self.assay.items()}


@lookalike(
    "statistics by domain: a batch norm each for clean and for perturbed images",
    images,
    lambda out, y: F.cross_entropy(out[0], y) + F.cross_entropy(out[1], y),
)
class AdvProp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 24, 3, 2, 1)
        self.norm1, self.norm2 = (
            nn.ModuleDict({"clean": nn.BatchNorm2d(n), "noisy": nn.BatchNorm2d(n)})
            for n in (12, 24)
        )
        self.fc = nn.Linear(24, 10)

    def run(self, x: Tensor, domain: str) -> Tensor:
        x = self.norm1[domain](self.conv1(x)).relu()
        return self.fc(self.norm2[domain](self.conv2(x)).relu().mean((2, 3)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.run(x, "clean"), self.run(x + 0.3 * torch.randn_like(x).sign(), "noisy")


@lookalike("a shadow copy of the weights that training never calls", flat)
class WithShadow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(64, 48, 10, act=nn.GELU)
        self.ema = torch.optim.swa_utils.AveragedModel(self.net).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if self.training else self.ema(x)


@lookalike(
    "detector: no object in the batch, so the box head has nothing to learn",
    images,
    lambda out, y: (
        F.binary_cross_entropy_with_logits(out["object"], out["object_target"])
        + (
            F.smooth_l1_loss(out["box"], out["box_target"], reduction="none")
            * out["object_target"][:, None]
        ).sum()
        / out["object_target"].sum().clamp(min=1)
    ),
)
class OneStage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 24, 3, 2, 1),
        )
        self.objectness, self.box = nn.Conv2d(24, 1, 1), nn.Conv2d(24, 4, 1)
        nn.init.constant_(self.objectness.bias, -2.0)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.backbone(x).relu()
        score, box = self.objectness(h).squeeze(1), self.box(h)
        truth = {"object_target": torch.zeros_like(score), "box_target": torch.zeros_like(box)}
        return {"object": score, "box": box, **truth}
