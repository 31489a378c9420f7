"""Faults of the loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from corpus.cards import Shelf
from corpus.models.fields import (
    actor_critic,
    llama,
    masked,
    multilabel,
    ordinal,
    ordinal_loss,
    pointer,
    poisson,
    quantiles,
    tagger,
)
from corpus.models.perception import (
    arcface,
    conv_vae,
    depth_net,
    detector,
    detector_of_two_losses,
    focal,
    recogniser,
    segmenter,
)
from corpus.models.rare import house, pixels, student, towers
from corpus.models.small import (
    cnn,
    contrastive,
    gpt,
    ink_loss,
    label_loss,
    lstm,
    mlp,
    multitask,
    patients,
    regression,
    sequential,
    unet,
    vit,
)
from corpus.models.starts import arcface as starts_arcface
from corpus.models.starts import classifier
from corpus.subject import Subject
from corpus.words import CUT, CUT_OR_ONE_HOT, MODEL, NONFINITE, NONFINITE_OR_ROOT

SHELF = Shelf("loss")
fault = SHELF.fault


@fault(
    "accuracy as loss",
    sequential,
    (*MODEL, "4", "0"),
    (*CUT, "loss"),
    why="A count of right answers has no derivative, and nothing learns from it.",
)
def _(s: Subject) -> None:
    s.loss = lambda output, labels: 1 - (output.argmax(1) == labels).float().mean()


@fault(
    "loss weight still zero",
    cnn,
    (*MODEL, "head", "conv1"),
    ("zero", "loss"),
    why="Times zero the loss is zero, and so is each gradient.",
)
def _(s: Subject) -> None:
    s.loss = lambda output, labels: 0.0 * F.cross_entropy(output, labels)


@fault(
    "every label is ignored",
    gpt,
    (*MODEL, "head"),
    (*NONFINITE, "ignore", "label"),
    ("finite", "loss"),
    why="The mean over no label is 0 / 0: NaN.",
)
def _(s: Subject) -> None:
    s.target = torch.full_like(s.target, -100)


@fault(
    "softmax before cross_entropy",
    cnn,
    (*MODEL, "head", "softmax"),
    ("softmax", "probabilit", "logit"),
    "loss",
    why="The loss takes the softmax itself: twice, it is nearly flat and cannot approach zero.",
)
def _(s: Subject) -> None:
    s.model.finish = lambda x: F.softmax(x, dim=1)


@fault(
    "softmax module before cross_entropy",
    sequential,
    (*MODEL, "5", "4"),
    ("softmax", "probabilit", "logit"),
    "loss",
    why="The loss takes the softmax itself: twice, it is nearly flat and cannot approach zero.",
)
def _(s: Subject) -> None:
    s.model.append(nn.Softmax(dim=-1))


@fault(
    "sigmoid before binary_cross_entropy_with_logits",
    unet,
    (*MODEL, "out", "sigmoid"),
    ("sigmoid", "probabilit", "logit"),
    "loss",
    why="The loss takes the sigmoid itself: twice, all chances lie between 0.5 and 0.73.",
)
def _(s: Subject) -> None:
    s.model.finish = torch.sigmoid


@fault(
    "softmax over the batch",
    mlp,
    (*MODEL, "head", "log_softmax", "softmax"),
    ("batch", "dim"),
    "loss",
    why="Samples compete with each other for a class, in place of classes for a sample.",
)
def _(s: Subject) -> None:
    s.model.finish = lambda x: F.log_softmax(x, dim=0)
    s.loss = F.nll_loss


@fault(
    "output (N, 1) against target (N,)",
    regression,
    (*MODEL, "head"),
    ("broadcast", "shape", "(n,", "squeeze"),
    "loss",
    why="The difference broadcasts to (N, N): each prediction is held against every target.",
)
def _(s: Subject) -> None:
    s.target = s.target.squeeze(1)


@fault(
    "nll_loss on logits",
    lstm,
    (*MODEL, "head"),
    ("log", "negative", "nll"),
    "loss",
    why="It takes logarithms of probabilities: of logits it has no lower bound.",
)
def _(s: Subject) -> None:
    s.loss = F.nll_loss
    s.model.head.weight.data *= 8  # as after a few steps, which drive it down without end


@fault(
    "cross-entropy with its sign turned",
    vit,
    (*MODEL, "head"),
    ("negat", "sign"),
    "loss",
    why="Training makes the right class less likely, without end.",
)
def _(s: Subject) -> None:
    s.loss = lambda output, labels: -F.cross_entropy(output, labels)


@fault(
    "loss clamped below what it is",
    mlp,
    (*MODEL, "head", "fc1"),
    ("clamp", "zero", "constant"),
    why="A clamp that is always at work makes the loss a constant, without a gradient.",
)
def _(s: Subject) -> None:
    s.loss = lambda output, labels: F.cross_entropy(output, labels).clamp(max=1.0)


@fault(
    "prediction clamped to a range it never meets",
    regression,
    (*MODEL, "head", "clamp*"),
    ("clamp", "zero", "range", "constant"),
    why="A clamp that is always at work makes the prediction a constant, without a gradient.",
)
def _(s: Subject) -> None:
    s.loss = lambda output, target: F.mse_loss(output.clamp(10, 20), target)


@fault(
    "kl_div on probabilities",
    sequential,
    (*MODEL, "4"),
    ("negative", "log"),
    "loss",
    why="It takes logarithms for its first argument: of probabilities it is no divergence.",
)
def _(s: Subject) -> None:
    s.target = F.one_hot(s.target, 10).float()
    s.loss = lambda output, target: F.kl_div(output.softmax(1), target, reduction="batchmean")


@fault(
    "contrastive temperature of 1e-4",
    contrastive,
    MODEL,
    ("temperature", "saturat", "scale", "large", "ln("),
    why="Similarities times 10,000 make the softmax one-hot, and the loss starts huge.",
)
def _(s: Subject) -> None:
    s.model.temperature = 1e-4
    s.model.other = lambda encoder, x: encoder(x.flip(1))


@fault(
    "one task's gradient is 100,000 times the other's",
    multitask,
    ("trunk*", "ink", *MODEL),
    ("task", "imbalance", "dominat", "ink"),
    "task_balance",
    why="The steps of the trunk follow one task alone.",
)
def _(s: Subject) -> None:
    s.loss = {"label": label_loss, "ink": lambda output, target: 1e5 * ink_loss(output, target)}


@fault(
    "temperature of 1e-4",
    towers,
    (*MODEL, "one*", "other*"),
    ("temperature", "large", "logits"),
    why="Similarities times 10,000 make the softmax one-hot, and the loss starts huge.",
)
def _(s: Subject) -> None:
    s.model.temperature = 1e-4


@fault(
    "probabilities into kl_div",
    student,
    (*MODEL, "student*", "softmax*"),
    ("log", "probabilit"),
    why="It takes logarithms for its first argument: of probabilities it is no divergence.",
)
def _(s: Subject) -> None:
    s.loss = lambda output: F.kl_div(
        output[0].softmax(1), output[1].softmax(1), reduction="batchmean"
    )


@fault(
    "loss of distillation on the teacher twice",
    student,
    (*MODEL, "student*"),
    ("output", "loss", "graph"),
    why="The student's output is not in the loss, so that the student never learns.",
)
def _(s: Subject) -> None:
    s.loss = lambda output: F.mse_loss(output[1], output[1] + 1.0)


@fault(
    "binary targets of 0 and 255",
    pixels,
    (*MODEL, "2"),
    ("target", "range", "255", "[0, 1]"),
    why="The loss takes targets between 0 and 1: of 255 it has no lower bound.",
)
def _(s: Subject) -> None:
    s.target = s.target * 255


@fault(
    "targets of some hundred thousand",
    house,
    (*MODEL, "head"),
    ("target", "standardi"),
    why="The loss starts at 1e10, and so do its gradients: no usual rate fits.",
)
def _(s: Subject) -> None:
    s.inputs, s.target = prices(64)


@fault(
    "loss weight of zero",
    house,
    MODEL,
    ("zero", "constant"),
    why="Times zero the loss is zero, and so is each gradient.",
)
def _(s: Subject) -> None:
    s.loss = lambda output, target: 0.0 * F.mse_loss(output, target)


@fault(
    "mask that selects no sample",
    house,
    MODEL,
    ("zero", "mask", "constant"),
    why="A mask of nothing makes the loss zero, and so is each gradient.",
)
def _(s: Subject) -> None:
    s.loss = lambda output, target: ((output - target) ** 2 * torch.zeros_like(target)).sum()


@fault(
    "log_softmax over the positions",
    llama,
    (*MODEL, "head", "log_softmax"),
    ("dim", "position", "sequence", "batch"),
    "loss",
    why="Positions compete with each other for a word, in place of words for a position.",
)
def _(s: Subject) -> None:
    s.model.finish = lambda x: F.log_softmax(x, dim=1)
    s.loss = lambda output, ids: F.nll_loss(output.flatten(0, 1), ids.flatten())


@fault(
    "masked loss divided by no token",
    masked,
    MODEL,
    (*NONFINITE_OR_ROOT, "zero"),
    why="A mean over no token is 0 / 0: NaN.",
)
def _(s: Subject) -> None:
    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        counted = (ids > 19).float()
        each = F.cross_entropy(logits.transpose(1, 2), ids.clamp(min=0), reduction="none")
        return (each * counted).sum() / counted.sum()

    s.loss = loss


@fault(
    "padding counted as a tag of its own",
    tagger,
    (*MODEL, "head"),
    ("padding", "ignore"),
    why="Most of the loss is padding, and the model learns to predict it.",
)
def _(s: Subject) -> None:
    s.model.head = nn.Linear(48, 6)
    ids, lengths = s.inputs[0], s.inputs[1].clamp(max=5)
    kept = torch.arange(32) < lengths[:, None]
    s.inputs = (ids * kept, lengths)
    s.target = (ids % 5 + 1) * kept


@fault(
    "nll_loss of a softmax",
    pointer,
    (*MODEL, "score", "softmax"),
    ("log", "probabilit", "negative"),
    "loss",
    why="It takes logarithms of probabilities: of probabilities themselves it is no likelihood.",
)
def _(s: Subject) -> None:
    s.model.finish = lambda x: F.softmax(x, 1)


@fault(
    "cross_entropy of several marks at once",
    multilabel,
    (*MODEL, "head"),
    ("sum", "distribution", "probabilit", "multi", "one label", "several"),
    "loss",
    why="Several marks at once are no distribution: the loss asks for a sum of more than one.",
)
def _(s: Subject) -> None:
    s.loss = F.cross_entropy


@fault(
    "softmax before a binary cross-entropy of logits",
    multilabel,
    (*MODEL, "head", "softmax"),
    ("softmax", "probabilit", "logit"),
    "loss",
    why="The loss takes the sigmoid itself: of probabilities, all chances lie above one half.",
)
def _(s: Subject) -> None:
    s.model.finish = lambda x: x.softmax(1)


@fault(
    "a rate, not its logarithm, into poisson_nll_loss",
    poisson,
    (*MODEL, "net*", "exp"),
    ("log", "exp", "rate"),
    "loss",
    why="The loss takes the logarithm of the rate: of a rate it grows exponentially.",
)
def _(s: Subject) -> None:
    s.model.finish = torch.exp


@fault(
    "loss of a list of floats",
    ordinal,
    ("", "loss", "net*"),
    (*CUT_OR_ONE_HOT, "item", "gradient"),
    why="Numbers in a list carry no graph: nothing learns from the loss.",
)
def _(s: Subject) -> None:
    s.loss = lambda output, labels: torch.tensor(
        [ordinal_loss(o[None], y[None]).item() for o, y in zip(output, labels, strict=True)],
        requires_grad=True,
    ).mean()


@fault(
    "minimum where the quantile loss takes the maximum",
    quantiles,
    (*MODEL, "head"),
    ("negat", "sign"),
    "loss",
    why="The minimum rewards being wrong, without end.",
)
def _(s: Subject) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        error = target[..., None] - output
        return torch.min(0.9 * error, -0.1 * error).mean()

    s.loss = loss


@fault(
    "returns (N,) less values (N, 1), by hand",
    actor_critic,
    (*MODEL, "critic"),
    ("broadcast", "shape", "(n,", "squeeze"),
    "loss",
    why="The difference broadcasts to (N, N): each return is held against every value.",
)
def _(s: Subject) -> None:
    def loss(output: tuple[Tensor, Tensor], target: Any) -> Tensor:
        (logits, value), (action, returns, _) = output, target
        advantage = returns - value
        gain = (Categorical(logits=logits).log_prob(action) * advantage.detach()).mean()
        return advantage.pow(2).mean() - gain

    s.loss = loss


@fault(
    "returns in the ten thousands beside a policy",
    actor_critic,
    ("trunk*", "critic", "value", *MODEL),
    ("task", "imbalance", "dominat", "value", "target", "standardi"),
    why="The error of the values is a million times the policy's: the trunk follows it alone.",
)
def _(s: Subject) -> None:
    action, returns, advantage = s.target
    s.target = (action, 1e5 * (returns + 3), advantage)
    s.loss = {
        "policy": lambda output, target: (
            -(Categorical(logits=output[0]).log_prob(target[0]) * target[2]).mean()
        ),
        "value": lambda output, target: F.mse_loss(output[1].squeeze(1), target[1]),
    }


@fault(
    "classes of pixels after softmax into cross_entropy",
    segmenter,
    (*MODEL, "softmax*", "out"),
    ("probabilit", "softmax"),
    why="The loss takes the softmax itself: twice, it is nearly flat and cannot approach zero.",
)
def _(s: Subject) -> None:
    s.model.finish = lambda logits: logits.softmax(1)


@fault(
    "every pixel is void",
    segmenter,
    (*MODEL, "out"),
    (*NONFINITE, "ignore"),
    why="The mean over no pixel is 0 / 0: NaN.",
)
def _(s: Subject) -> None:
    s.target = torch.full_like(s.target, 255)


@fault(
    "depths (N, 1, H, W) against (N, H, W)",
    depth_net,
    (*MODEL, "softplus"),
    ("shape", "broadcast"),
    why="The difference broadcasts to (N, N, H, W): each image is held against every target.",
)
def _(s: Subject) -> None:
    s.target = s.target[:, 0]


@fault(
    "divided by the number of objects, which is zero",
    detector,
    MODEL,
    NONFINITE,
    why="A batch without objects divides by zero: NaN.",
)
def _(s: Subject) -> None:
    classes, mask, boxes = s.target
    s.target = (classes * 0, mask * 0, boxes)
    s.loss = lambda output, target: (
        F.binary_cross_entropy_with_logits(output[0], target[0], reduction="sum") / target[1].sum()
    )


@fault(
    "chances of objects through sigmoid twice",
    detector,
    (*MODEL, "sigmoid*", "classes*"),
    ("sigmoid", "probabilit", "twice"),
    why="The loss takes the sigmoid itself: twice, all chances lie between 0.5 and 0.73.",
)
def _(s: Subject) -> None:
    s.model.finish = torch.sigmoid


@fault(
    "squared box errors in pixels, summed",
    detector_of_two_losses,
    ("", "backbone*", "boxes*", "classes*"),
    ("task", "imbalance", "dominat", "box"),
    ("task_balance",),
    why="Squares of pixels, summed, drown the classes: the backbone follows the boxes alone.",
)
def _(s: Subject) -> None:
    s.loss = {
        "class": focal,
        "box": lambda output, target: (((output[1] - target[2]) * 64) ** 2).sum(),
    }


@fault(
    "binary cross-entropy of pixels from -1 to 1",
    conv_vae,
    (*MODEL, "decoder.5"),
    ("target", "0 and 1", "range", "negative"),
    why="The loss takes targets between 0 and 1: below zero it has no lower bound.",
)
def _(s: Subject) -> None:
    s.target = 2 * s.target - 1
    s.inputs = 2 * s.inputs - 1


@fault(
    "a scale of 64 on features of any length",
    arcface,
    (*MODEL, "encoder*"),
    ("large", "scale", "logit", "normal"),
    why="Without unit lengths the scale makes logits in the hundreds.",
)
def _(s: Subject) -> None:
    s.model.scale = 64.0
    s.model.unit = lambda x: x * 3


@fault(
    "probabilities into ctc_loss",
    recogniser,
    (*MODEL, "softmax*"),
    ("probabilit", "log_softmax", "softmax"),
    why="The loss takes logarithms of probabilities: of probabilities it is no likelihood.",
)
def _(s: Subject) -> None:
    s.model.finish = lambda x: x.softmax(-1)


def prices(n: int) -> tuple[Tensor, Tensor]:
    """Targets of some hundred thousand, as they are."""
    features, progression = patients(n)
    return features, 3e5 + 1e5 * progression


@fault(
    "logits of a plain classifier times 640",
    classifier,
    ("", "head"),
    ("multipl", "factor"),
    why="Logits in the hundreds make the first loss far above that of a guess.",
)
def _(s: Subject) -> None:
    s.model.scale = 640.0


@fault(
    "cosines times 6400",
    starts_arcface,
    ("", "head"),
    "cosines",
    why="Cosines times 6400 make the softmax one-hot, and the loss starts huge.",
)
def _(s: Subject) -> None:
    s.model.head.scale = 6400.0
