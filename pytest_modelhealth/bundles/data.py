"""A bundle: what an inspection ran on, as one file of data. Nothing in it is executed when read."""

from __future__ import annotations

import copy
import os
import platform
import zipfile
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pytest_modelhealth import __version__
from pytest_modelhealth.capture import Inputs
from pytest_modelhealth.capture.step.guard import access
from pytest_modelhealth.capture.step.state import is_generator
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import named_modules, original_class
from pytest_modelhealth.settings.setting import dotted

_FORMAT = "pytest-modelhealth inspection 6"
"""Its number is raised when a key changes its name or its meaning; a reader refuses others."""

_PLAIN = (type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device)
_SHOWN = 3

Missing = dict[str, str]  # what is not in a bundle: by its path, ``"inputs['graph']"``, its type


def pack(value: Any, path: str, missing: Missing) -> Any:
    """Return a value as what ``torch.load(weights_only=True)`` reads: a copy in plain containers.

    What is no data is `missing`, by the path where it stands.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (Tensor, nn.Parameter):
        if value.layout is torch.strided and not (value.is_nested or value.is_meta):
            data = value.detach()
            if data.untyped_storage().nbytes() > 2 * max(data.nbytes, 1024):
                data = data.clone()  # else the file would hold all that it is a view of
            return data.requires_grad_(value.requires_grad)
    elif issubclass(kind, np.ndarray):
        if value.dtype.kind in "biufc":
            return torch.tensor(value)
    elif issubclass(kind, Inputs | Mapping):
        items = vars(value) if issubclass(kind, Inputs) else value
        if all(type(key) in _PLAIN for key in items):
            return {key: pack(items[key], f"{path}[{key!r}]", missing) for key in items}
    elif issubclass(kind, list | tuple):
        return [pack(one, f"{path}[{index}]", missing) for index, one in enumerate(value)]
    missing[path] = f"{kind.__module__}.{kind.__qualname__}"
    return None


def unpack(data: Any, own: Any, path: str, missing: Missing) -> Any:
    """Return what was packed, in the types of the test's own value; that stands for the missing."""
    if path in missing:
        return own
    if isinstance(data, Tensor):
        if isinstance(own, np.ndarray):
            return data.numpy()
        device = own.device if isinstance(own, Tensor) else data.device
        return data.detach().to(device).requires_grad_(data.requires_grad)
    if isinstance(data, dict):
        kept = vars(own) if isinstance(own, Inputs) else own if isinstance(own, Mapping) else {}
        items = {
            key: unpack(value, kept.get(key), f"{path}[{key!r}]", missing)
            for key, value in data.items()
        }
        if isinstance(own, Inputs):
            return Inputs(*items["args"], **items["kwargs"])
        if not isinstance(own, MutableMapping):
            return items
        mapping = copy.copy(own)
        mapping.clear()
        mapping.update(items)
        return mapping
    if isinstance(data, list):
        parts = list(own) if isinstance(own, list | tuple) else []
        parts += [None] * (len(data) - len(parts))
        values = [
            unpack(value, parts[index], f"{path}[{index}]", missing)
            for index, value in enumerate(data)
        ]
        if not isinstance(own, tuple):
            return values
        return type(own)(*values) if hasattr(own, "_fields") else tuple(values)
    return data


