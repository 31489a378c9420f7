"""What syrupy calls: a report goes in, a file comes out, and drift explains itself."""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path, PurePosixPath
from typing import Any

from syrupy.assertion import AssertionResult, SnapshotAssertion
from syrupy.data import SnapshotCollection
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode
from syrupy.location import PyTestLocation

from pytest_modelhealth.errors import ModelHealthError, ModelHealthWarning
from pytest_modelhealth.report import HealthReport, Verdict
from pytest_modelhealth.snapshot.detection import detect_drift
from pytest_modelhealth.snapshot.drift import (
    DriftReport,
    Outcome,
    SnapshotCheck,
    explain,
    note,
    summary,
)
from pytest_modelhealth.snapshot.file_format import (
    UNKNOWN_TEST,
    SnapshotFormatError,
    dump,
    load,
)
from pytest_modelhealth.snapshot.recording import (
    another_test,
    file_of,
    merge,
    missing_profile,
    profile_of_observation,
)
from pytest_modelhealth.snapshot.snapshot import Snapshot

UNFINISHED: ContextVar[tuple[frozenset[str], list[str]]] = ContextVar("UNFINISHED")
"""The tests that did not pass in the run that is about to end, and which snapshots they keep.

syrupy deletes what no test used, and a test that failed early, or never ran because of Ctrl-C or
``-x``, used nothing.
"""


def own_id(node_id: str) -> str:
    """Return the id of a test as its snapshots hold it: without the folder, in which they lie."""
    path, _, name = node_id.partition("::")
    return f"{PurePosixPath(path).name}::{name}"


class HealthSnapshotExtension(SingleFileSnapshotExtension):
    """Keeps a `HealthReport` as a text file with the suffix ``.health``.

    `HealthSnapshot` uses it; ``snapshot.use_extension(HealthSnapshotExtension)`` works too, with
    failures in syrupy's own, shorter form and without the check that the file is this test's.
    """

    file_extension = "health"
    _write_mode = WriteMode.TEXT
    test = UNKNOWN_TEST
    profile: str | None = None
    strict_names = False
    updated: Path | None = None
    renews = False
    path = ""
    note = ""
    change = ""
    compared: tuple[Snapshot, DriftReport] | None = None

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
        if data.verdict is Verdict.UNHEALTHY:
            raise ModelHealthError(f"{data.render('failure')}\n{_REFUSAL}", data)
        file = file_of(data, self.test)
        if self.updated is not None and self.updated.exists():
            # Before anything is written, as syrupy deletes what a failed write leaves unused.
            merge(_read(self.updated), file, self.path)
        return file

    def matches(self, *, serialized_data: Any, snapshot_data: Any) -> bool:
        """Return whether the report is within the tolerances of the snapshot."""
        return not list(self.diff_lines(serialized_data, snapshot_data))

    def diff_lines(self, serialized_data: Any, snapshot_data: Any) -> Iterator[str]:
        """Yield what is different, the verdict first."""
        self.note = ""
        try:
            file = load(snapshot_data)
        except SnapshotFormatError as error:
            self.change = f"recorded anew, as it could not be read: {error}"
            yield f"the snapshot cannot be read: {error.at(self.path)}"
            yield "Restore the file from version control, or record it anew."
            return
        ((profile, snapshot),) = serialized_data.snapshots.items()
        if stranger := another_test(file.test, serialized_data.test):
            yield from stranger.split("\n")
        elif profile not in file.snapshots:
            yield missing_profile(profile, file)
        elif self.renews and snapshot.calibrated and not file.snapshots[profile].calibrated:
            self.change = "its noise was not measured before"
            yield self.change
        else:
            found = detect_drift(file.snapshots[profile], snapshot, strict_names=self.strict_names)
            self.compared = file.snapshots[profile], found
            self.note, lines = note(found), explain(found)
            self.change = summary(found) if lines else ""
            yield from lines

    def read_snapshot_data_from_location(
        self, *, snapshot_location: str, snapshot_name: str, session_id: str
    ) -> str | None:
        """Return the text of the file, ``None`` if there is none, or none of this profile."""
        try:
            # An error here would keep --snapshot-update from replacing a file that is no text.
            text = _read(Path(snapshot_location))
            file = load(text)
        except FileNotFoundError:
            return None
        except SnapshotFormatError:
            return text
        is_known = self.profile is None or self.profile in file.snapshots
        return text if is_known or another_test(file.test, self.test) else None

    @classmethod
    def write_snapshot_collection(
        cls, *, snapshot_collection: SnapshotCollection, **_options: Any
    ) -> None:
        """Write the file whole or not at all; sections of other profiles in it are kept."""
        (snapshot,) = snapshot_collection
        path = Path(snapshot_collection.location)
        data: Any = snapshot.data
        name = os.path.relpath(path)
        text = merge(_read(path), data, name) if path.exists() else dump(data)
        # syrupy leaves files with this suffix alone.
        draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def delete_snapshots(self, *, snapshot_location: str, snapshot_names: set[str]) -> None:
        """Delete a file that no test used, unless it is that of a test that did not pass."""
        path = Path(snapshot_location)
        try:
            test = load(_read(path)).test
        except SnapshotFormatError:  # its name is all there is to go by
            test = f"{path.parent.name}.py::{path.stem}"
        # A file says which of several snapshots of its test it is behind the id.
        tests, kept_ones = UNFINISHED.get((frozenset(), []))
        if any(test == one or test.startswith(f"{one} ") for one in tests):
            kept_ones.append(test)
        else:
            super().delete_snapshots(
                snapshot_location=snapshot_location, snapshot_names=snapshot_names
            )

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


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


