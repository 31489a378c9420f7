"""What a loss is wrongly given, and what only looks like it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from corpus.checks.parts import Applies, Mlp, Net, batch

CHECK = "loss"


def ended(model, function):
    """Return a model that ends in a function."""
    return Net(lambda m, x: function(m.model(x)), model=model)


class Pooling(nn.Module):
    """Attention over the instances of a bag: the whole batch is one set."""

    def __init__(self):
        super().__init__()
        self.score, self.head = nn.Linear(16, 1), nn.Linear(16, 3)

    def forward(self, x):
        weights = torch.softmax(self.score(x), dim=0)
        return self.head((weights * x).sum(0, keepdim=True))


def contrast(h):
    """Return the logarithm of a softmax over a square of similarities."""
    h = F.normalize(h, dim=1)
    return torch.log_softmax(h @ h.t() / 0.1, dim=0)


def bits(*shape):
    """Return random zeros and ones."""
    return torch.randint(0, 2, shape).float()


def clamped_bce(output, target):
    """The same, of what was reshaped and clamped."""
    return bce(output.clamp(1e-6, 1 - 1e-6).reshape(-1), target.reshape(-1))


def between_0_and_1():
    """Return a fresh head whose logits happen to lie between 0 and 1."""
    model = nn.Linear(16, 1)
    nn.init.normal_(model.weight, std=0.01)
    nn.init.constant_(model.bias, 0.5)
    return model


def without_class_9(x):
    """Return log-probabilities of classes of which the last is masked out."""
    mask = torch.zeros(10)
    mask[9] = -math.inf
    return F.log_softmax(x + mask, dim=1)


CE, WIDENED = F.cross_entropy, ("(64, 1)", "(64,)")
SMOOTHED = nn.CrossEntropyLoss(label_smoothing=0.1)
ONE_TARGET = torch.zeros(64, dtype=torch.long)
LOSSES = {
    "softmax": (
        lambda m, x, y: (nn.Sequential(m, nn.Softmax(-1)), x, y, CE),
        ("1", "every row of its input sums to one", "softmax before cross_entropy"),
    ),
    "softmax and smoothing": (
        lambda m, x, y: (nn.Sequential(m, nn.Softmax(-1)), x, y, SMOOTHED),
        ("1", "is given probabilities", "softmax before cross_entropy"),
    ),
    "functional softmax": (
        lambda m, x, y: (ended(m, lambda x: F.softmax(x, dim=1)), x, y, CE),
        ("softmax", "is given probabilities"),
    ),
    "softmax inside the loss, which is no layer": (
        lambda m, x, y: (m, x, y, lambda o, t: CE(torch.softmax(o, 1), t)),
        ("", "is given probabilities"),
    ),
    "rounded to bfloat16": (
        lambda m, x, y: (nn.Sequential(m, nn.Softmax(1)).bfloat16(), x.bfloat16(), y, CE),
        ("1", "is given probabilities"),
    ),
    "softmax over the batch": (
        lambda m, x, y: (nn.Sequential(m, nn.Softmax(0)), x, y, CE),
        ("1", "softmax over dimension 0", "0 are the samples"),
    ),
    "log_softmax over the batch": (
        lambda m, x, y: (nn.Sequential(m, nn.LogSoftmax(0)), x, y, F.nll_loss),
        ("1", "softmax over dimension 0", "0 are the samples"),
    ),
    "softmax of three dimensions without one": (
        lambda m, x, y: (
            nn.Sequential(nn.Linear(16, 8), nn.Softmax(), nn.Linear(8, 2)),
            torch.randn(32, 5, 16),
            None,
            None,
        ),
        ("1", "dimension 0"),
    ),
    "softmax over the batch inside a model": (
        lambda m, x, y: (
            nn.Sequential(nn.Linear(16, 8), nn.Softmax(0), nn.Linear(8, 2)),
            x,
            None,
            None,
        ),
        ("1", "dimension 0"),
    ),
    "sigmoid before cross_entropy": (
        lambda m, x, y: (nn.Sequential(m, nn.Sigmoid()), x, y, CE),
        ("1", "held between 0 and 1"),
    ),
    "logits into nll_loss": (
        lambda m, x, y: (m, x, y, F.nll_loss),
        ("head", "cross_entropy on logits"),
    ),
    "probabilities into nll_loss": (
        lambda m, x, y: (nn.Sequential(m, nn.Softmax(1)), x, y, F.nll_loss),
        ("1", "the logarithm is missing"),
    ),
    "target never read": (
        lambda m, x, y: (m, x, y, lambda o, t: o.pow(2).mean() + t.shape[0]),
        ("", "never reads its target"),
    ),
    "constant": (
        lambda m, x, y: (m, x, None, lambda o: (o * 0.0).sum() + 3.0),
        ("", "the loss is constant"),
    ),
    "underflow, which is no constant": (
        lambda m, x, y: (
            nn.Linear(16, 4).half(),
            x.half(),
            None,
            lambda o: o.float().mean() * 1e-9,
        ),
        ("", "underflows float16"),
    ),
    "single class": (
        lambda m, x, y: (nn.Linear(16, 1), x, ONE_TARGET, CE),
        ("", "single class"),
    ),
}
for squash in (nn.Sigmoid(), nn.Hardsigmoid(), nn.Softmax(1)):
    for function in (bce, clamped_bce):
        LOSSES[f"{type(squash).__name__} into {function.__name__}"] = (
            lambda m, x, y, last=squash, loss=function: (
                nn.Sequential(m, last),
                x,
                bits(64, 10),
                loss,
            ),
            (None, "takes logits"),
        )
for function in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
    LOSSES[f"column against row in {function.__name__}"] = (
        lambda m, x, y, loss=function: (
            nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 1)),
            x,
            torch.randn(64),
            loss,
        ),
        ("1", *WIDENED),
    )
BY_HAND = {
    "squared": lambda o, t: ((o - t) ** 2).mean(),
    "absolute": lambda o, t: (t - o).abs().mean(),
    "torch.sub": lambda o, t: torch.sub(o, t).square().mean(),
    "logarithms": lambda o, t: -(t * F.logsigmoid(o) + (1 - t) * F.logsigmoid(-o)).mean(),
}
for name, written in BY_HAND.items():
    LOSSES[f"column against row by hand, {name}"] = (
        lambda m, x, y, loss=written: (nn.Linear(16, 1), x, bits(64), loss),
        ("", *WIDENED),
    )
NEGATED = {
    "minus": lambda o, t: -CE(o, t),
    "times a half": lambda o, t: CE(o, t) * -0.5,
    "log-probability": lambda o, t: F.log_softmax(o, 1).gather(1, t[:, None]).mean(),
    "squared": lambda o, t: -((o - F.one_hot(t, 10)) ** 2).mean() / 2,
}
for name, written in NEGATED.items():
    LOSSES[f"negated, {name}"] = (
        lambda m, x, y, loss=written: (m, x, y, loss),
        ("", "negated"),
    )
FLAT = {
    "clamp": lambda x: x.clamp(min=100.0),
    "round": lambda x: torch.round(20 * x),
    "sign": torch.sign,
    "relu": lambda x: F.relu(x - 100.0) + 1.0,
}
for name, written in FLAT.items():
    LOSSES[f"flat, {name}"] = (
        lambda m, x, y, flat=written: (m, x, None, lambda o: flat(o).abs().mean()),
        ("", "gradient at the output is exactly zero", f"{name} in the loss"),
    )

RIGHT = {
    "log_softmax, which cross_entropy takes again": lambda m, x, y: (
        nn.Sequential(m, nn.LogSoftmax(1)),
        x,
        y,
        CE,
    ),
    "softmax of two dimensions without one": lambda m, x, y: (
        nn.Sequential(nn.Linear(16, 8), nn.Softmax(), nn.Linear(8, 2)),
        x,
        None,
        None,
    ),
    "attention over a set": lambda m, x, y: (Pooling(), x, None, None),
    "similarities along either dimension": lambda m, x, y: (
        ended(nn.Linear(16, 8), contrast),
        x,
        None,
        None,
    ),
    "logits between 0 and 1": lambda m, x, y: (between_0_and_1(), x, bits(64, 1), bce),
    "log-probabilities": lambda m, x, y: (nn.Sequential(m, nn.LogSoftmax(1)), x, y, F.nll_loss),
    "classes masked out": lambda m, x, y: (ended(m, without_class_9), x, y % 9, F.nll_loss),
    "a hinge that is met": lambda m, x, y: (m, x, None, lambda o: F.relu(o - 100.0).mean()),
}
WIDENED_ON_PURPOSE = [
    lambda o, t: ((o.squeeze(1) - t) ** 2).mean(),
    lambda o, t: ((o - t[:, None]) ** 2).mean(),
    lambda o, t: (o.squeeze(1)[:, None] - t).abs().mean(),
    lambda o, t: (o - o.squeeze(1)).abs().mean() + 0 * t.sum(),
    lambda o, t: F.mse_loss(o, torch.zeros(1, 1)) + 0 * t.sum(),
]
for place, written in enumerate(WIDENED_ON_PURPOSE):
    RIGHT[f"all pairs asked for, one target for all, or equal shapes {place}"] = (
        lambda m, x, y, loss=written: (nn.Linear(16, 1), x, torch.randn(64), loss)
    )
MAY_BE_NEGATIVE = [
    lambda o, t: CE(o, t) - 10.0,
    lambda o, t: -((o + F.one_hot(t, 10) + 5.0) ** 3).mean(),
    lambda o, t: -F.cosine_similarity(o, F.one_hot(t, 10).float()).mean(),
    lambda o, t: -F.log_softmax(o, 1).gather(1, t[:, None]).mean(),
    lambda o, t: CE(o, t) + 5 * (F.softmax(o, 1) * F.log_softmax(o, 1)).sum(1).mean(),
    lambda o, t: torch.distributions.Categorical(logits=o).log_prob(t).neg().mean(),
]
READ_OR_NOT_NEEDED = [
    lambda o, _: o.pow(2).mean(),
    lambda o, t: F.mse_loss(o, torch.zeros_like(o)),
    lambda o, t: (o - torch.tensor(t.tolist())[:, None]).pow(2).mean(),
    lambda o, t: torch.stack([o[i, c] for i, c in enumerate(t)]).pow(2).mean(),
]
for place, written in enumerate((*MAY_BE_NEGATIVE, *READ_OR_NOT_NEEDED)):
    RIGHT[f"may be negative, or reads its target in some way {place}"] = (
        lambda m, x, y, loss=written: (m, x, y, loss)
    )


class Tagger(nn.Module):
    """A sequence model whose embedding knows its padding."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 20)

    def forward(self, ids):
        return self.head(self.embed(ids)).flatten(0, 1)


