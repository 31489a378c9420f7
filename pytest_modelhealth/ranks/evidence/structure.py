"""What must be equal on all ranks before one may run the model: a line a thing."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from pytest_modelhealth.layers import named_modules, type_name
from pytest_modelhealth.ranks.evidence.wrappers import Wrapped


def described(model: nn.Module) -> str:
    """Return a line for each layer, parameter and buffer, equal where the ranks' models are.

    Of torch's own modules it says how they are set up; of others only the class, since what they
    say of themselves may name the rank. Values are not in it.
    """
    return "\n".join(_lines(model))


def _lines(model: nn.Module) -> Iterator[str]:
    wrapped = Wrapped(model)
    held: dict[nn.Module, list[str]] = {}
    for leaf in wrapped.parameters:
        learns = "trainable" if leaf.tensor.requires_grad else "frozen"
        held.setdefault(leaf.module, []).append(f"parameter {leaf}: {_said(leaf.tensor)}, {learns}")
    for leaf in wrapped.buffers:
        held.setdefault(leaf.module, []).append(f"buffer {leaf}: {_said(leaf.tensor)}")
    for named in named_modules(model):
        module = named.module
        mode = "in training" if module.training else "in evaluation mode"
        told = module.extra_repr() if _is_torchs(module) else ""
        yield f"{named.name or 'the model'}: {type_name(module)}({told}), {mode}"
        yield from held.get(module, ())


def _is_torchs(module: nn.Module) -> bool:
    """Whether it is torch that says how a module is set up."""
    return type(module).extra_repr.__module__.startswith("torch.nn.modules.")


def _said(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
