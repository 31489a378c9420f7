"""Writes a bundle, and reads it: a folder with data. Nothing of what is in it is executed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pytest_modelhealth.bundles.packing import (
    Missing,
    Packer,
    allowed,
    described,
    qualified_name,
    unpack,
)
from pytest_modelhealth.bundles.recording import Ran, kept_rules, size
from pytest_modelhealth.bundles.state import held_tensors, take, versions
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.checks import all_checks
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.training import every_check

FORMAT = "pytest-modelhealth inspection"
FORMAT_VERSION = 3
"""Raised when a key changes its name or its meaning; a reader refuses others."""

CONTENT = "inspection.pt"
REPORT = "report.json"
FAILURE = "failure.txt"
FILES = (REPORT, FAILURE, CONTENT)
"""The files of a bundle; the one without which it is none is written last."""

PARTS = ("weights", "inputs")
"""What can be left out of a bundle."""

_MEGABYTE = 1_000_000
_KEYS = frozenset(
    {"created", "versions", "test", "model", "of", "batches", "loss", "backward", "scaler"}
    | {"options", "compiled", "watch", "settings", "waivers", "own_checks", "surroundings"}
    | {"missing"}
)


class Saved(NamedTuple):
    """What a bundle on disk has.

    Args:
        missing: what is not there, and why.
        bytes: how large it is.
        left_out: parts that were left out, each with the reason.
    """

    missing: list[Missing]
    bytes: int
    left_out: dict[str, str]


def save(
    folder: Path,
    ran: Ran,
    report: HealthReport,
    test: dict[str, Any] | None,
    without: Iterable[str] = (),
) -> Saved:
    """Write a bundle into a folder that is made for it.

    Args:
        folder: the new folder.
        ran: what the report was made of; ``ran.limit`` is the most bytes of tensors to write.
        report: the report, under the settings that failed it.
        test: the test that made it: its ``id``, the ``number`` of this inspection among its own,
            counted from 1, and the ``place`` of the call, ``path:line``.
        without: parts to leave out.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    left_out = _left_out(ran, without)
    content = _content(ran, report, test, left_out)
    try:
        folder.mkdir(parents=True)
        report.to_json(folder / REPORT)
        (folder / FAILURE).write_text(report.render("failure") + "\n", encoding="utf-8")
        with (folder / CONTENT).open("wb") as file:  # a full disk is an OSError of Python's then
            torch.save(content, file)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    written = sum(path.stat().st_size for path in folder.iterdir())
    return Saved(missing_values(content), written, left_out)


def missing_values(content: Mapping[str, Any]) -> list[Missing]:
    """Return what is not there and, unlike loss and backward, no argument gives again."""
    return [m for m in content["missing"] if not m.path.startswith(("loss", "backward"))]


def _left_out(ran: Ran, without: Iterable[str]) -> dict[str, str]:
    """Return the parts to leave out: those asked for, then weights, then inputs over the limit."""
    left_out = dict.fromkeys(without, "left out as --modelhealth-replay-without asks")
    batches = [(request.inputs, request.target) for request in ran.requests]
    held = {"weights": held_tensors(ran.model), "inputs": find_tensors(batches)}
    sizes = {part: sum(map(size, held[part])) for part in PARTS if part not in left_out}
    for part in PARTS:
        total = sum(sizes.values())
        if part in sizes and total > ran.limit:
            left_out[part] = (
                f"{sizes.pop(part) / _MEGABYTE:,.1f} MB, with which the bundle is over its limit "
                f"of {ran.limit / _MEGABYTE:,.0f} MB (--modelhealth-replay-limit)"
            )
    return left_out


def _content(
    ran: Ran, report: HealthReport, test: dict[str, Any] | None, left_out: dict[str, str]
) -> dict[str, Any]:
    """Return all of a bundle but its report; what is the user's own code is named, as a string."""
    request, settings, packer = ran.requests[0], report._settings, Packer()
    batches = [_batch(ran, index, packer, left_out) for index in range(len(ran.requests))]
    model = take(ran.model, packer, left_out.get("weights", ""))
    for tensor in ran.written():
        packer.lack(tensor, "values", "the run wrote to it: what is kept is what it left")
    known = {type(check) for check in (*all_checks(), *every_check())}
    scaler, backward = request.scaler, request.backward
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "test": test,
        "model": model,
        "of": ran.of,
        "batches": batches,
        "loss": packer.loss(request.loss),
        "backward": described(backward) if callable(backward) else backward,
        "scaler": scaler
        and packer.pack((getattr(scaler, "_device", "cuda"), scaler.state_dict()), "scaler"),
        "options": packer.pack(ran.options, "options"),
        "compiled": ran.compiled,
        "watch": kept_rules(request.selection),
        "settings": {name: limit for name, limit in settings.items() if limit.origin != "default"},
        "waivers": settings.waivers,
        "own_checks": [
            qualified_name(type(check)) for check in settings.checks if type(check) not in known
        ],
        "surroundings": ran.surroundings,
        "missing": packer.missing,
    }


