"""Healthy training steps by their optimizer: of torch, by hand, with closures, and what follows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.healthy_steps import controls_of, descend, entropy, usual
from corpus.models.parts import SmallLM, perceptron
from corpus.models.small import (
    CNN,
    GPT,
    LSTM,
    MLP,
    Autoencoder,
    Recommender,
    ResNet,
    ViT,
    flat,
    he,
    images,
    itself,
    language_loss,
    next_words,
    patients,
    plain,
    ratings,
    tumours,
    words,
)
from corpus.subject import Training

SHELF = Shelf("training", "blind")
control = controls_of(SHELF)
optim = torch.optim


# ---- optimizers of torch -------------------------------------------------------------------------

Make = Callable[[Any], torch.optim.Optimizer]


def plainly(
    name: str, model: Callable[[], nn.Module], batch: Callable[[], Any], make: Make
) -> None:
    """Add the usual step with an optimizer made of the parameters."""

    def build() -> Training:
        made = model()
        return Training(made, make(made.parameters()), usual, batch())

    SHELF.control(name, build)


def small() -> nn.Module:
    return perceptron(64, 32, 10)


def deep() -> nn.Module:
    return he(plain(64, *[48] * 8, 10))


plainly("plain SGD", MLP, lambda: flat(32), lambda p: optim.SGD(p, lr=0.1))
plainly("SGD with Nesterov momentum and decay", CNN, lambda: images(32), lambda p: optim.SGD(
    p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4))  # fmt: skip
plainly("SGD with dampening", deep, lambda: flat(32), lambda p: optim.SGD(
    p, lr=0.02, momentum=0.9, dampening=0.5))  # fmt: skip
plainly("Adam", ViT, lambda: images(24), lambda p: optim.Adam(p, lr=1e-3))
plainly("AMSGrad", small, lambda: flat(32), lambda p: optim.Adam(p, lr=3e-3, amsgrad=True))
plainly("Adam with decay in the gradient", LSTM, lambda: words(24), lambda p: optim.Adam(
    p, lr=3e-3, weight_decay=1e-2))  # fmt: skip
plainly("AdamW with strong decoupled decay", ResNet, lambda: images(16), lambda p: optim.AdamW(
    p, lr=2e-3, weight_decay=0.3, betas=(0.9, 0.95)))  # fmt: skip
plainly("AdamW, fused", MLP, lambda: flat(32), lambda p: optim.AdamW(p, lr=2e-3, fused=True))
plainly("Adam over all tensors at once", deep, lambda: flat(48), lambda p: optim.Adam(
    p, lr=1e-3, foreach=True))  # fmt: skip
plainly("Adam with an epsilon of one", small, lambda: flat(32), lambda p: optim.Adam(
    p, lr=0.3, eps=1.0))  # fmt: skip
plainly("Adam without momentum", CNN, lambda: images(24), lambda p: optim.Adam(
    p, lr=1e-3, betas=(0.0, 0.99)))  # fmt: skip
plainly("NAdam", small, lambda: flat(32), lambda p: optim.NAdam(p, lr=3e-3))
plainly("RAdam, whose first steps are plain momentum", MLP, lambda: flat(32), lambda p: optim.RAdam(
    p, lr=3e-3))  # fmt: skip
plainly("Adamax", small, lambda: flat(64), lambda p: optim.Adamax(p, lr=5e-3))
plainly("RMSprop as TensorFlow has it", CNN, lambda: images(32), lambda p: optim.RMSprop(
    p, lr=0.016, alpha=0.9, eps=1.0, momentum=0.9, weight_decay=1e-5))  # fmt: skip
plainly("RMSprop, centred", LSTM, lambda: words(32), lambda p: optim.RMSprop(
    p, lr=1e-3, centered=True))  # fmt: skip
plainly("Adagrad", small, lambda: flat(32), lambda p: optim.Adagrad(
    p, lr=0.05, initial_accumulator_value=0.1))  # fmt: skip
plainly("Adadelta, whose first steps are tiny", CNN, lambda: images(32), lambda p: optim.Adadelta(
    p, lr=1.0))  # fmt: skip
plainly("averaged SGD", small, lambda: flat(32), lambda p: optim.ASGD(p, lr=0.1, t0=5))
plainly("resilient propagation on the full batch", small, lambda: flat(64), lambda p: optim.Rprop(
    p, lr=1e-3))  # fmt: skip
plainly("Adafactor", ViT, lambda: images(24), lambda p: optim.Adafactor(p, lr=1e-2))


@control("Adafactor of transformers, with a rate of its own that begins at a millionth")
def relative_adafactor() -> Training:
    from transformers import Adafactor

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        ids, after = batch
        return descend(optimizer, language_loss(model(ids), after))

    model = SmallLM()
    optimizer = Adafactor(
        model.parameters(), lr=None, scale_parameter=True, relative_step=True, warmup_init=True
    )
    return Training(model, optimizer, step, next_words(16))


def both_step(model: Any, optimizer: Any, batch: Any) -> Tensor:
    """Do a step of a language model with several optimizers."""
    ids, after = batch
    loss = language_loss(model(ids), after)
    for one in optimizer:
        one.zero_grad()
    loss.backward()
    for one in optimizer:
        one.step()
    return loss


@control("Muon on matrices, AdamW on the rest")
def muon() -> Training:
    model = GPT(depth=2)
    hidden = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not other for other in hidden)]
    optimizers = optim.Muon(hidden, lr=0.02, weight_decay=0.01), optim.AdamW(rest, lr=3e-3)
    return Training(model, optimizers, both_step, next_words(16))


@control("sparse gradients of embeddings with SparseAdam, the rest with Adam")
def sparse_adam() -> Training:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(18, 24, sparse=True)
            self.rest = perceptron(24, 32, 18)

        def forward(self, ids: Tensor) -> Tensor:
            return self.rest(self.words(ids))

    model = Counter()
    optimizers = (
        optim.SparseAdam(list(model.words.parameters()), lr=1e-2),
        optim.Adam(model.rest.parameters(), lr=1e-3),
    )
    return Training(model, optimizers, both_step, next_words(16))


@control("summed embeddings with sparse gradients under SGD")
def sparse_bags() -> Training:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.out = nn.EmbeddingBag(18, 24, sparse=True), nn.Linear(24, 10)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.bag(ids))

    model = Bags()
    return Training(model, optim.SGD(model.parameters(), lr=0.5), usual, words(32))


@control("rows of embeddings that are not in the batch stand still")
def absent_rows() -> Training:
    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["users"], batch["items"])
        loss = F.binary_cross_entropy_with_logits(scores, batch["liked"])
        return descend(optimizer, loss)

    model = Recommender()
    (users, items), liked = ratings(16)
    batch = {"users": users, "items": items, "liked": liked}
    return Training(model, optim.Adagrad(model.parameters(), lr=0.1), step, batch)


# ---- optimizers that call the loss ---------------------------------------------------------------


def with_closure(
    model: nn.Module, optimizer: Any, batch: Any, loss: Any = F.cross_entropy
) -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = loss(model(x), y)
            value.backward()
            return value

        return optimizer.step(closure)

    return Training(model, optimizer, step, batch)


@control("LBFGS with a line search")
def strong_wolfe() -> Training:
    model = perceptron(10, 16, 1, act=nn.Tanh)
    optimizer = optim.LBFGS(model.parameters(), max_iter=10, line_search_fn="strong_wolfe")
    return with_closure(model, optimizer, patients(64), F.mse_loss)


@control("LBFGS with a fixed rate")
def fixed_lbfgs() -> Training:
    model = nn.Linear(30, 1)
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=10, history_size=5)
    return with_closure(model, optimizer, tumours(64), F.binary_cross_entropy_with_logits)


@control("LBFGS with one iteration in each step")
def single_lbfgs() -> Training:
    model = perceptron(64, 24, 10, act=nn.Tanh)
    optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=1)
    return with_closure(model, optimizer, flat(64))


@control("LBFGS whose loss is called once more after the step")
def lbfgs_and_loss() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> float:
        x, y = batch

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) + 1e-4 * sum(
                p.square().sum() for p in model.parameters()
            )
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            return F.mse_loss(model(x), y).item()

    model = perceptron(10, 16, 16, 1, act=nn.Tanh)
    optimizer = optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    return Training(model, optimizer, step, patients(64))


@control("SGD given a closure")
def sgd_with_closure() -> Training:
    model = CNN()
    return with_closure(model, optim.SGD(model.parameters(), lr=0.05, momentum=0.9), images(32))


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al. 2021), as its usual implementation has it."""

    def __init__(
        self, parameters: Any, base: Any, rho: float = 0.05, adaptive: bool = False, **options: Any
    ) -> None:
        super().__init__(parameters, {"rho": rho, "adaptive": adaptive, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = self.norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                weight = p.square() if group["adaptive"] else 1.0
                p.add_(weight * p.grad * group["rho"] / (norm + 1e-12))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.base.param_groups = self.param_groups

    def norm(self) -> Tensor:
        return torch.stack(
            [
                ((p.abs() if group["adaptive"] else 1.0) * p.grad).norm()
                for group in self.param_groups
                for p in group["params"]
            ]
        ).norm()


@control("sharpness-aware, in two steps")
def sharpness() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = entropy(model, batch)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        entropy(model, batch).backward()
        optimizer.second_step(zero_grad=True)
        return loss

    model = CNN()
    optimizer = Sharpness(model.parameters(), optim.SGD, lr=0.05, momentum=0.9)
    return Training(model, optimizer, step, images(32))


@control("sharpness-aware with a closure, adaptive")
def adaptive_sharpness() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        def closure() -> Tensor:
            loss = entropy(model, batch)
            loss.backward()
            return loss

        loss = closure()
        optimizer.step(closure)
        optimizer.zero_grad()
        return loss

    model = perceptron(64, 32, 10)
    optimizer = Sharpness(model.parameters(), optim.SGD, rho=0.5, adaptive=True, lr=0.1)
    return Training(model, optimizer, step, flat(32))


@control("weights shifted and put back by hand around the second backward")
def shifted_by_hand() -> Training:
    """Adversarial weights, as the fast gradient method has them for embeddings."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = entropy(model, batch)
        optimizer.zero_grad()
        loss.backward()
        table = model.embedding.weight
        kept = table.data.clone()
        table.data.add_(0.5 * table.grad / table.grad.norm().clamp(min=1e-8))
        entropy(model, batch).backward()
        table.data = kept
        optimizer.step()
        return loss

    model = LSTM()
    return Training(model, optim.Adam(model.parameters(), lr=3e-3), step, words(24))


# ---- optimizers by hand --------------------------------------------------------------------------


class Lookahead(torch.optim.Optimizer):
    """Slow weights that the fast ones come back to every few steps (Zhang et al. 2019)."""

    def __init__(self, fast: torch.optim.Optimizer, every: int = 5, alpha: float = 0.5) -> None:
        super().__init__([p for g in fast.param_groups for p in g["params"]], {})
        self.fast, self.every, self.alpha = fast, every, alpha
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"slow": p.detach().clone(), "steps": 0}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"fast": self.fast.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fast.load_state_dict(state["fast"])
        super().load_state_dict({name: state[name] for name in ("state", "param_groups")})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.fast.step(closure)
        for p, state in self.state.items():
            state["steps"] += 1
            if state["steps"] % self.every == 0:
                state["slow"].lerp_(p, self.alpha)
                p.copy_(state["slow"])
        return loss


@control("lookahead around Adam")
def lookahead() -> Training:
    model = perceptron(64, 32, 10)
    return Training(model, Lookahead(optim.Adam(model.parameters(), lr=3e-3)), usual, flat(32))


class Written(torch.optim.Optimizer):
    """Calls a rule on each parameter that has a gradient, with its state and its group."""

    def __init__(self, parameters: Any, rule: Any, **options: Any) -> None:
        super().__init__(parameters, options)
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.rule(p, p.grad, self.state[p], group)


def lion(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    mean = state.setdefault("mean", torch.zeros_like(p))
    p.mul_(1 - group["lr"] * group["decay"])
    p.add_(mean.lerp(grad, 0.1).sign(), alpha=-group["lr"])
    mean.lerp_(grad, 0.01)


def lars(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if p.ndim > 1:
        grad = grad + group["decay"] * p
        grad = grad * (group["trust"] * p.norm() / grad.norm().clamp(min=1e-9))
    mean = state.setdefault("mean", torch.zeros_like(p))
    mean.mul_(0.9).add_(grad)
    p.add_(mean, alpha=-group["lr"])


def lamb(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(grad, 0.1)
    square = state.setdefault("square", torch.zeros_like(p)).lerp_(grad.square(), 0.01)
    state["steps"] = done = state.get("steps", 0) + 1
    move = (mean / (1 - 0.9**done)) / ((square / (1 - 0.99**done)).sqrt() + 1e-6)
    move += group["decay"] * p
    trust = p.norm() / move.norm() if p.norm() > 0 and move.norm() > 0 else 1.0
    p.add_(move * trust, alpha=-group["lr"])


def langevin(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    rate = group["lr"]
    p.add_(grad, alpha=-rate / 2).add_(torch.randn_like(p), alpha=(rate * 1e-5) ** 0.5)


def hyperball(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if p.ndim > 1:
        size = p.norm()
        p.sub_(group["lr"] * size * grad / grad.norm().clamp(min=1e-9))
        p.mul_(size / p.norm())
    else:
        p.sub_(group["lr"] * grad)


@control("Lion")
def lion_on_digits() -> Training:
    model = ViT()
    return Training(model, Written(model.parameters(), lion, lr=3e-4, decay=0.1), usual, images(16))


@control("rates relative to the norm of each layer, with momentum")
def layerwise_rates() -> Training:
    """LARS (You et al. 2017)."""
    model = CNN()
    optimizer = Written(model.parameters(), lars, lr=1.0, trust=0.02, decay=1e-4)
    return Training(model, optimizer, usual, images(32))


@control("LAMB")
def lamb_on_digits() -> Training:
    model = MLP()
    return Training(model, Written(model.parameters(), lamb, lr=0.01, decay=0.01), usual, flat(32))


@control("Langevin dynamics: noise in each step of the weights")
def langevin_on_digits() -> Training:
    model = perceptron(64, 32, 10)
    return Training(model, Written(model.parameters(), langevin, lr=0.1), usual, flat(32))


@control("steps on a sphere: the norm of each matrix is kept")
def spherical() -> Training:
    model = perceptron(64, 48, 48, 10)
    return Training(model, Written(model.parameters(), hyperball, lr=0.02), usual, flat(32))


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al. 2024): other weights in evaluation than in training."""

    def __init__(self, parameters: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "steps": 0, "train": True})

    @torch.no_grad()
    def switch(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train"] != train:
                weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
                group["train"] = train

    def train(self) -> None:
        self.switch(True)

    def eval(self) -> None:
        self.switch(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            weight, beta = 1 / group["steps"], group["beta"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, weight).sub_(p.grad, alpha=group["lr"] * (1 - beta * (1 - weight)))
                z.sub_(p.grad, alpha=group["lr"])


@control("schedule-free, with weights of their own for a look at the batch in evaluation")
def schedule_free() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        model.train()
        optimizer.train()
        loss = usual(model, optimizer, batch)
        model.eval()
        optimizer.eval()
        with torch.no_grad():
            entropy(model, batch)
        model.train()
        optimizer.train()
        return loss

    model = MLP()
    return Training(model, ScheduleFree(model.parameters(), 0.5), step, flat(32))


# ---- steps whose optimizer works elsewhere -------------------------------------------------------


@control("each parameter stepped within backward, by an optimizer of its own")
def in_backward() -> Training:
    model = perceptron(64, 32, 32, 10)
    owners = {p: optim.Adam([p], lr=2e-3) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        owners[parameter].step()
        owners[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = entropy(model, batch)
        loss.backward()
        return loss.detach()

    return Training(model, tuple(owners.values()), step, flat(32))


@control("SGD fused into backward")
def fused_into_backward() -> Training:
    model = perceptron(64, 48, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.05)

    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-optimizer.param_groups[0]["lr"])
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step(model: Any, optimizer: Any, batch: Any) -> float:
        loss = entropy(model, batch)
        loss.backward()
        return loss.item()

    return Training(model, optimizer, step, flat(32))


@control("bfloat16 weights that are copied from masters in float32")
def masters() -> Training:
    model = perceptron(64, 48, 10).bfloat16()
    copies = [p.detach().float().clone().requires_grad_() for p in model.parameters()]

    def step(model: Any, optimizer: Any, batch: Any) -> float:
        x, y = batch
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
        loss.backward()
        for master, parameter in zip(copies, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        nn.utils.clip_grad_norm_(copies, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(copies, model.parameters(), strict=True):
                parameter.copy_(master)
        model.zero_grad()
        return loss.item()

    return Training(model, optim.Adam(copies, lr=2e-3), step, flat(32))


@control("everything in bfloat16, with Adam")
def all_brain_floats() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        ids, after = batch
        return descend(optimizer, language_loss(model(ids).float(), after))

    model = SmallLM().bfloat16()
    return Training(model, optim.AdamW(model.parameters(), lr=3e-3), step, next_words(16))


@control("reward that is maximised")
def maximised() -> Training:
    """A policy of a bandit whose reward is the right label: the reward rises."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        reward = model(x).softmax(1).gather(1, y[:, None]).mean()
        return descend(optimizer, reward)

    model = perceptron(64, 32, 10)
    return Training(model, optim.Adam(model.parameters(), lr=3e-3, maximize=True), step, flat(32))


@control("objective that is minimised by its negative, and returned as it is")
def negated() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        likelihood = model(x).log_softmax(1).gather(1, y[:, None]).mean()
        descend(optimizer, -likelihood)
        return likelihood.detach()

    model = MLP()
    return Training(model, optim.SGD(model.parameters(), lr=0.1), step, flat(32))


@control("gradients estimated from the losses of shifted weights")
def evolved() -> Training:
    """Evolution strategies with mirrored samples (Salimans et al. 2017): no backward at all."""

    @torch.no_grad()
    def step(model: Any, optimizer: Any, batch: Any) -> float:
        parameters = list(model.parameters())
        centre = nn.utils.parameters_to_vector(parameters)
        estimate, losses = torch.zeros_like(centre), []
        for _ in range(12):
            noise = torch.randn_like(centre)
            pair = []
            for sign in (1, -1):
                nn.utils.vector_to_parameters(centre + sign * 0.05 * noise, parameters)
                pair.append(entropy(model, batch).item())
            estimate += (pair[0] - pair[1]) / 0.1 * noise / 12
            losses += pair
        nn.utils.vector_to_parameters(centre, parameters)
        first = 0
        for parameter in parameters:
            parameter.grad = estimate[first : first + parameter.numel()].view_as(parameter).clone()
            first += parameter.numel()
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses) / len(losses)

    model = nn.Linear(64, 10)
    return Training(model, optim.Adam(model.parameters(), lr=1e-2), step, flat(64))


@control("zeroth-order fine-tuning, with noise drawn again from its seed")
def zeroth_order() -> Training:
    """MeZO (Malladi et al. 2023): the weights are shifted in place, and moved without gradients."""

    def shift(model: nn.Module, seed: int, scale: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(noise, alpha=scale)

    @torch.no_grad()
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        seed = int(torch.randint(10**6, ()))
        shift(model, seed, 1e-3)
        above = entropy(model, batch)
        shift(model, seed, -2e-3)
        below = entropy(model, batch)
        shift(model, seed, 1e-3)
        rate = optimizer.param_groups[0]["lr"]
        shift(model, seed, -rate * float(above - below) / 2e-3)
        return above

    model = perceptron(64, 32, 10)
    return Training(model, optim.SGD(model.parameters(), lr=1e-3), step, flat(64))


@control("directional derivatives instead of backward")
def forward_gradients() -> Training:
    """Forward gradients (Baydin et al. 2022)."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        weights = {name: p.detach() for name, p in model.named_parameters()}
        along = {name: torch.randn_like(p) for name, p in weights.items()}

        def loss(weights: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model, weights, batch[0]), batch[1])

        value, slope = torch.func.jvp(loss, (weights,), (along,))
        for name, parameter in model.named_parameters():
            parameter.grad = slope * along[name]
        optimizer.step()
        optimizer.zero_grad()
        return value

    model = nn.Sequential(nn.Linear(64, 10))
    return Training(model, optim.SGD(model.parameters(), lr=2e-3), step, flat(64))


# ---- groups, and what is done to weights after the step ------------------------------------------


@control("no decay of biases and norms")
def undecayed() -> Training:
    model = ViT()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return Training(model, optim.AdamW(groups, lr=1e-3), usual, images(16))


@control("rates that fall from the head to the first layer")
def layerwise_decay() -> Training:
    model = ViT()
    parts = [model.patches, model.blocks[0], model.blocks[1], model.norm, model.head]
    groups = [
        {"params": list(part.parameters()), "lr": 3e-3 * 0.3 ** (4 - place)}
        for place, part in enumerate(parts)
    ]
    groups.append({"params": [model.token, model.position], "lr": 1e-5})
    return Training(model, optim.AdamW(groups), usual, images(16))


@control("backbone at a hundredth of the rate of its head")
def slow_backbone() -> Training:
    model = nn.Sequential(perceptron(64, 48, 32), nn.ReLU(), nn.Linear(32, 10))
    groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2].parameters()}]
    return Training(model, optim.SGD(groups, lr=0.1, momentum=0.9), usual, flat(32))


@control("group with a rate of zero for now")
def group_at_rest() -> Training:
    model = nn.Sequential(perceptron(64, 48, 32), nn.ReLU(), nn.Linear(32, 10))
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    return Training(model, optim.Adam(groups, lr=3e-3), usual, flat(32))


@control("rates by the width of each layer")
def width_scaled() -> Training:
    """Maximal update parametrisation (Yang et al. 2022), for Adam."""
    model = perceptron(64, 128, 128, 10)
    groups = [
        {"params": [p], "lr": 5e-3 * (16 / p.shape[1] if p.ndim > 1 else 1)}
        for p in model.parameters()
    ]
    return Training(model, optim.Adam(groups), usual, flat(32))


@control("penalty of all weights written into the loss")
def written_decay() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters() if p.ndim > 1)
        return descend(optimizer, entropy(model, batch) + 1e-3 * penalty)

    model = MLP()
    return Training(model, optim.SGD(model.parameters(), lr=0.1), step, flat(32))


def projected(model: nn.Module, optimizer: Any, batch: Any, project: Any, loss: Any) -> Training:
    """Return a training that changes the weights after each step."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        value = descend(optimizer, loss(model(x), y))
        with torch.no_grad():
            project(model)
        return value

    return Training(model, optimizer, step, batch)


@control("small weights set to zero after each step")
def proximal() -> Training:
    """Soft thresholds for the lasso."""
    model = nn.Linear(30, 1)
    return projected(
        model, optim.SGD(model.parameters(), lr=0.2), tumours(64),
        lambda model: model.weight.copy_(F.softshrink(model.weight, 0.02)),
        F.binary_cross_entropy_with_logits)  # fmt: skip


@control("weights below zero clamped after each step")
def non_negative() -> Training:
    model = Autoencoder()
    for parameter in model.decoder[-1].parameters():
        parameter.data.abs_()

    def project(model: Any) -> None:
        model.decoder[-1].weight.clamp_(min=0)

    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    return projected(model, optimizer, itself(32), project, F.mse_loss)


@control("rows held below a norm after each step")
def max_norm() -> Training:
    def project(model: Any) -> None:
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.copy_(layer.weight.renorm(2, 0, 0.5))

    model = perceptron(64, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return projected(model, optimizer, flat(32), project, F.cross_entropy)


@control("rows normalised after each step")
def normalised_rows() -> Training:
    class Cosine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.classes = perceptron(64, 48, 32), nn.Linear(32, 10, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return 8 * self.classes(F.normalize(self.body(x), dim=1))

    model = Cosine()
    model.classes.weight.data = F.normalize(model.classes.weight.data, dim=1)
    return projected(
        model, optim.SGD(model.parameters(), lr=0.1), flat(32),
        lambda model: model.classes.weight.copy_(F.normalize(model.classes.weight, dim=1)),
        F.cross_entropy)  # fmt: skip


@control("pruned weights put back to zero after each step")
def pruned() -> Training:
    """A lottery ticket (Frankle and Carbin 2019)."""
    model = MLP()
    masks = {
        name: (p.abs() > p.abs().median()).float()
        for name, p in model.named_parameters()
        if p.ndim > 1
    }

    def project(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if name in masks:
                parameter.mul_(masks[name])

    with torch.no_grad():
        project(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return projected(model, optimizer, flat(32), project, F.cross_entropy)


@control("weights shrunk and shaken after each step")
def shrunk_and_shaken() -> Training:
    """Shrink and perturb (Ash and Adams 2020), a little of it in each step."""

    def project(model: Any) -> None:
        for parameter in model.parameters():
            parameter.mul_(0.9999).add_(torch.randn_like(parameter), alpha=1e-5)

    model = perceptron(64, 32, 10)
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    return projected(model, optimizer, flat(32), project, F.cross_entropy)


# ---- averages of weights -------------------------------------------------------------------------


@control("moving average of the weights, kept beside")
def averaged() -> Training:
    model = ResNet(8, 2)
    average = optim.swa_utils.AveragedModel(
        model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.99), use_buffers=True
    )

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = usual(model, optimizer, batch)
        average.update_parameters(model)
        return loss

    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    return Training(model, optimizer, step, images(24), (average,))


@control("stochastic weight averaging with its schedule")
def stochastic_averaging() -> Training:
    model = perceptron(64, 32, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.2)
    average = optim.swa_utils.AveragedModel(model)
    schedule = optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=5)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = usual(model, optimizer, batch)
        average.update_parameters(model)
        schedule.step()
        return loss

    return Training(model, optimizer, step, flat(32), (average, schedule))


@control("average that is made in the first step")
def lazy_average() -> Training:
    kept: dict[str, nn.Module] = {}

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = usual(model, optimizer, batch)
        if "average" not in kept:
            kept["average"] = copy.deepcopy(model).requires_grad_(False).eval()
        with torch.no_grad():
            for slow, fast in zip(kept["average"].parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
        return loss

    model = MLP()
    return Training(model, optim.SGD(model.parameters(), lr=0.1), step, flat(32))


@control("average read for a validation, then weights put back")
def swapped() -> Training:
    model = perceptron(64, 32, 10)
    shadow = [p.detach().clone() for p in model.parameters()]

    def step(model: Any, optimizer: Any, batch: Any) -> dict[str, float]:
        loss = usual(model, optimizer, batch)
        parameters = list(model.parameters())
        with torch.no_grad():
            backup = [p.clone() for p in parameters]
            for slow, p in zip(shadow, parameters, strict=True):
                slow.lerp_(p, 0.1)
                p.copy_(slow)
            validation = entropy(model, batch).item()
            for p, old in zip(parameters, backup, strict=True):
                p.copy_(old)
        return {"loss": loss.item(), "validation": validation}

    return Training(model, optim.Adam(model.parameters(), lr=3e-3), step, flat(32))
