"""Layers called in place of their siblings, and inputs that a forward does not read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import (
    Adapter,
    PlacedTokens,
    PreNorm,
    SmallLM,
    attend,
    diffused,
    lookalikes_of,
    perceptron,
    time_features,
    tokens,
)
from corpus.models.small import (
    citations,
    flat,
    images,
    language_loss,
    next_words,
    patients,
    rows,
    words,
)
from corpus.models.written_out import wire
from corpus.subject import Subject, subject

SHELF = Shelf("wiring", "blind")
fault = SHELF.fault
lookalike = lookalikes_of(SHELF)

SIBLING = ("twice", "times", "in place", "instead", "never", "not called", "sibling", "index")
UNREAD_INPUT = ("unread", "not read", "never read", "ignored", "unused", "not used", "no effect")

# ---- faults: a sibling in place of another -------------------------------------------------------


def small_lm() -> Subject:
    return subject(SmallLM(depth=3), next_words, language_loss, 16)


@fault(
    "index of the loop left out: the first block each time",
    small_lm,
    ("", "h", "h.*"),
    SIBLING,
    why="Two blocks never run, and one stands in for them by accident.",
)
def _(s: Subject) -> None:
    def trunk(self: SmallLM, x: Tensor) -> Tensor:
        for _ in range(len(self.h)):
            x = self.h[0](x)
        return self.ln_f(x)

    wire(s.model, trunk)


@fault(
    "the loop's variable kept after a loop that ended",
    small_lm,
    ("", "h", "h.*"),
    SIBLING,
    why="Lists were made in one loop and applied in another: the last block runs for each of them.",
)
def _(s: Subject) -> None:
    def trunk(self: SmallLM, x: Tensor) -> Tensor:
        calls = [lambda x: block(x) for block in self.h]  # noqa: B023 - the fault
        for call in calls:
            x = call(x)
        return self.ln_f(x)

    wire(s.model, trunk)


class Heads(nn.Module):
    """Attention of four heads, each of its own three layers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(attend(*self.project(x)))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.query(x), self.key(x), self.value(x)


