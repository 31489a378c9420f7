"""Whether a difference is more than rounding explains: cheap tests first, further runs if need be.

1. Equal elements need no tolerance.
2. A difference within the floor, of epsilon and depth, needs no run.
3. A float64 copy of the reference is the truth: the candidate may be `factor` times as far from it
   as the reference itself. For a candidate of lower precision, the reference is the truth, and a
   copy of it in that precision shows how far rounding takes it.
4. Perturbed copies of the reference confirm what is left, before anything is called a divergence.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from zlib import crc32

import torch
from torch import Tensor, nn

from pytest_modelhealth.alignment.result import Alignment
from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.observing.tensors import TensorStore
from pytest_modelhealth.capture.step.bare import copied, default_dtype
from pytest_modelhealth.comparison.links import BACKWARD, FLOWING, Link, missing_gradients
from pytest_modelhealth.comparison.measures import Difference, equal_nans, gap, measure
from pytest_modelhealth.comparison.precision import carried_epsilons
from pytest_modelhealth.comparison.quantisation import Quantisation, move
from pytest_modelhealth.comparison.trace import Key, Trace, Watcher
from pytest_modelhealth.progress import track
from pytest_modelhealth.settings.setting import is_inside
from pytest_modelhealth.statistics.dense import dense_values
from pytest_modelhealth.tolerance import (
    QUANTISED,
    TRUSTED,
    converted,
    floor,
    observed,
    perturbed,
)

FACTOR = 10.0
"""How many times the natural noise a difference may be."""

DROWNED = 0.5
"""A model whose outputs rounding moves by this much of their size computes something else."""

SETTLED = 5.0
"""The noise of three perturbed runs is less than this multiple of that of the first one."""


@dataclass(frozen=True)
class TensorResult:
    """What became of one tensor of the reference.

    Args:
        key: the tensor.
        candidate: names of the candidate's layers that hold its counterpart.
        difference: what separates the two; ``None`` where they cannot be compared.
        ratio: the error by the natural noise; infinite where no rounding explains it.
        source: what the noise was measured by: ``"equal"``, ``"floor"``, ``"float64"``,
            ``"lower precision"``, ``"perturbed"``, ``"quantised"``, or ``"none"`` where there is
            nothing to measure.
        noise: the natural noise, relative to the reference's norm.
        limit: the ratio up to which the two are equivalent.
        problem: what is wrong, where it is no number that is off: a shape, a missing gradient.
        shape: the candidate's shape, where the tensor flows through the layer in another one; else
            ``""``.
        unseen: why it was not seen, where it is the gradient of a layer without parameters.
        coarse: what rounding does to it, where it leaves little of it.
    """

    key: Key
    candidate: tuple[str, ...]
    difference: Difference | None
    ratio: float
    source: str
    noise: float
    limit: float
    problem: str = ""
    shape: str = ""
    unseen: str = ""
    coarse: str = ""

    @property
    def diverged(self) -> bool:
        """Whether there is more than rounding explains."""
        return self.ratio > self.limit or bool(self.coarse)


@dataclass(eq=False)
class _Case:
    """A linked pair of tensors on its way to a verdict."""

    link: Link
    difference: Difference | None = None
    problem: str = ""
    floor: tuple[float, float] = (0.0, 0.0)
    error: tuple[float, float] = (0.0, 0.0)
    own: tuple[float, float] = (0.0, 0.0)
    noise: tuple[float, float] = (0.0, 0.0)
    source: str = "floor"
    coarse: str = ""

    def is_equal(self) -> bool:
        """Whether the two are equal bit for bit."""
        return self.difference is not None and not self.difference.unequal

    def scale(self) -> tuple[float, float]:
        """Return the natural noise: as L2 norm, and for a single element."""
        own = self.own
        if any(self.noise):
            limit = tuple(TRUSTED * max(n, f) for n, f in zip(self.noise, self.floor, strict=True))
            own = own if own[0] <= limit[0] else (0.0, 0.0)
        norm, largest = (max(x) for x in zip(self.floor, own, self.noise, strict=True))
        return norm, largest

    def take_noise(self, expected: Tensor, seen: Tensor) -> None:
        """Take the noise of a further run."""
        norm, largest = gap(expected, seen)
        self.noise = max(self.noise[0], norm), max(self.noise[1], largest)

    def is_open(self, factor: float) -> bool:
        """Whether further runs may tell."""
        return factor < self.ratio() < math.inf

    def is_implausible(self, epsilon: float) -> bool:
        """Whether the truth is so far from the reference that it may be none."""
        is_told = self.difference is not None and self.source == "float64"
        return is_told and self.own[0] > math.sqrt(epsilon) * self.difference.norm  # type: ignore[union-attr]

    def is_trusted(self, times: float = TRUSTED) -> bool:
        """Whether the reference's own error is no more than so many times what rounding does."""
        return self.own[0] <= times * max(self.noise[0], self.floor[0])

    def is_settled(self, factor: float) -> bool:
        """Whether further perturbed runs, which move the noise a little, leave the verdict."""
        hopeless = not self.is_trusted(SETTLED * TRUSTED)
        return self.ratio() > SETTLED * factor and (hopeless or self.is_trusted())

    def is_drowned(self) -> bool:
        """Whether rounding alone moves the tensor by half its size, and it is off by as much."""
        half = DROWNED * (self.difference.norm if self.difference is not None else math.inf)
        return self.source == "quantised" and min(self.noise[0], self.error[0]) > half

    def ratio(self) -> float:
        """Return the error by the noise, of the norm or of the worst element.

        Of quantised tensors the norm alone: what lies beyond the calibrated range is cut off, of a
        few elements by many steps.
        """
        if self.problem or (self.difference is not None and self.difference.nonfinite):
            return math.inf
        pairs = list(zip(self.error, self.scale(), strict=True))
        pairs = pairs[:1] if self.source == "quantised" else pairs
        return max((e / s if s else math.inf) for e, s in pairs) if any(self.error) else 0.0


