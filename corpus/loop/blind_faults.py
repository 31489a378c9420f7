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
    acting,
    annealed,
    before,
    by_adam,
    by_sgd,
    byol,
    certain,
    compressed,
    deep_relu,
    each_step,
    from_step,
    gan,
    half,
    language,
    loss_from,
    mean_teacher,
    paired,
    pictures,
    progression,
    rate_of,
    rated,
    recurrent,
    routed,
    scaled,
    seen,
    shared,
    sigmoids,
    spoil,
    standardised,
    train_generator,
    triplets,
    tumour,
    unrolled,
    values,
    wasserstein,
    without_schedule,
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
    plan = t.step.schedule
    before(t, 50, lambda *_: setattr(plan, "lr_lambdas", [lambda _: 400.0]))


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
    loss_from(t, 0, lambda inner, model, batch: inner(model, batch) + 0.5 * model.fc2.bias.sum())


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
    ("", "critic*"),
    STILL,
    why="From step 80 on the critic is left as it is, while the generator goes past it.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizers: Any, batch: Any) -> float:
        return float(train_generator(model, optimizers[0], len(batch[0])))

    from_step(t, 80, step)


@fault(
    "generator at fifty times the critic's rate",
    gan,
    ("", "generator*"),
    (*ALIKE, *DEAD, *FLAT, "mode"),
    why="The generator comes to make one picture of all noise: the mode collapses.",
)
def _(t: Training) -> None:
    t.optimizer[0].param_groups[0]["lr"] = 0.1


# ---- not a number, from within -------------------------------------------------------------------


@fault(
    "logarithm of a probability that reaches zero",
    tumour,
    ("", "head"),
    NAN,
    why="Once a sigmoid is exactly 1, zero times the logarithm of zero is NaN.",
)
def _(t: Training) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        features, target = batch
        p = torch.sigmoid(model(features))
        return -(target * p.log() + (1 - target) * (1 - p).log()).mean()

    t.step.loss = loss
    t.optimizer.param_groups[0]["lr"] = 0.05


@fault(
    "deviation of zero in a blank picture",
    standardised,
    ("", "0", "1", "1.0"),
    NAN,
    why="From step 45 on, when a blank picture is divided by a deviation of zero.",
)
def _(t: Training) -> None:
    def blank(batch: Any) -> Any:
        pixels, labels = batch
        return torch.cat([torch.zeros_like(pixels[:1]), pixels[1:]]), labels

    spoil(t, lambda number: number == 45, blank)


@fault(
    "slope of a root at zero",
    triplets,
    ("", "[0-9]*"),
    (*NAN, "gradient"),
    why="From step 30 on: a pair of twins has distance 0, where the slope of the root is infinite.",
)
def _(t: Training) -> None:
    def twin(batch: Any) -> Any:
        (anchor, near, far), target = batch
        return (anchor, torch.cat([anchor[:1], near[1:]]), far), target

    spoil(t, lambda number: number == 30, twin)


@fault(
    "raw counts overflow in float16",
    half,
    ("", "fc1", "offset"),
    (*NAN, "overflow", "float16", "half"),
    why="From step 60 on the pixels come in units a million times smaller: beyond 65504.",
)
def _(t: Training) -> None:
    spoil(t, lambda number: number >= 60, scaled(1e6))


@fault(
    "no scaler in float16",
    half,
    ("", "*"),
    ("zero", "underflow", "vanish", "float16", *STILL),
    why="Of a loss this small every gradient is below what float16 can hold.",
)
def _(t: Training) -> None:
    t.step.scaler = torch.amp.GradScaler("cpu", enabled=False)
    t.restore = (t.step.scaler,)


@fault(
    "scaler halved in every step",
    half,
    ("", "offset"),
    (*NAN, *STILL, "skip", "scale"),
    why="From step 40 on the distance from the weights of that step is penalised: a root at 0.",
)
def _(t: Training) -> None:
    anchors: list[Tensor] = []

    def penalised(inner: Any, model: nn.Module, batch: Any) -> Tensor:
        weight = model.offset.weight
        anchors.append(weight.detach().clone())
        return inner(model, batch) + 1e-3 * (weight - anchors[0]).pow(2).sum().sqrt()

    loss_from(t, 40, penalised)


