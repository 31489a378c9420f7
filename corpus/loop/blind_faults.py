"""Trainings of some hundred steps that go wrong on the way.

Where a fault begins at a certain step, `why` says so: "From step 50 on", with steps counted from 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.trainings import (
    Step,
    annealed,
    before,
    by_adam,
    by_sgd,
    byol,
    compressed,
    deep_relu,
    each_step,
    from_step,
    gan,
    language,
    loss_from,
    pictures,
    progression,
    rate_of,
    recurrent,
    seen,
    spoil,
    train_generator,
)
from corpus.subject import Training

SHELF = Shelf("loop", "blind")
fault = SHELF.fault

NAN = ("nan", "finite", "infinit", "not a number")
GROWS = ("explod", "diverg", "grow", "grew", "rose", "rise", "larger", "jump", "spike", *NAN)
STILL = ("still", "stop", "no longer", "frozen", "froze", "not updated", "no update", "unchanged")
DEAD = ("dead", "dying", "died", "zero", "inactive", "never")
ALIKE = ("collaps", "constant", "same for", "alike", "identical", "varian", "spread")
FLAT = ("saturat", "flat", "vanish", "entropy", "one-hot", "peaked", "collaps")
SHRINKS = ("shrink", "shrank", "vanish", "small", "decay", "fade", "toward zero", "to zero")


def scaled(factor: float) -> Any:
    """Return what multiplies the inputs of a batch."""
    return lambda batch: (batch[0] * factor, batch[1])


# ---- rates ---------------------------------------------------------------------------------------


@fault(
    "rate a thousand times too high",
    by_sgd,
    ("", "fc1", "fc2", "head"),
    GROWS,
    why="From step 0 on the updates are larger than the weights, and the loss explodes.",
)
def _(t: Training) -> None:
    t.optimizer.param_groups[0]["lr"] = 50.0


@fault(
    "milestone multiplies the rate by 1000 where it should divide",
    deep_relu,
    ("", "[0-9]*"),
    GROWS,
    why="From step 60 on the rate is 20: the loss explodes.",
)
def _(t: Training) -> None:
    t.step.schedule = torch.optim.lr_scheduler.MultiStepLR(t.optimizer, [60], gamma=1e3)


@fault(
    "warm restart at a rate that diverges",
    language,
    ("", "embedding", "position", "blocks.*", "norm", "head"),
    GROWS,
    why="From step 50 on, after a restart, the rate is 2, and the loss does not come back.",
)
def _(t: Training) -> None:
    def restart(model: nn.Module, optimizer: Any) -> None:
        plan = t_step.schedule
        plan.lr_lambdas = [lambda _: 400.0]

    t_step = t.step
    before(t, 50, restart)


# ---- not a number --------------------------------------------------------------------------------


@fault(
    "missing value in one row of step 50",
    progression,
    ("", "fc1"),
    NAN,
    why="From step 50 on everything is NaN, since one entry of the table is.",
)
def _(t: Training) -> None:
    def lose(batch: Any) -> Any:
        features, target = batch
        features = features.clone()
        features[3, 4] = math.nan
        return features, target

    spoil(t, lambda number: number == 50, lose)


@fault(
    "target of infinity in step 70",
    progression,
    ("", "head"),
    NAN,
    why="From step 70 on, since a division by zero was written into the table's last column.",
)
def _(t: Training) -> None:
    spoil(t, lambda number: number == 70, lambda batch: (batch[0], batch[1] / 0.0))


# ---- units that die ------------------------------------------------------------------------------


@fault(
    "bias of a layer pushed down by a penalty on the wrong side",
    by_sgd,
    ("", "fc2", "head"),
    (*DEAD, "negative", "drift"),
    why="The sparsity penalty sums biases instead of activations: they fall until no unit is on.",
)
def _(t: Training) -> None:
    loss_from(t, 0, lambda inner, model, batch: inner(model, batch) + 0.2 * model.fc2.bias.sum())


@fault(
    "one step at a huge rate in one layer",
    by_sgd,
    ("fc1", "fc2"),
    (*DEAD, "update", "ratio", *GROWS),
    why="From step 40 on the first layer's units are off for every sample.",
)
def _(t: Training) -> None:
    def burst(number: int, model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[1]["lr"] = 300.0 if number == 40 else 0.05

    rate_of(t, "fc1", 0.05)
    each_step(t, burst)


# ---- outputs that collapse -----------------------------------------------------------------------


@fault(
    "posterior collapse: weight of the divergence without its bound",
    annealed,
    ("", "mean", "log_variance", "encoder*", "decoder*"),
    (*ALIKE, "vanish", "stand", "posterior"),
    why="The weight rises on and on, until codes say nothing of the sample.",
)
def _(t: Training) -> None:
    step = t.step
    step.weight = lambda: 0.1 * step.number


@fault(
    "twin encoders without negatives, predictor or stopped gradient",
    byol,
    ("", "online*", "predictor*"),
    ALIKE,
    why="Both sides move to the one answer that is the same for all samples.",
)
def _(t: Training) -> None:
    model = t.model
    model.predictor = nn.Identity()
    model.online = nn.Sequential(model.online[0], nn.ReLU(), model.online[3])

    def both(a: Tensor, b: Tensor) -> Tensor:
        return (model.online(a) - model.online(b)).pow(2).sum(-1).mean()

    model.forward = both
    model.teacher = model.online
    t.optimizer = torch.optim.Adam(model.online.parameters(), 3e-3)


@fault(
    "critic no longer trained",
    gan,
    ("", "generator*", "critic*"),
    (*ALIKE, *STILL, "mode"),
    why="From step 80 on the generator runs to the one picture that an old critic likes best.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizers: Any, batch: Any) -> float:
        return float(train_generator(model, optimizers[0], len(batch[0])))

    from_step(t, 80, step)
