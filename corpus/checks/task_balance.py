"""Tasks of which one drowns the other, or asks for nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from corpus.checks.parts import Net, batch

CHECK = "task_balance"


def two_heads():
    """Return a trunk that two tasks share."""

    def forward(m, x):
        h = m.last(m.trunk(x).tanh()).tanh()
        return {"a": m.a(h), "b": m.b(h)}

    return Net(forward, trunk=(16, 8), last=(8, 8), a=(8, 4), b=(8, 1))


def apart():
    """Return two models in one."""
    return Net(lambda m, x: {"a": m.a(x), "b": m.b(x)}, a=(16, 4), b=(16, 1))


def targets():
    """Return classes for one task, numbers for the other."""
    return {"classes": torch.randint(0, 4, (64,)), "number": torch.randn(64, 1)}


def classes(output, target):
    """Return the loss of the one task."""
    return F.cross_entropy(output["a"], target)


def number(output, target):
    """Return the loss of the other."""
    return F.mse_loss(output["b"], target)


LOSSES = {"classes": classes, "number": number}


def weighted(factor):
    """Return the losses, of which one has a weight."""
    return LOSSES | {"number": lambda o, t: factor * number(o, t)}


def balance(losses, model=two_heads):
    """Return a model for two tasks, with their losses and what they are asked for."""
    return lambda: (model(), batch(), targets(), losses)


# a loss of what was rounded has no gradient
ROUNDED = LOSSES | {"number": lambda o, t: F.mse_loss(o["b"].round(), t)}
# a hinge that is met has a loss of zero and a gradient of zero
HINGE = LOSSES | {"number": lambda o, _: F.relu(o["b"] - 100.0).mean()}
FAULTS = {
    # it is found at the last layer that the tasks share
    "a loss a million times too large": (balance(weighted(1e6)), "fail", "last", "'number' has"),
    "a small weight": (balance(weighted(1e-3)), "warn", "last", "may be meant"),
    "a task that asks for nothing": (balance(HINGE), "unsure", "last", "asks for nothing"),
    "a task that is off": (balance(weighted(0.0)), "unsure", "last", "asks for nothing"),
    # a loss that is something, and whose gradient is nothing, is a fault, said once
    "a task without a gradient": (
        balance(ROUNDED), "fail", "b", "task 'number' has a loss of", "asks nothing of any",
    ),
    "a task without a gradient that shares no layer": (
        balance(ROUNDED, apart), "fail", "b", "asks nothing of any",
    ),
}  # fmt: skip
HEALTHY = {
    # losses of different kinds, added as they are, are healthy; so is one loss
    "losses as they are": balance(LOSSES),
    "one loss": balance({"classes": classes}),
    # two models in one have nothing to balance
    "no shared layer": balance(weighted(1e6), apart),
}
