"""The markers `modelhealth` and `modelhealth_waive`, checked when a test is set up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_modelhealth.errors import SettingsError, suggest
from pytest_modelhealth.plugin.options import session_settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _pytest.nodes import Node

    from pytest_modelhealth.settings import Settings
    from pytest_modelhealth.settings.waiver import Waiver

SETTINGS_MARKER = "modelhealth"
WAIVER_MARKER = "modelhealth_waive"


def pytest_configure(config: pytest.Config) -> None:
    """Register both markers, which --strict-markers asks for."""
    config.addinivalue_line(
        "markers",
        f"{SETTINGS_MARKER}(**settings): thresholds and other settings of pytest-modelhealth for "
        "this test, such as max_grad_norm=10.0; the closest marker wins.",
    )
    config.addinivalue_line(
        "markers",
        f"{WAIVER_MARKER}(*layers, check=None, reason): accept violations of a check (of all "
        "checks without one) on these layers, names or shell wildcards, and say why.",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have a test whose markers are wrong end here; the others of its file run."""
    if any(item.get_closest_marker(name) for name in (SETTINGS_MARKER, WAIVER_MARKER)):
        require_settings(item)


def require_settings(item: pytest.Item) -> Settings:
    """Return what `settings_for` does, or fail the test with the text of its error alone."""
    try:
        return settings_for(item)
    except SettingsError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def settings_for(item: pytest.Item) -> Settings:
    """Return the session's settings with the markers of `item` laid over them.

    Raises:
        SettingsError: a marker has a wrong argument; the message names the test.
    """
    settings = session_settings(item.config)
    markers = list(item.iter_markers_with_node(name=SETTINGS_MARKER))
    for node, marker in reversed(markers):  # the closest comes last and wins
        origin = _origin(node, marker)
        if marker.args:
            raise SettingsError(
                f"{origin}: takes keywords only, such as max_grad_norm=10.0, "
                f"not {', '.join(map(repr, marker.args))}"
            )
        settings = settings.override(marker.kwargs, origin)
    return settings.waive(*_waivers(item))


def _waivers(item: pytest.Item) -> Iterable[Waiver]:
    for node, marker in item.iter_markers_with_node(name=WAIVER_MARKER):
        yield from _parse_waiver(marker, _origin(node, marker))


def _parse_waiver(marker: pytest.Mark, origin: str) -> list[Waiver]:
    from pytest_modelhealth.settings.waiver import Waiver

    unknown = sorted(set(marker.kwargs) - {"check", "reason"})
    if unknown:
        raise SettingsError(
            f"{origin}: unknown keyword {unknown[0]!r}{suggest(unknown[0], ('check', 'reason'))} "
            "It takes layers, check= and reason=."
        )
    if not marker.args:
        raise SettingsError(
            f"{origin}: name the layers as strings first, such as 'encoder.*'; '*' is all of them"
        )
    check, reason = marker.kwargs.get("check"), marker.kwargs.get("reason", "")
    return [Waiver(layers, check, reason, origin) for layers in marker.args]


def _origin(node: Node, marker: pytest.Mark) -> str:
    name = getattr(node, "originalname", None) or node.name  # without [parameters]
    return f"@{marker.name} on {'class ' if isinstance(node, pytest.Class) else ''}{name}"
