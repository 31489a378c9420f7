"""Reads a bundle. What is in it is data, and nothing of it is executed."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_modelhealth.bundles.content import (
    CONTENT,
    FORMAT,
    FORMAT_VERSION,
    REPORT,
    TENSORS,
    Content,
    from_plain,
)
from pytest_modelhealth.errors import InspectionError

if TYPE_CHECKING:
    import torch

_CODE = frozenset(
    {".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".dill", ".npy", ".npz"}
)
"""Suffixes of files whose readers may execute what they find."""
_LARGEST_TEXT = 1_000_000_000
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Bundle:
    """A bundle that was read.

    Args:
        path: its folder.
        content: all but tensors and report.
        tensors: by name, as they are in the file.
        report: what the report said, as `HealthReport.to_dict`.
    """

    path: Path
    content: Content
    tensors: Mapping[str, torch.Tensor]
    report: Mapping[str, Any]


def read(path: str | os.PathLike[str]) -> Bundle:
    """Read a bundle.

    Args:
        path: its folder, or the `CONTENT` in it.

    Raises:
        InspectionError: there is none, it is damaged, of a later version, or holds something that
            reading could execute.
    """
    if not isinstance(path, str | os.PathLike):
        raise InspectionError(
            f"replay takes the path of a bundle, such as 'health/test_x-1a2b3c4d', not {path!r}"
        )
    folder = Path(path)
    folder = folder.parent if folder.name == CONTENT else folder
    content = read_content(folder)
    report = _json(folder / REPORT)
    if not isinstance(report.get("layers"), list):
        raise _damaged(folder / REPORT, "it has no layers")
    return Bundle(folder, content, _tensors(folder / TENSORS), report)


def read_content(folder: Path) -> Content:
    """Read all of a bundle but its tensors and its report.

    Raises:
        InspectionError: as `read`.
    """
    _require_data_alone(folder)
    plain = _json(folder / CONTENT)
    if plain.get("format") != FORMAT:
        raise InspectionError(f"{folder / CONTENT} is no bundle: its format is not {FORMAT!r}")
    version = plain.get("format_version")
    if type(version) is not int or version < 1:
        raise _damaged(folder / CONTENT, f"format_version is {version!r:.60}")
    if version > FORMAT_VERSION:
        raise InspectionError(
            f"{folder} is a bundle of format {version}, and this pytest-modelhealth reads formats "
            f"up to {FORMAT_VERSION}: upgrade it here"
        )
    try:
        content: Content = from_plain(Content, plain)
    except InspectionError as error:
        raise _damaged(folder / CONTENT, str(error)) from None
    if not content.batches:
        raise _damaged(folder / CONTENT, "it has no batch")
    return content


def _require_data_alone(folder: Path) -> None:
    """Do nothing if the folder is a bundle's, and holds nothing that reading could execute.

    Raises:
        InspectionError: it is not.
    """
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise InspectionError(f"no bundle can be read at {folder}: {error.strerror}") from None
    for entry in entries:
        if entry.suffix.lower() in _CODE:
            raise InspectionError(
                f"{folder} holds {entry.name}, a kind of file that can execute code when it is "
                f"read. A bundle is data alone ({CONTENT}, {TENSORS}, {REPORT}): remove that file "
                "if you trust the rest, which is read without it"
            )
    for name in (CONTENT, TENSORS, REPORT):
        if (folder / name).is_symlink():
            raise InspectionError(f"{folder / name} is a link, and a bundle holds its own files")
        if not (folder / name).is_file():
            found = ", ".join(entry.name for entry in entries[:5]) or "nothing"
            raise InspectionError(
                f"{folder} is no whole bundle: {name} is missing (found: {found}); copy the folder "
                "with all that is in it"
            )


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_TEXT:
            raise _damaged(path, "it is larger than any that is written")
        plain = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"no JSON ({error})") from None
    except OSError as error:
        raise InspectionError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(plain, dict):
        raise _damaged(path, "it is no object")
    return plain


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _damaged(path: Path, what: str) -> InspectionError:
    return InspectionError(f"{path} is damaged: {what}; copy the bundle again")


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a file.

    Raises:
        InspectionError: it is no file of safetensors, or damaged.
    """
    _require_safetensors(path)
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise InspectionError(
            "to read a bundle takes safetensors: pip install 'pytest-modelhealth[replay]'"
        ) from None
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
        raise _damaged(path, str(error)) from None


def _require_safetensors(path: Path) -> None:
    """Do nothing if the file begins as one of safetensors does.

    Raises:
        InspectionError: it is something else, such as a pickle.
    """
    with path.open("rb") as file:
        start, total = file.read(9), path.stat().st_size
    if start[8:] != b"{":
        for magic, what in _OTHERS.items():
            if start.startswith(magic):
                raise InspectionError(
                    f"{path} is {what}, which can execute code when it is read, and no file of "
                    "safetensors; it was not opened. Make the bundle again where the test failed"
                )
        raise _damaged(path, "it does not begin as a file of safetensors does")
    header = struct.unpack("<Q", start[:8])[0]
    if header > min(total - 8, _LARGEST_HEADER):
        raise _damaged(path, f"its header is said to be {header:,} bytes, of {total:,} in all")


_OTHERS = {b"PK\x03\x04": "a zip archive, as torch.save writes it,", b"\x80": "a pickle"}
