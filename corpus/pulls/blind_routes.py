"""Graphs, experts, adapters and few bits, as people report them wrong; each with its fix."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import Adapter, SelfAttention, clouds, ffn, frozen, perceptron
from corpus.models.small import flat, rows
from corpus.subject import Subject, subject

SHELF = Shelf("pulls", "blind")
GITHUB = "https://github.com"

UNREAD = ("never read", "nothing reads", "not read", "not used", "unused", "never used", "dropped")
CALLED = (*UNREAD, "no gradient", "no effect", "never called", "discard", "thrown")
APART = ("graphs", "other graph", "sample", "batch", "across", "offset")


# ---- graphs --------------------------------------------------------------------------------------


def graphs(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return points (n, 24, 3), which of each cloud are near to one another, and labels."""
    points, longest = clouds(n)
    near = torch.cdist(points, points).topk(5, largest=False).indices
    linked = torch.zeros(n, 24, 24).scatter_(2, near, 1.0)
    return (points, torch.maximum(linked, linked.transpose(1, 2))), longest


class Pooled(nn.Module):
    """Classifies clouds by two layers that pass messages between near points."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.head = first, second, nn.Linear(24, 3)

    def forward(self, points: Tensor, *linked: Tensor) -> Tensor:
        x = self.first(points, *linked).relu()
        return self.head(self.second(x, *linked).relu().mean(1))


def sent(make: Any, draw: Any = graphs) -> Subject:
    return subject(Pooled(make(3, 24), make(24, 24)), draw, F.cross_entropy, 12)


@SHELF.report(
    f"{GITHUB}/phlippe/uvadlc_notebooks/issues/5",
    "nodes counted on by the size of the batch",
    ("", "first*", "second*"),
    APART,
)
def uvadlc(fixed: bool) -> Subject:
    """From graph to graph flattened nodes are 24 apart: edges are scored by other graphs' nodes."""

    class Attentive(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.value, self.score = nn.Linear(a, b), nn.Linear(2 * b, 1)

        def forward(self, x: Tensor, linked: Tensor) -> Tensor:
            value, nodes = self.value(x), x.shape[1]
            graph, source, target = linked.nonzero(as_tuple=True)
            step, every = (nodes if fixed else len(x)), value.flatten(0, 1)
            ends = every[graph * step + source], every[graph * step + target]
            scores = torch.full_like(linked, -math.inf)
            scores[linked > 0] = F.leaky_relu(self.score(torch.cat(ends, 1)), 0.2)[:, 0]
            return scores.softmax(-1) @ value

    return sent(Attentive)


@SHELF.report(
    f"{GITHUB}/ai4co/rl4co/issues/227",
    "edges of one graph for the nodes of all",
    ("", "first*", "second*"),
    (*APART, "message", "neighbour"),
)
def rl4co(fixed: bool) -> Subject:
    """All nodes lie in one row, edges are those of the first graph, and others hear nothing."""

    class Convolution(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.weight = nn.Linear(a, b)

        def forward(self, x: Tensor) -> Tensor:
            flattened, (n, nodes) = self.weight(x).flatten(0, 1), x.shape[:2]
            whole = torch.ones(nodes, nodes).nonzero().T  # each node hears all of its graph
            if fixed:
                offset = nodes * torch.arange(n)[:, None, None]
                whole = (whole + offset).transpose(0, 1).flatten(1)
            loops = torch.arange(n * nodes)
            missing = loops[torch.bincount(whole[1], minlength=n * nodes) == 0]
            source, target = torch.cat([whole, missing.expand(2, -1)], 1)
            degree = torch.bincount(target, minlength=n * nodes)[target][:, None]
            heard = torch.zeros_like(flattened).index_add(0, target, flattened[source] / degree)
            return (flattened + heard).unflatten(0, (n, nodes))

    return sent(Convolution, clouds)


@SHELF.report(
    f"{GITHUB}/pyg-team/pytorch_geometric/issues/1642",
    "scores of both ends of an edge by the same weights",
    ("", "first*", "second*"),
    CALLED,
)
def gat_conv(fixed: bool) -> Subject:
    """alpha_l = alpha_r: a softmax takes the target's part away, and its weights are never read."""

    class Conv(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.value = nn.Linear(a, b)
            self.source, self.target = (nn.Parameter(torch.randn(b) / b**0.5) for _ in range(2))

        def forward(self, x: Tensor, linked: Tensor) -> Tensor:
            value = self.value(x)
            left = right = value @ self.source
            if fixed:
                right = value @ self.target
            scores = F.leaky_relu(left[:, None, :] + right[:, :, None], 0.2)
            return scores.masked_fill(linked == 0, -math.inf).softmax(-1) @ value

    return sent(Conv)


@SHELF.report(
    f"{GITHUB}/leffff/graphormer-pyg/issues/14",
    "softmax over the nodes of all graphs",
    ("", "first*", "second*"),
    (*APART, "mask"),
)
def graphormer(fixed: bool) -> Subject:
    """Scores with other graphs' nodes are left at zero, which is no small score."""

    class Head(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(a, b) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            flattened, (n, nodes) = x.flatten(0, 1), x.shape[:2]
            q, k, v = (layer(flattened) for layer in (self.q, self.k, self.v))
            same = torch.arange(n).repeat_interleave(nodes)
            mine = same[:, None] == same
            scores = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(~mine, 0.0)
            if fixed:
                scores = scores.masked_fill(~mine, -1e6)
            return (scores.softmax(-1) @ v).unflatten(0, (n, nodes))

    return sent(Head, clouds)


# ---- experts -------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two of four experts a sample, by scores that the case makes."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(perceptron(32, 48, 32) for _ in range(4))

    def scores(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def weights(self, x: Tensor) -> Tensor:
        best, chosen = self.scores(x).topk(2, -1)
        return torch.zeros(len(x), 4).scatter(1, chosen, best.softmax(-1))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.stack([expert(x) for expert in self.experts], 1)
        return (self.weights(x)[..., None] * made).sum(1)


class Routed(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.stem, self.moe, self.head = nn.Linear(64, 32), moe, nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.head(x + self.moe(x))


@SHELF.report(
    f"{GITHUB}/yfzhang114/SliME/issues/3",
    "noise of the router scaled by the router's own weights",
    ("moe*", ""),
    CALLED,
)
def slime(fixed: bool) -> Subject:
    """w_gate stands where w_noise was meant, and the weights of the noise are never read."""

    class Noisy(Experts):
        def __init__(self) -> None:
            super().__init__()
            self.w_gate = nn.Parameter(0.1 * torch.randn(32, 4))
            self.w_noise = nn.Parameter(0.1 * torch.randn(32, 4))

        def scores(self, x: Tensor) -> Tensor:
            clean = x @ self.w_gate
            spread = F.softplus(x @ (self.w_noise if fixed else self.w_gate)) + 1e-2
            return clean + torch.randn_like(clean) * spread if self.training else clean

    return subject(Routed(Noisy()), flat, F.cross_entropy, 64)


class Carried(torch.autograd.Function):
    """Returns weights as they are, and lets the gradient of a term of the loss join theirs."""

    @staticmethod
    def forward(context: Any, weights: Tensor, term: Tensor) -> Tensor:
        context.save_for_backward(term)
        return weights

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (term,) = context.saved_tensors
        return gradient, torch.full_like(term, 0.1)


@SHELF.report(
    f"{GITHUB}/NVIDIA-NeMo/Automodel/issues/1408",
    "weights that carry the balance term thrown away",
    ("moe*", ""),
    (*CALLED, "result", "balance", "never runs"),
)
def automodel(fixed: bool) -> Subject:
    """What the function returns is not taken, so its backward never runs, nor does the term."""

    class Carrying(Experts):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(32, 4)

        def scores(self, x: Tensor) -> Tensor:
            return self.router(x)

        def weights(self, x: Tensor) -> Tensor:
            weights = super().weights(x)
            share = (weights > 0).float().mean(0)
            term = 4 * (share * self.router(x).softmax(-1).mean(0)).sum()
            carried = Carried.apply(weights, term)
            return carried if fixed else weights

    return subject(Routed(Carrying()), flat, F.cross_entropy, 64)


# ---- adapters ------------------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/hao-ai-lab/FastVideo/pull/781",
    "second factor of an adapter drawn like the first",
    ("0*", "2*", "*lora*", ""),
    ("zero", "start", "init", "random", "first step", "drawn"),
)
def fast_video(fixed: bool) -> Subject:
    """B is to start at zero: as it is, the frozen model computes something else from the start."""

    class Lora(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.base = frozen(nn.Linear(a, b))
            self.lora_a, self.lora_b = nn.Linear(a, 8, bias=False), nn.Linear(8, b, bias=False)
            nn.init.kaiming_uniform_(self.lora_a.weight, a=math.sqrt(5))
            nn.init.zeros_(self.lora_b.weight)
            if not fixed:
                nn.init.kaiming_uniform_(self.lora_b.weight, a=math.sqrt(5))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.lora_b(self.lora_a(x))

    model = nn.Sequential(Lora(64, 48), nn.GELU(), Lora(48, 10))
    return subject(model, flat, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/adapter-hub/adapters/pull/439",
    "adapters in front of the scales of their layers",
    ("blocks*", "*adapter*", ""),
    ("scale", "small", "vanish", "weak", "tiny", "gradient"),
)
def beit(fixed: bool) -> Subject:
    """Small frozen scales stand behind the adapters, and take what these do down with them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.attn = frozen(nn.LayerNorm(32)), frozen(SelfAttention())
            self.norm2, self.mlp = frozen(nn.LayerNorm(32)), frozen(ffn(32))
            self.lambda_1, self.lambda_2 = (
                nn.Parameter(torch.full((32,), 1e-3), requires_grad=False) for _ in range(2)
            )
            self.attn_adapter, self.mlp_adapter = Adapter(32), Adapter(32)

        def forward(self, x: Tensor) -> Tensor:
            if fixed:
                x = self.attn_adapter(x + self.lambda_1 * self.attn(self.norm1(x)))
                return self.mlp_adapter(x + self.lambda_2 * self.mlp(self.norm2(x)))
            x = x + self.lambda_1 * self.attn_adapter(self.attn(self.norm1(x)))
            return x + self.lambda_2 * self.mlp_adapter(self.mlp(self.norm2(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = frozen(nn.Linear(8, 32)), nn.Linear(32, 10)
            self.blocks = nn.Sequential(Block(), Block())

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks(self.embed(x)).mean(1))

    return subject(Model(), rows, F.cross_entropy, 32)


# ---- few bits ------------------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/pytorch/ao/pull/4806",
    "no gradient for weights that lie on the bound of the range",
    ("0*", "2*", ""),
    ("gradient", "clamp", "bound", "satur", "round", "zero"),
)
def torchao(fixed: bool) -> Subject:
    """Rounded weights meet the bound exactly, where a strict clamp passes nothing on."""

    class Quantised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scale = self.weight.detach().abs().amax(1, keepdim=True) / 1.5
            wanted = self.weight / scale
            whole = wanted + (wanted.round() - wanted).detach()
            kept = whole.detach().clamp(-2, 1)
            passes = (whole >= -2) & (whole <= 1) if fixed else (whole > -2) & (whole < 1)
            return F.linear(x, torch.where(passes, whole, kept) * scale, self.bias)

    model = nn.Sequential(Quantised(64, 48), nn.ReLU(), Quantised(48, 10))
    return subject(model, flat, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/kyegomez/BitNet/issues/35",
    "scaled back by the largest of what is quantised already",
    ("body*", ""),
    ("scale", "large", "grow", "dequant", "factor", "127", "range"),
)
def bit_linear(fixed: bool) -> Subject:
    """The largest input is asked for after it was made 127, and outputs are a hundredfold."""

    class Bits(nn.Linear):
        """A linear layer of signs, on inputs of eight bits."""

        def forward(self, x: Tensor) -> Tensor:
            x = F.layer_norm(x, x.shape[-1:])
            largest = x.detach().abs().amax(-1, keepdim=True)
            whole = x * 127 / largest
            whole = whole + (whole.round() - whole).detach()
            signs = self.weight + (self.weight.sign() - self.weight).detach()
            back = largest if fixed else whole.detach().abs().amax(-1, keepdim=True)
            beta = self.weight.abs().mean()
            return F.linear(whole, signs) * beta * back / 127 + self.bias

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(Bits(64, 64), nn.ReLU(), Bits(64, 32))
            self.head = nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).relu())

    return subject(Model(), flat, F.cross_entropy, 32)
