"""Faults of numerics."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.designs import Coupling
from corpus.models.fields import (
    gat,
    gin,
    left_padded,
    llama,
    mamba,
    poisson,
    scattered,
    seen,
    sentences,
    set_transformer,
    spread,
    squashed,
    t5,
)
from corpus.models.perception import (
    HandNorm,
    conv_vae,
    detector,
    focal,
    glow,
    half_precision,
    optical_flow,
    overlap,
    simclr,
    sound_cnn,
)
from corpus.models.rare import attentive, capsules, dynamics, flow, mixer, mixture, pair, scan
from corpus.models.small import (
    GCN,
    GPT,
    Attention,
    autoencoder,
    bert,
    cnn,
    gpt,
    graph,
    lstm,
    mlp,
    regression,
    same,
    sequential,
    unet,
    vae,
    vit,
)
from corpus.subject import Subject
from corpus.words import ANY, MODEL, NONFINITE, NONFINITE_OR_ROOT

SHELF = Shelf("numerics")
fault = SHELF.fault


@fault(
    "Hardtanh fed far outside its range",
    regression,
    ("fc1", "hardtanh"),
    ("saturat", "scale", "large", "range"),
    why="Beyond its range the function is constant and passes no gradient.",
)
def _(s: Subject) -> None:
    s.model.activation = F.hardtanh
    s.model.fc1.weight.data *= 1e4


@fault(
    "attention scores multiplied by sqrt(d)",
    gpt,
    ("blocks.*.attention*",),
    ("saturat", "one-hot", "sqrt", "scale", "collaps"),
    why="The softmax is one-hot from the start and passes no gradient to queries and keys.",
)
def _(s: Subject) -> None:
    for block in s.model.blocks:
        block.attention.scale = 32**0.5
        for layer in (block.attention.q, block.attention.k):
            nn.init.xavier_uniform_(layer.weight)
            layer.weight.data *= 3


@fault(
    "attention without 1/sqrt(d), heads of 256",
    vit,
    ("blocks.0.attention*",),
    ("saturat", "one-hot", "sqrt", "scale", "collaps"),
    why="The softmax is one-hot from the start and passes no gradient to queries and keys.",
)
def _(s: Subject) -> None:
    s.model.patches = nn.Conv2d(1, 256, 2, stride=2)
    s.model.token = nn.Parameter(torch.randn(1, 1, 256))
    s.model.position = nn.Parameter(torch.randn(1, 17, 256))
    s.model.blocks[0] = block = type(s.model.blocks[1])(256, heads=1)
    s.model.blocks[1], s.model.norm = nn.Linear(256, 32), nn.LayerNorm(32)
    block.attention.scale = 1.0
    for layer in (block.attention.q, block.attention.k):
        nn.init.orthogonal_(layer.weight, gain=1.5)


@fault(
    "log of a ReLU",
    mlp,
    ("", "fc2", "relu", "log*"),
    NONFINITE,
    "finite",
    why="The logarithm of zero is minus infinity.",
)
def _(s: Subject) -> None:
    s.model.between = torch.log


@fault(
    "square root of a ReLU: infinite gradient at 0",
    cnn,
    ("", "relu1", "bn1", "conv1"),
    NONFINITE,
    "finite",
    why="The root's derivative at zero is infinite: times zero it is NaN.",
)
def _(s: Subject) -> None:
    s.model.between = torch.sqrt


@fault(
    "torch.where hides a log from forward only",
    regression,
    ("", "relu", "fc1"),
    (*NONFINITE, "where"),
    "finite",
    why="Backward through the branch not taken multiplies an infinite derivative by zero: NaN.",
)
def _(s: Subject) -> None:
    s.model.between = lambda x: torch.where(x > 0, torch.log(x), 0.0)


@fault(
    "standardised by the std of a constant",
    sequential,
    (*MODEL, "0"),
    NONFINITE,
    ("finite", "inputs"),
    why="A constant has a deviation of zero, and what is divided by it is NaN.",
)
def _(s: Subject) -> None:
    s.inputs = s.inputs.clone()
    s.inputs[:, 0] = 0.5
    s.inputs = (s.inputs - s.inputs.mean(0)) / s.inputs.std(0)


@fault(
    "padding mask inverted: rows of nothing but -inf",
    bert,
    ("attention*",),
    (*NONFINITE, "mask"),
    why="A softmax over nothing but -inf is 0 / 0: NaN.",
)
def _(s: Subject) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(18, 32), nn.Linear(32, 10)
            self.attention = Attention(32, 4)

        def forward(self, ids: Tensor) -> Tensor:
            x, kept = self.embedding(ids), (ids != 0)[:, None, None]
            self.attention.mask = lambda scores: scores.masked_fill(kept, -math.inf)
            return self.head((x + self.attention(x)).mean(1))

    ids = s.inputs["input_ids"].clone()
    ids[::2, 20:] = 0
    s.model, s.inputs, s.target, s.loss = Masked(), ids, s.inputs["labels"], F.cross_entropy


@fault(
    "softmax by hand overflows",
    cnn,
    (*MODEL, "head"),
    (*NONFINITE, "large"),
    ("finite", "headroom", "loss", "initial_weights"),
    why="The exponential of a large logit is infinite, and infinity by infinity is NaN.",
)
def _(s: Subject) -> None:
    s.model.head.weight.data *= 2000
    s.model.finish = lambda x: (x.exp() / x.exp().sum(1, keepdim=True)).log()
    s.loss = F.nll_loss


@fault(
    "float16 overflows in a sum",
    lstm,
    ("", "head", "lstm"),
    (*NONFINITE, "float16", "range"),
    ("finite", "headroom"),
    why="A sum above 65,504 is infinite in float16.",
)
def _(s: Subject) -> None:
    s.model.half()
    s.model.pool = lambda x: (x * 2e4).sum(1) / 2e4 / 32
    nn.init.constant_(s.model.lstm.bias_ih_l0, 3.0)


@fault(
    "float16 overflows in a layer",
    mlp,
    ("fc1", "fc2", "relu"),
    (*NONFINITE, "float16", "range", "large"),
    ("finite", "headroom", "initial_weights"),
    why="A value above 65,504 is infinite in float16.",
)
def _(s: Subject) -> None:
    s.model.half()
    s.inputs = s.inputs.half()
    s.model.fc1.weight.data *= 3e3
    s.model.fc2.weight.data *= 3e3


@fault(
    "float16 gradients underflow",
    autoencoder,
    ANY,
    ("underflow", "float16", "subnormal", "scal", "range"),
    why="Gradients below 6e-8 are zero in float16, and nothing learns.",
)
def _(s: Subject) -> None:
    s.model.half()
    s.inputs = s.target = s.inputs.half()
    s.loss = lambda output, target: F.mse_loss(output, target) * 1e-5


@fault(
    "a NaN in a convolution's weight",
    unet,
    ("middle.0", "middle"),
    ("nan", "parameter", "weight", "checkpoint"),
    "finite",
    why="One NaN makes NaN of all that is computed from it.",
)
def _(s: Subject) -> None:
    s.model.middle[0].weight.data[3, 2, 1, 1] = math.nan


@fault(
    "variance as a difference of squares",
    regression,
    ("", "fc1", "fc2", "relu"),
    NONFINITE,
    "finite",
    why="The difference of two nearly equal squares may fall below zero, whose root is NaN.",
)
def _(s: Subject) -> None:
    def standardise(x: Tensor) -> Tensor:
        x = x + 3e4
        return (x - x.mean(1, keepdim=True)) / (
            (x**2).mean(1, keepdim=True) - x.mean(1, keepdim=True) ** 2
        ).sqrt()

    s.model.between = standardise


@fault(
    "exp of an unbounded log-variance",
    vae,
    ("", "log_variance", "decoder*"),
    (*NONFINITE, "large"),
    ("finite", "headroom", "activation_scale", "loss", "initial_weights"),
    why="The exponential of an unbounded number overflows.",
)
def _(s: Subject) -> None:
    s.model.log_variance.weight.data *= 5e3


@fault(
    "residual stream doubled in every block",
    gpt,
    ("blocks*", "norm", ""),
    ("residual", "grow", "double", "scale", "explod"),
    why="The stream doubles in every block, and what early blocks added is drowned.",
)
def _(s: Subject) -> None:
    s.model = GPT(depth=24)
    for block in s.model.blocks:
        block.join = lambda x, branch: 2 * x + branch


@fault(
    "graph convolutions sum over hundreds of neighbours",
    graph,
    ("layers.*", "relu*", "head", ""),
    ("grow", "explod", "scale", "large", "normali"),
    why="Sums grow with the number of neighbours at each layer.",
)
def _(s: Subject) -> None:
    s.model = GCN(depth=6)
    s.inputs, s.target = s.draw(256)
    s.inputs = s.inputs[0], (torch.rand(256, 256) < 0.5).float()


class Unbounded(Coupling):
    """A coupling whose logarithmic scale is not bounded."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x.chunk(2, 1)
        scale, shift = self.net(kept).chunk(2, 1)
        return torch.cat([moved * (200 * scale).exp() + shift, kept], 1), scale.sum(1)


