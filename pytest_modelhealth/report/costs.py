"""`Costs`: what one run of a model took in arithmetic and in memory, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """How large a parameter is.

    Args:
        count: number of elements.
        nbytes: what they take.
    """

    count: int
    nbytes: int


@dataclass(frozen=True)
class LayerCosts:
    """What the calls of one layer took, without the layers inside.

    Args:
        multiply_adds: half of the floating-point operations that torch's counter sees, to which a
            multiplication and an addition are two. What it has no formula for (activations,
            normalisations, additions) is 0.
        saved_bytes: storages that autograd keeps for the backward pass, each at the first layer
            that has it saved; without parameters, buffers and the batch, which are there anyway.
            ``None`` where that could not be seen.
        activation_bytes: what the tensors take that its calls returned.
        input_shape, output_shape: of the first tensor that its first call took and returned;
            ``None`` where there was none.
        dtype: of the latter, without ``torch.``.
        parameters: its own, by their own names; a tied one at the first layer that owns it.
    """

    multiply_adds: int = 0
    saved_bytes: int | None = 0
    activation_bytes: int = 0
    input_shape: Shape | None = None
    output_shape: Shape | None = None
    dtype: str = ""
    parameters: Mapping[str, Size] = field(default_factory=dict)


@dataclass(frozen=True)
class Costs:
    """What a run of the model took, measured beside the inspection.

    Args:
        layers: by name, each that was called or owns parameters.
        multiply_adds: of the forward of the model, as in `LayerCosts`.
        saved_bytes: what its forward had saved for the backward pass.
        held_bytes: what parameters, buffers and batch take, each storage once.
        peak_bytes: the most that was held at one time, with `held_bytes` in it: storages of tensors
            on all devices, without what kernels use for themselves.
        backward: whether loss and backward pass are in the peak.
        cuda_peak_bytes: the most that the allocator of CUDA had handed out, less what it had at the
            start, and with what the model and its batch hold there; ``None`` without CUDA.
        why_not: why nothing was measured, a sentence; ``""`` where it was.
        why_not_saved: why `saved_bytes` alone was not.
    """

    layers: Mapping[str, LayerCosts] = field(default_factory=dict)
    multiply_adds: int = 0
    saved_bytes: int | None = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    backward: bool = False
    cuda_peak_bytes: int | None = None
    why_not: str = ""
    why_not_saved: str = ""
