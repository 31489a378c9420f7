"""Where the class of a layer is written, and where the layer is called: ``path:line``."""

from __future__ import annotations

import ast
import linecache
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from pytest_modelhealth.report import Definition, HealthReport, LayerRecord


def defined_at(report: HealthReport, layer: str) -> str:
    """Return ``path:line`` of the ``class`` statement of a layer's module; ``""`` if unknown.

    Where the source cannot be read, it is the first line of one of the class's functions. A
    functional layer has no class, and generated code no file.
    """
    record = report.observation.layers.get(layer)
    return "" if record is None else class_place(record)


def class_place(record: LayerRecord) -> str:
    """Return `defined_at` of a layer by its record."""
    known = [found for found in record.definitions if found.path and found.path[0] != "<"]
    for definition in known:
        line = _class_line(definition)
        if line:
            return f"{definition.path}:{line}"
    return next((f"{found.path}:{found.line}" for found in known if found.line), "")


def called_at(report: HealthReport, layer: str) -> str:
    """Return ``path:line`` of the user's code that first called a layer; ``""`` if unknown."""
    return report.observation.called_at(layer)


def is_of_a_library(place: str) -> bool:
    """Whether a place lies in an installed library, torch among them, or in Python's own."""
    path = Path(place.rpartition(":")[0])
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return bool(installed) or path.is_relative_to(_STANDARD_LIBRARY)


_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def _class_line(definition: Definition) -> int:
    """Return the line of the ``class`` statement, 0 where the file does not hold it.

    Of several by one name it is the one around the class's functions, else the last.
    """
    written = _classes(definition.path).get(definition.qualname, ())
    around = [first for first, last in written if first <= definition.line <= last]
    return (around or [first for first, _ in written] or [0])[-1]


@lru_cache(maxsize=64)
def _classes(path: str) -> dict[str, list[tuple[int, int]]]:
    """Return the first and last line of each class in a file, by its qualified name.

    A cell of a notebook is in no file, but in the `linecache`.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    found: dict[str, list[tuple[int, int]]] = {}
    for name, node in _named(tree, ""):
        found.setdefault(name, []).append((node.lineno, node.end_lineno or node.lineno))
    return found


def _named(parent: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for node in ast.iter_child_nodes(parent):
        inner = prefix
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name, node
            inner = f"{prefix}{node.name}."
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{prefix}{node.name}.<locals>."
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _named(node, inner)
