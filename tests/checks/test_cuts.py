"""Where gradients end, as the recorded flow tells it: cuts, values in vain, detached states."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import HealthReport
from pytest_modelhealth.checks.judging import judge

Inspect = Callable[..., HealthReport]


def found(report: HealthReport) -> list[tuple[str, str]]:
    """Return layer and severity of what the check says; nothing else may be violated."""
    assert report._judgement.broken == ()
    assert {v.check for v in report.violations} <= {"missing_gradients"}, report.violations
    both = [*report.violations, *report.warnings]
    return [(v.layer, v.severity) for v in both if v.check == "missing_gradients"]


def net(*sizes: int) -> nn.Sequential:
    """Return a plain network of several layers."""
    return nn.Sequential(
        *[m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())][:-1]
    )


def code_at(line: str) -> str:
    """Return the code at ``path:line``."""
    path, _, number = line.rpartition(":")
    return Path(path).read_text().splitlines()[int(number) - 1]


# Cuts.


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


def test_an_encoder_detached_before_attention_is_one_cut(inspect: Inspect) -> None:
    """Its output is returned with a gradient, and the loss gets its values without one."""
    ids = torch.randint(20, (8, 5))
    loss = lambda out: F.cross_entropy(out[0].flatten(0, 1), ids.flatten())  # noqa: E731
    assert found(inspect(Translator(cuts=False), ids, loss=loss)) == []
    report = inspect(Translator(cuts=True), ids, loss=loss)
    assert found(report) == [("encoder.2", "fail")]
    (violation,) = report.violations
    assert violation.affected == ("encoder.0",)
    assert "`detach` at " in violation.message
    assert "between encoder and blocks.0.k" in violation.message
    line = violation.message.partition("`detach` at ")[2].partition(",")[0]
    assert "memory.detach()" in code_at(line)
    text = report.render("failure")
    assert text.count("`detach` at") == 1


SHIFT = torch.randn(16)


class Deaf(nn.Module):
    """A decoder that is given what an encoder made, and takes a constant of some place instead."""

    def __init__(self, constant: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.own, self.out, self.constant = nn.Linear(16, 16), nn.Linear(16, 16), constant
        self.kept, self.object = torch.randn(16), SimpleNamespace(kept=torch.randn(16))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.out(self.own(x) + self.constant(self))


@pytest.mark.parametrize(
    ("constant", "said"),
    [
        (lambda _: 0.0, "'decoder' is given it at LINE and takes nothing of it"),
        (lambda m: m.kept, "'decoder' is given it at LINE and takes nothing of it"),
        (lambda _: SHIFT, "'decoder' is given it at LINE and takes nothing of it"),
        (lambda m: m.object.kept, "of unseen origin comes in before 'decoder.out' at LINE"),
    ],
    ids=["none", "attribute", "global", "object"],
)
def test_a_decoder_that_ignores_what_an_encoder_made_is_named(
    constant: Callable[[Any], Tensor], said: str, batch: Tensor, inspect: Inspect
) -> None:
    """What takes the place of it, and is made where nothing shows it, is no layer."""

    class Translating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.encoder = nn.Linear(16, 16), net(16, 16, 16)
            self.decoder = Deaf(constant)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.decoder(x, self.encoder(x))

    (violation,) = inspect(Translating(), batch).violations
    assert violation.layer == "encoder.2"
    text = f"{violation.message}; {violation.cause}"
    place = r"\S+test_cuts.py:\d+"
    assert re.search(said.replace("LINE", place), text), text


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


@pytest.mark.parametrize(
    ("model", "stories"),
    [
        (Chain(), {}),
        (Chain(detached=(2,)), {"layers.2": ("layers.0", "layers.1")}),
        (Chain(detached=(1, 3)), {"layers.3": ("layers.0", "layers.1", "layers.2")}),
        (Chain(off=(2, 3)), {"layers.3": ("layers.0", "layers.1", "layers.2")}),
    ],
    ids=["none", "one", "one line", "no_grad"],
)
def test_each_cut_is_one_story(
    model: Chain, stories: dict[str, tuple[str, ...]], batch: Tensor, inspect: Inspect
) -> None:
    """Layers behind the same cut are told with its culprit; a line in a loop is one cut."""
    report = inspect(model, batch, loss=lambda out: out.square().mean())
    assert {v.layer: v.affected for v in report.violations} == stories


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


@pytest.mark.parametrize(
    ("build", "layer", "operation"),
    [
        (lambda wrong: Quantised(straight=not wrong), "encoder.2", "argmin"),
        (lambda wrong: Critic(fitted=not wrong), "critic", "detach"),
        (lambda wrong: Gan(cuts=wrong), "g.0", "detach"),
    ],
    ids=["codes", "critic", "gan"],
)
def test_a_detach_is_no_cut_where_another_way_learns(
    build: Any, layer: str, operation: str, batch: Tensor, inspect: Inspect
) -> None:
    """Straight-through estimators, advantages and fakes are detached by design."""
    loss = lambda out: out  # noqa: E731
    assert found(inspect(build(False), batch, loss=loss)) == []
    report = inspect(build(True), batch, loss=loss)
    assert found(report) == [(layer, "fail")]
    assert f"`{operation}` at " in report.violations[0].message


class LookedUp(nn.Module):
    """Looks its factors up in a table that it never calls."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.bias, self.factors, self.read = nn.Embedding(20, 1), nn.Embedding(20, 8), read
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        looked_up = F.embedding(ids, self.read(self.factors.weight)).sum(1)
        return self.bias(ids).sum(1) + self.head(looked_up)


