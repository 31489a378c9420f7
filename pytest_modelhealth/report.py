"""`HealthReport` and its parts: the frozen result that checks, renderings and snapshots read."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_modelhealth.errors import (
    LayerNotFoundError,
    ModelHealthError,
    ModelHealthWarning,
    suggest,
)
from pytest_modelhealth.settings import Settings, Waiver

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pytest_modelhealth.statistics import TensorStatistics

ROLES = (
    "inputs",
    "activations",
    "gradients",
    "parameters",
    "parameter_gradients",
    "buffers",
)
"""Which tensor of a layer: what `watch(what=...)` and `get_statistics(what=...)` take.

``gradients`` are those of the loss with respect to the activations.
"""


Option = float | int | bool | str | None


class Status(StrEnum):
    """What became of a layer. Every layer ends with one."""

    OBSERVED = "observed"
    NOT_CALLED = "not_called"
    NO_GRAD_PATH = "no_grad_path"
    UNUSED_IN_LOSS = "unused_in_loss"
    ALIAS_OF_INPUT = "alias_of_input"
    OPAQUE = "opaque"
    UNSUPPORTED = "unsupported"


class Verdict(StrEnum):
    """The three outcomes of judging a report."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class LayerRecord:
    """Everything seen of one layer.

    Args:
        name: fully qualified name, as `torch.nn.Module.named_modules` spells it; ``""`` is the
            model itself. A functional activation is named after the module that calls it.
        type_name: class of the module, or the function's name for a functional layer.
        status: what became of it.
        reason: why, where the status is not ``observed``.
        functional: whether it is a function call rather than a module.
        activation: canonical name of the activation function it is (``"relu"``), or ``None``.
        entered: when its first call began, on the clock of all calls and returns of the run;
            ``None`` if it was never called.
        completed: when its last call returned, on the same clock.
        calls: how often it was called.
        aliases: further names of the same module.
        inputs, activations, gradients: statistics over calls and tensors; ``None`` if not seen.
        parameters, parameter_gradients, buffers: statistics by the tensor's own name in the layer;
            a tied weight stands only at the first layer that owns it.
        frozen: names of the parameters that do not require gradients.
        unreached: names of the parameters without a gradient on which, in the graph of autograd, no
            output of the model depends.
        nonfinite_calls: for ``inputs`` and ``activations``, the first call, from 0, in which
            there was a NaN or positive infinity (a mask is made of negative ones); of the first
            batch that had one.
        watched: the roles that were to be observed.
        source: ``path:line`` of the code that calls it, where a traced graph knows it, else ``""``.
        options: how the module or the call is set up, where a check reads it: ``dim`` of a softmax,
            ``training`` of a module, ``num_embeddings`` and ``padding_idx`` of an embedding.
        equal_samples: whether its activations were the same for every sample of the batch; ``None``
            where that was not seen, or there is only one sample.
        equal_input_samples: whether its inputs were; looked at only where `equal_samples` is true,
            and for the model itself.
    """

    name: str
    type_name: str
    status: Status
    reason: str = ""
    functional: bool = False
    activation: str | None = None
    entered: int | None = None
    completed: int | None = None
    calls: int = 0
    aliases: tuple[str, ...] = ()
    inputs: TensorStatistics | None = None
    activations: TensorStatistics | None = None
    gradients: TensorStatistics | None = None
    parameters: Mapping[str, TensorStatistics] = field(default_factory=dict)
    parameter_gradients: Mapping[str, TensorStatistics] = field(default_factory=dict)
    buffers: Mapping[str, TensorStatistics] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    unreached: frozenset[str] = frozenset()
    nonfinite_calls: Mapping[str, int] = field(default_factory=dict)
    watched: frozenset[str] = frozenset(ROLES)
    source: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)
    equal_samples: bool | None = None
    equal_input_samples: bool | None = None

    @property
    def label(self) -> str:
        """The name for people: the class name where the layer is the model itself."""
        return self.name or self.type_name

    def tensors(self, what: str) -> dict[str, TensorStatistics]:
        """Return what was seen in role `what`, by the tensor's own name (``""`` where it has none).

        Raises:
            LayerNotFoundError: `what` is no role.
        """
        if what not in ROLES:
            raise LayerNotFoundError(
                f"unknown role {what!r}{suggest(what, ROLES)} Roles: {', '.join(ROLES)}."
            )
        seen = getattr(self, what)
        if isinstance(seen, Mapping):
            return dict(seen)
        return {} if seen is None else {"": seen}

    def statistics(self, what: str = "activations") -> TensorStatistics | None:
        """Return the statistics of role `what`, merged over its tensors; ``None`` if not seen."""
        merged: TensorStatistics | None = None
        for statistics in self.tensors(what).values():
            merged = statistics if merged is None else merged.merge(statistics)
        return merged

    def why_not_seen(self, what: str) -> str:
        """Return a sentence on why there is nothing in role `what`."""
        if self.status is not Status.OBSERVED:
            why = f"its status is {self.status}: {self.reason}"
        else:
            why = "the layer has none, or watch() left this role out"
        return f"no {what.replace('_', ' ')} were seen of layer {self.label!r}: {why}"

    def merge(self, other: LayerRecord) -> LayerRecord:
        """Return what both saw of this layer; the status is the one that saw more.

        Parameters and buffers are no flow through the layer: they are the later ones.
        """
        fuller = self if _FULLNESS.index(self.status) <= _FULLNESS.index(other.status) else other
        roles = {role: _merged_role(getattr(self, role), getattr(other, role)) for role in _SEEN}
        return replace(
            self,
            status=fuller.status,
            reason=fuller.reason,
            entered=other.entered if self.entered is None else self.entered,
            completed=other.completed if self.completed is None else self.completed,
            calls=self.calls + other.calls,
            parameters={**self.parameters, **other.parameters},
            buffers={**self.buffers, **other.buffers},
            nonfinite_calls=self.nonfinite_calls or other.nonfinite_calls,
            equal_samples=_all_equal(self.equal_samples, other.equal_samples),
            equal_input_samples=_all_equal(self.equal_input_samples, other.equal_input_samples),
            **roles,
        )


