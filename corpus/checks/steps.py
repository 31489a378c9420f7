"""A step that breaks each check of a training step, and a healthy one that comes close."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_DRAWN = torch.Generator().manual_seed(0)
X = torch.randn(16, 6, generator=_DRAWN)
Y = torch.randint(0, 3, (16,), generator=_DRAWN)


class Net(nn.Module):
    """A perceptron whose parts have names."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.into = nn.Linear(6, 8)
        self.between = nn.Sequential(*between, nn.Tanh())
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.out(self.between(self.into(x)))


def net(*between: nn.Module) -> Net:
    """Return a model under a seed."""
    torch.manual_seed(0)
    return Net(*between)


def sgd(model: nn.Module, rate: float = 0.1, **options: Any) -> torch.optim.SGD:
    """Return plain descent of all parameters."""
    return torch.optim.SGD(model.parameters(), lr=rate, **options)


def usual(model: Any, optimizer: Any, batch: Any) -> Tensor:
    """Make one step as every tutorial has it."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


def entropy(model: Any, batch: Any) -> Tensor:
    """Return the loss of `usual`."""
    return F.cross_entropy(model(batch[0]), batch[1])


@dataclass(frozen=True)
class Stepping:
    """A model with a training step, its optimizer and batch, and further arguments of the run."""

    model: nn.Module
    step: Callable[[Any, Any, Any], Any]
    optimizer: Any
    batch: Any
    arguments: dict[str, Any]


def stepping(
    step: Callable[[Any, Any, Any], Any] = usual,
    model: nn.Module | None = None,
    optimizer: Any = None,
    batch: Any = (X, Y),
    **arguments: Any,
) -> Stepping:
    """Return a step with its model, by default the small one under plain descent."""
    model = net() if model is None else model
    return Stepping(model, step, optimizer or sgd(model), batch, arguments)


@dataclass(frozen=True)
class Pair:
    """A faulty step and its healthy neighbour.

    Args:
        name: what is done, in words.
        check: what says so.
        layer: where.
        says: parts of the message and the cause.
        faulty, healthy: make each of them.
        warns: whether it only warns.
    """

    name: str
    check: str
    layer: str
    says: tuple[str, ...]
    faulty: Callable[[], Stepping]
    healthy: Callable[[], Stepping]
    warns: bool = False


def after(change: Callable[[Any, Any], None]) -> Any:
    """Return the usual step, with something done between its backward pass and the optimizer."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = entropy(model, batch)
        loss.backward()
        change(model, optimizer)
        optimizer.step()
        return loss

    return step


def descending(loss_of: Callable[[Any, Any], Any]) -> Any:
    """Return a step on a loss, or on the first of two and returning the second."""

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        made = loss_of(model, batch)
        loss, returned = made if isinstance(made, tuple) else (made, made)
        loss.backward()
        optimizer.step()
        return returned

    return step


# ---- later_calls


def carried(detaches: bool) -> Stepping:
    """Run a step that goes on from the output of the call before."""
    state: dict[str, Tensor] = {}

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        scores = model(batch[0]) + 0.1 * state.get("last", torch.zeros(3))
        state["last"] = scores.detach() if detaches else scores
        loss = F.cross_entropy(scores, batch[1])
        loss.backward()
        optimizer.step()
        return loss

    return stepping(step)


def logged(detaches: bool) -> Stepping:
    """Run a step that keeps its losses."""
    history: list[Tensor] = []

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = usual(model, optimizer, batch)
        history.append(loss.detach() if detaches else loss)
        return loss

    return stepping(step)


def squares(rate: float) -> Stepping:
    """Run descent of a squared error at a rate."""
    model = nn.Sequential(nn.Linear(6, 1))
    step = descending(lambda model, batch: (model(batch[0]) - 1).square().mean())
    torch.manual_seed(0)
    return stepping(step, model, sgd(model, rate))


# ---- trained_parameters


def held(*names: str) -> Stepping:
    """Run with an optimizer of some parts only."""
    model = net()
    parameters = [p for name in names for p in model.get_submodule(name).parameters()]
    return stepping(usual, model, torch.optim.SGD(parameters, lr=0.1))


def headless() -> Stepping:
    """Run with what should not learn frozen."""
    model = net()
    model.into.requires_grad_(False)
    return stepping(usual, model, torch.optim.SGD(model.out.parameters(), lr=0.1))


def of_copy(is_copy: bool) -> Stepping:
    """Run with an optimizer of another model."""
    model = net()
    return stepping(usual, model, sgd(copy.deepcopy(model) if is_copy else model))


