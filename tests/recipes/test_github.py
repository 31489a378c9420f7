"""The workflows for GitHub, run step by step on a repository whose branch loses a residual."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_modelhealth.runs.difference import writers

from .conftest import Project
from .project import NAN, RESIDUAL, git
from .workflows import SkippedError, Workflow

RECIPES = Path(__file__).parents[2] / "recipes" / "github"
FORK = "other/digits"
SOURCE = "pytest-modelhealth @ git+https://github.com/OWNER/pytest-modelhealth@v0.1.0"

pytestmark = pytest.mark.slow  # each runs tools in processes of their own


def pull_request(project: Project, of: str = "me/digits") -> Workflow:
    """Return the workflow for a pull request whose branch stands in the checkout."""
    event = {"number": 7, "pull_request": {"head": {"repo": {"full_name": of}}}}
    return workflow("modelhealth.yml", project, event_name="pull_request", event=event)


def workflow(file: str, project: Project, root: Path | None = None, **event: Any) -> Workflow:
    """Return a workflow in the checkout of `project`, or in the folder `root`."""
    event = {"repository": "me/digits", "ref": "refs/pull/7/merge"} | event
    root = root or project.root
    return Workflow(RECIPES / file, root, project.folder, project.variables, event)


def merge(project: Project) -> None:
    """Make the checkout that GitHub makes of a pull request: its merge, and one commit below."""
    git(project.root, "checkout", "--quiet", "--detach", "main")
    git(project.root, "merge", "--quiet", "--no-ff", "-m", "Merge", "change")


@pytest.fixture
def branch(project: Project) -> Project:
    """The repository on a branch whose model has lost a residual."""
    git(project.root, "checkout", "--quiet", "-b", "change")
    project.change("digits.py", RESIDUAL, RESIDUAL.replace("x + ", ""))
    return project


def push(project: Project) -> None:
    """Change the branch once more: now its model makes NaN."""
    git(project.root, "checkout", "--quiet", "--force", "change")
    project.change("digits.py", *NAN)
    merge(project)


def test_a_pull_request(branch: Project) -> None:
    """Its one comment tells each push; a model that fails is annotated, told and kept."""
    theirs = {"id": 1, "user": {"login": "eve"}, "body": f"quoting {writers.MARK}"}
    branch.state |= {"comments": [theirs]}
    merge(branch)
    flow = pull_request(branch)

    diff = flow.run("diff")
    assert not diff.failed  # numbers moved; nothing is wrong
    assert "modelhealth: 1 test changed" in diff.summary
    assert not flow.run("comment").failed
    first, second = branch.state["comments"]
    assert (first, second["body"]) == (theirs, diff.summary)
    assert "blocks.0: every layer before is right, its output is not" in second["body"]

    push(branch)
    test = flow.run("test")
    assert test.failed
    assert "\n::error file=digits.py,line=" in test.log
    assert "1 test failed, 1 of 1 test inspected a model" in test.summary
    page = branch.folder / "artifacts" / "model-health-3.11" / "page.html"
    assert "test_digits" in page.read_text(encoding="utf-8")

    diff = flow.run("diff")
    assert diff.failed
    assert "::error" not in diff.log  # the other job's
    assert "**`worse: tests/" in diff.summary
    assert not flow.run("comment").failed
    assert branch.state["comments"] == [theirs, second | {"body": diff.summary}]

    installed = branch.installed.read_text(encoding="utf-8").splitlines()
    own = f"install -e . {SOURCE}"
    assert installed == [own, own, own.replace("-e", "torch==2.8.* -e"), own, own]


HOSTILE = "raise SystemExit('the code of a fork is executed')"


def test_a_fork(project: Project) -> None:
    """It gets no comment but from the base, which executes and posts nothing that it wrote.

    This one adds the first tests: there are none to compare with, and that fails nothing.
    """
    git(project.root, "rm", "--quiet", "-r", "tests")
    git(project.root, "commit", "--quiet", "-m", "Begin without tests")
    git(project.root, "checkout", "--quiet", "-b", "change")
    git(project.root, "revert", "--no-edit", "HEAD")
    merge(project)
    flow = pull_request(project, of=FORK)
    ended = flow.run("diff")
    assert not ended.failed, ended.log
    assert "`new test`" in ended.summary
    with pytest.raises(SkippedError):
        flow.run("comment")

    sent = project.folder / "artifacts" / "model-health-diff"
    made = (sent / "diff.md").read_text(encoding="utf-8")
    (sent / "diff.md").write_text("@everybody, look at https://example.org", encoding="utf-8")
    for name in ("pytest_modelhealth", "torch", "numpy"):
        (sent / f"{name}.py").write_text(HOSTILE, encoding="utf-8")
    empty = project.folder / "empty"
    empty.mkdir()
    run = {
        "event": "pull_request",
        "id": 5,
        "head_branch": "change",
        "head_sha": "c0ffee",
        "head_repository": {"full_name": FORK, "owner": {"login": "other"}},
    }
    event = {"event_name": "workflow_run", "event": {"workflow_run": run}}
    project.use_python([sys.executable])  # one that has not imported what the fork sends
    later = workflow("modelhealth-forks.yml", project, empty, **event)
    assert later.tree[True]["workflow_run"]["workflows"] == [flow.tree["name"]]

    ended = later.run("make")
    assert not ended.failed, ended.log
    assert not later.run("comment").failed
    assert project.state["comments"] == []  # it is closed
    elsewhere = {"number": 6, "from": "other:change", "head": {"sha": "beef"}}
    ours = {"number": 7, "from": "other:change", "head": {"sha": "c0ffee"}}
    project.state |= {"pulls": [elsewhere, ours]}
    project.use_python(project.warm)
    for _ in range(2):
        ended = later.run("comment")
        assert not ended.failed, ended.log
    assert [one["body"] for one in project.state["comments"]] == [made]


def test_a_base_that_does_not_run(branch: Project) -> None:
    """Where nothing can be compared, the job says so, and no comment is posted."""
    git(branch.root, "checkout", "--quiet", "main")
    (branch.root / "conftest.py").write_text("raise ValueError", encoding="utf-8")
    branch.commit("Break")
    git(branch.root, "checkout", "--quiet", "change")
    git(branch.root, "commit", "--quiet", "--allow-empty", "-m", "Nothing")
    merge(branch)
    git(branch.root, "rm", "--quiet", "--force", "conftest.py")
    git(branch.root, "commit", "--quiet", "--amend", "--no-edit")
    flow = pull_request(branch)
    ended = flow.run("diff")
    assert ended.failed
    assert "base.json: No such file" in ended.log
    assert not flow.run("comment").failed
    assert branch.state["calls"] == []
