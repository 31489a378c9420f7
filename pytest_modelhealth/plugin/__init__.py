"""The pytest plugin, in parts: each module in this folder and in `attachments` is one.

A part is a pytest plugin of its own; ``-p no:modelhealth.<name>`` switches a destination on the
shelf `attachments` off. What an option or another plugin asks for is registered where it does. No
part imports torch, numpy or matplotlib when it loads, as pytest loads them at every start.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

_ALWAYS = ("inspections", "options", "ranks", "snapshots", "suites")
_OF_TESTS = ("attachments.evidence:terminal", "failures", "attaching")
_FIXTURES = frozenset({"health_snapshot", "inspector", "modelhealth_case", "rank"})

_OPTIONS: dict[str, tuple[str, str, str]] = {
    "--modelhealth-artifacts": (
        "attachments.artifacts",
        "DIR",
        "write figures, text and data of each unhealthy model to DIR, a folder a test",
    ),
    "--modelhealth-codequality": (
        "attachments.files:gitlab",
        "PATH",
        "write what is wrong with the models to PATH, as GitLab reads it (code quality)",
    ),
    "--modelhealth-explain": (
        "options",
        "CHECK",
        "show what is checked; or CHECK, a name or wildcard, with its limits in force; and exit",
    ),
    "--modelhealth-html": (
        "attachments.files:page",
        "PATH",
        "write what every test inspected to PATH, as one HTML file that opens without a network",
    ),
    "--modelhealth-json": (
        "attachments.files:run_json",
        "PATH",
        "write what every test inspected to PATH, as JSON for python -m pytest_modelhealth diff",
    ),
    "--modelhealth-replay": (
        "attachments.replay",
        "DIR",
        "save each failing inspection to DIR, a file each: batch, model state, random state",
    ),
    "--modelhealth-replay-from": (
        "attachments.replay",
        "FILE",
        "run the test that made this file of --modelhealth-replay on what is in it",
    ),
}
"""What loads the part beside it: a module, or one of the plugins in it."""

_OF_OTHERS = {
    "xmlpath": "junit",
    "htmlpath": "evidence:html",
    "allure_report_dir": "evidence:allure",
}

RESULTS = "modelhealth_results"
"""Under which xdist's workers are told where to write down what tests inspect."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the parts that every run needs."""
    # pytest rewrites the asserts of whatever comes with a plugin, keeps the result apart and reads
    # that ten times slower than Python its own bytecode; where none may be written, as in many
    # containers, it does so at every start. No public name switches it off.
    rewritten: set[str] = getattr(pluginmanager.rewrite_hook, "_must_rewrite", set())
    rewritten.discard("pytest_modelhealth")
    from pytest_modelhealth.plugin import attachments

    pluginmanager.add_hookspecs(attachments)
    for part in _ALWAYS:
        _register(pluginmanager, part)


def _register(pluginmanager: pytest.PytestPluginManager, part: str) -> None:
    if pluginmanager.has_plugin(_name(part)):
        return
    module, _, own = part.partition(":")
    plugin: Any = importlib.import_module(f"{__name__}.{module}")
    pluginmanager.register(plugin.PLUGINS[own] if own else plugin, _name(part))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Register what looks at each test, if one of them asks for a fixture of ours."""
    names = (getattr(item, "fixturenames", ()) for item in session.items)
    look_at_tests(session.config, is_used=not all(map(_FIXTURES.isdisjoint, names)))


def look_at_tests(config: pytest.Config, *, is_used: bool = False) -> None:
    """Register what looks at each test, once a fixture or a report of ours may be there.

    Thousands of tests without a model would pay for it.
    """
    if is_used or "pytest_modelhealth.report" in sys.modules:
        for part in _OF_TESTS:
            _register(config.pluginmanager, part)


def _name(part: str) -> str:
    return f"modelhealth.{part.replace(':', '.').rpartition('.')[2]}"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare what loads a part, unless that is switched off."""
    group = parser.getgroup("modelhealth", "model health")
    for option, (part, metavar, text) in _OPTIONS.items():
        if not pluginmanager.is_blocked(_name(part)):
            several: dict[str, Any] = {"nargs": "?", "const": ""} if metavar == "CHECK" else {}
            group.addoption(option, metavar=metavar, default=None, help=text, **several)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Register what the command line, the environment or another plugin asks for."""
    manager, given = early_config.pluginmanager, early_config.known_args_namespace
    for part in dict.fromkeys(_asked_for(vars(given))):
        _register(manager, part)
    if getattr(given, "modelhealth_replay_from", None) is not None and manager.hasplugin("xdist"):
        args += ["-n", "0"]  # one test, in this process, whatever the project's own `-n` is


def _asked_for(given: dict[str, Any]) -> Iterator[str]:
    for option, (part, *_) in _OPTIONS.items():
        if given.get(option.removeprefix("--").replace("-", "_")) is not None:
            yield part
    from pytest_modelhealth.wings import has_wing  # late: pytest rewrites what comes along here

    for dest, part in _OF_OTHERS.items():
        if given.get(dest):
            yield f"attachments.{part}"
    if os.environ.get("GITHUB_ACTIONS") == "true" and has_wing("runs"):
        yield "attachments.github"


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Record what the tests inspect if any destination asks for it."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        is_wanted = any(config.hook.pytest_modelhealth_wants_run(config=config))
    else:
        is_wanted = RESULTS in worker
    if is_wanted and not config.pluginmanager.is_blocked("modelhealth.recording"):
        from pytest_modelhealth.plugin.recording import record

        record(config)
