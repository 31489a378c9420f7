"""Losses and what they are given, as people report them wrong; each with its fix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import frozen, perceptron
from corpus.models.small import UNet, flat, images, noisy, some_digits, tumours
from corpus.subject import Subject, subject

SHELF = Shelf("pulls", "blind")
GITHUB = "https://github.com"

WEIGHED = ("alpha", "weighs", "weighed", "class", "positive", "balance", "swap")
FLAT = ("no gradient", "clamp", "flat", "zero", "satur", "constant", "vanish")
NONFINITE = ("nan", "inf", "divi", "zero", "root", "sqrt", "pow")
MIXED = ("axes", "permut", "reshape", "mixe", "view", "order", "samples", "dimension")


def judged(model: nn.Module, draw: Any, loss: Any, batch: int = 32) -> Subject:
    return subject(model, draw, loss, batch)


# ---- weights of classes --------------------------------------------------------------------------


def focal(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Return the focal loss of classes, each of which has a weight."""
    said = F.log_softmax(logits, 1).gather(1, target[:, None])[:, 0]
    return -((1 - said.exp()).pow(2) * said * weight[target]).mean()


def rare(n: int) -> tuple[Tensor, Tensor]:
    """Return pixels, and whether a digit is a nine."""
    features, labels = flat(n)
    return features, (labels == 9).long()


@SHELF.report(
    f"{GITHUB}/clcarwin/focal_loss_pytorch/issues/10",
    "alpha at the class that it was to hold back",
    ("", "loss"),
    WEIGHED,
)
def swapped(fixed: bool) -> Subject:
    """[alpha, 1 - alpha] is read by the label: the rare class has the weight of the common one."""
    alpha = 0.75  # of the rare class

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return focal(
            output, target, torch.tensor([1 - alpha, alpha] if fixed else [alpha, 1 - alpha])
        )

    return judged(perceptron(64, 48, 2), rare, loss, 48)


@SHELF.report(
    f"{GITHUB}/kornia/kornia/issues/875",
    "one alpha for all classes",
    ("", "loss"),
    (*WEIGHED, "scale", "factor"),
)
def kornia(fixed: bool) -> Subject:
    """The same factor on each class balances nothing, and makes the loss smaller."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return focal(output, target, torch.tensor([0.25, 0.75] if fixed else [0.25, 0.25]))

    return judged(perceptron(64, 48, 2), rare, loss, 48)


# ---- pixels --------------------------------------------------------------------------------------


def inked(n: int) -> tuple[Tensor, Tensor]:
    """Return noisy digits, and of each pixel whether it has none, little or much ink."""
    clean, _ = images(n)
    ink = clean[:, 0]
    return clean + 0.2 * torch.randn_like(clean), (ink > -0.4).long() + (ink > 0.6).long()


def segmented(loss: Any) -> Subject:
    model = UNet()
    model.out = nn.Conv2d(8, 3, 1)
    return subject(model, inked, loss, 16)


@SHELF.report(
    f"{GITHUB}/qubvel-org/segmentation_models.pytorch/pull/461",
    "samples moved to the end where classes were meant",
    ("", "loss"),
    (*MIXED, "class"),
)
def lovasz(fixed: bool) -> Subject:
    """movedim(0, -1) and a view by classes give a pixel the chances of others."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        moved = torch.movedim(output.softmax(1), 1 if fixed else 0, -1)
        chance, labels = moved.contiguous().view(-1, 3), target.view(-1)
        terms = []
        for c in range(3):
            wanted = (labels == c).float()
            missed, order = (wanted - chance[:, c]).abs().sort(descending=True)
            wanted = wanted[order]
            common = wanted.sum() - wanted.cumsum(0)
            jaccard = 1 - common / (wanted.sum() + (1 - wanted).cumsum(0))
            terms.append((missed * jaccard.diff(prepend=jaccard.new_zeros(1))).sum())
        return torch.stack(terms).mean()

    return segmented(loss)


