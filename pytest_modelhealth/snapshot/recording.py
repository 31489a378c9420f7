"""Recording a report as text, and checking another against it."""

from __future__ import annotations

from dataclasses import replace

from pytest_modelhealth.errors import ModelHealthError
from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.snapshot.content import from_observation
from pytest_modelhealth.snapshot.detection import detect_drift
from pytest_modelhealth.snapshot.drift import LOSS, DriftReport
from pytest_modelhealth.snapshot.file_format import (
    UNKNOWN_TEST,
    FutureFormatError,
    SnapshotFormatError,
    dump,
    load,
    load_sound,
    profiles_in,
)
from pytest_modelhealth.snapshot.snapshot import Snapshot, SnapshotFile


class Recorded(str):
    """The text of a snapshot file for one report, which still has every digit of its numbers.

    Attributes:
        file: what the text spells.
    """

    file: SnapshotFile


def record(report: HealthReport, *, test: str = UNKNOWN_TEST) -> Recorded:
    """Return the text of the snapshot file for one report.

    Args:
        report: made by ``Inspector(model, calibrate=True)`` if its noise is to be measured.
        test: the test it belongs to.
    """
    snapshot = from_observation(report.observation, report._noise)
    file = SnapshotFile(test, {snapshot.profile: snapshot})
    text = Recorded(dump(file))
    text.file = file
    return text


def file_of(text: str) -> SnapshotFile:
    """Return what a text spells, with every digit where it was just recorded.

    Raises:
        SnapshotFormatError: it spells no snapshot file.
    """
    return text.file if isinstance(text, Recorded) else load(text)


def check(text: str, report: HealthReport, *, strict_names: bool = False) -> DriftReport:
    """Return what separates a report from a recorded snapshot.

    Args:
        text: what `record` returned, or the content of a snapshot file.
        report: what is held against it.
        strict_names: whether renamed, moved, retyped and inserted layers that change no number
            count as drift.

    Raises:
        SnapshotFormatError: `text` is no snapshot, or has none for this device and dtype.
    """
    file = load(str(text))
    now = from_observation(report.observation, report._noise)
    before = file.snapshots.get(now.profile)
    if before is None:
        raise SnapshotFormatError(missing_profile(now.profile, file))
    return detect_drift(before, now, strict_names=strict_names)


def missing_profile(profile: str, file: SnapshotFile) -> str:
    """Return the sentence on a file without a section for a profile."""
    known = ", ".join(file.snapshots)
    return f"there is no snapshot for {profile} yet; the file has {known}"


def merge(old_text: str, new_text: str, path: str = "") -> str:
    """Return a snapshot file with one newly recorded section, the others kept as they were.

    Of the section itself, lines within their tolerance are kept too, so that a diff shows what
    drifted and nothing else.

    Args:
        old_text: content of the file.
        new_text: what `record` returned.
        path: the file, for messages.

    Raises:
        ModelHealthError: something would be lost that another test, another device or a later
            version of the plugin recorded.
    """
    new = file_of(new_text)
    (now,) = new.snapshots.values()
    try:
        old, problems = load_sound(old_text)
    except FutureFormatError as error:
        raise ModelHealthError(
            f"the snapshot cannot be read: {error.at(path)}\n{_UPGRADE}{_NOT_LOST}"
        ) from None
    except SnapshotFormatError:
        return new_text
    if is_of_another_test(old, new):
        raise ModelHealthError("\n".join(another_test(old, new)))
    lost = [p for p in profiles_in(old_text) if p != now.profile and p not in old.snapshots]
    if lost:
        raise ModelHealthError(
            f"the snapshot cannot be read: {problems[0].at(path)}\n"
            f"Recording would lose its part for {', '.join(lost)}. {_NOT_LOST}"
        )
    before = None if problems else old.snapshots.get(now.profile)
    section = now if before is None else _updated(before, now)
    return dump(replace(old, test=new.test, snapshots={**old.snapshots, now.profile: section}))


_UPGRADE = "Upgrade pytest-modelhealth to compare with it. "
_NOT_LOST = (
    "Recording does not overwrite it: restore the file from version control, or delete it and "
    "record anew with pytest --snapshot-update."
)


def is_of_another_test(old: SnapshotFile, new: SnapshotFile) -> bool:
    """Whether two files belong to different tests."""
    return UNKNOWN_TEST not in (old.test, new.test) and old.test != new.test


def another_test(old: SnapshotFile, new: SnapshotFile) -> list[str]:
    """Return the lines on a file that belongs to another test."""
    return [f"the snapshot is of another test: {old.test}, not {new.test}", _SHARED_NAME]


_SHARED_NAME = (
    'The name of a file has no / \\ ? * : | " < >, so two parameters can share one: give each an '
    "id of its own. If the file was moved or copied here, delete it and record anew with "
    "pytest --snapshot-update, which does not overwrite it."
)


def _updated(before: Snapshot, now: Snapshot) -> Snapshot:
    """Return the section to write: `now`, with the lines of `before` that did not drift."""
    if before.epsilon != now.epsilon or (now.calibrated and not before.calibrated):
        return now
    report = detect_drift(before, now)
    found = now.with_tensors(lambda layer, key, line: report.kept.get((layer, key), line))
    if any(drift.role == LOSS for drift in report.drifts):
        return found
    return replace(found, loss=before.loss, loss_noise=before.loss_noise)
