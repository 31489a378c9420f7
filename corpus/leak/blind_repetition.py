"""Models whose second call is not their first, by chance or by memory, and those that may be so."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from corpus.cards import Shelf
from corpus.models.parts import (
    PlacedTokens,
    attend,
    conv_net,
    follow,
    frozen,
    lookalikes_of,
    perceptron,
    tokens,
)
from corpus.models.small import (
    evidence_bound,
    flat,
    images,
    itself,
    language_loss,
    next_words,
    patients,
    rows,
    tumours,
    unet,
    words,
)
from corpus.models.written_out import wire
from corpus.subject import Subject, subject

SHELF = Shelf("leak", "blind")
fault, lookalike = SHELF.fault, lookalikes_of(SHELF)

CHANCE = ("random", "dropout", "repeat", "twice", "evaluation", "seed", "noise")
MEMORY = ("twice", "repeat", "call", "evaluation", "state", "again")
binary = F.binary_cross_entropy_with_logits


# ---- chance --------------------------------------------------------------------------------------


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.out = nn.Linear(30, 32), nn.Linear(32, 32), nn.Linear(32, 1)

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(F.relu(self.fc2(F.relu(self.fc1(x))))))


def dropped() -> Subject:
    return subject(Dropped(), tumours, binary, 24)


SHELF.control("functional dropout told whether it trains", dropped)


@fault(
    "functional dropout not told whether it trains",
    dropped,
    ("", "out", "fc2"),
    CHANCE,
    why="Without its last argument F.dropout drops in evaluation, too.",
)
def _(s: Subject) -> None:
    def drop(self: Any, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3)

    wire(s.model, drop)


@fault(
    "dropout layer made anew in each call",
    dropped,
    ("", "out", "fc2"),
    CHANCE,
    why="A new layer is in training mode, whatever its model is in.",
)
def _(s: Subject) -> None:
    def drop(self: Any, x: Tensor) -> Tensor:
        return nn.Dropout(0.3)(x)

    wire(s.model, drop)


@fault(
    "half of the features left out by numbers of its own",
    dropped,
    ("", "out", "fc2"),
    CHANCE,
    why="Written by hand, dropout has no evaluation.",
)
def _(s: Subject) -> None:
    def drop(self: Any, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) > 0.5) * 2

    wire(s.model, drop)


class Fused(nn.Module):
    def __init__(self, width: int = 32, p: float = 0.2) -> None:
        super().__init__()
        self.embed, self.qkv = PlacedTokens(width), nn.Linear(width, 3 * width)
        nn.init.normal_(self.embed.token.weight)
        self.o_proj, self.head, self.p = nn.Linear(width, width), nn.Linear(width, 18), p

    def rate(self) -> float:
        return self.p if self.training else 0.0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(x + self.o_proj(attend(q, k, v, is_causal=True, dropout_p=self.rate())))


def fused() -> Subject:
    return subject(Fused(), next_words, language_loss, 8)


SHELF.control("fused attention that drops in training alone", fused)


@fault(
    "fused attention given its dropout in every mode",
    fused,
    ("", "o_proj", "scaled_dot_product_attention"),
    CHANCE,
    why="The function knows no mode: it drops whatever it is told to.",
)
def _(s: Subject) -> None:
    def rate(self: Any) -> float:
        return self.p

    wire(s.model, rate)


class Noisy(nn.Module):
    """Noise on the features in training."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(10, 24, 24, 1)

    def shaken(self, x: Tensor) -> Tensor:
        return x + 0.2 * torch.randn_like(x) if self.training else x

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.shaken(x))


def noisy_table() -> Subject:
    return subject(Noisy(), patients, F.mse_loss, 24)


SHELF.control("noise on the features in training alone", noisy_table)


@fault(
    "noise on the features in every mode",
    noisy_table,
    ("", "net", "net.0"),
    CHANCE,
    why="The same patient gets another forecast each time.",
)
def _(s: Subject) -> None:
    def shaken(self: Any, x: Tensor) -> Tensor:
        return x + 0.2 * torch.randn_like(x)

    wire(s.model, shaken)


