"""The verdict of each test of a suite."""

from __future__ import annotations

import glob
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_modelhealth.alignment.result import listed
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.checks.facts import trainable
from pytest_modelhealth.errors import ModelHealthError
from pytest_modelhealth.operations import having
from pytest_modelhealth.plugin.suite.case import PROBES, Case, Unjudged
from pytest_modelhealth.plugin.suite.equality import compiled_equals_eager, state_survives_saving
from pytest_modelhealth.report import Outcome, ProbeRecord
from pytest_modelhealth.settings.setting import ancestors, dotted, parent
from pytest_modelhealth.wings import wing

if TYPE_CHECKING:
    from pytest_modelhealth.snapshot.extension import HealthSnapshot

LEARNING = frozenset(  # the checks by which a parameter does not learn
    {
        "missing_gradients", "unregistered_parameters", "unused_parameters",
        "trained_parameters", "parameter_updates", "gradient_path",
    }
)  # fmt: skip


def _general(case: Case) -> frozenset[str]:
    """Return the checks of one run, which are neither a probe that is asked for nor a step's."""
    checks: Any = case.settings.checks
    own = {c.name for c in checks if c.judges_steps or (c.is_probe and not c.called_for)}
    return frozenset(check.name for check in checks) - own - LEARNING


def healthy_in_training(case: Case) -> None:
    """No invariant is broken, but those that tests of their own name."""
    case.settle(case.report(case.ran(True).observation, _general(case)))


def healthy_in_evaluation(case: Case) -> None:
    """The same in evaluation mode, without what fails in training."""
    own, known = _general(case), set[tuple[str, str]]()
    if "test_healthy_in_training" in case.wanted:
        violations = case.report(case.ran(True).observation, own)._judgement.violations
        known = {
            (v.check, layer) for one in violations for v in (one, *one.folded) for layer in v.layers
        }
    seen = case.ran(False).observation
    case.settle(case.report(seen, own, but=known))
    if case.report(seen, own)._judgement.violations:  # in training, too
        case.require_healthy(own)


def every_parameter_learns(case: Case) -> None:
    """Every parameter that should learn has a gradient, is held by the optimizer, and moves."""
    case.require_numbers()
    _require_gradients(case)
    # layers that are dropped at random have a gradient in one call and none in the next
    case.settle(case.report(case.stepped, {"gradient_path"}))
    report = case.report(case.stepped, LEARNING - {"gradient_path"}, strict=True)
    case.settle(report)
    if unread := _unread(case):
        layer, names = unread[0][0], listed([repr(dotted(*one)) for one in unread], 4)
        case.fail(
            f"unhealthy: {layer or case.label} (missing_gradients): no operation reads {names}, so "
            "nothing trains it\n\nlikely cause: left out of the forward, or for other batches: if "
            "so, freeze what is not to learn\naccept it:    @pytest.mark.modelhealth_waive"
            f'("{glob.escape(layer)}", check="missing_gradients", reason="...")',
            report,
        )
    # weight decay moves what gets a gradient of zero in a model that is unhealthy anyway
    case.require_healthy(_general(case))


def _unread(case: Case) -> list[tuple[str, str]]:
    """Return layer and name of trainable parameters that no operation reads.

    A list chooses which of its members it calls.
    """
    seen, settings = case.ran(True).observation, case.settings
    flow, layers = seen.flow, seen.layers
    if flow is None or not flow.is_exact or not settings.chooses("missing_gradients"):
        return []
    read = {*flow.values, *(full for record in layers.values() for full in record.tied.values())}
    unread = []
    for record in layers.values():
        around = (record.name, *ancestors(record.name)) if record.entered is None else ()
        is_chosen = any(layers[parent(name)].type_name in having("container") for name in around)
        is_waived = any(w.covers("missing_gradients", record.name) for w in settings.waivers)
        if not (is_chosen or is_waived or record.status in ("opaque", "parameters_read")):
            known = {*record.parameter_gradients, *record.tied}
            names = [own for own in trainable(record) if own not in known]
            unread += [(record.name, n) for n in names if dotted(record.name, n) not in read]
    return unread


