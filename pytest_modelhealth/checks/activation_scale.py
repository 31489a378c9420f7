"""Activations that grow or fade on their way through the model, and where that begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.check import Check, Finding
from pytest_modelhealth.checks.evidence import completed, leaves
from pytest_modelhealth.checks.paths import NORMALIZATIONS, way_to_weights
from pytest_modelhealth.checks.weights import linear_maps
from pytest_modelhealth.settings import Limit, Setting, Settings

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord, Observation
    from pytest_modelhealth.statistics import TensorStatistics

_JUMP = 10.0
_RISEN = 3.0
_MASK = 1e8
_SHRINKS = 0.2
_FEWEST_IN_A_ROW = 3


class ActivationScale(Check):
    """Activations keep the scale of what goes in, up to what depth and residual sums explain.

    The scale is compared with that of the inputs and the first layer, not with a fixed range:
    residual streams grow with the root of their depth, and normalisations bring it back to one.
    What comes out in the end has the scale of the targets, whatever that is. A large output that a
    normalisation or a bounded activation takes back at once is theirs to judge.
    """

    name = "activation_scale"
    summary = "Activations neither grow nor fade beyond what depth explains."
    gravity = 35
    reads_scale = True
    definition = (
        "The root mean square of a layer's activations, if other weights come after it, is at most "
        "max_activation_growth times that of the model's inputs or its first layer's activations, "
        "whichever is larger, or 1; what normalisations are given, at most its square. Along "
        "layers that feed each other it falls to no less than min_activation_scale of that. The "
        "culprit is the layer that jumps, or the first of a rise or fall."
    )
    source = (
        "Glorot and Bengio (2010), He et al. (2015): initialisation keeps the variance; measured "
        "on 51 transformer architectures and 70 networks on digits: a growth of 11 at most"
    )
    minimum_evidence = "one batch"
    settings = (
        Setting(
            "max_activation_growth",
            float,
            default=100.0,
            minimum=1.0,
            help="largest root mean square of activations relative to the inputs and the first "
            "layer (11 is the most of healthy models, 40 residual blocks without a norm included)",
        ),
        Setting(
            "min_activation_scale",
            float,
            default=1e-8,
            minimum=0.0,
            maximum=1.0,
            help="smallest root mean square of activations relative to the inputs and the first "
            "layer, along layers that feed each other (float32 resolves 1e-7 beside a bias)",
        ),
    )

    def run(self, observation: Observation, settings: Settings) -> Iterator[Finding]:
        """Yield the layer where activations begin to grow too large, or fade, if they do."""
        inner = [record for record in leaves(observation) if _is_judged(record.activations)]
        if not inner:
            return
        base = _base(observation, inner[0])
        grown = list(self._grown(settings, inner, base))
        yield from grown or self._stream(settings, inner, base)
        yield from self._faded(observation, settings, inner, base)

    def _grown(
        self, settings: Settings, inner: list[LayerRecord], base: float
    ) -> Iterator[Finding]:
        weights = [completed(record) for record in inner if linear_maps(record)]
        last = max(weights, default=-1)
        for index, record in enumerate(inner):
            limit = settings.limit("max_activation_growth", record.name)
            growth = _rms(record.activations) / base
            stays = index + 1 < len(inner) and _rms(inner[index + 1].activations) * _JUMP > (
                limit.value * base
            )
            if completed(record) < last and growth > limit.value and stays:
                culprit, cause = _origin(inner[: index + 1], base)
                message = (
                    f"activations grow to {growth:.3g} times the scale of the inputs "
                    f"(root mean square {_rms(record.activations):.3g} at {record.label!r})"
                )
                others = [r.name for r in inner[index:] if r is not culprit]
                yield ActivationScale.violation(
                    culprit,
                    message,
                    value=growth,
                    limit=limit,
                    cause=cause,
                    affected=others,
                    seen_in=() if record is culprit else (record.name,),
                )
                return

    def _stream(
        self, settings: Settings, inner: list[LayerRecord], base: float
    ) -> Iterator[Finding]:
        """Yield where a residual stream begins to grow that normalisations hide."""
        norms = [r for r in inner if r.type_name in NORMALIZATIONS and _is_judged(r.inputs)]
        if not norms:
            return
        largest = max(norms, key=lambda record: _rms(record.inputs))
        limit = settings.limit("max_activation_growth", largest.name)
        growth = _rms(largest.inputs) / base
        if growth <= limit.value**2:
            return
        first = next(record for record in norms if _rms(record.inputs) > _RISEN * base)
        message = (
            f"what normalisations are given grows from here to {growth:.3g} times the scale of the "
            f"inputs (root mean square {_rms(largest.inputs):.3g} at {largest.label!r})"
        )
        bound = Limit(limit.value**2, limit.origin)
        others = [r.name for r in norms if _rms(r.inputs) > _RISEN * base and r is not first]
        yield ActivationScale.violation(
            first,
            message,
            value=growth,
            limit=bound,
            role="inputs",
            cause=_STREAM_CAUSE,
            affected=others,
        )

    def _faded(
        self, observation: Observation, settings: Settings, inner: list[LayerRecord], base: float
    ) -> Iterator[Finding]:
        """Yield the first of several layers in a row that each shrink what they are given."""
        judged = {record.name for record in inner}
        for first in (r for r in inner if linear_maps(r)):
            row = _shrinking_row(observation, first, judged)
            if len(row) < _FEWEST_IN_A_ROW:
                continue
            scale = _rms(row[-1].activations) / base
            limit = settings.limit("min_activation_scale", row[-1].name)
            if scale < limit.value:
                message = (
                    f"activations fade to {scale:.2g} of the scale of the inputs over "
                    f"{len(row)} layers, at {row[-1].label!r}"
                )
                cause = f"each layer from here on shrinks what it is given: {_fading_cause(row)}"
                yield ActivationScale.violation(
                    first,
                    message,
                    value=scale,
                    limit=limit,
                    cause=cause,
                    affected=[r.name for r in row[1:]],
                )
                return


def _fading_cause(row: list[LayerRecord]) -> str:
    small = [r for r in row if all(m.scale < 2.0 * _SHRINKS for m in linear_maps(r))]
    if 2 * len(small) > len(row):
        return "weights too small, without biases or normalisation to hold the signal up"
    return "a factor or a flat activation between them, and no normalisation"


_STREAM_CAUSE = (
    "a residual stream that is scaled up in every block, or branches that add far more than the "
    "stream holds: x + branch(norm(x)) adds each once"
)


def _shrinking_row(
    observation: Observation, first: LayerRecord, judged: set[str]
) -> list[LayerRecord]:
    """Return the layers with weights that feed each other from `first` on, while each shrinks."""
    row = [first]
    while _gain(row[-1]) < _SHRINKS:
        path = way_to_weights(observation, row[-1])
        if any(layer.type_name in NORMALIZATIONS for layer in path):
            break  # it brings the signal back, once it has seen a batch
        if not path or path[-1] in row or path[-1].name not in judged:
            break
        row.append(path[-1])
    return row if _gain(row[-1]) < _SHRINKS else row[:-1]


def _gain(record: LayerRecord) -> float:
    """Return by what a layer multiplies; nothing comes of queries that start at zero, or fades."""
    given = _rms(record.inputs)
    return _rms(record.activations) / given if given else 1.0


def _is_judged(statistics: TensorStatistics | None) -> bool:
    """Leave out what `finite` judges, masks, and layers that show no numbers."""
    return (
        statistics is not None
        and statistics.count > 0
        and not statistics.nonfinite_count
        and not statistics.min < -_MASK
    )


def _rms(statistics: TensorStatistics | None) -> float:
    return 0.0 if statistics is None else statistics.rms


def _base(observation: Observation, first: LayerRecord) -> float:
    root = observation.layers.get("")
    given = None if root is None else root.inputs
    is_float = given is not None and given.dtype.startswith(("float", "bfloat"))
    scale = _rms(given) if is_float and _is_judged(given) else _rms(first.activations)
    return max(scale, 1.0)


def _origin(path: list[LayerRecord], base: float) -> tuple[LayerRecord, str]:
    """Return the layer where the growth begins, and its likely cause."""
    scales = [base, *(_rms(record.activations) for record in path)]
    for record, before, after in zip(path, scales, scales[1:], strict=False):
        if after > _JUMP * max(before, base):
            return record, _jump_cause(record, after / max(before, base))
    risen = len(path) - 1
    while risen > 0 and _rms(path[risen - 1].activations) > _RISEN * base:
        risen -= 1
    weighted = [record for record in path[risen:] if linear_maps(record)]
    large = [r for r in weighted if max(m.scale for m in linear_maps(r)) > _LARGE]
    why = (
        "weights too large"
        if 2 * len(large) > len(weighted)
        else "a residual stream that is added"
        " to without a normalisation, or a factor in the forward"
    )
    return (weighted or path[risen:])[0], f"the gains of the layers from here on multiply: {why}"


_LARGE = 1.7
"""He et al. (2015) start at 1.41, which keeps the scale behind a ReLU."""


def _jump_cause(record: LayerRecord, factor: float) -> str:
    given = record.inputs
    if given is not None and given.finite_count and given.rms > 0.0:
        gain = _rms(record.activations) / given.rms
        if gain < _JUMP / 3.0:
            return f"what comes in is {factor:.3g} times larger than what went out before it"
        factor = gain
    for found in linear_maps(record):
        if given is not None and 2.0 * found.scale * given.rms >= _rms(record.activations):
            return (
                f"it magnifies by {factor:.3g}: its {found.tensor} reaches "
                f"{found.weights.abs_max:.3g} at a fan-in of {found.fan_in}"
            )
    for name, values in record.parameters.items():
        reach = values.abs_max * (1.0 if "bias" in name or given is None else given.rms)
        if 2.0 * reach >= _rms(record.activations):
            return f"it magnifies by {factor:.3g}: its {name} reaches {values.abs_max:.3g}"
    return (
        f"it gives out {factor:.3g} times what it takes: it sums, takes the largest, or a factor "
        "is missing or misplaced in its forward"
    )
