"""Finds the tensors in whatever a model takes or returns, and tells whether one was written to."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, range, slice)
_OPAQUE = (nn.Module, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_SEQUENCES = (tuple, list, set, frozenset, deque)


def find_tensors(value: Any) -> list[Tensor]:
    """Return each tensor in `value` once, in order of appearance.

    Containers of any kind are opened: mappings, sequences, sets, data classes, named tuples, packed
    sequences, and any object that keeps its tensors in attributes, such as a cache or a
    distribution. Cycles end; modules and functions are not opened.
    """
    kind = type(value)
    if kind is Tensor:
        return [value]
    if kind is tuple and len(value) == 1 and type(value[0]) is Tensor:  # the arguments of a layer
        return [value[0]]
    return list(_find(value, {}))


def _find(value: Any, memo: dict[int, Any]) -> Iterator[Tensor]:
    if isinstance(value, _ATOMS) or id(value) in memo:
        return
    memo[id(value)] = value  # the reference keeps the id from being used again
    if isinstance(value, Tensor):
        yield value
        return
    for part in _parts(value):
        yield from _find(part, memo)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, _SEQUENCES):
        return list(value)
    if isinstance(value, _OPAQUE):
        return []
    attributes = list(vars(value).values()) if hasattr(value, "__dict__") else []
    return attributes + [getattr(value, slot, None) for slot in _slots(value)]


def _slots(value: Any) -> list[str]:
    slots = [getattr(base, "__slots__", ()) for base in type(value).__mro__]
    return [name for names in slots for name in ((names,) if isinstance(names, str) else names)]


def holds_numbers(tensor: Tensor) -> bool:
    """Whether a tensor holds real or complex numbers, quantised ones among them, not integers."""
    return tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized


NEVER_LAZY = frozenset({Tensor, nn.Parameter})


def version(tensor: Tensor) -> int | None:
    """Return the tensor's version counter, or ``None`` where it has none.

    Tensors made in inference mode have none, and lazy ones before their first call.
    """
    if type(tensor) not in NEVER_LAZY and is_lazy(tensor):
        return None
    return None if tensor.is_inference() else tensor._version


def version_probe(tensor: Tensor) -> Tensor:
    """Return an empty tensor that shares the version counter of `tensor`, and no memory."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        probe = tensor.detach()
        probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe
