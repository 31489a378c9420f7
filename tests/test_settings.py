"""One name everywhere, layers that keep their origins, and a reference that tells the truth."""

from __future__ import annotations

import math
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_modelhealth.checks import default_settings, every_check
from pytest_modelhealth.errors import SettingsError
from pytest_modelhealth.settings import LAYERS, Limit, Setting, Settings, SettingValue
from pytest_modelhealth.settings.setting import Waiver, parse_waivers

RATE = Setting("rate", float, default=0.5, help="a rate", minimum=0.0, maximum=1.0)
NORM = Setting("norm", float, default=None, help="a norm", minimum=0.0)
SIZE = Setting("size", int, default=4, help="a size", maximum=9)
DEEP = Setting("deep", bool, default=False, help="a switch")
FORM = Setting("form", str, default=None, help="a form", one_of=("round", "square"))
SETTINGS = Settings((RATE, NORM, SIZE, DEEP, LAYERS))

REFERENCE = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"


def test_a_later_layer_wins_and_keeps_its_origin() -> None:
    """Each value remembers who set it; untouched ones come from the defaults."""
    settings = SETTINGS.override({"rate": 0.1, "size": 5}, "ini").override({"rate": 0.2}, "marker")
    assert settings["rate"] == Limit(0.2, "marker")
    assert settings["size"] == Limit(5, "ini")
    assert settings["norm"] == Limit(None, "default")


def test_overriding_changes_nothing_else() -> None:
    """Settings are immutable: one test's marker cannot leak into the next test."""
    before = dict(SETTINGS)
    waiver = Waiver("*", None, "why", "here")
    changed = SETTINGS.override({"rate": 0.1}, "marker").waive(waiver)
    assert dict(SETTINGS) == before
    assert SETTINGS.waivers == ()
    assert changed.waivers == (waiver,)
    assert changed.override({"size": 5}, "call").waivers == (waiver,)


def test_settings_pickle_and_compare() -> None:
    """They cross to a worker unchanged, and differ where a value, an origin or a waiver does."""
    settings = SETTINGS.override({"rate": 0.1}, "ini").waive(Waiver("a", None, "why", "here"))
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert settings != SETTINGS.override({"rate": 0.1}, "ini")
    assert SETTINGS.override({"rate": 0.1}, "ini") != SETTINGS.override({"rate": 0.1}, "marker")
    assert dict(SETTINGS) != SETTINGS


def test_repr_shows_what_was_changed() -> None:
    """Defaults are noise when one looks at settings in a debugger."""
    assert "norm" not in repr(SETTINGS.override({"rate": 0.1}, "ini"))
    assert "rate" in repr(SETTINGS.override({"rate": 0.1}, "ini"))


ACCEPTED: list[tuple[Setting, object, SettingValue]] = [
    (RATE, 1, 1.0),
    (RATE, 0, 0.0),
    (NORM, None, None),
    (NORM, math.inf, math.inf),
    (SIZE, -3, -3),
    (DEEP, True, True),
    (LAYERS, "a.*", ("a.*",)),
    (LAYERS, " a.*,b ", ("a.*", "b")),
    (LAYERS, ["a.*", "my block"], ("a.*", "my block")),
]


@pytest.mark.parametrize(("setting", "value", "result"), ACCEPTED)
def test_a_value_becomes_the_settings_type(
    setting: Setting, value: object, result: SettingValue
) -> None:
    """A whole number is a float where one is asked for; limits belong to their range."""
    validated = setting.validate(value, "here")
    assert validated == result
    assert type(validated) is type(result)


REFUSED: list[tuple[Setting, object, str]] = [
    (RATE, "0.5", "rate must be a number from 0 to 1, not '0.5' (str)"),
    (RATE, True, "rate must be a number from 0 to 1, not True (bool)"),
    (RATE, None, "rate must be a number from 0 to 1, not None (NoneType)"),
    (RATE, 1.5, "rate must be a number from 0 to 1, not 1.5"),
    (RATE, math.nan, "rate must be a number from 0 to 1, not nan"),
    (NORM, -1, "norm must be a number of at least 0 or none, not -1"),
    (SIZE, 4.0, "size must be a whole number of at most 9, not 4.0 (float)"),
    (SIZE, 10, "size must be a whole number of at most 9, not 10"),
    (DEEP, 1, "deep must be true or false, not 1 (int)"),
    (
        LAYERS,
        None,
        (
            "layers must be names or shell wildcards of layers, such as 'encoder.*' or "
            "['encoder.*', 'head'], not None (NoneType)"
        ),
    ),
    (LAYERS, " , ", "layers=' , ' names no layer; '*' is all"),
    (FORM, 3, "form must be one of round, square or none, not 3 (int)"),
    (FORM, "rond", "form must be one of round, square or none, not 'rond'; did you mean 'round'?"),
]


