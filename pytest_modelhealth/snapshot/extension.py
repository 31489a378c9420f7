"""What syrupy calls: a report goes in, a file comes out, and drift explains itself."""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from syrupy.assertion import AssertionResult, SnapshotAssertion
from syrupy.data import SnapshotCollection
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode
from syrupy.location import PyTestLocation

from pytest_modelhealth.drafts import replacing
from pytest_modelhealth.errors import ModelHealthError, ModelHealthWarning
from pytest_modelhealth.report import HealthReport, Verdict
from pytest_modelhealth.snapshot.drift import DriftReport, Outcome, SnapshotCheck, detect_drift
from pytest_modelhealth.snapshot.file_format import (
    SnapshotFormatError,
    dump,
    load,
    merge,
    of_another,
)
from pytest_modelhealth.snapshot.snapshot import of_report


class HealthSnapshotExtension(SingleFileSnapshotExtension):
    """Keeps a `HealthReport` as a text file with the suffix ``.health`` for `HealthSnapshot`."""

    file_extension = "health"
    _write_mode = WriteMode.TEXT
    test = ""  # its id, without its folder
    path = ""  # of the file, for people
    updates = False  # whether a file that is there may be written
    takes_names = False  # whether layers by another name are, too, though no number drifted
    change = ""  # why the file is written
    found: DriftReport | None = None  # what separates the two, where they could be compared

    def serialize(
        self, data: Any, *, exclude: Any = None, include: Any = None, matcher: Any = None
    ) -> Any:
        """Return the snapshot file for `data`, with every digit until it is written.

        Raises:
            ModelHealthError: the report is unhealthy, or recording it would lose what the file
                holds of another test, another device or a later version of the plugin.
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
        self._explain = data._renderer("comparison", "drift")
        if data.verdict is Verdict.UNHEALTHY:
            raise ModelHealthError(
                f"{data.render('failure')}\nAn unhealthy report equals no snapshot and is never "
                "recorded as one; the file is as it was.",
                data,
            )
        now = of_report(data, self.test)
        if self.updates and Path(self.path).exists():
            # Before anything is written, as syrupy deletes what a failed write leaves unused.
            merge(_read(self.path), now, self.path)
        return now

    def matches(self, *, serialized_data: Any, snapshot_data: Any) -> bool:
        """Return whether the report is within the tolerances of the snapshot."""
        if list(self.diff_lines(serialized_data, snapshot_data)):
            return False
        names = self.found.harmless if self.takes_names and self.found is not None else []
        if names:
            self.change = f"every number agrees: {'; '.join(names)}"
        return not names

    def diff_lines(self, serialized_data: Any, snapshot_data: Any) -> Iterator[str]:
        """Yield what is different, the verdict first."""
        try:
            before = load(snapshot_data)
        except SnapshotFormatError as error:
            self.change = f"recorded anew, as it could not be read: {error}"
            yield f"the snapshot cannot be read: {self.path}:{error.line}: {error.message}"
            yield "Restore the file from version control, or record it anew."
            return
        if stranger := of_another(before, serialized_data):
            yield stranger
            return
        self.found = detect_drift(before, serialized_data)
        self.change = self.found.headline if self.found.drifted else ""
        yield from self._explain(self.found)

    def read_snapshot_data_from_location(
        self, *, snapshot_location: str, snapshot_name: str, session_id: str
    ) -> str | None:
        """Return the text of the file, ``None`` if there is none."""
        path = Path(snapshot_location)
        return _read(path) if path.exists() else None

    @classmethod
    def write_snapshot_collection(
        cls, *, snapshot_collection: SnapshotCollection, **_options: Any
    ) -> None:
        """Write the file whole or not at all."""
        (snapshot,) = snapshot_collection
        path = Path(snapshot_collection.location)
        data: Any = snapshot.data
        text = merge(_read(path), data, os.path.relpath(path)) if path.exists() else dump(data)
        with replacing(path, "utf-8") as file:
            file.write(text)

    @classmethod
    def matches_test_location(
        cls, *, test_location: PyTestLocation, snapshot_location: str
    ) -> bool:
        """Return whether the file is one of this test's.

        syrupy drops characters such as ``/`` from a file's name and then misses them, so that a
        parameter like ``google/bert`` would warn at each recording.
        """
        path, name = Path(snapshot_location), cls.get_snapshot_name(test_location=test_location)
        is_own = path.stem == name or path.stem.startswith((f"{name}.", f"{name}["))
        return (is_own and path.parent == Path(cls.dirname(test_location=test_location))) or (
            super().matches_test_location(
                test_location=test_location, snapshot_location=snapshot_location
            )
        )


def _read(path: str | Path) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")


class HealthSnapshot(SnapshotAssertion):
    """What the fixture `health_snapshot` is: syrupy's snapshot, which says more when it fails.

    ``report == health_snapshot`` is true within the tolerances. Otherwise it raises, since pytest
    cuts the explanation of a plain ``assert`` after a few lines, and never the text of an error.
    """

    on_check: Callable[[SnapshotCheck], None] | None = None  # told what came of each comparison

    def __eq__(self, report: object) -> bool:
        """Return ``True`` if `report` is within the tolerances, or is recorded just now.

        Raises:
            ModelHealthError: it is not, there is no snapshot, its file is damaged, another test's
                or could not be read or written, or the report is unhealthy.
            TypeError: `report` is no `HealthReport`.
        """
        __tracebackhide__ = True
        extension = self._prepared()
        agrees = super().__eq__(report)
        result = self.executions[self.num_executions - 1]
        command = f"pytest --snapshot-update {shlex.quote(self.test_location.nodeid)}"
        if isinstance(error := result.exception, OSError):
            what = "read" if result.asserted_data is None else "written"
            why = f"{error.strerror or error} ({Path(extension.path).parent})"
            raise ModelHealthError(
                f"the snapshot {extension.path} could not be {what}: {why}\n"
                f"Nothing was changed. When that is mended, to record it:\n{command}"
            )
        if error is not None:
            # Its traceback is syrupy's, and hides the line of the test.
            raise error.with_traceback(None)
        text = "" if agrees else "\n".join(_failure(extension, result, command))
        now: Any = result.asserted_data
        outcome, change = Outcome.UNCHANGED, ""
        if result.created or result.updated:
            outcome, change = Outcome.RECORDED, extension.change or f"recorded for {now.profile}"
        elif not agrees:
            outcome = Outcome.MISSING if extension.found is None else Outcome.DRIFTED
        if self.on_check is not None:
            found = extension.found
            self.on_check(SnapshotCheck(extension.path, outcome, text, now, found, change))
        if not agrees:
            raise ModelHealthError(text)
        told = "" if extension.found is None or extension.takes_names else extension.found.note
        if told:
            told += ". pytest --snapshot-update takes them over"
            warnings.warn(told, ModelHealthWarning, stacklevel=2)
        return True

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        # pytest prints the fixtures of a failing test, and syrupy would spell out the whole file.
        return f"<health snapshot of {self.test_location.nodeid}>"

    def _prepared(self) -> HealthSnapshotExtension:
        extension = self.extension
        assert isinstance(extension, HealthSnapshotExtension)
        # The folder is left out of the id: it depends on where pytest was started.
        path, _, name = self.test_location.nodeid.partition("::")
        extension.test = f"{PurePosixPath(path).name}::{name}"
        if isinstance(self.index, str):
            extension.test += f" name={self.index!r}"
        elif self.index:
            extension.test += f" number {self.index + 1}"
        location = extension.get_location(test_location=self.test_location, index=self.index)
        extension.path = os.path.relpath(location)
        extension.takes_names = self.update_snapshots
        extension.updates = self.update_snapshots or self.update_new_snapshots_only
        extension.change, extension.found = "", None
        return extension


def _failure(
    extension: HealthSnapshotExtension, result: AssertionResult, command: str
) -> Iterator[str]:
    """Yield why a report does not equal its snapshot, and what to do."""
    path, text, now = extension.path, result.recalled_data, result.asserted_data
    if text is None:
        yield f"there is no snapshot {result.snapshot_name!r} yet"
        yield f"To record {path}: {command}"
        return
    try:
        merge(str(text), now, path)  # type: ignore[arg-type]
    except ModelHealthError as refusal:
        yield str(refusal)
    else:
        yield from extension.diff_lines(now, text)
        yield f"To accept this as the new {path}: {command}"
