"""How far two tensors are apart, and whether by more than rounding explains.

Cheap tests come first, further runs if need be:

1. Equal elements need no tolerance.
2. A difference within the floor, of epsilon and depth, needs no run.
3. Copies of the reference whose parameters and inputs are off by a rounding tell how far such a
   change moves each number; for a quantised candidate, by what rounding in eight bits moves.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pytest_modelhealth.capture import Request
from pytest_modelhealth.comparison.counterparts import BACKWARD, FLOWING, Link, missing_gradients
from pytest_modelhealth.comparison.layer_differences import given_dtypes, kept_dtypes, layer_epsilon
from pytest_modelhealth.comparison.runs import Key, Trace, TwoRuns, Watcher
from pytest_modelhealth.progress import track
from pytest_modelhealth.statistics.dense import dense_values
from pytest_modelhealth.tolerance import (
    QUANTISED,
    RUNS,
    epsilon_of,
    floor,
    observed,
    perturbed,
    product_epsilon,
)

CHUNK = 1 << 20  # elements that are brought to float64 at a time

FACTOR = 10.0  # how many times the natural noise a difference may be

SETTLED = 5.0
"""The noise of three perturbed runs is less than this multiple of that of the first one."""

EIGHT_BITS = 2.0**-5
"""What stands for the machine epsilon of tensors in eight bits, of which some processors use seven:
half a step of a range of eight deviations, by the root mean square."""

Size = tuple[float, float]  # an L2 norm, and the largest magnitude of an element

NONE: Size = (0.0, 0.0)


@dataclass
class Difference:
    """What separates a tensor of the candidate from the reference's, element by element.

    Norms and errors are of the elements that are finite on both sides, computed in float64.
    """

    count: int  # number of elements
    unequal: int = 0  # how many are not equal; two NaNs are equal, and so are two equal infinities
    nan_reference: int = 0  # NaNs in the reference only
    nan_candidate: int = 0  # NaNs in the candidate only
    nan_both: int = 0  # NaNs on both sides
    other_infinities: int = 0  # elements that are infinite on one side, or with another sign
    max_abs: float = 0.0  # largest absolute error
    abs_max: float = 0.0  # largest magnitude in the reference
    error_squares: float = 0.0  # sum of the squared errors
    squares: float = 0.0  # sum of the reference's squares
    # index of the largest absolute error, or of the first element that is NaN or infinite on one
    # side only
    at: tuple[int, ...] | None = None
    expected: float = math.nan  # the reference's value there
    found: float = math.nan  # the candidate's value there

    @property
    def error_norm(self) -> float:
        """L2 norm of the error."""
        return math.sqrt(self.error_squares)

    @property
    def norm(self) -> float:
        """L2 norm of the reference."""
        return math.sqrt(self.squares)

    @property
    def nonfinite(self) -> int:
        """Elements that are NaN or infinite on one side only."""
        return self.nan_reference + self.nan_candidate + self.other_infinities

    @property
    def relative_l2(self) -> float:
        """L2 norm of the error by that of the reference."""
        if not self.error_norm:
            return 0.0
        return self.error_norm / self.norm if self.norm else math.inf


def measure(reference: Tensor, candidate: Tensor) -> Difference:
    """Return what separates two real, strided tensors of one shape."""
    sums = Difference(reference.numel())
    if reference.dtype == candidate.dtype and torch.equal(reference, candidate):
        return sums  # most are, and none is copied
    flat, other = reference.reshape(-1), candidate.reshape(-1)
    place = odd_place = None
    for start in range(0, flat.numel(), CHUNK):
        largest, odd = _add(sums, flat[start : start + CHUNK], other[start : start + CHUNK])
        place = start + largest if largest is not None else place
        odd_place = start + odd if odd is not None and odd_place is None else odd_place
    place = odd_place if odd_place is not None else place
    if place is not None:
        sums.at = tuple(map(int, np.unravel_index(place, reference.shape)))
        sums.expected, sums.found = float(flat[place]), float(other[place])
    return sums


def _add(sums: Difference, reference: Tensor, candidate: Tensor) -> tuple[int | None, int | None]:
    """Add the elements of a chunk; return where its error is the largest yet, or not finite."""
    a, b = reference.double(), candidate.double()
    error, odd = b - a, None
    if not math.isfinite(float(error @ error)):  # else all elements are finite
        nan_a, nan_b, same = a.isnan(), b.isnan(), a == b
        finite = a.isfinite() & b.isfinite()
        apart = ~(finite | same | (nan_a & nan_b))
        sums.nan_both += int((nan_a & nan_b).sum())
        sums.nan_reference += int((nan_a & ~nan_b).sum())
        sums.nan_candidate += int((nan_b & ~nan_a).sum())
        sums.other_infinities += int((apart & ~nan_a & ~nan_b).sum())
        sums.unequal += int(apart.sum())
        odd = int(apart.int().argmax()) if bool(apart.any()) else None
        a, error = (torch.where(finite, one, 0.0) for one in (a, error))
    sums.unequal += int(error.count_nonzero())
    sums.error_squares += float(error @ error)
    sums.squares += float(a @ a)
    error = error.abs_()
    largest = float(error.amax())
    place = int(error.argmax()) if largest > sums.max_abs else None
    sums.max_abs = max(sums.max_abs, largest)
    sums.abs_max = max(sums.abs_max, float(a.abs().max()))
    return place, odd


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


class Judge:
    """Tells of each linked tensor whether it differs by more than rounding explains.

    The request asks for a run of the reference's module; of both models it is told the epsilons.
    """

    def __init__(
        self, runs: TwoRuns, request: Request, factor: float, epsilons: tuple[float, float]
    ) -> None:
        self.runs, self.request, self.factor = runs, request, factor
        self.notes: list[str] = []  # what a reader should know
        self.epsilon = QUANTISED if runs.b.rounds else max(epsilons)
        # machine epsilon of the layers of the reference that are coarser than the rest
        self.coarser = {} if runs.b.rounds else layer_epsilons(runs, self.epsilon)

    def results(self, links: Iterable[Link]) -> list[TensorResult]:
        """Return what became of each linked tensor, and of the gradients without counterpart."""
        results, factor = [TensorResult(one, self.factor) for one in links], self.factor
        self._measure(results)
        self._set_floors(results)
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
            slots = a.entries[link.reference].slot, b.entries[link.candidate].slot
            identity = *slots, link.transposed
            if identity not in known:
                expected, found = link.read(store, a, b)
                off, what = None, f"shape {_shape(found.shape)} instead of {_shape(expected.shape)}"
                if expected.shape == found.shape:
                    off, what = measure(expected, found), ""
                    if off.unequal and not expected.is_floating_point():
                        what = f"{off.unequal} of {off.count} whole numbers differ"
                known[identity] = off, what
            one.difference, one.problem = known[identity]
            shape, is_flowing = b.entries[link.candidate].shape, one.key.role in FLOWING
            if one.difference is not None:
                one.error = one.difference.error_norm, one.difference.max_abs
                is_flowing &= a.entries[link.reference].shape != shape
            one.shape = _shape(shape) if is_flowing else ""

    def _set_floors(self, results: list[TensorResult]) -> None:
        """Set the least noise of each tensor; gradients of a layer's parameters share a scale.

        In a model of several dtypes a tensor has the epsilon of its layer, a gradient that of them
        all. What a coarse layer does to those behind it, perturbed runs tell.
        """
        a, epsilon = self.runs.a, EIGHT_BITS if self.runs.b.rounds else self.epsilon
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
        by_key: dict[Key, list[TensorResult]] = defaultdict(list)
        for one in results:
            by_key[one.key].append(one)

        def beside(key: Key, value: Tensor) -> None:
            seen = dense_values(value).values.cpu() if key in by_key else value
            for one in by_key.get(key, ()):
                expected = self.runs.store[self.runs.a.entries[key].slot]
                if seen.shape == expected.shape:
                    off = measure(expected, seen)
                    one.moved = max(one.moved[0], off.error_norm), max(one.moved[1], off.max_abs)
                    one.measured_by = "quantised" if self.runs.b.rounds else "perturbed"

        for seed in track(range(RUNS), "running the reference perturbed"):
            first = next((one for one in results if one.ratio > self.factor), None)
            if first is None or (seed and first.ratio > SETTLED * self.factor):
                return
            try:  # the copy is not the user's: what it raises or warns of is a note
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    request = perturbed(self.request, self.epsilon, seed, self.coarser)
                    request = replace(request, visitor=Watcher(beside))
                    failure = next(iter(observed(request).errors), "")
            except Exception as error:  # noqa: BLE001 - in another precision it may fail anyhow
                failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if failure:
                self.notes.append(f"the noise could not be measured: {failure}")
                return


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


def machine_epsilon(trace: Trace) -> float:
    """Return the machine epsilon of the precision that a whole model is in.

    It is that of all layers that multiply by a matrix, of what they keep or, as under autocast, of
    what they give. A few coarse layers in the middle are no licence for the rest.
    """
    layers = trace.layers.items()
    products = [
        name
        for name, layer in layers
        if any(len(p.shape) > 1 for p in layer.parameters.values())
        if any(trace.entries[k].dtype.is_floating_point for k in trace.of_role[name, "inputs"])
    ]
    names = products or [name for name, layer in layers if layer.parameters] or [""]
    found = min(_coarsest(trace, name) for name in names) or epsilon_of(torch.float32)
    on_cuda = any(
        p is not None and p.is_cuda for m in trace.modules.values() for p in m._parameters.values()
    )
    return max(found, product_epsilon("cuda", convolutions=True)) if on_cuda else found


def _coarsest(trace: Trace, layer: str) -> float:
    """Return the machine epsilon of a layer: of what it keeps or gives, the coarser."""
    dtypes = kept_dtypes(trace, layer) | given_dtypes(trace, layer)
    return max(map(layer_epsilon, dtypes), default=0.0)


def layer_epsilons(runs: TwoRuns, whole: float) -> dict[str, float]:
    """Return the machine epsilon of each layer of the reference that is coarser than the whole.

    A candidate that computes in less than it keeps its parameters in does something else.
    """
    found = {}
    for name in runs.a.layers:
        other = runs.alignment.to_candidate.get(name)
        kept = set() if other is None else kept_dtypes(runs.b, other)
        epsilon = max([_coarsest(runs.a, name), *map(layer_epsilon, kept)])
        if epsilon > whole:
            found[name] = epsilon
    return found
