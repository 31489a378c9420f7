"""A loss that is given what it takes, and that says how wrong the output is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.check import Finding
from pytest_modelhealth.checks.facts import called, flow_of, innermost, is_fresh, linear_maps
from pytest_modelhealth.checks.loss_terms import summed_over_batch, weightless_terms
from pytest_modelhealth.checks.paths import SOFTMAXES, is_floating
from pytest_modelhealth.checks.zero_gradients import UNDERFLOW
from pytest_modelhealth.report import (
    ClassTargets,
    LayerRecord,
    LossCall,
    LossPath,
    Observation,
    Violation,
)
from pytest_modelhealth.report.flow.inferred import same_values
from pytest_modelhealth.settings import Settings, Severity

LOSS = CHECKS["loss"]


_SQUASHING = {
    "cross_entropy": frozenset({"sigmoid", "hardsigmoid"}),
    "binary_cross_entropy_with_logits": frozenset({"sigmoid", "hardsigmoid", "softmax"}),
}
"""What squashes the logits that a loss takes."""
_ONE_SIDED = frozenset({"relu", "threshold"})
"""What never goes below zero and is flat there: of logits, a whole side is lost."""
_BENDS = frozenset({"celu", "elu", "gelu", "hardswish", "log_sigmoid", "mish", "silu", "softplus"})
"""What flattens one side of the logits and leaves a gradient nearly everywhere."""
_ELEMENTWISE = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
_TAKES_LOG_PROBABILITIES = frozenset({"nll_loss", "ctc_loss", "kl_div"})
_NEVER_NEGATIVE = _ELEMENTWISE | {
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cross_entropy",
}
_FLAT = frozenset(
    {"ceil", "clamp", "clamp_max", "clamp_min", "floor", "hardtanh", "relu", "round", "sign"}
    | {"threshold", "trunc"}
)
_HINGES = frozenset({"clamp", "clamp_min", "maximum", "relu", "threshold"})
_POSITIVE = frozenset({"exp", "relu", "sigmoid", "softplus"})
_RANGES = {
    (0.0, 255.0): "masks of 0 and 255: divide them by 255",
    (-1.0, 1.0): "labels of -1 and 1: bring them to 0 and 1",
}

_FAR_BOUND = 10.0
"""Logits that are clamped this far out leave a probability of e^-10: a guard."""
_REACHABLE = 0.1
"""A loss that logits cannot get below; where they may lie 5 apart, 5 classes have 0.03."""
_FEWEST_OF_ONE_CLASS = 16
_UNNORMALISED = 0.1
_FEWEST_ROWS = 2
_FEWEST_TARGETS = 8
_PADDED = 0.05
_ALIKE = 0.1
_SEVERAL = 1.5
_MAGNIFIES = 3.0
_TARGET_ROUNDING = 0.01
_LARGEST_COSINE = 128.0
"""ArcFace (Deng et al. 2019) and CosFace (Wang et al. 2018) scale by 64, CLIP by 100 at most."""


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield what each loss call was wrongly given, then what is wrong with the loss."""
    found = [f for call in observation.loss_calls for f in _of_call(call, observation)]
    if not _fails(found):
        found += _batch_softmax(observation)
    if not _fails(found) and observation.loss_path is not None:
        found += _of_path(observation.loss_path, observation)
    if not _fails(found):
        found += _negated(observation)
    yield from found
    if not _fails(found):
        yield from _initial(observation, settings)
        yield from weightless_terms(observation)
        yield from summed_over_batch(observation)


def _fails(found: list[Finding]) -> bool:
    """Whether anything but warnings was found, beside which nothing more is looked for."""
    return any(getattr(one, "severity", "fail") == "fail" for one in found)


class _Fault(NamedTuple):
    """What is wrong with a loss, in the terms of a violation."""

    message: str
    value: float
    cause: str
    severity: Severity = "fail"


def _violation(culprit: LayerRecord, fault: _Fault, role: str | None = None) -> Violation:
    return LOSS.violation(culprit, **fault._asdict(), role=role, independent=True)


def _of_call(call: LossCall, observation: Observation) -> Iterator[Finding]:
    """Yield the first fault of one call: a later one would only follow from it."""
    families = (_of_classes, _of_logits, _cut_off, _of_log_probabilities, _of_targets)
    found = next((one for family in families for one in family(call, observation)), None)
    if found is not None:
        culprit = _culprit(call, observation)
        if isinstance(found, _Fault):
            yield _violation(culprit, found)
        else:
            yield LOSS.inconclusive(culprit, found)


