"""An inspector that takes down what its runs are made of, so that one of them can be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from pytest_modelhealth.bundles.packing import qualified_name
from pytest_modelhealth.bundles.state import held_tensors, surroundings
from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.observing.sample_statistics import Collector
from pytest_modelhealth.capture.observing.tensors import find_tensors, version
from pytest_modelhealth.capture.step.isolation import random_state
from pytest_modelhealth.inspector import Inspector
from pytest_modelhealth.layers import Selection
from pytest_modelhealth.report import HealthReport, Observation

Marks = list[tuple[Tensor, int | None]]


@dataclass
class Ran:
    """What a report was made of. It holds model and batches.

    Args:
        of: ``"batch"`` or ``"batches"``.
        model: the module that has the layers.
        compiled: as in `Inspector`.
        number: which inspection of its test it is, counted from 1.
        options: further arguments of `run_inspection` or `run_batches`.
        limit: the most bytes of several batches that are held.
        requests: what was run, in order.
        states: the random state before each.
        surroundings: switches of torch.
        too_large: whether the batches were over the limit, and are not held.
    """

    of: str
    model: nn.Module
    compiled: str
    number: int
    options: dict[str, Any]
    limit: float
    requests: list[Request] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    surroundings: dict[str, Any] = field(default_factory=surroundings)
    too_large: bool = False
    _bytes: int = 0
    _before: Marks = field(default_factory=list)
    _after: list[Any] = field(default_factory=list)

    def add(self, request: Request) -> None:
        """Take down what is about to run."""
        if self.too_large:
            return
        tensors = find_tensors((request.inputs, request.target))
        self._bytes += sum(size(tensor) for tensor in tensors)
        if self.requests and self._bytes > self.limit:
            self.too_large = True
            self.requests, self.states, self._before = [], [], []
            return
        self.requests.append(request)
        self.states.append(random_state())
        self._before += _marks([*tensors, *(() if self._before else self.model.parameters())])

    def end(self) -> None:
        """Take down how model and batches are left."""
        self._after = self._now()

    def written(self) -> list[Tensor]:
        """Return the parameters and tensors of batches that the run wrote to."""
        return [tensor for tensor, before in self._before if version(tensor) != before]

    def is_as_it_was(self) -> bool:
        """Whether nothing of model and batches was written to or replaced since the run."""
        return self._after == self._now()

    def _now(self) -> list[Any]:
        batches = [(request.inputs, request.target) for request in self.requests]
        tensors = [*held_tensors(self.model), *find_tensors(batches)]
        modes = [module.training for module in self.model.modules()]
        return [*((id(t), v, t.requires_grad) for t, v in _marks(tensors)), *modes]


def _marks(tensors: Any) -> Marks:
    return [(tensor, version(tensor)) for tensor in tensors]


def size(tensor: Tensor) -> int:
    """Return how many bytes the values of a tensor take; of one without plain memory, 0."""
    try:
        return tensor.numel() * tensor.element_size()
    except (RuntimeError, ValueError):  # lazy, nested
        return 0


def kept_rules(selection: Selection) -> list[dict[str, Any]]:
    """Return what was watched: a pattern or the text and flags of one, and classes by name."""
    return [
        {
            "pattern": getattr(rule.pattern, "pattern", rule.pattern),
            "flags": getattr(rule.pattern, "flags", None),
            "roles": sorted(rule.roles),
            "types": None if rule.types is None else [*map(qualified_name, rule.types)],
        }
        for rule in selection.rules
    ]


Keep = Callable[[HealthReport, "Ran | None"], object]


class RecordingInspector(Inspector):
    """Hands each report on with what it was made of.

    Attributes:
        count: called when an inspection begins; returns its number.
        keep: called with each report and what it was made of, ``None`` where that cannot be run
            again.
        limit: the most bytes of batches that are held.
    """

    count: Callable[[], int]
    keep: Keep
    limit: float
    _ran: Ran | None = None

    def run_inspection(self, *args: Any, **options: Any) -> HealthReport:
        """As in `Inspector`."""
        names = ("batch_dim", "time_dim", "causal", "padding")
        with self._recording("batch", {name: options.get(name) for name in names}):
            return super().run_inspection(*args, **options)

    def run_batches(self, *args: Any, **options: Any) -> HealthReport:
        """As in `Inspector`."""
        with self._recording("batches", {"training": options.get("training")}):
            return super().run_batches(*args, **options)

    @contextmanager
    def _recording(self, of: str, options: dict[str, Any]) -> Iterator[None]:
        module = self._engine.module(self._model)
        compiled = "observe" if self._engine.compiled else "eager"
        self._ran = Ran(of, module, compiled, self.count(), options, self.limit)
        try:
            yield
        finally:
            self._ran = None

    def _observe(self, request: Request, collectors: tuple[Collector, ...] = ()) -> Observation:
        if self._ran is not None:
            self._ran.add(request)
        return super()._observe(request, collectors)

    def _note_report(self, report: HealthReport) -> None:
        super()._note_report(report)
        if self._ran is not None:
            self._ran.end()
        self.keep(report, self._ran)
