"""Values summed, normalised, masked and cut along the wrong axis, and designs that look alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.checks.parts import Net

CHECK = "wiring"
SAMPLES, STEPS, HEADS, DEPTH = 4, 6, 2, 4
WIDTH = HEADS * DEPTH


def steps() -> Tensor:
    """Return sequences; no two sizes of theirs are alike."""
    return torch.randn(SAMPLES, STEPS, WIDTH)


def padding() -> Tensor:
    """Return where the batch is padding."""
    return torch.arange(STEPS) >= torch.tensor([[6], [5], [4], [3]])


def net(function: Callable[..., Any], *inputs: Tensor, **layers: Any) -> tuple[nn.Module, Any]:
    """Return a model of layers by their names, and its batch."""
    return Net(function, **layers), inputs or (steps(),)


class Attention(nn.Module):
    """Attention by hand; each step of it can be replaced."""

    def __init__(self, dropout: float = 0.0, **changed: Callable[..., Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.changed = changed

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        do = STANDARD | self.changed
        q, k, v = (do["split"](part(x)) for part in (self.q, self.k, self.v))
        scores = do["score"](do["query"](q), k)
        if hidden is not None:
            scores = do["mask"](scores, hidden[:, None, None, :])
        weights = self.drop(do["weigh"](scores))
        if hidden is not None:
            weights = do["mask_after"](weights, hidden[:, None, None, :])
        return self.out(do["join"](do["apply"](weights, v)))


STANDARD: dict[str, Callable[..., Tensor]] = {
    "split": lambda x: x.view(*x.shape[:2], HEADS, DEPTH).transpose(1, 2),
    "query": lambda q: q,
    "score": lambda q, k: q @ k.transpose(-2, -1) / math.sqrt(DEPTH),
    "mask": lambda scores, hidden: scores.masked_fill(hidden, -1e9),
    "weigh": lambda scores: scores.softmax(-1),
    "mask_after": lambda weights, hidden: weights,
    "apply": lambda weights, v: weights @ v,
    "join": lambda x: x.transpose(1, 2).flatten(2),
}


def attention(*inputs: Tensor, **changed: Any) -> tuple[nn.Module, Any]:
    """Return an attention in which some steps are others, and its batch."""
    return Attention(**changed), (steps(), *inputs)


def masked(**changed: Any) -> tuple[nn.Module, Any]:
    """Return the same with a mask of padding."""
    return attention(padding(), **changed)


def thrown_away(scores: Tensor, hidden: Tensor) -> Tensor:
    """Mask scores, and forget the result."""
    scores.masked_fill(hidden, -1e9)
    return scores


def fused(query: Callable[[Tensor], Tensor] = lambda q: q, **options: Any) -> Any:
    """Return a model of the fused attention."""
    return net(
        lambda m, x: F.scaled_dot_product_attention(query(m.q(x)), m.k(x), m.v(x), **options),
        q=(WIDTH, WIDTH), k=(WIDTH, WIDTH), v=(WIDTH, WIDTH),
    )  # fmt: skip


def words() -> Tensor:
    """Return ids of words with padding at the end of each row."""
    return torch.randint(1, 30, (SAMPLES, STEPS)).masked_fill(padding() | (padding().roll(-1)), 0)


def embedded(function: Callable[..., Any], **layers: Any) -> Any:
    """Return a model that attends to words, and is given where they are padding."""
    return net(
        lambda m, ids: m.fc(function(m, m.table(ids), ids == 0)), words(),
        table=nn.Embedding(30, WIDTH), fc=(WIDTH, 3), **layers,
    )  # fmt: skip


def torch_attention(batch_first: bool = True) -> nn.Module:
    """Return torch's attention."""
    return nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)


