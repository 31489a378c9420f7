"""What rules say of whole trainings, and what is done about it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.courses import CASES
from pytest_modelhealth import Inspector, ModelHealthError, ModelHealthWarning
from pytest_modelhealth.checks import default_settings
from pytest_modelhealth.report import HealthReport, Observation
from pytest_modelhealth.training.monitoring.judging import TrainingJudge
from pytest_modelhealth.training.monitoring.monitor import TrainingMonitor
from pytest_modelhealth.training.monitoring.row import STATISTICS, StepRow
from pytest_modelhealth.training.monitoring.rule import RULES
from tests.training.models import loss_of, net

Prepare = Callable[[int, nn.Sequential, torch.optim.Optimizer], None]


def train(
    *,
    steps: int = 150,
    rate: float = 1e-2,
    prepare: Prepare | None = None,
    settings: Mapping[str, object] | None = None,
    waived: tuple[str, str] | None = None,
    observe: Callable[[StepRow], object] | None = None,
    **options: object,
) -> TrainingMonitor:
    """Train a small network on a task it can learn."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
    model.append(nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    inputs = torch.randn(256, 8)
    target = (inputs @ torch.randn(8, 3)).argmax(1)
    inspector = Inspector(model, **(settings or {}))
    if waived is not None:
        inspector.waive(waived[0], check=waived[1], reason="a test")
    with inspector.monitor(**options) as monitor:
        if observe is not None:
            monitor.observers.append(observe)
        for step in range(steps):
            if prepare is not None:
                prepare(step, model, optimizer)
            chosen = torch.randint(0, 256, (64,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[chosen]), target[chosen])
            loss.backward()
            optimizer.step()
            monitor.step_end(loss=loss)
    return monitor


def broken(monitor: TrainingMonitor) -> dict[str, str]:
    """Return the layer that each broken rule names."""
    return {violation.check: violation.layer for violation in monitor.violations}


def poison(step: int, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Write a NaN into a weight."""
    if step == 40:
        model[2].weight.data[0, 0] = math.nan


def leap(step: int, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Raise the learning rate far too high."""
    optimizer.param_groups[0]["lr"] = 1.0 if step >= 80 else 1e-2


def kill(step: int, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Push all units of a layer below zero for good."""
    if step == 60:
        model[2].bias.data.fill_(-50.0)


@pytest.fixture(scope="module")
def killed() -> TrainingMonitor:
    """The monitor of a training in which all units of a layer die in one step."""
    return train(prepare=kill)


def test_a_training_that_learns_is_healthy() -> None:
    """No rule objects, and none warns."""
    report = train().report_of_training()
    assert report.healthy
    assert not report.warnings
    course = report.observation.course
    assert course is not None
    assert course.steps == 150
    assert course.loss.is_well


def idles(*, is_faulty: bool) -> TrainingMonitor:
    """Train with dropout; faulty is evaluation mode, and a layer that no optimizer holds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 16), nn.Linear(16, 3))
    model.train(not is_faulty)
    held = [model[0], *([] if is_faulty else [model[2]]), model[3]]
    optimizer = torch.optim.SGD([p for layer in held for p in layer.parameters()], lr=0.1)
    with Inspector(model).monitor(every=2) as monitor:
        for step in range(80):
            x = torch.randn(16, 8)
            loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step_end(step, loss=loss)
    return monitor


def test_what_is_wrong_from_the_first_step_is_said() -> None:
    """A layer in no optimizer fails; evaluation mode from the start warns; neither is healthy's."""
    monitor = idles(is_faulty=True)
    (violation,) = monitor.violations
    assert (violation.check, violation.layer) == ("stopped_updates", "2")
    assert "is never updated, over 40 watched steps" in violation.message
    assert "trains in evaluation mode from the start" in monitor.warnings[0].message
    assert monitor.findings == (violation, *monitor.warnings)
    assert idles(is_faulty=False).findings == ()


def test_nan_is_traced_to_step_and_layer() -> None:
    """The message names the step, the layer, and the loss before; the JSON has the course."""
    monitor = train(prepare=poison, steps=60)
    with pytest.raises(
        ModelHealthError, match=r"unhealthy: 2 \(nonfinite_steps\).*step 40"
    ) as info:
        monitor.assert_healthy()
    assert "the loss before was" in str(info.value)
    data = json.loads(monitor.report_of_training().render("json"))
    assert 40 in [event["step"] for event in data["course"]["events"]]
    assert data["violations"][0]["layer"] == "2"


def test_a_layer_that_dies_is_named_in_text_and_picture(killed: TrainingMonitor) -> None:
    """Each event has the step it began in; the first line names the gravest; `events` overrides."""
    dying = next(v for v in killed.violations if v.check == "dying_layers")
    assert dying.layer == "3"
    assert "since step 6" in dying.message
    found = {(event.layer, event.step) for event in killed.events}
    assert any(layer == "3" and 60 <= step <= 66 for layer, step in found)
    first = str(killed).splitlines()[0]
    assert f"worst, from step {killed.events[0].step} on: " in first
    figure = killed.plot()
    figure.draw_without_rendering()
    drawn = "\n".join(text.get_text() for text in figure.findobj(lambda a: hasattr(a, "get_text")))
    assert "units of '3' are dead" in drawn
    bare = killed.plot(events=())
    assert not any("are dead since" in text.get_text() for text in bare.texts)
    assert "worst" not in str(train(steps=40)).splitlines()[0]


def test_severities_limits_and_waivers_hold_for_rules() -> None:
    """What only warns is among the warnings; a waived finding is listed; others stand."""
    warned = train(prepare=kill, settings={"severity": {"dying_layers": "warn"}})
    assert "dying_layers" in {violation.check for violation in warned.warnings}
    waived = train(prepare=kill, waived=("3", "dying_layers"))
    accepted = waived.report_of_training()._judgement.waived
    assert [(v.check, v.layer) for v in accepted] == [("dying_layers", "3")]
    limits = {"thresholds": {"3": {"max_dying_fraction": 1.0}}}
    for monitor in (warned, waived, train(prepare=kill, settings=limits)):
        assert "dying_layers" not in broken(monitor)


def test_thresholds_can_be_given_with_the_question(killed: TrainingMonitor) -> None:
    """They override those in force."""
    with pytest.raises(ModelHealthError):
        killed.assert_healthy()
    with pytest.warns(ModelHealthWarning) as caught:
        killed.assert_healthy(skip_checks=sorted(broken(killed)))
    assert any("the loss rose" in str(one.message) for one in caught)


def test_on_violation_raises_after_the_row_is_written(tmp_path: Path) -> None:
    """The error comes in the step in which it begins, whose line alone says what began."""
    written, rows = tmp_path / "health.csv", []
    with pytest.raises(ModelHealthError, match="step 40"):
        train(prepare=poison, on_violation="raise", csv=written, observe=rows.append)
    assert written.read_text().splitlines()[-1].startswith("40,")
    assert "nonfinite_steps: NaN or infinity first" in str(rows[-1])


def test_on_violation_warns_or_calls_once() -> None:
    """Once for each rule and layer; no later line says it again."""
    rows: list[StepRow] = []
    with pytest.warns(ModelHealthWarning, match="nonfinite_steps") as caught:
        train(prepare=poison, steps=60, on_violation="warn", observe=rows.append)
    assert len(caught) == 1
    assert "nonfinite_steps" not in "".join(map(str, rows[41:]))
    called: list[object] = []
    train(prepare=poison, steps=60, on_violation=called.append)
    assert [violation.check for violation in called] == ["nonfinite_steps"]


def test_a_verdict_that_was_asked_for_is_no_longer_open() -> None:
    """The report of the end is the one that was asked."""
    reports: list[object] = []
    with Inspector(net(), on_report=reports.append).monitor() as monitor:
        loss_of(monitor._model).backward()
        monitor.step_end()
        monitor.assert_healthy()
    assert [report._verdict_asked for report in reports] == [True]


# Rules by themselves, on rows made by hand.


def row(step: int, loss: float | None, **numbers: float | list[float]) -> StepRow:
    """Return a row of two layers; ``total`` and ``ratio`` are those of all parameters."""
    usual = {
        "total": 1.0,
        "ratio": 1e-3,
        "optimizer_steps": 1,
        "activation_std": 1.0,
        "activation_rms": 1.0,
        "input_std": 1.0,
        "dead_fraction": 0.1,
        "unit_observations": 64.0,
        "parameter_norm": 5.0 + step,
        "parameter_rms": 0.1,
        "parameter_gradient_norm": 1.0,
        "parameter_nonfinite": 0.0,
        "parameter_gradient_nonfinite": 0.0,
        "update_norm": 1e-2,
        "weight_update_ratio": 1e-3,
        "trainable_fraction": 1.0,
        "learning_rate": 1e-3,
    } | numbers
    values = {
        name: np.broadcast_to(np.asarray(usual.get(name, math.nan), dtype=float), (2,)).copy()
        for name in STATISTICS
    }
    return StepRow(
        step,
        loss,
        usual["total"],
        usual["ratio"],
        ("a", "b"),
        values,
        optimizer_steps=int(usual["optimizer_steps"]),
        passes=int(usual.get("passes", 1)),
    )


def judged(rows: list[StepRow]) -> dict[str, str]:
    """Return what rules find at the end, by name, with the severity."""
    settings = default_settings()
    judge = TrainingJudge(settings, _no_report)
    observation = Observation({}, "")
    for each in rows:
        judge.follow(each, observation)
    course = judge.course
    breaches = [(e.rule, RULES[e.rule].assess(e, course, settings)) for e in course.events]
    return {rule: breach.grade for rule, breach in breaches if breach is not None}


def _no_report(_: Observation) -> HealthReport:
    raise AssertionError


@pytest.mark.parametrize("case", CASES)
def test_a_course_is_judged_by_what_stays(case: str) -> None:
    """Rules fail or warn as the table says; where it has dots, others may object, too."""
    steps, loss, numbers, expected = CASES[case]
    found = judged([row(s, loss(s), **numbers(s)) for s in range(steps)])
    if "..." in expected:
        found = {name: found.get(name, "") for name in expected}
    assert found == expected


def evaluate(step: int, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Leave the model in evaluation mode from a step on."""
    if step == 20:
        model.add_module("dropout", nn.Dropout(0.1))
    model.train(step < 50)


def hook(step: int, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Register one more hook that does nothing."""
    model[2].register_forward_hook(lambda *_: None)


def changing(change: Callable[[torch.Tensor], object]) -> Prepare:
    """Return what has gradients changed between the backward pass and each step."""

    def prepare(step: int, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        def change_and_step(usual: Callable[[], object] = optimizer.step) -> None:
            for parameter in model.parameters():
                change(parameter.grad)
            usual()

        if step == 0:
            optimizer.step = change_and_step

    return prepare


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        (lambda g: g.add_(torch.randn_like(g) * g.norm()), True),
        (lambda g: g.neg_(), True),
        (lambda g: g.clamp_(-1e-4, 1e-4), False),
        (lambda g: g.mul_(1e-3), False),
        (lambda g: g.zero_(), False),
    ],
)
@pytest.mark.parametrize("every", [1, 10])
def test_gradients_changed_before_the_step_are_warned_of(
    every: int, change: Callable[[torch.Tensor], object], is_told: bool
) -> None:
    """Noise and a sign are; a clip, of values or of the norm, keeps signs."""
    monitor = train(prepare=changing(change), steps=50, every=every)
    warned = [w.message for w in monitor.warnings]
    assert any("no multiple of them" in message for message in warned) == is_told
    assert not any(p._post_accumulate_grad_hooks for p in monitor._model.parameters())


def test_what_a_loop_does_wrong_is_named() -> None:
    """A model that knows no difference may be in either mode."""
    assert broken(train(prepare=evaluate, steps=80)) == {"mode_switch": ""}
    assert broken(train(prepare=lambda s, m, _: m.train(s < 50) and None, steps=80)) == {}
    assert broken(train(prepare=hook, steps=40)) == {"growing_hooks": "2"}
    assert broken(train(rate=0.0, steps=60)) == {"standstill": ""}
    for every in (1, 10):  # a step that is not watched is asked whether gradients are cleared
        piled = train(prepare=lambda s, m, o: setattr(o, "zero_grad", int), steps=60, every=every)
        assert "gradients add up" in piled.violations[0].message
        assert all(p._backward_hooks is None for p in piled._model.parameters())
        assert all(p._post_accumulate_grad_hooks is None for p in piled._model.parameters())
    assert "loss_divergence" in broken(train(prepare=leap))


@pytest.mark.parametrize(("factor", "expected"), [(0.0, "fail"), (1e3, "fail"), (30.0, None)])
def test_inputs_that_change_are_seen(factor: float, expected: str | None) -> None:
    """Nothing, and a thousand times as much, fail; what an augmentation might do does not."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    with Inspector(model).monitor() as monitor:
        for step in range(60):
            optimizer.zero_grad()
            inputs = torch.randn(32, 8) * (factor if step > 30 else 1.0)
            loss = model(inputs).pow(2).mean() / max(factor, 1.0) ** 2
            loss.backward()
            optimizer.step()
            monitor.step_end(loss=loss)
    judgement = monitor.report_of_training()._judgement
    found = {v.check: v.grade for v in (*judgement.violations, *judgement.warned)}
    assert found.get("input_shift") == expected


def test_the_plugin_checks_a_monitor_nobody_asked(pytester: pytest.Pytester) -> None:
    """It fails when the test ends, and names the rule, the step and the line of the loop."""
    pytester.makepyfile(
        """
        import math
        import torch
        from torch import nn

        def loop(inspector, model, steps):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with inspector(model).monitor() as monitor:
                for step in range(steps):
                    if step == 12:
                        model.weight.data[0, 0] = math.nan
                    optimizer.zero_grad()
                    loss = model(torch.randn(8, 4)).pow(2).mean()
                    loss.backward()
                    optimizer.step()
                    monitor.step_end(loss=loss)
            return monitor

        def test_unasked(inspector):
            loop(inspector, nn.Linear(4, 2), 20)

        def test_healthy(inspector):
            loop(inspector, nn.Linear(4, 2), 10)

        def test_asked(inspector):
            assert loop(inspector, nn.Linear(4, 2), 20).verdict == "unhealthy"
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1, passed=2)
    result.stdout.fnmatch_lines(["*unhealthy: Linear (nonfinite_steps)*step 12*"])
