"""What a bundle holds, as frozen data: an inspection, its model's state and its surroundings."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pytest_modelhealth.errors import InspectionError

FORMAT = "pytest-modelhealth inspection"
FORMAT_VERSION = 1
"""Raised when a key changes its name or its meaning; a reader refuses later ones."""

CONTENT = "inspection.json"
TENSORS = "tensors.safetensors"
REPORT = "report.json"
FAILURE = "failure.txt"
FILES = (TENSORS, REPORT, FAILURE, CONTENT)
"""The files of a bundle; the one without which it is none is written last."""

Data = Any
"""A value as `nest` writes it: numbers, strings, lists and dictionaries of them."""


@dataclass(frozen=True)
class Test:
    """The test that made the inspection.

    Args:
        id: pytest's node id.
        number: which of the inspections of this test it was, counted from 1.
        place: ``path:line`` of the call.
    """

    id: str
    number: int
    place: str


@dataclass(frozen=True)
class HeldTensor:
    """A parameter, a buffer or a tensor in an attribute of the model.

    Args:
        layer: the module that holds it, as `named_modules` spells it.
        name: its own name there.
        shape: its shape.
        dtype: its dtype, without ``torch.``.
        value: the tensor, or ``None`` where it was left out or could not be kept.
        requires_grad: whether it collects a gradient.
        tied: further full names of the same tensor.
    """

    layer: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    value: Data = None
    requires_grad: bool = False
    tied: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """Its name from the model on."""
        return f"{self.layer}.{self.name}" if self.layer else self.name


@dataclass(frozen=True)
class Model:
    """What a model held.

    Args:
        kind: module and qualified name of its class.
        parameters: each once, a tied one at the first layer that owns it.
        buffers: those that are in no state_dict too.
        attributes: tensors kept in plain attributes of modules.
        generators: the state of random generators kept in plain attributes, by full name.
        training: whether each module was in training mode.
    """

    kind: str
    parameters: tuple[HeldTensor, ...] = ()
    buffers: tuple[HeldTensor, ...] = ()
    attributes: tuple[HeldTensor, ...] = ()
    generators: Mapping[str, Data] = field(default_factory=dict)
    training: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """One batch and the state of all random generators before it ran."""

    inputs: Data
    target: Data
    random: Data


@dataclass(frozen=True)
class Function:
    """A function of the user's, which cannot be data.

    Args:
        name: its module and qualified name.
        place: ``path:line`` where it is defined, ``""`` where unknown.
    """

    name: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.place})" if self.place else self.name


@dataclass(frozen=True)
class WatchRule:
    """One call of `watch`: a pattern, or the text and flags of a regular expression."""

    pattern: str
    flags: int | None
    roles: tuple[str, ...]
    types: tuple[str, ...] | None


@dataclass(frozen=True)
class SettingLimit:
    """A setting that was not at its default, and who set it."""

    name: str
    value: Data
    origin: str


@dataclass(frozen=True)
class KeptWaiver:
    """A violation that was accepted, as `Waiver` has it."""

    layers: str
    check: str | None
    reason: str
    origin: str
    shared: bool


@dataclass(frozen=True)
class Missing:
    """Something that is not in the bundle.

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
class Autocast:
    """Whether autocast was on for a kind of device, and to which dtype."""

    device: str
    enabled: bool
    dtype: str


@dataclass(frozen=True)
class Surroundings:
    """The switches of torch that numbers depend on."""

    default_dtype: str
    threads: int
    deterministic: bool
    warn_only: bool
    matmul_precision: str
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    grad_enabled: bool
    autocast: tuple[Autocast, ...]