def _batch(ran: Ran, index: int, packer: Packer, left_out: dict[str, str]) -> dict[str, Any]:
    """Return a batch and the state of all random generators before it ran."""
    request, before = ran.requests[index], "" if ran.of == "batch" else f"batches[{index}]."
    batch = {
        name: packer.lack(value, before + name, left_out["inputs"])
        if "inputs" in left_out and value is not None
        else packer.pack(value, before + name)
        for name, value in (("inputs", request.inputs), ("target", request.target))
    }
    return batch | {"random": packer.pack(ran.states[index], f"{before}random")}


@dataclass(frozen=True)
class Bundle:
    """A bundle that was read.

    Args:
        path: its folder.
        content: all but the report, as `save` wrote it.
        report: what the report said, as `HealthReport.to_dict`.
    """

    path: Path
    content: Mapping[str, Any]
    report: Mapping[str, Any]

    def lacks(self, part: str) -> Missing | None:
        """Return the first thing under this path that is not there, if one is."""
        return next((m for m in self.content["missing"] if m.path.startswith(part)), None)


def read(path: str | os.PathLike[str]) -> Bundle:
    """Read a bundle. Tensors of a device that is not here come to the CPU.

    Args:
        path: its folder, or the `CONTENT` in it.

    Raises:
        InspectionError: there is none, it is damaged, of another version, or holds something that
            reading could execute.
    """
    if not isinstance(path, str | os.PathLike):
        raise InspectionError(
            f"replay takes the path of a bundle, such as 'health/test_x-1a2b3c4d', not {path!r}"
        )
    folder = Path(path)
    folder = folder.parent if folder.name == CONTENT else folder
    try:
        there = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise InspectionError(f"no bundle can be read at {folder}: {error.strerror}") from None
    for name in (CONTENT, REPORT):
        if (folder / name).is_symlink():
            raise InspectionError(f"{folder / name} is a link, and a bundle holds its own files")
        if not (folder / name).is_file():
            raise InspectionError(
                f"{folder} is no whole bundle: {name} is missing (found: "
                f"{', '.join(there[:5]) or 'nothing'}); copy the folder with all that is in it"
            )
    report = _report(folder / REPORT)
    return Bundle(folder, _read_content(folder / CONTENT), report)


def _read_content(path: Path) -> dict[str, Any]:
    content = _loaded(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InspectionError(f"{path} is no bundle: its format is not {FORMAT!r}")
    if (version := content.get("format_version")) != FORMAT_VERSION:
        raise InspectionError(
            f"{path.parent} is a bundle of format {version}, and this pytest-modelhealth reads "
            f"format {FORMAT_VERSION}: read it with the version that wrote it"
        )
    if lacking := _KEYS - {*content}:
        raise _damaged(path, f"{', '.join(sorted(lacking))} is missing")
    try:
        content["batches"] = [
            batch | {name: unpack(batch[name]) for name in ("inputs", "target")}
            for batch in content["batches"]
        ]
    except (TypeError, LookupError) as error:
        raise _damaged(path, f"its batches: {error}") from None
    return content


_DAMAGES = (OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError,
            struct.error, zipfile.BadZipFile)  # fmt: skip
"""What torch.load raises for a file that was cut or edited."""


def _loaded(path: Path) -> Any:
    if not zipfile.is_zipfile(path):  # which torch would read as a pickle alone
        raise _damaged(path, "it is no archive that torch.save made")
    try:
        with torch.serialization.safe_globals(allowed()):
            return torch.load(path, map_location=_place, weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's own advice, to load it all the same, is none for a file that somebody sent
        reason = str(error).partition("WeightsUnpickler error: ")[2].partition(" by default. ")[0]
        raise InspectionError(
            f"{path} is no bundle that this pytest-modelhealth reads, and nothing of it was "
            f"executed: {reason}. Make it again where the test failed"
        ) from None
    except _DAMAGES as error:
        raise _damaged(path, str(error).partition("\n")[0]) from None


def _place(storage: Any, location: str) -> Any:
    """Return the storage on the CPU where its device is not here; ``None`` leaves it to torch."""
    is_here = not location.startswith("cuda") or torch.cuda.is_available()
    return None if is_here else storage


def _report(path: Path) -> dict[str, Any]:
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"no JSON ({error})") from None
    if not isinstance(plain, dict) or not isinstance(plain.get("layers"), list):
        raise _damaged(path, "it has no layers")
    return plain


def _damaged(path: Path, what: str) -> InspectionError:
    return InspectionError(f"{path} is damaged: {what}; copy the bundle again")