@fault(
    "Adam without epsilon",
    rated,
    ("", "user", "item"),
    NAN,
    why="Rows of users that did not occur have moments of zero, and zero by zero is NaN.",
)
def _(t: Training) -> None:
    t.optimizer.param_groups[0]["eps"] = 0.0


@fault(
    "variance without a floor",
    certain,
    ("", "variance", "fc*", "mean"),
    (*GROWS, "zero", "fall", "spread"),
    why="The net fits the few samples, the variance falls to 0, and the likelihood is infinite.",
)
def _(t: Training) -> None:
    t.model.floor = 0.0


# ---- not updated ---------------------------------------------------------------------------------


@fault(
    "first block frozen by a callback",
    language,
    ("blocks.0", "blocks.0.*"),
    (*STILL, "requires_grad", "no gradient"),
    why="From step 40 on nothing in the first block is trained.",
)
def _(t: Training) -> None:
    before(t, 40, lambda model, _: model.blocks[0].requires_grad_(False))


@fault(
    "convolution's own rate falls to zero",
    by_adam,
    ("conv2",),
    (*STILL, "zero", "update"),
    why="From step 30 on one of the schedule's two factors is 0.",
)
def _(t: Training) -> None:
    rate_of(t, "conv2", 1e-2)
    factors = [lambda _: 1.0, lambda number: float(number < 30)]
    t.step.schedule = torch.optim.lr_scheduler.LambdaLR(t.optimizer, factors)


@fault(
    "rate falls to zero within a tenth of the training",
    seen,
    ("", "*"),
    (*STILL, "update", "rate", "small", "zero"),
    why="From step 12 on the rate is 0: the schedule was given the number of epochs.",
)
def _(t: Training) -> None:
    without_schedule(t, 3e-3)
    t.step.schedule = torch.optim.lr_scheduler.PolynomialLR(t.optimizer, 12)


@fault(
    "rate divided by ten in each step",
    by_sgd,
    ("", "*"),
    (*STILL, "update", "rate", "small", "zero"),
    why="From step 6 on updates are too small to change a weight: meant for epochs.",
)
def _(t: Training) -> None:
    t.step.schedule = torch.optim.lr_scheduler.ExponentialLR(t.optimizer, 0.1)


@fault(
    "head replaced behind the optimizer's back",
    by_sgd,
    ("", "head"),
    (*STILL, "update", "replaced", "jump", "optimizer"),
    why="From step 50 on there is a new head, which the optimizer does not know.",
)
def _(t: Training) -> None:
    def replace(model: nn.Module, _: Any) -> None:
        model.head.weight = nn.Parameter(0.05 * torch.randn(10, 64))
        model.head.bias = nn.Parameter(torch.zeros(10))

    before(t, 50, replace)


@fault(
    "trunk computed without gradients",
    shared,
    ("trunk", "trunk.*"),
    (*STILL, "gradient", "detach"),
    why="From step 60 on the features are detached, and the trunk stands still.",
)
def _(t: Training) -> None:
    def detach(model: nn.Module, _: Any) -> None:
        model.to_label = model.to_ink = Tensor.detach

    before(t, 60, detach)


@fault(
    "step taken only if the loss is the best so far",
    recurrent,
    ("", "*"),
    (*STILL, "update", "skip", "zero", "rarely"),
    why="After some lucky batches hardly a step is taken.",
)
def _(t: Training) -> None:
    usual, best = t.step.loss, [math.inf]

    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        optimizer.zero_grad()
        loss = usual(model, batch)
        loss.backward()
        if loss < best[0]:
            best[0] = loss.item()
            optimizer.step()
        return loss.item()

    t.step = step


@fault(
    "gradient clipped to nothing",
    recurrent,
    ("", "*"),
    (*STILL, "update", "small", "vanish", "clip", "tiny"),
    why="From step 50 on the norm is clipped to 1e-9, and the rate is that of SGD.",
)
def _(t: Training) -> None:
    usual, t.optimizer = t.step, torch.optim.SGD(t.model.parameters(), 0.5)
    before(t, 50, lambda *_: setattr(usual, "clip", 1e-9))