class Ungraded(Net):
    """Runs its first layer without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        with torch.no_grad():
            x = self.into(x)
        return self.out(self.between(x))


def ungraded(is_frozen: bool) -> Stepping:
    """Run a model whose first layer runs without gradients."""
    torch.manual_seed(0)
    model = Ungraded()
    model.into.requires_grad_(not is_frozen)
    return stepping(usual, model, sgd(model))


# ---- parameter_updates


def no_backward(model: Any, optimizer: Any, batch: Any) -> Tensor:
    """Forget the backward pass."""
    loss = entropy(model, batch)
    optimizer.step()
    return loss


def cleared_too_late(model: Any, optimizer: Any) -> None:
    """Clear between backward pass and step."""
    optimizer.zero_grad()


def scheduled(factor: float) -> Stepping:
    """Run with a schedule that multiplies the rate in each call."""
    model = net()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: factor)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = usual(model, optimizer, batch)
        schedule.step()
        return loss

    return stepping(step, model, optimizer, restore=schedule)


# ---- gradient_factor


def chunks(divided: bool) -> Stepping:
    """Run four micro-batches."""

    def step(model: Any, optimizer: Any, batch: Any) -> float:
        optimizer.zero_grad()
        total = 0.0
        for part in zip(*(t.chunk(4) for t in batch), strict=True):
            loss = entropy(model, part)
            (loss / 4 if divided else loss).backward()
            total += loss.item() / 4
        optimizer.step()
        return total

    return stepping(step)


def scaled(removes: bool) -> Stepping:
    """Run with a scale that is removed or not."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = entropy(model, batch)
        (loss * 2048.0).backward()
        if removes:
            for parameter in model.parameters():
                parameter.grad /= 2048.0
        optimizer.step()
        return loss

    model = net()
    return stepping(step, model, sgd(model, 1e-6 if not removes else 0.1))


def negated(sign: float) -> Stepping:
    """Run a step that differentiates the loss with a sign, and returns it without."""
    step = descending(lambda m, b: (sign * entropy(m, b), entropy(m, b)))
    model = net()
    return stepping(step, model, sgd(model, 1e-3))


def several(sign: float) -> Stepping:
    """Run a step that differentiates two losses, and returns the entropy of one by itself."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        (sign * entropy(model, batch)).backward()
        (1e-3 * model(batch[0]).square().mean()).backward()
        optimizer.step()
        return entropy(model, batch)

    model = net()
    return stepping(step, model, sgd(model, 1e-3))


def generated(half: str) -> Stepping:
    """Run a generator's step; its rival's half is differentiated too, or its own loss is scaled."""
    model, rival = net(), nn.Linear(3, 1)
    nn.init.constant_(rival.bias, 1.0)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        fake = model(batch[0])
        against = F.softplus(rival(fake.detach())).mean()
        if half == "both":
            rival.zero_grad()
            against.backward()
        optimizer.zero_grad()
        loss = F.softplus(-rival(fake)).mean()
        (loss if half == "both" else 8 * loss).backward()
        optimizer.step()
        return loss + against if half == "both" else loss

    return stepping(step, model)


# ---- left_over_gradients


def ordered(order: str) -> Stepping:
    """Run a step whose parts come in this order."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        for part in order.split():
            if part == "forward":
                loss = entropy(model, batch)
            elif part == "backward":
                loss.backward()
            else:
                {"clear": optimizer.zero_grad, "step": optimizer.step}[part]()
        return loss

    return stepping(step)


def twice(again: bool) -> Stepping:
    """Run a step that steps once more."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = usual(model, optimizer, batch)
        if again:
            optimizer.step()
        return loss

    return stepping(step)


def by_hand(
    rate: float = 0.1, *, clears: bool = True, factor: int = 1, skips: str = "none"
) -> Stepping:
    """Run a step that moves the weights itself, without an optimizer."""

    def step(model: Any, _: None, batch: Any) -> Tensor:
        loss = entropy(model, batch)
        (factor * loss).backward()
        for name, parameter in model.named_parameters():
            if not name.startswith(skips):
                parameter.data.add_(parameter.grad, alpha=-rate)
        if clears:
            model.zero_grad()
        return loss

    return Stepping(net(), step, None, (X, Y), {})


def lbfgs(clears: bool) -> Stepping:
    """Run LBFGS with a closure that clears, or is cleared for."""
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        def closure() -> Tensor:
            if clears:
                optimizer.zero_grad()
            loss = entropy(model, batch)
            loss.backward()
            return loss

        optimizer.zero_grad()
        return optimizer.step(closure)

    return stepping(step, model, optimizer)


# ---- batch_influence


def sliced(most: int) -> Stepping:
    """Run a step on the first samples only."""
    return stepping(descending(lambda m, b: entropy(m, (b[0][:most], b[1][:most]))))


def around(is_around: bool) -> Stepping:
    """Run a step on a batch from around it."""
    return stepping(descending(lambda m, b: entropy(m, (X, Y) if is_around else b)))


# ---- training_mode


def in_mode(training: bool, *, calls_train: bool = False, part: str = "") -> Stepping:
    """Run a model with a dropout and a normalisation, whole or in part in a mode."""
    model = net(nn.BatchNorm1d(8), nn.Dropout(0.3))
    model.get_submodule(part).train(training)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        if calls_train:
            model.train()
        return usual(model, optimizer, batch)

    return stepping(step, model, sgd(model))


# ---- gradient_path


def penalised(is_late: bool) -> Stepping:
    """Run a model whose gate the loss reads, after the backward pass or before."""

    class Gated(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            self.level = self.gate(x).square().mean()
            return super().forward(x)

    def loss_of(model: Any, batch: Any) -> Any:
        loss = entropy(model, batch)
        whole = loss + model.level
        return (loss, whole.detach()) if is_late else whole

    torch.manual_seed(0)
    model = Gated()
    return stepping(descending(loss_of), model, sgd(model))


def masked(keeps: str) -> Stepping:
    """Run with a mask on the gradients of all layers but one."""

    def mask(model: Any, optimizer: Any) -> None:
        for name, parameter in model.named_parameters():
            if not name.startswith(keeps):
                parameter.grad.zero_()

    return stepping(after(mask))


class Adapted(Net):
    """Adds a product of two factors to its first layer."""

    def __init__(self, first: float) -> None:
        super().__init__()
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)
        with torch.no_grad():
            self.down.weight *= first

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.out(self.between(self.into(x) + self.up(self.down(x))))


def adapted(first: float) -> Stepping:
    """Run an adapter whose second factor starts at zero."""
    torch.manual_seed(0)
    model = Adapted(first)
    return stepping(usual, model, sgd(model))


# ---- update_direction


def ascending(is_sum: bool) -> Stepping:
    """Run an update by hand that is added, and an optimizer that does it right."""

    class Up(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.add_(parameter.grad, alpha=0.1 if is_sum else -0.1)

    model = net()
    return stepping(usual, model, Up(model.parameters(), lr=0.1))


def perturbed(takes_back: bool) -> Stepping:
    """Run sharpness-aware training, whose perturbation is taken back or not."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        entropy(model, batch).backward()
        with torch.no_grad():
            moves = [0.05 * p.grad / p.grad.norm() for p in model.parameters()]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter += move
        optimizer.zero_grad()
        loss = entropy(model, batch)
        loss.backward()
        if takes_back:
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter -= move
        optimizer.step()
        return loss

    return stepping(step)


