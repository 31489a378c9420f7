"""Steps wrong in what the optimizer holds, the order of calls, the scale, the batch or the loss."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.lr_scheduler import LambdaLR

from corpus.cards import Shelf
from corpus.models.blind_steps import (
    ACCUMULATE,
    RADIUS,
    WARM_UP,
    accumulated,
    acting,
    actor_critic,
    adapted,
    adversarial,
    annealed,
    attended,
    classifier,
    compressed,
    contrasted,
    convolutional,
    descended,
    earth_moving,
    fine_tuned,
    fitted,
    half,
    language_model,
    micro_batches,
    mixed,
    multitask,
    pretrained,
    realism,
    recommended,
    recurrent,
    regressed,
    residual,
    scaled,
    scheduled,
    sharded,
    sharpness_aware,
    shift,
    staged,
    statically_scaled,
    unscaled_by_hand,
    variational,
    wasserstein,
)
from corpus.models.small import MLP, flat, images, ink_loss, label_loss
from corpus.subject import Training

SHELF = Shelf("training", "blind")
fault = SHELF.fault

HELD = (
    *("not in", "no optimizer", "not hold", "not held", "holds n", "not given", "missing", "stale"),
    *("left out", "no group", "no longer", "another model", "outside", "not of the model"),
)
STILL = (
    *("not move", "nothing move", "moves no", "not chang", "unchanged", "not updat", "no update"),
    *("never updat", "same after", "as before", "stay", "not step", "never step", "not train"),
)
FROZEN = ("requires_grad", "frozen", "freez", "froze")
CLEARED = ("zero_grad", "cleared", "zeroed", "set to none", "set to zero", "reset")
PILED = (
    "zero_grad",
    "accumul",
    "cleared",
    "add up",
    "adds up",
    "pile",
    "earlier call",
    "left over",
)
RATE = ("learning rate", "rate is", "rate of", "lr")
SCALED = ("scale", "scaling", "unscal", "times too", "times as", "too large", "magnitude", "factor")
CLIPPED = ("clip", "norm of", "max_norm", "too small", "tiny")
SAMPLES = ("sample", "influence", "part of the batch", "half", "does not depend", "ignored", "rows")
ASCENT = (
    "sign of",
    "flipped",
    "ascen",
    "maxim",
    "rises",
    "rose",
    "increas",
    "uphill",
    "negative",
    "wrong way",
)
UNGIVEN = (
    "no gradient",
    "without a gradient",
    "without gradient",
    "gradient is none",
    "grad is none",
)
CUT = (*UNGIVEN, "detach", "no_grad", "cut", "graph", "constant", "not depend", "item")
TWICE = ("twice", "two step", "2 step", "more than once", "stepped 2", "double", "repeated")


# ---- what the optimizer holds --------------------------------------------------------------------


@fault(
    "head replaced after the optimizer was made",
    fine_tuned,
    ("", "head", "head.*"),
    HELD,
    why="The optimizer still holds the weight of the head that is gone.",
)
def _(t: Training) -> None:
    t.model.head = nn.Linear(512, 10)


@fault(
    "optimizer made of a copy of the model",
    classifier,
    ("", "*"),
    (*HELD, "copy"),
    why="The copy, kept for a comparison, is what trains.",
)
def _(t: Training) -> None:
    original, t.model = t.model, copy.deepcopy(t.model)
    t.optimizer = torch.optim.AdamW(original.parameters(), lr=1e-3)


@fault(
    "parameters used up by counting them",
    staged,
    ("", "backbone", "backbone.*"),
    HELD,
    why="A filter yields once: after the count its group in the optimizer is empty.",
)
def _(t: Training) -> None:
    trunk = filter(lambda p: p.requires_grad, t.model.backbone.parameters())
    sum(p.numel() for p in trunk)
    groups = [{"params": trunk, "lr": 5e-4}, {"params": t.model.head.parameters()}]
    t.optimizer = torch.optim.AdamW(groups, lr=3e-3)


@fault(
    "backbone frozen since the first stage",
    staged,
    ("", "backbone", "backbone.*"),
    (*FROZEN, *UNGIVEN),
    why="The optimizer has the backbone in a group, but nobody unfroze it.",
)
def _(t: Training) -> None:
    t.model.backbone.requires_grad_(False)


@fault(
    "optimizer of the second stage made before the backbone was unfrozen",
    staged,
    ("", "backbone", "backbone.*"),
    HELD,
    why="What required no gradient then was passed over, and has gradients now that nobody uses.",
)
def _(t: Training) -> None:
    t.model.backbone.requires_grad_(False)
    trainable = [p for p in t.model.parameters() if p.requires_grad]
    t.optimizer = torch.optim.AdamW(trainable, lr=3e-3)
    t.model.backbone.requires_grad_(True)


@fault(
    "group of what does not decay built and forgotten",
    language_model,
    ("", "*norm*", "*.bias"),
    HELD,
    why="Only the matrices train; norms and biases stay as they were drawn.",
)
def _(t: Training) -> None:
    decays = [p for p in t.model.parameters() if p.ndim > 1]
    t.optimizer = torch.optim.AdamW(decays, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = LambdaLR(t.optimizer, lambda done: min(1.0, (done + 1) / WARM_UP))
    t.step, t.restore = scheduled(schedule), (schedule,)


@fault(
    "groups collected from layers, with tokens and positions in none",
    attended,
    ("", "token", "position"),
    HELD,
    why="A parameter of the model itself belongs to none of the layers that the loop looks at.",
)
def _(t: Training) -> None:
    kinds = (nn.Linear, nn.Conv2d, nn.LayerNorm)
    layers = [m for m in t.model.modules() if isinstance(m, kinds)]
    parameters = [p for layer in layers for p in layer.parameters()]
    t.optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.05)


@fault(
    "blocks in a plain list",
    language_model,
    ("", "blocks", "blocks.*"),
    (*HELD, "regist", "modulelist", "plain list", "python list", "named_parameters"),
    why="The model does not know its blocks, so its parameters do not have theirs.",
)
def _(t: Training) -> None:
    blocks = list(t.model.blocks)
    del t.model.blocks
    t.model.blocks = blocks
    t.optimizer = torch.optim.AdamW(t.model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = LambdaLR(t.optimizer, lambda done: min(1.0, (done + 1) / WARM_UP))
    t.step, t.restore = scheduled(schedule), (schedule,)


@fault(
    "generator's optimizer made of the discriminator's parameters",
    adversarial,
    ("", "generator", "generator.*", "discriminator", "discriminator.*"),
    (*HELD, "both optimizers", "two optimizers", "same parameter", "shared"),
    why="A line copied: the discriminator is trained for and against itself, the generator never.",
)
def _(t: Training) -> None:
    discriminator = t.model.discriminator.parameters()
    first = torch.optim.Adam(discriminator, lr=1e-3, betas=(0.5, 0.999))
    t.optimizer = (first, t.optimizer[1])


@fault(
    "projection made in the first forward",
    regressed,
    ("", "skip", "skip.*"),
    HELD,
    why="Its size is known from the first batch only, when the optimizer has long been made.",
)
def _(t: Training) -> None:
    class Late(MLP):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "skip"):
                self.skip = nn.Linear(x.shape[-1], 1)
            return super().forward(x) + self.skip(x)

    t.model = Late(10, 32, 1)
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.05)


@fault(
    "checkpoint assigned into the model after the optimizer was made",
    recurrent,
    ("", "*"),
    HELD,
    why="With assign=True the model has new parameters, and the optimizer the old ones.",
)
def _(t: Training) -> None:
    checkpoint = {name: value.clone() for name, value in t.model.state_dict().items()}
    t.model.load_state_dict(checkpoint, assign=True)


@fault(
    "weight norm put on the head after the optimizer was made",
    compressed,
    ("", "decoder.2", "decoder.2.*"),
    HELD,
    why="The head now has a direction and a length, of which the optimizer has heard nothing.",
)
def _(t: Training) -> None:
    parametrizations.weight_norm(t.model.decoder[2])


@fault(
    "heads of mean and variance in no group",
    variational,
    ("", "mean", "mean.*", "log_variance", "log_variance.*"),
    HELD,
    why="Encoder and decoder are what came to mind; the two layers between them do not train.",
)
def _(t: Training) -> None:
    parameters = itertools.chain(t.model.encoder.parameters(), t.model.decoder.parameters())
    t.optimizer = torch.optim.Adam(parameters, lr=3e-3)


@fault(
    "adapters frozen with the model they were put in",
    adapted,
    ("", "*lora*", "blocks.*"),
    (*HELD, *FROZEN),
    why="Freezing after the adapters are in leaves the head alone to train.",
)
def _(t: Training) -> None:
    t.model.requires_grad_(False)
    t.model.head.requires_grad_(True)
    trainable = [p for p in t.model.parameters() if p.requires_grad]
    t.optimizer = torch.optim.AdamW(trainable, lr=3e-3)


@fault(
    "layers frozen by an attribute of the module",
    fine_tuned,
    ("", "backbone", "backbone.*"),
    (*FROZEN, "attribute"),
    why="Module.requires_grad is no setting: the whole backbone trains at the head's rate.",
)
def _(t: Training) -> None:
    t.model.requires_grad_(True)
    t.model.backbone.requires_grad = False
    t.optimizer = torch.optim.Adam(t.model.parameters(), lr=3e-3)


@fault(
    "actor's optimizer made of the whole model",
    actor_critic,
    ("", "critic", "critic.*"),
    (
        "both optimizers",
        "two optimizers",
        "shared",
        "held by",
        "critic",
        "same parameter",
        "more than",
    ),
    why="The critic learns to praise what the actor does instead of to judge it.",
)
def _(t: Training) -> None:
    t.optimizer = (torch.optim.Adam(t.model.parameters(), lr=1e-3), t.optimizer[1])


@fault(
    "optimizer made anew in each step",
    descended,
    "",
    (*HELD, "momentum", "anew", "new optimizer", "other optimizer", "not step", "never step"),
    why="Momentum begins again with every step, and what the loop keeps is never stepped.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss

    t.step = step


# ---- nothing moves -------------------------------------------------------------------------------


@fault(
    "step awaits a micro-batch that never comes",
    accumulated,
    ("", "*"),
    (*STILL, "was never called", "no step", "without a step"),
    why="The batch was halved and the count of micro-batches was not.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        total = 0.0
        for done, (inputs, target) in enumerate(micro_batches(batch), 1):
            loss = F.cross_entropy(model(inputs), target) / (2 * ACCUMULATE)
            loss.backward()
            total += loss.item()
            if done % (2 * ACCUMULATE) == 0:
                optimizer.step()
                optimizer.zero_grad()
        return total

    t.step = step


@fault(
    "warm-up in whole numbers",
    language_model,
    ("", "*"),
    RATE,
    why="Divided as integers, the rate is zero until the warm-up is over.",
)
def _(t: Training) -> None:
    schedule = LambdaLR(t.optimizer, lambda done: min(1, (done + 1) // WARM_UP))
    t.step, t.restore = scheduled(schedule), (schedule,)


@fault(
    "decay over epochs, stepped with each batch",
    language_model,
    ("", "*"),
    RATE,
    why="After as many batches as there are epochs, here one, the rate is zero.",
)
def _(t: Training) -> None:
    epochs = 1
    schedule = LambdaLR(t.optimizer, lambda done: max(0.0, 1 - done / epochs))
    t.step, t.restore = scheduled(schedule), (schedule,)


@fault(
    "linear decay that goes on below zero",
    language_model,
    ("", "*"),
    (*RATE, *ASCENT),
    why="The run was prolonged and the schedule was not: a negative rate climbs.",
)
def _(t: Training) -> None:
    planned, done_before = 100, 130
    schedule = LambdaLR(t.optimizer, lambda done: 1 - (done + done_before) / planned)
    t.step, t.restore = scheduled(schedule), (schedule,)


@fault(
    "optimizer state of a finished run, with its last rate",
    convolutional,
    ("", "*"),
    RATE,
    why="load_state_dict brings the rate along, which had been annealed to zero.",
)
def _(t: Training) -> None:
    finished = copy.deepcopy(t.optimizer.state_dict())
    for group in finished["param_groups"]:
        group["lr"] = 0.0
    t.optimizer.load_state_dict(finished)


@fault(
    "gradients cleared between backward and step",
    classifier,
    ("", "*"),
    (*CLEARED, *UNGIVEN),
    why="The step finds no gradient.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()
        return loss

    t.step = step


@fault(
    "step before backward",
    residual,
    ("", "*"),
    (*UNGIVEN, "before backward", "order", "ahead of", "cleared", "zero_grad"),
    why="What backward leaves is cleared at the next step's start, unused.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        inputs, target = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        optimizer.step()
        loss.backward()
        return loss.item()

    t.step = step


@fault(
    "loss made a new leaf from its number",
    convolutional,
    ("", "*"),
    CUT,
    why="An error about requires_grad was met with requires_grad=True: nothing leads back.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        loss = F.cross_entropy(model(inputs), target).item()
        total = torch.tensor(loss, requires_grad=True)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        return total

    t.step = step


@fault(
    "one of two losses taken as a number",
    multitask,
    ("", "label", "label.*"),
    CUT,
    why="What is added as a number trains nothing: the head of the labels stands still.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        output = model(inputs)
        losses = {"label": label_loss(output, target).item(), "ink": ink_loss(output, target)}
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    t.step = step


@fault(
    "sample weights that nobody filled",
    compressed,
    ("", "*"),
    ("all zero", "is zero", "is 0", "zero loss", "zero gradient", *STILL),
    why="All weights are zero, and so are the loss and its gradient.",
)
def _(t: Training) -> None:
    weights = torch.zeros(64)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        optimizer.zero_grad()
        errors = F.mse_loss(model(inputs), target, reduction="none").mean(1)
        loss = (weights * errors).mean()
        loss.backward()
        optimizer.step()
        return loss

    t.step = step


@fault(
    "optimizer of the last fold",
    regressed,
    ("", "*"),
    (*HELD, *STILL, "other optimizer", "another optimizer"),
    why="The step reads a name from outside, which is still bound to the previous fold's.",
)
def _(t: Training) -> None:
    last_fold = copy.deepcopy(t.model)
    of_last_fold = torch.optim.SGD(last_fold.parameters(), lr=0.05)

    def step(model: nn.Module, _: Any, batch: Any) -> Tensor:
        inputs, target = batch
        of_last_fold.zero_grad()
        loss = F.mse_loss(model(inputs), target)
        loss.backward()
        of_last_fold.step()
        return loss

    t.step = step


@fault(
    "guard against spikes whose average begins at zero",
    classifier,
    ("", "*"),
    (*STILL, "skip", "no step", "without a step"),
    why="Every loss is a spike beside zero, and only what is accepted moves the average.",
)
def _(t: Training) -> None:
    seen = {"average": 0.0}

    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        inputs, target = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        if loss.item() < 3 * seen["average"]:
            optimizer.step()
            seen["average"] = 0.9 * seen["average"] + 0.1 * loss.item()
        return loss.item()

    t.step = step


@fault(
    "clipped to the norm 0, which was to mean off",
    pretrained,
    ("", "*"),
    (*CLIPPED, "zero", *UNGIVEN),
    why="The setting's 0 was handed on, and every gradient is multiplied by it.",
)
def _(t: Training) -> None:
    for group in t.optimizer.param_groups:
        group["weight_decay"] = 0.0

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        model.train()
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    t.step = step


@fault(
    "clipped to 1e-8 where an epsilon was meant",
    residual,
    ("", "*"),
    (*CLIPPED, *STILL),
    why="The norm of all gradients together is 1e-8, which moves no weight in float32.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-8)
        optimizer.step()
        return loss

    t.step = step


@fault(
    "rate that fades with every parameter instead of every layer",
    pretrained,
    ("", "*embeddings*", "*layer.0*", "*.layer.1*"),
    RATE,
    why="A decay of 0.7 over some forty parameters leaves the first ones a rate near 1e-9.",
)
def _(t: Training) -> None:
    parameters = list(t.model.parameters())[::-1]
    groups = [{"params": [p], "lr": 3e-3 * 0.7**i} for i, p in enumerate(parameters)]
    t.optimizer = torch.optim.AdamW(groups, weight_decay=0.01)


# ---- gradients that add up, are overwritten or are taken for another's ---------------------------


@fault(
    "gradients never cleared",
    descended,
    ("", "*"),
    PILED,
    why="Each step goes along the sum of all gradients so far.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss

    t.step = step


@fault(
    "only one of two optimizers cleared",
    recommended,
    ("", "mlp", "mlp.*"),
    PILED,
    why="The gradients of the other one's parameters add up from call to call.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        of_embeddings, of_rest = optimizer
        (users, items), liked = batch
        loss = F.binary_cross_entropy_with_logits(model(users, items), liked)
        of_embeddings.zero_grad()
        loss.backward()
        of_embeddings.step()
        of_rest.step()
        return loss.detach()

    t.step = step


@fault(
    "head cleared, and the rest of the model not",
    staged,
    ("", "backbone", "backbone.*"),
    PILED,
    why="From the stage in which the head alone was trained: the backbone's gradients add up.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        model.head.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss

    t.step = step


@fault(
    "generator's gradients in the discriminator's step",
    adversarial,
    ("", "discriminator", "discriminator.*"),
    (*PILED, "other loss", "both losses", "leak", "mixed", "two losses"),
    why="Both losses go backward before either steps: the discriminator also learns to be fooled.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        for each in optimizer:
            each.zero_grad()
        fake = model.generator(torch.randn(len(batch), 16))
        loss = realism(model.discriminator(batch), 1.0)
        loss = loss + realism(model.discriminator(fake.detach()), 0.0)
        loss.backward()
        realism(model.discriminator(fake), 1.0).backward()
        for each in optimizer:
            each.step()
        return loss.detach()

    t.step = step


@fault(
    "generator's samples detached in its own loss",
    adversarial,
    ("", "generator", "generator.*"),
    (*CUT, *STILL),
    why="The tensor of the discriminator's loss was used again: the generator gets no gradient.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        of_generator, of_discriminator = optimizer
        fake = model.generator(torch.randn(len(batch), 16)).detach()
        of_discriminator.zero_grad()
        loss = realism(model.discriminator(batch), 1.0) + realism(model.discriminator(fake), 0.0)
        loss.backward()
        of_discriminator.step()
        of_generator.zero_grad()
        realism(model.discriminator(fake), 1.0).backward()
        of_generator.step()
        return loss.detach()

    t.step = step


@fault(
    "actions rounded through numpy before the critic sees them",
    actor_critic,
    ("", "actor", "actor.*"),
    (*CUT, *STILL),
    why="The way back from the critic's value ends there, so the actor does not train.",
)
def _(t: Training) -> None:
    t.step = acting(lambda actions: torch.from_numpy(actions.detach().numpy().round(2)))


@fault(
    "generator's weights clamped instead of the critic's",
    wasserstein,
    ("", "generator", "generator.*", "discriminator", "discriminator.*"),
    (
        "clamp",
        "clip",
        "outside the optimizer",
        "not by the optimizer",
        "0.05",
        "by hand",
        "generator",
    ),
    why="The critic is bound by nothing, and the generator's weights cannot grow.",
)
def _(t: Training) -> None:
    t.step = earth_moving("generator")


@fault(
    "mask of new tokens the wrong way round",
    recurrent,
    ("", "embedding", "embedding.*"),
    ("is zero", "are zero", "is 0", "mask", "erase", "rows", *STILL),
    why="The gradient of every known token is erased, and the padding's, which is zero, is kept.",
)
def _(t: Training) -> None:
    is_kept = torch.zeros(18, 1)
    is_kept[0] = 1

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        model.embedding.weight.grad.mul_(is_kept)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    t.step = step


@fault(
    "noise in place of the gradient",
    annealed,
    ("", "*"),
    ("overwr", "replac", "noise", "random", "not the gradient", "differ", "not depend", "another"),
    why="An equals sign for a plus: the weights walk at random.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = 1e-3 * torch.randn_like(parameter)
        optimizer.step()
        return loss

    t.step = step


@fault(
    "perturbation never taken back",
    sharpness_aware,
    ("", "*"),
    ("outside", "not by the optimizer", "by hand", "restor", "taken back", "perturb", *ASCENT),
    why="The weights stay where the climb led them, and each step climbs again.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        parameters = list(model.parameters())
        loss = F.cross_entropy(model(inputs), target)
        gradients = torch.autograd.grad(loss, parameters)
        shift(parameters, [RADIUS * g / (g.norm() + 1e-12) for g in gradients], 1)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
        return loss.detach()

    t.step = step


@fault(
    "stepped twice on one gradient",
    regressed,
    ("", "*"),
    TWICE,
    why="A helper had learnt to step, and its caller still did: the rate is doubled.",
)
def _(t: Training) -> None:
    def backward(loss: Tensor, optimizer: Any) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        loss = F.mse_loss(model(inputs), target)
        backward(loss, optimizer)
        optimizer.step()
        return loss

    t.step = step


@fault(
    "closure that does not clear",
    fitted,
    ("", "*"),
    (*PILED, "closure"),
    why="LBFGS evaluates several times a step, and every gradient is added to the last.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        optimizer.zero_grad()

        def closure() -> Tensor:
            loss = F.mse_loss(model(inputs), target)
            loss.backward()
            return loss

        return optimizer.step(closure)

    t.step = step


@fault(
    "closure that returns a loss computed before",
    fitted,
    ("", "*"),
    ("closure", "once", "evaluat", "same loss", "not recomput", "stale", *ASCENT),
    why="LBFGS is told the same loss and gradient wherever it goes, and goes on.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), target)
        loss.backward()
        return optimizer.step(lambda: loss)

    t.step = step


# ---- accumulation and scale ----------------------------------------------------------------------


@fault(
    "micro-batches' losses not divided",
    accumulated,
    ("", "*"),
    (*SCALED, "divid", "micro", "accumul", "sum"),
    why="The gradient is the sum over the micro-batches: the rate is four times as told.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        total = 0.0
        for inputs, target in micro_batches(batch):
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            total += loss.item() / ACCUMULATE
        optimizer.step()
        optimizer.zero_grad()
        return total

    t.step = step


@fault(
    "divided by the micro-batches twice",
    accumulated,
    ("", "*"),
    (*SCALED, "divid", "twice", "micro", "accumul", "too small"),
    why="Once in the loss and once in the gradients: a sixteenth of the sum.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        total = 0.0
        for inputs, target in micro_batches(batch):
            loss = F.cross_entropy(model(inputs), target) / ACCUMULATE
            loss.backward()
            total += loss.item()
        for parameter in model.parameters():
            parameter.grad.div_(ACCUMULATE)
        optimizer.step()
        optimizer.zero_grad()
        return total

    t.step = step


@fault(
    "cleared before every micro-batch",
    accumulated,
    "",
    (*SAMPLES, *CLEARED, "micro", "last"),
    why="What is stepped on is the gradient of the last micro-batch alone.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        total = 0.0
        for inputs, target in micro_batches(batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), target) / ACCUMULATE
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    t.step = step


@fault(
    "stepped at every micro-batch, cleared after the last",
    accumulated,
    ("", "*"),
    (*TWICE, *PILED, "4 times", "4 steps", "several steps", "steps in one"),
    why="The step slid into the loop: the first micro-batch's gradient is used four times.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        total = 0.0
        for inputs, target in micro_batches(batch):
            loss = F.cross_entropy(model(inputs), target) / ACCUMULATE
            loss.backward()
            optimizer.step()
            total += loss.item()
        optimizer.zero_grad()
        return total

    t.step = step


@fault(
    "scale never removed",
    scaled,
    ("", "*"),
    SCALED,
    why="The optimizer steps by itself, on gradients 4096 times as large.",
)
def _(t: Training) -> None:
    (scaler,) = t.restore

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = half(model, batch)
        scaler.scale(loss).backward()
        optimizer.step()
        return loss.detach()

    t.step = step


@fault(
    "clipped before the scale is removed",
    scaled,
    ("", "*"),
    (*SCALED, *CLIPPED),
    why="Scaled gradients are clipped to 1, and then divided by the scale.",
)
def _(t: Training) -> None:
    (scaler,) = t.restore

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = half(model, batch)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    t.step = step


@fault(
    "scale set anew in each step, too high for float16",
    scaled,
    ("", "*"),
    ("infinit", "not finite", "overflow", "skip", "scale", *STILL),
    why="The gradients overflow in every step, so the scaler skips every step.",
)
def _(t: Training) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = half(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update(2.0**40)
        return loss.detach()

    t.step, t.restore = step, (scaler,)


@fault(
    "scaler never updated",
    scaled,
    "",
    ("raise", "update", "second", "call 2", "2nd", "fail", "error"),
    why="The second step raises, as the scaler still counts the first.",
)
def _(t: Training) -> None:
    (scaler,) = t.restore

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = half(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        return loss.detach()

    t.step = step


@fault(
    "divided by another scale than multiplied with",
    statically_scaled,
    ("", "*"),
    SCALED,
    why="The constant was raised in one of two places: the gradients are 32 times as large.",
)
def _(t: Training) -> None:
    t.step = unscaled_by_hand(32.0)


@fault(
    "loss returned as a mean, differentiated as a sum",
    regressed,
    ("", "*"),
    (*SCALED, "sum", "reduction", "another loss", "differ", "not the loss", *ASCENT),
    why="The gradient is 48 times that of the loss which is shown.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        output = model(inputs)
        optimizer.zero_grad()
        F.mse_loss(output, target, reduction="sum").backward()
        optimizer.step()
        return F.mse_loss(output, target)

    t.step = step


# ---- the batch and the loss ----------------------------------------------------------------------


@fault(
    "first half of the batch, since memory once ran out",
    convolutional,
    "",
    SAMPLES,
    why="Half of every batch is loaded, and then dropped.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        inputs, target = inputs[: len(inputs) // 2], target[: len(target) // 2]
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss

    t.step = step


@fault(
    "class 0 taken for padding",
    attended,
    ("", "head", "head.*"),
    (*SAMPLES, "ignore_index", "class", "label"),
    why="The loss passes over every sample of a class that is there.",
)
def _(t: Training) -> None:
    t.batch = images(64)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target, ignore_index=0)
        loss.backward()
        optimizer.step()
        return loss

    t.step = step


@fault(
    "share of one replica dropped",
    sharded,
    "",
    (*SAMPLES, "share", "shard", "replica"),
    why="The second replica's gradients overwrite the first's instead of being averaged.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        parameters, losses = list(model.parameters()), []
        for inputs, target in micro_batches(batch, 2):
            losses.append(F.cross_entropy(model(inputs), target))
            shares = torch.autograd.grad(losses[-1], parameters)
            for parameter, gradient in zip(parameters, shares, strict=True):
                parameter.grad = gradient
        optimizer.step()
        return torch.stack(losses).mean().detach()

    t.step = step


@fault(
    "loss of the last micro-batch alone goes backward",
    accumulated,
    "",
    (*SAMPLES, "micro", "last", "another loss", "not the loss"),
    why="A loop that once summed now rebinds: what is shown is all, what trains is an eighth.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        losses = []
        for inputs, target in micro_batches(batch, 8):
            loss = F.cross_entropy(model(inputs), target)
            losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return torch.stack(losses).mean()

    t.step = step


@fault(
    "hard samples mined from the easy end",
    mixed,
    "",
    SAMPLES,
    why="topk of the smallest losses: what is already known is all that is trained on.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = F.cross_entropy(model(inputs), target, reduction="none")
        loss = losses.topk(len(losses) // 4, largest=False).values.mean()
        loss.backward()
        optimizer.step()
        return loss

    t.step = step


@fault(
    "inputs shuffled without their labels",
    classifier,
    "",
    ("shuffl", "order", "permut", "label", "target", "pair", "not go down", "not fall", "match"),
    why="Every step pairs the samples with other labels, so there is nothing to learn.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        order = torch.randperm(len(inputs))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[order]), target)
        loss.backward()
        optimizer.step()
        return loss

    t.step = step


@fault(
    "batch of an earlier cell of the notebook",
    compressed,
    "",
    (*SAMPLES, "given batch", "batch is not", "not read", "not used", "unused"),
    why="The step reads names from outside; the batch it is given changes nothing.",
)
def _(t: Training) -> None:
    x, _ = flat(64)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        return loss

    t.step = step


@fault(
    "auxiliary loss shown, and not differentiated",
    multitask,
    ("", "ink", "ink.*"),
    (*UNGIVEN, *STILL, "another loss", "not the loss", "auxiliary", "differ"),
    why="backward was called on the first loss, before the second was added.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        output = model(inputs)
        optimizer.zero_grad()
        loss = label_loss(output, target)
        loss.backward()
        optimizer.step()
        return (loss + 0.5 * ink_loss(output, target)).detach()

    t.step = step


@fault(
    "maximize left over from a policy's reward",
    recurrent,
    ("", "*"),
    ASCENT,
    why="The optimizer climbs the loss.",
)
def _(t: Training) -> None:
    t.optimizer = torch.optim.Adam(t.model.parameters(), lr=3e-3, maximize=True)


@fault(
    "log-likelihood without its minus",
    contrasted,
    ("", "*"),
    ASCENT,
    why="The likelihood of the matching views is minimised: the loss falls and means nothing.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = model(*batch).log_softmax(-1).diagonal().mean()
        loss.backward()
        optimizer.step()
        return loss

    t.step = step