@fault(
    "weights rounded to bfloat16 after each step",
    compressed,
    ("", "*"),
    (*STILL, "update", "round", "bfloat16", "small"),
    why="From step 60 on the updates are below half of the weights' last bit.",
)
def _(t: Training) -> None:
    def round_off(number: int, model: nn.Module, optimizer: Any) -> None:
        if number >= 60:
            optimizer.param_groups[0]["lr"] = 2e-5
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16().float()

    each_step(t, round_off)


# ---- too much in one layer -----------------------------------------------------------------------


@fault(
    "rate of the head 300 times that of the rest",
    seen,
    ("head",),
    ("update", "ratio", "rate", "large", *GROWS),
    why="The head's group was given 1 for 3e-3: its weights jump about.",
)
def _(t: Training) -> None:
    without_schedule(t, 3e-3)
    rate_of(t, "head", 1.0)


@fault(
    "momentum above one",
    by_sgd,
    ("", "*"),
    GROWS,
    why="From step 40 on the momentum is 1.05: old updates do not fade but grow.",
)
def _(t: Training) -> None:
    def heavier(number: int, model: nn.Module, optimizer: Any) -> None:
        if number >= 40:
            optimizer.param_groups[0]["momentum"] = 1.05

    each_step(t, heavier)


@fault(
    "gradients never cleared",
    by_sgd,
    ("", "*"),
    ("zero_grad", "accumul", "cleared", *GROWS),
    why="From step 40 on each gradient is the sum of all those before.",
)
def _(t: Training) -> None:
    usual = t.step

    def clear(optimizer: Any) -> None:
        if usual.number < 40:
            optimizer.zero_grad()

    usual.clear = clear


@fault(
    "one batch on another scale throws the training off",
    deep_relu,
    ("", "*"),
    (*GROWS, *DEAD),
    why="From step 60 on, after one unstandardised batch, without clipping: it does not recover.",
)
def _(t: Training) -> None:
    spoil(t, lambda number: number == 60, scaled(1e3))


@fault(
    "recurrent net of ReLU without clipping",
    unrolled,
    ("", "gru", "score", "head"),
    (*GROWS, *DEAD),
    why="The recurrent weights come to multiply the state in each step, over and over.",
)
def _(t: Training) -> None:
    t.step.clip = None
    t.optimizer = torch.optim.SGD(t.model.parameters(), 0.3, 0.9)


@fault(
    "sign of the loss flipped",
    compressed,
    ("", "*"),
    GROWS,
    why="From step 70 on the error is maximised.",
)
def _(t: Training) -> None:
    loss_from(t, 70, lambda inner, model, batch: -inner(model, batch))


@fault(
    "discount above one",
    values,
    ("", "[0-9]*"),
    GROWS,
    why="A state's value is more than that of the next, which is more again, without end.",
)
def _(t: Training) -> None:
    t.step.discount = 1.2


# ---- weights -------------------------------------------------------------------------------------


@fault(
    "decay that outweighs the loss",
    compressed,
    ("", "*"),
    (*SHRINKS, *ALIKE),
    why="The square of the weights outweighs the error: all of them go to 0.",
)
def _(t: Training) -> None:
    t.optimizer = torch.optim.Adam(t.model.parameters(), 3e-3, weight_decay=0.5)


@fault(
    "recurrent weights decayed to nothing",
    recurrent,
    ("", "gru"),
    (*SHRINKS, "zero"),
    why="From step 30 on the recurrent matrix loses a fifth in each step: the net forgets.",
)
def _(t: Training) -> None:
    def fade(number: int, model: nn.Module, optimizer: Any) -> None:
        if number >= 30:
            model.gru.weight_hh_l0.data *= 0.8

    each_step(t, fade)