def likelihood(negates: bool) -> Stepping:
    """Run a step on the mean of log-probabilities, or on their negative."""

    def loss_of(model: Any, batch: Any) -> Tensor:
        mean = model(batch[0]).log_softmax(1).mean()
        return -mean if negates else mean

    return stepping(descending(loss_of))


# ---- update_size, update_precision


def at_rate(rate: float, kind: Any = torch.optim.SGD, **options: Any) -> Stepping:
    """Run the usual step with an optimizer of this kind and rate."""
    model = net()
    return stepping(usual, model, kind(model.parameters(), lr=rate, **options))


def halved(rate: float) -> Stepping:
    """Run a model in bfloat16."""
    model = net().to(torch.bfloat16)
    return stepping(usual, model, sgd(model, rate), (X.to(torch.bfloat16), Y))


# ---- optimizer_settings


def frozen_by(is_attribute: bool) -> Stepping:
    """Run a model of which a part is frozen, by the method or by an attribute."""
    model = net()
    if is_attribute:
        model.into.requires_grad = False  # type: ignore[assignment]
    else:
        model.into.requires_grad_(False)
    return stepping(usual, model, sgd(model))


def seeded(seeds: bool) -> Stepping:
    """Run a model with dropout in a step that sets a seed."""
    model = net(nn.Dropout(0.3))

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        if seeds:
            torch.manual_seed(7)
        return usual(model, optimizer, batch)

    return stepping(step, model, sgd(model))


# ---- running_statistics, weight_ties


def normalised(momentum: float) -> Stepping:
    """Run a batch normalisation of a momentum."""
    model = net(nn.BatchNorm1d(8, momentum=momentum))
    return stepping(usual, model, sgd(model))


class Tied(nn.Module):
    """Is told by its configuration that its embeddings are one."""

    def __init__(self, ties: bool) -> None:
        super().__init__()
        self.config = type("Config", (), {"tie_word_embeddings": True})()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        if ties:
            self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        """As in transformers."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        """As in transformers."""
        return self.head

    def forward(self, ids: Tensor) -> Tensor:
        """Return scores."""
        return self.head(self.embedding(ids))


def tied(ties: bool) -> Stepping:
    """Run a language model of one word."""
    torch.manual_seed(0)
    model, ids = Tied(ties), torch.arange(15) % 5
    return stepping(usual, model, sgd(model), (ids, (ids + 1) % 5))


class Declared(Tied):
    """Says what is tied without a configuration, as transformers do."""

    _tied_weights_keys = ("head.weight",)
    config = None


def declared(copies: bool) -> Stepping:
    """Tie by hand, and copy the head's weight where `copies` says so."""
    made = tied(True)
    made.model.__class__ = Declared
    del made.model.config
    if copies:
        made.model.head = copy.deepcopy(made.model.head)
    return stepping(usual, made.model, sgd(made.model), made.batch)


# ---- what is done in the wrong place