def joined_heads(repeat: Callable[[Tensor], Tensor]) -> Any:
    """Return an attention of samples and heads in one axis, with a mask repeated for the heads."""
    near = torch.rand(SAMPLES, STEPS, STEPS) > 0.5

    def run(m: Any, x: Tensor, hidden: Tensor) -> Tensor:
        q, k = (STANDARD["split"](part(x)).flatten(0, 1) for part in (m.q, m.k))
        weights = (q @ k.transpose(1, 2)).masked_fill(repeat(hidden), -1e9).softmax(-1)
        return (weights @ q).view(SAMPLES, HEADS, STEPS, DEPTH)

    return net(run, steps(), near, **QK)


QK = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH)}


def with_table(x: Tensor, table: Tensor) -> Tensor:
    """Add positions as a model does that takes time first."""
    return x + table[: x.shape[0]]


def table(rows: int = 16) -> Tensor:
    """Return positions, a row each."""
    return torch.randn(rows, 1, WIDTH)


# ---- faults -------------------------------------------------------------------------------------

FAULTS: dict[str, Any] = {
    "heads merged across steps": (
        lambda: attention(join=lambda x: x.reshape(SAMPLES, STEPS, WIDTH)),
        "fail", "", "x.reshape(",
    ),
    "heads split across steps": (
        lambda: attention(split=lambda x: x.view(SAMPLES, HEADS, STEPS, DEPTH)),
        "fail", "", "x.view(",
    ),
    "a view in the place of a transposition": (
        lambda: net(lambda m, x: m.fc(x.reshape(STEPS, SAMPLES, WIDTH)), fc=(WIDTH, 3)),
        "fail", "", "x.reshape(",
    ),
    "a view for a transposition, of sizes that divide": (
        lambda: net(
            lambda m, x: m.fc(x.reshape(8, SAMPLES, WIDTH)),
            torch.randn(SAMPLES, 8, WIDTH), fc=(WIDTH, 3),
        ),
        "fail", "", "x.reshape(8",
    ),
    "classes and steps of logits by a view": (
        lambda: (*net(lambda m, x: m.fc(x), fc=(WIDTH, 5)), torch.randint(5, (SAMPLES, STEPS)),
                 lambda out, y: F.cross_entropy(out.view(SAMPLES, 5, STEPS), y)),
        "fail", "", "out.view(",
    ),
    "states of both directions as one row": (
        lambda: net(
            lambda m, x: m.fc(m.rnn(x)[1].view(SAMPLES, -1)),
            rnn=nn.GRU(WIDTH, 5, bidirectional=True, batch_first=True), fc=(10, 3),
        ),
        "fail", "", "m.rnn(x)[1].view(",
    ),
    "softmax over queries": (
        lambda: attention(weigh=lambda s: s.softmax(-2)), "fail", "", "weights @ v", "dimension 2",
    ),
    "softmax over heads": (
        lambda: attention(weigh=lambda s: s.softmax(1)), "fail", "", "weights @ v",
    ),
    "softmax over samples, and a dropout": (
        lambda: attention(weigh=lambda s: s.softmax(0), dropout=0.3), "fail", "", "weights @ v",
    ),
    "softmax over queries, by einsum": (
        lambda: attention(
            weigh=lambda s: s.softmax(-2),
            apply=lambda w, v: torch.einsum("bhqk,bhkd->bhqd", w, v),
        ),
        "fail", "", "torch.einsum(",
    ),
    "weights that are not turned": (
        lambda: attention(apply=lambda w, v: (v.transpose(-2, -1) @ w).transpose(-2, -1)),
        "fail", "", "@ w)",
    ),
    "a mask of small numbers": (
        lambda: masked(mask=lambda s, hidden: s.masked_fill(hidden, -1e-9)),
        "fail", "softmax", "fills scores with -1e-09",
    ),
    "a mask of zeros": (
        lambda: masked(mask=lambda s, hidden: torch.where(hidden, 0.0, s)), "fail", "softmax",
    ),
    "a mask that is scaled away": (
        lambda: masked(
            score=lambda q, k: q @ k.transpose(-2, -1),
            mask=lambda s, hidden: s.masked_fill(hidden, -1.0) / math.sqrt(DEPTH),
        ),
        "fail", "softmax", "fills scores with -0.5",
    ),
    "scores times a mask": (
        lambda: masked(mask=lambda s, hidden: s * (~hidden).float()),
        "fail", "softmax", "multiplies",
    ),
    "a mask added as it is": (
        lambda: masked(mask=lambda s, hidden: s + (~hidden).float()), "warn", "softmax", "is added",
    ),
    "a mask added to a fused attention": (
        lambda: fused(attn_mask=torch.ones(STEPS, STEPS).tril()),
        "warn", "scaled_dot_product_attention", "is added",
    ),
    "a mask added to torch's attention": (
        lambda: net(
            lambda m, x: m.a(x, x, x, attn_mask=torch.ones(STEPS, STEPS).tril())[0],
            a=nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
        ),
        "warn", "a", "is added",
    ),
    "everything hidden": (
        lambda: masked(mask=lambda s, hidden: s.masked_fill(hidden | ~hidden, -1e9)),
        "fail", "softmax", "every place",
    ),
    "a masked score that is thrown away": (
        lambda: masked(mask=thrown_away), "warn", "", "scores.masked_fill(",
    ),
    "a gate by a softmax of one": (
        lambda: net(lambda m, x: m.fc(x * m.gate(x).softmax(-1)), gate=(WIDTH, 1), fc=(WIDTH, 3)),
        "fail", "softmax", "one value",
    ),
    "a softmax of the best alone": (
        lambda: net(
            lambda m, x: m.fc(x * m.gate(x).topk(1, -1).values.softmax(-1)),
            gate=(WIDTH, 5), fc=(WIDTH, 3),
        ),
        "fail", "softmax", "one value",
    ),
    "a vector of one value at length one": (
        lambda: net(lambda m, x: F.normalize(m.fc(x), dim=-1), fc=(WIDTH, 1)),
        "fail", "", "F.normalize(",
    ),
    "cosines of single values": (
        lambda: net(lambda m, x: F.cosine_similarity(m.fc(x), m.fc(x + 1), dim=-1), fc=(WIDTH, 1)),
        "fail", "", "F.cosine_similarity(",
    ),
    "scores divided by a root that was cut to an integer": (
        lambda: net(
            lambda m, x: (m.q(x) @ m.k(x).mT / int(math.sqrt(WIDTH))).softmax(-1) @ m.v(x), **QKV
        ),
        "warn", "", "divided by the root of 4",
    ),
    "queries scaled before a fused attention": (
        lambda: fused(lambda q: q * WIDTH**-0.5), "fail", "scaled_dot_product_attention",
    ),
    "queries scaled before scores are": (
        lambda: attention(query=lambda q: q / math.sqrt(DEPTH)), "fail", "", "math.sqrt(DEPTH)",
    ),
    "scores divided by the root of the width of all heads": (
        lambda: attention(score=lambda q, k: q @ k.transpose(-2, -1) / math.sqrt(WIDTH)),
        "warn", "", "divided by the root of 8",
    ),
    "scores multiplied by the root": (
        lambda: attention(score=lambda q, k: q @ k.transpose(-2, -1) / DEPTH**-0.5),
        "warn", "", "multiplied by the root of 4",
    ),
    "the weight of one expert by itself": (
        lambda: net(
            lambda m, x: (w := m.fc(x).sigmoid().topk(1).values) / (w.sum(-1, True) + 1e-9) * x,
            **FC,
        ),
        "warn", "", "gives 1 whatever it is",
    ),
    "a norm over steps and features": (
        lambda: net(lambda m, x: m.norm(m.fc(x)), fc=(WIDTH, 5), norm=nn.LayerNorm([STEPS, 5])),
        "warn", "norm",
    ),
    "a batch norm over steps": (
        lambda: net(lambda m, x: m.norm(m.fc(x).relu()), fc=(WIDTH, 5), norm=nn.BatchNorm1d(STEPS)),
        "warn", "norm",
    ),
    "positions by sample": (
        lambda: net(
            lambda m, x: m.head(m.attend(with_table(x, m.table))),
            attend=Attention(), table=table(), head=(WIDTH, 3),
        ),
        "fail", "", "table[: x.shape[0]]",
    ),
    "attention along the samples": (
        lambda: net(lambda m, x: m.fc(m.a(x, x, x)[0].mean(1)), a=torch_attention(False), **FC),
        "fail", "a", "m.a(x, x, x)",
    ),
    "attention along the samples, of steps with positions": (
        lambda: net(
            lambda m, x: m.fc(m.a(x + m.table[:, :STEPS])),
            a=nn.TransformerEncoderLayer(WIDTH, HEADS, 9), table=torch.randn(1, 9, WIDTH), **FC,
        ),
        "fail", "a.self_attn", "attends along the 4 samples",
    ),
    "a recurrence along the samples": (
        lambda: net(lambda m, x: m.fc(m.rnn(x)[0][:, -1]), rnn=nn.LSTM(WIDTH, WIDTH), **FC),
        "fail", "rnn", "m.rnn(x)",
    ),
    "attention along the samples by hand": (
        lambda: net(lambda m, x: m.fc(by_hand(m, x.transpose(0, 1)).mean(0)), **QKV, **FC),
        "warn", "softmax", "along the 4 samples",
    ),
    "heads that attend to one another": (
        lambda: attention(split=lambda x: x.view(*x.shape[:2], HEADS, DEPTH),
                          join=lambda x: x.flatten(2)),
        "warn", "softmax", "s.softmax(",
    ),
    "heads that attend to one another, fused": (
        lambda: net(
            lambda m, x: F.scaled_dot_product_attention(
                *(part(x).view(SAMPLES, STEPS, HEADS, DEPTH) for part in (m.q, m.k, m.v))
            ),
            **QKV,
        ),
        "warn", "scaled_dot_product_attention",
    ),
    "a mask repeated in the order of heads": (
        lambda: joined_heads(lambda hidden: hidden.repeat(HEADS, 1, 1)),
        "fail", "", "hidden.repeat(",
    ),
    "the same, to torch's attention": (
        lambda: net(
            lambda m, x, near: m.a(x, x, x, attn_mask=near.repeat(HEADS, 1, 1))[0],
            steps(), torch.eye(STEPS).roll(1, 0).bool().repeat(SAMPLES, 1, 1),
            a=torch_attention(),
        ),
        "fail", "", "near.repeat(",
    ),
    "all but the padding hidden": (
        lambda: embedded(
            lambda m, h, pad: m.a(h, h, h, key_padding_mask=~pad)[0], a=torch_attention()
        ),
        "fail", "a", "all but the padding",
    ),
    "all but the padding hidden by hand": (
        lambda: embedded(
            lambda m, h, pad: (h @ h.mT).masked_fill(~pad[:, None], -1e9).softmax(-1) @ h
        ),
        "fail", "softmax", "all but the padding",
    ),
    "learnt positions by sample": (
        lambda: net(
            lambda m, x: m.head(m.rnn(x + m.table(torch.arange(x.shape[0]))[:, None])[0]),
            rnn=nn.GRU(WIDTH, 5, batch_first=True), table=nn.Embedding(16, WIDTH), head=(5, 3),
        ),
        "fail", "", "torch.arange(x.shape[0])",
    ),
}  # fmt: skip