class Masking(nn.Module):
    """Some words are replaced by the unknown word in training."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.rnn = tokens(16), nn.GRU(16, 24, batch_first=True)
        self.out = nn.Linear(24, 10)

    def unknown(self, ids: Tensor) -> Tensor:
        return ids.masked_fill(torch.rand(ids.shape) < 0.1, 0) if self.training else ids

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.rnn(self.emb(self.unknown(ids)))[1][-1])


def masking() -> Subject:
    return subject(Masking(), words, F.cross_entropy, 16)


SHELF.control("words replaced by the unknown one in training alone", masking)


@fault(
    "words replaced by the unknown one in every mode",
    masking,
    ("", "emb"),
    CHANCE,
    why="A tenth of the words is lost also where the model is used.",
)
def _(s: Subject) -> None:
    def unknown(self: Any, ids: Tensor) -> Tensor:
        return ids.masked_fill(torch.rand(ids.shape) < 0.1, 0)

    wire(s.model, unknown)


class Augmented(nn.Module):
    """Images are shifted by a pixel in training, within the model."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.fc = conv_net(24), nn.Linear(24, 10)

    def moved(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        down, right = torch.randint(0, 3, (2,)).tolist()
        return F.pad(x, (1, 1, 1, 1))[..., down : down + 8, right : right + 8]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(self.moved(x)))


def augmented() -> Subject:
    return subject(Augmented(), images, F.cross_entropy, 16)


SHELF.control("random crop within the model, in training alone", augmented)


@fault(
    "random crop within the model in every mode",
    augmented,
    ("", "features", "features.0"),
    CHANCE,
    why="Which part of an image is seen is drawn anew in each evaluation.",
)
def _(s: Subject) -> None:
    def moved(self: Any, x: Tensor) -> Tensor:
        down, right = torch.randint(0, 3, (2,)).tolist()
        return F.pad(x, (1, 1, 1, 1))[..., down : down + 8, right : right + 8]

    wire(s.model, moved)


