"""Each recipe passes the linter of the tool that reads it, and names only what the plugin has."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pytest_modelhealth.runs.difference import writers

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
WORKFLOWS = sorted(RECIPES.glob("github/*.yml"))
FILES = sorted(
    path
    for path in (*RECIPES.glob("*.*"), *RECIPES.glob("[!.]*/*.y*ml"))
    if path.suffix in {".ini", ".py", ".yaml", ".yml"}
)

TOX_KEYS = ("commands", "deps", "set_env", "requires", "skip_missing_interpreters")
SCHEMA = ("check_jsonschema", "--builtin-schema")
LINTERS = {
    "github: schema": (*SCHEMA, "vendor.github-workflows", *WORKFLOWS),
    "gitlab: schema": (*SCHEMA, "vendor.gitlab-ci", RECIPES / "gitlab" / ".gitlab-ci.yml"),
    "pre-commit": ("pre_commit", "validate-config", *RECIPES.glob("pre-commit/.*.yaml")),
    "tox": ("tox", "config", "-c", RECIPES / "tox.ini", "-e", "ALL", "-k", *TOX_KEYS),
    "nox": ("nox", "--list-sessions", "--noxfile", RECIPES / "noxfile.py"),
}
ACTIONLINT = shutil.which("actionlint")
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def run(*command: object, text: str | None = None) -> tuple[int, str]:
    """Return the exit status and the output of `command`, which gets `text`."""
    done = subprocess.run([*map(str, command)], input=text, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("linter", LINTERS)
def test_the_tool_takes_its_file(linter: str) -> None:
    """The tool that reads a recipe, or its schema, has nothing against it."""
    status, said = run(sys.executable, "-m", *LINTERS[linter])
    assert status == 0, said
    assert "Exception" not in said  # which tox shows in place of a value


@pytest.mark.skipif(not ACTIONLINT, reason="actionlint is in no package index: its own site has it")
def test_workflows_are_sound() -> None:
    """Nothing is found by actionlint: expressions, versions and inputs of actions, the shell."""
    lint = (ACTIONLINT, "-no-color", "-shellcheck", SHELLCHECK)
    assert run(*lint, *WORKFLOWS) == (0, "")
    text = (RECIPES / "github" / "modelhealth.yml").read_text(encoding="utf-8")
    faulty = text.replace("fetch-depth", "fetch_depth").replace('"$COMMENTS"', "$COMMENTS")
    status, said = run(*lint, "-", text=faulty)
    assert status == 1
    assert "fetch_depth" in said  # and it can say so
    assert "SC2086" in said


def test_scripts_for_gitlab_are_sound() -> None:
    """Nothing is found by shellcheck in what GitLab gives to bash."""
    recipe = yaml.safe_load((RECIPES / "gitlab" / ".gitlab-ci.yml").read_text(encoding="utf-8"))
    for job in ("model-health", "health-diff"):
        script = "\n".join(recipe[job]["script"])
        given = ("--shell", "bash", "--exclude", "SC2154", "-")  # GitLab sets its variables
        assert run(SHELLCHECK, *given, text=script) == (0, "")


@pytest.mark.parametrize("recipe", FILES, ids=[path.name for path in FILES])
def test_what_a_recipe_names_exists(recipe: Path, request: pytest.FixtureRequest) -> None:
    """Options, commands, markers, destinations and extras of the plugin are there, by that name."""
    text = recipe.read_text(encoding="utf-8")
    assert text.lower().startswith("# copy to ")
    options = {f"--{name.replace('_', '-')}" for name in vars(request.config.option)}
    assert set(re.findall(r"--modelhealth-[\w-]+", text)) <= options
    markers = {line.partition("(")[0] for line in request.config.getini("markers")}
    assert set(re.findall(r"\bmodelhealth_\w+", text)) <= markers
    for name in re.findall(r"no:modelhealth\.(\w+)", text):
        assert importlib.util.find_spec(f"pytest_modelhealth.plugin.attachments.{name}")
    extras = set(importlib.metadata.metadata("pytest-modelhealth").get_all("Provides-Extra"))
    assert set(re.findall(r"pytest-modelhealth\[(\w+)\]", text)) <= extras
    assert re.findall(r"<!--.*?-->", text) in ([], [writers.MARK], [writers.MARK] * 2)
    for name, given in re.findall(r"-m pytest_modelhealth (\w+)(.*)", text):
        parser = argparse.ArgumentParser()
        importlib.import_module(f"pytest_modelhealth.commands.{name}").add_arguments(parser)
        parser.parse_args(shlex.split(given.partition("||")[0]))


def test_recipes_are_listed() -> None:
    """The page has every file, and no other."""
    page = (ROOT / "docs" / "how-to" / "recipes.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(\.\./\.\./(recipes/[^)]+)\)", page))
    assert linked == {str(path.relative_to(ROOT)) for path in FILES}


@pytest.mark.parametrize("recipe", WORKFLOWS, ids=[path.name for path in WORKFLOWS])
def test_a_workflow_may_do_what_it_must(recipe: Path) -> None:
    """Actions by the hash of a commit; a job that may write executes and parses nothing.

    The token is in the environment of its last step alone, and git keeps none where tests run.
    """
    text = recipe.read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert workflow.get("env", {}).keys() <= {"MODELHEALTH", "PIP_EXTRA_INDEX_URL"}
    for job in workflow["jobs"].values():
        rights = job.get("permissions", workflow["permissions"])
        assert "GH_TOKEN" not in job.get("env", {})
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"])
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
                assert "write" not in rights.values()
        if "write" in rights.values():
            assert rights == {"pull-requests": "write"}
            *others, last = job["steps"]
            assert "GH_TOKEN" in last["env"]
            assert not any("GH_TOKEN" in step.get("env", {}) or "run" in step for step in others)
            assert "python" not in last["run"]
    assert len(re.findall(r"uses: \S+ # v\d+\.\d+\.\d+$", text, re.MULTILINE)) == text.count(
        "uses:"
    )
