"""What syrupy calls: a report goes in, a file comes out, and drift explains itself."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from syrupy.assertion import AssertionResult, SnapshotAssertion
from syrupy.data import SnapshotCollection
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode
from syrupy.location import PyTestLocation

from pytest_modelhealth.errors import ModelHealthError
from pytest_modelhealth.report import HealthReport, Verdict
from pytest_modelhealth.snapshot.drift import compare, explain
from pytest_modelhealth.snapshot.file_format import (
    SnapshotFormatError,
    dump,
    from_observation,
    load,
)

UNKNOWN_TEST = "-"
"""Stands in a snapshot that was not recorded through `HealthSnapshot`; it fits every test."""


class HealthSnapshotExtension(SingleFileSnapshotExtension):
    """Keeps a `HealthReport` as a text file with the suffix ``.health``.

    `HealthSnapshot` uses it; ``snapshot.use_extension(HealthSnapshotExtension)`` works too, with
    failures in syrupy's own, shorter form and without the check that the file is this test's.
    """

    file_extension = "health"
    _write_mode = WriteMode.TEXT
    test = UNKNOWN_TEST

    def serialize(
        self, data: Any, *, exclude: Any = None, include: Any = None, matcher: Any = None
    ) -> str:
        """Return the text of the snapshot file for `data`.

        Raises:
            ModelHealthError: the report is unhealthy.
            TypeError: `data` is no `HealthReport`, or a filter was given.
        """
        if not isinstance(data, HealthReport):
            raise TypeError(
                f"a health snapshot is compared with a HealthReport, not with "
                f"{type(data).__name__}: pass what run_inspection or run_batches returned"
            )
        if exclude is not None or include is not None:
            raise TypeError(
                "exclude and include have no effect on a health snapshot: choose its layers with "
                "inspector(model).watch(...)"
            )
        if data.verdict is Verdict.UNHEALTHY:
            raise ModelHealthError(f"{data.render('failure')}\n{_REFUSAL}")
        return dump(from_observation(data.observation, self.test))

    def matches(self, *, serialized_data: Any, snapshot_data: Any) -> bool:
        """Return whether the report is within the tolerances of the snapshot."""
        return not _differences(snapshot_data, serialized_data)

    def diff_lines(self, serialized_data: Any, snapshot_data: Any) -> Iterator[str]:
        """Yield what is different, the verdict first."""
        yield from _differences(snapshot_data, serialized_data)

    def read_snapshot_data_from_location(
        self, *, snapshot_location: str, snapshot_name: str, session_id: str
    ) -> str | None:
        """Return the text of the file, ``None`` if there is none."""
        try:
            # An error here would keep --snapshot-update from replacing a file that is no text.
            return Path(snapshot_location).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None

    @classmethod
    def write_snapshot_collection(
        cls, *, snapshot_collection: SnapshotCollection, **_options: Any
    ) -> None:
        """Write the file whole or not at all."""
        (snapshot,) = snapshot_collection
        path = Path(snapshot_collection.location)
        # syrupy leaves files with this suffix alone.
        draft = path.with_name(f"{path.name}.tmp")
        try:
            draft.write_text(str(snapshot.data), encoding="utf-8")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def matches_test_location(
        cls, *, test_location: PyTestLocation, snapshot_location: str
    ) -> bool:
        """Return whether the file is one of this test's.

        syrupy drops characters such as ``/`` from a file's name and then misses them, so that a
        parameter like ``google/bert`` would warn at each recording.
        """
        if super().matches_test_location(
            test_location=test_location, snapshot_location=snapshot_location
        ):
            return True
        path = Path(snapshot_location)
        name = cls.get_snapshot_name(test_location=test_location)
        return path.parent == Path(cls.dirname(test_location=test_location)) and (
            path.stem == name or path.stem.startswith((f"{name}.", f"{name}["))
        )


_REFUSAL = (
    "An unhealthy report equals no snapshot and is never recorded as one; the file is as it was."
)

_ANOTHER_TEST = (
    'The name of a file has no / \\ ? * : | " < >, so two parameters can share one: give each an '
    "id of its own. If the file was moved here, record it anew."
)


def _differences(before: str, now: str) -> list[str]:
    try:
        snapshot = load(before)
    except SnapshotFormatError as error:
        return [
            f"the snapshot cannot be read, {error}",
            "Restore the file from version control, or record it anew.",
        ]
    report = load(now)
    if UNKNOWN_TEST not in (snapshot.test, report.test) and snapshot.test != report.test:
        return [
            f"the snapshot is of another test: {snapshot.test}, not {report.test}",
            _ANOTHER_TEST,
        ]
    return explain(compare(snapshot, report))


class HealthSnapshot(SnapshotAssertion):
    """What the fixture `health_snapshot` is: syrupy's snapshot, which says more when it fails.

    ``report == health_snapshot`` is true within the tolerances. Otherwise it raises, since pytest
    cuts the explanation of a plain ``assert`` after a few lines, and never the text of an error.
    """

    def __eq__(self, report: object) -> bool:
        """Return ``True`` if `report` is within the tolerances, or is recorded just now.

        Raises:
            ModelHealthError: it is not, there is no snapshot, its file is damaged or another
                test's, or the report is unhealthy.
            TypeError: `report` is no `HealthReport`.
            OSError: the file could not be read or written.
        """
        __tracebackhide__ = True
        if isinstance(self.extension, HealthSnapshotExtension):
            self.extension.test = self._test()
        if super().__eq__(report):
            return True
        result = self.executions[self.num_executions - 1]
        if result.exception is None:
            raise ModelHealthError("\n".join(self._failure(result)))
        # Its traceback is syrupy's, and hides the line of the test.
        raise result.exception.with_traceback(None)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        # pytest prints the fixtures of a failing test, and syrupy would spell out the whole file.
        return f"<health snapshot of {self.test_location.nodeid}>"

    def _test(self) -> str:
        """Return the test's id and which of its snapshots this is.

        The folder is left out: it depends on where pytest was started, and the file lies in it.
        """
        path, _, name = self.test_location.nodeid.partition("::")
        test = f"{PurePosixPath(path).name}::{name}"
        if isinstance(self.index, str):
            return f"{test} name={self.index!r}"
        return f"{test} number {self.index + 1}" if self.index else test

    def _failure(self, result: AssertionResult) -> Iterator[str]:
        path = os.path.relpath(result.snapshot_location)
        command = f"pytest --snapshot-update {shlex.quote(self.test_location.nodeid)}"
        if result.recalled_data is None:
            yield f"there is no snapshot {result.snapshot_name!r} yet"
            yield f"To record {path}: {command}"
        else:
            yield from self.extension.diff_lines(result.asserted_data or "", result.recalled_data)
            yield f"To accept this as the new {path}: {command}"
