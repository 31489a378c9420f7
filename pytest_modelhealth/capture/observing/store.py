"""Keeps the tensors of a run: in memory up to a budget, beyond it in a temporary file."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in the file."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype


class TensorStore:
    """Copies of tensors by number, on the CPU. A context: the file goes when it ends, however.

    Args:
        budget: bytes to keep in memory. What comes in beyond them lies in a temporary file without
            a name, which the system removes even if the process is killed.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._kept: list[Tensor | _Place] = []
        self._file: IO[bytes] | None = None
        self.in_memory = 0
        self.on_disk = 0

    def put(self, tensor: Tensor) -> int:
        """Copy a real, strided tensor and return its number.

        Raises:
            OSError: the file cannot be written.
        """
        copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        size = copy.numel() * copy.element_size()
        if self.in_memory + size <= self._budget:
            self.in_memory += size
            self._kept.append(copy)
        else:
            self._kept.append(self._write(copy, size))
        return len(self._kept) - 1

    def __getitem__(self, number: int) -> Tensor:
        """Return a tensor, which is not to be changed."""
        kept = self._kept[number]
        return kept if isinstance(kept, Tensor) else self._read(kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._kept.clear()
        if self._file is not None:
            self._file.close()

    def _write(self, tensor: Tensor, size: int) -> _Place:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="modelhealth-")  # noqa: SIM115 - closed in __exit__
        place = _Place(self.on_disk, tensor.shape, tensor.dtype)
        self._file.seek(self.on_disk)
        self._file.write(_bytes(tensor))
        self.on_disk += size
        return place

    def _read(self, place: _Place) -> Tensor:
        assert self._file is not None
        tensor = torch.empty(place.shape, dtype=place.dtype)
        if tensor.numel():
            self._file.seek(place.offset)
            memory = _bytes(tensor)
            read = self._file.readinto(memory)  # type: ignore[attr-defined]
            assert read == len(memory)
        return tensor


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
