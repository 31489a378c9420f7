"""Where gradients end: cuts, values in vain, detached states, and what is detached by design."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.checks.parts import Net

CHECK = "missing_gradients"


def net(*sizes: int) -> nn.Sequential:
    """Return a plain network of several layers."""
    return nn.Sequential(
        *[m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())][:-1]
    )


class Attending(nn.Module):
    """A decoder's block that attends to what an encoder made."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(memory).transpose(1, 2) / 4
        return x + scores.softmax(-1) @ self.v(memory)


class Translator(nn.Module):
    """An encoder and a decoder with an embedding for both, which returns the memory, too."""

    def __init__(self, *, cuts: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.encoder = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16))
        self.blocks = nn.ModuleList(Attending() for _ in range(2))
        self.head, self.cuts = nn.Linear(16, 20), cuts

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.encoder(self.embed(ids))
        x = self.embed(ids.flip(1))
        read = memory.detach() if self.cuts else memory
        for block in self.blocks:
            x = block(x, read)
        return self.head(x), memory


SHIFT = torch.randn(16)


class Deaf(nn.Module):
    """A decoder that is given what an encoder made, and takes a constant of some place instead."""

    def __init__(self, constant: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.own, self.out, self.constant = nn.Linear(16, 16), nn.Linear(16, 16), constant
        self.kept, self.object = torch.randn(16), SimpleNamespace(kept=torch.randn(16))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.out(self.own(x) + self.constant(self))


class Chain(nn.Module):
    """Layers one after the other; those named are followed by a detach, or run without gradients.

    Args:
        detached: places of the layers whose output is detached.
        off: places of the layers that run under ``no_grad``.
    """

    def __init__(self, detached: tuple[int, ...] = (), off: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.detached, self.off = detached, off

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            with torch.set_grad_enabled(place not in self.off):
                x = layer(x).tanh()
            x = x.detach() if place in self.detached else x
        return x


class Quantised(nn.Module):
    """Codes of a table take the place of what an encoder made, with a gradient past them or not."""

    def __init__(self, *, straight: bool) -> None:
        super().__init__()
        self.encoder, self.decoder, self.straight = net(16, 16, 8), net(8, 16, 16), straight
        self.codes = nn.Parameter(torch.randn(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        made = self.encoder(x)
        code = self.codes[torch.cdist(made, self.codes).argmin(1)]
        fit = (code - made.detach()).square().mean()
        read = made + (code - made).detach() if self.straight else code
        return (self.decoder(read) - x).square().mean() + fit


class Critic(nn.Module):
    """An actor whose advantage is detached; the critic is fitted to the returns, or to nothing."""

    def __init__(self, *, fitted: bool) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = net(16, 16), nn.Linear(16, 4), nn.Linear(16, 1)
        self.fitted = fitted

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        returns, value = x.sum(1), self.critic(h).squeeze(1)
        advantage = (returns - value).detach()
        loss = -(self.actor(h).log_softmax(1)[:, 0] * advantage).mean()
        return loss + (returns - value).square().mean() if self.fitted else loss


class Gan(nn.Module):
    """Both steps of a GAN in one loss; the generator's own step may be detached by mistake."""

    def __init__(self, *, cuts: bool) -> None:
        super().__init__()
        self.stem, self.g, self.d, self.cuts = nn.Linear(16, 16), net(16, 16), net(16, 16, 1), cuts

    def forward(self, x: Tensor) -> Tensor:
        z = self.stem(x)
        fake = self.g(z)
        judged = self.d(x) - self.d(fake.detach())
        again = self.d(fake.detach() if self.cuts else fake)
        return F.softplus(judged).mean() + F.softplus(-again).mean() + z.square().mean()


class LookedUp(nn.Module):
    """Looks its factors up in a table that it never calls."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.bias, self.factors, self.read = nn.Embedding(20, 1), nn.Embedding(20, 8), read
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        looked_up = F.embedding(ids, self.read(self.factors.weight)).sum(1)
        return self.bias(ids).sum(1) + self.head(looked_up)


class NoGradient(torch.autograd.Function):
    """Doubles, and forgets the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class Times(torch.autograd.Function):
    """Multiplies by a number, as a solver is given an end of time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Tensor) -> Tensor:
        ctx.save_for_backward(x, by)
        return x * by

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, by = ctx.saved_tensors
        return gradient * by, (gradient * x).sum().reshape(1)


def timed(end: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a layer between two that a function of its own times by a parameter."""
    layers = {"fc": (16, 16), "head": (16, 4), "end": nn.Parameter(torch.ones(1))}
    return Net(lambda m, x: m.head(Times.apply(m.fc(x), end(m.end)).relu()), **layers)


class Row(nn.Module):
    """Three layers in a row; `wiring` says what each takes and what is returned."""

    def __init__(self, wiring: Callable[..., Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head, self.wiring = nn.Linear(16, 4), wiring

    def forward(self, x: Tensor) -> Any:
        return self.head(self.wiring(x, self.layers))


def chained(x: Tensor, layers: Any) -> Tensor:
    """Give each layer what the one before returned."""
    for layer in layers:
        x = layer(x).tanh()
    return x


def forgotten(x: Tensor, layers: Any) -> Tensor:
    """Give each layer the input."""
    for layer in layers:
        h = layer(x).tanh()
    return h


def one_short(x: Tensor, layers: Any) -> Tensor:
    """Keep what goes into each layer, and go on with the last of it."""
    kept = []
    for layer in layers:
        kept.append(x)
        x = layer(x).tanh()
    return kept[-1]


def overwritten(x: Tensor, layers: Any) -> Tensor:
    """Forget the second layer's result."""
    h = layers[0](x)
    h = layers[1](h)
    return layers[2](x if h is not None else h)


def listed(x: Tensor, layers: Any) -> Tensor:
    """Take the second layer's result to Python and back."""
    return layers[2](torch.tensor(layers[1](layers[0](x)).tolist()))


class Part(nn.Module):
    """Returns two values."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.pool = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.fc(x)
        return h, self.pool(h).tanh()


class Stacked(nn.Module):
    """Blocks of a residual and a skip, whose skips are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.head = nn.ModuleList(Part() for _ in range(3)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for part in self.parts:
            skip, change = part(x)
            x = x + change
            skips.append(skip)
        return self.head(sum(skips))


class Reading(nn.Module):
    """Reads one of two values, of a part or of a recurrent layer."""

    def __init__(self, part: nn.Module, read: int) -> None:
        super().__init__()
        self.part, self.head, self.read = part, nn.Linear(16, 4), read

    def forward(self, x: Tensor) -> Tensor:
        h = self.part(x)[self.read]
        return self.head(h)


class Stage(nn.Module):
    """Returns a forecast, and what it explains of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.backcast, self.forecast = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.backcast(h), self.forecast(h)


class Stages(nn.Module):
    """N-BEATS: each stage forecasts, and hands on the rest; `loop` runs them."""

    def __init__(self, loop: Callable[..., Tensor], number: int = 3) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage() for _ in range(number))
        self.head, self.loop = nn.Linear(16, 4), loop

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.loop(x, self.stages))


def last_rest_dropped(rest: Tensor, stages: Any) -> Tensor:
    """Add up the forecasts; nobody takes what the last stage leaves."""
    total = 0
    for stage in stages:
        backcast, forecast = stage(rest)
        total, rest = total + forecast, rest - backcast
    return total


def each_rest_dropped(rest: Tensor, stages: Any) -> Tensor:
    """Subtract each backcast, and forget the difference."""
    total = 0
    for stage in stages:
        backcast, forecast = stage(rest)
        torch.sub(rest, backcast)
        total = total + forecast
    return total


class Unrolled(nn.Module):
    """N-BEATS in one loop, that calls both layers of a stage in one line."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        names = ("body", "backcast", "forecast")
        self.stages = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(16, 16) for name in names}) for _ in range(3)
        )
        self.head, self.keeps = nn.Linear(16, 4), keeps

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for s in self.stages:
            h = s["body"](x).tanh()
            total, rest = total + s["forecast"](h), x - s["backcast"](h)
            x = rest if self.keeps else x
        return self.head(total)


class States(nn.Module):
    """Returns what goes into each of its blocks, and a summary of what comes out."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.embed, self.summary = net(16, width, 16), net(16, 64, 16)
        self.blocks = nn.ModuleList(net(16, 16, 16) for _ in range(blocks))

    def forward(self, x: Tensor) -> list[Tensor]:
        states = [self.embed(x)]
        for block in self.blocks:
            states.append(block(states[-1]).tanh())
        return [*states, self.summary(states[-1])]


class Steps(nn.Module):
    """A cell over the steps of a sequence; `hand_on` gives the state of one to the next."""

    def __init__(self, hand_on: Callable[[Tensor, int], Tensor], *, each: bool = False) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(16, 16), nn.Linear(16, 4)
        self.hand_on, self.each = hand_on, each

    def forward(self, x: Tensor) -> Tensor:
        h, outs = x.new_zeros(len(x), 16), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], self.hand_on(h, t))
            outs.append(self.head(h))
        return torch.stack(outs, 1) if self.each else outs[-1]


class ByHand(nn.Module):
    """The same of two linear layers."""

    def __init__(self, *, cuts: bool) -> None:
        super().__init__()
        self.given, self.state, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.cuts = cuts

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 16)
        for part in x.unbind(1):
            h = h.detach() if self.cuts else h
            h = (self.given(part) + self.state(h)).tanh()
        return self.head(h)


class Joined(nn.Module):
    """The same of one layer, which takes the state beside what another made of the step."""

    def __init__(self, *, cuts: bool) -> None:
        super().__init__()
        self.given, self.state, self.head = nn.Linear(16, 16), nn.Linear(32, 16), nn.Linear(16, 4)
        self.cuts = cuts

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 16)
        for part in x.unbind(1):
            h = h.detach() if self.cuts else h
            h = self.state(torch.cat([self.given(part), h], 1)).tanh()
        return self.head(h)


class Generating(nn.Module):
    """Feeds its detached prediction back, beside a state that has its gradient."""

    def __init__(self, feed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Linear(8, 16), nn.GRUCell(16, 16), nn.Linear(16, 8)
        self.feed = feed

    def forward(self, x: Tensor) -> Tensor:
        h, made, outs = x, x.new_zeros(len(x), 8), []
        for _ in range(5):
            h = self.cell(self.embed(self.feed(made)), h)
            made = self.head(h)
            outs.append(made)
        return torch.stack(outs, 1)


class Refining(nn.Module):
    """Boxes that each block moves from where the last left them, detached there."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(20, 16) for _ in range(4))
        self.box = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        box, boxes = x.new_zeros(len(x), 4), []
        for block in self.blocks:
            x = block(torch.cat([x, box], 1)).tanh()
            moved = box + self.box(x)
            boxes.append(moved)
            box = moved.detach()
        return torch.stack(boxes, 1)


class Imagining(nn.Module):
    """A policy that sees a detached state, and acts on a model of the world that learns by it."""

    def __init__(self) -> None:
        super().__init__()
        self.world, self.policy = nn.GRUCell(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for _ in range(5):
            x = self.world(self.policy(x.detach()).tanh(), x)
            total = total + x.sum(1)
        return total


class Chunks(nn.Module):
    """Truncated backpropagation: a recurrent layer over pieces of several steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(1, len(x), 16)
        outs = []
        for part in x.split(3, 1):
            out, (h, c) = self.lstm(part, (h.detach(), c.detach()))
            outs.append(self.head(out))
        return torch.cat(outs, 1)


class Solving(nn.Module):
    """Steps to a fixed point; gradients go through the last alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.given, self.state, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for step in range(5):
            with torch.set_grad_enabled(self.how != "no_grad" or step == 4):
                z = z.detach() if self.how == "detach" else z
                z = (self.given(x) + self.state(z)).tanh()
        return self.head(z)


class Rolling(nn.Module):
    """Predicts step by step from where it got to, each step by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        steps = []
        for _ in range(4):
            x = x.detach() + self.state(x.detach())
            steps.append(x)
        return torch.stack(steps, 1)


class Siamese(nn.Module):
    """One net for three inputs, of which two are detached."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.net(x), self.net(x + 1).detach(), self.net(x - 1).detach()
        return (a * b).sum(1) - (a * c).sum(1)


class Twins(nn.Module):
    """A net beside a copy of it, or a stack of two copies, of which the first is detached."""

    def __init__(self, *, stacked: bool) -> None:
        super().__init__()
        self.online = nn.Linear(16, 16)
        self.slow = copy.deepcopy(self.online)
        self.head, self.stacked = nn.Linear(16, 16), stacked

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            made = self.slow(x)
        if self.stacked:
            return self.head(self.online(made))
        return (self.head(self.online(x)) - made).square().mean()


def normed() -> nn.Sequential:
    """Return an encoder that ends in a norm, which starts at ones as every other does."""
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16))


class Normed(nn.Module):
    """What an encoder makes under ``no_grad``, taken by a decoder with a norm beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.head = normed(), normed(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            memory = self.encoder(x)
        return self.head(memory + self.decoder(x))


class Averaged(nn.Module):
    """A slow copy with a norm at its end makes targets."""

    def __init__(self) -> None:
        super().__init__()
        self.online = normed()
        self.target = copy.deepcopy(self.online)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.target(x + 0.1)
        return F.mse_loss(self.online(x), target)


class Translating(nn.Module):
    """A decoder that is given what an encoder made."""

    def __init__(self, constant: Callable[[Any], Any]) -> None:
        super().__init__()
        self.stem, self.encoder = nn.Linear(16, 16), net(16, 16, 16)
        self.decoder = Deaf(constant)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.decoder(x, self.encoder(x))


class Doubled(nn.Module):
    """Three layers with such a function before the last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(NoGradient.apply(self.b(self.a(x))))


class Stateful(nn.Module):
    """A head of zeros beside a state of zeros, which the loss leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(16, 16), nn.Linear(16, 4)
        self.aux = nn.Linear(16, 4)
        nn.init.zeros_(self.aux.weight)
        nn.init.zeros_(self.aux.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state = x.new_zeros(len(x), 16)
        h = self.cell(x, state)
        return self.head(h), self.aux(state)


def given(model: nn.Module, inputs: Any = None, loss: Any = None) -> tuple[Any, ...]:
    """Return the model with a batch, no target and a loss."""
    return model, torch.randn(64, 16) if inputs is None else inputs, None, loss


def squares(model: nn.Module) -> tuple[Any, ...]:
    return given(model, loss=lambda out: out.square().mean())


def as_it_is(model: nn.Module) -> tuple[Any, ...]:
    """Return it with a loss that is its output."""
    return given(model, loss=lambda out: out)


def steps(model: nn.Module, length: int = 6) -> tuple[Any, ...]:
    return given(model, torch.randn(32, length, 16))


def ids(read: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    return given(LookedUp(read), torch.randint(20, (16, 4)))


def translated(*, cuts: bool) -> tuple[Any, ...]:
    ids = torch.randint(20, (8, 5))
    return given(
        Translator(cuts=cuts), ids, lambda out: F.cross_entropy(out[0].flatten(0, 1), ids.flatten())
    )


ALONE = ("FAULTS", "HEALTHY")
BEHIND = {"layers.0", "layers.1", "layers.2"}
NOT_TAKEN = "'decoder' is given it at "
DETACHED = "each of its 6 calls"
FAULTS = {
    "an encoder detached before attention": (
        lambda: translated(cuts=True),
        "fail", "encoder.2", "`detach` at ", "between encoder and blocks.0.k", "memory.detach()",
        {"encoder.0"},
    ),
    "a decoder that takes a number": (
        lambda: Translating(lambda _: 0.0), "fail", "encoder.2", NOT_TAKEN, "takes nothing of it"
    ),
    "a decoder that takes an attribute": (
        lambda: Translating(lambda m: m.kept), "fail", "encoder.2", NOT_TAKEN, "takes nothing of it"
    ),
    "a decoder that takes a global": (
        lambda: Translating(lambda _: SHIFT), "fail", "encoder.2", NOT_TAKEN, "takes nothing of it"
    ),
    "a decoder that takes what an object keeps": (
        lambda: Translating(lambda m: m.object.kept),
        "fail", "encoder.2", "of unseen origin comes in before 'decoder.out' at ",
    ),
    "one cut": (
        lambda: squares(Chain(detached=(2,))), "fail", "layers.2", {"layers.0", "layers.1"}
    ),
    "one line in a loop": (lambda: squares(Chain(detached=(1, 3))), "fail", "layers.3", BEHIND),
    "no_grad over some layers": (lambda: squares(Chain(off=(2, 3))), "fail", "layers.3", BEHIND),
    "codes without a way past them": (
        lambda: as_it_is(Quantised(straight=False)), "fail", "encoder.2", "`argmin` at "
    ),
    "a critic fitted to nothing": (
        lambda: as_it_is(Critic(fitted=False)), "fail", "critic", "`detach` at "
    ),
    "a generator's step on detached fakes": (
        lambda: as_it_is(Gan(cuts=True)), "fail", "g.0", "`detach` at "
    ),
    "a table read by its data": (lambda: ids(lambda w: w.data), "fail", "factors", "`data` at "),
    "a number that a function of its own is given detached": (
        lambda: timed(lambda end: end.detach() * 1), "fail", "", "`detach` at ", "(end)"
    ),
    "a backward that returns none": (Doubled, "fail", "b", "backward"),
    "each layer given the input": (
        lambda: Row(forgotten), "fail", "layers.1", "that of 'layers.2' after it is", {"layers.0"}
    ),
    "a result forgotten": (
        lambda: Row(overwritten), "fail", "layers.1", "that of 'layers.2' after it is", {"layers.0"}
    ),
    "values that leave for Python": (
        lambda: Row(listed),
        "fail", "layers.1", "`tolist` at", "between layers.1 and layers.2", {"layers.0"},
    ),
    "each rest of a loop dropped": (
        lambda: Stages(each_rest_dropped),
        "warn", "stages.2.backcast", "in vain",
        {"stages.0.backcast", "stages.1.backcast"},
    ),
    "the rests of all stages dropped": (
        lambda: Unrolled(keeps=False), "fail", "stages.2.backcast"
    ),
    "the first of several states": (
        lambda: Reading(States(4, 16), 0), "warn", "part.summary.2", "in vain"
    ),
    **{
        f"a state {name} at each step, {'each' if each else 'the last'} read": (
            lambda cut=cut, each=each: steps(Steps(cut, each=each)),
            "fail", "cell", DETACHED, "cuts.py:",
        )
        for each in (False, True)
        for name, cut in (
            ("detached", lambda h, t: h.detach()), ("taken by its data", lambda h, t: h.data)
        )
    },
    "a recurrence by hand": (lambda: steps(ByHand(cuts=True)), "fail", "state"),
    "a recurrence of one layer": (lambda: steps(Joined(cuts=True)), "fail", "state"),
    "a search that is detached at each step": (lambda: Solving("detach"), "warn", "state"),
    "predictions of one step each": (Rolling, "warn", "state"),
    "a slow copy in a stack": (lambda: Twins(stacked=True), "warn", "slow"),
    "a slow copy beside what it copies": (lambda: Twins(stacked=False), "warn", "slow", "freeze"),
    "a slow copy with a norm at its end": (Averaged, "warn", "target.2", "freeze"),
    "the last residual of a stack": (Stacked, "warn", "parts.2.pool", "in vain"),
    "a pooler that nobody reads": (lambda: Reading(Part(), 0), "warn", "part.pool", "in vain"),
    "the last rest of a loop": (
        lambda: Stages(last_rest_dropped), "warn", "stages.2.backcast", "in vain"
    ),
    "an encoder that ends in a norm of ones": (
        lambda: squares(Normed()), "warn", "encoder.2", "no_grad"
    ),
}  # fmt: skip
HEALTHY = {
    "an encoder and its decoder": lambda: translated(cuts=False),
    "a chain": lambda: squares(Chain()),
    "a number that a function of its own is given": lambda: timed(lambda end: end * 1),
    "codes with a way past them": lambda: as_it_is(Quantised(straight=True)),
    "a critic fitted to returns": lambda: as_it_is(Critic(fitted=True)),
    "both steps of a GAN": lambda: as_it_is(Gan(cuts=False)),
    "a table that is read, not called": lambda: ids(lambda weight: weight),
    "a row": lambda: Row(chained),
    "the last of a row left out": lambda: Row(one_short),
    "the remainder of an unrolled loop": lambda: Unrolled(keeps=True),
    "a head of zeros beside a state of zeros": lambda: given(
        Stateful(), loss=lambda out: out[0].square().mean()
    ),
    **{
        f"a state {name}, {'each' if each else 'the last'} read": lambda on=on, each=each: steps(
            Steps(on, each=each)
        )
        for each in (False, True)
        for name, on in (
            ("passed on", lambda h, t: h),
            ("detached every second step", lambda h, t: h.detach() if t % 2 == 0 else h),
            ("detached once", lambda h, t: h.detach() if t == 3 else h),
            ("half detached", lambda h, t: 0.5 * h + 0.5 * h.detach()),
        )
    },
    "a recurrence by hand": lambda: steps(ByHand(cuts=False)),
    "a recurrence of one layer": lambda: steps(Joined(cuts=False)),
    "a prediction fed back": lambda: Generating(lambda made: made.detach()),
    "a sample fed back": lambda: Generating(lambda made: F.one_hot(made.argmax(1), 8).float()),
    "boxes that are refined": Refining,
    "a policy in an imagined world": Imagining,
    "a search for a fixed point": lambda: Solving("through"),
    "a search without gradients but in the last step": lambda: Solving("no_grad"),
    "one net for three inputs": Siamese,
    "pieces of several steps": lambda: steps(Chunks(), 12),
}  # fmt: skip


class Auxiliary(nn.Module):
    """A trunk with two heads and a part that is detached, or not."""

    def __init__(self, *, cuts: bool) -> None:
        super().__init__()
        self.trunk, self.head, self.aux = net(16, 16, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.cuts = cuts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.head(h.detach() if self.cuts else h), self.aux(x)
