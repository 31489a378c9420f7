"""In what precision the two models compute, and so what rounding may do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping

import torch

from pytest_modelhealth.alignment.result import Alignment, Pair, listed
from pytest_modelhealth.comparison.measures import coarser
from pytest_modelhealth.comparison.sides import Side
from pytest_modelhealth.comparison.trace import Trace
from pytest_modelhealth.tolerance import TF32, epsilon_of


def machine_epsilons(ours: Side, theirs: Side, a: Trace, b: Trace) -> tuple[float, float]:
    """Return the machine epsilon of the reference and of the candidate as wholes."""
    return _epsilon(ours, _epsilon_of_whole(a)), _epsilon(theirs, _epsilon_of_whole(b))


def _epsilon_of_whole(trace: Trace) -> float:
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
    found = [epsilon for dtype in kept if (epsilon := _epsilon_of(dtype))]
    return max(min(found, default=0.0), min(map(_epsilon_of, products), default=0.0))


def layer_epsilons(alignment: Alignment, a: Trace, b: Trace, whole: float) -> dict[str, float]:
    """Return the machine epsilon of each layer of the reference that is coarser than the whole.

    It is that of its parameters on either side, or of what it gives in the reference. A candidate
    that computes in less than it keeps its parameters in does something else.
    """
    found = {}
    for name, record in a.observation.layers.items():
        dtypes = {p.dtype for p in record.parameters.values()}
        dtypes |= {str(a.entries[key].dtype) for key in a.of_role[name, "activations"]}
        if (other := alignment.to_candidate.get(name)) is not None:
            dtypes |= {p.dtype for p in b.observation.layers[other].parameters.values()}
        epsilon = max(map(_epsilon_of, dtypes), default=0.0)
        if epsilon > whole:
            found[name] = epsilon
    return found


def parameter_epsilon(pair: Pair, a: Trace, b: Trace) -> float:
    """Return the machine epsilon that the candidate keeps a layer's parameters in, if coarser."""
    ours, theirs = (
        max(
            (_epsilon_of(p.dtype) for p in trace.observation.layers[name].parameters.values()),
            default=0.0,
        )
        for trace, name in ((a, pair.reference or ""), (b, pair.candidate or ""))
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


def notes_on_dtypes(alignment: Alignment, a: Trace, b: Trace) -> Iterator[str]:
    """Yield which layers keep or give numbers of a dtype that they do not on the other side."""
    found: dict[str, list[str]] = defaultdict(list)
    for pair in alignment.pairs:
        if phrase := other_dtypes(pair, a, b):
            found[phrase].append(pair.name or a.observation.model_type)
    for phrase, names in found.items():
        yield f"{listed(names)}: {phrase}"


def other_dtypes(pair: Pair, a: Trace, b: Trace) -> str:
    """Return in what floating dtypes the two layers of a pair differ; ``""`` for in none."""
    if not pair.aligned:
        return ""
    for what, dtypes in (("parameters", _kept), ("output", _given)):
        ours, theirs = dtypes(a, pair.reference or ""), dtypes(b, pair.candidate or "")
        if ours and theirs and ours != theirs:
            is_, was = ("is", "was") if what == "output" else ("are", "were")
            return f"its {what} {is_} {' and '.join(theirs)}, {was} {' and '.join(ours)}"
    return ""


def _kept(trace: Trace, layer: str) -> list[str]:
    dtypes = {p.dtype for p in trace.observation.layers[layer].parameters.values()}
    return sorted(dtype for dtype in dtypes if _epsilon_of(dtype))


def _given(trace: Trace, layer: str) -> list[str]:
    dtypes = {str(trace.entries[key].dtype) for key in trace.of_role[layer, "activations"]}
    return sorted(one.removeprefix("torch.") for one in dtypes if _epsilon_of(one))


def _epsilon_of(dtype: str | torch.dtype) -> float:
    """Return the machine epsilon of a dtype; none for quantised ones, whose steps are measured."""
    name = str(dtype).removeprefix("torch.")
    return 0.0 if name in ("qint8", "quint8") else epsilon_of(name)


def _epsilon(side: Side, seen: float) -> float:
    """Return the machine epsilon of a model's numbers, `seen` in its run, and of its products."""
    found = seen or epsilon_of(torch.float32)
    if any(
        p.is_cuda
        for module in side.modules.values()
        for p in module._parameters.values()
        if p is not None
    ):
        cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        if cuda.allow_tf32 or cudnn.allow_tf32:
            found = max(found, TF32)
    return found


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
