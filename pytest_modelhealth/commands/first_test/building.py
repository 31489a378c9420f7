"""How a model is made of what the user named: the expression that a person would write."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from torch import nn

from pytest_modelhealth.commands.first_test.small_configs import small_config
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.guessing.guess import broken
from pytest_modelhealth.training.libraries import is_of


@dataclass(frozen=True)
class Built:
    """How a model is made.

    Args:
        name: what it is called, for the name of the test.
        imports: the import lines.
        statements: before the model is made.
        expression: makes the model, or a tuple that begins with it.
    """

    name: str
    imports: tuple[str, ...]
    statements: tuple[str, ...]
    expression: str


def built(thing: Any, spelled: str) -> Built:
    """Return how a model is made of a class, a function or an instance.

    Raises:
        InspectionError: it is none of them, or needs arguments that nothing says.
    """
    module, _, path = spelled.partition(":")
    first = path.partition(".")[0]
    if isinstance(thing, nn.Module):
        alias = "trained_model" if first in _TAKEN else first
        renamed = "" if alias == first else f" as {alias}"
        expression = alias + path[len(first) :]
        return Built(
            type(thing).__name__, (f"from {module} import {first}{renamed}",), (), expression
        )
    if not callable(thing):
        raise InspectionError(
            f"{spelled} is {type(thing).__name__}, not a model: name a torch.nn.Module class, a "
            "function that makes a model, or an instance"
        )
    if isinstance(thing, type) and not issubclass(thing, nn.Module):
        raise InspectionError(
            f"{spelled} is a class, but no torch.nn.Module: name the class of a model, or a "
            "function that makes one"
        )
    imports = (f"from {module} import {first}",)
    if is_of(thing, "transformers") or _config_class(thing) is not None:
        return _from_config(thing, path, module)
    arguments = _arguments(thing, spelled)
    added = tuple(line for one in arguments for line in one.imports)
    name = path.rpartition(".")[2]
    return Built(name, imports + added, (), f"{path}({', '.join(a.text for a in arguments)})")


_TAKEN = ("model", "inputs", "target", "loss", "torch", "F", "nn", "config")


def _config_class(thing: Any) -> Any:
    """Return the class of configs of a model of transformers, or ``None``."""
    config = getattr(thing, "config_class", None)
    return config if isinstance(thing, type) and isinstance(config, type) else None


def _from_config(thing: Any, path: str, module: str) -> Built:
    """Return how a model of transformers is made: of a small config."""
    kind = _config_class(thing)
    changed = small_config(thing, kind)
    arguments = [f"{name}={_spelled(value)}" for name, value in changed.items()]
    first = path.partition(".")[0]
    if module.partition(".")[0] == "transformers":
        imports: tuple[str, ...] = (f"from transformers import {kind.__name__}, {first}",)
    else:
        imports = (
            f"from {module} import {first}",
            f"from {kind.__module__} import {kind.__name__}",
        )
    statement = broken(f"config = {kind.__name__}(", arguments, ")")
    return Built(path.rpartition(".")[2], imports, (statement,), f"{path}(config)")


def _spelled(value: Any) -> str:
    """Return a size, a list of sizes or a mapping of them as Python has it."""
    if isinstance(value, dict):
        return broken("{", [f'"{name}": {one!r}' for name, one in value.items()], "}", width=40)
    return repr(value)


@dataclass(frozen=True)
class _Argument:
    text: str
    imports: tuple[str, ...] = ()


_SIZES: tuple[tuple[re.Pattern[str], object], ...] = (
    (re.compile(r"(n|num)?_?(classes|labels)|.*out(put)?(_.*)?|.*_out"), 4),
    (re.compile(r".*channels?"), 3),
    (re.compile(r".*(vocab|num_embeddings|num_tokens|n_tokens|num_words).*"), 100),
    (re.compile(r".*(heads?|nhead)"), 4),
    (re.compile(r".*(layers?|depth|blocks?)"), 2),
    (re.compile(r".*(kernel).*"), 3),
    (re.compile(r".*(image|img).*"), 32),
    (re.compile(r".*(max_len|length|context|block_size|seq).*"), 16),
    (re.compile(r".*(hidden|dim|width|model|embed|embd|size|units).*"), 32),
    (re.compile(r".*(in(put)?s?|features?)(_.*)?"), 16),
)
_INPUT = re.compile(r"(in|input|n|num)_?(dim|size|features?|width|feats)|d_in")


def _arguments(thing: Callable[..., Any], spelled: str) -> list[_Argument]:
    """Return what a class or function needs to be called.

    Raises:
        InspectionError: nothing says what some are; the message has the factory to write.
    """
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p for p in parameters if p.default is p.empty and p.kind not in several]
    hints = _hints(thing)
    found = {p.name: _argument(p, hints.get(p.name, p.annotation)) for p in needed}
    unknown = [name for name, one in found.items() if one is None]
    if unknown:
        name = spelled.rpartition(":")[2]
        raise InspectionError(
            f"{spelled} needs {', '.join(unknown)}, and nothing says what to give. Write a "
            "function without arguments, and name that one:\n"
            f"    def make_model():\n        return {name}({', '.join(f'{n}=...' for n in found)})"
        )
    return [one for one in found.values() if one is not None]


def _hints(thing: Any) -> dict[str, Any]:
    try:
        return get_type_hints(
            vars(thing).get("__init__", thing) if isinstance(thing, type) else thing
        )
    except Exception:  # noqa: BLE001 - annotations of the user's may name anything
        return {}


def _argument(parameter: inspect.Parameter, kind: Any) -> _Argument | None:
    name, keyword = parameter.name, f"{parameter.name}="
    if parameter.kind is parameter.POSITIONAL_ONLY:
        keyword = ""
    if isinstance(kind, type) and _has_defaults(kind):
        where = f"from {kind.__module__} import {kind.__qualname__.partition('.')[0]}"
        return _Argument(f"{'' if name == 'config' else keyword}{kind.__qualname__}()", (where,))
    if kind is bool:
        return _Argument(f"{keyword}False")
    if kind is float or re.search(r"drop|prob|rate", name):
        return _Argument(f"{keyword}0.1")
    if kind not in (int, parameter.empty):
        return None
    if _INPUT.fullmatch(name):
        return _Argument(f"{keyword}16")
    size = next((value for pattern, value in _SIZES if pattern.fullmatch(name)), None)
    return None if size is None else _Argument(f"{keyword}{size}")


def _has_defaults(kind: type) -> bool:
    """Whether a class of settings can be made without any argument."""
    if is_dataclass(kind):
        return all(
            f.default is not MISSING or f.default_factory is not MISSING for f in fields(kind)
        )
    if kind.__module__ == "builtins" or issubclass(kind, nn.Module):
        return False
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return False
    return "config" in kind.__name__.lower() and all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters
    )
