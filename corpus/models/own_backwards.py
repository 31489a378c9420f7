"""Custom functions of autograd: right backwards, wrong ones, and others on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function


def custom(name: str, compute: Callable[..., Any], gradient: Callable[..., Any]) -> Any:
    """Return a function of autograd by what it computes and its gradient.

    Args:
        name: of the class.
        compute: gets the arguments.
        gradient: gets that of the output and the arguments.
    """

    def forward(ctx: Any, a: Any, b: Any = None) -> Any:
        given = (a,) if b is None else (a, b)
        ctx.save_for_backward(*(one for one in given if isinstance(one, Tensor)))
        ctx.options = [one for one in given if not isinstance(one, Tensor)]
        return compute(*given)

    def backward(ctx: Any, g: Tensor) -> Any:
        found = gradient(g, *ctx.saved_tensors, *ctx.options)
        return found if isinstance(found, tuple) else (found, None)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (Function,), {**methods, "__module__": __name__})


def swish(x: Tensor) -> Tensor:
    """Return the function that most of these compute."""
    return x * x.sigmoid()


def swish_slope(g: Tensor, x: Tensor) -> Tensor:
    """Return its gradient."""
    return g * (s := x.sigmoid()) * (1 + x * (1 - s))


# Right.
Swish = custom("Swish", swish, swish_slope)
Relu = custom("Relu", lambda x: x.clamp(min=0), lambda g, x: g * (x > 0))  # at exact zeros, too
Clamp = custom("Clamp", lambda x: x.clamp(-0.5, 0.5), lambda g, x: g * (x.abs() <= 0.5))


class InPlace(Function):
    """It writes over what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.exp_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


class WithSetup(Function):
    """A context that is set up apart, and a keyword."""

    share = 1.0

    @staticmethod
    def forward(x: Tensor, scale: float = 2.0) -> Tensor:
        return scale * x.square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.scale = inputs[1]

    @classmethod
    def backward(cls, ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return cls.share * 2 * ctx.scale * ctx.saved_tensors[0] * g, None


# On purpose: the identity, what is flat, and (on purpose or by mistake) a clamp to go through.
Reversal = custom("Reversal", lambda x: x.view_as(x), lambda g, x: -g)
Round = custom("Round", lambda x: (8 * x).round() / 8, lambda g, x: g)
LearnedStep = custom(
    "LearnedStep",
    lambda x, step: (x / step).round() * step,
    lambda g, x, step: (g, g * ((x / step).round() - x / step)),
)
SpikeInSingle = custom(
    "SpikeInSingle",
    lambda x: (x > 0.1).float(),
    lambda g, x: g * 4 * (4 * x).sigmoid() * (1 - (4 * x).sigmoid()),
)
ClampThrough = custom("ClampThrough", lambda x: x.clamp(-0.5, 0.5), lambda g, x: g)
SinglePrecision = custom("SinglePrecision", lambda x: swish(x.float()), swish_slope)


# Wrong.
class WithSetupWrong(WithSetup):
    """Half of the slope."""

    share = 0.5


class WrongSign(Swish):  # type: ignore[misc]
    """A sign, with the forward of another class."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -swish_slope(g, *ctx.saved_tensors)


WrongIfTold = custom(
    "WrongIfTold", lambda x, told: x.sin(), lambda g, x, told: (g if told else g * x.cos(), None)
)
WrongFactor = custom("WrongFactor", lambda x: x.square(), lambda g, x: g * x)
MissingTerm = custom("MissingTerm", swish, lambda g, x: g * x.sigmoid())
TenPercent = custom(
    "TenPercent", lambda x: x.tanh(), lambda g, x: 0.9 * g * (1 - x.tanh().square())
)
WrongInput = custom(
    "WrongInput", lambda a, b: a * b.sin(), lambda g, a, b: (g * a * b.cos(), g * b.sin())
)
Forgotten = custom("Forgotten", lambda a, b: a * b, lambda g, a, b: (g * b, None))


class Calls(nn.Module):
    """A layer whose own code calls a function on a square matrix of features.

    Args:
        function: the function, or what it is bound to.
        arguments: how many tensors it takes.
    """

    def __init__(self, function: Any, arguments: int = 1) -> None:
        super().__init__()
        self.apply_it = function.apply if isinstance(function, type) else function
        self.weights = nn.ParameterList([torch.randn(6, 6) / 2 for _ in range(arguments - 1)])

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_it(x, *self.weights)


def model_of(function: Any, arguments: int = 1, size: int = 6) -> nn.Sequential:
    """Return a small model with a function in the middle of it; seeded."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(size, size), Calls(function, arguments), nn.Linear(size, 3))
