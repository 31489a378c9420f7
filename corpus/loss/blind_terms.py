"""Logits cut off before the loss, losses summed over the batch, and terms that weigh nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import SmallLM, conv_net, lookalikes_of, perceptron
from corpus.models.small import (
    cnn,
    flat,
    gpt,
    images,
    ink_loss,
    itself,
    label_loss,
    language_loss,
    mlp,
    multitask,
    next_words,
    regression,
    resnet,
    sequential,
    vae,
    views,
)
from corpus.subject import Subject, subject

SHELF = Shelf("loss", "blind")
fault = SHELF.fault
lookalike = lookalikes_of(SHELF)

CUT_OFF = ("logits", "relu", "clamp", "sigmoid", "softplus", "negative", "activation")
SUMMED = ("sum", "mean", "batch size", "reduction")
WEIGHTLESS = ("zero", "weight", "factor", "no gradient", "no effect", "multipl")

# ---- faults: an activation just before cross_entropy ---------------------------------------------


@fault(
    "relu on the logits",
    mlp,
    ("", "loss", "head"),
    CUT_OFF,
    why="Scores below zero are cut off: wrong classes cannot be ruled out, and units die.",
)
def _(s: Subject) -> None:
    s.model.finish = F.relu


@fault(
    "an activation behind each layer, the last one not left out",
    sequential,
    ("", "loss", "4", "5"),
    CUT_OFF,
    why="A loop put a ReLU behind the logits, too.",
)
def _(s: Subject) -> None:
    s.model.append(nn.ReLU())


@fault(
    "logits of each word through a sigmoid",
    gpt,
    ("", "loss", "head"),
    CUT_OFF,
    why="Logits between 0 and 1 cannot make any word more than e times as likely as another.",
)
def _(s: Subject) -> None:
    s.model.finish = torch.sigmoid


@fault(
    "softplus on logits, transposed for the loss",
    resnet,
    ("", "loss", "head"),
    CUT_OFF,
    why="Negative scores are squeezed to zero, and their gradients with them.",
)
def _(s: Subject) -> None:
    s.loss = lambda out, y: F.cross_entropy(F.softplus(out).T.contiguous().T, y)


@fault(
    "logits clamped to the range of a chance",
    cnn,
    ("", "loss", "head"),
    CUT_OFF,
    why="Outside of 0 to 1 there is no gradient, and within it no class can win.",
)
def _(s: Subject) -> None:
    s.loss = lambda out, y: F.cross_entropy(out.clamp(0, 1)[:, :, None], y[:, None])


# ---- look-alikes: logits of a limited range ------------------------------------------------------


@lookalike("soft cap of 30 on logits", next_words, language_loss, 16)
class SoftCap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm = SmallLM()

    def forward(self, ids: Tensor) -> Tensor:
        return 30 * torch.tanh(self.lm(ids) / 30)


@lookalike("distances to prototypes, turned, as logits", flat)
class Prototypes(nn.Module):
    """None of its logits is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.classes = perceptron(64, 48, 8), nn.Parameter(torch.randn(10, 8))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(self.encoder(x), self.classes)


@lookalike("sums of absolute differences, turned, as logits", images)
class AbsoluteDistance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.classes = conv_net(16), nn.Parameter(0.3 * torch.randn(10, 16))

    def forward(self, x: Tensor) -> Tensor:
        return -(self.encoder(x)[:, None] - self.classes).abs().sum(-1)


@lookalike("relu, then a last layer without bias", flat)
def relu_then_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10, bias=False))


