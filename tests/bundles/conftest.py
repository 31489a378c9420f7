"""Inspections that are saved and run again, as the plugin does both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from pytest_modelhealth.bundles.data import read
from pytest_modelhealth.bundles.inspecting import HookedInspector, Recording, replayed
from pytest_modelhealth.report import HealthReport

Save = Callable[..., tuple[HealthReport, Path]]


@pytest.fixture
def saved(tmp_path: Path) -> Save:
    """Inspect a model and save that: returns the report and the file."""

    def make(model: nn.Module, *args: Any, **options: Any) -> tuple[HealthReport, Path]:
        path = tmp_path / "bundle.pt"

        def hook(inspector: Any, run: Any, args: Any, options: Any) -> HealthReport:
            recording = Recording(inspector, args, options)
            report: HealthReport = run(*args, **options)
            recording.end()
            assert recording.is_as_it_was()
            recording.save(path, report, {"id": "test", "number": 1})
            return report

        inspector = HookedInspector(model)
        vars(inspector)["hook"] = hook
        return inspector.run_inspection(*args, **options), path

    return make


def again(path: Path, model: Any, *args: Any, **options: Any) -> tuple[HealthReport, str]:
    """Run it on another model and batch: returns the report, and what is said of it."""
    inspector = HookedInspector(model)
    vars(inspector)["hook"] = lambda inspector, run, args, options: replayed(
        read(path), inspector, run, args, options
    )
    report, lines = inspector.run_inspection(*args, **options)
    return report, "\n".join(lines)
