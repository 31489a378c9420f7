"""What a snapshot keeps of a report, recorded as text, and another report checked against it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from pytest_modelhealth import __version__
from pytest_modelhealth.errors import ModelHealthError
from pytest_modelhealth.report import HealthReport, Noises, Observation
from pytest_modelhealth.snapshot.detection import detect_drift
from pytest_modelhealth.snapshot.drift import DriftReport
from pytest_modelhealth.snapshot.file_format import (
    UNKNOWN_TEST,
    SnapshotFile,
    SnapshotFormatError,
    dump,
    load,
    profiles_in,
)
from pytest_modelhealth.snapshot.snapshot import Snapshot
from pytest_modelhealth.snapshot.tolerances import Tolerances
from pytest_modelhealth.tolerance import BFLOAT16, LOSS, TF32, coarsest_epsilon


def of_report(report: HealthReport) -> Snapshot:
    """Return what a snapshot keeps of a report, with every digit."""
    return from_observation(report.observation, report._noise)


def from_observation(observation: Observation, noise: Noises | None = None) -> Snapshot:
    """Return what a snapshot keeps of a run.

    Args:
        observation: what a run saw.
        noise: how far rounding moves each statistic; ``None`` where that was not measured.
    """
    records = sorted(
        observation.layers.values(),
        key=lambda one: math.inf if one.completed is None else one.completed,
    )
    # As a file has them: it does not say when a layer was entered, nor what is a function.
    layers = {
        record.name: replace(record, entered=place if record.calls else None, functional=False)
        for place, record in enumerate(records)
    }
    snapshot = Snapshot(
        profile=profile_of(observation),
        recorded=f"pytest-modelhealth {__version__}, torch {torch.__version__}",
        calibrated=noise is not None,
        epsilon=max(coarsest_epsilon(observation), _matmul_epsilon(observation)),
        observation=Observation(layers, observation.model_type, loss=observation.loss),
    )
    if noise is None:
        return snapshot
    return replace(snapshot, noise=Tolerances(snapshot).multiples(noise))


def profile_of(observation: Observation) -> str:
    """Return the profile of a run: its devices, and the floating dtype of most activations."""
    records = observation.layers.values()
    devices = {
        statistics.device.partition(":")[0]
        for record in records
        for role in ("activations", "parameters")
        for statistics in record.tensors(role).values()
    }
    given = [record.activations.dtype for record in records if record.activations is not None]
    floating = [dtype for dtype in given if "float" in dtype or "complex" in dtype]
    # Of equally frequent ones the first by name, so that the choice does not hang on the order.
    dtype = max(sorted(set(floating)), key=floating.count, default="")
    return " ".join([*sorted(devices), dtype]).strip() or "unknown"


def _matmul_epsilon(observation: Observation) -> float:
    """Return the machine epsilon of float32 matrix products, where torch was told to be coarser."""
    precision = torch.get_float32_matmul_precision()
    seen = [r.activations for r in observation.layers.values() if r.activations is not None]
    devices = {s.device.partition(":")[0] for s in seen if s.dtype == "float32"}
    if "cuda" in devices and precision != "highest":
        return TF32
    return BFLOAT16 if "cpu" in devices and precision == "medium" else 0.0


def record(report: HealthReport, *, test: str = UNKNOWN_TEST) -> str:
    """Return the text of the snapshot file for one report.

    Args:
        report: made by ``Inspector(model, calibrate=True)`` if its noise is to be measured.
        test: the test it belongs to.
    """
    return dump(file_of(report, test))


def file_of(report: HealthReport, test: str = UNKNOWN_TEST) -> SnapshotFile:
    """Return the snapshot file for one report, with every digit of its numbers."""
    snapshot = of_report(report)
    return SnapshotFile(test, {snapshot.profile: snapshot})


def check(text: str, report: HealthReport) -> DriftReport:
    """Return what separates a report from a recorded snapshot.

    Args:
        text: what `record` returned, or the content of a snapshot file.
        report: what is held against it.

    Raises:
        SnapshotFormatError: `text` is no snapshot, or has none for this device and dtype.
    """
    file, now = load(text), of_report(report)
    before = file.snapshots.get(now.profile)
    if before is None:
        raise SnapshotFormatError(missing_profile(now.profile, file))
    return detect_drift(before, now)


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
        old = load(old_text)
    except SnapshotFormatError as error:
        others = [profile for profile in profiles_in(old_text) if profile != now.profile]
        if error.age < 0 or (not error.age and not others):
            return dump(new)
        what = f"would lose its part for {', '.join(others)}" if others else "would overwrite it"
        raise ModelHealthError(
            f"the snapshot cannot be read: {error.at(path)}\nRecording {what}: restore the file "
            "from version control, or delete it and record anew with pytest --snapshot-update."
        ) from None
    if stranger := another_test(old.test, new.test):
        raise ModelHealthError(stranger)
    before = old.snapshots.get(now.profile)
    section = now if before is None else _updated(before, now)
    return dump(SnapshotFile(new.test, {**old.snapshots, now.profile: section}))


def another_test(old: str, new: str) -> str:
    """Return what is to be said on a file that belongs to another test; ``""`` where none does."""
    if UNKNOWN_TEST in (old, new) or old == new:
        return ""
    return (
        f"the snapshot is of another test: {old}, not {new}\n"
        'The name of a file has no / \\ ? * : | " < >, so two parameters can share one: give each '
        "an id of its own. If the file was moved or copied here, delete it and record anew with "
        "pytest --snapshot-update, which does not overwrite it."
    )


def _updated(before: Snapshot, now: Snapshot) -> Snapshot:
    """Return the section to write: `now`, with the lines of `before` that did not drift."""
    if before.epsilon != now.epsilon or (now.calibrated and not before.calibrated):
        return now
    kept = detect_drift(before, now).kept
    seen = {name: one for layer in before.layers for name, one in before.tensors[layer].items()}
    found = now.with_tensors(lambda name, one: seen[kept[name]] if name in kept else one)
    noise = {name: one for name, one in now.noise.items() if name not in kept}
    noise |= {name: before.noise[old] for name, old in kept.items() if old in before.noise}
    loss = (before if LOSS in kept else now).observation.loss
    return replace(found, noise=noise, observation=replace(found.observation, loss=loss))