def _of_classes(call: LossCall, observation: Observation) -> Iterator[_Fault]:
    """Yield what is wrong with class indices, or with what is taken for classes."""
    function, targets, samples = call.function, call.targets, _samples(observation)
    ignore = call.options.get("ignore_index", -100)
    if targets is not None and targets.ignored >= targets.count:
        yield _Fault(
            f"{function} ignores all of its {targets.count} targets (ignore_index={ignore})",
            float(targets.ignored),
            "the targets are masked or padded everywhere: look at how they are built",
        )
    # whoever takes the loss of each token may mask it afterwards
    is_averaged = call.options.get("reduction") != "none"
    if targets is not None and is_averaged and targets.tail not in (None, ignore):
        padding = next(filter(None, (_pads(r, call, targets) for r in called(observation))), None)
        if padding is not None and targets.tail_share >= _PADDED:
            yield _Fault(
                f"{targets.tail_share:.0%} of the targets of {function} are padding: they end in "
                f"{targets.tail}, {padding}, and are not ignored",
                targets.tail_share,
                f"pass ignore_index={targets.tail}, or replace padded targets by -100",
            )
    if function != "cross_entropy" or call.input is None or not call.input.count:
        return
    if call.classes == 1:
        yield _Fault(
            "cross_entropy over a single class is zero whatever the output",
            1.0,
            "one output for a yes or no: use binary_cross_entropy_with_logits",
        )
    elif call.input.shape == (samples,) and targets is None and samples > 1:
        yield _Fault(
            f"cross_entropy takes the {samples} samples of the batch for classes: its input has "
            f"shape {call.input.shape}",
            float(samples),
            "an output of shape (N,) or a squeeze too many; for one number a sample use "
            "binary_cross_entropy_with_logits or mse_loss",
        )


def _pads(record: LayerRecord, call: LossCall, targets: ClassTargets) -> str | None:
    """Return how a table of ids tells that the end of targets is padding, if it does.

    It pads by the same class, or as many of its ids are padding as targets are, whatever padded
    targets are called. These are counted where padding is 0, and targets of a sample only.
    """
    options, given = record.options, record.inputs
    index = options.get("padding_idx")
    if index == targets.tail and options.get("num_embeddings") == call.classes:
        return f"the padding_idx of {record.label!r}"
    if index != 0 or given is None or given.count != targets.count:
        return None
    apart = abs(given.zero_count / given.count - targets.tail_share)
    if apart > _ALIKE * targets.tail_share:
        return None
    return f"where the ids of {record.label!r} end in its padding_idx"


def _of_logits(call: LossCall, observation: Observation) -> Iterator[_Fault | str]:
    """Yield what is given in the place of logits.

    They are judged by the activation that made them: small ones may lie in [0, 1] by chance.
    """
    function, made_by, given = call.function, call.made_by, call.input
    if call.over_batch:
        what = f"the input of {function} sums to one over the batch, not over its "
        cause = "a softmax along dimension 0, where the samples lie: use dim=1, or dim=-1"
        yield _Fault(f"{what}{call.classes} classes", 1.0, cause)
    is_softmax = function == "cross_entropy"
    if is_softmax and call.rows == "probabilities":
        rows = given.count // call.classes if given is not None else 0
        if rows < _FEWEST_ROWS and made_by != "softmax":
            yield f"its {rows} row sums to one; give at least {_FEWEST_ROWS} samples"
        yield _Fault(
            "cross_entropy is given probabilities: every row of its input sums to one",
            1.0,
            "a softmax before cross_entropy, which applies one itself: pass it the logits",
        )
    if function not in _SQUASHING:
        return
    message = f"{function} takes logits and is given"
    by_layer = made_by or _culprit(call, observation).activation
    if by_layer in _SQUASHING[function]:
        cause = f"the {by_layer} before it is one too many: it is part of the loss"
        if is_softmax:
            cause = f"the {by_layer} before it holds the logits between 0 and 1: leave it out"
        yield _Fault(f"{message} the output of a {by_layer}", 1.0, cause)
    elif made_by in _BENDS:
        cause = "it flattens one side of the logits: leave it out, unless they are meant so"
        yield _Fault(f"{message} what {made_by} returns", 1.0, cause, "warn")


