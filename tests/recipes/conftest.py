"""A repository as a CI server checks it out, and commands that would leave the machine."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from .project import FILES, git


def apart() -> dict[str, str]:
    """Return the environment, without what tells of the server that the tests run on."""
    theirs = ("GITHUB_", "CI", "PYTEST_", "RUNNER_")
    return {name: value for name, value in os.environ.items() if not name.startswith(theirs)}


class Project:
    """A repository with a branch main, and the environment in which a server's shell works in it.

    Args:
        folder: where it is made.
        warm: the command that has Python run a module.
    """

    def __init__(self, folder: Path, warm: Sequence[str]) -> None:
        self.folder = folder
        self.root = folder / "digits"
        self.root.mkdir()
        self.commands = folder / "bin"
        self.commands.mkdir()
        git(self.root, "init", "--quiet")
        for name, text in FILES.items():
            path = self.root / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(dedent(text).lstrip(), encoding="utf-8")
        self.commit("Begin")
        self.installed = folder / "installed.txt"
        self.warm = warm
        self.use_python(warm)
        self._state = folder / "state.json"
        self.state = {"calls": [], "comments": [], "pulls": []}
        stub = Path(__file__).with_name("stub_gh.py")
        self.command("gh", f'exec {shlex.quote(sys.executable)} {shlex.quote(str(stub))} "$@"')

    def use_python(self, runs_modules: Sequence[str]) -> None:
        """Have ``python -m pytest`` and ``-m pytest_modelhealth`` done by `runs_modules`."""
        self.command(
            "python",
            'case "$*" in',
            f'"-m pip "*) echo "${{@:3}}" >> {shlex.quote(str(self.installed))} ;;  # all is there',
            f'"-m pytest"*|"-I -m pytest"*) exec {shlex.join(runs_modules)} "$@" ;;',
            f'*) exec {shlex.quote(sys.executable)} "$@" ;;',
            "esac",
        )

    def command(self, name: str, *lines: str) -> None:
        """Put a command on ``PATH``, of lines of bash."""
        path = self.commands / name
        path.write_text("\n".join(["#!/bin/bash", *lines, ""]), encoding="utf-8")
        path.chmod(0o755)

    def change(self, file: str, before: str, after: str) -> None:
        """Exchange a text in a file, and commit."""
        path = self.root / file
        text = path.read_text(encoding="utf-8")
        assert before in text
        path.write_text(text.replace(before, after), encoding="utf-8")
        self.commit(f"Exchange {before}")

    def commit(self, message: str) -> None:
        """Commit all files."""
        git(self.root, "add", "--all")
        git(self.root, "commit", "--quiet", "--message", message)

    @property
    def variables(self) -> dict[str, str]:
        """The environment of its shell: that of the tests, without the server that these run on."""
        path = os.pathsep.join([str(self.commands), os.environ["PATH"]])
        return apart() | {"PATH": path, "GH_STATE": str(self._state)}

    @property
    def state(self) -> dict[str, Any]:
        """What the server holds: calls that were made, comments, pull requests."""
        return dict(json.loads(self._state.read_text(encoding="utf-8")))

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._state.write_text(json.dumps(state), encoding="utf-8")


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The command that runs a module where torch is imported already."""
    script = str(Path(__file__).with_name("warm_python.py"))
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket must be short
        path = str(Path(folder, "socket"))
        command = [sys.executable, script, "serve", path]
        with subprocess.Popen(command, env=apart(), stdin=subprocess.PIPE) as server:
            while not Path(path).exists():
                assert server.poll() is None
                time.sleep(0.05)
            yield [sys.executable, "-I", "-S", script, "run", path]


@pytest.fixture
def project(tmp_path: Path, warm_python: list[str]) -> Project:
    """A repository with one commit on main."""
    return Project(tmp_path, warm_python)