# ---- designs that look alike --------------------------------------------------------------------


def by_hand(m: Any, x: Tensor) -> Tensor:
    """Attend along the dimension before the last."""
    return (m.q(x) @ m.k(x).transpose(1, 2)).softmax(-1) @ m.v(x)


def windows(x: Tensor) -> Tensor:
    """Cut maps into windows, as Swin does."""
    parts = x.view(SAMPLES, 2, 4, 2, 4, WIDTH)
    return parts.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, WIDTH)


def shifted(scores: Tensor) -> Tensor:
    """Shift rows, as Transformer-XL does."""
    padded = F.pad(scores, (1, 0)).view(*scores.shape[:2], scores.shape[3] + 1, scores.shape[2])
    return padded[:, :, 1:].view_as(scores)


def shifted_back(scores: Tensor) -> Tensor:
    """Shift rows, as XLNet does, whose distances are one more than there are steps."""
    joined = torch.cat([scores, scores[..., :1]], -1)
    *outer, queries, keys = joined.shape
    return joined.reshape(*outer, keys, queries)[..., 1:, :].reshape(*outer, queries, keys - 1)


def sliced_shift(m: Any, x: Tensor) -> Tensor:
    """Shift rows of what no padding widened."""
    rows = m.fc(x)
    turned = rows.reshape(SAMPLES, 9, STEPS)
    return turned[:, 1:].reshape(SAMPLES, STEPS, 8)


