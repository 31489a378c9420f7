"""The batch itself: values that no model can learn from, or that were prepared wrongly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.check import ALWAYS
from pytest_modelhealth.checks.facts import called, flow_of, largest_at, linear_maps, units_of
from pytest_modelhealth.checks.paths import HAS_WEIGHTS, as_given, is_floating, is_normalization
from pytest_modelhealth.report import Finding, LayerRecord, Observation
from pytest_modelhealth.settings import Limit, Settings
from pytest_modelhealth.statistics import TensorStatistics

INPUTS = CHECKS["inputs"]


_FEWEST_VALUES = 16
_FEWEST_ROWS = 10
_FEWEST_SAMPLES = 8
_FEWEST_OF_COLUMNS = 16
_WHITE = 255.0
_IMAGE_CHANNELS = (1, 3, 4)
_CENTRED = 0.2
_TABLE_FACTOR = 100.0
_ONCE = 2.5
_NARROW = 0.22
"""Channels of a batch that was normalised wrongly differ by 0.17 of their mean by their offsets
alone; pictures of the night that were normalised rightly do by more than 0.3."""


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield what is wrong with the batch."""
    root = observation.layers.get("")
    whole = None if root is None else root.inputs
    if root is None or whole is None or whole.nonfinite_count:
        return  # `finite` names it
    is_constant = is_floating(whole) and whole.std == 0.0 and whole.count >= _FEWEST_VALUES
    flow, layers = flow_of(observation), observation.layers
    inputs = flow.inputs
    if is_constant:
        # they may be those of some tensors alone, as of a mask, and another one varies
        known = [one for name in inputs if (one := as_given(observation, name)) is not None]
        if all(one.min == one.max for one in known):
            message = f"all {whole.count} values of the batch are equal, {whole.mean:.3g}"
            yield INPUTS.fault(root, message, cause="a placeholder, or data that did not load")
            return
    for name in inputs:
        given, takers = as_given(observation, name), flow.consumers(name, as_it_is=True)
        records = (layers[taker] for taker in takers if taker in layers)
        weighted = (r for r in records if linear_maps(r) or HAS_WEIGHTS & r.options.keys())
        taker = next(weighted, None)  # the first with weights that takes it as it is
        if taker is None or given is None or not is_floating(given):
            continue
        if given.count >= _FEWEST_VALUES and given.std > 0.0:
            what = "its inputs" if len(inputs) == 1 else f"the values of {name}"
            yield from _values(observation, given, taker, what, settings["max_input_rms"])
            yield from _constant_features(root, given, what)
    ids = list(_ids(observation))
    yield from ids
    if not ids and whole.std > 0.0:
        yield from _repeated(root, observation)


def _constant_features(root: LayerRecord, given: TensorStatistics, what: str) -> Iterator[Finding]:
    """Yield columns of a table that hold one value for all samples, if most do and few are rare.

    Of what is sparse, as a bag of words, most are zero in every sample of a batch.
    """
    units = units_of(given) if len(given.shape) == 2 else None
    if units is None or units.observations < _FEWEST_OF_COLUMNS:
        return
    is_constant = units.minimum == units.maximum
    zeros = int((is_constant & (units.maximum == 0.0)).sum()) * units.observations
    count, varied = int(is_constant.sum()), given.count * (1.0 - is_constant.mean())
    is_most = 0.5 * len(is_constant) < count < len(is_constant)
    if is_most and given.zero_count - zeros <= 0.5 * varied:
        message = f"{count} of {len(is_constant)} columns of {what} are constant over the batch"
        cause = "columns that did not load, were scaled to nothing or filled in: look at the data"
        yield INPUTS.fault(root, message, value=float(count), cause=cause, severity="warn")


def _repeated(root: LayerRecord, observation: Observation) -> Iterator[Finding]:
    """Yield that the batch is one sample, many times: all that it holds goes by the sample.

    Where a tensor does not (edges of a graph, a step in time), that may tell its rows apart.
    """
    samples = observation.samples // max(observation.batches, 1)
    shapes = [one.shape for one in observation.given if math.prod(one.shape) > 1]
    is_one = root.equal_input_samples and all(shape[:1] == (samples,) for shape in shapes)
    if is_one and shapes and samples >= _FEWEST_SAMPLES:
        targets = [call.target for call in observation.loss_calls if call.target is not None]
        one_each = ((samples,), (samples, 1))
        differ = any(t.shape in one_each and t.min < t.max for t in targets)
        message = f"all {samples} samples of the batch are one and the same"
        cause = "a dataset or collation that gives the same index each time, or an expand"
        if differ:
            message += ", and their targets differ"
        else:
            cause += "; one sample many times may be meant, too"
        severity = "fail" if differ else "warn"
        yield INPUTS.fault(root, message, value=float(samples), cause=cause, severity=severity)