def padded(pad=0):
    """Return ids whose last four of twelve are padding."""
    ids = torch.randint(1, 19, (8, 12))
    ids[:, 8:] = pad
    return ids


class Marked(Tagger):
    """One whose padding is the last of its ids."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=19)


class Free(Tagger):
    """One whose embedding does not."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)


class Tags(nn.Module):
    """Five tags and one for padding, for each of the ids."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 6)

    def forward(self, ids):
        return self.head(self.embed(ids)).flatten(0, 1)


class WithLoss(nn.Module):
    """Returns its own loss."""

    def __init__(self, sign):
        super().__init__()
        self.model, self.sign = Mlp(), sign

    def forward(self, x, labels):
        logits = self.model(x)
        return {"loss": self.sign * F.cross_entropy(logits, labels), "logits": logits}


class Positions(Tags):
    """Normalised over the positions."""

    def forward(self, ids):
        return F.log_softmax(self.head(self.embed(ids)), dim=1).flatten(0, 1)


class Factors(nn.Module):
    """A product of factors, drawn with a standard deviation."""

    def __init__(self, std):
        super().__init__()
        self.table, self.deep = nn.Embedding(100, 8), nn.Linear(16, 8)
        nn.init.normal_(self.table.weight, std=std)

    def forward(self, ids):
        factors = self.table(ids)
        deep = self.deep(factors.flatten(1)).mean(1)
        return (factors[:, 0] * factors[:, 1]).sum(1) + deep


class Keeps(nn.Module):
    """Leaves what the loss is made of on itself."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        self.energy = self.fc(x).pow(2).mean()
        return x.detach()


