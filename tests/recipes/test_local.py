"""pre-commit, tox and nox run their recipes on a repository, with what is installed here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import NAN, RESIDUAL, Project

pytestmark = pytest.mark.slow  # each starts processes that import torch

RECIPES = Path(__file__).parents[2] / "recipes"
PYTHON = (sys.executable, "-m")


def run(project: Project, *command: str, status: int = 0) -> str:
    """Run a tool in the repository, and return what it said."""
    options = {"cwd": project.root, "env": project.variables, "text": True}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    assert done.returncode == status, done.stdout
    return str(done.stdout)


def test_pre_commit(project: Project) -> None:
    """A commit of a model that fails does not come about; one of a text runs nothing."""
    shutil.copy(RECIPES / "pre-commit" / ".pre-commit-config.yaml", project.root)
    project.commit("Add the hook")
    run(project, *PYTHON, "pre_commit", "install")
    commit = ("git", "-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "-am", "x")

    model = project.root / "digits.py"
    model.write_text(model.read_text(encoding="utf-8").replace(*NAN), encoding="utf-8")
    assert "unhealthy: Digits" in run(project, *commit, status=1)
    project.git("checkout", "--quiet", "digits.py")
    with (project.root / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("# a remark\n")
    assert "(no files to check)Skipped" in run(project, *commit)


def test_nox(project: Project) -> None:
    """One session tests, and `diff` tells what the branch changes, and in which layer."""
    shutil.copy(RECIPES / "noxfile.py", project.root)
    project.commit("Add sessions")
    project.git("checkout", "--quiet", "-b", "change")
    project.change(*RESIDUAL)
    sessions = ("tests(python='3.14', torch='2.*')", "diff")
    said = run(project, *PYTHON, "nox", "--no-venv", "--no-install", "-s", *sessions)
    assert "modelhealth: page in " in said
    assert "blocks.0: every layer before is right, its output is not" in said


def test_tox(project: Project) -> None:
    """It runs pytest, with the plugin, in an environment of its own."""
    shutil.copy(RECIPES / "tox.ini", project.root)
    everything = f"testenv.set_env=PYTHONPATH={':'.join(filter(None, sys.path))}"
    tox = ("tox", "-e", "py3", "--skip-pkg-install", "-x", "testenv.deps=", "-x", everything)
    said = run(project, *PYTHON, *tox, "--", "--modelhealth-explain")
    assert "pytest-modelhealth looks at the models that a test gives it" in said
