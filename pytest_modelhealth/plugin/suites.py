"""Suites: the tests of `ModelHealthSuite`, in a file or by ``--modelhealth-model``.

Nothing of it is loaded before a test file imports the class, or the option names a factory.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.errors import SettingsError
from pytest_modelhealth.plugin.options import require_wing, session_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from pytest_modelhealth.plugin.inspections import InspectorFixture
    from pytest_modelhealth.plugin.suite.case import Case

_OPTION = "--modelhealth-model"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option."""
    parser.getgroup("modelhealth", "model health").addoption(
        _OPTION,
        action="append",
        metavar="MODULE:NAME",
        default=None,
        help="run every test of ModelHealthSuite, with no test file, on what a function returns: "
        "package.module:make gives (model, inputs) or (model, inputs, target, loss), without "
        "arguments; repeatable",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Leave files alone where models are named and no file is asked for.

    Raises:
        pytest.UsageError: what runs them is missing.
    """
    given: list[str] = config.getoption(_OPTION) or []
    if given:
        require_wing("plugin.suite", _OPTION)
    if given and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args, config.args_source = [], pytest.Config.ArgsSource.ARGS


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Collect what the option names after what the arguments name."""
    report = yield
    given = collector.config.getoption(_OPTION)
    if given and isinstance(collector, pytest.Session) and report.passed:
        from pytest_modelhealth.plugin.suite.collecting import SuiteWithoutFile

        where = collector.config.invocation_params.dir
        report.result += [
            SuiteWithoutFile.from_parent(collector, path=where / name, name=name, nodeid=name)
            for name in dict.fromkeys(given)
        ]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> Generator[None, Any, Any]:
    """Refuse a suite whose attributes are wrong, and mark the tests of a sound one.

    Raises:
        pytest.Collector.CollectError: pytest prints its text alone.
    """
    made = yield
    if "pytest_modelhealth.plugin.suite.suite" not in sys.modules:  # asked for every name
        return made
    suite: Any = made.obj if isinstance(made, pytest.Class) else None
    if is_suite(suite) and suite.__test__:
        from pytest_modelhealth.plugin.suite.collecting import require_sound

        try:
            require_sound(suite, name, session_settings(collector.config))
        except SettingsError as error:
            raise collector.CollectError(str(error)) from None
    for item in made if isinstance(made, list) else []:
        if isinstance(item, pytest.Function) and is_suite(item.cls):
            _mark(item)
    return made


def is_suite(cls: object) -> bool:
    """Whether a class is a suite; where the module was not imported, there is none."""
    module = sys.modules.get("pytest_modelhealth.plugin.suite.suite")
    base = getattr(module, "ModelHealthSuite", None)
    return base is not None and isinstance(cls, type) and issubclass(cls, base)


def _mark(item: pytest.Function) -> None:
    """Give a test of a suite its place in the user's file, and what the suite says of it."""
    from pytest_modelhealth.plugin.suite.collecting import place_of

    suite: Any = item.cls
    path, line = place_of(suite)
    within = item.getmodpath()
    item.reportinfo = lambda: (path, line - 1, within)  # type: ignore[method-assign]
    reason = suite.skip.get(item.originalname)
    if item.originalname == "test_snapshot" and not reason:
        if ":" in item.nodeid.partition("::")[0]:
            reason = f"a snapshot lies beside a test file, and {_OPTION} has none"
        elif not item.config.pluginmanager.hasplugin("syrupy"):
            reason = (
                "snapshots need the pytest plugin syrupy, which is switched off or not installed"
            )
    if reason:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="class")
def _modelhealth_suite(request: pytest.FixtureRequest) -> Case | None:
    """What the tests of a suite share."""
    if not is_suite(request.cls):
        return None
    from pytest_modelhealth.plugin.suite.case import Case

    return Case(request.node)


@pytest.fixture
def modelhealth_case(
    request: pytest.FixtureRequest, inspector: InspectorFixture, _modelhealth_suite: Case | None
) -> Callable[[], None]:
    """One test of a `ModelHealthSuite`, for its own use."""
    case = _modelhealth_suite
    if case is None:
        pytest.fail(
            "modelhealth_case is for the tests of a ModelHealthSuite; others ask for inspector",
            pytrace=False,
        )
    from pytest_modelhealth.plugin.suite.verdicts import verdict_of

    case.begin(request.node, inspector)
    return partial(case.judge, verdict_of(case.test))
