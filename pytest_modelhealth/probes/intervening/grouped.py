"""Rows of a batch that are no samples: those in groups, as of graphs, and nodes of one graph."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_modelhealth.probes.intervening.running import Runs


def groups_in(runs: Runs) -> Tensor | None:
    """Return the vector of the batch that numbers the group of each row, where there is one.

    It is of whole numbers, ascending from 0 without a gap, and some come more than once.
    """
    if runs.has_others or runs.conventions.batch_dim is not None:
        return None
    tensors = runs.tensors
    for tensor in tensors:
        if not _numbers(tensor):
            continue
        rows = len(tensor)
        others = [t for t in tensors if t.ndim and len(t) == rows and t is not tensor]
        edges = [t for t in tensors if t.ndim > 1 and t.shape[1] == rows and _is_whole(t)]
        if others and not edges:  # what as many edges carry could not be told from rows
            return tensor.detach().cpu()
    return None


def nodes_in(runs: Runs) -> str:
    """Return why the rows of a batch are nodes of one graph; ``""`` where nothing says so.

    Whole numbers in pairs, shape (2, edges) or (edges, 2), are rows of what has floating numbers.
    """
    if runs.conventions.batch_dim is not None:
        return ""
    tensors = [tensor for tensor in runs.tensors if tensor.numel()]
    for pairs in tensors:
        if pairs.ndim != 2 or 2 not in pairs.shape or not _is_whole(pairs):
            continue
        least, most = int(pairs.min()), int(pairs.max())
        for nodes in tensors:
            is_pointed_at = nodes.ndim and least >= 0 and len(nodes) // 2 <= most < len(nodes)
            are_rows = nodes.is_floating_point() or len(nodes) != len(pairs)
            if are_rows and is_pointed_at and len(nodes) > 2:
                return (
                    f"the batch pairs its {len(nodes)} rows, as edges do, by a tensor of the shape "
                    f"{tuple(pairs.shape)}: they are nodes, which see each other, and no samples"
                )
    return ""


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _numbers(tensor: Tensor) -> bool:
    """Whether a tensor numbers groups of rows."""
    if tensor.ndim != 1 or len(tensor) < _FEWEST or not _is_whole(tensor):
        return False
    steps = tensor.diff()
    ascends = int(tensor[0]) == 0 and bool(((steps == 0) | (steps == 1)).all())
    return ascends and 0 < int(tensor[-1]) < len(tensor) - 1


_FEWEST = 4
