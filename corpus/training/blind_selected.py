"""Healthy training steps in which a part alone is trained, a part of the batch counts, or several
losses meet, and what such steps return.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from corpus.cards import Shelf
from corpus.models.healthy_steps import (
    Count,
    backbone,
    controls_of,
    descend,
    entropy,
    trained,
    usual,
)
from corpus.models.parts import Adapter, PreNorm, SmallLM, conv_net, frozen, normal, perceptron
from corpus.models.small import (
    CNN,
    GPT,
    LSTM,
    MLP,
    Block,
    Multitask,
    ResNet,
    ViT,
    both_targets,
    citations,
    flat,
    images,
    ink_loss,
    label_loss,
    language_loss,
    next_words,
    noisy,
    patients,
    some_digits,
    tumours,
    words,
)
from corpus.subject import Training

SHELF = Shelf("training", "blind")
control = controls_of(SHELF)
SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def learnt(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


class Headed(nn.Module):
    """A backbone with a head."""

    def __init__(self, body: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.backbone, self.head = body, nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def norm_net() -> nn.Sequential:
    """Return convolutions with batch norms that have seen digits."""
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1),
        nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())  # fmt: skip
    with torch.no_grad():
        for _ in range(20):
            net(images(64)[0])
    return net


# ---- parts that are not trained ------------------------------------------------------------------


@control("head alone on a frozen backbone in evaluation")
def linear_probe() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        model.train()
        model.backbone.eval()
        return usual(model, optimizer, batch)

    model = Headed(backbone(norm_net()))
    return Training(model, Adam(model.head.parameters(), lr=1e-2), step, images(32))


@control("features without a graph, under a head that is trained")
def features_without_graph() -> Training:
    """The backbone still asks for gradients; none can reach it, and the optimizer has the head."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        model.backbone.eval()
        with torch.no_grad():
            features = model.backbone(x)
        return descend(optimizer, F.cross_entropy(model.head(features), y))

    model = Headed(norm_net())
    return Training(model, SGD(model.head.parameters(), lr=0.5, momentum=0.9), step, images(32))


@control("batch norms kept in evaluation while the rest is fine-tuned")
def frozen_norms() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return usual(model, optimizer, batch)

    model = Headed(norm_net())
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return Training(model, AdamW(learnt(model), lr=3e-3), step, images(16))


@control("whole model fine-tuned in evaluation mode")
def tuned_in_evaluation() -> Training:
    """As for small batches: running statistics are those of the checkpoint, dropout is off."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        model.eval()
        return usual(model, optimizer, batch)

    model = trained(CNN(), images, 40)
    return Training(model, SGD(model.parameters(), lr=1e-2), step, images(16))


@control("lower layers frozen for now, and in the optimizer all the same")
def gradual_unfreezing() -> Training:
    """Layers thaw one after the other, an epoch each (Howard and Ruder 2018)."""
    count = Count()

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        thawed = 1 + count.up() // 100
        for place, layer in enumerate(reversed(model)):
            layer.requires_grad_(place < 2 * thawed)
        return usual(model, optimizer, batch)

    model = perceptron(64, 48, 48, 10)
    return Training(model, Adam(model.parameters(), lr=5e-3), step, flat(32), (count,))


@control("two phases: head first, all of it from the fifth call on")
def two_phases() -> Training:
    count = Count()
    model = Headed(trained(perceptron(64, 48, 32), flat, 20))
    phases = [
        Adam(model.head.parameters(), lr=1e-2),
        Adam(model.parameters(), lr=1e-3),
    ]

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        phase = int(count.up() >= 4)
        model.backbone.requires_grad_(phase == 1)
        return usual(model, optimizer[phase], batch)

    return Training(model, tuple(phases), step, flat(32), (count,))


@control("biases alone")
def biases_alone() -> Training:
    """BitFit (Ben Zaken et al. 2022)."""
    model = ViT()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias") or name.startswith("head"))
    return Training(model, AdamW(learnt(model), lr=1e-2), usual, images(16))


@control("norms alone, all else frozen and in no optimizer")
def norms_alone() -> Training:
    model = frozen(ResNet(8, 2))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(True)
    return Training(model, SGD(learnt(model), lr=0.1, momentum=0.9), usual, images(32))


class LowRank(nn.Module):
    """Adds a product of two small matrices, the second of zeros, to a frozen layer."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base, self.scale = frozen(base), 2.0
        self.lora_a = normal(rank, base.in_features, std=0.2)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (x @ self.lora_a.T @ self.lora_b.T)


