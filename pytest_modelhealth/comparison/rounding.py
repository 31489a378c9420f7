"""What rounding may do to the numbers of two models: their precision, and steps of quantisation.

The noise of a quantised candidate is measured by copies of the reference that are moved by up to
half a step wherever the candidate has rounded: weights that it keeps quantised, tensors that were
quantised when it ran, and what layers with quantised weights take, as these may round it inside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pytest_modelhealth.alignment.result import Pair, listed
from pytest_modelhealth.capture import Request, find_engine
from pytest_modelhealth.capture.step.bare import copied
from pytest_modelhealth.comparison.links import Link, parameter_names
from pytest_modelhealth.comparison.measures import coarser
from pytest_modelhealth.comparison.sides import Side
from pytest_modelhealth.comparison.trace import Key, Trace, TwoRuns
from pytest_modelhealth.comparison.weights import fitted, scale_of_folding
from pytest_modelhealth.layers import named_modules, own_parameters
from pytest_modelhealth.statistics.dense import step, step_of_grid
from pytest_modelhealth.tolerance import TF32, epsilon_of, perturbed_batch

INSIDE = 2.0**-7
"""The step in which a layer may round what it takes, by the range of that: seven bits, which torch
uses on some processors for the eight that it says."""


def machine_epsilon(side: Side, trace: Trace) -> float:
    """Return the machine epsilon of the precision that a whole model is in.

    It is that of all parameters, or that in which every layer multiplies by a matrix, as under
    autocast. A few coarse layers in the middle are no licence for the rest.
    """
    layers = trace.observation.layers.items()
    kept = [p.dtype for _, layer in layers for p in layer.parameters.values()]
    kept = kept or [str(trace.entries[key].dtype) for key in trace.of_role["", "outputs"]]
    products = [
        trace.entries[key].dtype
        for name, layer in layers
        if any(len(p.shape) > 1 for p in layer.parameters.values())
        if any(trace.entries[k].dtype.is_floating_point for k in trace.of_role[name, "inputs"])
        for key in trace.of_role[name, "activations"]
    ]
    epsilons = [epsilon for dtype in kept if (epsilon := _epsilon_of(dtype))]
    found = max(min(epsilons, default=0.0), min(map(_epsilon_of, products), default=0.0))
    found = found or epsilon_of(torch.float32)
    on_cuda = any(
        p is not None and p.is_cuda for m in side.modules.values() for p in m._parameters.values()
    )
    allowed = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    return max(found, TF32) if on_cuda and allowed else found


def layer_epsilons(runs: TwoRuns, whole: float) -> dict[str, float]:
    """Return the machine epsilon of each layer of the reference that is coarser than the whole.

    It is that of its parameters on either side, or of what it gives in the reference. A candidate
    that computes in less than it keeps its parameters in does something else.
    """
    found = {}
    for name in runs.a.layers:
        other = runs.alignment.to_candidate.get(name)
        dtypes = {*_kept(runs.a, name), *_given(runs.a, name)}
        dtypes |= set() if other is None else _kept(runs.b, other)
        epsilon = max(map(_epsilon_of, dtypes), default=0.0)
        if epsilon > whole:
            found[name] = epsilon
    return found


def parameter_epsilon(pair: Pair, a: Trace, b: Trace) -> float:
    """Return the machine epsilon that the candidate keeps a layer's parameters in, if coarser."""
    ours, theirs = (
        max(map(_epsilon_of, _kept(trace, name or "")), default=0.0)
        for trace, name in ((a, pair.reference), (b, pair.candidate))
    )
    return theirs if theirs > ours else 0.0


