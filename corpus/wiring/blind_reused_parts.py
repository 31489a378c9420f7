"""One part called many times, and weights that are made elsewhere."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parametrizations

from corpus.cards import Shelf
from corpus.models.parts import (
    Patches,
    PlacedTokens,
    PreNorm,
    captions,
    clouds,
    conv_net,
    frozen,
    lookalikes_of,
    normal,
    perceptron,
    unlabelled,
    unlabelled_flat,
    zeroed,
)
from corpus.models.small import flat, images, language_loss, noisy, rows, views, words

SHELF = Shelf("wiring", "blind")
lookalike = lookalikes_of(SHELF)


def by_task(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return pixels with the task, which is how far the labels are turned."""
    x, labels = flat(n)
    task = torch.randint(0, 4, (n,))
    return (x, task), (labels + task) % 10


@lookalike("hypernetwork: the weights of the classifier are made from a task code", by_task)
class HyperNetwork(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.task, self.features = (
            nn.Embedding(4, 8),
            nn.Sequential(nn.Linear(64, width), nn.Tanh()),
        )
        self.make_weight, self.make_bias = nn.Linear(8, 10 * width), nn.Linear(8, 10)
        nn.init.normal_(self.make_weight.weight, std=(8 * width) ** -0.5)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        code = self.task(task)
        weight = self.make_weight(code).unflatten(1, (10, -1))
        return torch.einsum("nkd,nd->nk", weight, self.features(x)) + self.make_bias(code)


@lookalike(
    "deep ensemble by vmap over stacked weights",
    flat,
    lambda out, y: sum(F.cross_entropy(member, y) for member in out),
)
class StackedEnsemble(nn.Module):
    def __init__(self, members: int = 5) -> None:
        super().__init__()
        nets = [perceptron(64, 32, 10) for _ in range(members)]
        stacked, _ = stack_module_state(nets)
        self.names = list(stacked)
        self.stacked = nn.ParameterList(nn.Parameter(t.detach()) for t in stacked.values())
        self.skeleton = [copy.deepcopy(nets[0]).to("meta")]  # a list hides it from `parameters`

    def forward(self, x: Tensor) -> Tensor:
        def call(weights: dict[str, Tensor]) -> Tensor:
            return functional_call(self.skeleton[0], weights, (x,))

        return vmap(call)(dict(zip(self.names, self.stacked, strict=True)))


def few_shots(n: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return 4 tasks of sine waves: points and values to adapt to, points to predict."""
    x, phase = torch.rand(4, 2 * n, 1) * 10 - 5, torch.rand(4, 1, 1) * math.pi
    y = (x + phase).sin()
    return (x[:, :n], y[:, :n], x[:, n:]), y[:, n:]


@lookalike(
    "MAML: an inner step by functional_call, differentiated through", few_shots, F.mse_loss, 10
)
class MAML(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.learner = perceptron(1, 40, 40, 1, act=nn.Tanh)
        self.log_rate = nn.Parameter(torch.tensor(-4.0))

    def forward(self, x: Tensor, y: Tensor, new_x: Tensor) -> Tensor:
        start, out = dict(self.learner.named_parameters()), []
        for task_x, task_y, task_new in zip(x, y, new_x, strict=True):
            loss = F.mse_loss(functional_call(self.learner, start, (task_x,)), task_y)
            slopes = torch.autograd.grad(loss, list(start.values()), create_graph=True)
            rate = self.log_rate.exp()
            adapted = {k: v - rate * g for (k, v), g in zip(start.items(), slopes, strict=True)}
            out.append(functional_call(self.learner, adapted, (task_new,)))
        return torch.stack(out)


class RankOne(nn.Module):
    """A shared weight, and two sign vectors for each member."""

    def __init__(self, inputs: int, outputs: int, members: int) -> None:
        super().__init__()
        self.shared = nn.Linear(inputs, outputs, bias=False)
        self.r = nn.Parameter(torch.randn(members, 1, inputs).sign())
        self.s = nn.Parameter(torch.randn(members, 1, outputs).sign())
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x * self.r) * self.s + self.bias


@lookalike(
    "BatchEnsemble: the members share a weight",
    flat,
    lambda out, y: F.cross_entropy(out.flatten(0, 1), y.repeat(len(out))),
)
class BatchEnsemble(nn.Module):
    def __init__(self, members: int = 4) -> None:
        super().__init__()
        self.a, self.b, self.members = RankOne(64, 48, members), RankOne(48, 10, members), members

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x.expand(self.members, -1, -1)).relu())


@lookalike(
    "VICReg: one tower called twice",
    views,
    lambda z: (
        25 * F.mse_loss(z[0], z[1])
        + sum(
            25 * F.relu(1 - (v.var(0) + 1e-4).sqrt()).mean()
            + v.T.cov().fill_diagonal_(0).square().sum() / v.shape[1]
            for v in z
        )
    ),
    64,
)
class VICReg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = perceptron(64, 48, 24)
        self.expander = nn.Sequential(
            nn.Linear(24, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32)
        )

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.expander(self.backbone(a)), self.expander(self.backbone(b))


@lookalike(
    "LiT: a locked image tower and a learned temperature",
    captions,
    lambda scores, _: (
        (
            F.cross_entropy(scores, torch.arange(len(scores)))
            + F.cross_entropy(scores.T, torch.arange(len(scores)))
        )
        / 2
    ),
)
class LockedImage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual, self.token_embedding = frozen(conv_net(32)), PlacedTokens(32)
        self.text, self.text_projection = PreNorm(32), nn.Linear(32, 32, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        with torch.no_grad():
            image = F.normalize(self.visual(pixels), dim=-1)
        text = self.text_projection(self.text(self.token_embedding(ids)).mean(1))
        return self.logit_scale.exp().clamp(max=100) * image @ F.normalize(text, dim=-1).T


def few_digits(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return 5 classes of 3 examples as support, the queries, and the labels of those."""
    centres = torch.randn(5, 1, 64)
    queries = centres + 0.5 * torch.randn(5, n // 5, 64)
    return (centres + 0.5 * torch.randn(5, 3, 64), queries.flatten(0, 1)), torch.arange(
        5
    ).repeat_interleave(n // 5)


@lookalike("prototypical network: no classifier, support and queries share an encoder", few_digits)
class Prototypical(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = perceptron(64, 64, 32)

    def forward(self, support: Tensor, queries: Tensor) -> Tensor:
        return -torch.cdist(self.encoder(queries), self.encoder(support).mean(1)).square() / 32


def molecules(n: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return atoms, edges and the molecule of each atom, and how many atoms are of kind 0."""
    kinds, owner = torch.randint(0, 6, (5 * n,)), torch.arange(n).repeat_interleave(5)
    a = torch.arange(5 * n)
    b = owner * 5 + (a + 1) % 5
    edges = torch.stack([torch.cat([a, b]), torch.cat([b, a])])
    return (kinds, edges, owner), (kinds == 0).view(n, 5).float().sum(1, keepdim=True)


@lookalike(
    "gated graph net: one message function and one GRU called four times", molecules, F.mse_loss
)
class GatedGraph(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.atom, self.message, self.gru = (
            nn.Embedding(6, width),
            nn.Linear(width, width),
            nn.GRUCell(width, width),
        )
        self.gate, self.readout = nn.Linear(2 * width, 1), nn.Linear(width, 1)

    def forward(self, kinds: Tensor, edges: Tensor, owner: Tensor) -> Tensor:
        first = h = self.atom(kinds)
        for _ in range(4):
            sent = torch.zeros_like(h).index_add_(0, edges[1], self.message(h)[edges[0]])
            h = self.gru(sent, h)
        part = self.gate(torch.cat([h, first], -1)).sigmoid() * self.readout(h)
        return torch.zeros(int(owner[-1]) + 1, 1).index_add_(0, owner, part)


@lookalike(
    "EGNN: the coordinates of the last layer are not read",
    clouds,
    lambda out, y: F.cross_entropy(out, y),
)
class Equivariant(nn.Module):
    class Layer(nn.Module):
        """Messages that move features and coordinates."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.edge_mlp, self.node_mlp = (
                perceptron(2 * width + 1, width, width, act=nn.SiLU),
                perceptron(2 * width, width, width, act=nn.SiLU),
            )
            self.coord_mlp = nn.Sequential(
                nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1, bias=False)
            )
            nn.init.xavier_uniform_(self.coord_mlp[2].weight, gain=0.001)

        def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            gap = x[:, :, None] - x[:, None]
            n = h.shape[1]
            pairs = (h[:, :, None].expand(-1, -1, n, -1), h[:, None].expand(-1, n, -1, -1))
            m = F.silu(self.edge_mlp(torch.cat([*pairs, gap.square().sum(-1, keepdim=True)], -1)))
            x = x + (gap * self.coord_mlp(m)).mean(2)
            return h + self.node_mlp(torch.cat([h, m.mean(2)], -1)), x

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embedding_in, self.out = nn.Linear(3, width), nn.Linear(width, 3)
        self.gcl_0, self.gcl_1 = self.Layer(width), self.Layer(width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding_in(x.abs())
        h, x = self.gcl_0(h, x)
        h, x = self.gcl_1(h, x)
        return self.out(h.mean(1))


@lookalike("neural ODE: a fixed-step solver calls one field many times", flat)
class NeuralODE(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.downsample, self.field = (
            nn.Linear(64, width),
            perceptron(width + 1, 32, width, act=nn.Tanh),
        )
        self.fc = nn.Linear(width, 10)

    def slope(self, t: float, z: Tensor) -> Tensor:
        return self.field(torch.cat([z, torch.full_like(z[:, :1], t)], 1))

    def forward(self, x: Tensor) -> Tensor:
        z, step = self.downsample(x), 0.25
        for i in range(4):
            t = i * step
            k1 = self.slope(t, z)
            k2 = self.slope(t + step / 2, z + step / 2 * k1)
            k3 = self.slope(t + step / 2, z + step / 2 * k2)
            z = z + step / 6 * (k1 + 2 * k2 + 2 * k3 + self.slope(t + step, z + step * k3))
        return self.fc(z)


@lookalike(
    "Glow: coupling layers pass half through and start at the identity",
    lambda n: (flat(n)[0] + 0.05 * torch.randn(n, 64), None),
    lambda out: (0.5 * out[0].square().sum(1) - out[1]).mean() / 64,
)
class Couplings(nn.Module):
    def __init__(self, steps: int = 4) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 48), nn.ReLU(), zeroed(nn.Linear(48, 64)))
            for _ in range(steps)
        )
        self.register_buffer("orders", torch.stack([torch.randperm(64) for _ in range(steps)]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume = torch.zeros(len(x))
        for net, order in zip(self.nets, self.orders, strict=True):
            kept, moved = x[:, order].chunk(2, 1)
            log_s, t = net(kept).chunk(2, 1)
            log_s = 2 * torch.tanh(log_s / 2)
            x, volume = torch.cat([kept, moved * log_s.exp() + t], 1), volume + log_s.sum(1)
        return x, volume


class MaskedLinear(nn.Linear):
    def __init__(self, inputs: int, outputs: int, mask: Tensor) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("mask", mask.float())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


def binarised(n: int) -> tuple[Tensor, Tensor]:
    """Return pixels of 0 or 1 twice."""
    ink = (flat(n)[0] > 0).float()
    return ink, ink


@lookalike(
    "MADE: masked weights, the first output sees nothing, the last input is not seen",
    binarised,
    F.binary_cross_entropy_with_logits,
)
def masked_density() -> nn.Module:
    inputs, hidden = torch.arange(64), torch.arange(96) % 63
    return nn.Sequential(
        MaskedLinear(64, 96, hidden[:, None] >= inputs),
        nn.ReLU(),
        MaskedLinear(96, 96, hidden[:, None] >= hidden),
        nn.ReLU(),
        MaskedLinear(96, 64, inputs[:, None] > hidden),
    )


@lookalike("a pruned network keeps its masks in buffers", flat)
def lottery_ticket() -> nn.Module:
    return nn.Sequential(
        MaskedLinear(64, 96, torch.rand(96, 64) < 0.3),
        nn.ReLU(),
        MaskedLinear(96, 48, torch.rand(48, 96) < 0.3),
        nn.ReLU(),
        nn.Linear(48, 10),
    )


@lookalike("MAE: three of four patches are dropped, the mask token fills them in", unlabelled, None)
class MaskedAutoencoder(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch_embed, self.encoder = (
            Patches(width),
            nn.Sequential(PreNorm(width), PreNorm(width)),
        )
        self.decoder_embed, self.mask_token = nn.Linear(width, 16), normal(1, 1, 16)
        self.decoder_pos, self.decoder = normal(1, 16, 16), PreNorm(16)
        self.pred = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        order = torch.rand(len(x), 16).argsort(1)
        seen = order[:, :4, None]
        h = self.patch_embed(x)
        h = self.decoder_embed(self.encoder(h.gather(1, seen.expand(-1, -1, h.shape[-1]))))
        full = torch.cat([h, self.mask_token.expand(len(x), 12, -1)], 1)
        full = full.gather(1, order.argsort(1)[..., None].expand_as(full))
        made = self.pred(self.decoder(full + self.decoder_pos))
        wrong = (made - F.pixel_unshuffle(x, 2).flatten(2).transpose(1, 2)).square().mean(-1)
        hidden = torch.ones(len(x), 16).scatter(1, seen.squeeze(-1), 0.0)
        return (wrong * hidden).sum() / hidden.sum()


@lookalike("LSTM by hand, with a forget bias of one and a layer norm", rows)
class HandLSTM(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.x2h, self.h2h = nn.Linear(8, 4 * width), nn.Linear(width, 4 * width, bias=False)
        nn.init.ones_(self.x2h.bias[width : 2 * width].data)
        self.norm, self.out, self.width = nn.LayerNorm(width), nn.Linear(width, 10), width

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(len(x), self.width)
        for step in self.x2h(x).unbind(1):
            i, f, o, g = (step + self.h2h(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * self.norm(c).tanh()
        return self.out(h)


@lookalike("echo state network: a random reservoir in a frozen cell", rows)
class EchoState(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.reservoir = frozen(nn.RNN(8, width, batch_first=True))
        weight = torch.randn(width, width)
        self.reservoir.weight_hh_l0.data = 0.9 * weight / torch.linalg.eigvals(weight).abs().max()
        self.readout = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.reservoir(x)[0][:, -1])


def copies(n: int) -> tuple[Tensor, Tensor]:
    """Return 4 random bit vectors then 4 of zeros, and the vectors."""
    bits = torch.randint(0, 2, (n, 4, 6)).float()
    return torch.cat([bits, torch.zeros(n, 4, 6)], 1), bits


@lookalike(
    "neural Turing machine: outputs while it reads the input are dropped",
    copies,
    F.binary_cross_entropy_with_logits,
)
class TuringMachine(nn.Module):
    def __init__(self, slots: int = 8, size: int = 10, hidden: int = 32) -> None:
        super().__init__()
        self.controller = nn.LSTMCell(6 + size, hidden)
        self.interface, self.emit = nn.Linear(hidden, 4 * size + 2), nn.Linear(hidden + size, 6)
        self.register_buffer("blank", 0.05 * torch.randn(slots, size))
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        memory, read = self.blank.expand(len(x), -1, -1), torch.zeros(len(x), self.size)
        state, out = None, []
        for step in x.unbind(1):
            state = self.controller(torch.cat([step, read], -1), state)
            sizes = [self.size] * 4 + [1, 1]
            r, w, erase, add, sharp_r, sharp_w = self.interface(state[0]).split(sizes, -1)
            where = (F.softplus(sharp_w) + 1) * F.cosine_similarity(memory, w[:, None], dim=-1)
            where = where.softmax(-1)[..., None]
            memory = memory * (1 - where * erase.sigmoid()[:, None]) + where * add.tanh()[:, None]
            where = (F.softplus(sharp_r) + 1) * F.cosine_similarity(memory, r[:, None], dim=-1)
            read = (where.softmax(-1)[..., None] * memory).sum(1)
            out.append(self.emit(torch.cat([state[0], read], -1)))
        return torch.stack(out[4:], 1)


def continued(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return 8 token ids with the next 8, and those again."""
    ids, _ = words(n)
    return (ids[:, :8], ids[:, 8:16]), ids[:, 8:16]


@lookalike(
    "scheduled sampling: half of the inputs are the decoder's own choices", continued, language_loss
)
class ScheduledSampling(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(18, width, padding_idx=0)
        self.encoder, self.decoder = (
            nn.GRU(width, width, batch_first=True),
            nn.GRUCell(width, width),
        )
        self.generator = nn.Linear(width, 18)

    def forward(self, source: Tensor, goal: Tensor) -> Tensor:
        h = self.encoder(self.embedding(source))[1][0]
        last, out = torch.zeros_like(goal[:, 0]), []
        for right in goal.unbind(1):
            h = self.decoder(self.embedding(last), h)
            out.append(self.generator(h))
            last = torch.where(torch.rand(len(goal)) < 0.5, right, out[-1].argmax(-1))
        return torch.stack(out, 1)


def strips(n: int) -> tuple[Tensor, Tensor]:
    """Return three digits side by side as 24 columns, (n, 24, 8), and their labels."""
    x, labels = images(3 * n)
    return x.view(n, 3, 8, 8).transpose(2, 3).flatten(1, 2), labels.view(n, 3)


@lookalike(
    "CTC over a bidirectional LSTM",
    strips,
    lambda out, y: F.ctc_loss(out, y + 1, (out.shape[0],) * len(y), (3,) * len(y)),
)
class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Conv1d(8, 24, 3, padding=1)
        self.blstm, self.out = (
            nn.LSTM(24, 24, bidirectional=True, batch_first=True),
            nn.Linear(48, 11),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.columns(x.transpose(1, 2)).relu().transpose(1, 2)
        return self.out(self.blstm(h)[0]).log_softmax(-1).transpose(0, 1)


def tagged(n: int) -> tuple[tuple[Tensor, Tensor], None]:
    """Return token ids with tags by their size."""
    ids, _ = words(n)
    return (ids[:, :12], (ids[:, :12] > 4).long() + (ids[:, :12] > 12).long()), None


@lookalike(
    "conditional random field: zero transitions, decoding under no_grad", tagged, lambda out: out[0]
)
class Tagger(nn.Module):
    def __init__(self, tags: int = 3) -> None:
        super().__init__()
        self.embed, self.lstm = (
            nn.Embedding(18, 16),
            nn.LSTM(16, 16, bidirectional=True, batch_first=True),
        )
        self.emit, self.transitions = nn.Linear(32, tags), nn.Parameter(torch.zeros(tags, tags))

    def forward(self, ids: Tensor, tags: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.emit(self.lstm(self.embed(ids))[0])
        right = scores.gather(-1, tags[..., None]).sum((1, 2))
        right = right + self.transitions[tags[:, :-1], tags[:, 1:]].sum(1)
        alpha = scores[:, 0]
        for step in scores[:, 1:].unbind(1):
            alpha = (alpha[:, :, None] + self.transitions).logsumexp(1) + step
        with torch.no_grad():
            best = scores.argmax(-1)
        return (alpha.logsumexp(1) - right).mean(), best


@lookalike("spectral and weight norm by parametrisations", images)
class Parametrised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = parametrizations.weight_norm(nn.Conv2d(1, 12, 3, padding=1))
        self.inner = parametrizations.spectral_norm(nn.Conv2d(12, 24, 3, 2, 1))
        self.turn = parametrizations.orthogonal(nn.Linear(24, 24))
        self.verdict = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.inner(F.leaky_relu(self.inlet(x), 0.1)), 0.1)
        return self.verdict(self.turn(x.mean((2, 3))))


@lookalike("results written into slices of a preallocated tensor", rows)
class WritesInPlace(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(8, width), nn.Linear(8, width)
        self.act, self.mix = nn.ReLU(inplace=True), nn.Linear(8 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 8, self.even.out_features)
        out[:, 0::2] = self.act(self.even(x[:, 0::2]))
        out[:, 1::2] += self.act(self.odd(x[:, 1::2]))
        return self.mix(out.flatten(1))


@lookalike(
    "Matryoshka: every prefix of the code has its head",
    flat,
    lambda out, y: sum(F.cross_entropy(logits, y) for logits in out.values()),
)
class Matryoshka(nn.Module):
    def __init__(self, sizes: tuple[int, ...] = (4, 8, 16, 32)) -> None:
        super().__init__()
        self.encode = perceptron(64, 64, max(sizes))
        self.nested = nn.ModuleDict({str(n): nn.Linear(n, 10) for n in sizes})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        code = self.encode(x)
        return {n: head(code[:, : int(n)]) for n, head in self.nested.items()}


class ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.scale * grad, None


@lookalike(
    "wav2vec: the features learn at a tenth, the targets are Gumbel codes",
    strips,
    lambda out, _: F.cross_entropy(out["scores"], out["right"]) + 0.1 * out["diversity"],
)
class Wav2Vec(nn.Module):
    def __init__(self, width: int = 24, codes: int = 12) -> None:
        super().__init__()
        self.features = nn.Conv1d(8, width, 3, padding=1)
        self.mask_emb, self.context = (
            normal(width, std=0.3),
            nn.Sequential(PreNorm(width), PreNorm(width)),
        )
        self.code_logits, self.codes = nn.Linear(width, codes), normal(codes, width, std=0.5)
        self.place = normal(24, width, std=0.1)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = ScaleGradient.apply(F.gelu(self.features(x.transpose(1, 2))), 0.1).transpose(1, 2)
        hidden = torch.rand(z.shape[:2]) < 0.4
        logits = self.code_logits(z[hidden])
        goals = F.gumbel_softmax(logits, tau=2.0, hard=True) @ self.codes
        made = self.project(
            self.context(torch.where(hidden[..., None], self.mask_emb, z) + self.place)[hidden]
        )
        scores = F.normalize(made, dim=-1) @ F.normalize(goals, dim=-1).T / 0.1
        p = logits.softmax(-1).mean(0)
        spread = 1 - torch.exp(-(p * (p + 1e-7).log()).sum()) / len(p)
        return {"scores": scores, "right": torch.arange(len(scores)), "diversity": spread}


@lookalike(
    "stacked hourglasses with supervision between and running statistics of activations",
    noisy,
    lambda outs, y: sum(F.binary_cross_entropy_with_logits(out, y) for out in outs),
)
class Hourglasses(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.pre = nn.Conv2d(1, width, 3, padding=1)
        self.down, self.low, self.up = (
            nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2)) for _ in "dlu"
        )
        self.heat = nn.ModuleList(nn.Conv2d(width, 1, 1) for _ in range(2))
        self.back = nn.Conv2d(1, width, 1)
        self.register_buffer("seen_mean", torch.zeros(width))

    def forward(self, x: Tensor) -> list[Tensor]:
        x, outs = self.pre(x), []
        self.seen_mean.lerp_(x.detach().mean((0, 2, 3)), 0.1)
        for i, heat in enumerate(self.heat):
            inner = self.low[i](F.max_pool2d(self.down[i](x).relu(), 2)).relu()
            h = self.up[i](x + F.interpolate(inner, scale_factor=2)).relu()
            outs.append(heat(h))
            x = x + h if i else x + h + self.back(outs[-1])
        return outs


@lookalike(
    "two streams through one encoder, fused late by attention", views, lambda out: out["match"]
)
class TwoStream(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.shared, self.fuse = (
            perceptron(64, 48, width),
            nn.MultiheadAttention(width, 2, batch_first=True),
        )
        self.same = nn.Linear(2 * width, 1)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Any]:
        matching = torch.rand(len(a)) < 0.5
        b = torch.where(matching[:, None], b, b.roll(1, 0))
        both = torch.stack([self.shared(a), self.shared(b)], 1)
        score = self.same(self.fuse(both, both, both)[0].flatten(1)).squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(score, matching.float())
        return {"match": loss, "logged": ((score > 0) == matching).float().mean().item()}


@lookalike(
    "deep embedded clustering: the target distribution is detached", unlabelled_flat, None, 64
)
class Clusters(nn.Module):
    def __init__(self, clusters: int = 10) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(64, 48, 8), perceptron(8, 48, 64)
        self.centres = normal(clusters, 8, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        q = 1 / (1 + torch.cdist(z, self.centres).square())
        q = q / q.sum(1, keepdim=True)
        p = q.square() / q.sum(0)
        p = (p / p.sum(1, keepdim=True)).detach()
        return F.mse_loss(self.decoder(z), x) + 0.1 * F.kl_div(q.log(), p, reduction="batchmean")
