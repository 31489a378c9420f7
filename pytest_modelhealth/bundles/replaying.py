"""Runs a saved inspection again, on a model of the user's, and says whether it is the same."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from pytest_modelhealth.bundles import functions
from pytest_modelhealth.bundles.conditions import selection_of, settings_of
from pytest_modelhealth.bundles.content import CONTENT, Batch, Content, Function
from pytest_modelhealth.bundles.nest import NOTHING, Reader, qualified_name
from pytest_modelhealth.bundles.reading import Bundle, read
from pytest_modelhealth.bundles.sameness import differences
from pytest_modelhealth.bundles.shrinking import Fewest, Part, fewest
from pytest_modelhealth.bundles.state import loaded
from pytest_modelhealth.bundles.surroundings import under, versions
from pytest_modelhealth.capture import find_engine
from pytest_modelhealth.capture.step.batch import copied_batch
from pytest_modelhealth.capture.step.untouched import random_state, restore_random_state
from pytest_modelhealth.checks import Check, with_own_checks
from pytest_modelhealth.checks.judging import judge
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.inspector import Inspector
from pytest_modelhealth.rendering.notation import plural, printable
from pytest_modelhealth.report import HealthReport, Replayed
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.training import default_settings

if TYPE_CHECKING:
    from pytest_modelhealth.capture.engine import Compiled

_NAMED = 20
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
    shrink: bool = False,
) -> HealthReport:
    """Run an inspection again that ``pytest --modelhealth-replay=DIR`` saved.

    The model gets the parameters, buffers and modes of then, random generators the state, torch
    the switches, and all is put back afterwards. On the same machine and versions every number is
    the same, bit for bit; ``report.replayed`` says whether it is, and what is not.

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
        shrink: look for the fewest samples of the batch that still fail the same check at
            the same layer. The report is that of these, and ``report.replayed.samples`` names them.

    Raises:
        InspectionError: the bundle cannot be read, is of another model, or lacks something that
            is not given; the message says what.
        Exception: whatever the model or the loss raises, untouched.
    """
    bundle = read(path)
    made = _model(model)
    base = with_own_checks(default_settings(), own_checks, "own_checks")
    again = Again(bundle, made, base, inputs, target, loss, backward, state)
    return again.report(shrink)


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
        self._reader = Reader(bundle.tensors, _device(self._module))
        self._settings = settings_of(content.settings, content.waivers, base)
        self._selection = selection_of(content.watch, self._module)
        self._batches = [self._batch(batch, inputs, target) for batch in content.batches]
        self._states = [self._reader.read(batch.random, "random") for batch in content.batches]
        self._loss = self._loss_of(loss)
        self._backward = _backward(content, backward)
        self._scaler = self._scaler_of(content)
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
                instead = self._reader.read(written, name)
                missing = content.lacks(name) or content.lacks("batches")
                if instead is NOTHING or missing:
                    raise InspectionError(
                        f"the bundle lacks {missing or name}; give {name}=... to replay"
                    )
            values.append(instead)
        return values[0], values[1]

    def _loss_of(self, given: Any) -> Any:
        if given is not None:
            return given
        written = self._bundle.content.loss
        own = functions.own_function(written)
        if own is not None:
            raise InspectionError(
                f"the loss was a function of your own, {printable(str(own))}, which no bundle "
                "holds: give it, replay(..., loss=...)"
            )
        return functions.read(written, self._reader)

    def _scaler_of(self, content: Content) -> Any:
        if content.scaler is None:
            return None
        kept = self._reader.read(content.scaler, "scaler")
        try:
            scaler = torch.amp.GradScaler(kept["device"])
            if kept["state"]:
                scaler.load_state_dict(kept["state"])
            float(scaler.get_scale())
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise InspectionError(f"the bundle is damaged: its scaler: {error}") from None
        return scaler

    def report(self, shrink: bool = False) -> HealthReport:
        """Run it, and say how it compares.

        Raises:
            InspectionError: as `replay`.
        """
        content = self._bundle.content
        if shrink and len(self._batches) > 1:
            raise InspectionError(
                f"shrink looks at the samples of one batch, and this bundle has "
                f"{len(self._batches)} batches; run it without, or inspect one of them"
            )
        with self._as_then():
            # a model may write to its batch, which the search takes parts of afterwards
            report = self._run(copied_batch(self._batches) if shrink else self._batches)
            moved = differences(self._bundle.report, json.loads(report.render("json")))
            elsewhere = _elsewhere(content) if moved else ()
            replayed = Replayed(
                bundle=str(self._bundle.path),
                same=not moved,
                differences=(*moved, *elsewhere),
                of=report.observation.samples,
            )
            if shrink:
                report, replayed = self._shrunk(report, replayed)
        self.told = list(self._notes(replayed, shrink))
        return _with(report, replayed, self.told)

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        """Have model, random generators and torch be as they were, and put them back."""
        content = self._bundle.content
        before = random_state()
        try:
            with (
                under(content.surroundings),
                loaded(self._module, content.model, self._reader, values=self._state),
            ):
                yield
        finally:
            restore_random_state(before)

    def _run(self, batches: list[tuple[Any, Any]], padding: Any = NOTHING) -> HealthReport:
        content = self._bundle.content
        inspector = Inspector(
            self._model, compiled=self._compiled, settings=self._settings, calibrate=False
        )
        inspector._selection = self._selection
        options = {"loss": self._loss, "backward": self._backward, "scaler": self._scaler}
        if content.of == "batches":
            return inspector.run_batches(
                self._one_by_one(batches), training=content.training, **options
            )
        inputs, target = batches[0]
        if padding is NOTHING:
            padding = self._reader.read(content.padding, "padding")
        self._restore(0)
        return inspector.run_inspection(
            inputs,
            target,
            batch_dim=content.batch_dim,
            causal=content.causal,
            padding=padding,
            **options,
        )

    def _one_by_one(self, batches: list[tuple[Any, Any]]) -> Iterator[Any]:
        """Yield what `run_batches` takes, each under the random state of then."""
        for index, (inputs, target) in enumerate(batches):
            self._restore(index)
            yield inputs if self._loss is None else (inputs, target)

    def _restore(self, index: int) -> None:
        try:
            restore_random_state(self._states[index])
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise InspectionError(
                f"the random state of the bundle cannot be restored here: {error}"
            ) from None

    def _shrunk(self, report: HealthReport, replayed: Replayed) -> tuple[HealthReport, Replayed]:
        """Return the report on the fewest samples that fail as this one does, and how many."""
        violations = _judged(report)
        if not violations:
            return report, replayed
        worst, of = violations[0], self._samples(report)
        dimension = self._bundle.content.batch_dim or 0

        padding = self._reader.read(self._bundle.content.padding, "padding")
        twice: set[int] = set()

        def run(samples: tuple[int, ...]) -> HealthReport:
            taken = samples * 2 if len(samples) == 1 and samples[0] in twice else samples
            part = Part(taken, of, dimension)
            inputs, target = map(part.take, self._batches[0])
            return self._run([(inputs, target)], part.take(padding))

        def fails(samples: tuple[int, ...]) -> bool:
            try:
                found = _judged(run(samples))
            except Exception:  # noqa: BLE001 - the model may not take so few samples
                if len(samples) > 1 or samples[0] in twice:
                    return False
                twice.update(samples)  # as batch normalisation takes no single one
                return fails(samples)
            return any((v.check, v.layer) == (worst.check, worst.layer) for v in found)

        found: Fewest = fewest(range(of), fails)
        smaller = len(found.samples) < of
        replayed = replace(
            replayed,
            samples=found.samples if smaller else None,
            of=of,
            runs=found.runs,
            smallest=found.smallest,
            twice=len(found.samples) == 1 and found.samples[0] in twice,
        )
        return (run(found.samples) if smaller else report), replayed

    def _samples(self, report: HealthReport) -> int:
        """Return the size of the batch."""
        dimension = self._bundle.content.batch_dim or 0
        if not dimension:
            return report.observation.samples
        shapes = (given.shape for given in report.observation.given)
        return next((shape[dimension] for shape in shapes if len(shape) > dimension), 0)

    def _notes(self, replayed: Replayed, shrink: bool) -> Iterator[str]:
        """Yield what a reader should know, a sentence each."""
        name = printable(Path(replayed.bundle).name)
        if shrink:
            yield shrinking_told(replayed)
        if replayed.same:
            yield f"the same verdict and numbers as then, bit for bit: replayed {name}"
        else:
            numbers = len(replayed.differences)
            yield (
                f"replayed {name}: not as then: {'; '.join(replayed.differences[:2])}"
                + (f"; and {numbers - 2:,} more (report.replayed)" if numbers > 2 else "")
            )
        if self._own_lacking:
            yield f"not judged by the project's own checks: {', '.join(self._own_lacking)}"
        missing = self._bundle.content.missing_values
        for lacking in missing[:_SHOWN]:
            yield f"not in the bundle: {printable(str(lacking))}"
        if len(missing) > _SHOWN:
            yield f"not in the bundle: {len(missing) - _SHOWN:,} more, which its {CONTENT} lists"


def shrinking_told(replayed: Replayed) -> str:
    """Return what a search for the fewest samples found, a sentence."""
    took = f"found in {plural(replayed.runs, 'run')}"
    if replayed.samples is None:
        if not replayed.runs:
            return "nothing fails here, so that no samples were looked for"
        return f"no fewer than all {plural(replayed.of, 'sample')} were seen to fail ({took})"
    count = len(replayed.samples)
    named = ", ".join(map(str, replayed.samples[:_NAMED]))
    named += f" and {count - _NAMED:,} more" if count > _NAMED else ""
    enough = "is enough" if count == 1 else "are enough"
    twice = ", given twice as the model takes no single one" if replayed.twice else ""
    last = "" if replayed.smallest else "; the search ended at its limit, fewer may do"
    return f"{count:,} of {plural(replayed.of, 'sample')} {enough}: {named} ({took}{twice}{last})"


def _device(module: nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def _backward(content: Content, given: Any) -> Any:
    if given is None and isinstance(content.backward, Function):
        raise InspectionError(
            f"the backward pass was a function of your own, {printable(str(content.backward))}, "
            "which no bundle holds: give it, replay(..., backward=...)"
        )
    return content.backward if given is None else given


def _judged(report: HealthReport) -> Any:
    return judge(report.observation, report.settings).violations


def _with(report: HealthReport, replayed: Replayed, notes: Iterable[str]) -> HealthReport:
    seen = replace(report.observation, notes=(*notes, *report.observation.notes), replayed=replayed)
    return HealthReport(seen, report.settings, judge, renderer=report.renderer)


def _elsewhere(content: Content) -> tuple[str, ...]:
    """Return which versions, and what of the machine, are others here."""
    here = versions()
    return tuple(
        printable(f"{name} was {then}, is {here.get(name, 'not there')}")
        for name, then in content.versions.items()
        if here.get(name) != then
    )