def in_windows(wrong: str = "") -> Stepping:
    """Run four micro-batches with a clip and a schedule, of which something is out of place."""
    model = net()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    usual(model, optimizer, (X, Y))  # torch warns of the very first step alone
    places = {"": "end", "generator": "end", "schedule": "end"}
    parameters = list(model.parameters())
    given = (p for p in parameters) if wrong == "generator" else parameters

    def clip(place: str) -> None:
        if place == places.get(wrong, wrong):
            torch.nn.utils.clip_grad_norm_(given, 0.2)

    def step(model: Any, optimizer: Any, batch: Any) -> float:
        optimizer.zero_grad()
        clip("begin")
        total = 0.0
        for x, y in zip(batch[0].chunk(4), batch[1].chunk(4), strict=True):
            loss = entropy(model, (x, y)) / 4
            loss.backward()
            total += loss.item()
            clip("micro-batch")
            if wrong == "schedule":
                schedule.step()
        clip("end")
        optimizer.step()
        clip("after")
        if wrong == "after":
            optimizer.zero_grad()
        if wrong == "trailing":
            entropy(model, batch).backward()
        return total

    list(given)
    return stepping(step, model, optimizer, restore=schedule)


def clipped_while_scaled(unscales: bool) -> Stepping:
    """Clip under a loss scale, which is taken off before or is not."""
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = entropy(model, batch)
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return stepping(step, model, restore=scaler)


def planned(groups: int) -> Stepping:
    """Warm up so many of two groups."""
    model, count = net(), [0]
    parts = [{"params": part.parameters()} for part in (model.into, model.out)]

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        count[0] += 1
        for group in optimizer.param_groups[:groups]:
            group["lr"] = 0.01 * count[0]
        return usual(model, optimizer, batch)

    return stepping(step, model, torch.optim.SGD(parts, lr=0.1))


def multiplied(by: float) -> Stepping:
    """Multiply the rate by a number that rises a little, as a warm-up does, or not at all."""
    model = net()
    optimizer = sgd(model)
    rises = float(by < 0.005)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: by * (1 + rises * n))

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = usual(model, optimizer, batch)
        schedule.step()
        return loss

    return stepping(step, model, optimizer, restore=schedule)


def freezing(how: str) -> Stepping:
    """Freeze a layer, and leave its gradient, or set all that a step trains."""
    model = net()
    optimizer = sgd(model, momentum=0.9)
    usual(model, optimizer, (X, Y))
    model.into.requires_grad_(False)
    optimizer.zero_grad(set_to_none=how != "kept")

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        model.requires_grad_(True) if how == "thawed" else None
        return usual(model, optimizer, batch)

    return stepping(step, model, optimizer)


class Again(nn.Module):
    """A part whose activations are computed again by the backward pass."""

    def __init__(self, part: nn.Module, **options: Any) -> None:
        super().__init__()
        self.part, self.options = part, options

    def forward(self, x: Tensor) -> Tensor:
        """Return what the part makes."""
        return torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False, **self.options)


def again(part: nn.Module, **options: Any) -> Stepping:
    """Run a step whose backward pass runs a part again."""
    return stepping(model=net(Again(part, **options)))


class Taught(nn.Module):
    """A student and a teacher that has dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = net(), net(nn.Dropout(0.2)).requires_grad_(False)
        self.teacher.out.weight.mul_(-2.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the student says."""
        return self.student(x)


def taught(is_on: bool) -> Stepping:
    """Teach a net what another says, which is in training mode or not."""
    model = Taught()
    model.teacher.train(is_on)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            goal = model.teacher(batch[0]).softmax(-1)
        return descending(lambda m, b: F.cross_entropy(m(b[0]), goal))(model, optimizer, batch)

    return stepping(step, model, sgd(model.student))


def with_scale(held: bool) -> Stepping:
    """Learn a scale of the logits that is around the step, in the optimizer or not."""
    model, scale = net(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), *([scale] if held else [])], lr=0.1)
    return stepping(
        lambda model, optimizer, batch: descending(
            lambda m, b: F.cross_entropy(scale * m(b[0]), b[1])
        )(model, optimizer, batch),
        model,
        optimizer,
    )


def two_losses(clears: bool) -> Stepping:
    """Train the head on one loss, then the rest on another, whose gradients are cleared or not."""
    model = net()

    def step(model: Any, optimizers: Any, batch: Any) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        entropy(model, batch).backward()
        optimizers[0].step()
        if clears:
            optimizers[1].zero_grad()
        loss = entropy(model, batch)
        loss.backward()
        optimizers[1].step()
        return loss

    return stepping(step, model, (sgd(model.out), sgd(model.into)))


def beside(itself: bool) -> Stepping:
    """Prefer one answer to another more than a reference does, or more than the model itself."""
    model = net()
    reference = model if itself else copy.deepcopy(model).requires_grad_(False)

    def loss_of(model: Any, batch: Any) -> Tensor:
        def margin(of: Any) -> Tensor:
            return of(batch[0]).log_softmax(-1).gather(1, batch[1][:, None]).sum()

        with torch.no_grad():
            before = margin(reference)
        return -F.logsigmoid(0.1 * (margin(model) - before))

    return stepping(descending(loss_of), model)


# ---- on request


def overfitted(rate: float) -> Stepping:
    """Call a step forty times."""
    model = net()
    return stepping(usual, model, sgd(model, rate), overfit=40)