@fault(
    "scales of a flow overflow",
    flow,
    ("couplings.1", "", "couplings.1.*"),
    NONFINITE,
    why="The exponential of an unbounded scale overflows.",
)
def _(s: Subject) -> None:
    s.model.couplings[1] = Unbounded(10)
    nn.init.normal_(s.model.couplings[1].net[-1].weight)


@fault(
    "attention scores 3000 times too large",
    attentive,
    ("softmax", "score*"),
    ("score", "large"),
    why="The softmax is one-hot from the start and passes no gradient to its scores.",
)
def _(s: Subject) -> None:
    s.model.scores = lambda scores: scores * 3000


@fault(
    "scores of attention masked everywhere",
    attentive,
    ("softmax", ""),
    (*NONFINITE, "mask"),
    why="A softmax over nothing but -inf is 0 / 0: NaN.",
)
def _(s: Subject) -> None:
    s.model.scores = lambda scores: scores.masked_fill(
        torch.arange(len(scores))[:, None, None] == 3, -math.inf
    )


@fault(
    "root of a distance of zero",
    pair,
    ("encoder*", ""),
    NONFINITE,
    why="The root's derivative at zero is infinite.",
)
def _(s: Subject) -> None:
    s.inputs = (s.inputs[0], s.inputs[0].clone())
    s.model.distance = lambda a, b: ((a - b) ** 2).sum(1).sqrt()