@fault(
    "penalty of the embeddings' norm with the wrong sign",
    rated,
    ("", "user"),
    GROWS,
    why="The users' vectors grow from step to step, as their norm is rewarded.",
)
def _(t: Training) -> None:
    def rewarded(inner: Any, model: nn.Module, batch: Any) -> Tensor:
        return inner(model, batch) - 0.1 * model.user.weight.pow(2).sum(1).mean()

    loss_from(t, 0, rewarded)


@fault(
    "logits rewarded for their size",
    by_adam,
    ("", "head"),
    (*GROWS, "saturat"),
    why="The penalty of large logits was subtracted: they grow without end.",
)
def _(t: Training) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        logits = model(images)
        return F.cross_entropy(logits, labels) - 0.05 * logits.pow(2).mean()

    t.step.loss = loss


@fault(
    "block initialised anew",
    pictures,
    ("", "blocks.2", "blocks.2.*"),
    ("jump", "sudden", "initial", "reset", "spike", "change", "update"),
    why="From step 50 on the third block begins again, with the rate at its end.",
)
def _(t: Training) -> None:
    def again(model: nn.Module, _: Any) -> None:
        for layer in model.blocks[2].modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()

    before(t, 50, again)


@fault(
    "slow copy that moves away from what it should follow",
    mean_teacher,
    ("", "teacher", "teacher.*"),
    GROWS,
    why="From step 50 on the sign of the average is wrong: the difference grows in each step.",
)
def _(t: Training) -> None:
    before(t, 50, lambda *_: setattr(t.model, "momentum", 1.15))


# ---- saturated -----------------------------------------------------------------------------------


@fault(
    "temperature of attention falls without a bound",
    seen,
    ("", "blocks*"),
    (*FLAT, *GROWS, "attention"),
    why="The scores are multiplied by more in each step: each place comes to attend to one other.",
)
def _(t: Training) -> None:
    def sharpen(number: int, model: nn.Module, _: Any) -> None:
        for block in model.blocks:
            block.attention.scale *= 1.08

    each_step(t, sharpen)


