"""Where the class of a layer is written: ``path:line``."""

from __future__ import annotations

import linecache
import re
import sysconfig
from functools import lru_cache
from pathlib import Path

from pytest_modelhealth.report import Definition, HealthReport


def defined_at(report: HealthReport, layer: str) -> str:
    """Return ``path:line`` of the ``class`` statement of a layer's module; ``""`` if unknown.

    Where the source cannot be read, it is the first line of one of the class's functions. A
    functional layer has no class, and generated code no file.
    """
    record = report.observation.layers.get(layer)
    definitions = () if record is None else record.definitions
    known = [one for one in definitions if one.path and one.path[0] != "<"]
    lines = [(one.path, _class_line(one)) for one in known]
    lines += [(one.path, one.line) for one in known]
    return next((f"{path}:{line}" for path, line in lines if line), "")


def is_of_a_library(place: str) -> bool:
    """Whether a place lies in an installed library, torch among them, or in Python's own."""
    path = Path(place.rpartition(":")[0])
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return bool(installed) or path.is_relative_to(_STANDARD_LIBRARY)


_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


@lru_cache(maxsize=1024)
def _class_line(definition: Definition) -> int:
    """Return the line of the ``class`` statement, 0 where the file does not hold it.

    Of several by one name it is the last above the class's functions, or in the file where it has
    none. A cell of a notebook is in no file, but in the `linecache`.
    """
    statement = re.compile(rf"\s*class {re.escape(definition.qualname.rpartition('.')[2])}\b")
    lines = linecache.getlines(definition.path)[: definition.line or None]
    return max((at for at, line in enumerate(lines, 1) if statement.match(line)), default=0)
