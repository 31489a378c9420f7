"""Start-up stays light and no module is a catch-all; scripts/check has lint-imports do the rest."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "pytest_modelhealth"
HEAVY = {"torch", "numpy", "matplotlib"}
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}


def run_python(*arguments: str) -> str:
    """What a fresh interpreter prints, run where the package is importable."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after it ran `code`."""
    return set(run_python("-c", f"{code}; import sys; print(*sys.modules)").split())


def test_loading_the_plugin_imports_no_heavy_library() -> None:
    """A pytest run that asks for no inspector loads neither torch, numpy nor matplotlib."""
    loaded = loaded_by("import pytest_modelhealth, pytest_modelhealth.plugin")
    assert "pytest_modelhealth.plugin" in loaded
    assert not loaded & HEAVY


def test_the_catalogues_load_no_implementation() -> None:
    """To set a limit loads what declares the checks, settings and errors, and no heavy library."""
    loaded = loaded_by("from pytest_modelhealth.checks import all_checks; all_checks()")
    own = {name.split(".", 1)[1] for name in loaded if name.startswith(f"{PACKAGE.name}.")}
    others = {name for name in own if name.partition(".")[0] not in ("errors", "settings")}
    assert others == {"checks", "checks.check", "checks.catalogue"}
    every = loaded_by("from pytest_modelhealth.training import every_check; every_check()")
    inside = {"training.contract", "training.monitoring", "checks.finite"}
    assert not {f"{PACKAGE.name}.{name}" for name in inside} & every
    assert not (loaded | every) & HEAVY


def test_no_module_is_a_catch_all() -> None:
    """A module is named after what it holds."""
    modules = [path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py")]
    assert not VAGUE_NAMES & {part.strip("_") for module in modules for part in module.parts}


def test_every_module_imports_without_a_warning() -> None:
    """A fresh interpreter under `-W error` imports every module of the package."""
    paths = [path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    run_python("-W", "error", "-c", code, *names)


def holders(pattern: str) -> set[str]:
    """The files of the package in which a line matches."""
    files = {
        str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")
    }
    return {name for name, text in files.items() if re.search(pattern, text)}


def test_one_place_calls_a_model_of_the_users() -> None:
    """Whatever runs a batch says `Inputs.call`; a training step of Lightning's is no model."""
    callers = holders(r"(?<!bind)\(\*[\w.]*\bargs, \*\*[\w.]+\.kwargs\)")
    assert callers == {"capture/step/batch.py", "training/stepping/givers/lightning.py"}
    assert holders(r"\b(model|module)\(\*") == {"capture/step/batch.py"}


def test_one_place_puts_random_numbers_and_memory_back() -> None:
    """What a run moved is put back by the guard of `capture/step`, for every kind of run."""
    assert holders(r"set_rng_state|\bsetstate\b|\.set_state\b") == {"capture/step/isolation.py"}
    assert holders(r"_unsafe_preserve_version_counter|\.resize_\(") == {"capture/step/state.py"}