@control("low-rank adapters on queries and values")
def low_rank() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        ids, after = batch
        loss = language_loss(model(ids), after)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learnt(model), 1.0)
        optimizer.step()
        return loss.detach()

    model = frozen(GPT(depth=2))
    for block in model.blocks:
        block.attention.q = LowRank(block.attention.q)
        block.attention.v = LowRank(block.attention.v)
    return Training(model, AdamW(learnt(model), lr=1e-2), step, next_words(8))


@control("adapters that begin as the identity")
def adapters() -> Training:
    model = frozen(trained(perceptron(64, 32, 32, 10), flat, 20))
    model.insert(2, Adapter(32))
    model.insert(5, Adapter(32))
    return Training(model, Adam(learnt(model), lr=3e-3), usual, flat(32))


class Prompted(nn.Module):
    """A frozen language model behind a learnt prompt."""

    def __init__(self, lm: SmallLM, length: int = 4) -> None:
        super().__init__()
        self.lm, self.prompt = backbone(lm), normal(length, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([self.prompt.expand(len(ids), -1, -1), self.lm.wte(ids)], 1)
        x = self.lm.trunk(x + self.lm.wpe(torch.arange(x.shape[1])))
        return self.lm.lm_head(x[:, len(self.prompt) :])


@control("prompt alone before a frozen language model")
def prompt_alone() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        ids, after = batch
        return descend(optimizer, language_loss(model(ids), after))

    model = Prompted(SmallLM())
    return Training(model, Adam([model.prompt], lr=0.1), step, next_words(8))


@control("every parameter in the optimizer, the frozen ones too")
def frozen_in_optimizer() -> Training:
    model = Headed(backbone(norm_net()))
    return Training(model, AdamW(model.parameters(), lr=1e-2), usual, images(32))


@control("random features that are never trained")
def random_features() -> Training:
    """An echo state: the recurrent layer is a reservoir, its readout is learnt."""

    class Reservoir(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = frozen(nn.RNN(8, 96, batch_first=True))
            self.rnn.weight_hh_l0.data *= 4
            self.readout = nn.Linear(96, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.readout(self.rnn(x)[0][:, -1])

    model = Reservoir()
    pixels, labels = flat(32)
    batch = pixels.view(-1, 8, 8), labels
    return Training(model, Adam(model.readout.parameters(), lr=1e-2), usual, batch)


@control("word vectors from a checkpoint that stay as they are")
def frozen_words() -> Training:
    model = LSTM()
    model.embedding = nn.Embedding.from_pretrained(torch.randn(18, 16), freeze=True)
    return Training(model, Adam(learnt(model), lr=5e-3), usual, words(32))


@control("pruned by masks of torch")
def pruned_by_torch() -> Training:
    model = perceptron(64, 48, 10)
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", amount=0.7)
    return Training(model, SGD(model.parameters(), lr=0.1, momentum=0.9), usual, flat(32))


@control("gradients of all but new rows masked by a hook")
def new_rows() -> Training:
    """Words added to a vocabulary are learnt, the old ones stand still."""
    model = LSTM()
    frozen(model).embedding.weight.requires_grad_(True)
    mask = torch.zeros(18, 1)
    mask[10:] = 1
    model.embedding.weight.register_hook(lambda gradient: gradient * mask)
    return Training(model, Adam([model.embedding.weight], lr=0.05), usual, words(32))


# ---- parts of the batch that do not count --------------------------------------------------------


@control("labels of -100 for some of the samples")
def unlabelled_samples() -> Training:
    model = perceptron(64, 32, 10)
    x, y = flat(32)
    y = y.masked_fill(torch.rand(32) < 0.4, -100)
    return Training(model, Adam(model.parameters(), lr=3e-3), usual, (x, y))


@control("weights of zero for samples that fill the batch up")
def filled_up() -> Training:
    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return descend(optimizer, (losses * batch["weight"]).sum() / batch["weight"].sum())

    model = MLP()
    x, y = flat(24)
    weight = (torch.arange(24) < 17).float()
    batch = {"x": x * weight[:, None], "y": y * weight.long(), "weight": weight}
    return Training(model, SGD(model.parameters(), lr=0.1), step, batch)


@control("prompts without a loss, answers with one")
def answers_alone() -> Training:
    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = model(batch["input_ids"])[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return {"loss": loss.detach(), "tokens": (batch["labels"] >= 0).sum()}

    model = SmallLM()
    ids, _ = words(12)
    labels = ids.masked_fill(torch.arange(32) < torch.randint(8, 24, (12, 1)), -100)
    batch = {"input_ids": ids, "labels": labels}
    return Training(model, AdamW(model.parameters(), lr=3e-3), step, batch)


@control("border of each mask left out of the loss")
def ignored_border() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, labels = batch
        return descend(optimizer, F.cross_entropy(model(x), labels, ignore_index=255))

    model = nn.Sequential(nn.Conv2d(1, 12, 3, 1, 1), nn.ReLU(), nn.Conv2d(12, 2, 3, 1, 1))
    x, ink = noisy(16)
    labels = ink[:, 0].long()
    labels[:, [0, -1]] = 255
    return Training(model, Adam(model.parameters(), lr=1e-2), step, (x, labels))


@control("graph of which some nodes have labels")
def labelled_nodes() -> Training:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 32), nn.Linear(32, 10)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            x = F.dropout(F.relu(edges @ self.one(x)), 0.5, self.training)
            return edges @ self.two(x)

    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        model.train()
        mask = batch["train_mask"]
        output = model(batch["x"], batch["edges"])
        return descend(optimizer, F.cross_entropy(output[mask], batch["y"][mask]))

    model = Graph()
    (x, edges), y = citations(64)
    batch = {"x": x, "edges": edges, "y": y, "train_mask": torch.rand(64) < 0.3}
    optimizer = Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    return Training(model, optimizer, step, batch)


@control("hardest quarter of the samples alone")
def hardest_samples() -> Training:
    """Online hard example mining (Shrivastava et al. 2016)."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        losses = F.cross_entropy(model(x), y, reduction="none")
        return descend(optimizer, losses.topk(len(x) // 4).values.mean())

    model = CNN()
    return Training(model, SGD(model.parameters(), lr=0.05, momentum=0.9), step, images(32))


@control("easiest samples alone, more of them by and by")
def easiest_samples() -> Training:
    """Self-paced, against wrong labels."""
    count = Count()

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        losses = F.cross_entropy(model(x), y, reduction="none")
        share = min(1.0, 0.3 + count.up() / 100)
        kept = losses.topk(int(share * len(x)), largest=False).values
        return descend(optimizer, kept.mean())

    model = perceptron(64, 48, 10)
    return Training(model, Adam(model.parameters(), lr=3e-3), step, flat(48), (count,))


@control("samples chosen by a first forward, and a second one of these")
def selective_backward() -> Training:
    """Selective backpropagation (Jiang et al. 2019)."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        with torch.no_grad():
            losses = F.cross_entropy(model(x), y, reduction="none")
        chosen = losses.argsort(descending=True)[: len(x) // 2]
        return descend(optimizer, entropy(model, (x[chosen], y[chosen])))

    model = MLP()
    return Training(model, SGD(model.parameters(), lr=0.1), step, flat(64))


@control("samples drawn in proportion to their losses, and weighted for it")
def importance_sampling() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        with torch.no_grad():
            odds = F.cross_entropy(model(x), y, reduction="none").clamp(min=1e-3)
            odds = odds / odds.sum()
        drawn = torch.multinomial(odds, 24, replacement=True)
        losses = F.cross_entropy(model(x[drawn]), y[drawn], reduction="none")
        return descend(optimizer, (losses / (len(x) * odds[drawn])).mean())

    model = perceptron(64, 32, 10)
    return Training(model, SGD(model.parameters(), lr=0.1), step, flat(48))


@control("margins that most samples keep, so few have a gradient")
def hinges() -> Training:
    """A support vector machine near its end."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        loss = F.relu(1 - (2 * y - 1) * model(x)).mean() + 1e-4 * model.weight.square().sum()
        return descend(optimizer, loss)

    model = nn.Linear(30, 1)
    made = Training(model, SGD(model.parameters(), lr=0.1), step, tumours(64))
    for _ in range(80):
        step(model, made.optimizer, made.batch)
    return made


@control("focal loss, small for what is easy")
def focal() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        losses = F.cross_entropy(model(x), y, reduction="none")
        return descend(optimizer, ((1 - (-losses).exp()) ** 2 * losses).mean())

    model = CNN()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, images(32))


@control("classes weighted by how rare they are")
def weighted_classes() -> Training:
    weight = torch.tensor([0.2, 1.0, 1.0, 5.0, 1.0, 1.0, 2.0, 1.0, 1.0, 0.0])
    criterion = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        return descend(optimizer, criterion(model(x), y))

    model = MLP()
    return Training(model, SGD(model.parameters(), lr=0.1, momentum=0.9), step, flat(48))


@control("pseudo-labels that no sample is sure enough for yet")
def unsure_pseudo_labels() -> Training:
    """FixMatch (Sohn et al. 2020) at its start."""

    def step(model: Any, optimizer: Any, batch: dict[str, Any]) -> Tensor:
        supervised = entropy(model, batch["labelled"])
        x = batch["unlabelled"]
        with torch.no_grad():
            sure, guess = model(x + 0.05 * torch.randn_like(x)).softmax(1).max(1)
        losses = F.cross_entropy(model(x + 0.5 * torch.randn_like(x)), guess, reduction="none")
        return descend(optimizer, supervised + ((sure > 0.95) * losses).mean())

    model = perceptron(64, 48, 10)
    batch = {"labelled": flat(16), "unlabelled": flat(48)[0]}
    return Training(model, SGD(model.parameters(), lr=0.05, momentum=0.9), step, batch)


@control("worst of three groups weighs most")
def robust_groups() -> Training:
    """Distributionally robust over groups (Sagawa et al. 2020): weights of groups are kept."""
    weights = torch.ones(3) / 3

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y, group = batch
        losses = F.cross_entropy(model(x), y, reduction="none")
        means = torch.stack([losses[group == g].mean() for g in range(3)])
        weights.mul_((0.1 * means.detach()).exp()).div_(weights.sum())
        return descend(optimizer, (weights * means).sum())

    model = perceptron(64, 32, 10)
    x, y = flat(48)
    return Training(model, SGD(model.parameters(), lr=0.1), step, (x, y, y % 3))


# ---- batches that the step changes a copy of -----------------------------------------------------


@control("inputs mixed with those of other samples")
def mixup() -> Training:
    beta = torch.distributions.Beta(0.4, 0.4)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        share, order = beta.sample(), torch.randperm(len(x))
        output = model(share * x + (1 - share) * x[order])
        loss = share * F.cross_entropy(output, y) + (1 - share) * F.cross_entropy(output, y[order])
        return descend(optimizer, loss)

    model = CNN()
    return Training(model, SGD(model.parameters(), lr=0.05, momentum=0.9), step, images(32))


@control("rectangles cut from other samples")
def cutmix() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        order, (top, left) = torch.randperm(len(x)), torch.randint(0, 5, (2,)).tolist()
        mixed = x.clone()
        mixed[:, :, top : top + 4, left : left + 4] = x[order, :, top : top + 4, left : left + 4]
        target = 0.75 * F.one_hot(y, 10) + 0.25 * F.one_hot(y[order], 10)
        return descend(optimizer, F.cross_entropy(model(mixed), target))

    model = ResNet(8, 2)
    return Training(model, AdamW(model.parameters(), lr=3e-3), step, images(24))


@control("hidden states mixed with those of other samples")
def manifold_mixup() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        h, order, share = model[:2](x), torch.randperm(len(x)), float(torch.rand(()))
        target = share * F.one_hot(y, 10) + (1 - share) * F.one_hot(y[order], 10)
        return descend(optimizer, F.cross_entropy(model[2:](h.lerp(h[order], 1 - share)), target))

    model = perceptron(64, 48, 48, 10)
    return Training(model, Adam(model.parameters(), lr=3e-3), step, flat(32))


@control("images shifted, turned over and covered in part")
def augmented() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        x = torch.roll(x, tuple(torch.randint(-1, 2, (2,)).tolist()), (2, 3))
        if torch.rand(()) < 0.5:
            x = x.flip(3)
        x = x + 0.1 * torch.randn_like(x)
        x[:, :, : int(torch.randint(0, 3, ()))] = 0
        return descend(optimizer, entropy(model, (x, y)))

    model = CNN()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, images(32))


@control("pixels from 0 to 255 scaled within the step, the batch a list")
def scaled_within() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = (part.to("cpu", non_blocking=True) for part in batch)
        x = x.float().div(16).sub(0.3).div(0.38)
        return descend(optimizer, F.cross_entropy(model(x), y))

    model = perceptron(64, 48, 10)
    pixels, labels = some_digits(32)
    batch = [pixels.byte(), labels]
    return Training(model, SGD(model.parameters(), lr=0.1, momentum=0.9), step, batch)


@control("batch shuffled, and stepped through in parts, three times over")
def epochs_within() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> float:
        x, y = batch
        parts = [part for _ in range(3) for part in torch.randperm(len(x)).split(16)]
        losses = [descend(optimizer, entropy(model, (x[p], y[p]))).item() for p in parts]
        return sum(losses) / len(losses)

    model = MLP()
    return Training(model, SGD(model.parameters(), lr=0.05), step, flat(64))


@control("samples trained on as an adversary shifts them")
def adversarial() -> Training:
    """Projected gradient descent on the inputs (Madry et al. 2018), in evaluation mode."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        model.eval()
        shift = torch.zeros_like(x).uniform_(-0.1, 0.1)
        for _ in range(3):
            shift.requires_grad_(True)
            (slope,) = torch.autograd.grad(F.cross_entropy(model(x + shift), y), shift)
            shift = (shift.detach() + 0.05 * slope.sign()).clamp(-0.1, 0.1)
        model.train()
        return descend(optimizer, entropy(model, (x + shift, y)))

    model = CNN()
    return Training(model, SGD(model.parameters(), lr=0.05, momentum=0.9), step, images(24))


@control("adversary whose backward leaves gradients that are cleared")
def fast_adversarial() -> Training:
    """Fast gradient sign method: the way back to the inputs passes the weights, too."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_(True)
        clean = entropy(model, (x, y))
        clean.backward()
        shifted = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        loss = 0.5 * entropy(model, (x.detach(), y)) + 0.5 * entropy(model, (shifted, y))
        loss.backward()
        optimizer.step()
        return loss

    model = perceptron(64, 48, 10)
    return Training(model, Adam(model.parameters(), lr=3e-3), step, flat(32))


@control("virtual adversary, found without labels")
def virtual_adversary() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, _ = batch
        with torch.no_grad():
            target = model(x).softmax(1)

        def apart(shift: Tensor) -> Tensor:
            return F.kl_div(model(x + shift).log_softmax(1), target, reduction="batchmean")

        d = F.normalize(torch.randn_like(x), dim=1).requires_grad_(True)
        (slope,) = torch.autograd.grad(apart(0.1 * d), d)
        smooth = apart(0.5 * F.normalize(slope, dim=1))
        return descend(optimizer, entropy(model, batch) + smooth)

    model = perceptron(64, 48, 10)
    return Training(model, Adam(model.parameters(), lr=3e-3), step, flat(32))


@control("two passes with dropout that should agree")
def agreeing_passes() -> Training:
    """R-Drop (Liang et al. 2021)."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        one, two = model(x), model(x)
        p, q = one.log_softmax(1), two.log_softmax(1)
        apart = F.kl_div(p, q, log_target=True, reduction="batchmean")
        apart = apart + F.kl_div(q, p, log_target=True, reduction="batchmean")
        loss = F.cross_entropy(one, y) + F.cross_entropy(two, y) + apart / 2
        return descend(optimizer, loss)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))
    return Training(model, Adam(model.parameters(), lr=3e-3), step, flat(32))


# ---- several losses ------------------------------------------------------------------------------


@control("two losses, each with a backward of its own")
def two_backwards() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, target = batch
        output = model(x)
        optimizer.zero_grad()
        label, ink = label_loss(output, target), ink_loss(output, target)
        label.backward(retain_graph=True)
        ink.backward()
        optimizer.step()
        return label + ink

    model = Multitask()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, both_targets(32))


class Uncertain(nn.Module):
    """Two tasks with a log variance each (Kendall et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_variance = Multitask(), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, target: Any) -> Tensor:
        output = self.net(x)
        losses = torch.stack([label_loss(output, target), ink_loss(output, target)])
        return ((-self.log_variance).exp() * losses + self.log_variance).sum()


@control("tasks weighted by learnt uncertainties, whose loss may fall below zero")
def uncertain_tasks() -> Training:
    model = Uncertain()

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        return descend(optimizer, model(*batch))

    return Training(model, Adam(model.parameters(), lr=5e-3), step, both_targets(32))


@control("gradients of tasks projected where they conflict")
def projected_gradients() -> Training:
    """PCGrad (Yu et al. 2020)."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, target = batch
        output, parameters = model(x), list(model.parameters())
        losses = [label_loss(output, target), ink_loss(output, target)]

        def of(loss: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss.backward(retain_graph=True)
            parts = (torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
            return torch.cat([part.flatten() for part in parts])

        one, two = map(of, losses)
        both = torch.zeros_like(one)
        for mine, other in ((one, two), (two, one)):
            against = (mine @ other).clamp(max=0)
            both += mine - against / other.square().sum().clamp(min=1e-12) * other
        first = 0
        for p in parameters:
            p.grad = both[first : first + p.numel()].view_as(p).clone()
            first += p.numel()
        optimizer.step()
        return sum(losses).detach()

    model = Multitask()
    return Training(model, SGD(model.parameters(), lr=0.05), step, both_targets(32))


@control("weights of tasks that level the norms of their gradients")
def levelled_norms() -> Training:
    """GradNorm (Chen et al. 2018), with an optimizer for the two weights."""

    class Levelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.weights = Multitask(), nn.Parameter(torch.ones(2))

    begin: list[Tensor] = []

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, target = batch
        shared = next(model.net.trunk.parameters())
        output = model.net(x)
        losses = torch.stack([label_loss(output, target), ink_loss(output, target)])
        if not begin:
            begin.append(losses.detach())
        norms = torch.stack(
            [
                torch.autograd.grad(w * loss, shared, create_graph=True)[0].norm()
                for w, loss in zip(model.weights, losses, strict=True)
            ]
        )
        pace = losses.detach() / begin[0]
        aim = (norms.mean() * (pace / pace.mean()) ** 1.5).detach()
        levelling = (norms - aim).abs().sum()
        for one in optimizer:
            one.zero_grad()
        (slope,) = torch.autograd.grad(levelling, model.weights, retain_graph=True)
        total = (model.weights.detach() * losses).sum()
        total.backward()
        model.weights.grad = slope
        for one in optimizer:
            one.step()
        with torch.no_grad():
            model.weights.clamp_(min=0.05).mul_(2 / model.weights.sum())
        return total.detach()

    model = Levelled()
    optimizers = Adam(model.net.parameters(), lr=3e-3), Adam([model.weights], lr=1e-2)
    return Training(model, optimizers, step, both_targets(32))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class DomainNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = perceptron(64, 48, 32)
        self.label, self.domain = nn.Linear(32, 10), perceptron(32, 16, 2)

    def forward(self, x: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        h = F.relu(self.features(x))
        return self.label(h), self.domain(strength * Reversed.apply(h))


@control("gradient turned around between domains")
def domains() -> Training:
    """Domain-adversarial (Ganin et al. 2016): its strength rises from zero."""
    count = Count()

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y, there = batch
        strength = 2 / (1 + math.exp(-count.up() / 10)) - 1
        label, _ = model(x, strength)
        inputs = torch.cat([x, there])
        domain = torch.arange(len(inputs)).ge(len(x)).long()
        loss = F.cross_entropy(label, y) + F.cross_entropy(model(inputs, strength)[1], domain)
        return descend(optimizer, loss)

    model = DomainNet()
    x, y = flat(24)
    batch = x, y, flat(24)[0] * 0.5 + 0.3
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Training(model, optimizer, step, batch, (count,))


@control("slope of the loss by a scale punished in each environment")
def invariant_risk() -> Training:
    """Invariant risk minimisation (Arjovsky et al. 2019)."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss, penalty = 0.0, 0.0
        for x, y in zip(*(part.chunk(2) for part in batch), strict=True):
            scale = torch.ones(1, requires_grad=True)
            risk = F.binary_cross_entropy_with_logits(scale * model(x), y)
            (slope,) = torch.autograd.grad(risk, scale, create_graph=True)
            loss, penalty = loss + risk / 2, penalty + slope.square().sum() / 2
        return descend(optimizer, loss + 10 * penalty)

    model = perceptron(30, 24, 1)
    return Training(model, Adam(model.parameters(), lr=3e-3), step, tumours(48))


@control("slope of the loss by the inputs punished")
def gradient_of_inputs() -> Training:
    """Double backpropagation (Drucker and LeCun 1992)."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        x = x.detach().clone().requires_grad_(True)
        loss = F.mse_loss(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return descend(optimizer, loss + 10 * slope.square().sum())

    model = perceptron(10, 24, 1, act=nn.Softplus)
    return Training(model, Adam(model.parameters(), lr=5e-3), step, patients(32))


@control("deep supervision, weaker from call to call")
def deep_supervision() -> Training:
    count = itertools.count()

    class Exits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 32), nn.Linear(32, 32)
            self.early, self.late = nn.Linear(32, 10), nn.Linear(32, 10)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = F.relu(self.one(x))
            return self.early(h), self.late(F.relu(self.two(h)))

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        early, late = model(x)
        weight = 0.9 ** next(count)
        return descend(optimizer, F.cross_entropy(late, y) + weight * F.cross_entropy(early, y))

    model = Exits()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, flat(32))


# ---- scales, ends and what is returned -----------------------------------------------------------


@control("squares summed over all pixels and samples")
def summed_squares() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        return descend(optimizer, F.mse_loss(model(batch), batch, reduction="sum"))

    model = perceptron(64, 32, 8, 32, 64)
    pixels, _ = some_digits(32)
    return Training(model, Adam(model.parameters(), lr=1e-3), step, pixels)


@control("targets of a hundredth, so losses of a ten-thousandth")
def small_targets() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        return descend(optimizer, F.mse_loss(model(x), y))

    model = perceptron(10, 24, 1)
    for parameter in model[2].parameters():
        parameter.data *= 0.01
    x, y = patients(32)
    return Training(model, Adam(model.parameters(), lr=1e-4), step, (x, 0.01 * y))


@control("loss that is the sum over the batch, with a rate to match")
def summed_loss() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(model(x), y, reduction="sum")
        return descend(optimizer, loss).detach()

    model = perceptron(64, 32, 10)
    return Training(model, SGD(model.parameters(), lr=3e-3), step, flat(32))


@control("model that has learnt its batch")
def converged() -> Training:
    model, batch = MLP(), flat(32)
    optimizer = Adam(model.parameters(), lr=3e-3)
    for _ in range(200):
        usual(model, optimizer, batch)
    return Training(model, optimizer, usual, batch)


@control("least squares close to its minimum")
def close_to_minimum() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> float:
        x, y = batch
        return descend(optimizer, F.mse_loss(model(x), y)).item()

    model, (x, y) = nn.Linear(10, 1), patients(64)
    with_one = torch.cat([x, torch.ones(64, 1)], 1)
    best = torch.linalg.lstsq(with_one, y).solution[:, 0]
    model.weight.data, model.bias.data = best[None, :10].clone(), best[10:] + 0.01
    return Training(model, SGD(model.parameters(), lr=0.01), step, (x, y))


@control("model from a checkpoint, trained on at a small rate")
def from_checkpoint() -> Training:
    model = trained(CNN(), images, 60)
    return Training(model, SGD(model.parameters(), lr=1e-4, momentum=0.9), usual, images(32))


@control("loss as a float")
def returned_float() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> float:
        return descend(optimizer, entropy(model, batch)).item()

    model = LSTM()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, words(24))


@control("losses by name, of which the first is what is minimised")
def returned_dictionary() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        output = model(x)
        loss = F.cross_entropy(output, y)
        descend(optimizer, loss)
        return {"loss": loss.detach(), "accuracy": (output.argmax(1) == y).float().mean()}

    model = CNN()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, images(24))


@control("running mean of the loss returned")
def returned_mean() -> Training:
    seen: dict[str, float] = {}

    def step(model: Any, optimizer: Any, batch: Any) -> float:
        loss = descend(optimizer, entropy(model, batch)).item()
        seen["mean"] = 0.98 * seen.get("mean", loss) + 0.02 * loss
        return seen["mean"]

    model = perceptron(64, 32, 10)
    return Training(model, Adam(model.parameters(), lr=3e-3), step, flat(32))


@control("loss of the batch as it is after the step")
def returned_after() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        usual(model, optimizer, batch)
        with torch.no_grad():
            return entropy(model, batch)

    model = MLP()
    return Training(model, SGD(model.parameters(), lr=0.1), step, flat(32))


@control("loss without its penalties returned")
def returned_in_part() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = entropy(model, batch)
        descend(optimizer, loss + 1e-4 * sum(p.abs().sum() for p in model.parameters()))
        return loss.detach()

    model = perceptron(64, 48, 10)
    return Training(model, SGD(model.parameters(), lr=0.1, momentum=0.9), step, flat(32))


@control("validation in evaluation without gradients, then on in training")
def validated() -> Training:
    aside = images(16)

    def step(model: Any, optimizer: Any, batch: Any) -> dict[str, float]:
        model.train()
        loss = usual(model, optimizer, batch).item()
        model.eval()
        with torch.no_grad():
            validation = entropy(model, aside).item()
        model.train()
        return {"loss": loss, "validation": validation}

    model = CNN()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, images(32))


