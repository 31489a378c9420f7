"""What a user may change about the checks: which run, how grave they are, limits by layer."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from torch import nn

from pytest_modelhealth import (
    Check,
    Inconclusive,
    Inspector,
    ModelHealthError,
    ModelHealthWarning,
    Setting,
    SettingsError,
    Verdict,
)
from pytest_modelhealth.checks import default_settings
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import Waiver


def found(report):
    """Which check found something in which layer."""
    return [(violation.check, violation.layer) for violation in report.violations]


@pytest.mark.parametrize(
    "chosen",
    [
        {"skip_checks": "dead_*"},
        {"checks": "finite, grad_*"},
        {"checks": ["finite", "dead_units"], "skip_checks": ["dead_units"]},
    ],
)
def test_a_check_that_is_not_chosen_does_not_run(chosen, dead, batch):
    """By name or wildcard, as a string or a list; leaving out wins."""
    assert found(Inspector(dead).run_inspection(batch)) == [("dead_units", "act1")]
    assert Inspector(dead, **chosen).run_inspection(batch).healthy


def test_no_check_left_is_an_error(mlp, batch):
    """A verdict on nothing would be healthy; nor has it any under settings without checks."""
    for chosen, words in (
        (
            {"checks": "finite", "skip_checks": "f*"},
            r"no check is left to run: checks=\('finite',\)",
        ),
        ({"settings": Settings(())}, "no check is left to run"),
    ):
        with pytest.raises(SettingsError, match=words):
            _ = Inspector(mlp, **chosen).run_inspection(batch).verdict


def test_a_threshold_by_layer_is_judged_by_layer(mlp, batch):
    """Only the layers that a pattern matches have its limit, and the last pattern wins."""
    report = Inspector(mlp, max_grad_norm=1e-9).run_inspection(batch)
    assert {layer for _, layer in found(report)} == {"fc1", "fc2", "head"}
    thresholds = {"*": {"max_grad_norm": 1e9}, "fc2": {"max_grad_norm": 1e-9}}
    report = Inspector(mlp, max_grad_norm=1e-9, thresholds=thresholds).run_inspection(batch)
    (violation,) = report.violations
    assert (violation.layer, violation.limit, violation.folded) == ("fc2", 1e-9, ())
    assert violation.origin == "argument of inspector for 'fc2'"
    report.assert_healthy(thresholds={"*": {"max_grad_norm": None}})


def test_what_warns_does_not_fail(dead, batch):
    """The verdict is healthy, the violation is shown, and asserting warns of it once."""
    report = Inspector(dead, severity={"dead_*": "warn"}).run_inspection(batch)
    assert (report.verdict, report.violations) == (Verdict.HEALTHY, ())
    assert [(v.check, v.layer) for v in report.warnings] == [("dead_units", "act1")]
    with pytest.warns(ModelHealthWarning, match=r"^act1 \(dead_units\): 32 of 32 units are dead"):
        report.assert_healthy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report.assert_healthy()
    for text in (str(report), repr(report), report._repr_html_()):
        assert "healthy" in text
        assert "act1" in text
    assert report.to_dict()["warned"][0]["layer"] == "act1"
    with pytest.raises(ModelHealthError):
        report.assert_healthy(severity="fail")


@pytest.mark.parametrize(
    ("settings", "grades"),
    [
        ({}, ["warn", "note"]),
        ({"strict": True}, ["fail", "note"]),
        ({"strict": True, "severity": {"mild": "warn"}}, ["warn", "note"]),
        ({"severity": {"mild": "fail"}}, ["fail", "note"]),
    ],
)
def test_strict_fails_what_only_warns(settings, grades, mlp, batch):
    """But where a severity is set, which wins; a note is shown, and never more than that."""

    class Mild(Check):
        name = "mild"

        def run(self, observation, settings):
            for layer, grade in (("fc1", "warn"), ("fc2", "note")):
                yield self.violation(layer, f"a {grade}", value=0.0, severity=grade)

    report = Inspector(mlp, own_checks=[Mild], **settings).run_inspection(batch)
    mild = [f for f in report._judgement.findings if f.check == "mild"]
    assert [f.grade for f in mild] == grades
    assert report.healthy is ("fail" not in grades)
    strict = "strict" in settings and "fail" in grades
    assert ("fc1 (mild): a warn (strict)" in repr(report)) is strict
    if "warn" in grades:
        assert "healthy, 1 warning: fc1 (mild): a warn;" in repr(report)
    assert "note: fc2 (mild): a note" in str(report)
    assert report.to_dict()["noted"][0]["layer"] == "fc2"


def test_a_warning_shows_its_line_and_stands_for_its_kind(mlp, batch):
    """Findings of one check that differ by names, numbers and lines alone are one warning."""

    class Mild(Check):
        name = "mild"

        def run(self, observation, settings):
            for n, layer in enumerate(("fc1", "fc2")):
                text = f"'{layer}' is {n} times in vain at {__file__}:{n + 1}, as it seems"
                yield self.violation(layer, text, value=0.0, severity="warn", independent=True)

    report = Inspector(mlp, own_checks=[Mild]).run_inspection(batch)
    with pytest.warns(ModelHealthWarning) as caught:
        report.assert_healthy()
    (text,) = (str(one.message).splitlines() for one in caught)
    code = Path(__file__).read_text(encoding="utf-8").splitlines()[0]
    assert text[0].startswith("fc1 (mild): 'fc1' is 0 times in vain at ")
    assert text[1:] == [f"code:         {code}", "likewise:     fc2"]
    assert {one.kind for one in report.warnings} == {"times in vain at"}


def test_a_warning_hides_no_failure(dead, batch):
    """What would be told as a consequence of a fault that only warns fails all the same."""

    class Silent(Check):
        name = "silent"

        def run(self, observation, settings):
            record = observation.layers["fc2"]
            yield self.violation(record, "gets nothing", value=0.0, role="inputs")

    inspector = Inspector(dead, own_checks=[Silent])
    (root,) = inspector.run_inspection(batch).violations
    assert [v.check for v in root.folded] == ["silent"]
    report = Inspector(dead, own_checks=[Silent], severity={"dead_units": "warn"}).run_inspection(
        batch
    )
    assert found(report) == [("silent", "fc2")]
    assert [(v.check, v.folded) for v in report.warnings] == [("dead_units", ())]


def test_a_waiver_by_call(dead, batch):
    """`waive` reads as the marker does."""
    report = Inspector(dead).waive("act1", check="dead_*", reason="a probe").run_inspection(batch)
    assert report.healthy
    (waiver,) = (found.waiver for found in report._judgement.waived)
    assert (waiver.reason, waiver.origin) == ("a probe", "argument of waive")


class Peak(Check):
    """No activation is larger than a limit."""

    name = "peak"
    settings = (Setting("max_peak", float, default=1e-6, minimum=0.0, help="largest value"),)

    def run(self, observation, settings):
        for record in observation.layers.values():
            limit = settings.limit("max_peak", record.name)
            if record.activations is not None and record.activations.abs_max > limit.value:
                peak = record.activations.abs_max
                yield self.violation(record, f"reaches {peak:.3g}", value=peak, limit=limit)


def test_an_own_check_is_a_check_like_ours(mlp, batch):
    """It has settings by name and by layer, a severity, waivers and a place in the failure."""
    inspector = Inspector(mlp, own_checks=[Peak])
    report = inspector.run_inspection(batch)
    with pytest.raises(
        ModelHealthError, match=r"(?s)\(peak\): reaches.*modelhealth\(max_peak="
    ) as e:
        report.assert_healthy()
    assert "likely cause" not in str(e.value)
    report.assert_healthy(max_peak=1e9)
    report.assert_healthy(thresholds={"*": {"max_peak": 1e9}})
    report.assert_healthy(skip_checks="peak")
    with pytest.warns(ModelHealthWarning):
        report.assert_healthy(severity={"peak": "warn"})
    assert inspector.waive("*", check="peak", reason="why").run_inspection(batch).healthy
    with pytest.raises(SettingsError, match="max_peak must be a number of at least 0, not -1"):
        report.assert_healthy(max_peak=-1)
    with pytest.raises(SettingsError, match="unknown setting 'max_peak'"):
        Inspector(mlp, max_peak=1.0)


def test_a_check_may_only_warn_by_itself(mlp, batch):
    """A class says its severity; the setting wins over it."""

    class Gentle(Peak):
        severity = "warn"

    report = Inspector(mlp, own_checks=[Gentle]).run_inspection(batch)
    assert (report.healthy, bool(report.warnings)) == (True, True)
    with pytest.raises(ModelHealthError):
        report.assert_healthy(severity={"peak": "fail"})


def broken(*findings, error=None):
    """A check that gives these findings and then raises."""

    class Broken(Check):
        name = "broken"

        def run(self, observation, settings):
            yield from findings
            if error is not None:
                raise error

    return Broken


def test_a_check_that_raises_fails_the_test_and_lets_others_run(dead, batch):
    """Silence would be a lie: the check, the exception and the line are named."""
    own = [broken(error=ZeroDivisionError("by nothing"))]
    report = Inspector(dead, own_checks=own).run_inspection(batch)
    assert found(report) == [("dead_units", "act1")]
    assert "check broken is broken: it raised ZeroDivisionError: by nothing" in str(report)

    report = Inspector(dead, own_checks=own, skip_checks="dead_*").run_inspection(batch)
    assert (report.verdict, report.violations) == (Verdict.INCONCLUSIVE, ())
    with pytest.raises(ModelHealthError) as caught:
        report.assert_healthy()
    first = str(caught.value).partition("\n")[0]
    assert first.startswith(
        "inconclusive: check broken is broken: it raised ZeroDivisionError: by nothing ("
    )
    assert "test_control.py:" in first
    assert first.endswith(" in run: raise error)")
    assert 'skip_checks="broken"' in str(caught.value)
    report.assert_healthy(skip_checks=["broken", "dead_units"])
    assert report.to_dict()["broken_checks"][0]["check"] == "broken"


def test_what_a_broken_check_found_stands(mlp, batch):
    """A violation given before the exception is a violation."""

    class Late(Peak):
        def run(self, observation, settings):
            yield from super().run(observation, settings)
            raise ValueError

    report = Inspector(mlp, own_checks=[Late]).run_inspection(batch)
    assert {check for check, _ in found(report)} == {"peak"}
    assert report._judgement.broken[0].message == "it raised ValueError"


def test_ctrl_c_in_a_check_is_not_swallowed(mlp, batch):
    """KeyboardInterrupt ends the run."""
    report = Inspector(mlp, own_checks=[broken(error=KeyboardInterrupt())]).run_inspection(batch)
    with pytest.raises(KeyboardInterrupt):
        _ = report.verdict


@pytest.mark.parametrize(
    ("finding", "message"),
    [
        ("a string", "run() gave 'a string', which is no Finding"),
        (Inconclusive("finite", "fc1", "why"), "run() gave a finding of another check, 'finite'"),
        (
            Inconclusive("broken", "heads", "why"),
            "run() gave a finding in layer 'heads', which Mlp does not have; did you mean 'head'?",
        ),
    ],
)
def test_rubbish_is_named(finding, message, mlp, batch):
    """What is no finding of this check in a layer of this model is not passed over."""
    judgement = Inspector(mlp, own_checks=[broken(finding)]).run_inspection(batch)._judgement
    (named,) = judgement.broken
    assert named.message == message
    assert "test_control.py:" in named.place


def test_a_check_that_returns_nothing_is_named(mlp, batch):
    """A forgotten `yield` would pass for ever."""

    class Nothing(Check):
        name = "nothing"

        def run(self, observation, settings):
            return None

    judgement = Inspector(mlp, own_checks=[Nothing]).run_inspection(batch)._judgement
    assert judgement.broken[0].message.startswith("run() returned None: yield findings")


def check(**attributes):
    """A class of a check with these attributes."""

    def run(self, observation, settings):
        return []

    return type("Own", (Check,), {"name": "own", "run": run} | attributes)


def setting(name="own_limit", kind=float, default=1.0):
    """A tuple of one setting."""
    return (Setting(name, kind, default=default, help="a limit"),)


def needs_argument(self, argument):
    """An __init__ that cannot be called."""


UNSOUND = [
    (int, "builtins.int: it is no subclass of pytest_modelhealth.Check"),
    (check()(), "it is no subclass of pytest_modelhealth.Check; give the class itself"),
    (type("Own", (Check,), {"name": "own"}), "it has no run(self, observation, settings)"),
    (check(__init__=needs_argument), "it cannot be made without arguments: TypeError"),
    (check(name="Own Check"), "name must be words in lower case joined by underscores"),
    (check(name=3), "name must be words in lower case joined by underscores, not 3"),
    (check(name="finite"), "there is a check 'finite' already"),
    (check(rank="high"), "rank must be a number, not 'high'"),
    (check(severity="error"), "severity must be 'warn' or 'fail', not 'error'"),
    (check(summary=None), "summary must be a string, not None"),
    (check(settings=["max"]), "settings must be a tuple of pytest_modelhealth.Setting"),
    (check(settings=setting("max_grad_norm")), "there is a setting 'max_grad_norm' already"),
    (check(settings=setting("layers")), "there is a setting 'layers' already"),
    (check(settings=setting("waive")), "there is a setting 'waive' already"),
    (check(settings=setting() * 2), "there is a setting 'own_limit' already"),
    (check(settings=setting("Own")), "the name of a setting must be words in lower case"),
    (check(settings=setting(kind=dict)), "the type of own_limit must be float, int, bool or str"),
    (check(settings=setting(default="x")), "its default: own_limit must be a number, not 'x'"),
]


@pytest.mark.parametrize(("own", "message"), UNSOUND, ids=[m[-40:] for _, m in UNSOUND])
def test_an_unsound_check_is_refused(own, message, mlp):
    """The message names the class and what to correct, before anything runs."""
    with pytest.raises(SettingsError) as caught:
        Inspector(mlp, own_checks=[own])
    assert str(caught.value).startswith("own_checks: ")
    assert message in str(caught.value)


def test_an_own_check_belongs_to_its_inspector(mlp, batch):
    """Another inspector does not run it, and the same class twice is one check."""
    assert not Inspector(mlp, own_checks=[Peak, Peak]).run_inspection(batch).healthy
    assert Inspector(mlp).run_inspection(batch).healthy


def test_a_model_without_layers_of_a_shared_pattern_is_no_error(mlp, batch):
    """What the ini file says holds for many models."""
    settings = Inspector(mlp)._settings.read("thresholds", "head.*: max_grad_norm=1", "ini")
    assert Inspector(nn.Linear(16, 2), settings=settings).run_inspection(batch).healthy


# ---- all checks together -------------------------------------------------------------------------


def waiver(layers, check=None):
    """A waiver with a reason."""
    return Waiver(layers, check, "a reason", "here")


def test_setting_layers_restricts_what_is_judged(dead, batch):
    """A fault outside of `layers` is observed and not judged."""
    report = Inspector(dead, layers=["fc*", "fc1"]).run_inspection(batch)
    assert report.healthy
    assert report["act1"].activations.dead_fraction == 1.0


def test_fault_that_begins_elsewhere_is_told_where_its_effect_is_judged(batch):
    """A layer without a gradient is judged; the cut behind which it lies is named all the same."""

    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm, self.head = nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.norm(self.fc(x)).detach())

    (violation,) = Inspector(Cut(), layers="fc").run_inspection(batch).violations
    assert (violation.check, violation.layer) == ("missing_gradients", "norm")
    assert violation.affected == ("fc",)
    assert Inspector(Cut(), layers="head").run_inspection(batch).healthy


@pytest.mark.parametrize("waived", [waiver("act1"), waiver("act*", "dead_units"), waiver("*")])
def test_waiver_accepts_a_violation(waived, dead, batch):
    """A waived violation is kept apart with its waiver and does not count."""
    settings = default_settings().waive(waived)
    report = Inspector(dead, settings=settings).run_inspection(batch)
    assert report.healthy
    (found,) = report._judgement.waived
    assert (found.layer, found.waiver) == ("act1", waived)
    assert report._judgement.unused_waivers == ()


@pytest.mark.parametrize("idle", [waiver("act2"), waiver("act1", "finite")])
def test_waiver_without_effect_is_reported(idle, dead, batch):
    """A waiver for another layer or check accepts nothing, and that is known."""
    report = Inspector(dead, settings=default_settings().waive(idle)).run_inspection(batch)
    assert not report.healthy
    assert report._judgement.unused_waivers == (idle,)


def test_graver_findings_come_first(batch):
    """NaN stands before dead units, whatever the order of execution."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.dead, self.act, self.head = nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)
            nn.init.constant_(self.dead.bias, -50.0)

        def forward(self, x):
            return self.head(self.act(self.dead(x))) / 0.0

    report = Inspector(Both()).run_inspection(batch)
    assert [v.check for v in report.violations] == ["finite", "dead_units"]
