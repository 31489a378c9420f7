"""pre-commit, tox and nox run their recipes on a repository, with what is installed here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Project
from .project import NAN, RESIDUAL, git

RECIPES = Path(__file__).parents[2] / "recipes"
TOX = ("tox", "-e", "py3", "--skip-pkg-install", "-x", "testenv.deps=")

pytestmark = pytest.mark.slow  # each runs tools in processes of their own


def run(project: Project, *command: str) -> tuple[int, str]:
    """Run a tool in the repository, and return its exit status and what it said."""
    done = subprocess.run(
        command,
        cwd=project.root,
        env=project.variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def tool(project: Project, *command: str) -> tuple[int, str]:
    """Run a tool of Python's."""
    return run(project, sys.executable, "-m", *command)


def test_pre_commit(project: Project) -> None:
    """A commit of a model that fails does not come about; one of a text runs nothing."""
    shutil.copy(RECIPES / "pre-commit" / ".pre-commit-config.yaml", project.root)
    project.commit("Add the hook")
    status, said = tool(project, "pre_commit", "install")
    assert status == 0, said
    commit = ("git", "-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "-am", "x")

    model = project.root / "digits.py"
    model.write_text(model.read_text(encoding="utf-8").replace(*NAN), encoding="utf-8")
    status, said = run(project, *commit)
    assert status == 1, said
    assert "unhealthy: Digits" in said

    git(project.root, "checkout", "--quiet", "digits.py")
    with (project.root / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("# a remark\n")
    status, said = run(project, *commit)
    assert status == 0, said
    assert "(no files to check)Skipped" in said


def test_nox(project: Project) -> None:
    """One session tests, and `diff` tells what the branch changes, and in which layer."""
    shutil.copy(RECIPES / "noxfile.py", project.root)
    project.commit("Add sessions")
    git(project.root, "checkout", "--quiet", "-b", "change")
    project.change("digits.py", RESIDUAL, RESIDUAL.replace("x + ", ""))

    sessions = ("tests(python='3.14', torch='2.*')", "diff")
    status, said = tool(project, "nox", "--no-venv", "--no-install", "-s", *sessions)
    assert status == 0, said
    assert "modelhealth: page in " in said
    assert "blocks.0: every layer before is right, its output is not" in said


def test_tox(project: Project) -> None:
    """It runs pytest, with the plugin, in an environment of its own."""
    shutil.copy(RECIPES / "tox.ini", project.root)
    everything = f"testenv.set_env=PYTHONPATH={':'.join(filter(None, sys.path))}"
    status, said = tool(project, *TOX, "-x", everything, "--", "--modelhealth-explain")
    assert status == 0, said
    assert "pytest-modelhealth looks at the models that a test gives it" in said
