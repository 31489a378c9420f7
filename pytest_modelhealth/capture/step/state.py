"""All that a model holds, to put it back."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from pytest_modelhealth.capture.observing.autograd_graph import walk
from pytest_modelhealth.capture.observing.tensors import NEVER_LAZY
from pytest_modelhealth.errors import InspectionError

_lock = threading.RLock()
_PATIENCE = 600.0


@contextmanager
def alone() -> Iterator[None]:
    """Have no other thread inspect meanwhile: hooks, modes and settings are of the whole process.

    Raises:
        InspectionError: another did so for ten minutes, which may wait for this one itself.
    """
    if not _lock.acquire(timeout=_PATIENCE):
        raise InspectionError(
            f"an inspection in another thread has not ended in {_PATIENCE:.0f} seconds: one runs "
            "at a time; begin this one before it or after it"
        )
    try:
        yield
    finally:
        _lock.release()


class State:
    """All that a model holds: what its modules' attributes lead to, through plain containers.

    Modules outside torch's registry, in a list say, are part of it. Objects of the user's own
    classes are not opened.

    Args:
        roots: the model, or several.
        containers: some that hold the same objects in the end, which are not looked into.
    """

    _closed = frozenset(
        {bool, int, float, complex, str, bytes, type(None), FunctionType, torch.dtype}
    )
    """Types of what leads to nothing."""

    def __init__(self, *roots: Any, containers: Iterable[Any] = ()) -> None:
        self.modules: list[nn.Module] = []  # the model first
        self.leaves: list[Tensor] = []  # parameters, and what else collects a gradient
        self.tensors: list[Tensor] = []  # that are no parameters: buffers and plain attributes
        self.generators: list[Any] = []  # of random numbers
        self.scripts: list[nn.Module] = []  # whose attributes lie in C++
        self.lazy: list[Tensor] = []  # parameters and buffers that the first forward creates
        self._empty: list[Any] = []  # containers that hold nothing: a dozen a module, for hooks
        self._others = [(one, _items(one)) for one in containers]  # each with what it holds
        self._seen: dict[int, Any] = {}
        with alone():  # hooks of another thread's are no part of a model
            self._visit_all(roots)

    def restore(self) -> None:
        """Put the same objects in again, in the order they had."""
        for container in self._empty if any(self._empty) else ():
            if container:
                container.clear()
        for container, held in self._others:
            if not _holds(container, *held):
                _fill(container, *held)

    def exchange(self, others: Mapping[int, Any]) -> None:
        """Put other objects in the place of some, given by the id of these; a set is left alone."""
        for container, _ in self._others:
            if isinstance(container, dict):
                changed = {k: others[id(v)] for k, v in container.items() if id(v) in others}
                container.update(changed)
            elif isinstance(container, list | deque):
                for index, value in enumerate(container):
                    container[index] = others.get(id(value), value)

    def _visit_all(self, values: Iterable[Any]) -> None:
        closed = self._closed
        for value in values:
            kind = type(value)
            if kind in closed:
                pass
            elif kind not in _CONTAINERS:
                self._visit(value)
            elif value:
                self._open(value)
            else:
                self._empty.append(value)

    def _open(self, container: Any) -> None:
        if id(container) in self._seen:
            return
        self._seen[id(container)] = container
        self._others.append((container, _items(container)))
        self._visit_all(container.values() if isinstance(container, dict) else container)

    def _visit(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        kind = type(value)  # an object's own word for it may be a lie
        if issubclass(kind, nn.Module):
            self._add_module(value)
        elif kind is nn.Parameter or issubclass(kind, Tensor):
            self._add_tensor(value)
        elif kind is tuple:
            self._visit_all(value)
        elif is_generator(kind):
            self.generators.append(value)

    def _add_module(self, module: nn.Module) -> None:
        self.modules.append(module)
        attributes = module.__dict__
        names, values = [*attributes], [*attributes.values()]
        self._others.append((attributes, (names, values)))
        hooks = values[_HOOKS]
        if names[: len(_ATTRIBUTES)] == _ATTRIBUTES and not any(hooks):
            del hooks[_FLAG]
            self._empty += hooks  # in one go: nearly all modules have no hooks
            values = values.copy()
            del values[_HOOKS]
        self._visit_all(values)
        if isinstance(module, torch.jit.ScriptModule):  # keeps its own in C++
            self.scripts.append(module)
            for owned in (module._parameters, module._buffers, module._modules):
                self._visit_all(owned.values())

    def _add_tensor(self, tensor: Tensor) -> None:
        is_parameter = isinstance(tensor, nn.Parameter)
        try:
            is_leaf = tensor.is_leaf
        except RuntimeError:  # a view of several that was written to, which FSDP1 keeps
            return
        if is_leaf and (is_parameter or tensor.requires_grad):
            self.leaves.append(tensor)
        if type(tensor) not in NEVER_LAZY and is_lazy(tensor):
            self.lazy.append(tensor)
        elif is_leaf and not is_parameter:
            self.tensors.append(tensor)


_ATTRIBUTES = [*vars(nn.Module())]
"""What every module has, in this order unless a class of the user's made it another."""
_HOOKS = slice(_ATTRIBUTES.index("_buffers") + 1, _ATTRIBUTES.index("_modules"))
"""Of these the containers of its hooks, and a flag among them."""
_FLAG = _ATTRIBUTES.index("_is_full_backward_hook") - _HOOKS.start

_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, Counter, list, set, deque})
_GENERATORS = (torch.Generator, random.Random)