class Counting(Net):
    """Counts its calls, and goes by that; the count is saved or not."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores that fade in."""
        self.count += 1
        return super().forward(x) * (1.0 - 0.5**self.count)


def resumed(persistent: bool) -> Stepping:
    """Resume a model that counts."""
    torch.manual_seed(0)
    model = Counting(persistent)
    return stepping(usual, model, sgd(model, momentum=0.9), resume=True)


def with_targets_of(first: bool) -> Stepping:
    """Keep the targets of the first batch, or how often each class is in it."""
    kept: dict[str, Tensor] = {}

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        target = kept.setdefault("target", batch[1]) if first else batch[1]
        kept.setdefault("counts", batch[1].bincount(minlength=3))
        return usual(model, optimizer, (batch[0], target))

    return stepping(step, resume=True)


# ---- what the record of a call tells


def in_parts(between: str) -> Stepping:
    """Run two losses, with something done between their backward passes."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        first, second = entropy(model, batch), 0.5 * model(batch[0]).square().mean()
        first.backward()
        if between == "clear":
            optimizer.zero_grad()
        second.backward()
        optimizer.step()
        return first + second

    return stepping(step)


def clipped(when: str, passes: int = 1, norm: float = 0.01) -> Stepping:
    """Run a step that clips its gradient, of one or several passes, before the step or after."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        for _ in range(passes):
            loss = entropy(model, batch)
            (loss / passes if when == "divided" else loss).backward()
        if when != "after":
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        if when == "after":
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        return loss

    return stepping(step)


def two_optimizers(steps_both: bool) -> Stepping:
    """Run two optimizers of two parts."""
    model = net()
    both = sgd(model.into), sgd(model.out)

    def step(model: Any, optimizers: Any, batch: Any) -> Tensor:
        for one in optimizers:
            one.zero_grad()
        loss = entropy(model, batch)
        loss.backward()
        optimizers[1].step()
        if steps_both:
            optimizers[0].step()
        return loss

    return stepping(step, model, both)


def emptied(clears: bool) -> Stepping:
    """Run Adam, whose state is cleared in each call or kept."""
    model = net()

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        if clears:
            optimizer.state.clear()
        return usual(model, optimizer, batch)

    return stepping(step, model, torch.optim.Adam(model.parameters(), lr=1e-3))


def early(is_early: bool) -> Stepping:
    """Run with a schedule that moves on before the optimizer steps, or after."""
    model = net()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    usual(model, optimizer, (X, Y))  # torch warns of the very first step alone

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        if is_early:
            schedule.step()
        loss = usual(model, optimizer, batch)
        if not is_early:
            schedule.step()
        return loss

    return stepping(step, model, optimizer, restore=schedule)


def listed(twice: bool) -> Stepping:
    """Run with a group that has a parameter twice, as torch only warns of."""
    model = net()
    optimizer = sgd(model)
    if twice:
        optimizer.param_groups[0]["params"].append(model.out.weight)
    return stepping(usual, model, optimizer)


def unprotected(eps: float) -> Stepping:
    """Run Adam with an epsilon, and a unit that is dead."""
    model = net()
    with torch.no_grad():
        model.out.weight[:, 0] = 0.0
    return stepping(usual, model, torch.optim.Adam(model.parameters(), lr=1e-3, eps=eps))


def centred(in_place: bool) -> Stepping:
    """Run a step that centres its batch, in place or on a copy."""

    def loss_of(model: Any, batch: Any) -> Tensor:
        x, y = batch
        x = x.sub_(x.mean(0)) if in_place else x - x.mean(0)
        return F.cross_entropy(model(x), y)

    return stepping(descending(loss_of))