def _held(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Yield parameters, buffers, and tensors and generators in attributes, each with its owner."""
    for named in named_modules(model):
        module = named.module
        owners: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for owner in owners:
            for name, value in list(owner.items()):
                is_kept = isinstance(value, Tensor) or is_generator(type(value))
                if is_kept or (value is None and owner is module._buffers):
                    yield dotted(named.name, name), owner, name, value


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Return every parameter, buffer and tensor in an attribute of a model."""
    return [value for *_, value in _held(model) if isinstance(value, Tensor)]


def _forms(model: nn.Module) -> dict[str, str]:
    """Return what makes a model the same one: layers, and shapes of parameters."""
    forms = {named.name or "the model": "a layer" for named in named_modules(model)}
    for path, _, _, value in _held(model):
        if isinstance(value, nn.Parameter):
            shape = (
                "of no shape yet"
                if isinstance(value, nn.UninitializedParameter)
                else "x".join(map(str, value.shape))
            )
            forms[path] = f"{shape or 'a scalar'} {value.dtype}".replace("torch.", "")
    return forms


def pack_model(model: nn.Module, missing: Missing) -> dict[str, Any]:
    """Return what a model holds, by name, and the modes of its modules."""
    values = {}
    for path, _, _, value in _held(model):
        state = access(value)[0]() if is_generator(type(value)) else value
        values[path] = pack(state, f"model.{path}", missing)
    return {
        "type": original_class(model).__qualname__,
        "forms": _forms(model),
        "training": {named.name: bool(named.module.training) for named in named_modules(model)},
        "values": values,
    }


def unpack_model(data: Mapping[str, Any], model: nn.Module, missing: Missing) -> None:
    """Have a model hold what was packed, in place and behind the back of autograd.

    Raises:
        InspectionError: it is another model; the message says which layers and shapes differ.
    """
    then, here = data["forms"], _forms(model)
    wrong = [
        f"{name!r} was {then.get(name, 'not there')}, is {here.get(name, 'not there')}"
        for name in dict.fromkeys((*then, *here))
        if then.get(name) != here.get(name)
    ]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
        raise InspectionError(
            f"the bundle is of another model, {data['type']}: {'; '.join(wrong[:_SHOWN])}{more}. "
            "Have the test make the model of then"
        )
    for named in named_modules(model):
        named.module.training = data["training"][named.name]
    for path, owner, name, own in list(_held(model)):
        if path not in data["values"] or f"model.{path}" in missing:
            continue
        value = data["values"][path]
        if is_generator(type(own)):
            read, write = access(own)
            write(unpack(value, read(), f"model.{path}", missing))
        elif isinstance(own, Tensor) and isinstance(value, Tensor) and own.shape == value.shape:
            value = value.to(own.device)
            if own.stride() == value.stride():
                own.data.copy_(value.detach())  # which leaves the version of the tensor as it is
            else:
                own.data = value.detach()
            if own.is_leaf:
                own.requires_grad_(value.requires_grad)
        else:
            owner[name] = value  # a buffer that grew, as caches do


def machine() -> str:
    """Return what numbers depend on beside the code: versions, processor, GPU."""
    facts = [f"pytest-modelhealth {__version__}", f"torch {torch.__version__}"]
    facts += [f"Python {platform.python_version()}"]
    facts += [platform.platform(), torch.backends.cpu.get_cpu_capability()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        facts.append(torch.cuda.get_device_name())
    return ", ".join([*facts, f"{torch.get_num_threads()} threads"])


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a bundle.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("wb") as file:  # a full disk is an OSError of Python's then
        torch.save({"format": _FORMAT, **content}, file)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what is in a bundle, tensors on the CPU.

    Raises:
        InspectionError: there is none, it is damaged, of another version, or holds something that
            reading could execute.
    """
    try:
        if not zipfile.is_zipfile(path):  # which torch would read as a pickle alone
            Path(path).open("rb").close()
            raise InspectionError("it is no file of torch.save, or was cut on its way")
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
        form = content.get("format") if isinstance(content, dict) else None
        if form != _FORMAT:
            raise InspectionError(f"its format is {form!r}, and this version reads {_FORMAT!r}")
    except Exception as error:  # noqa: BLE001 - a cut or edited file raises anything
        # torch's own advice, to load it all the same, is none for a file that somebody sent
        why = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
        why = why.partition("\n")[0].partition(" by default. ")[0]
        raise InspectionError(
            f"no bundle can be read at {path}, and nothing of it was executed: {why}"
        ) from None
    return dict(content)
