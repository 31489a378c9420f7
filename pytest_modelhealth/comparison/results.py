"""Whether a difference is more than rounding explains: cheap tests first, further runs if need be.

1. Equal elements need no tolerance.
2. A difference within the floor, of epsilon and depth, needs no run.
3. Copies of the reference whose parameters and inputs are off by a rounding tell how far such a
   change moves each number; for a quantised candidate, copies that are rounded in its steps.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from pytest_modelhealth.capture import Request
from pytest_modelhealth.comparison.links import BACKWARD, FLOWING, Link, missing_gradients
from pytest_modelhealth.comparison.measures import Difference, gap, measure
from pytest_modelhealth.comparison.rounding import EIGHT_BITS
from pytest_modelhealth.comparison.trace import Key, Trace, TwoRuns, Watcher
from pytest_modelhealth.progress import track
from pytest_modelhealth.settings.setting import is_inside
from pytest_modelhealth.statistics.dense import dense_values
from pytest_modelhealth.tolerance import RUNS, Steps, floor, observed, perturbed

FACTOR = 10.0  # how many times the natural noise a difference may be

SETTLED = 5.0
"""The noise of three perturbed runs is less than this multiple of that of the first one."""

Size = tuple[float, float]  # an L2 norm, and the largest magnitude of an element

NONE: Size = (0.0, 0.0)


@dataclass(eq=False)
class TensorResult:
    """What became of one tensor of the reference."""

    link: Link  # the tensor, and what it is compared with
    limit: float  # the ratio up to which the two are equivalent
    # what separates the two; ``None`` where they cannot be compared
    difference: Difference | None = None
    # what is wrong, where it is no number that is off: a shape, a missing gradient
    problem: str = ""
    # the candidate's shape, where the tensor flows through the layer in another one; else ``""``
    shape: str = ""
    unseen: str = ""  # why it was not seen, where it is the gradient of a layer without parameters
    error: Size = NONE  # how far the candidate is off
    floor: Size = NONE  # the least noise to expect
    moved: Size = NONE  # how far further runs of the reference moved it
    measured_by: str = "floor"  # what the noise was measured by

    @property
    def key(self) -> Key:
        """The tensor."""
        return self.link.reference

    @property
    def candidate(self) -> tuple[str, ...]:
        """Names of the candidate's layers that hold its counterpart."""
        return tuple(dict.fromkeys(one.layer for one in self.link.candidate))

    @property
    def is_equal(self) -> bool:
        """Whether the two are equal bit for bit."""
        return self.difference is not None and not self.difference.unequal

    @property
    def diverged(self) -> bool:
        """Whether there is more than rounding explains."""
        return self.ratio > self.limit

    @property
    def source(self) -> str:
        """What the noise was measured by.

        ``"equal"``, ``"floor"``, ``"perturbed"``, ``"quantised"``, or ``"none"`` where there is
        nothing to measure.
        """
        if self.is_equal:
            return "equal"
        return "none" if math.isinf(self.ratio) else self.measured_by

    @property
    def noise(self) -> float:
        """The natural noise, relative to the reference's norm."""
        norm = self.difference.norm if self.difference is not None else 0.0
        return max(self.floor[0], self.moved[0]) / norm if norm else 0.0

    @property
    def ratio(self) -> float:
        """The error by the natural noise; infinite where no rounding explains it.

        It is that of the norm or of the worst element. Of quantised tensors that of the norm alone:
        what lies beyond the calibrated range is cut off, of a few elements by many steps.
        """
        if self.problem or (self.difference is not None and self.difference.nonfinite):
            return math.inf
        if self.is_equal or not any(self.error):
            return 0.0
        scale = map(max, zip(self.floor, self.moved, strict=True))
        ratios = [e / s if s else math.inf for e, s in zip(self.error, scale, strict=True)]
        return ratios[0] if self.measured_by == "quantised" else max(ratios)


