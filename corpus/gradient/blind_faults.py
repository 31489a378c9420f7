"""Faults of the gradient, written before the checks that judge them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from corpus.cards import Shelf
from corpus.models.written_out import (
    actor_critic,
    audio_visual,
    code_autoencoder,
    detector,
    dynamics,
    gan,
    hyper_net,
    incremental_decoder,
    mobilenet,
    pixel_vae,
    point_set,
    row_reader,
    simsiam,
    sparse_classifier,
    state_space,
    story_memory,
    straightened,
    summarizer,
    translator,
    twin_retriever,
    wire,
)
from corpus.subject import Subject
from corpus.words import DETACHED, UNUSED

SHELF = Shelf("gradient", "blind")
fault = SHELF.fault

# ---- an encoder and a decoder --------------------------------------------------------------------


@fault(
    "memory taken by .data",
    translator,
    ("enc_*", "source_embed"),
    DETACHED,
    why="The encoder gets no gradient and stays as it was drawn.",
)
def _(s: Subject) -> None:
    def encode(self: Any, source: Tensor) -> Tensor:
        x = self.source_embed(source) + self.source_place
        return self.enc_norm(self.enc_2(self.enc_1(x))).data

    wire(s.model, encode)


# ---- a decoder with caches -----------------------------------------------------------------------


@fault(
    "keys and values kept detached",
    incremental_decoder,
    ("steps", "steps.?", "steps.?.to_k", "steps.?.to_v"),
    DETACHED,
    why="What is cached passes no gradient: projections of keys and values never learn.",
)
def _(s: Subject) -> None:
    def remember(self: Any, cache: dict[str, Tensor], name: str, new: Tensor) -> Tensor:
        new = new.detach()
        cache[name] = torch.cat([cache[name], new], 1) if name in cache else new
        return cache[name]

    for layer in s.model.steps:
        wire(layer, remember)


@fault(
    "norm of a detached copy in one layer",
    incremental_decoder,
    ("steps.1*",),
    DETACHED,
    why="The branch gets no gradient from what lies before its norm.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        seen = self.pre(x.detach())
        keys = self.remember(cache, "k", self.to_k(seen))
        values = self.remember(cache, "v", self.to_v(seen))
        x = x + self.to_out(F.scaled_dot_product_attention(self.to_q(seen), keys, values))
        return x + self.mlp(self.mlp_norm(x))

    wire(s.model.steps[1], forward)


# ---- transformers from the library ---------------------------------------------------------------


@fault(
    "encoder called without gradients",
    summarizer,
    ("t5.encoder*", "t5"),
    DETACHED,
    why="The encoder gets no gradient and stays as it was.",
)
def _(s: Subject) -> None:
    def forward(self: Any, source: Tensor, ids: Tensor) -> Tensor:
        with torch.no_grad():
            memory = self.t5.encoder(input_ids=source).last_hidden_state
        made = self.t5.decoder(input_ids=ids, encoder_hidden_states=memory, use_cache=False)
        return self.project(made.last_hidden_state)

    wire(s.model, forward)


# ---- convolutional nets --------------------------------------------------------------------------


@fault(
    "gate of one block detached",
    mobilenet,
    ("features.1", "features.1.se*"),
    DETACHED,
    why="What computes the gate gets no gradient and never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate = self.excite(F.silu(self.squeeze(x.mean((2, 3))))).sigmoid()
        return x * gate.detach()[:, :, None, None]

    wire(s.model.features[1].se, forward)


@fault(
    "reentrant checkpoint around the first layer",
    mobilenet,
    ("first*",),
    ("checkpoint", "reentrant", "no_grad", "detach", "require"),
    why="A reentrant checkpoint passes nothing where no input requires a gradient.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=True)
        return self.last(self.features(x).mean((2, 3)))

    wire(s.model, forward)


@fault(
    "way down from the coarse level detached",
    detector,
    ("lateral.p3", "lateral.p4", "c4*", "smooth.p2", "smooth.p3"),
    DETACHED,
    why="Finer levels teach the coarse ones nothing.",
)
def _(s: Subject) -> None:
    def pyramid(self: Any, x: Tensor) -> list[Tensor]:
        c2 = self.c2(x)
        c3 = self.c3(c2)
        c4 = self.c4(c3)
        p4 = self.lateral["p4"](c4)
        p3 = self.lateral["p3"](c3) + F.interpolate(p4.detach(), scale_factor=2)
        p2 = self.lateral["p2"](c2) + F.interpolate(p3.detach(), scale_factor=2)
        return [self.smooth["p2"](p2), self.smooth["p3"](p3), self.smooth["p4"](p4)]

    wire(s.model, pyramid)


@fault(
    "transform rounded",
    straightened,
    ("theta", "locate*"),
    ("rounded", "rounding", "round(", "`round`", "differentiable", "piecewise", "step function"),
    why="A rounded value has a derivative of zero: what finds the transform never learns.",
)
def _(s: Subject) -> None:
    def straighten(self: Any, x: Tensor) -> Tensor:
        theta = self.theta(F.relu(self.locate(x.flatten(1)))).view(-1, 2, 3)
        theta = (theta * 8).round() / 8
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)

    wire(s.model, straighten)


@fault(
    "transform made anew from a list",
    straightened,
    ("theta", "locate*"),
    ("detach", "tolist", "tensor(", "python", "is cut", "constant"),
    why="Numbers in a list carry no graph: what finds the transform never learns.",
)
def _(s: Subject) -> None:
    def straighten(self: Any, x: Tensor) -> Tensor:
        theta = self.theta(F.relu(self.locate(x.flatten(1)))).view(-1, 2, 3)
        grid = F.affine_grid(torch.tensor(theta.tolist()), list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)

    wire(s.model, straighten)


# ---- nets that make something --------------------------------------------------------------------


@fault(
    "sample taken around mu.data",
    pixel_vae,
    ("to_mu", "recognise*"),
    DETACHED,
    why="What finds the mean gets no gradient through the sample.",
)
def _(s: Subject) -> None:
    def sample(self: Any, mu: Tensor, logvar: Tensor) -> Tensor:
        return mu.data + torch.exp(0.5 * logvar) * torch.randn_like(mu)

    wire(s.model, sample)


@fault(
    "codes without the straight-through gradient",
    code_autoencoder,
    ("quantizer*", "analysis*"),
    ("argmin", "straight", "differentiable", "index", "detach"),
    why="The choice of a code has no derivative, so that the encoder gets no gradient.",
)
def _(s: Subject) -> None:
    def forward(self: Any, z: Tensor) -> tuple[Tensor, Tensor]:
        nearest = torch.cdist(z, self.codebook.weight).argmin(1)
        code = self.codebook(nearest)
        commitment = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return code, commitment

    wire(s.model.quantizer, forward)


@fault(
    "loss of the codebook on a detached code",
    code_autoencoder,
    ("quantizer*",),
    DETACHED,
    why="The codebook's own loss passes it no gradient: codes stay as they were drawn.",
)
def _(s: Subject) -> None:
    def forward(self: Any, z: Tensor) -> tuple[Tensor, Tensor]:
        nearest = torch.cdist(z, self.codebook.weight).argmin(1)
        code = self.codebook(nearest).detach()
        commitment = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code)
        return z + (code - z).detach(), commitment

    wire(s.model.quantizer, forward)


@fault(
    "generator judged on a detached fake",
    gan,
    ("generator*",),
    DETACHED,
    why="The generator gets no gradient from its own step and never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, noise: Tensor, real: Tensor, labels: Tensor) -> dict[str, Tensor]:
        fake = self.make(noise, labels).detach()
        return {
            "real": self.judge(real, labels),
            "caught": self.judge(fake, labels),
            "fooled": self.fool(fake, labels),
        }

    wire(s.model, forward)


# ---- recurrent nets and series -------------------------------------------------------------------


@fault(
    "state detached at every step",
    row_reader,
    ("", "reset", "update", "propose"),
    ("detach", "is cut", "cuts"),
    why="The gradient ends at each step: what led to the state learns nothing.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), self.width)
        states = []
        for row in x.unbind(1):
            h = self.step(row, h.detach())
            states.append(h)
        return self.digit(self.summarise(torch.stack(states, 1)))

    wire(s.model, forward)


@fault(
    "step size of one scan detached",
    state_space,
    ("scan2*",),
    DETACHED,
    why="What computes the step size gets no gradient and never learns.",
)
def _(s: Subject) -> None:
    def scan(self: Any, u: Tensor) -> Tensor:
        delta = F.softplus(self.to_delta(u)).unsqueeze(-1).detach()
        decay = torch.exp(-delta * self.log_a.exp())
        drive = delta * self.to_b(u).unsqueeze(2) * u.unsqueeze(-1)
        state = torch.zeros_like(drive[:, 0])
        outputs = []
        for time in range(u.shape[1]):
            state = decay[:, time] * state + drive[:, time]
            outputs.append((state * self.to_c(u[:, time]).unsqueeze(1)).sum(-1))
        return torch.stack(outputs, 1) + self.feedthrough * u

    wire(s.model.scan2.ssm, scan)


@fault(
    "states through numpy to a solver",
    dynamics,
    ("derivative*",),
    ("detach", "numpy", "is cut", "cuts"),
    why="An array carries no graph: what computes the derivative never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, past: Tensor) -> Tensor:
        state, seen = self.initial(past), []
        for _ in range(6):
            slope = self.derivative(state).detach().numpy()
            state = state + 0.3 * torch.from_numpy(slope)
            seen.append(self.observe(state))
        return torch.cat(seen, 1)

    wire(s.model, forward)


# ---- graphs, sets, tables and recommendations ----------------------------------------------------


@fault(
    "points chosen by a threshold",
    point_set,
    ("score",),
    ("threshold", "differentiable", "compar", "boolean", "detach"),
    why="A comparison has no derivative: what scores the points never learns.",
)
def _(s: Subject) -> None:
    def weights(self: Any, points: Tensor) -> Tensor:
        return (self.score(points) > 0).float() / points.shape[1]

    wire(s.model, weights)


# ---- nets of several parts -----------------------------------------------------------------------


@fault(
    "loss of the value on a detached value",
    actor_critic,
    ("critic",),
    DETACHED,
    why="The critic's own loss passes it no gradient: it never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, seen: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
        hidden = self.torso(seen)
        policy = torch.distributions.Categorical(logits=self.actor(hidden))
        value = self.critic(hidden).squeeze(1).detach()
        policy_loss = -(policy.log_prob(actions) * (returns - value)).mean()
        value_loss = F.mse_loss(value, returns)
        return policy_loss + 0.5 * value_loss - 0.01 * policy.entropy().mean()

    wire(s.model, forward)


@fault(
    "experts weighted by a one-hot choice",
    sparse_classifier,
    ("sparse_b", "sparse_b.router"),
    ("one_hot", "one-hot", "differentiable", "argmax", "constant", "detach"),
    why="A one-hot choice has no derivative: the router never learns.",
)
def _(s: Subject) -> None:
    def route(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.router(x).softmax(-1)
        weights = F.one_hot(chances.argmax(-1), len(self.experts)).float()
        return weights, len(self.experts) * (weights.mean(0) * chances.detach().mean(0)).sum()

    wire(s.model.sparse_b, route)


@fault(
    "temperature read as a number",
    twin_retriever,
    ("", "log_scale"),
    (".item", "item()", "detach", "python", "number", *UNUSED),
    why="A number carries no graph: the temperature never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, anchor: Tensor, candidate: Tensor) -> Tensor:
        left = F.normalize(self.anchor_tower(anchor), dim=1)
        right = F.normalize(self.candidate_tower(candidate), dim=1)
        return left @ right.T * 2.718281828 ** self.log_scale.item()

    wire(s.model, forward)


@fault(
    "the wrong side detached",
    simsiam,
    ("predictor*",),
    DETACHED,
    why="The predictor gets no gradient, and nothing keeps the features from collapsing.",
)
def _(s: Subject) -> None:
    def distance(self: Any, predicted: Tensor, projected: Tensor) -> Tensor:
        return -F.cosine_similarity(predicted.detach(), projected).mean()

    wire(s.model, distance)


@fault(
    "memory read at the best match alone",
    story_memory,
    ("keys",),
    ("argmax", "differentiable", "index", "is cut"),
    why="An index has no derivative: the keys never learn.",
)
def _(s: Subject) -> None:
    def look(self: Any, query: Tensor, story: Tensor) -> Tensor:
        match = (self.keys(story).sum(2) * query[:, None]).sum(-1)
        return self.contents(story).sum(2)[torch.arange(len(story)), match.argmax(1)]

    wire(s.model, look)


@fault(
    "made weights wrapped as a parameter",
    hyper_net,
    ("make_weight", "context*"),
    ("detach", "nn.parameter", "wrap", "leaf", "is cut"),
    why="A new parameter is a leaf: what made the weights gets no gradient.",
)
def _(s: Subject) -> None:
    def made_layer(self: Any, x: Tensor, context: Tensor) -> Tensor:
        weight = nn.Parameter(self.make_weight(context).detach().view(-1, 16, 16))
        return torch.bmm(weight, x.unsqueeze(2)).squeeze(2) + self.make_bias(context)

    wire(s.model, made_layer)


class Binarize(torch.autograd.Function):
    """The sign, with a gradient that somebody meant to write later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)


@fault(
    "binary code with an empty backward",
    audio_visual,
    ("fuse",),
    ("binarize", "sign(", "backward", "differentiable"),
    why="A backward that gives nothing leaves everything before it without a gradient.",
)
def _(s: Subject) -> None:
    def forward(self: Any, audio: Tensor, video: Tensor) -> Tensor:
        heard, seen = self.senses["audio"](audio), self.senses["video"](video)
        code = Binarize.apply(self.fuse(torch.cat([heard, seen], 1)))
        return self.speak(code)

    wire(s.model, forward)