def _cut_off(call: LossCall, _: Observation) -> Iterator[_Fault]:
    """Yield logits of which an activation took a side, or what lies beyond a near bound."""
    function, given, is_tanh = call.function, call.input, call.made_by == "tanh"
    if function not in _SQUASHING or given is None or not given.finite_count:
        return
    message, is_softmax = f"{function} takes logits and is given", function == "cross_entropy"
    low, high = (-1.0, 1.0) if is_tanh else call.clamped or (None, None)
    if low is not None and high is not None:
        reach = high - low  # the least loss of a target for logits that differ by it at most
        least = math.log1p(math.exp(-reach / 2.0))
        if is_softmax:
            least = math.log1p((call.classes - 1) * math.exp(-reach))
        if least > _REACHABLE:
            yield _Fault(
                f"{message} some that are held between {low:g} and {high:g}",
                least,
                f"no class can get more than {math.exp(-least):.0%}: leave out the "
                f"{'tanh' if is_tanh else 'clamp'} before it",
            )
    met = {low: given.min, high: given.max}
    near = [f"{end:g}" for end, seen in met.items() if end == seen and abs(seen) < _FAR_BOUND]
    cause = "no probability can leave its side of a half, or of that bound"
    if is_softmax:
        cause = "what lies on the flat side gets no gradient, and all logits there are one"
    if call.made_by in _ONE_SIDED:
        yield _Fault(f"{message} the output of a {call.made_by}", 1.0, f"{cause}: leave it out")
    elif near and not is_tanh:
        message += f" logits that are clamped at {' and at '.join(near)}"
        yield _Fault(message, 1.0, f"{cause}: leave it out")


def _of_log_probabilities(call: LossCall, _: Observation) -> Iterator[_Fault]:
    """Yield what is given in the place of log-probabilities."""
    function = call.function
    if function not in _TAKES_LOG_PROBABILITIES or call.log_normalizer is None:
        return
    is_known = call.rows == "log_probabilities" or function == "kl_div"
    if call.rows == "probabilities":
        given, cause = "probabilities", "the logarithm is missing: use log_softmax, not softmax"
    elif is_known or call.log_normalizer <= _UNNORMALISED:
        return
    elif call.made_by == "log_softmax":
        given = f"what does not sum to one over its {call.classes} classes"
        cause = "log_softmax runs along another dimension than that of the classes: check its dim"
    else:
        given, cause = "logits", "log_softmax before it is missing"
        if function == "nll_loss":
            cause += ": use cross_entropy on logits"
    message = f"{function} takes log-probabilities and is given {given}"
    yield _Fault(message, call.log_normalizer, cause)


def _of_targets(call: LossCall, observation: Observation) -> Iterator[_Fault]:
    """Yield what is wrong with targets that are numbers, and with class indices that are all one.

    A class has a row of weights, or a column. Where none has, an index is a place among candidates,
    of which the right one may stand first (He et al. 2020, MoCo).
    """
    function, given, target, classes = call.function, call.input, call.target, call.classes
    is_finite = target is not None and not target.nonfinite_count
    if function == "cross_entropy" and call.targets is None and given and target and is_finite:
        total = target.mean * classes
        is_share = given.shape == target.shape and target.min >= 0.0 and target.max <= 1.0
        if is_share and classes >= _FEWEST_ROWS and total > _SEVERAL:
            yield _Fault(
                f"cross_entropy takes targets that sum to one over the {classes} classes; these "
                f"sum to {total:.3g}",
                total,
                "several labels at once: use binary_cross_entropy_with_logits, or divide each row "
                "of the targets by its sum",
            )
    takes_log = function == "poisson_nll_loss" and call.options.get("log_input", True) is True
    if takes_log and call.made_by in _POSITIVE:
        yield _Fault(
            f"{function} takes the logarithm of a rate and is given the output of {call.made_by}",
            1.0,
            "a rate has no logarithm taken: pass log_input=False, or what comes before "
            f"{call.made_by}",
        )
    if function.startswith("binary_cross_entropy") and target and target.finite_count:
        ends, cause = (target.min, target.max), "class indices, or values in another unit"
        if target.min < 0.0 or target.max > 1.0 + _TARGET_ROUNDING:
            yield _Fault(
                f"{function} takes targets from 0 to 1 and is given [{ends[0]:.4g}, {ends[1]:.4g}]",
                target.max if target.max > 1.0 else target.min,
                _RANGES.get(ends, f"{cause}: bring the targets to [0, 1]"),
            )
    if function in _ELEMENTWISE and given and target:
        pairs = zip_longest(given.shape[::-1], target.shape[::-1], fillvalue=1)
        if math.prod(map(max, pairs)) > max(math.prod(given.shape), math.prod(target.shape)):
            yield _broadcast(function, given.shape, target.shape)
    if call.targets is not None and call.targets.only is not None and classes >= _FEWEST_ROWS:
        held = (s for record in called(observation) for s in record.parameters.values())
        count = call.targets.count - call.targets.ignored
        if count >= _FEWEST_OF_ONE_CLASS and any(classes in s.shape[:2] for s in held):
            yield _Fault(
                f"all {count} targets of {function} are class {call.targets.only}, of {classes} "
                "classes",
                float(count),
                "a placeholder, labels that did not load, or data sorted by class and not "
                "shuffled; a batch of one class may be meant, too",
                "warn",
            )


