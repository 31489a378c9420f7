"""Steps wrong in modes, statistics, averages, ties, precision, settings or what they keep."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from corpus.cards import Shelf
from corpus.models.blind_steps import (
    Values,
    adapted,
    adversarial,
    attended,
    averaged,
    averaging,
    bootstrapped,
    bootstrapping,
    classifier,
    clustered,
    consistent,
    contrasted,
    convolutional,
    decay_groups,
    descended,
    extracted,
    fine_tuned,
    language_model,
    mastered,
    mean_teacher,
    mixed,
    pretrained,
    q_learner,
    realism,
    recurrent,
    residual,
    scheduled,
    self_taught,
    staged,
    stateful,
    supervised,
    surprise,
    teaching,
    variational,
    warm_up,
)
from corpus.models.parts import follow
from corpus.models.small import evidence_bound, language_loss
from corpus.subject import Training

SHELF = Shelf("training", "blind")
fault = SHELF.fault

EVALUATED = ("eval", "training mode", "train()")
STATISTICS = ("running", "statistic", "buffer", "momentum", "track_running_stats")
NORMS = ("", "bn*", "*.bn*", "backbone.[14]", "backbone.[14].*")
STILL = (
    *("not move", "nothing move", "moves no", "not chang", "unchanged", "not updat", "no update"),
    *("never updat", "same after", "as before", "stay", "never move", "not train"),
)
LAGGING = (*STILL, "moving average", "follow", "lag")
TOLD = (
    *("in the optimizer", "by the optimizer", "held by", "gets a gradient", "gets gradient"),
    *("requires_grad", "frozen", "trained", "no_grad", "has a gradient"),
)
SWALLOWED = (
    "bfloat16",
    "float16",
    "half",
    "precision",
    "round",
    "swallow",
    "too small",
    "underflow",
)
SETTING = ("beta", "eps", "dampening", "weight_decay", "weight decay", "decay", "setting")
BY_HAND = ("outside", "not by the optimizer", "by hand", "besides", "overwr", "replac", "put back")
HELD = (
    *("not in", "no optimizer", "not hold", "not held", "holds n", "not given", "missing", "stale"),
    *("left out", "no group", "no longer"),
)
AGAIN = (
    "second time",
    "second call",
    "2nd",
    "call 2",
    "again",
    "raise",
    "error",
    "graph",
    "detach",
)
CUT = ("no gradient", "without a gradient", "is none", "detach", "no_grad", "cut", "graph", *STILL)


# ---- modes ---------------------------------------------------------------------------------------


@fault(
    "in evaluation as from_pretrained left it",
    pretrained,
    ("", "*"),
    EVALUATED,
    why="Nobody called train(): none of the dropouts drops.",
)
def _(t: Training) -> None:
    t.model.eval()

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    t.step = step


@fault(
    "validation in the first step leaves evaluation mode",
    residual,
    NORMS,
    EVALUATED,
    why="From the second step on the norms use statistics that no longer move.",
)
def _(t: Training) -> None:
    t.model.train()
    seen = {"steps": 0}

    @torch.no_grad()
    def validate(model: nn.Module, inputs: Tensor, target: Tensor) -> float:
        model.eval()
        return (model(inputs).argmax(1) == target).float().mean().item()

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        if seen["steps"] % 100 == 0:
            validate(model, inputs, target)
        seen["steps"] += 1
        return loss

    t.step = step


@fault(
    "dropout turned off to compare two runs",
    convolutional,
    ("", "dropout"),
    EVALUATED,
    why="A layer put into evaluation by itself stays there, as only the setup calls train().",
)
def _(t: Training) -> None:
    t.model.dropout.eval()

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss

    t.step = step


@fault(
    "seed set in each step",
    convolutional,
    ("", "dropout", "head", "head.*"),
    ("seed", "random", "same mask", "same units", "repeat"),
    why="For the sake of repeatability dropout drops the same units in every step.",
)
def _(t: Training) -> None:
    plain = supervised(F.cross_entropy)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        torch.manual_seed(42)
        return plain(model, optimizer, batch)

    t.step = step


# ---- running statistics --------------------------------------------------------------------------


@fault(
    "norms in evaluation, from a recipe for fine-tuning",
    residual,
    NORMS,
    (*EVALUATED, *STATISTICS),
    why="Trained from scratch, the statistics stay at mean 0 and variance 1.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss

    t.step = step


@fault(
    "momentum of the norms 0 by a port",
    convolutional,
    NORMS,
    STATISTICS,
    why="1 - 1.0 of the other framework: running statistics never move.",
)
def _(t: Training) -> None:
    t.model.bn1.momentum = t.model.bn2.momentum = 0.0


@fault(
    "momentum of the norms as the other framework has it",
    convolutional,
    NORMS,
    STATISTICS,
    why="With 0.99 the running statistics are those of the last batch.",
)
def _(t: Training) -> None:
    t.model.bn1.momentum = t.model.bn2.momentum = 0.99


@fault(
    "tracking of statistics switched off after the norms were made",
    staged,
    NORMS,
    STATISTICS,
    why="The buffers are there and used in evaluation, but they never move.",
)
def _(t: Training) -> None:
    for module in t.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False


@fault(
    "a batch of zeros in each step to count operations",
    convolutional,
    NORMS,
    (*STATISTICS, "twice", "two forward", "zeros"),
    why="Called in training mode, it draws every running mean towards that of nothing.",
)
def _(t: Training) -> None:
    plain = supervised(F.cross_entropy)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        loss = plain(model, optimizer, batch)
        with torch.no_grad():
            model(torch.zeros_like(batch[0]))
        return loss

    t.step = step


@fault(
    "statistics of the frozen backbone move",
    fine_tuned,
    NORMS,
    (*STATISTICS, "frozen"),
    why="Its weights are frozen, but train() has reached its norms.",
)
def _(t: Training) -> None:
    t.step = supervised(F.cross_entropy)


@fault(
    "teacher follows the weights and not the statistics",
    mean_teacher,
    ("", "teacher", "teacher.*"),
    (*STATISTICS, *STILL),
    why="The teacher normalises by mean 0 and variance 1 for ever.",
)
def _(t: Training) -> None:
    t.step = consistent(lambda teacher, student: follow(teacher, student, 0.95))


# ---- averages, teachers, targets -----------------------------------------------------------------


@fault(
    "target moved when a count is reached that begins anew in each step",
    q_learner,
    ("", "target", "target.*"),
    LAGGING,
    why="The count is a local name: the target stays as it was drawn.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        done = 0
        loss = surprise(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += 1
        if done % 2 == 0:
            follow(model.target, model.online, 0.99)
        return loss.item()

    t.step = step


@fault(
    "online net follows the target",
    bootstrapped,
    ("", "online", "online.*", "target", "target.*"),
    (*LAGGING, *BY_HAND, "direction", "away from"),
    why="The arguments changed places: the target never moves, and draws the online net back.",
)
def _(t: Training) -> None:
    t.step = bootstrapping(lambda model: follow(model.online, model.target, 0.9))


@fault(
    "target moved by the complement of its momentum",
    self_taught,
    ("", "teacher", "teacher.*"),
    (*LAGGING, "momentum", "fast", "copy", "same as"),
    why="0.004 for 0.996: after each step the teacher is the student.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = teaching(model, batch)
        loss.backward()
        optimizer.step()
        follow(model.teacher, model.student, 0.004)
        return loss.detach()

    t.step = step


@fault(
    "centre of the teacher computed and not kept",
    self_taught,
    ("", "center", "teacher", "teacher.*"),
    ("buffer", *STILL),
    why="lerp returns what lerp_ would have stored: the centre stays where it began.",
)
def _(t: Training) -> None:
    def teach(model: nn.Module, batch: Any) -> Tensor:
        a, b = batch
        with torch.no_grad():
            output = model.teacher(b)
            wanted = ((output - model.center) / 0.05).softmax(-1)
            model.center.lerp(output.mean(0), 0.1)
        return F.cross_entropy(model.student(a) / 0.1, wanted)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = teach(model, batch)
        loss.backward()
        optimizer.step()
        follow(model.teacher, model.student, 0.996)
        return loss.detach()

    t.step = step


@fault(
    "target net trained by the loss",
    q_learner,
    ("", "target", "target.*"),
    TOLD,
    why="No no_grad around it, and all parameters in the optimizer: the goal comes to the guess.",
)
def _(t: Training) -> None:
    t.model.target.requires_grad_(True)
    t.optimizer = torch.optim.Adam(t.model.parameters(), lr=2e-3)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        states, actions, rewards, following, done = batch
        wanted = rewards + 0.9 * (1 - done) * model.target(following).amax(1)
        values = model.online(states).gather(1, actions[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(values, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(model.target, model.online, 0.995)
        return loss.item()

    t.step = step


@fault(
    "target net that is the online net",
    q_learner,
    ("", "target", "target.*", "online", "online.*"),
    ("same", "share", "tied", "one object", "alias", "lag", *TOLD),
    why="Assigned and not copied: the goal moves with every step.",
)
def _(t: Training) -> None:
    model = Values()
    model.target = model.online
    t.model = model
    t.optimizer = torch.optim.Adam(model.online.parameters(), lr=2e-3)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        loss = surprise(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(model.target, model.online, 0.995)
        return loss.item()

    t.step = step


@fault(
    "average fed from a copy made before training",
    averaged,
    "",
    ("average", *STILL),
    why="The copy never trains, and so the average never moves.",
)
def _(t: Training) -> None:
    average = AveragedModel(t.model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    t.step, t.restore = averaging(average, copy.deepcopy(t.model)), (average,)


@fault(
    "averaged weights put in for a validation, and left in",
    averaged,
    ("", "*"),
    (*BY_HAND, "average"),
    why="Each step begins from the average, which takes away nearly all that the last one did.",
)
def _(t: Training) -> None:
    (average,) = t.restore
    train = averaging(average)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        loss = train(model, optimizer, batch)
        model.load_state_dict(average.module.state_dict())
        with torch.no_grad():
            F.cross_entropy(model(batch[0]), batch[1])
        return loss

    t.step = step


@fault(
    "fast weights set back to slow ones that never move",
    descended,
    ("", "*"),
    (*BY_HAND, *STILL),
    why="Lookahead without the line that moves the slow weights ends each step where it began.",
)
def _(t: Training) -> None:
    slow = [p.detach().clone() for p in t.model.parameters()]
    plain = supervised(F.cross_entropy)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        loss = plain(model, optimizer, batch)
        with torch.no_grad():
            for parameter, start in zip(model.parameters(), slow, strict=True):
                parameter.copy_(start)
        return loss

    t.step = step


# ---- ties and parameters that are replaced -------------------------------------------------------


@fault(
    "prototypes normalised into a new parameter",
    clustered,
    ("", "prototypes", "prototypes.*"),
    (*HELD, *BY_HAND, "new parameter", "another parameter"),
    why="The optimizer holds the prototypes of the first moment; those in use never train.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        weight = F.normalize(model.prototypes.weight.detach(), dim=-1)
        model.prototypes.weight = nn.Parameter(weight)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss

    t.step = step


@fault(
    "tie of head and embedding made anew by a copy in each step",
    language_model,
    ("", "head", "head.*", "embedding", "embedding.*"),
    (*HELD, *BY_HAND, "tied", "tie ", "share", "new parameter"),
    why="The head is a copy that nobody trains: its gradient is lost for the embedding.",
)
def _(t: Training) -> None:
    train = t.step

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
        return train(model, optimizer, batch)

    t.step = step


@fault(
    "embedding enlarged after the head was tied to it",
    language_model,
    ("", "head", "head.*", "embedding", "embedding.*"),
    (*HELD, "tied", "tie ", "share"),
    why="The optimizer holds the old table, which is now the head's alone.",
)
def _(t: Training) -> None:
    larger = nn.Embedding(20, 32)
    larger.weight.data[:18] = t.model.embedding.weight.data
    t.model.embedding = larger


# ---- precision -----------------------------------------------------------------------------------


@fault(
    "weights in bfloat16, with a rate that they cannot hold",
    attended,
    ("", "*"),
    SWALLOWED,
    why="An update of 1e-5 is less than half a unit in the last place of nearly every weight.",
)
def _(t: Training) -> None:
    t.model.bfloat16()
    t.batch = t.batch[0].bfloat16(), t.batch[1]
    t.optimizer = torch.optim.AdamW(decay_groups(t.model, 0.05), lr=1e-5)


@fault(
    "weights in float16, where Adam's epsilon is zero",
    classifier,
    ("", "*"),
    ("nan", "infinit", "eps", "float16", "half", "not finite", "non-finite"),
    why="1e-8 underflows: a unit without a gradient divides zero by zero.",
)
def _(t: Training) -> None:
    t.model.half()
    t.batch = t.batch[0].half(), t.batch[1]
    t.optimizer = torch.optim.AdamW(t.model.parameters(), lr=1e-3)


@fault(
    "weights rounded to a grid after each step",
    mixed,
    ("", "*"),
    (*SWALLOWED, *BY_HAND, *STILL, "grid", "quanti"),
    why="To be aware of quantisation, a copy is to be rounded: here what was learnt is.",
)
def _(t: Training) -> None:
    train = t.step

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        loss = train(model, optimizer, batch)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_((parameter * 64).round() / 64)
        return loss

    t.step = step


@fault(
    "master weights never copied back",
    mastered,
    ("", "*"),
    (*HELD, *STILL, "copied back"),
    why="The float32 weights train, and the model that is called stays.",
)
def _(t: Training) -> None:
    masters = t.optimizer.param_groups[0]["params"]

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        model.zero_grad()
        loss = F.cross_entropy(model(inputs).float(), target)
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        return loss.detach()

    t.step = step


# ---- settings of the optimizer and the schedule --------------------------------------------------


@fault(
    "weight decay given in the place of epsilon",
    recurrent,
    ("", "*"),
    (*SETTING, "small"),
    why="The fourth argument of AdamW is eps: 0.1 beside gradients of 0.01 stifles every step.",
)
def _(t: Training) -> None:
    t.optimizer = torch.optim.AdamW(t.model.parameters(), 3e-3, (0.9, 0.999), 0.1)


@fault(
    "momentum given once more as dampening",
    descended,
    ("", "*"),
    (*SETTING, "small"),
    why="All gradients but the first count a tenth.",
)
def _(t: Training) -> None:
    t.optimizer = torch.optim.SGD(t.model.parameters(), 0.05, 0.9, 0.9)


@fault(
    "betas the wrong way round",
    contrasted,
    ("", "*"),
    SETTING,
    why="Means over a thousand steps are divided by the size of the last few gradients.",
)
def _(t: Training) -> None:
    t.optimizer = torch.optim.Adam(t.model.parameters(), lr=2e-3, betas=(0.999, 0.9))


@fault(
    "weight decay tuned for a rate a thousand times smaller",
    classifier,
    ("", "*"),
    (*SETTING, "vanish", "shrink", "towards zero", "to zero"),
    why="Rate times decay is one half: each step halves every weight.",
)
def _(t: Training) -> None:
    t.optimizer = torch.optim.AdamW(t.model.parameters(), lr=5e-3, weight_decay=100.0)


@fault(
    "schedule made anew in each step",
    language_model,
    ("", "*"),
    ("rate", "lr", "schedule", "warm"),
    why="The rate stays at that of the first step of the warm-up.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        schedule = LambdaLR(optimizer, warm_up)
        return scheduled(schedule)(model, optimizer, batch)

    t.step, t.restore = step, ()


@fault(
    "both factors of the adapters start at zero",
    adapted,
    ("", "*lora*", "blocks.*"),
    ("zero", "no gradient", *STILL),
    why="Each factor's gradient is a multiple of the other: neither ever moves.",
)
def _(t: Training) -> None:
    for name, parameter in t.model.named_parameters():
        if name.endswith("lora_a"):
            nn.init.zeros_(parameter)


# ---- graphs and what is kept ---------------------------------------------------------------------


@fault(
    "state carried over with its graph",
    stateful,
    ("", "lstm", "hidden", "cell"),
    AGAIN,
    why="The second step goes backward through the first, whose graph is gone.",
)
def _(t: Training) -> None:
    t.model.keep = torch.clone


@fault(
    "running mean of the loss kept with its graph",
    recurrent,
    "",
    AGAIN,
    why="The mean that the loss is divided by reaches back into the step before.",
)
def _(t: Training) -> None:
    kept = {"mean": torch.ones(())}

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        loss = F.cross_entropy(model(inputs), target)
        kept["mean"] = 0.9 * kept["mean"] + 0.1 * loss
        optimizer.zero_grad()
        (loss / kept["mean"]).backward()
        optimizer.step()
        return loss

    t.step = step


@fault(
    "losses listed with their graphs",
    stateful,
    "",
    ("graph", "memory", "kept", "keeps", "detach", "grow", "item"),
    why="For a plot at the end every step's graph and activations stay in memory.",
)
def _(t: Training) -> None:
    losses: list[Tensor] = []

    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        ids, following = batch
        loss = language_loss(model(ids), following)
        losses.append(loss * ids.shape[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    t.step = step


@fault(
    "discriminator frozen for the generator's step, and not thawed",
    adversarial,
    ("", "discriminator", "discriminator.*"),
    ("requires_grad", "does not require", "frozen", "freez", *AGAIN),
    why="From the second step on its loss has nothing to differentiate.",
)
def _(t: Training) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        of_generator, of_discriminator = optimizer
        fake = model.generator(torch.randn(len(batch), 16))
        of_discriminator.zero_grad()
        loss = realism(model.discriminator(batch), 1.0)
        loss = loss + realism(model.discriminator(fake.detach()), 0.0)
        loss.backward()
        of_discriminator.step()
        model.discriminator.requires_grad_(False)
        of_generator.zero_grad()
        realism(model.discriminator(fake), 1.0).backward()
        of_generator.step()
        return loss.detach()

    t.step = step


@fault(
    "features under no_grad since the head's warm-up",
    extracted,
    ("", "features", "features.*"),
    CUT,
    why="The epoch that was to end the warm-up is never counted on.",
)
def _(t: Training) -> None:
    epoch = 0

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        with torch.set_grad_enabled(epoch >= 5):
            features = model.features(inputs)
        loss = F.cross_entropy(model.head(features), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    t.step = step


@fault(
    "features kept from the first step",
    extracted,
    ("", "features", "features.*"),
    (*CUT, "never called", "not called", "not run", "never ran", "did not run"),
    why="The extractor trains in the first step alone; later ones read what it said before.",
)
def _(t: Training) -> None:
    kept: list[Tensor] = []

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        features = kept[0] if kept else model.features(inputs)
        kept[:] = [features.detach()]
        loss = F.cross_entropy(model.head(features), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    t.step = step


@fault(
    "divergence computed from what was kept for the log",
    variational,
    ("", "log_variance", "log_variance.*", "mean", "mean.*"),
    ("detach", "constant", "another loss", "not the loss", "differ", "part of the loss", "graph"),
    why="The detached means and variances went into the loss, where they hold nothing back.",
)
def _(t: Training) -> None:
    def loss_of(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
        made, *logged = output[0], *(o.detach() for o in output[1:])
        return evidence_bound((made, *logged), target)

    t.step = supervised(loss_of)
