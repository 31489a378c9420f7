"""Values as `torch.load(weights_only=True)` reads them again, which executes nothing of a file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pytest_modelhealth.capture import Inputs
from pytest_modelhealth.settings import LayerLimit, Limit, SeverityRule
from pytest_modelhealth.settings.setting import Waiver

_DEEPEST = 50
_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device}
_ARRAYS = "biufcSUmM"
"""The kinds of NumPy's dtypes that hold no objects."""


@dataclass(frozen=True)
class Missing:
    """Something that is not in a bundle; it stands in the place of what it is.

    Args:
        path: where it stood: ``"inputs[0]"``, ``"model.encoder"``.
        type: its type.
        reason: why it is not there, a phrase.
    """

    path: str
    type: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({self.type}): {self.reason}"


@dataclass(frozen=True)
class Named:
    """A named tuple, of which reading makes a class with the same fields."""

    fields: tuple[str, ...]
    values: tuple[Any, ...]


class Packer:
    """Returns values as data, and collects what could not be kept.

    Attributes:
        missing: what could not be kept.
    """

    def __init__(self) -> None:
        self.missing: list[Missing] = []
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}  # by id, of which one lives on
        self._open: list[int] = []

    def pack(self, value: Any, path: str) -> Any:
        """Return a value as data, a `Missing` for what is none; `path` says where it stands."""
        if type(value) in _PLAIN:
            return value
        packed = next((pack for kind, pack in _KINDS if issubclass(type(value), kind)), None)
        if packed is None:
            return self.lack(
                value,
                path,
                "nothing that data can hold: tensors, arrays, numbers, "
                "strings, lists, tuples and mappings",
            )
        if id(value) in self._open or len(self._open) > _DEEPEST:
            return self.lack(value, path, "it holds itself, or is nested too deep")
        self._open.append(id(value))
        try:
            return packed(self, value, path)
        finally:
            self._open.pop()

    def lack(self, value: Any, path: str, reason: str) -> Missing:
        """Take down that a value is not kept, and return what stands for it."""
        self.missing.append(Missing(path, qualified_name(type(value)), reason))
        return self.missing[-1]

    def tensor(self, tensor: Tensor, path: str) -> Any:
        """Return a tensor without its graph: one, however often it stands in what is packed."""
        if type(tensor) not in (Tensor, nn.Parameter):
            return self.lack(tensor, path, "a tensor of a class of its own")
        if tensor.is_nested or tensor.layout is not torch.strided:
            return self.lack(tensor, path, "its layout is none of rows and columns")
        if tensor.device.type == "meta":
            return self.lack(tensor, path, "it has no values (meta)")
        if id(tensor) not in self._tensors:
            kept = tensor.detach()
            if kept.untyped_storage().nbytes() > 2 * max(kept.nbytes, 1024):
                kept = kept.clone()  # else the file would hold all that it is a view of
            self._tensors[id(tensor)] = tensor, kept.requires_grad_(tensor.requires_grad)
        return self._tensors[id(tensor)][1]

    def array(self, array: Any, path: str) -> Any:
        """Return an array or a scalar of NumPy."""
        if array.dtype.kind in _ARRAYS and type(array) in (np.ndarray, array.dtype.type):
            return array
        return self.lack(array, path, f"an array of {array.dtype}")

    def items(self, values: Iterable[Any], path: str) -> list[Any]:
        """Return each of several values as data."""
        return [self.pack(value, f"{path}[{index}]") for index, value in enumerate(values)]

    def tuple(self, values: Any, path: str) -> Any:
        """Return a tuple; a named one keeps its fields."""
        items = tuple(self.items(tuple.__iter__(values), path))
        if isinstance(values, PackedSequence):
            return PackedSequence(*items)
        fields = getattr(type(values), "_fields", None)
        return items if fields is None else Named(tuple(fields), items)

    def mapping(self, values: Any, path: str) -> dict[Any, Any]:
        """Return a mapping of any class as a dictionary."""
        return {
            self.pack(key, f"{path} key"): self.pack(value, f"{path}[{key!r}]")
            for key, value in values.items()
        }

    def inputs(self, values: Inputs, path: str) -> Inputs:
        """Return the arguments of a call."""
        return Inputs(*self.items(values.args, path), **self.mapping(values.kwargs, path))

    def loss(self, loss: Any, path: str = "loss") -> Any:
        """Return a loss of torch's as it is; a function of the user's as its name, a string."""
        if loss is None or _is_of_torch(loss):
            return loss
        if isinstance(loss, Mapping):
            return {str(n): self.loss(task, f"{path}[{n!r}]") for n, task in loss.items()}
        if type(loss) is partial:
            function = self.loss(loss.func, path)
            args, keywords = self.pack((loss.args, loss.keywords), f"{path} arguments")
            return function if isinstance(function, str) else partial(function, *args, **keywords)
        function = described(loss)
        self.lack(loss, path, f"a function is no data: {function}")
        return function


