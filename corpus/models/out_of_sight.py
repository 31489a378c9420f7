"""Models whose values go where no function shows them."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn


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
