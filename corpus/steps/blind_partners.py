"""Reported steps in which several nets, losses or copies meet: rivals, critics, teachers, tasks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import follow, frozen
from corpus.models.reported_steps import (
    CUT,
    EVERYWHERE,
    HELD,
    MODES,
    PILED,
    RAISES,
    SAME,
    SCALED,
    SGD,
    STILL,
    UNGIVEN,
    Adam,
    Pair,
    classified,
    go_down,
    net,
)
from corpus.models.small import MLP, both_targets, flat, itself, patients, words
from corpus.models.trainings import moves
from corpus.subject import Training

SHELF = Shelf("steps", "blind")
report = SHELF.report
GITHUB = "https://github.com/"


# ---- adversaries of the input --------------------------------------------------------------------


@report(
    GITHUB + "yaodongyu/TRADES/issues/32",
    "evaluation mode of the attack left on",
    ("", "*dropout*", "[0-9]*"),
    MODES,
)
def attacked(fixed: bool) -> Training:
    """The attack puts the model into evaluation, and the loss on its samples is taken there."""

    def attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        model.eval()
        shifted = (x + 0.01 * torch.randn_like(x)).requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(shifted), y), shifted)
        if fixed:
            model.train()
        return (x + 0.1 * slope.sign()).detach()

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        model.train()
        shifted = attack(model, x, y)
        return go_down(optimizer, classified(model, batch) + classified(model, (shifted, y)))

    model = net(64, 64, 64, 10, dropout=0.3)
    return Training(model, SGD(model.parameters(), lr=0.05, momentum=0.9), step, flat(32))


@report(
    GITHUB + "locuslab/fast_adversarial/issues/26",
    "gradient of the perturbation never cleared between its steps",
    EVERYWHERE,
    (*PILED, "perturb", "adversar", "leaf", "input"),
)
def projected(fixed: bool) -> Training:
    """Each step of the attack goes along all slopes so far, not along that of where it is."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        delta = torch.zeros_like(x).uniform_(-0.1, 0.1).requires_grad_()
        for _ in range(4):
            loss = F.cross_entropy(model(x + delta), y)
            optimizer.zero_grad()
            loss.backward()
            moved = delta.detach() + 0.08 * delta.grad.sign()
            delta.data = moved.clamp(-0.2, 0.2)
            if fixed:
                delta.grad.zero_()
        return go_down(optimizer, F.cross_entropy(model(x + delta.detach()), y))

    model = MLP()
    return Training(model, SGD(model.parameters(), lr=0.05, momentum=0.9), step, flat(32))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.head = (
            nn.Embedding(18, 24),
            nn.Linear(24, 24),
            nn.Linear(24, 10),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.relu(self.mix(self.tokens(ids))).mean(1))


@report(
    GITHUB + "HuiResearch/epidemicTextMatch/issues/5",
    "adversary that looks for the embedding by another model's name",
    ("", "tokens", "*"),
    ("twice", "double", "same", "adversar", "perturb", "embedding", "repeated", *SCALED),
)
def perturbed_words(fixed: bool) -> Training:
    """No parameter has that name, nothing is perturbed, and each gradient is only doubled."""
    wanted = "tokens" if fixed else "word_embeddings"

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classified(model, batch)
        loss.backward()
        kept = {}
        for name, parameter in model.named_parameters():
            if wanted in name:
                kept[name] = parameter.data.clone()
                parameter.data.add_(parameter.grad / parameter.grad.norm())
        classified(model, batch).backward()
        for name, parameter in model.named_parameters():
            if name in kept:
                parameter.data.copy_(kept[name])
        optimizer.step()
        return loss.detach()

    model = Tagger()
    return Training(model, SGD(model.parameters(), lr=0.1), step, words(32))


