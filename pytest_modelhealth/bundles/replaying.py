"""Runs a saved inspection again, on a model of the user's, and says whether it is the same."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytest_modelhealth.bundles.file import Bundle, missing_values, read
from pytest_modelhealth.bundles.packing import qualified_name
from pytest_modelhealth.bundles.state import load, under, versions
from pytest_modelhealth.capture import find_engine
from pytest_modelhealth.capture.step.isolation import (
    Inspection,
    restore_random_state,
    untouched,
    values_kept,
)
from pytest_modelhealth.capture.step.state import Memory, State
from pytest_modelhealth.checks import Check, with_own_checks
from pytest_modelhealth.checks.judging import judge
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.inspector import Inspector
from pytest_modelhealth.layers import Rule, Selection, original_class
from pytest_modelhealth.rendering.notation import printable
from pytest_modelhealth.report import ROLES, HealthReport, Replayed
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.training import default_settings

_SHOWN = 3
FAILS = 1
"""The exit status of pytest where a test fails."""


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
    makes_one = isinstance(model, type | partial) or inspect.isroutine(model)
    made: Any = model() if makes_one else model  # what is none is refused by the engines
    base = with_own_checks(default_settings(), own_checks, "own_checks")
    given = {"inputs": inputs, "target": target, "loss": loss, "backward": backward}
    return replayed(bundle, made, base, given, state=state)[0]


def replayed(
    bundle: Bundle, model: Any, base: Settings, given: Mapping[str, Any], *, state: bool = True
) -> tuple[HealthReport, list[str]]:
    """Return the report of an inspection that is run again, and what it says of that.

    Args:
        bundle: what was saved.
        model: what to run it on.
        base: settings with the checks that judge.
        given: inputs, target, loss and backward in place of what was saved; ``None`` takes that.
        state: whether the model gets the values of then.

    Raises:
        InspectionError: as `replay`.
    """
    content = bundle.content
    module = find_engine(model, compiled=content["compiled"]).module(model)
    settings = Settings(
        base.declarations,
        # else of a check of the project's own, or of another version
        {name: limit for name, limit in content["settings"].items() if name in base},
        content["waivers"],
        base.checks,
    )
    inspector = Inspector(model, compiled=content["compiled"], settings=settings, calibrate=False)
    inspector._selection = _selection(content["watch"], module)
    batches = [_batch(bundle, batch, given) for batch in content["batches"]]
    options = {name: _function(content, name, given) for name in ("loss", "backward")}
    options |= {"scaler": _scaler(content["scaler"])} | content["options"]

    def one_by_one() -> Iterator[Any]:
        """Yield what `run_batches` takes, each under the random state of then."""
        for (inputs, target), batch in zip(batches, content["batches"], strict=True):
            restore_random_state(batch["random"])
            yield inputs if options["loss"] is None else (inputs, target)

    with _put_back(module), under(content["surroundings"]):
        load(module, content["model"], values=state)
        if content["of"] == "batches":
            report = inspector.run_batches(one_by_one(), **options)
        else:
            restore_random_state(content["batches"][0]["random"])
            report = inspector.run_inspection(*batches[0], **options)
    moved = differences(bundle.report, json.loads(report.render("json")))
    record = Replayed(
        str(bundle.path), not moved, (*moved, *(_elsewhere(content) if moved else ()))
    )
    told = list(_notes(bundle, record, settings))
    seen = report.observation
    seen = replace(seen, notes=(*told, *seen.notes), replayed=record)
    return HealthReport(seen, report._settings, judge, renderer=report._renderer), told


@contextmanager
def _put_back(module: nn.Module) -> Iterator[None]:
    """Put everything back as after an inspection, and what was loaded into parameters."""
    state = State(module)
    parameters = Memory([] if state.lazy else state.leaves)
    with values_kept(state, parameters), untouched(Inspection(state, module), None):
        yield


def _batch(bundle: Bundle, batch: Mapping[str, Any], given: Mapping[str, Any]) -> list[Any]:
    count = len(bundle.content["batches"])
    if given.get("inputs") is not None and count > 1:
        raise InspectionError(f"the bundle has {count} batches, and one is given: leave inputs out")
    values = []
    for name in ("inputs", "target"):
        value = given.get(name)
        missing = bundle.lacks(name) or bundle.lacks("batches")
        if value is None and missing:
            raise InspectionError(f"the bundle lacks {missing}; give {name}=... to replay")
        values.append(batch[name] if value is None else value)
    return values


def _function(content: Mapping[str, Any], name: str, given: Mapping[str, Any]) -> Any:
    """Return the loss or the backward pass; one of the user's own is a string in the bundle."""
    if given.get(name) is not None:
        return given[name]
    kept = content[name]
    tasks = kept.values() if isinstance(kept, Mapping) else (kept,)
    if own := [task for task in tasks if isinstance(task, str)]:
        what = {"loss": "loss", "backward": "backward pass"}[name]
        raise InspectionError(
            f"the {what} was a function of your own, {printable(own[0])}, which no bundle holds: "
            f"give it, replay(..., {name}=...)"
        )
    return kept


