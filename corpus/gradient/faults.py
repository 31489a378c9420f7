"""Faults of the gradient."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.fields import deepfm, mixture_of_softmaxes, neural_ode, sparse_words, t5
from corpus.models.gated import (
    both_players,
    deterministic_policy,
    dora,
    finite_levels,
    generalised,
    generalised_advantages,
    hard_attention,
    local_losses,
    matched_features,
    probed_trunk,
    residual_codes,
    scaled_gradient,
    soft_actor_critic,
)
from corpus.models.perception import (
    byol,
    equation,
    generator_step,
    keypoints,
    late_denoiser,
    quantised,
    slope,
    spiking,
    swin,
)
from corpus.models.rare import attentive, flow, hyper, vq
from corpus.models.routed import (
    cached_keys,
    chunked_weights,
    equilibrium,
    full_experts,
    inner_step,
    kernels_by_image,
    mixture_of_depths,
    pondering,
    truncated_gradients,
)
from corpus.models.small import (
    autoencoder,
    cnn,
    deep,
    graph,
    mlp,
    multitask,
    plain,
    regression,
    resnet,
    seq2seq,
)
from corpus.models.starts import pooled
from corpus.subject import Subject
from corpus.words import ANY, CUT, CUT_OR_COMPARED, CUT_OR_ITEM, CUT_OR_ONE_HOT, MODEL

SHELF = Shelf("gradient")
fault = SHELF.fault


@fault(
    "detach in mid-net",
    mlp,
    ("", "fc1", "relu"),
    CUT,
    "missing_gradients",
    why="Everything before the detached tensor gets no gradient and never learns.",
)
def _(s: Subject) -> None:
    s.model.between = Tensor.detach


@fault(
    "no_grad around the encoder",
    autoencoder,
    ("", "encoder", "encoder.*"),
    CUT,
    "missing_gradients",
    why="The encoder gets no gradient and stays as it was drawn.",
)
def _(s: Subject) -> None:
    s.model.encoder.forward = torch.no_grad()(s.model.encoder.forward)


@fault(
    ".data in a network's stem",
    resnet,
    ("", "stem", "bn", "relu"),
    CUT,
    "missing_gradients",
    why="The stem gets no gradient and stays as it was drawn.",
)
def _(s: Subject) -> None:
    s.model.between = lambda x: x.data


@fault(
    "argmax where a softmax was meant",
    seq2seq,
    ("encoder*", "embedding", "cross*", ""),
    CUT,
    "missing_gradients",
    why="An index has no derivative: what chose it gets no gradient.",
)
def _(s: Subject) -> None:
    s.model.remember = lambda memory, x: F.one_hot(memory.argmax(-1), 32).float()


@fault(
    "through NumPy and back",
    regression,
    ("", "fc1", "relu"),
    CUT,
    "missing_gradients",
    why="An array carries no graph: everything before it gets no gradient.",
)
def _(s: Subject) -> None:
    s.model.between = lambda x: torch.from_numpy(x.detach().numpy())


@fault(
    "rounding in mid-net",
    autoencoder,
    ("", "encoder", "encoder.*"),
    (*CUT, "zero", "round", "constant"),
    "missing_gradients",
    why="A rounded value has a derivative of zero: everything before it gets zeros.",
)
def _(s: Subject) -> None:
    s.model.between = torch.round


@fault(
    "comparison makes the features",
    graph,
    ("", "layers.*", "relu*"),
    (*CUT, "compar"),
    "missing_gradients",
    why="A comparison has no derivative: everything before it gets no gradient.",
)
def _(s: Subject) -> None:
    s.model.between = lambda x: (x > 0).float()


@fault(
    "nearest code without the straight-through gradient",
    autoencoder,
    ("", "encoder", "encoder.*"),
    CUT,
    "missing_gradients",
    why="The choice of a code has no derivative, so that the encoder gets no gradient.",
)
def _(s: Subject) -> None:
    codes = nn.Parameter(torch.randn(32, 8))
    s.model.codes = codes
    s.model.between = lambda x: codes[torch.cdist(x, codes).argmin(1)]


@fault(
    "autograd.Function whose backward returns zeros",
    cnn,
    ("", "conv1", "bn1", "relu1"),
    ("zero", "backward", *CUT),
    "missing_gradients",
    why="A gradient of zeros reaches all that lies before, which never learns.",
)
def _(s: Subject) -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 1.5 * x

        @staticmethod
        def backward(ctx, gradient):
            return torch.zeros_like(gradient)

    s.model.between = Scale.apply


@fault(
    "twenty sigmoid layers",
    deep,
    ANY,
    ("vanish", "sigmoid", "saturat", "shrink", "small"),
    why="A sigmoid's slope is at most a quarter: gradients vanish with depth.",
)
def _(s: Subject) -> None:
    s.model = plain(64, *[64] * 20, 10, activation=nn.Sigmoid)


@fault(
    "a task that does not reach the trunk",
    multitask,
    ("trunk*", "label", *MODEL),
    ("label", "reach", "detach", "no gradient", "task"),
    why="What the task has to teach never reaches the shared trunk.",
)
def _(s: Subject) -> None:
    s.model.to_label = Tensor.detach


@fault(
    "a coupling detaches what it computes",
    flow,
    "couplings.2*",
    CUT,
    why="The coupling's net gets no gradient and stays as it was drawn.",
)
def _(s: Subject) -> None:
    net = s.model.couplings[2].net
    nn.init.normal_(net[-1].weight, std=0.1)
    inner = net.forward
    net.forward = lambda x: inner(x).detach()


@fault(
    "context of attention detached",
    attentive,
    ("encoder", "score*", "softmax"),
    CUT,
    why="The encoder learns nothing of what attention reads.",
)
def _(s: Subject) -> None:
    s.model.context = lambda context: context.detach()


@fault(
    "made weights copied through .data",
    hyper,
    "make*",
    CUT,
    why="A copy by .data carries no graph: the net that makes the weights never learns.",
)
def _(s: Subject) -> None:
    s.model.weights = lambda w: w.data


@fault(
    "codes without a straight-through gradient",
    vq,
    "encoder*",
    CUT,
    why="The choice of a code has no derivative, so that the encoder gets no gradient.",
)
def _(s: Subject) -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        model = s.model
        z = model.encoder(x)
        code = model.codes(torch.cdist(z, model.codes.weight).argmin(1))
        return model.decoder(code), z, code

    s.model.forward = forward


@fault(
    "decoder reads a detached memory",
    t5,
    ("encoder*", "norm", ""),
    CUT_OR_ONE_HOT,
    why="The encoder gets no gradient and stays as it was drawn.",
)
def _(s: Subject) -> None:
    s.model.remember = Tensor.detach


@fault(
    "prior of the mixture copied through a list of floats",
    mixture_of_softmaxes,
    ("prior", "softmax", ""),
    (*CUT_OR_ONE_HOT, "item", "copied"),
    why="Numbers in a list carry no graph: what made them gets no gradient.",
)
def _(s: Subject) -> None:
    s.model.mixed = lambda prior: torch.tensor(prior.tolist())


@fault(
    "experts weighted equally, by a comparison",
    sparse_words,
    "moe*",
    CUT_OR_ONE_HOT,
    why="A comparison has no derivative: the router never learns.",
)
def _(s: Subject) -> None:
    s.model.moe.weigh = lambda best: (best > -math.inf).float() / 2


@fault(
    "factors looked up in weight.data",
    deepfm,
    ("factors", ""),
    CUT_OR_ONE_HOT,
    why="Looked up in .data, the table gets no gradient and never learns.",
)
def _(s: Subject) -> None:
    s.model.look = lambda table, ids: table.weight.data[ids]


@fault(
    "state detached after each step of the solver",
    neural_ode,
    ("stem", "field*", ""),
    CUT_OR_ONE_HOT,
    why="The gradient ends at the last step: what led there learns nothing.",
)
def _(s: Subject) -> None:
    s.model.carry = Tensor.detach


@fault(
    "offsets of a window's bias looked up in .data",
    swin,
    ("blocks.*attention", "blocks.*"),
    CUT_OR_ITEM,
    why="Looked up in .data, the table gets no gradient and never learns.",
)
def _(s: Subject) -> None:
    for block in s.model.blocks:
        block.attention.look_up = lambda table, index: table.data[index]


@fault(
    "made images detached in the generator's step",
    generator_step,
    ("generator*",),
    CUT_OR_ITEM,
    why="The generator gets no gradient from its own step and never learns.",
)
def _(s: Subject) -> None:
    s.model.between = lambda images: images.detach()


@fault(
    "time embedded under no_grad",
    late_denoiser,
    "time*",
    CUT_OR_ITEM,
    why="The embedding of the time gets no gradient and never learns.",
)
def _(s: Subject) -> None:
    net = s.model.time
    inner = net.forward
    net.forward = torch.no_grad()(inner)


@fault(
    "a derivative without create_graph",
    equation,
    ("", "loss", "net*"),
    (*CUT_OR_ITEM, "gradient"),
    why="The derivative is no part of the graph: the loss on it teaches nothing.",
)
def _(s: Subject) -> None:
    s.model.slope = lambda u, x: slope(u, x, create_graph=False)


@fault(
    "no_grad around the online encoder",
    byol,
    "online*",
    CUT_OR_ITEM,
    why="The online encoder gets no gradient; the target follows it to nowhere.",
)
def _(s: Subject) -> None:
    encoder = s.model.online
    encoder.forward = torch.no_grad()(encoder.forward)


@fault(
    "places of keypoints by argmax",
    keypoints,
    ("heat", "trunk*", ""),
    CUT_OR_ITEM,
    why="An index has no derivative: the heatmaps get no gradient.",
)
def _(s: Subject) -> None:
    def hard(heat: Tensor) -> Tensor:
        best = heat.flatten(2).argmax(-1)
        return torch.stack([best // 16, best % 16], -1) / 15

    s.model.to_points = hard


@fault(
    "weights rounded without a straight-through gradient",
    quantised,
    ("conv*", ""),
    (*CUT_OR_ITEM, "round"),
    why="A rounded weight has a derivative of zero and never moves.",
)
def _(s: Subject) -> None:
    s.model.round = torch.round


@fault(
    "spikes by comparison",
    spiking,
    ("fc1", "fc2", ""),
    (*CUT_OR_ITEM, "compar"),
    why="A comparison has no derivative: everything before a spike gets no gradient.",
)
def _(s: Subject) -> None:
    s.model.spike = lambda v: (v > 0).float()


@fault(
    "keys of the last block rounded",
    pooled,
    "blocks.2.attention.pool_k",
    ("round",),
    why="A rounded value has a derivative of zero: what made the keys never learns.",
)
def _(s: Subject) -> None:
    s.model.blocks[2].attention.round = torch.round


@fault(
    "codes detached on both sides of their error",
    residual_codes,
    "tables.*",
    CUT_OR_COMPARED,
    why="With both sides detached neither codes nor encoder get a gradient of the error.",
)
def _(s: Subject) -> None:
    s.model.learnt = Tensor.detach


@fault(
    "levels rounded, the straight-through gradient forgotten",
    finite_levels,
    ("encoder*", "tanh"),
    (*CUT_OR_COMPARED, "round"),
    why="A rounded value has a derivative of zero: the encoder never learns.",
)
def _(s: Subject) -> None:
    s.model.rounded = torch.round


@fault(
    "image detached in the loss of the generator, too",
    both_players,
    "generator*",
    CUT_OR_COMPARED,
    why="The generator gets no gradient from its own loss and never learns.",
)
def _(s: Subject) -> None:
    s.model.judged = Tensor.detach


@fault(
    "features of what was made detached like those of what is real",
    matched_features,
    ("generator*", "", "loss"),
    CUT_OR_COMPARED,
    why="The loss compares two constants: the generator learns nothing of it.",
)
def _(s: Subject) -> None:
    s.model.matched = Tensor.detach


@fault(
    "critic trained on its detached value",
    generalised_advantages,
    "critic*",
    CUT_OR_COMPARED,
    why="The critic's own loss passes it no gradient: it never learns.",
)
def _(s: Subject) -> None:
    s.loss = lambda output, target: generalised(output, target, Tensor.detach)


@fault(
    "temperature detached in its own loss",
    soft_actor_critic,
    "",
    (*CUT_OR_COMPARED, "gradient"),
    why="The loss of the temperature passes it no gradient: it stays as it was set.",
)
def _(s: Subject) -> None:
    s.model.temperature = lambda log_alpha: log_alpha.exp().detach()


@fault(
    "action detached before the critic that leads its actor",
    deterministic_policy,
    "actor*",
    CUT_OR_COMPARED,
    why="The actor learns through the critic alone, and is cut off from it.",
)
def _(s: Subject) -> None:
    s.model.shown = Tensor.detach


@fault(
    "one block detached before its own head, too",
    local_losses,
    "blocks.1*",
    CUT_OR_COMPARED,
    why="The block learns from its own head alone, and is cut off from it.",
)
def _(s: Subject) -> None:
    s.model.shown[1] = Tensor.detach


@fault(
    "trunk detached one line before the probe",
    probed_trunk,
    "trunk*",
    CUT_OR_COMPARED,
    why="Cut before the trunk's own loss, not before the probe alone, the trunk never learns.",
)
def _(s: Subject) -> None:
    s.model.between = Tensor.detach


@fault(
    "hard attention without the gradient of the soft one",
    hard_attention,
    ("key", "softmax", ""),
    CUT_OR_COMPARED,
    why="The hard choice has no derivative: the scores never learn.",
)
def _(s: Subject) -> None:
    s.model.straight = lambda hard, soft: hard


@fault(
    "both parts of a scaled gradient detached",
    scaled_gradient,
    ("embedding", "position"),
    CUT_OR_COMPARED,
    why="The two parts together have to pass a share of the gradient; detached both, none.",
)
def _(s: Subject) -> None:
    s.model.between = lambda x: 0.1 * x.detach() + 0.9 * x.detach()


@fault(
    "direction detached, not its length alone",
    dora,
    "blocks.*.attention.[qv]",
    CUT_OR_COMPARED,
    why="With the direction detached nothing but the length learns.",
)
def _(s: Subject) -> None:
    for block in s.model.blocks:
        for layer in (block.attention.q, block.attention.v):
            layer.direction = lambda w: (w / w.norm(dim=1, keepdim=True)).detach()


@fault(
    "scores of a router detached before the softmax",
    full_experts,
    "experts.router",
    CUT_OR_COMPARED,
    why="The router decides all and gets no gradient: it stays as it was drawn.",
)
def _(s: Subject) -> None:
    s.model.experts.decide = Tensor.detach


@fault(
    "router chooses the tokens and does not weigh them",
    mixture_of_depths,
    "experts.router",
    (*CUT_OR_COMPARED, "topk", "index"),
    why="An index has no derivative: without its weight the router never learns.",
)
def _(s: Subject) -> None:
    s.model.experts.weigh = torch.ones_like


@fault(
    "keys and values detached as they are cached",
    cached_keys,
    ("key", "value"),
    CUT_OR_COMPARED,
    why="Keys and values of this call get no gradient, and their layers never learn.",
)
def _(s: Subject) -> None:
    s.model.keep = Tensor.detach


@fault(
    "made weights of every layer detached",
    chunked_weights,
    ("make*", "chunks"),
    CUT_OR_COMPARED,
    why="The net that makes the weights gets no gradient and never learns.",
)
def _(s: Subject) -> None:
    s.model.made = Tensor.detach


@fault(
    "kernels taken by the best score instead of mixed",
    kernels_by_image,
    "route",
    CUT_OR_COMPARED,
    why="An index has no derivative: what chooses the kernel never learns.",
)
def _(s: Subject) -> None:
    s.model.weigh = lambda scores: F.one_hot(scores.argmax(1), 4).float()


@fault(
    "weights detached after the inner step",
    inner_step,
    ("net*", "", "loss"),
    CUT_OR_COMPARED,
    why="Outer gradients end at the copy: the start that is to be learnt gets none.",
)
def _(s: Subject) -> None:
    s.model.moved = Tensor.detach


@fault(
    "state detached at each step",
    truncated_gradients,
    ("cell", "inward", ""),
    CUT_OR_COMPARED,
    why="The gradient ends at the last step: what led there learns nothing.",
)
def _(s: Subject) -> None:
    s.model.size = 1


@fault(
    "the step with gradients after the solver forgotten",
    equilibrium,
    ("field", "inward", "tanh*", ""),
    CUT_OR_COMPARED,
    why="The solver runs without gradients, and without the last step nothing before it learns.",
)
def _(s: Subject) -> None:
    s.model.last = lambda state, seen: state


@fault(
    "probability of halting made hard by a comparison",
    pondering,
    ("halt", "sigmoid*"),
    CUT_OR_COMPARED,
    why="A comparison has no derivative: what decides to halt never learns.",
)
def _(s: Subject) -> None:
    s.model.weigh = lambda share: (share > 0.5).float()
