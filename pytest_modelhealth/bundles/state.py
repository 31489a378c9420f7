"""What numbers depend on beside the batch: what a model holds, torch's switches, the machine."""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_modelhealth import __version__
from pytest_modelhealth.bundles.file import Packer, qualified_name
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.isolation import generator_access, set_switches, switches
from pytest_modelhealth.capture.step.state import is_generator
from pytest_modelhealth.errors import InspectionError, suggest
from pytest_modelhealth.layers import named_modules, original_class

_SHOWN = 3
_PARAMETERS, _BUFFERS, _ATTRIBUTES = _REGISTRIES = ("_parameters", "_buffers", "__dict__")
_LAZY = "of no shape yet (lazy: run a batch of this size through the model first)"
_OF_TORCH = frozenset(vars(nn.Module()))


class Held(NamedTuple):
    """A tensor or random generator that a module holds; ``None`` is a buffer yet to be filled."""

    path: str
    registry: str
    owner: Any
    name: str
    value: Any


def held(model: nn.Module) -> Iterator[Held]:
    """Yield parameters, buffers, and tensors and generators in attributes."""
    for module_path, module in ((named.name, named.module) for named in named_modules(model)):
        for registry in _REGISTRIES:
            owner = getattr(module, registry)
            for name, value in list(owner.items()):
                is_kept = issubclass(type(value), Tensor) or is_generator(type(value))
                if is_kept or (value is None and registry == _BUFFERS):
                    path = f"{module_path}.{name}" if module_path else str(name)
                    yield Held(path, registry, owner, name, value)


def held_tensors(model: nn.Module) -> list[Tensor]:
    """Return every parameter, buffer and tensor in an attribute, each once."""
    tensors = (one.value for one in held(model) if isinstance(one.value, Tensor))
    return list({id(tensor): tensor for tensor in tensors}.values())


def take(model: nn.Module, packer: Packer, weights: str) -> dict[str, Any]:
    """Return what a model holds, by name, and the modes of its modules.

    Args:
        model: the module that has the layers.
        packer: gets the tensors.
        weights: why no values of tensors are kept, a phrase; ``""`` keeps them.
    """
    if weights:
        packer.lack(model, "model", weights)
    kept, known = {}, set()
    for one in held(model):
        path, value = f"model.{one.path}", one.value
        if is_generator(type(value)):
            packed = packer.pack(generator_access(value)[0](), path)
        else:
            known.add(id(value))
            packed = None if weights else packer.pack(value, path)
        requires_grad = isinstance(value, Tensor) and value.requires_grad
        kept[one.path] = (one.registry, _form(value), requires_grad, packed)
    for named in named_modules(model):
        module, path = named.module, f"model.{named.name}".rstrip(".")
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            packer.lack(module, path, "its get_extra_state() saves what is no tensor")
        for name, value in vars(module).items():
            is_container = type(value) in (list, tuple, dict, set, deque) and name not in _OF_TORCH
            if is_container and any(id(tensor) not in known for tensor in find_tensors(value)):
                reason = "it holds tensors, which no buffer or attribute does"
                packer.lack(value, f"{path}.{name}", reason)
    training = {named.name: bool(named.module.training) for named in named_modules(model)}
    return {"kind": qualified_name(original_class(model)), "training": training, "held": kept}


def _form(value: Any) -> str:
    """Return shape and dtype of a tensor for messages: ``"8x4 float32"``."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if is_lazy(value):
        return _LAZY
    shape = () if value.is_nested else tuple(value.shape)
    return f"{'x'.join(map(str, shape)) or 'a scalar'} {value.dtype}".replace("torch.", "")


def load(model: nn.Module, kept: Mapping[str, Any], *, values: bool) -> None:
    """Have a model hold what was kept, behind the back of autograd.

    Args:
        model: the module that has the layers.
        kept: what another model of the same layers held.
        values: whether to load the values of tensors and the states of generators, too; else only
            training mode and ``requires_grad`` are loaded.

    Raises:
        InspectionError: it is another model; the message says which names and shapes differ.
    """
    _require_same(model, kept)
    for named in named_modules(model):
        named.module.training = kept["training"].get(named.name, named.module.training)
    for path, registry, owner, name, here in list(held(model)):
        if path not in kept["held"] or (isinstance(here, Tensor) and is_lazy(here)):
            continue
        _, form, requires_grad, value = kept["held"][path]
        if registry == _PARAMETERS:
            here.requires_grad_(requires_grad)
        if not values:
            continue
        if is_generator(type(here)):
            generator_access(here)[1](value)
        elif isinstance(value, Tensor) or form == "NoneType":
            _put(owner, name, value, may_grow=registry == _BUFFERS)


def _put(owner: Any, name: str, value: Tensor | None, *, may_grow: bool) -> None:
    """Put values into a tensor in place; where they lie in another order, into its ``data``."""
    tensor = owner[name]
    if tensor is None or value is None or tensor.shape != value.shape:
        if may_grow:  # a buffer, as caches are
            owner[name] = value
        return
    value = value.detach().to(tensor.device)
    if value.stride() == tensor.stride():
        tensor.data.copy_(value)  # which leaves the version of the tensor as it is
    else:
        tensor.data = value


def _require_same(model: nn.Module, kept: Mapping[str, Any]) -> None:
    """Do nothing if the model's names and shapes are those that were kept.

    Raises:
        InspectionError: they are not; the message names the first few.
    """
    here = {one.path: _form(one.value) for one in held(model) if one.registry != _ATTRIBUTES}
    then = {name: one for name, one in kept["held"].items() if one[0] != _ATTRIBUTES}
    layers = [named.name for named in named_modules(model)]
    wrong = [f"it has no {n!r}{suggest(n, here)}".rstrip(".") for n in then if n not in here]
    wrong += [
        f"{name!r} was {form}, is {here[name]}"
        for name, (registry, form, *_) in then.items()
        if registry == _PARAMETERS and here.get(name, form) != form != _LAZY
    ]
    wrong += [f"{name!r} is not in the bundle" for name in here if name not in then]
    wrong += [f"it has no layer {name!r}" for name in kept["training"] if name not in layers]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
        raise InspectionError(
            f"the bundle is of another model: {kept['kind']} then, "
            f"{qualified_name(original_class(model))} now; {'; '.join(wrong[:_SHOWN])}{more}. Give "
            "the model that the test made, with the same arguments"
        )


def surroundings() -> dict[str, Any]:
    """Return how torch's switches stand."""
    autocast = {
        device: torch.get_autocast_dtype(device)
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    }
    return {"switches": switches(), "autocast": autocast}


@contextmanager
def under(kept: Mapping[str, Any]) -> Iterator[None]:
    """Have torch's switches stand as they did, and put them back."""
    with ExitStack() as stack:
        stack.callback(set_switches, switches())
        set_switches(kept["switches"])
        for device, dtype in kept["autocast"].items():
            if device == "cpu" or torch.cuda.is_available():
                stack.enter_context(torch.autocast(device, dtype))
        yield


def versions() -> dict[str, str]:
    """Return what software and which machine this is."""
    gpu_is_used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "pytest_modelhealth": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        **({"gpu": torch.cuda.get_device_name()} if gpu_is_used else {}),
    }
