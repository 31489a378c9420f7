"""Nests of values as data: structure in JSON, tensors and arrays by name beside it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pytest_modelhealth.bundles.content import Data, Missing
from pytest_modelhealth.capture import Inputs
from pytest_modelhealth.errors import InspectionError

_DEEPEST = 50
_IS = "is"
NOTHING = object()
"""Stands where a value could not be kept."""


class Writer:
    """Writes nests, and collects their tensors by name and what could not be kept.

    Attributes:
        tensors: by name, each once, as they were given; `packed` makes them fit for a file.
        missing: what could not be kept.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.missing: list[Missing] = []
        self._names: dict[int, str] = {}
        self._held: list[Any] = []  # so that no id is used again
        self._open: set[int] = set()

    def write(self, value: Any, path: str) -> Data:
        """Return a value as data; `path` says where it stands."""
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {_IS: "float", "value": repr(value)}
        kind = next((kind for kind in _KINDS if _fits(value, kind)), None)
        if kind is None:
            return self.lack(
                value,
                path,
                "nothing that data can hold: tensors, arrays, numbers, "
                "strings, lists, tuples and mappings",
            )
        if id(value) in self._open or len(self._open) > _DEEPEST:
            return self.lack(value, path, "it holds itself, or is nested too deep")
        self._open.add(id(value))
        try:
            return {_IS: _KINDS[kind][0]} | _KINDS[kind][1](self, value, path)
        except _NotKeptError as reason:
            return self.lack(value, path, str(reason))
        finally:
            self._open.discard(id(value))

    def lack(self, value: Any, path: str, reason: str) -> Data:
        """Take down that a value is not kept, and return what stands for it."""
        self.missing.append(Missing(path, qualified_name(type(value)), reason))
        return {_IS: "missing"}

    def add(self, tensor: Tensor, path: str) -> str:
        """Return the name that a tensor goes by: one, however often it stands in the nests."""
        if id(tensor) not in self._names:
            self._held.append(tensor)
            name = path
            while name in self.tensors:
                name += "'"
            self._names[id(tensor)] = name
            self.tensors[name] = tensor.detach()
        return self._names[id(tensor)]


class _NotKeptError(Exception):
    """Why a value cannot be kept."""


def _fits(value: Any, kind: Any) -> bool:
    return issubclass(type(value), kind)  # an object's own word for its class may be a lie


