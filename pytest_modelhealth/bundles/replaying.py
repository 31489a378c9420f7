"""Runs a saved inspection again, on a model of the user's, and says whether it is the same."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytest_modelhealth.bundles.file import Bundle, qualified_name, read
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
from pytest_modelhealth.layers import Rule, Selection
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
    if content["watch"] is not None:
        inspector._selection = Selection(
            tuple(
                Rule(re.compile(f"^{re.escape(name)}$"), frozenset(roles))
                for name, roles in content["watch"].items()
            )
        )
    batches = [_batch(bundle, batch, given) for batch in content["batches"]]
    options = {name: _function(content, name, given) for name in ("loss", "backward")}
    options |= {"scaler": None} | content["options"]
    if content["scaler"] is not None:
        device, state_of_scaler = content["scaler"]
        options["scaler"] = torch.amp.GradScaler(device)
        options["scaler"].load_state_dict(state_of_scaler)

    def one_by_one() -> Iterator[Any]:
        """Yield what `run_batches` takes, each under the random state of then."""
        for (inputs, target), batch in zip(batches, content["batches"], strict=True):
            restore_random_state(batch["random"])
            yield inputs if options["loss"] is None else (inputs, target)

    held = State(module)
    parameters = Memory([] if held.lazy else held.leaves)
    put_back = untouched(Inspection(held, module), None)
    with values_kept(held, parameters), put_back, under(content["surroundings"]):
        load(module, content["model"], values=state)
        if content["of"] == "batches":
            report = inspector.run_batches(one_by_one(), **options)
        else:
            restore_random_state(content["batches"][0]["random"])
            report = inspector.run_inspection(*batches[0], **options)
    moved = differences(content["report"], json.loads(report.render("json")))
    here = versions()
    elsewhere = [
        printable(f"{name} was {then}, is {here.get(name, 'not there')}")
        for name, then in content["versions"].items()
        if here.get(name) != then
    ]
    record = Replayed(str(bundle.path), not moved, (*moved, *(elsewhere if moved else ())))
    told = list(_notes(bundle, record, settings))
    seen = report.observation
    seen = replace(seen, notes=(*told, *seen.notes), replayed=record)
    return HealthReport(seen, report._settings, judge, renderer=report._renderer), told


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
    missing = bundle.content["missing"]
    for one in missing[:_SHOWN]:
        yield f"not in the bundle: {printable(str(one))}"
    if len(missing) > _SHOWN:
        yield f"not in the bundle: {len(missing) - _SHOWN:,} more, which its content lists"


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what differs between two reports as `HealthReport.to_dict` has them, a phrase each.

    Numbers are compared bit for bit: the verdict, violations, the loss, then layers; of a tensor
    the first statistic that differs is named.
    """
    before, after = _facts(then), _facts(now)
    phrases = []
    for what in dict.fromkeys((*before, *after)):
        one, other = before.get(what, {}), after.get(what, {})
        for name in dict.fromkeys((*one, *other)):
            if one.get(name, "not there") != other.get(name, "not there"):
                was, now_is = (facts.get(name, "not there") for facts in (one, other))
                phrases.append(printable(f"{what} {name}".rstrip() + f" was {was}, is {now_is}"))
                break
    return tuple(phrases)


def _facts(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what is told of the model, of each finding and of each tensor, by what it is."""
    facts = {"verdict": {"": report["verdict"]}}
    for one in report["violations"]:
        found = facts.setdefault(f"{one['layer'] or 'the model'} ({one['check']})", {})
        found[f"{one.get('role') or ''} {one.get('tensor') or ''}".strip()] = one["value"]
    facts["loss"] = {"": report["loss"]}
    for layer in report["layers"]:
        name = layer["name"] or "the model"
        facts |= {f"{name}: {key}": {"": layer[key]} for key in ("status", "calls")}
        for role in ROLES:
            seen = layer[role] or {}
            tensors = {"": seen} if "shape" in seen else seen  # by the tensors' own names
            facts |= {f"{name} ({role}) {own}".rstrip(): one for own, one in tensors.items()}
    return facts


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