@dataclass
class Further:
    """Further runs of the reference.

    Args:
        request: the module that has its layers, batch, target, loss and backward.
        runs: how many perturbed runs at most.
        notes: takes what a reader should know.
    """

    request: Request
    runs: int
    notes: list[str]

    def run(self, made: Callable[[Request], Request], watcher: Watcher) -> str:
        """Run copies of model and batch before `watcher`; return why that failed, if it did.

        The copy is not the user's model: what it raises or warns of is not for them.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                errors = observed(replace(made(self.request), visitor=watcher)).errors
        except Exception as error:  # noqa: BLE001 - a copy in another precision may fail anyhow
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return errors[0] if errors else ""


@dataclass
class Judge:
    """Tells of each linked tensor whether it differs by more than rounding explains.

    Args:
        a: the reference's run.
        b: the candidate's run.
        store: holds the tensors of both.
        further: makes further runs of the reference.
        epsilons: machine epsilon of the reference and of the candidate.
        lower: the dtype of the candidate's parameters, if it is less precise than the reference's.
        factor: how many times the noise a difference may be.
        coarser: machine epsilon of the layers of the reference that are coarser than the rest.
        modules: the modules of the reference, by name.
        rounding: the steps of a quantised candidate.
    """

    a: Trace
    b: Trace
    store: TensorStore
    further: Further
    epsilons: tuple[float, float]
    lower: torch.dtype | None
    factor: float
    coarser: Mapping[str, float]
    modules: Mapping[str, nn.Module]
    rounding: Quantisation | None = None

    def results(self, links: Iterable[Link]) -> list[TensorResult]:
        """Return what became of each linked tensor."""
        cases, factor = [_Case(one) for one in links], self.factor
        self._measure(cases)
        self._set_floors(cases, max(self.epsilons))
        open_ = [case for case in cases if case.is_open(factor)]
        if open_:  # the runs are made, so what is near the limit may be told its true noise too
            open_ = [case for case in cases if case.is_open(factor / 3)]
        if open_ and self.rounding is not None:
            self._measure_rounding(open_, self.rounding)
            _note_drowned(open_)
        elif open_ and self.epsilons[1] > self.epsilons[0]:
            self._measure_lower(open_)
        elif open_:
            self._measure_truth(open_)
        if self.rounding is None and any(
            case.is_open(factor) or case.is_implausible(self.epsilons[0]) for case in open_
        ):
            doubtful = [one for one in open_ if one.is_open(factor / 3) or not one.is_trusted()]
            self._measure_noise(doubtful)
        if self.coarser:
            self._replay(cases)
        return [self._result(case) for case in cases]

    def missing(self, alignment: Alignment) -> list[TensorResult]:
        """Return the gradients that the candidate does not have."""
        return [
            TensorResult(
                key=key,
                candidate=(alignment.to_candidate.get(key.layer, ""),),
                difference=None,
                ratio=math.inf,
                source="none",
                noise=0.0,
                limit=self.factor,
                problem=f"there is no gradient in the candidate: {why}",
                unseen=why * (key.role == "gradients" and not self.a.layers[key.layer].parameters),
            )
            for key, why in missing_gradients(alignment, self.a, self.b)
        ]

    def _result(self, case: _Case) -> TensorResult:
        key, difference, ratio = case.link.reference, case.difference, case.ratio()
        equal, norm = case.is_equal(), difference.norm if difference is not None else 0.0
        unfit = case.link.is_laid_out_otherwise(self.a, self.b)
        unfit |= key.role in FLOWING and difference is None
        return TensorResult(
            key=key,
            candidate=tuple(dict.fromkeys(one.layer for one in case.link.candidate)),
            difference=difference,
            ratio=0.0 if equal else ratio,
            source="equal" if equal else "none" if math.isinf(ratio) else case.source,
            noise=case.scale()[0] / norm if norm else 0.0,
            limit=self.factor,
            problem=case.problem,
            shape=_shape(self.b.entries[case.link.candidate[0]].shape) if unfit else "",
            coarse=case.coarse,
        )

    def _measure(self, cases: list[_Case]) -> None:
        """Measure each difference, once for tensors that are seen several times."""
        known: dict[tuple[object, ...], tuple[Difference | None, str]] = {}
        for case in cases:
            link = case.link
            slot = self.a.entries[link.reference].slot
            identity = slot, link.slots(self.b), link.part, link.transposed
            if identity not in known:
                known[identity] = _difference(*link.read(self.store, self.a, self.b))
            case.difference, case.problem = known[identity]
            if case.difference is not None:
                case.error = case.difference.error_norm, case.difference.max_abs

    def _set_floors(self, cases: list[_Case], epsilon: float) -> None:
        """Set the least noise of each tensor; gradients of a layer's parameters share a scale.

        In a model of several dtypes a tensor has the epsilon of its layer and of those before it, a
        gradient that of them all.
        """
        a, before = self.a, dict[str, float]()
        if self.coarser:
            given = [case for case in cases if case.link.reference.role == "activations"]
            unequal = {case.link.reference.layer for case in given if not case.is_equal()}
            equal = {case.link.reference.layer for case in given} - unequal
            before = carried_epsilons(self.coarser, a, equal, epsilon)
        coarsest = max(self.coarser.values(), default=epsilon)
        for case in cases:
            key, difference = case.link.reference, case.difference
            if difference is None:
                continue
            norm, most, width = difference.norm, difference.abs_max, math.sqrt(difference.count)
            roundings = a.depths[a.entries[key].moment]
            if key.role == "parameter_gradients":
                (rms, abs_max), (terms, term) = _largest_gradient(a, key.layer), _terms(a, key)
                roundings *= terms
                norm = max(norm, rms * width, term * math.sqrt(terms) * width)
                most = max(most, abs_max, term * math.sqrt(terms))
            elif key.role == "buffers":
                rms = _size_of_inputs(a, key.layer)
                norm, most = max(norm, rms * width), max(most, rms)
            own = coarsest if key.role in BACKWARD else before.get(key.layer, epsilon)
            relative = floor(own, roundings)
            case.floor = relative * norm, relative * most

    def _run(
        self,
        what: str,
        cases: list[_Case],
        made: Callable[[Request], Request],
        see: Callable[[_Case, Tensor, Tensor], None],
        changed: Callable[[Key, Tensor], None] | None = None,
    ) -> bool:
        """Show each case its tensors of the reference and a further run; note why that failed."""

        def beside(case: _Case, value: Tensor) -> None:
            expected = self.store[self.a.entries[case.link.reference].slot]
            if value.shape == expected.shape:
                see(case, expected, value)

        failure = self.further.run(made, _Beside(cases, beside, changed))
        if failure:
            self.further.notes.append(f"{what}: {failure}")
        return not failure

    def _measure_truth(self, cases: list[_Case]) -> None:
        found: list[tuple[_Case, tuple[float, float], tuple[float, float]]] = []

        def see(case: _Case, expected: Tensor, truth: Tensor) -> None:
            candidate = case.link.read(self.store, self.a, self.b)[1]
            found.append((case, gap(expected, truth), gap(candidate, truth)))

        what = "the reference has no float64 run to compare with"
        with default_dtype(torch.float64):
            if self._run(what, cases, lambda given: converted(given, torch.float64), see):
                for case, own, error in found:
                    case.own, case.error, case.source = own, error, "float64"

    def _measure_lower(self, cases: list[_Case]) -> None:
        lower = self.lower
        if lower is None:
            return

        def see(case: _Case, expected: Tensor, value: Tensor) -> None:
            case.own, case.source = gap(expected, value), "lower precision"

        what = f"the reference does not run in {lower}"
        self._run(what, cases, lambda given: converted(given, lower, target=False), see)

    def _measure_rounding(self, cases: list[_Case], rounding: Quantisation) -> None:
        """Measure the noise of a quantised candidate by runs that are rounded as it is."""

        def see(case: _Case, expected: Tensor, value: Tensor) -> None:
            case.take_noise(expected, value)
            case.source = "quantised"

        for seed in track(range(self.further.runs), "running the reference rounded"):
            made = partial(rounding.rounded, epsilon=self.epsilons[0], seed=seed)

            def changed(key: Key, value: Tensor, seed: int = seed) -> None:
                move(value, rounding.step_of(key, value), crc32(repr((seed, *key)).encode()))

            what = "the noise of quantisation could not be measured"
            if not self._run(what, cases, made, see, changed):
                self._set_floors(cases, QUANTISED)
                return

    def _measure_noise(self, cases: list[_Case]) -> None:
        """Measure the noise by perturbed runs, until the first case is far beyond its limit."""

        def see(case: _Case, expected: Tensor, value: Tensor) -> None:
            case.take_noise(expected, value)
            if case.source == "floor":
                case.source = "perturbed"

        for seed in track(range(self.further.runs), "running the reference perturbed"):
            epsilon = max(self.epsilons)
            made = partial(perturbed, epsilon=epsilon, seed=seed, coarser=self.coarser)
            if not self._run("the noise could not be measured", cases, made, see):
                return
            first = next((case for case in cases if case.ratio() > self.factor), None)
            if first is None or first.is_settled(self.factor):
                return

    def _replay(self, cases: list[_Case]) -> None:
        """Hold what each layer of a model of several dtypes gives to what it takes.

        What a coarse layer before it does to its input hides what it does itself: so the
        reference's layer is given the candidate's input, where its own gives its own output again.
        """
        a, b, store = self.a, self.b, self.store
        for case in cases:
            key, (other, *more) = case.link.reference, case.link.candidate
            module = self.modules.get(key.layer)
            given, taken = key._replace(role="inputs"), other._replace(role="inputs")
            is_told = key.role != "activations" or case.difference is None or case.is_equal()
            if is_told or more or module is None or any(module.children()):
                continue
            if case.ratio() > self.factor or given not in a.entries or taken not in b.entries:
                continue
            x, y = store[a.entries[given].slot], store[b.entries[taken].slot]
            again = _called(module, x)
            if again is None or not torch.equal(again, store[a.entries[key].slot]):
                continue
            expected, truth = _called(module, y.to(x.dtype)), _called(module, y.double())
            found = store[b.entries[other].slot]
            if expected is None or truth is None or expected.shape != found.shape:
                continue
            least = floor(self.coarser.get(key.layer, max(self.epsilons)), 1)
            norm, most = (torch.linalg.vector_norm(expected.double(), p) for p in (2, math.inf))
            alone = _Case(case.link, error=gap(expected, found), own=gap(expected, truth))
            alone.floor = least * float(norm), least * float(most)
            if alone.ratio() > self.factor:
                case.error, case.floor, case.own = alone.error, alone.floor, alone.own
                case.noise = 0.0, 0.0


def without_effect(results: Iterable[TensorResult]) -> list[TensorResult]:
    """Return the tensors that differ and make no difference to what is computed from them.

    - A tensor in another shape: another order of axes, or one step of a sequence at a time. Element
      by element such tensors tell nothing; the next tensor of the same shape tells.
    - What a layer takes, where all it gives agrees, and the gradients that it passes on: a mask of
      -1e9 for one of -inf, or scores that are shifted before a softmax.
    - A gradient that was not seen at a layer without parameters, where the next one agrees.
    - The gradient of what a layer with others in it returns, where all other gradients agree. A
      tensor that is returned and read inside has both ways in its gradient, a copy of it one.

    Args:
        results: what became of each tensor, in order of appearance.
    """
    results = list(results)
    found = _inputs_without_effect(results)
    known = set(map(id, found))
    for backward in (False, True):
        waiting: list[TensorResult] = []
        for result in results:
            of_this_pass = (result.key.role in BACKWARD) is backward
            if not of_this_pass or result.key.role == "buffers" or id(result) in known:
                continue
            if result.diverged and (result.shape or result.unseen):
                waiting.append(result)
                continue
            if not result.diverged:
                found += waiting
            waiting = []
    return found + _returned_without_effect(results, set(map(id, found)))


def are_one_function(results: Iterable[TensorResult], a: Trace, b: Trace) -> bool:
    """Whether what the models return, keep and learn by is equal bit for bit, whatever is inside.

    Outputs alone tell nothing where they are whole numbers or NaN, nor of a layer whose numbers no
    gradient comes to, as behind a factor of zero.

    Args:
        results: what became of each tensor, in order of appearance.
        a: the reference's run.
        b: the candidate's run.
    """
    results = list(results)
    equal = {
        result.key
        for result in results
        if result.difference is not None
        and not (result.difference.unequal or result.difference.nan_both)
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


def _returned_without_effect(results: list[TensorResult], known: set[int]) -> list[TensorResult]:
    """Return the gradients of outputs of containers that differ, if no other gradient does."""
    backward = [one for one in results if one.key.role in BACKWARD and id(one) not in known]
    right = [one.key.layer for one in backward if not one.diverged]
    wrong = [one for one in backward if one.diverged]
    layers = {one.key.layer for one in wrong if one.key.role == "gradients"}
    is_all = all(one.key.role == "gradients" and not one.problem for one in wrong)
    inside = (any(is_inside(name, layer) for name in right) for layer in layers)
    return wrong if is_all and all(inside) else []


def _inputs_without_effect(results: list[TensorResult]) -> list[TensorResult]:
    """Return the inputs that differ, of layers that give and pass on what they should."""
    given: dict[str, list[TensorResult]] = defaultdict(list)
    passed_on: dict[str, TensorResult] = {}
    last = None
    for result in results:
        layer, role = result.key.layer, result.key.role
        if role != "inputs":
            given[layer].append(result)
        if role in BACKWARD:
            if last is not None and last != layer:
                passed_on.setdefault(last, result)
            last = layer

    def is_without_effect(layer: str) -> bool:
        made = given[layer] + ([passed_on[layer]] if layer in passed_on else [])
        is_seen = any(result.key.role == "activations" for result in made)
        return is_seen and not any(result.diverged for result in made)

    return [
        result
        for result in results
        if result.key.role == "inputs" and result.diverged and is_without_effect(result.key.layer)
    ]


def _difference(expected: Tensor, found: Tensor) -> tuple[Difference | None, str]:
    if expected.shape != found.shape:
        return None, f"shape {_shape(found.shape)} instead of {_shape(expected.shape)}"
    nans = equal_nans(expected, found)
    if nans is not None:
        return Difference(expected.numel(), nan_both=nans), ""
    difference = measure(expected, found)
    if difference.unequal and not expected.is_floating_point():
        return difference, f"{difference.unequal} of {difference.count} whole numbers differ"
    return difference, ""


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _largest_gradient(a: Trace, layer: str) -> tuple[float, float]:
    """Return the largest rms and magnitude among the gradients of a layer's parameters."""
    gradients = a.observation.layers[layer].parameter_gradients.values()
    finite = [one for one in gradients if math.isfinite(one.rms)]
    rms = max((one.rms for one in finite), default=0.0)
    return rms, max((one.abs_max for one in finite), default=0.0)


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
    known = len(shape) == 1 and layer.gradients is not None
    return terms, layer.gradients.rms if known and layer.gradients is not None else 0.0


