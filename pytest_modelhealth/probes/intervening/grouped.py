"""Groups of rows that are samples, as the graphs of a batch: overwritten, and who sees of that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.probes.intervening.batches import along
from pytest_modelhealth.probes.intervening.differences import Apart, largest, least_apart
from pytest_modelhealth.probes.intervening.locating import Same, parting_at, where_they_part
from pytest_modelhealth.probes.intervening.running import Ran, Runs
from pytest_modelhealth.report import Parting

GROUPS_CHANGED = "the rows of every second group overwritten by its first row"


@dataclass(frozen=True)
class Groups:
    """Which group each row of a batch is in.

    Args:
        numbers: the group of each row, shape (rows,), ascending from 0.
    """

    numbers: Tensor

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.numbers)

    @property
    def count(self) -> int:
        """How many groups there are."""
        return int(self.numbers[-1]) + 1

    def first_rows(self, parity: int) -> Tensor:
        """Return which row each is overwritten by, the groups of a parity being left alone."""
        rows = torch.arange(self.rows)
        first = torch.searchsorted(self.numbers, self.numbers)
        return torch.where(self.numbers % 2 == parity, rows, first)

    def kept(self, tensor: Tensor, parity: int) -> Tensor | None:
        """Return which places of a tensor are of groups that are left alone; ``None`` if unknown.

        It has a row for each row of the batch, or for each group.
        """
        size = len(tensor) if tensor.ndim else 0
        if size == self.rows:
            return along(self.numbers % 2 == parity, tensor, 0)
        if size == self.count:
            return along(torch.arange(size) % 2 == parity, tensor, 0)
        return None

    def same(self, parity: int) -> Same:
        """Return which places of any tensor of the model should not change."""

        def same(tensor: Tensor) -> Iterator[Tensor]:
            found = self.kept(tensor, parity)
            if found is not None:
                yield found

        return same


def groups_in(runs: Runs) -> Groups | None:
    """Return the groups that a vector in the batch puts rows into, where there is one.

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
            return Groups(tensor.detach().cpu())
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
    kinds = tensor.dtype.is_floating_point, tensor.dtype.is_complex, tensor.dtype is torch.bool
    return not any(kinds)


def _numbers(tensor: Tensor) -> bool:
    """Whether a tensor numbers groups of rows."""
    if tensor.ndim != 1 or len(tensor) < _FEWEST or not _is_whole(tensor):
        return False
    steps = tensor.diff()
    ascends = int(tensor[0]) == 0 and bool(((steps == 0) | (steps == 1)).all())
    return ascends and 0 < int(tensor[-1]) < len(tensor) - 1


_FEWEST = 4


def what_groups_see(runs: Runs, groups: Groups) -> tuple[list[Parting], str]:
    """Overwrite the rows of every second group, then those of the others.

    Returns:
        Where groups see each other, if they do, and why nothing can be told, else ``""``.
    """
    base = runs.base
    if base.error:
        return [], f"in evaluation mode the model raises {base.error}"
    judged = [n for n, t in enumerate(base.outputs) if _is_judged(t, groups)]
    if not judged:
        return [], (
            f"no output has a row for each of the {groups.rows} rows or {groups.count} groups of "
            "the batch, so that nothing tells them apart"
        )
    ran = [runs.forward(_overwritten(runs, groups, parity)) for parity in (0, 1)]
    if error := ran[0].error or ran[1].error:
        return [], f"with {GROUPS_CHANGED} the model raises {error}"
    moved = [largest(base.outputs, one.outputs) for one in ran]
    if not any(one is not None and one.effect > 0.0 for one in moved):
        return [], f"with {GROUPS_CHANGED} nothing changes: give rows that differ"

    def kept(n: int, parity: int) -> Iterator[Tensor]:
        return groups.same(parity)(base.outputs[n])

    seen = differing(runs, ran, judged, kept)
    if not seen:
        return [], ""
    found, _, parity = max(seen)
    after_batch = _overwritten(runs, groups, parity)
    place = where_they_part(runs, runs.batch(), after_batch, groups.same(parity))
    return [parting_at("groups", found, place)], runs.unsteady


def differing(
    runs: Runs,
    ran: Sequence[Ran],
    outputs: Iterable[int],
    kept: Callable[[int, int], Iterable[Tensor]],
) -> list[tuple[Apart, int, int]]:
    """Return what differs where nothing was overwritten, with its output and the parity.

    Args:
        runs: the model and its unchanged run.
        ran: with what is odd overwritten, and with what is even.
        outputs: the numbers of the outputs that are judged.
        kept: gives, for an output and a parity, the places that were left alone.
    """
    found = [
        (least_apart(runs.base.outputs[n], one.outputs[n], kept(n, parity)), n, parity)
        for parity, one in enumerate(ran)
        for n in outputs
        if n < len(one.outputs)
    ]
    return [(one, n, parity) for one, n, parity in found if one is not None and one.effect > 0.0]


def _is_judged(output: Tensor, groups: Groups) -> bool:
    is_real = output.is_floating_point() or output.is_complex()
    return is_real and groups.kept(output, 0) is not None


def _overwritten(runs: Runs, groups: Groups, parity: int) -> Inputs:
    """Return the batch with the rows of every second group overwritten by its first.

    The numbers of the groups are the same, and so is what is no row of them, such as edges.
    """
    rows = groups.first_rows(parity)

    def change(_: int, tensor: Tensor) -> Tensor | None:
        if not tensor.ndim or len(tensor) != groups.rows:
            return None
        return tensor.index_select(0, rows.to(tensor.device))

    return runs.changed(change)
