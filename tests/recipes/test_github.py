"""The workflows for GitHub, run step by step on a repository whose branch loses a residual.

A ``run`` goes to ``bash -e`` in the checkout, with the variables and files of GitHub's runner. Of
the actions, those that hand artifacts from job to job are done; a checkout and a Python are there.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from pytest_modelhealth.runs.difference import writers

from .conftest import NAN, RESIDUAL, Project

pytestmark = pytest.mark.slow  # each step starts processes that import torch

RECIPES = Path(__file__).parents[2] / "recipes" / "github"


class Ended(NamedTuple):
    """How a job went: whether a step failed, what it wrote for people, and its log."""

    failed: bool
    summary: str
    log: str


class GitHub:
    """A server that runs workflows, with the comments and pull requests that it holds."""

    def __init__(self, project: Project) -> None:
        self.project, self.artifacts = project, project.folder / "artifacts"
        self._state, stub = project.folder / "state.json", Path(__file__).with_name("gh.py")
        self.state = {"calls": [], "comments": [], "pulls": []}
        project.command("gh", f'exec {shlex.join([sys.executable, str(stub)])} "$@"')

    @property
    def state(self) -> dict[str, Any]:
        """Calls that were made, comments, pull requests."""
        return dict(json.loads(self._state.read_text(encoding="utf-8")))

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._state.write_text(json.dumps(state), encoding="utf-8")

    def run(
        self, file: str, job: str, name: str, event: dict[str, Any], root: Path | None = None
    ) -> Ended | None:
        """Run a job of a workflow for an event; ``None`` where it is not to run.

        Args:
            file: that of the workflow.
            job: its name.
            name: of the event.
            event: what GitHub says of it.
            root: the checkout, if it is no repository.
        """
        tree, root = yaml.safe_load((RECIPES / file).read_text("utf-8")), root or self.project.root
        temporary = self.project.folder / "temporary"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        summary, log = temporary / "summary.md", temporary / "log.txt"
        summary.touch()
        job_tree = tree["jobs"][job]
        matrix = job_tree.get("strategy", {}).get("matrix", {}).get("include", [{}])[0]
        github = {"event_name": name, "event": event, "repository": "me/digits", "token": "secret"}
        contexts = {"github": github, "matrix": matrix, "runner": {"temp": str(temporary)}}
        if not _value(job_tree.get("if", "True"), contexts):
            return None
        variables = self.project.variables | {
            "GH_STATE": str(self._state),
            "GITHUB_ACTIONS": "true",
            "GITHUB_STEP_SUMMARY": str(summary),
            "GITHUB_WORKSPACE": str(root),
            "RUNNER_TEMP": str(temporary),
        }
        failed = False
        with log.open("w", encoding="utf-8") as output:
            for step in job_tree["steps"]:
                if not _value(step.get("if", "not failure()"), contexts, failed):
                    continue
                if "uses" in step:
                    self._act(step["uses"], _filled(step.get("with", {}), contexts), root)
                    continue
                levels = [one.get("env", {}) for one in (tree, job_tree, step)]
                own = {k: v for level in levels for k, v in _filled(level, contexts).items()}
                script = ["bash", "-e", "-c", _filled({"run": step["run"]}, contexts)["run"]]
                ended = subprocess.run(
                    script, cwd=root, env=variables | own, stdout=output, stderr=output
                )
                failed = failed or ended.returncode != 0
        return Ended(failed, summary.read_text("utf-8"), log.read_text("utf-8"))

    def _act(self, action: str, given: dict[str, str], root: Path) -> None:
        if action.startswith("actions/upload-artifact@"):
            if (root / given["path"]).exists():
                target = self.artifacts / given["name"]
                shutil.copytree(root / given["path"], target, dirs_exist_ok=True)
        elif action.startswith("actions/download-artifact@"):
            target = root / given.get("path", ".")
            shutil.copytree(self.artifacts / given["name"], target, dirs_exist_ok=True)
        else:
            assert action.startswith(("actions/checkout@", "actions/setup-python@")), action


def _value(expression: str, contexts: Mapping[str, Any], failed: bool = False) -> Any:
    """Return the value of an expression of GitHub's; of a name that it does not hold, nothing."""

    def looked_up(name: re.Match[str]) -> str:
        value: Any = contexts
        for part in name[0].split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return repr("" if value is None else value)

    inner = re.sub(r"^\$\{\{(.*)\}\}$", r"\1", expression.strip()).strip()
    python = re.sub(r"\b[a-z]+(?:\.[a-z_]+)+", looked_up, inner).replace("&&", "and")
    functions = {"cancelled": lambda: False, "failure": lambda: failed}
    return eval(re.sub(r"!(?!=)", "not ", python), {}, functions)


def _filled(tree: Mapping[str, Any], contexts: Mapping[str, Any]) -> dict[str, str]:
    def fill(value: object) -> str:
        return re.sub(r"\$\{\{.*?\}\}", lambda one: str(_value(one[0], contexts)), str(value))

    return {key: fill(value) for key, value in tree.items()}


@pytest.fixture
def github(project: Project) -> GitHub:
    """The server that the repository is on."""
    return GitHub(project)