_SEEN = ("inputs", "activations", "gradients", "parameter_gradients")
_FULLNESS = (
    Status.OBSERVED,
    Status.ALIAS_OF_INPUT,
    Status.UNUSED_IN_LOSS,
    Status.NO_GRAD_PATH,
    Status.UNSUPPORTED,
    Status.OPAQUE,
    Status.NOT_CALLED,
)


def _all_equal(a: bool | None, b: bool | None) -> bool | None:
    if a is None or b is None:
        return a if b is None else b
    return a and b


def _merged_role(a: Any, b: Any) -> Any:
    if isinstance(a, Mapping):
        return {name: _merged_role(a.get(name), b.get(name)) for name in {**a, **b}}
    if a is None or b is None:
        return a if b is None else b
    return a.merge(b)


@dataclass(frozen=True)
class ClassTargets:
    """Class indices that a loss was given as target.

    Args:
        count: how many there are, those to be ignored among them.
        ignored: how many are to be ignored.
        tail: the index that several samples end in, twice or more; ``None`` if there is none.
        tail_share: share of the targets that are such ends.
    """

    count: int
    ignored: int
    tail: int | None = None
    tail_share: float = 0.0


@dataclass(frozen=True)
class LossCall:
    """One call of a loss function of torch.

    Args:
        function: its name in `torch.nn.functional`.
        layer: the layer whose forward called it; ``None`` where it was called outside the model.
        input: statistics of its first argument.
        target: statistics of its target.
        options: its plain arguments by name; ``weight`` and ``pos_weight`` are true where given.
        value: what it returned, the mean where that is no scalar.
        classes: number of classes in the input; 0 where the function knows none.
        rows: ``"probabilities"`` or ``"log_probabilities"`` where every row of classes is, else
            ``""``; of many rows a sample is looked at.
        over_batch: whether it is the columns that are, each over all samples.
        log_normalizer: median absolute logarithm of what the exponentials of a row sum to; 0 for
            log-probabilities.
        made_by: the operation that made the input (``"softmax"``), where its graph tells.
        made_along: the dimension that the operation ran along.
        targets: what the class indices are, where the target holds such.
    """

    function: str
    layer: str | None
    input: TensorStatistics | None
    target: TensorStatistics | None
    options: Mapping[str, Option] = field(default_factory=dict)
    value: float | None = None
    classes: int = 0
    rows: str = ""
    over_batch: bool = False
    log_normalizer: float | None = None
    made_by: str = ""
    made_along: int | None = None
    targets: ClassTargets | None = None


