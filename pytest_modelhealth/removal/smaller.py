"""Makes a smaller copy of a model, without units that can go, and proves that it is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pytest_modelhealth.capture import Request, find_engine
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import Beside
from pytest_modelhealth.capture.step.batch import Inputs, copied_batch
from pytest_modelhealth.capture.step.conversion import copied
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import named_modules, unwrapped
from pytest_modelhealth.removal.following import Followed
from pytest_modelhealth.removal.masking import apply_masks
from pytest_modelhealth.removal.planning import Plan, Step, planned
from pytest_modelhealth.removal.proving import FACTOR, floating, largest_difference, rounding_noise
from pytest_modelhealth.removal.search import multiply_adds
from pytest_modelhealth.removal.surgery import cut
from pytest_modelhealth.removal.ways import held
from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.report.removable import RemovableLayer
from pytest_modelhealth.tolerance import coarsest_epsilon

_MOST = 0.5
"""The largest part of their size by which outputs may differ and the proof still says something."""


@dataclass(frozen=True, repr=False, eq=False)
class SmallerCopy:
    """A smaller copy of a model; `str` is a line, a table and what was left alone.

    Args:
        model: the copy, in the mode that the model is in.
        report: what the batches showed that units were found on.
        cut: the units that it is without, by layer; partners of theirs are among them, such as the
            channels that a depthwise convolution reads.
        refused: by layer, why units that could go are still in it, a phrase.
        sizes: by layer of `cut`, how many units the model has there.
        parameters: elements of all parameters: of the model, and of the copy.
        multiply_adds: of the model and of the copy, a sample; ``None`` where that was not measured.
        difference: by how much outputs of the two differ on a held-out batch in evaluation mode,
            relative to the largest magnitude of an output.
        limit: up to which rounding explains that: measured.
        difference_in_training: the same in training mode, dropout being off; ``None`` where the
            model could not be run so.
    """

    model: nn.Module
    report: HealthReport
    cut: Mapping[str, tuple[int, ...]]
    refused: Mapping[str, str]
    sizes: Mapping[str, int]
    parameters: tuple[int, int]
    multiply_adds: tuple[int, int] | None
    difference: float
    limit: float
    difference_in_training: float | None

    def __str__(self) -> str:
        text: str = self.report.renderer("smaller_copy", "text")(self)
        return text

    def __repr__(self) -> str:
        line: str = self.report.renderer("smaller_copy", "line")(self)
        return line


def smaller_copy(
    model: nn.Module, layers: Mapping[str, RemovableLayer], inputs: Any, report: HealthReport
) -> SmallerCopy:
    """Return a copy of a model without units that can go, whose outputs are the same.

    Args:
        model: the model; it is left as it was, bit for bit, and does not run: copies do.
        layers: the units that can go, by layer.
        inputs: a batch on which the two are compared.
        report: what the batches showed that units were found on.

    Raises:
        InspectionError: nothing can go, or can be cut, with the reason of each layer; or the model
            cannot be copied.
        Exception: whatever the model raises on the batch, untouched.
    """
    return _Maker(model, layers, inputs, report).make()


class _Maker:
    """Makes one smaller copy.

    Args:
        model, layers, inputs, report: as in `smaller_copy`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, RemovableLayer],
        inputs: Any,
        report: HealthReport,
    ) -> None:
        self._layers, self._inputs, self._report = layers, inputs, report
        self._inner = unwrapped(model)
        self._original = Beside(self._copied())
        self._epsilon = coarsest_epsilon(report.observation)

    def make(self) -> SmallerCopy:
        """Return the copy.

        Raises:
            InspectionError: nothing can be cut.
        """
        if not self._layers:
            raise InspectionError(
                f"there is nothing to cut: no unit of {type(self._inner).__name__} is known that "
                "can go"
            )
        if not find_tensors(self._inputs):
            raise InspectionError(
                f"the batch for the proof is of type {type(self._inputs).__name__}, without any "
                "tensor: give what the model is called with, or none for a held-out one"
            )
        if not any(tensor.numel() for tensor in find_tensors(self._inputs)):
            raise InspectionError(
                "the batch for the proof has no samples: give some, or none for a held-out one"
            )
        self._require_same_parameters()
        base = self._outputs(self._original)
        plan = planned(self._runs(), self._layers, _modules(self._original.model), self._epsilon)
        limit = FACTOR * rounding_noise(self._original, self._inputs, base, self._epsilon)
        if not limit < _MOST:
            raise InspectionError(
                f"there is no smaller copy: rounding alone may move outputs by {limit:.3g} of "
                "their size on this batch, so that nothing can be proven"
            )
        proven = self._proven(plan, base, limit)
        refused = {name: "; ".join(reasons) for name, reasons in plan.refused.items()}
        if proven is None:
            raise InspectionError(_nothing_cut(refused))
        model, difference = proven
        return SmallerCopy(
            model,
            self._report,
            MappingProxyType({name: step.gone for step in plan.steps for name in step.layers}),
            MappingProxyType(refused),
            MappingProxyType({name: step.units for step in plan.steps for name in step.layers}),
            (_elements(self._inner), _elements(model)),
            self._costs(model),
            difference,
            limit,
            self._difference_in_training(model),
        )

    def _require_same_parameters(self) -> None:
        """Do nothing if the model has the parameters that it had when it was looked at."""
        modules = _modules(self._original.model)
        for layer in self._layers.values():
            for part in (*layer.produced, *layer.read):
                owner, _, own = part.parameter.rpartition(".")
                found = held(modules[owner], own) if owner in modules else None
                if found is None or found[1].shape != part.shape:
                    raise InspectionError(
                        f"{part.parameter!r} was of shape {tuple(part.shape)} when units were "
                        "looked for, and the model was changed since: call removable again"
                    )

    def _copied(self) -> nn.Module:
        try:
            return copied(self._inner)
        except InspectionError as error:
            raise InspectionError(f"there is no smaller copy: {error}") from error

    def _runs(self) -> list[Followed]:
        """Return what runs in both modes show; in training mode only where the model runs in it."""
        found = [self._followed(evaluation=True)]
        try:
            found.append(self._followed(evaluation=False))
        except Exception:  # noqa: BLE001 - the user's model, which may not be made for training
            return found
        return found

    def _followed(self, *, evaluation: bool) -> Followed:
        """Return what a run shows in which inactive and unread units are masked."""
        model = self._copied().train()
        apply_masks(self._layers, _modules(model))
        pairs = {name: layer.duplicates for name, layer in self._layers.items()}
        followed = Followed(model, pairs)
        with self._running(Beside(model), evaluation=evaluation) as batch:
            followed.run(lambda: model(*batch.args, **batch.kwargs))
        return followed

    @contextmanager
    def _running(self, beside: Beside, *, evaluation: bool) -> Iterator[Inputs]:
        """Let a copy run without gradients, and put everything back; yield a batch of its own."""
        batch = Inputs.of(copied_batch(self._inputs))
        with (
            beside.put_back((batch.args, batch.kwargs), evaluation=evaluation),
            torch.no_grad(),
        ):
            yield batch

    def _outputs(self, beside: Beside, *, evaluation: bool = True) -> Sequence[Tensor]:
        with self._running(beside, evaluation=evaluation) as batch:
            if not evaluation:
                beside.model.train()
            output = beside.model(*batch.args, **batch.kwargs)
            return floating([tensor.detach().clone() for tensor in find_tensors(output)])

    def _cut(self, steps: Iterable[Step]) -> nn.Module:
        model = self._copied()
        cut(steps, _modules(model))
        return model

    def _proven(
        self, plan: Plan, base: Sequence[Tensor], limit: float
    ) -> tuple[nn.Module, float] | None:
        """Return a copy whose outputs are the same, and by how much they differ.

        Where they do not, steps are tried one by one, and those that fail are refused.
        """
        if not plan.steps:
            return None
        model = self._cut(plan.steps)
        difference, failure = self._tried(model, base)
        if difference <= limit:
            return model, difference
        if len(plan.steps) == 1:
            plan.refuse(plan.steps.pop().layers, failure)
            return None
        alone = [(step, *self._tried(self._cut([step]), base)) for step in plan.steps]
        if all(moved <= limit for _, moved, _ in alone):
            for step in plan.steps:
                plan.refuse(step.layers, f"cut together with the others, {failure}")
            plan.steps.clear()
        for step, moved, failure in alone:
            if moved > limit and step in plan.steps:
                plan.refuse(step.layers, failure)
                plan.steps.remove(step)
        return self._proven(plan, base, limit)

    def _tried(self, model: nn.Module, base: Sequence[Tensor]) -> tuple[float, str]:
        """Return by how much outputs of a copy differ, and that as a phrase."""
        try:
            outputs = self._outputs(Beside(model))
        except Exception as error:  # noqa: BLE001 - what the user's code says to other sizes
            first = str(error).strip().partition("\n")[0]
            return float("inf"), f"the model fails without them: {type(error).__name__}: {first}"
        difference = largest_difference(base, outputs, relative=True)
        return difference, f"outputs differ without them, by {difference:.3g} of their size"

    def _costs(self, model: nn.Module) -> tuple[int, int] | None:
        found = []
        for one in (self._original.model, model):
            request = Request(one, self._inputs)
            whole = multiply_adds(find_engine(one), request, Beside(one), self._inputs).whole
            if whole is None:
                return None
            found.append(whole)
        return found[0], found[1]

    def _difference_in_training(self, model: nn.Module) -> float | None:
        try:
            with _WithoutDropout():
                base = self._outputs(self._original, evaluation=False)
                outputs = self._outputs(Beside(model), evaluation=False)
        except Exception:  # noqa: BLE001 - the user's model, which may not be made for training
            return None
        return largest_difference(base, outputs, relative=True)


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return {named.name: named.module for named in named_modules(model)}


def _elements(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _nothing_cut(refused: Mapping[str, str]) -> str:
    told = "\n".join(f"  {name or 'the model'}: {why}" for name, why in refused.items())
    return (
        f"no unit can be cut out, so there is no smaller copy; masks() takes them out too:\n{told}"
    )


class _WithoutDropout(TorchFunctionMode):
    """Lets dropout pass values on as they are: two models of other sizes draw other numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function, unless it is dropout."""
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        return func(*args, **(kwargs or {}))


_DROPOUTS: frozenset[Callable[..., Any]] = frozenset(
    {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
    | {torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout}
)
