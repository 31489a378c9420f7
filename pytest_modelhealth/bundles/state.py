"""What numbers depend on beside the batch: what a model holds, torch's switches, the machine."""

from __future__ import annotations

import platform
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_modelhealth import __version__
from pytest_modelhealth.bundles.packing import Packer, qualified_name
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.state import is_generator
from pytest_modelhealth.errors import InspectionError, suggest
from pytest_modelhealth.layers import NamedModule, named_modules, original_class

_SHOWN = 3
_PARAMETERS, _BUFFERS, _ATTRIBUTES = _REGISTRIES = ("_parameters", "_buffers", "__dict__")
_LAZY, _EMPTY = "uninitialised", "empty"


def _held(model: nn.Module, registry: str) -> Iterator[tuple[str, Any, str, Tensor | None]]:
    """Yield full name, owner, own name and tensor of what modules hold; of buffers empty ones."""
    for named in named_modules(model):
        owner = getattr(named.module, registry)
        for name, value in list(owner.items()):
            if issubclass(type(value), Tensor) or (value is None and registry == _BUFFERS):
                yield _full(named, name), owner, name, value


def _full(named: NamedModule, name: object) -> str:
    return f"{named.name}.{name}" if named.name else str(name)


def held_tensors(model: nn.Module) -> list[Tensor]:
    """Return every parameter, buffer and tensor in an attribute, each once."""
    found = (one for registry in _REGISTRIES for *_, one in _held(model, registry))
    return list({id(tensor): tensor for tensor in found if tensor is not None}.values())


def take(model: nn.Module, packer: Packer, weights: str) -> dict[str, Any]:
    """Return what a model holds: tensors by registry and name, modes, states of generators.

    Args:
        model: the module that has the layers.
        packer: gets the tensors.
        weights: why no values of tensors are kept, a phrase; ``""`` keeps them.
    """
    if weights:
        packer.lack(model, "model", weights)
    modules = named_modules(model)
    kept: dict[str, Any] = {
        "kind": qualified_name(original_class(model)),
        "training": {named.name: bool(named.module.training) for named in modules},
        "generators": {
            name: packer.pack(_state_of(generator)[0], name)
            for name, generator in _generators(model)
        },
    }
    for registry in _REGISTRIES:
        kept[registry] = {
            name: (
                _form(tensor),
                tensor is not None and tensor.requires_grad,
                None if weights else packer.pack(tensor, f"model.{name}"),
            )
            for name, _, _, tensor in _held(model, registry)
        }
    known = {id(tensor) for tensor in held_tensors(model)}
    for named in modules:
        _take_down_others(named, known, packer)
    return kept


def _form(tensor: Tensor | None) -> str:
    """Return shape and dtype of a tensor for messages: ``"8x4 float32"``."""
    if tensor is None or is_lazy(tensor):
        return _EMPTY if tensor is None else _LAZY
    shape = () if tensor.is_nested else tuple(tensor.shape)
    return f"{'x'.join(map(str, shape)) or 'a scalar'} {tensor.dtype}".replace("torch.", "")


def _take_down_others(named: NamedModule, known: set[int], packer: Packer) -> None:
    """Take down what a module holds beside tensors and generators, and no bundle keeps.

    Args:
        named: the module.
        known: ids of the tensors that are kept, of which a list of them is nothing new.
        packer: gets what is missing.
    """
    module = named.module
    path = f"model.{named.name}".rstrip(".")
    for method in ("get_extra_state", "_save_to_state_dict"):
        if getattr(type(module), method) is not getattr(nn.Module, method):
            packer.lack(module, path, f"its {method}() saves what is no tensor")
    for name, value in vars(module).items():
        if type(value) not in (list, tuple, dict, set, deque) or name in _OF_TORCH:
            continue
        if any(id(tensor) not in known for tensor in find_tensors(value)):
            reason = "it holds tensors, which no buffer or attribute does"
            packer.lack(value, f"{path}.{name}", reason)


_OF_TORCH = frozenset(vars(nn.Module()))