@control("last quarter of the batch held out, looked at in inference mode first")
def last_quarter() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        rest = len(x) * 3 // 4
        was = model.training
        model.eval()
        with torch.inference_mode():
            entropy(model, (x[rest:], y[rest:]))
        model.train(was)
        return descend(optimizer, entropy(model, (x[:rest], y[:rest])))

    model = ResNet(8, 2)
    return Training(model, SGD(model.parameters(), lr=0.05, momentum=0.9), step, images(32))


@control("step left out where the loss is not finite")
def guarded() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> float:
        loss = entropy(model, batch)
        optimizer.zero_grad()
        if not math.isfinite(loss.item()):
            return loss.item()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        if torch.isfinite(norm):
            optimizer.step()
        return loss.item()

    model = ViT()
    return Training(model, AdamW(model.parameters(), lr=2e-3), step, images(16))


@control("step of a training class, called through a lambda")
def trainer_class() -> Training:
    class Trainer:
        def __init__(self, model: nn.Module, optimizer: Any) -> None:
            self.model, self.optimizer, self.history = model, optimizer, []
            self.criterion = nn.CrossEntropyLoss()

        def fit(self, x: Tensor, y: Tensor) -> float:
            self.model.train()
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.history.append(loss.item())
            return loss.item()

    model = MLP()
    trainer = Trainer(model, Adam(model.parameters(), lr=2e-3))
    return Training(model, trainer.optimizer, lambda m, o, batch: trainer.fit(*batch), flat(32))