class Clip(nn.Module):
    """The scale of cosines is learnt, and clamped at 100."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.scale = perceptron(64, 48, 16), nn.Parameter(torch.tensor(2.66))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = (F.normalize(self.encoder(x), dim=1) for x in (a, b))
        return self.scale.exp().clamp(max=100) * a @ b.T


def both_ways(scores: Tensor) -> Tensor:
    own = torch.arange(len(scores))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


lookalike("cosines by a learnt scale that is clamped", views, both_ways)(Clip)


@lookalike("logits from chances of a mixture, by their log", flat)
class MixtureOfSoftmaxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.mix, self.heads = nn.Linear(64, 32), nn.Linear(32, 3), nn.Linear(32, 30)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.body(x))
        chances = self.heads(x).unflatten(1, (3, 10)).softmax(-1)
        return torch.log((self.mix(x).softmax(-1)[..., None] * chances).sum(1).clamp(min=1e-8))


# ---- faults: summed over the batch ---------------------------------------------------------------


@fault(
    "cross_entropy with reduction='sum'",
    mlp,
    ("", "loss"),
    SUMMED,
    why="The gradient grows with the batch, and the learning rate with it.",
)
def _(s: Subject) -> None:
    s.loss = lambda out, y: F.cross_entropy(out, y, reduction="sum")


@fault(
    "squared errors summed by hand",
    regression,
    ("", "loss"),
    SUMMED,
    why="The gradient grows with the batch, and the learning rate with it.",
)
def _(s: Subject) -> None:
    s.loss = lambda out, y: ((out - y) ** 2).sum()


@fault(
    "reconstruction summed over samples beside a mean divergence",
    vae,
    ("", "loss"),
    SUMMED,
    why="How much the divergence counts depends on the size of the batch.",
)
def _(s: Subject) -> None:
    def loss(out: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
        made, mean, log_variance = out
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
        return F.mse_loss(made, x, reduction="sum") + 0.1 * divergence

    s.loss = loss


@fault(
    "log-likelihoods of words gathered and added up",
    gpt,
    ("", "loss"),
    SUMMED,
    why="Long texts and large batches take larger steps.",
)
def _(s: Subject) -> None:
    s.loss = lambda out, y: -out.log_softmax(-1).gather(-1, y[..., None]).sum()


# ---- look-alikes: sums that are means ------------------------------------------------------------

lookalike(
    "a mean by hand: the sum by the number of samples",
    flat,
    lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(y),
)(lambda: perceptron(64, 48, 10))


def padded_next(n: int) -> tuple[Tensor, Tensor]:
    ids, target = next_words(n)
    real = torch.arange(31) < torch.randint(12, 31, (len(ids), 1))
    return ids * real, target.masked_fill(~real, 0)


def per_word(out: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none")
    mask = (y.flatten() != 0).float()
    return (each * mask).sum() / mask.sum()


lookalike("words' losses by the number of words that are real", padded_next, per_word, 16)(SmallLM)


class FewCodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(64, 48, 16), perceptron(8, 48, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        drawn = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        return self.decoder(drawn), mean, log_variance


def bound(out: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    made, mean, log_variance = out
    divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1)
    return (((made - x) ** 2).sum(1) + divergence).mean()


lookalike("sums over pixels and codes, then the mean over samples", itself, bound)(FewCodes)
lookalike(
    "a sum over places with the mean over samples taken first",
    itself,
    lambda out, x: (out - x).abs().mean(0).sum(),
)(lambda: perceptron(64, 16, 64))

# ---- faults: a term that weighs nothing ----------------------------------------------------------


@fault(
    "weight of a task by integer division: 1 // 2",
    multitask,
    ("", "loss", "ink"),
    WEIGHTLESS,
    why="The weight is 0, and the second head never learns.",
)
def _(s: Subject) -> None:
    s.loss = {"label": label_loss, "ink": lambda out, y: (1 // 2) * ink_loss(out, y)}


@fault(
    "weight of the labels set to zero for a test, and left so",
    multitask,
    ("", "loss", "label"),
    WEIGHTLESS,
    why="The first head gets a gradient of zeros.",
)
def _(s: Subject) -> None:
    weights = {"label": 0.0, "ink": 1.0}
    s.loss = lambda out, y: (
        weights["label"] * label_loss(out, y) + weights["ink"] * ink_loss(out, y)
    )


class Depicted(nn.Module):
    """A classifier with a decoder beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.label, self.decoder = (
            nn.Sequential(nn.Linear(64, 32), nn.ReLU()),
            nn.Linear(32, 10),
            perceptron(32, 32, 64),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x)
        return self.label(code), self.decoder(code)


def depicted_digits(n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    x, y = flat(n)
    return x, (y, x)


def made_loss(out: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(out[1], target[1])


def depicted() -> Subject:
    return subject(Depicted(), depicted_digits, {"class": label_loss, "picture": made_loss})


@fault(
    "reconstruction masked by a list of flags that is all off",
    depicted,
    ("", "loss", "decoder", "decoder.*"),
    WEIGHTLESS,
    why="The term is there and always zero, so that the decoder never learns.",
)
def _(s: Subject) -> None:
    on = torch.zeros(64)
    s.loss = {
        "class": label_loss,
        "picture": lambda out, y: (on * (out[1] - y[1]) ** 2).mean(),
    }


# ---- look-alikes: terms that weigh little --------------------------------------------------------


def only_labels() -> Subject:
    """No term for the second head: this stage of training has none."""
    made = multitask()
    made.loss = {"label": label_loss}
    made.model.ink.requires_grad_(False)
    return made


SHELF.control("no loss for a head that is frozen for now", only_labels)


def focal(out: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(out, y, reduction="none")
    return ((1 - (-each).exp()) ** 5 * each).mean()


lookalike("focal weights to the fifth power", flat, focal)(lambda: perceptron(64, 48, 10))


def rarely(out: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """The second task has targets for one sample in eight."""
    known = (torch.arange(len(out[1])) % 8 == 0).float()[:, None]
    return (known * (out[1] - target[1]) ** 2).sum() / known.sum()


def half_labelled() -> Subject:
    made = multitask()
    made.loss = {"label": label_loss, "ink": rarely}
    return made


SHELF.control("a task with targets for one sample in eight, weight 0 for the rest", half_labelled)


def small_weight() -> Subject:
    made = depicted()
    made.loss = {"class": label_loss, "picture": lambda out, y: 1e-3 * made_loss(out, y)}
    return made


SHELF.control("a picture's term with the weight 0.001", small_weight)