def slots(m: Any, x: Tensor) -> Tensor:
    """Let slots compete for places."""
    found = m.start.expand(SAMPLES, -1, -1)
    for _ in range(2):
        weights = (m.q(found) @ m.k(x).transpose(1, 2)).softmax(1) + 1e-8
        found = (weights / weights.sum(-1, keepdim=True)) @ m.v(x)
    return found


def slots_divided_later(m: Any, x: Tensor) -> Tensor:
    """Divide what slots get by the sum of their weights."""
    weights = (m.q(m.q(x)) @ m.k(x).transpose(1, 2)).softmax(1)
    return (weights @ m.v(x)) / weights.sum(-1, keepdim=True)


def sinkhorn(m: Any, x: Tensor) -> Tensor:
    """Normalise rows and columns in turn."""
    scores = m.q(x) @ m.k(x).transpose(1, 2)
    for _ in range(20):
        scores = scores - scores.logsumexp(-1, keepdim=True)
        scores = scores - scores.logsumexp(-2, keepdim=True)
    return scores.softmax(-2) @ m.v(x)


def capsules(m: Any, x: Tensor) -> Tensor:
    """Route by agreement."""
    votes = m.fc(x).view(SAMPLES, STEPS, 2, 5)
    scores = torch.zeros(SAMPLES, STEPS, 2)
    for _ in range(3):
        found = torch.einsum("bij,bijd->bjd", scores.softmax(-1), votes)
        scores = scores + torch.einsum("bijd,bjd->bij", votes, found)
    return found