@dataclass(frozen=True)
class Content:
    """All of a bundle but its tensors and its report.

    Args:
        created: when it was saved, ISO 8601, UTC.
        versions: of this package, torch and others, and what machine it was.
        test: the test that made it; ``None`` outside of tests.
        model: what the model held.
        of: ``"batch"`` for `run_inspection`, ``"batches"`` for `run_batches`.
        batches: what was run, in order.
        loss: as `functions` writes it; ``None`` where none was given.
        backward: ``None``, a truth value, or the user's function.
        scaler: the device and state of a gradient scaler; ``None`` without one.
        batch_dim, causal, padding: as in `run_inspection`.
        compiled: as in `Inspector`.
        watch: calls of `watch`.
        settings: those that were not at their default, the probes of the call among them.
        waivers: violations that were accepted.
        own_checks: the classes of a project's own checks.
        surroundings: switches of torch.
        missing: what is not there, and why.
        training: as in `run_batches`.
    """

    created: str
    versions: Mapping[str, str]
    test: Test | None
    model: Model
    of: str
    batches: tuple[Batch, ...]
    loss: Data
    backward: bool | Function | None
    scaler: Data
    batch_dim: int | None
    causal: bool | None
    padding: Data
    compiled: str
    watch: tuple[WatchRule, ...]
    settings: tuple[SettingLimit, ...]
    waivers: tuple[KeptWaiver, ...]
    own_checks: tuple[str, ...]
    surroundings: Surroundings
    missing: tuple[Missing, ...] = ()
    training: bool | None = None

    @property
    def missing_values(self) -> list[Missing]:
        """What is not there and no test or argument gives again, as it does loss and backward."""
        return [m for m in self.missing if not m.path.startswith(("loss", "backward"))]

    def lacks(self, part: str) -> Missing | None:
        """Return the first thing under this path that is not there, if one is."""
        return next((m for m in self.missing if m.path.startswith(part)), None)


def from_plain(kind: type[Any], data: object, path: str = "") -> Any:
    """Return what `data`, read from JSON, says, as an object of the data class `kind`.

    Keys that the data class lacks are passed over: a later bundle of the same format may have more.

    Raises:
        InspectionError: a key is missing or of a wrong type; the message has its path.
    """
    if not isinstance(data, dict):
        raise _wrong(path, "an object", data)
    hints = _hints(typing.cast("typing.Hashable", kind))
    values = {}
    for declared in dataclasses.fields(kind):
        where = f"{path}.{declared.name}".lstrip(".")
        if declared.name in data:
            values[declared.name] = _value(hints[declared.name], data[declared.name], where)
        elif _has_no_default(declared):
            raise InspectionError(f"{CONTENT}: {where} is missing")
    return kind(**values)


def _has_no_default(declared: dataclasses.Field[Any]) -> bool:
    nothing = dataclasses.MISSING
    return declared.default is nothing and declared.default_factory is nothing


@cache
def _hints(kind: typing.Hashable) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _value(hint: Any, data: Any, path: str) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return data
    if origin is types.UnionType:
        return _one_of(inner, data, path)
    if origin is tuple:
        if not isinstance(data, list):
            raise _wrong(path, "a list", data)
        return tuple(_value(inner[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    if origin is Mapping:
        if not isinstance(data, dict):
            raise _wrong(path, "an object", data)
        return {key: _value(inner[1], item, f"{path}[{key!r}]") for key, item in data.items()}
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast("type[Any]", hint), data, path)
    if type(data) is not hint:
        raise _wrong(path, _WORDS[hint], data)
    return data


def _one_of(kinds: tuple[Any, ...], data: Any, path: str) -> Any:
    """Return `data` as the one of several kinds that it is; of data classes there is one."""
    if data is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    exact = [kind for kind in kinds if type(data) is kind]
    return _value((exact or kinds[-1:])[0], data, path)


_WORDS = {str: "a string", int: "a whole number", bool: "true or false"}


def _wrong(path: str, expected: str, data: object) -> InspectionError:
    found = repr(data)
    found = found if len(found) <= 60 else found[:58] + ".."
    return InspectionError(f"{CONTENT}: {path or 'the whole'} must be {expected}, not {found}")
