"""Every check in words: a line each, or its limits, where they came from, and its page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import cast

from pytest_modelhealth.checks import Check
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import WAIVE

WIDTH = 80
_INDENT = 2
_TERM = 12

_INTRODUCTION = """\
pytest-modelhealth looks at the models that a test gives it, and at no other:

    def test_encoder(inspector):
        inspector(model).run_inspection(batch, target, loss=F.cross_entropy)

runs one batch forward and backward and fails if a layer breaks one of these
checks. It names the layer, what was measured, the limit and the likely cause.
"""
_SETTINGS = """\
Settings, on the command line as --modelhealth-set NAME=VALUE, in an ini file as
modelhealth_NAME = VALUE, by the same NAME in a marker or a call:
"""
_CONCLUSION = """\
--modelhealth-explain=dead_units    its limits, who set them, its page
--modelhealth-explain='*'           the same of every check
"""


def overview(settings: Settings) -> list[str]:
    """Return lines that say what is judged, a sentence a check, and the names of all settings."""
    checks = cast("tuple[Check, ...]", settings.checks)
    column = max(len(check.name) for check in checks) + 2
    lines = _INTRODUCTION.splitlines()
    for occasion in dict.fromkeys(check.occasion for check in checks):
        lines += ["", occasion]
        for check in (one for one in checks if one.occasion == occasion):
            lines += _entry(check.name, check.summary, column)
    names = [setting.name for setting in (*settings.declarations, WAIVE)]
    lines += ["", *_SETTINGS.splitlines(), *_entry("", ", ".join(names), 0)]
    return [*lines, "", *_CONCLUSION.splitlines()]


def explain(settings: Settings, checks: str = "*") -> list[str]:
    """Return lines on the checks that `checks` matches, the gravest first.

    Lines have at most `WIDTH` characters unless a single word is longer. Only a check's name stands
    at the beginning of a line.

    Raises:
        SettingsError: no check has this name.
    """
    asked = settings.override({"checks": checks, "skip_checks": []}, "--modelhealth-explain")
    lines: list[str] = []
    for check in cast("tuple[Check, ...]", settings.checks):
        if asked.chooses(check.name):
            lines += [*_check(check, settings), ""]
    return lines[:-1]


def _check(check: Check, settings: Settings) -> Iterator[str]:
    yield check.name
    yield from _entry("", check.summary, 0)
    is_ours = type(check).__module__.startswith("pytest_modelhealth.")
    severity = settings.severity(check.name)
    grade = f"{severity.value} ({severity.origin})"
    if not settings.chooses(check.name):
        origins = {settings[name].origin for name in ("checks", "skip_checks")} - {"default"}
        grade += f"; left out ({', '.join(sorted(origins))})"
    if is_ours:
        yield from _entry("reference", f"docs/reference/checks.md#{check.name}")
    elif check.definition:
        yield from _entry("definition", check.definition)
    yield from _entry("severity", grade)
    yield from [] if check.settings else _entry("limits", "none to set")
    for position, setting in enumerate(check.settings):
        limit = settings[setting.name]
        own = f"{setting.name} = {setting.show(limit.value)} ({limit.origin})"
        yield from _entry("" if position else "limits", own)
        yield from _entry("", setting.help, _TERM + 4)
        for layers in settings.layer_limits:
            if layers.setting == setting.name:
                shown = f"{setting.show(layers.limit.value)} by layer ({layers.limit.origin})"
                yield from _entry("", shown, _TERM + 4)


def _entry(term: str, text: str, column: int = _TERM) -> list[str]:
    """Return a term with a text beside it, from this column on."""
    start = " " * _INDENT + term.ljust(column)
    lines = textwrap.wrap(
        text, WIDTH, initial_indent=start, subsequent_indent=" " * (_INDENT + column),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return lines or [start.rstrip()] * bool(term)
