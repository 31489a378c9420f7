"""In what precision the two models compute, and so what rounding may do."""

from __future__ import annotations

import torch

from pytest_modelhealth.comparison.measures import coarser
from pytest_modelhealth.comparison.sides import Side
from pytest_modelhealth.comparison.trace import Trace
from pytest_modelhealth.tolerance import TF32, coarsest_epsilon, epsilon_of


def machine_epsilons(ours: Side, theirs: Side, a: Trace, b: Trace) -> tuple[float, float]:
    """Return the machine epsilon of the reference and of the candidate."""
    return (
        _epsilon(ours, coarsest_epsilon(a.observation)),
        _epsilon(theirs, _epsilon_of_candidate(b)),
    )


def _epsilon_of_candidate(trace: Trace) -> float:
    """Return the machine epsilon of the precision that a candidate as a whole is in.

    It is that of the coarsest parameter or output, or that in which every layer multiplies by a
    matrix, as under autocast. A few coarse layers in the middle are no licence for the rest.
    """
    layers = trace.observation.layers.items()
    kept = [p.dtype for _, layer in layers for p in layer.parameters.values()]
    returned = [trace.entries[key].dtype for key in trace.of_role["", "outputs"]]
    products = [
        trace.entries[key].dtype
        for name, layer in layers
        if any(len(p.shape) > 1 for p in layer.parameters.values()) and _takes_floats(trace, name)
        for key in trace.of_role[name, "activations"]
    ]
    return max(
        max(map(_epsilon_of, kept), default=0.0),
        max(map(_epsilon_of, returned), default=0.0),
        min(map(_epsilon_of, products), default=0.0),
    )


def _epsilon_of(dtype: str | torch.dtype) -> float:
    """Return the machine epsilon of a dtype; none for quantised ones, whose steps are measured."""
    is_quantised = str(dtype).removeprefix("torch.") in ("qint8", "quint8")
    return 0.0 if is_quantised else epsilon_of(dtype)


def _takes_floats(trace: Trace, layer: str) -> bool:
    keys = trace.of_role[layer, "inputs"]
    return any(trace.entries[key].dtype.is_floating_point for key in keys)


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
