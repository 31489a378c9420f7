"""Who feeds whom, found by following every tensor's memory below autograd: slow, and independent.

A tag is the leaf module that a value came from. Tags are kept by what a tensor shows of its memory,
and every tensor that was met is held, so that no address is used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytest_modelhealth.capture.observing.tensors import find_tensors

Edge = tuple[str, str]

_TAKES_FORM = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
_TAKES_FORM_TOO = ("new_zeros", "new_ones", "new_empty", "new_full", "randint_like", "bernoulli")
_OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_")


class Provenance(TorchDispatchMode):
    """Follows values while it is on, and collects which leaf module's values come into which."""

    def __init__(self) -> None:
        super().__init__()
        self.edges: set[Edge] = set()
        self._inside: list[str] = []
        self._tags: dict[Any, frozenset[str]] = {}
        self._of_storage: dict[int, frozenset[str]] = {}
        self._held: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and give what comes out the tags of what went in."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if name in _TAKES_FORM + _TAKES_FORM_TOO:
            tags: frozenset[str] = frozenset()
        else:
            values = given[1:] if name in _OVERWRITES else given
            tags = frozenset().union(*(self.tags(t) for t in values))
        result = func(*args, **kwargs)
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if func._schema.is_mutable:
            made += [
                value
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
                for value in tree_leaves(value)
                if isinstance(value, Tensor)
            ]
            for tensor in made:
                self.write(tensor, tags)
        else:
            for tensor in made:
                self.tag(tensor, tags)
        return result

    def tags(self, tensor: Tensor) -> frozenset[str]:
        """Return where the values of a tensor come from."""
        known = self._tags.get(_key(tensor))
        if known is not None:
            return known
        return self._of_storage.get(_address(tensor), frozenset())

    def tag(self, tensor: Tensor, tags: frozenset[str]) -> None:
        """Say where the values of a tensor come from."""
        self._held.append(tensor)
        self._tags[_key(tensor)] = tags
        at = _address(tensor)
        self._of_storage[at] = self._of_storage.get(at, frozenset()) | tags

    def write(self, tensor: Tensor, tags: frozenset[str]) -> None:
        """Say where values come from that were written to a tensor, and to all that share it."""
        self._held.append(tensor)
        at = _address(tensor)
        is_all = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        whole = tags if is_all else tags | self._of_storage.get(at, frozenset())
        for key in [key for key in self._tags if key[0] == at]:
            del self._tags[key]
        self._of_storage[at] = whole

    def enter(self, layer: str, values: Any) -> list[tuple[Tensor, int]]:
        """Begin a call of a leaf module; return what it was given, with versions."""
        given = find_tensors(values)
        if not self._inside:
            for tensor in given:
                self.edges |= {(tag, layer) for tag in self.tags(tensor)}
        self._inside.append(layer)
        return [(tensor, -1 if tensor.is_inference() else tensor._version) for tensor in given]

    def complete(self, layer: str, given: list[tuple[Tensor, int]], returned: Any) -> None:
        """End it; what it returned is its own, unless it is what it was given, unchanged."""
        self._inside.pop()
        if self._inside:
            return
        own = frozenset({layer})
        for tensor in find_tensors(returned):
            if any(tensor is other and _unchanged(other, then) for other, then in given):
                continue
            if any(_key(tensor) == _key(other) for other, _ in given):  # written to in place
                self.write(tensor, own)
            else:
                self.tag(tensor, own)
                if all(_address(tensor) != _address(other) for other, _ in given):
                    self._of_storage[_address(tensor)] = own


def _unchanged(tensor: Tensor, version: int) -> bool:
    return tensor.is_inference() or tensor._version == version


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _key(tensor: Tensor) -> tuple[Any, ...]:
    where = (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    return (_address(tensor), *where)


@contextmanager
def provenance(model: nn.Module, leaves: Iterable[str]) -> Iterator[Provenance]:
    """Follow the values of all calls made inside, by leaf module."""
    mode = Provenance()
    modules = dict(model.named_modules())
    handles = []
    given: dict[str, list[Any]] = {name: [] for name in leaves}
    for name in leaves:

        def enter(module: Any, args: Any, kwargs: Any, name: str = name) -> None:
            given[name].append(mode.enter(name, (args, kwargs)))

        def complete(module: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            mode.complete(name, given[name].pop(), output)

        handles.append(modules[name].register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(modules[name].register_forward_hook(complete, with_kwargs=True))
    try:
        with mode:
            yield mode
    finally:
        for handle in handles:
            handle.remove()
