"""Where two models first compute something else: inputs, parameters or computation, and why."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pytest_modelhealth.alignment.causes import MOST_CALLS, CallChange, Causes, TieChange
from pytest_modelhealth.alignment.result import Alignment, Change, Pair
from pytest_modelhealth.comparison.comparison import FORWARD, Divergence
from pytest_modelhealth.comparison.judging import TensorResult
from pytest_modelhealth.comparison.links import parameter_names
from pytest_modelhealth.comparison.operations import Operations
from pytest_modelhealth.comparison.trace import Key, Trace
from pytest_modelhealth.report import LayerRecord, Option, Status
from pytest_modelhealth.tolerance import epsilon_of

Modules = Mapping[str, nn.Module]


class Changed(NamedTuple):
    """What of a layer has other values, a phrase each.

    Args:
        parameters: the parameters.
        others: buffers, and parameters of another size, which a layer may not read in full.
    """

    parameters: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def phrases(self) -> tuple[str, ...]:
        """Both."""
        return self.parameters + self.others


_UNCHANGED = Changed()

SAME = 10
"""Weights of one value may differ by so many epsilons: they were folded or parametrised anew."""


@dataclass(frozen=True)
class Story:
    """All that tells why two models differ.

    Args:
        alignment: which layer is which.
        a: the reference's run.
        b: the candidate's run.
        modules: the modules of both, by name.
        changed: the parameters and buffers of each layer of the reference whose values differ.
        results: what became of each tensor, in order of appearance in the reference.
    """

    alignment: Alignment
    a: Trace
    b: Trace
    modules: tuple[Modules, Modules]
    changed: Mapping[str, Changed]
    results: tuple[TensorResult, ...]

    @cached_property
    def causes(self) -> Causes:
        """What became of calls and ties."""
        return Causes(self.alignment)

    @cached_property
    def operations(self) -> Operations:
        """What became of the operations between layers."""
        names = {theirs: ours for ours, theirs in self.alignment.to_candidate.items()}
        return Operations.of(self.a.observation, self.b.observation, names)

    def first_divergence(self) -> Divergence | None:
        """Return where the two first differ: forward, in what a step leaves behind, or backward."""
        diverged = [result for result in self.results if result.diverged]
        forward = [result for result in diverged if result.key.role in FORWARD]
        weights = self._other_weights()
        if weights is not None and not (forward and self._is_before(forward[0], weights)):
            return self._weights(weights, diverged)
        if forward:
            return self._forward(forward[0], diverged)
        if not diverged:
            return None
        kept = [result for result in diverged if result.key.role == "buffers"]
        return self._buffers(kept, diverged) if kept else self._backward(diverged[0], diverged)

    def _buffers(self, kept: list[TensorResult], diverged: list[TensorResult]) -> Divergence:
        """Return the story of a layer that keeps something else for the next step."""
        first = kept[0]
        name = first.key.layer
        names = [result.key.tensor for result in kept if result.key.layer == name]
        pair = self._pair(name) or _unpaired(name)
        verb = "is" if len(names) == 1 else "are"
        story = f"same output, but after the step {' and '.join(names)} {verb} not the same"
        calls = self._calls_of(name)
        if calls is not None:
            return self._called(calls, first, diverged, story)
        cause = "; ".join(self._settings(pair)) or _NO_SETTING
        return self._made(pair, "buffers", first, diverged, story, cause)

    def _forward(self, first: TensorResult, diverged: list[TensorResult]) -> Divergence:
        name = first.key.layer
        moved = self.alignment.by_reference.get(name)
        calls = self._calls_of(name)
        if first.key.role == "inputs" and calls is not None:
            after = f"the input of {self._label(name)} is not what it was"
            return self._called(calls, first, diverged, after)
        is_moved = moved is not None and moved.change is Change.MOVED
        is_moved = is_moved and not self._unmatched_before(first)[2]
        if first.key.role == "inputs" and moved is not None and is_moved:
            story = "it runs at another place among the layers, on another input"
            return self._made(moved, "moved", first, diverged, story, "")
        if first.key.role == "inputs":
            return self._between(
                first, diverged, _parent(name), f"the input of {self._label(name)}"
            )
        if first.key.role == "outputs":
            return self._between(first, diverged, "", "what the model returns")
        pair = self._pair(name)
        if pair is None or pair.reference is None:
            together = ", ".join(first.candidate)
            story = f"same input, and {together} together give another output"
            return self._made(_unpaired(name), "computation", first, diverged, story, "")
        if self._runs_others(pair.reference) and not self._is_merged(pair):
            return self._between(first, diverged, pair.reference, "")
        return self._own(pair, first, diverged)

    def _other_weights(self) -> TensorResult | None:
        """Return the first output of a layer whose parameters differ, whether or not it diverged.

        What a batch does not show, another will: weights are not rounded, they are given.
        """
        for result in self.results:
            changed = self.changed.get(result.key.layer)
            if result.key.role == "activations" and changed and changed.parameters:
                pair = self.alignment.by_reference.get(result.key.layer)
                if pair is not None and pair.aligned and pair.output_of is None:
                    return result
        return None

    def _is_before(self, first: TensorResult, other: TensorResult) -> bool:
        return self.a.entries[first.key].moment < self.a.entries[other.key].moment

    def _weights(self, output: TensorResult, diverged: list[TensorResult]) -> Divergence:
        """Return the story of a layer that has other weights, on inputs that are right."""
        name = output.key.layer
        pair = self.alignment.by_reference[name]
        values = self.changed[name].parameters
        ties = [tie for tie in self.causes.ties if tie.pair is pair]
        tie = next((t for t in ties if any(v.startswith(f"{t.parameter} ") for v in values)), None)
        if tie is not None:
            cause = "; ".join(values)
            return self._tied(tie, output, diverged, "it has other values", cause)
        if output.diverged:
            return self._own(pair, output, diverged)
        story = "other weights, although on this batch the output is the same up to rounding"
        cause = "; ".join(self.changed[name].parameters)
        return self._made(pair, "parameters", output, diverged, story, cause)

    def _own(self, pair: Pair, first: TensorResult, diverged: list[TensorResult]) -> Divergence:
        """Return the story of a layer whose inputs are right and whose outputs are not."""
        name = pair.reference or ""
        changed = self.changed.get(name, _UNCHANGED).phrases
        if pair.output_of is not None:
            story = f"same input, and its output is not that of {pair.output_of}, which was folded"
            return self._made(pair, "computation", first, diverged, f"{story} into it", "")
        given = "same input" if self.a.of_role[name, "inputs"] else "no input"
        if changed:
            story = f"{given}, other weights, other output"
            return self._made(pair, "parameters", first, diverged, story, "; ".join(changed))
        owns = all(record.parameters for record in self._records(name, pair.candidate or ""))
        same = f"{given}, same weights" if owns else given
        known = (*self._settings(pair), self._operations(pair))
        cause = "; ".join(filter(None, known)) or _NO_SETTING
        return self._made(pair, "computation", first, diverged, f"{same}, other output", cause)

    def _between(
        self, first: TensorResult, diverged: list[TensorResult], parent: str, seen: str
    ) -> Divergence:
        """Return the story of what is wrong although all aligned layers before are right."""
        added, lost, called = self._unmatched_before(first)
        named, seen = seen or f"the output of {self._label(parent)}", seen or "its output"
        if called and not (added or lost):
            story = f"every layer before is right, {named} is not"
            owner = self._pair(self._with_code(parent))
            cause = "; ".join(self._settings(owner)) if owner is not None else ""
            return self._called(called[0], first, diverged, story, called[1:], cause)
        if added or lost:
            pair = (added or lost)[-1]
            parts = [
                f"{what} {', '.join(self._of(pair) for pair in pairs)}"
                for what, pairs in (("inserted", added), ("removed", lost))
                if pairs
            ]
            parts += map(str, called)
            story = f"all before is right, {named} is not; between them: {' and '.join(parts)}"
            return self._made(pair, "inserted" if added else "removed", first, diverged, story, "")
        parent = self._with_code(parent)
        pair = self._pair(parent) or _unpaired(parent)
        before = self._last_good(first)
        after = f" after {self._label(before)}" if before else ""
        changed = self.changed.get(parent, _UNCHANGED).phrases
        if first.problem:
            return self._made(
                pair, "structure", first, diverged, f"{seen} has another form", first.problem
            )
        what = self._operations(pair) or f"its own code{after} changed"
        story = f"every layer before is right, {seen} is not: {what}"
        cause = "; ".join((*changed, *self._settings(pair)))
        return self._made(
            pair, "parameters" if changed else "computation", first, diverged, story, cause
        )

    def _backward(self, first: TensorResult, diverged: list[TensorResult]) -> Divergence:
        name, role = first.key.layer, first.key.role
        pair = self._pair(name) or _unpaired(name)
        if role == "parameter_gradients":
            tensor = f"{self._label(name)}.{first.key.tensor}".lstrip(".")
            story = f"forward is right, and so are all gradients before that of {tensor}"
            tie, calls = self._tie_of(pair, first.key.tensor), self._calls_of(name)
            if tie is not None:
                return self._tied(tie, first, diverged, story)
            if calls is not None:
                return self._called(calls, first, diverged, story)
            return self._made(pair, "backward", first, diverged, story, first.problem)
        consumer = self._consumer(name)
        story = (
            f"forward is right; the gradient that reaches the output of {self._label(name)} is not"
        )
        if consumer is not None:
            story += f", while the one that reaches {self._label(consumer)}, which follows it, is"
            pair = self._pair(consumer) or pair
        else:
            owner = self._pair(self._with_code(_parent(name)))
            story += ": the code behind it changed"
            pair = owner or pair
        around = self._pair(self._with_code(_parent(name)))
        cuts = self._operations(around, backward=True) or self._operations(pair, backward=True)
        cause = cuts or first.problem or _OTHER_BACKWARD
        return self._made(pair, "backward", first, diverged, story, cause)

    def _operations(self, pair: Pair | None, *, backward: bool = False) -> str:
        """Return which operation of the code of a layer is new or gone, where that is known."""
        if pair is None or pair.reference is None or pair.candidate is None:
            return ""
        label = self._of(pair)
        return self.operations.change(pair.reference, pair.candidate, label, backward=backward)

    def _calls_of(self, name: str) -> CallChange | None:
        """Return what became of the calls of a layer, or of one around it."""
        return next((change for change in self.causes.calls if name in change.inside), None)

    def _tie_of(self, pair: Pair, parameter: str) -> TieChange | None:
        """Return what became of the tie of a parameter, seen from either of its layers."""
        for tie in self.causes.ties:
            if pair is tie.owner or (pair is tie.pair and parameter == tie.parameter):
                return tie
        return None

    def _called(
        self,
        change: CallChange,
        first: TensorResult,
        diverged: list[TensorResult],
        story: str,
        others: Sequence[CallChange] = (),
        cause: str = "",
    ) -> Divergence:
        """Return the story of a layer that is called more or less often."""
        more = [str(other) for other in others[: MOST_CALLS - 1]]
        told = "; ".join([change.phrase, *more, story])
        return self._made(change.pair, "calls", first, diverged, told, cause)

    def _tied(
        self,
        tie: TieChange,
        first: TensorResult,
        diverged: list[TensorResult],
        story: str,
        cause: str = "",
    ) -> Divergence:
        """Return the story of a parameter that is no longer one of another layer, or now is."""
        pair = self._pair(first.key.layer) or tie.pair
        made = self._made(pair, "tying", first, diverged, f"{tie.phrase}; {story}", cause)
        return replace(made, label=tie.label)

    def _made(
        self,
        pair: Pair,
        what: str,
        result: TensorResult,
        diverged: list[TensorResult],
        story: str,
        cause: str,
    ) -> Divergence:
        affected = dict.fromkeys(r.key.layer for r in diverged if r.key.role != "outputs")
        others = tuple(name for name in affected if name not in (pair.name, result.key.layer))
        return Divergence(
            layer=pair.name,
            candidate=pair.candidate,
            label=self._of(pair),
            kind=what,
            result=result,
            story=story,
            cause=cause,
            affected=others,
        )

    def _with_code(self, name: str) -> str:
        """Return the nearest module around, `name` included, that is aligned and has a forward.

        A `ModuleList` only holds others: what stands between these is in the code around it.
        """
        layers = self.a.observation.layers
        while name and (self._pair(name) is None or layers[name].status is Status.NOT_CALLED):
            name = _parent(name)
        return name

    def _pair(self, name: str) -> Pair | None:
        """Return the pair of a layer of the reference; of a folded one, that of its host."""
        for pair in self.alignment.pairs:
            if pair.output_of is not None and pair.output_of == name:
                return pair
        found = self.alignment.by_reference.get(name)
        return found if found is not None and found.aligned else None

    def _label(self, name: str) -> str:
        return name or self.a.observation.model_type

    def _of(self, pair: Pair) -> str:
        return pair.name or self.a.observation.model_type

    def _is_merged(self, pair: Pair) -> bool:
        """Whether a container has become one layer with parameters."""
        x, y = self._records(pair.reference or "", pair.candidate or "")
        return bool(y.parameters) and not x.parameters

    def _runs_others(self, name: str) -> bool:
        """Whether other layers ran inside this one."""
        prefix = f"{name}." if name else ""
        layers = self.a.observation.layers
        return any(n != name and n.startswith(prefix) and layers[n].calls for n in layers)

    def _last_good(self, first: TensorResult) -> str | None:
        """Return the layer whose output was the last to be right before `first`."""
        good = None
        for result in self.results:
            if result is first:
                break
            if result.key.role == "activations" and not result.diverged:
                good = result.key.layer
        return good

    def _unmatched_before(
        self, first: TensorResult
    ) -> tuple[list[Pair], list[Pair], list[CallChange]]:
        """Return what was inserted, removed, and called more or less often before `first`.

        That is, between the last good tensor and it; what is called more often comes first.
        """
        start_a = start_b = -1
        for result in self.results:
            if result is first:
                break
            if result.key.role == "activations" and not result.diverged:
                start_a = self.a.entries[result.key].moment
                start_b = max(start_b, self._moment(result))
        stop_a, stop_b = self.a.entries[first.key].moment, self._moment(first)
        added, lost = [], []
        for pair in self.alignment.pairs:
            if pair.reference is None and pair.candidate is not None:
                if _ran(self.b, pair.candidate, start_b, stop_b):
                    added.append(pair)
            elif (
                pair.candidate is None
                and pair.reference is not None
                and pair.reason is None
                and _ran(self.a, pair.reference, start_a, stop_a)
            ):
                lost.append(pair)
        called = [
            change
            for change in self.causes.calls
            if len(_outputs(self.a, change.pair.reference or "", start_a, stop_a))
            != len(_outputs(self.b, change.pair.candidate or "", start_b, stop_b))
        ]
        inside = tuple(f"{change.pair.name}." for change in called)
        lost = [pair for pair in lost if not pair.name.startswith(inside)]
        added = [pair for pair in added if not pair.name.startswith(inside)]
        return added, lost, sorted(called, key=lambda change: not change.more)

    def _moment(self, result: TensorResult) -> int:
        """Return when the counterpart of a tensor appeared in the candidate."""
        key = result.key
        keys = [
            found
            for layer in result.candidate
            for found in self.b.of_role[layer, key.role]
            if found.number == key.number
        ]
        return max((self.b.entries[found].moment for found in keys), default=-1)

    def _consumer(self, name: str) -> str | None:
        """Return the one aligned layer that takes the output of another, with a right gradient."""
        slots = {self.a.entries[key].slot for key in self.a.of_role[name, "activations"]}
        found = [
            key.layer
            for key, entry in self.a.entries.items()
            if key.role == "inputs" and entry.slot in slots and not self._runs_others(key.layer)
        ]
        wrong = {r.key.layer for r in self.results if r.diverged and r.key.role == "gradients"}
        return found[0] if len(found) == 1 and found[0] not in wrong else None

    def other_settings(self) -> dict[str, list[str]]:
        """Return in what settings aligned layers differ, and which layers by their names."""
        found: dict[str, list[str]] = {}
        for pair in self.alignment.pairs:
            for phrase in self._set_up(pair):
                found.setdefault(phrase, []).append(self._of(pair))
        return found

    def _settings(self, pair: Pair) -> Iterator[str]:
        """Yield in what the two layers of a pair differ: their type, mode and settings."""
        if pair.reference is None or pair.candidate is None:
            return
        x, y = self.a.layers[pair.reference], self.b.layers[pair.candidate]
        if x.kind != y.kind or (x.type_name != y.type_name and x.functional == y.functional):
            yield f"it is a {y.type_name}, was a {x.type_name}"
        yield from self._set_up(pair)

    def _set_up(self, pair: Pair) -> Iterator[str]:
        """Yield in what the modes and settings of the two layers of a pair differ."""
        if pair.reference is None or pair.candidate is None:
            return
        x, y = self._records(pair.reference, pair.candidate)
        ours, theirs = (side.get(n) for side, n in zip(self.modules, (x.name, y.name), strict=True))
        if ours is not None and theirs is not None:
            if ours.training != theirs.training:
                yield f"it {_mode(theirs)}, the reference {_mode(ours)}"
            yield from settings_difference(ours, theirs)
        yield from _options_difference(x, y)

    def _records(self, ours: str, theirs: str) -> tuple[LayerRecord, LayerRecord]:
        return self.a.observation.layers[ours], self.b.observation.layers[theirs]


_OTHER_BACKWARD = "its backward changed: a detach(), a custom autograd.Function"
_NO_SETTING = (
    "its settings are the same: the code of its forward changed, or it draws random numbers"
)


def _mode(module: nn.Module) -> str:
    return "is in training mode" if module.training else "is in evaluation mode"


def _unpaired(name: str) -> Pair:
    """Return a stand-in for a layer that has no counterpart of its own."""
    return Pair(name, None, Change.REMOVED)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _ran(trace: Trace, layer: str, start: int, stop: int) -> bool:
    """Whether a layer that computes something itself gave an output in this span of moments."""
    record = trace.observation.layers[layer]
    if record.status is Status.ALIAS_OF_INPUT:
        return False
    inside = any(name.startswith(f"{layer}.") for name in trace.observation.layers)
    return not inside and bool(_outputs(trace, layer, start, stop))


def _outputs(trace: Trace, layer: str, start: int, stop: int) -> list[Key]:
    """Return the outputs that a layer gave in this span of moments."""
    outputs = trace.of_role[layer, "activations"]
    return [key for key in outputs if start < trace.entries[key].moment <= stop]


_PLAIN = (bool, int, float, str, type(None), torch.Size, torch.dtype)
_UNTOLD = {"training", "layer_idx", "layer_id", "call_super_init", "dump_patches"}


def settings_difference(reference: nn.Module, candidate: nn.Module) -> Iterator[str]:
    """Yield each public attribute that both modules have and that differs: ``"eps is 1e-12, was
    1e-05"``.
    """
    theirs = vars(candidate)
    for name, ours in vars(reference).items():
        if name.startswith("_") or name in _UNTOLD or name not in theirs:
            continue
        other = theirs[name]
        if _is_plain(ours) and _is_plain(other):
            if ours != other and not (_is_nan(ours) and _is_nan(other)):
                yield f"{name} is {other}, was {ours}"
        elif _named(ours) != _named(other):
            yield f"{name} is {_named(other)}, was {_named(ours)}"


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return issubclass(type(value), _PLAIN)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _named(value: Any) -> str:
    """Return the name of a function; ``""`` for any other object."""
    if issubclass(type(value), types.FunctionType | types.BuiltinFunctionType):
        return str(value.__qualname__)
    return ""


def _options_difference(x: LayerRecord, y: LayerRecord) -> Iterator[str]:
    if not (x.functional or y.functional):
        return
    options: Mapping[str, Option] = y.options
    for name, ours in x.options.items():
        if name in options and options[name] != ours:
            yield f"{name} is {options[name]}, was {ours}"


def changed_values(
    pair: Pair, a: Trace, b: Trace, modules: tuple[Modules, Modules], epsilon: float
) -> Changed:
    """Return the parameters and buffers of an aligned layer whose values differ.

    Values that differ by no more than rounding to the candidate's dtype are the same.
    """
    x, y = (
        side.get(name or "")
        for side, name in zip(modules, (pair.reference, pair.candidate), strict=True)
    )
    if pair.reference is None or pair.candidate is None or x is None or y is None:
        return _UNCHANGED
    names = parameter_names(pair.reference, pair.candidate, a, b)
    theirs: dict[str, Tensor | None] = {**y._parameters, **y._buffers}

    parameters: list[str] = []
    others: list[str] = []
    for name, own in (*x._parameters.items(), *x._buffers.items()):
        other = theirs.get(names.get(name, name))
        if own is None or other is None or own is other:
            continue
        phrase = _values_difference(name, own, other, epsilon)
        counts = name in x._parameters and own.numel() == other.numel()
        if phrase:
            (parameters if counts else others).append(phrase)
    return Changed(tuple(parameters), tuple(others))


def _dense(tensor: Tensor) -> Tensor:
    """Return a tensor's values as they lie in a plain one, which comparisons need."""
    if tensor.is_nested:
        return tensor.values()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _values_difference(name: str, ours: Tensor, theirs: Tensor, epsilon: float) -> str:
    if ours.is_meta or theirs.is_meta:
        return ""
    with torch.no_grad():
        x, y = (_dense(tensor.detach()).cpu() for tensor in (ours, theirs))
        if x.dtype == y.dtype and torch.equal(x, y):
            return ""
        if x.numel() != y.numel():
            return f"{name} has shape {tuple(y.shape)}, was {tuple(x.shape)}"
        if x.shape != y.shape:
            y = y.T if x.ndim == 2 and x.shape == y.shape[::-1] else y.reshape(x.shape)
        x, y = (t.dequantize() if t.is_quantized else t for t in (x, y))
        wide = torch.complex128 if x.is_complex() else torch.float64
        rounded, x, y = x.to(y.dtype).to(wide), x.to(wide), y.to(wide)
        slack = max(epsilon, SAME * epsilon_of(ours.dtype))
        least = x.abs().clamp_min(float(x.abs().square().mean().sqrt()))
        apart = ((x - y).abs() > slack * least) & (rounded != y)
        apart |= x.isnan() != y.isnan()
        count = int(apart.sum())
        if not count or (x.ndim == 2 and x.shape[0] == x.shape[1] and torch.equal(x, y.T)):
            return ""
        place = tuple(int(i) for i in apart.nonzero()[0])
        at = f"[{', '.join(map(str, place))}]" if place else ""
        return (
            f"{name} differs in {count:,} of {x.numel():,} values: "
            f"{name}{at} is {y[place].item():.6g}, was {x[place].item():.6g}"
        )