PAIRS = [
    Pair(
        "cleared between two losses", "gradient_factor", "",
        ("times the slope of the loss", "1 of 2 backward passes are cleared before any", "between"),
        lambda: in_parts("clear"), lambda: in_parts(""), warns=True,
    ),
    Pair(
        "clipped without a gradient", "optimizer_settings", "",
        ("nothing that clip_grad_norm_ is given has a gradient", "before backward()"),
        lambda: in_windows("begin"), in_windows,
    ),
    Pair(
        "clipped by a generator that is used up", "optimizer_settings", "",
        ("nothing that clip_grad_norm_ is given has a gradient", "a generator that was gone"),
        lambda: in_windows("generator"), in_windows,
    ),
    Pair(
        "clipped after each micro-batch", "left_over_gradients", "into",
        ("the gradient of into.weight", "is written to between two backward passes", "loop over"),
        lambda: in_windows("micro-batch"), in_windows, warns=True,
    ),
    Pair(
        "clipped after the step, then cleared", "gradient_path", "into",
        ("is written to after the optimizer stepped on it", "before"),
        lambda: in_windows("after"), in_windows,
    ),
    Pair(
        "clipped under a loss scale", "gradient_factor", "",
        ("what is clipped has a loss scale of 1024 in it still", "scaler.unscale_(optimizer)"),
        lambda: clipped_while_scaled(False), lambda: clipped_while_scaled(True),
    ),
    Pair(
        "schedule with each micro-batch", "optimizer_settings", "",
        ("SGD takes one step where its schedule takes several", "in the loop over micro-batches"),
        lambda: in_windows("schedule"), in_windows, warns=True,
    ),
    Pair(
        "window that is not full", "batch_influence", "",
        ("1 of 5 backward passes of a call are cleared by the next", "the last window"),
        lambda: in_windows("trailing"), in_windows, warns=True,
    ),
    Pair(
        "one of two groups planned", "optimizer_settings", "",
        ("SGD has groups of one rate, of which only some follow its schedule", "first group"),
        lambda: planned(1), lambda: planned(2), warns=True,
    ),
    Pair(
        "rate where a factor is asked for", "parameter_updates", "",
        ("SGD steps with a rate of 0.0005, where its schedule starts from 0.1", "LambdaLR"),
        lambda: multiplied(0.005), lambda: multiplied(0.004), warns=True,
    ),
    Pair(
        "frozen with a gradient of zeros", "parameter_updates", "into",
        ("2 frozen parameters go on moving", "set .grad to None as you freeze"),
        lambda: freezing("kept"), lambda: freezing(""),
    ),
    Pair(
        "thawed by the step", "parameter_updates", "into",
        ("the step sets requires_grad of 2 frozen parameters", "a loop over all parameters"),
        lambda: freezing("thawed"), lambda: freezing(""), warns=True,
    ),
    Pair(
        "dropout again by another mask", "training_mode", "between.0.part",
        ("the backward pass runs between.0.part again by other random numbers", "preserve_rng"),
        lambda: again(nn.Dropout(0.5), preserve_rng_state=False), lambda: again(nn.Dropout(0.5)),
    ),
    Pair(
        "batch norm again", "running_statistics", "between.0.part",
        ("statistics of between.0.part take each batch twice", "out of a checkpoint"),
        lambda: again(nn.BatchNorm1d(8)), lambda: again(nn.LayerNorm(8)), warns=True,
    ),
    Pair(
        "teacher in training mode", "training_mode", "teacher.between.0",
        ("the dropout of teacher.between.0 is on, though it only runs without", "call eval()"),
        lambda: taught(True), lambda: taught(False), warns=True,
    ),
    Pair(
        "scale in no optimizer", "trained_parameters", "",
        ("1 parameters outside of the model get a gradient in each call", ": scale", "a loss"),
        lambda: with_scale(False), lambda: with_scale(True), warns=True,
    ),
    Pair(
        "gradient of the loss before", "left_over_gradients", "into",
        ("another optimizer has stepped on a part of the gradient of into.weight", "are not clear"),
        lambda: two_losses(False), lambda: two_losses(True), warns=True,
    ),
    Pair(
        "beside itself", "gradient_factor", "",
        ("does not change along the gradient that the optimizer steps on", "with itself"),
        lambda: beside(True), lambda: beside(False), warns=True,
    ),
    Pair(
        "clipped after the step", "gradient_path", "into",
        ("is written to after the optimizer stepped on it", "before"),
        lambda: clipped("after"), lambda: clipped("before"),
    ),
    Pair(
        "passes not divided, then clipped", "gradient_factor", "",
        ("the gradient that is clipped is 4.001 times the slope", "4 micro-batches"),
        lambda: clipped("before", 4), lambda: clipped("divided", 4),
    ),
    Pair(
        "one of two optimizers never steps", "parameter_updates", "into",
        ("SGD, which holds into.weight, never steps, and gradients of what it holds are", "step()"),
        lambda: two_optimizers(False), lambda: two_optimizers(True),
    ),
    Pair(
        "state emptied", "optimizer_settings", "",
        ("Adam has lost its state, its averages, before each later call", "state.clear()"),
        lambda: emptied(True), lambda: emptied(False),
    ),
    Pair(
        "schedule before the optimizer", "optimizer_settings", "",
        ("SGD steps after its schedule", "after optimizer.step()"),
        lambda: early(True), lambda: early(False), warns=True,
    ),
    Pair(
        "a parameter twice", "optimizer_settings", "",
        ("SGD holds a parameter twice in a group", "keep each once"),
        lambda: listed(True), lambda: listed(False),
    ),
    Pair(
        "epsilon of zero", "update_size", "into",
        ("the optimizer writes NaN or infinity into into.weight", "eps=0"),
        lambda: unprotected(0.0), lambda: unprotected(1e-8),
    ),
    Pair(
        "rate that falls tenfold", "parameter_updates", "",
        ("the learning rate of SGD falls from 0.1 to 0.001 in 3 calls",),
        lambda: scheduled(0.1), lambda: scheduled(0.5), warns=True,
    ),
    Pair(
        "batch written to", "batch_influence", "", ("the step writes to its batch", "on a copy"),
        lambda: centred(True), lambda: centred(False), warns=True,
    ),
    Pair(
        "graph carried over", "later_calls", "",
        ("call 2 of the step raises RuntimeError: Trying to backward", "detach() it"),
        lambda: carried(False), lambda: carried(True),
    ),
    Pair(
        "losses kept with their graph", "later_calls", "",
        ("history grows by the graph of every call", ".item()"),
        lambda: logged(False), lambda: logged(True),
    ),
    Pair(
        "rate far too large", "later_calls", "", ("on one batch the loss grows from", "by call 2"),
        lambda: squares(30.0), lambda: squares(0.05),
    ),
    Pair(
        "a layer in no optimizer", "trained_parameters", "into",
        ("2 of 4 trainable parameters get a gradient and are in no optimizer", "into.weight, into"),
        lambda: held("out"), headless,
    ),
    Pair(
        "a layer that no hand moves", "trained_parameters", "into",
        ("2 of 4 trainable parameters get a gradient and are not moved by the step", "into.weight"),
        lambda: by_hand(skips="into"), by_hand,
    ),
    Pair(
        "optimizer of a copy", "trained_parameters", "",
        ("SGD holds 4 tensors, and none of them is one of the model's 4 parameters", "or copy"),
        lambda: of_copy(True), lambda: of_copy(False),
    ),
    Pair(
        "a part without gradients", "trained_parameters", "into",
        ("2 parameters that the optimizer holds never get a gradient", "gradients off", "no_grad"),
        lambda: ungraded(False), lambda: ungraded(True),
    ),
    Pair(
        "no backward pass", "parameter_updates", "",
        ("no parameter moves in 3 calls of the step: no backward pass", "loss.backward() is miss"),
        lambda: stepping(no_backward), lambda: stepping(usual),
    ),
    Pair(
        "moved by hand nowhere", "parameter_updates", "",
        ("no optimizer steps, although there are gradients", "not in place"),
        lambda: by_hand(skips=""), by_hand,
    ),
    Pair(
        "cleared before the step", "parameter_updates", "",
        ("when the optimizer steps there is no gradient any more", "between backward() and step()"),
        lambda: stepping(after(cleared_too_late)), lambda: stepping(after(lambda *_: None)),
    ),
    Pair(
        "a rate that falls to zero", "parameter_updates", "",
        ("the learning rate of SGD falls from 0.1 to exactly 0 after the first call",),
        lambda: scheduled(0.0), lambda: scheduled(0.5),
    ),
    Pair(
        "micro-batches not divided", "gradient_factor", "",
        ("steps on is 4 times the slope", "4 micro-batches"),
        lambda: chunks(False), lambda: chunks(True),
    ),
    Pair(
        "scale not removed", "gradient_factor", "",
        ("steps on is 204", "times the slope", "a loss scale of 2048 that is never removed"),
        lambda: scaled(False), lambda: scaled(True),
    ),
    Pair(
        "sign of the loss", "gradient_factor", "",
        ("climbs the loss that the step returns: its gradient is -1 times the slope", "flipped"),
        lambda: negated(-1.0), lambda: negated(1.0), warns=True,
    ),
    Pair(
        "one loss of several", "gradient_factor", "",
        ("the gradient that the optimizer steps on is -", "times the slope", "one of several"),
        lambda: several(-1.0), lambda: several(1.0), warns=True,
    ),
    Pair(
        "scaled loss of a generator", "gradient_factor", "",
        ("is 8 times the slope of the loss that the step returns",),
        lambda: generated("scaled"), lambda: generated("both"), warns=True,
    ),
    Pair(
        "weights moved by hand on a scaled loss", "gradient_factor", "",
        ("4 micro-batches, or a sum over 4 samples, that are not divided",),
        lambda: by_hand(factor=4), by_hand, warns=True,
    ),
    Pair(
        "never cleared", "left_over_gradients", "into",
        ("still there when it steps again: into.weight", "zero_grad() is missing"),
        lambda: ordered("forward backward step"), lambda: ordered("forward backward step clear"),
    ),
    Pair(
        "stepped first, never cleared", "left_over_gradients", "into",
        ("still there when it steps again: into.weight", "zero_grad() is missing"),
        lambda: ordered("step forward backward"), lambda: ordered("step clear forward backward"),
    ),
    Pair(
        "stepped first on nothing", "parameter_updates", "",
        ("when the optimizer steps there is no gradient any more", "stands before backward()"),
        lambda: ordered("clear step forward backward"),
        lambda: ordered("step forward clear backward"),
    ),
    Pair(
        "moved by hand, never cleared", "left_over_gradients", "into",
        ("still there when it steps again: into.weight", "zero_grad() is missing"),
        lambda: by_hand(clears=False), by_hand,
    ),
    Pair(
        "stepped twice", "left_over_gradients", "into",
        ("still there when it steps again: into.weight", "step() is called twice"),
        lambda: twice(True), lambda: twice(False),
    ),
    Pair(
        "closure that does not clear", "left_over_gradients", "into",
        ("still there when it steps again: into.weight", "outside of a closure"),
        lambda: lbfgs(False), lambda: lbfgs(True),
    ),
    Pair(
        "half of the batch", "batch_influence", "",
        ("the second half of the batch (8 samples) has no influence", "a slice of the batch"),
        lambda: sliced(8), lambda: sliced(9),
    ),
    Pair(
        "another batch", "batch_influence", "",
        ("none of the 16 samples of the batch has an influence", "another batch"),
        lambda: around(True), lambda: around(False),
    ),
    Pair(
        "evaluation mode", "training_mode", "",
        ("the model trains in evaluation mode, without dropout or statistics", "between.1"),
        lambda: in_mode(False), lambda: in_mode(False, calls_train=True),
    ),
    Pair(
        "a part in evaluation mode", "training_mode", "between.0",
        ("a part of the model trains in evaluation mode", "between.0, between.1"),
        lambda: in_mode(False, part="between"), lambda: in_mode(True, part="between"), warns=True,
    ),
    Pair(
        "a term added too late", "gradient_path", "gate",
        ("depends on 2 parameters that the optimizer holds and that never", "gate.weight"),
        lambda: penalised(True), lambda: penalised(False),
    ),
    Pair(
        "gradients masked", "gradient_path", "into",
        ("into.weight, into.bias has a gradient after the backward pass, and zeros", "mask"),
        lambda: masked("out"), lambda: masked(""), warns=True,
    ),
    Pair(
        "both factors zero", "gradient_path", "down",
        ("down.weight, up.weight is a matrix of zeros whose gradient is zero", "two factors"),
        lambda: adapted(0.0), lambda: adapted(1.0), warns=True,
    ),
    Pair(
        "weights moved up by hand", "update_direction", "",
        ("the step moves the weights up their gradient (cosine 1.00)", "alpha"),
        lambda: by_hand(-0.1), by_hand,
    ),
    Pair(
        "update added", "update_direction", "",
        ("Up climbs its own gradient (cosine 1.00), and the loss rises from", "subtracted"),
        lambda: ascending(True), lambda: ascending(False),
    ),
    Pair(
        "perturbation kept", "update_direction", "",
        ("the step moves the weights up their gradient (cosine 0.", "sharpness"),
        lambda: perturbed(False), lambda: perturbed(True),
    ),
    Pair(
        "likelihood minimised", "update_direction", "",
        ("cannot be positive, and is minimised", "the minus of a negative log-likelihood"),
        lambda: likelihood(False), lambda: likelihood(True),
    ),
    Pair(
        "steps as large as the weights", "update_size", "out",
        ("call 1 changes weights by", "the median over 2 matrices", "learning rate is too large"),
        lambda: at_rate(5.0, torch.optim.Adam), lambda: at_rate(1e-2, torch.optim.Adam),
    ),
    Pair(
        "weight decay of the wrong size", "update_size", "",
        ("the weight decay of SGD takes 10% of the weights in each step",),
        lambda: at_rate(0.1, weight_decay=1.0), lambda: at_rate(0.1, weight_decay=1e-2),
    ),
    Pair(
        "updates below bfloat16", "update_precision", "into",
        ("of the bfloat16 weights that have a gradient stay the same, bit for bit", "autocast"),
        lambda: halved(1e-4), lambda: halved(0.5),
    ),
    Pair(
        "betas swapped", "optimizer_settings", "",
        ("the betas of Adam are 0.999 and 0.9", "the wrong way round"),
        lambda: at_rate(1e-2, torch.optim.Adam, betas=(0.999, 0.9)),
        lambda: at_rate(1e-2, torch.optim.Adam),
    ),
    Pair(
        "frozen by an attribute", "optimizer_settings", "",
        ("into has an attribute requires_grad that freezes nothing", "call requires_grad_(False)"),
        lambda: frozen_by(True), lambda: frozen_by(False),
    ),
    Pair(
        "seed in the step", "optimizer_settings", "",
        ("every call draws the very same random numbers", "a seed is set in the step"),
        lambda: seeded(True), lambda: seeded(False),
    ),
    Pair(
        "statistics that stand still", "running_statistics", "between.0",
        ("the running statistics of between.0 do not move in training", "momentum=0"),
        lambda: normalised(0.0), lambda: normalised(0.1),
    ),
    Pair(
        "statistics of the last batch", "running_statistics", "between.0",
        ("the running statistics of between.0 are made of the latest batch", "0.1 as a rule"),
        lambda: normalised(0.9), lambda: normalised(0.1), warns=True,
    ),
    Pair(
        "embeddings untied", "weight_ties", "head",
        ("head.weight is tied to embedding.weight by the configuration", "model.tie_weights()"),
        lambda: tied(False), lambda: tied(True),
    ),
    Pair(
        "head copied after it was tied", "weight_ties", "head",
        ("head.weight is tied to embedding.weight by its class (_tied_weights_keys)", "copied"),
        lambda: declared(True), lambda: declared(False),
    ),
    Pair(
        "batch that is not learnt", "overfitting", "",
        ("on one batch the loss falls from", "by 0.", "far off"),
        lambda: overfitted(1e-5), lambda: overfitted(1.0),
    ),
    Pair(
        "count that is not saved", "resumption", "",
        ("the step after loading the saved state differs: the loss is another", "persistent=False"),
        lambda: resumed(False), lambda: resumed(True),
    ),
    Pair(
        "targets of the first batch", "resumption", "",
        ("uses what an earlier batch left: after other samples the loss differs", "are kept"),
        lambda: with_targets_of(True), lambda: with_targets_of(False),
    ),
]  # fmt: skip