def _tensor(writer: Writer, tensor: Tensor, path: str) -> dict[str, Any]:
    reason = why_not_kept(tensor)
    if reason:
        raise _NotKeptError(reason)
    dense = tensor.is_contiguous() or not _is_dense(tuple(tensor.shape), tensor.stride())
    return {
        "name": writer.add(tensor, path),
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": None if dense else list(tensor.stride()),
        "requires_grad": tensor.requires_grad,
        "device": str(tensor.device),
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as `dtype_of` reads it: ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def why_not_kept(tensor: Tensor) -> str:
    """Return why a tensor cannot be kept, a phrase; ``""`` if it can."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return "a tensor of a class of its own"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return "its layout is none of rows and columns (sparse or nested)"
    if tensor.is_quantized:
        return "it is quantised"
    if tensor.device.type == "meta":
        return "it has no values (meta)"
    return ""


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements with these strides fill their memory without gaps or overlap."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _array(writer: Writer, array: np.ndarray, path: str) -> dict[str, Any]:
    spelled = array.dtype.str
    if type(array) is not np.ndarray or not _ARRAY_DTYPE.fullmatch(spelled):
        raise _NotKeptError(f"an array of {array.dtype}")
    flat = np.frombuffer(bytearray(array.tobytes()), dtype=np.uint8)
    if not len(flat):
        return {"dtype": spelled, "shape": list(array.shape), "name": None}
    name = writer.add(torch.from_numpy(flat), path)
    return {"dtype": spelled, "shape": list(array.shape), "name": name}


_ARRAY_DTYPE = re.compile(r"[<>|][biufcSUmM]\d{1,9}(\[\d*[A-Za-zμ]+\])?")


def _items(writer: Writer, values: Any, path: str) -> dict[str, Any]:
    return {"items": [writer.write(v, f"{path}[{i}]") for i, v in enumerate(values)]}


def _tuple(writer: Writer, values: Any, path: str) -> dict[str, Any]:
    fields = getattr(type(values), "_fields", None)
    data = _items(writer, tuple.__iter__(values), path)
    return (
        data
        if fields is None
        else data | {"fields": list(fields), "of": qualified_name(type(values))}
    )


def _mapping(writer: Writer, values: Any, path: str) -> dict[str, Any]:
    items = [
        [writer.write(key, f"{path} key"), writer.write(value, f"{path}[{key!r}]")]
        for key, value in values.items()
    ]
    return {"items": items, "of": qualified_name(type(values))}


def qualified_name(named: Any) -> str:
    """Return a class or function as ``"package.module.Name"``."""
    return f"{named.__module__}.{named.__qualname__}"


def _inputs(writer: Writer, values: Inputs, path: str) -> dict[str, Any]:
    args, kwargs = writer.write(list(values.args), path), writer.write(values.kwargs, path)
    return {"args": args, "kwargs": kwargs}


def _text(_: Writer, value: Any, __: str) -> dict[str, Any]:
    return {"value": str(value)}


def _packed(writer: Writer, value: PackedSequence, path: str) -> dict[str, Any]:
    return _items(writer, tuple.__iter__(value), path)


_KINDS: dict[Any, tuple[str, Callable[[Writer, Any, str], dict[str, Any]]]] = {
    Tensor: ("tensor", _tensor),
    np.ndarray: ("array", _array),
    np.generic: ("scalar", lambda w, v, p: _array(w, np.asarray(v), p)),
    Inputs: ("inputs", _inputs),
    PackedSequence: ("packed", _packed),
    torch.Size: ("size", lambda _, v, __: {"value": list(v)}),
    tuple: ("tuple", _tuple),
    list: ("list", _items),
    Mapping: ("mapping", _mapping),
    torch.dtype: ("dtype", lambda _, v, __: {"value": dtype_name(v)}),
    torch.device: ("device", _text),
    complex: ("complex", lambda _, v, __: {"value": [repr(v.real), repr(v.imag)]}),
    bytes: ("bytes", lambda _, v, __: {"value": v.hex()}),
    slice: ("slice", lambda w, v, p: _items(w, (v.start, v.stop, v.step), p)),
    # subclasses of these, as enumerations may be, are kept as what they are underneath
    bool: ("plain", lambda _, v, __: {"value": bool(v)}),
    int: ("plain", lambda _, v, __: {"value": int(v)}),
    str: ("plain", lambda _, v, __: {"value": str.__str__(v)}),
    float: ("float", lambda _, v, __: {"value": repr(float(v))}),
}


def packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as a file of safetensors takes them: on the CPU, in order, apart from others.

    Dtypes that it lacks are written as bytes; each stays as it is where nothing has to change.
    """
    seen: set[int] = set()
    made = {}
    for name, tensor in tensors.items():
        plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        if plain.dtype not in _IN_EVERY_RELEASE:
            plain = plain.reshape(-1).view(torch.uint8)
        place = plain.untyped_storage().data_ptr()
        made[name] = plain.clone() if place in seen else plain
        seen.add(place)
    return made


_IN_EVERY_RELEASE = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.bool,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    }
)
"""The dtypes that every release of safetensors writes."""


