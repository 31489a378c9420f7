"""An inspector of which one inspection is that of a bundle, whatever batch it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_modelhealth.bundles.file import Bundle
from pytest_modelhealth.bundles.replaying import Again
from pytest_modelhealth.inspector import Inspector
from pytest_modelhealth.report import HealthReport


class SubstitutingInspector(Inspector):
    """Replays a bundle where its inspection was made.

    Attributes:
        bundle: what to replay.
        is_meant: called when an inspection begins; returns whether it is the bundle's.
        on_replay: called with what the report says of the replay.
    """

    bundle: Bundle
    is_meant: Callable[[], bool]
    on_replay: Callable[[list[str]], object]

    def run_inspection(self, *args: Any, **options: Any) -> HealthReport:
        """As in `Inspector`, or the bundle's."""
        if not self.is_meant():
            return super().run_inspection(*args, **options)
        given = dict(zip(("inputs", "target"), args, strict=False)) | options
        return self._replayed(given)

    def run_batches(self, *args: Any, **options: Any) -> HealthReport:
        """As in `Inspector`, or the bundle's."""
        if not self.is_meant():
            return super().run_batches(*args, **options)
        return self._replayed(options)

    def _replayed(self, given: dict[str, Any]) -> HealthReport:
        """Return the bundle's report, made with the test's own functions.

        Of its batch, it takes what the bundle lacks.
        """
        self._begin()
        content = self.bundle.content
        again = Again(
            self.bundle,
            self._model,
            self._settings,
            inputs=given.get("inputs") if content.lacks("inputs") else None,
            target=given.get("target") if content.lacks("target") else None,
            loss=given.get("loss"),
            backward=given.get("backward"),
        )
        report = again.report()
        self._note_report(report)
        self.on_replay(again.told)
        return report