@dataclass
class Judge:
    """Tells of each linked tensor whether it differs by more than rounding explains."""

    runs: TwoRuns  # both runs
    request: Request  # asks for a run of the reference's module: batch, target, loss and backward
    epsilons: tuple[float, float]  # machine epsilon of the reference and of the candidate
    factor: float  # how many times the noise a difference may be
    # machine epsilon of the layers of the reference that are coarser than the rest
    coarser: Mapping[str, float]
    notes: list[str]  # takes what a reader should know
    # those of the weights of a quantised candidate; ``None`` for any other
    steps: Steps | None = None

    def results(self, links: Iterable[Link]) -> list[TensorResult]:
        """Return what became of each linked tensor, and of the gradients without counterpart."""
        results, factor = [TensorResult(one, self.factor) for one in links], self.factor
        self._measure(results)
        self._set_floors(results, max(self.epsilons) if self.steps is None else EIGHT_BITS)
        if any(factor < one.ratio < math.inf for one in results):
            # the runs are made, so what is near the limit may be told its true noise too
            self._measure_noise([one for one in results if factor / 3 < one.ratio < math.inf])
        return results + [
            TensorResult(
                link,
                factor,
                problem=f"there is no gradient in the candidate: {why}",
                unseen="" if self.runs.a.layers[link.reference.layer].parameters else why,
            )
            for link, why in missing_gradients(self.runs)
        ]

    def _measure(self, results: list[TensorResult]) -> None:
        """Measure each difference, once for tensors that are seen several times."""
        a, b, store = self.runs.a, self.runs.b, self.runs.store
        known: dict[tuple[object, ...], tuple[Difference | None, str]] = {}
        for one in results:
            link = one.link
            slots = tuple(b.entries[key].slot for key in link.candidate)
            identity = a.entries[link.reference].slot, slots, link.part, link.transposed
            if identity not in known:
                expected, found = link.read(store, a, b)
                off, what = None, f"shape {_shape(found.shape)} instead of {_shape(expected.shape)}"
                if expected.shape == found.shape:
                    off, what = measure(expected, found), ""
                    if off.unequal and not expected.is_floating_point():
                        what = f"{off.unequal} of {off.count} whole numbers differ"
                known[identity] = off, what
            one.difference, one.problem = known[identity]
            shape, is_flowing = b.entries[link.candidate[0]].shape, one.key.role in FLOWING
            if one.difference is not None:
                one.error = one.difference.error_norm, one.difference.max_abs
                is_whole = len(link.candidate) == 1 and link.part is None
                is_flowing &= is_whole and a.entries[link.reference].shape != shape
            one.shape = _shape(shape) if is_flowing else ""

    def _set_floors(self, results: list[TensorResult], epsilon: float) -> None:
        """Set the least noise of each tensor; gradients of a layer's parameters share a scale.

        In a model of several dtypes a tensor has the epsilon of its layer, a gradient that of them
        all. What a coarse layer does to those behind it, perturbed runs tell.
        """
        a = self.runs.a
        coarsest = max(self.coarser.values(), default=epsilon)
        for one in results:
            key, difference = one.key, one.difference
            if difference is None:
                continue
            norm, most, width = difference.norm, difference.abs_max, math.sqrt(difference.count)
            roundings = a.depths[a.entries[key].moment]
            if key.role == "parameter_gradients":
                gradients = a.layers[key.layer].parameter_gradients.values()
                finite = [(one.rms, one.abs_max) for one in gradients if math.isfinite(one.rms)]
                rms, abs_max = map(max, zip(*finite, NONE, strict=True))
                terms, term = _terms(a, key)
                roundings *= terms
                norm = max(norm, rms * width, term * math.sqrt(terms) * width)
                most = max(most, abs_max, term * math.sqrt(terms))
            elif key.role == "buffers":
                # The mean of inputs that cancel says nothing of the size that rounding goes by.
                inputs = a.layers[key.layer].inputs
                rms = inputs.rms if inputs is not None and math.isfinite(inputs.rms) else 0.0
                norm, most = max(norm, rms * width), max(most, rms)
            own = coarsest if key.role in BACKWARD else self.coarser.get(key.layer, epsilon)
            relative = floor(own, roundings)
            one.floor = relative * norm, relative * most

    def _measure_noise(self, results: list[TensorResult]) -> None:
        """Measure the noise by further runs, until the first result is far beyond its limit."""
        by, epsilon = "perturbed", max(self.epsilons)
        if self.steps is not None:
            by, epsilon = "quantised", self.epsilons[0]
        by_key: dict[Key, list[TensorResult]] = defaultdict(list)
        for one in results:
            by_key[one.key].append(one)

        def beside(key: Key, value: Tensor) -> None:
            seen = dense_values(value).values.cpu() if key in by_key else value
            for one in by_key.get(key, ()):
                expected = self.runs.store[self.runs.a.entries[key].slot]
                if seen.shape == expected.shape:
                    norm, largest = gap(expected, seen)
                    one.moved = max(one.moved[0], norm), max(one.moved[1], largest)
                    one.measured_by = by

        for seed in track(range(RUNS), "running the reference perturbed"):
            first = next((one for one in results if one.ratio > self.factor), None)
            if first is None or (seed and first.ratio > SETTLED * self.factor):
                return
            try:  # the copy is not the user's: what it raises or warns of is a note
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    request = perturbed(self.request, epsilon, seed, self.coarser, self.steps)
                    request = replace(request, visitor=Watcher(beside))
                    failure = next(iter(observed(request).errors), "")
            except Exception as error:  # noqa: BLE001 - in another precision it may fail anyhow
                failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if failure:
                self.notes.append(f"the noise could not be measured: {failure}")
                return


