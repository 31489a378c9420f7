"""The shelf of destinations for a failing test's evidence: one a file, found by itself.

A destination is a pytest plugin that implements `pytest_modelhealth_attach`, and brings the options
and summary lines it needs; ``-p no:modelhealth.<name>`` switches it off. A ``conftest.py`` may
implement the hook too.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure


class Evidence:
    """What the destinations share: each part is rendered when one asks, and once.

    Args:
        report: the unhealthy report.
        explains_failure: whether the test failed because of this report; else its own exception
            stands, and this is what else was wrong.
    """

    def __init__(self, report: Any, *, explains_failure: bool) -> None:
        self.report = report
        self.explains_failure = explains_failure

    @cached_property
    def title(self) -> str:
        """The culprit and the layer before it: ``"conv2 beside conv1"``."""
        from pytest_modelhealth.rendering.evidence import culprit_and_predecessor
        from pytest_modelhealth.rendering.notation import printable

        found = culprit_and_predecessor(self.report)
        if found is None:
            return "evidence"
        records = [found.culprit, found.predecessor]
        return " beside ".join(printable(record.label) for record in records if record)

    @cached_property
    def text(self) -> str:
        """Text histograms of the culprit beside its predecessor."""
        with _warnings_ignored():
            text: str = self.report.render("evidence")
            return text

    @cached_property
    def figures(self) -> dict[str, bytes]:
        """PNG files by name, such as ``"culprit"`` and ``"gradient_flow"``; what exists."""
        from pytest_modelhealth.rendering.histogram import figures  # brings matplotlib

        with _warnings_ignored():
            return {name: _png(figure) for name, figure in figures(self.report).items()}


class ComparisonEvidence(Evidence):
    """The same of a comparison that failed: its `report` is the `Comparison`."""

    @cached_property
    def title(self) -> str:
        """The layer where the two models part."""
        from pytest_modelhealth.rendering.notation import printable

        found = self.report.first_divergence
        return "names changed" if found is None else f"{printable(found.label)} through depth"

    @cached_property
    def text(self) -> str:
        """The table of more layers around that one than the failure has; empty where it has all."""
        from pytest_modelhealth.rendering.comparison import further

        return further(self.report, max_rows=40)

    @cached_property
    def figures(self) -> dict[str, bytes]:
        """A PNG file of the error through depth."""
        from pytest_modelhealth.rendering.error_depth import figures  # brings matplotlib

        with _warnings_ignored():
            return {name: _png(figure) for name, figure in figures(self.report).items()}


@contextlib.contextmanager
def _warnings_ignored() -> Iterator[None]:
    """Under -W error a missing glyph would cost the user the figure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


@pytest.hookspec
def pytest_modelhealth_attach(
    item: pytest.Item, report: pytest.TestReport, evidence: Evidence
) -> None:
    """Attach the evidence to the report of a failing test.

    It runs where the test ran, in an xdist worker too. What it sets on `report` crosses to the
    controller and must be plain: None, bool, int, float, str and lists and dicts of them.
    """