@report(
    GITHUB + "xudonmao/VMT/issues/1",
    "inputs and labels mixed in two orders",
    EVERYWHERE,
    ("label", "permut", "shuffl", "target", "order", "mix"),
)
def mixed_apart(fixed: bool) -> Training:
    """The label that is mixed in is that of another sample than the input that is."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        order = torch.randperm(len(x))
        other = order if fixed else torch.randperm(len(y))
        made = model(0.6 * x + 0.4 * x[order])
        loss = 0.6 * F.cross_entropy(made, y) + 0.4 * F.cross_entropy(made, y[other])
        return go_down(optimizer, loss)

    model = MLP()
    return Training(model, SGD(model.parameters(), lr=0.1, momentum=0.9), step, flat(48))


# ---- penalties on where the weights go -----------------------------------------------------------

NOTHING = (*SAME, "no effect", "penalty", "not depend", "term")


@report(
    GITHUB + "ContinualAI/avalanche/issues/1099",
    "penalty between the saved weights and themselves",
    EVERYWHERE,
    NOTHING,
)
def consolidated(fixed: bool) -> Training:
    """The current weight is overwritten by the saved one before the two are compared."""

    def penalty(model: nn.Module) -> Tensor:
        total = torch.zeros(())
        for current, (saved, weight) in zip(model.parameters(), known, strict=True):
            compared = current if fixed else saved
            total = total + (weight * (compared[: len(saved)] - saved).pow(2)).sum()
        return total

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        return go_down(optimizer, classified(model, batch) + penalty(model))

    model = MLP()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    known = [(p.detach().clone(), torch.rand_like(p)) for p in model.parameters()]
    for _ in range(3):
        go_down(optimizer, classified(model, flat(32)))
    return Training(model, optimizer, step, flat(32))


@report(
    GITHUB + "KarhouTam/FL-bench/issues/165",
    "client held to its own weights for the server's",
    EVERYWHERE,
    (*NOTHING, "proximal", "copy"),
)
def federated(fixed: bool) -> Training:
    """The server's weights are kept as references, so the difference is always zero."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        server = list(model.parameters())
        if fixed:
            server = [p.detach().clone() for p in server]
        losses = []
        for x, y in zip(*(t.split(16) for t in batch), strict=True):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            for own, other in zip(model.parameters(), server, strict=True):
                own.grad.data += 0.5 * (own.data - other.data)
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    model = MLP()
    return Training(model, SGD(model.parameters(), lr=0.1), step, flat(48))


def chosen(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the log probability of each row of tokens."""
    scores = model(ids[:, :-1]).log_softmax(-1)
    return scores.gather(-1, ids[:, 1:, None]).sum((1, 2))


@report(
    GITHUB + "YiyangZhou/POVID/issues/11",
    "reference that is the policy itself",
    EVERYWHERE,
    (*SAME, "reference", "moves"),
)
def preferred(fixed: bool) -> Training:
    """No reference was made, so that the policy is compared with itself, and the margin is 0."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        good, bad = batch
        other = model.reference if fixed else model.policy
        with torch.no_grad():
            before = chosen(other, good) - chosen(other, bad)
        now = chosen(model.policy, good) - chosen(model.policy, bad)
        return go_down(optimizer, -F.logsigmoid(0.1 * (now - before)).mean())

    policy = nn.Sequential(nn.Embedding(18, 24), nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 18))
    model = Pair(policy=policy, reference=frozen(copy.deepcopy(policy)))
    pairs = words(16)[0], words(16)[0].flip(1)
    return Training(model, Adam(model.policy.parameters(), lr=1e-3), step, pairs)


# ---- rewards and values --------------------------------------------------------------------------


class Agent(nn.Module):
    """A policy and a critic, each with a net of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.critic = net(2, 32, 4), net(2, 32, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(state), self.critic(state).squeeze(-1)


def taken(logits: Tensor, action: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(1, action[:, None]).squeeze(1)


@report(
    GITHUB + "abhisheksuran/Reinforcement_Learning/issues/4",
    "old probabilities made anew in each epoch",
    ("", "policy", "policy.*"),
    (*SAME, "ratio", "clip", "old"),
)
def proximal(fixed: bool) -> Training:
    """The ratio of new to old is always one, and its clipping never holds anything back."""

    def step(model: Agent, optimizer: Any, batch: Any) -> Tensor:
        state, action, reward, _ = batch
        with torch.no_grad():
            old = taken(model(state)[0], action)
            gain = reward - model(state)[1]
        total = torch.zeros(())
        for _ in range(6):
            logits, value = model(state)
            now = taken(logits, action)
            ratio = (now - (old if fixed else now.detach())).exp()
            gained = torch.min(ratio * gain, ratio.clamp(0.9, 1.1) * gain).mean()
            total += go_down(optimizer, F.mse_loss(value, reward) - gained)
        return total / 6

    model = Agent()
    return Training(model, Adam(model.parameters(), lr=1e-2), step, moves(64))


@report(
    GITHUB + "jsboige/CoursIA/pull/15256",
    "values of the rollout taken as numbers",
    ("", "critic", "critic.*"),
    (*CUT, *STILL),
)
def rolled_out(fixed: bool) -> Training:
    """The critic's loss is computed from numbers, and no gradient reaches it."""

    def step(model: Agent, optimizer: Any, batch: Any) -> Tensor:
        state, action, reward, _ = batch
        logits, value = model(state)
        if not fixed:
            value = torch.tensor([one.item() for one in value])
        gain = (reward - value).detach()
        loss = F.mse_loss(value, reward) - (taken(logits, action) * gain).mean()
        return go_down(optimizer, loss)

    model = Agent()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, moves(64))


