"""Tells what is compiled: hooks placed there would not run, or have it compiled anew."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pytest_modelhealth.capture.eager import is_compiled
from pytest_modelhealth.layers import is_wrapper, unwrapped

WHY_OPAQUE = (
    "it runs as compiled code, where no hook is called; its parameters, their gradients and "
    "updates are seen all the same"
)


class CompiledObjects:
    """What of the process is compiled and has to do with a model, or may have.

    `torch.compile` leaves no trace on what it compiles, so everything that Python's garbage
    collector knows is looked through, once.

    Args:
        model: the model.

    Attributes:
        function: name of a compiled function that may run inside the model; ``""`` if none may. A
            function mode would have it compiled anew.
        runs_optimizer: whether an optimizer's step is compiled, which hooks would break up.
    """

    def __init__(self, model: nn.Module) -> None:
        self.function = ""
        self.runs_optimizer = False
        self._own = set(model.modules())
        self._wrappers: list[weakref.ref[nn.Module]] = []
        self._inside: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        for thing in gc.get_objects():
            kind = type(thing)
            if kind is FunctionType:
                compiled = getattr(thing, "_torchdynamo_orig_callable", None)
                if compiled is not None and not hasattr(thing, "_torchdynamo_disable"):
                    self._add_function(compiled)
            elif kind.__name__ == "OptimizedModule" and issubclass(kind, nn.Module):
                self._add_wrapper(thing)
        self._own.clear()

    def wrappers(self) -> Iterator[nn.Module]:
        """Yield what `torch.compile` put around the model, or a module in it."""
        yield from (wrapper for ref in self._wrappers if (wrapper := ref()) is not None)

    def inside(self) -> Iterator[nn.Module]:
        """Yield modules of the model that compiled functions run."""
        yield from self._inside

    def _add_wrapper(self, wrapper: Any) -> None:
        if unwrapped(wrapper) in self._own:
            self._wrappers.append(weakref.ref(wrapper))

    def _add_function(self, function: Any) -> None:
        owner = getattr(function, "__self__", getattr(function, "__wrapped__", None))
        if isinstance(owner, Optimizer):
            self.runs_optimizer = True
        elif not isinstance(owner, nn.Module):
            self.function = getattr(function, "__qualname__", type(function).__name__)
            for module in _modules_in(function):
                self._inside.update(self._own.intersection(module.modules()))
        elif owner in self._own and getattr(function, "__name__", "") not in _CALLS:
            # a method of a module, whose own hooks lie around it
            self._inside.update(child for child in owner._modules.values() if child is not None)


_CALLS = frozenset({"__call__", "_call_impl", "_wrapped_call_impl", "inner"})
"""How a whole module is compiled, which shows at the module or at what is around it."""


def _modules_in(function: Any) -> Iterator[nn.Module]:
    """Yield the modules that a function has in its closure, or knows as global names."""
    if not isinstance(function, FunctionType):
        return
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if isinstance(held, nn.Module):
            yield held
    for name in function.__code__.co_names:
        held = function.__globals__.get(name)
        if isinstance(held, nn.Module):
            yield held


@dataclass
class Compiled:
    """What of a model is compiled at a time.

    Attributes:
        inside: modules that run as compiled code.
        wrappers: those that `torch.compile` put around others, each with the module in it, whose
            inputs and outputs show at the wrapper.
    """

    inside: set[nn.Module] = field(default_factory=set)
    wrappers: dict[nn.Module, nn.Module] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, others: CompiledObjects) -> Compiled:
        """Return what of `model` is compiled, in itself or by others."""
        found = cls()
        for module in others.inside():
            found.inside.update(module.modules())
        for module in (*others.wrappers(), *model.modules()):
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
