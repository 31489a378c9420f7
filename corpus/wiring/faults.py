"""Faults of wiring."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from corpus.cards import Shelf
from corpus.models.fields import Classified, classified, dueling, sgc, text_cnn
from corpus.models.gated import class_critic, contextual_targets, ia3, ladder
from corpus.models.perception import deep_wavenet
from corpus.models.rare import attentive, diffusion, mixer, modulated, pointnet
from corpus.models.routed import (
    cached_keys,
    gate_per_task,
    messages,
    relations,
    shared_expert,
    translator,
)
from corpus.models.small import cnn, gru, mlp, resnet, same, seq2seq, vit
from corpus.subject import Subject
from corpus.words import CUT, CUT_OR_COMPARED, UNREAD

SHELF = Shelf("wiring")
fault = SHELF.fault


@fault(
    "ReLU of a negated ReLU",
    mlp,
    ("", "relu", "relu_1"),
    ("dead", "zero", "negative"),
    why="The second ReLU sees nothing but values at or below zero and gives zeros throughout.",
)
def _(s: Subject) -> None:
    s.model.between = lambda x: F.relu(-x)


@fault(
    "softmax over a dimension of size one",
    gru,
    ("softmax", "score"),
    ("one", "dim", "constant", "size 1", "single"),
    why="A softmax over one value is always one: the scores have no influence and no gradient.",
)
def _(s: Subject) -> None:
    s.model.dim = -1


@fault(
    "decoder reads the input instead of the code",
    seq2seq,
    ("", "encoder", "encoder.*"),
    ("not used", "unused", "never", "not reach", "reach", "discard", *CUT),
    "missing_gradients",
    why="The encoder runs and nothing reads its result, so that it never learns.",
)
def _(s: Subject) -> None:
    s.model.remember = lambda memory, x: x


@fault(
    "residual adds the input to itself",
    resnet,
    ("blocks.2", "blocks.2.*"),
    ("not used", "unused", "reach", "discard", *CUT),
    "missing_gradients",
    why="The block's branch runs and nothing reads it, so that it never learns.",
)
def _(s: Subject) -> None:
    s.model.blocks[2].join = lambda x, branch: x + x


@fault(
    "dropout drops everything",
    cnn,
    ("dropout", "head"),
    ("zero", "dropout", "constant", "p=1"),
    why="Nothing gets past it: the output is the same for all samples.",
)
def _(s: Subject) -> None:
    s.model.dropout.p = 1.0


@fault(
    "mean over the batch",
    mlp,
    ("", "fc2", "relu"),
    ("batch", "same", "equal", "all samples", "every sample"),
    "collapse",
    why="All samples get the same features, and the net can learn nothing but a constant.",
)
def _(s: Subject) -> None:
    s.model.between = lambda x: x.mean(0, keepdim=True).expand_as(x)


@fault(
    "features multiplied by zero",
    cnn,
    ("", "conv2", "relu1"),
    ("zero", "constant", "same", "equal"),
    why="Nothing of the features is left, and nothing before them gets a gradient.",
)
def _(s: Subject) -> None:
    s.model.between = lambda x: x * 0


@fault(
    "the class token is read before the blocks",
    vit,
    ("", "norm", "head", "blocks*"),
    ("same", "equal", "all samples", "every sample", "not used", "reach"),
    why="The token has not yet seen an image: all samples give the same, and no block is used.",
)
def _(s: Subject) -> None:
    s.model.pool = lambda x: s.model.token.expand(len(x), -1, -1)[:, 0]


@fault(
    "points pooled over the batch",
    pointnet,
    ("", "head", "head.0"),
    ("batch", "sample"),
    why="Each sample's features are the largest of the whole batch: all are the same.",
)
def _(s: Subject) -> None:
    s.model.pool = lambda x: x.amax((0, 1)).expand(len(x), -1)


@fault(
    "attention over the batch",
    attentive,
    ("softmax", ""),
    ("batch", "dim"),
    why="Samples compete with each other for attention, in place of places in one sample.",
)
def _(s: Subject) -> None:
    s.model.dim = 0


@fault(
    "noise predicted by a net that drops its input",
    diffusion,
    ("conv1",),
    ("constant", "same", "equal", "zero", "drop"),
    why="The net sees the time alone, and predicts the same for every image.",
)
def _(s: Subject) -> None:
    nn.init.normal_(s.model.out.weight, std=0.1)
    conv = s.model.conv1.forward
    s.model.conv1.forward = lambda x: conv(x * 0)


@fault(
    "dropout of everything",
    mixer,
    ("dropout", "head", ""),
    ("drop", "zero"),
    why="Nothing gets past it: the output is the same for all samples.",
)
def _(s: Subject) -> None:
    s.model.dropout.p = 1.0


@fault(
    "features scaled by a condition of zero",
    modulated,
    ("condition", "", "head", "head.0"),
    ("zero", "same", "constant"),
    why="Times zero nothing of the features is left, and the condition alone cannot bring it back.",
)
def _(s: Subject) -> None:
    s.model.factor = same
    nn.init.zeros_(s.model.condition.weight)
    nn.init.zeros_(s.model.condition.bias)


@fault(
    "mean over the padding instead of the words",
    classified,
    ("", "norm", "head"),
    ("same", "equal", "zero", "constant", "all samples", "every sample"),
    why="Padding is the same in every sample, and the words are left out.",
)
def _(s: Subject) -> None:
    s.model = Classified(depth=0)
    s.model.counted = lambda ids: ids == 0


@fault(
    "twelve blocks whose residuals were left out",
    classified,
    ("blocks*", "norm", ""),
    ("residual", "same", "equal", "vanish", "shrink", "small", "decay"),
    why="Without their residuals the signal and its gradient fade from block to block.",
)
def _(s: Subject) -> None:
    s.model = Classified(depth=12)
    for block in s.model.blocks:
        block.join = lambda x, branch: branch


@fault(
    "ReLU of a log_softmax",
    text_cnn,
    ("convs*", "relu*", "log_softmax*", ""),
    ("dead", "zero", "negative"),
    why="Logarithms of probabilities are negative: a ReLU gives zeros throughout.",
)
def _(s: Subject) -> None:
    s.model.activation = lambda x: F.relu(F.log_softmax(x, 1))


@fault(
    "averaged over neighbours until all nodes are equal",
    sgc,
    ("", "head", "stem", "relu"),
    ("same", "equal", "all samples", "every sample", "collapse"),
    why="Averages over neighbours taken many times make all nodes equal.",
)
def _(s: Subject) -> None:
    s.model.steps = 300
    n = len(s.inputs[0])
    ring = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
    s.inputs = (s.inputs[0], torch.cat([s.inputs[1], ring], 1))


@fault(
    "advantage less the mean of a single action",
    dueling,
    ("advantage", ""),
    ("zero", "constant", "single", "one", "cancel"),
    why="One action less its own mean is zero: the advantage has no influence and no gradient.",
)
def _(s: Subject) -> None:
    s.model.advantage = nn.Linear(64, 1)
    action, returns, advantage = s.target
    s.target = (torch.zeros_like(action), returns, advantage)


@fault(
    "only the last skip is read",
    deep_wavenet,
    "skip.*",
    ("depend", "not used"),
    why="The other skips are computed and nothing reads them, so that they never learn.",
)
def _(s: Subject) -> None:
    s.model.skips = lambda all_: all_[-1]


@fault(
    "agreement with the class computed and not added",
    class_critic,
    "classes",
    UNREAD,
    why="The embedding of the classes is computed and not read: the critic ignores the class.",
)
def _(s: Subject) -> None:
    s.model.join = lambda score, agreement: score


@fault(
    "predictor reads the teacher in place of the student",
    contextual_targets,
    ("blocks.1*", "blocks.1", "blocks", "embed"),
    UNREAD,
    why="The student is computed and nothing reads it, so that it never learns.",
)
def _(s: Subject) -> None:
    s.model.read = lambda state, target: target


@fault(
    "a factor that is not multiplied with",
    ia3,
    "blocks.1.mlp.0",
    (*UNREAD, "gradient"),
    why="A factor that nothing multiplies with has no influence and never learns.",
)
def _(s: Subject) -> None:
    s.model.blocks[1].mlp[0].join = lambda made, scale: made


@fault(
    "output of the net at the side dropped",
    ladder,
    ("up", "sides*", ""),
    UNREAD,
    why="The side net runs and nothing reads it, so that it never learns.",
)
def _(s: Subject) -> None:
    s.model.join = lambda x, side: x


@fault(
    "routed experts computed and not added",
    shared_expert,
    ("experts.router", "experts.experts*", "experts"),
    UNREAD,
    why="Experts run and nothing reads them, so that they never learn.",
)
def _(s: Subject) -> None:
    s.model.experts.join = lambda shared, routed: shared


@fault(
    "both tasks read the gate of the first",
    gate_per_task,
    "gates.1",
    (*UNREAD, "called", "not run"),
    why="The second task's gate is never asked and never learns.",
)
def _(s: Subject) -> None:
    s.model.of_task = lambda task: 0


@fault(
    "the cache of an earlier call read in place of fresh keys",
    cached_keys,
    ("key", "value"),
    (*UNREAD, *CUT_OR_COMPARED),
    why="What this call computes is not read: its layers never learn.",
)
def _(s: Subject) -> None:
    earlier = [torch.randn(16, 32) for _ in range(12)]
    s.model.extend = lambda cache, new: earlier


@fault(
    "mean of the memory read in place of the context",
    translator,
    ("key", "query", "score"),
    UNREAD,
    why="Attention is computed and nothing reads it, so that it never learns.",
)
def _(s: Subject) -> None:
    s.model.context = lambda context, memory: memory.mean(1)


@fault(
    "messages computed and not gathered",
    messages,
    ("message*", ""),
    UNREAD,
    why="Messages are computed and nothing reads them: no node hears of another.",
)
def _(s: Subject) -> None:
    s.model.gather = lambda sent, sink, size: torch.zeros(size, 32)


@fault(
    "every kind of edge takes the first matrix",
    relations,
    ("relations.1", "relations.2"),
    (*UNREAD, "called", "not run"),
    why="The other matrices are never called: kinds of edges cannot be told apart.",
)
def _(s: Subject) -> None:
    s.model.of_kind = lambda index: 0
