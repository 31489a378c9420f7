"""Finds the tensors in whatever a model takes or returns, and tells whether one was written to."""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeGuard, TypeVar

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


_T = TypeVar("_T")


def is_a(value: object, kind: type[_T]) -> TypeGuard[_T]:
    """Whether `value` is of this type.

    Its ``__class__``, which `isinstance` asks for too, is the user's: it may lie, or raise.
    """
    return issubclass(type(value), kind)


def _find(value: Any, memo: dict[int, Any]) -> Iterator[Tensor]:
    kind = type(value)
    if issubclass(kind, _ATOMS) or id(value) in memo:
        return
    memo[id(value)] = value  # the reference keeps the id from being used again
    if issubclass(kind, Tensor):
        yield value
        return
    for part in _parts(value, kind):
        yield from _find(part, memo)


def _parts(value: Any, kind: type) -> list[Any]:
    if issubclass(kind, Mapping) or issubclass(kind, _SEQUENCES):
        return contents(value, kind)
    if issubclass(kind, _OPAQUE):
        return []
    return list(attributes(value).values())


def contents(value: Any, kind: type) -> list[Any]:
    """Return what a container holds; where its own methods raise, as the class below has it."""
    try:
        return list(value.values() if issubclass(kind, Mapping) else value)
    except Exception:  # noqa: BLE001 - the user's own, and we asked: it is not for the user to see
        if issubclass(kind, dict):
            return list(dict.values(value))
        base: Any = next((base for base in _SEQUENCES if issubclass(kind, base)), None)
        return [] if base is None else list(base.__iter__(value))


def pairs(mapping: Any) -> list[tuple[Any, Any]]:
    """Return keys and values; where the mapping's own methods raise, as a dictionary has them."""
    try:
        return list(mapping.items())
    except Exception:  # noqa: BLE001 - as in `contents`
        return list(dict.items(mapping)) if is_a(mapping, dict) else []


def attributes(value: object) -> dict[str, Any]:
    """Return the attributes that an object keeps, in slots too, without any code of its class."""
    found = dict(_own(value, "__dict__") or {})
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if type(slots) is str else slots:
            if name not in ("__dict__", "__weakref__"):
                found[name] = _own(value, name)
    return found


def _own(value: object, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except Exception:  # noqa: BLE001 - a slot without a value, or a property of the user's
        return None


def holds_numbers(tensor: Tensor) -> bool:
    """Whether a tensor holds real or complex numbers, quantised ones among them, not integers."""
    dtype = tensor.dtype
    return dtype.is_floating_point or dtype.is_complex or tensor.is_quantized


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


class KnownTensors(Generic[_T]):
    """What is known of tensors, by the tensor itself, while it lives; it is not held.

    `torch.utils.weak` has such a dictionary, which takes three times as long to look one up.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int | None, _T]] = {}

    def get(self, tensor: Tensor) -> _T | None:
        """Return what is known of a tensor, unless it was written to since."""
        found = self._known.get(id(tensor))
        if found is None or found[0]() is not tensor or found[1] != version(tensor):
            return None
        return found[2]

    def put(self, tensor: Tensor, known: _T) -> None:
        """Take what is known of a tensor as it is now."""
        self._known[id(tensor)] = weakref.ref(tensor), version(tensor), known

    def latest(self, tensor: Tensor) -> _T | None:
        """Return what is known of a tensor, though it may have been written to."""
        found = self._known.get(id(tensor))
        return None if found is None or found[0]() is not tensor else found[2]

    def tensors(self) -> list[Tensor]:
        """Return those that live, in the order in which they came."""
        return [tensor for found in self._known.values() if (tensor := found[0]()) is not None]
