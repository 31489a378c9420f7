"""Follows the storages of tensors from the operation that makes them until they are freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pytest_modelhealth.capture.observing.tensors import NEVER_LAZY
from pytest_modelhealth.capture.step.memory import stored_parts


@dataclass(slots=True, eq=False)
class _Followed:
    """A storage that is in use.

    Args:
        nbytes: its size.
        reference: tells when it is freed.
        is_given: whether it was there before the run.
        is_saved: whether autograd keeps it.
    """

    nbytes: int
    reference: weakref.ref[Any]
    is_given: bool
    is_saved: bool = False


class Storages:
    """What is in use now, and the most that was: bytes of storages, each counted once.

    Nothing is held: a storage is known by its address until it is freed.
    """

    def __init__(self) -> None:
        self.in_use = 0
        self.peak = 0
        self._followed: dict[int, _Followed] = {}

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Take what is there before the run."""
        for tensor in tensors:
            self.follow(tensor, is_given=True)

    def follow(self, tensor: Tensor, *, is_given: bool = False) -> None:
        """Take a tensor that an operation returned."""
        for storage in _storages(tensor):
            self._follow(storage, is_given)

    def save(self, tensor: Tensor) -> int:
        """Take a tensor that autograd keeps; return the bytes that are kept because of it."""
        saved = 0
        for storage in _storages(tensor):
            followed = self._follow(storage, is_given=False)
            if not (followed.is_given or followed.is_saved):
                followed.is_saved = True
                saved += followed.nbytes
        return saved

    def given(self, device: str) -> int:
        """Return the bytes that were there before the run, on devices of a kind, ``""`` for all."""
        found = 0
        for followed in self._followed.values():
            storage = followed.reference()
            if followed.is_given and storage is not None and storage.device.type.startswith(device):
                found += followed.nbytes
        return found

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
    wrapper: Any = tensor
    if type(tensor) not in NEVER_LAZY and is_traceable_wrapper_subclass(wrapper):
        inner = (getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0])
        return [storage for part in inner for storage in _storages(part)]
    parts = stored_parts(tensor)
    return [] if parts is None else [part.untyped_storage() for part in parts]