def _size_of_inputs(a: Trace, layer: str) -> float:
    """Return the root mean square of what a layer takes, and averages in its buffers.

    The mean of inputs that cancel says nothing of their size, which is what rounding goes by.
    """
    inputs = a.observation.layers[layer].inputs
    return inputs.rms if inputs is not None and math.isfinite(inputs.rms) else 0.0


class _Beside(Watcher):
    """Shows each tensor of a further run to the cases of the tensor of its name."""

    def __init__(
        self,
        cases: list[_Case],
        see: Callable[[_Case, Tensor], None],
        changed: Callable[[Key, Tensor], None] | None,
    ) -> None:
        super().__init__()
        self._see_case, self._changed = see, changed
        self._cases: dict[Key, list[_Case]] = defaultdict(list)
        for case in cases:
            self._cases[case.link.reference].append(case)

    def take(self, key: Key, value: Tensor) -> None:
        """Change a tensor in place if asked, then measure it against those that were kept."""
        if self._changed is not None:
            self._changed(key, value)
        for case in self._cases.get(key, ()):
            self._see_case(case, dense_values(value).values.cpu())


def _note_drowned(cases: list[_Case]) -> None:
    """Call what the model returns unlike the reference's where rounding leaves little of it."""
    drowned = [case for case in cases if case.is_drowned()]
    if any(case.link.reference.role == "outputs" for case in drowned):
        for case in drowned:
            size = case.difference.norm if case.difference is not None else 0.0
            moved = f"{case.noise[0] / size:.0%} of its size" if size else "more than its size"
            case.coarse = f"quantised so coarsely that rounding alone moves it by {moved}"


def _called(module: nn.Module, value: Tensor) -> Tensor | None:
    """Return what a copy of a module gives, in the dtype of a value; ``None`` where it raises."""
    try:
        held = copied(module)
        if value.dtype is torch.float64:
            held = held.double()
        place = next((p.device for p in held.parameters()), value.device)
        with torch.no_grad(), torch.random.fork_rng():
            result = held(value.to(place))
    except Exception:  # noqa: BLE001 - it may take more than a tensor, or no such tensor
        return None
    return dense_values(result).values.cpu() if isinstance(result, Tensor) else None
