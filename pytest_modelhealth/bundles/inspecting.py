"""Inspections that are taken down so that they can be saved, and one that is run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pytest_modelhealth.bundles.data import (
    Missing,
    machine,
    pack,
    pack_model,
    tensors_of,
    unpack,
    unpack_model,
    write,
)
from pytest_modelhealth.capture.observing.tensors import find_tensors, version
from pytest_modelhealth.capture.step.guard import random_state, restore_random_state
from pytest_modelhealth.checks.judging import judge
from pytest_modelhealth.inspector import Inspector
from pytest_modelhealth.report import ROLES, HealthReport

_BATCH = ("inputs", "target")
_SHOWN = 3


class Recording:
    """What an inspection that is about to run runs on. It holds model and batch."""

    def __init__(
        self, inspector: Inspector, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> None:
        self._model = inspector._engine.module(inspector._model)
        arguments = dict(zip(_BATCH, args, strict=False)) | dict(options)
        self._batch = {name: arguments.get(name) for name in _BATCH}
        self._random = random_state()
        self._before = self._versions(list(self._model.parameters()))
        self._after: list[Any] = []
        self.wrote = False  # whether the run wrote to its batch or to parameters

    def _versions(self, tensors: list[Tensor]) -> list[Any]:
        tensors = tensors + find_tensors(self._batch)
        return [(id(one), version(one), one.requires_grad) for one in tensors]

    def _now(self) -> list[Any]:
        modes = [module.training for module in self._model.modules()]
        return [*self._versions(tensors_of(self._model)), *modes]

    def end(self) -> None:
        """Take down how the run has left model and batch."""
        self.wrote = self._before != self._versions(list(self._model.parameters()))
        self._after = self._now()

    def is_as_it_was(self) -> bool:
        """Whether nothing of model and batch was written to or replaced since the run began."""
        return not self.wrote and self._after == self._now()

    def save(self, path: Path, report: HealthReport, test: Mapping[str, Any]) -> Missing:
        """Write a bundle, and return what is not in it.

        Raises:
            OSError: it cannot be written.
        """
        missing: Missing = {}
        content = {
            "test": test,
            "model": pack_model(self._model, missing),
            "random": pack(self._random, "random", missing),
            **{name: pack(value, name, missing) for name, value in self._batch.items()},
            "numbers": _numbers(report),
            "machine": machine(),
            "missing": missing,
        }
        write(path, content)
        return missing


def judged_apart(report: HealthReport) -> HealthReport:
    """Return a report of the same, judged by itself: to look at it asks nothing of the user's."""
    return HealthReport(
        report.observation, report._settings, judge, report._noise, renderer=report._renderer
    )


def _numbers(report: HealthReport) -> dict[str, Any]:
    """Return what has to be the same again: verdict, loss, and all statistics of each layer."""
    data = judged_apart(report).to_dict()
    layers = {
        f"layer {one['name']}" if one["name"] else "the model": {
            name: one[name] for name in ("status", "calls", *ROLES)
        }
        for one in data["layers"]
    }
    return {"verdict": data["verdict"], "loss": data["loss"], **layers}


def replayed(
    bundle: Mapping[str, Any],
    inspector: Inspector,
    run: Callable[..., HealthReport],
    args: tuple[Any, ...],
    options: Mapping[str, Any],
) -> tuple[HealthReport, list[str]]:
    """Run an inspection on what a bundle holds, and say whether it is as it was then.

    Model and random generators keep the state of then, so that the test goes on as it did.

    Args:
        bundle: as `data.read` returns it.
        inspector: the test's own, with its own settings.
        run: its `run_inspection`.
        args, options: what the test calls it with: those of the batch stand in for what is not in
            the bundle, the others are taken as they are.

    Raises:
        InspectionError: the bundle is of another model.
        Exception: whatever the model or the loss raises, untouched.
    """
    missing = bundle["missing"]
    unpack_model(bundle["model"], inspector._engine.module(inspector._model), missing)
    arguments = dict(options) | dict(zip(_BATCH, args, strict=False))
    for name in _BATCH:
        arguments[name] = unpack(bundle[name], arguments.get(name), name, missing)
    restore_random_state(unpack(bundle["random"], random_state(), "random", missing))
    report = run(*args[len(_BATCH) :], **arguments)
    different = list(_differences(bundle["numbers"], _numbers(report), ""))
    if not different:
        lines = ["replayed: the same verdict and numbers as then, bit for bit"]
    else:
        more = f"; and {len(different) - _SHOWN:,} more" if len(different) > _SHOWN else ""
        lines = [f"replayed, and not as then: {'; '.join(different[:_SHOWN])}{more}"]
        if bundle["machine"] != machine():
            lines += [f"then it was on {bundle['machine']}", f"now it is on {machine()}"]
    lines += [f"not in the bundle, so the test's own: {one}" for one in not_in(missing)]
    return report, lines


def not_in(missing: Missing) -> list[str]:
    """Return what a bundle lacks, the first few and how many more."""
    shown = [f"{path} ({kind})" for path, kind in list(missing.items())[:_SHOWN]]
    return shown + ([f"{len(missing) - _SHOWN:,} more"] if len(missing) > _SHOWN else [])


def _differences(then: Any, now: Any, what: str) -> Iterator[str]:
    """Yield what differs, a phrase each; numbers are compared exactly."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in dict.fromkeys((*then, *now)):
            yield from _differences(then.get(key), now.get(key), f"{what} {key}".lstrip())
    elif then != now:
        yield f"{what} was {then}, is {now}"
