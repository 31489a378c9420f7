"""Where the first value of a tensor is that is no finite number."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def first_nonfinite(values: Tensor) -> tuple[int, ...] | None:
    """Return the index of the first NaN or infinity in row-major order, or ``None``.

    Args:
        values: real and strided; the caller keeps autograd and the modes that see torch calls off.
    """
    if not values.numel() or values.is_meta:
        return None
    bad = torch.isfinite(values).logical_not_().reshape(-1)
    first = int(bad.to(torch.uint8).argmax())
    if not bool(bad[first]):
        return None
    return tuple(int(place) for place in np.unravel_index(first, tuple(values.shape)))
