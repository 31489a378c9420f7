"""Runs what a test file makes under a few seeds, and says which settings it needs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pytest_modelhealth.capture.step.untouched import random_state, restore_random_state
from pytest_modelhealth.data_sets.modes import in_mode
from pytest_modelhealth.inspector import Inspector
from pytest_modelhealth.rendering.notation import number, percent, plural
from pytest_modelhealth.report import HealthReport, Violation

Attribute = tuple[tuple[str, ...], str]
_LEAST_DEAD, _MARGIN = 0.05, 1.25


@dataclass(frozen=True)
class Measured:
    """What the seeds showed.

    Args:
        seeds: how many there were.
        reports: one for each seed and mode.
    """

    seeds: int
    reports: tuple[HealthReport, ...]

    @property
    def always(self) -> list[Violation]:
        """The findings that every seed has, the gravest first."""
        found = self._by_key()
        return [found[key][0] for key in found if self._seeds_with(key) == self.seeds]

    @property
    def sometimes(self) -> list[tuple[list[Violation], int]]:
        """The findings that some seeds have, with how many."""
        found = self._by_key()
        counted = ((found[key], self._seeds_with(key)) for key in found)
        return [(violations, seen) for violations, seen in counted if seen < self.seeds]

    def _by_key(self) -> dict[tuple[str, str], list[Violation]]:
        found: dict[tuple[str, str], list[Violation]] = {}
        for report in self.reports:
            for violation in report.judgement.violations:
                found.setdefault((violation.check, violation.layer), []).append(violation)
        return found

    def _seeds_with(self, key: tuple[str, str]) -> int:
        half = len(self.reports) // 2
        return sum(
            any((v.check, v.layer) == key for r in pair for v in r.judgement.violations)
            for pair in zip(self.reports[:half], self.reports[half:], strict=True)
        )

    def attributes(self) -> list[Attribute]:
        """Return the class attributes that the seeds give reason for."""
        settings = {**self._widened(), **self._tightened()}
        if not settings:
            return []
        comments = tuple(reason for reason, _ in settings.values())
        values = ", ".join(f'"{name}": {value!r}' for name, (_, value) in settings.items())
        return [(comments, f"settings = {{{values}}}")]

    def _widened(self) -> dict[str, tuple[str, float]]:
        """Return limits that only some seeds break: the model is at their edge."""
        wider: dict[str, tuple[str, float]] = {}
        for violations, seen in self.sometimes:
            name = _setting(self.reports[0], violations[0])
            if name is None or not name.startswith("max_"):
                continue
            worst = max(v.value for v in violations)
            default = self.reports[0].settings[name].value
            if not math.isfinite(worst):
                continue
            where = violations[0].layer or "the model"
            text = (
                f"{seen} of {plural(self.seeds, 'seed')}: {where} has up to "
                f"{number(worst)}, over the default of {number(default)}"
            )
            wider[name] = text, _rounded(worst * _MARGIN)
        return wider

    def _tightened(self) -> dict[str, tuple[str, float]]:
        """Return how few units may be dead, where some are and the default allows many more."""
        if self.always or self.sometimes:
            return {}
        dead: dict[str, list[float]] = {}
        for report in self.reports:
            for layer in report:
                seen = layer.activations
                if seen is not None and seen.dead_fraction is not None:
                    dead.setdefault(layer.label, []).append(seen.dead_fraction)
        if not dead:
            return {}
        where, values = max(dead.items(), key=lambda item: max(item[1]))
        default = self.reports[0].settings["max_dead_fraction"].value
        limit = _rounded(max(values) * _MARGIN)
        if not (max(values) >= _LEAST_DEAD and limit < default - 0.1):
            return {}
        low, high = percent(min(values)), percent(max(values))
        span = high if low == high else f"{low} to {high}"
        text = f"{plural(self.seeds, 'seed')}: {span} of {where}'s units are dead at initialisation"
        return {"max_dead_fraction": (text, limit)}


def _rounded(value: float) -> float:
    """Return the next number of two digits above."""
    if value <= 0:
        return 0.0
    digits = 1 - math.floor(math.log10(value))
    return float(round(math.ceil(value * 10**digits) / 10**digits, max(digits, 0)))


def _setting(report: HealthReport, violation: Violation) -> str | None:
    for check in report.settings.checks:
        for setting in check.settings if check.name == violation.check else ():
            if report.settings[setting.name].value == violation.limit:
                return setting.name
    return None


def measured(make: Any, seeds: int) -> Measured:
    """Inspect what `make` makes in both modes under each of the first `seeds` seeds.

    Args:
        make: called without arguments; returns a tuple as ``ModelHealthSuite.make``.
        seeds: how many.

    Raises:
        Exception: whatever the user's model raises.
    """
    reports: dict[bool, list[HealthReport]] = {True: [], False: []}
    for seed in range(seeds):
        with seeded(seed):
            model, inputs, target, loss = four(make())
        for training, kept in reports.items():
            with seeded(seed), in_mode(model, training):
                inspector = Inspector(model, probes=True if training else ("auto",))
                kept.append(inspector.run_inspection(inputs, target, loss=loss))
    return Measured(seeds, (*reports[True], *reports[False]))


def four(made: Any) -> tuple[Any, Any, Any, Any]:
    """Return model, inputs, target and loss of what a suite makes."""
    model, inputs, *rest = made
    if len(rest) == 2:
        return model, inputs, rest[0], rest[1]
    if rest and (callable(rest[0]) or isinstance(rest[0], Mapping)) and not _is_tensor(rest[0]):
        return model, inputs, None, rest[0]
    return model, inputs, None, None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from a fixed seed inside, and go on as before afterwards."""
    state = random_state()
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        restore_random_state(state)
