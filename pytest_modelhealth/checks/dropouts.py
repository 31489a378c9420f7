"""Dropouts that drop everything, or that drop while their layer is in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.check import ALWAYS, Check
from pytest_modelhealth.checks.facts import at, flow_of
from pytest_modelhealth.settings.layer_names import is_inside, parent

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord, Observation, Violation

_FEWEST_VALUES = 64
FEWEST_SAMPLES = 32
"""Of so many a branch that is dropped by the sample is never dropped by chance."""
_ALL = 0.99
_FUSED = "scaled_dot_product_attention"
DRAWS = frozenset({"bernoulli", "rand", "rand_like", "new_rand", "uniform"})
"""Operations by which a layer, or a forward, draws what it keeps."""


def drops_everything(
    check: type[Check], observation: Observation, record: LayerRecord
) -> Iterator[Violation]:
    """Yield, as a violation of a check, that a layer drops all that it is given, or its caller's.

    By chance a dropout zeroes all of few values; so only many tell, and a branch that is dropped by
    the sample is held against that many samples.
    """
    rate = _functional_rate(record)
    message = ""
    if rate is not None and rate >= 1.0:
        message = "its functional dropout drops everything: p is 1"
    elif _gives_zeros(record) and _is_off_by_rate(observation, record):
        rate = 1.0
        message = f"all {record.inputs.count if record.inputs else 0} values that it is given are "
        message += "dropped: what it returns is zero throughout"
    if message:
        yield check.violation(
            record,
            message,
            value=1.0 if rate is None else rate,
            limit=ALWAYS,
            cause="its rate is 1 where the share to drop is asked for, as where the share to keep "
            "was meant (1 - p), a percentage, or a schedule that ran past its end",
            independent=True,
        )


def _gives_zeros(record: LayerRecord) -> bool:
    given, out = record.inputs, record.activations
    if given is None or out is None or out.count < _FEWEST_VALUES:
        return False
    return out.zero_count == out.count and given.zero_count < given.count


def _is_off_by_rate(observation: Observation, record: LayerRecord) -> bool:
    """Whether it is a dropout at its highest rate, or draws by itself what it keeps."""
    rate = record.options.get("dropout_p" if record.activation or record.functional else "p")
    if "Dropout" in record.type_name or record.type_name == _FUSED:
        return isinstance(rate, int | float) and rate >= _ALL
    if observation.samples < FEWEST_SAMPLES * observation.batches:
        return False
    return draws(observation, record)


def draws(observation: Observation, record: LayerRecord) -> bool:
    """Whether a module without parameters or layers draws, in training, what it keeps."""
    flow = flow_of(observation)
    if record.parameters or record.functional or record.options.get("training") is not True:
        return False
    if record.name not in flow or any(is_inside(n, record.name) for n in observation.layers):
        return False
    vertices, inside = flow.graph.vertices, flow.inside(record.name)
    made = inside.union(*(vertices[number].operands for number in inside))
    return any(vertices[n].function.strip("_") in DRAWS | {"native_dropout"} for n in made)


def drops_in_evaluation(
    check: type[Check], observation: Observation, record: LayerRecord
) -> Iterator[Violation]:
    """Yield, as a violation of a check, that a layer in evaluation mode drops values by a function.

    Monte Carlo dropout does so by design, and a call shows no difference. Fused attention has no
    word for it: there the rate that is passed is for training alone.
    """
    rate, caller = _functional_rate(record), record
    function, line = "dropout", ""
    if is_fused := record.functional and record.type_name == _FUSED:
        given = record.options.get("dropout_p")
        rate = float(given) if isinstance(given, int | float) else 0.0
        caller, function = observation.layers[parent(record.name)], _FUSED
        line = flow_of(observation).line(record.name) if record.name in flow_of(observation) else ""
    if not rate or caller.options.get("training") is not False:
        return
    cause = (
        "its dropout_p applies in either mode: pass 0.0 unless self.training"
        if is_fused
        else "it is on unless told: pass training=self.training, or use nn.Dropout; Monte Carlo "
        "dropout is meant so"
    )
    yield check.violation(
        record,
        f"`{function}` drops with p={rate:g}{at(line)} although its layer is in evaluation mode: "
        "the output is random",
        value=rate,
        limit=ALWAYS,
        cause=cause,
        independent=True,
        severity="fail" if is_fused else "warn",
    )


def _functional_rate(record: LayerRecord) -> float | None:
    """Return the rate of the functional dropout that a layer's own code calls, if it is on."""
    rate = record.options.get("dropout_p")
    is_on = record.options.get("dropout_training") is True
    return float(rate) if is_on and isinstance(rate, int | float) else None
