"""Finds the tensors in whatever a model takes or returns, reads each once, and keeps them."""

from __future__ import annotations

import tempfile
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Generic, Self, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.statistics import Entries, Entry, Ledger, UnsupportedTensorError


@contextmanager
def noted(errors: list[str], what: str = "") -> Iterator[None]:
    """Put an error of ours on the record: it must never reach what runs of the user's."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, it is ours
        errors.append(f"{what}{type(error).__name__}: {error}")


_ATOMS = (type(None), bool, int, float, str, bytes, complex, type, range, slice)
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
    return _find(value, {}, [])


_T = TypeVar("_T")


def is_a(value: object, kind: type[_T]) -> TypeGuard[_T]:
    """Whether `value` is of this type.

    Its ``__class__``, which `isinstance` asks for too, is the user's: it may lie, or raise.
    """
    return issubclass(type(value), kind)


def _find(value: Any, memo: dict[int, Any], found: list[Tensor]) -> list[Tensor]:
    kind = type(value)
    if issubclass(kind, _ATOMS) or id(value) in memo:
        return found
    memo[id(value)] = value  # the reference keeps the id from being used again
    if issubclass(kind, Tensor):
        found.append(value)
        return found
    if issubclass(kind, _SEQUENCES) or issubclass(kind, Mapping):
        parts = contents(value, kind)
    else:
        parts = [] if issubclass(kind, _OPAQUE) else [*attributes(value).values()]
    for part in parts:
        _find(part, memo, found)
    return found


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


_DTYPES = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
NUMBERS = frozenset(
    {dtype for dtype in _DTYPES if dtype.is_floating_point or dtype.is_complex}
    | {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
)
"""The dtypes of real and complex numbers, quantised ones among them, not of integers."""


def holds_numbers(tensor: Tensor) -> bool:
    """Whether a tensor is of one of the dtypes of numbers."""
    return tensor.dtype in NUMBERS


NEVER_LAZY = frozenset({Tensor, nn.Parameter})


def version(tensor: Tensor) -> int | None:
    """Return the tensor's version counter, or ``None`` where it has none.

    Tensors made in inference mode have none, and lazy ones before their first call.
    """
    if type(tensor) not in NEVER_LAZY and is_lazy(tensor):
        return None
    try:
        return tensor._version
    except RuntimeError:
        return None


class KnownTensors(Generic[_T]):
    """What is known of tensors, by the tensor itself, while it lives; it is not held.

    `torch.utils.weak` has such a dictionary, which takes three times as long to look one up.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int | None, _T]] = {}

    def get(self, tensor: Tensor, version_now: int | None) -> _T | None:
        """Return what is known of a tensor, unless it was written to since."""
        found = self._known.get(id(tensor))
        if found is None or found[0]() is not tensor or found[1] != version_now:
            return None
        return found[2]

    def put(self, tensor: Tensor, version_now: int | None, known: _T) -> None:
        """Take what is known of a tensor as it is now."""
        self._known[id(tensor)] = weakref.ref(tensor), version_now, known

    def latest(self, tensor: Tensor) -> _T | None:
        """Return what is known of a tensor, though it may have been written to."""
        found = self._known.get(id(tensor))
        return None if found is None or found[0]() is not tensor else found[2]

    def tensors(self) -> list[Tensor]:
        """Return those that live, in the order in which they came."""
        return [tensor for found in self._known.values() if (tensor := found[0]()) is not None]


