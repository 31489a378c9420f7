"""A repository as a CI server checks it out, and commands that would leave the machine."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

FILES = {
    ".gitignore": """
        health
        diff
        *.json
        *.md
        .pytest_cache
        __pycache__
    """,
    "pyproject.toml": """
        [build-system]
        requires = ["setuptools"]
        build-backend = "setuptools.build_meta"

        [project]
        name = "digits"
        version = "1.0"

        [tool.pytest.ini_options]
        pythonpath = ["."]
    """,
    "digits.py": """
        import torch
        from torch import nn


        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.LayerNorm(32)
                self.linear = nn.Linear(32, 32)

            def forward(self, x):
                return x + torch.relu(self.linear(self.norm(x)))


        class Digits(nn.Module):
            def __init__(self):
                super().__init__()
                self.stem = nn.Linear(20, 32)
                self.blocks = nn.Sequential(*(Block() for _ in range(3)))
                self.head = nn.Linear(32, 10)

            def forward(self, x):
                return self.head(self.blocks(self.stem(x)))
    """,
    "tests/test_model_health.py": """
        import pytest
        import torch
        from digits import Digits


        @pytest.fixture
        def batch():
            torch.manual_seed(0)
            return torch.randn(64, 20), torch.randint(10, (64,))


        def test_digits(inspector, batch):
            inspector(Digits()).run_inspection(*batch, loss=torch.nn.functional.cross_entropy)
    """,
}
RESIDUAL = ("return x + torch.relu(", "return torch.relu(")
"""A change that loses the residuals: other numbers, and nothing wrong."""
NAN = ("return self.head(", "return self.head(float('nan') * ")
"""A change that makes the model unhealthy."""


def environment() -> dict[str, str]:
    """Return that of the tests, without what tells of the server that they run on."""
    theirs = ("GITHUB_", "CI", "PYTEST_", "RUNNER_")
    return {name: value for name, value in os.environ.items() if not name.startswith(theirs)}


class Project:
    """A repository with a branch main, and the environment in which a server's shell works in it.

    Args:
        folder: where it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.root, self.installed = folder, folder / "digits", folder / "installed.txt"
        self._commands = folder / "bin"
        self.variables = environment()
        self.variables["PATH"] = os.pathsep.join([str(self._commands), os.environ["PATH"]])
        for path in (self.root / "tests", self._commands):
            path.mkdir(parents=True)
        self.git("init", "--quiet")
        for name, text in FILES.items():
            (self.root / name).write_text(dedent(text).lstrip(), encoding="utf-8")
        self.commit("Begin")
        python, installed = shlex.quote(sys.executable), shlex.quote(str(self.installed))
        pip = f'if [[ "$*" == "-m pip "* ]]; then echo "${{@:3}}" >> {installed}'  # all is there
        self.command("python", f'{pip}; else exec {python} "$@"; fi')

    def git(self, *arguments: str) -> str:
        """Run git, apart from the settings of whoever runs the tests."""
        settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        who = [
            "-c",
            "user.name=A",
            "-c",
            "user.email=a@example.org",
            "-c",
            "init.defaultBranch=main",
        ]
        return subprocess.run(
            ["git", *who, *arguments],
            cwd=self.root,
            env=os.environ | settings,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    def command(self, name: str, line: str) -> None:
        """Put a command on ``PATH``, a line of bash."""
        path = self._commands / name
        path.write_text(f"#!/bin/bash\n{line}\n", encoding="utf-8")
        path.chmod(0o755)

    def change(self, before: str, after: str) -> None:
        """Exchange a text of the model, and commit."""
        path = self.root / "digits.py"
        text = path.read_text(encoding="utf-8")
        assert before in text
        path.write_text(text.replace(before, after), encoding="utf-8")
        self.commit(f"Exchange {before}")

    def commit(self, message: str) -> None:
        """Commit all files."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A repository with one commit on main."""
    return Project(tmp_path)