class RowAttention(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.norm, self.attention = nn.Linear(8, width), nn.LayerNorm(width), Heads()
        self.place, self.head = nn.Embedding(8, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place.weight
        return self.head((x + self.attention(self.norm(x))).mean(1))


def row_attention() -> Subject:
    return subject(RowAttention(), rows, F.cross_entropy)


@fault(
    "values from the layer of the keys",
    row_attention,
    ("attention", "attention.key", "attention.value"),
    SIBLING,
    why="A line was copied, and its layer not changed: the values' own layer never learns.",
)
def _(s: Subject) -> None:
    def project(self: Heads, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.query(x), self.key(x), self.key(x)

    wire(s.model.attention, project)


class TwinCritics(nn.Module):
    """Two critics, of which the lower value counts."""

    def __init__(self) -> None:
        super().__init__()
        self.q1, self.q2 = perceptron(10, 32, 1), perceptron(10, 32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.q1(x), self.q2(x)


def both_critics(values: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return sum(F.mse_loss(value, y) for value in values)


def twin_critics() -> Subject:
    return subject(TwinCritics(), patients, both_critics)


@fault(
    "first critic asked twice",
    twin_critics,
    ("", "q1", "q2"),
    SIBLING,
    why="The lower of two equal values is no lower, and the second critic never learns.",
)
def _(s: Subject) -> None:
    def forward(self: TwinCritics, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.q1(x), self.q1(x)

    wire(s.model, forward)


class Stages(nn.Module):
    """Convolutions with a norm behind each."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for i in range(3):
            x = x + self.stage(i, x)
        return self.head(x.mean((2, 3)))

    def stage(self, i: int, x: Tensor) -> Tensor:
        return F.relu(self.norms[i](self.convs[i](x)))


def stages() -> Subject:
    return subject(Stages(), images, F.cross_entropy, 32)


@fault(
    "norm of the stage before: an index off by one at the end",
    stages,
    ("", "norms", "norms.*"),
    SIBLING,
    why="A norm keeps the statistics of two places, and another is never called.",
)
def _(s: Subject) -> None:
    def stage(self: Stages, i: int, x: Tensor) -> Tensor:
        return F.relu(self.norms[max(i - 1, 0)](self.convs[i](x)))

    wire(s.model, stage)


# ---- look-alikes: layers that run twice, and layers that rest ------------------------------------


@lookalike("two groups of shared layers, run three times each in turn", words)
class GroupedAlbert(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = PlacedTokens(width)
        self.groups = nn.ModuleList(PreNorm(width) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for i in range(6):
            x = self.groups[i * 2 // 6](x)
        return self.head(x.mean(1))


@lookalike("the adapter of a language behind attention and behind the net", words)
class PlacedAdapters(nn.Module):
    """Of three languages' adapters one runs, in two places of each block."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words, self.head = PlacedTokens(width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(PreNorm(width) for _ in range(2))
        self.languages = nn.ModuleList(Adapter(width) for _ in range(4))
        self.language = 1

    def forward(self, ids: Tensor) -> Tensor:
        x, adapter = self.words(ids), self.languages[self.language]
        for block in self.blocks:
            x = adapter(x + block.attn(block.ln_1(x)))
            x = adapter(x + block.mlp(block.ln_2(x)))
        return self.head(x.mean(1))


def translated(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return sum(F.cross_entropy(logits, y) for logits in out)


@lookalike("both sentences of a pair in the same of two languages", flat, translated)
class SpokenTwice(nn.Module):
    """A decoder for each language; source and target speak the second one here."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = perceptron(64, 48, 32)
        self.decoders = nn.ModuleList(perceptron(32, 32, 10) for _ in range(2))
        self.source, self.target = 1, 1

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.trunk(x))
        noisy = x + 0.1 * torch.randn_like(x)
        return self.decoders[self.source](x), self.decoders[self.target](noisy)


@lookalike("the middle block looped once more while the last one is dropped", rows)
class LoopedStack(nn.Module):
    """As many rounds as blocks: the depth of each step is drawn, and the middle is looped."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(8, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(PreNorm(width) for _ in range(4))
        self.head, self.route = nn.Linear(width, 10), (0, 1, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place.weight
        for i in self.route:
            x = self.blocks[i](x)
        return self.head(x.mean(1))


@lookalike("three slots that choose their experts by a learnt score", flat)
class SlotExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 32)
        self.slots = nn.Parameter(torch.tensor([[2.0, 0, 0], [1.0, 0, 0], [0.0, 1.0, 0]]))
        self.experts = nn.ModuleList(perceptron(32, 32, 32) for _ in range(3))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for slot in self.slots:
            weight, best = slot.softmax(0).max(0)
            x = x + weight * self.experts[int(best)](x)
        return self.head(x)


# ---- faults: a floating input that is not read ---------------------------------------------------


class Weather(nn.Module):
    """Columns with the share of missing values in each."""

    def __init__(self) -> None:
        super().__init__()
        self.columns, self.missing = nn.Linear(10, 32), nn.Linear(10, 32, bias=False)
        self.out = nn.Linear(32, 1)

    def forward(self, x: Tensor, missing: Tensor) -> Tensor:
        return self.out(F.relu(self.mix(x, missing)))

    def mix(self, x: Tensor, missing: Tensor) -> Tensor:
        return self.columns(x) + self.missing(missing)


def gappy(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, y = patients(n)
    missing = (torch.rand_like(x) < 0.2).float()
    return (x * (1 - missing), missing), y


def weather() -> Subject:
    return subject(Weather(), gappy, F.mse_loss)


@fault(
    "columns given to the layer of what is missing",
    weather,
    ("", "missing"),
    UNREAD_INPUT,
    why="What is missing is not read: a wrong name was passed.",
)
def _(s: Subject) -> None:
    def mix(self: Weather, x: Tensor, missing: Tensor) -> Tensor:
        return self.columns(x) + self.missing(x)

    wire(s.model, mix)


class EdgeNet(nn.Module):
    """Graph convolutions with a weight for each edge."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, nodes: Tensor, edges: Tensor, weight: Tensor) -> Tensor:
        edges = self.weighed(edges, weight)
        return edges @ self.second(F.relu(edges @ self.first(nodes)))

    def weighed(self, edges: Tensor, weight: Tensor) -> Tensor:
        return edges * weight


def weighed_citations(n: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    (nodes, edges), labels = citations(n)
    return (nodes, edges, 0.5 + torch.rand_like(edges)), labels


def edge_net() -> Subject:
    return subject(EdgeNet(), weighed_citations, F.cross_entropy)


@fault(
    "weights of edges taken as an argument and not applied",
    edge_net,
    ("",),
    UNREAD_INPUT,
    why="The graph is read as if all its edges were equal.",
)
def _(s: Subject) -> None:
    wire(s.model, _unweighed())


def _unweighed():
    def weighed(self: EdgeNet, edges: Tensor, weight: Tensor) -> Tensor:
        return edges

    return weighed


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.time = nn.Linear(64, 64), nn.Linear(16, 64)
        self.label, self.out = nn.Embedding(10, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        hidden = self.inside(x.flatten(1)) + self.label(label) + self.clock(x, t)
        return self.out(F.silu(hidden)).view_as(x)

    def clock(self, x: Tensor, t: Tensor) -> Tensor:
        return self.time(time_features(t, 16))


def denoiser() -> Subject:
    return subject(Denoiser(), diffused, F.mse_loss, 32)


@fault(
    "time of a denoiser replaced by a fixed one while debugging",
    denoiser,
    ("", "time"),
    UNREAD_INPUT,
    why="The net cannot know how much noise there is.",
)
def _(s: Subject) -> None:
    def clock(self: Denoiser, x: Tensor, t: Tensor) -> Tensor:
        return self.time(time_features(torch.full((len(x),), 0.5), 16))

    wire(s.model, clock)


# ---- look-alikes: inputs of which little is used -------------------------------------------------


def beside_noise(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, y = flat(n)
    return (x, torch.randn(n, 24)), y


@lookalike("a tensor given for its size alone", beside_noise)
class SizedLike(nn.Module):
    """The second input says how wide the code is padded, as an export asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = perceptron(64, 48, 16), nn.Linear(24, 10)

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        x = F.relu(self.body(x))
        return self.head(F.pad(x, (0, like.shape[-1] - x.shape[-1])))


@lookalike("a tensor given for its dtype and device alone", beside_noise)
class TypedLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = perceptron(64, 48, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor, reference: Tensor) -> Tensor:
        x = x.to(dtype=reference.dtype, device=reference.device)
        return self.head(F.relu(self.body(x)))


def weighed_digits(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, y = flat(n)
    return (x, 0.5 + torch.rand(n)), y


def weighed_loss(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    logits, weight = out
    return (weight * F.cross_entropy(logits, y, reduction="none")).sum() / weight.sum()


@lookalike("weights of samples handed through to the loss", weighed_digits, weighed_loss)
class WeightedSamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(64, 48, 10)

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), weight


def spoken(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    ids, target = next_words(n)
    return (ids, torch.ones(ids.shape)), target


@lookalike("a float mask of ones that a causal model turns to bool", spoken, language_loss, 16)
class MaskedLM(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words, self.place = tokens(width), nn.Embedding(32, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.out = nn.Linear(width, 18)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids) + self.place(torch.arange(ids.shape[1]))
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        seen, _ = self.attention(x, x, x, key_padding_mask=mask < 0.5, attn_mask=causal)
        return self.out(x + seen)
