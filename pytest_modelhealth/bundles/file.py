"""Writes a bundle, and reads it: a folder with data. Nothing of what is in it is executed."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pytest_modelhealth.capture import Inputs
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.settings import LayerLimit, Limit, SeverityRule
from pytest_modelhealth.settings.setting import Waiver

FORMAT = "pytest-modelhealth inspection"
FORMAT_VERSION = 5
"""Raised when a key changes its name or its meaning; a reader refuses others."""

CONTENT, FAILURE = "inspection.pt", "failure.txt"
"""The files of a bundle: all that a replay needs, and the text of the failure."""

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


def named_tuple(fields: tuple[str, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a named tuple; reading a bundle calls this, as the class is the user's own."""
    # not collections.namedtuple, which runs code that it puts together
    own = {name: property(itemgetter(i)) for i, name in enumerate(fields)}
    made: type[tuple[Any, ...]] = type("NamedTuple", (tuple,), own | {"_fields": fields})
    return made(values)


@dataclass(frozen=True)
class Named:
    """A named tuple that is written as a call of `named_tuple`."""

    fields: tuple[str, ...]
    values: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return named_tuple, (self.fields, self.values)


class Packer:
    """Returns values as data that `torch.load(weights_only=True)` reads.

    Attributes:
        missing: what could not be kept.
    """

    def __init__(self) -> None:
        self.missing: list[Missing] = []
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}  # by id, of which one lives on
        self._open: list[int] = []

    def lack(self, value: Any, path: str, reason: str) -> Missing:
        """Take down that a value is not kept, and return what stands for it."""
        self.missing.append(Missing(path, qualified_name(type(value)), reason))
        return self.missing[-1]

    def pack(self, value: Any, path: str) -> Any:
        """Return a value as data, a `Missing` for what is none; `path` says where it stands."""
        if type(value) in _PLAIN:
            return value
        if id(value) in self._open or len(self._open) > _DEEPEST:
            return self.lack(value, path, "it holds itself, or is nested too deep")
        self._open.append(id(value))
        try:
            return self._packed(value, path)
        finally:
            self._open.pop()

    def _packed(self, value: Any, path: str) -> Any:
        if type(value) in (Tensor, nn.Parameter):
            if value.layout is torch.strided and not (value.is_nested or value.is_meta):
                return self._tensor(value)
        elif isinstance(value, np.ndarray | np.generic):
            if value.dtype.kind in _ARRAYS and type(value) in (np.ndarray, value.dtype.type):
                return value
        elif isinstance(value, Inputs):
            return Inputs(*self._items(value.args, path), **self._mapping(value.kwargs, path))
        elif isinstance(value, tuple):
            return self._tuple(value, path)
        for kind, pack in _KINDS:
            if isinstance(value, kind):
                return pack(self, value, path)
        reason = "no plain tensor, array, number, string, list, tuple or mapping"
        return self.lack(value, path, reason)

    def _tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor without its graph: one, however often it stands in what is packed."""
        if id(tensor) not in self._tensors:
            kept = tensor.detach()
            if kept.untyped_storage().nbytes() > 2 * max(kept.nbytes, 1024):
                kept = kept.clone()  # else the file would hold all that it is a view of
            self._tensors[id(tensor)] = tensor, kept.requires_grad_(tensor.requires_grad)
        return self._tensors[id(tensor)][1]

    def _items(self, values: Iterable[Any], path: str) -> list[Any]:
        return [self.pack(value, f"{path}[{index}]") for index, value in enumerate(values)]

    def _tuple(self, values: Any, path: str) -> Any:
        items = tuple(self._items(tuple.__iter__(values), path))
        if isinstance(values, PackedSequence):
            return PackedSequence(*items)
        fields = getattr(type(values), "_fields", None)
        return items if fields is None else Named(tuple(fields), items)

    def _mapping(self, values: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        return {
            self.pack(key, f"{path} key"): self.pack(value, f"{path}[{key!r}]")
            for key, value in values.items()
        }

    def loss(self, loss: Any) -> Any:
        """Return a loss of torch's as it is; a function of the user's as its name, a string."""
        if isinstance(loss, Mapping):
            return {str(name): self.loss(task) for name, task in loss.items()}
        if type(loss) is partial and isinstance(loss.func, FunctionType) and is_torchs(loss.func):
            args, keywords = self.pack((loss.args, loss.keywords), "loss arguments")
            return partial(loss.func, *args, **keywords)
        if loss is None or is_torchs(loss):
            return loss
        return described(loss.func if type(loss) is partial else loss)


_KINDS: tuple[tuple[type[Any], Callable[[Packer, Any, str], Any]], ...] = (
    (list, Packer._items),
    (Mapping, Packer._mapping),
    (slice, lambda packer, one, at: slice(*packer._items((one.start, one.stop, one.step), at))),
    # of subclasses of these, as enumerations may be, what they are underneath
    (str, lambda _, value, __: str.__str__(value)),
    (int, lambda _, value, __: int(value)),
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


def is_torchs(loss: Any) -> bool:
    """Whether a loss is torch's and as torch made it: no method or hook was put on it."""
    if type(loss) not in _LOSSES:
        return type(loss) is FunctionType and loss in _FUNCTIONS
    hooks = (loss._forward_hooks, loss._forward_pre_hooks, loss._backward_hooks)
    return "forward" not in vars(loss) and not any(hooks) and not loss._modules


