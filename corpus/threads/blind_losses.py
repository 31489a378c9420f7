"""Losses and their targets, as threads have them wrong; each with its fix."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import SmallLM, frozen, perceptron
from corpus.models.small import UNet, flat, images, noisy, tumours, views, words
from corpus.subject import Subject, subject

SHELF = Shelf("threads", "blind")
GITHUB = "https://github.com"

LENGTH = ("normalis", "norm", "length", "cosine", "scale", "unit")
CONSTANT = ("constant", "no gradient", "gradient", "always", "no effect", "zero", "depend")


def judged(model: nn.Module, draw: Any = flat, loss: Any = F.cross_entropy) -> Subject:
    return subject(model, draw, loss, 32)


# ---- targets of classes and words ----------------------------------------------------------------


def short_sentences(n: int) -> tuple[Tensor, Tensor]:
    """Return token ids that end in zeros, and the ids that follow each."""
    ids, _ = words(n)
    ids = ids * (torch.arange(32) < torch.randint(6, 20, (n, 1)))
    return ids[:, :-1], ids[:, 1:]


@SHELF.report(
    f"{GITHUB}/lukas-blecher/LaTeX-OCR/issues/305",
    "padding predicted like any word",
    ("", "loss"),
    ("pad", "ignore", "most of", "share of", "same target"),
)
def latex_ocr(fixed: bool) -> Subject:
    """The loss passes over -100, and padding is 0: most of what is learnt is to pad."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        ignored = 0 if fixed else -100
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=ignored)

    return judged(SmallLM(), short_sentences, loss)


@SHELF.report(
    f"{GITHUB}/Project-MONAI/GenerativeModels/issues/314",
    "word N predicted from words 0 to N",
    ("", "loss", "lm_head"),
    ("shift", "own input", "copy", "itself", "leak", "same token"),
)
def generative(fixed: bool) -> Subject:
    """Targets are not shifted: each place is asked for the very word that it is given."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        output, target = (output[:, :-1], target[:, 1:]) if fixed else (output, target)
        return F.cross_entropy(output.transpose(1, 2), target)

    return judged(SmallLM(), lambda n: (words(n)[0],) * 2, loss)


@SHELF.report(
    f"{GITHUB}/nyu-mll/jiant/issues/925",
    "class 0 passed over as padding",
    ("", "loss", "head"),
    ("ignore", "class 0", "label 0", "left out", "one class"),
)
def jiant(fixed: bool) -> Subject:
    """Labels begin at 0, as the index of padding does, and the first class is never taught."""

    def draw(n: int) -> tuple[Tensor, Tensor]:
        features, benign = tumours(n)
        return features, benign[:, 0].long()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, ignore_index=-100 if fixed else 0)

    return judged(perceptron(30, 32, 2), draw, loss)


@SHELF.report(
    f"{GITHUB}/ildoonet/pytorch-randaugment/issues/30",
    "smoothed targets that sum to more than one",
    ("", "loss"),
    ("sum to", "sums to", "sum up", "distribution", "probabilit"),
)
def randaugment(fixed: bool) -> Subject:
    """The true class keeps 1 - s / c of its weight in place of 1 - s."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        share = 0.3 / 10
        smooth = F.one_hot(target, 10) * (1 - (0.3 if fixed else share)) + share
        return -(smooth * output.log_softmax(1)).sum(1).mean()

    return judged(perceptron(64, 48, 10), flat, loss)


@SHELF.report(
    f"{GITHUB}/sraashis/easytorch/pull/38",
    "overlap returned for a loss",
    ("", "loss"),
    ("sign", "minim", "maxim", "overlap", "dice", "worse", "climb", "ascend"),
)
def easytorch(fixed: bool) -> Subject:
    """The Dice score itself is minimised, so that prediction and target part."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        chance = output.sigmoid()
        common = (chance * target).sum((1, 2, 3))
        score = (2 * common + 1) / ((chance + target).sum((1, 2, 3)) + 1)
        return (1 - score if fixed else score).mean()

    return judged(UNet(), noisy, loss)


# ---- distillation --------------------------------------------------------------------------------


class Pupil(nn.Module):
    """Returns the logits of a student and of its frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = perceptron(64, 24, 10), frozen(perceptron(64, 48, 10))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x), wanted


