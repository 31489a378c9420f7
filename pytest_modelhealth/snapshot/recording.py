"""What a snapshot keeps of a report, and the text to write over that of another."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from pytest_modelhealth import __version__
from pytest_modelhealth.errors import ModelHealthError
from pytest_modelhealth.report import HealthReport, Noises, Observation
from pytest_modelhealth.snapshot.detection import detect_drift
from pytest_modelhealth.snapshot.file_format import SnapshotFormatError, dump, load
from pytest_modelhealth.snapshot.snapshot import Snapshot
from pytest_modelhealth.snapshot.tolerances import Tolerances
from pytest_modelhealth.tolerance import LOSS, coarsest_epsilon, product_epsilon


def of_report(report: HealthReport, test: str = "-") -> Snapshot:
    """Return what a snapshot keeps of a report, with every digit."""
    return replace(from_observation(report.observation, report._noise), test=test)


def from_observation(observation: Observation, noise: Noises | None = None) -> Snapshot:
    """Return what a snapshot keeps of a run; `noise` is ``None`` where it was not measured."""
    records = sorted(
        observation.layers.values(),
        key=lambda one: math.inf if one.completed is None else one.completed,
    )
    # As a file has them: it does not say when a layer was entered, nor what is a function.
    layers = {
        record.name: replace(record, entered=place if record.calls else None, functional=False)
        for place, record in enumerate(records)
    }
    seen = [one.activations for one in records if one.activations is not None]
    devices = {one.device.partition(":")[0] for one in seen if one.dtype == "float32"}
    products = max((product_epsilon(device) for device in devices), default=0.0)
    snapshot = Snapshot(
        test="-",
        profile=_profile(observation),
        recorded=f"pytest-modelhealth {__version__}, torch {torch.__version__}",
        calibrated=noise is not None,
        epsilon=max(coarsest_epsilon(observation), products),
        observation=Observation(layers, observation.model_type, loss=observation.loss),
    )
    if noise is None:
        return snapshot
    return replace(snapshot, noise=Tolerances(snapshot).multiples(noise))


def _profile(observation: Observation) -> str:
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


def merge(old_text: str, now: Snapshot, path: str = "") -> str:
    """Return the text to write over that of a file.

    Lines within their tolerance are kept, so that a diff shows what drifted and nothing else. The
    path is for messages.

    Raises:
        ModelHealthError: something would be lost that another test, another device or a later
            version of the plugin recorded.
    """
    try:
        before = load(old_text)
    except SnapshotFormatError as error:
        if not error.is_future:
            return dump(now)
        raise ModelHealthError(
            f"the snapshot cannot be read: {path}:{error.line}: {error.message}\nRecording would "
            "overwrite it: restore the file from version control, or delete it and record anew "
            "with pytest --snapshot-update."
        ) from None
    if stranger := of_another(before, now):
        raise ModelHealthError(stranger)
    if before.epsilon != now.epsilon or (now.calibrated and not before.calibrated):
        return dump(now)
    kept = detect_drift(before, now).kept
    seen = {name: one for layer in before.layers for name, one in before.tensors[layer].items()}
    found = now.with_tensors(lambda name, one: seen[kept[name]] if name in kept else one)
    noise = {name: one for name, one in now.noise.items() if name not in kept}
    noise |= {name: before.noise[old] for name, old in kept.items() if old in before.noise}
    loss = (before if LOSS in kept else now).observation.loss
    observation = replace(found.observation, loss=loss)
    return dump(replace(found, noise=noise, observation=observation))


def of_another(before: Snapshot, now: Snapshot) -> str:
    """Return why a file is not one of this test, device and dtype; ``""`` where it is."""
    if before.test != now.test:
        return (
            f"the snapshot is of another test: {before.test}, not {now.test}\n"
            'The name of a file has no / \\ ? * : | " < >, so two parameters can share one: give '
            "each an id of its own. If the file was moved or copied here, delete it and record "
            "anew with pytest --snapshot-update, which does not overwrite it."
        )
    if before.profile != now.profile:
        return (
            f"the snapshot is of {before.profile}, the report of {now.profile}\n"
            f'Give each a name, health_snapshot(name="{now.profile}"), or delete the file and '
            "record anew with pytest --snapshot-update, which does not overwrite it."
        )
    return ""
