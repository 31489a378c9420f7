"""Losses as data: functions of torch by their name, its loss modules by class and arguments.

Any other function is the user's: a bundle says its name and where it is defined, and who replays
it gives it again.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import nn

from pytest_modelhealth.bundles.content import Data, Function
from pytest_modelhealth.bundles.nest import NOTHING, Reader, Writer, qualified_name
from pytest_modelhealth.errors import InspectionError

_DEPRECATED = ("size_average", "reduce")


def described(function: Any) -> Function:
    """Return the name of a function, or of an object's class, and where it is defined."""
    named = function if hasattr(function, "__qualname__") else type(function)
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
    return Function(qualified_name(named), place)


def write(loss: Any, writer: Writer, path: str = "loss") -> Data:
    """Return a loss as data; one of the user's own is taken down as missing."""
    if loss is None:
        return None
    if isinstance(loss, Mapping):
        tasks = [[str(n), write(f, writer, f"{path}[{n!r}]")] for n, f in loss.items()]
        return {"is": "tasks", "tasks": tasks}
    if type(loss) is FunctionType and _functional(loss.__name__) is loss:
        return {"is": "functional", "name": loss.__name__}
    if type(loss) is partial:
        return {
            "is": "partial",
            "function": write(loss.func, writer, path),
            "args": writer.write(list(loss.args), f"{path}.args"),
            "keywords": writer.write(loss.keywords, f"{path}.keywords"),
        }
    if _loss_class(type(loss).__name__) is type(loss) and _is_as_made(loss):
        return {
            "is": "module",
            "name": type(loss).__name__,
            "arguments": writer.write(_arguments(loss), f"{path}.arguments"),
        }
    function = described(loss)
    writer.lack(loss, path, f"a function is no data: {function}")
    return {"is": "own", "name": function.name, "place": function.place}


def _functional(name: object) -> Any:
    """Return the function that is defined in `torch.nn.functional` under this public name."""
    found = vars(F).get(name) if isinstance(name, str) and name[:1] != "_" else None
    is_own = type(found) is FunctionType and found.__module__ == F.__name__
    return found if is_own else None


def _loss_class(name: object) -> type[nn.Module] | None:
    """Return the class of this name among the loss modules of torch."""
    if not isinstance(name, str) or name[:1] == "_":
        return None
    found: Any = vars(nn.modules.loss).get(name)
    is_own = isinstance(found, type) and found.__module__ == nn.modules.loss.__name__
    return found if is_own and issubclass(found, nn.Module) else None


def _is_as_made(loss: nn.Module) -> bool:
    """Whether a loss module computes what its class does: no method or hook was put on it."""
    hooks = (loss._forward_hooks, loss._forward_pre_hooks, loss._backward_hooks)
    return "forward" not in vars(loss) and not any(hooks) and not loss._modules


def _arguments(loss: nn.Module) -> dict[str, Any]:
    names = inspect.signature(type(loss)).parameters
    return {
        name: getattr(loss, name)
        for name in names
        if name not in _DEPRECATED and hasattr(loss, name)
    }


def own_function(data: Data) -> Function | None:
    """Return the first function of the user's that a written loss holds, if it holds one."""
    if not isinstance(data, dict):
        return None
    if data.get("is") == "own":
        return Function(str(data.get("name")), str(data.get("place")))
    inside = [data.get("function"), *(task for _, task in data.get("tasks", ()))]
    return next((found for part in inside if (found := own_function(part))), None)


def read(data: Data, reader: Reader) -> Any:
    """Return a loss that was written, and is none of the user's own.

    Raises:
        InspectionError: it names no loss of torch.
    """
    if data is None:
        return None
    try:
        return _MADE[data["is"]](data, reader)
    except (KeyError, TypeError, ValueError) as error:
        raise InspectionError(
            f"the bundle is damaged: its loss says nothing sound ({type(error).__name__}: {error})"
        ) from None


def _made_function(data: dict[str, Any], _: Reader) -> Any:
    found = _functional(data["name"])
    if found is None:
        raise ValueError(f"torch.nn.functional has no {data['name']!r:.60}")
    return found


def _made_module(data: dict[str, Any], reader: Reader) -> Any:
    kind = _loss_class(data["name"])
    if kind is None:
        raise ValueError(f"torch has no loss {data['name']!r:.60}")
    return kind(**_kept(data["arguments"], reader))


def _made_partial(data: dict[str, Any], reader: Reader) -> Any:
    function = read(data["function"], reader)
    return partial(function, *_kept(data["args"], reader), **_kept(data["keywords"], reader))


def _kept(data: Data, reader: Reader) -> Any:
    value = reader.read(data, "loss")
    parts = value.values() if isinstance(value, dict) else value
    if any(part is NOTHING for part in parts):
        raise ValueError("an argument could not be kept; give loss=")
    return value


_MADE: dict[str, Any] = {
    "functional": _made_function,
    "module": _made_module,
    "partial": _made_partial,
    "tasks": lambda data, reader: {name: read(task, reader) for name, task in data["tasks"]},
}