def allowed() -> list[Any]:
    """Return what a bundle may name beside what torch allows: data classes, and torch's losses."""
    plain = (np.empty(1), np.float32(1))
    rebuilders = [value.__reduce__()[0] for value in plain]  # whose module NumPy 2 renamed
    dtypes = {type(np.dtype(code)) for code in (*np.typecodes["All"], "S1", "U1", "m8", "M8")}
    return [
        *(Missing, named_tuple, Inputs, PackedSequence, Limit, LayerLimit, SeverityRule, Waiver),
        *(slice, bytes, partial, np.ndarray, np.dtype, *dtypes, *rebuilders),
        *_FUNCTIONS,
        *_LOSSES,
    ]


def qualified_name(named: Any) -> str:
    """Return a class or function as ``"package.module.Name"``."""
    return f"{named.__module__}.{named.__qualname__}"


def described(function: Any) -> str:
    """Return the name of a function, or of an object's class, and where it is defined."""
    name = qualified_name(function if hasattr(function, "__qualname__") else type(function))
    code = getattr(inspect.unwrap(function), "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


class Saved(NamedTuple):
    """What a bundle on disk has.

    Args:
        folder: where it is.
        missing: what is not there, and why.
        bytes: how large it is.
        left_out: parts that were left out, each with the reason.
    """

    folder: Path
    missing: list[Missing]
    bytes: int
    left_out: dict[str, str]


def write(
    folder: Path, content: dict[str, Any], report: HealthReport, left_out: dict[str, str]
) -> Saved:
    """Write a bundle into a folder that is made for it.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "report": json.loads(report.render("json")),
    } | content
    try:
        folder.mkdir(parents=True)
        (folder / FAILURE).write_text(report.render("failure") + "\n", encoding="utf-8")
        with (folder / CONTENT).open("wb") as file:  # a full disk is an OSError of Python's then
            torch.save(content, file)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    written = sum(path.stat().st_size for path in folder.iterdir())
    return Saved(folder, content["missing"], written, left_out)


@dataclass(frozen=True)
class Bundle:
    """A bundle that was read.

    Args:
        path: its folder.
        content: all of it, as `write` wrote it; ``report`` is the one of then, as
            `HealthReport.to_dict`.
    """

    path: Path
    content: Mapping[str, Any]

    def lacks(self, part: str) -> Missing | None:
        """Return the first thing under this path that is not there, if one is."""
        return next((m for m in self.content["missing"] if m.path.startswith(part)), None)


def read(path: str | os.PathLike[str]) -> Bundle:
    """Read a bundle. Tensors of a device that is not here come to the CPU.

    Args:
        path: its folder, or the `CONTENT` in it.

    Raises:
        InspectionError: there is none, it is damaged, of another version, or holds something that
            reading could execute.
    """
    if not isinstance(path, str | os.PathLike):
        raise InspectionError(
            f"replay takes the path of a bundle, such as 'health/test_x-1a2b3c4d', not {path!r}"
        )
    folder = Path(path)
    folder = folder.parent if folder.name == CONTENT else folder
    file = folder / CONTENT
    if not folder.is_dir():
        raise InspectionError(f"no bundle can be read at {folder}: there is no such folder")
    if file.is_symlink():
        raise InspectionError(f"{file} is a link, and a bundle holds its own files")
    if not file.is_file():
        raise InspectionError(f"{folder} is no whole bundle: {CONTENT} is missing")
    content = _loaded(file)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InspectionError(f"{file} is no bundle: its format is not {FORMAT!r}")
    if (version := content.get("format_version")) != FORMAT_VERSION:
        raise InspectionError(
            f"{folder} is a bundle of format {version}, and this pytest-modelhealth reads "
            f"format {FORMAT_VERSION}: read it with the version that wrote it"
        )
    if not isinstance(content.get("batches"), list):
        raise _damaged(file, "it has no batches")
    return Bundle(folder, content)


def _loaded(path: Path) -> Any:
    if not zipfile.is_zipfile(path):  # which torch would read as a pickle alone
        raise _damaged(path, "it is no archive that torch.save made")
    try:
        with torch.serialization.safe_globals(allowed()):
            place = None if torch.cuda.is_available() else "cpu"
            return torch.load(path, map_location=place, weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's own advice, to load it all the same, is none for a file that somebody sent
        reason = str(error).partition("WeightsUnpickler error: ")[2].partition(" by default. ")[0]
        raise InspectionError(
            f"{path} is no bundle that this pytest-modelhealth reads, and nothing of it was "
            f"executed: {reason}. Make it again where the test failed"
        ) from None
    except Exception as error:  # noqa: BLE001 - a cut or edited file raises anything
        raise _damaged(path, str(error).partition("\n")[0]) from None


def _damaged(path: Path, what: str) -> InspectionError:
    return InspectionError(f"{path} is damaged: {what}; copy the bundle again")