def _generators(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for named in named_modules(model):
        for name, value in vars(named.module).items():
            if is_generator(type(value)):
                yield _full(named, name), value


def _state_of(generator: Any) -> tuple[Any, Callable[[Any], object]]:
    """Return the state of a generator, and what sets another one."""
    if isinstance(generator, random.Random):
        return generator.getstate(), generator.setstate
    generator = getattr(generator, "bit_generator", generator)  # of a numpy.random.Generator
    if hasattr(generator, "set_state"):  # of torch, numpy.random.RandomState
        return generator.get_state(), generator.set_state
    return generator.state, partial(setattr, generator, "state")


def load(model: nn.Module, kept: Mapping[str, Any], *, values: bool) -> None:
    """Have a model hold what was kept, behind the back of autograd.

    Args:
        model: the module that has the layers.
        kept: what another model of the same layers held.
        values: whether to load the values of tensors, too; else they are the model's own, and
            only training mode and ``requires_grad`` are loaded.

    Raises:
        InspectionError: it is another model; the message says which names and shapes differ.
    """
    _require_same(model, kept)
    for named in named_modules(model):
        named.module.training = kept["training"].get(named.name, named.module.training)
    for registry in _REGISTRIES:
        for full, owner, name, tensor in list(_held(model, registry)):
            if full not in kept[registry] or (tensor is not None and is_lazy(tensor)):
                continue
            form, requires_grad, value = kept[registry][full]
            if tensor is not None and registry == _PARAMETERS:
                tensor.requires_grad_(requires_grad)
            if values and (isinstance(value, Tensor) or form == _EMPTY):
                _put(owner, name, value, may_grow=registry == _BUFFERS)
    for name, generator in _generators(model) if values else ():
        if name in kept["generators"]:
            _state_of(generator)[1](kept["generators"][name])


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
    wrong = []
    for registry in (_PARAMETERS, _BUFFERS):
        here = {name: _form(tensor) for name, _, _, tensor in _held(model, registry)}
        for name, (form, *_) in kept[registry].items():
            if name not in here:
                wrong.append(f"it has no {name!r}{suggest(name, here)}".rstrip("."))
            elif registry == _PARAMETERS and here[name] == _LAZY != form:
                raise InspectionError(
                    f"{name!r} of this {type(model).__name__} has no shape yet (a lazy module): "
                    "call the model once on a batch of this size, then replay"
                )
            elif registry == _PARAMETERS and here[name] != form != _LAZY:
                wrong.append(f"{name!r} was {form}, is {here[name]}")
        wrong += [f"{name!r} is not in the bundle" for name in here if name not in kept[registry]]
    layers = {named.name for named in named_modules(model)}
    wrong = wrong or [
        f"it has no layer {name!r}" for name in kept["training"] if name not in layers
    ]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
        raise InspectionError(
            f"the bundle is of another model: {kept['kind']} then, "
            f"{qualified_name(original_class(model))} now; {'; '.join(wrong[:_SHOWN])}{more}. Give "
            "the model that the test made, with the same arguments"
        )


_CUDNN = torch.backends.cudnn
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "cudnn_benchmark": (lambda: _CUDNN.benchmark, partial(setattr, _CUDNN, "benchmark")),
    "cudnn_deterministic": (
        lambda: _CUDNN.deterministic,
        partial(setattr, _CUDNN, "deterministic"),
    ),
}
"""Switches of torch: how each is read and set."""


def surroundings() -> dict[str, Any]:
    """Return how torch's switches stand."""
    return {name: read() for name, (read, _) in _SWITCHES.items()} | {
        "grad_enabled": torch.is_grad_enabled(),
        "autocast": {
            device: torch.get_autocast_dtype(device)
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        },
    }


@contextmanager
def under(kept: Mapping[str, Any]) -> Iterator[None]:
    """Have torch's switches stand as they did, and put them back."""
    with ExitStack() as stack:
        for name, (read, write) in _SWITCHES.items():
            if (now := read()) != kept[name]:
                stack.callback(write, now)
                write(kept[name])
        stack.enter_context(torch.set_grad_enabled(kept["grad_enabled"]))
        for device, dtype in kept["autocast"].items():
            if device == "cpu" or torch.cuda.is_available():
                stack.enter_context(torch.autocast(device, dtype))
        yield


def versions() -> dict[str, str]:
    """Return what software and which machine this is."""
    import numpy

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = [f"model name: {platform.processor()}"]
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    gpu_is_used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "pytest_modelhealth": __version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": next(named, "") or platform.machine(),
        **({"gpu": torch.cuda.get_device_name()} if gpu_is_used else {}),
    }
