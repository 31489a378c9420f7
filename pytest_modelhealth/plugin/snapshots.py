"""The fixture `health_snapshot`: ``assert report == health_snapshot``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.plugin.inspections import calling_line, left_on_reports

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_modelhealth.snapshot.extension import HealthSnapshot


SNAPSHOT_CHECKS = pytest.StashKey[list[tuple[Any, Path, int]]]()
"""What came of a test's comparisons with snapshots, each with the line that made it; kept until
the test has ended."""


@pytest.fixture
def health_snapshot(request: pytest.FixtureRequest) -> HealthSnapshot:
    """The recorded statistics of a report; ``pytest --snapshot-update`` records them.

    ``assert report == health_snapshot`` fails where a layer drifted by more than the tolerance.
    ``health_snapshot(name="...")`` gives one of several in a test a name.
    """
    if not request.config.pluginmanager.hasplugin("syrupy"):
        pytest.fail(
            "health_snapshot needs the pytest plugin syrupy, which is switched off or not "
            "installed: remove -p no:syrupy, or install syrupy",
            pytrace=False,
        )
    from syrupy.assertion import SnapshotAssertion

    from pytest_modelhealth.snapshot.extension import HealthSnapshot, HealthSnapshotExtension

    # Asked for here rather than as an argument: without syrupy there is no such fixture.
    snapshot = request.getfixturevalue("snapshot")
    if not isinstance(snapshot, SnapshotAssertion):
        kind = f"{type(snapshot).__module__}.{type(snapshot).__qualname__}"
        pytest.fail(
            "health_snapshot needs syrupy's fixture `snapshot`, but another plugin or a "
            f"conftest.py gives the fixture of this name (a {kind}): rename that one, or switch "
            "its plugin off with -p no:NAME",
            pytrace=False,
        )
    settings = {f.name: getattr(snapshot, f.name) for f in dataclasses.fields(snapshot) if f.init}
    ours = HealthSnapshot(**settings | {"extension_class": HealthSnapshotExtension})
    checks = request.node.stash.setdefault(SNAPSHOT_CHECKS, [])
    ours.on_check = lambda check: checks.append((check, *calling_line()))
    return ours


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, None, None]:
    """Keep the snapshots of tests that failed or never ran from being taken for unused."""
    config = session.config
    if getattr(config, "_syrupy", None) is None:
        return (yield)
    from pytest_modelhealth.snapshot.unused import judged

    option: Any = config.option
    is_part = session.testsfailed or exitstatus or option.collectonly or getattr(option, "lf", 0)
    terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
    stats: dict[str, Any] = terminal.stats if terminal else {}
    modules = [one for one in stats.get("skipped", ()) if isinstance(one, pytest.CollectReport)]
    partial = {config.rootpath / one.nodeid for one in modules}
    partial |= {item.path for item in stats.get("deselected", ())}
    named = [one.partition("::") for one in config.args]
    partial |= {config.invocation_params.dir / path for path, colons, _ in named if colons}
    with judged(None if is_part or terminal is None else frozenset(partial)):
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was recorded and what had drifted, file by file."""
    written = left_on_reports(terminalreporter, "modelhealth_snapshots")
    if not written:
        return
    from pytest_modelhealth.rendering.notation import printable

    for one in sorted(written, key=lambda one: one["file"]):
        text = f"modelhealth: snapshot {one['file']}: {one['change']}"
        terminalreporter.write_line(printable(text))
