"""Custom functions of autograd: right backwards, wrong ones, and others on purpose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function


class Swish(Function):
    """Right: ``x * sigmoid(x)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return g * s * (1 + x * (1 - s))


class WithSetup(Function):
    """Right, with a context that is set up apart, and a keyword."""

    @staticmethod
    def forward(x: Tensor, scale: float = 2.0) -> Tensor:
        return scale * x.square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return 2 * ctx.scale * ctx.saved_tensors[0] * g, None


class WithSetupWrong(WithSetup):
    """The same, with half of the slope."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return ctx.scale * ctx.saved_tensors[0] * g, None


class LogDet(Function):
    """Right: the logarithm of a determinant."""

    @staticmethod
    def forward(ctx: Any, m: Tensor) -> Tensor:
        ctx.save_for_backward(m)
        return torch.linalg.slogdet(m)[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g[..., None, None] * torch.linalg.inv(ctx.saved_tensors[0]).mT


class Relu(Function):
    """Right, at the exact zeros of another ReLU too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (ctx.saved_tensors[0] > 0)


class Clamp(Function):
    """Right: no gradient beyond the bounds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-0.5, 0.5)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (ctx.saved_tensors[0].abs() <= 0.5)


class InPlace(Function):
    """Right: it writes over what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.exp_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


class Reversal(Function):
    """On purpose: the gradient is turned, and the forward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class Scaling(Reversal):
    """On purpose: the gradient is a tenth."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 0.1 * g


class Round(Function):
    """On purpose: straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class LearnedStep(Function):
    """On purpose: rounding with a step that learns (LSQ)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(x, step)
        return (x / step).round() * step

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, step = ctx.saved_tensors
        return g, g * ((x / step).round() - x / step)


class Spike(Function):
    """On purpose: a threshold with the slope of a sigmoid."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0.1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        s = (4 * ctx.saved_tensors[0]).sigmoid()
        return g * 4 * s * (1 - s)


class SpikeInSingle(Spike):
    """The same, in float32 whatever it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Spike.forward(ctx, x).float()


class ClampThrough(Function):
    """On purpose or by mistake, which nothing tells: a clamp that gradients go through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-0.5, 0.5)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class WrongSign(Swish):
    """A sign."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -Swish.backward(ctx, g)


class WrongIfTold(Function):
    """Wrong where an option says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_wrong: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.is_wrong = is_wrong
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return (g if ctx.is_wrong else g * x.cos()), None


class WrongFactor(Function):
    """A factor of two is left out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


class MissingTerm(Swish):
    """The second term of a product."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].sigmoid()


class WrongSide(Relu):
    """The wrong side of a mask."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (ctx.saved_tensors[0] <= 0)


class TenPercent(Function):
    """A coefficient that is 10 % off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 0.9 * g * (1 - ctx.saved_tensors[0].tanh().square())


class Transposed(Function):
    """The gradient of a square matrix, transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.mT, g.mT @ x


class WrongInput(Function):
    """The gradients of two factors, exchanged."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return g * a * b.cos(), g * b.sin()


class Forgotten(Function):
    """No gradient for the second factor."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(b)
        return a * b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.saved_tensors[0], None


class SinglePrecision(Swish):
    """Computes in float32 whatever it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Swish.forward(ctx, x.float())


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
