"""Healthy models that look like a fault of data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.designs import (
    ThreeChannels,
    TorchEncoder,
    ink,
    one_class,
    padded_words,
    repeated_words,
)
from corpus.models.fields import (
    Rate,
    Reversible,
    TabNet,
    cox,
    dueling,
    gin,
    llama,
    rare_counts,
    rare_marks,
    relative,
    stocks,
)
from corpus.models.perception import Painted, convnext, detector, maps, sound_cnn, spiking
from corpus.models.small import (
    CNN,
    GCN,
    GRU,
    LSTM,
    MLP,
    ViT,
    bert,
    citations,
    cnn,
    contrastive,
    images,
    mlp,
    plain,
    rows,
    tumours,
    words,
)
from corpus.models.usual import (
    PaddedAttention,
    Stateful,
    Timed,
    long_rows,
    noised,
    one_hot,
    padded,
    sparse,
    unit_images,
    with_masks,
)
from corpus.subject import Subject
from corpus.variants import after_training, changed, evaluated, of_batch, with_model

SHELF = Shelf("data")
control = SHELF.control


def _raw_columns(n: int) -> tuple[Tensor, Tensor]:
    """Return columns in their units: the batch norm that reads them is what scales them."""
    features, target = tumours(n)
    return features * torch.logspace(-2, 2.5, 30) + 2 * torch.logspace(-2, 2.5, 30), target


def _few_ends(s: Subject) -> None:
    event = torch.zeros(64)
    event[:2] = 1
    s.target = (s.target[0], event)


def _lonely(s: Subject) -> None:
    """Take most edges away, so that nodes have no neighbours."""
    nodes, edges, graph = s.inputs
    s.inputs = (nodes, edges[:, torch.rand(edges.shape[1]) < 0.05], graph)


def _greedy(s: Subject) -> None:
    """Every state had the same action, so that one advantage alone is asked."""
    s.target = (torch.zeros_like(s.target[0]), *s.target[1:])


control("llama, one sequence", of_batch(llama, 1))
control("series standardised in the model", with_model(Reversible, stocks, relative))
control("columns in their units into a batch norm", with_model(
    TabNet, _raw_columns, F.binary_cross_entropy_with_logits))  # fmt: skip

control("two ends among 64", changed(cox, _few_ends))
control("counts nearly all zero", with_model(Rate, rare_counts, F.poisson_nll_loss))
control("marks nearly all absent", with_model(
    MLP, rare_marks, F.binary_cross_entropy_with_logits))  # fmt: skip

control("graphs of lonely nodes", changed(gin, _lonely))
control("one action played throughout", changed(dueling, _greedy))


def _with_opacity(s: Subject) -> None:
    s.inputs = torch.cat([s.inputs, torch.ones(len(s.inputs), 1, 16, 16)], 1)
    s.model.stem = nn.Conv2d(4, 24, 2, stride=2)


control("a channel of opacity, all ones", changed(convnext, _with_opacity))


def _mostly_silent(s: Subject) -> None:
    s.inputs[:, 150:] = 0.0


control("sounds padded with silence", changed(sound_cnn, _mostly_silent))
control(
    "images from maps of classes, two of which are absent", with_model(Painted, maps, F.l1_loss, 16)
)

control("detector, batch of 1", of_batch(detector, 1))
control("spiking net of dark images", changed(spiking, lambda s: s.inputs.mul_(0.2)))
control("images from 0 to 1", after_training(with_model(CNN, unit_images, F.cross_entropy)))
control("one-hot inputs", with_model(lambda: MLP(576), one_hot, F.cross_entropy))
control("98 % of the inputs zero", with_model(lambda: MLP(500), sparse, F.cross_entropy))
control("ids with padding", after_training(with_model(LSTM, padded, F.cross_entropy)))


def _repeat(s: Subject) -> None:
    s.inputs, s.target = s.inputs[:1].expand_as(s.inputs), s.target[:1].expand_as(s.target)


control("a batch of equal samples", changed(mlp, _repeat))
control("a batch of equal images, trained", changed(after_training(cnn), _repeat))
control("padding masked with -inf", with_model(PaddedAttention, padded, F.cross_entropy))
control("long sequence", with_model(GRU, long_rows, F.cross_entropy, 16))
control("stacked LSTM", with_model(
    lambda: GRU(nn.LSTM(8, 32, 3, batch_first=True)), rows, F.cross_entropy))  # fmt: skip

control("bert, mask of ones and types of zero", changed(bert, with_masks))
control("diffusion steps as a number", after_training(with_model(Timed, noised, F.mse_loss)))
control("states handed over as zeros", with_model(
    lambda: Stateful(), lambda n: ((rows(n)[0], torch.zeros(1, n, 32)), rows(n)[1]),
    F.cross_entropy))  # fmt: skip

control("batch of a single class", with_model(MLP, one_class, F.cross_entropy))
control("batch of a single class, trained", after_training(
    with_model(MLP, one_class, F.cross_entropy)))  # fmt: skip

for _n in (1, 3):
    control(f"cnn in evaluation, batch of {_n}", of_batch(evaluated(after_training(cnn)), _n))
    control(f"lstm, batch of {_n}", of_batch(with_model(LSTM, words, F.cross_entropy), _n))

control("contrastive, batch of 2", of_batch(contrastive, 2))
control("one token all along each sequence", with_model(LSTM, repeated_words, F.cross_entropy))
control("autoencoder of binary pixels", with_model(
    lambda: plain(64, 16, 64), ink, F.binary_cross_entropy_with_logits))  # fmt: skip


def _isolate(s: Subject) -> None:
    """Leave half of the nodes without neighbours."""
    nodes, edges = s.inputs
    edges = edges.clone()
    edges[::2], edges[:, ::2] = 0.0, 0.0
    s.inputs = nodes, edges


control("graph with isolated nodes", changed(
    with_model(GCN, citations, F.cross_entropy), _isolate))  # fmt: skip

control("torch's encoder with padding", with_model(TorchEncoder, padded_words, F.cross_entropy))
control("torch's encoder with padding, trained", after_training(
    with_model(TorchEncoder, padded_words, F.cross_entropy)))  # fmt: skip

control("images repeated as three channels", with_model(
    lambda: ThreeChannels(), lambda n: (images(n)[0].repeat(1, 3, 1, 1), images(n)[1]),
    F.cross_entropy))  # fmt: skip

control("tokens of a closed image border", with_model(
    lambda: ViT(), lambda n: (F.pad(images(n)[0][..., 2:6, 2:6], (2, 2, 2, 2)), images(n)[1]),
    F.cross_entropy, 32))  # fmt: skip