def carried_epsilons(
    own: Mapping[str, float], a: Trace, equal: Container[str], whole: float
) -> dict[str, float]:
    """Return the machine epsilon of each layer of the reference and of all before it in the flow.

    Args:
        own: those of layers that are coarser than the whole.
        a: the reference's run.
        equal: layers that give the same in both models, bit for bit: they pass no rounding on.
        whole: that of all other layers.
    """

    def pass_on(name: str, came: float | None) -> float:
        return whole if name in equal else max(own.get(name, whole), came or whole)

    came: Mapping[str, float]
    flow = a.observation.flow
    if flow is not None and flow.is_exact:
        came = flow.sweep(pass_on, max)
    else:
        came, worst = {}, whole
        for key in a.entries:  # in order of appearance
            came[key.layer] = max(came.get(key.layer, whole), worst)
            worst = max(worst, pass_on(key.layer, None))
    return {name: max(came.get(name, whole), own.get(name, whole)) for name in a.layers}


def notes_on_dtypes(runs: TwoRuns) -> Iterator[str]:
    """Yield which layers keep or give numbers of a dtype that they do not on the other side."""
    found: dict[str, list[str]] = defaultdict(list)
    for pair in runs.alignment.pairs:
        if phrase := other_dtypes(pair, runs.a, runs.b):
            found[phrase].append(pair.name or runs.a.observation.model_type)
    for phrase, names in found.items():
        yield f"{listed(names)}: {phrase}"


def other_dtypes(pair: Pair, a: Trace, b: Trace) -> str:
    """Return in what floating dtypes the two layers of a pair differ; ``""`` for in none."""
    if not pair.aligned:
        return ""
    for what, dtypes in (("parameters are", _kept), ("output is", _given)):
        ours, theirs = (
            sorted(filter(_epsilon_of, dtypes(trace, name or "")))
            for trace, name in ((a, pair.reference), (b, pair.candidate))
        )
        if ours and theirs and ours != theirs:
            was = "were" if dtypes is _kept else "was"
            return f"its {what} {' and '.join(theirs)}, {was} {' and '.join(ours)}"
    return ""


def _kept(trace: Trace, layer: str) -> set[str]:
    return {p.dtype for p in trace.observation.layers[layer].parameters.values()}


def _given(trace: Trace, layer: str) -> set[str]:
    dtypes = (str(trace.entries[key].dtype) for key in trace.of_role[layer, "activations"])
    return {dtype.removeprefix("torch.") for dtype in dtypes}


def _epsilon_of(dtype: str | torch.dtype) -> float:
    """Return the machine epsilon of a dtype; none for quantised ones, whose steps are measured."""
    name = str(dtype).removeprefix("torch.")
    return 0.0 if name in ("qint8", "quint8") else epsilon_of(name)


def coarser_dtype(ours: Side, theirs: Side) -> torch.dtype | None:
    """Return the dtype of the candidate's parameters, if it is coarser than the reference's."""
    dtypes = [
        {p.dtype for p in side.module.parameters() if p.is_floating_point()}
        for side in (ours, theirs)
    ]
    if len(dtypes[0]) != 1 or len(dtypes[1]) != 1 or dtypes[0] == dtypes[1]:
        return None
    (ours_dtype,), (theirs_dtype,) = dtypes
    return theirs_dtype if coarser(ours_dtype, theirs_dtype) == theirs_dtype else None


@dataclass(frozen=True)
class Quantisation:
    """The steps of a candidate, as tensors of the reference have them.

    Args:
        weights: those of parameters, by the names of the layer and of the parameter.
        values: those of what flows.
        rounding: what goes into layers that may round it inside.
    """

    weights: Mapping[tuple[str, str], Tensor]
    values: Mapping[Key, float]
    rounding: Set[Key]

    def rounded(self, request: Request, epsilon: float, seed: int) -> Request:
        """Return a request for a copy with the weights moved by up to half a step.

        Raises:
            InspectionError: the model cannot be copied.
        """
        module = copied(find_engine(request.model).module(request.model))
        generator = torch.Generator().manual_seed(seed)
        modules = {named.name: named.module for named in named_modules(module)}
        for (layer, name), distance in self.weights.items():
            weight = modules[layer]._parameters[name]
            assert weight is not None
            weight.data += _noise(distance, weight, generator)
        inputs = perturbed_batch(request.inputs, epsilon, seed)
        return replace(request, model=module, inputs=inputs, backward=False)

    def step_of(self, key: Key, value: Tensor) -> float:
        """Return the step in which the candidate rounds a tensor of the reference; 0 for none."""
        if key in self.rounding and value.numel():
            return INSIDE * float(value.max().clamp_min(0) - value.min().clamp_max(0))
        return self.values.get(key, 0.0)