def _scaler(kept: tuple[str, dict[str, Any]] | None) -> torch.amp.GradScaler | None:
    if kept is None:
        return None
    scaler = torch.amp.GradScaler(kept[0])
    scaler.load_state_dict(kept[1])
    return scaler


def _selection(rules: Iterable[Mapping[str, Any]], model: nn.Module) -> Selection:
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
        if rule["types"] is not None:
            types = tuple(known[name] for name in rule["types"] if name in known)
            if not types:
                raise InspectionError(
                    f"the bundle watched layers of types {', '.join(rule['types'])}, of which this "
                    "model has none"
                )
        pattern = rule["pattern"]
        if rule["flags"] is not None:
            pattern = re.compile(pattern, rule["flags"])
        made.append(Rule(pattern, frozenset(rule["roles"]), types))
    return Selection(tuple(made))


def _notes(bundle: Bundle, record: Replayed, settings: Settings) -> Iterator[str]:
    """Yield what a reader should know, a sentence each."""
    name, moved = printable(Path(record.bundle).name), record.differences
    if record.same:
        yield f"the same verdict and numbers as then, bit for bit: replayed {name}"
    else:
        more = f"; and {len(moved) - 2:,} more (report.observation.replayed)"
        said = "; ".join(moved[:2]) + (more if len(moved) > 2 else "")
        yield f"replayed {name}: not as then: {said}"
    checks = {qualified_name(type(check)) for check in settings.checks}
    if lacking := [name for name in bundle.content["own_checks"] if name not in checks]:
        yield f"not judged by the project's own checks: {', '.join(lacking)}"
    missing = missing_values(bundle.content)
    for one in missing[:_SHOWN]:
        yield f"not in the bundle: {printable(str(one))}"
    if len(missing) > _SHOWN:
        yield f"not in the bundle: {len(missing) - _SHOWN:,} more, which its content lists"