def training_step(case: Case) -> None:
    """The contract of a training step, but what is on single parameters."""
    case.require_numbers()
    _require_gradients(case)
    step = {*wing("training.catalogue:STEP")}
    case.settle(case.report(case.stepped, step - LEARNING))


def _require_gradients(case: Case) -> None:
    """Do nothing if there is something to train by.

    Raises:
        Unjudged: there is not.
    """
    case.require_trainable()
    if not case.ran(True).observation.backward:
        raise Unjudged("no backward pass ran: nothing that the model returns has a gradient")


def probed(case: Case) -> None:
    """What the probe of this test found."""
    name = PROBES[case.test]
    _record(case, name)
    seen = case.ran(True).observation
    case.settle(case.report(seen, {name}, only=True, probes=[name]), designs=True)


def _record(case: Case, probe: str) -> ProbeRecord:
    """Return what a probe found.

    Raises:
        Unjudged: it does not apply, or nothing can be told.
    """
    case.require_chosen(probe)
    case.require_numbers()
    record = case.ran(True).observation.probes.get(probe)
    if record is None:
        raise Unjudged(f"{probe} did not run")
    if record.outcome is Outcome.NOT_APPLICABLE:
        raise Unjudged(f"does not apply: {record.reason}")
    if record.outcome is Outcome.NOT_TOLD:
        raise Unjudged(f"cannot be told: {record.reason}")
    return record


def inputs_used(case: Case) -> None:
    """Each input has an effect, at the start or after a few training steps.

    A head of zeros and a gate that has not opened hide their inputs at the start only.
    """
    record = _record(case, "input_effect")
    no_effect = wing("probes.intervening.samples:NO_EFFECT")
    idle = [note for note in record.notes if note.endswith(no_effect)]
    if idle:
        after = case.inspected(case.trained, False, ["input_effect"]).observation
        idle = [note for note in after.probes["input_effect"].notes if note in idle]
        batch = Inputs.of(case.made.inputs)
        if len(idle) >= len(find_tensors((batch.args, batch.kwargs))):  # constant, or not finite
            for training in (True, False):
                case.require_healthy(_general(case), training, "no input has an effect: ")
    seen = case.ran(True).observation
    report = case.report(seen, {"input_effect"}, only=True, probes=["input_effect"])
    if idle and not any(w.covers("input_effect", "") for w in case.settings.waivers):
        case.fail(
            f"unhealthy: {case.label} (input_effect): {idle[0]}, nor has it after a few training "
            "steps\n\nlikely cause: forward takes it and forgets it, or something on its way is "
            "zero",
            report,
        )
    case.settle(report)


def headroom(case: Case) -> None:
    """The planned dtype holds the values that the run in training mode has."""
    case.require_chosen("headroom")
    case.require_numbers()
    planned = str(case.settings["planned_dtype"].value or "bfloat16")
    model = case.made.model
    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    if dtypes == {planned}:
        raise Unjudged(f"{case.label} is {planned} already, as is planned")
    seen = case.ran(True).observation
    case.settle(case.report(seen, {"headroom"}, only=True, planned_dtype=planned))


def snapshot(case: Case) -> None:
    """The run in evaluation mode is as it was recorded."""
    recorded: HealthSnapshot = case.item._request.getfixturevalue("health_snapshot")
    case.require_numbers()
    updates = recorded.update_snapshots or recorded.update_new_snapshots_only
    place = Path(recorded.extension.get_location(test_location=recorded.test_location, index=0))
    if not updates and not place.exists():
        raise Unjudged("nothing is recorded yet: pytest --snapshot-update, and commit the file")
    seen = case.ran(False)
    report = case.report(seen.observation, {"finite"}, warns=_general(case), noise=seen._noise)
    try:
        _ = report == recorded  # raises where it is not
    except ModelHealthError as error:
        case.fail(str(error), report)


_OWN: dict[str, Callable[[Case], None]] = {
    f"test_{verdict.__name__}": verdict
    for verdict in (
        healthy_in_training, healthy_in_evaluation, every_parameter_learns, training_step,
        inputs_used, headroom, snapshot, state_survives_saving, compiled_equals_eager,
    )
}  # fmt: skip


def verdict_of(test: str) -> Callable[[Case], None]:
    """Return what a test of the suite runs: the function of its name, or its probe."""
    return _OWN.get(test, probed)
