"""What several of the reported training steps and trainings use, and the words of their cards."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.models.small import flat
from corpus.subject import Training

EVERYWHERE = ("", "*")

STILL = (
    *("not move", "nothing move", "moves no", "not chang", "unchanged", "not updat", "no update"),
    *("never updat", "as before", "stay", "not step", "never step", "not train", "stands still"),
)
UNGIVEN = ("no gradient", "without a gradient", "gradient is none", "grad is none", "reaches")
CUT = (*UNGIVEN, "detach", "no_grad", "cut", "graph", "constant", "item", ".data")
PILED = ("zero_grad", "accumul", "cleared", "add up", "adds up", "pile", "earlier", "left over")
RATE = ("learning rate", "rate is", "rate of", "rates", "lr", "schedul")
SCALED = ("scale", "scaling", "times too", "times as", "magnitude", "factor", "divid", "weigh")
CLIPPED = ("clip", "norm of", "max_norm")
SAMPLES = ("sample", "influence", "part of the batch", "depend", "ignored", "rows", "micro")
HELD = ("not in", "no optimizer", "not hold", "not held", "not given", "left out", "no group")
FROZEN = ("requires_grad", "frozen", "freez", "froze", "thaw")
MODES = ("eval", "training mode", "train()", "mode")
STATISTICS = ("running", "statistic", "buffer", "momentum", "twice", "num_batches_tracked")
SAME = ("same", "identical", "alias", "share", "one object", "itself", "constant", "zero")
RAISES = ("raise", "second", "again", "fail", "error", "twice", "already")
NONFINITE = ("nan", "not finite", "non-finite", "nonfinite", "infinit", "not a number")
GROWS = ("explod", "diverg", "grow", "grew", "rose", "rise", "larger", "jump", "spike", "too large")

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def classified(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def go_down(optimizer: Any, loss: Tensor) -> Tensor:
    """Clear, go back and step; return the loss without its graph."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def parts(batch: Any, n: int) -> list[Any]:
    """Return micro-batches of `n` samples each."""
    return list(zip(*(tensor.split(n) for tensor in batch), strict=True))


def net(*sizes: int, dropout: float = 0.0) -> nn.Sequential:
    """Return linear layers of these sizes with ReLU, and dropout where it is asked for, between."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers[: -2 if dropout else -1])


class Headed(nn.Module):
    """A body and a head, to be trained apart."""

    def __init__(self, width: int = 32, outputs: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(x)))


class Pair(nn.Module):
    """Two nets beside each other, such as a generator and its critic."""

    def __init__(self, **nets: nn.Module) -> None:
        super().__init__()
        for name, module in nets.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(module(x) for module in self.children())


def course(
    model: nn.Module,
    optimizer: Any,
    step: Callable[[nn.Module, Any, Any], Any],
    draw: Callable[[int], Any] = flat,
    n: int = 32,
    steps: int = 30,
    restore: tuple[Any, ...] = (),
) -> Training:
    """Return a whole training on batches of `n` samples."""
    return Training(model, optimizer, step, draw(n), restore, lambda _: draw(n), steps)
