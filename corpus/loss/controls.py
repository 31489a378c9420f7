"""Healthy models that look like a fault of the loss."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.designs import (
    CRF,
    Clamped,
    Flow,
    Mixture,
    Recogniser,
    Triplet,
    clipped_policy,
    connectionist,
    crf_likelihood,
    easy_hinge,
    easy_triplets,
    hard_triplets,
    likelihood,
    mixture_likelihood,
    narrow,
    negative_entropy,
    perfect,
    policy_gradient,
    satisfied,
    spoken,
    without_target,
    years,
)
from corpus.models.fields import (
    PPO,
    Doubled,
    FactorizedVocabulary,
    clipped,
    masked,
    played,
    rare_words,
)
from corpus.models.perception import (
    Queries,
    colours,
    detector,
    hinge,
    one_found,
    real_and_made,
    segmenter,
    smooth_critic,
)
from corpus.models.small import MLP, flat, gpt, images, itself, mlp, patients, plain, rows, tumours
from corpus.models.starts import Cosines, arcface, classifier, cosface, margin_outside
from corpus.models.usual import ArcFace, Centres, gaussian, quantile, rare, with_margin
from corpus.subject import Subject, subject
from corpus.variants import after_training, changed, with_model

SHELF = Shelf("loss")
control = SHELF.control


def _masked_by_hand(s: Subject) -> None:
    """Padding is a word like others to cross_entropy; a mask takes it out afterwards."""

    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        counted = (ids >= 0).float()
        each = F.cross_entropy(logits.transpose(1, 2), ids.clamp(min=0), reduction="none")
        return (each * counted).sum() / counted.sum().clamp(min=1)

    s.loss = loss


control("loss of words masked by hand", changed(masked, _masked_by_hand))
control("clipped ratios, all of them one", with_model(PPO, played, clipped))
control("adaptive softmax over a long tail", with_model(
    FactorizedVocabulary, rare_words, None, 32))  # fmt: skip

control("log_softmax before cross_entropy", with_model(Doubled, flat, F.cross_entropy))


def _without_objects(s: Subject) -> None:
    classes, mask, boxes = s.target
    s.target = (classes * 0, mask * 0, boxes)


control("a batch without objects", changed(detector, _without_objects))


def _mostly_void(s: Subject) -> None:
    s.target[torch.rand(s.target.shape) < 0.95] = 255


control("95 % of the pixels void", changed(segmenter, _mostly_void))
control("critic with a hinge loss and spectral norms", with_model(
    smooth_critic, real_and_made, hinge, 32))  # fmt: skip

control(
    "queries of objects, most of which find nothing", with_model(Queries, colours, one_found, 16)
)

control(
    "queries of objects, trained", after_training(with_model(Queries, colours, one_found, 16), 20)
)

control("critic of a Wasserstein GAN: negative loss", with_model(
    lambda: plain(64, 64, 1, activation=nn.LeakyReLU), flat,
    lambda scores, labels: scores[labels < 5].mean() - scores[labels >= 5].mean() - 5))  # fmt: skip

control("quantile loss", after_training(with_model(
    lambda: MLP(10, 32, 1), patients, quantile)))  # fmt: skip

control("Gaussian likelihood: negative loss", after_training(with_model(
    lambda: MLP(10, 32, 2), patients, gaussian)))  # fmt: skip

control("Huber loss", with_model(lambda: MLP(10, 32, 1), patients, F.huber_loss))
control("label smoothing", after_training(with_model(
    MLP, flat, functools.partial(F.cross_entropy, label_smoothing=0.1))))  # fmt: skip


def _mostly_ignored(s: Subject) -> None:
    s.target = s.target.masked_fill(torch.rand(s.target.shape) < 0.85, -100)


control("85 % of the tokens ignored", changed(gpt, _mostly_ignored))
control("class imbalance", after_training(with_model(MLP, rare, F.cross_entropy)))
control("trained until the loss is next to nothing", after_training(mlp, 600, 3e-3))
control("log_softmax with nll_loss", with_model(
    lambda: nn.Sequential(plain(64, 64, 10), nn.LogSoftmax(1)), flat, F.nll_loss))  # fmt: skip

control("sigmoid with binary_cross_entropy", after_training(with_model(
    lambda: nn.Sequential(plain(30, 32, 1), nn.Sigmoid()), tumours,
    F.binary_cross_entropy)))  # fmt: skip

control("loss weighted 1e-4", with_model(
    MLP, flat, lambda output, labels: 1e-4 * F.cross_entropy(output, labels)))  # fmt: skip

control("loss summed over the batch", after_training(with_model(
    MLP, flat, functools.partial(F.cross_entropy, reduction="sum"))))  # fmt: skip

control("cosines with a margin", with_model(ArcFace, flat, with_margin))
control("loss with parameters of its own", lambda: subject(MLP(), flat, Centres()))


def _zero_output(s: Subject) -> None:
    nn.init.zeros_(s.model.head.weight)
    nn.init.zeros_(s.model.head.bias)


control("hinge that every sample satisfies", with_model(MLP, flat, easy_hinge))
control("triplets that are all easy", with_model(Triplet, easy_triplets, satisfied))
control("triplets", after_training(with_model(
    Triplet, hard_triplets, lambda output: F.triplet_margin_loss(*output))))  # fmt: skip

control("perfect fit: a loss of zero", changed(
    with_model(MLP, perfect, F.mse_loss), _zero_output))  # fmt: skip

control("multi-margin loss, satisfied", with_model(
    MLP, flat, lambda output, labels: F.multi_margin_loss(
        output + 50.0 * F.one_hot(labels, 10), labels)))  # fmt: skip


def _towards_years(s: Subject) -> None:
    s.model.head.bias.data.fill_(1990.0)
    s.model.head.weight.data *= 0.1


control("years as targets, bias at their mean", changed(
    with_model(lambda: MLP(10, 32, 1), years, F.mse_loss), _towards_years))  # fmt: skip

control("normalising flow", with_model(Flow, without_target(patients), likelihood))
control(
    "normalising flow of narrow points, trained",
    after_training(with_model(Flow, narrow, likelihood)),
)

control("mixture density network", with_model(Mixture, patients, mixture_likelihood))
control("mixture density network, trained", after_training(
    with_model(Mixture, patients, mixture_likelihood)))  # fmt: skip

control("CTC", with_model(Recogniser, spoken, connectionist))
control("conditional random field", with_model(CRF, rows, crf_likelihood))
control("policy gradient of sampled actions: negative loss", with_model(MLP, flat, policy_gradient))
control("clipped policy gradient, first step", with_model(MLP, flat, clipped_policy))
control("entropy to be maximised: negative loss", with_model(MLP, flat, negative_entropy))
control("focal loss of a table", with_model(
    lambda: MLP(30, 32, 1), tumours, lambda output, target: (
    (1 - torch.exp(-F.binary_cross_entropy_with_logits(output, target, reduction="none"))) ** 2
    * F.binary_cross_entropy_with_logits(output, target, reduction="none")).mean()))  # fmt: skip

control("dice loss of a mask", with_model(
    lambda: nn.Conv2d(1, 1, 3, padding=1), lambda n: (images(n)[0], (images(n)[0] > 0).float()),
    lambda output, mask: 1 - 2 * (output.sigmoid() * mask).sum()
    / (output.sigmoid().sum() + mask.sum())))  # fmt: skip

control("negative cosine similarity as a loss", with_model(
    lambda: MLP(64, 64, 64), itself,
    lambda output, target: -F.cosine_similarity(output, target, dim=1).mean()))  # fmt: skip

control("outputs bounded by clamp", with_model(
    lambda: Clamped(), patients, F.mse_loss))  # fmt: skip

control("cross_entropy of soft targets", with_model(
    MLP, flat, lambda output, labels: F.cross_entropy(
        output, F.one_hot(labels, 10) * 0.9 + 0.01)))  # fmt: skip

control("loss per token, weighted", with_model(
    MLP, flat, functools.partial(F.cross_entropy, weight=torch.arange(1.0, 11.0))))  # fmt: skip

control("sum of squares of logits kept small", with_model(
    MLP, flat, lambda output, labels: F.cross_entropy(output, labels)
    + 1e-4 * output.logsumexp(1).pow(2).mean()))  # fmt: skip

# ---- logits that are scaled cosines (Deng et al. 2019, Wang et al. 2018) -------------------------


control("ArcFace", arcface)
control("ArcFace, trained", after_training(arcface))
control("CosFace", cosface)
control("ArcFace as the loss", margin_outside)
control("cosines times 64", with_model(Cosines, flat, F.cross_entropy))
control("classifier of the faults beside them", classifier)
