"""Start-up stays light and no module is a catch-all; scripts/check has lint-imports do the rest."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
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
    assert others == {"checks", "checks.check", "checks.catalogue", "wings"}
    every = loaded_by("from pytest_modelhealth.checks import every_check; every_check()")
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


@cache
def sources() -> dict[str, str]:
    """The text of each file of the package."""
    return {
        str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")
    }


@cache
def calls() -> set[tuple[str, bool, str, int]]:
    """Of each call of the package: file, whether of an attribute, name, number of arguments."""
    found = set()
    for file, text in sources().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found.add((file, False, node.func.id, len(node.args)))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                found.add((file, True, node.func.attr, len(node.args)))
    return found


def holders(pattern: str) -> set[str]:
    """The files of the package in which a line matches."""
    return {name for name, text in sources().items() if re.search(pattern, text)}


def callers(names: str, attributes: str = "$", *, arguments: int = 0) -> set[str]:
    """The files that call something by a name, or by an attribute, with arguments if so many."""
    return {
        file
        for file, is_attribute, name, given in calls()
        if given >= arguments and re.fullmatch(attributes if is_attribute else names, name)
    }


def test_one_place_calls_what_is_the_users() -> None:
    """A model and a step are called by `Inputs.call`, a loss by `compute_loss`.

    What is `forward` by itself passes on a call that the user's code makes of a function of
    autograd. Probes have a `forward` of `Runs`, flows one of graphs; a `step` of numbers is their
    spacing.
    """
    assert callers("model|module|net", "_model|_module|training_step|validation_step") == {
        "capture/step/batch.py"
    }
    assert callers("loss|_called", "_loss") == {"capture/step/loss.py"}
    assert callers("step", "_?step", arguments=2) == set()
    assert callers("forward") == {"probes/intervening/own_backwards.py"}
    assert callers("backward|closure") == {
        "capture/step/run.py",
        "training/stepping/givers/lightning.py",
        "training/stepping/watching.py",
    }


def test_one_guard_puts_back() -> None:
    """What a run moved is put back by `Guard`, for every kind of run."""
    guard, state = "capture/step/guard.py", "capture/step/state.py"
    assert holders(r"set_rng_state|\bsetstate\b|\.set_state\b") == {guard}
    assert holders(r"_unsafe_preserve_version_counter|\.resize_\(") == {state}
    assert holders(r"(?<!_tensor)_hooks\.clear\(|setattr\(leaf") == {guard}
    # gradients: of FSDP's whole parameters, which nobody else knows
    assert holders(r"\.grad = ") == {guard, "capture/parallel/engines.py"}
    # modes: those of a bundle that is unpacked, and of models that are made of a program
    assert holders(r"\.training = |setattr, \w+, .training") == {
        guard,
        "bundles/data.py",
        "capture/deployed/exported.py",
        "capture/deployed/model.py",
    }
    # what is held against a loaded state: a candidate, a step that is resumed, a suite's new model
    assert holders(r"\w\.load_state_dict[(,]") == {
        guard,
        "comparison/runs.py",
        "plugin/suite/equality.py",
        "training/stepping/interventions.py",
    }
    assert holders(r"cell_contents = ") == {"training/stepping/reached.py"}
