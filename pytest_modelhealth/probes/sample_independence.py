"""Samples of a batch do not see each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.facts import flow_of
from pytest_modelhealth.probes.probe import Probe
from pytest_modelhealth.probes.words import began, cause, figures, parting_at, ratio
from pytest_modelhealth.settings import Setting, Settings

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_modelhealth.capture.step.batch import Inputs
    from pytest_modelhealth.probes.intervening.locating import Apart, Place
    from pytest_modelhealth.probes.intervening.running import Ran, Runs
    from pytest_modelhealth.report import LayerRecord, Observation, Parting, ProbeRecord, Violation

CHANGED = "every second sample overwritten by its neighbour"
_CAUSES = (
    (
        frozenset({"lstm", "gru", "rnn", "attention", "transformer"}),
        "it takes the first dimension of what it is given for time: batch_first=True, or transpose",
    ),
    (frozenset({"softmax"}), "a softmax over the batch: check its dim, 0 is that of samples"),
    (frozenset({"batchnorm"}), "batch statistics in evaluation mode: say track_running_stats=True"),
    (
        frozenset({"mean", "sum", "std", "var", "amax", "amin", "max", "min", "norm", "cumsum"}),
        "it reduces over the batch: check its dim, 0 is that of samples",
    ),
    (
        frozenset({"view", "reshape", "flatten", "unflatten"}),
        "a view that takes dimensions in another order than they have: transpose or permute first",
    ),
    (frozenset({"roll", "flip", "sort", "argsort"}), "it moves samples: check its dim"),
)
_DESIGNS = {
    "choice": "it chooses among the values of all samples (topk, a capacity): experts that choose "
    "among all tokens do so on purpose, and nothing that was seen tells",
    "order": "samples are put in another order before a layer takes them: negatives and replayed "
    "steps do so on purpose, and nothing that was seen tells; else check the dim",
    "sequence": "it is given one sequence, whose steps are the samples: unsqueeze(1) makes samples "
    "of rows; attention between rows, and a batch that is one sequence, are meant so",
}
"""What is meant in some models, by its kind."""
_OTHERWISE = (
    "a view that mixes dimensions, a softmax or a mean over the batch, batch statistics in "
    "evaluation, or a layer that takes the batch for a sequence (batch_first)"
)


_NO_ROWS = (
    "no output has a row for each of the {} samples, so that nothing tells them apart; return what "
    "is computed for each, not only a loss"
)


class SampleIndependence(Probe):
    """No sample of a batch has an effect on what the model returns for another one."""

    name = "sample_independence"
    summary = "What the model returns for a sample does not depend on the rest of the batch."
    rank = 33
    definition = (
        "In evaluation mode, every second sample is overwritten by a copy of its neighbour, in all "
        "tensors of the batch at once; the outputs of the others change by at most "
        "max_sample_effect of the output's root mean square. A sample alone keeps its dimension."
    )
    source = (
        "overwriting keeps shapes and random draws, so that healthy models do not change by a bit "
        "(734 of 803 judged, 0 false); a permutation would leave means over the batch, and so "
        "most leaks, as they are"
    )
    minimum_evidence = "two samples that differ, and an output with a row for each"
    settings = (
        Setting(
            "max_sample_effect",
            float,
            default=1e-4,
            minimum=0.0,
            help="largest change of a sample's output when other samples of its batch change, by "
            "the output's root mean square (healthy models: 0, but where routing changes the "
            "shapes of products)",
            per_layer=False,
        ),
    )

    def probe(self, runs: Runs) -> ProbeRecord:
        """Overwrite every second sample; then run one sample alone."""
        dimension = runs.conventions.batch_dim or 0
        samples, doubt = _samples(runs, dimension)
        if doubt:
            return self.not_told(doubt)
        base = runs.base
        if base.error:
            return self.not_told(f"in evaluation mode the model raises {base.error}")
        rows = {n: _rows(t, samples, dimension) for n, t in enumerate(base.outputs)}
        outputs = {n: axis for n, axis in rows.items() if axis is not None}
        if not outputs:
            return self.not_told(_NO_ROWS.format(samples))
        from pytest_modelhealth.probes.intervening.batches import overwritten

        ran = [runs.forward(overwritten(runs, samples, dimension, parity)) for parity in (0, 1)]
        if error := ran[0].error or ran[1].error:
            return self.not_told(f"with {CHANGED} the model raises {error}", CHANGED)
        return _Verdict(self, runs, samples, dimension, outputs).of(ran)

    def judge(
        self,
        parting: Parting,
        record: ProbeRecord,
        observation: Observation,
        settings: Settings,
    ) -> Iterator[Violation]:
        """Yield that samples see each other, at the layer where it begins."""
        limit = settings["max_sample_effect"]
        culprit = observation.layers.get(parting.layer, observation.layers[""])
        if parting.kind == "lost dimension":
            yield self.violation(
                culprit,
                f"of one sample alone it {parting.detail}",
                value=parting.effect,
                cause="squeeze() without a dimension drops that of the samples when there is one: "
                "say which, squeeze(-1)",
                independent=True,
            )
        elif parting.effect > limit.value:
            yield self.violation(
                culprit,
                "samples see each other: other samples change an output by "
                f"{ratio(parting.effect)} of its root mean square{began(parting)}",
                value=parting.effect,
                limit=limit,
                cause=_DESIGNS.get(parting.kind) or cause(parting, culprit, _CAUSES, _OTHERWISE),
                independent=True,
                severity="warn" if parting.kind in _DESIGNS else "fail",
                details=figures(parting, record.changed),
            )


def _samples(runs: Runs, dimension: int) -> tuple[int, str]:
    """Return the size of the batch, or why it is not known."""
    from pytest_modelhealth.probes.intervening.batches import all_equal

    tensors = [t for t in runs.tensors if t.ndim]
    if runs.has_others:
        return 0, "the batch holds a tensor that is sparse, nested or quantized; give dense ones"
    if not tensors:
        return 0, "the batch holds no tensor with dimensions"
    if runs.conventions.batch_dim is not None and not -1 < dimension < tensors[0].ndim:
        shape = tuple(tensors[0].shape)
        return 0, f"batch_dim={dimension} is no dimension of the batch, whose shape is {shape}"
    samples = tensors[0].shape[dimension]
    sizes = [t.shape[dimension] if t.ndim > dimension else 0 for t in tensors]
    if runs.conventions.batch_dim is None and set(sizes) != {samples}:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors[:4])
        return 0, (
            f"the tensors of the batch have no first dimension in common ({shapes}), so that it is "
            "not known which is that of samples; say batch_dim=0 if it is the first"
        )
    if samples < 2:
        return 0, f"the batch has {'one sample' if samples else 'no samples'}; give two or more"
    if all_equal(tensors, samples, dimension):
        return 0, "all samples of the batch are equal; give samples that differ"
    return samples, ""


def _rows(output: Tensor, samples: int, dimension: int) -> int | None:
    """Return the dimension of samples of an output: that of the batch, or the one of their number.

    Time in front is pooled away, or comes in front, as a loss over sequences asks for it.
    """
    if not (output.is_floating_point() or output.is_complex()):
        return None
    axes = [axis for axis, size in enumerate(output.shape) if size == samples]
    return dimension if dimension in axes else axes[0] if len(axes) == 1 else None


class _Verdict:
    """What follows from the run in which samples were overwritten."""

    def __init__(
        self, probe: Probe, runs: Runs, samples: int, dimension: int, outputs: dict[int, int]
    ) -> None:
        self._probe, self._runs = probe, runs
        self._samples, self._dimension = samples, dimension
        self._outputs = outputs

    def of(self, ran: list[Ran]) -> ProbeRecord:
        """Return the record of the probe."""
        seen = self._seen(ran)
        doubt = self._without_effect(ran)
        if seen and not doubt:
            fewer = self._runs.forward(self._first(self._samples - 1))
            seen = [] if fewer.error else [one for one in seen if not self._pairs(one[1], fewer)]
            doubt = "" if seen else self._no_samples(fewer)
        partings: list[Parting] = []
        if seen and not doubt:
            found, _, parity = max(seen)
            parting, doubt = self._parting(found, parity)
            partings.append(parting)
        if doubt:
            return self._probe.not_told(doubt, CHANGED)
        alone = self._runs.forward(self._first(1))
        notes = (f"of one sample alone the model raises {alone.error}",) if alone.error else ()
        if not alone.error:
            partings += self._lost(alone)
        return self._probe.judged(*partings, changed=CHANGED, notes=notes)

    def _without_effect(self, ran: list[Ran]) -> str:
        """Return why no sample has an effect, on itself neither; ``""`` where one has."""
        outputs = {n: self._runs.base.outputs[n] for n in self._outputs}
        if not any(bool(output.isfinite().any()) for output in outputs.values()):
            return "its outputs hold no finite number"
        if any(_moved(outputs[n], one.outputs[n : n + 1]) for n in outputs for one in ran):
            return ""
        return (
            "the output is the same for all samples, so that none can be seen to have an effect; "
            "train for a step first"
        )

    def _seen(self, ran: list[Ran]) -> list[tuple[Apart, int, int]]:
        """Return what differs in samples that were left alone, with its output and the parity."""
        from pytest_modelhealth.probes.intervening.locating import ROUNDING

        return [
            (found, n, parity)
            for parity, one in enumerate(ran)
            for n, found in self._effects(one, parity).items()
            if found.effect > ROUNDING.get(self._runs.base.outputs[n].dtype, 1e-5)
        ]

    def _no_samples(self, fewer: Ran) -> str:
        """Return why rows that see each other are no samples; ``""`` where they pair samples."""
        if fewer.error:
            return (
                f"with one sample less the model raises {fewer.error}: it is bound to the size of "
                "this batch, whose rows are no samples"
            )
        if all(self._is_bound(n, fewer) for n in self._outputs):
            return (
                f"of one sample less its output still has {self._samples} rows, which are no "
                "samples; give a batch of another size"
            )
        if self._dimension not in self._outputs.values():
            return _NO_ROWS.format(self._samples)
        return ""

    def _effects(self, ran: Ran, parity: int) -> dict[int, Apart]:
        from pytest_modelhealth.probes.intervening.batches import along, kept
        from pytest_modelhealth.probes.intervening.locating import apart

        effects = {}
        for n, axis in self._outputs.items():
            before = self._runs.base.outputs[n]
            same = along(kept(self._samples, parity), before, axis)
            found = apart(before, ran.outputs[n], same) if n < len(ran.outputs) else None
            if found is not None:
                effects[n] = found
        return effects

    def _first(self, count: int) -> Inputs:
        from pytest_modelhealth.probes.intervening.batches import first_samples

        return first_samples(self._runs, count, self._samples, self._dimension)

    def _pairs(self, output: int, fewer: Ran) -> bool:
        """Whether another dimension of an output changes with the number of samples."""
        if output >= len(fewer.outputs):
            return True
        shape = list(self._runs.base.outputs[output].shape)
        shape[self._outputs[output]] -= 1
        return list(fewer.outputs[output].shape) != shape

    def _is_bound(self, output: int, fewer: Ran) -> bool:
        """Whether an output has as many rows as before, of one sample less."""
        return output < len(fewer.outputs) and (
            fewer.outputs[output].shape == self._runs.base.outputs[output].shape
        )

    def _lost(self, alone: Ran) -> Iterator[Parting]:
        from pytest_modelhealth.report import Parting

        for n, axis in self._outputs.items():
            expected = list(self._runs.base.outputs[n].shape)
            whole = tuple(expected)
            expected[axis] = 1
            if n >= len(alone.outputs) or alone.outputs[n].ndim >= len(expected):
                continue
            shape = tuple(alone.outputs[n].shape)
            detail = f"returns the shape {shape}, of {self._samples} samples {whole}"
            yield Parting("lost dimension", 0.0, "", detail=detail)
            return

    def _parting(self, found: Apart, parity: int) -> tuple[Parting, str]:
        """Return where samples see each other first, or why nothing can be told."""
        from pytest_modelhealth.probes.intervening.batches import overwritten, rows_of
        from pytest_modelhealth.probes.intervening.locating import where_they_part
        from pytest_modelhealth.probes.intervening.repeating import unsteady

        runs = self._runs
        before, after = runs.batch(), overwritten(runs, self._samples, self._dimension, parity)
        place = where_they_part(runs, before, after, rows_of(self._samples, parity))
        parting = parting_at(_kind(place), found, place)
        doubt = "" if place is None else self._doubt(place)
        return parting, doubt or unsteady(runs)

    def _doubt(self, place: Place) -> str:
        """Return why samples may see each other by design; ``""`` where none is known."""
        assert place.observation is not None
        record = place.observation.layers[place.layer]
        options = record.options
        if options.get("track_running_stats") is False:
            return (
                f"{record.label!r} has no running statistics (track_running_stats=False), so that "
                "it normalises by the batch in evaluation mode too"
            )
        if _has_weights_from_elsewhere(place, record, self._samples):
            return (
                f"{record.label!r} gives another output for equal inputs: its weights are made of "
                "the batch, as where a model adapts to it"
            )
        if self._is_time_major():
            return (
                "outputs are independent along their second dimension instead: if that is the one "
                "of samples, say batch_dim=1"
            )
        return ""

    def _is_time_major(self) -> bool:
        """Whether the second dimension behaves as that of samples does."""
        from pytest_modelhealth.probes.intervening.batches import along, kept, overwritten
        from pytest_modelhealth.probes.intervening.locating import apart

        runs, base = self._runs, self._runs.base
        tensors = [t for t in runs.tensors if t.ndim]
        sizes = {t.shape[1] if t.ndim > 1 else 0 for t in tensors}
        size = sizes.pop() if len(sizes) == 1 else 0
        judged = [base.outputs[n] for n in self._outputs]
        if self._dimension or size < 2 or any(t.ndim < 2 or t.shape[1] != size for t in judged):
            return False
        ran = runs.forward(overwritten(runs, size, 1))
        if ran.error:
            return False
        found = [
            apart(base.outputs[n], ran.outputs[n], along(kept(size, 0), base.outputs[n], 1))
            for n in self._outputs
        ]
        return all(one is not None and one.effect < 1e-6 for one in found)


def _has_weights_from_elsewhere(place: Place, record: LayerRecord, samples: int) -> bool:
    """Whether a layer that takes each row by itself gave another output for an equal one.

    One whose forward does more than a product (a subclass of Linear) need not take rows so.
    """
    width = record.options.get("in_features")
    if place.given or width is None or width == samples or place.observation is None:
        return False
    flow = flow_of(place.observation)
    return len({flow.graph.vertices[n].function for n in flow.inside(place.layer)}) <= 1


def _moves_inputs(place: Place) -> bool:
    """Whether a layer takes rows of the batch that were only put in another order."""
    flow = None if place.observation is None else place.observation.flow
    if flow is None or not place.given:
        return False
    sources = set(flow.producers(place.given))
    return sources <= set(flow.inputs) and set(place.between) <= _MOVES and bool(place.between)


_MOVES = frozenset({"roll", "flip", "index", "index_select", "gather"})


def _is_one_sequence(record: LayerRecord) -> bool:
    """Whether a layer of torch is given one sequence, by its dimensions."""
    is_sequential = "batch_first" in record.options or record.type_name == "MultiheadAttention"
    shape = () if record.inputs is None else record.inputs.shape
    return is_sequential and (len(shape) == 2 or (len(shape) == 3 and 1 in shape[:2]))


def _kind(place: Place | None) -> str:
    """Return by what samples see each other: what may be meant so is a kind of its own."""
    if place is None or place.observation is None:
        return "values"
    if place.chosen:
        return "choice"
    if _moves_inputs(place):
        return "order"
    return "sequence" if _is_one_sequence(place.observation.layers[place.layer]) else "values"


def _moved(before: Tensor, after: list[Tensor]) -> bool:
    """Whether an output, if there is one, is another."""
    from pytest_modelhealth.probes.intervening.locating import largest

    found = largest([before], after)
    return found is not None and found.effect > 0.0