def capsules_by_sum(m: Any, x: Tensor) -> Tensor:
    """Route by agreement, with sums."""
    votes = m.fc(x).view(SAMPLES, STEPS, 2, 5)
    scores = torch.zeros(SAMPLES, STEPS, 2, 1)
    for _ in range(3):
        found = (scores.softmax(2) * votes).sum(1, keepdim=True)
        scores = scores + (votes * found).sum(-1, keepdim=True)
    return found


def graph(m: Any, x: Tensor) -> Tensor:
    """Attend to neighbours."""
    h = m.fc(x)
    scores = F.leaky_relu(m.left(h) + m.right(h).transpose(1, 2))
    near = (torch.rand(STEPS, STEPS) > 0.5) | torch.eye(STEPS, dtype=torch.bool)
    return torch.where(near, scores, torch.full_like(scores, -9e15)).softmax(-1) @ h


def linear_attention(m: Any, x: Tensor) -> Tensor:
    """Normalise queries over features, and keys over steps."""
    q, k = m.q(x).softmax(-1), m.k(x).softmax(1)
    return q @ (k.transpose(1, 2) @ m.v(x))


def hyper(m: Any, x: Tensor) -> Tensor:
    """Make a layer of each sample."""
    weights = m.make(x.mean(1)).view(SAMPLES, WIDTH, 5)
    return x @ weights


def mixture(m: Any, x: Tensor) -> Tensor:
    """Weigh experts, and keep their load even."""
    gates = m.gate(x).softmax(-1)
    made = torch.stack([fc(x) for fc in m.experts], -2)
    return (gates[..., None] * made).sum(-2) + 0 * gates.mean((0, 1)).sum()