class Probed(nn.Module):
    """A probe that runs last and has no part in the loss."""

    def __init__(self):
        super().__init__()
        self.fc, self.squash, self.probe = nn.Linear(16, 4), nn.Softmax(-1), nn.Dropout(0.0)

    def forward(self, x):
        out = self.squash(self.fc(x))
        self.probe(out * 1.0)
        return out


def tagged(model, loss, of=lambda ids: ids, ids=None):
    """Return a model of ids, of which the last four of twelve are padding."""
    ids = padded() if ids is None else ids
    return model, ids, of(ids).flatten(), loss


def ends(ids, tag):
    """Return tags of which the last six are the same."""
    tags = (ids % 4 + 1).view(8, 12)
    tags[:, 6:] = tag
    return tags


def without_padding(output, target):
    return CE(output, target, reduction="none")[target != 0].mean()


def labelled(each, total=1.0):
    """Return the model with several labels for each sample."""
    target = torch.zeros(64, 10)
    target[:, :each] = total / each
    return nn.Sequential(Mlp(), nn.Linear(10, 10)), batch(), target, CE


def quantile(choose, low, high, shift=0.0):
    """Return the model with a quantile loss, and targets that are near, or below by `shift`."""

    def loss(output, target):
        error = target - output
        return choose(low * error, high * error).mean()

    model, x = Mlp(), batch()
    return model, x, model(x).detach() + torch.randn(64, 1) * 0.1 - shift, loss


