"""`Comparison`: the frozen result of comparing two models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_modelhealth.alignment.result import Alignment, Cause, Change, Pair
from pytest_modelhealth.comparison.results import TensorResult
from pytest_modelhealth.errors import LayerNotFoundError, ModelHealthError, suggest
from pytest_modelhealth.report.verdict import HasVerdict, Renderer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORWARD = ("inputs", "activations", "outputs")


@dataclass(frozen=True)
class AlignedLayer:
    """One layer on both sides, and how far its tensors are apart."""

    pair: Pair  # its names, and what became of it
    type_name: str  # its class in the reference, or in the candidate where it was inserted
    tensors: tuple[TensorResult, ...] = ()  # its tensors that were compared, in order of appearance
    changed_parameters: tuple[str, ...] = ()  # its parameters and buffers whose values differ

    @property
    def name(self) -> str:
        """Its name in the reference where it has one there, else in the candidate."""
        return self.pair.name

    @property
    def label(self) -> str:
        """The name for people: the class name where the layer is the model itself."""
        return self.name or self.type_name

    @property
    def diverged(self) -> bool:
        """Whether any of its tensors differs by more than rounding explains."""
        return any(result.diverged for result in self.tensors)

    def worst(self, *roles: str) -> TensorResult | None:
        """Return the tensor furthest beyond its noise, of these roles; ``None`` for none."""
        found = [one for one in self.tensors if not roles or one.key.role in roles]
        errors = {id(one): one.difference.relative_l2 for one in found if one.difference}
        return max(found, key=lambda one: (one.ratio, errors.get(id(one), math.inf)), default=None)


@dataclass(frozen=True)
class Divergence:
    """Where two models first compute something else, and why."""

    layer: str  # name of the culprit in the reference (in the candidate, if it was inserted there)
    candidate: str | None  # its name in the candidate; ``None`` where it was removed
    label: str  # the culprit for people
    # ``"parameters"``, ``"computation"``, ``"inserted"``, ``"removed"``, ``"moved"``, ``"calls"``,
    # ``"tying"``, ``"structure"``, ``"buffers"`` or ``"backward"``
    kind: str
    # the first tensor that diverged
    result: TensorResult | None = field(metadata={"json": False})
    story: str  # what of the culprit is the same and what is not, one sentence
    cause: str  # the likely cause, one sentence; ``""`` where nothing tells
    # names of the other layers that diverged, which only show what began here
    affected: tuple[str, ...] = ()
    # the changes of calls and tied weights that the story names
    causes: tuple[Cause, ...] = field(default=(), metadata={"json": False})
    # ``path:line`` of the code that calls the culprit in the reference and in the candidate; ``""``
    # where that is not known
    called_at: tuple[str, str] = ("", "")


@dataclass(eq=False, repr=False)
class Comparison(HasVerdict):
    """What separates a candidate from its reference, layer by layer.

    `str` is a table through depth, `repr` one line, `bool` is `equivalent`. In a test, a comparison
    whose verdict nobody asked for is checked when the test's body ends: `equivalent`,
    `assert_equivalent` and ``bool(comparison)`` ask for it. What shows where the two
    part, such as `first_divergence`, is evidence and does not.

    Args:
        reference: class name of the reference.
        candidate: class name of the candidate, or what it is.
        alignment: which layer is which.
        layers: every layer of both, by the name in the reference, else in the candidate.
        outputs: the tensors that the models return.
        first_divergence: where they first differ by more than rounding explains, if they do.
        losses: the loss of both, where there was one.
        basis: what the verdict rests on, one phrase.
        notes: what a reader should know, a sentence each.
        renderer: gives the functions that show this.
    """

    reference: str
    candidate: str
    alignment: Alignment
    layers: Mapping[tuple[str | None, str | None], AlignedLayer]
    outputs: tuple[TensorResult, ...]
    first_divergence: Divergence | None
    losses: tuple[float | None, float | None]
    basis: str
    notes: tuple[str, ...] = ()
    renderer: InitVar[Renderer] = field(kw_only=True)

    def __post_init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    @property
    def equivalent(self) -> bool:
        """Whether the two compute the same, as far as rounding lets one tell."""
        self._verdict_asked = True
        return self.first_divergence is None

    @property
    def changed_names(self) -> tuple[Pair, ...]:
        """The layers that were renamed, moved, retyped, inserted or removed."""
        pairs = (p for p in self.alignment.pairs if p.change is not Change.MATCHED)
        return tuple(pair for pair in pairs if not pair.is_out_of_sight)

    @property
    def diverged(self) -> tuple[AlignedLayer, ...]:
        """The layers with a tensor that differs by more than rounding explains."""
        return tuple(layer for layer in self.layers.values() if layer.diverged)

    def __getitem__(self, name: str) -> AlignedLayer:
        """Return a layer by its name in the reference, else in the candidate.

        Raises:
            LayerNotFoundError: neither has such a layer; the message names the nearest.
        """
        pair = self.alignment.by_reference.get(name) or self.alignment.by_candidate.get(name)
        if pair is None:
            known = [*self.alignment.by_reference, *self.alignment.by_candidate]
            raise LayerNotFoundError(f"neither model has a layer {name!r}{suggest(name, known)}")
        return self.layers[pair.reference, pair.candidate]

    def __len__(self) -> int:
        """Return the number of layers, those on one side only included."""
        return len(self.layers)

    def assert_equivalent(self) -> None:
        """Do nothing if the two are equivalent.

        Raises:
            ModelHealthError: they are not. Its first line names the layer where they part.
        """
        __tracebackhide__ = True
        error = self._failure()
        if error is not None:
            raise error

    def _failure(self) -> ModelHealthError | None:
        """Return what `assert_equivalent` raises, or ``None``."""
        return None if self.equivalent else self._denial()

    def _passed(self) -> bool:
        return self.equivalent

    def _denial(self) -> ModelHealthError:
        return ModelHealthError(self._shown("comparison", "failure"), self)

    def __repr__(self) -> str:
        return f"<Comparison {self._shown('comparison', 'line')}>"

    def __str__(self) -> str:
        text: str = self._shown("comparison", "document").text()
        return text

    def _repr_html_(self) -> str:
        return str(self._shown("comparison", "document").html())

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dictionaries, lists, numbers and strings."""
        return dict(self._shown("comparison", "to_dict"))

    def plot_errors(self) -> Figure:
        """Return a figure of the error beside its noise through the depth of the model."""
        figure: Figure = self._shown("figures", "plot_errors")
        return figure