class HealthSnapshot(SnapshotAssertion):
    """What the fixture `health_snapshot` is: syrupy's snapshot, which says more when it fails.

    ``report == health_snapshot`` is true within the tolerances. Otherwise it raises, since pytest
    cuts the explanation of a plain ``assert`` after a few lines, and never the text of an error.
    """

    strict_names = False
    on_check: Callable[[SnapshotCheck], None] | None = None
    """Told what came of each comparison."""
    _strict_once: bool | None = None

    def __call__(self, *, strict_names: bool | None = None, **options: Any) -> HealthSnapshot:
        """Set options of the comparison that follows.

        Args:
            strict_names: whether renamed, moved, retyped and inserted layers fail although no
                number changed; ``None`` as the ini file says.
            **options: those of syrupy, of which ``name=`` names one of several snapshots.
        """
        self._strict_once = strict_names
        super().__call__(**options)
        return self

    def __eq__(self, report: object) -> bool:
        """Return ``True`` if `report` is within the tolerances, or is recorded just now.

        Raises:
            ModelHealthError: it is not, there is no snapshot, its file is damaged, another test's
                or could not be read or written, or the report is unhealthy.
            TypeError: `report` is no `HealthReport`.
        """
        __tracebackhide__ = True
        self._prepare(report)
        agrees = super().__eq__(report)
        result = self.executions[self.num_executions - 1]
        if isinstance(result.exception, OSError):
            raise ModelHealthError("\n".join(self._unreached(result, result.exception)))
        if result.exception is not None:
            # Its traceback is syrupy's, and hides the line of the test.
            raise result.exception.with_traceback(None)
        text = "" if agrees else "\n".join(self._failure(result))
        self._tell(result, text)
        if not agrees:
            raise ModelHealthError(text)
        if self._ours.note:
            names = f"{self._ours.note}. {_ACCEPT_NAMES}"
            warnings.warn(names, ModelHealthWarning, stacklevel=2)
        return True

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        # pytest prints the fixtures of a failing test, and syrupy would spell out the whole file.
        return f"<health snapshot of {self.test_location.nodeid}>"

    @property
    def _ours(self) -> HealthSnapshotExtension:
        extension = self.extension
        assert isinstance(extension, HealthSnapshotExtension)
        return extension

    def _prepare(self, report: object) -> None:
        extension, updating = self._ours, self.update_snapshots
        strict = self.strict_names if self._strict_once is None else self._strict_once
        self._strict_once = None
        # The folder is left out of the id: it depends on where pytest was started.
        extension.test = own_id(self.test_location.nodeid)
        if isinstance(self.index, str):
            extension.test += f" name={self.index!r}"
        elif self.index:
            extension.test += f" number {self.index + 1}"
        extension.note = extension.change = ""
        extension.compared = None
        # An update takes new names over, and the noise where there was none.
        extension.strict_names = strict or updating
        extension.renews = updating
        location = extension.get_location(test_location=self.test_location, index=self.index)
        extension.path = os.path.relpath(location)
        is_written = updating or self.update_new_snapshots_only
        extension.updated = Path(location) if is_written else None
        if isinstance(report, HealthReport):
            extension.profile = profile_of_observation(report.observation)

    def _tell(self, result: AssertionResult, text: str) -> None:
        """Say what came of a comparison, where the report could be written down at all."""
        extension, change = self._ours, ""
        if result.created or result.updated:
            outcome = Outcome.RECORDED
            change = extension.change or f"recorded for {extension.profile}"
        elif result.success:
            outcome = Outcome.UNCHANGED
        else:
            outcome = Outcome.MISSING if extension.compared is None else Outcome.DRIFTED
        if self.on_check is not None:
            file: Any = result.asserted_data
            (now,) = file.snapshots.values()
            before, found = extension.compared or (None, None)
            path = extension.path
            self.on_check(SnapshotCheck(path, outcome, text, now, before, found, change))

    @property
    def _command(self) -> str:
        return f"pytest --snapshot-update {shlex.quote(self.test_location.nodeid)}"

    def _failure(self, result: AssertionResult) -> Iterator[str]:
        path, before, extension = self._ours.path, result.recalled_data, self._ours
        now: Any = result.asserted_data
        if before is None:
            try:
                known = _read(Path(path))
            except OSError:
                yield f"there is no snapshot {result.snapshot_name!r} yet"
            else:
                yield from extension.diff_lines(now, known)
                yield "Recording keeps these and adds a section to the file."
            yield f"To record {path}: {self._command}"
            return
        try:
            merge(str(before), now, path)
        except ModelHealthError as refusal:
            yield str(refusal)
        else:
            yield from extension.diff_lines(now, before)
            yield f"To accept this as the new {path}: {self._command}"

    def _unreached(self, result: AssertionResult, error: OSError) -> Iterator[str]:
        path = self._ours.path
        what = "read" if result.asserted_data is None else "written"
        why = f"{error.strerror or error} ({Path(path).parent})"
        yield f"the snapshot {path} could not be {what}: {why}"
        yield "Nothing was changed. When that is mended, to record it:"
        yield self._command


_ACCEPT_NAMES = "pytest --snapshot-update takes them over; strict_names=True makes this a failure"