class Stochastic(nn.Module):
    """Blocks left out at random in training (Huang et al. 2016)."""

    def __init__(self, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.stem, self.out = nn.Linear(64, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(perceptron(width, width, width) for _ in range(depth))

    def kept(self, x: Tensor) -> Tensor | float:
        return (torch.rand(len(x), 1) < 0.7).float() / 0.7 if self.training else 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + self.kept(x) * block(x)
        return self.out(x)


def stochastic() -> Subject:
    return subject(Stochastic(), flat, F.cross_entropy, 24)


SHELF.control("branches left out by samples in training alone", stochastic)


@fault(
    "branches left out by samples in every mode",
    stochastic,
    ("", "blocks.0", "blocks.0.*", "blocks.1", "blocks.1.*"),
    CHANCE,
    why="Depth is drawn also in evaluation, sample by sample.",
)
def _(s: Subject) -> None:
    def kept(self: Any, x: Tensor) -> Tensor:
        return (torch.rand(len(x), 1) < 0.7).float() / 0.7

    wire(s.model, kept)


class Trains(nn.Module):
    """A backbone, of which nothing is dropped in evaluation, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(48, 10)

    def prepare(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        self.prepare()
        return self.head(self.backbone(x))


def trains() -> Subject:
    return subject(Trains(), flat, F.cross_entropy, 24)


@fault(
    "training mode switched on by the forward",
    trains,
    ("", "backbone", "backbone.2"),
    (*CHANCE, "train"),
    why="Dropout is back in each evaluation, whatever mode the model was put in.",
)
def _(s: Subject) -> None:
    def prepare(self: Any) -> None:
        self.train()

    wire(s.model, prepare)
    s.model.eval()


# ---- memory --------------------------------------------------------------------------------------


class Observed(nn.Module):
    """Observations by their running mean and deviation, which move in training."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = perceptron(10, 32, 32, 1, act=nn.Tanh)
        self.register_buffer("mean", torch.zeros(10))
        self.register_buffer("square", torch.ones(10))

    def follows(self) -> bool:
        return self.training

    def forward(self, x: Tensor) -> Tensor:
        if self.follows():
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.05)
                self.square.lerp_(x.square().mean(0), 0.05)
        return self.policy((x - self.mean) / (self.square - self.mean**2).clamp(min=1e-2).sqrt())


def observed() -> Subject:
    return subject(Observed(), patients, F.mse_loss, 24)


SHELF.control("observations by running figures that move in training alone", observed)


@fault(
    "observations by running figures that move in every mode",
    observed,
    ("", "policy", "policy.0"),
    (*MEMORY, "buffer"),
    why="Each evaluation moves the figures, and the next has another outcome.",
)
def _(s: Subject) -> None:
    def follows(self: Any) -> bool:
        return True

    wire(s.model, follows)


class Begins(nn.Module):
    """A recurrent layer that begins at zero in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.fc = nn.GRU(8, 24, batch_first=True), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.gru(x)[0][:, -1])


def begins() -> Subject:
    return subject(Begins(), rows, F.cross_entropy, 16)


@fault(
    "state of the last batch carried to the next, which has nothing to do with it",
    begins,
    ("", "gru"),
    MEMORY,
    why="Each digit begins where another digit of an earlier batch ended.",
)
def _(s: Subject) -> None:
    s.model.state = None

    def forward(self: Any, x: Tensor) -> Tensor:
        states, last = self.gru(x, self.state)
        self.state = last.detach()
        return self.fc(states[:, -1])

    wire(s.model, forward)


class Context(nn.Module):
    """Attention to a summary of the text, made in each call."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.emb, self.context = PlacedTokens(width), nn.Linear(width, width)
        nn.init.normal_(self.emb.token.weight)
        self.out = nn.Linear(2 * width, 10)

    def summary(self, x: Tensor) -> Tensor:
        return self.context(x.mean(1)).tanh()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        return self.out(torch.cat([x.amax(1), self.summary(x)], 1))


def contextual() -> Subject:
    return subject(Context(), words, F.cross_entropy, 16)


@fault(
    "summary of the first batch kept for all that follow",
    contextual,
    ("", "context", "out"),
    (*MEMORY, "cache", "batch"),
    why="A cache without a key: every later text is read with the summary of an earlier one.",
)
def _(s: Subject) -> None:
    s.model.cache = None

    def summary(self: Any, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = self.context(x.mean(1)).tanh().detach()
        return self.cache

    wire(s.model, summary)


@fault(
    "summaries appended to a list, and their mean used",
    contextual,
    ("", "context", "out"),
    (*MEMORY, "list", "grow"),
    why="The list grows in each call, and what is read with a text are all earlier batches.",
)
def _(s: Subject) -> None:
    s.model.history = []

    def summary(self: Any, x: Tensor) -> Tensor:
        self.history.append(self.context(x.mean(1)).tanh())
        return torch.stack([*(old.detach() for old in self.history[:-1]), self.history[-1]]).mean(0)

    wire(s.model, summary)


class Bounded(nn.Module):
    """Rows of the last matrix have a norm of one, by the computation."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = perceptron(64, 48, 24), nn.Linear(24, 10, bias=False)

    def rows(self) -> Tensor:
        return F.normalize(self.last.weight, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return 4 * F.linear(self.body(x).relu(), self.rows())


def bounded() -> Subject:
    return subject(Bounded(), flat, F.cross_entropy, 24)


SHELF.control("rows of a matrix normalised in the computation", bounded)


@fault(
    "weights decayed by the forward",
    bounded,
    ("", "last", "body*"),
    (*MEMORY, "weight", "parameter"),
    why="Each call takes a hundredth off the weights, in evaluation, too.",
)
def _(s: Subject) -> None:
    def rows(self: Any) -> Tensor:
        with torch.no_grad():
            self.last.weight.mul_(0.99)
        return self.last.weight * 1.0

    wire(s.model, rows)


class Prepared(nn.Module):
    """Features relative to their mean, in a tensor of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(10, 24), nn.Linear(24, 1)

    def centred(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True) + 0.5 * x

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(self.centred(x))))


def prepared() -> Subject:
    return subject(Prepared(), patients, F.mse_loss, 24)


@fault(
    "batch changed in place by the forward",
    prepared,
    ("", "fc1"),
    (*MEMORY, "in place", "in-place", "input"),
    why="The caller's features are another table after each call.",
)
def _(s: Subject) -> None:
    def centred(self: Any, x: Tensor) -> Tensor:
        x *= 1.5
        x -= x.mean(1, keepdim=True) / 1.5
        return x

    wire(s.model, centred)