class Reader:
    """Reads nests again. Nothing that they name is imported or called.

    Args:
        tensors: by name, as they were in the file.
        device: where to put a tensor whose own device is not here.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> None:
        self._tensors = tensors
        self._device = device
        self._made: dict[str, Tensor] = {}

    def read(self, data: Data, path: str) -> Any:
        """Return the value; `NOTHING` where it is not there.

        Raises:
            InspectionError: the data say nothing sound.
        """
        if data is None or isinstance(data, bool | int | float | str):
            return data
        if not isinstance(data, dict):
            raise _damaged(path, f"{data!r:.60} is no value")
        try:
            made = _READERS[data[_IS]](self, data, path)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, InspectionError):
                raise
            raise _damaged(path, f"{type(error).__name__}: {error}") from None
        return made

    def tensor(self, data: dict[str, Any], path: str) -> Tensor:
        """Return a tensor: the same one for the same name."""
        name = data["name"]
        if name not in self._made:
            self._made[name] = self._tensor(data, path)
        return self._made[name]

    def _tensor(self, data: dict[str, Any], path: str) -> Tensor:
        stored, shape = self._stored(data["name"], path), tuple(data["shape"])
        dtype = dtype_of(data["dtype"])
        if stored.dtype != dtype:
            stored = stored.clone().view(dtype)
        if stored.numel() != math.prod(shape):
            raise _damaged(path, f"its shape is {shape}, and the file has {stored.numel()} values")
        stored, stride = stored.reshape(shape), data["stride"]
        if stride is None:
            # the file's own memory may not be aligned, which vectorised sums may depend on
            made = stored.clone(memory_format=torch.contiguous_format)
        elif _is_dense(shape, tuple(stride)):
            made = torch.empty_strided(shape, stride, dtype=dtype).copy_(stored)
        else:
            raise _damaged(path, f"a tensor of shape {shape} cannot have the strides {stride}")
        return made.to(self._where(data["device"])).requires_grad_(data["requires_grad"])

    def _stored(self, name: str, path: str) -> Tensor:
        if name not in self._tensors:
            raise _damaged(path, f"there is no tensor {name!r} in the file")
        return self._tensors[name]

    def _where(self, spelled: str) -> torch.device:
        device = torch.device(spelled)
        if device.type == "cpu" or self._device is None:
            return device
        backend: Any = getattr(torch, device.type, None)
        is_here = backend is not None and backend.is_available()
        # most devices are spelt with their index
        if is_here and (device.index or 0) < backend.device_count():
            return device
        return self._device

    def array(self, data: dict[str, Any], path: str) -> np.ndarray:
        """Return an array of NumPy."""
        if not _ARRAY_DTYPE.fullmatch(data["dtype"]):
            raise _damaged(path, f"no dtype of an array: {data['dtype']!r:.60}")
        dtype = np.dtype(data["dtype"])
        name = data["name"]
        raw = b"" if name is None else self._stored(name, path).numpy().tobytes()
        return np.frombuffer(bytearray(raw), dtype=dtype).reshape(data["shape"])

    def items(self, data: dict[str, Any], path: str) -> Iterator[Any]:
        """Yield what a list holds."""
        for index, item in enumerate(data["items"]):
            yield self.read(item, f"{path}[{index}]")


def dtype_of(spelled: str) -> torch.dtype:
    """Return the dtype of torch that goes by this name, without ``torch.``.

    Raises:
        ValueError: there is none.
    """
    dtype = getattr(torch, spelled, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype of torch: {spelled!r:.60}")
    return dtype


def _damaged(path: str, what: str) -> InspectionError:
    return InspectionError(f"the bundle is damaged: {path}: {what}")


def _read_tuple(reader: Reader, data: dict[str, Any], path: str) -> tuple[Any, ...]:
    values = tuple(reader.items(data, path))
    fields = data.get("fields")
    if fields is None:
        return values
    if len(fields) != len(values) or not all(
        isinstance(f, str) and f.isidentifier() for f in fields
    ):
        raise _damaged(path, f"no fields of a named tuple: {fields!r:.60}")
    # not collections.namedtuple, which runs code that it puts together
    own = {name: property(itemgetter(i)) for i, name in enumerate(fields) if name[:1] != "_"}
    named: type[tuple[Any, ...]] = type("NamedTuple", (tuple,), own | {"_fields": tuple(fields)})
    return named(values)


def _read_mapping(reader: Reader, data: dict[str, Any], path: str) -> dict[Any, Any]:
    made = {}
    for key, value in data["items"]:
        read = reader.read(key, f"{path} key")
        made[read] = reader.read(value, f"{path}[{read!r}]")
    return made


def _read_inputs(reader: Reader, data: dict[str, Any], path: str) -> Inputs:
    args, kwargs = reader.read(data["args"], path), reader.read(data["kwargs"], path)
    return Inputs(*args, **kwargs)


def _read_packed(reader: Reader, data: dict[str, Any], path: str) -> PackedSequence:
    return PackedSequence(*reader.items(data, path))


_READERS: dict[str, Callable[[Reader, dict[str, Any], str], Any]] = {
    "tensor": Reader.tensor,
    "array": Reader.array,
    "scalar": lambda r, d, p: r.array(d, p)[()],
    "inputs": _read_inputs,
    "packed": _read_packed,
    "size": lambda _, d, __: torch.Size(d["value"]),
    "tuple": _read_tuple,
    "list": lambda r, d, p: list(r.items(d, p)),
    "mapping": _read_mapping,
    "dtype": lambda _, d, __: dtype_of(d["value"]),
    "device": lambda _, d, __: torch.device(d["value"]),
    "complex": lambda _, d, __: complex(float(d["value"][0]), float(d["value"][1])),
    "bytes": lambda _, d, __: bytes.fromhex(d["value"]),
    "slice": lambda r, d, p: slice(*r.items(d, p)),
    "plain": lambda _, d, __: d["value"],
    "float": lambda _, d, __: float(d["value"]),
    "missing": lambda *_: NOTHING,
}