def rated(std):
    ids, target = torch.randint(0, 100, (64, 2)), torch.randint(0, 2, (64,)).float()
    return Factors(std), ids, target, bce


def kept():
    model = Keeps()
    return model, batch().requires_grad_(), None, lambda out: model.energy


def weighed(loss):
    return Mlp(), batch(), None, loss


def masks(low, high, loss=bce):
    """Return the model with targets of two values."""
    return Mlp(), batch(), low + (high - low) * bits(64, 10), loss


def given(build):
    """Return what makes a row of the tables above: of the model, a batch and a class for each."""
    return lambda: build(Mlp(), batch(), torch.randint(0, 10, (64,)))


OFF = (
    lambda out: 0.0 * out.mean(),
    lambda out: out.mean() * torch.tensor(0.0),
    lambda out: (out**2 * torch.zeros(64, 1)).sum(),
    lambda out: (torch.zeros(64, 1) * out).sum(),
)
ON = (
    lambda out: (out - 100.0).relu().mean(),
    lambda out: ((out - 100.0).relu() * torch.zeros(64, 1)).mean(),
    lambda out: 0.5 * (out**2 * torch.eye(64, 10)).sum(),
)
CUT = {
    "relu": F.relu,
    "relu in place": lambda x: x.relu_(),
    "relu, reshaped": lambda x: F.relu(x).unsqueeze(-1).squeeze(-1).contiguous(),
    "relu6": F.relu6,
    "clamp": lambda x: x.clamp(-1, 1),
    "a near bound that is met": lambda x: (20 * x).clamp(-5, 30),
    "hardtanh": F.hardtanh,
}
FREE = {
    "soft cap": lambda x: 30 * torch.tanh(x / 30),
    "distances": lambda x: -torch.cdist(x, torch.eye(10)),
    "a guard that is met": lambda x: (200 * x).clamp(-30, 30),
    "a bound that is not met": lambda x: x.clamp(max=9),
    "masked": lambda x: x.masked_fill(torch.arange(10) > 8, -torch.inf).clamp(min=-1e4),
    "floored log-probabilities": lambda x: F.softmax(x, 1).clamp(min=1e-8).log(),
}


def cut(function):
    """Return a model that ends in a function, under cross-entropy."""
    model = nn.Sequential(Mlp(), Applies(function))
    return model, batch(), torch.randint(0, 9, (64,)), CE


def one_class(ignored=0, other=0):
    """Return targets of one class, of which some are ignored or of another."""
    target = torch.full((64,), 3)
    target[:ignored], target[64 - other :] = -100, 2
    return Mlp(), batch(), target, CE


def candidates():
    """Return a loss over candidates, of which an index is a place: no layer has a row for each."""

    def contrast(output, target):
        similar = (output * output.roll(1, 1)).sum(1, keepdim=True)
        return CE(torch.cat([similar, output @ torch.randn(10, 30)], 1), target)

    return Mlp(), batch(), torch.zeros(64, dtype=torch.long), contrast


def placed(function):
    """Return a model of ten classes in six places, under cross-entropy."""
    model = Net(lambda m, x: function(m.fc(x).view(-1, 10, 6)), fc=nn.Linear(16, 60))
    return model, batch(), torch.randint(0, 10, (64, 6)), CE