@dataclass(frozen=True)
class LossScale:
    """What the loss is multiplied by before the backward pass, so that fp16 holds its gradients."""

    factor: float = 1.0

    @classmethod
    def of(cls, scaler: Any) -> LossScale:
        """Return the scale that a `torch.amp.GradScaler` has now; asking does not change it.

        Raises:
            InspectionError: `scaler` is no scaler.
        """
        if scaler is None:
            return NO_SCALE
        if not hasattr(scaler, "get_scale"):
            raise InspectionError(
                f"scaler={scaler!r} has no get_scale(): pass the torch.amp.GradScaler itself"
            )
        return cls(float(scaler.get_scale()))

    def apply(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, as `GradScaler.scale` does: in float32 where the loss is fp16."""
        if self.factor == 1.0:
            return loss
        return loss * torch.full((), self.factor, dtype=torch.float32, device=loss.device)

    def unscale(self, gradient: Tensor) -> Tensor:
        """Return `gradient` without the scale, in float32 where fp16 would underflow."""
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        return gradient.detach().to(dtype) / self.factor


NO_SCALE = LossScale()


class Reader:
    """Finds the statistics of tensors, which it keeps none of, and of gradients without a scale."""

    def __init__(self, ledger: Ledger, scale: LossScale, samples: int) -> None:
        self.ledger = ledger
        self._scale = scale
        self.samples = samples
        self.known = KnownTensors[Entry]()  # what was found in tensors that live

    def expect(self, samples: int, scale: LossScale) -> None:
        """Take the size of the batch that comes now, and the scale of its loss."""
        self.samples, self._scale = samples, scale

    def forget(self) -> None:
        """Look at every tensor anew: compiled code writes to memory without a new version."""
        self.known = KnownTensors()

    def read_gradient(self, gradient: Tensor, unit_dimension: int | None = None) -> Entry:
        """Return the entry of a gradient without the scale of the loss.

        Raises:
            UnsupportedTensorError: it cannot be read.
        """
        if self._scale.factor == 1.0:
            return self.ledger.add(gradient, unit_dimension)
        unscaled = self._scale.unscale(gradient)
        return self.ledger.add(unscaled, unit_dimension).of_dtype(gradient.dtype)

    def read_many(self, tensors: Sequence[Tensor], *, gradients: bool) -> Entries:
        """Return the entry of each tensor, ``None`` for one that is to be read by itself."""
        if not (gradients and self._scale.factor != 1.0):
            try:
                return self.ledger.add_many(tensors)
            except Exception:  # noqa: BLE001 - ours: read by itself, it is of one layer
                pass
        return Entries([None] * len(tensors))

    def of_loss(self, value: Any) -> Entry | None:
        """Return the entry of what a loss function took or gave, if it is a tensor with values.

        A loss is often given a model's output in another shape.
        """
        if not isinstance(value, Tensor):
            return None
        base = value._base
        if base is not None and base.is_contiguous() and _shows_all(value, base):
            # a linear layer returns a view of all of the base, too
            views = (t for t in reversed(self.known.tensors()) if t._base is base)
            for tensor in (base, *(view for view in views if _shows_all(view, base))):
                if (entry := self.known.get(tensor, version(tensor))) is not None:
                    return entry.reshaped(tuple(value.shape))
        try:
            return self.known.get(value, version(value)) or self.ledger.add(value)
        except UnsupportedTensorError:
            return None


def _shows_all(view: Tensor, base: Tensor) -> bool:
    """Whether a view holds the numbers of a contiguous tensor in their order."""
    is_whole = view.dtype is base.dtype and view.numel() == base.numel()
    return is_whole and view.is_contiguous()


class TensorStore:
    """Copies of tensors by number, on the CPU. A context: the file goes when it ends, however.

    Args:
        budget: bytes to keep in memory. What comes in beyond them lies in a temporary file without
            a name, which the system removes even if the process is killed.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._kept: list[tuple[Tensor, int | None]] = []  # each, or its form and place in the file
        self._file: IO[bytes] | None = None
        self.in_memory = 0
        self.on_disk = 0

    def put(self, tensor: Tensor) -> int:
        """Copy a real, strided tensor and return its number.

        Raises:
            OSError: the file cannot be written.
        """
        copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        if self.in_memory + copy.nbytes <= self._budget:
            self.in_memory += copy.nbytes
            self._kept.append((copy, None))
        else:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="modelhealth-")  # noqa: SIM115 - closed in __exit__
            self._file.seek(self.on_disk)
            self._file.write(_bytes(copy))
            self._kept.append((copy.to("meta"), self.on_disk))
            self.on_disk += copy.nbytes
        return len(self._kept) - 1

    def __getitem__(self, number: int) -> Tensor:
        """Return a tensor, which is not to be changed."""
        kept, place = self._kept[number]
        if place is None:
            return kept
        assert self._file is not None
        tensor = torch.empty_like(kept, device="cpu")
        self._file.seek(place)
        read = self._file.readinto(_bytes(tensor))  # type: ignore[attr-defined]
        assert read == tensor.nbytes
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.clear()
        if self._file is not None:
            self._file.close()


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


WHY_NOT_SEEN = (
    "a CUDA graph was captured in this step: what ran meanwhile was not looked at, as reading a "
    "tensor ends a capture"
)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream; it does not start CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