@pytest.mark.parametrize(("setting", "value", "message"), REFUSED)
def test_a_wrong_value_is_refused(setting: Setting, value: object, message: str) -> None:
    """The message says where it stood, what was expected and what was found."""
    with pytest.raises(SettingsError) as caught:
        setting.validate(value, "@modelhealth on test_it")
    assert str(caught.value) == f"@modelhealth on test_it: {message}"


PARSED: list[tuple[Setting, str, SettingValue]] = [
    (RATE, " 1e-1 ", 0.1),
    (NORM, "None", None),
    (SIZE, "7", 7),
    (DEEP, "Yes", True),
    (DEEP, "off", False),
    (LAYERS, "none", ("none",)),
    (LAYERS, "a.*\n my block, b\n", ("a.*", "my block", "b")),
]


@pytest.mark.parametrize(("setting", "text", "value"), PARSED)
def test_text_spells_a_value(setting: Setting, text: str, value: SettingValue) -> None:
    """An ini file spells numbers, switches and "none" as people write them."""
    assert setting.parse(text, "here") == value


@pytest.mark.parametrize(
    ("setting", "text"), [(RATE, ""), (RATE, "none"), (SIZE, "1.5"), (DEEP, "maybe"), (NORM, "-x")]
)
def test_text_that_spells_no_value_is_refused(setting: Setting, text: str) -> None:
    """Nothing is guessed from a misspelt value."""
    with pytest.raises(SettingsError, match=rf"^here: {setting.name} must be .*, not '?{text}'?$"):
        setting.parse(text, "here")


@given(st.floats(0, 1))
def test_a_number_survives_being_spelt(value: float) -> None:
    """What Python prints of a float is parsed back exactly."""
    assert RATE.parse(repr(value), "here") == value


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    """A misspelt threshold never passes as no threshold."""
    with pytest.raises(SettingsError) as caught:
        SETTINGS.override({"rat": 0.1}, "@modelhealth on test_it")
    assert str(caught.value) == (
        "@modelhealth on test_it: unknown setting 'rat'; did you mean 'rate'? "
        "Known settings: deep, layers, norm, rate, size."
    )


def test_declared_settings_are_sound() -> None:
    """Names are unique and every default is a value of its own setting, spelt so it parses back."""
    declared = default_settings().declarations
    of_checks = [setting for check in every_check() for setting in check.settings]
    assert list(declared[-len(of_checks) :]) == of_checks
    assert len({setting.name for setting in declared}) == len(declared)
    for setting in declared:
        assert setting.parse(setting.shown_default, "default") == setting.default
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", setting.name)
        assert setting.help
        assert not setting.help.endswith(".")


def test_the_reference_lists_every_setting() -> None:
    """The table in the docs has a row for each setting with its default, and no other row."""
    rows = [
        f"| `{setting.name}` | {setting.type.__name__} | {setting.shown_default} | {setting.help} |"
        for setting in default_settings().declarations
    ]
    escaped = [row.replace("*", r"\*") for row in rows]
    written = [row for row in REFERENCE.read_text().splitlines() if row.startswith("| `")]
    assert written == escaped, "paste these rows:\n" + "\n".join(escaped)


ALL = default_settings()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("checks", "finite, dead_*\ngrad_norm", ("finite", "dead_*", "grad_norm")),
        ("skip_checks", "none", ()),
        ("skip_checks", "", ()),
    ],
)
def test_text_spells_names_of_checks(name: str, text: str, value: tuple[str, ...]) -> None:
    """Commas, blanks and lines stand between names."""
    assert ALL.read(name, text, "ini")[name] == Limit(value, "ini")