def graph_leaves(roots: Iterable[Any]) -> list[Tensor]:
    """Return the leaf tensors that a backward pass from these nodes of a graph gets to."""
    return [node.variable for node in walk(roots) if type(node) is _AccumulateGrad]


_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def is_generator(kind: type) -> bool:
    """Whether objects of a class are random generators, of torch, NumPy or Python."""
    if issubclass(kind, _GENERATORS):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(
        kind, (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    )


def _items(container: Any) -> tuple[Sequence[Any], list[Any]]:
    """Return what a container holds, of a dictionary apart the keys."""
    is_dict = isinstance(container, dict)
    return ((*container,), [*container.values()]) if is_dict else ((), [*container])


def _holds(container: Any, keys: Sequence[Any], values: list[Any]) -> bool:
    """Whether a container holds these very objects."""
    if type(keys) is list:  # names, which may be compared
        return [*container] == keys and all(map(is_, container.values(), values))
    found = container.values() if isinstance(container, dict) else container
    is_whole = len(found) == len(values) and all(map(is_, found, values))
    return is_whole and all(map(is_, container, keys))


def _fill(container: Any, keys: Sequence[Any], values: list[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        for key, value in zip(keys, values, strict=True):
            container[key] = value  # the update of a Counter counts
    elif isinstance(container, set):
        container.update(values)
    else:
        container.extend(values)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64})
"""What most tensors consist of."""


class Memory:
    """What tensors hold, bit for bit, so that two that share memory are copied once.

    A view may show one element many times (``expand``, ``unfold``) or a little of a storage that is
    large: copied is what lies between the first and the last element that is shown.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._aliases: list[tuple[Tensor, Tensor]] = []
        self._storages: dict[int, tuple[Any, int, list[Tensor]]] = {}  # each with its size
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._others: list[tuple[Tensor, Tensor]] = []  # without a storage: they are copied whole
        with _as_stored():
            for tensor in chain.from_iterable(map(inner_tensors, tensors)):
                self._add(tensor)
            for storage, _, parts in self._storages.values():
                self._copies += [(one, one.clone()) for one in _integer_views(storage, parts)]

    def restore(self) -> None:
        """Give the tensors their memory back, and the memory its bytes."""
        for tensor, alias in self._aliases:
            if _place(tensor) != _place(alias):
                with _version_kept(tensor):
                    tensor.data = alias
        with _as_stored():
            for storage, size, _ in self._storages.values():
                if storage.nbytes() != size:
                    storage.resize_(size)
            for shown, copy in self._copies:
                # memory that only can be read is not written to; on another device a comparison
                # would wait
                if not (shown.is_cpu and torch.equal(shown, copy)):
                    shown.copy_(copy)
        for tensor, value in self._others:
            with _version_kept(tensor):
                tensor.copy_(value)

    def _add(self, tensor: Tensor) -> None:
        alias = tensor.detach()
        parts = stored_parts(alias)
        if parts is None:
            self._others.append((tensor, alias.clone()))
            return
        self._aliases.append((tensor, alias))
        for part in parts:
            if not part.is_meta and (part.is_nested or part.numel()):
                storage = part.untyped_storage()
                held = self._storages.setdefault(storage._cdata, (storage, storage.nbytes(), []))
                held[2].append(part)


def _integer_views(storage: Any, parts: list[Tensor]) -> Iterator[Tensor]:
    """Yield what tensors show of a storage as integers, whose copies and comparisons are exact."""
    part = parts[0]
    is_plain = part.dtype in _PLAIN and not part.is_nested and part.is_contiguous()
    if is_plain and len(parts) == 1 and not part.is_neg():  # most tensors, in less time
        flat = part.data.view(-1)  # with a version of its own
        is_even = flat.nbytes % 8 == 0 == flat.storage_offset() * flat.itemsize % 8
        yield flat.view(torch.int64 if is_even else _INTEGERS[flat.itemsize])
        return
    spans = []
    for part in parts:
        begin, end = 0, storage.nbytes()
        if not part.is_nested:
            begin = int(part.storage_offset()) * part.itemsize
            steps = zip(part.stride(), part.shape, strict=True)
            end = begin + (1 + sum((n - 1) * step for step, n in steps)) * part.itemsize
        spans.append((begin, end))
    covered = 0
    for begin, end in sorted(spans):
        begin = max(begin, covered)
        if end > begin:
            covered, empty = end, torch.empty(0, dtype=torch.uint8, device=storage.device)
            yield empty.set_(storage, begin, (end - begin,), (1,))


def inner_tensors(tensor: Any) -> Iterator[Tensor]:
    """Yield the tensors inside one of a wrapper class; any other itself."""
    if type(tensor) in NEVER_LAZY or not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
        if isinstance(part, Tensor):  # a DTensor has its mesh there, too
            yield from inner_tensors(part)


def stored_parts(tensor: Tensor) -> list[Tensor] | None:
    """Return the tensors with a storage that `tensor` consists of; ``None`` where none are open."""
    layout = tensor.layout
    if layout is torch.strided:
        return [tensor]
    if layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return None


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return where a tensor's elements lie; of a layout that does not tell, one like no other."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return (object(),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


@contextmanager
def _as_stored() -> Iterator[None]:
    """Make plain tensors of what is stored, in whatever mode the user is."""
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield


@contextmanager
def _version_kept(tensor: Tensor) -> Iterator[None]:
    """Write to `tensor` behind the back of autograd: an outer graph may have saved its version."""
    with (
        torch._C.DisableTorchFunction(),
        torch.inference_mode(tensor.is_inference()),
        torch.no_grad(),
        torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor),
    ):
        yield