def multi_query(m: Any, x: Tensor) -> Tensor:
    """Share keys and values among heads."""
    q = m.q(x).view(SAMPLES, STEPS, HEADS, DEPTH).transpose(1, 2)
    k, v = m.k(x)[:, None], m.v(x)[:, None]
    weights = (q @ k.transpose(-2, -1) * DEPTH**-0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def pooled(m: Any, x: Tensor, hidden: Tensor) -> Tensor:
    """Average what is not hidden."""
    real = (~hidden).float()[..., None]
    return m.fc((x * real).sum(1) / real.sum(1))


def written(m: Any, x: Tensor) -> Tensor:
    """Write one value to all slots of a memory, by their weights."""
    weights = m.fc(x[:, 0]).softmax(-1)
    return weights[:, :, None] @ x[:, :1]


def maps(*channels: int) -> Tensor:
    """Return images."""
    return torch.randn(SAMPLES, *(channels or (12,)), 8, 10)


QKV = {**QK, "v": (WIDTH, WIDTH)}
FC = {"fc": (WIDTH, 5)}
HEALTHY: dict[str, Any] = {
    "attention": attention,
    "attention with a mask and a dropout": lambda: masked(dropout=0.2),
    "attention of one key": lambda: (Attention(), (torch.randn(SAMPLES, 1, WIDTH),)),
    "an attention that attends to one token": lambda: net(
        lambda m, x: (m.q(x[:, :1]) @ m.k(x[:, :1]).transpose(1, 2)).softmax(-1) @ m.v(x[:, :1]),
        **QKV,
    ),
    "a sequence of one, pooled": lambda: net(
        lambda m, x: m.fc((m.score(x).softmax(1) * x).sum(1)),
        torch.randn(SAMPLES, 1, WIDTH), score=(WIDTH, 1), **FC,
    ),
    "heads mixed by a parameter after the softmax": lambda: attention(
        apply=lambda w, v: torch.einsum("bhij,hg->bgij", w, nn.Parameter(torch.eye(w.shape[1]))) @ v
    ),
    "a mask of -10000 added": lambda: masked(mask=lambda s, hidden: s + hidden.float() * -10000.0),
    "a mask of -inf written in place": lambda: masked(
        mask=lambda s, hidden: s.masked_fill_(hidden, -math.inf)
    ),
    "scores thresholded by themselves": lambda: attention(
        weigh=lambda s: torch.where(s > 0.1, s, 0.0).softmax(-1)
    ),
    "a mask before and after": lambda: masked(mask_after=lambda w, hid: w.masked_fill(hid, 0.0)),
    "masked, then renormalised": lambda: masked(
        mask=lambda s, hidden: s,
        mask_after=lambda w, hidden: F.normalize(w.masked_fill(hidden, 0.0), p=1, dim=-1),
    ),
    "scores times decays": lambda: attention(
        weigh=lambda s: (s * torch.rand(STEPS, STEPS)).softmax(-1)
    ),
    "weights turned for a product from the right": lambda: attention(
        apply=lambda w, v: (v.transpose(-2, -1) @ w.transpose(-2, -1)).transpose(-2, -1)
    ),
    "queries and keys scaled by a root each": lambda: attention(
        score=lambda q, k: (q * DEPTH**-0.25) @ (k * DEPTH**-0.25).transpose(-2, -1)
    ),
    "scores times a learnt temperature": lambda: net(
        lambda m, x: m.fc((m.q(x) @ m.k(x).mT * m.scale.exp()).softmax(-1) @ x),
        scale=nn.Parameter(torch.zeros(())), **QK, **FC,
    ),
    "the weights of two experts by their sum": lambda: net(
        lambda m, x: ((w := m.fc(x).sigmoid().topk(2).values) / w.sum(-1, True))[..., :1] * x,
        **FC,
    ),
    "queries scaled, scores not": lambda: attention(
        score=lambda q, k: (q * DEPTH**-0.5) @ k.transpose(-2, -1)
    ),
    "a fused attention with a scale of its own": lambda: fused(lambda q: q * 8**-0.5, scale=1.0),
    "a fused causal mask of numbers": lambda: fused(
        attn_mask=torch.full((STEPS, STEPS), -math.inf).triu(1)
    ),
    "windows": lambda: net(lambda m, x: m.fc(windows(x)), torch.randn(SAMPLES, 8, 8, WIDTH), **FC),
    "pixel shuffle by hand": lambda: net(
        lambda m, x: m.fc(
            x.view(SAMPLES, 3, 2, 2, 8, 10).permute(0, 1, 4, 2, 5, 3).reshape(SAMPLES, 3, 16, 20)
        ),
        maps(), fc=nn.Conv2d(3, 2, 1),
    ),
    "channel shuffle": lambda: net(
        lambda m, x: m.fc(x.view(SAMPLES, 3, 4, 8, 10).transpose(1, 2).reshape(x.shape)),
        maps(), fc=nn.Conv2d(12, 2, 1),
    ),
    "patches": lambda: net(
        lambda m, x: m.fc(
            x.view(SAMPLES, 3, 4, 2, 5, 2).permute(0, 2, 4, 3, 5, 1).reshape(SAMPLES, 20, 12)
        ),
        maps(3), fc=(12, 5),
    ),
    "stacked frames": lambda: net(
        lambda m, x: m.fc(x.reshape(SAMPLES, STEPS // 2, 2 * WIDTH)), fc=(2 * WIDTH, 5)
    ),
    "places merged four by four, as many as features then": lambda: net(
        lambda m, x: m.fc(x.view(-1, 4 * 4)), torch.randn(16, 4), fc=(16, 5)
    ),
    "frames of four, of steps of six": lambda: net(
        lambda m, x: m.fc(x.reshape(SAMPLES, 12, 4)), fc=(4, 5)
    ),
    "maps in a row": lambda: net(lambda m, x: m.fc(x.flatten(1)), maps(), fc=(960, 5)),
    "rows shifted": lambda: net(lambda m, x: m.fc(shifted(x)), maps(3), fc=(10, 5)),
    "rows shifted back": lambda: net(lambda m, x: m.fc(shifted_back(x)), maps(3), fc=(10, 5)),
    "rows shifted without padding": lambda: net(sliced_shift, fc=(WIDTH, 9)),
    "slot attention": lambda: net(slots, **QKV, start=nn.Parameter(torch.randn(1, 3, WIDTH))),
    "slot attention, divided later": lambda: net(slots_divided_later, **QKV),
    "sinkhorn": lambda: net(sinkhorn, **QKV),
    "capsules": lambda: net(capsules, fc=(WIDTH, 10)),
    "capsules by sums": lambda: net(capsules_by_sum, fc=(WIDTH, 10)),
    "graph attention": lambda: net(graph, **FC, left=(5, 1), right=(5, 1)),
    "linear attention": lambda: net(linear_attention, **QKV),
    "a hypernetwork": lambda: net(hyper, make=(WIDTH, WIDTH * 5)),
    "a mixture of experts": lambda: net(
        mixture, gate=(WIDTH, 3), experts=nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(3))
    ),
    "multi-query attention": lambda: net(
        multi_query, q=(WIDTH, WIDTH), k=(WIDTH, DEPTH), v=(WIDTH, DEPTH)
    ),
    "masked mean": lambda: net(pooled, steps(), padding(), **FC),
    "cross-attention": lambda: net(
        lambda m, x, y: (m.q(x) @ m.k(y).transpose(1, 2)).softmax(-1) @ m.v(y),
        steps(), torch.randn(SAMPLES, 7, WIDTH), **QKV,
    ),
    "a memory that is written to": lambda: net(written, fc=(WIDTH, 5)),
    "channels weighed by a softmax": lambda: net(
        lambda m, x: m.fc((m.gate(x.mean(1, keepdim=True)).softmax(-1) * x).mean(1)),
        gate=(WIDTH, WIDTH), **FC,
    ),
    "a mixer with a batch norm over channels": lambda: net(
        lambda m, x: m.norm(m.fc(x.transpose(1, 2))), fc=(STEPS, 5), norm=nn.BatchNorm1d(WIDTH)
    ),
    "a batch norm between transpositions": lambda: net(
        lambda m, x: m.norm(m.fc(x).transpose(1, 2)), **FC, norm=nn.BatchNorm1d(5)
    ),
    "a norm over a map": lambda: net(
        lambda m, x: m.norm(m.fc(x)), fc=nn.Conv1d(STEPS, 5, 1), norm=nn.LayerNorm([5, WIDTH])
    ),
    "a softmax of a nested tensor": lambda: net(
        lambda m, x: torch.nested.to_padded_tensor(
            torch.nested.as_nested_tensor(
                [m.fc(x[0]), m.fc(x[1, :3])], layout=torch.jagged
            ).softmax(-1),
            0.0,
        ),
        **FC,
    ),
    "an einsum of lists": lambda: net(
        lambda m, x: torch.einsum(x, [0, 1, 2], m.fc(x).softmax(-1), [0, 3, 2], [0, 1, 3]),
        fc=(WIDTH, WIDTH),
    ),
    "positions, batch first": lambda: net(
        lambda m, x: m.a(x + m.table[:, : x.shape[1]]),
        a=Attention(), table=torch.randn(1, 9, WIDTH),
    ),
    "positions, time first": lambda: net(
        lambda m, x: m.head(m.rnn(with_table(x, m.table))[0]),
        rnn=nn.GRU(WIDTH, 5), table=table(), head=(5, 3),
    ),
    "positions, time first, pooled": lambda: net(
        lambda m, x: m.head(m.rnn(with_table(x, m.table))[0].mean(0)),
        rnn=nn.GRU(WIDTH, 5), table=table(), head=(5, 3),
    ),
    "time first, an answer a step": lambda: net(
        lambda m, x: m.fc(m.a(m.rnn(x)[0])),
        rnn=nn.LSTM(WIDTH, WIDTH), a=nn.TransformerEncoderLayer(WIDTH, HEADS, 9), **FC,
    ),
    "turned for layers that take time first": lambda: net(
        lambda m, x: m.fc(m.rnn(x.transpose(0, 1))[0][-1]), rnn=nn.LSTM(WIDTH, WIDTH), **FC
    ),
    "a sequence of samples, of one step each": lambda: net(
        lambda m, x: m.fc(m.a(x, x, x)[0].flatten(1)), torch.randn(SAMPLES, 1, WIDTH),
        a=torch_attention(False), **FC,
    ),
    "a mask in the order of samples": lambda: joined_heads(
        lambda hidden: hidden.repeat_interleave(HEADS, 0)
    ),
    "padding hidden": lambda: embedded(
        lambda m, h, pad: m.a(h, h, h, key_padding_mask=pad)[0], a=torch_attention()
    ),
    "attention to the first word alone": lambda: embedded(
        lambda m, h, pad: (h @ h.mT).masked_fill(
            (torch.arange(STEPS) > 0).expand(SAMPLES, 1, STEPS), -1e9
        ).softmax(-1) @ h
    ),
    "noise for each sample": lambda: net(
        lambda m, x: m.a(x + torch.randn(SAMPLES, 1, WIDTH)), a=Attention()
    ),
    "a code for each sample": lambda: net(
        lambda m, x: m.a(x + m.codes), a=Attention(), codes=nn.Parameter(table(SAMPLES))
    ),
    "offsets of ids": lambda: net(
        lambda m, x, n: m.a(x + m.ids(n + 9 * torch.arange(SAMPLES)[:, None, None]).sum(2)),
        steps(), torch.randint(9, (SAMPLES, STEPS, 3)), a=Attention(), ids=nn.Embedding(64, WIDTH),
    ),
    "a hypernetwork in chunks": lambda: net(
        lambda m, x: x @ m.make(m.codes).reshape(3, WIDTH, 5)[0],
        make=(5, 20), codes=nn.Parameter(torch.randn(6, 5)),
    ),
    "a critic's vector of power iteration": lambda: net(
        lambda m, x: m.fc(x), fc=nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 1))
    ),
    "a context for each sample": lambda: net(
        lambda m, x: m.a(x + m.fc(x.mean(1, keepdim=True))), a=Attention(), fc=(WIDTH, WIDTH)
    ),
}  # fmt: skip
