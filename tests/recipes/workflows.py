"""A runner of GitHub's workflows that does as much of them as the recipes use.

Each ``run`` goes to ``bash -e`` in the checkout, with the variables and files that GitHub's runner
gives it. Of the actions, those that hand artifacts from job to job are done; a checkout and a
Python are there already. An expression or action that it does not know is an error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import yaml

PREPARED = ("actions/checkout@", "actions/setup-python@")


class Null:
    """What GitHub takes for a name that its contexts do not hold: nothing, and so on below."""

    def __getattr__(self, name: str) -> Null:
        return self

    def __str__(self) -> str:
        return ""


class Context(SimpleNamespace):
    """One of GitHub's contexts: `github`, `matrix` ..."""

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Context:
        """Make one of nested mappings."""
        return cls(**{k: cls.of(v) if isinstance(v, Mapping) else v for k, v in tree.items()})

    def __getattr__(self, name: str) -> Null:
        return Null()


class Ended(NamedTuple):
    """How a job went."""

    failed: bool
    """Whether a step failed."""

    summary: str
    """What its steps wrote for people."""

    log: str


class SkippedError(Exception):
    """The job's own condition does not hold."""


class Workflow:
    """A workflow, run for one event.

    Args:
        path: its file.
        root: the checkout.
        folder: for what the runner keeps: artifacts, temporary files.
        variables: the environment beside that of GitHub, with ``PATH``.
        event: `github`, as the workflow sees it.
    """

    def __init__(
        self, path: Path, root: Path, folder: Path, variables: dict[str, str], event: dict[str, Any]
    ) -> None:
        self.tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        self._root = root
        self._artifacts = folder / "artifacts"
        self._temporary = folder / "temporary"
        self._variables = variables
        self._contexts = {"github": event | {"workflow": self.tree["name"], "token": "secret"}}
        self._contexts["runner"] = {"os": "Linux", "temp": str(self._temporary)}

    def run(self, job: str, matrix: int = 0) -> Ended:
        """Run a job, in a `matrix` the row of that number.

        Raises:
            SkippedError: it is not to run for this event.
        """
        tree = self.tree["jobs"][job]
        rows = tree.get("strategy", {}).get("matrix", {}).get("include", [{}])
        contexts = self._contexts | {"matrix": rows[matrix]}
        names = {name: Context.of(context) for name, context in contexts.items()}
        if not _holds(tree.get("if", "True"), names, failed=False):
            raise SkippedError
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        summary, log = self._temporary / "summary.md", self._temporary / "log.txt"
        summary.touch()
        given = (self.tree.get("env", {}), tree.get("env", {}))
        failed = False
        with log.open("w", encoding="utf-8") as file:
            for step in tree["steps"]:
                if not _holds(step.get("if", "not failed"), names, failed=failed):
                    continue
                if "uses" in step:
                    self._act(step["uses"], _filled(step.get("with", {}), names))
                    continue
                variables = self._variables | self._of_github(summary)
                for level in (*given, step.get("env", {})):
                    variables |= _filled(level, names)
                script = _fill(step["run"], names)
                status = subprocess.run(
                    ["bash", "-e", "-c", script],
                    cwd=self._root,
                    env=variables,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                ).returncode
                failed = failed or bool(status)
        return Ended(failed, summary.read_text("utf-8"), log.read_text("utf-8"))

    def _of_github(self, summary: Path) -> dict[str, str]:
        event = self._contexts["github"]
        return {
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_EVENT_NAME": event["event_name"],
            "GITHUB_REPOSITORY": event["repository"],
            "GITHUB_STEP_SUMMARY": str(summary),
            "GITHUB_WORKSPACE": str(self._root),
            "RUNNER_TEMP": str(self._temporary),
        }

    def _act(self, action: str, given: dict[str, str]) -> None:
        if action.startswith("actions/upload-artifact@"):
            source = self._root / given["path"]
            if source.exists() or given.get("if-no-files-found") != "ignore":
                shutil.copytree(source, self._artifacts / given["name"], dirs_exist_ok=True)
        elif action.startswith("actions/download-artifact@"):
            target = self._root / given.get("path", ".")
            shutil.copytree(self._artifacts / given["name"], target, dirs_exist_ok=True)
        else:
            assert action.startswith(PREPARED), action


def _filled(tree: Mapping[str, Any], names: dict[str, Any]) -> dict[str, str]:
    return {key: _fill(str(value), names) for key, value in tree.items()}


def _fill(text: str, names: dict[str, Any]) -> str:
    return re.sub(r"\$\{\{(.*?)\}\}", lambda found: str(eval(found[1].strip(), {}, names)), text)


def _holds(condition: str, names: dict[str, Any], *, failed: bool) -> bool:
    """Whether GitHub's `condition` holds, which is Python's but for its signs."""
    code = re.sub(r"^\$\{\{(.*)\}\}$", r"\1", condition.strip()).replace("&&", " and ")
    code = re.sub(r"!(?!=)", " not ", code.replace("||", " or ")).strip()
    said = {"cancelled": lambda: False, "failure": lambda: failed, "failed": failed}
    return bool(eval(code, {}, names | said))
