"""Tells what a ``.pt2`` file holds: exported programs, or what AOTInductor compiled of them."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_modelhealth.errors import InspectionError

_PROGRAMS, _PACKAGES = "/models/", "/data/aotinductor/"


@dataclass(frozen=True)
class Archive:
    """The models in a file, by name.

    Args:
        programs: those that `torch.export.save` wrote.
        packages: those that AOTInductor compiled.
    """

    programs: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


def is_pt2(model: object) -> bool:
    """Whether `model` is a path to a file in which `torch.export` and AOTInductor keep models."""
    return isinstance(model, str | Path) and Path(model).suffix == ".pt2"


def archive_of(path: Any) -> Archive:
    """Return what a file holds: nothing, where it is no archive."""
    try:
        with zipfile.ZipFile(path) as file:
            names = [f"/{name.partition('/')[2]}" for name in file.namelist()]
    except (OSError, zipfile.BadZipFile):
        return Archive()
    programs = [Path(name).stem for name in names if name.startswith(_PROGRAMS)]
    packages = [name.split("/")[3] for name in names if name.startswith(_PACKAGES)]
    return Archive(_each(programs), _each(packages))


def _each(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def only_model(path: Any, names: tuple[str, ...], dictionary: str) -> str:
    """Return the name of the one model of its kind in a file.

    Args:
        path: the file.
        names: the models in it.
        dictionary: where `torch.export.pt2_archive.load_pt2` gives them.

    Raises:
        InspectionError: there are several, of which one must be chosen.
    """
    if len(names) > 1:
        raise InspectionError(
            f"{str(path)!r} holds {len(names)} models ({', '.join(map(repr, names))}): pass one, "
            f"torch.export.pt2_archive.load_pt2({str(path)!r}).{dictionary}[{names[0]!r}]"
        )
    return names[0]
