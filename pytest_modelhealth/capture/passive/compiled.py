"""Tells what of a model is compiled: hooks placed there would not run, or break its graph."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pytest_modelhealth.capture.eager import is_compiled
from pytest_modelhealth.layers import is_wrapper, unwrapped

WHY_OPAQUE = (
    "it runs as compiled code, where no hook is called; its parameters, their gradients and "
    "updates are seen all the same"
)


@dataclass
class Compiled:
    """What of a model is compiled.

    Attributes:
        inside: modules that run as compiled code.
        wrappers: those that `torch.compile` put around others, each with the module in it, whose
            inputs and outputs show at the wrapper.
    """

    inside: set[nn.Module] = field(default_factory=set)
    wrappers: dict[nn.Module, nn.Module] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Compiled:
        """Return what of `model` is compiled now."""
        found = cls()
        for module in model.modules():
            if is_compiled(module):
                found._add(module)
        return found

    def _add(self, module: nn.Module) -> None:
        inside = unwrapped(module)
        if is_wrapper(module) and module not in self.inside:
            self.wrappers[module] = inside
        self.inside.update(inside.modules())

    @property
    def hidden(self) -> set[nn.Module]:
        """Modules of which nothing shows: those inside, but for what wrappers show."""
        return self.inside.difference(self.wrappers.values())


def has_compiled_functions(model: nn.Module) -> bool:
    """Whether compiled functions are near, which a function mode would have compiled anew."""
    return any(map(_is_compiled_function, _near(model)))


def _is_compiled_function(value: Any) -> bool:
    """Whether `torch.compile` made this function."""
    return "_torchdynamo_orig_callable" in getattr(value, "__dict__", ())


def _near(model: nn.Module) -> Iterator[Any]:
    """Yield what modules keep in attributes, classes and beside their code, functions among it."""
    classes: set[type] = set()
    homes: dict[int, dict[str, Any]] = {}
    for module in model.modules():
        yield from vars(module).values()
        classes.update(type(module).__mro__)
    for kind in classes:
        if kind.__module__.partition(".")[0] == "torch":
            continue
        for value in vars(kind).values():
            yield value
            if isinstance(value, types.FunctionType):
                homes[id(value.__globals__)] = value.__globals__
    for home in homes.values():
        yield from list(home.values())