@report(
    GITHUB + "astariul/encode-attend-navigate-pytorch/issues/2",
    "critic trained by the policy's loss, too",
    ("", "critic", "critic.*"),
    ("detach", "critic", "policy", "two losses", "both losses", "graph", "gradient of"),
)
def shared_loss(fixed: bool) -> Training:
    """The gain is not cut off, and the policy's loss moves the critic as it likes."""

    def step(model: Agent, optimizer: Any, batch: Any) -> Tensor:
        state, action, reward, _ = batch
        logits, value = model(state)
        gain = reward - value
        if fixed:
            gain = gain.detach()
        loss = F.mse_loss(value, reward) - (taken(logits, action) * gain).mean()
        return go_down(optimizer, loss)

    model = Agent()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, moves(64))


@report(
    GITHUB + "Farama-Foundation/Gymnasium/issues/1494",
    "target of the value moved by its own loss",
    ("", "critic", "critic.*"),
    ("detach", "target", "graph", "bootstrap", "both sides"),
)
def bootstrapped_values(fixed: bool) -> Training:
    """What the critic expects of the next state is a target, and is trained towards this one."""

    def step(model: Agent, optimizer: Any, batch: Any) -> Tensor:
        state, action, reward, following = batch
        logits, value = model(state)
        goal = reward + 0.9 * model.critic(following).squeeze(-1)
        error = (goal.detach() if fixed else goal) - value
        loss = error.pow(2).mean() - (taken(logits, action) * error.detach()).mean()
        return go_down(optimizer, loss)

    model = Agent()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, moves(64))


class Soft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.log_alpha = net(2, 32, 4), nn.Parameter(torch.zeros(()))

    def forward(self, state: Tensor) -> Tensor:
        return self.policy(state)


@report(
    GITHUB + "rail-berkeley/softlearning/issues/163",
    "temperature computed once, when the agent is made",
    ("", "policy*"),
    (*RAISES, *STILL, "graph", "constant"),
)
def tempered(fixed: bool) -> Training:
    """The second step goes back through the exponential of the first, which is gone."""

    def step(model: Soft, optimizers: Any, batch: Any) -> Tensor:
        state, _, reward, _ = batch
        alpha = model.log_alpha.exp() if fixed else made
        logits = model(state).log_softmax(-1)
        entropy = -(logits.exp() * logits).sum(-1)
        go_down(optimizers[1], (alpha * (entropy.detach() - 0.8)).mean())
        value = reward[:, None] * torch.tensor([1.0, 0.5, 0.2, 0.1])
        loss = (logits.exp() * (float(alpha) * logits - value)).sum(-1).mean()
        return go_down(optimizers[0], loss)

    model = Soft()
    made = model.log_alpha.exp()
    optimizers = Adam(model.policy.parameters(), lr=3e-3), Adam([model.log_alpha], lr=3e-2)
    return Training(model, optimizers, step, moves(64))


def workers() -> Pair:
    shared = net(2, 32, 4)
    return Pair(shared=shared, local=copy.deepcopy(shared))


def policy_loss(model: nn.Module, batch: Any) -> Tensor:
    state, action, reward, _ = batch
    return -(taken(model(state), action) * (reward - reward.mean())).mean()