def test_a_weight_of_a_layer_that_is_never_called(inspect: Inspect) -> None:
    """Its values get to the loss through .data, and no gradient comes back."""
    ids = torch.randint(20, (16, 4))
    assert found(inspect(LookedUp(lambda weight: weight), ids)) == []
    report = inspect(LookedUp(lambda weight: weight.data), ids)
    assert found(report) == [("factors", "fail")]
    assert "`data` at " in report.violations[0].message


class NoGradient(torch.autograd.Function):
    """Doubles, and forgets the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def test_a_backward_that_returns_none(batch: Tensor, inspect: Inspect) -> None:
    """The graph leads there, and nothing comes back."""

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(NoGradient.apply(self.b(self.a(x))))

    report = inspect(Doubled(), batch)
    assert found(report) == [("b", "fail")]
    assert "backward" in report.violations[0].cause


# Values in vain.


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


@pytest.mark.parametrize(
    ("wiring", "layer", "affected"),
    [
        (chained, None, ()),
        (forgotten, "layers.1", ("layers.0",)),
        (one_short, "layers.2", ()),
        (overwritten, "layers.1", ("layers.0",)),
    ],
)
def test_a_value_computed_in_vain(
    wiring: Any, layer: str | None, affected: tuple[str, ...], batch: Tensor, inspect: Inspect
) -> None:
    """A layer ran and nobody takes what it returned."""
    report = inspect(Row(wiring), batch)
    assert found(report) == ([] if layer is None else [(layer, "fail")])
    for violation in report.violations:
        assert violation.affected == affected
        assert "in vain" in violation.message
        assert ".item()" in violation.cause


def test_values_that_leave_for_python_are_cut_off(batch: Tensor, inspect: Inspect) -> None:
    """What comes back of a list has lost its graph: the call that read it is named."""
    (violation,) = inspect(Row(listed), batch).violations
    assert (violation.layer, violation.affected) == ("layers.1", ("layers.0",))
    assert "`tolist` at" in violation.message
    assert "between layers.1 and layers.2" in violation.message


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


@pytest.mark.parametrize("build", [Stacked, lambda: Reading(Part(), 0)], ids=["stack", "pooler"])
def test_one_of_several_values_may_be_dropped(build: Any, batch: Tensor, inspect: Inspect) -> None:
    """A part returned it beside another that is used."""
    assert found(inspect(build(), batch)) == []


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


def last_forecast(rest: Tensor, stages: Any) -> Tensor:
    """Overwrite each forecast by the next."""
    for stage in stages:
        backcast, forecast = stage(rest)
        rest = rest - backcast
    return forecast


@pytest.mark.parametrize(
    ("loop", "number", "layer", "affected", "said"),
    [
        (last_rest_dropped, 3, None, 0, ""),
        (each_rest_dropped, 1, None, 0, ""),
        (each_rest_dropped, 3, "stages.2.backcast", 2, "in none of 3 modules"),
        (last_forecast, 3, "stages.1.forecast", 1, "that of 'stages.2.forecast' after it is"),
    ],
)
def test_one_of_several_values_of_a_loop(
    loop: Any,
    number: int,
    layer: str | None,
    affected: int,
    said: str,
    batch: Tensor,
    inspect: Inspect,
) -> None:
    """The last may be left out, and what each of one module returns; all of several may not."""
    report = inspect(Stages(loop, number), batch)
    assert found(report) == ([] if layer is None else [(layer, "warn")])
    for warning in report.warnings:
        assert len(warning.affected) == affected
        assert said in warning.message


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


@pytest.mark.parametrize("keeps", [True, False], ids=["last", "all"])
def test_the_remainder_of_a_loop(keeps: bool, batch: Tensor, inspect: Inspect) -> None:
    """What the last step leaves is not taken; what none of them hands on is computed in vain."""
    report = inspect(Unrolled(keeps=keeps), batch)
    assert found(report) == ([] if keeps else [("stages.2.backcast", "fail")])


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


@pytest.mark.parametrize(
    ("blocks", "width", "read", "layers"),
    [
        (4, 16, 0, ["part.summary.2"]),
        (4, 16, -2, []),
        (4, 16, -3, []),
        (0, 16, 0, []),
        (2, 256, 0, []),
    ],
    ids=["first", "last", "last but one", "no blocks", "few blocks"],
)
def test_an_early_one_of_several_states(
    blocks: int, width: int, read: int, layers: list[str], batch: Tensor, inspect: Inspect
) -> None:
    """The last but one is read by design; if the first is, all the blocks run in vain."""
    report = inspect(Reading(States(blocks, width), read), batch)
    assert found(report) == [(layer, "warn") for layer in layers]
    assert all("most of what 'part' computes" in w.message for w in report.warnings)


def test_a_head_of_zeros_beside_a_state_of_zeros(batch: Tensor, inspect: Inspect) -> None:
    """The loss leaves the head out; what it holds says nothing of the model."""

    class Model(nn.Module):
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

    report = inspect(Model(), batch, loss=lambda out: out[0].square().mean())
    assert report.violations == ()


# States detached at each step.


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


@pytest.mark.parametrize("each", [False, True], ids=["last", "each"])
@pytest.mark.parametrize(
    ("hand_on", "is_cut"),
    [
        (lambda h, t: h.detach(), True),
        (lambda h, t: h.data, True),
        (lambda h, t: h, False),
        (lambda h, t: h.detach() if t % 2 == 0 else h, False),
        (lambda h, t: h.detach() if t == 3 else h, False),
        (lambda h, t: 0.5 * h + 0.5 * h.detach(), False),
    ],
    ids=["detach", "data", "passed on", "every second", "once", "half"],
)
def test_a_state_detached_at_each_step(
    hand_on: Any, is_cut: bool, each: bool, inspect: Inspect
) -> None:
    """Nothing lacks a gradient, and none goes further back than a step."""
    report = inspect(Steps(hand_on, each=each), torch.randn(32, 6, 16))
    assert found(report) == ([("cell", "fail")] if is_cut else [])
    for violation in report.violations:
        assert "each of its 6 calls" in violation.message
        assert "test_cuts.py:" in violation.message


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


@pytest.mark.parametrize("kind", [ByHand, Joined])
def test_a_recurrence_of_plain_layers(kind: Any, inspect: Inspect) -> None:
    """What takes the state and gives it on is the recurrence."""
    x = torch.randn(32, 6, 16)
    assert found(inspect(kind(cuts=False), x)) == []
    assert found(inspect(kind(cuts=True), x)) == [("state", "fail")]


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


@pytest.mark.parametrize(
    "build",
    [
        lambda: Generating(lambda made: made.detach()),
        lambda: Generating(lambda made: F.one_hot(made.argmax(1), 8).float()),
        Refining,
        Imagining,
        lambda: Solving("through"),
        lambda: Solving("no_grad"),
        Siamese,
    ],
    ids=["fed back", "sampled", "refining", "imagining", "unrolled", "no_grad", "siamese"],
)
def test_what_is_fed_back_without_gradients_by_design(build: Any, inspect: Inspect) -> None:
    """A state that goes along has them, or all steps but the last do without."""
    torch.manual_seed(1)
    assert found(inspect(build(), torch.randn(32, 16))) == []


def test_pieces_of_several_steps_are_truncated_by_design(inspect: Inspect) -> None:
    """Gradients go back over the steps of a piece."""
    assert found(inspect(Chunks(), torch.randn(32, 12, 16))) == []


@pytest.mark.parametrize("build", [lambda: Solving("detach"), Rolling], ids=["solving", "rolling"])
def test_steps_that_take_nothing_new_warn(build: Any, batch: Tensor, inspect: Inspect) -> None:
    """The search for a fixed point, and predictions of one step each, may be meant so."""
    assert found(inspect(build(), batch)) == [("state", "warn")]


# Designs, and flows that nothing recorded.


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


def test_a_slow_copy_lies_beside_what_it_copies(batch: Tensor, inspect: Inspect) -> None:
    """Blocks of a stack may start equal, as TransformerEncoder's do; they copy nothing."""
    assert found(inspect(Twins(stacked=False), batch)) == []
    assert [layer for layer, _ in found(inspect(Twins(stacked=True), batch))] == ["slow"]


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