def _broadcast(what: str, output: tuple[int, ...], target: tuple[int, ...]) -> _Fault:
    return _Fault(
        f"{what} compares an output of shape {output} with a target of shape "
        f"{target}: broadcast, every sample is compared with every other's target",
        float(math.prod(output)),
        "one of the two has a dimension too many: squeeze(1) the output, or unsqueeze(1) the "
        "target",
    )


def _batch_softmax(observation: Observation) -> Iterator[Finding]:
    """Yield a softmax over the samples in a model that gives something for each of them.

    Pooling over a set (multiple instances, the nodes of a graph) gives one thing for all, or
    weights with nothing beside the set; a square of similarities is normalised either way.
    """
    samples = _samples(observation)
    root = observation.layers.get("")
    if samples < 2 or root is None or root.activations is None:
        return
    if root.activations.shape[:1] != (samples,):
        return
    for record in called(observation):
        shape = () if record.activations is None else record.activations.shape
        if record.activation not in SOFTMAXES or len(shape) < 2 or shape[0] != samples:
            continue
        dimension = record.options.get("dim")
        if not isinstance(dimension, int) or dimension % len(shape) != 0:
            continue
        if shape[1] != samples and math.prod(shape[1:]) > 1:
            message = (
                f"its {record.activation} runs along dimension 0, over the {samples} samples of "
                "the batch"
            )
            yield _violation(
                record, _Fault(message, 0.0, "dim=0 is the batch: use dim=1, or dim=-1")
            )


def _of_path(path: LossPath, observation: Observation) -> Iterator[Violation]:
    """Yield the first fault of the loss as a whole.

    It is independent of the output if no gradient came; it may reach layers without the output.
    """
    root, loss = observation.layers[""], observation.loss
    sent = root.gradients
    seen = any(record.gradients is not None for record in observation.layers.values())
    is_something = loss is not None and math.isfinite(loss) and loss != 0.0
    if path.widened is not None:
        yield _violation(root, _broadcast("the loss", *path.widened))
        return
    if path.reaches_output is False and observation.backward and not seen:
        message = "the loss does not depend on the output of the model"
        cause = "it is computed from something else, or from a copy without a graph"
    elif path.sign < 0 and (loss or 0.0) < 0.0:
        return  # `_negated` tells
    elif is_switched_off(observation):
        message = "the loss is multiplied by zero, and passes no gradient to the output"
        cause = "a loss weight of zero, or a mask that selects nothing"
    elif is_something and sent and sent.finite_count == sent.count > 0 == sent.abs_max:
        message = f"the loss is {loss:.3g}, and its gradient at the output is exactly zero"
        cause = _why_flat(root, path)
    elif path.uses_target is False and all(call.target is None for call in observation.loss_calls):
        message = "the loss never reads its target"
        cause = (
            "it compares the output with nothing, or with itself; a parameter that is not needed "
            "is named with a leading underscore: loss=lambda output, _: ..."
        )
    else:
        return
    yield _violation(root, _Fault(message, 0.0, cause), "loss")


def is_switched_off(observation: Observation) -> bool:
    """Whether the loss is zero by a factor; a hinge may be zero because all samples satisfy it."""
    path, gradient = observation.loss_path, observation.layers[""].gradients
    if observation.loss != 0.0 or path is None or not path.switched_off:
        return False
    return _HINGES.isdisjoint(path.operations) and (gradient is None or gradient.abs_max == 0.0)


def _why_flat(root: LayerRecord, path: LossPath) -> str:
    if root.activations is not None and root.activations.dtype == "float16":
        return UNDERFLOW
    if flat := sorted(_FLAT.intersection(path.operations)):
        return f"{' and '.join(flat)} in the loss passes no gradient at these values"
    return "the loss is constant: what it computes cancels out, or is multiplied by zero"


