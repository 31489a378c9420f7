"""Every check in words: a line each, or its limits, where they came from, and its page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import cast

from pytest_modelhealth.checks import Check
from pytest_modelhealth.settings import Setting, Settings
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
Settings of all checks, on the command line as --modelhealth-set NAME=VALUE, in
an ini file as modelhealth_NAME = VALUE, by the same NAME in a marker or a call:
"""
_LIMITS = "Limits of single checks, in the same places:"
_CONCLUSION = """\
--modelhealth-explain=dead_units    its limits, who set them, its definition
--modelhealth-explain='*'           the same of every check
"""


def overview(settings: Settings) -> list[str]:
    """Return lines that say what is judged, a sentence a check, and the names of all settings.

    A check stands with what somebody set: its severity, limits, or that it is left out.
    """
    checks = cast("tuple[Check, ...]", settings.checks)
    column = max(len(check.name) for check in checks) + 2
    lines = _INTRODUCTION.splitlines()
    for occasion in dict.fromkeys(check.occasion for check in checks):
        lines += ["", occasion]
        for check in checks:
            if check.occasion == occasion:
                lines += _entry(check.name, check.summary, column)
                for text in _changes(check, settings):
                    lines += _entry("", f"! {text}", column)
    limits = [setting.name for check in checks for setting in check.settings]
    lines += ["", *_SETTINGS.splitlines()]
    for setting in (*settings.declarations, WAIVE):
        if setting.name not in limits:
            text = f"{setting.help} (default: {setting.shown_default})"
            lines += _entry(setting.name, text, _TERM + 2)
    lines += ["", _LIMITS, *_entry("", ", ".join(limits), 0)]
    return [*lines, "", *_CONCLUSION.splitlines()]


def _changes(check: Check, settings: Settings) -> Iterator[str]:
    severity = _severity(check, settings)
    if not severity.endswith("(default)"):
        yield severity
    for setting in check.settings:
        own, *by_layer = _values(setting, settings)
        if settings[setting.name].origin != "default":
            yield f"{setting.name} = {own}"
        yield from (f"{setting.name} = {text}" for text in by_layer)


def explain(settings: Settings, checks: str = "*") -> list[str]:
    """Return lines on the checks that `checks` matches, the gravest first.

    Lines have at most `WIDTH` characters unless a single word is longer. Only a check's name stands
    at the beginning of a line.

    Raises:
        SettingsError: no check has this name.
    """
    asked = settings.override({"checks": checks, "skip_checks": []}, "--modelhealth-explain")
    shown = [
        check for check in cast("tuple[Check, ...]", settings.checks) if asked.chooses(check.name)
    ]
    return [line for check in shown for line in (*_check(check, settings), "")][:-1]


def _check(check: Check, settings: Settings) -> Iterator[str]:
    yield check.name
    yield from _entry("", check.summary, 0)
    entries = {
        "definition": check.definition,
        "source": check.source,
        "evidence": check.minimum_evidence,
        "reference": _reference(check),
        "severity": _severity(check, settings),
        "runs": _runs(check, settings) if check.is_probe else "",
        "limits": "" if check.settings else "none to set",
    }
    for term, text in entries.items():
        if text:
            yield from _entry(term, text)
    for position, setting in enumerate(check.settings):
        own, *by_layer = _values(setting, settings)
        yield from _entry("" if position else "limits", f"{setting.name} = {own}")
        for text in (setting.help, *by_layer):
            yield from _entry("", text, _TERM + 4)


def _reference(check: Check) -> str:
    """Return the page that has the definition of a check of ours."""
    is_ours = type(check).__module__.startswith("pytest_modelhealth.")
    return f"docs/reference/checks.md#{check.name}" if is_ours else ""


def _runs(check: Check, settings: Settings) -> str:
    """Return whether a probe runs, and who said so."""
    asked, limit = settings.probes(check.name), settings["probes"]
    by_itself = "where a run calls for it" if getattr(check, "automatic", False) else "no"
    words = {True: "yes", False: "no", None: by_itself}
    return f"{words[asked]}: probes = {', '.join(limit.value) or 'none'} ({limit.origin})"


def _severity(check: Check, settings: Settings) -> str:
    severity = settings.severity(check.name)
    text = f"{severity.value} ({severity.origin})"
    if settings.chooses(check.name):
        return text
    origins = {settings[name].origin for name in ("checks", "skip_checks")} - {"default"}
    return f"{text}; left out ({', '.join(sorted(origins))})"


def _values(setting: Setting, settings: Settings) -> Iterator[str]:
    """Yield the value of a setting, then those of single layers, each with its origin."""
    limit = settings[setting.name]
    yield f"{setting.show(limit.value)} ({limit.origin})"
    for special in settings.layer_limits:
        if special.setting == setting.name:
            yield f"{setting.show(special.limit.value)} by layer ({special.limit.origin})"


def _entry(term: str, text: str, column: int = _TERM) -> list[str]:
    """Return a term with a text beside it, from this column on."""
    start = " " * _INDENT + term.ljust(column)
    lines = textwrap.wrap(
        text, WIDTH, initial_indent=start, subsequent_indent=" " * (_INDENT + column),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return lines or [start.rstrip()] * bool(term)