@fault(
    "first word overwritten in the caller's ids",
    contextual,
    ("", "emb", "emb.token"),
    (*MEMORY, "in place", "in-place", "input"),
    why="The ids are the caller's, who finds a word of each text gone.",
)
def _(s: Subject) -> None:
    def forward(self: Any, ids: Tensor) -> Tensor:
        ids[:, 1:] = ids[:, :-1].clone()
        ids[:, 0] = 0
        x = self.emb(ids)
        return self.out(torch.cat([x.amax(1), self.summary(x)], 1))

    wire(s.model, forward)


class Annealed(nn.Module):
    """A temperature that falls with the steps of training."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.values = nn.Linear(64, 8), nn.Linear(8, 10)
        self.register_buffer("temperature", torch.tensor(5.0))

    def falls(self) -> bool:
        return self.training

    def forward(self, x: Tensor) -> Tensor:
        if self.falls():
            self.temperature.mul_(0.95)
        return self.values((self.score(x) / self.temperature).softmax(-1))


def annealed() -> Subject:
    return subject(Annealed(), flat, F.cross_entropy, 24)


SHELF.control("temperature that falls with each step of training", annealed)


@fault(
    "temperature that falls with each call",
    annealed,
    ("", "score", "values"),
    (*MEMORY, "buffer", "temperature"),
    why="Evaluation goes on annealing, and validation changes the model.",
)
def _(s: Subject) -> None:
    def falls(self: Any) -> bool:
        return True

    wire(s.model, falls)


class Teacher(nn.Module):
    """A slow copy that follows in training and answers in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.student = perceptron(64, 32, 10)
        self.slow = frozen(copy.deepcopy(self.student))
        for parameter in self.slow.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)

    def follows(self) -> bool:
        return self.training

    def forward(self, x: Tensor) -> Tensor:
        if self.follows():
            follow(self.slow, self.student, 0.9)
        return self.student(x) if self.training else self.slow(x)


def teacher() -> Subject:
    return subject(Teacher(), flat, F.cross_entropy, 24)


SHELF.control("slow copy that follows in training alone", teacher)


@fault(
    "slow copy that follows in every mode",
    teacher,
    ("", "slow", "slow.*"),
    (*MEMORY, "weight", "parameter"),
    why="Each evaluation moves the copy that is evaluated.",
)
def _(s: Subject) -> None:
    def follows(self: Any) -> bool:
        return True

    wire(s.model, follows)


# ---- healthy: chance and memory that are meant ---------------------------------------------------


@lookalike("VAE that samples in training and takes the mean in evaluation", itself, evidence_bound)
class MeanVAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(64, 32, 16), perceptron(8, 32, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        z = mean
        if self.training:
            z = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        return self.decoder(z), mean, log_variance


@lookalike("VAE that samples in evaluation by design", itself, evidence_bound)
class SampledVAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(64, 32, 16), perceptron(8, 32, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        z = torch.distributions.Normal(mean, (log_variance / 2).exp()).rsample()
        return self.decoder(z), mean, log_variance


@lookalike("discrete codes by Gumbel noise, the best ones in evaluation", itself, F.mse_loss)
class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = perceptron(64, 48, 32), perceptron(32, 48, 64)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.enc(x).view(-1, 4, 8)
        if self.training:
            codes = F.gumbel_softmax(logits, hard=True)
        else:
            codes = F.one_hot(logits.argmax(-1), 8).float()
        return self.dec(codes.flatten(1))


@lookalike("diffusion that draws time and noise within, by design", lambda n: (
    images(n)[0], None), lambda out: out["loss"])  # fmt: skip
class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, 8)
        self.into, self.out = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        t, noise = torch.rand(len(x), 1), torch.randn_like(x)
        angle = (t * math.pi / 2)[..., None, None]
        h = self.into(angle.cos() * x + angle.sin() * noise) + self.time(t)[..., None, None]
        return {"loss": F.mse_loss(self.out(F.silu(h)), noise)}


@lookalike("actions drawn from a policy, by design", lambda n: (patients(n)[0], None), lambda out: (
    out["log_prob"] * (out["action"] - 1.0).abs()).mean())  # fmt: skip
class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = perceptron(10, 24, 3)

    def forward(self, state: Tensor) -> dict[str, Tensor]:
        chosen = torch.distributions.Categorical(logits=self.logits(state))
        action = chosen.sample()
        return {"action": action.float(), "log_prob": chosen.log_prob(action)}


@lookalike("layers of dropout of all sorts", images)
def dropouts() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.Dropout2d(0.2), nn.ELU(), nn.Flatten(),
        nn.AlphaDropout(0.1), nn.Linear(12 * 64, 24), nn.RReLU(), nn.Dropout(0.3),
        nn.Linear(24, 10))  # fmt: skip