@report(
    GITHUB + "mimoralea/gdrl/issues/25",
    "worker's gradients handed over the first time only",
    ("", "shared", "shared.*"),
    ("stale", "first", "same gradient", "old", "earlier", "not depend", "zero_grad", *UNGIVEN),
)
def handed_over_once(fixed: bool) -> Training:
    """The shared net has a gradient from then on, and is stepped with that one for ever."""

    def step(model: Pair, optimizer: Any, batch: Any) -> Tensor:
        model.local.load_state_dict(model.shared.state_dict())
        model.local.zero_grad()
        loss = policy_loss(model.local, batch)
        loss.backward()
        for own, other in zip(model.local.parameters(), model.shared.parameters(), strict=True):
            if other.grad is None or fixed:
                other.grad = own.grad
        optimizer.step()
        return loss.detach()

    model = workers()
    return Training(model, Adam(model.shared.parameters(), lr=1e-2), step, moves(64))


@report(
    GITHUB + "MorvanZhou/pytorch-A3C/issues/21",
    "worker's own gradients never cleared",
    ("", "local", "local.*", "shared", "shared.*"),
    PILED,
)
def worker_that_piles_up(fixed: bool) -> Training:
    """The optimizer clears those of the shared net, and the worker's pile up."""

    def step(model: Pair, optimizer: Any, batch: Any) -> Tensor:
        loss = policy_loss(model.local, batch)
        optimizer.zero_grad()
        if fixed:
            model.local.zero_grad()
        loss.backward()
        for own, other in zip(model.local.parameters(), model.shared.parameters(), strict=True):
            other.grad = own.grad
        optimizer.step()
        model.local.load_state_dict(model.shared.state_dict())
        return loss.detach()

    model = workers()
    return Training(model, Adam(model.shared.parameters(), lr=1e-2), step, moves(64))


# ---- steps within steps --------------------------------------------------------------------------