@fault(
    "a capsule of length zero, and no epsilon",
    capsules,
    ("", "primary"),
    NONFINITE,
    why="A vector of length zero divided by its length is NaN.",
)
def _(s: Subject) -> None:
    s.model.eps = 0.0
    s.model.mask = lambda x: x * (torch.arange(64) >= 8)


@fault(
    "token mixing of NaN from a checkpoint",
    mixer,
    "tokens.1*",
    NONFINITE,
    why="One NaN makes NaN of all that is computed from it.",
)
def _(s: Subject) -> None:
    s.model.tokens[1][2].weight.data[0, 3] = math.nan


@fault(
    "a state that grows instead of decaying",
    scan,
    ("", "outward"),
    ("grow", "large", "overflow", "magnif"),
    why="The state grows by a factor at each step, without bound.",
)
def _(s: Subject) -> None:
    s.model.sign = 1.0


@fault(
    "Euler steps of 20",
    dynamics,
    ("field", "", "head"),
    ("grow", "magnif", "large", "explod"),
    why="Steps beyond the stable length make the state grow with each.",
)
def _(s: Subject) -> None:
    s.model.step = 20.0


@fault(
    "logarithm of a spread that may be negative",
    mixture,
    MODEL,
    NONFINITE,
    why="The logarithm of a negative number is NaN.",
)
def _(s: Subject) -> None:
    def loss(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
        weight, mean, spread = output
        density = -0.5 * ((target - mean) / spread) ** 2 - spread.log()
        return -torch.logsumexp(weight + density, 1).mean()

    s.loss = loss


@fault(
    "left padding leaves rows with nothing to see",
    llama,
    "blocks.0.attention*",
    (*NONFINITE_OR_ROOT, "mask"),
    why="The first rows of the mask allow nothing: a softmax over nothing but -inf is NaN.",
)
def _(s: Subject) -> None:
    s.inputs, s.target = left_padded(16)
    s.model.allowed = seen


@fault(
    "feed-forward overflows in float16",
    t5,
    ("encoder.0*",),
    (*NONFINITE_OR_ROOT, "float16", "large", "range"),
    why="A value above 65,504 is infinite in float16.",
)
def _(s: Subject) -> None:
    s.model.half()
    s.model.encoder[0].wi.weight.data *= 100
    s.model.encoder[0].wo.weight.data *= 300


@fault(
    "state space with its sign lost",
    mamba,
    ("mixers.0*", "mixers.1*", "norms.1"),
    ("grow", "large", "overflow", "magnif", "explod", "inf"),
    why="The state grows at each step in place of decaying.",
)
def _(s: Subject) -> None:
    for each in s.model.mixers:
        each.sign = 1.0
        each.step.bias.data += 3.0


@fault(
    "spread of neighbours: root of a variance of zero",
    gin,
    ("", "layers*"),
    NONFINITE_OR_ROOT,
    why="The root's derivative at zero is infinite: a node of one neighbour has no spread.",
)
def _(s: Subject) -> None:
    def spread(x: Tensor, edges: Tensor) -> Tensor:
        count = torch.bincount(edges[1], minlength=len(x)).clamp(min=1)[:, None]
        mean = scattered(x[edges[0]], edges[1], len(x)) / count
        return (scattered((x[edges[0]] - mean[edges[1]]) ** 2, edges[1], len(x)) / count).sqrt()

    s.model.spread = spread


@fault(
    "softmax over neighbours by hand underflows: 0 / 0",
    gat,
    ("", "layers*"),
    NONFINITE_OR_ROOT,
    why="All exponentials round to zero, and 0 / 0 is NaN.",
)
def _(s: Subject) -> None:
    def weigh(scores: Tensor, sink: Tensor, n: int) -> Tensor:
        scores = (60 * scores - 200).exp()
        return scores / scattered(scores, sink, n)[sink]

    s.model.weigh = weigh


@fault(
    "scores of attention multiplied by the width",
    set_transformer,
    ("pool*",),
    ("score", "large", "one-hot", "scale", "saturat"),
    why="The softmax is one-hot from the start and passes no gradient to its scores.",
)
def _(s: Subject) -> None:
    s.model.pool.scale = 32.0 * 8


@fault(
    "logarithm of a rate that a ReLU sends to zero",
    poisson,
    (*MODEL, "relu", "net*"),
    NONFINITE_OR_ROOT,
    why="The logarithm of zero is minus infinity.",
)
def _(s: Subject) -> None:
    s.model.finish = F.relu
    s.loss = lambda rate, count: (rate - count * rate.log()).mean()


@fault(
    "variance that may be negative",
    spread,
    (*MODEL, "variance"),
    (*NONFINITE_OR_ROOT, "negative"),
    why="The logarithm of a negative variance is NaN.",
)
def _(s: Subject) -> None:
    s.model.positive = same


@fault(
    "log(1 - tanh^2) of actions at their bounds",
    squashed,
    (*MODEL, "tanh", "mean", "log*"),
    NONFINITE_OR_ROOT,
    why="At a bound of one the logarithm is of zero: minus infinity.",
)
def _(s: Subject) -> None:
    s.model.mean.weight.data *= 60
    s.model.correction = lambda raw, action: (1 - action.pow(2)).log()


@fault(
    "epsilon of 1e-8 that float16 rounds to zero",
    sentences,
    ("", "gru", "norm"),
    (*NONFINITE_OR_ROOT, "eps", "float16"),
    why="In float16 the epsilon is zero, and 0 / 0 is NaN.",
)
def _(s: Subject) -> None:
    s.model.half()
    nn.init.zeros_(s.model.gru.bias_ih_l0)
    nn.init.zeros_(s.model.gru.bias_hh_l0)
    ids = s.inputs[0].clone()
    ids[5] = 0
    s.inputs = (ids, s.inputs[1])
    s.model.direction = lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-8)
    s.target = s.target.half()