@lookalike("rotary tables made in the first call and kept", next_words, language_loss, 8)
class Tables(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.qkv = tokens(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, 18)
        self.tables: dict[int, Tensor] = {}

    def turned(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n not in self.tables:
            rate = 1e4 ** (-torch.arange(0, 32, 2) / 32)
            self.tables[n] = torch.polar(torch.ones(n, 16), torch.arange(n)[:, None] * rate)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.tables[n]).flatten(-2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(x + attend(self.turned(q), self.turned(k), v, is_causal=True))


@lookalike("count of calls in a buffer, read by nobody", flat)
class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = perceptron(64, 32, 10), 0
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += len(x)
        return self.net(x)


@lookalike("last attention weights kept to look at", rows)
class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 10)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x, weights = self.attn(x, x, x)
        self.last = weights.detach()
        return self.out(x.mean(1))


@lookalike("spectral norms, weight norms and an orthogonal layer", flat)
def parametrised() -> nn.Module:
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(64, 32)), nn.LeakyReLU(),
        parametrizations.weight_norm(nn.Linear(32, 32)), nn.LeakyReLU(),
        parametrizations.orthogonal(nn.Linear(32, 32)), nn.LeakyReLU(),
        nn.Linear(32, 10))  # fmt: skip


@lookalike("embeddings held below a norm", words)
class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(18, 16, max_norm=1.0), nn.Linear(16, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.emb(ids).mean(1))


@lookalike("moving averages of the activations, kept in training and read in evaluation", images)
class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 12, 3, padding=1), nn.Linear(12, 10)
        self.register_buffer("level", torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x)).mean((2, 3))
        if self.training:
            with torch.no_grad():
                self.level.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.out(x / (self.level.detach() + 0.1))


@lookalike("copy of the batch changed in place", patients, F.mse_loss)
class OnACopy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(10, 24), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0].clamp_(-1, 1)
        x -= x.mean(1, keepdim=True)
        h = self.fc1(x)
        return self.fc2(h.relu_())


@lookalike("noise from a generator that begins at the same seed in each call", itself, F.mse_loss)
class SameNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(72, 32, 64)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(len(x), 8, generator=torch.Generator().manual_seed(0))
        return self.net(torch.cat([x, noise], 1))


@lookalike("random features drawn once", tumours, binary)
class Kernel(nn.Module):
    """Cosines of random projections (Rahimi and Recht 2007)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.randn(30, 96) / 6)
        self.register_buffer("phases", 6.3 * torch.rand(96))
        self.out = nn.Linear(96, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x @ self.waves + self.phases).cos())


@lookalike("queue of earlier keys, filled in training", flat)
class Queue(nn.Module):
    """Each batch is also compared with keys of batches before (He et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = perceptron(64, 32, 16), nn.Linear(16 + 32, 10)
        self.register_buffer("queue", F.normalize(torch.randn(32, 16), dim=1))

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(self.embed(x), dim=1)
        near = z @ self.queue.clone().T
        if self.training:
            self.queue.copy_(torch.cat([z.detach(), self.queue])[:32])
        return self.out(torch.cat([z, near], 1))


@lookalike("states handed in and handed out", lambda n: ((rows(n)[0], torch.zeros(1, n, 16)), (
    rows(n)[1])), lambda out, y: F.cross_entropy(out[0], y))  # fmt: skip
class HandedOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        states, state = self.rnn(x, state)
        return self.out(states[:, -1]), state


@lookalike("ranges of activations observed in training, for few bits", flat)
class Observers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 10)
        self.register_buffer("top", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x))
        if self.training:
            self.top.lerp_(x.detach().max(), 0.1)
        step = self.top / 15
        rounded = (x / step).round().clamp(max=15) * step
        return self.fc2(x + (rounded - x).detach())


SHELF.control("U-net with its usual norms", unet)
SHELF.control("dropout layer that follows its model's mode", trains)
SHELF.control("recurrent layer that begins anew in each call", begins)
SHELF.control("features prepared in a tensor of their own", prepared)
