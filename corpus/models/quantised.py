"""A small trained CNN, and what quantisation makes of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.ao import quantization
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
from torch.nn.utils import prune


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.relu = nn.Linear(16, 24), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.fc(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu1 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2 = nn.Conv2d(8, 16, 3, bias=False)
        self.bn2, self.relu2 = nn.BatchNorm2d(16), nn.ReLU()
        self.block, self.head = Block(), nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu2(self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x))))))
        return self.head(self.block(x.mean((2, 3))))


def batch() -> torch.Tensor:
    """Return sixteen small images; the same each time."""
    return torch.randn(16, 3, 10, 10, generator=torch.Generator().manual_seed(1))


def fresh() -> Net:
    """Return the net in evaluation mode, with statistics of five batches; the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net()
        for _ in range(5):
            net(torch.randn(16, 3, 10, 10))
    return net.eval()


def dynamic(net: Net, inputs: torch.Tensor) -> nn.Module:
    """Quantise the linear layers, what they take when they run."""
    return quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)


def static(net: Net, inputs: torch.Tensor) -> nn.Module:
    """Trace, fuse and quantise, calibrated on `inputs`."""
    mapping = quantization.get_default_qconfig_mapping("x86")
    prepared = prepare_fx(copy.deepcopy(net), mapping, (inputs,))
    prepared(inputs)
    return convert_fx(prepared)


def eager(net: Net, inputs: torch.Tensor) -> nn.Module:
    """Quantise with fused modules, in a wrapper that quantises what comes in."""
    triples = [["conv1", "bn1", "relu1"], ["conv2", "bn2", "relu2"], ["block.fc", "block.relu"]]
    fused = quantization.fuse_modules(copy.deepcopy(net), triples)
    wrapped = quantization.QuantWrapper(fused)
    wrapped.qconfig = quantization.get_default_qconfig("x86")
    prepared = quantization.prepare(wrapped)
    prepared(inputs)
    return quantization.convert(prepared.eval())


def torchao(net: Net, inputs: torch.Tensor) -> nn.Module:
    """Quantise the linear layers with tensors of torchao."""
    library: Any = import_module("torchao.quantization")
    made = copy.deepcopy(net)
    library.quantize_(made, library.Int8DynamicActivationInt8WeightConfig())
    return made


def pt2e(net: Net, inputs: torch.Tensor) -> nn.Module:
    """Export and quantise for inductor, calibrated on `inputs`."""
    library: Any = import_module("torchao.quantization.pt2e.quantize_pt2e")
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = library.prepare_pt2e(torch.export.export(net, (inputs,)).module(), quantizer)
    prepared(inputs)
    made: nn.Module = library.convert_pt2e(prepared)
    return made


WAYS: dict[str, Callable[[Net, torch.Tensor], nn.Module]] = {
    way.__name__: way for way in (dynamic, static, eager, torchao, pt2e)
}


def pruned() -> Net:
    """Return a net with a quarter of the channels of a layer masked."""
    net = fresh()
    prune.ln_structured(net.conv2, "weight", amount=0.25, n=2, dim=0)
    return net


class Adapted(nn.Module):
    """A linear layer with an adapter of rank two beside it, which may be merged."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        self.merged = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        return out if self.merged else out + self.up(self.down(x))

    def merge(self) -> nn.Linear:
        with torch.no_grad():
            self.base.weight += self.up.weight @ self.down.weight
        self.merged = True
        return self.base


def adapted() -> Net:
    """Return a frozen net with an adapter at one layer."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        net = fresh().requires_grad_(False)
        net.block.fc = Adapted(net.block.fc)
    return net


def edited(build: Callable[[], nn.Module], edit: Callable[[Any], object]) -> nn.Module:
    """A model after an edit."""
    model = build()
    with torch.no_grad():
        edit(model)
    return model


def unmasked(model: Any) -> None:
    """Lose the mask of pruned weights."""
    model.conv2.weight_mask.fill_(1)
    prune.remove(model.conv2, "weight")


def unloaded(model: Any) -> None:
    """Merge an adapter and take it away."""
    model.block.fc = model.block.fc.merge()


def normed(affine: bool = True) -> nn.Module:
    """A linear layer with a batch norm behind it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(300, 8), nn.BatchNorm1d(8, affine=affine))
        net(batch())
    return net.eval()


def folded(net: Any) -> None:
    """Scale a linear layer by the norm behind it, and take that away."""
    norm = net[2]
    scale = (norm.running_var + norm.eps).rsqrt() * (norm.weight if norm.affine else 1.0)
    net[1].weight.mul_(scale[:, None])
    net[1].bias.sub_(norm.running_mean).mul_(scale).add_(norm.bias if norm.affine else 0.0)
    net[2] = nn.Identity()


def wrongly_folded(net: Any) -> None:
    """The same, but for one weight."""
    folded(net)
    net[1].weight[0, 0] *= 1.01


TRIPLES = [["conv1", "bn1", "relu1"], ["conv2", "bn2", "relu2"]]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str | None, str]] = {
    # fused without its activation, the layer gives what it gave before that: it is missed
    "an activation that was lost": (
        fresh, lambda: static(edited(fresh, lambda m: setattr(m, "relu1", nn.Identity())), batch()),
        "relu1", "",
    ),
    "fused": (fresh, lambda: quantization.fuse_modules(fresh(), TRIPLES), None, ""),
    # the weights of the host are held to those that folding makes, and so to single values
    "a norm folded": (normed, lambda: edited(normed, folded), None, ""),
    "a norm without weights folded": (
        lambda: normed(False), lambda: edited(lambda: normed(False), folded), None, ""
    ),
    "a norm folded wrongly": (
        normed, lambda: edited(normed, wrongly_folded), "1", "1 of 2,400"
    ),
    # calibrated on numbers 600 times as large, each layer rounds well, and the model is gone
    "steps so coarse that nothing is left": (
        fresh, lambda: static(fresh(), batch() * 600), "", ""
    ),
    "frozen as a whole": (
        fresh, lambda: fresh().requires_grad_(False), None, "requires_grad=False"
    ),
    "one layer frozen": (
        fresh, lambda: edited(fresh, lambda m: m.block.fc.requires_grad_(False)), "block.fc", ""
    ),
    # the weight is compared, not what the mask hides
    "a mask made permanent": (
        pruned, lambda: edited(pruned, lambda m: prune.remove(m.conv2, "weight")), None, ""
    ),
    "a mask lost": (pruned, lambda: edited(pruned, unmasked), "conv2", ""),
    # merged and kept or merged and taken away: the module around gives the same
    "an adapter merged": (
        adapted, lambda: edited(adapted, lambda m: m.block.fc.merge()), None, ""
    ),
    "and unloaded": (adapted, lambda: edited(adapted, unloaded), None, ""),
    "unloaded without being merged": (
        adapted, lambda: edited(adapted, lambda m: setattr(m.block, "fc", m.block.fc.base)),
        "block.fc", "",
    ),
    # what is frozen for it has no gradients, and that is meant
    "a fresh adapter": (
        fresh, lambda: edited(adapted, lambda m: nn.init.zeros_(m.block.fc.up.weight)), None,
        "frozen for it",
    ),
}  # fmt: skip
