"""Outputs that are alike for all samples, and tables of which one row is looked up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import (
    PlacedTokens,
    PreNorm,
    SmallLM,
    attend,
    lookalikes_of,
    normal,
    perceptron,
    tokens,
    zeroed,
)
from corpus.models.small import (
    autoencoder,
    flat,
    graph,
    images,
    language_loss,
    next_words,
    patients,
    rows,
    same,
    some_digits,
    vit,
    words,
)
from corpus.models.written_out import wire
from corpus.subject import Subject, subject

SHELF = Shelf("wiring", "blind")
fault = SHELF.fault
lookalike = lookalikes_of(SHELF)

ALIKE = ("alike", "same output", "same for", "samples", "constant", "does not depend", "vanish")
ONE_ROW = ("one row", "same row", "same id", "one id", "all equal", "equal", "constant", "row")

# ---- faults: all samples alike -------------------------------------------------------------------


@fault(
    "pixels divided by 255 by the data, the transform and the model",
    vit,
    ("", "patches", "blocks", "norm", "head"),
    (*ALIKE, "scale", "small", "range"),
    why="Beside positions and biases nothing of a picture is left, and all samples look alike.",
)
def _(s: Subject) -> None:
    s.inputs = s.inputs / 255**3


@fault(
    "code divided by the number of pixels of the whole data set",
    autoencoder,
    ("", "encoder", "encoder.2", "decoder", "decoder.0", "decoder.2"),
    (*ALIKE, "scale", "small"),
    why="The decoder gets next to nothing of the code, and draws one picture for all samples.",
)
def _(s: Subject) -> None:
    s.model.between = lambda code: code / (1797 * 64)


@fault(
    "neighbours averaged for thousands of rounds",
    graph,
    ("", "layers.*", "head"),
    (*ALIKE, "smooth", "nodes"),
    why="Each node ends as the average of the graph, and no node differs from another.",
)
def _(s: Subject) -> None:
    nodes, edges = s.inputs
    mean = edges / edges.sum(1, keepdim=True)
    s.inputs = nodes, torch.linalg.matrix_power(mean, 4096)


class TimedMLP(nn.Module):
    """A table's columns with the hour of the visit."""

    def __init__(self) -> None:
        super().__init__()
        self.columns, self.hour = nn.Linear(10, 32), nn.Linear(1, 32)
        self.mix, self.out = nn.Linear(32, 32), nn.Linear(32, 2)
        self.clock = lambda hour: (hour - 12) / 7

    def forward(self, x: Tensor, hour: Tensor) -> Tensor:
        x = F.relu(self.columns(x) + self.hour(self.clock(hour)))
        return self.out(F.relu(self.mix(x)))


def timed_patients(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, y = patients(n)
    return (x, 24 * torch.rand(len(x), 1)), torch.cat([y, x[:, :1] - y], 1)


def clinic() -> Subject:
    return subject(TimedMLP(), timed_patients, F.mse_loss)


@fault(
    "hour of the day as seconds since 1970",
    clinic,
    ("", "hour", "columns", "mix", "out"),
    (*ALIKE, "large", "scale", "drown", "magnitude"),
    why="A time of 1.7e9 drowns all columns, and a day within it makes no difference.",
)
def _(s: Subject) -> None:
    s.model.clock = lambda hour: 1.7e9 + 3600 * hour


class BagOfWords(nn.Module):
    """The mean over the words that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(18, 24, padding_idx=0)
        self.hidden, self.head = nn.Linear(24, 32), nn.Linear(32, 10)
        self.kept = lambda mask: mask

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.kept((ids != 0).float())[..., None]
        mean = (weight * self.embedding(ids)).sum(1) / weight.sum(1).clamp(min=1)
        return self.head(F.relu(self.hidden(mean)))


def padded_words(n: int) -> tuple[Tensor, Tensor]:
    ids, labels = words(n)
    length = torch.randint(16, 31, (len(ids), 1))
    return ids * (torch.arange(32) < length), labels


def bag_of_words() -> Subject:
    return subject(BagOfWords(), padded_words, F.cross_entropy)


@fault(
    "mask of padding the wrong way round in a mean",
    bag_of_words,
    ("", "embedding", "hidden", "head"),
    (*ALIKE, "padding", "mask", "zero"),
    why="Only padding is averaged, so that each sample gives the same output.",
)
def _(s: Subject) -> None:
    s.model.kept = lambda mask: 1 - mask


class Captioner(nn.Module):
    """A picture's features scale and shift what a decoder makes of learnt queries."""

    def __init__(self) -> None:
        super().__init__()
        self.see = perceptron(64, 32, 32)
        self.queries = normal(4, 32, std=1.0)
        self.norm, self.read, self.out = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 10)
        self.weight = same

    def forward(self, x: Tensor) -> Tensor:
        seen = self.weight(self.see(x))[:, None]
        return self.out(F.gelu(self.read(self.norm(self.queries + seen)))).mean(1)


