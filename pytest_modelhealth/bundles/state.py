"""What a model holds: taken down by name, and put into another model for a while."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_modelhealth.bundles.content import HeldTensor, Model
from pytest_modelhealth.bundles.packing import Packer, qualified_name
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.state import is_generator
from pytest_modelhealth.errors import InspectionError, suggest
from pytest_modelhealth.layers import NamedModule, named_modules, original_class

_SHOWN = 3
_REGISTRIES = ("_parameters", "_buffers")


def held_tensors(model: nn.Module) -> list[Tensor]:
    """Return every parameter, buffer and tensor in an attribute, each once."""
    modules = named_modules(model)
    found = [tensor for registry in (*_REGISTRIES, "") for _, _, tensor in _held(modules, registry)]
    return list({id(tensor): tensor for tensor in found}.values())


def take(model: nn.Module, packer: Packer, weights: str) -> Model:
    """Return what a model holds.

    Args:
        model: the module that has the layers.
        packer: gets the tensors.
        weights: why no values of tensors are kept, a phrase; ``""`` keeps them.
    """
    modules = named_modules(model)
    if weights:
        packer.lack(model, "model", weights)
    keep = None if weights else packer
    kept = {
        registry: tuple(_taken(_held(modules, registry), keep)) for registry in (*_REGISTRIES, "")
    }
    known = {id(tensor) for tensor in held_tensors(model)}
    for named in modules:
        _take_down_others(named, known, packer)
    return Model(
        kind=qualified_name(original_class(model)),
        parameters=kept["_parameters"],
        buffers=kept["_buffers"],
        attributes=kept[""],
        generators={
            _full(layer, name): packer.pack(_generator_state(generator), _full(layer, name))
            for layer, name, generator in _generators(modules)
        },
        training={named.name: bool(named.module.training) for named in modules},
    )


def _held(modules: Iterable[NamedModule], registry: str) -> Iterator[tuple[str, str, Tensor]]:
    """Yield layer, own name and tensor of what modules hold in a registry, ``""`` attributes."""
    for named in modules:
        held = getattr(named.module, registry) if registry else vars(named.module)
        for name, value in held.items():
            if issubclass(type(value), Tensor):
                yield named.name, str(name), value


def _taken(held: Iterable[tuple[str, str, Tensor]], packer: Packer | None) -> Iterator[HeldTensor]:
    """Yield each tensor once, under the first of its names."""
    names: dict[int, list[tuple[str, str]]] = {}
    tensors: dict[int, Tensor] = {}
    for layer, name, tensor in held:
        names.setdefault(id(tensor), []).append((layer, name))
        tensors[id(tensor)] = tensor
    for key, ((layer, name), *tied) in names.items():
        tensor, full = tensors[key], _full(layer, name)
        value = None if packer is None else packer.pack(tensor, f"model.{full}")
        yield HeldTensor(
            layer=layer,
            name=name,
            shape=() if _has_no_shape(tensor) else tuple(tensor.shape),
            dtype=_dtype(tensor),
            value=value,
            requires_grad=tensor.requires_grad,
            tied=tuple(_full(*other) for other in tied),
        )


def _has_no_shape(tensor: Tensor) -> bool:
    return bool(is_lazy(tensor)) or tensor.is_nested


_UNINITIALISED = "uninitialised"


def _dtype(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return _UNINITIALISED
    return str(tensor.dtype).removeprefix("torch.")


def _full(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer else name


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
        is_container = type(value) in (list, tuple, dict, set, deque)
        if not is_container or name in _OF_TORCH:
            continue
        if any(id(tensor) not in known for tensor in find_tensors(value)):
            reason = "it holds tensors, which no buffer or attribute does"
            packer.lack(value, f"{path}.{name}", reason)


_OF_TORCH = frozenset(vars(nn.Module()))


def _generators(modules: Iterable[NamedModule]) -> Iterator[tuple[str, str, Any]]:
    for named in modules:
        for name, value in vars(named.module).items():
            if is_generator(type(value)):
                yield named.name, name, value


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "get_state"):  # numpy.random.RandomState
        return generator.get_state(legacy=True)
    return getattr(generator, "bit_generator", generator).state


def _set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


@contextmanager
def loaded(model: nn.Module, kept: Model, *, values: bool) -> Iterator[None]:
    """Have a model hold what was kept, and put back what it held, bit for bit.

    Args:
        model: the module that has the layers.
        kept: what another model of the same layers held.
        values: whether to load the values of tensors, too; else they are the model's own, and
            only training mode and ``requires_grad`` are loaded.

    Raises:
        InspectionError: it is another model; the message says which names and shapes differ.
    """
    modules = {named.name: named.module for named in named_modules(model)}
    _require_same(model, kept)
    with ExitStack() as stack:
        for name, training in kept.training.items():
            stack.callback(setattr, modules[name], "training", modules[name].training)
            modules[name].training = training
        for held in kept.parameters:
            parameter: Any = modules[held.layer]._parameters[held.name]
            if is_lazy(parameter):
                continue
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(held.requires_grad)
            if values:
                _put(parameter, held, stack)
        if values:
            _put_others(modules, kept, stack)
        yield


def _put(tensor: Tensor, held: HeldTensor, stack: ExitStack) -> None:
    """Put values into a tensor in place; where they lie in another order, into its ``data``."""
    value = held.value
    if not isinstance(value, Tensor):  # left out, or could not be kept
        return
    before, after = tensor.data, value.detach().to(tensor.device)
    if after.stride() == before.stride():
        stack.callback(before.copy_, before.clone())
        before.copy_(after)  # of `data`, which leaves the version of the tensor as it is
    else:
        stack.callback(setattr, tensor, "data", before)
        tensor.data = after


def _put_others(modules: Mapping[str, nn.Module], kept: Model, stack: ExitStack) -> None:
    """Put buffers, tensors in attributes and the states of generators into the modules."""
    for registry, tensors in (("_buffers", kept.buffers), ("", kept.attributes)):
        for held in tensors:
            module = modules[held.layer]
            own: dict[str, Any] = module._buffers if registry else vars(module)
            there = own.get(held.name)
            if isinstance(there, Tensor) and there.shape == held.shape:
                _put(there, held, stack)
            elif registry and isinstance(held.value, Tensor):  # one that grows, as caches do
                stack.callback(own.__setitem__, held.name, there)
                own[held.name] = held.value
    for layer, name, generator in _generators(named_modules(modules[""])):
        state = kept.generators.get(_full(layer, name))
        if state is not None:
            stack.callback(_set_generator, generator, _generator_state(generator))
            _set_generator(generator, state)


def _require_same(model: nn.Module, kept: Model) -> None:
    """Do nothing if the model's names and shapes are those that were kept.

    Raises:
        InspectionError: they are not; the message names the first few.
    """
    modules = named_modules(model)
    made = {held.full_name for held in kept.parameters if held.dtype != _UNINITIALISED}
    for layer, name, parameter in _held(modules, "_parameters"):
        if is_lazy(parameter) and _full(layer, name) in made:
            raise InspectionError(
                f"{_full(layer, name)!r} of this {type(model).__name__} has no shape yet (a lazy "
                "module): call the model once on a batch of this size, then replay"
            )
    wrong = [
        *_differences(kept.parameters, dict(_named(modules, "_parameters"))),
        *_differences(kept.buffers, dict(_named(modules, "_buffers")), _declared(modules)),
    ]
    layers = {named.name for named in modules}
    if not wrong:
        wrong = [f"it has no layer {name!r}" for name in kept.training if name not in layers]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
        raise InspectionError(
            f"the bundle is of another model: {kept.kind} then, "
            f"{qualified_name(original_class(model))} now; {'; '.join(wrong[:_SHOWN])}{more}. Give "
            "the model that the test made, with the same arguments"
        )


def _named(modules: Iterable[NamedModule], registry: str) -> Iterator[tuple[str, Tensor]]:
    for layer, name, tensor in _held(modules, registry):
        yield _full(layer, name), tensor


def _declared(modules: Iterable[NamedModule]) -> set[str]:
    """Return the names of all buffers, of those that hold nothing yet too."""
    # a script's own dictionary has no __iter__
    return {_full(m.name, str(name)) for m in modules for name, _ in m.module._buffers.items()}


def _differences(
    kept: Iterable[HeldTensor],
    here: Mapping[str, Tensor],
    of_any_shape: Collection[str] = (),
) -> Iterator[str]:
    """Yield which names and shapes are not those that were kept."""
    known: set[str] = set()
    for held in kept:
        known.update((held.full_name, *held.tied))
        for name in (held.full_name, *held.tied):
            if name not in here and name not in of_any_shape:
                yield f"it has no {name!r}{suggest(name, here)}".rstrip(".")
        tensor = here.get(held.full_name)
        has_shape = held.full_name not in of_any_shape and held.dtype != _UNINITIALISED
        if tensor is not None and has_shape:
            now = (tuple(tensor.shape), _dtype(tensor))
            if now != (held.shape, held.dtype):
                yield f"{held.full_name!r} was {_form(held.shape, held.dtype)}, is {_form(*now)}"
    for name in here:
        if name not in known:
            yield f"{name!r} is not in the bundle"


def _form(shape: tuple[int, ...], dtype: str) -> str:
    return f"{'x'.join(map(str, shape)) or 'a scalar'} {dtype}"