def _negated(observation: Observation) -> Iterator[Violation]:
    """Yield a loss that can never be positive, or is the only call of one of torch's, negated."""
    call, *others = observation.loss_calls or (None,)
    loss, path = observation.loss or 0.0, observation.loss_path
    if not loss < 0.0:
        return
    is_negated = path is not None and path.sign < 0
    if call is not None and not others and call.value and call.function in _NEVER_NEGATIVE:
        in_range = call.function in _ELEMENTWISE or call.value > 0.0  # of targets beyond it, not so
        is_negated |= in_range and abs(loss + call.value) <= 1e-3 * abs(call.value)
    if is_negated:
        message = f"the loss is {loss:.3g} and can never be positive: it is negated"
        cause = "a minus sign too many or too few: minimising it makes the model worse"
        place = {"value": loss, "role": "loss", "independent": True}
        yield LOSS.fault(observation.layers[""], message, cause=cause, **place)


def _initial(observation: Observation, settings: Settings) -> Iterator[Finding]:
    for call in observation.loss_calls:
        guess = _uniform_guess(call)
        if guess is None or call.value is None or call.input is None:
            continue
        culprit = _culprit(call, observation)
        limit = settings.limit("max_initial_loss", culprit.name)
        given, out = culprit.inputs, culprit.activations
        if call.value <= limit.value * guess or not is_fresh(observation):
            continue
        # logits that are large by its inputs are not its doing; ids are no scale, as models that
        # are given them start from tables, whose values are about one
        usual = math.inf if given is None or not given.finite_count else 1.0
        if given is not None and is_floating(given):
            usual *= given.rms
        if out is None or not out.rms > _MAGNIFIES * usual:
            continue
        if call.cosines and call.input.abs_max <= _LARGEST_COSINE:
            continue  # a scale that losses with a margin have
        message = (
            f"the loss of the untrained model is {call.value:.3g}, {call.value / guess:.3g} times "
            f"that of a uniform guess ({guess:.3g})"
        )
        count = call.targets.count - call.targets.ignored if call.targets else call.input.count
        if count < _FEWEST_TARGETS:
            reason = f"{message}, but {count} targets say little; give at least {_FEWEST_TARGETS}"
            yield LOSS.inconclusive(culprit, reason)
            continue
        cause = (
            f"{_what_is_large(culprit, call, observation)}: the logits have a root mean square of "
            f"{call.input.rms:.3g} where about 1 is usual"
        )
        ratio = call.value / guess
        yield LOSS.violation(culprit, message, value=ratio, limit=limit, cause=cause)


def _what_is_large(head: LayerRecord, call: LossCall, observation: Observation) -> str:
    """Say what makes the logits large, as far as the layer that made them explains it."""
    if call.cosines:
        most = call.input.abs_max if call.input is not None else 0.0
        return f"cosines are multiplied by {most:.3g} or more, a temperature too small"
    out, given, maps = head.activations, head.inputs, linear_maps(head)
    if maps and out is not None and given is not None:
        bias = head.parameters.get("bias")
        if bias is not None and 2.0 * bias.rms > out.rms:
            return f"its bias is too large (up to {bias.abs_max:.3g})"
        if 2.0 * maps[0].scale * given.rms > out.rms:
            return "its weights are too large"
    scales = [(m.scale, r.label) for r in called(observation) for m in linear_maps(r)]
    scales += [  # a table is not multiplied: its values count
        (table.rms, r.label)
        for r in called(observation)
        if "num_embeddings" in r.options and (table := r.parameters.get("weight"))
    ]
    scale, label = max(scales, default=(0.0, ""))
    if scale > _MAGNIFIES / 2.0:
        return f"the weights of {label!r} are too large (a scale of {scale:.3g})"
    return "its forward multiplies what its layers give, or sums it up"


def _uniform_guess(call: LossCall) -> float | None:
    """Return the loss of a uniform guess; ``None`` where that is not known."""
    if call.options.get("reduction", "mean") != "mean" or call.options.get("weight"):
        return None
    if call.function == "cross_entropy" and call.targets is not None and call.classes > 1:
        return math.log(call.classes)
    is_binary = call.function == "binary_cross_entropy_with_logits"
    return math.log(2.0) if is_binary and not call.options.get("pos_weight") else None


def _culprit(call: LossCall, observation: Observation) -> LayerRecord:
    """Return the layer whose output the loss is given, else the one that calls it."""
    flow = flow_of(observation)
    ran = called(observation)
    if flow.graph.loss is not None:
        feeding = flow.feeding("loss")
        ran = [record for record in ran if record.name in feeding]
    given = [record for record in ran if same_values(record.activations, call.input)]
    if given:  # of several heads, that with these values
        return innermost(given)[-1]
    root = observation.layers[""]
    return observation.layers.get(call.layer or "", root)


def _samples(observation: Observation) -> int:
    return observation.samples // max(observation.batches, 1)