@fault(
    "overlap of boxes of no size, in a logarithm",
    detector,
    (*MODEL, "boxes*", "relu*"),
    NONFINITE,
    why="Boxes without area overlap by zero, whose logarithm is minus infinity.",
)
def _(s: Subject) -> None:
    s.model.to_sides = F.relu
    nn.init.constant_(s.model.boxes[-1].bias, -0.1)

    def loss(output: Any, target: Any) -> Tensor:
        inside, union = overlap(output[1], target[2])
        return focal(output, target) - (inside / union).log().mean()

    s.loss = loss


@fault(
    "raw logarithmic variance of a latent",
    conv_vae,
    ("log_variance", "", "decoder*", "exp*"),
    NONFINITE,
    why="The exponential of an unbounded number overflows.",
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.log_variance.bias, 200.0)


@fault(
    "logarithm of a determinant below zero",
    glow,
    ("steps*", ""),
    NONFINITE,
    why="The logarithm of a negative number is NaN.",
)
def _(s: Subject) -> None:
    for step in s.model.steps:
        step.volume = lambda mix: torch.det(mix).log()
    mix = s.model.steps[1].mix
    if torch.det(mix.data) > 0:
        mix.data[0] *= -1


@fault(
    "a vector of zeros divided by its norm",
    simclr,
    ("", "project*"),
    NONFINITE,
    why="A length of zero has no direction: 0 / 0 is NaN.",
)
def _(s: Subject) -> None:
    s.inputs[0][5] = 0.0
    s.model.unit = lambda x: x / x.norm(dim=1, keepdim=True)