@fault(
    "sigmoids driven flat by the rate of their layer",
    sigmoids,
    ("0", "1"),
    (*FLAT, "update", "ratio", *GROWS),
    why="From step 40 on the first layer's group has a rate of 30, and its sigmoids saturate.",
)
def _(t: Training) -> None:
    def raised(number: int, model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[1]["lr"] = 30.0 if 40 <= number < 60 else 1e-2

    rate_of(t, "0", 1e-2)
    each_step(t, raised)


@fault(
    "pixels no longer standardised before a recurrent net",
    recurrent,
    ("", "gru"),
    (*FLAT, "input", "jump", *GROWS),
    why="From step 60 on another loader gives pixels in thousands: tanh saturates.",
)
def _(t: Training) -> None:
    spoil(t, lambda number: number >= 60, scaled(1e3))


@fault(
    "policy rewarded for being certain",
    acting,
    ("", "policy", "body*"),
    (*FLAT, *GROWS, *ALIKE),
    why="The bonus of entropy has the wrong sign: the softmax saturates at one action.",
)
def _(t: Training) -> None:
    t.step.bonus = -2.0


@fault(
    "all samples to one expert",
    routed,
    ("", "router", "experts*"),
    (*DEAD, *ALIKE, "unused", *FLAT, "router", *STILL),
    why="The term that balances the experts' load rewards its opposite.",
)
def _(t: Training) -> None:
    t.step.balance = -3.0


# ---- normalisation and activations ---------------------------------------------------------------


@fault(
    "never back in training mode after a validation",
    by_adam,
    ("", "bn1", "bn2", "dropout"),
    ("eval", "mode", "stale", "statistic", "running"),
    why="From step 40 on statistics are no longer kept, and nothing is dropped.",
)
def _(t: Training) -> None:
    before(t, 40, lambda model, _: model.eval())


@fault(
    "running statistics thrown off by broken pictures",
    by_adam,
    ("", "bn1", "bn2", "conv1", "conv2"),
    ("running", "statistic", "varian", "input", *GROWS),
    why="From step 50 on each fourth batch is a million times larger, and evaluation is wrong.",
)
def _(t: Training) -> None:
    spoil(t, lambda number: number >= 50 and number % 4 == 0, scaled(1e6))


@fault(
    "residual stream multiplied in each step",
    language,
    ("", "blocks*", "embedding", "position", "norm"),
    (*GROWS, "drift"),
    why="A gain that was to warm up is never bounded: the stream is a thousand times too large.",
)
def _(t: Training) -> None:
    gain = [1.0]

    def louder(number: int, model: nn.Module, _: Any) -> None:
        gain[0] *= 1.08

    t.model.between = lambda x: x * gain[0]
    each_step(t, louder)


@fault(
    "loader gives blank pictures",
    by_sgd,
    ("", "*"),
    ("constant", "same", "zero", "input", "batch", "alike", "identical", *STILL),
    why="From step 60 on every pixel of every picture is 0, and nothing can be learnt.",
)
def _(t: Training) -> None:
    spoil(t, lambda number: number >= 60, scaled(0.0))


# ---- what a loop does besides --------------------------------------------------------------------


@fault(
    "checkpoint loaded into new parameters",
    compressed,
    ("", "*"),
    (*STILL, "update", "replaced", "optimizer"),
    why="From step 50 on the model has other parameters than those that the optimizer updates.",
)
def _(t: Training) -> None:
    def load(model: nn.Module, _: Any) -> None:
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(saved, assign=True)

    before(t, 50, load)


@fault(
    "range test of the rate that never ends",
    seen,
    ("", "*"),
    GROWS,
    why="The rate grows by a tenth in each step, and the loss ends above that at the start.",
)
def _(t: Training) -> None:
    without_schedule(t, 1e-4)
    t.step.schedule = torch.optim.lr_scheduler.ExponentialLR(t.optimizer, 1.1)
    t.step.clip = None


@fault(
    "averaged weights never swapped back",
    by_sgd,
    ("", "*"),
    ("jump", "sudden", "reset", "spike", "replaced", "overwrit", "change", "update", *GROWS),
    why="From step 30 on each validation leaves the slow average, near the start, as the weights.",
)
def _(t: Training) -> None:
    average = {name: value.clone() for name, value in t.model.state_dict().items()}

    def validate(number: int, model: nn.Module, _: Any) -> None:
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 1e-3)
        if number and number % 30 == 0:
            model.load_state_dict(average)

    each_step(t, validate)


@fault(
    "hook registered anew in each step",
    compressed,
    ("", "encoder", "decoder", "decoder.*"),
    (*GROWS, "varian", "hook", "noise", "drift"),
    why="Each step adds a hook that adds noise to the code, on top of those before.",
)
def _(t: Training) -> None:
    def noisy(number: int, model: nn.Module, _: Any) -> None:
        model.encoder.register_forward_hook(lambda _, __, code: code + torch.randn_like(code))

    each_step(t, noisy)


@fault(
    "dropout raised until nothing is left",
    by_adam,
    ("", "dropout", "head"),
    (*DEAD, *STILL, "dropout"),
    why="From step 80 on the scheduled rate of dropout is 1: the head sees zeros alone.",
)
def _(t: Training) -> None:
    def raised(number: int, model: nn.Module, _: Any) -> None:
        model.dropout.p = min(1.0, number / 80)

    each_step(t, raised)


@fault(
    "learned scale of the cosines without a bound",
    paired,
    ("", "scale"),
    (*GROWS, *FLAT, "update", "ratio"),
    why="From step 60 on a large scale is rewarded, which was to be held down: it saturates.",
)
def _(t: Training) -> None:
    t.model.most = math.inf
    rate_of(t, "scale", 0.1)
    loss_from(t, 60, lambda inner, model, batch: inner(model, batch) - model.scale.log)


@fault(
    "weights of a critic clipped to almost nothing",
    wasserstein,
    ("", "critic*"),
    (*SHRINKS, *STILL, "constant", "tiny"),
    why="Within 0.001 of zero the critic is constant, and the generator's gradient vanishes.",
)
def _(t: Training) -> None:
    t.step.bound = 1e-3