def test_text_spells_thresholds_by_layer() -> None:
    """A line a pattern; the limit keeps its line and pattern; of the patterns the last wins."""
    text = "head.*: max_grad_norm=100, min_samples=4\nhead.bias: max_grad_norm=none"
    settings = ALL.override({"max_grad_norm": 1.0}, "ini").read("thresholds", text, "the ini file")
    assert settings.limit("max_grad_norm", "body") == Limit(1.0, "ini")
    assert settings.limit("max_grad_norm", "head.0") == Limit(100.0, "the ini file for 'head.*'")
    assert settings.limit("max_grad_norm", "head.bias").value is None
    assert settings.limit("min_samples", "head.bias").value == 4
    marked = settings.override({"max_grad_norm": 3.0, "thresholds": {}}, "marker")
    assert marked.limit("max_grad_norm", "head.0").value == 100.0
    marked = settings.override({"thresholds": {"*": {"max_grad_norm": 2}}}, "marker")
    assert marked.limit("max_grad_norm", "head.0") == Limit(2.0, "marker for '*'")


def test_text_spells_severities() -> None:
    """One for all, or by check; the last that matches wins over the check's own."""
    assert ALL.severity("finite") == Limit("fail", "default")
    assert ALL.read("severity", "warn", "ini").severity("finite") == Limit("warn", "ini")
    settings = ALL.read("severity", "dead_*: warn, finite:warn\nf*: fail", "ini")
    assert settings.severity("dead_units").value == "warn"
    assert settings.severity("finite").value == "fail"
    assert settings.override({"severity": "fail"}, "call").severity("dead_units").value == "fail"


WRONG_CHOICES: list[tuple[dict[str, object], str]] = [
    ({"thresholds": 3}, "thresholds must be a mapping from layers to thresholds"),
    ({"thresholds": ["a"]}, "thresholds must be a mapping from layers to thresholds"),
    ({"thresholds": {"a": 3}}, "thresholds must be a mapping from layers to thresholds"),
    ({"thresholds": {3: {}}}, "thresholds must be a mapping from layers to thresholds"),
    (
        {"thresholds": {"a.*": {"max_gradnorm": 3}}},
        "unknown setting 'max_gradnorm'; did you mean 'max_grad_norm'?",
    ),
    ({"thresholds": {"a.*": {"max_grad_norm": -3}}}, "max_grad_norm must be a number of at least"),
    ({"thresholds": {"a.*": {"max_grad_norm": "3"}}}, "max_grad_norm must be a number of at least"),
    ({"thresholds": {"a.*": {"layers": "b"}}}, "layers is one value for the whole model"),
    ({"thresholds": {"a.*": {"thresholds": {}}}}, "thresholds is one value for the whole model"),
    ({"severity": "error"}, "severity must be 'warn' or 'fail' or a mapping"),
    ({"severity": {"finite": True}}, "severity of 'finite' must be 'warn' or 'fail', not True"),
    ({"severity": {"finit": "warn"}}, "unknown check 'finit'; did you mean 'finite'?"),
    ({"checks": {"finite": 1}}, "checks must be names of checks, such as"),
    ({"skip_checks": ["x_*"]}, "skip_checks: unknown check 'x_*'"),
]


@pytest.mark.parametrize(("values", "message"), WRONG_CHOICES, ids=str)
def test_a_wrong_choice_is_refused(values: dict[str, object], message: str) -> None:
    """The message says where it stood, and for a threshold for which layers."""
    with pytest.raises(SettingsError) as caught:
        ALL.override(values, "here")
    assert str(caught.value).startswith("here")
    assert message in str(caught.value)
    assert ("for 'a.*'" in str(caught.value)) == ("a.*" in str(values))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("thresholds", "head.*"),
        ("thresholds", "head.*: max_grad_norm"),
        ("thresholds", ": max_grad_norm=1"),
        ("thresholds", "head.*: max_grad_norm=x"),
        ("severity", "finite"),
        ("severity", "finite: worn"),
        ("severity", "worn"),
    ],
)
def test_text_that_spells_nothing_is_refused(name: str, text: str) -> None:
    """An ini file's mistakes name the ini file."""
    with pytest.raises(SettingsError, match=r"^the ini file"):
        ALL.read(name, text, "the ini file")


def test_text_spells_waivers() -> None:
    """A line each: layers, perhaps a check, and behind the colon the reason, colons and all."""
    text = "embed dead_*: rare: a tenth\n\nhead.*: a probe\n"
    assert [(w.layers, w.check, w.reason) for w in parse_waivers(text, "ini")] == [
        ("embed", "dead_*", "rare: a tenth"),
        ("head.*", None, "a probe"),
    ]
    for wrong in ("embed", "embed dead_units", "embed:", ": why", "a b c: why"):
        with pytest.raises(SettingsError, match=r"ini: a waiver is 'LAYERS \[CHECK\]: REASON'"):
            parse_waivers(wrong, "ini")
