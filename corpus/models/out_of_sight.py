"""Models whose values go where no function shows them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


@torch.jit.script
def scripted(x: Tensor, y: Tensor) -> Tensor:
    """Multiply where no function shows it."""
    return x * y + 1


class Layers(nn.Module):
    """Three linear layers, for forwards of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))


class Vmapped(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.vmap(lambda row: self.b(self.a(row)).tanh())(x))


class VmappedWithoutGradients(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            half = torch.vmap(lambda row: row / 2)(self.a(x))
        return self.c(self.b(half))


class Scripted(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(scripted(self.a(x), self.b(x)))


class ScriptedWithoutGradients(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            product = scripted(self.a(x), self.b(x))
        return self.c(product)


class Threaded(Layers):
    def forward(self, x: Tensor) -> Tensor:
        found: dict[str, Tensor] = {}
        thread = threading.Thread(target=lambda: found.update(a=self.a(x)))
        thread.start()
        thread.join()
        return self.c(self.b(found["a"]))


class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        raise ValueError


class Catching(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.raising = Raising()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        try:
            self.raising(h)
        except ValueError:
            h = self.b(h + 1)
        return self.c(h)


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Returning(Layers):
    """Layers that return their own input are not where it comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.identity = Same(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.identity(self.same(self.a(x)))) + self.c(x)


class Long(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        for _ in range(300):
            h = h + 0.001
        return self.c(h)


class LongAfterwards(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.c(self.b(self.a(x)))
        for _ in range(300):
            h = h + 0.001
        return h


class Forces(Layers):
    """Differentiates within its forward, as a model of forces does."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        energy = self.b(self.a(x).tanh()).sum()
        return self.c(*torch.autograd.grad(energy, x, create_graph=True))


X = torch.linspace(-1, 1, 24).reshape(4, 6)


class Inner(nn.Module):
    """Two layers, one without parameters, and one that is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)
        self.spare = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


class Net(nn.Module):
    """Runs its part in the way of `run`, which nothing of the engine knows."""

    def __init__(self, way: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.inner, self.head = Inner(), nn.Linear(6, 2)
        self.run = way(self.inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(x))


def traced(inner: nn.Module) -> Callable[[Tensor], Tensor]:
    """Hide a trace in a closure."""
    script = torch.jit.trace(inner, X)
    return lambda x: script(x)


class Product(torch.autograd.Function):
    """A function of the user's own, which gets its parameters past torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product."""
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both."""
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


def of_fake(inner: Inner) -> Callable[[Tensor], Tensor]:
    """Run a layer on fake tensors to learn a shape."""

    def run(x: Tensor) -> Tensor:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            width = inner.a(mode.from_tensor(x)).shape[1]
        return inner.b(x) * width

    return run