def pull_request(github: GitHub, job: str, of: str = "me/digits") -> Ended | None:
    """Run a job for the pull request whose branch stands in the checkout."""
    event = {"number": 7, "pull_request": {"head": {"repo": {"full_name": of}}}}
    return github.run("modelhealth.yml", job, "pull_request", event)


def ran(github: GitHub, job: str, of: str = "me/digits") -> Ended:
    """Run a job that is to run for the pull request."""
    ended = pull_request(github, job, of)
    assert ended is not None
    return ended


def merge(project: Project) -> None:
    """Make the checkout that GitHub makes of a pull request: its merge, and one commit below."""
    project.git("clean", "--quiet", "-dfx")
    project.git("checkout", "--quiet", "--detach", "main")
    project.git("merge", "--quiet", "--no-ff", "-m", "Merge", "change")


def test_a_pull_request(github: GitHub) -> None:
    """Its one comment tells each push; a model that fails is annotated, told and kept.

    Where the base does not run, nothing can be compared: the job says so, and posts nothing.
    """
    project = github.project
    project.git("checkout", "--quiet", "-b", "change")
    project.change(*RESIDUAL)
    theirs = {"id": 1, "user": {"login": "eve"}, "body": f"quoting {writers.MARK}"}
    github.state |= {"comments": [theirs]}
    merge(project)

    diff, comment = ran(github, "diff"), ran(github, "comment")
    assert not diff.failed, diff.log  # numbers moved; nothing is wrong
    assert "modelhealth: 1 test changed" in diff.summary
    assert not comment.failed, comment.log
    first, second = github.state["comments"]
    assert (first, second["body"]) == (theirs, diff.summary)
    assert "blocks.0: every layer before is right, its output is not" in second["body"]

    project.git("checkout", "--quiet", "--force", "change")
    project.change(*NAN)
    merge(project)
    test, diff = ran(github, "test"), ran(github, "diff")
    assert test.failed
    assert "\n::error file=digits.py,line=" in test.log
    assert "1 of 1 test with a model failed" in test.summary
    page = github.artifacts / "model-health-3.11" / "page.html"
    assert "test_digits" in page.read_text(encoding="utf-8")
    assert diff.failed
    assert "::error" not in diff.log  # the other job's
    assert "**`worse: tests/" in diff.summary
    ran(github, "comment")
    assert github.state["comments"] == [theirs, second | {"body": diff.summary}]
    own = "install -e . pytest-modelhealth"
    installed = project.installed.read_text(encoding="utf-8").splitlines()
    assert installed == [own, own, own.replace("-e", "torch==2.8.* -e"), own, own]

    project.git("checkout", "--quiet", "--force", "main")
    (project.root / "conftest.py").write_text("raise ValueError", encoding="utf-8")
    project.commit("Break")
    merge(project)
    project.git("rm", "--quiet", "--force", "conftest.py")
    project.git("commit", "--quiet", "--amend", "--no-edit")
    shutil.rmtree(github.artifacts)
    calls = github.state["calls"]
    diff, comment = ran(github, "diff"), ran(github, "comment")
    assert diff.failed
    assert "base.json: No such file" in diff.log
    assert not comment.failed, comment.log
    assert github.state["calls"] == calls


def test_a_fork(github: GitHub) -> None:
    """It gets no comment but from the base, which executes and posts nothing that it wrote.

    This one adds the first tests: there are none to compare with, and that fails nothing.
    """
    project, fork = github.project, "other/digits"
    project.git("rm", "--quiet", "-r", "tests")
    project.git("commit", "--quiet", "-m", "Begin without tests")
    project.git("checkout", "--quiet", "-b", "change")
    project.git("revert", "--no-edit", "HEAD")
    merge(project)
    diff = ran(github, "diff", fork)
    assert not diff.failed, diff.log
    assert "`new test`" in diff.summary
    assert pull_request(github, "comment", fork) is None

    sent = github.artifacts / "model-health-diff"
    made = (sent / "diff.md").read_text(encoding="utf-8")
    (sent / "diff.md").write_text("@everybody, look at https://example.org", encoding="utf-8")
    for name in ("pytest_modelhealth", "torch", "numpy"):
        hostile = "raise SystemExit('the code of a fork is executed')"
        (sent / f"{name}.py").write_text(hostile, encoding="utf-8")
    empty = project.folder / "empty"
    empty.mkdir()
    head = {"full_name": fork, "owner": {"login": "other"}}
    run = {"event": "pull_request", "id": 5, "head_branch": "change", "head_sha": "c0ffee"}
    event = {"workflow_run": run | {"head_repository": head}}

    def comment() -> list[str]:
        ended = github.run("modelhealth-forks.yml", "comment", "workflow_run", event, empty)
        assert ended is not None
        assert not ended.failed, ended.log
        return [one["body"] for one in github.state["comments"]]

    assert comment() == []  # it is closed
    elsewhere = {"number": 6, "from": "other:change", "head": {"sha": "beef"}}
    ours = {"number": 7, "from": "other:change", "head": {"sha": "c0ffee"}}
    github.state |= {"pulls": [elsewhere, ours]}
    assert comment() == comment() == [made]
