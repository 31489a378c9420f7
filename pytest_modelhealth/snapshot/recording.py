"""What a snapshot keeps of a report, recorded as text, and another report checked against it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from pytest_modelhealth import __version__
from pytest_modelhealth.alignment.result import containers
from pytest_modelhealth.errors import ModelHealthError
from pytest_modelhealth.report import ROLES, HealthReport, LayerRecord, Noises, Observation
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
from pytest_modelhealth.snapshot.snapshot import (
    LayerLine,
    Snapshot,
    SnapshotFile,
    TensorLine,
    is_judged_whole,
    judges_zeros,
)
from pytest_modelhealth.snapshot.tolerances import Tolerances
from pytest_modelhealth.tolerance import BFLOAT16, TF32, coarsest_epsilon


def from_observation(observation: Observation, noise: Noises | None = None) -> Snapshot:
    """Return what a snapshot keeps of `observation`.

    Args:
        observation: what a run saw.
        noise: how far rounding moves each statistic, as an inspection measured it; ``None`` leaves
            everything but the noise of what was given to the model unknown.
    """
    records = sorted(
        observation.layers.values(),
        key=lambda one: math.inf if one.completed is None else one.completed,
    )
    holders = containers(observation.layers)
    snapshot = Snapshot(
        profile=profile_of_observation(observation),
        model=observation.model_type,
        recorded=f"pytest-modelhealth {__version__}, torch {torch.__version__}",
        calibrated=noise is not None,
        epsilon=max(coarsest_epsilon(observation), matmul_epsilon(observation)),
        loss=observation.loss,
        layers={record.name: _layer_line(record, holders) for record in records},
    )
    if noise is None:
        return snapshot
    noises, measured = Tolerances(snapshot), noise
    snapshot = replace(snapshot, loss_noise=noises.multiple_of_loss(observation.loss, noise))
    return snapshot.with_tensors(
        lambda layer, key, line: replace(line, noise=noises.multiples(layer, key, line, measured))
    )


def profile_of_observation(observation: Observation) -> str:
    """Return the profile of a run, which chooses a section of a snapshot file.

    It has the devices, and the floating dtype of most activations.
    """
    devices = {
        statistics.device.partition(":")[0]
        for record in observation.layers.values()
        for role in ("activations", "parameters")
        for statistics in record.tensors(role).values()
    }
    given = [r.activations.dtype for r in observation.layers.values() if r.activations is not None]
    floating = [dtype for dtype in given if "float" in dtype or "complex" in dtype]
    # Of equally frequent ones the first by name, so that the choice does not hang on the order.
    dtype = max(sorted(set(floating)), key=floating.count, default="")
    return " ".join([*sorted(devices), dtype]).strip() or "unknown"


def matmul_epsilon(observation: Observation) -> float:
    """Return the machine epsilon of float32 matrix products, where torch was told to be coarser."""
    precision = torch.get_float32_matmul_precision()
    seen = [r.activations for r in observation.layers.values() if r.activations is not None]
    devices = {s.device.partition(":")[0] for s in seen if s.dtype == "float32"}
    if "cuda" in devices and precision != "highest":
        return TF32
    return BFLOAT16 if "cpu" in devices and precision == "medium" else 0.0


def _layer_line(record: LayerRecord, holders: frozenset[str]) -> LayerLine:
    # What goes into a container goes into its first layer too.
    is_inner = record.name and record.name in holders
    tensors = {
        (role, own_name): TensorLine(
            dtype=s.dtype,
            shape=s.shape,
            count=s.count,
            mean=s.mean,
            std=s.std,
            min=s.min,
            max=s.max,
            zeros=s.zero_fraction if judges_zeros(role, record.name) else 0.0,
            dead=s.dead_fraction if is_judged_whole(role, record.name) else None,
            nan=s.nan_count,
            inf=s.inf_count,
        )
        for role in ROLES
        if role != "inputs" or not is_inner
        for own_name, s in record.tensors(role).items()
    }
    status, activation = record.status.value, record.activation or ""
    return LayerLine(record.type_name, status, record.calls, activation, record.tied, tensors)


def record(report: HealthReport, *, test: str = UNKNOWN_TEST) -> str:
    """Return the text of the snapshot file for one report.

    Args:
        report: made by ``Inspector(model, calibrate=True)`` if its noise is to be measured.
        test: the test it belongs to.
    """
    return dump(file_of(report, test))


def file_of(report: HealthReport, test: str = UNKNOWN_TEST) -> SnapshotFile:
    """Return the snapshot file for one report, with every digit of its numbers."""
    snapshot = from_observation(report.observation, report._noise)
    return SnapshotFile(test, {snapshot.profile: snapshot})


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
    file = load(text)
    now = from_observation(report.observation, report._noise)
    before = file.snapshots.get(now.profile)
    if before is None:
        raise SnapshotFormatError(missing_profile(now.profile, file))
    return detect_drift(before, now, strict_names=strict_names)


def missing_profile(profile: str, file: SnapshotFile) -> str:
    """Return the sentence on a file without a section for a profile."""
    known = ", ".join(file.snapshots)
    return f"there is no snapshot for {profile} yet; the file has {known}"


def merge(old_text: str, new: SnapshotFile, path: str = "") -> str:
    """Return a file's text with one newly recorded section, the others kept as they were.

    Of the section itself, lines within their tolerance are kept too, so that a diff shows what
    drifted and nothing else.

    Args:
        old_text: content of the file.
        new: what `file_of` returned.
        path: the file, for messages.

    Raises:
        ModelHealthError: something would be lost that another test, another device or a later
            version of the plugin recorded.
    """
    (now,) = new.snapshots.values()
    try:
        old, problems = load_sound(old_text)
    except FutureFormatError as error:
        raise ModelHealthError(
            f"the snapshot cannot be read: {error.at(path)}\n{_UPGRADE}{_NOT_LOST}"
        ) from None
    except SnapshotFormatError:
        return dump(new)
    if stranger := another_test(old.test, new.test):
        raise ModelHealthError(stranger)
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


def another_test(old: str, new: str) -> str:
    """Return what is to be said on a file that belongs to another test; ``""`` where none does."""
    if UNKNOWN_TEST in (old, new) or old == new:
        return ""
    return f"the snapshot is of another test: {old}, not {new}\n{_SHARED_NAME}"


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