@report(
    GITHUB + "KanishJebaMathewM/Truxify/issues/13118",
    "inner steps of meta learning written into the data",
    EVERYWHERE,
    (*CUT, *STILL),
)
def adapted_in_place(fixed: bool) -> Training:
    """The way from the loss on the query back to the weights they began from is lost."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        (x, y), (query, answer) = (tuple(t[i::2] for t in batch) for i in range(2))
        names = [name for name, _ in model.named_parameters()]
        if fixed:
            fast = dict(model.named_parameters())
        else:
            fast = dict(copy.deepcopy(model).named_parameters())
        loss = F.mse_loss(torch.func.functional_call(model, fast, x), y)
        slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
        for name, slope in zip(names, slopes, strict=True):
            if fixed:
                fast[name] = fast[name] - 0.05 * slope
            else:
                fast[name].data -= 0.05 * slope
        made = torch.func.functional_call(model, fast, query)
        return go_down(optimizer, F.mse_loss(made, answer))

    model = MLP(10, 32, 1)
    return Training(model, Adam(model.parameters(), lr=3e-3), step, patients(48))


class Searched(nn.Module):
    """Operations mixed by weights of an architecture."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.ops = nn.ModuleList([nn.Linear(32, 32), net(32, 16, 32), nn.Identity()])
        self.alphas = nn.Parameter(1e-3 * torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        parts = zip(self.alphas.softmax(0), self.ops, strict=True)
        return self.head(F.relu(sum(share * op(x) for share, op in parts)))


@report(
    GITHUB + "automl/ConfigurableOptimizer/pull/173",
    "gradients of the architecture's loss in the weights' step",
    ("", "ops*", "stem", "head"),
    (*PILED, "two losses", "both losses"),
)
def searched(fixed: bool) -> Training:
    """The weights are cleared after both steps, so theirs has the validation loss in it."""

    def step(model: Searched, optimizers: Any, batch: Any) -> Tensor:
        seen, held = (tuple(t[i::2] for t in batch) for i in range(2))
        weights, architecture = optimizers
        architecture.zero_grad()
        classified(model, held).backward()
        architecture.step()
        if fixed:
            weights.zero_grad()
        loss = classified(model, seen)
        loss.backward()
        weights.step()
        weights.zero_grad()
        return loss.detach()

    model = Searched()
    others = [p for name, p in model.named_parameters() if name != "alphas"]
    optimizers = SGD(others, lr=0.05, momentum=0.9), Adam([model.alphas], lr=3e-3)
    return Training(model, optimizers, step, flat(48))


# ---- teachers and averages -----------------------------------------------------------------------


@report(
    GITHUB + "yxuansu/TaCL/issues/11",
    "teacher left in training mode",
    ("", "teacher", "teacher.*"),
    (*MODES, "dropout", "random"),
)
def taught(fixed: bool) -> Training:
    """Dropout of the teacher is on, and it says something else of the same sample each time."""

    def step(model: Pair, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        model.train()
        if fixed:
            model.teacher.eval()
        with torch.no_grad():
            goal = (model.teacher(x) / 2).softmax(-1)
        made = model.student(x)
        soft = F.kl_div((made / 2).log_softmax(-1), goal, reduction="batchmean")
        return go_down(optimizer, F.cross_entropy(made, y) + 4 * soft)

    teacher = net(64, 96, 96, 10, dropout=0.4)
    helper = Adam(teacher.parameters(), lr=3e-3)
    for _ in range(30):
        go_down(helper, classified(teacher, flat(64)))
    helper.zero_grad()
    model = Pair(student=net(64, 32, 10), teacher=frozen(teacher))
    return Training(model, Adam(model.student.parameters(), lr=3e-3), step, flat(32))


class Decay:
    """The decay of a moving average, which grows with the number of updates."""

    def __init__(self, keeps: bool, decay: float = 0.9999) -> None:
        self.keeps, self.decay, self.number = keeps, decay, 0

    def next(self) -> float:
        self.number += 1
        grown = (1 + self.number) / (10 + self.number)
        if self.keeps:
            return min(self.decay, grown)
        self.decay = 1 - min(self.decay, grown)
        return 1 - self.decay

    def state_dict(self) -> dict[str, float]:
        return {"decay": self.decay, "number": self.number}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.decay, self.number = state["decay"], state["number"]


@report(
    GITHUB + "huggingface/diffusers/issues/1864",
    "decay of the average overwritten by that of the step",
    ("", "ema", "ema.*"),
    ("average", "ema", "decay", "half", "follow", "teacher"),
)
def averaged_too_fast(fixed: bool) -> Training:
    """From the second update on it is a number between the two of before, about a half."""

    def step(model: Pair, optimizer: Any, batch: Any) -> Tensor:
        loss = go_down(optimizer, classified(model.net, batch))
        follow(model.ema, model.net, decay.next())
        return loss

    made, decay = net(64, 48, 10), Decay(fixed)
    model = Pair(net=made, ema=frozen(copy.deepcopy(made)))
    return Training(model, Adam(model.net.parameters(), lr=3e-3), step, flat(32), (decay,))


# ---- parameters of losses ------------------------------------------------------------------------


class Weighed(nn.Module):
    """Two tasks on one trunk, whose losses are weighed by what is learnt of their noise."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
        self.label, self.ink = nn.Linear(48, 10), nn.Linear(48, 1)
        self.noise = nn.ParameterDict({"label": torch.zeros(()), "ink": torch.zeros(())})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.label(x), self.ink(x)


@report(
    GITHUB + "ifzhang/FairMOT/issues/19",
    "noise of the tasks in no optimizer",
    ("", "noise"),
    (*HELD, *STILL, "optimizer"),
)
def uncertain(fixed: bool) -> Training:
    """The optimizer is made of the net before the losses' own parameters are there."""

    def step(model: Weighed, optimizer: Any, batch: Any) -> Tensor:
        x, (label, ink) = batch
        named, inked = model(x)
        losses = {"label": F.cross_entropy(named, label), "ink": F.mse_loss(inked, ink)}
        noise = model.noise
        return go_down(optimizer, sum((-noise[k]).exp() * losses[k] + noise[k] for k in losses) / 2)

    model = Weighed()
    held = [p for name, p in model.named_parameters() if fixed or not name.startswith("noise")]
    return Training(model, Adam(held, lr=3e-3), step, both_targets(32))


@report(
    GITHUB + "sung-yeon-kim/Proxy-Anchor-CVPR2020/issues/25",
    "proxies of the loss in no optimizer",
    EVERYWHERE,
    (*HELD, *STILL, "loss", "proxies", "parameter"),
)
def by_proxies(fixed: bool) -> Training:
    """The proxies are parameters of the loss, and stay where they were drawn."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        cosines = F.normalize(model(x), dim=-1) @ F.normalize(proxies, dim=-1).T
        return go_down(optimizer, F.cross_entropy(16 * cosines, y))

    model, proxies = net(64, 48, 16), nn.Parameter(torch.randn(10, 16))
    held = [*model.parameters(), *([proxies] if fixed else [])]
    return Training(model, Adam(held, lr=3e-3), step, flat(48))


# ---- rivals --------------------------------------------------------------------------------------


def rivals() -> Pair:
    return Pair(generator=net(8, 32, 64), critic=net(64, 32, 1))


def two(model: Pair, rate: float = 2e-3) -> tuple[Any, Any]:
    return tuple(Adam(p.parameters(), lr=rate, betas=(0.5, 0.9)) for p in model.children())


def make(model: Pair, n: int) -> Tensor:
    return model.generator(torch.randn(n, 8))


@report(
    GITHUB + "basiclab/GNGAN-PyTorch/issues/1",
    "label of what is real on what is made",
    ("", "critic", "critic.*"),
    ("label", "same", "constant", "target"),
)
def all_real(fixed: bool) -> Training:
    """The critic is taught to call everything real, and tells the generator nothing."""

    def step(model: Pair, optimizers: Any, batch: Any) -> Tensor:
        judge, real = F.binary_cross_entropy_with_logits, batch[0]
        said, seen = model.critic(make(model, len(real)).detach()), model.critic(real)
        label = torch.zeros_like(said) if fixed else torch.ones_like(said)
        loss = judge(seen, torch.ones_like(seen)) + judge(said, label)
        go_down(optimizers[1], loss)
        said = model.critic(make(model, len(real)))
        go_down(optimizers[0], judge(said, torch.ones_like(said)))
        return loss.detach()

    model = rivals()
    return Training(model, two(model), step, itself(48))


@report(
    GITHUB + "ajbrock/BigGAN-PyTorch/issues/25",
    "critic cleared once for three steps",
    ("", "critic", "critic.*"),
    PILED,
)
def cleared_once(fixed: bool) -> Training:
    """The second and third step of the critic go along the slopes of those before, too."""

    def step(model: Pair, optimizers: Any, batch: Any) -> Tensor:
        generator, critic = optimizers
        critic.zero_grad()
        for real in batch[0].split(16):
            if fixed:
                critic.zero_grad()
            loss = F.relu(1 - model.critic(real)).mean()
            loss = loss + F.relu(1 + model.critic(make(model, len(real)).detach())).mean()
            loss.backward()
            critic.step()
        go_down(generator, -model.critic(make(model, 16)).mean())
        return loss.detach()

    model = rivals()
    return Training(model, two(model), step, itself(48))


@report(
    GITHUB + "mlpack/mlpack/issues/3063",
    "penalty of the slope without a graph of the slope",
    ("", "critic", "critic.*"),
    ("penalty", "create_graph", "no effect", "constant", "graph", "not depend", "detach"),
)
def unpunished(fixed: bool) -> Training:
    """The penalty is added to the loss as a number, and moves no weight of the critic."""

    def step(model: Pair, optimizers: Any, batch: Any) -> Tensor:
        real = batch[0]
        for _ in range(2):
            made = make(model, len(real)).detach()
            between = (real + torch.rand(len(real), 1) * (made - real)).requires_grad_()
            said = model.critic(between).sum()
            (slope,) = torch.autograd.grad(said, between, create_graph=fixed)
            penalty = (slope.norm(dim=1) - 1).pow(2).mean()
            loss = model.critic(made).mean() - model.critic(real).mean() + 10 * penalty
            go_down(optimizers[1], loss)
        go_down(optimizers[0], -model.critic(make(model, len(real))).mean())
        return loss.detach()

    model = rivals()
    return Training(model, two(model, 1e-3), step, itself(32))


@report(
    GITHUB + "bentrevett/pytorch-rl/issues/2",
    "policy rewarded without regard to the critic",
    ("", "critic", "critic.*", "policy", "policy.*"),
    ("critic", "not used", "unused", "no effect", "does not depend", "independent"),
)
def unasked_critic(fixed: bool) -> Training:
    """The critic is trained, and nothing reads what it says: the baseline is missing."""

    def step(model: Agent, optimizer: Any, batch: Any) -> Tensor:
        state, action, reward, _ = batch
        logits, value = model(state)
        gain = reward - value.detach() if fixed else reward
        loss = F.smooth_l1_loss(value, reward) - (taken(logits, action) * gain).mean()
        return go_down(optimizer, loss)

    model = Agent()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, moves(64))