def divergence(output, target):
    return F.kl_div(output.log_softmax(1), target, reduction="batchmean")


def unlogged(output, target):
    return F.kl_div(output, target, reduction="batchmean")


def evidence(output, target, weight):
    """Return the loss of a variational autoencoder, whose divergence has a weight of -0.5."""
    mean, v = output.chunk(2, 1)
    return F.mse_loss(mean, target) + weight * torch.sum(1 + v - mean.pow(2) - v.exp(), 1).mean()


def last_alone(o, t):
    for head in (o / 2, o):
        loss = CE(head, t)
    return loss


def logged(o, t):
    told = {"half": CE(o / 2, t).detach(), "whole": CE(2 * o, t).item()}
    return CE(o, t) + 0.0 * told["whole"]


ALONE = ("FAULTS",)


def squared(output, target):
    """Return one number a sample."""
    return (output - target).square().mean(1)


def summed(divergence, reduce=torch.mean):
    """Return a loss a sample, and a divergence beside it."""
    return Mlp(), batch(), torch.randn(64, 10), lambda o, t: reduce(squared(o, t) + divergence(o))


def bootstrapped(of):
    """Return values fitted to a reward and the values of the next states."""
    model, after = Mlp(), batch()
    return model, batch(), torch.randn(64, 10), lambda o, t: F.mse_loss(o, of(t, model(after)))


def coded(draw):
    """Return an autoencoder whose code is drawn at random."""
    model = Net(
        lambda m, x: m.decode(draw(m.mean(x), F.softplus(m.spread(x)))), mean=(16, 4),
        spread=(16, 4), decode=(4, 10),
    )  # fmt: skip
    return model, batch(), torch.randn(64, 10), F.mse_loss


def hidden(straight):
    """Return a binary code, that gradients go straight through or not."""

    def draw(mean, _):
        rates = mean.sigmoid()
        code = torch.bernoulli(rates)
        return code + rates - rates.detach() if straight else code

    return coded(draw)


def with_term(term):
    """Return a loss with one more term."""
    return Mlp(), batch(), torch.arange(64) % 10, lambda o, t: CE(o, t) + 0.1 * term(o, t)


def sampled(mean, std):
    """Draw as a policy does."""
    return torch.distributions.Normal(mean, std).sample()


def similar(scale):
    """Return cosines with 32 directions, scaled, under cross-entropy."""

    def forward(m, x):
        return scale(F.normalize(m.fc(x), dim=1) @ F.normalize(m.directions, dim=1).t())

    model = Net(forward, fc=(16, 16), directions=nn.Parameter(torch.randn(32, 16)))
    return model, batch(), torch.arange(64) % 32, CE


def likelihood(target, logs=lambda o: F.log_softmax(o, 1)):
    """Return a cross-entropy written by hand."""
    return Mlp(), batch(), target, lambda o, t: -(t * logs(o)).sum(1).mean()


def overlap(of, union=False):
    """Return Dice, or the intersection over the union, written by hand."""

    def loss(o, t):
        o, t = of(o).flatten(1), t.flatten(1)
        both, each = (o * t).sum(1), o.sum(1) + t.sum(1)
        return 1 - (both / (each - both + 1e-6) if union else (2 * both + 1) / (each + 1)).mean()

    return Mlp(), batch(), bits(64, 10), loss


NO_GRADIENT, DRAWN = "passes no gradient back", "draws by values that are trained"


def smoothed(share):
    """Return a loss by hand of targets: 0.3 is given to all, and a share is taken of the class."""

    def loss(output, labels):
        soft = F.one_hot(labels, 10) * (1 - share) + 0.03
        return -(soft * output.log_softmax(1)).sum(1).mean()

    return nn.Linear(16, 10), batch(), torch.randint(0, 10, (64,)), loss