_KINDS: tuple[tuple[Any, Callable[[Packer, Any, str], Any]], ...] = (
    (Tensor, Packer.tensor),
    (np.ndarray | np.generic, Packer.array),
    (Inputs, Packer.inputs),
    (tuple, Packer.tuple),
    (list, Packer.items),
    (Mapping, Packer.mapping),
    (slice, lambda packer, one, path: slice(*packer.items((one.start, one.stop, one.step), path))),
    # subclasses of these, as enumerations may be, are kept as what they are underneath
    (int, lambda _, value, __: int(value)),
    (str, lambda _, value, __: str.__str__(value)),
    (float, lambda _, value, __: float(value)),
)

_FUNCTIONS = [
    function
    for name, function in vars(F).items()
    if name[:1] != "_" and type(function) is FunctionType and function.__module__ == F.__name__
]
_LOSSES = [
    kind
    for kind in vars(nn.modules.loss).values()
    if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__name__.endswith("Loss")
]


def _is_of_torch(loss: Any) -> bool:
    """Whether a loss is torch's and as torch made it: no method or hook was put on it."""
    if type(loss) is FunctionType:
        return loss in _FUNCTIONS
    if type(loss) not in _LOSSES:
        return False
    hooks = (loss._forward_hooks, loss._forward_pre_hooks, loss._backward_hooks)
    return "forward" not in vars(loss) and not any(hooks) and not loss._modules


def allowed() -> list[Any]:
    """Return what a bundle may name beside what torch allows: data classes, and torch's losses."""
    plain = (np.empty(1), np.float32(1))
    rebuilders = [value.__reduce__()[0] for value in plain]  # whose module NumPy 2 renamed
    dtypes = {type(np.dtype(code)) for code in (*np.typecodes["All"], "S1", "U1", "m8", "M8")}
    return [
        *(Missing, Named, Inputs, PackedSequence, Limit, LayerLimit, SeverityRule, Waiver),
        *(slice, bytes, partial, np.ndarray, np.dtype, *dtypes, *rebuilders),
        *_FUNCTIONS,
        *_LOSSES,
    ]


def unpack(value: Any) -> Any:
    """Return data that was read as what it was: named tuples have their fields again."""
    if isinstance(value, Named):
        # not collections.namedtuple, which runs code that it puts together
        own = {name: property(itemgetter(i)) for i, name in enumerate(value.fields)}
        made: type[tuple[Any, ...]] = type("NamedTuple", (tuple,), own | {"_fields": value.fields})
        return made(map(unpack, value.values))
    if isinstance(value, Inputs):
        return Inputs(*map(unpack, value.args), **unpack(value.kwargs))
    if type(value) in (list, tuple):
        return type(value)(map(unpack, value))
    return {k: unpack(v) for k, v in value.items()} if type(value) is dict else value


def qualified_name(named: Any) -> str:
    """Return a class or function as ``"package.module.Name"``."""
    return f"{named.__module__}.{named.__qualname__}"


def described(function: Any) -> str:
    """Return the name of a function, or of an object's class, and where it is defined."""
    name = qualified_name(function if hasattr(function, "__qualname__") else type(function))
    code = getattr(inspect.unwrap(function), "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"