@dataclass(frozen=True)
class LossPath:
    """How the user's loss was computed from the output of the model.

    Args:
        operations: what autograd recorded between the two, each operation once.
        reaches_output: whether the loss depends on the output.
        sign: 1 if the loss cannot be negative, whatever the output, -1 if it cannot be positive, 0
            where neither is certain.
        uses_target: whether anything was computed from the target; ``None`` if it has no tensors.
        widened: shapes of output and target where arithmetic between the two broadcast both.
    """

    operations: tuple[str, ...] = ()
    reaches_output: bool | None = None
    sign: int = 0
    uses_target: bool | None = None
    widened: tuple[tuple[int, ...], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class UnregisteredParameter:
    """A leaf that got a gradient from the loss and that ``named_parameters()`` does not know.

    Args:
        path: where it sits in the model (``"blocks[0].weight"``); ``""`` where nothing but the
            graph holds it.
        layer: the registered module whose attributes lead to it.
        kind: ``"module"`` if a module owns it that torch does not know to be in the model,
            ``"attribute"`` if it is kept as such, ``"made"`` if the forward made it.
        count: number of its elements.
        gradient: statistics of its gradient.
    """

    path: str
    layer: str
    kind: str
    count: int
    gradient: TensorStatistics | None


@dataclass(frozen=True)
class TaskPair:
    """How the gradients of a task lie to those of a later one.

    Args:
        other: the later task.
        cosines: cosine of the angle between the two by layer, over the layer's own parameters.
    """

    other: str
    cosines: Mapping[str, float]


@dataclass(frozen=True)
class TaskGradients:
    """What one of several named losses asks of the model.

    Args:
        name: name of the task.
        loss: value of its loss.
        gradient_norms: L2 norm of the gradients of a layer's own parameters, by layer, of those
            that it reaches.
        pairs: how these gradients lie to those of each later task that reaches the same layers.
    """

    name: str
    loss: float
    gradient_norms: Mapping[str, float]
    pairs: tuple[TaskPair, ...] = ()


@dataclass(frozen=True)
class Observation:
    """What one run, or several merged ones, saw of a model; made by `capture`.

    Args:
        layers: every layer by name, in execution order, those never called last.
        model_type: class name of the model.
        loss: value of the loss; ``None`` where there was none.
        backward: whether a backward pass ran.
        batches: number of batches merged.
        samples: size of dimension 0 of the model's first input tensor, summed over batches.
        notes: what a reader should know, a sentence each ("eager values of a compiled model").
        errors: errors inside our own hooks; observations that they cost are missing.
        loss_calls: calls of torch's loss functions, in order, those of the first batch.
        loss_path: how the loss was computed from the output of the first batch, where the user
            gave a loss.
        unregistered: leaves with a gradient that are no parameters of the model, those of the first
            batch.
        tasks: what each of several named losses asks of the model, those of the first batch.
    """

    layers: Mapping[str, LayerRecord]
    model_type: str
    loss: float | None = None
    backward: bool = False
    batches: int = 1
    samples: int = 0
    notes: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    loss_calls: tuple[LossCall, ...] = ()
    loss_path: LossPath | None = None
    unregistered: tuple[UnregisteredParameter, ...] = ()
    tasks: tuple[TaskGradients, ...] = ()

    def merge(self, other: Observation) -> Observation:
        """Return what both saw, layer by layer; the loss is the mean over batches."""
        layers = dict(self.layers)
        for name, record in other.layers.items():
            layers[name] = layers[name].merge(record) if name in layers else record
        return Observation(
            layers=layers,
            model_type=self.model_type,
            loss=_mean_loss(self, other),
            backward=self.backward or other.backward,
            batches=self.batches + other.batches,
            samples=self.samples + other.samples,
            notes=tuple(dict.fromkeys((*self.notes, *other.notes))),
            errors=(*self.errors, *other.errors),
            loss_calls=self.loss_calls,
            loss_path=self.loss_path,
            unregistered=self.unregistered,
            tasks=self.tasks,
        )


def _mean_loss(a: Observation, b: Observation) -> float | None:
    if a.loss is None or b.loss is None:
        return a.loss if b.loss is None else b.loss
    return (a.loss * a.batches + b.loss * b.batches) / (a.batches + b.batches)


@dataclass(frozen=True)
class Reference:
    """Statistics in a report: a layer, a role, and the tensor's own name where it has several."""

    layer: str
    role: str
    tensor: str = ""


@dataclass(frozen=True)
class Violation:
    """One broken invariant, and what follows from it.

    Args:
        check: name of the check.
        layer: fully qualified name of the culprit.
        role: which tensor of it.
        value: what was measured.
        limit: the limit it broke; ``None`` where none is a number (nothing may be NaN).
        origin: where the limit came from (``"default"``, ``"pytest.ini: modelhealth_..."``).
        message: what is wrong, one sentence that stands alone.
        cause: the likely cause, one sentence.
        tensor: own name of the tensor (``"weight"``), where the role has several.
        affected: names of the layers that only show what this one began; they are counted for the
            reader, and keep the violation where only they are judged (the setting ``layers``).
        independent: whether no fault elsewhere can bring this about (a graph that is cut, a
            parameter that is not registered); other violations can be consequences.
        evidence: the statistics that were read, the culprit's first, then those of what comes
            before it; the diagnosis fills it in where the check leaves it empty.
        folded: violations that are consequences of this one, in causal order.
    """

    check: str
    layer: str
    role: str
    value: float
    limit: float | None
    origin: str
    message: str
    cause: str
    tensor: str = ""
    affected: tuple[str, ...] = ()
    independent: bool = False
    evidence: tuple[Reference, ...] = ()
    folded: tuple[Violation, ...] = ()

    @property
    def consequences(self) -> int:
        """How many other layers only show what this one began."""
        return len(self.layers) - 1

    @property
    def layers(self) -> tuple[str, ...]:
        """The culprit, then the other layers that show what it began, each once."""
        shown = [name for violation in self.folded for name in violation.layers]
        return tuple(dict.fromkeys((self.layer, *self.affected, *shown)))


@dataclass(frozen=True)
class Inconclusive:
    """A check that had too little evidence to judge a layer, and what it would need."""

    check: str
    layer: str
    reason: str


@dataclass(frozen=True)
class BrokenCheck:
    """A check that raised, or gave something that is no finding; what it found before that stands.

    Args:
        check: its name.
        message: what it did, with the exception's type and text.
        place: ``path:line``, and where it raised the line itself.
    """

    check: str
    message: str
    place: str


@dataclass(frozen=True)
class Judgement:
    """What all checks found in one report under one set of limits.

    Args:
        violations: the gravest first: by check, then in execution order; each with its
            consequences folded under it.
        inconclusive: what could not be judged.
        waived: violations that a waiver accepted, each with its waiver.
        unused_waivers: waivers that accepted nothing.
        warned: violations of checks whose severity is ``warn``, in the order of `violations`.
        broken: checks that failed themselves.
    """

    violations: tuple[Violation, ...] = ()
    inconclusive: tuple[Inconclusive, ...] = ()
    waived: tuple[tuple[Violation, Waiver], ...] = ()
    unused_waivers: tuple[Waiver, ...] = ()
    warned: tuple[Violation, ...] = ()
    broken: tuple[BrokenCheck, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """``unhealthy`` if anything is violated, else whether all could be judged.

        What only warns does not change it; what a broken check was to judge is not judged.
        """
        if self.violations:
            return Verdict.UNHEALTHY
        unjudged = self.inconclusive or self.broken
        return Verdict.INCONCLUSIVE if unjudged else Verdict.HEALTHY

    @property
    def passes(self) -> bool:
        """Whether a test may pass: nothing is violated and every check could run."""
        return not self.violations and not self.broken


Judge = Callable[[Observation, Settings], Judgement]


Noises = Mapping[tuple[str, str, str], Mapping[str, float]]
"""The noise of each statistic by layer, role and own name of a tensor; ``("", "loss", "")`` has
that of the loss as ``"value"``."""


class HealthReport:
    """What an inspection saw, and the verdict on it.

    Reading anything from it but its `repr` counts as looking at it; in a test, a report that was
    never looked at is checked when the test's body ends. ``report["fc1"]`` is a `LayerRecord`,
    `str` a table, `repr` one line. The report is immutable and can be pickled.
    """

    def __init__(
        self,
        observation: Observation,
        settings: Settings,
        judge: Judge,
        noise: Noises | None = None,
    ) -> None:
        self._observation = observation
        self.noise = noise
        """How far rounding alone moves each statistic, where the inspector measured it."""
        self._settings = settings
        self._judge = judge
        self._judged: Judgement | None = None
        self.looked_at = False
        self.judgements: list[Judgement] = []
        """Every judgement so far, those under thresholds of an `assert_healthy` call included."""
        self._told: list[str] = []

    @property
    def observation(self) -> Observation:
        """All that was seen, as data."""
        self.looked_at = True
        return self._observation

    @property
    def settings(self) -> Settings:
        """The limits in force, each with its origin."""
        return self._settings

    @property
    def layers(self) -> Mapping[str, LayerRecord]:
        """Every layer by name, in execution order, those never called last."""
        return MappingProxyType(dict(self.observation.layers))

    @property
    def loss(self) -> float | None:
        """The value of the loss, the mean over batches where there were several."""
        return self.observation.loss

    @property
    def judgement(self) -> Judgement:
        """What the checks found under this report's settings."""
        self.looked_at = True
        if self._judged is None:
            self._judged = self._judge(self._observation, self._settings)
            self.judgements.append(self._judged)
        return self._judged

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Every violation that is not waived, the gravest first."""
        return self.judgement.violations

    @property
    def warnings(self) -> tuple[Violation, ...]:
        """Every violation of a check that only warns, the gravest first."""
        return self.judgement.warned

    @property
    def verdict(self) -> Verdict:
        """``healthy``, ``unhealthy`` or ``inconclusive``."""
        return self.judgement.verdict

    @property
    def healthy(self) -> bool:
        """Whether the verdict is ``healthy``: nothing violated, and enough seen to say so."""
        return self.verdict is Verdict.HEALTHY

    def __getitem__(self, layer: str) -> LayerRecord:
        """Return one layer's record by its name or one of its aliases.

        Raises:
            LayerNotFoundError: no such layer; the message names the nearest.
        """
        layers = self.observation.layers
        if layer in layers:
            return layers[layer]
        for record in layers.values():
            if layer in record.aliases:
                return record
        raise LayerNotFoundError(
            f"{self._observation.model_type} has no layer {layer!r}{suggest(layer, layers)} "
            f"report.layers lists all {len(layers)}."
        )

    def __iter__(self) -> Iterator[LayerRecord]:
        """Iterate over the layers' records in execution order."""
        return iter(self.observation.layers.values())

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self.observation.layers)

    def assert_healthy(self, **thresholds: object) -> None:
        """Do nothing if no invariant is broken; `thresholds` override the report's own.

        An ``inconclusive`` verdict passes: too little evidence is no fault. Violations of checks
        that only warn are given as one `ModelHealthWarning`.

        Raises:
            ModelHealthError: the verdict is ``unhealthy``, and the first line names the worst
                layer; or a check is broken, and the first line names it.
            SettingsError: a threshold has an unknown name, a wrong type or an impossible value.
        """
        __tracebackhide__ = True
        report = self._with(thresholds)
        self.looked_at = True
        error = report.failure()
        if error is not None:
            raise error
        for text in report.take_warnings():
            warnings.warn(text, ModelHealthWarning, stacklevel=2)

    def failure(self) -> ModelHealthError | None:
        """Return the error that `assert_healthy` raises, if it does."""
        if self.judgement.passes:
            return None
        return ModelHealthError(self.render("failure"), self)

    def take_warnings(self) -> list[str]:
        """Return what the judgements so far warn of, a sentence each, and each only once."""
        texts = [self._warning(judgement) for judgement in self.judgements if judgement.warned]
        untold = [text for text in dict.fromkeys(texts) if text not in self._told]
        self._told += untold
        return untold

    def _warning(self, judgement: Judgement) -> str:
        first, *others = judgement.warned
        record = self._observation.layers.get(first.layer)
        label = record.label if record is not None else self._observation.model_type
        more = f" (and {len(others):,} more that only warn)" if others else ""
        return f"{label} ({first.check}): {first.message}{more}"

    def _with(self, thresholds: Mapping[str, object]) -> HealthReport:
        if not thresholds:
            return self
        settings = self._settings.override(thresholds, "argument of assert_healthy")
        report = HealthReport(self._observation, settings, self._judge, self.noise)
        report.judgements, report._told = self.judgements, self._told
        return report

    def render(self, form: str, **options: Any) -> str:
        """Return the report in one of the text formats: a module of `rendering` by its name.

        The formats lie above this module in the order of imports and are looked up by name, so that
        a new one is one new file.
        """
        text: str = _rendering(form).render(self, **options)
        return text

    def __repr__(self) -> str:
        looked_at = self.looked_at
        try:
            return self.render("line")
        finally:
            self.looked_at = looked_at  # a debugger or a log looks, not the test

    def __str__(self) -> str:
        return self.render("terminal")

    def _repr_html_(self) -> str:
        return self.render("html")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dictionaries, lists, numbers and strings."""
        return dict(_rendering("json").to_dict(self))

    def to_json(self, path: str | Path) -> None:
        """Write `to_dict` as JSON."""
        Path(path).write_text(self.render("json"), encoding="utf-8")

    def to_csv(self, path: str | Path) -> None:
        """Write one row a layer, role and tensor."""
        Path(path).write_text(self.render("csv"), encoding="utf-8", newline="")

    def plot_histogram(self, layer: str, what: str = "activations") -> Figure:
        """Return a figure of one layer's histogram."""
        figure: Figure = _rendering("histogram").plot_histogram(self, layer, what)
        return figure

    def plot_histograms(self, pattern: str = "*", what: str = "activations") -> Figure:
        """Return a figure with a histogram for each layer that matches `pattern`."""
        figure: Figure = _rendering("histogram").plot_histograms(self, pattern, what)
        return figure

    def plot_gradient_flow(self) -> Figure:
        """Return a figure of gradient norms through the depth of the model."""
        figure: Figure = _rendering("histogram").plot_gradient_flow(self)
        return figure


def _rendering(name: str) -> Any:
    return importlib.import_module(f"pytest_modelhealth.rendering.{name}")
