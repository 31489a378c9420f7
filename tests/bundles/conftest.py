"""Bundles of models of all sorts, saved as the plugin saves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from pytest_modelhealth.bundles.recording import HookedInspector, Ran, save
from pytest_modelhealth.report import HealthReport

Save = Callable[..., tuple[HealthReport, Path]]


@pytest.fixture
def saved(tmp_path: Path) -> Save:
    """Inspect a model and save that: returns the report and the bundle's folder."""

    def make(
        model: nn.Module,
        *args: Any,
        watch: Any = None,
        batches: bool = False,
        without: tuple[str, ...] = (),
        limit: float = 1e9,
        compiled: Any = "eager",
        settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> tuple[HealthReport, Path]:
        inspector = HookedInspector(model, compiled=compiled, **(settings or {}))
        ran = Ran(inspector, "batches" if batches else "batch", options, limit)
        inspector.hooks = SimpleNamespace(
            run=lambda _, __, run, args, options: run(*args, **options),
            before=ran.add,
            after=lambda _: ran.end(),
        )
        if watch is not None:
            inspector.watch(**watch)
        run = inspector.run_batches if batches else inspector.run_inspection
        report = run(*args, **options)
        folder = tmp_path / "bundle"
        save(folder, ran, report, None, without)
        return report, folder

    return make