def without_effect(results: Iterable[TensorResult]) -> list[TensorResult]:
    """Return the tensors that differ and make no difference to what is computed from them.

    - A tensor in another shape: another order of axes, or one step of a sequence at a time. Element
      by element such tensors tell nothing; the next tensor of the same shape tells.
    - What a layer takes, where all it gives agrees, and the gradients that it passes on: a mask of
      -1e9 for one of -inf, or scores that are shifted before a softmax.
    - A gradient that was not seen at a layer without parameters, where the next one agrees.
    - The gradient of what a layer with others in it returns, where all other gradients agree. A
      tensor that is returned and read inside has both ways in its gradient, a copy of it one.
    """
    results = list(results)
    found = set(_inputs_without_effect(results))
    for backward in (False, True):
        waiting: list[TensorResult] = []
        for one in results:
            if (one.key.role in BACKWARD) is not backward or one.key.role == "buffers":
                continue
            if one in found or (one.diverged and (one.shape or one.unseen)):
                waiting.append(one)
                continue
            found.update(() if one.diverged else waiting)
            waiting = []
    rest = [one for one in results if one.key.role in BACKWARD and one not in found]
    right = [one.key.layer for one in rest if not one.diverged]
    wrong = [one for one in rest if one.diverged]
    if all(
        one.key.role == "gradients"
        and not one.problem
        and any(is_inside(name, one.key.layer) for name in right)
        for one in wrong
    ):
        found.update(wrong)
    return [one for one in results if one in found]


def _inputs_without_effect(results: list[TensorResult]) -> list[TensorResult]:
    """Return the inputs that differ, of layers that give and pass on what they should."""
    given: dict[str, list[TensorResult]] = defaultdict(list)
    last: str | None = None
    passed_on = set[str]()
    for result in results:
        layer, role = result.key.layer, result.key.role
        if role != "inputs":
            given[layer].append(result)
        if role in BACKWARD:
            if last is not None and last != layer and last not in passed_on:
                given[last].append(result)  # what it passes on to the one before it
                passed_on.add(last)
            last = layer
    right = {
        layer
        for layer, every in given.items()
        if any(one.key.role == "activations" for one in every)
        and not any(one.diverged for one in every)
    }
    inputs = [one for one in results if one.key.role == "inputs" and one.diverged]
    return [one for one in inputs if one.key.layer in right]


def are_one_function(results: list[TensorResult], a: Trace, b: Trace) -> bool:
    """Whether what the models return, keep and learn by is equal bit for bit, whatever is inside.

    Outputs alone tell nothing where they are whole numbers or NaN, nor of a layer whose numbers no
    gradient comes to, as behind a factor of zero.
    """
    equal = {
        one.key
        for one in results
        if one.difference is not None and not (one.difference.unequal or one.difference.nan_both)
    }
    runs = a.observation, b.observation
    told = ("outputs", "parameter_gradients") if all(run.backward for run in runs) else ("outputs",)
    due = {key for key in a.entries if key.role in told}
    due |= {one.key for one in results if one.key.role in ("buffers", "parameter_gradients")}
    if not due <= equal or (None not in (x.loss for x in runs) and runs[0].loss != runs[1].loss):
        return False
    seen = [runs[0].layers[one.key.layer].gradients for one in results if one.diverged]
    is_floating = any(
        key.role == "outputs" and a.entries[key].dtype.is_floating_point for key in due
    )
    return is_floating and all(one is None or one.abs_max > 0 for one in seen)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _terms(a: Trace, key: Key) -> tuple[int, float]:
    """Return how many terms the gradient of a parameter sums, and the root mean square of these.

    There is a term for each sample and position. Their errors may have one sign, as where a batch
    norm takes a rounded mean off all of them, so that they add up rather than cancel; the terms
    themselves may cancel, and then the sum says nothing of their size. Of matrices the terms are
    not known, and the sum has to do.
    """
    layer, shape = a.observation.layers[key.layer], a.entries[key].shape
    if layer.activations is None or not shape:
        return 1, 0.0
    terms = max(layer.activations.count // max(shape[0], 1), 1)
    return terms, layer.gradients.rms if len(shape) == 1 and layer.gradients is not None else 0.0