FAULTS = {
    **{
        f"logits cut by {name}": (lambda f=f: cut(f), "fail", None, "takes logits and is given")
        for name, f in CUT.items()
    },
    # 1 / (1 + 9 exp(-2))
    "logits cut by tanh": (
        lambda: cut(torch.tanh), "fail", None, "no class can get more than 45%",
    ),
    "smoothed targets that sum to more than one": (
        lambda: smoothed(0.03), "warn", None, "rows sum to 1.27",
    ),
    # probabilities of a half and more
    "relu before binary cross-entropy": (
        lambda: (nn.Sequential(nn.Linear(16, 1), nn.ReLU()), batch(), bits(64, 1), bce), "fail",
        None,
    ),
    "targets of one class": (one_class, "warn", None, "are class 3, of 10 classes"),
    "targets of one class, most of them ignored": (lambda: one_class(40), "warn", None),
    "targets that are all ignored": (
        lambda: one_class(64), "fail", None, "ignores all of its 64 targets", ...,
    ),
    **{name: (given(build), "fail", *said) for name, (build, said) in LOSSES.items()},
    "negated inside the model": (
        lambda: (WithLoss(-1), {"x": batch(), "labels": torch.randint(0, 10, (64,))}),
        "fail", None, "negated",
    ),
    "padding that is not ignored": (
        lambda: tagged(Tagger(), CE), "fail", None, "33%", "ignore_index=0"
    ),
    **{
        f"tags of padding, {tag}": (
            lambda tag=tag: tagged(Tags(), CE, lambda ids: torch.where(ids == 0, tag, ids % 4 + 1)),
            "fail", None, "33%",
        )
        for tag in (0, 5)
    },
    "padding that is not 0": (
        lambda: tagged(Marked(), CE, ids=padded(19)), "fail", None, "33%", "do in 19",
    ),
    "log_softmax over the positions": (
        lambda: tagged(
            Positions(), F.nll_loss, lambda ids: ids % 6, torch.randint(1, 20, (8, 12))
        ),
        "fail", None, "does not sum to one over its 6 classes", "another dimension", ...,
    ),
    "log_softmax over the positions before cross_entropy": (
        lambda: placed(lambda x: F.log_softmax(x, dim=2)), "fail", None,
        "log_softmax over dimension 2",
    ),
    "a target below zero": (
        lambda: (Mlp(), batch(), torch.randn(64, 10), CE), "fail", None, "takes probabilities", ...,
    ),
    "logits as the target of kl_div": (
        lambda: (Mlp(), batch(), torch.randn(64, 10), divergence), "fail", None,
        "takes probabilities",
    ),
    "logits into kl_div": (
        lambda: (Mlp(), batch(), torch.rand(64, 10).softmax(1), unlogged), "fail", None,
        "values up to",
    ),
    "nearly all targets ignored": (lambda: one_class(63), "warn", None, "ignores 63 of its 64"),
    "a class with the index of padding": (
        lambda: (Mlp(), batch(), torch.arange(64) % 10, nn.CrossEntropyLoss(ignore_index=0)),
        "warn", None, "ignores class 0", "7 times",
    ),
    "a term that is subtracted": (
        lambda: (
            Mlp(), batch(), torch.arange(64) % 10,
            lambda o, t: CE(o, t) - 0.1 * F.mse_loss(o, o.roll(1)),
        ),
        "warn", None, "`mse_loss`", "it is subtracted",
    ),
    "a negated divergence": (
        lambda: (Mlp(), batch(), torch.randn(64, 5), lambda o, t: evidence(o, t, 0.5)),
        "warn", None, "divergence of a normal",
    ),
    "a loss that takes the place of another": (
        lambda: (Mlp(), batch(), torch.arange(64) % 10, last_alone), "warn", None, "is dropped",
        "loss = CE(head, t)",
    ),
    "a value less itself": (
        lambda: (
            Mlp(), batch(), torch.randn(64, 10),
            lambda o, t: F.mse_loss(o, t) + (o - o).pow(2).mean(),
        ),
        "fail", None, "from itself",
    ),
    "several labels": (lambda: labelled(3, 3.0), "fail", None, "sum to 3", ...),
    "the smaller of two opposite multiples": (
        lambda: quantile(torch.min, -0.1, 0.9), "fail", None, "negated", ...
    ),
    "the minimum of two opposite multiples": (
        lambda: quantile(torch.minimum, 0.9, -0.1), "fail", None, "negated", ...
    ),
    "factors that are drawn too large": (
        lambda: rated(5.0), "fail", None, "times that of a uniform guess", ...
    ),
    **{
        f"switched off, {place}": (
            lambda loss=loss: weighed(loss), "fail", None, "a loss weight of zero"
        )
        for place, loss in enumerate(OFF)
    },
    "masks of 255": (lambda: masks(0.0, 255.0), "fail", None, "targets from 0 to 1"),
    "labels of -1": (lambda: masks(-1.0, 1.0), "fail", None, "targets from 0 to 1"),
    "a probe that runs last": (
        lambda: (Probed(), batch(), torch.randint(4, (64,)), CE), "fail", "squash"
    ),
    "a term of wrong answers": (
        lambda: with_term(lambda o, t: (o.argmax(1) != t).float().mean()), "fail", None,
        NO_GRADIENT,
    ),
    "a term that is detached": (
        lambda: with_term(lambda o, _: o.square().mean().detach()), "warn", None, NO_GRADIENT
    ),
    "a term of zero weight": (
        lambda: with_term(lambda o, _: 0.0 * o.square().mean()), "warn", None, NO_GRADIENT
    ),
    "a target with a gradient": (
        lambda: bootstrapped(lambda t, v: t + 0.9 * v), "warn", None, "has a gradient"
    ),
    "a code that is sampled": (lambda: coded(sampled), "warn", None, DRAWN, ...),
    "a code of bits": (lambda: hidden(straight=False), "warn", None, DRAWN, ...),
    "cosines times a temperature": (
        lambda: similar(lambda c: c * 0.07), "fail", None, "cosines times 0.07",
    ),
    "logits as targets by hand": (
        lambda: likelihood(torch.randn(64, 10)), "fail", None, "multiplied by targets down to",
    ),
    "logarithms of no probabilities by hand": (
        lambda: likelihood(F.one_hot(torch.arange(64) % 10, 10).float(), lambda o: o.exp().log()),
        "fail", None, "logarithms up to",
    ),
    **{
        f"an overlap of logits, {union}": (
            lambda union=union: overlap(lambda o: o, union), "fail", None, "an overlap", "both /",
        )
        for union in (False, True)
    },
    "targets that are padding as inputs are": (
        lambda: tagged(Free(), CE), "warn", None, "are padding",
    ),
    "a divergence summed over the batch": (
        lambda: summed(lambda o: 0.1 * o.square().sum()), "warn", None, "over the whole batch"
    ),
}  # fmt: skip
HEALTHY = {
    "smoothed targets": lambda: smoothed(0.3),
    "cosines by a temperature": lambda: similar(lambda c: c / 0.07),
    "cosines as they are": lambda: similar(lambda c: c),
    "probabilities as targets by hand": lambda: likelihood(torch.randn(64, 10).softmax(1)),
    "probabilities with the sign of the loss": lambda: (
        Mlp(), batch(), torch.randn(64, 10).softmax(1),
        lambda o, t: (-t * F.log_softmax(o, 1)).sum(1).mean(),
    ),
    "rewards of what was done": lambda: (
        Mlp(), batch(), torch.randn(64, 3),
        lambda o, t: -(o.softmax(1)[:, :3].log() * t).mean(),
    ),
    "cosines by a temperature that is learnt": lambda: similar(
        lambda c: 0.1 * (c * nn.Parameter(torch.tensor(100.0)))
    ),
    "maps of probabilities": lambda: (
        Net(lambda m, x: m.fc(x).view(-1, 4, 3, 2).log_softmax(1), fc=(16, 24)), batch(),
        torch.randn(64, 4, 3, 2).softmax(1), nn.KLDivLoss(reduction="batchmean"),
    ),
    "advantages of all actions": lambda: (
        Mlp(), batch(), torch.randn(64, 10),
        lambda o, t: -((t - t.mean(1, keepdim=True)) * F.log_softmax(o, 1)).sum(1).mean(),
    ),
    "counts by the logarithm of a rate": lambda: (
        Mlp(), batch(), 5.0 * bits(64, 10),
        lambda o, t: (F.softplus(o) - t * F.softplus(o).add(1e-6).log()).mean(),
    ),
    **{
        f"an overlap of chances, {union}": lambda union=union: overlap(torch.sigmoid, union)
        for union in (False, True)
    },
    "a ratio of squares": lambda: (
        Mlp(), batch(), torch.randn(64, 10),
        lambda o, t: 1 - 2 * (o * t).sum() / (o.square().sum() + t.square().sum()),
    ),
    "a term of right answers": lambda: with_term(lambda o, t: (o.softmax(1) * 0.1).mean()),
    "a sum that starts at zero": lambda: with_term(
        lambda o, _: torch.zeros(()) + o.square().mean()
    ),
    "a term of the target": lambda: with_term(lambda _, t: t.float().mean()),
    "a target without a gradient": lambda: bootstrapped(lambda t, v: t + 0.9 * v.detach()),
    "another network's output": lambda: bootstrapped(lambda _, v: v),
    "a code by a drawn noise": lambda: coded(lambda m, s: m + s * torch.randn_like(s)),
    "a code of bits gone straight through": lambda: hidden(straight=True),
    "a divergence of each sample": lambda: summed(lambda o: 0.1 * o.square().sum(1)),
    "a divergence that is a mean": lambda: summed(lambda o: 0.1 * o.square().mean()),
    **{f"free logits, {name}": lambda f=f: cut(f) for name, f in FREE.items()},
    "softplus before binary cross-entropy": lambda: (
        nn.Sequential(nn.Linear(16, 1), nn.Softplus()), batch(), bits(64, 1), bce,
    ),
    "14 targets of one class": lambda: one_class(50),
    "targets of two classes": lambda: one_class(0, 1),
    "first of several candidates": candidates,
    **{name: given(build) for name, build in RIGHT.items()},
    "padding that is ignored": lambda: tagged(Tagger(), nn.CrossEntropyLoss(ignore_index=0)),
    "an end that is no padding": lambda: tagged(Marked(), CE, ids=padded(7)),
    "no padding": lambda: tagged(Tagger(), CE, ids=torch.randint(0, 20, (8, 12))),
    "padding that a mask takes out": lambda: tagged(Tagger(), without_padding),
    **{
        f"tags that end alike without padding, {tag}": lambda tag=tag: tagged(
            Tags(), CE, lambda ids: ends(ids, tag)
        )
        for tag in (0, 5)
    },
    "one label": lambda: labelled(1),
    "log_softmax over the classes of positions": lambda: placed(lambda x: F.log_softmax(x, dim=1)),
    "a target of probabilities": lambda: (
        Mlp(), batch(), torch.randn(64, 10).softmax(1), divergence
    ),
    "a target of log-probabilities": lambda: (
        Mlp(), batch(), torch.randn(64, 10).log_softmax(1),
        lambda o, t: F.kl_div(o.log_softmax(1), t, log_target=True, reduction="batchmean"),
    ),
    "most targets ignored, as of masked words": lambda: (
        Mlp(), batch(), torch.arange(64) % 10 * (torch.arange(64) % 3 == 0),
        nn.CrossEntropyLoss(ignore_index=0),
    ),
    "a divergence": lambda: (Mlp(), batch(), torch.randn(64, 5), lambda o, t: evidence(o, t, -0.5)),
    "on-policy training": lambda: (
        Mlp(), batch(), torch.randn(64, 10), lambda o, t: -((o - o.detach()).exp() * t).mean()
    ),
    "a target less a term": lambda: (
        Mlp(), batch(), torch.randn(64, 10),
        lambda o, t: F.mse_loss(o, t) - 0.1 * o.sigmoid().mean(),
    ),
    "a loss that is logged": lambda: (Mlp(), batch(), torch.arange(64) % 10, logged),
    "a distribution over labels": lambda: labelled(3),
    "the larger of two opposite multiples": lambda: quantile(torch.max, -0.1, 0.9, 1.0),
    "the minimum of two multiples of one sign": lambda: quantile(torch.minimum, 0.1, 0.9, 1.0),
    "factors": lambda: rated(0.3),
    "what the model keeps": kept,
    **{f"not switched off, {place}": lambda on=on: weighed(on) for place, on in enumerate(ON)},
    "masks of one": lambda: masks(0.0, 1.0),
    "smoothed masks": lambda: masks(0.05, 0.95),
    "masks of probabilities": lambda: masks(
        0.0, 1.0, lambda out, t: F.binary_cross_entropy(out.sigmoid(), t)
    ),
    "smoothed masks of probabilities": lambda: masks(
        0.05, 0.95, lambda out, t: F.binary_cross_entropy(out.sigmoid(), t)
    ),
}  # fmt: skip
