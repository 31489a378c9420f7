"""`--modelhealth-explain`: every check with what it stands on and what is in force."""

from __future__ import annotations

import re

import pytest

from pytest_modelhealth.settings.setting import WAIVE
from pytest_modelhealth.training import default_settings, every_check


def explained(pytester: pytest.Pytester, *options: str) -> list[str]:
    """What a run prints that explains and exits 0."""
    result = pytester.runpytest(*options)
    assert result.ret == pytest.ExitCode.OK
    return result.outlines


def test_every_check_is_explained_in_the_order_of_rank(pytester: pytest.Pytester) -> None:
    """Names stand at the margin, nothing is wider than 80 columns, no test is collected."""
    pytester.makepyfile("raise RuntimeError('collected')")
    lines = explained(pytester, "--modelhealth-explain=*")
    names = [line for line in lines if line and not line.startswith(" ")]
    assert names == [check.name for check in every_check()]
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for check in every_check():
        assert f"{check.name} {check.summary}" in text
        assert f"reference docs/reference/checks.md#{check.name}" in text
        for setting in check.settings:
            assert f"{setting.name} = {setting.shown_default} (default) {setting.help}" in text
    assert "\x1b" not in text


def test_without_a_name_every_check_is_one_sentence(pytester: pytest.Pytester) -> None:
    """By what a test does, in 80 columns, and what to type next."""
    lines = explained(pytester, "--modelhealth-explain")
    text = " ".join(" ".join(lines).split())
    for check in every_check():
        assert f"{check.name} {check.summary}" in text
        assert check.occasion in lines
    for setting in (*default_settings().declarations, WAIVE):
        assert re.search(rf"\b{setting.name}\b", text), setting.name
    assert max(map(len, lines)) <= 80
    assert "--modelhealth-explain=dead_units" in text


def test_what_is_in_force_is_shown_with_its_origin(pytester: pytest.Pytester) -> None:
    """Limits, limits by layer, severity and what is left out each say who set them."""
    pytester.makeini(
        "[pytest]\n"
        "modelhealth_max_dead_fraction = 0.25\n"
        "modelhealth_thresholds =\n"
        "    embed*: max_dead_fraction=1, min_samples=8\n"
        "modelhealth_skip_checks = dead_units\n"
    )
    options = ("--modelhealth-set", "severity=dead_*: warn", "--modelhealth-explain=dead_units")
    lines = explained(pytester, *options)
    assert [line for line in lines if line[:1].strip()] == ["dead_units"]
    text = " ".join(" ".join(lines).split())
    assert "max_dead_fraction = 0.25 (tox.ini: modelhealth_max_dead_fraction)" in text
    assert "1 by layer (tox.ini: modelhealth_thresholds for 'embed*')" in text
    assert "8 by layer (tox.ini: modelhealth_thresholds for 'embed*')" in text
    assert "warn (--modelhealth-set severity)" in text
    assert "left out (tox.ini: modelhealth_skip_checks)" in text


@pytest.mark.parametrize(
    ("asked", "suggested"),
    [
        ("dead_unit", "; did you mean 'dead_units'?"),
        ("grad", "; did you mean 'missing_gradients' or 'grad_norm' or 'averaged_gradients'?"),
        ("nope", "."),
        ("attention", "."),
    ],
)
def test_an_unknown_check_is_suggested(
    pytester: pytest.Pytester, asked: str, suggested: str
) -> None:
    """One line on stderr, exit status 4; nothing is suggested that is not like it."""
    result = pytester.runpytest(f"--modelhealth-explain={asked}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = f"unknown check {asked!r}{suggested} Known checks: "
    assert text in result.stderr.str()


@pytest.mark.parametrize("absent", ["html", "xdist", "terminalreporter", "syrupy"])
def test_it_needs_no_other_plugin(pytester: pytest.Pytester, absent: str) -> None:
    """Nor does `-n 2` hinder it, where there is xdist."""
    workers = [] if absent == "xdist" else ["-n2"]  # of which none starts
    assert explained(pytester, *workers, "-p", f"no:{absent}", "--modelhealth-explain=finite")
