"""What a pair is: a reference, and a candidate made of a copy of it by an edit of the source."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from benchmarks.cases.subject import Healthy, Subject, run


@dataclass
class Sides:
    """Two models for one batch.

    Args:
        reference: the model as it was, with its batch and loss.
        candidate: what became of it.
    """

    reference: Subject
    candidate: Any


def as_module(sides: Sides) -> nn.Module:
    """Return the candidate as a module that can be called: a `state_dict` in a copy, for one."""
    candidate = sides.candidate
    if isinstance(candidate, Mapping):
        made = copy.deepcopy(sides.reference.model)
        made.load_state_dict(candidate)
        return made
    return candidate.module() if isinstance(candidate, ExportedProgram) else candidate


@dataclass(frozen=True)
class Said:
    """What a tool says of two models.

    Args:
        differs: whether it objects.
        layers: the layer at which it says that the two part, by its names in both.
        text: its sentence.
    """

    differs: bool
    layers: tuple[str | None, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Pair:
    """A reference with a candidate, and what a comparison of the two has to say.

    Args:
        name: what was done, in words.
        architecture: name of the reference.
        build: makes both, under the current random seed.
        at: shell patterns of the layers that may be named as the first wrong one, by their names in
            either model; ``""`` is the model itself. Empty where the two compute the same.
    """

    name: str
    architecture: str
    build: Callable[[], Sides]
    at: tuple[str, ...] = ()

    @property
    def is_benign(self) -> bool:
        """Whether nothing but rounding may differ."""
        return not self.at

    def is_at(self, *layers: str | None) -> bool:
        """Whether one of these layers is a right place."""
        return any(
            fnmatchcase(layer, pattern)
            for layer in layers
            if layer is not None
            for pattern in self.at
        )


Edit = Callable[[Any], Any]
"""Changes a copy of the reference, or returns what takes its place."""


@dataclass
class Pairs:
    """The pairs of one file, in the order written."""

    pairs: list[Pair] = field(default_factory=list)

    def refactor(self, name: str, healthy: Healthy) -> Callable[[Edit], Edit]:
        """Add what the decorated function makes of a model, and what computes the same."""
        return functools.partial(self._add, name, healthy, ())

    def change(
        self, name: str, healthy: Healthy, at: str | Iterable[str]
    ) -> Callable[[Edit], Edit]:
        """Add what the decorated function makes of a model, wrong from the layer `at` on."""
        return functools.partial(self._add, name, healthy, (at,) if isinstance(at, str) else at)

    def _add(self, name: str, healthy: Healthy, at: Iterable[str], edit: Edit) -> Edit:
        def build() -> Sides:
            reference = healthy()
            candidate = copy.deepcopy(reference.model)
            made = edit(candidate)
            return Sides(reference, candidate if made is None else made)

        self.pairs.append(Pair(name, healthy.__name__, build, tuple(at)))
        return edit


def with_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give one module another forward, as an edit of its source would."""
    module.forward = types.MethodType(forward, module)


def loaded(target: nn.Module, source: nn.Module, rename: Callable[[str], str] = str) -> nn.Module:
    """Return `target` with the mode and the weights of `source`, whose keys are renamed."""
    target.load_state_dict({rename(key): value for key, value in source.state_dict().items()})
    return target.train(source.training)


def warm(healthy: Healthy) -> Healthy:
    """Return a maker of the same subject in evaluation mode, its running statistics warm."""

    @functools.wraps(healthy)
    def build() -> Subject:
        made = healthy()
        with torch.no_grad():
            for _ in range(5):
                run(made.model, made.draw(64)[0])
        made.model.eval()
        return made

    return build


def remade(healthy: Healthy, edit: Edit) -> Healthy:
    """Return a maker of the same subject with its model edited: a reference of another form."""

    @functools.wraps(healthy)
    def build() -> Subject:
        made = healthy()
        result = edit(made.model)
        made.model = made.model if result is None else result
        return made

    return build