@SHELF.report(
    f"{GITHUB}/labmlai/annotated_deep_learning_paper_implementations/issues/66",
    "teacher compared with itself",
    ("", "student*", "loss"),
    (*CONSTANT, "teacher", "itself"),
)
def distilled(fixed: bool) -> Subject:
    """Both sides of the divergence are the teacher's: the term is 0, and nothing is distilled."""

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        student, teacher = output
        soft = (student if fixed else teacher) / 2
        near = F.kl_div(soft.log_softmax(1), (teacher / 2).softmax(1), reduction="batchmean")
        return F.cross_entropy(student, target) + 4 * near

    return judged(Pupil(), flat, loss)


@SHELF.report(
    f"{GITHUB}/microsoft/ProDA/issues/20",
    "student's probabilities where their logarithm is taken",
    ("", "loss"),
    ("log", "kl_div", "probabilit", "positive", "negative"),
)
def pro_da(fixed: bool) -> Subject:
    """F.kl_div(student, teacher) without a logarithm is negative, and no divergence."""

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        student, teacher = output
        soft = student.log_softmax(1) if fixed else student.softmax(1)
        near = F.kl_div(soft, teacher.softmax(1), reduction="batchmean")
        return F.cross_entropy(student, target) + near

    return judged(Pupil(), flat, loss)


# ---- boxes ---------------------------------------------------------------------------------------


def boxes(n: int) -> tuple[Tensor, Tensor]:
    """Return standardised images, and left, top, right and bottom of their ink, from 0 to 1."""
    pictures, _ = images(n)
    ink = pictures[:, 0] > 0
    sides = (ink.any(1), ink.any(2))
    first = [side.float().argmax(1) for side in sides]
    last = [8 - side.flip(1).float().argmax(1) for side in sides]
    return pictures, torch.stack([*first, *last], 1) / 8


class Detector(nn.Module):
    """Predicts the middle and the size of a box."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU())
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x)).sigmoid()


def area(box: Tensor) -> Tensor:
    return (box[:, 2:] - box[:, :2]).clamp(min=0).prod(1)


def common(a: Tensor, b: Tensor) -> Tensor:
    first, last = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    return area(torch.cat([first, last], 1))


def corners(box: Tensor, middle: Tensor) -> Tensor:
    return torch.cat([middle - box[:, 2:] / 2, middle + box[:, 2:] / 2], 1)


@SHELF.report(
    f"{GITHUB}/FoundationVision/ByteTrack/pull/129",
    "hull less intersection where hull less union was meant",
    ("", "loss", "head"),
    ("union", "intersection", "hull", "enclos", "range", "negative", "giou"),
)
def byte_track(fixed: bool) -> Subject:
    """The penalty of the generalised overlap takes in the boxes themselves."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        made = corners(output, output[:, :2])
        inside = common(made, target)
        union = area(made) + area(target) - inside
        first, last = torch.minimum(made, target)[:, :2], torch.maximum(made, target)[:, 2:]
        hull = area(torch.cat([first, last], 1))
        return (1 - inside / union + (hull - (union if fixed else inside)) / hull).mean()

    return judged(Detector(), boxes, loss)