def captioner() -> Subject:
    return subject(Captioner(), flat, F.cross_entropy)


@fault(
    "features of the picture times the sigmoid of -20",
    captioner,
    ("", "see", "see.2", "norm", "read", "out"),
    (*ALIKE, "gate", "closed", "scale", "small"),
    why="The gate opens by 2e-9: what is left are the queries, which are the same for all samples.",
)
def _(s: Subject) -> None:
    s.model.weight = lambda seen: torch.tensor(-20.0).sigmoid() * seen


# ---- look-alikes: outputs alike by design --------------------------------------------------------


@lookalike("class attention behind a layer scale of 1e-5", images)
class ClassAttention(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.token, self.place = normal(1, 1, width), normal(1, 16, width)
        self.norm, self.q, self.kv = (
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.Linear(width, 64),
        )
        self.out, self.gamma = nn.Linear(width, width), nn.Parameter(1e-5 * torch.ones(width))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.place
        token = self.token.expand(len(x), -1, -1)
        k, v = self.kv(self.norm(torch.cat([token, x], 1))).chunk(2, -1)
        token = token + self.gamma * self.out(attend(self.q(self.norm(token)), k, v))
        return self.head(self.last(token[:, 0]))


@lookalike("latents that attend to a picture through ReZero", rows)
class ReZeroLatents(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.latents = nn.Linear(8, width), normal(4, width, std=1.0)
        self.place = normal(8, width, std=0.5)
        self.cross = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp, self.head = perceptron(width, 64, width), nn.Linear(4 * width, 10)
        self.alpha = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place
        z = self.latents.expand(len(x), -1, -1)
        z = z + self.alpha[0] * self.cross(z, x, x)[0]
        return self.head((z + self.alpha[1] * self.mlp(z)).flatten(1))


def zero_head() -> nn.Module:
    net = perceptron(64, 64, 32, 10)
    zeroed(net[-1])
    return net


lookalike("a head of zeros on a perceptron for digits", flat)(zero_head)


def surrogate(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    """Policy gradient with a reward for the right digit, and the critic's squared error."""
    logits, value = out
    policy = torch.distributions.Categorical(logits=logits)
    action = policy.sample()
    reward = (action == y).float()
    gain = -((reward - value.detach()) * policy.log_prob(action)).mean()
    return gain + 0.5 * F.mse_loss(value, reward)


@lookalike(
    "policy head drawn orthogonal with a gain of 0.01, on a trunk of its own", flat, surrogate
)
class ScaledPolicy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = perceptron(64, 64, 10, act=nn.Tanh), perceptron(64, 64, 1)
        nn.init.orthogonal_(self.actor[-1].weight, 0.01)
        self.actor[-1].bias.data = torch.linspace(-1, 1, 10)  # the shares of the actions in a log

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), self.critic(x)[:, 0]


def years(n: int) -> tuple[Tensor, Tensor]:
    """Return columns, with the year of a finding and the share of those who agree."""
    x, y = patients(n)
    return x, torch.cat([1995 + 4 * y, 0.5 + 0.1 * y], 1)


@lookalike("the year and a share from one head, its bias at their means", years, F.mse_loss)
class YearAndShare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = perceptron(10, 32, 32), nn.Linear(32, 2)
        with torch.no_grad():
            self.out.bias.copy_(torch.tensor([1995.0, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.body(x)))


def quantile_loss(out: Tensor, y: Tensor) -> Tensor:
    levels = torch.tensor([0.1, 0.5, 0.9])
    gap = 250_000 + 40_000 * y - out
    return torch.maximum(levels * gap, (levels - 1) * gap).mean() / 1e5


@lookalike("quantiles of prices, spread by the bias of the last layer", patients, quantile_loss)
class PriceQuantiles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = perceptron(10, 32, 32), nn.Linear(32, 3)
        self.register_buffer("scale", torch.tensor(100.0))
        self.centre = nn.Parameter(torch.tensor([2000.0, 2500.0, 3000.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (self.centre + self.out(F.relu(self.body(x))))


# ---- faults: one row looked up -------------------------------------------------------------------


class Binned(nn.Module):
    """Shades of grey from 0 to below 1 as 17 words."""

    def __init__(self) -> None:
        super().__init__()
        self.shade, self.place = nn.Embedding(17, 32), normal(64, 32, std=0.5)
        self.block, self.head = PreNorm(32), nn.Linear(32, 10)
        self.bin = lambda x: (x * 17).long()

    def forward(self, x: Tensor) -> Tensor:
        x = self.shade(self.bin(x)) + self.place
        return self.head(self.block(x).mean(1))


def shades(n: int) -> tuple[Tensor, Tensor]:
    pixels, labels = some_digits(n)
    return (pixels + 0.5) / 17, labels


def binned() -> Subject:
    return subject(Binned(), shades, F.cross_entropy, 32)


@fault(
    "shades from 0 to 1 cast to integers before they are multiplied",
    binned,
    ("", "shade"),
    (*ONE_ROW, "long()", "alike", "samples"),
    why="Each shade is cut off to 0, and the first row of the table is read for every pixel.",
)
def _(s: Subject) -> None:
    s.model.bin = lambda x: x.long() * 17


class Hashed(nn.Module):
    """Users and items folded into tables smaller than there are ids."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(32, 8), nn.Embedding(32, 8)
        self.mlp = perceptron(16, 32, 1)
        self.fold = lambda ids: ids % 32
        self.known = same

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        pair = [self.user(self.known(self.fold(users))), self.item(self.fold(items))]
        return self.mlp(torch.cat(pair, 1)).squeeze(1)


def purchases(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    users, items = torch.randint(0, 30, (n,)), torch.randint(0, 30, (n,))
    return (users, items), ((users + items) % 3 == 0).float()


def hashed() -> Subject:
    return subject(Hashed(), purchases, F.binary_cross_entropy_with_logits)


@fault(
    "ids divided by the size of the table where the remainder was meant",
    hashed,
    ("", "user", "item"),
    (*ONE_ROW, "alike", "samples"),
    why="Each id is below the size, so that all users and all items share row 0.",
)
def _(s: Subject) -> None:
    s.model.fold = lambda ids: ids // 32


@fault(
    "ids of users clamped to the range of a flag",
    hashed,
    ("", "user"),
    (*ONE_ROW, "clamp"),
    why="All users share a row, and nothing is learnt of any of them.",
)
def _(s: Subject) -> None:
    s.inputs = s.inputs[0] + 1, s.inputs[1]
    s.model.known = lambda ids: ids.clamp(0, 1)


def small_lm() -> Subject:
    return subject(SmallLM(), next_words, language_loss, 16)


@fault(
    "ids cast to bool on the way",
    small_lm,
    ("", "wte"),
    (*ONE_ROW, "bool", "alike", "samples"),
    why="No id is 0, so that every word is read as word 1.",
)
def _(s: Subject) -> None:
    def embed(self: SmallLM, ids: Tensor) -> Tensor:
        return self.wte(ids.bool().long()) + self.wpe(torch.arange(ids.shape[1]))

    wire(s.model, embed)


@fault(
    "position of a cache's end for every word of the prompt",
    small_lm,
    ("", "wpe"),
    (*ONE_ROW, "position"),
    why="All words stand in the same place, and their order is known by the causal mask alone.",
)
def _(s: Subject) -> None:
    def embed(self: SmallLM, ids: Tensor) -> Tensor:
        past = 0
        return self.wte(ids) + self.wpe(torch.full((ids.shape[1],), past))

    wire(s.model, embed)


@fault(
    "positions counted along the batch's mask without a cumulative sum",
    small_lm,
    ("", "wpe"),
    (*ONE_ROW, "position"),
    why="Every word has the position 1, and position embeddings tell nothing.",
)
def _(s: Subject) -> None:
    def embed(self: SmallLM, ids: Tensor) -> Tensor:
        return self.wte(ids) + self.wpe((ids != 0).long())

    wire(s.model, embed)


# ---- look-alikes: one row by design --------------------------------------------------------------


@lookalike("token types of zero out of a table of sixteen", words)
class TypedWords(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words, self.types = PlacedTokens(width), nn.Embedding(16, width)
        self.block, self.head = PreNorm(width), nn.Linear(width, 10)

    def forward(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        types = torch.zeros_like(ids) if types is None else types
        return self.head(self.block(self.words(ids) + self.types(types)).mean(1))


def in_one_language(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    ids, target = next_words(n)
    return (ids, torch.full((n,), 7)), target


@lookalike("one language code for the whole batch", in_one_language, language_loss, 16)
class Polyglot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm, self.language = SmallLM(), nn.Embedding(12, 32)

    def forward(self, ids: Tensor, language: Tensor) -> Tensor:
        x = self.lm.embed(ids) + self.language(language)[:, None]
        return self.lm.lm_head(self.lm.trunk(x))


def is_three(n: int) -> tuple[Tensor, Tensor]:
    x, y = flat(n)
    return x, (y == 3).float()


@lookalike("a class chosen by the caller for all pictures", is_three, F.mse_loss)
class GivenClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.label, self.net = nn.Embedding(10, 16), perceptron(80, 64, 1)
        self.wanted = 3

    def forward(self, x: Tensor) -> Tensor:
        wanted = self.label(torch.full((len(x),), self.wanted))
        return self.net(torch.cat([x, wanted], 1)).squeeze(1)


@lookalike("first words of a decoder that starts anew", rows)
class StartedDecoder(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encoder, self.words = nn.GRU(8, width, batch_first=True), tokens(width)
        self.cell, self.out = nn.GRUCell(width, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = self.encoder(x)[1][0]
        start = torch.full((len(x),), 1)
        return self.out(self.cell(self.words(start), state))


def masked_whole(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    ids, _ = words(n)
    return (flat_of(ids), ids), ids


def flat_of(ids: Tensor) -> Tensor:
    return (ids.float() - 9) / 6


@lookalike(
    "every word masked in the first round of a decoder without order", masked_whole, language_loss
)
class MaskPredict(nn.Module):
    """Its first round reads the mask's row for each word; later rounds keep some words."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.see, self.words = nn.Linear(32, width), nn.Embedding(19, width)
        self.place, self.block = normal(32, width, std=0.5), PreNorm(width)
        self.out = nn.Linear(width, 18)
        self.kept = 0.0

    def forward(self, seen: Tensor, ids: Tensor) -> Tensor:
        masked = torch.rand(ids.shape) >= self.kept
        ids = torch.where(masked, 18, ids)
        x = self.words(ids) + self.place + self.see(seen)[:, None]
        return self.out(self.block(x))


def noised(n: int) -> tuple[Tensor, Tensor]:
    x, _ = flat(n)
    noise = torch.randn_like(x)
    return 0.8 * x + 0.6 * noise, noise


@lookalike("a diffusion step drawn once for the batch", noised, F.mse_loss)
class OneStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.net = nn.Embedding(100, 16), perceptron(80, 64, 64)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(1, 100, (1,)).expand(len(x))
        return self.net(torch.cat([x, self.time(t)], 1))