def _values(
    observation: Observation, given: TensorStatistics, taker: LayerRecord, what: str, limit: Limit
) -> Iterator[Finding]:
    """Yield what is wrong first with the values of one tensor.

    Columns of a table differ in their units, none is centred, and networks cope to some degree. A
    second normalisation takes a mean of 0 to -mean/std and a deviation of 1 to 1/std of the pixels,
    which lie in [0, 1]: a deviation of at least 2, and a mean below zero by less than five of them.
    """
    root, shape = observation.layers[""], given.shape
    low, high, mean, std = given.min, given.max, given.mean, given.std
    is_image = len(shape) == 4 and shape[1] in _IMAGE_CHANNELS and min(shape[2:]) > 1
    is_white = low == 0.0 and 0.98 * _WHITE <= high <= _WHITE and high.is_integer()  # of 8 bits
    is_table = len(given.shape) == 2 and not is_white and abs(mean) >= _CENTRED * std
    value, broken, is_mild = std, ALWAYS, False
    message = f"{what}, in [{low:.4g}, {high:.4g}] with a root mean square of {given.rms:.3g},"
    if given.rms > limit.value * (_TABLE_FACTOR if is_table else 1.0):
        value, broken = given.rms, limit
        cause = (
            "inputs that were not normalised, or scaled the wrong way: activations and gradients "
            "of the first layer grow with them; bring them to mean 0 and variance 1"
        )
        is_whole = low >= 0.0 and high <= _WHITE and low.is_integer() and high.is_integer()
        if is_white or (is_image and is_whole):
            cause = "raw images, 0 to 255: divide by 255 and normalise"
        elif not is_image:
            is_mild = _is_meant(observation, given, taker, limit)
    elif low >= 0.0 and abs(high * _WHITE - 1.0) < 0.02 and given.count >= 64:
        cause = "scaled twice, as images divided by 255 twice: 1 / 255 is 0.00392"
    elif is_image and high - low <= _NARROW * abs(mean):
        cause = (
            "images scaled before a mean was subtracted that was meant for the unscaled ones: "
            "divided by 255 twice, or standardised and then treated as pixels; normalise once"
        )
    elif is_image and _ONCE < std < 8.0 and -std < mean < -0.2 and high > std:
        broken = Limit(_ONCE, "always")
        cause = "images normalised twice: subtract the mean and divide by the deviation once"
    else:
        return
    message = f"{message} go into {taker.label!r} as they are"
    severity, details = "warn" if is_mild else "fail", largest_at(root, "inputs")
    told: dict[str, Any] = {"cause": cause, "details": details, "severity": severity}
    yield INPUTS.violation(root, message, value=value, limit=broken, **told)


def _is_meant(
    observation: Observation, given: TensorStatistics, taker: LayerRecord, limit: Limit
) -> bool:
    """Whether values may be large by design: before a norm, or around another number than zero."""
    takers = flow_of(observation).consumers(taker.name, as_it_is=True)
    after = [observation.layers[name] for name in takers if name in observation.layers]
    is_far = abs(given.mean) >= _CENTRED * given.std
    is_offset = is_far and given.rms <= _TABLE_FACTOR * limit.value
    is_normalised = bool(after) and all(map(is_normalization, after))
    return limit.origin == "default" and (is_normalised or is_offset)


def _ids(observation: Observation) -> Iterator[Finding]:
    """Yield tables that the batch asks for one row only, and not for positions.

    Segments and languages may be: it has the most rows of those whose vectors come together.
    """
    flow = flow_of(observation)
    inputs = set(flow.inputs)
    rows = {
        record.name: size
        for record in called(observation)
        if isinstance(size := record.options.get("num_embeddings"), int)
        and not ((ids := record.inputs) and ids.shape and ids.max - ids.min == ids.shape[-1] - 1)
        and not (flow.is_exact and inputs.isdisjoint(flow.producers(record.name)))
    }
    takers = {name: set(flow.consumers(name)) for name in rows}
    for name, size in rows.items():
        record, given = observation.layers[name], observation.layers[name].inputs
        if given is None or is_floating(given) or size < _FEWEST_ROWS or len(given.shape) < 2:
            continue
        is_beside = any(size < rows[other] and takers[name] & takers[other] for other in rows)
        is_one = given.count >= _FEWEST_VALUES and given.std == 0.0 and given.shape[-1] > 1
        if is_beside or not is_one:
            continue
        is_made = flow.is_exact and inputs.isdisjoint(flow.producers(name, as_it_is=True))
        cause = "a placeholder, or a tokeniser that knows none of the words"
        if is_made:
            cause = "the model made them so of what it was given: by a mask on purpose, or lost"
        elif given.mean == record.options.get("padding_idx"):
            cause = "every token is padding: the tokeniser or the collation lost the text"
        message = f"all {given.count} ids are {given.mean:.0f}: it is asked for one row only"
        severity = "warn" if is_made else "fail"
        yield INPUTS.fault(record, message, value=given.mean, cause=cause, severity=severity)