def _elsewhere(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return which versions, and what of the machine, are others here."""
    here = versions()
    return tuple(
        printable(f"{name} was {then}, is {here.get(name, 'not there')}")
        for name, then in content["versions"].items()
        if here.get(name) != then
    )


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what differs between two reports as `HealthReport.to_dict` has them, a phrase each.

    Numbers are compared bit for bit: the verdict, violations, the loss, then layers.
    """
    before, after = _layers(then), _layers(now)
    phrases = [
        *_compared({"verdict": then.get("verdict")}, {"verdict": now.get("verdict")}),
        *_compared(_violations(then), _violations(now), "no longer fails", "fails now"),
        *_compared({"loss": then.get("loss")}, {"loss": now.get("loss")}),
    ]
    for name in dict.fromkeys((*before, *after)):
        if name in before and name in after:
            phrases += _compared(before[name], after[name])
        else:
            phrases.append(f"{name} is {'gone' if name in before else 'new'}")
    return tuple(map(printable, phrases))


def _compared(
    then: Mapping[str, Any], now: Mapping[str, Any], gone: str = "is gone", new: str = "is new"
) -> Iterator[str]:
    for what in dict.fromkeys((*then, *now)):
        if what not in then or what not in now:
            yield f"{what} {gone if what in then else new}"
        elif then[what] != now[what]:
            yield _moved(what, then[what], now[what])


def _moved(what: str, then: Any, now: Any) -> str:
    """Return what moved; of the statistics of a tensor the first."""
    if isinstance(then, dict) and isinstance(now, dict):
        name = next(name for name in {**then, **now} if then.get(name) != now.get(name))
        return _moved(f"{what} {name}", then.get(name), now.get(name))
    if isinstance(then, dict) or isinstance(now, dict):
        then, now = ("seen" if one else "not seen" for one in (then, now))
    return f"{what} was {then}, is {now}"


def _violations(report: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for one in report.get("violations", ()):
        what = f"{one.get('layer') or 'the model'} ({one.get('check')})"
        if what in facts:
            what += f" of {one.get('role')} {one.get('tensor') or ''}".rstrip()
        facts[what] = one.get("value")
    return facts


def _layers(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what is told of each layer, and of each tensor of it the statistics."""
    layers: dict[str, dict[str, Any]] = {}
    for layer in report.get("layers", ()):
        name = layer.get("name") or "the model"
        facts = {f"{name}: {key}": layer.get(key) for key in ("status", "calls")}
        for role in ROLES:
            found = layer.get(role)
            if isinstance(found, dict) and "shape" not in found:  # by the tensors' own names
                facts |= {f"{name} ({role}) {own}": one for own, one in found.items()}
            else:
                facts[f"{name} ({role})"] = found
        layers[name] = facts
    return layers


class SubstitutingInspector(Inspector):
    """Replays a bundle where its inspection was made, whatever batch it is given.

    Attributes:
        bundle: what to replay.
        is_meant: called when an inspection begins; returns whether it is the bundle's.
        on_replay: called with what the report says of the replay.
    """

    bundle: Bundle
    is_meant: Callable[[], bool]
    on_replay: Callable[[list[str]], object]

    def run_inspection(self, *args: Any, **options: Any) -> HealthReport:
        """As in `Inspector`, or the bundle's."""
        if not self.is_meant():
            return super().run_inspection(*args, **options)
        return self._replayed(dict(zip(("inputs", "target"), args, strict=False)) | options)

    def run_batches(self, *args: Any, **options: Any) -> HealthReport:
        """As in `Inspector`, or the bundle's."""
        if not self.is_meant():
            return super().run_batches(*args, **options)
        return self._replayed(options)

    def _replayed(self, given: dict[str, Any]) -> HealthReport:
        """Return the bundle's report, made with the test's own functions, and what it lacks."""
        self._begin()
        given = {
            name: value
            for name, value in given.items()
            if name in ("loss", "backward") or self.bundle.lacks(name)
        }
        report, told = replayed(self.bundle, self._model, self._settings, given)
        self._note_report(report)
        self.on_replay(told)
        return report


def run_test(path: Path) -> bool:
    """Run the test that made a bundle in a process of its own; return whether it passes.

    Args:
        path: the bundle's folder.

    Raises:
        InspectionError: the bundle is of no test, the test is not here, or nothing was replayed,
            of which pytest has said why.
    """
    test = read(path).content["test"]
    if test is None:
        raise InspectionError(
            f"{path} was made outside of tests: give the model, --model package.module:function"
        )
    options = [f"--modelhealth-replay-from={path.absolute()}"]
    # a project's own options may deselect it
    options += ["-m", "", "-k", ""]
    command = [sys.executable, "-m", "pytest", *options, _argument(test["id"], path)]
    status = subprocess.run(command, check=False).returncode
    if status not in (0, FAILS):
        raise InspectionError(f"the inspection of {path} was not replayed; pytest says why")
    return status == 0


def _argument(nodeid: str, bundle: Path) -> str:
    """Return a test's id as an argument for pytest: its file as it is found from here.

    Raises:
        InspectionError: there is no such file here, or the id leads somewhere else.
    """
    file, _, rest = nodeid.partition("::")
    relative = Path(file)
    if not file or file.startswith("-") or relative.is_absolute() or ".." in relative.parts:
        raise InspectionError(f"the bundle is damaged: {nodeid!r} is no id of a test")
    for folder in (Path.cwd(), *Path.cwd().parents):
        found = folder / relative
        # code that came with the bundle is not run
        if found.is_file() and not found.resolve().is_relative_to(bundle.resolve()):
            return f"{found}::{rest}"
    raise InspectionError(
        f"the test of the bundle, {nodeid}, is not here: start this in the project's folder, or "
        "run it without the test, --model package.module:function"
    )
