"""Reads what each operation of a run costs, in arithmetic and in storage.

A multiplication and an addition are two operations. Only the matrix products are counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from torch.utils.module_tracker import ModuleTracker

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.state import inner_tensors, stored_parts

Shape = Sequence[int]
Formula = Callable[..., int]


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _multihead(query: Shape, key: Shape, value: Shape, width: int, *_: Any, **__: Any) -> int:
    """Count projections and attention of the path that `nn.MultiheadAttention` has in evaluation.

    Its tensors are of shape (samples, length, features).
    """
    samples, length, _width = query
    projections = 2 * samples * width * width * (length + key[1] + value[1] + length)
    return projections + 4 * samples * length * key[1] * width


def _onednn_recurrence(
    inputs: Shape, over_input: Shape, over_state: Shape, *_: Any, **__: Any
) -> int:
    """Count one layer in one direction: each step is multiplied by both matrices."""
    return 2 * inputs[0] * inputs[1] * (prod(over_input) + prod(over_state))


def _cudnn_recurrence(inputs: Shape, weights: Sequence[Shape], *_: Any, **__: Any) -> int:
    """Count all layers: inputs are (steps, samples, features), or (rows, features) where packed."""
    return 2 * prod(inputs[:-1]) * sum(prod(weight) for weight in weights if len(weight) == 2)


_BY_NAME: dict[str, Formula] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_native_multi_head_attention": _multihead,
    "mkldnn_rnn_layer": _onednn_recurrence,
    "_cudnn_rnn": _cudnn_recurrence,
    "miopen_rnn": _cudnn_recurrence,
}


@dataclass(slots=True, eq=False)
class _Followed:
    """A storage that is in use."""

    nbytes: int
    reference: weakref.ref[Any]  # tells when it is freed
    is_given: bool  # it was there before the run
    is_saved: bool = False  # autograd keeps it


class Storages:
    """What is in use now, and the most that was: bytes of storages, each counted once.

    Nothing is held: a storage is known by its address until it is freed.
    """

    def __init__(self) -> None:
        self.in_use = 0
        self.peak = 0
        self._followed: dict[int, _Followed] = {}

    def follow(self, tensor: Tensor, is_given: bool = False) -> list[_Followed]:
        """Take a tensor that an operation returned, or that is there before the run."""
        return [self._follow(storage, is_given) for storage in _storages(tensor)]

    def save(self, tensor: Tensor) -> int:
        """Take a tensor that autograd keeps; return the bytes that are kept because of it."""
        saved = 0
        for followed in self.follow(tensor):
            if not (followed.is_given or followed.is_saved):
                followed.is_saved = True
                saved += followed.nbytes
        return saved

    def given(self, device: str) -> int:
        """Return the bytes that were there before the run, on devices of a kind, ``""`` for all."""
        given = (one for one in self._followed.values() if one.is_given)
        alive = ((one.nbytes, storage) for one in given if (storage := one.reference()) is not None)
        return sum(nbytes for nbytes, s in alive if s.device.type.startswith(device))

    def forget(self) -> None:
        """Follow nothing any longer."""
        self._followed.clear()

    def _follow(self, storage: Any, is_given: bool) -> _Followed:
        key, nbytes = storage._cdata, storage.nbytes()
        followed = self._followed.get(key)
        if followed is None:
            reference = weakref.ref(storage, lambda _: self._free(key))
            followed = self._followed[key] = _Followed(0, reference, is_given)
        if followed.nbytes != nbytes:  # a new one, or one that was resized
            self.in_use += nbytes - followed.nbytes
            followed.nbytes = nbytes
            self.peak = max(self.peak, self.in_use)
        return followed

    def _free(self, key: int) -> None:
        followed = self._followed.pop(key, None)
        if followed is not None:
            self.in_use -= followed.nbytes


def _storages(tensor: Tensor) -> list[Any]:
    """Return the storages that a tensor consists of; none where they are out of reach."""
    parts = (part for inner in inner_tensors(tensor) for part in stored_parts(inner) or ())
    return [part.untyped_storage() for part in parts]


class Meter(TorchDispatchMode):
    """Sees every operation of a run.

    Args:
        running_layer: the name of the innermost layer whose forward runs, ``None`` outside of it.
        sees_saved: whether to see what autograd saves.
    """

    supports_higher_order_operators = True

    def __init__(self, running_layer: Callable[[], str | None], *, sees_saved: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.multiply_adds: Counter[str] = Counter()  # by layer, as what autograd saves
        self.saved_bytes: Counter[str] | None = Counter() if sees_saved else None
        self.storages = Storages()
        self._running_layer = running_layer
        aten = torch.ops.aten  # of this version of torch
        known = {getattr(aten, name): f for name, f in _BY_NAME.items() if hasattr(aten, name)}
        self._counter = FlopCounterMode(display=False, custom_mapping=known)
        # that of torch hooks every module and tensor to tell layers apart, which we do ourselves
        self._counter.mod_tracker = _NoModules()
        self._counted = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """See the operations that run inside, and what they have saved."""
        with ExitStack() as stack:
            stack.enter_context(self._counter)
            stack.enter_context(self)
            if self.saved_bytes is not None:
                stack.enter_context(saved_tensors_hooks(self._save, lambda tensor: tensor))
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation; the counter, which is on below this mode, sees it too."""
        with torch._C.DisableTorchFunction():  # the user's function modes have seen the call
            made = func(*args, **(kwargs or {}))
        for tensor in [made] if type(made) is Tensor else find_tensors(made):
            self.storages.follow(tensor)
        counted = self._counter.get_total_flops()
        if counted != self._counted:
            layer = self._running_layer()
            if layer is not None:
                self.multiply_adds[layer] += (counted - self._counted) // 2
            self._counted = counted
        return made

    def _save(self, tensor: Tensor) -> Tensor:
        layer = self._running_layer()
        if layer is not None and self.saved_bytes is not None:
            with torch._C.DisableTorchFunction():
                self.saved_bytes[layer] += self.storages.save(tensor)
        return tensor


class _NoModules(ModuleTracker):
    """Tracks nothing."""

    def __enter__(self) -> ModuleTracker:
        return self

    def __exit__(self, *_: object) -> None:
        pass