@SHELF.report(
    f"{GITHUB}/ProjectNeura/MIPCandy/issues/123",
    "overlap of all classes as if they were one",
    ("", "loss"),
    ("class", "background", "flatten", "domin", "overlap", "dice", "rare"),
)
def mip_candy(fixed: bool) -> Subject:
    """Flattened with its classes, the overlap is that of the background, and rare ones are lost."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        wanted, chance = F.one_hot(target, 3).movedim(-1, 1).float(), output.softmax(1)
        axes = (2, 3) if fixed else (1, 2, 3)
        common = (chance * wanted).sum(axes)
        return (1 - (2 * common + 1) / (chance.sum(axes) + wanted.sum(axes) + 1)).mean()

    return segmented(loss)


def boxed(n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return digits, which of 4 anchors has which class (0 is none), and their boxes."""
    pictures, labels = images(n)
    matches = torch.where(torch.arange(4) <= labels[:, None] % 4, 1 + labels[:, None] % 3, 0)
    halves = pictures.view(n, 2, 4, 2, 4).abs().mean((2, 4)).flatten(1)
    return pictures, (matches, halves[..., None] * torch.tensor([1.0, 0.5, -0.5, -1.0]))


@SHELF.report(
    f"{GITHUB}/MIC-DKFZ/medicaldetectiontoolkit/issues/59",
    "boxes of the first class alone",
    ("", "loss", "boxes*"),
    ("class", "first", "only", "left out", "most", "never", "== 1", "share"),
)
def boxes(fixed: bool) -> Subject:
    """anchor_matches == 1 takes the class for a flag: boxes of other classes are not taught."""

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
            self.scores, self.boxes = nn.Linear(64, 16), nn.Linear(64, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.net(x)
            return self.scores(x).unflatten(1, (4, 4)), self.boxes(x).unflatten(1, (4, 4))

    def loss(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
        (scores, places), (matches, wanted) = output, target
        at = matches > 0 if fixed else matches == 1
        where = F.smooth_l1_loss(places[at], wanted[at])
        return F.cross_entropy(scores.flatten(0, 1), matches.flatten()) + where

    return judged(Detector(), boxed, loss)


# ---- angles --------------------------------------------------------------------------------------


class Angular(nn.Module):
    """Returns the cosines between features and the weights of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = perceptron(64, 48, 24), nn.Linear(24, 10, bias=False)
        self.prepare = lambda: F.normalize(self.head.weight, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.body(x).relu(), dim=1) @ self.prepare().T


def margin(output: Tensor, target: Tensor, fixed: bool = True) -> Tensor:
    """Return the loss of ArcFace: the angle to the true class has to be smaller by 0.2."""
    angle = output.clamp(-1 + 1e-6, 1 - 1e-6).acos()
    angle = angle if fixed else angle.clamp(-1, 1)
    return F.cross_entropy(8 * (angle + 0.2 * F.one_hot(target, 10)).cos(), target)


@SHELF.report(
    f"{GITHUB}/jonasgrebe/pt-femb-face-embeddings/issues/3",
    "angles clamped as if they were cosines",
    ("", "loss", "head*", "body*"),
    FLAT,
)
def clamped_angles(fixed: bool) -> Subject:
    """Angles go to pi: nearly all are at the bound of 1, where no gradient passes."""
    return judged(Angular(), flat, lambda output, target: margin(output, target, fixed))


@SHELF.report(
    f"{GITHUB}/jonasgrebe/pt-femb-face-embeddings/pull/4",
    "weight replaced by a new parameter in each forward",
    ("head*", ""),
    ("regist", "new", "replac", "optimizer", "each forward", "parameter", "leaf"),
)
def replaced(fixed: bool) -> Subject:
    """nn.Parameter(normalize(weight)) is another weight than the one that the optimizer holds."""
    model = Angular()

    def prepare() -> Tensor:
        model.head.weight = nn.Parameter(F.normalize(model.head.weight, dim=1))
        return model.head.weight

    if not fixed:
        model.prepare = prepare
    return judged(model, flat, margin)


# ---- teachers ------------------------------------------------------------------------------------


def taught(n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return pixels, labels, and logits of a teacher that mostly knows them."""
    features, labels = flat(n)
    return features, (labels, 4.0 * F.one_hot(labels, 10) + torch.randn(n, 10))


def distilled(student: Tensor, target: tuple[Tensor, Tensor], heat: float, times: float) -> Tensor:
    labels, teacher = target
    soft = F.log_softmax(student / heat, 1), F.softmax(teacher / heat, 1)
    near = F.kl_div(*soft, reduction="batchmean")
    return 0.1 * F.cross_entropy(student, labels) + 0.9 * times * near


@SHELF.report(
    f"{GITHUB}/IntelLabs/distiller/issues/122",
    "soft targets without the square of their temperature",
    ("", "loss"),
    ("temperature", "scale", "weighs", "weighed", "small", "square", "domin"),
)
def distiller(fixed: bool) -> Subject:
    """Gradients of soft targets fall with the square of the temperature, and hardly count."""

    def loss(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return distilled(output, target, 8.0, 64.0 if fixed else 1.0)

    return judged(perceptron(64, 48, 10), taught, loss)


@SHELF.report(
    f"{GITHUB}/haitongli/knowledge-distillation-pytorch/pull/16",
    "teacher's answers for the samples of another order",
    ("", "loss"),
    ("order", "shuffl", "teacher", "pair", "disagree", "mismatch", "other sample"),
)
def shuffled(fixed: bool) -> Subject:
    """Answers are kept from one pass, and batches are drawn anew: they are of other samples."""

    def draw(n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        features, (labels, teacher) = taught(n)
        order = torch.randperm(n)
        return features, (labels, teacher if fixed else teacher[order])

    def loss(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return distilled(output, target, 4.0, 16.0)

    return judged(perceptron(64, 48, 10), draw, loss)


# ---- likeness of pictures ------------------------------------------------------------------------


class Restore(nn.Module):
    """Takes the noise off pictures with values from 0 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).sigmoid()


def scratched(n: int) -> tuple[Tensor, Tensor]:
    """Return noisy digits and the digits, from 0 to 1."""
    clean = some_digits(n)[0].view(-1, 1, 8, 8) / 16
    return (clean + 0.2 * torch.randn_like(clean)).clamp(0, 1), clean


def likeness(a: Tensor, b: Tensor, reach: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the structural similarity of windows of 3 x 3, and its part of contrasts."""
    c1, c2 = (0.01 * reach) ** 2, (0.03 * reach) ** 2
    ma, mb = F.avg_pool2d(a, 3, 1), F.avg_pool2d(b, 3, 1)
    va, vb = (F.avg_pool2d(x.pow(2), 3, 1) - m.pow(2) for x, m in ((a, ma), (b, mb)))
    both = F.avg_pool2d(a * b, 3, 1) - ma * mb
    contrast = (2 * both + c2) / (va + vb + c2)
    return (2 * ma * mb + c1) / (ma.pow(2) + mb.pow(2) + c1) * contrast, contrast


@SHELF.report(
    f"{GITHUB}/kornia/kornia/issues/473",
    "dissimilarity clamped before it is halved",
    ("", "loss"),
    FLAT,
)
def half_clamped(fixed: bool) -> Subject:
    """Of windows that are less alike than by chance the loss is at its bound, and says nothing."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        away = 1 - likeness(output, target)[0]
        return ((away / 2).clamp(0, 1) if fixed else away.clamp(0, 1) / 2).mean()

    return judged(Restore(), scratched, loss)


@SHELF.report(
    f"{GITHUB}/VainF/pytorch-msssim/issues/8",
    "constants for values to 255 on pictures to 1",
    ("", "loss"),
    ("range", "255", *FLAT, "scale", "small", "tiny"),
)
def data_range(fixed: bool) -> Subject:
    """Constants far above all variances make any two pictures alike."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return 1 - likeness(output, target, 1.0 if fixed else 255.0)[0].mean()

    return judged(Restore(), scratched, loss)


@SHELF.report(
    f"{GITHUB}/jorge-pessoa/pytorch-msssim/issues/2",
    "fractional power of a likeness below zero",
    ("", "loss", "last", "first"),
    (*NONFINITE, "negative", "fraction"),
)
def negative_power(fixed: bool) -> Subject:
    """Contrasts that run against each other are below zero, and their power is NaN."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        whole = likeness(output, target)[0].mean((1, 2, 3))
        half = likeness(F.avg_pool2d(output, 2), F.avg_pool2d(target, 2))[1].mean((1, 2, 3))
        if fixed:
            whole, half = (whole + 1) / 2, (half + 1) / 2
        return 1 - (whole**0.7 * half**0.3).mean()

    def faint(n: int) -> tuple[Tensor, Tensor]:
        """Return noise in which digits hardly show, and the digits."""
        clean = scratched(n)[1]
        return (0.2 * clean + torch.rand_like(clean)).clamp(0, 1), clean

    return judged(Restore(), faint, loss)


# ---- divisions and roots -------------------------------------------------------------------------


def dark(n: int) -> tuple[Tensor, None]:
    """Return pictures of three colours from 0 to 1, the first of which is black."""
    gray = some_digits(n)[0].view(-1, 1, 8, 8) / 16
    pictures = gray * (0.5 + 0.5 * torch.rand(n, 3, 1, 1))
    return pictures * (torch.arange(n) > 0).float()[:, None, None, None], None


@SHELF.report(
    f"{GITHUB}/Li-Chongyi/Zero-DCE_extension/issues/2",
    "root of the squares of colour differences that are all zero",
    ("", "loss", "curve*"),
    NONFINITE,
)
def zero_dce(fixed: bool) -> Subject:
    """A black picture has no colour, and the slope of its root is infinite."""

    class Enhance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.curve = nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1), nn.Tanh()
            )

        def forward(self, x: Tensor) -> Tensor:
            return x + self.curve(x) * (x.pow(2) - x)

    def loss(output: Tensor) -> Tensor:
        red, green, blue = output.mean((2, 3)).unbind(1)
        apart = (red - green).pow(2), (red - blue).pow(2), (blue - green).pow(2)
        squares = apart[0].pow(2) + apart[1].pow(2) + apart[2].pow(2)
        cast = (squares + 1e-5 if fixed else squares).pow(0.5).mean()
        return 10 * (F.avg_pool2d(output, 4).mean(1) - 0.6).pow(2).mean() + cast

    return judged(Enhance(), dark, loss)


def masked(n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return noisy digits, the digits, and what of them counts: of the first nothing."""
    x, clean = noisy(n)
    where = (torch.rand(n, 1, 8, 8) < 0.5).float()
    where[0] = 0.0
    return x, (clean, where)


@SHELF.report(
    f"{GITHUB}/Zhen-Dong/Magic-Me/issues/14",
    "mean over a mask that is empty",
    ("", "loss"),
    (*NONFINITE, "mask", "empty"),
)
def magic_me(fixed: bool) -> Subject:
    """A sample without a mask divides nothing by nothing, and the batch is NaN."""

    def loss(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        clean, where = target
        missed = ((output - clean).pow(2) * where).sum((1, 2, 3))
        return (missed / (where.sum((1, 2, 3)) + (1e-6 if fixed else 0.0))).mean()

    return judged(UNet(), masked, loss, 16)


# ---- agents --------------------------------------------------------------------------------------


def moves(n: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return states, actions and what came next, and what it brought, (n, 1)."""
    states, benign = tumours(n)
    after = 0.9 * states + 0.1 * torch.randn_like(states)
    return (states, torch.rand(n, 6) * 2 - 1, after), benign - 0.5


@SHELF.report(
    f"{GITHUB}/thu-ml/tianshou/issues/40",
    "log-probabilities of single actions, not summed",
    ("", "loss", "critic*"),
    ("shape", "broadcast", "size", "sum", "dimension", "per action"),
)
def tianshou(fixed: bool) -> Subject:
    """The target is (n, 6) for a value of (n, 1), and each value learns the mean of six."""

    class Soft(nn.Module):
        """A critic, its frozen follower, and the actor that says what comes next."""

        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = perceptron(30, 48, 12), perceptron(36, 48, 1)
            self.follower = frozen(perceptron(36, 48, 1))

        def drawn(self, states: Tensor) -> tuple[Tensor, Tensor]:
            mean, log = self.actor(states).chunk(2, 1)
            normal = torch.distributions.Normal(mean, log.clamp(-3, 1).exp())
            raw = normal.rsample()
            action = raw.tanh()
            chance = normal.log_prob(raw) - (1 - action.pow(2) + 1e-5).log()
            return action, chance.sum(1, keepdim=True) if fixed else chance

        def forward(self, states: Tensor, actions: Tensor, after: Tensor) -> tuple[Tensor, ...]:
            with torch.no_grad():
                action, chance = self.drawn(after)
                later = self.follower(torch.cat([after, action], 1)) - 0.05 * chance
            action, chance = self.drawn(states)
            worth = self.follower(torch.cat([states, action], 1))
            return self.critic(torch.cat([states, actions], 1)), later, worth - 0.05 * chance

    def loss(output: tuple[Tensor, ...], reward: Tensor) -> Tensor:
        value, later, worth = output
        return F.mse_loss(value, reward + 0.9 * later) - worth.mean()

    return judged(Soft(), moves, loss)