@SHELF.report(
    f"{GITHUB}/motokimura/yolo_v1_pytorch/issues/1",
    "width of a box read as its middle",
    ("", "head", "loss"),
    ("column", "not used", "never read", "no gradient", "dropped", "unused"),
)
def yolo(fixed: bool) -> Subject:
    """pred[:, 2] stands for pred[:, :2]: nothing is asked of the middle of the box."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        made = corners(output, output[:, :2] if fixed else output[:, 2:3])
        inside = common(made, target)
        return (1 - inside / (area(made) + area(target) - inside)).mean()

    return judged(Detector(), boxes, loss)


# ---- contrasts -----------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Encodes two views, to the same length where it is told to."""

    def __init__(self, fixed: bool = True) -> None:
        super().__init__()
        self.encoder, self.fixed = perceptron(64, 48, 16), fixed

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        made = self.encoder(a), self.encoder(b)
        return tuple(F.normalize(z, dim=1) for z in made) if self.fixed else made


@SHELF.report(
    f"{GITHUB}/jinnnju/PaAno/issues/1",
    "farthest negative is the sample itself, at infinity",
    ("", "encoder*", "loss"),
    (*CONSTANT, "inf", "diagonal", "relu", "margin"),
)
def pa_ano(fixed: bool) -> Subject:
    """-inf in similarities is inf in distances: each triplet is easy, and the loss zero."""

    def loss(output: tuple[Tensor, Tensor]) -> Tensor:
        a, b = output
        near = (a @ a.T).clone()
        near.diagonal().fill_(math.inf if fixed else -math.inf)
        far = (1 - near).amax(1)
        return F.relu(1 - (a * b).sum(1) - far + 0.5).mean()

    model = Encoder()
    model.encoder = perceptron(64, 48, 48, 48, 32)  # which tells little apart at first
    return judged(model, views, loss)


def labelled_views(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return two noisy views of the same digits, and labels."""
    pixels, labels = flat(n)
    a, b = (pixels + 0.1 * torch.randn_like(pixels) for _ in range(2))
    return (a, b), labels


@SHELF.report(
    f"{GITHUB}/alinlab/CSI/issues/49",
    "each sample counts as a positive of its own",
    ("", "encoder*", "loss"),
    ("diagonal", "itself", "positive", "constant"),
)
def csi(fixed: bool) -> Subject:
    """The diagonal is blanked in the similarities, and left in the mask of positives."""

    def loss(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        z, labels = torch.cat(output), labels.repeat(2)
        eye = torch.eye(len(z))
        near = (z @ z.T / 0.5).exp() * (1 - eye)
        share = near / near.sum(1, keepdim=True)
        same = (labels[:, None] == labels).float() * ((1 - eye) if fixed else 1)
        return -(same * (share + 1e-8).log()).sum(1).div(same.sum(1)).mean()

    return judged(Encoder(), labelled_views, loss)


@SHELF.report(
    f"{GITHUB}/Zasder3/train-CLIP/pull/3",
    "embeddings of any length compared by their products",
    ("", "encoder*", "loss"),
    LENGTH,
)
def train_clip(fixed: bool) -> Subject:
    """Features go into the logits without a norm, which a temperature of 0.07 is made for."""

    def loss(output: tuple[Tensor, Tensor]) -> Tensor:
        logits, at = output[0] @ output[1].T / 0.07, torch.arange(len(output[0]))
        return (F.cross_entropy(logits, at) + F.cross_entropy(logits.T, at)) / 2

    return judged(Encoder(fixed), views, loss)


@SHELF.report(
    f"{GITHUB}/BAAI-DCAI/M3D/issues/52",
    "logarithm of a temperature used as if it were one",
    ("", "loss"),
    ("exponential", "temperature", "scale", "logarithm"),
)
def m3d(fixed: bool) -> Subject:
    """The scale begins at log(1 / 0.07), and nobody takes its exponential."""

    class Clip(Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.logit_scale = nn.Parameter(torch.tensor(1 / 0.07).log())

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            a, b = super().forward(a, b)
            return (self.logit_scale.exp() if fixed else self.logit_scale) * a @ b.T

    def loss(logits: Tensor) -> Tensor:
        at = torch.arange(len(logits))
        return (F.cross_entropy(logits, at) + F.cross_entropy(logits.T, at)) / 2

    return judged(Clip(), views, loss)