@control("copy of the model trained on for a look ahead, then thrown away")
def looked_ahead() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        trial = copy.deepcopy(model)
        inner = SGD(trial.parameters(), lr=0.1)
        descend(inner, entropy(trial, batch))
        with torch.no_grad():
            target = trial(batch[0]).softmax(1)
        loss = entropy(model, batch) + 0.1 * F.cross_entropy(model(batch[0]), target)
        return descend(optimizer, loss)

    model = perceptron(64, 32, 10)
    return Training(model, Adam(model.parameters(), lr=3e-3), step, flat(32))


@control("blocks left out at random, the deeper the more often")
def stochastic_depth() -> Training:
    class Depths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(8, 32), nn.Linear(32, 10)
            self.blocks = nn.ModuleList(PreNorm() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for place, block in enumerate(self.blocks):
                if not (self.training and torch.rand(()) < 0.15 * place):
                    x = block(x)
            return self.head(x.mean(1))

    model = Depths()
    pixels, labels = flat(24)
    return Training(
        model, AdamW(model.parameters(), lr=1e-3), usual, (pixels.view(-1, 8, 8), labels)
    )


@control("block that waits for a later stage, neither called nor in the optimizer")
def stages() -> Training:
    """Grown layer by layer: the second block waits, and is not called."""

    class Grown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head, self.stage = conv_net(32), nn.Linear(32, 10), 1
            self.later = Block(32)

        def forward(self, x: Tensor) -> Tensor:
            h = self.stem(x)
            if self.stage > 1:
                h = self.later(h[:, None])[:, 0]
            return self.head(h)

    model = Grown()
    groups = [*model.stem.parameters(), *model.head.parameters()]
    return Training(model, Adam(groups, lr=5e-3), usual, images(32))