def test_a_norm_of_ones_is_no_copy_of_another(batch: Tensor, inspect: Inspect) -> None:
    """Whether an encoder is a copy is told by weights that were drawn."""
    report = inspect(Normed(), batch, loss=lambda out: out.square().mean())
    assert found(report) == [("encoder.2", "warn")]
    assert "no_grad" in report.warnings[0].cause
    assert found(inspect(Averaged(), batch)) == []


class Auxiliary(nn.Module):
    """A trunk with two heads and a part that is detached, or not."""

    def __init__(self, *, cuts: bool) -> None:
        super().__init__()
        self.trunk, self.head, self.aux = net(16, 16, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.cuts = cuts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.head(h.detach() if self.cuts else h), self.aux(x)


def test_a_flow_that_was_inferred_accuses_no_head(batch: Tensor, inspect: Inspect) -> None:
    """Autograd still says what no output depends on."""
    for cuts, layers in ((False, []), (True, ["trunk.2"])):
        report = inspect(Auxiliary(cuts=cuts), batch, loss=lambda out: out[0].square().mean())
        assert [layer for layer, _ in found(report)] == layers
        observation = replace(report.observation, flow=None)
        violations = judge(observation, report._settings).violations
        assert [violation.layer for violation in violations] == layers
    inferred = replace(inspect(Reading(Part(), 0), batch).observation, flow=None)
    assert judge(inferred, report._settings).violations == ()
