"""Runs a saved inspection again, on a model of the user's, and says whether it is the same."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from pytest_modelhealth.bundles.content import Batch, Content, Function, WatchRule
from pytest_modelhealth.bundles.file import Bundle, read
from pytest_modelhealth.bundles.packing import qualified_name
from pytest_modelhealth.bundles.sameness import differences
from pytest_modelhealth.bundles.state import loaded
from pytest_modelhealth.bundles.surroundings import under, versions
from pytest_modelhealth.capture import find_engine
from pytest_modelhealth.capture.step.untouched import random_state, restore_random_state
from pytest_modelhealth.checks import Check, with_own_checks
from pytest_modelhealth.checks.judging import judge
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.inspector import Inspector
from pytest_modelhealth.layers import Rule, Selection, original_class
from pytest_modelhealth.rendering.notation import printable
from pytest_modelhealth.report import HealthReport, Replayed
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.training import default_settings

if TYPE_CHECKING:
    from pytest_modelhealth.capture.engine import Compiled

_SHOWN = 3


def replay(
    path: str | os.PathLike[str],
    model: nn.Module | Callable[[], nn.Module],
    *,
    inputs: Any = None,
    target: Any = None,
    loss: Any = None,
    backward: Any = None,
    own_checks: Iterable[type[Check]] = (),
    state: bool = True,
) -> HealthReport:
    """Run an inspection again that ``pytest --modelhealth-replay=DIR`` saved.

    The model gets the parameters, buffers and modes of then, random generators the state, torch
    the switches, and all is put back afterwards. On the same machine and versions every number is
    the same, bit for bit; ``report.observation.replayed`` says whether it is, and what is not.

    Args:
        path: the bundle's folder.
        model: a model of the same layers, or a function without arguments that makes one.
        inputs, target: a batch in place of the bundle's, or where it has none.
        loss: in place of the bundle's; needed where that was a function of your own, which
            no bundle holds.
        backward: in place of the bundle's; needed where that was a function.
        own_checks: checks of your own that judged then.
        state: whether the model gets the parameters and buffers of then; else it runs with its
            own.

    Raises:
        InspectionError: the bundle cannot be read, is of another model, or lacks something that
            is not given; the message says what.
        Exception: whatever the model or the loss raises, untouched.
    """
    bundle = read(path)
    made = _model(model)
    base = with_own_checks(default_settings(), own_checks, "own_checks")
    again = Again(bundle, made, base, inputs, target, loss, backward, state)
    return again.report()


def _model(given: Any) -> Any:
    """Return the model given, or made by the function given."""
    makes_one = isinstance(given, type | partial) or inspect.isroutine(given)
    return given() if makes_one else given  # what is none is refused by the engines


class Again:
    """An inspection that is run again.

    Args:
        bundle: what was saved.
        model: what to run it on.
        base: settings with the checks that judge.
        inputs, target, loss, backward: in place of what was saved; ``None`` takes that.
        state: whether the model gets the values of then.

    Attributes:
        told: what the report says of it, a sentence each.

    Raises:
        InspectionError: something is neither saved nor given.
    """

    told: list[str]

    def __init__(
        self,
        bundle: Bundle,
        model: Any,
        base: Settings,
        inputs: Any = None,
        target: Any = None,
        loss: Any = None,
        backward: Any = None,
        state: bool = True,
    ) -> None:
        content = bundle.content
        self._bundle, self._model, self._state = bundle, model, state
        self._compiled = cast("Compiled", content.compiled)
        self._module = find_engine(model, compiled=self._compiled).module(model)
        self._settings = Settings(
            base.declarations,
            # else of a check of the project's own, or of another version
            {name: limit for name, limit in content.settings.items() if name in base},
            content.waivers,
            base.checks,
        )
        self._selection = selection_of(content.watch, self._module)
        self._batches = [self._batch(batch, inputs, target) for batch in content.batches]
        self._loss = self._loss_of(loss)
        self._backward = _backward(content, backward)
        self._scaler = None
        if content.scaler is not None:
            device, scaled = content.scaler
            self._scaler = torch.amp.GradScaler(device)
            self._scaler.load_state_dict(scaled)
        checks = {qualified_name(type(check)) for check in base.checks}
        self._own_lacking = [name for name in content.own_checks if name not in checks]

    def _batch(self, batch: Batch, inputs: Any, target: Any) -> tuple[Any, Any]:
        content = self._bundle.content
        given = (inputs, target)
        if inputs is not None and len(content.batches) > 1:
            raise InspectionError(
                f"the bundle has {len(content.batches)} batches, and one is given: leave inputs out"
            )
        values = []
        for name, written, instead in zip(
            ("inputs", "target"), (batch.inputs, batch.target), given, strict=True
        ):
            if instead is None:
                instead = written
                if missing := content.lacks(name) or content.lacks("batches"):
                    raise InspectionError(f"the bundle lacks {missing}; give {name}=... to replay")
            values.append(instead)
        return values[0], values[1]

    def _loss_of(self, given: Any) -> Any:
        if given is not None:
            return given
        written = self._bundle.content.loss
        tasks = written.values() if isinstance(written, Mapping) else (written,)
        own = next((task for task in tasks if isinstance(task, Function)), None)
        if own is not None:
            raise InspectionError(
                f"the loss was a function of your own, {printable(str(own))}, which no bundle "
                "holds: give it, replay(..., loss=...)"
            )
        return written

    def report(self) -> HealthReport:
        """Run it, and say how it compares.

        Raises:
            InspectionError: as `replay`.
        """
        with self._as_then():
            report = self._run()
        moved = differences(self._bundle.report, json.loads(report.render("json")))
        elsewhere = _elsewhere(self._bundle.content) if moved else ()
        replayed = Replayed(str(self._bundle.path), not moved, (*moved, *elsewhere))
        self.told = list(self._notes(replayed))
        return _with(report, replayed, self.told)

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        """Have model, random generators and torch be as they were, and put them back."""
        content = self._bundle.content
        before = random_state()
        try:
            with (
                under(content.surroundings),
                loaded(self._module, content.model, values=self._state),
            ):
                yield
        finally:
            restore_random_state(before)

    def _run(self) -> HealthReport:
        content = self._bundle.content
        inspector = Inspector(
            self._model, compiled=self._compiled, settings=self._settings, calibrate=False
        )
        inspector._selection = self._selection
        options = {"loss": self._loss, "backward": self._backward, "scaler": self._scaler}
        options |= content.options
        if content.of == "batches":
            return inspector.run_batches(self._one_by_one(), **options)
        restore_random_state(content.batches[0].random)
        return inspector.run_inspection(*self._batches[0], **options)

    def _one_by_one(self) -> Iterator[Any]:
        """Yield what `run_batches` takes, each under the random state of then."""
        for batch, (inputs, target) in zip(
            self._bundle.content.batches, self._batches, strict=True
        ):
            restore_random_state(batch.random)
            yield inputs if self._loss is None else (inputs, target)

    def _notes(self, replayed: Replayed) -> Iterator[str]:
        """Yield what a reader should know, a sentence each."""
        name = printable(Path(replayed.bundle).name)
        if replayed.same:
            yield f"the same verdict and numbers as then, bit for bit: replayed {name}"
        else:
            numbers = len(replayed.differences)
            yield (
                f"replayed {name}: not as then: {'; '.join(replayed.differences[:2])}"
                + (
                    f"; and {numbers - 2:,} more (report.observation.replayed)"
                    if numbers > 2
                    else ""
                )
            )
        if self._own_lacking:
            yield f"not judged by the project's own checks: {', '.join(self._own_lacking)}"
        missing = self._bundle.content.missing_values
        for lacking in missing[:_SHOWN]:
            yield f"not in the bundle: {printable(str(lacking))}"
        if len(missing) > _SHOWN:
            yield f"not in the bundle: {len(missing) - _SHOWN:,} more, which its content lists"


def selection_of(rules: Iterable[WatchRule], model: nn.Module) -> Selection:
    """Return what was watched; classes are looked for among those of the model's modules.

    Raises:
        InspectionError: a class is none of them.
    """
    kinds = {kind for module in model.modules() for kind in (type(module), original_class(module))}
    known: dict[str, type[nn.Module]] = {
        qualified_name(base): base
        for kind in kinds
        for base in kind.__mro__
        if issubclass(base, nn.Module)
    }
    made = []
    for rule in rules:
        types = None
        if rule.types is not None:
            types = tuple(known[name] for name in rule.types if name in known)
            if not types:
                raise InspectionError(
                    f"the bundle watched layers of types {', '.join(rule.types)}, of which this "
                    "model has none"
                )
        regex = None if rule.flags is None else re.compile(rule.pattern, rule.flags)
        made.append(Rule(regex or rule.pattern, frozenset(rule.roles), types))
    return Selection(tuple(made))


def _backward(content: Content, given: Any) -> Any:
    if given is None and isinstance(content.backward, Function):
        raise InspectionError(
            f"the backward pass was a function of your own, {printable(str(content.backward))}, "
            "which no bundle holds: give it, replay(..., backward=...)"
        )
    return content.backward if given is None else given


def _with(report: HealthReport, replayed: Replayed, notes: Iterable[str]) -> HealthReport:
    seen = replace(report.observation, notes=(*notes, *report.observation.notes), replayed=replayed)
    return HealthReport(seen, report._settings, judge, renderer=report._renderer)


def _elsewhere(content: Content) -> tuple[str, ...]:
    """Return which versions, and what of the machine, are others here."""
    here = versions()
    return tuple(
        printable(f"{name} was {then}, is {here.get(name, 'not there')}")
        for name, then in content.versions.items()
        if here.get(name) != then
    )
