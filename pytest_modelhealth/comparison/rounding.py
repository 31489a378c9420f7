"""What rounding may do to the numbers of two models: their precision, and steps of quantisation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch

from pytest_modelhealth.alignment.result import Pair, listed
from pytest_modelhealth.comparison.counterparts import parameter_names
from pytest_modelhealth.comparison.layer_differences import fitted, folded_parameters
from pytest_modelhealth.comparison.runs import Trace, TwoRuns
from pytest_modelhealth.layers import own_parameters
from pytest_modelhealth.statistics.dense import step
from pytest_modelhealth.tolerance import Steps, epsilon_of, product_epsilon

INSIDE = 2.0**-7
"""The step of weights that cannot be read, by their range: some processors use 7 bits of 8."""

EIGHT_BITS = 2.0**-5
"""What stands for the machine epsilon of tensors in eight bits, of which some processors use seven:
half a step of a range of eight deviations, by the root mean square."""


def machine_epsilon(trace: Trace) -> float:
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
        p is not None and p.is_cuda for m in trace.modules.values() for p in m._parameters.values()
    )
    return max(found, product_epsilon("cuda", convolutions=True)) if on_cuda else found


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


def quantised_weights(runs: TwoRuns) -> Steps:
    """Return the steps of the candidate's weights, as the reference's have them."""
    weights = {}
    for pair, ours, theirs in runs.alignment.aligned:
        module, other = runs.a.modules.get(ours.name), runs.b.modules.get(theirs.name)
        if module is None or other is None:
            continue
        held, folded = own_parameters(other), folded_parameters(pair, runs.a.modules) or {}
        for name, theirs_name in parameter_names(runs, ours.name, theirs.name).items():
            own, found = module._parameters.get(name), held.get(theirs_name)
            distance = None if found is None else step(found)
            if own is None or found is None or distance is None:
                continue
            distance = fitted(distance, found, own).expand(own.shape)
            if name in folded:  # which scales each output channel
                sizes = [one.detach().abs().flatten(1).sum(1) for one in (folded[name], own)]
                rows = sizes[0] / sizes[1].clamp_min(1e-12)
                distance = distance / rows.clamp_min(1e-12).reshape(-1, *[1] * (own.ndim - 1))
            weights[ours.name, name] = distance
    # torch runs all of others, and their steps are read; a runtime may keep some under other names
    for layer, reference in runs.a.modules.items() if not runs.b.in_torch else ():
        for name, kept in reference._parameters.items():
            if kept is not None and kept.ndim > 1 and (layer, name) not in weights:
                reach = kept.detach().max().clamp_min(0) - kept.detach().min().clamp_max(0)
                weights[layer, name] = (INSIDE * reach.double()).expand(kept.shape)
    return weights