@fault(
    "logarithm of silence",
    sound_cnn,
    ("", "conv1", "bn1"),
    NONFINITE,
    why="The logarithm of zero is minus infinity.",
)
def _(s: Subject) -> None:
    s.model.loudness = torch.log
    s.inputs[3, 200:] = 0.0


@fault(
    "moved frames' error as a root without epsilon",
    optical_flow,
    (*MODEL, "guess", "refine*"),
    NONFINITE,
    why="The root's derivative at zero is infinite, where a pixel fits exactly.",
)
def _(s: Subject) -> None:
    s.inputs = (s.inputs[0], s.inputs[0])
    s.target = torch.zeros_like(s.target)
    for conv in (s.model.guess, s.model.refine[-1]):
        nn.init.zeros_(conv.weight)
        nn.init.zeros_(conv.bias)
    s.loss = lambda flow, target: ((flow - target) ** 2).sum(1).sqrt().mean()


class Narrow(HandNorm):
    """The same, in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + 1e-6) * self.weight


@fault(
    "squares that overflow in float16",
    half_precision,
    ("1", "2", "3"),
    ("overflow", "zero", "inf", "float16", "large"),
    why="The square of 256 is above 65,504: infinite in float16.",
)
def _(s: Subject) -> None:
    s.model[1].weight.data *= 300
    s.model[2] = Narrow(64).half()


@fault(
    "gradients too small for float16",
    half_precision,
    ("", "1", "2", "4", "loss"),
    ("underflow", "subnormal", "float16", "small"),
    why="Gradients below 6e-8 are zero in float16, and nothing learns.",
)
def _(s: Subject) -> None:
    s.loss = lambda out, y: F.cross_entropy(out.float(), y) * 1e-5