def move(value: Tensor, distance: float, seed: int) -> None:
    """Move each element of a tensor of a copy by up to half a step, in place."""
    if distance and value.is_floating_point() and 0 not in value.stride():
        generator = torch.Generator().manual_seed(seed)
        value += _noise(torch.tensor(distance), value, generator)


def _noise(distance: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
    u = torch.rand(like.shape, generator=generator, dtype=torch.float64) - 0.5
    return (u * distance.cpu()).to(like)


def quantisation(runs: TwoRuns, links: Iterable[Link]) -> Quantisation:
    """Return what is known of the steps of a candidate."""
    a, b, store = runs.a, runs.b, runs.store
    weights = dict(_weight_steps(runs))
    weights |= (unread := dict(_unread_steps(runs, {layer for layer, _ in weights})))
    layers = {layer for layer, _ in weights}
    values: dict[Key, float] = {}
    inside = {key for layer, _ in unread for key in a.of_role[layer, "inputs"]}
    seen = {a.entries[key].slot for key in inside}
    for link in links:
        key, entry = link.reference, b.entries[link.candidate[0]]
        slot = a.entries[key].slot
        if key.role not in ("inputs", "activations") or slot in seen:
            continue  # a tensor that appears several times is rounded once
        distance = entry.step or _step_of_grid(store[slot], store[entry.slot])
        if distance:
            values[key] = distance
        elif key.role == "inputs" and key.layer in layers and entry.dtype.is_floating_point:
            inside.add(key)
        if distance or key in inside:
            seen.add(slot)
    return Quantisation(weights, values, inside)


def _weight_steps(runs: TwoRuns) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield the steps of each parameter that the candidate keeps quantised, by its names."""
    for pair, ours, theirs in runs.alignment.aligned:
        module, other = runs.modules[0].get(ours.name), runs.modules[1].get(theirs.name)
        if module is None or other is None:
            continue
        held, folded = own_parameters(other), scale_of_folding(pair, runs.modules[0])
        for name, theirs_name in parameter_names(runs, ours.name, theirs.name).items():
            own, found = module._parameters.get(name), held.get(theirs_name)
            distance = None if found is None else step(found)
            if own is None or found is None or distance is None:
                continue
            distance = fitted(distance, found, own).expand(own.shape)
            if folded is not None:  # by output channel
                rows = folded.abs().clamp_min(1e-12)
                distance = distance / rows.reshape(-1, *[1] * (distance.ndim - 1))
            yield (ours.name, name), distance


def _unread_steps(runs: TwoRuns, read: Container[str]) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield the steps of the matrices that a runtime may keep quantised under other names."""
    if runs.b.is_ordered:  # torch runs it, and all is read
        return
    for layer, module in runs.modules[0].items():
        for name, own in module._parameters.items() if layer not in read else ():
            if own is not None and own.ndim > 1:
                reach = own.detach().max().clamp_min(0) - own.detach().min().clamp_max(0)
                yield (layer, name), INSIDE * reach.double()


def _step_of_grid(expected: Tensor, found: Tensor) -> float:
    """Return the step of a candidate's tensor whose values were rounded and are floats again.

    Where the reference's lie on a grid as well, as pixels do, nobody has rounded them.
    """
    if not found.is_floating_point() or not found.numel():
        return 0.0
    distance = step_of_grid(found)
    return 0.0 if distance and step_of_grid(expected) else distance
