"""Gradients of parameters, averaged over the ranks that share a batch out, once a step is over."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.layer import Held
from pytest_modelhealth.capture.parallel.placements import summed
from pytest_modelhealth.ranks.company import Company

_Name = tuple[str, str, int, str]
"""Layer, own name, number of elements and dtype of a gradient."""


class Averager:
    """Gives gradients as a step of the user's training would leave them on each rank.

    They are changed in place: a local backward pass made them, for the inspection alone. A
    parameter that a rank did not use counts as zeros there, where another rank used it.

    Args:
        company: the ranks.
    """

    def __init__(self, company: Company) -> None:
        self._company = company

    def __call__(self, gradients: list[Held]) -> list[Held]:
        """Return the averaged gradients.

        Raises:
            InspectionError: a rank failed or did not come this far.
        """
        self._company.meeting.agree("its gradients are averaged")
        with torch.no_grad():
            whole = [(layer, name, summed(tensor)) for layer, name, tensor in gradients]
            self._average([held for held in whole if not hasattr(held[2], "device_mesh")])
        return whole

    def _average(self, held: list[Held]) -> None:
        """Average what is no `DTensor`, whose engine has averaged it."""
        ranks = self._company.place.data
        if len(ranks) == 1:
            return
        own = {_name(layer.name, name, tensor): tensor for layer, name, tensor in held}
        names = dict.fromkeys(name for some in self._company.gather([*own], ranks) for name in some)
        for name in names:
            dtype = _wide(name[3])
            if name not in own:
                self._company.total(torch.zeros(name[2], dtype=dtype), ranks)
                continue
            gradient = own[name]
            dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
            total = self._company.total(dense.to(dtype).reshape(-1), ranks)
            gradient.copy_((total / len(ranks)).reshape(gradient.shape))


def _name(layer: str, own: str, tensor: Tensor) -> _Name:
    return layer, own, tensor.numel(), str(tensor.dtype).removeprefix("torch.")


def _wide(dtype: str) -> torch.dtype:
    """Return a dtype that sums of many ranks do not overflow."""
    own: torch.dtype = getattr(torch, dtype)
    return torch.float32 if own.itemsize < 4 else own
